"""The verbs that go back and apart: plan, fork, rewind, branches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, cast

from safepoint import recovering
from safepoint.checking import check_number
from safepoint.codec import states
from safepoint.errors import Conflict, Damaged, NotFound, SafepointError, UsageError
from safepoint.holding import give_back
from safepoint.model import Call, Checkpoint, State, check_id, from_us, now, to_us
from safepoint.restoring import Wish
from safepoint.restoring import anew as begun_anew
from safepoint.rows import BranchRow, CallRow, CheckpointRow, TaskPatch, TaskRow
from safepoint.rules import planning, recovery
from safepoint.rules.planning import Branch, Candidate, Plan
from safepoint.steps import book_of
from safepoint.stores import holder
from safepoint.stores.base import Store

if TYPE_CHECKING:
    from safepoint.checkpointer import Checkpointer

Journal = Literal["inherit", "block", "fresh"]


class BranchVerbs:
    """Part of ``Checkpointer``."""

    store: Store

    if TYPE_CHECKING:

        def _load(self, task: str, **selector: Any) -> State | None: ...

        def _header(self, task_id: str, row: CheckpointRow) -> Checkpoint: ...

        @staticmethod
        def _no_task(task_id: str) -> NotFound: ...

    # -- what would happen

    def plan(
        self,
        task_id: str,
        *,
        recover: str = "auto",
        health: Any = (),
        requires: Any = (),
        fresh_start: bool = False,
        candidates: int = 5,
    ) -> Plan:
        """What a resume with the same options would do: with which checkpoint it begins, which it passes over and why, and what
        becomes of each recorded call. Changes nothing.

        Args:
            candidates: Look at so many checkpoints at least, to show what a person may choose from.

        Raises:
            NotFound: no such task.
        """
        cp = cast("Checkpointer", self)
        check_number("plan", "candidates", candidates)
        wish = Wish.of(cp, recover=recover, health=health, requires=requires, fresh_start=fresh_start)
        return self._plan(check_id(task_id), wish, candidates=candidates)

    def _plan(self, task_id: str, wish: Wish, *, mine: bool = False, candidates: int = 5) -> Plan:
        cp = cast("Checkpointer", self)
        row = self.store.task(task_id)
        if row is None:
            raise self._no_task(task_id)
        here = next((b for b in self.store.branches(task_id) if b.name == row.branch), None)
        problem: Exception | None = None
        choice = None
        try:
            choice = recovering.choose(cp, row, wish.checks, wish.requires, at_least=max(candidates, 2))
        except Exception as error:
            problem = error
        state, line, guard, asks, anew, branch = None, here.line if here else 1, 0, "", "", row.branch
        if choice is not None:
            state = choice.state
            if state is None and choice.error is None and wish.fresh_start:
                anew = "no checkpoint can be used"
            elif state is None:
                problem = recovering.none_usable(task_id, choice, None)
            elif choice.skipped and wish.recover == "strict":
                problem, state = choice.error, None
            elif wish.recover == "manual" and not self._nothing_to_choose(row, here, choice):
                asks = "a person chooses the checkpoint"
            if state is not None:
                guard = state._base.control.guard
            older = self.store.older(task_id)
            if state is not None and choice.skipped:
                line, guard, branch = self._fallen(choice, older)
            elif anew:
                found = choice.survey
                assert found is not None
                line, guard = begun_anew(found)
                branch = recovering.next_branch(found)
            if older is not None and not (state is not None and choice.skipped):
                guard = max(guard, recovering.guard_for_older(cp, row, older))
        step = state.step if state is not None else 0
        rows, damaged = recovering.recorded_calls(cp, row, line, step) if problem is None else ([], None)
        if damaged is not None:
            guard = max(guard, recovering.guard_for_lost(cp, row, line, step))
            if wish.recover == "strict":
                problem = Damaged(f"records of calls of task {task_id!r} are damaged", "", "")
        shown, broken = self._shown(task_id, rows)
        seq = state.seq if state is not None else (here.head.seq if here is not None and not anew else None)
        return planning.plan(
            row,
            self.store.lease(task_id),
            seq,
            problem,
            line,
            step,
            rows,
            self.store.pauses(task_id),
            lambda r: shown[r.no],
            to_us(now()),
            mine=mine,
            asks=asks,
            anew=anew,
            skipped=choice.skipped if choice is not None and (choice.skipped or problem is None) else None,
            damaged=damaged,
            broken=broken,
            newest=here.head.seq if here is not None else None,
            branch=branch,
            guard=guard if guard > step else 0,
            products=book_of(state._base.control).standings() if state is not None and state._base is not None else {},
            candidates=_candidates(choice, None if state is None or problem is not None else state.seq),
        )

    def _nothing_to_choose(self, row: TaskRow, here: BranchRow | None, choice: recovering.Choice) -> bool:
        if choice.state is None or choice.skipped:
            return False
        if choice.state._base.control.finished:
            return True
        head = choice.survey.header(here.head.seq) if choice.survey is not None and here is not None else None
        return head is not None and here is not None and recovery.set_by_hand(head, here)

    def _fallen(self, choice: recovering.Choice, older: int | None) -> tuple[int, int, str]:
        """Line, guard and branch of the run that falls back."""
        found, state, chosen = choice.survey, choice.state, choice.chosen
        assert found is not None
        assert state is not None
        assert chosen is not None
        left = choice.head_state._base.control.guard if choice.head_state is not None else None
        own = state._base.control.guard
        course = recovering.course_from(found, chosen, journal="inherit", left_guard=left, own_guard=own, older=older)
        return course.line or 1, course.guard, recovering.next_branch(found)

    def _shown(self, task_id: str, rows: list[CallRow]) -> tuple[dict[int, Call], set[int]]:
        """Calls with plain bodies; and the numbers of those whose bodies cannot be read."""
        try:
            bodies, objects = self.store.calls(task_id, nos=[r.no for r in rows])
        except Damaged:
            bodies, objects = rows, {}
        whole = {r.no: r for r in bodies}
        shown, broken = {}, set()
        for row in rows:
            try:
                shown[row.no] = states.call(task_id, whole.get(row.no, row), objects, None)
            except SafepointError:
                shown[row.no] = states.call(task_id, row, None, None)
                broken.add(row.no)
        return shown, broken

    # -- going back

    def rewind(
        self, task_id: str, seq: int | None = None, *, branch: str | None = None, journal: Journal = "inherit"
    ) -> Checkpoint:
        """Make the task go on from an earlier checkpoint, on a new branch that becomes the current one; what is left stays.

        With ``branch`` instead of ``seq``: make that branch the current one, as it stands.

        Args:
            journal: What becomes of the calls of the steps that are done again. ``inherit``: those on record are served, and a
                write that may have been made and has no record is shown to a person. ``block``: nothing is served, and every
                write in a step that the task had come to is shown to a person first. ``fresh``: all is done anew, writes too.

        Returns:
            The new head: a copy of the chosen checkpoint. With ``branch`` the head of it.

        Raises:
            NotFound: no such task, checkpoint or branch. LeaseHeld: a live run holds the task.
            Damaged, NewerFormat: the checkpoint cannot be used; nothing was changed.
        """
        cp = cast("Checkpointer", self)
        if (seq is None) == (branch is None):
            raise UsageError("rewind takes exactly one of seq and branch", "", f"Write rewind({task_id!r}, 3).")
        recovering.check_journal(journal)
        if seq is not None:
            check_number("rewind", "seq", seq)
        if branch is not None:
            check_id(branch, "branch")
        older = recovering.taken_as_it_is(cp, check_id(task_id), seq) if seq is not None else None
        before = self.store.task(task_id)
        if before is None:
            raise self._no_task(task_id)
        # Held while it looks and commits: nobody comes to a step meanwhile that it does not know of.
        grant = self.store.acquire(task_id, holder.describe())
        status = None
        try:
            row = self.store.task(task_id)
            if row is None:  # its files were taken away by hand
                raise self._no_task(task_id)
            if branch is not None:
                head = recovering.switch(cp, row, branch, grant.guard)
                now_there = self._load(task_id)
                assert now_there is not None
                status = _status(before, now_there)
                return self._header(task_id, head)
            assert seq is not None
            chosen = recovering.body(cp, task_id, seq)
            back = self._load(task_id, seq=seq)
            assert back is not None
            found = recovering.survey(cp, row)
            left = recovering.guard_of_head(cp, task_id)

            def course(there: recovering.Survey) -> recovery.Course:
                own = recovering.guard_in(back)
                return recovering.course_from(there, chosen, journal=journal, left_guard=left, own_guard=own, older=older)

            status = _status(before, back)
            patch = TaskPatch(status=status, reason=f"rewound to {seq}", guarded=older is not None)
            new = recovering.branch_off(
                cp, found, chosen, course(found), name=None, kind="manual", guard=grant.guard, patch=patch, again=course
            )
            recovering.log.info("rewound %s to %d: %s@%d on branch %s", task_id, seq, task_id, new.seq, new.branch)
            return self._header(task_id, new)
        finally:
            give_back(self.store, task_id, grant, TaskPatch(status=status or _as_before(before)))

    def fork(
        self, task_id: str, seq: int | None = None, *, name: str | None = None, journal: Journal = "inherit"
    ) -> Checkpoint:
        """Begin a branch beside the current one, which stays the current one. Free: nothing is copied. A live run goes on.

        To work on it: ``load(task, branch=…)`` and ``save``, or ``resume(task, branch=…)``, which makes it the current one.

        Args:
            seq: Where it begins; the current head by default.
            name: Of the branch; ``main~1`` and so on by default.
            journal: As for ``rewind``.

        Raises:
            NotFound: no such task or checkpoint. Conflict: there is a branch of that name.
        """
        cp = cast("Checkpointer", self)
        recovering.check_journal(journal)
        if name is not None:
            check_id(name, "name")
        if seq is not None:
            check_number("fork", "seq", seq)
        row = self.store.task(check_id(task_id))
        if row is None or row.head is None:
            raise self._no_task(task_id)
        chosen = recovering.body(cp, task_id, row.head.seq if seq is None else seq)
        own = recovering.guard_in(self._load(task_id, seq=chosen.seq))
        found = recovering.survey(cp, row)
        if name is not None and found.branch(name) is not None:
            raise Conflict(f"task {task_id!r} has a branch {name!r} already", "", "Choose another name.", task=task_id)
        left = found.branch(chosen.branch)
        known = own if left is None or left.head.seq == chosen.seq else recovering.guard_of_head(cp, task_id, chosen.branch)

        def course(there: recovering.Survey) -> recovery.Course:
            return recovering.course_from(there, chosen, journal=journal, left_guard=known, own_guard=own, left=chosen.branch)

        new = recovering.branch_off(cp, found, chosen, course(found), name=name, kind="manual", current=False, again=course)
        return self._header(task_id, new)

    def branches(self, task_id: str) -> list[Branch]:
        """The task's branches, by the checkpoint that they began with. NotFound if there is no such task."""
        row = self.store.task(check_id(task_id))
        if row is None:
            raise self._no_task(task_id)
        found = []
        for b in self.store.branches(task_id):
            ends = self.store.headers(task_id, branch=b.name)
            ends = [r for r in ends if r.kind != "failure"]
            head = ends[0] if ends else None
            found.append(
                Branch(
                    task_id=task_id,
                    name=b.name,
                    seq=b.head.seq,
                    current=b.name == row.branch,
                    forked_from=b.forked_from,
                    line=b.line,
                    step=head.step if head is not None else None,
                    kept=len(ends),
                    created_at=from_us(ends[-1].created_at) if ends else None,
                    updated_at=from_us(head.created_at) if head is not None else None,
                )
            )
        return sorted(found, key=lambda b: (b.forked_from or 0, b.name))


def _status(before: TaskRow, state: State) -> str:
    """Of a task whose head was put elsewhere."""
    if state._base.control.finished:
        return "finished"
    return "idle" if before.status == "idle" else "interrupted"


def _as_before(before: TaskRow) -> str:
    return "interrupted" if before.status == "running" else before.status


def _candidates(choice: recovering.Choice | None, taken: int | None) -> tuple[Candidate, ...]:
    if choice is None:
        return ()
    found = []
    for v in choice.verdicts:
        row = choice.survey.header(v.seq) if choice.survey is not None else None
        if row is None:
            found.append(Candidate(v.seq, str(v), taken=v.seq == taken))
            continue
        when = from_us(row.created_at)
        found.append(Candidate(v.seq, str(v), row.step, row.branch, row.kind, row.label, when, v.seq == taken))
    return tuple(found)

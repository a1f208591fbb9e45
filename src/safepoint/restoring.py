"""How a run comes to its state: the newest checkpoint, or another one by the rules of recovery; and what it settles before any
step code runs."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import msgspec

from safepoint import looking, recovering, resources, tails
from safepoint._probe import at
from safepoint.calling import Flow
from safepoint.checking import check_number
from safepoint.codec import states
from safepoint.codec.states import Control
from safepoint.ending import Ending
from safepoint.errors import Damaged, DecisionNeeded, InDoubt, UsageError
from safepoint.flow import Counters
from safepoint.model import Metrics, Recovery, State, a_type, check_id, now, to_us
from safepoint.replies import in_doubt_error
from safepoint.rows import BranchRow, CallRow, CallWrite, Grant, Head, PauseRow, TaskPatch, TaskRow, replace
from safepoint.rules import health, journal, planning, quarantine, recovery
from safepoint.rules.health import Check
from safepoint.rules.journal import Action
from safepoint.rules.recovery import Course
from safepoint.script import Io, Script

if TYPE_CHECKING:
    from safepoint.checkpointer import Checkpointer
    from safepoint.model import Checkpoint

log = logging.getLogger("safepoint")

Prepare = Callable[[State, Control], TaskPatch]
"""Puts a new task's job into its first state."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What the caller wants of recovery."""

    recover: str
    checks: tuple[Check, ...]
    requires: tuple[str, ...]
    fresh_start: bool
    at: int | None
    branch: str | None
    mend: bool | None = True
    """Of the end of ``messages``; None leaves what a step ended with for the next step to answer."""

    @classmethod
    def of(
        cls,
        cp: Checkpointer,
        *,
        recover: str = "auto",
        health: Any = (),
        requires: Any = (),
        fresh_start: bool = False,
        at: int | None = None,
        branch: str | None = None,
        mend: bool | None = True,
    ) -> Self:
        if recover not in recovery.MODES:
            shown = repr(recover) if isinstance(recover, str) else a_type(recover)
            raise UsageError(f"recover={shown} is not available", "", f"Use one of {', '.join(recovery.MODES)}.")
        if type(fresh_start) is not bool:
            raise UsageError("fresh_start= must be a bool", f"it is {a_type(fresh_start)}", "Pass True or False.")
        if mend is not None and type(mend) is not bool:
            raise UsageError("mend= must be a bool or None", f"it is {a_type(mend)}", "Leave it out.")
        if fresh_start and recover != "auto":
            raise UsageError(f'fresh_start=True does not go with recover="{recover}"', "", 'Leave recover= at "auto".')
        if at is not None:
            check_number("resume", "at", at)
        if branch is not None:
            check_id(branch, "branch")
        if at is not None and branch is not None:
            raise UsageError("at= and branch= were given", "a checkpoint lies on a branch already", "Give one of them.")
        checks = (*cp.health, *health_of(health))
        return cls(recover, checks, health_paths(requires), fresh_start, at, branch, mend)


def health_of(given: Any) -> tuple[Check, ...]:
    return health.checks(given)


def health_paths(given: Any) -> tuple[str, ...]:
    return health.paths(given)


@dataclass(slots=True)
class _Start:
    """What a run starts from."""

    state: State | None
    how: Recovery
    task: TaskRow
    line: int = 1
    why: str = ""
    """Of the guard."""
    saved: Any = None
    """When the state was saved that it is."""


class Restoring(Ending):
    """Part of a run."""

    _wish: Wish
    _older: int | None
    """How many checkpoints the store lacked when it was accepted as it stands, until that is under a guard."""
    _prepare: Prepare | None
    _steps: dict[int, list[CallRow]]
    _pauses: list[PauseRow]
    _first_save: bool
    recovery: Recovery
    is_new: bool

    if TYPE_CHECKING:

        def _open_step(self) -> None: ...

        def unanswered(self) -> list[PauseRow]: ...

        def _unanswered_error(self, *rows: PauseRow) -> DecisionNeeded: ...

        @property
        def metrics(self) -> Metrics: ...

        def _save(
            self, *, kind: str, label: str | None = None, patch: TaskPatch | None = None, moves_head: bool = True
        ) -> Checkpoint: ...

    def _restore(self) -> Script[None]:
        assert self._grant is not None
        # In one piece, as what is decided on is what is then committed on.
        start: _Start = yield Io(self._choose)
        state = start.state
        self._task = start.task
        self.is_new = state is None or start.how.mode == "fresh"
        self._state = state if state is not None else self._blank()
        self._control = state._base.control.copy() if state is not None else Control()
        if self._wish.requires:
            self._control.requires = self._wish.requires
        self._flow = Flow(
            cp=self.cp,
            task=self.task_id,
            guard=self._grant.guard,
            presumed=self._grant.presumed,
            line=start.line,
            caller=weakref.ref(self),
            base=state._base if state is not None else None,
        )
        if self._older is not None:
            start.why = yield Io(lambda: self._stand_beyond(start.task))
        self._flow.parks_below, self._flow.parks_why = self._control.guard, start.why
        self._flow.counters = yield Io(lambda: self._counters(start.task.attempts))
        if state is None:
            # An intent stands on a durable checkpoint: a new task's first one is the state before its first step.
            patch = self._prepare(self._state, self._control) if self._prepare else None
            self._first_save = False
            yield Io(lambda: self._save(kind="step", patch=patch))
            self._open_step()
            return
        yield from self._settle_open(start)
        yield from resources.restored(self)
        log.info("resumed %s@%s (%s)", self.task_id, start.how.seq or state.seq, _how(state, start, self._grant, self.recovery))

    # -- which checkpoint

    def _choose(self) -> _Start:
        cp, task, wish = self.cp, self.task_id, self._wish
        if self._older is None:
            self._older = cp.store.older(task)
        row = cp.store.task(task)
        if row is None:  # acquired, and then its files were taken away by hand
            raise cp._no_task(task)
        if wish.branch is not None and wish.branch != row.branch:
            row = self._switched(row, wish.branch)
        if wish.at is not None:
            head = row.head
            if head is None or head.seq != wish.at or self._older is not None:
                return self._start_at(row, wish.at)
            return self._start_head(row, self._or_raise(row, looking.look(cp, task, None, ())))
        if wish.recover == "auto":
            choice = recovering.choose(cp, row, wish.checks, wish.requires)
            if choice is None:
                return _Start(None, Recovery("new"), row, self._line(row))
            if choice.state is None:
                return self._start_fresh(row, choice)
            if choice.survey is None:
                return self._start_head(row, choice.state)
            return self._start_back(row, choice)
        seen = looking.look(cp, task, None, wish.checks, wish.requires)
        if seen is None:
            return _Start(None, Recovery("new"), row, self._line(row))
        if wish.recover == "manual" and not self._decided(row, seen):
            plan = cp._plan(task, wish, mine=True)
            raise DecisionNeeded(
                f"a person has to choose how task {task!r} goes on",
                f"it was resumed with recover='manual'; {plan.why or f'its newest checkpoint is {plan.newest}'}",
                f"Look at `safepoint plan {task}`; then cp.rewind({task!r}, seq), or resume it with at=seq.",
                task=task,
                plan=plan,
            )
        return self._start_head(row, self._or_raise(row, seen))

    def _decided(self, row: TaskRow, head: looking.Looked) -> bool:
        """Whether nothing is left for a person to choose."""
        if head.state is None:
            return False
        if head.verdict.good and head.state._base.control.finished:
            return True
        return self._put_by_hand(row) is not None

    def _put_by_hand(self, row: TaskRow) -> int | None:
        """The checkpoint that a person went back to, if the head is there since and no step was done."""
        branch = self._branch(row)
        if branch is None or branch.forked_from is None:
            return None
        top = self.cp.store.headers(self.task_id, before=branch.head.seq + 1, limit=1)
        return branch.forked_from if top and top[0].seq == branch.head.seq and recovery.set_by_hand(top[0], branch) else None

    def _or_raise(self, row: TaskRow, seen: looking.Looked | None) -> State:
        assert seen is not None
        if seen.error is None:
            assert seen.state is not None
            return seen.state
        if isinstance(seen.error, Damaged):
            self.cp.load_latest(self.task_id)  # raises it again, naming the newest good one
        raise seen.error

    def _branch(self, row: TaskRow) -> BranchRow | None:
        return next((b for b in self.cp.store.branches(self.task_id) if b.name == row.branch), None)

    def _line(self, row: TaskRow) -> int:
        branch = self._branch(row)
        return branch.line if branch is not None else 1

    def _start_head(self, row: TaskRow, state: State) -> _Start:
        by_hand = self._put_by_hand(row)
        how = Recovery("head", state.seq) if by_hand is None else Recovery("rewind", by_hand, branch=state.branch)
        return _Start(state, how, row, self._line(row), saved=state.created_at)

    def _switched(self, row: TaskRow, name: str) -> TaskRow:
        assert self._grant is not None
        recovering.switch(self.cp, row, name, self._grant.guard)
        after = self.cp.store.task(self.task_id)
        assert after is not None
        return after

    def _start_at(self, row: TaskRow, seq: int) -> _Start:
        cp = self.cp
        chosen = recovering.body(cp, self.task_id, seq)
        state = cp.load(self.task_id, seq=seq)
        found = recovering.survey(cp, row)
        left, own = recovering.guard_of_head(cp, self.task_id), recovering.guard_in(state)

        def course(there: recovering.Survey) -> Course:
            return recovering.course_from(there, chosen, journal="inherit", left_guard=left, own_guard=own, older=self._older)

        return self._branched(found, chosen, state, course, "at", "manual", ())

    def _start_back(self, row: TaskRow, choice: recovering.Choice) -> _Start:
        state, found = choice.state, choice.survey
        assert state is not None
        assert found is not None
        chosen = choice.chosen
        assert chosen is not None
        own = recovering.guard_in(state)
        left = recovering.guard_in(choice.head_state) if choice.head_state is not None else None

        def course(there: recovering.Survey) -> Course:
            return recovering.course_from(there, chosen, journal="inherit", left_guard=left, own_guard=own, older=self._older)

        return self._branched(found, chosen, state, course, "fallback", "step", choice.skipped)

    def _branched(
        self,
        found: recovering.Survey,
        chosen: Any,
        state: State,
        find: Callable[[recovering.Survey], Course],
        mode: str,
        kind: str,
        skipped: tuple[tuple[int, str], ...],
    ) -> _Start:
        assert self._grant is not None
        course = find(found)
        patch = TaskPatch(guarded=self._older is not None)
        row = recovering.branch_off(
            self.cp, found, chosen, course, name=None, kind=kind, guard=self._grant.guard, patch=patch, again=find
        )
        self._older = None
        guard = states.guard_of(row)
        saved, seq = state.created_at, state.seq
        base = state._base
        control = base.control.copy()
        control.guard = guard
        state.seq, state.branch = row.seq, row.branch
        state._base = type(base)(base.store, base.task, Head(row.seq, row.id), base.packed, control)
        after = self.cp.store.task(self.task_id)
        line = next(b.line for b in self.cp.store.branches(self.task_id) if b.name == row.branch)
        assert after is not None
        how = Recovery(mode, seq, skipped, branch=row.branch, guard=guard)
        return _Start(state, how, after, line, course.why, saved)

    def _start_fresh(self, row: TaskRow, choice: recovering.Choice) -> _Start:
        """Begin anew on a new branch, if that was asked for and nothing that is stored can be used, by whatever program.

        On the journal line of the branch that is left, so that what is on record is served and not paid for again; and under a
        guard over all steps that were ever come to, so that no write is made on its own that may have been made before.
        """
        if choice.error is not None or not self._wish.fresh_start:
            raise recovering.none_usable(self.task_id, choice, self.cp._plan(self.task_id, self._wish, mine=True))
        assert self._grant is not None
        found = choice.survey
        assert found is not None
        line, guard = anew(found)
        state, control = self._blank(), Control(guard=guard, requires=self._wish.requires)
        patch = self._prepare(state, control) if self._prepare is not None else TaskPatch()
        name = state.branch = recovering.next_branch(found)
        how = Recovery("fresh", None, choice.skipped, branch=name, guard=guard, previous=self._grant.previous)
        first, packed = self.cp._row(state, control, None, kind="fresh", label="fresh start", recovery=recorded(how))
        at("branch.before")
        self.cp._commit_state(
            state, first, packed, control, None, line=line, guard=self._grant.guard, patch=replace(patch, branch=name)
        )
        at("branch.after")
        self._first_save = False
        after = self.cp.store.task(self.task_id)
        assert after is not None
        return _Start(state, how, after, line, "the task was begun anew, and may have been at this step before")

    def _blank(self) -> State:
        wanted = self.cp.state_type
        if wanted is None or wanted is dict:
            return State(self.task_id)
        try:
            return State(self.task_id, agent_state=wanted())
        except Exception as error:
            raise UsageError(
                f"task {self.task_id!r} is new, and its agent_state cannot be made",
                f"state_type={wanted.__qualname__} does not work without arguments",
                "Give its fields defaults, or save the first state yourself.",
            ) from error

    def _counters(self, attempts: int) -> Counters:
        counters = Counters(attempt=attempts)
        # The newest run's: checkpoints saved by hand in between carry none.
        try:
            row = next((r for r in self.cp.store.headers(self.task_id, limit=50) if r.metrics), None)
            before = Metrics(*msgspec.msgpack.decode(row.metrics)) if row is not None else None
        except (Damaged, msgspec.MsgspecError, TypeError):
            before = None  # of one that recovery has passed over: counting begins anew
        if before is not None:
            for name in ("calls", "retries", "errors", "tokens_in", "tokens_out", "bytes_written"):
                setattr(counters, name, getattr(before, name))
        return counters

    # -- what was under way

    def _recorded_calls(self, line: int) -> tuple[list[CallRow], tuple[int, ...] | None]:
        step = self._state.step
        rows, damaged = recovering.recorded_calls(self.cp, self._task, line, step)
        if damaged is not None and self._wish.recover == "strict":
            for row in self.cp.store.calls(self.task_id, nos=damaged, bodies=False)[0]:
                row.check(self.task_id, f"call {row.no}")
            self.cp.store.calls(self.task_id, line=line, from_step=step, bodies=False)  # raises what it raised before
        return rows, damaged

    def _settle_open(self, start: _Start) -> Script[None]:
        """Find out about every open write before any step code runs, and set aside what a step raised twice on."""
        flow, state, line = self._flow, self._state, start.line
        rows, damaged = yield Io(lambda: self._recorded_calls(line))
        self._pauses = yield Io(lambda: self.cp.store.pauses(self.task_id))
        for pause in self._pauses:
            pause.check(self.task_id, f"pause {pause.no}")
        anew = journal.to_ask_anew(journal.Raised.decode(self._task.raised), line, state.step, rows)
        if damaged is not None:
            start.why = yield Io(lambda: self._stand_guard(line))
            closed = recovery.closed_from(damaged, rows)
            anew += [r for r in closed if r not in anew]
        verified = 0
        known: dict[int, CallRow] = {r.no: r for r in rows}
        died = self._grant is not None and self._grant.previous in {"dead", "presumed_dead"}
        killer = quarantine.killer(rows, flow.guard.fence - 1 if died else 0)
        for row in rows:
            action = journal.decide(row, now_us=to_us(now())) if row.status == "started" else None
            if action in (Action.VERIFY, Action.PARK):
                verified += action is Action.VERIFY
                known[row.no] = yield from flow.settle(row)
            elif action is Action.REPEAT:
                known[row.no] = yield from self._note_death(row, killer[1] if killer is not None and killer[0] is row else 0)
        for row in anew:
            done = yield Io(lambda r=row: flow.commit(flow._calls(CallWrite(replace(r, superseded=True)))))  # type: ignore[misc]
            known[row.no] = done.calls[0]
        for row in known.values():
            self._steps.setdefault(row.step, []).append(row)
        self._open_step()
        how = start.how
        self.recovery = Recovery(
            mode=how.mode,
            seq=how.seq,
            skipped=how.skipped,
            reused=sum(r.status == "succeeded" and not r.superseded for r in known.values()),
            verified=verified,
            unclaimed=tuple(r.no for r in flow.journal.unclaimed()),
            previous=self._grant.previous if self._grant else "",
            branch=state.branch,
            guard=self._control.guard if self._control.guard > state.step else 0,
            lost_calls=damaged or (),
            lost=self._control.lost,
        )
        state.recovery = self.recovery
        doubt, _ = planning.waiting_on(list(known.values()), [], line, state.step)
        asked = self.unanswered()
        if doubt or asked:
            waits = in_doubt_error(self.task_id, *doubt) if doubt else self._unanswered_error(*asked)
            waits.details["recovery"] = self.recovery
            flow.end(waits)
        yield from tails.restored(self, known.values(), how.seq)

    def _stand_guard(self, line: int) -> str:
        """Records of calls are damaged: what is not on record may have happened. Kept with the next save; a run that dies
        before that finds the same damage."""
        reached = recovering.guard_for_lost(self.cp, self._task, line, self._state.step)
        self._control.guard = self._flow.parks_below = max(self._control.guard, reached)
        self._flow.parks_why = "records of calls are damaged or lost"
        log.warning("records of calls of %s are damaged: no write is made on its own below step %d", self.task_id, reached)
        return self._flow.parks_why

    def _stand_beyond(self, task: TaskRow) -> str:
        """A store that lacks what it acknowledged was accepted, and no run has been here since. Kept with the next save, which
        also takes the mark from the store."""
        assert self._older is not None
        guard = self._control.guard = max(self._control.guard, recovering.guard_for_older(self.cp, task, self._older))
        log.warning("%s was accepted as it stood: no write is made on its own below step %d", self.task_id, guard)
        return recovery.OLDER

    def _note_death(self, row: CallRow, n: int) -> Script[CallRow]:
        """Count the deaths that an open call was alone at, or begin the count anew."""
        if not n and not quarantine.deaths(row):
            return row
        after = quarantine.noted(row, n)
        stamp = "ended" if after.status == "quarantined" else ""
        done = yield Io(lambda: self._flow.commit(self._flow._calls(CallWrite(after, stamp), sync=bool(stamp))))
        return done.calls[0]  # type: ignore[no-any-return]


def anew(found: recovering.Survey) -> tuple[int, int]:
    """Line and guard of a task that is begun anew: on the journal that it had, under a guard over all that it came to."""
    left = found.branch()
    line = left.line if left is not None else max((c.line for c in found.calls), default=1)
    every = {line, *(b.line for b in found.branches), *(c.line for c in found.calls)}
    guard = recovery.reach(found.whole, found.branches, found.calls, every)
    if not found.whole and len(found.calls) < found.numbers.call:
        guard = max(guard, found.numbers.seq + found.numbers.call + 1)  # how far it came, nothing says any more
    return line, guard


def ends_as(error: BaseException) -> str:
    """The status of a task whose run could not be begun."""
    waits = isinstance(error, InDoubt | DecisionNeeded) and "plan" not in error.details
    return "waiting" if waits else "interrupted"


def recorded(r: Recovery) -> dict[str, Any]:
    """What is kept of a recovery in the next checkpoint."""
    kept: dict[str, Any] = {"mode": r.mode, "seq": r.seq, "reused": r.reused, "verified": r.verified, "previous": r.previous}
    if r.skipped:
        kept["skipped"] = [list(s) for s in r.skipped]
    if r.guard:
        kept["guard"] = r.guard
    if r.lost_calls:
        kept["lost_calls"] = list(r.lost_calls)
    if r.lost:
        kept["lost"] = list(r.lost)
    if r.expired:
        kept["expired"] = [list(e) for e in r.expired]
    if r.mended:
        kept["mended"] = list(r.mended)
    if r.branch and r.mode != "head":
        kept["branch"] = r.branch
    return kept


def _how(state: State, start: _Start, grant: Grant, r: Recovery) -> str:
    parts = [f"schema {state.version}"]
    if start.saved is not None:
        parts.append(f"saved {_ago((now() - start.saved).total_seconds())}")
    if grant.previous:
        parts.append(f"last holder {grant.previous.replace('_', ' ')}")
    if r.reused:
        parts.append(f"{r.reused} results at hand")
    text = ", ".join(parts)
    if r.mode not in ("head", "new"):
        text += f"; {r.mode}, now {state.task_id}@{state.seq} on branch {r.branch}"
    if r.skipped:
        text += f"; skipped {'; '.join(f'{n}: {why}' for n, why in r.skipped[:5])}"
        text += f" and {len(r.skipped) - 5} more" if len(r.skipped) > 5 else ""
    if r.lost_calls:
        text += f"; records of calls {', '.join(map(str, r.lost_calls))} damaged"
    if r.lost:
        text += f"; products lost: {', '.join(r.lost)}"
    if r.mended:
        text += f"; history: {'; '.join(r.mended)}"
    if r.guard:
        text += f"; below step {r.guard} no write that is not on record"
    return text


def _ago(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} ago"
    return f"{max(0, int(seconds))} s ago"

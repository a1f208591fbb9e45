"""Going back: what is known of a task's checkpoints, which of them is taken, and the commit that begins a new branch at it.

Shared by runs, by the verbs and by ``plan``; what is decided lies in ``rules.recovery``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from safepoint._probe import at
from safepoint.codec import states
from safepoint.errors import (
    Conflict,
    Damaged,
    NewerFormat,
    NotFound,
    UsageError,
)
from safepoint.looking import NEVER_PASSED, Looked, look
from safepoint.model import Obj, State, a_type, new_id, now, to_us
from safepoint.rows import (
    BranchRow,
    CallRow,
    CheckpointRow,
    Commit,
    Guard,
    Head,
    Lost,
    Numbers,
    Part,
    TaskPatch,
    TaskRow,
    replace,
)
from safepoint.rules import recovery
from safepoint.rules.health import Check
from safepoint.rules.recovery import Course, Verdict

log = logging.getLogger("safepoint")

if TYPE_CHECKING:
    from safepoint.checkpointer import Checkpointer

# -- what is there


@dataclass(slots=True, repr=False)
class Survey:
    """All that is known of a task's own checkpoints, branches and calls, without their bodies."""

    task: str
    row: TaskRow
    branches: list[BranchRow] = field(default_factory=list)
    rows: list[CheckpointRow] = field(default_factory=list)
    """By falling seq; also those whose seal is broken."""
    whole: list[CheckpointRow] = field(default_factory=list)
    calls: list[CallRow] = field(default_factory=list)
    """Whole ones."""
    lost_calls: bool = False
    numbers: Numbers = field(default_factory=Numbers)

    def branch(self, name: str | None = None) -> BranchRow | None:
        """That of the name, or the current one."""
        wanted = self.row.branch if name is None else name
        return next((b for b in self.branches if b.name == wanted), None)

    @property
    def torn(self) -> list[CheckpointRow]:
        whole = {r.seq for r in self.whole}
        return [r for r in self.rows if r.seq not in whole]

    def candidates(self) -> list[int]:
        current = self.row.branch
        if self.branch() is None and not any(r.branch == current for r in self.whole):
            current = recovery.newest_branch(self.whole) or current
        return recovery.lineage(self.rows, self.branches, current)

    def header(self, seq: int) -> CheckpointRow | None:
        return next((r for r in self.rows if r.seq == seq), None)


def survey(cp: Checkpointer, row: TaskRow) -> Survey:
    """Look at every row of a task. Where the store can walk, one that cannot be read does not hide the others."""
    task = row.task
    found = Survey(task, row)
    calls: list[CallRow] = []
    walk: Iterator[Part] = iter(())
    try:
        walk = cp.store.walk(task)
        for part in walk:
            match part:
                case Obj():
                    break  # they come last
                case Numbers():
                    found.numbers = part
                case BranchRow() if part.space == "":
                    found.branches.append(part)
                case CheckpointRow() if part.space == "":
                    found.rows.append(replace(part, root=b"", refs=b""))
                case CallRow():
                    calls.append(part)
                case Lost():
                    found.lost_calls |= part.kind == "call" or (not part.kind and part.what.startswith(("call", "rows")))
    except NotImplementedError:
        found.branches = cp.store.branches(task)
        try:
            calls = cp.store.calls(task, bodies=False)[0]
        except Damaged as error:
            if error.details.get("rolled_back"):
                raise
            found.lost_calls = True
    finally:
        getattr(walk, "close", lambda: None)()
    with suppress(Damaged):  # a header may be known where the state below it is lost
        known = {r.seq for r in found.rows}
        found.rows += [r for r in cp.store.headers(task) if r.seq not in known]
    found.rows.sort(key=lambda r: -r.seq)
    found.whole = [r for r in found.rows if is_whole(task, r)]
    found.calls = [c for c in calls if is_whole(task, c)]
    found.lost_calls |= len(found.calls) < len(calls)
    return found


def _few(cp: Checkpointer, row: TaskRow, n: int) -> Survey:
    """Enough to name the next candidates below a good head."""
    rows = cp.store.headers(row.task, limit=8 * n)
    return Survey(row.task, row, cp.store.branches(row.task), rows, [r for r in rows if is_whole(row.task, r)])


_NEWEST_CALLS = 200


def recorded_calls(cp: Checkpointer, row: TaskRow, line: int, step: int) -> tuple[list[CallRow], tuple[int, ...] | None]:
    """The whole records of the steps that are run again; and the numbers of those that are damaged, None if there are none."""
    task = row.task
    try:
        rows, _ = cp.store.calls(task, line=line, from_step=step, bodies=False)
        # One whose line or step is damaged is not among them. The newest are what was under way.
        newest, _ = cp.store.calls(task, limit=_NEWEST_CALLS, bodies=False)
    except Damaged as error:
        if error.details.get("rolled_back"):
            raise
        return [c for c in survey(cp, row).calls if c.line == line and c.step >= step], ()
    torn = {r.no: r for r in (*rows, *newest) if not is_whole(task, r)}
    if torn:
        lone = sum(b.line == line for b in cp.store.branches(task)) <= 1
        whole = [r for r in newest if r.no not in torn]
        torn = {n: r for n, r in torn.items() if not (lone and recovery.long_past(r, whole, line, step))}
    return [r for r in rows if r.no not in torn], tuple(sorted(torn)) if torn else None


def guard_for_lost(cp: Checkpointer, row: TaskRow, line: int, step: int) -> int:
    """Where records of calls are damaged: the guard over all steps that were ever come to on the line."""
    found = survey(cp, row)
    return max(recovery.reach(found.whole, found.branches, found.calls, {line}), step + 1)


def guard_for_older(cp: Checkpointer, row: TaskRow, older: int) -> int:
    """Where the store lacks checkpoints that it acknowledged: the guard over all steps that may have been come to."""
    found = survey(cp, row)
    return recovery.reach_beyond(found.whole, found.branches, found.calls, older)


def is_whole(task: str, row: CheckpointRow | CallRow) -> bool:
    try:
        row.check(task, "")
    except Damaged:
        return False
    return True


# -- which one


@dataclass(slots=True, repr=False)
class Choice:
    """Which checkpoint recovery takes: the first good one."""

    state: State | None
    """None: none is usable."""
    verdicts: list[Verdict]
    """Of all that were looked at, newest first; the good ones are among them."""
    survey: Survey | None = None
    """None where the head is good, and nothing else had to be looked at."""
    head_state: State | None = None
    """Of a head that loads and is unhealthy."""
    error: Exception | None = None
    """Of the head; or, if none is usable and this program may be the one to blame, of the newest such checkpoint."""
    chosen: CheckpointRow | None = None
    """The whole row of the one that is taken, if it is not the head."""

    @property
    def skipped(self) -> tuple[tuple[int, str], ...]:
        found = []
        for v in self.verdicts:
            if v.good:
                break
            found.append((v.seq, str(v)))
        return tuple(found)


def choose(
    cp: Checkpointer, row: TaskRow, checks: Iterable[Check], requires: Sequence[str] = (), *, at_least: int = 1
) -> Choice | None:
    """Find the newest checkpoint that passes, one version back at a time; None for a task without any.

    Args:
        at_least: Look at so many, for people who choose themselves.
    """
    checks = tuple(checks)
    head = look(cp, row.task, None, checks, requires)
    if head is None:
        return None
    state, verdicts, errors = head.state if head.verdict.good else None, [head.verdict], [head.error]
    if state is not None and at_least <= 1:
        return Choice(state, verdicts)
    known = survey(cp, row) if state is None else _few(cp, row, at_least)
    candidates, chosen = known.candidates(), None
    branch = known.branch()
    if not head.verdict.seq and branch is not None:
        verdicts[0] = Verdict(branch.head.seq, head.verdict.word, head.verdict.why)
    for seq in candidates:
        if seq == verdicts[0].seq:
            continue
        if state is not None and len(verdicts) >= at_least:
            break
        seen = look(cp, row.task, seq, checks, requires)
        assert seen is not None
        if state is None and seen.verdict.good:
            try:
                chosen = body(cp, row.task, seq)
            except (Damaged, NotFound) as gone:
                seen = Looked(Verdict(seq, "damaged"), None, gone)
        verdicts.append(seen.verdict)
        errors.append(seen.error)
        if state is None and seen.verdict.good:
            state = seen.state
    error = head.error
    if state is None:
        guilty = recovery.best_error(verdicts)
        error = errors[verdicts.index(guilty)] if guilty is not None else None
    return Choice(state, verdicts, known, head.state, error, chosen)


def none_usable(task: str, choice: Choice, plan: Any) -> Exception:
    """What to raise where no checkpoint can be used."""
    if choice.error is not None:
        return choice.error
    seen = ", ".join(f"{v.seq} {v}" for v in choice.verdicts[:5])
    more = f" and {len(choice.verdicts) - 5} more" if len(choice.verdicts) > 5 else ""
    return Damaged(
        f"task {task!r} has no checkpoint that can be used",
        f"{seen}{more}",
        "Restore the store from a backup; or begin anew on a new branch, with fresh_start=True. What is stored stays as it is.",
        task=task,
        plan=plan,
    )


def newest_good(cp: Checkpointer, task: str) -> int | None:
    """The newest checkpoint below a head that cannot be used, as far as it can be found out."""
    row = cp.store.task(task)
    if row is None:
        return None
    with suppress(*NEVER_PASSED):
        for seq in survey(cp, row).candidates():
            seen = look(cp, task, seq, ())
            if seen is not None and seen.verdict.good:
                return seq
    return None


# -- a new branch


def course_from(
    found: Survey,
    chosen: CheckpointRow,
    *,
    journal: str,
    left_guard: int | None,
    own_guard: int,
    left: str | None = None,
    older: int | None = None,
) -> Course:
    """Line and guard for leaving a branch (the current one by default) for ``chosen``.

    Args:
        left_guard: What the left head stands under; None if it cannot be read.
        own_guard: What the chosen checkpoint stands under.
        older: How many checkpoints the store had acknowledged and does not have any more; None if it is not older than it was.
    """
    course = recovery.course(
        found.whole,
        found.branches,
        found.calls,
        journal=journal,
        left=found.branch(left),
        chosen=chosen,
        left_guard=left_guard,
        lost_calls=found.lost_calls,
        torn=found.torn,
        older=older,
    )
    if journal == "fresh" or own_guard <= course.guard:
        return course
    return replace_course(course, own_guard)


def replace_course(course: Course, guard: int) -> Course:
    return Course(course.line, guard, course.why or "a guard that it stands under is kept")


def branch_off(
    cp: Checkpointer,
    found: Survey,
    chosen: CheckpointRow,
    course: Course,
    *,
    name: str | None,
    kind: str,
    guard: Guard | None = None,
    current: bool = True,
    patch: TaskPatch | None = None,
    again: Callable[[Survey], Course] | None = None,
) -> CheckpointRow:
    """Commit one new checkpoint with the state of ``chosen`` (a whole row, with its root) on a new branch; with ``current`` it
    becomes the current one in that same commit. Nothing else is written, and no object is sent.

    Args:
        name: None for the next free automatic one.
        again: How the course was found: from the commit on, retention keeps the calls that the new branch may ask for; what it
            took between the look and the commit is made good by a guard.
    Raises:
        Conflict: there is a branch of that name. NotFound: the checkpoint has gone meanwhile.
    """
    taken = {b.name for b in found.branches} | {r.branch for r in found.rows}
    label = f"from {chosen.seq}"
    under = states.with_guard(chosen, course.guard)
    while True:
        branch = recovery.next_name(found.row.branch, taken) if name is None else name
        row = replace(
            under,
            id=new_id(),
            branch=branch,
            parent_seq=chosen.seq,
            kind=kind,
            label=label,
            created_at=to_us(now()),
            metrics=b"",
            pinned=False,
            seq=0,
            seal=b"",
        )
        if current:
            patch = TaskPatch(branch=branch) if patch is None else replace(patch, branch=branch)
        at("branch.before")
        try:
            done = cp.store.commit(
                Commit(
                    task=found.task,
                    id=row.id,
                    guard=guard,
                    anyway=guard is None,
                    checkpoint=row,
                    expect=None,
                    line=course.line,
                    stands_on=Head(chosen.seq, chosen.id),
                    patch=patch,
                )
            )
        except Conflict:
            if name is not None:
                raise
            taken.add(branch)  # somebody forked under that very name meanwhile
            continue
        at("branch.after")
        assert done.seq is not None
        new = replace(row, seq=done.seq)
        if again is None or course.line is None:
            return new
        later = survey(cp, found.row)
        later.branches = [b for b in later.branches if b.name != branch]
        more = again(later).guard
        return under_guard(cp, found.task, new, more, of=guard) if more > course.guard else new


def next_branch(found: Survey) -> str:
    """The name that the next automatic branch gets."""
    return recovery.next_name(found.row.branch, {b.name for b in found.branches} | {r.branch for r in found.rows})


def guard_in(state: State | None) -> int:
    return 0 if state is None else int(state._base.control.guard)


def guard_of_head(cp: Checkpointer, task: str, branch: str | None = None) -> int | None:
    """The guard that a branch's head (the current one's by default) stands under; None if it cannot be read."""
    try:
        state = cp._load(task) if branch is None else cp._load(task, branch=branch)
    except NEVER_PASSED[:4]:
        raise
    except Exception:  # what is left need not be usable
        return None
    return None if state is None else guard_in(state)


def under_guard(
    cp: Checkpointer,
    task: str,
    row: CheckpointRow,
    guard: int,
    *,
    of: Guard | None = None,
    patch: TaskPatch | None = None,
) -> CheckpointRow:
    """One more checkpoint on top of a branch's head, the same under a guard."""
    on = Head(row.seq, row.id)
    above = replace(
        states.with_guard(row, guard),
        id=new_id(),
        parent_seq=row.seq,
        label=recovery.UNDER_GUARD,
        created_at=to_us(now()),
        metrics=b"",
        pinned=False,
        seq=0,
        seal=b"",
    )
    done = cp.store.commit(
        Commit(task=task, id=above.id, guard=of, anyway=of is None, checkpoint=above, expect=on, stands_on=on, patch=patch)
    )
    assert done.seq is not None
    return replace(above, seq=done.seq)


def switch(cp: Checkpointer, row: TaskRow, name: str, of: Guard) -> CheckpointRow:
    """Make a branch the current one, under the guard of a lease. Returns its head: where records that it would be served have gone
    meanwhile, a new one, that stands under a guard.

    Raises:
        NotFound: no such branch. Damaged and what else says that its head cannot be used; nothing was changed.
    """
    found = survey(cp, row)
    there = found.branch(name)
    state = cp._load(row.task, branch=name) if there is not None else None
    if there is None or state is None:
        raise no_branch(row.task, name)
    head = body(cp, row.task, there.head.seq)
    own = guard_in(state)
    guard = _to_return(cp, found, there, head.step, own)
    patch = TaskPatch(branch=name, reason=f"switched to branch {name}")
    if guard > own:
        return under_guard(cp, row.task, head, guard, of=of, patch=patch)
    cp.store.commit(Commit(task=row.task, id=new_id(), guard=of, stands_on=there.head, patch=patch))
    # From now on what this branch needs is kept; a clean-up may have come in between.
    guard = _to_return(cp, survey(cp, row), there, head.step, own)
    return under_guard(cp, row.task, head, guard, of=of) if guard > own else head


def _to_return(cp: Checkpointer, found: Survey, there: BranchRow, step: int, own: int) -> int:
    guards = {b.name: _guard_at(cp, found.task, b) for b in found.branches} if len(found.branches) > 1 else {}
    return recovery.guard_to_return(
        found.whole, found.branches, found.calls, there, step, own, lost_calls=found.lost_calls, torn=found.torn, guards=guards
    )


def _guard_at(cp: Checkpointer, task: str, branch: BranchRow) -> int | None:
    """The guard of its head, without decoding the state; None if it cannot be read."""
    try:
        return states.guard_of(body(cp, task, branch.head.seq))
    except (Damaged, NewerFormat, NotFound, UsageError):
        return None


def body(cp: Checkpointer, task: str, seq: int) -> CheckpointRow:
    """A checkpoint's whole row, its root with it. NotFound, Damaged, NewerFormat."""
    found = cp.store.read(task, seq=seq)
    if found is None:
        raise NotFound(
            f"task {task!r} has no checkpoint with seq {seq}", "", "See list_checkpoints, or `safepoint log`.", task=task
        )
    try:
        states.check_row(task, found[0])
    except Damaged:
        found = cp.store.rescue(task, seq)
        if found is None:
            raise
        states.check_row(task, found[0])
    if found[0].kind == "failure":
        raise UsageError(
            f"{task}@{seq} is what a failed step looked like",
            "its changes were thrown away, and are no state to go on from",
            f"Name the checkpoint that it hangs below: {found[0].parent_seq}.",
        )
    return found[0]


def no_branch(task: str, name: str) -> NotFound:
    return NotFound(f"task {task!r} has no branch {name!r}", "", "See cp.branches, or `safepoint branches`.", task=task)


def taken_as_it_is(cp: Checkpointer, task: str, seq: int) -> int | None:
    """A person has chosen a checkpoint: if the store refuses the task as older than what it acknowledged, it is now taken as it
    stands. Returns how many checkpoints are missing then, or were when it was, and are under no guard yet; None if none are."""
    try:
        cp.store.task(task)
        cp.store.read(task)
    except Damaged as error:
        if error.details.get("rolled_back"):
            if cp.store.read(task, seq=seq) is None:
                raise
            cp.store.accept(task)
            log.warning("task %s is older than what was acknowledged, and was taken as it stands: %s", task, error.why)
            at("accept.after")
    return cp.store.older(task)


def check_journal(value: object) -> str:
    if value not in recovery.JOURNALS:
        shown = repr(value) if isinstance(value, str) else a_type(value)
        raise UsageError(f"journal={shown} is not available", "", f"Use one of {', '.join(recovery.JOURNALS)}.")
    return str(value)

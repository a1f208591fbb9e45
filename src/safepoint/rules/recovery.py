"""Which checkpoint a task goes on from when the newest cannot be it, on which branch, and which calls a person must see first.

Answers made of rows. Rows are sealed, so the ones that are given here are taken at their word: whoever asks leaves out those
whose seal is broken.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from safepoint.model import ID_LIMIT
from safepoint.rows import BranchRow, CallRow, CheckpointRow

Journal = Literal["inherit", "block", "fresh"]
JOURNALS: tuple[str, ...] = ("inherit", "block", "fresh")
MODES: tuple[str, ...] = ("auto", "manual", "strict")

UNDER_GUARD = "under guard"
"""The label of a checkpoint that is the one below it, under a guard."""
OLDER = "the store is older than what it acknowledged, and what was done since is on no record"

_AUTOMATIC = re.compile(r"(.+)~\d+\Z", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a look at a checkpoint found. An empty ``word`` is nothing against it."""

    seq: int
    word: Literal["", "damaged", "missing", "refused", "invalid", "unhealthy"] = ""
    why: str = ""

    @property
    def good(self) -> bool:
        return not self.word

    @property
    def of_program(self) -> bool:
        """Whether the data may be whole, and this program be the one that cannot use it."""
        return self.word in {"refused", "invalid"}

    def __str__(self) -> str:
        return f"{self.word}: {self.why}" if self.why else self.word


# -- where to go back to


def lineage(rows: Iterable[CheckpointRow], branches: Iterable[BranchRow], current: str) -> list[int]:
    """Numbers of the checkpoints that a branch goes back over, newest first: its own, then those of the branch that it forked
    from, from the fork point down, and so on. Failure leaves are none of them.

    A head whose row is lost is named all the same: a look at it says so. By branch and number, not from parent to parent, so
    that a lost row does not hide what lies below it.
    """
    mine: dict[str, list[CheckpointRow]] = {}
    for row in sorted(rows, key=lambda r: -r.seq):
        if row.kind != "failure":
            mine.setdefault(row.branch, []).append(row)
    at = {row.seq: row for own in mine.values() for row in own}
    known = {b.name: b for b in branches}
    found: list[int] = []
    done: set[str] = set()
    name: str | None = current
    upto: int | None = None
    while name is not None and name not in done:
        done.add(name)
        branch = known.get(name)
        own = [r.seq for r in mine.get(name, ()) if upto is None or r.seq <= upto]
        if upto is None and branch is not None and branch.head.seq not in own:
            own = sorted([*own, branch.head.seq], reverse=True)
        found += [seq for seq in own if seq not in found[-1:]]  # a branch that was set back may stand at its fork point
        upto = branch.forked_from if branch is not None else at[own[-1]].parent_seq if own else None
        if upto is None:
            break
        automatic = _AUTOMATIC.match(name)
        if upto in at:
            name = at[upto].branch
        else:  # the fork point is lost: an automatic branch says in its name where it came from
            name = automatic[1] if automatic else None
    return found


def ancestors(rows: Iterable[CheckpointRow], branches: Iterable[BranchRow], branch: str, seq: int) -> list[int]:
    """``lineage`` below ``seq``."""
    return [n for n in lineage(rows, branches, branch) if n < seq]


def next_name(old: str, taken: Collection[str]) -> str:
    """The name of the branch that goes back on ``old``: ``main~1``, and from there ``main~2``."""
    automatic = _AUTOMATIC.match(old)
    stem = automatic[1] if automatic else old
    n = 1
    while (name := f"{stem[: ID_LIMIT - 1 - len(str(n))]}~{n}") in taken:
        n += 1
    return name


def newest_branch(rows: Iterable[CheckpointRow]) -> str | None:
    """The branch that was worked on last, for a task whose own word on it is lost."""
    newest = max((r for r in rows if r.kind != "failure"), key=lambda r: r.seq, default=None)
    return None if newest is None else newest.branch


def set_by_hand(head: CheckpointRow, branch: BranchRow) -> bool:
    """Whether a person put the head where it is (``rewind``, ``at=``) and no step was done since: it began its branch."""
    return head.kind == "manual" and branch.forked_from is not None and head.parent_seq == branch.forked_from


# -- which calls cannot be served from the record


def has_gap(
    rows: Iterable[CheckpointRow],
    branches: Iterable[BranchRow],
    line: int,
    step: int,
    torn: Iterable[CheckpointRow] = (),
) -> bool:
    """Whether calls of ``line`` from ``step`` on may have been deleted: a checkpoint takes the calls of its steps with it.

    Every branch of the line is looked at, as they serve each other's calls. Its checkpoints must name each other as parents,
    without a hole, from the head down to one that is no later than ``step``: what lies below has only calls of earlier steps.

    Args:
        torn: Rows whose seal is broken. They are there, and so are their calls; of what they say only a parent is believed that
            is indeed the next one.
    """
    torn = list(torn)
    unsure = {r.seq for r in torn}
    mine: dict[str, list[CheckpointRow]] = {}
    for row in sorted([*rows, *torn], key=lambda r: -r.seq):
        if row.kind != "failure":
            mine.setdefault(row.branch, []).append(row)
    for branch in branches:
        if branch.line != line:
            continue
        own = mine.get(branch.name, [])
        if not own or own[0].seq != branch.head.seq:
            return True
        for i, row in enumerate(own):
            if row.step <= step and row.seq not in unsure:
                break
            below = own[i + 1].seq if i + 1 < len(own) else branch.forked_from
            if row.parent_seq != below:
                return True
    return False


def reach(
    rows: Iterable[CheckpointRow], branches: Sequence[BranchRow], calls: Iterable[CallRow], lines: Collection[int]
) -> int:
    """The first step that nothing on these lines can have come to: the guard for all that was done on them. A branch whose row is
    lost may have been of any of them."""
    rows = list(rows)
    names = {b.name for b in branches if b.line in lines}
    names |= {r.branch for r in rows} - {b.name for b in branches}
    known = {r.seq for r in rows}
    lost = any(b.head.seq not in known for b in branches if b.line in lines)
    steps = [r.step for r in rows if r.branch in names and r.kind != "failure"]
    steps += [c.step for c in calls if c.line in lines]
    return max(steps, default=-1) + 1 + lost


def reach_beyond(rows: Sequence[CheckpointRow], branches: Sequence[BranchRow], calls: Sequence[CallRow], older: int) -> int:
    """As ``reach``, of a store that lacks so many checkpoints that were acknowledged: of whatever branch they were, and with steps that
    are on no record at all."""
    lines = {b.line for b in branches} | {c.line for c in calls}
    return reach(rows, branches, calls, lines) + (older + 1) * stride(rows)


def guard_to_return(
    rows: Sequence[CheckpointRow],
    branches: Sequence[BranchRow],
    calls: Sequence[CallRow],
    branch: BranchRow,
    step: int,
    own_guard: int,
    *,
    lost_calls: bool,
    torn: Sequence[CheckpointRow] = (),
    guards: Mapping[str, int | None] | None = None,
) -> int:
    """The guard of a branch that is made the current one again, as it stands: retention has kept only what the current one of its
    line needed meanwhile.

    Args:
        guards: Of the heads of all branches, by name; None for one that cannot be read. Why another branch of this line stands
            under one may not be seen any more; and what was done on other lines is not on the record of this one.
    """
    guard, guards = own_guard, guards or {}
    like = max((guards.get(b.name) or 0 for b in branches if b.line == branch.line), default=0)
    others = beside(branches, guards, branch) if guards else set()
    others |= {c.line for c in calls} - {b.line for b in branches}  # of branches whose rows are lost
    lost = {r.branch for r in rows} - {b.name for b in branches}
    done = reach(rows, branches, calls, others) if others or lost else 0
    guard = max([guard, *(g for g in (like, done) if g > step)])
    if lost_calls or has_gap(rows, branches, branch.line, step, torn):
        guard = max(guard, reach(rows, branches, calls, {branch.line}))
    return guard


def beside(branches: Iterable[BranchRow], guards: Mapping[str, int | None], there: BranchRow) -> set[int]:
    """The other journal lines of a task that count for a branch: what was done on them was done for it too.

    All but those that were begun with ``fresh``, on which all is made anew. Such a one forks from another, and no branch of it
    stands under a guard (0 in ``guards``; None: that cannot be read).
    """
    counts = {b.line for b in branches if b.forked_from is None or guards.get(b.name) != 0}
    return counts - {there.line} if there.line in counts else set()


def only_fell_back(rows: Sequence[CheckpointRow], branches: Iterable[BranchRow], left: BranchRow, to: str) -> bool:
    """Whether every branch from ``left`` back to ``to`` was begun by an automatic fallback. Why those stand under a guard can still
    be seen in the rows; not so of a person's, who may have accepted a store that was older than it should be."""
    first: dict[str, CheckpointRow] = {}
    for row in sorted(rows, key=lambda r: -r.seq):
        if row.kind != "failure":
            first[row.branch] = row
    at = {r.seq: r for r in rows}
    known = {b.name: b for b in branches}
    branch: BranchRow | None = left
    for _ in range(len(known) + 1):
        if branch is None or branch.name == to:
            return branch is not None
        begun = first.get(branch.name)
        origin = at.get(branch.forked_from or 0)
        if begun is None or origin is None or begun.kind != "step" or begun.parent_seq != branch.forked_from:
            return False
        branch = known.get(origin.branch)
    return False


def stride(rows: Sequence[CheckpointRow]) -> int:
    """The most steps that lie between two checkpoints of a branch: 1 where each is saved."""
    steps = {r.seq: r.step for r in rows}
    return max([1, *(r.step - steps[r.parent_seq] for r in rows if r.parent_seq in steps)])


@dataclass(frozen=True, slots=True)
class Course:
    """How a new branch goes on with the journal."""

    line: int | None
    """None: a new one."""
    guard: int
    """In steps below this, a write that is not on record is not made, but shown to a person."""
    why: str = ""
    """Why there is a guard."""


def course(
    rows: Sequence[CheckpointRow],
    branches: Sequence[BranchRow],
    calls: Sequence[CallRow],
    *,
    journal: str,
    left: BranchRow | None,
    chosen: CheckpointRow,
    left_guard: int | None,
    lost_calls: bool,
    torn: Sequence[CheckpointRow] = (),
    older: int | None = None,
) -> Course:
    """The line and the guard of a branch that leaves ``left`` for ``chosen``.

    Args:
        rows: Of all checkpoints that are whole; likewise ``calls``, of all lines.
        left: None if nothing is known of it.
        left_guard: The one that the left head stands under; None if that head cannot be read.
        lost_calls: Some rows of calls are damaged or known to be lost.
        torn: Checkpoints whose seal is broken.
        older: So many checkpoints were acknowledged and are not there any more; None if the store is not older than it was.
    """
    if journal == "fresh":
        return Course(None, 0)
    home = next((b for b in branches if b.name == chosen.branch), left)
    lines = {b.line for b in (home, left) if b is not None} or {1}
    if journal == "block":
        return Course(None, reach(rows, branches, calls, lines), "the journal of the branch that was left is blocked")
    line = home.line if home is not None else 1
    hidden = left_guard is None and (
        left is None
        or not only_fell_back(rows, branches, left, chosen.branch)
        or any(r.label == UNDER_GUARD and r.seq > chosen.seq for r in (*rows, *torn))
    )
    why = ""
    if older is not None:
        why = OLDER
    elif lost_calls:
        why = "records of calls are damaged or lost"
    elif len(lines) > 1:
        why = "the branch that was left has a journal of its own"
    elif left is None or has_gap(rows, branches, line, chosen.step, torn):
        why = "checkpoints in between have been deleted or lost, and the records of their calls with them"
    elif hidden:
        why = "what was left cannot be read, and may have stood under a guard"
    if hidden:
        lines |= {b.line for b in branches} | {c.line for c in calls}  # that guard may have been for what was done on any
    mine = reach(rows, branches, calls, lines) if why else 0
    if older is not None:
        mine = max(mine, reach_beyond(rows, branches, calls, older))
    kept = left_guard or 0
    return Course(line, max(mine, kept), why or ("a guard of the branch that was left is kept" if kept else ""))


# -- what is decided


def best_error(verdicts: Sequence[Verdict]) -> Verdict | None:
    """Where nothing can be used: the verdict whose error is to come out as it is, since what is stored may be whole and this
    program may be the one to blame. None if all lies in the data."""
    return next((v for v in verdicts if v.of_program), None)


def long_past(torn: CallRow, whole: Iterable[CallRow], line: int, step: int) -> bool:
    """Whether a damaged record is of a step before ``step``, by what it says itself and by a whole one that was begun after it:
    then no step that is run again asks for it. Holds where the line has one branch, which never went back."""
    return torn.step < step and any(r.no > torn.no and r.line == line and r.step < step for r in whole)


def closed_from(damaged: Iterable[int], rows: Iterable[CallRow]) -> list[CallRow]:
    """Reads that are asked for anew since the record of a call before them is damaged: only an unbroken record is replayed.

    Writes are still served: they happened. By number, which the store's own key gives: the damaged row's fields say nothing.
    Without any number, none is known to be before it.

    Args:
        damaged: Numbers of the damaged ones.
    """
    first = min(damaged, default=0)
    return [r for r in rows if r.no > first and r.effect == "read" and r.status == "succeeded" and not r.superseded]

"""A task without its damage: which rows stay, where its branches stand then, and what must not be done blindly after.

Nothing is made up. What is whole stays as it is; a branch whose head is not whole goes back as automatic recovery would, on a
new branch; a call whose values are lost, but not its row, stays as a call without them, so that it is not made again; and where
rows of calls are gone, the branch that a resume goes on from stands under a guard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from safepoint.codec import chunks, states
from safepoint.codec.nodes import names_in
from safepoint.codec.registry import Registry
from safepoint.errors import NewerFormat
from safepoint.model import Obj, new_id
from safepoint.rows import BranchRow, CallRow, CheckpointRow, Head, Image, Numbers, Part, PauseRow, TaskRow, WriteRow, replace
from safepoint.rules import recovery
from safepoint.rules.verifying import Audit, Ranges

__all__ = ["FellBack", "Mended", "mend", "roots"]


@dataclass(frozen=True, slots=True)
class FellBack:
    """A branch whose head is not whole, or that must go on with care."""

    task_id: str
    branch: str
    new_branch: str | None
    """None: nothing of it is whole, and the branch is gone."""
    lost_head: int | None
    """None: the head is whole, and the new branch begins there, under a guard."""
    seq: int | None
    """The checkpoint that the new branch goes on from."""
    guard: int
    why: str
    space: str = ""

    def __str__(self) -> str:
        at = f"{self.task_id}, branch {self.branch}"
        lost = f"head {self.lost_head} is lost; " if self.lost_head is not None else ""
        if self.new_branch is None:
            return f"{at}: {lost}nothing of it loads"
        guard = (
            f"; writes of steps below {self.guard} that are not on record wait for a person: {self.why}" if self.guard else ""
        )
        return f"{at}: {lost}{self.new_branch} goes on from {self.seq}{guard}"


@dataclass(slots=True)
class Mended:
    """What is to be written, and what became of the rest."""

    image: Image
    fell_back: list[FellBack] = field(default_factory=list)
    checkpoints: Ranges = field(default_factory=Ranges)
    """Numbers of those left out, as far as they are known; likewise calls and pauses."""
    calls: Ranges = field(default_factory=Ranges)
    bare_calls: Ranges = field(default_factory=Ranges)
    """Kept without arguments and result, which are lost."""
    pauses: Ranges = field(default_factory=Ranges)
    writes: list[tuple[str, str, str, int]] = field(default_factory=list)
    """Keys of those left out."""
    put: tuple[CheckpointRow, ...] = ()
    """Checkpoints of the image that were not there before."""
    moved: bool = False
    """The task has gone on since it was looked at, so that not all of the image has been, or it is not whole."""


def roots(parts: Iterable[CheckpointRow | CallRow | WriteRow]) -> set[bytes]:
    """Names of the objects that rows refer to themselves."""
    found: set[bytes] = set()
    for row in parts:
        for refs in (row.args_refs, row.result_refs) if isinstance(row, CallRow) else (row.refs,):
            found.update(names_in(refs))
    return found


def mend(audit: Audit, walk: Callable[[], Iterable[Part]], at: int, older: int | None = None) -> Mended:
    """What of a task is whole, as an image; ``walk`` gives its parts once more, ``at`` is the time.

    Args:
        older: So many acknowledged checkpoints are not there any more, and no guard stands for them yet; None if all are.

    Raises:
        NewerFormat: some rows need a newer program, which alone can tell whether they are whole.
    """
    newer = [seq for seq, damage in audit.bad_checkpoints.items() if damage is None]
    if newer:
        raise NewerFormat(
            f"checkpoint {newer[0]} of task {audit.task!r} has a newer format",
            "this safepoint cannot tell whether it is whole",
            "Repair with the newer safepoint; the task was left as it is.",
            task=audit.task,
        )
    rows: list[CheckpointRow] = []
    sealed: list[CheckpointRow] = []
    calls: list[CallRow] = []
    pauses: list[PauseRow] = []
    writes: list[WriteRow] = []
    branches: list[BranchRow] = []
    objects: dict[bytes, Obj] = {}
    found = Mended(Image(row=TaskRow(task=audit.task), numbers=Numbers(), branches=(), checkpoints=()))
    needed: set[bytes] | None = None
    for part in walk():
        match part:
            case CheckpointRow():
                if part.seq not in audit.bad_checkpoints and part.space == "":
                    sealed.append(replace(part, root=b"", refs=b""))
                if audit.good_checkpoint(part):
                    rows.append(part)
                else:
                    found.checkpoints.add(part.seq)
            case CallRow():
                if part.no in audit.bad_calls:
                    found.calls.add(part.no)
                elif audit.good_call(part):
                    calls.append(part)
                elif (bare := _bare(part)) is None:
                    found.calls.add(part.no)
                else:
                    calls.append(bare)
                    found.bare_calls.add(part.no)
            case PauseRow():
                if part.no in audit.bad_pauses:
                    found.pauses.add(part.no)
                else:
                    pauses.append(part)
            case WriteRow():
                if audit.good_write(part):
                    writes.append(part)
                else:
                    found.writes.append(part.key)
            case BranchRow():
                branches.append(part)
            case Obj():
                if needed is None:
                    needed = audit.reach(roots([*rows, *calls, *writes]))
                if part.name in needed and part.name not in audit.bad_objects:
                    objects[part.name] = part
    found.writes = sorted({*found.writes, *audit.bad_writes})
    _place(audit, found, rows, sealed, calls, branches, at, older)
    found.image = replace(
        found.image,
        checkpoints=tuple(sorted([*rows, *found.put], key=lambda r: r.seq)),
        calls=tuple(calls),
        pauses=tuple(pauses),
        writes=tuple(writes),
        objects=tuple(objects.values()),
    )
    found.moved = any(row.seq > audit.last_seq for row in rows) or _is_short(roots([*rows, *calls, *writes]), objects)
    return found


def _is_short(names: set[bytes], objects: dict[bytes, Obj]) -> bool:
    """Whether some of what these names reach is not among the objects."""
    todo, seen = list(names), set(names)
    while todo:
        obj = objects.get(todo.pop())
        if obj is None:
            return True
        new = set(names_in(obj.refs)) - seen
        seen |= new
        todo += new
    return False


def _bare(row: CallRow) -> CallRow | None:
    """A call whose row is whole, without the values that are lost. None for a read, which can be made again."""
    if row.effect == "read":
        return None
    nothing = chunks.pack({}, Registry(), opened=False)
    return replace(row, args=nothing.data, args_refs=nothing.refs, result=None, result_refs=b"")


def _place(
    audit: Audit,
    found: Mended,
    rows: list[CheckpointRow],
    sealed: list[CheckpointRow],
    calls: list[CallRow],
    branches: list[BranchRow],
    at: int,
    older: int | None,
) -> None:
    """The branches, and the row of the task.

    Args:
        sealed: Headers of the task's own checkpoints that are as they were sealed, also of those that miss an object: what
            they say of the steps that were done is so.
    """
    task = audit.task
    given = audit.numbers or Numbers()
    top = Numbers(
        seq=max([given.seq, *(r.seq for r in rows[-1:]), *(b.head.seq for b in branches), *audit.bad_checkpoints]),
        call=max([given.call, *(c.no for c in calls[-1:]), *audit.bad_calls]),
        pause=max([given.pause, *audit.bad_pauses]),
        line=max([given.line, *(b.line for b in branches), *(c.line for c in calls)]),
        position=given.position,
    )
    was = audit.row or TaskRow(
        task=task, status="running", created_at=min((r.created_at for r in rows), default=at), reason="its row was lost"
    )
    known = {(b.space, b.name) for b in branches}
    for row in rows:
        # A branch that rows were made on and that is not there: its head was the newest of them, as far as anybody knows.
        place = row.space, row.branch
        if place not in known and place in audit.lost_branches and row.kind != "failure":
            known.add((row.space, row.branch))
            branches.append(BranchRow(row.space, row.branch, Head(0, ""), 1, row.parent_seq))
    own = {seq: row for row in rows if (seq := row.seq)}
    current = was.branch
    if audit.row is None:
        current = recovery.newest_branch([r for r in rows if r.space == ""]) or current
    kept: list[BranchRow] = []
    put: list[CheckpointRow] = []
    seq, line = top.seq, top.line
    lost_calls = audit.lost_calls or older is not None
    taken = {(b.space, b.name) for b in branches} | {(r.space, r.branch) for r in rows}
    goes_on = current
    for branch in branches:
        head = own.get(branch.head.seq)
        whole = head is not None and (head.id, head.space) == (branch.head.id, branch.space)
        careful = lost_calls and branch.space == "" and branch.name == current
        if whole and not careful:
            kept.append(branch)
            continue
        mine = [r for r in rows if (r.space, r.branch) == (branch.space, branch.name) and r.kind != "failure"]
        if whole:
            kept.append(branch)
        elif mine:
            kept.append(replace(branch, head=Head(mine[-1].seq, mine[-1].id)))
        lost = None if whole else branch.head.seq or None
        chosen = head if whole else _before(branch, branches, rows, own, mine)
        if chosen is None:
            found.fell_back.append(FellBack(task, branch.name, None, lost, None, 0, "", branch.space))
            continue
        names = {name for space, name in taken if space == branch.space}
        name = recovery.next_name(branch.name, names)
        taken.add((branch.space, name))
        course = recovery.Course(branch.line, 0)
        if branch.space == "":
            course = recovery.course(
                sealed,
                [b for b in branches if b.space == ""],
                calls,
                journal="inherit",
                left=branch if branch.head.seq else None,
                chosen=chosen,
                left_guard=_guard(head) if whole and head is not None else None,
                lost_calls=lost_calls,
                older=older,
            )
        seq += 1
        if course.line is None:
            line += 1
        guard = max(course.guard, _guard(chosen))
        row = replace(
            states.with_guard(chosen, guard),
            id=new_id(),
            branch=name,
            parent_seq=chosen.seq,
            kind="manual",
            label=f"repaired, from {chosen.seq}",
            created_at=at,
            metrics=b"",
            pinned=False,
            seq=seq,
        )
        put.append(row)
        kept.append(BranchRow(branch.space, name, Head(row.seq, row.id), course.line or line, chosen.seq))
        if branch.space == "" and branch.name == current:
            goes_on = name
        found.fell_back.append(FellBack(task, branch.name, name, lost, chosen.seq, guard, course.why, branch.space))
    if kept and not any(b.space == "" and b.name == goes_on for b in kept):
        left = [b for b in kept if b.space == ""]
        goes_on = max(left, key=lambda b: b.head.seq).name if left else goes_on
    found.put = tuple(put)
    found.image = Image(
        row=replace(was, task=task, branch=goes_on),
        numbers=replace(top, seq=seq, line=line),
        branches=tuple(sorted(kept, key=lambda b: (b.space, b.name))),
        checkpoints=(),
    )


def _guard(row: CheckpointRow) -> int:
    """The guard that a checkpoint stands under."""
    parts = msgspec.msgpack.decode(row.root, type=dict[str, msgspec.Raw])
    return int(msgspec.msgpack.decode(parts["guard"])) if "guard" in parts else 0


def _before(
    branch: BranchRow,
    branches: list[BranchRow],
    rows: list[CheckpointRow],
    own: dict[int, CheckpointRow],
    mine: list[CheckpointRow],
) -> CheckpointRow | None:
    """The newest whole checkpoint that the branch goes back over."""
    if branch.space != "" or not branch.head.seq:
        return mine[-1] if mine else None
    line = recovery.lineage([r for r in rows if r.space == ""], [b for b in branches if b.space == ""], branch.name)
    return next((own[n] for n in line if n in own and n < branch.head.seq), mine[-1] if mine else None)

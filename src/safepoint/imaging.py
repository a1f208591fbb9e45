"""Whole tasks out of a store and into another: taken as of one moment, checked, packed for the other store, and checked there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Literal

from safepoint.codec import chunks, states, values
from safepoint.codec.nodes import names_in
from safepoint.errors import Conflict, Damaged, Unavailable, UsageError
from safepoint.model import Obj, new_id
from safepoint.portable import Packer, flat_digest, flat_of, misfit
from safepoint.rows import (
    BranchRow,
    CallRow,
    CheckpointRow,
    Commit,
    Head,
    Image,
    Lost,
    Numbers,
    PauseRow,
    TaskPatch,
    TaskRow,
    WriteRow,
    replace,
)
from safepoint.stores.base import Store
from safepoint.stores.whole import fence_of

__all__ = ["Taken", "content_of", "follows", "put", "repacked", "size_of", "take"]

TRIES = 100
"""How often a task is read that changes while it is read."""
PATIENT = 5
"""After so many times no quiet moment is waited for any more."""


@dataclass(slots=True)
class Taken:
    """A task as it was at one moment."""

    image: Image
    skipped: list[str] = field(default_factory=list)
    """What was damaged and left out."""


class _Parts:
    """What a walk gives, sorted by kind."""

    def __init__(self) -> None:
        self.row: TaskRow | None = None
        self.numbers = Numbers()
        self.branches: list[BranchRow] = []
        self.checkpoints: list[CheckpointRow] = []
        self.calls: list[CallRow] = []
        self.pauses: list[PauseRow] = []
        self.writes: list[WriteRow] = []
        self.lost: list[Lost] = []

    def key(self) -> tuple[Any, ...]:
        """By what it is seen that a task has changed."""
        return (
            self.row,
            self.numbers,
            tuple(self.branches),
            tuple((c.seq, c.id, c.pinned) for c in self.checkpoints),
            tuple((c.no, c.version) for c in self.calls),
            tuple((p.no, p.version) for p in self.pauses),
            tuple((w.key, w.seal) for w in self.writes),
        )


def take(store: Store, task: str, *, skip_damaged: bool = False) -> Taken | None:
    """All of a task as of one moment, every row and object checked; None if there is no such task.

    A walk is not one moment: it is repeated, without the objects, until two of them tell the same, or cut back to the moment at
    which it began. Objects are called by what they hold, so those of an earlier walk are as good; one that came in between is
    read with the row that reaches it.

    Raises:
        Damaged: some of it is. With ``skip_damaged`` checkpoints are left out, and bodies of calls whose rows are sound; but never
            a call or a pause, as a call that nobody remembers would be made again.
        NewerFormat: a checkpoint is of a newer safepoint. Unavailable: it changed all the time.
        UsageError: it was accepted as older than it was, and nobody has gone on from it.
    """
    if store.older(task) is not None:
        # What the lost steps did is on no record; the mark of that lies in this store, and would not go along.
        raise UsageError(
            f"task {task!r} was accepted as older than it was, and nobody has gone on from it yet",
            "a copy of it would make the calls of the lost steps a second time",
            "Accept it with cp.accept, rewind it or resume it here first.",
            task=task,
        )
    objects: dict[bytes, Obj] = {}
    lost: list[Lost] = []
    parts = _rows(store, task, objects, lost)
    for attempt in range(TRIES):
        again = _rows(store, task)
        if again.key() == parts.key():
            if _fetch(store, task, parts, objects):
                break
            # What cannot be read is damage if its row is still there, and else was deleted since the walk.
            again = _rows(store, task)
            if again.key() == parts.key():
                break
        parts = again
        if attempt >= PATIENT:
            cut = _cut(parts)
            if cut is not None and _fetch(store, task, cut, objects):
                parts = cut
                break
        time.sleep(min(0.001 * attempt, 0.02))
    else:
        raise Unavailable(
            f"task {task!r} changed {TRIES} times while it was read", "a run is busy with it", "Try it again later.", task=task
        )
    if parts.row is None:
        if parts.lost:
            raise _damaged(task, [f"{p.what}: {p.why} ({p.where})" for p in parts.lost])
        return None
    taken = _checked(task, parts, objects, [*parts.lost, *lost], skip_damaged)
    lease = store.lease(task)
    held = replace(taken.image, fence=0 if lease is None else lease.fence)
    taken.image = replace(held, fence=fence_of(held))
    return taken


def _rows(store: Store, task: str, objects: dict[bytes, Obj] | None = None, lost: list[Lost] | None = None) -> _Parts:
    parts = _Parts()
    with closing(iter(store.walk(task))) as walk:  # type: ignore[type-var]
        for part in walk:
            match part:
                case Obj():
                    if objects is None:
                        break  # rows come before objects
                    objects[part.name] = part
                case Lost():
                    if _kind(part) != "object":
                        parts.lost.append(part)
                    elif lost is not None:
                        lost.append(part)
                case TaskRow():
                    parts.row = part
                case Numbers():
                    parts.numbers = part
                case BranchRow():
                    parts.branches.append(part)
                case CheckpointRow():
                    parts.checkpoints.append(part)
                case CallRow():
                    parts.calls.append(part)
                case PauseRow():
                    parts.pauses.append(part)
                case WriteRow():
                    parts.writes.append(part)
    return parts


def _kind(lost: Lost) -> str:
    return lost.kind or lost.what.partition(" ")[0]


def _cut(parts: _Parts) -> _Parts | None:
    """What was there when the walk began, of a task that never stands still; None if some of it has been deleted since.

    A walk begins with the last numbers that were given out and the heads. What has a later number came later, and is left out; what
    has changed since is as it is now: that a call has come to its end is worth knowing.
    """
    numbers = parts.numbers
    heads = {(b.space, b.name): b.head.seq for b in parts.branches}
    kept = _Parts()
    kept.row, kept.numbers, kept.branches, kept.lost = parts.row, numbers, parts.branches, parts.lost
    for c in parts.checkpoints:
        head = heads.get((c.space, c.branch))
        if c.seq <= max(head or 0, numbers.seq):
            kept.checkpoints.append(c)
    steps = {c.seq: c.step for c in kept.checkpoints}
    if not steps.keys() >= set(heads.values()):
        return None
    done: dict[int, int] = {}  # by line: how far every branch on it has got
    for b in parts.branches:
        done[b.line] = min(done.get(b.line, steps[b.head.seq]), steps[b.head.seq])
    kept.calls = [c for c in parts.calls if c.began <= numbers.position or c.step < done.get(c.line, 0)]
    kept.pauses = [p for p in parts.pauses if p.no <= numbers.pause]
    # They have no number; those against what came later go with it, and one more against what was there says nothing wrong.
    later = {(c.space, c.id) for c in parts.checkpoints} - {(c.space, c.id) for c in kept.checkpoints}
    kept.writes = [w for w in parts.writes if (w.space, w.checkpoint) not in later]
    return kept


def _fetch(store: Store, task: str, parts: _Parts, objects: dict[bytes, Obj]) -> bool:
    """Get objects that came to be after the walk that read the others; whether all are there now."""
    whole = True
    sound: dict[bytes, str] = {}
    for row in parts.checkpoints:
        if _missing(row.refs, objects, sound):
            try:
                found = store.read(task, space=row.space, seq=row.seq)
            except Damaged:
                found = None
            objects |= found[1] if found is not None else {}
            whole &= found is not None and not _missing(row.refs, objects, sound)
    missing = [c for c in parts.calls if _missing(c.args_refs + c.result_refs, objects, sound)]
    if missing:
        try:
            objects |= store.calls(task, nos=[c.no for c in missing])[1]
        except Damaged:
            pass  # told by who checks
        whole &= not any(_missing(c.args_refs + c.result_refs, objects, sound) for c in missing)
    for space in sorted({w.space for w in parts.writes if _missing(w.refs, objects, sound)}):
        short = [w for w in parts.writes if w.space == space and _missing(w.refs, objects, sound)]
        try:
            objects |= store.writes(task, space=space, checkpoints={w.checkpoint for w in short})[1]
        except Damaged:
            pass
        whole &= not any(_missing(w.refs, objects, sound) for w in short)
    return whole


def _missing(refs: bytes, objects: dict[bytes, Obj], known: dict[bytes, str]) -> bool:
    return next(_unsound(refs, objects, known), None) is not None


def _unsound(refs: bytes, objects: dict[bytes, Obj], known: dict[bytes, str]) -> Iterator[str]:
    """What is wrong with the objects that ``refs`` reach. ``known`` are those that were looked at: '' if all below is well."""
    todo = list(names_in(refs))
    seen: set[bytes] = set()
    while todo:
        name = todo.pop()
        if name in seen or known.get(name) == "":
            continue
        seen.add(name)
        obj = objects.get(name)
        if obj is None:
            yield f"object {name.hex()} is missing"
        elif not chunks.verify_obj(obj) or obj.name != name:
            yield f"object {name.hex()} is not what its name says"
        else:
            todo += names_in(obj.refs)
            continue
        return
    known.update(dict.fromkeys(seen, ""))


def _damaged(task: str, found: list[str]) -> Damaged:
    more = f", and {len(found) - 1} more" if len(found) > 1 else ""
    return Damaged(
        f"task {task!r} is damaged: {found[0]}{more}",
        "a copy would hand the damage on",
        f"See `safepoint verify {task}`; skip_damaged=True leaves out what can be left out.",
        task=task,
        damaged=tuple(found),
    )


def _checked(task: str, parts: _Parts, objects: dict[bytes, Obj], lost: list[Lost], skip: bool) -> Taken:
    assert parts.row is not None
    for_good: list[str] = []  # what cannot be left out
    skipped: list[str] = []
    sound: dict[bytes, str] = {}
    for thing in lost:
        # A lost object is told with the row that needs it; one that nothing needs is no loss.
        if _kind(thing) == "checkpoint":
            skipped.append(f"{thing.what}: {thing.why}")
        elif _kind(thing) != "object":
            for_good.append(f"{thing.what}: {thing.why}")
    checkpoints: list[CheckpointRow] = []
    for row in parts.checkpoints:
        try:
            states.check_row(task, row)
            why = next(_unsound(row.refs, objects, sound), "")
        except Damaged as error:
            why = error.why
        if why:
            skipped.append(f"checkpoint {row.seq}: {why}")
        else:
            checkpoints.append(row)
    calls: list[CallRow] = []
    for call in parts.calls:
        try:
            call.check(task, f"call {call.no}")
        except Damaged as error:
            for_good.append(f"call {call.no}: {error.why}")
            continue
        for body, refs in (("args", call.args_refs), ("result", call.result_refs)):
            if why := next(_unsound(refs, objects, sound), ""):
                skipped.append(f"{'arguments' if body == 'args' else 'result'} of call {call.no}: {why}")
                call = replace(call, **{body: values.encode_tree({}) if body == "args" else None, f"{body}_refs": b""})
        calls.append(call)
    for pause in parts.pauses:
        try:
            pause.check(task, f"pause {pause.no}")
        except Damaged as error:
            for_good.append(f"pause {pause.no}: {error.why}")
    writes: list[WriteRow] = []
    for write in parts.writes:
        name = f"write {write.idx} of {write.writer!r} against checkpoint {write.checkpoint!r}"
        try:
            write.check(task, name)
        except Damaged as error:
            for_good.append(f"{name}: {error.why}")
            continue
        if why := next(_unsound(write.refs, objects, sound), ""):
            for_good.append(f"{name}: {why}")  # what it recorded would be done again
        writes.append(write)
    if for_good or (skipped and not skip):
        raise _damaged(task, [*for_good, *skipped])
    branches = [_standing(b, checkpoints, skipped) for b in parts.branches] if skipped else list(parts.branches)
    # Failure leaves of a branch that has nothing else left hang on nothing.
    gone = {(b.space, b.name) for b, now in zip(parts.branches, branches, strict=True) if now is None}
    checkpoints = [c for c in checkpoints if (c.space, c.branch) not in gone]
    image = Image(
        row=_at_rest(parts.row),
        numbers=parts.numbers,
        branches=tuple(b for b in branches if b is not None),
        checkpoints=tuple(checkpoints),
        calls=tuple(calls),
        pauses=tuple(parts.pauses),
        writes=tuple(writes),
        objects=tuple(_reached(checkpoints, calls, writes, objects)),
    )
    if why := misfit(image):
        raise _damaged(task, [*skipped, why])
    return Taken(image, skipped)


def _at_rest(row: TaskRow) -> TaskRow:
    """The row as the copy's: no run holds it, so it is not running."""
    status = "interrupted" if row.status == "running" else row.status
    return replace(row, status=status)


def _standing(branch: BranchRow, checkpoints: list[CheckpointRow], skipped: list[str]) -> BranchRow | None:
    """The branch at its newest checkpoint that is sound; None if it has none."""
    if any((c.seq, c.id, c.space) == (*branch.head, branch.space) for c in checkpoints):
        return branch
    own = [c for c in checkpoints if (c.space, c.branch) == (branch.space, branch.name) and c.kind != "failure"]
    own = [c for c in own if c.seq <= branch.head.seq] or own  # what lies beyond was let go of when the branch was set back
    if not own:
        skipped.append(f"branch {branch.name!r}: no checkpoint of it is left")
        return None
    head = Head(own[-1].seq, own[-1].id)
    skipped.append(f"branch {branch.name!r}: it ends at {head.seq} now, no more at {branch.head.seq}")
    return BranchRow(branch.space, branch.name, head, branch.line, branch.forked_from)


def _reached(
    checkpoints: list[CheckpointRow], calls: list[CallRow], writes: list[WriteRow], objects: dict[bytes, Obj]
) -> list[Obj]:
    found: dict[bytes, Obj] = {}
    todo = (
        [c.refs for c in checkpoints]
        + [w.refs for w in writes]
        + [refs for c in calls for refs in (c.args_refs, c.result_refs) if refs]
    )
    while todo:
        for name in names_in(todo.pop()):
            if name not in found:
                obj = found[name] = objects[name]
                if obj.refs:
                    todo.append(obj.refs)
    return list(found.values())


def standing_at(branch: BranchRow, row: CheckpointRow) -> BranchRow:
    """The branch as it was when this was its head."""
    return BranchRow(branch.space, branch.name, Head(row.seq, row.id), branch.line, None)


def numbers_of(store: Store, task: str) -> Numbers:
    """The last number of each kind that the task has given out."""
    with closing(iter(store.walk(task))) as walk:  # type: ignore[type-var]
        return next((part for part in walk if isinstance(part, Numbers)), Numbers())


def size_of(image: Image) -> int:
    rows = sum(len(c.root) + len(c.refs) for c in image.checkpoints)
    rows += sum(len(c.args) + len(c.args_refs) + len(c.result or b"") + len(c.result_refs) for c in image.calls)
    rows += sum(len(w.data) + len(w.refs) for w in image.writes)
    return rows + sum(len(o.data) + len(o.refs) for o in image.objects)


# -- what is in it, whatever the layout


def content_of(image: Image, *, plain: bool) -> dict[tuple[str, int], bytes]:
    """Digests of all that the task holds. With ``plain`` of the values themselves, the same for every layout; else of their roots.

    Raises:
        Damaged: some of it cannot be read.
    """
    objects = {obj.name: obj for obj in image.objects}

    def body(root: bytes, refs: bytes) -> bytes:
        return chunks.root_digest(flat_of(root, refs, objects)[1], b"") if plain else chunks.root_digest(root, refs)

    found: dict[tuple[str, int], bytes] = {}
    for row in image.checkpoints:
        found["checkpoint", row.seq] = _seal(row, body(row.root, row.refs), digest=b"")
    for call in image.calls:
        bodies = [body(call.args, call.args_refs)]
        if call.result is not None:
            bodies.append(body(call.result, call.result_refs))
        found["call", call.no] = _seal(call, *bodies, args=b"", args_refs=b"", result=None, result_refs=b"")
    for pause in image.pauses:
        found["pause", pause.no] = _seal(pause)
    for i, write in enumerate(sorted(image.writes, key=lambda w: w.key)):
        found["write", i] = _seal(write, body(write.data, write.refs) if write.data else b"", data=b"", refs=b"")
    for i, branch in enumerate(sorted(image.branches, key=lambda b: (b.space, b.name))):
        found["branch", i] = repr(branch).encode()
    return found


def heads_of(image: Image) -> dict[int, bytes]:
    """Digests of the states at the heads, the same for every layout."""
    objects = {obj.name: obj for obj in image.objects}
    heads = {branch.head.seq for branch in image.branches}
    return {row.seq: flat_digest(row, objects) for row in image.checkpoints if row.seq in heads}


def _seal(row: Any, *bodies: bytes, **without: Any) -> bytes:
    seal: bytes = replace(row, **without).sealed("").seal
    return chunks.name_of(b"".join(bodies), seal)


def repacked(image: Image, *, chunked: bool) -> Image:
    """The image with its values packed for a store of that sort."""
    objects = {obj.name: obj for obj in image.objects}
    packer = Packer(chunked=chunked)
    checkpoints = []
    for row in image.checkpoints:
        root, refs, digest = packer.state(*flat_of(row.root, row.refs, objects))
        checkpoints.append(replace(row, root=root, refs=refs, digest=digest))
    calls = []
    for call in image.calls:
        args, args_refs = packer.values(*flat_of(call.args, call.args_refs, objects), opened=True)
        result, result_refs = call.result, call.result_refs
        if result is not None:
            result, result_refs = packer.values(*flat_of(result, result_refs, objects), opened=False)
        calls.append(replace(call, args=args, args_refs=args_refs, result=result, result_refs=result_refs))
    writes = []
    for write in image.writes:
        if write.data:
            data, refs = packer.values(*flat_of(write.data, write.refs, objects), opened=True)
            write = replace(write, data=data, refs=refs)
        writes.append(write)
    return replace(
        image,
        checkpoints=tuple(checkpoints),
        calls=tuple(calls),
        writes=tuple(writes),
        objects=tuple(packer.objects.values()),
    )


# -- into a store


def put(
    store: Store, image: Image, *, replaces: Image | None = None, marks: bool = True
) -> tuple[Literal["written", "marks", "same"], Image]:
    """Write a task; what became of it, and what is there then, read back and found to be the same.

    Args:
        image: Packed for the store.
        replaces: What is there and may go, as ``follows`` has said; there until the new one is.
        marks: Whether pins, status and the like are brought up to the image's where all rows are there already.

    Raises:
        Conflict: another task of that name is there. LeaseHeld: a live run holds what would be replaced. Damaged: what was written cannot be read back as it was.
    """
    task = image.row.task
    try:
        written = store.write_task(image, over=replaces)
    except Conflict:
        now = take(store, task)
        if now is None or content_of(now.image, plain=True) != content_of(image, plain=True):
            raise
        # The same in another layout, as an older safepoint wrote it.
        return ("marks" if marks and _same_marks(store, image) else "same"), now.image
    changed = not written and marks and _same_marks(store, image)
    there = take(store, task)
    if there is None or content_of(there.image, plain=False) != content_of(image, plain=False):
        raise Damaged(
            f"task {task!r} is not in {store.url} as it was written",
            "what was read back differs",
            "Check that store with `safepoint check`.",
            task=task,
        )
    return ("written" if written else "marks" if changed else "same"), there.image


def _same_marks(store: Store, image: Image) -> bool:
    """Pins, and what the task's row says: they are no part of what makes a task the same."""
    task = image.row.task
    changed = False
    there = _rows(store, task)
    pinned = {c.seq: c.pinned for c in there.checkpoints}
    for row in image.checkpoints:
        if pinned.get(row.seq) != row.pinned:
            changed |= store.pin(task, row.seq, row.pinned, space=row.space)
    now = there.row
    if now is not None and now.status != "running":
        names = ("status", "branch", "agent", "input", "reason", "raised", "parent")
        differ = {n: getattr(image.row, n) for n in names if getattr(image.row, n) != getattr(now, n)}
        if {n: v for n, v in differ.items() if v is not None}:
            store.commit(Commit(task=task, id=new_id(), patch=TaskPatch(**differ)))
            changed = True
    return changed


def follows(new: Image, old: Image) -> bool:
    """Whether ``old`` is an earlier moment of ``new``, and has nothing of its own.

    Every row of a task's life has a number that comes once, so it is enough to see that what ``old`` has last is in ``new`` too.
    Checkpoints and calls that retention has since taken from ``new`` may be in ``old``.
    """
    a, b = old.numbers, new.numbers
    if any(getattr(a, name) > getattr(b, name) for name in a.__struct_fields__):
        return False
    there = {c.seq: c.id for c in new.checkpoints}
    if any(c.seq in there and there[c.seq] != c.id for c in old.checkpoints):
        return False
    if any(there.get(branch.head.seq, branch.head.id) != branch.head.id for branch in old.branches):
        return False
    newest = max((c.seq for c in old.checkpoints), default=0)
    if newest and newest not in there:
        return False
    branches = {(x.space, x.name): x for x in new.branches}
    for branch in old.branches:
        now = branches.get((branch.space, branch.name))
        if now is not None and now.line != branch.line:
            return False
        # One that was set back or dropped since has left what it stood at.
        if (now is None or now.head.seq < branch.head.seq) and there.get(branch.head.seq) != branch.head.id:
            return False
    calls = {c.no: c for c in new.calls}
    for call in old.calls:
        same = calls.get(call.no)
        if same is None:
            if call.base_seq in there:
                return False
        elif (
            (same.idempotency_key, same.ident) != (call.idempotency_key, call.ident)
            or same.version < call.version
            or (same.version == call.version and same.status != call.status)
        ):
            return False
    pauses = {p.no: p for p in new.pauses}
    for pause in old.pauses:
        other = pauses.get(pause.no)
        if other is None:
            if pause.base_seq in there:
                return False
        elif (
            other.name != pause.name
            or other.version < pause.version
            or (other.version == pause.version and other.answer != pause.answer)
        ):
            return False
    went = {(c.space, c.id) for c in old.checkpoints} - {(c.space, c.id) for c in new.checkpoints}
    writes = {w.key: w for w in new.writes}
    for write in old.writes:
        mine = writes.get(write.key)
        if mine is None:
            if (write.space, write.checkpoint) not in went:
                return False
        elif write.idx >= 0 and (mine.path, mine.data, mine.refs) != (write.path, write.data, write.refs):
            return False
    return True

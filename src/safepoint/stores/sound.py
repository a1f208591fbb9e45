"""Which checkpoints cannot be read whole: what retention asks before it deletes, since what is damaged is never deleted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from safepoint.codec.nodes import name_of, names_in
from safepoint.errors import Damaged
from safepoint.model import Obj
from safepoint.rows import CheckpointRow

__all__ = ["Flaw", "find", "flaw", "unreadable", "wrong"]

BATCH = 500
"""Objects that are read at a time."""


class Flaw(NamedTuple):
    why: str
    name: bytes | None = None
    """The object that is missing or damaged; None: it is the row itself."""


def wrong(name: bytes, obj: Obj | None) -> str:
    """What is wrong with an object; '' if nothing is."""
    if obj is None:
        return f"object {name.hex()} is missing"
    if obj.refs.__class__ is not bytes or obj.data.__class__ is not bytes:
        return f"object {name.hex()} is damaged"
    return f"object {name.hex()} is damaged" if len(obj.refs) & 15 or name_of(obj.refs, obj.data) != name else ""


def flaw(task: str, row: CheckpointRow) -> str:
    """What is wrong with the row itself and its root; '' if nothing is."""
    try:
        row.check(task, f"checkpoint {row.seq}")
    except Damaged as error:
        return error.why
    if len(row.refs) & 15:
        return "its list of objects is cut off"
    return "" if name_of(row.refs, row.root) == row.digest else "its content does not match its digest"


def unreadable(
    task: str,
    rows: Iterable[CheckpointRow],
    fetch: Callable[[list[bytes]], Iterable[Obj]],
    sound: set[bytes] | None = None,
) -> dict[int, str]:
    """As ``find``, of rows and objects that do not change meanwhile."""
    return {seq: flaw.why for seq, flaw in find(task, rows, fetch, sound).items()}


def find(
    task: str,
    rows: Iterable[CheckpointRow],
    fetch: Callable[[list[bytes]], Iterable[Obj]],
    sound: set[bytes] | None = None,
) -> dict[int, Flaw]:
    """Those of the rows that are damaged, or reach an object that is missing or damaged, and why.

    Each object is read once, however many checkpoints reach it.

    Args:
        fetch: Gives those of the named objects that are there and can be read.
        sound: Names that were found sound with all that they reach; not looked at again, and added to.
    """
    bad: dict[int, Flaw] = {}
    tops: dict[int, bytes] = {}
    for row in rows:
        if why := flaw(task, row):
            bad[row.seq] = Flaw(why)
        else:
            tops[row.seq] = row.refs
    known: set[bytes] = set() if sound is None else sound
    seen: set[bytes] = set()
    inner: dict[bytes, bytes] = {}
    lost: dict[bytes, str] = {}
    level = _new(tops.values(), known, seen)
    while level:
        below: list[bytes] = []
        for i in range(0, len(level), BATCH):
            batch = level[i : i + BATCH]
            found = {o.name: o for o in fetch(batch)}
            for name in batch:
                obj = found.get(name)
                if why := wrong(name, obj):
                    lost[name] = why
                elif obj is not None and obj.refs:
                    inner[name] = obj.refs
                    below.append(obj.refs)
        level = _new(below, known, seen)
    if not lost:
        known |= seen
        return bad
    for seq, refs in tops.items():
        if (name_ := _reached(refs, inner, lost)) is not None:
            bad[seq] = Flaw(lost[name_], name_)
    return bad


def _new(runs: Iterable[bytes], known: set[bytes], seen: set[bytes]) -> list[bytes]:
    found: dict[bytes, None] = {}
    for run in runs:
        found.update((name, None) for name in names_in(run) if name not in known and name not in seen)
    seen.update(found)
    return list(found)


def _reached(refs: bytes, inner: dict[bytes, bytes], lost: dict[bytes, str]) -> bytes | None:
    todo, seen = list(names_in(refs)), set()
    while todo:
        name = todo.pop()
        if name in lost:
            return name
        if name not in seen and name in inner:
            seen.add(name)
            todo += names_in(inner[name])
    return None

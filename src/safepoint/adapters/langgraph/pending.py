"""Pending writes as rows: which of them stand, and in which order they are given back; pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from langgraph.checkpoint.base import WRITES_IDX_MAP

from safepoint.adapters.langgraph.form import Form
from safepoint.model import Obj
from safepoint.rows import WriteRow

__all__ = ["APART", "HIDDEN", "NULL_TASK", "answer_of", "answers", "packed_writes", "unpacked_writes"]

NULL_TASK = "00000000-0000-0000-0000-000000000000"
"""The writer of what comes from outside of any node: input, and commands."""
APART = 1 << 20
"""From this index on: regular writes that tell of an error. They must not stand in the way of what a later try writes."""
ANSWERS = 1 << 21
"""From this index on: answers to the questions of a checkpoint, one for each run that has given one. A run gives the next after those that
it has found; of two that found the same, the first to come stands, and the other is told."""
HIDDEN = "safepoint:hidden"
"""The writer of the mark of a checkpoint that was deleted, and that a delta channel of a later one still needs."""

_RESUME = "__resume__"

Writes = dict[str, list[tuple[str, str, Any]]]


def packed_writes(
    form: Form,
    writes: Sequence[tuple[str, Any]],
    *,
    given: int | None,
    base: Any,
    flat: bool,
    space: str,
    checkpoint: str,
    writer: str,
    path: str,
) -> tuple[list[WriteRow], list[Obj]]:
    """The rows of one call of ``put_writes``, each key once, and the objects that they reach.

    Args:
        given: How many answers the run has found, if it is a run that gives one.
    """
    rows: dict[int, WriteRow] = {}
    objects: dict[bytes, Obj] = {}

    def record(idx: int, group: Sequence[tuple[str, Any]]) -> None:
        made = form.pack_writes(group, base=base, flat=flat)
        objects.update((o.name, o) for o in made.new)
        rows[idx] = WriteRow(  # of two of one kind the last one stands
            space=space, checkpoint=checkpoint, writer=writer, idx=idx, path=path, data=made.data, refs=made.refs
        )

    regular: list[tuple[str, Any]] = []
    outside = writer == NULL_TASK
    for position, (channel, value) in enumerate(writes):
        if isinstance(value, BaseException) and channel.startswith("__error"):
            value = repr(value)  # as all savers have it: what is stored is never made an exception again
        special = WRITES_IDX_MAP.get(channel)
        if channel == _RESUME and outside and given is not None:
            record(ANSWERS + given, [(channel, value)])
        elif special is not None:
            record(special, [(channel, value)])
        elif outside:
            record(position, [(channel, value)])  # its list grows from call to call
        elif channel.startswith("__error"):
            record(APART + position, [(channel, value)])
        else:
            regular.append((channel, value))
    if regular:
        record(0, regular)
    return list(rows.values()), list(objects.values())


def answer_of(rows: Iterable[WriteRow]) -> WriteRow | None:
    """The answer among rows that are to be written, if it is one that only the first may give."""
    return next((row for row in rows if row.writer == NULL_TASK and row.idx >= ANSWERS), None)


def answers(rows: Iterable[WriteRow]) -> int:
    """How many answers a checkpoint has been given."""
    return sum(_is_answer(row) for row in rows)


def _is_answer(row: WriteRow) -> bool:
    return row.writer == NULL_TASK and (row.idx >= ANSWERS or row.idx == WRITES_IDX_MAP[_RESUME])


def unpacked_writes(form: Form, thread: str, rows: Iterable[WriteRow], objects: Mapping[bytes, Obj]) -> Writes:
    """Pending writes by checkpoint, in the order in which a superstep applies them; of answers, the newest."""
    found: Writes = {}
    newest: dict[str, WriteRow] = {}
    for row in rows:
        if row.writer == HIDDEN:
            continue
        row.check(thread, f"a write of {row.writer} on {row.checkpoint}")
        if _is_answer(row):
            if row.checkpoint not in newest or row.idx > newest[row.checkpoint].idx:
                newest[row.checkpoint] = row
            continue
        pairs = form.unpack_writes(row.data, row.refs, objects)
        found.setdefault(row.checkpoint, []).extend((row.writer, channel, value) for channel, value in pairs)
    for checkpoint, row in newest.items():
        pairs = form.unpack_writes(row.data, row.refs, objects)
        found[checkpoint] = [*((row.writer, channel, value) for channel, value in pairs), *found.get(checkpoint, [])]
    return found

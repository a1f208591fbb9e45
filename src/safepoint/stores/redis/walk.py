"""Everything of a task in Redis, as it lies there, going on past what cannot be read.

The names of all fields come first, then their values in the order in which a walk gives them, about a megabyte at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from safepoint.errors import Damaged
from safepoint.rows import BranchRow, Image, Lost, Part, TaskRow
from safepoint.stores.redis import layout
from safepoint.stores.redis.sweep import BYTES, PAGE, numbered, start, values_of

if TYPE_CHECKING:
    from safepoint.stores.redis.client import Client

__all__ = ["OTHERS", "ROW", "branch", "branch_values", "names_of", "place", "row_fields", "walk"]

_KINDS: dict[bytes, tuple[str, Callable[[int, bytes], Any]]] = {
    b"c:": ("call", layout.call),
    b"p:": ("pause", layout.pause),
}
ROW = re.compile(rb"([hrcp]):([1-9]\d{0,15})")
OTHERS = re.compile(
    rb"t:[a-z]+|f:[a-z]+|n|w|born|count|branches|open|asks|stages|q|q:\d+|[kgj]:\d+|[ibl]:[^\0]*\0[^\0]+|s:.*", re.DOTALL
)


def walk(client: Client, task: str, row_of: Callable[[str], TaskRow | None]) -> Iterator[Part]:
    """``row_of`` reads the row of a task."""
    key = client.keys.task(task)
    lengths = names_of(client, key)
    if not lengths:
        return
    where = f"key {key.decode()}"
    if b"t:id" not in lengths and not any(ROW.fullmatch(name) or name[:2] in {b"b:", b"l:"} for name in lengths):
        return  # what a first save on its way has staged
    yield from _head(client, task, where, row_of)
    yield from _branches(client, key, lengths, where)
    yield from _checkpoints(client, key, lengths, where)
    for prefix, (kind, make) in _KINDS.items():
        yield from _rows(client, key, lengths, prefix, kind, make, where)
    for name, value in _in_batches(client, key, sorted(n for n in lengths if n[:2] == b"o:"), lengths):
        if value is None:
            continue
        if len(name) != 18 or len(value) < 4 + layout.STAMP:
            yield Lost(f"object {name[2:].hex()}", f"{where}, field {name!r}", "it is cut off", kind="object", name=name[2:])
        else:
            yield layout.obj(name[2:], value)
    yield from _discord(client, task, key, lengths, where)


def _head(client: Client, task: str, where: str, row_of: Callable[[str], TaskRow | None]) -> Iterator[Part]:
    try:
        found = client.command("HGET", client.keys.task(task), "n")
        yield layout.numbers_of(found)
    except Damaged as error:
        yield Lost(f"the numbers of task {task!r}", f"{where}, field n", error.why, kind="task")
    try:
        row = row_of(task)
    except Damaged as error:
        yield Lost(f"the row of task {task!r}", where, error.why or error.what, kind="task")
        return
    if row is None:
        if client.command("EXISTS", client.keys.task(task)):
            yield Lost(
                f"the row of task {task!r}",
                f"{where}, field t:id",
                "it is gone, and rows that belong to it are there",
                kind="task",
            )
    elif row.task != task:
        yield Lost(f"the row of task {task!r}", f"{where}, field t:id", f"it says {row.task!r}", kind="task")
    else:
        yield row


def place(client: Client, task: str, kind: str, key: Any) -> str:
    at = client.keys.task(task).decode()
    match kind, key:
        case (("checkpoint" | "call" | "pause"), int()):
            return f"key {at}, field {kind[0] if kind != 'checkpoint' else 'h'}:{key}"
        case "object", bytes():
            return f"key {at}, field o:{key.hex()}"
        case "branch", (str(), str()):
            return f"key {at}, field b:{key[0]}\\0{key[1]}"
    return ""


def row_fields(image: Image) -> dict[bytes, bytes]:
    """What of a task's fields follows from its rows: marks of what is there, counts, what is open."""
    found: dict[bytes, int] = {}
    for kind, numbers in (
        ("k", [row.seq for row in image.checkpoints]),
        ("g", [row.no for row in image.calls]),
        ("j", [row.no for row in image.pauses]),
    ):
        found |= layout.mask(kind, numbers)
    fields = {field: b"%d" % bits for field, bits in found.items()}
    fields[b"count"] = b"%d" % len(image.checkpoints)
    fields[b"open"] = b"".join(map(layout.open_entry, image.calls))
    fields[b"asks"] = b"".join(map(layout.open_entry, image.pauses))
    fields[b"branches"] = b"".join(b"%s\0%s\0" % (b.space.encode(), b.name.encode()) for b in image.branches)
    for b in image.branches:
        fields[layout.field("b", b.space, b.name)] = layout.head(b.head)
        fields[layout.field("l", b.space, b.name)] = layout.pack([b.line, b.forked_from])
    for row in image.checkpoints:
        fields[layout.field("i", row.space, row.id)] = b"%d" % row.seq
    return fields


def names_of(client: Client, key: bytes) -> dict[bytes, int]:
    """The fields of a hash, with the lengths of their values."""
    found: dict[bytes, int] = {}
    cursor = b"0"
    while True:
        cursor, page = client.script("walk_names", [key, key + b":f"], [cursor, BYTES])
        found.update(zip(page[::2], page[1::2], strict=True))
        if cursor == b"0":
            return found


def _in_batches(
    client: Client, key: bytes, fields: Iterable[bytes], lengths: dict[bytes, int], *, pairs: int = 1
) -> Iterator[tuple[bytes, bytes | None]]:
    """Fields with their values, about a megabyte at a time; ``pairs`` of them are never read apart."""
    batch: list[bytes] = []
    size = 0
    for i, field in enumerate(fields, 1):
        batch.append(field)
        size += lengths.get(field, 0)
        if (size > BYTES or len(batch) >= PAGE) and i % pairs == 0:
            yield from zip(batch, client.command("HMGET", key, *batch), strict=True)
            batch, size = [], 0
    if batch:
        yield from zip(batch, client.command("HMGET", key, *batch), strict=True)


def branch_values(client: Client, key: bytes, names: list[bytes]) -> Iterator[tuple[bytes, bytes | None, bytes | None]]:
    found = values_of(client, key, [prefix + name for name in names for prefix in (b"b:", b"l:")])
    for name in names:
        yield name, next(found)[1], next(found)[1]


def branch(name: bytes, head: bytes | None, fixed: bytes | None) -> BranchRow:
    """Damaged if it cannot be read."""
    space, _, text = name.partition(b"\0")
    where, line = layout.head_of(head), layout.fixed_of(fixed)
    if where is None or line is None:
        raise Damaged("a branch is damaged", "where it stands is missing")
    return BranchRow(layout.decoded(space), layout.decoded(text), where, *line)


def _branches(client: Client, key: bytes, lengths: dict[bytes, int], where: str) -> Iterator[Part]:
    listed = client.command("HGET", key, "branches") or b""
    parts = listed.split(b"\0")
    names = {b"\0".join(pair) for pair in zip(parts[:-1:2], parts[1::2], strict=False)}
    there = {name[2:] for name in lengths if name[:2] in {b"b:", b"l:"}}
    found: list[BranchRow] = []
    for name, head, fixed in branch_values(client, key, sorted(names | there)):
        if head is None and fixed is None and name not in names:
            continue
        said = name.partition(b"\0")[2].decode("utf-8", "backslashreplace")
        at = f"{where}, field b:{said}"
        try:
            if name not in names:
                raise Damaged("", "it is not in the list of branches")
            found.append(branch(name, head, fixed))
        except Damaged as error:
            yield Lost(f"branch {said!r}", at, error.why, kind="branch")
    yield from sorted(found, key=lambda b: (b.space, b.name))


def _checkpoints(client: Client, key: bytes, lengths: dict[bytes, int], where: str) -> Iterator[Part]:
    seqs = sorted({int(m[2]) for name in lengths if (m := ROW.fullmatch(name)) and m[1] in b"hr"})
    fields = [b"%s:%d" % (kind, seq) for seq in seqs for kind in (b"h", b"r")]
    values = _in_batches(client, key, fields, lengths, pairs=2)
    for seq in seqs:
        top, below = next(values)[1], next(values)[1]
        if top is None and below is None:
            continue  # it has gone meanwhile
        try:
            if top is None:
                raise Damaged("", "its header is missing")
            yield layout.checkpoint(seq, top, below)
        except Damaged as error:
            yield Lost(f"checkpoint {seq}", f"{where}, field h:{seq}", error.why, kind="checkpoint", first=seq, last=seq)


def _rows(
    client: Client,
    key: bytes,
    lengths: dict[bytes, int],
    prefix: bytes,
    kind: str,
    make: Callable[[int, bytes], Any],
    where: str,
) -> Iterator[Part]:
    numbers = sorted(int(m[2]) for name in lengths if (m := ROW.fullmatch(name)) and name[:2] == prefix)
    for no, (_, value) in zip(numbers, _in_batches(client, key, [prefix + b"%d" % n for n in numbers], lengths), strict=True):
        if value is None:
            continue
        try:
            yield make(no, value)
        except Damaged as error:
            yield Lost(f"{kind} {no}", f"{where}, field {prefix.decode()}{no}", error.why, kind=kind, first=no, last=no)


def _discord(client: Client, task: str, key: bytes, lengths: dict[bytes, int], where: str) -> Iterator[Lost]:
    """What counts, marks and names say otherwise than the rows do: looked at only if nothing was written meanwhile."""
    at = start(client, task)
    if at is None:
        return
    names = names_of(client, key)
    rows = {kind: {int(m[2]) for n in names if (m := ROW.fullmatch(n)) and m[1] == kind} for kind in (b"h", b"c", b"p")}
    found: list[Lost] = []
    try:
        for kind, block, last, what in (
            (b"h", "k", at.numbers.seq, "checkpoint"),
            (b"c", "g", at.numbers.call, "call"),
            (b"p", "j", at.numbers.pause, "pause"),
        ):
            marked = set(numbered(client, key, block, last))
            if marked != rows[kind]:
                why = f"the task counts {len(marked)}, and {len(rows[kind])} are there"
                missing, many = len(marked - rows[kind]), len(rows[kind] - marked)
                text = f"{missing} {what}s are missing" if missing else f"{many} {what}s too many"
                found.append(Lost(text, f"{where}, fields {block}:…", why, kind=what))
        count = client.command("HGET", key, "count") or b"0"
        if count != b"%d" % len(rows[b"h"]):
            why = f"the task counts {count.decode('utf-8', 'replace')}, and {len(rows[b'h'])} are there"
            found.append(Lost("the count of checkpoints is wrong", f"{where}, field count", why, kind="checkpoint"))
    except Damaged as error:
        found.append(Lost("counts cannot be read", where, f"the counts of rows: {error.why}", kind="structure"))
    found += [
        Lost(f"field {name!r}", where, "no such field belongs to a task", kind="foreign")
        for name in sorted(names)
        if not (ROW.fullmatch(name) or OTHERS.fullmatch(name) or name[:2] == b"o:")
    ]
    if found:
        again = start(client, task)
        if again is not None and again.w == at.w:
            yield from found

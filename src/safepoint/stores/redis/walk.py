"""Everything of a task in Redis, as it lies there, going on past what cannot be read.

The names of all fields come first, then their values in the order in which a walk gives them, about a megabyte at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from safepoint.errors import Damaged
from safepoint.rows import BranchRow, CallRow, CheckpointRow, Image, Lost, Part, PauseRow, TaskRow, replace
from safepoint.stores.redis import layout
from safepoint.stores.redis.fields import BYTES, PAGE, numbered, values_of

if TYPE_CHECKING:
    from safepoint.stores.redis.client import Client

__all__ = ["ROW", "branch", "branch_values", "has_rows", "is_known", "names_of", "place", "row_fields", "walk"]

_KINDS: dict[bytes, tuple[str, Callable[[int, bytes], Any]]] = {
    b"c:": ("call", layout.call),
    b"p:": ("pause", layout.pause),
}
ROW = re.compile(rb"([hrcp]):([1-9]\d{0,15})")
_OTHERS = re.compile(
    rb"t:[a-z]+|f:[a-z]+|n|w|born|count|branches|open|asks|stages|sweeps|q|q:\d+|[kgjed]:\d+|[ibl]:[^\0]*\0[^\0]+|v:[^\0]*\0[^\0]+(\0\d+)?|s:.*",
    re.DOTALL,
)


def walk(client: Client, task: str, row_of: Callable[[str], TaskRow | None]) -> Iterator[Part]:
    """``row_of`` reads the row of a task."""
    key = client.keys.task(task)
    lengths = names_of(client, key)
    if not lengths:
        return
    where = f"key {key.decode()}"
    if b"t:id" not in lengths and not _are_rows(lengths):
        return  # what a first save on its way has staged
    w = client.command("HGET", key, "w")
    yield from _head(client, task, where, row_of)
    yield from _branches(client, key, lengths, where)
    told = _Told({}, set(), set())
    for part in _checkpoints(client, key, lengths, where):
        if isinstance(part, CheckpointRow):
            told.ids[layout.field("i", part.space, part.id)] = b"%d" % part.seq
        yield part
    for prefix, (kind, make) in _KINDS.items():
        for part in _rows(client, key, lengths, prefix, kind, make, where):
            if isinstance(part, CallRow | PauseRow) and (entry := layout.open_entry(part)):
                (told.open if kind == "call" else told.asks).add(entry)
            yield part
    yield from _writes(client, key, lengths, where)
    for name, value in _in_batches(client, key, sorted(n for n in lengths if n[:2] == b"o:"), lengths):
        if value is None:
            continue
        if len(name) != 18 or len(value) < 4 + layout.STAMP:
            yield Lost(f"object {name[2:].hex()}", f"{where}, field {name!r}", "it is cut off", kind="object", name=name[2:])
        else:
            yield layout.obj(name[2:], value)
    yield from _discord(client, key, where, w, told)


def _head(client: Client, task: str, where: str, row_of: Callable[[str], TaskRow | None]) -> Iterator[Part]:
    try:
        found = client.command("HGET", client.keys.task(task), "n")
        yield layout.numbers_of(found)
    except Damaged as error:
        yield Lost(f"the numbers of task {task!r}", f"{where}, field n", error.why, kind="task")
    try:
        row = row_of(task)
    except Damaged as error:
        # Something that is read along with it is damaged (a head, a branch), or it is itself.
        row = _bare_row(client, task)
        if row is None or row.task != task:
            yield Lost(f"the row of task {task!r}", where, error.why or error.what, kind="task")
    else:
        if row is None and (row := _bare_row(client, task)) is not None:
            why = "it is gone, and rows that belong to it are there"
            yield Lost(f"the row of task {task!r}", f"{where}, field t:id", why, kind="task")
    if row is not None:
        yield replace(row, task=task)  # whose key it is, is told by the key


def _bare_row(client: Client, task: str) -> TaskRow | None:
    """The row as far as its own fields tell it; None if these cannot be read."""
    names = ("id", "status", "branch", "agent", "input", "reason", "raised", "parent", "attempts", "created", "updated")
    found = client.command("HMGET", client.keys.task(task), *[f"t:{name}" for name in names])
    id, status, branch, agent, given, reason, raised, parent, *numbers = found
    try:
        attempts, created, updated = map(int, numbers)
        return TaskRow(
            task=layout.decoded(id or b""),
            status=layout.decoded(status),
            branch=layout.decoded(branch),
            agent=layout.decoded(agent or b""),
            input=given or b"",
            reason=layout.decoded(reason or b""),
            raised=raised or b"",
            parent=None if parent is None else layout.decoded(parent),
            attempts=attempts,
            created_at=created,
            updated_at=updated,
        )
    except (Damaged, AttributeError, TypeError, ValueError):
        return None


def is_known(name: bytes) -> bool:
    """Whether a task has fields of such a name."""
    if name[:2] == b"w:":
        try:
            layout.key_of(name)
        except Damaged:
            return False
        return True
    return name[:2] == b"o:" or ROW.fullmatch(name) is not None or _OTHERS.fullmatch(name) is not None


def has_rows(client: Client, key: bytes) -> bool:
    """Whether there is anything of a task but objects, which may be staged for one that is still to come."""
    return _are_rows(names_of(client, key))


def _are_rows(names: Iterable[bytes]) -> bool:
    return any(ROW.fullmatch(name) or name[:2] in {b"b:", b"l:", b"w:"} for name in names)


def place(client: Client, task: str, kind: str, key: Any) -> str:
    at = client.keys.task(task).decode()
    match kind, key:
        case (("checkpoint" | "call" | "pause"), int()):
            return f"key {at}, field {kind[0] if kind != 'checkpoint' else 'h'}:{key}"
        case "object", bytes():
            return f"key {at}, field o:{key.hex()}"
        case "branch", (str(), str()):
            return f"key {at}, field b:{key[0]}\\0{key[1]}"
        case "write", (str(), str(), str(), int()):
            return f"key {at}, field {_shown(layout.write_field(key))}"
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
    fields[b"branches"] = b""
    for b in image.branches:
        space = b.space.encode()
        at = layout.roll(space)
        fields[at] = b"%s%s\0%s\0" % (fields.get(at, b""), space, b.name.encode())
        fields[layout.field("b", b.space, b.name)] = layout.head(b.head)
        fields[layout.field("l", b.space, b.name)] = layout.pack([b.line, b.forked_from])
    for row in image.checkpoints:
        fields[layout.field("i", row.space, row.id)] = b"%d" % row.seq
    return fields


def names_of(client: Client, key: bytes) -> dict[bytes, int]:
    """The fields of a hash, with the lengths of their values."""
    found: dict[bytes, int] = {}
    cursor, server = b"0", b""
    while True:
        here, after, page = client.script("walk_names", [key, key + b":f"], [cursor, BYTES])
        if cursor != b"0" and here != server:
            cursor, found = b"0", {}  # restarted, or failed over, where another order holds
            continue
        server, cursor = here, after
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
    names: dict[bytes, bytes] = {}
    """Each that a list names, and the last list that does."""
    for at, listed in values_of(client, key, [at for at in layout.ROLLS if at in lengths]):
        names |= dict.fromkeys(layout.names(listed), at)
    there = {name[2:] for name in lengths if name[:2] in {b"b:", b"l:"}}
    found: list[BranchRow] = []
    for name, head, fixed in branch_values(client, key, sorted(names.keys() | there)):
        if head is None and fixed is None and name not in names:
            continue
        said = name.partition(b"\0")[2].decode("utf-8", "backslashreplace")
        field = f"{where}, field b:{said}"
        try:
            if names.get(name) != layout.roll(name.partition(b"\0")[0]):
                raise Damaged("", "it is not in the list of branches")
            found.append(branch(name, head, fixed))
        except Damaged as error:
            yield Lost(f"branch {said!r}", field, error.why, kind="branch")
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


def _writes(client: Client, key: bytes, lengths: dict[bytes, int], where: str) -> Iterator[Part]:
    there = sorted((layout.key_of(name), name) for name in lengths if name[:2] == b"w:" and is_known(name))
    for (of, name), (_, value) in zip(there, _in_batches(client, key, [name for _, name in there], lengths), strict=True):
        if value is None:
            continue
        try:
            yield layout.write(name, value)
        except Damaged as error:
            text = f"write {of[3]} of {of[2]!r} against checkpoint {of[1]!r}"
            yield Lost(text, f"{where}, field {_shown(name)}", error.why, kind="write")


def _shown(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace").replace("\0", "\\0")


class _Told(NamedTuple):
    """What the rows say that is written elsewhere too."""

    ids: dict[bytes, bytes]
    open: set[bytes]
    asks: set[bytes]


def _discord(client: Client, key: bytes, where: str, w: bytes | None, told: _Told) -> Iterator[Lost]:
    """What counts, marks and names say otherwise than the rows do, if nothing was written since the walk began."""
    now, given, *opened = client.command("HMGET", key, "w", "n", "open", "asks")
    try:
        last = layout.numbers_of(given)
    except Damaged:
        return  # it has been said
    if now != w:
        return
    names = names_of(client, key)
    rows = {kind: {int(m[2]) for n in names if (m := ROW.fullmatch(n)) and m[1] == kind} for kind in (b"h", b"c", b"p")}
    found: list[Lost] = []
    try:
        for kind, block, most, what in (
            (b"h", "k", last.seq, "checkpoint"),
            (b"c", "g", last.call, "call"),
            (b"p", "j", last.pause, "pause"),
        ):
            marked = set(numbered(client, key, block, most))
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
    ids = {name: value for name, value in values_of(client, key, [n for n in names if n[:2] == b"i:"]) if value is not None}
    unread = {b"%d" % seq for seq in rows[b"h"]} - set(told.ids.values())  # whose ids nobody knows
    found += [
        Lost("an id of a checkpoint", f"{where}, field {field!r}", "it and the rows differ", kind="structure")
        for field, seq in sorted(ids.items() ^ told.ids.items())
        if seq not in unread
    ]
    for name, value, wanted in zip((b"open", b"asks"), opened, (told.open, told.asks), strict=True):
        if set(re.findall(rb";[^;]*", value or b"")) != wanted:
            why = "it and the rows differ in what is open"
            found.append(Lost(f"the list {name.decode()}", f"{where}, field {name.decode()}", why, kind="structure"))
    found += [
        Lost(f"field {name!r}", where, "no such field belongs to a task", kind="foreign")
        for name in sorted(names)
        if not is_known(name)
    ]
    found += _unlisted(client, key, where, names)
    if found and client.command("HGET", key, "w") == w:
        yield from found


def _unlisted(client: Client, key: bytes, where: str, names: dict[bytes, int]) -> Iterator[Lost]:
    """What the lists of writes say otherwise than the rows do."""
    rows = {name for name in names if name[:2] == b"w:" and is_known(name)}
    values = dict(values_of(client, key, [name for name in names if name[:2] in {b"v:", b"e:"}]))
    tops = {name for name in values if name[:2] == b"v:" and name.count(b"\0") == 1}
    named = [name for field, value in values.items() if field[:2] == b"e:" for name in layout.shelved(value)]
    shelves = {layout.shelf(name[2:]) for name in named}
    try:
        pages = {page: top for top in tops for page in layout.pages_of(top, values[top])}
    except Damaged as error:
        yield Lost("the lists of writes", f"{where}, fields v:…", error.why, kind="structure")
        return
    listed = [row for top in tops for row in layout.listed(top, values[top])]
    listed += [row for page, top in pages.items() for row in layout.listed(top, values.get(page), page=True)]
    if missing := set(listed) - rows:
        why = f"the task counts {len(listed)}, and {len(rows)} are there"
        yield Lost(f"{len(missing)} writes are missing", f"{where}, fields v:…", why, kind="write")
    elif sorted(listed) != sorted(rows) or sorted(named) != sorted(tops) or {*values} != {*tops, *pages, *shelves}:
        yield Lost("the lists of writes", f"{where}, fields v:… and e:…", "they and the rows differ", kind="structure")

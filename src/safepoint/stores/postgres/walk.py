"""A task in PostgreSQL read whole, and past damage.

Reading goes in pages by key, each a statement of its own. Where a page of a table is damaged, PostgreSQL gives nothing at all of
a statement: then rows are read one by one, the key of one that cannot be read is asked for without its values, and where not
even that is answered, the keys on both sides are found by halving.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from safepoint.errors import Damaged
from safepoint.model import Obj
from safepoint.rows import CallRow, CheckpointRow, Lost, Numbers, Part, PauseRow, TaskRow, WriteRow, fitting
from safepoint.stores.postgres import rows
from safepoint.stores.postgres.needed import BY_INDEX
from safepoint.stores.postgres.read import possible

if TYPE_CHECKING:
    from safepoint.stores.postgres.db import Database
    from safepoint.stores.postgres.link import Link

__all__ = ["KINDS", "asked", "place", "rows_of", "walk", "walk_tasks"]

BYTES = 1_000_000
"""About how many bytes of rows are read at once."""
FIRST, MOST = 16, 2000
"""Rows that are asked for at first, and at most: how large they are is seen from those that come."""
LAST = (1 << 63) - 1
_LAST_NAME = b"\xff" * 17
BLOCKS = 1024
"""Pages of a table that are looked through at once."""
BY_PAGE = "; ".join(f"SET LOCAL enable_{way} = off" for way in ("seqscan", "indexscan", "indexonlyscan", "bitmapscan"))
"""By any other way the server comes past pages that were not asked for."""
RANGES = 140000
"""The version of PostgreSQL from which on a range of pages can be read without those before it."""

KINDS: dict[str, tuple[Any, tuple[str, ...], Callable[[tuple[Any, ...]], Any]]] = {
    "checkpoint": (CheckpointRow, rows.CHECKPOINT, rows.checkpoint),
    "call": (CallRow, rows.CALL, rows.call),
    "pause": (PauseRow, rows.PAUSE, rows.pause),
    "write": (WriteRow, rows.WRITE, rows.write),
}
_NUMBERED = ("checkpoint", "call", "pause")
TASK_FIELDS = (
    "task", "status", "branch", "agent", "attempts", "reason", "parent", "raised", "created_at", "updated_at", "checkpoints",
)  # fmt: skip


class Gap(NamedTuple):
    """Keys after the first and up to the last that cannot be read; not each of them need have been there."""

    after: Any
    upto: Any
    why: str


def rows_of(db: Database, link: Link, statement: str, /, **values: Any) -> list[Any]:
    """The rows of a statement of ``postgres_whole_1.sql``, in the transaction that is open."""
    cursor = link.execute(db.sql("postgres_whole_1")[statement], values, binary=True)
    return cursor.fetchall() if cursor.description else []


def asked(db: Database, statement: str, /, **values: Any) -> list[Any]:
    """As a transaction of its own, for one that only reads."""
    return db.repeat(lambda link: rows_of(db, link, statement, **values))


def walk(db: Database, shown: Callable[[str], TaskRow | None], task: str) -> Iterator[Part]:
    """``shown`` gives the row of a task as it is listed."""
    if not possible(task):
        return
    try:
        found = asked(db, "numbers", task=task)
    except Damaged as error:
        yield Lost(f"task {task!r}", "sp_tasks", error.why, kind="task")
        return
    if not found:
        return
    n, *last = found[0]
    where = f"sp_tasks, n {n}"
    if fitting(Numbers, Numbers.__struct_fields__)(tuple(last)):
        yield Numbers(*last)
    else:
        yield Lost(f"the numbers of task {task!r}", where, "its values are of other types", kind="task")
    yield from _row(db, shown, task, n, where)
    yield from _branches(db, n)
    for kind in _NUMBERED:
        yield from _keyed(db, kind, n)
    yield from _writes(db, n)
    yield from _uncounted(db, n)
    yield from _objects(db, n)


def _row(db: Database, shown: Callable[[str], TaskRow | None], task: str, n: int, where: str) -> Iterator[Part]:
    try:
        row = shown(task)
        if row is not None:
            yield row
        return
    except Damaged as error:
        why = error.why
    # Something that is read along with it is damaged (its input, a head), or it is itself.
    try:
        found = asked(db, "task_alone", n=n)
    except Damaged as error:
        yield Lost(f"the row of task {task!r}", where, error.why, kind="task")
        return
    if not found:
        return
    if not fitting(TaskRow, TASK_FIELDS)(found[0]):
        yield Lost(f"the row of task {task!r}", where, why, kind="task")
        return
    given = dict(zip(TASK_FIELDS, found[0], strict=True))
    yield TaskRow(**{**given, **{name: rows.decoded(given[name]) for name in ("status", "agent", "reason")}})
    yield Lost(f"the input of task {task!r}", f"sp_inputs, task {n}", why, kind="input")


def _branches(db: Database, n: int) -> Iterator[Part]:
    at = ("", "")
    while True:
        try:
            found = asked(db, "branches", n=n, space=at[0], name=at[1], page=MOST)
        except Damaged as error:
            yield Lost("branches", f"sp_branches, task {n}, after {at[1]!r}", error.why, kind="branch")
            return
        for row in found:
            try:
                yield rows.branch(row)
            except Damaged as error:
                yield Lost(f"branch {row[1]!r}", f"sp_branches, task {n}, {row[0]!r}, {row[1]!r}", error.why, kind="branch")
        if len(found) < MOST:
            return
        at = found[-1][:2]


def _keyed(db: Database, kind: str, n: int) -> Iterator[Part]:
    """Checkpoints, calls or pauses of a task, by their numbers."""
    cls, names, make = KINDS[kind]
    fits = fitting(cls, names)
    for row in _scan(db, kind, kind + "_keys", 0, LAST, _middle_number, n=n):
        if isinstance(row, Gap):
            first = row.after + 1
            end: int | None = row.upto
            if row.upto == LAST:
                name, end = f"{kind}s {first} and later", None
            else:
                name = f"{kind} {first}" if first == end else f"{kind}s {first} to {end}"
            yield Lost(name, f"sp_{kind}s, task {n}", row.why, kind=kind, first=first, last=end)
        elif fits(row):
            yield make(row)
        else:
            where = f"sp_{kind}s, task {n}, {names[0]} {row[0]}"
            yield Lost(f"{kind} {row[0]}", where, "its values are of other types", kind=kind, first=row[0], last=row[0])


def _writes(db: Database, n: int) -> Iterator[Part]:
    """What adapters recorded against checkpoints, by space, checkpoint, writer and index."""
    page, after = FIRST, ("", "", "", -LAST)
    while True:
        try:
            found = _page(db, "write", n=n, page=page, **_as_key(after))
        except Damaged as error:
            if page > 1:
                page = 1
                continue
            try:
                keys = asked(db, "write_keys", n=n, page=1, **_as_key(after))
            except Damaged:
                yield from _beyond_write(db, n, after, error.why)
                return
            if not keys:
                return
            after = keys[0]
            yield _lost_write(after, n, error.why)
            continue
        yield from (_write(row, n) for row in found)
        if len(found) < page:
            return
        after = found[-1][:4]
        page = _next_page(page, found)


def _as_key(key: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(rows.WRITE[:4], key, strict=True))


def _write(row: tuple[Any, ...], n: int) -> WriteRow | Lost:
    cls, names, make = KINDS["write"]
    return make(row) if fitting(cls, names)(row) else _lost_write(row[:4], n, "its values are of other types")


def _lost_write(key: tuple[Any, ...], n: int, why: str) -> Lost:
    space, checkpoint, writer, idx = key
    what = f"write {idx} of {rows.decoded(writer)!r} at checkpoint {checkpoint!r}" + (f" of space {space!r}" if space else "")
    return Lost(what, f"sp_writes, task {n}", why, kind="write")


def _beyond_write(db: Database, n: int, after: tuple[Any, ...], why: str) -> Iterator[Part]:
    """The writes behind one whose key cannot be read either, as ``_beyond`` finds objects."""
    ((blocks,),) = asked(db, "write_blocks")
    keys: list[tuple[Any, ...]] = []
    for lost, found in _in_blocks(db, "write_keys_in", n, blocks):
        keys += [key for key in found if key > after]
        if lost is not None:
            yield Lost(f"writes on page {lost[0]}", f"sp_writes, page {lost[0]}", lost[1] or why, kind="write")
    for key in sorted(keys):
        try:
            yield from (_write(row, n) for row in asked(db, "write_named", n=n, **_as_key(key)))
        except Damaged as error:
            yield _lost_write(key, n, error.why)


def _uncounted(db: Database, n: int) -> Iterator[Lost]:
    """Rows that the task's row counts and that are not there: a row that is gone leaves no other trace."""
    try:
        found = asked(db, "counted", n=n)
    except Damaged:
        return  # it has been said what cannot be read
    if found and found[0][0] != found[0][1]:
        counted, there = found[0]
        what = f"{counted - there} checkpoints are missing" if counted > there else f"{there - counted} checkpoints too many"
        yield Lost(what, f"sp_tasks, n {n}", f"the task's row counts {counted}, and {there} are there", kind="checkpoint")


def _objects(db: Database, n: int) -> Iterator[Part]:
    after: bytes = b""
    # A name of another length than 16 bytes is damaged, and is found all the same.
    for row in _scan(db, "object", "object_keys", b"", _LAST_NAME, _no_middle, n=n):
        if not isinstance(row, Gap):
            after = row[0]
            yield _object(row, n)
        elif row.upto != _LAST_NAME:
            after = row.upto
            yield _lost_object(row.upto, n, row.why)
        else:
            yield from _beyond(db, n, after, row.why)


def _object(row: tuple[Any, ...], n: int) -> Obj | Lost:
    if all(value.__class__ is bytes for value in row):
        return Obj(*row)
    return _lost_object(row[0], n, "its values are of other types")


def _lost_object(name: bytes, n: int, why: str) -> Lost:
    return Lost(f"object {name.hex()}", f"sp_objects, task {n}", why, kind="object", name=name)


def _beyond(db: Database, n: int, after: bytes, why: str) -> Iterator[Part]:
    """The objects behind one whose name cannot be read either: in the order of the index each would hide those behind it, so the
    names are looked for in the order in which they lie in the table."""
    ((blocks, version),) = asked(db, "object_blocks")
    if version < RANGES:
        for row in _scan(db, "object", "object_keys", after, _LAST_NAME, _middle_name, n=n):
            if isinstance(row, Gap):
                yield Lost(f"objects {row.after.hex()} to {row.upto.hex()}", f"sp_objects, task {n}", row.why, kind="object")
            else:
                yield _object(row, n)
        return
    names: list[bytes] = []
    for lost, found in _in_blocks(db, "object_names_in", n, blocks):
        names += [name for (name,) in found if name > after]
        if lost is not None:
            yield Lost(f"objects on page {lost[0]}", f"sp_objects, page {lost[0]}", lost[1] or why, kind="object")
    names.sort()
    for i in range(0, len(names), FIRST):
        yield from _named(db, n, names[i : i + FIRST])


def _in_blocks(db: Database, statement: str, n: int, blocks: int) -> Iterator[tuple[tuple[int, str] | None, list[Any]]]:
    """What a statement gives of a table's pages, some at a time; or a page that cannot be read, and why."""
    spans = [(start, min(start + BLOCKS, blocks)) for start in range(0, blocks, BLOCKS)][::-1]
    while spans:
        start, end = spans.pop()
        try:
            yield None, _page(db, statement, BY_PAGE, n=n, block=start, end=end)
        except Damaged as error:
            if end - start > 1:
                middle = (start + end) // 2
                spans += [(middle, end), (start, middle)]
            else:
                yield (start, error.why), []


def _named(db: Database, n: int, names: list[bytes]) -> Iterator[Part]:
    try:
        found = asked(db, "objects_named", n=n, names=rows.blobs(names))
    except Damaged as error:
        if len(names) == 1:
            yield _lost_object(names[0], n, error.why)
            return
        for name in names:
            yield from _named(db, n, [name])
        return
    yield from (_object(row, n) for row in found)


# -- past damage


def _scan(
    db: Database, statement: str, keys: str, after: Any, last: Any, middle: Callable[[Any, Any], Any], **given: Any
) -> Iterator[Any]:
    """Rows by their first column, after ``after`` and up to ``last``, and a Gap where they cannot be read."""
    page, spans, gap = FIRST, [(after, last)], None
    while spans:
        after, upto = spans.pop()
        why = ""
        try:
            found = _page(db, statement, after=after, upto=upto, page=page, **given)
        except Damaged as error:
            found, why = [], error.why
        if found and gap is not None:
            yield gap
            gap = None
        yield from found
        if not why:
            if len(found) == page:
                spans.append((found[-1][0], upto))
            page = _next_page(page, found)
            continue
        if page > 1:
            page = 1
            spans.append((after, upto))
            continue
        bad = _first_key(db, keys, after, upto, given)
        if bad is not None and bad != after:
            if gap is not None:
                yield gap
                gap = None
            yield Gap(_before(bad), bad, why)
            if bad < upto:
                spans.append((bad, upto))
        elif (half := middle(after, upto)) is None:
            # Neighbours that cannot be read are one gap.
            if gap is not None and gap.upto == after:
                gap = Gap(gap.after, upto, gap.why)
            else:
                if gap is not None:
                    yield gap
                gap = Gap(after, upto, why)
        else:
            spans += [(half, upto), (after, half)]
    if gap is not None:
        yield gap


def _page(db: Database, statement: str, how: str = BY_INDEX, /, **values: Any) -> list[Any]:
    def read(link: Link) -> list[Any]:
        link.execute(how)
        return rows_of(db, link, statement, **values)

    return db.read(read)


def _next_page(page: int, found: list[Any]) -> int:
    size = sum(sum([len(v) for v in row if v.__class__ is bytes]) for row in found)
    if size > 2 * BYTES:
        return max(1, page * BYTES // size)
    return min(MOST, page * 2) if size < BYTES // 2 else page


def _first_key(db: Database, keys: str, after: Any, upto: Any, given: dict[str, Any]) -> Any:
    """The key of the row that cannot be read; None if not even that can be."""
    try:
        found = asked(db, keys, after=after, upto=upto, page=1, **given)
    except Damaged:
        return None
    return found[0][0] if found else None


def _before(key: Any) -> Any:
    """The key before this one, as numbers go, and names of 16 bytes."""
    if isinstance(key, int):
        return key - 1
    number = int.from_bytes(key, "big")
    return (number - 1).to_bytes(len(key), "big") if number else b""


def _middle_number(after: int, upto: int) -> int | None:
    return (after + upto) // 2 if upto - after > 1 else None


def _no_middle(after: bytes, upto: bytes) -> None:
    return None


def _middle_name(after: bytes, upto: bytes) -> bytes | None:
    low, high = (int.from_bytes(name[:16].ljust(16, b"\0"), "big") for name in (after, upto))
    return ((low + high) // 2).to_bytes(16, "big") if high - low > 1 else None


# -- all tasks


def walk_tasks(db: Database) -> Iterator[str | Lost]:
    after = ""
    while True:
        try:
            found = asked(db, "tasks", after=after, page=MOST)
        except Damaged:
            break
        yield from (name for (name,) in found)
        if len(found) < MOST:
            return
        after = found[-1][0]
    # The table itself, by number.
    for row in _scan(db, "tasks_by_number", "task_numbers", 0, LAST, _middle_number):
        if isinstance(row, Gap):
            span = f"{row.after + 1} to {row.upto}" if row.upto < LAST else f"{row.after + 1} and later"
            yield Lost(f"rows of tasks ({span})", f"sp_tasks, n {span}", row.why, kind="task")
        elif row[1] > after:
            yield row[1]


def place(db: Database, task: str, kind: str, key: Any) -> str:
    try:
        found = asked(db, "numbers", task=task) if possible(task) else []
    except Damaged:
        found = []
    if not found:
        return f"sp_{kind}s"
    n = found[0][0]
    match kind:
        case "checkpoint":
            return f"sp_checkpoints, task {n}, seq {key}"
        case "call" | "pause":
            return f"sp_{kind}s, task {n}, no {key}"
        case "object":
            return f"sp_objects, task {n}, name {key.hex()}"
        case "branch":
            return f"sp_branches, task {n}, {key[0]!r}, {key[1]!r}"
        case "write":
            return f"sp_writes, task {n}, {', '.join(map(repr, key))}"
        case "task":
            return f"sp_tasks, n {n}"
    return f"sp_{kind}s"

"""A SQLite file read past damage.

Reading goes in pages, each a short transaction. Where a page of the file is damaged, SQLite gives the rows before it and
then an error; the walk looks for the next key that can be read, and says which keys lie between. Indexes are a second witness:
they name rows that are in the table and cannot be read there, and the table has rows that an index has lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

from safepoint.errors import Damaged
from safepoint.model import Obj
from safepoint.rows import BranchRow, CallRow, CheckpointRow, Head, Lost, Numbers, Part, PauseRow, TaskRow, fitting, replace
from safepoint.stores import sqlite_rows, sqlite_writes
from safepoint.stores.sqlite_pages import ROWS, Gap, page, scan
from safepoint.stores.sqlite_rows import CALL, CHECKPOINT, PAUSE, reads
from safepoint.stores.sqlite_schema import branches_sum

if TYPE_CHECKING:
    from safepoint.stores.sqlite_db import Database

__all__ = ["KINDS", "TASK_FIELDS", "place", "strays", "structure", "walk", "walk_tasks"]

MOST = (1 << 32) - 1
LARGEST = (1 << 63) - 1
WRONG = 200
"""How many things SQLite's own check names at most."""

KINDS: dict[str, tuple[Any, tuple[str, ...], Any, str]] = {
    "checkpoint": (CheckpointRow, CHECKPOINT, sqlite_rows.checkpoint, "seq"),
    "call": (CallRow, CALL, sqlite_rows.call, "no"),
    "pause": (PauseRow, PAUSE, sqlite_rows.pause, "no"),
}


def walk(db: Database, task: str) -> Iterator[Part]:
    n, why = _number(db, task)
    if n is None:
        if why is not None:
            yield Lost(f"task {task!r}", "sp_tasks", why, kind="task")
        return
    last: dict[str, int] = {}
    if why is not None:
        yield Lost(f"the row of task {task!r}", f"sp_tasks, row {n}", why, kind="task")
    else:
        for part in _head(db, task, n):
            if isinstance(part, Numbers):
                last = {"checkpoint": part.seq, "call": part.call, "pause": part.pause}
            yield part
    yield from _branches(db, n)
    yield from _unnamed(db, task, n)
    for kind in KINDS:
        yield from _keyed(db, kind, n, last.get(kind))
    yield from sqlite_writes.walk(db, n)
    yield from _objects(db, n)


def walk_tasks(db: Database) -> Iterator[str | Lost]:
    after = ""
    statement = "SELECT task FROM sp_tasks WHERE task > ? ORDER BY task"
    while True:
        rows, why, more = page(db, statement, (after,), 0, after)
        yield from [name for (name,) in rows]
        after = rows[-1][0] if rows else after
        if why is not None:
            break
        if not more:
            yield from _nameless(db)
            return
    # The index cannot be read on: the table itself, by number.
    for part in scan(db, "SELECT n, task FROM sp_tasks WHERE n BETWEEN ? AND ? ORDER BY n", 1, LARGEST, None):
        if isinstance(part, Gap):
            yield Lost(f"rows of tasks ({part})", f"sp_tasks, rows {part}", part.why, kind="task")
        elif not isinstance(part[1], str):
            yield _no_name(part[0])
        elif part[1] > after:
            yield part[1]


def _nameless(db: Database) -> Iterator[Lost]:
    """Rows of tasks that no listing by name comes upon."""
    statement = "SELECT n FROM sp_tasks WHERE n BETWEEN ? AND ? AND typeof(task) <> 'text' ORDER BY n"
    for part in scan(db, statement, 1, LARGEST, None):
        if not isinstance(part, Gap):  # rows that cannot be read are told of with the tasks whose they are
            yield _no_name(part[0])


def _no_name(n: int) -> Lost:
    return Lost(f"the name of task {n}", f"sp_tasks, row {n}", "its values are of other types", kind="task")


# -- reading past damage


def _number(db: Database, task: str) -> tuple[int | None, str | None]:
    """The number of a task. With a reason if its row is lost: the number is then that of the rows that were sealed for it."""
    at, why = _indexed(db, task)
    if at is not None:
        return at, None
    numbers: set[int] = set()
    # The row may be there where only the index has lost it.
    for part in scan(db, "SELECT n, task FROM sp_tasks WHERE n BETWEEN ? AND ? ORDER BY n", 1, LARGEST, None):
        if isinstance(part, Gap):
            why = why or part.why
        elif part[1] == task:
            return int(part[0]), None
        else:
            numbers.add(part[0])
    for kind, (cls, names, _, _) in KINDS.items():
        # One row of each number that no task's row has: its seal says whose it is.
        low = 0
        statement = f"SELECT k, {', '.join(names)} FROM sp_{kind}s WHERE k BETWEEN ? AND ? ORDER BY k"
        while True:
            rows, bad, _ = page(db, statement, (low << 32, LARGEST), 0, (low << 32) - 1, rows=1)
            if bad is not None or not rows:
                break
            low = rows[0][0] >> 32
            if low not in numbers and _is_of(task, cls, names, rows[0][1:]):
                at, _ = _indexed(db, task)  # it may have been begun in between
                return (at, None) if at is not None else (low, why or "it is gone, and rows that belong to it are there")
            low += 1
    return None, why


def _indexed(db: Database, task: str) -> tuple[int | None, str | None]:
    """The number as the index has it, if it leads to the row of that very task; and why it could not be asked."""
    try:
        with db.reading() as conn:
            at = conn.rows(reads()["number"], (task,))
            if at and conn.rows("SELECT task FROM sp_tasks NOT INDEXED WHERE n = ?", at[0]) == [(task,)]:
                return int(at[0][0]), None
    except Damaged as error:
        return None, error.why
    return None, None


def _is_of(task: str, cls: Any, names: tuple[str, ...], found: tuple[Any, ...]) -> bool:
    if not fitting(cls, names)(found):
        return False
    try:
        cls(**dict(zip(names, found, strict=True))).check(task, "")
    except Damaged:
        return False
    return True


def _head(db: Database, task: str, n: int) -> Iterator[Part]:
    """Numbers and the row of a task."""
    where = f"sp_tasks, row {n}"
    try:
        with db.reading() as conn:
            found = conn.rows(
                "SELECT next_seq - 1, next_call - 1, next_pause - 1, next_line - 1, position - 1 FROM sp_tasks WHERE n = ?",
                (n,),
            )
        if found and fitting(Numbers, Numbers.__struct_fields__)(found[0]):
            yield Numbers(*found[0])
        elif found:
            yield Lost(f"the numbers of task {task!r}", where, "its values are of other types", kind="task")
    except Damaged as error:
        yield Lost(f"the numbers of task {task!r}", where, error.why, kind="task")
    try:
        with db.reading() as conn:
            found = conn.rows(reads()["tasks"] + " WHERE t.n = ?", (n,))
        if found:
            yield replace(sqlite_rows.task(found[0]), task=task)
        return
    except (Damaged, UnicodeDecodeError) as error:
        why = error.why if isinstance(error, Damaged) else "a text in it is no UTF-8"
    # Something that is read along with it is damaged (its input, a head, the count of its open calls), or it is itself.
    try:
        with db.reading() as conn:
            found = conn.rows(_TASK, (n,))
    except (Damaged, UnicodeDecodeError):
        yield Lost(f"the row of task {task!r}", where, why, kind="task")
        return
    if not found or not fitting(TaskRow, TASK_FIELDS)(found[0]):
        yield Lost(f"the row of task {task!r}", where, why, kind="task")
        return
    row = TaskRow(**dict(zip(TASK_FIELDS, found[0], strict=True)))
    try:
        with db.reading() as conn:
            given = conn.rows("SELECT input FROM sp_inputs WHERE task = ?", (n,))
        if given and type(given[0][0]) is not bytes:
            raise Damaged("", "it is of another type")
        row = replace(row, input=given[0][0] if given else b"")
    except Damaged as error:
        yield Lost(f"the input of task {task!r}", f"sp_inputs, row {n}", error.why, kind="input")
    yield row


TASK_FIELDS = (
    "task",
    "status",
    "branch",
    "agent",
    "attempts",
    "reason",
    "parent",
    "raised",
    "created_at",
    "updated_at",
    "checkpoints",
)
_TASK = f"SELECT {', '.join(TASK_FIELDS)} FROM sp_tasks WHERE n = ?"
BRANCHES = "SELECT space, name, head_seq, head_id, line, forked_from FROM sp_branches"


def _branches(db: Database, n: int) -> Iterator[Part]:
    at = ("", "")
    forward = f"{BRANCHES} WHERE task = ? AND (space, name) > (?, ?) ORDER BY space, name"
    while True:
        rows, why = _branch_page(db, forward, (n, *at))
        yield from map(_branch, rows)
        if rows:
            at = rows[-1][:2]
        if why is None:
            if len(rows) < ROWS:
                return
            continue
        break
    rows, _ = _branch_page(db, f"{BRANCHES} WHERE task = ? AND (space, name) > (?, ?) ORDER BY space DESC, name DESC", (n, *at))
    to = f" and before {rows[-1][1]!r}" if rows else ""
    yield Lost("branches", f"sp_branches, task {n}, after {at[1]!r}{to}", why, kind="branch")
    yield from map(_branch, reversed(rows))


def _unnamed(db: Database, task: str, n: int) -> Iterator[Lost]:
    """Branches that are lost, or go by another name, without a word."""
    try:
        with db.reading() as conn:
            found = conn.rows("SELECT branches_sum FROM sp_tasks WHERE n = ?", (n,))
            names = conn.rows(reads()["names_of_branches"], (n,))
    except (Damaged, UnicodeDecodeError):
        return  # it has been said what cannot be read
    if found and found[0][0] is not None and found[0][0] != branches_sum(task, names):
        yield Lost("branches", f"sp_branches, task {n}", "the task's row counts others", kind="branch")


def _branch_page(db: Database, statement: str, given: tuple[Any, ...]) -> tuple[list[Any], str | None]:
    found: list[Any] = []
    try:
        with db.reading() as conn:
            cursor = conn.execute(statement, given)
            try:
                for row in cursor:
                    found.append(row)
                    if len(found) >= ROWS:
                        break
            finally:
                cursor.close(True)
    except Damaged as error:
        return found, error.why
    except UnicodeDecodeError:
        return found, "a text in it is no UTF-8"
    return found, None


def _branch(found: tuple[Any, ...]) -> BranchRow | Lost:
    space, name, seq, id, line, forked_from = found
    if not fitting(sqlite_rows.Branch, sqlite_rows.Branch._fields)(found):
        return Lost(f"branch {name!r}", f"sp_branches, {space!r}, {name!r}", "its values are of other types", kind="branch")
    return BranchRow(space, name, Head(seq, id), line, forked_from)


def _keyed(db: Database, kind: str, n: int, last: int | None) -> Iterator[Part]:
    """Checkpoints, calls or pauses of a task, by their numbers."""
    cls, names, make, number = KINDS[kind]
    place = names.index(number) + 2
    fits = fitting(cls, names)
    statement = f"SELECT k, task, {', '.join(names)} FROM sp_{kind}s WHERE k BETWEEN ? AND ? ORDER BY k"
    base = n << 32
    for row in scan(db, statement, base, base | MOST, None if last is None else base | last):
        if isinstance(row, Gap):
            yield from _lost_rows(db, kind, n, row)
            continue
        k = row[0]
        where = f"sp_{kind}s, row {k}"
        this: dict[str, Any] = {"kind": kind, "first": k - base, "last": k - base}
        if not fits(row[2:]):
            yield Lost(f"{kind} {k - base}", where, "its values are of other types", **this)
        elif row[1] != n or row[place] != k - base:
            yield Lost(f"{kind} {k - base}", where, "its number and its key differ", **this)
        else:
            yield make(row[2:])
    yield from _uncounted(db, kind, n)


def _uncounted(db: Database, kind: str, n: int) -> Iterator[Lost]:
    """Rows that the task's row counts and that are not there: what leaves no gap behind is seen by nothing else."""
    statement = f"SELECT {kind}s, (SELECT count(*) FROM sp_{kind}s WHERE k BETWEEN ?2 AND ?3) FROM sp_tasks WHERE n = ?1"
    try:
        with db.reading() as conn:
            found = conn.rows(statement, (n, n << 32, n << 32 | MOST))
    except Damaged:
        return  # it has been said what cannot be read
    if found and type(found[0][0]) not in (int, type(None)):
        yield Lost(f"the count of {kind}s", f"sp_tasks, row {n}", "it is no number", kind=kind)
    elif found and found[0][0] is not None and found[0][0] != found[0][1]:
        counted, there = found[0]
        what = f"{counted - there} {kind}s are missing" if counted > there else f"{there - counted} {kind}s too many"
        yield Lost(what, f"sp_tasks, row {n}", f"the task's row counts {counted}, and {there} are there", kind=kind)


def _lost_rows(db: Database, kind: str, n: int, gap: Gap) -> Iterator[Lost]:
    base = n << 32
    first = gap.first - base
    last = MOST if gap.last is None else gap.last - base
    if kind == "checkpoint":
        # The index over their ids is a tree of its own, and says which of these rows there are.
        statement = (
            "SELECT k, id FROM sp_checkpoints INDEXED BY sp_checkpoints_id WHERE task = ? AND k BETWEEN ? AND ? ORDER BY k"
        )
        try:
            with db.reading() as conn:
                there = conn.rows(statement, (n, gap.first, base | last))
            for k, id in there:
                where = f"sp_checkpoints, row {k} (id {id})"
                yield Lost(f"checkpoint {k - base}", where, gap.why, kind=kind, first=k - base, last=k - base)
            return
        except (Damaged, UnicodeDecodeError):
            pass
    if last == MOST:
        name, end = f"{kind}s {first} and later", None
    else:
        name, end = (f"{kind} {first}" if first == last else f"{kind}s {first} to {last}"), last
    yield Lost(name, f"sp_{kind}s, rows {gap}", gap.why, kind=kind, first=first, last=end)


def _objects(db: Database, n: int) -> Iterator[Part]:
    after = b""
    by_name = "SELECT k, name, refs, data FROM sp_objects INDEXED BY sp_objects_name WHERE task = ? AND name > ? ORDER BY name"
    entry = "SELECT k, name FROM sp_objects INDEXED BY sp_objects_name WHERE task = ? AND name > ? ORDER BY name"
    while True:
        rows, why, more = page(db, by_name, (n, after), 1, after)
        yield from map(_object, rows)
        if rows:
            after = rows[-1][1]
        if why is None:
            if not more:
                return
            continue
        found, broken, _ = page(db, entry, (n, after), 1, after, rows=1)
        if broken is not None:
            break
        if not found:
            return
        k, after = found[0]
        yield _lost_object(after, k, why)
    # The index cannot be read on. The table has the rows, in no order of names, among those of other tasks; the other end of
    # the index may name some that the table has lost.
    places: dict[bytes, int] = {}
    statement = "SELECT k, task, name FROM sp_objects WHERE k BETWEEN ? AND ? ORDER BY k"
    for part in scan(db, statement, 0, LARGEST, None):
        if isinstance(part, Gap):
            yield Lost(f"objects (rows {part})", f"sp_objects, rows {part}", part.why, kind="object")
        elif part[1] == n and isinstance(part[2], bytes) and part[2] > after:
            places[part[2]] = part[0]
    for k, name in _index_end(db, n, after):
        places.setdefault(name, k)
    names = sorted(places)
    for start in range(0, len(names), 200):
        yield from _by_row(db, names[start : start + 200], places)


def _by_row(db: Database, names: list[bytes], places: dict[bytes, int]) -> Iterator[Part]:
    for name in names:
        k = places[name]
        rows, why, _ = page(db, "SELECT k, name, refs, data FROM sp_objects WHERE k = ?", (k,), 0, k - 1)
        if why is not None or not rows:
            yield _lost_object(name, k, why or "its row is gone")
        else:
            yield _object(rows[0])


def _index_end(db: Database, n: int, after: bytes) -> list[tuple[int, bytes]]:
    statement = "SELECT k, name FROM sp_objects INDEXED BY sp_objects_name WHERE task = ? AND name > ? ORDER BY name DESC"
    found: list[tuple[int, bytes]] = []
    try:
        with db.reading() as conn:
            cursor = conn.execute(statement, (n, after))
            try:
                for k, name in cursor:
                    if not isinstance(name, bytes) or (found and name >= found[-1][1]):
                        break
                    found.append((k, name))
            finally:
                cursor.close(True)
    except Damaged:
        pass
    return found


def _object(found: tuple[Any, ...]) -> Obj | Lost:
    k, name, refs, data = found
    if refs.__class__ is not bytes or data.__class__ is not bytes:
        return _lost_object(name, k, "its values are of other types")
    return Obj(name, refs, data)


def _lost_object(name: bytes, k: int, why: str) -> Lost:
    return Lost(f"object {name.hex()}", f"sp_objects, row {k}", why, kind="object", name=name)


# -- strays

OWNED = {
    "sp_inputs": "task",
    "sp_checkpoints": "k",
    "sp_branches": "task",
    "sp_objects": "task",
    "sp_calls": "k",
    "sp_pauses": "k",
    "sp_writes": "k",
    "sp_leases": "task",
    "sp_outbox": "task",
}  # fmt: skip


@cache
def _tables() -> frozenset[str]:
    return frozenset({"sp_meta", "sp_tasks", "sp_stages", "sp_quarantine", *OWNED})


def strays(db: Database) -> list[Lost]:
    try:
        with db.reading() as conn:
            tables = [
                name
                for (name,) in conn.rows(r"SELECT name FROM sqlite_schema WHERE type='table' AND name LIKE 'sp\_%' ESCAPE '\'")
            ]
    except Damaged as error:
        return [Lost("the list of tables", "sqlite_schema", error.why)]
    known = _tables()
    found = [Lost(f"table {name!r}", name, "it is no table of a store", kind="foreign") for name in tables if name not in known]
    for name, owner in OWNED.items():
        found += _ownerless(db, name, owner)
    return found


def _ownerless(db: Database, table: str, owner: str) -> Iterator[Lost]:
    """Rows of a table whose task has no row, by task."""
    by_key = owner == "k"
    n = 0
    while True:
        try:
            with db.reading() as conn:
                for _ in range(ROWS):
                    low = n << 32 if by_key else n
                    at = conn.rows(f"SELECT {owner} FROM {table} WHERE {owner} >= ? ORDER BY {owner} LIMIT 1", (low,))
                    if not at:
                        return
                    n = at[0][0] >> 32 if by_key else at[0][0]
                    if not conn.rows(
                        "SELECT 1 FROM sp_tasks WHERE n = ?1 UNION ALL SELECT 1 FROM sp_stages WHERE n = ?1", (n,)
                    ):
                        where = f"{owner} BETWEEN ?1 << 32 AND ?1 << 32 | {MOST}" if by_key else f"{owner} = ?1"
                        rows = conn.rows(f"SELECT count(*) FROM {table} WHERE {where}", (n,))[0][0]
                        yield Lost(
                            f"{rows} rows of a task that has no row",
                            f"{table}, task {n}",
                            "no row of sp_tasks has that number",
                            kind="stray",
                            first=n,
                            last=n,
                        )
                    n += 1
        except Damaged as error:
            yield Lost(f"rows of {table}", f"{table}, from task {n} on", error.why)
            return


# -- places and structure


def place(db: Database, task: str, kind: str, key: Any) -> str:
    try:
        with db.reading() as conn:
            at = conn.rows(reads()["number"], (task,))
            if not at:
                return f"sp_{kind}s"
            n = at[0][0]
            if kind in KINDS:
                return f"sp_{kind}s, row {n << 32 | key}"
            if kind == "object":
                found = conn.rows("SELECT k FROM sp_objects INDEXED BY sp_objects_name WHERE task = ? AND name = ?", (n, key))
                return f"sp_objects, row {found[0][0]}" if found else f"sp_objects, task {n}"
            if kind == "write":
                return sqlite_writes.where_is(conn, n, key)
            if kind == "branch":
                return f"sp_branches, task {n}, {key[0]!r}, {key[1]!r}"
    except (Damaged, UnicodeDecodeError):
        pass
    return f"sp_{kind}s"


def structure(db: Database) -> Iterator[Lost]:
    """SQLite's own check of its pages, trees and indexes, and the count of tasks."""
    from safepoint.stores.sqlite_db import Database

    found: list[str] = []
    try:
        with db.reading() as conn:
            counted = conn.rows("SELECT (SELECT value FROM sp_meta WHERE key = 'tasks'), (SELECT count(*) FROM sp_tasks)")
        if counted and isinstance(counted[0][0], int) and counted[0][0] != counted[0][1]:
            why = f"sp_meta counts {counted[0][0]}, and {counted[0][1]} are there"
            yield Lost("the number of tasks", "sp_tasks", why, kind="structure")
    except Damaged as error:
        found.append(error.why)
    try:
        # It takes as long as reading the file does: on connections of its own, so that nobody here waits for it.
        own = Database(db.path, timeout=db.timeout, full=db.full)
        try:
            with own.reading() as conn:
                cursor = conn.execute(f"PRAGMA integrity_check({WRONG})")
                try:
                    for (text,) in cursor:  # one by one: an error after them does not take them along
                        found.append("; ".join(str(text).splitlines()))
                finally:
                    cursor.close(True)
        finally:
            own.close()
    except Damaged as error:
        found.append(error.why)
    for text in found:
        if text != "ok":
            yield Lost("the structure of the file", db.path, text, kind="structure")

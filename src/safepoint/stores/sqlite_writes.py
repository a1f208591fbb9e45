"""What adapters record against checkpoints, and branches that are set back or dropped, in a SQLite file."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from safepoint.errors import Damaged
from safepoint.rows import Commit, Head, Lost, Part, WriteRow, fitting, torn
from safepoint.stores import refusals
from safepoint.stores.sqlite_db import Connection, sql
from safepoint.stores.sqlite_pages import PAGE, Gap, scan
from safepoint.stores.sqlite_rows import MOST, WRITE, key, plain, reads
from safepoint.stores.sqlite_schema import branches_sum

if TYPE_CHECKING:
    from safepoint.stores.sqlite_db import Database

__all__ = ["PUT", "make", "move_branches", "number_of", "put", "record", "refuse_short", "rows", "summed", "walk", "where_is"]

ENTRIES = 500
"""Rows that one transaction of a walk names; it reads about ``PAGE`` bytes of them."""

_ROWS = f"SELECT {', '.join(WRITE)} FROM sp_writes"
_ORDER = "ORDER BY space, checkpoint, path, writer, idx"
_ROW = f"SELECT task, {', '.join(WRITE)} FROM sp_writes NOT INDEXED WHERE k = ?"
_ENTRIES = (
    "SELECT k, space, checkpoint, writer, idx FROM sp_writes INDEXED BY sp_writes_key"
    " WHERE task = ?1 AND (space, checkpoint, writer, idx) > (?2, ?3, ?4, ?5) ORDER BY space, checkpoint, writer, idx LIMIT ?6"
)
_AT = "SELECT k FROM sp_writes INDEXED BY sp_writes_key WHERE task = ? AND space = ? AND checkpoint = ? AND writer = ? AND idx = ?"

Key = tuple[str, str, str, int]
_FIRST: Key = ("", "", "", -(1 << 63))

PUT = (
    f"INSERT INTO sp_writes (k, task, {', '.join(WRITE)}) VALUES (?, ?{', ?' * len(WRITE)})"
    " ON CONFLICT (task, space, checkpoint, writer, idx) DO NOTHING"
)

_values = attrgetter(*WRITE)
_fits = fitting(WriteRow, WRITE)


def make(found: tuple[Any, ...]) -> WriteRow:
    """The row of its columns. One whose values are of other classes becomes one whose seal is broken."""
    return WriteRow(**dict(zip(WRITE, found, strict=True))) if _fits(found) else torn(WriteRow, WRITE, found)


# -- writing


def record(n: int, number: int, row: WriteRow) -> tuple[Any, ...]:
    """A row as ``PUT`` takes it."""
    return (n << 32 | number, n, *_values(row))


def put(conn: Connection, n: int, commit: Commit, number: int) -> tuple[int, int]:
    """Write the writes of a commit, with numbers from this one on. Returns the next number, and the bytes that were written."""
    st, size = sql("sqlite_commit"), 0
    for row in commit.writes:
        if row.idx < 0:
            conn.execute(st["drop_write"], (n, *row.key))
        values = record(n, number, row.sealed(commit.task))
        conn.execute(PUT, values)
        if conn.changes():
            number += 1
            size += sum([len(value) for value in values if value.__class__ is not int])
    return number, size


def move_branches(conn: Connection, n: int, commit: Commit, current: str, total: int | None) -> int | None:
    """Set branches back and drop them, as ``folding.moved`` says it; ``current`` is the one that is current after the commit.
    Takes and returns the sum over all branches."""
    st, task = sql("sqlite_commit"), commit.task
    for move in commit.branches:
        found = conn.rows(st["look_branch"], (n, move.space, move.name))
        if (at := plain(Head, found[0]) if found else None) != move.expect:
            raise refusals.moved_away(task, move, at)
        if move.to is None:
            conn.execute(st["drop_branch"], (n, move.space, move.name))
            total = summed(total, task, move.space, move.name, -1)
            continue
        if conn.rows(st["id_and_space_at"], (key(n, move.to.seq),)) != [(move.to.id, move.space)]:
            raise refusals.gone(task, move.to)
        conn.execute(st["move_branch"], (n, move.space, move.name, *move.to))
    dropped = any(move.to is None and (move.space, move.name) == ("", current) for move in commit.branches)
    if dropped and conn.rows(st["has_branch"], (n,)):
        raise refusals.has_others(task, current)
    return total


def summed(total: int | None, task: str, space: str, name: str, sign: int = 1) -> int | None:
    """``branches_sum`` with a branch more, or with one less."""
    return None if total is None else total + sign * branches_sum(task, [(space, name)]) & 0xFFFFFFFF


# -- reading


def rows(
    conn: Connection, n: int, space: str | None, checkpoints: Collection[str] | None, writer: str | None
) -> list[WriteRow]:
    given: tuple[Any, ...] = (n,)
    where = "task = ?1"
    # Each form is a statement of its own: with "or the value is NULL" in it the index would serve none of them.
    if space is not None:
        where, given = f"{where} AND space = ?{len(given) + 1}", (*given, space)
    if checkpoints is not None:
        named = f"checkpoint IN (SELECT value FROM json_each(?{len(given) + 1}))"
        where, given = f"{where} AND {named}", (*given, json.dumps(sorted(checkpoints)))
    if writer is not None:
        where, given = f"{where} AND writer = ?{len(given) + 1}", (*given, writer)
    return [make(row) for row in conn.rows(f"{_ROWS} WHERE {where} {_ORDER}", given)]


def refuse_short(conn: Connection, n: int) -> None:
    """Raise Damaged if rows have been lost without a word, and with them what they keep."""
    for counted, there in conn.rows(reads()["count_writes"], (n,)):
        if counted is not None and counted != there:
            raise Damaged(
                "writes of a task are missing",
                f"there should be {counted}, and {there} can be read",
                "Nothing was deleted. See `safepoint verify`.",
            )


# -- past damage


def walk(db: Database, n: int) -> Iterator[Part]:
    """All rows of a task by key.

    The index says which there are and in which order, and the table what they hold: a value that is read from the one would hide
    that it is damaged in the other.
    """
    after = _FIRST
    while True:
        parts, last, why = _page(db, n, after)
        yield from parts
        if why is not None:
            break
        if last is None:
            yield from _uncounted(db, n)
            return
        after = last
    # It stops at something. Now each row by its own number, in the order of those keys that can be read.
    base = n << 32
    names: dict[int, Key] = {}
    given = _given(db, n)
    statement = "SELECT k, space, checkpoint, writer, idx FROM sp_writes NOT INDEXED WHERE k BETWEEN ? AND ? ORDER BY k"
    for row in scan(db, statement, base, base | MOST, None if given is None else base | given):
        if not isinstance(row, Gap):
            names[row[0]] = row[1:]
            continue
        first, end = row.first, base | MOST if row.last is None else row.last
        there = _entries(db, n, first, end)
        for k, name in there.items():
            if name > (last or after):
                yield _lost(name, k, row.why)
        if not there:
            yield Lost(f"writes (rows {row})", f"sp_writes, rows {row}", row.why, kind="write")
    odd = {k: name for k, name in names.items() if tuple(map(type, name)) != (str, str, str, int)}
    for k in odd:
        yield Lost(f"the write of row {k}", f"sp_writes, row {k}", "its values are of other types", kind="write")
        del names[k]
    for k in sorted(names, key=names.__getitem__):
        if names[k] <= (last or after):
            continue
        try:
            with db.reading() as conn:
                part = _one(conn, n, k, names[k])
        except (Damaged, UnicodeDecodeError) as error:
            part = _lost(names[k], k, error.why if isinstance(error, Damaged) else "a text in it is no UTF-8")
        if part is not None:
            yield part
    yield from _uncounted(db, n)


def _given(db: Database, n: int) -> int | None:
    """The last number that was given out, if that can be read."""
    try:
        with db.reading() as conn:
            found = conn.rows("SELECT next_write - 1 FROM sp_tasks WHERE n = ?", (n,))
    except Damaged:
        return None
    return int(found[0][0]) if found and type(found[0][0]) is int else None


def _page(db: Database, n: int, after: Key) -> tuple[list[Part], Key | None, str | None]:
    """Some rows after a key, the last key that they reach (None: there are no more), and what stopped the reading."""
    parts: list[Part] = []
    last: Key | None = None
    size = 0
    try:
        with db.reading() as conn:
            entries = conn.rows(_ENTRIES, (n, *after, ENTRIES))
            for k, *name in entries:
                found = tuple(name)
                if tuple(map(type, found)) != (str, str, str, int) or found <= (last or after):
                    return parts, last, "its keys are out of order"
                part = _one(conn, n, k, found)
                parts.append(part or _lost(found, k, "its row is gone"))
                last = found
                size += len(part.data) if isinstance(part, WriteRow) else 0
                if size >= PAGE:
                    return parts, last, None
    except Damaged as error:
        return parts, last, error.why
    except UnicodeDecodeError:
        return parts, last, "a text in it is no UTF-8"
    return parts, last, None


def _one(conn: Connection, n: int, k: int, name: Key) -> Part | None:
    found = conn.rows(_ROW, (k,))
    if not found:
        return None
    task, *values = found[0]
    if not _fits(tuple(values)):
        return _lost(name, k, "its values are of other types")
    if task != n or tuple(values[:4]) != name:
        return _lost(name, k, "it and its entry in the index differ")
    return make(tuple(values))


def _entries(db: Database, n: int, first: int, last: int) -> dict[int, Key]:
    """What the index, a tree of its own, has of rows that cannot be read."""
    statement = (
        "SELECT k, space, checkpoint, writer, idx FROM sp_writes INDEXED BY sp_writes_key WHERE task = ? AND k BETWEEN ? AND ?"
    )
    try:
        with db.reading() as conn:
            found = {row[0]: row[1:] for row in conn.rows(statement, (n, first, last))}
    except (Damaged, UnicodeDecodeError):
        return {}
    return {k: name for k, name in found.items() if tuple(map(type, name)) == (str, str, str, int)}


def _lost(name: Key, k: int, why: str) -> Lost:
    space, checkpoint, writer, idx = name
    where = f" of space {space!r}" if space else ""
    return Lost(
        f"write {idx} of {writer!r} against checkpoint {checkpoint!r}{where}",
        f"sp_writes, row {k}",
        why,
        kind="write",
        key=name,
    )


def _uncounted(db: Database, n: int) -> Iterator[Lost]:
    try:
        with db.reading() as conn:
            found = conn.rows(reads()["count_writes"], (n,))
    except Damaged:
        return  # it has been said what cannot be read
    for counted, there in found:
        if type(counted) not in (int, type(None)):
            yield Lost("the count of writes", f"sp_tasks, row {n}", "it is no number", kind="write")
        elif counted is not None and counted != there:
            what = f"{counted - there} writes are missing" if counted > there else f"{there - counted} writes too many"
            yield Lost(what, f"sp_tasks, row {n}", f"the task's row counts {counted}, and {there} are there", kind="write")


def where_is(conn: Connection, n: int, name: Key) -> str:
    found = conn.rows(_AT, (n, *name))
    return f"sp_writes, row {found[0][0]}" if found else f"sp_writes, task {n}, {', '.join(map(repr, name))}"


def number_of(conn: Connection, n: int, name: Key) -> int:
    """The number of the row of a key, with its task's in it; -1 if there is none."""
    found = conn.rows(_AT, (n, *name))
    return int(found[0][0]) if found else -1

"""One checkpoint out of a damaged SQLite file, where the usual way to it is broken: slow, and only then.

What a load follows are indexes: of task names, of ids, of objects' names. Where one of them is damaged the rows may still be
whole, and then the tables are read from one end to the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from safepoint.errors import Damaged
from safepoint.model import Obj
from safepoint.rows import CheckpointRow
from safepoint.stores import sqlite_rows, sqlite_walk
from safepoint.stores.sqlite_pages import scan
from safepoint.stores.sqlite_rows import GET_CHECKPOINT, key, names

if TYPE_CHECKING:
    from safepoint.stores.sqlite_db import Database

__all__ = ["rescue"]

_OBJECTS = "SELECT k, task, name, refs, data FROM sp_objects NOT INDEXED WHERE k BETWEEN ? AND ? ORDER BY k"


def rescue(
    db: Database, task: str, space: str, seq: int | None, id: str | None
) -> tuple[CheckpointRow, Mapping[bytes, Obj]] | None:
    """The checkpoint with all that it reaches, or None if some of that is not there."""
    # The check refuses a whole page for one bad cell; every row that is taken here passes its own.
    _check_cells(db, "OFF")
    try:
        n, _ = sqlite_walk._number(db, task)
        if n is None:
            return None
        row = _row(db, task, n, space, seq, id)
        if row is None:
            return None
        there: dict[bytes, Obj] = {}
        for part in scan(db, _OBJECTS, 0, sqlite_walk.LARGEST, None):
            if len(part) > 3 and part[1] == n and {value.__class__ for value in part[2:]} == {bytes}:  # else a gap, or not ours
                there[part[2]] = Obj(*part[2:])
        found: dict[bytes, Obj] = {}
        level = names([row.refs])
        while level:
            found.update({name: there[name] for name in level})
            level = [name for name in names([there[name].refs for name in level]) if name not in found]
        return row, found
    except (Damaged, KeyError):
        return None
    finally:
        _check_cells(db, "ON")


def _row(db: Database, task: str, n: int, space: str, seq: int | None, id: str | None) -> CheckpointRow | None:
    if seq is not None:
        try:
            with db.reading() as conn:
                rows = [sqlite_rows.checkpoint(found) for found in conn.rows(GET_CHECKPOINT, (key(n, seq),))]
            for row in rows:
                row.check(task, f"checkpoint {row.seq}")
                if (row.seq, row.space) == (seq, space):
                    return row
        except Damaged:
            pass  # the way to it by number may be the broken one
    for part in sqlite_walk._keyed(db, "checkpoint", n, None):
        if isinstance(part, CheckpointRow) and part.space == space and (part.seq == seq if id is None else part.id == id):
            part.check(task, f"checkpoint {part.seq}")
            return part
    return None


def _check_cells(db: Database, on: str) -> None:
    db.cells = on  # for connections that are opened anew after an error
    with db.reading() as conn:
        conn.execute(f"PRAGMA cell_size_check={on}")

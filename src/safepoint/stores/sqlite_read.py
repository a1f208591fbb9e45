"""The reading verbs of the SQLite store. Each is one short read transaction, and nothing stays open when it returns."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from safepoint.model import Obj
from safepoint.rows import BranchRow, CallRow, CheckpointRow, Guard, LeaseRow, PauseRow, TaskRow
from safepoint.stores import holder as people
from safepoint.stores import sqlite_rows
from safepoint.stores.sqlite_db import Connection
from safepoint.stores.sqlite_rows import key, reads

if TYPE_CHECKING:
    from safepoint.stores.oslock import LockFile
    from safepoint.stores.sqlite_db import Database

MOST = (1 << 32) - 1


class Reads:
    """Needs ``_db`` and ``_locks`` from the store."""

    _db: Database
    _locks: LockFile

    def task(self, task: str) -> TaskRow | None:
        with self._db.reading() as conn:
            found = conn.rows(reads()["tasks"] + " WHERE t.task = ?", (task,))
        return sqlite_rows.task(found[0]) if found else None

    def tasks(self, *, after: str | None = None, limit: int = 200) -> list[TaskRow]:
        # UTF-8 compared byte by byte is code point order.
        where = " WHERE (?1 IS NULL OR t.task > ?1) ORDER BY t.task LIMIT ?2"
        if after is not None:
            where = " WHERE t.task > ?1 ORDER BY t.task LIMIT ?2"
        with self._db.reading() as conn:
            found = conn.rows(reads()["tasks"] + where, (after, limit))
        return [sqlite_rows.task(row) for row in found]

    def branches(self, task: str, space: str = "") -> list[BranchRow]:
        with self._db.reading() as conn:
            found = conn.rows(reads()["branches"], (task, space))
        return [sqlite_rows.branch(row) for row in found]

    def read(
        self, task: str, *, space: str = "", seq: int | None = None, branch: str | None = None, id: str | None = None
    ) -> tuple[CheckpointRow, Mapping[bytes, Obj]] | None:
        with self._db.reading() as conn:
            if id is not None:
                at = conn.rows(reads()["by_id"], (space, id, task))
            elif seq is not None:
                at = [(row[0], seq) for row in conn.rows(reads()["number"], (task,))]
            else:
                at = conn.rows(reads()["head_of"], (task, space, branch))
            if not at:
                return None
            n, number = at[0]
            found = conn.rows(sqlite_rows.GET_CHECKPOINT, (key(n, number),))
            if not found:
                return None
            row = sqlite_rows.checkpoint(found[0])
            if row.space != space:
                return None
            return row, _closure(conn, n, [row.refs])

    def headers(
        self, task: str, *, space: str = "", branch: str | None = None, before: int | None = None, limit: int | None = None
    ) -> list[CheckpointRow]:
        last = MOST if before is None else min(before - 1, MOST)
        statement = reads()["headers_of_space" if space else "headers"]
        with self._db.reading() as conn:
            at = conn.rows(reads()["number"], (task,))
            if not at or last < 0:
                return []
            most = -1 if limit is None else max(limit, 0)
            found = conn.rows(statement, (at[0][0], last, space, branch, most))
        return [sqlite_rows.header(row) for row in found]

    def calls(
        self,
        task: str,
        *,
        line: int | None = None,
        from_step: int | None = None,
        nos: Iterable[int] | None = None,
        bodies: bool = True,
        limit: int | None = None,
    ) -> tuple[list[CallRow], Mapping[bytes, Obj]]:
        with self._db.reading() as conn:
            at = conn.rows(reads()["number"], (task,))
            if not at:
                return [], {}
            n = at[0][0]
            most = -1 if limit is None else max(limit, 0)
            if nos is None:
                found = conn.rows(reads()["calls"], (n, line, from_step, most))
            else:
                wanted = json.dumps([no for no in nos if 0 < no <= MOST])
                found = conn.rows(reads()["calls_by_no"], (n, line, from_step, most, wanted))
            rows = [sqlite_rows.call(row) for row in reversed(found)]
            if not bodies:
                return rows, {}
            return rows, _closure(conn, n, [refs for row in rows for refs in (row.args_refs, row.result_refs)])

    def pauses(self, task: str) -> list[PauseRow]:
        with self._db.reading() as conn:
            at = conn.rows(reads()["number"], (task,))
            found = conn.rows(sqlite_rows.GET_PAUSES, at[0]) if at else []
        return [sqlite_rows.pause(row) for row in found]

    def lease(self, task: str) -> LeaseRow | None:
        with self._db.reading() as conn:
            found = conn.rows(reads()["lease"], (task,))
        if not found:
            return None
        fence, token, lease_id, locks, state, holder, acquired_at, presumed = found[0]
        live = state == "held" and self._locks.is_held(lease_id, locks) is True
        return LeaseRow(
            task=task,
            fence=fence,
            token=token,
            lease_id=lease_id,
            state=state,
            holder=holder,
            acquired_at=acquired_at,
            presumed=presumed,
            live=live,
            stopped=live and people.is_stopped(people.read(holder)),
        )

    def holds(self, task: str, guard: Guard) -> bool:
        with self._db.reading() as conn:
            found = conn.rows(reads()["lease"], (task,))
        return bool(found) and found[0][:2] == guard and found[0][4] == "held" and bool(self._locks.is_held(*found[0][2:4]))


def _closure(conn: Connection, n: int, roots: Iterable[bytes]) -> dict[bytes, Obj]:
    """All objects that these refs reach, one statement per level of the tree."""
    found: dict[bytes, Obj] = {}
    statement = reads()["level"]
    make = tuple.__new__  # what Obj._make does, without its own call for each of thousands
    level = sqlite_rows.names(roots)
    while level:
        rows = conn.rows(statement, (b"".join(level), n, len(level)))
        found.update({row[0]: make(Obj, row) for row in rows})
        level = [name for name in sqlite_rows.names([row[1] for row in rows if row[1]]) if name not in found]
    return found

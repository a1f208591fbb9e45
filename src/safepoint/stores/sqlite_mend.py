"""Mending a SQLite file in place: what is damaged goes to sp_quarantine as it was found, and is never deleted."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from safepoint import _probe
from safepoint.errors import Unavailable, UsageError
from safepoint.rows import Aside, CallRow, CheckpointRow, Image
from safepoint.stores import refusals, sqlite_walk, sqlite_writes
from safepoint.stores.sqlite_db import CommitFailed, Connection, Database
from safepoint.stores.sqlite_leases import now
from safepoint.stores.sqlite_rows import CALL, CHECKPOINT, PUT_CALL, PUT_CHECKPOINT, reads, values
from safepoint.stores.sqlite_schema import branch_sum, branches_sum

if TYPE_CHECKING:
    from safepoint.stores.oslock import LockFile

__all__ = ["Mends"]

_LEASE = "SELECT state, lease_id, locks, holder, acquired_at FROM sp_leases WHERE task = ?"
_NUMBERS = "SELECT next_seq - 1, next_call - 1, next_pause - 1, next_line - 1, position - 1 FROM sp_tasks WHERE n = ?"
_QUARANTINE = "INSERT INTO sp_quarantine (kind, task, key, why, at, data) VALUES (?, ?, ?, ?, ?, ?)"


class Mends:
    """Needs ``_db``, ``_locks``, ``path`` and ``_refuse_if_held`` from the store."""

    _db: Database
    _locks: LockFile
    path: str

    if TYPE_CHECKING:

        def _refuse_if_held(self, task: str, *lease: Any) -> None: ...

    def beside(self, suffix: str) -> str | None:
        return f"sqlite:///{self.path}{suffix}"

    def backup(self, suffix: str) -> str:
        to = f"{self.path}{suffix}"
        try:
            os.close(os.open(to, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        except FileExistsError:
            raise UsageError(f"{to} is there already", "", "Move it away.", path=to) from None
        # SQLite itself reads and writes: nothing else may open the file in this process.
        own = Database(self.path, timeout=self._db.timeout, full=True)
        try:
            conn = own.lock_writer(owner := object())
            try:
                conn.execute("VACUUM INTO ?", (to,))
            finally:
                own.unlock_writer(owner)
        finally:
            own.close()
        return f"sqlite:///{to}"

    def set_aside(self, image: Image, gone: Iterable[Aside], put: Iterable[CheckpointRow], bare: Iterable[CallRow]) -> int:
        task, moved = image.row.task, 0
        try:
            with self._db.writing(True) as conn:
                found = conn.rows(reads()["number"], (task,))
                if not found:
                    raise refusals.stale(task)
                n = found[0][0]
                for lease in conn.rows(_LEASE, (n,)):
                    self._refuse_if_held(task, *lease)
                before = image.numbers
                made = [row.sealed(task) for row in put]
                # Numbers that repair itself gave out are not there yet.
                seq, _, _, line, position = conn.rows(_NUMBERS, (n,))[0]
                # A commit of writes or of branches alone moves none of them.
                same = conn.rows("SELECT updated_at FROM sp_tasks WHERE n = ?", (n,)) == [(image.row.updated_at,)]
                if seq != before.seq - len(made) or line > before.line or position != before.position or not same:
                    raise refusals.stale(task)
                for aside in gone:
                    moved += _aside(conn, task, n, aside)
                for row in made:
                    conn.execute(PUT_CHECKPOINT, values(n, row.seq, row, CHECKPOINT))
                for call in bare:
                    moved += _copy(
                        conn, "sp_calls", "k = ?", (n << 32 | call.no,), ("call", task, str(call.no), "its values are lost")
                    )
                    sealed = call.sealed(task)
                    conn.execute(PUT_CALL, values(n, call.no, sealed, CALL))
                conn.execute("DELETE FROM sp_branches WHERE task = ?", (n,))
                conn.executemany(
                    "INSERT INTO sp_branches (task, space, name, head_seq, head_id, line, forked_from) VALUES (?, ?, ?, ?, ?, ?, ?)",
                    [(n, b.space, b.name, *b.head, b.line, b.forked_from) for b in image.branches],
                )
                conn.execute(
                    "UPDATE sp_tasks SET branch = ?2, branch_sum = ?3, branches_sum = ?7, next_seq = ?4, next_line = ?5, updated_at = ?6,"
                    " sweeps = sweeps + 1,"  # rows of old numbers have come: a sweep under way looks anew
                    " checkpoints = (SELECT count(*) FROM sp_checkpoints WHERE k BETWEEN ?1 << 32 AND ?1 << 32 | 4294967295),"
                    " calls = (SELECT count(*) FROM sp_calls WHERE k BETWEEN ?1 << 32 AND ?1 << 32 | 4294967295),"
                    " pauses = (SELECT count(*) FROM sp_pauses WHERE k BETWEEN ?1 << 32 AND ?1 << 32 | 4294967295),"
                    " write_rows = (SELECT count(*) FROM sp_writes WHERE k BETWEEN ?1 << 32 AND ?1 << 32 | 4294967295)"
                    " WHERE n = ?1",
                    (
                        *(n, image.row.branch, branch_sum(task, image.row.branch), before.seq + 1, before.line + 1, now()),
                        branches_sum(task, [(b.space, b.name) for b in image.branches]),
                    ),
                )
                _probe.at("repair.before")
            _probe.at("repair.after")
        except CommitFailed as failed:
            raise Unavailable(
                f"whether task {task!r} was repaired is not known", str(failed.cause), "Verify it.", task=task, unknown=True
            ) from failed.cause
        return moved

    def set_strays_aside(self) -> int:
        moved = 0
        for stray in sqlite_walk.strays(self._db):
            if stray.kind != "stray" or stray.first is None:
                continue
            table = stray.where.partition(",")[0]
            where = f"{sqlite_walk.OWNED[table]} = ?1"
            if sqlite_walk.OWNED[table] == "k":
                where = "k BETWEEN ?1 << 32 AND ?1 << 32 | 4294967295"
            try:
                with self._db.writing(True) as conn:
                    moved += _move(conn, table, where, (stray.first,), ("stray", "", f"{table}, task {stray.first}", stray.why))
            except CommitFailed as failed:
                raise failed.cause from failed
        return moved


def _aside(conn: Connection, task: str, n: int, aside: Aside) -> int:
    what = (aside.kind, task, str(aside.key if not isinstance(aside.key, bytes) else aside.key.hex()), aside.why)
    if aside.kind == "object":
        return _move(conn, "sp_objects", "task = ? AND name = ?", (n, aside.key), what)
    if aside.kind == "branch":
        return _copy(conn, "sp_branches", "task = ? AND space = ? AND name = ?", (n, *aside.key), what)
    if aside.kind == "write":
        return _move(conn, "sp_writes", "k = ?", (sqlite_writes.number_of(conn, n, aside.key),), what)
    return _move(conn, f"sp_{aside.kind}s", "k = ?", (n << 32 | aside.key,), what)


def _move(conn: Connection, table: str, where: str, given: tuple[Any, ...], what: tuple[str, str, str, str]) -> int:
    moved = _copy(conn, table, where, given, what)
    conn.execute(f"DELETE FROM {table} WHERE {where}", given)
    return moved


def _copy(conn: Connection, table: str, where: str, given: tuple[Any, ...], what: tuple[str, str, str, str]) -> int:
    """The rows as they are found: each value's type and its bytes, since a damaged text need not be UTF-8."""
    names = [row[1] for row in conn.rows(f"PRAGMA table_info({table})")]
    columns = ", ".join(f"typeof({name}), CAST({name} AS BLOB)" for name in names)
    n = 0
    for row in conn.rows(f"SELECT {columns} FROM {table} WHERE {where}", given):
        pairs = dict(zip(names, zip(row[::2], row[1::2], strict=True), strict=True))
        conn.execute(_QUARANTINE, (*what, now(), msgspec.msgpack.encode({"table": table, "row": pairs})))
        n += 1
    return n

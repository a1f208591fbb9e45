"""Which schema a SQLite file has, and the steps from each to the next.

A new file takes all steps from the first, one that an older safepoint wrote those that it lacks; either way in one transaction,
so that a process killed in it leaves the file as it was, and of two that come at once the second finds nothing to do.
"""

from __future__ import annotations

import os
import secrets
import zlib
from collections import defaultdict
from collections.abc import Iterable
from importlib import resources
from typing import TYPE_CHECKING

import apsw

from safepoint import _probe
from safepoint.errors import Damaged, NewerFormat

if TYPE_CHECKING:
    from safepoint.stores.sqlite_db import Connection

__all__ = ["APPLICATION_ID", "SCHEMA", "branch_sum", "branches_sum", "prepare"]

APPLICATION_ID = 0x53504E54  # "SPNT"
SCHEMA = 3
PAGE = 8192


def branch_sum(task: str, branch: str) -> int:
    """What sp_tasks keeps beside the name of the current branch."""
    return zlib.crc32(f"{task}\0{branch}".encode())


def branches_sum(task: str, branches: Iterable[tuple[str, str]]) -> int:
    """What sp_tasks keeps of the spaces and names of all branches."""
    return sum([zlib.crc32(f"{task}\0{space}\0{name}".encode()) for space, name in branches]) & 0xFFFFFFFF


def prepare(conn: Connection, path: str) -> str:
    """Bring the file to this schema; returns what the file is called inside."""
    if _version(conn, path) != SCHEMA:
        skip: set[str] = set()
        while not _migrated(conn, path, skip):
            pass
        _fold(conn)
    elif os.stat(path).st_size <= PAGE:
        _fold(conn)  # whoever made it was killed before this
    found = conn.rows("SELECT value FROM sp_meta WHERE key = 'store'")
    if not found or not isinstance(found[0][0], str):
        raise Damaged(f"{path} does not say what it is called", "", "Restore it from a backup.", path=path)
    return str(found[0][0])


def _fold(conn: Connection) -> None:
    # Into the file itself: where the log is lost later, what is left must still be known as this store, and not as a new one.
    conn.rows("PRAGMA wal_checkpoint(FULL)")


def _migrated(conn: Connection, path: str, skip: set[str]) -> bool:
    """Migrate, or add to ``skip`` what cannot be counted: SQLite writes no more in a transaction that met damage."""
    conn.execute("BEGIN IMMEDIATE")
    try:
        version = _version(conn, path)
        if version == 0:
            # A file with tables of others keeps the numbers that they gave it.
            if conn.rows("SELECT count(*) FROM sqlite_schema")[0][0] == 0:
                conn.execute(f"PRAGMA application_id={APPLICATION_ID}")
            elif conn.rows("PRAGMA user_version") == [(0,)]:
                conn.execute(f"PRAGMA user_version={SCHEMA}")
            _step(conn, 1)
            conn.execute("INSERT INTO sp_meta VALUES ('schema', 0), ('nonce', 0), ('fence', 0)")
        if version < 2:
            _step(conn, 2)
            conn.execute("INSERT INTO sp_meta VALUES ('store', ?)", (secrets.token_hex(16),))
        if version < 3:
            _step(conn, 3)
        for kind in (*(("tasks", "calls", "pauses") if version < 2 else ()), *(("branches",) if version < 3 else ())):
            try:
                _count(conn, kind, kind not in skip)
            except apsw.CorruptError:
                if kind in skip:
                    raise
                skip.add(kind)
                conn.execute("ROLLBACK")
                return False
        if version < SCHEMA:
            conn.execute("UPDATE sp_meta SET value = ? WHERE key = 'schema'", (SCHEMA,))
            if _is_ours(conn):
                conn.execute(f"PRAGMA user_version={SCHEMA}")
        _probe.at("migrate.before")
        conn.execute("COMMIT")
    except BaseException:
        if conn.in_transaction:
            conn.execute("ROLLBACK")
        raise
    _probe.at("migrate.after")
    return True


def _step(conn: Connection, number: int) -> None:
    conn.execute((resources.files("safepoint.stores") / "sql" / f"sqlite_{number}.sql").read_text(encoding="utf-8"))
    _probe.at("migrate.step")


def _count(conn: Connection, kind: str, readable: bool) -> None:
    # One damaged page must not keep all the others from being opened: what cannot be counted stays unknown.
    if kind == "tasks":
        found = conn.rows("SELECT n, task, branch FROM sp_tasks") if readable else []
        conn.executemany("UPDATE sp_tasks SET branch_sum = ? WHERE n = ?", [(branch_sum(*names), n) for n, *names in found])
        conn.execute("UPDATE sp_meta SET value = ? WHERE key = 'tasks'", (len(found) if readable else None,))
    elif kind == "branches":
        found = (
            conn.rows("SELECT t.n, t.task, b.space, b.name FROM sp_tasks t JOIN sp_branches b ON b.task = t.n")
            if readable
            else []
        )
        names: dict[tuple[int, str], list[tuple[str, str]]] = defaultdict(list)
        for n, task, *name in found:
            names[n, task].append((name[0], name[1]))
        conn.execute("UPDATE sp_tasks SET branches_sum = ?", (0 if readable else None,))
        sums = [(branches_sum(task, of), n) for (n, task), of in names.items()]
        conn.executemany("UPDATE sp_tasks SET branches_sum = ? WHERE n = ?", sums)
    elif readable:
        found = conn.rows(f"SELECT k >> 32, count(*) FROM sp_{kind} GROUP BY k >> 32")
        conn.executemany(f"UPDATE sp_tasks SET {kind} = ?2 WHERE n = ?1", found)
    else:
        conn.execute(f"UPDATE sp_tasks SET {kind} = NULL")


def _is_ours(conn: Connection) -> bool:
    return conn.rows("PRAGMA application_id") == [(APPLICATION_ID,)]


def _version(conn: Connection, path: str) -> int:
    version = int(conn.rows("PRAGMA user_version")[0][0]) if _is_ours(conn) else 0
    if conn.rows("SELECT 1 FROM sqlite_schema WHERE name='sp_meta'"):
        stored = conn.rows("SELECT value FROM sp_meta WHERE key='schema'")
        if not stored or not isinstance(stored[0][0], int) or stored[0][0] < 1:
            raise Damaged(f"{path} does not say which version it has", "", "Restore it from a backup.", path=path)
        version = max(version, stored[0][0])
    elif 0 < version <= SCHEMA:
        raise Damaged(f"{path} has lost its tables", "it says that it is a store", "Restore it from a backup.", path=path)
    if version > SCHEMA:
        raise NewerFormat(
            f"{path} has store format {version}",
            f"this safepoint knows formats up to {SCHEMA}",
            "Install a newer safepoint; the file was left as it is.",
            path=path,
        )
    return version

"""The side door to a SQLite store: its rows, read with apsw and by no code of the library.

Only where this process has no store open on the file: closing ours would drop that store's locks.
"""

from __future__ import annotations

import os
from typing import Any

import apsw


def rows(path: str | os.PathLike[str], sql: str, *args: Any) -> list[tuple[Any, ...]]:
    """Rows of a query, by a connection of its own that is closed again."""
    conn = apsw.Connection(os.fspath(path), flags=apsw.SQLITE_OPEN_READWRITE)
    try:
        conn.set_busy_timeout(10_000)
        return list(conn.execute(sql, args))
    finally:
        conn.close()


TABLES = ("sp_tasks", "sp_checkpoints", "sp_branches", "sp_calls", "sp_pauses", "sp_objects", "sp_leases")


def everything(path: str | os.PathLike[str]) -> dict[str, list[tuple[Any, ...]]]:
    """All rows of all tables, to be compared with a later look."""
    conn = apsw.Connection(os.fspath(path), flags=apsw.SQLITE_OPEN_READWRITE)
    try:
        conn.set_busy_timeout(10_000)
        conn.execute("BEGIN")
        return {t: sorted(conn.execute(f"SELECT * FROM {t}"), key=repr) for t in TABLES}
    finally:
        conn.close()


def checkpoints(path: str | os.PathLike[str], task: str) -> list[tuple[Any, ...]]:
    """(seq, parent_seq, kind, step) of a task, by seq."""
    return rows(
        path,
        "SELECT c.seq, c.parent_seq, c.kind, c.step FROM sp_checkpoints c JOIN sp_tasks t ON t.n = c.task"
        " WHERE t.task = ? ORDER BY c.seq",
        task,
    )


def calls(path: str | os.PathLike[str], task: str) -> list[dict[str, Any]]:
    """The journal of a task, by number."""
    names = ("no", "step", "tool", "effect", "status", "attempts", "fence", "idempotency_key", "call_id", "superseded")
    found = rows(
        path,
        f"SELECT {', '.join('c.' + n for n in names)} FROM sp_calls c JOIN sp_tasks t ON t.n = c.task"
        " WHERE t.task = ? ORDER BY c.no",
        task,
    )
    return [dict(zip(names, r, strict=True)) for r in found]


def head(path: str | os.PathLike[str], task: str) -> int | None:
    found = rows(
        path,
        "SELECT b.head_seq FROM sp_branches b JOIN sp_tasks t ON t.n = b.task"
        " WHERE t.task = ? AND b.space = '' AND b.name = t.branch",
        task,
    )
    return found[0][0] if found else None


def size(path: str | os.PathLike[str]) -> int:
    """Bytes on disk: the file and its log."""
    path = os.fspath(path)
    return sum(os.stat(p).st_size for p in (path, f"{path}-wal") if os.path.exists(p))

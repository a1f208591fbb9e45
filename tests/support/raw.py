"""The side door to a store: its rows, read and changed by no code of the library.

A store is named by the path of a SQLite file, or by a URL: PostgreSQL is looked at with psycopg and Redis with its client. SQLite
only where this process has no store open on the file: closing our connection would drop that store's locks.
"""

from __future__ import annotations

import base64
import os
import re
from typing import Any
from urllib.parse import parse_qs

import apsw
import msgspec

from safepoint.stores.redis import layout  # in which order values stand, and nothing else
from tests.support import rawrows

Where = str | os.PathLike[str]


def kind_of(where: Where) -> str:
    return rawrows.kind_of(str(where)) if "://" in str(where) else "sqlite"


def path_of(where: Where) -> str:
    return os.fspath(where).removeprefix("sqlite:///")


def rows(path: Where, sql: str, *args: Any) -> list[tuple[Any, ...]]:
    """Rows of a query, by a connection of its own that is closed again. Tables of the store are written as {s}sp_tasks where it
    may be another than SQLite."""
    if kind_of(path) == "postgres":
        import psycopg

        base, schema = rawrows.split_postgres(str(path))
        with psycopg.connect(base) as there:
            try:
                return there.execute(sql.replace("{s}", f'"{schema}".').replace("?", "%s"), args).fetchall()
            except psycopg.errors.UndefinedTable:  # nobody has asked the store for anything yet
                return []
    conn = apsw.Connection(path_of(path), flags=apsw.SQLITE_OPEN_READWRITE)
    try:
        conn.set_busy_timeout(10_000)
        return list(conn.execute(sql.replace("{s}", ""), args))
    finally:
        conn.close()


TABLES = ("sp_tasks", "sp_checkpoints", "sp_branches", "sp_calls", "sp_pauses", "sp_writes", "sp_objects", "sp_leases")


def everything(path: Where) -> dict[str, Any]:
    """All rows of all tables, to be compared with a later look. Until when a lease holds is left out: it is renewed."""
    match kind_of(path):
        case "redis" | "cluster":
            return _keys(str(path))
        case "postgres":
            import psycopg
            from psycopg.rows import dict_row

            base, schema = rawrows.split_postgres(str(path))
            with psycopg.connect(base, row_factory=dict_row) as there:
                there.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
                found = {t: there.execute(f'SELECT * FROM "{schema}".{t}').fetchall() for t in TABLES}
            for row in found["sp_leases"]:
                del row["until"]
            return {t: sorted((tuple(row.values()) for row in rows), key=repr) for t, rows in found.items()}
    conn = apsw.Connection(path_of(path), flags=apsw.SQLITE_OPEN_READWRITE)
    try:
        conn.set_busy_timeout(10_000)
        conn.execute("BEGIN")
        return {t: sorted(conn.execute(f"SELECT * FROM {t}"), key=repr) for t in TABLES}
    finally:
        conn.close()


def _keys(url: str) -> dict[str, Any]:
    found = {}
    with rawrows.redis_client(url) as client:
        for key in client.scan_iter(match=prefix_of(url) + b"*", count=1000):
            if client.type(key) == b"hash":
                fields = client.hgetall(key)
                fields.pop(b"f:until", None)
                found[key.decode()] = sorted(fields.items())
            else:
                found[key.decode()] = client.get(key)
    return found


def checkpoints(path: Where, task: str) -> list[tuple[Any, ...]]:
    """(seq, parent_seq, kind, step) of a task, by seq."""
    if kind_of(path) in ("redis", "cluster"):
        found = rawrows.read_tasks(str(path)).get(task, rawrows.RawTask())
        return [(c.seq, c.parent, c.kind, c.step) for c in found.checkpoints]
    return rows(
        path,
        "SELECT c.seq, c.parent_seq, c.kind, c.step FROM {s}sp_checkpoints c JOIN {s}sp_tasks t ON t.n = c.task"
        " WHERE t.task = ? ORDER BY c.seq",
        task,
    )


CALL = ("no", "step", "tool", "effect", "status", "attempts", "fence", "idempotency_key", "call_id", "superseded")


def calls(path: Where, task: str) -> list[dict[str, Any]]:
    """The journal of a task, by number."""
    if kind_of(path) in ("redis", "cluster"):
        stored = [value for name, value in sorted(fields_of(path, task).items()) if name.startswith(b"c:")]
        made = [dict(zip(layout.CALL, row, strict=False)) for row in map(msgspec.msgpack.decode, stored)]
        return sorted(({name: row[name] for name in CALL} for row in made), key=lambda row: row["no"])
    found = rows(
        path,
        f"SELECT {', '.join('c.' + n for n in CALL)} FROM {{s}}sp_calls c JOIN {{s}}sp_tasks t ON t.n = c.task"
        " WHERE t.task = ? ORDER BY c.no",
        task,
    )
    return [dict(zip(CALL, r, strict=True)) for r in found]


def pauses(path: Where, task: str) -> list[tuple[str, str]]:
    """(name, status) of each."""
    if kind_of(path) in ("redis", "cluster"):
        found = [value for name, value in sorted(fields_of(path, task).items()) if name.startswith(b"p:")]
        rows_of = [dict(zip(layout.PAUSE, row, strict=False)) for row in map(msgspec.msgpack.decode, found)]
        return [(row["name"], row["status"]) for row in rows_of]
    sql = "SELECT p.name, p.status FROM {s}sp_pauses p JOIN {s}sp_tasks t ON t.n = p.task WHERE t.task = ? ORDER BY p.no"
    return [(name, status) for name, status in rows(path, sql, task)]


def status(path: Where, task: str) -> str | None:
    if kind_of(path) in ("redis", "cluster"):
        stored = fields_of(path, task).get(b"t:status")
        return stored.decode() if stored is not None else None
    return next((s for (s,) in rows(path, "SELECT status FROM {s}sp_tasks WHERE task = ?", task)), None)


def lease(path: Where, task: str) -> tuple[int, str, int]:
    """(fence, state, presumed)."""
    if kind_of(path) in ("redis", "cluster"):
        fields = fields_of(path, task)
        return int(fields[b"f:fence"]), fields[b"f:state"].decode(), int(fields.get(b"f:presumed", b"0"))
    sql = "SELECT x.fence, x.state, x.presumed FROM {s}sp_leases x JOIN {s}sp_tasks t ON t.n = x.task WHERE t.task = ?"
    (found,) = rows(path, sql, task)
    return found[0], found[1], found[2]


def ledger(path: Where, task: str | None = None) -> list[str]:
    """The keys that transactional tools have written, of one task or all; none where there are no such tools."""
    if kind_of(path) in ("redis", "cluster"):
        return []
    found = sorted(key for (key,) in rows(path, "SELECT key FROM {s}ledger"))
    return found if task is None else [key for key in found if key.startswith(f"{task}/")]


def head(path: Where, task: str) -> int | None:
    """Where the current branch stands."""
    if kind_of(path) in ("redis", "cluster"):
        fields = fields_of(path, task)
        at = fields.get(b"b:\0" + fields.get(b"t:branch", b""))
        return msgspec.msgpack.decode(at)[0] if at else None
    found = rows(
        path,
        "SELECT b.head_seq FROM {s}sp_branches b JOIN {s}sp_tasks t ON t.n = b.task"
        " WHERE t.task = ? AND b.space = '' AND b.name = t.branch",
        task,
    )
    return found[0][0] if found else None


def size(path: str | os.PathLike[str]) -> int:
    """Bytes on disk: the file and its log."""
    path = os.fspath(path)
    return sum(os.stat(p).st_size for p in (path, f"{path}-wal") if os.path.exists(p))


def expire_stages(where: Where, task: str) -> None:
    """Let the time pass for which a big save that was staged, and never came, is believed to go on: stores on servers cannot see
    that whoever staged it is dead."""
    if kind_of(where) == "postgres":
        import psycopg

        base, schema = rawrows.split_postgres(str(where))
        with psycopg.connect(base) as there:
            there.execute(f'UPDATE "{schema}".sp_stages SET until = to_timestamp(0)')
    elif kind_of(where) in ("redis", "cluster"):
        stages = fields_of(where, task).get(b"stages")
        if stages:
            with rawrows.redis_client(str(where)) as client:
                client.hset(key_of(str(where), task), "stages", re.sub(rb"/\d+(?=;|$)", b"/1", stages))


# -- hashes of Redis


def prefix_of(url: str) -> bytes:
    return parse_qs(url.partition("?")[2])["prefix"][0].encode()


def key_of(url: str, task: str) -> bytes:
    """Of a task's hash."""
    return prefix_of(url) + b"{%s}" % base64.urlsafe_b64encode(task.encode())


def fields_of(where: Where, task: str) -> dict[bytes, bytes]:
    url = str(where)
    with rawrows.redis_client(url) as client:
        found: dict[bytes, bytes] = client.hgetall(key_of(url, task))
        return found


_LENGTHS = """
local found = {}
for _, name in ipairs(redis.call('HKEYS', KEYS[1])) do
    found[#found + 1] = {name, redis.call('HSTRLEN', KEYS[1], name)}
end
return found
"""


def lengths(where: Where, task: str) -> dict[bytes, int]:
    """How long the value of each field of a task is, without reading it."""
    url = str(where)
    with rawrows.redis_client(url) as client:
        return dict(client.eval(_LENGTHS, 1, key_of(url, task)))

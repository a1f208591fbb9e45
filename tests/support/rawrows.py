"""The rows of any store as they lie there, read by other means than the library's: the side door of tests on many stores.

SQLite with apsw, so only in a process that has no store open on the file; a folder of files as JSON; PostgreSQL with psycopg and
Redis with its client, on connections of their own.
"""

from __future__ import annotations

import base64
import json
import os
from dataclasses import dataclass, field
from dataclasses import fields as fields_of
from typing import Any
from urllib.parse import parse_qs, unquote

import apsw
import msgspec

from safepoint.stores.redis.layout import CALL  # in which order the values of a row stand, and nothing else

__all__ = ["RawCall", "RawCheckpoint", "RawTask", "kind_of", "lease_until", "read_tasks", "redis_client", "split_postgres"]


@dataclass
class RawCheckpoint:
    seq: int
    parent: int | None
    id: str
    branch: str
    kind: str
    step: int


@dataclass
class RawCall:
    no: int
    tool: str
    status: str
    step: int
    attempts: int
    fence: int
    began: int
    ended: int | None
    version: int


@dataclass
class RawTask:
    """What is stored of one task."""

    status: str = ""
    checkpoints: list[RawCheckpoint] = field(default_factory=list)
    calls: list[RawCall] = field(default_factory=list)
    heads: dict[str, int] = field(default_factory=dict)
    writes: list[tuple[str, str, str, int]] = field(default_factory=list)
    """Space, checkpoint, writer and index of what adapters recorded."""
    fence: int = 0


def kind_of(url: str) -> str:
    scheme = url.partition("://")[0]
    if scheme.startswith(("redis", "valkey")):
        return "cluster" if "cluster=" in url else "redis"
    return "postgres" if scheme.startswith("postgres") else scheme


def read_tasks(url: str) -> dict[str, RawTask]:
    """All tasks by name, checkpoints by seq, calls by number."""
    found = {"sqlite": _sqlite, "file": _file, "postgres": _postgres, "redis": _redis, "cluster": _redis}[kind_of(url)](url)
    for task in found.values():
        task.checkpoints.sort(key=lambda c: c.seq)
        task.calls.sort(key=lambda c: c.no)
        task.writes.sort()
    return found


# -- tables


_TASKS = "SELECT task, status FROM {s}sp_tasks"
_OF = "JOIN {s}sp_tasks t ON t.n = x.task"
_CHECKPOINTS = "SELECT t.task, x.seq, x.parent_seq, x.id, x.branch, x.kind, x.step FROM {s}sp_checkpoints x " + _OF
_CALLS = (
    "SELECT t.task, x.no, x.tool, x.status, x.step, x.attempts, x.fence, x.began, x.ended, x.version FROM {s}sp_calls x " + _OF
)
_HEADS = "SELECT t.task, x.name, x.head_seq FROM {s}sp_branches x " + _OF + " WHERE x.space = ''"
_WRITES = "SELECT t.task, x.space, x.checkpoint, x.writer, x.idx FROM {s}sp_writes x " + _OF
_LEASES = "SELECT t.task, x.fence FROM {s}sp_leases x " + _OF


def _tables(rows: Any) -> dict[str, RawTask]:
    found = {task: RawTask(status) for task, status in rows(_TASKS)}
    for task, *values in rows(_CHECKPOINTS):
        found[task].checkpoints.append(RawCheckpoint(*values))
    for task, *values in rows(_CALLS):
        found[task].calls.append(RawCall(*values))
    for task, name, seq in rows(_HEADS):
        found[task].heads[name] = seq
    for task, *key in rows(_WRITES):
        found[task].writes.append(tuple(key))
    for task, fence in rows(_LEASES):
        found[task].fence = fence
    return found


def _sqlite(url: str) -> dict[str, RawTask]:
    conn = apsw.Connection(url.removeprefix("sqlite:///"), flags=apsw.SQLITE_OPEN_READWRITE)
    try:
        conn.set_busy_timeout(10_000)
        conn.execute("BEGIN")
        return _tables(lambda sql: conn.execute(sql.format(s="")).fetchall())
    finally:
        conn.close()


def _postgres(url: str) -> dict[str, RawTask]:
    import psycopg

    base, schema = split_postgres(url)
    with psycopg.connect(base) as conn:
        conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        return _tables(lambda sql: conn.execute(sql.format(s=f'"{schema}".')).fetchall())


def split_postgres(url: str) -> tuple[str, str]:
    """The server's URL, for psycopg, and the schema that the store lies in."""
    base, _, query = url.partition("?")
    ours = {"schema", "timeout", "lease", "pool", "durability"}
    kept = "&".join(part for part in query.split("&") if part and part.partition("=")[0] not in ours)
    (schema,) = parse_qs(query).get("schema", ["public"])
    return base + (f"?{kept}" if kept else ""), schema


# -- leases with a clock


def lease_until(url: str, task: str) -> float:
    """When the lease on a task ends, by the server's clock, in seconds as of time.time()."""
    if kind_of(url) == "postgres":
        import psycopg

        base, schema = split_postgres(url)
        sql = f'SELECT extract(epoch FROM x.until) FROM "{schema}".sp_leases x JOIN "{schema}".sp_tasks t ON t.n = x.task WHERE t.task = %s'
        with psycopg.connect(base) as conn:
            (found,) = conn.execute(sql, (task,)).fetchone() or ()
        return float(found)
    with redis_client(url) as client:
        prefix = parse_qs(url.partition("?")[2])["prefix"][0]
        return int(client.hget(f"{prefix}{{{base64.urlsafe_b64encode(task.encode()).decode()}}}", "f:until")) / 1e6


# -- files


def _file(url: str) -> dict[str, RawTask]:
    root = url.removeprefix("file:///")
    found = {}
    for name in sorted(os.listdir(root)):
        folder = os.path.join(root, name)
        if not name.startswith(".") and os.path.isdir(folder):
            task, raw = _folder(folder)
            lease = os.path.join(root, ".leases", name)
            if os.path.exists(lease):
                with open(lease, encoding="utf-8") as f:
                    raw.fence = json.loads(f.read().rpartition(" ")[0])["fence"]
            found[task] = raw
    return found


def _folder(folder: str) -> tuple[str, RawTask]:
    raw = RawTask()
    task = unquote(os.path.basename(folder))
    calls: dict[int, dict[str, Any]] = {}
    writes: dict[tuple[str, str, str, int], None] = {}
    with open(os.path.join(folder, "journal.jsonl"), encoding="utf-8") as f:
        for text in f:
            line = json.loads(text)
            task = line.get("task", task)
            raw.status = line.get("row", {}).get("status", raw.status)
            for row in line.get("calls", []) + ([line["call"]] if "call" in line else []):
                calls.setdefault(row["no"], {}).update(row)
            for row in line.get("writes", []) + ([line["write"]] if "write" in line else []):
                writes[row.get("space", ""), row["against"], row["writer"], row["idx"]] = None
            moved = line.get("branches", []) + ([line["branch"]] if "branch" in line else [])
            if line.get("moves"):
                new = line["checkpoint"]
                moved.append(
                    {"space": new.get("space", ""), "name": new.get("branch", "main"), "head": [new["seq"], new["id"]]}
                )
            for row in moved:
                if row["space"] == "":
                    raw.heads.pop(row["name"], None)
                    raw.heads |= {row["name"]: row["head"][0]} if "head" in row else {}
    raw.writes = list(writes)
    for row in calls.values():
        raw.calls.append(
            RawCall(
                row["no"],
                row["tool"],
                row["status"],
                row.get("step", 0),
                row.get("attempts", 1),
                row["fence"],
                row["began"],
                row.get("ended"),
                row["version"],
            )
        )
    for where, _, files in os.walk(folder):
        for name in files:
            if name.endswith(".json") and not name.startswith("."):
                with open(os.path.join(where, name), encoding="utf-8") as f:
                    d = json.load(f)
                raw.checkpoints.append(RawCheckpoint(d["seq"], d["parent"], d["id"], d["branch"], d["kind"], d["step"]))
    return task, raw


# -- hashes


def _redis(url: str) -> dict[str, RawTask]:
    """As the head of the Redis store's layout tells: one hash for each task."""
    found = {}
    with redis_client(url) as client:
        prefix = parse_qs(url.partition("?")[2])["prefix"][0].encode()
        for key in client.scan_iter(match=prefix + b"{*}", count=1000):
            if client.hexists(key, b"t:id"):
                fields = client.hgetall(key)
                found[fields[b"t:id"].decode()] = _hash(fields)
    return found


def redis_client(url: str) -> Any:
    """A client of redis-py for a store's URL."""
    import redis

    base, _, query = url.partition("?")
    if base.startswith("redis+unix://"):
        return redis.Redis(unix_socket_path=base.removeprefix("redis+unix://"))
    return (redis.RedisCluster if "cluster=true" in query else redis.Redis).from_url(base)


def _hash(fields: dict[bytes, bytes]) -> RawTask:
    raw = RawTask(fields[b"t:status"].decode(), fence=int(fields.get(b"f:fence", b"0")))
    unpack = msgspec.msgpack.decode
    for name, value in fields.items():
        match name[:2]:
            case b"h:":
                _, id, seq, space, branch, parent, step, kind = unpack(value)[:8]
                if not space:
                    raw.checkpoints.append(RawCheckpoint(seq, parent, id, branch, kind, step))
            case b"c:":
                row = dict(zip(CALL, unpack(value), strict=True))
                raw.calls.append(RawCall(*(row[f.name] for f in fields_of(RawCall))))
            case b"b:":
                space, _, branch = name[2:].partition(b"\0")
                if not space:
                    raw.heads[branch.decode()] = unpack(value)[0]
    return raw

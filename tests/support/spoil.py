"""What a disk, or a person, has damaged: rows and objects of any store, changed behind the library's back.

Stores are changed by other means than their own: SQLite with apsw in another process, since a second connection of this one would
drop the store's locks when it is closed; PostgreSQL with psycopg, Redis with its client. A folder of files is for people to edit:
what tests do to it, they do themselves.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from safepoint.model import Obj
from safepoint.rows import replace
from safepoint.stores.memory import MemoryStore
from safepoint.stores.redis import layout
from tests.support import raw, rawrows

__all__ = ["change_call", "change_checkpoint", "change_object", "drop_calls", "lengthen_root", "spoil", "spoil_any"]


def spoil(cp: Any, task: str, holds: bytes, how: str = "missing", *, seq: int | None = None) -> int:
    """Remove (``missing``) or change (``corrupt``) every object of a checkpoint whose bytes hold these. Returns how many."""
    if not cp.store.chunked:
        return _by_hand(cp, task, holds)
    found = cp.store.read(task, seq=seq)
    assert found is not None
    names = [name for name, obj in found[1].items() if holds in obj.data]
    for name in names:
        change_object(cp, task, name, None if how == "missing" else b"v\0")
    return len(names)


def spoil_any(cp: Any, task: str, holds: bytes) -> int:
    """Change every object of a task whose bytes hold these, whatever reaches it. Returns how many."""
    names = [part.name for part in cp.store.walk(task) if isinstance(part, Obj) and holds in part.data]
    for name in names:
        change_object(cp, task, name, b"v\0")
    return len(names)


def _by_hand(cp: Any, task: str, holds: bytes) -> int:
    """Where a state is stored whole a damaged part is a damaged state; but a person may take a product out of it."""
    state = cp.load_latest(task)
    products = state._base.control.products
    names = [name for name, value in products.items() if holds in pickle.dumps(value)]
    for name in names:
        del products[name]
    if names:
        cp.save(state)
    return len(names)


# -- one thing each, on an open checkpointer or by the URL of a store


def change_object(where: Any, task: str, name: bytes, data: bytes | None) -> None:
    """Give an object other bytes, or take it away."""
    of = _of(where)
    if isinstance(of, MemoryStore):
        objects = of._shared.tasks[task].objects
        if data is None:
            del objects[name]
        else:
            objects[name] = objects[name]._replace(data=data)
    elif raw.kind_of(of) in HASHED:
        field = b"o:" + name

        def change(old: bytes) -> bytes | None:
            return None if data is None else old[: 4 + int.from_bytes(old[:4])] + data + old[-layout.STAMP :]

        _field(of, task, field, change)
    elif data is None:
        _sql(of, "DELETE FROM {s}sp_objects WHERE name = {name} AND task = {task}", task, name=name)
    else:
        _sql(of, "UPDATE {s}sp_objects SET data = {data} WHERE name = {name} AND task = {task}", task, name=name, data=data)


def change_checkpoint(where: Any, task: str, seq: int, **values: Any) -> None:
    """Give the row of a checkpoint other values."""
    of = _of(where)
    if isinstance(of, MemoryStore):
        rows = of._shared.tasks[task].checkpoints
        rows[seq] = replace(rows[seq], **values)
    elif raw.kind_of(of) in HASHED:
        _field(of, task, b"h:%d" % seq, lambda old: _array(old, layout.HEADER, values))
    else:
        _sql(
            of, f"UPDATE {{s}}sp_checkpoints SET {_set(values)} WHERE seq = {{at}} AND task = {{task}}", task, at=seq, **values
        )


def lengthen_root(where: Any, task: str, seq: int) -> None:
    """A byte more in what is stored of a checkpoint."""
    of = _of(where)
    if isinstance(of, MemoryStore):
        rows = of._shared.tasks[task].checkpoints
        rows[seq] = replace(rows[seq], root=rows[seq].root + b"\0")
    elif raw.kind_of(of) in HASHED:
        _field(of, task, b"r:%d" % seq, lambda old: old + b"\0")
    else:
        longer = "CAST(root || x'00' AS BLOB)" if raw.kind_of(of) == "sqlite" else r"root || '\x00'::bytea"
        _sql(of, f"UPDATE {{s}}sp_checkpoints SET root = {longer} WHERE seq = {{at}} AND task = {{task}}", task, at=seq)


def change_call(where: Any, task: str, no: int, **values: Any) -> None:
    """Give the row of a call other values."""
    of = _of(where)
    if isinstance(of, MemoryStore):
        rows = of._shared.tasks[task].calls
        rows[no] = replace(rows[no], **values)
    elif raw.kind_of(of) in HASHED:
        _field(of, task, b"c:%d" % no, lambda old: _array(old, layout.CALL, values))
    else:
        _sql(of, f"UPDATE {{s}}sp_calls SET {_set(values)} WHERE no = {{at}} AND task = {{task}}", task, at=no, **values)


def drop_calls(where: Any, task: str, tool: str) -> int:
    """Take all calls of a tool away, and with them their traces: as if they had never been. Returns how many."""
    of = _of(where)
    numbers = [call["no"] for call in raw.calls(of, task) if call["tool"] == tool]
    for no in numbers:
        if raw.kind_of(of) in HASHED:
            _field(of, task, b"c:%d" % no, lambda old: None)
            _field(of, task, b"g:%d" % (no // 60), lambda old, bit=1 << no % 60: b"%d" % (int(old) & ~bit))  # type: ignore[misc]
        else:
            _sql(of, "DELETE FROM {s}sp_calls WHERE no = {at} AND task = {task}", task, at=no)
    return len(numbers)


def _of(where: Any) -> Any:
    """A store in memory, or the path or URL of one elsewhere."""
    store = getattr(where, "store", where)
    return store if isinstance(store, MemoryStore) else getattr(store, "url", store)


# -- tables


def _set(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} = {{{name}}}" for name in values)


def _sql(url: str, sql: str, task: str, **values: Any) -> None:
    """Run a statement whose values stand in braces; {task} is the number of the task."""
    # Literals: what they hold is ours, and both dialects then take the same statement.
    if raw.kind_of(url) == "postgres":
        import psycopg

        base, schema = rawrows.split_postgres(url)
        given = {name: rf"'\x{v.hex()}'::bytea" if isinstance(v, bytes) else _plain(v) for name, v in values.items()}
        number = f"(SELECT n FROM \"{schema}\".sp_tasks WHERE task = '{task}')"
        with psycopg.connect(base) as there:
            changed = there.execute(sql.format(s=f'"{schema}".', task=number, **given).encode()).rowcount
    else:
        given = {name: f"X'{v.hex()}'" if isinstance(v, bytes) else _plain(v) for name, v in values.items()}
        number = f"(SELECT n FROM sp_tasks WHERE task = '{task}')"
        done = subprocess.run(
            [sys.executable, "-c", _SQLITE, raw.path_of(url), sql.format(s="", task=number, **given)],
            check=True,
            capture_output=True,
            text=True,
        )
        changed = int(done.stdout)
    assert changed == 1, f"{changed} rows were changed by {sql}"


_SQLITE = (
    "import apsw, sys; c = apsw.Connection(sys.argv[1]); c.set_busy_timeout(10000); c.execute(sys.argv[2]); print(c.changes())"
)


def _plain(value: Any) -> str:
    return "NULL" if value is None else str(value) if isinstance(value, int) else f"'{value}'"


# -- hashes

HASHED = ("redis", "cluster")


def _array(old: bytes, names: tuple[str, ...], values: dict[str, Any]) -> bytes:
    row = msgspec.msgpack.decode(old)
    for name, value in values.items():
        row[names.index(name)] = value
    return msgspec.msgpack.encode(row)


def _field(url: str, task: str, field: bytes, change: Callable[[bytes], bytes | None]) -> None:
    key = raw.key_of(url, task)
    with rawrows.redis_client(url) as client:
        old = client.hget(key, field)
        assert old is not None, f"{field!r} is not there"
        new = change(old)
        if new is None:
            client.hdel(key, field)
        else:
            client.hset(key, field, new)

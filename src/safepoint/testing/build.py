"""Short ways to make rows and commits, and to see all that a store holds."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from safepoint.model import Obj, new_id
from safepoint.rows import (
    CallRow,
    CallWrite,
    CheckpointRow,
    Commit,
    Committed,
    Guard,
    Head,
    PauseRow,
    PauseWrite,
    WriteRow,
    replace,
)
from safepoint.stores.base import Store

__all__ = [
    "EVERY_BYTE",
    "SPACES",
    "Writer",
    "call_row",
    "checkpoint_row",
    "dump",
    "flat",
    "needs_chunks",
    "obj",
    "pause_row",
    "reached",
    "refs_of",
    "tree",
    "write_row",
]

SPACES = ("", "ns")
EVERY_BYTE = bytes(range(256))


def refs_of(objects: Iterable[Obj]) -> bytes:
    return b"".join(o.name for o in objects)


def obj(data: bytes, *children: Obj) -> Obj:
    refs = refs_of(children)
    return Obj(hashlib.sha256(refs + b"|" + data).digest()[:16], refs, data)


def tree(text: str) -> list[Obj]:
    """A page over two leaves: what a small state looks like to a store. The page, which is the way in, comes first."""
    leaves = [obj(f"{text}/{i}".encode()) for i in range(2)]
    return [obj(f"{text}/page".encode(), *leaves), *leaves]


def flat(row: Any) -> Any:
    """The row as a store is given it that keeps no objects: what it refers to is in it."""
    names = [name for name in ("refs", "args_refs", "result_refs") if getattr(row, name, b"")]
    return replace(row, **dict.fromkeys(names, b"")) if names else row


def reached(store: Store, objects: Iterable[Obj]) -> dict[bytes, Obj]:
    """What a store hands out of these objects: all, or none if it keeps none."""
    return {o.name: o for o in objects} if store.chunked else {}


def needs_chunks(store: Store) -> None:
    if not store.chunked:
        pytest.skip("chunked is False")


def checkpoint_row(id: str | None = None, top: Sequence[Obj] = (), **fields: Any) -> CheckpointRow:
    """A row whose root reaches ``top`` (and what those reach)."""
    refs = refs_of(top)
    root = fields.pop("root", b"root:" + refs)
    given: dict[str, Any] = {
        "id": id or new_id(),
        "step": 0,
        "kind": "step",
        "created_at": 1_700_000_000_000_000,
        "format": 1,
        "schema": 1,
        "size": len(root),
        "digest": hashlib.sha256(root).digest()[:16],
        "root": root,
        "refs": refs,
    }
    return CheckpointRow(**{**given, **fields})


def call_row(base_seq: int, **fields: Any) -> CallRow:
    given: dict[str, Any] = {
        "line": 1,
        "step": 0,
        "ident": b"i" * 16,
        "tool": "send",
        "effect": "write",
        "idempotency_key": new_id(),
        "status": "started",
        "base_seq": base_seq,
        "started_at": 5,
    }
    return CallRow(**{**given, **fields})


def pause_row(base_seq: int, **fields: Any) -> PauseRow:
    given: dict[str, Any] = {"line": 1, "step": 0, "name": "approve", "base_seq": base_seq, "question": b"?", "asked_at": 5}
    return PauseRow(**{**given, **fields})


def write_row(checkpoint: str, top: Sequence[Obj] = (), *, writer: str = "w", idx: int = 0, **fields: Any) -> WriteRow:
    """A row whose root reaches ``top``."""
    refs = refs_of(top)
    return WriteRow(checkpoint=checkpoint, writer=writer, idx=idx, **{"data": b"data:" + refs, "refs": refs, **fields})


class Writer:
    """Writes one commit after the other on one branch, and remembers where that stands."""

    def __init__(
        self,
        store: Store,
        task: str = "task",
        *,
        branch: str = "main",
        space: str = "",
        guard: Guard | None = None,
        head: Head | None = None,
    ) -> None:
        self.store = store
        self.task = task
        self.branch = branch
        self.space = space
        self.guard = guard
        self.head = head

    def commit(self, *top: Obj, objects: Iterable[Obj] | None = None, row: Any = None, **fields: Any) -> Commit:
        """The next checkpoint's commit, not sent. ``top`` is what its root points at, ``objects`` what is sent (``top``)."""
        row = dict(row or {})
        row.setdefault("parent_seq", None if self.head is None else self.head.seq)
        new = checkpoint_row(row.pop("id", None), top, branch=self.branch, space=self.space, **row)
        given: dict[str, Any] = {"guard": self.guard, "expect": self.head}
        sent = tuple(top if objects is None else objects)
        if not self.store.chunked:
            new, sent = flat(new), ()
        return Commit(task=self.task, id=new.id, checkpoint=new, objects=sent, **{**given, **fields})

    def save(self, *top: Obj, objects: Iterable[Obj] | None = None, row: Any = None, **fields: Any) -> Committed:
        done = self.store.commit(self.commit(*top, objects=objects, row=row, **fields))
        self.head = done.head
        return done

    def leaf(self, *top: Obj) -> Committed:
        return self.store.commit(self.commit(*top, row={"kind": "failure"}, moves_head=False))

    def write(self, *rows: CallRow | PauseRow, stamp: str = "", **fields: Any) -> Committed:
        """A commit of journal rows alone."""
        calls = tuple(CallWrite(r, stamp or ("began" if r.version == 0 else "")) for r in rows if isinstance(r, CallRow))
        pauses = tuple(PauseWrite(r) for r in rows if isinstance(r, PauseRow))
        given = {"guard": self.guard, "calls": calls, "pauses": pauses}
        if not self.store.chunked:
            fields.pop("objects", None)
            given["calls"] = tuple(replace(write, row=flat(write.row)) for write in calls)
        return self.store.commit(Commit(task=self.task, id=new_id(), **{**given, **fields}))

    def record(self, *rows: WriteRow, objects: Iterable[Obj] = (), **fields: Any) -> Committed:
        """A commit of an adapter's writes alone."""
        if not self.store.chunked:
            rows, objects = tuple(flat(row) for row in rows), ()
        given: dict[str, Any] = {"id": new_id(), "guard": self.guard, "writes": rows, "objects": tuple(objects)}
        return self.store.commit(Commit(task=self.task, **{**given, **fields}))

    def call(self, base_seq: int | None = None, **fields: Any) -> CallRow:
        """Record an intent of step 0 (or another) that stands on the head, or on ``base_seq``."""
        base = base_seq if base_seq is not None else self.seq
        return self.write(call_row(base, **fields)).calls[0]

    def pause(self, base_seq: int | None = None, **fields: Any) -> PauseRow:
        return self.write(pause_row(base_seq if base_seq is not None else self.seq, **fields)).pauses[0]

    def settle(self, row: CallRow, **fields: Any) -> CallRow:
        changes: dict[str, Any] = {"status": "succeeded", "result": b"done", "finished_at": 9, **fields}
        return self.write(replace(row, **changes), stamp="ended").calls[0]

    @property
    def seq(self) -> int:
        assert self.head is not None, "nothing has been saved yet"
        return self.head.seq


def dump(store: Store, tasks: Iterable[str] | None = None, spaces: Iterable[str] = SPACES) -> dict[str, Any]:
    """All that a store shows of its tasks. Two equal dumps mean that nothing in between has left a trace."""
    names = [row.task for row in store.tasks(limit=10_000)] if tasks is None else list(tasks)
    seen: dict[str, Any] = {"tasks": names}
    for name in names:
        headers = {space: store.headers(name, space=space) for space in spaces}
        calls, bodies = store.calls(name)
        lease = store.lease(name)
        seen[name] = {
            "row": store.task(name),
            "branches": {space: store.branches(name, space) for space in spaces},
            "headers": headers,
            "checkpoints": [_read(store, name, space, row.seq) for space in spaces for row in headers[space]],
            "calls": (calls, dict(bodies)),
            "pauses": store.pauses(name),
            "writes": [store.writes(name, space=space) for space in spaces],
            "lease": lease and replace(lease, until=None),  # its holder renews it at any time
        }
    return seen


def _read(store: Store, task: str, space: str, seq: int) -> Any:
    found = store.read(task, space=space, seq=seq)
    assert found is not None, f"{task}@{seq} is listed and cannot be read"
    row, objects = found
    row.check(task, f"checkpoint {seq}")
    return row, dict(objects)

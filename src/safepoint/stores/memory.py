"""Checkpoints in dicts under one lock: for tests, prototypes, and as the plainest reading of the contract.

Rows are frozen and hold only bytes, text and numbers, so keeping and handing out the very same objects isolates the store
from its callers. Everything that can be refused is found out before the first dict is touched: that is the whole of the
atomicity here.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from safepoint.codec.nodes import names_in
from safepoint.errors import UsageError
from safepoint.model import Finding, Obj, check_id
from safepoint.rows import (
    BranchRow,
    CallRow,
    CheckpointRow,
    Commit,
    Committed,
    Grant,
    Guard,
    Head,
    LeaseRow,
    PauseRow,
    Pruned,
    TaskPatch,
    TaskRow,
    WriteRow,
    replace,
)
from safepoint.stores import folding, refusals
from safepoint.stores import holder as people
from safepoint.stores.base import Store
from safepoint.stores.memory_whole import Whole
from safepoint.stores.sound import unreadable

__all__ = ["MemoryStore"]


@dataclass(slots=True)
class _Task:
    row: TaskRow
    checkpoints: dict[int, CheckpointRow] = field(default_factory=dict)  # by rising seq: dicts keep their order
    ids: dict[tuple[str, str], int] = field(default_factory=dict)
    branches: dict[tuple[str, str], BranchRow] = field(default_factory=dict)
    calls: dict[int, CallRow] = field(default_factory=dict)
    pauses: dict[int, PauseRow] = field(default_factory=dict)
    writes: dict[tuple[str, str, str, int], WriteRow] = field(default_factory=dict)
    objects: dict[bytes, Obj] = field(default_factory=dict)
    lease: LeaseRow | None = None
    # The last number given out of each kind. They outlive the rows, so that no number comes a second time.
    seq: int = 0
    no: int = 0
    pause_no: int = 0
    position: int = 0
    line: int = 0
    last: tuple[str, Committed] | None = None
    """The newest commit and what it was answered, to know it when it comes again."""


class _Data:
    """What all handles of one ``memory://name`` share."""

    def __init__(self) -> None:
        # Re-entrant, because a collected run may call `abandon` from a finalizer in the middle of any other verb.
        self.lock = threading.RLock()
        self.tasks: dict[str, _Task] = {}
        self.live: set[int] = set()
        """Ids of the leases whose holders have neither released nor abandoned them."""
        self.lease_id = 0
        self.quarantine: list[Any] = []
        self.fence = 0
        """The highest that a deleted task had."""
        _all.add(self)


_all: weakref.WeakSet[_Data] = weakref.WeakSet()
_named: weakref.WeakValueDictionary[str, _Data] = weakref.WeakValueDictionary()
_named_lock = threading.RLock()


class MemoryStore(Whole, Store):
    """Everything is gone when the store is closed; with a name, when its last handle in this process is.

    A forked child goes on with a copy of its own, in which the parent's runs hold nothing.
    """

    persistent = False

    def __init__(self, name: str | None = None) -> None:
        self.url = f"memory://{name or ''}"
        self.timeout = 10.0
        self.durability = "process"  # nothing here survives power loss, and nothing claims to
        self._own: set[int] = set()
        if name is None:
            self._shared: _Data | None = _Data()
        else:
            with _named_lock:
                data = _named.get(name)
                if data is None:
                    data = _named[name] = _Data()
                self._shared = data

    @property
    def _data(self) -> _Data:
        data = self._shared
        if data is None:
            raise UsageError(f"the store {self.url} is closed", "", "Open it again.")
        return data

    @contextmanager
    def _locked(self, task: str) -> Iterator[tuple[_Data, _Task | None]]:
        data = self._data
        with data.lock:
            yield data, data.tasks.get(task)

    def _begun(self, row: TaskRow) -> _Task:
        return _Task(row)

    def _refuse(self, data: _Data, task: _Task) -> None:
        _refuse_if_held(data, task)

    def _shown(self, task: _Task) -> TaskRow:
        return _task_row(task)

    # -- writing

    def commit(self, commit: Commit) -> Committed:
        check_id(commit.task)
        new = commit.checkpoint
        with self._locked(commit.task) as (data, task):
            if task is not None and new is not None and (there := task.ids.get((new.space, commit.id))) is not None:
                row, at = task.checkpoints[there], task.branches.get((new.space, new.branch))
                head = None if at is None else at.head
                return refusals.existing(commit, head, there, row.branch, row.parent_seq, row.digest)
            if task is None:
                if (new is None and not commit.writes) or commit.guard is not None:
                    raise refusals.no_task(commit.task)
                task = _Task(TaskRow(task=commit.task, created_at=_now()))
            if commit.guard is not None:
                if not _matches(data, task, commit.guard):
                    live = task.lease if task.lease is not None and task.lease.state == "held" else None
                    raise refusals.lost(commit.task, commit.guard, None if live is None else live.fence)
            elif not commit.anyway:
                _refuse_if_held(data, task)
            if new is None and task.last is not None and task.last[0] == commit.id:
                return replace(task.last[1], existed=True, bytes_written=0)
            return _write(data, task, commit)

    # -- reading

    def task(self, task: str) -> TaskRow | None:
        with self._locked(task) as (_data, found):
            return None if found is None else _task_row(found)

    def tasks(self, *, after: str | None = None, limit: int = 200) -> list[TaskRow]:
        data = self._data
        with data.lock:
            names = sorted(name for name in data.tasks if after is None or name > after)
            return [_task_row(data.tasks[name]) for name in names[:limit]]

    def branches(self, task: str, space: str | None = "") -> list[BranchRow]:
        with self._locked(task) as (_data, found):
            return [] if found is None else folding.branches_of(found.branches, space)

    def read(
        self, task: str, *, space: str = "", seq: int | None = None, branch: str | None = None, id: str | None = None
    ) -> tuple[CheckpointRow, Mapping[bytes, Obj]] | None:
        with self._locked(task) as (_data, found):
            if found is None:
                return None
            if id is not None:
                seq = found.ids.get((space, id))
            elif seq is None:
                at = found.branches.get((space, found.row.branch if branch is None else branch))
                seq = None if at is None else at.head.seq
            row = None if seq is None else found.checkpoints.get(seq)
            if row is None or row.space != space:
                return None
            return row, _closure(found, [row.refs])

    def headers(
        self,
        task: str,
        *,
        space: str | None = "",
        branch: str | None = None,
        before: int | None = None,
        limit: int | None = None,
        roots: bool = False,
    ) -> list[CheckpointRow]:
        with self._locked(task) as (_data, found):
            rows = [] if found is None else folding.listed(found.checkpoints, space, branch, before, limit)
            return rows if roots else [replace(row, root=b"", refs=b"") for row in rows]

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
        wanted = None if nos is None else set(nos)
        with self._locked(task) as (_data, found):
            if found is None:
                return [], {}
            rows = folding.chosen(found.calls, line, from_step, wanted, limit)
            return rows, _closure(found, _call_refs(rows)) if bodies else {}

    def pauses(self, task: str) -> list[PauseRow]:
        with self._locked(task) as (_data, found):
            return [] if found is None else list(found.pauses.values())

    def writes(
        self,
        task: str,
        *,
        space: str | None = "",
        checkpoints: Iterable[str] | None = None,
        writer: str | None = None,
        bodies: bool = True,
    ) -> tuple[list[WriteRow], Mapping[bytes, Obj]]:
        wanted = None if checkpoints is None else set(checkpoints)
        with self._locked(task) as (_data, found):
            if found is None:
                return [], {}
            rows = folding.written(found.writes.values(), space, wanted, writer)
            return rows, _closure(found, [row.refs for row in rows]) if bodies else {}

    # -- leases

    def acquire(self, task: str, holder: bytes, *, steal: bool = False) -> Grant:
        check_id(task)
        with self._locked(task) as (data, found):
            if found is None:
                found = _Task(TaskRow(task=task, created_at=_now()))
            last = found.lease
            if not steal:
                _refuse_if_held(data, found)
            presumed = last.presumed if last is not None else 0
            if last is None:
                previous = ""
            elif last.state == "released":
                previous = "released"
            elif last.lease_id in data.live:
                previous, presumed = "presumed_dead", last.fence
                data.live.discard(last.lease_id)
            else:
                previous = "dead"
            data.lease_id += 1
            guard = Guard((last.fence if last is not None else data.fence) + 1, secrets.token_hex(16))
            found.lease = LeaseRow(
                task=task,
                fence=guard.fence,
                token=guard.token,
                lease_id=data.lease_id,
                state="held",
                holder=bytes(holder),
                acquired_at=_now(),
                presumed=presumed,
            )
            found.row = replace(found.row, status="running", attempts=found.row.attempts + 1, updated_at=_now())
            data.live.add(data.lease_id)
            self._own.add(data.lease_id)
            data.tasks[task] = found
            return Grant(guard, previous, presumed, data.lease_id)

    def release(self, task: str, grant: Grant, patch: TaskPatch | None = None) -> None:
        with self._locked(task) as (data, found):
            if found is not None and found.lease is not None and _matches(data, found, grant.guard):
                data.live.discard(found.lease.lease_id)
                self._own.discard(found.lease.lease_id)
                found.lease = replace(found.lease, state="released")
                found.row = replace(folding.patched(found.row, patch), updated_at=_now())

    def abandon(self, task: str, grant: Grant) -> None:
        data = self._shared
        if data is not None:
            with data.lock:
                data.live.discard(grant.handle)
                self._own.discard(grant.handle)

    def lease(self, task: str) -> LeaseRow | None:
        with self._locked(task) as (data, found):
            if found is None or found.lease is None:
                return None
            return replace(found.lease, live=_held(data, found))

    def holds(self, task: str, guard: Guard) -> bool:
        with self._locked(task) as (data, found):
            return found is not None and _matches(data, found, guard)

    # -- removing

    def unreadable(self, task: str, seqs: Iterable[int], *, space: str = "", sound: set[bytes] | None = None) -> dict[int, str]:
        with self._locked(task) as (_data, found):
            if found is None:
                return {}
            rows = [r for seq in seqs if (r := found.checkpoints.get(seq)) is not None and r.space == space]
            return unreadable(task, rows, lambda names: [o for n in names if (o := found.objects.get(n)) is not None], sound)

    def prune(self, task: str, seqs: Iterable[int], *, space: str = "", dry_run: bool = False, sweep: bool = True) -> Pruned:
        wanted = set(seqs)
        with self._locked(task) as (data, found):
            if found is None:
                return Pruned((), 0, 0, 0)
            kept = _needed(data, found)
            gone = [r for r in found.checkpoints.values() if r.seq in wanted and r.space == space and r.seq not in kept]
            bases = {r.seq for r in gone}
            calls = [c for c in found.calls.values() if c.base_seq in bases]
            pauses = [p for p in found.pauses.values() if p.base_seq in bases]
            roots = [r.refs for r in found.checkpoints.values() if r.seq not in bases]
            roots += _call_refs(c for c in found.calls.values() if c.base_seq not in bases)
            ids = {r.id for r in gone}
            writes = [w for w in found.writes.values() if w.space == space and w.checkpoint in ids]
            roots += [w.refs for w in found.writes.values() if w.space != space or w.checkpoint not in ids]
            live = _closure(found, roots)
            objects = [o for o in found.objects.values() if o.name not in live] if sweep else []
            size = sum(map(_row_bytes, (*gone, *calls, *pauses, *writes))) + sum(map(_obj_bytes, objects))
            if not dry_run:
                for row in gone:
                    del found.checkpoints[row.seq], found.ids[row.space, row.id]
                for call in calls:
                    del found.calls[call.no]
                for pause in pauses:
                    del found.pauses[pause.no]
                for write in writes:
                    del found.writes[write.key]
                for obj in objects:
                    del found.objects[obj.name]
            return Pruned(tuple(r.seq for r in gone), len(calls), len(objects), size)

    def pin(self, task: str, seq: int, pinned: bool, *, space: str = "") -> bool:
        with self._locked(task) as (_data, found):
            row = None if found is None else found.checkpoints.get(seq)
            if found is None or row is None or row.space != space:
                return False
            found.checkpoints[seq] = replace(row, pinned=pinned)
            return True

    def delete_task(self, task: str) -> bool:
        with self._locked(task) as (data, found):
            if found is None:
                return False
            _refuse_if_held(data, found)
            if found.lease is not None:
                data.fence = max(data.fence, found.lease.fence)
            del data.tasks[task]
            return True

    # -- the store itself

    def check(self) -> list[Finding]:
        data = self._data
        with data.lock:
            text = f"{len(data.tasks)} tasks in memory, which end with this process"
        return [Finding("persistence", "warning", text, "Use sqlite:///agent.db to keep them.")]

    def close(self) -> None:
        data, self._shared = self._shared, None
        if data is not None:
            with data.lock:
                # What a closed handle held is free, as after a death: nobody is left who could release it.
                data.live -= self._own
                self._own.clear()


# -- one commit


def _write(data: _Data, task: _Task, commit: Commit) -> Committed:
    new = commit.checkpoint
    at = None
    if new is not None:
        at = task.branches.get((new.space, new.branch))
        head = None if at is None else at.head
        if head != commit.expect:
            raise refusals.moved(commit, head)
    if commit.at_head:
        current = task.branches.get(("", task.row.branch))
        head = None if current is None else current.head
        if head != commit.stands_on:
            raise refusals.not_at_head(commit, task.row.branch, head)
    if (on := commit.stands_on) is not None:
        base = task.checkpoints.get(on.seq)
        if base is None or base.id != on.id:
            raise refusals.gone(commit.task, on)
    calls, pauses, no, position, pause_no = folding.numbered(
        commit, task.calls, task.pauses, task.no, task.position, task.pause_no
    )
    moves = folding.moved(commit, folding.patched(task.row, commit.patch).branch, task.branches, task.checkpoints)
    writes = folding.wrote(commit, task.writes)
    objects = [Obj(bytes(o.name), bytes(o.refs), bytes(o.data)) for o in commit.objects]
    sealed: CheckpointRow | None = None
    if new is not None:
        sealed = replace(new, id=commit.id, seq=task.seq + 1).sealed(commit.task)
    row_of_task = task.row
    if new is not None and commit.moves_head and new.space == "" and not any(space == "" for space, _ in task.branches):
        row_of_task = replace(row_of_task, branch=new.branch)  # a task's first branch is its current one
    patched = replace(folding.patched(row_of_task, commit.patch), updated_at=_now())

    # From here on nothing can fail.
    task.no, task.position, task.pause_no = no, position, pause_no
    task.calls.update(calls)
    task.pauses.update(pauses)
    task.writes.update((w.key, w) for w in writes)
    for place, branch in moves.items():
        if branch is None:
            del task.branches[place]
        else:
            task.branches[place] = branch
    task.objects.update((o.name, o) for o in objects)
    head = None
    if sealed is not None:
        task.seq = sealed.seq
        task.checkpoints[sealed.seq] = sealed
        task.ids[sealed.space, sealed.id] = sealed.seq
        if commit.moves_head:
            head = Head(sealed.seq, sealed.id)
            if at is None:
                line = commit.line if commit.line is not None else task.line + 1
                task.line = max(task.line, line)
                at = BranchRow(sealed.space, sealed.branch, head, line, sealed.parent_seq)
            task.branches[sealed.space, sealed.branch] = replace(at, head=head)
        else:
            head = commit.expect
    task.row = patched
    data.tasks[commit.task] = task
    rows: list[CheckpointRow | CallRow | PauseRow | WriteRow] = [*calls.values(), *pauses.values(), *writes]
    size = sum(map(_row_bytes, rows if sealed is None else [sealed, *rows])) + sum(map(_obj_bytes, objects))
    done = Committed(None if sealed is None else sealed.seq, head, False, tuple(calls.values()), tuple(pauses.values()), size)
    task.last = (commit.id, done)
    return done


# -- what is reached, and what is still needed


def _closure(task: _Task, roots: Iterable[bytes]) -> dict[bytes, Obj]:
    found: dict[bytes, Obj] = {}
    todo = list(roots)
    while todo:
        for name in names_in(todo.pop()):
            if name not in found and (obj := task.objects.get(name)) is not None:
                found[name] = obj
                todo.append(obj.refs)
    return found


def _call_refs(rows: Iterable[CallRow]) -> list[bytes]:
    return [refs for row in rows for refs in (row.args_refs, row.result_refs) if refs]


def _needed(data: _Data, task: _Task) -> set[int]:
    live = task.lease.fence if task.lease is not None and _held(data, task) else None
    return folding.needed(task.row.branch, task.branches, task.checkpoints, task.calls, task.pauses, live)


def _row_bytes(row: Any) -> int:
    return sum(len(v) for f in row.__struct_fields__ if isinstance(v := getattr(row, f), (bytes, str)))


def _obj_bytes(obj: Obj) -> int:
    return len(obj.name) + len(obj.refs) + len(obj.data)


def _task_row(task: _Task) -> TaskRow:
    return folding.task_row(task.row, task.branches, task.checkpoints, task.calls, task.pauses)


# -- leases


def _held(data: _Data, task: _Task) -> bool:
    return task.lease is not None and task.lease.state == "held" and task.lease.lease_id in data.live


def _matches(data: _Data, task: _Task, guard: Guard) -> bool:
    return _held(data, task) and task.lease is not None and (task.lease.fence, task.lease.token) == guard


def _refuse_if_held(data: _Data, task: _Task) -> None:
    if _held(data, task) and task.lease is not None:
        raise people.lease_held(task.row.task, task.lease.holder, task.lease.acquired_at)


def _now() -> int:
    return time.time_ns() // 1000


# -- fork: no child may be born with a lock that a thread of its parent holds, or with half of a commit

_forking = threading.local()


def _before_fork() -> None:
    _named_lock.acquire()
    _forking.data = list(_all)
    for data in _forking.data:
        data.lock.acquire()


def _after_fork_in_parent() -> None:
    for data in _forking.__dict__.pop("data", ()):
        data.lock.release()
    _named_lock.release()


def _after_fork_in_child() -> None:
    for data in _forking.__dict__.get("data", ()):
        data.live.clear()
    _after_fork_in_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)

"""Removing: retention, whole tasks, and what dead processes left behind.

Mark and delete are one write transaction, and its lock is taken before the first root is read: a save that leaves out what
its parent reaches either came before (its roots are seen) or comes after (it finds its parent gone). A mark made earlier
than the lock, and not made good under it, broke one save in four.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import apsw

from safepoint import _probe
from safepoint.errors import Damaged, SafepointError, Unavailable
from safepoint.model import Obj
from safepoint.rows import CheckpointRow, Pruned
from safepoint.rules import retention
from safepoint.stores import sqlite_bigsweep, sqlite_rows, sqlite_writes
from safepoint.stores.oslock import LockFile
from safepoint.stores.sound import Flaw, find, wrong
from safepoint.stores.sqlite_db import CommitFailed, Connection, Database, sql
from safepoint.stores.sqlite_rows import CHECKPOINT, all_plain, key, names, reads, size_of
from safepoint.stores.witness import Witness

__all__ = ["Removals", "delete_task", "drop_dead_stages", "drop_task", "pin", "prune"]

LARGE = 5_000
"""Rows and objects of a task that are looked at and swept in one transaction; more take many, see ``sqlite_bigsweep``."""

_TABLES = ("checkpoints", "branches", "objects", "calls", "writes", "pauses", "leases", "outbox", "inputs")


_SOME = f"SELECT {', '.join(CHECKPOINT)} FROM sp_checkpoints WHERE k IN (SELECT ?1 << 32 | value FROM json_each(?2))"


class _DryRun(Exception):
    """Takes a rehearsal out of its transaction, which is rolled back."""


class Removals:
    """Needs ``_db`` and ``_locks`` from the store."""

    _db: Database
    _locks: LockFile

    def prune(self, task: str, seqs: Iterable[int], *, space: str = "", dry_run: bool = False, sweep: bool = True) -> Pruned:
        return prune(self._db, self._locks, task, seqs, space, dry_run=dry_run, sweep=sweep)

    def pruning(self, task: str, seqs: Iterable[int], *, space: str = "", sweep: bool = True) -> Iterator[None]:
        return _pruning(self._db, self._locks, task, seqs, space, sweep)

    def live_objects(self, task: str) -> int:
        with self._db.reading() as conn:
            return int(conn.rows(sql("sqlite_sweep")["live_objects"], (task,))[0][0])

    def unreadable(self, task: str, seqs: Iterable[int], *, space: str = "", sound: set[bytes] | None = None) -> dict[int, str]:
        with self._db.reading() as conn:
            at = conn.rows(reads()["number"], (task,))
        if not at:
            return {}
        n = at[0][0]
        bad: dict[int, Flaw] = {}
        rows = _checkpoints(self._db, n, seqs, space, bad)
        bad |= find(task, rows, lambda wanted: _objects(self._db, n, wanted), sound)
        return self._confirmed(n, bad) if bad else {}

    def _confirmed(self, n: int, bad: dict[int, Flaw]) -> dict[int, str]:
        """Those that are still there, in one look with what they lack: another sweep may have taken them meanwhile."""
        wanted = json.dumps(sorted(bad))
        with self._db.reading() as conn:
            there = {seq for (seq,) in conn.rows(sql("sqlite_sweep")["there"], (n, wanted))}
            lost: dict[bytes, str] = {}
            for name in {flaw.name for flaw in bad.values() if flaw.name is not None}:
                try:
                    rows = conn.rows(reads()["level"], (name, n, 1))
                except apsw.CorruptError:
                    rows = []
                lost[name] = wrong(name, Obj(*rows[0]) if rows else None)
        return {seq: flaw.why for seq, flaw in bad.items() if seq in there and (flaw.name is None or lost[flaw.name])}

    def pin(self, task: str, seq: int, pinned: bool, *, space: str = "") -> bool:
        return pin(self._db, task, seq, pinned, space)


def _checkpoints(db: Database, n: int, seqs: Iterable[int], space: str, bad: dict[int, Flaw]) -> Iterator[CheckpointRow]:
    """The rows of these numbers; those on pages that cannot be read are put into ``bad``."""
    wanted = sorted(seqs)
    for i in range(0, len(wanted), 200):
        for row in _some(db, n, wanted[i : i + 200], bad):
            if row.space == space:
                yield row


def _some(db: Database, n: int, wanted: list[int], bad: dict[int, Flaw]) -> list[CheckpointRow]:
    try:
        with db.reading() as conn:
            return [sqlite_rows.checkpoint(row) for row in conn.rows(_SOME, (n, json.dumps(wanted)))]
    except Damaged as error:
        if len(wanted) == 1:
            bad[wanted[0]] = Flaw(error.why)
            return []
        middle = len(wanted) // 2
        return _some(db, n, wanted[:middle], bad) + _some(db, n, wanted[middle:], bad)


def _objects(db: Database, n: int, wanted: list[bytes]) -> list[Obj]:
    try:
        with db.reading() as conn:
            found = conn.rows(reads()["level"], (b"".join(wanted), n, len(wanted)))
        return [Obj(*row) for row in found if {value.__class__ for value in row} == {bytes}]
    except Damaged:
        if len(wanted) == 1:
            return []
        middle = len(wanted) // 2
        return _objects(db, n, wanted[:middle]) + _objects(db, n, wanted[middle:])


def prune(db: Database, locks: LockFile, task: str, seqs: Iterable[int], space: str, *, dry_run: bool, sweep: bool) -> Pruned:
    wanted = set(seqs)
    pruned = Pruned((), 0, 0, 0)
    n = _large(db, task)
    try:
        if n is not None:
            if not dry_run:
                with db.writing(False) as conn:
                    drop_dead_stages(conn, locks, n)
            return sqlite_bigsweep.prune(db, locks, n, wanted, space, dry_run=dry_run, sweep=sweep)
        with db.writing(False) as conn:
            at = conn.rows(reads()["number"], (task,))
            if at:
                pruned = _prune(conn, locks, at[0][0], wanted, space, sweep)
            if dry_run or not (pruned.seqs or pruned.calls or pruned.objects):
                raise _DryRun
            _probe.at("prune.before")
    except _DryRun:
        pass
    except CommitFailed as failed:
        raise _again("pruned", task, failed) from failed.cause
    _probe.at("prune.after")
    return pruned


def _pruning(db: Database, locks: LockFile, task: str, seqs: Iterable[int], space: str, sweep: bool) -> Iterator[None]:
    n = _large(db, task)
    if n is None:
        prune(db, locks, task, seqs, space, dry_run=False, sweep=sweep)
        yield
        return
    try:
        with db.writing(False) as conn:
            drop_dead_stages(conn, locks, n)
        yield from sqlite_bigsweep.pruning(db, locks, n, set(seqs), space, dry_run=False, sweep=sweep)
    except CommitFailed as failed:
        raise _again("pruned", task, failed) from failed.cause


def _large(db: Database, task: str) -> int | None:
    """The number of a task that is too large to be pruned in one transaction."""
    with db.reading() as conn:
        at = conn.rows(reads()["number"], (task,))
        large = bool(at) and conn.rows(sql("sqlite_sweep")["amount"], (at[0][0], LARGE + 1))[0][0] > LARGE
    return at[0][0] if large else None


def _prune(conn: Connection, locks: LockFile, n: int, wanted: set[int], space: str, sweep: bool) -> Pruned:
    st = sql("sqlite_sweep")
    drop_dead_stages(conn, locks, n)
    checkpoints = conn.rows(st["checkpoints"], (n,))
    calls = sqlite_bigsweep.all_calls(conn, n)
    pauses = sqlite_bigsweep.all_pauses(conn, n)
    branches = sqlite_bigsweep.all_branches(conn, n)
    kept = {seq for row in branches for seq in row[:2]}
    kept.update(seq for seq, _, pinned, _, _, _ in checkpoints if pinned != 0)
    live = sqlite_bigsweep.live_fence(conn, locks, n)
    kept |= retention.stood_on([retention.At(*row[2:]) for row in branches], calls, pauses, live)
    gone = [row for row in checkpoints if row[0] in wanted and row[1] == space and row[0] not in kept]
    bases = {row[0] for row in gone}
    gone_calls = [row for row in calls if row.base_seq in bases]
    gone_pauses = [row for row in pauses if row.base_seq in bases]
    ids = {row[5] for row in gone}
    sqlite_writes.refuse_short(conn, n)
    writes = all_plain(_Write, conn.rows(st["writes"], (n,)))
    gone_writes = [row for row in writes if row.space == space and row.checkpoint in ids]

    garbage: list[_Object] = []
    if sweep:
        roots = [row[3] for row in checkpoints if row[0] not in bases]
        for base_seq, *refs in conn.rows(st["call_refs"], (n,)):
            if base_seq not in bases:
                roots += refs
        roots += [row.refs for row in writes if row.space != space or row.checkpoint not in ids]
        objects = all_plain(_Object, conn.rows(st["objects"], (n,)))
        staged = {k for (k,) in conn.rows("SELECT k FROM sp_stages WHERE n = ?", (n,))}
        garbage = _unreached(objects, roots, staged)
    _probe.at("prune.mark")

    conn.executemany(st["drop_checkpoint"], [(key(n, row[0]),) for row in gone])
    conn.executemany(st["drop_call"], [(key(n, row.no),) for row in gone_calls])
    conn.executemany(st["drop_pause"], [(key(n, row.no),) for row in gone_pauses])
    conn.executemany(st["drop_write"], [(row.k,) for row in gone_writes])
    conn.executemany(st["drop_object"], [(row[0],) for row in garbage])
    conn.execute(st["swept"], (n, len(gone)))
    size = sum(size_of(row[4]) for row in gone) + sum(row.size for row in gone_calls) + sum(row.size for row in gone_writes)
    size += sum(16 + size_of(row[4]) + len(row[2]) for row in garbage)
    return Pruned(tuple(row[0] for row in gone), len(gone_calls), len(garbage), size)


class _Write(NamedTuple):
    k: int
    space: str
    checkpoint: str
    refs: bytes
    size: int


class _Object(NamedTuple):
    k: int
    name: bytes
    refs: bytes
    stage: int | None
    size: int


def _unreached(objects: list[_Object], roots: list[bytes], staged: set[int]) -> list[_Object]:
    """Those (k, name, refs, stage, size) that neither a root nor an object of a save on its way reaches."""
    refs_of = {row[1]: row[2] for row in objects}
    if staged:
        roots += [row[1] + row[2] for row in objects if row[3] in staged]
    reached: set[bytes] = set()
    todo = names(set(roots))
    while todo:
        reached.update(todo)
        todo = [name for name in names({refs_of.get(name, b"") for name in todo}) if name not in reached]
    return [row for row in objects if row[1] not in reached]


def pin(db: Database, task: str, seq: int, pinned: bool, space: str) -> bool:
    try:
        with db.writing(True) as conn:
            at = conn.rows(reads()["number"], (task,))
            if not at:
                return False
            conn.execute(sql("sqlite_sweep")["pin"], (key(at[0][0], seq), int(pinned), space))
            return conn.changes() > 0
    except CommitFailed as failed:
        raise _again("pinned", task, failed) from failed.cause


def delete_task(
    db: Database,
    task: str,
    refuse_if_held: Callable[..., None],
    gone: Callable[[Connection, str], SafepointError],
    witness: Witness,
) -> bool:
    try:
        with db.writing(True) as conn:
            at = conn.rows(reads()["number"], (task,))
            if not at:
                if isinstance(error := gone(conn, task), Damaged):
                    raise error
                return False
            n = at[0][0]
            for fence, *lease in conn.rows(sql("sqlite_sweep")["lease"], (n,)):
                refuse_if_held(*lease)
                conn.execute(sql("sqlite_sweep")["raise_fence_floor"], (fence,))
            if (known := witness.read(db.name, n, task)) is not None:  # more than is here, if the file is an older one
                conn.execute(sql("sqlite_sweep")["raise_fence_floor"], (known.fence,))
            drop_task(conn, n)
            witness.clear(n)
            return True
    except CommitFailed as failed:
        raise _again("deleted", task, failed) from failed.cause


def drop_task(conn: Connection, n: int) -> None:
    """Delete every row of a task."""
    for table in _TABLES:
        conn.execute(f"DELETE FROM sp_{table} WHERE {_range(table)}", (n,))
    # A big save on its way to this task finds its stage gone, and sends everything again.
    conn.execute("DELETE FROM sp_stages WHERE n = ?", (n,))
    conn.execute(sql("sqlite_commit")["guarded"], (n,))
    conn.execute("DELETE FROM sp_tasks WHERE n = ?", (n,))


def _range(table: str) -> str:
    by_key = table in {"checkpoints", "calls", "pauses", "writes"}
    return "k BETWEEN ?1 << 32 AND ?1 << 32 | 4294967295" if by_key else "task = ?1"


def drop_dead_stages(conn: Connection, locks: LockFile, n: int | None = None) -> None:
    """Forget the big saves whose process died: their objects are garbage now, for the next sweep of their task.

    Where the task never came to be, there is no such sweep, so they go here.
    """
    for k, number, byte in conn.rows("SELECT k, n, byte FROM sp_stages WHERE ?1 IS NULL OR n = ?1", (n,)):
        if not locks.is_held(byte):
            conn.execute("DELETE FROM sp_stages WHERE k = ?", (k,))
            nobody = "NOT EXISTS (SELECT 1 FROM sp_tasks WHERE n = ?1) AND NOT EXISTS (SELECT 1 FROM sp_stages WHERE n = ?1)"
            for table in ("objects", "checkpoints", "calls", "pauses", "writes", "branches"):  # a whole task has all of these
                conn.execute(f"DELETE FROM sp_{table} WHERE {_range(table)} AND {nobody}", (number,))


def _again(done: str, task: str, failed: CommitFailed) -> Unavailable:
    return Unavailable(
        f"whether task {task!r} was {done} is not known",
        str(failed.cause),
        "Do it again; that is safe.",
        task=task,
        unknown=True,
    )

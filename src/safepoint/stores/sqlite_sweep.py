"""Removing: retention, whole tasks, and what dead processes left behind.

Mark and delete are one write transaction, and its lock is taken before the first root is read: a save that leaves out what
its parent reaches either came before (its roots are seen) or comes after (it finds its parent gone). A mark made earlier
than the lock broke one save in four.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from safepoint import _probe
from safepoint.errors import Damaged, SafepointError, Unavailable
from safepoint.rows import Pruned
from safepoint.rules import retention
from safepoint.stores.oslock import LockFile
from safepoint.stores.sqlite_db import CommitFailed, Connection, Database, sql
from safepoint.stores.sqlite_rows import key, names, reads
from safepoint.stores.witness import Witness

__all__ = ["delete_task", "drop_dead_stages", "pin", "prune"]

_TABLES = ("checkpoints", "branches", "objects", "calls", "writes", "pauses", "leases", "outbox", "inputs")


class _Call(NamedTuple):
    no: int
    base_seq: int
    line: int
    step: int
    status: str
    fence: int
    args_refs: bytes
    result_refs: bytes
    size: int


class _Pause(NamedTuple):
    no: int
    base_seq: int
    line: int
    step: int
    status: str


class _DryRun(Exception):
    """Takes a rehearsal out of its transaction, which is rolled back."""


def prune(db: Database, locks: LockFile, task: str, seqs: Iterable[int], space: str, dry_run: bool) -> Pruned:
    wanted = set(seqs)
    pruned = Pruned((), 0, 0, 0)
    try:
        with db.writing(False) as conn:
            at = conn.rows(reads()["number"], (task,))
            if at:
                pruned = _prune(conn, locks, at[0][0], wanted, space)
            if dry_run or not (pruned.seqs or pruned.calls or pruned.objects):
                raise _DryRun
            _probe.at("prune.before")
    except _DryRun:
        pass
    except CommitFailed as failed:
        raise _again("pruned", task, failed) from failed.cause
    _probe.at("prune.after")
    return pruned


def _prune(conn: Connection, locks: LockFile, n: int, wanted: set[int], space: str) -> Pruned:
    st = sql("sqlite_sweep")
    drop_dead_stages(conn, locks, n)
    checkpoints = conn.rows(st["checkpoints"], (n,))
    calls = [_Call._make(row) for row in conn.rows(st["calls"], (n,))]
    pauses = [_Pause._make(row) for row in conn.rows(st["pauses"], (n,))]
    branches = conn.rows(st["branches"], (n,))
    kept = {seq for row in branches for seq in row[:2]}
    kept.update(seq for seq, _, pinned, _, _ in checkpoints if pinned)
    lease = conn.rows("SELECT fence, lease_id, locks FROM sp_leases WHERE task = ? AND state = 'held'", (n,))
    live = lease[0][0] if lease and locks.is_held(*lease[0][1:]) is not False else None
    kept |= retention.stood_on([retention.At(*row[2:]) for row in branches], calls, pauses, live)
    gone = [row for row in checkpoints if row[0] in wanted and row[1] == space and row[0] not in kept]
    bases = {row[0] for row in gone}
    gone_calls = [row for row in calls if row.base_seq in bases]
    gone_pauses = [row for row in pauses if row.base_seq in bases]

    roots = [row[3] for row in checkpoints if row[0] not in bases]
    roots += [refs for row in calls if row.base_seq not in bases for refs in (row.args_refs, row.result_refs) if refs]
    objects = conn.rows(st["objects"], (n,))
    staged = {k for (k,) in conn.rows("SELECT k FROM sp_stages WHERE n = ?", (n,))}
    garbage = _unreached(objects, roots, staged)
    _probe.at("prune.mark")

    conn.executemany(st["drop_checkpoint"], [(key(n, row[0]),) for row in gone])
    conn.executemany(st["drop_call"], [(key(n, row.no),) for row in gone_calls])
    conn.executemany(st["drop_pause"], [(key(n, row.no),) for row in gone_pauses])
    conn.executemany(st["drop_object"], [(row[0],) for row in garbage])
    conn.execute(st["swept"], (n, len(gone)))
    size = sum(row[4] for row in gone) + sum(row.size for row in gone_calls)
    size += sum(16 + len(row[2]) + row[4] for row in garbage)
    return Pruned(tuple(row[0] for row in gone), len(gone_calls), len(garbage), size)


def _unreached(objects: list[tuple[Any, ...]], roots: list[bytes], staged: set[int]) -> list[tuple[Any, ...]]:
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
            for table in _TABLES:
                conn.execute(f"DELETE FROM sp_{table} WHERE {_range(table)}", (n,))
            # A big save on its way to this task finds its stage gone, and sends everything again.
            conn.execute("DELETE FROM sp_stages WHERE n = ?", (n,))
            conn.execute("DELETE FROM sp_tasks WHERE n = ?", (n,))
            witness.clear(n)
            return True
    except CommitFailed as failed:
        raise _again("deleted", task, failed) from failed.cause


def _range(table: str) -> str:
    by_key = table in {"checkpoints", "calls", "pauses"}
    return "k BETWEEN ?1 << 32 AND ?1 << 32 | 4294967295" if by_key else "task = ?1"


def drop_dead_stages(conn: Connection, locks: LockFile, n: int | None = None) -> None:
    """Forget the big saves whose process died: their objects are garbage now, for the next sweep of their task.

    Where the task never came to be, there is no such sweep, so they go here.
    """
    for k, number, byte in conn.rows("SELECT k, n, byte FROM sp_stages WHERE ?1 IS NULL OR n = ?1", (n,)):
        if not locks.is_held(byte):
            conn.execute("DELETE FROM sp_stages WHERE k = ?", (k,))
            nobody = "NOT EXISTS (SELECT 1 FROM sp_tasks WHERE n = ?1) AND NOT EXISTS (SELECT 1 FROM sp_stages WHERE n = ?1)"
            for table in ("objects", "checkpoints", "calls", "pauses", "branches"):  # a whole task has all of these
                conn.execute(f"DELETE FROM sp_{table} WHERE {_range(table)} AND {nobody}", (number,))


def _again(done: str, task: str, failed: CommitFailed) -> Unavailable:
    return Unavailable(
        f"whether task {task!r} was {done} is not known",
        str(failed.cause),
        "Do it again; that is safe.",
        task=task,
        unknown=True,
    )

"""Removing from PostgreSQL: retention, whole tasks, and what dead processes left behind.

A small task is pruned in one transaction. It takes the lock of the task's row in a statement of its own, and reads the roots in
later ones: a save that leaves out what its parent reaches has either landed before (its roots are seen) or waits (and finds its
parent gone). One statement that locks, marks and deletes reads what was there before it waited, and broke a checkpoint. A large
task takes many transactions, see ``bigsweep``.

Nothing here has to survive a loss of power before the next acknowledged write does: what comes back with it is removed again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from safepoint import _probe
from safepoint.errors import Damaged, SafepointError
from safepoint.model import Obj
from safepoint.rows import CheckpointRow, Pruned
from safepoint.stores import holder as people
from safepoint.stores.postgres import bigsweep, rows
from safepoint.stores.postgres.needed import Tries, asked, needed, plain, prunable, rows_of, table_of
from safepoint.stores.postgres.read import possible
from safepoint.stores.renewing import is_dead
from safepoint.stores.sound import Flaw, find, wrong

if TYPE_CHECKING:
    from safepoint.stores.foreseen import Foreseen
    from safepoint.stores.postgres.db import Database
    from safepoint.stores.postgres.link import Link

__all__ = ["TABLES", "Removals", "clear_up", "refuse_if_held"]

T = TypeVar("T")
log = logging.getLogger("safepoint")

LARGE = 5_000
"""Rows and objects of a task that are looked at and swept in one transaction."""
COUNTED = 200_000
"""Objects of a task that are counted: of more it is enough to know that they are many."""
SOME = 100
"""Checkpoints that are read whole at a time."""
REST = 2_000
"""Rows of a task that is gone that one transaction deletes."""

TABLES = ("checkpoints", "branches", "objects", "calls", "writes", "pauses", "outbox", "inputs", "leases")
"""With the rows of tasks, each of which has its number in the column ``task``."""


class Removals:
    """Needs ``_db`` and ``_foreseen`` from the store."""

    _db: Database
    _foreseen: Foreseen

    def prune(self, task: str, seqs: Iterable[int], *, space: str = "", dry_run: bool = False, sweep: bool = True) -> Pruned:
        db, wanted = self._db, prunable(seqs)
        n, large = _amount(db, task, space)
        if n is None:
            return Pruned((), 0, 0, 0)
        if large:
            return bigsweep.prune(db, task, n, wanted, space, dry_run=dry_run, sweep=sweep)
        return _prune(db, task, n, wanted, space, dry_run, sweep)

    def pruning(self, task: str, seqs: Iterable[int], *, space: str = "", sweep: bool = True) -> Iterator[None]:
        db, wanted = self._db, prunable(seqs)
        n, large = _amount(db, task, space)
        if n is not None and large:
            yield from bigsweep.pruning(db, task, n, wanted, space, dry_run=False, sweep=sweep)
        elif n is not None:
            _prune(db, task, n, wanted, space, False, sweep)
            yield

    def live_objects(self, task: str) -> int:
        return int(asked(self._db, "live_objects", task=task, most=COUNTED)[0][0]) if possible(task) else 0

    def unreadable(self, task: str, seqs: Iterable[int], *, space: str = "", sound: set[bytes] | None = None) -> dict[int, str]:
        db = self._db
        found = asked(db, "number", task=task) if possible(task) else []
        if not found:
            return {}
        n = int(found[0][0])
        bad: dict[int, Flaw] = {}
        bad |= find(task, _checkpoints(db, n, prunable(seqs), space, bad), lambda names: _objects(db, n, names), sound)
        if not bad:
            return {}
        # Another sweep may have taken them, or what they lack, meanwhile: only what is wrong in one look is believed.
        there = {seq for (seq,) in asked(db, "there", n=n, seqs=sorted(bad))}
        names = {flaw.name for flaw in bad.values() if flaw.name is not None}
        objects = {obj.name: obj for obj in _objects(db, n, sorted(names))}
        lost = {name for name in names if wrong(name, objects.get(name))}
        there &= {seq for (seq,) in asked(db, "there", n=n, seqs=sorted(there))}
        return {seq: flaw.why for seq, flaw in bad.items() if seq in there and (flaw.name is None or flaw.name in lost)}

    def pin(self, task: str, seq: int, pinned: bool, *, space: str = "") -> bool:
        if not prunable([seq]) or not possible(task, space):
            return False

        def write(link: Link) -> bool:
            found = rows_of(self._db, link, "lock", task=task)
            return bool(found) and bool(
                rows_of(self._db, link, "pin", n=found[0][0], seq=seq, space=space, pinned=bool(pinned))
            )

        return self._db.write(write, again=True, facts={"task": task})

    def delete_task(self, task: str) -> bool:
        db = self._db
        n, large = _amount(db, task)
        if n is None:
            return False
        tries = Tries()

        def write(link: Link) -> bool:
            found = rows_of(db, link, "lock", task=task)
            if tries.landed(link):
                return True  # what is there now was begun since
            if not found:
                return False
            number = int(found[0][0])
            fence = refuse_if_held(db, link, task, number)
            staged = rows_of(db, link, "drop_all_stages", n=number)
            if large or staged or number != n:
                # Gone at once; what is under its number follows. A kill meanwhile leaves the mark, for whoever comes next.
                rows_of(db, link, "leave_rest", n=number)
            else:
                for table in TABLES:
                    link.execute(f"DELETE FROM {table_of(db, table)} WHERE task = %s", (number,))
            rows_of(db, link, "drop_task", n=number)
            # Last, as all tasks share it: a receiver has seen these fences and knows no more than the name.
            if fence:
                rows_of(db, link, "raise_fence_floor", fence=fence)
            tries.ends(link)
            _probe.at("delete.before")
            return True

        gone = db.write(write, again=True, facts={"task": task})
        _probe.at("delete.after")
        self._foreseen.drop(task)
        if gone:
            clear_up(db)
        return gone


def refuse_if_held(db: Database, link: Link, task: str, n: int) -> int:
    """Under the task's lock: LeaseHeld while a live run holds it; else its last fence."""
    for fence, token, process, holder, since, live in rows_of(db, link, "lease", n=n):
        if live and not is_dead(process, token):
            raise people.lease_held(task, holder, since)
        return int(fence)
    return 0


def _amount(db: Database, task: str, space: str = "") -> tuple[int | None, bool]:
    """A task's number, if there may be such a task and space, and whether there is too much of it for one transaction."""
    if not possible(task, space):
        db.refuse_closed()
        return None, False
    try:
        found = asked(db, "amount", task=task, most=LARGE + 1)
    except Damaged:
        found = [(n, LARGE + 1) for (n,) in asked(db, "number", task=task)]  # what cannot be counted is taken for much
    return (found[0][0], found[0][1] > LARGE) if found else (None, False)


# -- small tasks


def _prune(db: Database, task: str, n: int, wanted: set[int], space: str, dry_run: bool, sweep: bool) -> Pruned:
    done: list[Pruned] = []

    def write(link: Link) -> Pruned:
        found = rows_of(db, link, "lock", task=task)
        if (
            not found or found[0][0] != n
        ):  # begun anew in between, or between two tries: it has other checkpoints by these numbers
            return Pruned((), 0, 0, 0)
        pruned = _prune_locked(db, link, n, wanted, space, dry_run, sweep)
        done.append(pruned)
        _probe.at("prune.before")
        return pruned

    if dry_run:
        return db.write(write, sync=False)
    last = db.write(write, again=True, sync=False, facts={"task": task})
    _probe.at("prune.after")
    # Where COMMIT did not answer and had landed, the next try found nothing to do any more.
    return max(done, key=lambda p: (len(p.seqs), p.objects), default=last)


def _prune_locked(db: Database, link: Link, n: int, wanted: set[int], space: str, dry_run: bool, sweep: bool) -> Pruned:
    if not dry_run:
        rows_of(db, link, "drop_stages", n=n)
    kept = needed(db, link, n).kept
    gone = plain(rows_of(db, link, "going", n=n, seqs=sorted(wanted - kept), space=space))
    seqs, ids = [seq for seq, _, _ in gone], [id for _, _, id in gone]
    calls = rows_of(db, link, "calls_of", n=n, seqs=seqs, after=0, page=None) if seqs else []
    writes = rows_of(db, link, "writes_of", n=n, space=space, ids=ids) if seqs else []
    garbage: list[Any] = []
    if sweep:
        if rows_of(db, link, "cut_off", n=n):
            raise bigsweep.cut_off()
        garbage = rows_of(db, link, "unreached", n=n, without=seqs, space=space, without_ids=ids)
    _probe.at("prune.mark")
    size = sum(row[1] for row in gone) + sum(row[2] for part in (calls, writes, garbage) for row in part)
    pruned = Pruned(tuple(seqs), len(calls), len(garbage), size)
    if dry_run:
        return pruned
    if seqs:
        pauses = rows_of(db, link, "pauses_of", n=n, seqs=seqs, after=0, page=None)
        rows_of(db, link, "drop_checkpoints", n=n, seqs=seqs)
        if writes:
            rows_of(db, link, "drop_writes", n=n, space=space, ids=ids)
        if calls:
            rows_of(db, link, "drop_calls", n=n, nos=[call[0] for call in calls], seqs=seqs)
        if pauses:
            rows_of(db, link, "drop_pauses", n=n, nos=[pause[0] for pause in pauses], seqs=seqs)
        rows_of(db, link, "dropped", n=n, count=len(seqs))
    if garbage:
        stages = [k for (k,) in rows_of(db, link, "stages", n=n)]
        rows_of(db, link, "drop_objects", n=n, names=rows.blobs([row[0] for row in garbage]), stages=stages)
        rows_of(db, link, "swept", n=n)
    return pruned


# -- what is damaged


def _checkpoints(db: Database, n: int, seqs: set[int], space: str, bad: dict[int, Flaw]) -> Iterator[CheckpointRow]:
    """The rows of these numbers; those that cannot be read are put into ``bad``."""
    wanted = sorted(seqs)
    for i in range(0, len(wanted), SOME):
        some = _halved(wanted[i : i + SOME], lambda part: asked(db, "whole", n=n, seqs=part), bad)
        yield from (row for row in map(rows.checkpoint, some) if row.space == space)


def _objects(db: Database, n: int, wanted: list[bytes]) -> list[Obj]:
    return [Obj(*row) for row in _halved(wanted, lambda part: asked(db, "objects", n=n, names=rows.blobs(part)), {})]


def _halved(wanted: list[Any], fetch: Callable[[list[Any]], list[T]], bad: dict[Any, Flaw]) -> list[T]:
    """What can be read of these; a page that is damaged makes PostgreSQL give nothing at all of a statement."""
    if not wanted:
        return []
    try:
        return fetch(wanted)
    except Damaged as error:
        if len(wanted) == 1:
            bad[wanted[0]] = Flaw(error.why)
            return []
    middle = len(wanted) // 2
    return _halved(wanted[:middle], fetch, bad) + _halved(wanted[middle:], fetch, bad)


# -- what is left of tasks and big saves


def clear_up(db: Database) -> None:
    """Remove what ended processes left, after something that has landed, of which an error from here would tell the contrary. What
    is not removed stays marked, for whoever comes next."""
    try:
        _drop_ended_stages(db)
    except SafepointError as error:
        log.warning("what ended processes left in %s was not removed: %s", db.url, error)


def _drop_ended_stages(db: Database) -> None:
    """Forget big saves whose process died: what they sent is garbage for the next sweep of their task; and remove what lies under a
    number whose task is gone, or never came to be."""
    while stages := asked(db, "ended_stages"):
        for k, n, marked, there in stages:
            if there or marked or not _mark_rest(db, k, n):
                if not there:
                    _clear(db, n)
                db.write(lambda link, k=k: rows_of(db, link, "drop_stage", k=k), again=True, sync=False, facts={})  # type: ignore[misc]


def _mark_rest(db: Database, k: int, n: int) -> bool:
    """Take the stage away from whoever may still use it, and mark its number in its place; False if it is gone, or goes on."""

    def write(link: Link) -> bool:
        if not rows_of(db, link, "drop_stage", k=k):
            return False
        rows_of(db, link, "leave_rest", n=n)
        return True

    return db.write(write, again=True, sync=False, facts={})


def _clear(db: Database, n: int) -> None:
    for table in TABLES:
        while _drop_some(db, table, n) == REST:
            _probe.at("delete.rest")


def _drop_some(db: Database, table: str, n: int) -> int:
    name = table_of(db, table)
    nobody = f"NOT EXISTS (SELECT 1 FROM {table_of(db, 'tasks')} WHERE n = %s)"
    some = f"SELECT ctid FROM {name} WHERE task = %s AND {nobody} LIMIT {REST}"
    statement = f"DELETE FROM {name} WHERE ctid = ANY(ARRAY({some}))"
    return db.write(lambda link: link.execute(statement, (n, n)).rowcount, again=True, sync=False, facts={})

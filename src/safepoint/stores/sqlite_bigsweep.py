"""Removing much from a SQLite file in many short transactions, so that no other saver waits for long.

What goes is found out without the lock. Then rows go, a checkpoint always together with its calls, pauses and writes; each transaction
looks again at whatever may have changed since. Only then objects are marked, again without the lock, from the rows up to a
number; each transaction that deletes some of the rest first marks from what has been written since. A kill at any point leaves
whole checkpoints, and objects that nothing reaches, for the next sweep.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Generator, Iterator
from heapq import merge
from itertools import islice
from typing import Any, NamedTuple

from safepoint import _probe
from safepoint.errors import Damaged
from safepoint.rows import Pruned
from safepoint.rules import retention
from safepoint.stores import sqlite_writes
from safepoint.stores.oslock import LockFile
from safepoint.stores.sqlite_db import Connection, Database, sql
from safepoint.stores.sqlite_rows import all_plain, key, names, size_of

__all__ = ["CallBase", "PauseBase", "all_calls", "live_fence", "prune"]

PAGE = 2000
"""Rows that are read without letting go of the reading connection."""
ROWS, OBJECTS = 256, 256
"""What one transaction deletes: checkpoints with calls, pauses and writes, or objects."""
PAUSE = 0.002
"""Seconds between two of them: a process that waits for the lock looks again after at most 0.0015."""


class CallBase(NamedTuple):
    no: int
    base_seq: int
    line: int
    step: int
    status: str
    fence: int
    size: int


class PauseBase(NamedTuple):
    no: int
    base_seq: int
    line: int
    step: int
    status: str


class Root(NamedTuple):
    k: int
    seq: int
    refs: bytes


class CallRoot(NamedTuple):
    k: int
    no: int
    version: int
    base_seq: int
    args_refs: bytes
    result_refs: bytes


class WriteRoot(NamedTuple):
    k: int
    space: str
    checkpoint: str
    refs: bytes


class Inner(NamedTuple):
    name: bytes
    refs: bytes
    stage: int | None
    size: int
    k: int


REFS: dict[str, Any] = {"roots": Root, "call_roots": CallRoot, "write_roots": WriteRoot, "object_sizes": Inner}


class Stood(NamedTuple):
    """A branch, with what it stands on."""

    head_seq: int
    forked_from: int | None
    line: int
    step: int
    current: int


class _Changed(Exception):
    """What was found out without the lock does not hold any more."""


class _Found(NamedTuple):
    """What was read without the lock, as far as it is looked at again under it."""

    begins: dict[int, int]
    """By line, the step from which on its calls are kept."""
    live: int | None
    next_call: int
    next_pause: int
    gone: list[tuple[int, int]]
    """(seq, size) by rising seq."""
    calls: dict[int, list[CallBase]]
    pauses: dict[int, list[PauseBase]]
    space: str
    ids: dict[int, str]
    """Of those that go: what is recorded against them goes too."""
    writes: dict[str, list[int]]
    """The sizes of those rows, by id; there may be more of them by then."""


def all_calls(conn: Connection, n: int) -> list[CallBase]:
    """The calls of a task. A damaged page may lose some without a word, and with them what they keep: so they are counted."""
    calls = all_plain(CallBase, conn.rows(sql("sqlite_sweep")["call_bases"], (n,)))
    count = conn.rows("SELECT calls FROM sp_tasks WHERE n = ?", (n,))
    if count and count[0][0] is not None and count[0][0] != len(calls):
        raise Damaged(
            "calls of a task are missing",
            f"there should be {count[0][0]}, and {len(calls)} can be read",
            "Nothing was deleted. See `safepoint verify`.",
        )
    return calls


def all_branches(conn: Connection, n: int) -> list[Stood]:
    return all_plain(Stood, conn.rows(sql("sqlite_sweep")["branches"], (n,)))


def all_pauses(conn: Connection, n: int) -> list[PauseBase]:
    return all_plain(PauseBase, conn.rows(sql("sqlite_sweep")["pauses"], (n,)))


def live_fence(conn: Connection, locks: LockFile, n: int) -> int | None:
    """The fence of the live run, also where it cannot be told whether it lives."""
    lease = conn.rows("SELECT fence, lease_id, locks FROM sp_leases WHERE task = ? AND state = 'held'", (n,))
    return lease[0][0] if lease and locks.is_held(*lease[0][1:]) is not False else None


def prune(db: Database, locks: LockFile, n: int, wanted: set[int], space: str, *, dry_run: bool, sweep: bool) -> Pruned:
    work = pruning(db, locks, n, wanted, space, dry_run=dry_run, sweep=sweep)
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        time.sleep(PAUSE)


def pruning(
    db: Database, locks: LockFile, n: int, wanted: set[int], space: str, *, dry_run: bool, sweep: bool
) -> Generator[None, None, Pruned]:
    """As ``prune``, resting at each yield for as long as one likes: nothing is locked there, and no snapshot is open."""
    seqs: list[int] = []
    calls = size = 0
    while True:
        found = _look(db, locks, n, wanted - set(seqs), space)
        if dry_run:
            seqs = [seq for seq, _ in found.gone]
            gone = [c for seq in seqs for c in found.calls.get(seq, ())]
            calls, size = len(gone), sum(s for _, s in found.gone) + sum(c.size for c in gone)
            size += sum(map(sum, found.writes.values()))
            break
        try:
            for batch in _batches(found):
                did = _drop_rows(db, locks, n, found, batch)
                seqs += did[0]
                calls, size = calls + did[1], size + did[2]
                yield
            break
        except _Changed:
            continue
    objects = 0
    while sweep:
        mark = _Mark(db, n)
        yield from mark.look(set(seqs), (space, set(found.ids.values()))) if dry_run else mark.look(set(), None)
        _probe.at("sweep.marked")
        if dry_run:
            objects, size = len(mark.garbage), size + sum(mark.garbage.values())
            break
        try:
            yield from mark.delete()
        except _Changed:
            continue
        finally:
            objects, size = objects + mark.objects, size + mark.size
        break
    return Pruned(tuple(seqs), calls, objects, size)


# -- rows


def _begins(branches: list[Any]) -> dict[int, int]:
    return retention.begins([retention.At(*row[2:]) for row in branches])


def _look(db: Database, locks: LockFile, n: int, wanted: set[int], space: str) -> _Found:
    with db.reading() as conn:
        counters = conn.rows("SELECT next_call, next_pause FROM sp_tasks WHERE n = ?", (n,))
        branches = all_branches(conn, n)
        calls = all_calls(conn, n)
        pauses = all_pauses(conn, n)
        live = live_fence(conn, locks, n)
        sqlite_writes.refuse_short(conn, n)
    if not counters:
        return _Found({}, None, 0, 0, [], {}, {}, space, {}, {})
    kept = {seq for row in branches for seq in row[:2]}
    kept |= retention.stood_on([retention.At(*row[2:]) for row in branches], calls, pauses, live)
    first, last = n << 32, (n << 32) | 0xFFFFFFFF
    if wanted:
        first, last = max(first, first + min(wanted) - 1), min(last, first + max(wanted))
    rows = [
        (seq, size_of(size), id)
        for _, seq, of, pinned, size, id in _pages(db, "checkpoint_sizes", first, last)
        if seq in wanted and of == space and pinned == 0 and seq not in kept
    ]
    gone = [(seq, size) for seq, size, _ in rows]
    ids = {seq: id for seq, _, id in rows}
    bases = set(ids)
    by_call: dict[int, list[CallBase]] = defaultdict(list)
    by_pause: dict[int, list[PauseBase]] = defaultdict(list)
    for call in calls:
        if call.base_seq in bases:
            by_call[call.base_seq].append(call)
    for pause in pauses:
        if pause.base_seq in bases:
            by_pause[pause.base_seq].append(pause)
    by_id: dict[str, list[int]] = defaultdict(list)
    if gone:
        going = set(ids.values())
        for _, id, size in _pages(db, "write_sizes", n << 32, (n << 32) | 0xFFFFFFFF, space):
            if id in going:
                by_id[id].append(size_of(size))
    next_call, next_pause = counters[0]
    return _Found(_begins(branches), live, next_call, next_pause, gone, by_call, by_pause, space, ids, by_id)


def _pages(db: Database, statement: str, first: Any, *more: Any) -> Iterator[tuple[Any, ...]]:
    """Rows in the order of their first column, a page at a time, each page a snapshot of its own."""
    text = sql("sqlite_sweep")[statement]
    while True:
        with db.reading() as conn:
            rows = conn.rows(text, (first, *more, PAGE))
        if (cls := REFS.get(statement)) is not None:
            rows = all_plain(cls, rows)  # what a value that is no list of names refers to would be taken for garbage
        yield from rows
        if len(rows) < PAGE:
            return
        first = rows[-1][0]


def _batches(found: _Found) -> Iterator[list[tuple[int, int]]]:
    batch: list[tuple[int, int]] = []
    weight = 0
    for seq, size in found.gone:
        batch.append((seq, size))
        weight += 1 + len(found.calls.get(seq, ())) + len(found.pauses.get(seq, ()))
        weight += len(found.writes.get(found.ids[seq], ()))
        if weight >= ROWS:
            yield batch
            batch, weight = [], 0
    if batch:
        yield batch


def _drop_rows(
    db: Database, locks: LockFile, n: int, found: _Found, batch: list[tuple[int, int]]
) -> tuple[list[int], int, int]:
    st = sql("sqlite_sweep")
    with db.writing(False) as conn:
        branches = all_branches(conn, n)
        for line, step in _begins(branches).items():
            if step < found.begins.get(line, step + 1):
                raise _Changed  # a head came back to where calls are needed again, or a line has one that had none
        if (live := live_fence(conn, locks, n)) is not None and live != found.live:
            raise _Changed
        kept = {seq for row in branches for seq in row[:2]}
        # A call that is passed and settled may only have been opened again, or be new; both keep what they stand on.
        kept.update(seq for (seq,) in conn.rows(st["newer_bases"], (n, key(n, found.next_call), key(n, found.next_pause))))
        there: set[int] = set()
        for seq, _ in batch:
            there.update(s for (s,) in conn.rows(st["still_there"], (key(n, seq),)))
        gone = [(seq, size) for seq, size in batch if seq in there and seq not in kept]
        calls = [call for seq, _ in gone for call in found.calls.get(seq, ())]
        conn.executemany(st["drop_checkpoint"], [(key(n, seq),) for seq, _ in gone])
        conn.executemany(st["drop_call"], [(key(n, call.no),) for call in calls])
        conn.executemany(st["drop_pause"], [(key(n, p.no),) for seq, _ in gone for p in found.pauses.get(seq, ())])
        writes: list[tuple[int, int]] = []
        for seq, _ in gone:  # also those that came since the look
            writes += conn.rows(st["writes_of"], (n, found.space, found.ids[seq]))
        conn.executemany(st["drop_write"], [(k,) for k, _ in writes])
        conn.execute(st["dropped"], (n, len(gone)))
        _probe.at("sweep.rows")
    size = sum(size for _, size in gone) + sum(call.size for call in calls) + sum(size_of(s) for _, s in writes)
    return [seq for seq, _ in gone], len(calls), size


# -- objects


class _Mark:
    """What is reached, found out without the lock up to the rows of a number, and kept true under it."""

    def __init__(self, db: Database, n: int) -> None:
        self.db = db
        self.n = n
        self.at: tuple[Any, ...] = ()
        self.sweeps = 0
        self.objects = self.size = 0
        """How many were deleted, and how many bytes."""
        self.versions: dict[int, int] = {}
        self.reached: set[bytes] = set()
        self.garbage: dict[bytes, int] = {}
        """Names that nothing reaches, with the bytes of each."""
        self._order: Iterator[tuple[int, bytes]] = iter(())

    def look(self, without: set[int], writes: tuple[str, set[str]] | None) -> Iterator[None]:
        """Find out what nothing reaches, apart from the checkpoints ``without``, their calls, and the writes against these ids of a
        space; a page between two yields."""
        of, ids = writes or ("", set())
        db, n = self.db, self.n
        first, last = n << 32, (n << 32) | 0xFFFFFFFF
        with db.reading() as conn:
            self.at, self.sweeps = self._at(conn)
            stages = {k for (k,) in conn.rows("SELECT k FROM sp_stages WHERE n = ?", (n,))}
        roots: set[bytes] = set()
        for i, (_, seq, refs) in enumerate(_pages(db, "roots", first, last)):
            if seq not in without:
                roots.update(names([refs]))
            if i % PAGE == 0:
                yield
        for i, (_, no, version, base_seq, args_refs, result_refs) in enumerate(_pages(db, "call_roots", first, last)):
            self.versions[no] = version
            if base_seq not in without:
                roots.update(names([args_refs or b"", result_refs or b""]))
            if i % PAGE == 0:
                yield
        for i, (_, space, checkpoint, refs) in enumerate(_pages(db, "write_roots", first, last)):
            if space != of or checkpoint not in ids:
                roots.update(names([refs]))
            if i % PAGE == 0:
                yield
        inner: dict[bytes, bytes] = {}
        pages: list[list[tuple[int, bytes]]] = [[]]
        for i, (name, refs, stage, size, k) in enumerate(_pages(db, "object_sizes", b"", n)):
            self.garbage[name] = 16 + len(refs) + size
            pages[-1].append((k, name))
            if refs:
                inner[name] = refs
            if stage in stages:
                roots.update(names([name + refs]))
            if i % PAGE == 0:
                pages[-1].sort()
                pages.append([])
                yield
        pages[-1].sort()
        # As they lie in the file: in the order of their names, each of them would be on a page of its own.
        self._order = merge(*pages)
        # Only what is there counts as reached: something that is not may come again, with what it reaches.
        todo = list(roots)
        while todo:
            name = todo.pop()
            if self.garbage.pop(name, None) is not None:
                self.reached.add(name)
                todo += names([inner.get(name, b"")])
                if len(self.reached) % PAGE == 0:
                    yield

    def _at(self, conn: Connection) -> tuple[tuple[Any, ...], int]:
        found = conn.rows("SELECT next_seq, next_write, next_call, last_commit, sweeps FROM sp_tasks WHERE n = ?", (self.n,))
        return (tuple(found[0][:4]), found[0][4]) if found else ((0, 0, 0, ""), 0)

    def delete(self) -> Iterator[None]:
        """Delete the garbage, less what has come to be reached meanwhile.

        Raises:
            _Changed: another sweep was here, or a repair, which brings back rows of old numbers.
        """
        st, n = sql("sqlite_sweep"), self.n
        while batch := list(islice(self._order, OBJECTS)):
            with self.db.writing(False) as conn:
                self._follow(conn)
                stages = {k for (k,) in conn.rows("SELECT k FROM sp_stages WHERE n = ?", (n,))}
                gone = []
                for _, name in batch:
                    bytes_ = self.garbage.pop(name, None)
                    if bytes_ is None:
                        continue
                    for k, stage in conn.rows(st["object_at"], (n, name)):
                        if stage not in stages:
                            gone.append((k,))
                            self.size += bytes_
                conn.executemany(st["drop_object"], gone)
                if gone:
                    conn.execute(st["swept"], (n, 0))  # a big save on its way sends again what this took
                    self.sweeps += 1
                self.objects += len(gone)
                _probe.at("sweep.objects")
            yield

    def _follow(self, conn: Connection) -> None:
        """Under the lock: mark from all that was written since the last look."""
        now, sweeps = self._at(conn)
        if sweeps != self.sweeps:
            raise _Changed
        if now == self.at:
            return
        st, n = sql("sqlite_sweep"), self.n
        next_seq, next_write = self.at[:2]
        last = (n << 32) | 0xFFFFFFFF
        roots = [refs for _, _, refs in conn.rows(st["roots"], (key(n, next_seq - 1), last, -1))]
        # One that was replaced meanwhile has a number of its own.
        roots += [refs for *_, refs in conn.rows(st["write_roots"], (key(n, next_write - 1), last, -1))]
        for no, version in conn.rows(st["call_versions"], (n,)):
            if self.versions.get(no) != version:
                self.versions[no] = version
                for _, _, _, _, *refs in conn.rows(st["call_roots"], (key(n, no) - 1, key(n, no), 1)):
                    roots += [run for run in refs if run]
        todo = [name for name in names(set(roots)) if name not in self.reached]
        while todo:
            found = []
            for i in range(0, len(todo), 500):
                part = todo[i : i + 500]
                found += conn.rows(st["level_refs"], (b"".join(part), n, len(part)))
            for name, _ in found:
                self.reached.add(name)
                self.garbage.pop(name, None)
            todo = [name for name in names({refs for _, refs in found}) if name not in self.reached]
        self.at = now

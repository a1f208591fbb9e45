"""Removing much from PostgreSQL in many short transactions, so that no other saver waits for long.

What goes is found out without the lock. Then rows go, a checkpoint always together with its calls, pauses and writes; each transaction
looks again at whatever may have changed since. Only then objects are marked, again without the lock; each transaction that
deletes some of the rest first marks from what has been written since. Of the objects only the names of those that stay are
held here, and of the rest a window. A kill at any point leaves whole checkpoints, and objects that nothing reaches, for the
next sweep.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from safepoint import _probe
from safepoint.codec.nodes import names_in
from safepoint.errors import Damaged, Unavailable
from safepoint.rows import Pruned
from safepoint.stores.postgres.needed import asked, asked_in_order, heads_of, live_fence, needed, plain, rows_of
from safepoint.stores.postgres.rows import blobs

if TYPE_CHECKING:
    from safepoint.stores.postgres.db import Database
    from safepoint.stores.postgres.link import Link

__all__ = ["cut_off", "prune", "pruning"]

PAGE = 2000
"""Rows that are read at a time."""
ROUND = 10_000
"""Checkpoints whose calls and pauses are looked for at once."""
ROWS, OBJECTS = 256, 256
"""What one transaction deletes: checkpoints with calls, pauses and writes, or objects."""
WINDOW = 20_000
"""Names of garbage that are put in the order in which they lie in the table, before some of them are deleted."""


class _Changed(Exception):
    """What was found out without the lock does not hold any more."""


class _Found(NamedTuple):
    """What was read without the lock, as far as it is looked at again under it."""

    begins: dict[int, int]
    live: int | None
    last_call: int
    last_pause: int
    gone: list[tuple[int, int, str]]
    """(seq, size, id) by rising seq."""
    calls: dict[int, list[tuple[int, int]]]
    """(no, size) by checkpoint."""
    pauses: dict[int, list[int]]
    writes: dict[str, tuple[int, int]]
    """How many, and of how many bytes, by the id of the checkpoint."""


def cut_off() -> Damaged:
    return Damaged(
        "a row's list of objects is cut off",
        "what it reached is not known any more",
        "Nothing was deleted. See what is left with safepoint verify.",
    )


def prune(db: Database, task: str, n: int, wanted: set[int], space: str, *, dry_run: bool, sweep: bool) -> Pruned:
    # Nobody has to be waited for in between: who waits for the lock of a row is the next to get it.
    work = pruning(db, task, n, wanted, space, dry_run=dry_run, sweep=sweep)
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def pruning(
    db: Database, task: str, n: int, wanted: set[int], space: str, *, dry_run: bool, sweep: bool
) -> Generator[None, None, Pruned]:
    """As ``prune``, resting at each yield for as long as one likes: nothing is locked there, and no connection is held."""
    facts = {"task": task}
    if not dry_run:
        db.write(lambda link: rows_of(db, link, "drop_stages", n=n), again=True, sync=False, facts=facts)
    seqs: list[int] = []
    ids: set[str] = set()
    calls = size = 0
    todo = sorted(wanted)
    for start in range(0, len(todo), ROUND):
        part = todo[start : start + ROUND]
        while True:
            found = yield from _look(db, n, part, space)
            if dry_run:
                seqs += [seq for seq, _, _ in found.gone]
                ids |= {id for _, _, id in found.gone}
                calls += sum(map(len, found.calls.values()))
                size += sum(s for _, s, _ in found.gone) + sum(s for of in found.calls.values() for _, s in of)
                size += sum(s for _, s in found.writes.values())
                break
            try:
                for batch in _batches(found):
                    did = _drop_rows(db, facts, n, space, found, batch)
                    seqs += did[0]
                    calls, size = calls + did[1], size + did[2]
                    yield
                break
            except _Changed:
                continue
    objects = 0
    while sweep:
        mark = _Mark(db, facts, n)
        yield from mark.look(set(seqs) if dry_run else set(), space, ids)
        _probe.at("sweep.marked")
        try:
            yield from mark.delete(dry_run)
        except _Changed:
            continue
        finally:
            objects, size = objects + mark.objects, size + mark.size
        break
    return Pruned(tuple(seqs), calls, objects, size)


# -- rows


def _look(db: Database, n: int, part: list[int], space: str) -> Generator[None, None, _Found]:
    # The counters come first: whatever is newer than they say is looked at under the lock.
    counters = asked(db, "counters", n=n)
    if not counters:
        return _Found({}, None, 0, 0, [], {}, {}, {})
    need = db.read(lambda link: needed(db, link, n))
    wanted = [seq for seq in part if seq not in need.kept]
    gone: list[tuple[int, int, str]] = []
    for i in range(0, len(wanted), PAGE):
        yield
        gone += plain(asked(db, "going", n=n, seqs=wanted[i : i + PAGE], space=space))
    writes: dict[str, tuple[int, int]] = {}
    for i in range(0, len(gone), PAGE):
        yield
        ids = [id for _, _, id in gone[i : i + PAGE]]
        writes |= {id: (count, size) for id, count, size in plain(asked(db, "writes_of", n=n, space=space, ids=ids))}
    calls: dict[int, list[tuple[int, int]]] = defaultdict(list)
    pauses: dict[int, list[int]] = defaultdict(list)
    if gone:
        bases = [seq for seq, _, _ in gone]
        yield
        for page in _pages(db, "calls_of", 0, n=n, seqs=bases):
            for no, base_seq, size in plain(page):
                calls[base_seq].append((no, size))
            yield
        for page in _pages(db, "pauses_of", 0, n=n, seqs=bases):
            for no, base_seq in plain(page):
                pauses[base_seq].append(no)
            yield
    last_call, last_pause = counters[0]
    return _Found(need.begins, need.live, last_call, last_pause, gone, calls, pauses, writes)


def _pages(db: Database, statement: str, after: Any, **values: Any) -> Iterator[list[Any]]:
    """Rows in the order of their first column, a page at a time, each page a snapshot of its own."""
    while page := asked_in_order(db, statement, after=after, page=PAGE, **values):
        yield page
        if len(page) < PAGE:
            return
        after = page[-1][0]


def _batches(found: _Found) -> Iterator[list[tuple[int, int, str]]]:
    batch: list[tuple[int, int, str]] = []
    weight = 0
    for seq, size, id in found.gone:
        batch.append((seq, size, id))
        weight += 1 + len(found.calls.get(seq, ())) + len(found.pauses.get(seq, ())) + found.writes.get(id, (0, 0))[0]
        if weight >= ROWS:
            yield batch
            batch, weight = [], 0
    if batch:
        yield batch


def _drop_rows(
    db: Database, facts: dict[str, Any], n: int, space: str, found: _Found, batch: list[tuple[int, int, str]]
) -> tuple[list[int], int, int]:
    tried: set[int] = set()
    """Dropped by a try whose COMMIT did not answer; what is not there at the next was."""

    def write(link: Link) -> list[int]:
        if not rows_of(db, link, "lock_number", n=n):
            return []
        kept, begins, _ = heads_of(db, link, n)
        for line, step in begins.items():
            if step < found.begins.get(line, step + 1):
                raise _Changed  # a head came back to where calls are needed again, or a line has one that had none
        if (live := live_fence(db, link, n)) is not None and live != found.live:
            raise _Changed
        kept |= {base for (base,) in rows_of(db, link, "newer_bases", n=n, call=found.last_call, pause=found.last_pause)}
        seqs = [seq for seq, _, _ in batch if seq not in kept]
        dropped = rows_of(db, link, "drop_checkpoints", n=n, seqs=seqs)
        gone = sorted(seq for seq, _ in dropped)
        if gone:
            rows_of(db, link, "drop_writes", n=n, space=space, ids=[id for _, id in dropped])
        nos = [no for seq in gone for no, _ in found.calls.get(seq, ())]
        if nos:
            rows_of(db, link, "drop_calls", n=n, nos=nos, seqs=gone)
        nos = [no for seq in gone for no in found.pauses.get(seq, ())]
        if nos:
            rows_of(db, link, "drop_pauses", n=n, nos=nos, seqs=gone)
        if gone:
            rows_of(db, link, "dropped", n=n, count=len(gone))
        tried.update(gone)
        _probe.at("sweep.rows")
        return gone

    db.write(write, again=True, sync=False, facts=facts)
    calls = [call for seq in tried for call in found.calls.get(seq, ())]
    size = sum(size + found.writes.get(id, (0, 0))[1] for seq, size, id in batch if seq in tried)
    return sorted(tried), len(calls), size + sum(size for _, size in calls)


# -- objects


class _Mark:
    """What is reached, found out without the lock up to the rows of a number, and kept true under it."""

    def __init__(self, db: Database, facts: dict[str, Any], n: int) -> None:
        self.db = db
        self.facts = facts
        self.n = n
        self.last_seq = self.last_write = self.sweeps = 0
        self.version = self.horizon = ""
        self.objects = self.size = 0
        """How many were deleted, and how many bytes."""
        self.reached: set[bytes] = set()

    def look(self, without: set[int], space: str, ids: set[str]) -> Iterator[None]:
        """Find out what is reached, but by the checkpoints ``without`` with their calls, and by the writes at ``ids`` of that
        space; a page between two yields."""
        db, n = self.db, self.n
        standing = asked(db, "standing", n=n)
        if standing:
            self._at(standing[0])
        stages = [k for (k,) in asked(db, "stages", n=n)]
        roots: set[bytes] = set()
        for page in _pages(db, "checkpoint_roots", 0, n=n):
            roots |= _names(refs for seq, refs in page if seq not in without)
            yield
        for page in _pages(db, "call_roots", 0, n=n):
            roots |= _names(run for _, base, *runs in page if base not in without for run in runs)
            yield
        for page in _pages(db, "write_roots", 0, n=n):
            roots |= _names(refs for _, at, id, refs in page if at != space or id not in ids)
            self.last_write = page[-1][0]
            yield
        if stages:
            for page in _pages(db, "staged_roots", b"", n=n, stages=stages):
                roots |= _names(name + refs for name, refs in page)
                yield
        yield from self._spread(roots, lambda names: asked(db, "refs_of", n=n, names=blobs(names)))

    def _at(self, standing: tuple[int, int, str, str]) -> None:
        self.last_seq, self.sweeps, self.version, self.horizon = standing

    def _spread(self, roots: Iterable[bytes], fetch: Callable[[list[bytes]], list[Any]]) -> Iterator[None]:
        """Add what these reach. Only what is there counts as reached: what is not may come again, with what it reaches."""
        level = [name for name in roots if name not in self.reached]
        missing: set[bytes] = set()
        while level:
            below: set[bytes] = set()
            for i in range(0, len(level), PAGE):
                some = level[i : i + PAGE]
                found = fetch(some)
                self.reached.update([name for name, _ in found])
                below |= _names(refs for _, refs in found)
                if len(found) < len(some):
                    missing |= {name for name in some if name not in self.reached}
                yield
            level = [name for name in below if name not in self.reached and name not in missing]

    def delete(self, dry_run: bool) -> Iterator[None]:
        """Delete the rest, less what has come to be reached meanwhile.

        Raises:
            _Changed: another sweep was here, or a repair, which brings back rows of old numbers.
        """
        window: list[tuple[int, bytes, int]] = []
        for page in _pages(self.db, "object_page", b"", n=self.n):
            stages = {k for (k,) in asked(self.db, "stages", n=self.n)} if any(row[1] is not None for row in page) else set()
            window += [
                (block, name, size) for name, stage, size, block in page if name not in self.reached and stage not in stages
            ]
            yield
            if len(window) >= WINDOW:
                yield from self._delete(window, dry_run)
                window = []
        yield from self._delete(window, dry_run)

    def _delete(self, window: list[tuple[int, bytes, int]], dry_run: bool) -> Iterator[None]:
        if dry_run:
            self.objects += len(window)
            self.size += sum(size for _, _, size in window)
            return
        window.sort()
        for i in range(0, len(window), OBJECTS):
            self._drop([name for _, name, _ in window[i : i + OBJECTS]])
            yield

    def _drop(self, batch: list[bytes]) -> None:
        db, n = self.db, self.n

        def write(link: Link) -> list[int]:
            standing = rows_of(db, link, "lock_number", n=n)
            if not standing:
                return []
            if standing[0][1] != self.sweeps:
                raise _Changed
            if standing[0][2] != self.version:
                self._follow(link)
                self._at(standing[0])
            gone = [name for name in batch if name not in self.reached]
            if not gone:
                return []
            stages = [k for (k,) in rows_of(db, link, "stages", n=n)]
            sizes = [size for (size,) in rows_of(db, link, "drop_objects", n=n, names=blobs(gone), stages=stages)]
            if sizes:
                ((sweeps, version),) = rows_of(db, link, "swept", n=n)
                after.append((sweeps, version))
            _probe.at("sweep.objects")
            return sizes

        after: list[tuple[int, str]] = []
        # Not again where COMMIT did not answer: whether the counter of sweeps rose is not known then, so all is marked anew.
        try:
            sizes = db.write(write, sync=False)
        except Unavailable as error:
            if not error.details.get("unknown"):
                raise
            raise _Changed from None
        if sizes:
            self.sweeps, self.version = after[-1]
        self.objects += len(sizes)
        self.size += sum(sizes)

    def _follow(self, link: Link) -> None:
        """Under the lock: mark from all that was written since the last look."""
        db, n = self.db, self.n
        roots: set[bytes] = set()
        after = self.last_seq
        while page := rows_of(db, link, "checkpoint_roots", n=n, after=after, page=PAGE):
            roots |= _names(refs for _, refs in page)
            after = page[-1][0]
        while page := rows_of(db, link, "write_roots", n=n, after=self.last_write, page=PAGE):
            roots |= _names(refs for *_, refs in page)
            self.last_write = page[-1][0]
        roots |= _names(run for runs in rows_of(db, link, "new_call_roots", n=n, horizon=self.horizon) for run in runs)
        for _ in self._spread(roots, lambda names: rows_of(db, link, "refs_of", n=n, names=blobs(names))):
            pass


def _names(runs: Iterable[bytes]) -> set[bytes]:
    found: set[bytes] = set()
    for run in runs:
        if len(run) & 15:
            raise cut_off()
        found.update(names_in(run))
    return found

"""The verbs that keep and remove: pins, cleanup, retention at save time, the end of a task's data."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

from safepoint.checking import check_number
from safepoint.errors import Damaged, LeaseHeld, NotFound, SafepointError, StoreFull, Unavailable, UsageError
from safepoint.model import CleanupLine, CleanupReport, Retention, StoreCleanup, a_type, check_id, from_us, now, to_us
from safepoint.rows import Pruned, TaskRow
from safepoint.rules import retention
from safepoint.rules.retention import Slim
from safepoint.stores.base import Store

log = logging.getLogger("safepoint")

PAGE = 1000
"""Headers that are read at a time."""
REMEMBERED = 1000
"""Tasks of which a checkpointer remembers when to look next, and objects of which it remembers that they are sound."""
SLICE = 0.005
"""Seconds of one save after which retention rests until the next one: it ends with what it is at, a few milliseconds later."""
ROWS = 256
"""Checkpoints of a task that it reads whole, and then deletes, at a time."""
FINISH = 2.0
"""Seconds that ``close`` gives to what was begun: a process that lives for one save must come to an end with it, too."""


class _Due(NamedTuple):
    gone: list[int]
    unreadable: dict[int, str]
    verdicts: list[retention.Verdict]


@dataclass(slots=True)
class _Look:
    """What is remembered of a task between two looks of retention; forgetting it costs time and nothing else."""

    next: int
    """The number from which on a save looks again."""
    all: int
    """At which all checkpoints were looked at."""
    sound: set[bytes] = field(default_factory=set)
    """Objects that were found sound."""
    work: Iterator[None] | None = None
    """What was begun and is not done yet."""
    busy: threading.Lock = field(default_factory=threading.Lock)

    def go_on(self, seconds: float) -> bool:
        """Work for about so long; whether it is done."""
        until = time.perf_counter() + seconds
        while self.work is not None:
            try:
                next(self.work)
            except BaseException as end:
                self.work = None
                if not isinstance(end, StopIteration):
                    raise
            else:
                if time.perf_counter() > until:
                    return False
        return True


class KeepingVerbs:
    """Part of ``Checkpointer``."""

    store: Store
    retention: Retention

    if TYPE_CHECKING:

        @staticmethod
        def _no_task(task_id: str) -> NotFound: ...
        def _close_before_delete(self, task_id: str) -> None: ...

    def pin(self, task_id: str, seq: int) -> None:
        """Keep a checkpoint whatever retention says. NotFound if there is none."""
        self._pin(task_id, seq, True)

    def unpin(self, task_id: str, seq: int) -> None:
        """Let retention have a checkpoint again. NotFound if there is none."""
        self._pin(task_id, seq, False)

    def _pin(self, task_id: str, seq: int, pinned: bool) -> None:
        check_number("pin" if pinned else "unpin", "seq", seq)
        if not self.store.pin(check_id(task_id), seq, pinned):
            raise NotFound(f"task {task_id!r} has no checkpoint {seq}", "", f"See `safepoint log {task_id}`.", task=task_id)

    # -- cleanup

    def cleanup(
        self,
        task_id: str,
        *,
        keep_latest: int | None = None,
        max_age: timedelta | None = None,
        max_bytes: int | None = None,
        keep_milestones: bool | None = None,
        keep_failures: int | None = None,
        dry_run: bool = False,
    ) -> CleanupReport:
        """Delete what the given limits let go, or what the checkpointer's own retention does if none is given.

        Never deleted: heads, fork points, pinned checkpoints, those that are damaged, and what calls and pauses stand on that
        are open or that a resume would read. A checkpoint that cannot be read is in the report, and is none of the newest.

        Raises:
            NotFound: no such task.
        """
        rules = self._rules(keep_latest, max_age, max_bytes, keep_milestones, keep_failures)
        if self.store.task(check_id(task_id)) is None:
            raise self._no_task(task_id)
        rows, bad = self._rows(task_id)
        found = self._due(task_id, rows, rules, now(), bad)
        return self._clean(task_id, rows, found, dry_run)

    def cleanup_all(
        self,
        *,
        keep_latest: int | None = None,
        max_age: timedelta | None = None,
        max_bytes: int | None = None,
        keep_milestones: bool | None = None,
        keep_failures: int | None = None,
        max_store_bytes: int | None = None,
        finished_older_than: timedelta | None = None,
        dry_run: bool = False,
    ) -> StoreCleanup:
        """Do what ``cleanup`` does for every task of the store. A task that is damaged is reported, and the others are done.

        Args:
            max_store_bytes: All tasks together: the oldest checkpoints go beyond it, whosever they are, as far as the newest
                ``keep_latest`` (1 by default) of each task and the rest of the rules let them. Counted as ``bytes`` in
                listings: each state whole.
            finished_older_than: Tasks whose status is ``finished`` and that nothing was written to for so long are removed
                whole, with their journal, unless a checkpoint of theirs is pinned or damaged. Tasks of any other status are
                never removed.
        """
        rules = self._rules(keep_latest, max_age, max_bytes, keep_milestones, keep_failures)
        if max_store_bytes is not None and (type(max_store_bytes) is not int or max_store_bytes < 0):
            raise UsageError("max_store_bytes must be a number of bytes", f"it is {a_type(max_store_bytes)}", "Pass an int.")
        if finished_older_than is not None and (
            not isinstance(finished_older_than, timedelta) or finished_older_than < timedelta(0)
        ):
            raise UsageError("finished_older_than must be a timedelta", "", "Pass timedelta(days=30).")
        moment = now()
        reports: list[CleanupReport] = []
        removed: list[str] = []
        failed: dict[str, str] = {}
        over = _Over(max_store_bytes)
        for row in self._all_tasks():
            task = row.task
            try:
                past = finished_older_than is not None and self._is_past(row, to_us(moment - finished_older_than))
                if past and (dry_run or self._remove(row)):
                    removed.append(task)
                    continue
                rows, bad = self._rows(task)
                found = self._due(task, rows, rules, moment, bad)
                if max_store_bytes is None:
                    reports.append(self._clean(task, rows, found, dry_run))
                    continue
                # With a limit of no bytes, all goes that may go beyond the newest.
                limit = replace(rules, keep_latest=keep_latest or 1, max_age=None, max_bytes=0)
                over.add(task, rows, found, self._due(task, rows, limit, moment, dict(found.unreadable)).gone)
            except (Unavailable, StoreFull):
                raise
            except SafepointError as error:
                failed[task] = str(error)
        for task, (rows, found) in over.decided().items():
            try:
                reports.append(self._clean(task, rows, found, dry_run))
            except (Unavailable, StoreFull):
                raise
            except SafepointError as error:
                failed[task] = str(error)
        return StoreCleanup(tuple(reports), tuple(removed), failed, dry_run)

    def _rules(
        self,
        keep_latest: int | None,
        max_age: timedelta | None,
        max_bytes: int | None,
        keep_milestones: bool | None,
        keep_failures: int | None,
    ) -> Retention:
        rules = (
            self.retention
            if keep_latest is None and max_age is None and max_bytes is None
            else Retention(keep_latest, max_age, max_bytes)
        )
        if keep_milestones is not None:
            rules = replace(rules, keep_milestones=keep_milestones)
        if keep_failures is not None:
            rules = replace(rules, keep_failures=keep_failures)
        return rules

    def _all_tasks(self) -> Iterator[TaskRow]:
        after: str | None = None
        while rows := self.store.tasks(after=after):
            yield from rows
            after = rows[-1].task

    def _rows(self, task: str) -> tuple[list[Slim], dict[int, str]]:
        """All checkpoints, and which of them have a broken seal: nothing they say is believed."""
        found: list[Slim] = []
        bad: dict[int, str] = {}
        for _ in self._read(task, found, bad):
            pass
        return found, bad

    def _read(
        self, task: str, found: list[Slim], bad: dict[int, str], limit: int | None = None, *, sealed: bool = True
    ) -> Iterator[None]:
        """Read the newest checkpoints, a page between two yields."""
        before: int | None = None
        while limit is None or len(found) < limit:
            most = PAGE if limit is None else min(PAGE, limit - len(found))
            rows = self.store.headers(task, before=before, limit=most)
            for row in rows:
                found.append(Slim(row.seq, row.kind, row.size, row.created_at, row.pinned))
                if sealed:
                    try:
                        row.check(task, f"checkpoint {row.seq}")
                    except Damaged as error:
                        bad[row.seq] = error.why
            if len(rows) < most:
                break
            before = rows[-1].seq
            yield

    def _kept(self, task_id: str) -> dict[int, str]:
        kept: dict[int, str] = {}
        for branch in self.store.branches(task_id):
            if branch.forked_from is not None:
                kept.setdefault(branch.forked_from, f"where {branch.name} forked from")
        for branch in self.store.branches(task_id):
            kept[branch.head.seq] = f"the head of {branch.name}"
        return kept

    def _due(self, task: str, rows: list[Slim], rules: Retention, moment: datetime, bad: dict[int, str]) -> _Due:
        """What goes by the rules, once it is known that it, and what is kept as the newest, can be read."""
        kept, looked = self._kept(task), set(bad)
        while True:
            verdicts = list(retention.judge(rows, rules, moment, kept, bad))
            unknown = [v.seq for v in verdicts if (v.goes or v.counts) and v.seq not in looked]
            if not any(v.goes for v in verdicts):
                unknown = []
            looked.update(unknown)
            found = self.store.unreadable(task, unknown) if unknown else {}
            if not found:
                return _Due([v.seq for v in verdicts if v.goes][::-1], bad, verdicts)
            bad |= found

    def _prune(self, task: str, found: _Due, dry_run: bool = False) -> Pruned:
        # What a damaged checkpoint reached is not known, so that nothing is known to be garbage.
        if found.unreadable and self.store.chunked:
            return self.store.prune(task, found.gone, dry_run=dry_run, sweep=False)
        return self.store.prune(task, found.gone, dry_run=dry_run)

    def _clean(self, task: str, rows: list[Slim], found: _Due, dry_run: bool) -> CleanupReport:
        pruned = self._prune(task, found, dry_run)
        info = self.store.task(task)
        return CleanupReport(
            task_id=task,
            deleted=pruned.seqs,
            kept=(len(rows) - len(pruned.seqs)) if rows else (info.checkpoints if info is not None else 0),
            calls_deleted=pruned.calls,
            objects_deleted=pruned.objects,
            bytes_freed=pruned.bytes,
            dry_run=dry_run,
            unreadable=tuple(sorted(found.unreadable)),
            checkpoints=self._lines(task, rows, found, set(pruned.seqs)) if dry_run else (),
        )

    def _lines(self, task: str, rows: list[Slim], found: _Due, gone: set[int]) -> tuple[CleanupLine, ...]:
        calls = Counter(call.base_seq for call in self.store.calls(task, bodies=False)[0])
        lines = []
        for row, verdict in zip(rows, found.verdicts, strict=True):
            why = verdict.why
            if verdict.goes and row.seq not in gone:
                why = "a call or a question of its step is open, or would be read by a resume"
            if row.seq in found.unreadable:
                why = f"cannot be read ({found.unreadable[row.seq]}); damaged checkpoints are never deleted"
            lines.append(
                CleanupLine(row.seq, from_us(row.created_at), row.kind, row.size, row.seq in gone, why, calls[row.seq])
            )
        return tuple(lines)

    def _is_past(self, row: TaskRow, before: int) -> bool:
        """Whether a task is finished, long enough ago, and nothing of it is to be kept."""
        if row.status != "finished" or row.updated_at >= before or row.in_doubt or row.open_pauses:
            return False
        rows, bad = self._rows(row.task)
        return not (bad or any(r.pinned for r in rows) or self.store.unreadable(row.task, [r.seq for r in rows]))

    def _remove(self, row: TaskRow) -> bool:
        now_ = self.store.task(row.task)
        if now_ is None or now_.updated_at != row.updated_at or now_.status != row.status:
            return False  # taken up again since it was listed
        try:
            self.delete_task(row.task)
        except (LeaseHeld, NotFound):
            return False
        return True

    # -- retention at save time

    def _retain(self, task_id: str, seq: int) -> None:
        """Retention at save time. The save stands already, so a failure here is logged and left to the next one.

        What it costs is spread: so many must be due that a sweep pays, they are looked for where they can be, and all checkpoints
        are looked at only after half as many saves. And none of this is done at one save: after ``SLICE`` the next one goes on.
        """
        rules = self.retention
        if rules.keeps_all:
            return
        # By process: what a fork has copied may be in the middle of something, and its lock held by nobody.
        looks: dict[tuple[int, str], _Look] = self.__dict__.setdefault("_looks", {})
        look = looks.get((os.getpid(), task_id))
        if seq % retention.look_every(rules) if look is None else look.work is None and seq < look.next:
            return
        try:
            if look is None:
                info = self.store.task(task_id)
                every = retention.look_every(rules)
                if info is None or seq % retention.again_every(info.checkpoints) >= every:
                    return
                if seq % retention.first_every(info.checkpoints) >= every and not self._is_overdue(task_id, seq, rules):
                    return
                if len(looks) >= REMEMBERED:
                    looks.clear()
                look = looks[os.getpid(), task_id] = _Look(seq, 0)
            if look.busy.acquire(blocking=False):  # else another thread saves the same task, and is at it
                try:
                    look.work = look.work or self._look(task_id, seq, rules, look)
                    look.go_on(SLICE)
                finally:
                    look.busy.release()
        except Exception as error:
            log.warning("retention of task %s was put off: %s", task_id, type(error).__name__)

    def _retain_the_rest(self) -> None:
        """Before the store is closed: end what was begun, or most of it."""
        until = time.monotonic() + FINISH
        for (pid, _), look in list(self.__dict__.get("_looks", {}).items()):
            if pid == os.getpid() and look.work is not None and look.busy.acquire(blocking=False):
                with suppress(Exception):
                    look.go_on(max(0.0, until - time.monotonic()))
                look.busy.release()

    def _is_overdue(self, task: str, seq: int, rules: Retention) -> bool:
        """Whether so many are due that a look pays, told by a few headers. The look itself finds out exactly."""
        before = retention.overdue_below(rules, seq, retention.threshold(rules.keep_latest, self.store.live_objects(task)))
        if before is None or before < 1:
            return False
        rows = self.store.headers(task, before=before, limit=retention.PROBE)
        kept = self._kept(task)
        return any(not row.pinned and row.seq not in kept and retention.is_plain(row, rules) for row in rows)

    def _look(self, task: str, seq: int, rules: Retention, look: _Look) -> Iterator[None]:
        """Thin out a task, a little between two yields. New checkpoints may come meanwhile, and stay.

        What has become due lately first: a process that lives for a few saves comes to an end with that.
        """
        born = self._born(task)
        every = retention.look_every(rules)
        due_at = retention.threshold(rules.keep_latest, self.store.live_objects(task))
        look.next = seq + max(every, due_at)  # also if this look fails
        near = retention.near(rules, due_at)
        rows: list[Slim] = []
        bad: dict[int, str] = {}
        due = 0
        if near is not None:
            yield from self._read(task, rows, bad, near, sealed=False)
            due = yield from self._thin_out(task, born, rows, rules, due_at, bad, look)
        if near is None or len(rows) == near:
            info = self.store.task(task)
            period = retention.all_every(info.checkpoints if info is not None else 0)
            if seq - look.all >= period if look.all else seq % period < every:
                look.all = seq
                rows, bad = [], {}
                yield from self._read(task, rows, bad, sealed=rules.max_bytes is not None)
                due = max(due, (yield from self._thin_out(task, born, rows, rules, due_at, bad, look)))
            if near is None:
                look.next = seq + max(every, period)
        if near is not None and due < due_at:
            look.next = seq + max(every, due_at - due)
        if len(look.sound) > 100 * REMEMBERED:
            look.sound.clear()
        if bad:
            log.warning("retention of task %s keeps what cannot be read: %s", task, ", ".join(map(str, sorted(bad)[:5])))

    def _thin_out(
        self, task: str, born: int | None, rows: list[Slim], rules: Retention, due_at: int, bad: dict[int, str], look: _Look
    ) -> Generator[None, None, int]:
        """Delete what is due of these, if that is enough for a sweep to pay; how many it was."""
        looked = set(bad)
        while True:
            counts: list[int] = []
            goes: list[int] = []
            for i, verdict in enumerate(retention.judge(rows, rules, now(), self._kept(task), bad), 1):
                if verdict.goes:
                    goes.append(verdict.seq)
                elif verdict.counts and verdict.seq not in looked:
                    counts.append(verdict.seq)
                if i % PAGE == 0:
                    yield
            if len(goes) < due_at:
                return len(goes)
            if not counts:
                # Of a task that has never been thinned out each look takes a part.
                yield from self._thin(task, born, goes[::-1][: max(2 * due_at, PAGE)], bad, look.sound)
                return len(goes)
            # What is kept as the newest must be readable: else more are kept.
            looked.update(counts)
            yield from self._read_whole(task, counts, bad, look.sound)

    def _born(self, task: str) -> int | None:
        row = self.store.task(task)
        return None if row is None else row.created_at

    def _thin(self, task: str, born: int | None, goes: list[int], bad: dict[int, str], sound: set[bytes]) -> Iterator[None]:
        # Where each removal writes a whole journal anew, few large ones are cheaper.
        most = ROWS if self.store.chunked else max(ROWS, len(goes))
        for i in range(0, len(goes), most):
            some = goes[i : i + most]
            yield from self._read_whole(task, some, bad, sound)
            if self._born(task) != born:
                return  # deleted meanwhile: these are numbers of another task by its name now
            last = i + most >= len(goes)
            # What a damaged checkpoint reached is not known, so that nothing is known to be garbage.
            sweep = last and not (bad and self.store.chunked)
            yield from self.store.pruning(task, [seq for seq in some if seq not in bad], sweep=sweep)

    def _read_whole(self, task: str, seqs: list[int], bad: dict[int, str], sound: set[bytes]) -> Iterator[None]:
        for i in range(0, len(seqs), ROWS // 4):
            bad |= self.store.unreadable(task, seqs[i : i + ROWS // 4], sound=sound)
            yield

    def delete_task(self, task_id: str) -> None:
        """Remove a task with all its checkpoints, calls and pauses.

        Raises:
            NotFound: no such task. LeaseHeld: a live run holds it.
        """
        self._close_before_delete(check_id(task_id))
        if not self.store.delete_task(task_id):
            raise self._no_task(task_id)


class _Over:
    """What goes for the sake of the whole store: the oldest that may go, whosever they are."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.total = 0
        self.tasks: dict[str, tuple[list[Slim], _Due]] = {}
        self.spare: list[tuple[int, str, int, int]] = []
        self.places: dict[str, dict[int, int]] = {}

    def add(self, task: str, rows: list[Slim], found: _Due, spare: list[int]) -> None:
        self.tasks[task] = rows, found
        stay = {row.seq: row for row in rows if row.seq not in found.unreadable}
        for seq in found.gone:
            del stay[seq]
        self.places[task] = {v.seq: i for i, v in enumerate(found.verdicts)}
        self.total += sum(row.size for row in stay.values())
        self.spare += [(stay[seq].created_at, task, seq, stay[seq].size) for seq in spare if seq in stay]

    def decided(self) -> dict[str, tuple[list[Slim], _Due]]:
        for _, task, seq, size in sorted(self.spare):
            if self.limit is None or self.total <= self.limit:
                break
            self.total -= size
            found = self.tasks[task][1]
            at = self.places[task][seq]
            found.verdicts[at] = found.verdicts[at]._replace(goes=True, why="beyond max_store_bytes")
            found.gone.append(seq)
        return self.tasks

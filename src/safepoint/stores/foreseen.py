"""Numbers of a commit, foreseen: for stores that are asked over a network.

A row's seal covers its numbers, and the server that gives them cannot seal. Reading them first would double the trips of every
save. So the client remembers what a task's numbers were when it last heard of them, numbers and seals the rows as if they still
were, and the server, under the task's lock, takes the rows only if it would give the same numbers; else it answers with its own,
and the commit is made ready anew. Under a lease nobody else draws numbers, and the first try is right.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import NamedTuple

from safepoint.rows import CallRow, CheckpointRow, Commit, Numbers, PauseRow, WriteRow, replace
from safepoint.stores.forking import each_at_fork

__all__ = ["Foreseen", "Ready", "ready"]

REMEMBERED = 10_000
"""Tasks whose numbers are remembered. Forgetting one costs a trip."""


class Ready(NamedTuple):
    """A commit whose rows have their numbers, versions and seals, as they are if the task's numbers are ``last``."""

    checkpoint: CheckpointRow | None
    calls: tuple[CallRow, ...]
    pauses: tuple[PauseRow, ...]
    call_versions: tuple[int, ...]
    """The version that each of ``calls`` must have now; 0: it must not be there."""
    pause_versions: tuple[int, ...]
    last: Numbers
    next: Numbers
    """``last`` after this commit, but for ``line``, which the server counts."""
    writes: tuple[WriteRow, ...] = ()
    """All of the commit's: which of them come to stand is for the server to see."""


def ready(commit: Commit, last: Numbers) -> Ready:
    """Number and seal the rows of a commit. A row that is written twice in it is there once, as the second write leaves it."""
    task = commit.task
    no, position = last.call, last.position
    calls: dict[int, tuple[int, CallRow]] = {}
    for write in commit.calls:
        row = write.row
        if row.version == 0:
            no += 1
            row = replace(row, no=no)
        position += bool(write.stamp)
        stamp = {write.stamp: position} if write.stamp else {}
        first = calls[row.no][0] if row.no in calls else row.version
        calls[row.no] = first, replace(row, version=row.version + 1, **stamp)
    pause_no = last.pause
    pauses: dict[int, tuple[int, PauseRow]] = {}
    for ask in commit.pauses:
        pause = ask.row
        if pause.version == 0:
            pause_no += 1
            pause = replace(pause, no=pause_no)
        first = pauses[pause.no][0] if pause.no in pauses else pause.version
        pauses[pause.no] = first, replace(pause, version=pause.version + 1)
    new, seq = commit.checkpoint, last.seq
    if new is not None:
        seq += 1
        new = replace(new, id=commit.id, seq=seq).sealed(task)
    return Ready(
        new,
        tuple(row.sealed(task) for _, row in calls.values()),
        tuple(row.sealed(task) for _, row in pauses.values()),
        tuple(version for version, _ in calls.values()),
        tuple(version for version, _ in pauses.values()),
        last,
        Numbers(seq, no, pause_no, last.line, position),
        tuple(row.sealed(task) for row in commit.writes),
    )


class Foreseen:
    """The last numbers that were heard of, by task. Wrong ones cost a trip and nothing else."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[str, Numbers] = OrderedDict()
        each_at_fork(self)

    def after_fork(self) -> None:
        # What the parent hears from now on is not heard here; a lock that was held at the fork is held by nobody.
        self._lock = threading.Lock()
        self._known = OrderedDict()

    def get(self, task: str) -> Numbers:
        """What the task's numbers probably are; those of a new task if nothing is known."""
        with self._lock:
            return self._known.get(task) or Numbers()

    def put(self, task: str, numbers: Numbers) -> None:
        with self._lock:
            self._known[task] = numbers
            self._known.move_to_end(task)
            if len(self._known) > REMEMBERED:
                self._known.popitem(last=False)

    def drop(self, task: str) -> None:
        with self._lock:
            self._known.pop(task, None)

"""Which checkpoints may be deleted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import NamedTuple, Protocol

from safepoint.model import Retention, to_us
from safepoint.rows import CheckpointRow


def due(headers: Sequence[CheckpointRow], retention: Retention, now: datetime, keep: Iterable[int] = ()) -> list[int]:
    """Numbers of the checkpoints that ``retention`` lets go, oldest first.

    Args:
        headers: All of one task and space, by falling seq.
        keep: Numbers that stay whatever the rules say (heads, fork points, what open calls and pauses stand on). The store
            looks at these again under its lock; here they only keep the count honest.
    """
    if retention.keeps_all:
        return []
    kept = set(keep)
    newest = failures = size = 0
    oldest = to_us(now - retention.max_age) if retention.max_age is not None else None
    gone: list[int] = []
    for row in headers:
        stays = row.seq in kept or row.pinned
        if row.kind == "failure":
            failures += not stays
            if not stays and failures > retention.keep_failures:
                gone.append(row.seq)
            continue
        newest += 1
        size += row.size
        if stays or newest <= (retention.keep_latest or 1) or (row.kind == "milestone" and retention.keep_milestones):
            continue
        beyond_count = retention.max_age is None and retention.max_bytes is None
        too_old = oldest is not None and row.created_at < oldest
        too_big = retention.max_bytes is not None and size > retention.max_bytes
        if beyond_count or too_old or too_big:
            gone.append(row.seq)
    return gone[::-1]


def worth_it(n_due: int, keep_latest: int, live_objects: int) -> bool:
    """Whether a sweep is due at save time: its cost is spread over many saves."""
    return n_due >= max(keep_latest, live_objects // 16)


def look_every(retention: Retention) -> int:
    """At which multiples of ``seq`` a save counts what is due; any process that saves meets one of them."""
    return max(1, (retention.keep_latest or 1) // 2)


class At(NamedTuple):
    """Where a branch's head stands."""

    line: int
    step: int


class Stands(Protocol):
    """A call or a pause, as far as it keeps the checkpoint that its step began from."""

    @property
    def base_seq(self) -> int: ...
    @property
    def line(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def status(self) -> str: ...


class StandsUnderFence(Stands, Protocol):
    """A call, with the fence of the run that made it."""

    @property
    def fence(self) -> int: ...


OPEN_CALLS = frozenset({"started", "paused", "in_doubt"})
"""Calls that somebody still has to say something of; kept on whatever line they are."""
OPEN_PAUSES = frozenset({"open", "answered"})
"""Until an answer is used (status ``used``), it may still be asked for."""


def stood_on(heads: Iterable[At], calls: Iterable[StandsUnderFence], pauses: Iterable[Stands], live: int | None) -> set[int]:
    """Numbers of the checkpoints that must stay because calls and pauses that go with them are still needed.

    A resume of any branch reads what is recorded of its line from the step of its head on, whatever came of it: without the
    record of a write that succeeded, the interrupted step would do it again. Calls that were set aside count too, as they
    show what the step had gone on past.

    Args:
        heads: Of every branch of the task.
        calls: All of the task.
        pauses: All of the task.
        live: The fence of the live run, if there is one: its step may stand on a checkpoint that a write by force left
            behind, steps ago.
    """
    begins: dict[int, int] = {}
    for line, step in heads:
        begins[line] = min(step, begins.get(line, step))
    kept: set[int] = set()
    newest = 0
    for call in calls:
        if call.status in OPEN_CALLS or (call.line in begins and call.step >= begins[call.line]):
            kept.add(call.base_seq)
        if call.fence == live:
            newest = max(newest, call.base_seq)
    for pause in pauses:
        if pause.status in OPEN_PAUSES or (pause.line in begins and pause.step >= begins[pause.line]):
            kept.add(pause.base_seq)
    return kept | {newest}

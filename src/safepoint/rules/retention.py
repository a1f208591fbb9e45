"""Which checkpoints may be deleted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime

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

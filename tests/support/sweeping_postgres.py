"""Children of the tests that sweep PostgreSQL: as on SQLite, with the pieces of a sweep as small as can be where that is asked."""

from __future__ import annotations

from collections import Counter
from typing import Any

from safepoint import Retention, _probe
from safepoint.checkpointer import open as open_checkpointer
from safepoint.codec.nodes import make
from safepoint.rows import Image, WriteRow, replace
from safepoint.stores.base import Store
from safepoint.stores.postgres import bigsweep, sweep
from safepoint.stores.url import open_store
from tests.support import agents, sweeping

SIZES = ((sweep, ("LARGE", "REST")), (bigsweep, ("PAGE", "ROUND", "ROWS", "OBJECTS", "WINDOW")))
"""What decides how much is done at once."""


def written_task(n: int, **given: Any) -> Image:
    """As ``sweeping.long_task``, with a write of an adapter at each checkpoint that has an object of its own."""
    image = sweeping.long_task(n, **given)
    objects = [make(b"", b"written %d" % row.seq) for row in image.checkpoints]
    rows = [
        WriteRow(checkpoint=row.id, writer="w", idx=row.seq % 3 - 1, data=b"d", refs=made.name)
        for row, made in zip(image.checkpoints, objects, strict=True)
    ]
    return replace(image, writes=tuple(rows), objects=(*image.objects, *objects))


def always_large(url: str, durability: Any = "process") -> Store:
    """A store that sweeps the smallest task as it does the largest, a few rows at a time."""
    sweep.LARGE, sweep.REST = -1, 2
    bigsweep.PAGE, bigsweep.ROUND, bigsweep.ROWS, bigsweep.OBJECTS, bigsweep.WINDOW = 3, 5, 2, 2, 4
    return open_store(url, durability=durability)


def sweeper(url: str, large: bool) -> tuple[int, int]:
    """As ``sweeping.sweeper``."""
    if large:
        sweep.LARGE = -1
        bigsweep.ROWS, bigsweep.OBJECTS, bigsweep.WINDOW = 8, 8, 64
    return sweeping.sweeper(url, False)


def cleaner(url: str, task: str, keep: int, point: str = "", nth: int = 0) -> Any:
    """Clean the task up, and die at a point."""
    sweep.LARGE = 1000
    hits: Counter[str] = Counter()
    with open_checkpointer(url, retention=Retention.keep_all(), durability="process") as cp:
        agents.kill_at(point, nth) if point else agents.count_points(hits)
        report = cp.cleanup(task, keep_latest=keep)
        _probe.hook = None
        return len(report.deleted), report.calls_deleted, report.objects_deleted, hits


def deleter(url: str, task: str, point: str = "", nth: int = 0) -> Any:
    """Delete the task, and die at a point."""
    sweep.LARGE, sweep.REST = 10, 50
    hits: Counter[str] = Counter()
    store = open_store(url, durability="process")
    agents.kill_at(point, nth) if point else agents.count_points(hits)
    store.delete_task(task)
    _probe.hook = None
    store.close()
    return hits

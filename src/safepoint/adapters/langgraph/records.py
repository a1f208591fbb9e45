"""What of a thread's checkpoints is remembered between two puts, and which are known to be stored.

All copies of a saver share one ``Records``: LangGraph copies savers (``with_allowlist``) and calls them from many threads.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from safepoint.rows import Guard, Head

__all__ = ["Key", "Node", "Records"]

REMEMBERED = 64
"""Checkpoints of which a saver remembers the packed form: one for each namespace that is at work."""

Key = tuple[str, str, str]
"""Thread, namespace, checkpoint id."""


class Node(NamedTuple):
    """A checkpoint that is certain to be stored."""

    head: Head
    branch: str
    packed: Any
    """``codec.chunks.Packed`` or ``form.Loaded``; None if it is not at hand."""


class Records:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._nodes: OrderedDict[Key, Node] = OrderedDict()
        self._failed: OrderedDict[Key, BaseException] = OrderedDict()
        self._guards: dict[str, Guard] = {}
        self._due: OrderedDict[str, int] = OrderedDict()

    # -- checkpoints

    def stored(self, key: Key, node: Node) -> None:
        with self._changed:
            self._nodes[key] = node
            self._nodes.move_to_end(key)
            self._failed.pop(key, None)
            while len(self._nodes) > REMEMBERED:
                self._nodes.popitem(last=False)
            self._changed.notify_all()

    def node(self, key: Key) -> Node | None:
        with self._changed:
            return self._nodes.get(key)

    def failed(self, key: Key, error: BaseException) -> None:
        """A put did not land: whoever waits for it need not wait longer."""
        with self._changed:
            self._failed[key] = error
            while len(self._failed) > REMEMBERED:
                self._failed.popitem(last=False)
            self._changed.notify_all()

    def forget(self, thread: str) -> None:
        with self._changed:
            for key in [key for key in self._nodes if key[0] == thread]:
                del self._nodes[key]

    def wait(self, key: Key, seconds: float) -> bool:
        """Wait until a checkpoint is stored by this process; whether it is. Raises why its put failed."""
        until = time.monotonic() + seconds
        with self._changed:
            while key not in self._nodes:
                if key in self._failed:
                    raise self._failed[key]
                left = until - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
            return True

    # -- retention

    def due(self, thread: str, seq: int, every: int) -> bool:
        """Whether it is time to look what of a thread may go. The first look comes at once: nobody knows when the last one was."""
        with self._changed:
            if seq < self._due.get(thread, 0):
                return False
            self._due[thread] = seq + every
            self._due.move_to_end(thread)
            while len(self._due) > 1000:
                self._due.popitem(last=False)
            return True

    # -- leases that this saver holds

    def guard(self, thread: str) -> Guard | None:
        return self._guards.get(thread)

    @contextmanager
    def holding(self, thread: str, guard: Guard) -> Iterator[None]:
        with self._changed:
            self._guards[thread] = guard
        try:
            yield
        finally:
            with self._changed:
                del self._guards[thread]

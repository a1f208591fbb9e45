"""What of a thread's checkpoints is remembered between two puts, and which are known to be stored.

All copies of a saver share one ``Records``: LangGraph copies savers (``with_allowlist``) and calls them from many threads.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from contextlib import nullcontext
from typing import Any, NamedTuple, cast

from safepoint.adapters.langgraph.versions import Origin, moment
from safepoint.errors import SafepointError
from safepoint.model import now, to_us
from safepoint.rows import CallRow, Grant, Guard, Head
from safepoint.stores import holder
from safepoint.stores.forking import each_at_fork

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
    by: Origin | None = None
    """Of the invocation that has put it, if that was in this process."""


class Records:
    def __init__(self) -> None:
        self.after_fork()
        each_at_fork(self)

    def after_fork(self) -> None:
        """A child begins with nothing: what its parent held is not its own, and a lock may have been held by a thread that it has not."""
        self._changed = threading.Condition(threading.RLock())
        self._nodes: OrderedDict[Key, Node] = OrderedDict()
        self._failed: OrderedDict[Key, BaseException] = OrderedDict()
        self._holds: dict[str, _Hold] = {}
        self._doubts: OrderedDict[str, tuple[int, SafepointError]] = OrderedDict()
        self._doubtful: OrderedDict[tuple[str, str], SafepointError] = OrderedDict()
        self._blocks: dict[str, dict[Any, int]] = {}
        self._turns: OrderedDict[str, int] = OrderedDict()
        self._seen: OrderedDict[tuple[str, str], None] = OrderedDict()
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

    def saw(self, thread: str, ns: str) -> None:
        """A graph has asked for a namespace: so it keeps its checkpoints here."""
        with self._changed:
            self._seen[thread, ns] = None
            self._seen.move_to_end((thread, ns))
            while len(self._seen) > 64 * REMEMBERED:
                self._seen.popitem(last=False)

    def has_seen(self, thread: str, ns: str) -> bool:
        with self._changed:
            return (thread, ns) in self._seen

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

    def known(self, key: Key) -> bool:
        """Whether the outcome of a put is known."""
        with self._changed:
            return key in self._nodes or key in self._failed

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

    # -- calls of which nobody knows whether they happened

    def doubt(self, thread: str, task: str, error: SafepointError) -> None:
        """A task of a run has come upon one. Whatever the node makes of the error, the run puts nothing more."""
        with self._changed:
            self._doubts[thread] = (moment(), error)
            self._doubts.move_to_end(thread)
            self._doubtful[thread, task] = error
            for table in (self._doubts, self._doubtful):
                while len(table) > 64 * REMEMBERED:
                    cast(OrderedDict[Any, Any], table).popitem(last=False)

    def settle(self, thread: str, task: str) -> None:
        """The task is done anew: in another run, or by a retry."""
        with self._changed:
            self._doubtful.pop((thread, task), None)

    def refuse_doubtful(self, thread: str, *, born: int | None = None, task: str | None = None) -> None:
        """Raise that error for a put of the same run, and for writes of the same task."""
        found = self._doubtful.get((thread, task)) if task is not None else None
        if born is not None and thread in self._doubts and self._doubts[thread][0] >= born:
            found = self._doubts[thread][1]
        if found is not None:
            raise found

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

    # -- blocks that have a thread to themselves

    def shut(self, thread: str, block: Any, inside: Collection[Any]) -> None:
        """Let nobody but ``block``, and what is in it, put to the thread; LeaseHeld if another block of this process has it."""
        with self._changed:
            self.admit(thread, inside)
            self._blocks.setdefault(thread, {})[block] = to_us(now())

    def open(self, thread: str, block: Any) -> None:
        with self._changed:
            blocks = self._blocks.get(thread, {})
            blocks.pop(block, None)
            if not blocks:
                self._blocks.pop(thread, None)

    def admit(self, thread: str, inside: Collection[Any]) -> None:
        """LeaseHeld unless no block has the thread, or one that the caller is in."""
        with self._changed:
            blocks = self._blocks.get(thread)
            if not blocks or any(block in inside for block in blocks):
                return
            since = min(blocks.values())
        raise holder.lease_held(thread, holder.describe("langgraph"), since)

    # -- leases that this saver holds

    def standing(self, thread: str) -> tuple[int, Guard | None]:
        """The guard of now, and a number that tells whether it was another one at any time since."""
        with self._changed:
            hold = self._holds.get(thread)
            return self._turns.get(thread, 0), None if hold is None or hold.grant is None else hold.grant.guard

    def settled(self, thread: str) -> int:
        """That number, once nobody is taking the thread or giving it back."""
        with self._changed:
            hold = self._holds.get(thread)
        with nullcontext() if hold is None else hold.lock:
            return self.standing(thread)[0]

    def take(self, thread: str, acquire: Callable[[], Grant], doubts: Callable[[], tuple[CallRow, ...]] = tuple) -> Grant:
        """Hold a thread, together with whoever of this process holds it already. ``give`` has to follow."""
        with self._changed:
            hold = self._holds.setdefault(thread, _Hold())
            hold.users += 1
        try:
            with hold.lock:
                if hold.grant is None:
                    hold.doubts = doubts()
                    grant = acquire()
                    hold.since, hold.status = time.monotonic(), "waiting" if hold.doubts else "idle"
                    self._turn(thread, hold, grant)
                assert hold.grant is not None
                return hold.grant
        except BaseException:
            self._less(thread, hold)
            raise

    def give(self, thread: str, release: Callable[[Grant, str], None], status: str) -> None:
        """``status`` is what the thread is to be left as: of all that held it together, "waiting" stands before "idle"."""
        hold = self._holds.get(thread)
        if hold is None:
            return  # in a forked child, which holds nothing
        with hold.lock:  # over the release, too: who takes the thread meanwhile waits for it
            if status != "idle":
                hold.status = status
            if self._less(thread, hold, last=False) and hold.grant is not None:
                grant = hold.grant
                try:
                    release(grant, hold.status)
                finally:
                    self._turn(thread, hold, None)
            self._drop(thread, hold)

    def _turn(self, thread: str, hold: _Hold, grant: Grant | None) -> None:
        with self._changed:
            hold.grant = grant
            self._turns[thread] = self._turns.get(thread, 0) + 1
            self._turns.move_to_end(thread)
            while len(self._turns) > 64 * REMEMBERED:
                self._turns.popitem(last=False)

    def _less(self, thread: str, hold: _Hold, *, last: bool = True) -> bool:
        """One user less; whether it was the last."""
        with self._changed:
            hold.users -= 1
            if last:
                self._drop(thread, hold)
            return not hold.users

    def _drop(self, thread: str, hold: _Hold) -> None:
        with self._changed:
            if not hold.users and hold.grant is None and self._holds.get(thread) is hold:
                del self._holds[thread]

    def doubts(self, thread: str) -> tuple[CallRow, ...]:
        """The calls that were in doubt when the hold began."""
        hold = self._holds.get(thread)
        return () if hold is None else hold.doubts

    def since(self, thread: str) -> float:
        """When the hold began, on this machine's clock."""
        hold = self._holds.get(thread)
        return time.monotonic() if hold is None else hold.since


class _Hold:
    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.users = 0
        self.grant: Grant | None = None
        self.since = 0.0
        self.status = "idle"
        self.doubts: tuple[CallRow, ...] = ()

"""The connections of one store in this process: opened when they are needed, kept for the next, made anew after a fork.

Small and our own, as three things matter here: why no connection could be had (a wrong password is no full pool), that a forked
child touches none of its parent's, and that no thread of a pool's has to be there.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from safepoint.errors import Unavailable, UsageError
from safepoint.stores.forking import each_at_fork
from safepoint.stores.postgres.link import Link

__all__ = ["Pool"]

IDLE = 240.0
"""Seconds after which an unused connection is not trusted any more: firewalls forget them without a word."""

LOOK = 0.1
"""Seconds between two looks for a free place: one that is collected tells nobody."""

_inherited: list[Link] = []
"""Links of the parent, kept for good: ending one of them in this process would end it for the parent too."""


class _Place:
    """Somebody is opening a connection."""


class Pool:
    """At most ``size`` connections. ``connect`` opens one before a moment of ``time.monotonic``."""

    def __init__(self, connect: Callable[[float], Link], size: int) -> None:
        self._connect = connect
        self.size = size
        self._start_over()
        self.closed = False
        self._torn = False
        each_at_fork(self)

    def _start_over(self) -> None:
        # Entered by itself and not by the condition, whose own ``with`` is Python code: Ctrl-C in its middle would leave it locked.
        self._lock = threading.RLock()
        self._free = threading.Condition(self._lock)
        self._idle: list[Link] = []
        # Weakly: what an interrupt made nobody give back, nobody has. It is closed when it is collected, and its place is free.
        self._lent: weakref.WeakSet[Link] = weakref.WeakSet()
        self._opening: weakref.WeakSet[_Place] = weakref.WeakSet()

    def after_fork(self) -> None:
        links = [*self._idle, *self._lent]
        # The one thread that there is here has its parent's identity. What others were in the middle of is not this process's.
        self._torn = self._torn or any(link.borrower == threading.get_ident() for link in links)
        self._start_over()
        forget(links)

    def _full(self) -> bool:
        if len(self._idle) + len(self._lent) + len(self._opening) < self.size:
            return False
        # Counted one by one: an interrupt may have come when a set was told of an end.
        return len(self._idle) + len(list(self._lent)) + len(list(self._opening)) >= self.size

    def take(self, end: float) -> Link:
        with self._lock:
            while True:
                if self.closed:
                    raise _closed()
                if self._torn:
                    raise UsageError(
                        "the store cannot be used in this process",
                        "it was forked in the middle of a transaction",
                        "Open a store of its own in the child.",
                    )
                if self._idle:
                    link = self._idle.pop()
                    if self._is_usable(link):
                        self._lent.add(link)
                        return link
                    link.drop()
                    continue
                if not self._full():
                    place = _Place()
                    self._opening.add(place)
                    break
                if (left := end - time.monotonic()) <= 0:
                    raise Unavailable(
                        f"all {self.size} connections of this store are in use",
                        "none became free in time",
                        "Open it with a larger pool=, or use fewer threads.",
                    )
                self._free.wait(min(left, LOOK))
        try:
            link = self._connect(end)
            with self._lock:
                if self.closed:
                    link.drop()
                    raise _closed()
                self._lent.add(link)
            return link
        finally:
            with self._lock:
                self._opening.discard(place)
                self._free.notify()

    def give(self, link: Link) -> None:
        """Take it back; it is closed if it is in the middle of something."""
        if link.owner != os.getpid():
            return  # a forked child in the middle of its parent's call
        link.lent, link.borrower = False, None
        with self._lock:
            mine = link in self._lent
            self._lent.discard(link)
            if mine and link.idle and not self.closed:
                link.used = time.monotonic()
                self._idle.append(link)
            else:
                link.drop()
            self._free.notify()

    def _is_usable(self, link: Link) -> bool:
        try:
            return link.idle and time.monotonic() - link.used < IDLE and link.is_quiet()
        except OSError:
            return False

    def close(self) -> None:
        """For good. Those that are in use are closed when they come back."""
        with self._lock:
            self.closed = True
            while self._idle:
                self._idle.pop().drop()
            self._free.notify_all()

    def __del__(self) -> None:
        # Nobody has the store any more: its idle connections must not wait for the garbage collector to be told.
        for link in self.__dict__.get("_idle", ()):
            if link.owner == os.getpid():
                link.drop()


def forget(links: list[Link]) -> None:
    """In a forked child: let go of the sockets that it inherited, without a word to the server.

    A copy of a socket that stays open would keep the parent's session alive after the parent's death, with all that it has locked.
    Its number stays taken: libpq still knows it.
    """
    if not links:
        return
    nothing = os.open(os.devnull, os.O_RDWR)
    try:
        for link in links:
            socket: Any = -1 if link.closed else link.pgconn.socket
            if socket >= 0:
                os.dup2(nothing, socket, inheritable=False)
    finally:
        os.close(nothing)
    _inherited.extend(links)


def _closed() -> UsageError:
    return UsageError("the store is closed", "", "Open it again.")

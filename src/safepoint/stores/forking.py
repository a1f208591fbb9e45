"""What a fork must do to locks and connections, in one fixed order for the whole library.

A forked child holds a copy of every lock as it was, held or free, and of every connection, without the kernel locks that
protect it. So before a fork each lock registered here is taken, outermost first, and afterwards given back on both sides.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Protocol

__all__ = ["at_fork", "each_at_fork"]


class Lock(Protocol):
    def acquire(self) -> bool: ...

    def release(self) -> None: ...


class Forked(Protocol):
    """What is made anew in a forked child, with locks of its own: no thread of the parent's is there to give one back."""

    def after_fork(self) -> None: ...


_locks: list[tuple[Lock, Callable[[], None]]] = []
_each: weakref.WeakSet[Forked] = weakref.WeakSet()


def at_fork(lock: Lock, in_child: Callable[[], None]) -> None:
    """Hold ``lock`` over every fork, and call ``in_child`` in the child before it is given back.

    For locks that are held for microseconds only, and while which no other lock is taken.
    """
    _locks.append((lock, in_child))


def each_at_fork(one: Forked) -> None:
    """Call ``one.after_fork()`` in every forked child, as long as it lives."""
    _each.add(one)


def _before() -> None:
    for lock, _ in _locks:
        lock.acquire()


def _after_in_parent() -> None:
    for lock, _ in reversed(_locks):
        lock.release()


def _after_in_child() -> None:
    for lock, in_child in reversed(_locks):
        in_child()
        lock.release()
    for one in list(_each):
        one.after_fork()


os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)

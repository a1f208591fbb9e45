"""Connections to one server: few, kept, each lent to one thread at a time, and never handed on with half an answer in it.

redis-py makes them, with all that logging in and TLS take; its own pools wait and try again by rules of their own, while a verb here has one time in which it must end.
"""

from __future__ import annotations

import select
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from redis.exceptions import RedisError

from safepoint.stores.redis.wire import left, packed, replies

__all__ = ["Exhausted", "Lost", "Pool", "Unsent"]


class Unsent(Exception):
    """Nothing of the request was sent; the cause tells why."""


class Exhausted(Unsent):
    """All connections were in use until the time was over."""


class Lost(Exception):
    """The request was sent, at least in part, and there is no answer; the cause tells why."""


class _Loan:
    """A connection while somebody has it. Apart from redis-py's own object, which refers to itself and is collected late: by then
    its place has long been free. (No finalizer closes it sooner: that would run after each request, and Ctrl-C in it is lost.)"""

    __slots__ = ("__weakref__", "connection")

    def __init__(self, connection: Any) -> None:
        self.connection = connection


class Pool:
    """At most ``most`` connections that ``make`` makes."""

    def __init__(self, make: Callable[[], Any], most: int) -> None:
        self._make = make
        self._most = most
        # Entered by itself and not by the condition, whose own ``with`` is Python code: Ctrl-C in its middle would leave it locked.
        self._lock = threading.RLock()
        self._free = threading.Condition(self._lock)
        self._idle: list[Any] = []
        # Weakly: what an interrupt made nobody give back, nobody has, and its place is free.
        self._lent: weakref.WeakSet[_Loan] = weakref.WeakSet()
        self._closed = False
        self.answers = True
        """Whether the server answered when it was last asked."""

    def exchange(self, commands: Sequence[Sequence[Any]], deadline: float) -> list[Any]:
        """Send these, and return their answers; a ``Refused`` is in its place among them.

        Raises:
            Unsent, Lost: see there.
        """
        pieces = packed(commands)
        loan = self._take(deadline)
        connection = loan.connection
        clean = False
        try:
            self._connect(connection, deadline)
            sock = connection._sock
            try:
                sock.settimeout(left(deadline))
                for piece in pieces:
                    sock.sendall(piece)
                answers = replies(sock, len(commands), deadline)
            except (OSError, ValueError) as error:
                raise Lost from error
            clean = True
            return answers
        finally:
            self.answers = clean
            # Also after Ctrl-C: an answer that is still to come would be taken for that of the next request.
            if not clean:
                connection.disconnect()
            self._give(loan)

    def _connect(self, connection: Any, deadline: float) -> None:
        connection.socket_connect_timeout = connection.socket_timeout = left(deadline)
        try:
            if connection._sock is not None and _is_stale(connection):
                connection.disconnect()
            connection.connect()
        except (RedisError, OSError) as error:
            raise Unsent from error

    def _take(self, deadline: float) -> _Loan:
        with self._lock:
            while True:
                if self._closed:
                    raise Unsent("it was closed meanwhile")
                if self._idle or not self._full():
                    loan = _Loan(self._idle.pop() if self._idle else self._make())
                    self._lent.add(loan)
                    return loan
                if (rest := deadline - time.monotonic()) <= 0:
                    raise Exhausted(f"all {self._most} connections are in use")
                self._free.wait(min(rest, 0.1))

    def _full(self) -> bool:
        # Counted one by one: an interrupt may have come when the set was told of an end.
        return len(self._lent) >= self._most and len(list(self._lent)) >= self._most

    def _give(self, loan: _Loan) -> None:
        with self._lock:
            self._lent.discard(loan)
            if self._closed:
                loan.connection.disconnect()
            else:
                self._idle.append(loan.connection)
            self._free.notify()

    def forget(self) -> None:
        """Close what is idle: the server is another one by now, or was started again."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.disconnect()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._free.notify_all()
        self.forget()


def _is_stale(connection: Any) -> bool:
    """Whether the server has hung up, or said something that nobody asked for. Found out before a request is sent: after it,
    nobody would know whether it was received."""
    try:
        if isinstance(connection._sock, ssl.SSLSocket):
            # There may be something to read that is nobody's answer: keys for the next session.
            return bool(connection.can_read(0))
        poll = select.poll()
        poll.register(connection._sock, select.POLLIN)
        return bool(poll.poll(0))
    except (RedisError, OSError):
        return True

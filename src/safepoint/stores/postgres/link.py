"""One connection to PostgreSQL: with a deadline on every answer, and with refusals while it is lent to a tool.

libpq waits for an answer as long as the connection seems to be there, which is forever where packets vanish. Every wait of
psycopg goes through ``Connection.wait``: there it is bounded, and whatever interrupts it closes the connection, since nobody
knows what of the answer is still on its way.
"""

from __future__ import annotations

import os
import select
import time
import weakref
from collections.abc import Generator
from functools import partial
from typing import Any, TypeVar

import psycopg
from psycopg import pq, sql, waiting

from safepoint.errors import UsageError

__all__ = ["LateError", "Link"]

T = TypeVar("T")

INTERVAL = 0.1
"""Seconds between two looks at the clock, and at what signals have asked for."""
_ENDERS = frozenset({"BEGIN", "START", "COMMIT", "END", "ROLLBACK", "ABORT", "PREPARE TRANSACTION"})

_LASTING = frozenset({"SET", "RESET", "LISTEN", "PREPARE", "LOAD", "DISCARD"})
"""What leaves something in the session after the transaction."""


class LateError(psycopg.OperationalError):
    """The server did not answer in time. The connection is closed; what was asked for may still be done."""


class Link(psycopg.Connection[tuple[Any, ...]]):
    """A connection that never waits beyond ``end``. The clock is ``time.monotonic``; None is without end, for tools."""

    end: float | None = None
    lent = False
    borrower: int | None = None
    """The thread that has it for a while, and may fork in the middle of that."""
    used = 0.0
    spoiled = False
    """A tool has changed the session: nobody else may have it after that."""
    begun_again = False
    """The tool that has it has tried to begin another transaction, which PostgreSQL only warns of."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.owner = os.getpid()
        self._poll: Any = None
        self.cursor_factory = _Cursor
        self.add_notice_handler(partial(_noticed, weakref.ref(self)))

    def wait(self, gen: Generator[Any, Any, T], *args: Any, **kwargs: Any) -> T:
        if os.getpid() != self.owner:
            raise UsageError(
                "a forked child inherited the middle of a transaction", "the connection is its parent's", "Leave it alone."
            )
        if (end := self.end) is None:
            # A tool's statement may run for long: psycopg cancels it if it is interrupted, as its locks would go on with it.
            return super().wait(gen, *args, **kwargs)
        interval = min(INTERVAL, max(0.001, end - time.monotonic()))
        try:
            return waiting.wait(_until(gen, end), self.pgconn.socket, interval)
        except BaseException as error:
            if isinstance(error, LateError) or not isinstance(error, psycopg.Error):
                self.pgconn.finish()
            raise

    def __del__(self, *args: Any) -> None:
        # Without psycopg's warning: it is not for what a forked child has inherited, nor for what an interrupt left to nobody.
        if self.__dict__.get("owner") == os.getpid():
            self.pgconn.finish()

    def is_quiet(self) -> bool:
        """Whether nothing has come in that nobody asked for: an idle connection is told of the server's end."""
        if self._poll is None:
            if not hasattr(select, "poll"):
                return True
            self._poll = select.poll()
            self._poll.register(self.pgconn.socket, select.POLLIN)
        return not self._poll.poll(0)

    @property
    def idle(self) -> bool:
        """Whether the next one may have it."""
        return not self.closed and not self.spoiled and self.pgconn.transaction_status == pq.TransactionStatus.IDLE

    def drop(self) -> None:
        """Close it, whatever it is in the middle of."""
        self.lent = False
        self.pgconn.finish()

    # -- what a tool may not

    def _refuse(self, what: str) -> None:
        if self.lent:
            raise UsageError(
                f"a transactional tool called {what}",
                "its effect and its record are one transaction, which the store ends",
                "Leave it out; conn.transaction() is a savepoint here, and works.",
            )

    def commit(self) -> None:
        self._refuse("commit()")
        super().commit()

    def rollback(self) -> None:
        self._refuse("rollback()")
        super().rollback()

    def close(self) -> None:
        self._refuse("close()")
        super().close()

    def set_autocommit(self, value: bool) -> None:
        self._refuse("set_autocommit()")
        super().set_autocommit(value)


def _noticed(ref: weakref.ref[Link], diagnostic: Any) -> None:
    # Weakly: a connection that nobody has any more is closed at once, and not when the garbage collector gets to it.
    if diagnostic.sqlstate == "25001" and (link := ref()) is not None:
        link.begun_again = True


class _Cursor(psycopg.Cursor[tuple[Any, ...]]):
    """Tells a tool at once what its transaction would turn out to be in the end."""

    def execute(self, query: Any, *args: Any, **kwargs: Any) -> Any:
        link = self.connection
        if isinstance(link, Link) and link.lent:
            _refuse_ending(link, query)
        return super().execute(query, *args, **kwargs)


def _refuse_ending(link: Link, query: Any) -> None:
    text = query.as_string(link) if isinstance(query, sql.Composable) else query
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    words = str(text).replace(";", " ").upper().split(None, 2)[:2]
    to_savepoint = words[:1] == ["ROLLBACK"] and " TO " in f" {' '.join(str(text).upper().split())} "
    if words and words[0] in _LASTING and words[1:] != ["LOCAL"]:
        link.spoiled = True
    if not to_savepoint and words and (words[0] in _ENDERS or " ".join(words) in _ENDERS):
        link._refuse(words[0])


def _until(gen: Generator[Any, Any, T], end: float) -> Generator[Any, Any, T]:
    """The same waits, until ``end`` has passed and nothing has come in: what flows is not cut off in its middle."""
    try:
        state = next(gen)
        while True:
            ready = yield state
            if not ready and time.monotonic() >= end:
                raise LateError("the server did not answer in time")
            state = gen.send(ready)
    except StopIteration as done:
        value: T = done.value
        return value

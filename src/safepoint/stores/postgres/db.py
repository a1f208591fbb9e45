"""Requests to PostgreSQL: on which connection, how often, and what is said if there is no answer.

Each connection is in autocommit, and nothing of a session is relied upon: no prepared statements, no settings that outlive a
transaction. So a pooler that lends server connections for a transaction at a time may lie in between. What is asked for is one
statement, or one transaction that ``read`` or ``write`` begins and ends.
"""

from __future__ import annotations

import math
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import resources
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote, unquote

import psycopg
from psycopg.conninfo import conninfo_to_dict

from safepoint.errors import Damaged, SafepointError, Unavailable, UsageError
from safepoint.stores.postgres import schema as schemas
from safepoint.stores.postgres.errors import is_lost, may_pass, refused_login, translate
from safepoint.stores.postgres.link import LateError, Link
from safepoint.stores.postgres.pool import Pool
from safepoint.stores.postgres.rows import COLUMNS
from safepoint.stores.url import redact

__all__ = ["CommitFailed", "Database", "run", "statements", "unknown"]

T = TypeVar("T")
Row = tuple[Any, ...]

FIRST = 0.6
"""The part of ``timeout`` that a first try gets: what is left is for asking again on another connection."""

LONGEST = (1 << 31) - 1
"""What PostgreSQL and libpq can count of anything."""

LAST = 0.02
"""Seconds with which nothing can be begun any more."""


@cache
def statements(name: str) -> dict[str, str]:
    """The statements of a file in sql/, by the names in their ``-- name:`` lines; ``{s}`` stands for the schema."""
    text = (resources.files("safepoint.stores") / "sql" / f"{name}.sql").read_text(encoding="utf-8")
    found = {}
    for part in text.split("-- name:")[1:]:
        key, _, statement = part.partition("\n")
        lines = [line.partition("--")[0] for line in statement.splitlines()]
        found[key.strip()] = " ".join(" ".join(lines).split()).removesuffix(";")
    return found


_DURABLE = "SELECT set_config('synchronous_commit', 'on', true) WHERE current_setting('synchronous_commit') = 'off'"
"""A role or database may have it off by default, and some like to wait for more than this: it is only ever raised."""


class CommitFailed(Exception):
    """An error came out of COMMIT: whether the transaction landed is not known. ``cause`` says what was heard."""

    refused = False
    """The server itself has said that it was rolled back."""

    def __init__(self, cause: SafepointError) -> None:
        super().__init__(cause)
        self.cause = cause


class _Failure(NamedTuple):
    """What a try ended with."""

    error: SafepointError
    may_pass: bool
    sent: bool
    """Whether it may have been done all the same."""
    late: bool = False
    """It says no more than that time was over."""


class Database:
    """The requests of one store.

    Args:
        own: Names in the URL's query that are the store's, and not libpq's.
    """

    def __init__(self, url: str, *, own: Sequence[str], timeout: float, pool: int, schema: str, sync: bool) -> None:
        self.url = redact(url)
        self.timeout = timeout
        self.schema = schema
        self.sync = sync
        self._info = _conninfo(url, own)
        self._ready = False
        self._pool = Pool(self._connect, pool)
        self.quoted = '"' + schema.replace('"', '""') + '"'
        self._sql: dict[str, dict[str, str]] = {}

    def sql(self, file: str) -> dict[str, str]:
        """The statements of a file, with schema and columns in them."""
        found = self._sql.get(file)
        if found is None:
            found = self._sql[file] = {name: text.format(s=self.quoted, **COLUMNS) for name, text in statements(file).items()}
        return found

    def function(self, name: str, count: int) -> str:
        """The statement that calls a function with so many parameters; its answer is one value."""
        return f"SELECT {_call(f'{self.quoted}.{name}', count)}"

    def columns_of(self, name: str, count: int) -> str:
        """As ``function``, of one whose answer has several columns."""
        return f"SELECT * FROM {_call(f'{self.quoted}.{name}', count)}"

    @property
    def closed(self) -> bool:
        return self._pool.closed

    def refuse_closed(self) -> None:
        if self._pool.closed:
            raise UsageError("the store is closed", "", "Open it again.")

    def close(self) -> None:
        self._pool.close()

    # -- what a store asks for

    def ask(self, statement: str, values: Sequence[Any] = (), *, facts: Mapping[str, Any] | None = None) -> list[Row]:
        """One statement, a transaction of its own, repeated until there is an answer.

        Args:
            facts: For one that writes, and may be repeated without harm: what is told in ``details``, with ``unknown=True``, if
                it may have been done.
        """
        return self.repeat(lambda link: run(link, statement, values), facts)

    def read(self, fn: Callable[[Link], T]) -> T:
        """``fn(link)`` in one snapshot; it changes nothing, so it may be run again."""

        def once(link: Link) -> T:
            link.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            try:
                answer = fn(link)
            finally:
                self.end(link, "ROLLBACK")
            return answer

        return self.repeat(once)

    def write(
        self, fn: Callable[[Link], T], *, again: bool = False, sync: bool = True, facts: Mapping[str, Any] | None = None
    ) -> T:
        """``fn(link)`` in one transaction at READ COMMITTED. It may be run more than once, each time on what there is then.

        Args:
            again: Doing all of it twice is doing it once; so it is repeated also when COMMIT did not answer.
            facts: What is told in ``details``, with ``unknown=True``, if it may have been done: without ``again``, as soon as one
                COMMIT did not answer.
        """

        def once(link: Link) -> T:
            self.begin(link, sync)
            try:
                answer = fn(link)
            except BaseException:
                self.end(link, "ROLLBACK")
                raise
            self.commit(link)
            return answer

        if again:
            return self.repeat(once, facts or {})
        try:
            return self.repeat(once)
        except CommitFailed as failed:
            raise unknown(failed.cause, facts or {}) from failed

    def begin(self, link: Link, sync: bool) -> None:
        """Begin a transaction whose locks are waited for no longer than its answers."""
        how = _DURABLE if sync and self.sync else "SET LOCAL synchronous_commit = off"
        link.execute(f"BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; SET LOCAL lock_timeout = {self.patience(link)}; {how}")

    def commit(self, link: Link) -> None:
        """COMMIT, and whatever goes wrong with it is a CommitFailed."""
        try:
            status = link.execute("COMMIT").statusmessage
        except psycopg.Error as error:
            link.drop()
            failed = CommitFailed(self.translate(error))
            # The server's own word that it was rolled back is one: constraint checks and serialization at COMMIT.
            failed.refused = error.sqlstate is not None and not is_lost(error)
            raise failed from error
        if status != "COMMIT":  # an error inside was swallowed
            raise Unavailable("a transaction was rolled back at its end", "a statement in it had failed", "Do it again.")

    def patience(self, link: Link) -> int:
        """Milliseconds for which the server may wait for locks: a little less than we wait for its answer."""
        left = self.timeout if link.end is None else link.end - time.monotonic()
        return max(1, min(int(left * 900), LONGEST))

    def translate(self, error: psycopg.Error) -> SafepointError:
        return translate(error, self.url, self.schema)

    # -- trying

    def repeat(self, fn: Callable[[Link], T], facts: Mapping[str, Any] | None = None, *, keep: bool = False) -> T:
        """Run ``fn`` on a connection, and on others after it, until it answers or ``timeout`` has passed.

        Args:
            facts: ``fn`` writes, and repeating it is harmless: if a try may have been done and no later one answered, Unavailable
                says so with these in its details. None: it reads, or what it wrote is rolled back where it failed.
            keep: The connection stays lent when ``fn`` has answered.
        """
        end = time.monotonic() + self.timeout
        sent = False
        told: SafepointError | None = None
        pause = 0.01
        part = FIRST
        while True:
            try:
                with self._lend(end, part, keep) as link:
                    return fn(link)
            except CommitFailed as failed:
                if failed.refused:
                    failure = _Failure(failed.cause, True, False)
                elif facts is None:
                    raise
                else:
                    failure = _Failure(failed.cause, True, True)
            except _Unsent as unsent:
                failure = _Failure(unsent.cause, unsent.may_pass, False, unsent.late)
            except psycopg.Error as error:
                failure = _Failure(self.translate(error), may_pass(error), is_lost(error), isinstance(error, LateError))
            except UnicodeDecodeError:
                # The server lets no such text in.
                raise Damaged(
                    "a text in the store is damaged", "it is no UTF-8", "See what is left with safepoint verify."
                ) from None
            part = 1.0
            # A last try in the little time that is left tells nothing, and the one before it may have.
            told = failure.error if told is None or not failure.late else told
            sent = sent or (failure.sent and facts is not None)
            pause = min(pause * 2, 0.5)
            left = end - time.monotonic()
            if not failure.may_pass or left < LAST:
                raise unknown(told, facts) if sent and facts is not None else told
            time.sleep(min(pause * random.uniform(0.5, 1.0), left / 2))

    @contextmanager
    def _lend(self, end: float, part: float, keep: bool) -> Iterator[Link]:
        """A connection of the pool, for this part of the time until ``end``. What goes wrong before it is there is _Unsent."""
        try:
            link = self._pool.take(end)
        except Unavailable as error:
            raise _Unsent(error, may_pass=False) from None
        except psycopg.Error as error:
            raise _Unsent(
                self.translate(error), may_pass=is_lost(error) and not refused_login(error), late=isinstance(error, LateError)
            ) from error
        try:
            now = time.monotonic()
            link.end = now + (end - now) * part
            yield link
        except BaseException:
            self._pool.give(link)
            raise
        if not keep:
            self._pool.give(link)

    @contextmanager
    def lent(self, first: Callable[[Link], T]) -> Iterator[tuple[Link, T]]:
        """A connection for a while, and what ``first(link)`` has answered on it, which is repeated as a read is. After that each
        answer is waited for ``timeout`` seconds, unless ``end`` is changed, and no error is translated."""
        link, answer = self.repeat(lambda link: (link, first(link)), keep=True)
        try:
            link.end, link.borrower = time.monotonic() + self.timeout, threading.get_ident()
            yield link, answer
        finally:
            self._pool.give(link)

    def end(self, link: Link, how: str) -> None:
        """After an error: the connection is of use only if it can be brought out of its transaction."""
        try:
            if not link.closed:
                link.execute(how)
        except psycopg.Error:
            link.drop()

    # -- connecting

    def _connect(self, end: float) -> Link:
        """A new connection, and at the first the tables behind it."""
        link = self.open(end)
        try:
            if not self._ready:
                link.end = end
                schemas.prepare(link, self.schema, self.quoted, self.url)
                self._ready = True
        except BaseException:
            link.drop()
            raise
        return link

    def open(self, end: float) -> Link:
        """A connection outside the pool, that the caller closes.

        Opened by a thread of its own: looking up a host's name cannot be interrupted, and may take a minute.
        """
        opened: list[Link] = []
        failed: list[BaseException] = []
        lock, done = threading.Lock(), threading.Event()
        given_up = False

        def connect() -> None:
            try:
                link = Link.connect(self._info, autocommit=True, prepare_threshold=None, **self._own_parameters(end))
                with lock:
                    if given_up:
                        link.drop()
                    else:
                        opened.append(link)
            except BaseException as error:
                failed.append(error)
            done.set()

        try:
            threading.Thread(target=connect, name="safepoint-connect", daemon=True).start()
        except RuntimeError:  # the interpreter is ending, and starts no more threads
            connect()
        try:
            done.wait(max(0.0, end - time.monotonic()))
        finally:
            with lock:
                if not opened:
                    given_up = True
        if failed:
            raise failed[0]
        if not opened:
            raise LateError("no connection came about in time")
        return opened[0]

    def _own_parameters(self, end: float) -> dict[str, Any]:
        given = conninfo_to_dict(self._info)
        mine: dict[str, Any] = {
            "connect_timeout": max(2, min(math.ceil(end - time.monotonic()), LONGEST)),
            "tcp_user_timeout": max(1000, min(int(self.timeout * 1000), LONGEST)),
            "keepalives": 1,
            "keepalives_idle": 30,
            "keepalives_interval": 5,
            "keepalives_count": 3,
            "application_name": f"safepoint {os.getpid()}",
        }
        return {**{name: value for name, value in mine.items() if name not in given}, "client_encoding": "utf8"}


@cache
def _call(name: str, count: int) -> str:
    return f"{name}({', '.join(['%s'] * count)})"


class _Unsent(Exception):
    """No connection could be had: nothing was sent."""

    def __init__(self, cause: SafepointError, may_pass: bool, late: bool = False) -> None:
        super().__init__(cause)
        self.cause = cause
        self.may_pass = may_pass
        self.late = late


def run(link: Link, statement: str, values: Sequence[Any] = ()) -> list[Row]:
    """One statement and its rows, which come in binary."""
    cursor = link.execute(statement, values or None, binary=True)
    return cursor.fetchall() if cursor.description else []


def unknown(error: SafepointError, facts: Mapping[str, Any]) -> Unavailable:
    what = f"whether the last write to task {facts['task']!r} landed is not known" if "task" in facts else error.what
    remedy = "Read the task again once the store answers." if "task" in facts else "Do it again."
    if facts.get("id"):
        remedy = f"Do it again, or ask for id {facts['id']!r}, once the store answers."
    return Unavailable(what, f"{error.what}: {error.why}", remedy, **facts, unknown=True)


def _conninfo(url: str, own: Sequence[str]) -> str:
    """The URL as libpq takes it: without what in its query is the store's."""
    _, _, rest = url.partition("://")
    place, _, query = rest.partition("?")
    # As it is written: to libpq a + is a plus, and to others a space.
    kept = [pair for pair in query.split("&") if pair and unquote(pair.partition("=")[0]) not in own]
    info = f"postgresql://{place}"
    if kept:
        info += "?" + "&".join(kept)
    escape = "Correct it. In a user and a password, write : / ? # @ and % as %3A, %2F and so on."
    try:
        parsed = conninfo_to_dict(info)
    except psycopg.Error as error:
        names = [name for pair in kept if _is_unknown(name := unquote(pair.partition("=")[0]))]
        if names:
            raise UsageError(
                f"unknown option {names[0]!r} for {redact(url).partition('?')[0]!r}",
                f"it is neither one of libpq's nor one of {', '.join(sorted(own))}",
                "Correct it.",
            ) from None
        raise UsageError(f"{redact(url)!r} is no URL of a PostgreSQL database", _said(error), escape) from None
    # libpq takes the first @ or / for the end of a password, and names the rest of it in its messages as a host or a port.
    hosts, ports = (str(parsed.get(name, "")).split(",") for name in ("host", "port"))
    split = any("@" in host[1:] and host[0] != "/" for host in hosts) or "@" in place.partition("/")[2]
    if split or any(port and not port.isdecimal() for port in ports):
        raise UsageError(f"{redact(url)!r} is no URL of a PostgreSQL database", "its host or port cannot be read", escape)
    return info


def _is_unknown(name: str) -> bool:
    try:
        conninfo_to_dict(f"postgresql:///?{quote(name, safe='')}=1")
    except psycopg.Error:
        return True
    return False


def _said(error: psycopg.Error) -> str:
    # It may quote the URL, and with that a password.
    said = str(error).strip()
    return said if "@" not in said and "passw" not in said else "libpq cannot read it"

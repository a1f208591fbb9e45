"""The lease verbs of the PostgreSQL store: a row with the server's own time at which it ends, renewed in the background.

What a clock proves and what it does not is told in stores/renewing.py. The server cannot see whether a process lives: where a lease
stands in the way it answers by whom it is held, and is asked again with what was found out about that one.
"""

from __future__ import annotations

import os
import secrets
import time
from typing import Any

import psycopg

from safepoint import _probe
from safepoint.errors import Unavailable, UsageError
from safepoint.model import check_id
from safepoint.rows import Grant, Guard, LeaseRow, TaskPatch
from safepoint.stores import holder as people
from safepoint.stores.foreseen import Foreseen
from safepoint.stores.forking import each_at_fork
from safepoint.stores.postgres.commit import patch_names
from safepoint.stores.postgres.db import Database, run
from safepoint.stores.postgres.errors import is_lost
from safepoint.stores.postgres.link import Link
from safepoint.stores.postgres.pool import forget
from safepoint.stores.postgres.rows import ints, texts
from safepoint.stores.renewing import Claim, Renewals, Renewed, asking, clock, is_dead, this_process

__all__ = ["Leases"]


class Leases:
    """Needs ``_db``, ``_foreseen``, ``_renewals`` and ``_beats`` from the store."""

    _db: Database
    _foreseen: Foreseen
    _renewals: Renewals
    _beats: Beats

    def acquire(self, task: str, holder: bytes, *, steal: bool = False) -> Grant:
        check_id(task)
        token = secrets.token_hex(16)
        try:
            with asking(token):
                sent_at, fence, presumed, previous = self._take(task, token, holder, steal)
                _probe.at("acquire.after")
                guard = Guard(fence, token)
                # If it was this store's until now, that run must not act any more.
                self._renewals.lose(task, token)
                return Grant(guard, previous, presumed, self._renewals.claim(task, guard, sent_at))
        except BaseException:
            self._renewals.interrupted(token)
            raise

    def _take(self, task: str, token: str, holder: bytes, steal: bool) -> tuple[float, int, int, str]:
        """Ask until the lease is ours or somebody is in the way. When it was asked for; fence, presumed, previous."""
        dead: str | None = None
        looked: str | None = None
        statement = self._db.columns_of("sp_acquire_1", 10)
        end = time.monotonic() + self._db.timeout
        while True:
            sent_at = clock()

            def once(link: Link, dead: str | None = dead, looked: str | None = looked) -> Any:
                wait = self._db.patience(link)
                given = (task, token, this_process(), holder, self._renewals.lease, steal, dead, looked, wait, self._db.sync)
                return run(link, statement, given)[0]

            word, numbers, names, blobs = self._db.repeat(once, {"task": task})
            if word == "done":
                return sent_at, numbers[0], numbers[1], names[0]
            if word == "over":  # granted to a try that was not answered, and taken over before the next
                raise Unavailable(f"the lease on task {task!r} was over before it was known", "", "Do it again.", task=task)
            there, process = names[0], blobs[0]
            if is_dead(process, there):
                dead = there
            elif numbers[1] and not steal:
                raise people.lease_held(task, blobs[1], numbers[0])
            else:
                looked = there
            if time.monotonic() >= end:
                raise Unavailable(f"the lease on task {task!r} changes hands all the time", "", "Do it again.", task=task)

    def release(self, task: str, grant: Grant, patch: TaskPatch | None = None) -> None:
        given = (patch_names(patch), None, None) if patch is None else (patch_names(patch), patch.raised, patch.input)
        statement = self._db.function("sp_release_1", 8)

        def once(link: Link) -> Any:
            wait = self._db.patience(link)
            return run(link, statement, (task, *grant.guard, wait, self._db.sync, texts(given[0]), *given[1:]))

        if isinstance(grant.handle, Claim):
            grant.handle.leaving = True
        try:
            self._db.repeat(once, {"task": task})
        except Unavailable as error:
            if not error.details.get("unknown"):
                raise
            raise Unavailable(
                f"whether task {task!r} was released is not known", error.why, "Release it again.", task=task, unknown=True
            ) from error
        if isinstance(grant.handle, Claim):
            self._renewals.let_go(grant.handle)
        _probe.at("release.after")

    def abandon(self, task: str, grant: Grant) -> None:
        if isinstance(grant.handle, Claim):
            self._renewals.let_go(grant.handle, silently=True)

    def lease(self, task: str) -> LeaseRow | None:
        found = self._db.ask(self._db.sql("postgres_read")["lease"], (task,)) if _may_be(task) else []
        if not found:
            return None
        fence, token, state, holder, process, acquired_at, presumed, live, until = found[0]
        live = live and state == "held" and not is_dead(process, token)
        return LeaseRow(
            task=task,
            fence=fence,
            token=token,
            lease_id=0,
            state=state,
            holder=holder,
            acquired_at=acquired_at,
            presumed=presumed,
            until=until,
            live=live,
            stopped=live and people.is_stopped(people.read(holder)),
        )

    def holds(self, task: str, guard: Guard) -> bool:
        if self._db.closed:
            raise UsageError("the store is closed", "", "Open it again.")
        return self._renewals.holds(task, guard)

    # -- in the background

    def _renew(self, claims: list[Claim]) -> Renewed:
        statement = self._db.sql("postgres_read")["renew"]
        rows = self._beats.ask(statement, (self._renewals.lease, *_named(claims)), self._renewals.lease / 3)
        return {token for (token,) in rows}, {}

    def _forsake(self, claims: list[Claim]) -> None:
        self._beats.ask(self._db.sql("postgres_read")["forsake"], _named(claims), min(self._renewals.every, self._db.timeout))


class Beats:
    """The connection on which leases are renewed: all others may be waiting, or lent to tools."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._link: Link | None = None
        each_at_fork(self)

    def after_fork(self) -> None:
        if self._link is not None:
            forget([self._link])
        self._link = None

    def ask(self, statement: str, values: Any, seconds: float) -> list[Any]:
        """On the connection that is there, for half of the time; if that one is of no use, on a new one."""
        end = time.monotonic() + seconds
        link = self._link
        try:
            if link is not None and not link.closed and link.is_quiet():
                link.end = end - seconds / 2
                try:
                    return run(link, statement, values)
                except psycopg.Error as error:
                    if not is_lost(error):
                        raise
            self.close()
            self._link = link = self._db.open(end)
            link.end = end
            return run(link, statement, values)
        except psycopg.Error as error:
            self.close()
            raise self._db.translate(error) from error

    def close(self) -> None:
        if self._link is not None:
            self._link.drop()
        self._link = None

    def __del__(self) -> None:
        link = self.__dict__.get("_link")
        if link is not None and link.owner == os.getpid():
            link.drop()


def _named(claims: list[Claim]) -> tuple[Any, Any, Any]:
    return (
        texts([claim.task for claim in claims]),
        ints([claim.guard.fence for claim in claims]),
        texts([claim.guard.token for claim in claims]),
    )


def _may_be(task: str) -> bool:
    return "\0" not in task

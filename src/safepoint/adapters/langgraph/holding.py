"""Who may put to a thread: the lease that a block or a tool holds, and commits made under it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from safepoint.aio import Offload, settled
from safepoint.errors import LeaseHeld, LeaseLost, SafepointError
from safepoint.model import check_id
from safepoint.rows import CallRow, Commit, Committed, Grant, TaskPatch, replace
from safepoint.stores import holder
from safepoint.stores.base import Store

if TYPE_CHECKING:
    from safepoint.adapters.langgraph.records import Records

__all__ = ["Exclusive", "Holding"]

log = logging.getLogger("safepoint")

_inside: ContextVar[frozenset[Exclusive]] = ContextVar("safepoint_langgraph_exclusive", default=frozenset())
"""The blocks that the code is in. LangGraph takes it along into its threads and tasks, so that the puts of a run are known to be in one."""


class Holding:
    """Part of the saver."""

    _records: Records
    _off: Offload

    if TYPE_CHECKING:

        @property
        def store(self) -> Store: ...

    def commit(self, commit: Commit) -> Committed:
        """Commit as whoever holds the thread in this process. Tools take it and give it back while others put: then once more.

        Raises:
            LeaseHeld: somebody else holds the thread, in another process or in a block of this one.
        """
        while True:
            self._records.admit(commit.task, _inside.get())
            turn, guard = self._records.standing(commit.task)
            try:
                return self.store.commit(replace(commit, guard=guard))
            except (LeaseHeld, LeaseLost):
                if self._records.settled(commit.task) == turn:
                    raise

    def exclusive(self, thread_id: Any, *, steal: bool = False) -> Exclusive:
        """Hold a thread for a block (``with`` or ``async with``): until its end, only what is run in it can put to the thread.

        Raises, when the block is entered:
            LeaseHeld: somebody else holds it. A put raises LeaseLost if it was taken over.
        """
        return Exclusive(self, check_id(str(thread_id)), steal)

    def hold(self, thread: str, *, steal: bool = False) -> Grant:
        """Take a thread; ``let_go`` has to follow. For blocks, and for tools while they run."""
        self._records.admit(thread, _inside.get())
        return self._records.take(
            thread, lambda: self.store.acquire(thread, holder.describe("langgraph"), steal=steal), lambda: self._doubts(thread)
        )

    def _doubts(self, thread: str) -> tuple[CallRow, ...]:
        row = self.store.task(thread)
        if row is None or row.status != "waiting":
            return ()
        rows, _ = self.store.calls(thread, bodies=False)
        return tuple(row for row in rows if row.status == "in_doubt")

    def let_go(self, thread: str, status: str = "idle") -> None:
        def release(grant: Grant, status: str) -> None:
            try:
                self.store.release(thread, grant, TaskPatch(status=status))
            except SafepointError as error:
                # What the block did is done. Another process has to find out by itself that nobody holds the thread any more.
                log.warning("thread %s could not be given back: %s", thread, error)
                self.store.abandon(thread, grant)

        self._records.give(thread, release, status)

    async def ahold(self, take: Callable[[], object], give: Callable[[], None]) -> None:
        """Take something on a thread of the saver's. A cancellation that comes meanwhile gives it back before it goes on."""
        job = self._off.submit(take)
        try:
            await settled(job)
        except BaseException:
            if job.done() and not job.cancelled() and job.exception() is None:
                await self.agive(give)
            raise

    async def agive(self, give: Callable[[], None]) -> None:
        """Give it back, whatever comes."""
        await settled(self._off.submit(give), must=True)


class Exclusive:
    """The hold of a thread, for a block."""

    def __init__(self, saver: Holding, thread: str, steal: bool) -> None:
        self._saver, self._thread, self._steal = saver, thread, steal

    def __enter__(self) -> None:
        self._enter(_inside.get())
        _inside.set(_inside.get() | {self})

    def _enter(self, inside: frozenset[Exclusive]) -> None:
        records = self._saver._records
        records.shut(self._thread, self, inside)
        token = _inside.set(inside | {self})
        try:
            self._saver.hold(self._thread, steal=self._steal)
        except BaseException:
            records.open(self._thread, self)
            raise
        finally:
            _inside.reset(token)

    def __exit__(self, *exc: object) -> None:
        _inside.set(_inside.get() - {self})
        self._leave()

    def _leave(self) -> None:
        try:
            self._saver.let_go(self._thread)
        finally:
            self._saver._records.open(self._thread, self)

    async def __aenter__(self) -> None:
        inside = _inside.get()
        await self._saver.ahold(lambda: self._enter(inside), self._leave)
        _inside.set(inside | {self})  # here, and not on that thread: this is where the block is

    async def __aexit__(self, *exc: object) -> None:
        _inside.set(_inside.get() - {self})
        await self._saver.agive(self._leave)

"""How a run lets go of its task: what it keeps of a step that failed, the status that it leaves, the error that it raises."""

from __future__ import annotations

import contextlib
import logging
import os
from typing import TYPE_CHECKING, Any

from safepoint import resources
from safepoint.calling import Flow
from safepoint.codec.states import Control
from safepoint.errors import (
    Conflict,
    DecisionNeeded,
    InDoubt,
    LeaseHeld,
    LeaseLost,
    RunEnded,
    SafepointError,
    StoreFull,
    Unavailable,
    UsageError,
)
from safepoint.model import Checkpoint, State, new_id
from safepoint.rows import Commit, Grant, TaskPatch, TaskRow
from safepoint.rules import journal
from safepoint.script import Io, LoopThread, Script
from safepoint.streaming import close_feeds
from safepoint.tools import Caller, Current, current, live_runs

if TYPE_CHECKING:
    from safepoint.checkpointer import Checkpointer

log = logging.getLogger("safepoint")

NO_FAULT_OF_THE_STEP = (Unavailable, StoreFull, LeaseLost, LeaseHeld, Conflict)
"""Errors that interrupt a task without making it failed."""


def _abandon(store: Any, task: str, grant: Grant, pid: int) -> None:
    if os.getpid() == pid:
        store.abandon(task, grant)


class Ending(Caller):
    """Part of a run."""

    cp: Checkpointer
    task_id: str
    _flow: Flow
    _state: State
    _control: Control
    _task: TaskRow
    _grant: Grant | None
    _loop: LoopThread
    _mine: tuple[int, int | None, str, str]
    _pid: int
    _closed: bool
    _token: Any
    _ended_as: str | None
    _named: str | None = None
    """The named step that is under way."""
    leftovers: tuple[resources.Told, ...] = ()
    """What became of the outside resources that the ended task had left open: where, of what kind, and how."""
    _left_at: int | None = None

    if TYPE_CHECKING:

        def _save(
            self, *, kind: str, label: str | None = None, patch: TaskPatch | None = None, moves_head: bool = True
        ) -> Checkpoint: ...

    def _failed(self, error: BaseException) -> Script[str]:
        """Keep what a failed step looked like as a leaf, best effort. Returns its address, or ''."""
        flow, state = self._flow, self._state
        if state._base is None or flow.ended is not None:
            return ""
        raised = journal.after_raise(
            journal.Raised.decode(self._task.raised), flow.line, flow.step, list(flow.journal.rows.values())
        )
        patch = TaskPatch(status="failed", reason=f"{type(error).__name__} in step {flow.step}", raised=raised.encode())
        try:
            state.step, state.seq, state.branch, state.task_id = self._mine
            leaf = yield Io(lambda: self._save(kind="failure", label=type(error).__name__, patch=patch, moves_head=False))
            return f"{self.task_id}@{leaf.seq}"
        except (Exception, RunEnded) as second:
            # The half-changed state may not be storable: the status still must tell.
            log.warning("could not keep the failed step of %s: %s", self.task_id, type(second).__name__)
        with contextlib.suppress(Exception, RunEnded):
            yield Io(lambda: flow.commit(Commit(task=self.task_id, id=new_id(), guard=flow.guard, patch=patch)))
        return ""

    # -- letting go

    def _release(self, error: BaseException | None, status: str | None = None) -> Script[None]:
        """Let go of the task, leaving the status that ``error`` or ``status`` means."""
        if self._closed or self._grant is None:
            return
        self._closed = True
        interrupt = None
        try:
            live_runs.discard(self)
            self.cp._runs.discard(self)
            if os.getpid() != self._pid:
                return
            interrupt = yield from resources.close_quietly(self)
            flow = getattr(self, "_flow", None)
            if flow is not None:
                yield from close_feeds(flow.feeds)
            patch = TaskPatch(
                status=status or self._last_status(error), reason="" if status or error is None else type(error).__name__
            )
            if flow is not None and not flow.idle_or(lambda: self._let_go(patch)):
                # A thread of the step's own is inside a tool that may still act. Whoever came next would take us for gone.
                log.warning("task %s stays held until %d calls of it have ended", self.task_id, flow.executing)
                return
            yield Io(lambda: self._let_go(patch), must=True)
        except SafepointError as second:
            log.warning(
                "task %s could not be released (%s); its lease ends with this process", self.task_id, type(second).__name__
            )
            self.cp.store.abandon(self.task_id, self._grant)
        except BaseException:
            self.cp.store.abandon(self.task_id, self._grant)
            raise
        yield Io(self._loop.close, must=True)
        if interrupt is not None:
            raise interrupt

    def _let_go(self, patch: TaskPatch) -> None:
        grant = self._grant
        assert grant is not None
        flow = getattr(self, "_flow", None)
        if flow is not None:
            flow.flush_quietly()
        self.cp.store.release(self.task_id, grant, patch)

    def _public(self, error: BaseException | None) -> BaseException | None:
        """What leaving the run raises: an interrupt as it came, else what ended the run, else the error at hand."""
        flow = self._flow
        if flow.interrupt is not None:
            return error if error is not None and not isinstance(error, Exception | RunEnded) else flow.interrupt
        return flow.ended.error if flow.ended is not None else error

    def _last_status(self, error: BaseException | None) -> str | None:
        if isinstance(error, InDoubt | DecisionNeeded):
            return "waiting"
        base = self._state._base if getattr(self, "_state", None) is not None else None
        if self._ended_as is not None:
            return self._ended_as
        if base is not None and base.control.finished:
            return "finished"  # whatever came after the save that said so
        if isinstance(error, Exception) and not isinstance(error, NO_FAULT_OF_THE_STEP):
            return "failed"
        return "interrupted"

    def _abandoned(self, why: str) -> None:
        """The checkpointer closes: the task becomes interrupted."""
        if not self._closed and self._grant is not None:
            for feed in self._flow.feeds:
                feed.drop()
            if self._flow.executing:
                raise UsageError(
                    f"task {self.task_id!r} is executing {self._flow.executing} calls",
                    "closing now would leave their outcome unknown",
                    "Wait for them; or let the process end, and the next one will ask their verifiers.",
                )
            self._closed = True
            live_runs.discard(self)
            with contextlib.suppress(SafepointError):
                self._let_go(TaskPatch(status="interrupted", reason=why))
            self._loop.close()

    def _enter_context(self) -> None:
        self._token = current.set(Current(self))

    def _exit_context(self) -> None:
        if self._token is not None:
            # Left in another context than it was entered in; or Ctrl-C came when it had just been left.
            with contextlib.suppress(ValueError, RuntimeError):
                current.reset(self._token)
            self._token = None

    def _leave(self, error: BaseException | None) -> Script[BaseException | None]:
        """Leave a handle; returns the error that the ``with`` statement should raise instead of its own, if any."""
        if os.getpid() != self._pid:
            return None  # a forked child leaves the parent's run alone
        try:
            public = self._public(error)  # before the leaf is tried, which may find the lease gone
            if self._flow.ended is None and isinstance(error, Exception) and not isinstance(error, NO_FAULT_OF_THE_STEP):
                address = yield from self._failed(error)
                if address:
                    error.add_note(f"safepoint kept the failed step as {address}; resume goes on from the step before.")
        except BaseException as interrupt:
            yield from self._release(interrupt)
            raise
        yield from self._release(public)
        return None if public is error else public

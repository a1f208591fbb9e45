"""Leases for people: who holds which task, and taking one from a holder that will not let go."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

from safepoint.errors import NotFound, SafepointError
from safepoint.model import State, check_id, from_us, now, to_us
from safepoint.rows import Grant, LeaseRow, TaskPatch, TaskRow
from safepoint.stores import holder
from safepoint.stores.base import Store

__all__ = ["HoldingVerbs", "Lease", "give_back"]

log = logging.getLogger("safepoint")


def give_back(store: Store, task_id: str, grant: Grant, patch: TaskPatch | None) -> None:
    """Release, for verbs that hold a task for a moment."""
    try:
        store.release(task_id, grant, patch)
    except BaseException:
        # Nobody is left who could release it: else it would be held, and renewed, for as long as this process lives.
        store.abandon(task_id, grant)
        raise


@dataclass(frozen=True, slots=True)
class Lease:
    """Who holds a task, or held it last and never gave it back."""

    task_id: str
    standing: Literal["live", "stopped", "dead", "expired"]
    """``stopped``: live, and its process is stopped (SIGSTOP, a debugger), as far as that can be seen from here. ``dead``: nobody
    is behind it, which is proven. ``expired``: it was not renewed in time, which proves nothing. The last two are free."""
    fence: int
    since: datetime
    until: datetime | None
    """When it ends unless it is renewed, by the server's clock; None on stores whose leases have no clock."""
    holder: Mapping[str, Any]
    """What the holder says of itself: pid, host, program and more; to be shown, never to be decided on."""

    @property
    def live(self) -> bool:
        """Whether the task is held: nobody else can write it."""
        return self.standing in {"live", "stopped"}


def lease_of(row: LeaseRow | None) -> Lease | None:
    """None if the last holder gave it back, or there never was one."""
    if row is None or row.state != "held":
        return None
    standing: Literal["live", "stopped", "dead", "expired"] = "stopped" if row.stopped else "live"
    if not row.live:
        standing = "dead" if row.until is None or row.until > to_us(now()) else "expired"
    until = None if row.until is None else from_us(row.until)
    return Lease(row.task, standing, row.fence, from_us(row.acquired_at), until, holder.read(row.holder))


class HoldingVerbs:
    """Part of ``Checkpointer``."""

    store: Store

    if TYPE_CHECKING:

        def _load(self, task: str, **selector: Any) -> State | None: ...

        @staticmethod
        def _no_task(task_id: str) -> NotFound: ...

    def leases(self) -> list[Lease]:
        """Who holds which task, by task id; also holders that ended without giving their task back, which is free then."""
        found: list[Lease] = []
        after: str | None = None
        while rows := self.store.tasks(after=after, limit=200):
            # A task that no run ever held needs no question of its own.
            seen = [lease_of(self.store.lease(row.task)) for row in rows if row.status != "idle"]
            found += [lease for lease in seen if lease is not None]
            after = rows[-1].task
        return found

    def release(self, task_id: str) -> Lease | None:
        """Take a task from its live holder by force, and leave it as a crash would: ``interrupted``, for the next resume.

        For people. From now on the old holder can write nothing: its run ends with ``LeaseLost`` at its next call or save. It is
        presumed dead, which is not proven: a call that it is in the middle of may still take effect, so a ``write`` of it is
        believed undone only where ``NotDone`` is final (docs/journal.md). To end the process is better where that can be done.

        Returns:
            Whom it was taken from; None if nobody holds it, and then nothing was changed.

        Raises:
            NotFound: no such task.
        """
        store = self.store
        before = store.task(check_id(task_id))
        if before is None:
            raise self._no_task(task_id)
        row = store.lease(task_id)
        lease = lease_of(row)
        if lease is None or not lease.live:
            return None
        grant = store.acquire(task_id, holder.describe("safepoint release"), steal=True)
        who = f"pid {lease.holder.get('pid', '?')} on {lease.holder.get('host', '?')}"
        taken = grant.previous == "presumed_dead"
        status = "interrupted" if before.status == "running" else before.status
        try:
            if not taken:  # it ended by itself just now, and what it said of the end is written over
                status = self._ended(task_id, before)
        finally:
            reason = f"taken from {who} by force" if taken else ""
            give_back(store, task_id, grant, TaskPatch(status=status, reason=reason))
        if not taken:
            return None
        log.warning("task %s was taken from %s by force (fence %d)", task_id, who, lease.fence)
        return lease

    def _ended(self, task_id: str, before: TaskRow) -> str:
        try:
            state = self._load(task_id)
        except SafepointError:
            return "interrupted"  # what is wrong with it, the next resume says
        if state is not None and state._base.control.finished:
            return "finished"
        row = self.store.task(task_id) or before
        return "waiting" if row.in_doubt + row.open_pauses else "interrupted"

"""The verbs that keep and remove: pins, cleanup, retention at save time, the end of a task's data."""

from __future__ import annotations

import logging
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

from safepoint.checking import check_number
from safepoint.errors import NotFound
from safepoint.model import CleanupReport, Retention, check_id, now
from safepoint.rules import retention
from safepoint.stores.base import Store

log = logging.getLogger("safepoint")


class KeepingVerbs:
    """Part of ``Checkpointer``."""

    store: Store
    retention: Retention

    if TYPE_CHECKING:

        @staticmethod
        def _no_task(task_id: str) -> NotFound: ...

    def pin(self, task_id: str, seq: int) -> None:
        """Keep a checkpoint whatever retention says. NotFound if there is none."""
        self._pin(task_id, seq, True)

    def unpin(self, task_id: str, seq: int) -> None:
        """Let retention have a checkpoint again. NotFound if there is none."""
        self._pin(task_id, seq, False)

    def _pin(self, task_id: str, seq: int, pinned: bool) -> None:
        check_number("pin" if pinned else "unpin", "seq", seq)
        if not self.store.pin(check_id(task_id), seq, pinned):
            raise NotFound(f"task {task_id!r} has no checkpoint {seq}", "", f"See `safepoint log {task_id}`.", task=task_id)

    def cleanup(
        self,
        task_id: str,
        *,
        keep_latest: int | None = None,
        max_age: timedelta | None = None,
        max_bytes: int | None = None,
        keep_milestones: bool | None = None,
        keep_failures: int | None = None,
        dry_run: bool = False,
    ) -> CleanupReport:
        """Delete what the given limits let go, or what the checkpointer's own retention does if none is given.

        Never deleted: heads, fork points, pinned checkpoints, and what calls and pauses stand on that are open or that a
        resume would read.
        """
        rules = (
            self.retention
            if keep_latest is None and max_age is None and max_bytes is None
            else Retention(keep_latest, max_age, max_bytes)
        )
        if keep_milestones is not None:
            rules = replace(rules, keep_milestones=keep_milestones)
        if keep_failures is not None:
            rules = replace(rules, keep_failures=keep_failures)
        if self.store.task(check_id(task_id)) is None:
            raise self._no_task(task_id)
        headers = self.store.headers(task_id)
        gone = retention.due(headers, rules, now(), self._kept(task_id))
        pruned = self.store.prune(task_id, gone, dry_run=dry_run)
        return CleanupReport(
            task_id=task_id,
            deleted=pruned.seqs,
            kept=len(headers) - len(pruned.seqs),
            calls_deleted=pruned.calls,
            objects_deleted=pruned.objects,
            bytes_freed=pruned.bytes,
            dry_run=dry_run,
        )

    def _kept(self, task_id: str) -> set[int]:
        return {n for b in self.store.branches(task_id) for n in (b.head.seq, b.forked_from) if n is not None}

    def _retain(self, task_id: str, seq: int) -> None:
        """Retention at save time. The save stands already, so a failure here is logged and left to the next one."""
        rules = self.retention
        if rules.keeps_all or seq % retention.look_every(rules):
            return
        try:
            headers = self.store.headers(task_id)
            gone = retention.due(headers, rules, now(), self._kept(task_id))
            if gone and retention.worth_it(len(gone), rules.keep_latest or 1, self.store.live_objects(task_id)):
                self.store.prune(task_id, gone)
        except Exception as error:
            log.warning("retention of task %s was put off: %s", task_id, type(error).__name__)

    def delete_task(self, task_id: str) -> None:
        """Remove a task with all its checkpoints, calls and pauses.

        Raises:
            NotFound: no such task. LeaseHeld: a live run holds it.
        """
        if not self.store.delete_task(check_id(task_id)):
            raise self._no_task(task_id)

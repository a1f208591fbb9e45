"""Async twins of the verbs that not every program needs: part of ``AsyncCheckpointer``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from datetime import timedelta

    from safepoint.aio import Offload
    from safepoint.branching import Journal
    from safepoint.checkpointer import Checkpointer
    from safepoint.doctoring import Doctor
    from safepoint.holding import Lease
    from safepoint.integrity import Repair
    from safepoint.model import Checkpoint, StoreCleanup
    from safepoint.moving import CopyReport, ExportReport, ImportReport, OnProgress
    from safepoint.portable_io import Target
    from safepoint.rules.diffing import Diff
    from safepoint.rules.planning import Branch, Plan
    from safepoint.rules.verifying import Verification
    from safepoint.stores.base import Store


class MoreAsyncVerbs:
    """Each is the verb of the same name of ``Checkpointer``, awaited."""

    sync: Checkpointer
    _off: Offload

    async def plan(
        self,
        task_id: str,
        *,
        recover: str = "auto",
        health: Any = (),
        requires: Any = (),
        fresh_start: bool = False,
        candidates: int = 5,
    ) -> Plan:
        return await self._off(
            lambda: self.sync.plan(
                task_id, recover=recover, health=health, requires=requires, fresh_start=fresh_start, candidates=candidates
            )
        )

    async def rewind(
        self, task_id: str, seq: int | None = None, *, branch: str | None = None, journal: Journal = "inherit"
    ) -> Checkpoint:
        return await self._off(lambda: self.sync.rewind(task_id, seq, branch=branch, journal=journal))

    async def fork(
        self, task_id: str, seq: int | None = None, *, name: str | None = None, journal: Journal = "inherit"
    ) -> Checkpoint:
        return await self._off(lambda: self.sync.fork(task_id, seq, name=name, journal=journal))

    async def branches(self, task_id: str) -> list[Branch]:
        return await self._off(lambda: self.sync.branches(task_id))

    async def raw(
        self, task_id: str, *, seq: int | None = None, branch: str | None = None, id: str | None = None
    ) -> dict[str, Any]:
        return await self._off(lambda: self.sync.raw(task_id, seq=seq, branch=branch, id=id))

    async def diff(self, task_id: str, a: int | str, b: int | str | None = None, *, task_b: str | None = None) -> Diff:
        return await self._off(lambda: self.sync.diff(task_id, a, b, task_b=task_b))

    async def copy_to(
        self,
        other: Any,
        task_id: str | None = None,
        *,
        skip_damaged: bool = False,
        held: Literal["copy", "refuse"] = "copy",
        progress: OnProgress | None = None,
    ) -> CopyReport:
        """``progress`` is called on a thread."""
        return await self._off(
            lambda: self.sync.copy_to(other, task_id, skip_damaged=skip_damaged, held=held, progress=progress)
        )

    async def export(
        self, task_id: str, path_or_file: Target, *, seq: int | None = None, progress: OnProgress | None = None
    ) -> ExportReport:
        """``progress`` is called on a thread."""
        return await self._off(lambda: self.sync.export(task_id, path_or_file, seq=seq, progress=progress))

    async def import_(
        self, path_or_file: Target, *, task_id: str | None = None, progress: OnProgress | None = None
    ) -> ImportReport:
        """``progress`` is called on a thread."""
        return await self._off(lambda: self.sync.import_(path_or_file, task_id=task_id, progress=progress))

    async def verify(self, task_id: str | None = None, *, progress: OnProgress | None = None) -> Verification:
        """``progress`` is called on a thread."""
        return await self._off(lambda: self.sync.verify(task_id, progress=progress))

    async def repair(
        self,
        task_id: str | None = None,
        *,
        into: str | Store | None = None,
        in_place: bool = False,
        progress: OnProgress | None = None,
    ) -> Repair:
        """``progress`` is called on a thread."""
        return await self._off(lambda: self.sync.repair(task_id, into=into, in_place=in_place, progress=progress))

    async def doctor(self, task_id: str) -> Doctor:
        return await self._off(lambda: self.sync.doctor(task_id))

    async def leases(self) -> list[Lease]:
        return await self._off(self.sync.leases)

    async def release(self, task_id: str) -> Lease | None:
        return await self._off(lambda: self.sync.release(task_id))

    async def close_leftovers(self, task_id: str) -> tuple[tuple[str, str, str], ...]:
        return await self._off(lambda: self.sync.close_leftovers(task_id))

    async def cleanup_all(
        self,
        *,
        keep_latest: int | None = None,
        max_age: timedelta | None = None,
        max_bytes: int | None = None,
        keep_milestones: bool | None = None,
        keep_failures: int | None = None,
        max_store_bytes: int | None = None,
        finished_older_than: timedelta | None = None,
        dry_run: bool = False,
    ) -> StoreCleanup:
        return await self._off(
            lambda: self.sync.cleanup_all(
                keep_latest=keep_latest,
                max_age=max_age,
                max_bytes=max_bytes,
                keep_milestones=keep_milestones,
                keep_failures=keep_failures,
                max_store_bytes=max_store_bytes,
                finished_older_than=finished_older_than,
                dry_run=dry_run,
            )
        )

    async def accept(self, task_id: str, seq: int | None = None) -> Checkpoint | None:
        return await self._off(lambda: self.sync.accept(task_id, seq))

    async def edit(self, task_id: str, fn: Any, *, seq: int | None = None) -> Checkpoint | None:
        """``fn`` is called on a thread."""
        return await self._off(lambda: self.sync.edit(task_id, fn, seq=seq))

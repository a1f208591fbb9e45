"""Removing: prune, pin and delete_task of the PostgreSQL store."""

from __future__ import annotations

from collections.abc import Iterable

from safepoint.rows import Pruned
from safepoint.stores.postgres.db import Database

__all__ = ["Removals"]


class Removals:
    """Needs ``_db`` from the store."""

    _db: Database

    def prune(self, task: str, seqs: Iterable[int], *, space: str = "", dry_run: bool = False, sweep: bool = True) -> Pruned:
        raise NotImplementedError

    def pin(self, task: str, seq: int, pinned: bool, *, space: str = "") -> bool:
        raise NotImplementedError

    def delete_task(self, task: str) -> bool:
        raise NotImplementedError

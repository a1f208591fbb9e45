"""A task as a whole: walk, write_task and set_aside of the PostgreSQL store."""

from __future__ import annotations

from collections.abc import Iterator

from safepoint.rows import Image, Part
from safepoint.stores.postgres.db import Database

__all__ = ["Whole"]


class Whole:
    """Needs ``_db`` from the store."""

    _db: Database

    def walk(self, task: str) -> Iterator[Part]:
        raise NotImplementedError

    def write_task(self, image: Image, *, over: Image | None = None) -> bool:
        raise NotImplementedError

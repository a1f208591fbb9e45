"""Whether a PostgreSQL server is fit for a store."""

from __future__ import annotations

from safepoint.model import Finding
from safepoint.stores.postgres.db import Database

__all__ = ["check"]


def check(db: Database) -> list[Finding]:
    raise NotImplementedError

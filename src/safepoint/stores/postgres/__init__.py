"""Checkpoints in PostgreSQL, shared by many hosts. Needs the extra ``postgres``."""

from __future__ import annotations

from typing import Any

from safepoint.errors import MissingExtra
from safepoint.stores.base import Store

try:
    import psycopg  # noqa: F401
except ModuleNotFoundError as error:
    raise MissingExtra(
        f"the PostgreSQL store needs the package {error.name}", "it is not installed", 'Run: pip install "safepoint[postgres]"'
    ) from error

__all__ = ["from_url"]


def from_url(url: str, options: dict[str, Any]) -> Store:
    """Open the store of a ``postgresql://`` URL. What in its query is none of ``options`` is for libpq."""
    from safepoint.stores.postgres.store import PostgresStore

    return PostgresStore(url, **options)

"""Checkpoints in Redis or Valkey, one server or a cluster, shared by many hosts. Needs the extra ``redis``."""

from __future__ import annotations

from typing import Any

from safepoint.errors import MissingExtra
from safepoint.stores.base import Store

try:
    import redis  # noqa: F401
except ModuleNotFoundError as error:
    raise MissingExtra(
        f"the Redis store needs the package {error.name}", "it is not installed", 'Run: pip install "safepoint[redis]"'
    ) from error

__all__ = ["from_url"]


def from_url(url: str, options: dict[str, Any]) -> Store:
    """Open the store of a ``redis://`` URL. What in its query is none of ``options`` is for redis-py."""
    from safepoint.stores.redis.store import RedisStore

    return RedisStore(url, **options)

"""Tasks in Redis mended in place, what belongs to no task, and copies of a store beside it.

What is taken out of a task goes, as it was found, to a hash of its own: the task's key with ``:q`` after it. There a field ``<when>``
says what was set aside and why, and ``<when> <field>`` has the bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from safepoint.stores.redis.client import Client

__all__ = ["Mends"]


class Mends:
    """Needs ``_client`` and ``_ttl`` from the store."""

    _client: Client
    _ttl: int

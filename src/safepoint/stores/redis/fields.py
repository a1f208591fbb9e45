"""Fields of a task's hash, many at once: rows by number, and what adapters recorded, by the lists that name it.

For whoever looks at much of a task a little at a time. One moment it is not: fields may come and go between two trips.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from safepoint.stores.redis import layout

if TYPE_CHECKING:
    from safepoint.stores.redis.client import Client

__all__ = ["BYTES", "PAGE", "groups", "numbered", "rows_in", "values_of"]

PAGE = 500
"""Rows or objects that are asked for at once."""
BYTES = 500_000
"""About how much a script reads."""


def values_of(client: Client, key: bytes, fields: list[bytes]) -> Iterator[tuple[bytes, bytes | None]]:
    for i in range(0, len(fields), PAGE):
        part = fields[i : i + PAGE]
        yield from zip(part, client.command("HMGET", key, *part), strict=True)


def numbered(client: Client, key: bytes, kind: str, last: int, first: int = 0) -> list[int]:
    """The numbers of the rows of a kind that are there, from a block on."""
    blocks = [b"%s:%d" % (kind.encode(), at) for at in range(first, last // layout.BLOCK + 1)]
    found: list[int] = []
    for at, (_, value) in enumerate(values_of(client, key, blocks), first):
        found += layout.bits(at, value)
    return found


def groups(client: Client, key: bytes) -> list[bytes]:
    """The ``v:`` fields of all checkpoints that something was recorded against."""
    found: list[bytes] = []
    for _, value in values_of(client, key, layout.SHELVES):
        found += layout.shelved(value)
    return found


def rows_in(client: Client, key: bytes, lists: Iterable[bytes]) -> Iterator[list[bytes]]:
    """The ``w:`` fields that each of these ``v:`` fields names."""
    found = list(values_of(client, key, list(lists)))
    pages = {field: layout.pages_of(field, value) for field, value in found}
    beside = dict(values_of(client, key, [page for some in pages.values() for page in some]))
    for field, value in found:
        rows = [row for page in pages[field] for row in layout.listed(field, beside[page], page=True)]
        yield rows + layout.listed(field, value)

"""Which checkpoints of a task in PostgreSQL must stay: what sweeps read of it, so little that a long task does not come along.

The server picks the calls and pauses that may keep something; which of them do is decided by ``rules.retention``, as everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from safepoint.errors import Damaged
from safepoint.rules import retention
from safepoint.stores.renewing import is_dead

if TYPE_CHECKING:
    from safepoint.stores.postgres.db import Database
    from safepoint.stores.postgres.link import Link

__all__ = [
    "BY_INDEX",
    "Needed",
    "Tries",
    "asked",
    "asked_in_order",
    "heads_of",
    "live_fence",
    "needed",
    "plain",
    "prunable",
    "rows_of",
    "table_of",
]


BY_INDEX = "SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off; SET LOCAL enable_sort = off"


class Stood(NamedTuple):
    """A branch, with what it stands on."""

    head_seq: int
    forked_from: int | None
    line: int
    step: int
    current: bool


class Call(NamedTuple):
    base_seq: int
    line: int
    step: int
    status: str
    fence: int


class Pause(NamedTuple):
    base_seq: int
    line: int
    step: int
    status: str


class Needed(NamedTuple):
    kept: set[int]
    begins: dict[int, int]
    """By line, the step from which on its calls are kept."""
    live: int | None
    """The fence of the live run."""


def rows_of(db: Database, link: Link, statement: str, /, **values: Any) -> list[Any]:
    """The rows of a statement of ``postgres_sweep_1.sql``, in the transaction that is open."""
    cursor = link.execute(db.sql("postgres_sweep_1")[statement], values, binary=True)
    return cursor.fetchall() if cursor.description else []


def asked(db: Database, statement: str, /, **values: Any) -> list[Any]:
    """As a transaction of its own, for one that only reads."""
    return db.repeat(lambda link: rows_of(db, link, statement, **values))


def table_of(db: Database, name: str) -> str:
    """A table of the store, as it is named in a statement."""
    return f"{db.quoted}.sp_{name}"


class Tries:
    """The tries of a write that is to be made once: whether the one before has landed, though its COMMIT did not answer.

    What there is does not say: since then somebody may have begun the task anew, or gone on with it.
    """

    def __init__(self) -> None:
        self._last: str | None = None

    def ends(self, link: Link) -> None:
        """Of each try the last words before its COMMIT."""
        self._last = link.execute("SELECT pg_current_xact_id()::text").fetchall()[0][0]

    def landed(self, link: Link) -> bool:
        """Asked under the task's lock, which the try before held to its end."""
        if self._last is None:
            return False
        # A server that took the place of the other one may not have come to such a number yet, and raises an error for it.
        status = (
            "CASE WHEN %(x)s::text::xid8 < pg_snapshot_xmax(pg_current_snapshot()) THEN pg_xact_status(%(x)s::text::xid8) END"
        )
        return link.execute(f"SELECT {status}", {"x": self._last}).fetchall() == [("committed",)]


def asked_in_order(db: Database, statement: str, /, **values: Any) -> list[Any]:
    """As ``asked``, for a page of rows in the order of an index.

    Of a table that was filled a moment ago the server knows nothing yet, and would sort all of a large task for each page.
    """

    def read(link: Link) -> list[Any]:
        link.execute(BY_INDEX)
        return rows_of(db, link, statement, **values)

    return db.read(read)


def prunable(seqs: Iterable[int]) -> set[int]:
    """Without what cannot be a number of a checkpoint."""
    return {seq for seq in seqs if 0 < seq < 1 << 63}


def plain(rows: list[Any]) -> list[Any]:
    """Damaged if a column is of another type than it was made, or empty."""
    for row in rows:
        if None in row:
            raise Damaged(
                "a row of the store is damaged", "a value in it is missing", "See what is left with safepoint verify."
            )
    return rows


def heads_of(db: Database, link: Link, n: int) -> tuple[set[int], dict[int, int], list[retention.At]]:
    """Heads and fork points of all branches, from which step on the calls of each line are kept, and where the heads stand."""
    branches = [Stood._make(row) for row in rows_of(db, link, "branches", n=n)]
    heads = [retention.At(b.line, b.step, b.current) for b in branches]
    kept = {seq for b in branches for seq in (b.head_seq, b.forked_from) if seq is not None}
    return kept, retention.begins(heads), heads


def live_fence(db: Database, link: Link, n: int) -> int | None:
    """The fence of whoever may still write under the lease: also when its time has passed, as long as nobody took it over."""
    for fence, token, process in rows_of(db, link, "holder", n=n):
        if not is_dead(process, token):
            return int(fence)
    return None


def needed(db: Database, link: Link, n: int) -> Needed:
    kept, begins, heads = heads_of(db, link, n)
    live = live_fence(db, link, n)
    from_steps = {"n": n, "lines": list(begins), "steps": list(begins.values())}
    found = rows_of(db, link, "standing_calls", **from_steps, open=sorted(retention.OPEN_CALLS))
    if live is not None:
        found += rows_of(db, link, "newest_call_of", n=n, live=live)
    calls = [Call._make(row) for row in plain(found)]
    pauses = [
        Pause._make(row)
        for row in plain(rows_of(db, link, "standing_pauses", **from_steps, open=sorted(retention.OPEN_PAUSES)))
    ]
    return Needed(kept | retention.stood_on(heads, calls, pauses, live), begins, live)

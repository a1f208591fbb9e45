"""Checkpoints in PostgreSQL, shared by many hosts.

What each rule here prevents was found by trying and is told in docs/stores.md. Writing is in commit, leases in leases, reading in
read, removing in sweep, whole tasks in whole; requests and connections under all of them in db, link and pool.
"""

from __future__ import annotations

from safepoint.errors import SafepointError, UsageError
from safepoint.model import Finding
from safepoint.stores.base import Durability, Store
from safepoint.stores.foreseen import Foreseen
from safepoint.stores.postgres import check
from safepoint.stores.postgres.commit import Commits
from safepoint.stores.postgres.db import Database
from safepoint.stores.postgres.leases import Beats, Leases
from safepoint.stores.postgres.sweep import Removals
from safepoint.stores.postgres.whole import Whole
from safepoint.stores.renewing import Renewals

__all__ = ["PostgresStore"]

OPTIONS = ("timeout", "durability", "lease", "pool", "schema")


class PostgresStore(Leases, Commits, Removals, Whole, Store):
    """A store in one schema of a PostgreSQL database.

    Args:
        url: As libpq takes it; what in its query is this store's own is left out there.
        lease: Seconds for which a run holds its task after its last sign of life.
        pool: Connections at most, besides the one that renews leases.
    """

    persistent = True
    transactional_tools = True
    multi_host = True

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 10.0,
        durability: Durability = "full",
        lease: float = 30.0,
        pool: int = 10,
        schema: str = "safepoint",
    ) -> None:
        if durability not in {"full", "process"}:
            raise UsageError(f"durability={durability!r} is unknown", "", "Use 'full' or 'process'.")
        # It stands in texts, in the bodies of functions and in statements that have parameters, where these would end something.
        if not schema or any(part in schema for part in ("%", "'", "$$", "\0")) or len(schema.encode()) > 63:
            raise UsageError(
                f"schema={schema!r} is no name", "it has 1 to 63 bytes, and no %, ' or $$ in it", "Use another one."
            )
        self._db = Database(url, own=OPTIONS, timeout=timeout, pool=pool, schema=schema, sync=durability == "full")
        self.url = self._db.url
        self.timeout = timeout
        self.durability = durability
        self._foreseen = Foreseen()
        self._beats = Beats(self._db)
        self._renewals = Renewals(lease, self._renew, self._forsake)

    # -- the store itself

    def check(self) -> list[Finding]:
        return check.check(self._db, self._renewals.lease)

    def close(self) -> None:
        if self._db.closed:
            return
        left = self._renewals.stop()
        try:
            if left:
                self._forsake(left)  # free at once: nobody is left who could release them
        except SafepointError:
            pass  # their time will run out
        finally:
            self._beats.close()
            self._db.close()

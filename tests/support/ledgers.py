"""The table that transactional tools of the tests write to: in the database of whichever SQL store they run on."""

from __future__ import annotations

from typing import Any

from tests.support import raw, rawrows

__all__ = ["insert", "make", "table_of"]

_made: list[str] = [""]
"""The table of the store that this process has made one for last."""


def table_of(url: str) -> str:
    """Its name; on PostgreSQL in the store's own schema, with which it goes."""
    return f'"{rawrows.split_postgres(url)[1]}".ledger' if raw.kind_of(url) == "postgres" else "ledger"


def make(cp: Any, columns: str = "key TEXT NOT NULL") -> bool:
    """Make it, if it is not there; False where a store lends no connection."""
    if not cp.store.transactional_tools:
        return False
    _made[0] = table = table_of(cp.store.url)
    create = f"CREATE TABLE IF NOT EXISTS {table} ({columns})"
    if "." in table:  # two at the same moment would both find that it is not there
        create = f"DO $$ BEGIN PERFORM pg_advisory_xact_lock(4711); {create}; END $$"
    with cp.connection() as conn:
        conn.execute(create)
    return True


def insert(connection: Any, **values: Any) -> None:
    """A row, by the connection that a transactional tool was given."""
    (table,) = _made
    marks = ", ".join(["%s" if "." in table else "?"] * len(values))
    connection.execute(f"INSERT INTO {table} ({', '.join(values)}) VALUES ({marks})", tuple(values.values()))

"""What a tool may do with the store's connection: anything with its own tables, nothing with transactions or ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import apsw

from safepoint.errors import UsageError
from safepoint.stores.sqlite_db import Connection

__all__ = ["tool_may"]

_WRITES = {
    apsw.SQLITE_INSERT,
    apsw.SQLITE_UPDATE,
    apsw.SQLITE_DELETE,
    apsw.SQLITE_DROP_TABLE,
    apsw.SQLITE_DROP_INDEX,
    apsw.SQLITE_DROP_TRIGGER,
    apsw.SQLITE_CREATE_TABLE,
    apsw.SQLITE_CREATE_TRIGGER,
    apsw.SQLITE_CREATE_INDEX,
    apsw.SQLITE_ALTER_TABLE,
}
# Those that only tell something; the others could switch off what durability rests on.
_PRAGMAS = {"table_info", "table_xinfo", "table_list", "index_list", "index_info", "index_xinfo", "foreign_key_list"}


@contextmanager
def tool_may(conn: Connection, *, transactions: bool = False) -> Iterator[None]:
    """While the block lasts, refuse what would take the transaction out of the store's hands.

    Setting an authorizer makes SQLite prepare every statement anew, those in apsw's cache too: a "COMMIT" that the store has
    executed a moment ago is refused like any other.
    """

    def authorize(action: int, one: str | None, two: str | None, _database: str | None, _trigger: str | None) -> int:
        if action == apsw.SQLITE_TRANSACTION and not transactions:
            raise UsageError(
                f"a transactional tool must not execute {one}",
                "the library ends the transaction, with the call's record in it",
                "Leave it out; `with connection:` makes a savepoint and works.",
            )
        if action in {apsw.SQLITE_ATTACH, apsw.SQLITE_DETACH}:
            raise UsageError(
                "no other file may be attached to the store's connection",
                "a commit over two files is not atomic in WAL mode",
                "Keep the tables in the store's own database.",
            )
        if action in _WRITES:
            names = (two,) if action == apsw.SQLITE_ALTER_TABLE else (one, two)
            if any(name is not None and name[:3].lower() == "sp_" for name in names if action != apsw.SQLITE_UPDATE) or (
                action == apsw.SQLITE_UPDATE and one is not None and one[:3].lower() == "sp_"
            ):
                raise UsageError("tables named sp_… are the store's own", "a tool wrote to one", "Use another name.")
        if action == apsw.SQLITE_PRAGMA and one is not None and one.lower() not in _PRAGMAS and two is not None:
            raise UsageError(f"PRAGMA {one} is not for tools", "it belongs to the store", "Leave it out.")
        return apsw.SQLITE_OK

    conn.authorizer = authorize
    if not transactions:
        # After SQLite itself has rolled back (disk full), the next statement would commit by itself: nothing may.
        conn.set_commit_hook(_refuse)
    try:
        yield
    finally:
        conn.set_commit_hook(None)
        conn.authorizer = None


def _refuse() -> bool:
    return True

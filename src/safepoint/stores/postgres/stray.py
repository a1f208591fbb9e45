"""What lies in the schema of a PostgreSQL store and belongs to no task, and what is wrong with its tables as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from safepoint.errors import Damaged, SafepointError
from safepoint.rows import Lost
from safepoint.stores.postgres.needed import table_of
from safepoint.stores.postgres.sweep import TABLES
from safepoint.stores.postgres.walk import asked

if TYPE_CHECKING:
    from safepoint.stores.postgres.db import Database

__all__ = ["ALL_TABLES", "strays", "structure"]

ALL_TABLES = ("meta", "tasks", "stages", "quarantine", *TABLES)
SOME = 1000


def strays(db: Database) -> list[Lost]:
    try:
        tables = [name for (name,) in asked(db, "tables", schema=db.schema)]
    except Damaged as error:
        return [Lost("the list of tables", "pg_class", error.why)]
    known = {f"sp_{name}" for name in ALL_TABLES}
    found = [Lost(f"table {name!r}", name, "it is no table of a store", kind="foreign") for name in tables if name not in known]
    for name in TABLES:
        found += _ownerless(db, name)
    return found


def _ownerless(db: Database, name: str) -> Iterator[Lost]:
    """Rows of a table whose task has no row, by task. One look into the index for each task that has rows there."""
    table = table_of(db, name)
    numbers = (
        f"WITH RECURSIVE found (task, nth) AS (SELECT (SELECT min(task) FROM {table} WHERE task > %(after)s), 1"
        f" UNION ALL SELECT (SELECT min(task) FROM {table} t WHERE t.task > found.task), nth + 1 FROM found"
        f" WHERE found.task IS NOT NULL AND nth < {SOME})"
        f" SELECT task, EXISTS (SELECT 1 FROM {table_of(db, 'tasks')} WHERE n = found.task)"
        f" OR EXISTS (SELECT 1 FROM {table_of(db, 'stages')} WHERE n = found.task) FROM found WHERE task IS NOT NULL ORDER BY task"
    )
    after = -(1 << 63)
    try:
        while some := _run(db, numbers, {"after": after}):
            for n in [n for n, owned in some if not owned]:
                ((rows,),) = _run(db, f"SELECT count(*) FROM {table} WHERE task = %(n)s", {"n": n})
                if rows:  # else they were removed meanwhile
                    where, why = f"sp_{name}, task {n}", "no row of sp_tasks has that number"
                    yield Lost(f"{rows} rows of a task that has no row", where, why, kind="stray", first=n, last=n)
            after = some[-1][0]
    except Damaged as error:
        yield Lost(f"rows of sp_{name}", f"sp_{name}, after task {after}", error.why)


def _run(db: Database, statement: str, values: dict[str, Any]) -> list[Any]:
    return db.repeat(lambda link: link.execute(statement, values, binary=True).fetchall())


def structure(db: Database) -> Iterator[Lost]:
    """Tables that are missing, indexes that are not valid; and, where the extension amcheck is there, what it finds."""
    try:
        there = {name for (name,) in asked(db, "tables", schema=db.schema)}
        for name in ALL_TABLES:
            if f"sp_{name}" not in there:
                yield Lost(f"table sp_{name}", db.schema, "it is not there", kind="structure")
        for index, table in asked(db, "bad_indexes", schema=db.schema):
            yield Lost(f"index {index}", table, "it is not valid: REINDEX it", kind="structure")
        if asked(db, "amcheck"):
            for oid, index, table in asked(db, "indexes", schema=db.schema):
                try:
                    asked(db, "check_index", oid=oid)
                except Damaged as error:
                    yield Lost(f"index {index}", table, error.why, kind="structure")
                except SafepointError:
                    return  # not permitted, or nobody answers
    except Damaged as error:
        yield Lost("the structure of the schema", db.schema, error.why, kind="structure")

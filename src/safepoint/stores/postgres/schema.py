"""The tables and functions of the PostgreSQL store: made once, by whoever comes first, and brought up to date.

Two numbers stand in sp_meta. ``schema`` is that of the tables: a store with a newer one is not touched. ``functions`` counts the
files of functions that are installed: a newer library adds its own beside the older ones, under names of their own, and an older
process goes on calling those that it knows.
"""

from __future__ import annotations

import re
import time
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

import psycopg

from safepoint.errors import NewerFormat, UsageError
from safepoint.stores.postgres.errors import grants

if TYPE_CHECKING:
    from safepoint.stores.postgres.link import Link

__all__ = ["FUNCTIONS", "SCHEMA", "parts", "prepare"]

STEPS = ("postgres_1",)
"""The tables, and how each older form of them becomes the next."""
FIRST = 2
"""The schema that the first of them makes. Schema 1 had other columns under the same names of functions; no release ever made it."""
SCHEMA = FIRST - 1 + len(STEPS)
FUNCTIONS = ("postgres_commit_1",)
"""Files of functions, in the order in which they came to be; new ones are added at the end."""
OLDEST = 13
"""The first PostgreSQL that numbers transactions as transactional tools need it."""


def prepare(link: Link, schema: str, quoted: str, url: str) -> None:
    """See that the store is there in a form that this library knows; make it if it is not."""
    if link.info.server_version < OLDEST * 10_000:
        raise UsageError(
            f"{url} is PostgreSQL {link.info.server_version // 10_000}", f"at least {OLDEST} is needed", "Use a newer server."
        )
    if link.info.parameter_status("server_encoding") != "UTF8":
        raise UsageError(
            f"the database of {url} has the encoding {link.info.parameter_status('server_encoding')}",
            "texts of all languages are stored",
            "Use a database with the encoding UTF8.",
        )
    if _is_current(link, schema, quoted, url):
        return
    try:
        _install(link, schema, quoted, url)
    except psycopg.errors.InsufficientPrivilege as error:
        raise UsageError(
            f"the user of {url} may not set up schema {schema!r}",
            error.diag.message_primary or "",
            f"Correct schema=, or open the store once as a user who may create it, and then, as that user: {grants(schema)}",
        ) from None


def _is_current(link: Link, schema: str, quoted: str, url: str) -> bool:
    try:
        tables, functions = _numbers(link, quoted)
    except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
        return False
    if tables > SCHEMA:
        raise NewerFormat(
            f"schema {schema!r} of {url} is of a newer safepoint",
            f"it has version {tables}, this library knows up to {SCHEMA}",
            "Use the newer safepoint; nothing was changed.",
            url=url,
        )
    if 0 < tables < FIRST:
        raise UsageError(
            f"schema {schema!r} of {url} was made by a safepoint that was never released",
            f"it has version {tables}, the first that was released is {FIRST}",
            "Export its tasks with the version that made it, and import them into another schema; nothing was changed.",
            url=url,
        )
    return tables == SCHEMA and functions >= len(FUNCTIONS)


def _numbers(link: Link, quoted: str) -> tuple[int, int]:
    rows = link.execute(f"SELECT key, value FROM {quoted}.sp_meta WHERE key IN ('schema', 'functions')").fetchall()
    found = {key: int(value) for key, value in rows}
    return found.get("schema", 0), found.get("functions", 0)


def _install(link: Link, schema: str, quoted: str, url: str) -> None:
    # Not for longer than its answer is waited for: behind one that changes a table, and waits for a long transaction, all others wait.
    left = 10.0 if link.end is None else link.end - time.monotonic()
    link.execute(
        "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; SET LOCAL client_min_messages = warning;"
        f" SET LOCAL lock_timeout = {max(1, int(min(left, 1_000_000) * 900))}"
    )
    try:
        # One at a time: CREATE … IF NOT EXISTS of two at once fails with a unique violation in the catalogue.
        link.execute("SELECT pg_advisory_xact_lock(hashtextextended('safepoint ' || %s, 0))", (schema,))
        if not link.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", (schema,)).fetchall():
            link.execute(f"CREATE SCHEMA {quoted}")
        there = link.execute("SELECT to_regclass(%s) IS NOT NULL", (f"{quoted}.sp_meta",)).fetchall()[0][0]
        tables, functions = _numbers(link, quoted) if there else (0, 0)
        if there and _is_current(link, schema, quoted, url):
            link.execute("ROLLBACK")
            return
        for name in (*STEPS[max(0, tables - FIRST + 1) :], *FUNCTIONS[functions:]):
            link.execute(text(name).format(s=quoted))
        link.execute(
            f"INSERT INTO {quoted}.sp_meta (key, value) VALUES ('schema', '{SCHEMA}'), ('functions', '{len(FUNCTIONS)}')"
            " ON CONFLICT (key) DO UPDATE SET value = excluded.value"
        )
        link.execute("COMMIT")
    except BaseException:
        if not link.closed:
            link.execute("ROLLBACK")
        raise


@cache
def parts() -> tuple[str, ...]:
    """The tables, and the functions with () after them, that this library works with."""
    found: list[str] = []
    for files, kind, mark in ((STEPS, "TABLE", ""), (FUNCTIONS, "FUNCTION", "()")):
        for file in files:
            found += [name + mark for name in re.findall(rf"^CREATE {kind} \{{s\}}\.(\w+)", text(file), re.MULTILINE)]
    return tuple(found)


def text(name: str) -> str:
    return (resources.files("safepoint.stores") / "sql" / f"{name}.sql").read_text(encoding="utf-8")

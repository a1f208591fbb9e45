"""The savers that programs run on: ours on each kind of store, and those of others, by one name each.

"reference" is LangGraph's InMemorySaver. "peer-sqlite" and "peer-postgres" are LangGraph's savers. Any other name is a kind of
store of ours: "memory", "sqlite", "file", "postgres", "redis", "cluster".
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.graphs.driver import Program, run_program
from tests.support.scale import SOAK
from tests.support.stores import KINDS, place

__all__ = ["HERE", "OURS", "Subject", "open_async_saver", "open_saver", "run_on", "subject"]

OURS = ("memory", *KINDS)
# A cluster is Redis in more places: what differs there is the store's business, and tested with it.
HERE = OURS if SOAK else tuple(kind for kind in OURS if kind != "cluster")
"""Those that tests of the saver's contract run on."""


class Subject:
    """A place for savers: every ``saver()`` stands on the same store, as savers of several processes would.

    Attributes:
        name: as given to ``subject``.
        url: what another process opens it by; '' where none can.
    """

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self.url = url
        self._open: list[tuple[Any, Any]] = []

    def saver(self, **options: Any) -> Any:
        """A saver for sync and async use, closed with the subject. In memory there is one."""
        if self._open and not self.url.partition("://")[2]:
            return self._open[0][1]
        opened = open_saver(self.name, self.url, **options)
        found = opened.__enter__()
        self._open.append((opened, found))
        return found

    def shared(self) -> Any:
        """The first saver that was opened here: one that many use."""
        return self._open[0][1] if self._open else self.saver()

    def close(self) -> None:
        while self._open:
            self._open.pop()[0].__exit__(None, None, None)


@contextlib.contextmanager
def open_saver(name: str, url: str, **options: Any) -> Iterator[Any]:
    """The saver of a name, for sync use; ours are for async use as well."""
    match name:
        case "reference":
            from langgraph.checkpoint.memory import InMemorySaver

            yield InMemorySaver()
        case "peer-sqlite":
            from langgraph.checkpoint.sqlite import SqliteSaver

            with SqliteSaver.from_conn_string(url) as made:
                yield made
        case "peer-postgres":
            from langgraph.checkpoint.postgres import PostgresSaver

            with PostgresSaver.from_conn_string(url) as made:
                made.setup()
                yield made
        case _:
            from safepoint.adapters.langgraph import SafepointSaver

            made = SafepointSaver(url, **options)
            try:
                yield made
            finally:
                made.close()


@contextlib.asynccontextmanager
async def open_async_saver(name: str, url: str, **options: Any) -> Any:
    """The saver of a name, for async use in the event loop that runs."""
    if not name.startswith("peer-"):
        with open_saver(name, url, **options) as made:
            yield made
    elif name == "peer-sqlite":
        from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver

        async with AsyncSqliteSaver.from_conn_string(url) as made:
            yield made
    else:
        from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver

        async with AsyncPostgresSaver.from_conn_string(url) as made:
            await made.setup()
            yield made


def run_on(there: Subject, found: Program, mode: str, durability: str, *, alone: bool = False) -> list[Any]:
    """The facts of a program on a saver of this place."""
    if there.name.startswith("peer-") and mode == "async":
        return _run_on_peer(there, found, durability, alone)
    return run_program(found, there.shared(), mode, durability, alone=alone)


def _run_on_peer(there: Subject, found: Program, durability: str, alone: bool) -> list[Any]:
    """An async saver of LangGraph's lives in one event loop: the program's."""
    from dataclasses import replace

    async def body(run: Any) -> None:
        async with open_async_saver(there.name, there.url) as made:
            run.saver = made
            await found.body(run)

    return run_program(replace(found, body=body), None, "async", durability, alone=alone)


def peer_postgres_url() -> str:
    """An empty schema of its own on the shared server, cleared away with the test."""
    import psycopg

    from tests.support import rawrows, servers

    base, schema = rawrows.split_postgres(servers.fresh_postgres_url())
    with psycopg.connect(base, autocommit=True) as conn:
        conn.execute(f'CREATE SCHEMA "{schema}"')
    return f"{base}{'&' if '?' in base else '?'}options=-csearch_path%3D{schema}"


@contextlib.contextmanager
def subject(name: str, folder: Path) -> Iterator[Subject]:
    """An empty place of this name."""
    with contextlib.ExitStack() as stack:
        match name:
            case "reference":
                url = ""
            case "memory":
                url = "memory://"
            case "peer-sqlite":
                url = str(folder / "peer.db")
            case "peer-postgres":
                url = peer_postgres_url()
            case _:
                url = stack.enter_context(place(name, folder)).url
        made = Subject(name, url)
        stack.callback(made.close)
        yield made

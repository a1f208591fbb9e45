"""The stores that tests of processes run on: one list, and for each an empty place that other processes can open by its URL."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import apsw

from tests.support import rawrows, servers
from tests.support.children import Server

__all__ = ["CLOCKED", "KINDS", "Place", "place", "server_of", "through"]

KINDS = ("sqlite", "file", "postgres", "redis", "cluster")
"""Any of "sqlite", "file", "postgres", "redis" and "cluster"."""
CLOCKED = tuple(kind for kind in KINDS if kind in {"postgres", "redis", "cluster"})
"""Those on servers: their leases have a clock."""


@dataclass
class Place:
    """An empty store."""

    kind: str
    url: str
    table: str = ""
    """Where transactional tools write, if it has them."""

    @property
    def clocked(self) -> bool:
        return self.kind in CLOCKED

    def make_ledger(self) -> str:
        """Make the table that transactional tools write to, and return the statement; '' where there are none."""
        match self.kind:
            case "sqlite":
                conn = apsw.Connection(self.url.removeprefix("sqlite:///"))
                conn.execute("CREATE TABLE ledger (key TEXT NOT NULL)")
                conn.close()
                self.table = "ledger"
                return "INSERT INTO ledger (key) VALUES (?)"
            case "postgres":
                import psycopg

                base, schema = rawrows.split_postgres(self.url)
                self.table = f"public.ledger_{schema}"
                with psycopg.connect(base) as there:
                    there.execute(f"CREATE TABLE {self.table} (key text NOT NULL)")
                return f"INSERT INTO {self.table} (key) VALUES (%s)"
        return ""

    def ledger(self, server: Server) -> list[str]:
        """The keys in that table, in order; read in another process, as this one may have the store open."""
        found: list[str] = server.run(read_ledger, self.url, self.table)
        return found

    def read_ledger(self) -> list[str]:
        """The same, read here: not where this process has a SQLite store open."""
        return read_ledger(self.url, self.table)


def read_ledger(url: str, table: str) -> list[str]:
    sql = f"SELECT key FROM {table}"
    if url.startswith("sqlite:"):
        conn = apsw.Connection(url.removeprefix("sqlite:///"))
        try:
            return sorted(key for (key,) in conn.execute(sql))
        finally:
            conn.close()
    import psycopg

    with psycopg.connect(rawrows.split_postgres(url)[0]) as there:
        return sorted(key for (key,) in there.execute(sql))


@contextlib.contextmanager
def place(kind: str, folder: Path) -> Iterator[Place]:
    made = Place(
        kind,
        {
            "sqlite": lambda: f"sqlite:///{folder}/agent.db",
            "file": lambda: f"file:///{folder}/agent",
            "postgres": servers.fresh_postgres_url,
            "redis": servers.fresh_redis_url,
            "cluster": lambda: f"{servers.shared_cluster().url}?cluster=true&prefix=t{uuid.uuid4().hex[:12]}:",
        }[kind](),
    )
    yield made
    if made.table.startswith("public."):
        import psycopg

        with psycopg.connect(rawrows.split_postgres(made.url)[0]) as conn:
            conn.execute(f"DROP TABLE IF EXISTS {made.table}")


# -- lines to servers


def server_of(kind: str) -> tuple[str, str]:
    """The unix socket of the shared server, and the protocol spoken there."""
    if kind == "postgres":
        return servers.shared_postgres().socket_path, "postgres"
    return servers.shared_redis().socket_path, "resp"


def through(url: str, port: int) -> str:
    """The URL of the same store by way of a port of 127.0.0.1."""
    if rawrows.kind_of(url) == "postgres":
        return f"postgresql://postgres@127.0.0.1:{port}/postgres?schema={rawrows.split_postgres(url)[1]}"
    prefix = [part for part in url.partition("?")[2].split("&") if part.startswith("prefix=")]
    return f"redis://127.0.0.1:{port}/0?{prefix[0]}"

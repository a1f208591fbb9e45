"""Whether a PostgreSQL server, and the way to it, are fit for a store: a real write and read, and how the server is set up.

The server is asked on a connection of its own, so that it is also told what is wrong where the store cannot even be opened.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import psycopg

from safepoint.errors import SafepointError
from safepoint.model import Finding
from safepoint.stores.postgres.db import CommitFailed
from safepoint.stores.postgres.errors import grants
from safepoint.stores.postgres.schema import parts

if TYPE_CHECKING:
    from safepoint.stores.postgres.db import Database
    from safepoint.stores.postgres.link import Link

__all__ = ["Replica", "Server", "check", "judge"]

OLDEST = 130000
SKEW = 2.0
"""Seconds between the server's clock and this host's beyond which times that are shown to people mislead them."""
BEHIND, BEHIND_BYTES = 30.0, 64_000_000
"""Seconds or bytes from which on a replica is far behind."""
TRIES = 6
"""Transactions that are looked at for whether each has a server connection of its own."""
SHORT_LEASE, LONG_LEASE = 10.0, 300.0
_SETTINGS = (
    "fsync", "full_page_writes", "synchronous_commit", "synchronous_standby_names", "max_connections",
    "superuser_reserved_connections", "reserved_connections", "default_transaction_isolation", "default_transaction_read_only",
    "statement_timeout", "idle_in_transaction_session_timeout", "transaction_timeout",
)  # fmt: skip


class Replica(NamedTuple):
    state: str | None
    """None where we are not permitted to see it."""
    sync_state: str | None
    lag: float
    """Seconds."""
    behind: int
    """Bytes."""


class Server(NamedTuple):
    """What was seen of a server."""

    version: int
    settings: Mapping[str, str]
    sources: Mapping[str, str]
    """Where a setting comes from: ``user``, ``database``, ``configuration file`` …"""
    in_recovery: bool
    encoding: str
    read_only: bool
    role_limit: int
    database_limit: int
    others: int
    """Connections of others."""
    size: int
    user: str
    replicas: list[Replica]
    backends: list[int]
    """Process ids of the server that served transactions of one connection."""
    told: int
    """The process id that the connection was told when it was opened."""
    skew: float
    """Seconds that the server's clock is ahead of ours."""
    trip: float
    """Half a round trip, by which that may be wrong."""
    refused: list[str]
    """Tables and functions of the store that we may not use."""
    parts: list[str]
    """Its tables, and its functions with () after them, whether we may use them or not."""


def check(db: Database, lease: float | None = None) -> list[Finding]:
    db.refuse_closed()
    found = [_write_and_read(db)]
    try:
        server = _look(db)
    except SafepointError as error:
        return [*found, Finding("server", "error", f"it cannot be looked at: {error.what}: {error.why}", error.remedy)]
    return found + judge(server, full=db.sync, pool=db._pool.size, timeout=db.timeout, lease=lease, schema=db.schema)


def judge(
    server: Server, *, full: bool, pool: int, timeout: float, lease: float | None, schema: str = "safepoint"
) -> list[Finding]:
    """What is to be said of a server.

    Args:
        full: The store promises that what it acknowledged outlives a loss of power.
        pool: Connections that the store may open, besides one that renews leases.
    """
    found = [
        _version(server),
        _role(server),
        _encoding(server),
        _fsync(server, full),
        _pages(server, full),
        _commits(server, full),
        _isolation(server),
        _schema(server, schema),
        _permissions(server, schema),
        _replicas(server),
        _pooler(server),
        _connections(server, pool + 1),
        _timeouts(server, timeout),
        _clock(server),
        Finding("disk", "ok", f"the database has {server.size / 1e6:,.0f} MB; what room is left cannot be asked"),
    ]
    return found if lease is None else [*found, _lease(lease)]


# -- looking


def _write_and_read(db: Database) -> Finding:
    statements = db.sql("postgres_check")
    key = f"check {secrets.token_hex(8)}"
    try:
        written = db.write(lambda link: link.execute(statements["write"], (key,)).fetchall(), again=True, facts={})
        seen = db.ask(statements["read"], (key,))
        db.write(lambda link: link.execute(statements["clean"], (key,)).rowcount, again=True, sync=False, facts={})
    except CommitFailed as failed:
        return _failed(failed.cause)
    except SafepointError as error:
        return _failed(error)
    if seen != written:
        text = "what was written was not read back"
        return Finding("write", "error", text, "Name the primary in the URL: this may read from a replica.")
    return Finding("write", "ok", "a write was made and read back")


def _failed(error: SafepointError) -> Finding:
    said = f"{error.what}: {error.why}" if error.why else error.what
    return Finding("write", "error", f"a write did not succeed: {said}", error.remedy or "See the log of the server.")


def _look(db: Database) -> Server:
    try:
        link = db.open(time.monotonic() + db.timeout)
        try:
            link.end = time.monotonic() + db.timeout
            return _seen(db, link)
        finally:
            link.close()
    except psycopg.Error as error:
        raise db.translate(error) from error


def _seen(db: Database, link: Link) -> Server:
    st = db.sql("postgres_check")

    def ask(name: str, *values: Any) -> list[Any]:
        return link.execute(st[name], values or None, binary=True).fetchall()

    settings = ask("settings", list(_SETTINGS))
    own_name = link.info.parameter_status("application_name") or ""
    ((in_recovery, encoding, read_only, role_limit, database_limit, others, size, user),) = ask("server", own_name)
    backends = [ask("backend")[0][0] for _ in range(TRIES)]
    skew, trip = min((_clocks(ask) for _ in range(3)), key=lambda found: found[1])
    return Server(
        version=link.info.server_version,
        settings={name: value for name, value, _ in settings},
        sources={name: source for name, _, source in settings},
        in_recovery=in_recovery,
        encoding=encoding,
        read_only=read_only == "on",
        role_limit=role_limit,
        database_limit=database_limit,
        others=others,
        size=size,
        user=user,
        replicas=[] if in_recovery else [Replica._make(row) for row in ask("replicas")],
        backends=backends,
        told=link.info.backend_pid,
        skew=skew,
        trip=trip,
        refused=[name for (name,) in ask("refused", db.schema, db.schema, db.schema)],
        parts=[name for (name,) in ask("parts", db.schema, db.schema)],
    )


def _clocks(ask: Any) -> tuple[float, float]:
    before, at = time.time(), time.perf_counter()
    there = ask("clock")[0][0]
    trip = (time.perf_counter() - at) / 2
    return there - before - trip, trip


# -- judging


def _number(server: Server, name: str) -> int:
    try:
        return int(server.settings.get(name, "0"))
    except ValueError:
        return 0


def _from(server: Server, name: str) -> str:
    """Where a setting was made, and so where it is changed."""
    match server.sources.get(name):
        case "user" | "database user":
            return f"ALTER ROLE {server.user} RESET {name};"
        case "database":
            return f"ALTER DATABASE … RESET {name};"
        case "client" | "environment variable":
            return "Leave it out of the URL's options, or of PGOPTIONS."
    return ""


def _version(server: Server) -> Finding:
    shown = f"PostgreSQL {server.version // 10000}.{server.version % 10000}"
    if server.version < OLDEST:
        return Finding("server", "error", f"{shown} is too old", f"Use PostgreSQL {OLDEST // 10000} or later.")
    return Finding("server", "ok", shown)


def _role(server: Server) -> Finding:
    remedy = "Name the primary in the URL, or several hosts with target_session_attrs=read-write."
    if server.in_recovery:
        return Finding("role", "error", "it is a standby and takes no writes", remedy)
    if server.settings.get("default_transaction_read_only") == "on" or server.read_only:
        fix = _from(server, "default_transaction_read_only") or "Set default_transaction_read_only to off."
        return Finding("role", "error", "its transactions are read-only", fix)
    return Finding("role", "ok", "it takes writes")


def _encoding(server: Server) -> Finding:
    if server.encoding != "UTF8":
        text = f"the encoding of the database is {server.encoding}: it cannot hold every text"
        return Finding("encoding", "error", text, "CREATE DATABASE … ENCODING 'UTF8' TEMPLATE template0; use that one.")
    return Finding("encoding", "ok", "UTF8")


def _fsync(server: Server, full: bool) -> Finding:
    if server.settings.get("fsync") == "off":
        text = "fsync is off: a loss of power may destroy the whole database, not only the last saves"
        return Finding("fsync", "error" if full else "warning", text, "ALTER SYSTEM SET fsync = on; and reload.")
    return Finding("fsync", "ok", "what is written is made durable")


def _pages(server: Server, full: bool) -> Finding:
    if server.settings.get("full_page_writes") == "off":
        text = "full_page_writes is off: a page that is half written at a loss of power stays damaged"
        remedy = "ALTER SYSTEM SET full_page_writes = on; and reload, unless the file system writes whole pages."
        return Finding("full pages", "error" if full else "warning", text, remedy)
    return Finding("full pages", "ok", "half-written pages are mended after a crash")


def _commits(server: Server, full: bool) -> Finding:
    how = server.settings.get("synchronous_commit", "on")
    if how == "off" and full:
        fix = _from(server, "synchronous_commit") or "ALTER SYSTEM SET synchronous_commit = on; and reload."
        text = (
            "synchronous_commit is off by default: what this store promises is made durable all the same, and nothing else is"
        )
        return Finding("commits", "warning", text, fix)
    if how == "local" and server.settings.get("synchronous_standby_names"):
        fix = _from(server, "synchronous_commit") or "ALTER SYSTEM SET synchronous_commit = on; and reload."
        return Finding("commits", "warning", "synchronous_commit is local: no replica is waited for", fix)
    return Finding("commits", "ok", f"synchronous_commit is {how}")


def _isolation(server: Server) -> Finding:
    level = server.settings.get("default_transaction_isolation", "read committed")
    if level != "read committed":
        fix = (
            _from(server, "default_transaction_isolation")
            or "ALTER ROLE … SET default_transaction_isolation = 'read committed';"
        )
        return Finding("isolation", "error", f"transactions are {level} by default: saves are refused", fix)
    return Finding("isolation", "ok", level)


def _schema(server: Server, schema: str) -> Finding:
    """Whether all is there that was set up: what opens a store goes by the numbers in sp_meta alone."""
    if "sp_meta" not in server.parts:
        text = f"nothing is set up in schema {schema}"
        return Finding("schema", "error", text, "Open the store once as a user who may create it; or correct schema=.")
    missing = [name for name in parts() if name not in server.parts]
    if not missing:
        return Finding("schema", "ok", f"all tables and functions are in schema {schema}")
    text = f"{', '.join(missing[:5])}{' and more' if missing[5:] else ''} {'is' if len(missing) == 1 else 'are'} gone"
    if not all(name.endswith("()") for name in missing):
        return Finding("schema", "error", text, f"Restore schema {schema} from a backup.")
    # Functions hold no data. All of them go, those of a newer library too, as they are numbered: each library then makes its own.
    place = '"' + schema.replace('"', '""') + '"'
    there = ", ".join(f"{place}.{name[:-2]}" for name in sorted(server.parts) if name.endswith("()"))
    drop = f"DROP FUNCTION {there}; " if there else ""
    remedy = (
        f"As the schema's owner: BEGIN; {drop}DELETE FROM {place}.sp_meta WHERE key = 'functions'; COMMIT; then open the store once "
        "as the owner, and grant the functions again to others. No data is touched."
    )
    return Finding("schema", "error", text, remedy)


def _permissions(server: Server, schema: str) -> Finding:
    if server.refused:
        text = f"{server.user} may not use {', '.join(server.refused[:5])}{' and more' if server.refused[5:] else ''}"
        return Finding("permissions", "error", text, grants(schema, f'"{server.user}"'))
    return Finding("permissions", "ok", f"nothing in schema {schema} is closed to {server.user}")


def _replicas(server: Server) -> Finding:
    name, replicas = "replicas", server.replicas
    if server.in_recovery or not replicas:
        return Finding(name, "ok", "none that would take its place")
    if any(r.state is None for r in replicas):
        text = f"{len(replicas)} are there, and how far behind they are may not be seen"
        return Finding(name, "warning", text, f"GRANT pg_monitor TO {server.user};")
    far = [r for r in replicas if r.lag > BEHIND or r.behind > BEHIND_BYTES]
    if far:
        worst = max(far, key=lambda r: (r.lag, r.behind))
        text = f"one is {worst.lag:,.0f} s and {worst.behind / 1e6:,.0f} MB behind: a failover to it would lose as much"
        return Finding(name, "warning", text, "See the replica's log; do not fail over to it until it has caught up.")
    if not any(r.sync_state in {"sync", "quorum"} for r in replicas):
        text = f"{len(replicas)}, all asynchronous: a failover may lose saves that were acknowledged"
        return Finding(name, "warning", text, "Set synchronous_standby_names, with synchronous_commit = on.")
    return Finding(name, "ok", f"{len(replicas)}, and saves wait for one")


def _is_pooled(server: Server) -> bool:
    return len(set(server.backends)) > 1 or server.told not in server.backends


def _pooler(server: Server) -> Finding:
    if (several := len(set(server.backends))) > 1:
        text = f"one that lends connections by transaction ({several} for {len(server.backends)}): that is supported"
        return Finding("pooler", "ok", text)
    if _is_pooled(server):
        return Finding("pooler", "ok", "one lies in between, by session as far as can be seen: that is supported")
    return Finding("pooler", "ok", "none lies in between")


def _connections(server: Server, wanted: int) -> Finding:
    kept = _number(server, "superuser_reserved_connections") + _number(server, "reserved_connections")
    limits = [_number(server, "max_connections") - kept, server.role_limit, server.database_limit]
    limit = min(n for n in limits if n >= 0)
    text = f"{limit} are possible, others have {server.others}, this store may open {wanted}"
    if _is_pooled(server):
        return Finding("connections", "ok", f"{text}; a pooler limits them")
    remedy = "Use a smaller pool= in the URL, a pooler, or raise max_connections (or the limit of the role or database)."
    if wanted > limit - server.others:
        return Finding("connections", "warning", text, remedy)
    return Finding("connections", "ok", text)


def _timeouts(server: Server, timeout: float) -> Finding:
    reasons = {
        "statement_timeout": "statements are ended",
        "transaction_timeout": "transactions are ended, those of transactional tools and of imports among them",
        "idle_in_transaction_session_timeout": "connections of transactional tools are cut off while the tool is busy elsewhere",
    }
    for name, what in reasons.items():
        seconds = _number(server, name) / 1000
        if 0 < seconds < timeout:
            text = f"{name} is {seconds:g} s, shorter than the store's timeout of {timeout:g} s: {what}"
            remedy = _from(server, name) or f"Raise {name}, or open the store with a shorter timeout."
            return Finding("timeouts", "warning", text, remedy)
    return Finding("timeouts", "ok", "the server ends nothing sooner than the store does")


def _clock(server: Server) -> Finding:
    apart = abs(server.skew)
    way = "ahead of" if server.skew > 0 else "behind"
    if apart - server.trip > SKEW:
        text = (
            f"the server's is {apart:,.1f} s {way} this host's; leases go by the server's alone, times that are shown by both"
        )
        return Finding("clock", "warning", text, "Run NTP on both hosts.")
    return Finding("clock", "ok", f"within {max(1, math.ceil(apart + server.trip))} s of this host's")


def _lease(lease: float) -> Finding:
    if lease < SHORT_LEASE:
        text = f"a lease of {lease:g} s: an outage or a stop of that length lets another take the task over"
        return Finding("lease", "warning", text, "Use lease=30, the default.")
    if lease > LONG_LEASE:
        text = f"a lease of {lease:g} s: the tasks of a host that died stay taken for so long"
        return Finding("lease", "warning", text, "Use lease=30, the default; a run renews it as long as it lives.")
    return Finding("lease", "ok", f"{lease:g} s")

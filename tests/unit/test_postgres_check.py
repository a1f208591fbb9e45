"""What ``check`` says of PostgreSQL servers: real ones, set up badly in every way that it has a word for."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import psycopg
import pytest

from safepoint.errors import UsageError
from safepoint.model import Finding
from safepoint.stores.postgres import check as checks
from safepoint.stores.postgres.check import Replica, Server, judge
from safepoint.stores.postgres.schema import parts
from safepoint.stores.postgres.store import PostgresStore
from safepoint.stores.url import open_store
from safepoint.testing.build import Writer, dump, tree
from tests.support.pooler import Pooler
from tests.support.servers import Postgres, fresh_postgres_url, shared_postgres

Look = Callable[..., dict[str, Finding]]


def by_name(found: list[Finding]) -> dict[str, Finding]:
    assert all(f.remedy for f in found if f.level != "ok"), "a finding without a remedy"
    names = {f.name: f for f in found}
    assert len(names) == len(found)
    return names


def look(url: str, **options: Any) -> dict[str, Finding]:
    store = open_store(url, **options)
    try:
        return by_name(store.check())
    finally:
        store.close()


@contextmanager
def role(name: str, *statements: str) -> Iterator[str]:
    """The URL of an empty store on the shared server, as a user of its own who is set up like that."""
    server = shared_postgres()
    with psycopg.connect(server.url, autocommit=True) as conn:
        conn.execute(f"CREATE ROLE {name} LOGIN SUPERUSER")
        try:
            for statement in statements:
                conn.execute(statement)
            yield fresh_postgres_url().replace("postgres@", f"{name}@", 1)
        finally:
            conn.execute(f"REASSIGN OWNED BY {name} TO postgres")
            conn.execute(f"DROP OWNED BY {name}")
            conn.execute(f"DROP ROLE {name}")


@pytest.fixture(scope="module")
def good() -> Iterator[Postgres]:
    server = Postgres(durable=True, max_connections=30, settings={"wal_level": "replica"})
    yield server
    server.close()


def test_a_good_server_passes_and_nothing_stays_behind(good: Postgres) -> None:
    store = open_store(good.url)
    Writer(store).save(*tree("a"))
    before = dump(store)
    found = by_name(store.check())
    assert {f.level for f in found.values()} == {"ok"}, found
    assert dump(store) == before
    with store.connection() as conn:
        assert [key for (key,) in conn.execute("SELECT key FROM safepoint.sp_meta") if key.startswith("check")] == []
        conn.execute("INSERT INTO safepoint.sp_meta VALUES ('check of one that was killed', '1')")
    store.check()
    with store.connection() as conn:
        assert conn.execute("SELECT count(*) FROM safepoint.sp_meta WHERE key LIKE 'check%'").fetchall() == [(0,)]
    store.close()
    with pytest.raises(UsageError):
        store.check()


def test_a_server_that_does_not_make_durable_is_an_error_under_full_only() -> None:
    url = fresh_postgres_url()  # the shared server is such a one
    found = look(url, durability="full")
    assert (found["fsync"].level, found["full pages"].level) == ("error", "error")
    found = look(url, durability="process")
    assert (found["fsync"].level, found["full pages"].level) == ("warning", "warning")
    assert found["write"].level == "ok"


def test_weak_commits_are_found_with_where_they_were_set() -> None:
    with role("weak", "ALTER ROLE weak SET synchronous_commit = off") as url:
        found = look(url)["commits"]
        assert (found.level, found.remedy) == ("warning", "ALTER ROLE weak RESET synchronous_commit;")
        assert look(url, durability="process")["commits"].level == "ok"
        for durability, sync, wanted in (("full", True, "on"), ("full", False, "off"), ("process", True, "off")):
            store = open_store(url, durability=durability)
            assert isinstance(store, PostgresStore)
            shown = store._db.write(lambda link: link.execute("SHOW synchronous_commit").fetchall(), sync=sync)
            store.close()
            assert shown == [(wanted,)]


def test_transactions_that_read_only_are_an_error() -> None:
    with role("reader") as url:
        look(url)  # made
        with psycopg.connect(shared_postgres().url, autocommit=True) as conn:
            conn.execute("ALTER ROLE reader SET default_transaction_read_only = on")
        found = look(url)["role"]
    assert found.level == "error"
    assert "RESET default_transaction_read_only" in found.remedy


def test_another_isolation_is_an_error() -> None:
    with role("strict", "ALTER ROLE strict SET default_transaction_isolation = 'serializable'") as url:
        found = look(url)["isolation"]
    assert found.level == "error"
    assert found.remedy == "ALTER ROLE strict RESET default_transaction_isolation;"


@pytest.mark.parametrize("name", ["statement_timeout", "idle_in_transaction_session_timeout"])
def test_timeouts_shorter_than_ours_are_found(name: str) -> None:
    with role("hasty", f"ALTER ROLE hasty SET {name} = '3s'") as url:
        found = look(url)["timeouts"]
        assert found.level == "warning"
        assert name in found.text
        assert found.remedy == f"ALTER ROLE hasty RESET {name};"
        assert look(url, timeout=2)["timeouts"].level == "ok"


def test_a_limit_below_the_pool_is_found(good: Postgres) -> None:
    assert look(good.url, pool=40)["connections"].level == "warning"
    with role("few", "ALTER ROLE few CONNECTION LIMIT 6") as url:
        found = look(url, pool=20)["connections"]
        assert found.level == "warning"
        assert "pool=" in found.remedy


def test_tables_that_may_not_be_used_are_named() -> None:
    url = fresh_postgres_url()
    schema = url.rpartition("=")[2]
    look(url)
    with psycopg.connect(shared_postgres().url, autocommit=True) as conn:
        conn.execute("CREATE ROLE poor LOGIN")
        try:
            conn.execute(f"GRANT USAGE ON SCHEMA {schema} TO poor")
            conn.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {schema}.sp_meta TO poor")
            found = look(url.replace("postgres@", "poor@", 1))["permissions"]
        finally:
            conn.execute("DROP OWNED BY poor")
            conn.execute("DROP ROLE poor")
    assert found.level == "error"
    assert "sp_branches" in found.text


@pytest.mark.parametrize("names", [["sp_commit_1"], ["sp_acquire_1", "sp_release_1"]])
def test_functions_that_are_gone_are_named_and_the_remedy_brings_them_back(names: list[str]) -> None:
    url = fresh_postgres_url()
    schema = url.rpartition("=")[2]
    with closing(open_store(url)) as store, psycopg.connect(shared_postgres().url, autocommit=True) as conn:
        writer = Writer(store)
        writer.save(*tree("a"))
        assert by_name(store.check())["schema"].level == "ok"
        for name in names:
            conn.execute(f"DROP FUNCTION {schema}.{name}")
        found = by_name(store.check())["schema"]
        assert found.level == "error"
        assert all(f"{name}()" in found.text for name in names)
        assert "sp_stage_1" not in found.text
        # One of a newer safepoint, which installs those that it has beyond ours if ours are as many as the number says.
        conn.execute(f"CREATE FUNCTION {schema}.sp_commit_2() RETURNS int LANGUAGE sql AS 'SELECT 1'")
        conn.execute(f"UPDATE {schema}.sp_meta SET value = '2' WHERE key = 'functions'")
        remedy = by_name(store.check())["schema"].remedy
        conn.execute(remedy[remedy.index("BEGIN;") : remedy.index("COMMIT;")] + "COMMIT")
        with closing(open_store(url)) as again:
            assert by_name(again.check())["schema"].level == "ok"
            again.release("task", again.acquire("task", b"me"))
            Writer(again, head=writer.head).save(*tree("b"))
        assert conn.execute(f"SELECT value FROM {schema}.sp_meta WHERE key = 'functions'").fetchall() == [("1",)]
        assert not conn.execute("SELECT to_regproc(%s)", (f"{schema}.sp_commit_2",)).fetchall()[0][0]


def test_a_table_that_is_gone_is_named() -> None:
    url = fresh_postgres_url()
    look(url)
    with psycopg.connect(shared_postgres().url, autocommit=True) as conn:
        conn.execute(f"DROP TABLE {url.rpartition('=')[2]}.sp_pauses")
    found = look(url)["schema"]
    assert (found.level, found.text) == ("error", "sp_pauses is gone")
    assert "backup" in found.remedy


def test_another_encoding_is_an_error_though_no_store_can_be_opened() -> None:
    server = shared_postgres()
    with psycopg.connect(server.url, autocommit=True) as conn:
        conn.execute("CREATE DATABASE latin ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
        try:
            found = look(server.url.replace("/postgres?", "/latin?"))
        finally:
            conn.execute("DROP DATABASE latin WITH (FORCE)")
    assert (found["write"].level, found["encoding"].level) == ("error", "error")
    assert "LATIN1" in found["encoding"].text


def test_a_pooler_in_between_is_seen_and_said_to_be_supported() -> None:
    server = shared_postgres()
    with Pooler(server.socket_path) as pooler:
        schema = fresh_postgres_url().rpartition("=")[2]
        found = look(f"{pooler.url}{'&' if '?' in pooler.url else '?'}schema={schema}")
    assert found["write"].level == "ok"
    assert found["pooler"].level == "ok"
    assert "by transaction" in found["pooler"].text
    assert look(fresh_postgres_url())["pooler"].text == "none lies in between"


def test_a_server_that_is_not_there_is_told_in_findings() -> None:
    server = Postgres(start=False)
    try:
        found = look(server.url, timeout=1)
    finally:
        server.close()
    assert (found["write"].level, found["server"].level) == ("error", "error")


def standby_of(primary: Postgres) -> Postgres:
    """A second server that follows the first, which is stopped for the copy."""
    standby = Postgres(start=False, settings={"primary_conninfo": f"host={primary.folder} user=postgres", "hot_standby": "on"})
    primary.stop()
    shutil.rmtree(standby.data)
    shutil.copytree(primary.data, standby.data)
    (standby.data / "standby.signal").touch()
    if standby._user:
        for folder, _, files in os.walk(standby.data):
            for path in (folder, *(os.path.join(folder, file) for file in files)):
                os.chown(path, *standby._user)
    os.chmod(standby.data, 0o700)
    primary.start()
    standby.start()
    return standby


def test_a_standby_is_an_error_and_a_primary_with_asynchronous_ones_a_warning() -> None:
    primary = Postgres(settings={"wal_level": "replica"})
    try:
        look(primary.url)
        standby = standby_of(primary)
        try:
            found = look(standby.url, timeout=2)
            assert (found["write"].level, found["role"].level) == ("error", "error")
            assert "target_session_attrs" in found["role"].remedy
            end = time.monotonic() + 30
            while (found := look(primary.url))["replicas"].level == "ok" and time.monotonic() < end:
                time.sleep(0.05)
            assert found["replicas"].level == "warning"
            assert "asynchronous" in found["replicas"].text
            with psycopg.connect(primary.url, autocommit=True) as conn:
                conn.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
                conn.execute("SELECT pg_reload_conf()")
            while (found := look(primary.url))["replicas"].level == "warning" and time.monotonic() < end:
                time.sleep(0.05)
            assert found["replicas"].level == "ok"
        finally:
            standby.close()
    finally:
        primary.close()


# -- what no server can be brought to here: judged from what it would have told

FINE = Server(
    version=180006,
    settings={
        "fsync": "on", "full_page_writes": "on", "synchronous_commit": "on", "synchronous_standby_names": "",
        "max_connections": "100", "superuser_reserved_connections": "3", "default_transaction_isolation": "read committed",
    },
    sources={},
    in_recovery=False, encoding="UTF8", read_only=False, role_limit=-1, database_limit=-1, others=5, size=10**7, user="me",
    replicas=[], backends=[7, 7, 7], told=7, skew=0.0, trip=0.001, refused=[],
    parts=[*parts()],
)  # fmt: skip


def judged(lease: float | None = 30.0, **changes: Any) -> dict[str, Finding]:
    return by_name(judge(FINE._replace(**changes), full=True, pool=10, timeout=10.0, lease=lease))


def test_what_is_fine_is_fine() -> None:
    assert {f.level for f in judged().values()} == {"ok"}


def test_a_store_that_was_never_set_up_is_told() -> None:
    found = judged(parts=[])["schema"]
    assert (found.level, found.text) == ("error", "nothing is set up in schema safepoint")


def test_an_old_server_is_an_error() -> None:
    assert judged(version=120022)["server"].level == "error"
    assert judged(version=130000)["server"].level == "ok"


def test_a_clock_that_is_off_is_a_warning_unless_the_way_may_be_why() -> None:
    for skew, way in ((5.0, "ahead of"), (-5.0, "behind")):
        found = judged(skew=skew)["clock"]
        assert found.level == "warning"
        assert way in found.text
    assert judged(skew=5.0, trip=4.0)["clock"].level == "ok"


def test_clocks_are_compared_at_the_middle_of_the_way(good: Postgres) -> None:
    store = open_store(good.url)
    seen = checks._look(store._db)  # type: ignore[attr-defined]
    store.close()
    assert abs(seen.skew) < 1 + seen.trip


def test_replicas_that_are_far_behind_or_not_shown_are_warned_of() -> None:
    assert judged(replicas=[Replica("streaming", "sync", 0, 0)])["replicas"].level == "ok"
    for replica in (Replica("streaming", "sync", 90.0, 0), Replica("catchup", "sync", 0, 10**9), Replica(None, None, 0, 0)):
        assert judged(replicas=[replica])["replicas"].level == "warning"


def test_local_commits_beside_synchronous_replicas_are_warned_of() -> None:
    settings = {**FINE.settings, "synchronous_commit": "local", "synchronous_standby_names": "*"}
    assert judged(settings=settings)["commits"].level == "warning"


def test_a_pooler_by_session_is_told_by_the_number_of_the_process() -> None:
    assert "by session" in judged(told=8)["pooler"].text
    assert judged(told=8, others=99)["connections"].level == "ok"


@pytest.mark.parametrize(("lease", "level"), [(1.0, "warning"), (30.0, "ok"), (3600.0, "warning")])
def test_leases_of_odd_length_are_warned_of(lease: float, level: str) -> None:
    assert judged(lease=lease)["lease"].level == level

"""The servers that tests of stores stand on: what they keep, that they end, and that one test's store is not the next one's."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psycopg
import pytest
import redis

import safepoint
from tests.support import servers
from tests.support.daemons import is_gone, remove_abandoned
from tests.support.paths import ROOT
from tests.support.servers import Postgres, Redis


@pytest.fixture
def pg():
    server = Postgres(settings={"work_mem": "5MB"})
    yield server
    server.close()


def value(url, sql="SELECT i FROM t"):
    with psycopg.connect(url) as conn:
        return conn.execute(sql).fetchall()[0][0]


def put(url, i):
    with psycopg.connect(url) as conn:
        conn.execute("CREATE TABLE IF NOT EXISTS t (i int)")
        conn.execute("DELETE FROM t")
        conn.execute("INSERT INTO t VALUES (%s)", (i,))


def schemas(url):
    with psycopg.connect(url) as conn:
        return {row[0] for row in conn.execute("SELECT nspname FROM pg_namespace")}


def schema_of(url):
    return url.rpartition("=")[2]


# -- PostgreSQL


def test_postgres_keeps_what_is_committed_and_its_address(pg):
    where = pg.url
    ends = [pg.kill, pg.stop, lambda: pg.stop("immediate")]
    for i, end in enumerate(ends):
        put(where, i)
        with psycopg.connect(where) as open_session:
            end()
            assert not pg.running
            with pytest.raises(psycopg.OperationalError):
                open_session.execute("SELECT 1")
            with pytest.raises(psycopg.OperationalError):
                psycopg.connect(where)
        pg.start()
        assert pg.url == where
        assert value(where) == i


def test_postgres_settings(pg):
    assert value(pg.url, "SHOW work_mem") == "5MB"
    assert value(pg.url, "SHOW fsync") == "off"
    assert value(pg.url, "SHOW synchronous_commit") == "on"
    assert value(pg.url, "SHOW max_connections") == "200"


def test_postgres_durable_and_on_tcp():
    server = Postgres(durable=True, listen="127.0.0.1", max_connections=20)
    try:
        assert "@127.0.0.1:" in server.url
        assert value(server.url, "SHOW fsync") == "on"
        assert value(server.socket_url, "SHOW max_connections") == "20"
        put(server.url, 5)
        server.restart("immediate")
        assert value(server.url) == 5
    finally:
        server.close()
    assert not server.folder.exists()


def test_a_postgres_that_cannot_start_says_why():
    with pytest.raises(servers.ServerFailed, match="no_such_setting"):
        Postgres(settings={"no_such_setting": 1})


# -- Valkey


@pytest.mark.parametrize("end", ["stop", "kill"])
@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("tcp", [True, False])
def test_a_durable_valkey_keeps_what_another_forgets(end, durable, tcp):
    server = Redis(durable=durable, tcp=tcp)
    try:
        with redis.Redis.from_url(server.url) as client:
            client.set("a", 1)
            getattr(server, end)()
            with pytest.raises(redis.ConnectionError):
                client.get("a")
            server.start()
            assert client.get("a") == (b"1" if durable else None)
    finally:
        server.close()


def test_urls_of_a_valkey():
    server = Redis(start=False)
    try:
        assert server.url == f"unix://{server.folder}/s?db=0"
        assert server.safepoint_url == f"redis+unix://{server.folder}/s?db=0"
    finally:
        server.close()


def test_a_cluster_has_slots_on_each_node(valkey_cluster):
    assert len(valkey_cluster.ports) == 3
    with redis.RedisCluster.from_url(valkey_cluster.url) as client:
        for i in range(50):
            client.set(f"slots-{i}", i)
        assert [client.get(f"slots-{i}") for i in range(50)] == [b"%d" % i for i in range(50)]
    sizes = []
    for port in valkey_cluster.ports:
        with redis.Redis(port=port) as node:
            found = list(node.scan_iter("slots-*", count=1000))
            sizes.append(sum(node.delete(key) for key in found))
    assert sum(sizes) == 50
    assert min(sizes) > 0


# -- they end with the tests

STARTS_BOTH = """
import threading
from tests.support.servers import Postgres, Redis
made = []
def start(): made.extend([Postgres(), Redis(durable=True)])
on_a_thread = threading.Thread(target=start)
on_a_thread.start()
on_a_thread.join()
print(*(f"{s.pid} {s.folder}" for s in made), flush=True)
threading.Event().wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a signal at a parent's death is Linux's")
def test_servers_end_when_the_tests_are_killed():
    tests = subprocess.Popen([sys.executable, "-c", STARTS_BOTH], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    with tests:
        pg_pid, pg_folder, valkey_pid, valkey_folder = tests.stdout.readline().split()
        # The thread that started them is over, and they are there.
        assert value(f"postgresql://postgres@/postgres?host={pg_folder}", "SELECT 1") == 1
        tests.send_signal(signal.SIGKILL)
    end = time.monotonic() + 20
    while not (is_gone(int(pg_pid)) and is_gone(int(valkey_pid))):
        assert time.monotonic() < end, "a server has outlived the tests"
        time.sleep(0.01)
    # The next that starts one clears up.
    Redis(start=False).close()
    assert not os.path.exists(pg_folder)
    assert not os.path.exists(valkey_folder)


def test_the_folder_of_a_living_server_is_let_be(postgres, valkey):
    for where in ("/tmp", str(valkey.folder.parent)):
        remove_abandoned(where)
    assert Path(postgres.socket_path).exists()
    assert Path(valkey.socket_path).exists()


def test_a_server_started_on_a_thread_outlives_the_thread():
    made = []
    thread = threading.Thread(target=lambda: made.append(Redis()))
    thread.start()
    thread.join()
    time.sleep(0.1)  # the signal would have come at once
    try:
        with redis.Redis.from_url(made[0].url) as client:
            assert client.ping()
    finally:
        made[0].close()


# -- one for the whole process, and empty stores on it


def test_fresh_stores_are_cleared_away_and_only_they(postgres, valkey, monkeypatch):
    monkeypatch.setattr(servers, "BATCH", 1)
    kept, mark = servers.fresh_postgres_url(), None
    kept_prefix = schema_of(servers.fresh_redis_url())
    mark = servers.used()
    url, prefix = servers.fresh_postgres_url(), schema_of(servers.fresh_redis_url())
    with psycopg.connect(postgres.url) as conn, redis.Redis.from_url(valkey.url) as client:
        for used in (kept, url):
            conn.execute(f'CREATE SCHEMA "{schema_of(used)}" CREATE TABLE t (i int)')
        for used in (kept_prefix, prefix):
            client.mset({f"{used}{i}": i for i in range(3000)})
        conn.commit()
        servers.clean_since(mark)
        assert schema_of(url) not in schemas(postgres.url)
        assert schema_of(kept) in schemas(postgres.url)
        left = set(client.scan_iter(count=10_000))
        assert not [key for key in left if key.startswith(prefix.encode())]
        assert len([key for key in left if key.startswith(kept_prefix.encode())]) == 3000


def test_a_schema_that_somebody_holds_is_dropped_later(postgres, monkeypatch):
    monkeypatch.setattr(servers, "BATCH", 1)
    url = servers.fresh_postgres_url()
    with psycopg.connect(postgres.url) as conn:
        conn.execute(f'CREATE SCHEMA "{schema_of(url)}" CREATE TABLE t (i int)')
        conn.commit()
        conn.execute(f'LOCK TABLE "{schema_of(url)}".t')
        servers.done_with(url)
        assert schema_of(url) in schemas(postgres.url)
    servers.done_with(servers.fresh_postgres_url())
    assert schema_of(url) not in schemas(postgres.url)


def test_a_schema_is_given_out_again_empty_if_it_is_as_a_store_made_it(postgres, monkeypatch):
    monkeypatch.setattr(servers, "BATCH", 2)
    monkeypatch.setattr(servers, "_emptied", [])
    monkeypatch.setattr(servers, "_relations", [])  # of whatever an earlier test of this process has given back
    urls = [servers.reused_postgres_url() for _ in range(2)]
    assert len({schema_of(url) for url in urls}) == 2
    for url in urls:
        with safepoint.open(url) as cp:
            cp.save(safepoint.State("t"))
            with cp.resume("t") as run:
                run.save()
            cp.delete_task("t")  # leaves a floor for fences
            cp.save(safepoint.State("u"))
    with psycopg.connect(postgres.url) as conn:
        conn.execute(f'CREATE TABLE "{schema_of(urls[1])}".of_a_test (i int)')
    for url in urls:
        servers.done_with(url)
    assert schema_of(urls[0]) in schemas(postgres.url)
    assert schema_of(urls[1]) not in schemas(postgres.url)
    again = servers.reused_postgres_url()
    assert again == urls[0]
    with safepoint.open(again) as cp:
        assert cp.tasks() == []
        assert cp.verify().ok
        with cp.resume("t") as run:
            assert run.fence == 1
    assert servers.reused_postgres_url() not in urls


def test_a_missing_server_skips_and_fails_where_all_is_to_be_there(monkeypatch):
    def missing():
        raise servers.ServerMissing("nothing here")

    monkeypatch.setattr(servers, "_shared", {})
    monkeypatch.setattr(servers, "find_postgres", missing)
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="nothing here"):
        servers.shared_postgres()
    monkeypatch.setenv("CI", "1")
    with pytest.raises(pytest.fail.Exception, match="nothing here"):
        servers.shared_postgres()


def test_no_other_process_starts_one_of_its_own(monkeypatch):
    monkeypatch.setattr(servers, "_home", 1)
    with pytest.raises(AssertionError, match="given URLs"):
        servers.shared_redis()

"""The pooler that tests put before PostgreSQL: that it is one of transaction mode, and shows what breaks under one."""

import contextlib
import itertools
import threading
import time

import psycopg
import pytest
from psycopg import errors

from tests.support.pooler import Pooler


@pytest.fixture
def pooler(postgres):
    with Pooler(postgres.socket_path) as made:
        yield made


@pytest.fixture
def conn(pooler):
    with contextlib.closing(psycopg.connect(pooler.url, autocommit=True, prepare_threshold=None)) as opened:
        yield opened


def one(conn, sql, *params, **options):
    return conn.execute(sql, params, **options).fetchall()[0][0]


def backend(conn):
    return one(conn, "SELECT pg_backend_pid()")


@pytest.fixture
def table(postgres):
    with psycopg.connect(postgres.url, autocommit=True) as direct:
        direct.execute("CREATE TABLE pooled (i int)")
        yield lambda: [row[0] for row in direct.execute("SELECT i FROM pooled ORDER BY i")]
        direct.execute("DROP TABLE pooled")


def test_each_transaction_gets_another_server(pooler, conn):
    pids = [backend(conn) for _ in range(9)]
    assert len(set(pids)) == 3
    assert all(a != b for a, b in itertools.pairwise(pids))
    assert pooler.stayed == 0
    with conn.transaction():
        within = {backend(conn) for _ in range(5)}
    assert len(within) == 1
    assert backend(conn) not in within


def test_a_transaction_is_one(conn, table):
    with conn.transaction():
        conn.execute("INSERT INTO pooled VALUES (1)")
        assert table() == []
        conn.execute("INSERT INTO pooled VALUES (2)")
    assert table() == [1, 2]
    with contextlib.suppress(errors.DivisionByZero), conn.transaction():
        conn.execute("INSERT INTO pooled VALUES (3)")
        conn.execute("SELECT 1 / 0")
    assert table() == [1, 2]
    assert one(conn, "SELECT count(*) FROM pooled") == 2


def test_a_setting_of_the_session_leaks(conn):
    conn.execute("SET work_mem = '7MB'")
    found = [one(conn, "SHOW work_mem") for _ in range(6)]
    assert found.count("7MB") == 2
    with conn.transaction():
        conn.execute("SET LOCAL work_mem = '9MB'")
        assert one(conn, "SHOW work_mem") == "9MB"
    assert "9MB" not in [one(conn, "SHOW work_mem") for _ in range(6)]


def test_an_advisory_lock_of_the_session_leaks(conn):
    assert one(conn, "SELECT pg_try_advisory_lock(77)")
    assert not one(conn, "SELECT pg_try_advisory_lock(77)"), "another server holds it"
    assert not one(conn, "SELECT pg_advisory_unlock(77)"), "nor does this one"
    with conn.transaction():
        assert one(conn, "SELECT pg_try_advisory_xact_lock(78)")
    with conn.transaction():
        assert one(conn, "SELECT pg_try_advisory_xact_lock(78)")


def test_a_prepared_statement_is_absent_on_the_next_server(pooler):
    """Preparing one is a request of its own: the first use finds another server already."""
    seen = set()
    for _ in range(4):
        with psycopg.connect(pooler.url, autocommit=True) as conn:
            try:
                one(conn, "SELECT %s::int", 1, prepare=True)
            except (errors.InvalidSqlStatementName, errors.DuplicatePreparedStatement) as error:
                seen.add(type(error))
    # The second: another client, on a server that has a statement of this name by now.
    assert seen == {errors.InvalidSqlStatementName, errors.DuplicatePreparedStatement}


def test_startup_options_are_refused(pooler):
    for options in ("options=-c%20statement_timeout%3D5s", "replication=database"):
        with pytest.raises(psycopg.OperationalError, match="unsupported startup parameter"):
            psycopg.connect(f"{pooler.url}?{options}")
    with pytest.raises(psycopg.OperationalError, match='database "none" does not exist'):
        psycopg.connect(pooler.url, dbname="none")


def test_some_settings_follow_the_client(pooler, conn):
    with psycopg.connect(pooler.url, application_name="it's me", autocommit=True) as named:
        assert named.info.parameter_status("application_name") == "it's me"
        for _ in range(4):
            assert one(named, "SHOW application_name") == "it's me"
            assert one(conn, "SHOW application_name") == ""
        named.execute("SET TIME ZONE 'Asia/Tokyo'")
        for _ in range(4):
            assert one(named, "SHOW TimeZone") == "Asia/Tokyo"
            assert one(conn, "SHOW TimeZone") != "Asia/Tokyo"


def test_pipelines(conn, table):
    with conn.pipeline():
        for i in range(100):
            conn.execute("INSERT INTO pooled VALUES (%s)", [i])
    assert table() == list(range(100))
    with conn.pipeline(), conn.transaction():
        pids = [conn.execute("SELECT pg_backend_pid()") for _ in range(5)]
    assert len({cursor.fetchall()[0][0] for cursor in pids}) == 1
    with conn.pipeline() as pipeline:
        cursors = []
        for _ in range(5):
            cursors.append(conn.execute("SELECT pg_backend_pid()"))
            pipeline.sync()
    assert all(cursor.fetchall() for cursor in cursors)
    with contextlib.suppress(errors.DivisionByZero), conn.pipeline():
        conn.execute("INSERT INTO pooled VALUES (500)")
        conn.execute("SELECT 1 / 0")
    assert 500 not in table()


def test_large_values_pass(conn):
    text = "x" * 5_000_000
    assert one(conn, "SELECT %s::text || 'y'", text) == text + "y"


def test_more_clients_than_servers(pooler, table):
    failed = []

    def work(i):
        try:
            with psycopg.connect(pooler.url, prepare_threshold=None) as mine:
                for j in range(20):
                    with mine.transaction():
                        mine.execute("INSERT INTO pooled VALUES (%s)", [i * 100 + j])
                        mine.execute("SELECT 1")
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert table() == sorted(i * 100 + j for i in range(10) for j in range(20))
    assert len(pooler._servers) == 3


def test_a_client_that_leaves_in_a_transaction_leaves_nothing(pooler, conn, table):
    gone = psycopg.connect(pooler.url)
    gone.execute("INSERT INTO pooled VALUES (1)")
    gone.execute("LOCK TABLE pooled")
    gone.close()
    conn.execute("SET lock_timeout = 0")
    conn.execute("INSERT INTO pooled VALUES (2)")
    assert table() == [2]


def test_a_server_connection_that_ends_is_told_and_replaced(pooler, conn, postgres):
    other = psycopg.connect(pooler.url)
    pid = backend(other)
    with psycopg.connect(postgres.url) as direct:
        direct.execute("SELECT pg_terminate_backend(%s)", [pid])
    with pytest.raises(psycopg.OperationalError):
        backend(other)
    other.close()
    assert pid not in {backend(conn) for _ in range(6)}


def test_idle_server_connections_that_ended_are_not_given_out(pooler, conn, postgres):
    pids = {backend(conn) for _ in range(3)}
    with psycopg.connect(postgres.url) as direct:
        direct.execute("SELECT pg_terminate_backend(pid, 5000) FROM unnest(%s::int[]) AS pid", [list(pids)])
    time.sleep(0.05)
    assert not pids & {backend(conn) for _ in range(3)}


def test_a_query_is_cancelled(conn):
    timer = threading.Timer(0.2, conn.cancel_safe)
    timer.start()
    with pytest.raises(errors.QueryCanceled):
        conn.execute("SELECT pg_sleep(30)")
    timer.join()
    assert one(conn, "SELECT 1") == 1

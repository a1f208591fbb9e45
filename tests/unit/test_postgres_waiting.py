"""The PostgreSQL store when the server is slow, full, silent or gone, and when its process forks."""

import contextlib
import os
import signal
import threading
import time

import psycopg
import pytest

from safepoint.errors import (
    Unavailable,
    UsageError,
)
from safepoint.model import new_id
from safepoint.rows import CallWrite, Commit, replace
from safepoint.stores.url import open_store
from safepoint.testing.build import Writer, obj, tree
from tests.support.pooler import Pooler
from tests.support.proxy import Proxy
from tests.support.servers import fresh_postgres_url


@pytest.fixture
def url():
    return fresh_postgres_url()


@pytest.fixture
def store(url):
    store = open_store(url, timeout=5)
    yield store
    store.close()


@pytest.fixture
def side(postgres):
    """A connection beside the store."""
    with psycopg.connect(postgres.url, autocommit=True) as conn:
        yield conn


def schema_of(url):
    return url.rpartition("schema=")[2]


def _settles(call):
    return CallWrite(replace(call, status="succeeded", result=b"r"), "ended")


# -- waiting


def test_a_server_that_is_not_there_is_unavailable_within_the_timeout(tmp_path):
    store = open_store(f"postgresql://me@/x?host={tmp_path}", timeout=0.5)
    start = time.monotonic()
    with pytest.raises(Unavailable) as caught:
        store.tasks()
    assert 0.3 < time.monotonic() - start < 3
    assert "id" not in caught.value.details
    with pytest.raises(Unavailable) as caught:
        Writer(store).save()
    assert "unknown" not in caught.value.details
    store.close()


def test_an_answer_that_never_comes_is_unavailable_within_the_timeout(url, postgres):
    direct = open_store(url)
    Writer(direct).save()
    with Proxy(postgres.socket_path, "postgres") as proxy:
        store = open_store(f"{proxy.postgres_url}?schema={schema_of(url)}", timeout=0.6)
        writer = Writer(store, head=direct.task("task").head)
        writer.save(*tree("a"))
        proxy.hold()
        start = time.monotonic()
        with pytest.raises(Unavailable) as caught:
            store.tasks()
        assert time.monotonic() - start < 2.5
        start = time.monotonic()
        commit = writer.commit(*tree("b"))
        with pytest.raises(Unavailable):
            store.commit(commit)
        assert time.monotonic() - start < 2.5
        proxy.heal()
        done = store.commit(commit)
        assert (done.seq, store.task("task").checkpoints) == (3, 3)
        proxy.arm("hold", "up", 1, "after")
        proxy.rewind()
        commit = replace(writer.commit(*tree("c")), expect=done.head)
        proxy.arm("hold", "up", 1, "after")
        with pytest.raises(Unavailable) as caught:
            store.commit(commit)
        assert caught.value.details == {"id": commit.id, "task": "task", "unknown": True}
        proxy.heal()
        assert store.commit(commit).seq == 4
        store.close()
    direct.close()


def test_a_lock_is_waited_for_no_longer_than_the_timeout(url, side):
    with contextlib.closing(open_store(url)) as made:
        made.tasks()  # makes the tables: the other store has little time
    store = open_store(url, timeout=0.5)
    writer = Writer(store)
    writer.save()
    commit = writer.commit()
    with psycopg.connect(url.partition("&schema")[0]) as other:
        other.execute(f"SELECT FROM {schema_of(url)}.sp_tasks FOR UPDATE")
        start = time.monotonic()
        with pytest.raises(Unavailable) as caught:
            store.commit(commit)
        assert time.monotonic() - start < 2.5
        assert "unknown" not in caught.value.details
        with pytest.raises(Unavailable):
            store.acquire("task", b"me")
        assert store.task("task").checkpoints == 1  # reading waits for nobody
    assert store.commit(commit).seq == 2
    store.close()


def test_when_all_connections_are_lent_it_says_so(url):
    store = open_store(url, timeout=2, pool=2)
    store.tasks()
    with store.connection(), store.connection():
        start = time.monotonic()
        with pytest.raises(Unavailable, match="all 2 connections"):
            store.tasks()
        assert 1.5 < time.monotonic() - start < 4
    assert store.tasks() == []
    store.close()


def test_more_threads_than_connections_wait_for_each_other(url):
    store = open_store(url, pool=2)
    errors = []

    def work(me):
        try:
            writer = Writer(store, f"t{me}")
            for i in range(5):
                writer.save(obj(b"%d" % i))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(me,)) for me in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert [row.checkpoints for row in store.tasks()] == [5] * 12
    store.close()


def test_connections_that_the_server_has_ended_are_replaced(url, side, store):
    Writer(store).save()
    with store.connection(), store.connection():
        pass
    for _ in range(3):
        side.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = %s", (f"safepoint {os.getpid()}",)
        )
        assert store.task("task") is not None
        assert store.acquire("other", b"me", steal=True).guard.fence > 0


def test_a_call_that_is_interrupted_leaves_no_half_used_connection(url, store):
    writer = Writer(store)
    writer.save(*tree("a"))
    with psycopg.connect(url.partition("&schema")[0]) as other:
        other.execute(f"SELECT FROM {schema_of(url)}.sp_tasks FOR UPDATE")
        timer = threading.Timer(0.3, signal.raise_signal, (signal.SIGINT,))
        timer.start()
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            store.commit(writer.commit(*tree("b")))
        assert time.monotonic() - start < 3
        timer.join()
    for _ in range(3):
        assert store.task("task") is not None
    pool = store._db._pool
    assert pool._idle
    assert not list(pool._lent)
    assert not list(pool._opening)
    assert all(link.idle for link in pool._idle)


def test_a_pooler_between_transactions_is_no_hindrance(url, postgres):
    with Pooler(postgres.socket_path) as pooler:
        store = open_store(
            f"{pooler.url}&schema={schema_of(url)}" if "?" in pooler.url else f"{pooler.url}?schema={schema_of(url)}"
        )
        grant = store.acquire("task", b"me")
        writer = Writer(store, guard=grant.guard)
        for i in range(5):
            writer.save(*tree(f"{i}"))
            writer.settle(writer.call())
        found = store.read("task")
        assert found is not None
        assert len(found[1]) == 3
        call = writer.call(effect="transactional")
        with store.connection() as conn:
            conn.execute(f"CREATE TABLE {schema_of(url)}.effects (what text)")

        def body(conn):
            conn.execute(f"INSERT INTO {schema_of(url)}.effects VALUES ('sent')")
            return replace(Commit(task="task", id=new_id(), guard=grant.guard), calls=(_settles(call),))

        store.transact("task", grant.guard, call, body)
        store.release("task", grant)
        store.close()
        assert pooler.taken > 10


def test_another_isolation_level_is_refused(url, postgres):
    store = open_store(f"{url}&options=-cdefault_transaction_isolation%3Dserializable")
    with pytest.raises(UsageError, match="READ COMMITTED"):
        Writer(store).save()
    with pytest.raises(UsageError, match="READ COMMITTED"):
        store.acquire("task", b"me")
    store.close()


# -- forks

# Forking beside the threads of the test runner is meant here; Python 3.12 and newer warn of it.
forks = pytest.mark.filterwarnings(r"ignore:.*use of fork\(\):DeprecationWarning")


@forks
def test_a_forked_child_has_connections_of_its_own(url, store):
    Writer(store, "parent").save()
    before = store._db._pool._idle[0].info.backend_pid
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(BaseException):
            Writer(store, "child").save()
            mine = store._db._pool._idle[0].info.backend_pid
            os.write(write, b"other" if mine != before else b"same")
            store.close()
            code = 0
        os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert os.read(read, 10) == b"other"
    os.close(read)
    os.close(write)
    assert [row.task for row in store.tasks()] == ["child", "parent"]
    assert store._db._pool._idle[0].info.backend_pid == before


@forks
def test_the_middle_of_a_transaction_is_not_the_childs(url, store):
    grant = store.acquire("task", b"me")
    writer = Writer(store, guard=grant.guard)
    writer.save()
    call = writer.call(effect="transactional")
    ends = []

    def body(conn):
        conn.execute("SELECT 1")
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                conn.execute("SELECT 2")
            except UsageError:
                code = 0
            except BaseException:
                code = 2
            os._exit(code)
        ends.append(os.waitpid(pid, 0)[1])
        conn.execute("SELECT 3")
        return Commit(task="task", id=new_id(), guard=grant.guard, calls=(_settles(call),))

    store.transact("task", grant.guard, call, body)
    assert ends == [0]

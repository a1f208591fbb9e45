"""What the PostgreSQL store does beyond the contract: its schema, its answers when the server is slow, full or gone, its seams."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from urllib.parse import quote

import psycopg
import pytest

from safepoint.errors import (
    Conflict,
    Damaged,
    LeaseHeld,
    LeaseLost,
    NewerFormat,
    SafepointError,
    StoreFull,
    Unavailable,
    UsageError,
)
from safepoint.model import new_id
from safepoint.rows import Commit, Numbers, TaskPatch, replace
from safepoint.stores import renewing
from safepoint.stores.postgres import commit as commits
from safepoint.stores.postgres import read as reads
from safepoint.stores.postgres import rows as pgrows
from safepoint.stores.postgres import schema as schemas
from safepoint.stores.postgres.errors import translate
from safepoint.stores.postgres.store import PostgresStore
from safepoint.stores.url import open_store
from safepoint.testing.build import Writer, call_row, dump, obj, pause_row, reached, tree
from tests.support.pooler import Pooler
from tests.support.proxy import Proxy
from tests.support.servers import Postgres, fresh_postgres_url


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


# -- the schema


_OPENER = """
import sys
from safepoint.stores.postgres.store import PostgresStore
from safepoint.testing.build import Writer, tree
store = PostgresStore(sys.argv[1], schema=sys.argv[2], timeout=60)
print("ready", flush=True)
sys.stdin.readline()
Writer(store, sys.argv[3]).save(*tree("a"))
store.close()
print("saved", flush=True)
"""


def test_ten_processes_at_once_set_up_one_schema(url):
    plain, _, name = url.rpartition("&schema=")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    children = [subprocess.Popen([sys.executable, "-c", _OPENER, plain, name, f"t{i}"], **pipes) for i in range(10)]
    for child in children:
        assert child.stdout.readline() == "ready\n"
    for child in children:
        child.stdin.write("now\n")
        child.stdin.flush()
    assert [child.communicate(timeout=90) for child in children] == [("saved\n", "")] * 10
    store = open_store(url)
    assert [row.checkpoints for row in store.tasks()] == [1] * 10
    store.close()


def test_a_newer_schema_is_left_alone(url, side):
    store = open_store(url)
    Writer(store).save()
    store.close()
    name = schema_of(url)
    side.execute(f"UPDATE {name}.sp_meta SET value = '{schemas.SCHEMA + 1}' WHERE key = 'schema'")
    side.execute(f"ALTER TABLE {name}.sp_tasks RENAME COLUMN status TO state")
    before = side.execute(f"SELECT * FROM {name}.sp_meta ORDER BY key").fetchall()
    again = open_store(url)
    with pytest.raises(NewerFormat, match=f"version {schemas.SCHEMA + 1}"):
        again.task("task")
    with pytest.raises(NewerFormat):
        Writer(again).save()
    again.close()
    assert side.execute(f"SELECT * FROM {name}.sp_meta ORDER BY key").fetchall() == before


def test_functions_that_are_missing_are_added_and_newer_ones_are_no_hindrance(url, side, store):
    Writer(store).save()
    name = schema_of(url)
    for functions, last in ((0, True), (99, False)):
        side.execute(f"UPDATE {name}.sp_meta SET value = '{functions}' WHERE key = 'functions'")
        if last:
            for (signature,) in side.execute(
                "SELECT p.oid::regprocedure::text FROM pg_proc p WHERE pronamespace = %s::regnamespace", (name,)
            ).fetchall():
                side.execute(f"DROP FUNCTION {signature}")
        other = open_store(url)
        assert Writer(other, f"with-{functions}").save().seq == 1
        other.close()
        found = side.execute(f"SELECT value FROM {name}.sp_meta WHERE key = 'functions'").fetchall()
        assert found == [(str(len(schemas.FUNCTIONS) if last else functions),)]


def test_who_may_not_create_can_use_what_is_set_up(url, side, postgres):
    name = schema_of(url)
    role = f"r_{name}"
    side.execute(f"CREATE ROLE {role} LOGIN")
    side.execute("REVOKE CREATE ON SCHEMA public FROM public")
    theirs = url.replace("postgres@", f"{role}@")
    try:
        store = open_store(theirs)
        with pytest.raises(UsageError, match="may not set up schema") as caught:
            store.tasks()
        assert "GRANT" in caught.value.remedy
        store.close()
        Writer(store := open_store(url)).save(*tree("a"))
        store.close()
        store = open_store(theirs)
        with pytest.raises(UsageError, match="GRANT"):
            store.tasks()
        side.execute(f"GRANT USAGE ON SCHEMA {name} TO {role}")
        for what in ("TABLES", "SEQUENCES", "FUNCTIONS"):
            side.execute(f"GRANT ALL ON ALL {what} IN SCHEMA {name} TO {role}")
        grant = store.acquire("task", b"me")
        writer = Writer(store, guard=grant.guard, head=store.task("task").head)
        writer.save(*tree("b"))
        writer.settle(writer.call())
        Writer(store, "new").save()
        assert len(store.read("task")[1]) == 3
        store.prune("task", [1])
        store.release("task", grant)
        store.close()
    finally:
        side.execute(f"DROP OWNED BY {role}")
        side.execute(f"DROP ROLE {role}")


def test_a_schema_may_have_any_name(url, side):
    name = 'Ein "Schema" {x} ; -- \N{SNOWMAN}'
    plain = url.rpartition("&schema=")[0]
    try:
        store = open_store(plain, schema=name)
        writer = Writer(store)
        writer.save(*tree("a"))
        writer.settle(writer.call())
        assert len(store.read("task")[1]) == 3
        assert len(store.headers("task")) == 1
        store.release("task", store.acquire("task", b"me"))
        store.close()
        assert side.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", (name,)).fetchall() == [(1,)]
    finally:
        side.execute(psycopg.sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(psycopg.sql.Identifier(name)))


@pytest.mark.parametrize("name", ["", "a%b", "a\0", "x" * 64, "\N{SNOWMAN}" * 22])
def test_a_name_that_no_schema_can_have_is_refused(postgres, name):
    with pytest.raises(UsageError):
        PostgresStore(postgres.url, schema=name)


def test_a_schema_that_is_dropped_under_a_store_is_damage_and_not_an_empty_store(url, side, store):
    Writer(store).save()
    side.execute(f"DROP SCHEMA {schema_of(url)} CASCADE")
    with pytest.raises(Damaged, match="not whole"):
        store.tasks()
    with pytest.raises(Damaged, match="not whole"):
        Writer(store, "other").save()


# -- URLs


def test_an_option_that_nobody_knows_is_refused_by_name(postgres):
    with pytest.raises(UsageError, match="sslmodus") as caught:
        open_store(f"{postgres.url}&sslmodus=disable")
    assert "libpq" in str(caught.value)
    with pytest.raises(UsageError):
        open_store(f"{postgres.url}&connect_timeout=soon").tasks()


def test_no_password_is_shown(postgres):
    secret = "hush%40hush"
    host = quote(str(postgres.folder), safe="")
    for url in (
        f"postgresql://nobody:{secret}@/postgres?host={host}",
        f"postgresql://nobody@/postgres?host={host}&password={secret}",
        f"postgresql://nobody:{secret}@/postgres?host={host}&passwort={secret}",
        f"postgresql://nobody:{secret}@127.0.0.1:1/x",
        f"postgresql://nobody:{secret}@[::1/x",
    ):
        store = None
        shown = []
        try:
            store = open_store(url, timeout=0.2)
            shown += [store.url, repr(store)]
            store.tasks()
        except SafepointError as error:
            shown += [str(error), repr(error), repr(error.details), repr(error.__cause__)]
        assert shown
        assert not [text for text in shown if "hush" in text], url
        if store is not None:
            store.close()


def test_a_login_that_is_refused_is_said_at_once(url):
    for wrong in (url.replace("postgres@", "nobody_here@"), url.replace("@/postgres", "@/no_such_database")):
        store = open_store(wrong, timeout=20)
        start = time.monotonic()
        with pytest.raises(UsageError, match="refuses the login") as caught:
            store.tasks()
        assert time.monotonic() - start < 10
        assert "does not exist" in caught.value.why
        store.close()


def test_what_is_libpqs_in_a_url_comes_to_it_as_it_is_written(postgres):
    url = f"{postgres.url}&schema=s%20t&timeout=3&application_name=a%2Bb+c%26d&%74imeout=3"
    with pytest.raises(UsageError, match="twice"):
        open_store(url)
    store = PostgresStore(url.partition("&%74")[0], schema="x")
    assert psycopg.conninfo.conninfo_to_dict(store._db._info) == {
        "host": str(postgres.folder),
        "user": "postgres",
        "dbname": "postgres",
        "application_name": "a+b+c&d",
    }
    store.close()


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
    assert pool._count == len(pool._idle) == len(pool._all)
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
        assert len(store.read("task")[1]) == 3
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


def _settles(call):
    from safepoint.rows import CallWrite

    return CallWrite(replace(call, status="succeeded", result=b"r"), "ended")


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


# -- seams


def test_numbers_that_were_foreseen_wrongly_cost_a_trip_and_nothing_else(url, store):
    other = open_store(url)
    one = Writer(store)
    one.save(*tree("a"))
    two = Writer(other, head=one.head)
    assert two.save().seq == 2  # knows nothing of the task
    one.head = two.head
    assert one.save().seq == 3  # knows it as it was
    store._foreseen.put("task", Numbers(seq=90, call=90, pause=90, position=90))
    assert one.call().no == 1
    store._foreseen.put("task", Numbers(seq=90, call=90, pause=90, position=90))
    assert one.save().seq == 4
    store._foreseen.put("new", Numbers(seq=5))
    assert Writer(store, "new").save().seq == 1
    for task in ("task", "new"):
        for row in store.headers(task):
            row.check(task, "header")
    assert store.calls("task")[0][0].version == 1
    # The refusals that come before numbers do so also where numbers are wrong.
    other._foreseen.put("task", Numbers(seq=1))
    with pytest.raises(Conflict):
        Writer(other).save()
    other.close()


def test_a_late_duplicate_is_recognised_after_others_have_landed(store):
    writer = Writer(store)
    writer.save()
    first = Commit(task="task", id=new_id(), calls=(_begins(call_row(1)), _begins(call_row(1))), pauses=(_asks(pause_row(1)),))
    done = store.commit(first)
    for _ in range(15):
        writer.call()
    before = dump(store)
    again = store.commit(first)
    assert (again.existed, again.calls, again.pauses) == (True, done.calls, done.pauses)
    settled = writer.settle(done.calls[0])  # the seventeenth: now it is forgotten
    assert dump(store) != before
    store._foreseen.drop("task")
    assert settled.version == 2


def test_ids_of_commits_may_have_slashes_and_are_told_apart(store):
    Writer(store).save()
    for id in ("a", "x/a", "/a", "1/2/a", "a/"):
        assert not store.commit(Commit(task="task", id=id, patch=TaskPatch(reason=id))).existed
    for id in ("a", "x/a", "/a", "1/2/a", "a/"):
        assert store.commit(Commit(task="task", id=id)).existed
    assert not store.commit(Commit(task="task", id="/")).existed


def _begins(row):
    from safepoint.rows import CallWrite

    return CallWrite(row, "began")


def _asks(row):
    from safepoint.rows import PauseWrite

    return PauseWrite(row)


def test_a_lease_that_is_not_renewed_is_presumed_over_by_its_age(url, store, side):
    grant = store.acquire("task", b"me")
    table = f"{schema_of(url)}.sp_leases"
    process = renewing.this_process()
    # A holder on another host: nothing can be proven of it.
    side.execute(f"UPDATE {table} SET process = %s", (b"somebody",))
    with pytest.raises(LeaseHeld):
        store.acquire("task", b"other")
    side.execute(f"UPDATE {table} SET until = clock_timestamp() - interval '1 s'")
    assert not store.lease("task").live
    writer = Writer(store, guard=grant.guard)
    writer.save()  # nobody has taken it
    second = store.acquire("task", b"other")
    assert (second.previous, second.presumed, second.guard.fence) == ("presumed_dead", 1, 2)
    assert not store.holds("task", grant.guard)
    with pytest.raises(LeaseLost):
        writer.save()
    # One that is proven dead is so, however old its lease is.
    store.abandon("task", second)
    side.execute(f"UPDATE {table} SET until = clock_timestamp() - interval '1 s', gone = false, process = %s", (process,))
    assert store.acquire("task", b"third").previous == "dead"


_HOLDER = """
import sys, time
from safepoint.stores.postgres.store import PostgresStore
from safepoint.stores.url import open_store
store = open_store(sys.argv[1], lease=60)
store.acquire("task", b"me")
print("held", flush=True)
time.sleep(60)
"""


def test_a_holder_that_is_killed_on_this_host_is_dead_at_once(url, store):
    child = subprocess.Popen([sys.executable, "-c", _HOLDER, url], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "held\n"
    with pytest.raises(LeaseHeld) as caught:
        store.acquire("task", b"other")
    with pytest.raises(LeaseHeld):
        Writer(store).save()
    assert store.lease("task").live
    child.send_signal(signal.SIGSTOP)
    with pytest.raises(LeaseHeld):
        store.acquire("task", b"other")
    child.kill()
    child.wait()
    child.stdout.close()
    assert not store.lease("task").live
    Writer(store).save()
    assert caught.value.details["task"] == "task"
    grant = store.acquire("task", b"other")
    assert (grant.previous, grant.presumed) == ("dead", 0)


def test_a_lease_is_renewed_as_long_as_it_is_held(url, side):
    store = open_store(url, lease=1)
    grant = store.acquire("task", b"me")
    read = f"SELECT until FROM {schema_of(url)}.sp_leases"
    first = side.execute(read).fetchall()[0][0]
    end = time.monotonic() + 10
    while side.execute(read).fetchall()[0][0] <= first:
        assert time.monotonic() < end
        time.sleep(0.05)
    time.sleep(1.2)
    assert store.holds("task", grant.guard)
    assert store.lease("task").live
    store.close()
    assert side.execute(f"SELECT state, gone FROM {schema_of(url)}.sp_leases").fetchall() == [("held", True)]


def test_a_lease_survives_a_line_that_is_dead_for_less_than_its_length(url, postgres, caplog):
    with Proxy(postgres.socket_path, "postgres") as proxy:
        store = open_store(f"{proxy.postgres_url}?schema={schema_of(url)}", timeout=1, lease=3)
        grant = store.acquire("task", b"me")
        time.sleep(0.7)
        proxy.hold()  # the connection stays open, and nothing comes: it is given up on, and another one is opened
        time.sleep(1.2)
        proxy.cut()
        proxy.heal()
        end = time.monotonic() + 4
        while time.monotonic() < end:
            assert store.holds("task", grant.guard)
            time.sleep(0.05)
        store.release("task", grant)
        store.close()


def test_a_repeated_request_for_a_lease_finds_its_own(url, store, postgres):
    with Proxy(postgres.socket_path, "postgres") as proxy:
        behind = open_store(f"{proxy.postgres_url}?schema={schema_of(url)}", timeout=5)
        behind.tasks()
        first = behind.acquire("task", b"me")
        behind.abandon("task", first)
        proxy.rewind()
        proxy.arm("cut", "up", 1, "answer")
        grant = behind.acquire("task", b"me")
        assert proxy.fired
        assert (grant.guard.fence, grant.previous, grant.presumed) == (2, "dead", 0)
        assert store.task("task").attempts == 2
        proxy.rewind()
        proxy.arm("cut", "up", 1, "answer")
        behind.release("task", grant, TaskPatch(status="finished"))
        assert proxy.fired
        assert (store.task("task").status, store.lease("task").state) == ("finished", "released")
        behind.close()


# -- values


def test_texts_may_have_nul_where_they_are_no_ids(store):
    writer = Writer(store)
    text = "a\0b\1c\1\1\2\0\0"
    writer.save(row={"label": text})
    call = writer.call(tool=text, call_id=text, reason=text, idempotency_key=text)
    pause = writer.pause(name=text)
    writer.write(patch=TaskPatch(agent=text, reason=text))
    row = store.task("task")
    assert (row.agent, row.reason) == (text, text)
    assert store.headers("task")[0].label == text
    assert store.read("task")[0].label == text
    assert store.calls("task")[0] == [call]
    assert (call.tool, store.pauses("task")) == (text, [pause])
    for found in (*store.headers("task"), *store.calls("task")[0], *store.pauses("task")):
        found.check("task", "row")
    assert store.commit(Commit(task="task", id=new_id(), patch=TaskPatch(reason="\1\2"))).existed is False
    assert store.task("task").reason == "\1\2"


@pytest.mark.parametrize("text", ["", "\0", "\1", "\1\1", "\1\2", "\0\1\2", "\2\1\0", "a\1\0\2b", "\1\0\0\1"])
def test_what_is_escaped_comes_back(text):
    assert "\0" not in pgrows.encoded(text)
    assert pgrows.decoded(pgrows.encoded(text)) == text


def test_names_that_no_task_can_have_are_not_found(store):
    Writer(store).save()
    assert store.task("a\0b") is None
    assert store.read("a\0b") is None
    assert store.read("task", id="\0") is None
    assert store.headers("task", branch="\0") == []
    assert store.calls("\0") == ([], {})
    assert store.lease("\0") is None
    assert [row.task for row in store.tasks(after="a\0b")] == ["task"]
    assert store.tasks(after="task\0") == []


# -- reading


def test_objects_are_read_alike_in_both_ways(store, monkeypatch):
    writer = Writer(store)
    leaves = [obj(b"%d" % i * 300) for i in range(60)]
    pages = [obj(b"page", *leaves[:30]), obj(b"page2", *leaves[20:])]
    writer.save(*pages, objects=[*leaves, *pages])
    for i in range(5):
        writer.save(*tree(f"other {i}"))
    all_of_them = store.read("task", seq=1)
    asked = []
    ask = store._ask
    monkeypatch.setattr(store, "_ask", lambda name, *rest: asked.append(name) or ask(name, *rest))
    assert store.read("task", seq=1) == all_of_them
    assert asked == ["by_seq", "objects"]
    monkeypatch.setattr(reads, "SPARE", -1_000_000)
    asked.clear()
    assert store.read("task", seq=1) == all_of_them
    assert asked == ["by_seq", "reached"]
    assert all_of_them[1] == reached(store, [*leaves, *pages])


def test_an_object_that_is_lost_is_missing_in_the_answer(url, store, side):
    writer = Writer(store)
    top = tree("a")
    writer.save(*top)
    side.execute(f"DELETE FROM {schema_of(url)}.sp_objects WHERE name = %s", (top[1].name,))
    assert store.read("task")[1] == {o.name: o for o in (top[0], top[2])}
    side.execute(f"DELETE FROM {schema_of(url)}.sp_checkpoints")
    with pytest.raises(Damaged, match="checkpoint 1 is missing"):
        store.read("task")
    assert store.read("task", seq=1) is None


# -- big saves


def test_a_big_save_is_sent_in_parts_and_leaves_nothing_behind(url, store, side, monkeypatch):
    monkeypatch.setattr(commits, "BATCH", 10_000)
    stages = f"SELECT count(*) FROM {schema_of(url)}.sp_stages"
    things = [obj(b"%03d" % i * 400) for i in range(50)]
    writer = Writer(store)
    done = writer.save(*things)
    assert done.bytes_written > 60_000
    assert len(store.read("task")[1]) == 50
    assert side.execute(stages).fetchall() == [(0,)]
    grant = store.acquire("task", b"me")
    Writer(store, guard=grant.guard, head=writer.head).save(*[obj(b"x%03d" % i * 400) for i in range(50)])
    with pytest.raises(LeaseLost):
        Writer(store, guard=replace_guard(grant.guard)).save(*[obj(b"y%03d" % i * 400) for i in range(50)])
    with pytest.raises(Conflict):
        Writer(store, guard=grant.guard).save(*[obj(b"z%03d" % i * 400) for i in range(50)])
    assert side.execute(stages).fetchall() == [(0,)]


def replace_guard(guard):
    return type(guard)(guard.fence, "0" * 32)


def test_a_big_save_that_was_swept_in_between_sends_all_again(url, store, side, monkeypatch):
    monkeypatch.setattr(commits, "BATCH", 10_000)
    Writer(store).save()
    writer = Writer(store, head=store.task("task").head)
    name = schema_of(url)
    stage = store._stage

    def swept(commit):
        made = stage(commit)
        side.execute(f"DELETE FROM {name}.sp_objects")
        side.execute(f"UPDATE {name}.sp_tasks SET sweeps = sweeps + 1")
        return made

    monkeypatch.setattr(store, "_stage", swept)
    writer.save(*[obj(b"%03d" % i * 400) for i in range(50)])
    assert len(store.read("task")[1]) == 50
    assert side.execute(f"SELECT count(*) FROM {name}.sp_stages").fetchall() == [(0,)]


# -- transactional tools


@pytest.fixture
def tool(url, store, side):
    """What runs a tool's body in a transaction of the store's, and what it has written."""
    Writer(store).save()
    grant = store.acquire("task", b"me")
    writer = Writer(store, guard=grant.guard, head=store.task("task").head)
    side.execute(f"CREATE TABLE {schema_of(url)}.effects (what text NOT NULL)")
    insert = f"INSERT INTO {schema_of(url)}.effects VALUES ('sent')"
    call = writer.call(effect="transactional")

    def transact(*do):
        def body(conn):
            conn.execute(insert)
            for each in do:
                each(conn)
            return Commit(task="task", id=new_id(), guard=grant.guard, calls=(_settles(call),))

        return store.transact("task", grant.guard, call, body)

    transact.effects = lambda: side.execute(f"SELECT count(*) FROM {schema_of(url)}.effects").fetchall()[0][0]
    return transact


@pytest.mark.parametrize(
    "do",
    [
        lambda conn: conn.commit(),
        lambda conn: conn.rollback(),
        lambda conn: conn.close(),
        lambda conn: conn.set_autocommit(False),
        lambda conn: setattr(conn, "autocommit", False),
        lambda conn: conn.execute(" commit"),
        lambda conn: conn.cursor().execute(b"END;"),
        lambda conn: conn.execute("start transaction"),
        lambda conn: conn.execute("SELECT 1; BEGIN"),
    ],
)
def test_a_tool_that_would_end_the_transaction_is_refused_and_rolled_back(tool, store, do):
    with pytest.raises(UsageError):
        tool(do)
    assert tool.effects() == 0
    assert store.calls("task")[0][0].status == "started"
    tool()
    assert tool.effects() == 1


@pytest.mark.parametrize("statement", ["SELECT 1; COMMIT", "SELECT 1; COMMIT; BEGIN", "SELECT 1; COMMIT; BEGIN; SELECT 1/0"])
def test_a_tool_that_did_end_it_is_found_out(tool, store, statement):
    with pytest.raises(Unavailable) as caught:
        tool(lambda conn: conn.execute(statement))
    assert caught.value.details["unknown"] is True
    assert tool.effects() == 1
    assert store.calls("task")[0][0].status == "started"
    assert store.task("task") is not None


def test_a_savepoint_of_the_driver_works(tool):
    def savepoint(conn):
        with contextlib.suppress(psycopg.errors.DivisionByZero), conn.transaction():
            conn.execute("SELECT 1 / 0")
        with conn.transaction():
            conn.execute("SELECT 1")

    tool(savepoint)
    assert tool.effects() == 1


def test_an_error_that_the_tool_swallows_is_no_success(tool):
    def swallow(conn):
        with contextlib.suppress(psycopg.errors.DivisionByZero):
            conn.execute("SELECT 1 / 0")

    with pytest.raises(UsageError, match="went on"):
        tool(swallow)
    assert tool.effects() == 0


def test_a_tool_may_take_longer_than_the_timeout(url, side):
    store = open_store(url, timeout=0.4)
    grant = store.acquire("task", b"me")
    writer = Writer(store, guard=grant.guard)
    writer.save()
    call = writer.call(effect="transactional")

    def body(conn):
        conn.execute("SELECT pg_sleep(0.8)")
        return Commit(task="task", id=new_id(), guard=grant.guard, calls=(_settles(call),))

    assert store.transact("task", grant.guard, call, body).calls[0].status == "succeeded"
    store.close()


def test_a_connection_that_is_lost_under_a_tool_has_done_nothing(tool, side, store):
    def killed(conn):
        side.execute("SELECT pg_terminate_backend(%s, 5000)", (conn.info.backend_pid,))

    with pytest.raises(Unavailable) as caught:
        tool(killed)
    assert "unknown" not in caught.value.details
    assert tool.effects() == 0
    tool()
    assert tool.effects() == 1


def test_a_commit_of_a_tools_transaction_that_is_not_answered_is_asked_after(url, postgres, store):
    Writer(store).save()
    with Proxy(postgres.socket_path, "postgres") as proxy:
        behind = open_store(f"{proxy.postgres_url}?schema={schema_of(url)}", timeout=3)
        grant = behind.acquire("task", b"me")
        writer = Writer(behind, guard=grant.guard, head=store.task("task").head)
        for part, lands in (("answer", True), ("before", False)):
            call = writer.call(effect="transactional")

            def body(conn, call=call, part=part):
                conn.execute("SELECT 1")
                proxy.rewind()
                proxy.arm(
                    "cut", "up", lambda message: message.kind == "Q", part
                )  # COMMIT; the record's statement has parameters
                return Commit(task="task", id=new_id(), guard=grant.guard, calls=(_settles(call),))

            if lands:
                assert behind.transact("task", grant.guard, call, body).calls[0].status == "succeeded"
            else:
                with pytest.raises(Unavailable) as caught:
                    behind.transact("task", grant.guard, call, body)
                assert caught.value.details["landed"] is False
            assert proxy.fired
            assert store.calls("task", nos=[call.no])[0][0].status == ("succeeded" if lands else "started")
        behind.close()


# -- errors


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        ("53100", StoreFull),
        ("XX001", Damaged),
        ("XX002", Damaged),
        ("42P01", Damaged),
        ("42501", UsageError),
        ("25006", Unavailable),
        ("53300", Unavailable),
        ("57P03", Unavailable),
        ("55P03", Unavailable),
    ],
)
def test_states_of_the_server_have_errors_of_ours(state, kind):
    error = translate(psycopg.errors.lookup(state)("what it said\nDETAIL: Key (x)=(secret)"), "postgresql://h/x", "s")
    assert type(error) is kind
    assert "secret" not in str(error)
    assert error.remedy


def test_a_server_that_is_full_says_so():
    server = Postgres(max_connections=5)  # three of them are kept for superusers
    stores = []
    try:
        with psycopg.connect(server.url, autocommit=True) as conn:
            conn.execute("CREATE ROLE somebody LOGIN")
            conn.execute("GRANT CREATE ON DATABASE postgres TO somebody")
        theirs = server.url.replace("postgres@", "somebody@")
        stores = [open_store(theirs) for _ in range(2)]
        for store in stores:
            store.tasks()
        stores.append(open_store(theirs, timeout=1))
        with pytest.raises(Unavailable, match="no more connections"):
            stores[-1].tasks()
    finally:
        for store in stores:
            store.close()
        server.close()


def test_what_a_tool_does_to_its_session_is_nobody_elses(tool, url, store):
    def change(conn):
        conn.row_factory = psycopg.rows.dict_row
        conn.execute("SET statement_timeout = 1")

    tool(change)
    with store.connection() as conn:
        conn.autocommit = False
        conn.execute("SET search_path = nowhere")
        conn.commit()
    for _ in range(3):
        assert store.task("task") is not None
        with store.connection() as conn:
            assert conn.execute("SHOW statement_timeout").fetchall() == [("0",)]


def test_an_interrupted_tool_lets_go_of_the_task(url, tool, store):
    timer = threading.Timer(0.3, signal.raise_signal, (signal.SIGINT,))
    timer.start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        tool(lambda conn: conn.execute("SELECT pg_sleep(30)"))
    timer.join()
    tool()
    assert time.monotonic() - start < 15
    assert tool.effects() == 1


def test_a_store_that_nobody_has_any_more_leaves_no_connection(url, side):
    code = """
import gc, sys, warnings
warnings.simplefilter("error")
sys.unraisablehook = lambda told: (print("unraisable", told.exc_value), None)
from safepoint.stores.url import open_store
from safepoint.testing.build import Writer
store = open_store(sys.argv[1])
Writer(store).save()
store.acquire("task", b"me")
del store
gc.collect()
print("done")
"""
    done = subprocess.run([sys.executable, "-c", code, url], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("done\n", "")

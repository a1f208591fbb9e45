"""What the PostgreSQL store does beyond the contract: its seams, its values, big saves and the transactions of tools."""

import contextlib
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import psycopg
import pytest

from safepoint.errors import (
    Conflict,
    Damaged,
    LeaseHeld,
    LeaseLost,
    StoreFull,
    Unavailable,
    UsageError,
)
from safepoint.model import new_id
from safepoint.rows import CallWrite, Commit, Numbers, PauseWrite, TaskPatch, replace
from safepoint.stores import renewing
from safepoint.stores.postgres import commit as commits
from safepoint.stores.postgres import read as reads
from safepoint.stores.postgres import rows as pgrows
from safepoint.stores.postgres.errors import translate
from safepoint.stores.url import open_store
from safepoint.testing.build import Writer, call_row, dump, obj, pause_row, reached, tree
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


def _settles(call):
    return CallWrite(replace(call, status="succeeded", result=b"r"), "ended")


# -- seams


def test_numbers_that_were_foreseen_wrongly_cost_a_trip_and_nothing_else(url, store):
    other: Any = open_store(url)
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
    return CallWrite(row, "began")


def _asks(row):
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
        proxy.arm("cut", "up", lambda message: b"sp_acquire_1" in message.data, "answer")  # the renewing thread speaks too
        grant = behind.acquire("task", b"me")
        assert proxy.fired
        assert (grant.guard.fence, grant.previous, grant.presumed) == (2, "dead", 0)
        assert store.task("task").attempts == 2
        proxy.rewind()
        proxy.arm("cut", "up", lambda message: b"sp_release_1" in message.data, "answer")
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
    assert (store.delete_task("\0"), store.pin("\0", 1, True), store.pin("task", 1, True, space="\0")) == (False, False, False)
    assert not store.prune("\0", [1]).seqs
    assert not store.prune("task", [1], space="\0").seqs
    assert not list(store.pruning("\0", [1]))
    assert (store.live_objects("\0"), store.unreadable("\0", [1]), list(store.walk("\0"))) == (0, {}, [])
    assert store.place("\0", "checkpoint", 1) == "sp_checkpoints"
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

    def told(name, *rest):
        asked.append(name)
        return ask(name, *rest)

    monkeypatch.setattr(store, "_ask", told)
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

    made: Any = transact
    made.effects = lambda: side.execute(f"SELECT count(*) FROM {schema_of(url)}.effects").fetchall()[0][0]
    return made


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
    with contextlib.closing(open_store(url)) as made:
        made.tasks()  # makes the tables: the other store has little time
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
        ("58P01", Damaged),
        ("58030", Damaged),
        ("42P01", Damaged),
        ("42501", UsageError),
        ("25006", Unavailable),
        ("53300", Unavailable),
        ("57P03", Unavailable),
        ("55P03", Unavailable),
        ("42939", UsageError),
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
        conn.execute("SET statement_timeout = 60000")

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

"""What the SQLite store does beyond the contract: the file and its rows, errors, tools' transactions, big saves, fitness."""

import itertools
import os
import secrets
import subprocess
import sys
import threading
from importlib import resources
from typing import Any

import apsw
import pytest

from safepoint import _probe
from safepoint.errors import Conflict, Damaged, LeaseLost, NewerFormat, NotFound, StoreFull, Unavailable, UsageError
from safepoint.model import new_id
from safepoint.rows import CallWrite, Commit, Guard, TaskPatch, replace
from safepoint.stores import sqlite, sqlite_check, sqlite_db, sqlite_schema
from safepoint.stores.sqlite import SQLiteStore
from safepoint.testing.build import Writer, call_row, obj, tree


def opened(path, **options) -> Any:
    return SQLiteStore(path, **options)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "agent.db"


@pytest.fixture
def store(path):
    store = opened(path, durability="process", timeout=2)
    yield store
    store.close()


@pytest.fixture(autouse=True)
def no_hook():
    yield
    _probe.hook = None


def rows(store, statement, *values):
    """Rows past the library, by a connection of its own that stays open until the store is done with."""
    # apsw alone keeps count of the descriptors it has on a file, so that a second connection drops no lock of the first.
    conn = apsw.Connection(store.path)
    try:
        return conn.execute(statement, values).fetchall()
    finally:
        conn.close()


# -- the file


def test_only_the_owner_can_read_the_file(store, path):
    store.acquire("task", b"")
    for suffix in ("", "-wal", "-shm", "-locks"):
        assert os.stat(f"{path}{suffix}").st_mode & 0o777 == 0o600, suffix


def test_the_settings_that_durability_rests_on(path):
    store = opened(path)
    Writer(store).save()
    with store.connection() as conn:
        values = {name: conn.execute(f"PRAGMA {name}").fetchall()[0][0] for name in (
            "journal_mode", "page_size", "wal_autocheckpoint", "synchronous", "trusted_schema", "cell_size_check", "foreign_keys",
            "user_version", "application_id",
        )}  # fmt: skip
    assert values == {
        "journal_mode": "wal", "page_size": 8192, "wal_autocheckpoint": 1000, "synchronous": 2, "trusted_schema": 0,
        "cell_size_check": 1, "foreign_keys": 0, "user_version": sqlite_schema.SCHEMA,
        "application_id": sqlite_schema.APPLICATION_ID,
    }  # fmt: skip
    store.close()


@pytest.mark.parametrize(("durability", "sync", "level"), [("full", True, 2), ("full", False, 1), ("process", True, 1)])
def test_a_commit_is_flushed_as_it_asks(path, durability, sync, level):
    store = opened(path, durability=durability)
    seen = []
    _probe.hook = lambda name: seen.append(store._db._writer.rows("PRAGMA synchronous")[0][0]) if name == "commit.row" else None
    writer = Writer(store)
    for _ in range(2):
        store.commit(replace(writer.commit(), sync=not sync))
        writer.head = store.task("task").head
        writer.save(sync=sync)
    assert seen[1::2] == [level, level]
    store.close()


def test_the_schema_is_shipped_and_all_tables_carry_the_prefix(store):
    for number in range(1, sqlite_schema.SCHEMA + 1):
        assert "CREATE TABLE sp_" in (resources.files("safepoint.stores") / "sql" / f"sqlite_{number}.sql").read_text()
    names = {
        name for (name,) in rows(store, "SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%'")
    }
    wanted = [
        "meta",
        "tasks",
        "inputs",
        "checkpoints",
        "objects",
        "stages",
        "branches",
        "calls",
        "writes",
        "pauses",
        "leases",
        "outbox",
        "quarantine",
    ]
    assert names == {f"sp_{name}" for name in wanted}


def test_rows_are_what_was_given(store):
    leaf = obj(b"leaf")
    writer = Writer(store, "tâsk")
    done: Any = writer.save(leaf, row={"metadata": b"meta", "label": "é", "kind": "milestone"})
    row = store.read("tâsk")[0]
    assert rows(store, "SELECT task, next_seq, checkpoints, last_commit FROM sp_tasks") == [("tâsk", 2, 1, done.head.id)]
    assert rows(store, "SELECT k, seq, id, label, kind, metadata, root, seal FROM sp_checkpoints") == [
        (1 << 32 | 1, 1, done.head.id, "é", "milestone", b"meta", row.root, row.seal)
    ]
    assert rows(store, "SELECT task, stage, name, refs, data FROM sp_objects") == [(1, None, leaf.name, b"", b"leaf")]
    assert rows(store, "SELECT * FROM sp_branches") == [(1, "", "main", 1, done.head.id, 1, None)]


def test_a_damaged_object_is_healed_by_a_save_that_sends_it(store):
    page, *leaves = tree("a")
    writer = Writer(store)
    writer.save(page, objects=[page, *leaves])
    store._db._writer.execute("UPDATE sp_objects SET data = x'00' WHERE name = ?", (leaves[0].name,))
    assert store.read("task")[1][leaves[0].name].data == b"\0"
    writer.save(page, objects=[page, *leaves])
    assert store.read("task")[1][leaves[0].name] == leaves[0]


def test_a_file_with_tables_of_others_is_shared(path):
    conn = apsw.Connection(str(path))
    conn.execute("CREATE TABLE orders (n); PRAGMA user_version = 7; PRAGMA application_id = 99")
    conn.close()
    store = opened(path)
    Writer(store).save()
    store.close()
    store = opened(path)
    assert store.task("task").checkpoints == 1
    assert rows(store, "PRAGMA user_version") == [(7,)]
    assert rows(store, "PRAGMA application_id") == [(99,)]
    store.close()


def test_a_newer_file_is_refused_and_left_alone(path):
    SQLiteStore(path).close()
    conn = apsw.Connection(str(path))
    now = sqlite_schema.SCHEMA
    conn.execute(f"PRAGMA user_version = {now + 1}")
    with pytest.raises(NewerFormat, match=f"format {now + 1}"):
        SQLiteStore(path)
    conn.execute(f"PRAGMA user_version = {now}; UPDATE sp_meta SET value = {now + 2} WHERE key = 'schema'")
    conn.close()
    with pytest.raises(NewerFormat, match=f"format {now + 2}"):
        SQLiteStore(path)


def test_what_is_no_database_is_damaged(path):
    path.write_bytes(b"not a database at all, but long enough to be looked at" * 200)
    with pytest.raises(Damaged, match=r"agent\.db"):
        SQLiteStore(path)


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(Unavailable, match=r"absent/agent\.db"):
        SQLiteStore(tmp_path / "absent" / "agent.db")
    with pytest.raises(Unavailable):
        SQLiteStore(tmp_path)


@pytest.mark.parametrize("name", ["", ":memory:", "a\0b"])
def test_what_is_no_path_is_refused(name):
    with pytest.raises(UsageError):
        SQLiteStore(name)


def test_a_file_that_was_removed_is_not_saved_into_the_void(store, path):
    writer = Writer(store)
    writer.save()
    for suffix in ("", "-wal", "-shm"):
        os.rename(f"{path}{suffix}", f"{path}{suffix}.moved")
    with pytest.raises(Unavailable, match="is gone"):
        writer.save()
    assert not path.exists()
    for suffix in ("-wal", "-shm", ""):
        os.rename(f"{path}{suffix}.moved", f"{path}{suffix}")
    assert writer.save().seq == 2


def test_sixteen_stores_begin_one_file_at_once(path):
    errors, gate = [], threading.Barrier(16)

    def work(i):
        try:
            gate.wait()
            store = opened(path, durability="process")
            writer = Writer(store, f"task-{i % 4}", branch=f"b{i}")
            for _ in range(20):
                writer.save(obj(secrets.token_bytes(50)))
            store.close()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    store = opened(path)
    assert sum(row.checkpoints for row in store.tasks()) == 320
    store.close()


def test_many_processes_write_at_once(path):
    script = (
        "import sys\nfrom safepoint.stores.sqlite import SQLiteStore\nfrom safepoint.testing.build import Writer, obj\n"
        "store = SQLiteStore(sys.argv[1])\nwriter = Writer(store, 'task', branch=sys.argv[2])\n"
        "for i in range(25): writer.save(obj(f'{sys.argv[2]}/{i}'.encode()))\n"
    )
    running = [subprocess.Popen([sys.executable, "-c", script, str(path), f"b{i}"]) for i in range(8)]
    assert [process.wait() for process in running] == [0] * 8
    store = opened(path)
    assert [row.seq for row in store.headers("task")] == list(range(200, 0, -1))
    store.close()


# -- who waits, and for how long


def test_a_writer_elsewhere_is_waited_for_no_longer_than_timeout(path):
    store = opened(path, timeout=0.1)
    with apsw.Connection(str(path)) as other:
        other.execute("BEGIN IMMEDIATE") if not other.in_transaction else other.execute("INSERT INTO sp_meta VALUES ('x', 1)")
        with pytest.raises(Unavailable, match=r"agent\.db is in use") as raised:
            Writer(store).save()
        assert "locked" not in str(raised.value)
        assert "unknown" not in raised.value.details
        assert store.task("task") is None  # a reader is not held up
        if other.in_transaction:
            other.execute("DELETE FROM sp_meta WHERE key = 'x'")
    assert Writer(store).save().seq == 1
    store.close()


def test_a_thread_is_waited_for_no_longer_than_timeout(path):
    store = opened(path, timeout=0.1)
    inside, leave = threading.Event(), threading.Event()

    def occupy():
        with store.connection():
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=occupy)
    thread.start()
    inside.wait()
    with pytest.raises(Unavailable, match="another thread"):
        Writer(store).save()
    assert store.tasks() == []
    leave.set()
    thread.join()
    store.close()


# -- errors

POINTS = ["commit.objects", "commit.row", "commit.before"]


@pytest.mark.parametrize("point", POINTS)
def test_whatever_is_raised_inside_leaves_nothing_behind(store, point):
    writer = Writer(store)
    writer.save()

    def interrupt(name):
        if name == point:
            raise KeyboardInterrupt

    _probe.hook = interrupt
    with pytest.raises(KeyboardInterrupt):
        writer.save(obj(b"new"))
    _probe.hook = None
    assert not store._db._writer.in_transaction
    assert rows(store, "SELECT count(*) FROM sp_objects") == [(0,)]
    assert writer.save().seq == 2


@pytest.mark.parametrize(
    ("raised", "wanted"),
    [
        (apsw.FullError, StoreFull),
        (apsw.BusyError, Unavailable),
        (apsw.LockedError, Unavailable),
        (apsw.CorruptError, Damaged),
        (apsw.NotADBError, Damaged),
        (apsw.IOError, Unavailable),
        (apsw.ReadOnlyError, Unavailable),
        (apsw.CantOpenError, Unavailable),
        (apsw.PermissionsError, Unavailable),
        (apsw.TooBigError, UsageError),
        (apsw.NoMemError, Unavailable),
    ],
)
def test_sqlites_errors_are_told_in_the_librarys_terms(store, raised, wanted):
    def fail(name):
        if name == "commit.row":
            raise raised("as SQLite says")

    _probe.hook = fail
    with pytest.raises(wanted) as caught:
        Writer(store).save()
    assert type(caught.value) is wanted
    assert "as SQLite says" in str(caught.value) or wanted is Unavailable
    assert store.path in str(caught.value) or wanted is UsageError
    assert isinstance(caught.value.__cause__, raised)


class Sabotage:
    """Makes COMMIT raise, before or after it has been done."""

    def __init__(self, monkeypatch, *, lands, times=1, also=None):
        real = sqlite_db.Connection.execute
        left = itertools.count(times, -1)

        def execute(conn, statement, *values, **more):
            if statement != "COMMIT" or conn.readonly("main") or conn is store_reader(conn) or next(left) <= 0:
                return real(conn, statement, *values, **more)
            if lands:
                real(conn, statement)
            if also is not None:
                monkeypatch.undo()
                also()
                monkeypatch.setattr(sqlite_db.Connection, "execute", real)
            raise apsw.IOError("fsync failed")

        monkeypatch.setattr(sqlite_db.Connection, "execute", execute)


def store_reader(conn):
    """The reading connection ends its transactions with COMMIT too; it is not meant here."""
    return conn if conn.execute("PRAGMA query_only").fetchall() == [(1,)] else None


def test_a_commit_whose_error_came_after_it_landed_is_acknowledged(store, monkeypatch):
    writer = Writer(store)
    writer.save()
    with monkeypatch.context() as patch:
        Sabotage(patch, lands=True)
        assert writer.save(obj(b"new")).seq == 2
    assert store.task("task").head.seq == 2
    assert writer.save().seq == 3


def test_a_commit_whose_error_came_before_it_landed_says_so(store, monkeypatch):
    writer = Writer(store)
    writer.save()
    nonce = rows(store, "SELECT value FROM sp_meta WHERE key = 'nonce'")
    with monkeypatch.context() as patch:
        Sabotage(patch, lands=False)
        with pytest.raises(Unavailable) as raised:
            writer.save(obj(b"new"))
    assert "unknown" not in raised.value.details
    # A write of our own lies where the frames of the failed commit were, so that no recovery brings them back.
    assert rows(store, "SELECT value FROM sp_meta WHERE key = 'nonce'") == [(nonce[0][0] + 1,)]
    assert writer.save().seq == 2


@pytest.mark.parametrize("lands", [True, False])
def test_a_commit_that_nobody_can_ask_about_names_its_id(store, monkeypatch, lands):
    writer = Writer(store)
    writer.save()
    commit = writer.commit()
    with monkeypatch.context() as patch:
        Sabotage(patch, lands=lands, times=2)
        with pytest.raises(Unavailable) as raised:
            store.commit(commit)
    assert raised.value.details["id"] == commit.id
    assert raised.value.details["unknown"] is True
    again = store.commit(commit)
    assert again.existed is lands
    assert again.seq == 2


@pytest.mark.parametrize("lands", [True, False])
def test_the_unknown_outcome_of_a_call_is_found_by_its_row(store, monkeypatch, lands):
    writer = Writer(store)
    writer.save()
    call = writer.call()
    result = replace(call, status="succeeded", result=b"42")

    def somebody_else():  # a task's last commit is then another one
        store.commit(Commit(task="task", id=new_id(), anyway=True, patch=TaskPatch(reason="x")))

    with monkeypatch.context() as patch:
        Sabotage(patch, lands=lands, also=None)
        if lands:
            assert writer.write(result, stamp="ended").calls[0].version == 2
        else:
            with pytest.raises(Unavailable) as raised:
                writer.write(result, stamp="ended")
            assert "unknown" not in raised.value.details
    somebody_else()
    assert store.calls("task")[0][0].version == 1 + lands


def test_landed_is_told_apart_when_others_have_written_since(store):
    writer = Writer(store)
    writer.save()
    call = writer.call()
    commit = Commit(task="task", id="c1", calls=(CallWrite(replace(call, result=b"r"), "ended"),))
    with store._db.writing(True) as conn:
        before = store._find(conn, "task")
        written = store._write(conn, before, commit, None)
    writer.write(anyway=True, patch=TaskPatch(reason="x"))
    with store._db.writing(True) as conn:
        assert store._landed(conn, commit, before, written) is True
    writer.write(written.calls[0], stamp="")
    with store._db.writing(True) as conn:
        assert store._landed(conn, commit, before, written) is None  # version 3 may stand on ours or on another's


def test_an_unknown_acquire_is_settled(store, monkeypatch):
    with monkeypatch.context() as patch:
        Sabotage(patch, lands=True)
        grant = store.acquire("task", b"")
    assert store.holds("task", grant.guard)
    store.release("task", grant)
    with monkeypatch.context() as patch:
        Sabotage(patch, lands=False)
        with pytest.raises(Unavailable):
            store.acquire("task", b"")
    assert store.lease("task").state == "released"
    assert store.acquire("task", b"").guard.fence == 2


def test_a_store_goes_on_after_its_disk_was_full(path):
    store = opened(path)
    writer = Writer(store)
    writer.save()
    with store.connection() as conn:
        pages = conn.execute("PRAGMA page_count").fetchall()[0][0]
    store._db._writer.execute(f"PRAGMA max_page_count={pages + 3}")
    with pytest.raises(StoreFull, match="deleting checkpoints does not help"):
        writer.save(obj(secrets.token_bytes(100_000)))
    store._db._writer.execute("PRAGMA max_page_count=1000000")
    assert writer.save(obj(secrets.token_bytes(100_000))).seq == 2
    store.close()


# -- tools' transactions


@pytest.fixture
def held(store):
    writer = Writer(store)
    writer.save()
    writer.guard = store.acquire("task", b"").guard
    with store.connection() as conn:
        conn.execute("CREATE TABLE effects (n INTEGER)")
    return writer


def run_tool(store, writer, body, call=None):
    call = call or writer.call(effect="transactional")

    def whole(conn):
        body(conn)
        row = replace(call, status="succeeded", result=b"done")
        return Commit(task="task", id=new_id(), guard=writer.guard, calls=(CallWrite(row, "ended"),))

    return store.transact("task", writer.guard, call, whole)


def effects(store):
    return [n for (n,) in rows(store, "SELECT n FROM effects ORDER BY n")]


def test_effect_and_record_are_one(store, held):
    def tool(conn):
        conn.execute("INSERT INTO effects VALUES (1)")
        with conn:
            conn.execute("INSERT INTO effects VALUES (2)")
        with pytest.raises(apsw.SQLError), conn:
            conn.execute("INSERT INTO effects VALUES (3); SELECT nonsense")

    done = run_tool(store, held, tool)
    assert done.calls[0].status == "succeeded"
    assert effects(store) == [1, 2]
    assert store.calls("task")[0][0].result == b"done"


FORBIDDEN = [
    "COMMIT", "END", "ROLLBACK", "BEGIN", "BEGIN IMMEDIATE", "ATTACH 'other.db' AS other", "DETACH main",
    "DELETE FROM sp_objects", "UPDATE sp_tasks SET status = 'x'", "INSERT INTO sp_meta VALUES ('a', 1)", "DROP TABLE sp_calls",
    "CREATE TRIGGER t AFTER INSERT ON sp_calls BEGIN DELETE FROM sp_calls; END", "ALTER TABLE sp_calls ADD COLUMN x",
    "CREATE TABLE sp_mine (n)", "PRAGMA synchronous=OFF", "PRAGMA journal_mode=DELETE", "PRAGMA user_version=9",
    "CREATE INDEX i ON sp_calls (tool)", "VACUUM",
]  # fmt: skip


@pytest.mark.parametrize("statement", FORBIDDEN)
def test_a_tool_cannot_end_the_transaction_nor_touch_what_is_ours(store, held, statement):
    def tool(conn):
        conn.execute("INSERT INTO effects VALUES (1)")
        conn.execute(statement)

    with pytest.raises((UsageError, Unavailable, apsw.Error)) as raised:
        run_tool(store, held, tool)
    assert isinstance(raised.value, UsageError) or statement == "VACUUM", raised.value
    assert effects(store) == []
    assert store.calls("task")[0][0].status == "started"
    assert held.save().seq == 2  # nothing of the guard is left on the connection


@pytest.mark.parametrize("statement", ["COMMIT", "ROLLBACK", "DELETE FROM sp_objects"])
def test_a_refusal_that_the_tool_swallows_changes_nothing(store, held, statement):
    def tool(conn):
        conn.execute("INSERT INTO effects VALUES (1)")
        with pytest.raises(UsageError):
            conn.execute(statement)

    run_tool(store, held, tool)
    assert effects(store) == [1]


def test_what_a_tool_raises_goes_on_and_all_is_rolled_back(store, held):
    def tool(conn):
        conn.execute("INSERT INTO effects VALUES (1)")
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        run_tool(store, held, tool)
    assert effects(store) == []
    assert held.save().seq == 2


def test_a_transaction_that_sqlite_ended_leaves_the_call_in_doubt(store, held):
    def tool(conn):
        conn.execute("INSERT INTO effects VALUES (1)")
        with pytest.raises(apsw.ConstraintError):
            # ON CONFLICT ROLLBACK is an end of the transaction that no authorizer sees, like a full disk.
            conn.execute("CREATE TABLE once (n UNIQUE ON CONFLICT ROLLBACK); INSERT INTO once VALUES (1), (1)")
        assert not conn.in_transaction
        for statement in ("INSERT INTO effects VALUES (2)", "SAVEPOINT s; INSERT INTO effects VALUES (3); RELEASE s"):
            try:
                conn.execute(statement)
            except apsw.Error:
                pass

    with pytest.raises(Unavailable) as raised:
        run_tool(store, held, tool)
    assert raised.value.details["unknown"] is True
    assert effects(store) == []
    assert store.calls("task")[0][0].status == "started"
    assert held.save().seq == 2


def test_a_call_that_has_changed_or_is_gone_is_not_executed(store, held):
    call = held.call(effect="transactional")
    held.write(call, stamp="")
    never = pytest.fail
    with pytest.raises(Conflict):
        run_tool(store, held, never, call)
    with pytest.raises(NotFound):
        run_tool(store, held, never, call_row(1, no=77, version=1))
    with pytest.raises(LeaseLost):
        store.transact("task", Guard(9, "x"), call, never)
    with pytest.raises(NotFound):
        store.transact("absent", held.guard, call, never)


def test_a_tool_cannot_use_the_store_or_close_its_connection(store, held):
    def tool(conn):
        with pytest.raises(UsageError, match="inside one of its own"):
            Writer(store, "other").save()
        with pytest.raises(UsageError, match="inside one of its own"):
            store.close()
        with pytest.raises(UsageError, match="lent"):
            conn.close()
        assert store.task("task").head.seq == 1  # reading is another connection
        conn.execute("INSERT INTO effects VALUES (1)")

    run_tool(store, held, tool)
    assert effects(store) == [1]
    assert store.task("other") is None


def test_an_unknown_end_of_a_transaction_is_settled(store, held, monkeypatch):
    call = held.call(effect="transactional")
    with monkeypatch.context() as patch:
        Sabotage(patch, lands=True)
        assert run_tool(store, held, lambda conn: conn.execute("INSERT INTO effects VALUES (1)"), call).calls[0].version == 2
    assert effects(store) == [1]


def test_a_transaction_that_did_not_land_says_so(store, held, monkeypatch):
    call = held.call(effect="transactional")
    with monkeypatch.context() as patch:
        Sabotage(patch, lands=False)
        with pytest.raises(Unavailable, match="did not land") as raised:
            run_tool(store, held, lambda conn: conn.execute("INSERT INTO effects VALUES (1)"), call)
    assert raised.value.details["landed"] is False
    assert raised.value.details["id"]
    assert "unknown" not in raised.value.details
    assert effects(store) == []
    assert store.calls("task")[0] == [call]
    run_tool(store, held, lambda conn: conn.execute("INSERT INTO effects VALUES (2)"), call)
    assert effects(store) == [2]


@pytest.mark.parametrize("lands", [True, False])
def test_a_transaction_that_nobody_can_ask_about_is_whole_or_absent(store, held, monkeypatch, lands):
    call = held.call(effect="transactional")
    with monkeypatch.context() as patch:
        Sabotage(patch, lands=lands, times=2)
        with pytest.raises(Unavailable, match="not known") as raised:
            run_tool(store, held, lambda conn: conn.execute("INSERT INTO effects VALUES (1)"), call)
    assert raised.value.details["id"]
    assert not {"unknown", "landed"} & set(raised.value.details)
    assert effects(store) == [1] * lands
    assert store.calls("task")[0][0].status == ("succeeded" if lands else "started")


def test_a_tools_errors_are_its_own_and_the_stores_are_translated(store, held):
    with store.connection() as conn:
        conn.execute("CREATE TABLE once (n UNIQUE)")
    with pytest.raises(apsw.ConstraintError, match="once"):
        run_tool(store, held, lambda conn: conn.execute("INSERT INTO once VALUES (1), (1)"))
    assert rows(store, "SELECT * FROM once") == []

    def fail(name):
        if name == "transact.before":
            raise apsw.IOError("the disk")

    _probe.hook = fail
    with pytest.raises(Unavailable, match="the disk") as raised:
        run_tool(store, held, lambda conn: None)
    assert "id" not in raised.value.details
    assert not store._db._writer.in_transaction


def test_a_lent_connection_that_comes_back_open_is_rolled_back(store):
    with store.connection() as conn:
        conn.execute("CREATE TABLE effects (n)")
    with pytest.raises(UsageError, match="open transaction"), store.connection() as conn:
        conn.execute("BEGIN; INSERT INTO effects VALUES (1)")
    with pytest.raises(UsageError, match="sp_"), store.connection() as conn:
        conn.execute("DELETE FROM sp_objects")
    with pytest.raises(UsageError, match="attached"), store.connection() as conn:
        conn.execute("ATTACH ':memory:' AS m")
    with store.connection() as conn, conn:
        conn.execute("INSERT INTO effects VALUES (2)")
    assert effects(store) == [2]


# -- big saves


@pytest.fixture
def small_batches(monkeypatch):
    monkeypatch.setattr(sqlite, "BATCH", 1000)


def big(text="big", n=10):
    return [obj(f"{text}/{i}".encode() + b"x" * 400) for i in range(n)]


def test_a_big_save_lets_others_write_in_between(store, path, small_batches):
    order = []
    other = opened(path, durability="process")

    def hook(name):
        order.append(name)
        if name == "commit.staged":
            _probe.hook = None
            Writer(other, f"other-{len(order)}").save()
            _probe.hook = hook

    _probe.hook = hook
    objects = big()
    assert Writer(store).save(*objects).seq == 1
    assert order.count("commit.staged") == 4
    assert set(store.read("task")[1].values()) == set(objects)
    assert len(store.tasks()) == 5
    assert rows(store, "SELECT * FROM sp_stages") == []
    other.close()


@pytest.mark.parametrize("begun", [True, False], ids=["grown", "new"])
def test_a_sweep_spares_what_is_staged_and_what_it_takes_is_sent_again(store, path, small_batches, begun):
    writer = Writer(store)
    if begun:
        writer.save(obj(b"first"))
        writer.save(obj(b"second"))
    other = opened(path, durability="process")
    swept = []

    def hook(name):
        if name == "commit.staged":
            swept.append(other.prune("task", [1]).objects)
            if len(swept) == 3:  # as if the protection had failed
                other._db._writer.execute("DELETE FROM sp_objects WHERE stage IS NOT NULL")
                other._db._writer.execute("UPDATE sp_tasks SET sweeps = sweeps + 1")

    _probe.hook = hook
    objects = big()
    writer.save(*objects)
    assert swept == ([1, 0, 0, 0] if begun else [0, 0, 0, 0])
    if begun:
        assert set(store.read("task")[1].values()) == set(objects)
    other.close()


def test_a_task_deleted_and_begun_anew_in_between_gets_everything(store, path, small_batches):
    writer = Writer(store)
    writer.save()
    other = opened(path, durability="process")
    seen: list[int] = []

    def hook(name):
        if name == "commit.staged" and not seen:
            seen.append(1)
            other.delete_task("task")

    _probe.hook = hook
    objects = big()
    with pytest.raises((Conflict, NotFound)):
        writer.save(*objects)
    _probe.hook = None
    writer.head = None
    writer.save(*objects)
    assert set(store.read("task")[1].values()) == set(objects)
    other.close()


@pytest.mark.filterwarnings(r"ignore:.*use of fork\(\):DeprecationWarning")  # Python 3.12 and newer
def test_what_a_dead_big_save_left_is_swept(path, small_batches):
    store = opened(path, durability="process")
    Writer(store).save(obj(b"first"))
    for task in ("task", "new"):
        child = os.fork()
        if not child:
            try:
                hooked = itertools.count()
                _probe.hook = lambda name, n=hooked: os._exit(9) if name == "commit.staged" and next(n) == 1 else None
                writer = Writer(store, task)
                writer.head = None if task == "new" else store.task(task).head
                writer.save(*big(task))
            finally:
                os._exit(1)  # never a second test runner
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert store.task("new") is None
    # The second of the dead saves has swept nothing of the first: its task lives. Then a sweep of that task does.
    assert rows(store, "SELECT count(*) FROM sp_objects") == [(13,)]
    assert store.prune("task", []).objects == 6
    Writer(store, "third").save(*big("third"))  # the next big save clears away what has no task
    assert rows(store, "SELECT count(*) FROM sp_objects") == [(11,)]
    assert rows(store, "SELECT * FROM sp_stages") == []
    store.close()


def test_a_big_save_that_is_refused_leaves_no_task_and_only_garbage(store, small_batches):
    writer = Writer(store)
    writer.save()
    with pytest.raises(Conflict):
        store.commit(replace(writer.commit(*big()), expect=None))
    with pytest.raises(NotFound):
        store.commit(replace(writer.commit(*big()), task="absent", guard=Guard(1, "x")))
    assert store.task("absent") is None
    assert rows(store, "SELECT * FROM sp_stages") == []
    assert store.prune("task", []).objects == 10
    assert rows(store, "SELECT count(*) FROM sp_objects") == [(0,)]


def test_numbers_of_tasks_on_their_way_are_not_given_twice(store, path, small_batches):
    other = opened(path, durability="process")

    def hook(name):
        if name == "commit.staged":
            _probe.hook = None
            Writer(other, "second").save(obj(b"second"))

    _probe.hook = hook
    objects = big()
    Writer(store, "first").save(*objects)
    assert set(store.read("first")[1].values()) == set(objects)
    assert list(store.read("second")[1].values()) == [obj(b"second")]
    other.close()


# -- fitness


def levels(store):
    return {finding.name: finding.level for finding in store.check()}


def test_a_fit_store_says_so(store):
    found = levels(store)
    found.pop("disk")  # this machine's own affair
    assert set(found.values()) == {"ok"}
    assert set(found) == {
        "write", "files", "sqlite", "journal", "file system", "descriptors", "permissions", "witness",
    }  # fmt: skip


def test_check_sees_foreign_descriptors(store, path):
    Writer(store).save()
    store.task("task")
    second = opened(path)
    second.task("task")
    assert levels(store)["descriptors"] == "ok"
    fds = [os.open(f"{path}{suffix}", os.O_RDONLY) for suffix in ("", "-wal", "-shm")]
    finding = next(f for f in store.check() if f.name == "descriptors")
    assert finding.level == "error"
    assert "agent.db, agent.db-wal, agent.db-shm" in finding.text
    for fd in fds:
        os.close(fd)
    second.close()


def test_check_sees_open_permissions_and_a_wrong_journal(store, path):
    os.chmod(path, 0o644)
    assert levels(store)["permissions"] == "warning"


def test_check_sees_a_full_disk_and_an_old_sqlite(store, monkeypatch):
    full = os.statvfs_result((4096, 4096, 1000, 10, 10, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    monkeypatch.setattr(apsw, "sqlite_lib_version", lambda: "3.51.2")
    assert levels(store)["disk"] == "warning"
    assert levels(store)["sqlite"] == "warning"


@pytest.mark.parametrize(
    ("kind", "refused"),
    [
        ("ext4", False),
        ("tmpfs", False),
        ("nfs4", True),
        ("cifs", True),
        ("9p", True),
        ("fuse.sshfs", True),
        ("fuse.portal", False),
    ],
)
def test_network_file_systems_are_known(tmp_path, kind, refused):
    mounts = tmp_path / "mounts"
    mounts.write_text(
        f"/dev/a / ext4 rw 0 0\nhost:/x /mnt/my\\040share {kind} rw 0 0\n/dev/b /mnt/my\\040share/local xfs rw 0 0\n"
    )
    found = sqlite_check.network_file_system("/mnt/my share/a.db", str(mounts))
    assert (found == kind) if refused else (found is None)
    assert sqlite_check.network_file_system("/mnt/my share/local/a.db", str(mounts)) is None
    assert sqlite_check.network_file_system("/mnt/my shared/a.db", str(mounts)) is None


def test_a_network_file_system_is_refused_unless_told(path, monkeypatch):
    monkeypatch.setattr(sqlite_check, "network_file_system", lambda _: "nfs4")
    with pytest.raises(UsageError, match="network_ok=True"):
        SQLiteStore(path)
    assert not path.exists()
    store = opened(path, network_ok=True)
    assert levels(store)["file system"] == "error"
    store.close()

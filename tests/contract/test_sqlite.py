"""The SQLite store against the contract, and against the oracle in a process that is killed."""

import itertools
from pathlib import Path

import apsw
import pytest

from safepoint.rows import TaskPatch, replace
from safepoint.stores.memory import MemoryStore
from safepoint.stores.sqlite import SQLiteStore
from safepoint.testing import Place, Remote, StoreContract, StoreMachine, run_machine
from safepoint.testing.build import EVERY_BYTE, Writer, call_row, tree, write_row
from safepoint.testing.drive import Killed, end_processes
from tests.support.scale import SOAK
from tests.support.seeds import fresh_seed


class TestSQLite(StoreContract):
    @pytest.fixture
    def opener(self, tmp_path):
        # "process" saves the waits for the disk; what "full" adds is tested where power is cut.
        return lambda: SQLiteStore(tmp_path / "agent.db", durability="process")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "agent.db"


@pytest.fixture
def store(path):
    store = SQLiteStore(path, durability="process")
    yield store
    store.close()


TABLES = "SELECT name FROM sqlite_master WHERE type = 'table' AND name LIKE 'sp~_%' ESCAPE '~' ORDER BY name"


def test_a_checkpoint_lies_in_the_file_as_it_was_given(store, path, sqlite_rows):
    top = tree("a\0")
    commit = Writer(store).commit(*top, row={"metadata": EVERY_BYTE, "label": "l"})
    store.commit(commit)
    sent = commit.checkpoint
    assert sent is not None
    columns = "seq, id, branch, parent_seq, step, kind, label, size, digest, metadata, root, refs"
    (row,) = sqlite_rows(path, f"SELECT {columns} FROM sp_checkpoints")
    assert row == (
        *(1, sent.id, "main", None, 0, "step", "l", sent.size),
        *(sent.digest, EVERY_BYTE, sent.root, sent.refs),
    )
    assert sorted(sqlite_rows(path, "SELECT name, refs, data FROM sp_objects")) == sorted(map(tuple, top))


def test_an_object_is_kept_once(store, path, sqlite_rows):
    writer = Writer(store)
    for _ in range(3):
        writer.save(*tree("same"))
    writer.write(call_row(1, args_refs=tree("same")[0].name), objects=tree("same"))
    assert sqlite_rows(path, "SELECT count(*) FROM sp_objects") == [(3,)]


def test_a_swept_object_and_a_pruned_row_are_gone_from_the_file(store, path, sqlite_rows):
    writer = Writer(store)
    writer.save(*tree("old"))
    writer.call(status="succeeded")
    writer.pause(status="used")
    writer.save(*tree("new"), row={"step": 1})
    store.prune("task", [1])
    assert sorted(sqlite_rows(path, "SELECT data FROM sp_objects")) == sorted((o.data,) for o in tree("new"))
    counts = [sqlite_rows(path, f"SELECT count(*) FROM {t}")[0][0] for t in ("sp_checkpoints", "sp_calls", "sp_pauses")]
    assert counts == [1, 0, 0]


def test_a_deleted_task_leaves_no_row_in_any_table(store, path, sqlite_rows):
    before = {name: sqlite_rows(path, f"SELECT count(*) FROM {name}") for (name,) in sqlite_rows(path, TABLES)}
    writer = Writer(store)
    writer.save(*tree("a"), patch=TaskPatch(input=b"the job", agent="a"))
    writer.call()
    writer.pause()
    writer.record(write_row("c", tree("w")[:1]), objects=tree("w"))
    Writer(store, space="ns").save(*tree("b"))
    store.release("task", store.acquire("task", b"me"))
    assert store.delete_task("task")
    assert before == {name: sqlite_rows(path, f"SELECT count(*) FROM {name}") for name in before}


def test_a_commit_that_is_killed_is_whole_or_absent_in_the_file(path, sqlite_rows):
    for point in range(1, 9):
        remote = Remote(Place(SQLiteStore, (str(path),), {"durability": "full"}))
        try:
            task = f"task-{point}"
            writer = Writer(MemoryStore(), task)
            commit = replace(writer.commit(*tree(task)), patch=TaskPatch(input=b"job"), writes=(write_row("next"),))
            try:
                remote.crash_during(point, "commit", commit)
            except Killed:
                pass
            tables = ("sp_checkpoints", "sp_objects", "sp_branches", "sp_inputs", "sp_writes")
            found = [
                sqlite_rows(path, f"SELECT count(*) FROM {t} WHERE task = (SELECT n FROM sp_tasks WHERE task = ?)", task)[0][0]
                for t in tables
            ]
            assert found in ([0, 0, 0, 0, 0], [1, 3, 1, 1, 1]), point
            assert bool(found[0]) is (remote("read", task, id=commit.id) is not None)
        finally:
            remote.close()
    end_processes()


class SQLiteMachine(StoreMachine):
    folder: Path
    numbers = itertools.count()
    if not SOAK:
        # In a process of its own a step takes ten times as long as in memory: what needs no crash is looked for there.
        ALWAYS = frozenset()

    def driver(self):
        path = self.folder / f"{next(self.numbers)}.db"
        return Remote(Place(SQLiteStore, (str(path),), {"durability": "process"}))


@pytest.mark.scaled
def test_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(SQLiteMachine, "folder", tmp_path, raising=False)
    run_machine(SQLiteMachine, seed=fresh_seed())


def test_a_commit_of_one_write_costs_as_many_statements_as_an_intent(store):
    """However much is recorded already; one that replaces another deletes it first."""
    writer = Writer(store)
    writer.save()

    def statements(work):
        seen = []
        store._db._writer.trace_v2(
            apsw.SQLITE_TRACE_STMT, lambda event: seen.append(event["sql"]) if not event["trigger"] else None
        )
        work()
        store._db._writer.trace_v2(0, None)
        return len(seen)

    intent = statements(writer.call)
    assert statements(lambda: writer.record(write_row("c"))) <= intent + 1
    for i in range(30):
        writer.record(write_row(f"c{i}"))
    assert statements(lambda: writer.record(write_row("c", writer="another"))) <= intent + 1
    assert statements(lambda: writer.record(write_row("c", idx=-1))) <= intent + 1

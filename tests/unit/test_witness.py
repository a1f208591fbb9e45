"""The witness of the SQLite store: what is older than was acknowledged is never shown as if it were all, and nothing else is refused.

Invariants 1 and 3.
"""

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import safepoint
from safepoint.errors import Damaged, UsageError
from safepoint.model import new_id
from safepoint.rows import CallWrite, Commit, TaskPatch
from safepoint.stores import witness
from safepoint.stores.sqlite import SQLiteStore
from safepoint.stores.witness import BASE, SIZE
from safepoint.testing.build import Writer, call_row


def opened(path: Any, **options: Any) -> Any:
    return SQLiteStore(path, **{"durability": "process", **options})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "agent.db"


def copy(path: Path, name: str) -> Path:
    """The files as they are, in a folder of their own; only while nothing in this process has them open."""
    folder = path.parent / name
    folder.mkdir()
    for suffix in ("", "-wal", "-locks"):
        if os.path.exists(f"{path}{suffix}"):
            shutil.copy(f"{path}{suffix}", folder / f"agent.db{suffix}")
    return folder / "agent.db"


def put_back(path: Path, old: Path) -> None:
    """An older database and its log under the locks that are there now."""
    for suffix in ("", "-wal"):
        if os.path.exists(f"{old}{suffix}"):
            shutil.copy(f"{old}{suffix}", f"{path}{suffix}")
        elif os.path.exists(f"{path}{suffix}"):
            os.unlink(f"{path}{suffix}")


def saves(path: Path, n: int, task: str = "task", **options: Any) -> Writer:
    store = opened(path, **options)
    writer = Writer(store, task)
    for row in store.branches(task):
        writer.head = row.head
    for _ in range(n):
        writer.save()
    store.close()
    return writer


READS: dict[str, Callable[[Any], Any]] = {
    "task": lambda store: store.task("task"),
    "tasks": lambda store: store.tasks(),
    "read": lambda store: store.read("task"),
    "branch": lambda store: store.read("task", branch="main"),
    "lost seq": lambda store: store.read("task", seq=4),
    "lost id": lambda store: store.read("task", id="lost"),
    "headers": lambda store: store.headers("task"),
    "branches": lambda store: store.branches("task"),
    "calls": lambda store: store.calls("task"),
    "pauses": lambda store: store.pauses("task"),
    "acquire": lambda store: store.acquire("task", b""),
    "patch": lambda store: store.commit(Commit(task="task", id=new_id(), patch=TaskPatch(status="finished"))),
    "save": lambda store: Writer(store, "task").save(),
}


@pytest.mark.parametrize("verb", READS)
@pytest.mark.parametrize("before", [0, 2])
def test_an_older_file_is_not_taken_for_the_newest(path: Path, verb: str, before: int) -> None:
    """``before`` saves were made when the copy was taken: at 0 the task did not exist."""
    opened(path).close()
    saves(path, before)
    old = copy(path, "old")
    saves(path, 2 + (2 - before))
    put_back(path, old)
    store = opened(path)
    there = sorted(store._db._writer.execute("SELECT * FROM sp_tasks"))
    with pytest.raises(Damaged, match="older than what was acknowledged") as caught:
        READS[verb](store)
    assert caught.value.details["rolled_back"] is True
    assert "safepoint accept" in caught.value.remedy
    assert sorted(store._db._writer.execute("SELECT * FROM sp_tasks")) == there
    # What is there and whole is served by its number; what others have is theirs.
    for seq in range(1, before + 1):
        assert store.read("task", seq=seq)[0].seq == seq
    if before:
        assert store.task("other") is None
        Writer(store, "other").save()
        assert store.read("other")[0].seq == 1
    store.close()


def test_what_is_accepted_goes_on_and_gives_no_number_twice(path: Path) -> None:
    saves(path, 2)
    old = copy(path, "old")
    store = opened(path)
    grant = store.acquire("task", b"")
    for _ in range(3):
        store.commit(Commit(task="task", id=new_id(), guard=grant.guard, calls=(CallWrite(call_row(1), "began"),)))
    store.release("task", grant)
    store.close()
    saves(path, 3)
    put_back(path, old)

    store = opened(path)
    error = store.rolled_back("task")
    assert (error.details["known"], error.details["acknowledged"]) == (2, 5)
    store.accept("task")
    assert store.rolled_back("task") is None
    assert [row.seq for row in store.headers("task")] == [2, 1]
    writer = Writer(store, "task")
    writer.head = store.branches("task")[0].head
    assert writer.save().seq == 6
    grant = store.acquire("task", b"")
    assert grant.guard.fence == 2
    done: Any = store.commit(Commit(task="task", id=new_id(), guard=grant.guard, calls=(CallWrite(call_row(1), "began"),)))
    assert (done.calls[0].no, done.calls[0].began) == (4, 4)
    store.close()
    store = opened(path)
    assert store.read("task")[0].seq == 6
    store.close()


def test_that_a_task_is_gone_can_be_accepted(path: Path) -> None:
    opened(path).close()
    old = copy(path, "old")
    store = opened(path)
    for task in ("one", "two", "three"):
        Writer(store, task).save()
    store.acquire("one", b"")
    store.close()
    put_back(path, old)
    store = opened(path)
    with pytest.raises(Damaged, match="3 tasks"):
        store.tasks()
    with pytest.raises(Damaged):  # its number is one of those that were given: whose it was must not be forgotten
        Writer(store, "four").save()
    store.accept("one")
    assert store.tasks() == []
    assert store.task("two") is None
    assert Writer(store, "one").save().seq == 1
    assert store.acquire("one", b"").guard.fence == 2
    store.close()


def test_an_older_task_can_be_deleted_and_its_fences_stay_behind(path: Path) -> None:
    saves(path, 2)
    old = copy(path, "old")
    store = opened(path)
    for _ in range(3):
        store.release("task", store.acquire("task", b""))
    store.close()
    put_back(path, old)
    store = opened(path)
    assert store.rolled_back("task") is not None
    assert store.delete_task("task")
    assert store.task("task") is None
    assert store.acquire("task", b"").guard.fence == 4
    store.close()


def test_a_listing_says_which_tasks_are_older(path: Path) -> None:
    saves(path, 2, "a")
    saves(path, 2, "b")
    old = copy(path, "old")
    saves(path, 1, "b")
    put_back(path, old)
    store = opened(path)
    with pytest.raises(Damaged, match="'b'") as caught:
        store.tasks()
    assert caught.value.details["tasks"] == ["b"]
    assert store.read("a")[0].seq == 2
    store.close()


def test_nothing_is_said_without_reason(path: Path) -> None:
    """Copies without the locks, an other database in the same place, deleted tasks, tasks under their number: all are fine."""
    saves(path, 3)
    alone = path.parent / "alone.db"
    shutil.copy(path, alone)
    store = opened(alone)
    assert store.read("task")[0].seq == 3
    store.close()

    saves(path, 3)
    os.unlink(f"{path}-locks")
    saves(path, 1)

    for name in ("one", "two"):  # begun anew under locks that were left
        for suffix in ("", "-wal", "-shm"):
            if os.path.exists(f"{path}{suffix}"):
                os.unlink(f"{path}{suffix}")
        saves(path, 1, name)
        store = opened(path)
        assert [row.task for row in store.tasks()] == [name]
        assert store.task("task") is None
        store.close()

    store = opened(path)
    for _ in range(3):
        Writer(store, "again").save()
        assert store.delete_task("again")
        assert store.task("again") is None
    store.close()
    store = opened(path)
    assert store.task("again") is None
    assert [row.task for row in store.tasks()] == ["two"]
    store.close()


def test_a_late_word_about_a_deleted_task_is_no_proof(path: Path) -> None:
    """Its process was stopped between COMMIT and the witness, while others deleted the task."""
    store = opened(path)
    Writer(store, "gone").save()
    n = store._db._writer.execute("SELECT n FROM sp_tasks").fetchall()[0][0]
    word = store._locks.read_at(BASE + n * SIZE, SIZE)
    store.delete_task("gone")
    store._locks.write_at(BASE + n * SIZE, word)
    assert store.task("gone") is None
    assert store.tasks() == []
    Writer(store, "gone").save()
    assert store.read("gone")[0].seq == 1
    store.close()


def test_what_need_not_outlive_a_power_cut_is_no_proof_after_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saves(path, 1, durability="process")
    old = copy(path, "old")
    saves(path, 2, durability="process")
    put_back(path, old)
    store = opened(path)
    assert store.rolled_back("task") is not None
    monkeypatch.setattr(witness, "_boot", lambda: 12345)
    assert store.rolled_back("task") is None
    assert store.read("task")[0].seq == 1
    store.close()


def test_a_record_that_is_not_flushed_is_not_witnessed(path: Path) -> None:
    store = opened(path, durability="full")
    writer = Writer(store, "task")
    writer.save()
    before = store._witness.find(store._db.name, "task")
    writer.save(sync=False)
    assert store._witness.find(store._db.name, "task") == before
    writer.save()
    assert store._witness.find(store._db.name, "task")[0][1].next_seq == 4
    store.close()


def test_a_torn_or_damaged_slot_says_nothing(path: Path) -> None:
    saves(path, 1)
    old = copy(path, "old")
    saves(path, 2)
    put_back(path, old)
    locks = Path(f"{path}-locks").read_bytes()
    for i in range(BASE + SIZE, BASE + 2 * SIZE):
        Path(f"{path}-locks").write_bytes(locks[:i] + bytes([locks[i] ^ 4]) + locks[i + 1 :])
        store = opened(path)
        assert store.read("task")[0].seq == 1
        store.close()


def test_readers_and_writers_at_once_see_no_ghosts(path: Path) -> None:
    """A slot that is read after the snapshot may be newer than it."""
    opened(path).close()
    stop = threading.Event()
    errors: list[BaseException] = []

    def write(me: int) -> None:
        try:
            store = opened(path, timeout=30)
            i = 0
            while not stop.is_set():
                i += 1
                writer = Writer(store, f"task-{me}-{i % 7}")
                store.delete_task(writer.task)
                for _ in range(5):
                    writer.save()
                if i % 3 == 0:
                    store.delete_task(writer.task)
            store.close()
        except BaseException as error:
            errors.append(error)

    def read() -> None:
        try:
            store = opened(path, timeout=30)
            while not stop.is_set():
                for row in store.tasks():
                    store.task(row.task)
                    store.read(row.task)
                    store.headers(row.task)
                assert store.task("nobody") is None
            store.close()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(i,)) for i in range(2)] + [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    stop.wait(1.0)
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]


def test_the_public_verbs_say_so(path: Path) -> None:
    with safepoint.open(f"sqlite:///{path}") as cp:
        for i in range(3):
            state = cp.load_latest("t") or safepoint.State("t")
            state.agent_state["i"] = i
            cp.save(state)
    old = copy(path, "old")
    with safepoint.open(f"sqlite:///{path}") as cp:
        cp.save(cp.load("t", branch="main"))
    put_back(path, old)
    with safepoint.open(f"sqlite:///{path}") as cp:
        for verb in (cp.load_latest, cp.status, cp.list_checkpoints, cp.calls):
            with pytest.raises(Damaged, match="older") as caught:
                verb("t")
            assert caught.value.details["rolled_back"]
        with pytest.raises(Damaged, match="older"):
            cp.load("t", seq=4)
        with pytest.raises(Damaged, match="older"):
            cp.tasks()
        with pytest.raises(Damaged, match="older"):
            cp.resume("t")
        assert cp.load("t", seq=2).agent_state == {"i": 1}


def test_fork_and_close(path: Path) -> None:
    store = opened(path)
    writer = Writer(store, "task")
    writer.save()
    pid = os.fork()
    if not pid:
        try:
            writer.save()
            os._exit(0 if store.read("task")[0].seq == 2 else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert store.read("task")[0].seq == 2
    assert store._witness.find(store._db.name, "task")[0][1].next_seq == 3
    store.close()
    with pytest.raises(UsageError):
        store.task("task")


def test_that_a_task_is_new_does_not_cost_more_the_more_there_are(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saves(path, 1)
    store = opened(path)
    assert store.task("absent") is None  # what names there are is looked up now
    read: list[int] = []
    read_at = store._locks.read_at

    def noted(offset: int, size: int) -> bytes:
        read.append(offset)
        return read_at(offset, size)

    monkeypatch.setattr(store._locks, "read_at", noted)
    for n in range(20):
        assert store.task(f"new {n}") is None
    assert min(read) > BASE + SIZE  # behind the last one that there is, which is number 1
    store.close()


def test_a_name_that_came_a_moment_ago_is_found_by_its_number(path: Path) -> None:
    saves(path, 1)
    store, other = opened(path), opened(path)
    assert store.task("late") is None
    Writer(other, "late").save()
    w = store._witness
    assert [n for n, _ in w.find(store._db.name, "late")] == [2]
    assert [n for n, _ in w.find(store._db.name, "late", 1)] == [2]  # lost, if the store knows of one task only
    assert w.find(store._db.name, "late", 2) == []
    w._names_until = 0
    assert [n for n, _ in w.find(store._db.name, "late", 2)] == [2]
    other.close()
    store.close()

"""No acknowledged save is lost over a fork, and a child uses nothing that its parent has open."""

import gc
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from safepoint.errors import UsageError
from safepoint.rows import CallWrite, Commit, replace
from safepoint.stores.sqlite import SQLiteStore
from safepoint.stores.sqlite_db import LOOK
from safepoint.testing.build import Writer, call_row, obj
from tests.support.scale import scale

# Forking beside the threads of the test runner is meant here; Python 3.12 and newer warn of it.
pytestmark = pytest.mark.filterwarnings(r"ignore:.*use of fork\(\):DeprecationWarning")


def in_child(work):
    """Fork, run ``work`` there, and return what it said; the child ends without any clean-up of Python."""
    receiver, sender = os.pipe()
    child = os.fork()
    if not child:
        try:
            try:
                said = str(work())
            except BaseException as error:
                said = f"{type(error).__name__}: {error}"
            os.write(sender, said.encode()[:60000])
        finally:
            os._exit(0)
    os.close(sender)
    with os.fdopen(receiver) as f:
        said = f.read()
    os.waitpid(child, 0)
    return said


def opened(path, **options) -> Any:
    return SQLiteStore(path, **options)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "agent.db"


def seqs_from_outside(path, task):
    script = (
        "import sys\nfrom safepoint.stores.sqlite import SQLiteStore\n"
        "print(*[row.seq for row in SQLiteStore(sys.argv[1]).headers(sys.argv[2])])\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path), task], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {int(seq) for seq in done.stdout.split()}


@pytest.mark.scaled
def test_forks_among_saving_threads_lose_nothing(path):
    store = opened(path, timeout=30)
    stop = threading.Event()
    acknowledged: dict[str, set[int | None]] = {f"task-{i}": set() for i in range(3)}
    errors = []

    def saver(task):
        writer = Writer(store, task)
        try:
            while not stop.is_set():
                acknowledged[task].add(writer.save(obj(os.urandom(500))).seq)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=saver, args=(task,)) for task in acknowledged]
    for thread in threads:
        thread.start()
    try:
        for i in range(scale(8, 60)):
            # What a child does: use the store, open it anew, or end at once, with and without closing.
            def work(i=i):
                if i % 4 == 0:
                    return Writer(store, f"child-{i}").save().seq
                if i % 4 == 1:
                    other = opened(path)
                    seq = Writer(other, f"child-{i}").save().seq
                    other.close()
                    store.close()
                    return seq
                if i % 4 == 2:
                    store.close()
                    gc.collect()
                return 1

            assert in_child(work) == "1"
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not errors
    # As after a death: the log is not folded into the file by a last close, but read from what is there.
    for task, seqs in acknowledged.items():
        assert seqs
        assert seqs <= seqs_from_outside(path, task)
    for i in range(scale(8, 60)):
        if i % 4 < 2:
            assert store.task(f"child-{i}").checkpoints == 1
    store.close()


def test_a_child_of_multiprocessing_uses_the_store(path):
    store = opened(path)
    Writer(store).save()
    context = multiprocessing.get_context("fork")
    child = context.Process(target=lambda: Writer(store, "other").save())
    child.start()
    child.join()
    assert child.exitcode == 0
    assert store.task("other").checkpoints == 1
    store.close()


def test_no_connection_is_inherited(path):
    store = opened(path)
    Writer(store).save()
    store.task("task")
    said = in_child(lambda: [link for link in links() if str(path) in link and "-locks" not in link])
    assert said == "[]"
    assert store.task("task") is not None  # opened again on use
    store.close()


def links():
    for fd in os.listdir("/proc/self/fd"):
        try:
            yield os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            pass


def test_a_child_out_of_the_middle_of_a_transaction_may_not_use_the_store(path):
    store = opened(path)
    writer = Writer(store)
    writer.save()
    grant = store.acquire("task", b"")
    writer.guard = grant.guard
    call = writer.call(effect="transactional")
    said = []

    def child():
        for verb in (lambda: store.task("task"), lambda: Writer(store, "x").save(), store.check):
            try:
                verb()
            except UsageError as error:
                said.append("forked in the middle" in str(error))
        other = opened(path)  # one of its own works
        assert other.task("task") is not None
        other.close()
        gc.collect()
        return all(said) and len(said)

    def body(conn):
        conn.execute("INSERT INTO effects VALUES (1)")
        assert in_child(child) == "3"
        return Commit(task="task", id="done", guard=grant.guard, calls=(done(call),))

    def done(row):
        return CallWrite(replace(row, status="succeeded", result=b"r"), "ended")

    with store.connection() as conn:
        conn.execute("CREATE TABLE effects (n)")
    store.transact("task", grant.guard, call, body)
    assert seqs_from_outside(path, "task") == {1}
    with store.connection() as conn:
        assert conn.execute("SELECT n FROM effects").fetchall() == [(1,)]
    store.close()


def test_a_child_out_of_a_lent_connection_may_not_use_the_store(path):
    store = opened(path)
    with store.connection() as conn:
        conn.execute("CREATE TABLE effects (n)")
        assert "forked in the middle" in in_child(lambda: store.task("task"))
        conn.execute("INSERT INTO effects VALUES (1)")
    with store.connection() as conn:
        assert conn.execute("SELECT count(*) FROM effects").fetchall() == [(1,)]
    store.close()


def test_a_fork_while_another_thread_holds_the_store_waits_no_longer_than_its_timeout(path):
    store = opened(path, timeout=0.3)
    inside, leave = threading.Event(), threading.Event()

    def occupy():
        with store.connection():
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=occupy)
    thread.start()
    inside.wait()
    try:
        assert "forked in the middle" in in_child(lambda: store.task("task"))
    finally:
        leave.set()
        thread.join()
    assert store.task("task") is None
    store.close()


def test_rows_are_the_same_for_both_sides(path):
    store = opened(path)
    writer = Writer(store)
    writer.save()
    assert in_child(lambda: writer.save().seq) == "2"
    assert store.task("task").head.seq == 2
    row = call_row(2)
    assert row.version == 0
    store.close()


@pytest.mark.parametrize("side", ["parent", "child"])
def test_the_log_that_is_new_after_a_fork_is_no_strangers(path, tmp_path, side):
    store = opened(path, durability="process")
    writer = Writer(store)
    writer.save(obj(b"before"))

    def go_on():
        # The connections were closed, and the log with them. Its number is given away, so that the next one has another.
        for n in range(20):
            (tmp_path / f"{side}{n}").touch()
        assert store.task("task") is not None  # the reading connection comes first
        for n in range(2):
            writer.save(obj(b"%d" % n))
            time.sleep(2 * LOOK)
        return "went on"

    assert in_child(go_on if side == "child" else lambda: "nothing") == ("went on" if side == "child" else "nothing")
    if side == "parent":
        assert go_on() == "went on"
    store.close()

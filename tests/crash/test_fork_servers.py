"""Forks of processes that have a store on a server open: parent and child both go on, on connections of their own, and no
transaction and no lease of the parent's is the child's. For SQLite see test_fork.py."""

import gc
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import safepoint
from safepoint import Retention, State, UsageError, tool
from tests.crash.test_fork import in_child
from tests.support import rawrows
from tests.support.scale import scale
from tests.support.stores import CLOCKED, place

# Forking beside the threads of the test runner is meant here; Python 3.12 and newer warn of it.
pytestmark = pytest.mark.filterwarnings(r"ignore:.*use of fork\(\):DeprecationWarning")


@pytest.fixture(params=CLOCKED)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with place(request.param, tmp_path) as made:
        yield made.url


@pytest.fixture(params=[kind for kind in CLOCKED if kind == "postgres"])
def sql(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Where connections are lent."""
    with place(request.param, tmp_path) as made:
        yield made.url


def add(cp: safepoint.Checkpointer, task: str, what: object) -> int:
    state = cp.update(task, lambda state: state.messages.append(what), retries=50)
    assert state.seq is not None
    return state.seq


def sockets() -> set[str]:
    """Inodes of the sockets of this process."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    return {name for name in found if name.startswith("socket:")}


@pytest.mark.scaled
def test_forks_among_saving_threads_lose_nothing(url: str) -> None:
    errors: list[BaseException] = []
    acknowledged: dict[str, list[int]] = {f"t{i}": [] for i in range(3)}
    stop = threading.Event()
    forks = scale(8, 24)
    with safepoint.open(url, retention=Retention.keep_all(), timeout=30) as cp:

        def saver(task: str) -> None:
            try:
                state = State(task)
                while not stop.is_set():
                    state.messages[-5:] = [os.urandom(300)]
                    acknowledged[task].append(cp.save(state).seq)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=saver, args=(task,)) for task in acknowledged]
        for thread in threads:
            thread.start()
        try:
            for i in range(forks):

                def work(i: int = i) -> int:
                    match i % 4:
                        case 0:  # uses what it inherited
                            return cp.save(State(f"child {i}")).seq
                        case 1:  # opens one of its own, and closes both
                            with safepoint.open(url) as other:
                                seq = other.save(State(f"child {i}")).seq
                            cp.close()
                            return seq
                        case 2:
                            cp.close()
                            gc.collect()
                    return 1  # or ends at once

                assert in_child(work) == "1"
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert not errors
        for task, seqs in acknowledged.items():
            assert len(seqs) > forks // 2
            assert [c.seq for c in reversed(cp.list_checkpoints(task))] == seqs == list(range(1, len(seqs) + 1))
        assert cp.verify().ok
    raw = rawrows.read_tasks(url)
    assert {task for task in raw if task.startswith("child")} == {f"child {i}" for i in range(forks) if i % 4 < 2}
    assert all([c.seq for c in raw[task].checkpoints] == seqs for task, seqs in acknowledged.items())


def test_both_sides_go_on_at_once(url: str) -> None:
    with safepoint.open(url) as cp:
        cp.save(State("shared"))

        def many(who: str) -> str:
            for n in range(20):
                add(cp, "shared", f"{who}{n}")
            return "went on"

        context = multiprocessing.get_context("fork")
        children = [context.Process(target=many, args=(f"child{i} ",)) for i in range(3)]
        for child in children:
            child.start()
        many("parent ")
        for child in children:
            child.join()
            assert child.exitcode == 0
        messages = cp.load_latest("shared").messages
        assert sorted(messages) == sorted(f"{who} {n}" for who in ("parent", "child0", "child1", "child2") for n in range(20))


def test_a_child_has_sockets_of_its_own(url: str) -> None:
    """And closes none of its parent's in a way that the server hears of."""
    with safepoint.open(url) as cp:
        cp.save(State("t"))
        before = sockets()

        def work() -> str:
            cp.load_latest("t")
            own = sockets() - before
            cp.close()
            gc.collect()
            return f"{len(own)} own"

        said = in_child(work)
        assert said.endswith(" own"), said
        assert int(said.split()[0]) >= 1
        assert cp.load_latest("t") is not None
        assert sockets() == before, "the parent's connections are those that it had"


def test_a_run_is_its_process_s_own(url: str) -> None:
    with safepoint.open(url) as cp:
        with cp.resume("t") as run:
            run.save()
            fence = run.fence

            def child() -> str:
                said = []
                for attempt in (run.save, lambda: cp.resume("t").close(), lambda: cp.save(State("t", seq=1))):
                    try:
                        attempt()
                    except BaseException as error:
                        said.append(type(error).__name__)
                    else:
                        said.append("done")
                return " ".join(said)

            first, *rest = in_child(child).split()
            assert first in {"LeaseLost", "UsageError", "RunEnded"}
            assert rest == ["LeaseHeld", "LeaseHeld"]
            run.state.messages.append("the parent goes on")
            run.save()
        raw = rawrows.read_tasks(url)["t"]
        assert raw.fence == fence
        assert [c.seq for c in raw.checkpoints] == [1, 2, 3], "its beginning and two steps"

        # What a child takes ends with it: at once, as it is dead on this host.
        def leaves() -> str:
            taken = cp.resume("t")
            taken.save()
            os._exit(0)

        in_child(leaves)
        with cp.resume("t") as run:
            assert run.recovery.previous == "dead"


def test_leases_of_the_parent_are_renewed_after_a_fork(url: str) -> None:
    with safepoint.open(f"{url}&lease=1") as cp, cp.resume("t") as run:
        run.save()
        for _ in range(3):
            in_child(lambda: add(cp, "other", 1) if cp.load_latest("other") else cp.save(State("other")).seq)
            time.sleep(0.7)
        with safepoint.open(url) as other, pytest.raises(safepoint.LeaseHeld):
            other.resume("t")
        run.save()


def test_a_child_out_of_a_lent_connection_may_not_use_the_store(sql: str) -> None:
    with safepoint.open(sql) as cp:
        cp.save(State("t"))
        with cp.connection() as conn:
            conn.execute("CREATE TEMPORARY TABLE mine (x int)")

            def child() -> str:
                said = []
                for verb in (lambda: cp.load_latest("t"), lambda: cp.save(State("u")), cp.tasks):
                    try:
                        verb()
                    except UsageError as error:
                        said.append("fork" in str(error))
                with safepoint.open(sql) as other:  # one of its own works
                    said.append(other.load_latest("t") is not None)
                gc.collect()
                return str(said)

            assert in_child(child) == "[True, True, True, True]"
            conn.execute("INSERT INTO mine VALUES (1)")
            assert conn.execute("SELECT count(*) FROM mine").fetchall() == [(1,)]
        assert cp.load_latest("t") is not None
        assert cp.load_latest("u") is None


def test_a_child_out_of_the_middle_of_a_transactional_tool(sql: str) -> None:
    said = []

    with safepoint.open(sql) as cp:

        @tool(effect="transactional", name="fork.book")
        def book(n: int, *, connection: object) -> str:
            schema = rawrows.split_postgres(sql)[1]
            connection.execute(f'CREATE TABLE "{schema}".ledger (n int)')  # type: ignore[attr-defined]
            connection.execute(f'INSERT INTO "{schema}".ledger VALUES (%s)', (n,))  # type: ignore[attr-defined]

            def child() -> str:
                try:
                    cp.save(State("u"))
                except UsageError as error:
                    return f"refused {'fork' in str(error)}"
                return "saved"

            said.append(in_child(child))
            return "booked"

        with cp.resume("t") as run:
            assert run.call(book, 5) == "booked"
            run.save()
        assert said == ["refused True"]
        assert [c.status for c in cp.calls("t")] == ["succeeded"]
        with cp.connection() as conn:
            schema = rawrows.split_postgres(sql)[1]
            assert conn.execute(f'SELECT n FROM "{schema}".ledger').fetchall() == [(5,)]


def test_what_a_parent_opened_works_in_the_workers_of_a_master(url: str) -> None:
    """A master that opens at import, forks, and serves nothing itself; its workers are the first to ask. In a process of its own."""
    program = (
        "import os, sys\nimport safepoint\ncp = safepoint.open(sys.argv[1])\n"
        "children = []\nfor i in range(4):\n    pid = os.fork()\n    if not pid:\n"
        "        code = 1\n        try:\n"
        "            for n in range(10):\n                cp.update('shared', lambda s: s.messages.append((i, n)), retries=99)\n"
        "            cp.save(safepoint.State(f'own {i}'))\n            code = 0\n        finally:\n            os._exit(code)\n"
        "    children.append(pid)\n"
        "sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children))\n"
    )
    with safepoint.open(url) as cp:
        cp.save(State("shared"))
        done = subprocess.run(
            [sys.executable, "-c", program, f"{url}&durability=process"], capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        state = cp.load_latest("shared")
        assert state is not None
        assert sorted(state.messages) == [(i, n) for i in range(4) for n in range(10)]
        assert len(cp.tasks()) == 5

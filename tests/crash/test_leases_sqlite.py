"""Leases of the SQLite store, against real processes: killed, stopped, forked, and in another pid namespace."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from safepoint import _probe
from safepoint.errors import LeaseHeld, LeaseLost
from safepoint.rows import Guard
from safepoint.stores import holder as people
from safepoint.stores import oslock
from safepoint.stores.sqlite import SQLiteStore
from safepoint.testing.build import Writer

HOLDER = """
import sys
from safepoint.stores import holder
from safepoint.stores.sqlite import SQLiteStore
from safepoint.testing.build import Writer

store = SQLiteStore(sys.argv[1])
grant = store.acquire("task", holder.describe("agent"))
row = store.read("task")
writer = Writer(store, guard=grant.guard, head=None if row is None else store.task("task").head)
print(grant.guard.fence, grant.previous, flush=True)
for line in sys.stdin:
    try:
        print("saved", writer.save().seq, flush=True)
    except Exception as error:
        print(type(error).__name__, flush=True)
"""


class Holder:
    """Another process that holds the task, and saves when it is told to."""

    def __init__(self, path, *prefix):
        command = [*prefix, sys.executable, "-c", HOLDER, str(path)]
        process: Any = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.process = process
        self.first: list[str] = self.process.stdout.readline().split()

    def save(self):
        self.process.stdin.write("save\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().split()

    def end(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "agent.db"


@pytest.fixture
def store(path):
    store = SQLiteStore(path)
    yield store
    store.close()


@pytest.fixture
def hold(path):
    started = []

    def start(*prefix):
        started.append(Holder(path, *prefix))
        return started[-1]

    yield start
    for other in started:
        other.end()


def wait_for_state(pid, state):
    for _ in range(500):
        with open(f"/proc/{pid}/stat", "rb") as f:
            if f.read().rpartition(b") ")[2][:1] == state:
                return
        time.sleep(0.01)
    pytest.fail(f"process {pid} did not come to state {state!r}")


def test_a_live_holder_keeps_the_task_and_is_named(store, hold):
    other = hold()
    assert other.first == ["1"]
    with pytest.raises(LeaseHeld) as held:
        store.acquire("task", people.describe())
    assert f"pid {other.process.pid} on " in str(held.value)
    assert "stopped" not in str(held.value)
    assert held.value.details["stopped"] is False
    assert held.value.details["holder"]["pid"] == other.process.pid
    lease = store.lease("task")
    assert lease.live
    assert not lease.stopped
    with pytest.raises(LeaseHeld):
        Writer(store).save()
    with pytest.raises(LeaseHeld):
        store.delete_task("task")
    assert other.save() == ["saved", "1"]


def test_a_killed_holder_is_free_at_once(store, hold):
    other = hold()
    other.process.kill()
    other.process.wait()
    begun = time.monotonic()
    grant = store.acquire("task", people.describe())
    # No lease has to run out, and nobody is waited for. What does take time is to open the file and to write it durably.
    assert time.monotonic() - begun < 10
    assert (grant.guard.fence, grant.previous, grant.presumed) == (2, "dead", 0)


def test_a_zombie_does_not_hold(store, hold):
    other = hold()
    other.process.kill()
    wait_for_state(other.process.pid, b"Z")  # not waited for: its entry in /proc is still there
    assert store.acquire("task", people.describe()).previous == "dead"


def test_a_stopped_holder_keeps_the_task_until_it_is_stolen(store, hold):
    other = hold()
    other.process.send_signal(signal.SIGSTOP)
    wait_for_state(other.process.pid, b"T")
    with pytest.raises(LeaseHeld, match="is stopped") as held:
        store.acquire("task", people.describe())
    assert held.value.details["stopped"] is True
    lease = store.lease("task")
    assert lease.live
    assert lease.stopped
    grant = store.acquire("task", people.describe(), steal=True)
    assert (grant.guard.fence, grant.previous, grant.presumed) == (2, "presumed_dead", 1)
    assert Writer(store, guard=grant.guard).save().seq == 1
    other.process.send_signal(signal.SIGCONT)
    assert other.save() == ["LeaseLost"]
    store.release("task", grant)
    assert store.acquire("task", b"").presumed == 1


@pytest.mark.parametrize("end", ["lives", "killed"])
def test_a_holder_whose_lock_file_was_removed_is_presumed_dead_at_most(store, path, hold, end):
    other = hold()
    os.remove(f"{path}-locks")
    if end == "killed":  # that is no longer to be seen
        other.process.kill()
        other.process.wait()
    assert not store.lease("task").live
    grant = store.acquire("task", people.describe())
    assert (grant.guard.fence, grant.previous, grant.presumed) == (2, "presumed_dead", 1)
    if end == "lives":
        assert other.save() == ["LeaseLost"]
    assert Writer(store, guard=grant.guard).save().seq == 1
    # From here on the new file tells the truth, to those who have the old one open too.
    assert probe_from_outside(path) == "LeaseHeld"
    store.abandon("task", grant)
    assert probe_from_outside(path) == "dead"


def test_a_holder_goes_on_without_its_lock_file_until_it_is_taken_over(store, path, hold):
    other = hold()
    grant = store.acquire("mine", people.describe())
    assert store.lease("mine").live
    os.remove(f"{path}-locks")
    assert other.save() == ["saved", "1"]
    assert Writer(store, "mine", guard=grant.guard).save().seq == 1
    assert store.holds("mine", grant.guard)
    with pytest.raises(LeaseHeld):  # within the process that has it, the claim is known
        store.acquire("mine", people.describe())
    # A lease that is taken now is locked where all others look.
    late = store.acquire("late", people.describe())
    assert probe_from_outside(path, "late") == "LeaseHeld"
    assert probe_from_outside(path, "mine") == "presumed_dead"
    with pytest.raises(LeaseLost):
        Writer(store, "mine", guard=grant.guard, head=store.task("mine").head).save()
    store.release("late", late)
    assert probe_from_outside(path, "late") == "released"


def test_a_lock_file_is_named_once_by_many_who_come_first(tmp_path):
    path = tmp_path / "agent.db-locks"
    script = (
        "import sys\nfrom safepoint.stores.oslock import LockFile\nsys.stdin.readline()\n"
        "claim = LockFile(sys.argv[1]).claim(7)\nprint(claim and claim.file, flush=True)\nsys.stdin.readline()"
    )
    started: list[Any] = [
        subprocess.Popen([sys.executable, "-c", script, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(8)
    ]
    for other in started:
        other.stdin.write("\n")
        other.stdin.flush()
    said = [other.stdout.readline().strip() for other in started]
    for other in started:
        other.communicate("\n")
    assert sorted(said) == sorted([path.read_text(), *["None"] * 7])


def test_a_holder_in_another_pid_namespace_is_seen(store, hold):
    prefix = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*prefix, "true"], capture_output=True).returncode:
        pytest.skip("unshare is not permitted here")
    other = hold(*prefix)
    with pytest.raises(LeaseHeld) as held:
        store.acquire("task", people.describe())
    assert held.value.details["holder"]["pid"] < 10  # which here is somebody else
    assert held.value.details["stopped"] is False
    other.process.kill()
    other.process.wait()
    for _ in range(500):  # the kernel ends the children of unshare a little later
        if not store.lease("task").live:
            break
        time.sleep(0.01)
    assert store.acquire("task", people.describe()).previous == "dead"


def test_a_second_taker_in_the_same_process_is_refused(store, path):
    # POSIX locks do not conflict within one process: only the registry knows.
    second = SQLiteStore(path)
    grant = store.acquire("task", people.describe())
    for other in (store, second):
        with pytest.raises(LeaseHeld):
            other.acquire("task", people.describe())
    second.close()  # must not close the descriptor that the first store's lock hangs on
    SQLiteStore(path).close()
    assert probe_from_outside(path) == "LeaseHeld"
    assert store.holds("task", grant.guard)
    store.abandon("task", grant)
    assert probe_from_outside(path) == "dead"


def test_a_closed_store_holds_nothing(path):
    first, second = SQLiteStore(path), SQLiteStore(path)
    first.acquire("task", b"")
    first.close()
    assert second.acquire("task", b"").previous == "dead"
    second.close()


def test_descriptors_are_closed_with_the_last_store(path, tmp_path):
    before = set(os.listdir("/proc/self/fd"))
    stores = [SQLiteStore(path) for _ in range(3)]
    grant = stores[0].acquire("task", b"")
    stores[1].lease("task")
    stores[2].lease("task")
    links = [
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in set(os.listdir("/proc/self/fd")) - before
        if os.path.exists(f"/proc/self/fd/{fd}")
    ]
    assert links.count(f"{os.path.realpath(path)}-locks") == 1
    stores[1].close()
    stores[2].close()
    assert stores[0].holds("task", grant.guard)
    stores[0].close()
    left = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]
    assert not [link for link in left if link.startswith(str(tmp_path))]


@pytest.mark.filterwarnings(r"ignore:.*use of fork\(\):DeprecationWarning")  # Python 3.12 and newer
def test_a_forked_child_does_not_hold(store, path, hold):
    grant = store.acquire("task", people.describe())
    child = os.fork()
    if not child:
        try:
            # Whatever the child does with what it inherited, the parent's claim stays, and the child has none.
            store.abandon("task", grant)
            grant.handle.free()
            time.sleep(1.5)
        finally:
            os._exit(0)
    try:
        time.sleep(0.1)
        assert probe_from_outside(path) == "LeaseHeld"
        store.abandon("task", grant)
        assert probe_from_outside(path) == "dead"  # the child lives on, and keeps nothing alive
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.filterwarnings(r"ignore:.*use of fork\(\):DeprecationWarning")  # Python 3.12 and newer
def test_a_holder_killed_between_lock_and_row_leaves_no_trace(path, store):
    child = os.fork()
    if not child:
        try:
            _probe.hook = lambda name: os.kill(os.getpid(), signal.SIGKILL) if name == "acquire.locked" else None
            store.acquire("task", b"")
        finally:
            os._exit(1)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    assert store.lease("task") is None
    assert store.acquire("task", b"").previous == ""


def test_release_tells_the_next_one(store):
    grant = store.acquire("task", b"")
    store.release("task", grant)
    store.release("task", grant)
    assert store.lease("task").state == "released"
    with pytest.raises(LeaseLost):
        Writer(store, guard=grant.guard).save()
    assert store.acquire("task", b"").previous == "released"
    assert not store.holds("task", Guard(2, "not the token"))


@pytest.mark.filterwarnings(r"ignore:.*use of fork\(\):DeprecationWarning")  # Python 3.12 and newer
def test_asking_at_the_same_moment_does_not_look_like_holding(store, path):
    grant = store.acquire("task", b"")
    store.abandon("task", grant)
    seen = set()

    def ask(locks):
        byte = store.lease("task").lease_id
        for _ in range(2000):
            seen.add(locks.is_held(byte))

    child = os.fork()  # the rival must be another process: within one, locks do not conflict
    if not child:
        try:
            ask(oslock.LockFile(f"{path}-locks"))
        finally:
            os._exit(0)
    ask(oslock.LockFile(f"{path}-locks"))
    os.waitpid(child, 0)
    assert seen == {False}


def test_threads_contend_and_one_wins(store):
    won, lost = [], []
    gate = threading.Barrier(8)

    def take():
        gate.wait()
        try:
            won.append(store.acquire("task", b""))
        except LeaseHeld:
            lost.append(1)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(lost)) == (1, 7)


def probe_from_outside(path, task="task"):
    script = (
        "import sys\nfrom safepoint.stores.sqlite import SQLiteStore\nfrom safepoint.errors import LeaseHeld\n"
        "try: print(SQLiteStore(sys.argv[1]).acquire(sys.argv[2], b'').previous)\nexcept LeaseHeld: print('LeaseHeld')\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path), task], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()

"""Field cases of stores on servers, by number: several servers, leases with a clock, a pooler, pools and forks."""

from __future__ import annotations

import base64
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import safepoint
from safepoint import Conflict, LeaseHeld, LeaseLost, Retention, RunEnded, State, Unavailable, UsageError, tool
from tests.support import lines, rawrows, servers, workers
from tests.support.children import Server
from tests.support.paths import ROOT
from tests.support.proxy import Proxy
from tests.support.scale import scale
from tests.support.slowline import SlowLine
from tests.support.stores import CLOCKED, KINDS, Place, place, server_of, through

ON_A_LINE = [kind for kind in CLOCKED if kind != "cluster"]
"""A client of a cluster goes where the nodes say that they are, past any proxy."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server("safepoint", "tests.support.workers")
    yield made
    made.close()


@pytest.fixture(params=KINDS)
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with place(request.param, tmp_path) as made:
        yield made


@pytest.fixture(params=CLOCKED)
def clocked(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with place(request.param, tmp_path) as made:
        yield made


@pytest.fixture(params=ON_A_LINE)
def line(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Place, Proxy, str]]:
    """A store, a proxy before it, and the store's URL by way of the proxy."""
    with place(request.param, tmp_path) as made, Proxy(*server_of(request.param)) as proxy:
        yield made, proxy, through(made.url, proxy.port)


def make_the_tables(where: Place) -> None:
    """For a store with a short timeout, which is not meant for that."""
    with safepoint.open(where.url) as cp:
        cp.tasks()


def at_the_same_time(count: int, fn: Callable[[int], Any]) -> list[Any]:
    """Call it on so many threads at once; what it raised stands in its place."""
    barrier = threading.Barrier(count)
    found: list[Any] = [None] * count

    def one(i: int) -> None:
        barrier.wait()
        try:
            found[i] = fn(i)
        except Exception as error:
            found[i] = error

    threads = [threading.Thread(target=one, args=(i,)) for i in range(count)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return found


# -- 44


def turns(url: str, task: str) -> list[Any]:
    with safepoint.open(url) as cp:
        return list(cp.load_latest(task).messages)


def test_field_case_44_a_stale_writer_is_stopped(stored):
    """Two servers have turn 10; both write turn 11."""
    keep = Retention.keep_all()
    with safepoint.open(stored.url, retention=keep) as a, safepoint.open(stored.url, retention=keep) as b:
        state = State("t")
        for n in range(1, 11):
            state.messages.append({"role": "user", "content": f"turn {n}"})
            a.save(state)
        theirs = b.load("t", branch="main")
        state.messages.append({"role": "user", "content": "turn 11 by A"})
        a.save(state)
        theirs.messages.append({"role": "user", "content": "turn 11 by B"})
        for _ in range(3):  # and does not get through by trying again
            with pytest.raises(Conflict) as caught:
                b.save(theirs)
        assert (caught.value.details["branch"], caught.value.details["head"]) == ("main", 11)
        assert [m["content"] for m in turns(stored.url, "t")][-1] == "turn 11 by A"
        # Who was refused may go on beside it, if it says so.
        b.fork("t", 10, name="b")
        mine = b.load("t", branch="b")
        mine.messages.append(theirs.messages[-1])
        b.save(mine)
        state.messages.append({"role": "user", "content": "turn 12 by A"})
        a.save(state)
        assert [m["content"][-2:] for m in a.load("t", branch="main").messages[-2:]] == [" A", " A"]
        assert [m["content"] for m in a.load("t", branch="b").messages][-2:] == ["turn 10", "turn 11 by B"]


def test_field_case_44_a_run_that_was_taken_over_writes_nothing(stored):
    """A writes turn 11 in a run; B recovers the task at turn 10."""
    with safepoint.open(stored.url) as a, safepoint.open(stored.url) as b:
        state = State("t", messages=["turn 10"])
        a.save(state)
        first = a.resume("t")
        first.__enter__()
        first.state.messages.append("turn 11 by A")
        with pytest.raises(LeaseHeld):
            b.resume("t")
        with b.resume("t", steal=True) as second:
            assert second.recovery.previous == "presumed_dead"
            second.state.messages.append("turn 11 by B")
            second.save()
        for _ in range(2):
            with pytest.raises(RunEnded) as caught:
                first.save()
            assert isinstance(caught.value.error, LeaseLost)
        with pytest.raises(LeaseLost):
            first.close()
        with pytest.raises(Conflict):
            a.save(state)
    assert turns(stored.url, "t") == ["turn 10", "turn 11 by B"]


# -- 46


@pytest.mark.scaled
def test_field_case_46_two_recoveries_of_one_list(stored):
    """Both have the list; each claims what it finds there, at the same moment."""
    ran: Counter[str] = Counter()

    @tool(effect="write", name="body")
    def body(key):
        ran[key] += 1
        return key

    def step(run):
        run.finish(run.call(body, run.task_id))

    def recover(task, i):
        return safepoint.run_agent(step, task_id=task, store=(a, b)[i]).result

    tasks = [f"t{i}" for i in range(scale(10, 100))]
    with safepoint.open(stored.url) as a, safepoint.open(stored.url) as b:
        for task in tasks:
            a.resume(task).close()
        found = [sorted(i.task_id for i in cp.tasks(status="unfinished")) for cp in (a, b)]
        assert found[0] == found[1] == sorted(tasks)
        for task in tasks:
            ends = at_the_same_time(2, partial(recover, task))
            assert task in ends
            assert all(end == task or isinstance(end, LeaseHeld) for end in ends), ends
        assert ran == dict.fromkeys(tasks, 1)
        # The list is old: all of it is finished, by whomever.
        before = rawrows_elsewhere(stored)
        for task in tasks:
            assert safepoint.run_agent(step, task_id=task, store=b).result == task
        assert ran == dict.fromkeys(tasks, 1)
        assert rawrows_elsewhere(stored) == before


def rawrows_elsewhere(where: Place) -> Any:
    """The raw rows, read in another process: this one may have a SQLite file open."""
    program = "import sys; from tests.support.rawrows import read_tasks; print(sorted(read_tasks(sys.argv[1]).items()))"
    return subprocess.run(
        [sys.executable, "-c", program, where.url], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout


# -- 48


LEASE = 1.5


@pytest.mark.parametrize("lease", [0, -1, 0.5, float("nan"), float("inf"), True])
def test_field_case_48_a_lease_has_a_length(lease, clocked):
    with pytest.raises(UsageError):
        safepoint.open(clocked.url, lease=lease)


@pytest.mark.parametrize(
    ("way", "jump"),
    [
        ("in-tool-healed", 0),
        ("in-tool-healed", 3600),
        ("in-tool-dead", -3600),
        ("between-healed", -3600),
        ("between-dead", 3600),
    ],
)
def test_field_case_48_a_holder_that_cannot_renew_stops_first(way, jump, line, server):
    """Worker 1 is inside of a tool or between two while its line is dead; worker 2 takes over; the line may be whole then."""
    where, proxy, url = line
    in_tool, healed = way.startswith("in-tool"), way.endswith("healed")
    with safepoint.open(where.url, lease=LEASE, retention=Retention.keep_all()) as cp:
        cp.tasks()  # makes the tables: worker 1 has little time
        one = server.start(workers.cut_off, url, "t", LEASE, jump, in_tool)
        one.until("held")
        time.sleep(LEASE * 0.6)  # it has renewed since
        one.say("work")
        one.until("watching")
        proxy.hold()
        until = rawrows.lease_until(where.url, "t")
        _, sure = one.until("not sure")
        # A twentieth of a lease is not relied upon; a little of it is left to the two clocks that are compared here.
        assert sure < until - 0.04 * LEASE, "it stops while nobody else can have the task yet"
        if way == "between-dead":
            one.say("go on")  # before anybody else has the task
            told = one.result()
        two = None
        end = time.monotonic() + LEASE + 5
        while two is None:
            assert time.monotonic() < end
            try:
                two = cp.resume("t")
            except LeaseHeld:
                time.sleep(0.01)
        # Worker 1 has ended, on this very host, or is only believed to have.
        assert time.time() >= until or way == "between-dead"
        with two:
            assert two.recovery.previous == ("dead" if way == "between-dead" else "presumed_dead")
            two.state.agent_state["by"] = "two"
            two.save()
            if healed:
                proxy.heal()
            if way != "between-dead":
                one.say("go on")
                told = one.result()
            two.save()
        proxy.heal()
        # A result that cannot be written on a dead line comes first: until it is, nobody knows what else there is to say.
        what = "Unavailable" if way == "in-tool-dead" else "LeaseLost"
        assert told["tried"] == {"call": what, "save": what, "run": what}
        if way != "in-tool-dead":
            # (who asks on a dead line waits for 0.7 s)
            assert max(told["took"].values()) < 0.6, "who knows that it has lost asks nobody"
        assert told["entered"] == ["first"], "a tool was started"
        assert any("not renewed" in said for said in told["log"])
        assert cp.load_latest("t").agent_state == {"by": "two"}
        raw = rawrows.read_tasks(where.url)["t"]
        # The beginning, worker 1's one save, and worker 2's two.
        assert [(c.seq, c.parent) for c in raw.checkpoints] == [(1, None), (2, 1), (3, 2), (4, 3)]
        assert len(raw.calls) == 1 + in_tool, "an intent of a call that was not made"


def test_field_case_48_the_wall_clock_says_nothing_of_leases(clocked, server):
    with safepoint.open(clocked.url, lease=LEASE) as cp:
        cp.save(State("t"))
        holders = []
        for task, jump in (("t", 3600), ("u", -3600)):
            holders.append(server.start(workers.patient, clocked.url, task, LEASE, jump))
            holders[-1].until("in tool")
        stays_taken(cp, ("t", "u"), 2 * LEASE)
        for holder in holders:
            holder.say("go on")
            assert holder.result()["entered"] == ["long", "second"]
        for task in ("t", "u"):
            with cp.resume(task) as run:
                assert run.recovery.previous == "released"


def stays_taken(cp: safepoint.Checkpointer, tasks: tuple[str, ...], seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for task in tasks:
            with pytest.raises(LeaseHeld):
                cp.resume(task)
        time.sleep(0.1)


@pytest.mark.parametrize("how", ["hold", "refuse"])
def test_an_outage_shorter_than_the_lease_does_not_lose_it(how, line, server):
    where, proxy, url = line
    lease = 2.0
    with safepoint.open(where.url, lease=lease) as cp:
        cp.save(State("t"))
        holder = server.start(workers.patient, url, "t", lease, 0, timeout=5.0)
        holder.until("in tool")
        if how == "hold":
            proxy.hold()
        else:
            proxy.refuse()
            proxy.cut()
        stays_taken(cp, ("t",), lease / 2)
        proxy.heal()
        # It renews again: later than its lease would have lasted without that, the task is still its own.
        stays_taken(cp, ("t",), lease)
        holder.say("go on")
        told = holder.result()
        assert told["entered"] == ["long", "second"]
        assert cp.load_latest("t").seq == told["seq"]


# -- 54


needs_postgres = pytest.mark.skipif("postgres" not in KINDS, reason="PostgreSQL is not among the stores")


@pytest.fixture
def pooled() -> Iterator[tuple[Place, Any, str]]:
    from tests.support.pooler import Pooler

    with place("postgres", Path()) as made, Pooler(servers.shared_postgres().socket_path) as pooler:
        _, schema = rawrows.split_postgres(made.url)
        yield made, pooler, f"{pooler.url}?schema={schema}"


def state_of_sessions(pooler: Any) -> list[tuple[Any, ...]]:
    """What was left behind in the server's sessions: settings, prepared statements, locks, temporary tables."""
    import psycopg

    seen: dict[int, tuple[Any, ...]] = {}
    asked = (
        "SELECT pg_backend_pid(), current_setting('search_path'), current_setting('lock_timeout'),"
        " current_setting('statement_timeout'), current_setting('synchronous_commit'),"
        " current_setting('idle_in_transaction_session_timeout'), current_setting('transaction_isolation'),"
        " (SELECT count(*) FROM pg_prepared_statements), (SELECT count(*) FROM pg_listening_channels()),"
        " (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()),"
        " (SELECT count(*) FROM pg_class WHERE relpersistence = 't')"
    )
    with psycopg.connect(pooler.url, autocommit=True, prepare_threshold=None) as conn:
        for _ in range(4 * pooler.size):
            pid, *rest = conn.execute(asked).fetchone() or ()
            seen[pid] = tuple(rest)
    return sorted(seen.values())


@needs_postgres
@pytest.mark.scaled
def test_field_case_54_five_hundred_saves_through_a_transaction_pooler(pooled):
    _where, pooler, url = pooled
    before = state_of_sessions(pooler)
    assert len(set(before)) == 1
    with safepoint.open(url, retention=Retention.keep_all()) as cp:

        def save(i):
            state = State(f"t{i}")
            for n in range(125):
                state.messages.append(n)
                state.step = n
                cp.save(state)
            return state.seq

        assert at_the_same_time(4, save) == [125] * 4

        # What one task does is counted once, whoever comes first: the locks are those of transactions.
        def count(i):
            def more(state):
                state.agent_state["n"] = state.agent_state.get("n", 0) + 1

            for _ in range(10):
                cp.update("t0", more, retries=1000)

        assert at_the_same_time(4, count) == [None] * 4
        assert cp.load_latest("t0").agent_state["n"] == 40
    assert pooler.taken > 500
    assert pooler.stayed < pooler.taken / 2, "the sessions were to change"
    assert set(state_of_sessions(pooler)) == set(before), "something was left behind in a session"


@needs_postgres
def test_field_case_54_a_life_through_a_transaction_pooler(pooled):
    where, pooler, url = pooled
    insert = where.make_ledger()
    left = []
    for name, at in (("l1", where.url), ("l2", url)):
        with safepoint.open(at, retention=Retention.keep_all()) as cp:
            life = lines.Life(cp, name, insert, lambda: None)
            life.live()
        assert not life.unavailable
        with safepoint.open(where.url) as cp:
            left.append(lines.facts(cp, name, where.read_ledger(), rawrows.read_tasks(where.url)))
    assert left[0] == left[1]
    assert len(set(state_of_sessions(pooler))) == 1


@needs_postgres
def test_field_case_54_leases_through_a_transaction_pooler(pooled, server):
    where, _pooler, url = pooled
    with safepoint.open(url, lease=LEASE) as cp, safepoint.open(where.url, lease=LEASE) as other:
        cp.save(State("t"))
        holder = server.start(workers.patient, url, "t", LEASE, 0)
        holder.until("in tool")
        stays_taken(cp, ("t",), LEASE)
        stays_taken(other, ("t",), LEASE)
        holder.say("go on")
        holder.result()
        # At once from many: one gets it.
        runs = at_the_same_time(8, lambda i: (cp, other)[i % 2].resume("t"))
        assert sum(not isinstance(run, LeaseHeld) for run in runs) == 1, runs
        for run in runs:
            if not isinstance(run, LeaseHeld):
                run.close()


# -- 56


@pytest.mark.parametrize("used", [False, True], ids=["made", "used"])
def test_field_case_56a_a_store_from_before_the_fork(used, line, server):
    where, proxy, url = line
    with safepoint.open(where.url) as cp:
        cp.save(State("there"))  # makes the tables
    proxy.rewind()
    assert server.run(workers.master, url, used, 4, 10) == [0] * 4
    with safepoint.open(where.url) as cp:
        for i in range(4):
            for k in range(4):
                assert cp.load_latest(f"worker{i}.{k}").messages == list(range(10))
        assert cp.load_latest("master after") is not None
    users: dict[int, set[str]] = {}
    for message in proxy.messages:
        if message.direction == "up":
            for i in range(4):
                for k in range(4):
                    name = f"worker{i}.{k}"
                    if name.encode() in message.data or base64.urlsafe_b64encode(name.encode()) in message.data:
                        users.setdefault(message.connection, set()).add(f"worker{i}")
            if b"master" in message.data or base64.urlsafe_b64encode(b"master") in message.data:
                users.setdefault(message.connection, set()).add("master")
    assert all(len(of) == 1 for of in users.values()), users
    assert {name for of in users.values() for name in of} >= {f"worker{i}" for i in range(4)}
    # Four threads that begin at once make one pool between them, of no more connections than they can use.
    for i in range(4):
        assert sum(f"worker{i}" in of for of in users.values()) <= 4, users


@pytest.mark.parametrize("kind", ON_A_LINE)
def test_field_case_56b_loads_are_parallel_up_to_the_size_of_the_pool(kind, tmp_path):
    # So long that ten threads come to ask while the first one still waits, also where the machine is busy.
    latency, loads, size = 0.1, 50, 10
    with place(kind, tmp_path) as where, SlowLine(server_of(kind)[0], latency) as slow:
        with safepoint.open(where.url) as cp:
            for i in range(loads):
                cp.save(State(f"t{i}", messages=[i]))
        with safepoint.open(through(where.url, slow.port), pool=size) as cp:
            begun = time.monotonic()
            assert cp.load_latest("t0").messages == [0]
            cp.load_latest("t1")
            begun = time.monotonic()
            cp.load_latest("t2")
            one = time.monotonic() - begun
            assert one >= latency
            begun = time.monotonic()
            found = at_the_same_time(loads, lambda i: cp.load_latest(f"t{i}").messages)
            took = time.monotonic() - begun
            assert found == [[i] for i in range(loads)]
            assert slow.most == size, "as many at a time as the pool has connections"
            assert slow.opened <= size + 1
            # Five rounds and what a busy machine adds, and no fifty.
            assert took < 0.5 * loads * one, f"{loads} loads took {took:.2f} s, one {one:.3f} s"
        deadline = time.monotonic() + 10
        while slow.living:
            assert time.monotonic() < deadline, "connections are open after close()"
            time.sleep(0.01)


def test_field_case_56c_an_exhausted_pool_is_an_error_in_time(line):
    where, proxy, url = line
    timeout = 0.5
    make_the_tables(where)
    with safepoint.open(url, pool=2, timeout=timeout) as cp:
        cp.save(State("t"))
        proxy.hold()
        begun = time.monotonic()
        found = at_the_same_time(6, lambda i: cp.load_latest("t"))
        took = time.monotonic() - begun
        assert [type(error) for error in found] == [Unavailable] * 6, found
        assert took < timeout + 1.0
        proxy.heal()
        assert all(isinstance(state, State) for state in at_the_same_time(6, lambda i: cp.load_latest("t")))
        assert proxy.opened < 20


@needs_postgres
def test_field_case_56c_connections_that_are_lent_out(tmp_path):
    with place("postgres", tmp_path) as where:
        make_the_tables(where)
        with safepoint.open(where.url, pool=2, timeout=0.5) as cp:
            cp.save(State("t"))
            with cp.connection(), cp.connection():
                begun = time.monotonic()
                with pytest.raises(Unavailable, match=r"connection|pool"):
                    cp.load_latest("t")
                assert time.monotonic() - begun < 1.5
            assert cp.load_latest("t") is not None


def test_field_case_56c_all_is_closed_at_exit(line):
    """A process that closes nothing ends at once, without a word, and its connections with it."""
    where, _proxy, url = line
    program = "import sys; from tests.support.workers import leaves_it_open; leaves_it_open(sys.argv[1])"
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, url], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert time.monotonic() - begun < 10
    with safepoint.open(where.url) as cp, cp.resume("t") as run:
        assert run.recovery.previous == "dead"

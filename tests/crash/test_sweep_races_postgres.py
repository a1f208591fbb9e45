"""Saves that leave out what their parent has, against sweeps of the same task by other processes, on PostgreSQL; and sweeps and
deletions that are killed, or that others wait for.

One statement that locks, marks and deletes broke checkpoints there: it reads what was committed before it waited.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator

import pytest

import safepoint
from safepoint import Retention, State
from safepoint.model import Obj
from safepoint.stores.base import Store
from safepoint.stores.url import open_store
from tests.support import sweeping, sweeping_postgres
from tests.support.children import Server
from tests.support.scale import SOAK, scale
from tests.support.servers import fresh_postgres_url

SAVER = """
import random, sys
from safepoint.stores.url import open_store
from safepoint.testing.build import Writer, obj, write_row

# Four write to one task all the time: who sends much comes late each time on a slow machine, and may have to try for long.
store, name, rounds = open_store(sys.argv[1], durability="process", timeout=60), sys.argv[2], int(sys.argv[3])
rng, writer, items, known_names = random.Random(name), Writer(store, "task", branch=name), [], []
for i in range(rounds):
    # Words of a small common stock: what one branch drops and a sweep takes, another sends again at the same time.
    items = [*items[-6:], obj(b"word %d" % rng.randrange(40))]
    known = set(known_names)
    # Now and then more than goes in one piece: it is staged first, and a sweep must leave it alone.
    big = [obj(b"big %d %d" % (rng.randrange(3), n) * 40_000) for n in range(4)] if i % 25 == 24 else []
    page = obj(b"page %d" % rng.randrange(10**9), *items, *big)
    writer.save(page, objects=[page, *big, *(o for o in items if o.name not in known)])
    known_names = [o.name for o in items]
    row, objects = store.read("task", seq=writer.seq) or sys.exit("head is gone")
    missing = {page.name, *(o.name for o in (*items, *big))} - set(objects)
    if missing:
        sys.exit(f"{len(missing)} objects of {writer.seq} are missing")
    # What an adapter records: against this checkpoint, or one that never comes; the first of a key stands, or the last.
    words = [obj(b"word %d" % rng.randrange(40)) for _ in range(3)]
    page = obj(b"written %d" % rng.randrange(10**9), *words)
    at = row.id if i % 2 else f"{name} never {i % 8}"
    writer.record(write_row(at, [page], writer=name, idx=-1 if i % 3 else 0), objects=[page, *words])
    written, objects = store.writes("task", checkpoints=[f"{name} never {k}" for k in range(8)])
    if any(w.refs not in objects or objects[w.refs].refs[k : k + 16] not in objects for w in written for k in (0, 16, 32)):
        sys.exit(f"objects of writes are missing after {writer.seq}")
print("ok")
"""

SWEEPER = """
import sys, time
from safepoint.stores.postgres import bigsweep, sweep
from safepoint.stores.url import open_store

if sys.argv[3] == "True":
    sweep.LARGE, bigsweep.ROWS, bigsweep.OBJECTS, bigsweep.WINDOW = -1, 8, 8, 64
store, swept = open_store(sys.argv[1], durability="process"), 0
# The time begins when there is something to sweep: on a busy machine the savers may take long to start.
given_up = time.monotonic() + 60
while max((row.seq for row in store.headers("task")), default=0) < 20 and time.monotonic() < given_up:
    time.sleep(0.01)
end = time.monotonic() + float(sys.argv[2])
while time.monotonic() < end:
    swept += store.prune("task", [row.seq for row in store.headers("task")]).objects
print(swept)
"""


@pytest.fixture
def url() -> str:
    return fresh_postgres_url()


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    store = open_store(url, durability="process")
    yield store
    store.close()


@pytest.mark.scaled
@pytest.mark.parametrize("large", [False, True], ids=["in one transaction", "in many"])
def test_four_savers_and_two_sweepers_break_nothing(large: bool, url: str, store: Store) -> None:
    assert store.tasks() == []  # the tables are there
    rounds, seconds = scale(40, 800), scale(1, 8)

    def start(script: str, *args: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", script, url, *map(str, args)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    savers = [start(SAVER, f"b{i}", rounds) for i in range(4)]
    sweepers = [start(SWEEPER, seconds, large) for _ in range(2)]
    said = [process.communicate() for process in (*savers, *sweepers)]
    assert [out.strip() for out, _ in said[:4]] == ["ok"] * 4, [err[-800:] for _, err in said]
    assert sum(int(out) for out, _ in said[4:]) > 0, [err[-800:] for _, err in said]
    for branch in store.branches("task"):
        row, objects = store.read("task", branch=branch.name) or pytest.fail("a head is gone")
        assert all(objects[name].refs[i : i + 16] in objects for name in objects for i in range(0, len(objects[name].refs), 16))
        assert row.refs in objects
    # With nobody beside it a sweep leaves exactly what is reached.
    store.prune("task", [row.seq for row in store.headers("task")])
    reached: set[bytes] = set()
    for header in store.headers("task"):
        found = store.read("task", seq=header.seq)
        assert found is not None
        reached |= set(found[1])
    written, objects = store.writes("task")
    assert {row.checkpoint for row in written if " never " in row.checkpoint} == {
        f"b{i} never {k}" for i in range(4) for k in (0, 2, 4, 6)
    }
    assert {row.checkpoint for row in written if " never " not in row.checkpoint} <= {row.id for row in store.headers("task")}
    reached |= set(objects)
    assert {part.name for part in store.walk("task") if isinstance(part, Obj)} == reached


@pytest.mark.scaled
@pytest.mark.parametrize("large", [False, True], ids=["in one transaction", "in many"])
def test_savers_that_drop_add_again_and_fork_against_two_sweepers(large: bool, url: str, server: Server) -> None:
    with safepoint.open(url) as cp:
        cp.save(State("shared", messages=sweeping.WORDS[:5]))
    seconds = scale(1, 5)
    saves, swept = sweeping.savers_against_sweepers(
        server, url, savers=4, seconds=seconds, least=3 * seconds, sweep=sweeping_postgres.sweeper, large=large
    )
    assert saves > 10 * seconds
    assert sum(checkpoints for checkpoints, _ in swept) > saves // 8
    assert sum(objects for _, objects in swept) > 0
    with safepoint.open(url) as cp:
        seqs = [row.seq for row in cp.store.headers("shared")]
        assert cp.store.unreadable("shared", seqs) == {}
        for seq in seqs:
            cp.load("shared", seq=seq)
    print(f"{saves} saves, (checkpoints, objects) swept: {swept}, {len(seqs)} left")


# -- a large task

LENGTH, KEEP, MILESTONES, PINNED = scale(3_000, 20_000), 100, 50, (7, 8)


def stay(length: int) -> set[int]:
    return {*range(length - KEEP + 1, length + 1), *range(MILESTONES, length + 1, MILESTONES), *PINNED}


def check_whole(store: Store, length: int) -> set[int]:
    """All that is kept can be read, each checkpoint has the calls of its step and no other call is there; what is left."""
    seqs = [row.seq for row in store.headers("long")]
    assert store.unreadable("long", seqs) == {}
    calls, objects = store.calls("long")
    assert [call.base_seq for call in calls] == sorted(seqs)
    assert all(call.result_refs in objects for call in calls)
    writes, objects = store.writes("long")
    assert sorted(int(row.checkpoint[1:]) for row in writes) == sorted(seqs)
    assert all(row.refs in objects for row in writes)
    row = store.task("long")
    assert row is not None
    assert row.checkpoints == len(seqs)
    newest = store.read("long")
    assert newest is not None
    assert newest[0].seq == length, "what recovery would pick is the newest"
    return set(seqs)


def check_done(store: Store, length: int) -> None:
    """Exactly what must stay is there, and not an object more."""
    kept = check_whole(store, length)
    assert kept == stay(length)
    image = sweeping_postgres.written_task(length, milestones=MILESTONES)
    refs = {row.seq: row.refs for row in image.checkpoints}
    results = {call.base_seq: call.result_refs for call in image.calls}
    written = {row.checkpoint: row.refs for row in image.writes}
    inner = {obj.name: obj.refs for obj in image.objects}
    reached = set()
    for seq in kept:
        reached |= {refs[seq], results[seq], written[f"c{seq}"], *(inner[refs[seq]][i : i + 16] for i in range(0, 48, 16))}
    assert {part.name for part in store.walk("long") if isinstance(part, Obj)} == reached


@pytest.mark.scaled
@pytest.mark.parametrize("point", ["sweep.rows", "sweep.marked", "sweep.objects"])
def test_field_case_84c_a_clean_up_killed_at_a_point(point: str, url: str, store: Store, server: Server) -> None:
    length = 1_500
    image = sweeping_postgres.written_task(length, milestones=MILESTONES, pinned=PINNED)
    assert store.write_task(image)
    hits: Counter[str] = server.run(sweeping_postgres.cleaner, url, "long", KEEP)[3]
    check_done(store, length)
    nths = {1, hits[point]} if not SOAK else {*range(1, hits[point] + 1, 3), hits[point]}
    for nth in sorted(nths):
        assert store.delete_task("long")
        assert store.write_task(image)
        killed = server.start(sweeping_postgres.cleaner, url, "long", KEEP, point, nth)
        killed.told()
        assert killed.was_killed, f"{point} was not reached {nth} times"
        check_whole(store, length)
        server.run(sweeping_postgres.cleaner, url, "long", KEEP)
        check_done(store, length)


@pytest.mark.scaled
@pytest.mark.parametrize("point", ["delete.before", "delete.after", "delete.rest"])
def test_a_deletion_killed_at_a_point_is_done_or_not_and_leaves_nothing_for_good(
    point: str, url: str, store: Store, server: Server
) -> None:
    image = sweeping_postgres.written_task(scale(300, 3000))
    other = sweeping_postgres.written_task(3, task="other")
    assert store.write_task(other)
    assert store.write_task(image)
    killed = server.start(sweeping_postgres.deleter, url, "long", point, 1)
    killed.told()
    assert killed.was_killed
    assert (store.task("long") is None) is (point != "delete.before")
    assert store.strays() == []
    if point == "delete.before":
        assert list(store.structure()) == []
        check_rows = [row.seq for row in store.headers("long")]
        assert store.unreadable("long", check_rows) == {}
        assert len(check_rows) == len(image.checkpoints)
        assert store.delete_task("long")
    else:
        assert store.write_task(image), "its name is free"
        assert store.delete_task("long")
    with store.connection() as conn:
        schema = url.rpartition("=")[2]
        for table, count in (("checkpoints", 3), ("objects", len(other.objects)), ("calls", 3), ("writes", 3), ("stages", 0)):
            assert conn.execute(f"SELECT count(*) FROM {schema}.sp_{table}").fetchall() == [(count,)]


@pytest.mark.scaled
def test_others_do_not_wait_for_a_large_clean_up(server: Server) -> None:
    def measure(_: int) -> tuple[float, float]:
        url = fresh_postgres_url()
        with contextlib.closing(open_store(url, durability="process")) as store:
            return _large_clean_up(url, store, server)

    sweeping.assert_not_held_up(measure)


def _large_clean_up(url: str, store: Store, server: Server) -> tuple[float, float]:
    """Make and clean up a large task; the longest save beside it, and how long it took."""
    assert store.write_task(sweeping_postgres.written_task(LENGTH, milestones=MILESTONES, pinned=PINNED))
    beside = server.start(_beside, url, "other", scale(2, 8))
    beside.until("ready")
    began = time.monotonic()
    with safepoint.open(url, retention=Retention.keep_all(), durability="process") as cp:
        report = cp.cleanup("long", keep_latest=KEEP)
        seconds = time.monotonic() - began
        assert set(report.deleted) == set(range(1, LENGTH + 1)) - stay(LENGTH)
        assert report.calls_deleted == len(report.deleted)
        check_done(store, LENGTH)
        again = cp.cleanup("long", keep_latest=KEEP)
        assert (again.deleted, again.calls_deleted, again.objects_deleted) == ((), 0, 0)
    _, longest, saves = beside.until("waited")
    print(f"{LENGTH} checkpoints: {seconds:.1f} s; of {saves} saves beside it the longest took {longest * 1e3:.0f} ms")
    return longest, seconds


def _beside(url: str, task: str, seconds: float) -> None:
    """Save to another task until the time is over; tells the longest time that a save took."""
    from tests.support.children import tell

    with safepoint.open(url, retention=Retention.keep_all(), durability="process") as cp:
        state = State(task)
        cp.save(state)
        tell("ready")
        longest, saves, end = 0.0, 0, time.monotonic() + seconds
        while time.monotonic() < end:
            state.step += 1
            began = time.monotonic()
            cp.save(state)
            longest, saves = max(longest, time.monotonic() - began), saves + 1
            time.sleep(0.001)
        tell("waited", longest, saves)

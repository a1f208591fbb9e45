"""Saves that leave out what their parent has, against sweeps of the same task by other processes, on Redis and on a cluster.

A sweep there is many short scripts, since each holds up the whole server: its mark is old when it deletes.
"""

from __future__ import annotations

import subprocess
import sys
import time
import uuid
from collections.abc import Iterator

import pytest

import safepoint
from safepoint import Retention, State
from safepoint.model import Obj
from safepoint.stores.base import Store
from safepoint.stores.url import open_store
from tests.support import sweeping
from tests.support.children import Server
from tests.support.scale import scale
from tests.support.servers import fresh_redis_url, shared_cluster

SAVER = """
import random, sys
from safepoint.stores.url import open_store
from safepoint.testing.build import Writer, obj, write_row

store, name, rounds = open_store(sys.argv[1], durability="process"), sys.argv[2], int(sys.argv[3])
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
    if i % 3 == 0:
        # Recorded against the head, with which it goes, and against none that ever comes; both leave out what the head has.
        word, of = obj(b"word %d" % rng.randrange(40)), f"{name} {i % 20}"
        rows = [write_row(writer.head.id, [page], writer=name), write_row(of, [items[-1], word], writer=name, idx=-1)]
        writer.record(*rows, objects=[word], stands_on=writer.head)
        rows, objects = store.writes("task", checkpoints=[of])
        if {items[-1].name, word.name} - set(objects):
            sys.exit(f"objects of what was recorded against {of} are missing")
print("ok")
"""

SWEEPER = """
import sys, time
from safepoint.stores.url import open_store

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


@pytest.fixture(params=["one server", "a cluster"])
def url(request: pytest.FixtureRequest) -> str:
    if request.param == "one server":
        return fresh_redis_url()
    return f"{shared_cluster().url}?cluster=true&prefix=t{uuid.uuid4().hex[:12]}:"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    store = open_store(url, durability="process")
    yield store
    store.close()


@pytest.mark.scaled
def test_four_savers_and_two_sweepers_break_nothing(url: str, store: Store) -> None:
    rounds, seconds = scale(60, 1000), scale(1, 8)

    def start(script: str, *args: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", script, url, *map(str, args)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    savers = [start(SAVER, f"b{i}", rounds) for i in range(4)]
    sweepers = [start(SWEEPER, seconds) for _ in range(2)]
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
    writes, objects = store.writes("task")
    refs = [row.refs[i : i + 16] for row in writes for i in range(0, len(row.refs), 16)]
    assert len(refs) > 40
    assert reached | set(objects) >= {*refs}
    assert all(row.checkpoint.startswith("b") or store.read("task", id=row.checkpoint) for row in writes)
    reached |= set(objects)
    assert {part.name for part in store.walk("task") if isinstance(part, Obj)} == reached


@pytest.mark.scaled
def test_savers_that_drop_add_again_and_fork_against_two_sweepers(url: str, server: Server) -> None:
    with safepoint.open(url) as cp:
        cp.save(State("shared", messages=sweeping.WORDS[:5]))
    seconds = scale(1, 5)
    saves, swept = sweeping.savers_against_sweepers(server, url, savers=4, seconds=seconds, least=5 * seconds + 1)
    assert saves > 20 * seconds
    assert sum(checkpoints for checkpoints, _ in swept) > saves // 4
    assert sum(objects for _, objects in swept) > 0
    with safepoint.open(url) as cp:
        seqs = [row.seq for row in cp.store.headers("shared")]
        assert cp.store.unreadable("shared", seqs) == {}
        for seq in seqs:
            cp.load("shared", seq=seq)
    print(f"{saves} saves, (checkpoints, objects) swept: {swept}, {len(seqs)} left")


LENGTH, KEEP, MILESTONES = scale(2_000, 25_000), 100, 50


@pytest.mark.scaled
def test_others_do_not_wait_for_a_large_clean_up(url: str, store: Store, server: Server) -> None:
    sweeping.assert_not_held_up(lambda nth: _large_clean_up(url, store, server, f"long {nth}", f"other {nth}"))


def _large_clean_up(url: str, store: Store, server: Server, task: str, beside: str) -> tuple[float, float]:
    """Make and clean up a large task; the longest save beside it, and how long it took."""
    image = sweeping.long_task(LENGTH, task=task, milestones=MILESTONES, pinned=(7, 8))
    assert store.write_task(image)
    stay = {*range(LENGTH - KEEP + 1, LENGTH + 1), *range(MILESTONES, LENGTH + 1, MILESTONES), 7, 8}
    other = server.start(_beside, url, beside, scale(2, 8))
    other.until("ready")
    began = time.monotonic()
    with safepoint.open(url, retention=Retention.keep_all(), durability="process") as cp:
        report = cp.cleanup(task, keep_latest=KEEP)
        seconds = time.monotonic() - began
        assert set(report.deleted) == set(range(1, LENGTH + 1)) - stay
        assert report.calls_deleted == len(report.deleted)
        assert {row.seq for row in store.headers(task)} == stay
        assert store.unreadable(task, stay) == {}
        again = cp.cleanup(task, keep_latest=KEEP)
        assert (again.deleted, again.calls_deleted, again.objects_deleted) == ((), 0, 0)
    calls, objects = store.calls(task)
    assert {call.base_seq for call in calls} == stay
    assert all(call.result_refs in objects for call in calls)
    _, longest, saves = other.until("waited")
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

"""Saves that leave out what their parent has, against sweeps of the same task by other processes: nothing is ever missing."""

import subprocess
import sys

import pytest

import safepoint
from safepoint import State
from safepoint.stores.sqlite import SQLiteStore
from tests.support import sweeping
from tests.support.children import Server
from tests.support.scale import scale

SAVER = """
import random, sys
from safepoint.stores.sqlite import SQLiteStore
from safepoint.testing.build import Writer, obj, write_row

store, name, rounds = SQLiteStore(sys.argv[1], durability="process"), sys.argv[2], int(sys.argv[3])
rng, writer, items, checked = random.Random(name), Writer(store, "task", branch=name), [], 0

def whole(checkpoint, note):
    rows, objects = store.writes("task", checkpoints=[checkpoint])
    return rows[0].refs == note.name and {note.name, *(note.refs[i : i + 16] for i in range(0, len(note.refs), 16))} <= set(objects)

for i in range(rounds):
    # Words of a small common stock: what one branch drops and a sweep takes, another sends again at the same time.
    items = [*items[-6:], obj(b"word %d" % rng.randrange(40))]
    known = set(known_names) if i else set()
    page = obj(b"page %d" % rng.randrange(10**9), *items)
    writer.save(page, objects=[page, *(o for o in items if o.name not in known)])
    known_names = [o.name for o in items]
    row, objects = store.read("task", seq=writer.seq) or sys.exit("head is gone")
    missing = {page.name, *(o.name for o in items)} - set(objects)
    if missing:
        sys.exit(f"{len(missing)} objects of {writer.seq} are missing")
    # What an adapter records, against this checkpoint and one that never comes: it shares words, and the special one is replaced.
    if i and not whole("never " + name, note):
        sys.exit("objects of a write are missing some time after it")
    words = [obj(b"only in notes %d" % rng.randrange(40)) for _ in range(3)]
    note = obj(b"note %d" % i, *items[-2:], *words)
    sent = [note, *words]
    writer.record(
        write_row(writer.head.id, [note], writer="w"),
        write_row("never " + name, [note], writer="w", idx=-1),
        objects=sent,
        stands_on=writer.head,
    )
    if not whole("never " + name, note):
        sys.exit("objects of a write are missing")
print("ok")
"""

SWEEPER = """
import sys, time
from safepoint.stores import sqlite_bigsweep, sqlite_sweep
from safepoint.stores.sqlite import SQLiteStore

if sys.argv[3] == "in many":
    sqlite_sweep.LARGE, sqlite_bigsweep.ROWS, sqlite_bigsweep.OBJECTS = -1, 8, 8
store, swept = SQLiteStore(sys.argv[1], durability="process"), 0
# The time begins when there is something to sweep: on a busy machine the savers may take long to start.
given_up = time.monotonic() + 60
while max((row.seq for row in store.headers("task")), default=0) < 20 and time.monotonic() < given_up:
    time.sleep(0.01)
end = time.monotonic() + float(sys.argv[2])
while time.monotonic() < end:
    swept += store.prune("task", [row.seq for row in store.headers("task")]).objects
print(swept)
"""


@pytest.mark.scaled
def test_four_savers_and_two_sweepers_break_nothing(tmp_path):
    path = str(tmp_path / "agent.db")
    SQLiteStore(path).close()
    rounds, seconds = scale(150, 6000), scale(2, 60)

    def start(script, *args):
        command = [sys.executable, "-c", script, path, *map(str, args)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    savers = [start(SAVER, f"b{i}", rounds) for i in range(4)]
    sweepers = [start(SWEEPER, seconds, how) for how in ("in one transaction", "in many")]
    said = [process.communicate() for process in (*savers, *sweepers)]
    assert [out.strip() for out, _ in said[:4]] == ["ok"] * 4, [err[-500:] for _, err in said]
    assert sum(int(out) for out, _ in said[4:]) > 0
    store = SQLiteStore(path)
    for branch in store.branches("task"):
        row, objects = store.read("task", branch=branch.name) or pytest.fail("a head is gone")
        assert all(objects[name].refs[i : i + 16] in objects for name in objects for i in range(0, len(objects[name].refs), 16))
        assert row.refs in objects
    writes, objects = store.writes("task")
    assert {row.checkpoint for row in writes} >= {f"never b{i}" for i in range(4)}
    assert all(row.refs in objects for row in writes)
    assert all(obj.refs[i : i + 16] in objects for obj in objects.values() for i in range(0, len(obj.refs), 16))
    # A write goes with its checkpoint, and with nothing else.
    ids = {row.id for row in store.headers("task")}
    assert {row.checkpoint for row in writes if not row.checkpoint.startswith("never ")} <= ids
    store.close()


@pytest.mark.scaled
@pytest.mark.parametrize("large", [False, True], ids=["in one transaction", "in many"])
def test_savers_that_drop_add_again_and_fork_against_two_sweepers(large: bool, server: Server, tmp_path) -> None:
    url = f"sqlite:///{tmp_path}/agent.db"
    with safepoint.open(url) as cp:
        cp.save(State("shared", messages=sweeping.WORDS[:5]))
    seconds = scale(1, 10)
    saves, swept = sweeping.savers_against_sweepers(server, url, savers=4, seconds=seconds, least=5 * seconds + 1, large=large)
    assert saves > 20 * seconds
    assert sum(checkpoints for checkpoints, _ in swept) > saves // 4
    assert sum(objects for _, objects in swept) > 0
    with safepoint.open(url) as cp:
        seqs = [row.seq for row in cp.store.headers("shared")]
        assert cp.store.unreadable("shared", seqs) == {}
        for seq in seqs:
            cp.load("shared", seq=seq)
    print(f"{saves} saves, (checkpoints, objects) swept: {swept}, {len(seqs)} left")

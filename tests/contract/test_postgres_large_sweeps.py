"""Sweeps of many short transactions on PostgreSQL keep what the sweep of one does: the contract of removal, and the oracle."""

import pytest
from hypothesis import settings

from safepoint.codec.nodes import make
from safepoint.errors import Damaged
from safepoint.model import Obj, new_id
from safepoint.rows import CallWrite, Commit, Lost, replace
from safepoint.stores.url import open_store
from safepoint.testing import Place, Remote, StoreMachine, run_machine
from safepoint.testing.build import Writer, obj, tree, write_row
from safepoint.testing.drive import end_processes
from safepoint.testing.removal import RemovalTests, chain
from safepoint.testing.writes import WriteTests
from tests.support import sweeping
from tests.support.seeds import fresh_seed
from tests.support.servers import fresh_postgres_url
from tests.support.sweeping_postgres import SIZES, always_large


@pytest.fixture(params=[True])
def large(request):
    return request.param


@pytest.fixture
def store(monkeypatch, large):
    for module, names in SIZES:
        for name in names:
            monkeypatch.setattr(module, name, getattr(module, name))  # to be put back
    store = always_large(fresh_postgres_url()) if large else open_store(fresh_postgres_url(), durability="process")
    yield store
    store.close()


class TestRemovalInManySteps(RemovalTests, WriteTests):
    """``store`` is that of the module."""


def left(store, n):
    """How many rows of a task's number there are, in all tables."""
    tables = ("checkpoints", "branches", "objects", "calls", "pauses", "inputs", "leases", "writes", "outbox", "stages")
    counts = []
    with store.connection() as conn:
        for name in tables:
            column = "n" if name == "stages" else "task"
            counts += conn.execute(f'SELECT count(*) FROM "{store._db.schema}".sp_{name} WHERE {column} = %s', (n,)).fetchall()
    return sum(count for (count,) in counts)


def number(store, task):
    with store.connection() as conn:
        return conn.execute(f'SELECT n FROM "{store._db.schema}".sp_tasks WHERE task = %s', (task,)).fetchall()[0][0]


@pytest.mark.parametrize("large", [False, True])
def test_a_large_task_is_gone_at_once_and_its_rows_follow(store):
    writer = chain(store, 5)
    writer.record(*(write_row(f"c{i}") for i in range(5)))
    writer.call()
    writer.pause()
    n = number(store, "task")
    assert left(store, n) > 20
    assert store.delete_task("task")
    assert left(store, n) == 0
    assert store.strays() == []
    assert store.delete_task("task") is False


def test_work_that_is_left_at_a_yield_goes_on_with_the_next(store):
    chain(store, 6)
    before = {part.name for part in store.walk("task") if isinstance(part, Obj)}
    for steps in range(1, 60):
        work = store.pruning("task", range(1, 5))
        for _ in range(steps):
            if next(work, "end") == "end":
                break
        else:
            work.close()
            for header in store.headers("task"):
                found = store.read("task", seq=header.seq)
                assert found is not None
                assert len(found[1]) == 3
            continue
        break
    after = {part.name for part in store.walk("task") if isinstance(part, Obj)}
    assert after == before - {o.name for i in range(4) for o in tree(f"task{i}")}


def test_what_is_saved_between_two_steps_of_a_sweep_stays(store):
    """Also where it is garbage that was found and comes again, below something new, or through a write or a call that was there."""
    for steps in range(40):
        task = f"task {steps}"
        writer = chain(store, 4, task)
        writer.record(write_row("never", idx=-1))
        kept = tree("kept")  # of a row that comes behind it
        writer.record(write_row("never", kept[:1]), objects=kept)
        call = writer.call(status="started")
        old = tree(f"{task}1")
        work = store.pruning(task, [1, 2, 3])
        for _ in range(steps):
            next(work, None)
        page = obj(b"a new page over what was there", *old[1:])
        writer.save(page, objects=[page, *old[1:]], row={"step": 9})
        written = tree(f"{task}0")
        writer.record(write_row("never", written[:1], idx=-1), objects=written)
        settled = writer.settle(call, result_refs=old[0].name, status="in_doubt") if steps % 2 else None
        if settled is not None:
            again = tree(f"{task}2")
            row = replace(settled, result_refs=again[0].name)
            store.commit(Commit(task=task, id=new_id(), calls=(CallWrite(row),), objects=tuple(again)))
        for _ in work:
            pass
        found = store.read(task)
        assert found is not None
        assert found[1] == {o.name: o for o in (page, *old[1:])}, steps
        if settled is not None:
            assert store.calls(task)[1] == {o.name: o for o in tree(f"{task}2")}, steps
        assert store.writes(task)[1] == {o.name: o for o in (*written, *kept)}, steps
        store.prune(task, [])
        assert store.writes(task)[1] == {o.name: o for o in (*written, *kept)}, steps
        there = {part.name for part in store.walk(task) if isinstance(part, Obj)}
        assert {page.name, *(o.name for o in old[1:])} <= there


@pytest.mark.parametrize("large", [False, True])
def test_objects_that_are_missing_or_changed_are_told_of_the_checkpoints_that_reach_them(store, large):
    image = sweeping.long_task(30)
    assert store.write_task(image)
    seqs = range(1, 31)
    assert store.unreadable("long", seqs) == {}
    own = next(row for row in image.checkpoints if row.seq == 7).refs  # of no other checkpoint
    some = make(b"", b"of ten 2")
    with store.connection() as conn:
        table = f'"{store._db.schema}".sp_objects'
        conn.execute(f"DELETE FROM {table} WHERE name = %s", (own,))
        conn.execute(f"UPDATE {table} SET data = 'another' WHERE name = %s", (some.name,))
        conn.execute(f'UPDATE "{store._db.schema}".sp_checkpoints SET label = %s WHERE seq = 4', ("x",))
    bad = store.unreadable("long", [*seqs, 99])
    assert sorted(bad) == [4, 7, *range(20, 30)]
    assert ("seal" in bad[4], "missing" in bad[7], "damaged" in bad[25]) == (True, True, True)
    assert store.unreadable("long", seqs, space="ns") == {}
    assert store.unreadable("absent", seqs) == {}


def test_rows_whose_task_is_gone_are_found_and_set_aside(store):
    writer = chain(store, 3)
    writer.call()
    n = number(store, "task")
    with store.connection() as conn:
        conn.execute(f'DELETE FROM "{store._db.schema}".sp_tasks WHERE n = %s', (n,))
    strays = store.strays()
    assert {stray.kind for stray in strays} == {"stray"}
    assert sum(int(stray.what.split()[0]) for stray in strays) == left(store, n)
    counted = left(store, n)
    assert store.set_strays_aside() == counted
    assert store.strays() == []
    assert left(store, n) == 0
    with store.connection() as conn:
        kept = conn.execute(f'SELECT count(*) FROM "{store._db.schema}".sp_quarantine').fetchall()
    assert kept == [(counted,)]


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("in_write", [False, True])
def test_a_cut_off_list_of_objects_stops_every_sweep(store, in_write):
    chain(store, 4)
    Writer(store).record(write_row("c", tree("task0")[:1]))
    with store.connection() as conn:
        row = (
            "sp_writes SET refs = substr(refs, 1, 15)"
            if in_write
            else "sp_checkpoints SET refs = substr(refs, 1, 15) WHERE seq = 4"
        )
        conn.execute(f'UPDATE "{store._db.schema}".{row}')
    before = [part for part in store.walk("task") if isinstance(part, Obj)]
    with pytest.raises(Damaged, match="cut off"):
        store.prune("task", [])
    assert [part for part in store.walk("task") if isinstance(part, Obj)] == before


def test_a_row_that_is_gone_is_missed_by_a_walk(store):
    chain(store, 4)
    with store.connection() as conn:
        conn.execute(f'DELETE FROM "{store._db.schema}".sp_checkpoints WHERE seq = 2')
    lost = [part for part in store.walk("task") if isinstance(part, Lost)]
    assert [(part.what, part.kind) for part in lost] == [("1 checkpoints are missing", "checkpoint")]


class LargeMachine(StoreMachine):
    ALWAYS = frozenset()

    def driver(self):
        return Remote(Place(always_large, (fresh_postgres_url(),)))


@pytest.mark.soak
def test_machine():
    run_machine(LargeMachine, profile=settings(max_examples=40, stateful_step_count=60, deadline=None), seed=fresh_seed())
    end_processes()

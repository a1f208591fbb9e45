"""repair: the store that comes of it verifies clean, every undamaged checkpoint loads, and no write is repeated blindly."""

import contextlib
import random

import apsw
import pytest

import safepoint
from safepoint import InDoubt, NotFound, State, UsageError
from safepoint.stores.memory import MemoryStore
from tests.integration.test_verify import big, changed, journaled, made
from tests.support.runs import World, declare
from tests.support.scale import scale
from tests.support.spoil import spoil, spoil_any


def opened(url):
    return safepoint.open(url, durability="process")


@pytest.fixture(params=["into", "in place"])
def in_place(request):
    return request.param == "in place"


@pytest.fixture
def mend(in_place, cp, tmp_path):
    """Repair ``cp``; gives the report and the checkpointer that has the repaired store."""
    others = []

    def repair(task=None):
        if in_place:
            return cp.repair(task, in_place=True), cp
        other = opened(f"sqlite:///{tmp_path}/other.db")
        others.append(other)
        return cp.repair(task, into=other.store), other

    yield repair
    for other in others:
        other.close()


def stopped_after(cp, send, argument):
    """A run that ends in the middle of a step that has made a call."""
    with contextlib.suppress(RuntimeError), cp.resume("t") as run:
        run.save()
        run.call(send, argument)
        raise RuntimeError


def loads(cp, task):
    return {c.seq: cp.load(task, seq=c.seq) for c in cp.list_checkpoints(task)}


@pytest.fixture
def chunked(cp):
    if not cp.store.chunked:
        pytest.skip("chunked is False")


def test_a_sound_store_stays_as_it_is(cp, tmp_path):
    made(cp, "a")
    journaled(cp, "b")
    other = opened(f"sqlite:///{tmp_path}/other.db")
    report = cp.repair(into=other.store)
    assert (report.tasks, report.damages, report.fell_back, report.lost_checkpoints) == (2, [], [], {})
    assert other.verify().ok
    for task in ("a", "b"):
        assert {n: s.messages for n, s in loads(other, task).items()} == {n: s.messages for n, s in loads(cp, task).items()}
    assert [c.result for c in other.calls("b")] == [c.result for c in cp.calls("b")]
    other.close()


def test_a_sound_store_in_place_is_not_touched(sqlite, tmp_path):
    made(sqlite)
    report = sqlite.repair(in_place=True)
    assert report.backup is None
    assert report.set_aside == 0
    assert not list(tmp_path.glob("*before*"))


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("how", ["missing", "corrupt"])
def test_a_damaged_head_falls_back_on_a_new_branch(cp, mend, in_place, how):
    made(cp)
    spoil(cp, "t", b"message 4 ", how)
    report, mended = mend()
    (fell,) = report.fell_back
    assert (fell.branch, fell.new_branch, fell.lost_head, fell.seq) == ("main", "main~1", 6, 4)
    assert report.lost_checkpoints == {"t": ((5, 6),)}
    found = mended.verify("t")
    assert found.ok, str(found)
    assert mended.status("t").branch == "main~1"
    state = mended.load_latest("t")
    assert state.messages == [big(i) for i in range(4)]
    assert (state.seq, state.branch) == (7, "main~1")
    assert set(loads(mended, "t")) == {1, 2, 3, 4, 7}
    # It goes on, and no number comes a second time.
    state.messages.append(big(99))
    assert mended.save(state).seq == 8
    assert {b.name: b.head.seq for b in mended.store.branches("t")} == {"main": 4, "main~1": 8}
    if not in_place:
        assert not cp.verify("t").ok


@pytest.mark.usefixtures("chunked")
def test_a_damaged_leaf_in_the_middle_takes_only_what_holds_it(cp, mend):
    state = made(cp)
    for i in range(6, 9):
        state.messages = state.messages[-2:]
        state.messages.append(big(i))
        cp.save(state)
    spoil(cp, "t", b"message 0 ", seq=3)
    report, mended = mend()
    assert report.fell_back == []
    # The first is so small that its only message is no object of its own.
    assert report.lost_checkpoints == {"t": ((2, 6),)}
    assert mended.verify("t").ok
    assert set(loads(mended, "t")) == {1, 7, 8, 9}
    assert mended.load_latest("t").messages == state.messages


@pytest.mark.usefixtures("chunked")
def test_nothing_of_a_task_loads(cp, mend):
    cp.save(State("t", messages=[big(0), {"role": "user", "content": "x" * 2000}]))
    spoil(cp, "t", b"message 0 ")
    report, mended = mend()
    assert [f.new_branch for f in report.fell_back] == [None]
    assert mended.verify().ok
    assert mended.list_checkpoints("t") == []


@pytest.mark.usefixtures("chunked")
def test_a_call_whose_values_are_lost_is_not_made_again(cp, mend):
    world = World()
    send = declare(world)
    stopped_after(cp, send, "the argument " + "y" * 600)
    assert len(world.log) == 1
    assert spoil_any(cp, "t", b"the argument") == 1
    report, mended = mend()
    assert report.bare_calls == {"t": ((1, 1),)}
    assert mended.verify("t").ok
    (call,) = mended.calls("t")
    assert (call.status, call.arguments, call.result) == ("succeeded", {}, None)
    with pytest.raises(safepoint.SafepointError), mended.resume("t") as run:
        run.call(send, "the argument " + "y" * 600)
    assert len(world.log) == 1


def test_a_lost_call_leaves_a_guard(sqlite, tmp_path):
    world = World()
    send = declare(world)
    stopped_after(sqlite, send, "once")
    changed(sqlite, "UPDATE sp_calls SET status = 'failed'")
    for in_place in (False, True):
        report = sqlite.repair(in_place=in_place)
        assert report.lost_calls == {"t": ((1, 1),)}
        (fell,) = report.fell_back
        assert fell.lost_head is None
        assert fell.guard > 0
        with opened(report.url if not in_place else sqlite) if not in_place else sqlite as mended:
            assert mended.verify().ok
            with pytest.raises(InDoubt), mended.resume("t") as run:
                run.call(send, "once")
            assert len(world.log) == 1


# -- SQLite


def test_the_default_is_a_copy_beside_it(sqlite, tmp_path):
    made(sqlite)
    spoil(sqlite, "t", b"message 5 ")
    before = sqlite.verify("t")
    report = sqlite.repair()
    assert report.url == f"sqlite:///{tmp_path}/agent.db.repaired"
    assert sqlite.verify("t").damages == before.damages
    with opened(report.url) as other:
        assert other.verify().ok
        assert other.load_latest("t").step == 4
    with pytest.raises(UsageError, match="not empty"):
        sqlite.repair()


def test_in_place_keeps_what_it_takes_away(sqlite, tmp_path):
    made(sqlite)
    changed(sqlite, "UPDATE sp_checkpoints SET step = 77 WHERE seq = 3")
    spoil(sqlite, "t", b"message 4 ", "corrupt")
    report = sqlite.repair(in_place=True)
    assert report.backup == f"sqlite:///{tmp_path}/agent.db.before-repair-1"
    assert sqlite.verify().ok
    with sqlite.connection() as conn:
        aside = conn.execute("SELECT kind, key FROM sp_quarantine ORDER BY k").fetchall()
    assert len(aside) == report.set_aside
    assert {kind for kind, _ in aside} == {"checkpoint", "object"}
    assert {key for kind, key in aside if kind == "checkpoint"} == {"3", "5", "6"}
    with opened(report.backup) as copy:
        assert next(d.what for d in copy.verify("t").damages) == "checkpoint 3"
    # A second one has nothing to do.
    assert sqlite.repair(in_place=True).backup is None


def test_a_live_run_is_not_repaired_under_its_hands(sqlite):
    made(sqlite)
    spoil(sqlite, "t", b"message 2 ")
    with safepoint.open(sqlite.store.url) as other, sqlite.resume("t", at=2), pytest.raises(safepoint.LeaseHeld):
        other.repair("t", in_place=True)


def test_a_task_that_goes_on_while_it_is_repaired_is_whole_in_the_copy(cp, tmp_path, monkeypatch):
    """Reads may go on under a live run: what came after the look must not be copied in part."""
    made(cp)
    walk, walks = cp.store.walk, 0

    def late(task):
        nonlocal walks
        walks += 1
        if walks == 3:  # the one that is written from
            state = cp.load_latest("t")
            state.messages += [{"role": "user", "content": f"late {i} " * 200} for i in range(40)]
            cp.save(state)
        return walk(task)

    monkeypatch.setattr(cp.store, "walk", late)
    cp.repair(into=f"sqlite:///{tmp_path}/repaired.db")
    with safepoint.open(f"sqlite:///{tmp_path}/repaired.db") as two:
        assert two.verify().ok
        assert two.load_latest("t").messages == cp.load_latest("t").messages


def test_a_repair_says_how_many_checkpoints_are_whole(sqlite, tmp_path):
    made(sqlite, n=3)
    made(sqlite, "u", n=2)
    assert sqlite.repair(in_place=True).checkpoints == 5
    with opened(f"sqlite:///{tmp_path}/other.db") as other:
        assert sqlite.repair(into=other).checkpoints == 5
        assert other.verify().ok


@pytest.mark.parametrize("in_place", [True, False])
def test_a_task_that_is_deleted_meanwhile_stops_no_repair_of_the_others(sqlite, tmp_path, monkeypatch, in_place):
    made(sqlite, n=2)
    made(sqlite, "u", n=2)
    walk = sqlite.store.walk_tasks

    def late():
        for name in walk():
            if name == "t":
                sqlite.delete_task("t")
            yield name

    monkeypatch.setattr(sqlite.store, "walk_tasks", late)
    done = sqlite.repair(in_place=True) if in_place else sqlite.repair(into=f"sqlite:///{tmp_path}/other.db")
    assert (done.tasks, done.checkpoints) == (1, 2)


def test_what_belongs_to_no_task_goes_to_the_quarantine(sqlite):
    made(sqlite, "t")
    made(sqlite, "u")
    changed(sqlite, "DELETE FROM sp_tasks WHERE task = 'u'")
    assert not sqlite.verify().ok
    report = sqlite.repair(in_place=True)
    assert report.set_aside > 6
    assert sqlite.verify().ok


def test_a_task_whose_row_is_gone_is_rebuilt_by_its_name(sqlite):
    made(sqlite, "t")
    journaled(sqlite, "u")
    last = sqlite.load_latest("u").messages
    changed(sqlite, "DELETE FROM sp_tasks WHERE task = 'u'")
    with pytest.raises(UsageError):
        sqlite.repair("u", in_place=True)
    report = sqlite.repair("u")
    with opened(report.url) as other:
        assert other.verify().ok
        assert other.load_latest("u").messages == last
        assert len(other.calls("u")) == 4


def test_a_branch_row_that_is_gone(sqlite):
    made(sqlite, "t")
    changed(sqlite, "DELETE FROM sp_branches")
    found = sqlite.verify("t")
    assert [d.what for d in found.damages if d.kind == "branch"] == ["branch 'main'"]
    report = sqlite.repair("t")
    with opened(report.url) as other:
        assert other.verify().ok
        assert other.load_latest("t").messages == [big(i) for i in range(6)]


@pytest.mark.scaled
def test_damaged_pages_are_repaired_into_a_copy(tmp_path):
    path = tmp_path / "agent.db"
    with opened(f"sqlite:///{path}") as cp:
        for task in ("t", "u"):
            made(cp, task, n=40)
        journaled(cp, "v", steps=20)
        want = {task: loads(cp, task) for task in ("t", "u", "v")}
    data = path.read_bytes()
    rng = random.Random(5)
    pages = list(range(1, len(data) // 8192))
    repaired = 0
    for page in rng.sample(pages, min(scale(3, 25), len(pages))):
        copy = tmp_path / f"cut-{page}.db"
        copy.write_bytes(data[: page * 8192] + bytes(8192) + data[(page + 1) * 8192 :])
        try:
            cp = opened(f"sqlite:///{copy}")
        except safepoint.Damaged:
            continue
        with cp:
            before = cp.verify()
            report = cp.repair()
            good = {}
            for task in want:
                audit = cp.verify(task) if list(cp.store.walk(task)) else None
                runs = [b.loads for b in audit.branches] if audit else []
                good[task] = {n for run in runs for first, last in run for n in range(first, last + 1)}
            with pytest.raises(UsageError) if not before.ok else pytest.raises(AssertionError):
                cp.repair(in_place=True)
                raise AssertionError
        with opened(report.url) as other:
            after = other.verify()
            assert after.ok, str(after)
            for task, seqs in good.items():
                for seq in seqs:
                    assert other.load(task, seq=seq).messages == want[task][seq].messages
            repaired += 1
    assert repaired >= scale(1, 3)


def test_a_repair_killed_anywhere_leaves_the_old_or_the_new(sqlite):
    from safepoint import _probe

    made(sqlite)
    spoil(sqlite, "t", b"message 4 ", "corrupt")
    before = str(sqlite.verify("t").damages)

    class Stop(Exception):
        pass

    def hook(name):
        if name == "repair.before":
            raise Stop

    _probe.hook = hook
    try:
        with pytest.raises(Stop):
            sqlite.repair(in_place=True)
    finally:
        _probe.hook = None
    assert str(sqlite.verify("t").damages) == before
    assert sqlite.repair(in_place=True).set_aside > 0
    assert sqlite.verify().ok


def test_refusals(cp):
    made(cp)
    with pytest.raises(UsageError, match="not both"):
        cp.repair(into="memory://", in_place=True)
    with pytest.raises(NotFound):
        cp.repair("nobody", into="memory://")
    if isinstance(cp.store, MemoryStore):
        with pytest.raises(UsageError, match="no place beside"):
            cp.repair()


def test_a_page_of_the_quarantine_is_no_stray(sqlite):
    made(sqlite)
    changed(sqlite, "UPDATE sp_checkpoints SET step = 77 WHERE seq = 3")
    sqlite.repair(in_place=True)
    assert sqlite.store.strays() == []
    conn = apsw.Connection(sqlite.store.path)
    assert conn.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    conn.close()
    assert isinstance(sqlite.load_latest("t"), State)


@pytest.mark.scaled
def test_bits_flipped_anywhere_never_come_out_as_a_sound_store_that_says_something_else(tmp_path):
    """verify never raises; what repair makes of it is clean; and every checkpoint in that is as it was saved."""
    path = tmp_path / "agent.db"
    with opened(f"sqlite:///{path}") as cp:
        for task in ("t", "u"):
            made(cp, task, n=12)
        journaled(cp, "v", steps=6)
        want = {task: loads(cp, task) for task in ("t", "u", "v")}
    data = path.read_bytes()
    rng = random.Random(8)
    kept = looked = 0
    for i in range(scale(12, 120)):
        spoiled = bytearray(data)
        for _ in range(rng.choice([1, 1, 4])):
            at = rng.randrange(100, len(data))
            if rng.random() < 0.5:
                spoiled[at] ^= 1 << rng.randrange(8)
            else:
                spoiled[at : at + 64] = rng.randbytes(len(spoiled[at : at + 64]))
        copy = tmp_path / f"{i}.db"
        copy.write_bytes(spoiled)
        try:
            cp = opened(f"sqlite:///{copy}")
        except safepoint.Damaged:
            continue
        with cp:
            looked += 1
            found = cp.verify()
            for task in want:
                with contextlib.suppress(NotFound, safepoint.Damaged):
                    cp.doctor(task)
            report = cp.repair()
        with opened(report.url) as mended:
            after = mended.verify()
            assert after.ok, (i, str(found), str(after))
            for info in mended.tasks():
                task = info.task_id
                if task not in want:
                    continue  # a bit of its name
                for seq, state in loads(mended, task).items():
                    if seq in want[task]:
                        assert state.messages == want[task][seq].messages, (i, task, seq)
                        kept += 1
    assert kept > looked * 10


@pytest.mark.parametrize("in_place", [False, True])
def test_a_store_that_is_older_than_it_was_is_said_to_be_and_goes_on_under_a_guard(tmp_path, in_place):
    url = f"sqlite:///{tmp_path}/agent.db"
    world = World()
    send = declare(world)
    with safepoint.open(url) as cp, cp.resume("t") as run:
        run.save()
    before = (tmp_path / "agent.db").read_bytes()
    with safepoint.open(url) as cp:
        stopped_after(cp, send, "once")
    (tmp_path / "agent.db").write_bytes(before)
    with safepoint.open(url) as cp:
        (damage,) = cp.verify().damages
        assert (damage.kind, damage.task_id) == ("older", "t")
        report = cp.repair(in_place=in_place)
    with safepoint.open(report.url) as mended:
        assert mended.verify().ok
        assert report.fell_back[0].guard > 0
        with pytest.raises(InDoubt), mended.resume("t") as run:
            run.call(send, "once")
    assert len(world.log) == 1

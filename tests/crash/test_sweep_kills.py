"""A clean-up killed at any point leaves whole checkpoints only, and the next one finishes the work. Field case 84c.

Also how long others wait for a large one: it takes many short transactions.
"""

import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import safepoint
from safepoint import Retention, State, keeping
from safepoint.stores.sqlite import SQLiteStore
from tests.support import raw, sweeping
from tests.support.children import Server
from tests.support.scale import SOAK, scale

SWEEP_POINTS = ("sweep.rows", "sweep.marked", "sweep.objects")
LENGTH, KEEP, MILESTONES = scale(3_000, 100_000), 100, 50
PINNED = (7, 8)


def stay(length: int) -> set[int]:
    return {*range(length - KEEP + 1, length + 1), *range(MILESTONES, length + 1, MILESTONES), *PINNED}


def made(path: Path, length: int) -> Path:
    store = SQLiteStore(path, durability="process")
    assert store.write_task(sweeping.long_task(length, milestones=MILESTONES, pinned=PINNED))
    store.close()
    return path


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("long") / "a.db", 3_000)


def check_whole(path: Path | str, length: int) -> set[int]:
    """All that is kept can be read, each checkpoint has the calls of its step and no other call is there; what is left."""
    store = SQLiteStore(path, durability="process")
    seqs = [row.seq for row in store.headers("long")]
    assert store.unreadable("long", seqs) == {}
    calls, objects = store.calls("long")
    assert [call.base_seq for call in calls] == sorted(seqs)
    for call in calls:
        call.check("long", "call")
        assert call.result_refs in objects
    row = store.task("long")
    assert row is not None
    assert row.checkpoints == len(seqs)
    newest = store.read("long")
    assert newest is not None
    assert newest[0].seq == length, "what recovery would pick is the newest"
    store.close()
    return set(seqs)


def check_done(path: Path | str, length: int) -> None:
    """Exactly what must stay is there, and not an object more."""
    kept = check_whole(path, length)
    assert kept == stay(length)
    image = sweeping.long_task(length, milestones=MILESTONES)
    refs = {row.seq: row.refs for row in image.checkpoints}
    results = {call.base_seq: call.result_refs for call in image.calls}
    inner = {obj.name: obj.refs for obj in image.objects}
    reached = set()
    for seq in kept:
        reached |= {refs[seq], results[seq], *(inner[refs[seq]][i : i + 16] for i in range(0, 48, 16))}
    assert {name for (name,) in raw.rows(path, "SELECT name FROM sp_objects")} == reached


@pytest.mark.scaled
@pytest.mark.parametrize("point", SWEEP_POINTS)
def test_field_case_84c_a_clean_up_killed_at_a_point(point: str, server: Server, long: Path, tmp_path: Path) -> None:
    db = shutil.copy(long, tmp_path / "count.db")
    *_, hits = server.run(sweeping.cleaner, str(db), "long", KEEP)
    check_done(db, 3_000)
    assert hits[point] > 0
    for nth in sorted({1, 1 + hits[point] // 2, hits[point]} if not SOAK else range(1, hits[point] + 1, 6)):
        db = shutil.copy(long, tmp_path / f"{nth}.db")
        child = server.start(sweeping.cleaner, str(db), "long", KEEP, point, nth)
        child.told()
        assert child.was_killed, f"{point} was not reached {nth} times"
        left = check_whole(db, 3_000)
        assert stay(3_000) <= left
        server.run(sweeping.cleaner, str(db), "long", KEEP)
        check_done(db, 3_000)
        # Nothing is left for one more.
        assert server.run(sweeping.cleaner, str(db), "long", KEEP)[:3] == (0, 0, 0)


@pytest.mark.scaled
def test_others_do_not_wait_for_a_large_clean_up(server: Server, tmp_path: Path) -> None:
    sweeping.assert_not_held_up(lambda nth: large_clean_up(server, tmp_path / f"{nth}.db"))


def large_clean_up(server: Server, path: Path) -> tuple[float, float]:
    """Make and clean up a large task; the longest save beside it, and how long it took."""
    db = made(path, LENGTH)
    other = server.start(sweeping.beside, str(db), "other", 1.5 if not SOAK else 20.0)
    other.until("ready")
    deleted, calls, objects, seconds, hits = server.run(sweeping.cleaner, str(db), "long", KEEP)
    assert (deleted, calls) == (LENGTH - len(stay(LENGTH)),) * 2
    assert objects > 2 * deleted
    assert hits["sweep.rows"] + hits["sweep.objects"] >= (deleted + objects) / 256
    _, longest, saves = other.until("waited")
    print(
        f"{LENGTH} checkpoints: cleaned up in {seconds:.1f} s; of {saves} saves beside it the longest took {longest * 1e3:.0f} ms"
    )
    check_done(db, LENGTH)
    return longest, seconds


@pytest.mark.scaled
@pytest.mark.parametrize("milestones", [0, 1], ids=["all may go", "all stay"])
def test_saves_of_a_long_task_read_little_of_it(milestones: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    length, saves = scale(3_000, 10_000), scale(800, 3_000)
    # How much is read follows the clock: the less a save gets done, the more of these short lives have to begin anew. So each save does
    # the least here, as on the slowest machine, and the number is the same each time: 7 and 33 headers a save where all may go, 16 and 11
    # where all stay. With the real slice the 33 were 22 to 27; a look in each of the lives at all there is would be 200.
    monkeypatch.setattr(keeping, "SLICE", 0.0)
    store = SQLiteStore(tmp_path / "a.db", durability="process")
    store.write_task(sweeping.long_task(length, milestones=milestones))
    cp = safepoint.Checkpointer(store, retention=Retention(keep_latest=20))
    read, headers = 0, store.headers

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal read
        rows = headers(*args, **kwargs)
        read += len(rows)
        return rows

    monkeypatch.setattr(store, "headers", counted)
    state = State("long", branch="b")
    longest = 0.0
    for i in range(saves):
        state.step = i
        began = time.monotonic()
        cp.save(state)
        longest = max(longest, time.monotonic() - began)
        if i % 50 == 0:  # as processes do that live for a few saves
            cp = safepoint.Checkpointer(store, retention=Retention(keep_latest=20))
            state = cp.load("long", branch="b")
    left = store.task("long")
    assert left is not None
    print(
        f"{length} checkpoints, {saves} saves: {read} headers read, the longest save {longest:.2f} s, {left.checkpoints} left"
    )
    assert read < (20 if milestones else scale(10, 40)) * saves
    # What stays is not read again and again; what may go does go, in parts that a save can bear.
    if milestones:  # no more wait to be deleted than make a sweep pay, and those of a few short lives
        assert left.checkpoints < length + 20 + store.live_objects("long") // 16 + 200
    else:
        assert left.checkpoints < length + saves - length / 4
    assert store.unreadable("long", [row.seq for row in headers("long")]) == {}
    store.close()


def test_a_dry_run_of_a_large_clean_up_tells_what_it_will_do(long: Path, tmp_path: Path) -> None:
    store = SQLiteStore(shutil.copy(long, tmp_path / "a.db"), durability="process")
    wanted = range(1, 2_000)
    told = store.prune("long", wanted, dry_run=True)
    assert len(store.headers("long")) == 3_000
    assert store.prune("long", wanted) == told
    assert len(told.seqs) == 1_999 - len(PINNED)
    store.close()


@pytest.mark.parametrize("what", ["pin", "fork", "call"])
def test_what_comes_to_be_needed_during_a_large_clean_up_stays(
    what: str, long: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process pins, forks from, or begins a call on a checkpoint that was to go."""
    from safepoint import _probe
    from safepoint.rows import Commit, Head
    from safepoint.testing.build import Writer, call_row, checkpoint_row

    store, other = (SQLiteStore(p, durability="process") for p in [shutil.copy(long, tmp_path / "a.db")] * 2)
    late, hits = 1_700, Counter[str]()

    def hook(name: str) -> None:
        hits[name] += 1
        if name == "between" and hits[name] == 2:
            if what == "pin":
                assert other.pin("long", late, True)
            elif what == "fork":
                row, _ = other.read("long", seq=late) or pytest.fail("it is gone already")
                fork = checkpoint_row(
                    "fork", branch="side", parent_seq=late, root=row.root, refs=row.refs, digest=row.digest, step=row.step
                )
                other.commit(Commit(task="long", id="fork", checkpoint=fork, stands_on=Head(late, f"c{late}")))
            else:
                Writer(other, "long").write(call_row(late, line=9))

    monkeypatch.setattr(_probe, "hook", hook)
    monkeypatch.setattr("safepoint.stores.sqlite_bigsweep.time.sleep", lambda _: hook("between"))
    pruned = store.prune("long", range(1, 2_500))
    monkeypatch.undo()
    assert late not in pruned.seqs
    assert len(pruned.seqs) == 2_499 - len(PINNED) - 1
    assert store.unreadable("long", [row.seq for row in store.headers("long")]) == {}
    (call,) = (c for c in store.calls("long")[0] if c.base_seq == late and c.line == 1)
    assert call.status == "succeeded"
    store.close()
    other.close()


def test_a_save_during_a_large_clean_up_keeps_what_it_sends_again(
    long: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between any two transactions of the sweep somebody saves content that the sweep has found to be garbage, and as a call's
    result too."""
    from safepoint.rows import replace
    from safepoint.testing.build import Writer, call_row

    store, other = (SQLiteStore(p, durability="process") for p in [shutil.copy(long, tmp_path / "a.db")] * 2)
    image = sweeping.long_task(3_000)
    inner = {obj.name: obj for obj in image.objects}
    writer = Writer(other, "long", head=image.branches[0].head)
    call = writer.write(call_row(3_000, step=2_999)).calls[0]
    sent, times = [], 0

    def save(_: float) -> None:
        nonlocal times, call
        times += 1
        old = image.checkpoints[(times * 37) % 2_000].refs
        page = inner[old]
        below = [inner[page.refs[i : i + 16]] for i in range(0, 48, 16)]
        if times % 2:
            writer.save(page, objects=[page, *below], row={"step": 2_999})
        else:
            row = replace(call, result=b"r", result_refs=page.name, status="succeeded")
            call = writer.write(row, stamp="ended", objects=[page, *below]).calls[0]
        sent.append(old)

    monkeypatch.setattr("safepoint.stores.sqlite_bigsweep.time.sleep", save)
    pruned = store.prune("long", range(1, 2_900))
    monkeypatch.undo()
    assert pruned.objects > 5_000
    assert times > 40
    for row in store.headers("long", limit=times // 2):
        _, objects = store.read("long", seq=row.seq) or pytest.fail("gone")
        assert len(objects) == 4
    last, objects = store.calls("long", nos=[call.no])
    assert last[0].result_refs in objects
    assert len(objects) == 4
    store.close()
    other.close()

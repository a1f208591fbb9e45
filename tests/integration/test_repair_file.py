"""repair of the file store: damaged documents and journals move to .quarantine, and what is whole goes on."""

import json
import threading
from typing import Any

import pytest

import safepoint
from safepoint import InDoubt, _probe
from tests.integration.test_repair import loads, stopped_after
from tests.integration.test_verify import big, made
from tests.support.runs import World, declare


@pytest.fixture
def place(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def cp(place):
    with safepoint.open(f"file:///{place}", durability="process") as opened:
        yield opened


def documents(place):
    return sorted(p for p in place.rglob("*.json") if not p.relative_to(place).parts[0].startswith("."))


def spoil(place, seq, how):
    (path,) = [p for p in documents(place) if p.stem.lstrip("0") == str(seq)]
    if how == "deleted":
        path.unlink()
    elif how == "cut":
        path.write_bytes(path.read_bytes()[:200])
    else:
        path.write_text(path.read_text().replace("message 1", "message !"))
    return path


@pytest.mark.parametrize("how", ["deleted", "cut", "edited"])
def test_a_document_is_found_by_verify_with_its_place(cp, place, how):
    made(cp)
    path = spoil(place, 3, how)
    found = cp.verify()
    (damage,) = found.damages
    assert damage.what == "checkpoint 3"
    assert damage.where == str(path.relative_to(place))
    assert damage.checkpoints == ((3, 3),)
    assert found.branches[0].loads == ((1, 2), (4, 6))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("how", ["deleted", "cut", "edited"])
def test_a_damaged_head_falls_back(cp, place, how, in_place):
    made(cp)
    spoil(place, 6, how)
    spoil(place, 2, how)
    report = cp.repair(in_place=in_place)
    assert [(f.new_branch, f.seq) for f in report.fell_back] == [("main~1", 5)]
    with safepoint.open(report.url) as mended:
        found = mended.verify()
        assert found.ok, str(found)
        assert mended.load_latest("t").messages == [big(i) for i in range(5)]
        assert set(loads(mended, "t")) == {1, 3, 4, 5, 7}
        state = mended.load_latest("t")
        assert state is not None
        assert mended.save(state).seq == 8
    if in_place:
        kept = list((place / ".quarantine").rglob("*.json"))
        assert len(kept) == (0 if how == "deleted" else 2)
        with safepoint.open(report.backup) as before:
            assert len(before.verify().damages) == 2
    else:
        assert not cp.verify().ok


@pytest.mark.parametrize("in_place", [False, True])
def test_a_line_of_the_journal_that_is_lost_leaves_a_guard(cp, place, in_place):
    world = World()
    send = declare(world)
    stopped_after(cp, send, "once")
    (journal,) = place.glob("*/journal*")
    lines = journal.read_bytes().split(b"\n")
    journal.write_bytes(b"\n".join(line[:50] if b'"tool"' in line else line for line in lines))
    assert not cp.verify("t").ok
    report = cp.repair(in_place=in_place)
    assert report.fell_back[0].guard > 0
    with safepoint.open(report.url) as mended:
        assert mended.verify().ok
        with pytest.raises(InDoubt), mended.resume("t") as run:
            run.call(send, "once")
    assert len(world.log) == 1


def test_a_repair_that_is_killed_leaves_the_old_or_the_new(cp, place):
    made(cp)
    spoil(place, 6, "cut")

    class Stop(Exception):
        pass

    def hook(name):
        if name == point:
            raise Stop

    for point in ("repair.before", "repair.after"):
        _probe.hook = hook
        try:
            with pytest.raises(Stop):
                cp.repair(in_place=True)
        finally:
            _probe.hook = None
        assert cp.load("t", seq=5).messages == [big(i) for i in range(5)]
        assert (point == "repair.after") == (cp.store.task("t").branch == "main~1")
    cp.repair(in_place=True)
    assert cp.verify().ok


def test_what_somebody_else_put_there_is_left_alone(cp, place):
    made(cp)
    (place / "README.md").write_text("mine")
    found = cp.verify()
    assert found.ok
    assert "README.md" in str(found.notes)
    cp.repair(in_place=True)
    assert (place / "README.md").read_text() == "mine"
    assert json.loads(documents(place)[0].read_text())


def test_what_becomes_a_checkpoint_meanwhile_is_no_stray(cp, place, monkeypatch):
    state = made(cp)
    (newest,) = [p for p in documents(place) if p.stem.lstrip("0") == "6"]
    # What a process has left that was killed before the line that tells of it.
    newest.with_name(newest.name.replace("6", "7")).write_bytes(newest.read_bytes())
    look = cp.store.strays

    def late():
        found = look()
        cp.save(state)
        return found

    monkeypatch.setattr(cp.store, "strays", late)
    cp.store.set_strays_aside()
    assert cp.load("t", seq=7).messages == state.messages
    assert cp.verify().ok


def test_a_document_whose_line_is_on_its_way_is_no_stray(cp, monkeypatch):
    state = made(cp)
    seen: list[Any] = []

    def look(point):
        if point == "commit.before" and not seen:  # its document has its name
            thread = threading.Thread(target=lambda: seen.append(cp.store.strays()))
            thread.start()
            thread.join(0.2)
            seen.append(thread)

    monkeypatch.setattr(_probe, "hook", look)
    cp.save(state)
    seen[0].join()
    assert seen[1] == []


def test_a_repair_that_ends_before_it_counts_adds_no_damage(cp, place, monkeypatch):
    made(cp)
    cp.fork("t", 6, name="side")
    state = cp.load("t", branch="side")
    state.messages.append(big(50))
    cp.save(state)
    state = cp.load_latest("t")
    state.messages.append(big(51))
    cp.save(state)
    for seq in {b.head.seq for b in cp.store.branches("t")}:
        spoil(place, seq, "cut")
    before = {d.what for d in cp.verify().damages}

    def end(point):
        if point == "repair.before":
            raise KeyboardInterrupt

    monkeypatch.setattr(_probe, "hook", end)
    with pytest.raises(KeyboardInterrupt):
        cp.repair(in_place=True)
    monkeypatch.undo()
    cp.close()
    with safepoint.open(f"file:///{place}", durability="process") as again:
        assert {d.what for d in again.verify().damages if d.kind != "stray"} == before
        again.repair(in_place=True)
        assert again.verify().ok
        assert {b.name for b in again.store.branches("t")} == {"main", "main~1", "side", "side~1"}

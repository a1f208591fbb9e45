"""Tasks between stores and through files: all of them arrives, once, or nothing does."""

import asyncio
import contextlib
import gzip
import io
import itertools
import json
import os
import stat
import threading
from typing import Any

import pytest

import safepoint
from safepoint import (
    Conflict,
    Damaged,
    LeaseHeld,
    NewerFormat,
    NotFound,
    Progress,
    SafepointError,
    State,
    UsageError,
    portable,
    run_agent,
)
from safepoint.cli import main
from safepoint.model import new_id
from safepoint.rows import BranchWrite, Commit, Head, TaskPatch, replace
from tests.integration.conftest import STORES, new_url
from tests.support import moved, spoil
from tests.support.moved import Flat, facts, fill, rich
from tests.support.runs import Death, died
from tests.support.scale import scale

SERVERS = [kind for kind in STORES if kind in {"postgres", "redis"}]
AMONG = [pair for pair in itertools.product(STORES, STORES) if not set(pair) & set(SERVERS)]
"""Copies between all that need no server; to and from each server in a ring, so that each is once on either side of something
else, and to itself."""
ACROSS = list(zip(["memory", *SERVERS], [*SERVERS, "file"], strict=True)) if SERVERS else []
RING = [*ACROSS, *zip(SERVERS, SERVERS, strict=True)]


class Places:
    def __init__(self, folder, stack):
        self.folder = folder
        self.stack = stack
        self.n = itertools.count()

    def __call__(self, kind):
        n = next(self.n)
        if kind == "flat":
            store = Flat()
            self.stack.callback(store.close)
            return self.stack.enter_context(safepoint.open(store))
        return self.stack.enter_context(safepoint.open(new_url(kind, self.folder, str(n))))


@pytest.fixture
def place(tmp_path):
    """Makes an empty store of a kind."""
    with contextlib.ExitStack() as stack:
        yield Places(tmp_path, stack)


def tasks(cp):
    return [t.task_id for t in cp.tasks()]


def everything(cp):
    return {t: facts(cp, t) for t in tasks(cp)}


# -- copying


@pytest.mark.parametrize(("a", "b"), [*AMONG, *ACROSS])
def test_a_store_is_copied_into_any_other(place, a, b):
    one, two = place(a), place(b)
    fill(one)
    before = everything(one)
    told: list[Progress] = []
    report = one.copy_to(two, progress=told.append)
    assert {t.result for t in report.tasks} == {"copied"}
    assert report.changed
    assert everything(two) == before
    assert everything(one) == before
    assert [p.done for p in told] == list(range(len(before) + 1))
    assert {p.total for p in told} == {len(before)}
    assert told[-1].bytes == sum(t.bytes for t in report.tasks)
    again = one.copy_to(two)
    assert {t.result for t in again.tasks} == {"unchanged"}
    assert not again.changed
    # And on from there to the first sort: nothing is lost on the way back.
    three = place(a)
    two.copy_to(three)
    assert everything(three) == before
    if one.store.chunked:
        digests = {row.seq: row.digest for row in one.list_checkpoints("rich")}
        assert {row.seq: row.digest for row in three.list_checkpoints("rich")} == digests


@pytest.mark.parametrize(("a", "b"), [("memory", "flat"), ("flat", "sqlite"), ("sqlite", "memory"), *RING])
def test_a_copy_goes_on_as_the_original_would(place, a, b):
    one, two = place(a), place(b)
    rich(one, "t")
    one.copy_to(two, "t")
    asked = []

    def step(run):
        asked.append(run.status)
        run.call(moved.lost, "carol")

    sent = []
    call = next(c for c in two.calls("t") if c.status == "in_doubt")
    two.resolve("t", call, safepoint.Done("it was sent"))

    def on(run):
        run.state.messages.append(run.call(moved.ask, run.state.messages))
        n = run.state.step
        sent.append(run.call(moved.send, f"ann{n}@example.com", big=2**70 + n))
        run.finish(run.call(moved.lost, "carol"))

    outcome = run_agent(on, task_id="t", store=two)
    assert outcome.result == "it was sent"
    assert outcome.recovery.reused == 3
    assert one.status("t").status == "waiting"


def threaded(cp, task):
    """A task as an adapter leaves it: one branch stands at another's checkpoint, one was dropped, and its checkpoints are there."""
    state = State(task)
    heads = []
    for i in range(4):
        state.step = i
        state.messages.append({"role": "user", "content": f"message {i} " * 40})
        heads.append(cp.save(state))
    row, _ = cp.store.read(task, seq=2)
    for name in ("back", "gone"):
        new = replace(row, id=new_id(), branch=name, parent_seq=2, kind="manual", seq=0, seal=b"", pinned=False)
        cp.store.commit(Commit(task=task, id=new.id, checkpoint=new, expect=None, stands_on=Head(2, row.id)))
    at = {b.name: b.head for b in cp.store.branches(task)}
    moves = (
        BranchWrite(name="back", expect=at["back"], to=Head(2, row.id)),
        BranchWrite(name="gone", expect=at["gone"], to=None),
    )
    cp.store.commit(Commit(task=task, id=new_id(), branches=moves))
    moved.written(cp, task, at["gone"].id, rows=2)
    return at


@pytest.mark.parametrize(("a", "b"), [("memory", "sqlite"), ("sqlite", "flat"), *RING])
def test_what_an_adapter_made_of_a_task_goes_along(place, tmp_path, a, b):
    one, two = place(a), place(b)
    at = threaded(one, "t")
    assert one.verify().ok
    assert [note.text for note in one.verify("t").notes] == ["there are checkpoints of branches that were dropped: 'gone'"]
    before = facts(one, "t")
    assert len(before["writes"]) == 2
    assert [(name, head.seq) for _, name, head, *_ in before["branches"]] == [("back", 2), ("main", 4)]
    assert one.copy_to(two).tasks[0].writes == 2
    assert facts(two, "t") == before
    assert two.verify().ok
    # It is set back further, and a write of its own goes with a checkpoint: the copy follows.
    main = next(head for _, name, head, *_ in before["branches"] if name == "main")
    to = one.store.headers("t")[-1]
    moves = (BranchWrite(name="main", expect=main, to=Head(to.seq, to.id)),)
    one.store.commit(Commit(task="t", id=new_id(), branches=moves))
    moved.written(one, "t", "later")
    assert one.store.prune("t", [at["back"].seq]).seqs == (at["back"].seq,)
    assert [t.result for t in one.copy_to(two).tasks] == ["updated"]
    assert facts(two, "t") == facts(one, "t")
    # What the copy has of its own is nobody else's to remove.
    moved.written(two, "t", "own")
    with pytest.raises(Conflict):
        one.copy_to(two)
    file = tmp_path / "t.safepoint"
    assert two.export("t", file).writes == 4
    assert json.loads(file.read_bytes().splitlines()[0])["safepoint"]["format"] == 2
    three = place(b)
    assert three.import_(file).writes == 4
    assert facts(three, "t") == facts(two, "t")
    assert three.import_(file).result == "unchanged"
    # One checkpoint of the branch that was dropped, alone and onto a task.
    alone = io.BytesIO()
    two.export("t", alone, seq=at["gone"].seq)
    for cp, found in ((place(a), "imported"), (one, "unchanged")):
        alone.seek(0)
        report = cp.import_(alone)
        assert (report.result, report.writes) == (found, 2)
        assert len(cp.store.writes("t", checkpoints=[at["gone"].id])[0]) == 2
    assert one.repair("t", into=place(b)).damages == []


@pytest.mark.parametrize(("a", "b"), [("memory", "sqlite"), ("memory", "flat"), ("sqlite", "memory"), *ACROSS])
def test_a_copy_follows_its_original(place, a, b):
    one, two = place(a), place(b)
    rich(one, "t")
    one.copy_to(two)
    state = one.load_latest("t")
    state.messages.append("more")
    one.save(state)
    one.pin("t", state.seq)
    report = one.copy_to(two)
    assert [t.result for t in report.tasks] == ["updated"]
    assert facts(two, "t") == facts(one, "t")
    one.unpin("t", state.seq)
    assert [t.result for t in one.copy_to(two).tasks] == ["updated"]
    one.finish("t") if hasattr(one, "finish") else None
    one.store.commit(Commit(task="t", id=new_id(), patch=TaskPatch(status="finished", reason="by hand")))
    assert [t.result for t in one.copy_to(two).tasks] == ["updated"]
    assert facts(two, "t") == facts(one, "t")
    one.cleanup("t", keep_latest=2, keep_milestones=False, keep_failures=0)
    one.copy_to(two)
    assert facts(two, "t") == facts(one, "t")


@pytest.mark.parametrize("b", STORES)
def test_a_save_onto_the_copy_while_it_is_renewed_is_not_lost(place, b, monkeypatch):
    one, two = place("memory"), place(b)
    rich(one, "t")
    one.copy_to(two)
    state = one.load_latest("t")
    state.messages.append("more")
    one.save(state)
    write = two.store.write_task

    def late(image, *, over=None):
        if over is not None:
            own = two.load_latest("t")
            own.messages.append("own")
            two.save(own)
        return write(image, over=over)

    monkeypatch.setattr(two.store, "write_task", late)
    with pytest.raises(safepoint.Conflict):
        one.copy_to(two)
    assert two.load_latest("t").messages[-1] == "own"


@pytest.mark.parametrize("b", ["memory", "sqlite", "flat", *SERVERS])
@pytest.mark.parametrize("own", ["checkpoint", "both", "other", "answer"])
def test_what_has_a_life_of_its_own_is_left_alone(place, b, own):
    one, two = place("memory"), place(b)
    run_agent(lambda run: run.pause("sure?", 1), task_id="t", store=one)
    if own == "other":
        two.save(State("t", messages=["another task of that name"]))
    else:
        one.copy_to(two)
        if own == "answer":
            two.answer("t", 1, "yes")
        else:
            for cp in (one, two) if own == "both" else (two,):
                state = cp.load_latest("t")
                state.messages.append("own")
                cp.save(state)
    before = facts(two, "t")
    with pytest.raises(Conflict) as refused:
        one.copy_to(two, "t")
    assert refused.value.details["task"] == "t"
    assert facts(two, "t") == before
    # Of a whole store, all others are copied before this is said.
    one.save(State("u"))
    with pytest.raises(Conflict) as refused:
        one.copy_to(two)
    assert [t.task_id for t in refused.value.details["report"].tasks] == ["u"]
    assert refused.value.details["not_copied"] == ["t"]
    assert facts(two, "t") == before
    assert tasks(two) == ["t", "u"]


@pytest.mark.parametrize("a", ["sqlite", *SERVERS])
def test_a_task_that_is_held_is_copied_as_it_stands_or_refused(place, a):
    one, two = place(a), place("memory")
    with one.resume("t") as run:
        run.state.messages.append("said")
        run.save()
        run.call(moved.send, "ann", big=1)
        with pytest.raises(LeaseHeld):
            one.copy_to(two, "t", held="refuse")
        assert tasks(two) == []
        one.copy_to(two, "t")
    info = two.status("t")
    assert (info.status, info.holder) == ("interrupted", None)
    assert two.load_latest("t").messages == ["said"]
    assert [c.status for c in two.calls("t")] == ["succeeded"]
    with pytest.raises(UsageError):
        one.copy_to(two, "t", held="perhaps")
    with pytest.raises(NotFound):
        one.copy_to(two, "nothing")
    with pytest.raises(UsageError):
        one.copy_to(5)


@pytest.mark.parametrize(("a", "b"), [("memory", "flat"), ("sqlite", "memory"), *((a, "memory") for a in SERVERS)])
def test_each_copy_of_a_busy_task_is_one_moment(place, a, b):
    one = place(a)
    stop = threading.Event()
    errors = []

    def busy():
        try:
            with one.resume("t") as run:
                n = 0
                while not stop.is_set():
                    n += 1
                    reply = run.call(moved.ask, run.state.messages)
                    run.state.messages.append(reply)
                    run.state.agent_state["n"] = n
                    run.save()
                    if n % 7 == 0:
                        one.cleanup("t", keep_latest=5)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        for _ in range(3):
            two = place(b)
            while one.store.task("t") is None or not one.list_checkpoints("t"):
                pass
            one.copy_to(two, "t")
            for row in two.list_checkpoints("t"):
                state = two.load("t", seq=row.seq)
                assert len(state.messages) == state.agent_state.get("n", 0) == state.step
            info = two.status("t")
            # The calls of whole steps, and none that is later than the step after the head.
            assert max([c.step for c in two.calls("t")], default=0) <= info.step
    finally:
        stop.set()
        thread.join()
    assert not errors


@pytest.mark.parametrize("kind", [kind for kind in STORES if kind != "file"])  # whose rows are whole documents
def test_what_is_deleted_while_a_task_is_copied_is_no_damage(place, kind, monkeypatch):
    """Between the walk that found the task standing still and the reading of the objects that came since the first walk."""
    one, two = place(kind), place("memory")
    state = State("t")
    walks, walk = 0, one.store.walk

    def save():
        state.messages = [{"role": "user", "content": os.urandom(200).hex()} for _ in range(3)]
        one.save(state)

    def walked(task):
        nonlocal walks
        walks += 1
        if walks == 2:
            save()
        try:
            yield from walk(task)
        finally:
            if walks == 3:
                save()
                assert one.cleanup("t", keep_latest=1).deleted == (1, 2)

    save()
    monkeypatch.setattr(one.store, "walk", walked)
    one.copy_to(two, "t")
    assert walks > 3
    assert [c.seq for c in two.list_checkpoints("t")] == [3]
    assert two.load_latest("t").messages == state.messages


@pytest.mark.parametrize(("a", "b"), [("memory", "sqlite"), ("sqlite", "flat"), ("flat", "memory"), *RING])
def test_other_spaces_of_a_task_go_along(place, a, b):
    one, two = place(a), place(b)
    rich(one, "t")
    row, objects = one.store.read("t")
    new = safepoint.rows.replace(row, id="same-id", space="ns", branch="main", parent_seq=None, seq=0, seal=b"")
    one.store.commit(Commit(task="t", id=new.id, checkpoint=new, objects=tuple(objects.values())))
    one.copy_to(two)
    assert facts(two, "t") == facts(one, "t")
    ours, theirs = one.store.read("t", space="ns"), two.store.read("t", space="ns")
    assert (theirs[0].seq, theirs[0].id) == (ours[0].seq, "same-id")
    assert two.store.branches("t", "ns") == one.store.branches("t", "ns")
    file = io.BytesIO()
    two.export("t", file)
    file.seek(0)
    assert one.import_(file).result == "unchanged"


def break_object(cp, task, seq):
    """One object that only this checkpoint and later ones reach."""
    row, objects = cp.store.read(task, seq=seq)
    earlier = cp.store.read(task, seq=seq - 1)[1]
    name = next(n for n in objects if n not in earlier)
    kept = cp.store._data.tasks[task].objects
    kept[name] = kept[name]._replace(data=kept[name].data[:-1] + b"!")
    return row


@pytest.mark.parametrize("b", ["memory", "sqlite", "flat", *SERVERS])
def test_what_is_damaged_is_not_handed_on(place, b):
    one, two = place("memory"), place(b)
    state = State("t")
    for i in range(6):
        state.step = i
        state.messages.append({"role": "user", "content": f"{i}" * 100})
        state.agent_state["text"] = f"{i}" * 1000
        one.save(state)
    break_object(one, "t", 6)
    with pytest.raises(Damaged, match="checkpoint 6"):
        one.copy_to(two)
    assert tasks(two) == []
    report = one.copy_to(two, skip_damaged=True)
    assert any(w.startswith("t: checkpoint 6") for w in report.skipped)
    assert any("ends at 5" in w for w in report.skipped)
    assert two.load_latest("t").messages == one.load("t", seq=5).messages
    assert [r.seq for r in two.list_checkpoints("t")] == [5, 4, 3, 2, 1]
    # One checkpoint that is sound can be exported from a damaged task, and the damaged one cannot.
    one.export("t", io.BytesIO(), seq=5)
    with pytest.raises(Damaged):
        one.export("t", io.BytesIO(), seq=6)
    with pytest.raises(Damaged):
        one.export("t", io.BytesIO())


@pytest.mark.parametrize("kind", [kind for kind in STORES if kind != "memory"])
def test_damage_on_a_disk_is_not_handed_on(place, tmp_path, kind):
    url = new_url(kind, tmp_path, "hurt")
    with safepoint.open(url) as one:
        state = State("t")
        for i in range(6):
            state.step = i
            state.messages.append({"content": f"{i}" * 300})
            one.save(state)
        want = one.load("t", seq=5).messages
        if one.store.chunked:
            assert spoil.spoil(one, "t", b"555", "corrupt") == 1
    if kind == "file":
        (document,) = (tmp_path / "hurt").rglob("6.json")
        document.write_text(document.read_text().replace("555", "565", 1))
    with safepoint.open(url) as one:
        two = place("memory")
        with pytest.raises(Damaged, match="checkpoint 6"):
            one.copy_to(two)
        with pytest.raises(Damaged, match="checkpoint 6"):
            one.export("t", tmp_path / "t")
        assert tasks(two) == []
        assert not (tmp_path / "t").exists()
        assert any("checkpoint 6" in what for what in one.copy_to(two, skip_damaged=True).skipped)
        assert two.load_latest("t").messages == want


def test_a_call_that_is_damaged_is_never_left_out(place):
    one, two = place("memory"), place("memory")
    rich(one, "t")
    kept = one.store._data.tasks["t"].calls
    first = min(kept)
    kept[first] = safepoint.rows.replace(kept[first], status="failed")
    for skip in (False, True):
        with pytest.raises(Damaged, match=f"call {first}"):
            one.copy_to(two, skip_damaged=skip)
    assert tasks(two) == []


# -- files


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("name", ["t.safepoint", "t.safepoint.gz"])
def test_through_a_file_and_back(place, tmp_path, kind, name):
    one = place(kind)
    rich(one, "t")
    file = tmp_path / name
    told: list[Progress] = []
    report = one.export("t", file, progress=told.append)
    assert report.bytes == file.stat().st_size
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [p.done for p in told] == list(range(1, report.checkpoints + 1))
    data = file.read_bytes()
    one.export("t", file)
    assert file.read_bytes() == data, "equal exports are equal files"
    assert sorted(os.listdir(tmp_path))[0:1] != [".t"], "no temporary file is left"
    # Which store reads it has nothing to do with which one wrote it, nor with whether it is packed.
    for other in STORES if kind not in SERVERS and name.endswith("safepoint") else (kind, "memory"):
        two = place(other)
        told.clear()
        done = two.import_(file, progress=told.append)
        assert (done.result, done.task_id, done.checkpoints) == ("imported", "t", report.checkpoints)
        assert facts(two, "t") == facts(one, "t")
        assert [p.done for p in told] == list(range(1, report.checkpoints + 1))
        assert {(p.total, p.task_id) for p in told} == {(report.checkpoints, "t")}
        assert two.import_(file).result == "unchanged"
        two.import_(file, task_id="u")
        assert facts(two, "u")["states"] == facts(one, "t")["states"]
        again = io.BytesIO()
        two.export("t", again)
        assert again.getvalue() == (gzip.decompress(data) if name.endswith("gz") else data)
    state = one.load_latest("t")
    state.messages.append("more")
    one.save(state)
    with pytest.raises(Conflict, match="task_id"):
        one.import_(file)


def test_a_file_is_strict_json_for_people(place, tmp_path):
    one = place("sqlite")
    rich(one, "t", steps=12)
    file = tmp_path / "t.safepoint"
    one.export("t", file)

    def refuse(constant):
        raise AssertionError(constant)

    lines = [json.loads(line, parse_constant=refuse) for line in file.read_text(encoding="utf-8").splitlines()]
    assert [next(iter(line)) for line in lines][:2] == ["safepoint", "task"]
    assert list(lines[-1]) == ["end"]
    assert lines[-1]["end"]["lines"] == len(lines) - 1
    calls = [line["call"] for line in lines if "call" in line]
    assert calls[1]["arguments"] == {"to": "ann0@example.com", "big": 2**70}
    assert calls[1]["result"]["result"]["at"]["$type"] == "datetime"
    assert any("patch" in line.get("checkpoint", {}) for line in lines)


@pytest.mark.parametrize(("a", "b"), [*((a, b) for a in ("sqlite", "flat") for b in STORES), *((a, a) for a in SERVERS)])
def test_one_checkpoint_with_its_journal(place, tmp_path, a, b):
    one, two = place(a), place(b)
    done = []

    def step(run):
        done.append(run.state.step)
        run.state.messages.append(run.call(moved.ask, run.state.messages))
        run.call(moved.send, "ann", big=run.state.step)
        if run.state.step == 2:
            raise Death

    with died(one, "t") as run:
        for _ in range(2):
            run.state.messages.append(run.call(moved.ask, run.state.messages))
            run.call(moved.send, "ann", big=run.state.step)
            run.save()
        run.call(moved.ask, run.state.messages)
        run.call(moved.send, "ann", big=run.state.step)
        raise Death
    file = tmp_path / "c.safepoint"
    head = one.status("t").seq
    report = one.export("t", file, seq=head)
    assert (report.checkpoints, report.calls, report.seq) == (1, 2, head)

    def finish(run):
        run.state.messages.append(run.call(moved.ask, run.state.messages))
        run.finish(run.call(moved.send, "ann", big=run.state.step))

    two.import_(file)
    assert two.import_(file).result == "unchanged"
    assert two.plan("t").calls
    outcome = run_agent(finish, task_id="t", store=two)
    assert outcome.recovery.reused == 2
    assert two.import_(file).result == "unchanged"

    # Onto a task that is there: a branch of its own, with a journal of its own.
    two.save(State("u", messages=["own"]))
    before = facts(two, "u")
    with two.resume("u"), pytest.raises(LeaseHeld):
        two.import_(file, task_id="u")
    placed = two.import_(file, task_id="u")
    assert (placed.result, placed.branch) == ("imported", f"import-{head}")
    after = facts(two, "u")
    assert after["states"].items() >= before["states"].items()
    assert two.load_latest("u").messages == ["own"]
    assert two.load("u", seq=placed.seq).messages == one.load("t", seq=head).messages
    assert two.list_checkpoints("u")[0].kind == "import"
    again = two.import_(file, task_id="u")
    assert (again.result, again.seq) == ("unchanged", placed.seq)
    two.rewind("u", branch=placed.branch)
    assert len(two.plan("u").calls) == 2
    outcome = run_agent(finish, task_id="u", store=two)
    assert outcome.recovery.reused == 2
    assert outcome.result["big"] == 2


def test_an_older_checkpoint_is_one_to_go_on_from(place):
    one, two = place("memory"), place("memory")
    run_agent(lambda run: run.finish() if run.state.step == 2 else None, task_id="t", store=one)
    file = io.BytesIO()
    one.export("t", file, seq=2)
    file.seek(0)
    two.import_(file)
    assert two.status("t").status == "interrupted"
    assert [t.task_id for t in two.tasks(status="unfinished")] == ["t"]
    with pytest.raises(NotFound):
        one.export("t", io.BytesIO(), seq=99)
    with pytest.raises(NotFound):
        one.export("nothing", io.BytesIO())


@pytest.mark.parametrize("kind", STORES)
def test_a_checkpoint_whose_later_calls_are_gone_repeats_no_write(place, kind):
    one, two = place(kind), place("memory")
    sent = []

    @safepoint.tool(effect="write", name="moved.once")
    def once(n: int) -> int:
        sent.append(n)
        return n

    def step(run):
        run.call(once, run.state.step)
        if run.state.step == 5:
            run.finish()

    run_agent(step, task_id="t", store=one)
    first = one.list_checkpoints("t")[-1].seq
    whole = io.BytesIO()
    one.export("t", whole, seq=first)
    one.pin("t", first)
    one.cleanup("t", keep_latest=2)
    gap = io.BytesIO()
    one.export("t", gap, seq=first)
    for file, name in ((whole, "whole"), (gap, "gap")):
        file.seek(0)
        two.import_(file, task_id=name)
    assert run_agent(step, task_id="whole", store=two).status == "finished"
    assert sent == [0, 1, 2, 3, 4, 5], "all are on record"
    assert run_agent(step, task_id="gap", store=two).status == "waiting"
    assert sent == [0, 1, 2, 3, 4, 5], "what may have been made is shown to a person"


def test_a_file_is_there_whole_or_not_at_all(place, tmp_path, monkeypatch):
    one = place("memory")
    rich(one, "t")
    file = tmp_path / "t.safepoint"
    file.write_text("precious")

    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(safepoint.StoreFull):
        one.export("t", file)
    monkeypatch.undo()
    assert file.read_text() == "precious"
    assert os.listdir(tmp_path) == ["t.safepoint"]
    with pytest.raises(UsageError):
        one.export("t", tmp_path)
    with pytest.raises(NotFound):
        one.export("t", tmp_path / "no" / "t")
    with pytest.raises(NotFound):
        one.import_(tmp_path / "absent")
    with pytest.raises(UsageError):
        one.import_(tmp_path)
    for bad in (io.StringIO(), 5, "", "a\0b"):
        with pytest.raises(UsageError):
            one.export("t", bad)
        with pytest.raises(UsageError):
            one.import_(bad)
    link = tmp_path / "link"
    link.symlink_to(file)
    one.export("t", link)
    assert link.is_symlink()
    assert place("memory").import_(file).result == "imported"


def test_a_pipe_is_written_to_as_it_is(place):
    one = place("memory")
    one.save(State("t"))
    r, w = os.pipe()
    one.export("t", f"/dev/fd/{w}")
    os.close(w)
    with open(r, "rb") as f:
        assert place("memory").import_(f).result == "imported"


# -- field cases


@pytest.mark.parametrize("kind", STORES)
def test_field_case_18_big_integers_through_an_export(place, tmp_path, kind):
    numbers = [2**63 - 1, 2**63, 2**64, -(2**63) - 1, int.from_bytes(bytes(range(1, 33)), "big"), 10**2000, -(2**5000)]
    value = {"n": numbers, "keys": {n: str(i) for i, n in enumerate(numbers)}, "deep": [{"x": (n,)} for n in numbers]}
    one, two = place("memory"), place(kind)
    one.save(State("t", agent_state=value, messages=list(numbers), metadata={"n": 2**64}))
    file = tmp_path / "t.safepoint"
    one.export("t", file)
    assert str(2**64).encode() in file.read_bytes()
    two.import_(file)
    state = two.load_latest("t")
    assert state.agent_state == value
    assert state.messages == numbers
    assert {type(n) for n in [*state.messages, *state.agent_state["keys"]]} == {int}
    assert two.list_checkpoints("t", filter={"n": 2**64})
    assert not two.list_checkpoints("t", filter={"n": float(2**64)})
    two.copy_to(again := place("flat"))
    assert again.load_latest("t").agent_state == value


@pytest.mark.parametrize("kind", STORES)
def test_field_case_70_names_in_an_import_are_never_paths(place, tmp_path, kind):
    inside = tmp_path / "inside"
    inside.mkdir()
    canary = tmp_path / "x"
    canary.write_text("canary")
    one = place("memory")
    for name in ("../../x", "../x", str(canary), "C:x", "..", "x/../../../x"):
        one.save(
            State(name, messages=[name], branch="../../x", metadata={"path": "../../x", "safepoint": str(canary)}), label="../x"
        )
    made = Places(inside, place.stack)(kind)
    for i, name in enumerate(tasks(one)):
        file = tmp_path / f"{i}.safepoint"
        one.export(name, file)
        made.import_(file)
        made.import_(file, task_id=f"../{i}")
        assert made.load_latest(name).messages == [name]
        assert made.load_latest(f"../{i}").metadata["path"] == "../../x"
    assert canary.read_text() == "canary"
    assert sorted(os.listdir(tmp_path)) == sorted([*(f"{i}.safepoint" for i in range(6)), "inside", "x"])
    assert os.listdir(tmp_path.parent).count("x") == 0


# -- hostile files


@pytest.fixture(scope="module")
def whole():
    with safepoint.open("memory://") as cp:
        rich(cp, "t", steps=6)
        file = io.BytesIO()
        cp.export("t", file)
    return file.getvalue()


def sealed(lines):
    """A file of these records, with the last line that belongs to them."""
    import hashlib

    body = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    return body + json.dumps({"end": {"lines": len(lines), "sha256": hashlib.sha256(body).hexdigest()}}).encode() + b"\n"


def refused(data, *errors):
    with safepoint.open("memory://") as cp:
        with pytest.raises(errors or Damaged) as error:
            cp.import_(io.BytesIO(data))
        assert "reply" not in str(error.value), "no content is shown"
        assert tasks(cp) == []


@pytest.mark.parametrize("b", STORES)
def test_an_import_that_somebody_came_before_and_that_was_killed_is_set_right(place, tmp_path, monkeypatch, b):
    one, two = place("memory"), place(b)
    rich(one, "t")
    one.export("t", tmp_path / "one", seq=one.list_checkpoints("t")[3].seq)
    state = State("t")
    two.save(state)
    commit = two.store.commit

    def raced(given):
        if given.id.endswith("+"):
            raise KeyboardInterrupt
        if given.id.startswith("import-"):
            monkeypatch.setattr(two.store, "commit", commit)
            two.save(state)  # takes the number that was foreseen
            monkeypatch.setattr(two.store, "commit", raced)
        return commit(given)

    monkeypatch.setattr(two.store, "commit", raced)
    with pytest.raises(KeyboardInterrupt):
        two.import_(tmp_path / "one")
    monkeypatch.undo()
    report = two.import_(tmp_path / "one")
    assert report.result == "unchanged"
    line = next(x.line for x in two.store.branches("t") if x.name == report.branch)
    rows, _ = two.store.calls("t", line=line)
    assert rows
    assert {row.base_seq for row in rows} == {report.seq}


@pytest.mark.parametrize("b", STORES)
def test_the_same_import_at_the_same_time_is_one_import(place, tmp_path, monkeypatch, b):
    one, two = place("memory"), place(b)
    rich(one, "t")
    one.export("t", tmp_path / "one", seq=one.list_checkpoints("t")[3].seq)
    two.save(State("t"))
    commit, done = two.store.commit, []

    def first(given):
        monkeypatch.setattr(two.store, "commit", commit)
        done.append(two.import_(tmp_path / "one"))
        return commit(given)

    monkeypatch.setattr(two.store, "commit", first)
    second = two.import_(tmp_path / "one")
    assert (second.result, second.branch, second.seq) == ("unchanged", done[0].branch, done[0].seq)
    assert two.import_(tmp_path / "one").result == "unchanged"


@pytest.mark.parametrize("b", STORES)
def test_fences_of_a_task_that_was_moved_go_on(place, tmp_path, b):
    one, copied, imported, onto = place(b if b in SERVERS else "sqlite"), place(b), place(b), place(b)
    for _ in range(4):
        with one.resume("t") as run:
            run.save()
    one.copy_to(copied)
    one.export("t", tmp_path / "t")
    imported.import_(tmp_path / "t")
    one.export("t", tmp_path / "c", seq=2)
    onto.import_(tmp_path / "c")
    for two in (copied, imported, onto):
        assert two.store.acquire("t", b"me").guard.fence > one.store.lease("t").fence


def test_a_small_file_does_not_become_any_number_of_large_states(place, tmp_path, monkeypatch):
    one, chunked, file, flat = place("memory"), place("sqlite"), place("file"), place("flat")
    state = State("t", agent_state={"big": "x" * 100_000})
    for _ in range(40):
        state.step += 1
        one.save(state)
    one.save(State("u"))
    assert one.export("t", tmp_path / "t").bytes < 200_000
    monkeypatch.setattr("safepoint.portable.WHOLE_MAX", 1_000_000)
    for two in (file, flat):
        with pytest.raises(safepoint.StoreFull, match="keeps each of them whole"):
            two.import_(tmp_path / "t")
        with pytest.raises(safepoint.StoreFull) as caught:
            one.copy_to(two)
        assert caught.value.details["copied"] == ["u"]
        assert tasks(two) == ["u"]
    assert chunked.import_(tmp_path / "t").result == "imported"


def test_a_status_that_is_none_is_refused(whole):
    lines = [json.loads(line) for line in whole.splitlines()][:-1]
    lines[1]["task"]["status"] = "asleep"
    refused(sealed(lines))


def test_the_file_may_have_as_long_a_name_as_there_is(tmp_path):
    with safepoint.open("memory://") as cp:
        cp.save(State("t"))
        file = tmp_path / ("日" * 85)
        cp.export("t", file)
        assert cp.import_(file).result == "unchanged"


def test_what_progress_raises_is_not_the_fault_of_the_file(tmp_path):
    def gone(_):
        raise BrokenPipeError(32, "nobody listens")

    with safepoint.open("memory://") as cp:
        cp.save(State("t"))
        with pytest.raises(BrokenPipeError):
            cp.export("t", tmp_path / "t.safepoint", progress=gone)
        assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_cut_or_changed_is_refused(whole):
    import random

    rng = random.Random(1)
    for at in [0, 1, *(rng.randrange(len(whole)) for _ in range(60)), len(whole) - 1]:
        refused(whole[:at])
        data = bytearray(whole)
        data[at] ^= 1 << rng.randrange(8)
        refused(bytes(data), Damaged, NewerFormat)
    lines = whole.splitlines(keepends=True)
    for i in range(len(lines)):
        refused(b"".join(lines[:i] + lines[i + 1 :]))
    refused(whole + b"{}\n")
    refused(whole + whole)
    packed = gzip.compress(whole)
    for at in [10, len(packed) // 2, len(packed) - 9, len(packed) - 1]:
        refused(packed[:at])
        refused(packed[:at] + bytes([packed[at] ^ 1]) + packed[at + 1 :])
    refused(packed + b"x")


ODD: list[Any] = [
    None,
    True,
    -1,
    2**63,
    2**64,
    1.5,
    1e400,
    "",
    "x",
    "\0",
    "../../x",
    [],
    {},
    [[]],
    {"a": 1},
    {"$type": "set"},
    {"$x": 1},
    "9" * 5000,
]


@pytest.mark.scaled
def test_a_file_with_any_field_changed_is_refused_or_whole(whole):
    """Digest and all put right: whoever made it knew how. Typed errors only, and what is taken can be looked at."""
    lines = [json.loads(line) for line in whole.splitlines()][:-1]
    seen = set()
    taken = 0
    for i, line in enumerate(lines):
        ((kind, record),) = line.items()
        for key in record:
            if (kind, key) in seen:
                continue
            seen.add((kind, key))
            for odd in [*ODD[len(seen) % scale(8, 1) :: scale(8, 1)], "absent"]:
                changed = {k: v for k, v in record.items() if k != key} if odd == "absent" else {**record, key: odd}
                data = sealed([*lines[:i], {kind: changed}, *lines[i + 1 :]]).replace(b"Infinity", b"1e400")
                with safepoint.open("memory://") as cp:
                    try:
                        report = cp.import_(io.BytesIO(data))
                    except SafepointError:
                        assert tasks(cp) == []
                        continue
                    taken += 1
                    with contextlib.suppress(SafepointError):
                        facts(cp, report.task_id)
    assert len(seen) > 50
    assert taken < 0.3 * len(seen) * len(ODD) / scale(8, 1)


@pytest.mark.scaled
@pytest.mark.parametrize("store", [kind for kind in STORES if kind != "memory"])
def test_numbers_at_their_limits_fit_every_store_or_are_refused(whole, tmp_path, store):
    lines = [json.loads(line) for line in whole.splitlines()][:-1]
    of_each = {next(iter(line)): i for i, line in enumerate(lines)}
    with safepoint.open(new_url(store, tmp_path, "store")) as cp:
        cp.save(State("other", messages=["own"]))
        before = facts(cp, "other")
        tried = 0
        for kind, i in of_each.items():
            record = lines[i][kind]
            nested = {"head", "numbers"} & record.keys()
            for path in [(k,) for k, v in record.items() if type(v) is int] + [(n, k) for n in nested for k in record[n]]:
                tried += 1
                for odd in (2**31 - 1, 2**31, 2**53 - 1, 2**63 - 1, -(2**62))[tried % scale(5, 2) :: scale(5, 2)]:
                    changed = json.loads(json.dumps(record))
                    at = changed
                    for key in path[:-1]:
                        at = at[key]
                    if type(at[path[-1]]) is not int:
                        continue
                    at[path[-1]] = odd
                    data = sealed([*lines[:i], {kind: changed}, *lines[i + 1 :]])
                    try:
                        report = cp.import_(io.BytesIO(data))
                    except SafepointError:
                        assert tasks(cp) == ["other"], (kind, path, odd)
                        continue
                    try:
                        state = cp.load_latest("t")
                        assert state is not None
                        cp.save(state)
                        facts(cp, report.task_id)
                    except SafepointError:
                        pass
                    cp.delete_task("t")
        assert facts(cp, "other") == before


def test_a_newer_file_is_left_alone(whole):
    lines = [json.loads(line) for line in whole.splitlines()][:-1]
    lines[0]["safepoint"]["format"] = portable.FORMAT + 1
    refused(sealed(lines), NewerFormat)
    lines[0]["safepoint"]["format"] = portable.FORMAT
    next(line for line in lines if "checkpoint" in line)["checkpoint"]["format"] = 99
    refused(sealed(lines), NewerFormat)


def test_a_file_that_would_take_all_memory_is_refused(whole, monkeypatch):
    from safepoint import portable_io

    refused(b'{"safepoint": ' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}\n")
    refused(b'{"safepoint": {"format": 1' + b"0" * 100_000 + b"}}\n", Damaged, NewerFormat)
    # 64 MB that take 64 kB.
    refused(gzip.compress(b'{"safepoint": "' + b" " * (64 << 20) + b'"}\n', mtime=0))
    refused(gzip.compress(gzip.compress(b" " * (64 << 20))))
    monkeypatch.setattr(portable_io, "LINE_MAX", 1000)
    refused(whole)


def test_not_an_export_at_all():
    for data in (
        b"",
        b"\n",
        b"hello\n",
        b"[]\n",
        b"{}\n",
        b'{"a": 1, "b": 2}\n',
        b"\x1f\x8b",
        b"\x1f",
        os.urandom(1000),
        b"null\n",
    ):
        refused(data)


# -- async, and the shell


def test_async_twins(tmp_path):
    async def main():
        one, two = safepoint.open_async("memory://"), safepoint.open_async("memory://")
        await one.save(State("t", messages=["a"]))
        state = await one.load_latest("t")
        assert state is not None
        state.messages.append("b")
        await one.save(state)
        assert str(await one.diff("t", 1)) == "+1 message"
        assert (await one.copy_to(two, "t")).changed
        await one.export("t", tmp_path / "t")
        assert (await two.import_(tmp_path / "t")).result == "unchanged"
        assert (await two.load_latest("t")).messages == ["a", "b"]
        await one.close()
        await two.close()

    asyncio.run(main())


@pytest.fixture
def shell(tmp_path, capsysbinary, monkeypatch):
    url = f"sqlite:///{tmp_path}/a.db"
    with safepoint.open(url) as cp:
        fill(cp)
    monkeypatch.setenv("SAFEPOINT_URL", url)

    def run(*args):
        code = main([str(a) for a in args])
        out, err = capsysbinary.readouterr()
        return code, out.decode(), err.decode()

    return run


def test_copy_export_import_and_diff_in_a_shell(shell, tmp_path):
    other = f"sqlite:///{tmp_path}/b.db"
    code, out, err = shell("copy", "--to", other, "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert report["changed"]
    assert {t["result"] for t in report["tasks"]} == {"copied"}
    code, out, _ = shell("copy", "--to", other)
    assert code == 0
    assert "rich: unchanged" in out
    assert shell("copy", "--to", "memory://x")[0] == 2
    assert shell("copy", "rich", "--to", f"sqlite:///{tmp_path}/x.txt")[0] == 0
    (tmp_path / "not.db").write_text("somebody's notes")
    assert shell("copy", "--to", f"sqlite:///{tmp_path}/not.db")[0] != 0
    assert (tmp_path / "not.db").read_text() == "somebody's notes"

    with safepoint.open(other) as cp:
        cp.delete_task("rich")
        cp.save(State("rich", messages=["another"]))
        cp.delete_task("kept")
    code, out, err = shell("copy", "--to", other)
    assert code == 2
    assert "kept: copied" in out
    assert "'rich' is there already" in err
    assert json.loads(shell("copy", "--to", other, "--json")[1])["error"]["details"]["not_copied"] == ["rich"]

    (tmp_path / "rich").write_bytes(shell("export", "rich")[1].encode())
    code, _, err = shell("--store", other, "import", tmp_path / "rich")
    assert code == 2
    assert "--as NAME" in err

    code, out, _ = shell("export", "rich")
    assert code == 0
    assert place_of(out, tmp_path).load_latest("rich").step
    code, out, _ = shell("export", "rich@3", tmp_path / "c.gz", "--json")
    assert json.loads(out)["checkpoints"] == 1
    assert shell("export", "rich", "--json")[0] == 2
    third = f"sqlite:///{tmp_path}/c.db"
    code, out, _ = shell("--store", third, "import", tmp_path / "c.gz", "--json")
    assert json.loads(out) | {"calls": 0, "pauses": 0, "writes": 0} == {
        "task_id": "rich", "what": "checkpoint", "result": "imported", "branch": "main", "seq": 3, "checkpoints": 1, "calls": 0, "pauses": 0, "writes": 0,
    }  # fmt: skip
    code, out, _ = shell("--store", third, "import", tmp_path / "c.gz", "--as", "../x")
    assert out.startswith("../x@3 is imported on branch main")
    code, out, _ = shell("--store", third, "import", tmp_path / "c.gz")
    assert out == "rich@3 is there already, and the same\n"
    assert shell("--store", f"sqlite:///{tmp_path}/d.db", "import", tmp_path / "absent")[0] == 3
    assert not (tmp_path / "d.db").exists()
    (tmp_path / "bad").write_bytes(b"x")
    assert shell("--store", third, "import", tmp_path / "bad")[0] == 6

    code, out, _ = shell("diff", "kept@3", "4")
    assert out.splitlines()[0] == "kept@3 -> kept@4: +1 message, step: 2 -> 3"
    assert out.splitlines()[1].startswith("  +messages[3]: user: ")
    for args in (["kept@9"], ["kept@9", "kept"], ["kept@9", "10"], ["kept@9", "main"], ["kept@9", "kept@main"]):
        code, out, _ = shell("diff", *args, "--json")
        assert (code, json.loads(out)["b"]) == (0, "kept@10")
    code, out, _ = shell("diff", "kept@1", "rich@other", "--patch")
    assert isinstance(json.loads(out), list)
    assert shell("diff", "kept@99")[0] == 3
    assert shell("diff", "kept@1", "nothing")[0] == 3
    assert shell("diff", "nothing@1")[0] == 3


def place_of(text, tmp_path):
    cp = safepoint.open("memory://")
    cp.import_(io.BytesIO(text.encode()))
    return cp


@pytest.mark.parametrize("kind", STORES)
def test_values_as_deep_as_may_be_go_through_a_file(place, kind):
    lists: list[Any] = []
    tuples: tuple[Any, ...] = ()
    keys: dict[Any, Any] = {(): 1}
    for _ in range(198):
        lists, tuples = [lists], (tuples,)
    for n in range(95):
        keys = {(n,): [keys]}
    one, two = place("memory"), place(kind)
    one.save(State("t", messages=[lists, tuples], agent_state={"lists": lists, "tuples": tuples, "keys": keys}))
    file = io.BytesIO()
    one.export("t", file)
    file.seek(0)
    two.import_(file)
    one.copy_to(two)
    again = io.BytesIO()
    two.export("t", again)
    assert again.getvalue() == file.getvalue()
    assert str(two.diff("t", 1, 1)) == "no difference"
    state = two.load_latest("t")
    state.messages[1] = 5
    two.save(state)
    assert str(two.diff("t", 1)) == "1 message changed"

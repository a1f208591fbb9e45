"""Processes that want the same task, the same file or the same moment. Invariant 4, and leases."""

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest

import safepoint
from safepoint import Retention, State
from tests.support import agents, races, raw
from tests.support.agents import url_of
from tests.support.children import Child, Server
from tests.support.effects import Effects
from tests.support.scale import scale
from tests.support.stores import CLOCKED, KINDS, place


@pytest.fixture
def db(any_db: str) -> str:
    return any_db


@pytest.fixture
def sqlite(tmp_path: Path) -> str:
    return str(tmp_path / "agent.db")


SHORT = 2
"""Seconds of a lease that is to pass within a test."""


def clocked(db: str) -> bool:
    """Whether leases there have a length."""
    return raw.kind_of(db) != "sqlite"


def new_task(db: str, task: str = "t") -> None:
    with safepoint.open(url_of(db)) as cp, cp.resume(task):
        pass


# -- one lease


@pytest.mark.scaled
def test_of_two_that_resume_at_the_same_instant_one_is_refused(server: Server, db: str) -> None:
    new_task(db)
    pair = [server.start(races.taker, db, "t") for _ in range(2)]
    for child in pair:
        child.until("ready")
    fence = raw.lease(db, "t")[0]
    for _ in range(scale(8, 50)):
        moment = time.monotonic() + 0.02
        for child in pair:
            child.say(moment)
        answers = [child.read() for child in pair]
        assert sorted(a[0] for a in answers) == ["held", "refused"]
        winner = [a[0] for a in answers].index("held")
        fence += 1
        assert answers[winner] == ("held", fence)
        assert answers[1 - winner] == ("refused", pair[winner].pid)
        assert raw.lease(db, "t")[:2] == (fence, "held")
        pair[winner].say("let go")
        assert pair[winner].read() == ("free",)
    for child in pair:
        child.say(None)
        child.result()


VERBS = ("write", "read", "idempotent", "model", "transactional", "call_many", "save", "pause", "finish", "milestone")


@pytest.mark.parametrize("verb", VERBS)
def test_a_stolen_holder_can_write_nothing(verb: str, server: Server, effects: Effects, db: str) -> None:
    world = effects.world()
    child = server.start(races.holder, db, "t", world)
    _, fence = child.until("held")
    child.stop()
    with safepoint.open(url_of(db)) as cp, pytest.raises(safepoint.LeaseHeld, match="stopped") as held:
        cp.resume("t")
    assert held.value.details["stopped"] is True
    assert server.run(races.thief, db, "t") == (fence + 1, "presumed_dead")
    before = raw.everything(db)
    child.go_on()
    for again in (verb, verb, "save"):  # sticky: the first refusal stands for whatever comes after it
        child.say(again)
        assert child.read() == ("failed", again, "LeaseLost")
    child.say("leave")
    assert child.read() == ("left", "LeaseLost")
    assert raw.everything(db) == before
    child.say("save its state")
    assert child.read() == ("failed", "save its state", "Conflict")
    assert raw.everything(db) == before
    assert world.done() == {}
    assert raw.ledger(db) == []
    child.result()


@pytest.mark.parametrize("verb", ["write", "save"])
def test_a_stolen_holder_can_write_nothing_while_the_thief_lives(verb: str, server: Server, effects: Effects, db: str) -> None:
    old = server.start(races.holder, db, "t", effects.world())
    old.until("held")
    old.stop()
    with safepoint.open(url_of(db)) as cp:
        run = cp.resume("t", steal=True)
        old.go_on()
        old.say(verb)
        assert old.read() == ("failed", verb, "LeaseLost")
        old.say("leave")
        assert old.read() == ("left", "LeaseLost")
        old.say("save its state")
        assert old.read() == ("failed", "save its state", "LeaseHeld")
        old.result()
        with run:
            run.save()
        assert cp.status("t").seq == 2
        assert cp.status("t").status == "interrupted"


# -- the write that was under way in it


@pytest.mark.parametrize("happened", [True, False], ids=["happened", "not-yet"])
@pytest.mark.parametrize("name", list(races.SLOW))
def test_the_open_write_of_a_stolen_holder(name: str, happened: bool, server: Server, effects: Effects, db: str) -> None:
    world = effects.world()
    old = server.start(races.one_write, db, "t", world, name)
    old.until("in tool")
    if happened:
        old.say("do it first")
        old.until("done")
    old.stop()
    thief = server.start(races.one_write, db, "t", world, name, steal=True)
    runs_again = name == "repeatable" or (name in {"final", "deduped"} and not happened)
    thief.say("go")
    outcome = thief.result()
    assert [m[0] for m in thief.heard] == ["in tool"] * runs_again
    rows = raw.everything(db)
    match name:
        case "checked" | "final" | "deduped" if happened:
            assert outcome["status"] == "finished"
            assert outcome["result"] == f"{name}:t/x:1"
        case "final" | "deduped" | "repeatable":
            assert outcome["status"] == "finished"
            assert outcome["result"] == f"{name}:t/x:1"
        case _:
            # Alive and only taken over: what it has not done it may still do, so NotDone() is no licence.
            assert outcome["status"] == "waiting"
            assert [p[1] for p in outcome["pending"]] == [races.SLOW[name].name]
            with safepoint.open(url_of(db)) as cp:
                assert cp.plan("t").does == "wait"
            rows = raw.everything(db)
    assert outcome["previous"] == "presumed_dead" or outcome["status"] == "waiting"
    if name == "final" and not happened:
        old.kill()  # its verifier has promised that the first attempt cannot happen any more
    else:
        old.go_on()
        old.say("go")
        assert old.result() == {"status": "raised", "error": "LeaseLost"}
    assert world.done() == {"t/x": 1}
    assert raw.everything(db) == rows


@pytest.mark.parametrize("name", list(races.SLOW))
@pytest.mark.parametrize("point", ["intent.before", "intent.after"])
def test_a_holder_stolen_before_its_effect_starts_nothing(
    point: str, name: str, server: Server, effects: Effects, db: str
) -> None:
    """Stopped with the intent under way or written, woken after the takeover: it looks again, right before the effect."""
    world = effects.world()
    old = server.start(races.stands_at, db, "t", world, name, point)
    old.until("stands")
    assert server.run(races.thief, db, "t")[1] == "presumed_dead" if point == "intent.before" else steal_only(db)
    rows = raw.everything(db)
    old.say("go")
    old.say("go", may_have_ended=True)  # for the tool, should it be reached
    assert old.result() == {"status": "raised", "error": "LeaseLost"}
    if clocked(db) and point == "intent.after":
        # By force, while its lease had not passed: no clock told it so, and until the next beat nobody else. Its intent is on
        # record, and the thief has seen it; what it does now only the receiver can refuse.
        assert world.done() in ({}, {"t/x": 1})
    else:
        assert not [m for m in old.heard if m[0] == "in tool"]
        assert world.done() == {}
    assert raw.everything(db) == rows


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind in CLOCKED])
@pytest.mark.parametrize("point", ["intent.before", "intent.after"])
def test_a_holder_whose_lease_has_passed_before_its_effect_starts_nothing(
    point: str, kind: str, server: Server, effects: Effects, tmp_path: Path
) -> None:
    """The same where leases have a clock, and the takeover comes by age. All of them at once: what takes time is the lease."""
    with place(kind, tmp_path) as made:
        url, worlds = f"{made.url}&lease={SHORT}", {name: effects.world() for name in races.SLOW}
        olds = {name: server.start(races.stands_at, url, name, world, name, point) for name, world in worlds.items()}
        for old in olds.values():
            old.until("stands")
            old.stop()
        with safepoint.open(url) as cp:
            for name in olds:
                end = time.monotonic() + 3 * SHORT
                while (held := cp.store.lease(name)) is not None and held.live:
                    assert time.monotonic() < end
                    time.sleep(0.05)
                grant = cp.store.acquire(name, b"")
                assert grant.previous == "presumed_dead"
                cp.store.release(name, grant)
        rows = raw.everything(url)
        for name, old in olds.items():
            old.go_on()
            old.say("go")
            old.say("go", may_have_ended=True)
            assert old.result() == {"status": "raised", "error": "LeaseLost"}
            assert not [m for m in old.heard if m[0] == "in tool"]
            assert worlds[name].done() == {}
        assert raw.everything(url) == rows


def steal_only(db: str) -> bool:
    """Take the task by force, where an open write may keep the run from beginning."""
    with safepoint.open(url_of(db)) as cp:
        grant = cp.store.acquire("t", b"", steal=True)
        cp.store.release("t", grant)
    return grant.previous == "presumed_dead"


# -- who is dead and who is not


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[Server]:
    """A server in a pid namespace of its own, as in another container on the same host."""
    unshare = ["unshare", "--pid", "--fork"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        unshare[1:1] = ["--user", "--map-root-user"]
        if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
            pytest.skip("this machine allows no pid namespaces")
    made = Server("safepoint", "safepoint.stores.sqlite", "tests.support.races", prefix=tuple(unshare))
    yield made
    made.close()


@pytest.mark.parametrize("inside", [True, False], ids=["holder-inside", "taker-inside"])
def test_a_holder_in_another_pid_namespace_is_not_taken_for_dead(
    inside: bool, server: Server, elsewhere: Server, effects: Effects, db: str
) -> None:
    if clocked(db):
        db += f"&lease={SHORT}"
    new_task(db)
    holders, takers = (elsewhere, server) if inside else (server, elsewhere)
    child = holders.start(races.taker, db, "t")
    child.until("ready")
    child.say(0.0)
    child.until("held")
    assert takers.run(races.tries, db, "t") == "LeaseHeld"
    assert takers.run(races.tries, db, "t") == "LeaseHeld"
    child.kill()
    # No lock, and no process that could be looked at from here: where leases have a clock, that is the only proof.
    end = time.monotonic() + (3 * SHORT if clocked(db) else 0)
    while (answer := takers.run(races.tries, db, "t")) != "taken" and time.monotonic() < end:
        time.sleep(0.1)
    assert answer == "taken"


@pytest.mark.scaled
@pytest.mark.parametrize("gil", [False, True], ids=["sleeps", "holds-the-GIL"])
def test_a_long_tool_loses_no_lease(gil: bool, server: Server, db: str) -> None:
    seconds = scale(2, 8) if gil else scale(3, 10 if clocked(db) else 60)
    # A lease that would have run out long before, if it had a clock; where it has one, it is renewed, but not while nobody can.
    lease = 4.0 * seconds if gil and clocked(db) else 1.0
    child = server.start(races.slow_agent, db, "t", seconds, gil, lease)
    child.until("in tool")
    end = time.monotonic() + seconds - 0.5
    tried = 0
    while time.monotonic() < end:
        assert server.run(races.tries, db, "t") == "LeaseHeld"
        tried += 1
        time.sleep(0.1)
    assert tried
    assert child.result()["status"] == "finished"
    assert [c["status"] for c in raw.calls(db, "t")] == ["succeeded"]
    assert raw.lease(db, "t") == (1, "released", 0)


# -- many savers on one file


def begin(children: list[Child]) -> None:
    for child in children:
        child.until("ready")
    for child in children:
        child.say("go")


@pytest.mark.scaled
def test_sixteen_processes_save_sixteen_tasks(server: Server, db: str) -> None:
    count = scale(20, 80 if clocked(db) else 200)
    children = [server.start(races.alone, db, f"t{i}", count) for i in range(16)]
    begin(children)
    for i, child in enumerate(children):
        assert child.result() == list(range(1, count + 1))
        rows = raw.checkpoints(db, f"t{i}")
        assert [r[:2] for r in rows] == [(n, n - 1 or None) for n in range(1, count + 1)]


@pytest.mark.scaled
def test_eight_processes_save_one_task(server: Server, db: str) -> None:
    count = scale(20, 80 if clocked(db) else 200)
    children = [server.start(races.together, db, "t", count) for _ in range(8)]
    begin(children)
    # Anything but a Conflict would have been raised.
    results = [child.result() for child in children]
    landed = sorted(seq for seqs, _ in results for seq in seqs)
    assert landed == list(range(1, len(landed) + 1))
    assert len(landed) + sum(conflicts for _, conflicts in results) == 8 * count
    rows = raw.checkpoints(db, "t")
    assert [r[:2] for r in rows] == [(n, n - 1 or None) for n in landed]
    assert [r[3] for r in rows] == landed, "an update was lost: each save counts one step"


@pytest.mark.scaled
def test_savers_and_sweepers_of_one_task(server: Server, db: str) -> None:
    """Objects that one save lets go of come back in another, staged or not, while two processes sweep: all can be loaded."""
    count = scale(60, 200 if clocked(db) else 600)
    savers = [server.start(races.replacing, db, "t", count, i) for i in range(4)]
    sweepers = [server.start(races.sweeping, db, "t") for _ in range(2)]
    begin([*savers, *sweepers])
    results = [child.result() for child in savers]
    for child in sweepers:
        child.say("stop")
    assert sum(child.result() for child in sweepers) > 0
    assert sum(landed + conflicts for landed, conflicts in results) == 4 * count
    with safepoint.open(url_of(db)) as cp:
        headers = cp.list_checkpoints("t")
        assert headers[0].seq == sum(landed for landed, _ in results)
        for h in headers:
            cp.load("t", seq=h.seq)


@pytest.mark.scaled
def test_a_listing_left_half_read_holds_nothing_up(server: Server, sqlite: str) -> None:
    db = sqlite
    with safepoint.open(url_of(db), retention=Retention.keep_all()) as cp:
        for name in ("t", "other"):
            state = State(name)
            for _ in range(12):
                cp.save(state)
    reader = server.start(races.half_reader, db, "t")
    _, page = reader.until("half")
    count, size = scale(100, 1000), scale(300_000, 100_000)
    writer = server.start(races.alone, db, "t", count, size)
    begin([writer])
    largest = 0
    for _ in range(count):
        writer.until("saved")
        largest = max(largest, os.stat(f"{db}-wal").st_size)
    writer.result()
    assert Path(db).stat().st_size > 16_000_000, "too little was written to tell"
    assert largest < 16_000_000
    # Nobody reads: the whole log can be taken back, and emptied.
    conn = apsw.Connection(db)
    assert conn.pragma("journal_mode") == "wal"
    assert conn.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE) == (0, 0)
    conn.close()
    reader.say("on")
    assert reader.result() == list(range(12, 0, -1))
    assert page == [12, 11, 10, 9, 8]


# -- a large save among small ones (field case 62)


@pytest.mark.scaled
@pytest.mark.parametrize("dies", [False, True], ids=["lives", "dies"])
def test_a_large_save_keeps_no_small_one_from_its_time(dies: bool, server: Server, db: str) -> None:
    megabytes = scale(8 if clocked(db) else 20, 100)
    small = [server.start(races.alone, db, f"small{i}", 1_000_000, 1000, True) for i in range(5)]
    if dies:
        large = server.start(races.big_dies, db, "large", megabytes, megabytes // 2)
    else:
        large = server.start(races.big, db, "large", megabytes)
    begin([large, *small])
    if dies:
        large.told()
        assert large.was_killed
    else:
        assert large.result() == 1
    for child in small:
        child.until("saved")
        child.say("stop")
    for child in small:
        seqs = child.result()
        assert seqs == list(range(1, len(seqs) + 1))
    with safepoint.open(url_of(db)) as cp:
        state = cp.load_latest("large")
        if dies:
            assert state is None
            assert "large" not in {t.task_id for t in cp.tasks()}
        else:
            assert state is not None
            assert len(state.messages) == megabytes
            assert {len(m) for m in state.messages} == {1_000_000}
    if dies:
        # Its parts are garbage, and the same save afterwards is whole.
        again = server.start(races.big, db, "large", megabytes)
        begin([again])
        assert again.result() == 1
        with safepoint.open(url_of(db)) as cp:
            state = cp.load_latest("large")
            assert state is not None
            assert len(state.messages) == megabytes


# -- one task delivered several times (field case 38)


def test_five_deliveries_at_once_are_one_execution(server: Server, effects: Effects, db: str) -> None:
    for n in range(3):
        world, task = effects.world(), f"t{n}"
        children = [server.start(races.delivery, db, task, world, 0.0) for _ in range(5)]
        for child in children:
            child.until("ready")
        moment = time.monotonic() + 0.03
        for child in children:
            child.say(moment)
        check_deliveries([c.result() for c in children], world.done(), task)


def check_deliveries(answers: list[Any], done: dict[str, int], task: str) -> None:
    assert done == {f"{task}/x": 1}
    finished = [a for a in answers if a != "LeaseHeld"]
    assert finished
    for answer in finished:
        assert (answer["status"], answer["result"]) == ("finished", f"deliver_once:{task}/x:1")


def test_deliveries_during_and_after_the_execution(server: Server, effects: Effects, db: str) -> None:
    world = effects.world()
    first = server.start(races.delivery, db, "t", world, 0.001, wait=True)
    first.until("in tool")
    during = [server.start(races.delivery, db, "t", world, 0.001) for _ in range(4)]
    assert [c.result() for c in during] == ["LeaseHeld"] * 4
    first.say("go")
    answer = first.result()
    check_deliveries([answer], world.done(), "t")
    rows = raw.everything(db)
    after = [server.start(races.delivery, db, "t", world, 0.001) for _ in range(5)]
    check_deliveries([c.result() for c in after], world.done(), "t")
    assert raw.everything(db) == rows, "a repeated delivery wrote something"


# -- field case 2: nothing is buffered


@pytest.mark.parametrize("durability", ["process", "full"])
def test_killed_after_any_number_of_saves(durability: str, server: Server, db: str) -> None:
    with safepoint.open(url_of(db)) as cp:
        cp.save(State("other", messages=["stays"]))
    for n in (1, 2, 20):
        task = f"t{n}"
        child = server.start(agents.saver, db, task, 1000, 8000, keep=1000, durability=durability)
        for _ in range(n):
            child.until("saved")
        child.kill()
        acknowledged = [m[2] for m in child.told()]
        with safepoint.open(url_of(db)) as cp:
            headers = cp.list_checkpoints(task)
            assert {h.seq for h in headers} >= set(acknowledged)
            for h in headers:
                state = cp.load(task, seq=h.seq)
                assert state.messages == [agents.page(h.seq, j, 1000) for j in range(8)]
            other = cp.load_latest("other")
            assert other is not None
            assert other.messages == ["stays"]

"""Going back: recovery when the newest checkpoint cannot be used, a person's rewind and fork, and what guards against a blind repeat."""

import asyncio
import dataclasses
import logging
import re
import shutil
from typing import Any

import pytest

import safepoint
from safepoint import (
    Conflict,
    Damaged,
    DecisionNeeded,
    Done,
    InvalidState,
    LeaseHeld,
    NewerSchema,
    NotDone,
    NotFound,
    RefusedType,
    Retention,
    State,
    UsageError,
)
from safepoint.codec import chunks
from safepoint.model import Obj
from safepoint.rows import replace
from tests.support.runs import Death, World, declare, died

WORLD: list[World] = []  # of the test that runs


class Broken:
    """A store that reads some checkpoints as damaged: their bodies, or their headers too."""

    def __init__(self, inner, *seqs, headers=False):
        self.__dict__.update(inner=inner, seqs=set(seqs), of_headers=headers, rows=set())

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def _spoilt(self, row):
        return replace(row, size=row.size + 1) if self.of_headers else replace(row, root=row.root + b"\0")

    def read(self, task, **selector):
        found = self.inner.read(task, **selector)
        return (self._spoilt(found[0]), found[1]) if found is not None and found[0].seq in self.seqs else found

    def rescue(self, task, seq, **options):
        return None if seq in self.seqs else self.inner.rescue(task, seq, **options)

    def headers(self, task, **options):
        rows = self.inner.headers(task, **options)
        return [self._spoilt(r) if self.of_headers and r.seq in self.seqs else r for r in rows]

    def _call(self, row):
        return replace(row, attempts=row.attempts + 1) if row.no in self.rows else row

    def calls(self, task, **options):
        rows, objects = self.inner.calls(task, **options)
        return [self._call(r) for r in rows], objects

    def walk(self, task):
        for part in self.inner.walk(task):
            if isinstance(part, safepoint.rows.CheckpointRow) and part.seq in self.seqs:
                yield self._spoilt(part)
            elif isinstance(part, safepoint.rows.CallRow):
                yield self._call(part)
            else:
                yield part


@pytest.fixture
def broken(cp):
    """A checkpointer over the same store that finds some of it damaged; a real checkpointer in all else."""
    made = []

    def make(*seqs, headers=False, **options):
        store: Any = Broken(cp.store, *seqs, headers=headers)
        other = safepoint.Checkpointer(store, own=False, **options)
        made.append(other)
        return other

    yield make
    for other in made:
        other.close()


def steps(cp, n, task="t", **options):
    """A task of n whole steps, interrupted, each of which writes once; checkpoints 1 to n + 1."""
    act = declare(WORLD[0])
    with cp.resume(task, **options) as run:
        for _ in range(n):
            i = run.state.step
            run.state.messages.append({"role": "user", "content": str(i)})
            run.state.agent_state["i"] = i + 1
            run.call(act, i)
            run.save()


@pytest.fixture(autouse=True)
def _world(world):
    WORLD[:] = [world]


def go_on(cp, upto=5, task="t", **options):
    """The same agent, again, up to a step."""
    act = declare(WORLD[0])
    with cp.resume(task, **options) as run:
        while run.state.step < upto:
            i = run.state.step
            run.state.messages.append({"role": "user", "content": str(i)})
            run.state.agent_state["i"] = i + 1
            run.call(act, i)
            run.save()
        return run


# -- auto


@pytest.mark.parametrize("headers", [False, True])
@pytest.mark.parametrize("bad", [(4,), (4, 3), (4, 2)])
def test_auto_goes_back_one_version_at_a_time(cp, broken, world, caplog, bad, headers):
    steps(cp, 3)
    hurt = broken(*bad, headers=headers)
    good = 2 if bad == (4, 3) else 3
    plan = hurt.plan("t")
    assert (plan.does, plan.seq, plan.branch) == ("carry on", good, "main~1")
    assert [s for s, _ in plan.skipped] == [n for n in (4, 3) if n > good]
    with caplog.at_level(logging.INFO, "safepoint"), hurt.resume("t") as run:
        assert run.recovery.mode == "fallback"
        assert run.recovery.seq == good
        assert run.recovery.skipped == plan.skipped
        assert run.recovery.branch == run.state.branch == "main~1"
        assert run.state.seq == 5
        assert run.state.step == good - 1
        assert run.recovery.reused == 4 - good
    (line,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("resumed")]
    assert re.match(rf"resumed t@{good} \(schema 1, saved \d s ago", line)
    assert "skipped 4: damaged" in line
    # The new head is whole, and what was damaged lies where it lay.
    assert cp.load_latest("t").seq == 5
    assert hurt.status("t").branch == "main~1"
    assert [h.seq for h in cp.list_checkpoints("t")] == [5, 4, 3, 2, 1]
    assert cp.list_checkpoints("t", limit=1)[0].label == f"from {good}"
    # What was lost is done again, and what is on record is not.
    before = list(world.log)
    run = go_on(cp, 4)
    assert world.log == [*before, (3,)]
    assert run.state.agent_state["i"] == 4
    assert cp.plan("t").skipped == ()


def test_the_recovery_is_in_the_next_checkpoint(cp, broken):
    steps(cp, 3)
    hurt = broken(4)
    go_on(hurt, 3)
    row, objects = cp.store.read("t", seq=6)
    kept = chunks.unpack_plain(row.root, row.refs, objects)["recovery"]
    assert (kept["mode"], kept["seq"], kept["skipped"], kept["branch"]) == ("fallback", 3, [[4, "damaged"]], "main~1")


def test_a_damaged_head_names_the_newest_good_one(cp, broken):
    steps(cp, 3)
    with pytest.raises(Damaged) as caught:
        broken(4, 3).load_latest("t")
    assert caught.value.details["good"] == 2


def test_a_second_fallback_goes_back_over_the_branch_that_the_first_one_made(cp, broken, world):
    steps(cp, 4)
    go_on(broken(5), 5)  # main~1 from 4: 6, and its steps 7, 8
    assert cp.load_latest("t").seq == 8
    hurt = broken(8, 7, 6, 5)
    assert hurt.plan("t").seq == 4
    with hurt.resume("t") as run:
        assert (run.recovery.seq, run.state.branch) == (4, "main~2")
        assert [n for n, _ in run.recovery.skipped] == [8, 7, 6]


def test_nothing_usable_is_an_error_with_the_plan_and_nothing_is_changed(cp, broken):
    steps(cp, 2)
    hurt = broken(1, 2, 3)
    assert hurt.plan("t").does == "refused"
    with pytest.raises(Damaged) as caught:
        hurt.resume("t")
    assert caught.value.details["plan"].skipped == ((3, "damaged"), (2, "damaged"), (1, "damaged"))
    assert [h.seq for h in cp.list_checkpoints("t")] == [3, 2, 1]
    assert cp.status("t").branch == "main"
    assert cp.status("t").status == "interrupted"


def test_a_fresh_start_is_served_from_the_record_and_repeats_no_write(cp, broken, world):
    steps(cp, 2)
    before = list(world.log)
    hurt = broken(1, 2, 3)
    plan = hurt.plan("t", fresh_start=True)
    assert (plan.does, plan.seq, plan.branch, plan.guard) == ("begin", None, "main~1", 3)
    with hurt.resume("t", fresh_start=True) as run:
        assert (run.recovery.mode, run.recovery.seq, run.recovery.guard) == ("fresh", None, 3)
        assert (run.state.step, run.state.seq, run.state.messages) == (0, 4, [])
    head = cp.list_checkpoints("t", limit=1)[0]
    assert (head.kind, head.branch, head.parent_seq) == ("fresh", "main~1", None)
    go_on(hurt, 2)
    assert world.log == before
    # Another write than those on record, in a step that had been come to: nobody knows whether it was made.
    act = declare(world, name="test-other")
    with pytest.raises(safepoint.InDoubt), hurt.resume("t") as run:
        run.call(act, "x")
    assert world.log == before
    (call,) = hurt.calls("t", status="in_doubt")
    assert "not sent" in call.reason
    hurt.resolve("t", call.no, NotDone())
    with hurt.resume("t") as run:
        run.call(act, "x")
    assert world.log == [*before, ("x",)]


def test_a_fresh_start_of_run_agent_gets_its_job_again(cp, broken):
    def step(run):
        if run.state.step == 2:
            raise RuntimeError
        run.state.messages.append({"role": "assistant", "content": "."})

    with pytest.raises(RuntimeError):
        safepoint.run_agent(step, task_id="t", input="go", store=cp)
    hurt = broken(1, 2, 3)
    with pytest.raises(Damaged):
        safepoint.run_agent(lambda run: run.finish(), task_id="t", input="go", store=hurt)
    with pytest.raises(UsageError, match="another input"):
        safepoint.run_agent(lambda run: run.finish(), task_id="t", input="stop", store=hurt, fresh_start=True)
    assert len(cp.branches("t")) == 1
    outcome = safepoint.run_agent(lambda run: run.finish(len(run.state.messages)), task_id="t", store=hurt, fresh_start=True)
    assert (outcome.status, outcome.result, outcome.recovery.mode) == ("finished", 1, "fresh")
    assert outcome.state.messages == [{"role": "user", "content": "go"}]
    assert safepoint.run_agent(lambda run: 1 / 0, task_id="t", input="go", store=hurt).result == 1


@dataclasses.dataclass
class Goal:
    text: str = ""


def test_what_hits_every_checkpoint_comes_out_as_it_is_and_is_no_fresh_start(url):
    with safepoint.open(url, types=[Goal]) as cp:
        state = State("t", agent_state={"plan": Goal("x")})
        cp.save(state)
        cp.save(state)
    with safepoint.open(url) as cp:
        for options in ({}, {"fresh_start": True}):
            with pytest.raises(RefusedType):
                cp.resume("t", **options)
        assert cp.plan("t", fresh_start=True).does == "refused"
        assert len(cp.list_checkpoints("t")) == 2


def test_a_newer_schema_is_never_passed_over(url):
    with safepoint.open(url) as cp:
        cp.save(State("t"))
    with safepoint.open(url, schema_version=2, migrations={1: lambda t: t}) as cp:
        cp.save(cp.load("t", seq=1))
    with safepoint.open(url) as cp:
        for options in ({}, {"fresh_start": True}, {"recover": "strict"}):
            with pytest.raises(NewerSchema):
                cp.resume("t", **options)
        assert len(cp.list_checkpoints("t")) == 2


def test_a_failing_migration_of_one_version_is_passed_over(url):
    def migrate(tree):
        return {**tree, "agent_state": {"n": 100 // tree["agent_state"]["n"]}}

    with safepoint.open(url) as cp:
        state = State("t", agent_state={"n": 4})
        cp.save(state)
        state.agent_state["n"] = 0
        cp.save(state)
    with safepoint.open(url, schema_version=2, migrations={1: migrate}) as cp, cp.resume("t") as run:
        assert (run.recovery.mode, run.recovery.seq, run.state.agent_state) == ("fallback", 1, {"n": 25})
        assert run.recovery.skipped == ((2, "invalid: the migration 1 -> 2 has failed, it raised ZeroDivisionError"),)
        run.save()
    with safepoint.open(url, schema_version=2, migrations={1: migrate}) as cp:
        assert cp.load_latest("t").agent_state == {"n": 25}


def test_unavailable_never_leads_to_a_fallback(cp, broken):
    steps(cp, 2)
    hurt = broken()

    def read(task, **selector):
        raise safepoint.Unavailable("no answer")

    hurt.store.__dict__["read"] = read
    with pytest.raises(safepoint.Unavailable):
        hurt.resume("t", fresh_start=True)
    assert len(cp.list_checkpoints("t")) == 3


# -- strict and manual


def test_strict_takes_the_newest_or_its_error(cp, broken):
    steps(cp, 2)
    with pytest.raises(Damaged) as caught:
        broken(3).resume("t", recover="strict")
    assert caught.value.details["good"] == 2
    with pytest.raises(InvalidState, match="goal is missing"):
        cp.resume("t", recover="strict", requires=["goal"])
    with cp.resume("t", recover="strict", requires=["i"]) as run:
        assert run.recovery.mode == "head"


def test_manual_lets_a_person_choose(cp, broken, world):
    steps(cp, 2)
    hurt = broken(3)
    for _ in range(2):
        with pytest.raises(DecisionNeeded) as caught:
            hurt.resume("t", recover="manual")
        plan = caught.value.details["plan"]
        assert [(c.seq, c.problem) for c in plan.candidates] == [(3, "damaged"), (2, ""), (1, "")]
        assert plan.seq == 2
    with pytest.raises(DecisionNeeded):
        safepoint.run_agent(lambda run: None, task_id="t", store=hurt, recover="manual")
    assert cp.status("t").status == "interrupted"
    assert len(cp.list_checkpoints("t")) == 3
    head = hurt.rewind("t", 2)
    assert (head.seq, head.branch, head.parent_seq, head.label) == (4, "main~1", 2, "from 2")
    with hurt.resume("t", recover="manual") as run:
        assert (run.recovery.mode, run.recovery.seq) == ("rewind", 2)
        run.call(declare(world), 1)
        run.save()
    with pytest.raises(DecisionNeeded):  # a step has been done since
        hurt.resume("t", recover="manual")
    with hurt.resume("t", recover="manual", at=5) as run:
        assert run.state.seq == 5


def test_manual_has_nothing_to_ask_of_a_new_task_or_a_finished_one(cp):
    outcome = safepoint.run_agent(lambda run: run.finish(1), task_id="t", store=cp, recover="manual")
    assert outcome.result == 1
    assert safepoint.run_agent(lambda run: run.finish(2), task_id="t", store=cp, recover="manual").result == 1
    with cp.resume("t", recover="manual") as run:
        assert run.recovery.mode == "head"


@pytest.mark.parametrize(
    "wrong",
    [
        {"recover": "x"}, {"recover": None}, {"at": 0}, {"at": "3"}, {"at": 1, "branch": "main"}, {"fresh_start": 1},
        {"fresh_start": True, "recover": "strict"}, {"health": [3]}, {"health": 7}, {"requires": [1]}, {"requires": ["a..b"]},
        {"branch": ""},
    ],
)  # fmt: skip
def test_wrong_options_are_refused_before_anything_is_touched(cp, wrong):
    with pytest.raises(UsageError):
        cp.resume("t", **wrong)
    with pytest.raises(UsageError):
        safepoint.run_agent(lambda run: run.finish(), task_id="t", store=cp, **wrong)
    assert cp.tasks() == []


# -- health


def test_an_unhealthy_head_is_passed_over(cp, world):
    steps(cp, 3)

    def small(state):
        return state.agent_state.get("i", 0) < 3 or "i is too large"

    small_plan = cp.plan("t", health=[small])
    assert (small_plan.seq, small_plan.skipped) == (3, ((4, "unhealthy: i is too large"),))
    with cp.resume("t", health=[small]) as run:
        assert (run.recovery.seq, run.recovery.skipped) == (3, ((4, "unhealthy: i is too large"),))


def test_health_of_a_checkpointer_is_for_all_its_runs(url):
    with safepoint.open(url) as cp:
        steps(cp, 2)
    with safepoint.open(url, health=[lambda s: s.step < 2]) as cp, cp.resume("t") as run:
        assert (run.recovery.mode, run.recovery.seq) == ("fallback", 2)


def test_what_is_required_is_kept_with_the_task(cp, world):
    steps(cp, 2, requires=["i"])
    state = cp.load_latest("t")
    del state.agent_state["i"]
    cp.save(state)
    assert cp.plan("t").skipped == ((4, "unhealthy: i is missing"),)
    with cp.resume("t") as run:
        assert run.recovery.seq == 3


# -- at, rewind, fork


def test_at_the_head_is_a_plain_resume(cp):
    steps(cp, 2)
    with cp.resume("t", at=3) as run:
        assert (run.recovery.mode, run.state.branch, run.state.seq) == ("head", "main", 3)


def test_at_goes_on_from_there_on_a_new_branch(cp, world):
    steps(cp, 3)
    before = list(world.log)
    with cp.resume("t", at=2) as run:
        assert (run.recovery.mode, run.recovery.seq, run.state.branch, run.state.step) == ("at", 2, "main~1", 1)
    run = go_on(cp, 4)
    assert world.log == [*before, (3,)]
    assert (run.state.agent_state["i"], len(run.state.messages)) == (4, 4)
    with pytest.raises(NotFound):
        cp.resume("t", at=99)
    assert cp.status("t").status == "interrupted"


def test_run_agent_at_reopens_a_finished_task(cp):
    def step(run):
        run.state.messages.append({"role": "assistant", "content": "."})
        if run.state.step == 2:
            run.finish(len(run.state.messages))

    assert safepoint.run_agent(step, task_id="t", input="go", store=cp).result == 4
    assert safepoint.run_agent(step, task_id="t", store=cp, at=4).result == 4
    outcome = safepoint.run_agent(step, task_id="t", store=cp, at=2)
    assert (outcome.result, outcome.recovery.mode, outcome.recovery.seq) == (4, "at", 2)
    assert len(cp.branches("t")) == 2


def test_rewind_is_refused_while_a_live_run_holds_the_task(cp):
    steps(cp, 2)
    with cp.resume("t"):
        with pytest.raises(LeaseHeld):
            cp.rewind("t", 1)
        fork = cp.fork("t", name="beside")
    assert (fork.branch, fork.parent_seq) == ("beside", 3)
    assert cp.status("t").branch == "main"


def test_rewind_of_what_is_not_there(cp):
    with pytest.raises(NotFound):
        cp.rewind("t", 1)
    steps(cp, 1)
    absent: list[dict[str, Any]] = [{"seq": 9}, {"branch": "none"}]
    for wrong in absent:
        with pytest.raises(NotFound):
            cp.rewind("t", **wrong)
    senseless: list[dict[str, Any]] = [{}, {"seq": 1, "branch": "main"}, {"seq": 0}, {"seq": 1, "journal": "x"}]
    for wrong in senseless:
        with pytest.raises(UsageError):
            cp.rewind("t", **wrong)
    assert len(cp.list_checkpoints("t")) == 2
    assert cp.status("t").status == "interrupted"


def test_a_finished_task_that_is_rewound_is_unfinished_again(cp):
    def step(run):
        run.finish("done")

    safepoint.run_agent(step, task_id="t", input="go", store=cp)
    cp.rewind("t", 1)
    assert [i.task_id for i in cp.tasks(status="unfinished")] == ["t"]
    cp.rewind("t", branch="main")
    assert cp.status("t").status == "finished"
    assert cp.status("t").branch == "main"


def test_a_rewound_task_that_no_run_ever_held_stays_idle(cp):
    state = State("t")
    cp.save(state)
    state.step += 1
    cp.save(state)
    cp.rewind("t", 1)
    assert cp.status("t").status == "idle"
    assert cp.load_latest("t").step == 0
    again = cp.load_latest("t")
    again.step += 1
    assert cp.save(again).branch == "main~1"


def test_a_failure_leaf_is_nothing_to_go_on_from(cp):
    def step(run):
        if run.state.step == 1:
            raise RuntimeError

    with pytest.raises(RuntimeError):
        safepoint.run_agent(step, task_id="t", store=cp)
    leaf = cp.list_checkpoints("t", limit=1)[0]
    assert leaf.kind == "failure"
    with pytest.raises(UsageError, match="failed step"):
        cp.rewind("t", leaf.seq)


def test_fork_is_free_and_leaves_the_current_branch_alone(cp, world):
    steps(cp, 3)
    objects = {part.name for part in cp.store.walk("t") if isinstance(part, Obj)}
    fork = cp.fork("t", 2, name="try")
    assert {part.name for part in cp.store.walk("t") if isinstance(part, Obj)} == objects
    assert (fork.branch, fork.parent_seq, fork.step, fork.digest) == ("try", 2, 1, cp.list_checkpoints("t")[3].digest)
    assert (cp.status("t").branch, cp.load_latest("t").seq) == ("main", 4)
    with pytest.raises(Conflict):
        cp.fork("t", name="try")
    assert cp.fork("t").branch == "main~1"
    state = cp.load("t", branch="try")
    state.messages.append("x")
    assert cp.save(state).branch == "try"
    main, one, tried = sorted(cp.branches("t"), key=lambda b: b.name)
    assert (main.current, main.seq, main.forked_from, main.step) == (True, 4, None, 3)
    assert (one.current, one.seq, one.forked_from, one.kept) == (False, 6, 4, 1)
    assert (tried.seq, tried.forked_from, tried.kept, tried.line) == (7, 2, 2, main.line)
    with cp.resume("t", branch="try") as run:
        assert (run.state.branch, run.state.seq) == ("try", 7)
    assert cp.status("t").branch == "try"
    with pytest.raises(NotFound):
        cp.resume("t", branch="none")


# -- the journal of what is left


@pytest.mark.parametrize("how", ["rewind", "fork"])
def test_fresh_does_all_anew(cp, world, how):
    steps(cp, 2)
    new = getattr(cp, how)("t", 1, journal="fresh")
    world.log.clear()
    go_on(cp, 2, branch=new.branch)
    assert world.log == [(0,), (1,)]


@pytest.mark.parametrize("how", ["rewind", "fork"])
def test_block_shows_every_write_to_a_person(cp, world, how):
    steps(cp, 2)
    new = getattr(cp, how)("t", 1, journal="block")
    world.log.clear()
    assert how == "fork" or cp.plan("t").guard == 3
    for verdict in (Done("by hand"), NotDone(), NotDone()):
        with pytest.raises(safepoint.InDoubt):
            go_on(cp, 4, branch=new.branch)
        (call,) = cp.calls("t", status="in_doubt")
        assert "not sent" in call.reason
        cp.resolve("t", call.no, verdict)
    run = go_on(cp, 4, branch=new.branch)
    assert world.log == [(1,), (2,), (3,)]
    assert run.state.step == 4


def test_inherit_from_a_pinned_one_after_cleanup_repeats_no_write_blindly(cp, world):
    steps(cp, 6)
    cp.pin("t", 2)
    report = cp.cleanup("t", keep_latest=2)
    assert report.calls_deleted
    before = list(world.log)
    cp.rewind("t", 2)
    assert cp.plan("t").guard == 7
    asked = 0
    for _ in range(10):
        try:
            run = go_on(cp, 7)
            break
        except safepoint.InDoubt:
            (call,) = cp.calls("t", status="in_doubt")
            assert "not sent" in call.reason
            asked += 1
            # A person looks: it was made. What is on record is not asked about.
            cp.resolve("t", call.no, Done("made"))
    assert world.log in (before, [*before, (6,)])
    assert asked >= 3
    assert run.state.step == 7


def test_a_guard_outlives_further_rewinds(cp, world):
    steps(cp, 6)
    cp.pin("t", 2)
    cp.cleanup("t", keep_latest=2)
    cp.rewind("t", 2)
    with cp.resume("t") as run:
        run.state.agent_state["i"] = 0
        run.save()
    for seq in (8, 2, 2):
        cp.rewind("t", seq)
        assert cp.plan("t").guard == 7
    cp.rewind("t", 2, journal="fresh")
    assert cp.plan("t").guard == 0


def test_records_that_another_branch_took_along_are_missed(cp, world):
    """Calls that a rewound branch was served lie with the checkpoints of the branch that made them, and are deleted with those."""
    steps(cp, 4)  # main: 1..5
    cp.rewind("t", 3)  # main~1: 6 at step 2
    go_on(cp, 4)  # served: 7, 8
    cp.pin("t", 7)
    cp.cleanup("t", keep_latest=1)
    kept = {c.step for c in cp.calls("t")}
    before = list(world.log)
    cp.rewind("t", 7)
    for _ in range(4):
        try:
            go_on(cp, 5)
            break
        except safepoint.InDoubt:
            (call,) = cp.calls("t", status="in_doubt")
            cp.resolve("t", call.no, Done("made"))
    assert [w for w in world.log if world.log.count(w) > 1] == []
    assert world.log[: len(before)] == before
    assert kept is not None


# -- records that are damaged


def test_field_case_34_a_damaged_entry_closes_replay_from_there_on(cp, broken, world):
    look, act = declare(world, "read", name="test-look"), declare(world)

    def step(run):
        for i in range(3):
            run.call(look, i)
        run.call(act, "w")

    with died(cp, "t") as run:
        step(run)
        raise Death
    assert [w[0] for w in world.log] == [0, 1, 2, "w"]
    hurt = broken()
    hurt.store.rows.add(2)
    plan = hurt.plan("t")
    assert [(p.call.no, p.action) for p in plan.calls] == [(1, "reuse"), (3, "ask_anew"), (4, "reuse")]
    assert plan.guard == 1
    with pytest.raises(Damaged):
        hurt.resume("t", recover="strict")
    world.log.clear()
    with hurt.resume("t") as run:
        assert run.recovery.lost_calls == (2,)
        assert run.recovery.guard == 1
        step(run)
        assert [w[0] for w in world.log] == [1, 2]
        with pytest.raises(safepoint.RunEnded):
            run.call(act, "another")
        run._flow.ended = None
    assert [w[0] for w in world.log] == [1, 2]


def test_a_damaged_record_of_a_step_long_past_changes_nothing(cp, broken, world):
    steps(cp, 3)
    hurt = broken()
    hurt.store.rows.add(1)
    assert hurt.plan("t").guard == 0
    with hurt.resume("t") as run:
        assert (run.recovery.lost_calls, run.recovery.guard) == ((), 0)
    with cp.resume("t", at=2):
        pass
    hurt.store.rows = {2}  # gone back since: nobody knows when it was
    with hurt.resume("t") as run:
        assert run.recovery.lost_calls == (2,)


@pytest.mark.parametrize("effect", ["read", "write"])
def test_a_result_that_cannot_be_read_is_asked_anew_or_told(cp, world, effect):
    act = declare(world, effect)
    with died(cp, "t") as run:
        run.call(act, 1)
        raise Death
    objects = {}
    real = cp.store.calls

    def calls(task, **options):
        found, _ = real(task, **options)
        return [replace(r, result_refs=b"x" * 16).sealed(task) if r.result else r for r in found], objects

    cp.store.calls = calls
    try:
        assert [p.action for p in cp.plan("t").calls] == ["repeat" if effect == "read" else "lost"]
        cp.store.calls = calls
        with cp.resume("t") as run:
            if effect == "read":
                assert run.call(act, 1) == "done 2"
            else:
                for _ in range(2):  # however often it is asked for
                    with pytest.raises(Damaged, match="succeeded"):
                        run.call(act, 1)
    finally:
        del cp.store.calls
    assert len(world.log) == (2 if effect == "read" else 1)
    if effect == "write":
        with cp.resume("t") as run:  # the record can be read after all
            assert run.call(act, 1) == "done 1"
        assert len(world.log) == 1


# -- field cases


def test_field_case_10_no_error_is_taken_for_an_empty_task(cp, broken):
    """(b): nothing new appears under the id without an explicit flag, the old bytes stay, and the outcome names its cause."""
    steps(cp, 1)
    before = cp.store.read("t", seq=2)
    hurt = broken(1, 2)
    with pytest.raises(Damaged):
        hurt.load_latest("t")
    with pytest.raises(Damaged) as caught:
        safepoint.run_agent(lambda run: run.finish(), task_id="t", input="new", store=hurt)
    assert "2 damaged" in str(caught.value)
    for blank in ("", " ", "\t\n"):
        with pytest.raises(UsageError):
            hurt.load_latest(blank)
        with pytest.raises(UsageError):
            safepoint.run_agent(lambda run: run.finish(), task_id=blank, input="new", store=hurt)
    assert cp.load_latest("absent") is None
    assert [i.task_id for i in cp.tasks()] == ["t"]
    assert cp.store.read("t", seq=2) == before
    with hurt.resume("t", fresh_start=True) as run:
        assert run.recovery.mode == "fresh"
    assert cp.store.read("t", seq=2) == before


@pytest.mark.parametrize("value", [0, -1, 1 << 200, 0.0, -0.0, float("inf"), "", "\0", "\ud800", b"", [], {}, (), None, False])
def test_field_case_10a_what_a_save_accepts_a_load_accepts(cp, value):
    for i, state in enumerate(
        [
            State("t0", step=0, messages=[value], agent_state={"v": value}, metadata={"v": value}),
            State("t1", step=1 << 40, version=1 << 40, agent_state=value),
            State(" t ", branch="b" * 512, agent_state={"": value}, metadata={"": value}),
        ]
    ):
        cp.save(state)
        again = cp.load_latest(state.task_id)
        assert (again.step, again.messages, again.agent_state) == (state.step, state.messages, state.agent_state), i
        assert cp.plan(state.task_id).seq == 1


def test_field_case_32_one_bad_version_is_passed_by_a_single_call(url):
    """(b): v4 breaks a rule that came later; the others list and load, and going back is one call."""

    def migrate(tree):
        if tree["agent_state"]["v"] == 4:
            raise ValueError("v4 was never valid")
        return tree

    with safepoint.open(url) as cp:
        state = State("t", agent_state={"v": 0})
        for v in range(1, 5):
            state.agent_state["v"] = v
            cp.save(state)
    with safepoint.open(url, schema_version=2, migrations={1: migrate}) as cp:
        assert [h.seq for h in cp.list_checkpoints("t")] == [4, 3, 2, 1]
        assert cp.load("t", seq=3).agent_state == {"v": 3}
        assert {c.seq: bool(c.problem) for c in cp.plan("t").candidates} == {4: True, 3: False, 2: False, 1: False}
        assert cp.rewind("t", 3).seq == 5
        assert cp.load_latest("t").agent_state == {"v": 3}


# -- retention


def test_heads_and_fork_points_stay_as_targets(cp, world):
    cp.retention = Retention(2)
    steps(cp, 3)
    cp.fork("t", 3, name="a")
    go_on(cp, 12)
    cp.cleanup("t", keep_latest=1)
    left = {h.seq for h in cp.list_checkpoints("t")}
    assert {3, 5} <= left
    back = cp.rewind("t", branch="a")  # what it would be served has gone meanwhile
    assert (back.parent_seq, back.branch, back.step) == (5, "a", 2)
    assert cp.plan("t").guard == 13
    assert cp.fork("t", 3, name="b").parent_seq == 3


@pytest.mark.parametrize("how", ["rewind", "fork", "fallback"])
def test_retention_goes_on_after_going_back(cp, broken, world, how):
    steps(cp, 4)
    if how == "fallback":
        broken(5).resume("t").close()
    else:
        getattr(cp, how)("t", 4)
    go_on(cp, 30)
    cp.cleanup("t", keep_latest=3)
    assert len(cp.list_checkpoints("t")) <= 3 + 3  # the newest, heads and fork points
    assert len(cp.calls("t")) <= 8
    before = list(world.log)
    assert before == [(n,) for n in range(30)]
    # And a branch that was left behind repeats nothing blindly when it is gone back to.
    other = next(b.name for b in cp.branches("t") if not b.current)
    if how == "fallback":
        cp.rewind("t", 4)
    else:
        cp.rewind("t", branch=other)
    assert cp.plan("t").guard >= 30
    for _ in range(3):
        try:
            go_on(cp, 31)
        except safepoint.InDoubt:
            (call,) = cp.calls("t", status="in_doubt")
            cp.resolve("t", call.no, Done("made"))
    assert world.log == before


# -- a store that is older than what it acknowledged


@pytest.fixture
def restored(tmp_path):
    """A SQLite store put back to where it stood when a task had done two steps of five."""
    path = tmp_path / "agent.db"
    with safepoint.open(f"sqlite:///{path}") as cp:
        go_on(cp, 2)
    shutil.copy(path, tmp_path / "backup")
    with safepoint.open(f"sqlite:///{path}") as cp:
        go_on(cp, 5)
    shutil.copy(tmp_path / "backup", path)
    with safepoint.open(f"sqlite:///{path}") as cp:
        yield cp


def test_nobody_goes_on_from_an_older_store_without_a_persons_word(restored, world):
    before = list(world.log)
    for options in ({}, {"fresh_start": True}, {"recover": "strict"}, {"recover": "manual"}, {"branch": "main"}):
        with pytest.raises(Damaged) as caught:
            restored.resume("t", **options)
        assert caught.value.details["rolled_back"]
        with pytest.raises(Damaged):
            safepoint.run_agent(lambda run: run.finish(), task_id="t", store=restored, **options)
    for act in (restored.plan, lambda t: restored.rewind(t, branch="main"), lambda t: restored.rewind(t, 99)):
        with pytest.raises(Damaged):
            act("t")
    assert world.log == before


@pytest.mark.parametrize("how", ["rewind", "at", "head"])
def test_a_person_takes_it_as_it_stands_and_no_write_is_made_blindly(restored, world, how):
    before = list(world.log)
    if how == "rewind":
        assert restored.rewind("t", 3).parent_seq == 3
    else:
        with restored.resume("t", at=3 if how == "head" else 2) as run:
            assert run.recovery.mode == "at"
            assert run.recovery.guard == 7
    assert restored.plan("t").guard == 7
    for n in range(2, 7):
        with pytest.raises(safepoint.InDoubt):
            go_on(restored, 7)
        (call,) = restored.calls("t", status="in_doubt")
        restored.resolve("t", call.no, Done("made") if n < 5 else NotDone())
    go_on(restored, 8)
    assert world.log == [*before, (5,), (6,), (7,)]


@pytest.mark.parametrize("then", ["", "rewind", "at", "unsaved", "branch", "saved by hand", "repeated", "head unusable"])
def test_an_acceptance_that_nobody_went_on_from_is_not_forgotten(restored, world, then):
    """A kill right after the store was accepted, before what accepted it could put a guard over what was lost."""
    before = list(world.log)
    restored.store.accept("t")
    if then == "rewind":
        assert restored.rewind("t", 3).parent_seq == 3
    elif then == "at":
        restored.resume("t", at=3).close()
    elif then == "unsaved":
        for _ in range(2):
            with restored.resume("t") as run:
                assert run.recovery.guard == 7
    elif then == "branch":
        restored.fork("t", name="b")
        restored.resume("t", branch="b").close()
    elif then == "saved by hand":
        state = restored.load_latest("t")
        state.messages.append("by hand")
        restored.save(state)
    elif then == "repeated":
        restored.store.accept("t")
    elif then == "head unusable":
        with restored.resume("t", health=[lambda state: state.step < 2]) as run:
            assert run.recovery.mode == "fallback"
            assert run.recovery.guard == 7
    assert restored.plan("t").guard == 7
    for n in range(2, 7):
        with pytest.raises(safepoint.InDoubt):
            go_on(restored, 7)
        (call,) = restored.calls("t", status="in_doubt")
        restored.resolve("t", call.no, Done("made") if n < 5 else NotDone())
    go_on(restored, 8)
    assert world.log == [*before, (5,), (6,), (7,)]
    assert restored.store.older("t") is None
    assert restored.plan("t").guard == 0


# -- the async face


def test_async_twins(cp, world):
    steps(cp, 3)
    asyncio.run(twins(cp))


async def twins(cp):
    async with safepoint.open_async(cp) as acp:
        assert (await acp.plan("t", requires=["x"])).skipped[0][0] == 4
        assert (await acp.fork("t", 2, name="try")).seq == 5
        assert (await acp.rewind("t", 2)).branch == "main~1"
        assert [b.name for b in await acp.branches("t") if b.current] == ["main~1"]
        async with acp.resume("t", at=3) as run:
            assert (run.recovery.mode, run.state.branch) == ("at", "main~2")
        with pytest.raises(DecisionNeeded):
            async with acp.resume("t", recover="manual", branch="main"):
                pass

        async def step(run):
            run.finish(run.state.step)

        outcome = await safepoint.run_agent_async(step, task_id="t", input="go", store=acp, at=2, requires=["i"])
        assert (outcome.result, outcome.recovery.mode) == (1, "at")
        with pytest.raises(UsageError):
            await safepoint.run_agent_async(step, task_id="t", store=acp, recover="x")

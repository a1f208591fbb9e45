"""The handle on each store, DESIGN 6 and 7: pauses, what ends a run, steps and their saves, leases."""

# ruff: noqa: PT012 - a run is a context manager, and what leaving it raises is what is tested

import asyncio
import threading
import time

import pytest

import safepoint
from safepoint import (
    DecisionNeeded,
    InDoubt,
    InvalidState,
    LeaseHeld,
    LeaseLost,
    RefusedType,
    RunEnded,
    State,
    StoreFull,
    UsageError,
    tool,
)
from safepoint.tools import current
from tests.support.runs import Death, Failing, declare, died, statuses

# -- pauses


def test_a_question_ends_the_run_and_its_answer_is_used_once(cp):
    with pytest.raises(DecisionNeeded) as caught, cp.resume("t") as run:
        run.pause("ok?", {"amount": 10})
    assert caught.value.details["pauses"] == [1]
    assert cp.status("t").status == "waiting"
    assert cp.tasks(status="unfinished") == []
    (pause,) = cp.pauses("t")
    assert (pause.no, pause.name, pause.question, pause.status) == (1, "ok?", {"amount": 10}, "open")
    with pytest.raises(DecisionNeeded):
        cp.resume("t")
    assert cp.plan("t").does == "wait"
    assert cp.answer("t", 1, {"yes": True}).answer == {"yes": True}
    assert cp.plan("t").does == "carry on"
    assert [t.task_id for t in cp.tasks(status="unfinished")] == ["t"]
    with cp.resume("t") as run:
        assert run.pause("ok?", {"amount": 10}) == {"yes": True}
        run.save()
    assert cp.pauses("t", status=None)[0].status == "used"
    with pytest.raises(DecisionNeeded), cp.resume("t") as run:
        run.pause("ok?")
    assert len(cp.pauses("t")) == 1, "in another step it is another question"


def test_the_first_answer_stands(cp):
    with pytest.raises(DecisionNeeded), cp.resume("t") as run:
        run.pause("p")
    cp.answer("t", "p", "first")
    for again in ("p", 1, cp.pauses("t", status=None)[0]):
        with pytest.raises(safepoint.AlreadyAnswered):
            cp.answer("t", again, "second")
    with cp.resume("t") as run:
        assert run.pause("p") == "first"


def test_an_answer_survives_a_death_before_its_step_is_saved(cp):
    with pytest.raises(DecisionNeeded), cp.resume("t") as run:
        run.pause("p")
    cp.answer("t", "p", None)
    for _ in range(2):
        with died(cp, "t") as run:
            assert run.pause("p") is None
            raise Death


def test_two_questions_of_one_name_in_a_step(cp):
    def body():
        with cp.resume("t") as run:
            return run.pause("p", 1), run.pause("p", 2)

    for n in (1, 2):
        with pytest.raises(DecisionNeeded):
            body()
        cp.answer("t", "p", n * 10)
    assert body() == (10, 20)


def test_a_question_inside_a_tool_leaves_the_call_paused(cp, world):
    with pytest.raises(DecisionNeeded), cp.resume("t") as run:

        @tool(name="careful")
        def careful(x):
            if run.pause("really?", x) == "yes":
                return world.act(x)
            return "left alone"

        run.call(careful, 5)
    assert statuses(cp) == ["paused"]
    assert world.log == []
    cp.answer("t", "really?", "yes")
    with cp.resume("t") as run:
        assert run.call(careful, 5) == "done 1"
        run.save()
    assert statuses(cp) == ["succeeded"]


def test_a_tool_that_swallows_its_question_is_paused_all_the_same(cp, world):
    with pytest.raises(DecisionNeeded), cp.resume("t") as run:

        @tool(name="greedy")
        def greedy():
            try:
                run.pause("really?")
            except BaseException:
                return "went on"

        run.call(greedy)
    assert statuses(cp) == ["paused"]


# -- what ends a run is sticky


@pytest.mark.parametrize("how", ["in doubt", "pause", "lease"])
def test_nothing_is_committed_past_the_end_of_a_run(cp, world, how):
    """`except BaseException: pass` around everything."""
    act = declare(world)
    expected = {"in doubt": InDoubt, "pause": DecisionNeeded, "lease": LeaseLost}[how]
    with pytest.raises(expected), cp.resume("t") as run:
        run.state.messages.append("kept?")
        if how == "lease":
            cp.resume("t", steal=True).close()
        world.next = [OSError("lost")] if how == "in doubt" else []
        for use in (
            lambda: run.pause("p") if how == "pause" else run.call(act, 1),
            lambda: run.call(act, 2),
            lambda: run.call_many([act.bind(3)]),
            run.save,
            lambda: run.finish("done"),
            lambda: run.milestone("m"),
            lambda: run.pause("q"),
        ):
            with pytest.raises(RunEnded) as caught:
                use()
            assert isinstance(caught.value.error, expected)
    assert len(cp.list_checkpoints("t")) == 1
    assert len(world.log) == (1 if how == "in doubt" else 0)
    assert cp.load_latest("t").messages == []


def test_whoever_lost_the_lease_can_write_nothing(cp, world):
    """Invariant 4."""
    read, act = declare(world, "read"), declare(world)
    with pytest.raises(LeaseLost), cp.resume("t") as run:
        with cp.resume("t", steal=True) as thief:
            thief.state.messages.append("thief")
            thief.save()
            with pytest.raises(RunEnded):
                run.call(read)
            with pytest.raises(RunEnded):
                run.call(act)
        with pytest.raises(RunEnded):
            run.save()
    assert world.log == []
    assert cp.load_latest("t").messages == ["thief"]
    assert cp.calls("t") == []


# -- saving, steps, leases


def test_each_save_of_the_handle_ends_a_step(cp, world):
    act = declare(world)
    with cp.resume("t") as run:
        assert (run.state.step, run.state.seq, run.is_new) == (0, 1, True)
        run.call(act, 1)
        head = run.save(label="one")
        assert (head.seq, head.step, head.kind, head.label) == (2, 1, "step", "one")
        assert run.state.step == 1
        run.call(act, 1)
        run.milestone("draft")
        head = run.save()
        assert (head.kind, head.label, head.step) == ("milestone", "draft", 2)
        run.finish("result")
        run.save()
    assert [c.step for c in cp.calls("t")] == [0, 1]
    assert cp.status("t").status == "finished"
    assert len(world.log) == 2


def test_finish_takes_effect_with_the_save_of_its_step(cp):
    with cp.resume("t") as run:
        run.finish("too early")
    assert cp.status("t").status == "interrupted"


@pytest.mark.parametrize(("name", "value"), [("step", 7), ("seq", 9), ("branch", "b"), ("task_id", "u")])
def test_only_the_run_counts_steps(cp, name, value):
    with cp.resume("t") as run:
        before = getattr(run.state, name)
        setattr(run.state, name, value)
        with pytest.raises(InvalidState):
            run.save()
        setattr(run.state, name, before)
        assert run.save().step == 1


def test_a_save_that_raises_counts_no_step(url):
    with safepoint.open(url) as inner:
        store = Failing(inner.store)
        cp = safepoint.open(store)
        with cp.resume("t") as run:
            run.finish("r")
            before = (run.state.step, run.state.seq, run.status["steps_since_save"])
            store.before = lambda c: StoreFull("full")
            with pytest.raises(StoreFull):
                run.save()
            assert (run.state.step, run.state.seq, run.status["steps_since_save"]) == before
            run.state.agent_state["bad"] = object()
            store.before = lambda c: None
            with pytest.raises(RefusedType):
                run.save()
            del run.state.agent_state["bad"]
            assert run.save().step == 1
        assert inner.status("t").status == "finished"


def test_a_block_that_raises_is_kept_as_a_leaf(cp):
    error = ValueError("no")
    with pytest.raises(ValueError) as caught, cp.resume("t") as run:
        run.state.messages.append("half done")
        raise error
    assert caught.value is error
    assert "t@2" in error.__notes__[0]
    leaf, first = cp.list_checkpoints("t")
    assert (leaf.kind, leaf.parent_seq, leaf.label, first.seq) == ("failure", 1, "ValueError", 1)
    assert cp.load("t", seq=2).messages == ["half done"]
    assert cp.load_latest("t").messages == []
    assert (cp.status("t").status, cp.status("t").seq) == ("failed", 1)


def test_the_error_of_the_block_is_never_masked(cp):
    with pytest.raises(ValueError, match="mine"), cp.resume("t") as run:
        run.state.agent_state["bad"] = threading.Lock()
        raise ValueError("mine")
    assert cp.status("t").status == "failed"
    assert len(cp.list_checkpoints("t")) == 1
    with pytest.raises(ValueError, match="mine"), cp.resume("t") as run:
        cp.resume("t", steal=True).close()
        raise ValueError("mine")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), asyncio.CancelledError(), None])
def test_a_block_left_early_is_interrupted(cp, error):
    if error is None:
        with cp.resume("t"):
            pass
    else:
        with pytest.raises(type(error)), cp.resume("t"):
            raise error
    assert cp.status("t").status == "interrupted"
    assert len(cp.list_checkpoints("t")) == 1


def test_an_interrupt_right_after_the_context_was_left_lets_go_of_the_task(cp):
    with pytest.raises(KeyboardInterrupt), cp.resume("t") as run:
        current.reset(run._token)  # as far as it had come
        raise KeyboardInterrupt
    assert cp.status("t").status == "interrupted"
    cp.resume("t").close()


def test_a_held_task_is_refused_at_once_or_waited_for(cp):
    with cp.resume("t"):
        began = time.monotonic()
        with pytest.raises(LeaseHeld) as caught:
            cp.resume("t")
        assert time.monotonic() - began < 1
        assert caught.value.remedy
        with pytest.raises(LeaseHeld):
            cp.resume("t", wait=0.1)
    first = cp.resume("t")
    threading.Timer(0.2, first.close).start()
    with cp.resume("t", wait=10) as run:
        assert run.fence > first.fence


def test_a_run_that_is_dropped_lets_go(cp):
    run = cp.resume("t")
    del run
    import gc

    gc.collect()
    with cp.resume("t") as run:
        assert run.recovery.previous == "dead"


def test_a_run_without_an_id_makes_one(cp):
    with cp.resume() as a, cp.resume(None) as b:
        assert a.task_id < b.task_id or a.task_id != b.task_id
    assert len(cp.tasks()) == 2


def test_a_task_that_begins_has_the_state_type_it_was_opened_with(url):
    from tests.integration.test_verbs import Plan

    with safepoint.open(url, state_type=Plan) as cp, cp.resume("t") as run:
        assert run.state.agent_state == Plan()

    class NeedsMore(Plan):
        must: int

    with safepoint.open(url, state_type=NeedsMore) as cp, pytest.raises(UsageError, match="NeedsMore"):
        cp.resume("u")


def test_an_explicit_state_is_carried_on_by_a_run(cp):
    cp.save(State("t", messages=["kept"], step=4))
    with cp.resume("t") as run:
        assert (run.state.messages, run.state.step, run.is_new) == (["kept"], 4, False)
        assert run.save().parent_seq == 1


def test_status_of_a_run_tells_what_is_not_saved(cp):
    with cp.resume("t") as run:
        status = run.status
        assert (status["task_id"], status["step"], status["steps_since_save"], status["seq"]) == ("t", 0, 0, 1)
        assert status["ended"] is None
        assert run.metrics.attempt == 1
        assert repr(run) == "<Run t>"


def test_a_sync_run_does_not_block_an_event_loop(cp):
    async def main():
        with pytest.raises(UsageError, match="open_async"):
            cp.resume("t")
        with pytest.raises(UsageError, match="run_agent_async"):
            safepoint.run_agent(lambda run: None, store=cp)

    asyncio.run(main())
    assert cp.tasks() == []


def test_of_two_answers_one_stands(url):
    with safepoint.open(url) as inner:
        with pytest.raises(DecisionNeeded), inner.resume("t") as run:
            run.pause("p")
        store = Failing(inner.store)

        def first_come(commit):
            store.before = lambda c: None
            inner.answer("t", "p", "first")

        store.before = first_come
        with pytest.raises(safepoint.AlreadyAnswered):
            safepoint.open(store).answer("t", "p", "second")
        assert inner.pauses("t", status=None)[0].answer == "first"


def test_a_store_that_fails_at_the_release_masks_nothing(url, caplog, monkeypatch):
    with safepoint.open(url) as cp:
        monkeypatch.setattr(cp.store, "release", lambda *a: (_ for _ in ()).throw(safepoint.Unavailable("gone")))
        with pytest.raises(ValueError, match="mine"), cp.resume("t"):
            raise ValueError("mine")
        assert "could not be released" in caplog.text
        monkeypatch.undo()
        with cp.resume("t") as run:
            assert run.recovery.previous == "dead"

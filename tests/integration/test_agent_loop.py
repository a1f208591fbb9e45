"""``run_agent``, on each store: DESIGN 7, sentence by sentence."""

import logging
import re
import threading
from typing import Any

import pytest

import safepoint
from safepoint import (
    DecisionNeeded,
    Done,
    InDoubt,
    InvalidState,
    LeaseHeld,
    LeaseLost,
    NotDone,
    RefusedType,
    State,
    StepResult,
    StoreFull,
    UsageError,
    model,
    run_agent,
    tool,
)
from tests.support.runs import Death, Failing, died

CANARY = "c4n4ry"


def to(n, result="end", body=None):
    """A step that finishes as the n-th, and appends what it did."""

    def step(run):
        run.state.messages.append({"role": "assistant", "content": f"step {run.state.step}"})
        if body is not None:
            body(run)
        if run.state.step == n - 1:
            run.finish(result)

    return step


def never(run):
    raise AssertionError("no step is to run")


def contents(state):
    return [m["content"] for m in state.messages]


def heads(cp, task="t"):
    return [(c.seq, c.step, c.kind) for c in reversed(cp.list_checkpoints(task))]


# -- input


def test_a_new_task_is_saved_with_its_input_before_the_first_step(cp):
    def step(run):
        assert cp.load_latest("t").messages == run.state.messages == [{"role": "user", "content": "job"}]
        run.finish("done")

    outcome = run_agent(step, task_id="t", input="job", store=cp)
    assert (outcome.task_id, outcome.status, outcome.result, outcome.steps, outcome.turn) == ("t", "finished", "done", 1, "")
    assert outcome.pending == ()
    assert heads(cp) == [(1, 0, "step"), (2, 1, "step")]
    assert cp.status("t").status == "finished"


@pytest.mark.parametrize(
    ("given", "messages", "agent_state"),
    [
        ("text", [{"role": "user", "content": "text"}], {}),
        ({"role": "system", "content": "s"}, [{"role": "system", "content": "s"}], {}),
        ([{"role": "a"}, {"role": "b"}], [{"role": "a"}, {"role": "b"}], {}),
        ({"city": "Riga"}, [], {"input": {"city": "Riga"}}),
        ([1, 2], [], {"input": [1, 2]}),
        ([], [], {"input": []}),
        (7, [], {"input": 7}),
        (None, [], {}),
    ],
)
def test_where_an_input_goes(cp, given, messages, agent_state):
    run_agent(lambda run: run.finish(), task_id="t", input=given, store=cp)
    state = cp.load_latest("t")
    assert (state.messages, state.agent_state) == (messages, agent_state)
    assert run_agent(never, task_id="t", input=given, store=cp).status == "finished"


def test_an_input_without_a_place_is_refused_and_leaves_nothing(url):
    from tests.integration.test_verbs import Plan

    with safepoint.open(url, state_type=Plan) as cp:
        with pytest.raises(UsageError, match="no place"):
            run_agent(never, task_id="t", input={"city": "Riga"}, store=cp)
        with pytest.raises(RefusedType):
            run_agent(never, task_id="u", input={"lock": threading.Lock()}, store=cp)
        assert cp.load_latest("t") is None
        assert cp.tasks() == []


def fail_at(n):
    def body(run):
        if run.state.step == n:
            raise ZeroDivisionError

    return body


def test_an_unfinished_task_is_resumed_with_the_same_or_no_input(cp):
    for given in ("job", None, "job"):
        with pytest.raises(ZeroDivisionError):
            run_agent(to(5, body=fail_at(2)), task_id="t", input=given, store=cp)
    assert contents(cp.load_latest("t")) == ["job", "step 0", "step 1"]
    outcome = run_agent(to(5), task_id="t", store=cp)
    assert contents(outcome.state) == ["job", *(f"step {i}" for i in range(5))]
    assert outcome.recovery.mode == "head"


def test_another_input_is_refused_and_nothing_changed(cp):
    with pytest.raises(ZeroDivisionError):
        run_agent(to(3, body=fail_at(1)), task_id="t", input="job", store=cp)
    before = heads(cp)
    for other in ("other", ["job"], b"job"):
        with pytest.raises(UsageError) as caught:
            run_agent(never, task_id="t", input=other, store=cp)
        assert "another input" in str(caught.value)
    assert heads(cp) == before
    assert cp.status("t").status == "failed"


def test_a_finished_task_returns_its_stored_outcome_without_running(cp):
    run_agent(to(2, {"answer": 42}), task_id="t", input="job", store=cp)
    before = heads(cp)
    for given in ("job", None):
        outcome = run_agent(never, task_id="t", input=given, store=cp)
        assert (outcome.status, outcome.result, outcome.steps) == ("finished", {"answer": 42}, 2)
    with pytest.raises(UsageError, match="turn="):
        run_agent(never, task_id="t", input="other", store=cp)
    assert heads(cp) == before
    assert cp.status("t").attempts == 1, "no lease was taken"


@pytest.mark.parametrize(
    ("given", "other"), [(float("nan"), 1.0), ([1], [True]), ({"a": 1, "b": 2}, {"a": 1}), ((1, 2), [1, 2])]
)
def test_inputs_are_compared_by_value_and_type(cp, given, other):
    run_agent(lambda run: run.finish(), task_id="t", input=given, store=cp)
    assert run_agent(never, task_id="t", input=given, store=cp).status == "finished"
    with pytest.raises(UsageError):
        run_agent(never, task_id="t", input=other, store=cp)


def test_key_order_of_an_input_does_not_matter(cp):
    run_agent(lambda run: run.finish(), task_id="t", input={"a": 1, "b": 2}, store=cp)
    assert run_agent(never, task_id="t", input={"b": 2, "a": 1}, store=cp).status == "finished"


def test_a_finished_task_is_given_back_while_somebody_holds_it(cp):
    run_agent(to(1), task_id="t", store=cp)
    with cp.resume("t"):
        assert run_agent(never, task_id="t", store=cp).status == "finished"


# -- turns


def chat(run):
    run.finish(f"answer to {run.state.messages[-1]['content']}")


def test_a_chat_appends_one_input_a_turn(cp):
    one = run_agent(chat, task_id="t", input="hello", turn="m1", store=cp)
    two = run_agent(chat, task_id="t", input="more", turn="m2", store=cp)
    assert (one.turn, one.result, two.turn, two.result) == ("m1", "answer to hello", "m2", "answer to more")
    assert contents(two.state) == ["hello", "more"]
    assert run_agent(never, task_id="t", input="hello", turn="m1", store=cp).result == "answer to hello"
    assert run_agent(never, task_id="t", turn="m1", store=cp).result == "answer to hello"
    assert run_agent(never, task_id="t", store=cp).result == "answer to more", "without a name, the last one"
    with pytest.raises(UsageError):
        run_agent(never, task_id="t", input="other", turn="m1", store=cp)
    with pytest.raises(UsageError, match="needs an input"):
        run_agent(never, task_id="t", turn="m3", store=cp)
    assert contents(cp.load_latest("t")) == ["hello", "more"]


def test_an_unfinished_turn_is_resumed_before_the_next(cp):
    with pytest.raises(ZeroDivisionError):
        run_agent(lambda run: 1 / 0, task_id="t", input="first", turn="m1", store=cp)
    seen = []

    def step(run):
        seen.append(run.state.messages[-1]["content"])
        run.finish(seen[-1])

    outcome = run_agent(step, task_id="t", input="second", turn="m2", store=cp)
    assert seen == ["first", "second"]
    assert (outcome.turn, outcome.result) == ("m2", "second")
    assert run_agent(never, task_id="t", turn="m1", store=cp).result == "first"


def test_each_turn_has_its_own_steps(cp):
    run_agent(to(2), task_id="t", input="a", turn="1", store=cp)
    outcome = run_agent(to(5), task_id="t", input="b", turn="2", store=cp, max_steps=3)
    assert (outcome.status, outcome.steps) == ("finished", 5)


def test_a_task_of_explicit_saves_takes_an_input(cp):
    cp.save(State("t", messages=[{"role": "user", "content": "saved"}]))
    outcome = run_agent(to(1), task_id="t", input="job", store=cp)
    assert contents(outcome.state) == ["saved", "job", "step 0"]


# -- steps and saves


def test_step_counts_whole_steps(cp):
    seen = []
    outcome = run_agent(to(4, body=lambda run: seen.append(run.state.step)), task_id="t", store=cp)
    assert seen == [0, 1, 2, 3]
    assert outcome.steps == outcome.state.step == 4
    assert [h[1] for h in heads(cp)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", ["step", "seq", "branch", "task_id"])
def test_a_step_that_counts_for_itself_is_refused(cp, name):
    def step(run):
        setattr(run.state, name, 9 if name in {"step", "seq"} else "nine")

    with pytest.raises(InvalidState):
        run_agent(step, task_id="t", store=cp)
    assert cp.status("t").status == "failed"
    assert heads(cp)[0] == (1, 0, "step")
    assert cp.tasks() == [cp.status("t")]


def test_max_steps_counts_over_restarts(cp):
    ran = []

    def step(run):
        ran.append(run.state.step)
        if len(ran) == 2:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_agent(step, task_id="t", input="x", store=cp, max_steps=4)
    outcome = run_agent(step, task_id="t", store=cp, max_steps=4)
    assert (outcome.status, outcome.steps, ran) == ("out_of_steps", 4, [0, 1, 1, 2, 3])
    assert cp.status("t").status == "out_of_steps"
    assert cp.tasks(status="unfinished") == [], "it goes on only when someone calls again"
    assert run_agent(never, task_id="t", store=cp, max_steps=4).status == "out_of_steps"
    assert run_agent(to(6), task_id="t", store=cp, max_steps=9).steps == 6


@pytest.mark.parametrize("wrong", [{"max_steps": 0}, {"max_steps": True}, {"save_every": 0}, {"save_every": "often"}, {"hooks": [7]},
                                   {"turn": ""}, {"task_id": ""}, {"recover": "x"}, {"store": 7}])  # fmt: skip
def test_arguments_that_cannot_be_meant(cp, wrong):
    with pytest.raises(UsageError):
        run_agent(never, **({"store": cp} | wrong))
    assert cp.tasks() == []


def test_a_step_must_be_a_function_and_sync(cp):
    async def step(run):
        raise AssertionError

    wrongs: list[Any] = [None, "step", step]
    for wrong in wrongs:
        with pytest.raises(UsageError):
            run_agent(wrong, store=cp)
    assert cp.tasks() == []


def test_save_every_n_steps(cp):
    outcome = run_agent(to(7), task_id="t", store=cp, save_every=3)
    assert outcome.steps == 7
    assert [h[1] for h in heads(cp)] == [0, 3, 6, 7], "the end is saved whatever the count"


def test_save_at_milestones_only(cp):
    def body(run):
        if run.state.step == 2:
            run.milestone("half")

    run_agent(to(5, body=body), task_id="t", store=cp, save_every="milestone")
    assert heads(cp) == [(1, 0, "step"), (2, 3, "milestone"), (3, 5, "step")]
    assert cp.list_checkpoints("t")[1].label == "half"


def test_a_milestone_is_saved_though_the_count_is_not_due(cp):
    run_agent(to(4, body=lambda run: run.milestone("m") if run.state.step == 0 else None), task_id="t", store=cp, save_every=3)
    assert heads(cp) == [(1, 0, "step"), (2, 1, "milestone"), (3, 4, "step")]
    with pytest.raises(UsageError, match="label"):
        run_agent(lambda run: run.milestone(""), task_id="u", store=cp)


def test_what_is_not_saved_is_served_from_the_journal(cp):
    log: list[int] = []
    dead: list[int] = []

    @tool(name="once")
    def once(x):
        log.append(x)
        return x

    def body(run):
        assert once(run.state.step) == run.state.step
        if run.state.step == 3 and not dead:
            dead.append(1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_agent(to(6, body=body), task_id="t", store=cp, save_every=100)
    assert heads(cp) == [(1, 0, "step")]
    assert [p.action for p in cp.plan("t").calls] == ["reuse"] * 4
    outcome = run_agent(to(6, body=body), task_id="t", store=cp, save_every=100)
    assert outcome.steps == 6
    assert log == [0, 1, 2, 3, 4, 5]


def test_a_failure_in_an_unsaved_step_that_was_gone_past_stays_one(cp):
    tries: list[int] = []
    dead: list[int] = []

    @tool(effect="read", name="flaky")
    def flaky():
        tries.append(1)
        raise OSError

    def body(run):
        if run.state.step == 0:
            with pytest.raises(safepoint.CallFailed):
                flaky()
        elif not dead:
            dead.append(1)
            okay()
            raise KeyboardInterrupt

    @tool(effect="read", name="okay")
    def okay():
        return 1

    with pytest.raises(KeyboardInterrupt):
        run_agent(to(3, body=body), task_id="t", store=cp, save_every=100)
    assert [p.action for p in cp.plan("t").calls] == ["raise", "reuse"]
    run_agent(to(3, body=body), task_id="t", store=cp, save_every=100)
    assert tries == [1]


def test_run_save_is_for_the_handle(cp):
    with pytest.raises(UsageError, match="milestone"):
        run_agent(lambda run: run.save(), task_id="t", store=cp)
    assert cp.status("t").status == "failed"


# -- pure steps


def test_a_pure_step_gives_what_changed(cp):
    def step(state: State) -> StepResult:
        n = state.agent_state.get("n", 0)
        return StepResult([{"role": "assistant", "content": n}], {"n": n + 1}, done=n == 2, result=n)

    outcome = run_agent(step, task_id="t", input="x", store=cp)
    assert (outcome.result, outcome.state.agent_state, contents(outcome.state)) == (2, {"n": 3}, ["x", 0, 1, 2])


def test_a_pure_step_of_a_typed_state_and_with_text_annotations(url):
    from tests.integration.test_verbs import Plan

    def step(state: "safepoint.State") -> "StepResult":
        return StepResult(updates={"done": state.agent_state.done + 1}, done=state.agent_state.done == 1)

    with safepoint.open(url, state_type=Plan) as cp:
        assert run_agent(step, store=cp).state.agent_state == Plan(done=2)


def test_tools_called_in_a_pure_step_are_journaled(cp):
    @tool(name="in-pure")
    def act(x):
        return x * 2

    def step(state: State):
        return StepResult(done=True, result=act(4))

    assert run_agent(step, task_id="t", store=cp).result == 8
    assert [c.tool for c in cp.calls("t")] == ["in-pure"]


@pytest.mark.parametrize("junk", [None, {"messages": []}, 7])
def test_a_pure_step_that_returns_junk(cp, junk):
    def step(state: State):
        return junk

    with pytest.raises(UsageError, match="StepResult"):
        run_agent(step, task_id="t", store=cp)
    assert cp.status("t").status == "failed"


def test_a_result_for_nobody_is_refused(cp):
    async def forgotten(run):
        raise AssertionError

    def not_awaited(run):
        return forgotten(run)

    for step in (lambda run: StepResult(done=True), not_awaited):
        with pytest.raises(UsageError, match="returned"):
            run_agent(step, store=cp)


# -- hooks


class Hook:
    def __init__(self, cp):
        self.cp = cp
        self.log = []

    def on_restore(self, run):
        self.log.append(("restore", run.state.step, run.recovery.mode))

    def before_step(self, run):
        self.log.append(("before", run.state.step))
        return {"hint": f"for {run.state.step}"}

    def after_commit(self, run, checkpoint):
        assert self.cp.load("t", seq=checkpoint.seq).step == checkpoint.step, "it is durable"
        self.log.append(("after", checkpoint.seq, checkpoint.step))


def test_hooks_see_restores_steps_and_durable_saves(cp):
    hook, hints = Hook(cp), []
    run_agent(to(4, body=lambda run: hints.append(dict(run.context))), task_id="t", store=cp, hooks=[hook], save_every=2)
    assert hook.log == [
        ("restore", 0, "new"), ("before", 0), ("before", 1), ("after", 2, 2), ("before", 2), ("before", 3), ("after", 3, 4),
    ]  # fmt: skip
    assert hints == [{"hint": f"for {i}"} for i in range(4)]
    loaded = cp.load_latest("t")
    assert "hint" not in repr((loaded.messages, loaded.agent_state, loaded.metadata)), "context is not saved"


def test_after_commit_is_not_told_of_a_save_that_failed(url):
    with safepoint.open(url) as inner:
        store = Failing(inner.store)
        cp = safepoint.open(store)
        hook = Hook(inner)
        store.before = lambda c: StoreFull("full") if c.checkpoint and c.checkpoint.step else None
        with pytest.raises(StoreFull):
            run_agent(to(2), task_id="t", store=cp, hooks=[hook])
        assert [e[0] for e in hook.log] == ["restore", "before"]
        assert inner.status("t").status == "interrupted"


@pytest.mark.parametrize("name", ["on_restore", "before_step", "after_commit"])
def test_a_hook_that_raises_is_heard(cp, name):
    class Broken:
        pass

    def broken(self, *args):
        raise LookupError("hook")

    setattr(Broken, name, broken)
    with pytest.raises(LookupError, match="hook"):
        run_agent(to(3), task_id="t", store=cp, hooks=[Broken()])
    assert run_agent(to(3), task_id="t", store=cp).status == "finished"


# -- a step that raises


def test_a_failed_step_is_kept_as_a_leaf_and_thrown_away(cp):
    error = ValueError(CANARY)

    def step(run):
        run.state.messages.append("half")
        run.state.agent_state["half"] = True
        if run.state.step == 1:
            raise error

    with pytest.raises(ValueError) as caught:
        run_agent(step, task_id="t", store=cp)
    assert caught.value is error
    assert "t@3" in error.__notes__[0]
    assert CANARY not in error.__notes__[0]
    leaf = cp.list_checkpoints("t")[0]
    assert (leaf.kind, leaf.seq, leaf.step, leaf.parent_seq) == ("failure", 3, 1, 2)
    assert cp.load("t", seq=3).messages == ["half", "half"]
    info = cp.status("t")
    assert (info.status, info.seq, info.reason) == ("failed", 2, "ValueError")
    assert cp.load_latest("t").messages == ["half"]
    assert cp.tasks(status="unfinished") == []
    outcome = run_agent(lambda run: run.finish(list(run.state.messages)), task_id="t", store=cp)
    assert outcome.result == ["half"], "it goes on from the step before"


def test_keeping_the_leaf_masks_nothing(cp):
    def step(run):
        run.state.agent_state["lock"] = threading.Lock()
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as caught:
        run_agent(step, task_id="t", store=cp)
    assert not hasattr(caught.value, "__notes__")
    assert cp.status("t").status == "failed"
    assert len(heads(cp)) == 1


def test_a_full_store_masks_nothing_either(url):
    with safepoint.open(url) as inner:
        store = Failing(inner.store)
        cp = safepoint.open(store)

        def step(run):
            store.before = lambda c: StoreFull("full")
            raise ValueError("mine")

        with pytest.raises(ValueError, match="mine"):
            run_agent(step, task_id="t", store=cp)
        assert inner.status("t").status == "failed"


def test_a_state_that_cannot_be_stored_fails_its_step(cp):
    def step(run):
        run.state.agent_state["a"] = {"b": [threading.Lock()]}

    with pytest.raises(RefusedType) as caught:
        run_agent(step, task_id="t", store=cp)
    assert "lock" in str(caught.value)
    assert (cp.status("t").status, cp.status("t").seq) == ("failed", 1)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), Death()])
def test_an_interrupted_task_is_not_failed(cp, error):
    def step(run):
        raise error

    with pytest.raises(type(error)) as caught:
        run_agent(step, task_id="t", store=cp)
    assert caught.value is error
    assert cp.status("t").status == "interrupted"
    assert len(heads(cp)) == 1
    assert [t.task_id for t in cp.tasks(status="unfinished")] == ["t"]
    assert run_agent(to(1), task_id="t", store=cp).status == "finished"


def test_ctrl_c_in_a_write_comes_out_as_itself(cp):
    said = []

    def look(call):
        said.append(call)
        return Done("had happened")

    @tool(verify=look, settle_after=0, name="interrupted")
    def act():
        raise KeyboardInterrupt

    for swallow in (False, True):
        task = f"t{swallow}"

        def step(run, swallow=swallow):
            try:
                act()
            except KeyboardInterrupt:
                if not swallow:
                    raise
            run.finish()

        with pytest.raises(KeyboardInterrupt):
            run_agent(step, task_id=task, store=cp)
        assert cp.status(task).status == "interrupted"
        assert run_agent(lambda run: run.finish(act()), task_id=task, store=cp).result == "had happened"


# -- what ends a run


def pays(cp, log, **options):
    @tool(name="pay", **options)
    def pay(x):
        log.append(x)
        raise OSError("lost reply")

    def step(run):
        try:
            result = pay(1)
        except Exception as error:
            result = f"error: {error}"
        run.state.messages.append(result)
        run.finish(result)

    return step


def test_a_call_in_doubt_makes_the_task_wait(cp):
    log: list[Any] = []
    step = pays(cp, log)
    for _ in range(3):
        outcome = run_agent(step, task_id="t", input="x", store=cp)
        assert (outcome.status, outcome.result, outcome.steps) == ("waiting", None, 0)
        assert [(c.no, c.tool) for c in outcome.pending] == [(1, "pay")]
    assert log == [1]
    assert cp.status("t").status == "waiting"
    assert cp.tasks(status="unfinished") == []
    cp.resolve("t", 1, Done("receipt"))
    assert [t.task_id for t in cp.tasks(status="unfinished")] == ["t"]
    assert run_agent(step, task_id="t", store=cp).result == "receipt"
    assert log == [1]


def test_a_step_that_swallows_the_end_of_its_run_commits_nothing(cp):
    log: list[Any] = []
    pay = pays(cp, log)

    def greedy(run):
        for _ in range(3):
            try:
                pay(run)
            except BaseException:
                pass

    def raises(run):
        try:
            pay(run)
        except BaseException:
            raise ValueError("made of it") from None

    for step in (greedy, raises):
        assert run_agent(step, task_id="t", store=cp).status == "waiting"
    assert heads(cp) == [(1, 0, "step")]
    assert log == [1]


def test_a_question_makes_the_task_wait_for_its_answer(cp):
    def step(run):
        answer = run.pause("go on?", {"cost": 3})
        run.finish(answer)

    for _ in range(2):
        outcome = run_agent(step, task_id="t", store=cp)
        assert outcome.status == "waiting"
        (pause,) = outcome.pending
        assert (pause.name, pause.question) == ("go on?", {"cost": 3})
    cp.answer("t", pause, "yes")
    assert run_agent(step, task_id="t", store=cp).result == "yes"
    assert cp.pauses("t") == []


def test_a_question_in_an_unsaved_step(cp):
    def step(run):
        if run.state.step == 2:
            run.finish(run.pause("p"))

    assert run_agent(step, task_id="t", store=cp, save_every=10).steps == 0  # of those that are stored
    assert run_agent(never, task_id="t", store=cp).status == "waiting"
    cp.answer("t", "p", 5)
    assert run_agent(step, task_id="t", store=cp, save_every=10).result == 5


def test_a_lost_lease_is_raised(cp):
    def step(run):
        cp.resume("t", steal=True).close()
        run.state.messages.append("past it")

    with pytest.raises(LeaseLost):
        run_agent(step, task_id="t", store=cp)
    assert heads(cp) == [(1, 0, "step")]


def test_a_held_task_is_refused(cp):
    with cp.resume("t"):
        with pytest.raises(LeaseHeld):
            run_agent(never, task_id="t", store=cp)
        with pytest.raises(LeaseHeld):
            run_agent(never, task_id="t", store=cp, wait=0.1)
        outcome = run_agent(lambda run: run.finish(run.recovery.previous), task_id="t", store=cp, steal=True)
        assert outcome.result == "presumed_dead"


def test_agents_inside_of_a_tool_are_tasks_of_their_own(cp):
    @tool(effect="idempotent", name="delegate")
    def delegate(x):
        return run_agent(lambda run: run.finish(x * 2), task_id=f"child-{x}", store=cp).result

    assert run_agent(lambda run: run.finish(delegate(4)), task_id="t", store=cp).result == 8
    assert [t.task_id for t in cp.tasks(status="finished")] == ["child-4", "t"]


# -- plan


def test_what_plan_says_is_what_happens(cp):
    ran: list[str] = []
    says: list[NotDone] = []

    @model(name="p-model")
    def ask(n):
        ran.append("ask")
        return n

    def look(call):
        ran.append("verify")
        return says[0]

    @tool(name="p-write", verify=look, settle_after=0)
    def write(x):
        ran.append("write")
        if len(says) == 0:
            says.append(NotDone())
            raise KeyboardInterrupt
        return x

    @tool(effect="read", name="p-read")
    def read():
        ran.append("read")
        return 1

    def step(run):
        ask(1)
        read()
        write(2)
        run.finish()

    with pytest.raises(KeyboardInterrupt):
        run_agent(step, task_id="t", input="x", store=cp)
    plan = cp.plan("t")
    assert (plan.does, plan.seq, plan.step, plan.skipped) == ("carry on", 1, 0, ())
    assert [(p.call.tool, p.action) for p in plan.calls] == [("p-model", "reuse"), ("p-read", "reuse"), ("p-write", "verify")]
    ran.clear()
    assert run_agent(step, task_id="t", store=cp).recovery.seq == plan.seq
    assert ran == ["verify", "write"]
    assert cp.plan("t").does == "nothing"


def test_plan_says_that_the_task_is_held(cp):
    with cp.resume("t"):
        assert (cp.plan("t").does, cp.plan("t").status) == ("refused", "running")


# -- metrics and the log


def test_a_run_can_be_read_from_its_log_alone(cp, caplog):
    caplog.set_level(logging.INFO, "safepoint")
    tries = []

    @model(name="chatty", retry=safepoint.Retry(2, backoff=0))
    def ask(messages):
        tries.append(1)
        if len(tries) == 2:
            raise OSError(CANARY)
        return {"content": CANARY, "usage": {"prompt_tokens": 10, "completion_tokens": 2}}

    def step(run):
        run.state.agent_state["phase"] = f"phase-{run.state.step}"
        ask(run.state.messages)
        if run.state.step == 1:
            run.finish(CANARY)

    run_agent(step, task_id="t", input=CANARY, store=cp)
    lines = [r.getMessage() for r in caplog.records if r.name == "safepoint" and r.levelno == logging.INFO]
    assert len(lines) == 3
    for line, seq, step_no, phase, calls, retries, tokens in zip(
        lines, (1, 2, 3), (0, 1, 2), ("-", "phase-0", "phase-1"), (0, 1, 3), (0, 0, 1), ("0+0", "10+2", "20+4"), strict=True
    ):
        wanted = f"saved t@{seq} step={step_no} kind=step phase={phase} calls={calls} retries={retries} errors={retries} tokens={tokens}"
        assert line.startswith(wanted), line
        assert re.search(r"last=\S+ \d+ms save=[\d.]+ms bytes=\d+ attempt=1$", line), line
    metrics = cp.list_checkpoints("t")[0].metrics
    assert (metrics.phase, metrics.calls, metrics.retries, metrics.errors, metrics.last_call) == ("phase-1", 3, 1, 1, "chatty")
    assert (metrics.tokens_in, metrics.tokens_out, metrics.attempt) == (20, 4, 1)
    assert metrics.bytes_written > 0
    assert CANARY not in caplog.text


def test_a_resume_is_one_line_of_the_log(cp, caplog):
    with pytest.raises(ZeroDivisionError):
        run_agent(to(3, body=fail_at(1)), task_id="t", store=cp)
    caplog.clear()
    caplog.set_level(logging.INFO, "safepoint")
    run_agent(to(3), task_id="t", store=cp)
    (line,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("resumed")]
    assert re.fullmatch(r"resumed t@2 \(schema 1, saved \d s ago, last holder released\)", line)


def test_the_run_writes_nothing_into_the_users_metadata(cp):
    run_agent(to(2, body=lambda run: run.state.metadata.update(mine=1)), task_id="t", store=cp)
    assert cp.load_latest("t").metadata == {"mine": 1}


def test_phase_may_be_said_by_the_run(cp):
    def step(run):
        run.phase = "thinking"
        run.finish()

    run_agent(step, task_id="t", store=cp)
    assert cp.list_checkpoints("t")[0].metrics.phase == "thinking"


def test_no_text_shows_what_went_through_a_run(cp, caplog):
    caplog.set_level(logging.DEBUG)
    shown = []

    def look(call):
        shown.append(repr(call))
        return Done(CANARY)

    @tool(name="secretive", verify=look, settle_after=0)
    def act(x):
        raise OSError("lost")

    def step(run):
        shown.extend(
            [repr(run), repr(run.state), repr(run.metrics), repr(run.recovery), str(run.status), repr(act.bind(CANARY))]
        )
        run.call(act, CANARY)
        run.state.agent_state["s"] = CANARY
        run.finish(run.pause("q", CANARY))

    waiting = run_agent(step, task_id="t", input=CANARY, store=cp)
    shown += [
        repr(waiting),
        repr(waiting.pending),
        repr(cp.calls("t")),
        repr(cp.pauses("t")),
        repr(cp.plan("t")),
        str(cp.plan("t")),
    ]
    shown.append(repr(cp.answer("t", "q", CANARY)))
    shown.append(repr(run_agent(step, task_id="t", store=cp)))
    with pytest.raises(UsageError) as caught:
        run_agent(step, task_id="t", input=CANARY * 2, store=cp)
    shown.append(str(caught.value))
    with pytest.raises(safepoint.SafepointError) as refused:
        cp.answer("t", "q", CANARY)
    shown.append(str(refused.value))
    assert not [text for text in shown if CANARY in text]
    assert CANARY not in caplog.text


def test_the_default_store_and_a_url_are_opened_and_closed(url, tmp_path):
    assert run_agent(to(1), input="x").status == "finished"
    path = f"sqlite:///{tmp_path}/by-url.db"
    assert run_agent(to(2), task_id="t", store=path).status == "finished"
    with safepoint.open(path) as cp:
        assert cp.status("t").agent.endswith("step")
    assert run_agent(never, task_id="t", store=path).result == "end"


def test_waiting_runs_raise_their_errors_through_the_handle(cp):
    """The loop returns what the handle raises."""
    with pytest.raises(DecisionNeeded), cp.resume("t") as run:
        run.pause("p")
    with pytest.raises(InDoubt), cp.resume("u") as run:
        pays(cp, [])(run)


def test_a_finished_task_that_a_run_died_on_is_finished_all_the_same(cp):
    run_agent(to(1), task_id="t", input="job", store=cp)
    with died(cp, "t"):
        raise Death
    assert cp.status("t").status == "interrupted"
    assert run_agent(never, task_id="t", input="job", store=cp).result == "end"
    assert cp.status("t").status == "finished"


def test_steps_that_are_not_saved_yet_are_saved_when_they_run_out(cp):
    outcome = run_agent(to(9), task_id="t", store=cp, max_steps=5, save_every=3)
    assert (outcome.status, outcome.steps) == ("out_of_steps", 5)
    assert [h[1] for h in heads(cp)] == [0, 3, 5]
    assert cp.status("t").status == "out_of_steps"


def test_a_step_whose_parameters_nobody_knows_is_a_step_of_a_run(cp):
    def step(*anything):
        anything[0].finish(1)

    assert run_agent(step, store=cp).result == 1

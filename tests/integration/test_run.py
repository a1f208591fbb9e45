"""The handle and its calls, on each store: DESIGN 6, behaviour by behaviour.

``Death`` drops a run as a kill would; what a real kill leaves behind is tested in tests/crash.
"""

# ruff: noqa: PT012 - a run is a context manager, and what leaving it raises is what is tested

import asyncio
import threading
import time

import pytest

import safepoint
from safepoint import (
    CallFailed,
    CallInProgress,
    CallMismatch,
    Conflict,
    DecisionNeeded,
    DidNotHappen,
    Done,
    InDoubt,
    InvalidState,
    LeaseHeld,
    LeaseLost,
    NotDone,
    RefusedType,
    Retry,
    RunEnded,
    State,
    StoreFull,
    Unavailable,
    Unknown,
    UsageError,
    model,
    tool,
)
from tests.support.runs import Death, Failing, died

CANARY = "c4n4ry"


class World:
    """What happened outside, and what happens next: an exception to raise, or a value to return."""

    def __init__(self):
        self.log = []
        self.next = []
        self.says = NotDone()
        self.asked = []

    def act(self, *what):
        self.log.append(what)
        outcome = self.next.pop(0) if self.next else f"done {len(self.log)}"
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def verify(self, call):
        self.asked.append(call)
        if isinstance(self.says, BaseException):
            raise self.says
        return self.says


@pytest.fixture
def world():
    return World()


def declare(world, effect="write", *, name=None, verify=False, **options):
    if verify:
        options["verify"] = world.verify
        options.setdefault("settle_after", 0)

    @tool(effect=effect, name=name or f"test-{effect}", **options)
    def act(x=0, *more):
        return world.act(x, *more)

    return act


def statuses(cp, task="t"):
    return [c.status for c in cp.calls(task)]


# -- the decision table, as behaviour


@pytest.mark.parametrize("effect", ["read", "idempotent", "write"])
def test_a_recorded_success_is_served_and_not_executed(cp, world, effect):
    act = declare(world, effect)
    with died(cp, "t") as run:
        assert run.call(act, 1) == "done 1"
        raise Death
    with cp.resume("t") as run:
        assert run.recovery.reused == 1
        assert run.call(act, 1) == "done 1"
        assert world.log == [(1,)]
        run.save()
    assert statuses(cp) == ["succeeded"]


def test_a_failure_that_the_step_went_past_is_raised_again(cp, world):
    act = declare(world, "read")
    world.next = [ValueError("first"), "second"]

    def body(run):
        with pytest.raises(CallFailed) as caught:
            run.call(act, 1)
        assert run.call(act, 2) == "second"
        return caught.value

    with died(cp, "t") as run:
        live = body(run)
        raise Death
    with died(cp, "t") as run:
        replayed = body(run)
        raise Death
    with cp.resume("t") as run:
        body(run)
    assert world.log == [(1,), (2,)]
    assert (live.type, live.message, live.call) == (replayed.type, replayed.message, replayed.call)
    assert str(live) == str(replayed)
    assert isinstance(live.__cause__, ValueError)
    assert (live.type, live.message) == ("builtins.ValueError", "first")


def test_a_failure_that_ended_the_step_is_executed_anew(cp, world):
    act = declare(world, "read")
    world.next = [ValueError("once"), "then"]
    with pytest.raises(CallFailed), cp.resume("t") as run:
        run.call(act)
    with cp.resume("t") as run:
        assert run.call(act) == "then"
    assert [c.attempts for c in cp.calls("t")] == [2]


def test_a_failure_is_not_gone_past_by_a_call_of_another_attempt(cp, world):
    """A call that a later attempt makes before it comes to the failed one again has not seen it."""
    act, other = declare(world, "read"), declare(world, "read", name="other")
    world.next = [ValueError("once")]
    with pytest.raises(CallFailed), cp.resume("t") as run:
        run.call(act)
    with cp.resume("t") as run:
        run.call(other, "new in this attempt")
        assert run.call(act) == "done 3"


@pytest.mark.parametrize("effect", ["read", "idempotent"])
def test_what_may_be_repeated_is_after_a_death(cp, world, effect):
    keys = []

    @tool(effect=effect, name="repeatable")
    def act(x, *, idempotency_key, fence):
        keys.append((idempotency_key, fence))
        return world.act(x)

    world.next = [Death()]
    with died(cp, "t") as run:
        run.call(act, 1)
    assert [(p.action, p.call.status) for p in cp.plan("t").calls] == [("repeat", "started")]
    with cp.resume("t") as run:
        assert run.call(act, 1) == "done 2"
        assert run.fence == keys[1][1] > keys[0][1]
    assert keys[0][0] == keys[1][0], "the same key, so that the receiver can tell"


@pytest.mark.parametrize(
    ("says", "then"),
    [
        (Done("mail 7"), "reuse"),
        (NotDone(), "repeat"),
        (Unknown("no index"), "park"),
        (OSError("down"), "park"),
        ("yes", "park"),
    ],
)
def test_an_open_write_goes_by_its_verifier(cp, world, says, then):
    act = declare(world, verify=True)
    world.next = [Death()]
    with died(cp, "t") as run:
        run.call(act, 1)
    assert cp.plan("t").calls[0].action == "verify"
    world.says = says
    if then == "park":
        with pytest.raises(InDoubt) as caught:
            cp.resume("t")
        assert caught.value.details["calls"] == [1]
        assert cp.status("t").status == "waiting"
        assert cp.status("t").pending == 1
        assert statuses(cp) == ["in_doubt"]
    else:
        with cp.resume("t") as run:
            assert run.recovery.verified == 1
            assert run.call(act, 1) == ("mail 7" if then == "reuse" else "done 2")
    assert len(world.log) == (2 if then == "repeat" else 1)
    (asked,) = world.asked
    assert (asked.arguments, asked.tool, asked.attempts) == ({"x": 1, "more": ()}, "test-write", 1)
    assert asked.idempotency_key


def test_an_open_write_without_a_verifier_waits_for_a_person(cp, world):
    act = declare(world)
    world.next = [Death()]
    with died(cp, "t") as run:
        run.call(act, 1)
    assert cp.plan("t").does == "wait"
    for _ in range(2):
        with pytest.raises(InDoubt, match="resolve"):
            cp.resume("t")
    assert world.log == [(1,)]
    call = cp.resolve("t", 1, Done("found it"))
    assert (call.status, call.result) == ("succeeded", "found it")
    assert cp.tasks(status="unfinished")[0].task_id == "t"
    with cp.resume("t") as run:
        assert run.call(act, 1) == "found it"
    assert world.log == [(1,)]


def test_a_person_says_that_it_did_not_happen(cp, world):
    act = declare(world)
    world.next = [Death()]
    with died(cp, "t") as run:
        run.call(act, 1)
    with pytest.raises(InDoubt):
        cp.resume("t")
    cp.resolve("t", cp.calls("t")[0], NotDone())
    with cp.resume("t") as run:
        assert run.call(act, 1) == "done 2"


def test_resolve_takes_only_calls_in_doubt_and_only_once(cp, world):
    act = declare(world)
    world.next = ["fine", Death()]
    with died(cp, "t") as run:
        run.call(act, 1)
        run.call(act, 2)
    with pytest.raises(UsageError, match="succeeded"):
        cp.resolve("t", 1, NotDone())
    with pytest.raises(UsageError, match="started"):
        cp.resolve("t", 2, NotDone())
    with pytest.raises(InDoubt):
        cp.resume("t")
    with pytest.raises(UsageError):
        cp.resolve("t", 2, True)
    with pytest.raises(RefusedType):
        cp.resolve("t", 2, Done(threading.Lock()))
    cp.resolve("t", 2, NotDone())
    with pytest.raises(UsageError):
        cp.resolve("t", 2, Done())


def test_of_two_people_one_is_heard(url, world):
    act = declare(world)
    world.next = [Death()]
    with safepoint.open(url) as inner:
        with died(inner, "t") as run:
            run.call(act, 1)
        with pytest.raises(InDoubt):
            inner.resume("t")
        store = Failing(inner.store)
        late = safepoint.open(store)

        def first_come(commit):
            store.before = lambda c: None
            inner.resolve("t", 1, Done("first"))

        store.before = first_come
        with pytest.raises(Conflict):
            late.resolve("t", 1, NotDone())
        assert inner.calls("t")[0].result == "first"


def test_an_old_idempotency_key_makes_a_write_of_it(cp, world):
    act = declare(world, "idempotent", key_ttl=0.01)
    world.next = [Death()]
    with died(cp, "t") as run:
        run.call(act)
    time.sleep(0.03)
    with pytest.raises(InDoubt, match="remembers its key"):
        cp.resume("t")


def test_a_verifier_is_not_asked_before_the_effect_had_time_to_settle(cp, world):
    act = declare(world, verify=True, settle_after=0.3)
    world.next = [Death()]
    with died(cp, "t") as run:
        run.call(act)
    world.says = Done(1)
    began = time.monotonic()
    with cp.resume("t"):
        assert time.monotonic() - began >= 0.3


def test_a_verifier_may_be_async(cp, world):
    async def look(call):
        await asyncio.sleep(0)
        return Done("async")

    @tool(verify=look, settle_after=0, name="verified-async")
    def act():
        return world.act()

    world.next = [Death()]
    with died(cp, "t") as run:
        run.call(act)
    with cp.resume("t") as run:
        assert run.call(act) == "async"


def test_a_verifier_that_this_process_does_not_know_is_named(cp, world):
    act = declare(world, name="forgotten", verify=True)
    world.next = [Death()]
    with died(cp, "t") as run:
        run.call(act)
    del act
    import gc

    gc.collect()
    with pytest.raises(UsageError, match="forgotten"):
        cp.resume("t")
    assert cp.status("t").status == "interrupted"
    assert statuses(cp) == ["started"]


def test_after_a_takeover_not_done_is_no_permission(cp, world):
    """Invariant 5: the holder that was taken over is inside of its tool, and nobody knows what it will still do."""

    @tool(name="taken", verify=world.verify, settle_after=0)
    def act(x):
        world.act(x)
        with pytest.raises(InDoubt, match="taken over alive"):
            cp.resume("t", steal=True)

    with pytest.raises(LeaseLost), cp.resume("t") as run:
        run.call(act, 1)
    assert statuses(cp) == ["in_doubt"]
    assert len(world.log) == len(world.asked) == 1


@pytest.mark.parametrize("policy", [{"verify_is_final": True}, {"receiver_dedups": True}])
def test_after_a_takeover_not_done_counts_where_nothing_can_come_later(cp, world, policy):
    @tool(name="taken", verify=world.verify, settle_after=0, **policy)
    def act(x, *, idempotency_key):
        if len(world.log) == 0:
            world.act(x)
            with cp.resume("t", steal=True) as thief:
                assert thief.recovery.previous == "presumed_dead"
                assert thief.call(act, 1) == "done 2"
                thief.save()
            return "too late"
        return world.act(x)

    with pytest.raises(LeaseLost), cp.resume("t") as run:
        run.call(act, 1)
    assert [(c.status, c.result) for c in cp.calls("t")] == [("succeeded", "done 2")]


# -- identity


def test_equal_calls_are_the_kth_of_their_kind(cp, world):
    act = declare(world, "idempotent")
    with died(cp, "t") as run:
        assert [run.call(act, 1), run.call(act, 2), run.call(act, 1)] == ["done 1", "done 2", "done 3"]
        raise Death
    with cp.resume("t") as run:
        assert [run.call(act, 2), run.call(act, 1), run.call(act, 1), run.call(act, 1)] == [
            "done 2",
            "done 1",
            "done 3",
            "done 4",
        ]


def test_what_means_the_same_is_the_same_call(cp, world):
    act = declare(world, "idempotent")
    with died(cp, "t") as run:
        run.call(act, {"a": 1, "b": [2]})
        run.call(act, x=5)
        run.call_tool(act, '{"x": 7}')
        run.call(act)
        raise Death
    with cp.resume("t") as run:
        assert run.call(act, {"b": [2.0], "a": 1.0}) == "done 1"
        assert run.call(act, 5.0) == "done 2"
        assert run.call(act, 7) == "done 3"
        assert run.call(act, 0) == "done 4", "defaults are bound"
        assert run.call(act, {"a": True, "b": [2]}) == "done 5", "True is not 1"


def test_an_id_counts_within_one_reply(cp, world):
    @model(name="asked")
    def ask(n):
        return {"n": n}

    act = declare(world)
    with cp.resume("t") as run:
        run.call(ask, 1)
        assert run.call(act, "a", call_id="call_0") == "done 1"
        assert run.call(act, "a", call_id="call_0") == "done 1", "asked for twice, it is still that call"
        with pytest.raises(CallMismatch) as caught:
            run.call(act, CANARY, call_id="call_0")
        assert CANARY not in str(caught.value)
        run.call(ask, 2)
        assert run.call(act, "b", call_id="call_0") == "done 2"
        run.save()
    assert [c.call_id for c in cp.calls("t")] == [None, "call_0", None, "call_0"]


def test_a_model_asked_anew_gives_other_ids(cp, world):
    act = declare(world)
    with died(cp, "t") as run:
        run.call(act, "a", call_id="x1")
        run.call(act, "a", call_id="x2")
        raise Death
    with cp.resume("t") as run:
        assert run.call(act, "a", call_id="y1") == "done 1"
        assert run.call(act, "a", call_id="y2") == "done 2"
        assert run.call(act, "a", call_id="y1") == "done 1"
        assert run.call(act, "a", call_id="y3") == "done 3"


def test_a_call_under_way_is_not_made_twice(cp):
    started, go = threading.Event(), threading.Event()
    count = []

    @tool(name="slow")
    def slow(x):
        count.append(x)
        started.set()
        assert go.wait(10)
        return x

    with cp.resume("t") as run:
        results = []
        thread = threading.Thread(target=lambda: results.append(run.call(slow, 1, call_id="a")))
        thread.start()
        assert started.wait(10)
        with pytest.raises(CallInProgress):
            run.call(slow, 1, call_id="a")
        go.set()
        thread.join()
        assert run.call(slow, 1, call_id="a") == 1
    assert count == [1]
    assert results == [1]


def test_the_same_id_from_many_threads_at_once_is_one_call(cp, world):
    act = declare(world)
    gate = threading.Barrier(6)
    outcomes = []

    with cp.resume("t") as run:

        def ask():
            gate.wait()
            try:
                outcomes.append(run.call(act, 1, call_id="a"))
            except CallInProgress as error:
                outcomes.append(type(error).__name__)

        threads = [threading.Thread(target=ask) for _ in range(6)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert len(world.log) == 1
    assert "done 1" in outcomes


def test_an_unclaimed_write_parks_one_of_other_arguments(cp, world):
    act = declare(world)
    with died(cp, "t") as run:
        run.call(act, "10 EUR")
        raise Death
    with pytest.raises(InDoubt, match="other arguments"), cp.resume("t") as run:
        assert run.recovery.unclaimed == (1,)
        run.call(act, "10.00 EUR")
    assert world.log == [("10 EUR",)]
    assert statuses(cp) == ["succeeded", "in_doubt"]
    cp.resolve("t", 2, NotDone())
    with cp.resume("t") as run:
        assert run.call(act, "10.00 EUR") == "done 2"


def test_a_person_says_that_the_replanned_write_is_the_old_one(cp, world):
    act = declare(world)
    with died(cp, "t") as run:
        run.call(act, "10 EUR")
        raise Death
    with pytest.raises(InDoubt), cp.resume("t") as run:
        run.call(act, "10.00 EUR")
    cp.resolve("t", 2, Done("the same"))
    with cp.resume("t") as run:
        assert run.call(act, "10.00 EUR") == "the same"
    assert world.log == [("10 EUR",)]


@pytest.mark.parametrize(
    ("options", "asked", "result"),
    [
        ({"key": lambda order, note: order}, (7, "again"), "done 1"),
        ({"key": lambda order, note: order}, (8, "other"), "done 2"),
        ({"replan": "reuse"}, (7, "again"), "done 1"),
        ({"replan": "execute"}, (7, "again"), "done 2"),
    ],
)
def test_the_tool_says_what_a_replanned_write_is(cp, world, options, asked, result):
    @tool(name="order", **options)
    def order(order, note):
        return world.act(order, note)

    with died(cp, "t") as run:
        run.call(order, 7, "first")
        raise Death
    with cp.resume("t") as run:
        assert run.call(order, *asked) == result


def test_recovery_is_in_the_next_checkpoint_and_on_the_state(cp, world):
    act = declare(world)
    with died(cp, "t") as run:
        assert run.recovery.mode == "new"
        run.call(act, 1)
        raise Death
    with cp.resume("t") as run:
        assert (run.recovery.mode, run.recovery.seq, run.recovery.previous) == ("head", 1, "dead")
        assert run.state.recovery == run.recovery
    with cp.resume("t") as run:
        assert run.recovery.previous == "released"


# -- what is refused


def test_a_bare_callable_is_refused_and_both_decorators_named(cp):
    with cp.resume("t") as run:
        for bare in (print, lambda: 1, "send", None):
            with pytest.raises(UsageError, match=r"@safepoint\.tool.*@safepoint\.model"):
                run.call(bare)
            with pytest.raises(UsageError, match=r"@safepoint\.tool"):
                run.call_tool(bare, {})
        with pytest.raises(UsageError, match="bind"):
            run.call_many([print])
    assert cp.calls("t") == []


def test_arguments_that_cannot_be_stored_are_refused_before_anything_runs(cp, world):
    act = declare(world)
    with cp.resume("t") as run:
        with pytest.raises(RefusedType) as caught:
            run.call(act, {"a": [threading.Lock()]})
        assert "lock" in str(caught.value)
        with pytest.raises(RefusedType):
            run.call_many([act.bind(1), act.bind(threading.Lock())])
        with pytest.raises(UsageError):
            run.call(act, nope=1)
        with pytest.raises(UsageError):
            run.call_tool(act, "{not json")
        for bad in ("", 7):
            with pytest.raises(UsageError):
                run.call(act, 1, call_id=bad)
    assert world.log == []
    assert cp.calls("t") == []


def test_calls_from_threads_of_ones_own_need_an_id(cp, world):
    act = declare(world, "read")
    outcomes = []

    with cp.resume("t") as run:

        def elsewhere():
            try:
                run.call(act, 1)
            except UsageError as error:
                outcomes.append(error)
            outcomes.append(run.call(act, 2, call_id="mine"))

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert "call_id" in outcomes[0].remedy
    assert outcomes[1] == "done 1"


def test_a_run_is_not_used_inside_of_a_call(cp, world):
    caught = []
    with cp.resume("t") as run:

        @tool(effect="read", name="nosy")
        def nosy():
            for use in (
                lambda: run.call(nosy),
                lambda: run.call_many([nosy.bind()]),
                run.save,
                run.finish,
                lambda: run.milestone("m"),
            ):
                try:
                    use()
                except UsageError as error:
                    caught.append(error.what)
            return "ok"

        assert run.call(nosy) == "ok"
        assert run.save().seq == 2
    assert len(caught) == 5
    assert all("inside of a tool" in what for what in caught)


def test_a_direct_call_inside_a_step_is_a_call_of_the_run(cp, world):
    inner = declare(world, name="inner")

    @tool(name="outer")
    def outer(x):
        return inner(x), "outer"

    with cp.resume("t") as run:
        assert inner(5) == "done 1"
        assert outer(6) == ("done 2", "outer")
        run.save()
    assert [(c.tool, dict(c.arguments)["x"]) for c in cp.calls("t")] == [("inner", 5), ("outer", 6)]
    assert inner(7) == "done 3"
    assert len(cp.calls("t")) == 2, "outside of the run it is a plain function"


def test_a_run_that_is_over_says_so(cp, world):
    act = declare(world, "read")
    with cp.resume("t") as run:
        pass
    for use in (lambda: run.call(act), run.save, run.finish, lambda: run.pause("p"), lambda: run.call_many([])):
        with pytest.raises(UsageError, match="over"):
            use()


def test_a_transactional_tool_needs_a_store_that_can(world):
    act = declare(world, "transactional")
    with safepoint.open("memory://") as cp, cp.resume("t") as run:
        with pytest.raises(UsageError, match="SQLite"):
            run.call(act)
        assert cp.calls("t") == []


def test_recover_modes_of_this_version(cp):
    with pytest.raises(UsageError):
        cp.resume("t", recover="guess")
    assert cp.tasks() == []
    with cp.resume("t", recover="strict"):
        pass


# -- a tool that raises


@pytest.mark.parametrize("effect", ["read", "idempotent"])
def test_an_error_is_a_failed_call(cp, world, effect):
    act = declare(world, effect)
    world.next = [TimeoutError("slow")]
    with cp.resume("t") as run:
        with pytest.raises(CallFailed, match="slow") as caught:
            run.call(act)
        assert caught.value.type == "builtins.TimeoutError"
        assert run.call(act) == "done 2", "asked for again, it is a new call"
    assert statuses(cp) == ["failed", "succeeded"]
    assert cp.calls("t")[0].error == {"type": "builtins.TimeoutError", "message": "slow"}


@pytest.mark.parametrize("effect", ["read", "idempotent"])
def test_failures_are_retried_as_declared(cp, world, effect):
    act = declare(world, effect, retry=Retry(3, backoff=0.001, on=(OSError,)))
    world.next = [OSError(1), OSError(2), "at last", OSError(), OSError(), OSError(), ValueError()]
    with cp.resume("t") as run:
        assert run.call(act, "a") == "at last"
        with pytest.raises(CallFailed):
            run.call(act, "b")
        with pytest.raises(CallFailed):
            run.call(act, "c")
        assert (run.metrics.calls, run.metrics.retries, run.metrics.errors) == (7, 4, 6)
    assert [c.attempts for c in cp.calls("t")] == [3, 3, 1]


def test_an_execution_that_a_crash_repeats_uses_no_attempt(cp, world):
    act = declare(world, "read", retry=Retry(2, backoff=0))
    world.next = [Death()]
    with died(cp, "t") as run:
        run.call(act)
    world.next = [OSError(), "fine"]
    with cp.resume("t") as run:
        assert run.call(act) == "fine"
    assert cp.calls("t")[0].attempts == 3


@pytest.mark.parametrize("error", [TimeoutError("t"), ConnectionResetError("r"), ValueError("v"), KeyError("k")])
def test_any_error_of_a_write_leaves_its_outcome_open(cp, world, error):
    act = declare(world)
    world.next = [error]
    with pytest.raises(InDoubt) as caught, cp.resume("t") as run:
        try:
            run.call(act)
        except Exception:
            pytest.fail("no agent's `except Exception` may swallow this")
    assert caught.value.details["calls"] == [1]
    assert statuses(cp) == ["in_doubt"]
    assert type(error).__name__ in cp.calls("t")[0].reason


@pytest.mark.parametrize(("says", "then"), [(Done("v"), "v"), (NotDone(), CallFailed), (Unknown(), InDoubt)])
def test_an_error_of_a_write_goes_the_way_of_a_crash(cp, world, says, then):
    act = declare(world, verify=True)
    world.next, world.says = [OSError("lost reply")], says
    if isinstance(then, str):
        with cp.resume("t") as run:
            assert run.call(act) == then
    else:
        with pytest.raises(then), cp.resume("t") as run:
            run.call(act)
    assert len(world.log) == 1
    assert len(world.asked) == 1


def test_only_not_done_lets_a_write_be_tried_again(cp, world):
    act = declare(world, verify=True, retry=Retry(3, backoff=0))
    world.next, world.says = [OSError(), OSError(), "third"], NotDone()
    with cp.resume("t") as run:
        assert run.call(act) == "third"
    assert len(world.asked) == 2


@pytest.mark.parametrize("error", [DidNotHappen("refused"), PermissionError("403")])
def test_an_error_that_proves_that_nothing_happened_is_a_failure(cp, world, error):
    act = declare(world, failed_on=[PermissionError], retry=Retry(2, backoff=0))
    world.next = [error, "then"]
    with cp.resume("t") as run:
        assert run.call(act) == "then"
        run.save()
    world.next = [error, error]
    with pytest.raises(CallFailed), cp.resume("t") as run:
        run.call(act, 2)
    assert cp.status("t").status == "failed"
    with cp.resume("t") as run:
        assert run.call(act, 2) == "done 5", "it ended the step: executed anew"


def test_an_error_whose_text_raises_is_recorded_all_the_same(cp):
    class Bad(Exception):
        def __str__(self):
            raise RuntimeError

    @tool(effect="read", name="bad")
    def bad():
        raise Bad

    with cp.resume("t") as run, pytest.raises(CallFailed) as caught:
        run.call(bad)
    assert caught.value.type.endswith("Bad")


def test_async_tools_run_in_a_sync_run_and_can_time_out(cp):
    @tool(effect="read", timeout=0.02, name="slow-async")
    async def slow(seconds):
        await asyncio.sleep(seconds)
        return seconds

    with cp.resume("t") as run:
        assert run.call(slow, 0) == 0
        with pytest.raises(CallFailed) as caught:
            run.call(slow, 30)
        assert caught.value.type == "builtins.TimeoutError"


def test_a_timeout_of_a_write_leaves_it_in_doubt(cp):
    @tool(timeout=0.02, name="slow-write")
    async def slow():
        await asyncio.sleep(30)

    with pytest.raises(InDoubt), cp.resume("t") as run:
        run.call(slow)


def test_ctrl_c_in_a_write_leaves_it_open_and_comes_out_as_itself(cp, world):
    act = declare(world, verify=True)
    world.next = [KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt), cp.resume("t") as run:
        run.call(act)
    assert statuses(cp) == ["started"]
    assert cp.status("t").status == "interrupted"
    world.says = Done("had happened")
    with cp.resume("t") as run:
        assert run.call(act) == "had happened"


def test_a_swallowed_ctrl_c_commits_nothing_past_an_open_write(cp, world):
    act = declare(world)
    world.next = [KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt), cp.resume("t") as run:
        with pytest.raises(KeyboardInterrupt):
            run.call(act)
        for use in (run.save, lambda: run.call(act, 2), run.finish):
            with pytest.raises(RunEnded):
                use()
    assert len(cp.list_checkpoints("t")) == 1
    assert world.log == [(0,)]


def test_ctrl_c_in_a_read_is_only_an_interrupt(cp, world):
    act = declare(world, "read")
    world.next = [KeyboardInterrupt(), "again"]
    with cp.resume("t") as run:
        with pytest.raises(KeyboardInterrupt):
            run.call(act)
        assert run.call(act) == "again"
        run.save()
    assert statuses(cp) == ["succeeded"]


# -- bad replies


def test_a_reply_that_does_not_pass_is_asked_again(cp, world):
    ask = declare(world, "read", retry=Retry(3, backoff=0))
    world.next = ["{", "[", '{"ok": 1}']
    import json

    with cp.resume("t") as run:
        assert run.call(ask, validate=json.loads) == '{"ok": 1}'
        world.next = ["{"] * 3
        with pytest.raises(CallFailed) as caught:
            run.call(ask, 2, validate=json.loads)
        assert caught.value.type == "json.decoder.JSONDecodeError"
    assert statuses(cp) == ["succeeded", "failed"]


def test_only_what_may_be_asked_again_is_validated(cp, world):
    with cp.resume("t") as run, pytest.raises(UsageError, match="validate"):
        run.call(declare(world), validate=print)
    assert world.log == []


def test_reads_are_asked_anew_after_two_raises_and_writes_are_matched(cp, world):
    ask, act = declare(world, "read", name="ask"), declare(world, name="act")
    replies = []

    def attempt():
        with pytest.raises(ZeroDivisionError), cp.resume("t") as run:
            replies.append(run.call(ask))
            run.call(act, "once")
            raise ZeroDivisionError

    attempt()
    attempt()
    assert [p.action for p in cp.plan("t").calls] == ["ask_anew", "reuse"]
    attempt()
    assert replies == ["done 1", "done 1", "done 3"]
    assert [w for w in world.log if w == ("once",)] == [("once",)]
    assert [c.tool for c in cp.calls("t")] == ["ask", "act", "ask"], "what was set aside is kept"


def test_a_death_sets_nothing_aside(cp, world):
    ask = declare(world, "read")
    for _ in range(4):
        with died(cp, "t") as run:
            assert run.call(ask) == "done 1"
            raise Death


def test_a_call_that_fails_at_each_attempt_makes_the_model_be_asked_anew(cp, world):
    ask, look = declare(world, "read", name="ask"), declare(world, "read", name="look")
    asked = []
    for _ in range(3):
        with pytest.raises(CallFailed), cp.resume("t") as run:
            asked.append(run.call(ask))
            world.next = [ValueError("no such page")]
            run.call(look, "bad page")
    assert asked[0] == asked[1] != asked[2]


# -- results


class NotStorable:
    def __repr__(self):
        return CANARY


def test_a_result_that_cannot_be_stored_is_lost_and_the_write_not_repeated(cp, world):
    act = declare(world)
    world.next = [NotStorable()]
    texts = []
    for _ in range(2):
        with pytest.raises(RefusedType) as caught, cp.resume("t") as run:
            run.call(act)
        texts.append(str(caught.value))
        assert cp.status("t").status == "failed"
    assert world.log == [(0,)]
    assert texts[0] == texts[1]
    assert "NotStorable" in texts[0]
    assert CANARY not in texts[0]
    (call,) = cp.calls("t")
    assert (call.status, call.result) == ("succeeded", None)
    assert cp.plan("t").calls[0].action == "lost"


@pytest.mark.parametrize("error", [StoreFull("full"), Unavailable("gone")])
@pytest.mark.parametrize("landed", [False, True])
def test_a_result_that_cannot_be_written_is_written_before_anything_else(url, world, error, landed):
    with safepoint.open(url) as inner:
        store = Failing(inner.store)
        cp = safepoint.open(store)
        act = declare(world)

        def on_result(commit):
            return error if commit.calls and commit.calls[0].row.status == "succeeded" else None

        with cp.resume("t") as run:
            run.call(act, "before")
            setattr(store, "after" if landed else "before", on_result)
            with pytest.raises(type(error)):
                run.call(act, "x")
            with pytest.raises(type(error)):
                run.call(act, "y")
            with pytest.raises(type(error)):
                run.save()
            assert world.log == [("before",), ("x",)], "first the result"
            store.before = store.after = lambda c: None
            assert run.call(act, "y") == "done 3"
            assert run.call(act, "x") == "done 2", "and it is not run again"
            run.save()
        assert statuses(inner) == ["succeeded"] * 3
        assert len(world.log) == 3


def test_a_result_that_was_never_written_leaves_the_call_started(url, world):
    with safepoint.open(url) as inner:
        store = Failing(inner.store)
        cp = safepoint.open(store)
        act = declare(world, verify=True)
        store.before = lambda c: StoreFull("full") if c.calls and c.calls[0].row.status == "succeeded" else None
        with pytest.raises(StoreFull), cp.resume("t") as run:
            run.call(act)
        assert inner.status("t").status == "interrupted", "no fault of the step"
        assert statuses(inner) == ["started"]
        world.says = Done("verified")
        with inner.resume("t") as run:
            assert run.call(act) == "verified"


def test_an_intent_that_cannot_be_written_runs_nothing(url, world):
    with safepoint.open(url) as inner:
        store = Failing(inner.store)
        cp = safepoint.open(store)
        act = declare(world)
        with cp.resume("t") as run:
            store.before = lambda c: StoreFull("full") if c.calls else None
            with pytest.raises(StoreFull):
                run.call(act, call_id="a")
            assert world.log == []
            store.before = lambda c: None
            assert run.call(act, call_id="a") == "done 1"


def test_results_are_any_value_of_the_type_table(cp, world):
    act = declare(world, "read")
    value = {"t": (1, {2}), "b": b"\0", ("k", 1): 2**80, "n": None}
    world.next = [value]
    with died(cp, "t") as run:
        assert run.call(act) == value
        raise Death
    with cp.resume("t") as run:
        again = run.call(act)
        assert again == value
        assert type(again["t"]) is tuple
        assert again is not run.call(act, 9)


def test_a_big_result_and_history_come_back_whole(cp):
    text = "x" * 200_000

    @model(name="big")
    def ask(messages):
        return {"role": "assistant", "content": text, "n": len(messages)}

    history = [{"role": "user", "content": f"m{i}" * 50} for i in range(300)]
    with died(cp, "t") as run:
        run.state.messages.extend(history)
        run.call(ask, run.state.messages)
        raise Death
    with cp.resume("t") as run:
        run.state.messages.extend(history)
        assert run.call(ask, run.state.messages) == {"role": "assistant", "content": text, "n": 300}
    (call,) = cp.calls("t")
    assert call.arguments["messages"] == history


def test_what_a_model_reply_tells_is_recorded(cp):
    @model(name="gpt")
    def ask(messages, temperature=0.3, seed=7):
        return {"model": "gpt-x", "content": "hi", "usage": {"prompt_tokens": 11, "completion_tokens": 4}}

    @model(name="claude")
    def other(messages):
        return {"model": "claude-x", "usage": {"input_tokens": 5, "output_tokens": 2}}

    with cp.resume("t") as run:
        run.call(ask, [])
        run.call(other, [])
        run.add_usage(100, 10)
        assert (run.metrics.tokens_in, run.metrics.tokens_out) == (116, 16)
        run.save()
    one, two = cp.calls("t")
    assert one.model == {"model": "gpt-x", "temperature": 0.3, "seed": 7, "usage": {"input": 11, "output": 4}}
    assert two.model == {"model": "claude-x", "usage": {"input": 5, "output": 2}}
    assert cp.list_checkpoints("t")[0].metrics.tokens_in == 116
    with cp.resume("t") as run:
        assert run.metrics.tokens_in == 116, "counted since the task began"


# -- many at once


def test_calls_at_the_same_time_keep_their_order_and_are_each_recorded(cp, world):
    lock = threading.Lock()
    now, most = [], []

    @tool(name="slow")
    def slow(x):
        with lock:
            now.append(x)
            most.append(len(now))
        time.sleep(0.01)
        with lock:
            now.remove(x)
        return x * 10

    with died(cp, "t") as run:
        assert run.call_many([slow.bind(i) for i in range(9)], max_parallel=3) == [i * 10 for i in range(9)]
        raise Death
    assert 1 < max(most) <= 3
    with cp.resume("t") as run:
        assert run.call_many([slow.bind(i) for i in range(9)]) == [i * 10 for i in range(9)]
        assert len(most) == 9
        assert run.call_many([]) == []
        run.save()
    assert len(cp.list_checkpoints("t")) == 2


def test_sync_and_async_tools_at_the_same_time(cp):
    @tool(effect="read", name="s")
    def s(x):
        return x

    @tool(effect="read", name="a")
    async def a(x):
        await asyncio.sleep(0.001)
        return -x

    with cp.resume("t") as run:
        assert run.call_many([s.bind(1), a.bind(2), s.bind(3), a.bind(4)]) == [1, -2, 3, -4]


def test_one_failure_waits_for_the_others(cp, world):
    act = declare(world, "read")
    bad = declare(World(), "read", name="bad")

    @tool(effect="read", name="late")
    def late():
        time.sleep(0.05)
        return world.act("late")

    @tool(effect="read", name="fails")
    def fails(text):
        raise ValueError(text)

    with cp.resume("t") as run:
        with pytest.raises(CallFailed, match="first"):
            run.call_many([late.bind(), fails.bind("first"), fails.bind("second"), act.bind(1)])
        assert {("late",), (1,)} <= set(world.log)
        found = run.call_many([bad.bind(1), fails.bind("x"), bad.bind(2)], return_errors=True)
        assert {found[0], found[2]} == {"done 1", "done 2"}
        assert isinstance(found[1], CallFailed)
    assert "started" not in statuses(cp)


def test_beside_a_call_in_doubt_the_others_go_on_to_their_end(cp, world):
    act = declare(world)
    running, go = threading.Event(), threading.Event()

    @tool(name="long")
    def long():
        running.set()
        assert go.wait(10)
        world.log.append("long")
        return "whole"

    @tool(name="breaks")
    def breaks():
        assert running.wait(10)
        go.set()
        raise OSError("lost")

    with pytest.raises(InDoubt), cp.resume("t") as run:
        run.call_many([long.bind(), breaks.bind(), act.bind("not begun")], max_parallel=2, return_errors=True)
    assert world.log[0] == "long"
    assert {c.tool: c.status for c in cp.calls("t")}["long"] == "succeeded"
    assert {c.tool: c.status for c in cp.calls("t")}["breaks"] == "in_doubt"


def test_call_many_claims_what_is_on_record_before_it_parks(cp, world):
    act = declare(world)
    with died(cp, "t") as run:
        run.call(act, "old")
        raise Death
    with cp.resume("t") as run:
        assert run.call_many([act.bind("new"), act.bind("old")], max_parallel=1) == ["done 2", "done 1"]


def test_call_many_with_ids(cp, world):
    act = declare(world)
    with cp.resume("t") as run:
        assert run.call_many([act.bind(i).with_id(f"c{i}") for i in range(3)], max_parallel=1) == ["done 1", "done 2", "done 3"]
        assert run.call(act, 1, call_id="c1") == "done 2"
        with pytest.raises(CallInProgress):
            run.call_many([act.bind(7).with_id("same"), act.bind(7).with_id("same")])
        assert world.log.count((7,)) == 1
        with pytest.raises(UsageError):
            run.call_many([act.bind(1)], max_parallel=0)


def test_ctrl_c_among_sequential_calls_begins_no_more(cp, world):
    act = declare(world, "read")
    world.next = [KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt), cp.resume("t") as run:
        run.call_many([act.bind(i) for i in range(4)], max_parallel=1)
    assert world.log == [(0,)]


# -- transactional tools, on SQLite


@pytest.fixture
def ledger(sqlite):
    with sqlite.connection() as conn:
        conn.execute("CREATE TABLE ledger (entry TEXT)")

    def entries():
        with sqlite.connection() as conn:
            return [e for (e,) in conn.execute("SELECT entry FROM ledger ORDER BY rowid")]

    return entries


def transactional(body=None):
    @tool(effect="transactional", name="book")
    def book(entry, *, connection):
        connection.execute("INSERT INTO ledger VALUES (?)", (entry,))
        if body is not None:
            body(connection)
        return f"booked {entry}"

    return book


def test_effect_and_record_are_one(sqlite, ledger):
    book = transactional()
    with died(sqlite, "t") as run:
        assert run.call(book, "a") == "booked a"
        raise Death
    with sqlite.resume("t") as run:
        assert run.call(book, "a") == "booked a"
        run.save()
    assert ledger() == ["a"]


@pytest.mark.parametrize("end", [ValueError("no"), KeyboardInterrupt(), Death()])
def test_what_raises_is_rolled_back(sqlite, ledger, end):
    def body(connection):
        raise end

    expected = CallFailed if isinstance(end, Exception) else type(end)
    with pytest.raises(expected), sqlite.resume("t") as run:
        run.call(transactional(body), "a")
    assert ledger() == []
    with sqlite.resume("t") as run:
        assert run.call(transactional(), "a") == "booked a"
    assert ledger() == ["a"]
    assert statuses(sqlite) == ["succeeded"]


@pytest.mark.parametrize("statement", ["COMMIT", "ROLLBACK", "ATTACH ':memory:' AS other", "DELETE FROM sp_calls"])
def test_the_transaction_is_the_librarys(sqlite, ledger, statement):
    with pytest.raises(CallFailed) as caught, sqlite.resume("t") as run:
        run.call(transactional(lambda c: c.execute(statement)), "a")
    assert "UsageError" in caught.value.type
    assert ledger() == []
    assert statuses(sqlite) == ["failed"]


def test_a_transactional_result_that_cannot_be_stored(sqlite, ledger):
    @tool(effect="transactional", name="odd")
    def odd(*, connection):
        connection.execute("INSERT INTO ledger VALUES ('odd')")
        return NotStorable()

    for _ in range(2):
        with pytest.raises(RefusedType), sqlite.resume("t") as run:
            run.call(odd)
    assert ledger() == ["odd"]


def test_a_transactional_call_among_others(sqlite, ledger, world):
    book, act = transactional(), declare(world, "read")
    with sqlite.resume("t") as run:
        assert run.call_many([book.bind("a"), act.bind(1), book.bind("b")]) == ["booked a", "done 1", "booked b"]
    assert sorted(ledger()) == ["a", "b"]


def test_a_replanned_transactional_write_is_parked(sqlite, ledger):
    book = transactional()
    with died(sqlite, "t") as run:
        run.call(book, "a")
        raise Death
    with pytest.raises(InDoubt), sqlite.resume("t") as run:
        run.call(book, "A")
    assert ledger() == ["a"]


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

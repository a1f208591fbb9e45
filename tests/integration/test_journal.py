"""What becomes of a call when its step is run again, on each store: DESIGN 6, row by row and id by id.

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
    Done,
    InDoubt,
    LeaseLost,
    NotDone,
    RefusedType,
    Unknown,
    UsageError,
    model,
    tool,
)
from tests.support.runs import CANARY, Death, Failing, declare, died, statuses

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


# -- a call that kills its process


def test_a_read_that_kills_its_process_five_times_running_is_set_aside(cp, world):
    look, write = declare(world, "read"), declare(world, name="after")
    world.next = [Death() for _ in range(5)]
    for n in range(5):
        assert n == 0 or [p.action for p in cp.plan("t").calls] == ["repeat"]
        with died(cp, "t") as run:
            run.call(look)
    assert [p.action for p in cp.plan("t").calls] == ["raise"]
    for _ in range(2):
        with died(cp, "t") as run:
            with pytest.raises(CallFailed, match="died 5 times running"):
                run.call(look)
            assert run.call(write, 1) == "done 6"
            raise Death
    assert statuses(cp) == ["quarantined", "succeeded"]


def test_deaths_before_the_call_or_with_an_end_between_do_not_count(cp, world):
    look = declare(world, "read")
    for n in range(12):
        if n == 3:
            world.next = [KeyboardInterrupt()]
            with pytest.raises(KeyboardInterrupt), cp.resume("t") as run:
                run.call(look)
        elif n > 4 and n % 2:
            with died(cp, "t"):
                raise Death
        else:
            world.next = [Death()]
            with died(cp, "t") as run:
                run.call(look)
    world.next = []
    with cp.resume("t") as run:
        assert run.call(look).startswith("done")
        run.save()
    assert cp.calls("t")[0].reason == ""


def test_a_write_is_never_set_aside(cp, world):
    act = declare(world, verify=True)
    world.next = [Death() for _ in range(6)]
    for _ in range(6):
        with died(cp, "t") as run:
            run.call(act)
    with cp.resume("t") as run:
        assert run.call(act) == "done 7"


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

"""Named steps: what is made is made once, and made anew only with a reason."""

import asyncio
import functools
import logging

import pytest

import safepoint
from safepoint import CallFailed, Damaged, InDoubt, RefusedType, State, UsageError
from tests.integration.conftest import STORES
from tests.support.runs import CANARY, Death, Failing, NotStorable, declare, died, statuses
from tests.support.spoil import spoil

CHUNKED = [name for name in STORES if name != "file"]
"""Stores in which a part of a state can be damaged while the rest is not."""


class Lab:
    """Makes products, and notes which."""

    def __init__(self):
        self.made = []

    def plan(self, goal):
        self.made.append("plan")
        return {"goal": goal, "parts": ["plan" * 100]}

    def fetch(self, size):
        self.made.append("fetch")
        return "fetched" + "x" * size

    def report(self):
        self.made.append("report")
        return ["report" * 100, len(self.made)]


def program(run, lab, goal="g", size=400, **more):
    plan = run.step("plan", lab.plan, goal)
    fetched = run.step("fetch", lab.fetch, size, needs=["plan"], **more)
    report = run.step("report", lab.report, needs=["fetch"])
    return plan, fetched, report


@pytest.fixture
def lab():
    return Lab()


@pytest.fixture
def first(cp, lab):
    """What the program made, in a run that is over."""
    with cp.resume("t") as run:
        products = program(run, lab)
    lab.made.clear()
    return products


def test_each_step_that_ran_ends_with_a_save(cp, lab, first):
    heads = cp.list_checkpoints("t")
    assert [(c.label, c.step) for c in heads] == [("report", 3), ("fetch", 2), ("plan", 1), (None, 0)]


def test_what_is_there_is_not_made_again(cp, lab, first):
    with cp.resume("t") as run:
        assert program(run, lab) == first
        assert program(run, lab) == first
        assert run.products == dict.fromkeys(("plan", "fetch", "report"), "made")
    assert lab.made == []
    assert cp.status("t").seq == 4, "nothing was done, so nothing is saved"


def test_a_product_is_given_out_as_a_copy(cp, lab):
    with cp.resume("t") as run:
        plan = run.step("plan", lab.plan, "g")
        plan["parts"].append(1)
        run.product("plan")["parts"].append(2)
        run.step("plan", lab.plan, "g")["parts"].append(3)
        assert run.product("plan") == {"goal": "g", "parts": ["plan" * 100]}
        run.save()
    assert lab.made == ["plan"]
    with cp.resume("t") as run:
        assert run.product("plan") == {"goal": "g", "parts": ["plan" * 100]}


@pytest.mark.parametrize(
    ("change", "made"),
    [
        ({"goal": "other"}, ["plan", "fetch", "report"]),
        ({"size": 401}, ["fetch", "report"]),
        ({}, []),
    ],
)
def test_what_has_changed_is_made_again_with_all_that_depends_on_it(cp, lab, first, change, made):
    with cp.resume("t") as run:
        program(run, lab, **change)
    assert lab.made == made


@pytest.mark.parametrize("how", ["missing", "corrupt"])
@pytest.mark.parametrize(("part", "made"), [(b"planplan", ["plan", "fetch", "report"]), (b"fetchedx", ["fetch", "report"])])
def test_what_is_lost_is_made_again_with_all_that_depends_on_it(cp, lab, first, part, made, how, caplog):
    assert spoil(cp, "t", part, how) == 1
    with caplog.at_level(logging.INFO), cp.resume("t") as run:
        assert run.recovery.lost == (made[0],)
        assert [run.products[name] for name in made] == ["lost", *["fallen"] * (len(made) - 1)]
        assert program(run, lab)[:2] == first[:2]
        assert set(run.products.values()) == {"made"}
    assert lab.made == made
    assert "its product is lost" in caplog.text
    with cp.resume("t") as run:
        assert run.recovery.lost == ()
        program(run, lab)
    assert lab.made == made


def test_the_plan_tells_what_is_lost(cp, lab, first):
    assert cp.plan("t").products == dict.fromkeys(("plan", "fetch", "report"), "made")
    spoil(cp, "t", b"fetchedx")
    plan = cp.plan("t")
    assert plan.products == {"plan": "made", "fetch": "lost", "report": "fallen"}
    assert "product fetch is lost" in str(plan)
    assert "product plan" not in str(plan)


def test_a_lost_product_stays_known_as_lost_through_saves(cp, lab, first):
    assert spoil(cp, "t", b"fetchedx")
    state = cp.load_latest("t")
    state.agent_state["by"] = "hand"
    cp.save(state)
    with cp.resume("t") as run:
        assert run.recovery.lost == ("fetch",)
        with pytest.raises(Damaged, match="fetch"):
            run.product("fetch")
        with pytest.raises(UsageError, match="out of date"):
            run.product("report")
        program(run, lab)
    assert lab.made == ["fetch", "report"]


@pytest.mark.parametrize("url", CHUNKED, indirect=True)
def test_nothing_else_of_a_state_may_be_damaged(cp, lab, first):
    state = cp.load_latest("t")
    state.agent_state["notes"] = "notes" * 200
    cp.save(state)
    assert spoil(cp, "t", b"notesnotes")
    with pytest.raises(Damaged):
        cp.load_latest("t")


@pytest.mark.parametrize("url", CHUNKED, indirect=True)
def test_a_part_that_messages_share_is_no_product_of_its_own(cp, lab):
    with cp.resume("t") as run:
        run.state.messages.append("fetched" + "x" * 900)
        run.step("fetch", lab.fetch, 900)
    assert spoil(cp, "t", b"fetchedx")
    with pytest.raises(Damaged):
        cp.load_latest("t")


@pytest.mark.parametrize("url", CHUNKED, indirect=True)
def test_many_products_lost_at_once(cp, lab):
    with cp.resume("t") as run:
        for n in range(40):
            run.step(f"s{n}", lambda n=n: f"number {n} " * 5)
    assert spoil(cp, "t", b"number 7 ")
    with cp.resume("t") as run:
        assert len(run.recovery.lost) == 40
        for n in range(40):
            run.step(f"s{n}", lambda n=n: f"number {n} " * 5)
    with cp.resume("t") as run:
        assert run.product("s7") == "number 7 " * 5


# -- rules


def test_a_pure_step_that_comes_out_equal_leaves_standing_what_was_made_from_it(cp, lab):
    def program(run, text):
        run.step("clean", lambda t: t.strip() * 100, text, pure=True)
        return run.step("report", lab.report, needs=["clean"])

    with cp.resume("t") as run:
        first = program(run, "text ")
    with cp.resume("t") as run:
        assert program(run, "text") == first
    assert spoil(cp, "t", b"texttext")
    with cp.resume("t") as run:
        assert run.step("report", lab.report, needs=["clean"]) == first, "nobody asks for it"
        assert program(run, "text") == first
        assert lab.made == ["report"]
        program(run, "other")
    assert lab.made == ["report", "report"]


def test_an_optional_step_may_fail(cp, lab, caplog):
    def broken():
        raise ValueError(CANARY)

    def program(run):
        got = run.step("weather", broken, optional=True)
        return got, run.step("report", lab.report, needs=["weather"])

    with cp.resume("t") as run:
        first = program(run)
        assert first[0] is None
        assert run.product("weather") is None
        assert run.products == {"weather": "failed", "report": "made"}
    with cp.resume("t") as run:
        assert program(run) == first
        with pytest.raises(ValueError, match=CANARY):
            run.step("weather", broken)
    assert lab.made == ["report"]
    assert CANARY not in caplog.text


def test_an_optional_step_does_not_swallow_what_is_no_failure_of_its_own(cp, world):
    write = declare(world)
    world.next = [OSError("lost")]
    with pytest.raises(InDoubt), cp.resume("t") as run:
        run.step("send", lambda: run.call(write, 1), optional=True)
    assert cp.status("t").status == "waiting"
    with cp.resume("u") as run, pytest.raises(UsageError):
        run.step("nested", lambda: run.step("inner", lambda: 1), optional=True)


def test_one_goes_on_without_a_lost_optional_product(cp, lab):
    with cp.resume("t") as run:
        run.step("weather", lab.fetch, 400, optional=True)
        first = run.step("report", lab.report, needs=["weather"])
    assert spoil(cp, "t", b"fetchedx")
    with cp.resume("t") as run:
        assert run.step("report", lab.report, needs=["weather"]) == first
        assert run.product("weather") is None
        assert run.products["weather"] == "lost"


@pytest.mark.parametrize("rule", [True, lambda: True])
def test_skipping_is_by_rule(cp, lab, rule):
    with cp.resume("t") as run:
        assert run.step("fetch", lab.fetch, 400, skip_if=rule) is None
        assert run.products == {"fetch": "skipped"}
        run.step("report", lab.report, needs=["fetch"])
    with cp.resume("t") as run:
        assert run.products["fetch"] == "skipped"
        assert run.step("fetch", lab.fetch, 400, skip_if=False).startswith("fetched")
        run.step("report", lab.report, needs=["fetch"])
    assert lab.made == ["report", "fetch", "report"]


# -- calls inside


def test_a_step_that_raised_and_is_tried_again_repeats_no_call(cp, world):
    write, read = declare(world), declare(world, "read")

    def work():
        sent = run.call(write, 1)
        return [sent, run.call(read, 2)]

    world.next = ["sent", ValueError("no"), "read"]
    with cp.resume("t") as run:
        with pytest.raises(CallFailed):
            run.step("work", work)
        assert run.step("work", work) == ["sent", "read"]
    assert world.log == [(1,), (2,), (2,)]


@pytest.mark.parametrize("kind", ["write", "idempotent", "read"])
def test_a_lost_product_is_made_from_what_its_calls_recorded(cp, world, kind):
    act = declare(world, kind)

    def work():
        return [run.call(act, n) for n in range(3)] + ["lost one" * 90]

    with cp.resume("t") as run:
        first = run.step("work", work)
        for _ in range(3):
            run.save()
    for _ in range(2):  # and once more: the records have moved on with the step
        assert spoil(cp, "t", b"lost onelost one")
        with cp.resume("t") as run:
            assert run.step("work", work) == first
            run.save()
    assert world.log == [(0,), (1,), (2,)]
    assert statuses(cp) == ["succeeded"] * 3


def test_a_lost_product_whose_writes_are_on_no_record_is_for_a_person(url, world):
    write = declare(world)

    def work():
        return [run.call(write, 1), "lost one" * 90]

    with safepoint.open(url) as cp:
        with cp.resume("t") as run:
            run.step("work", work)
            for _ in range(3):
                run.save()
        cp.cleanup("t", keep_latest=1)
        assert cp.calls("t") == []
        assert spoil(cp, "t", b"lost onelost one")
        with pytest.raises(InDoubt), cp.resume("t") as run:
            run.step("work", work)
        (call,) = cp.calls("t", status="in_doubt")
        assert "record" in call.reason
        cp.resolve("t", call, safepoint.Done("by hand"))
        with cp.resume("t") as run:
            assert run.step("work", work)[0] == "by hand"
    assert world.log == [(1,)]


@pytest.mark.parametrize("caught", [True, False])
def test_a_lost_product_of_a_step_that_saw_a_failure(cp, world, caught):
    read = declare(world, "read")

    def work():
        try:
            got = run.call(read, 1)
        except CallFailed:
            got = "none"
        return [got, run.call(read, 2) if caught else 0, "lost one" * 90]

    world.next = [OSError("once")]
    with cp.resume("t") as run:
        first = run.step("work", work)
        run.save()
    assert spoil(cp, "t", b"lost onelost one")
    with cp.resume("t") as run:
        again = run.step("work", work)
        run.save()
    # One that the step went past failed for it; one that came last is made again.
    assert again == (first if caught else ["done 2", *first[1:]])
    assert world.log == [(1,), (2,)] if caught else [(1,), (1,)]
    assert statuses(cp) == (["failed", "succeeded"] if caught else ["succeeded"])
    with cp.resume("t") as run:
        assert run.step("work", work) == again


def test_a_question_inside_of_a_step(cp):
    def work():
        return run.pause("sure", "?")

    with pytest.raises(safepoint.DecisionNeeded), cp.resume("t") as run:
        run.step("work", work)
    cp.answer("t", "sure", "yes")
    with cp.resume("t") as run:
        assert run.step("work", work) == "yes"
    with cp.resume("t") as run:
        assert run.step("work", work) == "yes"


def test_killed_between_its_calls_and_its_save_it_repeats_nothing(cp, world):
    write = declare(world)

    def work(dies):
        got = [run.call(write, n) for n in range(2)]
        if dies:
            raise Death
        return got

    with died(cp, "t") as run:
        run.step("work", functools.partial(work, True))
    with cp.resume("t") as run:
        assert run.step("work", work, False) == ["done 1", "done 2"]
    assert len(world.log) == 2


def test_a_save_that_fails_keeps_the_product_for_the_next_try(url, lab):
    with safepoint.open(url) as inner:
        store = Failing(inner.store)
        cp = safepoint.open(store)
        with cp.resume("t") as run:
            store.before = lambda commit: safepoint.Unavailable("no", "", "") if commit.checkpoint else None
            with pytest.raises(safepoint.Unavailable):
                run.step("plan", lab.plan, "g")
            store.before = lambda commit: None
            run.step("plan", lab.plan, "g")
            assert inner.load_latest("t").step == 1
    assert lab.made == ["plan"]


def test_in_an_agent_the_products_are_saved_with_the_step(cp, lab):
    def step(run):
        program(run, lab)
        if run.state.step == 1:
            run.finish(run.product("fetch"))

    outcome = safepoint.run_agent(step, task_id="t", store=cp)
    assert outcome.result.startswith("fetched")
    assert lab.made == ["plan", "fetch", "report"]
    assert [c.step for c in cp.list_checkpoints("t")] == [2, 1, 0]


def test_a_tool_is_a_step_too(cp, world):
    read = declare(world, "read")
    with cp.resume("t") as run:
        assert run.step("look", read, 7) == "done 1"
        assert run.step("look", read, 7) == "done 1"
    assert world.log == [(7,)]


def test_forks_go_on_from_their_own_products(cp, lab, first):
    state = cp.load("t", seq=3)
    assert state._base.control.products.keys() == {"plan", "fetch"}
    assert cp.load("t", seq=1)._base.control.made == {}


# -- refusals


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda run: run.step("a", lambda: 1, needs=["b"]), "needs 'b', and there is no such step"),
        (lambda run: run.step("a", lambda: 1, needs="b"), "is text"),
        (lambda run: run.step("", lambda: 1), "blank"),
        (lambda run: run.step("a", 3), "to be called"),
        (lambda run: run.step("a", lambda: run.step("b", lambda: 1)), "is under way"),
        (lambda run: run.step("a", lambda: 1, pure=1), "must be a bool"),
        (lambda run: run.step("a", run.save), "under way"),
        (lambda run: run.product("a"), "no product 'a'"),
    ],
)
def test_what_makes_no_sense_is_refused(cp, call, text):
    with cp.resume("t") as run:
        with pytest.raises(UsageError, match=text):
            call(run)
        assert run.products == {}


def test_a_circle_is_refused(cp):
    with cp.resume("t") as run:
        run.step("a", int, 1)
        run.step("b", int, 2, needs=["a"])
        with pytest.raises(UsageError, match="'a' needs 'b' needs 'a'"):
            run.step("a", int, 1, needs=["b"])
        with pytest.raises(UsageError, match="'a' needs 'a'"):
            run.step("a", int, 1, needs=["a"])


def test_one_name_for_two_functions_is_refused(cp, lab):
    with cp.resume("t") as run:
        for n in range(2):
            run.step("same", lambda n: n, n)
        with pytest.raises(UsageError, match="another function"):
            run.step("same", lab.fetch, 1)


def test_an_async_function_is_refused_in_a_sync_run(cp):
    async def later():
        return 1

    with cp.resume("t") as run:
        for name, fn in (("def", later), ("value", lambda: later())):  # noqa: PLW0108 - it is to return a coroutine
            with pytest.raises(UsageError, match="async"):
                run.step(name, fn)


def test_what_cannot_be_stored_is_refused_and_the_run_goes_on(cp):
    with cp.resume("t") as run:
        with pytest.raises(RefusedType, match="product of step 'a'"):
            run.step("a", NotStorable)
        with pytest.raises(RefusedType, match="arguments of step 'a'"):
            run.step("a", lambda x: 1, NotStorable())
        run.save()


def test_outside_of_a_run(cp):
    run = cp.resume("t")
    with pytest.raises(UsageError, match="not been entered"):
        run.step("a", int)
    run.close()


# -- async


def test_the_async_twin(url, lab, world):
    asyncio.run(twin(url, lab, world))


async def twin(url, lab, world):
    read = declare(world, "read")
    acp = safepoint.open_async(url)

    async def fetch(n):
        lab.made.append("fetch")
        return [await run.call(read, n), n]

    for _ in range(2):
        async with acp.resume("t") as run:
            assert await run.step("fetch", fetch, 5) == ["done 1", 5]
            assert await run.step("soon", lambda: fetch(5)) == ["done 2", 5]
            assert await run.step("plain", str, 5, needs=["fetch"]) == "5"
            assert run.product("fetch") == ["done 1", 5]
            assert run.products == dict.fromkeys(("fetch", "soon", "plain"), "made")
    assert lab.made == ["fetch"] * 2
    await acp.close()


# -- field cases


@pytest.mark.parametrize("how", ["missing", "corrupt"])
def test_field_case_34_what_follows_a_change_or_a_gap_is_not_replayed(cp, how):
    if how == "corrupt" and not cp.store.chunked:
        return  # the document is damaged as a whole there
    made = []

    def work(name, *parts):
        made.append(name)
        return name * 400 + str(len(made)), *parts

    body = bytes(range(256)) * (5_000_000 // 256)

    def program(run, a=1):
        run.step("a", lambda n: work("a", n), a)
        b = run.step("b", lambda: work("b", body), needs=["a"])
        return b, run.step("c", lambda: work("c"), needs=["b"])

    def again(**arguments):
        made.clear()
        with cp.resume("t") as run:
            return program(run, **arguments)

    first = again()
    assert made == ["a", "b", "c"]
    assert again() == first
    assert first[0][1] == body
    assert made == []
    again(a=2)
    assert made == ["a", "b", "c"]
    for part, gone in ((b"\x00\x01\x02\x03\x04\x05", ["b", "c"]), (b"a" * 100, ["a", "b", "c"]), (b"c" * 100, ["c"])):
        assert spoil(cp, "t", part, how) == 1
        again(a=2)
        assert made == gone
    assert again(a=2)[0][1] == body
    assert made == []


def test_states_without_steps_are_stored_as_before(cp):
    cp.save(State("t"))
    row, _ = cp.store.read("t")
    assert b"made" not in row.root

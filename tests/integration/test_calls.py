"""Calls on each store, DESIGN 6: what is refused, tools that raise, bad replies, results, many at once, transactions."""

# ruff: noqa: PT012 - a run is a context manager, and what leaving it raises is what is tested

import asyncio
import contextlib
import signal
import threading
import time
from typing import Any

import pytest

import safepoint
from safepoint import (
    CallFailed,
    CallInProgress,
    DidNotHappen,
    Done,
    InDoubt,
    NotDone,
    RefusedType,
    Retry,
    RunEnded,
    StoreFull,
    Unavailable,
    Unknown,
    UsageError,
    model,
    tool,
    tools,
)
from tests.integration.conftest import STORES, new_url
from tests.support import ledgers
from tests.support.runs import CANARY, Death, Failing, NotStorable, World, declare, died, statuses

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
    outcomes: list[Any] = []

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
    caught: list[str] = []
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


# -- transactional tools


@pytest.fixture(params=[kind for kind in STORES if kind in {"sqlite", "postgres"}])
def sql(request, tmp_path):
    """Each store that lends a connection."""
    with safepoint.open(new_url(request.param, tmp_path)) as opened:
        yield opened


def ledger_of(cp):
    ledgers.make(cp, "entry TEXT")
    table = ledgers.table_of(cp.store.url)

    def entries():
        with cp.connection() as conn:
            return sorted(e for (e,) in conn.execute(f"SELECT entry FROM {table}").fetchall())

    return entries


@pytest.fixture
def ledger(sql):
    return ledger_of(sql)


def transactional(body=None):
    tools._registry.named.pop("book", None)  # as in another process, whoever may still hold the last one here

    @tool(effect="transactional", name="book")
    def book(entry, *, connection):
        ledgers.insert(connection, entry=entry)
        if body is not None:
            body(connection)
        return f"booked {entry}"

    return book


def test_effect_and_record_are_one(sql, ledger):
    book = transactional()
    with died(sql, "t") as run:
        assert run.call(book, "a") == "booked a"
        raise Death
    with sql.resume("t") as run:
        assert run.call(book, "a") == "booked a"
        run.save()
    assert ledger() == ["a"]


@pytest.mark.parametrize("end", [ValueError("no"), KeyboardInterrupt(), Death()])
def test_what_raises_is_rolled_back(sql, ledger, end):
    def body(connection):
        raise end

    expected = CallFailed if isinstance(end, Exception) else type(end)
    with pytest.raises(expected), sql.resume("t") as run:
        run.call(transactional(body), "a")
    assert ledger() == []
    with sql.resume("t") as run:
        assert run.call(transactional(), "a") == "booked a"
    assert ledger() == ["a"]
    assert statuses(sql) == ["succeeded"]


ENDINGS = {
    "sqlite": ["COMMIT", "ROLLBACK", "/**/ commit ;", "ATTACH ':memory:' AS other", "DELETE FROM sp_calls"],
    "postgres": ["COMMIT", "ROLLBACK", "commit and chain", "END"],
}


@pytest.mark.parametrize(
    ("sql", "statement"),
    [(kind, text) for kind, texts in ENDINGS.items() if kind in STORES for text in texts],
    indirect=["sql"],
)
def test_the_transaction_is_the_librarys(sql, ledger, statement):
    with pytest.raises(CallFailed) as caught, sql.resume("t") as run:
        run.call(transactional(lambda c: c.execute(statement)), "a")
    assert "UsageError" in caught.value.type
    assert ledger() == []
    assert statuses(sql) == ["failed"]


@pytest.mark.parametrize("sql", ["postgres"], indirect=True)
def test_a_transaction_that_was_ended_all_the_same_is_in_doubt(sql, ledger):
    """What is said to PostgreSQL need not look like it: what counts is whether it is the same transaction at the end."""
    with pytest.raises(InDoubt), sql.resume("t") as run:
        run.call(transactional(lambda c: c.execute("/**/ COMMIT; BEGIN")), "a")
    assert ledger() == ["a"], "it stands without its record, and a person is asked"
    assert statuses(sql) == ["in_doubt"]


def test_a_transactional_result_that_cannot_be_stored(sql, ledger):
    @tool(effect="transactional", name="odd")
    def odd(*, connection):
        ledgers.insert(connection, entry="odd")
        return NotStorable()

    for _ in range(2):
        with pytest.raises(RefusedType), sql.resume("t") as run:
            run.call(odd)
    assert ledger() == ["odd"]


def test_a_transactional_call_among_others(sql, ledger, world):
    book, act = transactional(), declare(world, "read")
    with sql.resume("t") as run:
        assert run.call_many([book.bind("a"), act.bind(1), book.bind("b")]) == ["booked a", "done 1", "booked b"]
    assert sorted(ledger()) == ["a", "b"]


def test_a_replanned_transactional_write_is_parked(sql, ledger):
    book = transactional()
    with died(sql, "t") as run:
        run.call(book, "a")
        raise Death
    with pytest.raises(InDoubt), sql.resume("t") as run:
        run.call(book, "A")
    assert ledger() == ["a"]


def test_a_full_disk_that_the_tool_swallows_leaves_no_half_effect_behind(sqlite):
    """SQLite itself may have ended the transaction: then it is not known to be undone, and nobody says so."""

    ledger = ledger_of(sqlite)

    @tool(effect="transactional", name="swallows")
    def swallows(*, connection):
        connection.execute("INSERT INTO ledger VALUES ('first')")
        try:
            connection.execute("INSERT INTO ledger VALUES (?)", ("x" * 20_000_000,))
        except Exception:
            return "went on"
        return "fitted"

    with sqlite.resume("t") as run:
        run.save()
    with sqlite.connection() as conn:
        conn.authorizer = None
        (pages,) = conn.execute("PRAGMA page_count").fetchone()
        conn.execute(f"PRAGMA max_page_count = {pages + 50}")
    with pytest.raises((InDoubt, StoreFull, Unavailable)), sqlite.resume("t") as run:
        run.call(swallows)
    with sqlite.connection() as conn:
        conn.authorizer = None
        conn.execute("PRAGMA max_page_count = 1000000")
    assert ledger() == []
    assert statuses(sqlite)[0] in {"in_doubt", "started"}


# -- settlements that cannot be kept, and ends that come from outside


def test_a_verified_result_that_cannot_be_stored(cp, world):
    act = declare(world, verify=True)
    world.next, world.says = [Death()], Done(NotStorable())
    with died(cp, "t") as run:
        run.call(act)
    for _ in range(2):
        with pytest.raises(RefusedType), cp.resume("t") as run:
            run.call(act)
    assert world.log == [(0,)]
    assert len(world.asked) == 1


def test_a_result_that_had_landed_after_all_among_others(url, world):
    """The commit's outcome was unknown, and calls beside it have written since."""
    with safepoint.open(url) as inner:
        store = Failing(inner.store)
        cp = safepoint.open(store)
        act = declare(world)
        gate = threading.Event()
        failed: list[int] = []

        def lost(commit):
            if commit.calls and commit.calls[0].row.status == "succeeded" and not failed:
                failed.append(1)
                gate.set()
                return Unavailable("no answer")
            return None

        @tool(name="beside")
        def beside():
            assert gate.wait(10)
            return "beside"

        store.after = lost
        with cp.resume("t") as run:
            with pytest.raises(Unavailable):
                run.call_many([act.bind(1), beside.bind()])
            assert run.call(act, 1) == "done 1"
            run.save()
        assert statuses(inner) == ["succeeded", "succeeded"]
        assert world.log == [(1,)]


def test_ctrl_c_stops_an_async_tool_of_a_sync_run(cp):
    stopped = []
    main = threading.main_thread().ident

    @tool(effect="read", name="long-async")
    async def long():
        threading.Timer(0.05, signal.pthread_kill, (main, signal.SIGINT)).start()
        try:
            await asyncio.sleep(30)
        finally:
            stopped.append(1)

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), cp.resume("t") as run:
        run.call(long)
    assert stopped == [1], "it has ended before the interrupt goes on"
    assert time.monotonic() - began < 10
    assert cp.status("t").status == "interrupted"


def test_listing_calls(cp, world):
    act = declare(world, "read")
    world.next = [1, ValueError(), 3]
    with cp.resume("t") as run:
        for i in range(3):
            with contextlib.suppress(CallFailed):
                run.call(act, i)
    assert [c.no for c in cp.calls("t")] == [1, 2, 3]
    assert [c.no for c in cp.calls("t", limit=2)] == [2, 3]
    assert [c.no for c in cp.calls("t", status="failed")] == [2]
    assert [c.no for c in cp.calls("t", status="succeeded", limit=1)] == [3]
    assert cp.calls("t", limit=0) == cp.calls("t", status="succeeded", limit=0) == []
    for wrong in ({"status": "happy"}, {"limit": -1}, {"limit": True}):
        with pytest.raises(UsageError):
            cp.calls("t", **wrong)

"""The async face, on each store: DESIGN 5 and 7. The rules are those of the sync one, and are tested there."""

# ruff: noqa: PT012 - a run is a context manager, and what leaving it raises is what is tested

import asyncio
import contextlib
import inspect
import threading
import time

import pytest

import safepoint
from safepoint import (
    CallFailed,
    CallInProgress,
    Conflict,
    DecisionNeeded,
    Done,
    InDoubt,
    LeaseHeld,
    LeaseLost,
    NotDone,
    Retry,
    RunEnded,
    State,
    StepResult,
    UsageError,
    model,
    run_agent_async,
    tool,
)
from tests.integration.test_verbs import arguments_of
from tests.support.runs import Failing


def verbs_of(cls):
    return {n: f for n, f in inspect.getmembers(cls, inspect.isfunction) if not n.startswith("_")}


@pytest.fixture
def run_async(url):
    """Run a coroutine function with an open checkpointer, in a loop of its own."""

    def run(main):
        async def whole():
            async with safepoint.open_async(url) as acp:
                return await main(acp)

        return asyncio.run(whole())

    return run


# -- the two faces


@pytest.mark.parametrize(
    ("sync", "other"), [(safepoint.Checkpointer, safepoint.AsyncCheckpointer), (safepoint.Run, safepoint.AsyncRun)]
)
def test_the_faces_have_the_same_verbs_with_the_same_signatures(sync, other):
    assert set(verbs_of(sync)) == set(verbs_of(other))
    for name, verb in verbs_of(sync).items():
        mine, theirs = (inspect.signature(f).parameters.values() for f in (verb, verbs_of(other)[name]))
        assert [(p.name, p.kind, p.default) for p in mine] == [(p.name, p.kind, p.default) for p in theirs], name
    properties = [{n for n, v in inspect.getmembers(c) if isinstance(v, property)} for c in (sync, other)]
    assert properties[0] == properties[1]


def test_the_loops_and_the_openers_take_the_same():
    mine, theirs = (list(inspect.signature(f).parameters.values()) for f in (safepoint.run_agent, run_agent_async))
    assert [(p.name, p.kind, p.default) for p in mine] == [(p.name, p.kind, p.default) for p in theirs]


@pytest.mark.parametrize("owned", [True, False])
def test_every_verb_says_clearly_that_it_is_closed(url, owned):
    names = sorted(set(verbs_of(safepoint.AsyncCheckpointer)) - {"close"})
    assert len(names) > 30
    with safepoint.open(url) as cp:
        cp.save(State("t"))

        async def main():
            acp = safepoint.open_async(url) if owned else safepoint.open_async(cp)
            await acp.close()
            await acp.close()
            wrong = {}
            for name in names:
                found = getattr(acp, name)(**arguments_of(getattr(safepoint.AsyncCheckpointer, name)))
                try:
                    await (found if inspect.iscoroutine(found) else found.__aenter__())
                    wrong[name] = "nothing"
                except UsageError as error:
                    if "closed" not in str(error):
                        wrong[name] = str(error)
            assert wrong == {}

        asyncio.run(main())
        assert cp.load_latest("t") is not None


def test_every_verb_works(run_async):
    async def main(acp):
        state = State("t", metadata={"k": 1})
        head = await acp.save(state, label="one")
        assert (await acp.load_latest("t")).seq == (await acp.load("t", id=head.id)).seq == 1
        await acp.update("t", lambda s: s.messages.append("m"))
        assert [c.seq for c in await acp.list_checkpoints("t", filter={"k": 1})] == [2, 1]
        await acp.pin("t", 1)
        assert (await acp.cleanup("t", keep_latest=1, dry_run=True)).deleted == ()
        await acp.unpin("t", 1)
        assert (await acp.cleanup("t", keep_latest=1)).deleted == (1,)
        assert await acp.check_state(state) is None
        assert [t.task_id for t in await acp.tasks()] == ["t"]
        assert (await acp.plan("t")).does == "carry on"
        assert await acp.calls("t") == await acp.pauses("t") == []
        assert await acp.check()
        assert acp.durability in {"none", "full"}
        await acp.finish("t", 5)
        assert (await acp.status("t")).status == "finished"
        await acp.delete_task("t")
        assert await acp.load_latest("t") is None
        assert "AsyncCheckpointer" in repr(acp)

    run_async(main)


def test_a_lent_connection(tmp_path):
    async def main():
        async with safepoint.open_async(f"sqlite:///{tmp_path}/a.db") as acp:
            async with acp.connection() as conn:
                conn.execute("CREATE TABLE mine (x)")
            with pytest.raises(ValueError, match="mine"):
                async with acp.connection() as conn:
                    conn.execute("BEGIN")
                    conn.execute("INSERT INTO mine VALUES (1)")
                    raise ValueError("mine")
            await acp.save(State("t"))
            async with acp.connection() as conn:
                assert list(conn.execute("SELECT * FROM mine")) == []

    asyncio.run(main())


# -- several loops, several threads


def test_one_object_in_several_loops_in_turn(url):
    acp = safepoint.open_async(url)  # made without a loop, as at import time

    async def add(i):
        state = await acp.load_latest("t") or State("t")
        state.messages.append(i)
        await acp.save(state)
        async with acp.resume("r") as run:
            await run.save()

    for i in range(3):
        asyncio.run(add(i))
    assert asyncio.run(acp.load_latest("t")).messages == [0, 1, 2]
    asyncio.run(acp.close())


def test_one_object_in_two_threads_with_loops_of_their_own(url):
    acp = safepoint.open_async(url)
    gate = threading.Barrier(2)
    problems = []

    async def work(name):
        gate.wait()
        for i in range(20):
            state = await acp.load_latest(name) or State(name)
            state.step = i
            await acp.save(state)
            await asyncio.gather(acp.tasks(), acp.status(name))

    def thread(name):
        try:
            asyncio.run(work(name))
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=thread, args=(n,)) for n in "ab"]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert problems == []
    assert [len(acp.sync.list_checkpoints(n)) for n in "ab"] == [20, 20]
    asyncio.run(acp.close())


def test_the_loop_is_not_blocked_by_the_store(url):
    with safepoint.open(url) as inner:
        store = Failing(inner.store)
        store.before = lambda c: time.sleep(0.3)

        async def main():
            acp = safepoint.open_async(store)
            saving = asyncio.ensure_future(acp.save(State("t")))
            ticks = 0
            while not saving.done():
                await asyncio.sleep(0.01)
                ticks += 1
            await saving
            await acp.close()
            return ticks

        assert asyncio.run(main()) > 5


# -- cancellation


def slow_store(url, stack, started, go):
    """A checkpointer over a store whose next commit waits for ``go``."""
    inner = stack.enter_context(safepoint.open(url))
    store = Failing(inner.store)

    def wait(commit):
        started.set()
        assert go.wait(10)
        store.before = lambda c: None

    store.before = wait
    return inner, store


def test_a_cancelled_save_that_is_being_written_lands_before_the_cancellation_goes_on(url):
    started, go = threading.Event(), threading.Event()
    with contextlib.ExitStack() as stack:
        inner, store = slow_store(url, stack, started, go)

        async def main():
            acp = safepoint.open_async(store)
            saving = asyncio.ensure_future(acp.save(State("t"), id="mine"))
            await asyncio.to_thread(started.wait, 10)
            saving.cancel()
            await asyncio.sleep(0.05)
            saving.cancel()  # impatience changes nothing
            assert not saving.done(), "it waits for the outcome"
            go.set()
            with pytest.raises(asyncio.CancelledError):
                await saving
            assert inner.load("t", id="mine").seq == 1
            await acp.close()

        asyncio.run(main())


def test_a_cancelled_save_that_was_not_begun_never_is(url):
    started, go = threading.Event(), threading.Event()
    with contextlib.ExitStack() as stack:
        inner, store = slow_store(url, stack, started, go)

        async def main():
            acp = safepoint.open_async(store)
            busy = [acp._off.submit(lambda: go.wait(10)) for _ in range(8)]
            saving = asyncio.ensure_future(acp.save(State("t")))
            await asyncio.sleep(0.02)
            saving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await saving
            go.set()
            for job in busy:
                job.result()
            store.before = lambda c: None
            await acp.save(State("other"))
            assert [t.task_id for t in inner.tasks()] == ["other"]
            await acp.close()

        asyncio.run(main())


def test_a_cancelled_run_is_interrupted_and_free(run_async):
    async def main(acp):
        inside = asyncio.Event()

        async def step(run):
            inside.set()
            await asyncio.sleep(30)

        task = asyncio.ensure_future(run_agent_async(step, task_id="t", store=acp))
        await inside.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await acp.status("t")).status == "interrupted"
        async with acp.resume("t"):
            pass

    run_async(main)


def test_a_cancelled_write_is_open_and_the_run_over(run_async):
    async def main(acp):
        inside = asyncio.Event()

        @tool(verify=lambda call: Done("had happened"), settle_after=0, name=f"a-write-{id(acp)}")
        async def act():
            inside.set()
            await asyncio.sleep(30)

        async def step(run):
            with contextlib.suppress(asyncio.CancelledError):
                await run.call(act)
            run.finish("past it")

        task = asyncio.ensure_future(run_agent_async(step, task_id="t", store=acp))
        await inside.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [c.status for c in await acp.calls("t")] == ["started"]
        assert (await acp.status("t")).status == "interrupted"

        async def again(run):
            run.finish(await run.call(act))

        assert (await run_agent_async(again, task_id="t", store=acp)).result == "had happened"

    run_async(main)


def test_a_timeout_of_the_agents_own_around_a_read(run_async):
    async def main(acp):
        @tool(effect="read", name="slow-read")
        async def look(seconds):
            await asyncio.sleep(seconds)
            return seconds

        async with acp.resume("t") as run:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await run.call(look, 30)
            assert await run.call(look, 0) == 0
            await run.save()

    run_async(main)


def test_a_sync_tool_is_waited_for_when_its_caller_is_cancelled(run_async):
    ended = []

    async def main(acp):
        started = threading.Event()

        @tool(effect="read", name="cannot-be-stopped")
        def work():
            started.set()
            time.sleep(0.2)
            ended.append(1)

        async def step(run):
            await run.call(work)

        task = asyncio.ensure_future(run_agent_async(step, task_id="t", store=acp))
        await asyncio.to_thread(started.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended == [1]

    run_async(main)


def test_a_cancellation_at_any_await_leaves_a_task_that_can_be_carried_on(url):
    """Cancelled after each of the first hundred turns of the loop in turn."""
    with safepoint.open(url) as cp:
        for turn in range(0, 100, 7):
            done: list[int] = []

            def look(call, done=done):
                return Done("v") if call.arguments["n"] in done else NotDone()

            @tool(name="once", verify=look, settle_after=0)
            async def once(n):
                done.append(n)  # noqa: B023
                await asyncio.sleep(0)
                return "v"

            async def step(run):
                run.state.messages.append(await run.call(once, run.state.step))
                if run.state.step == 1:
                    run.finish()

            async def main(turn=turn):
                acp = safepoint.open_async(cp)
                task = asyncio.ensure_future(run_agent_async(step, task_id=f"t{turn}", store=acp))
                for _ in range(turn):
                    await asyncio.sleep(0.0002)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
                outcome = await run_agent_async(step, task_id=f"t{turn}", store=acp)
                await acp.close()
                return outcome

            outcome = asyncio.run(main())
            assert outcome.status == "finished", (turn, [(c, c.reason) for c in outcome.pending])
            assert outcome.state.messages == ["v", "v"]
            assert done == [0, 1], f"cancelled at {turn}"


def test_close_waits_for_what_is_under_way(url):
    started, go = threading.Event(), threading.Event()
    with contextlib.ExitStack() as stack:
        inner, store = slow_store(url, stack, started, go)

        async def main():
            acp = safepoint.open_async(store)
            saving = asyncio.ensure_future(acp.save(State("t")))
            await asyncio.to_thread(started.wait, 10)
            closing = asyncio.ensure_future(acp.close())
            await asyncio.sleep(0.02)
            assert not closing.done()
            go.set()
            await closing
            assert (await saving).seq == 1

        asyncio.run(main())
        assert inner.load_latest("t") is not None


# -- runs


def test_the_handle(run_async):
    async def main(acp):
        async with acp.resume("t") as run:
            assert run.is_new
            run.state.messages.append("m")
            run.milestone("m")
            assert (await run.save("x")).kind == "milestone"
            run.finish("r")
            await run.save()
        assert (await acp.status("t")).status == "finished"
        run = acp.resume("t")
        async with run:
            with pytest.raises(LeaseHeld):
                async with acp.resume("t"):
                    pass
        with pytest.raises(UsageError, match="over"):
            await run.save()
        with pytest.raises(ValueError, match="mine") as caught:
            async with acp.resume("t") as run:
                raise ValueError("mine")
        assert "safepoint kept" in caught.value.__notes__[0]

    run_async(main)


def test_calls_of_every_kind(run_async):
    async def main(acp):
        threads = []

        @tool(effect="read", name="k-sync")
        def sync_tool(x):
            threads.append(threading.current_thread())
            return x

        @tool(name="k-async")
        async def async_tool(x):
            threads.append(threading.current_thread())
            return -x

        @model(name="k-model", retry=Retry(3, backoff=0))
        async def ask(messages):
            return {"content": "hi", "usage": {"input_tokens": 3, "output_tokens": 1}}

        async with acp.resume("t") as run:
            assert await run.call(sync_tool, 1) == 1
            assert await run.call(async_tool, 2) == -2
            assert await sync_tool(3) == 3, "a direct call in an async run is awaited"
            assert await async_tool(4) == -4
            assert await run.call_tool(async_tool, '{"x": 5}', call_id="c") == -5
            assert await run.call_many([sync_tool.bind(6), async_tool.bind(7)]) == [6, -7]
            assert (await run.call(ask, []))["content"] == "hi"
            assert run.metrics.tokens_in == 3
            await run.save()
        assert threads[0] is not threading.main_thread(), "the loop goes on meanwhile"
        assert threads[1] is threading.main_thread()
        assert {c.status for c in await acp.calls("t")} == {"succeeded"}
        assert len(await acp.calls("t")) == 8

    run_async(main)


def test_many_at_once_are_bounded_ordered_and_all_awaited(run_async):
    async def main(acp):
        now, most, ended = [], [], []

        @tool(effect="read", name="many")
        async def work(x):
            now.append(x)
            most.append(len(now))
            await asyncio.sleep(0.005)
            now.remove(x)
            if x == 2:
                raise ValueError("two")
            ended.append(x)
            return x

        async with acp.resume("t") as run:
            found = await run.call_many([work.bind(i) for i in range(6)], max_parallel=2, return_errors=True)
            assert [isinstance(f, CallFailed) for f in found] == [i == 2 for i in range(6)]
            assert max(most) == 2
            with pytest.raises(CallFailed):
                await run.call_many([work.bind(i) for i in (2, 7, 8)])
            assert sorted(ended[-2:]) == [7, 8]

    run_async(main)


def test_gathered_calls_are_told_apart(run_async):
    async def main(acp):
        count = []

        @tool(name="gathered")
        async def act(x):
            count.append(x)
            await asyncio.sleep(0.01)
            return x

        async with acp.resume("t") as run:
            assert await asyncio.gather(*(run.call(act, i) for i in range(4))) == [0, 1, 2, 3]
            found = await asyncio.gather(*(run.call(act, 9, call_id="c") for _ in range(3)), return_exceptions=True)
            assert found[0] == 9
            assert [type(f) for f in found[1:]] == [CallInProgress] * 2
        assert sorted(count) == [0, 1, 2, 3, 9]

    run_async(main)


def test_a_sync_tool_inside_of_an_async_run_belongs_to_its_call(run_async):
    async def main(acp):
        @tool(name="inner")
        def inner(x):
            return x * 2

        @tool(name="outer")
        def outer(x):
            return inner(x)

        async with acp.resume("t") as run:
            assert await run.call(outer, 4) == 8
        assert [c.tool for c in await acp.calls("t")] == ["outer"]

    run_async(main)


def test_what_ends_a_run_is_sticky(run_async):
    async def main(acp):
        @tool(name="lost")
        async def act():
            raise OSError("lost reply")

        with pytest.raises(InDoubt):
            async with acp.resume("t") as run:
                for use in (lambda: run.call(act), lambda: run.call_many([act.bind()]), run.save, lambda: run.pause("p")):
                    with pytest.raises(RunEnded):
                        await use()
                with pytest.raises(RunEnded):
                    run.finish()
        with pytest.raises(InDoubt):
            async with acp.resume("t"):
                raise AssertionError
        await acp.resolve("t", 1, Done(1))
        with pytest.raises(LeaseLost):
            async with acp.resume("t") as run:
                async with acp.resume("t", steal=True):
                    pass
                await run.save()

    run_async(main)


def test_pauses_and_their_answers(run_async):
    async def main(acp):
        async def step(run):
            run.finish(await run.pause("p", "?"))

        outcome = await run_agent_async(step, task_id="t", store=acp)
        assert (outcome.status, outcome.pending[0].name) == ("waiting", "p")
        assert (await run_agent_async(step, task_id="t", store=acp)).status == "waiting"
        await acp.answer("t", "p", 7)
        assert (await run_agent_async(step, task_id="t", store=acp)).result == 7
        with pytest.raises(DecisionNeeded):
            async with acp.resume("u") as run:
                await run.pause("q")

    run_async(main)


def test_the_loop_in_both_shapes(run_async, url):
    async def main(acp):
        async def step(run):
            run.state.messages.append(run.state.step)
            if run.state.step == 2:
                run.finish("end")

        async def pure(state: State):
            return StepResult([state.step], done=state.step == 1)

        def sync_pure(state: State):
            return StepResult([state.step], done=state.step == 1)

        outcome = await run_agent_async(step, task_id="t", input="x", store=acp, save_every=2)
        assert (outcome.status, outcome.result, outcome.steps) == ("finished", "end", 3)
        assert (await run_agent_async(step, task_id="t", input="x", store=acp)).result == "end"
        for shape in (pure, sync_pure):
            assert (await run_agent_async(shape, store=acp)).state.messages == [0, 1]
        with pytest.raises(UsageError, match="async"):
            await run_agent_async(lambda run: None, store=acp)
        assert (await run_agent_async(step, task_id="by-url", store=url)).status == "finished"
        assert (await run_agent_async(step, task_id="by-cp", store=acp.sync)).status == "finished"

    run_async(main)


def test_hooks_may_be_async_or_not(run_async):
    seen = []

    class Hook:
        async def before_step(self, run):
            seen.append("before")
            return {"n": run.state.step}

        def after_commit(self, run, checkpoint):
            seen.append(checkpoint.seq)

    async def main(acp):
        async def step(run):
            assert run.context == {"n": 0}
            run.finish()

        await run_agent_async(step, store=acp, hooks=[Hook()])

    run_async(main)
    assert seen == ["before", 2]


def test_a_step_that_raises(run_async):
    async def main(acp):
        async def step(run):
            run.state.messages.append("half")
            raise ValueError("mine")

        with pytest.raises(ValueError, match="mine") as caught:
            await run_agent_async(step, task_id="t", store=acp)
        assert "t@2" in caught.value.__notes__[0]
        assert (await acp.status("t")).status == "failed"

    run_async(main)


def test_stop_iteration_of_a_sync_tool_hangs_nothing(run_async):
    async def main(acp):
        @tool(effect="read", name="stops")
        def stops():
            next(iter(()))

        async with acp.resume("t") as run:
            async with asyncio.timeout(10):
                with pytest.raises(CallFailed, match="StopIteration"):
                    await run.call(stops)

    run_async(main)


def test_an_update_that_loses_raises_here_too(run_async):
    async def main(acp):
        await acp.save(State("t"))

        def steal(state):
            acp.sync.save(acp.sync.load_latest("t"))

        with pytest.raises(Conflict):
            await acp.update("t", steal, retries=1)

    run_async(main)


def test_async_and_sync_face_on_one_checkpointer(url):
    with safepoint.open(url) as cp:
        cp.save(State("t"))

        async def main():
            async with safepoint.open_async(cp) as acp:
                assert (await acp.load_latest("t")).seq == 1

        asyncio.run(main())
        assert cp.load_latest("t").seq == 1


def test_cancelled_calls_at_the_same_time_have_all_ended(run_async):
    async def main(acp):
        now, ended = set(), []

        @tool(effect="read", name="cancelled-many")
        async def work(x):
            now.add(x)
            try:
                await asyncio.sleep(30)
            finally:
                await asyncio.sleep(0.01)
                now.discard(x)
                ended.append(x)

        async def step(run):
            await run.call_many([work.bind(i) for i in range(5)], max_parallel=3)

        task = asyncio.ensure_future(run_agent_async(step, task_id="t", store=acp))
        while len(now) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert now == set()
        assert sorted(ended) == [0, 1, 2], "and no more were begun"
        assert (await acp.status("t")).status == "interrupted"

    run_async(main)


def test_retries_wait_without_blocking(run_async):
    async def main(acp):
        tries = []

        @tool(effect="read", name="retried", retry=Retry(3, backoff=0.02))
        async def flaky():
            tries.append(time.monotonic())
            if len(tries) < 3:
                raise OSError
            return "at last"

        async with acp.resume("t") as run:
            assert await run.call(flaky) == "at last"
        assert tries[1] - tries[0] >= 0.02
        assert tries[2] - tries[1] >= 0.04

    run_async(main)


def test_a_run_may_be_closed_without_a_block(run_async):
    async def main(acp):
        run = acp.resume("t")
        await run.__aenter__()
        await run.save()
        await run.close()
        await run.close()
        assert (await acp.status("t")).status == "interrupted"

    run_async(main)


def test_a_connection_that_is_waited_for_in_vain_is_given_back(tmp_path):
    async def main():
        async with safepoint.open_async(f"sqlite:///{tmp_path}/a.db") as acp:

            async def lend():
                async with acp.connection():
                    raise AssertionError

            async with acp.connection():
                task = asyncio.ensure_future(lend())
                await asyncio.sleep(0.05)
                task.cancel()
                await asyncio.sleep(0.05)
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.wait_for(acp.save(State("t")), 5)

    asyncio.run(main())


def test_a_result_that_was_not_written_is_written_before_the_next_call(url):
    with safepoint.open(url) as inner:
        store = Failing(inner.store)

        @tool(name="full")
        async def act(x):
            return x

        async def main():
            acp = safepoint.open_async(store)
            async with acp.resume("t") as run:
                store.before = lambda c: (
                    safepoint.StoreFull("full") if c.calls and c.calls[0].row.status == "succeeded" else None
                )
                with pytest.raises(safepoint.StoreFull):
                    await run.call(act, 1)
                store.before = lambda c: None
                assert await run.call_many([act.bind(2)]) == [2]
                assert await run.call(act, 1) == 1
                await run.save()
            await acp.close()

        asyncio.run(main())
        assert [c.status for c in inner.calls("t")] == ["succeeded", "succeeded"]

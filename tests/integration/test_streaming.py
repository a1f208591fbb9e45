"""``run.stream``: chunks as they come, the whole reply on record or nothing, and no trace of a stream that was left."""

import asyncio
import gc
import threading
import warnings
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import safepoint
from safepoint import CallFailed, Retry, RunEnded, UsageError, model, tool
from tests.support import sse

KINDS = {
    "chat": (sse.CHAT, sse.CHAT_REPLY),
    "responses": (sse.RESPONSES, sse.RESPONSES_REPLY),
    "anthropic": (sse.ANTHROPIC, sse.ANTHROPIC_REPLY),
}
HELLO: list[Any] = [{"role": "user", "content": "hi"}]


class Provider:
    """SDK clients over a transport, and models that ask them."""

    def __init__(self, kind: str, *, is_async: bool = False) -> None:
        self.events, self.reply = KINDS[kind]
        self.sent: list[Any] = []
        self.closed: list[str] = []
        self.cut: int | None = None
        client = sse.client(kind, lambda: sse.body(self.events, cut=self.cut), self.sent, self.closed, is_async=is_async)

        def ask(messages: list[Any]) -> Any:
            return sse.ask(kind, client, messages)

        async def ask_async(messages: list[Any]) -> Any:
            return await sse.ask(kind, client, messages)

        self.ask = model(name=f"ask {kind}")(ask_async if is_async else ask)
        self.seen = [e for e in self.events if e.get("type") != "ping"]


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def cp(tmp_path):
    with safepoint.open(f"sqlite:///{tmp_path}/agent.db") as cp:
        yield cp


def wire(chunks: list[Any]) -> list[Any]:
    return [c.to_dict(mode="json", warnings=False) for c in chunks]


def calls(cp: Any) -> list[tuple[str, int]]:
    return [(c.status, c.attempts) for c in cp.calls("t")]


def test_chunks_pass_live_and_the_whole_reply_is_recorded_before_the_last(cp, kind):
    provider = Provider(kind)
    on_record: list[list[tuple[str, int]]] = []
    with cp.resume("t") as run:
        stream = run.stream(provider.ask, HELLO)
        assert repr(stream) == "<Stream not begun>"
        got = []
        for chunk in stream:
            got.append(chunk)
            on_record.append(calls(cp))
        assert wire(got) == provider.seen
        reply = stream.reply()
        assert reply.to_dict(mode="json", warnings=False) == provider.reply
        assert not stream.replayed
        # Not before its stop reason, and before the consumer sees that.
        whole = len(provider.seen) - 1 - (kind == "chat")
        assert [r == [("succeeded", 1)] for r in on_record] == [i >= whole for i in range(len(got))]
        assert provider.closed == ["sync"]
        tokens = (run.metrics.tokens_in, run.metrics.tokens_out)
        assert tokens == {"chat": (11, 5), "responses": (3, 4), "anthropic": (9, 77)}[kind]
        # Served from the journal within the step, too; by the same classes, with the same text.
    assert cp.calls("t")[0].model["usage"] == {"input": tokens[0], "output": tokens[1]}
    with cp.resume("t") as run:
        stream = run.stream(provider.ask, HELLO)
        again = list(stream)
        assert stream.replayed
        assert len(provider.sent) == 1
        assert {type(c) for c in again} <= {type(c) for c in got}
        assert stream.reply() == reply
        assert type(stream.reply()) is type(reply)
        run.save()


@pytest.mark.parametrize("leave", ["break", "close", "with", "drop", "exception", "hold"])
def test_field_case_94_a_stream_that_is_left_is_no_reply_and_is_asked_again(cp, kind, leave):
    provider = Provider(kind)
    held: list[Any] = []

    def step(run: Any) -> None:
        run.call(note, "before")
        if len(provider.sent) == 0:
            stream = run.stream(provider.ask, run.state.messages)
            if leave in ("break", "exception", "hold"):
                if leave == "hold":
                    held.append(stream)
                for n, _ in enumerate(stream):
                    if n == 3 and leave == "exception":
                        raise BrokenPipeError("the page was closed")
                    if n == 3:
                        break
                del stream
            elif leave == "with":
                with stream:
                    next(stream)
            else:
                next(stream)
                if leave == "close":
                    stream.close()
                    stream.close()
                    with pytest.raises(UsageError, match="closed before its reply"):
                        stream.reply()
                    assert list(stream) == []
                    assert provider.closed == ["sync"]
                del stream
                gc.collect()
            raise BrokenPipeError("the page was closed")
        got = list(stream := run.stream(provider.ask, run.state.messages))
        run.state.messages.append(stream.reply())
        assert wire(got)
        run.finish("done")

    made: list[str] = []

    @tool(name="note")
    def note(text: str) -> int:
        made.append(text)
        return len(made)

    with pytest.raises(BrokenPipeError):
        safepoint.run_agent(step, task_id="t", input="hello", store=cp)
    # What the user said and what the tools did is there. Of the reply there is nothing that could pass for one.
    assert [m["content"] for m in cp.load_latest("t").messages] == ["hello"]
    assert calls(cp) == [("succeeded", 1), ("started", 1)]
    assert provider.closed == ["sync"]
    assert cp.status("t").status == "failed"
    if leave == "hold":
        with pytest.raises(UsageError, match="closed"):
            next(held[0])
    outcome = safepoint.run_agent(step, task_id="t", store=cp)
    assert outcome.status == "finished"
    assert made == ["before"]
    assert len(provider.sent) == 2
    assert provider.sent[0] == provider.sent[1]
    assert len(outcome.state.messages) == 2
    assert calls(cp) == [("succeeded", 1), ("succeeded", 2)]
    assert [f for f in cp.check() if f.level == "error"] == []


def test_a_step_goes_on_past_a_stream_that_it_left(cp, kind):
    provider = Provider(kind)

    def step(run: Any) -> None:
        kept = run.stream(provider.ask, HELLO)
        next(kept)  # held, begun, never ended: the end of the step closes it
        for _ in run.stream(provider.ask, [*HELLO, *HELLO]):
            break
        run.stream(provider.ask, HELLO)  # never begun: nothing is asked
        if run.state.step:
            assert run.stream(provider.ask, []).reply() is not None
            run.finish()

    safepoint.run_agent(step, task_id="t", input="hello", store=cp)
    assert len(provider.sent) == 5
    assert calls(cp) == [("failed", 1)] * 2 + [("failed", 1)] * 2 + [("succeeded", 1)]
    assert provider.closed == ["sync"] * 5


def test_asking_again_in_the_same_step(cp):
    provider = Provider("anthropic")
    with cp.resume("t") as run:
        for _ in run.stream(provider.ask, HELLO):
            break
        assert calls(cp) == [("started", 1)]
        reply = run.stream(provider.ask, HELLO).reply()
        assert calls(cp) == [("succeeded", 2)]
        run.state.messages.append(reply)
        run.save()


@pytest.mark.parametrize("cut", [0, 1, 5, -2, -1])
def test_a_cut_connection_is_a_failed_call(cp, kind, cut):
    provider = Provider(kind)
    provider.cut = cut if cut >= 0 else len(provider.events) + cut
    whole = kind == "chat" and cut == -1  # its usage is lost, and nothing else

    def step(run: Any) -> None:
        stream = run.stream(provider.ask, HELLO)
        try:
            got.append(list(stream))
        except CallFailed:
            with pytest.raises(CallFailed):
                stream.reply()
            assert list(stream) == []
            raise
        run.finish(stream.reply())

    got: list[list[Any]] = []
    if whole:
        safepoint.run_agent(step, task_id="t", input="hello", store=cp)
        assert calls(cp) == [("succeeded", 1)]
        assert wire(got[0]) == provider.seen[:-1]
        return
    with pytest.raises(CallFailed, match="onnection"):
        safepoint.run_agent(step, task_id="t", input="hello", store=cp)
    assert calls(cp) == [("failed", 1)]
    assert provider.closed == ["sync"]
    provider.cut = None
    outcome = safepoint.run_agent(step, task_id="t", store=cp)
    assert wire(got[0]) == provider.seen
    assert len(provider.sent) == 2
    assert outcome.result.to_dict(mode="json", warnings=False) == provider.reply
    assert calls(cp) == [("succeeded", 2)]


def test_a_stream_that_ends_without_its_stop_reason_is_cut_too(cp, kind):
    provider = Provider(kind)
    provider.events = provider.events[: -2 if kind == "chat" else -1]  # and the connection ends in good order
    with cp.resume("t") as run, pytest.raises(CallFailed, match="before its stop reason"):
        run.stream(provider.ask, HELLO).reply()
    assert calls(cp) == [("failed", 1)]


def _say(index: int, finish: str | None = None) -> dict[str, Any]:
    choice = {"index": index, "delta": {} if finish else {"role": "assistant", "content": f"{index}"}, "finish_reason": finish}
    return {"id": "c", "object": "chat.completion.chunk", "created": 7, "model": "m", "choices": [choice]}


ONE, TWO = [_say(0), _say(0, "stop")], [_say(1), _say(1, "stop")]


@pytest.mark.parametrize(
    ("args", "kwargs", "begun", "whole"),
    [
        ((), {"n": 2}, ONE, False),
        ((2,), {}, ONE, False),
        ((), {"params": {"n": 2}}, ONE, False),
        ((), {"n": 3}, [*ONE, *TWO], False),
        ((), {"n": 2}, [*ONE, *TWO], True),
        ((), {"n": 1}, ONE, True),
        ((), {}, ONE, True),
        ((), {}, [*ONE, *TWO], False),  # more than one, of who knows how many
    ],
)
def test_a_reply_that_may_lack_a_choice_is_whole_at_the_end_of_its_stream_only(cp, args, kwargs, begun, whole):
    cut = [True]

    @model
    def ask(messages: list[Any], n: int | None = None, params: Any = None) -> Iterator[Any]:
        yield from begun
        if cut:
            raise ConnectionError("cut between two choices, or before the usage")

    def step(run: Any) -> None:
        run.finish(run.stream(ask, HELLO, *args, **kwargs).reply())

    if not whole:
        with pytest.raises(CallFailed, match="between two choices"):
            safepoint.run_agent(step, task_id="t", input="hello", store=cp)
        assert calls(cp) == [("failed", 1)]
        cut.clear()
    result = safepoint.run_agent(step, task_id="t", input="hello", store=cp).result
    assert [(c["index"], c["message"]["content"]) for c in result["choices"]] == [(0, "0"), (1, "1")][: len(begun) // 2]
    assert calls(cp) == [("succeeded", 2 - whole)]


def test_an_error_in_the_stream_and_an_exception_of_the_consumer_are_told_apart(cp):
    provider = Provider("anthropic")
    provider.events = [*sse.ANTHROPIC[:4], {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}]
    with cp.resume("t") as run, pytest.raises(CallFailed, match="verloaded"):
        run.stream(provider.ask, HELLO).reply()
    assert calls(cp) == [("failed", 1)]


def test_retries_only_before_the_first_chunk(cp):
    tries: list[int] = []

    @model(name="shaky", retry=Retry(attempts=3, backoff=0))
    def shaky(fail_at: int) -> Iterator[Any]:
        tries.append(fail_at)
        for i, event in enumerate(sse.CHAT):
            if i == fail_at and len(tries) < 3:
                raise TimeoutError
            yield event

    with cp.resume("t") as run:
        assert run.stream(shaky, 0).reply() == sse.CHAT_REPLY
        assert tries == [0, 0, 0]
        tries.clear()
        with pytest.raises(CallFailed, match="TimeoutError"):
            list(run.stream(shaky, 2))
        assert tries == [2]


def test_generators_and_collect(cp):
    log: list[str] = []

    @model(name="words")
    def words(n: int) -> Iterator[str]:
        try:
            for i in range(n):
                yield f"w{i} "
        finally:
            log.append("closed")

    class Words:
        """Whole at the third word."""

        def __init__(self) -> None:
            self.words: list[str] = []

        def add(self, chunk: str) -> bool:
            self.words.append(chunk)
            return len(self.words) >= 3

        def reply(self) -> str:
            return "".join(self.words)

        @staticmethod
        def chunks(reply: str) -> list[str]:
            return [f"{word} " for word in reply.split()]

    with cp.resume("t") as run:
        with pytest.raises(CallFailed, match="collect="):
            list(run.stream(words, 6))
        stream = run.stream(words, 4, collect="".join)
        assert list(stream) == ["w0 ", "w1 ", "w2 ", "w3 "]
        assert stream.reply() == "w0 w1 w2 w3 "
        for n, _ in enumerate(stream := run.stream(words, 5, collect=Words)):
            if n == 2:
                break
        assert stream.reply() == "w0 w1 w2 w3 w4 "  # whoever saw the third word has a recorded reply
        with pytest.raises(CallFailed, match="before its stop reason"):
            list(run.stream(words, 2, collect=Words))
        with pytest.raises(CallFailed, match="before its stop reason"):
            list(run.stream(words, 0, collect=Words))
        next(run.stream(words, 7, collect=Words))
        gc.collect()
        with pytest.raises(UsageError, match=r"run\.stream"):
            run.call(words, 3)
        with pytest.raises(UsageError, match=r"run\.stream"):
            words(3)
        assert len(log) == 5
        assert run.stream(words, 1, collect="".join).reply() == "w0 "
        assert len(log) == 7  # that of words(7) was closed by the call that came after it
        assert [c.status for c in cp.calls("t", status="started")] == ["started"]
    with cp.resume("t") as run:
        stream = run.stream(words, 4, collect="".join)
        assert (list(stream), stream.replayed, stream.reply()) == ([], True, "w0 w1 w2 w3 ")
        assert list(run.stream(words, 5, collect=Words)) == ["w0 ", "w1 ", "w2 ", "w3 ", "w4 "]
        assert len(log) == 7
    assert list(words(1)) == ["w0 "]  # outside of a run it is the plain function


def test_what_is_no_stream_is_refused(cp):
    provider = Provider("chat")

    @model(name="whole")
    def whole() -> Any:
        return sse.CHAT_REPLY

    @model(name="helper")
    def helper() -> Any:
        return sse.client("anthropic", lambda: sse.body(sse.ANTHROPIC), [], []).messages.stream(
            model="m", max_tokens=9, messages=[]
        )

    @tool(effect="read", name="reading")
    def reading() -> int:
        return 1

    with cp.resume("t") as run:
        for target in (reading, lambda: 1, 7):
            with pytest.raises(UsageError, match=r"model calls"):
                run.stream(target)
        with pytest.raises(UsageError, match="cannot be called"):
            run.stream(provider.ask)
        with pytest.raises(CallFailed, match="no stream"):
            run.stream(whole).reply()
        with pytest.raises(CallFailed, match="stream=True"):
            run.stream(helper).reply()
        with pytest.raises(CallFailed, match=r"run\.stream"):
            run.call(provider.ask, HELLO)
    with pytest.raises(UsageError, match="over"):
        run.stream(provider.ask, HELLO)


def test_a_run_that_ends_takes_its_streams_along(cp):
    provider = Provider("chat")
    with cp.resume("t") as run:
        stream = run.stream(provider.ask, HELLO)
        next(stream)
    assert cp.status("t").status == "interrupted"
    assert provider.closed == ["sync"]
    with pytest.raises(UsageError):
        next(stream)
    with cp.resume("t") as run:  # the task was let go of
        kept = run.stream(provider.ask, HELLO)
        next(kept)
        cp.close()
    assert provider.closed[:1] == ["sync"]


def test_a_pause_ends_a_stream(cp):
    provider = Provider("chat")

    def paused(run: Any) -> None:
        next(stream := run.stream(provider.ask, HELLO))
        with pytest.raises(RunEnded):
            run.pause("ask")
        with pytest.raises(RunEnded):
            run.stream(provider.ask, HELLO)
        stream.close()

    outcome = safepoint.run_agent(paused, task_id="t", input="hello", store=cp)
    assert outcome.status == "waiting"
    assert provider.closed == ["sync"]


def test_in_a_thread_of_ones_own(cp):
    provider = Provider("chat")
    with cp.resume("t") as run:
        out: list[Any] = []

        def work() -> None:
            try:
                next(run.stream(provider.ask, HELLO))
            except UsageError as error:
                out.append(error)
            out.append(run.stream(provider.ask, HELLO, call_id="page-1").reply())

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert "call_id" in str(out[0])
        assert out[1].to_dict(mode="json") == provider.reply
        run.save()


# Async


def run_async(main: Any) -> None:
    """With every warning of asyncio and of generators an error; pending tasks and forgotten generators are told when the loop ends."""
    problems: list[Any] = []

    async def watched() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: problems.append(context))
        await main
        gc.collect()
        await asyncio.sleep(0)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asyncio.run(watched(), debug=False)
        gc.collect()
    assert problems == []


def test_async_chunks_and_replay(tmp_path, kind):
    async def main() -> None:
        provider = Provider(kind, is_async=True)
        async with safepoint.open_async(f"sqlite:///{tmp_path}/a.db") as acp:
            async with acp.resume("t") as run:
                stream = run.stream(provider.ask, HELLO)
                got = [chunk async for chunk in stream]
                reply = await stream.reply()
                assert wire(got) == provider.seen
                assert reply.to_dict(mode="json", warnings=False) == provider.reply
                assert provider.closed
            async with acp.resume("t") as run:
                stream = run.stream(provider.ask, HELLO)
                assert [chunk async for chunk in stream]
                assert stream.replayed
                assert await stream.reply() == reply
                assert len(provider.sent) == 1

    run_async(main())


@pytest.mark.parametrize("leave", ["break", "aclose", "with", "cancel", "exception", "hold", "never"])
@pytest.mark.parametrize("source", ["sdk", "generator"])
def test_field_case_94_async(tmp_path, leave, source):
    provider = Provider("anthropic", is_async=True)
    begun, ended = [], []

    @model(name="generator")
    async def generator(messages: list[Any]) -> AsyncIterator[Any]:
        begun.append(1)
        try:
            for event in sse.ANTHROPIC:
                await asyncio.sleep(0)
                yield event
        finally:
            await asyncio.sleep(0)  # clean-up that awaits, which only aclose() can drive
            ended.append(1)

    ask = generator if source == "generator" else provider.ask
    held: list[Any] = []
    first = True

    async def step(run: Any) -> None:
        nonlocal first
        stream = run.stream(ask, run.state.messages)
        if first:
            first = False
            if leave == "hold":
                held.append(stream)
            if leave == "never":
                pass
            elif leave == "with":
                async with stream:
                    await anext(stream)
            elif leave == "cancel":
                await anext(stream)
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
                async for _ in stream:
                    await asyncio.sleep(0)
            else:
                async for _ in stream:
                    if leave == "exception":
                        raise BrokenPipeError
                    break
                if leave == "aclose":
                    await stream.aclose()
                    await stream.aclose()
                    assert len(ended if source == "generator" else provider.closed) == 1
            raise BrokenPipeError
        async for _ in stream:
            pass
        run.state.messages.append(await stream.reply())
        run.finish()

    async def main() -> None:
        async with safepoint.open_async(f"sqlite:///{tmp_path}/a.db") as acp:
            with pytest.raises(asyncio.CancelledError if leave == "cancel" else BrokenPipeError):
                await safepoint.run_agent_async(step, task_id="t", input="hello", store=acp)
            found = [(c.status, c.attempts) for c in await acp.calls("t")]
            assert found == ([] if leave == "never" else [("started", 1)])
            assert begun == ended
            assert (await acp.load_latest("t")).messages == [{"role": "user", "content": "hello"}]
            outcome = await safepoint.run_agent_async(step, task_id="t", store=acp)
            assert len(outcome.state.messages) == 2
            if source == "sdk":
                assert provider.sent == [provider.sent[0]] * (1 if leave == "never" else 2)
                assert len(provider.closed) == len(provider.sent)
            assert begun == ended

    run_async(main())


def test_a_sync_stream_in_an_async_run_and_an_async_one_in_a_sync_run(tmp_path):
    @model(name="sync words")
    def sync_words() -> Iterator[Any]:
        yield from sse.CHAT

    @model(name="async words")
    async def async_words() -> AsyncIterator[Any]:
        for event in sse.CHAT:
            await asyncio.sleep(0)
            yield event

    async def main() -> None:
        async with safepoint.open_async("memory://") as acp, acp.resume("t") as run:
            assert await run.stream(sync_words).reply() == sse.CHAT_REPLY
            async for _ in run.stream(sync_words):
                break
            await run.save()

    run_async(main())
    with safepoint.open("memory://") as cp, cp.resume("t") as run:
        assert run.stream(async_words).reply() == sse.CHAT_REPLY
        for _ in run.stream(async_words):
            break
        run.save()


def test_a_source_that_is_not_at_its_end_is_closed_when_the_call_fails():
    closed: list[int] = []

    @model(name="odd words")
    async def odd_words() -> AsyncIterator[Any]:
        try:
            yield "a chunk that nobody knows"
            yield "and one more"
        finally:
            await asyncio.sleep(0)
            closed.append(1)

    async def main() -> None:
        async with safepoint.open_async("memory://") as acp, acp.resume("t") as run:
            stream = run.stream(odd_words)
            with pytest.raises(CallFailed, match="collect="):
                await anext(stream)
            assert closed == [1]
            with pytest.raises(CallFailed):
                await stream.reply()

    run_async(main())

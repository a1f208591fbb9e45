"""A model's reply as it comes: ``run.stream``. Chunks pass through live; what is recorded is the whole reply, and only that.

The journal's script for a call (``calling``) is one generator. For a stream it also yields ``Give`` for each chunk, and stands still
there until the consumer asks for the next one: ``stretch`` is the part of it from one chunk to the next, which the sync and the
async face drive like any other script. A consumer that goes away closes the script where it stands, which leaves the call as
a crash would: asked, and not answered.

The chunk that brings the stop reason is kept back until the reply is durable, with those that follow it (usage, ``[DONE]``). So
whoever has seen the last chunk has a recorded reply, and whoever breaks off earlier has none.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from safepoint.errors import UsageError
from safepoint.rules.collecting import Chat, Collector, Listed, asked_for, collector_for, is_stream, replayed
from safepoint.script import Exec, Op, Script

if TYPE_CHECKING:
    from safepoint.aio import AsyncRun
    from safepoint.run import Run
    from safepoint.tools import Current, Tool

R = TypeVar("R", bound="Run | AsyncRun")

_END = object()

Collect = Callable[..., Any]
"""A ``Collector`` class (or function without arguments that makes one), or a function from the list of chunks to the reply."""


@dataclass(frozen=True, slots=True, repr=False)
class Give(Op):
    """Hand a chunk to the consumer, and go on when it asks for the next one."""

    chunk: Any


@dataclass(slots=True, eq=False, repr=False)
class Feed:
    """What a call that streams has besides any other: where chunks come from, and what became of them."""

    collect: Collect | None = None
    owner: Callable[[], object | None] = lambda: None
    """Gives the consumer's stream, or None if nobody holds it any more."""
    script: Script[Any] | None = None
    source: Any = None
    given: bool = False
    """A chunk has reached the consumer: what is asked now cannot be asked again without its seeing two replies."""
    live: bool = False
    tail: deque[Any] = field(default_factory=deque)
    """Chunks that came when the reply was whole already."""
    choices: int = 1
    """How many the model is asked for, where its function's arguments tell."""

    def collector(self, first: Any) -> Collector:
        if self.collect is None:
            return collector_for(first, self.choices)
        parameters = () if isinstance(self.collect, type) else inspect.signature(self.collect).parameters
        made = Listed(self.collect) if parameters else self.collect()
        if not isinstance(made, Collector):
            raise UsageError(
                f"collect= gave a {type(made).__name__}", "it has no add(chunk) and reply()", "Give a Collector, or a function."
            )
        return made

    def draw(self, tool: Tool[Any, Any], args: Any, kwargs: Any, here: Current) -> Script[Any]:
        """Ask, and pass on what comes, until the reply is whole. Returns it."""
        self.live = True
        self.tail.clear()
        self.choices = asked_for(tool.fn, args, kwargs)
        value = yield Exec(tool.fn, args, kwargs, here, tool.timeout)
        self.source = value
        try:
            reply = yield from self._draw(_opened(tool, value), here, tool.timeout)
        except GeneratorExit:
            raise  # the consumer has gone; the run closes the source where it may
        except BaseException:
            yield from self.shut(here)
            raise
        yield from self.shut(here)
        return reply

    def _draw(self, chunks: Any, here: Current, timeout: float | None) -> Script[Any]:
        def pull() -> Script[Any]:
            return (yield Exec(_anext if hasattr(chunks, "__anext__") else _next, (chunks,), {}, here, timeout))

        collector: Collector | None = None
        whole = False
        while (chunk := (yield from pull())) is not _END:
            collector = collector or self.collector(chunk)
            if whole := collector.add(chunk):
                self.tail.append(chunk)
                break
            self.given = True
            yield Give(chunk)
        # The reply is whole. What still comes (its usage) belongs to it, but losing that is no reason to ask again; losing a choice is.
        try:
            while collector is not None and self.tail and (chunk := (yield from pull())) is not _END:
                whole = collector.add(chunk)
                self.tail.append(chunk)
        except Exception:
            if isinstance(collector, Chat) and not collector.lacks_none():
                raise
        if collector is None or not (whole or isinstance(collector, Listed)):
            raise ConnectionError("the stream ended before its stop reason came: what came of the reply is not recorded")
        return collector.reply()

    def shut(self, here: Current | None = None) -> Script[None]:
        """Give the connection back."""
        source, self.source = self.source, None
        close = getattr(source, "aclose", None) or getattr(source, "close", None)
        if close is not None:
            awaits = hasattr(type(source), "__anext__") or hasattr(type(source), "__aiter__")
            with contextlib.suppress(Exception):
                yield Exec(_aclose if awaits else _close, (close,), {}, here)

    def left(self) -> bool:
        return self.owner() is None

    def drop(self) -> bool:
        """Close the script, so that its call is no longer being executed. False if another thread is in the middle of it."""
        if self.script is not None:
            try:
                self.script.close()
            except ValueError:  # generator already executing
                return False
        return True


def _opened(tool: Tool[Any, Any], value: Any) -> Any:
    if inspect.isawaitable(value):
        if inspect.iscoroutine(value):
            value.close()
        raise UsageError(f"model {tool.name!r} returned something to await", "", "Make it async def, or await it there.")
    if type(value).__module__.startswith(("openai.lib.streaming", "anthropic.lib.streaming")):
        raise UsageError(
            f"model {tool.name!r} returned a {type(value).__name__}",
            "the events of that helper cannot be made again from a recorded reply",
            "Use create(…, stream=True).",
        )
    if not is_stream(value):
        made = value.__aiter__() if hasattr(type(value), "__aiter__") else None
        made = iter(value) if made is None and hasattr(type(value), "__iter__") else made
        if made is None or isinstance(value, str | bytes | dict):
            raise UsageError(
                f"model {tool.name!r} returned a {type(value).__name__}, no stream", "", "Pass stream=True, or use run.call."
            )
        return made
    return value


def _next(chunks: Any) -> Any:
    return next(chunks, _END)


async def _anext(chunks: Any) -> Any:
    return await anext(chunks, _END)


def _close(close: Callable[[], Any]) -> None:
    close()


async def _aclose(close: Callable[[], Any]) -> None:
    done = close()
    if inspect.isawaitable(done):
        await done


def stretch(script: Script[Any]) -> Script[tuple[bool, Any]]:
    """A script as far as the next chunk: (True, chunk), or (False, what it returned)."""
    value: Any = None
    error: BaseException | None = None
    while True:
        try:
            op = script.send(value) if error is None else script.throw(error)
        except StopIteration as stop:
            return False, stop.value
        if isinstance(op, Give):
            return True, op.chunk
        value = error = None
        try:
            value = yield op
        except GeneratorExit:  # nobody drives this any more: an event loop that was shut down
            script.close()
            raise
        except BaseException as caught:
            error = caught


class _Stream(Generic[R]):
    """What both faces share."""

    def __init__(self, run: R, script: Script[Any], feed: Feed) -> None:
        self._run = run
        self._script = script
        self._feed = feed
        feed.owner = weakref.ref(self)
        feed.script = script
        self._began = False
        self._over = False
        self._error: BaseException | None = None
        self._reply: tuple[Any, ...] = ()
        self._ready: deque[Any] = deque()

    @property
    def replayed(self) -> bool:
        """Whether the reply was on record, so that these are not the chunks that the provider sent."""
        return bool(self._reply) and not self._feed.live

    def __repr__(self) -> str:
        state = "whole" if self._reply else "cut" if self._over else "open" if self._began else "not begun"
        return f"<{type(self).__name__} {state}>"

    def _begin(self) -> Script[tuple[bool, Any]] | None:
        """The next stretch to be driven, or None if there is none."""
        if self._over:
            return None
        if not self._began:
            self._began = True
            self._run._flow.feeds.append(self._feed)
        elif getattr(self._script, "gi_frame", None) is None:
            self._fail(UsageError("this stream was closed", "its step has ended, or its run", "Ask again, in a step."))
            raise self._error or AssertionError
        return stretch(self._script)

    def _got(self, given: bool, value: Any) -> None:
        if given:
            self._ready.append(value)
            return
        self._end()
        self._reply = (value,)
        if self._feed.live:
            self._ready = self._feed.tail
        elif self._feed.collect is None:
            self._ready.extend(replayed(value))
        elif (chunks := getattr(self._feed.collect, "chunks", None)) is not None:
            self._ready.extend(chunks(value))

    def _fail(self, error: BaseException) -> None:
        self._end()
        self._error = error

    def _end(self) -> None:
        self._over = True
        with contextlib.suppress(ValueError):
            self._run._flow.feeds.remove(self._feed)

    def _result(self) -> Any:
        if self._reply:
            return self._reply[0]
        raise self._error or UsageError(
            "this stream was closed before its reply was whole", "what came of it is no reply", "Ask again."
        )


class Stream(_Stream["Run"], Iterator[Any]):
    """A reply on its way, from ``Run.stream``: iterate over its chunks, then take ``reply()``.

    Nothing is asked before the first chunk is. Leaving it early (``break``, ``close()``, dropping it) records no reply: the model is
    asked again, by the next ``run.stream`` with the same arguments in this step or by the next resume.
    """

    def __next__(self) -> Any:
        while not self._ready:
            part = self._begin()
            if part is None:
                raise StopIteration
            try:
                given, value = self._run._drive(part)
            except BaseException as error:
                self._fail(error)
                raise
            self._got(given, value)
            if not given and not self._ready:
                raise StopIteration
        return self._ready.popleft()

    def reply(self) -> Any:
        """The whole reply, as recorded. Chunks that were not asked for yet are passed over.

        Raises:
            CallFailed: there is none; UsageError: the stream was closed.
        """
        while not self._over:
            next(self, None)
        return self._result()

    def close(self) -> None:
        """Leave it. A reply that is whole stays recorded, one that is not is none. Repeating this is fine."""
        self._ready.clear()
        if not self._over and self._feed.drop():
            self._end()
            self._run._drive(self._feed.shut())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class AsyncStream(_Stream["AsyncRun"], AsyncIterator[Any]):
    """``Stream`` for an async run: ``async for chunk in run.stream(…)``, then ``await stream.reply()``."""

    async def __anext__(self) -> Any:
        while not self._ready:
            part = self._begin()
            if part is None:
                raise StopAsyncIteration
            try:
                given, value = await self._run._drive(part)
            except BaseException as error:
                self._fail(error)
                raise
            self._got(given, value)
            if not given and not self._ready:
                raise StopAsyncIteration
        return self._ready.popleft()

    async def reply(self) -> Any:
        """See ``Stream.reply``."""
        while not self._over:
            await anext(self, None)
        return self._result()

    async def aclose(self) -> None:
        """See ``Stream.close``."""
        self._ready.clear()
        if not self._over and self._feed.drop():
            self._end()
            await self._run._drive(self._feed.shut())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


def close_feeds(feeds: list[Feed], *, left: bool = False) -> Script[None]:
    """Leave the streams of a step that ends, or with ``left`` those that nobody holds: their calls are being executed no more."""
    for feed in [f for f in feeds if not left or f.left()]:
        if feed.drop():
            with contextlib.suppress(ValueError):
                feeds.remove(feed)
            yield from feed.shut()

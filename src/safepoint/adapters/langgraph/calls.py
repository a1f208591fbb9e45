"""One call of a node on its way through the journal: as the journal takes it, with the questions that it asks, and what a ToolNode made of
its errors."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Any, NoReturn

from langchain_core.messages import ToolMessage
from langgraph.errors import GraphBubbleUp

from safepoint.adapters.langgraph.places import Place
from safepoint.adapters.langgraph.wrapping import CLASS, unwrapped_value, wrapped_value
from safepoint.calling import Flow
from safepoint.codec import values
from safepoint.errors import CallFailed
from safepoint.model import Effect
from safepoint.rows import CallRow, CallWrite, replace
from safepoint.tools import Tool, current, is_async
from safepoint.tools import tool as declare

if TYPE_CHECKING:
    from langgraph.prebuilt.tool_node import ToolCallRequest

__all__ = ["Bubbled", "NodeTool", "Served", "Told", "current_call"]

_COUNTED = "counted"
"""The class that the plain form of a result names whose call has moved counters of its task."""


def current_call() -> CallRow | None:
    """The record of the call that is being executed: its ``idempotency_key`` and ``fence`` are for the receiver. None outside."""
    here = current.get()
    return None if here is None else here.call


class Bubbled(BaseException):
    """What LangGraph raises to end a task that is not over, on its way through a call: an interrupt, a command to a parent."""

    def __init__(self, bubble: GraphBubbleUp) -> None:
        super().__init__(bubble)
        self.bubble = bubble


@declare(effect="write", name="safepoint.adapters.langgraph")
def _PLAIN() -> None:  # noqa: N802 (what a tool is that nobody has declared)
    """What all undeclared tools are like."""


class NodeTool(Tool[Any, Any]):
    """One call of a declared tool, as the journal takes it: what is executed is the rest of LangGraph's own way to it."""

    def __init__(self, declared: Tool[Any, Any] | None, name: str, effect: Effect, fn: Callable[[], Any]) -> None:
        # No declaration of its own: it stands in for one, and is known by no name to any other run.
        self.__dict__.update((_PLAIN if declared is None else declared).__dict__)
        self._declared = declared
        if declared is None:
            self.effect, self.name = effect, name
        self.fn = fn
        self.timeout = None
        self.is_async = is_async(fn)
        self.injects = frozenset()

    def invocation(self, arguments: Mapping[str, Any], injected: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        return [], {}

    def operation(self, arguments: Mapping[str, Any]) -> Any:
        return None if self._declared is None or self.key is None else self.key(**arguments)


COUNTERS = ("interrupt_counter", "subgraph_counter", "call_counter")
"""Of LangGraph's, for each task: the questions that it puts to a person, the graphs and the functions that it calls. Answers, and the
namespaces of those graphs, are given by them."""
_counts: ContextVar[dict[str, int] | None] = ContextVar("safepoint_langgraph_counts", default=None)
"""How far the call that is executed here has moved them."""


class _Counting:
    """One of these counters, which also counts for the call that moves it."""

    def __init__(self, name: str, inner: Callable[[], int]) -> None:
        self.name = name
        self.inner = inner

    def __call__(self) -> int:
        counts = _counts.get()
        if counts is not None:
            counts[self.name] = counts.get(self.name, 0) + 1
        return self.inner()


class Served:
    """One call on its way through the journal.

    A call that is served from it asks nothing and calls no graph, so the counters of its task are moved as they were when it was executed:
    what comes after it must not be given what was its.
    """

    def __init__(self, tool: NodeTool, flow: Flow, place: Place) -> None:
        self.tool = tool
        self.flow = flow
        self.counts: dict[str, int] = {}
        self.ran = False
        self.call_id = ""
        self.counters: dict[str, _Counting] = {}
        for name in COUNTERS:
            counter = getattr(place.scratchpad, name, None)
            if counter is not None and not isinstance(counter, _Counting):
                counter = _Counting(name, counter)
                object.__setattr__(place.scratchpad, name, counter)
            if counter is not None:
                self.counters[name] = counter
        self._execute = tool.fn
        tool.fn = self._arun if tool.is_async else self._run

    def _run(self) -> Any:
        token = self._begin()
        try:
            return self._told(self._execute())
        except GraphBubbleUp as bubble:
            self._paused(bubble)
        finally:
            _counts.reset(token)

    async def _arun(self) -> Any:
        token = self._begin()
        try:
            return self._told(await self._execute())
        except GraphBubbleUp as bubble:
            self._paused(bubble)
        finally:
            _counts.reset(token)

    def _begin(self) -> Token[dict[str, int] | None]:
        self.ran = True
        self.counts = {}
        return _counts.set(self.counts)

    def _told(self, value: Any) -> Any:
        plain = wrapped_value(value, self.flow.cp.registry, careful=True)
        return {CLASS: _COUNTED, "value": plain, "counts": dict(self.counts)} if self.counts else plain

    def _paused(self, bubble: GraphBubbleUp) -> NoReturn:
        """Record a call that waits for an answer, with the counts so far: it may be settled without being executed again."""
        here = current.get()
        if here is not None and here.call is not None:
            flow = self.flow
            with flow.lock:
                row = flow.journal.rows.get(here.call.no, here.call)
            model = values.encode({"counts": dict(self.counts)}, flow.cp.registry)
            flow.commit(flow._calls(CallWrite(replace(row, status="paused", model=model))))
        raise Bubbled(bubble) from bubble

    def result(self, value: Any) -> Any:
        counts: Any = {}
        if type(value) is dict and value.get(CLASS) == _COUNTED:
            counts, value = value["counts"], value["value"]
        elif not self.ran:
            counts = self._counts_before()
        if not self.ran:
            for name, counter in self.counters.items():
                for _ in range(counts.get(name, 0)):
                    counter.inner()
        return unwrapped_value(value, self.tool.name)

    def _counts_before(self) -> dict[str, int]:
        """Of a call whose result a verifier or a person has told: those up to its pause."""
        with self.flow.lock:
            row = next((r for r in self.flow.journal.rows.values() if r.call_id == self.call_id), None)
        found = values.decode_plain(row.model) if row is not None and row.model else None
        counts = found.get("counts") if isinstance(found, dict) else None
        return counts if isinstance(counts, dict) else {}


class Told:
    """What a LangChain tool raised, although its ToolNode made a message of it: a write that raised may have happened."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.message: Any = None
        self.deaf = False

    def listening(self, request: ToolCallRequest) -> ToolCallRequest:
        """The request with a tool that keeps what it raises."""
        tool = request.tool
        update: dict[str, Any] = {}
        if (func := getattr(tool, "func", None)) is not None:

            @functools.wraps(func)
            def listened(*args: Any, **kwargs: Any) -> Any:
                with self._hearing():
                    return func(*args, **kwargs)

            update["func"] = listened
        if (coroutine := getattr(tool, "coroutine", None)) is not None:

            @functools.wraps(coroutine)
            async def alistened(*args: Any, **kwargs: Any) -> Any:
                with self._hearing():
                    return await coroutine(*args, **kwargs)

            update["coroutine"] = alistened
        self.deaf = not update
        if tool is None or not update:
            return request
        return request.override(tool=tool.model_copy(update=update))

    @contextlib.contextmanager
    def _hearing(self) -> Any:
        try:
            yield
        except GraphBubbleUp:
            raise
        except Exception as error:
            self.error = error
            raise

    def judged(self, result: Any) -> Any:
        """The result, unless it is a message about an error: then that error."""
        if isinstance(result, ToolMessage) and result.status == "error":
            self.message = result
            if self.error is not None:
                raise self.error
            if self.deaf:  # a tool of a class of its own: what it raised, and whether it did anything, is not known
                raise RuntimeError("the tool has failed, and its ToolNode made a message of it")
        return result  # also a message of a ToolNode that did not reach the tool: the arguments do not fit, or there is no such tool

    def failed(self, error: CallFailed) -> Any:
        """A failed call as LangGraph would have it: the message that its ToolNode made, or the exception itself."""
        if self.message is not None:
            return self.message
        if self.error is not None:
            raise self.error
        if error.__cause__ is not None:
            raise error.__cause__
        raise error

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

_ASKED = "asked"
"""The class that the plain form of a result names which was told after questions to a person."""


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


_asks: ContextVar[list[int] | None] = ContextVar("safepoint_langgraph_asks", default=None)
"""Counts the questions that the call which is executed here has put to a person."""


class _Counting:
    """LangGraph's counter of the questions of a task, which also counts for the call that asks."""

    def __init__(self, inner: Callable[[], int]) -> None:
        self.inner = inner

    def __call__(self) -> int:
        count = _asks.get()
        if count is not None:
            count[0] += 1
        return self.inner()


class Served:
    """One call on its way through the journal.

    LangGraph gives a task's answers to its questions by their order. A call that is served from the journal does not ask again, so what it
    asked when it was executed is counted for it.
    """

    def __init__(self, tool: NodeTool, flow: Flow, place: Place) -> None:
        self.tool = tool
        self.flow = flow
        self.asked = [0]
        self.ran = False
        self.call_id = ""
        self.counter = getattr(place.scratchpad, "interrupt_counter", None)
        if self.counter is not None and not isinstance(self.counter, _Counting):
            self.counter = _Counting(self.counter)
            object.__setattr__(place.scratchpad, "interrupt_counter", self.counter)
        self._execute = tool.fn
        tool.fn = self._arun if tool.is_async else self._run

    def _run(self) -> Any:
        token = self._begin()
        try:
            return self._told(self._execute())
        except GraphBubbleUp as bubble:
            self._paused(bubble)
        finally:
            _asks.reset(token)

    async def _arun(self) -> Any:
        token = self._begin()
        try:
            return self._told(await self._execute())
        except GraphBubbleUp as bubble:
            self._paused(bubble)
        finally:
            _asks.reset(token)

    def _begin(self) -> Token[list[int] | None]:
        self.ran = True
        self.asked = [0]
        return _asks.set(self.asked)

    def _told(self, value: Any) -> Any:
        plain = wrapped_value(value, self.flow.cp.registry, careful=True)
        return {CLASS: _ASKED, "value": plain, "asked": self.asked[0]} if self.asked[0] else plain

    def _paused(self, bubble: GraphBubbleUp) -> NoReturn:
        """Record a call that waits for an answer, with how often it has asked: it may be settled without being executed again."""
        here = current.get()
        if here is not None and here.call is not None:
            flow = self.flow
            with flow.lock:
                row = flow.journal.rows.get(here.call.no, here.call)
            model = values.encode({"asked": self.asked[0]}, flow.cp.registry)
            flow.commit(flow._calls(CallWrite(replace(row, status="paused", model=model))))
        raise Bubbled(bubble) from bubble

    def result(self, value: Any) -> Any:
        asked = 0
        if type(value) is dict and value.get(CLASS) == _ASKED:
            asked, value = value["asked"], value["value"]
        elif not self.ran:
            asked = self._asked_before()
        if not self.ran and self.counter is not None:
            for _ in range(asked):
                self.counter.inner()
        return unwrapped_value(value, self.tool.name)

    def _asked_before(self) -> int:
        """What a call had asked whose result a verifier or a person has told."""
        with self.flow.lock:
            row = next((r for r in self.flow.journal.rows.values() if r.call_id == self.call_id), None)
        found = values.decode_plain(row.model) if row is not None and row.model else None
        return found.get("asked", 0) if isinstance(found, dict) else 0


class Told:
    """What a LangChain tool raised, although its ToolNode made a message of it: a write that raised may have happened."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.message: Any = None

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
            if current_call() is not None and isinstance(result.content, str):
                return result  # the tool was not reached: its arguments do not fit, or there is none of that name
        return result

    def failed(self, error: CallFailed, name: str, call_id: str) -> Any:
        """A failed call as LangGraph would have it: the message that its ToolNode made, or the exception itself."""
        if self.message is not None:
            return self.message
        if self.error is not None:
            raise self.error
        if error.__cause__ is not None:
            raise error.__cause__
        return ToolMessage(content=f"Error: {error.why}", name=name, tool_call_id=call_id, status="error")

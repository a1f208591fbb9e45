"""Calls inside the nodes of a graph, recorded before they are made: no tool runs twice because its node is run again.

LangGraph runs a node again when its process died, when it raised, and when it was interrupted. What a tool of it did then is on no
record of LangGraph's, as a node's writes are stored when it ends. Here each call has an intent before it and a result after it, by
the same rules as in a run of safepoint's own; see docs/journal.md. What names a call over all of that is LangGraph's task id, which
follows from the checkpoint that the task runs on, and the id that the model gave to the call. So no intent is written before that
checkpoint is stored.
"""

from __future__ import annotations

import contextlib
import functools
import json
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

from langchain_core.messages import ToolMessage
from langgraph.config import get_config
from langgraph.errors import GraphBubbleUp
from langgraph.types import Command

from safepoint.adapters.langgraph.wrapping import unwrapped_value, wrapped_value
from safepoint.aio import drive_async
from safepoint.calling import Flow
from safepoint.checkpointer import Base
from safepoint.codec.states import Control
from safepoint.errors import CallFailed, InDoubt, NotFound, RunEnded, SafepointError, UsageError
from safepoint.model import Effect
from safepoint.rows import CallRow, CallWrite, replace
from safepoint.rules.journal import StepJournal
from safepoint.rules.policy import Policy
from safepoint.script import LoopThread, drive
from safepoint.tools import EFFECTS, Caller, Tool, current, is_async
from safepoint.tools import tool as declare

if TYPE_CHECKING:
    from langgraph.prebuilt.tool_node import ToolCallRequest

    from safepoint.adapters.langgraph.saver import SafepointSaver

__all__ = ["ToolJournal", "current_call"]

T = TypeVar("T")

REMEMBERED = 256


def current_call() -> CallRow | None:
    """The record of the call that is being executed: its ``idempotency_key`` and ``fence`` are for the receiver. None outside."""
    here = current.get()
    return None if here is None else here.call


_kinds: dict[type[SafepointError], type[SafepointError]] = {}


def _bubbling(cls: type[SafepointError]) -> type[SafepointError]:
    """The same error as one that no node and no ToolNode takes for a tool's own, to go on past it."""
    if cls not in _kinds:
        _kinds[cls] = _bubbling_class(cls)
    return _kinds[cls]


def _bubbling_class(cls: type[SafepointError]) -> type[SafepointError]:
    return type(
        cls.__name__, (cls, GraphBubbleUp), {"__module__": cls.__module__, "__doc__": cls.__doc__, "__reduce__": cls.__reduce__}
    )


def _loud(error: SafepointError) -> SafepointError:
    made = _bubbling(type(error)).__new__(_bubbling(type(error)))
    made.__dict__.update(error.__dict__)
    made.args = error.args
    made.__cause__ = error
    return made


class _Bubbled(BaseException):
    """What LangGraph raises to end a task that is not over, on its way through a call: an interrupt, a command to a parent."""

    def __init__(self, bubble: GraphBubbleUp) -> None:
        super().__init__(bubble)
        self.bubble = bubble


@declare(effect="write", name="safepoint.adapters.langgraph")
def _PLAIN() -> None:  # noqa: N802 (what a tool is that nobody has declared)
    """What all undeclared tools are like."""


class _NodeTool(Tool[Any, Any]):
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


class _Node(Caller):
    """What a tool finds as its run."""

    def call(self, target: Any, /, *args: Any, **kwargs: Any) -> Any:
        raise UsageError(
            f"{target.name!r} was called directly inside a call of a graph's node", "", "Call its plain function: tool.fn."
        )


@dataclass(slots=True)
class _Task:
    """A task of LangGraph's, as far as this process has met it."""

    flow: Flow
    node: _Node
    attempt: _Attempt | None = None
    """Which execution of the task the journal was opened for."""
    asked: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)


class _Attempt:
    """One execution of a task: LangGraph makes a scratchpad for each, and counts the retries of a policy."""

    def __init__(self, scratchpad: Any, number: int) -> None:
        # Of the scratchpad no weak reference can be had, and a strong one would keep the whole run of the graph alive.
        part = getattr(scratchpad, "get_null_resume", None)
        try:
            self.of: Any = weakref.ref(part)
        except TypeError:
            self.of = lambda: part
        self.number = number

    def is_same(self, other: _Attempt | None) -> bool:
        return other is not None and self.number == other.number and self.of() is not None and self.of() is other.of()


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a call is made."""

    thread: str
    task: str
    attempt: _Attempt
    checkpoints: tuple[tuple[str, str], ...]
    """Namespace and id of the checkpoint that each graph around the call runs on, the root graph first."""


def _place(what: str) -> _Place:
    """Where we are in a graph.

    Raises:
        UsageError: not in a node; or in one whose task would have another name after a crash.
    """

    def refuse(why: str, remedy: str) -> NoReturn:
        raise _loud(UsageError(f"{what} cannot be recorded here", why, remedy))

    try:
        named = get_config().get("configurable", {})
    except RuntimeError:
        named = {}
    task, at = named.get("__pregel_task_id"), named.get("checkpoint_map")
    if not task or "__pregel_runtime" not in named:
        refuse(
            "there is no task of a graph around it: it runs in a thread of its own, or outside of any node",
            "Call it in the node itself; into a thread, take contextvars.copy_context().run along.",
        )
    if named.get("__pregel_durability") == "exit":
        refuse("durability='exit' stores no checkpoint that the call could stand on", "Use durability='sync' or 'async'.")
    if not at or "thread_id" not in named:
        refuse("the graph has no checkpointer", "Compile it with the SafepointSaver.")
    info = named["__pregel_runtime"].execution_info
    attempt = _Attempt(named.get("__pregel_scratchpad"), getattr(info, "node_attempt", 1))
    return _Place(str(named["thread_id"]), task, attempt, tuple(sorted(at.items(), key=lambda item: len(item[0]))))


class ToolJournal:
    """Records the calls that the nodes of a graph make, in the store of its saver.

    Three ways to use it: ``middleware()`` for ``create_agent``, ``wrap_tool_call`` and ``awrap_tool_call`` for ``ToolNode``, and
    ``tool`` for plain functions that a node calls.

    Args:
        saver: The graph's checkpointer.
        tools: What tools do to the world, by name: an effect (``read``, ``idempotent``, ``write``), or a function declared with
            ``@safepoint.tool`` whose declaration counts (effect, verifier, retry). A LangChain tool over such a function needs no
            entry. All others are a ``write`` without a verifier: if the process dies while one runs, a person decides. A tool that
            only runs another graph, whose own calls are recorded, is best left out of the journal: ``None``.
    """

    def __init__(self, saver: SafepointSaver, *, tools: Mapping[str, Effect | Tool[Any, Any] | None] | None = None) -> None:
        self.saver = saver
        self.tools = dict(tools or {})
        for name, declared in self.tools.items():
            if not (declared is None or isinstance(declared, Tool) or declared in EFFECTS):
                raise UsageError(
                    f"the effect of tool {name!r} is not one of {', '.join(EFFECTS)}",
                    "",
                    "Or give a function under @safepoint.tool.",
                )
        self._tasks: OrderedDict[tuple[str, str], _Task] = OrderedDict()
        self._lock = threading.Lock()
        self._loop = LoopThread()

    # -- for create_agent and ToolNode

    def middleware(self, *, model: bool = True) -> Any:
        """For ``create_agent(middleware=[…])``: tools, and with ``model`` also the model's replies, which then are not paid for twice."""
        from safepoint.adapters.langgraph.middleware import JournalMiddleware

        return JournalMiddleware(self, model=model)

    def wrap_tool_call(self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Any]) -> Any:
        """Execute a tool call, or return what it returned before."""
        declared = self._declared(request)
        if declared is None:
            return handler(request)
        name, call_id, arguments = _facts(request)
        told = _Told()
        made = _NodeTool(*declared, lambda: told.judged(handler(told.listening(request))))
        try:
            return _message(self._call(made, arguments, call_id), name, call_id)
        except CallFailed as error:
            return told.failed(error, name, call_id)

    async def awrap_tool_call(self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Any]) -> Any:
        declared = self._declared(request)
        if declared is None:
            return await handler(request)
        name, call_id, arguments = _facts(request)
        told = _Told()

        async def execute() -> Any:
            return told.judged(await handler(told.listening(request)))

        try:
            return _message(await self._acall(_NodeTool(*declared, execute), arguments, call_id), name, call_id)
        except CallFailed as error:
            return told.failed(error, name, call_id)

    def _declared(self, request: ToolCallRequest) -> tuple[Tool[Any, Any] | None, str, Effect] | None:
        name = request.tool_call["name"]
        found: Any = self.tools.get(name, "")
        if found is None:
            return None
        if not found and request.tool is not None:
            for attribute in ("func", "coroutine"):
                if isinstance(fn := getattr(request.tool, attribute, None), Tool):
                    found = fn
        declared = found if isinstance(found, Tool) else None
        if declared is not None and declared.effect == "transactional":
            raise _loud(
                UsageError(
                    f"{name!r} is transactional", "a graph's tool gets no connection", "Declare it as idempotent or write."
                )
            )
        return declared, f"langgraph.{name}", cast(Effect, found if isinstance(found, str) and found else "write")

    # -- for plain functions

    def tool(self, fn: Any = None, *, effect: Effect = "write", name: str | None = None, **declaration: Any) -> Any:
        """Declare a plain function that nodes call; a call in a node is recorded. Takes what ``@safepoint.tool`` takes, or a function
        that is declared already."""
        if fn is None:
            return lambda fn: self.tool(fn, effect=effect, name=name, **declaration)
        declared: Tool[Any, Any] = fn if isinstance(fn, Tool) else declare(effect=effect, name=name, **declaration)(fn)
        if declared.effect == "transactional":
            raise UsageError(
                f"{declared.name!r} is transactional", "a graph's tool gets no connection", "Declare it as idempotent or write."
            )

        if declared.is_async:

            @functools.wraps(declared.fn)
            async def acall(*args: Any, **kwargs: Any) -> Any:
                arguments = declared.arguments(args, kwargs)

                async def execute() -> Any:
                    given, named = declared.invocation(arguments, _injected())
                    return await declared.fn(*given, **named)

                return await self._acall(_NodeTool(declared, "", "write", execute), arguments, None)

            return acall

        @functools.wraps(declared.fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            arguments = declared.arguments(args, kwargs)

            def execute() -> Any:
                given, named = declared.invocation(arguments, _injected())
                return declared.fn(*given, **named)

            return self._call(_NodeTool(declared, "", "write", execute), arguments, None)

        return call

    # -- for models

    def model_call(self, name: str, execute: Callable[[], Any]) -> Any:
        """Ask a model, or return what it replied before."""
        return self._call(self._model(name, execute), {"model": name}, None)

    async def amodel_call(self, name: str, execute: Callable[[], Any]) -> Any:
        return await self._acall(self._model(name, execute), {"model": name}, None)

    def _model(self, name: str, execute: Callable[[], Any]) -> _NodeTool:
        made = _NodeTool(None, f"langgraph.model.{name}", "read", execute)
        made.policy = Policy(model=True)
        made.encoded_policy = made.policy.encode()
        return made

    # -- a call

    def _call(self, tool: _NodeTool, arguments: dict[str, Any], call_id: str | None) -> Any:
        place = _place(tool.name)
        self._stand(place)
        self.saver.hold(place.thread)
        status = "idle"
        try:
            task = self._open(place)
            script = task.flow.call(_paused_aware(tool, task.flow), arguments, self._name(task, place, tool, call_id), None)
            return unwrapped_value(drive(script, self._loop), tool.name)
        except _Bubbled as bubbled:
            raise bubbled.bubble from None
        except RunEnded as ended:
            status = "waiting" if isinstance(ended.error, InDoubt) else status
            raise _loud(ended.error) from ended
        finally:
            self.saver.let_go(place.thread, status)

    async def _acall(self, tool: _NodeTool, arguments: dict[str, Any], call_id: str | None) -> Any:
        place = _place(tool.name)
        off = self.saver._off
        await off(lambda: self._stand(place))
        await off(lambda: self.saver.hold(place.thread))
        status = "idle"
        try:
            task = await off(lambda: self._open(place))
            script = task.flow.call(_paused_aware(tool, task.flow), arguments, self._name(task, place, tool, call_id), None)
            return unwrapped_value(await drive_async(script, off), tool.name)
        except _Bubbled as bubbled:
            raise bubbled.bubble from None
        except RunEnded as ended:
            status = "waiting" if isinstance(ended.error, InDoubt) else status
            raise _loud(ended.error) from ended
        finally:
            await off(lambda: self.saver.let_go(place.thread, status))

    @staticmethod
    def _name(task: _Task, place: _Place, tool: _NodeTool, call_id: str | None) -> str:
        if call_id is None:
            with task.lock:
                task.asked[tool.name] += 1
                call_id = f"{tool.name}#{task.asked[tool.name]}"
        return f"{place.task}|{call_id}"

    def _stand(self, place: _Place) -> None:
        """Wait until all checkpoints are stored that the call's name follows from."""
        records = self.saver._records
        for ns, id in place.checkpoints:
            if not records.has_seen(place.thread, ns):
                raise _loud(
                    UsageError(
                        f"a call in the namespace {ns!r} cannot be recorded",
                        "the subgraph keeps no checkpoints (checkpointer=False), so that its tasks have other names after a crash",
                        "Compile it without checkpointer=False.",
                    )
                )
            try:
                self.saver.wait_stored((place.thread, ns, id))
            except SafepointError as error:
                raise _loud(error) from error

    def _open(self, place: _Place) -> _Task:
        """The task's journal, read anew for each execution of it."""
        saver, key = self.saver, (place.thread, place.task)
        ns, id = place.checkpoints[0]
        root = saver._node(place.thread, ns, id)
        if root is None:
            raise _loud(NotFound(f"checkpoint {id} of thread {place.thread!r} is gone", "", "Run the graph again."))
        with self._lock:
            task = self._tasks.get(key)
            if task is None:
                node = _Node()
                flow = Flow(
                    cp=cast(Any, SimpleNamespace(store=saver.store, registry=saver.form.registry)),
                    task=place.thread,
                    guard=cast(Any, saver._records.standing(place.thread)[1]),
                    presumed=0,
                    line=1,
                    caller=weakref.ref(cast(Caller, node)),
                )
                task = self._tasks[key] = _Task(flow, node)
            self._tasks.move_to_end(key)
            while len(self._tasks) > REMEMBERED:
                self._tasks.popitem(last=False)
        with task.lock:
            flow = task.flow
            grant = saver.hold(place.thread)
            saver.let_go(place.thread)
            flow.guard, flow.presumed = grant.guard, grant.presumed
            flow.settle_from = saver._records.since(place.thread)
            if not place.attempt.is_same(task.attempt):
                flow.base = Base(saver.store, place.thread, root.head, None, Control())
                step = self._step(place, root)
                rows, _ = saver.store.calls(place.thread, line=1, from_step=step, bodies=False)
                flow.step, flow.ended, flow.seen = step, None, 0
                flow.flush()
                flow.journal = StepJournal(r for r in rows if r.step == step and (r.call_id or "").startswith(f"{place.task}|"))
                flow.journal.scope = 1
                task.asked.clear()
                task.attempt = place.attempt
        return task

    def _step(self, place: _Place, root: Any) -> int:
        rows = self.saver.store.headers(place.thread, before=root.head.seq + 1, limit=1)
        return rows[0].step if rows and rows[0].seq == root.head.seq else 0


def _message(result: Any, name: str, call_id: str) -> Any:
    """The result as a ToolNode returns it: what a verifier or a person says that a call returned is the tool's own value."""
    if isinstance(result, ToolMessage | Command) or (
        isinstance(result, list) and all(isinstance(r, ToolMessage | Command) for r in result)
    ):
        return result
    content = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
    return ToolMessage(content=content, name=name, tool_call_id=call_id)


def _injected() -> dict[str, Any]:
    row = current_call()
    return {} if row is None else {"idempotency_key": row.idempotency_key, "fence": row.fence}


def _facts(request: ToolCallRequest) -> tuple[str, str, dict[str, Any]]:
    call = request.tool_call
    return call["name"], cast(str, call["id"]), dict(call["args"])


def _paused_aware(tool: _NodeTool, flow: Flow) -> _NodeTool:
    """The tool, with what LangGraph raises to interrupt a task recorded as a pause, and its result in plain form."""
    fn, registry = tool.fn, flow.cp.registry

    def paused(bubble: GraphBubbleUp) -> NoReturn:
        here = current.get()
        if here is not None and here.call is not None:
            with flow.lock:
                row = flow.journal.rows.get(here.call.no, here.call)
            flow.commit(flow._calls(CallWrite(replace(row, status="paused"))))
        raise _Bubbled(bubble) from bubble

    if tool.is_async:

        async def arun() -> Any:
            try:
                return wrapped_value(await fn(), registry, careful=True)
            except GraphBubbleUp as bubble:
                paused(bubble)

        tool.fn = arun
        return tool

    def run() -> Any:
        try:
            return wrapped_value(fn(), registry, careful=True)
        except GraphBubbleUp as bubble:
            paused(bubble)

    tool.fn = run
    return tool


class _Told:
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

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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from langchain_core.messages import ToolMessage
from langgraph.types import Command

from safepoint.adapters.langgraph.calls import Bubbled, NodeTool, Served, Told, current_call
from safepoint.adapters.langgraph.places import Attempt, Place, loud, place_of
from safepoint.adapters.langgraph.records import Key
from safepoint.aio import drive_async
from safepoint.calling import Flow
from safepoint.checkpointer import Base
from safepoint.codec import chunks, values
from safepoint.codec.states import Control
from safepoint.errors import CallFailed, CallInProgress, InDoubt, NotFound, RunEnded, SafepointError, UsageError
from safepoint.model import Effect
from safepoint.replies import in_doubt_error
from safepoint.rows import replace
from safepoint.rules import journal
from safepoint.rules.journal import StepJournal
from safepoint.rules.policy import Policy
from safepoint.script import LoopThread, Script, drive
from safepoint.tools import EFFECTS, Caller, Tool
from safepoint.tools import tool as declare

if TYPE_CHECKING:
    from langgraph.prebuilt.tool_node import ToolCallRequest

    from safepoint.adapters.langgraph.saver import SafepointSaver

__all__ = ["ToolJournal", "current_call"]


REMEMBERED = 256


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
    attempt: Attempt | None = None
    """Which execution of the task the journal was opened for."""
    busy: int = 0
    """Calls under way."""
    asked: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)


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
        told = Told()
        made = NodeTool(*declared, lambda: told.judged(handler(told.listening(request))))
        try:
            return _message(self._call(made, arguments, call_id), name, call_id)
        except CallFailed as error:
            return told.failed(error)

    async def awrap_tool_call(self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Any]) -> Any:
        declared = self._declared(request)
        if declared is None:
            return await handler(request)
        name, call_id, arguments = _facts(request)
        told = Told()

        async def execute() -> Any:
            return told.judged(await handler(told.listening(request)))

        try:
            return _message(await self._acall(NodeTool(*declared, execute), arguments, call_id), name, call_id)
        except CallFailed as error:
            return told.failed(error)

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
            raise loud(
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

                return await self._acall(NodeTool(declared, "", "write", execute), arguments, None)

            return acall

        @functools.wraps(declared.fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            arguments = declared.arguments(args, kwargs)

            def execute() -> Any:
                given, named = declared.invocation(arguments, _injected())
                return declared.fn(*given, **named)

            return self._call(NodeTool(declared, "", "write", execute), arguments, None)

        return call

    # -- for models

    def model_call(self, name: str, execute: Callable[[], Any]) -> Any:
        """Ask a model, or return what it replied before."""
        return self._call(self._model(name, execute), {"model": name}, None)

    async def amodel_call(self, name: str, execute: Callable[[], Any]) -> Any:
        return await self._acall(self._model(name, execute), {"model": name}, None)

    def _model(self, name: str, execute: Callable[[], Any]) -> NodeTool:
        made = NodeTool(None, f"langgraph.model.{name}", "read", execute)
        made.policy = Policy(model=True)
        made.encoded_policy = made.policy.encode()
        return made

    # -- a call

    def _call(self, tool: NodeTool, arguments: dict[str, Any], call_id: str | None) -> Any:
        place = place_of(tool.name)
        with _loudly():
            for key in self._stands_on(place):
                self.saver.wait_stored(key)
            self.saver.hold(place.thread)
            task: _Task | None = None
            try:
                task = self._open(place)
                served = Served(tool, task.flow, place)
                return served.result(drive(self._script(task, place, served, arguments, call_id), self._loop))
            finally:
                self.saver.let_go(place.thread, self._left(place, task))

    async def _acall(self, tool: NodeTool, arguments: dict[str, Any], call_id: str | None) -> Any:
        place, saver = place_of(tool.name), self.saver
        with _loudly():
            for key in self._stands_on(place):
                await saver.await_stored(key)
            await saver.ahold(lambda: saver.hold(place.thread), lambda: saver.let_go(place.thread))
            task: _Task | None = None
            try:
                task = await saver._off(lambda: self._open(place))
                served = Served(tool, task.flow, place)
                return served.result(await drive_async(self._script(task, place, served, arguments, call_id), saver._off))
            finally:
                status = self._left(place, task)
                await saver.agive(lambda: saver.let_go(place.thread, status))

    def _left(self, place: Place, task: _Task | None) -> str:
        """How a call leaves its thread. If nobody knows whether something happened, the run puts nothing more, whatever the node makes of
        the error: a write that was interrupted is no less open because the interrupt was swallowed."""
        if task is None:
            return "idle"
        with task.lock:
            task.busy -= 1
        if task.flow.ended is not None:
            self.saver._records.doubt(place.thread, place.task, loud(task.flow.ended.error))
            return "waiting" if isinstance(task.flow.ended.error, InDoubt) else "idle"
        with task.flow.lock:
            paused = any(row.status == "paused" for row in task.flow.journal.rows.values())
        return "waiting" if paused else "idle"

    def _script(self, task: _Task, place: Place, served: Served, arguments: dict[str, Any], call_id: str | None) -> Script[Any]:
        tool = served.tool
        if call_id is None:
            # Named by what it is called with, and told apart from its equals by their order.
            encoded = values.encode(arguments, task.flow.cp.registry, depth=chunks.DEPTH)
            told = journal.ident_of(tool.name, journal.canonical(values.decode_plain(encoded, depth=chunks.DEPTH))).hex()
            with task.lock:
                task.asked[told] += 1
                call_id = f"{told}#{task.asked[told]}"
        else:
            # The calls of one message are made together, in threads: none of them shows that the node went past another one's failure.
            task.flow.seen = 0
        served.call_id = f"{place.task}|{call_id}"
        return task.flow.call(tool, arguments, served.call_id, None)

    def _stands_on(self, place: Place) -> list[Key]:
        """The checkpoints that the call's name follows from."""
        saver, records = self.saver, self.saver._records
        if getattr(place.checkpointer, "_records", None) is not records:
            raise UsageError(
                "a call cannot be recorded here",
                "the graph's checkpointer is not the saver of this journal",
                "Compile the graph with the very saver that the journal was given.",
            )
        keys = [(place.thread, ns, id) for ns, id in place.checkpoints]
        for key in keys:
            if key[1] and not records.has_seen(*key[:2]) and records.node(key) is None and saver._node(*key) is None:
                raise UsageError(
                    f"a call in the namespace {key[1]!r} cannot be recorded",
                    "the subgraph keeps no checkpoints (checkpointer=False), so that its tasks have other names after a crash",
                    "Compile it without checkpointer=False.",
                )
        return keys

    def _open(self, place: Place) -> _Task:
        """The task's journal, read anew for each execution of it."""
        saver, key = self.saver, (place.thread, place.task)
        ns, id = place.checkpoints[0]
        root = saver._node(place.thread, ns, id)
        if root is None:
            raise NotFound(f"checkpoint {id} of thread {place.thread!r} is gone", "", "Run the graph again.")
        if others := [
            row for row in saver._records.doubts(place.thread) if not (row.call_id or "").startswith(f"{place.task}|")
        ]:
            # A new input, or an older checkpoint, is no way past it.
            raise in_doubt_error(place.thread, *others)
        with self._lock:
            task = self._tasks.get(key)
            if task is None:
                node = _Node()
                flow = Flow(
                    cp=cast(Any, None),
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
                if task.busy:
                    raise CallInProgress(
                        f"task {place.task} of thread {place.thread!r} is being executed",
                        "another run of this process is at it, and a call of it is under way",
                        "Wait for that run.",
                        task=place.thread,
                    )
                # The graph's own saver knows the classes of its schema.
                flow.cp = cast(Any, SimpleNamespace(store=saver.store, registry=place.checkpointer.form.registry))
                flow.base = Base(saver.store, place.thread, root.head, None, Control())
                step = self._step(place, root)
                flow.step, flow.ended, flow.seen = step, None, 0
                # A result that the store could not take belongs to a hold that is over; that its call still stands as it did is compared.
                flow.unwritten = [(replace(commit, guard=grant.guard), row) for commit, row in flow.unwritten]
                flow.flush()
                rows, _ = saver.store.calls(place.thread, line=1, from_step=step, bodies=False)
                flow.journal = StepJournal(r for r in rows if r.step == step and (r.call_id or "").startswith(f"{place.task}|"))
                flow.journal.scope = 1
                saver._records.settle(place.thread, place.task)
                task.asked.clear()
                task.attempt = place.attempt
            task.busy += 1
        return task

    def _step(self, place: Place, root: Any) -> int:
        rows = self.saver.store.headers(place.thread, before=root.head.seq + 1, limit=1)
        return rows[0].step if rows and rows[0].seq == root.head.seq else 0


@contextlib.contextmanager
def _loudly() -> Iterator[None]:
    """Let every error of the library end the run of the graph, but that a tool failed: to a ToolNode all others would be the tool's."""
    try:
        yield
    except CallFailed:
        raise
    except Bubbled as bubbled:
        raise bubbled.bubble from None
    except RunEnded as ended:
        raise loud(ended.error) from ended
    except SafepointError as error:
        raise loud(error) from error


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

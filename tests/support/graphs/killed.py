"""Graphs and agents in processes that die: at named points around a saver's calls, the same ones for every saver, or at any moment.

What nodes and tools do, they do in the outside world (``effects``), which counts it and is never killed.
"""

from __future__ import annotations

import asyncio
import functools
import os
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from langchain.agents import create_agent
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import StructuredTool
from langgraph.graph import END, START, StateGraph
from langgraph.types import Send

import safepoint
from safepoint import Call, Done, LeaseHeld, NotDone
from tests.support.children import die
from tests.support.effects import World
from tests.support.graphs.agents import Ruled, ask
from tests.support.graphs.driver import Driver, drive
from tests.support.graphs.shapes import Log, chain
from tests.support.graphs.subjects import open_async_saver, open_saver

POINTS = ("put.before", "put.after", "writes.before", "writes.after", "node.before", "node.after")
TOOL_POINTS = ("tool.before", "tool.after")
ORDERS = "send(1) send(2) look(3); send(4); done"
SENT = ("1", "2", "4")


@dataclass(frozen=True)
class Job:
    """What a process is to do on a thread: as far as it gets, from wherever the last one got.

    Attributes:
        graph: "graph" or "agent".
        saver: by the name and URL that ``open_saver`` takes.
        pace: Seconds that each node takes.
    """

    graph: str
    saver: str
    url: str
    mode: str
    durability: str
    world: World
    pace: float = 0.0


class Points:
    """Counts how often each point was reached, and dies at one."""

    def __init__(self, at: str = "", nth: int = 0) -> None:
        self.hits: Counter[str] = Counter()
        self._at = at, nth
        self._lock = threading.Lock()

    def reach(self, point: str) -> None:
        with self._lock:
            self.hits[point] += 1
            if (point, self.hits[point]) == self._at:
                die()


def work(job: Job, at: str = "", nth: int = 0) -> tuple[list[str], dict[str, int]]:
    """Bring the thread to its end, and return what its state holds, and how often each point was reached."""
    points = Points(at, nth)
    if job.mode == "async":
        return asyncio.run(_work_async(job, points))
    with open_saver(job.saver, job.url, **options(job)) as saver:
        return drive(_work(job, saver, points)), dict(points.hits)


def options(job: Job) -> dict[str, Any]:
    return {"lease": 1.0} if job.saver == "postgres" else {}


async def _work_async(job: Job, points: Points) -> tuple[list[str], dict[str, int]]:
    async with open_async_saver(job.saver, job.url, **options(job)) as saver:
        return await _work(job, saver, points), dict(points.hits)


async def _work(job: Job, saver: Any, points: Points) -> list[str]:
    middleware = journaled(saver, job)
    _watch(saver, points, job.mode == "async")
    run = Driver(saver, job.mode, job.durability)
    graph = _agent(run, job, points, middleware) if job.graph == "agent" else _graph(run, job, points)
    config = run.thread("t")
    state = await run.state(graph, config)
    # (Not ``next``: what has run and is not yet part of a checkpoint is not in it.)
    while not state.values or state.tasks:
        given = None if state.tasks else ask(ORDERS) if job.graph == "agent" else {"items": ["in"]}
        try:
            await run.invoke(graph, given, config)
        except LeaseHeld as error:
            # On a server the lease of a process that died lasts until its time is up.
            if error.details["holder"]["pid"] == os.getpid():
                raise
            await asyncio.sleep(0.05) if run.is_async else time.sleep(0.05)
        state = await run.state(graph, config)
    values = state.values
    return [kind_of(one) for one in values["messages"]] if job.graph == "agent" else [str(item) for item in values["items"]]


def kind_of(message: Any) -> str:
    """A message without what is drawn anew."""
    if isinstance(message, ToolMessage):
        return f"{message.name}:{str(message.content).rpartition(':')[0]}"
    return f"{type(message).__name__}:{'' if isinstance(message, HumanMessage) else len(getattr(message, 'tool_calls', ()))}"


def _watch(saver: Any, points: Points, awaited: bool) -> None:
    """The same points for every saver: around what LangGraph calls."""

    def around(name: str, point: str) -> None:
        plain = getattr(saver, name)

        # (LangGraph looks at the signature of put_writes, and hands on a path only to one that takes it.)
        @functools.wraps(plain)
        async def awatched(*args: Any, **kwargs: Any) -> Any:
            points.reach(f"{point}.before")
            found = await plain(*args, **kwargs)
            points.reach(f"{point}.after")
            return found

        @functools.wraps(plain)
        def watched(*args: Any, **kwargs: Any) -> Any:
            points.reach(f"{point}.before")
            found = plain(*args, **kwargs)
            points.reach(f"{point}.after")
            return found

        setattr(saver, name, awatched if awaited else watched)

    for name, point in (("aput", "put"), ("aput_writes", "writes")) if awaited else (("put", "put"), ("put_writes", "writes")):
        around(name, point)


# -- the graph: nodes one after another, a subgraph, and a node three times at once


def _graph(run: Driver, job: Job, points: Points) -> Any:
    def node(name: str) -> Any:
        async def body(state: Any) -> dict[str, Any]:
            mine = f"{name}{state['i']}" if "i" in state else name
            points.reach("node.before")
            job.world.do("node", mine)
            if job.pace:
                await asyncio.sleep(job.pace) if run.is_async else time.sleep(job.pace)
            points.reach("node.after")
            return {"items": [mine]}

        return run.node(body)

    inner = StateGraph(Log)
    for name in ("x", "y"):
        inner.add_node(name, node(name))
    calls = chain(inner, "x", "y").compile()

    async def call(state: Log) -> dict[str, Any]:
        found = await run.call(calls, {"items": []})
        return {"items": found["items"]}

    builder = StateGraph(Log)
    for name in ("a", "b", "c", "d", "each", "e"):
        builder.add_node(name, node(name))
    builder.add_node("call", run.node(call))
    for one, other in ((START, "a"), ("a", "b"), ("b", "call"), ("call", "c"), ("each", "d"), ("d", "e"), ("e", END)):
        builder.add_edge(one, other)
    builder.add_conditional_edges("c", lambda state: [Send("each", {"i": i}) for i in range(3)], ["each"])
    return run.compile(builder)


ITEMS = ["in", "a", "b", "x", "y", "c", "each0", "each1", "each2", "d", "e"]
NODES = len(ITEMS) - 1


# -- the agent


def _agent(run: Driver, job: Job, points: Points, middleware: list[Any]) -> Any:
    def tool(name: str) -> StructuredTool:
        async def body(what: str) -> str:
            points.reach("tool.before")
            value = job.world.do(name, f"{name}/{what}")
            points.reach("tool.after")
            return value

        given: dict[str, Any] = {"coroutine" if run.is_async else "func": run.node(body)}
        return StructuredTool.from_function(**given, name=name, description=name)

    return create_agent(Ruled(), [tool("send"), tool("look")], middleware=middleware, checkpointer=run.saver)


MESSAGES = [
    "HumanMessage:", "AIMessage:3", "send:send:send/1", "send:send:send/2", "look:look:look/3", "AIMessage:1", "send:send:send/4",
    "AIMessage:0",
]  # fmt: skip


def journaled(saver: Any, job: Job) -> list[Any]:
    """The middleware that records tool calls: on our saver, where it can."""
    if job.graph != "agent" or job.saver.startswith("peer-") or job.durability == "exit":
        return []
    from safepoint.adapters.langgraph import ToolJournal

    def was_sent(call: Call) -> Done | NotDone:
        n, value = job.world.ask(f"send/{call.arguments['what']}")
        return Done(value) if n else NotDone()

    def send(what: str) -> str:
        raise AssertionError("it is LangChain that calls the tool")

    declared = safepoint.tool(effect="write", verify=was_sent, settle_after=0.01)(send)
    return [ToolJournal(saver, tools={"send": declared, "look": "read"}).middleware()]

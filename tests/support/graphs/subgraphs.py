"""Programs of graphs in graphs: each call has a namespace of its own, a stateful one has one for all its calls."""

from __future__ import annotations

import operator
from typing import Annotated, Any, TypedDict

from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, Send

from tests.support.graphs.driver import Driver, program
from tests.support.graphs.shapes import Log, adds, chain, line, step


def outer(run: Driver, inner: Any, **options: Any) -> Any:
    """A graph of three nodes, the second of which is a graph."""
    builder = StateGraph(Log)
    builder.add_node("a", step(run, "a"))
    builder.add_node("inner", inner)
    builder.add_node("z", step(run, "z"))
    return run.compile(chain(builder, "a", "inner", "z"), **options)


@program()
async def subgraph(run: Driver) -> None:
    """A graph as a node, three turns; its states are read through the parent's."""
    graph = outer(run, line(run, "x", "y").compile())
    for turn in range(3):
        run.note(f"turn {turn}", await run.invoke(graph, {"items": [turn]}, run.thread()))
    run.note("stream", await run.stream(graph, {"items": ["s"]}, run.thread(), subgraphs=True))
    await run.look(graph, run.thread())
    await run.spaces(run.thread())
    run.note("with subgraphs", await run.state(graph, run.thread(), subgraphs=True))


@program()
async def nested_subgraphs(run: Driver) -> None:
    """A graph in a graph in a graph."""
    builder = StateGraph(Log)
    builder.add_node("x", step(run, "x"))
    builder.add_node("deep", line(run, "p", "q").compile())
    graph = outer(run, chain(builder, "x", "deep").compile())
    for turn in range(2):
        run.note(f"turn {turn}", await run.invoke(graph, {"items": [turn]}, run.thread()))
    await run.look(graph, run.thread())
    await run.spaces(run.thread())


class Counter(TypedDict, total=False):
    count: Annotated[int, operator.add]
    seen: Annotated[list[Any], operator.add]


def counting(run: Driver) -> StateGraph:
    """A graph that counts how often it was called, if it remembers."""

    async def up(state: Counter) -> dict[str, Any]:
        return {"count": 1}

    async def tell(state: Counter) -> dict[str, Any]:
        return {"seen": [state["count"]]}

    builder = StateGraph(Counter)
    builder.add_node("up", run.node(up))
    builder.add_node("tell", run.node(tell))
    return chain(builder, "up", "tell")


def asking(run: Driver, inner: Any, times: int = 1) -> Any:
    """A node that calls a graph, and adds what it counted."""

    async def ask(state: Log) -> dict[str, Any]:
        found = []
        for _ in range(times):
            found += (await run.call(inner, {"seen": []}))["seen"][-1:]
        return {"items": found}

    return run.node(ask)


@program()
async def stateful_subgraph(run: Driver) -> None:
    """A subgraph that keeps its state from turn to turn."""
    inner = counting(run).compile(checkpointer=True)
    builder = StateGraph(Log)
    builder.add_node("ask", asking(run, inner))
    builder.add_node("z", step(run, "z"))
    graph = run.compile(chain(builder, "ask", "z"))
    for turn in range(4):
        run.note(f"turn {turn}", await run.invoke(graph, {"items": [turn]}, run.thread()))
    run.note("other", await run.invoke(graph, {"items": ["other"]}, run.thread("u")))
    await run.look(graph, run.thread())
    await run.spaces(run.thread())


@program()
async def stateful_in_a_node(run: Driver) -> None:
    """The stateful subgraph as a node itself, inside another that is not."""
    inner = line(run, "x", "y").compile(checkpointer=True)
    middle = StateGraph(Log)
    middle.add_node("inner", inner)
    graph = outer(run, chain(middle, "inner").compile())
    for turn in range(3):
        run.note(f"turn {turn}", await run.attempt(run.invoke(graph, {"items": [turn]}, run.thread())))
    await run.look(graph, run.thread())
    await run.spaces(run.thread())


@program()
async def subgraph_in_a_loop(run: Driver) -> None:
    """A subgraph that is called four times in one run, each call in a namespace of its own."""
    builder = StateGraph(Log)
    builder.add_node("inner", line(run, "x", "y").compile())
    builder.add_node("count", step(run, "count"))
    builder.add_edge(START, "inner")
    builder.add_edge("inner", "count")
    builder.add_conditional_edges("count", lambda state: "inner" if len(state["items"]) < 12 else END)
    graph = run.compile(builder)
    for turn in range(2):
        run.note(f"turn {turn}", await run.invoke(graph, {"items": [turn]}, run.thread()))
    await run.look(graph, run.thread())
    await run.spaces(run.thread())


@program()
async def subgraph_twice_in_a_node(run: Driver) -> None:
    """A node that calls one subgraph twice, and that does so in two turns."""
    builder = StateGraph(Log)
    builder.add_node("ask", asking(run, counting(run).compile(), times=2))
    graph = run.compile(chain(builder, "ask"))
    for turn in range(2):
        run.note(f"turn {turn}", await run.invoke(graph, {"items": [turn]}, run.thread()))
    await run.look(graph, run.thread())
    await run.spaces(run.thread())


@program()
async def subgraph_under_send(run: Driver) -> None:
    """One subgraph six times at once."""
    builder = StateGraph(Log)
    builder.add_node("inner", under_send(run).compile())
    builder.add_node("end", step(run, "end"))
    builder.add_conditional_edges(START, lambda state: [Send("inner", {"items": [i]}) for i in range(6)], ["inner"])
    builder.add_edge("inner", "end")
    graph = run.compile(builder)
    for turn in range(2):
        run.note(f"turn {turn}", await run.invoke(graph, {"items": [f"turn {turn}"]}, run.thread()))
    await run.look(graph, run.thread())
    await run.spaces(run.thread())


def under_send(run: Driver) -> StateGraph:
    builder = StateGraph(Log)
    for name in ("x", "y"):
        builder.add_node(name, adds(run, name))
    return chain(builder, "x", "y")


@program()
async def subgraph_speaks_to_parent(run: Driver) -> None:
    """A node of a subgraph that sends the parent on."""
    inner = StateGraph(Log)

    async def leave(state: Log) -> Command[Any]:
        return Command(goto="away", update={"items": ["left"]}, graph=Command.PARENT)

    inner.add_node("x", step(run, "x"))
    inner.add_node("leave", run.node(leave))
    builder = StateGraph(Log)
    builder.add_node("inner", chain(inner, "x", "leave").compile())
    builder.add_node("away", step(run, "away"))
    builder.add_edge(START, "inner")
    graph = run.compile(builder)
    for turn in range(2):
        run.note(f"turn {turn}", await run.invoke(graph, {"items": [turn]}, run.thread()))
    await run.look(graph, run.thread())


@program(durabilities=("async", "exit"))  # LangGraph itself fails under "sync": it waits for a put that there is none of
async def subgraph_that_keeps_nothing(run: Driver) -> None:
    """A subgraph compiled with checkpointer=False, beside one that inherits."""
    builder = StateGraph(Log)
    builder.add_node("bare", line(run, "x", "y").compile(checkpointer=False))
    builder.add_node("kept", line(run, "p").compile())
    graph = run.compile(chain(builder, "bare", "kept"))
    for turn in range(2):
        run.note(f"turn {turn}", await run.invoke(graph, {"items": [turn]}, run.thread()))
    await run.look(graph, run.thread())
    await run.spaces(run.thread())

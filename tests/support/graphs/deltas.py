"""Programs with delta channels: values are rebuilt from ancestors' writes, so each write, and its order, has to be there."""

from __future__ import annotations

from typing import Annotated, Any, TypedDict

from langchain_core.messages import AIMessage, AnyMessage, HumanMessage
from langgraph.channels.delta import DeltaChannel
from langgraph.graph import START, StateGraph
from langgraph.graph.message import _messages_delta_reducer
from langgraph.types import Command, Overwrite, Send, interrupt

from tests.support.graphs.driver import NOT_EXIT, Driver, program
from tests.support.graphs.shapes import chain


def joined(state: list[Any], writes: Any) -> list[Any]:
    """All writes one after another: an order that is lost shows."""
    return [*state, *(item for write in writes for item in write)]


class Deltas(TypedDict, total=False):
    items: Annotated[list[Any], DeltaChannel(joined, snapshot_frequency=4)]
    rare: Annotated[list[Any], DeltaChannel(joined, snapshot_frequency=1000)]
    n: int


def step(run: Driver, name: str) -> Any:
    async def node(state: Deltas) -> dict[str, Any]:
        return {"items": [f"{name}{len(state['items'])}"], "n": state.get("n", 0) + 1}

    return run.node(node)


def line(run: Driver, *names: str) -> StateGraph:
    builder = StateGraph(Deltas)
    for name in names:
        builder.add_node(name, step(run, name))
    return chain(builder, *names)


@program()
async def delta_linear(run: Driver) -> None:
    """Six turns past several snapshots, and a channel that is written once and never snapshotted."""
    graph = run.compile(line(run, "a", "b"))
    for turn in range(6):
        run.note(f"turn {turn}", await run.invoke(graph, {"items": [turn], "rare": [turn] if turn == 1 else []}, run.thread()))
    await run.look(graph, run.thread())


@program(durabilities=NOT_EXIT)
async def delta_forks(run: Driver) -> None:
    """Old states changed, replayed and given new input: each line has its own writes."""
    graph = run.compile(line(run, "a", "b", "c"))
    for turn in range(3):
        await run.invoke(graph, {"items": [turn]}, run.thread())
    old = await run.history(graph, run.thread())
    for at in (2, 6, 9):
        made = await run.update(graph, old[at].config, {"items": [f"changed {at}"]}, as_node="a")
        run.note(f"forked {at}", await run.state(graph, made))
        run.note(f"run {at}", await run.invoke(graph, None, made))
        run.note(f"replayed {at}", await run.attempt(run.invoke(graph, None, old[at].config)))
        run.note(f"input {at}", await run.invoke(graph, {"items": ["in"]}, old[at].config))
    for state in old:
        run.note("old", await run.state(graph, state.config))
    await run.look(graph, run.thread())


@program()
async def delta_send_order(run: Driver) -> None:
    """Eight tasks write one delta channel in one superstep: their order is the tasks', not that of their ends."""
    builder = StateGraph(Deltas)

    async def work(given: dict[str, Any]) -> dict[str, Any]:
        return {"items": [given["i"], given["i"]]}

    builder.add_node("work", run.node(work))
    builder.add_node("end", step(run, "end"))
    builder.add_conditional_edges(START, lambda state: [Send("work", {"i": i}) for i in range(8)], ["work"])
    builder.add_edge("work", "end")
    graph = run.compile(builder)
    for turn in range(3):
        run.note(f"turn {turn}", await run.invoke(graph, {"items": [f"turn {turn}"]}, run.thread()))
    await run.look(graph, run.thread())


@program()
async def delta_interrupts(run: Driver) -> None:
    """A question between writes of a delta channel, and an update while it is open."""
    builder = StateGraph(Deltas)

    async def ask(state: Deltas) -> dict[str, Any]:
        return {"items": [interrupt(len(state["items"]))]}

    builder.add_node("a", step(run, "a"))
    builder.add_node("ask", run.node(ask))
    builder.add_node("b", step(run, "b"))
    graph = run.compile(chain(builder, "a", "ask", "b"))
    for turn in range(3):
        run.note("asked", await run.invoke(graph, {"items": [turn]}, run.thread()))
        if turn == 1:
            run.note("updated", await run.update(graph, run.thread(), {"items": ["by hand"]}, "a"))
            run.note("asked", await run.invoke(graph, None, run.thread()))
        run.note("answered", await run.invoke(graph, Command(resume=f"answer {turn}"), run.thread()))
    await run.look(graph, run.thread())


@program()
async def delta_overwrites(run: Driver) -> None:
    """A node that sets the channel anew: what was written before counts no more."""
    builder = StateGraph(Deltas)

    async def reset(state: Deltas) -> dict[str, Any]:
        return {"items": Overwrite(["anew", len(state["items"])])}

    builder.add_node("a", step(run, "a"))
    builder.add_node("reset", run.node(reset))
    builder.add_node("b", step(run, "b"))
    graph = run.compile(chain(builder, "a", "reset", "b"))
    for turn in range(3):
        run.note(f"turn {turn}", await run.invoke(graph, {"items": [turn]}, run.thread()))
    await run.look(graph, run.thread())


class Talk(TypedDict):
    messages: Annotated[list[AnyMessage], DeltaChannel(_messages_delta_reducer, snapshot_frequency=3)]


@program()
async def delta_messages_in_a_subgraph(run: Driver) -> None:
    """Chat messages in delta channels of a graph and of the graph in it."""

    async def answer(state: Talk) -> dict[str, Any]:
        return {"messages": [AIMessage(f"answer {len(state['messages'])}", id=f"a{len(state['messages'])}")]}

    inner = StateGraph(Talk)
    inner.add_node("answer", run.node(answer))
    builder = StateGraph(Talk)
    builder.add_node("inner", chain(inner, "answer").compile())
    builder.add_node("last", run.node(answer))
    graph = run.compile(chain(builder, "inner", "last"))
    for turn in range(3):
        run.note(f"turn {turn}", await run.invoke(graph, {"messages": [HumanMessage(f"q{turn}", id=f"h{turn}")]}, run.thread()))
    await run.look(graph, run.thread())

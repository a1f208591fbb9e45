"""Programs of ordinary graphs: turns, loops, maps, streams, states of all kinds."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Annotated, Any, TypedDict

from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, RemoveMessage, ToolMessage
from langgraph.cache.memory import InMemoryCache
from langgraph.channels import EphemeralValue, UntrackedValue
from langgraph.func import entrypoint, task
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.types import CachePolicy, Command, Send

from tests.support.graphs.driver import NOT_EXIT, Driver, program
from tests.support.graphs.shapes import Log, adds, chain, line, step


@program()
async def several_turns(run: Driver) -> None:
    """Four turns on one thread, and one on another."""
    graph = run.compile(line(run, "a", "b"))
    for turn in range(4):
        run.note(f"turn {turn}", await run.invoke(graph, {"items": [turn]}, run.thread()))
    run.note("other", await run.invoke(graph, {"items": ["other"]}, run.thread("u")))
    await run.look(graph, run.thread())
    await run.look(graph, run.thread("u"), "other")
    await run.spaces(run.thread())


@program()
async def loop(run: Driver) -> None:
    """A graph that goes round six times, two turns."""
    builder = StateGraph(Log)
    builder.add_node("a", step(run, "a"))
    builder.add_edge(START, "a")
    builder.add_conditional_edges("a", lambda state: "a" if state["n"] % 6 else END)
    graph = run.compile(builder)
    for _ in range(2):
        run.note("result", await run.invoke(graph, {"items": ["go"]}, run.thread()))
    await run.look(graph, run.thread())


@program()
async def send_six(run: Driver) -> None:
    """Six tasks of one node by Send, then one that sees all they made, in order."""
    builder = StateGraph(Log)

    async def work(given: dict[str, int]) -> dict[str, Any]:
        return {"items": [given["i"] * 10]}

    builder.add_node("work", run.node(work))
    builder.add_node("end", step(run, "end"))
    builder.add_conditional_edges(START, lambda state: [Send("work", {"i": i}) for i in range(6)], ["work"])
    builder.add_edge("work", "end")
    graph = run.compile(builder)
    for _ in range(2):
        run.note("result", await run.invoke(graph, {"items": []}, run.thread()))
    await run.look(graph, run.thread())


@program()
async def fan_out_and_in(run: Driver) -> None:
    """Parallel nodes of different length that join in a deferred one."""
    builder = StateGraph(Log)
    for name in ("a", "b", "c", "c2", "end"):
        builder.add_node(name, adds(run, name), defer=name == "end")
    for one, other in (
        (START, "a"), (START, "b"), (START, "c"), ("c", "c2"), ("a", "end"), ("b", "end"), ("c2", "end"), ("end", END),
    ):  # fmt: skip
        builder.add_edge(one, other)
    graph = run.compile(builder)
    run.note("result", await run.invoke(graph, {"items": ["in"]}, run.thread()))
    run.note("again", await run.invoke(graph, {"items": ["in"]}, run.thread()))
    await run.look(graph, run.thread())


@program()
async def command_goto(run: Driver) -> None:
    """Nodes that choose what comes next, one of them two at once and a Send."""
    builder = StateGraph(Log)

    async def first(state: Log) -> Command[Any]:
        return Command(goto=["b", "c", Send("d", {"n": 7})], update={"items": ["a"]})

    async def back(state: Log) -> Command[Any]:
        return Command(goto="a" if len(state["items"]) < 9 else END, update={"items": ["e"]})

    async def given(state: Log) -> dict[str, Any]:
        return {"items": [state["n"]]}

    builder.add_node("a", run.node(first), destinations=("b", "c", "d"))
    builder.add_node("e", run.node(back), destinations=("a", END))
    builder.add_node("d", run.node(given))
    for name in ("b", "c"):
        builder.add_node(name, adds(run, name))
        builder.add_edge(name, "e")
    builder.add_edge(START, "a")
    graph = run.compile(builder)
    run.note("result", await run.invoke(graph, {"items": []}, run.thread()))
    run.note("goto", await run.invoke(graph, Command(goto="b", update={"items": ["by hand"]}), run.thread()))
    await run.look(graph, run.thread())


@program()
async def recursion_limit(run: Driver) -> None:
    """A run that is stopped by its limit, and goes on where it stood."""
    graph = run.compile(line(run, "a", "b", "c", "d", "e"))
    run.note("stopped", await run.attempt(run.invoke(graph, {"items": ["in"]}, {**run.thread(), "recursion_limit": 3})))
    await run.look(graph, run.thread(), "stopped")
    run.note("result", await run.invoke(graph, None, run.thread()))
    await run.look(graph, run.thread())


@program()
async def cached_nodes(run: Driver) -> None:
    """A node whose results come from LangGraph's cache the second time."""
    builder = StateGraph(Log)
    runs: list[str] = []

    async def slow(state: Log) -> dict[str, Any]:
        runs.append("run")
        return {"items": ["slow"]}

    builder.add_node("slow", run.node(slow), cache_policy=CachePolicy(key_func=lambda state: b"one"))
    builder.add_node("after", step(run, "after"))
    graph = run.compile(chain(builder, "slow", "after"), cache=InMemoryCache())
    for turn in range(3):
        run.note(f"turn {turn}", await run.invoke(graph, {"items": [turn]}, run.thread()))
    run.note("runs", runs)
    await run.look(graph, run.thread())


@program()
async def int_thread_id(run: Driver) -> None:
    """A thread named by a number is the one named by its digits."""
    graph = run.compile(line(run, "a"))
    run.note("first", await run.invoke(graph, {"items": [1]}, run.thread(7)))
    digits = {"configurable": {"thread_id": str(run.thread(7)["configurable"]["thread_id"])}}
    run.note("second", await run.invoke(graph, {"items": [2]}, digits))
    run.note("update", await run.update(graph, run.thread(7), {"items": ["by hand"]}))
    await run.look(graph, run.thread(7))
    run.note("by its digits", await run.state(graph, digits))


@program()
async def eight_threads(run: Driver) -> None:
    """Eight threads at once on one compiled graph, three turns each."""
    graph = run.compile(line(run, "a", "b", "c"))

    def turns(name: str) -> Any:
        async def all_turns() -> Any:
            return [await run.invoke(graph, {"items": [name, turn]}, run.thread(name)) for turn in range(3)]

        return all_turns

    run.note("results", await run.together(*(turns(f"t{i}") for i in range(8))))
    for i in range(8):
        await run.look(graph, run.thread(f"t{i}"), f"t{i}")


@program()
async def functional(run: Driver) -> None:
    """The functional API: tasks, what a turn keeps for the next, and what it returns."""

    async def double(n: int) -> int:
        return 2 * n

    async def both(given: int, *, previous: Any = None) -> Any:
        futures = [doubled(given), doubled(given + 1)]
        if run.is_async:
            found = [await future for future in futures]
        else:
            found = [future.result() for future in futures]
        return entrypoint.final(value=found, save={"seen": [*(previous or {"seen": []})["seen"], given]})

    doubled = task(run.node(double))
    flow = entrypoint(checkpointer=run.saver)(run.node(both))
    for given in (1, 5, 7):
        run.note(f"given {given}", await run.invoke(flow, given, run.thread()))
    await run.look(flow, run.thread())


@program()
async def broken_off_stream(run: Driver) -> None:
    """A stream that its reader leaves, and the thread used on."""
    graph = run.compile(line(run, "a", "b", "c", "d"))
    run.note("seen", await run.stream(graph, {"items": ["in"]}, run.thread(), after=2))
    state = await run.state(graph, run.thread())
    # How far the run came is a matter of time; that it can be gone on with is not.
    assert state.next in {("b",), ("c",), ("d",), ()} or run.durability == "exit", state.next
    run.note("new input", (await run.invoke(graph, {"items": ["more"]}, run.thread()))["items"][-5:])
    run.note("next", (await run.state(graph, run.thread())).next)


@program()
async def all_stream_modes(run: Driver) -> None:
    """What a reader of a stream sees, of a graph in a graph."""
    builder = StateGraph(Log)
    builder.add_node("a", step(run, "a"))
    builder.add_node("inner", line(run, "x", "y").compile())
    builder.add_node("b", step(run, "b"))
    graph = run.compile(chain(builder, "a", "inner", "b"))
    for mode in ("values", "updates", "tasks", "checkpoints", "debug"):
        chunks = await run.stream(
            graph, {"items": [mode]}, run.thread(mode), stream_mode=mode, subgraphs=mode in {"values", "tasks"}
        )
        if mode in {"values", "checkpoints"}:
            run.note(mode, [bare(chunk) for chunk in chunks])
        else:  # tasks of one superstep end in any order
            run.note(mode, sorted(repr(sorted(str(key) for key in kind_of(chunk))) for chunk in chunks))


def bare(chunk: Any) -> Any:
    if isinstance(chunk, dict) and "config" in chunk:
        return {name: chunk[name] for name in ("values", "next", "metadata", "config")}
    return chunk


def kind_of(chunk: Any) -> Any:
    return chunk if isinstance(chunk, dict) else chunk[1]


@program()
async def other_thread_inside(run: Driver) -> None:
    """A node that uses another thread of the same saver."""
    other = run.compile(line(run, "x", "y"))
    builder = StateGraph(Log)

    async def ask(state: Log) -> dict[str, Any]:
        found = await run.call(other, {"items": ["asked"]}, run.thread("other"))
        return {"items": [len(found["items"])]}

    builder.add_node("ask", run.node(ask))
    builder.add_node("end", step(run, "end"))
    graph = run.compile(chain(builder, "ask", "end"))
    for turn in range(3):
        run.note(f"turn {turn}", await run.invoke(graph, {"items": [turn]}, run.thread()))
    await run.look(graph, run.thread())
    # What another thread's history says of its parents depends on who is asked; its states do not.
    run.note("other", [state.values for state in await run.history(other, run.thread("other"))])


@program()
async def parts_of_histories(run: Driver) -> None:
    """Limits, cursors and filters of a history, and metadata that comes from the caller's config."""
    graph = run.compile(line(run, "a", "b", "c"))
    for turn in range(3):
        config = {**run.thread("t", user_id=f"u{turn % 2}"), "metadata": {"turn": turn, "flag": turn == 1}}
        await run.invoke(graph, {"items": [turn]}, config)
    whole = await run.history(graph, run.thread())
    run.note("two", await run.history(graph, run.thread(), limit=2))
    run.note("before", await run.history(graph, run.thread(), before=whole[len(whole) // 2].config))
    run.note("before, two", await run.history(graph, run.thread(), before=whole[1].config, limit=2))
    for wanted in (
        {"user_id": "u1"},
        {"turn": 0},
        {"source": "loop", "turn": 2},
        {"step": 1},
        {"flag": True},
        {"no": "such"},
        {},
    ):
        run.note(repr(wanted), await run.history(graph, run.thread(), filter=wanted))


class Chat(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]


@program()
async def messages(run: Driver) -> None:
    """Chat messages of all kinds, replaced and removed by id."""
    builder = StateGraph(Chat)

    async def answer(state: Chat) -> dict[str, Any]:
        n = len(state["messages"])
        call = {"name": "look", "args": {"at": [1, {"deep": None}]}, "id": f"call-{n}", "type": "tool_call"}
        return {"messages": [AIMessage(f"answer {n}", id=f"a{n}", tool_calls=[call], additional_kwargs={"k": 1})]}

    async def look(state: Chat) -> dict[str, Any]:
        call = state["messages"][-1].tool_calls[0]
        return {"messages": [ToolMessage("seen", tool_call_id=call["id"], id=f"t{len(state['messages'])}", status="error")]}

    async def trim(state: Chat) -> dict[str, Any]:
        first = state["messages"][0]
        kept = [RemoveMessage(id=str(first.id))] if len(state["messages"]) > 5 else []
        return {"messages": [*kept, HumanMessage("rewritten", id=state["messages"][1].id)]}

    for name, node in (("answer", answer), ("look", look), ("trim", trim)):
        builder.add_node(name, run.node(node))
    graph = run.compile(chain(builder, "answer", "look", "trim"))
    for turn in range(3):
        parts: list[Any] = [
            {"type": "text", "text": f"question {turn}"},
            {"type": "image_url", "image_url": {"url": "data:,x"}},
        ]
        run.note(f"turn {turn}", await run.invoke(graph, {"messages": [HumanMessage(parts, id=f"h{turn}")]}, run.thread()))
    await run.look(graph, run.thread())


class Several(TypedDict, total=False):
    items: Annotated[list[Any], operator.add]
    told: Annotated[str, EphemeralValue(str)]
    secret: Annotated[Any, UntrackedValue(object)]
    merged: Annotated[dict[str, int], operator.or_]
    last: Any


@program()
async def other_channels(run: Driver) -> None:
    """Values that live for a step, that are never stored, that are merged, and that are None."""
    builder = StateGraph(Several)

    async def first(state: Several) -> dict[str, Any]:
        return {"told": "psst", "secret": object(), "merged": {"a": 1}, "items": [state.get("last")], "last": None}

    async def second(state: Several) -> dict[str, Any]:
        return {"items": [state.get("told"), "secret" in state], "merged": {"b": len(state["items"])}, "last": [{}, [], ""]}

    async def third(state: Several) -> dict[str, Any]:
        return {"items": [state.get("told"), state["last"]]}

    for name, node in (("first", first), ("second", second), ("third", third)):
        builder.add_node(name, run.node(node))
    graph = run.compile(chain(builder, "first", "second", "third"))
    for turn in range(2):
        found = await run.invoke(graph, {"last": turn}, run.thread())
        run.note(f"turn {turn}", {name: value for name, value in found.items() if name != "secret"})
    await run.look(graph, run.thread())


@dataclass
class Order:
    """A value of a class that the state's schema names."""

    name: str
    parts: list[int] = field(default_factory=list)


@dataclass
class Basket:
    """A state that is a dataclass."""

    order: Order | None = None
    orders: Annotated[list[Order], operator.add] = field(default_factory=list)
    n: int = 0


@program()
async def typed_state(run: Driver) -> None:
    """A state of dataclasses: classes that compile() reports need no other word."""
    builder = StateGraph(Basket)

    async def fill(state: Basket) -> dict[str, Any]:
        made = Order(f"order {state.n}", [state.n, state.n + 1])
        return {"order": made, "orders": [made], "n": state.n + 1}

    async def count(state: Basket) -> dict[str, Any]:
        assert all(type(one) is Order for one in state.orders)
        return {"n": state.n + len(state.orders)}

    builder.add_node("fill", run.node(fill))
    builder.add_node("count", run.node(count))
    graph = run.compile(chain(builder, "fill", "count"))
    for turn in range(3):
        run.note(f"turn {turn}", await run.invoke(graph, {"n": turn}, run.thread()))
    await run.look(graph, run.thread())


@program(durabilities=NOT_EXIT)
async def long_thread(run: Driver) -> None:
    """A hundred and twenty items in one thread, and old ones read in the middle."""
    graph = run.compile(line(run, "a", "b"))
    for turn in range(20):
        await run.invoke(graph, {"items": [f"{turn}.{i}" for i in range(4)]}, run.thread())
    found = await run.history(graph, run.thread())
    run.note("lengths", [len(state.values.get("items", ())) for state in found])
    for at in (3, 30, 50):
        run.note(f"at {at}", await run.state(graph, found[at].config))

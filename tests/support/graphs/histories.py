"""Programs that change states from outside, go back, and go on from there."""

from __future__ import annotations

from typing import Any

from langgraph.graph import END, START, StateGraph
from langgraph.types import StateUpdate

from tests.support.graphs.driver import NOT_EXIT, Driver, program
from tests.support.graphs.interrupts import asking as asking_graph
from tests.support.graphs.shapes import Log, adds, chain, line, step
from tests.support.graphs.subgraphs import asking, counting, outer


@program()
async def update_latest(run: Driver) -> None:
    """Values put in at the newest state, as this node and that, then run on."""
    graph = run.compile(line(run, "a", "b", "c"))
    await run.invoke(graph, {"items": [1]}, run.thread())
    for node in (None, "a", "b", "c", "__start__"):
        run.note(f"as {node}", await run.update(graph, run.thread(), {"items": [f"as {node}"]}, node))
        run.note("next", (await run.state(graph, run.thread())).next)
    run.note("on", await run.invoke(graph, None, run.thread()))
    await run.look(graph, run.thread())


@program()
async def update_fresh(run: Driver) -> None:
    """The first word on a thread is an update."""
    graph = run.compile(line(run, "a", "b"))
    run.note("made", await run.update(graph, run.thread(), {"items": ["first"]}, "a"))
    run.note("on", await run.invoke(graph, None, run.thread()))
    run.note("in", await run.invoke(graph, {"items": [1]}, run.thread()))
    await run.look(graph, run.thread())


@program(durabilities=NOT_EXIT)
async def update_old(run: Driver) -> None:
    """An update of an old state makes a fork, which is the newest then and is run on."""
    graph = run.compile(line(run, "a", "b", "c"))
    await run.invoke(graph, {"items": [1]}, run.thread())
    await run.invoke(graph, {"items": [2]}, run.thread())
    old = await run.history(graph, run.thread())
    for at in (2, 5, len(old) - 1):
        made = await run.update(graph, old[at].config, {"items": [f"changed {at}"]}, as_node=None if old[at].next else "c")
        run.note(f"forked {at}", await run.state(graph, made))
        run.note(f"run {at}", await run.invoke(graph, None, made))
        run.note(f"newest {at}", await run.state(graph, run.thread()))
    run.note("in", await run.invoke(graph, {"items": [3]}, run.thread()))
    await run.look(graph, run.thread())


@program()
async def update_in_a_subgraph(run: Driver) -> None:
    """A state of a subgraph that waits is changed by its own config."""
    graph = outer(run, asking_graph(run, "sure?").compile())
    await run.invoke(graph, {"items": [1]}, run.thread())
    state = await run.state(graph, run.thread(), subgraphs=True)
    inner = state.tasks[0].state.config
    run.note("updated", await run.update(graph, inner, {"items": ["inside"]}, "ask"))
    run.note("seen", await run.state(graph, run.thread(), subgraphs=True))
    run.note("on", await run.invoke(graph, None, run.thread()))
    await run.look(graph, run.thread())
    await run.spaces(run.thread())


@program()
async def update_to_the_end(run: Driver) -> None:
    """Tasks that wait are cleared by an update as END, and a run then starts anew."""
    graph = run.compile(asking_graph(run, "sure?"))
    await run.invoke(graph, {"items": [1]}, run.thread())
    run.note("cleared", await run.update(graph, run.thread(), None, END))
    await run.look(graph, run.thread(), "cleared")
    run.note("in", await run.invoke(graph, {"items": [2]}, run.thread()))
    await run.look(graph, run.thread())


@program()
async def update_copies(run: Driver) -> None:
    """The newest state copied beside itself, and run from."""
    graph = run.compile(asking_graph(run, "sure?"))
    await run.invoke(graph, {"items": [1]}, run.thread())
    found = await run.history(graph, run.thread())
    for state in (found[0], found[-1]):
        made = await run.update(graph, state.config, None, "__copy__")
        run.note("copied", await run.state(graph, made))
        run.note("run", await run.attempt(run.invoke(graph, None, made)))
    await run.look(graph, run.thread())


@program()
async def update_in_bulk(run: Driver) -> None:
    """Several supersteps at once, one of them with two nodes."""
    builder = StateGraph(Log)
    for name in ("a", "b", "c"):
        builder.add_node(name, adds(run, name))
    builder.add_edge(START, "a")
    builder.add_edge(START, "b")
    builder.add_edge("a", "c")
    builder.add_edge("b", "c")
    graph = run.compile(builder)
    steps = [
        [StateUpdate({"items": ["in"]}, "__input__")],
        [StateUpdate({"items": ["by a"]}, "a"), StateUpdate({"items": ["by b"]}, "b")],
    ]
    run.note("made", await run.bulk(graph, run.thread(), steps))
    await run.look(graph, run.thread(), "made")
    run.note("on", await run.invoke(graph, None, run.thread()))
    run.note("more", await run.bulk(graph, run.thread(), [[StateUpdate({"items": [i]}, "c")] for i in range(3)]))
    await run.look(graph, run.thread())


@program(durabilities=NOT_EXIT)
async def replay_each(run: Driver) -> None:
    """Every checkpoint of two turns is run from, oldest first: each a fork that is the newest then."""
    graph = run.compile(line(run, "a", "b"))
    await run.invoke(graph, {"items": [1]}, run.thread())
    await run.invoke(graph, {"items": [2]}, run.thread())
    for state in reversed(await run.history(graph, run.thread())):
        run.note(f"from {state.metadata['step']}", await run.attempt(run.invoke(graph, None, state.config)))
        run.note("newest", await run.state(graph, run.thread()))
    await run.look(graph, run.thread())


@program(durabilities=NOT_EXIT)
async def fork_run_twice(run: Driver) -> None:
    """A fork is run to its end twice, and each of them is gone on with."""
    graph = run.compile(line(run, "a", "b", "c"))
    await run.invoke(graph, {"items": [1]}, run.thread())
    old = next(state for state in reversed(await run.history(graph, run.thread())) if state.next == ("b",))
    forked = await run.update(graph, old.config, {"items": ["forked"]})
    heads = []
    for i in range(2):
        run.note(f"run {i}", await run.invoke(graph, None, forked))
        heads.append((await run.state(graph, run.thread())).config)
    for i, head in enumerate(heads):
        run.note(f"on {i}", await run.invoke(graph, {"items": [f"on {i}"]}, head))
    await run.look(graph, run.thread())


@program(durabilities=NOT_EXIT)
async def input_at_old(run: Driver) -> None:
    """New input at an old checkpoint: a turn beside the later ones."""
    graph = run.compile(line(run, "a", "b"))
    for turn in range(3):
        await run.invoke(graph, {"items": [turn]}, run.thread())
    ends = [state for state in await run.history(graph, run.thread()) if not state.next]
    for state in ends:
        run.note("beside", await run.invoke(graph, {"items": ["beside"]}, state.config))
    run.note("newest", await run.invoke(graph, {"items": ["newest"]}, run.thread()))
    await run.look(graph, run.thread())


@program(durabilities=NOT_EXIT)
async def input_in_the_middle(run: Driver) -> None:
    """New input at checkpoints whose next node has not run."""
    graph = run.compile(line(run, "a", "b", "c"))
    await run.invoke(graph, {"items": [0]}, run.thread())
    for state in await run.history(graph, run.thread()):
        if state.metadata["source"] == "loop":
            run.note(f"at {state.metadata['step']}", await run.invoke(graph, {"items": ["in"]}, state.config))
    await run.look(graph, run.thread())


def with_memory(run: Driver) -> Any:
    builder = StateGraph(Log)
    builder.add_node("ask", asking(run, counting(run).compile(checkpointer=True)))
    builder.add_node("z", step(run, "z"))
    return run.compile(chain(builder, "ask", "z"))


@program(durabilities=NOT_EXIT)
async def replay_stateful_subgraph(run: Driver) -> None:
    """Turns of a graph whose subgraph remembers, replayed: it remembers what it did at that time."""
    graph = with_memory(run)
    for turn in range(3):
        await run.invoke(graph, {"items": [turn]}, run.thread())
    asked = [state for state in await run.history(graph, run.thread()) if state.next == ("ask",)]
    for state in reversed(asked):
        run.note("replayed", await run.invoke(graph, None, state.config))
    run.note("in", await run.invoke(graph, {"items": ["in"]}, run.thread()))
    await run.look(graph, run.thread())
    await run.spaces(run.thread())


@program(durabilities=NOT_EXIT)
async def replay_before_stateful_subgraph(run: Driver) -> None:
    """The same from the checkpoint before any of it, and from input at an old end."""
    graph = with_memory(run)
    for turn in range(3):
        await run.invoke(graph, {"items": [turn]}, run.thread())
    history = await run.history(graph, run.thread())
    run.note("from the first", await run.invoke(graph, None, history[-1].config))
    ends = [state for state in history if not state.next]
    run.note("beside", await run.invoke(graph, {"items": ["beside"]}, ends[-1].config))
    run.note("newest", await run.invoke(graph, {"items": ["newest"]}, run.thread()))
    await run.look(graph, run.thread())


@program(durabilities=NOT_EXIT)
async def replay_subgraph(run: Driver) -> None:
    """Every checkpoint of a graph with an ordinary subgraph is run from."""
    graph = outer(run, line(run, "x", "y").compile())
    await run.invoke(graph, {"items": [1]}, run.thread())
    for state in reversed(await run.history(graph, run.thread())):
        run.note(f"from {state.metadata['step']}", await run.attempt(run.invoke(graph, None, state.config)))
    await run.look(graph, run.thread())


@program(durabilities=NOT_EXIT)
async def forks_at_once(run: Driver) -> None:
    """Four runs at once from one old checkpoint: forks are no conflict, and all are kept."""
    graph = run.compile(line(run, "a", "b"))
    for turn in range(2):
        await run.invoke(graph, {"items": [turn]}, run.thread())
    old = [state for state in await run.history(graph, run.thread()) if not state.next][-1]

    def one(i: int) -> Any:
        async def call() -> Any:
            return await run.invoke(graph, {"items": [f"fork {i}"]}, old.config)

        return call

    run.note("results", await run.together(*(one(i) for i in range(4))))
    # In which order they were stored is a matter of time.
    run.note("kept", sorted(str(state.values.get("items")) for state in await run.history(graph, run.thread())))

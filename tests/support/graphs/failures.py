"""Programs whose nodes fail, and what comes after."""

from __future__ import annotations

import asyncio
from typing import Any

from langgraph.graph import END, START, StateGraph
from langgraph.types import RetryPolicy, Send

from safepoint import Conflict
from tests.support.graphs.driver import Driver, program
from tests.support.graphs.shapes import Log, adds, chain, line, step
from tests.support.graphs.subgraphs import outer

QUICK = RetryPolicy(initial_interval=0.001, jitter=False, max_attempts=4, retry_on=ValueError)


def fails(run: Driver, name: str, times: int) -> Any:
    """A node that raises so many times before it does what it should."""
    left = [times]

    async def node(state: Log) -> dict[str, Any]:
        if left[0]:
            left[0] -= 1
            raise ValueError(f"{name} fails")
        return {"items": [name]}

    return run.node(node)


def failing(run: Driver, times: int, **options: Any) -> StateGraph:
    builder = StateGraph(Log)
    builder.add_node("a", step(run, "a"))
    builder.add_node("f", fails(run, "f", times), **options)
    builder.add_node("b", step(run, "b"))
    return chain(builder, "a", "f", "b")


@program()
async def failure_then_resume(run: Driver) -> None:
    """A run that dies of a node's error twice, and is resumed each time."""
    graph = run.compile(failing(run, 2))
    run.note("failed", await run.attempt(run.invoke(graph, {"items": [1]}, run.thread())))
    await run.look(graph, run.thread(), "failed")
    run.note("failed again", await run.attempt(run.invoke(graph, None, run.thread())))
    run.note("went on", await run.invoke(graph, None, run.thread()))
    await run.look(graph, run.thread())


@program()
async def failure_then_new_input(run: Driver) -> None:
    """The same with new input instead."""
    graph = run.compile(failing(run, 1))
    run.note("failed", await run.attempt(run.invoke(graph, {"items": [1]}, run.thread())))
    run.note("new input", await run.invoke(graph, {"items": [2]}, run.thread()))
    await run.look(graph, run.thread())


@program()
async def failure_beside_others(run: Driver) -> None:
    """One of four parallel tasks fails: what the others wrote is kept, and they do not run again."""
    builder = StateGraph(Log)
    ran: list[Any] = []

    async def work(given: dict[str, Any]) -> dict[str, Any]:
        ran.append(given["i"])
        if given["i"] == 3 and ran.count(3) == 1:
            while len(ran) < 4:
                if run.is_async:
                    await asyncio.sleep(0)
            raise ValueError("the last fails")
        return {"items": [given["i"]]}

    builder.add_node("work", run.node(work))
    builder.add_node("end", step(run, "end"))
    builder.add_conditional_edges(START, lambda state: [Send("work", {"i": i}) for i in range(4)], ["work"])
    builder.add_edge("work", "end")
    graph = run.compile(builder)
    run.note("failed", await run.attempt(run.invoke(graph, {"items": []}, run.thread())))
    run.note("went on", await run.invoke(graph, None, run.thread()))
    run.note("newest", await run.state(graph, run.thread()))
    run.note("the failed one ran twice", ran.count(3))


@program()
async def retry_policy(run: Driver) -> None:
    """A node that LangGraph itself runs again."""
    graph = run.compile(failing(run, 2, retry_policy=QUICK))
    run.note("result", await run.invoke(graph, {"items": [1]}, run.thread()))
    await run.look(graph, run.thread())


@program()
async def retry_around_a_subgraph(run: Driver) -> None:
    """A subgraph whose node fails twice, under a policy on the node that holds it: its namespace is used again."""
    builder = StateGraph(Log)
    builder.add_node("a", step(run, "a"))
    builder.add_node("inner", failing(run, 2).compile(), retry_policy=QUICK)
    graph = run.compile(chain(builder, "a", "inner"))
    for turn in range(2):
        run.note(f"turn {turn}", await run.invoke(graph, {"items": [turn]}, run.thread()))
    await run.look(graph, run.thread())


@program()
async def failure_in_a_subgraph(run: Driver) -> None:
    """A failure two graphs down, resumed and then met by new input."""
    inner = StateGraph(Log)
    inner.add_node("deep", failing(run, 2).compile())
    graph = outer(run, chain(inner, "deep").compile())
    run.note("failed", await run.attempt(run.invoke(graph, {"items": [1]}, run.thread())))
    run.note("with subgraphs", await run.state(graph, run.thread(), subgraphs=True))
    run.note("failed again", await run.attempt(run.invoke(graph, None, run.thread())))
    run.note("went on", await run.invoke(graph, None, run.thread()))
    run.note("turn", await run.invoke(graph, {"items": [2]}, run.thread()))
    await run.look(graph, run.thread())


@program()
async def failure_of_a_stateful_subgraph(run: Driver) -> None:
    """A subgraph that remembers fails in the middle, and goes on from there."""
    graph = outer(run, failing(run, 1).compile(checkpointer=True))
    run.note("failed", await run.attempt(run.invoke(graph, {"items": [1]}, run.thread())))
    run.note("went on", await run.invoke(graph, None, run.thread()))
    run.note("turn", await run.invoke(graph, {"items": [2]}, run.thread()))
    await run.look(graph, run.thread())
    await run.spaces(run.thread())


@program()
async def wrong_updates(run: Driver) -> None:
    """A node that writes what its channel refuses; the thread is used on."""
    builder = StateGraph(Log)
    bad = [True]

    async def twice(state: Log) -> dict[str, Any]:
        return {"n": 1}

    async def once(state: Log) -> dict[str, Any]:
        return {"n": 2} if bad.pop() else {"items": ["good"]}

    builder.add_node("twice", run.node(twice))
    builder.add_node("once", run.node(once))
    for name in ("twice", "once"):
        builder.add_edge(START, name)
        builder.add_edge(name, END)
    graph = run.compile(builder)
    run.note("refused", await run.attempt(run.invoke(graph, {"items": [1]}, run.thread())))
    bad.append(False)
    run.note("in", await run.invoke(graph, {"items": [2]}, run.thread()))
    await run.look(graph, run.thread())


@program(modes=("async",))
async def cancelled_then_invoked(run: Driver) -> None:
    """A run is cancelled in the middle of a node, awaited or not, and the thread is used on."""
    builder = StateGraph(Log)
    there = asyncio.Event()
    block = [True]

    async def slow(state: Log) -> dict[str, Any]:
        if block[0]:
            there.set()
            await asyncio.sleep(60)
        return {"items": ["slow"]}

    builder.add_node("a", step(run, "a"))
    builder.add_node("slow", slow)
    graph = run.compile(chain(builder, "a", "slow"))
    for awaited in (True, False):
        block[0] = True
        there.clear()
        running = asyncio.create_task(run.invoke(graph, {"items": [awaited]}, run.thread(f"{awaited}")))
        await there.wait()
        running.cancel()
        if awaited:
            await asyncio.wait([running])
        block[0] = False
        # What the cancelled run had stored by then is a matter of time; that the next one is no conflict is not.
        try:
            found = await run.invoke(graph, {"items": ["in"]}, run.thread(f"{awaited}"))
        except Conflict:
            # Nobody waited for the other to end, and it stores what it has as it ends: two runs at once, one of which is told.
            assert not awaited
            await asyncio.wait([running])
            found = await run.invoke(graph, {"items": ["in"]}, run.thread(f"{awaited}"))
        run.note(f"awaited {awaited}", found["items"][-3:])
        await asyncio.wait([running])


@program(modes=("async",))
async def timeout_and_retry(run: Driver) -> None:
    """A node that overruns its time twice and is run again by LangGraph."""
    builder = StateGraph(Log)
    left = [2]

    async def slow(state: Log) -> dict[str, Any]:
        if left[0]:
            left[0] -= 1
            await asyncio.sleep(60)
        return {"items": ["slow"]}

    again = RetryPolicy(initial_interval=0.001, jitter=False, max_attempts=4, retry_on=lambda error: True)
    builder.add_node("a", adds(run, "a"))
    builder.add_node("slow", slow, timeout=0.02, retry_policy=again)
    graph = run.compile(chain(builder, "a", "slow"))
    for turn in range(2):
        run.note(f"turn {turn}", await run.invoke(graph, {"items": [turn]}, run.thread()))
    await run.look(graph, run.thread())


@program()
async def resumed_when_nothing_is_left(run: Driver) -> None:
    """A run that ended is invoked with nothing, twice; and a thread that does not exist."""
    graph = run.compile(line(run, "a", "b"))
    await run.invoke(graph, {"items": [1]}, run.thread())
    for _ in range(2):
        run.note("nothing", await run.attempt(run.invoke(graph, None, run.thread())))
    run.note("no such thread", await run.attempt(run.invoke(graph, None, run.thread("none"))))
    run.note("its state", await run.state(graph, run.thread("none")))
    await run.look(graph, run.thread())

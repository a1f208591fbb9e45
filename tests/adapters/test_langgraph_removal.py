"""Removing and copying, on every store, with graphs that need what they do not show: delta channels, forks, subgraphs, open questions.

LangGraph's suite removes checkpoints made by hand, which need nothing from one another.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any

import pytest
from langgraph.graph import StateGraph
from langgraph.types import Command, interrupt

from safepoint import Retention
from safepoint.adapters.langgraph import SafepointSaver
from tests.support.graphs import deltas, histories, interrupts, subgraphs
from tests.support.graphs.driver import Driver, drive
from tests.support.graphs.facts import Normal, difference
from tests.support.graphs.shapes import chain, line
from tests.support.scale import scale

pytestmark = pytest.mark.scaled

Config = dict[str, Any]


@pytest.fixture(params=["sync", "async"])
def run(saver: Any, request: pytest.FixtureRequest) -> Driver:
    """Half of the tests' calls go by each kind of method: what they call is the same."""
    return Driver(saver, request.param, "async")


@pytest.fixture
def here() -> Config:
    return fresh()


def fresh() -> Config:
    return {"configurable": {"thread_id": str(uuid.uuid4())}}


def name_of(config: Config) -> str:
    found: str = config["configurable"]["thread_id"]
    return found


def within(config: Config, run_id: str) -> Config:
    """A turn that its caller names: savers find it again in the metadata."""
    return {**config, "metadata": {"run_id": run_id}}


def does(run: Driver, body: Any) -> Any:
    return asyncio.run(body) if run.is_async else drive(body)


async def remove_runs(run: Driver, *runs: str) -> None:
    if run.is_async:
        await run.saver.adelete_for_runs(list(runs))
    else:
        run.saver.delete_for_runs(list(runs))


async def copy_thread(run: Driver, source: Config, target: Config) -> None:
    if run.is_async:
        await run.saver.acopy_thread(name_of(source), name_of(target))
    else:
        run.saver.copy_thread(name_of(source), name_of(target))


async def prune(run: Driver, *configs: Config, **how: Any) -> None:
    names = [name_of(config) for config in configs]
    if run.is_async:
        await run.saver.aprune(names, **how)
    else:
        run.saver.prune(names, **how)


async def spaces_of(run: Driver, config: Config) -> list[str]:
    found = await run.tuples({"configurable": {"thread_id": name_of(config)}})
    return sorted({t.config["configurable"]["checkpoint_ns"] for t in found})


async def facts_of(run: Driver, graph: Any, *configs: Config) -> list[Any]:
    """All that is to be seen of these threads, with the threads' own names gone."""
    found = []
    for config in configs:
        normal = Normal({name_of(config): "here"})
        seen = [await run.state(graph, config, subgraphs=True), await run.history(graph, config)]
        listed = await run.tuples({"configurable": {"thread_id": name_of(config)}})
        by_id = sorted(listed, key=lambda t: t.config["configurable"]["checkpoint_id"])
        raw = [[t.config, dict(t.checkpoint["channel_values"]), t.metadata, t.parent_config, t.pending_writes] for t in by_id]
        found.append(normal([seen, raw]))
    return found


# -- delete_for_runs


def test_runs_of_a_delta_graph_are_removed(run: Driver, here: Config) -> None:
    """What later checkpoints are made of stays, unseen; the thread goes on as if nothing had been removed."""

    async def body() -> None:
        graph = run.compile(deltas.line(run, "a", "b"))
        for turn in range(5):
            await run.invoke(graph, {"items": [turn], "rare": [turn]}, within(here, f"{name_of(here)}-{turn}"))
        before = await run.state(graph, here)
        await remove_runs(run, f"{name_of(here)}-1", f"{name_of(here)}-3")
        left = await run.history(graph, here)
        assert {state.metadata["run_id"][-1] for state in left} == {"0", "2", "4"}
        assert (await run.state(graph, here)).values == before.values
        for state in left:
            assert state.values.get("rare", []) == list(range(len(state.values.get("rare", []))))
        found = await run.invoke(graph, {"items": ["on"], "rare": ["on"]}, here)
        assert found["rare"] == [*range(5), "on"]
        assert found["items"] == [*before.values["items"], "on", *found["items"][-2:]]
        # The newest run too: then the one before it is the newest, and its own past is whole.
        await remove_runs(run, f"{name_of(here)}-4")
        at = [state for state in await run.history(graph, here) if state.metadata.get("run_id", "")[-1:] == "2"]
        assert at[0].values["rare"] == [0, 1, 2]

    does(run, body())


def test_a_run_that_others_were_forked_from_is_removed(run: Driver, here: Config) -> None:
    async def body() -> None:
        graph = run.compile(deltas.line(run, "a", "b"))
        for turn in range(3):
            await run.invoke(graph, {"items": [turn]}, within(here, f"{name_of(here)}-{turn}"))
        ends = [state for state in await run.history(graph, here) if not state.next]
        forked = [
            await run.invoke(graph, {"items": [f"fork {i}"]}, within(end.config, f"{name_of(here)}-f{i}"))
            for i, end in enumerate(ends)
        ]
        before = {i: state.values for i, state in enumerate(await run.history(graph, here)) if "run_id" in state.metadata}
        await remove_runs(run, *(f"{name_of(here)}-{turn}" for turn in range(3)))
        left = await run.history(graph, here)
        assert {state.metadata["run_id"].rpartition("-")[2] for state in left} == {"f0", "f1", "f2"}
        ends = [state for state in left if not state.next]
        assert [state.values for state in reversed(ends)] == forked
        assert len(before) > len(left)
        assert (await run.invoke(graph, {"items": ["on"]}, ends[-1].config))["items"][:-3] == forked[0]["items"]

    does(run, body())


def test_a_run_goes_with_its_subgraphs(run: Driver, here: Config) -> None:
    """The namespaces of its calls hold nothing else; a stateful subgraph goes on from what is left."""

    async def body() -> None:
        graph = subgraphs.outer(run, line(run, "x", "y").compile())
        for turn in range(3):
            await run.invoke(graph, {"items": [turn]}, within(here, f"{name_of(here)}-{turn}"))
        assert len(await spaces_of(run, here)) == 4
        await remove_runs(run, f"{name_of(here)}-1")
        assert len(await spaces_of(run, here)) == 3
        found = await run.invoke(graph, {"items": ["on"]}, here)
        assert found["n"] == 16
        await remove_runs(run)
        await remove_runs(run, "no such run")
        assert len(await spaces_of(run, here)) == 4

    does(run, body())


# -- copy_thread


def test_a_copy_is_whole_and_its_own(run: Driver, here: Config) -> None:
    """Forks, namespaces, an open question and delta channels: all there, and both go on apart."""

    async def body() -> None:
        for make, begin in ((everything, {"items": [0]}), (with_deltas, {"items": [0], "rare": ["once"]})):
            source, target = fresh(), fresh()
            graph = make(run)
            await run.invoke(graph, begin, source)
            await run.invoke(graph, Command(resume="yes"), source)
            old = next(state for state in await run.history(graph, source) if not state.next)
            await run.invoke(graph, {"items": ["second"]}, source)
            await run.invoke(graph, {"items": ["beside"]}, old.config)
            await copy_thread(run, source, target)
            one, other = await facts_of(run, graph, source, target)
            assert one == other, difference(one, other)
            answered = [
                await run.invoke(graph, Command(resume=answer), config)
                for answer, config in (("left", source), ("right", target))
            ]
            assert [found["items"].count("left") + 10 * found["items"].count("right") for found in answered] == [1, 10]
            again = (await facts_of(run, graph, source))[0]
            await run.invoke(graph, {"items": ["more"]}, target)
            assert (await facts_of(run, graph, source))[0] == again
            if run.is_async:
                await run.saver.adelete_thread(name_of(source))
            else:
                run.saver.delete_thread(name_of(source))
            assert (await run.state(graph, target)).values["items"][-1] == (await run.history(graph, target))[0].values[
                "items"
            ][-1]
            assert (await run.invoke(graph, Command(resume="again"), target))["items"].count("again") == 1

    does(run, body())


def everything(run: Driver) -> Any:
    """A graph with an ordinary subgraph that asks."""
    return subgraphs.outer(run, interrupts.asking(run, "sure?").compile())


def with_deltas(run: Driver) -> Any:
    async def ask(state: deltas.Deltas) -> dict[str, Any]:
        return {"items": [interrupt("sure?")]}

    builder = StateGraph(deltas.Deltas)
    builder.add_node("a", deltas.step(run, "a"))
    builder.add_node("ask", run.node(ask))
    builder.add_node("b", deltas.step(run, "b"))
    return run.compile(chain(builder, "a", "ask", "b"))


# -- prune


def test_pruned_delta_graphs_keep_their_values(run: Driver, here: Config) -> None:
    """One checkpoint is left to see, its value is whole, and it goes on, is pruned again, and copied."""

    async def body() -> None:
        graph = run.compile(deltas.line(run, "a", "b"))
        said: list[Any] = []
        for turn in range(6):
            found = await run.invoke(graph, {"items": [turn], "rare": [turn]}, here)
            said.append(turn)
            await prune(run, here)
            assert found["rare"] == said
            (left,) = await run.history(graph, here)
            assert left.values == found
            assert (await run.state(graph, here)).values == found
        target = fresh()
        await copy_thread(run, here, target)
        assert (await run.state(graph, target)).values == found
        assert (await run.invoke(graph, {"rare": ["on"]}, target))["rare"] == [*said, "on"]

    does(run, body())


def test_prune_keeps_the_newest_of_forks(run: Driver, here: Config) -> None:
    async def body() -> None:
        graph = run.compile(line(run, "a", "b"))
        for turn in range(3):
            await run.invoke(graph, {"items": [turn]}, here)
        first = [state for state in await run.history(graph, here) if not state.next][-1]
        beside = await run.invoke(graph, {"items": ["beside"]}, first.config)
        await prune(run, here, strategy="keep_latest")
        (left,) = await run.history(graph, here)
        assert left.values == beside
        assert (await run.invoke(graph, {"items": ["on"]}, here))["items"] == [*beside["items"], "on", "a", "b"]

    does(run, body())


def test_prune_drops_calls_of_subgraphs_with_their_root(run: Driver, here: Config) -> None:
    """However many turns there were: what is left does not grow with them. What a stateful subgraph remembers stays."""

    async def body() -> None:
        graph = subgraphs.outer(run, line(run, "x", "y").compile())
        left = []
        for turns in (2, 5):
            for turn in range(turns):
                await run.invoke(graph, {"items": [turn]}, here)
            await prune(run, here)
            left.append(len(await run.tuples({"configurable": {"thread_id": name_of(here)}})))
        assert left[0] == left[1] <= 3
        memory = histories.with_memory(run)
        other = fresh()
        for turn in range(4):
            found = await run.invoke(memory, {"items": [turn]}, other)
            await prune(run, other)
            assert found["items"][-2:] == [turn + 1, "z"]

    does(run, body())


def test_a_pruned_question_is_still_answered(run: Driver, here: Config) -> None:
    """A thread that waits in a subgraph is pruned: question, path to it and earlier answers stay."""

    async def body() -> None:
        inner = interrupts.asking(run, "one?", "two?").compile()
        graph = subgraphs.outer(run, inner)
        plain, pruned = fresh(), here
        seen = []
        for config in (plain, pruned):
            found = [await run.invoke(graph, {"items": [1]}, config)]
            for answer in ("first", "second"):
                if config is pruned:
                    await prune(run, pruned)
                found.append(await run.invoke(graph, Command(resume=answer), config))
            seen.append(Normal()(found))
        assert seen[0] == seen[1], difference(*seen)

    does(run, body())


def test_pruned_to_nothing(run: Driver, here: Config) -> None:
    """Nothing is left, other threads are as they were, and the name can be used anew; what is no strategy is refused."""

    async def body() -> None:
        graph = run.compile(line(run, "a", "b"))
        other = fresh()
        for config in (here, other):
            await run.invoke(graph, {"items": [1]}, config)
        before = await facts_of(run, graph, other)
        with pytest.raises(ValueError):
            await prune(run, here, strategy="some")
        await prune(run, here, strategy="delete")
        assert await run.tuples({"configurable": {"thread_id": name_of(here)}}) == []
        assert (await run.state(graph, here)).values == {}
        assert (await run.invoke(graph, {"items": ["anew"]}, here))["items"] == ["anew", "a", "b"]
        assert await facts_of(run, graph, other) == before
        await prune(run)
        await prune(run, fresh())

    does(run, body())


def test_a_deleted_thread_leaves_nothing(run: Driver, here: Config) -> None:
    """Open questions, writes without a checkpoint and namespaces included; and a run that is told so sets out anew."""

    async def body() -> None:
        graph = everything(run)
        await run.invoke(graph, {"items": [1]}, here)
        if run.is_async:
            await run.saver.adelete_thread(name_of(here))
        else:
            run.saver.delete_thread(name_of(here))
        assert await run.tuples({"configurable": {"thread_id": name_of(here)}}) == []
        state = await run.state(graph, here)
        assert (state.values, state.next, state.interrupts) == ({}, (), ())
        assert "__interrupt__" in await run.invoke(graph, {"items": [2]}, here)
        assert (await run.invoke(graph, Command(resume="yes"), here))["items"].count(1) == 0

    does(run, body())


def test_writes_that_come_after_retention_has_been() -> None:
    """A node's writes are stored in the background, and may come when their checkpoint is gone already: no run fails for that."""
    with SafepointSaver("memory://", retention=Retention(keep_latest=1)) as saver:
        graph = line(Driver(saver, "sync", "async"), "a", "b", "c").compile(checkpointer=saver)
        put_writes = saver.put_writes

        def late(*args: Any, **kwargs: Any) -> None:
            time.sleep(0.02)
            put_writes(*args, **kwargs)

        saver.put_writes = late  # type: ignore[method-assign]
        for _ in range(scale(12, 60)):
            there = fresh()
            for _ in range(4):
                graph.invoke({"items": ["in"]}, there)
        assert saver.cp.verify().ok

"""Durability "exit": all that a run has to put comes at its end, the subgraph's before that of the graph around it. Who has lost in one
place puts nothing in the other; who has met only itself, or tries again, is not hindered."""

from __future__ import annotations

import contextvars
import operator
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, TypedDict

import pytest
from langgraph.channels import DeltaChannel
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.graph import START, StateGraph
from langgraph.types import RetryPolicy, Send

from safepoint import Conflict
from safepoint.adapters.langgraph import SafepointSaver
from tests.support.graphs.subjects import subject
from tests.support.stores import KINDS

THREAD: Any = {"configurable": {"thread_id": "t"}}
DURABILITIES = ("sync", "async", "exit")


class Items(TypedDict):
    items: Annotated[list[str], operator.add]


def added(there: list[str] | None, writes: Any) -> list[str]:
    return [*(there or []), *(item for write in writes for item in write)]


class Deltas(TypedDict):
    items: Annotated[list[str], DeltaChannel(added, list)]


@pytest.fixture
def saver() -> Any:
    with SafepointSaver("memory://") as made:
        yield made


def subgraph(item: str, before: Callable[[], object] = lambda: None, *, keeps: bool = True) -> Any:
    def x(state: Items) -> dict[str, Any]:
        before()
        return {"items": [item]}

    return StateGraph(Items).add_node("x", x).add_edge(START, "x").compile(checkpointer=True if keeps else None)


def around(saver: Any, node: Any, schema: Any = Items, **options: Any) -> Any:
    return StateGraph(schema).add_node("n", node, **options).add_edge(START, "n").compile(checkpointer=saver)


def overtake(saver: Any) -> None:
    """Somebody puts to the subgraph of node "n", outside of any run."""

    def put() -> None:
        found = saver.get_tuple({"configurable": {"thread_id": "t", "checkpoint_ns": "n"}})
        config = {"thread_id": "t", "checkpoint_ns": "n"}
        if found is not None:
            config["checkpoint_id"] = found.config["configurable"]["checkpoint_id"]
        saver.put({"configurable": config}, empty_checkpoint(), {"source": "loop", "step": 1, "parents": {}}, {})

    contextvars.Context().run(put)


def once(act: Callable[[], object]) -> Callable[[], object]:
    """Does it the first time only."""
    left = [act]
    return lambda: left and left.pop()()


@pytest.mark.parametrize("durability", DURABILITIES)
@pytest.mark.parametrize("way", ["policy of the node", "policy", "by hand", "another subgraph"])
def test_who_tries_again_is_not_hindered(way: str, durability: str, saver: Any) -> None:
    inner = subgraph("i", once(lambda: overtake(saver)))
    second = subgraph("i") if way == "another subgraph" else inner

    def node(state: Items) -> Any:
        try:
            return inner.invoke({"items": []})
        except Conflict:
            if "policy" in way:
                raise
            return second.invoke({"items": []})

    options = {"retry_policy": RetryPolicy(initial_interval=0, jitter=False, retry_on=Conflict)} if "policy" in way else {}
    graph = around(saver, inner if way == "policy of the node" else node, **options)
    assert graph.invoke({"items": ["in"]}, THREAD, durability=durability)["items"][-2:] == ["in", "i"]
    assert graph.get_state(THREAD).values["items"][-2:] == ["in", "i"]


@pytest.mark.parametrize("durability", DURABILITIES)
def test_a_run_that_caught_it_goes_on_unless_all_comes_at_the_end(durability: str, saver: Any) -> None:
    inner = subgraph("i", lambda: overtake(saver))

    def node(state: Items) -> Any:
        try:
            return inner.invoke({"items": []})
        except Conflict:
            return {"items": ["caught"]}

    graph = around(saver, node)
    if durability == "exit":
        with pytest.raises(Conflict):
            graph.invoke({"items": ["in"]}, THREAD, durability=durability)
        assert graph.get_state(THREAD).values == {}
    else:
        assert graph.invoke({"items": ["in"]}, THREAD, durability=durability)["items"] == ["in", "caught"]


@pytest.mark.parametrize("caught", [True, False])
def test_who_met_only_itself_loses_nothing_of_what_came_before(caught: bool, saver: Any) -> None:
    """Calls of one subgraph that keeps its state, at once: they conflict with each other, and with nobody else."""
    both = threading.Barrier(2)
    inner = subgraph("i", lambda: both.wait(30))

    def node(state: Items) -> Any:
        try:
            return inner.invoke({"items": []})
        except Conflict:
            if caught:
                return {"items": ["caught"]}
            raise

    graph = (
        StateGraph(Items)
        .add_node("a", lambda state: {"items": ["a"]})
        .add_node("n", node)
        .add_edge(START, "a")
        .add_conditional_edges("a", lambda state: [Send("n", {"items": []})] * 2, ["n"])
        .compile(checkpointer=saver)
    )
    if caught:
        assert sorted(graph.invoke({"items": ["in"]}, THREAD, durability="exit")["items"]) == ["a", "caught", "i", "in"]
    else:
        with pytest.raises(Conflict):
            graph.invoke({"items": ["in"]}, THREAD, durability="exit")
        assert graph.get_state(THREAD).values["items"][:2] == ["in", "a"]


class InTurn(SafepointSaver):
    """Two runs: the first one puts to the subgraph first, and to the graph around it last."""

    first = False
    inner_is_put: threading.Event
    second_is_done: threading.Event

    def put(self, config: Any, *args: Any) -> Any:
        inner = config["configurable"]["checkpoint_ns"] == "n"
        if self.first:
            assert inner or self.second_is_done.wait(30)
        else:
            assert self.inner_is_put.wait(30)
        found = super().put(config, *args)
        if self.first and inner:
            self.inner_is_put.set()
        return found


@pytest.mark.parametrize("node", ["plain", "looks at its graph", "looks at another's", "caught, then another subgraph"])
@pytest.mark.parametrize("schema", [Items, Deltas])
def test_who_came_first_in_the_subgraph_wins(schema: Any, node: str, saver: Any) -> None:
    """Whatever the node of the other run does besides; and where LangGraph begins a thread with a stub, as for delta channels."""
    both = threading.Barrier(2)
    inner_is_put, second_is_done = threading.Event(), threading.Event()
    elsewhere = around(SafepointSaver("memory://"), lambda state: {"items": []})

    def run(number: int) -> str:
        mine = InTurn(saver.cp)
        mine.first, mine.inner_is_put, mine.second_is_done = number == 1, inner_is_put, second_is_done
        inner, other = subgraph(f"{number}.i", lambda: both.wait(30)), subgraph(f"{number}.o", keeps=False)

        def n(state: Any) -> Any:
            if node == "looks at its graph":
                graph.get_state(THREAD)
            elif node == "looks at another's":
                elsewhere.get_state({"configurable": {"thread_id": "u"}})
            try:
                return inner.invoke({"items": []})
            except Conflict:
                if "caught" not in node:
                    raise
                return {"items": ["caught"]}

        builder = StateGraph(schema).add_node("n", n).add_edge(START, "n")
        if "another subgraph" in node:
            builder = builder.add_node("o", lambda state: other.invoke({"items": []})).add_edge("n", "o")
        graph = builder.compile(checkpointer=mine)
        try:
            graph.invoke({"items": [f"{number}"]}, THREAD, durability="exit")
            return ""
        except Conflict:
            return "Conflict"
        finally:
            if number == 2:
                second_is_done.set()

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, (1, 2))) == ["", "Conflict"]
    last = around(saver, lambda state: {}, schema).get_state(THREAD).values["items"]
    assert {"1", "1.i"} <= set(last)
    assert not any(item.startswith("2") for item in last)


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_loser_wrote_to_delta_channels_is_not_in_the_winners_state(kind: str, tmp_path: Any) -> None:
    """LangGraph writes it to the checkpoint that both set out from, just before it puts what follows."""
    with subject(kind, tmp_path) as there:
        saver, both = there.saver(), threading.Barrier(2)

        def graph(number: int, meet: Callable[[], object]) -> Any:
            def n(state: Any) -> dict[str, Any]:
                meet()
                return {"items": [f"{number}.n"]}

            return around(saver, n, Deltas)

        graph(0, lambda: None).invoke({"items": ["0"]}, THREAD, durability="exit")

        def run(number: int) -> Any:
            try:
                return graph(number, lambda: both.wait(30)).invoke({"items": [f"{number}"]}, THREAD, durability="exit")["items"]
            except Conflict:
                return None

        with ThreadPoolExecutor(2) as pool:
            (won,) = [found for found in pool.map(run, (1, 2)) if found is not None]
        assert graph(3, lambda: None).get_state(THREAD).values["items"] == won
        assert won[:2] == ["0", "0.n"]
        assert len(won) == 4

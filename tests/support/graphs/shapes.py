"""States and small graphs that many programs share."""

from __future__ import annotations

import operator
from typing import Annotated, Any, TypedDict

from langgraph.graph import END, START, StateGraph

from tests.support.graphs.driver import Driver


class Log(TypedDict, total=False):
    """A list that grows, and a number that is replaced."""

    items: Annotated[list[Any], operator.add]
    n: int


def step(run: Driver, name: str, **more: Any) -> Any:
    """A node that adds its name."""

    async def node(state: Log) -> dict[str, Any]:
        return {"items": [name], "n": state.get("n", 0) + 1, **more}

    return run.node(node)


def adds(run: Driver, name: str) -> Any:
    """A node that adds its name and nothing else: fit for parallel ones."""

    async def node(state: Log) -> dict[str, Any]:
        return {"items": [name]}

    return run.node(node)


def line(run: Driver, *names: str, state: type = Log) -> StateGraph:
    """Nodes one after another, each adding its name."""
    builder = StateGraph(state)
    for name in names:
        builder.add_node(name, step(run, name))
    for one, other in zip((START, *names), (*names, END), strict=True):
        builder.add_edge(one, other)
    return builder


def chain(builder: StateGraph, *names: str) -> StateGraph:
    """Edges from START by these nodes to END."""
    for one, other in zip((START, *names), (*names, END), strict=True):
        builder.add_edge(one, other)
    return builder

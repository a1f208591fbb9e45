"""How a graph program calls LangGraph: the same ``async def`` runs in an event loop, or without one on the sync methods.

In sync mode every await of a program ends at once, so a coroutine is driven by a single ``send``: a program, and the nodes that
it makes by ``run.node``, are written once.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import warnings
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from safepoint import SafepointError
from tests.support.graphs.facts import Normal

DURABILITIES = ("sync", "async", "exit")
MODES = ("sync", "async")


@dataclass(frozen=True)
class Program:
    """A graph program, and where it can run."""

    name: str
    body: Callable[[Driver], Coroutine[Any, Any, None]]
    durabilities: tuple[str, ...]
    """Under "exit" a run leaves one checkpoint: a program that goes back into the middle of a run has nowhere to go."""
    modes: tuple[str, ...]
    servers: bool
    """Whether it runs on the stores on servers too: not where the test of the program is in its many checkpoints."""


PROGRAMS: dict[str, Program] = {}
Body = Callable[["Driver"], Coroutine[Any, Any, None]]


def program(
    *, durabilities: tuple[str, ...] = DURABILITIES, modes: tuple[str, ...] = MODES, servers: bool = True
) -> Callable[[Body], Body]:
    """Declare a program by the name of its function."""

    def declare(body: Body) -> Body:
        name = body.__name__
        assert name not in PROGRAMS, name
        PROGRAMS[name] = Program(name, body, durabilities, modes, servers)
        return body

    return declare


NOT_EXIT = ("sync", "async")


def drive(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    coroutine.close()
    raise AssertionError("a program in sync mode waited for something")


_numbers = itertools.count(os.getpid() * 1000)


class Driver:
    """One run of a program.

    Args:
        saver: the checkpointer; None for graphs that keep nothing.
        mode: "sync" or "async".
        durability: as LangGraph calls it.
        alone: whether the store is the program's own; else its threads get names of their own.
    """

    def __init__(self, saver: Any, mode: str, durability: str, *, alone: bool = True) -> None:
        self.saver = saver
        self.is_async = mode == "async"
        self.durability = durability
        self.notes: list[Any] = []
        self.threads: dict[str, str] = {}
        self._own = 0 if alone else next(_numbers) * 1_000_000

    def note(self, what: str, value: Any) -> Any:
        """Keep what is to be compared."""
        self.notes.append((what, value))
        return value

    # -- making

    def thread(self, name: str | int = "t", **more: Any) -> dict[str, Any]:
        """The config of a thread, by what the program calls it."""
        called = str(name)
        if self._own:
            name = self._own + name if isinstance(name, int) else f"{self._own}-{name}"
        self.threads[str(name)] = called
        return {"configurable": {"thread_id": name, **more}}

    def node(self, fn: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
        """A node of an ``async def``: itself in async mode, else a plain function of the same signature."""
        if self.is_async:
            return fn

        @functools.wraps(fn)
        def plain(*args: Any, **kwargs: Any) -> Any:
            return drive(fn(*args, **kwargs))

        return plain

    def compile(self, builder: Any, **options: Any) -> Any:
        return builder.compile(checkpointer=self.saver, **options)

    # -- calling

    async def call(self, graph: Any, given: Any, config: Any = None, **options: Any) -> Any:
        """Invoke a graph without a word on durability: for nodes that call graphs."""
        if self.is_async:
            return await graph.ainvoke(given, config, **options)
        return graph.invoke(given, config, **options)

    async def invoke(self, graph: Any, given: Any, config: Any, **options: Any) -> Any:
        return await self.call(graph, given, config, durability=self.durability, **options)

    async def stream(self, graph: Any, given: Any, config: Any, after: int | None = None, **options: Any) -> list[Any]:
        """All chunks; or so many, and the stream broken off then."""
        found: list[Any] = []
        options.setdefault("stream_mode", "updates")
        if self.is_async:
            there = graph.astream(given, config, durability=self.durability, **options)
            async for chunk in there:
                found.append(chunk)
                if len(found) == after:
                    break
            await there.aclose()
        else:
            here = graph.stream(given, config, durability=self.durability, **options)
            for chunk in here:
                found.append(chunk)
                if len(found) == after:
                    break
            here.close()
        return found

    async def state(self, graph: Any, config: Any, **options: Any) -> Any:
        if self.is_async:
            return await graph.aget_state(config, **options)
        return graph.get_state(config, **options)

    async def history(self, graph: Any, config: Any, **options: Any) -> list[Any]:
        if self.is_async:
            return [state async for state in graph.aget_state_history(config, **options)]
        return list(graph.get_state_history(config, **options))

    async def update(self, graph: Any, config: Any, values: Any, as_node: str | None = None, **options: Any) -> Any:
        if self.is_async:
            return await graph.aupdate_state(config, values, as_node, **options)
        return graph.update_state(config, values, as_node, **options)

    async def bulk(self, graph: Any, config: Any, supersteps: Any) -> Any:
        if self.is_async:
            return await graph.abulk_update_state(config, supersteps)
        return graph.bulk_update_state(config, supersteps)

    async def together(self, *calls: Callable[[], Coroutine[Any, Any, Any]]) -> list[Any]:
        """Run these at once, in threads or tasks; what each returned."""
        if self.is_async:
            return list(await asyncio.gather(*(one() for one in calls)))
        with ThreadPoolExecutor(len(calls)) as pool:
            return list(pool.map(lambda one: drive(one()), calls))

    async def attempt(self, what: Awaitable[Any]) -> Any:
        """The result, or the error that was expected here: never one of safepoint's own."""
        try:
            return await what
        except SafepointError:
            raise
        except Exception as error:
            return ("raised", type(error).__name__, str(error)[:60])

    # -- looking

    async def look(self, graph: Any, config: Any, what: str = "end", **options: Any) -> None:
        """Keep the newest state and the whole history of a thread (of its root graph)."""
        self.note(f"{what}: state", await self.state(graph, config, **options))
        self.note(f"{what}: history", await self.history(graph, config))

    async def tuples(self, config: Any = None, **options: Any) -> list[Any]:
        """Checkpoint tuples of the saver itself, of all namespaces."""
        if self.is_async:
            return [found async for found in self.saver.alist(config, **options)]
        return list(self.saver.list(config, **options))

    async def spaces(self, config: Any, what: str = "spaces") -> None:
        """Keep how many checkpoints each namespace holds, with what was stored last in each: in no order between namespaces,
        as savers differ in it, and nothing depends on it."""
        by_space: dict[str, list[Any]] = {}
        for found in await self.tuples(config):
            by_space.setdefault(found.config["configurable"]["checkpoint_ns"], []).append(found)
        seen = [
            (Normal.bare(ns), [(t.metadata["source"], t.metadata["step"]) for t in these]) for ns, these in by_space.items()
        ]
        self.note(what, sorted(seen))


def run_program(found: Program, saver: Any, mode: str, durability: str, *, alone: bool = True) -> list[Any]:
    """Run a program, and return its facts: comparable, and equal on every saver that is right."""
    run = Driver(saver, mode, durability, alone=alone)
    with warnings.catch_warnings():
        _beta_is_known()
        if run.is_async:
            asyncio.run(found.body(run))
        else:
            drive(found.body(run))
    normal = Normal(run.threads)
    return [(what, normal(value)) for what, value in run.notes]


def _beta_is_known() -> None:
    from langchain_core._api import LangChainBetaWarning

    warnings.simplefilter("ignore", LangChainBetaWarning)

"""Two runs at once on one thread of a graph: in threads or processes, from the same state or whenever each comes.

A race is "gated" if both runs have loaded the thread before either goes on: then exactly one may win, unless both asked for a fork.
"""

from __future__ import annotations

import asyncio
import copy
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from langgraph.graph import StateGraph
from langgraph.types import Command, interrupt

from safepoint import Conflict
from tests.support.children import hear, tell
from tests.support.graphs.driver import Driver, drive
from tests.support.graphs.shapes import Log, chain
from tests.support.graphs.subjects import open_saver
from tests.support.races import at_once

KINDS = (
    "first input",
    "input",
    "resume",
    "resume or input",
    "subgraph",
    "resume in subgraph",
    "resume at head",
    "stateful subgraph",
)
"""What the two do. Each is a race of which one can win."""
FORKS = ("input at head",)
"""New input at an explicit checkpoint asks for a fork: both win, on a branch each. (With durability "exit" the saver sees no input,
only what came of it: then the second is told, as always.)"""
CALLS = {"sync": ("invoke", "stream"), "async": ("ainvoke", "astream")}


@dataclass(frozen=True)
class Race:
    kind: str
    mode: str
    durability: str
    gated: bool = True
    call: str = "invoke"
    thread: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def config(self) -> dict[str, Any]:
        return {"configurable": {"thread_id": self.thread}}


@dataclass
class Outcome:
    """What a racer came to.

    Attributes:
        error: The class of what was raised; '' for none.
        items: The state's items that were returned.
        ran: Nodes that the racer ran, by name.
        late: How many of them began after a put had failed.
    """

    tag: str
    error: str = ""
    items: list[str] = field(default_factory=list)
    ran: list[str] = field(default_factory=list)
    late: int = 0


class Racer:
    """One of the two: a graph whose nodes sign with a tag, on a saver that waits for the other after the first load."""

    def __init__(self, saver: Any, race: Race, tag: str, gate: Callable[[], object]) -> None:
        self.race = race
        self.saver = saver
        self.outcome = Outcome(tag)
        self.failed = False
        self.run = Driver(self._watched(saver, gate), race.mode, race.durability)
        self.graph = self._graph()

    def _watched(self, saver: Any, gate: Callable[[], object]) -> Any:
        found = copy.copy(saver)
        waits = [gate] if self.race.gated else []

        def get_tuple(config: Any) -> Any:
            loaded = saver.get_tuple(config)
            while waits:
                waits.pop()()
            return loaded

        async def aget_tuple(config: Any) -> Any:
            loaded = await saver.aget_tuple(config)
            while waits:
                await asyncio.to_thread(waits.pop())
            return loaded

        def put(*args: Any) -> Any:
            try:
                return saver.put(*args)
            except BaseException:
                self.failed = True
                raise

        async def aput(*args: Any) -> Any:
            try:
                return await saver.aput(*args)
            except BaseException:
                self.failed = True
                raise

        found.get_tuple, found.aget_tuple, found.put, found.aput = get_tuple, aget_tuple, put, aput
        return found

    def _node(self, name: str, asks: bool = False) -> Any:
        async def node(state: Log) -> dict[str, Any]:
            self.outcome.ran.append(name)
            # A subgraph that runs is not told: what counts is whether it was begun.
            self.outcome.late += self.failed and (name in {"a", "x", "z"} or "subgraph" not in self.race.kind)
            answer = [interrupt("sure?")] if asks else []
            return {"items": [f"{self.outcome.tag}.{name}", *answer]}

        return self.run.node(node)

    def _line(self, *names: str) -> StateGraph:
        builder = StateGraph(Log)
        for name in names:
            builder.add_node(name, self._node(name, asks=name == "ask"))
        return chain(builder, *names)

    def _graph(self) -> Any:
        kind = self.race.kind
        if "subgraph" not in kind:
            return self.run.compile(self._line(*(("a", "ask", "b", "c") if "resume" in kind else ("a", "b", "c", "d", "e"))))
        inner = self._line(*(("x", "ask", "y") if "resume" in kind else ("x", "y"))).compile(
            checkpointer=True if kind == "stateful subgraph" else None
        )
        builder = StateGraph(Log)
        builder.add_node("a", self._node("a"))
        builder.add_node("inner", inner)
        builder.add_node("z", self._node("z"))
        return self.run.compile(chain(builder, "a", "inner", "z"))

    # -- what is done

    async def prepare(self) -> None:
        if self.race.kind != "first input":
            await self.run.invoke(self.graph, {"items": ["before"]}, self.race.config)

    def _given(self, second: bool) -> Any:
        answers = self.race.kind.startswith("resume") and not (second and self.race.kind == "resume or input")
        return Command(resume=self.outcome.tag) if answers else {"items": [self.outcome.tag]}

    async def go(self, second: bool) -> Outcome:
        config = self.race.config
        if "at head" in self.race.kind:
            plain = Driver(self.saver, self.race.mode, "sync")
            config = (await plain.state(plain.compile(self.graph.builder), config)).config
        try:
            if "stream" in self.race.call:
                chunks = await self.run.stream(self.graph, self._given(second), config, stream_mode="values")
                self.outcome.items = chunks[-1]["items"]
            else:
                self.outcome.items = (await self.run.invoke(self.graph, self._given(second), config))["items"]
        except Conflict:
            self.outcome.error = "Conflict"
        except Exception as error:
            self.outcome.error = f"{type(error).__name__}: {error}"
        return self.outcome

    async def look(self) -> tuple[list[str], list[list[str]]]:
        """The items of the newest state, and of all in the history."""
        state = await self.run.state(self.graph, self.race.config)
        states = await self.run.history(self.graph, self.race.config)
        return state.values.get("items", []), [one.values.get("items", []) for one in states]

    def does(self, what: Any) -> Any:
        return asyncio.run(what) if self.run.is_async else drive(what)


def judged(race: Race, outcomes: list[Outcome], seen: tuple[list[str], list[list[str]]]) -> str:
    """What is wrong with how a race ended; '' for nothing."""
    final, history = seen
    done = [one for one in outcomes if not one.error]
    lost = [one for one in outcomes if one.error]
    if wrong := [one.error for one in lost if one.error != "Conflict"]:
        return f"errors other than Conflict: {wrong}"
    if not done:
        # A subgraph that remembers is a second place to meet: who loaded the graph between two puts of the other, and so won there,
        # may have loaded the subgraph before the other put to it.
        return "" if race.kind == "stateful subgraph" and not race.gated else "nobody won"
    if race.kind in FORKS and race.durability != "exit":
        # Neither is lost: each result is a state that can be gone on with.
        return "" if len(done) == 2 and all(one.items in history for one in done) else f"a fork is lost: {done}"
    if race.gated and len(done) != 1:
        return f"{len(done)} winners"
    for one in done:
        mine = [item for item in one.items if item.startswith(one.tag)]
        # (A subgraph gives back what it was given, and the parent adds it once more.)
        there = [item for item in final if item.startswith(one.tag)]
        if len(mine) < 2 or (set(mine) != set(there) if "subgraph" in race.kind else mine != there):
            return f"{mine} was returned, and the state has {final}"
    if race.gated:
        if race.kind.startswith("resume") and "ask" in done[0].ran and "a" not in done[0].ran and done[0].tag not in final:
            return f"the winner {done[0].tag} was given another's answer: {final}"
        if final != done[0].items:
            return f"{done[0].items} was returned, and the state is {final}"
        # (In a subgraph, which the gate is not at, it may have come first, and the winner has gone on from there.)
        met = race.kind == "resume in subgraph" and "ask" not in done[0].ran
        if not met and (strange := [items for items in history if any(item.startswith(lost[0].tag) for item in items)]):
            return f"the loser's work is in the history: {strange}"
    late = [one.late for one in lost]
    return f"{late} nodes were begun after a put had failed" if any(n > 1 for n in late) else ""


# -- in a process of its own


def racer(name: str, url: str, number: int) -> None:
    """Run the races that are heard as one of two; the first one prepares them, and looks in the end."""
    with open_saver(name, url) as saver:
        tell("ready")
        while (order := hear()) is not None:
            race, moment = order
            one = Racer(saver, race, f"<{number}>", _tell_and_wait)
            if not number:
                before = Racer(saver, _ungated(race), "<before>", lambda: None)
                before.does(before.prepare())
                tell("prepared")
            moment = hear()
            at_once(moment)
            tell("ended", one.does(one.go(second=number == 1)))
            if not number:
                assert hear() == "look"
                last = Racer(saver, _ungated(race), "<after>", lambda: None)
                tell("seen", last.does(last.look()))


def _tell_and_wait() -> None:
    tell("loaded")
    hear()


def _ungated(race: Race) -> Race:
    return Race(race.kind, race.mode, "sync", False, race.call, race.thread)


def in_processes(children: list[Any], race: Race, jitter: float) -> tuple[list[Outcome], Any]:
    """Run a race in two processes; the second one begins so many seconds later, if it is not gated."""
    for child in children:
        child.say((race, 0.0))
    children[0].until("prepared")
    begin = time.monotonic() + 0.005
    for i, child in enumerate(children):
        child.say(begin + i * jitter)
    if race.gated:
        for child in children:
            child.until("loaded")
        for child in children:
            child.say("go")
    outcomes = [child.until("ended")[1] for child in children]
    children[0].say("look")
    return outcomes, children[0].until("seen")[1]

"""Two invocations at once on one thread: one wins, the other is told by ``Conflict`` out of its own call, and nothing is lost."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver

from safepoint.adapters.langgraph import SafepointSaver
from tests.support.children import Server
from tests.support.graphs.racing import CALLS, FORKS, KINDS, Outcome, Race, Racer, in_processes, judged, racer
from tests.support.graphs.subjects import Subject, subject
from tests.support.scale import scale
from tests.support.seeds import fresh_seed

pytestmark = pytest.mark.scaled

DURABILITIES = ("sync", "async", "exit")


def races(seed: int, number: int, *, gated: bool = True, kinds: tuple[str, ...] = KINDS + FORKS) -> list[Race]:
    """So many races of all kinds, in an order of the seed's."""
    rng = random.Random(seed)
    ways = list(itertools.product(kinds, ("sync", "async"), DURABILITIES))
    rng.shuffle(ways)
    chosen = itertools.islice(itertools.cycle(ways), number)
    return [Race(kind, mode, durability, gated, rng.choice(CALLS[mode])) for kind, mode, durability in chosen]


def in_threads(savers: list[Any], race: Race) -> tuple[list[Outcome], Any]:
    gate = threading.Barrier(2, timeout=60)
    before = Racer(savers[0], Race(race.kind, race.mode, "sync", False, race.call, race.thread), "<before>", lambda: None)
    before.does(before.prepare())
    both = [Racer(saver, race, f"<{i}>", gate.wait) for i, saver in enumerate(savers)]
    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(lambda i: both[i].does(both[i].go(second=i == 1)), range(2)))
    return outcomes, before.does(before.look())


SMALL = {"memory": 6, "sqlite": 6, "postgres": 2, "redis": 2}
FULL = {"memory": 20, "sqlite": 54, "postgres": 14, "redis": 14}


@pytest.mark.parametrize("kind", SMALL)
def test_in_threads(kind: str, tmp_path: Path) -> None:
    """On one saver, and on two of one store."""
    with subject(kind, tmp_path) as there:
        first = there.saver()
        second = there.saver()
        for i, race in enumerate(races(fresh_seed(), scale(SMALL[kind], FULL[kind]))):
            savers = [first, second if i % 2 else first]
            outcomes, seen = in_threads(savers, race)
            assert not judged(race, outcomes, seen), (race, outcomes)


@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_seen(kind: str) -> None:
    """On a saver that lets both through, the judge finds that one of them was lost."""
    race = Race(kind, "sync", "sync")
    saver = InMemorySaver()
    assert judged(race, *in_threads([saver, saver], race))


def test_loser_with_new_input_ran_nothing(tmp_path: Path) -> None:
    """With durability "sync" its input is stored before the first node runs, or not stored."""
    with subject("memory", tmp_path) as there:
        for call in ("invoke", "stream"):
            race = Race("input", "sync", "sync", call=call)
            outcomes, seen = in_threads([there.saver()] * 2, race)
            assert not judged(race, outcomes, seen)
            assert [one.ran for one in outcomes if one.error] == [[]]


# -- processes


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server("tests.support.graphs.racing", "safepoint.adapters.langgraph", "langgraph.checkpoint.sqlite")
    yield made
    made.close()


PROCESSES = {"sqlite": (8, 130), "postgres": (2, 40), "redis": (2, 40)}


@pytest.mark.parametrize("kind", PROCESSES)
def test_in_processes(kind: str, server: Server, tmp_path: Path) -> None:
    """Half of them gated, half whenever each comes: then both may win, one after the other, and none without a trace."""
    seed = fresh_seed()
    number = scale(*PROCESSES[kind])
    free = ("first input", "input", "subgraph", "stateful subgraph")
    all_races = races(seed, number // 2) + races(seed, number - number // 2, gated=False, kinds=free)
    rng = random.Random(seed)
    with subject(kind, tmp_path) as there:
        children = started(server, there)
        for race in all_races:
            outcomes, seen = in_processes(children, race, rng.choice([0.0, rng.uniform(0, 0.03)]))
            assert not judged(race, outcomes, seen), (race, outcomes)
        finish(children)


def started(server: Server, there: Subject) -> list[Any]:
    children = [server.start(racer, there.name, there.url, i) for i in range(2)]
    for child in children:
        child.until("ready")
    return children


def finish(children: list[Any]) -> None:
    for child in children:
        child.say(None)
    for child in children:
        child.result()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_who_lost_in_a_subgraph_does_not_come_first_around_it(mode: str, tmp_path: Path) -> None:
    """With durability "exit" a run puts what its subgraph came to, then its own: whoever came first there must come first here too."""
    with subject("memory", tmp_path) as there:
        race = Race("stateful subgraph", mode, "exit", call=CALLS[mode][0])
        before = Racer(there.saver(), replace(race, durability="sync", gated=False), "<before>", lambda: None)
        before.does(before.prepare())
        gate, second_is_done = threading.Barrier(2, timeout=60), threading.Event()
        inner_is_put, inner_is_loaded = threading.Event(), threading.Event()

        class First(SafepointSaver):
            """Its run puts to the subgraph first, and to the graph around it last."""

            def put(self, config: Any, *args: Any) -> Any:
                outer = not config["configurable"]["checkpoint_ns"]
                # The gate is at the graph around: who loads the subgraph after the first has put to it has lost nothing yet.
                assert (second_is_done if outer else inner_is_loaded).wait(60)
                found = super().put(config, *args)
                inner_is_put.set()
                return found

            async def aput(self, config: Any, *args: Any) -> Any:
                return await asyncio.to_thread(self.put, config, *args)

        class Second(SafepointSaver):
            def loaded(self, config: Any, found: Any) -> Any:
                if config["configurable"].get("checkpoint_ns"):
                    inner_is_loaded.set()
                return found

            def get_tuple(self, config: Any) -> Any:
                return self.loaded(config, super().get_tuple(config))

            async def aget_tuple(self, config: Any) -> Any:
                return self.loaded(config, await super().aget_tuple(config))

            def put(self, config: Any, *args: Any) -> Any:
                assert inner_is_put.wait(60)
                return super().put(config, *args)

            async def aput(self, config: Any, *args: Any) -> Any:
                return await asyncio.to_thread(self.put, config, *args)

        cp = there.saver().cp
        first, second = Racer(First(cp), race, "<0>", gate.wait), Racer(Second(cp), race, "<1>", gate.wait)
        with ThreadPoolExecutor(2) as pool:
            winner = pool.submit(lambda: first.does(first.go(second=False)))
            loser = pool.submit(lambda: second.does(second.go(second=True)))
            lost = loser.result()
            second_is_done.set()
            outcomes = [winner.result(), lost]
        assert [one.error for one in outcomes] == ["", "Conflict"]
        assert not judged(race, outcomes, before.does(before.look()))

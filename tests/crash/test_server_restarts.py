"""Servers that are stopped, killed and started again in the middle of eight busy agents: nothing acknowledged is lost."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support import busy, fleet, rawrows, servers
from tests.support.children import Child, Server
from tests.support.fleet import Receiver
from tests.support.scale import scale
from tests.support.stores import CLOCKED, Place

RESTARTS = [
    (kind, how) for kind in CLOCKED for how in {"postgres": ("fast", "immediate", "kill"), "redis": ("kill",)}.get(kind, ())
]
SHORT = 0.3
"""The ``timeout`` of half of the agents, who are to notice."""


@pytest.fixture
def receiver(server: Server, tmp_path: Path) -> Iterator[Receiver]:
    made = Receiver(server, str(tmp_path / "receiver"))
    yield made
    made.close()


@pytest.fixture(params=RESTARTS, ids="-".join)
def restarting(request: pytest.FixtureRequest) -> Iterator[tuple[Place, Callable[[float], None]]]:
    """A store on a durable server of its own, and what lets that go away for some seconds."""
    kind, how = request.param
    made: Any
    if kind == "postgres":
        made = servers.Postgres(durable=True, listen="127.0.0.1")
        place = Place(kind, f"{made.url}?schema=restarted")
    else:
        made = servers.Redis(tcp=True, durable=True)
        place = Place(kind, f"{made.url}?prefix=restarted:")

    def restart(seconds: float) -> None:
        made.kill() if how == "kill" else made.stop(how)
        time.sleep(seconds)
        made.start()

    try:
        yield place, restart
    finally:
        made.close()


@pytest.mark.scaled
def test_agents_outlive_their_server(
    restarting: tuple[Place, Callable[[float], None]], server: Server, receiver: Receiver
) -> None:
    place, restart = restarting
    ledger = place.make_ledger()
    steps, saves, restarts = scale(4, 20), scale(60, 400), scale(1, 3)
    # Half of the agents run into their timeout, and call again; for the others the server is merely slow. Only the former have
    # transactional tools: what these have begun is rolled back with its connection, and the store cannot do it again for them.
    tasks = [f"k{i}" for i in range(6)]
    agents = {
        task: server.start(
            *(busy.agent, place.url, task, steps, receiver.path),
            *((ledger, scale(8, 30) / 100, {"timeout": SHORT}) if i % 2 else ("", scale(8, 30) / 100, {})),
        )
        for i, task in enumerate(tasks)
    }
    agents |= {
        name: server.start(busy.saver, place.url, name, saves, {"timeout": SHORT} if name == "x0" else {})
        for name in ("x0", "x1")
    }
    heard: dict[str, list[Any]] = {name: [] for name in agents}
    results: dict[str, Any] = {}
    try:
        hear(agents, heard, results, lambda: all(heard.values()))
        longest = 0.0
        for _ in range(restarts):
            begun = time.monotonic()
            restart(random.uniform(0.0, 2 * SHORT))
            longest = max(longest, time.monotonic() - begun)
            since = sum(map(len, heard.values()))
            hear(
                agents,
                heard,
                results,
                partial(lambda since: len(results) == 8 or sum(map(len, heard.values())) > since, since),
                scale(20, 300) / 100,
            )
        hear(agents, heard, results, lambda: len(results) == len(agents))
    finally:
        for child in agents.values():
            child.kill()
    print(f"away for {longest:.2f} s", {name: dict(r["met"]) for name, r in results.items()})
    print(*(message for told in heard.values() for message in told if message[0] == "noticed"), sep="\n")

    assert {r["result"] for r in results.values()} == {*(f"done:{task}" for task in tasks), "saved"}
    if longest < 5:  # of the ten seconds that are the default
        patient = [results[task]["met"] for i, task in enumerate(tasks) if i % 2 == 0] + [results["x1"]["met"]]
        assert not any(patient), "who has time enough noticed it"
    # Effects once.
    wanted = [f"{task}/{n}/{name}" for task in tasks for n in range(steps) for name in ("hand1", "hand2")]
    assert receiver.report()["counts"] == dict.fromkeys(wanted, 1)
    if ledger:
        assert place.read_ledger() == sorted(f"{task}/{n}/book" for task in tasks[1::2] for n in range(steps))
    # What was acknowledged is there, and nothing is there twice.
    raw = rawrows.read_tasks(place.url)
    for name in agents:
        there = {c.seq: c.id for c in raw[name].checkpoints}
        for message in heard[name]:
            if message[0] == "saved":
                assert there.get(message[2]) == message[3], message
        assert raw[name].status == "finished"
        assert [(c.seq, c.parent) for c in raw[name].checkpoints] == [(n, n - 1 or None) for n in range(1, len(there) + 1)]
        assert {c.status for c in raw[name].calls} <= {"succeeded"}
    for i, task in enumerate(tasks):
        assert len(raw[task].calls) == steps * (3 if ledger and i % 2 else 2)
        assert [c.step for c in raw[task].checkpoints] == list(range(steps + 1))
    assert [len(raw[name].checkpoints) for name in ("x0", "x1")] == [saves + 1] * 2, "a save is there twice, or not at all"
    assert server.run(fleet.verified, place.url)


def hear(
    agents: dict[str, Child],
    heard: dict[str, list[Any]],
    results: dict[str, Any],
    enough: Callable[[], bool],
    at_least: float = 0.0,
) -> None:
    """Read what the agents tell and return, until it is enough."""
    begun = time.monotonic()
    while not enough() or time.monotonic() < begun + at_least:
        assert time.monotonic() < begun + 120, "nobody gets on"
        for name, child in agents.items():
            while name not in results and child.channel.ready(0):
                message = child.read()
                if message[0] == "!returned":
                    results[name] = message[1]
                    break
                heard[name].append(message)
        time.sleep(0.005)

"""Kill -9 at random moments, with no hook in the product: what a power switch would do to three agents in one process."""

import time
from typing import Any

import pytest

from tests.support import agents
from tests.support.checks import check_end, check_stored, settle_by_hand
from tests.support.children import Child, Server
from tests.support.effects import Effects
from tests.support.scale import scale
from tests.support.seeds import fresh_rng

TASKS = 3
KILLS_EACH = 6
"""Kills of one set of tasks before it may come to its end."""


@pytest.mark.scaled
@pytest.mark.parametrize("durability", ["full", "process"])
def test_killed_at_random_moments(durability: str, server: Server, effects: Effects, db: str) -> None:
    """Field case 2 is the half of it with durability="process": also there a kill loses nothing acknowledged."""
    killed_at_random_moments(durability, scale(8, 300) // 2, server, effects, db)


def killed_at_random_moments(durability: str, wanted: int, server: Server, effects: Effects, db: str) -> None:
    rng = fresh_rng()
    killed, rounds, length = 0, 0, 0.0
    while killed < wanted:
        rounds += 1
        world = effects.world()
        tasks = tuple(f"{durability}{rounds}.{i}" for i in range(TASKS))
        messages: list[Any] = []
        outcomes: dict[str, dict[str, Any]] = {}
        before: dict[str, int] = {}
        here = 0
        while any(outcomes.get(t, {}).get("status") != "finished" for t in tasks):
            child = server.start(agents.work_many, db, tasks, world, durability=durability)
            begun = time.monotonic()
            if here < KILLS_EACH and killed < wanted and length:
                wait(child, rng.uniform(0.0, length))
                child.kill()
                killed += child.was_killed
                here += child.was_killed
                child.told()
                outcomes = {}
            else:
                outcomes = child.result()
                length = length or (time.monotonic() - begun) * 0.6
            given = {m[2] for m in messages if m[0] == "got"}
            done = world.done()
            assert {k: done.get(k) for k in given} == {k: before.get(k) for k in given}, "a known result was got again"
            before = done
            messages += [m for m in child.heard if m[0] in {"got", "saved"}]
            for task in tasks:
                check_stored(db, task, messages)
                if outcomes.get(task, {}).get("status") == "waiting":
                    settle_by_hand(world, db, task, outcomes[task])
        for task in tasks:
            check_end(world, db, task, messages, outcomes[task])
        world.forget()


def wait(child: Child, seconds: float) -> None:
    """Hear what the child tells for so long, or until it ends."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0 and child.channel.ready(left):
        try:
            if child.read()[0] == "!returned":
                return
        except EOFError:
            return

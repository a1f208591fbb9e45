"""An agent that writes in each step, and the ways to go back in it; run in children of the fork server. See test_going_back.py."""

from __future__ import annotations

from collections import Counter
from typing import Any

import safepoint
from tests.support import agents
from tests.support.agents import count_points, kill_at, post
from tests.support.effects import World

STEPS = 5


def step(run: Any) -> None:
    n, task = run.state.step, run.task_id
    run.state.messages.append({"n": n, "got": run.call(post, f"{task}/{n}")})
    if n == STEPS - 1:
        run.finish(n)


def begin(url: str, task: str, world: World, steps: int = 3) -> None:
    """Do some steps and stop; checkpoints 1 to steps + 1."""
    agents._worlds[task] = world
    with safepoint.open(url) as cp:
        safepoint.run_agent(step, task_id=task, input="go", store=cp, max_steps=steps)


def go_back(url: str, task: str, world: World, how: str, point: str = "", nth: int = 1) -> Counter[str]:
    """Go back in one of the ways, dying at a point if one is named."""
    hits: Counter[str] = Counter()
    agents._worlds[task] = world
    with safepoint.open(url) as cp:
        kill_at(point, nth) if point else count_points(hits)
        match how:
            case "fallback":
                cp.resume(task).close()
            case "fresh":
                cp.resume(task, fresh_start=True).close()
            case "at":
                cp.resume(task, at=2).close()
            case "rewind" | "block":
                cp.rewind(task, 2, journal="inherit" if how == "rewind" else "block")
            case "fork":
                cp.fork(task, 2)
            case "branch":
                cp.rewind(task, branch="main~1")
    return hits


def finish(url: str, task: str, world: World, **options: Any) -> dict[str, Any]:
    agents._worlds[task] = world
    with safepoint.open(url) as cp:
        outcome = safepoint.run_agent(step, task_id=task, input="go", store=cp, **options)
        return agents.told(outcome)

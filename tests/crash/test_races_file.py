"""Several processes at one file store: savers, runs, pins, clean-ups and readers that wait for nobody."""

import random
import time
from pathlib import Path

import pytest

import safepoint
from safepoint import Conflict, LeaseHeld, NotFound, Retention, State
from tests.support.children import Server
from tests.support.scale import scale


def hammer(url: str, seed: int, seconds: float) -> dict[str, int]:
    """Count up in some tasks for so long; the number of times for each."""
    rng = random.Random(seed)
    counts = {"t0": 0, "t1": 0}

    def up(state: State) -> None:
        state.agent_state["n"] += 1

    with safepoint.open(url, durability="process", retention=Retention(5)) as cp:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            task, dice = rng.choice(list(counts)), rng.random()
            try:
                if dice < 0.6:
                    cp.update(task, up)
                    counts[task] += 1
                elif dice < 0.63:
                    cp.pin(task, cp.status(task).seq or 0)
                elif dice < 0.75:
                    with cp.resume(task) as run:
                        run.state.agent_state["n"] += 1
                        run.save()
                        counts[task] += 1
                elif dice < 0.95:
                    assert cp.load_latest(task) is not None
                else:
                    report = cp.verify(task)
                    assert report.ok, report
            except (LeaseHeld, Conflict, NotFound):
                pass
    return counts


@pytest.mark.scaled
def test_what_several_processes_count_is_counted(server: Server, tmp_path: Path) -> None:
    url = f"file:///{tmp_path}/store"
    with safepoint.open(url) as cp:
        for task in ("t0", "t1"):
            cp.save(State(task, agent_state={"n": 0}))
    children = [server.start(hammer, url, seed, scale(2, 20)) for seed in range(4)]
    counts = [child.result() for child in children]
    with safepoint.open(url) as cp:
        for task in ("t0", "t1"):
            state = cp.load_latest(task)
            assert state is not None
            assert state.agent_state["n"] == sum(count[task] for count in counts) > 0
        report = cp.verify()
        assert report.ok, report

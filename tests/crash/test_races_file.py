"""Several processes at one file store: savers, runs, pins, clean-ups, deletions, openings, and readers that wait for nobody."""

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
    children = [server.start(hammer, url, seed, scale(2, 10)) for seed in range(4)]
    counts = [child.result() for child in children]
    with safepoint.open(url) as cp:
        for task in ("t0", "t1"):
            state = cp.load_latest(task)
            assert state is not None
            assert state.agent_state["n"] == sum(count[task] for count in counts) > 0
        report = cp.verify()
        assert report.ok, report


def come_and_go(url: str, seed: int, seconds: float) -> int:
    """Begin, read and delete tasks for so long, and open the store anew each few operations."""
    rng, count = random.Random(seed), 0
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with safepoint.open(url, durability="process", timeout=60) as cp:
            for _ in range(rng.randrange(1, 6)):
                task, count = f"t{rng.randrange(2)}", count + 1
                try:
                    match rng.choice("ssssddllkvx"):
                        case "s":
                            state = cp.load_latest(task) or State(task, agent_state={"task": task})
                            assert state.agent_state == {"task": task}
                            cp.save(state)
                        case "d":
                            cp.delete_task(task)
                        case "l":
                            cp.load_latest(task)
                        case "k":
                            assert [f for f in cp.check() if f.level == "error"] == []
                        case "v":
                            report = cp.verify()
                            assert report.ok, report
                        case "x":
                            cp.cleanup(task, keep_latest=1)
                except (Conflict, NotFound):
                    pass
    return count


@pytest.mark.scaled
def test_tasks_come_and_go_while_others_open_and_read(server: Server, tmp_path: Path) -> None:
    """Nobody is told that something is damaged or cannot be used, because another one has just made or removed it."""
    url = f"file:///{tmp_path}/store"
    children = [server.start(come_and_go, url, seed, scale(2, 10)) for seed in range(4)]
    assert all(child.result() > 0 for child in children)

"""Many processes and many tasks on one store, while workers are killed, stopped, continued, and lose their leases."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import fleet, rawrows
from tests.support.children import Server
from tests.support.fleet import Fleet, Receiver
from tests.support.scale import scale
from tests.support.seeds import fresh_rng
from tests.support.stores import KINDS, Place, place

LEASE = 2.0
"""Of workers that are stopped: longer stops than this lose it. (Others have the usual one: their deaths are seen at once.)"""


@pytest.fixture(params=KINDS)
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with place(request.param, tmp_path) as made:
        yield made


@pytest.fixture
def receiver(server: Server, tmp_path: Path) -> Iterator[Receiver]:
    made = Receiver(server, str(tmp_path / "receiver"))
    yield made
    made.close()


@pytest.mark.scaled
def test_a_fleet_in_trouble(stored: Place, server: Server, receiver: Receiver) -> None:
    """Tasks k… are worked off by processes that are only killed, and their receiver takes everything; tasks s… also by ones
    that are stopped, for longer than their leases, and their receiver refuses stale fences."""
    rng = fresh_rng()
    # The full numbers where a store is shared by machines; its counterpart on one machine is troubled for a shorter time.
    most, lasting = (200, 60) if stored.clocked else (80, 20)
    workers, tasks, steps = scale(6, 32), scale(12, most), scale(3, 6)
    seconds, longest, gap = scale(4, lasting), scale(5, 45) / 100, scale(15, 12) / 100
    groups = {"k": [f"k{i}" for i in range(tasks // 2)], "s": [f"s{i}" for i in range(tasks - tasks // 2)]}
    ledger = stored.make_ledger()
    flock = Fleet(server, rng)
    watcher = server.start(fleet.person, stored.url, receiver.path, tasks, {})
    begun = time.monotonic()
    try:
        for i in range(workers):
            group = "ks"[i % 2]
            options: dict[str, Any] = {"lease": LEASE} if group == "s" and stored.clocked else {}
            flock.add(group, stored.url, tuple(groups[group]), steps, receiver.path, longest, ledger, options)
        finished = 0

        def look() -> int:
            nonlocal finished
            while watcher.channel.ready(0):
                message = watcher.read()
                if message[0] == "finished":
                    finished = message[1]
            return finished

        for _ in flock.trouble(seconds, gap, (LEASE * 0.2, LEASE * 2)):
            if look() == tasks:
                break
        lasted = time.monotonic() - begun
        end = time.monotonic() + 30 + seconds
        while look() < tasks:
            flock.hear()
            assert time.monotonic() < end, f"{finished} of {tasks} finished; {flock.counts} {flock.unavailable[-3:]}"
            time.sleep(0.02)
        met = flock.end()
        watcher.say("stop")
        settled = watcher.result()
    finally:
        flock.close()
        watcher.kill()
    report = receiver.report()
    print(f"{lasted:.1f} s of trouble, {time.monotonic() - begun:.1f} s", flock.counts, met, settled, len(report["refused"]))
    print(flock.unavailable[-5:])

    # Every effect once, as the receiver has it.
    names = [*groups["k"], *groups["s"]]
    wanted = [key for task in names for key in fleet.keys_of(task, steps, bool(ledger))[0]]
    assert report["counts"] == dict.fromkeys(wanted, 1)
    if ledger:
        booked = [key for task in names for key in fleet.keys_of(task, steps, True)[1]]
        assert stored.ledger(server) == sorted(booked)

    raw: dict[str, rawrows.RawTask] = server.run(rawrows.read_tasks, stored.url)
    assert sorted(raw) == sorted(names)
    for task in names:
        check_task(raw[task], task, steps, bool(ledger))
    assert max(raw[task].fence for task in names) > 1, "nobody ever took over"
    assert server.run(fleet.verified, stored.url)


def check_task(raw: rawrows.RawTask, task: str, steps: int, books: bool) -> None:
    """One line of checkpoints, and calls whose fences never fall: no two holders wrote in between each other."""
    assert raw.status == "finished", task
    assert [(c.seq, c.parent) for c in raw.checkpoints] == [(n, n - 1 or None) for n in range(1, len(raw.checkpoints) + 1)], (
        task
    )
    assert [c.step for c in raw.checkpoints] == list(range(steps + 1)), task
    assert raw.heads == {"main": len(raw.checkpoints)}, task
    assert len({c.id for c in raw.checkpoints}) == len(raw.checkpoints), task
    keys, booked = fleet.keys_of(task, steps, books)
    assert len(raw.calls) == len(keys) + len(booked), task
    assert {c.status for c in raw.calls} == {"succeeded"}, task
    began = sorted((c.began, c.fence) for c in raw.calls)
    assert len({at for at, _ in began}) == len(began), f"{task}: two intents at one position"
    fences = [fence for _, fence in began]
    assert fences == sorted(fences), f"{task}: fences fell: {began}"
    assert fences[-1] <= raw.fence, task

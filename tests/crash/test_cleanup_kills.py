"""Saves of large parts and clean-ups of short tasks, killed at any point on every store that outlives a process: what is there
afterwards is sound by ``verify``, and nothing is left over for good. Field cases 84c and 98."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import safepoint
from safepoint import Retention, State
from safepoint.model import Obj
from safepoint.rows import CallRow, CheckpointRow
from tests.support import raw, sweeping
from tests.support.children import Server
from tests.support.scale import SOAK, scale
from tests.support.stores import KINDS, place

SIZE = 2_500_000


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with place(request.param, tmp_path) as made:
        yield made.url


def some(hits: int, url: str) -> list[int]:
    if SOAK:
        return list(range(1, hits + 1)) if hits < 60 else list(range(1, hits + 1, hits // 30))
    return sorted({1, (hits + 1) // 2, hits} if url.startswith(("sqlite", "file")) else {(hits + 1) // 2})


def points(hits: Counter[str], url: str) -> list[tuple[str, int]]:
    return [(point, nth) for point in sorted(hits) for nth in some(hits[point], url)]


def filled(url: str, task: str) -> None:
    with safepoint.open(url, retention=Retention.keep_all()) as cp, cp.resume(task) as run:
        for i in range(8):
            run.call(look, i)
            run.state.messages.append({"content": f"message {i} " * 60})
            run.save()


@safepoint.tool(effect="read", name="cleanup_kills.look")
def look(i: int) -> str:
    return f"what was seen {i} " * 60


def sound(cp: safepoint.Checkpointer, task: str) -> None:
    found = cp.verify(task)
    assert found.damages == (), found.damages


def no_leftovers(cp: safepoint.Checkpointer, task: str) -> None:
    """Every object is reached; no call has lost its checkpoint; no temporary file lies about."""
    parts: list[Any] = list(cp.store.walk(task))
    objects = {o.name: o for o in parts if isinstance(o, Obj)}
    rows = [p for p in parts if isinstance(p, CheckpointRow)]
    calls = [p for p in parts if isinstance(p, CallRow)]
    todo = [row.refs for row in rows] + [refs for c in calls for refs in (c.args_refs, c.result_refs)]
    reached: set[bytes] = set()
    while todo:
        refs = todo.pop()
        for name in (refs[i : i + 16] for i in range(0, len(refs), 16)):
            if name not in reached:
                reached.add(name)
                todo.append(objects[name].refs)
    assert set(objects) == reached
    assert {c.base_seq for c in calls} <= {row.seq for row in rows}
    assert cp.store.strays() == []


@pytest.mark.scaled
def test_field_case_84c_a_short_clean_up_killed_at_each_point(url: str, server: Server) -> None:
    filled(url, "count")
    hits = server.run(sweeping.small_cleaner, url, "count")
    assert hits
    for i, (point, nth) in enumerate(points(hits, url)):
        task = f"t{i}"
        filled(url, task)
        child = server.start(sweeping.small_cleaner, url, task, point, nth)
        child.told()
        assert child.was_killed, f"{point} was not reached {nth} times"
        with safepoint.open(url, retention=Retention.keep_all()) as cp:
            sound(cp, task)
            assert len(cp.load_latest(task).messages) == 8, "the head is what it was"
            for head in cp.list_checkpoints(task):
                cp.load(task, seq=head.seq)
            cp.cleanup(task, keep_latest=2)
            assert [head.seq for head in cp.list_checkpoints(task)] == [9, 8]
            sound(cp, task)
            no_leftovers(cp, task)


@pytest.mark.scaled
def test_field_case_98_a_save_of_large_parts_killed_at_each_point(url: str, server: Server) -> None:
    with safepoint.open(url) as cp:
        cp.save(State("count"))
    hits = server.run(sweeping.big_saver, url, "count", SIZE)
    assert hits
    for i, (point, nth) in enumerate(points(hits, url)):
        task = f"t{i}"
        with safepoint.open(url) as cp:
            cp.save(State(task))
        child = server.start(sweeping.big_saver, url, task, SIZE, point, nth)
        child.told()
        assert child.was_killed, f"{point} was not reached {nth} times"
        with safepoint.open(url, retention=Retention.keep_all()) as cp:
            sound(cp, task)
            state = cp.load_latest(task)
            assert state is not None
            assert state.step in {0, 1}
            assert len(state.agent_state) == 8 * state.step, "whole or absent"
            state.agent_state = {}
            state.step = 2
            cp.save(state)
            raw.expire_stages(url, task)
            cp.cleanup(task, keep_latest=1)
            no_leftovers(cp, task)
            left = sum(len(o.data) for o in cp.store.walk(task) if isinstance(o, Obj))
            assert left < 10_000, "what was sent ahead of a save that never came is swept"


@pytest.mark.scaled
def test_savers_that_drop_and_add_again_against_two_sweepers(url: str, server: Server) -> None:
    with safepoint.open(url) as cp:
        cp.save(State("shared", messages=sweeping.WORDS[:5]))
    seconds = scale(1, 5)
    saves, swept = sweeping.savers_against_sweepers(server, url, savers=2, seconds=seconds, least=seconds + 1)
    assert saves > 2 * seconds
    assert sum(checkpoints for checkpoints, _ in swept) > 0
    with safepoint.open(url) as cp:
        sound(cp, "shared")

"""Graph programs give on our saver what they give on LangGraph's InMemorySaver: each sync and async, under each durability.

Any SafepointError of a program is a failure: none of them has two runs at once on one line of a thread, so a Conflict would be
a false one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver

from tests.support.graphs import PROGRAMS, run_program
from tests.support.graphs.facts import difference
from tests.support.graphs.subjects import Subject, run_on, subject
from tests.support.scale import SOAK, scale
from tests.support.seeds import fresh_rng
from tests.support.stores import KINDS

WAYS = [(name, mode, durability) for name, p in PROGRAMS.items() for mode in p.modes for durability in p.durabilities]
SAMPLE = {"sqlite": 10, "file": 6, "postgres": 6, "redis": 6, "cluster": 3}
FULL = {"sqlite": 200, "file": 130, "postgres": 130, "redis": 130, "cluster": 40}
"""In a soak all in memory and on SQLite. On the others a part, another one each time: what differs there is where rows lie."""


def found_wrong(there: Subject, name: str, mode: str, durability: str) -> str:
    expected = run_program(PROGRAMS[name], InMemorySaver(), mode, durability)
    seen = run_on(there, PROGRAMS[name], mode, durability)
    return f"{name}, {mode}, {durability}: {difference(expected, seen)}" if seen != expected else ""


@pytest.fixture
def silent(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Safepoint has nothing to warn of: LangGraph hides some errors of savers, which are logged then."""
    yield
    said = [
        record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING and "safepoint" in record.name
    ]
    assert not said


def test_there_are_enough() -> None:
    assert len(PROGRAMS) >= 60
    # What cannot run everywhere is declared; most can.
    assert sum(len(p.modes) * len(p.durabilities) == 6 for p in PROGRAMS.values()) >= 46


@pytest.mark.scaled
@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("name", PROGRAMS)
def test_equal_in_memory(name: str, tmp_path: Path) -> None:
    """In all ways in a soak; else in one, at random."""
    ways = [way for way in WAYS if way[0] == name]
    if not SOAK:
        ways = [fresh_rng().choice(ways)]
    with subject("memory", tmp_path) as there:
        assert not [wrong for way in ways if (wrong := found_wrong(there, *way))]


@pytest.mark.scaled
@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("kind", KINDS)
def test_equal_on_each_store(kind: str, tmp_path: Path) -> None:
    """All on one store one after another, each with threads of its own."""
    ways = fresh_rng().sample(WAYS, scale(SAMPLE[kind], FULL[kind]))
    with subject(kind, tmp_path) as there:
        assert not [wrong for way in ways if (wrong := found_wrong(there, *way))]


# -- the programs themselves


class _ForgetsParents(InMemorySaver):
    def get_tuple(self, config: Any) -> Any:
        found = super().get_tuple(config)
        return found and found._replace(parent_config=None)


class _AlwaysNewest(InMemorySaver):
    def get_tuple(self, config: Any) -> Any:
        where = {name: value for name, value in config["configurable"].items() if name != "checkpoint_id"}
        return super().get_tuple({"configurable": where})


class _LosesWrites(InMemorySaver):
    def put_writes(self, config: Any, writes: Any, task_id: str, task_path: str = "") -> None:
        return


class _LosesOrder(InMemorySaver):
    def put_writes(self, config: Any, writes: Any, task_id: str, task_path: str = "") -> None:
        super().put_writes(config, writes, task_id)


class _OneSpace(InMemorySaver):
    """Calls of a subgraph share a namespace."""

    def put(self, config: Any, checkpoint: Any, metadata: Any, new_versions: Any) -> Any:
        where = config["configurable"]
        bare = {"configurable": {**where, "checkpoint_ns": where.get("checkpoint_ns", "").partition(":")[0]}}
        return super().put(bare, checkpoint, metadata, new_versions)


class _NoCursor(InMemorySaver):
    def list(self, config: Any, *, filter: Any = None, before: Any = None, limit: Any = None) -> Any:
        return super().list(config, filter=filter, limit=limit)


class _NoFilter(InMemorySaver):
    def list(self, config: Any, *, filter: Any = None, before: Any = None, limit: Any = None) -> Any:
        return super().list(config, before=before, limit=limit)


class _NoSteps(InMemorySaver):
    def put(self, config: Any, checkpoint: Any, metadata: Any, new_versions: Any) -> Any:
        return super().put(config, checkpoint, {**metadata, "step": 0}, new_versions)


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        (_ForgetsParents, "delta_linear"),
        (_AlwaysNewest, "replay_each"),
        (_LosesWrites, "interrupt_twice_in_a_node"),
        (_LosesOrder, "delta_send_order"),
        (_OneSpace, "subgraph_in_a_loop"),
        (_NoCursor, "replay_stateful_subgraph"),
        (_NoFilter, "parts_of_histories"),
        (_NoSteps, "several_turns"),
    ],
)
def test_a_wrong_saver_is_found(wrong: type[InMemorySaver], name: str) -> None:
    """A program that gave the same facts whatever the saver did would show nothing."""
    expected = run_program(PROGRAMS[name], InMemorySaver(), "sync", "sync")
    try:
        seen: Any = run_program(PROGRAMS[name], wrong(), "sync", "sync")
    except Exception as error:
        seen = error
    assert seen != expected

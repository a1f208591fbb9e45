"""Cost follows change: bytes on disk against the size of the state. Field cases 12 and 14a; invariant 8.

What is measured is the file and its log after the store was closed, all checkpoints kept.
"""

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import safepoint
from safepoint import Retention, State, model
from tests.support import raw
from tests.support.scale import scale

# Below this number the pages that an empty file has would spoil the ratio.
STEPS = scale(500, 2000)
TABLES = ("sp_checkpoints", "sp_objects", "sp_calls", "sp_branches", "sp_pauses", "sp_tasks")


def message(rng: random.Random) -> dict[str, str]:
    """One message of 1 KB."""
    return {"role": "user", "content": rng.randbytes(490).hex()}


def open_all(db: str) -> safepoint.Checkpointer:
    # What survives is not the question here, and fsync would be most of the time.
    return safepoint.open(f"sqlite:///{db}", retention=Retention.keep_all(), durability="process")


def saved(db: str, steps: int) -> tuple[int, int, dict[str, int]]:
    """Bytes on disk, bytes of the final state, and rows, after so many saves of one message more."""
    rng = random.Random(steps)
    state = State("t")
    with open_all(db) as cp:
        for _ in range(steps):
            state.messages.append(message(rng))
            state.step += 1
            head = cp.save(state)
        final = head.bytes
    rows = {t: raw.rows(db, f"SELECT count(*) FROM {t}")[0][0] for t in TABLES}
    return raw.size(db), final, rows


@model
def ask(messages: list[Any]) -> dict[str, str]:
    return message(random.Random(len(messages)))


def ran(db: str, steps: int) -> tuple[int, int]:
    def step(run: Any) -> None:
        run.state.messages.append(run.call(ask, run.state.messages))
        if run.state.step == steps - 1:
            run.finish("done")

    with open_all(db) as cp:
        outcome = safepoint.run_agent(step, task_id="t", input="go", store=cp)
        assert outcome.steps == steps
        final = cp.list_checkpoints("t", limit=1)[0].bytes
    return raw.size(db), final


@pytest.mark.scaled
@pytest.mark.timeout(600)
def test_saves_of_one_message_more(tmp_path: Path) -> None:
    once, final, rows = saved(str(tmp_path / "once.db"), STEPS)
    assert final >= STEPS * 980
    assert once <= 2.5 * final
    twice, _, rows2 = saved(str(tmp_path / "twice.db"), 2 * STEPS)
    assert twice <= 2.1 * once
    # Rows per save are constant: the checkpoint, the message, the list that it is in, and a sealed page now and then.
    added = {t: rows2[t] - rows[t] for t in TABLES}
    assert rows["sp_checkpoints"] == added["sp_checkpoints"] == STEPS
    assert rows["sp_objects"] <= 2.25 * STEPS
    assert added["sp_objects"] <= 1.05 * rows["sp_objects"]
    assert {t: n for t, n in added.items() if t not in {"sp_checkpoints", "sp_objects"} and n} == {}


@pytest.mark.scaled
@pytest.mark.timeout(600)
def test_a_model_that_is_given_the_whole_history(tmp_path: Path) -> None:
    once, final = ran(str(tmp_path / "once.db"), STEPS)
    assert final >= STEPS * 980
    assert once <= 3.5 * final
    twice, _ = ran(str(tmp_path / "twice.db"), 2 * STEPS)
    assert twice <= 2.1 * once


@pytest.mark.scaled
@pytest.mark.timeout(600)
@pytest.mark.parametrize("shape", ["one-text", "messages"])
def test_saves_of_an_equal_state(shape: str, db: str) -> None:
    """Field case 14a: what has not changed costs next to nothing, also when it is another object that is equal."""
    rng = random.Random(1)
    big = [message(rng) for _ in range(5000)] if shape == "messages" else [rng.randbytes(2_500_000).hex()]
    state = State("t", messages=big)
    count = scale(100, 1000)
    with open_all(db) as cp:
        size = cp.save(state).bytes
        assert size >= 5_000_000
    before = raw.size(db)
    with open_all(db) as cp:
        loaded = cp.load_latest("t")
        assert loaded is not None
        state = loaded
        for n in range(count):
            if n % 10 == 0:
                state.messages = [dict(m) if isinstance(m, dict) else m[:1] + m[1:] for m in state.messages]
            cp.save(state)
    added = raw.size(db) - before
    assert added < 2000 * count
    assert raw.rows(db, "SELECT count(*) FROM sp_checkpoints") == [(count + 1,)]


def test_the_bytes_of_a_save_are_in_the_metrics(db: str) -> None:
    """Field case 14: growth is seen before it hurts."""

    def step(run: Any) -> None:
        run.state.messages.append(run.call(ask, run.state.messages))
        if run.state.step == 9:
            run.finish("done")

    with open_all(db) as cp:
        safepoint.run_agent(step, task_id="t", input="go", store=cp)
        written = [h.metrics.bytes_written for h in cp.list_checkpoints("t") if h.metrics is not None][::-1]
    growth = [b - a for a, b in pairwise(written)]
    assert len(growth) == 10
    assert all(1000 < g < 5000 for g in growth[1:])

"""What must hold of the agents in agents.py after any death, and at their end; seen from outside."""

from __future__ import annotations

from typing import Any

import safepoint
from safepoint import Done, NotDone
from tests.support import agents, raw
from tests.support.effects import World


def settle_by_hand(world: World, db: str, task: str, outcome: dict[str, Any]) -> None:
    """A person looks whether the parked call happened, and tells."""
    assert outcome["status"] == "waiting"
    done = world.done()
    with safepoint.open(agents.url_of(db)) as cp:
        assert cp.status(task).status == "waiting"
        for no, tool, key in outcome["pending"]:
            assert tool == agents.post.name, "only the write without a verifier may be parked"
            assert done.get(key, 0) <= 1
            cp.resolve(task, no, Done(f"post:{key}:1") if done.get(key) else NotDone())


def check_stored(db: str, task: str, messages: list[Any]) -> None:
    saves = [m for m in messages if m[0] == "saved" and m[1] == task]
    with safepoint.open(agents.url_of(db)) as cp:
        state = cp.load_latest(task)
        got = {m[2] for m in messages if m[0] == "got" and m[1] == task}
        recorded = {c.arguments["key"] for c in cp.calls(task) if c.status == "succeeded"} if state is not None else set()
    assert got <= recorded, "an acknowledged result is lost"
    if saves:
        assert state is not None
        assert state.seq is not None
        assert (state.seq, state.step) >= saves[-1][2:]
    if state is not None and not db.startswith("file:"):
        rows = raw.checkpoints(db, task)
        assert [r[0] for r in rows] == list(range(1, len(rows) + 1)), "a seq is missing or repeated"
        assert {m[2] for m in saves} <= {r[0] for r in rows}, "an acknowledged save is lost"
        assert raw.head(db, task) == state.seq


def check_end(world: World, db: str, task: str, messages: list[Any], outcome: dict[str, Any]) -> None:
    assert outcome["result"] == f"done:{task}"
    done, keys = world.done(), agents.keys_of(task)
    for tool in agents.ONCE:
        assert {k: done.get(k, 0) for k in keys[tool]} == dict.fromkeys(keys[tool], 1), f"{tool} is not done exactly once"
    if raw.kind_of(db) in {"sqlite", "postgres"}:
        assert raw.ledger(db, task) == sorted(keys["book"])
    else:
        assert {k: done.get(k, 0) for k in keys["book"]} == dict.fromkeys(keys["book"], 1)
    if "://" in db:
        with safepoint.open(agents.url_of(db)) as cp:
            assert all(c.status == "succeeded" for c in cp.calls(task))
            found = cp.verify(task)
            assert found.ok, str(found)
    if not db.startswith("file:"):
        assert all(c["status"] == "succeeded" for c in raw.calls(db, task))
    # What was given out once is the same at the end, and was not done again to get it.
    values = {m["key"]: m["content"] for m in outcome["messages"] if m.get("role") == "tool"}
    values.update({m["content"].split(":")[1]: m["content"] for m in outcome["messages"] if m.get("role") == "assistant"})
    given: dict[str, Any] = {}
    for m in messages:
        if m[0] == "got" and m[1] == task:
            assert given.setdefault(m[2], m[3]) == m[3], "a result changed"
    assert set(given) >= {k for ks in keys.values() for k in ks}
    assert values == {k: given[k] for k in values}

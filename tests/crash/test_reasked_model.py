"""Field case 36: after a crash the model plans the same operation again, as a new call in other words.

Both variants: the crash comes after the effect and before its result is recorded, or after that. The model is either not
journaled at all, or its recorded reply is gone.
"""

import json
from typing import Any

import pytest

import safepoint
from safepoint import Done, NotDone
from tests.support import raw, reasked
from tests.support.agents import url_of
from tests.support.children import Server
from tests.support.effects import Effects, World
from tests.support.spoil import drop_calls

JOURNALED = pytest.mark.parametrize("journaled", [False, True], ids=["stub", "reply-lost"])
WHEN = pytest.mark.parametrize("after_result", [False, True], ids=["before-result", "after-result"])


@pytest.fixture
def db(any_db: str) -> str:
    return any_db


class Crash:
    """A task that dies once, and then finds its model in another mood."""

    def __init__(self, server: Server, world: World, db: str, wording: list[str], journaled: bool) -> None:
        self.server, self.world, self.db, self.wording, self.journaled = server, world, db, wording, journaled

    def die(self, after_result: bool, transactional: bool = False, calls: int = 1) -> None:
        """Kill it between effect and record, or after the record, of the last of its calls."""
        place, before = ("transact", "transact.before") if transactional else ("result", "result.before")
        point = f"{place}.after" if after_result else before
        nth = calls + (self.journaled and not transactional)
        child = self.server.start(reasked.run, self.db, "t", self.world, self.wording, self.journaled, point, nth)
        child.told()
        assert child.was_killed
        if self.journaled:
            # A model's reply is durable before it is acted on, so losing it takes this.
            assert drop_calls(self.db, "t", reasked.ask_model.name) == 1

    def resume(self) -> dict[str, Any]:
        return self.server.run(reasked.run, self.db, "t", self.world, self.wording, self.journaled)

    def effects(self) -> list[str]:
        return [e["value"] for e in self.world.log() if e["op"] == "do"]

    def resolve(self, no: int, verdict: Done | NotDone) -> None:
        with safepoint.open(url_of(self.db)) as cp:
            cp.resolve("t", no, verdict)


def say(*calls: tuple[str, dict[str, Any]]) -> str:
    return json.dumps(calls)


def one(tool: str, n: Any = 1, a: Any = 1) -> str:
    return say((tool, {"key": "t/x", "n": n, "to": {"a": a, "b": 2}}))


def reworded(tool: str) -> list[str]:
    """Equal arguments: other key order, and 1.0 for 1."""
    return [one(tool), say((tool, {"to": {"b": 2.0, "a": 1.0}, "n": 1.0, "key": "t/x"}))]


def test_the_words_differ_and_mean_the_same() -> None:
    first, second = reworded("verified")
    assert first != second
    assert json.loads(first) == json.loads(second)


@JOURNALED
@WHEN
@pytest.mark.parametrize("tool", ["verified", "blind", "idempotent", "transactional", "keyed", "executes", "reuses"])
def test_equal_arguments_are_the_same_operation(
    tool: str, after_result: bool, journaled: bool, server: Server, effects: Effects, db: str
) -> None:
    if tool == "transactional" and raw.kind_of(db) not in {"sqlite", "postgres"}:
        pytest.skip("transactional_tools is False")
    crash = Crash(server, effects.world(), db, reworded(tool), journaled)
    crash.die(after_result, transactional=tool == "transactional")
    happened = crash.effects()
    outcome = crash.resume()
    if tool == "blind" and not after_result:
        assert outcome["status"] == "waiting"
        assert [p[1] for p in outcome["pending"]] == [reasked.blind.name]
        assert crash.effects() == happened
        crash.resolve(outcome["pending"][0][0], Done("seen by hand"))
        outcome = crash.resume()
        assert outcome["result"] == ["seen by hand"]
    elif tool == "transactional":
        assert outcome["result"] == ["transactional:t/x"]
    else:
        assert outcome["result"] == happened
    assert outcome["status"] == "finished"
    # Once: an idempotent call may be sent again, and its receiver then answers what it answered before.
    assert crash.effects() == happened
    assert len(happened) == (tool != "transactional")
    assert raw.ledger(db) == (["t/x"] if tool == "transactional" else [])
    again = [e for e in crash.world.log() if e["op"] == "again"]
    assert len(again) == (tool == "idempotent" and not after_result)
    assert [c["tool"] for c in raw.calls(db, "t") if c["effect"] != "read"] == [reasked.TOOLS[tool].name]


@JOURNALED
@WHEN
def test_what_a_person_says_did_not_happen_is_done_once(
    after_result: bool, journaled: bool, server: Server, effects: Effects, db: str
) -> None:
    crash = Crash(server, effects.world(), db, reworded("blind"), journaled)
    crash.die(after_result)
    outcome = crash.resume()
    if after_result:
        assert outcome["status"] == "finished"
        assert len(crash.effects()) == 1
        return
    crash.resolve(outcome["pending"][0][0], NotDone())
    crash.wording = [one("blind", n=1.0)]
    outcome = crash.resume()
    assert outcome["status"] == "finished"
    assert len(crash.effects()) == 2  # the person was wrong; but told so, it is done exactly once more
    assert [c["attempts"] for c in raw.calls(db, "t") if c["effect"] == "write"] == [2]


@JOURNALED
@WHEN
def test_the_same_operation_asked_for_twice_is_done_twice(
    after_result: bool, journaled: bool, server: Server, effects: Effects, db: str
) -> None:
    """Two equal calls in one reply are two operations, and after a crash still two."""
    twice = [say(*[tuple(json.loads(w)[0])] * 2) for w in reworded("idempotent")]
    crash = Crash(server, effects.world(), db, twice, journaled)
    crash.die(after_result, calls=2)
    assert len(crash.effects()) == 2
    outcome = crash.resume()
    assert outcome["status"] == "finished"
    assert outcome["result"] == crash.effects()
    assert len(crash.effects()) == 2


@JOURNALED
@WHEN
@pytest.mark.parametrize("tool", ["verified", "keyed", "executes", "reuses"])
@pytest.mark.parametrize("second", [{"n": 2}, {"n": True}, {"a": "1"}], ids=["n=2", "n=True", "a='1'"])
def test_other_arguments_are_decided_by_the_tool(
    tool: str, second: dict[str, Any], after_result: bool, journaled: bool, server: Server, effects: Effects, db: str
) -> None:
    crash = Crash(server, effects.world(), db, [one(tool), one(tool, **second)], journaled)
    crash.die(after_result)
    [first] = crash.effects()
    outcome = crash.resume()
    match tool:
        case "keyed" | "reuses":
            assert outcome["status"] == "finished"
            assert outcome["result"] == [first]
            assert crash.effects() == [first]
        case "executes":
            assert outcome["status"] == "finished"
            assert len(crash.effects()) == 2
            assert outcome["result"] == crash.effects()[1:]
        case _:
            assert outcome["status"] == "waiting"
            assert [p[1] for p in outcome["pending"]] == [reasked.verified.name]
            assert crash.effects() == [first]
            with safepoint.open(url_of(db)) as cp:
                plan = cp.plan("t")
            assert plan.does == "wait"
            # Parked, not lost: a person says that it is another operation, and it is done once.
            crash.resolve(outcome["pending"][0][0], NotDone())
            crash.wording = crash.wording[1:]
            outcome = crash.resume()
            assert outcome["status"] == "finished"
            assert len(crash.effects()) == 2
            assert outcome["result"] == crash.effects()[1:]


@JOURNALED
@WHEN
def test_the_person_says_it_is_the_same_operation(
    after_result: bool, journaled: bool, server: Server, effects: Effects, db: str
) -> None:
    crash = Crash(server, effects.world(), db, [one("verified"), one("verified", n=2)], journaled)
    crash.die(after_result)
    [first] = crash.effects()
    outcome = crash.resume()
    crash.resolve(outcome["pending"][0][0], Done(first))
    crash.wording = crash.wording[1:]
    outcome = crash.resume()
    assert outcome["status"] == "finished"
    assert outcome["result"] == [first]
    assert crash.effects() == [first]

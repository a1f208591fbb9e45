"""What ``cp.plan`` says of every call and of the checkpoint is what the resume then does, seen from outside.

Random programs are killed at random points; then the plan is read, and the resume is watched: by the log of the process in
which the effects happen, by what the step got, and by raw rows.
"""

import random
from collections import Counter
from typing import Any

import pytest

import safepoint
from safepoint import Done, NotDone
from safepoint.rules.planning import Plan
from tests.support import programs, raw
from tests.support.agents import url_of
from tests.support.children import Server
from tests.support.effects import Effects, World
from tests.support.scale import scale
from tests.support.seeds import fresh_seed
from tests.support.spoil import lengthen_root


@pytest.fixture
def db(any_db: str) -> str:
    return any_db


SEEN: Counter[str] = Counter()
"""How often each word of a plan was put to the test; to be looked at with -s."""


@pytest.mark.scaled
@pytest.mark.parametrize("part", range(4))
def test_what_the_plan_says_is_what_happens(part: int, server: Server, effects: Effects, db: str) -> None:
    base = fresh_seed()
    for n in range((scale(12, 200) if raw.kind_of(db) == "sqlite" else scale(8, 20)) // 4):
        seed = f"{base}.{part}.{n}"
        world = effects.world()
        try:
            crashes = Crashes(server, world, db, f"t{n}", random.Random(seed))
            crashes.harm = 0.2 if n % 2 else 0.0
            crashes.play()
        except AssertionError as error:
            error.add_note(f"part {part}, round {n}")
            raise
        world.forget()
    print(dict(SEEN))


def test_a_failure_stays_passed_when_what_came_after_it_is_asked_anew(server: Server, effects: Effects, db: str) -> None:
    """Found by the above: the read that shows that the step went on past the failure is set aside, and was no witness."""
    fails = {"op": "call", "tool": "idm", "n": 1, "how": {"fails": 1, "after": True, "kind": "plain"}, "catch": True}
    reads = {"op": "call", "tool": "rd", "n": 2, "how": {}, "catch": True}
    crashes = Crashes(server, effects.world(), db, "t", random.Random(0))
    crashes.program = {"steps": [[fails, reads, {"op": "raise", "n": 3, "times": 3}]], "save_every": 1}
    assert [crashes.watched() for _ in range(2)] == ["raised", "raised"]
    with safepoint.open(url_of(db)) as cp:
        assert [p.action for p in cp.plan("t").calls] == ["raise", "ask_anew"]
    assert [crashes.watched() for _ in range(2)] == ["raised", "finished"]
    assert len([e for e in crashes.world.log() if e["op"] == "start" and e["key"] == "t/1"]) == 1


class Crashes:
    """One random program from its first death to its end."""

    def __init__(self, server: Server, world: World, db: str, task: str, rng: random.Random) -> None:
        self.server, self.world, self.db, self.task, self.rng = server, world, db, task, rng
        self.program = programs.program(rng)
        self.harm = 0.0
        """How often the newest checkpoint is damaged."""
        self.lost = False
        """Whether the last plan had a call whose result is lost."""

    def play(self) -> None:
        ends: list[str] = []
        for _ in range(30):
            if self.rng.random() < 0.7:
                near = self.rng.choice(["", "effect", "result"])
                nth = self.rng.randint(1, 8 if near else 60)
                self.server.start(programs.run_program, self.db, self.task, self.world, self.program, nth, near).told()
            ends.append(self.watched())
            # A call whose result is lost raises in each run, and a program that does not catch that gets no further.
            if ends[-1] == "finished" or (self.lost and ends[-4:] == ["raised"] * 4):
                return
        raise AssertionError("never finished")

    def damage_head(self) -> None:
        """A byte more in the newest checkpoint, if it is not the only one: the next run has to go back."""
        head = raw.head(self.db, self.task)
        if head is None or head < 2:
            return
        lengthen_root(self.db, self.task, head)

    def watched(self) -> str:
        if self.rng.random() < self.harm:
            self.damage_head()
        with safepoint.open(url_of(self.db)) as cp:
            plan = cp.plan(self.task) if raw.head(self.db, self.task) is not None else None
        self.lost = plan is not None and any(planned.action == "lost" for planned in plan.calls)
        before = len(self.world.log())
        child = self.server.start(programs.run_program, self.db, self.task, self.world, self.program)
        outcome = child.result()
        if plan is not None:
            try:
                Watch(self, plan, child.heard, self.world.log(), before, outcome).compare()
            except AssertionError as error:
                error.add_note(f"{plan}\n{self.program}\n{child.heard}\n{self.world.log()[before:]}\n{outcome}")
                raise
        if outcome["status"] == "waiting":
            self.settle(outcome)
        return str(outcome["status"])

    def settle(self, outcome: dict[str, Any]) -> None:
        """A person settles some of what is pending; what is left keeps the task waiting."""
        with safepoint.open(url_of(self.db)) as cp:
            for no, tool, _key in outcome["pending"]:
                if self.rng.random() < 0.25:
                    continue
                if tool == "pause":
                    cp.answer(self.task, no, "yes")
                else:
                    cp.resolve(self.task, no, Done("by hand") if self.rng.random() < 0.5 else NotDone())


class Watch:
    """A plan against what happened."""

    def __init__(
        self, of: Crashes, plan: Plan, heard: list[Any], log: list[dict[str, Any]], before: int, outcome: dict[str, Any]
    ) -> None:
        self.of, self.plan, self.whole, self.log, self.outcome = of, plan, log, log[before:], outcome
        self.heard = heard
        self.begun = any(m[0] == "begin" for m in heard)
        self.reached = {m[1]: m[2] for m in heard if m[0] == "call"}
        self.got = {m[1]: m[2] for m in heard if m[0] == "got"}
        self.failed = {m[1] for m in heard if m[0] == "failed"}
        self.lost = {m[1] for m in heard if m[0] == "lost"}
        self.pending = {p[0] for p in outcome["pending"] if p[1] != "pause"}
        self.pauses = {p[0] for p in outcome["pending"] if p[1] == "pause"}

    def starts(self, key: str) -> list[str]:
        return [e["idem"] for e in self.log if e["op"] == "start" and e["key"] == key]

    def asks(self, key: str) -> int:
        """How often the verifier was asked before anything was started."""
        n = 0
        for entry in self.log:
            if entry["key"] == key:
                if entry["op"] != "ask":
                    break
                n += 1
        return n

    def compare(self) -> None:
        plan, outcome = self.plan, self.outcome
        SEEN[f"does {plan.does}"] += 1
        restored = [m[1:] for m in self.heard if m[0] == "restored"]
        match plan.does:
            case "nothing":
                assert (outcome["status"], self.heard, self.log) == ("finished", [], [])
                return
            case "wait":
                assert outcome["status"] == "waiting"
                assert not self.begun
                assert set(plan.pauses) <= self.pauses
            case "carry on":
                how = "fallback" if plan.skipped else "head"
                SEEN[how] += 1
                assert restored in ([(how, plan.seq)], [])
                if not restored:  # settled on the way, and in doubt: no step began
                    assert outcome["status"] == "waiting"
            case _:
                raise AssertionError(plan.does)
        if self.begun:
            assert next(m for m in self.heard if m[0] == "begin") == ("begin", plan.step)
            assert not plan.pauses
        assert self.of.harm or plan.skipped == ()
        assert plan.guard == 0
        if plan.skipped:
            with safepoint.open(url_of(self.of.db)) as cp:
                assert cp.status(self.of.task).branch == plan.branch
        for planned in plan.calls:
            SEEN[planned.action] += 1
            self.call(planned.call, planned.action)
        known = {p.call.arguments["key"] for p in plan.calls}
        for key in self.reached.keys() - known:
            assert self.asks(key) == 0, "a call that the plan does not know was verified before it ran"

    def call(self, call: safepoint.Call, action: str) -> None:
        key = call.arguments["key"]
        starts, asks, reached = self.starts(key), self.asks(key), key in self.reached
        # A call made beside others may find the run ended by one of them before it begins.
        may_not_begin = self.reached.get(key) == "many" and self.outcome["status"] in {"waiting", "raised"}
        where = f"{action} {call}"
        # Another call with the same arguments may be made where a person has said of an unclaimed one that it did not happen.
        other = action == "unclaimed" and any((p.action, p.call.arguments["key"]) == ("verify", key) for p in self.plan.calls)
        if action != "verify" and not other:
            assert asks == 0, where
        match action:
            case "reuse":
                assert not starts, where
                assert self.got.get(key, call.result) == call.result, where
                assert key not in self.failed | self.lost, where
            case "lost":
                assert not starts, where
                assert key not in self.failed | self.got.keys(), where
            case "raise":
                assert not starts, where
                assert key not in self.got.keys() | self.lost, where
            case "repeat":
                self.repeated(call, starts, reached, may_not_begin, where)
            case "verify":
                self.verified(call, starts, asks, reached, may_not_begin, where)
            case "park":
                assert not starts, where
                assert call.no in self.pending, where
                assert not self.begun, where
            case "wait":
                assert not starts, where
                assert self.outcome["status"] == "waiting", where
                assert not self.begun, where
            case "unclaimed":
                assert call.idempotency_key not in starts, where
            case "ask_anew":
                assert bool(starts) == reached or may_not_begin, where
                rows = {r["no"]: r for r in raw.calls(self.of.db, self.of.task)}
                assert rows[call.no]["superseded"], where
            case _:
                raise AssertionError(where)

    def repeated(self, call: safepoint.Call, starts: list[str], reached: bool, may_not_begin: bool, where: str) -> None:
        assert bool(starts) == reached or (may_not_begin and not starts), where
        if starts and call.tool != programs.mdl.name:
            assert set(starts) == {call.idempotency_key}, where

    def verified(
        self, call: safepoint.Call, starts: list[str], asks: int, reached: bool, may_not_begin: bool, where: str
    ) -> None:
        assert asks == 1, where
        rows = {r["no"]: r for r in raw.calls(self.of.db, self.of.task)}
        kinds = call.arguments["how"].get("verdicts") or ["true"]
        mine = [e for e in self.whole if e["key"] == call.arguments["key"]]
        earlier = [e["op"] for e in mine[: len(mine) - sum(e["key"] == call.arguments["key"] for e in self.log)]]
        done = [e for e in mine if e["op"] == "do"]
        kind = kinds[min(earlier.count("ask") + 1, len(kinds)) - 1]
        SEEN[f"verify {kind}"] += 1
        if kind != "true":
            assert not starts, where
            assert call.no in self.pending, where
            assert rows[call.no]["status"] == "in_doubt", where
            assert not self.begun, where
        elif "do" in earlier:
            assert not starts, where
            key = call.arguments["key"]
            assert self.got.get(key, done[0]["value"]) == done[0]["value"], where
        else:
            self.repeated(call, starts, reached, may_not_begin, where)

"""Random agents as data, and the child that runs them: calls of every effect that fail, pause, raise and cannot tell."""

from __future__ import annotations

import random
from typing import Any

import safepoint
from safepoint import CallFailed, DidNotHappen, Done, NotDone, RefusedType, Retry, Unknown, _probe, model, tool
from tests.support import ledgers
from tests.support.agents import SETTLE, open_here, told, world_of
from tests.support.children import die, tell

How = dict[str, Any]


class Refused(Exception):
    """Named in failed_on: the receiver said no."""


class Unstorable:
    """A class that nobody registered."""


class StepError(Exception):
    """A bug in the step, or a bad reply that it choked on."""


_runs: dict[str, Any] = {}


def _act(name: str, key: str, how: How, idem: str, dedup: bool = False) -> Any:
    world = world_of(key)
    n = world.start(key, idem)
    error = {"plain": OSError("the line is dead"), "refused": Refused("no"), "certain": DidNotHappen("not sent")}
    failing = n <= how.get("fails", 0)
    if failing and not how.get("after"):
        raise error[how["kind"]]
    value = world.do(name, key, idem, dedup=dedup)
    if failing:
        raise error[how["kind"]]
    return value


def _verdict(call: safepoint.Call) -> Any:
    key, how = call.arguments["key"], call.arguments["how"]
    n, value, asked = world_of(key).asked(key)
    kinds = how.get("verdicts") or ["true"]
    match kinds[min(asked, len(kinds)) - 1]:
        case "unknown":
            return Unknown("the receiver is down")
        case "raise":
            raise ConnectionError("the receiver is down")
    return Done(value) if n else NotDone()


@tool(effect="read", retry=Retry(2, 0.001))
def rd(key: str, how: How, *, idempotency_key: str) -> Any:
    return _act("rd", key, how, idempotency_key)


@model(retry=Retry(2, 0.001))
def mdl(key: str, how: How) -> Any:
    return {"role": "assistant", "content": _act("mdl", key, how, "")}


@tool(effect="idempotent")
def idm(key: str, how: How, *, idempotency_key: str) -> Any:
    return _act("idm", key, how, idempotency_key, dedup=True)


@tool(effect="transactional")
def tx(key: str, how: How, *, connection: Any, idempotency_key: str) -> Any:
    ledgers.insert(connection, key=key)
    if world_of(key).start(key, idempotency_key) <= how.get("fails", 0):
        raise OSError("no")
    return f"tx:{key}"


@tool(effect="write", verify=_verdict, settle_after=SETTLE, failed_on=[Refused], retry=Retry(2, 0.001))
def wv(key: str, how: How, *, idempotency_key: str) -> Any:
    return _act("wv", key, how, idempotency_key)


@tool(effect="write", failed_on=[Refused])
def wn(key: str, how: How, *, idempotency_key: str) -> Any:
    return _act("wn", key, how, idempotency_key)


@tool(effect="idempotent")
def asker(key: str, how: How, *, idempotency_key: str) -> Any:
    world_of(key).start(key, idempotency_key)
    answer = _runs[key.partition("/")[0]].pause(key, "may I?")
    return f"{answer}:{key}"


@tool(effect="write", settle_after=SETTLE, verify=_verdict)
def odd(key: str, how: How, *, idempotency_key: str) -> Any:
    _act("odd", key, how, idempotency_key)
    return Unstorable()


TOOLS: dict[str, Any] = {t.fn.__name__: t for t in (rd, mdl, idm, tx, wv, wn, asker, odd)}


# -- making them up


def program(rng: random.Random) -> dict[str, Any]:
    """A random program: steps of operations, each plain data."""
    counter = iter(range(1000))
    steps = [[_operation(rng, counter) for _ in range(rng.randint(1, 4))] for _ in range(rng.randint(1, 4))]
    return {"steps": steps, "save_every": rng.choice([1, 1, 1, 2, 3, "milestone"])}


def _operation(rng: random.Random, counter: Any) -> dict[str, Any]:
    kind = rng.choices(["call", "many", "pause", "raise", "milestone"], [10, 3, 1, 2, 0.5])[0]
    n = next(counter)
    match kind:
        case "call":
            return _call(rng, n)
        case "many":
            calls = [_call(rng, next(counter)) for _ in range(rng.randint(2, 4))]
            return {"op": "many", "calls": calls, "errors": rng.random() < 0.6}
        case "raise":
            return {"op": "raise", "n": n, "times": rng.randint(1, 3)}
    return {"op": kind, "n": n}


def _call(rng: random.Random, n: int) -> dict[str, Any]:
    name = rng.choices(list(TOOLS), [3, 3, 2, 2, 4, 2, 0.7, 0.5])[0]
    how: How = {}
    if rng.random() < 0.35:
        how = {
            "fails": rng.randint(1, 3),
            "after": rng.random() < 0.5,
            "kind": rng.choice(["plain", "plain", "refused", "certain"]),
        }
        if how["kind"] != "plain":
            how["after"] = False  # who says that it did not happen must not lie
    if rng.random() < 0.4:
        how["verdicts"] = rng.choices(["true", "unknown", "raise"], [4, 1, 1], k=rng.randint(1, 2))
    return {"op": "call", "tool": name, "n": n, "how": how, "catch": rng.random() < 0.6}


# -- running them


class _Restored:
    def on_restore(self, run: Any) -> None:
        tell("restored", run.recovery.mode, run.recovery.seq)


def run_program(db: str, task: str, world: Any, program: dict[str, Any], nth: int = 0, near: str = "") -> dict[str, Any]:
    """Run or resume it; dies at the nth named point of the library, whichever that is, or the nth whose name begins so."""

    def call(op: dict[str, Any], run: Any) -> None:
        key = f"{task}/{op['n']}"
        tell("call", key, "alone")
        try:
            value = run.call(TOOLS[op["tool"]], key, op["how"])
        except CallFailed:
            tell("failed", key)
            if not op["catch"]:
                raise
        except RefusedType:
            tell("lost", key)
        else:
            tell("got", key, value)
            run.state.messages.append(value)

    def many(op: dict[str, Any], run: Any) -> None:
        keys = [f"{task}/{c['n']}" for c in op["calls"]]
        for key in keys:
            tell("call", key, "many")
        bound = [TOOLS[c["tool"]].bind(key, c["how"]) for c, key in zip(op["calls"], keys, strict=True)]
        try:
            values = run.call_many(bound, return_errors=op["errors"])
        except RefusedType:
            return
        for key, value in zip(keys, values, strict=True):
            if isinstance(value, CallFailed):
                tell("failed", key)
            else:
                tell("got", key, value)

    def step(run: Any) -> None:
        _runs[task] = run
        n = run.state.step
        tell("begin", n)
        for op in program["steps"][n]:
            match op["op"]:
                case "call":
                    call(op, run)
                case "many":
                    many(op, run)
                case "pause":
                    run.state.messages.append(run.pause(f"p{op['n']}", "well?"))
                case "milestone":
                    run.milestone("here")
                case "raise":
                    if world.count(f"raise {op['n']}") <= op["times"]:
                        raise StepError
        if n == len(program["steps"]) - 1:
            run.finish("all done")

    hits = 0

    def hook(name: str) -> None:
        nonlocal hits
        hits += name.startswith(near)
        if hits == nth:
            die()

    with open_here(db, world, (task,)) as cp:
        if not cp.store.transactional_tools:
            TOOLS["tx"] = idm
        if nth:
            _probe.hook = hook
        try:
            return told(
                safepoint.run_agent(
                    step, task_id=task, input="go", store=cp, save_every=program["save_every"], hooks=[_Restored()]
                )
            )
        except (CallFailed, StepError) as error:
            return {"status": "raised", "error": type(error).__name__, "pending": []}

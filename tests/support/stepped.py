"""Agents of named steps that hold an outside resource, to be killed anywhere. Run in children of the fork server."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import safepoint
from safepoint import Done, NotDone, Resource, State, _probe, resource, tool
from tests.support.children import die
from tests.support.effects import World

NAMES = ("plan", "fetch", "report")
CALLS = [f"{name}/{n}" for name in NAMES for n in range(2)]
HOOKS = ("reopen/old", "close/new")

_world: list[World] = []


def was_sent(call: Any) -> Done | NotDone:
    n, value = _world[0].ask(call.arguments["key"])
    return Done(value) if n else NotDone()


@tool(effect="write", verify=was_sent, settle_after=0)
def send(key: str) -> str:
    return _world[0].do("send", key)


def reopened(r: Resource, *, idempotency_key: str) -> Resource:
    _world[0].do("reopen", f"reopen/{r.value}", idempotency_key, dedup=True)
    return Resource("cursor", "new", datetime.now(UTC) + timedelta(hours=1))


def closed(r: Resource, *, idempotency_key: str) -> None:
    _world[0].do("close", f"close/{r.value}", idempotency_key, dedup=True)


def work(run: Any, name: str) -> list[str]:
    got = [run.call(send, f"{name}/{n}") for n in range(2)]
    if name == "fetch":
        got.append("body" * 10_000)
    return got


def program(run: Any) -> list[list[str]]:
    before: tuple[str, ...] = ()
    for name in NAMES:
        run.step(name, lambda name=name: work(run, name), needs=before)
        before = (name,)
    return [run.product(name) for name in NAMES]


def in_handle(cp: Any) -> Any:
    with cp.resume("t") as run:
        if run._control.finished:
            return run._control.turns[-1][3]
        made = program(run)
        run.finish(made)
        run.save()
    return made


def in_agent(cp: Any) -> Any:
    return safepoint.run_agent(lambda run: run.finish(program(run)), task_id="t", store=cp, input="go").result


def begin(url: str) -> None:
    with safepoint.open(url) as cp:
        old = Resource("cursor", "old", datetime.now(UTC) - timedelta(hours=1))
        cp.save(State("t", agent_state={"cursor": old}))


def live(url: str, world: World, how: str, nth: int = 0) -> tuple[Any, int]:
    """Do it all, dying at the nth point of any kind. Returns what was made, and how many points there were."""
    _world[:] = [world]
    hits = [0]

    def hook(_name: str) -> None:
        hits[0] += 1
        if hits[0] == nth:
            die()

    resource("cursor", reopen=reopened, close=closed)
    _probe.hook = hook
    with safepoint.open(url) as cp:
        made = in_handle(cp) if how == "handle" else in_agent(cp)
        cp.close_leftovers("t")
    return made, hits[0]

"""An agent whose model is asked again after a crash, and says the same thing in other words (field case 36)."""

from __future__ import annotations

import json
from typing import Any

import safepoint
from safepoint import Done, NotDone, model, tool
from tests.support import agents, ledgers
from tests.support.agents import SETTLE, kill_at, open_here, told, world_of


def _do(tool_name: str, key: str, n: float, to: dict[str, float], idem: str, **more: Any) -> str:
    return world_of(key).do(tool_name, f"{key}?{json.dumps([n, to], sort_keys=True)}", idem, **more)


def was_done(call: safepoint.Call) -> Done | NotDone:
    a = call.arguments
    n, value = world_of(a["key"]).ask(f"{a['key']}?{json.dumps([a['n'], a['to']], sort_keys=True)}")
    return Done(value) if n else NotDone()


@tool(effect="write", verify=was_done, settle_after=SETTLE)
def verified(key: str, n: float, to: dict[str, float], *, idempotency_key: str) -> str:
    return _do("verified", key, n, to, idempotency_key)


@tool(effect="write")
def blind(key: str, n: float, to: dict[str, float], *, idempotency_key: str) -> str:
    return _do("blind", key, n, to, idempotency_key)


@tool(effect="idempotent")
def idempotent(key: str, n: float, to: dict[str, float], *, idempotency_key: str) -> str:
    return _do("idempotent", key, n, to, idempotency_key, dedup=True)


@tool(effect="transactional")
def transactional(key: str, n: float, to: dict[str, float], *, connection: Any) -> str:
    ledgers.insert(connection, key=key)
    return f"transactional:{key}"


@tool(effect="write", verify=was_done, settle_after=SETTLE, key=lambda key, n, to: key)
def keyed(key: str, n: float, to: dict[str, float], *, idempotency_key: str) -> str:
    return _do("keyed", key, n, to, idempotency_key)


@tool(effect="write", verify=was_done, settle_after=SETTLE, replan="execute")
def executes(key: str, n: float, to: dict[str, float], *, idempotency_key: str) -> str:
    return _do("executes", key, n, to, idempotency_key)


@tool(effect="write", verify=was_done, settle_after=SETTLE, replan="reuse")
def reuses(key: str, n: float, to: dict[str, float], *, idempotency_key: str) -> str:
    return _do("reuses", key, n, to, idempotency_key)


TOOLS: dict[str, Any] = {t.fn.__name__: t for t in (verified, blind, idempotent, transactional, keyed, executes, reuses)}


def _reply(task: str, wording: list[str]) -> dict[str, Any]:
    """What the model says: each time it is asked the next wording, with call ids of its own."""
    n = agents._worlds[task].count(f"{task} asked")
    calls = json.loads(wording[min(n, len(wording)) - 1])
    return {
        "role": "assistant",
        "tool_calls": [
            {"id": f"call_{n}_{i}", "name": name, "arguments": json.dumps(arguments)}
            for i, (name, arguments) in enumerate(calls)
        ],
    }


@model
def ask_model(task: str, wording: list[str]) -> dict[str, Any]:
    return _reply(task, wording)


def run(db: str, task: str, world: Any, wording: list[str], journaled: bool, point: str = "", nth: int = 1) -> dict[str, Any]:
    """One task of one step: ask the model, do what it says, finish with the results."""

    def step(run: Any) -> None:
        reply = run.call(ask_model, task, wording) if journaled else _reply(task, wording)
        results = [run.call_tool(TOOLS[c["name"]], c["arguments"], call_id=c["id"]) for c in reply["tool_calls"]]
        run.finish(results)

    with open_here(db, world, (task,)) as cp:
        if point:
            kill_at(point, nth)
        return told(safepoint.run_agent(step, task_id=task, input="go", store=cp))

"""Agents that are busy while their server goes away and comes back: each tells the test what was acknowledged to it."""

from __future__ import annotations

import time
from collections import Counter
from functools import partial
from typing import Any

import safepoint
from safepoint import LeaseHeld, NotFound, Retention, State, Unavailable
from tests.support import fleet
from tests.support.children import tell


class _Tells:
    def after_commit(self, run: Any, checkpoint: Any) -> None:
        tell("saved", run.task_id, checkpoint.seq, checkpoint.id)


def agent(url: str, task: str, steps: int, path: str, ledger: str, longest: float, options: dict[str, Any]) -> dict[str, Any]:
    """Run to the end, whatever the server does; an agent that is told ``Unavailable`` calls again."""
    fleet.ready_here(path, len(task), longest, ledger)
    met: Counter[str] = Counter()
    slowest = 0.0

    def step(run: Any) -> None:
        n = run.state.step
        for name in ("hand1", "hand2"):
            key = f"{task}/{n}/{name}"
            value = run.call(fleet.hand, key)
            tell("got", task, key, value)
            run.state.messages.append(value)
        if ledger:
            tell("booked", task, run.call(fleet.book, f"{task}/{n}/book"))
        if n == steps - 1:
            run.finish(f"done:{task}")

    with safepoint.open(url, retention=Retention.keep_all(), **options) as cp:
        while True:
            begun = time.monotonic()
            try:
                outcome = safepoint.run_agent(step, task_id=task, input="work", store=cp, hooks=[_Tells()])
            except (Unavailable, LeaseHeld) as error:
                met[type(error).__name__] += 1
                tell("noticed", task, f"{error} {error.details}")
                time.sleep(0.02)
                continue
            finally:
                slowest = max(slowest, time.monotonic() - begun)
            assert outcome.status == "finished", outcome
            return {"met": met, "result": outcome.result, "previous": outcome.recovery and outcome.recovery.previous}


def saver(url: str, task: str, steps: int, options: dict[str, Any]) -> dict[str, Any]:
    """Explicit saves, ``steps`` of them; one of which nobody knows whether it landed is asked for by its id, and saved again under
    that id if it is not there: it may land later still."""
    met: Counter[str] = Counter()

    def ask(fn: Any) -> Any:
        while True:
            try:
                return fn()
            except Unavailable:
                met["Unavailable"] += 1
                time.sleep(0.02)

    with safepoint.open(url, retention=Retention.keep_all(), **options) as cp:
        state = State(task)
        id: str | None = None
        for n in range(1, steps + 1):
            state.agent_state["n"] = n
            state.messages.append(f"{task} {n}")
            while True:
                try:
                    head = cp.save(state, id=id)
                except Unavailable as error:
                    met["Unavailable"] += 1
                    id = error.details.get("id", id)
                    if id is None:
                        continue  # nothing was sent
                    try:
                        state = ask(partial(cp.load, task, id=id))
                    except NotFound:
                        met["absent"] += 1
                        continue
                    met["there"] += 1
                    tell("saved", task, state.seq, id)
                else:
                    tell("saved", task, head.seq, head.id)
                id = None
                break
            time.sleep(0.01)
        ask(lambda: cp.finish(task, "saved"))
        return {"met": met, "result": "saved", "previous": None}

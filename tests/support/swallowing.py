"""Agents that swallow everything, to show that nothing gets past the end of a run."""

from __future__ import annotations

from typing import Any

import safepoint
from safepoint import tool
from tests.support import agents
from tests.support.agents import open_here, told, url_of, world_of
from tests.support.children import hear, tell


@tool(effect="write")
def breaks(key: str) -> str:
    """Does it, and then loses the reply."""
    world_of(key).do("breaks", key)
    raise TimeoutError("no reply")


@tool(effect="write")
async def breaks_async(key: str) -> str:
    world_of(key).do("breaks", key)
    raise TimeoutError("no reply")


def says_nothing(call: safepoint.Call) -> Any:
    raise ConnectionError("nobody there")


@tool(effect="write", verify=says_nothing, settle_after=0.01)
def unverifiable(key: str) -> str:
    world_of(key).do("unverifiable", key)
    raise TimeoutError("no reply")


@tool(effect="idempotent")
def asks_inside(key: str) -> Any:
    run = _runs[key.partition("/")[0]]
    try:
        return run.pause("inside", "?")
    except BaseException:
        return "swallowed"


_runs: dict[str, Any] = {}


def _first(end: str, run: Any, key: str) -> list[Any]:
    """The operations, to be called one by one, of which the first ends the run."""
    calls: dict[str, Any] = {
        "in-doubt": lambda: run.call(breaks, f"{key}/first"),
        "in-doubt-async-tool": lambda: run.call(breaks_async, f"{key}/first"),
        "in-doubt-verified": lambda: run.call(unverifiable, f"{key}/first"),
        "in-doubt-many": lambda: run.call_many(
            [breaks.bind(f"{key}/first"), agents.TOOLS["put"].bind(f"{key}/beside")], return_errors=True
        ),
        "pause": lambda: run.pause("p", "?"),
        "pause-inside": lambda: run.call(asks_inside, f"{key}/first"),
        "lost": lambda: run.call(agents.TOOLS["send"], f"{key}/first"),
    }
    return [
        calls[end],
        lambda: run.call(agents.TOOLS["send"], f"{key}/after"),
        lambda: run.call(agents.TOOLS["look"], f"{key}/look"),
        lambda: run.call(agents.TOOLS["book"], f"{key}/book"),
        lambda: run.call_many([agents.TOOLS["put"].bind(f"{key}/put1"), agents.TOOLS["put"].bind(f"{key}/put2")]),
        lambda: run.pause("later", "?"),
        lambda: run.milestone("later"),
        lambda: run.finish("never"),
    ]


def _swallowed(ops: list[Any]) -> None:
    for op in ops:
        try:
            op()
        except BaseException as error:
            tell("swallowed", type(error).__name__)


async def _swallowed_async(ops: list[Any]) -> None:
    for op in ops:
        try:
            value = op()
            if hasattr(value, "__await__"):
                await value
        except BaseException as error:
            tell("swallowed", type(error).__name__)


def _stolen(end: str) -> None:
    if end == "lost":
        tell("stands")
        hear()


def _name(error: BaseException) -> dict[str, Any]:
    return {"status": "raised", "error": type(error).__name__}


def in_agent(db: str, task: str, world: Any, end: str) -> dict[str, Any]:
    def step(run: Any) -> None:
        _runs[task] = run
        if run.state.step == 0:
            run.state.messages.append("a whole step")
            return
        run.state.messages.append("must never be saved")
        _stolen(end)
        _swallowed(_first(end, run, task))

    with open_here(db, world, (task,)) as cp:
        try:
            return told(safepoint.run_agent(step, task_id=task, input="go", store=cp))
        except safepoint.SafepointError as error:
            return _name(error)


def in_handle(db: str, task: str, world: Any, end: str) -> dict[str, Any]:
    with open_here(db, world, (task,)) as cp:
        try:
            with cp.resume(task) as run:
                _runs[task] = run
                run.state.messages.append("a whole step")
                run.save()
                run.state.messages.append("must never be saved")
                _stolen(end)
                _swallowed([*_first(end, run, task), run.save, run.save])
        except safepoint.SafepointError as error:
            return _name(error)
    return {"status": "left"}


def in_agent_async(db: str, task: str, world: Any, end: str) -> dict[str, Any]:
    import asyncio

    async def step(run: Any) -> None:
        _runs[task] = run
        if run.state.step == 0:
            run.state.messages.append("a whole step")
            return
        run.state.messages.append("must never be saved")
        _stolen(end)
        await _swallowed_async(_first(end, run, task))

    open_here(db, world, (task,)).close()
    try:
        return told(asyncio.run(safepoint.run_agent_async(step, task_id=task, input="go", store=url_of(db))))
    except safepoint.SafepointError as error:
        return _name(error)


def in_handle_async(db: str, task: str, world: Any, end: str) -> dict[str, Any]:
    import asyncio

    async def main() -> dict[str, Any]:
        async with safepoint.open_async(url_of(db)) as acp:
            try:
                async with acp.resume(task) as run:
                    _runs[task] = run
                    run.state.messages.append("a whole step")
                    await run.save()
                    run.state.messages.append("must never be saved")
                    _stolen(end)
                    await _swallowed_async([*_first(end, run, task), run.save, run.save])
            except safepoint.SafepointError as error:
                return _name(error)
        return {"status": "left"}

    open_here(db, world, (task,)).close()
    return asyncio.run(main())


FACES: dict[str, Any] = {f.__name__: f for f in (in_agent, in_handle, in_agent_async, in_handle_async)}

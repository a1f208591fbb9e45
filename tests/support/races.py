"""Children of test_races.py: processes that want the same task, file or moment."""

from __future__ import annotations

import random
import re
import time
from typing import Any

import safepoint
from safepoint import Conflict, Done, LeaseHeld, NotDone, Retention, RunEnded, SafepointError, State, _probe, tool
from tests.support import agents
from tests.support.agents import SETTLE, open_here, told, url_of, world_of
from tests.support.children import hear, tell


def at_once(moment: float) -> None:
    """Wait, without sleeping at the end, for a moment that several processes were told."""
    time.sleep(max(0.0, moment - time.monotonic() - 0.002))
    while time.monotonic() < moment:
        pass


def name_of(error: BaseException) -> str:
    return type(error.error).__name__ if isinstance(error, RunEnded) else type(error).__name__


# -- one task, several takers


def taker(db: str, task: str) -> None:
    """Try to take the task at each moment that is heard; hold it until told to let go."""
    with safepoint.open(url_of(db)) as cp:
        cp.status(task)
        tell("ready")
        while (moment := hear()) is not None:
            at_once(moment)
            try:
                run = cp.resume(task)
            except LeaseHeld as error:
                tell("refused", error.details["holder"]["pid"])
                continue
            tell("held", run.fence)
            assert hear() == "let go"
            run.close()
            tell("free")


def holder(db: str, task: str, world: Any) -> None:
    """Take the task, and then try the verbs that are heard; tells what each came to."""
    with open_here(db, world, (task,)) as cp:
        state = State(task)
        try:
            with cp.resume(task) as run:
                state = run.state
                tell("held", run.fence)
                while (verb := hear()) != "leave":
                    try:
                        tell("did", verb, _try(run, verb, task))
                    except BaseException as error:
                        tell("failed", verb, name_of(error))
        except SafepointError as error:
            tell("left", name_of(error))
        else:
            tell("left", "")
        if hear() == "save its state":
            try:
                cp.save(state)
            except SafepointError as error:
                tell("failed", "save its state", name_of(error))
            else:
                tell("did", "save its state", None)


def _try(run: Any, verb: str, task: str) -> Any:
    key = f"{task}/{verb.replace(' ', '-')}"
    match verb:
        case "write":
            return run.call(agents.send, key)
        case "read":
            return run.call(agents.look, key)
        case "idempotent":
            return run.call(agents.put, key)
        case "model":
            return run.call(agents.think, key, [])
        case "transactional":
            return run.call(agents.TOOLS["book"], key)
        case "call_many":
            return run.call_many([agents.TOOLS["put"].bind(key + "a"), agents.TOOLS["send"].bind(key + "b")])
        case "save":
            run.state.messages.append("x")
            return run.save().seq
        case "pause":
            return run.pause("p", "?")
        case "finish":
            run.finish("done")
            return run.save().seq
        case "milestone":
            run.milestone("m")
            return run.save().seq
    raise AssertionError(verb)


def thief(db: str, task: str) -> tuple[int, str]:
    """Take the task by force, save, and let go."""
    with safepoint.open(url_of(db)) as cp, cp.resume(task, steal=True) as run:
        run.state.agent_state["thief"] = True
        run.save()
        return run.fence, run.recovery.previous


# -- a write that is under way in a holder that is stopped


def _ask(call: safepoint.Call) -> Any:
    key = call.arguments["key"]
    n, value = world_of(key).ask(key)
    return Done(value) if n else NotDone()


def _late(name: str, key: str, idem: str, dedup: bool = False) -> str:
    tell("in tool", key)
    if hear() == "do it first":
        value = world_of(key).do(name, key, idem, dedup=dedup)
        tell("done", key)
        hear()
        return value
    return world_of(key).do(name, key, idem, dedup=dedup)


@tool(effect="write", verify=_ask, settle_after=SETTLE)
def checked(key: str, *, idempotency_key: str) -> str:
    return _late("checked", key, idempotency_key)


@tool(effect="write", verify=_ask, settle_after=SETTLE, verify_is_final=True)
def final(key: str, *, idempotency_key: str) -> str:
    return _late("final", key, idempotency_key)


@tool(effect="write", verify=_ask, settle_after=SETTLE, receiver_dedups=True)
def deduped(key: str, *, idempotency_key: str) -> str:
    return _late("deduped", key, idempotency_key, dedup=True)


@tool(effect="write")
def unchecked(key: str, *, idempotency_key: str) -> str:
    return _late("unchecked", key, idempotency_key)


@tool(effect="idempotent")
def repeatable(key: str, *, idempotency_key: str) -> str:
    return _late("repeatable", key, idempotency_key, dedup=True)


SLOW: dict[str, Any] = {t.fn.__name__: t for t in (checked, final, deduped, unchecked, repeatable)}


def one_write(db: str, task: str, world: Any, name: str, steal: bool = False) -> dict[str, Any]:
    """An agent of one slow write; the thief is the same agent."""

    def step(run: Any) -> None:
        run.finish(run.call(SLOW[name], f"{task}/x"))

    with open_here(db, world, (task,)) as cp:
        try:
            return told(safepoint.run_agent(step, task_id=task, input="go", store=cp, steal=steal))
        except SafepointError as error:
            return {"status": "raised", "error": name_of(error)}


def stands_at(db: str, task: str, world: Any, name: str, point: str) -> dict[str, Any]:
    """The same agent, which stands still at a named point of its first call until it is told to go on."""

    def hook(reached: str) -> None:
        if reached == point:
            _probe.hook = None
            tell("stands")
            hear()

    _probe.hook = hook
    return one_write(db, task, world, name)


# -- tools that take long


def deaf(seconds: float) -> float:
    """Hold the GIL inside one call of C for about so long, or longer."""
    begun = time.monotonic()
    n = 18
    while True:
        last = time.monotonic()
        re.match(r"(a+)+$", "a" * n + "b")
        if time.monotonic() - last >= seconds:
            return time.monotonic() - begun
        n += 1


@tool(effect="write")
def long_tool(seconds: float, gil: bool) -> str:
    tell("in tool")
    if gil:
        deaf(seconds)
    else:
        time.sleep(seconds)
    return "done"


def slow_agent(db: str, task: str, seconds: float, gil: bool, lease: float) -> dict[str, Any]:
    def step(run: Any) -> None:
        run.finish(run.call(long_tool, seconds, gil))

    with safepoint.open(url_of(db), lease=lease) as cp:
        return told(safepoint.run_agent(step, task_id=task, input="go", store=cp))


def tries(db: str, task: str) -> str:
    """Whether the task can be taken."""
    with safepoint.open(url_of(db)) as cp:
        try:
            cp.resume(task).close()
        except LeaseHeld:
            return "LeaseHeld"
    return "taken"


# -- many savers


def alone(db: str, task: str, count: int, size: int = 1000, stop: bool = False) -> list[int]:
    """Save a task of one's own so often, or until told to stop; any error is raised."""
    seqs: list[int] = []
    with safepoint.open(url_of(db), retention=Retention.keep_all()) as cp:
        state = cp.load_latest(task) or State(task)
        tell("ready")
        hear()
        while len(seqs) < count:
            state.messages[-50:] = [*state.messages[-49:], random.randbytes(size // 2).hex()]
            state.step += 1
            head = cp.save(state)
            seqs.append(head.seq)
            tell("saved", task, head.seq)
            if stop and _told_to_stop():
                break
            if stop:
                time.sleep(0.01)
    return seqs


def _told_to_stop() -> bool:
    from tests.support import children

    assert children.channel is not None
    return children.channel.ready(0)


def together(db: str, task: str, count: int) -> tuple[list[int], int]:
    """Save one task against others: load, change, save. Returns the seqs that landed, and the number of conflicts."""
    seqs, conflicts = [], 0
    with safepoint.open(url_of(db), retention=Retention.keep_all()) as cp:
        tell("ready")
        hear()
        for i in range(count):
            state = cp.load_latest(task) or State(task)
            state.agent_state[f"{i % 7}"] = random.random()
            state.step += 1
            before = (state.seq, state.created_at)
            try:
                seqs.append(cp.save(state).seq)
            except Conflict:
                conflicts += 1
                assert (state.seq, state.created_at) == before, "a save that raised changed the state"
    return seqs, conflicts


def replacing(db: str, task: str, count: int, me: int) -> tuple[int, int]:
    """Save one task against others, with retention: parts are replaced, shared, and come back. Returns landed, conflicts."""
    landed = conflicts = 0
    rng = random.Random(me)
    with safepoint.open(url_of(db), retention=Retention(keep_latest=2)) as cp:
        tell("ready")
        hear()
        for _ in range(count):
            state = cp.load_latest(task) or State(task)
            # A few contents only, so that what one save drops another brings back; large enough to be sent ahead, or small.
            size = rng.choice([20_000, 300_000])
            for _ in range(6):
                at = rng.randrange(len(state.messages) + 1)
                state.messages[at : at + rng.randint(1, 2)] = [agents.page(rng.randrange(8), 0, size)]
            del state.messages[12:]
            try:
                cp.save(state)
                landed += 1
            except Conflict:
                conflicts += 1
    return landed, conflicts


def sweeping(db: str, task: str) -> int:
    """Clean up and look at what is left, until told to stop."""
    swept = 0
    with safepoint.open(url_of(db)) as cp:
        tell("ready")
        hear()
        while not _told_to_stop():
            if cp.load_latest(task) is not None:
                swept += len(cp.cleanup(task, keep_latest=1).deleted)
    return swept


def half_reader(db: str, task: str) -> list[int]:
    """Read the first page of two listings, stand still while others save, read on when told."""
    with safepoint.open(url_of(db)) as cp:
        page = cp.list_checkpoints(task, limit=5)
        rows = cp.store.tasks(limit=1)
        tell("half", [h.seq for h in page])
        hear()
        found = [h.seq for h in page]
        while page:
            page = cp.list_checkpoints(task, before=found[-1], limit=50)
            found += [h.seq for h in page]
        while rows:
            rows = cp.store.tasks(after=rows[-1].task, limit=1)
        return found


def big(db: str, task: str, megabytes: int) -> int:
    """Save one state of so many MB."""
    state = State(task, messages=[random.Random(i).randbytes(1_000_000) for i in range(megabytes)])
    with safepoint.open(url_of(db)) as cp:
        tell("ready")
        hear()
        seq = cp.save(state).seq
        tell("saved", task, seq)
        return seq


def big_dies(db: str, task: str, megabytes: int, nth: int) -> None:
    agents.kill_at("commit.staged", nth)
    big(db, task, megabytes)


# -- one task delivered to several


@tool(effect="write")
def deliver_once(key: str, wait: bool) -> str:
    value = world_of(key).do("deliver_once", key)
    if wait:
        tell("in tool")
        hear()
    return value


def delivery(db: str, task: str, world: Any, moment: float, wait: bool = False) -> Any:
    def step(run: Any) -> None:
        run.finish(run.call(deliver_once, f"{task}/x", wait))

    with open_here(db, world, (task,)) as cp:
        tell("ready")
        at_once(moment or hear())
        try:
            return told(safepoint.run_agent(step, task_id=task, input="the job", store=cp))
        except LeaseHeld:
            return "LeaseHeld"

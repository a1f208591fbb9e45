"""The agents that the crash tests kill. Their functions run in children of the fork server; see children.py."""

from __future__ import annotations

import random
import threading
from collections import Counter
from typing import Any

import safepoint
from safepoint import Call, Done, NotDone, Retention, State, _probe, model, tool
from tests.support import ledgers
from tests.support.children import die, tell
from tests.support.effects import World

SETTLE = 0.01

_worlds: dict[str, World] = {}
"""By task: every key begins with its task, so a tool finds its world on any thread."""


def world_of(key: str) -> World:
    return _worlds[key.partition("/")[0]]


# -- tools: each says its key to the world, which counts


@model
def think(key: str, messages: list[Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": world_of(key).do("think", key), "usage": {"input_tokens": len(messages)}}


def was_sent(call: Call) -> Done | NotDone:
    n, value = world_of(call.arguments["key"]).ask(call.arguments["key"])
    return Done(value) if n else NotDone()


@tool(effect="write", verify=was_sent, settle_after=SETTLE)
def send(key: str, *, idempotency_key: str) -> str:
    _probe.at("inside.before")
    value = world_of(key).do("send", key, idempotency_key)
    _probe.at("inside.after")
    return value


@tool(effect="write")
def post(key: str, *, idempotency_key: str) -> str:
    _probe.at("inside.before")
    value = world_of(key).do("post", key, idempotency_key)
    _probe.at("inside.after")
    return value


@tool(effect="idempotent")
def put(key: str, *, idempotency_key: str) -> str:
    _probe.at("inside.before")
    value = world_of(key).do("put", key, idempotency_key, dedup=True)
    _probe.at("inside.after")
    return value


@tool(effect="transactional")
def book(key: str, *, connection: Any) -> str:
    ledgers.insert(connection, key=key)
    _probe.at("inside.before")
    return f"book:{key}"


@tool(effect="read")
def look(key: str) -> str:
    return world_of(key).do("look", key)


TOOLS: dict[str, Any] = {t.name.rpartition(".")[2]: t for t in (think, send, post, put, book, look)}
ONCE = ("send", "post", "put")
"""Tools whose effect the world must have seen once for each key; a put may be asked for again, and is then no effect."""

PROGRAM: tuple[tuple[str, ...], ...] = (("send",), ("post",), ("put", "book"), ("look", "post"), ("send+", "put+", "book+"))
"""Tools called in each step, after the model; those with + at the same time."""


def keys_of(task: str) -> dict[str, list[str]]:
    """All keys of a whole run of PROGRAM, by tool."""
    found: dict[str, list[str]] = {name: [] for name in TOOLS}
    for n, names in enumerate(PROGRAM):
        found["think"].append(f"{task}/{n}/think")
        for i, name in enumerate(names):
            found[name.rstrip("+")].append(f"{task}/{n}/{i}")
    return found


def working_step(run: Any) -> None:
    """One step of PROGRAM; tells each result once the library has given it out."""
    n, task = run.state.step, run.task_id

    def got(key: str, value: Any) -> Any:
        tell("got", task, key, value["content"] if isinstance(value, dict) else value)
        return value

    key = f"{task}/{n}/think"
    run.state.messages.append(got(key, run.call(think, key, run.state.messages)))
    names = PROGRAM[n]
    many = [(f"{task}/{n}/{i}", TOOLS[name[:-1]]) for i, name in enumerate(names) if name.endswith("+")]
    for i, name in enumerate(names):
        if not name.endswith("+"):
            key = f"{task}/{n}/{i}"
            _calling[:] = [name]
            value = got(key, run.call(TOOLS[name], key))
            _calling[:] = []
            run.state.messages.append({"role": "tool", "key": key, "content": value})
    if many:
        for (key, _), value in zip(many, run.call_many([t.bind(key) for key, t in many]), strict=True):
            run.state.messages.append({"role": "tool", "key": key, "content": got(key, value)})
    if n == len(PROGRAM) - 1:
        run.finish(f"done:{task}")


class _Tells:
    def after_commit(self, run: Any, checkpoint: Any) -> None:
        tell("saved", run.task_id, checkpoint.seq, checkpoint.step)


_calling: list[str] = []
"""The tool that the step is calling, if it is one alone."""


def kill_at(point: str, nth: int, during: str = "") -> None:
    """Die when the library reaches this point for the nth time; with ``during``, in calls of this tool."""
    hits: Counter[str] = Counter()
    lock = threading.Lock()

    def hook(name: str) -> None:
        with lock:
            hits[name] += not during or _calling == [during]
            if name == point and hits[name] == nth:
                die()

    _probe.hook = hook


def count_points(into: Counter[str]) -> None:
    lock = threading.Lock()

    def hook(name: str) -> None:
        with lock:
            into[name] += 1

    _probe.hook = hook


def open_here(db: str, world: World, tasks: tuple[str, ...], **options: Any) -> safepoint.Checkpointer:
    for task in tasks:
        _worlds[task] = world
    cp = safepoint.open(url_of(db), **options)
    if not ledgers.make(cp):
        TOOLS["book"] = put
    return cp


def url_of(db: str) -> str:
    return db if "://" in db else f"sqlite:///{db}"


def told(outcome: safepoint.Outcome) -> dict[str, Any]:
    """What of an outcome can travel."""
    return {
        "status": outcome.status,
        "result": outcome.result,
        "steps": outcome.steps,
        "messages": outcome.state.messages,
        "pending": [(p.no, getattr(p, "tool", "pause"), getattr(p, "arguments", {}).get("key")) for p in outcome.pending],
        "mode": outcome.recovery.mode if outcome.recovery else None,
        "seq": outcome.recovery.seq if outcome.recovery else None,
        "previous": outcome.recovery.previous if outcome.recovery else None,
    }


def work(
    db: str, task: str, world: World, point: str = "", nth: int = 0, during: str = ""
) -> tuple[dict[str, Any], Counter[str]]:
    """Run PROGRAM for one task, dying at a point if one is named. Returns the outcome and how often points were reached."""
    hits: Counter[str] = Counter()
    with open_here(db, world, (task,)) as cp:
        kill_at(point, nth, during) if point else count_points(hits)
        outcome = safepoint.run_agent(working_step, task_id=task, input="work", store=cp, hooks=[_Tells()])
    return told(outcome), hits


def work_many(db: str, tasks: tuple[str, ...], world: World, **options: Any) -> dict[str, dict[str, Any]]:
    """Run PROGRAM for several tasks at once, each on a thread of its own."""
    outcomes: dict[str, dict[str, Any]] = {}
    errors: list[BaseException] = []

    def one(task: str) -> None:
        try:
            outcomes[task] = told(safepoint.run_agent(working_step, task_id=task, input="work", store=cp, hooks=[_Tells()]))
        except BaseException as error:
            errors.append(error)

    with open_here(db, world, tasks, **options) as cp:
        threads = [threading.Thread(target=one, args=(task,)) for task in tasks]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    for error in errors:
        raise error
    return outcomes


# -- explicit saves


def page(i: int, j: int, size: int) -> str:
    """Content that can be made again and is unlike any other page's."""
    return f"{i}.{j}." + random.Random(f"{i}.{j}").randbytes(size // 2).hex()


def saver(
    db: str, task: str, rounds: int, size: int, point: str = "", nth: int = 0, keep: int = 2, **options: Any
) -> Counter[str]:
    """Save big states one after the other, each with new content; goes on from what is stored."""
    hits: Counter[str] = Counter()
    with safepoint.open(url_of(db), retention=Retention(keep_latest=keep), **options) as cp:
        kill_at(point, nth) if point else count_points(hits)
        state = cp.load_latest(task) or State(task)
        for i in range(state.agent_state.get("i", 0) + 1, rounds + 1):
            state.agent_state["i"] = i
            state.messages[:] = [page(i, j, size // 8) for j in range(8)]
            head = cp.save(state)
            tell("saved", task, head.seq, i)
    return hits

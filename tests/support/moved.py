"""Tasks that have some of everything, what is told of them, and programs that move them and may be killed."""

from __future__ import annotations

import os
import signal
from datetime import UTC, datetime
from typing import Any

import safepoint
from safepoint import DidNotHappen, State, _probe, model, run_agent, tool
from safepoint.codec import chunks
from safepoint.codec.registry import Registry
from safepoint.model import new_id
from safepoint.rows import Commit, Head, WriteRow, replace
from safepoint.stores.memory import MemoryStore

__all__ = ["Flat", "copying", "exporting", "facts", "fill", "fill_url", "importing", "rich", "told", "written"]


class Flat(MemoryStore):
    """A store that keeps each state whole, without the rest of what a file store is."""

    chunked = False


@model
def ask(messages: list[Any]) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": f"reply {len(messages)} " + "r" * 300,
        "usage": {"prompt_tokens": 1, "completion_tokens": 2},
    }


@tool(effect="write", name="moved.send")
def send(to: str, big: int) -> dict[str, Any]:
    return {"sent": to, "at": datetime(2026, 1, 1, tzinfo=UTC), "big": big, "bytes": b"\0\xff"}


@tool(effect="write", name="moved.lost")
def lost(to: str) -> str:
    raise TimeoutError("no reply")


@tool(effect="write", name="moved.refused")
def refused(to: str) -> str:
    raise DidNotHappen("the box is full")


def rich(cp: Any, task: str, *, steps: int = 7) -> None:
    """A task with steps, replies, a failed call, one in doubt, an answered and an open pause, pins, labels, a branch, a failure,
    and what an adapter recorded against two checkpoints and one that never came."""

    def step(run: Any) -> None:
        n = run.state.step
        run.state.messages.append(run.call(ask, run.state.messages))
        run.state.agent_state.update(
            phase=f"phase {n}", when=datetime(2026, 1, n + 1, tzinfo=UTC), seen={n, n + 1}, big=2**200 + n, long="x" * (900 + n)
        )
        run.state.metadata["n"] = n
        run.call(send, f"ann{n}@example.com", big=2**70 + n)
        if n == 2:
            try:
                run.call(refused, "bob")
            except safepoint.CallFailed:
                pass
        if n == 3:
            assert run.pause("go on?", {"n": n}) == {"yes": (1, 2)}
        if n == 4:
            run.milestone("halfway")
        if n == steps - 1:
            run.call(lost, "carol")

    first = run_agent(step, task_id=task, input={"role": "user", "content": "do it"}, store=cp, max_steps=50)
    assert first.status == "waiting"
    cp.answer(task, 1, {"yes": (1, 2)})
    second = run_agent(step, task_id=task, store=cp, max_steps=50)
    assert second.status == "waiting"
    heads = cp.list_checkpoints(task)
    cp.pin(task, heads[-2].seq)
    row, objects = cp.store.read(task, seq=heads[3].seq)
    # A branch with a journal line of its own, by the store's own verb.
    new = replace(row, id=new_id(), branch="other", parent_seq=row.seq, kind="manual", label="aside", seq=0, seal=b"")
    base = Head(row.seq, row.id)
    cp.store.commit(Commit(task=task, id=new.id, checkpoint=new, expect=None, objects=tuple(objects.values()), stands_on=base))
    written(cp, task, row.id, rows=3, shared=str(heads[0].seq))
    written(cp, task, "never", space="ns|1", rows=1)
    cp.store.commit(Commit(task=task, id=new_id(), writes=(WriteRow(checkpoint=heads[0].id, writer="mark", idx=-7),)))


def written(cp: Any, task: str, checkpoint: str, *, space: str = "", rows: int = 1, shared: str = "") -> None:
    """Record values against a checkpoint, as an adapter does."""
    found: list[WriteRow] = []
    objects: list[Any] = []
    for idx in range(-1, rows - 1):
        value = {
            "values": [["channel", {"big": "w" * 700 + shared, "at": datetime(2026, 1, 1, tzinfo=UTC), "idx": 2**70 + idx}]]
        }
        packed = chunks.pack(value, Registry(), flat=not cp.store.chunked)
        row = WriteRow(space=space, checkpoint=checkpoint, writer=f"w{idx % 2}", idx=idx, path=f"p{idx}", data=packed.data)
        found.append(replace(row, refs=packed.refs))
        objects += packed.new
    cp.store.commit(Commit(task=task, id=new_id(), writes=tuple(found), objects=tuple({o.name: o for o in objects}.values())))


def told(cp: Any, task: str) -> list[Any]:
    """What adapters recorded, in values."""
    rows, objects = cp.store.writes(task, space=None)
    return [(*r.key, r.path, chunks.unpack_plain(r.data, r.refs, objects) if r.data else None) for r in rows]


def fill(cp: Any) -> None:
    """A store of several tasks."""
    rich(cp, "rich")
    state = State("kept")
    for i in range(10):
        state.step = i
        state.messages.append({"role": "user", "content": f"message {i} " + "m" * (i * 7)})
        cp.save(state, label=f"label {i}")
    for name in ("../../x", "a/b", "日本語", "x" * 512, "CON"):
        cp.save(State(name, messages=[{"role": "user", "content": name}], metadata={"file": "../../x", "name": name}))

    def failing(run: Any) -> None:
        raise ZeroDivisionError

    try:
        run_agent(failing, task_id="failing", store=cp)
    except ZeroDivisionError:
        pass
    run_agent(lambda run: run.finish({"done": 2**80}), task_id="done", input="go", store=cp)


def facts(cp: Any, task: str) -> dict[str, Any]:
    """All that the public verbs tell of a task, without what its store alone decides."""
    info = cp.status(task)
    rows = cp.list_checkpoints(task)
    states = {row.seq: cp.load(task, seq=row.seq) for row in rows}
    return {
        "status": (info.status, info.branch, info.seq, info.step, info.agent, info.reason, info.attempts, info.checkpoints, info.pending),
        "headers": [
            (r.seq, r.id, r.branch, r.parent_seq, r.step, r.kind, r.label, r.created_at, r.schema_version, r.pinned, r.metadata, r.metrics)
            for r in rows
        ],
        "states": {seq: (s.messages, s.agent_state, s.metadata, s.step) for seq, s in states.items()},
        "calls": [
            (c.no, c.tool, c.arguments, c.call_id, c.idempotency_key, c.status, c.attempts, c.step, c.result, c.error, c.model, c.reason)
            for c in cp.calls(task)
        ],
        "pauses": [(p.no, p.name, p.question, p.status, p.step, p.answer, p.asked_at) for p in cp.pauses(task, status=None)],
        "branches": sorted((b.space, b.name, b.head, b.line, b.forked_from) for b in cp.store.branches(task, None)),
        "writes": told(cp, task),
        "plan": [(c.call.no, c.action) for c in cp.plan(task).calls],
    }  # fmt: skip


def _kill_at(point: str, nth: int) -> None:
    left = nth

    def hook(name: str) -> None:
        nonlocal left
        if name == point:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    if point:
        _probe.hook = hook
    if point == "write_task.staged":
        from safepoint.stores.postgres import whole

        whole.BATCH = 2_000  # there it lies in what is sent in several batches, which the tests' tasks are too small for


def copying(source: str, target: str, point: str = "", nth: int = 1) -> int:
    """Copy a whole store; killed at the nth time that a point is passed."""
    _kill_at(point, nth)
    with safepoint.open(source) as cp:
        return len(cp.copy_to(target).tasks)


def importing(file: str, target: str, point: str = "", nth: int = 1) -> str:
    _kill_at(point, nth)
    with safepoint.open(target) as cp:
        return cp.import_(file).result


def exporting(source: str, task: str, file: str, point: str = "", nth: int = 1) -> int:
    _kill_at(point, nth)
    with safepoint.open(source) as cp:
        return cp.export(task, file).bytes


def fill_url(url: str) -> None:
    with safepoint.open(url) as cp:
        fill(cp)

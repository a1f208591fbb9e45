"""A life of a few tasks behind a line that may break, lived by somebody who reacts to ``Unavailable`` as the docs advise.

Whatever the line does, what is stored at the end must be what is stored without any fault: ``facts`` are equal. Who is told that
nobody knows whether a save landed asks for its id; who is told that a run cannot go on resumes the task.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from safepoint import (
    AlreadyAnswered,
    Call,
    DecisionNeeded,
    Done,
    NotDone,
    NotFound,
    Retry,
    State,
    Unavailable,
    tool,
)
from safepoint.checkpointer import Checkpointer

__all__ = ["Life", "facts"]

T = TypeVar("T")

_sent: Counter[str] = Counter()
_begun: Counter[str] = Counter()
"""How often the body of a transactional tool was entered."""
_insert = ""


def _was_sent(call: Call) -> Done | NotDone:
    key = call.arguments["key"]
    return Done(f"sent {key}") if _sent[key] else NotDone()


@tool(effect="write", verify=_was_sent, settle_after=0.001)
def send(key: str) -> str:
    _sent[key] += 1
    return f"sent {key}"


@tool(effect="read")
def look(key: str) -> list[str]:
    return [key] * 20


@tool(effect="idempotent")
def put(key: str, *, idempotency_key: str) -> str:
    return key


@tool(effect="transactional", retry=Retry(4, 0.001))
def book(key: str, *, connection: Any) -> str:
    _begun[key] += 1
    connection.execute(_insert, (key,))
    return f"booked {key}"


TOOLS: dict[str, Any] = {"send": send, "put": put}


class Life:
    """One life: tasks ``<name>.a`` to ``<name>.c``.

    Args:
        cp: Goes through the line, and is never opened anew.
        healed: Called after each Unavailable; from then on the line is whole again.
        late: By how many seconds a request may arrive late: that of a task's first save, which was repeated meanwhile, would begin
            it anew if somebody had deleted it before.
    """

    def __init__(self, cp: Checkpointer, name: str, ledger: str, healed: Callable[[], None], late: float = 0.0) -> None:
        global _insert
        _insert = ledger
        self.cp = cp
        self.a, self.b, self.c = (f"{name}.{x}" for x in "abc")
        self.ledger = bool(ledger)
        self.healed = healed
        self.late = late
        self.unavailable: list[tuple[str, float, Unavailable]] = []
        """What was under way, how long it took, and the error."""
        self.slowest = ("", 0.0)
        self.acknowledged: list[tuple[str, int, str]] = []
        """Task, seq and id of each save that returned."""

    # -- asking

    def ask(self, what: str, fn: Callable[[], T]) -> T:
        """One verb of the library, and how long it takes."""
        begun, bodies = time.monotonic(), _begun.total()
        try:
            return fn()
        except Unavailable as error:
            what += " (begun)" if _begun.total() > bodies else ""
            self.unavailable.append((what, time.monotonic() - begun, error))
            raise
        finally:
            self.slowest = max(self.slowest, (what, time.monotonic() - begun), key=lambda s: s[1])

    def again(self, what: str, fn: Callable[[], T]) -> T:
        """A verb that may simply be repeated."""
        while True:
            try:
                return self.ask(what, fn)
            except Unavailable:
                self._heal()

    def _heal(self) -> None:
        assert len(self.unavailable) < 12, self.unavailable
        self.healed()

    # -- the verbs

    def save(self, state: State) -> State:
        """Save; if nobody knows what became of it, ask for its id, and if it is not there (yet) save again under that very id.
        Returns the state to go on with."""
        id: str | None = None
        while True:
            try:
                head = self.ask("save", partial(self.cp.save, state, id=id))
            except Unavailable as error:
                self._heal()
                id = error.details.get("id", id)
                if id is None:
                    continue
                try:
                    return self.again("load by id", partial(self.cp.load, state.task_id, id=id))
                except NotFound:
                    continue
            self.acknowledged.append((state.task_id, head.seq, head.id))
            return state

    def saves(self, task: str, count: int) -> None:
        state = self.again("load_latest", lambda: self.cp.load_latest(task)) or State(task)
        for _ in range(count):
            n = state.agent_state.get("n", 0) + 1
            state.agent_state["n"] = n
            state.messages.append({"role": "user", "content": f"{task.rpartition('.')[2]} {n} " + "x" * 300})
            state = self.save(state)

    def run(self, task: str, *steps: Callable[[Any], Any]) -> None:
        """Steps of a run, each saved; after an Unavailable the task is resumed and goes on from its last save."""
        first = self.again("status", lambda: self.cp.status(task)).step
        while True:
            try:
                run = self.ask("resume", lambda: self.cp.resume(task))
                with contextlib.ExitStack() as stack:
                    stack.callback(self.ask, "release", run.close)
                    run.__enter__()
                    for step in steps[run.state.step - first :]:
                        step(run)
                        head = self.ask("run.save", run.save)
                        self.acknowledged.append((task, head.seq, head.id))
                return
            except Unavailable:
                self._heal()

    def call(self, run: Any, target: Any, key: str) -> Any:
        value = self.ask(f"call {target.fn.__name__}", lambda: run.call(target, key))
        run.state.messages.append(value)
        return value

    def steady(self, run: Any, target: Any, key: str) -> Any:
        """A call by somebody who repeats it in the same run."""
        value = self.again(f"call {target.fn.__name__}", lambda: run.call(target, key, call_id=key))
        run.state.messages.append(value)
        return value

    def live(self) -> None:
        a, b, c = self.a, self.b, self.c
        self.saves(a, 2)
        self.saves(b, 1)
        self.run(a, lambda run: self.call(run, send, f"{a}/1"), lambda run: self.call(run, look, f"{a}/2"))
        self.run(a, lambda run: (self.steady(run, send, f"{a}/3"), self.steady(run, put, f"{a}/4")))
        if self.ledger:
            self.run(a, lambda run: self.call(run, book, f"{a}/5"))
        many = [tool.bind(f"{a}/{n}") for n, tool in ((6, TOOLS["send"]), (7, TOOLS["put"]))]
        self.run(a, lambda run: self.ask("call_many", lambda: run.call_many(many)))
        self.pause(a)
        self.fork(a)
        self.saves(c, 5)
        self.again("cleanup", lambda: self.cp.cleanup(c, keep_latest=2))
        self.reads(a)
        time.sleep(self.late)
        with contextlib.suppress(NotFound):  # the first try landed
            self.again("delete", lambda: self.cp.delete_task(b))
        self.finish(a)

    def pause(self, task: str) -> None:
        with contextlib.suppress(DecisionNeeded):
            self.run(task, lambda run: self.ask("pause", lambda: run.pause("which", "left or right")))
            raise AssertionError("nobody has answered")
        (pause,) = self.again("pauses", lambda: self.cp.pauses(task))
        with contextlib.suppress(AlreadyAnswered):  # the first try landed
            self.again("answer", lambda: self.cp.answer(task, pause, "left"))

        def answered(run: Any) -> None:
            run.state.agent_state["answer"] = self.ask("pause answered", lambda: run.pause("which", "left or right"))

        self.run(task, answered)

    def fork(self, task: str) -> None:
        while True:
            try:
                self.ask("fork", lambda: self.cp.fork(task, name="side"))
                return
            except Unavailable:
                self._heal()
                if any(b.name == "side" for b in self.again("branches", lambda: self.cp.branches(task))):
                    return

    def reads(self, task: str) -> None:
        listed = self.again("list", lambda: self.cp.list_checkpoints(task))
        state = self.again("load", lambda: self.cp.load(task, seq=listed[-1].seq))
        assert state.agent_state == {"n": 1}
        assert self.again("calls", lambda: self.cp.calls(task))[0].result == f"sent {task}/1"
        self.again("tasks", lambda: self.cp.tasks(limit=3))

    def finish(self, task: str) -> None:
        while self.again("status", lambda: self.cp.status(task)).status != "finished":
            try:
                head = self.ask("finish", lambda: self.cp.finish(task, "done"))
                self.acknowledged.append((task, head.seq, head.id))
            except Unavailable:
                self._heal()


def facts(cp: Checkpointer, name: str, ledger: list[str], raw: dict[str, Any]) -> dict[str, Any]:
    """All that is stored of a life, but for what names, clocks and repeated tries make differ. ``cp`` goes past the line."""
    found: dict[str, Any] = {
        "ledger": sorted(key.partition("/")[2] for key in ledger if key.startswith(f"{name}.")),
        "sent": {key.partition("/")[2]: n for key, n in _sent.items() if key.startswith(f"{name}.")},
    }
    for letter in "abc":
        task = raw.get(f"{name}.{letter}")
        if task is None:
            continue
        found[letter] = {
            "status": task.status,
            "checkpoints": [(c.seq, c.parent, c.branch, c.kind, c.step) for c in task.checkpoints],
            "ids": len({c.id for c in task.checkpoints}),
            "states": [_content(cp, f"{name}.{letter}", c.seq) for c in task.checkpoints],
            "calls": sorted(_call(c) for c in task.calls),  # two at once come in any order
            "numbers": [c.no for c in task.calls],
            "heads": task.heads,
            "pauses": [(p.no, p.status) for p in cp.store.pauses(f"{name}.{letter}")],
        }
    return found


def _call(call: Any) -> tuple[Any, ...]:
    # A transaction that was cut off is rolled back, and its tool tries again; else each attempt is made once.
    return (call.step, call.tool, call.status, 0 if call.tool == book.name else call.version)


def _content(cp: Checkpointer, task: str, seq: int) -> tuple[Any, ...]:
    state = cp.load(task, seq=seq)
    prefix = task.rpartition(".")[0]
    return (state.step, repr(state.agent_state), repr(state.messages).replace(f"{prefix}.", "*."))

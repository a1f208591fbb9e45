"""The life of a few tasks in about thirty verbs, and what must hold of a store after any part of it.

The script is deterministic but for ids and times. ``facts`` reads all of a store through the public verbs; ``holds`` compares
what a store has after a fault or a power cut with what it had before and after the verb that was under way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import apsw

import safepoint
from safepoint import Done, State, tool
from safepoint.checkpointer import Checkpointer
from safepoint.codec import values
from safepoint.errors import SafepointError
from safepoint.model import Retention, new_id
from safepoint.rows import BranchRow, BranchWrite, Commit, Head, WriteRow

__all__ = ["Facts", "Life", "facts", "holds", "opened"]

Facts = dict[str, Any]


@tool(effect="write")
def send(to: str) -> str:
    return f"sent to {to}"


@tool(effect="write")
def lost(to: str) -> str:
    raise TimeoutError("no answer")


@tool(effect="idempotent")
def put(n: int, *, idempotency_key: str) -> int:
    return n


@tool(effect="read")
def look(n: int) -> list[int]:
    return [n] * 50


@tool(effect="transactional")
def book(n: int, *, connection: Any) -> int:
    connection.execute("INSERT INTO ledger (n) VALUES (?)", (n,))
    return n


def opened(url: str, **options: Any) -> Checkpointer:
    return safepoint.open(url, retention=Retention.keep_all(), **options)


class Life:
    """The script: ``verbs`` are called in order. What one of them raises is the caller's to judge."""

    def __init__(self, url: str, *, transactional: bool) -> None:
        self.url = url
        self.transactional = transactional
        self.cp = opened(url)
        self.verbs: list[tuple[str, Callable[[], Any]]] = self._verbs()

    def reopen(self) -> None:
        self.cp.close()
        self.cp = opened(self.url)

    def close(self) -> None:
        self.cp.close()

    def save(self, task: str, n: int, size: int = 200) -> None:
        state = self.cp.load_latest(task) or State(task)
        state.messages.extend({"role": "user", "content": f"{task} {n} {i} " + "x" * size} for i in range(n))
        state.agent_state["phase"] = f"p{n}"
        self.cp.save(state)

    def big(self, task: str) -> None:
        state = self.cp.load_latest(task) or State(task)
        state.agent_state["parts"] = [f"{i} " + "y" * 3000 for i in range(20)]
        self.cp.save(state)

    def drop(self, task: str) -> None:
        def fn(state: State) -> None:
            state.agent_state.pop("parts", None)
            del state.messages[1:3]

        self.cp.update(task, fn)

    def run(self, task: str, *steps: Callable[[Any], None]) -> None:
        with self.cp.resume(task) as run:
            for step in steps:
                step(run)
                run.save()

    def raises(self, task: str) -> None:
        def bad(run: Any) -> None:
            run.call(look, 5)
            raise ZeroDivisionError

        with contextlib.suppress(ZeroDivisionError):
            self.run(task, bad)

    def doubt(self, task: str) -> None:
        with contextlib.suppress(safepoint.InDoubt):
            self.run(task, lambda run: run.call(lost, "bob"))

    def settle(self, task: str) -> None:
        for call in self.cp.calls(task, status="in_doubt"):
            self.cp.resolve(task, call, Done("it was"))

    def ask(self, task: str) -> None:
        with contextlib.suppress(safepoint.DecisionNeeded):
            self.run(task, lambda run: run.pause("which", "left or right"))

    def reply(self, task: str) -> None:
        for pause in self.cp.pauses(task):
            self.cp.answer(task, pause, "left")

    def record(self, task: str, at: str, *rows: tuple[int, Any]) -> None:
        """What an adapter's writer records against a checkpoint, whether it is there or not."""
        writes = tuple(
            WriteRow(checkpoint=at, writer="w", idx=idx, data=values.encode(data, self.cp.registry, path="data"))
            for idx, data in rows
        )
        self.cp.store.commit(Commit(task=task, id=new_id(), writes=writes))

    def other(self, task: str) -> BranchRow:
        """A branch that is not the current one."""
        row = self.cp.store.task(task)
        assert row is not None
        return next(b for b in self.cp.store.branches(task) if b.name != row.branch)

    def set_back(self, task: str) -> None:
        branch, oldest = self.other(task), self.cp.store.headers(task)[-1]
        assert oldest.seq < branch.head.seq
        move = BranchWrite(name=branch.name, expect=branch.head, to=Head(oldest.seq, oldest.id))
        self.cp.store.commit(Commit(task=task, id=new_id(), branches=(move,)))

    def drop_branch(self, task: str) -> None:
        branch = self.other(task)
        move = BranchWrite(name=branch.name, expect=branch.head, to=None)
        self.cp.store.commit(Commit(task=task, id=new_id(), branches=(move,)))

    def table(self) -> None:
        if self.transactional:
            with self.cp.connection() as conn:
                conn.execute("CREATE TABLE IF NOT EXISTS ledger (n INTEGER)")

    def fold(self) -> None:
        """Make the store tidy up what a store tidies up in its own time."""
        db = getattr(self.cp.store, "_db", None)
        if db is not None and db._writer is not None:
            with contextlib.suppress(apsw.Error):  # not a verb of the library, but what SQLite does now and then by itself
                db._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def _verbs(self) -> list[tuple[str, Callable[[], Any]]]:
        booked = [lambda run: run.call(book, 3)] if self.transactional else [lambda run: run.call(send, "eve")]
        return [
            ("save", lambda: self.save("a", 3)),
            ("save", lambda: self.save("a", 2)),
            ("table", self.table),
            ("other", lambda: self.save("b", 1)),
            ("big", lambda: self.big("a")),
            ("drop", lambda: self.drop("a")),
            ("run", lambda: self.run("a", lambda run: run.call(send, "ann"), lambda run: run.call(look, 1))),
            ("fold", self.fold),
            ("again", lambda: self.big("a")),
            ("booked", lambda: self.run("a", *booked)),
            ("pin", lambda: self.cp.pin("a", 2)),
            ("record", lambda: self.record("a", "later", (0, "first"), (-1, ["error"]))),
            ("raises", lambda: self.raises("a")),
            ("milestone", lambda: self.cp.save(self.cp.load("a", branch="main"), kind="milestone", label="m")),
            ("doubt", lambda: self.doubt("a")),
            ("settle", lambda: self.settle("a")),
            ("after", lambda: self.run("a", lambda run: run.call(put, 2))),
            ("reopen", self.reopen),
            ("fork", lambda: self.fork("a")),
            ("ask", lambda: self.ask("a")),
            ("reply", lambda: self.reply("a")),
            ("answered", lambda: self.run("a", lambda run: run.pause("which", "left or right"))),
            ("cleanup", lambda: self.cp.cleanup("a", keep_latest=3)),
            ("many", lambda: self.run("a", lambda run: run.call_many([look.bind(1), send.bind("x")]))),
            ("delete", lambda: self.cp.delete_task("b")),
            ("record", lambda: self.record("a", "later", (0, "second"), (-1, ["another"]), (1, "y" * 300))),
            ("begin", lambda: self.record("b", "none yet", (0, "alone"))),
            ("rewind", lambda: self.rewind("a")),
            ("on", lambda: self.save("a", 1)),
            ("back", lambda: self.set_back("a")),
            ("gone", lambda: self.drop_branch("a")),
            ("new b", lambda: self.save("b", 2)),
            ("unpin", lambda: self.cp.unpin("a", 2)),
            ("fold", self.fold),
            ("cleanup", lambda: self.cp.cleanup("a", keep_latest=2)),
            ("finish", lambda: self.cp.finish("a", "done")),
            ("close", self.reopen),
        ]

    def fork(self, task: str) -> None:
        self.cp.fork(task, name="side")

    def rewind(self, task: str) -> None:
        heads = self.cp.list_checkpoints(task, limit=3)
        self.cp.rewind(task, heads[-1].seq)


# -- what a store has


def facts(cp: Checkpointer) -> Facts:
    """All that the public verbs tell of a store, in values that can be compared. Raises what they raise."""
    found: Facts = {}
    for info in cp.tasks():
        task = info.task_id
        store = cp.store
        found[task] = {
            "current": info.branch,
            "heads": {b.name: b.head.seq for b in store.branches(task)},
            "checkpoints": {h.seq: content(cp, task, h.seq) for h in cp.list_checkpoints(task)},
            "calls": {r.no: (r.version, r.status) for r in _checked(task, store.calls(task)[0])},
            "pauses": {r.no: (r.version, r.status) for r in _checked(task, store.pauses(task))},
            "writes": {r.key: r.data for r in _checked(task, store.writes(task, space=None)[0])},
        }
        assert not store.holds(task, (0, "")), "a lease that nobody took"  # type: ignore[arg-type]
        cp.calls(task)  # with bodies: each of their objects is there
    return found


def _checked(task: str, rows: Any) -> Any:
    for row in rows:
        row.check(task, "row")
    return rows


def content(cp: Checkpointer, task: str, seq: int) -> bytes:
    state = cp.load(task, seq=seq)
    return values.encode([state.step, state.messages, state.agent_state], cp.registry, path="state")


def holds(have: Facts, before: Facts, after: Facts | None, ever: frozenset[Any] = frozenset()) -> str:
    """What is wrong with a store that stood at ``before`` when the verb under way (which would lead to ``after``; None: it is
    not known to what) was cut off. Empty if nothing is: all that was acknowledged is there unless that verb removes it, and
    what it adds is whole or absent. ``ever``: checkpoints that retention has deleted, and that a power cut may bring back, as
    it does not wait for the disk."""
    later = before if after is None else after
    for task in before:
        if task not in have:
            if task in later and before[task] and not _made_anew(before[task], later[task]):
                return f"task {task} is gone"
            continue
        b, h, a = before[task], have[task], later.get(task)
        for seq, stored in b["checkpoints"].items():
            there = h["checkpoints"].get(seq)
            if there is None and (a is None or seq in a["checkpoints"]):
                return f"{task}@{seq} is gone"
            if there is not None and there != stored:
                return f"{task}@{seq} is another state"
        for name, seq in b["heads"].items():
            if h["heads"].get(name, 0) < seq and (a is None or h["heads"].get(name) != a["heads"].get(name)):
                return f"the head of {name} of {task} went back from {seq} to {h['heads'].get(name)}"
        for kind in ("calls", "pauses"):
            for no, (version, _) in b[kind].items():
                if no not in h[kind]:
                    if a is None or no in a[kind]:
                        return f"{kind} {no} of {task} is gone"
                elif h[kind][no][0] < version:
                    return f"{kind} {no} of {task} went back to version {h[kind][no][0]} from {version}"
        for key, data in b["writes"].items():
            if h["writes"].get(key) not in {data, None if a is None else a["writes"].get(key, b"")}:
                return f"write {key} of {task} is gone, or another"
        if after is not None and a is not None and h["current"] not in {b["current"], a["current"]}:
            return f"{task} is on branch {h['current']}"
    if after is not None:
        for task in have:
            known = {*before.get(task, _NOTHING)["checkpoints"], *later.get(task, _NOTHING)["checkpoints"]}
            if extra := {seq for seq, stored in have[task]["checkpoints"].items() if seq not in known and stored not in ever}:
                return f"{task} has checkpoints {extra} that nobody saved"
            heads = have[task]["heads"]
            if any(seq not in have[task]["checkpoints"] for seq in heads.values()):
                return f"a head of {task} is not among its checkpoints"
    return ""


_NOTHING: Facts = {"checkpoints": {}}


def _made_anew(b: Facts, a: Facts) -> bool:
    return not set(b["checkpoints"].values()) & set(a["checkpoints"].values())


def outcome(fn: Callable[[], Any]) -> SafepointError | None:
    """What a verb raised, if it is one of the library's own errors; any other comes out."""
    try:
        fn()
    except SafepointError as error:
        return error
    return None

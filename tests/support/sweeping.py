"""Long tasks, made at once, and the children of the tests that sweep them."""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from safepoint import Retention, State, _probe
from safepoint.checkpointer import open as open_checkpointer
from safepoint.codec.nodes import make, name_of
from safepoint.errors import Conflict, SafepointError
from safepoint.model import Obj, now, to_us
from safepoint.rows import BranchRow, CallRow, CheckpointRow, Head, Image, Numbers, TaskRow
from safepoint.stores import sqlite_bigsweep, sqlite_sweep
from safepoint.stores.sqlite import SQLiteStore
from tests.support import agents, children
from tests.support.children import Server, tell

DAY = 86_400_000_000


def long_task(n: int, *, task: str = "long", milestones: int = 0, pinned: tuple[int, ...] = ()) -> Image:
    """A task of ``n`` checkpoints, a day apart, the last one now. Each has an object of its own and two that others have too, and
    each step made one call, with an object as its result. Every ``milestones``-th is one."""
    shared = make(b"", b"what all have")
    objects: list[Obj] = [shared]
    checkpoints: list[CheckpointRow] = []
    calls: list[CallRow] = []
    began = to_us(now()) - n * DAY
    for seq in range(1, n + 1):
        leaf, some, result = make(b"", b"leaf %d" % seq), make(b"", b"of ten %d" % (seq // 10)), make(b"", b"result %d" % seq)
        page = make(leaf.name + some.name + shared.name, b"page")
        objects += [leaf, page, result] if seq % 10 else [leaf, page, result, some]
        if seq == 1:
            objects.append(make(b"", b"of ten 0"))
        root = b"root %d" % seq
        checkpoints.append(
            CheckpointRow(
                id=f"c{seq}", seq=seq, parent_seq=seq - 1 or None, step=seq - 1, created_at=began + seq * DAY, format=1, schema=1,
                kind="milestone" if milestones and seq % milestones == 0 else "step", size=200, root=root, refs=page.name,
                digest=name_of(page.name, root), pinned=seq in pinned,
            )
        )  # fmt: skip
        calls.append(
            CallRow(
                no=seq, line=1, step=seq - 1, ident=b"i" * 16, tool="t", effect="write", idempotency_key=f"k{seq}",
                status="succeeded", base_seq=seq, result=b"r", result_refs=result.name, version=2, began=seq, ended=seq,
            )
        )  # fmt: skip
    head = Head(n, f"c{n}")
    return Image(
        row=TaskRow(task=task, head=head, step=n - 1, created_at=began, updated_at=began, checkpoints=n),
        numbers=Numbers(n, n, 0, 1, n),
        branches=(BranchRow("", "main", head, 1),),
        checkpoints=tuple(checkpoints),
        calls=tuple(calls),
        objects=tuple(objects),
    )


def always_large(path: str, durability: Any = "process") -> SQLiteStore:
    """A store that sweeps the smallest task as it does the largest, a few rows at a time."""
    sqlite_sweep.LARGE = -1
    sqlite_bigsweep.PAGE, sqlite_bigsweep.ROWS, sqlite_bigsweep.OBJECTS, sqlite_bigsweep.PAUSE = 3, 2, 2, 0
    return SQLiteStore(path, durability=durability)


def savers_against_sweepers(
    server: Server,
    url: str,
    *,
    savers: int,
    seconds: float,
    least: int,
    sweep: Callable[..., Any] | None = None,
    large: bool = False,
) -> tuple[int, list[tuple[int, int]]]:
    """Savers as ``dropper`` for so long, each of ``least`` saves or more, against two sweepers. How much they saved in all, and what
    each sweeper let go of."""
    sweepers = [server.start(sweep or sweeper, url, large) for _ in range(2)]
    for child in sweepers:
        child.until("ready")  # so that all that is saved is saved beside them, however slowly a process starts
    started = [server.start(dropper, url, f"s{i}", seconds, least) for i in range(savers)]
    try:
        saves = sum(child.result() for child in started)
    finally:
        for child in sweepers:
            with contextlib.suppress(OSError):  # it is gone, and its result tells what of
                child.say("stop")
    return saves, [child.result() for child in sweepers]


def assert_not_held_up(measure: Callable[[int], tuple[float, float]]) -> None:
    """Whoever saves beside a large clean-up does not wait for all of it. ``measure`` does one with a task of its own, and returns the
    longest save and how long the clean-up took. In one transaction the two would be the same, each time; a pause of the machine,
    which any one of so many saves may meet, does not come twice."""
    over = []
    for nth in range(2):
        longest, seconds = measure(nth)
        if longest < max(0.3, seconds / 5):
            return
        over.append(f"{longest:.2f} s beside a clean-up of {seconds:.2f} s")
    raise AssertionError(f"the longest save took {', and again '.join(over)}")


# -- children


def cleaner(db: str, task: str, keep: int, point: str = "", nth: int = 0) -> Any:
    """Clean the task up, and die at a point."""
    hits: Counter[str] = Counter()
    with open_checkpointer(f"sqlite:///{db}", retention=Retention.keep_all(), durability="process") as cp:
        agents.kill_at(point, nth) if point else agents.count_points(hits)
        began = time.monotonic()
        report = cp.cleanup(task, keep_latest=keep)
        _probe.hook = None
        return len(report.deleted), report.calls_deleted, report.objects_deleted, time.monotonic() - began, hits


def beside(db: str, task: str, seconds: float) -> None:
    """Save to another task until told to stop; tells the longest time that a save took."""
    with open_checkpointer(f"sqlite:///{db}", retention=Retention.keep_all(), durability="process") as cp:
        state = State(task)
        cp.save(state)
        tell("ready")
        longest, saves, end = 0.0, 0, time.monotonic() + seconds
        while time.monotonic() < end:
            state.step += 1
            began = time.monotonic()
            cp.save(state)
            longest, saves = max(longest, time.monotonic() - began), saves + 1
            time.sleep(0.001)
        tell("waited", longest, saves)


def small_cleaner(url: str, task: str, point: str = "", nth: int = 0) -> Any:
    """Clean a short task up, and die at a point."""
    hits: Counter[str] = Counter()
    with open_checkpointer(url, retention=Retention.keep_all()) as cp:
        agents.kill_at(point, nth) if point else agents.count_points(hits)
        cp.cleanup(task, keep_latest=2)
        _probe.hook = None
        return hits


def big_saver(url: str, task: str, size: int, point: str = "", nth: int = 0) -> Any:
    """Save a state of eight large parts, and die at a point."""
    hits: Counter[str] = Counter()
    with open_checkpointer(url, retention=Retention.keep_all()) as cp:
        state = cp.load_latest(task) or State(task)
        state.step += 1
        state.agent_state = {f"part {i}": f"{state.step}.{i} " * (size // 8 // 5) for i in range(8)}
        agents.kill_at(point, nth) if point else agents.count_points(hits)
        head = cp.save(state)
        _probe.hook = None
        tell("saved", head.seq)
        return hits


WORDS = [f"word {i} " * 40 for i in range(40)]


def dropper(url: str, name: str, seconds: float, least: int) -> int:
    """Drop content and add it again, and fork, on a branch of its own; every save is read back, and again after others. Goes on for
    so long, and beyond, up to a minute, where the machine is too slow for ``least`` saves in that time."""
    rng = random.Random(name)
    saves = forks = 0
    with open_checkpointer(url, retention=Retention.keep_all(), durability="process") as cp:
        state = cp.load_latest("shared")
        assert state is not None
        end = time.monotonic() + seconds
        branch = ""
        while (at := time.monotonic()) < end or (saves < least and at < end + 60):
            if not branch or rng.random() < 0.05:
                # Counted by tries: one that came to nothing may have left its name behind.
                branch, forks = f"{name}.{forks}", forks + 1
                try:
                    state = _forked(cp, "shared", rng, branch)
                except SafepointError:
                    branch = ""
                    continue  # what it would have forked from was swept in this moment
            state.messages[:] = rng.sample(WORDS, rng.randrange(1, 20))
            state.agent_state["of"] = rng.choice(WORDS)
            state.step += 1
            try:
                head = cp.save(state)
            except Conflict:
                branch = ""
                continue
            saves += 1
            got = cp.load("shared", branch=branch)
            assert (got.seq, got.messages, got.agent_state) == (head.seq, state.messages, state.agent_state)
    return saves


def _forked(cp: Any, task: str, rng: random.Random, branch: str) -> State:
    """A new branch from any checkpoint that there still is."""
    cp.fork(task, rng.choice(cp.store.headers(task, limit=200)).seq, name=branch)
    state: State = cp.load(task, branch=branch)
    return state


def sweeper(url: str, large: bool) -> tuple[int, int]:
    """Let go of all that may go, again and again until told to stop, and once more then."""
    if large:
        sqlite_sweep.LARGE = -1
        sqlite_bigsweep.PAUSE = 0.0003
    with open_checkpointer(url, retention=Retention.keep_all(), durability="process") as cp:
        checkpoints = objects = 0
        stop = False
        tell("ready")
        while not stop:
            stop = _told_to_stop()
            report = cp.cleanup("shared", keep_latest=1)
            assert not report.unreadable
            checkpoints, objects = checkpoints + len(report.deleted), objects + report.objects_deleted
            time.sleep(0.001)
    return checkpoints, objects


def _told_to_stop() -> bool:
    assert children.channel is not None
    return children.channel.ready(0)

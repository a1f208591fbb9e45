"""Children of test_field_cases_servers.py: holders of leases behind a line that dies, and masters that fork."""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Any

import safepoint
from safepoint import Retention, SafepointError, State, tool
from tests.support.children import hear, tell
from tests.support.races import at_once, name_of

_entered: list[str] = []


@tool(effect="write")
def long_one(key: str) -> str:
    """Tells that it is inside, and goes on when it is told to."""
    _entered.append(key)
    tell("in tool", key)
    hear()
    return key


@tool(effect="write")
def quick(key: str) -> str:
    _entered.append(key)
    return key


@tool(effect="idempotent")
def watching(key: str, *, idempotency_key: str) -> str:
    """A tool that takes longer than its holder can be sure of the lease."""
    watch(_runs[0])
    return key


def watch(run: Any) -> None:
    """Tell when the holder was last sure of its lease by its own clock, once it no longer is, and wait to be told to go on."""
    tell("watching")
    sure = now = real_time()
    # The time is read before it is asked: a late wake-up of this process must not look like a holder that is sure for too long.
    while run.cp.store.holds(run.task_id, run._flow.guard):
        sure = now
        time.sleep(0.001)
        now = real_time()
    tell("not sure", sure)
    hear()


_runs: list[Any] = []
_time, _time_ns = time.time, time.time_ns


def real_time() -> float:
    return _time()


def set_wall_clock(seconds: float) -> None:
    """Let the wall clock of this process jump."""
    time.time = lambda: _time() + seconds
    time.time_ns = lambda: _time_ns() + int(seconds * 1e9)


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def cut_off(url: str, task: str, lease: float, jump: float, in_tool: bool) -> dict[str, Any]:
    """Worker 1: holds the task, and is in a tool, or in code of its own, while the line is dead; then tries what a holder may."""
    kept = _Kept()
    logging.getLogger("safepoint").addHandler(kept)
    tried: dict[str, str] = {}
    took: dict[str, float] = {}
    with safepoint.open(url, lease=lease, timeout=0.7, retention=Retention.keep_all()) as cp:
        try:
            with cp.resume(task) as run:
                _runs[:] = [run]
                run.call(quick, "first")
                run.save()
                set_wall_clock(jump)
                tell("held", run.fence)
                hear()
                try:
                    run.call(watching, "long") if in_tool else watch(run)
                finally:
                    for name, fn in (("call", lambda: run.call(quick, "second")), ("save", run.save)):
                        begun = time.monotonic()
                        try:
                            fn()
                            tried[name] = "done"
                        except BaseException as error:
                            tried[name] = name_of(error)
                        took[name] = time.monotonic() - begun
        except SafepointError as error:
            tried["run"] = name_of(error)
    return {"tried": tried, "took": took, "entered": list(_entered), "log": kept.said}


def patient(url: str, task: str, lease: float, jump: float, **options: Any) -> dict[str, Any]:
    """A holder whose tool takes long; tells of each thing that it comes to."""
    with safepoint.open(url, lease=lease, retention=Retention.keep_all(), **options) as cp, cp.resume(task) as run:
        set_wall_clock(jump)
        run.call(long_one, "long")
        run.call(quick, "second")
        seq = run.save().seq
        fence = run.fence
    return {"seq": seq, "fence": fence, "entered": list(_entered)}


# -- forks


def master(url: str, used: bool, workers: int, saves: int) -> list[int]:
    """Has a store object from before it forks; all workers use it first at the same moment, from four threads each. Returns the
    workers' exit statuses."""
    cp = safepoint.open(url, retention=Retention.keep_all())
    if used:
        cp.save(State("master"))
    moment = time.monotonic() + 0.3
    pids = []
    for i in range(workers):
        pid = os.fork()
        if not pid:
            status = 1
            try:
                at_once(moment)
                _save_from_threads(cp, f"worker{i}", saves)
                cp.close()
                status = 0
            finally:
                os._exit(status)
        pids.append(pid)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    cp.save(State("master after"))
    cp.close()
    return statuses


def _save_from_threads(cp: safepoint.Checkpointer, name: str, saves: int) -> None:
    errors: list[BaseException] = []

    def one(task: str) -> None:
        try:
            state = State(task)
            for n in range(saves):
                state.messages.append(n)
                cp.save(state)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(f"{name}.{k}",)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]


def leaves_it_open(url: str) -> None:
    """Ends without closing anything, with a lease in hand."""
    cp = safepoint.open(url)
    run = cp.resume("t")
    run.__enter__()
    run.call(quick, "x")

"""A fleet of workers over one store, the receiver of what they do, and a person: children of test_fleet.py and its like.

The receiver is a process that is never killed. It does what it is asked to, counts it, and where it is told a fence refuses one
that is lower than the highest it has heard of for that task. Who asks it whether something happened raises that fence: from then
on the holder that was asked about comes too late. It knows nothing of the library; what a test believes of effects it reads here.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import selectors
import signal
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import safepoint
from safepoint import (
    Call,
    DecisionNeeded,
    DidNotHappen,
    Done,
    InDoubt,
    LeaseHeld,
    LeaseLost,
    NotDone,
    Retention,
    Retry,
    Unavailable,
    tool,
)
from tests.support import children
from tests.support.children import Child, Server, tell

SETTLE = 0.02


# -- the receiver


def receive(path: str) -> None:
    """The process: one JSON line in, one out, per connection."""
    effects: list[dict[str, Any]] = []
    first: dict[str, str] = {}
    counts: Counter[str] = Counter()
    highest: dict[str, int] = defaultdict(int)
    refused: list[dict[str, Any]] = []

    def answer(m: dict[str, Any]) -> Any:
        match m["op"]:
            case "do":
                if m["guarded"] and m["fence"] < highest[m["task"]]:
                    refused.append(m)
                    return {"refused": highest[m["task"]]}
                highest[m["task"]] = max(highest[m["task"]], m["fence"])
                counts[m["key"]] += 1
                value = f"{m['key']}:{counts[m['key']]}"
                first.setdefault(m["key"], value)
                effects.append(m)
                return {"value": value}
            case "ask":
                highest[m["task"]] = max(highest[m["task"]], m["fence"])
                return {"times": counts[m["key"]], "value": first.get(m["key"])}
            case "report":
                return {"counts": counts, "refused": refused, "effects": effects}
        raise AssertionError(m)

    lines = socket.socket(socket.AF_UNIX)
    lines.bind(path)
    lines.listen(256)
    lines.setblocking(False)
    tell("serving")
    selector = selectors.DefaultSelector()
    selector.register(lines, selectors.EVENT_READ)
    parts: dict[socket.socket, bytes] = {}
    while True:
        selector.select()
        with contextlib.suppress(BlockingIOError):
            while True:
                sock, _ = lines.accept()
                selector.register(sock, selectors.EVENT_READ)
                parts[sock] = b""
        whole: list[tuple[bool, socket.socket, dict[str, Any]]] = []
        for key, _ in selector.select(0):
            found: Any = key.fileobj
            if found is lines:
                continue
            data = b""
            with contextlib.suppress(ConnectionResetError):
                data = found.recv(65536)
            parts[found] += data
            if data and not data.endswith(b"\n"):
                continue
            line = parts.pop(found)
            selector.unregister(found)
            if not line.endswith(b"\n"):
                found.close()
                continue
            message = json.loads(line)
            whole.append((message["op"] != "do", found, message))
        # What was sent before a question was asked is done before it is answered: its sender may be dead already.
        for _, sock, message in sorted(whole, key=lambda w: w[0]):
            reply = json.dumps(answer(message)).encode() + b"\n"
            sock.setblocking(True)
            with contextlib.suppress(OSError):  # the caller was killed while its effect happened
                sock.sendall(reply)
            sock.close()


def ask(path: str, **message: Any) -> Any:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)
        sock.sendall(json.dumps(message).encode() + b"\n")
        data = bytearray()
        while not data.endswith(b"\n"):
            part = sock.recv(1 << 20)
            if not part:
                raise ConnectionError("the receiver is gone")
            data += part
    return json.loads(data)


class Receiver:
    """From the test's side."""

    def __init__(self, server: Server, path: str) -> None:
        self.path = path
        self.child = server.start(receive, path)
        assert self.child.read() == ("serving",)

    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = ask(self.path, op="report")
        return found

    def close(self) -> None:
        self.child.kill()


# -- what the workers call: a key begins with its task's name


_path = ""
_rng = random.Random()
_longest = 0.0
_book = "INSERT INTO ledger (key) VALUES (?)"


def _dawdle() -> None:
    time.sleep(_rng.uniform(0.0, _longest))


def task_of(key: str) -> str:
    return key.partition("/")[0]


def _do(key: str, fence: int, guarded: bool) -> str:
    _dawdle()
    answer = ask(_path, op="do", task=task_of(key), key=key, fence=fence, guarded=guarded, pid=os.getpid())
    if "refused" in answer:
        raise DidNotHappen(f"fence {fence} is stale: {answer['refused']} was seen")
    _dawdle()
    return str(answer["value"])


def did_it(call: Call) -> Done | NotDone:
    key = call.arguments["key"]
    # Whoever asks has a higher fence than the call that it asks about.
    answer = ask(_path, op="ask", task=task_of(key), key=key, fence=call.fence + 1)
    return Done(answer["value"]) if answer["times"] else NotDone()


@tool(effect="write", verify=did_it, settle_after=SETTLE, receiver_dedups=True)
def deliver(key: str, *, fence: int) -> str:
    return _do(key, fence, True)


@tool(effect="write", verify=did_it, settle_after=SETTLE)
def hand(key: str, *, fence: int) -> str:
    """Its receiver refuses nothing: no holder of it is ever stopped, only killed."""
    return _do(key, fence, False)


@tool(effect="write")
def blind(key: str, *, fence: int) -> str:
    return _do(key, fence, True)


@tool(effect="transactional", retry=Retry(6, 0.05))
def book(key: str, *, connection: Any) -> str:
    connection.execute(_book, (key,))
    time.sleep(_rng.uniform(0.0, _longest / 10))  # it keeps others from this task, and on SQLite from all
    return key


def keys_of(task: str, steps: int, books: bool) -> tuple[list[str], list[str]]:
    """All keys of a finished task: those that the receiver has seen, and those in the ledger."""
    keys = [f"{task}/{n}/{name}" for n in range(steps) for name in names_of(task, n)]
    booked = [f"{task}/{n}/book" for n in range(steps) if books]
    return keys, booked


def names_of(task: str, n: int) -> tuple[str, ...]:
    sure = "deliver" if task.startswith("s") else "hand"
    return (f"{sure}1", "blind", f"{sure}2") if n % 3 == 1 else (f"{sure}1", f"{sure}2")


def working_step(run: Any, steps: int, books: bool) -> None:
    n, task = run.state.step, run.task_id
    names = names_of(task, n)
    sure: Any = deliver if names[0].startswith("deliver") else hand
    run.state.messages.append(run.call(sure, f"{task}/{n}/{names[0]}"))
    if "blind" in names:
        run.state.messages.append(run.call(blind, f"{task}/{n}/blind"))
    if books:
        run.call(book, f"{task}/{n}/book")
    if n % 2:
        run.state.messages += run.call_many([sure.bind(f"{task}/{n}/{names[-1]}")])
    else:
        run.state.messages.append(run.call(sure, f"{task}/{n}/{names[-1]}"))
    if n == steps - 1:
        run.finish(f"done:{task}")


# -- workers


def ready_here(path: str, seed: int, longest: float, ledger: str) -> None:
    global _path, _longest, _book
    _path, _longest = path, longest
    _rng.seed(seed)
    if ledger:
        _book = ledger


def _told_to_stop() -> bool:
    assert children.channel is not None
    return children.channel.ready(0)


def worker(
    url: str, tasks: tuple[str, ...], steps: int, path: str, seed: int, longest: float, ledger: str, options: dict[str, Any]
) -> Counter[str]:
    """Work off the tasks that are neither finished nor in other hands, until told to stop. Returns what it met."""
    ready_here(path, seed, longest, ledger)
    met: Counter[str] = Counter()
    done: set[str] = set()
    with safepoint.open(url, retention=Retention.keep_all(), **options) as cp:
        books = bool(ledger)

        def step(run: Any) -> None:
            working_step(run, steps, books)

        def some(task: str) -> bool:
            """A few steps by the handle, which is then left; True if the task is finished."""
            with cp.resume(task) as run:
                for _ in range(_rng.randint(1, 3)):
                    if run.state.step >= steps:
                        return True
                    step(run)
                    run.save()
            return False

        while not _told_to_stop():
            left = [task for task in tasks if task not in done]
            try:
                if _rng.random() < 0.5:
                    unfinished = {info.task_id for info in cp.tasks(status="unfinished")}
                    left = [task for task in left if task in unfinished] or left
                if not left:
                    time.sleep(0.02)
                    continue
                task = _rng.choice(left)
                # Each task is begun by run_agent: the handle would begin it without a turn.
                if _rng.random() < 0.5 or not _begun(cp, task):
                    finished = safepoint.run_agent(step, task_id=task, store=cp).status == "finished"
                else:
                    finished = cp.status(task).status == "finished" or some(task)
                if finished:
                    done.add(task)
            except LeaseHeld as error:
                met["LeaseHeld"] += 1
                # Where no clock ends a lease, a person does who sees that its holder stands still.
                if error.details.get("stopped") and task.startswith("s") and _rng.random() < 0.3:
                    met["stolen"] += _steal(cp, task, step)
                time.sleep(0.005)
            except LeaseLost:
                met["LeaseLost"] += 1
                tell("lost", task)
            except (InDoubt, DecisionNeeded):
                met["in doubt"] += 1
                time.sleep(0.01)
            except Unavailable as error:
                met["Unavailable"] += 1
                tell("unavailable", task, str(error))
    return met


def _begun(cp: safepoint.Checkpointer, task: str) -> bool:
    try:
        return cp.status(task).checkpoints > 0
    except safepoint.NotFound:
        return False


def _steal(cp: safepoint.Checkpointer, task: str, step: Any) -> int:
    with contextlib.suppress(LeaseHeld, LeaseLost, Unavailable):
        safepoint.run_agent(step, task_id=task, store=cp, steal=True)
    return 1


def person(url: str, path: str, total: int, options: dict[str, Any]) -> Counter[str]:
    """Settle what is in doubt by asking the receiver, and tell how many tasks are finished, until told to stop."""
    met: Counter[str] = Counter()
    told = -1
    with safepoint.open(url, retention=Retention.keep_all(), **options) as cp:
        while not _told_to_stop():
            try:
                infos = cp.tasks()
                for info in infos:
                    if info.status != "waiting":
                        continue
                    for call in cp.calls(info.task_id, status="in_doubt"):
                        # After this question the holder that was asked about comes too late, wherever it is.
                        answer = ask(path, op="ask", task=info.task_id, key=call.arguments["key"], fence=call.fence + 1)
                        cp.resolve(info.task_id, call, Done(answer["value"]) if answer["times"] else NotDone())
                        met["settled"] += 1
            except Unavailable as error:
                met["Unavailable"] += 1
                tell("unavailable", "", str(error))
                continue
            finished = sum(info.status == "finished" for info in infos)
            if finished != told:
                tell("finished", finished)
                told = finished
            time.sleep(0.05)
    return met


def verified(url: str) -> bool:
    with safepoint.open(url) as cp:
        return cp.verify().ok


# -- the driver, in the test's process


class Fleet:
    """Workers in places; what a worker tells is heard here, and one that raised fails the test."""

    def __init__(self, server: Server, rng: random.Random) -> None:
        self.server = server
        self.rng = rng
        self.places: list[tuple[str, tuple[Any, ...]]] = []
        self.workers: list[Child] = []
        self.stopped: dict[int, float] = {}
        self.counts: Counter[str] = Counter()
        self.unavailable: list[str] = []

    def add(self, group: str, *args: Any) -> None:
        self.places.append((group, args))
        self.workers.append(self._start(args))

    def _start(self, args: tuple[Any, ...]) -> Child:
        url, tasks, steps, path, *rest = args
        return self.server.start(worker, url, tasks, steps, path, self.rng.getrandbits(32), *rest)

    def hear(self) -> None:
        for child in self.workers:
            self._drain(child)

    def _drain(self, child: Child) -> None:
        with contextlib.suppress(EOFError):
            while child.channel.ready(0):
                message = child.read()
                assert message[0] != "!returned", "a worker left by itself"
                self.counts[message[0]] += 1
                if message[0] == "unavailable":
                    self.unavailable.append(message[2])

    def trouble(self, seconds: float, gap: float, stops: tuple[float, float]) -> Iterator[None]:
        """Kill, stop and continue at random for so long; gives way at each turn, to be left early."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            yield
            self.hear()
            self._continue(time.monotonic())
            i = self.rng.randrange(len(self.workers))
            if self.rng.random() < 0.5 or self.places[i][0] != "s":
                self.workers[i].kill()
                self._drain(self.workers[i])
                self.stopped.pop(i, None)
                self.counts["killed"] += 1
                self.workers[i] = self._start(self.places[i][1])
            elif i not in self.stopped:
                self.workers[i].signal(signal.SIGSTOP)
                self.stopped[i] = time.monotonic() + self.rng.uniform(*stops)
                self.counts["stopped"] += 1
            time.sleep(self.rng.uniform(0.0, 2 * gap))
        self._continue(float("inf"))

    def _continue(self, now: float) -> None:
        for i in [i for i, until in self.stopped.items() if until <= now]:
            self.workers[i].go_on()
            del self.stopped[i]

    def end(self) -> Counter[str]:
        """Let all of them come to an end. Returns what they met."""
        self._continue(float("inf"))
        for child in self.workers:
            child.say("stop")
        met: Counter[str] = Counter()
        for child in self.workers:
            met += child.result()
        return met

    def close(self) -> None:
        for child in self.workers:
            child.kill()

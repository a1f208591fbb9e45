"""Fixed programs that are interrupted at every operation of their run, and what must hold when they have ended at last.

A program is data: steps of ``Do``. ``Case`` runs one, disturbed once, then undisturbed until it ends, and looks at what became
of it: by effects counted outside of the journal, and by rows.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

import safepoint
from safepoint import (
    CallFailed,
    Damaged,
    DidNotHappen,
    Done,
    InDoubt,
    NotDone,
    RefusedType,
    Retry,
    StoreFull,
    Unavailable,
    aio,
    script,
)
from safepoint.errors import DecisionNeeded, NotFound
from safepoint.script import Exec, Io
from safepoint.tools import current
from safepoint.tools import model as a_model
from safepoint.tools import tool as a_tool
from tests.support import ledgers

SWALLOWED = "swallowed"
"""Stands in the state for what a swallowing step did not get."""


class Death(BaseException):
    """Raised where a process would be killed; nothing that is asked for after it is done."""


# -- the world outside


class World:
    """What tools do, and what was seen of a run: (what, key, idempotency key)."""

    def __init__(self, task: str) -> None:
        self.task = task
        self.log: list[tuple[str, str, str]] = []
        self.runs = 0
        self.die: tuple[str, str] | None = None
        """(``before`` or ``after``, key): the process dies there, once."""
        self.run: Any = None
        self.values: dict[str, str] = {}

    def note(self, what: str, key: str, idem: str = "") -> None:
        self.log.append((what, key, idem))

    def count(self, what: str, key: str) -> int:
        return sum(e[:2] == (what, key) for e in self.log)

    def start(self, key: str, idem: str = "") -> int:
        self.note("start", key, idem)
        self._maybe("before", key)
        return self.count("start", key)

    def do(self, key: str, idem: str = "") -> str:
        self.note("do", key, idem)
        self._maybe("after", key)
        return f"did {key}"

    def _maybe(self, when: str, key: str) -> None:
        if self.die == (when, key):
            self.die = None
            DRIVER.dead = True
            raise Death

    def verdict(self, call: safepoint.Call) -> Any:
        key = call.arguments["key"]
        self.note("ask", key)
        return Done(f"did {key}") if self.count("do", key) else NotDone()


WORLD: World = World("")


def _verify(call: safepoint.Call) -> Any:
    return WORLD.verdict(call)


def _verify_raises(call: safepoint.Call) -> Any:
    WORLD.note("ask", call.arguments["key"])
    raise ConnectionError("nobody there")


class Unstorable:
    """A class that nobody registered."""


def _wv(key: str, text: str = "", *, idempotency_key: str) -> Any:
    WORLD.start(key, idempotency_key)
    return WORLD.do(key, idempotency_key)


def _fails_first(key: str, *, idempotency_key: str) -> Any:
    if WORLD.start(key, idempotency_key) == 1:
        raise DidNotHappen("not sent")
    return WORLD.do(key, idempotency_key)


def _loses_reply(key: str, *, idempotency_key: str) -> Any:
    WORLD.start(key, idempotency_key)
    WORLD.do(key, idempotency_key)
    raise TimeoutError("no reply")


def _raises_always(key: str) -> Any:
    WORLD.start(key)
    raise OSError("no")


def _odd(key: str, *, idempotency_key: str) -> Any:
    WORLD.start(key, idempotency_key)
    WORLD.do(key, idempotency_key)
    return Unstorable()


def _rd(key: str) -> Any:
    WORLD.start(key)
    return f"read {key}"


def _flaky(key: str) -> Any:
    if WORLD.start(key) < 3:
        raise OSError("not yet")
    return f"read {key}"


def _mdl(key: str) -> Any:
    WORLD.start(key)
    return {"role": "assistant", "content": key}


def _asks(key: str, *, idempotency_key: str) -> Any:
    WORLD.start(key, idempotency_key)
    answer = WORLD.run.pause("inside", "may I?")
    WORLD.do(key, idempotency_key)
    return answer


async def _asks_async(key: str, *, idempotency_key: str) -> Any:
    WORLD.start(key, idempotency_key)
    answer = await WORLD.run.pause("inside", "may I?")
    WORLD.do(key, idempotency_key)
    return answer


def _tx(key: str, *, connection: Any) -> Any:
    WORLD.start(key)
    ledgers.insert(connection, task=WORLD.task, key=key)
    return f"booked {key}"


def _awaited(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The same as a coroutine function that awaits something before and after."""

    async def go(*args: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(0)
        value = fn(*args, **kwargs)
        await asyncio.sleep(0)
        return value

    go.__signature__ = inspect.signature(fn)  # type: ignore[attr-defined]
    return go


def _tools(face: str) -> dict[str, Any]:
    wrap = _awaited if face == "async" else (lambda fn: fn)
    v: dict[str, Any] = {"verify": _verify if face == "sync" else _awaited(_verify), "settle_after": 0}
    made: dict[str, Any] = {
        "wv": a_tool(name=f"{face}.wv", effect="write", **v)(wrap(_wv)),
        "wn": a_tool(name=f"{face}.wn", effect="write")(wrap(_wv)),
        "wk": a_tool(name=f"{face}.wk", effect="write", key=lambda key, text="": key, **v)(wrap(_wv)),
        "wr": a_tool(name=f"{face}.wr", effect="write", retry=Retry(3, 0.001), **v)(wrap(_fails_first)),
        "wl": a_tool(name=f"{face}.wl", effect="write", **v)(wrap(_loses_reply)),
        "wb": a_tool(name=f"{face}.wb", effect="write", verify=_verify_raises, settle_after=0)(wrap(_loses_reply)),
        "odd": a_tool(name=f"{face}.odd", effect="write", **v)(wrap(_odd)),
        "idm": a_tool(name=f"{face}.idm", effect="idempotent")(wrap(_wv)),
        "rd": a_tool(name=f"{face}.rd", effect="read")(_rd),  # sync in both, so on a thread in the one
        "rx": a_tool(name=f"{face}.rx", effect="read")(wrap(_raises_always)),
        "fl": a_tool(name=f"{face}.fl", effect="read", retry=Retry(4, 0.001))(wrap(_flaky)),
        "val": a_tool(name=f"{face}.val", effect="read", retry=Retry(4, 0.001))(wrap(_rd)),
        "mdl": a_model(name=f"{face}.mdl")(wrap(_mdl)),
        "asks": a_tool(name=f"{face}.asks", effect="idempotent")(_asks if face == "sync" else _asks_async),
        "tx": a_tool(name=f"{face}.tx", effect="transactional")(_tx),
    }
    return made


TOOLS: dict[str, dict[str, Any]] = {face: _tools(face) for face in ("sync", "async")}


# -- programs


@dataclass(frozen=True)
class Do:
    """One thing that a step does: ``go(run, tools)`` does it, or gives what is to be awaited."""

    go: Callable[[Any, dict[str, Any]], Any]
    keys: tuple[str, ...] = ()


def call(name: str, key: str, *more: Any, **options: Any) -> Do:
    return Do(lambda run, tools: run.call(tools[name], key, *more, **options), (key,))


def _replanned(run: Any, tools: dict[str, Any]) -> Any:
    return run.call(tools["wk"], "k", f"wording {WORLD.runs}")


def _choosy(value: Any) -> None:
    WORLD.note("choosy", "v")
    if WORLD.count("choosy", "v") < 3:
        raise ValueError("not good enough")


def _many(run: Any, tools: dict[str, Any]) -> Any:
    return run.call_many([tools[n].bind(f"{n}-many") for n in ("wv", "idm", "rd", "wn")])


PAUSE = Do(lambda run, tools: run.pause("p", "well?"))
MILESTONE = Do(lambda run, tools: run.milestone("here"))
MANY = Do(_many, ("wv-many", "idm-many", "rd-many", "wn-many"))


@dataclass(frozen=True)
class Program:
    steps: Sequence[Sequence[Do]]
    save_every: Any = 1
    die: Sequence[tuple[str, str]] = ()
    """Deaths before the run that is disturbed."""
    transactional: bool = False


PROGRAMS: dict[str, Program] = {
    "write-verified": Program([[call("wv", "a"), call("rd", "b")]]),
    "write-unverified": Program([[call("wn", "a"), call("rd", "b")]]),
    "idempotent": Program([[call("idm", "a"), call("wv", "b")]]),
    "transactional": Program([[call("tx", "a"), call("wv", "b")], [call("tx", "c")]], transactional=True),
    "read": Program([[call("rd", "a")], [call("wv", "b")]]),
    "model": Program([[call("mdl", "a"), call("wv", "b", call_id="call_0")], [call("mdl", "c")]]),
    "retries": Program([[call("fl", "a"), call("wr", "b")]]),
    "raises": Program([[call("rx", "a"), call("wl", "b"), call("wv", "c")]]),
    "verifier-raises": Program([[call("rd", "a"), call("wb", "b"), call("wv", "c")]]),
    "many": Program([[MANY, call("wv", "b")]]),
    "pause": Program([[call("wv", "a"), PAUSE, call("wv", "b")]]),
    "pause-inside": Program([[call("wv", "a"), call("asks", "b"), call("wv", "c")]]),
    "replayed": Program(
        [[call("mdl", "m"), call("wv", "a"), call("wn", "b"), call("idm", "c"), call("rx", "x"), call("rd", "d")]],
        die=[("before", "d")],
    ),
    "replayed-many": Program([[MANY, call("rd", "d"), call("wv", "e")]], die=[("before", "d")]),
    "save-every-3": Program([[call("wv", f"w{n}"), call("rd", f"r{n}")] for n in range(4)], save_every=3),
    "finish": Program([[], []]),
    "milestone": Program([[call("wv", "a"), MILESTONE], [call("wn", "b")]], save_every="milestone"),
    "settle-done": Program([[call("wv", "a"), call("rd", "b")]], die=[("after", "a")]),
    "settle-not-done": Program([[call("rd", "b"), call("wv", "a")]], die=[("before", "a")]),
    "settle-parked": Program([[call("wn", "a"), call("rd", "b")]], die=[("after", "a")]),
    "validate": Program([[call("val", "v", validate=_choosy), call("wv", "a")]]),
    "lost-result": Program([[call("odd", "a"), call("wv", "b")]]),
    "replan-key": Program([[Do(_replanned, ("k",)), call("rd", "b"), call("wv", "c")]], die=[("before", "b")]),
}

REACTIONS = ("through", "again", "on")
"""What a step does with an exception: lets it through; swallows it and tries twice more; swallows it and goes on."""


# -- the disturbance


KINDS: dict[str, Callable[[], BaseException]] = {
    "interrupt": KeyboardInterrupt,
    "cancelled": asyncio.CancelledError,
    "unavailable": lambda: Unavailable("injected"),
    "full": lambda: StoreFull("injected"),
    "damaged": lambda: Damaged("injected"),
    "memory": MemoryError,
    "death": Death,
}


FAILURES = ("unavailable", "full", "damaged", "memory")
"""Those that a tool may raise as its own error."""


class Driver:
    """Counts operations, and disturbs the n-th: ``instead`` of doing it, or ``after`` it was done, its answer lost."""

    def __init__(self) -> None:
        self.real_sync, self.real_async = script.perform, aio._perform
        self.lock = threading.Lock()
        self.arm(0)

    def arm(self, nth: int, kind: str = "", when: str = "") -> None:
        self.nth, self.kind, self.when = nth, kind, when
        self.seen = 0
        self.dead = False
        self.hit_op = self.hit_what = ""

    def _hit(self, op: Any) -> bool:
        with self.lock:
            self.seen += 1
            if self.seen == self.nth:
                self.hit_op = f"{type(op).__name__} {getattr(getattr(op, 'fn', None), '__qualname__', '')}"
                here = op.here if isinstance(op, Exec) else current.get()
                inside = here is not None and here.call is not None
                self.hit_what = "tool" if inside else type(op).__name__
                return True
            return False

    def _raise(self) -> None:
        self.dead = self.kind == "death"
        error = KINDS[self.kind]()
        raise error

    def sync(self, op: Any, loop: Any) -> Any:
        if self.dead:
            raise Death
        hit = self._hit(op)
        if hit and self.when == "instead":
            self._raise()
        value = self.real_sync(op, loop)
        if self.dead:
            raise Death
        if hit:
            self._raise()
        return value

    async def awaited(self, op: Any, offload: Any) -> Any:
        if self.dead:
            raise Death
        hit = self._hit(op)
        if hit and self.kind == "cancelled":
            return await self._cancelled(op, offload)
        if hit and self.when == "instead":
            self._raise()
        value = await self.real_async(op, offload)
        if self.dead:
            raise Death
        if hit:
            self._raise()
        return value

    async def _cancelled(self, op: Any, offload: Any) -> Any:
        """A real cancellation: of the operation's first await, or of that which waits for what is done already."""
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        if self.when == "instead" or not isinstance(op, Io | Exec):
            task.cancel()
            return await self.real_async(op, offload)
        fn = op.fn
        if isinstance(op, Exec) and op.is_async:

            async def go(*args: Any, **kwargs: Any) -> Any:
                value = await fn(*args, **kwargs)
                task.cancel()
                return value

            return await self.real_async(replace(op, fn=go), offload)

        def done(*args: Any, **kwargs: Any) -> Any:
            value = fn(*args, **kwargs)
            loop.call_soon_threadsafe(task.cancel)
            return value

        return await self.real_async(replace(op, fn=done), offload)


DRIVER = Driver()


@contextlib.contextmanager
def hooked() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "perform", DRIVER.sync)
        patch.setattr(aio, "_perform", DRIVER.awaited)
        yield


# -- running a program


def _seen(value: Any) -> Any:
    return type(value).__name__ if isinstance(value, BaseException) else value


class Player:
    """Runs a program on one face, once, with a reaction to exceptions."""

    def __init__(self, cp: Any, face: str, program: Program, world: World, reaction: str) -> None:
        self.cp, self.program, self.world, self.reaction = cp, program, world, reaction
        self.face, self.how = face.split("-")[::-1]
        self.tools = TOOLS[self.face]
        self.tries = {"through": 1, "again": 3, "on": 1}[reaction]

    def _over(self, attempt: int, error: BaseException) -> bool:
        """Whether to give up on an operation that raised: the error goes through."""
        return self.reaction == "through" and not isinstance(error, CallFailed | RefusedType)

    def _finishes(self, n: int) -> bool:
        return n >= len(self.program.steps) - 1

    def _todo(self, run: Any) -> list[Do]:
        n = run.state.step
        self.world.run = run
        self.world.note("step", str(n))
        # Who swallows an interrupted finish has one more step to do.
        todo = list(self.program.steps[n]) if n < len(self.program.steps) else []
        if self._finishes(n):
            todo.append(Do(lambda run, tools: run.finish("the end")))
        return todo

    def _note(self, do: Do) -> None:
        for key in do.keys:
            self.world.note("reached", key)

    def step(self, run: Any) -> None:
        for do in self._todo(run):
            value: Any = SWALLOWED
            self._note(do)
            for attempt in range(self.tries):
                try:
                    value = do.go(run, self.tools)
                    break
                except BaseException as error:
                    if isinstance(error, CallFailed | RefusedType):
                        value = _seen(error)
                        break
                    if self._over(attempt, error):
                        raise
            run.state.messages.append(value)

    async def step_async(self, run: Any) -> None:
        for do in self._todo(run):
            value: Any = SWALLOWED
            self._note(do)
            for attempt in range(self.tries):
                try:
                    value = do.go(run, self.tools)
                    if inspect.isawaitable(value):
                        value = await value
                    break
                except BaseException as error:
                    value = SWALLOWED
                    if isinstance(error, CallFailed | RefusedType):
                        value = _seen(error)
                        break
                    if self._over(attempt, error):
                        raise
            run.state.messages.append(value)

    # the loop

    def agent(self) -> str:
        outcome = safepoint.run_agent(
            self.step, task_id=self.world.task, input="go", store=self.cp, save_every=self.program.save_every
        )
        return outcome.status

    async def agent_async(self, acp: Any) -> str:
        outcome = await safepoint.run_agent_async(
            self.step_async, task_id=self.world.task, input="go", store=acp, save_every=self.program.save_every
        )
        return outcome.status

    # one's own loop

    def handle(self) -> str:
        if self._is_finished():
            return "finished"
        try:
            with self.cp.resume(self.world.task) as run:
                while (n := run.state.step) < len(self.program.steps) or not self._is_finished():
                    self.step(run)
                    for attempt in range(self.tries):
                        try:
                            if run.state.step == n:
                                run.save()
                            break
                        except BaseException as error:
                            if self._over(attempt, error):
                                raise
                    if run.state.step == n:
                        break
        except (InDoubt, DecisionNeeded):
            return "waiting"
        return "finished" if self._is_finished() else "left"

    async def handle_async(self, acp: Any) -> str:
        if self._is_finished():
            return "finished"
        try:
            async with acp.resume(self.world.task) as run:
                while (n := run.state.step) < len(self.program.steps) or not self._is_finished():
                    await self.step_async(run)
                    for attempt in range(self.tries):
                        try:
                            if run.state.step == n:
                                await run.save()
                            break
                        except BaseException as error:
                            if self._over(attempt, error):
                                raise
                    if run.state.step == n:
                        break
        except (InDoubt, DecisionNeeded):
            return "waiting"
        return "finished" if self._is_finished() else "left"

    def _is_finished(self) -> bool:
        try:
            return bool(self.cp.status(self.world.task).status == "finished")
        except NotFound:
            return False

    def play(self, bench: Bench) -> str:
        self.world.runs += 1
        if self.face == "sync":
            return str(getattr(self, self.how)())
        return str(bench.await_(getattr(self, f"{self.how}_async")(bench.acp)))


FACES = ("agent-sync", "handle-sync", "agent-async", "handle-async")


class Bench:
    """An open store with what both faces need."""

    def __init__(self, url: str) -> None:
        self.cp = safepoint.open(url, durability="process")
        self.transactional = ledgers.make(self.cp, "task TEXT, key TEXT")
        self.acp = safepoint.open_async(self.cp)
        self.runner = asyncio.Runner()
        self.n = 0
        self.storm: Storm | None = None

    def await_(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(self._under_fire(coroutine))

    async def _under_fire(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        # From here on asyncio makes a cancellation of Ctrl-C; a little earlier it would lose the task.
        if self.storm is None:
            return await coroutine
        try:
            self.storm.begin()
            return await coroutine
        finally:
            self.storm.armed = False

    def close(self) -> None:
        self.await_(self.acp.close())
        self.runner.close()
        self.cp.close()

    def ledger(self, task: str) -> dict[str, int]:
        if not self.transactional:
            return {}
        with self.cp.connection() as connection:
            found = connection.execute(f"SELECT key, task FROM {ledgers.table_of(self.cp.store.url)}").fetchall()
        return dict(Counter(key for key, of in found if of == task))


@dataclass
class Case:
    """One program, disturbed once in one way."""

    bench: Bench
    face: str
    program: Program
    reaction: str = "through"
    nth: int = 0
    kind: str = ""
    when: str = ""
    expected: list[Any] | None = None
    operations: int = 0
    """How many the disturbed run did."""
    storm: Storm | None = None
    took: float = 0.0
    hit: str = ""
    told: list[str] = field(default_factory=list)
    keep: list[BaseException] = field(default_factory=list)
    """Exceptions, with the frames of the runs that they went through: no lease may hang on them."""

    def __str__(self) -> str:
        return f"{self.face} {self.reaction} {self.kind} {self.when} {self.nth}: {self.told}"

    def play(self) -> list[Any]:
        global WORLD
        self.bench.n += 1
        self.task = f"t{self.bench.n}"
        WORLD = self.world = World(self.task)
        for die in self.program.die:
            self.world.die = die
            DRIVER.arm(0)
            self.once("through")
            self.look()
        DRIVER.arm(self.nth, self.kind, self.when)
        began = time.perf_counter()
        if self.storm is None:
            status = self.once(self.reaction)
        else:
            is_async = self.face.endswith("async")
            self.bench.storm = self.storm if is_async else None
            status = self.storm.over(lambda: self.once(self.reaction), later=is_async)
            self.bench.storm = None
        self.took = time.perf_counter() - began
        if self.storm is not None:
            self.told.append(f"{status} {self.storm.fell}")
            if self.world.run is not None and any(
                fell.startswith("run.py:") and "__exit__" in fell for fell in self.storm.fell
            ):
                # Before its first line nothing of it can know. Who goes on in the same process after that closes the run.
                with contextlib.suppress(safepoint.SafepointError):
                    self.world.run.close()
            self.world.run = None
            self.keep.clear()  # at any byte of the code: what holds a lease then may be let go of with its run
            gc.collect()
        self.operations = DRIVER.seen
        self.hit = DRIVER.hit_what
        self.told.append(f"hit {DRIVER.hit_op}")
        self.look()
        for _ in range(8):
            if status == "finished":
                break
            self.settle()
            DRIVER.arm(0)
            status = self.planned()
            self.look()
        assert status == "finished", "never finished"
        return self.end()

    def once(self, reaction: str) -> str:
        player = Player(self.bench.cp, self.face, self.program, self.world, reaction)
        try:
            status = player.play(self.bench)
        except BaseException as error:
            if isinstance(error, AssertionError) or type(error).__name__ == "Failed":
                raise
            self.keep.append(error)
            status = f"raised {type(error).__name__}"
        DRIVER.dead = False
        self.told.append(status)
        return status

    def settle(self) -> None:
        """A person says the truth."""
        cp = self.bench.cp
        if not self._exists():
            return
        for c in cp.calls(self.task, status="in_doubt"):
            key = c.arguments["key"]
            cp.resolve(self.task, c.no, Done(f"did {key}") if self.world.count("do", key) else NotDone())
            self.told.append(f"resolved {key}")
        for p in cp.pauses(self.task):
            cp.answer(self.task, p.no, "yes")

    def _exists(self) -> bool:
        return self.bench.cp.store.task(self.task) is not None

    def look(self) -> None:
        """What holds after each run, however it ended."""
        store = self.bench.cp.store
        if not self._exists():
            return
        lease = store.lease(self.task)
        assert lease is None or not lease.live, "a lease is held after the run"
        rows, _ = store.calls(self.task)
        saved = [h for h in store.headers(self.task) if h.kind != "failure"]
        for r in rows:
            if r.effect == "write" and r.status in ("started", "in_doubt", "paused"):
                assert all(h.step <= r.step for h in saved), f"saved past open call {r.no} {r.tool}"

    def planned(self) -> str:
        plan = self.bench.cp.plan(self.task) if self._exists() else None
        before = len(self.world.log)
        status = self.once("through")
        if plan is not None:
            try:
                self.compare(plan, self.world.log[before:], status)
            except AssertionError as error:
                error.add_note(str(plan))
                raise
        return status

    def compare(self, plan: Any, log: list[tuple[str, str, str]], status: str) -> None:
        steps = [k for what, k, _ in log if what == "step"]
        match plan.does:
            case "nothing":
                assert (status, log) == ("finished", []), f"planned nothing: {status} {log}"
            case "wait":
                assert status == "waiting"
                assert not steps
            case "begin" | "carry on":
                assert not steps or steps[0] == str(plan.step)
            case _:
                raise AssertionError(plan.does)
        for p in plan.calls:
            key = p.call.arguments["key"]
            where = f"{p.action} {p.call.tool} {key}: {log}"
            starts = [i for what, k, i in log if (what, k) == ("start", key)]
            asks = [k for what, k, _ in log if (what, k) == ("ask", key)]
            reached = ("reached", key, "") in log
            if p.action != "verify" and not starts:
                assert not asks, where
            others = [q.action for q in plan.calls if q is not p and q.call.arguments["key"] == key]
            match p.action:
                case "reuse" | "lost" | "raise" | "park" | "wait":
                    # A read carries no key of its own: what was started may be the other call with these arguments.
                    assert not starts or {"repeat", "ask_anew"} & {*others}, where
                case "repeat":
                    assert bool(starts) == reached or status != "finished", where
                    assert not [i for i in starts if i and i != p.call.idempotency_key], where
                case "verify":
                    assert asks, where
                case "ask_anew":
                    assert not reached or starts, where

    def excuses(self) -> list[str]:
        """What may stand in the state instead of a result."""
        excuses: list[str] = [] if self.reaction == "through" else [SWALLOWED]
        if (self.kind in FAILURES and self.hit == "tool") or self.reaction == "on":
            excuses.append("CallFailed")  # the tool raised it, or the step went on past its failure
        return excuses

    def end(self) -> list[Any]:
        """What holds when the task has ended."""
        cp = self.bench.cp
        status = cp.status(self.task).status
        assert status == "finished", f"the status is {status}"
        with_keys: dict[str, list[Any]] = {}
        for c in cp.calls(self.task):
            assert c.status != "started", f"call {c.no} {c.tool} of a finished task is started"
            with_keys.setdefault(c.arguments["key"], []).append(c)
        ledger = self.bench.ledger(self.task)
        for key in {k for what, k, _ in self.world.log if what == "do"} | with_keys.keys() | ledger.keys():
            calls = with_keys.get(key, [])
            succeeded = sum(c.status == "succeeded" for c in calls)
            done = self.world.count("do", key)
            effect = calls[0].effect if calls else "?"
            where = f"{effect} {key}: {done} effects, {[(c.no, c.status, c.attempts) for c in calls]}"
            match effect:
                case "write":
                    assert done == succeeded <= 1, where
                case "idempotent":
                    idems = {i for what, k, i in self.world.log if (what, k) == ("do", key)}
                    assert len(idems) <= 1, f"{where} {idems}"
                    assert succeeded <= 1, where
                    assert done >= succeeded, where
                case "transactional":
                    assert ledger.get(key, 0) == succeeded <= 1, f"{where} {ledger}"
                case "?":
                    raise AssertionError(where)
        state = cp.load_latest(self.task)
        assert state is not None
        more = state.step - len(self.program.steps)
        # Ctrl-C in the letting go of a finished task leaves it interrupted, and one's own loop does one step more.
        assert more == 0 or (more > 0 and self.storm is not None), f"ended at step {state.step}"
        messages = list(state.messages)
        if self.expected is not None and not more:
            assert len(messages) == len(self.expected), f"{messages} {self.expected}"
            for got, want in zip(messages, self.expected, strict=True):
                told = want == "RefusedType" and got == "did a"  # lost, but for the verifier
                assert got == want or told or got in self.excuses(), f"{got!r} instead of {want!r} in {messages}"
        return messages


class Storm:
    """Ctrl-C for real, at random moments: SIGINT, raised by the handler of a timer."""

    def __init__(self, rng: random.Random, within: float, most: int) -> None:
        self.rng, self.within, self.left = rng, within, rng.randint(1, most)
        self.armed = False
        self.fell: list[str] = []

    def _ring(self, number: int, frame: Any) -> None:
        # Not into the program's own lines: what a step was given it has, and what it then repeats is its own.
        if self.armed and self.left and frame.f_code.co_filename != __file__:
            self.left -= 1
            code = frame.f_code
            self.fell.append(f"{code.co_filename.rpartition('/')[2]}:{frame.f_lineno} {code.co_name}")
            signal.raise_signal(signal.SIGINT)

    def begin(self) -> None:
        self.armed = True
        signal.setitimer(signal.ITIMER_REAL, self.rng.uniform(1e-5, self.within), self.rng.uniform(1e-4, self.within))

    def over(self, play: Callable[[], str], *, later: bool) -> str:
        """Play under fire; with ``later`` it is play that begins it."""
        signal.signal(signal.SIGALRM, self._ring)
        status = ""
        try:
            try:
                if not later:
                    self.begin()
                status = play()
            finally:
                self.armed = False
        except KeyboardInterrupt:
            status = status or "raised KeyboardInterrupt"
        signal.setitimer(signal.ITIMER_REAL, 0)
        return status


def storms(url: str, face: str, seed: str, seconds: float, most: int = 1) -> tuple[int, list[str]]:
    """In a child: programs under fire for so long. Returns how many there were, and what did not hold."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rng = random.Random(seed)
    bench = Bench(url)
    failures: list[str] = []
    calm: dict[str, Case] = {}
    n = 0
    end = time.monotonic() + seconds
    with hooked():
        while time.monotonic() < end:
            name = rng.choice([p for p in PROGRAMS if bench.transactional or not PROGRAMS[p].transactional])
            if name not in calm:
                calm[name] = Case(bench, face, PROGRAMS[name])
                calm[name].expected = calm[name].play()
            # Of several one may fall into what tidies up after another, where no Python code is safe; and a second one breaks
            # off an event loop with whatever it runs.
            storm = Storm(rng, calm[name].took * 1.2, most)
            case = Case(bench, face, PROGRAMS[name], rng.choice(REACTIONS), expected=calm[name].expected, storm=storm)
            n += 1
            try:
                case.play()
            except Exception as error:
                notes = " ".join(getattr(error, "__notes__", ()))
                failures.append(f"{name} {case}: {type(error).__name__} {error} {notes}")
    bench.close()
    return n, failures

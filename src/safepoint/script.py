"""One core under two faces: what a run does is written once, as generators that yield operations.

A script never blocks and never awaits. It yields what is to be done outside (``Io`` on the store, ``Exec`` of user code, a
``Sleep``, ``Together``) and is sent the outcome. ``drive`` does these things in place; ``aio.drive_async`` does them on an
event loop. So sync and async runs cannot drift apart.
"""

from __future__ import annotations

import contextvars
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from safepoint.errors import RunEnded, UsageError
from safepoint.tools import Current, current, is_async

if TYPE_CHECKING:  # asyncio costs a third of the library's import; who needs it has it, or gets it on first use
    import asyncio
    from concurrent.futures import Future

T = TypeVar("T")
Script = Generator["Op", Any, T]


class Op:
    """Something that a script wants done."""


@dataclass(frozen=True, slots=True)
class Io(Op):
    """Call the store; blocking. ``must``: also when a cancellation has come meanwhile, since what is to be written is known
    and would be lost."""

    fn: Callable[[], Any]
    must: bool = False


@dataclass(frozen=True, slots=True, repr=False)
class Exec(Op):
    """Run user code: a tool, a verifier, a hook, a step. ``here`` is what it finds as its context."""

    fn: Callable[..., Any]
    args: Sequence[Any] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    here: Current | None = None
    timeout: float | None = None

    def run(self) -> Any:
        token = current.set(self.here)
        try:
            return self.fn(*self.args, **self.kwargs)
        finally:
            current.reset(token)

    async def arun(self) -> Any:
        import asyncio

        token = current.set(self.here)
        try:
            async with asyncio.timeout(self.timeout):
                return await self.fn(*self.args, **self.kwargs)
        finally:
            current.reset(token)

    @property
    def is_async(self) -> bool:
        return is_async(self.fn)


@dataclass(frozen=True, slots=True)
class Sleep(Op):
    seconds: float


@dataclass(frozen=True, slots=True)
class Pass(Op):
    """Nothing; a place at which a cancellation that was put off comes out, before a value counts as delivered."""


@dataclass(frozen=True, slots=True)
class Together(Op):
    """Drive these scripts at the same time, at most ``width`` at once, to the end of each. The outcome is a list of results
    and exceptions, in order."""

    scripts: Sequence[Script[Any]]
    width: int


class LoopThread:
    """A run's own event loop, on a thread of its own: async tools of a sync run live there. Started on first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        import asyncio
        from concurrent.futures import Future

        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="safepoint-loop", daemon=True)
                self._thread.start()
        context = contextvars.copy_context()
        done: Future[Any] = Future()

        def begin() -> None:
            assert self._loop is not None
            task = self._loop.create_task(coroutine, context=context)
            tasks.append(task)
            task.add_done_callback(lambda t: _copy_outcome(t, done))

        tasks: list[asyncio.Task[Any]] = []
        self._loop.call_soon_threadsafe(begin)
        try:
            return done.result()
        except BaseException:
            # Ctrl-C while waiting: stop the tool, and wait until it has stopped, before the interrupt goes on.
            if not done.done():
                self._loop.call_soon_threadsafe(lambda: [t.cancel() for t in tasks])
                done.exception()
            raise

    def close(self) -> None:
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None:
            return
        if thread is threading.current_thread():
            loop.stop()
            return
        import asyncio

        asyncio.run_coroutine_threadsafe(_shut(loop), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _shut(loop: asyncio.AbstractEventLoop) -> None:
    import asyncio

    others = [t for t in asyncio.all_tasks(loop) if t is not asyncio.current_task()]
    for t in others:
        t.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await loop.shutdown_asyncgens()
    await loop.shutdown_default_executor()


def _copy_outcome(task: asyncio.Task[Any], done: Future[Any]) -> None:
    import asyncio

    if task.cancelled():
        done.set_exception(asyncio.CancelledError())
    elif (error := task.exception()) is not None:
        done.set_exception(error)
    else:
        done.set_result(task.result())


def drive(script: Script[T], loop: LoopThread) -> T:
    """Do what the script asks for, in this thread, and return its result."""
    value: Any = None
    error: BaseException | None = None
    state: Any = script
    while True:
        try:
            raised, error = error, None
            try:
                op = script.send(value) if raised is None else script.throw(raised)
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]
            value = perform(op, loop)
        except BaseException as caught:
            # Ctrl-C may come between two operations, too: the script is told, so that it lets go of what it holds.
            # (No function is called on the way out: there, one more would take the place of a result that was delivered.)
            if state.gi_frame is not None:
                value, error = None, caught
                continue
            raise


def perform(op: Op, loop: LoopThread) -> Any:
    match op:
        case Io():
            return op.fn()
        case Exec():
            return loop.run(op.arun()) if op.is_async else op.run()
        case Sleep():
            time.sleep(op.seconds)
            return None
        case Pass():
            return None
        case Together():
            return _together(op, loop)
    raise AssertionError(op)


def _together(op: Together, loop: LoopThread) -> list[Any]:
    if len(op.scripts) == 1 or op.width == 1:
        outcomes = []
        for s in op.scripts:
            outcomes.append(_outcome(s, loop))
            error = outcomes[-1].error if isinstance(outcomes[-1], Raised) else None
            if error is not None and not isinstance(error, Exception | RunEnded):
                raise error  # Ctrl-C: nothing more is begun
        return outcomes
    from concurrent.futures import Future, ThreadPoolExecutor, wait

    # Futures of our own: one that is cancelled is never begun, and one that was begun is waited for, also where Ctrl-C comes
    # while its thread is being started and the pool does not know of it.
    jobs: list[Future[Any]] = [Future() for _ in op.scripts]

    def work(job: Future[Any], script: Script[Any]) -> None:
        if job.set_running_or_notify_cancel():
            job.set_result(_outcome(script, loop))

    pool = ThreadPoolExecutor(min(op.width, len(jobs)), thread_name_prefix="safepoint-call")
    interrupt: BaseException | None = None
    try:
        for job, script in zip(jobs, op.scripts, strict=True):
            pool.submit(contextvars.copy_context().run, work, job, script)  # a context each: two threads cannot enter one
    except BaseException as error:
        interrupt = error
    while True:
        try:
            if interrupt is not None:
                for job in jobs:
                    job.cancel()  # nothing more is begun
            wait([job for job in jobs if not job.cancelled()])
            break
        except BaseException as error:
            interrupt = error
    pool.shutdown(wait=False)
    if interrupt is not None:
        raise interrupt
    return [job.result() for job in jobs]


def _outcome(script: Script[Any], loop: LoopThread) -> Any:
    try:
        return drive(script, loop)
    except BaseException as error:
        return Raised(error)


@dataclass(frozen=True, slots=True, repr=False)
class Raised:
    """An exception as a value."""

    error: BaseException


def no_running_loop(what: str, instead: str) -> None:
    """Refuse to block an event loop."""
    # No loop can be running where asyncio has not been imported.
    events = sys.modules.get("asyncio.events")
    if events is None or events._get_running_loop() is None:
        return
    raise UsageError(f"{what} was called inside a running event loop", "it would block the loop", f"Use {instead}.")

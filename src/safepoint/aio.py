"""The async face: the same verbs, awaited.

Store work runs on a small pool of the checkpointer's own threads; nothing is bound to an event loop, so one object serves
several loops, at once or in turn. A cancellation waits for the outcome of what is under way before it goes on: a cancelled
save has landed or has not, and nothing lands later.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any, Self, TypeVar

from safepoint import agent as agents
from safepoint import checkpointer
from safepoint.agent import Job, Loop, SaveEvery, Step
from safepoint.aio_verbs import MoreAsyncVerbs
from safepoint.calling import Validate
from safepoint.checkpointer import Checkpointer
from safepoint.errors import DecisionNeeded, InDoubt, UsageError
from safepoint.model import (
    Call,
    Checkpoint,
    CleanupReport,
    Done,
    Finding,
    Kind,
    NotDone,
    Outcome,
    Pause,
    State,
    TaskInfo,
    check_id,
    new_id,
)
from safepoint.restoring import Wish
from safepoint.rules.health import Check
from safepoint.script import Exec, Io, Op, Pass, Raised, Script, Sleep, Together
from safepoint.session import RunBase
from safepoint.steps import NamedSteps, SkipIf
from safepoint.stores.base import Store
from safepoint.streaming import AsyncStream, Collect, Feed
from safepoint.tools import Bound, Tool, is_async

T = TypeVar("T")

_THREADS = 8


class Offload:
    """Threads for blocking work. After a fork the child makes its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._pid = 0
        self.closed = False

    def submit(self, fn: Callable[[], T]) -> Future[T]:
        import os

        with self._lock:
            if self.closed:
                raise UsageError("the checkpointer is closed", "", "Open a new one.")
            if self._pool is None or self._pid != os.getpid():
                self._pool, self._pid = ThreadPoolExecutor(_THREADS, thread_name_prefix="safepoint"), os.getpid()
            return self._pool.submit(contextvars.copy_context().run, fn)

    async def __call__(self, fn: Callable[[], T]) -> T:
        """Do ``fn`` on a thread. If cancelled: not begun means not done; begun is waited for, then the cancellation goes on."""
        return await settled(self.submit(fn))

    def close(self) -> None:
        with self._lock:
            self.closed, pool, self._pool = True, self._pool, None
        if pool is not None:
            pool.shutdown(wait=True)


async def settled(job: Future[T], *, must: bool = False) -> T:
    """The outcome of a thread's work, waited for even through cancellation; with ``must`` also if it was not begun yet."""
    waiter = asyncio.wrap_future(job)
    try:
        return await asyncio.shield(waiter)
    except asyncio.CancelledError:
        if not must and job.cancel():
            raise
        while not job.done():
            try:
                await asyncio.shield(asyncio.wait([waiter]))
            except asyncio.CancelledError:
                continue  # asked again while the work is under way; the answer is the same
        # Looked at, so that it is not reported as lost, with its text, when the waiter is collected.
        waiter.add_done_callback(lambda w: None if w.cancelled() else w.exception())
        raise


async def drive_async(script: Script[T], offload: Offload) -> T:
    """Do what the script asks for on this event loop, and return its result.

    A cancellation that comes while a thread works waits for the thread, and is then put off until the script has recorded what
    came of it: a tool that ran to its end must not become one whose outcome is unknown.
    """
    value: Any = None
    error: BaseException | None = None
    cancelled: asyncio.CancelledError | None = None
    while True:
        try:
            op = script.send(value) if error is None else script.throw(error)
        except StopIteration as stop:
            if cancelled is not None:
                raise cancelled from None
            return stop.value  # type: ignore[no-any-return]
        value = error = None
        if cancelled is not None and not (isinstance(op, Io) and op.must):
            error, cancelled = cancelled, None
            continue
        try:
            value = await _perform(op, offload)
        except _Late as late:
            cancelled = late.cancelled
            try:
                value = late.job.result()
            except BaseException as raised:
                error = raised
        except BaseException as caught:
            error = caught


class _Late(BaseException):
    """Work came to its end although this cancellation was raised while it was waited for."""

    def __init__(self, cancelled: asyncio.CancelledError, job: Future[Any]) -> None:
        super().__init__()
        self.cancelled = cancelled
        self.job = job


async def _perform(op: Op, offload: Offload) -> Any:
    match op:
        case Io():
            job = offload.submit(op.fn)
            return await _finishing(job, must=op.must)
        case Exec():
            if op.is_async:
                return await op.arun()
            return await _in_thread(op)
        case Sleep():
            return await asyncio.sleep(op.seconds)
        case Pass():
            return None
        case Together():
            return await _together(op, offload)
    raise AssertionError(op)


async def _finishing(job: Future[Any], *, must: bool) -> Any:
    try:
        return await settled(job, must=must)
    except asyncio.CancelledError as cancelled:
        if must and job.done() and not job.cancelled():
            raise _Late(cancelled, job) from None
        raise


async def _in_thread(op: Exec) -> Any:
    # A thread of its own, not one of the pool's: a long tool must not keep saves waiting. It cannot be stopped, so a
    # cancellation waits for it.
    return await _finishing(_thread(op.run), must=True)


def _thread(fn: Callable[[], Any]) -> Future[Any]:
    """Run ``fn`` on a thread of its own, in a copy of this context."""
    job: Future[Any] = Future()
    context = contextvars.copy_context()

    def work() -> None:
        try:
            result = context.run(fn)
        except StopIteration as error:
            wrapped = RuntimeError("a tool or step raised StopIteration")
            wrapped.__cause__ = error
            job.set_exception(wrapped)
        except BaseException as error:
            job.set_exception(error)
        else:
            job.set_result(result)

    # A thread must not raise StopIteration into a future: asyncio could not hand it on, and would wait for ever.
    job.set_running_or_notify_cancel()
    threading.Thread(target=work, name="safepoint-tool", daemon=True).start()
    return job


async def _together(op: Together, offload: Offload) -> list[Any]:
    gate = asyncio.Semaphore(op.width)

    async def one(script: Script[Any]) -> Any:
        try:
            async with gate:
                return await drive_async(script, offload)
        except BaseException as error:
            script.close()
            return Raised(error)

    tasks = [asyncio.ensure_future(one(s)) for s in op.scripts]
    cancelled: asyncio.CancelledError | None = None
    while pending := [t for t in tasks if not t.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            cancelled = error
            for t in pending:
                t.cancel()
    if cancelled is not None:
        raise cancelled
    return [t.result() for t in tasks]


def open_async(store: str | Store | Checkpointer = "memory://", **options: Any) -> AsyncCheckpointer:
    """Open an async checkpointer; takes what ``safepoint.open`` takes, and may be called anywhere, without a loop."""
    return AsyncCheckpointer(checkpointer.open(store, **options), own=not isinstance(store, Checkpointer))


class AsyncCheckpointer(MoreAsyncVerbs):
    """Every verb of ``Checkpointer`` under the same name, awaited. ``sync`` is the one underneath."""

    def __init__(self, cp: Checkpointer, *, own: bool = True) -> None:
        self.sync = cp
        self._own = own
        self._off = Offload()

    def __repr__(self) -> str:
        return f"<AsyncCheckpointer {self.sync.store.url}>"

    async def save(self, state: State, *, label: str | None = None, kind: Kind = "manual", id: str | None = None) -> Checkpoint:
        """See ``Checkpointer.save``. The state is encoded on a thread: do not change it before this returns."""
        return await self._off(lambda: self.sync.save(state, label=label, kind=kind, id=id))

    async def load_latest(self, task_id: str) -> State | None:
        return await self._off(lambda: self.sync.load_latest(task_id))

    async def load(self, task_id: str, *, seq: int | None = None, branch: str | None = None, id: str | None = None) -> State:
        return await self._off(lambda: self.sync.load(task_id, seq=seq, branch=branch, id=id))

    async def update(
        self, task_id: str, fn: Callable[[State], Any], *, retries: int = 5, label: str | None = None
    ) -> Checkpoint:
        return await self._off(lambda: self.sync.update(task_id, fn, retries=retries, label=label))

    async def check_state(self, state: State) -> None:
        await self._off(lambda: self.sync.check_state(state))

    async def list_checkpoints(
        self,
        task_id: str,
        *,
        limit: int | None = None,
        before: int | None = None,
        branch: str | None = None,
        filter: Mapping[str, Any] | None = None,
        check: bool = False,
    ) -> list[Checkpoint]:
        return await self._off(
            lambda: self.sync.list_checkpoints(task_id, limit=limit, before=before, branch=branch, filter=filter, check=check)
        )

    async def tasks(self, *, status: str | None = None, limit: int | None = None) -> list[TaskInfo]:
        return await self._off(lambda: self.sync.tasks(status=status, limit=limit))

    async def status(self, task_id: str) -> TaskInfo:
        return await self._off(lambda: self.sync.status(task_id))

    def resume(self, task_id: str | None = None, **options: Any) -> AsyncRun:
        """``async with acp.resume("task-1") as run``; the lease is taken on entering."""
        return AsyncRun(self, task_id, **options)

    async def calls(self, task_id: str, *, status: str | None = None, limit: int | None = None) -> list[Call]:
        return await self._off(lambda: self.sync.calls(task_id, status=status, limit=limit))

    async def resolve(self, task_id: str, call: int | Call, verdict: Done | NotDone) -> Call:
        return await self._off(lambda: self.sync.resolve(task_id, call, verdict))

    async def pauses(self, task_id: str, *, status: str | None = "open") -> list[Pause]:
        return await self._off(lambda: self.sync.pauses(task_id, status=status))

    async def answer(self, task_id: str, pause: int | str | Pause, answer: Any) -> Pause:
        return await self._off(lambda: self.sync.answer(task_id, pause, answer))

    async def finish(self, task_id: str, result: Any = None) -> Checkpoint:
        return await self._off(lambda: self.sync.finish(task_id, result))

    async def pin(self, task_id: str, seq: int) -> None:
        await self._off(lambda: self.sync.pin(task_id, seq))

    async def unpin(self, task_id: str, seq: int) -> None:
        await self._off(lambda: self.sync.unpin(task_id, seq))

    async def cleanup(
        self,
        task_id: str,
        *,
        keep_latest: int | None = None,
        max_age: timedelta | None = None,
        max_bytes: int | None = None,
        keep_milestones: bool | None = None,
        keep_failures: int | None = None,
        dry_run: bool = False,
    ) -> CleanupReport:
        return await self._off(
            lambda: self.sync.cleanup(
                task_id,
                keep_latest=keep_latest,
                max_age=max_age,
                max_bytes=max_bytes,
                keep_milestones=keep_milestones,
                keep_failures=keep_failures,
                dry_run=dry_run,
            )
        )

    async def delete_task(self, task_id: str) -> None:
        await self._off(lambda: self.sync.delete_task(task_id))

    async def check(self) -> list[Finding]:
        return await self._off(self.sync.check)

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Any]:
        """See ``Checkpointer.connection``. The connection itself is a plain one: long statements belong on a thread."""
        if self._off.closed:
            raise UsageError("the checkpointer is closed", "", "Open a new one.")
        lent = self.sync.connection()
        own = ThreadPoolExecutor(1, thread_name_prefix="safepoint-lend")  # what takes a lock must give it back
        try:
            taken = own.submit(lent.__enter__)
            try:
                connection = await settled(taken)
            except asyncio.CancelledError:
                if not taken.cancelled() and taken.exception() is None:
                    await settled(own.submit(lent.__exit__, None, None, None))
                raise
            try:
                yield connection
            except BaseException as error:
                if not await settled(own.submit(lent.__exit__, type(error), error, error.__traceback__)):
                    raise
            else:
                await settled(own.submit(lent.__exit__, None, None, None))
        finally:
            own.shutdown(wait=False)

    @property
    def durability(self) -> str:
        return self.sync.durability

    async def close(self) -> None:
        """Wait for what is under way, then close. Repeating it is fine."""
        if self._off.closed:
            return
        await settled(_thread(self._off.close), must=True)
        if self._own:
            await settled(_thread(self.sync.close), must=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class AsyncRun(NamedSteps, RunBase):
    """An async run. ``call`` and the other verbs are awaited; sync tools run on threads, async ones on the caller's loop."""

    def __init__(self, acp: AsyncCheckpointer, task_id: str | None, **options: Any) -> None:
        super().__init__(acp.sync, task_id, **options)
        self._off = acp._off

    async def _drive(self, script: Script[T]) -> T:
        try:
            return await drive_async(script, self._off)
        finally:
            script.close()

    async def __aenter__(self) -> Self:
        await self._drive(self._begin())
        self._enter_context()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit_context()
        if self._closed:
            return
        public = await self._drive(self._leave(error))
        if public is not None:
            raise public from error

    def call(
        self, target: Any, /, *args: Any, call_id: str | None = None, validate: Validate | None = None, **kwargs: Any
    ) -> Coroutine[Any, Any, Any]:
        """See ``Run.call``."""
        return self._drive(self._call_script(target, None, args, kwargs, call_id, validate))

    async def call_tool(
        self, target: Any, arguments: Mapping[str, Any] | str, *, call_id: str | None = None, validate: Validate | None = None
    ) -> Any:
        """See ``Run.call_tool``."""
        ready = target.from_json(arguments) if isinstance(target, Tool) else {}
        return await self._drive(self._call_script(target, ready, (), {}, call_id, validate))

    def stream(
        self, target: Any, /, *args: Any, call_id: str | None = None, collect: Collect | None = None, **kwargs: Any
    ) -> AsyncStream:
        """See ``Run.stream``: ``async for chunk in (stream := run.stream(ask, messages)): …``, then ``await stream.reply()``."""
        feed = Feed(collect)
        return AsyncStream(self, self._stream_script(target, args, kwargs, call_id, feed), feed)

    async def call_many(self, calls: Sequence[Bound], *, max_parallel: int = 8, return_errors: bool = False) -> list[Any]:
        """See ``Run.call_many``."""
        return await self._drive(self._many_script(calls, max_parallel, return_errors))

    async def step(
        self,
        name: str,
        fn: Callable[..., Any],
        /,
        *args: Any,
        needs: Iterable[str] = (),
        pure: bool = False,
        optional: bool = False,
        skip_if: SkipIf = None,
        **kwargs: Any,
    ) -> Any:
        """See ``Run.step``; ``fn`` may be async. ``product`` and ``products`` are not awaited."""
        options: dict[str, Any] = {"needs": needs, "pure": pure, "optional": optional, "skip_if": skip_if}
        return await self._drive(self._step_script(name, fn, args, kwargs, **options))

    async def save(self, label: str | None = None) -> Checkpoint:
        """See ``Run.save``."""
        return await self._drive(self._save_script(label))

    async def pause(self, name: str, question: Any = None) -> Any:
        """See ``Run.pause``."""
        return await self._drive(self._pause_script(name, question))

    async def close(self) -> None:
        await self.__aexit__(None, None, None)


async def run_agent_async(
    step: Step,
    *,
    task_id: str | None = None,
    input: Any = None,
    store: str | Store | Checkpointer | AsyncCheckpointer = "memory://",
    turn: str | None = None,
    max_steps: int | None = None,
    save_every: SaveEvery = 1,
    hooks: Sequence[Any] = (),
    recover: str = "auto",
    health: Sequence[Check] = (),
    requires: Sequence[str] = (),
    fresh_start: bool = False,
    at: int | None = None,
    branch: str | None = None,
    mend: bool | None = None,
    wait: float = 0.0,
    steal: bool = False,
    agent: str | None = None,
) -> Outcome:
    """``run_agent`` for an ``async def step(run)``; the same arguments, outcomes and errors."""
    job = Job(step, input, turn, max_steps, save_every, hooks, agent)
    if not is_async(step) and not job.pure:
        raise UsageError("the step is not async", "run_agent_async awaits it", "Make it async def, or use run_agent.")
    task = new_id() if task_id is None else check_id(task_id)
    acp = store if isinstance(store, AsyncCheckpointer) else open_async(store)
    cp = acp.sync
    wish: dict[str, Any] = {
        "recover": recover, "health": health, "requires": requires, "fresh_start": fresh_start, "at": at, "branch": branch,
        "mend": mend,
    }  # fmt: skip
    try:
        Wish.of(cp, **wish)
        done = await acp._off(lambda: agents.stored(cp, task, job, at, branch))
        if done is not None:
            return done
        run = AsyncRun(acp, task, wait=wait, steal=steal, prepare=job.prepare(cp), **wish)
        try:
            await run._drive(run._begin())
        except (InDoubt, DecisionNeeded) as error:
            said = error
            return await acp._off(lambda: agents.waits(cp, task, said))
        return await run._drive(Loop(run, job).script())
    finally:
        if acp is not store:
            await acp.close()

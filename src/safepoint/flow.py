"""What a run's calls stand on: its writes under guard, its end, and the settling of outcomes that are unknown."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from safepoint.codec import states
from safepoint.codec.chunks import Packed
from safepoint.errors import Conflict, DidNotHappen, LeaseLost, RefusedType, RunEnded, SafepointError, UsageError
from safepoint.model import new_id, now, to_us
from safepoint.replies import error_record, in_doubt_error, lost_error
from safepoint.rows import CallRow, CallWrite, Commit, Committed, Guard, replace
from safepoint.rules import journal
from safepoint.rules.journal import Request, Settled, StepJournal
from safepoint.rules.policy import Policy
from safepoint.script import Exec, Io, Script, Sleep
from safepoint.streaming import Feed
from safepoint.tools import Caller, Current, Tool, tool_named

log = logging.getLogger("safepoint")

if TYPE_CHECKING:
    from safepoint.checkpointer import Base, Checkpointer


@dataclass(slots=True)
class Counters:
    """What a run counts for metrics and the log."""

    calls: int = 0
    retries: int = 0
    errors: int = 0
    last_call: str = ""
    last_call_ms: float = 0.0
    tokens_in: int = 0
    tokens_out: int = 0
    save_ms: float = 0.0
    bytes_written: int = 0
    attempt: int = 0


@dataclass(slots=True, repr=False)
class FlowBase:
    """What ``Flow``, the calls of a run, stands on."""

    cp: Checkpointer
    task: str
    guard: Guard
    presumed: int
    line: int
    caller: weakref.ref[Caller]
    """Weak, so that a run that is dropped lets go of its lease at once, not at the next garbage collection."""
    base: Base | None = None
    """The newest durable checkpoint: what an intent stands on."""
    counters: Counters = field(default_factory=Counters)
    journal: StepJournal = field(default_factory=StepJournal)
    step: int = 0
    later: bool = False
    """Steps after this one are on record: this step went past all that failed in it."""
    parks_below: int = 0
    """In steps below this, what is not on record may have happened, and its record be gone: see ``Control.guard``."""
    parks_why: str = ""
    ended: RunEnded | None = None
    seen: int = 0
    """Journal position of the newest failure that this attempt was told of."""
    unwritten: list[tuple[Commit, CallRow]] = field(default_factory=list)
    """Results that the store could not take when they came."""
    unsure: list[CallRow] = field(default_factory=list)
    """Intents that may have landed although writing them raised. What they announce was not run."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    warm: tuple[Packed, ...] = ()
    settle_from: float = field(default_factory=time.monotonic)
    executing: int = 0
    """Calls between intent and record. A run cannot end a step, nor let go of its task as if nothing were under way, while
    there are some: those of threads and tasks that the step has not waited for."""
    pid: int = field(default_factory=os.getpid)
    when_idle: Callable[[], None] | None = None
    feeds: list[Feed] = field(default_factory=list)
    """Streams of this step that were begun and have not ended."""
    interrupt: BaseException | None = None
    """The run ended because this interrupted a write: Ctrl-C or a cancellation. A resume asks the write's verifier."""

    def _here(self, row: CallRow) -> Current:
        run = self.caller()
        assert run is not None  # it is the run that drives this script
        return Current(run, row)

    def kept_back(self, tool: Tool[Any, Any]) -> str:
        """Why a call that is not on record may not be made on its own here, or ''."""
        if self.step >= self.parks_below:
            return ""
        # An idempotent tool that takes its key would be repeated under a new one.
        if tool.effect not in journal.HAPPENS and not (tool.effect == "idempotent" and "idempotency_key" in tool.injects):
            return ""
        why = self.parks_why or "what was done in it on a branch that was left is not on record here"
        return f"not sent: step {self.step} may have been done before; {why}"

    # -- ends and writes

    def check(self) -> None:
        """Raise again what ended this run."""
        self.check_process()
        if self.ended is not None:
            raise self.ended

    def check_process(self) -> None:
        """A process forked in the middle of a call has the run's guard in its memory, and must not write with it."""
        if os.getpid() != self.pid and self.ended is None:
            self.ended = RunEnded(
                UsageError(
                    f"the run of task {self.task!r} belongs to another process", "this one was forked from it", "Resume there."
                )
            )
        if os.getpid() != self.pid and self.ended is not None:
            raise self.ended

    def end(self, error: SafepointError, cause: BaseException | None = None) -> NoReturn:
        """End the run for good. The first end stands."""
        with self.lock:
            if self.ended is None:
                self.ended = RunEnded(error)
                self.ended.__cause__ = cause
            raise self.ended

    def lose(self) -> NoReturn:
        """End the run because its lease is not its own any more."""
        self.end(
            LeaseLost(
                f"this run does not hold task {self.task!r} any more",
                "its lease was taken over, or could not be renewed in time",
                "Let the new holder carry on, or resume the task.",
                task=self.task,
            )
        )

    def commit(self, commit: Commit, claim: Request | None = None) -> Committed:
        """Write under the run's guard, and take note of the rows; with ``claim``, as those of that request."""
        self.check_process()
        try:
            done = self.cp.store.commit(commit)
        except LeaseLost as error:
            self.end(error)
        return self._noted(done, claim)

    def _noted(self, done: Committed, claim: Request | None = None) -> Committed:
        with self.lock:
            for row in done.calls:
                if row.step == self.step:
                    self.journal.put(row)
                    if claim is not None:
                        self.journal.begun(claim, row.no)
            self.counters.bytes_written += done.bytes_written
        return done

    def _calls(self, *writes: CallWrite, objects: Sequence[Any] = (), sync: bool = True) -> Commit:
        return Commit(
            task=self.task,
            id=new_id(),
            guard=self.guard,
            calls=writes,
            objects=tuple(objects),
            stands_on=self.base.head if self.base else None,
            sync=sync,
        )

    def idle_or(self, later: Callable[[], None]) -> bool:
        """Whether nothing is being executed; if something is, ``later`` is called when the last of it has ended."""
        with self.lock:
            if self.executing:
                self.when_idle = later
            return not self.executing

    def one_less(self) -> None:
        with self.lock:
            self.executing -= 1
            later = self.when_idle if not self.executing else None
        if later is not None:
            later()

    def flush(self) -> None:
        """Write what could not be written when it came, before anything else is done."""
        with self.lock:
            while self.unwritten:
                commit, row = self.unwritten[0]
                try:
                    self.commit(commit)
                except Conflict:
                    # It had landed after all, and others since: then the row stands as we would have it.
                    there = self.cp.store.calls(self.task, nos=[row.no])[0]
                    if not there or (there[0].status, there[0].attempts, there[0].fence) != (
                        row.status,
                        row.attempts,
                        row.fence,
                    ):
                        raise
                    self.journal.put(there[0])
                self.unwritten.pop(0)
            while self.unsure:
                self._undo(self.unsure[0])
                self.unsure.pop(0)

    def flush_quietly(self) -> None:
        with contextlib.suppress(SafepointError, RunEnded):
            self.flush()

    def _known(self) -> list[CallRow]:
        with self.lock:
            return list(self.journal.rows.values())

    def _undo(self, intent: CallRow) -> None:
        """Take back an intent that may have landed, and that nothing was run for."""
        key = (intent.idempotency_key, intent.attempts, intent.fence, "started")
        rows, _ = self.cp.store.calls(self.task, line=self.line, from_step=intent.step, bodies=False)
        for row in rows:
            if (row.idempotency_key, row.attempts, row.fence, row.status) == key:
                undone = replace(row, status="failed", not_done=True, reason="nothing was run")
                self.commit(self._calls(CallWrite(undone, "ended")))

    def close_open(self) -> Script[None]:
        """Leave no call open behind a step that ends. What was interrupted and not asked for again is given up: it failed, as
        the step saw it. A write is settled first; none is passed that is in doubt."""
        if doubt := [r for r in self.journal.rows.values() if r.status == "in_doubt"]:
            self.end(in_doubt_error(self.task, *doubt))
        open_ = [r.no for r in self.journal.rows.values() if r.status == "started"]
        if not open_:
            return
        rows, _ = yield Io(lambda: self.cp.store.calls(self.task, nos=open_, bodies=False))
        writes: list[CallWrite] = []
        for row in rows:
            if row.status != "started":  # recorded, and the answer was lost
                self.journal.put(row)
            elif row.effect != "write":
                error = row.error or error_record(InterruptedError("interrupted, and not asked for again"))
                writes.append(CallWrite(replace(row, status="failed", error=error, finished_at=to_us(now())), "ended"))
            else:
                after = yield from self.settle(row)
                if after.status == "in_doubt":
                    self.end(in_doubt_error(self.task, after))
        if writes:
            sync = any(w.row.effect != "read" for w in writes)
            yield Io(lambda: self.commit(self._calls(*writes, sync=sync)))

    def _recorded(self, row: CallRow) -> Any:
        rows, objects = self.cp.store.calls(self.task, nos=[row.no])
        if not rows or rows[0].result is None:
            raise lost_error(self.task, row)
        rows[0].check(self.task, f"call {row.no}")
        return states.unpack_result(rows[0].result, rows[0].result_refs, objects, self.cp.registry)

    # -- unknown outcomes

    def left_open(self, no: int, error: BaseException) -> NoReturn:
        """Raise what came out of a call. If it leaves a write whose outcome is on no record, the run is over: whoever swallows
        the error must not go on past it. A resume asks the write's verifier."""
        with self.lock:
            row = self.journal.rows.get(no)
            if row is None or row.effect != "write" or row.status not in ("started", "in_doubt") or self.ended is not None:
                raise error
            if any(kept.no == no for _, kept in self.unwritten):
                raise error  # the result is known, and written before anything else
            if isinstance(error, SafepointError):
                self.end(error, error)
            reason = f"interrupted by {type(error).__name__}; a resume settles it"
            self.ended = RunEnded(in_doubt_error(self.task, replace(row, reason=reason)))
            self.interrupt = error
            raise error

    def _after_error(self, tool: Tool[Any, Any], row: CallRow, error: Exception) -> Script[CallRow]:
        """Record what a raising tool means: it failed, or its verifier says that it happened, or it is in doubt and the run
        is over."""
        self.counters.errors += 1
        failed = replace(row, error=error_record(error), finished_at=to_us(now()), reason="")
        if tool.effect != "write" or isinstance(error, (DidNotHappen, *tool.failed_on)) or never_ran(error, tool):
            failed = replace(failed, status="failed", not_done=True)
            done = yield Io(lambda: self.commit(self._calls(CallWrite(failed, "ended"), sync=tool.effect != "read")), must=True)
            return done.calls[0]  # type: ignore[no-any-return]
        self.settle_from = time.monotonic()
        after = yield from self.settle(failed, tool, reason=f"{type(error).__name__} leaves open whether it happened")
        if after.status == "in_doubt":
            self.end(in_doubt_error(self.task, after), error)
        return after

    def settle(self, row: CallRow, tool: Tool[Any, Any] | None = None, reason: str = "") -> Script[CallRow]:
        """Find out about an open write: ask its verifier once the effect had time to settle, or park it. Returns the row as
        recorded."""
        policy = Policy.decode(row.policy)
        tool = tool or tool_named(row.tool)
        if row.effect == "idempotent":
            reason = f"it is older than the {policy.key_ttl:g} s for which the receiver remembers its key"
        if policy.verify and tool is not None and tool.verify is not None:
            wait = self.settle_from + policy.settle - time.monotonic()
            if wait > 0:
                yield Sleep(wait)
            shown = yield Io(lambda: self._shown(row))
            try:
                verdict: object = yield Exec(tool.verify, (shown,), {}, self._here(row))
            except RunEnded:
                raise
            except Exception as error:
                verdict = error
            s = journal.settle(row, verdict, self.presumed)
        elif policy.verify:
            raise UsageError(
                f"call {row.no} needs the verifier of {row.tool!r}, which this process does not know",
                "the tool's module has not been imported",
                f"Import it before resuming, or settle the call by hand: safepoint resolve {self.task} {row.no}.",
            )
        else:
            s = Settled("in_doubt", reason=reason or "the process died while it ran, and the tool has no verifier")
        after = journal.settled_row(row, s, finished_at=to_us(now()))
        objects: Sequence[Any] = ()
        if s.status == "succeeded":
            try:
                packed = states.pack_values({"result": s.result}, self.cp.registry, None, "", flat=not self.cp.store.chunked)
                after, objects = replace(after, result=packed.data, result_refs=packed.refs, error=None), packed.new
            except RefusedType as error:
                after = replace(after, error=error_record(error))
        done = yield Io(lambda: self.commit(self._calls(CallWrite(after, "ended"), objects=objects)), must=True)
        if s.status == "in_doubt":
            log.warning("call %d (%s) of task %s waits for a person: %s", row.no, row.tool, self.task, after.reason)
        return done.calls[0]  # type: ignore[no-any-return]

    def _shown(self, row: CallRow) -> Any:
        """The call, for its verifier. Who was taken over meanwhile asks nothing: the attempt on record may be the new holder's, whose
        fence a verifier that has the receiver refuse what comes late would name."""
        rows, objects = self.cp.store.calls(self.task, nos=[row.no])
        if not rows or rows[0].fence > self.guard.fence:
            self.lose()
        return states.call(self.task, rows[0], objects, self.cp.registry)


def never_ran(error: Exception, tool: Tool[Any, Any]) -> bool:
    """Whether ``error`` is our own word that the tool's coroutine was not begun."""
    return isinstance(error, UsageError) and error.details.get("tool") is tool

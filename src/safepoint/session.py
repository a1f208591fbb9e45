"""What a sync and an async run share: the hold of a task, as scripts. ``run`` and ``aio`` are the faces."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from safepoint import recovering, resources
from safepoint._probe import at
from safepoint.calling import Validate
from safepoint.codec import states, values
from safepoint.codec.states import Control
from safepoint.ending import _abandon
from safepoint.errors import (
    Conflict,
    DecisionNeeded,
    InvalidState,
    LeaseHeld,
    LeaseLost,
    RunEnded,
    UsageError,
)
from safepoint.flow import Counters
from safepoint.model import Checkpoint, Metrics, Recovery, State, check_id, new_id, now, to_us
from safepoint.restoring import Prepare, Restoring, Wish, ends_as, recorded
from safepoint.rows import CallRow, CallWrite, Commit, Grant, Head, PauseRow, PauseWrite, TaskPatch, replace
from safepoint.rules import journal, planning
from safepoint.rules.journal import StepJournal
from safepoint.script import Io, LoopThread, Pass, Script, Sleep
from safepoint.stores import holder
from safepoint.streaming import Feed, close_feeds
from safepoint.tools import Bound, Tool, current, live_runs

if TYPE_CHECKING:
    from safepoint.checkpointer import Checkpointer

log = logging.getLogger("safepoint")


class RunBase(Restoring):
    """What sync and async runs share: their scripts and what they know."""

    def __init__(
        self,
        cp: Checkpointer,
        task_id: str | None,
        *,
        recover: str = "auto",
        wait: float = 0.0,
        steal: bool = False,
        prepare: Prepare | None = None,
        **recovery: Any,
    ) -> None:
        self._wish = Wish.of(cp, recover=recover, **recovery)
        self._older: int | None = None
        self.cp = cp
        self.task_id = new_id() if task_id is None else check_id(task_id)
        self.context: dict[str, Any] = {}
        """What ``before_step`` hooks gave for this step; not saved."""
        self.phase: str | None = None
        """Shown in metrics where ``agent_state["phase"]`` is no text."""
        self.recovery = Recovery("new")
        self._steal = steal
        self._wait = wait
        self._prepare = prepare
        self._grant: Grant | None = None
        self._loop = LoopThread()
        self._pid = os.getpid()
        self._closed = False
        self._steps: dict[int, list[CallRow]] = {}
        self._pauses: list[PauseRow] = []
        self._asked_pauses: dict[str, int] = {}
        self._used: list[PauseRow] = []
        self._moved: dict[int, CallRow] = {}
        """Rows to be written under another step with the next save."""
        self._finish: tuple[Any] | None = None
        self._ended_as: str | None = None
        self._mark: str | None = None
        self._unsaved = 0
        self._token: Any = None
        self._first_save = True
        self._in_agent = False
        self._in_step = False

    # -- what may be looked at

    @property
    def state(self) -> State:
        """The live state. Change it in place; what counts is what it is when the step ends."""
        return self._state

    @property
    def fence(self) -> int:
        """Rises with each holder of the task; receivers may refuse an older one."""
        return self._flow.guard.fence

    @property
    def status(self) -> dict[str, Any]:
        """Facts for a health check: steps done, and how many of them are not in a durable checkpoint yet."""
        return {
            "task_id": self.task_id,
            "step": self._state.step,
            "steps_since_save": self._unsaved,
            "seq": self._state.seq,
            "fence": self.fence,
            "ended": None if self._flow.ended is None else type(self._flow.ended.error).__name__,
        }

    @property
    def metrics(self) -> Metrics:
        c = self._flow.counters
        return Metrics(self._phase(), *(getattr(c, f) for f in Counters.__slots__))

    def add_usage(self, tokens_in: int = 0, tokens_out: int = 0) -> None:
        """Count tokens that no recorded reply tells of."""
        self._flow.counters.tokens_in += tokens_in
        self._flow.counters.tokens_out += tokens_out

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.task_id}>"

    def _phase(self) -> str:
        agent_state = self._state.agent_state
        phase = agent_state.get("phase") if isinstance(agent_state, dict) else getattr(agent_state, "phase", None)
        phase = getattr(phase, "value", phase)
        return phase if isinstance(phase, str) else (self.phase or "")

    # -- taking the task

    def _begin(self) -> Script[None]:
        deadline = time.monotonic() + self._wait

        def take() -> None:
            if self._wish.at is not None and self._older is None:
                self._older = recovering.taken_as_it_is(self.cp, self.task_id, self._wish.at)
            # Kept at once: a cancellation may come between the store's answer and ours.
            self._grant = self.cp.store.acquire(self.task_id, holder.describe(), steal=self._steal)

        while True:
            try:
                yield Io(take)
                break
            except LeaseHeld:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise
            except BaseException:
                yield from self._release(None, "interrupted")
                raise
            yield Sleep(min(0.05, left))
        assert self._grant is not None
        try:
            weakref.finalize(self, _abandon, self.cp.store, self.task_id, self._grant, self._pid).atexit = False
            self.cp._runs.add(self)
            yield from self._restore()
            yield Pass()  # a cancellation that was put off comes out here, where the task is let go of
            live_runs.add(self)
        except BaseException as error:
            public = error.error if isinstance(error, RunEnded) else error
            yield from self._release(None, ends_as(public))
            if public is error:
                raise
            raise public from error

    def _open_step(self) -> None:
        flow = self._flow
        flow.step = self._state.step
        later = [r for n, rows in self._steps.items() if n > flow.step for r in rows]
        flow.journal = StepJournal(self._steps.get(flow.step, ()), later)
        flow.later = any(n > flow.step for n in self._steps)
        flow.warm = ()
        self._asked_pauses = {}
        self._mark = None
        self._mine = (self._state.step, self._state.seq, self._state.branch, self._state.task_id)

    def unanswered(self) -> list[PauseRow]:
        """Pauses of this step and later ones that still wait for their answer."""
        return planning.waiting_on([], self._pauses, self._flow.line, self._state.step)[1]

    def _unanswered_error(self, *rows: PauseRow) -> DecisionNeeded:
        names = ", ".join(f"{p.no} ({p.name!r})" for p in rows)
        return DecisionNeeded(
            f"task {self.task_id!r} waits for an answer to pause {names}",
            "",
            f"Answer with cp.answer({self.task_id!r}, {rows[0].no}, …), then run it again.",
            task=self.task_id,
            pauses=[p.no for p in rows],
        )

    # -- during a step

    def _check(self) -> None:
        if self._closed:
            raise UsageError(f"the run of task {self.task_id!r} is over", "", "Resume the task to go on.")
        if os.getpid() != self._pid:
            raise UsageError(
                f"the run of task {self.task_id!r} belongs to another process", "this one was forked from it", "Resume there."
            )
        here = current.get()
        if here is not None and here.run is self and here.hook:
            raise UsageError(
                "run was used in an after_commit hook", "the step that it belongs to is over", "Make the call in a step."
            )
        if here is not None and here.run is self and here.call is not None:
            raise UsageError("run was used inside of a tool", "a call's own work belongs to that call", "Do it in the step.")
        self._flow.check()

    def _call_script(
        self,
        tool: Any,
        arguments: dict[str, Any] | None,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        call_id: str | None,
        validate: Validate | None,
        feed: Feed | None = None,
    ) -> Script[Any]:
        self._check()
        if call_id is None and current.get() is None:
            if self._token is None and not self._in_agent:
                raise UsageError(
                    f"the run of task {self.task_id!r} has not been entered", "", "Use it as: with cp.resume(…) as run."
                )
            raise UsageError(
                "run.call came from a thread that is not the step's",
                "the order of such calls is not the same in a re-run, so order cannot identify them",
                "Give each one a call_id of its own, or use run.call_many.",
            )
        if not isinstance(tool, Tool):
            self._flow.ask(tool, {}, None)  # raises, naming the decorators
        ready = arguments if arguments is not None else tool.arguments(args, kwargs)
        return (yield from self._flow.call(tool, ready, call_id, validate, feed))

    def _stream_script(
        self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], call_id: str | None, feed: Feed
    ) -> Script[Any]:
        """The script of a call that streams. What is wrong with the call is said here, and not when its first chunk is asked for."""
        self._check()
        if not isinstance(target, Tool) or not target.policy.model:
            raise UsageError(
                f"run.stream was given {f'tool {target.name!r}' if isinstance(target, Tool) else f'a {type(target).__name__}'}",
                "it is for model calls",
                "Decorate the function with @safepoint.model, or use run.call.",
            )
        return self._call_script(target, target.arguments(args, kwargs), (), {}, call_id, None, feed)

    def _many_script(self, calls: Sequence[Bound], max_parallel: int, return_errors: bool) -> Script[list[Any]]:
        self._check()
        return (yield from self._flow.call_many(calls, max_parallel, return_errors))

    def _pause_script(self, name: str, question: Any) -> Script[Any]:
        here = current.get()
        inside = here if here is not None and here.run is self and here.call is not None else None
        flow = self._flow
        if inside is None:
            self._check()
        elif flow.ended is not None and isinstance(flow.ended.error, LeaseLost):
            raise flow.ended
        # Inside a call whose run a sibling has ended, the question is stored all the same: else the call would be in doubt.
        check_id(name, "a pause's name")
        with flow.lock:
            k = self._asked_pauses.get(name, 0)
            self._asked_pauses[name] = k + 1
        row = next((p for p in self._pauses if (p.line, p.step, p.name, p.occurrence) == (flow.line, flow.step, name, k)), None)
        if row is not None and row.status != "open":
            if row.status == "answered":
                self._used.append(row)
            assert row.answer is not None
            return values.decode(row.answer, self.cp.registry)
        if row is None:
            row = PauseRow(
                line=flow.line,
                step=flow.step,
                name=name,
                occurrence=k,
                call_no=inside.call.no if inside else None,
                base_seq=self._flow.base.head.seq if self._flow.base else 0,
                question=values.encode(question, self.cp.registry, path="question"),
                asked_at=to_us(now()),
            )
            calls: tuple[CallWrite, ...] = ()
            if inside is not None:
                calls = (CallWrite(replace(flow.journal.rows[inside.call.no], status="paused"), "ended"),)
            commit = Commit(task=self.task_id, id=new_id(), guard=flow.guard, pauses=(PauseWrite(row),), calls=calls)
            done = yield Io(lambda: flow.commit(commit))
            row = done.pauses[0]
            self._pauses.append(row)
        try:
            flow.end(self._unanswered_error(row))
        except RunEnded as ended:
            if inside is not None:
                inside.paused = ended
            raise

    def finish(self, result: Any = None) -> None:
        """Say that the task is done; takes effect with the save of this step."""
        self._check()
        self._finish = (result,)

    def milestone(self, label: str) -> None:
        """Mark the save at this step's end as a milestone, which retention keeps."""
        self._check()
        self._mark = check_id(str.__str__(label) if isinstance(label, str) else label, "a milestone's label")

    # -- ending a step

    def _end_step(self, *, kind: str, label: str | None, save: bool, status: str | None = None) -> Script[Checkpoint | None]:
        """A whole step is done: count it, and save it if it is due."""
        self._check()
        yield from close_feeds(self._flow.feeds)
        if self._flow.executing:
            raise UsageError(
                f"the step ends while {self._flow.executing} of its calls are being executed",
                "a thread or task of its own is still inside run.call",
                "Wait for it before the step ends, or use run.call_many.",
            )
        if self._named is not None:
            raise UsageError(
                f"the step ends while named step {self._named!r} is under way",
                "its product would be of one that has not ended",
                "Let it end first; it is saved then.",
            )
        yield Io(self._flow.flush)
        yield from self._flow.close_open()
        mine = (self._state.step, self._state.seq, self._state.branch, self._state.task_id)
        if mine != self._mine:
            raise InvalidState(
                "step, seq, branch or task_id of the state was changed inside a run",
                "only the run counts steps and moves the branch",
                "Leave them alone; nothing was saved.",
            )
        due = save or self._finish is not None
        # In one piece: a cancellation that comes while the save is under way must find all of it done, or none.
        return (yield Io(lambda: self._close_step(kind, label, due, status)))  # type: ignore[no-any-return]

    def _close_step(self, kind: str, label: str | None, due: bool, status: str | None) -> Checkpoint | None:
        state, before, base, unsaved = self._state, self._control, self._state._base, self._unsaved
        control = before.copy()
        control.finished = self._finish is not None
        if self._finish is not None:
            if not control.turns:
                control.turns.append(["", None, "open", None, 0])
            control.turns[-1][2:4] = ["finished", self._finish[0]]
            status = "finished"
        given_up = [] if self._finish is None else resources.give_up(state.agent_state, state.step + 1)
        if self._mark is not None:
            kind, label = "milestone", label or self._mark
        moved = {**self._moved, **self._moves()}
        step = state.step
        checkpoint = None
        try:
            self._control, state.step, self._unsaved = control, step + 1, unsaved + 1
            if due:
                patch = TaskPatch(status=status) if status else None
                checkpoint = self._save(kind=kind, label=label, patch=patch, calls=tuple(moved.values()))
        except BaseException as error:
            if due and state._base is not base:
                self._step_done(step, moved, due)  # interrupted when the save stood
                raise
            self._control, state.step, self._unsaved = before, step, unsaved
            resources.take_back(given_up)
            if due and base is not None and not isinstance(error, Exception | RunEnded):
                self._perhaps_saved(base.head, control, error)
            raise
        try:
            self._step_done(step, moved, due)
        except BaseException:
            self._step_done(step, moved, due)  # Ctrl-C: what the store has and what is known here must not differ
            raise
        return checkpoint

    def _perhaps_saved(self, head: Head, control: Control, error: BaseException) -> None:
        """An interrupt came out of a save. If it stands all the same, the run is over: it does not know what it stands on."""
        row = self.cp.store.task(self.task_id)
        if row is not None and row.head != head:
            self._flow.ended = RunEnded(
                Conflict(f"a save of task {self.task_id!r} was interrupted when it stood", "", "Resume.")
            )
            self._flow.interrupt = error
            self._ended_as = "finished" if control.finished else None

    def _step_done(self, step: int, moved: dict[int, CallRow], due: bool) -> None:
        self._finish = None
        if due:
            self._flow.base = self._state._base
            self._unsaved = 0
            self._used.clear()
            moved = {n: replace(r, version=r.version + 1) for n, r in moved.items()}
        self._moved = {} if due else moved
        kept = {n: [r for r in rows if r.no not in moved] for n, rows in self._steps.items() if n != step}
        for row in moved.values():
            kept.setdefault(row.step, []).append(row)
        self._steps = kept
        self._open_step()

    def _moves(self) -> dict[int, CallRow]:
        """Rows that belong to another step now that this one is done: writes that it did not ask for go on to the next, and
        what it took from a later one is its own."""
        j, step = self._flow.journal, self._flow.step
        left = [replace(r, step=step + 1, scope=journal.UNASKED) for r in j.left_over()]
        for row in left:
            log.warning("call %d (%s) of %s happened and was not asked for in step %d", row.no, row.tool, self.task_id, step)
        return {r.no: r for r in (*left, *(replace(r, step=step) for r in j.borrowed.values() if r.step != step))}

    def _save(
        self,
        *,
        kind: str,
        label: str | None = None,
        patch: TaskPatch | None = None,
        moves_head: bool = True,
        calls: Sequence[CallRow] = (),
    ) -> Checkpoint:
        self._flow.check_process()
        began = time.perf_counter()
        state, flow = self._state, self._flow
        recovery = None
        if self._first_save and state.recovery is not None:
            recovery = recorded(state.recovery)
        row, packed = self.cp._row(
            state,
            self._control,
            state._base,
            kind=kind,
            label=label,
            metrics=states.encode_metrics(self.metrics),
            recovery=recovery,
        )
        used = tuple(PauseWrite(replace(p, status="used")) for p in self._used) if moves_head else ()
        if moves_head and self._older is not None:
            patch = replace(patch or TaskPatch(), guarded=True)
        at("save.before")
        try:
            done = self.cp._commit_state(
                state,
                row,
                packed,
                self._control.copy(),
                state._base,
                guard=flow.guard,
                patch=patch,
                pauses=used,
                calls=tuple(CallWrite(r) for r in calls),
                moves_head=moves_head,
            )
        except LeaseLost as error:
            flow.end(error)
        at("save.after")
        flow.counters.save_ms = (time.perf_counter() - began) * 1e3
        flow.counters.bytes_written += done.bytes_written
        seq = done.seq or 0
        if moves_head:
            flow.base = state._base
            self._older = None
            self._used.clear()
            self._unsaved = 0
            self._first_save = False
        m = self.metrics
        log.info(
            "saved %s@%d step=%d kind=%s phase=%s calls=%d retries=%d errors=%d tokens=%d+%d last=%s %.0fms save=%.1fms bytes=%d attempt=%d",
            self.task_id, seq, state.step, kind, m.phase or "-", m.calls, m.retries, m.errors, m.tokens_in, m.tokens_out,
            m.last_call or "-", m.last_call_ms, m.save_ms, done.bytes_written, m.attempt,
        )  # fmt: skip
        self.cp._retain(self.task_id, seq)
        return self.cp._header(self.task_id, replace(row, seq=seq))

    def _save_script(self, label: str | None) -> Script[Checkpoint]:
        self._check()
        if self._in_agent:
            raise UsageError(
                "run.save was called in a run_agent step",
                "run_agent saves at the step's end",
                "Use run.milestone(label) to mark that save.",
            )
        checkpoint = yield from self._end_step(kind="step", label=label, save=True)
        assert checkpoint is not None
        return checkpoint

    def call(self, target: Any, /, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

"""``run_agent``: restore, run steps, save after each, until finished."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from safepoint import looking, tails
from safepoint.codec import values
from safepoint.codec.states import Control
from safepoint.ending import NO_FAULT_OF_THE_STEP
from safepoint.errors import (
    Conflict,
    DecisionNeeded,
    InDoubt,
    LeaseHeld,
    NotFound,
    RunEnded,
    SafepointError,
    UsageError,
)
from safepoint.model import Call, Outcome, Pause, Recovery, State, StepResult, check_id, new_id
from safepoint.restoring import Prepare, Wish
from safepoint.rows import Commit, TaskPatch
from safepoint.rules import journal
from safepoint.rules.health import Check
from safepoint.run import Run
from safepoint.script import Exec, Io, Script, no_running_loop
from safepoint.session import RunBase
from safepoint.tools import Current, is_async

if TYPE_CHECKING:
    from safepoint.checkpointer import Checkpointer
    from safepoint.stores.base import Store

Step = Callable[[Any], Any]
SaveEvery = int | Literal["milestone"]

_HOOKS = ("on_restore", "before_step", "after_commit")
_INPUT_LIMIT = 8192


class Job:
    """What ``run_agent`` was asked to do, apart from how: shared by the sync and the async face."""

    def __init__(
        self,
        step: Step,
        input: Any,
        turn: str | None,
        max_steps: int | None,
        save_every: SaveEvery,
        hooks: Sequence[Any],
        agent: str | None,
    ) -> None:
        if not callable(step):
            raise UsageError(
                f"step must be a function, not a {type(step).__name__}", "", "Pass def step(run) or def step(state)."
            )
        if max_steps is not None and (type(max_steps) is not int or max_steps < 1):
            raise UsageError("max_steps must be None or an int of at least 1", "", "")
        if save_every != "milestone" and (type(save_every) is not int or save_every < 1):
            raise UsageError('save_every must be an int of at least 1, or "milestone"', "", "")
        for hook in hooks:
            if not any(hasattr(hook, name) for name in _HOOKS):
                raise UsageError(f"a {type(hook).__name__} is no hook", f"it has none of {', '.join(_HOOKS)}", "")
        self.step = step
        self.pure = _is_pure(step)
        self.input = input
        self.turn = None if turn is None else check_id(turn, "turn")
        self.max_steps = max_steps
        self.save_every = save_every
        self.hooks = hooks
        self.agent = agent if agent is not None else getattr(step, "__qualname__", type(step).__name__)

    # -- input and turns

    def prepare(self, cp: Checkpointer) -> Prepare:
        # Now, before the task is taken: a job that cannot be stored, or has no place, leaves nothing behind.
        data = values.encode(self.input, cp.registry, path="input")
        if cp.state_type not in (None, dict):
            self.begin_turn(State("", agent_state=None), Control(), "", self.input)

        def begin(state: State, control: Control) -> TaskPatch:
            self.begin_turn(state, control, self.turn or "", self._job(cp, state.task_id))
            return TaskPatch(agent=self.agent, input=data if len(data) <= _INPUT_LIMIT else b"")

        return begin

    def _job(self, cp: Checkpointer, task: str) -> Any:
        """The input to begin with: for a task that is begun anew, the one that it had."""
        row = cp.store.task(task)
        if row is None or not row.input or self.turn is not None:
            return self.input
        try:
            kept = values.decode(row.input, cp.registry, path="input")
        except SafepointError:  # it is a copy for people, under no seal
            return self.input
        self._same(cp, task, ["", kept, "open"])
        return kept

    @staticmethod
    def begin_turn(state: State, control: Control, turn: str, input: Any) -> None:
        control.turns.append([turn, input, "open", None, state.step])
        control.finished = False
        for_messages = [input] if isinstance(input, dict) and "role" in input else input
        if input is None:
            return
        if isinstance(input, str):
            state.messages.append({"role": "user", "content": input})
        elif isinstance(for_messages, list) and for_messages and all(isinstance(m, dict) and "role" in m for m in for_messages):
            state.messages.extend(for_messages)
        elif isinstance(state.agent_state, dict):
            state.agent_state["input"] = input
        else:
            raise UsageError(
                f"an input of type {type(input).__name__} has no place",
                "it is no message, and agent_state is no dict that could hold it",
                "Pass text or messages, or put it into the state yourself.",
            )

    def settled(self, cp: Checkpointer, task: str, control: Control) -> list[Any] | None:
        """The turn whose stored outcome answers this job, or None if there is work to do.

        Raises:
            UsageError: the job does not fit what is stored; nothing was changed.
        """
        if self.turn is not None:
            found = control.turn(self.turn)
            if found is not None:
                self._same(cp, task, found)
            return found if found is not None and found[2] == "finished" else None
        last = control.turns[-1] if control.turns else None
        if last is None:
            return None
        self._same(cp, task, last)
        return last if last[2] == "finished" else None

    def _same(self, cp: Checkpointer, task: str, turn: list[Any]) -> None:
        if self.input is None:
            return
        # As the codec sees them: nan is nan, True is not 1, and objects need no __eq__.
        given, stored = (values.decode_plain(values.encode(v, cp.registry, path="input")) for v in (self.input, turn[1]))
        if journal.canonical(given) == journal.canonical(stored):
            return
        name = f"turn {turn[0]!r} of task {task!r}" if turn[0] else f"task {task!r}"
        raise UsageError(
            f"{name} {'is finished' if turn[2] == 'finished' else 'is under way'} and was begun with another input",
            "an input is the job of a task",
            'For one more input of a chat give it a name of its own: turn="…". Else leave input out.',
        )


def outcome_of(task: str, state: State, turn: list[Any], recovery: Recovery | None = None) -> Outcome:
    return Outcome(task, turn[0], "finished", turn[3], state, state.step, recovery)


def stored(cp: Checkpointer, task: str, job: Job, at: int | None = None, branch: str | None = None) -> Outcome | None:
    """The outcome of a job that is done already. No lease is taken and no code is run."""
    try:
        row = cp.store.task(task) if (at, branch) != (None, None) else None
        if row is not None and (
            (at is not None and (row.head is None or row.head.seq != at)) or branch not in (None, row.branch)
        ):
            return None  # another checkpoint than the head is asked for
        state = cp.load_latest(task)
    except looking.NEVER_PASSED:
        raise
    except Exception as error:
        if at is None and getattr(error, "details", {}).get("rolled_back"):
            raise  # with at= a person takes the task as it stands
        return None  # what becomes of it, the run decides under its lease
    if state is None or state._base is None:
        return None
    turn = job.settled(cp, task, state._base.control)
    if turn is None:
        return None
    if turn is state._base.control.turns[-1] and cp.status(task).status in ("interrupted", "failed"):
        # The process died after the last save and before it let go: what is stored says that the task is done.
        # Unless somebody has taken the task meanwhile: then it is theirs to say.
        with contextlib.suppress(Conflict, LeaseHeld, NotFound):
            patch = TaskPatch(status="finished", reason="")
            cp.store.commit(Commit(task=task, id=new_id(), stands_on=state._base.head, at_head=True, patch=patch))
    return outcome_of(task, state, turn)


class Loop:
    """The loop as a script over a run that was begun."""

    def __init__(self, run: RunBase, job: Job) -> None:
        self.run = run
        self.job = job
        run._in_agent = True

    def script(self) -> Script[Outcome]:
        """Run to an outcome, and let go of the task whatever happens."""
        run = self.run
        try:
            outcome = yield from self._outcome()
        except BaseException as error:
            public = run._public(error) or error  # before the leaf is tried, which may find the lease gone
            if (
                run._flow.ended is None
                and run._in_step
                and isinstance(error, Exception)
                and not isinstance(error, NO_FAULT_OF_THE_STEP)
            ):
                yield from self._keep_failure(error)
            yield from run._release(public)
            if public is error:
                raise
            raise public from error
        yield from run._release(None, outcome.status)
        return outcome

    def _keep_failure(self, error: Exception) -> Script[None]:
        run = self.run
        address = yield from run._failed(error)
        if address:
            error.add_note(
                f"safepoint kept the failed step as {address}; running {run.task_id!r} again goes on from the step before."
            )

    def _outcome(self) -> Script[Outcome]:
        run, job = self.run, self.job
        yield from self._hook("on_restore", run)
        while True:
            # Looked at again under the lease: another process may have got here first.
            turn = job.settled(run.cp, run.task_id, run._control)
            if turn is not None:
                return outcome_of(run.task_id, run.state, turn, run.recovery)
            if not self._open():
                if job.input is None and run._control.turns:
                    raise UsageError(f"turn {job.turn!r} of task {run.task_id!r} is new and needs an input", "", "Pass input=.")
                yield Io(lambda: tails.before_input(run))
                job.begin_turn(run.state, run._control, job.turn or "", job.input)
                yield Io(lambda: run._save(kind="step", label=None))
                run._open_step()
            while self._open():
                name, _, _, _, began = run._control.turns[-1]
                if job.max_steps is not None and run.state.step - began >= job.max_steps:
                    yield from self._save_rest()
                    return Outcome(run.task_id, name, "out_of_steps", None, run.state, run.state.step, run.recovery)
                try:
                    yield from self._step()
                except RunEnded as own:
                    if own is not run._flow.ended:
                        raise  # the end of another run that the step holds is an error of the step
                except Exception:
                    if run._flow.ended is None:
                        raise  # else it is what the step made of the end of its run
                ended = run._flow.ended
                if ended is not None:
                    if isinstance(ended.error, InDoubt | DecisionNeeded) and run._flow.interrupt is None:
                        outcome: Outcome = yield Io(lambda: waiting(run.cp, run.task_id, run.recovery))
                        return outcome
                    raise ended

    def _open(self) -> bool:
        """Whether the last turn is under way."""
        turns = self.run._control.turns
        return bool(turns) and turns[-1][2] == "open"

    def _save_rest(self) -> Script[None]:
        run = self.run
        if run._unsaved:
            yield Io(lambda: run._save(kind="step"))
            run._open_step()

    def _step(self) -> Script[None]:
        run, job = self.run, self.job
        run.context = {}
        given = yield from self._hook("before_step", run)
        for g in given:
            if isinstance(g, dict):
                run.context.update(g)
        run._in_step = True
        result = yield Exec(job.step, (run.state if job.pure else run,), {}, Current(run))
        run._flow.check()
        if job.pure:
            self._apply(result)
        elif isinstance(result, StepResult) or inspect.iscoroutine(result):
            if inspect.iscoroutine(result):
                result.close()
            raise UsageError(
                f"the step returned a {type(result).__name__}",
                "what a step(run) returns is not looked at",
                "Annotate the parameter as State for a pure step; make the step async def for run_agent_async.",
            )
        save = job.save_every != "milestone" and (run._unsaved + 1) >= job.save_every
        checkpoint = yield from run._end_step(kind="step", label=None, save=save or run._mark is not None)
        run._in_step = False
        if checkpoint is not None:
            yield from self._hook("after_commit", run, checkpoint)

    def _apply(self, result: Any) -> None:
        run = self.run
        if not isinstance(result, StepResult):
            raise UsageError(
                f"the pure step returned a {type(result).__name__}", "its parameter is annotated State", "Return a StepResult."
            )
        state = run.state
        state.messages.extend(result.messages)
        if isinstance(state.agent_state, dict):
            state.agent_state.update(result.updates)
        else:
            for name, value in result.updates.items():
                setattr(state.agent_state, name, value)
        if result.done:
            run._finish = (result.result,)

    def _hook(self, name: str, *args: Any) -> Script[list[Any]]:
        given = []
        for hook in self.job.hooks:
            method = getattr(hook, name, None)
            if method is not None:
                here = Current(self.run, hook=name == "after_commit")
                given.append((yield Exec(method, args, {}, here)))
        return given


def _is_pure(step: Step) -> bool:
    """Whether the step's first parameter is annotated ``State``."""
    try:
        first = next(iter(inspect.signature(step).parameters.values()), None)
    except (TypeError, ValueError):
        return False
    if first is None:
        return False
    note = first.annotation
    return note is State or (isinstance(note, str) and note.rsplit(".", 1)[-1] == "State")


def run_agent(
    step: Step,
    *,
    task_id: str | None = None,
    input: Any = None,
    store: str | Store | Checkpointer = "memory://",
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
    """Run an agent to its end, from wherever it stands.

    Args:
        step: One round of the agent: ``def step(run)``, which uses ``run.state`` and ``run.call`` and ends with
            ``run.finish(result)`` in the last round; or a pure ``def step(state: State) -> StepResult``.
        task_id: Names the task; the same id carries on. A new id by default.
        input: The job. Text or messages become the first messages; anything else is ``agent_state["input"]``.
        store: A URL, a store, or a checkpointer. What is opened here is closed here.
        turn: Names one more input of a chat.
        max_steps: Steps of this turn in all, over restarts.
        save_every: Save after each n-th step, or ``"milestone"``. What is not saved is served from the journal.
        hooks: Objects with ``on_restore(run)``, ``before_step(run)`` or ``after_commit(run, checkpoint)``.
        recover: What becomes of a newest checkpoint that cannot be used: ``auto`` goes back to the newest one that can,
            ``strict`` raises, ``manual`` lets a person choose in any case (``DecisionNeeded``, with the plan). docs/recovery.md.
        health: Checks that a checkpoint must pass besides, as ``safepoint.messages_complete``.
        requires: Paths in ``agent_state`` that must be there; remembered with the task.
        fresh_start: Where no checkpoint can be used, begin anew on a new branch.
        at: Go on from this checkpoint, on a new branch if it is not the newest; a person's choice, made at each call anew.
        branch: Go on on this branch, which becomes the current one.
        mend: Whether open calls at the end of ``messages`` are answered before the first step, and a turn that was cut off is
            left out: True, False, or None: not the calls that a step ended with, which are the next one's. docs/histories.md.
        wait: Seconds to wait for another process's lease.
        steal: Take the lease from a live holder; for people.

    Returns:
        The outcome: ``finished``, ``waiting`` (for an answer or a person's word) or ``out_of_steps``. A finished task
        returns its stored outcome without running.

    Raises:
        LeaseHeld: a live run holds the task. LeaseLost: it was taken over meanwhile.
        UsageError: another input than the stored one; nothing was changed.
        Whatever the step raises, with a note that names what was kept of it.
    """
    from safepoint import checkpointer

    no_running_loop("run_agent", "run_agent_async")
    job = Job(step, input, turn, max_steps, save_every, hooks, agent)
    if is_async(step):
        raise UsageError("the step is async", "run_agent is sync", "Use run_agent_async.")
    task = new_id() if task_id is None else check_id(task_id)
    cp = checkpointer.open(store)
    wish: dict[str, Any] = {
        "recover": recover, "health": health, "requires": requires, "fresh_start": fresh_start, "at": at, "branch": branch,
        "mend": mend,
    }  # fmt: skip
    try:
        Wish.of(cp, **wish)
        done = stored(cp, task, job, at, branch)
        if done is not None:
            return done
        try:
            run = Run(cp, task, wait=wait, steal=steal, prepare=job.prepare(cp), **wish)
        except (InDoubt, DecisionNeeded) as error:
            return waits(cp, task, error)
        return run._drive(Loop(run, job).script())  # type: ignore[no-any-return]
    finally:
        if cp is not store:
            cp.close()


def waits(cp: Checkpointer, task: str, error: InDoubt | DecisionNeeded) -> Outcome:
    """The outcome of a task whose run could not begin before a person has spoken. How to recover is no outcome: it is raised."""
    if "plan" in error.details:
        raise error
    return waiting(cp, task, error.details.get("recovery"))


def waiting(cp: Checkpointer, task: str, recovery: Recovery | None = None) -> Outcome:
    """The outcome of a task that cannot go on before a person has settled its calls or answered its questions. Its state is the
    stored one: what the step has half done is no part of it."""
    state = cp.load_latest(task)
    assert state is not None
    turns = state._base.control.turns
    pending: tuple[Call | Pause, ...] = (*cp.calls(task, status="in_doubt"), *cp.pauses(task))
    return Outcome(task, turns[-1][0] if turns else "", "waiting", None, state, state.step, recovery, pending)

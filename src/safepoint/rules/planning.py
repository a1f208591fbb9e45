"""What a task is, and what a resume of it would do: answers made of rows."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, cast

import msgspec

from safepoint.model import Call, TaskStatus
from safepoint.rows import CallRow, LeaseRow, PauseRow, TaskRow
from safepoint.rules import journal, recovery
from safepoint.rules.journal import Action, Planned


def shown_status(row: TaskRow, *, live: bool) -> TaskStatus:
    """The status that people see: a run that ended without a word left ``running`` behind, and was interrupted."""
    return cast(TaskStatus, "interrupted" if row.status == "running" and not live else row.status)


def holder(lease: LeaseRow) -> dict[str, Any]:
    """Who holds the lease, as it said of itself; to be shown, never to be decided on."""
    facts: dict[str, Any] = msgspec.msgpack.decode(lease.holder) if lease.holder else {}
    return {**facts, "fence": lease.fence, "stopped": lease.stopped}


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """What becomes of a recorded call: ``action`` is one of reuse, lost, raise, repeat, verify, park, wait, ask_anew."""

    call: Call
    action: str


@dataclass(frozen=True, slots=True)
class Branch:
    """A named line of checkpoints."""

    task_id: str
    name: str
    seq: int
    """Its head."""
    current: bool
    forked_from: int | None
    """The checkpoint that it began at; None for the first one, and for one that was begun anew."""
    line: int
    """Branches with equal numbers serve each other's recorded calls."""
    step: int | None
    """Of the head; None, as what follows, if its header cannot be read."""
    kept: int
    """How many checkpoints of its own there are."""
    created_at: datetime | None
    """Of the oldest that is kept."""
    updated_at: datetime | None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A checkpoint that a resume could begin from. An empty ``problem`` is nothing against it."""

    seq: int
    problem: str
    step: int | None = None
    """None, as what follows, where its header cannot be read."""
    branch: str = ""
    kind: str = ""
    label: str | None = None
    created_at: datetime | None = None
    taken: bool = False
    """The one that the resume begins from."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a resume would do now."""

    task_id: str
    status: TaskStatus
    does: Literal["begin", "carry on", "wait", "nothing", "refused"]
    """``wait``: a person's word is needed first. ``nothing``: the task is finished. ``refused``: ``why`` tells."""
    why: str
    seq: int | None
    """The checkpoint that it begins from."""
    step: int
    skipped: tuple[tuple[int, str], ...]
    calls: tuple[PlannedCall, ...]
    pauses: tuple[int, ...]
    """Numbers of the pauses that wait for an answer."""
    newest: int | None = None
    """Where the current branch stands."""
    branch: str = ""
    """The one that the run works on: a new one where it goes back."""
    candidates: tuple[Candidate, ...] = ()
    """The newest ones, and all down to the one that is taken."""
    guard: int = 0
    """In steps below this, a write that is not on record is parked for a person."""
    products: Mapping[str, str] = field(default_factory=dict)
    """How each named step stands; see docs/steps.md."""

    def __str__(self) -> str:
        at = f" from {self.task_id}@{self.seq}, step {self.step}" if self.seq is not None else ""
        does = {"nothing": "do nothing", "refused": "be refused"}.get(self.does, self.does)
        lines = [f"{self.task_id} is {self.status}; a resume would {does}{at}{': ' + self.why if self.why else ''}"]
        lines += [f"  {c.seq} is passed over: {c.problem}" for c in self.candidates if c.problem and c.seq > (self.seq or 0)]
        if self.guard > self.step:
            lines.append(f"  below step {self.guard} no write is made that is not on record")
        lines += [f"  call {p.call.no} {p.call.tool} ({p.call.effect}, {p.call.status}): {p.action}" for p in self.calls]
        lines += [f"  product {n} is {how}: made anew" for n, how in self.products.items() if how in ("lost", "fallen")]
        lines += [f"  pause {n} waits for an answer" for n in self.pauses]
        return "\n".join(lines)


def plan(
    row: TaskRow,
    lease: LeaseRow | None,
    seq: int | None,
    problem: BaseException | None,
    line: int,
    step: int,
    calls: Sequence[CallRow],
    pauses: Sequence[PauseRow],
    show: Callable[[CallRow], Call],
    now_us: int,
    *,
    mine: bool = False,
    asks: str = "",
    anew: str = "",
    skipped: tuple[tuple[int, str], ...] | None = None,
    damaged: Iterable[int] | None = None,
    broken: Container[int] = (),
    **more: Any,
) -> Plan:
    """Put it together.

    Args:
        mine: The lease is the asking run's own.
        asks: Why a person has to choose first.
        anew: Why the task would be begun anew.
        damaged: Numbers of calls whose records are damaged; None if there are none.
        broken: Numbers of calls whose recorded result cannot be read.
        more: The other fields of the plan.
    """
    live = lease is not None and lease.live and not mine
    status = shown_status(row, live=live or mine)
    here = [p for p in pauses if p.line == line and p.step >= step]
    asking = {p.call_no for p in here if p.status == "open"}
    answered = frozenset(p.call_no for p in here if p.call_no is not None) - asking
    died = lease.fence if lease is not None and lease.state == "held" and not lease.live else 0
    raised = journal.Raised.decode(row.raised)
    planned = journal.plan_calls(calls, line, step, raised=raised, answered=answered, now_us=now_us, died=died)
    closed = {r.no for r in recovery.closed_from(damaged, calls)} if damaged is not None else set()
    planned = [Planned(p.row, _after_damage(p, closed, broken)) for p in planned]
    open_pauses = tuple(p.no for p in here if p.status == "open")
    parked = [p.row.no for p in planned if p.action == Action.PARK]
    does: Any = "carry on" if seq is not None else "begin"
    why = ""
    if live:
        does, why = "refused", "a live run holds the task"
    elif problem is not None:
        does, why = "refused", type(problem).__name__
    elif asks:
        does, why = "wait", asks
    elif anew:
        does, why = "begin", anew
    elif status == "finished" and not skipped:
        does = "nothing"
    elif parked or open_pauses:
        does = "wait"
        why = ", ".join([*(f"call {n} is in doubt" for n in parked), *(f"pause {n} is not answered" for n in open_pauses)])
    return Plan(
        task_id=row.task,
        status=status,
        does=does,
        why=why,
        seq=None if problem is not None else seq,
        step=step,
        skipped=skipped if skipped is not None else ((seq, type(problem).__name__),) if problem and seq is not None else (),
        calls=tuple(PlannedCall(show(p.row), p.action) for p in planned),
        pauses=open_pauses,
        **more,
    )


def _after_damage(p: Planned, closed: Container[int], broken: Container[int]) -> str:
    if p.row.no in closed:
        return "ask_anew"
    if p.action == Action.REUSE and p.row.no in broken:
        return Action.LOST.value if p.row.effect in journal.HAPPENS else Action.REPEAT.value
    return p.action


def waiting_on(
    calls: Sequence[CallRow], pauses: Sequence[PauseRow], line: int, step: int
) -> tuple[list[CallRow], list[PauseRow]]:
    """What a person has to settle or answer before the steps from ``step`` on may run."""
    return (
        [r for r in calls if r.status == "in_doubt" and r.line == line and r.step >= step],
        [p for p in pauses if p.status == "open" and p.line == line and p.step >= step],
    )

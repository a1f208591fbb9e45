"""What the library's verbs take and return: plain dataclasses, no I/O.

Nothing here prints the content of a state: every ``repr`` shows names, numbers and sizes only, because logs and tracebacks
travel further than stores do.
"""

from __future__ import annotations

import math
import re
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, NamedTuple

from safepoint.errors import InvalidState, SafepointError, UsageError

__all__ = [
    "Call",
    "Checkpoint",
    "CleanupLine",
    "CleanupReport",
    "Done",
    "Finding",
    "Metrics",
    "NotDone",
    "Obj",
    "Outcome",
    "Pause",
    "Recovery",
    "Retention",
    "Retry",
    "State",
    "StepResult",
    "StoreCleanup",
    "TaskInfo",
    "Unknown",
    "check_id",
    "new_id",
]

Kind = Literal["step", "milestone", "manual", "failure", "merge", "edit", "import", "fresh"]
Effect = Literal["read", "idempotent", "transactional", "write"]
CallStatus = Literal["started", "succeeded", "failed", "paused", "in_doubt", "quarantined"]
TaskStatus = Literal["idle", "running", "waiting", "interrupted", "out_of_steps", "finished", "failed"]

CALL_STATUSES: tuple[str, ...] = ("started", "succeeded", "failed", "paused", "in_doubt", "quarantined")
KINDS: tuple[str, ...] = ("step", "milestone", "manual", "failure", "merge", "edit", "import", "fresh")
STATUSES: tuple[str, ...] = ("idle", "running", "waiting", "interrupted", "out_of_steps", "finished", "failed")

ID_LIMIT = 512
METADATA_LIMIT = 8192
"""Bytes of encoded ``metadata`` that a header keeps, so that listings can filter without reading bodies."""


class Obj(NamedTuple):
    """A content-addressed object as a store sees it.

    ``refs`` is the concatenation of the 16-byte names of the objects that this one points at, so that a store can follow
    and sweep them without knowing how ``data`` is encoded.
    """

    name: bytes
    refs: bytes
    data: bytes

    def __repr__(self) -> str:
        return f"<Obj {self.name.hex()} {len(self.data)} bytes>"


_BLANK = re.compile(r"\s*\Z")


def a_type(value: object) -> str:
    """What kind of thing a value is, for an error that must not show it: ``an int``, ``a dict``, ``None``."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def check_id(value: object, what: str = "task_id") -> str:
    """Return ``value`` if it may name a task, branch or space; every store accepts and refuses the same ones.

    Raises:
        UsageError: not text, blank, longer than 512 characters, or with a NUL or a lone surrogate in it.
    """
    if type(value) is not str:
        raise UsageError(f"{what} must be text", f"it is {a_type(value)}", "Pass a str.")
    if not value or _BLANK.match(value):
        raise UsageError(f"{what} is blank", "", f"Use 1 to {ID_LIMIT} characters that can be seen.")
    if len(value) > ID_LIMIT:
        raise UsageError(f"{what} has {len(value)} characters", f"the limit is {ID_LIMIT}", "Use a shorter one.")
    if "\0" in value:
        raise UsageError(f"{what} holds a NUL character", "", "Remove it.")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise UsageError(f"{what} holds a lone surrogate", "it is not valid Unicode text", "Remove it.") from None
    return value


_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"


def new_id() -> str:
    """A unique name that sorts by the time it was made: 48 bits of milliseconds and 82 random ones, 26 characters."""
    n = ((time.time_ns() // 1_000_000) << 82) | secrets.randbits(82)
    chars = []
    for _ in range(26):
        chars.append(_ALPHABET[n & 31])
        n >>= 5
    return "".join(reversed(chars))


@dataclass(frozen=True, slots=True)
class Recovery:
    """How a state came to be the one that a run started from; kept in the next checkpoint."""

    mode: str
    """``new``, ``head`` (the newest checkpoint), or how another one came to be chosen: ``fallback`` (the newest ones cannot be
    used), ``rewind`` and ``at`` (a person's word), ``fresh`` (none can be used, and the task was begun anew)."""
    seq: int | None = None
    """The checkpoint that was chosen. Where that is not the newest, the run goes on from a copy of it on a new branch."""
    skipped: tuple[tuple[int, str], ...] = ()
    """Checkpoints that were passed over, each with the reason."""
    reused: int = 0
    """Calls of the interrupted step whose recorded result is at hand."""
    verified: int = 0
    unclaimed: tuple[int, ...] = ()
    """Numbers of writes of the interrupted step, and of later ones, that are on record as having happened. This is what the run
    begins with: one that it asks for afterwards stays on the list, also in the outcome."""
    previous: str = ""
    """How the last holder ended: ``released``, ``dead``, ``presumed_dead``; empty if there was none."""
    branch: str = ""
    guard: int = 0
    """In steps below this, a write that is not on record is not made, but parked for a person: its record may be gone."""
    lost_calls: tuple[int, ...] = ()
    """Numbers of calls whose records are damaged."""
    lost: tuple[str, ...] = ()
    """Named steps whose products cannot be read; see docs/steps.md."""
    expired: tuple[tuple[str, str, str], ...] = ()
    """Outside resources that had expired: where in ``agent_state``, of what kind, and what became of each."""
    mended: tuple[str, ...] = ()
    """What was done at the end of ``messages`` so that a provider takes them; see docs/histories.md."""


@dataclass(repr=False, slots=True, weakref_slot=True)
class State:
    """What an agent needs to carry on. The agent owns it and changes it in place; ``save`` stores it.

    Only the attributes below can be set: what goes elsewhere would not be saved. Anything of the application's own belongs
    into ``agent_state``.

    Attributes:
        task_id: Names the task; text of 1 to 512 characters.
        step: Number of whole steps done.
        messages: The history, stored item by item.
        agent_state: A dict, or one object of a registered class.
        metadata: Small facts for listings and filters; up to 8 KB of it lies in the header.
        version: The application's schema number.
        created_at: Aware UTC, of the checkpoint that this state stands for; None before the first save.
        branch: The line that the next save goes on with.
        seq: The checkpoint that the next save builds on; None for a task's first.
        recovery: Set by ``resume``.
    """

    task_id: str
    step: int = 0
    messages: list[Any] = field(default_factory=list)
    agent_state: Any = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    version: int = 1
    created_at: datetime | None = None
    branch: str = "main"
    seq: int | None = None
    recovery: Recovery | None = None
    # What the checkpointer needs to find out cheaply what changed. Not part of the value: a copy without it only saves slower.
    # By a factory: a subclass that is a plain dataclass would not find a default that is a slot.
    _base: Any = field(default_factory=lambda: None, init=False, compare=False)

    def __repr__(self) -> str:
        at = f"@{self.seq}" if self.seq is not None else ""
        n = len(self.messages) if isinstance(self.messages, list) else "?"
        return f"<State {self.task_id}{at} branch={self.branch} step={self.step} messages={n}>"

    def __getstate__(self) -> dict[str, Any]:
        # A subclass may have a __dict__.
        return {**{f.name: getattr(self, f.name) for f in fields(self)}, **getattr(self, "__dict__", {}), "_base": None}

    def __setstate__(self, parts: dict[str, Any]) -> None:
        for name, value in parts.items():
            setattr(self, name, value)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a pure step returns: messages to append, keys of ``agent_state`` to set, and whether the task is done."""

    messages: list[Any] = field(default_factory=list, repr=False)
    updates: Mapping[str, Any] = field(default_factory=dict, repr=False)
    done: bool = False
    result: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name, wanted, cls in (("messages", "a list", list), ("updates", "a mapping", Mapping), ("done", "a bool", bool)):
            value = getattr(self, name)
            if not isinstance(value, cls):
                raise UsageError(
                    f"StepResult({name}=) must be {wanted}", f"it is {a_type(value)}", "Correct what the step returns."
                )


@dataclass(frozen=True, slots=True)
class Metrics:
    """What a run measured up to a save. Times in milliseconds, sizes in bytes, all counts since the task began."""

    phase: str = ""
    calls: int = 0
    retries: int = 0
    errors: int = 0
    last_call: str = ""
    last_call_ms: float = 0.0
    tokens_in: int = 0
    tokens_out: int = 0
    save_ms: float = 0.0
    """How long the save before this one took: a save cannot know its own end."""
    bytes_written: int = 0
    attempt: int = 0
    """How many runs have held the task."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The header of a stored state: all but its body.

    ``seq`` is the per-task counter that orders checkpoints; ``id`` is unique and never compared for order; ``digest`` is
    equal for equal states; ``bytes`` is the encoded size of the whole state.
    """

    task_id: str
    seq: int
    id: str
    branch: str
    parent_seq: int | None
    step: int
    kind: Kind
    label: str | None
    created_at: datetime
    schema_version: int
    bytes: int
    digest: str
    pinned: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)
    metrics: Metrics | None = None
    space: str = ""
    problem: str | None = None
    """Why this program cannot load it; looked for by ``list_checkpoints(check=True)`` alone."""

    def __repr__(self) -> str:
        label = f" label={self.label!r}" if self.label else ""
        return f"<Checkpoint {self.task_id}@{self.seq} branch={self.branch} step={self.step} kind={self.kind}{label}>"


@dataclass(frozen=True, slots=True, repr=False)
class Call:
    """One journaled outside call: the intent recorded before it, and its result."""

    task_id: str
    no: int
    """The call's number in its task, as ``safepoint calls`` prints it and ``resolve`` takes it."""
    tool: str
    arguments: Mapping[str, Any]
    call_id: str | None
    idempotency_key: str
    effect: Effect
    has_verifier: bool
    status: CallStatus
    attempts: int
    fence: int
    step: int
    started_at: datetime | None
    finished_at: datetime | None
    result: Any = None
    error: Mapping[str, Any] | None = None
    model: Mapping[str, Any] | None = None
    reason: str = ""
    """Why the call is in doubt, or what a person said of it."""

    def __repr__(self) -> str:
        return f"<Call {self.task_id}#{self.no} {self.tool} {self.effect} {self.status} attempts={self.attempts}>"


@dataclass(frozen=True, slots=True, repr=False)
class Pause:
    """A question to a person that stops the run until it is answered."""

    task_id: str
    no: int
    name: str
    question: Any
    status: Literal["open", "answered", "used"]
    step: int
    asked_at: datetime | None = None
    answered_at: datetime | None = None
    answer: Any = None

    def __repr__(self) -> str:
        return f"<Pause {self.task_id}#{self.no} {self.name!r} {self.status}>"


@dataclass(frozen=True, slots=True)
class TaskInfo:
    """A line of ``tasks()``."""

    task_id: str
    status: TaskStatus
    branch: str
    seq: int | None
    step: int
    created_at: datetime
    updated_at: datetime
    agent: str = ""
    attempts: int = 0
    reason: str = ""
    pending: int = 0
    """How many calls are in doubt and pauses unanswered."""
    checkpoints: int = 0
    holder: Mapping[str, Any] | None = None

    @property
    def unfinished(self) -> bool:
        """Whether a restarted process should take the task up: interrupted, or waiting with all settled and answered.

        Not one without a checkpoint: its process died before the first save, and there is nothing to carry on with.
        """
        return self.seq is not None and (self.status == "interrupted" or self.ready)

    @property
    def ready(self) -> bool:
        """Whether it waits for nothing any more: all that it waited for has been settled and answered."""
        return self.status == "waiting" and self.pending == 0


@dataclass(frozen=True, slots=True, repr=False)
class Outcome:
    """How ``run_agent`` ended."""

    task_id: str
    turn: str
    status: Literal["finished", "waiting", "out_of_steps"]
    result: Any
    state: State
    steps: int
    """Whole steps done since the task began."""
    recovery: Recovery | None = None
    """How the run began; None if none did, as the work was done before, or a person has to speak first."""
    pending: tuple[Call | Pause, ...] = ()

    def __repr__(self) -> str:
        return f"<Outcome {self.task_id} {self.status} steps={self.steps} pending={len(self.pending)}>"


@dataclass(frozen=True, slots=True)
class Done:
    """A verifier's or a person's word: the call happened, with this result."""

    result: Any = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class NotDone:
    """A verifier's or a person's word: the call did not happen."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """A verifier's word: it cannot tell."""

    reason: str = ""


def exception_types(given: object, what: str) -> tuple[type[BaseException], ...]:
    """One exception class or several, as a tuple. UsageError for anything else."""
    several = (given,) if isinstance(given, type) else tuple(given) if isinstance(given, Iterable) else None
    if several is None or not all(isinstance(t, type) and issubclass(t, BaseException) for t in several):
        raise UsageError(f"{what} must be an exception class or several", "", "Pass TimeoutError, or (TimeoutError, OSError).")
    return several


def _not(value: object) -> str:
    """What it is instead: a number, or the type of anything else."""
    return f", not {value!r}" if isinstance(value, int | float) else f", not {a_type(value)}"


@dataclass(frozen=True, slots=True)
class Retry:
    """How often a failed call is tried in all, and how long to wait in between.

    ``backoff`` is the first wait in seconds; each further one is twice as long, up to ``max_backoff``. ``on`` limits the
    retries to these exception types (one class, or several).
    """

    attempts: int = 1
    backoff: float = 0.1
    max_backoff: float = 30.0
    on: type[BaseException] | tuple[type[BaseException], ...] = (Exception,)

    def __post_init__(self) -> None:
        if type(self.attempts) is not int or self.attempts < 1:
            raise UsageError(f"Retry(attempts=) must be an int of at least 1{_not(self.attempts)}", "", "Correct the number.")
        for name in ("backoff", "max_backoff"):
            seconds = getattr(self, name)
            if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
                raise UsageError(f"Retry({name}=) must be seconds, 0 or more{_not(seconds)}", "", "Correct the number.")
        object.__setattr__(self, "on", exception_types(self.on, "Retry(on=)"))

    def wait(self, attempt: int) -> float:
        """Seconds to wait after the ``attempt``-th try (from 1) failed."""
        return float(min(self.backoff * 2 ** min(attempt - 1, 60), self.max_backoff))


@dataclass(frozen=True, slots=True)
class Retention:
    """How many checkpoints a task keeps. The newest ``keep_latest`` always stay; the other limits delete beyond them.

    Heads, pinned checkpoints, and whatever calls and pauses stand on that are open or that a resume would read are kept in any
    case.
    """

    keep_latest: int | None = 100
    max_age: timedelta | None = None
    max_bytes: int | None = None
    keep_milestones: bool = True
    keep_failures: int = 10

    def __post_init__(self) -> None:
        for name in ("keep_latest", "max_bytes", "keep_failures"):
            number = getattr(self, name)
            if type(number) is not int and not (number is None and name != "keep_failures"):
                raise UsageError(f"{name} must be a number", f"it is {a_type(number)}", f"Pass {name}=10.")
        if self.max_age is not None and not isinstance(self.max_age, timedelta):
            raise UsageError("max_age must be a timedelta", f"it is {a_type(self.max_age)}", "Pass timedelta(days=7).")
        if type(self.keep_milestones) is not bool:
            raise UsageError("keep_milestones must be a bool", f"it is {a_type(self.keep_milestones)}", "Pass True or False.")
        if self.keep_latest is not None and self.keep_latest < 1:
            raise UsageError("keep_latest must be at least 1", "the newest checkpoint is never deleted", "Pass 1 or more.")
        if self.max_age is not None and self.max_age < timedelta(0):
            raise UsageError("max_age is negative", "", "Pass a timedelta of zero or more.")
        if self.max_bytes is not None and self.max_bytes < 0:
            raise UsageError("max_bytes is negative", "", "Pass a number of bytes, zero or more.")
        if self.keep_failures < 0:
            raise UsageError("keep_failures is negative", "", "Pass zero or more.")

    @classmethod
    def keep_all(cls) -> Retention:
        """Delete nothing."""
        return cls(keep_latest=None)

    @property
    def keeps_all(self) -> bool:
        return self.keep_latest is None and self.max_age is None and self.max_bytes is None


@dataclass(frozen=True, slots=True)
class CleanupLine:
    """What a clean-up would do with one checkpoint."""

    seq: int
    created_at: datetime
    kind: str
    bytes: int
    deleted: bool
    why: str
    calls: int
    """Calls of the journal that belong to the step it began, and go with it."""


@dataclass(frozen=True, slots=True)
class CleanupReport:
    """What ``cleanup`` deleted, or with ``dry_run`` would delete."""

    task_id: str
    deleted: tuple[int, ...]
    kept: int
    calls_deleted: int
    objects_deleted: int
    bytes_freed: int
    """Bytes of the deleted rows and objects; the file shrinks only when the store re-uses or returns its pages."""
    dry_run: bool = False
    unreadable: tuple[int, ...] = ()
    """Damaged checkpoints that were come upon. They are never deleted, and do not count among the newest."""
    checkpoints: tuple[CleanupLine, ...] = ()
    """With ``dry_run``: each checkpoint of the task, newest first, with what becomes of it and why."""


@dataclass(frozen=True, slots=True)
class StoreCleanup:
    """What ``cleanup_all`` deleted, or with ``dry_run`` would delete."""

    tasks: tuple[CleanupReport, ...]
    """Of each task that was looked at."""
    removed: tuple[str, ...] = ()
    """Finished tasks that were removed whole."""
    failed: dict[str, str] = field(default_factory=dict)
    """Tasks that could not be looked at, with the error; nothing of them was deleted."""
    dry_run: bool = False

    @property
    def deleted(self) -> int:
        """How many checkpoints, those of removed tasks not counted."""
        return sum(len(r.deleted) for r in self.tasks)

    @property
    def kept(self) -> int:
        return sum(r.kept for r in self.tasks)

    @property
    def calls_deleted(self) -> int:
        return sum(r.calls_deleted for r in self.tasks)

    @property
    def objects_deleted(self) -> int:
        return sum(r.objects_deleted for r in self.tasks)

    @property
    def bytes_freed(self) -> int:
        return sum(r.bytes_freed for r in self.tasks)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of ``check``: something about the store's fitness."""

    name: str
    level: Literal["ok", "warning", "error"]
    text: str
    remedy: str = ""


def now() -> datetime:
    """The wall clock, aware UTC. Shown to people, never used for order."""
    return datetime.now(UTC)


def to_us(t: datetime) -> int:
    """Microseconds since 1970, exact (``timestamp()`` goes through a float)."""
    return (t - _EPOCH) // _MICRO


def from_us(us: int) -> datetime:
    try:
        return _EPOCH + timedelta(microseconds=us)
    except OverflowError:  # a damaged row in a listing: its seal is checked when it is loaded
        return _EPOCH


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICRO = timedelta(microseconds=1)


def check_state(state: State) -> None:
    """Refuse a state that breaks a rule of the model, before anything is written.

    Raises:
        UsageError: it is no State. InvalidState: a field has a type or value that it cannot have.
    """
    if not isinstance(state, State):
        raise UsageError("a state must be a safepoint.State", f"it is {a_type(state)}", "Pass State(task_id=…, …).")
    check_id(state.task_id)
    check_id(state.branch, "branch")
    if not isinstance(state.messages, list):
        raise _invalid("messages", "a list", state.messages)
    if type(state.metadata) is not dict:
        raise _invalid("metadata", "a dict", state.metadata)
    for name, low in (("step", 0), ("version", 1)):
        value = getattr(state, name)
        if type(value) is not int or not low <= value < 1 << 63:  # what every store can keep
            raise _invalid(name, f"an int of at least {low}, and below 2**63", value)
    if state.seq is not None and (type(state.seq) is not int or state.seq < 1):
        raise _invalid("seq", "None or the number of a checkpoint", state.seq)


def _invalid(name: str, wanted: str, value: object) -> SafepointError:
    return InvalidState(
        f"state.{name} must be {wanted}",
        f"it is {value}"
        if name in ("step", "version", "seq") and type(value) is int and value.bit_length() < 99
        else f"it is {a_type(value)}",
        "Correct the state; nothing was written.",
        field=name,
    )

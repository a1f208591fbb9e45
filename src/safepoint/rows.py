"""What passes between the public objects and a store: rows of plain values, bytes and names.

A store knows nothing of messages or tools. It keeps these rows, in one atomic step each, and hands them back as they were;
what they mean is decided above it. Times are integers, microseconds since 1970; they are shown to people and never
compared for order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from operator import contains
from typing import Any, ClassVar, NamedTuple, TypeVar, get_args, get_type_hints

import msgspec

from safepoint.errors import Damaged
from safepoint.model import Obj

S = TypeVar("S", bound=msgspec.Struct)


def replace(row: S, /, **changes: Any) -> S:
    """A copy of the row with these fields changed."""
    return msgspec.structs.replace(row, **changes)


# -- classes of values


@cache
def classes(cls: type, names: tuple[str, ...]) -> tuple[frozenset[type], ...]:
    """What the values of these fields of a row, or of a NamedTuple, may be. Stores keep a truth value as a number."""
    hints = get_type_hints(cls)
    allowed = [frozenset(get_args(hints[name]) or (hints[name],)) for name in names]
    return tuple(found | {int} if bool in found else found for found in allowed)


@cache
def fitting(cls: type, names: tuple[str, ...]) -> Callable[[tuple[Any, ...]], bool]:
    """What tells whether every value is of a class that its field may have: a flipped bit in a stored row makes another of it.

    To be asked of whatever comes out of a store, before it is used. That a value is the one that was written is for the seal.
    """
    allowed = classes(cls, names)
    known: dict[tuple[type, ...], bool] = {}

    def fits(found: tuple[Any, ...]) -> bool:
        signature = tuple(map(type, found))
        answer = known.get(signature)
        if answer is None:
            answer = known[signature] = len(signature) == len(allowed) and all(map(contains, allowed, signature))
        return answer

    return fits


def all_fit(cls: type, names: tuple[str, ...], rows: list[Any]) -> bool:
    """As ``fitting``, of many rows at once: at a fraction of the cost where there are thousands."""
    columns = zip(*rows, strict=True)
    return not rows or all(a.issuperset(map(type, column)) for column, a in zip(columns, classes(cls, names), strict=True))


def torn(cls: type[S], names: tuple[str, ...], found: tuple[Any, ...]) -> S:
    """The row of values that do not all fit: with something harmless in place of those, and with a seal that no row has.

    So it is one more row whose seal is broken: it hides none of the others in a listing, and whoever checks it calls it damaged.
    Rather pinned than not.
    """
    given = dict(zip(names, found, strict=True))
    for name, allowed in zip(names, classes(cls, names), strict=True):
        if type(given[name]) not in allowed:
            given[name] = None if type(None) in allowed else True if bool in allowed else next(iter(allowed))()
        elif bool in allowed:
            given[name] = bool(given[name])
    return cls(**{**given, "seal": b""})


class Head(NamedTuple):
    """Where a branch stands. Both are compared: after a failover or a restored backup a number may come a second time."""

    seq: int
    id: str


class Guard(NamedTuple):
    """What a live run shows with every write: its fence, and the random token that was drawn with it."""

    fence: int
    token: str

    def __repr__(self) -> str:
        return f"<Guard fence={self.fence}>"


def _digest(parts: list[Any]) -> bytes:
    # Each part with its type and length, so that no two different rows give the same bytes.
    found: list[bytes] = []
    add = found.append
    for part in parts:
        if part is None:
            add(b"n")
        elif isinstance(part, bytes):
            add(b"b%d:" % len(part))
            add(part)
        elif isinstance(part, str):
            raw = part.encode()
            add(b"s%d:" % len(raw))
            add(raw)
        elif isinstance(part, int):
            add(b"i%d;" % part)
        else:
            raise TypeError(f"no row holds a {type(part).__name__}")
    return hashlib.sha256(b"".join(found)).digest()[:16]


class _Row(msgspec.Struct, frozen=True):
    """Prints which row it is and how it stands, and nothing that it holds: logs and tracebacks travel further than stores.

    Rows are msgspec's structs, made and copied in C: each call of the journal copies a row of thirty fields several times.
    """

    SHOWN: ClassVar[tuple[str, ...]] = ()

    def __repr__(self) -> str:
        shown = [f"{name}={value!r}" for name in self.SHOWN if (value := getattr(self, name)) is not None]
        return f"<{' '.join([type(self).__name__, *shown])}>"


class _Sealed(_Row, frozen=True, kw_only=True):
    """A row with a seal: a digest over its task and every field that does not change by itself."""

    seal: bytes = b""
    UNSEALED: ClassVar[frozenset[str]] = frozenset({"seal"})

    def _seal_for(self, task: str) -> bytes:
        cls = type(self)
        return _digest([cls.__name__, task, *(getattr(self, f) for f in _sealed_fields(cls))])

    def sealed(self, task: str) -> Any:
        """A copy that carries its seal. The store calls this when it has given the row its numbers."""
        return replace(self, seal=self._seal_for(task))

    def check(self, task: str, name: str) -> None:
        """Raise Damaged unless the row is as it was when it was sealed."""
        try:
            sound = self.seal == self._seal_for(task)
        except TypeError:
            sound = False
        if not sound:
            raise Damaged(
                f"{name} of task {task!r} is damaged",
                "its row does not match its seal",
                "Load an earlier checkpoint, or restore the store from a backup.",
                task=task,
            )


_FIELDS: dict[type, tuple[str, ...]] = {}


def _sealed_fields(cls: type[_Sealed]) -> tuple[str, ...]:
    names = _FIELDS.get(cls)
    if names is None:
        names = _FIELDS[cls] = tuple(sorted(f for f in cls.__struct_fields__ if f not in cls.UNSEALED))
    return names


class CheckpointRow(_Sealed, frozen=True, kw_only=True):
    """One checkpoint. ``root`` and ``refs`` are the encoded state's root object, ``digest`` its name."""

    SHOWN: ClassVar[tuple[str, ...]] = ("seq", "space", "branch", "step", "kind")
    id: str
    space: str = ""
    branch: str = "main"
    parent_seq: int | None = None
    step: int
    kind: str
    label: str | None = None
    created_at: int
    format: int
    schema: int
    size: int
    digest: bytes
    metadata: bytes = b""
    metrics: bytes = b""
    root: bytes = b""
    refs: bytes = b""
    seq: int = 0
    """Given by the store at commit."""
    pinned: bool = False
    UNSEALED: ClassVar[frozenset[str]] = frozenset({"seal", "pinned", "root", "refs"})  # root and refs are under digest


class CallRow(_Sealed, frozen=True, kw_only=True):
    """One call of the journal. ``args``/``result`` with their refs are encoded roots, as in a checkpoint."""

    SHOWN: ClassVar[tuple[str, ...]] = ("no", "line", "step", "tool", "effect", "status", "attempts", "version")
    no: int = 0
    """Per-task number, given by the store with the first intent."""
    line: int
    step: int
    scope: int = 0
    """The model reply that the call belongs to: number of that model call, 0 before the first."""
    ident: bytes
    """Digest of tool and canonical arguments."""
    tool: str
    effect: str
    call_id: str | None = None
    idempotency_key: str
    op_key: bytes | None = None
    status: str
    attempts: int = 1
    fence: int = 0
    base_seq: int
    """The checkpoint that the call's step began from: the call is deleted with it, and keeps it while it is needed."""
    started_at: int = 0
    finished_at: int | None = None
    asked: int = 0
    """Journal position that the step had seen when it asked for the call: shows whether it went on past a failure."""
    began: int = 0
    """Journal position of the last intent, and of the result; given by the store. They order calls against each other."""
    ended: int | None = None
    args: bytes = b""
    args_refs: bytes = b""
    result: bytes | None = None
    result_refs: bytes = b""
    error: bytes | None = None
    policy: bytes = b""
    model: bytes | None = None
    not_done: bool = False
    """A verifier, the tool or a person said that the last attempt did not happen."""
    superseded: bool = False
    """Set aside because the step raised twice on it."""
    reason: str = ""
    version: int = 0
    """Rises with each write of the row; writes compare it."""


class PauseRow(_Sealed, frozen=True, kw_only=True):
    """A question. Identified within a step by name and occurrence."""

    SHOWN: ClassVar[tuple[str, ...]] = ("no", "line", "step", "status", "version")
    no: int = 0
    line: int
    step: int
    space: str = ""
    name: str
    occurrence: int = 0
    call_no: int | None = None
    base_seq: int
    question: bytes
    answer: bytes | None = None
    status: str = "open"
    asked_at: int = 0
    answered_at: int | None = None
    version: int = 0


class WriteRow(_Sealed, frozen=True, kw_only=True):
    """What an adapter's writer recorded against a checkpoint, maybe before that checkpoint exists, or without its ever coming to exist.

    Known by space, checkpoint, writer and index. ``data`` with ``refs`` is an encoded root, as in a checkpoint.
    """

    SHOWN: ClassVar[tuple[str, ...]] = ("space", "idx")
    space: str = ""
    checkpoint: str
    """The id of the checkpoint."""
    writer: str
    idx: int
    """From 0 on: the first row of its key stands, and later ones are left out. Below 0: the last one stands."""
    path: str = ""
    """Of the writer among those of its checkpoint; for order, which is the adapter's."""
    data: bytes = b""
    refs: bytes = b""

    @property
    def key(self) -> tuple[str, str, str, int]:
        return self.space, self.checkpoint, self.writer, self.idx


class BranchRow(msgspec.Struct, frozen=True):
    space: str
    name: str
    head: Head
    line: int
    """The journal line that calls made on this branch belong to."""
    forked_from: int | None = None


class TaskRow(_Row, frozen=True, kw_only=True):
    SHOWN: ClassVar[tuple[str, ...]] = ("task", "status", "branch", "step")
    task: str
    status: str = "idle"
    branch: str = "main"
    """The current branch."""
    head: Head | None = None
    """Of the current branch."""
    step: int = 0
    agent: str = ""
    input: bytes = b""
    attempts: int = 0
    reason: str = ""
    parent: str | None = None
    raised: bytes = b""
    """What is remembered of the step that raised last; see rules/journal.py."""
    created_at: int = 0
    updated_at: int = 0
    in_doubt: int = 0
    """Calls in doubt that a resume would come upon: of the current branch's line, from the step of its head on."""
    open_pauses: int = 0
    """Open pauses, counted likewise."""
    checkpoints: int = 0


class LeaseRow(_Row, frozen=True, kw_only=True):
    """The claim on a task. ``live`` is found out at the time of reading, not stored."""

    SHOWN: ClassVar[tuple[str, ...]] = ("task", "fence", "state", "live")
    task: str
    fence: int
    token: str
    lease_id: int
    state: str
    """``held`` or ``released``."""
    holder: bytes
    """MessagePack map of what is shown to people: pid, host, boot id, since when, program."""
    acquired_at: int
    presumed: int = 0
    """The highest fence whose holder was presumed dead (taken over by force or age), never proven so."""
    live: bool = False
    stopped: bool = False
    until: int | None = None
    """When it ends unless it is renewed, in microseconds of the server's clock; None where leases have no clock."""


class Grant(_Row, frozen=True):
    """A lease that was just taken."""

    SHOWN: ClassVar[tuple[str, ...]] = ("guard", "previous", "presumed")
    guard: Guard
    previous: str
    """How the last holder ended: '' (none), 'released', 'dead' (proven) or 'presumed_dead'."""
    presumed: int
    handle: Any = None
    """The store's own, to let go of the claim when the run is collected."""


class CallWrite(_Row, frozen=True):
    """Insert a call (``row.version == 0``: the store gives number and positions) or update it if its version is still
    ``row.version``. ``stamp`` says which journal position this write sets."""

    SHOWN: ClassVar[tuple[str, ...]] = ("row", "stamp")
    row: CallRow
    stamp: str = ""
    """'began', 'ended', or '' for neither (a person's or verifier's word, a mark)."""


class PauseWrite(_Row, frozen=True):
    SHOWN: ClassVar[tuple[str, ...]] = ("row",)
    row: PauseRow


class BranchWrite(_Row, frozen=True, kw_only=True):
    """Set a branch back to a checkpoint that is there, or drop it: what a deletion does before the checkpoints go, as a head never goes."""

    SHOWN: ClassVar[tuple[str, ...]] = ("space", "expect", "to")
    space: str = ""
    name: str
    expect: Head
    """Where it stands."""
    to: Head | None
    """Where it is to stand; None drops it. The current branch can only be dropped with the last one of space ''."""


class TaskPatch(_Row, frozen=True, kw_only=True):
    """Fields of the task row to set; None leaves them."""

    SHOWN: ClassVar[tuple[str, ...]] = ("status", "branch")
    status: str | None = None
    agent: str | None = None
    input: bytes | None = None
    reason: str | None = None
    raised: bytes | None = None
    parent: str | None = None
    branch: str | None = None
    guarded: bool = False
    """What ``Store.older`` tells of is under a guard from now on."""


class Commit(_Row, frozen=True, kw_only=True):
    """All that one atomic step writes. It lands whole or not at all, and landing twice is landing once.

    With a ``guard`` the lease must still be that guard's (LeaseLost). Without one, a commit is refused while a live run holds
    the task (LeaseHeld), also one that only patches the task's row, unless ``anyway`` is set (answers and settlements, which
    are protected by the version of their row alone).
    """

    SHOWN: ClassVar[tuple[str, ...]] = ("task", "id", "checkpoint")
    task: str
    id: str
    """Made before the first try. For a checkpoint it is the checkpoint's id."""
    guard: Guard | None = None
    anyway: bool = False
    checkpoint: CheckpointRow | None = None
    expect: Head | None = None
    """Where the checkpoint's branch must stand; None: it does not exist yet."""
    moves_head: bool = True
    """False for a failure leaf, which hangs below ``expect`` without becoming the head."""
    line: int | None = None
    """For a new branch: the journal line it goes on with; None begins a new one."""
    objects: tuple[Obj, ...] = ()
    """All objects that the rows of this commit reach, less those that the checkpoint ``expect`` (or, without a
    checkpoint, ``stands_on``) reaches."""
    stands_on: Head | None = None
    """Must still exist for the left-out objects to be there."""
    at_head: bool = False
    """``stands_on`` must be the head of the task's current branch, as it is before this commit (None: it has no head)."""
    calls: tuple[CallWrite, ...] = ()
    pauses: tuple[PauseWrite, ...] = ()
    writes: tuple[WriteRow, ...] = ()
    """Each key once. What they refer to is in ``objects``, less what ``stands_on`` reaches."""
    branches: tuple[BranchWrite, ...] = ()
    """Only in a commit without a checkpoint; each branch once."""
    patch: TaskPatch | None = None
    sync: bool = True
    """Whether this step must survive power loss before it is acknowledged (under durability="full")."""


class Committed(_Row, frozen=True):
    SHOWN: ClassVar[tuple[str, ...]] = ("seq", "head", "existed", "bytes_written")
    seq: int | None
    """Of the checkpoint, if there was one."""
    head: Head | None
    existed: bool
    """The same commit had landed before."""
    calls: tuple[CallRow, ...] = ()
    pauses: tuple[PauseRow, ...] = ()
    bytes_written: int = 0
    """Bytes of the rows and new objects of this commit."""


class Pruned(msgspec.Struct, frozen=True):
    seqs: tuple[int, ...]
    calls: int
    objects: int
    bytes: int


class Numbers(msgspec.Struct, frozen=True):
    """The last number of each kind that a task has given out. They outlive the rows, so that none comes a second time."""

    seq: int = 0
    call: int = 0
    pause: int = 0
    line: int = 0
    position: int = 0


class Lost(_Row, frozen=True):
    """Something that is in a store and cannot be read: what it is, where it lies, and why."""

    SHOWN: ClassVar[tuple[str, ...]] = ("what", "where", "why")
    what: str
    """``checkpoint 43``, ``call 12``, ``object 1f…``, ``branch 'main'``, or ``rows`` of a kind where not even that is known."""
    where: str
    """In the store's own terms: a file with its line, a table with its row."""
    why: str
    kind: str = ""
    """``checkpoint``, ``call``, ``pause``, ``write``, ``object``, ``branch``, ``task``, ``input``, ``structure``, ``stray`` or
    ``foreign`` (none of the store's), where that is known."""
    first: int | None = None
    """Of checkpoints, calls and pauses: the numbers that lie in what cannot be read. Not each of them need have been there."""
    last: int | None = None
    """None with a ``first``: to the end."""
    name: bytes = b""
    """Of an object."""
    key: tuple[str, str, str, int] | None = None
    """Of a write, where that is known."""


class Aside(_Row, frozen=True):
    """A row or object that repair takes out of the way."""

    SHOWN: ClassVar[tuple[str, ...]] = ("kind", "why")
    kind: str
    """``checkpoint``, ``call``, ``pause``, ``write``, ``object`` or ``branch``."""
    key: Any
    """Its number; an object's name; space and name of a branch; a write's key."""
    why: str


Part = TaskRow | Numbers | BranchRow | CheckpointRow | CallRow | PauseRow | WriteRow | Obj | Lost
"""What ``Store.walk`` gives of a task."""


class Image(_Row, frozen=True, kw_only=True):
    """A whole task, as ``Store.write_task`` takes it. Rows keep their numbers and ids."""

    SHOWN: ClassVar[tuple[str, ...]] = ("row", "numbers")
    row: TaskRow
    numbers: Numbers
    branches: tuple[BranchRow, ...]
    checkpoints: tuple[CheckpointRow, ...]
    calls: tuple[CallRow, ...] = ()
    pauses: tuple[PauseRow, ...] = ()
    writes: tuple[WriteRow, ...] = ()
    objects: tuple[Obj, ...] = ()
    """All that the rows reach; none on stores that are not chunked."""
    fence: int = 0
    """The highest that a holder of the task has had: receivers that refuse stale fences know it."""

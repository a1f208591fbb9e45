"""A state as a root and objects, and rows as what the public verbs return."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from safepoint.codec import chunks, values
from safepoint.codec.chunks import Packed
from safepoint.codec.migrating import Migrations, blamed, migrated
from safepoint.codec.registry import Registry
from safepoint.codec.resource import masked
from safepoint.errors import Damaged, InvalidState, NewerFormat, NewerSchema, SafepointError
from safepoint.model import METADATA_LIMIT, Call, Checkpoint, Kind, Metrics, Obj, Pause, State, from_us
from safepoint.rows import CallRow, CheckpointRow, PauseRow, replace

FORMAT = 1
"""Of the library. Older ones stay readable for ever; a newer one is refused and left alone."""

SPARE = "products"
"""The part that may be damaged without the rest being so."""


@dataclass(slots=True, repr=False)
class Control:
    """What a run keeps in a checkpoint beside the user's state: the job, its turns, and how it ended."""

    turns: list[list[Any]] = field(default_factory=list)
    """``[turn, input, status, result, step]``, in order; status is open or finished."""
    finished: bool = False
    guard: int = 0
    """In steps below this, a write that is not on record is not made on its own: it may have been made and its record be gone."""
    requires: tuple[str, ...] = ()
    """What the agent said that a state of it must have; see ``rules.health.requires``."""
    made: dict[str, list[Any]] = field(default_factory=dict)
    """What is recorded of each named step, as ``rules.steps.Made`` encodes it."""
    products: dict[str, Any] = field(default_factory=dict)
    """What they returned. The one part of a state that may be damaged without the rest being so: a step can run again."""

    def __repr__(self) -> str:  # inputs and results are content
        return f"<Control turns={len(self.turns)} finished={self.finished}>"

    def turn(self, name: str) -> list[Any] | None:
        return next((t for t in reversed(self.turns) if t[0] == name), None)

    @property
    def lost(self) -> tuple[str, ...]:
        """Names of products that were made, and are not there."""
        return tuple(sorted(n for n, p in self.made.items() if n not in self.products and type(p) is list and "made" in p))

    def copy(self) -> Control:
        turns = [list(t) for t in self.turns]
        return Control(turns, self.finished, self.guard, self.requires, self.made.copy(), self.products.copy())

    @classmethod
    def of(cls, tree: Mapping[str, Any]) -> Control:
        named = [part if type(part := tree.get(name)) is dict else {} for name in ("made", SPARE)]
        return cls(tree["turns"], tree["finished"], tree.get("guard", 0), tuple(tree.get("requires", ())), *named)


def tree_of(state: State, control: Control, recovery: Mapping[str, Any] | None = None) -> dict[str, Any]:
    tree = {
        "messages": state.messages,
        "agent_state": state.agent_state,
        "metadata": state.metadata,
        "step": state.step,
        "turns": control.turns,
        "finished": control.finished,
    }
    if control.guard:
        tree["guard"] = control.guard
    if control.requires:
        tree["requires"] = list(control.requires)
    if control.made:
        tree |= {"made": control.made, "products": control.products}
    if recovery is not None:
        tree["recovery"] = dict(recovery)
    return tree


def guard_of(row: CheckpointRow) -> int:
    """The guard that a whole row's state stands under."""
    try:
        parts = msgspec.msgpack.decode(row.root, type=dict[str, msgspec.Raw])
        return msgspec.msgpack.decode(parts["guard"], type=int) if "guard" in parts else 0
    except msgspec.MsgspecError:
        raise Damaged(f"checkpoint {row.seq} cannot be read", "", "Go back to an earlier checkpoint.") from None


def with_guard(row: CheckpointRow, guard: int) -> CheckpointRow:
    """The same state under another guard (0: none): the root with one small value set, and all else of it as it is."""
    try:
        parts = msgspec.msgpack.decode(row.root, type=dict[str, msgspec.Raw])
    except msgspec.MsgspecError:
        raise Damaged(f"checkpoint {row.seq} cannot be read", "", "Go back to an earlier checkpoint.") from None
    before = msgspec.msgpack.decode(parts["guard"]) if "guard" in parts else 0
    if before == guard:
        return row
    parts.pop("guard", None)
    if guard:
        parts["guard"] = msgspec.Raw(msgspec.msgpack.encode(guard))
    root = msgspec.msgpack.encode(parts)
    return replace(row, root=root, digest=chunks.root_digest(root, row.refs), size=row.size + len(root) - len(row.root))


def pack_state(
    state: State,
    control: Control,
    registry: Registry,
    base: Packed | None,
    recovery: Mapping[str, Any] | None = None,
    *,
    flat: bool = False,
) -> Packed:
    """``flat``, here and below: for a store that is not chunked."""
    return chunks.pack(tree_of(state, control, recovery), registry, base=base, flat=flat)


def encode_metadata(metadata: dict[str, Any], registry: Registry) -> bytes:
    """For the header. Refuses what is too big for one, since a filter must not silently miss it."""
    if not metadata:
        return b""
    data = values.encode(metadata, registry, path="metadata")
    if len(data) > METADATA_LIMIT:
        raise InvalidState(
            f"state.metadata takes {len(data)} bytes",
            f"it lies in every header, and the limit is {METADATA_LIMIT}",
            "Keep large values in agent_state; nothing was written.",
            field="metadata",
        )
    return data


def unpack_state(
    task: str,
    row: CheckpointRow,
    objects: Mapping[bytes, Obj],
    registry: Registry,
    *,
    schema: int,
    migrations: Migrations,
) -> tuple[State, Control, Packed | None]:
    """The state that a row stands for. The packed form is None where a migration changed the tree: nothing can be left out.

    Raises:
        Damaged, NewerFormat, NewerSchema, RefusedType, InvalidState: each names ``task@seq``; the row is left as it is.
    """
    at = f"{task}@{row.seq}"
    check_row(task, row)
    if row.schema > schema:
        raise NewerSchema(
            f"{at} has schema {row.schema}",
            f"this program declares schema_version={schema}",
            "Run the newer program, or raise schema_version.",
            task=task,
            seq=row.seq,
        )
    try:
        if row.schema < schema:
            plain = chunks.unpack_plain(row.root, row.refs, objects, spare=SPARE, size=row.size)
            # Whatever a migration does to the tree: it has just been made for this load alone.
            data = migrated(plain, row.schema, schema, migrations, at, depth=chunks.DEPTH)
            try:
                tree, packed = cast(dict[str, Any], values.decode(data, registry, depth=chunks.DEPTH)), None
            except SafepointError as error:
                raise blamed(error, row.schema, schema) from error.__cause__
        else:
            tree, packed = chunks.unpack(row.root, row.refs, objects, registry, spare=SPARE, size=row.size)
        state = State(
            task_id=task,
            step=tree["step"],
            messages=tree["messages"],
            agent_state=tree["agent_state"],
            metadata=tree["metadata"],
            version=schema,
            created_at=from_us(row.created_at),
            branch=row.branch,
            seq=row.seq,
        )
        control = Control.of(tree)
    except KeyError as error:
        raise Damaged(f"{at} is damaged", f"its state has no part {error}", "Load an earlier checkpoint.") from None
    except SafepointError as error:
        if at not in error.what:
            error.what = f"{at}: {error.what}"
        error.details.setdefault("task", task)
        error.details.setdefault("seq", row.seq)
        raise
    return state, control, packed


def check_row(task: str, row: CheckpointRow) -> None:
    """Refuse a row that is not what was written, or that this version cannot read."""
    if row.format > FORMAT:
        raise NewerFormat(
            f"{task}@{row.seq} has format {row.format}",
            f"this safepoint reads up to format {FORMAT}",
            "Upgrade safepoint; the checkpoint is left as it is.",
            task=task,
            seq=row.seq,
        )
    row.check(task, f"checkpoint {row.seq}")
    # The seal covers the digest, and the digest the root: without this line a changed byte in it would be loaded as a value.
    if chunks.root_digest(row.root, row.refs) != row.digest:
        raise Damaged(
            f"checkpoint {row.seq} of task {task!r} is damaged",
            "its state does not match its digest",
            "Load an earlier checkpoint, or restore the store from a backup.",
            task=task,
            seq=row.seq,
        )


def plain_metadata(row: CheckpointRow) -> dict[str, Any]:
    return cast(dict[str, Any], values.decode_plain(row.metadata)) if row.metadata else {}


def header(task: str, row: CheckpointRow, registry: Registry) -> Checkpoint:
    """A row as the header that verbs return. What is damaged in it, or of a class that is gone, must not block a listing."""
    problem: str | None = None
    metrics = None
    try:
        row.check(task, f"checkpoint {row.seq}")
    except Damaged as error:
        problem = f"Damaged: {error.what}: {error.why}"
    try:
        metadata = values.decode(row.metadata, registry, path="metadata") if row.metadata else {}
    except SafepointError:
        try:
            metadata = plain_metadata(row)
        except SafepointError as error:
            metadata, problem = {}, problem or f"{type(error).__name__}: {error.what}: {error.why}"
    try:
        metrics = Metrics(*_unpacked(row.metrics, "metrics")) if row.metrics else None
    except (SafepointError, TypeError) as error:
        problem = problem or f"Damaged: metrics cannot be loaded: {type(error).__name__}"
    return Checkpoint(
        task_id=task,
        seq=row.seq,
        id=row.id,
        branch=row.branch,
        parent_seq=row.parent_seq,
        step=row.step,
        kind=cast(Kind, row.kind),
        label=row.label,
        created_at=from_us(row.created_at),
        schema_version=row.schema,
        bytes=row.size,
        digest=row.digest.hex(),
        pinned=row.pinned,
        metadata=metadata,
        metrics=metrics,
        space=row.space,
        problem=problem,
    )


def _unpacked(data: bytes, what: str) -> Any:
    """Small facts of a row that are no values of the application."""
    try:
        return msgspec.msgpack.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Damaged(f"{what} cannot be loaded", f"it is no MessagePack ({type(error).__name__})", "") from None


def encode_metrics(m: Metrics) -> bytes:
    return msgspec.msgpack.encode([getattr(m, f) for f in m.__slots__])


def pack_call(
    arguments: Mapping[str, Any],
    registry: Registry,
    base: Packed | None,
    warm: tuple[Packed, ...],
    path: str,
    *,
    flat: bool = False,
) -> Packed:
    """The arguments of a call: what the checkpoint that the call stands on has is not stored again."""
    return chunks.pack(arguments, registry, base=base, warm=warm, path=path, flat=flat)


def pack_values(value: Mapping[str, Any], registry: Registry, base: Packed | None, path: str, *, flat: bool = False) -> Packed:
    """Arguments or a result, in the same objects as the state that ``base`` stands for."""
    # Not opened: a model's reply is then the same object as the message that it becomes.
    return chunks.pack(value, registry, base=base, path=path, opened=False, flat=flat)


def unpack_values(data: bytes, refs: bytes, objects: Mapping[bytes, Obj], registry: Registry | None) -> dict[str, Any]:
    """With a registry: the values. Without: plain data, for people, with no class made."""
    if registry is None:
        return cast(dict[str, Any], values.to_json(masked(chunks.unpack_plain(data, refs, objects))))
    return chunks.unpack(data, refs, objects, registry)[0]


def unpack_result(data: bytes, refs: bytes, objects: Mapping[bytes, Obj], registry: Registry | None) -> Any:
    found = unpack_values(data, refs, objects, registry)
    if "result" not in found:
        raise Damaged("the result of a call cannot be loaded", "it is not among what was stored", "")
    return found["result"]


def call(task: str, row: CallRow, objects: Mapping[bytes, Obj] | None, registry: Registry | None) -> Call:
    """A row as a Call; without ``objects`` the bodies are left empty."""
    arguments: dict[str, Any] = {}
    result = None
    if objects is not None:
        arguments = unpack_values(row.args, row.args_refs, objects, registry)
        if row.result is not None:
            result = unpack_result(row.result, row.result_refs, objects, registry)
    policy = _unpacked(row.policy, "the policy of a call") if row.policy else {}
    return Call(
        task_id=task,
        no=row.no,
        tool=row.tool,
        arguments=arguments,
        call_id=row.call_id,
        idempotency_key=row.idempotency_key,
        effect=cast(Any, row.effect),
        has_verifier=isinstance(policy, dict) and bool(policy.get("verify")),
        status=cast(Any, row.status),
        attempts=row.attempts,
        fence=row.fence,
        step=row.step,
        started_at=from_us(row.started_at) if row.started_at else None,
        finished_at=from_us(row.finished_at) if row.finished_at is not None else None,
        result=result,
        error=_unpacked(row.error, "the error of a call") if row.error else None,
        model=values.decode_plain(row.model) if row.model else None,
        reason=row.reason,
    )


def pause(task: str, row: PauseRow, registry: Registry | None) -> Pause:
    def body(data: bytes | None) -> Any:
        if data is None:
            return None
        return values.to_json(masked(values.decode_plain(data))) if registry is None else values.decode(data, registry)

    return Pause(
        task_id=task,
        no=row.no,
        name=row.name,
        question=body(row.question),
        status=cast(Any, row.status),
        step=row.step,
        asked_at=from_us(row.asked_at) if row.asked_at else None,
        answered_at=from_us(row.answered_at) if row.answered_at is not None else None,
        answer=body(row.answer),
    )

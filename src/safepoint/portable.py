"""A task, or one checkpoint with its journal, as lines of strict JSON: what ``export`` writes and ``import_`` reads; pure.

One object a line, each with one key that says what it is:

``{"safepoint": {"format", "version", "what", "task", "seq", "counts"}}``
    The first. ``what`` is ``task`` or ``checkpoint``, ``seq`` the one that was exported.
``{"task": …}``, ``{"branch": …}``, ``{"checkpoint": …}``, ``{"call": …}``, ``{"pause": …}``, ``{"write": …}``
    Rows, in this order and by their numbers. Stored values are in the form of ``jsonform``, times ISO 8601 in UTC. A checkpoint has
    its ``state``, or, if that is less than half as long, a JSON ``patch`` that makes it of the state of the checkpoint before it in the file;
    ``digest`` is that of the whole state in any case.
``{"end": {"lines", "sha256"}}``
    The last: how many lines came before, and the digest of all of them. It shows cuts and slips; it is no proof against
    somebody who wants to deceive, and reads as such.

What would not be the same bytes when it is read again is written as bytes, under a key with ``_raw`` at its end.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from safepoint.codec import chunks, values
from safepoint.codec.chunks import Packed
from safepoint.codec.jsonform import from_json, to_json
from safepoint.codec.states import FORMAT as STATES
from safepoint.errors import Damaged, NewerFormat, SafepointError, StoreFull, UsageError
from safepoint.model import Obj, check_id
from safepoint.portable_rows import (
    BRANCH,
    CALL,
    CHECKPOINT,
    HEAD,
    NUMBERS,
    PAUSE,
    TASK,
    WRITE,
    fields_of,
    integer,
    one_of,
    record_of,
)
from safepoint.rows import BranchRow, CallRow, CheckpointRow, Head, Image, Numbers, PauseRow, TaskRow, WriteRow, replace
from safepoint.rules.diffing import apply, compare

__all__ = ["FORMAT", "LINE_MAX", "Content", "Packer", "flat_digest", "flat_of", "lines", "read"]

FORMAT: Final = 2
"""2 has writes, branches that stand at another one's checkpoint, and checkpoints of branches that were dropped. What has none of
these is written as 1, for older safepoints to read."""
LINE_MAX: Final = 256 * 1024 * 1024
"""Bytes of a line: the largest state that can be exported or imported is about this, in JSON."""
WHOLE_MAX: Final = 1024**3
"""Bytes of all states of a task together, for a store that keeps each of them whole: they are in memory before any is written, and
a small file can stand for any number of large ones."""
PARTS: Final = ("messages", "agent_state", "metadata", "step", "turns", "finished")
_ORDER: Final = ("task", "branch", "checkpoint", "call", "pause", "write")
_COUNTS: Final = {"branches": "branch", "checkpoints": "checkpoint", "calls": "call", "pauses": "pause", "writes": "write"}


# -- roots


def flat_of(root: bytes, refs: bytes, objects: Mapping[bytes, Obj]) -> tuple[dict[str, Any], bytes]:
    """The plain tree behind a root, and its encoding in one piece: the same on all stores, whatever their layout.

    Raises:
        Damaged
    """
    tree = chunks.unpack_plain(root, refs, objects)
    return tree, root if not refs else values.encode_tree(tree, depth=chunks.DEPTH)


def flat_digest(row: CheckpointRow, objects: Mapping[bytes, Obj]) -> bytes:
    """Digest of a checkpoint's state in one piece."""
    return chunks.root_digest(flat_of(row.root, row.refs, objects)[1], b"")


class Packer:
    """Roots for a store, and the objects that they reach. What is given in turn shares objects and is packed quickly."""

    def __init__(self, *, chunked: bool) -> None:
        self.chunked = chunked
        self.objects: dict[bytes, Obj] = {}
        self._base: Packed | None = None
        self._whole = 0

    def state(self, tree: dict[str, Any], flat: bytes) -> tuple[bytes, bytes, bytes]:
        """Root, refs and digest of a state. ``flat`` is its encoding in one piece.

        Raises:
            StoreFull: too much for a store that is not chunked.
        """
        if not self.chunked:
            self._whole += len(flat)
            if self._whole > WHOLE_MAX:
                raise StoreFull(
                    f"the states of the task take more than {WHOLE_MAX} bytes",
                    "the store keeps each of them whole",
                    "Take a store such as sqlite:///agent.db, or delete old checkpoints of it with cleanup first.",
                )
            return flat, b"", chunks.root_digest(flat, b"")
        self._base = self._packed(tree, self._base, opened=True)
        return self._base.data, self._base.refs, self._base.digest

    def values(self, tree: dict[str, Any], flat: bytes, *, opened: bool) -> tuple[bytes, bytes]:
        """Root and refs of a call's arguments (``opened``) or result."""
        if not self.chunked:
            return flat, b""
        packed = self._packed(tree, None, opened=opened)
        return packed.data, packed.refs

    def _packed(self, tree: dict[str, Any], base: Packed | None, *, opened: bool) -> Packed:
        packed = chunks.pack(tree, values._TREES, base=base, opened=opened)
        for obj in packed.new:
            self.objects.setdefault(obj.name, obj)
        return packed


# -- writing


def lines(image: Image, *, what: str, seq: int | None, version: str) -> Iterator[bytes]:
    """The file, line by line. The image's rows are known to be sound.

    Raises:
        UsageError: a state is larger than a line may be.
    """
    digest = hashlib.sha256()
    count = 0
    for record in _records(image, what, seq, version):
        line = _line(record)
        if len(line) > LINE_MAX:
            raise UsageError(
                f"a part of task {image.row.task!r} takes {len(line)} bytes",
                f"a line of an export may have {LINE_MAX}",
                "Move it with copy_to.",
            )
        digest.update(line)
        count += 1
        yield line
    yield _line({"end": {"lines": count, "sha256": digest.hexdigest()}})


def _line(record: Any) -> bytes:
    return json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(", ", ": ")).encode() + b"\n"


def _records(image: Image, what: str, seq: int | None, version: str) -> Iterator[dict[str, Any]]:
    counts = {
        "branches": len(image.branches), "checkpoints": len(image.checkpoints), "calls": len(image.calls), "pauses": len(image.pauses),
    }  # fmt: skip
    made = 2 if image.writes or _is_odd(image) else 1
    if made > 1:
        counts["writes"] = len(image.writes)
    head = {"format": made, "version": version, "what": what, "task": to_json(image.row.task)}
    yield {"safepoint": {**head, **({} if seq is None else {"seq": seq}), "counts": counts}}
    yield {"task": {**record_of(image.row, TASK), "fence": image.fence, "numbers": record_of(image.numbers, NUMBERS)}}
    for branch in image.branches:
        yield {"branch": {**record_of(branch, BRANCH), "head": record_of(branch.head, HEAD)}}
    objects = {obj.name: obj for obj in image.objects}
    before: Any = None
    texts: dict[int, list[bytes]] = {}
    for row in image.checkpoints:
        tree, flat = flat_of(row.root, row.refs, objects)
        state = to_json(tree)
        record = {**record_of(row, CHECKPOINT), "digest": chunks.root_digest(flat, b"").hex()}
        if before is not None:
            patch = compare("", "", before, state, texts).patch()
            if len(_line(patch)) < len(flat) // 2:
                record["patch"] = patch
        if "patch" not in record:
            record["state"] = state
        before = state
        yield {"checkpoint": record}
    for call in image.calls:
        record = record_of(call, CALL)
        record["arguments"] = to_json(flat_of(call.args, call.args_refs, objects)[0])
        if call.result is not None:
            record["result"] = to_json(flat_of(call.result, call.result_refs, objects)[0])
        yield {"call": record}
    for pause in image.pauses:
        yield {"pause": record_of(pause, PAUSE)}
    for write in image.writes:
        record = record_of(write, WRITE)
        if write.data:
            record["data"] = to_json(flat_of(write.data, write.refs, objects)[0])
        yield {"write": record}


# -- reading


@dataclass(frozen=True, slots=True, repr=False)
class Content:
    """What a file holds, packed for a store; the rows are not sealed."""

    what: str
    seq: int | None
    version: str
    image: Image
    flats: Mapping[int, bytes] = field(default_factory=dict)
    """By ``seq``: digest of the whole state in one piece."""


def read(given: Iterable[bytes], *, chunked: bool, task: str | None = None) -> Content:
    """Read a whole file. Nothing of it is to be used before this has returned.

    Args:
        given: Its lines, each with its line end, none longer than LINE_MAX.
        chunked: Whether the store that it is packed for is.
        task: The name that the task gets, instead of its own.

    Raises:
        Damaged: it is cut, edited, or no export at all. NewerFormat: of a newer safepoint. StoreFull: its states are too much for
            a store that is not chunked.
    """
    return _Reading(chunked, task).all(given)


class _Reading:
    def __init__(self, chunked: bool, task: str | None) -> None:
        self.packer = Packer(chunked=chunked)
        self.task = task
        self.head: dict[str, Any] = {}
        self.numbers = Numbers()
        self.fence = 0
        self.state: Any = None
        self.read: dict[int, tuple[Any, Any]] = {}
        self.rows: dict[str, list[Any]] = {kind: [] for kind in _ORDER}
        self.flats: dict[int, bytes] = {}
        self.step = 0

    def all(self, given: Iterable[bytes]) -> Content:
        digest = hashlib.sha256()
        count = 0
        ended = False
        for line in given:
            if ended:
                raise _bad(count + 1, "it goes on after its end")
            kind, record = self.parsed(line, count + 1)
            if kind == "end":
                if record != {"lines": count, "sha256": digest.hexdigest()}:
                    raise _bad(count + 1, "it is not what was written: its lines or their digest differ")
                ended = True
                continue
            digest.update(line)
            count += 1
            try:
                self.take(kind, record, count)
            except (NewerFormat, StoreFull):
                raise
            except SafepointError as error:
                raise _bad(count, f"{error.what}: {error.why}" if error.why else error.what) from None
            except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError) as error:
                raise _bad(count, f"its {kind} is not as it is written ({type(error).__name__})") from None
        if not ended:
            raise _bad(count, "it is cut: its last line is missing")
        return self.content(count)

    def parsed(self, line: bytes, number: int) -> tuple[str, Any]:
        try:
            if line[-1:] != b"\n":
                raise ValueError
            data = json.loads(line.decode("utf-8"), parse_constant=_refuse)
            ((kind, record),) = data.items()
        except RecursionError:
            raise _bad(number, "it nests too deep") from None
        except (ValueError, TypeError, AttributeError):
            raise _bad(number, "it is no export of safepoint" if number == 1 else "it is cut or was changed") from None
        return str(kind), record

    def take(self, kind: str, record: Any, number: int) -> None:
        if number == 1:
            self.begin(kind, record)
            return
        step = _ORDER.index(kind)
        if step < self.step or (kind == "task") != (number == 2):
            raise ValueError
        self.step = step
        self.rows[kind].append(getattr(self, f"_{kind}")(record))

    def begin(self, kind: str, record: Any) -> None:
        if kind != "safepoint" or type(record) is not dict:
            raise Damaged("it is no export of safepoint", "its first line does not say so")
        made = record.get("format")
        if type(made) is int and made > FORMAT:
            raise NewerFormat(
                f"the file has format {made}", f"this safepoint reads up to format {FORMAT}", "Upgrade safepoint.", format=made
            )
        if (
            made not in range(1, FORMAT + 1)
            or type(made) is not int
            or not record.keys() <= {"format", "version", "what", "task", "seq", "counts"}
        ):
            raise ValueError
        counts = record["counts"]
        if counts.keys() != {name for name in _COUNTS if name != "writes" or made > 1}:
            raise ValueError
        one_of(record["what"], ("task", "checkpoint"))
        self.head = {**record, "task": check_id(record["task"])}
        if record["what"] == "checkpoint":
            integer(1)(record["seq"])

    def _task(self, record: Any) -> TaskRow:
        self.numbers = Numbers(**fields_of(record["numbers"], NUMBERS))
        self.fence = integer(0)(record.get("fence", 0))
        return TaskRow(task=self.task or self.head["task"], **fields_of(record, TASK, "fence", "numbers"))

    def _branch(self, record: Any) -> BranchRow:
        return BranchRow(head=Head(**fields_of(record["head"], HEAD)), **fields_of(record, BRANCH, "head"))

    def _checkpoint(self, record: Any) -> CheckpointRow:
        columns = fields_of(record, CHECKPOINT, "digest", "state", "patch")
        if columns["format"] > STATES:
            raise NewerFormat(
                f"checkpoint {columns['seq']} has format {columns['format']}",
                f"this safepoint reads up to format {STATES}",
                "Upgrade safepoint.",
            )
        if "patch" in record:
            if self.state is None or "state" in record:
                raise ValueError
            self.state = apply(self.state, record["patch"])
        else:
            self.state = record["state"]
        tree = self.tree(self.state)
        if type(tree) is not dict or not tree.keys() >= set(PARTS):
            raise Damaged("a state is not whole", "it has not all of its parts")
        flat = values.encode_tree(tree, depth=chunks.DEPTH)
        whole = chunks.root_digest(flat, b"")
        if whole.hex() != record["digest"]:
            raise Damaged(f"checkpoint {columns['seq']} does not match its digest", "")
        self.flats[columns["seq"]] = whole
        root, refs, digest = self.packer.state(tree, flat)
        return CheckpointRow(root=root, refs=refs, digest=digest, **columns)

    def tree(self, state: Any) -> Any:
        """The state as a plain tree. A message that stood in the one before is not read again: a patch leaves it the same object."""
        if type(state) is not dict or type(state.get("messages")) is not list or any(key[:1] == "$" for key in state):
            return from_json(state)
        before, self.read = self.read, {}
        for item in state["messages"]:
            known = before.get(id(item)) or self.read.get(id(item))
            self.read[id(item)] = known if known is not None and known[0] is item else (item, from_json(item))
        messages = [self.read[id(item)][1] for item in state["messages"]]
        return {key: messages if key == "messages" else from_json(part) for key, part in state.items()}

    def _call(self, record: Any) -> CallRow:
        columns = fields_of(record, CALL, "arguments", "result")
        args, args_refs = self.root(record["arguments"], opened=True)
        result, result_refs = self.root(record["result"], opened=False) if "result" in record else (None, b"")
        return CallRow(args=args, args_refs=args_refs, result=result, result_refs=result_refs, **columns)

    def _write(self, record: Any) -> WriteRow:
        if self.head["format"] < 2:
            raise ValueError
        data, refs = self.root(record["data"], opened=True) if "data" in record else (b"", b"")
        return WriteRow(data=data, refs=refs, **fields_of(record, WRITE, "data"))

    def root(self, data: Any, *, opened: bool) -> tuple[bytes, bytes]:
        tree = from_json(data)
        if type(tree) is not dict or (not opened and tree.keys() != {"result"}):
            raise ValueError
        return self.packer.values(tree, values.encode_tree(tree, depth=chunks.DEPTH), opened=opened)

    def _pause(self, record: Any) -> PauseRow:
        return PauseRow(**fields_of(record, PAUSE))

    def content(self, count: int) -> Content:
        rows = self.rows
        found = {name: len(rows[kind]) for name, kind in _COUNTS.items() if name in self.head["counts"]}
        if not rows["task"] or self.head["counts"] != found:
            raise _bad(count, "it does not hold as much as its first line says")
        image = Image(
            row=replace(rows["task"][0], checkpoints=len(rows["checkpoint"])),
            numbers=self.numbers,
            branches=tuple(rows["branch"]),
            checkpoints=tuple(rows["checkpoint"]),
            calls=tuple(rows["call"]),
            pauses=tuple(rows["pause"]),
            writes=tuple(rows["write"]),
            objects=tuple(self.packer.objects.values()),
            fence=self.fence,
        )
        why = misfit(image) or (self.head["format"] < 2 and _is_odd(image) and "a branch and its checkpoints do not fit")
        if why:
            raise _bad(count, why)
        if self.head["what"] == "checkpoint" and [row.seq for row in image.checkpoints] != [self.head["seq"]]:
            raise _bad(count, "it holds not the one checkpoint that its first line names")
        return Content(self.head["what"], self.head.get("seq"), str(self.head.get("version", ""))[:40], image, self.flats)


def misfit(image: Image) -> str:
    """What in an image does not fit together; empty if all does."""
    seqs = [row.seq for row in image.checkpoints]
    heads = {Head(row.seq, row.id): row for row in image.checkpoints}
    if seqs != sorted(set(seqs)) or len({(row.space, row.id) for row in image.checkpoints}) != len(seqs):
        return "its checkpoints are not in order, or one comes twice"
    for rows in (image.calls, image.pauses):
        if [row.no for row in rows] != sorted({row.no for row in rows}):
            return "its calls or pauses are not in order, or one comes twice"
    if len({(b.space, b.name) for b in image.branches}) != len(image.branches):
        return "a branch comes twice"
    for branch in image.branches:
        head = heads.get(branch.head)
        if head is None or head.space != branch.space or head.kind == "failure":
            return "a branch has no head"
    known = {(b.space, b.name) for b in image.branches}
    own = [b for b in image.branches if b.space == ""]
    if own and ("", image.row.branch) not in known:
        return "the current branch is missing"
    if any(row.parent_seq is not None and row.parent_seq >= row.seq for row in image.checkpoints):
        return "a checkpoint is older than its parent"
    keys = [row.key for row in image.writes]
    if keys != sorted(set(keys)):
        return "its writes are not in order, or one comes twice"
    return ""


def _is_odd(image: Image) -> bool:
    """Whether a branch stands at another one's checkpoint, or there are checkpoints of a branch that is not there."""
    made_on = {(row.space, row.seq): row.branch for row in image.checkpoints}
    known = {(b.space, b.name) for b in image.branches}
    return any(made_on.get((b.space, b.head.seq)) != b.name for b in image.branches) or any(
        (row.space, row.branch) not in known for row in image.checkpoints
    )


def _refuse(constant: str) -> Any:
    raise ValueError(constant)


def _bad(line: int, why: str) -> Damaged:
    return Damaged(
        "the file cannot be imported", f"{why} (line {line})", "Export it again, or take another copy of the file.", line=line
    )

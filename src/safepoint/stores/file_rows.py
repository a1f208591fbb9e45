"""Rows as JSON and back, for people who read and for git; what comes back is byte for byte what was given.

Encoded values are written as the JSON form of their plain tree (``codec.jsonform``), where encoding that again gives the very same
bytes, and in base64 where not. Digests are hex, times ISO where that loses nothing, and fields that have their default are left out.
"""

from __future__ import annotations

import base64
import hashlib
from datetime import UTC, datetime
from functools import cache
from typing import Any, Final, TypeVar

import msgspec

from safepoint.codec import values
from safepoint.codec.chunks import DEPTH
from safepoint.codec.jsonform import from_json, to_json
from safepoint.errors import Damaged, SafepointError
from safepoint.model import from_us, to_us
from safepoint.rows import CallRow, CheckpointRow, PauseRow, TaskRow, WriteRow

__all__ = [
    "LAYOUT",
    "changed",
    "changes",
    "checksum",
    "document",
    "from_document",
    "pack",
    "read_row",
    "root_of",
    "row_as_json",
    "task_as_json",
    "task_from_json",
    "unpack",
]

LAYOUT: Final = 1
"""Of files and journal lines. A newer one is refused and left alone."""

R = TypeVar("R", CheckpointRow, CallRow, PauseRow, WriteRow, TaskRow)

_HEX = frozenset({"seal", "digest", "ident", "op_key"})
_VALUES = frozenset(
    {"metadata", "metrics", "args", "result", "question", "answer", "error", "policy", "model", "input", "raised", "data"}
)
_TIMES = frozenset({"created_at", "updated_at", "started_at", "finished_at", "asked_at", "answered_at"})
_ELSEWHERE = frozenset({"root", "refs", "args_refs", "result_refs"})  # in a document; or empty, on a store that is not chunked
_NAMES = {"parent_seq": "parent", "base_seq": "base", "checkpoint": "against"}
_BACK = {name: field for field, name in _NAMES.items()}

_encode = msgspec.json.Encoder().encode
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def checksum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def unpack(data: bytes) -> Any:
    """Encoded bytes as JSON data."""
    try:
        tree = values.decode_plain(data, depth=DEPTH)
        # None is for what is not there.
        if tree is not None and values.encode_tree(tree, depth=DEPTH) == data:
            return to_json(tree)
    except (SafepointError, RecursionError):
        pass
    return {"$base64": base64.b64encode(data).decode()}


def pack(data: Any) -> bytes:
    """The bytes that ``unpack`` was given. Raises Damaged if this is nothing that it makes."""
    if type(data) is dict and len(data) == 1 and "$base64" in data:
        try:
            return base64.b64decode(data["$base64"], validate=True)
        except (ValueError, TypeError) as error:
            raise Damaged("a value cannot be read", "it is no base64") from error
    try:
        return values.encode_tree(from_json(data), depth=DEPTH)
    except SafepointError as error:
        raise Damaged("a value cannot be read", error.why or error.what) from error


def _time(us: int) -> str | int:
    try:
        moment = from_us(us)
        return moment.isoformat() if to_us(moment) == us else us
    except (OverflowError, ValueError, OSError):
        return us


def _us(value: Any) -> int:
    return to_us(datetime.fromisoformat(value)) if type(value) is str else int(value)


def _field(name: str, value: Any) -> Any:
    if value is None:
        return None
    if name in _HEX:
        return value.hex()
    if name in _VALUES:
        return unpack(value)
    return _time(value) if name in _TIMES else value


def _value(name: str, data: Any) -> Any:
    if data is None:
        return None
    if name in _HEX:
        return bytes.fromhex(data)
    if name in _VALUES:
        return pack(data)
    return _us(data) if name in _TIMES else data


@cache
def _columns(cls: type) -> tuple[tuple[str, Any], ...]:
    # msgspec takes the annotations of a class apart at each call: for 20 rows that took as long as a flush.
    return tuple((field.name, field.default) for field in msgspec.structs.fields(cls))


def row_as_json(
    row: CheckpointRow | CallRow | PauseRow | WriteRow | TaskRow, *, without: frozenset[str] = frozenset()
) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, default in _columns(type(row)):
        if name in _ELSEWHERE or name in without:
            continue
        value = getattr(row, name)
        if value == default and type(value) is type(default):
            continue
        out[_NAMES.get(name, name)] = _field(name, value)
    return out


def read_row(cls: type[R], data: Any) -> R:
    """Raises Damaged for what is no such row."""
    try:
        found = {name: _value(name, value) for key, value in data.items() for name in (_BACK.get(key, key),)}
        if not found.keys() <= set(cls.__struct_fields__):
            raise ValueError
        # Checks the types of all fields.
        return msgspec.convert(found, cls, strict=True, builtin_types=(bytes,))
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise Damaged(f"a {cls.__name__} cannot be read", type(error).__name__) from error


_COUNTED = frozenset({"task", "head", "step", "in_doubt", "open_pauses", "checkpoints"})


def task_as_json(row: TaskRow) -> dict[str, Any]:
    """What is stored of a task's row; the rest is counted when it is asked for."""
    return row_as_json(row, without=_COUNTED)


def changes(old: TaskRow, new: TaskRow) -> dict[str, Any]:
    """The stored fields of a task's row that a commit has changed."""
    return {
        name: _field(name, value)
        for name in TaskRow.__struct_fields__
        if name not in _COUNTED and (value := getattr(new, name)) != getattr(old, name)
    }


def changed(row: TaskRow, data: dict[str, Any]) -> TaskRow:
    given = {name: _value(name, value) for name, value in data.items() if name not in _COUNTED}
    whole = {name: getattr(row, name) for name in TaskRow.__struct_fields__}
    return msgspec.convert(whole | given, TaskRow, strict=True, builtin_types=(bytes,))


def task_from_json(task: str, data: Any) -> TaskRow:
    return read_row(TaskRow, {**data, "task": task})


# -- documents

_PINNED = frozenset({"pinned"})


def header(row: CheckpointRow) -> dict[str, Any]:
    """A checkpoint's row without its state and its mark, as it stands in its document and in the journal."""
    return row_as_json(row, without=_PINNED)


def document(task: str, row: CheckpointRow, state: Any) -> bytes:
    """The whole file of a checkpoint, with its state as ``unpack`` made it of its root."""
    head = header(row)
    seal = head.pop("seal", "")
    first = {"safepoint": LAYOUT, "task": task, "seq": head.pop("seq", 0), "id": head.pop("id")}
    # Shown where they have their defaults, too: this is for people.
    for name, default in (
        ("space", None),
        ("branch", row.branch),
        ("parent", None),
        ("step", 0),
        ("kind", ""),
        ("label", None),
    ):
        value = head.pop(name, default)
        if name != "space" or value is not None:
            first[name] = value
    first |= head
    first["seal"] = seal
    first["state_sum"] = checksum(row.root)
    first["state"] = state
    return msgspec.json.format(_encode(first), indent=2) + b"\n"


def parse(data: bytes) -> dict[str, Any]:
    """A document as JSON data. Raises Damaged, or NewerFormat by way of ``layout``."""
    try:
        found = msgspec.json.decode(data.removeprefix(b"\xef\xbb\xbf"))
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise Damaged("it is no JSON", str(error)) from error
    except RecursionError:
        raise Damaged("it is no JSON of ours", "it nests too deep") from None
    if type(found) is not dict or type(found.get("safepoint")) is not int:
        raise Damaged("it is no checkpoint", "it has no number of a format")
    return found


def root_of(found: dict[str, Any]) -> bytes:
    """The state in a parsed document, as it stands there now."""
    if "state" not in found:
        raise Damaged("it has no state", "")
    return pack(found["state"])


def from_document(task: str, found: dict[str, Any]) -> CheckpointRow:
    """The row of a parsed document whose state is what it was written with.

    Raises:
        Damaged: it was changed, or is another task's.
    """
    found = dict(found)
    del found["safepoint"]
    if found.pop("task", None) != task:
        raise Damaged("it is of another task", "")
    root = root_of(found)
    del found["state"]
    if found.pop("state_sum", None) != checksum(root):
        raise Damaged("its state has been changed", "it is not what was saved")
    return msgspec.structs.replace(read_row(CheckpointRow, found), root=root)

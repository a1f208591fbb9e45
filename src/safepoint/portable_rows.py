"""Rows as the records of an export, and back: a column is written and read by its kind; pure."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from safepoint.codec import values
from safepoint.codec.jsonform import from_json, to_json
from safepoint.errors import Damaged, SafepointError
from safepoint.model import CALL_STATUSES, KINDS, STATUSES, Metrics, check_id
from safepoint.rules.journal import UNASKED
from safepoint.rules.policy import REPLAN, Policy

__all__ = [
    "BRANCH", "CALL", "CHECKPOINT", "HEAD", "NUMBERS", "PAUSE", "TASK", "WRITE", "fields_of", "integer", "one_of", "record_of",
]  # fmt: skip

_NUMBER: Final = 2**31
"""Below this lie the numbers of rows: some stores have no more room for them."""
_INT: Final = 2**53

CHECKPOINT: Final = {
    "seq": "number", "id": "id", "space": "space", "branch": "id", "parent_seq": "number?", "step": "count", "kind": KINDS,
    "label": "text?", "created_at": "time", "format": "count", "schema": "count", "size": "count", "pinned": "bool",
    "metadata": "body", "metrics": "body",
}  # fmt: skip
CALL: Final = {
    "no": "number", "line": "last", "step": "count", "scope": "scope", "tool": "text", "effect": ("read", "idempotent", "transactional", "write"),
    "status": CALL_STATUSES, "attempts": "count", "fence": "count", "base_seq": "count", "call_id": "text?", "idempotency_key": "text",
    "ident": "hex", "op_key": "hex?", "started_at": "time", "finished_at": "time?", "asked": "int", "began": "int", "ended": "int?",
    "error": "body?", "policy": "body", "model": "body?", "not_done": "bool", "superseded": "bool", "reason": "text", "version": "number",
}  # fmt: skip
PAUSE: Final = {
    "no": "number", "line": "last", "step": "count", "space": "space", "name": "text", "occurrence": "count", "call_no": "number?",
    "base_seq": "count", "question": "body!", "answer": "body?", "status": ("open", "answered", "used"), "asked_at": "time",
    "answered_at": "time?", "version": "number",
}  # fmt: skip
TASK: Final = {
    "status": STATUSES, "branch": "id", "agent": "text", "input": "body", "attempts": "count", "reason": "text", "parent": "id?",
    "raised": "body", "created_at": "time", "updated_at": "time",
}  # fmt: skip
NUMBERS: Final = {"seq": "last", "call": "last", "pause": "last", "line": "last", "position": "count"}
BRANCH: Final = {"space": "space", "name": "id", "line": "last", "forked_from": "number?"}
HEAD: Final = {"seq": "number", "id": "id"}
WRITE: Final = {"space": "space", "checkpoint": "text", "writer": "text", "idx": "int", "path": "text"}

Columns = Mapping[str, Any]


def record_of(row: Any, columns: Columns) -> dict[str, Any]:
    record: dict[str, Any] = {}
    for name, kind in columns.items():
        value = getattr(row, name)
        if type(kind) is str and kind.startswith("body"):
            _put(record, name, value, optional=kind == "body?")
        elif value is None:
            pass
        elif type(value) is bytes:
            record[name] = value.hex()
        elif type(kind) is str and kind.startswith("time"):
            record[name] = _iso(value)
        else:
            record[name] = to_json(value)
    return record


def _put(record: dict[str, Any], name: str, data: bytes | None, *, optional: bool) -> None:
    """Stored bytes as what they mean, or as they are where that would not lead back to them."""
    if data is None or (not data and not optional):
        return
    try:
        tree = values.decode_plain(data)
        if values.encode_tree(tree) == data:
            record[name] = to_json(tree)
            return
    except SafepointError:
        pass
    record[f"{name}_raw"] = base64.b64encode(data).decode("ascii")


_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def _iso(us: int) -> str:
    try:
        return (_EPOCH + timedelta(microseconds=us)).isoformat(timespec="microseconds").replace("+00:00", "Z")
    except OverflowError:
        raise Damaged("a row has a time that is none", "", "See `safepoint verify`.") from None


def _us(text: Any) -> Any:
    at = datetime.fromisoformat(text)
    if at.utcoffset() != timedelta(0):
        raise ValueError
    return (at - _EPOCH) // timedelta(microseconds=1)


def fields_of(record: Any, columns: Columns, *more: str) -> dict[str, Any]:
    """The columns of a record. ValueError and its like for whatever is not as it is written."""
    known = {
        *columns,
        *more,
        *(f"{name}_raw" for name, kind in columns.items() if type(kind) is str and kind.startswith("body")),
    }
    if type(record) is not dict or not record.keys() <= known:
        raise ValueError("a part that is not known")
    return {name: _field(record, name, kind) for name, kind in columns.items()}


def _field(record: dict[str, Any], name: str, kind: Any) -> Any:
    if type(kind) is tuple:
        return one_of(record[name], kind)
    if kind.startswith("body"):
        if name in record:
            return _shaped(name, values.encode_tree(from_json(record[name])))
        if f"{name}_raw" in record:
            return _shaped(name, base64.b64decode(record[f"{name}_raw"], validate=True))
        if kind == "body!":
            raise KeyError(name)
        return None if kind == "body?" else b""
    if kind.endswith("?") and name not in record:
        return None
    return _READ[kind.rstrip("?")](record[name])


def _shaped(name: str, data: bytes) -> bytes:
    """Bytes that the library itself reads later, without expecting anything odd in them."""
    check = _SHAPES.get(name)
    if check is not None and data and not check(values.decode_plain(data)):
        raise ValueError(name)
    return data


def _is_metrics(tree: Any) -> bool:
    kinds = [type(getattr(Metrics(), name)) for name in Metrics.__slots__]
    return (
        type(tree) is list and len(tree) <= len(kinds) and all(type(v) in (k, int) for v, k in zip(tree, kinds, strict=False))
    )


def _is_policy(tree: Any) -> bool:
    if type(tree) is not dict:
        return False
    default = Policy()
    for name, value in tree.items():
        known = getattr(default, name, value)
        if name == "replan":
            fits = value in REPLAN
        elif name == "key_ttl":
            fits = type(value) in (int, float, type(None))
        else:
            fits = type(value) is type(known) or (type(value) is int and type(known) is float)
        if not fits:
            return False
    return True


_SHAPES: Final[dict[str, Callable[[Any], bool]]] = {
    "metrics": _is_metrics,
    "policy": _is_policy,
    "metadata": lambda tree: type(tree) is dict,
    "error": lambda tree: type(tree) is dict and all(type(v) in (str, int, bool, type(None)) for v in tree.values()),
    "model": lambda tree: type(tree) is dict,
}


def one_of(value: Any, known: tuple[str, ...]) -> str:
    if value not in known:
        raise ValueError("a word that is not known")
    return str(value)


def integer(low: int, end: int = _INT) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if type(value) is not int or not low <= value < end:
            raise ValueError("a number out of range")
        return value

    return read


def _str(value: Any) -> str:
    text = from_json(value)
    if type(text) is not str:
        raise ValueError("no text")
    text.encode()  # not every store takes what is no Unicode text
    return text


def _bool(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError("neither true nor false")
    return value


_READ: Final[dict[str, Callable[[Any], Any]]] = {
    "int": integer(-_INT),
    "count": integer(0),
    "scope": lambda value: value if value == UNASKED else integer(0)(value),
    "number": integer(1, _NUMBER),
    "last": integer(0, _NUMBER),
    "text": _str,
    "bool": _bool,
    "id": check_id,
    "space": lambda value: value if value == "" else check_id(value),
    "hex": bytes.fromhex,
    "time": lambda value: integer(-(2**63), 2**63)(_us(value)),
}

"""Rows of the tables as the rows that the library speaks in, and parameters in the form that costs the server least.

PostgreSQL's text cannot hold the character NUL, which names of tools, labels and reasons may have: it is written as two others.
Ids cannot have it, and are written as they are.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import psycopg
from psycopg.adapt import Dumper
from psycopg.pq import Format

from safepoint.errors import Damaged
from safepoint.rows import BranchRow, CallRow, CheckpointRow, Head, PauseRow, TaskRow, WriteRow, all_fit, classes, fitting, torn

__all__ = [
    "CALL",
    "CHECKPOINT",
    "COLUMNS",
    "HEADER",
    "IDS",
    "PAUSE",
    "WRITE",
    "Array",
    "all_plain",
    "blobs",
    "branch",
    "call",
    "checkpoint",
    "decoded",
    "encoded",
    "header",
    "ints",
    "names",
    "pause",
    "plain",
    "task",
    "texts",
    "values",
    "write",
]

CHECKPOINT = (
    "seq", "id", "space", "branch", "parent_seq", "step", "kind", "label", "created_at", "format", "schema", "size", "pinned",
    "digest", "seal", "metadata", "metrics", "refs", "root",
)  # fmt: skip
HEADER = CHECKPOINT[:-2]
CALL = (
    "no", "line", "step", "scope", "ident", "tool", "effect", "call_id", "idempotency_key", "op_key", "status", "attempts",
    "fence", "base_seq", "started_at", "finished_at", "asked", "began", "ended", "not_done", "superseded", "reason", "version", "seal",
    "policy", "args_refs", "result_refs", "error", "model", "args", "result",
)  # fmt: skip
PAUSE = (
    "no", "line", "step", "space", "name", "occurrence", "call_no", "base_seq", "status", "asked_at", "answered_at", "version",
    "seal", "question", "answer",
)  # fmt: skip
WRITE = ("space", "checkpoint", "writer", "idx", "path", "seal", "refs", "data")
COLUMNS = {
    name: ", ".join([f"c.{column}" for column in columns])
    for name, columns in {"checkpoint": CHECKPOINT, "header": HEADER, "call": CALL, "pause": PAUSE, "write": WRITE}.items()
}
"""What stands for these in the .sql files; the table is named c there."""

_getters: dict[tuple[str, ...], Any] = {names: attrgetter(*names) for names in (CHECKPOINT, CALL, PAUSE, WRITE)}

Row = TypeVar("Row", CheckpointRow, CallRow, PauseRow, WriteRow)
Plain = TypeVar("Plain", bound=tuple[Any, ...])


# -- text


def encoded(text: str) -> str:
    """The text without NUL; ``decoded`` gives it back. Keeps the order of code points."""
    if "\0" in text or "\1" in text:
        return text.replace("\1", "\1\2").replace("\0", "\1\1")
    return text


def decoded(text: str) -> str:
    return text.replace("\1\1", "\0").replace("\1\2", "\1") if "\1" in text else text


# -- parameters


class Array:
    """A PostgreSQL array, ready to be sent: psycopg would look at each of its elements."""

    __slots__ = ("data", "oid")

    def __init__(self, oid: int, data: bytes) -> None:
        self.oid = oid
        self.data = data


_HEAD = struct.Struct("!iiIii")
_LEN = struct.Struct("!i")
_INT = struct.Struct("!iq")
_NULL = _LEN.pack(-1)
_EMPTY = struct.Struct("!iiI")
_BYTEA, _TEXT, _INT8 = 17, 25, 20
_ARRAY_OF = {_BYTEA: 1001, _TEXT: 1009, _INT8: 1016}


def _array(element: int, parts: list[bytes], count: int) -> Array:
    if not count:
        return Array(_ARRAY_OF[element], _EMPTY.pack(0, 0, element))
    return Array(_ARRAY_OF[element], _HEAD.pack(1, 1, element, count, 1) + b"".join(parts))


def ints(values: Sequence[int | None]) -> Array:
    """A bigint[]; truth values become 0 and 1."""
    pack = _INT.pack
    return _array(_INT8, [_NULL if v is None else pack(8, v) for v in values], len(values))


def blobs(values: Sequence[bytes | None]) -> Array:
    """A bytea[]."""
    pack = _LEN.pack
    parts: list[bytes] = []
    add = parts.append
    for value in values:
        if value is None:
            add(_NULL)
        else:
            add(pack(len(value)))
            add(value)
    return _array(_BYTEA, parts, len(values))


def texts(values: Sequence[str | None]) -> Array:
    """A text[], of texts without NUL."""
    pack = _LEN.pack
    parts: list[bytes] = []
    add = parts.append
    for value in values:
        if value is None:
            add(_NULL)
        else:
            raw = value.encode()
            add(pack(len(raw)))
            add(raw)
    return _array(_TEXT, parts, len(values))


class _BytesArrays(Dumper):
    format = Format.BINARY

    def get_key(self, obj: Array, format: Any) -> Any:
        return (Array, obj.oid)

    def upgrade(self, obj: Array, format: Any) -> Dumper:
        dumper = type(self)(type(obj), None)
        dumper.oid = obj.oid
        return dumper

    def dump(self, obj: Array) -> bytes:
        return obj.data


psycopg.adapters.register_dumper(Array, _BytesArrays)


IDS = frozenset({"id", "space", "branch", "checkpoint"})
"""Columns of a row that hold ids, as they are."""


def values(row: Any, names: tuple[str, ...]) -> list[Any]:
    """The values of a row, as the columns of these names take them."""
    return [
        encoded(v) if v.__class__ is str and name not in IDS else v for name, v in zip(names, _getters[names](row), strict=True)
    ]


# -- rows that come back


def _maker(cls: type[Row], names: tuple[str, ...], key: int = 1) -> Callable[[tuple[Any, ...]], Row]:
    """What makes a row of its columns. One whose values are of other classes becomes one whose seal is broken, if at least
    its key, the first ``key`` columns, can be told."""
    fits, known = fitting(cls, names), fitting(cls, names[:key])
    coded = [i for i, allowed in enumerate(classes(cls, names)) if str in allowed and names[i] not in IDS]

    def make(found: tuple[Any, ...]) -> Row:
        if not fits(found):
            if not known(found[:key]):
                raise _damaged(cls.__name__)
            return torn(cls, names, found)
        given = dict(zip(names, found, strict=True))
        for i in coded:
            if (text := found[i]) is not None and "\1" in text:
                given[names[i]] = decoded(text)
        return cls(**given)

    return make


checkpoint = _maker(CheckpointRow, CHECKPOINT)
header = _maker(CheckpointRow, HEADER)
call = _maker(CallRow, CALL)
pause = _maker(PauseRow, PAUSE)
write = _maker(WriteRow, WRITE, 4)


def plain(cls: type[Plain], found: tuple[Any, ...]) -> Plain:
    """A NamedTuple of columns that no seal covers. Damaged if one of them is of another class."""
    if not fitting(cls, cls._fields)(found):  # type: ignore[attr-defined]
        raise _damaged(cls.__name__.strip("_"))
    return tuple.__new__(cls, found)


def all_plain(cls: type[Plain], rows: list[Any]) -> list[Plain]:
    """As ``plain``, of many."""
    if not all_fit(cls, cls._fields, rows):  # type: ignore[attr-defined]
        raise _damaged(cls.__name__.strip("_"))
    return [tuple.__new__(cls, row) for row in rows]


def _damaged(what: str) -> Damaged:
    return Damaged(
        f"a row of the store ({what}) is damaged",
        "its values are of other types",
        "See what is left with safepoint verify; restore the store from a backup, or mend it with safepoint repair.",
    )


class Branch(NamedTuple):
    space: str
    name: str
    head_seq: int
    head_id: str
    line: int
    forked_from: int | None


def branch(found: tuple[Any, ...]) -> BranchRow:
    """Damaged if a value is of another class: no seal covers it."""
    space, name, seq, id, line, forked_from = plain(Branch, found)
    return BranchRow(space, name, Head(seq, id), line, forked_from)


class _Task(NamedTuple):
    task: str
    status: str
    branch: str
    head_seq: int | None
    head_id: str | None
    step: int
    agent: str
    input: bytes
    attempts: int
    reason: str
    parent: str | None
    raised: bytes
    created_at: int
    updated_at: int
    in_doubt: int
    open_pauses: int
    checkpoints: int


def task(found: tuple[Any, ...]) -> TaskRow:
    """Damaged if a value is of another class: no seal covers it."""
    row = plain(_Task, found)
    if (row.head_seq is None) != (row.head_id is None):
        raise _damaged("Branch")
    given = row._asdict()
    seq, id = given.pop("head_seq"), given.pop("head_id")
    for name in ("status", "agent", "reason"):
        given[name] = decoded(given[name])
    return TaskRow(head=None if seq is None else Head(seq, id), **given)


def names(refs: Iterable[bytes]) -> list[bytes]:
    """The names in these runs of 16-byte names, each once, in order of appearance."""
    found: dict[bytes, None] = {}
    for run in refs:
        if len(run) & 15:
            raise Damaged("a row's list of objects is cut off", f"it has {len(run)} bytes", "Load an earlier checkpoint.")
        found.update(dict.fromkeys([run[i : i + 16] for i in range(0, len(run), 16)]))
    return list(found)

"""Rows of the tables as the rows that the library speaks in, and the statements that name their columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from safepoint.errors import Damaged
from safepoint.rows import BranchRow, CallRow, CheckpointRow, Head, PauseRow, TaskRow, all_fit, fitting, replace, torn
from safepoint.stores.sqlite_db import sql

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

MOST = (1 << 32) - 1

_getters: dict[tuple[str, ...], Any] = {names: attrgetter(*names) for names in (CHECKPOINT, CALL, PAUSE)}

Row = TypeVar("Row", CheckpointRow, CallRow, PauseRow)
Plain = TypeVar("Plain", bound=tuple[Any, ...])

# A header's number is that of its key: the one in its column may be damaged, and a listing goes on from it. Then it has no seal.
_HEADER = ", ".join({"seq": f"k & {MOST}", "seal": f"iif(seq IS k & {MOST}, seal, x'')"}.get(name, name) for name in HEADER)


def _insert(table: str, names: tuple[str, ...]) -> str:
    return f"INSERT OR REPLACE INTO {table} (k, task, {', '.join(names)}) VALUES (?, ?{', ?' * len(names)})"


PUT_CHECKPOINT = _insert("sp_checkpoints", CHECKPOINT).replace(" OR REPLACE", "")
PUT_CALL = _insert("sp_calls", CALL)
PUT_PAUSE = _insert("sp_pauses", PAUSE)
# Under a number that was just given out. Where a damaged counter gave it, nothing is written over what has it.
NEW_CALL, NEW_PAUSE = (put.replace(" OR REPLACE", "") for put in (PUT_CALL, PUT_PAUSE))
GET_CHECKPOINT = f"SELECT {', '.join(CHECKPOINT)} FROM sp_checkpoints WHERE k = ?"
GET_CALL = f"SELECT {', '.join(CALL)} FROM sp_calls WHERE k = ?"
GET_PAUSE = f"SELECT {', '.join(PAUSE)} FROM sp_pauses WHERE k = ?"
GET_PAUSES = f"SELECT {', '.join(PAUSE)} FROM sp_pauses WHERE k BETWEEN ?1 << 32 AND ?1 << 32 | 4294967295 ORDER BY k"


@cache
def reads() -> dict[str, str]:
    found = {
        name: text.replace("{call}", ", ".join(CALL)).replace("{header}", _HEADER) for name, text in sql("sqlite_read").items()
    }
    rooted = {f"{name} with roots": text.replace(_HEADER, f"{_HEADER}, refs, root") for name, text in found.items()}
    return found | {name: text for name, text in rooted.items() if name.startswith("headers")}


def key(n: int, number: int) -> int:
    """The rowid of a checkpoint, call or pause. A number that cannot be in it names no row."""
    return n << 32 | number if 0 <= number < 1 << 32 else -1


def values(n: int, number: int, row: Any, names: tuple[str, ...]) -> tuple[Any, ...]:
    """A row as the PUT statements take it."""
    return (n << 32 | number, n, *_getters[names](row))


def _maker(cls: type[Row], names: tuple[str, ...], flags: tuple[str, ...]) -> Callable[[tuple[Any, ...]], Row]:
    """What makes a row of its columns. One whose values are of other classes becomes one whose seal is broken."""
    fits = fitting(cls, names)

    def make(found: tuple[Any, ...]) -> Row:
        if not fits(found):
            if type(found[0]) is not int:  # its number: all else goes by that
                raise _damaged(cls.__name__)
            return torn(cls, names, found)
        given = dict(zip(names, found, strict=True))
        for flag in flags:
            given[flag] = bool(given[flag])
        return cls(**given)

    return make


checkpoint = _maker(CheckpointRow, CHECKPOINT, ("pinned",))
header = _maker(CheckpointRow, HEADER, ("pinned",))
call = _maker(CallRow, CALL, ("not_done", "superseded"))
pause = _maker(PauseRow, PAUSE, ())


def sealed(task: str, row: Row, **changes: Any) -> Row:
    """A copy with its numbers and its seal."""
    copy: Row = replace(row, **changes).sealed(task)
    return copy


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


def size_of(found: Any) -> int:
    """Of a row, to be told; SQLite says NULL where a part of it is none of what has a length."""
    return found if type(found) is int else 0


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
    n: int
    writes: int
    branch_sum: int | None


def task(found: tuple[Any, ...]) -> TaskRow:
    """Damaged if a value is of another class: no seal covers it."""
    (
        name,
        status,
        current,
        seq,
        id,
        step,
        agent,
        input,
        attempts,
        reason,
        parent,
        raised,
        created,
        updated,
        doubt,
        asked,
        n,
        *_,
    ) = plain(_Task, found)
    if (seq is None) != (id is None):
        raise _damaged("Branch")
    return TaskRow(
        task=name,
        status=status,
        branch=current,
        head=None if seq is None or id is None else Head(seq, id),
        step=step,
        agent=agent,
        input=input,
        attempts=attempts,
        reason=reason,
        parent=parent,
        raised=raised,
        created_at=created,
        updated_at=updated,
        in_doubt=doubt,
        open_pauses=asked,
        checkpoints=n,
    )


def names(refs: Iterable[bytes]) -> list[bytes]:
    """The names in these runs of 16-byte names, each once, in order of appearance."""
    found: dict[bytes, None] = {}
    for run in refs:
        if run.__class__ is not bytes:
            raise Damaged("a row's list of objects is no list", f"it is {type(run).__name__}", "Load an earlier checkpoint.")
        if len(run) & 15:
            raise Damaged("a row's list of objects is cut off", f"it has {len(run)} bytes", "Load an earlier checkpoint.")
        found.update(dict.fromkeys([run[i : i + 16] for i in range(0, len(run), 16)]))
    return list(found)

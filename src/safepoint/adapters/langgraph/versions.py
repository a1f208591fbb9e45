"""Which checkpoint a run of a graph set out from, and whether what it puts is a next step, a fork or a lost update; pure.

A saver is not told when a run begins or ends. But the versions of channels that ``get_tuple`` and ``list`` return are objects that the
loop hands on, by way of ``get_next_version(max(…))``, into each checkpoint that it puts. So they carry an ``Origin``: through threads and
tasks, without a context variable, and without a key that would show in anybody's config.
"""

from __future__ import annotations

import itertools
import re
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, Literal, Self, TypeAlias

from safepoint.model import Obj
from safepoint.rows import WriteRow

__all__ = [
    "Origin",
    "Verdict",
    "bare",
    "decide",
    "entered",
    "failure",
    "is_exit_delta",
    "marked",
    "moment",
    "next_version",
    "origin_of",
    "run_at",
    "running",
]

Version: TypeAlias = int | float | str

_EXIT_DELTA: Final = re.compile("ffffffff-|0000[0-9]{4}-")
_NO_TASK: Final = str(uuid.UUID(int=0))

How = Literal["new", "latest", "id", "listed", "fallback"]


moment: Callable[[], int] = itertools.count(1).__next__
"""Counts what happens in this process, to tell what came first."""


@dataclass(slots=True, eq=False)
class Origin:
    """Where a run set out from.

    Attributes:
        how: ``new``, there was nothing; ``latest``, without an id; ``id``, asked for by it; ``listed``, from ``list``; ``fallback``,
            the newest sound one, as a newer one was damaged.
        newest: Whether it was the newest checkpoint of its namespace then.
        failed: Why something that the run put did not land. A run that goes on all the same, as one with asynchronous durability does
            for a while, is told at its next superstep.
        born: When, as ``moment`` counts.
        answers: How many answers to its questions the checkpoint had been given.
        answering: Held while this run gives one, until it is known whether it was the first: nothing is put before.
        above: Of the run of the graph around it.
        beneath: By namespace, why the run of a subgraph in it has lost against another run, until that subgraph is run again. What is
            put only when the run ends must not come before what the other one, which has won there, has still to put.
        thread, ns: Where it runs.
        held: With durability "exit", what it wrote to delta channels: rows and their objects. LangGraph hands it over just before the
            checkpoint that follows, as writes to the one that the run set out from, which is the key; it is stored with what follows
            or not at all, as the state of any other run that went on from there would have it too.
        recovered: Of a fallback, until something is put after it: ``from``, the number of what the run goes on from, and ``skipped``,
            those of what is damaged, the newest first.
    """

    how: How
    newest: bool = True
    failed: BaseException | None = None
    recovered: dict[str, Any] | None = None
    born: int = field(default_factory=moment)
    answers: int = 0
    answering: threading.Lock = field(default_factory=threading.Lock, repr=False)
    above: Origin | None = field(default=None, repr=False)
    beneath: dict[str, BaseException] = field(default_factory=dict)
    thread: str = ""
    ns: str = ""
    held: dict[str, list[tuple[tuple[WriteRow, ...], tuple[Obj, ...]]]] = field(default_factory=dict, repr=False)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self  # the run is the same one, and what failed in it must be seen in each copy

    def around(self) -> Iterator[Origin]:
        """Of the runs of the graphs around it, from the inside."""
        above = self.above
        while above is not None:
            yield above
            above = above.above

    def lost(self, error: BaseException) -> None:
        """Another run came first in this namespace: let the runs around this one know."""
        for above in self.around():
            above.beneath["|".join(_names(self.ns))] = error

    def outmost(self) -> Origin:
        """Of the run of the graph that was invoked."""
        found = self
        for found in self.around():  # noqa: B007
            pass
        return found


_run: ContextVar[Origin | None] = ContextVar("safepoint_langgraph_run", default=None)
"""The origin of the run that the code is in, as far as it is known: LangGraph takes contexts along into the threads and tasks of a run. By it go
waiting, for what may never come, and what a run holds back until its end; whether a put is a lost update is told by versions alone."""


def entered(origin: Origin | None, thread: str, ns: str) -> None:
    """A graph that runs has asked for its checkpoint: a run begins here, within that of the graph around it if it is a subgraph."""
    origin = origin or Origin("new")
    origin.thread, origin.ns = thread, ns
    # What runs beside it, or ran before it in the same node, is not around it, and its failures are none of its own.
    names = _names(ns)
    origin.above = next((one for one in _runs() if one.thread == thread and _is_above(_names(one.ns), names)), None)
    for above in origin.around():
        above.beneath.pop("|".join(names), None)  # (A call again has another number in its namespace.)
    _run.set(origin)


def _names(ns: str) -> list[str]:
    """The names of the nodes in a namespace, without what tells their calls apart: a subgraph that remembers has it without."""
    return [name for part in ns.split("|") if (name := part.partition(":")[0]) and not name.isdigit()]


def _is_above(names: list[str], others: list[str]) -> bool:
    return len(names) < len(others) and others[: len(names)] == names


def _runs() -> Iterator[Origin]:
    """Of the runs that the code is in, from the inside."""
    inmost = _run.get()
    if inmost is not None:
        yield inmost
        yield from inmost.around()


def is_exit_delta(task: str) -> bool:
    """Whether these are LangGraph's writes to delta channels of a whole run, and not a task's: by the form of the id. (Of a run that
    went beyond superstep 9,999 some are not known by it, and stored when they come.)"""
    return task != _NO_TASK and _EXIT_DELTA.match(task) is not None


def run_at(thread: str, ns: str) -> Origin | None:
    """The origin of the run of that graph that the code is in."""
    return next((one for one in _runs() if (one.thread, one.ns) == (thread, ns)), None)


def running() -> Origin | None:
    """The origin of the run that the code is in."""
    return _run.get()


def failure() -> BaseException | None:
    """Why this run, or one around it, will put nothing more: LangGraph begins no put after one that failed."""
    for origin in _runs():
        with origin.answering:
            if origin.failed is not None:
                return origin.failed
    return None


class _Marked:
    """Equal to, ordered and printed as the bare value, and pickled as one."""

    origin: Origin

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self


class _Int(_Marked, int):
    def __reduce__(self) -> tuple[Any, ...]:
        return int, (int(self),)


class _Float(_Marked, float):
    def __reduce__(self) -> tuple[Any, ...]:
        return float, (float(self),)


class _Str(_Marked, str):
    def __reduce__(self) -> tuple[Any, ...]:
        return str, (str.__str__(self),)


_MARKED: dict[type, type[Any]] = {int: _Int, float: _Float, str: _Str}
_BARE: dict[type, type[Any]] = {marked: bare for bare, marked in _MARKED.items()}


def mark(version: Any, origin: Origin) -> Any:
    """The version with an origin; what is no version at all as it is."""
    bare_type = _BARE.get(type(version), type(version))
    marked_type = _MARKED.get(bare_type)
    if marked_type is None:
        return version
    made = marked_type(version)
    made.origin = origin
    return made


def marked(versions: Mapping[str, Any], origin: Origin) -> dict[str, Any]:
    return {channel: mark(version, origin) for channel, version in versions.items()}


def bare(version: Any) -> Any:
    bare_type = _BARE.get(type(version))
    return version if bare_type is None else bare_type(version)


def origin_of(versions: Iterable[Any]) -> Origin | None:
    """The origin of the run whose versions these are. None: they come from no saver of ours."""
    return next((v.origin for v in versions if isinstance(v, _Marked)), None)


def next_version(current: Any) -> Any:
    """The version after ``current`` (None: the first one), with its origin, in its own format.

    Raises:
        Whatever made an earlier put of this run fail.
    """
    if current is None:
        begun = _run.get()
        return mark(1, begun if begun is not None and begun.how == "new" else Origin("new"))
    origin = current.origin if isinstance(current, _Marked) else None
    if origin is not None and origin.failed is not None:
        raise origin.failed
    following: Any
    if isinstance(current, str):
        # As SqliteSaver and PostgresSaver write them: a counter of 32 digits, and what tells branches apart there.
        head, dot, tail = str.__str__(current).partition(".")
        following = f"{int(head) + 1:0{max(len(head), 32)}}{dot}{tail}"
    else:
        following = bare(current) + 1
    return following if origin is None else mark(following, origin)


class Verdict(Enum):
    CONTINUE = "continue"
    FORK = "fork"
    CONFLICT = "conflict"


def decide(
    *,
    origin: Origin | None,
    running: bool,
    at_head: bool,
    parentless: bool,
    source: str,
    replaying: bool,
) -> Verdict:
    """What a put is.

    Args:
        origin: Of the versions in the checkpoint.
        running: Whether the put comes from inside a run of a graph.
        at_head: Whether the parent that it names is a branch's head (or it names none, and the namespace is empty).
        parentless: Whether it names no parent.
        source: ``metadata["source"]``.
        replaying: Whether the config says that a graph around this one replays an old checkpoint.
    """
    if at_head:
        return Verdict.CONTINUE
    if origin is None and not running:
        return Verdict.FORK  # no run of a graph: whoever calls put by hand names the parent that is meant
    if source == "fork" or (parentless and replaying):
        return Verdict.FORK
    if origin is not None:
        if origin.how == "listed" or (origin.how == "id" and not origin.newest):
            return Verdict.FORK
        if origin.how == "fallback" and origin.recovered is not None:
            return Verdict.FORK  # the first thing that the run puts: the damaged one stays as it is
        if origin.how == "id" and source != "loop":
            return Verdict.FORK
        if origin.how == "new" and not parentless and source != "loop":
            return (
                Verdict.FORK
            )  # from the stub that LangGraph puts where a run stored nothing else: it has no versions to tell by
    return Verdict.CONFLICT

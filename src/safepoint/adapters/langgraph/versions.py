"""Which checkpoint a run of a graph set out from, and whether what it puts is a next step, a fork or a lost update; pure.

A saver is not told when a run begins or ends. But the versions of channels that ``get_tuple`` and ``list`` return are objects that the
loop hands on, by way of ``get_next_version(max(…))``, into each checkpoint that it puts. So they carry an ``Origin``: through threads and
tasks, without a context variable, and without a key that would show in anybody's config.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, Self, TypeAlias

__all__ = [
    "Origin",
    "Verdict",
    "bare",
    "decide",
    "entered",
    "failure",
    "marked",
    "moment",
    "next_version",
    "origin_of",
    "running",
]

Version: TypeAlias = int | float | str

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
        beneath: Why the run of a subgraph in it has lost against another run, until that subgraph is run again. What is put only when
            the run ends must not come before what the other one, which has won there, has still to put.
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
    beneath: BaseException | None = None

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


_run: ContextVar[Origin | None] = ContextVar("safepoint_langgraph_run", default=None)
"""The origin of the run that the code is in, as far as it is known: LangGraph takes contexts along into the threads and tasks of a run. Only
waiting goes by it, for what may never come."""


def entered(origin: Origin | None, *, nested: bool) -> None:
    """A graph has asked for its checkpoint: a run begins here, within the one that there was if its namespace is a subgraph's."""
    origin = origin or Origin("new")
    origin.above = _run.get() if nested else None
    for above in origin.around():
        above.beneath = None
    _run.set(origin)


def running() -> Origin | None:
    """The origin of the run that the code is in."""
    return _run.get()


def failure() -> BaseException | None:
    """Why this run, or one around it, will put nothing more: LangGraph begins no put after one that failed."""
    inmost = _run.get()
    for origin in () if inmost is None else (inmost, *inmost.around()):
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

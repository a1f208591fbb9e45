"""Which checkpoints may be deleted, and when a save looks for them."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from datetime import datetime
from typing import NamedTuple, Protocol

from safepoint.model import Retention, to_us


class Shown(Protocol):
    """A checkpoint, as far as retention looks at it."""

    @property
    def seq(self) -> int: ...
    @property
    def kind(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def created_at(self) -> int: ...
    @property
    def pinned(self) -> bool: ...


class Slim(NamedTuple):
    """That and no more: of a long task all are held at once."""

    seq: int
    kind: str
    size: int
    created_at: int
    pinned: bool


class Verdict(NamedTuple):
    seq: int
    goes: bool
    counts: bool
    """It is one of the newest, which stay for being that."""
    why: str


def judge(
    headers: Iterable[Shown],
    retention: Retention,
    now: datetime,
    keep: Mapping[int, str] | Iterable[int] = (),
    unreadable: Container[int] = (),
) -> Iterator[Verdict]:
    """Say of each checkpoint whether it goes, and why.

    Args:
        headers: Of one task and space, by falling seq, from the newest on.
        keep: Numbers that stay whatever the rules say (heads, fork points), with a word on it. The store looks at these, and at
            what calls and pauses stand on, again under its lock; here they only keep the count honest.
        unreadable: Numbers of those that are damaged. They stay, and count for nothing: the newest ``keep_latest`` of those
            that can be read are kept, so that damage does not use up what a recovery falls back to.
    """
    kept = keep if isinstance(keep, Mapping) else dict.fromkeys(keep, "a head, or a fork point")
    newest = failures = size = 0
    keep_latest = retention.keep_latest or 1
    oldest = to_us(now - retention.max_age) if retention.max_age is not None else None
    by_count = retention.max_age is None and retention.max_bytes is None
    for row in headers:
        seq = row.seq
        if seq in unreadable:
            yield Verdict(seq, False, False, "cannot be read; damaged checkpoints are never deleted")
            continue
        why = kept.get(seq) or ("pinned" if row.pinned else "")
        if row.kind == "failure":
            failures += not why
            goes = not why and failures > retention.keep_failures and not retention.keeps_all
            yield Verdict(
                seq, goes, False, why or f"a failure, {'beyond' if goes else 'of'} the newest {retention.keep_failures}"
            )
            continue
        newest += 1
        size += row.size
        counts = newest <= keep_latest
        if why or counts or retention.keeps_all:
            if retention.keeps_all:
                why = why or "all are kept"
            yield Verdict(seq, False, counts, why or ("the newest" if keep_latest == 1 else f"of the newest {keep_latest}"))
        elif row.kind == "milestone" and retention.keep_milestones:
            yield Verdict(seq, False, False, "a milestone")
        elif by_count:
            yield Verdict(seq, True, False, f"beyond the newest {keep_latest}")
        elif oldest is not None and row.created_at < oldest:
            yield Verdict(seq, True, False, "older than max_age")
        elif retention.max_bytes is not None and size > retention.max_bytes:
            yield Verdict(seq, True, False, "beyond max_bytes")
        else:
            yield Verdict(seq, False, False, "within the limits")


def is_plain(row: Shown, retention: Retention) -> bool:
    """Whether it goes by count alone, once it is old enough."""
    return row.kind != "failure" and not (row.kind == "milestone" and retention.keep_milestones)


def due(
    headers: Iterable[Shown],
    retention: Retention,
    now: datetime,
    keep: Mapping[int, str] | Iterable[int] = (),
    unreadable: Container[int] = (),
) -> list[int]:
    """Numbers of the checkpoints that ``retention`` lets go, oldest first. See ``judge``."""
    if retention.keeps_all:
        return []
    return [v.seq for v in judge(headers, retention, now, keep, unreadable) if v.goes][::-1]


# -- when a save looks


def threshold(keep_latest: int | None, live_objects: int) -> int:
    """How many must be due for a sweep at save time: a sweep reads all objects, and this spreads its cost over many saves."""
    return max(keep_latest or 1, live_objects // 16)


def look_every(retention: Retention) -> int:
    """At which multiples of ``seq`` a process that knows nothing of a task yet counts what is due."""
    return max(1, (retention.keep_latest or 1) // 2)


def first_every(checkpoints: int) -> int:
    """At which multiples of ``seq`` such a process looks, the more there is to look at the more seldom. A power of two, as it has
    to be met by processes that live for one save, while the number of checkpoints goes up and down."""
    return 1 << max(0, (checkpoints // 16).bit_length() - 1)


def again_every(checkpoints: int) -> int:
    """At which multiples of ``seq`` such a process asks whether a look is overdue: what was begun by a process that did not live
    to its end is then begun again long before the next look."""
    first = first_every(checkpoints)
    return min(first, max(8, first // 8))


PROBE = 8
"""How many headers are read to find that out."""


def overdue_below(retention: Retention, seq: int, due_at: int) -> int | None:
    """Below which number there is nothing that may go, near it, unless so many are due by count alone; None if that cannot be said.

    Behind the newest lies what has become due, by falling number, and behind that only what stays.
    """
    if near(retention, due_at) is None:
        return None
    return seq - (retention.keep_latest or 1) - due_at + 2


def near(retention: Retention, due_at: int) -> int | None:
    """How many of the newest checkpoints hold what has become due since the last sweep; None if that cannot be said.

    Under a limit of age or bytes the oldest go first, wherever they are. By count alone, what is due lies right behind the newest,
    and what was found to stay (milestones, pins) lies behind that, and is not read again each time.
    """
    if retention.max_age is not None or retention.max_bytes is not None:
        return None
    return (retention.keep_latest or 1) + 2 * due_at + 8


def all_every(checkpoints: int) -> int:
    """After how many saves all checkpoints are looked at: two to four are read for each save. A power of two too."""
    return 1 << max(0, (checkpoints // 2).bit_length() - 1)


class At(NamedTuple):
    """Where a branch's head stands."""

    line: int
    step: int
    current: bool | int = True
    """Whether it is the task's current branch."""


class Stands(Protocol):
    """A call or a pause, as far as it keeps the checkpoint that its step began from."""

    @property
    def base_seq(self) -> int: ...
    @property
    def line(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def status(self) -> str: ...


class StandsUnderFence(Stands, Protocol):
    """A call, with the fence of the run that made it."""

    @property
    def fence(self) -> int: ...


OPEN_CALLS = frozenset({"started", "paused", "in_doubt"})
"""Calls that somebody still has to say something of; kept on whatever line they are."""
OPEN_PAUSES = frozenset({"open", "answered"})
"""Until an answer is used (status ``used``), it may still be asked for."""


def begins(heads: Collection[At]) -> dict[int, int]:
    """From which step on the calls of each line are kept, for a resume to read.

    That of the current branch's head, where it goes on with the line; a branch of that line that was left behind does not keep
    all that comes after it, and stands under a guard when it is made the current one again (``rules.recovery``). Else that of
    the head that is furthest back.
    """
    found: dict[int, int] = {}
    own = {h.line for h in heads if h.current}
    for line, step, current in heads:
        if current or line not in own:
            found[line] = min(step, found.get(line, step))
    return found


def stood_on(heads: Iterable[At], calls: Iterable[StandsUnderFence], pauses: Iterable[Stands], live: int | None) -> set[int]:
    """Numbers of the checkpoints that must stay because calls and pauses that go with them are still needed.

    A resume reads what is recorded of its line from the step of its head on (``begins``), whatever came of it: without the
    record of a write that succeeded, the interrupted step would do it again. Calls that were set aside count too, as they
    show what the step had gone on past.

    Args:
        heads: Of every branch of the task.
        calls: All of the task.
        pauses: All of the task.
        live: The fence of the live run, if there is one: its step may stand on a checkpoint that a write by force left
            behind, steps ago.
    """
    first = begins(list(heads))
    kept: set[int] = set()
    newest = 0
    for call in calls:
        if call.status in OPEN_CALLS or (call.line in first and call.step >= first[call.line]):
            kept.add(call.base_seq)
        if call.fence == live:
            newest = max(newest, call.base_seq)
    for pause in pauses:
        if pause.status in OPEN_PAUSES or (pause.line in first and pause.step >= first[pause.line]):
            kept.add(pause.base_seq)
    return kept | {newest}

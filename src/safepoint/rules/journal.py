"""Run, reuse, repeat, verify or park: what becomes of a call.

``plan`` and the run ask the same functions, so what the one says is what the other does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from safepoint.model import Done, NotDone, Unknown
from safepoint.rows import CallRow, replace
from safepoint.rules import quarantine
from safepoint.rules.policy import Policy


class Action(StrEnum):
    """What is done with a call that is asked for, or that is found open."""

    EXECUTE = "execute"
    """Nothing is recorded: write the intent and run it."""
    REUSE = "reuse"
    """Return the recorded result."""
    LOST = "lost"
    """It succeeded, with a result that could not be stored: say so again, never run it again."""
    RAISE = "raise"
    """It failed and the step went on past it: raise CallFailed again."""
    REPEAT = "repeat"
    """Run it again: it cannot have happened, or may happen twice."""
    VERIFY = "verify"
    """Ask the tool's verifier."""
    PARK = "park"
    """In doubt: only a person can say."""
    WAIT = "wait"
    """A pause inside it is not answered yet."""


HAPPENS = frozenset({"write", "transactional"})
"""Effects whose success counts as a business operation that a re-planned call may stand for."""


def expired(row: CallRow, policy: Policy, now_us: int) -> bool:
    """Whether the receiver may have forgotten the call's idempotency key."""
    return policy.key_ttl is not None and now_us - row.started_at > policy.key_ttl * 1_000_000


def decide(row: CallRow | None, *, past: bool = False, answered: bool = True, now_us: int = 0) -> Action:
    """The table of DESIGN 6.

    Args:
        row: What is recorded of the call.
        past: The step went on after this call failed.
        answered: For a paused call, whether its pause has its answer.
        now_us: Wall clock, for ``key_ttl`` alone.
    """
    if row is None:
        return Action.EXECUTE
    match row.status:
        case "succeeded":
            return Action.REUSE if row.result is not None else Action.LOST
        case "failed":
            if past and row.attempts:  # one that was parked unsent has not failed for anybody yet
                return Action.RAISE
            return Action.REPEAT if row.effect != "write" or row.not_done else Action.PARK
        case "paused":
            return Action.REPEAT if answered else Action.WAIT
        case "in_doubt":
            return Action.PARK
        case "quarantined":
            return Action.RAISE
    policy = Policy.decode(row.policy)
    if row.effect == "write" or (row.effect == "idempotent" and expired(row, policy, now_us)):
        return Action.VERIFY if policy.verify else Action.PARK
    return Action.REPEAT


def went_past(row: CallRow, rows: Iterable[CallRow]) -> bool:
    """Whether the step did something after ``row`` failed: a call asked for with the failure in sight shows it.

    ``asked`` is the newest failure that the attempt which asked had seen itself. Calls that were asked for together
    (``call_many``) are no later ones, even where they began later; nor are calls of a later attempt that has not come to
    this one again.
    """
    return row.status == "failed" and row.ended is not None and any(o.asked >= row.ended for o in rows if o.no != row.no)


@dataclass(frozen=True, slots=True)
class Settled:
    """What a verdict makes of an open write."""

    status: str
    not_done: bool = False
    reason: str = ""
    result: Any = None


def settle(row: CallRow, verdict: object, presumed: int) -> Settled:
    """Turn a verifier's word into a status.

    ``presumed`` is the highest fence whose holder was only presumed dead. Such a holder may still act, so its ``NotDone``
    is believed only if the verifier says that it is final, or the receiver refuses a known key or a stale fence.
    """
    policy = Policy.decode(row.policy)
    match verdict:
        case Done(result):
            return Settled("succeeded", result=result)
        case NotDone():
            if row.fence <= presumed and not (policy.final or policy.dedups):
                return Settled(
                    "in_doubt",
                    reason="the verifier says NotDone, but the last holder was taken over alive and may still act",
                )
            return Settled("failed", not_done=True)
        case Unknown(reason):
            return Settled("in_doubt", reason=f"the verifier cannot tell: {reason}" if reason else "the verifier cannot tell")
        case BaseException():
            return Settled("in_doubt", reason=f"the verifier raised {type(verdict).__name__}")
    return Settled("in_doubt", reason=f"the verifier answered a {type(verdict).__name__}, not Done, NotDone or Unknown")


# -- matching a step's calls with what is recorded


@dataclass(frozen=True, slots=True)
class Request:
    """A call as the step asks for it."""

    tool: str
    effect: str
    ident: bytes
    call_id: str | None = None
    scope: int = 0
    """The model reply that ``call_id`` counts in."""
    op_key: bytes | None = None
    replan: str = "park"


class Match(StrEnum):
    RECORDED = "recorded"
    """``row`` is what is recorded of this call."""
    NEW = "new"
    MISMATCH = "mismatch"
    """The same id came with other arguments within one reply."""
    BUSY = "busy"
    """The same call is under way."""
    PARK = "replanned"
    """A write of the same tool happened, was not asked for again, and nothing says whether this is the same operation."""


@dataclass(frozen=True, slots=True)
class Found:
    kind: Match
    row: CallRow | None = None


UNASKED = -(1 << 62)
"""Scope of a write that happened in an earlier attempt of a step and was not asked for when the step was done anew: it is
carried on to the next step, since what it did may be asked for there."""


class StepJournal:
    """The calls of one step: what earlier attempts recorded, and what this attempt has made of it so far.

    A row is free, busy (being served to a caller) or delivered (its result or failure has reached one). Free rows are what the
    next equal request takes: those of earlier attempts, and those of this one whose outcome never reached the step, since a
    step that asks again after an error must not be given a second execution.
    """

    def __init__(self, rows: Iterable[CallRow] = (), beside: Iterable[CallRow] = ()) -> None:
        every = tuple(rows)
        self.rows: dict[int, CallRow] = {r.no: r for r in every if not r.superseded and r.scope != UNASKED}
        carried = [r for r in every if r.scope == UNASKED]
        self.beside = {r.no: r for r in (*carried, *beside) if _happened(r)}
        """Writes that happened under another step: carried on from the one before, or recorded for one that is still to come.
        An equal call here may be one of these, because the step was cut differently this time."""
        self.borrowed: dict[int, CallRow] = {}
        self.told: set[int] = set()
        """Rows without a result: the step has been told that they succeeded, each time that it asked."""
        self.set_aside = tuple(r for r in every if r.superseded)
        """Served to nobody, and still a witness: a step that asked for one of these had gone on past what failed before."""
        self.earlier = frozenset(self.rows)
        self.delivered: dict[int, bool] = {}
        """Rows that are not free: False while busy, True once delivered."""
        self.scope = 0
        """The model reply that the step is acting on: the number of that call. Negative where several came at once and
        nothing tells which of them a call belongs to."""
        self.named: dict[tuple[int, str], tuple[int, bytes]] = {}
        """What this attempt's call ids stand for, whatever ids the rows were recorded under: number (0 until the intent is
        written) and identity. Two calls of one id that are made at the same moment must not both be new."""

    def begun(self, r: Request, no: int) -> None:
        """The request has a row now, found or written for it."""
        self.delivered[no] = False
        if r.call_id is not None:
            self.named[r.scope, r.call_id] = (no, r.ident)

    def over(self, r: Request, no: int, *, delivered: bool, told: bool = False) -> None:
        """The request has been served, or has come to nothing. ``no`` is 0 if no intent was written."""
        if delivered:
            self.delivered[no] = True
        else:
            if told:
                self.told.add(no)
            self.delivered.pop(no, None)
            if no == 0 and r.call_id is not None and self.named.get((r.scope, r.call_id)) == (0, r.ident):
                del self.named[r.scope, r.call_id]

    def over_by_history(self, no: int) -> None:
        """What a row records has been put into the messages that the step begins with."""
        self.delivered[no] = True

    def put(self, row: CallRow) -> None:
        """Take note of a row as it now stands in the store."""
        self.rows[row.no] = row

    def past(self, row: CallRow) -> bool:
        return went_past(row, (*self.rows.values(), *self.set_aside))

    def unclaimed(self, tool: str | None = None) -> list[CallRow]:
        """Writes that happened in an earlier attempt and that this one has not asked for."""
        asked = self.delivered.keys() | self.told
        return [
            r
            for n, r in sorted(self.rows.items())
            if n in self.earlier and n not in asked and _happened(r) and (tool is None or r.tool == tool)
        ]

    def left_over(self) -> list[CallRow]:
        """What to carry on when the step is done: writes that happened and were not asked for. What was carried here already
        goes on only if this step took some of it, so that it does not stand in the way of later equal calls for ever."""
        carried = [r for n, r in self.beside.items() if r.scope == UNASKED and n not in self.borrowed]
        took = any(r.scope == UNASKED for r in self.borrowed.values())
        return self.unclaimed() + (carried if took else [])

    def match(self, requests: Sequence[Request]) -> list[Found]:
        """Find and claim the recorded calls that ``requests``, made at the same time, stand for.

        All exact matches are claimed before anything else, so that no call takes another one's record.
        """
        found = [self._named(r) or self._exact(r) for r in requests]
        for i, r in enumerate(requests):
            found[i] = found[i] or self._named(r) or self._kth(r)
        # A recorded pause or open call of the same tool would have ended the run before this point; what is left is new.
        return [f or self._named(r) or self._new(r) for f, r in zip(found, requests, strict=True)]

    def _named(self, r: Request) -> Found | None:
        """An id names one call of a reply: asked for twice, it is still that call."""
        if r.call_id is None or (r.scope, r.call_id) not in self.named:
            return None
        no, ident = self.named[r.scope, r.call_id]
        row = self.rows.get(no)
        if ident != r.ident:
            return Found(Match.MISMATCH, row) if r.scope >= 0 else None
        if row is None or self.delivered.get(no) is False:
            return Found(Match.BUSY, row)
        return self._take(r, row)

    def _exact(self, r: Request) -> Found | None:
        if r.call_id is None:
            return None
        for no, row in sorted(self.rows.items()):
            if row.call_id != r.call_id or row.scope != r.scope or no in self.delivered:
                continue
            if row.ident == r.ident:
                return self._take(r, row)
            if r.scope > 0:
                return Found(Match.MISMATCH, row)
        return None

    def _kth(self, r: Request) -> Found | None:
        for no, row in sorted(self.rows.items()):
            if no not in self.delivered and row.ident == r.ident:
                return self._take(r, row)
        return None

    def _take(self, r: Request, row: CallRow) -> Found:
        self.begun(r, row.no)
        return Found(Match.RECORDED, row)

    def _elsewhere(self, r: Request) -> Found | None:
        for no, row in sorted(self.beside.items()):
            if no in self.delivered or row.tool != r.tool:
                continue
            if row.op_key == r.op_key if r.op_key is not None else row.ident == r.ident:
                if r.op_key is not None or r.replan == "reuse":
                    self.rows[no] = self.borrowed[no] = row
                    return self._take(r, row)
                return Found(Match.PARK, row) if r.replan == "park" else None
        return None

    def _new(self, r: Request) -> Found:
        if r.effect in HAPPENS:
            left = self.unclaimed(r.tool)
            if r.op_key is not None:
                same = [row for row in left if row.op_key == r.op_key]
                if same:
                    return self._take(r, same[0])
                left = [row for row in left if row.op_key is None]  # recorded before the tool had a key: nothing tells
            if left and r.replan == "reuse":
                return self._take(r, left[0])
            if left and r.replan == "park":
                return Found(Match.PARK, left[0])
            if found := self._elsewhere(r):
                return found
        if r.call_id is not None:
            self.named[r.scope, r.call_id] = (0, r.ident)
        return Found(Match.NEW)


def _happened(r: CallRow) -> bool:
    return r.status == "succeeded" and r.effect in HAPPENS and not r.superseded


def overtaken(row: CallRow, others: Iterable[CallRow]) -> CallRow | None:
    """A call like ``row`` that was begun after it had been said of ``row`` that it did not happen, on another journal of the
    task: the word is older than that call, and says nothing of it. None if there is none."""
    said = max(row.began, row.ended or 0)
    for other in others:
        same = other.ident == row.ident or (row.op_key is not None and other.op_key == row.op_key)
        if same and other.no != row.no and other.line != row.line and other.began > said and not other.not_done:
            return other
    return None


# -- identity of arguments


def ident_of(tool: str, canonical_arguments: bytes) -> bytes:
    return hashlib.sha256(b"c1" + tool.encode() + b"\0" + canonical_arguments).digest()[:16]


def canonical(tree: Any) -> bytes:
    """Bytes that are equal for arguments that mean the same: key order is ignored, 1 equals 1.0, True is not 1.

    ``tree`` is a plain tree as the codec's ``decode_plain`` gives it.
    """
    out: list[bytes] = []
    _canonical(tree, out)
    return b"".join(out)


def _canonical(v: Any, out: list[bytes]) -> None:
    # Every value begins with its kind and says its length, so no two different trees can give the same bytes.
    match v:
        case None | True | False:
            out.append(b"%d;" % {None: 0, False: 1, True: 2}[v])
        case int():
            out.append(b"n%d;" % v)
        case float():
            out.append(b"n%d;" % int(v) if v.is_integer() else b"f" + v.hex().encode() + b";")
        case str():
            raw = v.encode("utf-8", "surrogatepass")
            out.append(b"s%d:" % len(raw) + raw)
        case bytes():
            out.append(b"b%d:" % len(v) + v)
        case list():
            out.append(b"l%d:" % len(v))
            for item in v:
                _canonical(item, out)
        case dict():
            pairs = sorted((canonical(k), canonical(x)) for k, x in v.items())
            out.append(b"d%d:" % len(pairs))
            out.extend(part for pair in pairs for part in pair)
        case _:  # a Tagged of the codec: a value that plain MessagePack does not have
            out.append(b"t")
            _canonical([v.tag, v.name, v.value], out)


# -- bad replies


@dataclass(frozen=True, slots=True)
class Raised:
    """What the task remembers of the step that raised last."""

    line: int
    step: int
    signature: bytes
    times: int

    def encode(self) -> bytes:
        return msgspec.msgpack.encode([self.line, self.step, self.signature, self.times])

    @classmethod
    def decode(cls, data: bytes) -> Raised | None:
        try:
            return cls(*msgspec.msgpack.decode(data, type=tuple[int, int, bytes, int])) if data else None
        except (msgspec.MsgspecError, RecursionError):
            return None  # it only counts how often a step has raised; damaged, the count begins anew


RAISES_BEFORE_ASKING_ANEW = 2


def signature(rows: Iterable[CallRow]) -> bytes:
    """Of the results that a step stood on; equal for two attempts that were served the same ones.

    What failed is no part of it: a tool that fails anew at each attempt must not hide that the reply which led there is old.
    """
    h = hashlib.sha256()
    for r in sorted((r for r in rows if r.status == "succeeded" and not r.superseded), key=lambda r: r.no):
        h.update(b"%d %d;" % (r.no, r.attempts))
    return h.digest()[:16]


def after_raise(before: Raised | None, line: int, step: int, rows: Iterable[CallRow]) -> Raised:
    """What to remember when a step has raised."""
    s = signature(rows)
    same = before is not None and (before.line, before.step, before.signature) == (line, step, s)
    return Raised(line, step, s, before.times + 1 if same and before else 1)


def to_ask_anew(raised: Raised | None, line: int, step: int, rows: Iterable[CallRow]) -> list[CallRow]:
    """The reads to set aside: those of a step that raised twice on the same recorded results. Writes never are.

    ``step`` is the one that a resume begins with; with saves that are further apart, the one that raised may be a later one.
    """
    if raised is None or raised.times < RAISES_BEFORE_ASKING_ANEW or raised.line != line or raised.step < step:
        return []
    there = [r for r in rows if (r.line, r.step) == (line, raised.step) and not r.superseded and r.scope != UNASKED]
    if raised.signature != signature(there):
        return []
    return [r for r in there if r.effect == "read" and r.status == "succeeded"]


# -- what a resume will do


@dataclass(frozen=True, slots=True)
class Planned:
    """One line of a plan: a recorded call, and what the resume does with it when the step asks for it (or before)."""

    row: CallRow
    action: str


def plan_calls(
    rows: Sequence[CallRow],
    line: int,
    step: int,
    *,
    raised: Raised | None,
    answered: frozenset[int],
    now_us: int,
    died: int = 0,
) -> list[Planned]:
    """What a resume at ``step`` will do with each recorded call of the steps that are run again.

    ``died`` is the fence of the last holder if it died, else 0.
    """
    reads = [r for r in rows if r.line == line and r.step >= step]
    here = [r for r in reads if r.scope != UNASKED]
    live = [r for r in reads if not r.superseded]
    anew = {r.no for r in to_ask_anew(raised, line, step, live)}
    killer = quarantine.killer(live, died)
    planned = []
    for r in live:
        if r.no in anew or r.scope == UNASKED:
            planned.append(Planned(r, "ask_anew" if r.no in anew else "unclaimed"))
            continue
        past = went_past(r, [o for o in here if o.step == r.step]) or any(o.step > r.step for o in here)
        action = decide(r, past=past, answered=r.no in answered, now_us=now_us)
        if action is Action.REPEAT and killer is not None and killer[0] is r:
            action = decide(quarantine.noted(*killer))
        planned.append(Planned(r, action.value))
    return planned


def settled_row(row: CallRow, s: Settled, **changes: Any) -> CallRow:
    # A verifier's own words: a lone surrogate in them must not keep the verdict from being recorded.
    reason = s.reason.encode("utf-8", "replace").decode()
    return replace(row, status=s.status, not_done=s.not_done, reason=reason, **changes)

"""What the rules of all three formats share: faults, the rules' table, what is known beside the messages, and plain views."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from safepoint.codec import sdk
from safepoint.codec.kinds import Tagged
from safepoint.errors import UsageError
from safepoint.model import a_type

Format: TypeAlias = Literal["chat", "responses", "anthropic", "plain"]
FORMATS = ("chat", "responses", "anthropic")
NAMES = {
    "chat": "OpenAI Chat Completions",
    "responses": "OpenAI Responses",
    "anthropic": "Anthropic Messages",
    "plain": "text alone",
    "": "unknown",
}

Plain: TypeAlias = Mapping[str, Any]

INTERRUPTED = "interrupted before a result was recorded; may or may not have run"
"""What stands in for the result of a call that has none."""

_CUT = frozenset({"in_progress", "incomplete"})
_PRESERVING = re.compile(r"claude-(?:(?:fable|mythos)-5-[12]|(?:opus|sonnet|haiku)-5-5)(?!\d)")
_NO_PREFILL = re.compile(r"claude-(?:(?:fable|mythos)-|(?:opus|sonnet)-4-[6-9]|(?:opus|sonnet|haiku)-[5-9])")


@dataclass(frozen=True, slots=True)
class Rule:
    """What a provider asks of a history."""

    id: str
    text: str
    remedy: str
    note: bool = False
    """Not refused by the provider, but worse for it."""


RULES: dict[str, Rule] = {}
"""By id; the modules of the formats fill it in."""


def rule(id: str, text: str, remedy: str, *, note: bool = False) -> Rule:
    made = RULES[id] = Rule(id, text, remedy, note)
    return made


@dataclass(frozen=True, slots=True)
class Fault:
    """A place where a history breaks a rule of its provider. Shows no content."""

    format: str
    index: int
    """Of the message, or item; -1 if it is the history as a whole."""
    rule: str
    why: str
    remedy: str
    note: bool = False
    """The provider takes it, but it makes replies worse or will fail later."""

    def __str__(self) -> str:
        where = f"message {self.index}" if self.index >= 0 else "the history"
        return f"{where}: {self.rule}: {self.why}"


def fault(format: str, index: int, r: Rule, why: str, *, note: bool | None = None) -> Fault:
    return Fault(format, index, r.id, why, r.remedy, r.note if note is None else note)


@dataclass(frozen=True, slots=True)
class Context:
    """What is known beside the messages. Each part may be left out; the rules that need it are then passed over.

    In a state it can be kept as ``metadata["history"]``, a dict with these names, so that every resume, ``doctor`` and ``show``
    know it.
    """

    format: str = ""
    """``chat``, ``responses`` or ``anthropic``; '' to be told by the messages."""
    model: str = ""
    """Model id, for A5 and A13."""
    prefill: bool | None = None
    """A5: whether the model continues an assistant turn at the end; None to go by ``model``."""
    preserved: bool | None = None
    """A13: whether thinking blocks are bound to all that is before them; None to go by ``model``."""
    thinking: bool = False
    """A7: extended thinking is switched on by hand, so that a turn that calls tools begins with its thinking."""
    asking: bool = False
    """A5: the history is what is sent next, not what lies until there is something to ask."""
    stored: bool | None = None
    """R5: the request's ``store=``; None if it is not known."""
    continues: bool = False
    """R2, R9: the request names a ``conversation`` or ``previous_response_id``, whose items are not in ``messages``."""
    prefix: str = ""
    """A13: ``prefix_of(system, tools)`` of what is sent now …"""
    kept_prefix: str = ""
    """… and of what the history's thinking blocks were made under."""
    before: Sequence[Any] | None = field(default=None, repr=False)
    """A7, A13: the messages as they were, of an earlier checkpoint of the same history."""

    def __post_init__(self) -> None:
        if self.format not in ("", "plain", *FORMATS):
            shown = repr(self.format) if isinstance(self.format, str) else a_type(self.format)
            raise UsageError(f"a history has no format {shown}", "", f"Use one of {', '.join(FORMATS)}.")

    @property
    def has_prefill(self) -> bool:
        return not _NO_PREFILL.match(self.model) if self.prefill is None else self.prefill

    @property
    def binds(self) -> bool:
        return bool(_PRESERVING.match(self.model)) if self.preserved is None else self.preserved


_OF_METADATA = {"format": str, "model": str, "prefill": bool, "preserved": bool, "thinking": bool, "stored": bool,
                "continues": bool, "prefix": str, "kept_prefix": str}  # fmt: skip


def context_in(metadata: Any) -> Context:
    """What ``metadata["history"]`` says. Whatever else stands under that name belongs to the application and is passed over."""
    said = metadata.get("history") if isinstance(metadata, Mapping) else None
    if not isinstance(said, Mapping):
        return Context()
    known: dict[str, Any] = {k: v for k, t in _OF_METADATA.items() if type(v := said.get(k)) is t}
    if known.get("format", "") not in ("", *FORMATS):
        del known["format"]
    return Context(**known)


def prefix_of(system: Any, tools: Any = ()) -> str:
    """A digest of what stands before the first message, for ``Context.prefix`` and ``kept_prefix`` (A13). What is equal on the
    wire is equal here."""
    text = json.dumps([wire(system), wire(list(tools or ()))], sort_keys=True, ensure_ascii=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


# -- plain views

_ATOMS = frozenset((str, int, float, bool, type(None), bytes))
_MARKS = "-.+~"
_DEPTH = 5


def wire(value: Any, depth: int = _DEPTH) -> Any:
    """A message as the provider sees it: SDK objects as what they dump, what was read without its class as its payload. What is
    plain already is not copied; nothing is changed."""
    kind = type(value)
    if kind in _ATOMS or depth < 0:
        return value
    if kind is dict:
        changed = {k: new for k, v in value.items() if type(v) not in _ATOMS and (new := wire(v, depth - 1)) is not v}
        return {**value, **changed} if changed else value
    if kind is list:
        items = [wire(v, depth - 1) for v in value]
        return items if any(a is not b for a, b in zip(items, value, strict=True)) else value
    if kind is tuple:
        return [wire(v, depth - 1) for v in value]
    if kind is Tagged:
        inner = value.value
        if isinstance(inner, Mapping) and value.tag == "sdk":
            # What is kept beside the wire form is not sent.
            return _sent({k: wire(v, depth - 1) for k, v in inner.items() if not k.startswith("~")})
        if isinstance(inner, Mapping):
            return {(k[1:] if k[:1] in _MARKS else k): wire(v, depth - 1) for k, v in inner.items()}
        return wire(inner, depth - 1)
    if isinstance(value, Mapping):
        return dict(value)
    sent = sdk.wire(value)
    if sent is value:
        return value
    return {**sent, "stop_reason": None} if getattr(value, "stop_reason", "") is None else sent


def _sent(whole: dict[str, Any]) -> dict[str, Any]:
    """As ``sdk.wire`` has it: a whole reply of Anthropic is sent as role and content. That it is not whole yet is looked at too."""
    if whole.get("type") == "message" and whole.keys() >= {"role", "content", "usage", "stop_reason"}:
        sent = {"role": whole["role"], "content": whole["content"]}
        return {**sent, "stop_reason": None} if whole["stop_reason"] is None else sent
    return whole


def plain_list(messages: Any) -> list[Any]:
    return [wire(m) for m in messages]


def role(message: Any) -> str:
    found = message.get("role") if isinstance(message, Mapping) else None
    return found if isinstance(found, str) else ""


def kind(block: Any) -> str:
    found = block.get("type") if isinstance(block, Mapping) else None
    return found if isinstance(found, str) else ""


def text_of(value: Any) -> str:
    """An id, or ''."""
    return value if isinstance(value, str) else ""


def given(value: Any) -> bool:
    """Whether there is something; also of values that have no truth of their own."""
    return not (value is None or (isinstance(value, str | bytes | list | dict) and not value))


def is_json(text: Any) -> bool:
    if not isinstance(text, str):
        return False
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def is_marked(message: Plain) -> bool:
    """Whether a message says of itself that it is not whole: a ``status`` that is ``in_progress`` or ``incomplete``, or a
    ``finish_reason`` or ``stop_reason`` that is there and null, as in a snapshot of a stream."""
    return (
        text_of(message.get("status")) in _CUT
        or ("finish_reason" in message and message["finish_reason"] is None)
        or ("stop_reason" in message and message["stop_reason"] is None)
    )


# -- what is put in the place of a missing result


@dataclass(frozen=True, slots=True)
class Open:
    """A call that the last turn asked for and that has no answer."""

    index: int
    """Of the message that asks for it."""
    id: str
    name: str
    arguments: Any
    """As the model gave them: text (JSON) or a dict."""
    type: str = "function"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a call is answered with."""

    text: str
    error: bool = False


Answers: TypeAlias = Callable[[Open], Answer | None]
Edit: TypeAlias = list[int | dict[str, Any]]
"""A new history: indices of messages that stay as they are, and what is put between them."""


@dataclass(slots=True)
class Mending:
    """What one format's repair has decided."""

    edit: Edit
    dropped: list[int] = field(default_factory=list)
    """Messages of a turn that is not whole."""
    closed: list[Open] = field(default_factory=list)
    recorded: list[Open] = field(default_factory=list)
    """Those of ``closed`` whose real result was known."""
    moved: int = 0
    """Results that came late, put where they belong."""
    removed: int = 0
    """Results that answer no call of the tail, or one that has its answer."""


def answered(open_: Open, answers: Answers, mending: Mending) -> Answer:
    found = answers(open_)
    mending.closed.append(open_)
    if found is not None:
        mending.recorded.append(open_)
        return found
    return Answer(INTERRUPTED, True)


def crossing(pairs: Iterator[tuple[int, int]], n: int) -> list[bool]:
    """For each index whether a cut right before it would split a pair ``(call, result)``."""
    steps = [0] * (n + 2)
    for call, result in pairs:
        if result > call:
            steps[call + 1] += 1
            steps[result + 1] -= 1
    found, depth = [], 0
    for i in range(n):
        depth += steps[i]
        found.append(depth > 0)
    return found

"""Whether a message history is one that its provider takes, and what may be done where it is not; pure.

The rules are those of OpenAI Chat Completions (C1 to C9), OpenAI Responses (R1 to R9) and Anthropic Messages (A1 to A13), as their
documentation, SDKs and errors tell them; docs/histories.md lists them. Messages are looked at in wire form and never changed: what
is kept of a history is the very object that was given.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from safepoint.errors import UsageError
from safepoint.model import a_type
from safepoint.rules.history import anthropic, chat, responses
from safepoint.rules.history.base import (
    FORMATS,
    INTERRUPTED,
    NAMES,
    RULES,
    Answer,
    Answers,
    Context,
    Fault,
    Open,
    Rule,
    context_in,
    kind,
    plain_list,
    prefix_of,
    role,
)

__all__ = [
    "FORMATS", "INTERRUPTED", "NAMES", "RULES", "Answer", "Context", "Fault", "Open", "Repaired", "Rule", "check", "context_in",
    "detect", "lasting", "prefix_of", "repair", "trim",
]  # fmt: skip

NOTHING = Context()
_MODULES = {"chat": chat, "responses": responses, "anthropic": anthropic}
_CHAT_ROLES = frozenset({"tool", "developer", "function"})
_CHAT_PARTS = frozenset({"image_url", "input_audio", "file", "refusal"})
_RESPONSES_PARTS = frozenset({"input_text", "input_image", "input_file", "output_text"})
_ANTHROPIC_BLOCKS = frozenset({"tool_use", "tool_result", "thinking", "redacted_thinking", "image", "document", "search_result",
                               "server_tool_use", "mcp_tool_use"})  # fmt: skip
_PLAIN_ROLES = frozenset({"user", "assistant", "system"})
_FIRST = frozenset({"system", "developer"})


@dataclass(frozen=True, slots=True)
class Repaired:
    """What became of a history."""

    messages: list[Any]
    """The mended one; messages that stay are the objects that were given."""
    format: str
    """'' where it is of no known one; it is left alone then."""
    dropped: tuple[int, ...] = ()
    """Messages, by their old index, of a turn of the model that was cut off."""
    closed: tuple[Open, ...] = ()
    """Calls that got a result …"""
    recorded: tuple[Open, ...] = ()
    """… and those among them whose real one was known."""
    moved: int = 0
    """Results that came after something else, and stand right after their call now."""
    removed: int = 0
    """Results of no call, or a second one of a call, that were left out."""
    faults: tuple[Fault, ...] = ()
    """What stays wrong: before the tail nothing is touched. Notes are among them."""

    @property
    def changed(self) -> bool:
        return bool(self.dropped or self.closed or self.moved or self.removed)

    @property
    def said(self) -> tuple[str, ...]:
        """What was done, in lines without content."""
        lines = []
        if self.dropped:
            at = ", ".join(map(str, sorted(self.dropped)))
            lines.append(f"dropped message {at}: the turn was cut off, the model is asked again")
        if self.closed:
            n, real = len(self.closed), len(self.recorded)
            at = ", ".join(str(i) for i in dict.fromkeys(o.index for o in self.closed))
            lines.append(
                f"answered {n} open call{'s' * (n > 1)} of message {at}: {real} from the journal, {n - real} as interrupted"
            )
        if self.moved:
            lines.append(f"moved {self.moved} late result{'s' * (self.moved > 1)} to the call")
        if self.removed:
            lines.append(f"left out {self.removed} result{'s' * (self.removed > 1)} that answered no open call")
        return tuple(lines)


def detect(messages: Iterable[Any]) -> str:
    """The format of a history: ``chat``, ``responses`` or ``anthropic``; ``plain`` where it could be any of them, as it is but text;
    '' where it is none, or a mixture."""
    return _detect(plain_list(messages))


def _detect(messages: Sequence[Any]) -> str:
    votes: set[str] = set()
    for m in messages:
        found = _vote(m)
        if found is None:
            return ""
        votes |= found
    if len(votes) > 1:
        return ""
    return votes.pop() if votes else "plain"


def _vote(m: Any) -> set[str] | None:
    """What a message speaks for; None if it is of no format at all."""
    if not isinstance(m, Mapping):
        return None
    t, who = kind(m), role(m)
    if t and t != "message":
        return {"responses"} if t in responses.TYPES else None
    if who not in _PLAIN_ROLES and who not in _CHAT_ROLES:
        return None
    found: set[str] = set()
    content = m.get("content")
    parts = {kind(b) for b in content} if isinstance(content, list) else set()
    # A response of Anthropic that was kept whole says so of itself; an item of Responses too, and it holds parts of its own.
    if t == "message" and not ("stop_reason" in m or parts & _ANTHROPIC_BLOCKS):
        found.add("responses")
    if "tool_calls" in m or "function_call" in m or who in _CHAT_ROLES - {"developer"} or parts & _CHAT_PARTS - {"refusal"}:
        found.add("chat")
    if parts & _RESPONSES_PARTS:
        found.add("responses")
    if parts & _ANTHROPIC_BLOCKS or any(p.endswith("_tool_result") for p in parts) or "stop_reason" in m:
        found.add("anthropic")
    return found


def _as(messages: Iterable[Any], context: Context) -> tuple[list[Any], str]:
    plain = plain_list(messages)
    if context.format:
        whole = all(isinstance(m, Mapping) for m in plain)
        return plain, context.format if whole else ""
    return plain, _detect(plain)


def check(messages: Iterable[Any], context: Context = NOTHING) -> list[Fault]:
    """All that a provider would say against a history, and notes on what makes replies worse; by message.

    One of no known format has no faults: an application may keep whatever it likes.
    """
    plain, format = _as(messages, context)
    if format not in _MODULES:
        return []
    return sorted(_MODULES[format].check(plain, context), key=lambda f: (f.index, f.rule))


def repair(messages: Sequence[Any], answers: Answers | Mapping[str, Any] | None = None, context: Context = NOTHING) -> Repaired:
    """A history that can be sent, made of one that ended in the middle of a turn. Nothing that was given is changed.

    Only the tail is touched, that is what comes after the last assistant turn, and that turn if it was cut off: it is left out
    then, whole. Each call of the turn that has no answer is given one, in the order of the calls.

    Args:
        answers: The real results that are known: a function of the open call that returns an ``Answer`` or None, or a mapping
            from call id to text (or ``Answer``). All others are answered with ``INTERRUPTED``.
        context: What is known beside the messages.
    """
    given = list(messages)
    plain, format = _as(given, context)
    if format == "plain":  # text alone is cut off if it says so, or has none
        cut = chat.mend(plain, _asker(answers), context)
        return Repaired([given[i] for i in cut.edit if isinstance(i, int)], format, tuple(cut.dropped))
    if format not in _MODULES:
        return Repaired(given, format)
    module = _MODULES[format]
    done = module.mend(plain, _asker(answers), context)
    mended = [given[e] if isinstance(e, int) else e for e in done.edit]
    seen = [plain[e] if isinstance(e, int) else e for e in done.edit]
    faults = tuple(sorted(module.check(seen, context), key=lambda f: (f.index, f.rule)))
    return Repaired(
        mended, format, tuple(sorted(done.dropped)), tuple(done.closed), tuple(done.recorded), done.moved, done.removed, faults
    )


def lasting(messages: Sequence[Any], context: Context = NOTHING) -> list[Fault]:
    """What a provider refuses and no repair of the tail mends; each with its index in ``messages``."""
    fixed = repair(messages, None, context)
    where = {id(m): i for i, m in enumerate(messages)}
    found = []
    for f in fixed.faults:
        if not f.note and f.rule != "A5":
            at = where.get(id(fixed.messages[f.index]), f.index) if f.index >= 0 else -1
            found.append(Fault(f.format, at, f.rule, f.why, f.remedy))
    return found


def _asker(answers: Answers | Mapping[str, Any] | None) -> Answers:
    if answers is None:
        return lambda o: None
    if isinstance(answers, Mapping):
        known: Mapping[str, Any] = answers

        def of(o: Open) -> Answer | None:
            found = known.get(o.id)
            return Answer(found) if isinstance(found, str) else found if isinstance(found, Answer) else None

        return of
    if not callable(answers):
        raise UsageError(
            "repair(answers=) must be a function or a mapping", f"it is {a_type(answers)}", "Pass {call_id: text}."
        )
    return answers


def trim(messages: Sequence[Any], keep: int, context: Context = NOTHING) -> list[Any]:
    """The newest messages of a history, at most ``keep``, cut where no call is parted from its result and no reasoning from its
    item. Messages are the objects that were given, in their order.

    What leads the history as ``system`` or ``developer`` stays in addition, and so does the first user message where the window
    would begin with the assistant: it is the job, and a history begins with the user. The last round is never cut, however
    long it is.

    Raises:
        UsageError: the format is not known; ``keep`` is no number; or the model binds its thinking to all that is before it (A13),
            so that a cut would be refused.
    """
    if type(keep) is not int or keep < 1:
        raise UsageError("trim(keep=) must be an int of at least 1", f"it is {keep if type(keep) is int else a_type(keep)}", "")
    given = list(messages)
    plain, format = _as(given, context)
    if not format:
        raise UsageError(
            "the messages are of no format that is known",
            "where they may be cut cannot be told",
            f"Pass Context(format=…), one of {', '.join(FORMATS)}.",
        )
    first = next((i for i, m in enumerate(plain) if role(m) not in _FIRST), len(plain))
    if format == "anthropic":
        first = 0
    if len(plain) - first <= keep:
        return given
    may = _MODULES.get(format, chat).starts(plain)
    want = len(plain) - keep
    at = next((i for i in range(want, len(plain)) if may[i]), None)
    if at is None:
        at = next((i for i in range(want - 1, first, -1) if may[i]), first)
    head = list(range(first))
    if role(plain[at]) != "user":
        head += [i for i in (next((k for k in range(first, at) if _is_job(plain[k])), None),) if i is not None]
    kept = [*head, *range(at, len(plain))]
    window = [given[i] for i in kept]
    if format == "anthropic" and len(kept) < len(plain) and context.binds and anthropic.has_thinking([plain[i] for i in kept]):
        raise UsageError(
            "a history with thinking blocks cannot be cut at the front",
            f"{context.model or 'the model'} binds them to all that is before them (rule A13)",
            "Send thinking.block_binding.prefix_mismatch_behavior='drop_block' and pass Context(preserved=False); or keep it whole.",
        )
    return window


def _is_job(m: Any) -> bool:
    content = m.get("content")
    return role(m) == "user" and not (isinstance(content, list) and any(kind(b) == "tool_result" for b in content))

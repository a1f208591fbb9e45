"""Anthropic Messages: rules A1 to A13, the repair of a tail, and where a window may begin.

The API joins consecutive messages of one role into a turn, so the rules about turns look at joined ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from safepoint.rules.history.base import (
    Answers,
    Context,
    Fault,
    Mending,
    Open,
    Plain,
    answered,
    crossing,
    fault,
    given,
    is_marked,
    kind,
    plain_list,
    role,
    rule,
    text_of,
)

A1 = rule("A1", "the first message is the user's, and there are at most 100,000", "Begin at a user message.")
A2 = rule(
    "A2", "each tool_use has its tool_result in the user turn right after it", "Put its result first in the next user message."
)
A3 = rule(
    "A3", "a tool_result answers a tool_use of the assistant turn before it, once", "Put it after its call, or take it out."
)
A4 = rule("A4", "ids of tool_use are unique, of letters, digits, _ and -", "Keep the ids that the model gave.")
A5 = rule("A5", "a model without prefill is sent a history that ends with the user", "Append what the user says next.")
A6 = rule("A6", "no message and no text block is empty, but a last assistant message", "Leave it out.")
A7 = rule("A7", "thinking blocks stay as they came, in order, with their signature", "Keep the blocks of a reply as they are.")
A8 = rule("A8", "the input of a tool_use is an object", "Keep the input that the model gave, as a dict.")
A9 = rule("A9", "messages have role and content alone, blocks the keys that are accepted", "Keep reply.content under its role.")
A10 = rule("A10", "a call that the server made has its result after it", "Keep both, or leave both out.")
A11 = rule("A11", "tool results stand first in a user turn", "Put text after the results.")
A12 = rule("A12", "no text stands after a tool_use in an assistant turn", "Keep the blocks in the order of the reply.")
A13 = rule("A13", "thinking blocks are bound to system, tools and all messages before them",
           "Send what they were made under; or set thinking.block_binding.prefix_mismatch_behavior to drop_block.")  # fmt: skip

MOST = 100_000
_ID = re.compile(r"[a-zA-Z0-9_-]+")
_THINKING = frozenset({"thinking", "redacted_thinking"})
_SERVER_CALLS = frozenset({"server_tool_use", "mcp_tool_use"})
KEYS = {
    "text": {"type", "text", "cache_control", "citations"},
    "thinking": {"type", "thinking", "signature"},
    "redacted_thinking": {"type", "data"},
    "tool_use": {"type", "id", "name", "input", "cache_control", "caller", "toolset_name"},
    "tool_result": {"type", "tool_use_id", "content", "is_error", "cache_control", "toolset_name"},
    "image": {"type", "source", "cache_control", "transformations"},
    "document": {"type", "source", "cache_control", "citations", "context", "title"},
    "server_tool_use": {"type", "id", "name", "input", "cache_control", "caller"},
}
"""Keys that a block may have, by the parameter types of anthropic 2.14; blocks of other types are not looked at."""


def blocks(message: Any) -> list[Any]:
    content = message.get("content")
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [b for b in content if isinstance(b, dict)] if isinstance(content, list) else []


def _is_server_result(block: Any) -> bool:
    return kind(block).endswith("_tool_result")


@dataclass(slots=True)
class _Turn:
    role: str
    messages: list[int] = field(default_factory=list)
    blocks: list[tuple[int, Any]] = field(default_factory=list)
    """Each with the index of its message."""

    def of(self, *types: str) -> list[tuple[int, Any]]:
        return [(i, b) for i, b in self.blocks if kind(b) in types]


def _turns(messages: Sequence[Plain]) -> list[_Turn]:
    found: list[_Turn] = []
    for i, m in enumerate(messages):
        if not found or found[-1].role != role(m):
            found.append(_Turn(role(m)))
        found[-1].messages.append(i)
        found[-1].blocks += [(i, b) for b in blocks(m)]
    return found


def _f(i: int, r: Any, why: str) -> Fault:
    return fault("anthropic", i, r, why)


def check(messages: Sequence[Plain], context: Context) -> Iterator[Fault]:
    turns = _turns(messages)
    if messages and role(messages[0]) != "user":
        yield _f(0, A1, f"the history begins with {role(messages[0]) or 'no role'}")
    if len(messages) > MOST:
        yield _f(-1, A1, f"it has {len(messages):,} messages")
    yield from _pairs(turns)
    yield from _server_pairs(turns)
    for n, turn in enumerate(turns):
        if turn.role == "user":
            other = False
            for i, b in turn.blocks:
                if kind(b) != "tool_result":
                    other = True
                elif other:
                    yield _f(i, A11, "a result stands after something else in its turn")
                    break
        elif turn.role == "assistant":
            used = False
            for i, b in turn.blocks:
                used |= kind(b) == "tool_use"
                if used and kind(b) == "text":
                    yield _f(i, A12, "text stands after a tool_use")
                    break
            if context.thinking and turn.of("tool_use") and n >= len(turns) - 2 and kind(turn.blocks[0][1]) not in _THINKING:
                yield _f(turn.messages[0], A7, "the turn calls tools and does not begin with its thinking")
    for i, m in enumerate(messages):
        yield from _message(i, m, last=i == len(messages) - 1)
    # A turn with calls of the server may be a paused one, which is sent back as it is.
    ends = bool(turns) and turns[-1].role == "assistant" and not turns[-1].of(*_SERVER_CALLS)
    if context.asking and ends and not context.has_prefill:
        yield _f(turns[-1].messages[-1], A5, "the history ends with the assistant")
    yield from _bound(messages, context)


def _pairs(turns: Sequence[_Turn]) -> Iterator[Fault]:
    seen: set[str] = set()
    asked: set[str] = set()
    for n, turn in enumerate(turns):
        if turn.role != "user":
            for i, _ in turn.of("tool_result"):
                yield _f(i, A3, f"a result stands in a message of the {turn.role or 'unknown'}")
        if turn.role == "assistant":
            calls = turn.of("tool_use")
            asked = {text_of(b.get("id")) for _, b in calls}
            for i, b in calls:
                id = text_of(b.get("id"))
                if not _ID.fullmatch(id):
                    yield _f(i, A4, "the id of a tool_use is missing, or has other characters")
                elif id in seen:
                    yield _f(i, A4, "a tool_use before it has its id")
                seen.add(id)
            after = turns[n + 1] if n + 1 < len(turns) and turns[n + 1].role == "user" else None
            found = {text_of(b.get("tool_use_id")) for _, b in after.of("tool_result")} if after else set()
            for i in dict.fromkeys(i for i, b in calls if text_of(b.get("id")) not in found):
                yield _f(i, A2, "a tool_use has no result in the user turn right after it")
            continue
        done: set[str] = set()
        for i, b in turn.of("tool_result") if turn.role == "user" else ():
            id = text_of(b.get("tool_use_id"))
            if id not in asked:
                yield _f(i, A3, "a result answers no tool_use of the assistant turn right before it")
            elif id in done:
                yield _f(i, A3, "its tool_use has a result already")
            done.add(id)
        asked = set()


def _server_pairs(turns: Sequence[_Turn]) -> Iterator[Fault]:
    open_: dict[str, int] = {}
    for turn in turns:
        if turn.role != "assistant":
            # Open ones are taken only while nothing but results of client tools comes after them.
            if open_ and any(kind(b) != "tool_result" for _, b in turn.blocks):
                for i in dict.fromkeys(open_.values()):
                    yield _f(i, A10, "a call of the server has no result")
                open_ = {}
            continue
        for i, b in turn.blocks:
            if kind(b) in _SERVER_CALLS:
                open_[text_of(b.get("id"))] = i
            elif _is_server_result(b) and open_.pop(text_of(b.get("tool_use_id")), None) is None:
                yield _f(i, A10, "a result of the server has no call before it")


def _message(i: int, m: Plain, *, last: bool) -> Iterator[Fault]:
    assistant = role(m) == "assistant"
    if not given(m.get("content")) and not (last and assistant):
        yield _f(i, A6, "it is empty")
    extra = sorted(str(k) for k in m if k not in ("role", "content"))
    if extra:
        yield _f(i, A9, f"it has the key {extra[0]}")
    for b in blocks(m) if isinstance(m.get("content"), list) else ():
        t = kind(b)
        if t == "text" and not given(b.get("text")):
            yield _f(i, A6, "a text block is empty")
        elif (t == "thinking" and not (isinstance(b.get("thinking"), str) and text_of(b.get("signature")))) or (
            t == "redacted_thinking" and not text_of(b.get("data"))
        ):
            yield _f(i, A7, "a thinking block is not whole")
        elif t == "tool_use" and not isinstance(b.get("input"), dict):
            yield _f(i, A8, "the input of a tool_use is no object")
        if t in KEYS and (more := sorted(str(k) for k in b if k not in KEYS[t])):
            yield _f(i, A9, f"a {t} block has the key {more[0]}")


def has_thinking(messages: Sequence[Plain]) -> bool:
    return any(kind(b) in _THINKING for m in messages for b in blocks(m))


def _last_thinking(messages: Sequence[Plain]) -> int:
    return next((i for i in range(len(messages) - 1, -1, -1) if any(kind(b) in _THINKING for b in blocks(messages[i]))), -1)


def _bound(messages: Sequence[Plain], context: Context) -> Iterator[Fault]:
    last = _last_thinking(messages)
    if last < 0:
        return
    if context.binds and context.prefix and context.kept_prefix and context.prefix != context.kept_prefix:
        yield _f(last, A13, "system or tools are not those that its thinking was made under")
    if context.before is None:
        return
    before = plain_list(context.before)
    for i, (old, new) in enumerate(zip(before, messages[: last + 1], strict=False)):
        if old == new:
            continue
        thought = [b for b in blocks(old) if kind(b) in _THINKING]
        if thought != [b for b in blocks(new) if kind(b) in _THINKING]:
            yield _f(i, A7, "its thinking blocks are not as they were")
        if context.binds:
            yield _f(i, A13, "it is not as it was when thinking after it was made")
        return


# -- repair


def _is_cut(m: Plain) -> bool:
    """Whether an assistant message was cut off; none of its calls is answered."""
    if is_marked(m) or not given(m.get("content")):
        return True
    return any(
        (kind(b) == "tool_use" and not (isinstance(b.get("input"), dict) and text_of(b.get("id")) and text_of(b.get("name"))))
        or (kind(b) == "thinking" and not (isinstance(b.get("thinking"), str) and text_of(b.get("signature"))))
        or (kind(b) == "redacted_thinking" and not text_of(b.get("data")))
        or (kind(b) == "text" and not given(b.get("text")))
        or (kind(b) in _SERVER_CALLS and not isinstance(b.get("input"), dict))
        or not kind(b)
        for b in blocks(m)
    )


def mend(messages: Sequence[Plain], answers: Answers, context: Context) -> Mending:
    order = list(range(len(messages)))
    done = Mending([*order])
    while True:
        last = next((k for k in range(len(order) - 1, -1, -1) if role(messages[order[k]]) == "assistant"), -1)
        if last < 0:
            break
        has = {
            text_of(b.get("tool_use_id")) for i in order[last + 1 :] for b in blocks(messages[i]) if kind(b) == "tool_result"
        }
        acted = any(kind(b) == "tool_use" and text_of(b.get("id")) in has for b in blocks(messages[order[last]]))
        if acted or not _is_cut(messages[order[last]]):
            break
        done.dropped.append(order.pop(last))
    begin = last
    while begin > 0 and role(messages[order[begin - 1]]) == "assistant":
        begin -= 1
    opened: list[Open] = []
    for i in order[max(begin, 0) : last + 1]:
        for b in blocks(messages[i]):
            id = text_of(b.get("id"))
            if kind(b) == "tool_use" and id and id not in {o.id for o in opened}:
                opened.append(Open(i, id, text_of(b.get("name")), b.get("input")))
    done.edit = [*order[: last + 1], *_after(messages, order[last + 1 :], opened, answers, done)]
    return done


def _after(
    messages: Sequence[Plain], rest: Sequence[int], opened: Sequence[Open], answers: Answers, done: Mending
) -> list[int | dict[str, Any]]:
    """What follows the last turn: its results first, each once."""
    wanted = {o.id for o in opened}
    first: set[str] = set()  # results that stand where they belong
    late: dict[str, Any] = {}
    kept: list[int | dict[str, Any]] = []
    other = False
    for i in rest:
        content = messages[i].get("content")
        if role(messages[i]) != "user" or not isinstance(content, list):
            other = True
            kept.append(i)
            continue
        left = []
        for b in content:
            if kind(b) != "tool_result":
                other = True
            else:
                id = text_of(b.get("tool_use_id"))
                if id not in wanted or id in first or id in late:
                    done.removed += 1
                    continue
                if other:
                    late[id] = b
                    done.moved += 1
                    continue
                first.add(id)
            left.append(b)
        if len(left) == len(content):
            kept.append(i)
        elif left:
            kept.append({**messages[i], "content": left})
    missing = []
    for o in opened:
        if o.id in late:
            missing.append(late[o.id])
        elif o.id not in first:
            said = answered(o, answers, done)
            result = {"type": "tool_result", "tool_use_id": o.id, "content": said.text}
            missing.append({**result, "is_error": True} if said.error else result)
    return [{"role": "user", "content": missing}, *kept] if missing else kept


# -- windows


def starts(messages: Sequence[Plain]) -> list[bool]:
    """For each index whether a window may begin there."""

    def pairs() -> Iterator[tuple[int, int]]:
        at: dict[str, int] = {}
        for i, m in enumerate(messages):
            for b in blocks(m):
                if kind(b) == "tool_result" or _is_server_result(b):
                    yield at.get(text_of(b.get("tool_use_id")), -1), i
                elif kind(b) == "tool_use" or kind(b) in _SERVER_CALLS:
                    at[text_of(b.get("id"))] = i
            if i and role(m) == "assistant" == role(messages[i - 1]):
                yield i - 1, i

    split = crossing(pairs(), len(messages))
    return [not s for s in split]

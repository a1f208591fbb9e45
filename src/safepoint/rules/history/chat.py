"""OpenAI Chat Completions: rules C1 to C9, the repair of a tail, and where a window may begin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    is_json,
    is_marked,
    kind,
    role,
    rule,
    text_of,
)

C1 = rule("C1", "each tool call is answered in the tool messages right after it", "Put its tool message right after the turn.")
C2 = rule("C2", "a tool message answers a call of the assistant message before it", "Put it after its call, or take it out.")
C3 = rule("C3", "a call has one answer", "Keep the first answer.")
C4 = rule("C4", "tool_calls is left out rather than empty or null", "Leave the key out.")
C5 = rule("C5", "an assistant message has content or calls", "Give it content, or take it out.")
C6 = rule("C6", "a call has an id of its own", "Keep the ids that the model gave.")
C7 = rule("C7", "a tool message has content: text, or parts of text", "Give it text, '' if there is none.")
C8 = rule("C8", "arguments are JSON text", "Keep the text as it came, and do not execute it.", note=True)
C9 = rule("C9", "a message has no keys that stand in replies alone", "Leave the key out when the reply is kept.")

_REPLY_ONLY = ("parsed", "annotations")


def _calls(message: Any) -> list[Any]:
    found = message.get("tool_calls") if role(message) == "assistant" else None
    return [c for c in found if isinstance(c, dict)] if isinstance(found, list) else []


def _ids(message: Any) -> list[str]:
    return [i for c in _calls(message) if (i := text_of(c.get("id")))]


def check(messages: Sequence[Plain], context: Context) -> Iterator[Fault]:
    asked: dict[str, bool] = {}  # ids of the assistant message before, and whether they are answered
    at, in_run = -1, False

    def left() -> Iterator[Fault]:
        n = sum(not done for done in asked.values())
        if n:
            yield _f(at, C1, f"{n} of its calls {'has' if n == 1 else 'have'} no answer right after it")

    for i, m in enumerate(messages):
        who = role(m)
        if who == "tool":
            yield from _tool(i, m)
            id = text_of(m.get("tool_call_id"))
            if not in_run or id not in asked:
                yield _f(i, C2, "it answers no call of the assistant message right before it")
            elif asked[id]:
                yield _f(i, C3, "its call has an answer already")
            else:
                asked[id] = True
            continue
        if in_run:
            yield from left()
        asked, in_run = {}, who == "assistant"
        if in_run:
            at = i
            asked = dict.fromkeys(_ids(m), False)
            yield from _assistant(i, m)
    if in_run:
        yield from left()


def _f(i: int, r: Any, why: str, *, note: bool | None = None) -> Fault:
    return fault("chat", i, r, why, note=note)


def _tool(i: int, m: Plain) -> Iterator[Fault]:
    content = m.get("content")
    if isinstance(content, list):
        if any(kind(p) != "text" for p in content):
            yield _f(i, C7, "its content has parts that are no text")
    elif not isinstance(content, str):
        yield _f(i, C7, "it has no content")


def _assistant(i: int, m: Plain) -> Iterator[Fault]:
    calls = _calls(m)
    if "tool_calls" in m and not calls:
        null = m["tool_calls"] is None
        yield _f(i, C4, f"its tool_calls is {'null' if null else 'empty'}", note=null)
    if not calls and _is_void(m):
        yield _f(i, C5, "it has neither content nor calls")
    ids = _ids(m)
    if len(ids) < len(calls):
        yield _f(i, C6, "a call has no id")
    if len(set(ids)) < len(ids):
        yield _f(i, C6, "two of its calls have one id")
    for c in calls:
        said = c.get("function")
        if isinstance(said, dict) and not is_json(said.get("arguments")):
            text = isinstance(said.get("arguments"), str)
            yield _f(i, C8, f"arguments of a call are no JSON{'' if text else ' text'}", note=text)
    for key in _REPLY_ONLY:
        if key in m:
            yield _f(i, C9, f"it has the key {key}, which only replies have")
    if "function_call" in m and m["function_call"] is None:
        yield _f(i, C9, "its function_call is null")


def _is_void(m: Plain) -> bool:
    """Whether a message says nothing and asks for nothing. '' is a way to say nothing that is taken."""
    content = m.get("content")
    return (content is None or (isinstance(content, list) and not content)) and not any(
        given(m.get(k)) for k in ("function_call", "audio", "refusal")
    )


# -- repair


def _opened(i: int, m: Plain) -> list[Open]:
    found, seen = [], set()
    for c in _calls(m):
        id = text_of(c.get("id"))
        if id and id not in seen:
            seen.add(id)
            type = kind(c) or "function"
            inner = c.get(type) if isinstance(c.get(type), dict) else {}
            name, arguments = inner.get("name", c.get("name")), inner.get("arguments", inner.get("input", c.get("arguments")))
            found.append(Open(i, id, text_of(name), arguments, type))
    return found


def _is_cut(m: Plain, answers: set[str]) -> bool:
    calls = _calls(m)
    if answers.intersection(_ids(m)):
        return False  # somebody has acted on it
    if is_marked(m):
        return True
    if not calls:
        return _is_void(m)
    wired = any("function" in c or "custom" in c for c in calls)
    return len(_ids(m)) < len(calls) or any(_is_cut_call(c, wired) for c in calls)


def _is_cut_call(c: Plain, wired: bool) -> bool:
    """Whether a call is not all there. Calls without ``function`` are an application's own way to keep them, unless others of the
    turn are as the API gives them (``wired``)."""
    if "custom" in c:
        return not isinstance(c["custom"], dict) or not isinstance(c["custom"].get("input"), str)
    said = c.get("function")
    if said is None:
        return wired or kind(c) == "function"
    return isinstance(said, dict) and not (isinstance(a := said.get("arguments"), dict) or is_json(a))


def mend(messages: Sequence[Plain], answers: Answers, context: Context) -> Mending:
    done = Mending(list(range(len(messages))))
    order: list[int] = list(range(len(messages)))
    while True:
        last = next((k for k in range(len(order) - 1, -1, -1) if role(messages[order[k]]) == "assistant"), None)
        if last is None or not _is_cut(messages[order[last]], _after(messages, order[last + 1 :])):
            break
        done.dropped.append(order.pop(last))
    head = [] if last is None else order[: last + 1]
    open_ = [] if last is None else _opened(order[last], messages[order[last]])
    tail = order[len(head) :]
    wanted = {o.id for o in open_}
    found: dict[str, int] = {}
    run: list[int] = []
    rest: list[int] = []
    for i in tail:
        if role(messages[i]) != "tool":
            rest.append(i)
            continue
        id = text_of(messages[i].get("tool_call_id"))
        if id not in wanted or id in found:
            done.removed += 1
            continue
        found[id] = i
        done.moved += bool(rest)
        run.append(i)
    new: list[int | dict[str, Any]] = [*head, *run]
    missing = [o for o in open_ if o.id not in found]
    new += [{"role": "tool", "tool_call_id": o.id, "content": answered(o, answers, done).text} for o in missing]
    done.edit = [*new, *rest]
    return done


def _after(messages: Sequence[Plain], rest: Sequence[int]) -> set[str]:
    return {text_of(messages[i].get("tool_call_id")) for i in rest if role(messages[i]) == "tool"}


# -- windows


def starts(messages: Sequence[Plain]) -> list[bool]:
    """For each index whether a window may begin there."""

    def pairs() -> Iterator[tuple[int, int]]:
        at: dict[str, int] = {}
        for i, m in enumerate(messages):
            if role(m) == "tool":
                yield at.get(text_of(m.get("tool_call_id")), -1), i
            at.update(dict.fromkeys(_ids(m), i))

    split = crossing(pairs(), len(messages))
    return [not split[i] and role(m) not in ("tool", "function") for i, m in enumerate(messages)]

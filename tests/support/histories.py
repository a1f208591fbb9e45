"""Valid histories of three providers, ways to cut one off, and providers that say what they refuse: written from the providers' rules
alone, and sharing no code with the product."""

import json

from hypothesis import strategies as st

__all__ = ["FORMATS", "cuts", "histories", "refusal"]

FORMATS = ("chat", "responses", "anthropic")

_text = st.text(min_size=1, max_size=6)
_args = st.dictionaries(
    st.text(max_size=3), st.one_of(st.integers(-9, 9), st.text(max_size=4), st.lists(st.booleans(), max_size=2)), max_size=2
)


@st.composite
def histories(draw, format, *, rounds=4, system=True):
    """A list of turns; each is a list of messages. The first of a model's turn is what the model said, as one or more items."""
    count = iter(range(10_000))
    turns = []
    if system and format != "anthropic" and draw(st.booleans()):
        turns.append([{"role": draw(st.sampled_from(["system", "developer"])), "content": draw(_text)}])
    turns.append([{"role": "user", "content": draw(_text)}])
    for _ in range(draw(st.integers(1, rounds))):
        calls = [(f"c{next(count)}", draw(_args)) for _ in range(draw(st.integers(0, 3)))]
        turns.append(_MAKE[format](draw, calls, count))
        if not calls or draw(st.booleans()):
            turns.append([{"role": "user", "content": draw(_text)}])
    if turns[-1][0].get("role") == "user":
        calls = [(f"c{next(count)}", draw(_args)) for _ in range(draw(st.integers(0, 3)))]
        turns.append(_MAKE[format](draw, calls, count))
    return turns


def _dump(draw, args):
    return json.dumps(args, ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 1])))


def _chat(draw, calls, count):
    said = draw(_text) if not calls or draw(st.booleans()) else None
    asked = [{"id": i, "type": "function", "function": {"name": "f", "arguments": _dump(draw, a)}} for i, a in calls]
    first = {"role": "assistant", "content": said, **({"tool_calls": asked} if asked else {})}
    return [first, *({"role": "tool", "tool_call_id": i, "content": draw(_text)} for i, _ in draw(st.permutations(calls)))]


def _responses(draw, calls, count):
    items = []
    if draw(st.booleans()):
        items.append({"id": f"rs_{next(count)}", "type": "reasoning", "summary": [], "encrypted_content": draw(_text)})
    if not calls or draw(st.booleans()):
        content = [{"type": "output_text", "text": draw(_text), "annotations": []}]
        items.append(
            {"id": f"msg_{next(count)}", "type": "message", "status": "completed", "role": "assistant", "content": content}
        )
    items += [
        {
            "id": f"fc_{next(count)}",
            "type": "function_call",
            "status": "completed",
            "name": "f",
            "call_id": i,
            "arguments": _dump(draw, a),
        }
        for i, a in calls
    ]
    results = [{"type": "function_call_output", "call_id": i, "output": draw(_text)} for i, _ in draw(st.permutations(calls))]
    return [*items, *results]


def _anthropic(draw, calls, count):
    blocks = []
    if draw(st.booleans()):
        blocks.append({"type": "thinking", "thinking": draw(st.sampled_from(["", "so"])), "signature": draw(_text)})
    if not calls or draw(st.booleans()):
        blocks.append({"type": "text", "text": draw(_text)})
    blocks += [{"type": "tool_use", "id": i, "name": "f", "input": a} for i, a in calls]
    results = [{"type": "tool_result", "tool_use_id": i, "content": draw(_text)} for i, _ in draw(st.permutations(calls))]
    if draw(st.booleans()):
        messages = [{"role": "user", "content": [r]} for r in results]
    else:
        messages = [{"role": "user", "content": results}] if results else []
    if messages and draw(st.booleans()):
        messages[-1] = {"role": "user", "content": [*messages[-1]["content"], {"type": "text", "text": draw(_text)}]}
    return [{"role": "assistant", "content": blocks}, *messages]


_MAKE = {"chat": _chat, "responses": _responses, "anthropic": _anthropic}


# -- cutting


def cuts(turn):
    """What is left of a turn that was cut off at each byte of it: of the model's part while it streams, then between its results."""
    said = [m for m in turn if m.get("role") == "assistant" or m.get("type") in ("reasoning", "function_call")]
    whole = json.dumps(said, ensure_ascii=False).encode()
    seen = set()
    for at in range(len(whole)):
        partial = _parse(whole[:at])
        left = [p for m in partial or [] if (p := _streamed(m)) is not None]
        key = json.dumps(left)
        if key not in seen:
            seen.add(key)
            yield left
    for n in range(len(said), len(turn) + 1):
        yield turn[:n]


_AT_ONCE = ("role", "type", "id", "call_id", "name", "tool_use_id")
"""What a stream gives whole or not at all."""


class _Part(str):
    """Text that was cut off."""


def _streamed(message):
    """A message as a loop has put it together of a stream that broke; None if it had not begun."""
    if not isinstance(message, dict):
        return None
    kept = {k: _whole(v) for k, v in message.items() if not (k in _AT_ONCE and isinstance(v, _Part))}
    if "type" not in kept and "role" not in kept:
        return None
    if "id" in message and message.get("type") == "message" and "role" not in kept:
        return None
    if kept.get("type") == "message" and "role" not in kept:
        return None
    if "tool_calls" in kept:
        # The first piece of a call has its id, its type and the name.
        begun = [c for c in kept.pop("tool_calls") or [] if "name" in c.get("function", {})]
        kept |= {"tool_calls": begun} if begun else {}
    return kept if "type" in kept or kept["role"] == "assistant" else None


def _whole(value):
    if isinstance(value, dict):
        return {k: _whole(v) for k, v in value.items() if not (k in _AT_ONCE and isinstance(v, _Part))}
    if isinstance(value, list):
        return [w for v in value if (w := _whole(v)) != {}]
    return str(value) if isinstance(value, _Part) else value


def _parse(data):
    """The value that stands in JSON which ends anywhere; None if there is none yet."""
    text = data.decode("utf-8", "ignore")
    value, _ = _value(text, _skip(text, 0))
    return value


def _skip(text, i):
    while i < len(text) and text[i] in " \n,:":
        i += 1
    return i


def _value(text, i):
    if i >= len(text):
        return None, i
    c = text[i]
    if c == "{":
        found: dict[str, object] = {}
        i = _skip(text, i + 1)
        while i < len(text) and text[i] != "}":
            key, i = _value(text, i)
            i = _skip(text, i)
            if isinstance(key, _Part) or i >= len(text):
                return found, len(text)
            found[key], i = _value(text, i)
            i = _skip(text, i)
        return found, i + 1
    if c == "[":
        items, i = [], _skip(text, i + 1)
        while i < len(text) and text[i] != "]":
            item, i = _value(text, i)
            items.append(item)
            i = _skip(text, i)
        return items, i + 1
    if c == '"':
        end = i + 1
        while end < len(text) and text[end] != '"':
            end += 2 if text[end] == "\\" else 1
        if end < len(text):
            return json.loads(text[i : end + 1]), end + 1
        raw = text[i + 1 :]
        while raw:
            try:
                return _Part(json.loads(f'"{raw}"')), len(text)
            except ValueError:
                raw = raw[:-1]
        return _Part(""), len(text)
    end = i
    while end < len(text) and text[end] not in ",]} \n":
        end += 1
    try:
        return json.loads(text[i:end]), end
    except ValueError:
        return None, len(text)


# -- providers


def refusal(format, messages):
    """What a provider says to a request with these messages; '' if it takes them."""
    try:
        _PROVIDERS[format](messages)
    except AssertionError as error:
        return str(error) or "refused"
    return ""


def _take_chat(messages):
    rest = list(messages)
    while rest:
        m = rest.pop(0)
        assert m["role"] != "tool", "tool message without a call"
        if m["role"] != "assistant":
            continue
        calls = m.get("tool_calls")
        assert calls is None or len(calls) > 0, "empty array"
        assert m.get("content") is not None or calls, "no content"
        due = sorted(c["id"] for c in calls or [])
        assert len(set(due)) == len(due), "duplicate id"
        for c in calls or []:
            json.loads(c["function"]["arguments"])
        given = []
        while rest and rest[0]["role"] == "tool":
            t = rest.pop(0)
            assert isinstance(t["content"], str), "no content"
            given.append(t["tool_call_id"])
        assert sorted(given) == due, "calls and answers differ"


def _take_responses(items):
    text = json.dumps([[m.get("type", "message"), m.get("role", "model"), m.get("call_id", "")] for m in items])
    for m in items:
        mine = m.get("call_id")
        if m.get("type") == "function_call":
            json.loads(m["arguments"])
            assert text.count(json.dumps(["function_call_output", "model", mine])) == 1, "no tool output"
        if m.get("type") == "function_call_output":
            before = text.split(json.dumps(["function_call_output", "model", mine]))[0]
            assert json.dumps(["function_call", "model", mine]) in before, "no tool call"
    for a, b in zip(items, [*items[1:], {"role": "user"}], strict=True):
        if a.get("type") == "reasoning":
            assert (b.get("role"), b.get("type")) not in (("user", None), (None, "function_call_output")), "reasoning alone"
    ids = [m["id"] for m in items if "id" in m]
    assert len(ids) == len(set(ids)), "duplicate item"


def _take_anthropic(messages):
    assert [m["role"] for m in messages[:1]] == ["user"], "first message"
    turns: list[tuple[str, list[dict]]] = []
    for m in messages:
        assert set(m) == {"role", "content"}, "extra inputs"
        assert m["content"], "empty content"
        content = [{"type": "text", "text": m["content"]}] if isinstance(m["content"], str) else m["content"]
        if turns and turns[-1][0] == m["role"]:
            turns[-1][1].extend(content)
        else:
            turns.append((m["role"], list(content)))
    used = []
    due: set[str] = set()
    for who, content in turns:
        kinds = [b["type"] for b in content]
        for b in content:
            assert b["type"] != "text" or b["text"], "empty text"
            assert b["type"] != "thinking" or b["signature"], "signature"
        results = [b["tool_use_id"] for b in content if b["type"] == "tool_result"]
        if who == "user":
            assert sorted(results) == sorted(due), "results and calls differ"
            assert kinds[: len(results)] == ["tool_result"] * len(results), "results first"
            due = set()
        else:
            assert (due, results) == (set(), []), "calls without results"
            calls = [b for b in content if b["type"] == "tool_use"]
            assert all(isinstance(b["input"], dict) for b in calls), "input"
            assert not calls or kinds[-len(calls) :] == ["tool_use"] * len(calls), "text after tool_use"
            due = {b["id"] for b in calls}
            used += [b["id"] for b in calls]
    assert not due, "calls without results"
    assert len(used) == len(set(used)), "ids not unique"


_PROVIDERS = {"chat": _take_chat, "responses": _take_responses, "anthropic": _take_anthropic}

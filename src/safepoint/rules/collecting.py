"""When is a stream of chunks a reply, and what reply is it? Pure.

Knows what OpenAI Chat Completions, OpenAI Responses and Anthropic Messages stream, as the SDKs' objects and as the dicts of the wire.
A reply is whole once its stop reason has come: every choice's ``finish_reason``, the event ``response.completed`` or
``response.incomplete``, ``message_stop`` after a ``stop_reason``. Anything less is no reply, however complete it looks.

The parts are put together as they came: texts and ``arguments`` are joined and never parsed into something else, unknown fields of a
vendor are kept. (The SDKs have accumulators of their own. They give a cut tool input as a complete one, pass over what they do not
know, and take time that grows with the square of the reply; tests hold the replies of both against each other.)

``replayed`` is the way back: chunks that a recorded reply may have come in. Collected, they are that reply again.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

from safepoint.codec.registry import sdk_of
from safepoint.codec.sdk import wire
from safepoint.errors import UsageError

__all__ = ["Anthropic", "Chat", "Collector", "Listed", "Responses", "asked_for", "collector_for", "is_stream", "replayed"]


@runtime_checkable
class Collector(Protocol):
    """What may be given as ``collect=`` for chunks of another kind; one for each stream, so usually a class.

    It may also have ``chunks(reply)``, which gives the chunks that a recorded reply is passed on in; without, there are none.
    """

    def add(self, chunk: Any) -> bool:
        """Take a chunk. True once the stop reason has come: from then on the reply is whole."""
        ...

    def reply(self) -> Any:
        """The reply, to be recorded. Asked for once it is whole; if this raises, there is none."""
        ...


class Listed:
    """A function from all chunks to the reply, as a collector: whole when the stream ends by itself."""

    def __init__(self, fn: Callable[[list[Any]], Any]) -> None:
        self._fn = fn
        self._chunks: list[Any] = []

    def add(self, chunk: Any) -> bool:
        self._chunks.append(chunk)
        return False

    def reply(self) -> Any:
        return self._fn(self._chunks)


def is_stream(value: Any) -> bool:
    """Whether a model's function returned chunks to come, and not a reply."""
    return hasattr(type(value), "__next__") or hasattr(type(value), "__anext__")


def asked_for(fn: Callable[..., Any], args: Any, kwargs: Any) -> int:
    """How many choices a model is asked for, as far as that stands in its function's arguments: ``n``, also as a default or in a
    mapping of parameters. 1 if nothing is said."""
    try:
        bound = inspect.signature(fn).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return 1
    bound.apply_defaults()
    given = [bound.arguments, *(value for value in bound.arguments.values() if isinstance(value, Mapping))]
    said = [n for mapping in given if type(n := mapping.get("n")) is int]
    return max([1, *said])


def collector_for(chunk: Any, n: int = 1) -> Chat | Responses | Anthropic:
    """The collector that knows this first chunk; ``n``: of how many choices."""
    tree, own = _tree(chunk), sdk_of(type(chunk)) is not None
    if tree.get("object") == "chat.completion.chunk":
        return Chat(ChatClasses if own else None, n)
    kind = tree.get("type")
    if isinstance(kind, str) and kind.partition(".")[0] in ("response", "error") and "message" not in tree:
        return Responses(ResponsesClasses if own else None)
    if kind in ("message_start", "ping"):
        beta = type(chunk).__module__.startswith("anthropic.types.beta")
        return Anthropic((BetaClasses if beta else AnthropicClasses) if own else None)
    raise UsageError(
        f"a stream of {type(chunk).__module__}.{type(chunk).__qualname__} cannot be collected",
        "its chunks are none of OpenAI Chat Completions, OpenAI Responses or Anthropic Messages",
        "Give run.stream a collect=: a function from the list of chunks to the reply, or a Collector.",
    )


def _tree(chunk: Any) -> dict[str, Any]:
    tree = wire(chunk)
    return tree if isinstance(tree, dict) else {}


class _Classes:
    """Where the SDK's class for each kind of object is. None are imported before one is made."""

    def __init__(self, package: str, reply: str, of: Mapping[str, str]) -> None:
        self.package = package
        self.reply = reply
        self.of = of

    def make(self, kind: str, tree: dict[str, Any]) -> Any:
        name = self.reply if kind == "" else self.of.get(kind)
        if name is None:
            return tree
        return getattr(importlib.import_module(self.package), name).construct(**tree)  # as the SDK makes what it receives


ChatClasses = _Classes("openai.types.chat", "ChatCompletion", {"chunk": "ChatCompletionChunk"})
ResponsesClasses = _Classes(
    "openai.types.responses",
    "Response",
    {
        "response.created": "ResponseCreatedEvent",
        "response.output_item.added": "ResponseOutputItemAddedEvent",
        "response.content_part.added": "ResponseContentPartAddedEvent",
        "response.output_text.delta": "ResponseTextDeltaEvent",
        "response.output_text.done": "ResponseTextDoneEvent",
        "response.refusal.delta": "ResponseRefusalDeltaEvent",
        "response.refusal.done": "ResponseRefusalDoneEvent",
        "response.content_part.done": "ResponseContentPartDoneEvent",
        "response.function_call_arguments.delta": "ResponseFunctionCallArgumentsDeltaEvent",
        "response.function_call_arguments.done": "ResponseFunctionCallArgumentsDoneEvent",
        "response.output_item.done": "ResponseOutputItemDoneEvent",
        "response.completed": "ResponseCompletedEvent",
        "response.incomplete": "ResponseIncompleteEvent",
    },
)
_RAW = {
    "message_start": "RawMessageStartEvent",
    "content_block_start": "RawContentBlockStartEvent",
    "content_block_delta": "RawContentBlockDeltaEvent",
    "content_block_stop": "RawContentBlockStopEvent",
    "message_delta": "RawMessageDeltaEvent",
    "message_stop": "RawMessageStopEvent",
}
AnthropicClasses = _Classes("anthropic.types", "Message", _RAW)
BetaClasses = _Classes("anthropic.types.beta", "BetaMessage", {kind: f"Beta{name}" for kind, name in _RAW.items()})


class _Known:
    def __init__(self, classes: _Classes | None) -> None:
        self._classes = classes

    def _make(self, tree: dict[str, Any]) -> Any:
        return tree if self._classes is None else self._classes.make("", tree)


# Chat Completions

_OVERWRITTEN = ("role", "id", "type", "index")  # whole each time they come; everything else that is text comes in pieces


class Chat(_Known):
    def __init__(self, classes: _Classes | None = None, n: int = 1) -> None:
        super().__init__(classes)
        self._n = n
        self._whole: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}

    def add(self, chunk: Any) -> bool:
        for key, value in _tree(chunk).items():
            if key == "choices":
                for choice in value or ():
                    self._choice(choice)
            elif value is not None or key not in self._whole:  # the usage comes once, and nulls before and after it
                self._whole[key] = value
        return bool(self._choices) and all(c["finish_reason"] is not None for c in self._choices.values())

    def lacks_none(self) -> bool:
        """Whether as many choices have begun as were asked for. Until then another one may be on its way though all that have begun
        have ended; only the end of the stream tells. (Some servers give one, whatever ``n`` is.)"""
        return len(self._choices) == self._n

    def _choice(self, choice: dict[str, Any]) -> None:
        index = choice.get("index") or 0
        mine = self._choices.setdefault(index, {"index": index, "message": {}, "logprobs": None, "finish_reason": None})
        for key, value in choice.items():
            if key == "delta":
                _merge(mine["message"], value or {})
            elif key == "logprobs" and value is not None:
                mine[key] = mine[key] or {}
                _merge(mine[key], value)
            elif value is not None or key not in mine:
                mine[key] = value

    def reply(self) -> Any:
        choices = []
        for _, choice in sorted(self._choices.items()):
            message = {k: v for k, v in choice["message"].items() if v is not None or k not in ("tool_calls", "function_call")}
            if calls := message.pop("tool_calls", None):
                # The index is of the stream, not of the message, and the API refuses an empty list.
                calls = sorted(calls, key=lambda c: c.get("index") or 0)
                message["tool_calls"] = [{k: v for k, v in c.items() if k != "index"} for c in calls]
            choices.append({**choice, "message": message})
        whole = {k: v for k, v in self._whole.items() if v is not None or k not in ("usage", "system_fingerprint")}
        return self._make({**whole, "object": "chat.completion", "choices": choices})


def _merge(into: dict[str, Any], delta: Mapping[str, Any]) -> None:
    for key, piece in delta.items():
        held = into.get(key)
        if piece is None:
            into.setdefault(key, None)
        elif held is None and isinstance(piece, list):
            into[key] = []
            _append(into[key], piece)
        elif held is None and isinstance(piece, dict):
            into[key] = {}
            _merge(into[key], piece)
        elif held is None or key in _OVERWRITTEN:
            into[key] = piece
        elif isinstance(held, str) and isinstance(piece, str):
            into[key] = held + piece
        elif isinstance(held, dict) and isinstance(piece, dict):
            _merge(held, piece)
        elif isinstance(held, list) and isinstance(piece, list):
            _append(held, piece)
        else:
            into[key] = piece


def _append(held: list[Any], pieces: list[Any]) -> None:
    """Entries with an index are parts of the one that has it already; any others are new."""
    for piece in pieces:
        index = piece.get("index") if isinstance(piece, dict) else None
        same = next((h for h in held if index is not None and isinstance(h, dict) and h.get("index") == index), None)
        if same is not None:
            _merge(same, piece)
        elif isinstance(piece, dict):
            held.append({})
            _merge(held[-1], piece)
        else:
            held.append(piece)


# Responses


class Responses(_Known):
    def __init__(self, classes: _Classes | None = None) -> None:
        super().__init__(classes)
        self._response: dict[str, Any] = {}
        self._items: dict[int, Any] = {}

    def add(self, chunk: Any) -> bool:
        tree = _tree(chunk)
        match tree.get("type"):
            case "response.output_item.done":
                self._items[tree["output_index"]] = tree["item"]
            case "response.completed" | "response.incomplete":
                self._response = tree["response"]
                if not self._response.get("output"):  # some servers name the items only as they come
                    self._response = {**self._response, "output": [item for _, item in sorted(self._items.items())]}
            case "response.failed":
                error = tree.get("response", {}).get("error") or {}
                raise ConnectionError(f"the response failed: {error.get('code')}: {error.get('message')}")
            case "error":
                raise ConnectionError(f"the stream ended with an error: {tree.get('code')}: {tree.get('message')}")
        return bool(self._response)

    def reply(self) -> Any:
        return self._make(self._response)


# Anthropic Messages


class Anthropic(_Known):
    def __init__(self, classes: _Classes | None = None) -> None:
        super().__init__(classes)
        self._message: dict[str, Any] = {}
        self._inputs: dict[int, list[str]] = {}
        self._stopped = False

    def add(self, chunk: Any) -> bool:
        tree = _tree(chunk)
        kind = tree.get("type")
        if kind == "message_start":
            self._message = {**tree["message"], "content": list(tree["message"].get("content") or ())}
        elif kind == "error":
            error = tree.get("error") or {}
            raise ConnectionError(f"the stream ended with an error: {error.get('type')}: {error.get('message')}")
        elif kind == "content_block_start":
            block = tree["content_block"]
            self._message["content"].append(dict(block))
            if block.get("type") == "fallback":  # names the model that has taken over
                self._message["model"] = block["to"]["model"]
        elif kind == "content_block_delta":
            self._delta(tree["index"], tree["delta"])
        elif kind == "content_block_stop":
            self._block_stop(tree["index"])
        elif kind == "message_delta":
            self._message_delta(tree)
        elif kind == "message_stop":
            self._stopped = self._message.get("stop_reason") is not None
        return self._stopped

    def _delta(self, index: int, delta: dict[str, Any]) -> None:
        block, kind = self._message["content"][index], delta.get("type")
        if kind == "text_delta":
            block["text"] = (block.get("text") or "") + delta["text"]
        elif kind == "thinking_delta":
            block["thinking"] = (block.get("thinking") or "") + delta["thinking"]
        elif kind == "input_json_delta":
            self._inputs.setdefault(index, []).append(delta["partial_json"])
        elif kind == "citations_delta":
            block["citations"] = [*(block.get("citations") or ()), delta["citation"]]
        elif kind in ("signature_delta", "compaction_delta"):
            block.update({k: v for k, v in delta.items() if k != "type"})
        else:
            # To leave it out would be to record less than the model has said, and nobody would know.
            raise UsageError(
                f"a content_block_delta of type {str(kind)[:60]!r} cannot be collected",
                "this version of safepoint does not know what it is to become",
                "Update safepoint, ask without stream=True, or give run.stream a collect=.",
            )

    def _block_stop(self, index: int) -> None:
        text = "".join(self._inputs.pop(index, ()))
        if not text:
            return
        try:
            self._message["content"][index]["input"] = json.loads(text)
        except ValueError:
            # A model that ran out of tokens in the middle of a tool's input. What is there may look complete, and is not.
            raise ValueError(f"the input of tool call {index} is cut off or no JSON; was max_tokens reached?") from None

    def _message_delta(self, tree: dict[str, Any]) -> None:
        beside = {k: v for k, v in tree.items() if k not in ("type", "delta", "usage")}
        for key, value in {**tree.get("delta", {}), **beside}.items():
            if value is not None or key in self._message:
                self._message[key] = value
        usage = {k: v for k, v in (tree.get("usage") or {}).items() if v is not None}
        self._message["usage"] = {**(self._message.get("usage") or {}), **usage}

    def reply(self) -> Any:
        return self._make(self._message)


# Back into chunks


def replayed(reply: Any) -> list[Any]:
    """Chunks that a recorded reply may have come in, of the same classes as live ones: each text in one piece. Empty where it is no
    reply of a kind that is known."""
    tree = reply if isinstance(reply, dict) else reply.to_dict(mode="json", warnings=False) if _is_sdk(reply) else {}
    classes: _Classes | None
    if tree.get("object") == "chat.completion":
        classes, events = ChatClasses, list(_chat_chunks(tree))
    elif tree.get("object") == "response":
        classes, events = ResponsesClasses, list(_response_events(tree))
    elif tree.get("type") == "message" and "usage" in tree:
        classes, events = AnthropicClasses, list(_message_events(tree))
        if type(reply).__module__.startswith("anthropic.types.beta"):
            classes = BetaClasses
    else:
        return []
    if not _is_sdk(reply):
        return events
    return [classes.make(event.get("type", "chunk"), event) for event in events]


def _is_sdk(value: Any) -> bool:
    return sdk_of(type(value)) is not None and hasattr(value, "to_dict")


def _chat_chunks(tree: dict[str, Any]) -> Iterable[dict[str, Any]]:
    head = {**{k: v for k, v in tree.items() if k not in ("choices", "usage")}, "object": "chat.completion.chunk"}
    pieces, ends = [], []
    for choice in tree["choices"]:
        delta = dict(choice["message"])
        if calls := delta.get("tool_calls"):
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
        rest = {k: v for k, v in choice.items() if k not in ("message", "finish_reason")}
        pieces.append({**rest, "delta": delta, "finish_reason": None})
        ends.append({"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"], "logprobs": None})
    yield {**head, "choices": pieces}
    yield {**head, "choices": ends}
    if tree.get("usage") is not None:
        yield {**head, "choices": [], "usage": tree["usage"]}


def _response_events(tree: dict[str, Any]) -> Iterable[dict[str, Any]]:
    number = iter(range(1 << 30))

    def event(kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": f"response.{kind}", "sequence_number": next(number), **fields}

    yield event("created", response={**tree, "status": "in_progress", "output": []})
    for i, item in enumerate(tree.get("output") or ()):
        at = {"item_id": item.get("id"), "output_index": i}
        open_ = {**item, "content": []} if item.get("type") == "message" else item
        open_ = {**item, "arguments": ""} if item.get("type") == "function_call" else open_
        yield event("output_item.added", output_index=i, item=open_)
        for j, part in enumerate(item.get("content") or ()) if item.get("type") == "message" else ():
            kind, text = ("output_text", "text") if part.get("type") == "output_text" else (part.get("type"), part.get("type"))
            yield event("content_part.added", **at, content_index=j, part={**part, text: ""} if text in part else part)
            if kind in ("output_text", "refusal"):
                logprobs: dict[str, Any] = {"logprobs": []} if kind == "output_text" else {}
                yield event(f"{kind}.delta", **at, content_index=j, delta=part[text], **logprobs)
                yield event(f"{kind}.done", **at, content_index=j, **{text: part[text]}, **logprobs)
            yield event("content_part.done", **at, content_index=j, part=part)
        if item.get("type") == "function_call":
            yield event("function_call_arguments.delta", **at, delta=item["arguments"])
            yield event("function_call_arguments.done", **at, name=item.get("name"), arguments=item["arguments"])
        yield event("output_item.done", output_index=i, item=item)
    yield event("incomplete" if tree.get("status") == "incomplete" else "completed", response=tree)


def _message_events(tree: dict[str, Any]) -> Iterable[dict[str, Any]]:
    yield {"type": "message_start", "message": {**tree, "content": [], "stop_reason": None, "stop_sequence": None}}
    for i, block in enumerate(tree["content"]):
        start, deltas = dict(block), list[dict[str, Any]]()
        kind = block.get("type")
        if kind == "text":
            start["text"] = ""
            deltas.append({"type": "text_delta", "text": block["text"]})
            if block.get("citations"):
                start["citations"] = []
                deltas += [{"type": "citations_delta", "citation": citation} for citation in block["citations"]]
        elif kind == "thinking":
            start |= {"thinking": "", "signature": ""}
            deltas.append({"type": "thinking_delta", "thinking": block["thinking"]})
            deltas.append({"type": "signature_delta", "signature": block.get("signature", "")})
        elif isinstance(block.get("input"), dict) and block["input"]:
            start["input"] = {}
            deltas.append({"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)})
        yield {"type": "content_block_start", "index": i, "content_block": start}
        yield from ({"type": "content_block_delta", "index": i, "delta": delta} for delta in deltas)
        yield {"type": "content_block_stop", "index": i}
    stop = {key: tree.get(key) for key in ("stop_reason", "stop_sequence")}
    yield {"type": "message_delta", "delta": stop, "usage": {"output_tokens": (tree.get("usage") or {}).get("output_tokens")}}
    yield {"type": "message_stop"}

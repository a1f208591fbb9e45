"""What streams are replies, and which ones: against hand-made streams, and against the SDKs' own accumulators."""

import json
from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from anthropic.types.beta import BetaMessage, BetaRawMessageStartEvent
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

import safepoint
from safepoint.errors import UsageError
from safepoint.rules.collecting import Anthropic, Chat, Collector, Listed, Responses, collector_for, replayed
from tests.support import sse

KINDS: dict[str, tuple[list[dict[str, Any]], dict[str, Any], Any, Any]] = {
    "chat": (sse.CHAT, sse.CHAT_REPLY, TypeAdapter(ChatCompletionChunk), ChatCompletion),
    "responses": (sse.RESPONSES, sse.RESPONSES_REPLY, TypeAdapter(ResponseStreamEvent), Response),
    "anthropic": (sse.ANTHROPIC, sse.ANTHROPIC_REPLY, TypeAdapter(RawMessageStreamEvent), Message),
}


def collected(chunks: list[Any]) -> tuple[Any, int]:
    """The reply, and after how many chunks it was whole."""
    collector = collector_for(chunks[0])
    whole = [collector.add(chunk) for chunk in chunks]
    assert whole == sorted(whole)
    return collector.reply(), whole.index(True) + 1


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_are_the_reply_as_dicts_and_as_objects(kind):
    chunks, reply, adapter, cls = KINDS[kind]
    assert collected(chunks) == (reply, len(chunks) - (kind == "chat"))  # the usage of a completion comes after its end
    objects = [_object(adapter, chunk) for chunk in chunks]
    made, at = collected(objects)
    assert type(made) is cls
    assert made.to_dict(mode="json", warnings=False) == reply
    assert at == len(chunks) - (kind == "chat")
    # Texts and arguments as they came, in the order of their keys.
    assert json.dumps(made.to_dict(mode="json", warnings=False)).count("  ") == json.dumps(reply).count("  ") > 1


def _object(adapter: Any, chunk: dict[str, Any]) -> Any:
    if chunk.get("type") == "ping":  # which the SDK passes over
        return chunk
    return adapter.validate_python(chunk)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_that_is_cut_anywhere_is_no_reply(kind):
    chunks = KINDS[kind][0]
    whole = len(chunks) - (kind == "chat")
    for n in range(1, len(chunks) + 1):
        collector = collector_for(chunks[0])
        assert [collector.add(c) for c in chunks[:n]] == [i + 1 >= whole for i in range(n)]
    if kind == "anthropic":  # a stop reason alone is not the end of a message, nor is the end without one
        collector = collector_for(chunks[0])
        assert not any(collector.add(c) for c in chunks if c["type"] != "message_delta")


def bare(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {k: bare(v) for k, v in tree.items() if v is not None and k not in ("index", "parsed_arguments")}
    return [bare(item) for item in tree] if isinstance(tree, list) else tree


def test_as_the_sdks_accumulate():
    state = ChatCompletionStreamState()
    for chunk in sse.CHAT:
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
    # Theirs has nulls that the provider did not send, an index in each tool call, and parsed_arguments.
    theirs = bare(state.get_final_completion().choices[0].message.to_dict(warnings=False))
    ours = collected([ChatCompletionChunk.model_validate(c) for c in sse.CHAT])[0].choices[0].message
    assert bare(safepoint.wire(ours)) == theirs

    snapshot: Any = None
    bufs: dict[int, bytes] = {}
    adapter: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
    for event in sse.ANTHROPIC:
        if event["type"] != "ping":
            snapshot = accumulate_event(event=adapter.validate_python(event), current_snapshot=snapshot, json_bufs=bufs)
    assert safepoint.wire(snapshot) == safepoint.wire(
        collected([adapter.validate_python(sse.ANTHROPIC[0]), *sse.ANTHROPIC[1:]])[0]
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_reply_goes_back_into_chunks_and_out_again(kind):
    chunks, reply, adapter, cls = KINDS[kind]
    again = replayed(reply)
    assert len(again) > 2
    assert collected(again)[0] == reply
    made = cls.construct(**reply)
    objects = replayed(made)
    live = {type(_object(adapter, chunk)) for chunk in chunks}
    assert {type(o) for o in objects} <= live  # a consumer meets nothing that it does not meet live
    assert collected(objects)[0] == made
    texts = {
        "chat": lambda c: [x["delta"].get("content") or "" for x in c["choices"]],
        "responses": lambda c: [c["delta"]] if c["type"] == "response.output_text.delta" else [],
        "anthropic": lambda c: [c["delta"]["text"]] if c.get("delta", {}).get("type") == "text_delta" else [],
    }[kind]
    shown = ["".join(t for c in some for t in texts(c)) for some in (chunks, again)]
    assert shown[0] == shown[1] != ""


def test_beta_messages_and_unknown_things():
    start = BetaRawMessageStartEvent.construct(**sse.ANTHROPIC[0])
    reply, _ = collected([start, *sse.ANTHROPIC[1:]])
    assert type(reply) is BetaMessage
    assert {type(o).__module__.split(".")[2] for o in replayed(reply)} == {"beta"}
    assert replayed({"text": "x"}) == replayed(7) == []
    for first in ({"type": "text", "text": "x"}, "text", 7, {"object": "chat.completion"}, b"data: {}"):
        with pytest.raises(UsageError, match="collect="):
            collector_for(first)
    collector = collector_for(sse.ANTHROPIC[0])
    collector.add(sse.ANTHROPIC[0])
    collector.add({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}})
    with pytest.raises(UsageError, match="hologram_delta"):  # never silently less than was said
        collector.add({"type": "content_block_delta", "index": 0, "delta": {"type": "hologram_delta", "x": 1}})
    assert isinstance(Listed(list), Collector)
    assert not isinstance(list, Collector)


def test_a_tool_input_that_is_cut_off_is_no_input():
    """It is a whole message by its stop reason, and ``{"x": 12`` would look like a whole input."""
    events = [e for e in sse.ANTHROPIC if "null]" not in json.dumps(e)]
    collector = collector_for(events[0])
    with pytest.raises(ValueError, match="max_tokens"):
        [collector.add(e) for e in events]


def test_what_vendors_do_to_chat_chunks():
    chat = Chat()
    say = lambda *choices, **more: {"object": "chat.completion.chunk", "choices": list(choices), **more}  # noqa: E731
    for n in range(3):  # a role and an id in each chunk; nulls for what is absent
        delta = {"role": "assistant", "content": f"{n}", "tool_calls": None, "function_call": None}
        assert not chat.add(say({"index": 0, "delta": delta, "finish_reason": None}, id="i", usage=None))
    chat.add(say({"index": 0, "delta": {"audio": {"id": "a", "data": "AA", "expires_at": 5}}, "finish_reason": None}))
    chat.add(say({"index": 0, "delta": {"audio": {"data": "BB", "expires_at": 6}}, "finish_reason": None}))
    chat.add(say({"index": 0, "delta": {"details": [{"index": 0, "text": "a"}, {"index": 0, "text": "b"}, {"plain": 1}, 7]}}))
    lp = {"content": [{"token": "x", "logprob": -1.0}], "refusal": None}
    chat.add(say({"index": 0, "delta": {}, "logprobs": lp}))
    chat.add(say({"index": 0, "delta": {}, "logprobs": lp}))
    assert not chat.add(say({"index": 1, "delta": {"content": "other"}, "finish_reason": None}))
    assert not chat.add(say({"index": 0, "delta": {}, "finish_reason": "stop"}, usage={"prompt_tokens": 1}))
    assert chat.add(say({"index": 1, "delta": {}, "finish_reason": "length"}, usage=None))
    reply = chat.reply()
    first, second = reply["choices"]
    assert first["message"] == {
        "role": "assistant", "content": "012", "audio": {"id": "a", "data": "AABB", "expires_at": 6},
        "details": [{"index": 0, "text": "ab"}, {"plain": 1}, 7],
    }  # fmt: skip
    assert [t["token"] for t in first["logprobs"]["content"]] == ["x", "x"]
    assert second["message"] == {"content": "other"}
    assert (first["finish_reason"], second["finish_reason"], reply["usage"]) == ("stop", "length", {"prompt_tokens": 1})


def test_responses_that_are_incomplete_or_failed():
    incomplete = {**sse.RESPONSES_REPLY, "status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    events = [*sse.RESPONSES[:-1], {"type": "response.incomplete", "response": incomplete}]
    assert collected(events) == (incomplete, len(events))
    assert collected(replayed(incomplete))[0] == incomplete
    bare = [*sse.RESPONSES[:-1], {"type": "response.completed", "response": {**sse.RESPONSES_REPLY, "output": []}}]
    assert collected(bare)[0] == sse.RESPONSES_REPLY
    failed = {"type": "response.failed", "response": {"error": {"code": "server_error", "message": "sorry"}}}
    for end in (failed, {"type": "error", "code": "server_error", "message": "sorry"}):
        with pytest.raises(ConnectionError, match="sorry"):
            [Responses().add(e) for e in [*sse.RESPONSES[:3], end]]
    with pytest.raises(ConnectionError, match="Overloaded"):
        Anthropic().add({"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}})


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_transports_send_is_what_was_meant(kind):
    """The hand-made streams pass through the SDKs' own parsers."""
    events = KINDS[kind][0]
    closed: list[str] = []

    def ask(cut: int | None = None) -> list[Any]:
        return list(sse.ask(kind, sse.client(kind, lambda: sse.body(events, cut=cut), [], closed), []))

    assert [e.to_dict(mode="json", warnings=False) for e in ask()] == [e for e in events if e.get("type") != "ping"]
    assert closed
    with pytest.raises(Exception, match="onnection"):
        ask(cut=4)

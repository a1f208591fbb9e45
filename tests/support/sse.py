"""What the three APIs stream, by hand: chunks and events in pieces as the providers cut them, the replies that they are, and SDK clients
over a transport that sends them."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx2
import openai

__all__ = ["ANTHROPIC", "ANTHROPIC_REPLY", "CHAT", "CHAT_REPLY", "RESPONSES", "RESPONSES_REPLY", "ask", "body", "client"]


def _chat(*choices: Any, **more: Any) -> dict[str, Any]:
    return {"id": "c1", "object": "chat.completion.chunk", "created": 7, "model": "m", "choices": list(choices), **more}


def _delta(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}


USAGE = {"prompt_tokens": 11, "completion_tokens": 5, "total_tokens": 16}
CHAT: list[dict[str, Any]] = [
    _chat(_delta(role="assistant", content="", refusal=None), system_fingerprint="fp"),
    _chat(_delta(reasoning_content="I th")),
    _chat(_delta(reasoning_content="ink.")),
    _chat(_delta(content="Let m")),
    _chat(_delta(content="e  see\n")),
    _chat(_delta(tool_calls=[{"index": 0, "id": "call_0", "type": "function", "function": {"name": "add", "arguments": ""}}])),
    _chat(_delta(tool_calls=[{"index": 0, "function": {"arguments": '{"x": '}}])),
    _chat(_delta(tool_calls=[{"index": 1, "id": "call_1", "type": "function", "function": {"name": "mul", "arguments": ""}}])),
    _chat(_delta(tool_calls=[{"index": 0, "function": {"arguments": " 12}"}}])),
    _chat(_delta(tool_calls=[{"index": 1, "function": {"arguments": "{}"}}])),
    _chat(_delta("tool_calls")),
    _chat(usage=USAGE),
]
CHAT_REPLY: dict[str, Any] = {
    "id": "c1", "object": "chat.completion", "created": 7, "model": "m", "system_fingerprint": "fp", "usage": USAGE,
    "choices": [
        {
            "index": 0, "logprobs": None, "finish_reason": "tool_calls",
            "message": {
                "role": "assistant", "content": "Let me  see\n", "refusal": None, "reasoning_content": "I think.",
                "tool_calls": [
                    {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": '{"x":  12}'}},
                    {"id": "call_1", "type": "function", "function": {"name": "mul", "arguments": "{}"}},
                ],
            },
        }
    ],
}  # fmt: skip

_TEXT = {"type": "output_text", "text": "Hello  you", "annotations": [], "logprobs": []}
_ITEMS: list[dict[str, Any]] = [
    {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gA=="},
    {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [_TEXT]},
    {
        "type": "function_call",
        "id": "fc_1",
        "call_id": "call_1",
        "name": "add",
        "arguments": '{"x":  1}',
        "status": "completed",
    },
]
RESPONSES_REPLY: dict[str, Any] = {
    "id": "resp_1", "object": "response", "created_at": 7.0, "model": "m", "status": "completed", "error": None,
    "incomplete_details": None, "instructions": None, "metadata": {}, "parallel_tool_calls": True, "temperature": 1.0,
    "tool_choice": "auto", "tools": [], "top_p": 1.0, "output": _ITEMS,
    "usage": {
        "input_tokens": 3, "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0}, "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 1}, "total_tokens": 7,
    },
}  # fmt: skip
_BEGUN = {**RESPONSES_REPLY, "status": "in_progress", "output": [], "usage": None}


def _events() -> Iterator[dict[str, Any]]:
    at: dict[str, Any] = {"item_id": "msg_1", "output_index": 1}
    part: dict[str, Any] = {**at, "content_index": 0}
    call: dict[str, Any] = {"item_id": "fc_1", "output_index": 2}
    yield {"type": "response.created", "response": _BEGUN}
    yield {"type": "response.in_progress", "response": _BEGUN}
    yield {"type": "response.output_item.added", "output_index": 0, "item": _ITEMS[0]}
    yield {"type": "response.output_item.done", "output_index": 0, "item": _ITEMS[0]}
    yield {
        "type": "response.output_item.added",
        "output_index": 1,
        "item": {**_ITEMS[1], "status": "in_progress", "content": []},
    }
    yield {"type": "response.content_part.added", **part, "part": {**_TEXT, "text": ""}}
    yield {"type": "response.output_text.delta", **part, "delta": "Hello ", "logprobs": []}
    yield {"type": "response.output_text.delta", **part, "delta": " you", "logprobs": []}
    yield {"type": "response.output_text.done", **part, "text": "Hello  you", "logprobs": []}
    yield {"type": "response.content_part.done", **part, "part": _TEXT}
    yield {"type": "response.output_item.done", "output_index": 1, "item": _ITEMS[1]}
    yield {
        "type": "response.output_item.added",
        "output_index": 2,
        "item": {**_ITEMS[2], "status": "in_progress", "arguments": ""},
    }
    yield {"type": "response.function_call_arguments.delta", **call, "delta": '{"x": '}
    yield {"type": "response.function_call_arguments.delta", **call, "delta": " 1}"}
    yield {"type": "response.function_call_arguments.done", **call, "name": "add", "arguments": '{"x":  1}'}
    yield {"type": "response.output_item.done", "output_index": 2, "item": _ITEMS[2]}
    yield {"type": "response.completed", "response": RESPONSES_REPLY}


RESPONSES = [{**event, "sequence_number": i} for i, event in enumerate(_events())]


def _block(index: int, start: dict[str, Any], *deltas: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"type": "content_block_start", "index": index, "content_block": start},
        *({"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas),
        {"type": "content_block_stop", "index": index},
    ]


_START: dict[str, Any] = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "c",
    "content": [],
    "stop_reason": None,
    "stop_sequence": None,
}
ANTHROPIC: list[dict[str, Any]] = [
    {"type": "message_start", "message": {**_START, "usage": {"input_tokens": 9, "output_tokens": 1}}},
    {"type": "ping"},
    *_block(
        0,
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "thinking_delta", "thinking": "Hm "},
        {"type": "thinking_delta", "thinking": " …"},
        {"type": "signature_delta", "signature": "EqQBCkYI+/=="},
    ),
    *_block(1, {"type": "redacted_thinking", "data": "EmwK=="}),
    *_block(2, {"type": "text", "text": ""}, {"type": "text_delta", "text": "I "}, {"type": "text_delta", "text": " add."}),
    *_block(
        3,
        {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {}},
        {"type": "input_json_delta", "partial_json": ""},
        {"type": "input_json_delta", "partial_json": '{"y": 12'},
        {"type": "input_json_delta", "partial_json": '3, "x": [1.0, 1, true, null]}'},
    ),
    *_block(4, {"type": "tool_use", "id": "toolu_2", "name": "now", "input": {}}),
    {"type": "message_delta", "delta": {"stop_reason": "tool_use", "stop_sequence": None}, "usage": {"output_tokens": 77}},
    {"type": "message_stop"},
]
ANTHROPIC_REPLY: dict[str, Any] = {
    **_START,
    "stop_reason": "tool_use",
    "usage": {"input_tokens": 9, "output_tokens": 77},
    "content": [
        {"type": "thinking", "thinking": "Hm  …", "signature": "EqQBCkYI+/=="},
        {"type": "redacted_thinking", "data": "EmwK=="},
        {"type": "text", "text": "I  add."},
        {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"y": 123, "x": [1.0, 1, True, None]}},
        {"type": "tool_use", "id": "toolu_2", "name": "now", "input": {}},
    ],
}


def body(events: list[dict[str, Any]], *, cut: int | None = None, done: bool = True) -> Iterator[bytes]:
    """Server-sent events. ``cut``: the connection breaks after so many."""
    for i, event in enumerate(events):
        if i == cut:
            raise httpx2.ReadError("the connection broke")
        kind = f"event: {event['type']}\n" if "type" in event else ""
        yield f"{kind}data: {json.dumps(event)}\n\n".encode()
    if cut is not None:
        raise httpx2.ReadError("the connection broke")
    if done and "type" not in events[0]:
        yield b"data: [DONE]\n\n"


class _Body(httpx2.SyncByteStream, httpx2.AsyncByteStream):
    def __init__(self, chunks: Iterator[bytes], closed: list[str]) -> None:
        self.chunks = chunks
        self.closed = closed

    def __iter__(self) -> Iterator[bytes]:
        return self.chunks

    async def __aiter__(self) -> Any:
        for chunk in self.chunks:
            yield chunk

    def close(self) -> None:
        self.closed.append("sync")

    async def aclose(self) -> None:
        self.closed.append("async")


def client(
    kind: str, answer: Callable[[], Iterator[bytes]], sent: list[Any], closed: list[str], *, is_async: bool = False
) -> Any:
    """An SDK client whose every request is answered with what ``answer`` streams. ``sent`` gets the bodies of requests, ``closed``
    an entry for each connection that was given back."""

    def handle(request: httpx2.Request) -> httpx2.Response:
        sent.append(json.loads(request.content))
        return httpx2.Response(200, headers={"content-type": "text/event-stream"}, stream=_Body(answer(), closed))

    async def ahandle(request: httpx2.Request) -> httpx2.Response:
        return handle(request)

    transport = httpx2.MockTransport(ahandle if is_async else handle)
    http = (httpx2.AsyncClient if is_async else httpx2.Client)(transport=transport)
    if kind == "anthropic":
        made: Any = anthropic.AsyncAnthropic if is_async else anthropic.Anthropic
        return made(api_key="none", base_url="http://mock", max_retries=0, http_client=http)
    made = openai.AsyncOpenAI if is_async else openai.OpenAI
    return made(api_key="none", base_url="http://mock/v1", max_retries=0, http_client=http)


def ask(kind: str, client: Any, messages: list[Any]) -> Any:
    """Ask one of the three APIs for a stream."""
    if kind == "chat":
        return client.chat.completions.create(model="m", messages=messages, stream=True)
    if kind == "responses":
        return client.responses.create(model="m", input=messages, stream=True)
    return client.messages.create(model="m", max_tokens=9, messages=messages, stream=True)

"""A stand-in for the Messages API, on the transport mock of the SDK's own HTTP library: no network, no key.

What it answers depends on the history that it is sent and on nothing else, as with a real model; it streams in small pieces. The
ids are new in each reply. Each request is a line of ``requests.jsonl`` before it is answered, so that one can see afterwards what
was asked, and how often. The SDK above it is the real one: in your program leave ``http_client`` out and give your key.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
from anthropic import Anthropic

LOG = Path("requests.jsonl")
PACE = float(os.environ.get("PACE", "0.02"))


def piece(number: int, last: int) -> None:
    """Before each piece of a reply but the first; a test may kill the process here."""
    time.sleep(PACE)


def in_two(text: str) -> tuple[str, str]:
    half = len(text) // 2
    return text[:half], text[half:]


def logged(request: httpx2.Request) -> tuple[dict[str, Any], int]:
    """The request's body, written down, and how many there were before it."""
    body = json.loads(request.content)
    line = json.dumps(body) + "\n"
    with LOG.open("a+", encoding="utf-8") as file:
        file.seek(0)
        number = len(file.readlines())
        file.write(line)
        file.flush()
        os.fsync(file.fileno())
    return body, number


def said(history: list[dict[str, Any]], number: int) -> list[dict[str, Any]]:
    """The blocks that the model answers a history with. Each thought is signed."""

    def use(i: int, name: str, given: dict[str, Any]) -> dict[str, Any]:
        return {"type": "tool_use", "id": f"toolu_{number}_{i}", "name": name, "input": given}

    thought = {"type": "thinking", "thinking": f"This is my thought {number}.", "signature": f"EqQB{number}+/=="}
    blocks = [b for message in history if isinstance(message["content"], list) for b in message["content"]]
    answers = [b["content"] for b in blocks if b["type"] == "tool_result"]
    turns = sum(message["role"] == "assistant" for message in history)
    if turns == 0:
        return [thought, use(0, "stock", {"item": "lamp"}), use(1, "stock", {"item": "cable"})]
    if turns == 1:
        hidden = {"type": "redacted_thinking", "data": f"EmwK{number}=="}
        return [thought, hidden, {"type": "text", "text": "I order."}, use(0, "place_order", {"item": "lamp", "count": 3})]
    return [thought, {"type": "text", "text": f"Done: {answers[-1]}."}]


def events(history: list[dict[str, Any]], number: int) -> Iterator[dict[str, Any]]:
    blocks = said(history, number)
    start: dict[str, Any] = {
        "id": f"msg_{number}", "type": "message", "role": "assistant", "model": "mock", "content": [], "stop_reason": None,
        "stop_sequence": None, "usage": {"input_tokens": 10 * len(history), "output_tokens": 1},
    }  # fmt: skip
    yield {"type": "message_start", "message": start}
    for i, block in enumerate(blocks):
        begun: dict[str, Any] = {"text": {"text": ""}, "thinking": {"thinking": "", "signature": ""}, "tool_use": {"input": {}}}
        yield {"type": "content_block_start", "index": i, "content_block": {**block, **begun.get(block["type"], {})}}
        deltas: list[dict[str, Any]] = []
        if block["type"] == "text":
            deltas = [{"type": "text_delta", "text": part} for part in in_two(block["text"])]
        elif block["type"] == "thinking":
            deltas = [{"type": "thinking_delta", "thinking": part} for part in in_two(block["thinking"])]
            deltas.append({"type": "signature_delta", "signature": block["signature"]})
        elif block["type"] == "tool_use":
            deltas = [{"type": "input_json_delta", "partial_json": part} for part in in_two(json.dumps(block["input"]))]
        yield from ({"type": "content_block_delta", "index": i, "delta": delta} for delta in deltas)
        yield {"type": "content_block_stop", "index": i}
    reason = "tool_use" if blocks[-1]["type"] == "tool_use" else "end_turn"
    yield {"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": None}, "usage": {"output_tokens": 7}}
    yield {"type": "message_stop"}


class Body(httpx2.SyncByteStream):
    def __init__(self, events: list[dict[str, Any]]) -> None:
        self.events = events

    def __iter__(self) -> Iterator[bytes]:
        for number, event in enumerate(self.events):
            if number:
                piece(number, len(self.events) - 1)
            yield f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()


def handle(request: httpx2.Request) -> httpx2.Response:
    body, number = logged(request)
    return httpx2.Response(
        200, headers={"content-type": "text/event-stream"}, stream=Body(list(events(body["messages"], number)))
    )


client = Anthropic(api_key="none", http_client=httpx2.Client(transport=httpx2.MockTransport(handle)), max_retries=0)

"""A stand-in for the Responses API, on the transport mock of the SDK's own HTTP library: no network, no key.

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
from openai import OpenAI

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
    """The items that the model answers a history with."""

    def call(i: int, name: str, arguments: str) -> dict[str, Any]:
        id, call_id = f"fc_{number}_{i}", f"call_{number}_{i}"
        return {
            "type": "function_call",
            "id": id,
            "call_id": call_id,
            "name": name,
            "arguments": arguments,
            "status": "completed",
        }

    thought = {"type": "reasoning", "id": f"rs_{number}", "summary": [], "encrypted_content": f"gAAAA{number}=="}
    answers = [item["output"] for item in history if item.get("type") == "function_call_output"]
    turns = sum(item.get("type") == "reasoning" for item in history)
    if turns == 0:
        return [thought, call(0, "stock", '{"item":  "lamp"}'), call(1, "stock", '{"item":  "cable"}')]
    if turns == 1:
        return [thought, call(0, "place_order", '{"item":  "lamp", "count": 3}')]
    text = {"type": "output_text", "text": f"Done: {answers[-1]}.", "annotations": [], "logprobs": []}
    message = {"type": "message", "id": f"msg_{number}", "role": "assistant", "status": "completed", "content": [text]}
    return [thought, message]


def events(history: list[dict[str, Any]], number: int) -> Iterator[dict[str, Any]]:
    items = said(history, number)
    whole = {
        "id": f"resp_{number}", "object": "response", "created_at": 1.0, "model": "mock", "status": "completed", "error": None,
        "incomplete_details": None, "instructions": None, "metadata": {}, "parallel_tool_calls": True, "temperature": 1.0,
        "tool_choice": "auto", "tools": [], "top_p": 1.0, "output": items,
        "usage": {
            "input_tokens": 10 * len(history), "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": 7, "output_tokens_details": {"reasoning_tokens": 3}, "total_tokens": 10 * len(history) + 7,
        },
    }  # fmt: skip
    yield {"type": "response.created", "response": {**whole, "status": "in_progress", "output": [], "usage": None}}
    for i, item in enumerate(items):
        at = {"item_id": item["id"], "output_index": i}
        begun: dict[str, dict[str, Any]] = {"message": {"content": []}, "function_call": {"arguments": ""}}
        started = begun.get(item["type"], {})
        yield {"type": "response.output_item.added", "output_index": i, "item": {**item, **started}}
        if item["type"] == "message":
            part = {**at, "content_index": 0}
            yield {"type": "response.content_part.added", **part, "part": {**item["content"][0], "text": ""}}
            for text in in_two(item["content"][0]["text"]):
                yield {"type": "response.output_text.delta", **part, "delta": text, "logprobs": []}
        if item["type"] == "function_call":
            for text in in_two(item["arguments"]):
                yield {"type": "response.function_call_arguments.delta", **at, "delta": text}
        yield {"type": "response.output_item.done", "output_index": i, "item": item}
    yield {"type": "response.completed", "response": whole}


class Body(httpx2.SyncByteStream):
    def __init__(self, events: list[dict[str, Any]]) -> None:
        self.events = events

    def __iter__(self) -> Iterator[bytes]:
        for number, event in enumerate(self.events):
            if number:
                piece(number, len(self.events) - 1)
            yield f"event: {event['type']}\ndata: {json.dumps({**event, 'sequence_number': number})}\n\n".encode()


def handle(request: httpx2.Request) -> httpx2.Response:
    body, number = logged(request)
    return httpx2.Response(200, headers={"content-type": "text/event-stream"}, stream=Body(list(events(body["input"], number))))


client = OpenAI(api_key="none", http_client=httpx2.Client(transport=httpx2.MockTransport(handle)), max_retries=0)

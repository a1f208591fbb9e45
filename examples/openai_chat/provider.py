"""A stand-in for the Chat Completions API, on the transport mock of the SDK's own HTTP library: no network, no key.

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


def said(history: list[dict[str, Any]], number: int) -> tuple[str, list[tuple[str, str, str]]]:
    """What the model says to a history: text, and calls as (id, name, arguments)."""
    turns = sum(message["role"] == "assistant" for message in history)
    answers = [message["content"] for message in history if message["role"] == "tool"]
    if turns == 0:
        calls = [("stock", '{"item":  "lamp"}'), ("stock", '{"item":  "cable"}')]
        return "I look what is there.", [(f"call_{number}_{i}", name, given) for i, (name, given) in enumerate(calls)]
    if turns == 1:
        return "", [(f"call_{number}_0", "place_order", '{"item":  "lamp", "count": 3}')]
    return f"Done: {answers[-1]}.", []


def events(history: list[dict[str, Any]], number: int) -> Iterator[dict[str, Any]]:
    def chunk(finish: str | None = None, **delta: Any) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        head = {"id": f"chatcmpl-{number}", "object": "chat.completion.chunk", "created": 1, "model": "mock"}
        return {**head, "choices": [choice]}

    text, calls = said(history, number)
    yield chunk(role="assistant", content="" if text else None, refusal=None)
    for part in in_two(text):
        yield chunk(content=part)
    for i, (id, name, arguments) in enumerate(calls):
        yield chunk(tool_calls=[{"index": i, "id": id, "type": "function", "function": {"name": name, "arguments": ""}}])
        for part in in_two(arguments):
            yield chunk(tool_calls=[{"index": i, "function": {"arguments": part}}])
    yield chunk("tool_calls" if calls else "stop")
    usage = {"prompt_tokens": 10 * len(history), "completion_tokens": 7, "total_tokens": 10 * len(history) + 7}
    yield {**chunk(), "choices": [], "usage": usage}


class Body(httpx2.SyncByteStream):
    def __init__(self, events: list[dict[str, Any]]) -> None:
        self.events = events

    def __iter__(self) -> Iterator[bytes]:
        for number, event in enumerate(self.events):
            if number:
                piece(number, len(self.events) - 1)
            yield f"data: {json.dumps(event)}\n\n".encode()
        yield b"data: [DONE]\n\n"


def handle(request: httpx2.Request) -> httpx2.Response:
    body, number = logged(request)
    return httpx2.Response(
        200, headers={"content-type": "text/event-stream"}, stream=Body(list(events(body["messages"], number)))
    )


client = OpenAI(api_key="none", http_client=httpx2.Client(transport=httpx2.MockTransport(handle)), max_retries=0)

"""A complete agent on Anthropic Messages, with thinking: streamed replies, tools that read, and one that writes and can be asked whether it did.

Run it with ``python examples/anthropic_messages/agent.py``. Kill it wherever you like and start it again: what was on record is not asked
for again, a reply that was cut off is, and the order is placed once. It leaves ``anthropic_messages.db``, ``requests.jsonl`` (what the model was
asked) and ``orders.jsonl`` (what became of it in the world). The model is a stand-in, see provider.py; the SDK is the real one.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from provider import client  # type: ignore[import-not-found]  # in your program: client = Anthropic()

import safepoint
from safepoint import Call, Done, NotDone, Run, model, tool

ORDERS = Path("orders.jsonl")


def was_it_placed(call: Call) -> Done | NotDone:
    for line in ORDERS.read_text(encoding="utf-8").splitlines() if ORDERS.exists() else ():
        order = json.loads(line)
        if order["key"] == call.idempotency_key:
            return Done(f"order {order['number']}")
    return NotDone()


@tool(effect="write", verify=was_it_placed, settle_after=0)  # a file of this machine is settled at once
def place_order(item: str, count: int, *, idempotency_key: str) -> str:
    number = len(ORDERS.read_text(encoding="utf-8").splitlines()) + 1 if ORDERS.exists() else 1
    line = json.dumps({"key": idempotency_key, "number": number, "item": item, "count": count}) + "\n"
    with ORDERS.open("a", encoding="utf-8") as file:
        file.write(line)
        file.flush()
        os.fsync(file.fileno())
    return f"order {number}"


@tool(effect="read")
def stock(item: str) -> str:
    return {"lamp": "12 pieces", "cable": "none"}[item]


TOOLS = {"place_order": place_order, "stock": stock}


def function(name: str, **properties: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {k: {"type": v} for k, v in properties.items()}, "required": list(properties)}
    return {"name": name, "input_schema": schema}


FUNCTIONS = [function("stock", item="string"), function("place_order", item="string", count="integer")]


@model
def ask(messages: list[Any]) -> Any:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    return client.messages.create(
        model="claude-sonnet-5-5", max_tokens=4096, messages=messages, tools=FUNCTIONS, thinking=thinking, stream=True
    )


def step(run: Run) -> None:
    stream = run.stream(ask, run.state.messages)
    for event in stream:
        if event.type == "content_block_delta" and event.delta.type == "text_delta":
            print(event.delta.text, end="", flush=True)
    print()
    message = stream.reply()
    # The blocks as they came: the thinking ones are signed, and must go back as they are.
    run.state.messages.append({"role": "assistant", "content": message.content})
    results = []
    for block in message.content:
        if block.type == "tool_use":
            result = run.call_tool(TOOLS[block.name], block.input, call_id=block.id)
            results.append({"type": "tool_result", "tool_use_id": block.id, "content": result})
    if results:
        run.state.messages.append({"role": "user", "content": results})
    else:
        run.finish(message.content[-1].text)


def main() -> None:
    outcome = safepoint.run_agent(step, task_id="lamps", input="Order three lamps.", store="sqlite:///anthropic_messages.db")
    print(f"{outcome.status} after {outcome.steps} steps: {outcome.result}")


if __name__ == "__main__":
    main()

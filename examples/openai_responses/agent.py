"""A complete agent on OpenAI Responses: streamed replies, tools that read, and one that writes and can be asked whether it did.

Run it with ``python examples/openai_responses/agent.py``. Kill it wherever you like and start it again: what was on record is not asked
for again, a reply that was cut off is, and the order is placed once. It leaves ``openai_responses.db``, ``requests.jsonl`` (what the model was
asked) and ``orders.jsonl`` (what became of it in the world). The model is a stand-in, see provider.py; the SDK is the real one.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from provider import client  # type: ignore[import-not-found]  # in your program: client = OpenAI()

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
    parameters = {"type": "object", "properties": {k: {"type": v} for k, v in properties.items()}, "required": list(properties)}
    return {"type": "function", "name": name, "parameters": parameters, "strict": False}


FUNCTIONS = [function("stock", item="string"), function("place_order", item="string", count="integer")]


@model
def ask(items: list[Any]) -> Any:
    # Nothing is left at the provider: a stored response expires there, and a checkpoint must not.
    keep = ["reasoning.encrypted_content"]
    return client.responses.create(model="gpt-5", input=items, tools=FUNCTIONS, store=False, include=keep, stream=True)


def step(run: Run) -> None:
    stream = run.stream(ask, run.state.messages)
    for event in stream:
        if event.type == "response.output_text.delta":
            print(event.delta, end="", flush=True)
    print()
    response = stream.reply()
    run.state.messages += safepoint.wire(response.output)  # every item, in order
    calls = [item for item in response.output if item.type == "function_call"]
    for call in calls:
        result = run.call_tool(TOOLS[call.name], call.arguments, call_id=call.call_id)
        run.state.messages.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
    if not calls:
        run.finish(response.output_text)


def main() -> None:
    outcome = safepoint.run_agent(step, task_id="lamps", input="Order three lamps.", store="sqlite:///openai_responses.db")
    print(f"{outcome.status} after {outcome.steps} steps: {outcome.result}")


if __name__ == "__main__":
    main()

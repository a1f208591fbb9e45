"""A LangGraph agent that may be killed at any moment: ``create_agent`` on a SafepointSaver, its tools and its model journaled.

Run it with ``python examples/langgraph_agent/agent.py``. Kill it wherever you like and start it again: it goes on from the last superstep,
replies of the model that were on record are not asked for again, and each order is placed once. It leaves ``graph.db``, ``requests.jsonl`` (what
the model was asked) and ``orders.jsonl`` (what became of it in the world). The model is a stand-in that needs no network.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import tool

import safepoint
from safepoint import Call, Done, NotDone
from safepoint.adapters.langgraph import SafepointSaver, ToolJournal, current_call

ORDERS, REQUESTS = Path("orders.jsonl"), Path("requests.jsonl")
ITEMS = ("lamp", "cable", "desk", "chair")


def append(path: Path, line: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def was_it_placed(call: Call) -> Done | NotDone:
    found = [order for order in lines(ORDERS) if order["key"] == call.idempotency_key]
    return Done(f"order for {found[0]['item']}") if found else NotDone()


@safepoint.tool(effect="write", verify=was_it_placed, settle_after=0)  # a file of this machine is settled at once
def placing(item: str) -> str:
    call = current_call()
    append(ORDERS, {"key": call.idempotency_key if call else "", "item": item})
    return f"order for {item}"


@tool
def place_order(item: str) -> str:
    """Order an item."""
    time.sleep(0.02)
    return placing.fn(item)


@tool
def stock(item: str) -> str:
    """How many there are."""
    return f"12 of {item}"


class StandIn(BaseChatModel):
    """Looks up each item and orders it, one after the other."""

    @property
    def _llm_type(self) -> str:
        return "stand-in"

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self

    def _generate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        append(REQUESTS, {"messages": len(messages)})
        done = [message.name for message in messages if isinstance(message, ToolMessage)]
        turn = len(done) // 2
        if turn == len(ITEMS):
            reply = AIMessage(f"ordered {', '.join(ITEMS)}")
        else:
            item = {"item": ITEMS[turn]}
            calls = [
                {"name": name, "args": item, "id": f"{name}_{turn}", "type": "tool_call"} for name in ("stock", "place_order")
            ]
            reply = AIMessage("", tool_calls=calls)
        return ChatResult(generations=[ChatGeneration(message=reply)])


def main() -> None:
    with SafepointSaver("sqlite:///graph.db") as saver:
        journal = ToolJournal(saver, tools={"stock": "read", "place_order": placing})
        agent = create_agent(StandIn(), tools=[stock, place_order], checkpointer=saver, middleware=[journal.middleware()])
        config: Any = {"configurable": {"thread_id": "orders"}}
        begun = agent.get_state(config).values
        state = agent.invoke(None if begun else {"messages": [("user", "Order what is on the list.")]}, config)
        print(state["messages"][-1].content)


if __name__ == "__main__":
    main()

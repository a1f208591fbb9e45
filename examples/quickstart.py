"""The smallest whole agent: one model, one tool that acts, one store.

Kill it wherever you like and start it again: the same ``task_id`` carries on after the last whole step, a model reply that is on
record is not asked for again, and before the note is written a second time its verifier is asked. Started once more after its
end, it returns the stored outcome. Run it with ``python examples/quickstart.py``; it leaves ``quickstart.db`` and ``outbox/``.
"""

from pathlib import Path

import safepoint
from safepoint import Call, Done, NotDone, Run, model, tool


@model
def ask(messages: list) -> dict:  # stands for your model's client; any reply of plain data will do
    if messages[-1]["role"] == "user":
        return {"role": "assistant", "tool_calls": [{"id": "call_0", "arguments": {"to": "ann", "text": "Lunch at one?"}}]}
    return {"role": "assistant", "content": "Ann has been asked."}


def was_it_sent(call: Call) -> Done | NotDone:
    note = Path("outbox") / f"{call.idempotency_key}.txt"
    return Done(note.name) if note.exists() else NotDone()


@tool(effect="write", verify=was_it_sent)
def send(to: str, text: str, *, idempotency_key: str) -> str:
    note = Path("outbox") / f"{idempotency_key}.txt"
    note.parent.mkdir(exist_ok=True)
    draft = note.with_suffix(".draft")
    draft.write_text(f"To: {to}\n\n{text}\n")
    draft.rename(note)  # there as a whole or not at all, so that the verifier can tell
    return note.name


def step(run: Run) -> None:
    reply = run.call(ask, run.state.messages)
    run.state.messages.append(reply)
    for call in reply.get("tool_calls", []):
        result = run.call_tool(send, call["arguments"], call_id=call["id"])
        run.state.messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    if not reply.get("tool_calls"):
        run.finish(reply["content"])


if __name__ == "__main__":
    outcome = safepoint.run_agent(step, task_id="lunch", input="Ask Ann to lunch.", store="sqlite:///quickstart.db")
    print(f"{outcome.status} after {outcome.steps} steps: {outcome.result}")

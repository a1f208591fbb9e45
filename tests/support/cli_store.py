"""Fills a store with tasks of every sort, in a process of its own: the command line must do without the classes made here.

Run as a file: ``python cli_store.py URL``.
"""

import dataclasses
import enum
import json
import sys
from datetime import UTC, datetime

import safepoint
from safepoint import State

HOSTILE = [
    "two\nlines",
    "\x1b[31mred\x1b[0m\x1b]0;title\x07",
    "[bold]no markup[/bold] :smile:",
    "back\\slash 'quote' \"double\" $HOME `id`",
    "\u202eright to left",
    "c1 \x9b31m del \x7f tab\t cr\r sep\u2028",
    "-starts-with-a-dash",
    "  blanks at both ends ",
    "日本語のタスク 🚀",
    "at@7",
    "$'looks quoted'",
    "x" * 512,
]


@safepoint.register
class Phase(enum.Enum):
    COLLECT = "collect"


@safepoint.register
@dataclasses.dataclass
class Memo:
    phase: Phase
    due: datetime
    notes: list


@safepoint.model
def ask(messages: list) -> dict:
    return {
        "role": "assistant",
        "content": "I will send it.",
        "model": "scripted-1",
        "usage": {"prompt_tokens": 11, "completion_tokens": 4, "total_tokens": 15},
    }


@safepoint.tool(effect="write", name="mail.send")
def send(to: str, subject: str) -> str:
    raise TimeoutError("no reply from the server")


@safepoint.tool(effect="read", name="files.list")
def listing() -> Memo:
    return Memo(Phase.COLLECT, datetime(2026, 3, 1, tzinfo=UTC), ["n"])


@safepoint.tool(effect="read", name="socket.open")
def opened() -> object:
    return object()


def losing(run):
    run.finish(run.call(opened))


def mailing(run):
    if run.state.step == 0:
        run.state.messages.append(run.call(ask, run.state.messages))
        run.call(listing)
        run.state.agent_state["phase"] = "send"
        run.state.agent_state["memo"] = Memo(Phase.COLLECT, datetime(2026, 3, 1, tzinfo=UTC), ["\x1b[2J", "n" * 5000])
        return
    run.call(send, "ann@example.com", subject="hello")
    run.finish("sent")


def asking(run):
    answer = run.pause("approve", Memo(Phase.COLLECT, datetime(2026, 3, 1, tzinfo=UTC), []))
    run.finish(answer)


def failing(run):
    raise ZeroDivisionError("1/0")


def fill(url: str) -> None:
    with safepoint.open(url) as cp:
        safepoint.run_agent(mailing, task_id="mailing", input="send it", store=cp)
        safepoint.run_agent(asking, task_id="asking", store=cp)
        safepoint.run_agent(lambda run: run.finish({"ok": True}), task_id="done", input="go", store=cp, agent="finisher")
        try:
            safepoint.run_agent(failing, task_id="failing", store=cp)
        except ZeroDivisionError:
            pass
        try:
            safepoint.run_agent(losing, task_id="losing", store=cp)
        except safepoint.RefusedType:
            pass
        safepoint.run_agent(asking, task_id="ready", store=cp)
        cp.answer("ready", 1, True)
        state = State(task_id="kept")
        for i in range(1, 6):
            state.step = i
            state.messages.append({"role": "user", "content": f"message {i}"})
            state.metadata = {"customer": "acme", "since": datetime(2026, 1, 2, tzinfo=UTC)}
            cp.save(state, label=f"label {i}")
        for id in HOSTILE:
            state = State(task_id=id)
            state.messages.append({"role": "user", "content": id})
            state.agent_state[id] = id
            state.metadata = {"id": id}
            cp.save(state, label=id)


if __name__ == "__main__":
    fill(sys.argv[1])
    print(json.dumps(HOSTILE))

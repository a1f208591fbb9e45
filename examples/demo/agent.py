"""The agent process: an ordinary loop around a chat model and four tools. The driver kills it again and again.

Nothing in here knows about the kills. A restarted process runs the same lines: ``run_agent`` finds the task in the store and
carries on.
"""

from __future__ import annotations

import argparse
import http.client
import json
import logging
import secrets
import smtplib
import sys
from email.message import EmailMessage
from pathlib import Path
from typing import Any

from mail import Mailbox  # type: ignore[import-not-found]
from watch import obey, say  # type: ignore[import-not-found]

import safepoint
from safepoint import Call, Done, NotDone, Retention, Retry, Run, Tool, model, tool

TASK = "read-the-folder"
JOB = "Read every document in the folder. Report each finding by mail to whom it concerns, and book it. Today is 2025-06-30."

parser = argparse.ArgumentParser()
parser.add_argument("--store", required=True)
parser.add_argument("--documents", type=Path, required=True)
parser.add_argument("--mailbox", type=Path, required=True)
parser.add_argument("--model-port", type=int, required=True)
parser.add_argument("--smtp-port", type=int, required=True)
parser.add_argument("--break", dest="broken", choices=["verifier", "intents"])
args = parser.parse_args()
mailbox = Mailbox(args.mailbox)


# -- the model


@model(name="ask", retry=Retry(attempts=3))
def ask(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", args.model_port, timeout=30)
    try:
        body = json.dumps({"model": "scripted-1", "messages": messages, "tools": tools, "temperature": 0})
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        reply: dict[str, Any] = json.load(response)
        if response.status != 200:
            raise RuntimeError(f"the model answered {response.status}: {reply}")
        return reply
    finally:
        connection.close()


# -- the tools


@tool(name="list_documents", effect="read")
def list_documents() -> list[str]:
    return sorted(p.name for p in args.documents.glob("*.txt"))


@tool(name="read_document", effect="read")
def read_document(name: str) -> str:
    return (args.documents / Path(name).name).read_text(encoding="utf-8")


def was_it_sent(call: Call) -> Done | NotDone:
    """The mailbox can say whether a message came under the key of this call."""
    if args.broken == "verifier":
        return NotDone()
    key = call.idempotency_key
    return Done(_receipt(key)) if mailbox.has_key(key) else NotDone()


def _receipt(key: str) -> dict[str, str]:
    return {"message_id": f"<{key}@example.com>"}


# A mail server that had the whole message when its sender was killed stores it within this time, if it does at all.
@tool(name="send_mail", effect="write", verify=was_it_sent, settle_after=0.3, failed_on=(ConnectionRefusedError,))
def send_mail(to: str, subject: str, body: str, *, idempotency_key: str) -> dict[str, str]:
    receipt = _receipt(idempotency_key)
    message = EmailMessage()
    message["From"] = "agent@example.com"
    message["To"] = to
    message["Subject"] = subject
    message["Message-ID"] = receipt["message_id"]
    message["X-Idempotency-Key"] = idempotency_key
    message.set_content(body)
    with smtplib.SMTP("127.0.0.1", args.smtp_port, local_hostname="agent.example.com", timeout=60) as smtp:
        smtp.send_message(message)
    return receipt


@tool(name="book", effect="transactional")
def book(document: str, finding: str, cents: int, *, connection: Any) -> int:
    """Into the ledger, in the transaction in which the journal records the call: both are there, or neither."""
    connection.execute("INSERT INTO ledger (document, finding, cents) VALUES (?, ?, ?)", (document, finding, cents))
    return int(connection.last_insert_rowid())


TOOLS: dict[str, Tool[..., Any]] = {t.name: t for t in (list_documents, read_document, send_mail, book)}

_TEXT, _NUMBER = {"type": "string"}, {"type": "integer"}


def _described(name: str, description: str, /, **parameters: dict[str, str]) -> dict[str, Any]:
    schema = {"type": "object", "properties": parameters, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


DESCRIBED = [
    _described("list_documents", "The names of all documents in the folder."),
    _described("read_document", "The text of a document.", name=_TEXT),
    _described("send_mail", "Send a mail to somebody in the company.", to=_TEXT, subject=_TEXT, body=_TEXT),
    _described("book", "Book a finding in the ledger.", document=_TEXT, finding=_TEXT, cents=_NUMBER),
]


# -- the loop


def step(run: Run) -> None:
    messages = run.state.messages
    reply = run.call(ask, messages, DESCRIBED)
    message = reply["choices"][0]["message"]
    messages.append(message)
    run.phase = "reading" if len(message.get("tool_calls", ())) == 1 else "reporting"
    for call in message.get("tool_calls", ()):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        if name == "send_mail" and args.broken == "intents":
            # Past the journal: nothing is written before the mail goes out. This is what an agent without safepoint does.
            result: Any = send_mail.fn(**json.loads(arguments), idempotency_key=secrets.token_hex(8))
        else:
            result = run.call_tool(TOOLS[name], arguments, call_id=call["id"])
        content = result if isinstance(result, str) else json.dumps(result)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
    if "tool_calls" not in message:
        run.finish(message["content"])


class Tell:
    """Tells the driver where the work stands."""

    def on_restore(self, run: Run) -> None:
        say("carries on at", run.state.step)

    def before_step(self, run: Run) -> None:
        say("step", run.state.step)


def main() -> int:
    obey()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(process)d %(message)s")
    with safepoint.open(args.store, retention=Retention.keep_all()) as cp:
        with cp.connection() as connection:
            # No UNIQUE in it: if a finding were booked twice, it should show.
            connection.execute(
                "CREATE TABLE IF NOT EXISTS ledger (id INTEGER PRIMARY KEY, document TEXT, finding TEXT, cents INTEGER)"
            )
        outcome = safepoint.run_agent(step, task_id=TASK, input=JOB, store=cp, hooks=[Tell()])
        say("ended", outcome.status)
        return 0 if outcome.status == "finished" else 3


if __name__ == "__main__":
    sys.exit(main())

"""The model process: a chat model behind the usual ``POST /v1/chat/completions``, with rules where others have weights.

It keeps nothing between two requests: what it answers follows from the messages that it is given, as with the models that it
stands for. It notes every request before it answers, so that the driver can tell afterwards what was asked twice.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import threading
import time
from datetime import date
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

from findings import find  # type: ignore[import-not-found]
from watch import obey, say  # type: ignore[import-not-found]

Message = dict[str, Any]


def reply_to(messages: list[Message]) -> Message:
    """The assistant's next message: look at the folder, read a document, report what is wrong with it, read the next."""
    job = " ".join(m["content"] for m in messages if m["role"] == "user")
    today = date.fromisoformat(_found(r"Today is (\d{4}-\d\d-\d\d)", job))
    names: list[str] | None = None
    read: list[str] = []
    reported = 0
    asked: dict[str, dict[str, Any]] = {}
    last: tuple[str, str] | None = None
    for message in messages:
        if message["role"] == "assistant":
            asked = {c["id"]: c["function"] for c in message.get("tool_calls", [])}
            last = None
        elif message["role"] == "tool":
            function = asked[message["tool_call_id"]]
            arguments = json.loads(function["arguments"])
            match function["name"]:
                case "list_documents":
                    names = json.loads(message["content"])
                case "read_document":
                    read.append(arguments["name"])
                    last = (arguments["name"], message["content"])
                case "send_mail":
                    reported += 1
    if names is None:
        return _calls(("list_documents", {}))
    if last is not None:
        todo: list[tuple[str, dict[str, Any]]] = []
        for f in find(*last, today):
            todo.append(("send_mail", {"to": f.to, "subject": f.subject, "body": f.body}))
            todo.append(("book", {"document": f.document, "finding": f.kind, "cents": f.cents}))
        if todo:
            return _calls(*todo)
    for name in names:
        if name not in read:
            return _calls(("read_document", {"name": name}))
    return {"role": "assistant", "content": f"I have read {len(read)} documents and reported {reported} findings."}


def _found(pattern: str, text: str) -> str:
    m = re.search(pattern, text)
    if m is None:
        raise ValueError(f"the job does not say {pattern}")
    return m[1]


def _calls(*calls: tuple[str, dict[str, Any]]) -> Message:
    """Ids are numbered anew in every reply, as some providers do."""
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for i, (name, arguments) in enumerate(calls)
        ],
    }


class RequestLog:
    """A line for each request: its number, its digest, and the id of the reply that it was or would have been given."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = threading.Lock()
        self.count = 0

    def note(self, body: bytes) -> tuple[str, str]:
        digest = hashlib.sha256(body).hexdigest()[:16]
        with self.lock:
            self.count += 1
            reply = f"chatcmpl-{self.count:06d}"
            with self.path.open("a") as file:
                file.write(json.dumps({"no": self.count, "digest": digest, "reply": reply, "bytes": len(body)}) + "\n")
            say("request", self.count, digest)
        return reply, digest


class Handler(BaseHTTPRequestHandler):
    log: ClassVar[RequestLog]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path != "/v1/chat/completions":
            self.send_error(404)
            return
        number, digest = self.log.note(body)
        # It takes a moment to think; always the same one for the same request.
        time.sleep(0.02 + int(digest[:4], 16) / 0xFFFF * 0.04)
        request = json.loads(body)
        try:
            message = reply_to(request["messages"])
        except (KeyError, ValueError) as error:
            self._answer(400, {"error": {"message": str(error), "type": "invalid_request_error"}})
            return
        size = len(json.dumps(message))
        self._answer(
            200,
            {
                "id": number,
                "object": "chat.completion",
                "created": int(time.time()),
                "model": request["model"],
                "choices": [
                    {"index": 0, "message": message, "finish_reason": "tool_calls" if "tool_calls" in message else "stop"}
                ],
                "usage": {
                    "prompt_tokens": len(body) // 4,
                    "completion_tokens": size // 4,
                    "total_tokens": len(body) // 4 + size // 4,
                },
            },
        )

    def _answer(self, status: int, answer: dict[str, Any]) -> None:
        data = json.dumps(answer).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        except ConnectionError:
            pass  # whoever asked was killed meanwhile

    def log_message(self, format: str, *args: Any) -> None:
        pass


if __name__ == "__main__":
    Handler.log = RequestLog(Path(sys.argv[1]))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    obey()
    say("port", server.server_address[1])
    server.serve_forever()

"""The outside world of the crash tests: a process that does what tools ask it to, counts it, and is never killed.

It keeps one log per world (one test round). What a test believes of effects it reads here, never from the journal.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
from collections import defaultdict
from typing import Any

from tests.support.children import Child, Server, tell


def serve(path: str) -> None:
    """The server: one JSON line in, one out, per connection."""
    logs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    counters: dict[tuple[str, str], int] = defaultdict(int)
    known: dict[tuple[str, str], Any] = {}
    lines = socket.socket(socket.AF_UNIX)
    lines.bind(path)
    lines.listen(128)
    tell("serving")
    selector = selectors.DefaultSelector()
    selector.register(lines, selectors.EVENT_READ)
    parts: dict[socket.socket, bytes] = {}
    while True:
        for key, _ in selector.select():
            sock: Any = key.fileobj
            if sock is lines:
                sock, _ = lines.accept()
                selector.register(sock, selectors.EVENT_READ)
                parts[sock] = b""
                continue
            data = b""
            try:
                data = sock.recv(65536)
            except ConnectionResetError:
                pass
            parts[sock] += data
            if data and not parts[sock].endswith(b"\n"):
                continue
            line = parts.pop(sock)
            selector.unregister(sock)
            if line.endswith(b"\n"):
                answer = _answer(json.loads(line), logs, counters, known)
                try:
                    sock.sendall(json.dumps(answer).encode() + b"\n")
                except OSError:
                    pass  # the caller was killed while its effect happened
            sock.close()


def _answer(m: dict[str, Any], logs: Any, counters: Any, known: Any) -> Any:
    world, op = m["world"], m["op"]
    if op == "log":
        return logs[world]
    if op == "count":
        counters[world, m["name"]] += 1
        return counters[world, m["name"]]
    if op == "start":
        logs[world].append(m)
        return sum(e["op"] == "start" and e["key"] == m["key"] for e in logs[world])
    if op == "forget":
        logs.pop(world, None)
        return None
    if op == "ask":
        done = [e for e in logs[world] if e["op"] == "do" and e["key"] == m["key"]]
        logs[world].append(m)
        asked = sum(e["op"] == "ask" and e["key"] == m["key"] for e in logs[world])
        return [len(done), done[0]["value"] if done else None, asked]
    assert op == "do"
    if m.get("dedup") and (again := known.get((world, m["idem"]))) is not None:
        logs[world].append({**m, "op": "again"})
        return again
    n = sum(e["op"] == "do" and e["key"] == m["key"] for e in logs[world]) + 1
    m["value"] = f"{m['tool']}:{m['key']}:{n}"
    if m.get("dedup"):
        known[world, m["idem"]] = m["value"]
    logs[world].append(m)
    return m["value"]


class World:
    """A client's view of one world. Picklable: children get it as an argument."""

    def __init__(self, path: str, name: str) -> None:
        self.path = path
        self.name = name

    def _ask(self, **message: Any) -> Any:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(self.path)
            sock.sendall(json.dumps({"world": self.name, **message}).encode() + b"\n")
            data = b""
            while not data.endswith(b"\n"):
                part = sock.recv(1 << 20)
                if not part:
                    raise ConnectionError("the effect server is gone")
                data += part
        return json.loads(data)

    def do(self, tool: str, key: str, idem: str = "", **more: Any) -> str:
        """Let an effect happen, and return the value that it gives: other at each execution."""
        return str(self._ask(op="do", tool=tool, key=key, idem=idem, pid=os.getpid(), **more))

    def ask(self, key: str) -> tuple[int, Any]:
        """What a verifier asks: how often it happened, and the first value. Logged, too."""
        n, value, _ = self._ask(op="ask", key=key)
        return n, value

    def asked(self, key: str) -> tuple[int, Any, int]:
        """``ask``, and the how-manieth asking it is."""
        n, value, asked = self._ask(op="ask", key=key)
        return n, value, asked

    def start(self, key: str, idem: str) -> int:
        """Note that a tool was started, whatever becomes of it; returns the how-manieth time it is."""
        return int(self._ask(op="start", key=key, idem=idem))

    def count(self, name: str) -> int:
        """Raise a counter, and return it: what is to happen only the first time asks for it."""
        return int(self._ask(op="count", name=name))

    def log(self) -> list[dict[str, Any]]:
        return list(self._ask(op="log"))

    def done(self) -> dict[str, int]:
        """How often each key's effect happened."""
        counts: dict[str, int] = {}
        for entry in self.log():
            if entry["op"] == "do":
                counts[entry["key"]] = counts.get(entry["key"], 0) + 1
        return counts

    def forget(self) -> None:
        self._ask(op="forget")


class Effects:
    """The server, from the test's side."""

    def __init__(self, server: Server, folder: str) -> None:
        self.path = os.path.join(folder, "effects")
        self.child: Child = server.start(serve, self.path)
        assert self.child.read() == ("serving",)
        self._n = 0

    def world(self) -> World:
        self._n += 1
        return World(self.path, f"w{self._n}")

"""Commands as bytes and answers out of bytes (RESP2), for replies of thousands of values: redis-py's own reader, without its C
extension, takes as long for them as the server does for all the rest.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

__all__ = ["LEAST", "Refused", "left", "packed", "replies"]

APART = 65_536
"""Bytes of an argument from which on it is sent as it is: copying it together with others would cost more than a call."""
PIECE = 262_144
LEAST = 0.001
"""Seconds that a step is given at least: 0 would mean a socket that does not block."""


class Refused(Exception):
    """What the server answered instead of doing what it was asked to."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code = text.partition(" ")[0]


def left(deadline: float) -> float:
    return max(LEAST, deadline - time.monotonic())


def packed(commands: Iterable[Sequence[Any]]) -> list[bytes]:
    """These commands in as few pieces as is cheap. Arguments are bytes, text or whole numbers."""
    pieces: list[bytes] = []
    parts: list[bytes] = []
    for command in commands:
        parts.append(b"*%d\r\n" % len(command))
        for argument in command:
            if argument.__class__ is not bytes:
                argument = argument.encode() if isinstance(argument, str) else b"%d" % argument
            if len(argument) < APART:
                parts += (b"$%d\r\n" % len(argument), argument, b"\r\n")
            else:
                parts.append(b"$%d\r\n" % len(argument))
                pieces += (b"".join(parts), argument)
                parts = [b"\r\n"]
    pieces.append(b"".join(parts))
    return pieces


def replies(sock: socket.socket, count: int, deadline: float) -> list[Any]:
    """The next answers; an error of the server is in its place among them.

    Raises:
        OSError: the connection broke, or the time is over.
        ValueError: that is no Redis.
    """
    reader = _Reader(sock, deadline)
    found = [reader.value() for _ in range(count)]
    if reader.pos != len(reader.data):
        raise ValueError("an answer to nothing")
    return found


class _Reader:
    """What of the answers has come and was not looked at."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock = sock
        self._deadline = deadline
        self.data = b""
        self.pos = 0

    def _more(self) -> bytes:
        self._sock.settimeout(left(self._deadline))
        more = self._sock.recv(PIECE)
        if not more:
            raise ConnectionResetError("the server has closed the connection")
        return more

    def _line(self) -> bytes:
        while (end := self.data.find(b"\r\n", self.pos)) < 0:
            self.data, self.pos = self.data[self.pos :] + self._more(), 0
        line, self.pos = self.data[self.pos : end], end + 2
        return line

    def _bulk(self, size: int) -> bytes:
        pos, end = self.pos, self.pos + size
        if len(self.data) < end + 2:
            have = self.data[pos:]
            parts, missing = [have], size + 2 - len(have)
            while missing > 0:
                more = self._more()
                parts.append(more)
                missing -= len(more)
            # Joined once: a value of a hundred megabytes comes in hundreds of pieces.
            self.data, pos, end = b"".join(parts), 0, size
        self.pos = end + 2
        return self.data[pos:end]

    def value(self) -> Any:
        line = self._line()
        kind = line[:1]
        if kind == b"$":
            size = int(line[1:])
            return None if size < 0 else self._bulk(size)
        if kind == b"*":
            count = int(line[1:])
            return None if count < 0 else self._array(count)
        return _SIMPLE[kind](line) if kind in _SIMPLE else _foreign(line)

    def _array(self, count: int) -> list[Any]:
        found: list[Any] = []
        for _ in range(count):
            # Most of them are bulks that are here already.
            data, pos = self.data, self.pos
            end = data.find(b"\r\n", pos)
            if end > 0 and data[pos : pos + 1] == b"$":
                size, start = int(data[pos + 1 : end]), end + 2
                if size < 0:
                    found.append(None)
                    self.pos = start
                    continue
                if start + size + 2 <= len(data):
                    found.append(data[start : start + size])
                    self.pos = start + size + 2
                    continue
            found.append(self.value())
        return found


_SIMPLE: dict[bytes, Callable[[bytes], Any]] = {
    b":": lambda line: int(line[1:]),
    b"+": lambda line: line[1:],
    b"-": lambda line: Refused(line[1:].decode("utf-8", "replace")),
}


def _foreign(line: bytes) -> Any:
    raise ValueError(f"an answer that begins with {line[:16]!r}")

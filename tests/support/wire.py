"""Where one message of a wire protocol ends and the next begins: for what stands between a client and a server in tests.

Each protocol gives two splitters, one for what the client sends ("up") and one for what it gets ("down"). A splitter is fed bytes
and gives back whole messages with their kind; what is not whole yet it keeps. It also knows which messages end a request and
which end the answer to one, so that the answer to the n-th request can be found in a pipeline too.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import ClassVar

__all__ = ["PROTOCOLS", "Pair", "PostgresPair", "RawPair", "RespPair", "postgres_message"]

Found = tuple[str, bytes]
"""Kind and all bytes of a message."""

CANCEL, SSL, GSS = 80877102, 80877103, 80877104
"""Where the version of a PostgreSQL startup packet would be: what it asks for instead."""


class Pair:
    """Both directions of one connection."""

    def __init__(self) -> None:
        self.rest = {"up": bytearray(), "down": bytearray()}
        """What has come of a message that is not whole."""

    def feed(self, direction: str, data: bytes) -> Iterator[Found]:
        self.rest[direction] += data
        while self.rest[direction] and (found := self._next(direction, self.rest[direction])):
            kind, size = found
            whole = bytes(self.rest[direction][:size])
            del self.rest[direction][:size]
            yield kind, whole

    def _next(self, direction: str, rest: bytearray) -> tuple[str, int] | None:
        """Kind and size of the message that begins here, if it is whole."""
        raise NotImplementedError

    def ends_request(self, kind: str) -> bool:
        """Say whether a message up is answered by one that ends an answer."""
        raise NotImplementedError

    def ends_answer(self, kind: str) -> bool:
        raise NotImplementedError


class RawPair(Pair):
    """Any protocol: what came at once is a message."""

    def _next(self, direction: str, rest: bytearray) -> tuple[str, int] | None:
        return "", len(rest)

    def ends_request(self, kind: str) -> bool:
        return True

    def ends_answer(self, kind: str) -> bool:
        return True


class PostgresPair(Pair):
    """PostgreSQL, protocol 3. Kinds are the type bytes; of the packets without one "startup", "cancel", "ssl", "gss", and
    "no" for the byte that answers the last two."""

    def __init__(self) -> None:
        super().__init__()
        self._typed = False
        self._bytes_due = 0

    def _next(self, direction: str, rest: bytearray) -> tuple[str, int] | None:
        if direction == "down" and self._bytes_due:
            assert rest[:1] == b"N", "the server speaks TLS here, which nobody can look into"
            self._bytes_due -= 1
            return "no", 1
        if direction == "up" and not self._typed:
            return self._untyped(rest)
        if len(rest) < 5:
            return None
        size = 1 + int.from_bytes(rest[1:5], "big")
        return (chr(rest[0]), size) if len(rest) >= size else None

    def _untyped(self, rest: bytearray) -> tuple[str, int] | None:
        if len(rest) < 8:
            return None
        size, version = struct.unpack_from(">II", rest)
        if len(rest) < size:
            return None
        kind = {CANCEL: "cancel", SSL: "ssl", GSS: "gss"}.get(version, "startup")
        self._typed = kind in {"startup", "cancel"}
        self._bytes_due += kind in {"ssl", "gss"}
        return kind, size

    def ends_request(self, kind: str) -> bool:
        """A query, a Sync, a function call; and the startup, which ends in ReadyForQuery too."""
        return kind in {"Q", "S", "F", "startup", "ssl", "gss"}

    def ends_answer(self, kind: str) -> bool:
        # Not CommandComplete: with the extended protocol the commit comes after it.
        return kind in {"Z", "no"}


class RespPair(Pair):
    """RESP 2 and 3. Kinds are the command's name up, the type byte down."""

    AGGREGATES: ClassVar[dict[int, int]] = {ord("*"): 1, ord("~"): 1, ord(">"): 1, ord("%"): 2, ord("|"): 2}
    BULKS = frozenset(b"$!=")
    SIMPLE = frozenset(b"+-:_#,(")

    def __init__(self) -> None:
        super().__init__()
        # How far the message that is not whole has been read, and how many values it lacks: a long one comes in many pieces.
        self._read = {"up": (0, 1), "down": (0, 1)}

    def _next(self, direction: str, rest: bytearray) -> tuple[str, int] | None:
        at, lacking = self._read[direction]
        while lacking:
            end = rest.find(b"\r\n", at)
            if end < 0:
                break
            first, after = rest[at], end + 2
            if first in self.AGGREGATES:
                lacking += max(int(rest[at + 1 : end]), 0) * self.AGGREGATES[first]
                lacking += first == ord("|")  # attributes stand before a value and are none
            elif first in self.BULKS:
                if (length := int(rest[at + 1 : end])) >= 0:
                    after += length + 2
                if len(rest) < after:
                    break
            else:
                assert direction == "up" or first in self.SIMPLE, f"not RESP: {bytes(rest[at:end])!r}"
            at, lacking = after, lacking - 1
        self._read[direction] = (at, lacking)
        if lacking:
            return None
        self._read[direction] = (0, 1)
        return self._kind(direction, rest, at), at

    def _kind(self, direction: str, rest: bytearray, size: int) -> str:
        if direction == "down":
            return chr(rest[0])
        lines = bytes(rest[: min(size, 200)]).split(b"\r\n")
        words = lines[2:3] if rest[0] == ord("*") else lines[0].split()[:1]
        return words[0].decode("latin-1").upper() if words else ""

    def ends_request(self, kind: str) -> bool:
        return True

    def ends_answer(self, kind: str) -> bool:
        return kind != ">"  # pushed by the server, unasked


PROTOCOLS: dict[str, type[Pair]] = {"raw": RawPair, "postgres": PostgresPair, "resp": RespPair}


def postgres_message(kind: str, body: bytes) -> bytes:
    return kind.encode() + struct.pack(">I", len(body) + 4) + body

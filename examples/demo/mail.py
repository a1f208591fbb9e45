"""The mail process: a small SMTP server on loopback that keeps each message as a file, and can be told to hold an answer.

Like any SMTP server it takes what it is given: it does not look at idempotency keys. Whether a message is sent twice is up to
the agent alone.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from email import policy
from email.message import EmailMessage
from email.parser import BytesParser
from pathlib import Path
from typing import Literal, cast

from watch import obey, say  # type: ignore[import-not-found]

_LIMIT = 4 * 1024 * 1024
# Seconds after which a held answer is given all the same. The driver needs milliseconds.
_HOLD = 30.0

Where = Literal["before", "after"]


class Mailbox:
    """One file a message. A name that can be seen stands for a message that is whole and on the disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.count = len(list(self._files()))

    def store(self, sender: str, receivers: list[str], data: bytes) -> str:
        """Return the message's name once it is durable; only then may its sender be told so."""
        self.count += 1
        name = f"{self.count:06d}.eml"
        envelope = f"Return-Path: <{sender}>\r\n" + "".join(f"Delivered-To: {r}\r\n" for r in receivers)
        part = self.folder / f"{name}.part"
        with part.open("wb") as file:
            file.write(envelope.encode() + data)
            file.flush()
            os.fsync(file.fileno())
        part.rename(self.folder / name)
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return name

    def messages(self) -> Iterator[EmailMessage]:
        """All messages, in the order in which they came."""
        parser = BytesParser(policy=policy.default)
        for file in self._files():
            yield cast(EmailMessage, parser.parsebytes(file.read_bytes()))

    def has_key(self, key: str) -> bool:
        """Whether a message was sent under this idempotency key."""
        return any(m["X-Idempotency-Key"] == key for m in self.messages())

    def _files(self) -> Iterator[Path]:
        return iter(sorted(self.folder.glob("*.eml")))


class Server:
    def __init__(self, mailbox: Mailbox) -> None:
        self.mailbox = mailbox
        self.holds: set[tuple[Where, int]] = set()

    def order(self, line: str) -> None:
        """``hold before 3``: say so when the third message is announced, and go no further until its sender is gone."""
        _, where, number = line.split()
        self.holds.add((cast(Where, where), int(number)))

    async def held(self, where: Where, number: int, reader: asyncio.StreamReader) -> None:
        if (where, number) not in self.holds:
            return
        self.holds.discard((where, number))
        say("held", where, number)
        try:
            # The client waits for our answer, so what comes is the end of its connection.
            await asyncio.wait_for(reader.read(1), _HOLD)
        except TimeoutError:
            pass

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._talk(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # a sender that was killed
        finally:
            writer.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def answer(code: int, *lines: str) -> None:
            for i, line in enumerate(lines):
                writer.write(f"{code}{'-' if i < len(lines) - 1 else ' '}{line}\r\n".encode())
            await writer.drain()

        greeted = False
        sender: str | None = None
        receivers: list[str] = []
        await answer(220, "mail.example.com ESMTP")
        while line := await reader.readline():
            verb, _, rest = line.decode("latin-1").strip().partition(" ")
            match verb.upper():
                case "EHLO":
                    greeted, sender, receivers = True, None, []
                    await answer(250, "mail.example.com", f"SIZE {_LIMIT}", "8BITMIME")
                case "HELO":
                    greeted, sender, receivers = True, None, []
                    await answer(250, "mail.example.com")
                case "MAIL" if not greeted or sender is not None:
                    await answer(503, "EHLO first, and one message at a time")
                case "MAIL" if rest.upper().startswith("FROM:"):
                    await self.held("before", self.mailbox.count + 1, reader)
                    sender = _address(rest[5:])
                    await answer(250, "sender noted")
                case "RCPT" if sender is None:
                    await answer(503, "MAIL first")
                case "RCPT" if rest.upper().startswith("TO:") and _address(rest[3:]):
                    receivers.append(_address(rest[3:]))
                    await answer(250, "receiver noted")
                case "MAIL" | "RCPT":
                    await answer(501, "no address in that")
                case "DATA" if sender is None or not receivers:
                    await answer(503, "MAIL and RCPT first")
                case "DATA":
                    await answer(354, "end with a line of one dot")
                    data = await _data(reader)
                    if data is None:
                        await answer(552, "too large")
                    else:
                        name = self.mailbox.store(cast(str, sender), receivers, data)
                        say("stored", self.mailbox.count)
                        await self.held("after", self.mailbox.count, reader)
                        await answer(250, f"stored as {name}")
                    sender, receivers = None, []
                case "RSET":
                    sender, receivers = None, []
                    await answer(250, "forgotten")
                case "NOOP":
                    await answer(250, "still here")
                case "QUIT":
                    await answer(221, "good bye")
                    return
                case _:
                    await answer(502, "not known here")


def _address(text: str) -> str:
    """The address between the brackets; what follows them are parameters."""
    start, end = text.find("<"), text.find(">")
    return text[start + 1 : end] if 0 <= start < end else ""


async def _data(reader: asyncio.StreamReader) -> bytes | None:
    """Lines up to the one with a single dot, without the dot that the sender put before each line that begins with one.

    None if it is too much; it is read to its end all the same, or the rest would be taken for commands.
    """
    lines: list[bytes] = []
    size = 0
    while True:
        line = await reader.readuntil(b"\n")
        if line.rstrip(b"\r\n") == b".":
            return b"".join(lines) if size <= _LIMIT else None
        size += len(line)
        if size <= _LIMIT:
            lines.append(line.removeprefix(b"."))


async def _main(folder: Path) -> None:
    server = Server(Mailbox(folder))
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    obey(server.order)
    say("port", listening.sockets[0].getsockname()[1])
    async with listening:
        await listening.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1])))

"""A task in Redis as a whole: walked, and written as one.

Writing goes under a key of its own beside the task's, with an expiry, in batches of about 1 MB; one script then compares what is
there and renames. A walk looks at the names of all fields first, and then fetches the values in their order.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from safepoint import _probe
from safepoint.errors import Damaged, SafepointError, Unavailable
from safepoint.rows import CheckpointRow, Image, Part, TaskRow
from safepoint.stores import whole
from safepoint.stores.redis import layout, walk
from safepoint.stores.redis.fields import BYTES, groups, numbered, rows_in, values_of
from safepoint.stores.redis.mend import Mends
from safepoint.stores.redis.sweep import Start, asked, start
from safepoint.stores.redis.walk import branch, branch_values, row_fields

if TYPE_CHECKING:
    from safepoint.stores.foreseen import Foreseen
    from safepoint.stores.redis.client import Client

__all__ = ["Whole"]

TRIES = 20
"""How often is compared anew with what is there, if it changes meanwhile."""
TEMPORARY = 600
"""Seconds for which a task that is being written lies beside its place, after the last batch."""


class Whole(Mends):
    """Needs ``_client``, ``_ttl``, ``_foreseen`` and ``task`` from the store."""

    _client: Client
    _ttl: int
    _foreseen: Foreseen

    if TYPE_CHECKING:

        def task(self, task: str) -> TaskRow | None: ...

    def walk(self, task: str) -> Iterator[Part]:
        return walk.walk(self._client, task, self.task)

    def place(self, task: str, kind: str, key: Any) -> str:
        return walk.place(self._client, task, kind, key)

    # -- writing

    def write_task(self, image: Image, *, over: Image | None = None) -> bool:
        image = whole.sealed(image)
        task, client = image.row.task, self._client
        wanted = whole.facts_of(image)
        keys = client.keys.of(task)
        born = secrets.token_hex(8).encode()
        beside = keys[0] + b":w:" + born
        written = False
        try:
            dead = b""
            for _ in range(TRIES):
                there = start(client, task)
                if there is not None:
                    facts = _facts(client, task, there)
                    if facts == wanted:
                        return False
                    if over is None or facts != whole.facts_of(over):
                        if (now_there := start(client, task)) is None or now_there.w != there.w:
                            continue  # it was not read in one moment
                        raise whole.another(task)
                if not written:
                    client.announce(task)
                    _lay(client, beside, image, born)
                    written = True
                    _probe.at("write_task.staged")
                seen = (b"", b"") if there is None else (there.w, there.token)
                _probe.at("write_task.before")
                args = [self._ttl, dead, *seen, born, whole.fence_of(image)]
                answer = client.write("write", [*keys, beside], args)
                _probe.at("write_task.after")
                if answer[0] == b"done":
                    self._foreseen.drop(task)
                    return True
                if answer[0] == b"held":
                    dead = asked(task, answer)
                elif answer[0] == b"lost":
                    written = False
            raise Unavailable(
                f"task {task!r} changed {TRIES} times while it was written",
                "a run is busy with it",
                "Stop that run.",
                task=task,
            )
        finally:
            if written:
                _remove(client, beside)


def _remove(client: Client, key: bytes) -> None:
    try:
        client.command("UNLINK", key)
    except SafepointError:
        pass  # it expires


def _facts(client: Client, task: str, at: Start) -> whole.Facts | None:
    """By what the task is told apart, as far as it can be read; None if it cannot."""
    key = client.keys.task(task)
    found: list[frozenset[tuple[int, bytes]]] = []
    try:
        for prefix, block, last, make in (
            (b"h:", "k", at.numbers.seq, layout.header),
            (b"c:", "g", at.numbers.call, layout.call),
            (b"p:", "j", at.numbers.pause, layout.pause),
        ):
            fields = [prefix + b"%d" % no for no in numbered(client, key, block, last)]
            rows = (make(int(f[2:]), v) for f, v in values_of(client, key, fields) if v is not None)
            found.append(frozenset((row.seq if isinstance(row, CheckpointRow) else row.no, row.seal) for row in rows))
        branches = [branch(name, head, fixed) for name, head, fixed in branch_values(client, key, list(at.branches))]
        names = [name for rows_ in rows_in(client, key, groups(client, key)) for name in rows_]
        writes = [layout.write(name, value) for name, value in values_of(client, key, names) if value is not None]
    except Damaged:
        return None
    checkpoints, calls, pauses = found
    return whole.Facts(
        checkpoints,
        calls,
        pauses,
        frozenset((b.space, b.name, *b.head, b.line, b.forked_from) for b in branches),
        frozenset((*row.key, row.seal) for row in writes),
    )


def _fields(image: Image, born: bytes) -> Iterator[tuple[bytes, bytes]]:
    row = image.row
    yield b"n", layout.numbers(image.numbers)
    yield b"born", born
    yield b"t:id", row.task.encode()
    for name in ("status", "branch", "agent", "input", "reason", "raised", "parent"):
        value = getattr(row, name)
        if value is not None:
            yield f"t:{name}".encode(), value if isinstance(value, bytes) else layout.text(value)
    for name, number in (("attempts", row.attempts), ("created", row.created_at), ("updated", row.updated_at)):
        yield f"t:{name}".encode(), b"%d" % number
    yield from row_fields(image).items()
    for checkpoint in image.checkpoints:
        yield b"h:%d" % checkpoint.seq, layout.encoded_header(checkpoint)
        yield b"r:%d" % checkpoint.seq, layout.body(checkpoint.refs, checkpoint.root)
    for call in image.calls:
        yield b"c:%d" % call.no, layout.encoded_call(call)
    for pause in image.pauses:
        yield b"p:%d" % pause.no, layout.encoded_pause(pause)
    for write in image.writes:
        yield layout.write_field(write.key), layout.encoded_write(write)
    yield from layout.lists(layout.write_field(write.key) for write in image.writes).items()
    stamp = b"0" * layout.STAMP  # older than any moment of the task: nothing of it was sent by a save
    for obj in image.objects:
        yield b"o:" + obj.name, layout.body(obj.refs, obj.data) + stamp


def _lay(client: Client, key: bytes, image: Image, born: bytes) -> None:
    batch: list[bytes] = []
    size = 0

    def send() -> None:
        client.many([("HSET", key, *batch), ("EXPIRE", key, TEMPORARY)])

    for name, value in _fields(image, born):
        batch += (name, value)
        size += len(name) + len(value)
        if size > BYTES or len(batch) >= 2000:
            send()
            batch, size = [], 0
    if batch:
        send()

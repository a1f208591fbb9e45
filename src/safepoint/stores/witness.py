"""How far each task of a SQLite store had come when that was last acknowledged, kept outside the database.

SQLite takes a log that was damaged, swapped or removed for the end of the log: it shows what was there before, and no error.
So after each commit that was acknowledged as durable, 64 bytes are written beside the database, into the -locks file, which
nothing but this library opens: one slot per task, at its number. A reader that finds the database behind the slot knows that
what it sees is older than what was acknowledged.

A slot may say less than is true, and never more: it is written after COMMIT has returned, without a flush of its own, and
cleared (and flushed) before the COMMIT that deletes its task. Where two processes write one slot in the wrong order, where the
power went off before it was on disk, or where the file was removed, less is noticed until the next commit, and nothing
is noticed that did not happen. What ``durability="process"`` writes need not outlive a power cut, so its slots count only until
the machine is started anew. A slot's checksum covers the name that the database has inside: what was written for another
database in the same place says nothing about this one.
"""

from __future__ import annotations

import hashlib
import math
import shlex
import struct
import time
import zlib
from functools import cache, lru_cache
from typing import NamedTuple

from safepoint.errors import Damaged, Unavailable
from safepoint.stores.holder import boot_id
from safepoint.stores.oslock import LockFile

__all__ = ["NOTHING", "Slot", "Witness", "behind", "missing"]

BASE = 4096
"""Where slot 0 would be; before it lies the name of the lock file."""
SIZE = 64
_BODY = struct.Struct("<8sqqqqIIIII")
_SUM = struct.Struct("<I")
_BLOCK = 1 << 20
_NAMES = struct.Struct(f"<I{SIZE - 4}x")
_SPREAD = (1 << 22) - 1
"""As many names are told from each other, when it is asked which there may be: 4 MB, of which only what is touched takes memory."""
_SELDOM = 50
"""All slots are gone over for their names at most once in so many times as long as that takes, and in ``_AT_LEAST`` seconds."""
_AT_LEAST = 1.0


class Slot(NamedTuple):
    """The counters of a task, as its row and its lease have them."""

    created_at: int
    """Tells a task from another one that had its number."""
    writes: int
    position: int
    fence: int
    next_seq: int
    next_call: int
    next_pause: int
    next_line: int
    boot: int = 0
    """Of the start of the machine that the slot counts for; 0: any."""


NOTHING = b"\0" * SIZE


class Witness:
    """The slots of one store."""

    def __init__(self, locks: LockFile, *, full: bool) -> None:
        self._locks = locks
        self._boot = 0 if full else _boot()
        self._full = full
        # Slots as they were last read or written here: what has not changed need not be taken apart again.
        self._known: dict[tuple[str, int, str | None], tuple[bytes, Slot | None]] = {}
        self._names = bytearray()
        self._names_until = -math.inf

    def read(self, store: str, n: int, task: str | None = None, *, strict: bool = False) -> Slot | None:
        """What is known of task number ``n``; None if that is nothing, or is about a task of another name.

        Where the witness cannot be read, what is stored still can; ``strict`` raises Unavailable, as is right before a write.
        """
        try:
            raw = self._locks.read_at(BASE + n * SIZE, SIZE)
        except (OSError, Unavailable):
            if strict:
                raise
            return None
        known = self._known.get((store, n, task))
        if known is not None and known[0] == raw:
            return known[1]
        slot = _parse(store, raw, task)
        self._keep(store, n, task, raw, slot)
        return slot

    def _keep(self, store: str, n: int, task: str | None, raw: bytes, slot: Slot | None) -> None:
        if len(self._known) > 4096:
            self._known.clear()
        self._known[store, n, task] = (raw, slot)

    def write(self, store: str, n: int, task: str, slot: Slot, *, sync: bool) -> None:
        """Say how far the task has come. After COMMIT, and never an error: what was committed is."""
        if not sync and self._full:
            return  # it need not be on disk yet, and the witness must not be there first
        try:
            body = _BODY.pack(_name(task), *slot[:-1], self._boot)
            raw = body + _SUM.pack(zlib.crc32(body, _seed(store)))
            self._locks.write_at(BASE + n * SIZE, raw)
            self._keep(store, n, task, raw, slot)
        except (OSError, Unavailable, struct.error):
            pass

    def clear(self, n: int) -> None:
        """Forget a task, before the COMMIT that deletes it; on disk when this returns, or else it could seem lost later."""
        offset = BASE + n * SIZE
        if self._locks.read_at(offset, SIZE).strip(b"\0"):
            self._locks.write_at(offset, NOTHING)
            self._locks.flush()

    def beyond(self, store: str, last: int) -> list[int]:
        """The numbers of tasks of which something is known, above ``last``."""
        return [n for n, _ in self._scan(store, last + 1, None)]

    def find(self, store: str, task: str, last: int | None = None) -> list[tuple[int, Slot]]:
        """All slots that are about a task of this name.

        Args:
            last: Look through those up to this number only if the names that they had lately may be among them. To look through
                all of them for each task that is new would cost the more, the more tasks there are.
        """
        if last is None or self._may_know(task):
            return self._scan(store, 1, task)
        return self._scan(store, last + 1, task)

    def _may_know(self, task: str) -> bool:
        began = time.monotonic()
        if began > self._names_until:
            names = bytearray(_SPREAD + 1)
            n = 0
            try:
                while block := self._locks.read_at(BASE + n * SIZE, _BLOCK):
                    for (name,) in _NAMES.iter_unpack(block[: len(block) // SIZE * SIZE]):
                        names[name & _SPREAD] = 1
                    n += _BLOCK // SIZE
            except (OSError, Unavailable):
                return True
            self._names, ended = names, time.monotonic()
            self._names_until = ended + max(_AT_LEAST, _SELDOM * (ended - began))
        return self._names[int.from_bytes(_name(task)[:4], "little") & _SPREAD] == 1

    def _scan(self, store: str, first: int, task: str | None) -> list[tuple[int, Slot]]:
        found = []
        name = None if task is None else _name(task)
        n = first
        try:
            while block := self._locks.read_at(BASE + n * SIZE, _BLOCK):
                if name is not None:
                    at = block.find(name)
                    while at >= 0:
                        if at % SIZE == 0 and (slot := _parse(store, block[at : at + SIZE], task)) is not None:
                            found.append((n + at // SIZE, slot))
                        at = block.find(name, at + 1)
                else:
                    parts = ((i, _parse(store, block[i : i + SIZE], None)) for i in range(0, len(block), SIZE))
                    found += [(n + i // SIZE, slot) for i, slot in parts if slot is not None]
                n += _BLOCK // SIZE
        except (OSError, Unavailable):
            pass
        return found


def behind(slot: Slot | None, created_at: int, writes: int) -> bool:
    """Whether a task's row is older than what was acknowledged of it."""
    return slot is not None and slot.created_at == created_at and slot.writes > writes


_WHY = "the file was restored from a backup, or its -wal was removed, swapped or damaged"


def missing(task: str, path: str, why: str, **details: object) -> Damaged:
    """What is said of a task that the store has no longer, or not as far as it had come."""
    return Damaged(
        f"task {task!r} in {path} is older than what was acknowledged",
        f"{why}: {_WHY}",
        f"Put the newer file or its -wal back if there is one; else take the task as it stands: safepoint accept {shlex.quote(task)}",
        task=task,
        path=path,
        rolled_back=True,
        **details,
    )


def tasks_missing(path: str, n: int, **details: object) -> Damaged:
    """What is said of whole tasks that are not there. Which ones nobody can say: the names that the witness keeps are hashes."""
    return Damaged(
        f"{path} is older than what was acknowledged",
        f"{n} {'task that was acknowledged is' if n == 1 else 'tasks that were acknowledged are'} not there: {_WHY}",
        "Put the newer file or its -wal back if there is one; else accept that they are gone, by the name of any of them: "
        "safepoint accept NAME; or make a store of what is left: safepoint repair",
        path=path,
        rolled_back=True,
        tasks=[],
        lost=n,
        **details,
    )


def _parse(store: str, raw: bytes, task: str | None) -> Slot | None:
    if len(raw) < SIZE or raw == NOTHING:
        return None
    body = raw[: _BODY.size]
    if _SUM.unpack_from(raw, _BODY.size)[0] != zlib.crc32(body, _seed(store)):
        return None
    name, *counters = _BODY.unpack(body)
    slot = Slot._make(counters)
    if (task is not None and name != _name(task)) or (slot.boot and slot.boot != _boot()):
        return None
    return slot


@lru_cache(4096)
def _name(task: str) -> bytes:
    return hashlib.blake2b(task.encode(), digest_size=8).digest()


@lru_cache(64)
def _seed(store: str) -> int:
    return zlib.crc32(store.encode())


@cache
def _boot() -> int:
    return zlib.crc32(boot_id().encode()) | 1

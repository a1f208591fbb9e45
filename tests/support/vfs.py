"""A disk under SQLite that remembers what it was asked, fails when told, and can be cut off at any moment.

``Disk`` is a VFS over the system's own. It records every write, truncation, sync and deletion in order, with the content of
the ``-locks`` file, which the library writes by itself. ``images`` then gives what a power cut after each of them could leave:
what was synced is there; of the rest all, nothing, some, or some sectors.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import apsw

from safepoint.stores import oslock, sqlite_db

__all__ = ["FAULTS", "VARIANTS", "Disk", "Op", "images", "under"]

SECTOR = 512
VARIANTS = ("lost", "kept", "half", "torn")
FAULTS = ("full", "io", "short")


@dataclass(frozen=True)
class Op:
    kind: str
    """write, truncate, sync, delete"""
    file: str
    offset: int = 0
    data: bytes = b""
    locks: bytes = b""
    """What the -locks file held at that moment."""
    acked: int = 0
    """How many verbs of the script had returned by then."""


@dataclass
class Disk:
    """Where a script's files lie, and what is asked of them."""

    folder: Path
    ops: list[Op] = field(default_factory=list)
    acked: int = 0
    fail_at: int | None = None
    """Number of the operation that fails, once."""
    fault: str = "io"
    failed: Op | None = None

    def note(self, kind: str, file: str, offset: int = 0, data: bytes = b"") -> bool:
        """Record an operation; True if it is the one to fail."""
        op = Op(kind, Path(file).name, offset, data, self._locks(), self.acked)
        self.ops.append(op)
        if self.fail_at == len(self.ops) - 1:
            self.failed = op
            return True
        return False

    def _locks(self) -> bytes:
        # Through the library's own descriptor: to open and close the file here would drop its locks.
        for opened in oslock._files.values():
            if opened.fd >= 0:
                return os.pread(opened.fd, 1 << 20, 0)
        return b""


def _name(name: Any) -> str:
    return name.filename() if isinstance(name, apsw.URIFilename) else str(name)


class _File(apsw.VFSFile):
    def __init__(self, disk: Disk, name: Any, flags: list[int]) -> None:
        self.disk = disk
        self.file = _name(name)
        super().__init__("", name, flags)

    def _error(self) -> apsw.Error:
        return apsw.FullError("no space left") if self.disk.fault in {"full", "short"} else apsw.IOError("input/output error")

    def xWrite(self, data: bytes, offset: int) -> None:
        data = bytes(data)
        if self.disk.note("write", self.file, offset, data):
            if self.disk.fault == "short":
                super().xWrite(data[: len(data) // 2], offset)
            raise self._error()
        super().xWrite(data, offset)

    def xTruncate(self, newsize: int) -> None:
        if self.disk.note("truncate", self.file, newsize):
            raise self._error()
        super().xTruncate(newsize)

    def xSync(self, flags: int) -> None:
        if self.disk.note("sync", self.file):
            raise self._error()
        super().xSync(flags)


class _VFS(apsw.VFS):
    def __init__(self, name: str, disk: Disk) -> None:
        self.disk = disk
        super().__init__(name, "")

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:
        return _File(self.disk, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:
        if self.disk.note("delete", filename, int(syncdir)):
            raise apsw.IOError("input/output error")
        super().xDelete(filename, syncdir)


@contextmanager
def under(disk: Disk) -> Iterator[None]:
    """Every connection that the library opens in here is on this disk."""
    name = f"disk-{id(disk):x}"
    vfs = _VFS(name, disk)
    plain: Any = sqlite_db.Connection.__init__

    def through(conn: Any, path: str, **options: Any) -> None:
        plain(conn, path, vfs=name, **options)

    sqlite_db.Connection.__init__ = through  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        sqlite_db.Connection.__init__ = plain  # type: ignore[method-assign]
        vfs.unregister()


# -- what a power cut leaves


@dataclass
class _Kept:
    """One file: what is durable (None: it does not exist), and what has been asked since."""

    durable: bytes | None = None
    pending: list[Op] = field(default_factory=list)


def _apply(content: bytes | None, ops: list[Op]) -> bytes | None:
    data = bytearray(content or b"")
    there = content is not None
    for op in ops:
        if op.kind == "write":
            there = True
            if len(data) < op.offset:
                data.extend(bytes(op.offset - len(data)))
            data[op.offset : op.offset + len(op.data)] = op.data
        elif op.kind == "truncate":
            there = True
            del data[op.offset :]
            data.extend(bytes(max(0, op.offset - len(data))))
        else:
            there = False
            data.clear()
    return bytes(data) if there else None


def _sectors(op: Op) -> list[Op]:
    if op.kind != "write":
        return [op]
    cuts = []
    at = op.offset
    end = op.offset + len(op.data)
    while at < end:
        stop = min(end, (at // SECTOR + 1) * SECTOR)
        cuts.append(Op("write", op.file, at, op.data[at - op.offset : stop - op.offset]))
        at = stop
    return cuts


def _surviving(kept: _Kept, variant: str, rng: random.Random) -> bytes | None:
    if variant == "lost":
        return kept.durable
    ops = kept.pending
    if variant == "half":
        ops = [op for op in ops if rng.random() < 0.5]
    elif variant == "torn":
        ops = [cut for op in ops for cut in _sectors(op) if rng.random() < 0.5]
    return _apply(kept.durable, ops)


def images(ops: list[Op], rng: random.Random) -> Iterator[tuple[int, str, Op, dict[str, bytes]]]:
    """For each operation and each variant: its number, the variant, the operation, and the files that a cut right after it
    leaves. Files that were never synced need not exist; a sync makes the file and its folder's entry durable."""
    files: dict[str, _Kept] = {}
    for number, op in enumerate(ops):
        kept = files.setdefault(op.file, _Kept())
        if op.kind == "sync":
            new = kept.durable is None
            kept.durable = _apply(kept.durable if kept.durable is not None or kept.pending else b"", kept.pending)
            kept.pending = []
            if new and op.file.endswith(("-wal", "-journal")):
                # SQLite syncs the folder with the first sync of a log that it has made, and with it what was deleted before.
                for other in files.values():
                    gone = max((i for i, o in enumerate(other.pending) if o.kind == "delete"), default=-1)
                    if gone >= 0:
                        other.durable, other.pending = None, other.pending[gone + 1 :]
        elif op.kind == "delete" and op.offset:  # the folder was synced too
            kept.durable, kept.pending = None, []
        else:
            kept.pending.append(op)
        for variant in VARIANTS:
            left = {name: data for name, f in files.items() if (data := _surviving(f, variant, rng)) is not None}
            yield number, variant, op, left

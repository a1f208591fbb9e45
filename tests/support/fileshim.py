"""The file store's system calls, recorded and made to fail; and what a disk may hold after a power cut at each of them.

The model is that of POSIX with a journaling file system, at its harshest: what a file holds is certain once the file is synced, a
name once its folder is, and a rename is never half done. All else may be lost, kept, or come in parts and out of order.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safepoint.stores.file as file_store
from safepoint.stores.fileops import FileOps

__all__ = ["FAULTS", "VARIANTS", "Op", "Shim", "images", "under"]

SECTOR = 512
VARIANTS = ("lost", "kept", "half", "torn")
FAULTS: dict[str, Callable[[], BaseException] | None] = {
    "full": lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    "io": lambda: OSError(errno.EIO, os.strerror(errno.EIO)),
    "short": None,
    "Ctrl-C": KeyboardInterrupt,
    "memory": MemoryError,
    "exit": SystemExit,
}


@dataclass(frozen=True)
class Op:
    kind: str
    what: str
    """For people: the name that was used."""
    args: tuple[Any, ...] = ()
    acked: int = 0


class Shim(FileOps):
    """Records every call that changes something. The ``fail_at``-th of them fails, once: before it has done anything, or for
    ``short`` after half of it. ``late``: after it has done all."""

    def __init__(self, fail_at: int | None = None, fault: str = "full", *, late: bool = False) -> None:
        self.ops: list[Op] = []
        self.acked = 0
        self.failed: Op | None = None
        self.fail_at = fail_at
        self.fault = fault
        self.late = late
        self.count = 0
        self._nodes: dict[int, tuple[int, int]] = {}  # by descriptor: device and inode
        self._known: dict[tuple[int, int], int] = {}
        self._next = 0

    # Inode numbers are used again; each life of one gets a number of its own.
    def _node(self, fd: int) -> int:
        st = os.fstat(fd)
        key = (st.st_dev, st.st_ino)
        if key not in self._known:
            self._known[key] = self._next
            self._next += 1
        return self._known[key]

    def _do(self, kind: str, what: str, act: Any, args: Any = lambda: ()) -> Any:
        number, self.count = self.count, self.count + 1
        fault = FAULTS[self.fault] if number == self.fail_at else None
        if fault is not None and not self.late:
            self.failed = Op(kind, what)
            raise fault()
        before = args() if kind in {"unlink", "rmdir", "rename"} else None
        done = act()
        self.ops.append(Op(kind, what, args() if before is None else before, self.acked))
        if fault is not None:
            self.failed = Op(kind, what)
            raise fault()
        return done

    def open(self, name: str, flags: int, dir_fd: int | None = None) -> int:
        if not flags & os.O_CREAT:
            return super().open(name, flags, dir_fd)
        assert dir_fd is not None
        try:
            os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
            return super().open(name, flags, dir_fd)
        except FileNotFoundError:
            pass
        made: list[int] = []

        def act() -> int:
            made.append(FileOps.open(self, name, flags, dir_fd))
            st = os.fstat(made[0])
            self._known.pop((st.st_dev, st.st_ino), None)
            return made[0]

        try:
            return int(self._do("create", name, act, lambda: (self._node(dir_fd), name, self._node(made[0]))))
        except BaseException:
            for fd in made:
                os.close(fd)
            raise

    def write(self, fd: int, data: bytes | memoryview) -> int:
        raw = bytes(data)
        if self.fail_at == self.count and self.fault == "short":
            raw = raw[: len(raw) // 2]
            self.failed = Op("write", "")
        at = os.lseek(fd, 0, os.SEEK_END if self._appends(fd) else os.SEEK_CUR)
        done: int = self._do("write", "", lambda: super(Shim, self).write(fd, raw), lambda: (self._node(fd), at, raw))
        if self.failed is not None and self.fault == "short" and self.count == (self.fail_at or 0) + 1:
            self.fail_at, self.fault = self.count, "full"  # no more room after that
        return done

    @staticmethod
    def _appends(fd: int) -> bool:
        import fcntl

        return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_APPEND)

    def fsync(self, fd: int) -> None:
        self._do("sync", "", lambda: os.fstat(fd), lambda: (self._node(fd),))

    def truncate(self, fd: int, size: int) -> None:
        self._do("truncate", "", lambda: super(Shim, self).truncate(fd, size), lambda: (self._node(fd), size))

    def rename(self, name: str, new: str, from_fd: int, to_fd: int) -> None:
        self._do(
            "rename",
            new,
            lambda: super(Shim, self).rename(name, new, from_fd, to_fd),
            lambda: (self._node(from_fd), name, self._node(to_fd), new),
        )

    def unlink(self, name: str, dir_fd: int) -> None:
        os.stat(name, dir_fd=dir_fd, follow_symlinks=False)  # what is not there changes nothing
        self._do("unlink", name, lambda: super(Shim, self).unlink(name, dir_fd), lambda: (self._node(dir_fd), name))

    def mkdir(self, name: str, dir_fd: int) -> None:
        def node() -> tuple[Any, ...]:
            st = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
            self._known.pop((st.st_dev, st.st_ino), None)
            fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=dir_fd)
            try:
                return (self._node(dir_fd), name, self._node(fd))
            finally:
                os.close(fd)

        self._do("mkdir", name, lambda: super(Shim, self).mkdir(name, dir_fd), node)

    def rmdir(self, name: str, dir_fd: int) -> None:
        self._do("rmdir", name, lambda: super(Shim, self).rmdir(name, dir_fd), lambda: (self._node(dir_fd), name))

    def root_node(self, path: str | Path) -> int:
        fd = os.open(path, os.O_RDONLY)
        try:
            return self._node(fd)
        finally:
            os.close(fd)


@contextmanager
def under(shim: FileOps) -> Iterator[None]:
    """All file stores that are opened inside make their calls through ``shim``."""
    own = file_store.FileOps
    file_store.FileOps = lambda: shim  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        file_store.FileOps = own  # type: ignore[misc]


# -- power cuts


@dataclass
class _File:
    sure: bytes = b""
    late: list[tuple[str, int, bytes]] = field(default_factory=list)


@dataclass
class _Folder:
    sure: dict[str, int] = field(default_factory=dict)
    late: list[_Change] = field(default_factory=list)


@dataclass(eq=False)
class _Change:
    """Of names: all of it is done, or none."""

    links: dict[tuple[int, str], int | None]
    """By folder and name: the node, or None for a name that goes."""
    sure: set[int] = field(default_factory=set)
    """The folders for which it is certain."""


class _Disk:
    def __init__(self, root: int) -> None:
        self.root = root
        self.files: dict[int, _File] = {}
        self.folders: dict[int, _Folder] = {root: _Folder()}

    def apply(self, op: Op) -> None:
        a = op.args
        match op.kind:
            case "create":
                self.files[a[2]] = _File()
                self._change({(a[0], a[1]): a[2]})
            case "mkdir":
                self.folders[a[2]] = _Folder()
                self._change({(a[0], a[1]): a[2]})
            case "unlink" | "rmdir":
                self._change({(a[0], a[1]): None})
            case "rename":
                node = self.names(a[0])[a[1]]
                self._change({(a[2], a[3]): node, (a[0], a[1]): None})
            case "write":
                self.files[a[0]].late.append(("write", a[1], a[2]))
            case "truncate":
                self.files[a[0]].late.append(("truncate", a[1], b""))
            case "sync" if a[0] in self.files:
                file = self.files[a[0]]
                file.sure, file.late = _written(file.sure, file.late), []
            case "sync":
                self._sync(a[0])

    def _change(self, links: dict[tuple[int, str], int | None]) -> None:
        change = _Change(links)
        for folder, _ in links:
            if folder in self.folders and change not in self.folders[folder].late:
                self.folders[folder].late.append(change)

    def _sync(self, node: int) -> None:
        folder = self.folders[node]
        for change in folder.late:
            _link(folder.sure, change, node)
            change.sure.add(node)
        folder.late = []

    def names(self, node: int) -> dict[str, int]:
        found = dict(self.folders[node].sure)
        for change in self.folders[node].late:
            _link(found, change, node)
        return found

    def image(self, variant: str, rng: random.Random) -> dict[str, bytes | None]:
        """Paths and contents; None for a folder."""
        chosen: dict[_Change, bool] = {}

        def names(node: int) -> dict[str, int]:
            folder = self.folders[node]
            if variant in {"lost", "kept"}:
                return self.names(node) if variant == "kept" else dict(folder.sure)
            found = dict(folder.sure)
            for change in folder.late:
                if change not in chosen:
                    chosen[change] = bool(change.sure) or rng.random() < 0.5
                if chosen[change]:
                    _link(found, change, node)
            return found

        out: dict[str, bytes | None] = {}

        def put(node: int, path: str) -> None:
            for name, inner in sorted(names(node).items()):
                place = f"{path}{name}"
                if inner in self.folders:
                    out[place] = None
                    put(inner, f"{place}/")
                else:
                    out[place] = self._content(self.files[inner], variant, rng)

        put(self.root, "")
        return out

    @staticmethod
    def _content(file: _File, variant: str, rng: random.Random) -> bytes:
        if variant == "lost":
            return file.sure
        if variant == "kept":
            return _written(file.sure, file.late)
        late = [op for op in file.late if rng.random() < 0.6]
        if variant == "half":
            return _written(file.sure, late)
        parts: list[tuple[str, int, bytes]] = []
        for kind, at, data in late:
            if kind == "truncate":
                parts.append((kind, at, data))
                continue
            end = at + len(data)
            start = at
            while start < end:
                stop = min(end, (start // SECTOR + 1) * SECTOR)
                if rng.random() < 0.5:
                    parts.append((kind, start, data[start - at : stop - at]))
                start = stop
        return _written(file.sure, parts)


def _link(names: dict[str, int], change: _Change, folder: int) -> None:
    for (where, name), node in change.links.items():
        if where == folder:
            if node is None:
                names.pop(name, None)
            else:
                names[name] = node


def _written(content: bytes, ops: list[tuple[str, int, bytes]]) -> bytes:
    out = bytearray(content)
    for kind, at, data in ops:
        if kind == "truncate":
            del out[at:]
            out += bytes(at - len(out))
        else:
            out += bytes(max(0, at - len(out)))
            out[at : at + len(data)] = data
    return bytes(out)


def images(ops: list[Op], root: int, rng: random.Random) -> Iterator[tuple[int, str, Op, dict[str, bytes | None]]]:
    """What the disk may hold after each operation, four ways."""
    disk = _Disk(root)
    for number, op in enumerate(ops):
        disk.apply(op)
        for variant in VARIANTS:
            yield number, variant, op, disk.image(variant, rng)

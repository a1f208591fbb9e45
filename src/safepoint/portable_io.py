"""The file of an export: written whole or not at all, and read within bounds. What is in it: ``portable``."""

from __future__ import annotations

import errno
import io
import os
import secrets
import stat
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, Final

from safepoint import _probe
from safepoint.errors import Damaged, NotFound, StoreFull, UsageError
from safepoint.model import a_type
from safepoint.portable import LINE_MAX

__all__ = ["Target", "reading", "write"]

UNPACKED_MAX: Final = 4 * 1024**3
"""Bytes that a packed file may hold."""
RATIO_MAX: Final = 200
"""How many times its own size a packed file may hold, beyond the first RATIO_FREE bytes."""
RATIO_FREE: Final = 16 * 1024**2
_PIECE: Final = 1 << 20
_MAGIC: Final = b"\x1f\x8b"
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})

Target = str | os.PathLike[str] | IO[bytes]


def _path(target: Target) -> str | None:
    """The path, or None for a file object."""
    if isinstance(target, str | os.PathLike):
        path = os.fspath(target)
        if not isinstance(path, str) or not path or "\0" in path:
            raise UsageError("this is no path of a file", "", "Name a file, as in task-1.safepoint.")
        return path
    return None


def write(target: Target, lines: Iterable[bytes]) -> int:
    """Write the lines; how many bytes the file has. At a path: 0600, durable, and there as a whole or not at all.

    A name that ends in ``.gz`` makes a packed file. The same lines make the same bytes.

    Raises:
        UsageError: it cannot be written there. StoreFull
    """
    path = _path(target)
    if path is None:
        if not hasattr(target, "write") or isinstance(target, io.TextIOBase):
            raise UsageError(f"an export cannot be written to {a_type(target)}", "", "Pass a path, or a file opened with 'wb'.")
        return _into(target, lines, packed=False)  # type: ignore[arg-type]
    packed, lines = path.endswith(".gz"), _Passing(lines)
    with _told(path, lines):
        try:
            mode = os.stat(path).st_mode
        except FileNotFoundError:
            mode = None
        if mode is not None and not stat.S_ISREG(mode):
            if stat.S_ISDIR(mode):
                raise UsageError(f"{path} is a folder", "", "Name a file in it.")
            with open(path, "wb", buffering=0) as out:  # a pipe or a device: there is nothing to rename onto
                return _into(out, lines, packed=packed)
        real = os.path.realpath(path)  # the caller's own link is followed, not replaced
        folder = os.path.dirname(real)
        temp = os.path.join(folder, f".safepoint-{secrets.token_hex(8)}.tmp")  # a name may be as long as names can be
        fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o600)
        try:
            with os.fdopen(fd, "wb") as out:
                size = _into(out, lines, packed=packed)
                out.flush()
                os.fsync(out.fileno())
            _probe.at("export.written")
            os.replace(temp, real)
        except BaseException:
            with suppress(OSError):
                os.unlink(temp)
            raise
        _sync_folder(folder)
        return size


def _into(out: IO[bytes], lines: Iterable[bytes], *, packed: bool) -> int:
    counted = _Counted(out)
    if packed:
        import gzip  # only here: what is read is unpacked within bounds

        # Without a name and a time in it, so that equal exports are equal files.
        with gzip.GzipFile(filename="", mode="wb", fileobj=counted, compresslevel=6, mtime=0) as z:
            for line in lines:
                z.write(line)
    else:
        for line in lines:
            counted.write(line)
    return counted.size


class _Counted:
    def __init__(self, out: IO[bytes]) -> None:
        self.out = out
        self.size = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        total = len(view)
        self.size += total
        while view:
            done = self.out.write(view)
            view = view[total if done is None else done :]
        return total

    def flush(self) -> None:
        if hasattr(self.out, "flush"):
            self.out.flush()


def _sync_folder(folder: str) -> None:
    if not hasattr(os, "O_DIRECTORY"):
        return
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class _Passing:
    """Lines that are being made; what goes wrong with that is not the file's fault."""

    def __init__(self, lines: Iterable[bytes]) -> None:
        self.lines = lines
        self.error: BaseException | None = None

    def __iter__(self) -> Iterator[bytes]:
        try:
            yield from self.lines
        except OSError as error:
            self.error = error
            raise


@contextmanager
def _told(path: str, lines: _Passing | None = None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if lines is not None and error is lines.error:
            raise
        if isinstance(error, FileNotFoundError):
            raise NotFound(f"{path} does not exist", error.strerror or "", "Correct the path.", path=path) from None
        if error.errno in _FULL and not isinstance(error, StoreFull):
            raise StoreFull(f"{path} cannot be written", error.strerror or "", "Make room.", path=path) from None
        if type(error).__module__ != "builtins":
            raise  # an error of the library, or of gzip
        raise UsageError(
            f"{path} cannot be used",
            error.strerror or type(error).__name__,
            "Name a file that this program may use.",
            path=path,
        ) from None


# -- reading


@contextmanager
def reading(source: Target) -> Iterator[Iterator[bytes]]:
    """The lines of a file, packed or not, each with its line end.

    Raises:
        NotFound, UsageError: it cannot be opened. Damaged (on the way): it is cut, or no export: a line or the whole is larger than
            any export.
    """
    path = _path(source)
    if path is None:
        if not hasattr(source, "read") or isinstance(source, io.TextIOBase):
            raise UsageError(f"an export cannot be read from {a_type(source)}", "", "Pass a path, or a file opened with 'rb'.")
        yield _lines(_Input(source))  # type: ignore[arg-type]
        return
    with _told(path):
        opened = open(path, "rb")  # noqa: SIM115
    with opened:
        yield _lines(_Input(opened))


class _Input:
    """Bytes of a file, unpacked if they are packed, and counted on both sides."""

    def __init__(self, source: IO[bytes]) -> None:
        self.source = source
        self.taken = 0
        self.given = 0
        self.rest = b""
        self.zip: Any = None
        self.ended = False
        first = b""
        while len(first) < 2 and (more := self._raw()):
            first += more
        self.packed = first[:2] == _MAGIC
        self.rest = first
        if self.packed:
            self.zip = zlib.decompressobj(wbits=31)

    def _raw(self) -> bytes:
        try:
            data = self.source.read(_PIECE)
        except OSError as error:
            raise UsageError("the file cannot be read", error.strerror or "", "") from None
        if data is not None and not isinstance(data, bytes):
            raise UsageError("an export is read from a binary file", "", "Open it with 'rb'.")
        self.taken += len(data or b"")
        return data or b""

    def read(self) -> bytes:
        """The next piece, at most _PIECE bytes; empty at the end."""
        if not self.packed:
            data, self.rest = self.rest or self._raw(), b""
            return data
        while not self.ended:
            data = self.rest or self._raw()
            if not data:
                raise Damaged(
                    "the file cannot be imported", "it is cut: its packed data has no end", "Take another copy of it."
                )
            try:
                piece: bytes = self.zip.decompress(data, _PIECE)
            except zlib.error:
                raise Damaged(
                    "the file cannot be imported", "its packed data was changed", "Take another copy of it."
                ) from None
            self.rest = self.zip.unconsumed_tail
            if self.zip.eof:
                self.ended = True
                if self.zip.unused_data or self._raw():
                    raise Damaged("the file cannot be imported", "it goes on after its end", "Take another copy of it.")
            self.given += len(piece)
            if self.given > UNPACKED_MAX or (self.given > RATIO_FREE and self.given > RATIO_MAX * self.taken):
                raise Damaged(
                    "the file cannot be imported",
                    f"it unpacks to more than {RATIO_MAX} times its size, or to more than {UNPACKED_MAX} bytes",
                    "If you trust it, unpack it with gunzip and import what comes out.",
                )
            if piece:
                return piece
        return b""


def _lines(source: _Input) -> Iterator[bytes]:
    parts: list[bytes] = []
    size = 0
    while data := source.read():
        for part in _split(data):
            parts.append(part)
            size += len(part)
            if size > LINE_MAX:
                raise Damaged(
                    "the file cannot be imported", f"a line has more than {LINE_MAX} bytes", "Take another copy of it."
                )
            if part[-1:] == b"\n":
                yield b"".join(parts)
                parts, size = [], 0
    if parts:
        yield b"".join(parts)


def _split(data: bytes) -> list[bytes]:
    """By line feeds alone."""
    pieces = data.split(b"\n")
    return [piece + b"\n" for piece in pieces[:-1]] + ([pieces[-1]] if pieces[-1] else [])

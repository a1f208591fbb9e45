"""Every system call of the file store, in one place: what tests replace to fail, record and replay them.

Everything below the root is reached through descriptors of folders, never by a path that is looked up again, and no link is
followed: what was checked is what is used, whoever swaps a folder for a link in between.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from safepoint.errors import Damaged, SafepointError, StoreFull, Unavailable

__all__ = ["FileOps", "is_other", "translate"]

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_OTHER = frozenset({errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ESPIPE, errno.ENXIO})
"""What is said of a link, a folder, a pipe or a socket by calls that want a file."""
_FULL_FSYNC = getattr(fcntl, "F_FULLFSYNC", None)


_places: dict[int, str] = {}
"""The paths of what is open, for errors alone; no call goes by them."""


@contextmanager
def _at(fd: int | None, name: str = "") -> Iterator[None]:
    """Let what the system says against a call name the whole path."""
    try:
        yield
    except OSError as error:
        place = _places.get(fd, "") if fd is not None else ""
        error.filename = os.path.join(place, name) if name else place
        raise


class FileOps:
    """The calls themselves. A subclass may count, record or refuse them."""

    def open(self, name: str, flags: int, dir_fd: int | None = None) -> int:
        # Not to wait for whoever opens the other end, should it be a pipe.
        with _at(dir_fd, name):
            fd = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600, dir_fd=dir_fd)
        _places[fd] = os.path.join(_places.get(dir_fd, "") if dir_fd is not None else "", name)
        return fd

    def folder(self, name: str, dir_fd: int | None = None) -> int:
        # The root itself may be reached over links: it is what its owner says it is. Nothing below it may.
        with _at(dir_fd, name):
            fd = os.open(name, _FOLDER if dir_fd is not None else _FOLDER & ~os.O_NOFOLLOW, dir_fd=dir_fd)
        _places[fd] = os.path.join(_places.get(dir_fd, "") if dir_fd is not None else "", name)
        return fd

    def close(self, fd: int) -> None:
        _places.pop(fd, None)
        os.close(fd)

    def read(self, fd: int, size: int, offset: int) -> bytes:
        with _at(fd):
            return os.pread(fd, size, offset)

    def write(self, fd: int, data: bytes | memoryview) -> int:
        with _at(fd):
            return os.write(fd, data)

    def fsync(self, fd: int) -> None:
        with _at(fd):
            if _FULL_FSYNC is not None:
                fcntl.fcntl(fd, _FULL_FSYNC)  # on macOS fsync leaves the data in the drive's own cache
            else:
                os.fsync(fd)

    def truncate(self, fd: int, size: int) -> None:
        with _at(fd):
            os.ftruncate(fd, size)

    def rename(self, name: str, new: str, from_fd: int, to_fd: int) -> None:
        with _at(to_fd, new):
            os.rename(name, new, src_dir_fd=from_fd, dst_dir_fd=to_fd)

    def unlink(self, name: str, dir_fd: int) -> None:
        with _at(dir_fd, name):
            os.unlink(name, dir_fd=dir_fd)

    def mkdir(self, name: str, dir_fd: int) -> None:
        with _at(dir_fd, name):
            os.mkdir(name, 0o700, dir_fd=dir_fd)

    def rmdir(self, name: str, dir_fd: int) -> None:
        with _at(dir_fd, name):
            os.rmdir(name, dir_fd=dir_fd)

    def chmod(self, fd: int, mode: int) -> None:
        with _at(fd):
            os.fchmod(fd, mode)

    def list(self, fd: int) -> list[str]:
        with _at(fd):
            return os.listdir(fd)

    def fstat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def lstat(self, name: str, dir_fd: int) -> os.stat_result:
        with _at(dir_fd, name):
            return os.stat(name, dir_fd=dir_fd, follow_symlinks=False)

    # -- made of these

    @contextmanager
    def opened(self, fd: int) -> Iterator[int]:
        try:
            yield fd
        finally:
            self.close(fd)

    def read_all(self, fd: int, offset: int = 0) -> bytes:
        parts = []
        while part := self.read(fd, 1 << 20, offset):
            parts.append(part)
            offset += len(part)
        return b"".join(parts)

    def write_all(self, fd: int, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            done = self.write(fd, rest)
            if done <= 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            rest = rest[done:]

    def child(self, name: str, dir_fd: int, *, create: bool = False, sync: bool = True) -> int:
        """Open a folder, made if it is not there."""
        try:
            return self.folder(name, dir_fd)
        except FileNotFoundError:
            if not create:
                raise
        try:
            self.mkdir(name, dir_fd)
        except FileExistsError:
            pass
        fd = self.folder(name, dir_fd)
        try:
            self.chmod(fd, 0o700)  # whatever the umask
            if sync:
                self.fsync(dir_fd)
        except BaseException:
            self.close(fd)
            raise
        return fd

    def is_folder(self, name: str, dir_fd: int) -> bool:
        try:
            return stat.S_ISDIR(self.lstat(name, dir_fd).st_mode)
        except FileNotFoundError:
            return False

    def remove_tree(self, name: str, dir_fd: int) -> None:
        """Remove a folder and all in it. Links in it are removed, and not followed. Others may do the same at the same time."""
        try:
            with self.opened(self.folder(name, dir_fd)) as fd:
                for inner in self.list(fd):
                    if self.is_folder(inner, fd):
                        self.remove_tree(inner, fd)
                    else:
                        with suppress(FileNotFoundError):
                            self.unlink(inner, fd)
            self.rmdir(name, dir_fd)
        except FileNotFoundError:
            pass


def is_other(error: OSError) -> bool:
    """Whether something lies there that is no file or no folder."""
    return error.errno in _OTHER


def translate(error: OSError, path: str) -> SafepointError:
    """An error of the system in the words of the library; it names the file."""
    text = error.strerror or type(error).__name__
    if error.errno in _FULL:
        return StoreFull(f"there is no room to write {path}", text, "Free some space; what is stored is as it was.", path=path)
    if is_other(error):
        return Damaged(
            f"{path} is no folder or file of its own",
            "it is a link, or something else lies in its place",
            "Put back what was there; links inside a store are never followed.",
            path=path,
        )
    return Unavailable(f"{path} cannot be used", text, "Look at it, its folder and its permissions.", path=path)

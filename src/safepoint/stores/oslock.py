"""Claims that the kernel takes back when their process dies: one locked byte each, in a file that nothing else opens.

``lockf`` is free within a millisecond of ``kill -9``, is held while the process is stopped, is seen across pid namespaces and
is not inherited by a forked child. It has two traps, and this module exists to close them: closing *any* descriptor of the
file drops all locks of the process, so there is one descriptor per file, found by device and inode; and a second taker in
the same process is not refused, so the bytes that this process holds are kept in a set.
"""

from __future__ import annotations

import fcntl
import os
import threading

from safepoint.stores.forking import at_fork

__all__ = ["Claim", "LockFile"]

_files: dict[tuple[int, int], _Open] = {}
# Re-entrant: a run that is collected frees its claim wherever the collector happens to run, in here too.
_lock = threading.RLock()
# Descriptors that turned out to be a second one of a registered file: to close one would drop the locks of the first.
_never_closed: list[int] = []


class _Open:
    __slots__ = ("fd", "held", "key", "users")

    def __init__(self, key: tuple[int, int], fd: int) -> None:
        self.key = key
        self.fd = fd
        self.held: set[int] = set()
        self.users = 0


def _emptied() -> None:
    # In the child: the locks stayed with the parent. Closing the copies here drops nothing of the parent's, as POSIX locks
    # belong to a process; a claim that the child finds in its memory is no longer in any registry and does nothing.
    for opened in _files.values():
        os.close(opened.fd)
        opened.fd = -1
    _files.clear()
    _never_closed.clear()


at_fork(_lock, _emptied)


class Claim:
    """A byte that this process holds. ``free`` may be called by anyone, any number of times, in any process."""

    __slots__ = ("_opened", "byte")

    def __init__(self, opened: _Open, byte: int) -> None:
        self._opened = opened
        self.byte = byte

    def free(self) -> None:
        with _lock:
            opened = self._opened
            if self.byte in opened.held and opened.fd >= 0:  # below 0: the parent's, this is a forked child
                opened.held.discard(self.byte)
                fcntl.lockf(opened.fd, fcntl.LOCK_UN, 1, self.byte)
                _close_if_idle(opened)

    def __repr__(self) -> str:
        return f"<Claim {self.byte}>"


class LockFile:
    """The lock file of one store. Several stores of a process on one file share its descriptor."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._opened: _Open | None = None

    def claim(self, byte: int) -> Claim | None:
        """Lock a byte; None if this or another process holds it."""
        with _lock:
            opened = self._open()
            if byte in opened.held:
                return None
            try:
                fcntl.lockf(opened.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
            except OSError as error:
                if isinstance(error, BlockingIOError | PermissionError):
                    return None
                raise
            opened.held.add(byte)
            return Claim(opened, byte)

    def is_held(self, byte: int) -> bool:
        """Whether a living process holds the byte."""
        with _lock:
            opened = self._open()
            if byte in opened.held:
                return True
            try:
                # Shared, so that two who ask at the same moment do not take each other for the holder.
                fcntl.lockf(opened.fd, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, byte)
            except OSError as error:
                if isinstance(error, BlockingIOError | PermissionError):
                    return True
                raise
            fcntl.lockf(opened.fd, fcntl.LOCK_UN, 1, byte)
            return False

    def close(self) -> None:
        """Forget the file. Its descriptor stays open while any claim on it lives."""
        with _lock:
            opened, self._opened = self._opened, None
            if opened is not None and opened.fd >= 0:
                opened.users -= 1
                _close_if_idle(opened)

    def _open(self) -> _Open:
        if self._opened is not None and self._opened.fd >= 0:
            return self._opened
        try:
            found = os.stat(self.path)
            opened = _files.get((found.st_dev, found.st_ino))
        except FileNotFoundError:
            opened = None
        if opened is None:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            made = os.fstat(fd)
            key = (made.st_dev, made.st_ino)
            opened = _files.get(key)
            if opened is None:
                opened = _files[key] = _Open(key, fd)
            else:
                _never_closed.append(fd)  # the name was moved to a registered file between stat and open
        opened.users += 1
        self._opened = opened
        return opened


def _close_if_idle(opened: _Open) -> None:
    if not opened.held and opened.users <= 0 and not _never_closed:
        _files.pop(opened.key, None)
        fd, opened.fd = opened.fd, -1
        os.close(fd)

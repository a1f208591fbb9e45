"""Claims that the kernel takes back when their process dies: one locked byte each, in a file that nothing else opens.

``lockf`` is free within a millisecond of ``kill -9``, is held while the process is stopped, is seen across pid namespaces and
is not inherited by a forked child. It has two traps, and this module exists to close them: closing *any* descriptor of the
file drops all locks of the process, so there is one descriptor per file, found by device and inode; and a second taker in
the same process is not refused, so the bytes that this process holds are kept in a set.

The proof holds for one file only: where somebody has removed it, a second one of its name knows nothing of the locks in the
first, whose holders live on. So each file has a random name of its own inside, a claim says in which one it was made, and of
a byte of another one nobody says that it is free.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import threading
import time

from safepoint.errors import Unavailable
from safepoint.stores.forking import at_fork

__all__ = ["Claim", "LockFile"]

_files: dict[tuple[int, int], _Open] = {}
# Re-entrant: a run that is collected frees its claim wherever the collector happens to run, in here too.
_lock = threading.RLock()
# Descriptors that turned out to be a second one of a registered file: to close one would drop the locks of the first.
_never_closed: list[int] = []

_NAME = 32
_NAMING = 1 << 62
"""The byte that is locked while a new file gets its name; claims lie below."""


class _Open:
    __slots__ = ("fd", "held", "key", "name", "users")

    def __init__(self, key: tuple[int, int], fd: int, name: str) -> None:
        self.key = key
        self.fd = fd
        self.name = name
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

    __slots__ = ("_opened", "byte", "file")

    def __init__(self, opened: _Open, byte: int) -> None:
        self._opened = opened
        self.byte = byte
        self.file = opened.name
        """Names the file that the byte is locked in."""

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

    def free(self, byte: int) -> None:
        """Let a byte of this process go, whoever has its claim: for those who keep book of their bytes themselves."""
        with _lock:
            if self._opened is not None:
                Claim(self._opened, byte).free()

    def is_held(self, byte: int, file: str | None = None) -> bool | None:
        """Whether a living process holds the byte, locked in the file of that name (or in the one that is there now).

        None: that file is there no longer, and another process may hold the byte or not.
        """
        with _lock:
            if file is not None and any(o.name == file and byte in o.held for o in _files.values()):
                return True
            opened = self._open()
            if byte in opened.held:
                return True
            if file is not None and file != opened.name:
                return None
            try:
                # Shared, so that two who ask at the same moment do not take each other for the holder.
                fcntl.lockf(opened.fd, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, byte)
            except OSError as error:
                if isinstance(error, BlockingIOError | PermissionError):
                    return True
                raise
            fcntl.lockf(opened.fd, fcntl.LOCK_UN, 1, byte)
            return False

    # -- bytes: locks are on numbers, and do not mind what lies there

    def read_at(self, offset: int, size: int) -> bytes:
        with _lock:
            return os.pread(self._usable().fd, size, offset)

    def write_at(self, offset: int, data: bytes) -> None:
        with _lock:
            os.pwrite(self._usable().fd, data, offset)

    def flush(self) -> None:
        with _lock:
            os.fsync(self._usable().fd)

    def _usable(self) -> _Open:
        # Without asking each time whether the file is still there: the next lock asks.
        opened = self._opened
        return opened if opened is not None and opened.fd >= 0 else self._open()

    def close(self) -> None:
        """Forget the file. Its descriptor stays open while any claim on it lives."""
        with _lock:
            opened, self._opened = self._opened, None
            if opened is not None and opened.fd >= 0:
                opened.users -= 1
                _close_if_idle(opened)

    def _open(self) -> _Open:
        try:
            found = os.lstat(self.path)
            key = (found.st_dev, found.st_ino)
        except FileNotFoundError:
            key = (0, 0)
        if self._opened is not None and self._opened.fd >= 0:
            if self._opened.key == key:
                return self._opened
            self.close()  # it was removed or replaced: the others see another file now
        opened = _files.get(key)
        if opened is None:
            try:
                # A link would have us lock, and name, a file that lies elsewhere.
                fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except OSError as error:
                raise Unavailable(
                    f"{self.path} cannot be opened",
                    error.strerror or type(error).__name__,
                    "Look at its folder and permissions.",
                    path=self.path,
                ) from error
            made = os.fstat(fd)
            key = (made.st_dev, made.st_ino)
            opened = _files.get(key)
            if opened is None:
                try:
                    opened = _Open(key, fd, _name_of(fd, self.path))
                except BaseException:
                    os.close(fd)
                    raise
                _files[key] = opened
            else:
                _never_closed.append(fd)  # the name was moved to a registered file between stat and open
        opened.users += 1
        self._opened = opened
        return opened


def _name_of(fd: int, path: str) -> str:
    """What a lock file is called inside; whoever comes to a new one first calls it something."""
    until = time.monotonic() + 5
    while len(name := os.pread(fd, _NAME, 0)) < _NAME:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _NAMING)
        except (BlockingIOError, PermissionError):
            if time.monotonic() > until:
                raise Unavailable(
                    f"{path} cannot be used", "another process does not come to an end of making it", "Look for a stopped one."
                ) from None
            time.sleep(0.001)
            continue
        try:
            if len(os.pread(fd, _NAME, 0)) < _NAME:
                os.pwrite(fd, secrets.token_hex(_NAME // 2).encode(), 0)
                # Else a power cut leaves a file without a name, and holders that it ended would not be proven dead.
                os.fsync(fd)
                _sync_folder(path)
        finally:
            fcntl.lockf(fd, fcntl.LOCK_UN, 1, _NAMING)
    return name.decode("latin-1")


def _sync_folder(path: str) -> None:
    folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _close_if_idle(opened: _Open) -> None:
    if not opened.held and opened.users <= 0 and not _never_closed:
        _files.pop(opened.key, None)
        fd, opened.fd = opened.fd, -1
        os.close(fd)

"""Processes of servers that tests start: each with a folder of its own, and at an end when the tests are.

They end with the process that started them, a SIGKILL of it included; the folders that such a death leaves are removed by the next
process that makes one.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

__all__ = [
    "READY_WITHIN",
    "Server",
    "ServerFailed",
    "ServerMissing",
    "free_port",
    "is_gone",
    "plain_environ",
    "remove_abandoned",
]

READY_WITHIN = 60.0
STOPPED_WITHIN = 30.0


class ServerMissing(FileNotFoundError):
    """There is no program to start."""


class ServerFailed(RuntimeError):
    """The program did not start, or ended by itself; what it wrote comes with it."""


# -- processes that end with this one

_LAUNCH = """
import ctypes, os, signal, sys
parent, uid, gid, *command = sys.argv[1:]
if int(uid) >= 0:
    os.setgroups([])
    os.setgid(int(gid))
    os.setuid(int(uid))
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGINT)  # PR_SET_PDEATHSIG; only now, as a change of user takes it back
if os.getppid() != int(parent):
    sys.exit("the tests ended meanwhile")
os.execv(command[0], command)
"""

_lasting: list[ThreadPoolExecutor] = []


def _on_a_lasting_thread(do: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    """The signal at a parent's death comes when the THREAD that forked has ended: fork on one that lasts as long as the tests."""
    if threading.current_thread() is threading.main_thread():
        return do()
    if not _lasting:
        _lasting.append(ThreadPoolExecutor(1, "servers"))
    return _lasting[0].submit(do).result()


def _launch(command: Sequence[str | Path], folder: Path, user: tuple[int, int] | None) -> subprocess.Popen[bytes]:
    # By a program that execs the server, as a preexec_fn is not safe in a process with threads (and warned of since 3.12).
    uid, gid = user or (-1, -1)
    words = [sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid()), str(uid), str(gid), *map(str, command)]
    with open(folder / "log", "ab") as log:
        return _on_a_lasting_thread(
            lambda: subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=folder,
                start_new_session=True,
                env=plain_environ(),
            )
        )


def plain_environ() -> dict[str, str]:
    """Without what would tell a server of the caller's own."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PG")}


def _children_of(pid: int) -> list[int]:
    """By ps where there is no /proc."""
    if not os.path.isdir("/proc/self"):
        shown = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
        pairs = (line.split() for line in shown.splitlines())
        return [int(child) for child, parent in pairs if int(parent) == pid]
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and _stat(int(name))[1:2] == [str(pid)]]


def _stat(pid: int) -> list[str]:
    """State, parent and so on; empty if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="latin-1") as f:
            return f.read().rpartition(") ")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def is_gone(pid: int) -> bool:
    if os.path.isdir("/proc/self"):
        return _stat(pid)[:1] in ([], ["Z"])
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def _kill_if_there(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


# -- places


def _make_folder(kind: str, where: str = "/tmp") -> tuple[Path, int]:
    """A folder of short path (a unix socket's is limited to 104 bytes) and the descriptor that says that it is in use."""
    remove_abandoned(where)
    folder = Path(tempfile.mkdtemp(prefix=f"spt-{kind}-", dir=where))
    fd = os.open(folder / "lock.new", os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    os.rename(folder / "lock.new", folder / "lock")  # never seen unlocked
    return folder, fd


def remove_abandoned(where: str) -> None:
    """Remove the folders of processes that were killed."""
    for lock in glob.glob(f"{where}/spt-*/lock"):
        try:
            fd = os.open(lock, os.O_RDWR)
        except OSError:
            continue  # another user's, or just removed
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(os.path.dirname(lock), ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(fd)


def free_port() -> int:
    """Below the ports that the kernel gives to outgoing connections: one of those could take it while the server is down."""
    while True:
        port = random.SystemRandom().randrange(15000, 30000)
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


# -- what all servers share


class Server:
    """A process, its folder and its log."""

    name = ""
    fast_signal = signal.SIGTERM

    def __init__(self, kind: str, where: str = "/tmp", user: tuple[int, int] | None = None) -> None:
        self.folder, self._lock = _make_folder(kind, where)
        self._user = user
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        if user:
            os.chown(self.folder, *user)

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.name} is not running"
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def start(self) -> None:
        """Start it, and return when it takes connections."""
        assert not self.running, f"{self.name} runs already"
        self._process = _launch(self._command(), self.folder, self._user)
        end = time.monotonic() + READY_WITHIN
        while not self._ready():
            if not self.running:
                raise ServerFailed(f"{self.name} did not start:\n{self.log()}")
            if time.monotonic() > end:
                self.kill()
                raise ServerFailed(f"{self.name} was not ready after {READY_WITHIN:.0f} s:\n{self.log()}")
            time.sleep(0.005)

    def _command(self) -> list[str | Path]:
        raise NotImplementedError

    def _ready(self) -> bool:
        raise NotImplementedError

    def _end(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        assert self._owner == os.getpid(), "only the process that started a server may end it"
        if self.running:
            self._process.send_signal(number)
        try:
            self._process.wait(STOPPED_WITHIN)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ServerFailed(f"{self.name} did not stop within {STOPPED_WITHIN:.0f} s:\n{self.log()}") from None
        self._process = None

    def kill(self) -> None:
        """SIGKILL to all of its processes at once."""
        if self._process is None:
            return
        assert self._owner == os.getpid(), "only the process that started a server may end it"
        family: list[int] = []
        if self.running:
            self._process.send_signal(signal.SIGSTOP)  # no new children while they are listed
            family = _children_of(self._process.pid)
        for pid in family:
            _kill_if_there(pid)
        self._process.kill()
        self._process.wait()
        self._process = None
        while not all(map(is_gone, family)):
            time.sleep(0.001)

    def close(self) -> None:
        """End it and remove what it kept."""
        self.kill()
        if self._lock >= 0:
            shutil.rmtree(self.folder, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1

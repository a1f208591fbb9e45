"""Processes that can be killed, stopped and waited for, each a fork of one server that has imported everything once.

A child runs a function that can be imported in the server and talks through a socket: ``tell`` sends to the test, ``hear``
waits for its word. What is killed here is killed for real, by its pid; the server reaps a child only when the test asks, so
that a pid is never somebody else's. Run as a file, this module is the server.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

_SIZE = struct.Struct(">I")


class Channel:
    """Pickled messages over a stream socket: a bare descriptor, as a socket object that a failed test leaves behind warns."""

    def __init__(self, sock: socket.socket) -> None:
        self.fd = sock.detach()

    def send(self, message: Any) -> None:
        body = pickle.dumps(message)
        data = memoryview(_SIZE.pack(len(body)) + body)
        while data:
            data = data[os.write(self.fd, data) :]

    def receive(self) -> Any:
        """The next message. EOFError when the other side is gone, in the middle of one too."""
        return pickle.loads(self._exactly(_SIZE.unpack(self._exactly(_SIZE.size))[0]))

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                part = os.read(self.fd, size - len(data))
            except ConnectionResetError:
                part = b""
            if not part:
                raise EOFError
            data += part
        return bytes(data)

    def ready(self, timeout: float) -> bool:
        return bool(select.select([self.fd], [], [], timeout)[0])

    def whole(self) -> socket.socket:
        """Another descriptor of the same socket, as an object, to send descriptors through."""
        return socket.socket(fileno=os.dup(self.fd))

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        self.close()


class ChildError(AssertionError):
    """The child raised, or ended otherwise than it should."""


class ServerGone(OSError):
    """The process that forks the children has ended, and its children with it."""


class Child:
    """A process of the server's, as the test sees it."""

    def __init__(self, server: Server, pid: int, channel: Channel, what: str) -> None:
        self.pid = pid
        self.channel = channel
        self.heard: list[Any] = []
        self._server = server
        self._what = what
        self._status: int | None = None
        self._owner = os.getpid()

    # -- messages

    def read(self) -> Any:
        """The next message that the child told; ChildError if it raised, EOFError if it is gone."""
        message = self.channel.receive()
        if message[0] == "!raised":
            raise ChildError(f"{self._what} raised\n{message[1]}")
        self.heard.append(message)
        return message

    def until(self, name: str) -> Any:
        """Read up to the message of this name, and return it."""
        while (message := self.read())[0] != name:
            pass
        return message

    def say(self, message: Any, *, may_have_ended: bool = False) -> None:
        try:
            self.channel.send(message)
        except BrokenPipeError:
            if not may_have_ended:
                raise

    def result(self) -> Any:
        """Wait for the child's end and return what its function returned."""
        try:
            while (message := self.read())[0] != "!returned":
                pass
        except EOFError:
            raise ChildError(f"{self._what} ended without a word (status {self.wait()})") from None
        self.heard.pop()
        self.wait()
        return message[1]

    def told(self) -> list[Any]:
        """All that the child told up to its death or end."""
        try:
            while True:
                self.read()
        except EOFError:
            return [m for m in self.heard if not m[0].startswith("!")]

    # -- signals

    def signal(self, number: int) -> None:
        # Through its parent, which may live in a pid namespace where numbers mean others than here.
        assert self._status is None
        self._server.ask("signal", self.pid, int(number))

    def kill(self) -> None:
        """SIGKILL, and the end waited for."""
        if self._status is None:
            self.signal(signal.SIGKILL)
            self.wait()

    def stop(self) -> None:
        """SIGSTOP, and wait until it stands."""
        self.signal(signal.SIGSTOP)
        while state_of(self.pid) != "T":
            time.sleep(0.001)

    def go_on(self) -> None:
        self.signal(signal.SIGCONT)

    def wait(self) -> int:
        """The exit status; negative is the signal that ended it."""
        if self._status is None:
            self._status = self._server.ask("wait", self.pid)
        return self._status

    @property
    def was_killed(self) -> bool:
        return self.wait() == -signal.SIGKILL

    def __del__(self) -> None:
        # A test that failed leaves no process behind. (A copy of this in a fork of the test's process is none of its business.)
        try:
            if self._owner == os.getpid() and self._status is None:
                self._server.bury(self.pid)
        except (OSError, EOFError):
            pass  # the server is gone, and took its children with it
        self.channel.close()


def state_of(pid: int) -> str:
    with open(f"/proc/{pid}/stat", encoding="latin-1") as f:
        return f.read().rpartition(") ")[2][0]


class Server:
    """Starts children. One server serves a whole test module; close it in the end."""

    def __init__(self, *preload: str, prefix: tuple[str, ...] = ()) -> None:
        mine, its = socket.socketpair()
        command = [*prefix, sys.executable, "-P", os.path.abspath(__file__), str(its.fileno())]
        self.process = subprocess.Popen(command, pass_fds=[its.fileno()], stdin=subprocess.DEVNULL)
        its.close()
        self._channel = Channel(mine)
        self._asking = False
        self._left: list[int] = []
        self._channel.send((sys.path, preload))
        assert self._channel.receive() == "ready"

    def ask(self, *message: Any) -> Any:
        with self._there():
            self._channel.send(message)
            return self._channel.receive()

    def start(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Child:
        mine, its = socket.socketpair()
        channel = Channel(mine)
        with its, self._channel.whole() as control, self._there():
            self._channel.send(("start", fn.__module__, fn.__qualname__, args, kwargs))
            socket.send_fds(control, [b"."], [its.fileno()])
            pid = self._channel.receive()
        return Child(self, pid, channel, f"{fn.__qualname__}{args}")

    def bury(self, pid: int) -> None:
        """Kill and reap a child that nobody refers to. The garbage collector may say so in the middle of a question to the server,
        where another one would be taken for the rest of it: then this comes after it."""
        self._left.append(pid)
        while self._left and not self._asking:
            pid = self._left.pop()
            self.ask("signal", pid, int(signal.SIGKILL))
            self.ask("wait", pid)

    @contextlib.contextmanager
    def _there(self) -> Iterator[None]:
        self._asking = True
        try:
            yield
            self._asking = False
            while self._left:
                self.bury(self._left.pop())
        except (BrokenPipeError, EOFError) as error:
            # All tests that share it fail from here on; this tells what of.
            raise ServerGone(f"the server of children has ended: status {self.process.wait()}") from error

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function in a child to its end, and return what it returned."""
        child = self.start(fn, *args, **kwargs)
        try:
            return child.result()
        finally:
            child.kill()

    def close(self) -> None:
        self._channel.close()
        self.process.wait()


# -- in a child

channel: Channel | None = None


def tell(*message: Any) -> None:
    """Send a message to the test; returns when the kernel has it, so a SIGKILL right after loses nothing."""
    assert channel is not None
    channel.send(message)


def hear() -> Any:
    """Wait for the test's word. The test's end is this process's end."""
    assert channel is not None
    try:
        return channel.receive()
    except EOFError:
        os._exit(3)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _child(sock: socket.socket, module: str, name: str, args: Any, kwargs: Any) -> None:
    code = 1
    # The copy that the function imports, not the __main__ that this file runs as.
    me: Any = importlib.import_module("tests.support.children")
    me.channel = Channel(sock)
    try:
        fn: Any = importlib.import_module(module)
        for part in name.split("."):
            fn = getattr(fn, part)
        value = fn(*args, **kwargs)
        me.channel.send(("!returned", value))
        code = 0
    except BaseException:
        text = traceback.format_exc()
        try:
            me.channel.send(("!raised", text))
        except OSError:
            print(text, file=sys.stderr)
    finally:
        os._exit(code)


def main() -> None:
    control = Channel(socket.socket(fileno=int(sys.argv[1])))
    sys.path[:], preload = control.receive()
    for name in preload:
        importlib.import_module(name)
    importlib.import_module("tests.support.children")
    control.send("ready")
    living: set[int] = set()
    try:
        while True:
            what, *rest = control.receive()
            if what == "wait":
                control.send(os.waitstatus_to_exitcode(os.waitpid(rest[0], 0)[1]))
                living.discard(rest[0])
                continue
            if what == "signal":
                os.kill(*rest)
                control.send(None)
                continue
            with control.whole() as whole:
                _, fds, _, _ = socket.recv_fds(whole, 1, 1)
            sock = socket.socket(fileno=fds[0])
            pid = os.fork()
            if not pid:
                control.close()
                _child(sock, *rest)
            sock.close()
            living.add(pid)
            control.send(pid)
    except EOFError:
        pass
    finally:
        # The test is over, or died: leave nobody behind.
        for pid in living:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


if __name__ == "__main__":
    main()

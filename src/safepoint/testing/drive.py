"""Two ways to hold the store that a machine tests: in this process, or in one that can be killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from safepoint.stores.base import Store
from safepoint.testing.worker import receive, send

__all__ = ["Driver", "Killed", "Local", "Place", "Remote", "end_processes"]


class Killed(Exception):
    """The process that held the store died before it answered."""


@dataclass(frozen=True)
class Place:
    """How to open a store in another process: a function that can be imported there, and what it is given."""

    factory: Callable[..., Store]
    args: tuple[Any, ...] = ()
    keywords: dict[str, Any] = field(default_factory=dict)


class Driver(Protocol):
    can_crash: bool

    def __call__(self, verb: str, /, *args: Any, **keywords: Any) -> Any: ...
    def reopen(self) -> None: ...
    def crash(self) -> None: ...
    def crash_during(self, point: int, verb: str, /, *args: Any, **keywords: Any) -> Any: ...
    def close(self) -> None: ...


class Local:
    """The store in this process; what is in its memory cannot be closed or killed without losing all."""

    can_crash = False

    def __init__(self, store: Store) -> None:
        self.store = store

    def __call__(self, verb: str, /, *args: Any, **keywords: Any) -> Any:
        return getattr(self.store, verb)(*args, **keywords)

    def reopen(self) -> None:
        raise NotImplementedError

    def crash(self) -> None:
        raise NotImplementedError

    def crash_during(self, point: int, verb: str, /, *args: Any, **keywords: Any) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        self.store.close()


class Remote:
    """The store in a process of its own, which ``crash`` kills with SIGKILL."""

    can_crash = True

    def __init__(self, place: Place) -> None:
        self.place = place
        self._start()

    def __call__(self, verb: str, /, *args: Any, **keywords: Any) -> Any:
        try:
            send(self._outlet, (verb, args, keywords))
            good, answer = receive(self._inlet)
        except (EOFError, OSError) as error:
            raise Killed from error
        if not good:
            raise answer
        return answer

    def reopen(self) -> None:
        self("close")
        self._open()

    def crash(self) -> None:
        self._end()
        self._start()

    def crash_during(self, point: int, verb: str, /, *args: Any, **keywords: Any) -> Any:
        """Begin a verb and kill its process: at its ``point``-th named point, with 0 at any moment.

        Returns its answer if it came to its end before, else raises Killed. In both cases the store is opened again.
        """
        timer = None
        if point:
            self("arm", point)
        else:
            timer = threading.Timer(time.perf_counter_ns() % 3000 / 1e6, os.kill, (self._pid, signal.SIGKILL))
            timer.start()
        try:
            return self(verb, *args, **keywords)
        finally:
            if timer is not None:
                timer.join()
            self.crash()

    def close(self) -> None:
        try:
            self("close")
        except Killed:
            pass
        self._end()

    def _start(self) -> None:
        nursery = _nurseries.get(self.place.factory)
        if nursery is None:
            nursery = _nurseries[self.place.factory] = _Nursery(self.place.factory)
        self._nursery = nursery
        self._line, self._pid = nursery.bear()
        self._inlet, self._outlet = self._line.makefile("rb"), self._line.makefile("wb")
        self._open()

    def _end(self) -> None:
        # It is waited for by its parent alone, so its number cannot have gone to another process.
        os.kill(self._pid, signal.SIGKILL)
        for end in (self._outlet, self._inlet, self._line):
            try:
                end.close()
            except OSError:
                pass  # what was still to be written has nobody to read it
        self._nursery.bury(self._pid)

    def _open(self) -> None:
        self("open", self.place.factory, self.place.args, self.place.keywords)


class _Nursery:
    """The process that the others are forked from."""

    def __init__(self, factory: Callable[..., Store]) -> None:
        self._control, theirs = socket.socketpair()
        script = str(Path(__file__).with_name("worker.py"))
        # -P: beside that file lie modules with names that others have, too.
        command = [sys.executable, "-P", script, str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        with self._control.makefile("wb") as outlet:
            send(outlet, sys.path)
            send(outlet, factory)
        assert self._control.recv(32) == b"ready"

    def bear(self) -> tuple[socket.socket, int]:
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [b"fork"], [theirs.fileno()])
        return ours, int(self._control.recv(32))

    def bury(self, pid: int) -> None:
        self._control.sendall(b"%d" % pid)
        assert self._control.recv(32) == b"dead"

    def close(self) -> None:
        self._control.close()
        self._process.wait()


_nurseries: dict[Callable[..., Store], _Nursery] = {}


def end_processes() -> None:
    """Let the processes go that others are forked from; the next that needs them starts them again."""
    while _nurseries:
        _nurseries.popitem()[1].close()

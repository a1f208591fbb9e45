"""Two ways to hold the store that a machine tests: in this process, or in one that can be killed."""

from __future__ import annotations

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

__all__ = ["Driver", "Killed", "Local", "Place", "Remote"]


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
        self._process = _take()
        self._open()

    def __call__(self, verb: str, /, *args: Any, **keywords: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            send(self._process.stdin, (verb, args, keywords))
            good, answer = receive(self._process.stdout)
        except (EOFError, OSError) as error:
            raise Killed from error
        if not good:
            raise answer
        return answer

    def reopen(self) -> None:
        self("close")
        self._open()

    def crash(self) -> None:
        _end(self._process)
        self._process = _take()
        self._open()

    def crash_during(self, point: int, verb: str, /, *args: Any, **keywords: Any) -> Any:
        """Begin a verb and kill its process: at its ``point``-th named point, with 0 at any moment.

        Returns its answer if it came to its end before, else raises Killed. In both cases the store is opened again.
        """
        timer = None
        if point:
            self("arm", point)
        else:
            timer = threading.Timer(time.perf_counter_ns() % 3000 / 1e6, self._process.kill)
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
            _end(self._process)
            return
        _spare.append(self._process)

    def _open(self) -> None:
        self("open", self.place.factory, self.place.args, self.place.keywords)


# A process is used for one store after the other, and one always stands ready: starting Python takes longer than a test.
_spare: list[subprocess.Popen[bytes]] = []


def _start() -> subprocess.Popen[bytes]:
    script = str(Path(__file__).with_name("worker.py"))
    # -P: beside that file lie modules with names that others have, too.
    process = subprocess.Popen([sys.executable, "-P", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    send(process.stdin, sys.path)
    return process


def _take() -> subprocess.Popen[bytes]:
    process = _spare.pop() if _spare else _start()
    if not _spare:
        _spare.append(_start())
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        try:
            pipe.close()
        except OSError:
            pass  # what was still to be written has nobody to read it


def end_spares() -> None:
    """Let the processes go that stand ready."""
    while _spare:
        _end(_spare.pop())

"""A process that holds a store open for a test, and can be killed for real.

It is run as a file, not imported, so that it starts without pytest and Hypothesis. It reads length-prefixed pickles of
(verb, arguments, keywords) on standard input and writes (is an answer, answer or error) on standard output.
"""

from __future__ import annotations

import os
import pickle
import signal
import struct
import sys
from typing import IO, Any

_SIZE = struct.Struct(">I")


def send(pipe: IO[bytes], message: Any) -> None:
    body = pickle.dumps(message)
    pipe.write(_SIZE.pack(len(body)) + body)
    pipe.flush()


def receive(pipe: IO[bytes]) -> Any:
    """The next message; EOFError when the other side is gone, also in the middle of one."""
    head = pipe.read(_SIZE.size)
    if len(head) < _SIZE.size:
        raise EOFError
    body = pipe.read(_SIZE.unpack(head)[0])
    if len(body) < _SIZE.unpack(head)[0]:
        raise EOFError
    return pickle.loads(body)


class Worker:
    def __init__(self) -> None:
        self.store: Any = None
        self.grants: dict[Any, Any] = {}

    def open(self, factory: Any, args: Any, keywords: Any) -> None:
        self.store = factory(*args, **keywords)
        self.grants.clear()

    def arm(self, count: int) -> None:
        """Die at the ``count``-th named point from here."""
        from safepoint import _probe

        left = count

        def die(_name: str) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        _probe.hook = die

    def acquire(self, task: str, holder: bytes, steal: bool) -> Any:
        from dataclasses import replace

        grant = self.store.acquire(task, holder, steal=steal)
        # Its handle is the store's own and stays here; the other side gets the rest.
        self.grants[task, grant.guard] = grant
        return replace(grant, handle=None)

    def release(self, task: str, grant: Any, patch: Any) -> None:
        self.store.release(task, self.grants.get((task, grant.guard), grant), patch)

    def abandon(self, task: str, grant: Any) -> None:
        if (task, grant.guard) in self.grants:
            self.store.abandon(task, self.grants[task, grant.guard])

    def do(self, verb: str, args: Any, keywords: Any) -> Any:
        if verb in {"open", "arm", "acquire", "release", "abandon"}:
            return getattr(self, verb)(*args, **keywords)
        answer = getattr(self.store, verb)(*args, **keywords)
        if isinstance(answer, tuple) and len(answer) == 2 and not hasattr(answer, "_fields"):
            return answer[0], dict(answer[1])  # whatever mapping the store made need not survive pickling
        return answer


def main() -> None:
    inlet, outlet = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a stray print must not get between two messages
    sys.path[:] = receive(inlet)
    worker = Worker()
    while True:
        try:
            verb, args, keywords = receive(inlet)
        except EOFError:
            return
        try:
            answer = (True, worker.do(verb, args, keywords))
        except Exception as error:
            answer = (False, error)
        send(outlet, answer)


if __name__ == "__main__":
    main()

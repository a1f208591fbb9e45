"""A process that holds a store open for a test, and can be killed for real.

It is run as a file, not imported, so that it starts without pytest and Hypothesis. The process that is started opens no
store; it forks one that does for every socket it is sent (a start of Python takes longer than a whole test), and waits for
the end of those that were killed. Over such a socket go length-prefixed pickles: (verb, arguments, keywords) one way,
(is it an answer, answer or error) the other.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
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
        from safepoint.rows import replace

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


def serve(line: socket.socket) -> None:
    worker = Worker()
    with line, line.makefile("rb") as inlet, line.makefile("wb") as outlet:
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


def main() -> None:
    with socket.socket(fileno=int(sys.argv[1])) as control:
        with control.makefile("rb") as inlet:
            sys.path[:] = receive(inlet)
            receive(inlet)  # the factory: its module is now imported, for all children
        control.sendall(b"ready")  # until now nothing else was sent, so the buffer of `inlet` holds nothing
        while True:
            message, passed, _, _ = socket.recv_fds(control, 32, 1)
            if not message:
                return
            if passed:
                pid = os.fork()
                if pid == 0:
                    control.close()
                    try:
                        serve(socket.socket(fileno=passed[0]))
                    finally:
                        os._exit(0)
                os.close(passed[0])
                control.sendall(b"%d" % pid)
            else:
                # Only now is it certain that its locks are gone: the socket may be closed before them.
                os.waitpid(int(message), 0)
                control.sendall(b"dead")


if __name__ == "__main__":
    main()

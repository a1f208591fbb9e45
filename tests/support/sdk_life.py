"""One life of an example agent on the raw SDKs, in a process that was forked with everything imported, and that ends itself where
it is told to."""

import contextlib
import os
import runpy
import signal
import sys
from typing import Any

import safepoint
from safepoint import _probe
from safepoint.codec import GLOBAL, decode, encode
from tests.support import sse

__all__ = ["live"]

# What a first use of the SDKs and of the codec imports and builds is built here, once for all lives.
for _kind, _events in (("chat", sse.CHAT), ("responses", sse.RESPONSES), ("anthropic", sse.ANTHROPIC)):
    for _chunk in sse.ask(_kind, sse.client(_kind, lambda events=_events: sse.body(events), [], []), []):  # type: ignore[misc]
        safepoint.wire(decode(encode(_chunk, GLOBAL), GLOBAL))


def live(folder: str, cwd: str, point: str = "", n: int = 1) -> str:
    """Run the agent of ``folder`` as its user does, in ``cwd``; what it printed. The n-th time that it comes to ``point`` it is
    killed, for real.

    Points are those of the library, and of the example: ``stream.first``, ``.middle``, ``.last`` and ``.any`` before a piece of a
    reply is sent, and ``inside`` after the tool has acted or the model was asked, with no answer given.
    """
    os.chdir(cwd)
    os.environ["PACE"] = "0"
    sys.path.insert(0, folder)
    import provider  # type: ignore[import-not-found]

    left = {point: n}

    def at(name: str) -> None:
        if name in left:
            left[name] -= 1
            if left[name] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def piece(number: int, last: int) -> None:
        at("stream.any")
        at({1: "stream.first", last: "stream.last"}.get(number, "stream.middle"))

    fsync: Any = os.fsync

    def inside(fd: int) -> None:
        fsync(fd)
        at("inside")

    os.fsync = inside  # type: ignore[assignment]
    provider.piece = piece
    _probe.hook = at
    with open("out.txt", "w", encoding="utf-8") as out, contextlib.redirect_stdout(out):
        runpy.run_path(os.path.join(folder, "agent.py"), run_name="__main__")
    with open("out.txt", encoding="utf-8") as out:
        return out.read()

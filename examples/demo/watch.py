"""What the processes of the demo share: none outlives the driver, and each says in lines what it does."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable


def say(*words: object) -> None:
    """Tell the driver something: a line on standard output, written in one piece and not kept in a buffer, which a SIGKILL
    would take along."""
    os.write(1, (" ".join(str(w) for w in words) + "\n").encode())


def obey(order: Callable[[str], None] | None = None) -> None:
    """Read the driver's orders, and end with it: its end of our standard input is closed however it dies."""

    def read() -> None:
        rest = b""
        while data := os.read(0, 4096):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if order is not None:
                    order(line.decode())
        os._exit(0)

    threading.Thread(target=read, name="driver", daemon=True).start()

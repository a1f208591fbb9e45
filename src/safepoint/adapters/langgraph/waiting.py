"""Waiting for a checkpoint that is to be put before what follows it."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from safepoint.adapters.langgraph.records import Key, Node, Records
from safepoint.adapters.langgraph.versions import failure
from safepoint.aio import Offload
from safepoint.errors import NotFound

__all__ = ["Waiting", "gone"]

PATIENCE = 30.0
"""Seconds to wait for a checkpoint that was to be put before what waits for it."""
LONG = 0.05
"""Seconds after which the store is asked: it may be one that this process has put and forgotten."""


class Waiting:
    """Part of the saver."""

    _records: Records
    _off: Offload

    if TYPE_CHECKING:

        def _node(self, thread: str, ns: str, id: str) -> Node | None: ...

    def wait_stored(self, key: Key) -> None:
        """Wait until a checkpoint is stored that some run is putting, in this process as a rule.

        Raises:
            NotFound: it does not come. Whatever its put raised.
        """
        until = time.monotonic() + PATIENCE
        while not self._records.wait(key, LONG):
            if (error := failure()) is not None:
                raise error
            if self._node(*key) is not None:
                return
            if time.monotonic() > until:
                raise gone(key[0], key[2])

    async def await_stored(self, key: Key) -> None:
        """``wait_stored`` on an event loop, and on no thread: those may all be needed for what is waited for."""
        pause, until = 0.001, time.monotonic() + PATIENCE
        while not self._records.known(key):
            if (error := failure()) is not None:
                raise error
            if pause > LONG and await self._off(lambda: self._node(*key)) is not None:
                return
            if time.monotonic() > until:
                raise gone(key[0], key[2])
            await asyncio.sleep(pause)
            pause = min(2 * LONG, pause * 1.5)
        self._records.wait(key, 0)  # raises why its put failed


def gone(thread: str, id: str) -> NotFound:
    return NotFound(
        f"checkpoint {id} of thread {thread!r} does not exist",
        "this one was to follow it; somebody has deleted it meanwhile, or it was never put",
        "Run the graph again: it sets out from what is there now. Nothing was written.",
        task=thread,
        id=id,
    )

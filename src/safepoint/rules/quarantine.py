"""A call that kills its process: counted at each death, and set aside before it stops the task for good."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from safepoint.rows import CallRow, replace

AFTER = 5
_DEATHS = re.compile(r"open at (\d+) deaths? running\Z")


def deaths(row: CallRow) -> int:
    """At how many deaths running the call was the only open one, as its row remembers."""
    found = _DEATHS.match(row.reason)
    return int(found[1]) if found else 0


def kept_reason(row: CallRow | None) -> str:
    """What a repeated intent keeps of the row's reason: the count goes on until the call has an outcome."""
    return row.reason if row is not None and deaths(row) else ""


def killer(rows: Iterable[CallRow], died: int) -> tuple[CallRow, int] | None:
    """The call that was the only open one when the last holder died, and at how many deaths running it was.

    ``died`` is that holder's fence, or 0 if it did not die. Only a call that this very holder had executed: who dies before
    it comes to the call does not die of it. Never a write.
    """
    left = [r for r in rows if r.status == "started" and not r.superseded]
    if not died or len(left) != 1 or left[0].fence != died or left[0].effect not in {"read", "idempotent"}:
        return None
    return left[0], deaths(left[0]) + 1


def noted(row: CallRow, n: int) -> CallRow:
    """The row after ``n`` deaths running: counted, or set aside. With 0 the count begins anew."""
    if n < AFTER:
        return replace(row, reason=f"open at {n} death{'s' * (n > 1)} running" if n else "")
    text = f"the process died {n} times running while this was its only open call; it is not made again"
    error = msgspec.msgpack.encode({"type": "safepoint.quarantined", "message": text})
    return replace(row, status="quarantined", reason=text, error=error)

"""Rows of one table of a SQLite file, read past its damaged pages in short transactions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from safepoint.errors import Damaged

if TYPE_CHECKING:
    from safepoint.stores.sqlite_db import Database

__all__ = ["ROWS", "Gap", "page", "scan"]

PAGE = 1_000_000
"""About how many bytes one transaction reads."""
ROWS = 2_000
DENSE = 1_000
"""How many keys after a damaged place are tried one by one, before the steps grow."""


class Gap(NamedTuple):
    """Keys that cannot be read. ``last`` is None where that holds to the end."""

    first: int
    last: int | None
    why: str

    def __str__(self) -> str:
        if self.last is None:
            return f"{self.first} and later"
        return str(self.first) if self.first == self.last else f"{self.first} to {self.last}"


def page(
    db: Database, statement: str, given: tuple[Any, ...], at: int, floor: Any, rows: int = ROWS
) -> tuple[list[Any], str | None, bool]:
    """Rows until about ``PAGE`` bytes, what stopped the reading, and whether there may be more.

    The value at place ``at`` must rise from ``floor`` on: from a damaged tree they may come in circles.
    """
    found: list[Any] = []
    size = 0
    try:
        with db.reading() as conn:
            cursor = conn.execute(statement, given)
            try:
                for row in cursor:
                    if type(row[at]) is not type(floor) or row[at] <= floor:
                        return found, "its keys are out of order", True
                    floor = row[at]
                    found.append(row)
                    if row[-1].__class__ is bytes:  # where there are large values, the largest is the last
                        size += len(row[-1])
                    if size >= PAGE or len(found) >= rows:
                        return found, None, True
            finally:
                cursor.close(True)  # half read, it would keep its snapshot
    except Damaged as error:
        return found, error.why, True
    except UnicodeDecodeError:
        return found, "a text in it is no UTF-8", True
    return found, None, False


def scan(db: Database, statement: str, low: int, high: int, last: int | None) -> Iterator[Any]:
    """Rows by their integer key, which is their first column, and a ``Gap`` for each run of keys that cannot be read.

    The statement takes the lowest and highest key. ``last`` is the highest that was given out, if known.
    """
    while low <= high:
        rows, why, more = page(db, statement, (low, high), 0, low - 1)
        yield from rows
        if rows:
            low = rows[-1][0] + 1
        if why is None:
            if not more:
                return
            continue
        # To go on from a row may meet what is broken where the row itself is whole.
        lone, again, _ = page(db, statement, (low, low), 0, low - 1, rows=1)
        if lone and again is None:
            yield from lone
            low += 1
            continue
        start, step, tries = low, 1, 0
        while True:
            bad = low
            low += step
            tries += 1
            if low > high or (last is not None and low > last):
                yield Gap(start, last if last is not None and last >= start else None, why)
                return
            found, again, _ = page(db, statement, (low, high), 0, low - 1, rows=1)
            if again is not None and step == 1:
                lone, alone, _ = page(db, statement, (low, low), 0, low - 1, rows=1)
                found, again = (lone, None) if lone and alone is None else (found, again)
            if again is None:
                break
            if tries > DENSE:
                step *= 2
        while low - bad > 1:  # the step was long: what can be read may have begun earlier
            middle = (low + bad) // 2
            earlier, again, _ = page(db, statement, (middle, high), 0, middle - 1, rows=1)
            if again is None:
                low, found = middle, earlier
            else:
                bad = middle
        if not found:
            yield Gap(start, last if last is not None and last >= start else None, why)
            return
        yield Gap(start, found[0][0] - 1, why)
        low = found[0][0]

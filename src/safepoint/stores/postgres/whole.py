"""A task in PostgreSQL as a whole: walked, written as one, and compared with what was seen of it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from safepoint import _probe
from safepoint.errors import Unavailable
from safepoint.rows import Image, Lost, Numbers, Part, TaskRow, classes
from safepoint.stores import whole
from safepoint.stores.postgres import needed, rows, stray, sweep, walk
from safepoint.stores.postgres.db import FIRST
from safepoint.stores.postgres.mend import Mends
from safepoint.stores.postgres.walk import KINDS, rows_of

if TYPE_CHECKING:
    from safepoint.stores.postgres.db import Database
    from safepoint.stores.postgres.link import Link

__all__ = ["Whole"]

BATCH = 1_000_000
"""After so many bytes the answer is waited for anew."""
SOME = 10_000
"""Rows that are deleted in one statement."""
_INT, _TEXT, _BYTES, _BOOL = "int8", "text", "bytea", "bool"
_TYPES = ((bool, _BOOL), (int, _INT), (str, _TEXT), (bytes, _BYTES))
_BRANCH = ("space", "name", "head_seq", "head_id", "line", "forked_from")
_BRANCH_TYPES = (_TEXT, _TEXT, _INT, _TEXT, _INT, _INT)


class Whole(Mends):
    """Needs ``_db``, ``_foreseen`` and ``task`` from the store."""

    if TYPE_CHECKING:

        def task(self, task: str) -> TaskRow | None: ...

    def walk(self, task: str) -> Iterator[Part]:
        return walk.walk(self._db, self.task, task)

    def walk_tasks(self) -> Iterator[str | Lost]:
        return walk.walk_tasks(self._db)

    def place(self, task: str, kind: str, key: Any) -> str:
        return walk.place(self._db, task, kind, key)

    def strays(self) -> list[Lost]:
        return stray.strays(self._db)

    def structure(self) -> Iterator[Lost]:
        return stray.structure(self._db)

    def write_task(self, image: Image, *, over: Image | None = None) -> bool:
        image = whole.sealed(image)
        db, task = self._db, image.row.task
        tries = needed.Tries()

        def write(link: Link) -> bool | None:
            found = rows_of(db, link, "lock", task=task)
            if tries.landed(link):
                return True  # and may have been gone on with since
            if found:
                there = _facts(db, link, found[0][0])
                if there == whole.facts_of(image):
                    return False
                if over is None or there != whole.facts_of(over):
                    raise whole.another(task)
                _replace(db, link, found[0][0], Numbers(*found[0][1:-1]), image)
            elif not _put(db, link, image):
                return None
            if fence := whole.fence_of(image):
                needed.rows_of(db, link, "raise_fence_floor", fence=fence)
            tries.ends(link)
            _probe.at("write_task.before")
            return True

        for _ in range(3):
            if (written := db.write(write, again=True, facts={"task": task})) is not None:
                _probe.at("write_task.after")
                self._foreseen.drop(task)
                sweep.clear_up(db)
                return written
        raise Unavailable(f"task {task!r} came and went while it was written", "nothing was written", "Do it again.", task=task)


def _facts(db: Database, link: Link, n: int) -> whole.Facts:
    names = ("checkpoint_seals", "call_seals", "pause_seals", "all_branches")
    checkpoints, calls, pauses, branches = (frozenset(rows_of(db, link, name, n=n)) for name in names)
    writes = ((space, at, rows.decoded(writer), *rest) for space, at, writer, *rest in rows_of(db, link, "write_seals", n=n))
    return whole.Facts(checkpoints, calls, pauses, branches, frozenset(writes))


def _put(db: Database, link: Link, image: Image) -> bool:
    """Write a task that is not there. False if it has come to be in the meantime: all is rolled back then."""
    table = needed.table_of(db, "tasks")
    n = int(rows_of(db, link, "next_number", table=table)[0][0])
    link.execute("SAVEPOINT before")
    _copy_all(db, link, n, image)
    # Last: whoever begins a task of this name meanwhile has not to wait for all of it.
    if rows_of(db, link, "put_task", **_task_values(n, image)):
        return True
    link.execute("ROLLBACK TO SAVEPOINT before")
    return False


def _replace(db: Database, link: Link, n: int, there: Numbers, image: Image) -> None:
    """Under the same number and lock: who waits for the task finds the new one, and its lease stays, with the higher of both fences."""
    sweep.refuse_if_held(db, link, image.row.task, n)
    needed.rows_of(db, link, "drop_all_stages", n=n)
    for name in sweep.TABLES:
        if name != "leases":
            table = needed.table_of(db, name)
            some = f"DELETE FROM {table} WHERE ctid = ANY(ARRAY(SELECT ctid FROM {table} WHERE task = %s LIMIT {SOME}))"
            _go_on(db, link)
            while link.execute(some, (n,)).rowcount == SOME:
                _go_on(db, link)
    needed.rows_of(db, link, "raise_fence", n=n, fence=whole.fence_of(image))
    image = whole.beyond(image, there)
    _copy_all(db, link, n, image)
    rows_of(db, link, "set_task", **_task_values(n, image))


def _task_values(n: int, image: Image) -> dict[str, Any]:
    row = image.row
    given = {name: getattr(row, name) for name in walk.TASK_FIELDS}
    given |= {name: rows.encoded(given[name]) for name in ("status", "agent", "reason")}
    last = {name: getattr(image.numbers, name) for name in Numbers.__struct_fields__}
    headed = {(b.space, b.name) for b in image.branches}
    dropped = not headed.issuperset((c.space, c.branch) for c in image.checkpoints)
    return {**given, **last, "n": n, "checkpoints": len(image.checkpoints), "dropped": dropped}


def _copy_all(db: Database, link: Link, n: int, image: Image) -> None:
    objects = {obj.name: obj for obj in image.objects}
    _copy(db, link, "objects", ("name", "refs", "data"), (_BYTES,) * 3, n, objects.values())
    for kind, (cls, names, _) in KINDS.items():
        all_of = getattr(image, f"{kind}s")
        _copy(db, link, f"{kind}s", names, _types(cls, names), n, (rows.values(row, names) for row in all_of))
    branches = ((b.space, b.name, *b.head, b.line, b.forked_from) for b in image.branches)
    _copy(db, link, "branches", _BRANCH, _BRANCH_TYPES, n, branches)
    if image.row.input:
        rows_of(db, link, "put_input", n=n, input=image.row.input)


def _types(cls: Any, names: tuple[str, ...]) -> tuple[str, ...]:
    """PostgreSQL's types of the columns of a row."""
    return tuple(next(name for kind, name in _TYPES if kind in allowed) for allowed in classes(cls, names))


def _copy(
    db: Database, link: Link, table: str, names: tuple[str, ...], types: tuple[str, ...], n: int, all_of: Iterable[Any]
) -> None:
    statement = f"COPY {needed.table_of(db, table)} (task, {', '.join(names)}) FROM STDIN (FORMAT BINARY)"
    _go_on(db, link)
    size = 0
    with link.cursor() as cursor, cursor.copy(statement) as copy:
        copy.set_types([_INT, *types])
        for row in all_of:
            copy.write_row((n, *row))
            size += 100 + sum([len(v) for v in row if v.__class__ is bytes])
            if size >= BATCH:
                _go_on(db, link)
                size = 0
                _probe.at("write_task.staged")


def _go_on(db: Database, link: Link) -> None:
    """The timeout is for one answer, not for a task of any size; and a part of it is left for another try."""
    link.end = max(link.end or 0.0, time.monotonic() + db.timeout * FIRST)

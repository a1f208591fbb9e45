"""A task of a SQLite file as a whole: walked, and written as one.

Writing goes under a number of its own that no task has yet, in batches of about 1 MB; nothing sees those rows until the last
transaction writes the row of the task.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from safepoint import _probe
from safepoint.errors import SafepointError, Unavailable
from safepoint.rows import Image, Lost, Numbers, Part
from safepoint.stores import sqlite_sweep, sqlite_walk, sqlite_writes, whole
from safepoint.stores.sqlite_db import CommitFailed, Connection, sql
from safepoint.stores.sqlite_rows import CALL, CHECKPOINT, PAUSE, PUT_CALL, PUT_CHECKPOINT, PUT_PAUSE, reads, values
from safepoint.stores.sqlite_schema import branch_sum, branches_sum
from safepoint.stores.sqlite_walk import BRANCHES, KINDS, MOST, TASK_FIELDS
from safepoint.stores.sqlite_witness import At, Watched

if TYPE_CHECKING:
    from safepoint.stores.oslock import Claim, LockFile
    from safepoint.stores.sqlite_db import Database

__all__ = ["Whole"]

BATCH = 1_000_000
"""About how many bytes one transaction writes."""


class Whole(Watched):
    """Needs ``_db``, ``_locks`` and ``_claim`` from the store."""

    _db: Database
    _locks: LockFile

    if TYPE_CHECKING:

        def _claim(self) -> Claim: ...

        def _refuse_if_held(self, task: str, *lease: Any) -> None: ...

    def walk(self, task: str) -> Iterator[Part]:
        return sqlite_walk.walk(self._db, task)

    def walk_tasks(self) -> Iterator[str | Lost]:
        return sqlite_walk.walk_tasks(self._db)

    def structure(self) -> Iterator[Lost]:
        yield from sqlite_walk.structure(self._db)
        if lost := self._lost_numbers():
            # Their names are not known any more, only that they were given out and acknowledged.
            why = f"{len(lost)} of which saves were acknowledged are not there: see `safepoint check`"
            yield Lost("tasks", f"sp_tasks, row {lost[0]} and later", why, kind="structure")

    def place(self, task: str, kind: str, key: Any) -> str:
        return sqlite_walk.place(self._db, task, kind, key)

    def strays(self) -> list[Lost]:
        return sqlite_walk.strays(self._db)

    def write_task(self, image: Image, *, over: Image | None = None) -> bool:
        image = whole.sealed(image)
        task = image.row.task
        if self._is_there(image, over):
            return False
        claim = self._claim()
        k: int | None = None
        try:
            with self._db.writing(False) as conn:
                sqlite_sweep.drop_dead_stages(conn, self._locks)
                # No task has a name with NUL in it: the number is nobody else's, and what lies under it is not seen.
                k, n = conn.rows(sql("sqlite_commit")["new_stage"], (f"\0{secrets.token_hex(8)}", claim.byte))[0]
            for batch in _batches(_records(image, n, k)):
                with self._db.writing(False) as conn:
                    for statement, records in batch.items():
                        conn.executemany(statement, records)
                _probe.at("write_task.staged")
            with self._db.writing(True) as conn:
                self._refuse_taken(conn, n, task)
                if (at := self._at(conn, task)) is not None:
                    if over is None or _facts(conn, at.n) != whole.facts_of(over):
                        raise _There
                    image = self._taken_from(conn, at, n, image)
                _put_task(conn, n, image)
                conn.execute(sql("sqlite_sweep")["raise_fence_floor"], (whole.fence_of(image),))
                slot = self._slot(conn, n)
                conn.execute(sql("sqlite_commit")["end_stage"], (k,))
                k = None
                _probe.at("write_task.before")
            _probe.at("write_task.after")
            self._witness.write(self._db.name, n, task, slot, sync=True)
            return True
        except _There:
            self._drop_stage(claim)
            if self._is_there(image, None):
                return False
            raise Unavailable(
                f"task {task!r} came and went while it was written", "nothing was written", "Do it again.", task=task
            ) from None
        except CommitFailed as failed:
            raise Unavailable(
                f"whether task {task!r} was written is not known",
                str(failed.cause),
                "Do it again; that is safe.",
                task=task,
                unknown=True,
            ) from failed.cause
        except BaseException:
            self._drop_stage(claim)
            raise
        finally:
            claim.free()

    def _drop_stage(self, claim: Claim) -> None:
        claim.free()
        try:
            with self._db.writing(False) as conn:
                sqlite_sweep.drop_dead_stages(conn, self._locks)
        except (CommitFailed, SafepointError):
            pass  # the byte is free in any case: the next big save does it

    def _is_there(self, image: Image, over: Image | None) -> bool:
        """Whether the task is there with these very rows. Conflict if it is there with others than those of ``over``."""
        with self._db.reading() as conn:
            at = conn.rows(reads()["number"], (image.row.task,))
            there = _facts(conn, at[0][0]) if at else None
        if there is not None and there != whole.facts_of(image) and (over is None or there != whole.facts_of(over)):
            raise whole.another(image.row.task)
        return there == whole.facts_of(image)

    def _taken_from(self, conn: Connection, at: At, n: int, image: Image) -> Image:
        """Remove the rows of the task that is replaced; its lease goes over to number ``n``. Returns the image with numbers that
        none of its had."""
        self._refuse_older(conn, at.n, at.task, at.created_at, at.writes)
        was = self._slot(conn, at.n)
        for _fence, *lease in conn.rows(sql("sqlite_sweep")["lease"], (at.n,)):
            self._refuse_if_held(at.task, *lease)
        conn.execute(sql("sqlite_sweep")["hand_on_lease"], (at.n, n, whole.fence_of(image)))
        conn.execute(sql("sqlite_sweep")["hand_on_older"], (at.n, n))
        sqlite_sweep.drop_task(conn, at.n)
        self._witness.clear(at.n)
        return whole.beyond(
            image, Numbers(was.next_seq - 1, was.next_call - 1, was.next_pause - 1, was.next_line - 1, was.position - 1)
        )


_WRITES = "SELECT space, checkpoint, writer, idx, seal FROM sp_writes WHERE k BETWEEN ? AND ?"


def _facts(conn: Connection, n: int) -> whole.Facts:
    span = (n << 32, n << 32 | MOST)
    return whole.Facts(
        *(
            frozenset(tuple(row) for row in conn.rows(f"SELECT {number}, seal FROM sp_{kind}s WHERE k BETWEEN ? AND ?", span))
            for kind, (_, _, _, number) in KINDS.items()
        ),
        frozenset(conn.rows(BRANCHES + " WHERE task = ?", (n,))),  # type: ignore[call-arg]
        frozenset(conn.rows(_WRITES, span)),
    )


class _There(Exception):
    """The task has come to be in the meantime."""


# -- writing

_OBJECT = "INSERT INTO sp_objects (task, stage, name, refs, data) VALUES (?, ?, ?, ?, ?)"
_BRANCH = "INSERT INTO sp_branches (task, space, name, head_seq, head_id, line, forked_from) VALUES (?, ?, ?, ?, ?, ?, ?)"


def _records(image: Image, n: int, k: int) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for obj in image.objects:
        yield _OBJECT, (n, k, *obj)
    for row in image.checkpoints:
        yield PUT_CHECKPOINT, values(n, row.seq, row, CHECKPOINT)
    for call in image.calls:
        yield PUT_CALL, values(n, call.no, call, CALL)
    for pause in image.pauses:
        yield PUT_PAUSE, values(n, pause.no, pause, PAUSE)
    for number, write in enumerate(image.writes, 1):
        yield sqlite_writes.PUT, sqlite_writes.record(n, number, write)
    for b in image.branches:
        yield _BRANCH, (n, b.space, b.name, *b.head, b.line, b.forked_from)


def _batches(records: Iterable[tuple[str, tuple[Any, ...]]]) -> Iterator[dict[str, list[tuple[Any, ...]]]]:
    batch: dict[str, list[tuple[Any, ...]]] = {}
    size = 0
    for statement, record in records:
        batch.setdefault(statement, []).append(record)
        size += 100 + sum([len(v) for v in record if isinstance(v, bytes | str)])
        if size >= BATCH:
            yield batch
            batch, size = {}, 0
    if batch:
        yield batch


def _put_task(conn: Connection, n: int, image: Image) -> None:
    row, last = image.row, image.numbers
    # The triggers that count calls, pauses and writes found no row of the task to count in.
    record = {
        "n": n,
        **{name: getattr(row, name) for name in TASK_FIELDS},
        "checkpoints": len(image.checkpoints),
        "next_seq": last.seq + 1,
        "next_call": last.call + 1,
        "next_pause": last.pause + 1,
        "next_line": last.line + 1,
        "position": last.position + 1,
        "calls": len(image.calls),
        "pauses": len(image.pauses),
        "next_write": len(image.writes) + 1,
        "write_rows": len(image.writes),
        "branch_sum": branch_sum(row.task, row.branch),
        "branches_sum": branches_sum(row.task, [(b.space, b.name) for b in image.branches]),
    }
    conn.execute(f"INSERT INTO sp_tasks ({', '.join(record)}) VALUES ({', '.join('?' * len(record))})", tuple(record.values()))
    if row.input:
        conn.execute(sql("sqlite_commit")["set_input"], (n, row.input))

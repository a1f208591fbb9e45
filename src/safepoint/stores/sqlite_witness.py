"""Whether a SQLite store shows what it acknowledged: against the witness beside it, and against its own counts.

A task is compared where it is read and before it is written to. What is there and whole can be read by its seq or id whatever
is missing elsewhere, and so can everything by ``walk``; what would answer for the task as a whole is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from safepoint.errors import Damaged, SafepointError
from safepoint.model import Finding
from safepoint.stores import witness
from safepoint.stores.sqlite_db import CommitFailed, Connection
from safepoint.stores.sqlite_rows import all_plain, plain, reads
from safepoint.stores.sqlite_schema import branch_sum, branches_sum
from safepoint.stores.witness import Slot, Witness, behind

if TYPE_CHECKING:
    from safepoint.stores.sqlite_db import Database

__all__ = ["At", "Watched"]

_CLASSES = (
    "SELECT typeof(task) FROM (SELECT task FROM sp_tasks ORDER BY task LIMIT 1)"
    " UNION SELECT typeof(task) FROM (SELECT task FROM sp_tasks ORDER BY task DESC LIMIT 1)"
)
"""Of the names. What is no text lies before or after all that is, in their index."""


class At(NamedTuple):
    """A task's row, as far as reading begins with it."""

    n: int
    task: str
    created_at: int
    writes: int
    branch: str
    branch_sum: int | None
    checkpoints: int
    calls: int | None
    pauses: int | None
    branches_sum: int | None


class _Known(NamedTuple):
    task: str
    n: int
    created_at: int
    writes: int


class _Counters(NamedTuple):
    """What a ``Slot`` takes from the store."""

    created_at: int
    writes: int
    position: int
    fence: int
    next_seq: int
    next_call: int
    next_pause: int
    next_line: int


class Watched:
    """Needs ``_db`` from the store."""

    _db: Database
    _witness: Witness

    # -- asked by people and by verify

    def rolled_back(self, task: str) -> Damaged | None:
        """The error that reading this task raises because the store is older than what it acknowledged, if it does."""
        return self._doubt(task, None)

    def _doubt(self, task: str, last: int | None) -> Damaged | None:
        slots = self._witness.find(self._db.name, task, last)  # before the snapshot: it may be older than that, not newer
        with self._db.reading() as conn:
            at = self._at(conn, task)
            if at is None:
                return self._lost(conn, task, slots)
            if last is None:
                return self._older(at, conn, next((slot for n, slot in slots if n == at.n), None))
        return self._doubt(task, None)

    def _witnessed(self) -> Finding:
        """For ``check``: whether all tasks are as far as was acknowledged."""
        try:
            with self._db.reading() as conn:
                found = conn.rows("SELECT task, n, created_at, writes FROM sp_tasks")
            self._refuse_lost_tasks({row.task: row[1:] for row in all_plain(_Known, found)}, whole=True)
        except SafepointError as error:
            return Finding("witness", "error", f"{error.what}: {error.why}", error.remedy)
        return Finding("witness", "ok", "all tasks are as far as was acknowledged")

    def accept(self, task: str) -> None:
        """Take a task as it stands, also where it is older than what was acknowledged; no number of it will come twice.

        Of a task that is not there at all: accept that it is gone, and with it all others that are.
        """
        db, w = self._db, self._witness
        slot: Slot | None = None
        try:
            with db.writing(True) as conn:
                st = reads()
                at = self._at(conn, task, careful=False)
                if at is None:
                    last = max([n for n, _ in w.find(db.name, task)] + w.beyond(db.name, self._last(conn)), default=0)
                    for _, slot in w.find(db.name, task):
                        conn.execute(st["accept_fence_floor"], (slot.fence,))
                    conn.execute(st["accept_last"], (last,))
                    conn.execute(st["accept_tasks"])
                else:
                    old = w.read(db.name, at.n, task)
                    if old is None or old.created_at != at.created_at:
                        old = Slot(at.created_at, *(0,) * 7)
                    if behind(old, at.created_at, at.writes):
                        lost = max(0, old.next_seq - self._slot(conn, at.n).next_seq)
                        conn.execute(st["accept_older"], (at.n, lost))
                    conn.execute(st["accept_numbers"], (at.n, *old[1:3], *old[4:8]))
                    conn.execute(st["accept_fence"], (at.n, old.fence))
                    conn.execute(st["accept_fence_floor"], (old.fence,))
                    all_of = conn.rows(st["names_of_branches"], (at.n,))
                    conn.execute(st["accept_counts"], (at.n, branch_sum(at.task, at.branch), branches_sum(at.task, all_of)))
                    slot = self._slot(conn, at.n)
        except CommitFailed as failed:
            raise failed.cause from failed
        if at is not None and slot is not None:
            w.write(db.name, at.n, task, slot, sync=True)
        else:
            for n, _ in w.find(db.name, task):
                w.clear(n)

    def older(self, task: str) -> int | None:
        with self._db.reading() as conn:
            found = conn.rows(reads()["older"], (task,))
        return found[0][0] if found else None

    # -- under the write lock

    def _refuse_older(self, conn: Connection, n: int, task: str, created_at: int, writes: int) -> None:
        """Refuse to write onto a task that is older than what was acknowledged. Nobody can have gone on meanwhile."""
        slot = self._witness.read(self._db.name, n, task, strict=True)
        if type(created_at) is not int or type(writes) is not int:
            raise self._unsound(task, "values of its row are of other types")
        if behind(slot, created_at, writes):
            assert slot is not None
            raise self._behind(task, conn, n, slot)

    def _refuse_taken(self, conn: Connection, n: int, task: str) -> None:
        """Refuse to begin a task under a number of which something is known: whose it was, is not known any more."""
        if self._witness.read(self._db.name, n, strict=True) is not None:
            raise witness.tasks_missing(self._db.path, 1, task=task)

    def _refuse_hidden(self, conn: Connection, task: str) -> None:
        """Refuse to begin a task that is there, and that only its name or the index of names has lost: it would be there twice."""
        for n, _ in self._witness.find(self._db.name, task, self._last(conn)):
            if (hidden := self._hidden(conn, task, n)) is not None:
                raise hidden
        if (nameless := self._nameless(conn, task)) is not None:
            raise nameless

    def _slot(self, conn: Connection, n: int) -> Slot:
        return Slot(*plain(_Counters, conn.rows(reads()["slot"], (n,))[0]))

    # -- in a snapshot

    def _at(self, conn: Connection, task: str, *, careful: bool = True) -> At | None:
        found = conn.rows(reads()["at"], (task,))
        if not found:
            return None
        at = plain(At, found[0])
        if careful and at.task != task:
            raise self._unsound(task, "its entry in the index of names leads to another task")
        if careful and at.branch_sum is not None and at.branch_sum != branch_sum(task, at.branch):
            raise self._unsound(task, "the name of its current branch is not what was written")
        return at

    # -- after a snapshot

    def _compare_at(self, task: str, at: At | None) -> None:
        """Raise unless the task that was read, or found to be absent, is as far as it was acknowledged to be."""
        # Read after the snapshot, the slot may be newer because the task has gone on: then it is looked at again.
        if at is None or self._is_stale(task, at.n, at.created_at, at.writes):
            self._settle_doubt(task, absent=at is None)

    def _settle_doubt(self, task: str, *, absent: bool = False) -> None:
        last = None
        if absent:
            with self._db.reading() as conn:
                last = self._last(conn)
        error = self._doubt(task, last)
        if error is not None:
            raise error

    def _is_stale(self, task: str, n: int, created_at: int, writes: int) -> bool:
        return behind(self._witness.read(self._db.name, n, task), created_at, writes)

    def _older(self, at: At, conn: Connection, slot: Slot | None) -> Damaged | None:
        if not behind(slot, at.created_at, at.writes):
            return None
        assert slot is not None
        return self._behind(at.task, conn, at.n, slot)

    def _behind(self, task: str, conn: Connection, n: int, slot: Slot) -> Damaged:
        now = self._slot(conn, n)
        if slot.next_seq > now.next_seq:
            why = f"checkpoints up to {slot.next_seq - 1} were acknowledged, and the store knows of {now.next_seq - 1}"
        else:
            why = f"{slot.writes} writes were acknowledged, and the store knows of {now.writes}"
        return witness.missing(task, self._db.path, why, known=now.next_seq - 1, acknowledged=slot.next_seq - 1)

    def _lost(self, conn: Connection, task: str, slots: list[tuple[int, Slot]]) -> Damaged | None:
        """What says that a task which is not found was there; ``slots`` were read before."""
        last = self._last(conn)
        for n, slot in slots:
            if n > last:
                # No delete_task explains that: a number that was given once stays given.
                why = f"checkpoints up to {slot.next_seq - 1} were acknowledged, and the store knows nothing of it"
                return witness.missing(task, self._db.path, why, acknowledged=slot.next_seq - 1)
            if (hidden := self._hidden(conn, task, n)) is not None:
                return hidden
        made, there = conn.rows(reads()["tasks_there"])[0]
        if made is not None and made != there:
            return self._unsound(task, f"the store has {there} of {made} tasks, so it may be one of those that are missing")
        return self._nameless(conn, task)

    def _hidden(self, conn: Connection, task: str, n: int) -> Damaged | None:
        """What says that a task which is not found by its name has the row of a number that was once its own."""
        there = conn.rows("SELECT task FROM sp_tasks NOT INDEXED WHERE n = ?", (n,))
        if not there:
            return None  # deleted; and no other task gets its number
        return self._unsound(task, "it is missing in the index of names" if there == [(task,)] else "its row has another name")

    def _nameless(self, conn: Connection, task: str) -> Damaged | None:
        """What says that some task's name is none, so that it may be this one."""
        if conn.rows(_CLASSES) in ([], [("text",)]):
            return None
        return self._unsound(task, "the store has a task whose name is lost, so it may be that one")

    def _last(self, conn: Connection) -> int:
        found = conn.rows("SELECT value FROM sp_meta WHERE key = 'last'")
        return found[0][0] if found and isinstance(found[0][0], int) else 0

    def _refuse_lost_tasks(self, names: dict[str, tuple[int, int, int]], whole: bool) -> None:
        """After a listing of (number, created_at, writes) by name: raise if one of them, or with ``whole`` any task, is not as far as it was."""
        stale = [task for task, row in names.items() if self._is_stale(task, *row)]
        stale = [task for task in stale if self.rolled_back(task) is not None]
        beyond = self._lost_numbers() if whole else []
        if stale:
            why = "the store knows of fewer writes"
            raise witness.missing(stale[0], self._db.path, why, tasks=stale, lost=len(beyond))
        if beyond:
            raise witness.tasks_missing(self._db.path, len(beyond))
        if whole:
            with self._db.reading() as conn:
                made, there = conn.rows(reads()["tasks_there"])[0]
            if made is not None and made != there:
                raise Damaged(
                    f"tasks are missing in {self._db.path}",
                    f"it has {there} of {made}",
                    "Look with safepoint verify, and mend it with safepoint repair.",
                    path=self._db.path,
                )

    def _lost_numbers(self) -> list[int]:
        """Numbers of tasks that were acknowledged and are not there."""
        seen = self._beyond()
        if not seen:
            return seen
        with self._db.reading() as conn:
            last = self._last(conn)
        return [n for n in seen if n > last]

    def _beyond(self) -> list[int]:
        with self._db.reading() as conn:
            last = self._last(conn)
        return self._witness.beyond(self._db.name, last)

    def _unsound(self, task: str, why: str, **details: object) -> Damaged:
        return Damaged(
            f"task {task!r} in {self._db.path} is damaged",
            why,
            "See what is left with safepoint verify; restore the file from a backup, or mend it with safepoint repair.",
            task=task,
            path=self._db.path,
            **details,
        )

    def _short(self, task: str, kind: str, there: int, made: int | None) -> Damaged:
        """What is wrong with an answer that should be all rows of a kind, and is not."""
        return self._unsound(task, f"it has {there} of {made} {kind}")

"""The reading verbs of the SQLite store. Each is one short read transaction, and nothing stays open when it returns."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from safepoint.errors import Damaged
from safepoint.model import Obj
from safepoint.rows import BranchRow, CallRow, CheckpointRow, Guard, Head, LeaseRow, PauseRow, TaskRow, WriteRow
from safepoint.stores import holder as people
from safepoint.stores import sqlite_rows, sqlite_writes
from safepoint.stores.sqlite_db import Connection
from safepoint.stores.sqlite_rescue import rescue
from safepoint.stores.sqlite_rows import key, reads
from safepoint.stores.sqlite_schema import branch_sum, branches_sum
from safepoint.stores.sqlite_witness import At, Watched

if TYPE_CHECKING:
    from safepoint.stores.oslock import LockFile
    from safepoint.stores.sqlite_db import Database

MOST = (1 << 32) - 1


class _Number(NamedTuple):
    seq: int


class _Lease(NamedTuple):
    fence: int
    token: str
    lease_id: int
    locks: str | None
    state: str
    holder: bytes
    acquired_at: int
    presumed: int

    def __repr__(self) -> str:
        return f"<_Lease fence={self.fence}>"  # the token is nobody else's affair


class Reads(Watched):
    """Needs ``_db`` and ``_locks`` from the store."""

    _db: Database
    _locks: LockFile

    def task(self, task: str) -> TaskRow | None:
        with self._db.reading() as conn:
            found = conn.rows(reads()["tasks"] + " WHERE t.task = ?", (task,))
        if not found:
            self._settle_doubt(task, absent=True)
            return None
        *_, n, writes, total = found[0]
        row = sqlite_rows.task(found[0])
        if row.task != task:
            raise self._unsound(task, "its entry in the index of names leads to another task")
        if total is not None and total != branch_sum(task, row.branch):
            raise self._unsound(task, "the name of its current branch is not what was written")
        if self._is_stale(task, n, row.created_at, writes):
            self._settle_doubt(task)
        return row

    def tasks(self, *, after: str | None = None, limit: int = 200) -> list[TaskRow]:
        # UTF-8 compared byte by byte is code point order.
        where = " WHERE (?1 IS NULL OR t.task > ?1) ORDER BY t.task LIMIT ?2"
        if after is not None:
            where = " WHERE t.task > ?1 ORDER BY t.task LIMIT ?2"
        with self._db.reading() as conn:
            found = conn.rows(reads()["tasks"] + where, (after, limit))
        rows = [sqlite_rows.task(row) for row in found]
        for row, columns in zip(rows, found, strict=True):
            if columns[-1] is not None and columns[-1] != branch_sum(row.task, row.branch):
                raise self._unsound(row.task, "its name, or that of its current branch, is not what was written")
        self._refuse_lost_tasks(
            {row.task: (columns[-3], row.created_at, columns[-2]) for row, columns in zip(rows, found, strict=True)},
            whole=len(rows) < limit,
        )
        return rows

    def branches(self, task: str, space: str | None = "") -> list[BranchRow]:
        with self._db.reading() as conn:
            at = self._at(conn, task)
            found = conn.rows(*((reads()["all_branches"], (task,)) if space is None else (reads()["branches"], (task, space))))
        self._compare_at(task, at)
        return [sqlite_rows.branch(row) for row in found]

    def read(
        self, task: str, *, space: str = "", seq: int | None = None, branch: str | None = None, id: str | None = None
    ) -> tuple[CheckpointRow, Mapping[bytes, Obj]] | None:
        named = seq is not None or id is not None
        answer: tuple[CheckpointRow, Mapping[bytes, Obj]] | None = None
        try:
            with self._db.reading() as conn:
                # What is named by its own number or id is served whatever is wrong with the task around it.
                at = self._at(conn, task, careful=not named)
                if at is not None:
                    answer = self._read(conn, at, task, space, seq, branch, id)
            if answer is None or not named:
                self._compare_at(task, at)
        except Damaged:
            if named and (found := rescue(self._db, task, space, seq, id)) is not None:
                return found
            raise
        return answer

    def rescue(self, task: str, seq: int, *, space: str = "") -> tuple[CheckpointRow, Mapping[bytes, Obj]] | None:
        return rescue(self._db, task, space, seq, None)

    def _read(
        self, conn: Connection, at: At, task: str, space: str, seq: int | None, branch: str | None, id: str | None
    ) -> tuple[CheckpointRow, Mapping[bytes, Obj]] | None:
        n, number, head = at.n, seq, None
        if id is not None:
            found = conn.rows(reads()["seq_of_id"], (n, space, id))
            if not found:
                if conn.rows(reads()["of_id"], (n, space, id)):
                    raise self._unsound(task, "an id is missing in its index")
                self._refuse_missing(conn, at)
                return None
            (number,) = sqlite_rows.plain(_Number, found[0])
        elif number is None:
            found = conn.rows(reads()["head"], (n, space, at.branch if branch is None else branch))
            if not found:
                # A branch that was dropped leaves checkpoints, for a while; but no task's own ones go without a current branch.
                wanted = branch if branch is not None or not space else at.branch
                names = conn.rows(reads()["names_of_branches"], (n,))
                lost = branches_sum(task, names) != at.branches_sum or (wanted is None and "" in {of for of, _ in names})
                if lost and conn.rows(reads()["of_branch"], (n, space, wanted)):
                    raise self._unsound(task, "a head of its branches is missing")
                return None
            number, head = sqlite_rows.plain(Head, found[0])
        found = conn.rows(sqlite_rows.GET_CHECKPOINT, (key(n, number),))
        if not found:
            if seq is None:
                raise self._unsound(task, f"checkpoint {number} is missing", seq=number)
            self._refuse_missing(conn, at, number)
            return None
        row = sqlite_rows.checkpoint(found[0])
        if row.seq != number or row.id != (id or head or row.id):
            raise self._unsound(task, f"what is found as checkpoint {number} is another one", seq=number)
        if row.space != space:
            if seq is None:
                raise self._unsound(task, f"checkpoint {number} is of another space", seq=number)
            row.check(task, f"checkpoint {number}")
            return None
        return row, _closure(conn, n, [row.refs])

    def _refuse_missing(self, conn: Connection, at: At, seq: int | None = None) -> None:
        """Before a checkpoint is called absent, or a listing complete: the task must have as many as it should."""
        there, found = conn.rows(reads()["count_checkpoints"], (at.n, seq))[0]
        if found:
            raise self._unsound(at.task, f"checkpoint {seq} is not where it should be", seq=seq)
        if there != at.checkpoints:
            raise self._short(at.task, "checkpoints", there, at.checkpoints)

    def headers(
        self,
        task: str,
        *,
        space: str | None = "",
        branch: str | None = None,
        before: int | None = None,
        limit: int | None = None,
        roots: bool = False,
    ) -> list[CheckpointRow]:
        last = MOST if before is None else min(before - 1, MOST)
        statement = reads()[("headers_of_space" if space else "headers") + (" with roots" if roots else "")]
        found = []
        with self._db.reading() as conn:
            at = self._at(conn, task)
            if at is not None and last >= 0:
                most = -1 if limit is None else max(limit, 0)
                found = conn.rows(statement, (at.n, last, space, branch, most))
                if limit is None or len(found) < limit:  # the end was reached: are they all there?
                    there, matching = conn.rows(reads()["count_headers"], (at.n, last, space, branch))[0]
                    if there != at.checkpoints or matching != len(found):
                        raise self._short(task, "checkpoints", min(there, len(found)), at.checkpoints)
        self._compare_at(task, at)
        make = sqlite_rows.checkpoint if roots else sqlite_rows.header
        return [make(row) for row in found]

    def calls(
        self,
        task: str,
        *,
        line: int | None = None,
        from_step: int | None = None,
        nos: Iterable[int] | None = None,
        bodies: bool = True,
        limit: int | None = None,
    ) -> tuple[list[CallRow], Mapping[bytes, Obj]]:
        rows: list[CallRow] = []
        objects: dict[bytes, Obj] = {}
        with self._db.reading() as conn:
            at = self._at(conn, task)
            if at is not None:
                n = at.n
                most = -1 if limit is None else max(limit, 0)
                if nos is None:
                    found = conn.rows(reads()["calls"], (n, line, from_step, most))
                    whole = limit is None or len(found) < limit
                else:
                    wanted = {no for no in nos if 0 < no <= MOST}
                    found = conn.rows(reads()["calls_by_no"], (n, line, from_step, most, json.dumps(sorted(wanted))))
                    whole = len(found) < len(wanted)
                if whole:  # a lost row would be a call that is made again
                    there, matching = conn.rows(reads()["count_calls"], (n, line, from_step))[0]
                    if at.calls not in {there, None} or (nos is None and matching != len(found)):
                        raise self._short(task, "calls", min(there, len(found)), at.calls)
                rows = [sqlite_rows.call(row) for row in reversed(found)]
                if bodies:
                    objects = _closure(conn, n, [refs for row in rows for refs in (row.args_refs, row.result_refs)])
        self._compare_at(task, at)
        return rows, objects

    def pauses(self, task: str) -> list[PauseRow]:
        found = []
        with self._db.reading() as conn:
            at = self._at(conn, task)
            if at is not None:
                found = conn.rows(sqlite_rows.GET_PAUSES, (at.n,))
                if at.pauses not in {len(found), None}:
                    raise self._short(task, "pauses", len(found), at.pauses)
        self._compare_at(task, at)
        return [sqlite_rows.pause(row) for row in found]

    def writes(
        self,
        task: str,
        *,
        space: str | None = "",
        checkpoints: Iterable[str] | None = None,
        writer: str | None = None,
        bodies: bool = True,
    ) -> tuple[list[WriteRow], Mapping[bytes, Obj]]:
        wanted = None if checkpoints is None else set(checkpoints)
        rows: list[WriteRow] = []
        objects: dict[bytes, Obj] = {}
        with self._db.reading() as conn:
            at = self._at(conn, task)
            if at is not None:
                for made, there in conn.rows(reads()["count_writes"], (at.n,)):  # a lost one would be work that is done again
                    if made not in {there, None}:
                        raise self._short(task, "writes", there, made)
                rows = sqlite_writes.rows(conn, at.n, space, wanted, writer)
                if bodies:
                    objects = _closure(conn, at.n, [row.refs for row in rows])
        self._compare_at(task, at)
        return rows, objects

    def lease(self, task: str) -> LeaseRow | None:
        with self._db.reading() as conn:
            found = conn.rows(reads()["lease"], (task,))
        if not found:
            return None
        fence, token, lease_id, locks, state, holder, acquired_at, presumed = sqlite_rows.plain(_Lease, found[0])
        live = state == "held" and self._locks.is_held(lease_id, locks) is True
        return LeaseRow(
            task=task,
            fence=fence,
            token=token,
            lease_id=lease_id,
            state=state,
            holder=holder,
            acquired_at=acquired_at,
            presumed=presumed,
            live=live,
            stopped=live and people.is_stopped(people.read(holder)),
        )

    def holds(self, task: str, guard: Guard) -> bool:
        with self._db.reading() as conn:
            found = conn.rows(reads()["lease"], (task,))
        if not found:
            return False
        row = sqlite_rows.plain(_Lease, found[0])
        return row[:2] == guard and row.state == "held" and bool(self._locks.is_held(row.lease_id, row.locks))


def _closure(conn: Connection, n: int, roots: Iterable[bytes]) -> dict[bytes, Obj]:
    """All objects that these refs reach, one statement per level of the tree."""
    found: dict[bytes, Obj] = {}
    statement = reads()["level"]
    make = tuple.__new__  # what Obj._make does, without its own call for each of thousands
    level = sqlite_rows.names(roots)
    while level:
        rows = conn.rows(statement, (b"".join(level), n, len(level)))
        if {value.__class__ for row in rows for value in row} - {bytes}:  # a row that was cut off: its end reads as NULL
            rows = [row for row in rows if {value.__class__ for value in row} == {bytes}]
        found.update({row[0]: make(Obj, row) for row in rows})
        level = [name for name in sqlite_rows.names([row[1] for row in rows if row[1]]) if name not in found]
    return found

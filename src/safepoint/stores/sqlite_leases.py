"""The lease verbs of the SQLite store: a row that says who holds the task, and a locked byte that proves it.

There is no heartbeat and no clock. Each acquisition draws a byte of its own in the -locks file and locks it before its row
is there; so a row whose byte is free belongs to a dead holder, however it died, and a stopped one keeps its task. The row
says in which -locks file: if that was removed since, its holder is presumed dead at most.
"""

from __future__ import annotations

import secrets
import time
from typing import NamedTuple, Protocol

from safepoint import _probe
from safepoint.errors import Damaged, SafepointError, Unavailable
from safepoint.model import check_id
from safepoint.rows import Grant, Guard, TaskPatch
from safepoint.stores import holder as people
from safepoint.stores import refusals
from safepoint.stores.oslock import Claim, LockFile
from safepoint.stores.sqlite_db import CommitFailed, Connection, Database, sql
from safepoint.stores.sqlite_rows import plain
from safepoint.stores.sqlite_schema import branch_sum
from safepoint.stores.sqlite_witness import Watched
from safepoint.stores.witness import Slot

__all__ = ["Leases", "now", "patch_task"]


class Claimed(Protocol):
    """What a commit has read of the lease."""

    @property
    def fence(self) -> int | None: ...
    @property
    def token(self) -> str | None: ...
    @property
    def lease_id(self) -> int | None: ...
    @property
    def locks(self) -> str | None: ...
    @property
    def state(self) -> str | None: ...


class _Standing(NamedTuple):
    """Who has or had a task."""

    fence: int
    token: str
    lease_id: int
    locks: str | None
    state: str
    holder: bytes
    acquired_at: int
    presumed: int

    def __repr__(self) -> str:
        return f"<_Standing fence={self.fence}>"  # the token is nobody else's affair


_NONE = _Standing(0, "", 0, None, "", b"", 0, 0)


class Leases(Watched):
    """Needs ``_db`` and ``_locks`` from the store."""

    _db: Database
    _locks: LockFile
    _claims: dict[int, Claim]
    _sql: dict[str, str]

    def _claim(self) -> Claim:
        while True:
            claim = self._locks.claim(secrets.randbits(62))
            if claim is not None:
                return claim

    def _check_guard(self, task: str, guard: Guard, look: Claimed) -> None:
        if (look.fence, look.token, look.state) != (*guard, "held") or not self._locks.is_held(look.lease_id or 0, look.locks):
            raise refusals.lost(task, guard, look.fence if look.state == "held" else None)

    def _refuse_if_held(
        self,
        task: str,
        state: str | None,
        lease_id: int | None,
        locks: str | None,
        holder: bytes | None,
        acquired_at: int | None,
    ) -> None:
        if state == "held" and lease_id is not None and type(lease_id) is not int:
            raise self._unsound(task, "the row of its lease has values of other types")
        if state == "held" and lease_id is not None and self._locks.is_held(lease_id, locks):
            raise people.lease_held(task, holder or b"", acquired_at or 0)

    def acquire(self, task: str, holder: bytes, *, steal: bool = False) -> Grant:
        check_id(task)
        # Before the row names it: a row whose byte is free means that its holder is dead.
        claim = self._claim()
        _probe.at("acquire.locked")
        grant: Grant | None = None
        try:
            try:
                with self._db.writing(True) as conn:
                    n, grant = self._take(conn, task, holder, claim, steal)
                    slot = self._slot(conn, n)
            except CommitFailed as failed:
                assert grant is not None
                self._settle_lease(task, grant.guard, failed.cause)
            _probe.at("acquire.after")
            assert grant is not None
            self._witness.write(self._db.name, n, task, slot, sync=True)
            self._claims[claim.byte] = claim
            return grant
        except BaseException:
            claim.free()
            raise

    def _take(self, conn: Connection, task: str, holder: bytes, claim: Claim, steal: bool) -> tuple[int, Grant]:
        found = conn.rows(self._sql["lease"], (task,))
        if not found:
            self._refuse_hidden(conn, task)
            n = conn.rows(self._sql["new_task"], (task, now(), branch_sum(task, "main")))[0][0]
            self._refuse_taken(conn, n, task)
            found = [(n, *[None] * 8)]
        else:
            self._refuse_older(conn, found[0][0], task, *found[0][9:])
        n, given = found[0][0], found[0][1:9]
        before = _NONE if given == (None,) * 8 else plain(_Standing, given)
        fence, _token, lease_id, locks, state, old, since, presumed = before
        held = self._locks.is_held(lease_id, locks) if state == "held" else False
        if before is _NONE:
            # A receiver may have seen the fences of a deleted task of this name.
            previous, fence, presumed = "", self._fence_floor(conn), 0
        elif state == "released":
            previous = "released"
        elif held is False:
            previous = "dead"
        elif steal or held is None:
            previous, presumed = "presumed_dead", fence
        else:
            raise people.lease_held(task, old, since)
        guard = Guard(fence + 1, secrets.token_hex(16))
        conn.execute(self._sql["take"], (n, *guard, claim.byte, claim.file, holder, now(), presumed))
        conn.execute(self._sql["taken"], (now(), n))
        return n, Grant(guard, previous, presumed, claim)

    def _fence_floor(self, conn: Connection) -> int:
        floor = conn.rows(self._sql["fence_floor"])
        if not floor or type(floor[0][0]) is not int:
            path = self._db.path
            raise Damaged(
                f"{path} does not say which fences its deleted tasks had",
                "a row of the store has been removed or changed",
                "Restore it from a backup, or copy what is sound with safepoint repair.",
                path=path,
            )
        return floor[0][0]

    def _settle_lease(self, task: str, guard: Guard, cause: SafepointError) -> None:
        try:
            with self._db.writing(True) as conn:
                found = conn.rows(self._sql["lease"], (task,))
                conn.execute(self._sql["nonce"])
        except (CommitFailed, SafepointError):
            raise cause from None
        if not found or tuple(found[0][1:3]) != guard:
            raise cause

    def release(self, task: str, grant: Grant, patch: TaskPatch | None = None) -> None:
        slot: Slot | None = None
        try:
            with self._db.writing(True) as conn:
                found = conn.rows(self._sql["lease"], (task,))
                if found and tuple(found[0][1:3]) == grant.guard and found[0][5] == "held":
                    n = found[0][0]
                    conn.execute(self._sql["give_back"], (n, *grant.guard))
                    patch_task(conn, n, task, patch)
                    conn.execute(self._sql["touch"], (now(), n))
                    slot = self._slot(conn, n)
        except CommitFailed as failed:
            raise Unavailable(
                f"whether task {task!r} was released is not known",
                str(failed.cause),
                "Release it again.",
                task=task,
                unknown=True,
            ) from failed.cause
        if slot is not None:
            self._witness.write(self._db.name, n, task, slot, sync=True)
        # After the row: the other way round, the holder would look dead for a moment.
        self.abandon(task, grant)
        _probe.at("release.after")

    def abandon(self, task: str, grant: Grant) -> None:
        if isinstance(grant.handle, Claim):
            self._claims.pop(grant.handle.byte, None)
            try:
                grant.handle.free()
            except OSError:
                pass  # the kernel refuses no unlocking of a range that is ours; if it did, only our end would free it


def patch_task(conn: Connection, n: int, task: str, patch: TaskPatch | None) -> None:
    if patch is None:
        return
    fields = (patch.status, patch.agent, patch.reason, patch.raised, patch.parent, patch.branch)
    if fields.count(None) < len(fields):
        total = None if patch.branch is None else branch_sum(task, patch.branch)
        conn.execute(sql("sqlite_commit")["patch_task"], (n, *fields, total))
    if patch.guarded:
        conn.execute(sql("sqlite_commit")["guarded"], (n,))
    if patch.input is not None:
        conn.execute(sql("sqlite_commit")["set_input"], (n, patch.input))


def now() -> int:
    return time.time_ns() // 1000

"""Checkpoints in one SQLite file, shared by the threads and processes of one machine.

What each rule here prevents was found by trying and is told in docs/stores.md. Writing is here, leases are in sqlite_leases,
reading in sqlite_read, removing in sqlite_sweep, and the connections under all of them in sqlite_db.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import apsw

from safepoint import _probe
from safepoint.errors import SafepointError, StoreFull, Unavailable, UsageError
from safepoint.model import Finding, Obj, check_id
from safepoint.rows import CallRow, Commit, Committed, Guard, Head, PauseRow
from safepoint.stores import refusals, sqlite_check, sqlite_rows, sqlite_sweep, sqlite_writes
from safepoint.stores.base import Durability, Store
from safepoint.stores.oslock import Claim, LockFile
from safepoint.stores.sqlite_db import CommitFailed, Connection, Database, sql, translate
from safepoint.stores.sqlite_guard import tool_may
from safepoint.stores.sqlite_leases import Leases, now, patch_task
from safepoint.stores.sqlite_mend import Mends
from safepoint.stores.sqlite_read import Reads
from safepoint.stores.sqlite_rows import CALL, CHECKPOINT, PAUSE, PUT_CALL, PUT_CHECKPOINT, PUT_PAUSE, key, sealed, values
from safepoint.stores.sqlite_schema import branch_sum
from safepoint.stores.sqlite_sweep import Removals
from safepoint.stores.sqlite_whole import Whole
from safepoint.stores.witness import Slot, Witness

__all__ = ["SQLiteStore"]

BATCH = 1_000_000
"""Bytes of new objects that one transaction may hold up others for."""


class _Look(NamedTuple):
    """What a commit finds of its task and of the lease on it."""

    n: int
    next_seq: int
    next_call: int
    next_pause: int
    next_line: int
    next_write: int
    position: int
    branch: str
    branches_sum: int | None
    last_commit: str
    created_at: int
    writes: int
    fence: int | None
    token: str | None
    lease_id: int | None
    locks: str | None
    state: str | None
    holder: bytes | None
    acquired_at: int | None

    def __repr__(self) -> str:
        return f"<_Look n={self.n}>"  # the token is nobody else's affair


_NO_LEASE = (None,) * 7


class _Stage(NamedTuple):
    """A big save on its way: its row, and what tells whether its objects may have been swept since."""

    k: int
    claim: Claim
    n: int
    sweeps: int


class _Landed(Exception):
    """The commit turned out to have landed before, when part of it was written again: takes the answer out of a rollback."""

    def __init__(self, committed: Committed) -> None:
        super().__init__()
        self.committed = committed


class SQLiteStore(Leases, Reads, Removals, Whole, Mends, Store):
    """A store in the SQLite file ``path``; its lease locks are in ``path-locks``.

    Nothing else in the same process may open the file, by whatever means: closing it would drop SQLite's locks, and saves
    already acknowledged would be lost. ``connection`` lends the store's own.
    """

    persistent = True
    transactional_tools = True

    def __init__(
        self, path: str | os.PathLike[str], *, timeout: float = 10.0, durability: Durability = "full", network_ok: bool = False
    ) -> None:
        name = os.fspath(path)
        if not isinstance(name, str) or not name or "\0" in name or name == ":memory:":
            raise UsageError(f"{name!r} is no path of a SQLite file", "", "Use memory:// for a store that is not kept.")
        if durability not in {"full", "process"}:
            raise UsageError(f"durability={durability!r} is unknown", "", "Use 'full' or 'process'.")
        if timeout < 0:
            raise UsageError(f"timeout={timeout!r} is below zero", "", "Give seconds.")
        # One name for one file: SQLite's log and our locks lie beside it.
        self.path = os.path.realpath(name)
        self.url = f"sqlite:///{self.path}"
        self.timeout = timeout
        self.durability = durability
        sqlite_check.refuse_network(self.path, network_ok)
        self._db = Database(self.path, timeout=timeout, full=durability == "full")
        self._locks = LockFile(f"{self.path}-locks")
        self._witness = Witness(self._locks, full=self._db.full)
        self._claims: dict[int, Claim] = {}
        self._sql = sql("sqlite_commit")

    # -- writing

    def commit(self, commit: Commit) -> Committed:
        check_id(commit.task)
        _probe.at("commit.begin")
        stage = self._stage(commit) if len(commit.objects) > 1 and _size(commit.objects) > BATCH else None
        try:
            written: Committed | None = None
            try:
                with self._db.writing(commit.sync) as conn:
                    look = self._look(conn, commit)
                    written = self._write(conn, look, commit, stage)
                    _probe.at("commit.before")
            except CommitFailed as failed:
                return self._settle(commit, look, written, failed.cause)
            except _Landed as landed:
                return landed.committed
            _probe.at("commit.after")
            self._acknowledge(look, commit, written)
            return written
        except BaseException:
            if stage is not None:
                self._forget(stage)
            raise
        finally:
            if stage is not None:
                stage.claim.free()

    def transact(self, task: str, guard: Guard, call: CallRow, body: Callable[[Any], Commit]) -> Committed:
        written: Committed | None = None
        commit: Commit | None = None
        look: _Look | None = None
        transaction = self._db.writing(True)
        try:
            with transaction as conn:
                look = self._find(conn, task)
                if look is None:
                    raise self._gone_task(conn, task)
                self._check_guard(task, guard, look)
                self._compare(conn, task, look.n, "call", call, {})
                mark = secrets.token_hex(16)
                conn.execute(self._sql["mark"], (mark, look.n))
                with tool_may(conn):
                    try:
                        commit = body(conn)
                    except BaseException as error:
                        transaction.foreign = error
                        raise
                    _probe.at("transact.body")
                # SQLite itself ends a transaction when the disk is full or fails, and the tool may have swallowed that error.
                if not conn.in_transaction or conn.rows(self._sql["marked"], (look.n,)) != [(mark,)]:
                    raise Unavailable(
                        f"the transaction of call {call.no} of task {task!r} was ended by SQLite",
                        "an error inside the tool, such as a full disk, rolled it back",
                        "Look at what the tool wrote, then settle the call.",
                        unknown=True,
                        id=commit.id,
                        task=task,
                    )
                if commit.task != task or commit.guard != guard:
                    raise UsageError("the body of transact returned a commit of another task or run", "", "Return its own.")
                try:
                    written = self._write(conn, self._look(conn, commit), commit, None)
                except _Landed as landed:
                    written = landed.committed
                if written.existed:  # the effect would be there without a record of this call
                    raise UsageError(f"id {commit.id!r} of task {task!r} is taken", "all was rolled back", "Use a new id.")
                _probe.at("transact.before")
        except CommitFailed as failed:
            assert commit is not None
            assert look is not None
            assert written is not None
            is_there = self._ask(commit, look, written)
            if not is_there:
                raise _not_acknowledged(commit, call, is_there, failed.cause) from failed.cause
        _probe.at("transact.after")
        assert commit is not None
        assert look is not None
        assert written is not None
        self._acknowledge(look, commit, written)
        return written

    def connection(self) -> AbstractContextManager[apsw.Connection]:
        """Lend the writing connection, outside any transaction, for tables that tools keep in the same file.

        While it is lent nothing else in this process can write. A transaction that the body leaves open is rolled back.
        """
        return self._lend()

    @contextmanager
    def _lend(self) -> Iterator[apsw.Connection]:
        db, owner = self._db, object()
        try:
            conn = db.lock_writer(owner)
            try:
                db.level(conn, True)
                with tool_may(conn, transactions=True):
                    yield conn
            except apsw.Error as error:
                raise translate(error, self.path, ours=False) from error
            if not db.poisoned and conn.in_transaction:
                raise UsageError("a lent connection came back with an open transaction", "it was rolled back", "Commit it.")
        finally:
            db.unlock_writer(owner)

    def _look(self, conn: Connection, commit: Commit) -> _Look:
        """Read what the commit is compared with; a task that a guardless checkpoint, or write, begins is created."""
        look = self._find(conn, commit.task)
        if look is not None:
            self._refuse_older(conn, look.n, commit.task, look.created_at, look.writes)
            return look
        if (commit.checkpoint is None and not commit.writes) or commit.guard is not None:
            raise self._gone_task(conn, commit.task)
        self._refuse_hidden(conn, commit.task)
        n = conn.rows(self._sql["new_task"], (commit.task, now(), branch_sum(commit.task, "main")))[0][0]
        self._refuse_taken(conn, n, commit.task)
        return self._look(conn, commit)

    def _gone_task(self, conn: Connection, task: str) -> SafepointError:
        """The error that a task which is not found is answered with."""
        return self._lost(conn, task, self._witness.find(self._db.name, task, self._last(conn))) or refusals.no_task(task)

    def _acknowledge(self, look: _Look, commit: Commit, written: Committed) -> None:
        """Tell the witness what COMMIT has returned of."""
        if written.existed:
            return
        slot = Slot(
            look.created_at,
            look.writes + 1,
            look.position + sum([bool(write.stamp) for write in commit.calls]),
            look.fence or 0,
            look.next_seq if written.seq is None else written.seq + 1,
            look.next_call + sum([write.row.version == 0 for write in commit.calls]),
            look.next_pause + sum([ask.row.version == 0 for ask in commit.pauses]),
            look.next_line,
        )
        self._witness.write(self._db.name, look.n, commit.task, slot, sync=commit.sync)

    def _find(self, conn: Connection, task: str) -> _Look | None:
        found = conn.rows(self._sql["look"], (task,))
        if not found:
            return None
        lease = conn.rows(self._sql["look_lease"], found[0][:1])
        return sqlite_rows.plain(_Look, found[0] + (lease[0] if lease else _NO_LEASE))

    def _write(self, conn: Connection, look: _Look, commit: Commit, stage: _Stage | None) -> Committed:
        """The contract's steps in their order, inside the caller's transaction."""
        new, n, task, put = commit.checkpoint, look.n, commit.task, conn.execute
        at = None
        if new is not None and (found := conn.rows(self._sql["look_branch"], (n, new.space, new.branch))):
            at = sqlite_rows.plain(Head, found[0])
        try:
            if commit.guard is not None:
                self._check_guard(task, commit.guard, look)
            elif not commit.anyway:
                self._refuse_if_held(task, look.state, look.lease_id, look.locks, look.holder, look.acquired_at)
            if new is None and look.last_commit == commit.id:
                return self._repeated(conn, look, commit)
            if new is not None and at != commit.expect:
                raise refusals.moved(commit, at)
            if commit.at_head:
                found = conn.rows(self._sql["look_branch"], (n, "", look.branch))
                if (head := sqlite_rows.plain(Head, found[0]) if found else None) != commit.stands_on:
                    raise refusals.not_at_head(commit, look.branch, head)
            if (on := commit.stands_on) is not None and conn.rows(self._sql["id_at"], (key(n, on.seq),)) != [(on.id,)]:
                raise refusals.gone(task, on)
            if new is not None and at is None and (there := self._same_id(conn, n, commit)):
                return refusals.existing(commit, at, *there[0])
        except SafepointError:
            # Whether the same commit has landed before comes first, by the contract; but only what would be refused, or
            # begins a branch, can have: a head that stands where it is expected has not been moved by this commit.
            if new is not None and (there := self._same_id(conn, n, commit)):
                return refusals.existing(commit, at, *there[0])
            raise

        size = self._put_objects(conn, n, commit.objects, stage)
        _probe.at("commit.objects")
        next_call, next_pause, position, next_line = look.next_call, look.next_pause, look.position, look.next_line
        calls: dict[int, CallRow] = {}
        for write in commit.calls:
            row = write.row
            no = row.no
            if row.version == 0:
                no = next_call
                next_call += 1
            else:
                self._compare(conn, task, n, "call", row, calls)
            row = calls[no] = sealed(task, row, no=no, version=row.version + 1, **_stamp(write.stamp, position))
            position += bool(write.stamp)
            record = values(n, no, row, CALL)
            put(PUT_CALL if write.row.version else sqlite_rows.NEW_CALL, record)
            size += _bytes(record)
        pauses: dict[int, PauseRow] = {}
        for ask in commit.pauses:
            pause = ask.row
            no = pause.no
            if pause.version == 0:
                no = next_pause
                next_pause += 1
            else:
                self._compare(conn, task, n, "pause", pause, pauses)
            pause = pauses[no] = sealed(task, pause, no=no, version=pause.version + 1)
            record = values(n, no, pause, PAUSE)
            put(PUT_PAUSE if ask.row.version else sqlite_rows.NEW_PAUSE, record)
            size += _bytes(record)
        sum_of = look.branches_sum
        if commit.branches:
            patch = commit.patch
            sum_of = sqlite_writes.move_branches(conn, n, commit, (patch and patch.branch) or look.branch, sum_of)
        next_write = look.next_write
        if commit.writes:
            next_write, written = sqlite_writes.put(conn, n, commit, next_write)
            size += written
        head, seq, current = None, look.next_seq, look.branch
        if new is not None:
            head = commit.expect
            record = values(n, seq, sealed(task, new, id=commit.id, seq=seq), CHECKPOINT)
            try:
                put(PUT_CHECKPOINT, record)
            except apsw.ConstraintError:
                if not (there := self._same_id(conn, n, commit)):
                    raise
                # A failure leaf that is saved again, or an id that another state has: its branch stands where it did.
                raise _Landed(refusals.existing(commit, at, *there[0])) from None
            size += _bytes(record)
            if commit.moves_head:
                head = Head(seq, commit.id)
                if at is not None:
                    put(self._sql["move_branch"], (n, new.space, new.branch, seq, commit.id))
                else:
                    line = next_line if commit.line is None else commit.line
                    next_line = max(next_line, line + 1)
                    if new.space == "" and not conn.rows(self._sql["has_branch"], (n,)):
                        current = new.branch  # a task's first branch is its current one
                    sum_of = sqlite_writes.summed(sum_of, task, new.space, new.branch)
                    put(self._sql["new_branch"], (n, new.space, new.branch, seq, commit.id, line, new.parent_seq))
        _probe.at("commit.row")
        more = new is not None
        counters = (seq + more, next_call, next_pause, next_line, position)
        sums = branch_sum(task, current), next_write, sum_of
        put(self._sql["set_task"], (n, *counters, current, int(more), commit.id, now(), *sums))
        patch_task(conn, n, task, commit.patch)
        if stage is not None:
            put(self._sql["end_stage"], (stage.k,))
        return Committed(seq if more else None, head, False, tuple(calls.values()), tuple(pauses.values()), size)

    def _same_id(self, conn: Connection, n: int, commit: Commit) -> list[Any]:
        space = "" if commit.checkpoint is None else commit.checkpoint.space
        return conn.rows(self._sql["same_id"], (n, space, commit.id))

    def _put_objects(self, conn: Connection, n: int, objects: tuple[Obj, ...], stage: _Stage | None) -> int:
        # What was staged is still there unless somebody has swept this task since; then all is sent again.
        if stage is not None:
            found = conn.rows(self._sql["staged"], (n, stage.k))
            if stage.n == n and found == [(stage.sweeps,)]:
                return _size(objects)
        statement, size = self._sql["object"], 0
        for obj in objects:
            conn.execute(statement, (n, None, *obj))
            if conn.changes():
                size += 16 + len(obj.refs) + len(obj.data)
        return size

    def _compare(
        self, conn: Connection, task: str, n: int, kind: str, row: CallRow | PauseRow, earlier: dict[int, Any]
    ) -> None:
        if (mine := earlier.get(row.no)) is not None:
            version = mine.version
        else:
            found = conn.rows(f"SELECT version FROM sp_{kind}s WHERE k = ?", (key(n, row.no),))
            if not found:
                raise refusals.no_row(task, kind, row.no)
            version = found[0][0]
        if version != row.version:
            raise refusals.changed(task, kind, row.no, version, row.version)

    def _repeated(self, conn: Connection, look: _Look, commit: Commit) -> Committed:
        """Answer a commit without a checkpoint that was the last to land on its task: with its rows as they are."""
        fresh_calls = look.next_call - sum(w.row.version == 0 for w in commit.calls)
        fresh_pauses = look.next_pause - sum(w.row.version == 0 for w in commit.pauses)
        calls, pauses = [], []
        for write in commit.calls:
            no, fresh_calls = (fresh_calls, fresh_calls + 1) if write.row.version == 0 else (write.row.no, fresh_calls)
            found = conn.rows(sqlite_rows.GET_CALL, (key(look.n, no),))
            calls += [sqlite_rows.call(row) for row in found]
        for ask in commit.pauses:
            no, fresh_pauses = (fresh_pauses, fresh_pauses + 1) if ask.row.version == 0 else (ask.row.no, fresh_pauses)
            found = conn.rows(sqlite_rows.GET_PAUSE, (key(look.n, no),))
            pauses += [sqlite_rows.pause(row) for row in found]
        return Committed(None, None, True, tuple(calls), tuple(pauses), 0)

    # -- when COMMIT did not say

    def _settle(self, commit: Commit, before: _Look, written: Committed | None, cause: SafepointError) -> Committed:
        """After an error out of COMMIT: look under the lock whether it landed, and make the answer stay true."""
        assert written is not None
        landed = self._ask(commit, before, written)
        if landed is None and isinstance(cause, StoreFull):
            # The look itself has to write, for which there is no room either.
            raise StoreFull(
                cause.what,
                "whether the last write landed cannot be found out without room",
                f"Free some space; deleting rows does not help. Then ask for id {commit.id!r}, or read the task again.",
                id=commit.id,
                task=commit.task,
                unknown=True,
            ) from cause
        if landed is None:
            raise Unavailable(
                f"whether the last write to task {commit.task!r} landed is not known",
                str(cause),
                f"Ask for checkpoint id {commit.id!r} once the store answers again."
                if commit.checkpoint
                else "Read the task again.",
                id=commit.id,
                task=commit.task,
                unknown=True,
            ) from cause
        if not landed:
            raise cause
        self._acknowledge(before, commit, written)
        return written

    def _ask(self, commit: Commit, before: _Look, written: Committed) -> bool | None:
        """Whether a commit has landed; None if that cannot be found out."""
        try:
            with self._db.writing(True) as conn:
                landed = self._landed(conn, commit, before, written)
                # The frames of a commit whose fsync failed lie in the log beyond its end, and a process that opens the
                # log after a crash would take them for good. A write of our own overwrites them: only then is it gone.
                conn.execute(self._sql["nonce"])
        except (CommitFailed, SafepointError):
            return None
        return landed

    def _landed(self, conn: Connection, commit: Commit, before: _Look, written: Committed) -> bool | None:
        now = self._find(conn, commit.task)
        if now is None:
            return False
        if commit.checkpoint is not None:
            return bool(conn.rows(self._sql["same_id"], (now.n, commit.checkpoint.space, commit.id)))
        if now.last_commit == commit.id:
            return True
        if now.last_commit == before.last_commit:
            return False
        # Somebody else has written since. A row with our seal is ours; one at a later version may have been.
        rows: tuple[tuple[str, CallRow | PauseRow], ...] = (
            *(("call", row) for row in written.calls),
            *(("pause", row) for row in written.pauses),
        )
        for kind, row in rows:
            found = conn.rows(f"SELECT seal, version FROM sp_{kind}s WHERE k = ?", (key(now.n, row.no),))
            if found and found[0][0] == row.seal:
                return True
            if not found or found[0][1] <= row.version:
                return False
        return None

    # -- big saves

    def _stage(self, commit: Commit) -> _Stage:
        """Send the objects of a big save ahead in transactions of about 1 MB, so that others wait for one of them only."""
        claim = self._claim()
        stage: _Stage | None = None
        try:
            with self._db.writing(False) as conn:
                if commit.guard is not None:
                    self._check_guard(commit.task, commit.guard, self._look(conn, commit))
                sqlite_sweep.drop_dead_stages(conn, self._locks)
                k, n = conn.rows(self._sql["new_stage"], (commit.task, claim.byte))[0]
            found = [(n, 0)]
            for batch in _batches(commit.objects):
                with self._db.writing(False) as conn:
                    found = conn.rows(self._sql["sweeps"], (commit.task,)) or [(n, 0)]
                    if stage is None:
                        stage = _Stage(k, claim, n, found[0][1])
                    conn.executemany(self._sql["object"], [(n, k, o.name, o.refs, o.data) for o in batch])
                _probe.at("commit.staged")
            assert stage is not None
            return stage
        except BaseException as error:
            claim.free()
            if isinstance(error, CommitFailed):
                raise error.cause from error
            raise

    def _forget(self, stage: _Stage) -> None:
        """The save did not land: its objects are garbage, for the next sweep."""
        try:
            with self._db.writing(False) as conn:
                conn.execute(self._sql["end_stage"], (stage.k,))
        except (CommitFailed, SafepointError):
            pass  # the claim is freed in any case, and a row whose byte is free means the same

    # -- removing

    def delete_task(self, task: str) -> bool:
        return sqlite_sweep.delete_task(
            self._db, task, lambda *lease: self._refuse_if_held(task, *lease), self._gone_task, self._witness
        )

    # -- the store itself

    def check(self) -> list[Finding]:
        return [*sqlite_check.check(self._db, Path(self.path)), self._witnessed()]

    def close(self) -> None:
        if self._db.closed:
            return
        self._db.close()
        # What a closed store held is free, as after a death: nobody is left who could release it.
        for claim in list(self._claims.values()):
            claim.free()
        self._claims.clear()
        self._locks.close()


def _not_acknowledged(commit: Commit, call: CallRow, landed: bool | None, cause: SafepointError) -> Unavailable:
    """The end of a tool's transaction did not say whether it landed; ``landed`` is what was found out."""
    what = f"the transaction of call {call.no} of task {commit.task!r}"
    facts: dict[str, Any] = {"id": commit.id, "task": commit.task}
    if landed is None:
        return Unavailable(
            f"whether {what} landed is not known", str(cause), "Read the call: its effect is there if its result is.", **facts
        )
    return Unavailable(
        f"{what} did not land", str(cause), "Neither effect nor result is there; do it again.", landed=False, **facts
    )


def _stamp(stamp: str, position: int) -> dict[str, int]:
    return {stamp: position} if stamp else {}


def _size(objects: tuple[Obj, ...]) -> int:
    return sum([16 + len(obj.refs) + len(obj.data) for obj in objects])


_SIZED = frozenset({bytes, str})


def _bytes(record: tuple[Any, ...]) -> int:
    return sum([len(v) for v in record if v.__class__ in _SIZED])


def _batches(objects: tuple[Obj, ...]) -> Iterator[list[Obj]]:
    batch: list[Obj] = []
    size = 0
    for obj in objects:
        batch.append(obj)
        size += 16 + len(obj.refs) + len(obj.data)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch

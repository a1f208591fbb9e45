"""Writing in the PostgreSQL store: a commit is one call of one function, and a tool's transaction ends with the same one.

The client numbers and seals the rows as the task's numbers probably are; the server compares under the task's lock, and answers
with its own if they differ (see stores/foreseen.py). A repeated request is answered as the first was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from typing import Any, NamedTuple

import psycopg
from psycopg.pq import TransactionStatus

from safepoint import _probe
from safepoint.errors import SafepointError, Unavailable, UsageError
from safepoint.model import Obj, check_id
from safepoint.rows import CallRow, CheckpointRow, Commit, Committed, Guard, Head, Numbers, PauseRow, TaskPatch
from safepoint.stores import holder as people
from safepoint.stores import refusals
from safepoint.stores.foreseen import Foreseen, Ready, ready
from safepoint.stores.postgres.db import CommitFailed, Database, run
from safepoint.stores.postgres.link import Link
from safepoint.stores.postgres.read import Reads
from safepoint.stores.postgres.rows import IDS, Array, blobs, encoded, ints, texts
from safepoint.stores.renewing import Renewals, is_dead

__all__ = ["BATCH", "Commits", "patch_names"]

BATCH = 1_000_000
"""Bytes of new objects that one request may hold up others for."""
STAGED_FOR = 60.0
"""Seconds after its last part for which a big save is believed to go on."""

_ANYWAY, _AT_HEAD, _SYNC, _WITH_ROW, _MOVES = 1, 2, 4, 8, 16

CHECKPOINT_INTS = ("seq", "parent_seq", "step", "created_at", "format", "schema", "size", "pinned")
CHECKPOINT_TEXTS = ("id", "space", "branch", "kind", "label")
CHECKPOINT_BYTES = ("digest", "seal", "metadata", "metrics", "refs", "root")
CALL_INTS = (
    "no", "line", "step", "scope", "attempts", "fence", "base_seq", "started_at", "finished_at", "asked", "began", "ended",
    "not_done", "superseded", "version",
)  # fmt: skip
CALL_TEXTS = ("tool", "effect", "call_id", "idempotency_key", "status", "reason")
CALL_BYTES = ("ident", "op_key", "seal", "policy", "args_refs", "result_refs", "error", "model", "args", "result")
PAUSE_INTS = ("no", "line", "step", "occurrence", "call_no", "base_seq", "asked_at", "answered_at", "version")
PAUSE_TEXTS = ("space", "name", "status")
PAUSE_BYTES = ("seal", "question", "answer")


class _Answer(NamedTuple):
    word: str
    numbers: list[int | None]
    names: list[str | None]
    blobs: list[bytes | None]

    @property
    def last(self) -> Numbers:
        return Numbers(*self.numbers[:5])  # type: ignore[arg-type]

    @property
    def more(self) -> list[Any]:
        return self.numbers[5:]


class _Stage(NamedTuple):
    """A big save on its way: its row, its task, and what tells whether its objects may have been swept since."""

    k: int
    n: int
    sweeps: int
    size: int


class Commits(Reads):
    """Needs ``_db``, ``_foreseen`` and ``_renewals`` from the store."""

    _db: Database
    _foreseen: Foreseen
    _renewals: Renewals

    def commit(self, commit: Commit) -> Committed:
        check_id(commit.task)
        _probe.at("commit.begin")
        stage = self._stage(commit) if _size(commit.objects) > BATCH else None
        try:
            done = self._commit(commit, stage)
        except BaseException:
            if stage is not None:
                self._forget(stage)
            raise
        _probe.at("commit.after")
        return done

    def _commit(self, commit: Commit, stage: _Stage | None) -> Committed:
        facts = {"id": commit.id, "task": commit.task}
        end = time.monotonic() + self._db.timeout
        dead: str | None = None
        objects = () if stage is not None else commit.objects
        while True:
            made = ready(commit, self._foreseen.get(commit.task))
            parameters = _parameters(commit, made, objects, stage)

            def once(link: Link, parameters: Any = parameters, dead: str | None = dead) -> _Answer:
                return self._send(link, commit, parameters, dead, None)

            _probe.at("commit.before")
            answer = self._db.repeat(once, facts)
            if answer.word == "unstaged":
                # Somebody has swept the task since the objects were sent: all of them are sent again, with the rows.
                stage, objects = None, commit.objects
            elif answer.word == "held" and (found := self._proven_dead(answer)) is not None and found != dead:
                dead = found
            elif answer.word == "numbers":
                self._foreseen.put(commit.task, answer.last)
                if time.monotonic() >= end:
                    raise Unavailable(f"task {commit.task!r} is busy", "others write to it all the time", "Do it again.")
            else:
                done = self._answered(commit, made, answer)
                return done if stage is None else _with_size(done, stage.size)

    def _send(self, link: Link, commit: Commit, parameters: list[Any], dead: str | None, xact: str | None) -> _Answer:
        statement = self._db.function("sp_commit_1", 18)
        guard = commit.guard or (None, None)
        return _Answer(
            *run(
                link,
                statement,
                (
                    commit.task,
                    commit.id,
                    *guard,
                    parameters[0] | self._flags(commit),
                    self._db.patience(link),
                    dead,
                    xact,
                    *parameters[1:],
                ),
            )[0]
        )

    def _flags(self, commit: Commit) -> int:
        return _SYNC if commit.sync and self._db.sync else 0

    def _proven_dead(self, answer: _Answer) -> str | None:
        token, process = answer.names[0] or "", answer.blobs[0] or b""
        return token if is_dead(process, token) else None

    def _answered(self, commit: Commit, made: Ready, answer: _Answer) -> Committed:
        """The outcome of a commit in the contract's terms."""
        task, new, more = commit.task, commit.checkpoint, answer.more
        if answer.word == "no_task":
            self._foreseen.drop(task)
            raise refusals.no_task(task)
        self._foreseen.put(task, answer.last)
        if answer.word == "done":
            head = None
            if new is not None:
                head = Head(made.next.seq, commit.id) if commit.moves_head else commit.expect
            return Committed(
                None if new is None else made.next.seq, head, False, made.calls, made.pauses, more[0] + _row_bytes(made)
            )
        if answer.word == "existed":
            seq, parent, at = more
            head = None if at is None else Head(at, answer.names[1] or "")
            return refusals.existing(commit, head, seq, answer.names[0] or "", parent, answer.blobs[0] or b"")
        if answer.word == "repeated":
            return self._repeated(commit, *more)
        raise self._refusal(commit, answer)

    def _refusal(self, commit: Commit, answer: _Answer) -> SafepointError:
        task, more = commit.task, answer.more
        match answer.word:
            case "lost":
                assert commit.guard is not None
                if answer.names[0]:
                    self._renewals.lose(task, answer.names[0])
                return refusals.lost(task, commit.guard, more[0])
            case "held":
                return people.lease_held(task, answer.blobs[1] or b"", more[0])
            case "moved":
                return refusals.moved(commit, _head(more, answer.names))
            case "not_at_head":
                return refusals.not_at_head(commit, answer.names[1] or "", _head(more, answer.names))
            case "gone":
                assert commit.stands_on is not None
                return refusals.gone(task, commit.stands_on)
        return _row_refusal(task, answer)

    def _repeated(self, commit: Commit, call: int, pause: int) -> Committed:
        """A commit without a checkpoint that has landed before: its rows as they are now. The numbers are those before it."""
        call_nos, pause_nos = [], []
        for write in commit.calls:
            call += write.row.version == 0
            call_nos.append(call if write.row.version == 0 else write.row.no)
        for ask in commit.pauses:
            pause += ask.row.version == 0
            pause_nos.append(pause if ask.row.version == 0 else ask.row.no)
        calls = {row.no: row for row in self.calls(commit.task, nos=call_nos, bodies=False)[0]} if call_nos else {}
        pauses = {row.no: row for row in self.pauses(commit.task)} if pause_nos else {}
        return Committed(
            None,
            None,
            True,
            tuple(calls[no] for no in dict.fromkeys(call_nos) if no in calls),
            tuple(pauses[no] for no in dict.fromkeys(pause_nos) if no in pauses),
        )

    # -- big saves

    def _stage(self, commit: Commit) -> _Stage:
        """Send the objects of a big save ahead in requests of about 1 MB, so that others wait for one of them only."""
        statement = self._db.function("sp_stage_1", 10)
        guard = commit.guard or (None, None)
        k: int | None = None
        n: int | None = None
        sweeps = 0
        for batch in _batches(commit.objects):
            packed = _objects(batch)

            def once(link: Link, k: int | None = k, n: int | None = n, packed: Any = packed) -> Any:
                return run(link, statement, (commit.task, *guard, self._db.patience(link), k, n, STAGED_FOR, *packed))[0]

            word, numbers = self._db.repeat(once)
            if word == "lost":
                assert commit.guard is not None
                raise refusals.lost(commit.task, commit.guard, numbers[0])
            if word == "no_task":
                raise refusals.no_task(commit.task)
            if word == "unstaged":  # it took so long that it was given up on: the commit will ask for all of them
                break
            if k is None:
                k, n, sweeps = numbers
            _probe.at("commit.staged")
        return _Stage(k or 0, n or 0, sweeps, _size(commit.objects))

    def _forget(self, stage: _Stage) -> None:
        """The save did not land: its objects are garbage, for the next sweep."""
        try:
            self._db.ask(f"DELETE FROM {self._db.quoted}.sp_stages WHERE k = %s", (stage.k,))
        except SafepointError:
            pass  # its time will run out

    # -- tools whose effect is in the same database

    def transact(self, task: str, guard: Guard, call: CallRow, body: Callable[[Any], Commit]) -> Committed:
        check_id(task)
        db = self._db
        with db.lent() as link:
            xact = self._enter(link, task, guard, call)
            commit, foreign = None, None
            link.lent, link.end, link.begun_again = True, None, False
            try:
                commit = body(link)
                _probe.at("transact.body")
            except BaseException as error:
                foreign = error
            link.lent, link.end = False, time.monotonic() + db.timeout
            if foreign is not None:
                self._undo(link, xact, task, call, foreign)
                raise foreign
            assert commit is not None
            try:
                done = self._finish(link, xact, task, guard, call, commit)
                _probe.at("transact.before")
            except BaseException as error:
                self._undo(link, xact, task, call, error)
                raise
            try:
                db.commit(link)
            except CommitFailed as failed:
                self._settle(commit, call, failed)
        _probe.at("transact.after")
        return done

    def _enter(self, link: Link, task: str, guard: Guard, call: CallRow) -> str:
        db = self._db
        try:
            db.begin(link, True)
            word, numbers, names = run(link, db.function("sp_transact_1", 5), (task, *guard, call.no, call.version))[0]
        except psycopg.Error as error:
            db.end(link, "ROLLBACK")
            raise db.translate(error) from error
        except BaseException:
            db.end(link, "ROLLBACK")
            raise
        answer = _Answer(word, numbers, names or [], [])
        if word == "done":
            self._foreseen.put(task, answer.last)
            return str(names[0])
        db.end(link, "ROLLBACK")
        if word == "no_task":
            raise refusals.no_task(task)
        if word == "lost":
            raise refusals.lost(task, guard, answer.more[0])
        raise _row_refusal(task, answer)

    def _finish(self, link: Link, xact: str, task: str, guard: Guard, call: CallRow, commit: Commit) -> Committed:
        """Write what the body has returned, in the transaction that it was begun in."""
        if commit.task != task or commit.guard != guard:
            raise UsageError("the body of transact returned a commit of another task or run", "", "Return its own.")
        if link.closed:
            raise Unavailable(
                f"the connection was lost while the tool of call {call.no} of task {task!r} ran",
                "all was rolled back",
                "Do it again.",
            )
        status = link.pgconn.transaction_status
        if status == TransactionStatus.INERROR:
            raise UsageError(
                f"a statement of the tool of call {call.no} failed, and the tool went on",
                "PostgreSQL rolls back the whole transaction then; nothing has happened",
                "Let the error out, or put the statement in conn.transaction(), which is a savepoint here.",
            )
        if link.begun_again:
            raise UsageError(
                f"the tool of call {call.no} began a transaction",
                "it has one, which the store ends; all was rolled back",
                "Leave it out.",
            )
        if status != TransactionStatus.INTRANS:
            raise _ended(commit.id, task, call)
        while True:
            made = ready(commit, self._foreseen.get(task))
            try:
                answer = self._send(link, commit, _parameters(commit, made, commit.objects, None), None, xact)
            except psycopg.Error as error:
                raise self._db.translate(error) from error
            if answer.word == "ended":
                raise _ended(commit.id, task, call)
            if answer.word != "numbers":
                break
            self._foreseen.put(task, answer.last)
        done = self._answered(commit, made, answer)
        if done.existed:  # the effect would be there without a record of this call
            raise UsageError(f"id {commit.id!r} of task {task!r} is taken", "all was rolled back", "Use a new id.")
        return done

    def _undo(self, link: Link, xact: str, task: str, call: CallRow, cause: BaseException) -> None:
        """Roll back; and see whether the tool had ended the transaction, so that part of its effect stands."""
        self._foreseen.drop(task)
        db = self._db
        if isinstance(cause, Unavailable) and cause.details.get("unknown") and cause.details.get("task") == task:
            db.end(link, "ROLLBACK")
            return
        db.end(link, "ROLLBACK")
        if link.closed or not isinstance(cause, Exception):
            return
        try:
            status = run(link, "SELECT pg_xact_status(%s::text::xid8)", (xact,))[0][0]
        except psycopg.Error:
            return
        if status == "committed":
            raise _ended("", task, call) from cause

    def _settle(self, commit: Commit, call: CallRow, failed: CommitFailed) -> None:
        """COMMIT did not say whether the transaction landed: ask under the lock."""
        landed: bool | None = False
        if not failed.refused:
            landed = self._landed(commit)
        if landed:
            return
        what = f"the transaction of call {call.no} of task {commit.task!r}"
        facts: dict[str, Any] = {"id": commit.id, "task": commit.task}
        if landed is None:
            raise Unavailable(
                f"whether {what} landed is not known",
                str(failed.cause),
                "Read the call: its effect is there if its result is.",
                **facts,
            ) from failed.cause
        raise Unavailable(
            f"{what} did not land", str(failed.cause), "Neither effect nor result is there; do it again.", landed=False, **facts
        ) from failed.cause

    def _landed(self, commit: Commit) -> bool | None:
        space = "" if commit.checkpoint is None else commit.checkpoint.space
        statement = self._db.function("sp_landed_1", 4)
        try:
            return bool(
                self._db.repeat(lambda link: run(link, statement, (commit.task, commit.id, space, self._db.patience(link))))[0][
                    0
                ]
            )
        except SafepointError:
            return None

    def connection(self) -> AbstractContextManager[Any]:
        """Lend a connection, outside any transaction, for tables that tools keep in the same database."""
        return self._lend()

    @contextmanager
    def _lend(self) -> Iterator[Link]:
        with self._db.lent() as link:
            link.end = None
            yield link
            if not link.closed and link.pgconn.transaction_status != TransactionStatus.IDLE:
                raise UsageError("a lent connection came back with an open transaction", "it was rolled back", "Commit it.")


# -- parameters


def patch_names(patch: TaskPatch | None) -> list[str | None]:
    if patch is None:
        return [None] * 5
    status, agent, reason = (None if v is None else encoded(v) for v in (patch.status, patch.agent, patch.reason))
    return [status, agent, reason, patch.parent, patch.branch]


def _parameters(commit: Commit, made: Ready, objects: tuple[Obj, ...], stage: _Stage | None) -> list[Any]:
    """What sp_commit_1 takes from ``flags`` on, without the waiting time, dead and xact in between."""
    flags = _ANYWAY * commit.anyway + _AT_HEAD * commit.at_head + _MOVES * commit.moves_head
    i: list[int | None] = []
    s: list[str | None] = []
    b: list[bytes | None] = []
    if made.checkpoint is not None:
        flags += _WITH_ROW
        _add_checkpoint(made.checkpoint, i, s, b)
    for row, version in zip(made.calls, made.call_versions, strict=True):
        i.append(version)
        _add_call(row, i, s, b)
    for pause, version in zip(made.pauses, made.pause_versions, strict=True):
        i.append(version)
        _add_pause(pause, i, s, b)
    expect, on, last, after = commit.expect or (None, None), commit.stands_on or (None, None), made.last, made.next
    num = ints(
        [
            *(expect[0], on[0], commit.line, last.seq, last.call, last.pause, last.position, len(made.calls), len(made.pauses)),
            *((None, None, None) if stage is None else stage[:3]),
            *(after.seq, after.call, after.pause, after.position),
        ]
    )
    patch = commit.patch
    names = texts([expect[1], on[1], *patch_names(patch)])
    more = (None, None) if patch is None else (patch.raised, patch.input)
    return [flags, num, names, ints(i), texts(s), blobs(b), *_objects(objects), *more]


def _adder(whole: tuple[str, ...], words: tuple[str, ...], raw: tuple[str, ...]) -> Callable[..., None]:
    """What puts the values of a row into the three arrays."""
    get_whole, get_words, get_raw = attrgetter(*whole), attrgetter(*words), attrgetter(*raw)
    coding: list[Callable[[str], str]] = [str if word in IDS else encoded for word in words]

    def add(row: Any, i: list[int | None], s: list[str | None], b: list[bytes | None]) -> None:
        i += get_whole(row)
        s += [text(word) if word is not None else None for text, word in zip(coding, get_words(row), strict=True)]
        b += get_raw(row)

    return add


_add_checkpoint = _adder(CHECKPOINT_INTS, CHECKPOINT_TEXTS, CHECKPOINT_BYTES)
_add_call = _adder(CALL_INTS, CALL_TEXTS, CALL_BYTES)
_add_pause = _adder(PAUSE_INTS, PAUSE_TEXTS, PAUSE_BYTES)


def _objects(objects: tuple[Obj, ...] | list[Obj]) -> tuple[Array | None, Array | None, Array | None]:
    """Names, refs and data; each name once, in one order for all, so that no two requests wait for each other."""
    if not objects:
        return None, None, None
    each = sorted({obj.name: obj for obj in objects}.values())
    return blobs([obj.name for obj in each]), blobs([obj.refs for obj in each]), blobs([obj.data for obj in each])


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


def _size(objects: tuple[Obj, ...]) -> int:
    return sum([16 + len(obj.refs) + len(obj.data) for obj in objects])


def _row_bytes(made: Ready) -> int:
    rows: list[CheckpointRow | CallRow | PauseRow] = [*made.calls, *made.pauses]
    if made.checkpoint is not None:
        rows.append(made.checkpoint)
    return sum([len(v) for row in rows for v in _fields(row) if v.__class__ is bytes or v.__class__ is str])


def _fields(row: Any) -> list[Any]:
    return [getattr(row, name) for name in row.__struct_fields__]


def _with_size(done: Committed, size: int) -> Committed:
    from safepoint.rows import replace

    return done if done.existed else replace(done, bytes_written=done.bytes_written + size)


# -- answers


def _head(more: list[Any], names: list[str | None] | None) -> Head | None:
    return Head(more[0], (names or [""])[0] or "") if more and more[0] is not None else None


def _row_refusal(task: str, answer: _Answer) -> SafepointError:
    no, there, expected = answer.more
    if answer.word in {"no_call", "no_pause"}:
        return refusals.no_row(task, answer.word[3:], no)
    if answer.word in {"call", "pause"}:
        return refusals.changed(task, answer.word, no, there, expected)
    return Unavailable(f"the store answered {answer.word!r}", "this library does not know that", "Use the newer safepoint.")


def _ended(id: str, task: str, call: CallRow) -> Unavailable:
    return Unavailable(
        f"the transaction of call {call.no} of task {task!r} was ended by its tool",
        "what it had written until then may stand without a record",
        "Look at what the tool wrote, then settle the call.",
        unknown=True,
        id=id,
        task=task,
    )

"""Writing in the PostgreSQL store: a commit is one call of one function, and a tool's transaction ends with the same one.

The client numbers and seals the rows as the task's numbers probably are; the server compares under the task's lock, and answers
with its own if they differ (see stores/foreseen.py). A repeated request is answered as the first was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from typing import Any, NamedTuple

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from safepoint import _probe
from safepoint.errors import SafepointError, Unavailable, UsageError
from safepoint.model import Obj, check_id
from safepoint.rows import CallRow, Commit, Committed, Guard, Head, Numbers, TaskPatch, replace
from safepoint.stores import holder as people
from safepoint.stores import refusals
from safepoint.stores.foreseen import Foreseen, Ready, ready
from safepoint.stores.postgres.db import CommitFailed, Database, run, unknown
from safepoint.stores.postgres.link import Link
from safepoint.stores.postgres.read import Reads
from safepoint.stores.postgres.rows import IDS, blobs, encoded, ints, texts
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
WRITE_INTS = ("idx",)
WRITE_TEXTS = ("space", "checkpoint", "writer", "path")
WRITE_BYTES = ("seal", "refs", "data")


class _Answer:
    """What the server says: a word, the task's numbers, and what belongs to the word (see postgres_commit_1.sql)."""

    __slots__ = ("last", "more", "word")

    def __init__(self, said: list[str | None]) -> None:
        self.word = said[0]
        self.last = Numbers(*map(int, said[1:6]))  # type: ignore[arg-type]
        self.more = said[6:]


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
        except BaseException as error:
            if stage is not None and not isinstance(error, Unavailable):  # then nobody would hear it either
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
            parts = _parts(commit, made, objects, stage, self._sync(commit))

            def once(link: Link, parts: _Parts = parts, dead: str | None = dead) -> _Answer:
                return self._send(link, parts, dead, None)

            _probe.at("commit.before")
            answer = self._db.repeat(once, facts)
            if answer.word == "unstaged":
                # Somebody has swept the task since the objects were sent: all of them are sent again, with the rows.
                if stage is not None:
                    self._forget(stage)
                stage, objects = None, commit.objects
            elif answer.word == "held" and (found := self._proven_dead(answer)) is not None and found != dead:
                dead = found
            elif answer.word == "numbers":
                self._foreseen.put(commit.task, answer.last)
                if time.monotonic() >= end:
                    raise Unavailable(f"task {commit.task!r} is busy", "others write to it all the time", "Do it again.")
            else:
                done = self._answered(commit, made, answer, parts)
                return done if stage is None else _with_size(done, stage.size)

    def _send(self, link: Link, parts: _Parts, dead: str | None, xact: str | None) -> _Answer:
        i, s, b = parts
        i[1], s[3], s[4] = self._db.patience(link), dead, xact
        return _Answer(run(link, self._db.function("sp_commit_1", 3), (ints(i), texts(s), blobs(b)))[0][0])

    def _sync(self, commit: Commit) -> bool:
        return commit.sync and self._db.sync

    def _proven_dead(self, answer: _Answer) -> str | None:
        token, process = answer.more[:2]
        return token if is_dead(_unhex(process), token or "") else None

    def _answered(self, commit: Commit, made: Ready, answer: _Answer, parts: _Parts) -> Committed:
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
            written = int(more[0] or 0) + _row_bytes(parts)
            return Committed(None if new is None else made.next.seq, head, False, made.calls, made.pauses, written)
        if answer.word == "existed":
            seq, parent, branch, digest, *at = more
            return refusals.existing(commit, _head(at), int(seq or 0), branch or "", _whole(parent), _unhex(digest))
        if answer.word == "repeated":
            return self._repeated(commit, int(more[0] or 0), int(more[1] or 0))
        raise self._refusal(commit, answer)

    def _refusal(self, commit: Commit, answer: _Answer) -> SafepointError:
        task, more = commit.task, answer.more
        match answer.word:
            case "lost":
                assert commit.guard is not None
                return self._lost(task, commit.guard, more)
            case "held":
                return people.lease_held(task, _unhex(more[2]), int(more[3] or 0))
            case "moved":
                return refusals.moved(commit, _head(more))
            case "not_at_head":
                return refusals.not_at_head(commit, more[2] or "", _head(more))
            case "gone":
                assert commit.stands_on is not None
                return refusals.gone(task, commit.stands_on)
            case "moved_away":
                return refusals.moved_away(task, commit.branches[int(more[2] or 0)], _head(more))
            case "no_head":
                to = commit.branches[int(more[0] or 0)].to
                assert to is not None
                return refusals.gone(task, to)
            case "has_others":
                return refusals.has_others(task, more[0] or "")
        return _row_refusal(task, answer)

    def _lost(self, task: str, guard: Guard, more: list[str | None]) -> SafepointError:
        fence, token = more
        if token is not None:
            self._renewals.lose(task, token)
        return refusals.lost(task, guard, _whole(fence))

    def _repeated(self, commit: Commit, call: int, pause: int) -> Committed:
        """A commit without a checkpoint that has landed before: its rows as they are now. The numbers are those before it."""
        call_nos, pause_nos = [], []
        for write in commit.calls:
            call += write.row.version == 0
            call_nos.append(call if write.row.version == 0 else write.row.no)
        for ask in commit.pauses:
            pause += ask.row.version == 0
            pause_nos.append(pause if ask.row.version == 0 else ask.row.no)
        try:
            calls = {row.no: row for row in self.calls(commit.task, nos=call_nos, bodies=False)[0]} if call_nos else {}
            pauses = {row.no: row for row in self.pauses(commit.task)} if pause_nos else {}
        except Unavailable as error:
            # As it comes it would say that nothing was written.
            raise unknown(error, {"id": commit.id, "task": commit.task}) from error
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
        statement = self._db.columns_of("sp_stage_1", 10)
        guard = commit.guard or (None, None)
        k: int | None = None
        n: int | None = None
        sweeps = 0
        for batch in _batches(commit.objects):
            each = _each(batch)
            packed = [blobs([obj[k] for obj in each]) for k in range(3)]

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
        with db.lent(lambda link: self._enter(link, task, guard, call)) as (link, xact):
            commit, foreign = None, None
            link.lent, link.end, link.begun_again = True, None, False
            try:
                commit = body(link)
                _probe.at("transact.body")
            except BaseException as error:
                foreign = error
            link.lent, link.end = False, time.monotonic() + db.timeout
            link.row_factory = tuple_row
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
        """Begin the transaction: with the locks that it stands on, if the call is still as it was. Returns its number."""
        db = self._db
        try:
            link.execute("BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE")
            given = (task, *guard, call.no, call.version, encoded(call.idempotency_key), db.patience(link), db.sync)
            answer = _Answer(run(link, db.function("sp_transact_1", 8), given)[0][0])
            if answer.word == "no_task":
                raise refusals.no_task(task)
            if answer.word == "lost":
                raise self._lost(task, guard, answer.more)
            if answer.word != "done":
                raise _row_refusal(task, answer)
        except BaseException:
            db.end(link, "ROLLBACK")
            raise
        self._foreseen.put(task, answer.last)
        return answer.more[0] or ""

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
            parts = _parts(commit, made, commit.objects, None, self._sync(commit))
            try:
                answer = self._send(link, parts, None, xact)
            except psycopg.Error as error:
                raise self._db.translate(error) from error
            if answer.word == "ended":
                raise _ended(commit.id, task, call)
            if answer.word != "numbers":
                break
            self._foreseen.put(task, answer.last)
        done = self._answered(commit, made, answer, parts)
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
        with self._db.lent(lambda _: None) as (link, _):
            # For whoever has it: with its settings, its own transactions and all. It is closed afterwards.
            link.end, link.spoiled = None, True
            yield link
            if not link.closed and link.pgconn.transaction_status != TransactionStatus.IDLE:
                raise UsageError("a lent connection came back with an open transaction", "it was rolled back", "Commit it.")


# -- parameters


def patch_names(patch: TaskPatch | None) -> list[str | None]:
    if patch is None:
        return [None] * 5
    status, agent, reason = (None if v is None else encoded(v) for v in (patch.status, patch.agent, patch.reason))
    return [status, agent, reason, patch.parent, patch.branch]


_Parts = tuple[list[int | None], list[str | None], list[bytes | None]]


def _parts(commit: Commit, made: Ready, objects: tuple[Obj, ...], stage: _Stage | None, sync: bool) -> _Parts:
    """What sp_commit_1 takes."""
    flags = _ANYWAY * commit.anyway + _AT_HEAD * commit.at_head + _MOVES * commit.moves_head + _SYNC * sync
    if made.checkpoint is not None:
        flags += _WITH_ROW
    none = (None, None)
    fence, token = commit.guard or none
    expect, on = commit.expect or none, commit.stands_on or none
    each = _each(objects)
    patch = commit.patch
    i: list[int | None] = [
        *(flags, 0, fence, expect[0], on[0], commit.line),
        *_counted(made.last),
        *_counted(made.next),
        *(len(made.calls), len(made.pauses), len(each)),
        *((None, None, None) if stage is None else stage[:3]),
        *(len(made.writes), len(commit.branches)),
    ]
    s: list[str | None] = [commit.task, commit.id, token, None, None, expect[1], on[1], *patch_names(patch)]
    b: list[bytes | None] = [None, None] if patch is None else [patch.raised, patch.input]
    if made.checkpoint is not None:
        _add_checkpoint(made.checkpoint, i, s, b)
    for row, version in zip(made.calls, made.call_versions, strict=True):
        i.append(version)
        _add_call(row, i, s, b)
    for pause, version in zip(made.pauses, made.pause_versions, strict=True):
        i.append(version)
        _add_pause(pause, i, s, b)
    for write in made.writes:
        _add_write(write, i, s, b)
    for move in commit.branches:
        to = move.to or none
        i += (move.expect.seq, to[0])
        s += (move.space, move.name, move.expect.id, to[1])
    for k in range(3):
        b += [obj[k] for obj in each]
    return i, s, b


_counted = attrgetter("seq", "call", "pause", "position")


def _each(objects: Iterable[Obj]) -> list[Obj]:
    """Each name once, in one order for all, so that no two requests wait for each other."""
    return sorted({obj.name: obj for obj in objects}.values())


def _adder(whole: tuple[str, ...], words: tuple[str, ...], raw: tuple[str, ...]) -> Callable[..., None]:
    """What puts the values of a row into the three arrays."""
    get_whole: Callable[[Any], Any] = attrgetter(*whole) if len(whole) > 1 else lambda row: (getattr(row, whole[0]),)
    get_words, get_raw = attrgetter(*words), attrgetter(*raw)
    coding: list[Callable[[str], str]] = [str if word in IDS else encoded for word in words]

    def add(row: Any, i: list[int | None], s: list[str | None], b: list[bytes | None]) -> None:
        i += get_whole(row)
        s += [text(word) if word is not None else None for text, word in zip(coding, get_words(row), strict=True)]
        b += get_raw(row)

    return add


_add_checkpoint = _adder(CHECKPOINT_INTS, CHECKPOINT_TEXTS, CHECKPOINT_BYTES)
_add_call = _adder(CALL_INTS, CALL_TEXTS, CALL_BYTES)
_add_pause = _adder(PAUSE_INTS, PAUSE_TEXTS, PAUSE_BYTES)
_add_write = _adder(WRITE_INTS, WRITE_TEXTS, WRITE_BYTES)


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


def _row_bytes(parts: _Parts) -> int:
    """Bytes of texts and blobs in the rows of a commit; the server takes off those of writes that it leaves out."""
    i, s, b = parts
    rows = [*s[12 : len(s) - 4 * (i[21] or 0)], *b[2 : len(b) - 3 * (i[16] or 0)]]
    return sum([len(value) for value in rows if value is not None])


def _with_size(done: Committed, size: int) -> Committed:
    return done if done.existed else replace(done, bytes_written=done.bytes_written + size)


# -- answers


def _whole(text: str | None) -> int | None:
    return None if text is None else int(text)


def _unhex(text: str | None) -> bytes:
    return bytes.fromhex(text or "")


def _head(at: list[str | None]) -> Head | None:
    """The seq and id that an answer's words begin with."""
    return Head(int(at[0]), at[1] or "") if at and at[0] is not None else None


def _row_refusal(task: str, answer: _Answer) -> SafepointError:
    word = answer.word or ""
    if word not in {"no_call", "no_pause", "call", "pause"}:
        return Unavailable(f"the store answered {word!r}", "this library does not know that", "Use the newer safepoint.")
    no, there, expected = map(_whole, answer.more)
    assert no is not None
    if there is None or expected is None:
        return refusals.no_row(task, word.removeprefix("no_"), no)
    return refusals.changed(task, word, no, there, expected)


def _ended(id: str, task: str, call: CallRow) -> Unavailable:
    return Unavailable(
        f"the transaction of call {call.no} of task {task!r} was ended by its tool",
        "what it had written until then may stand without a record",
        "Look at what the tool wrote, then settle the call.",
        unknown=True,
        id=id,
        task=task,
    )

"""Writing: a commit is one script call; what it is compared with and what it writes are made ready here.

The client numbers and seals the rows (``stores.foreseen``), and the script takes them as they are or answers what stands in their
way. Its answers come in the order of ``Store.commit``.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

import msgspec

from safepoint import _probe
from safepoint.errors import Damaged, SafepointError, StoreFull, Unavailable, UsageError
from safepoint.model import Obj, check_id
from safepoint.rows import CallRow, Commit, Committed, Head, Numbers, PauseRow, TaskPatch, WriteRow
from safepoint.stores import holder as people
from safepoint.stores import refusals
from safepoint.stores.foreseen import Foreseen, Ready, ready
from safepoint.stores.redis import layout
from safepoint.stores.redis.client import Client
from safepoint.stores.renewing import Renewals, is_dead

__all__ = ["Commits", "now", "patched", "refuse_names"]

BATCH = 1_000_000
"""Bytes of new objects for which one script may make all others wait."""
LARGEST = 256 * 2**20
"""Bytes of one value. Redis takes 512 MB at most, and a script holds it twice."""


class Commits:
    """Needs the client, what is foreseen, and the TTL from the store."""

    _client: Client
    _foreseen: Foreseen
    _renewals: Renewals
    _ttl: int
    timeout: float

    def commit(self, commit: Commit) -> Committed:
        check_id(commit.task)
        _refuse(commit)
        _probe.at("commit.begin")
        stage: tuple[str, int] | None = None
        if len(commit.objects) > 1 and _size(commit.objects) > BATCH:
            stage = self._stage(commit)
        try:
            done = self._commit(commit, stage)
        except BaseException:
            if stage is not None:
                self._unstage(commit.task, stage[0])
            raise
        _probe.at("commit.after")
        return done

    def _commit(self, commit: Commit, stage: tuple[str, int] | None) -> Committed:
        task, client = commit.task, self._client
        deadline = client.deadline()
        dead = ""
        last = self._foreseen.get(task)
        announced = _begins(commit) and last == Numbers()
        if announced:
            client.announce(task, deadline=deadline)
        while True:
            made = ready(commit, last)
            request = _Request(commit, made, stage, announced=announced, dead=dead, ttl=self._ttl)
            _probe.at("commit.before")
            try:
                word, n, *more = client.write("commit", client.keys.of(task), request.args, deadline=deadline)
            except SafepointError as error:
                raise _unknown(commit, error) from error
            last = layout.numbers_of(n)
            self._foreseen.put(task, last)
            if word == b"done":
                size = request.size - int(more[0])
                head = commit.expect
                if made.checkpoint is not None and commit.moves_head:
                    head = Head(made.checkpoint.seq, commit.id)
                seq = None if made.checkpoint is None else made.checkpoint.seq
                return Committed(seq, None if seq is None else head, False, made.calls, made.pauses, size)
            if word == b"existed":
                return _existing(commit, *more)
            if word == b"recent":
                return self._repeated(commit, more[0], deadline)
            if word == b"announce":
                client.announce(task, deadline=deadline)
                announced = True
            elif word == b"held":
                dead = _proven(task, *more)
            elif word == b"unstaged":
                assert stage is not None
                stage = self._stage(commit)
                deadline = client.deadline()
            elif word != b"numbers":
                if word == b"absent":
                    self._foreseen.drop(task)
                if word == b"lost":
                    self._renewals.lose(task, layout.decoded(more[1]))  # before the next beat finds it out
                _raise(commit, word, *more)
            if time.monotonic() >= deadline:
                raise Unavailable(
                    f"task {task!r} is written to all the time", f"no turn in {self.timeout:g} s", "Try again.", task=task
                )

    def _repeated(self, commit: Commit, entry: bytes, deadline: float) -> Committed:
        """Answer a commit without a checkpoint that landed before: with its rows as they are now."""
        _, nos, pause_nos = msgspec.msgpack.decode(entry)
        fields = [*(b"c:%d" % no for no in nos), *(b"p:%d" % no for no in pause_nos)]
        _, *values = self._client.script("get", self._client.keys.of(commit.task), [b"", *fields], deadline=deadline)
        found, asked = values[: len(nos)], values[len(nos) :]
        calls = [layout.call(no, value) for no, value in zip(nos, found, strict=True) if value is not None]
        pauses = [layout.pause(no, value) for no, value in zip(pause_nos, asked, strict=True) if value is not None]
        return Committed(None, None, True, tuple(calls), tuple(pauses), 0)

    # -- big saves

    def _stage(self, commit: Commit) -> tuple[str, int]:
        """Send the objects of a big commit ahead, a little at a time, so that nobody else waits for all of it."""
        if _begins(commit) and self._foreseen.get(commit.task) == Numbers():
            self._client.announce(commit.task)
        keys = self._client.keys.of(commit.task)
        while True:
            stage, k = secrets.token_hex(8), 0
            try:
                for k, batch in enumerate(_batches(commit.objects), 1):
                    args: list[Any] = [stage, k, layout.STAGE_FOR, b"".join([o.name for o in batch])]
                    for o in batch:
                        args += (b"o:" + o.name, layout.body(o.refs, o.data))
                    # Each batch has the time of a verb: how long the whole takes is up to its size.
                    if not self._client.write("stage", keys, args):
                        break
                    _probe.at("commit.staged")
                else:
                    return stage, k
            except BaseException:
                self._unstage(commit.task, stage)  # where memory ran out, these objects may be what it ran out for
                raise

    def _unstage(self, task: str, stage: str) -> None:
        try:
            self._client.write("unstage", self._client.keys.of(task), [stage])
        except SafepointError:
            pass  # it expires


def _begins(commit: Commit) -> bool:
    """Whether it is a task's first, as far as it can tell: a save of a new branch. (Writes do not know, and are told.)"""
    return commit.checkpoint is not None and commit.guard is None and commit.expect is None


class _Request:
    """The arguments of ``commit.lua``."""

    def __init__(
        self, commit: Commit, made: Ready, stage: tuple[str, int] | None, *, announced: bool, dead: str, ttl: int
    ) -> None:
        new, following, at = made.checkpoint, made.next, now()
        writes: list[bytes] = []
        checks: list[bytes] = []
        moves: list[bytes] = []
        for move in commit.branches:
            moves += (layout.text(move.space), layout.text(move.name), layout.head(move.expect), layout.head(move.to))
            moves += (b"", b"") if move.to is None else (b"h:%d" % move.to.seq, layout.mark(move.to.id))
            moves.append(layout.roll(moves[-6]))
        line_of = roll = name = branch = id_field = b""
        if new is not None:
            branch, id_field = layout.field("b", new.space, new.branch), layout.field("i", new.space, commit.id)
            writes += (b"h:%d" % new.seq, layout.encoded_header(new), b"r:%d" % new.seq, layout.body(new.refs, new.root))
            writes += (id_field, b"%d" % new.seq)
            if commit.moves_head:
                writes += (branch, layout.head(Head(new.seq, commit.id)))
                if commit.expect is None:
                    line = made.last.line + 1 if commit.line is None else commit.line
                    following = msgspec.structs.replace(following, line=max(following.line, line))
                    writes += (layout.field("l", new.space, new.branch), layout.pack([line, new.parent_seq]))
                    line_of = b"%s\0%s\0" % (layout.text(new.space), layout.text(new.branch))
                    roll, name = layout.roll(layout.text(new.space)), layout.text(new.branch)
        opens = _rows(b"c", made.calls, made.call_versions, checks, writes)
        asks = _rows(b"p", made.pauses, made.pause_versions, checks, writes)
        came = layout.mask("g", [r.no for r, v in zip(made.calls, made.call_versions, strict=True) if not v])
        came |= layout.mask("j", [r.no for r, v in zip(made.pauses, made.pause_versions, strict=True) if not v])
        if new is not None:
            came |= layout.mask("k", [new.seq]) | {b"count": 1}
        writes += patched(commit.patch)
        records = _recorded(made.writes)
        objects: list[bytes] = []
        for o in commit.objects if stage is None else ():
            objects += (b"o:" + o.name, layout.body(o.refs, o.data))
        self.size = (
            sum(map(len, writes[1::2]))
            + sum([len(value) for rows in records.values() for _, value in rows])
            + _size(commit.objects)
        )
        recent = recorded = b""
        if new is None:
            recent = layout.pack(commit.id)
            recorded = layout.pack([commit.id, [row.no for row in made.calls], [row.no for row in made.pauses]])
        # A commit that draws no numbers lands whatever they are.
        expected = layout.numbers(made.last) if new is not None or made.calls or made.pauses else b""
        guard, on = commit.guard, commit.stands_on
        self.args: list[Any] = [
            ttl, id_field, int(announced), "" if guard is None else guard.fence, "" if guard is None else guard.token,
            int(commit.anyway), dead, recent, recorded, branch, layout.head(commit.expect), int(commit.at_head), layout.head(on),
            "" if on is None else b"h:%d" % on.seq, "" if on is None else layout.mark(on.id), *(stage or ("", "")),
            expected, layout.numbers(following), "" if new is None else new.seq, line_of, roll, name, at, layout.text(commit.task),
            len(checks) // 3, len(moves) // 7, len(opens) // 2, len(asks) // 2, len(came), len(records), len(objects) // 2,
            layout.text(commit.patch.branch) if commit.patch is not None and commit.patch.branch is not None else b"", *checks, *moves, *opens, *asks,
        ]  # fmt: skip
        for field, by in came.items():
            self.args += (field, by)
        for place, rows in records.items():
            self.args += (layout.shelf(place), place, len(rows))
            for row in rows:
                self.args += row
        self.args += objects
        self.args += writes


def _recorded(rows: Iterable[WriteRow]) -> dict[bytes, list[tuple[bytes, bytes]]]:
    """Entry and value of each of the writes, by space and checkpoint."""
    found: dict[bytes, list[tuple[bytes, bytes]]] = {}
    for row in rows:
        place = b"%s\0%s" % (layout.text(row.space), layout.text(row.checkpoint))
        found.setdefault(place, []).append((layout.entry(row), layout.encoded_write(row)))
    return found


def _rows(
    kind: bytes, rows: Sequence[CallRow | PauseRow], versions: Sequence[int], checks: list[bytes], writes: list[bytes]
) -> list[bytes]:
    """Add what is compared and written of calls or pauses; returns what becomes of ``open`` or ``asks``."""
    opens: list[bytes] = []
    for row, version in zip(rows, versions, strict=True):
        field, entry = b"%s:%d" % (kind, row.no), layout.open_entry(row)
        if version:
            own = row.idempotency_key if isinstance(row, CallRow) else row.asked_at
            checks += (field, layout.mark(version), layout.mark(own))
        if version or entry:
            opens += (b"%d" % row.no, entry)
        writes += (field, layout.encoded_call(row) if isinstance(row, CallRow) else layout.encoded_pause(row))
    return opens


_PATCH = ("status", "agent", "input", "reason", "raised", "parent", "branch")


def patched(patch: TaskPatch | None) -> list[bytes]:
    """Pairs of fields and values that a patch sets."""
    found: list[bytes] = []
    for name in _PATCH if patch is not None else ():
        value = getattr(patch, name)
        if value is not None:
            found += (b"t:" + name.encode(), value if isinstance(value, bytes) else layout.text(value))
    return found


def now() -> int:
    return time.time_ns() // 1000


# -- answers


def _existing(commit: Commit, seq: bytes, top: bytes | None, at: bytes) -> Committed:
    if top is None:
        raise Damaged(f"checkpoint {int(seq)} of task {commit.task!r} is missing", "its id is there", "Restore the store.")
    row = layout.header(int(seq), top)
    return refusals.existing(commit, layout.head_of(at), row.seq, row.branch, row.parent_seq, row.digest)


def _proven(task: str, token: bytes, process: bytes, holder: bytes, at: bytes) -> str:
    """The token of a holder that is proven dead; LeaseHeld if it is not."""
    if not is_dead(process, token.decode()):
        raise people.lease_held(task, holder, int(at))
    return token.decode()


def _raise(commit: Commit, word: bytes, *more: bytes) -> NoReturn:
    task = commit.task
    if word == b"absent":
        raise refusals.no_task(task)
    if word == b"lost":
        assert commit.guard is not None
        raise refusals.lost(task, commit.guard, int(more[0]) if more[0] else None)
    if word == b"moved":
        raise refusals.moved(commit, layout.head_of(more[0]))
    if word == b"away":
        raise refusals.not_at_head(commit, layout.decoded(more[0]), layout.head_of(more[1]))
    if word == b"gone":
        assert commit.stands_on is not None
        raise refusals.gone(task, commit.stands_on)
    if word == b"astray":
        raise refusals.moved_away(task, commit.branches[int(more[0])], layout.head_of(more[1]))
    if word == b"nowhere":
        to = commit.branches[int(more[0])].to
        assert to is not None
        raise refusals.gone(task, to)
    if word == b"others":
        raise refusals.has_others(task, layout.decoded(more[0]))
    assert word == b"changed", word
    kind, no = ("call", int(more[0][2:])) if more[0].startswith(b"c:") else ("pause", int(more[0][2:]))
    if not more[1]:
        raise refusals.no_row(task, kind, no)
    there = layout.call(no, more[1]) if kind == "call" else layout.pause(no, more[1])
    rows = [w.row for w in commit.calls] if kind == "call" else [w.row for w in commit.pauses]
    raise refusals.changed(task, kind, no, there.version, next(row.version for row in rows if row.no == no))


def _unknown(commit: Commit, error: SafepointError) -> SafepointError:
    """An error of the client, with what is known of the commit."""
    if not error.details.get("unknown"):
        return error
    how = f"Ask for checkpoint id {commit.id!r} once the store answers again." if commit.checkpoint else "Read the task again."
    kind = StoreFull if isinstance(error, StoreFull) else Unavailable
    what = f"whether the last write to task {commit.task!r} landed is not known"
    return kind(what, f"{error.what}: {error.why}", how, id=commit.id, task=commit.task, unknown=True)


# -- sizes


def _refuse(commit: Commit) -> None:
    new = commit.checkpoint
    if new is not None and ("\0" in new.space or "\0" in new.branch):
        raise UsageError("a branch or space holds a NUL character", "", "Remove it.", task=commit.task)
    refuse_names(commit.task, commit.writes)
    sizes = [len(o.refs) + len(o.data) for o in commit.objects]
    if new is not None:
        sizes += (len(new.root) + len(new.refs), len(new.metadata) + len(new.metrics))
    sizes += [len(w.row.args) + len(w.row.result or b"") for w in commit.calls]
    sizes += [len(row.data) + len(row.refs) for row in commit.writes]
    if sizes and (size := max(sizes)) > LARGEST:
        raise UsageError(
            f"a value of {size / 1e6:.0f} MB of task {commit.task!r} is too large for Redis",
            f"one may have {LARGEST / 1e6:.0f} MB",
            "Split it into smaller ones, or keep it elsewhere and its name in the state.",
            task=commit.task,
            size=size,
        )


def refuse_names(task: str, rows: Iterable[WriteRow]) -> None:
    for row in rows:
        if "\0" in row.space or "\0" in row.checkpoint or "\0" in row.writer:
            what = "the space, checkpoint or writer of what is recorded"
            raise UsageError(f"{what} holds a NUL character", "", "Remove it.", task=task)


def _size(objects: tuple[Obj, ...]) -> int:
    return sum([16 + len(o.refs) + len(o.data) for o in objects])


def _batches(objects: tuple[Obj, ...]) -> Iterator[list[Obj]]:
    batch: list[Obj] = []
    size = 0
    for o in objects:
        batch.append(o)
        size += 16 + len(o.refs) + len(o.data)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch

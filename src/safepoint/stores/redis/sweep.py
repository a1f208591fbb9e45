"""Removing from Redis: retention, whole tasks, pins. A script holds up the whole server, so each does a few milliseconds' work.

What goes is found out outside of scripts. Then rows go, a checkpoint always together with its calls and pauses; each script looks
again at whatever may have changed since. Only then objects are marked, again outside, as of one moment (the task's ``w``); and
what no row reached then is deleted, a few at a time. That mark may be as old as it likes: what it did not reach is needed later
only if some write has sent it since, as a commit leaves out nothing but what its parent reaches; and every object that is sent is
stamped with the moment of its write, by which the script that deletes passes it over. Big saves on their way are named in
``stages``, and what they have staged counts as reached.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from safepoint import _probe
from safepoint.codec.nodes import names_in
from safepoint.errors import Damaged
from safepoint.model import Obj
from safepoint.rows import CheckpointRow, Numbers, PauseRow, Pruned
from safepoint.rules import retention
from safepoint.stores import holder as people
from safepoint.stores import renewing
from safepoint.stores.redis import layout
from safepoint.stores.redis.fields import BYTES, PAGE, groups, numbered, rows_in, values_of
from safepoint.stores.sound import Flaw, find, wrong

if TYPE_CHECKING:
    from safepoint.stores.foreseen import Foreseen
    from safepoint.stores.redis.client import Client

__all__ = ["Removals", "Start", "asked", "start"]

ROWS, OBJECTS = 64, 256
"""What one script deletes: checkpoints with calls and pauses, or objects."""
FEW = 200
"""Checkpoints that are looked at in one step, when a look comes to its end."""
TRIES = 20
"""How often is looked anew, if a task changes meanwhile in a way that matters. What is left then is left to the next sweep."""


class Start(NamedTuple):
    """A task as of one moment, as far as a removal stands on it."""

    w: bytes
    token: bytes
    """The task has it as long as that moment is part of its past."""
    created: bytes
    born: bytes
    numbers: Numbers
    branches: tuple[bytes, ...]
    """``<space>\\0<name>`` of each."""
    current: bytes
    live: int | None
    """The fence of the live run, also where it cannot be told whether it lives."""
    dead: int | None
    """That of one who is proven not to."""
    staged: bytes
    """Names of the objects of big saves on their way."""

    @property
    def stamp(self) -> bytes:
        return b"%012x" % int(self.w or 0)


def start(client: Client, task: str) -> Start | None:
    """None if there is no such task; Damaged if only the rest of one."""
    token = secrets.token_hex(6).encode()
    found = client.write("sweep_begin", client.keys.of(task), [token])
    if not found:
        return None
    if len(found) == 1:
        raise Damaged(f"task {task!r} is damaged", "its row is gone", "Nothing was changed. See `safepoint verify`.", task=task)
    w, created, born, numbers, branches, current, fence, theirs, state, gone, process, staged = found
    live = dead = None
    if state == b"held" and gone != b"1":
        if renewing.is_dead(process, layout.decoded(theirs)):
            dead = int(fence)
        else:
            live = int(fence)
    names = tuple(b"\0".join(pair) for pair in _pairs(branches.split(b"\0")[:-1]))
    return Start(w, token, created, born, layout.numbers_of(numbers), names, current, live, dead, staged)


def _pairs(parts: list[bytes]) -> Iterator[tuple[bytes, bytes]]:
    return zip(parts[::2], parts[1::2], strict=False)


def asked(task: str, answer: list[Any]) -> bytes:
    """The token of the holder that a script told of, if it is proven dead; LeaseHeld if not."""
    _, _, token, process, holder, at = answer
    if renewing.is_dead(process, layout.decoded(token)):
        return bytes(token)
    raise people.lease_held(task, holder, int(at))


class Removals:
    """Needs ``_client``, ``_ttl`` and ``_foreseen`` from the store."""

    _client: Client
    _ttl: int
    _foreseen: Foreseen

    def prune(self, task: str, seqs: Iterable[int], *, space: str = "", dry_run: bool = False, sweep: bool = True) -> Pruned:
        work = _pruning(self._client, task, set(seqs), space, dry_run, sweep)
        while True:
            try:
                next(work)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]

    def pruning(self, task: str, seqs: Iterable[int], *, space: str = "", sweep: bool = True) -> Iterator[None]:
        return _pruning(self._client, task, set(seqs), space, False, sweep)

    def live_objects(self, task: str) -> int:
        key = self._client.keys.task(task)
        fields, count = self._client.many([("HLEN", key), ("HGET", key, "count")])
        return max(0, int(fields) - 3 * int(count or 0))

    def unreadable(self, task: str, seqs: Iterable[int], *, space: str = "", sound: set[bytes] | None = None) -> dict[int, str]:
        bad: dict[int, Flaw] = {}
        rows = _checkpoints(self._client, task, seqs, space, bad)
        bad |= find(task, rows, lambda names: objects(self._client, task, names), sound)
        return self._confirmed(task, bad) if bad else {}

    def _confirmed(self, task: str, bad: dict[int, Flaw]) -> dict[int, str]:
        """Those that are still there, each in one look with what it lacks: a sweep may have taken both meanwhile."""
        key = self._client.keys.task(task)
        found: dict[int, str] = {}
        for seq, flaw in sorted(bad.items()):
            fields = [b"h:%d" % seq] + ([] if flaw.name is None else [b"o:" + flaw.name])
            there, *value = self._client.command("HMGET", key, *fields)
            if there is None:
                continue
            if flaw.name is not None and not wrong(
                flaw.name, layout.obj(flaw.name, value[0]) if value[0] is not None else None
            ):
                continue
            found[seq] = flaw.why
        return found

    def pin(self, task: str, seq: int, pinned: bool, *, space: str = "") -> bool:
        if not 0 < seq < 1 << 53:
            return False
        return bool(self._client.write("pin", self._client.keys.of(task), [seq, space.encode(), int(pinned), self._ttl]))

    def delete_task(self, task: str) -> bool:
        client = self._client
        at = start(client, task)
        if at is None:
            return False
        dead = b""
        while True:
            answer = client.write("delete", client.keys.of(task), [self._ttl, dead, at.created, at.born])
            if answer[0] != b"held":
                break
            dead = asked(task, answer)
        if answer[0] == b"done" and answer[1] != b"0":
            client.write("fences", [client.keys.fences], [answer[1]])
        # Somebody may be about to create it again, so the index forgets it only where it is old; a listing does the rest.
        client.write("index", [client.keys.index_of(task)], [task.encode()])
        self._foreseen.drop(task)
        _probe.at("delete.after")
        return True


# -- reading


def _checkpoints(client: Client, task: str, seqs: Iterable[int], space: str, bad: dict[int, Flaw]) -> Iterator[CheckpointRow]:
    """The rows of these numbers; those that cannot be read are put into ``bad``."""
    wanted = sorted(seq for seq in set(seqs) if seq > 0)
    key = client.keys.task(task)
    for i in range(0, len(wanted), PAGE):
        part = wanted[i : i + PAGE]
        found = client.command("HMGET", key, *[b"%s:%d" % (kind, seq) for seq in part for kind in (b"h", b"r")])
        for seq, top, below in zip(part, found[::2], found[1::2], strict=True):
            if top is None:
                continue
            try:
                row = layout.checkpoint(seq, top, below)
            except Damaged as error:
                bad[seq] = Flaw(error.why)
                continue
            if row.space == space:
                yield row


def objects(client: Client, task: str, names: Iterable[bytes]) -> list[Obj]:
    wanted = list(names)
    key = client.keys.task(task)
    found: list[Obj] = []
    for i in range(0, len(wanted), PAGE):
        part = wanted[i : i + PAGE]
        values = client.command("HMGET", key, *[b"o:" + name for name in part])
        found += [layout.obj(name, value) for name, value in zip(part, values, strict=True) if value is not None]
    return found


# -- rows


class _CallBase(NamedTuple):
    no: int
    base_seq: int
    line: int
    step: int
    status: str
    fence: int
    version: int


class _Found(NamedTuple):
    at: Start
    begins: dict[int, int]
    gone: list[CheckpointRow]
    """By rising seq."""
    calls: dict[int, list[_CallBase]]
    pauses: dict[int, list[PauseRow]]
    writes: dict[int, list[bytes]]
    """The fields of what was recorded against each."""


def _look(client: Client, task: str, at: Start, wanted: set[int], space: str) -> _Found:
    key = client.keys.task(task)
    heads, kept = _heads(client, key, at)
    calls: list[_CallBase] = []
    pauses: list[PauseRow] = []
    for field, value in values_of(client, key, [b"c:%d" % no for no in numbered(client, key, "g", at.numbers.call)]):
        if value is not None:
            call = layout.call(int(field[2:]), value)
            calls.append(_CallBase(call.no, call.base_seq, call.line, call.step, call.status, call.fence, call.version))
    for field, value in values_of(client, key, [b"p:%d" % no for no in numbered(client, key, "j", at.numbers.pause)]):
        if value is not None:
            pauses.append(layout.pause(int(field[2:]), value))
    kept |= retention.stood_on(heads, calls, pauses, at.live)
    gone = []
    for field, value in values_of(client, key, [b"h:%d" % seq for seq in sorted(wanted - kept) if 0 < seq <= at.numbers.seq]):
        if value is not None:
            row = layout.header(int(field[2:]), value)
            if row.space == space and not row.pinned:
                gone.append(row)
    bases = {row.seq for row in gone}
    by_call: dict[int, list[_CallBase]] = defaultdict(list)
    by_pause: dict[int, list[PauseRow]] = defaultdict(list)
    for base in calls:
        if base.base_seq in bases:
            by_call[base.base_seq].append(base)
    for pause in pauses:
        if pause.base_seq in bases:
            by_pause[pause.base_seq].append(pause)
    lists = rows_in(client, key, [b"v:" + _place(row) for row in gone])
    writes = {row.seq: fields for row, fields in zip(gone, lists, strict=True) if fields}
    return _Found(at, retention.begins(heads), gone, by_call, by_pause, writes)


def _place(row: CheckpointRow) -> bytes:
    return layout.field("i", row.space, row.id)[2:]


def _heads(client: Client, key: bytes, at: Start) -> tuple[list[retention.At], set[int]]:
    """Where the branches stand, and the numbers of their heads and fork points."""
    heads: list[retention.At] = []
    kept: set[int] = set()
    fields = [prefix + name for name in at.branches for prefix in (b"b:", b"l:")]
    values = [value for _, value in values_of(client, key, fields)]
    seqs: list[int] = []
    lines: list[int] = []
    for name, head, fixed in zip(at.branches, values[::2], values[1::2], strict=True):
        where, line = layout.head_of(head), layout.fixed_of(fixed)
        if where is None or line is None:
            raise Damaged(
                f"branch {name.partition(bytes(1))[2]!r} is damaged", "where it stands is missing", "Nothing was deleted."
            )
        seqs.append(where.seq)
        lines.append(line[0])
        kept.add(where.seq)
        if line[1] is not None:
            kept.add(line[1])
    tops = [value for _, value in values_of(client, key, [b"h:%d" % seq for seq in seqs])]
    for name, seq, line_no, top in zip(at.branches, seqs, lines, tops, strict=True):
        if top is not None:  # else it was passed by, and the script sees that
            heads.append(retention.At(line_no, layout.header(seq, top).step, name == b"\0" + at.current))
    return heads, kept


def _batches(found: _Found) -> Iterator[list[CheckpointRow]]:
    batch: list[CheckpointRow] = []
    weight = 0
    for row in found.gone:
        batch.append(row)
        weight += 1 + sum(len(rows.get(row.seq, ())) for rows in (found.calls, found.pauses, found.writes))
        if weight >= ROWS:
            yield batch
            batch, weight = [], 0
    if batch:
        yield batch


def _bit(kind: str, number: int) -> tuple[bytes, int]:
    ((field, power),) = layout.mask(kind, [number]).items()
    return field, -power


def _drop_rows(client: Client, task: str, found: _Found, w: bytes, server: bytes, batch: list[CheckpointRow]) -> Any:
    at = found.at
    args: list[Any] = [w, at.token, at.numbers.call, at.numbers.pause]
    args += ["" if at.live is None else at.live, "" if at.dead is None else at.dead, server, len(found.begins)]
    for line, step in found.begins.items():
        args += [line, step]
    for row in batch:
        args += [row.seq, layout.field("i", row.space, row.id), layout.shelf(_place(row)), *_bit("k", row.seq)]
        for kind, stood in (("g", found.calls.get(row.seq, ())), ("j", found.pauses.get(row.seq, ()))):
            args.append(len(stood))
            for one in stood:
                args += [one.no, layout.mark(one.version), *_bit(kind, one.no)]
    return client.write("prune_rows", client.keys.of(task), args)


def _pruning(
    client: Client, task: str, wanted: set[int], space: str, dry_run: bool, sweep: bool
) -> Generator[None, None, Pruned]:
    """Resting at each yield for as long as one likes: nothing is locked there."""
    seqs: list[int] = []
    without_writes: set[bytes] = set()
    calls = objects_ = size = 0
    for _ in range(TRIES):
        if (at := start(client, task)) is None:
            return Pruned((), 0, 0, 0)
        if not wanted:
            break
        found = _look(client, task, at, wanted - set(seqs), space)
        yield
        if dry_run:
            seqs = [row.seq for row in found.gone]
            calls = sum(len(found.calls.get(seq, ())) for seq in seqs)
            without_writes = {b"v:" + _place(row) for row in found.gone}
            size = _rows_size(client, task, found)
            break
        w, server, changed = at.w, b"", False
        for batch in _batches(found):
            state, *did = _drop_rows(client, task, found, w, server, batch)
            if state == b"damaged":
                raise Damaged(
                    f"task {task!r} is damaged", f"{did[0]!r} cannot be read", "No more was deleted. See `safepoint verify`."
                )
            if changed := state != b"done":
                break
            # Only where nobody else has written is the next batch spared the look at everything.
            w, server = (did[2], did[1]) if did[0] == b"1" else (w, server)
            calls, size = calls + did[3], size + did[4]
            seqs += map(int, did[5:])
            _probe.at("sweep.rows")
            yield
        if not changed:
            break
    for _ in range(TRIES if sweep else 0):
        if (at := start(client, task)) is None:
            break
        mark = _Mark(client, task, at)
        known = yield from mark.look(set(seqs) if dry_run else set(), without_writes)
        if not known:
            continue
        _probe.at("sweep.marked")
        if dry_run:
            objects_, size = len(mark.garbage), size + sum(mark.garbage.values())
            break
        done = yield from mark.delete()
        objects_, size = objects_ + mark.objects, size + mark.size
        if done:
            break
    return Pruned(tuple(sorted(seqs)), calls, objects_, size)


def _rows_size(client: Client, task: str, found: _Found) -> int:
    fields = [b"%s:%d" % (kind, row.seq) for row in found.gone for kind in (b"h", b"r")]
    fields += [b"c:%d" % call.no for stood in found.calls.values() for call in stood]
    fields += [field for recorded in found.writes.values() for field in recorded]
    key = client.keys.task(task)
    return sum(client.many([("HSTRLEN", key, field) for field in fields])) if fields else 0


# -- objects


class _Mark:
    """What is reached, as of ``at`` or later.

    The look takes many trips, while rows come and go. What it must not miss is an object that was there at ``at`` and is needed
    ever since, each time by another row, which left it out as its parent had it. So objects are looked at first, then
    checkpoints by rising number, as a parent's number is lower than its child's: of such rows one is met, since the next was there
    before the last one went. Calls come last, as they leave out what a checkpoint has. And what a row was seen to reach
    without being found is asked for by name; if that row has gone too, all is looked at anew.
    """

    def __init__(self, client: Client, task: str, at: Start) -> None:
        self.client = client
        self.task = task
        self.at = at
        self.objects = self.size = 0
        """How many were deleted, and how many bytes."""
        self.garbage: dict[bytes, int] = {}
        """Names that nothing reaches, with the bytes of each."""
        self._key = client.keys.task(task)
        self._refs: dict[bytes, bytes] = {}
        self._origin: dict[bytes, bytes] = {}
        """Of each name that is reached, the field of a row that reaches it."""
        self._server = b""
        """Which one was looked at."""
        self._rows: set[bytes] = set()
        """Checkpoints, calls and writes that have been seen to be there, and whose refs not yet."""

    def look(self, without: set[int], without_writes: set[bytes]) -> Generator[None, None, bool]:
        """Find out what nothing reaches, apart from the checkpoints ``without``, their calls, and the writes of these lists. False:
        look anew."""
        yield from self._scan()
        todo: list[bytes] = []
        self._reach(names_in(self.at.staged), b"w", todo)
        yield from self._checkpoints(without, todo)
        yield from self._calls(without, todo)
        yield from self._writes(without_writes, todo)
        for field, there in values_of(self.client, self._key, sorted(self._rows)):
            if there is not None:  # and was not met, as its mark is lost
                if self._came_again(field):
                    return False
                raise self._damaged(field)
        while todo:
            below: list[bytes] = []
            unknown: list[bytes] = []
            for name in todo:
                if self.garbage.pop(name, None) is None:
                    unknown.append(name)
                elif refs := self._refs.get(name):
                    self._reach(names_in(refs), self._origin[name], below)
            for field, value in values_of(self.client, self._key, [b"o:" + name for name in unknown]):
                name = field[2:]
                if value is not None:  # it has come since
                    self._reach(names_in(layout.obj(name, value).refs), self._origin[name], below)
                    continue
                row, there = self.client.command("HMGET", self._key, self._origin[name], field)
                if row is None or there is not None:
                    return False
            todo = below
        return True

    def _reach(self, names: Iterable[bytes], origin: bytes, todo: list[bytes]) -> None:
        for name in names:
            if name not in self._origin:
                self._origin[name] = origin
                todo.append(name)

    def _scan(self) -> Iterator[None]:
        cursor = b"0"
        while True:
            here, after, found, bad, rows = self.client.script("sweep_scan", self.client.keys.of(self.task), [cursor, BYTES])
            if cursor != b"0" and here != self._server:
                # Restarted, or failed over, where another order holds: what was passed by may have been missed.
                cursor = b"0"
                self.garbage.clear()
                self._rows.clear()
                continue
            for field in bad:
                if self.client.command("HEXISTS", self._key, field):
                    raise self._damaged(field)
            for name, refs, size in zip(found[::3], found[1::3], found[2::3], strict=True):
                self.garbage[name] = size
                if refs:
                    self._refs[name] = refs
            self._rows.update(rows)
            self._server, cursor = here, after
            yield
            if cursor == b"0":
                return

    def _checkpoints(self, without: set[int], todo: list[bytes]) -> Iterator[None]:
        above = 0
        # The end comes in one step: whoever is there then was met, or has a parent that was.
        while (rest := self.client.script("sweep_rest", self.client.keys.of(self.task), [above, FEW])) is None:
            last = layout.numbers_of(self.client.command("HGET", self._key, "n")).seq
            last = min(last, above + 10 * PAGE)
            seqs = [no for no in numbered(self.client, self._key, "k", last, above // layout.BLOCK) if above < no <= last]
            for i in range(0, len(seqs), PAGE):
                part = seqs[i : i + PAGE]
                found = self.client.command(
                    "HMGET", self._key, *[b"%s:%d" % (kind, no) for no in part for kind in (b"h", b"r")]
                )
                for seq, top, below in zip(part, found[::2], found[1::2], strict=True):
                    if top is not None or below is not None:
                        self._root(seq, below or b"", without, todo)
            above = last
            yield
        for no, value in zip(rest[::2], rest[1::2], strict=True):
            self._root(int(no), value, without, todo)

    def _root(self, seq: int, value: bytes, without: set[int], todo: list[bytes]) -> None:
        self._rows.discard(b"h:%d" % seq)
        refs, _ = layout.parts(value)
        if len(value) < 4 or len(refs) != int.from_bytes(value[:4]) or len(refs) & 15:
            raise self._damaged(b"r:%d" % seq)
        if seq not in without:
            self._reach(names_in(refs), b"r:%d" % seq, todo)

    def _calls(self, without: set[int], todo: list[bytes]) -> Iterator[None]:
        last = layout.numbers_of(self.client.command("HGET", self._key, "n"))
        nos = numbered(self.client, self._key, "g", last.call)
        for i in range(0, len(nos), PAGE):
            for field, value in values_of(self.client, self._key, [b"c:%d" % no for no in nos[i : i + PAGE]]):
                self._rows.discard(field)
                if value is not None:
                    row = layout.call(int(field[2:]), value)
                    if row.base_seq not in without:
                        self._reach(names_in(row.args_refs + row.result_refs), field, todo)
            yield

    def _writes(self, without: set[bytes], todo: list[bytes]) -> Iterator[None]:
        lists = groups(self.client, self._key)
        for i in range(0, len(lists), PAGE):
            part = lists[i : i + PAGE]
            of = {
                field: group for group, rows in zip(part, rows_in(self.client, self._key, part), strict=True) for field in rows
            }
            for field, value in values_of(self.client, self._key, list(of)):
                self._rows.discard(field)
                if value is None:
                    continue
                row = layout.write(field, value)
                if len(row.refs) & 15 or not row.seal:
                    raise self._damaged(field)
                if of[field] not in without:
                    self._reach(names_in(row.refs), field, todo)
            yield

    def _came_again(self, field: bytes) -> bool:
        """Whether a write that was not met is in its list now: it went with its checkpoint, and was recorded once more since."""
        if field[:2] != b"w:":
            return False
        space, id = field[2:].split(b"\0")[:2]
        which = [0, 1 << 53, b"", b"", space + b"\0", len(layout.SHELVES), id]
        _, _, *listed = self.client.script("writes", self.client.keys.of(self.task), which)
        return field in listed[::2] or not self.client.command("HEXISTS", self._key, field)

    def _damaged(self, field: bytes) -> Damaged:
        """What some row reaches is not known: then nothing is known to be garbage."""
        return Damaged(
            f"task {self.task!r} is damaged",
            f"its field {field!r} cannot be read, and with it what is still needed",
            "No object was deleted. See `safepoint verify`.",
            task=self.task,
        )

    def delete(self) -> Generator[None, None, bool]:
        """Delete the garbage, less what was sent since. False if this is another task or server by now, or it was mended."""
        for batch in self._batches():
            args = [self.at.token, self.at.stamp, self._server, *batch]
            state, *did = self.client.write("sweep_objects", self.client.keys.of(self.task), args)
            if state != b"done":
                return False
            self.objects, self.size = self.objects + did[0], self.size + did[1]
            _probe.at("sweep.objects")
            yield
        return True

    def _batches(self) -> Iterator[list[bytes]]:
        batch: list[bytes] = []
        size = 0
        for name, bytes_ in self.garbage.items():
            batch.append(name)
            size += bytes_
            if len(batch) == OBJECTS or size > BYTES:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

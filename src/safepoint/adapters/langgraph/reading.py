"""Reading a thread: one checkpoint, many of them lazily, and what delta channels are made of."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, cast

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import Checkpoint, CheckpointTuple, DeltaChannelHistory

from safepoint.adapters.langgraph.form import Form, Loaded
from safepoint.adapters.langgraph.lazy import Versions
from safepoint.adapters.langgraph.pending import HIDDEN, answers, unpacked_writes
from safepoint.adapters.langgraph.records import Node
from safepoint.adapters.langgraph.versions import Origin, marked
from safepoint.codec import states
from safepoint.errors import Conflict, Damaged, InvalidState, SafepointError, UsageError
from safepoint.model import Obj, check_id
from safepoint.rows import CheckpointRow, Head, WriteRow, replace

if TYPE_CHECKING:
    from safepoint.adapters.langgraph.saver import SafepointSaver

log = logging.getLogger("safepoint")

MARK = -100
OWN = "safepoint"
"""The reserved key of a header's metadata: what the adapter keeps there."""
PAGE = 32


@dataclass(frozen=True, slots=True)
class Where:
    """What a config names. ``given`` is the thread's id as the caller wrote it, which may be a number."""

    thread: str
    ns: str
    id: str | None
    given: Any

    @classmethod
    def of(cls, config: RunnableConfig) -> Self:
        named = config.get("configurable", {})
        if named.get("thread_id") is None:
            raise UsageError(
                "the config names no thread",
                "config['configurable'] has no 'thread_id'",
                "Give one: graph.invoke(input, {'configurable': {'thread_id': '…'}}).",
            )
        given = named["thread_id"]
        return cls(
            check_id(str(given), "thread_id"), named.get("checkpoint_ns", "") or "", named.get("checkpoint_id") or None, given
        )

    def config(self, id: str, ns: str | None = None) -> RunnableConfig:
        return {
            "configurable": {
                "thread_id": self.given,
                "checkpoint_ns": self.ns if ns is None else ns,
                "checkpoint_id": id,
            }
        }


# -- headers


def with_own(form: Form, facts: dict[str, Any], own: dict[str, Any]) -> tuple[bytes, dict[str, Any]]:
    """A checkpoint's metadata as it goes into its header, and as it goes into its body. One that is too large for a header is whole
    in the body only; what is small of it is in the header too."""
    if OWN in facts:
        own = {**own, "theirs": facts[OWN]}
    whole = {**facts, OWN: own} if own else facts
    try:
        return form.pack_metadata(whole), whole
    except InvalidState:
        small = {
            k: v for k, v in facts.items() if k in {"source", "step", "parents", "run_id", "counters_since_delta_snapshot"}
        }
        return form.pack_metadata({**small, OWN: {**own, "partial": True}}), whole


@dataclass(slots=True)
class Header:
    """What is known of a checkpoint without its body."""

    row: CheckpointRow
    metadata: dict[str, Any]
    parent: str | None
    partial: bool
    skipped: tuple[int, ...] = ()
    """Numbers of damaged checkpoints that a run went on past with this one."""

    @classmethod
    def of(cls, form: Form, row: CheckpointRow) -> Self:
        metadata = form.unpack_metadata(row.metadata) if row.metadata else {}
        own = metadata.pop(OWN, None)
        own = own if isinstance(own, dict) else {}
        if "theirs" in own:
            metadata[OWN] = own["theirs"]
        noted = own.get("recovered", {}).get("skipped", ())
        return cls(row, metadata, own.get("parent"), bool(own.get("partial")), tuple(noted))

    def whole(self, loaded: Loaded) -> dict[str, Any]:
        if not self.partial:
            return self.metadata
        metadata = dict(loaded.metadata)
        own = metadata.pop(OWN, {})
        if "theirs" in own:
            metadata[OWN] = own["theirs"]
        return metadata


# -- one checkpoint


def unpacked(form: Form, thread: str, row: CheckpointRow, objects: Any, *, marked: bool = False) -> Loaded:
    """A row's body. ``objects`` may be a function that brings them when the first one is needed; ``marked`` where a run begins, so that
    its first put is as cheap as the next ones.

    Raises:
        Damaged, NewerFormat, RefusedType, InvalidState: names the checkpoint.
    """
    at = f"{thread}@{row.seq}"
    states.check_row(thread, row)
    return form.unpack(row.root, row.refs, objects, id=row.id, size=row.size, at=at, marked=marked)


def load(saver: SafepointSaver, where: Where) -> CheckpointTuple | None:
    store = saver.store
    if where.id is not None:
        found = store.read(where.thread, space=where.ns, id=where.id)
        if found is None:
            return None
        newest = max((b.head.seq for b in store.branches(where.thread, where.ns)), default=found[0].seq)
        return _seen(saver, where, *found, Origin("id", newest=found[0].seq >= newest))
    head = None
    try:
        if where.ns == "":
            found = store.read(where.thread)
        else:
            heads = [b.head.seq for b in store.branches(where.thread, where.ns)]
            head = max(heads, default=None)
            found = None if head is None else store.read(where.thread, space=where.ns, seq=head)
        if found is None:
            return None
        head = found[0].seq
        return _seen(saver, where, *found, Origin("latest"))
    except Damaged as damage:
        if damage.details.get("rolled_back"):
            raise  # what the thread did since is on no record: not to be gone on from unseen
        return _fallen_back(saver, where, head, damage)


def _seen(
    saver: SafepointSaver, where: Where, row: CheckpointRow, objects: Mapping[bytes, Obj], origin: Origin
) -> CheckpointTuple | None:
    """The checkpoint with its writes; None if it was deleted and is only kept for what others are made of."""
    rows, held = saver.store.writes(where.thread, space=where.ns, checkpoints=[row.id])
    if any(write.writer == HIDDEN for write in rows):
        return None
    return _tuple(saver, where, row, objects, rows, held, origin)


def _fallen_back(saver: SafepointSaver, where: Where, head: int | None, damage: Damaged) -> CheckpointTuple | None:
    """The newest checkpoint before a damaged one that can be loaded: named in the error, or taken.

    Only what is damaged is passed over. What the store cannot tell just now may well be sound.
    """
    try:
        good, skipped = _sound_before(saver, where, newest(saver, where) if head is None else head)
    except SafepointError as error:
        if saver.auto and not isinstance(error, Damaged):
            raise
        raise damage from error
    if good is None:
        raise damage
    row, found = good
    if not saver.auto:
        damage.remedy = (
            f"The newest sound one is {where.thread}@{row.seq}: go on from it with checkpoint_id={row.id!r}, "
            "or open SafepointSaver(…, recover='auto'). The damaged one is left as it is."
        )
        raise damage
    gone = ", ".join(map(str, skipped))
    log.warning("thread %s goes on from %s@%d (skipped %s: damaged)", where.thread, where.thread, row.seq, gone)
    return found


def newest(saver: SafepointSaver, where: Where) -> int:
    """The number of the newest checkpoint of a namespace: the one that a run sets out from. It may be one that cannot be read."""
    task = saver.store.task(where.thread) if where.ns == "" else None
    if task is not None and task.head is not None:
        return task.head.seq
    return max((b.head.seq for b in saver.store.branches(where.thread, where.ns)), default=0)


def overtaken(where: Where) -> Conflict:
    """What a put raises whose run set out from what is not the newest any more."""
    return Conflict(
        f"thread {where.thread!r} has moved on",
        f"another run has put a checkpoint after {where.id or 'the start'}",
        "Run the graph again: it sets out from what is there now. What this run put before stays.",
        task=where.thread,
        space=where.ns,
    )


def _sound_before(
    saver: SafepointSaver, where: Where, head: int
) -> tuple[tuple[CheckpointRow, CheckpointTuple] | None, list[int]]:
    """The newest one below a number that can be loaded, and the numbers that cannot."""
    skipped = [head]
    for header in _below(saver, where, head):
        try:
            found = saver.store.read(where.thread, space=where.ns, seq=header.seq)
            origin = Origin("fallback", recovered={"from": header.seq, "skipped": skipped})
            good = None if found is None else _seen(saver, where, *found, origin)
        except Damaged:
            skipped.append(header.seq)
            continue
        if good is not None:
            return (header, good), skipped
    return None, skipped


def _below(saver: SafepointSaver, where: Where, before: int) -> Iterator[CheckpointRow]:
    """The checkpoints of a namespace below a number, from the newest on."""
    at: int | None = before
    try:
        while page := saver.store.headers(where.thread, space=where.ns, before=at, limit=PAGE):
            yield from page
            at = page[-1].seq
    except Damaged:  # the store lists none where it has lost one; a walk tells of what is left
        rows = (part for part in saver.store.walk(where.thread) if isinstance(part, CheckpointRow))
        left = {row.seq: replace(row, root=b"", refs=b"") for row in rows if row.space == where.ns and row.seq < cast(int, at)}
        yield from (left[seq] for seq in sorted(left, reverse=True))


def _tuple(
    saver: SafepointSaver,
    where: Where,
    row: CheckpointRow,
    objects: Mapping[bytes, Obj],
    rows: Iterable[WriteRow],
    held: Mapping[bytes, Obj],
    origin: Origin,
) -> CheckpointTuple:
    header = Header.of(saver.form, row)
    rows = list(rows)
    origin.answers = answers(rows)
    key = (where.thread, where.ns, row.id)
    known = saver._records.node(key)
    at_hand = known is not None and getattr(known.packed, "digest", None) == row.digest
    loaded = unpacked(saver.form, where.thread, row, objects, marked=not at_hand)
    if at_hand:
        # What this process has put itself: its pages are known by their fingerprints, which what comes from a store has to earn first.
        for _ in loaded.checkpoint["channel_values"].values():
            pass  # all of it is read now: damage is told here, and not in the middle of a run
    else:
        saver._records.stored(key, Node(Head(row.seq, row.id), row.branch, loaded.base()))
    return CheckpointTuple(
        config=where.config(row.id),
        checkpoint=_marked(loaded.checkpoint, origin),
        metadata=cast(Any, header.whole(loaded)),
        parent_config=None if header.parent is None else where.config(header.parent),
        pending_writes=unpacked_writes(saver.form, where.thread, rows, held).get(row.id, []),
    )


def _marked(checkpoint: dict[str, Any], origin: Origin) -> Checkpoint:
    found = checkpoint["channel_versions"]
    versions = Versions(lambda: marked(found, origin)) if isinstance(found, Versions) else marked(found, origin)
    return cast(Checkpoint, {**checkpoint, "channel_versions": versions})


# -- many


@dataclass(slots=True)
class _Before:
    """A cursor: the checkpoint ``id``, maybe of another namespace than those that are listed.

    A subgraph that is replayed asks for what it had before a checkpoint of the graph around it. Numbers do not answer that, as the
    subgraph's are put first, and ids do not, as they hold a clock: so what counts is the root checkpoint that it ran under.
    """

    saver: SafepointSaver
    thread: str
    id: str
    own: dict[str, int | None] = field(default_factory=dict)
    """The cursor's number in each namespace, where it has one."""
    roots: dict[str, int] = field(default_factory=dict)
    """Numbers of the root graph's checkpoints, from the newest down to ``down``: as far as they were asked for."""
    down: int | None = None
    size: int = PAGE

    def seq(self, ns: str) -> int | None:
        if ns not in self.own:
            node = self.saver._records.node((self.thread, ns, self.id))
            if node is not None:
                self.own[ns] = node.head.seq
            else:
                found = self.saver.store.read(self.thread, space=ns, id=self.id)
                self.own[ns] = None if found is None else found[0].seq
        return self.own[ns]

    def root(self, id: str) -> int | None:
        while id not in self.roots and self.size:
            rows = self.saver.store.headers(self.thread, before=self.down, limit=self.size)
            self.roots |= {row.id: row.seq for row in rows}
            self.down, self.size = (rows[-1].seq, min(2 * self.size, 1024)) if rows else (self.down, 0)
        return self.roots.get(id)

    def takes(self, header: Header) -> bool:
        row = header.row
        if (own := self.seq(row.space)) is not None:
            return row.seq < own
        parents = header.metadata.get("parents")
        root = parents.get("") if isinstance(parents, dict) else None
        if root is not None and (cursor := self.seq("")) is not None and (ran_under := self.root(root)) is not None:
            return ran_under < cursor
        return (root or row.id) < self.id


def pages(
    saver: SafepointSaver,
    config: RunnableConfig | None,
    filter: dict[str, Any] | None,
    before: RunnableConfig | None,
    limit: int | None,
) -> Iterator[list[CheckpointTuple]]:
    """What ``list`` gives, a few at a time."""
    if limit is not None and limit <= 0:
        return
    left = limit
    cursor: str | None = before.get("configurable", {}).get("checkpoint_id") if before else None
    for where, ns in _wheres(saver, config):
        past = _Before(saver, where.thread, cursor) if cursor else None
        damaged: set[int] = set()
        for rows in _rows(saver, where, ns, past, left if not filter else None):
            found = []
            for row in rows:
                header = Header.of(saver.form, row)
                damaged.update(header.skipped)
                if row.seq in damaged and saver.auto:
                    continue  # what is damaged of it may lie in a value, which nobody has looked at yet
                if past is not None and not past.takes(header):
                    continue
                if filter and not _passes(header, filter, saver, where.thread):
                    continue
                found.append(header)
            page = list(_shown(saver, where, found))[:left]
            if page:
                yield page
            if left is not None:
                left -= len(page)
                if left <= 0:
                    return


def _rows(
    saver: SafepointSaver, where: Where, ns: str | None, past: _Before | None, wanted: int | None
) -> Iterator[list[CheckpointRow]]:
    """What may be in a list of this thread, a page at a time; of one id what has it."""
    store, thread = saver.store, where.thread
    if where.id is not None:
        spaces = sorted({b.space for b in store.branches(thread, None)}) if ns is None else [ns]
        named = [found[0] for space in spaces if (found := store.read(thread, space=space, id=where.id)) is not None]
        if named:
            yield sorted(named, key=lambda row: -row.seq)
        return
    at = None if past is None or ns is None else past.seq(ns)
    # Nothing is passed over, unless something has to be: then pages are large.
    size = PAGE if wanted is None or (past is not None and at is None) else min(wanted, PAGE)
    while rows := store.headers(thread, space=ns, before=at, limit=size, roots=True):
        yield rows
        if len(rows) < size:
            return
        at = rows[-1].seq


def _wheres(saver: SafepointSaver, config: RunnableConfig | None) -> Iterator[tuple[Where, str | None]]:
    """Each thread that is to be listed, and the namespace in it (None: all of them)."""
    if config is not None:
        named = config.get("configurable", {})
        yield Where.of(config), named.get("checkpoint_ns")
        return
    after: str | None = None
    while tasks := saver.store.tasks(after=after):
        for task in tasks:
            yield Where(task.task, "", None, task.task), None
        after = tasks[-1].task


def _passes(header: Header, filter: Mapping[str, Any], saver: SafepointSaver, thread: str) -> bool:
    metadata = header.metadata
    if header.partial:
        try:
            metadata = header.whole(unpacked(saver.form, thread, header.row, _fetched(saver, thread, header.row)))
        except Damaged as damage:
            if not saver.auto:
                raise
            _left_out(thread, header.row, damage)
            return False
    return all(key in metadata and _same(metadata[key], value) for key, value in filter.items())


def _same(there: Any, wanted: Any) -> bool:
    return bool(there == wanted) and isinstance(there, bool) == isinstance(wanted, bool)


def _fetched(saver: SafepointSaver, thread: str, row: CheckpointRow) -> Callable[[], Mapping[bytes, Obj]]:
    """What brings a checkpoint's objects when the first of them is needed."""

    def objects() -> Mapping[bytes, Obj]:
        found = saver.store.read(thread, space=row.space, seq=row.seq)
        if found is None:
            raise Damaged(f"{thread}@{row.seq} is gone", "it was deleted after it was listed", "List the thread again.")
        return found[1]

    return objects


def _left_out(thread: str, row: CheckpointRow, damage: Damaged) -> None:
    log.warning("%s@%d is left out of a list: %s", thread, row.seq, damage)


def _shown(saver: SafepointSaver, where: Where, headers: Sequence[Header]) -> Iterator[CheckpointTuple]:
    store, thread = saver.store, where.thread
    writes: dict[tuple[str, str], Any] = {}
    hidden: set[tuple[str, str]] = set()
    for ns in {h.row.space for h in headers}:
        ids = [h.row.id for h in headers if h.row.space == ns]
        rows, held = store.writes(thread, space=ns, checkpoints=ids)
        hidden |= {(ns, row.checkpoint) for row in rows if row.writer == HIDDEN}
        writes |= {(ns, id): found for id, found in unpacked_writes(saver.form, thread, rows, held).items()}
    for header in headers:
        row = header.row
        if (row.space, row.id) in hidden:
            continue
        try:
            loaded = unpacked(saver.form, thread, row, _fetched(saver, thread, row))
            metadata = header.whole(loaded)
        except Damaged as damage:
            if not saver.auto:
                raise
            _left_out(thread, row, damage)
            continue
        yield CheckpointTuple(
            config=where.config(row.id, row.space),
            checkpoint=_marked(loaded.checkpoint, Origin("listed", newest=False)),
            metadata=cast(Any, metadata),
            parent_config=None if header.parent is None else where.config(header.parent, row.space),
            pending_writes=writes.get((row.space, row.id), []),
        )


# -- delta channels


def delta_history(saver: SafepointSaver, where: Where, channels: Sequence[str]) -> dict[str, DeltaChannelHistory]:
    """For each channel: its writes on the way from the nearest stored value to the checkpoint, oldest first, and that value.

    Hidden checkpoints are looked into: that is what they are kept for.
    """
    if not channels:
        return {}
    store, thread = saver.store, where.thread
    collected: dict[str, list[tuple[str, str, Any]]] = {channel: [] for channel in channels}
    seeds: dict[str, Any] = {}
    wanted = set(channels)
    target = _target(saver, where)
    next_id = None if target is None else Header.of(saver.form, target).parent
    at = None if target is None else target.seq
    while next_id is not None and wanted:
        rows = store.headers(thread, space=where.ns, before=at, limit=PAGE, roots=True)
        if not rows:
            break
        at = rows[-1].seq
        chain = []
        for row in rows:
            if row.id == next_id:
                chain.append(row)
                next_id = Header.of(saver.form, row).parent
        found, held = store.writes(thread, space=where.ns, checkpoints=[row.id for row in chain])
        writes = unpacked_writes(saver.form, thread, found, held)
        for row in chain:
            for write in reversed(writes.get(row.id, [])):
                if write[1] in wanted:
                    collected[write[1]].append(write)

            values = unpacked(saver.form, thread, row, _fetched(saver, thread, row)).checkpoint["channel_values"]
            for channel in [c for c in wanted if c in values]:
                seeds[channel] = values[channel]
                wanted.discard(channel)
            if not wanted:
                break
    history: dict[str, DeltaChannelHistory] = {}
    for channel in channels:
        entry: DeltaChannelHistory = {"writes": collected[channel][::-1]}
        if channel in seeds:
            entry["seed"] = seeds[channel]
        history[channel] = entry
    return history


def _target(saver: SafepointSaver, where: Where) -> CheckpointRow | None:
    if where.id is None and where.ns != "":
        heads = [b.head for b in saver.store.branches(where.thread, where.ns)]
        found = saver.store.read(where.thread, space=where.ns, seq=max(heads).seq) if heads else None
    else:
        found = saver.store.read(where.thread, space=where.ns, id=where.id)
    return None if found is None else found[0]

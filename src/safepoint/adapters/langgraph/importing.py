"""Threads of LangGraph's own savers as tasks of a store: read by SQL (``sources``), decoded without a call (``jsonplus``), and written
whole, as ``safepoint copy`` writes a task."""

from __future__ import annotations

import copy
import heapq
import logging
import os
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, NamedTuple, cast

from langgraph.checkpoint.base import WRITES_IDX_MAP

from safepoint import imaging
from safepoint.adapters.langgraph.form import Base, Form
from safepoint.adapters.langgraph.jsonplus import Cipher, Reader
from safepoint.adapters.langgraph.pending import APART, NULL_TASK
from safepoint.adapters.langgraph.reading import with_own
from safepoint.adapters.langgraph.sources import SENDS, At, Found, Source, Write, open_source
from safepoint.checking import store_of
from safepoint.checkpointer import Checkpointer
from safepoint.codec import states, values
from safepoint.errors import (
    Conflict,
    Damaged,
    InvalidState,
    LeaseHeld,
    NewerFormat,
    NotFound,
    RefusedType,
    SafepointError,
    StoreFull,
    UsageError,
)
from safepoint.model import Obj, check_id, to_us
from safepoint.moving import OnProgress, Progress
from safepoint.rows import BranchRow, CheckpointRow, Head, Image, Numbers, TaskRow, WriteRow, replace
from safepoint.rules.recovery import next_name
from safepoint.stores.base import Store
from safepoint.stores.url import redact

__all__ = ["Cipher", "Hidden", "ThreadImport", "ThreadsReport", "import_threads"]

log = logging.getLogger("safepoint")

_HELD = 16
"""Of how many checkpoints the packed form is kept, for their children to be compared with."""
_KNOWN_PARTS = ("channel_versions", "versions_seen")


class Hidden(NamedTuple):
    """The end of a line of checkpoints that the old saver did not load, since one before it has a higher id: two hosts' clocks differed,
    and what one of them did was not to be seen. It is on a branch of its own."""

    space: str
    id: str
    seq: int
    branch: str
    newest: bool
    """Whether it is the newest of its namespace now: of a subgraph the number decides, and not the branch."""


@dataclass(frozen=True, slots=True)
class ThreadImport:
    """What became of one thread."""

    task_id: str
    result: Literal["imported", "updated", "unchanged", "refused"]
    """``updated``: an earlier import was there. ``unchanged``: it is there, and may have gone on since."""
    checkpoints: int = 0
    writes: int = 0
    branches: int = 0
    bytes: int = 0
    """As it is stored here."""
    hidden: tuple[Hidden, ...] = ()
    error: SafepointError | None = None
    """Why it was refused."""


@dataclass(frozen=True, slots=True)
class ThreadsReport:
    threads: tuple[ThreadImport, ...]
    notes: tuple[str, ...] = ()
    """What is to be known of classes of the application."""

    @property
    def changed(self) -> bool:
        """Whether the target is another one than before (after a dry run: whether it would be)."""
        return any(t.result in ("imported", "updated") for t in self.threads)

    @property
    def refused(self) -> tuple[ThreadImport, ...]:
        return tuple(t for t in self.threads if t.error is not None)

    def __repr__(self) -> str:
        kinds = ("imported", "updated", "unchanged", "refused")
        return f"<ThreadsReport {' '.join(f'{k}={sum(t.result == k for t in self.threads)}' for k in kinds)}>"


def import_threads(
    source_url: str,
    target: str | Store | Checkpointer | None,
    *,
    threads: Iterable[str] | None = None,
    types: Iterable[type] = (),
    trust: Iterable[str] = (),
    dry_run: bool = False,
    cipher: Cipher | None = None,
    progress: OnProgress | None = None,
) -> ThreadsReport:
    """Take in the threads of a database that SqliteSaver or PostgresSaver has written. It is read only.

    A thread becomes a task that holds all its namespaces, checkpoints, values, versions, metadata, parents and pending writes, and graphs
    go on from it. It is there whole or not at all, and read back and compared. Doing it again changes nothing, or brings an import
    that nobody has gone on from up to date. Stop the programs that use the old database first, or a run of theirs may be cut.

    Nothing that the old database says is called: objects of LangChain and LangGraph, and of the classes in ``types`` and ``trust``, are
    stored as what they hold, and a thread with any other is refused; the other threads are imported.

    Args:
        source_url: ``langgraph-sqlite:///old.db`` or ``langgraph-postgresql://user@host/db``.
        target: A URL (the store is made if it is not there), a store or a checkpointer. None in a dry run: nothing is compared.
        threads: Their ids; by default all.
        types, trust: As for ``SafepointSaver``. Modules in ``trust`` are imported.
        dry_run: Read, decode and compare everything, and write nothing.
        cipher: Has ``decrypt(name, bytes)``, as the cipher of LangGraph's ``EncryptedSerializer``.
        progress: Called before each thread and at the end.

    Returns:
        What became of each thread; ``report.refused`` are those that are not there, each with its ``error``: RefusedType, Damaged,
        Conflict (a task of that name is another one, or has gone on), LeaseHeld or StoreFull.

    Raises:
        NotFound: no such file or thread. Unavailable, UsageError: the source cannot be opened. MissingExtra: psycopg is not installed.
    """
    types, trust = tuple(types), tuple(trust)
    if target is None and not dry_run:
        raise UsageError("import_threads has no target", "", "Give the URL of a store; only dry_run=True works without one.")
    reader = Reader(types, trust, cipher)
    with open_source(source_url) as source:
        names = source.threads()
        if threads is not None:
            wanted = [str(thread) for thread in threads]
            if missing := sorted(set(wanted) - set(names)):
                raise NotFound(f"{redact(source_url)} has no thread {missing[0]!r}", "", "Correct its name.", thread=missing[0])
            names = list(dict.fromkeys(wanted))
        _apart(source, target)
        store, own = (None, False) if target is None else store_of("import_threads", target)
        try:
            schema = target.schema_version if isinstance(target, Checkpointer) else 1
            return _all(source, store, names, reader, schema, dry_run, progress)
        finally:
            if own and store is not None:
                store.close()


def _apart(source: Source, target: object) -> None:
    """One file through two copies of SQLite: each would drop the other's locks."""
    url = target if isinstance(target, str) else getattr(getattr(target, "store", target), "url", "")
    path, there = getattr(source, "path", None), str(url).removeprefix("sqlite:///").partition("?")[0]
    if path is not None and str(url).startswith("sqlite:///") and os.path.exists(there) and os.path.samefile(path, there):
        raise UsageError("the old database and the store are one file", "", "Name another file for the store.")


def _all(
    source: Source,
    store: Store | None,
    names: Sequence[str],
    reader: Reader,
    schema: int,
    dry_run: bool,
    progress: OnProgress | None,
) -> ThreadsReport:
    done: list[ThreadImport] = []
    size = 0
    for i, name in enumerate(names):
        if progress is not None:
            progress(Progress(i, len(names), size, name))
        try:
            check_id(name)
            with source.moment():
                made, image = _read(source, name, reader, schema, store is None or store.chunked)
            result = _placed(store, image, dry_run)
        except (RefusedType, Damaged, InvalidState, NewerFormat, Conflict, LeaseHeld, StoreFull, UsageError) as error:
            done.append(ThreadImport(name, "refused", error=_of_thread(error, name)))
            continue
        found = ThreadImport(
            name,
            result,
            len(image.checkpoints),
            len(image.writes),
            len(image.branches),
            imaging.size_of(image),
            tuple(made.hidden()),
        )
        size += found.bytes
        done.append(found)
        if not dry_run:
            log.info("imported thread %s: %s, %d checkpoints", name, result, found.checkpoints)
    if progress is not None:
        progress(Progress(len(names), len(names), size, names[-1] if names else ""))
    return ThreadsReport(tuple(done), tuple(sorted(reader.notes)))


def _read(source: Source, name: str, reader: Reader, schema: int, chunked: bool) -> tuple[_Thread, Image]:
    try:
        thread = _Thread(source, name, reader, schema, chunked=chunked)
        return thread, thread.image()
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        if isinstance(error, SafepointError):
            raise
        # Nothing that LangGraph has written: bytes that have gone bad, or that somebody has made.
        raise Damaged(
            f"thread {name!r} cannot be imported", f"to read it failed with {type(error).__name__}", "Leave the thread out."
        ) from error


def _of_thread(error: SafepointError, thread: str) -> SafepointError:
    error.details.setdefault("task", thread)
    return error


def _placed(store: Store | None, image: Image, dry_run: bool) -> Literal["imported", "updated", "unchanged"]:
    """Write it, if it is not there."""
    if store is None:
        return "imported"
    task = image.row.task
    # Without its row it is what a write that was killed has left: no task, and the next write clears it away.
    old = None if store.task(task) is None else imaging.take(store, task)
    if old is not None:
        if imaging.follows(old.image, image):
            return "unchanged"  # as it is, or gone on since
        if not imaging.follows(image, old.image):
            raise Conflict(
                f"task {task!r} is there already, and is another one",
                "it was not imported from this thread, or both have gone on since",
                "Delete it there, or import into another store; nothing was written.",
                task=task,
            )
    if not dry_run:
        imaging.put(store, image, replaces=None if old is None else old.image)
    return "imported" if old is None else "updated"


# -- order and branches


@dataclass(slots=True)
class _Space:
    """A namespace, as far as it has been put in order."""

    newest: str
    """The checkpoint that the old saver loads."""
    branches: dict[str, BranchRow] = field(default_factory=dict)


@dataclass(slots=True)
class _Placed:
    at: At
    seq: int
    branch: str
    top: str
    """The highest id of its line, itself included."""


def _in_order(places: Iterable[At], thread: str) -> Iterator[At]:
    """Parents before children, and else by id."""
    there = {(at.ns, at.id): at for at in places}
    children: dict[tuple[str, str], list[At]] = defaultdict(list)
    ready: list[tuple[str, str]] = []
    for at in there.values():
        if at.parent is not None and (at.ns, at.parent) in there:
            children[at.ns, at.parent].append(at)
        else:
            ready.append((at.id, at.ns))
    heapq.heapify(ready)
    count = 0
    while ready:
        id, ns = heapq.heappop(ready)
        count += 1
        yield there[ns, id]
        for child in children.get((ns, id), ()):
            heapq.heappush(ready, (child.id, ns))
    if count < len(there):
        raise Damaged(
            f"thread {thread!r} cannot be imported", "of its checkpoints some are their own ancestors", "Leave the thread out."
        )


class _Lines:
    """Numbers, and the branches that a saver of ours would have made."""

    def __init__(self, places: Sequence[At], thread: str) -> None:
        self._spaces: dict[str, _Space] = {}
        for at in places:
            space = self._spaces.setdefault(at.ns, _Space(at.id))
            space.newest = max(space.newest, at.id)
        self.placed: dict[tuple[str, str], _Placed] = {}
        for seq, at in enumerate(_in_order(places, thread), 1):
            self._place(at, seq)

    def _place(self, at: At, seq: int) -> None:
        space = self._spaces[at.ns]
        parent = None if at.parent is None else self.placed.get((at.ns, at.parent))
        line = None if parent is None else space.branches[parent.branch]
        # What stands on the one that the old saver loads was never loaded, and must not be now.
        if line is not None and parent is not None and line.head.seq == parent.seq and at.parent != space.newest:
            branch = line.name
        else:
            branch = "main" if not space.branches else next_name("main" if parent is None else parent.branch, space.branches)
            line = BranchRow(at.ns, branch, Head(seq, at.id), 1, None if parent is None else parent.seq)
        space.branches[branch] = replace(line, head=Head(seq, at.id))
        top = at.id if parent is None else max(parent.top, at.id)
        self.placed[at.ns, at.id] = _Placed(at, seq, branch, top)

    @property
    def branches(self) -> tuple[BranchRow, ...]:
        return tuple(b for ns in sorted(self._spaces) for b in self._spaces[ns].branches.values())

    def current(self) -> _Placed | None:
        """Where the thread stands."""
        space = self._spaces.get("")
        return None if space is None else self.placed["", space.newest]

    def hidden(self) -> Iterator[Hidden]:
        for b in self.branches:
            end = self.placed[b.space, b.head.id]
            if end.top > end.at.id:
                newest = max(x.head.seq for x in self._spaces[b.space].branches.values())
                yield Hidden(b.space, end.at.id, end.seq, b.name, b.space != "" and end.seq == newest)


# -- one thread


class _Base(NamedTuple):
    """What a child is compared with."""

    packed: Base
    apart: Mapping[str, Any]
    """Channels whose values lie apart, and their versions."""


class _Thread:
    """A thread on its way."""

    def __init__(self, source: Source, thread: str, reader: Reader, schema: int, *, chunked: bool) -> None:
        self.source, self.thread, self.reader, self.schema, self.chunked = source, thread, reader, schema, chunked
        self.form = _tree_form()
        self._objects: dict[bytes, Obj] = {}
        self._bases: OrderedDict[tuple[str, str], _Base] = OrderedDict()
        self._waiting: dict[tuple[str, str], int] = defaultdict(int)
        self._lines = _Lines(source.places(thread), thread)

    def hidden(self) -> list[Hidden]:
        return list(self._lines.hidden())

    def image(self) -> Image:
        placed = sorted(self._lines.placed.values(), key=lambda p: p.seq)
        for p in placed:
            if p.at.parent is not None:
                self._waiting[p.at.ns, p.at.parent] += 1
        rows: list[CheckpointRow] = []
        writes: list[WriteRow] = []
        for p in placed:
            at = p.at
            with _Naming(self.thread, at.ns, at.id):
                row, base = self._row(p)
                rows.append(row)
                writes += self._writes(at.ns, at.id, base)
        for ns, id in self.source.stray(self.thread):
            with _Naming(self.thread, ns, id):
                writes += self._writes(ns, id, None)
        current = self._lines.current()
        made = [row.created_at for row in rows] or [0]
        head = None if current is None else Head(current.seq, current.at.id)
        task = TaskRow(
            task=self.thread,
            branch="main" if current is None else current.branch,
            head=head,
            step=0 if head is None else rows[head.seq - 1].step,
            created_at=min(made),
            updated_at=max(made),
            checkpoints=len(rows),
        )
        return Image(
            row=task,
            numbers=Numbers(seq=len(rows), line=1 if rows else 0),
            branches=self._lines.branches,
            checkpoints=tuple(rows),
            writes=tuple(sorted(writes, key=lambda w: w.key)),
            objects=tuple(self._objects.values()),
        )

    # Checkpoints

    def _row(self, placed: _Placed) -> tuple[CheckpointRow, Base]:
        at = placed.at
        parent_key = (at.ns, at.parent or "")
        base = self._bases.get(parent_key) if at.parent is not None else None
        known = base.apart if base is not None and self.chunked else {}
        found = self.source.checkpoint(self.thread, at, known)
        checkpoint, apart, kept = self._decoded(found, known)
        if checkpoint.get("id", at.id) != at.id:
            raise _unlike("its row has another id than it has itself")
        facts = found.metadata
        header, whole = with_own(self.form, facts, {"parent": at.parent} if at.parent is not None else {})
        step = facts.get("step", -1)
        step = max(0, (step if type(step) is int else -1) + 1)
        new = None
        if kept:
            new = dict.fromkeys((checkpoint["channel_versions"].keys() | checkpoint["channel_values"].keys()) - kept)
        packed = self.form.pack(
            checkpoint,
            new,
            parent=None if base is None else base.packed,
            metadata=whole,
            step=step,
            flat=not self.chunked,
        )
        self._add(packed.new)
        self._remember((at.ns, at.id), parent_key, _Base(packed, apart))
        parent = self._lines.placed.get(parent_key) if at.parent is not None else None
        row = CheckpointRow(
            id=check_id(at.id, "checkpoint id"),
            space=at.ns,
            branch=placed.branch,
            parent_seq=None if parent is None else parent.seq,
            step=step,
            kind="import",
            created_at=_made(checkpoint),
            format=states.FORMAT,
            schema=self.schema,
            size=packed.size,
            digest=packed.digest,
            metadata=header,
            root=packed.data,
            refs=packed.refs,
            seq=placed.seq,
        ).sealed(self.thread)
        return row, packed

    def _decoded(self, found: Found, known: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], set[str]]:
        """The checkpoint, the channels whose values lie apart, and those whose values were not read as the parent has them."""
        kept: set[str] = set()
        apart: dict[str, Any] = {}
        if found.whole is not None:
            checkpoint = self.reader.checkpoint(*found.whole)
        else:
            inline = found.parts.get("channel_values") or {}
            checkpoint = {**found.parts, "channel_values": inline}
        _whole(checkpoint)
        if found.whole is None:
            versions, channels = checkpoint["channel_versions"], dict(checkpoint["channel_values"])
            for name, typed in found.blobs.items():
                channels[name] = self.reader.typed(*typed, f"channel {name!r}")
                apart[name] = versions[name]
            for name in known.keys() & versions.keys() - apart.keys():
                if known[name] == versions[name]:
                    kept.add(name)
                    channels[name] = None  # never looked at
                    apart[name] = versions[name]
            checkpoint["channel_values"] = channels
            if found.sends:
                kept.discard(SENDS)
                apart.pop(SENDS, None)
                channels[SENDS] = [self.reader.typed(*typed, f"channel {SENDS!r}") for typed in found.sends]
                versions = dict(versions)
                versions[SENDS] = max(versions.values()) if versions else f"{1:032}.{0:016}"
                checkpoint["channel_versions"] = versions
        return checkpoint, apart, kept

    def _add(self, objects: Iterable[Obj]) -> None:
        for obj in objects:
            self._objects.setdefault(obj.name, obj)

    def _remember(self, key: tuple[str, str], parent: tuple[str, str], base: _Base) -> None:
        """Until its last child has come."""
        if parent in self._waiting:
            self._waiting[parent] -= 1
            if not self._waiting[parent]:
                self._bases.pop(parent, None)
        if self._waiting.get(key):
            self._bases[key] = base
            while len(self._bases) > _HELD:
                self._bases.popitem(last=False)

    # Writes

    def _writes(self, ns: str, id: str, base: Base | None) -> Iterator[WriteRow]:
        """As ``put_writes`` of our saver has them: what a task wrote is one row, and what is special has one each."""
        by_task: dict[tuple[str, str], list[Write]] = defaultdict(list)
        for write in self.source.writes(self.thread, ns, id):
            by_task[write.task, write.path].append(write)
        for (task, path), writes in by_task.items():
            rows: dict[int, list[tuple[str, Any]]] = {}
            regular = [w for w in writes if w.channel not in WRITES_IDX_MAP]
            late = [w for w in regular if w.channel.startswith("__error")]
            in_turn = late and regular[-len(late) :] != late
            for w in writes:
                pair = (w.channel, self.reader.typed(*w.value, f"a write of task {task[:60]} to channel {w.channel!r}"))
                if w.channel in WRITES_IDX_MAP or task == NULL_TASK:
                    idx = w.idx
                elif w.channel.startswith("__error") and not in_turn:
                    idx = APART + w.idx
                else:
                    idx = 0
                rows.setdefault(idx, []).append(pair)
            for idx, pairs in rows.items():
                packed = self.form.pack_writes(pairs, base=base, flat=not self.chunked)
                self._add(packed.new)
                yield WriteRow(
                    space=ns, checkpoint=id, writer=task, idx=idx, path=path, data=packed.data, refs=packed.refs
                ).sealed(self.thread)


def _tree_form() -> Form:
    """A form for what ``jsonplus`` makes, in which objects of the application are plain already."""
    form = copy.copy(Form())
    form.registry = cast(Any, values._TREES)
    return form


def _whole(checkpoint: Mapping[str, Any]) -> None:
    parts = [checkpoint.get(key) for key in ("channel_values", *_KNOWN_PARTS)]
    seen = checkpoint.get("versions_seen")
    if (
        not all(type(key) is str for key in checkpoint)
        or not all(type(part) is dict for part in parts)
        or not all(type(v) is dict for v in cast(Any, seen).values())
    ):
        raise _unlike("it lacks its values or versions")


def _unlike(why: str) -> Damaged:
    return Damaged("the checkpoint cannot be read", why, "Leave the thread out.")


class _Naming:
    """Tells in errors which checkpoint of which thread they are about."""

    def __init__(self, thread: str, ns: str, id: str) -> None:
        self.thread, self.ns, self.id = thread, ns, id

    def __enter__(self) -> None:
        pass

    def __exit__(self, cls: object, error: BaseException | None, tb: object) -> None:
        if isinstance(error, RefusedType | Damaged):
            where = f"checkpoint {self.id}" + (f" of {self.ns[:80]!r}" if self.ns else "")
            error.why = f"{where}, {error.what.removesuffix(' cannot be imported')}: {error.why}"
            error.what = f"thread {self.thread!r} cannot be imported"
            error.details |= {"task": self.thread, "space": self.ns, "checkpoint": self.id}


def _made(checkpoint: Mapping[str, Any]) -> int:
    """When it was made, by its own clock; 0 if it does not say: importing it again must give the same row."""
    try:
        made = datetime.fromisoformat(checkpoint["ts"])
        return max(0, to_us(made)) if made.tzinfo is not None else 0
    except (KeyError, TypeError, ValueError, OverflowError):
        return 0

"""A LangGraph checkpointer over any store of safepoint.

A thread is a task, a checkpoint namespace a space of it, a line of parents a branch, and the newest checkpoint of a namespace is the
one with the highest number: ids hold a clock, and two hosts have two. What is put on a checkpoint that is no branch's head any more is
a fork if it was asked for, and a lost update (``Conflict``) if not; see ``versions``.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from datetime import datetime
from typing import Any, Literal, Self, cast

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    BaseCheckpointSaver,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    DeltaChannelHistory,
    get_checkpoint_metadata,
)

from safepoint import checkpointer
from safepoint.adapters.langgraph import reading, removing
from safepoint.adapters.langgraph.form import Form
from safepoint.adapters.langgraph.holding import Holding
from safepoint.adapters.langgraph.pending import answer_of, packed_writes
from safepoint.adapters.langgraph.places import is_of_run, puts_at_end
from safepoint.adapters.langgraph.reading import Where
from safepoint.adapters.langgraph.records import Key, Node, Records
from safepoint.adapters.langgraph.versions import (
    Origin,
    Verdict,
    decide,
    entered,
    failure,
    is_exit_delta,
    next_version,
    origin_of,
    run_at,
    running,
)
from safepoint.adapters.langgraph.waiting import Waiting, gone
from safepoint.aio import Offload
from safepoint.checkpointer import Checkpointer
from safepoint.codec import states
from safepoint.errors import Conflict, NotFound, SafepointError, UsageError
from safepoint.model import Retention, check_id, new_id, now, to_us
from safepoint.rows import CheckpointRow, Commit, Head, TaskPatch, WriteRow, replace
from safepoint.rules.recovery import next_name
from safepoint.stores.base import Store

__all__ = ["SafepointSaver"]

log = logging.getLogger("safepoint")

_REPLAYING = "__pregel_replay_state"
_KINDS = {"update": "edit", "fork": "edit"}


class SafepointSaver(Waiting, Holding, BaseCheckpointSaver[Any]):
    """Keeps the checkpoints of compiled graphs in a store of safepoint.

    Thread-safe, and usable from any number of graphs and event loops, and after a fork. Every method has its asynchronous twin, which
    works on threads of the saver's own and waits for what is under way before it lets a cancellation go on.

    Args:
        store: A URL (``sqlite:///agent.db``, ``postgresql://…``, ``redis://…``, ``file:///dir``, ``memory://``), a store, or a
            checkpointer of ``safepoint.open``.
        types: Classes that may be stored and loaded, besides LangGraph's and LangChain's own and those that ``compile`` finds in the
            schema of the graph.
        trust: Modules all of whose classes may be.
        retention: What each put keeps of a thread; everything by default. What is kept of the root graph decides: the namespaces of a
            subgraph's calls go with the root checkpoint that they ran under.
        conflicts: ``refuse``: of two runs that go on from one checkpoint, one raises ``Conflict``. ``fork``: both land, on a branch
            each, and the thread goes on with the one that put last; the other's work is still there, and nobody is told.
        recover: ``strict``: a newest checkpoint that is damaged raises ``Damaged``. ``auto``: the thread goes on from the newest sound
            one, on a branch of its own, with a line in the log, and in the metadata of what it puts first.
        options: More for ``safepoint.open``, where a URL is given.

    Raises:
        UsageError, Unavailable: as ``safepoint.open`` does.
    """

    def __init__(
        self,
        store: str | Store | Checkpointer,
        *,
        types: Iterable[type] = (),
        trust: Iterable[str] = (),
        retention: Retention | None = None,
        conflicts: Literal["refuse", "fork"] = "refuse",
        recover: Literal["strict", "auto"] = "strict",
        **options: Any,
    ) -> None:
        super().__init__()
        if conflicts not in {"refuse", "fork"}:
            raise UsageError(f"conflicts={conflicts!r} is not known", "", "Use 'refuse' or 'fork'.")
        if recover not in {"strict", "auto"}:
            raise UsageError(f"recover={recover!r} is not known", "", "Use 'strict' or 'auto'.")
        if isinstance(store, Checkpointer) and options:
            raise UsageError(
                f"SafepointSaver takes no {', '.join(sorted(options))} beside a checkpointer",
                "they are options of safepoint.open",
                "Give them there.",
            )
        types, trust = tuple(types), tuple(trust)
        self._own = not isinstance(store, Checkpointer)
        self.cp = (
            store
            if isinstance(store, Checkpointer)
            else checkpointer.open(store, types=types, trust=trust, retention=Retention.keep_all(), **options)
        )
        self.form = Form(types=types, trust=trust)
        self.retention = retention if retention is not None else Retention.keep_all()
        self.refuse = conflicts == "refuse"
        self.auto = recover == "auto"
        self._records = Records()
        self._off = Offload()

    @property
    def store(self) -> Store:
        return self.cp.store

    def __repr__(self) -> str:
        return f"<SafepointSaver {self.store.url}>"

    def close(self) -> None:
        """Close what the saver opened itself, and its threads."""
        self._off.close()
        if self._own:
            self.cp.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    # -- reading

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """The checkpoint that the config names, else the newest of its namespace; None if there is none.

        Raises:
            Damaged, RefusedType, NewerFormat: it is there and cannot be loaded; names thread and checkpoint.
        """
        where = Where.of(config)
        return self._entered(config, where, reading.load(self, where))

    def _entered(self, config: RunnableConfig, where: Where, found: CheckpointTuple | None) -> CheckpointTuple | None:
        self._records.saw(where.thread, where.ns)
        if is_of_run(config):  # and not get_state, which a node may well call on its way
            versions = () if found is None else found.checkpoint["channel_versions"].values()
            entered(origin_of(versions), where.thread, where.ns)
        return found

    def list(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> Iterator[CheckpointTuple]:
        """Checkpoints, newest first; values are read and decoded when they are first looked at."""
        if config is not None:
            where = Where.of(config)
            self._records.saw(where.thread, where.ns)
        for page in reading.pages(self, config, filter, before, limit):
            yield from page

    def get_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        return reading.delta_history(self, Where.of(config), channels)

    # -- writing

    def put(
        self, config: RunnableConfig, checkpoint: Checkpoint, metadata: CheckpointMetadata, new_versions: ChannelVersions
    ) -> RunnableConfig:
        """Store a checkpoint. It is durable when this returns.

        Raises:
            Conflict: another run has gone on from the same parent; nothing was written.
            NotFound: the parent is gone. LeaseHeld: somebody else holds the thread (``exclusive``).
            RefusedType: a value of a class that was neither declared nor trusted.
        """
        return self._stored(config, checkpoint, metadata, new_versions, _above(Where.of(config), config, metadata))

    def _stored(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
        after: Sequence[Key],
    ) -> RunnableConfig:
        """Put, after those ``after`` are stored: so that a subgraph leaves nothing behind in a run that has lost already."""
        origin = origin_of(checkpoint["channel_versions"].values())
        where = Where.of(config)
        try:
            # What is put by hand is of no run, wherever the code is that does it.
            in_run = is_of_run(config)
            failed = (failure() if in_run else None) or (None if origin is None else origin.failed)
            if failed is None and in_run and puts_at_end(config):
                # (LangGraph's stub for a first run has no versions to know its run by.)
                run = origin or run_at(where.thread, where.ns)
                failed = None if run is None else next(iter(run.beneath.values()), None)
            if failed is not None:
                raise failed
            self._records.refuse_doubtful(where.thread, born=None if origin is None else origin.born)
            for above in after:
                self.wait_stored(above)
            self._put(config, where, checkpoint, metadata, new_versions)
        except BaseException as error:
            self._failed(where, checkpoint, error)
            raise
        return {"configurable": {"thread_id": where.given, "checkpoint_ns": where.ns, "checkpoint_id": checkpoint["id"]}}

    def _failed(self, where: Where, checkpoint: Checkpoint, error: BaseException) -> None:
        """Let the run know of a put that did not land, and whoever waits for it."""
        key = (where.thread, where.ns, checkpoint["id"])
        origin = origin_of(checkpoint["channel_versions"].values())
        if origin is not None:
            origin.failed = error
        self._records.failed(key, error)
        # LangGraph shows a node's own error instead, if there is one too: then this line is all that is left of it.
        log.warning("put of %s/%s %s failed: %s: %s", *key, type(error).__name__, error)

    def _put(
        self,
        config: RunnableConfig,
        where: Where,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> None:
        thread, ns = where.thread, where.ns
        parent_id = where.id
        running = is_of_run(config)
        origin = origin_of(checkpoint["channel_versions"].values())
        parent = None if parent_id is None else self._node(thread, ns, parent_id)
        if parent_id is not None and parent is None and (running or origin is not None):
            raise gone(thread, parent_id)
        facts: dict[str, Any] = dict(get_checkpoint_metadata(config, metadata))
        row, packed = self._row(where, checkpoint, facts, new_versions, parent)
        run = run_at(thread, ns) if running else None
        held = [] if run is None or parent_id is None else run.held.get(parent_id, [])

        def commit(branch: str, expect: Head | None) -> Node:
            commit = Commit(
                task=thread,
                id=row.id,
                checkpoint=_on(row, branch),
                expect=expect,
                line=1,
                objects=tuple(
                    {obj.name: obj for part in (packed.new, *(objects for _, objects in held)) for obj in part}.values()
                ),
                writes=tuple(write for writes, _ in held for write in writes),
                stands_on=None if parent is None else parent.head,
                # The newest is the one to go on from, for people and tools too.
                patch=TaskPatch(branch=branch) if ns == "" else None,
            )
            done = self.commit(commit)
            assert done.seq is not None
            return Node(Head(done.seq, row.id), branch, packed, None if origin is None else origin.outmost())

        try:
            if parent is not None:
                node = commit(parent.branch, parent.head)
            else:
                node = commit("main", None)
        except Conflict as conflict:
            heads = {b.head: b.name for b in self.store.branches(thread, ns)}
            # What was deleted after a checkpoint makes it a head again, maybe of another branch than the one it was put on.
            at = None if parent is None else heads.get(parent.head)
            verdict = decide(
                origin=origin,
                running=running,
                at_head=at is not None,
                parentless=parent_id is None,
                source=facts.get("source", ""),
                replaying=bool(config.get("configurable", {}).get(_REPLAYING)),
            )
            if verdict is Verdict.CONFLICT and self.refuse:
                error = reading.overtaken(where)
                if origin is not None and not self._overtook_itself(where, max(heads, default=None), origin):
                    origin.lost(error)
                raise error from conflict
            if verdict is Verdict.CONTINUE and at is not None and parent is not None:
                node = commit(at, parent.head)
            else:
                asked = facts.get("source") == "fork" or not self.refuse
                node = self._fork(where, parent, commit, None if origin is None or asked else origin.recovered)
        if run is not None and parent_id is not None:
            run.held.pop(parent_id, None)
        if origin is not None:
            origin.recovered = None  # it is on record, and what follows goes on with the new branch
        self._records.stored((thread, ns, row.id), node)
        if ns == "":
            removing.retain(self, thread, node.head.seq)

    def _overtook_itself(self, where: Where, newest: Head | None, origin: Origin) -> bool:
        """Whether it is the same run that came first, in another call of the subgraph: then nobody else is to be let through."""
        node = None if newest is None else self._records.node((where.thread, where.ns, newest.id))
        return node is not None and node.by is not None and node.by is origin.outmost()

    def _fork(self, where: Where, parent: Node | None, commit: Any, recovered: Mapping[str, Any] | None) -> Node:
        """Begin a branch. Its name is told by those that are there, and somebody else may have taken it meanwhile.

        Args:
            recovered: Where a run goes on past damage: only while that is still the newest. Of two that do, one has lost.
        """
        thread, ns = where.thread, where.ns
        while True:
            taken = {b.name for b in self.store.branches(thread, ns)}
            # Asked after the names: who has forked since they were read has the name that is tried now.
            if recovered is not None and reading.newest(self, where) != recovered["skipped"][0]:
                raise reading.overtaken(where)
            name = next_name("main" if parent is None else parent.branch, taken)
            try:
                return cast(Node, commit(name, None))
            except Conflict:
                if name not in {b.name for b in self.store.branches(thread, ns)}:
                    raise

    def _row(
        self, where: Where, checkpoint: Checkpoint, facts: dict[str, Any], new_versions: ChannelVersions, parent: Node | None
    ) -> tuple[CheckpointRow, Any]:
        own: dict[str, Any] = {"parent": where.id} if where.id is not None else {}
        origin = origin_of(checkpoint["channel_versions"].values())
        if origin is not None and origin.recovered is not None:
            own["recovered"] = origin.recovered
        header, facts = reading.with_own(self.form, facts, own)
        step = max(0, int(facts.get("step", -1)) + 1)
        packed = self.form.pack(
            cast(Any, checkpoint),
            new_versions,
            parent=None if parent is None else parent.packed,
            metadata=facts,
            step=step,
            flat=not self.store.chunked,
        )
        row = CheckpointRow(
            id=check_id(checkpoint["id"], "checkpoint id"),
            space=where.ns,
            parent_seq=None if parent is None else parent.head.seq,
            step=step,
            kind=_KINDS.get(facts.get("source", ""), "step"),
            created_at=_made(checkpoint),
            format=states.FORMAT,
            schema=self.cp.schema_version,
            size=packed.size,
            digest=packed.digest,
            metadata=header,
            root=packed.data,
            refs=packed.refs,
        )
        return row, packed

    def _node(self, thread: str, ns: str, id: str) -> Node | None:
        """A stored checkpoint, from memory or from the store."""
        node = self._records.node((thread, ns, id))
        if node is not None:
            return node
        found = self.store.read(thread, space=ns, id=id)
        if found is None:
            return None
        row, objects = found
        packed = None
        try:
            packed = reading.unpacked(self.form, thread, row, objects)
        except SafepointError:
            log.warning("%s@%d cannot be read: what follows it is stored whole", thread, row.seq)
        node = Node(Head(row.seq, row.id), row.branch, packed)
        self._records.stored((thread, ns, id), node)
        return node

    def put_writes(self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = "") -> None:
        """Record what a node, or somebody outside, has written; maybe before the checkpoint that it belongs to.

        A node's regular writes are one unit, of which the first to come stands: two executions of one task never mix.
        """
        where = Where.of(config)
        if where.id is None:
            raise UsageError("put_writes needs a checkpoint_id in its config", "", "Give the one that the writes belong to.")
        thread = where.thread
        self._records.refuse_doubtful(thread, task=task_id)
        node = self._records.node((thread, where.ns, where.id))
        base = None if node is None else node.packed
        run = running() if is_of_run(config) else None
        rows, objects = packed_writes(
            self.form,
            writes,
            given=None if run is None else run.answers,
            base=base,
            flat=not self.store.chunked,
            space=where.ns,
            checkpoint=where.id,
            writer=task_id,
            path=task_path,
        )
        if not rows:
            return
        if puts_at_end(config) and is_exit_delta(task_id) and (ends := run_at(thread, where.ns)) is not None:
            ends.held.setdefault(where.id, []).append((tuple(rows), tuple(objects)))
            return
        on = None if base is None or node is None else node.head
        answer = answer_of(rows)
        with run.answering if answer is not None and run is not None else nullcontext():
            try:
                self.commit(Commit(task=thread, id=new_id(), writes=tuple(rows), objects=tuple(objects), stands_on=on))
            except NotFound:
                # What it was recorded against has been deleted since: with all that was recorded against it.
                if on is None or self.store.read(thread, space=where.ns, id=where.id) is not None:
                    raise
                return
            if answer is not None:
                self._compare(where, answer, run)

    def _compare(self, where: Where, answer: WriteRow, run: Origin | None) -> None:
        """Raise unless the answer is the one that stands: somebody else may have given one first."""
        there, _ = self.store.writes(where.thread, space=where.ns, checkpoints=[answer.checkpoint], writer=answer.writer)
        if any(row.idx == answer.idx and (row.data, row.refs) != (answer.data, answer.refs) for row in there):
            error = Conflict(
                f"thread {where.thread!r} has been given another answer",
                "another run has answered the same question first",
                "Look at the thread, and answer what it asks now. What this run answered was not used.",
                task=where.thread,
                space=where.ns,
            )
            if run is not None:
                run.failed = error
            raise error

    # -- removing and copying

    def delete_thread(self, thread_id: str) -> None:
        """Remove all of a thread. Nothing happens if there is none."""
        thread = check_id(str(thread_id), "thread_id")
        if self._records.standing(thread)[1] is not None:
            raise UsageError(
                f"thread {thread!r} cannot be deleted now",
                "this process holds it: in a block that is exclusive, or for a tool that runs",
                "Delete it after that.",
                task=thread,
            )
        self._records.forget(thread)
        self.store.delete_task(thread)

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Remove the checkpoints of these runs, and their writes. What a later checkpoint's delta channels are made of stays, unseen."""
        removing.delete_runs(self, set(map(str, run_ids)))

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Copy all of a thread under another name.

        Raises:
            NotFound: there is no such thread. Conflict: the target is there and is another one.
        """
        removing.copy(self, str(source_thread_id), str(target_thread_id))

    def prune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Keep the newest checkpoint of each namespace only (of a subgraph's call: if the root checkpoint stays that it ran under), or,
        with ``delete``, nothing."""
        removing.prune(self, [str(thread) for thread in thread_ids], strategy)

    # -- versions and types

    def get_next_version(self, current: Any, channel: None = None) -> Any:
        return next_version(current)

    def with_allowlist(self, extra_allowlist: Collection[Any]) -> SafepointSaver:
        """A copy that also stores these classes: what ``compile`` finds in the schema of a graph."""
        form = self.form.allowing(extra_allowlist)
        if form is self.form:
            return self
        clone = copy.copy(self)
        clone.form = form
        return clone

    # -- the asynchronous twins

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        where = Where.of(config)
        return self._entered(config, where, await self._off(lambda: reading.load(self, where)))

    async def alist(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[CheckpointTuple]:
        if config is not None:
            where = Where.of(config)
            self._records.saw(where.thread, where.ns)
        pages = reading.pages(self, config, filter, before, limit)
        while (page := await self._off(lambda: next(pages, None))) is not None:
            for found in page:
                yield found

    async def aput(
        self, config: RunnableConfig, checkpoint: Checkpoint, metadata: CheckpointMetadata, new_versions: ChannelVersions
    ) -> RunnableConfig:
        where = Where.of(config)
        try:
            for above in _above(where, config, metadata):
                await self.await_stored(above)
        except BaseException as error:
            self._failed(where, checkpoint, error)
            raise
        return await self._off(lambda: self._stored(config, checkpoint, metadata, new_versions, ()))

    async def aput_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        await self._off(lambda: self.put_writes(config, writes, task_id, task_path))

    async def adelete_thread(self, thread_id: str) -> None:
        await self._off(lambda: self.delete_thread(thread_id))

    async def adelete_for_runs(self, run_ids: Sequence[str]) -> None:
        await self._off(lambda: self.delete_for_runs(run_ids))

    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        await self._off(lambda: self.copy_thread(source_thread_id, target_thread_id))

    async def aprune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        await self._off(lambda: self.prune(thread_ids, strategy=strategy))

    async def aget_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        return await self._off(lambda: self.get_delta_channel_history(config=config, channels=channels))


def _above(where: Where, config: RunnableConfig, metadata: CheckpointMetadata) -> list[Key]:
    """The checkpoints of the graphs around a subgraph that it runs under, where these are put before it or soon."""
    if where.ns == "" or not is_of_run(config) or puts_at_end(config):
        return []
    parents = metadata.get("parents") or {}
    return [(where.thread, ns, id) for ns, id in parents.items() if ns != where.ns]


def _on(row: CheckpointRow, branch: str) -> CheckpointRow:
    return row if row.branch == branch else replace(row, branch=branch)


def _made(checkpoint: Checkpoint) -> int:
    """When a checkpoint was made, for people; by its own clock if it says so."""
    try:
        made = datetime.fromisoformat(checkpoint["ts"])
    except (KeyError, TypeError, ValueError):
        return to_us(now())
    return to_us(made) if made.tzinfo is not None else to_us(now())

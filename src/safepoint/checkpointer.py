"""The public object over a store: the explicit verbs. A thin shell; what is decided lies in rules, what is stored in codec."""

from __future__ import annotations

import logging
import random
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, cast

from safepoint import model, recovering
from safepoint.branching import BranchVerbs
from safepoint.checking import OPEN_OPTIONS, check_limit, check_number, checked_options, needs_state, none_beside, registry_of
from safepoint.codec import states
from safepoint.codec.chunks import Packed
from safepoint.codec.fitting import misfit
from safepoint.codec.migrating import Migrations
from safepoint.codec.registry import Registry
from safepoint.codec.states import Control
from safepoint.comparing import ComparingVerbs
from safepoint.errors import (
    Conflict,
    Damaged,
    InvalidState,
    NotFound,
    UsageError,
)
from safepoint.holding import HoldingVerbs
from safepoint.imaging import numbers_of
from safepoint.integrity import IntegrityVerbs
from safepoint.keeping import KeepingVerbs
from safepoint.listing import ListingVerbs
from safepoint.model import (
    KINDS,
    STATUSES,
    Checkpoint,
    Finding,
    Retention,
    State,
    TaskInfo,
    check_id,
    new_id,
    now,
    to_us,
)
from safepoint.moving import MovingVerbs
from safepoint.resources import ResourceVerbs, give_up
from safepoint.rows import CheckpointRow, Commit, Committed, Head, TaskPatch, TaskRow, replace
from safepoint.rules import planning
from safepoint.rules.health import checks
from safepoint.stores.base import Store
from safepoint.stores.url import clocked, open_store
from safepoint.tools import is_async
from safepoint.verbs import JournalVerbs

if TYPE_CHECKING:
    from safepoint.run import Run

log = logging.getLogger("safepoint")

_UNFINISHED = "unfinished"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Base:
    """What a state was loaded from or last saved as: names the parent, and holds what need not be stored again."""

    store: Store
    task: str
    head: Head
    packed: Packed | None
    control: Control

    def __repr__(self) -> str:
        return f"<Base {self.task}@{self.head.seq}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Base:
        return self  # immutable; a copied state may go on from the same checkpoint


def open(
    store: str | Store | Checkpointer = "memory://",
    *,
    retention: Retention | None = None,
    types: Iterable[type] = (),
    trust: Iterable[str] = (),
    schema_version: int = 1,
    migrations: Migrations | None = None,
    durability: Literal["full", "process"] | None = None,
    lease: float | None = None,
    redact: Iterable[str] = (),
    state_type: type | None = None,
    health: Any = (),
    timeout: float | None = None,
    **options: Any,
) -> Checkpointer:
    """Open a checkpointer.

    Args:
        store: A URL (``memory://``, ``memory://name``, ``sqlite:///relative.db``, ``sqlite:////absolute.db``), a store, or a
            checkpointer, which is returned as it is and takes no options any more. Relative paths are resolved now.
        retention: What each save keeps; the 100 newest by default.
        types: Classes that may be stored and loaded, besides those under ``@safepoint.register``.
        trust: Modules all of whose classes may be.
        schema_version: Of the application; stored with each checkpoint.
        migrations: ``{1: f}``: ``f(tree) -> tree`` leads a plain tree from schema 1 to 2.
        durability: ``full``, the default, survives power loss, ``process`` only the death of the process.
        lease: Seconds, 30 by default, on stores whose leases have a clock (not memory, files or SQLite).
        state_type: If given, ``agent_state`` must be an instance of it that fits its declared fields, at every save and load.
        health: Checks that a checkpoint must pass for a run to go on from it; see docs/recovery.md.
        timeout: Seconds that the store may take to answer; 10 by default.

    Raises:
        UsageError: unknown scheme or option. Unavailable: the store cannot be reached.
    """
    if isinstance(store, Checkpointer):
        none_beside(
            **options, retention=retention, types=types, trust=trust, schema_version=schema_version != 1, migrations=migrations,
            durability=durability, lease=lease, redact=redact, state_type=state_type, health=health, timeout=timeout,
        )  # fmt: skip
        return store
    if tuple(redact):
        raise UsageError(
            "redact= is not available yet", "this version stores values as they are", "Keep secrets out of the state."
        )
    # Before the store is opened: an option that is refused leaves no file behind.
    parts = checked_options(
        retention=retention,
        migrations=migrations,
        lease=lease,
        state_type=state_type,
        schema_version=schema_version,
        health=health,
    )
    registry = registry_of(types, trust)
    own = not isinstance(store, Store)
    if timeout is not None:
        options["timeout"] = timeout
    if own:
        # The default is no second opinion, where the URL has one.
        if durability is None and not (isinstance(store, str) and "durability=" in store.partition("?")[2]):
            durability = "full"
        options["durability"] = durability
        if clocked(store):
            options["lease"] = lease
    try:
        opened = open_store(store, **options)
    except UsageError as error:
        if error.what.startswith("unknown option"):
            error.why += f"; open itself takes {', '.join(OPEN_OPTIONS)}"
        raise
    return Checkpointer(opened, own=own, registry=registry, **parts)


class Checkpointer(
    ListingVerbs,
    JournalVerbs,
    KeepingVerbs,
    BranchVerbs,
    MovingVerbs,
    ComparingVerbs,
    IntegrityVerbs,
    ResourceVerbs,
    HoldingVerbs,
):
    """Saves, loads and lists checkpoints, and opens runs. Thread-safe; usable after a fork on both sides. Made by ``open``."""

    def __init__(
        self,
        store: Store,
        *,
        own: bool = True,
        retention: Retention | None = None,
        registry: Registry | None = None,
        schema_version: int = 1,
        migrations: Migrations | None = None,
        lease: float | None = None,
        state_type: type | None = None,
        health: Any = (),
    ) -> None:
        self.store = store
        self.health = checks(health)
        self.registry = registry or Registry()
        self.retention = retention if retention is not None else Retention(store.keep_latest)
        self.schema_version = schema_version
        self.migrations: Migrations = migrations or {}
        self.state_type = state_type
        self._own = own
        self._runs: weakref.WeakSet[Any] = weakref.WeakSet()

    def __repr__(self) -> str:
        return f"<Checkpointer {self.store.url}>"

    # -- save and load

    def save(self, state: State, *, label: str | None = None, kind: model.Kind = "manual", id: str | None = None) -> Checkpoint:
        """Store the state as a new checkpoint on top of the one that it was made from, and return its header.

        When it returns, the checkpoint is durable. ``state.seq`` and ``state.created_at`` are then the new one's. If it
        raises, the state is as before, and nothing of it is stored (for Unavailable: ask ``load(task, id=…)``).

        Args:
            state: Not changed but for ``seq`` and ``created_at``.
            label: Free text for people.
            kind: ``manual`` or ``milestone`` for callers of this verb; not ``failure``, which is never a head.
            id: The caller's own unique id; saving the same content under it again is no second checkpoint.

        Raises:
            Conflict: the branch has moved since the state was loaded.
            LeaseHeld: a live run holds the task.
            RefusedType, InvalidState: the state cannot be stored; see ``check_state``.
        """
        needs_state("save", state)
        if kind == "failure":
            raise UsageError("a checkpoint of kind failure is never a head", "only a run keeps one", "Use manual or milestone.")
        base = self._base_of(state)
        control = base.control if base else Control()
        row, packed = self._row(state, control, base, kind=kind, label=label, id=id)
        done = self._commit_state(state, row, packed, control, base)
        result = self._header(state.task_id, replace(row, seq=state.seq or 0))
        log.info("saved %s@%s step=%d kind=%s bytes=%d", state.task_id, state.seq, state.step, kind, done.bytes_written)
        self._retain(state.task_id, state.seq or 0)
        return result

    def _base_of(self, state: State) -> Base | None:
        model.check_state(state)
        base = state._base
        if state.seq is None:
            return None
        if isinstance(base, Base) and base.store is self.store and base.task == state.task_id and base.head.seq == state.seq:
            return base
        # A copy, a state that travelled through a pickle, or one whose seq was set by hand: ask the store what it builds on.
        found = self.store.read(state.task_id, seq=state.seq)
        if found is None:
            raise Conflict(
                f"{state.task_id}@{state.seq} does not exist",
                "the state names it as the checkpoint it was made from",
                "Load the newest state and apply your change to it.",
                task=state.task_id,
            )
        _, control, packed = self._unpack(state.task_id, *found)
        return Base(self.store, state.task_id, Head(found[0].seq, found[0].id), packed, control)

    def _row(
        self,
        state: State,
        control: Control,
        base: Base | None,
        *,
        kind: str,
        label: str | None = None,
        id: str | None = None,
        metrics: bytes = b"",
        recovery: Mapping[str, Any] | None = None,
    ) -> tuple[CheckpointRow, Packed]:
        model.check_state(state)
        if kind not in KINDS:
            raise UsageError(f"there is no kind {kind!r}", "", f"Use one of {', '.join(KINDS)}.")
        if label is not None:
            # A StrEnum is a natural label; what is stored is its text.
            label = check_id(str.__str__(label) if isinstance(label, str) else label, "label")
        self._fits(state, "", "Nothing was written.")
        metadata = states.encode_metadata(state.metadata, self.registry)
        packed = states.pack_state(
            state, control, self.registry, base.packed if base else None, recovery, flat=not self.store.chunked
        )
        row = CheckpointRow(
            id=new_id() if id is None else check_id(id, "id"),
            branch=state.branch,
            parent_seq=state.seq,
            step=state.step,
            kind=kind,
            label=label,
            created_at=to_us(now()),
            format=states.FORMAT,
            schema=self.schema_version,
            size=packed.size,
            digest=packed.digest,
            metadata=metadata,
            metrics=metrics,
            root=packed.data,
            refs=packed.refs,
        )
        return row, packed

    def _commit_state(
        self,
        state: State,
        row: CheckpointRow,
        packed: Packed,
        control: Control,
        base: Base | None,
        line: int | None = 1,
        **parts: Any,
    ) -> Committed:
        commit = Commit(
            task=state.task_id,
            id=row.id,
            checkpoint=row,
            expect=base.head if base else None,
            line=line,
            objects=packed.new,
            **parts,
        )
        done = self.store.commit(commit)
        assert done.seq is not None
        if commit.moves_head:
            state.seq = done.seq
            state.created_at = model.from_us(row.created_at)
            state.version = self.schema_version
            state._base = Base(self.store, state.task_id, Head(done.seq, row.id), packed, control)
        return done

    def _unpack(
        self, task: str, row: CheckpointRow, objects: Mapping[bytes, model.Obj]
    ) -> tuple[State, Control, Packed | None]:
        given = self.registry, self.schema_version, self.migrations
        try:
            return states.unpack_state(task, row, objects, given[0], schema=given[1], migrations=given[2])
        except Damaged:
            if (found := self.store.rescue(task, row.seq, space=row.space)) is None:
                raise
            return states.unpack_state(task, *found, given[0], schema=given[1], migrations=given[2])

    def _fits(self, state: State, at: str, remedy: str) -> None:
        if self.state_type is None or (found := misfit(state.agent_state, self.state_type, "agent_state")) is None:
            return
        raise InvalidState(
            f"{at}{found[0]} does not fit state_type={self.state_type.__name__}",
            found[1],
            remedy,
            field=found[0],
            task=state.task_id,
        )

    def _load(self, task: str, **selector: Any) -> State | None:
        found = self.store.read(check_id(task), **selector)
        if found is None:
            return None
        row, objects = found
        state, control, packed = self._unpack(task, row, objects)
        self._fits(state, f"{task}@{row.seq}: ", "Raise schema_version and give a migration, or go back to an earlier one.")
        state._base = Base(self.store, task, Head(row.seq, row.id), packed, control)
        if control.lost:
            log.warning("of %s@%d the products of %s cannot be read", task, row.seq, ", ".join(control.lost))
        return state

    def load_latest(self, task_id: str) -> State | None:
        """The state at the head of the task's current branch, or None if there is no such task (and for no other reason).

        Raises:
            Damaged, NewerFormat, NewerSchema, RefusedType: it is there and cannot be used; the newest good one is named.
        """
        try:
            for look in range(100):  # some five seconds; a store of somebody's own may tell a row anew each time
                if (state := self._load(task_id)) is not None or (row := self._with_checkpoints(task_id)) is None:
                    return state
                # As long as something happens to the task, a first save or a delete_task, what was read says nothing.
                if self._load(task_id) is None and self.store.task(task_id) == row:
                    break
                time.sleep(0.001 * look)
            raise Damaged(
                f"task {task_id!r} is there, and the head of its current branch is not",
                "rows of the store have been removed or changed, or were damaged and set aside",
                "Load an earlier checkpoint by seq, or restore the store from a backup.",
                task=task_id,
            )
        except Damaged as error:
            good = None if error.details.get("rolled_back") else recovering.newest_good(self, task_id)
            if good is not None and not error.details.get("good"):
                error.details["good"] = good
                more = f" {error.remedy}" if "path" in error.details else ""  # a file that somebody may have edited
                error.remedy = f"The newest good checkpoint is {task_id}@{good}: load(…, seq={good}).{more}"
            raise

    def _with_checkpoints(self, task_id: str) -> TaskRow | None:
        """The task, if it has checkpoints. Or had some: a task that lost them all is not new, and would do again what it did."""
        row = self.store.task(task_id)
        if row is None or row.checkpoints > 0:
            return row
        with suppress(NotImplementedError):
            return row if numbers_of(self.store, task_id).seq > 0 else None
        return None

    def load(self, task_id: str, *, seq: int | None = None, branch: str | None = None, id: str | None = None) -> State:
        """The state of one checkpoint, named by exactly one of ``seq``, ``branch`` (its head) or ``id``.

        Raises:
            NotFound: there is no such checkpoint.
            Damaged, NewerFormat, NewerSchema, RefusedType: as for ``load_latest``.
        """
        given = {k: v for k, v in (("seq", seq), ("branch", branch), ("id", id)) if v is not None}
        if len(given) != 1:
            raise UsageError(
                "load takes exactly one of seq, branch and id",
                f"{', '.join(given) or 'none'} was given" if len(given) < 2 else f"{' and '.join(given)} were given",
                f"Name one, as in load({task_id!r}, seq=3), or take the newest with load_latest({task_id!r}).",
            )
        if seq is not None:
            check_number("load", "seq", seq)
        if branch is not None or id is not None:
            check_id(branch if id is None else id, "load(branch=)" if id is None else "load(id=)")
        state = self._load(task_id, **given)
        if state is None:
            name, value = next(iter(given.items()))
            raise NotFound(
                f"task {task_id!r} has no checkpoint with {name} {value!r}",
                "",
                "See list_checkpoints, or `safepoint log`.",
                task=task_id,
            )
        return state

    def update(self, task_id: str, fn: Callable[[State], Any], *, retries: int = 5, label: str | None = None) -> Checkpoint:
        """Load the newest state, let ``fn`` change it (in place, or by returning one), save; again if the branch moved.

        Raises:
            NotFound: no such task. Conflict: the branch moved every time.
        """
        if not callable(fn):
            raise UsageError(
                f"update was given {model.a_type(fn)} as fn", "it is to be called with the state", "Pass a function."
            )
        if is_async(fn):
            raise UsageError("fn is async", "update calls it in place, perhaps several times", "Make it a plain function.")
        if type(retries) is not int or retries < 0:
            raise UsageError("update(retries=) must be an int of at least 0", f"it is {model.a_type(retries)}", "Leave it out.")
        for attempt in range(retries + 1):
            began = time.monotonic()
            state = self.load_latest(task_id)
            if state is None:
                raise self._no_task(task_id)
            changed = fn(state)
            if changed is not None:
                if not isinstance(changed, State):
                    raise UsageError(
                        f"the fn of update returned {model.a_type(changed)}",
                        "it changes the state in place, or returns another one",
                        "Return None or a State; nothing was saved.",
                    )
                state = changed
            try:
                return self.save(state, label=label)
            except Conflict:
                if attempt == retries:
                    raise
                # By chance, so that those that met here do not meet again; longer each time, as there may be many; and by how long
                # an update takes, on this disk and with this function.
                time.sleep(random.uniform(0, min(1.0, max(0.002, time.monotonic() - began) * 2 ** (attempt + 2))))
        raise AssertionError("unreachable")

    def check_state(self, state: State) -> None:
        """Raise what ``save`` would raise for the state's content, without writing: to find a bad value early.

        Raises:
            RefusedType: names path and type of the first value that cannot be stored. InvalidState.
        """
        needs_state("check_state", state)
        self._row(state, Control(), None, kind="manual")

    # -- listing

    def tasks(self, *, status: str | None = None, limit: int | None = None) -> list[TaskInfo]:
        """All tasks by id, or those of one status; ``"unfinished"`` are those that a restarted process should take up."""
        if status is not None and status not in (*STATUSES, _UNFINISHED):
            raise UsageError(f"there is no status {status!r}", "", f"Use one of {', '.join((*STATUSES, _UNFINISHED))}.")
        check_limit("tasks", limit)
        found: list[TaskInfo] = []
        if limit == 0:
            return found
        after: str | None = None
        while True:
            rows = self.store.tasks(after=after, limit=200)
            for row in rows:
                info = self._info(row)
                if status is None or info.status == status or (status == _UNFINISHED and info.unfinished):
                    found.append(info)
                    if len(found) == limit:
                        return found
            if len(rows) < 200:
                return found
            after = rows[-1].task

    def status(self, task_id: str) -> TaskInfo:
        """How the task stands. NotFound if there is none of this id."""
        row = self.store.task(check_id(task_id))
        if row is None:
            raise self._no_task(task_id)
        return self._info(row)

    def _info(self, row: TaskRow) -> TaskInfo:
        lease = self.store.lease(row.task) if row.status == "running" else None
        return TaskInfo(
            task_id=row.task,
            status=planning.shown_status(row, live=lease is not None and lease.live),
            branch=row.branch,
            seq=row.head.seq if row.head else None,
            step=row.step,
            created_at=model.from_us(row.created_at),
            updated_at=model.from_us(row.updated_at),
            agent=row.agent,
            attempts=row.attempts,
            reason=row.reason,
            pending=row.in_doubt + row.open_pauses,
            checkpoints=row.checkpoints,
            holder=planning.holder(lease) if lease and lease.live else None,
        )

    def _header(self, task_id: str, row: CheckpointRow) -> Checkpoint:
        return states.header(task_id, row, self.registry)

    # -- runs

    def resume(self, task_id: str | None = None, **options: Any) -> Run:
        """Take the task's lease and carry on from its newest checkpoint; an absent task begins. See ``safepoint.run.Run``.

        Args:
            options: As ``run_agent`` has them: ``recover, health, requires, fresh_start, at, branch, mend, wait, steal``; but
                ``mend`` is True where it is not given.
        """
        from safepoint.run import Run

        return Run(self, task_id, **options)

    def finish(self, task_id: str, result: Any = None) -> Checkpoint:
        """End a task that is kept by explicit saves: its status becomes ``finished``.

        Raises:
            NotFound: no such task. LeaseHeld: a live run holds it.
        """
        state = self.load_latest(task_id)
        if state is None:
            raise self._no_task(task_id)
        base = state._base
        control = base.control.copy()
        control.finished = True
        if not control.turns or control.turns[-1][2] != "open":
            control.turns.append(["", None, "open", None, state.step])
        control.turns[-1][2:4] = ["finished", result]
        give_up(state.agent_state, state.step)
        row, packed = self._row(state, control, base, kind="manual", label="finished")
        done = self._commit_state(state, row, packed, control, base, patch=TaskPatch(status="finished", reason=""))
        log.info("saved %s@%s step=%d kind=manual bytes=%d finished", task_id, state.seq, state.step, done.bytes_written)
        self._retain(task_id, state.seq or 0)
        self._close_after(task_id)
        return self._header(task_id, replace(row, seq=state.seq or 0))

    # -- the store

    def check(self) -> list[Finding]:
        """Fitness of the store: a real write and read, and warnings by name about where it lives."""
        return self.store.check()

    def connection(self) -> AbstractContextManager[Any]:
        """Lend the store's own connection, outside of any transaction (SQL stores only): to create effect tables, to query them.

        Nothing else in this process may open the database file; see docs/stores.md.
        """
        return self.store.connection()

    @property
    def durability(self) -> str:
        """What an acknowledged save survives here: ``full`` (power loss) or ``process`` (the death of the process)."""
        return self.store.durability if self.store.persistent else "none"

    def close(self) -> None:
        """End the runs that are still open (their tasks become ``interrupted``) and close the store. Repeating it is fine."""
        for run in list(self._runs):
            run._abandoned("the checkpointer was closed")
        self._retain_the_rest()
        if self._own:
            self.store.close()
        elif not isinstance(self.store, _Closed):
            self.store = cast(Store, _Closed(self.store.url))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @staticmethod
    def _no_task(task_id: str) -> NotFound:
        return NotFound(f"there is no task {task_id!r}", "", "See tasks(), or `safepoint ls`.", task=task_id)


class _Closed:
    """Stands where a store was that belongs to somebody else and stays open."""

    persistent = False

    def __init__(self, url: str) -> None:
        self.url = url

    def __getattr__(self, name: str) -> NoReturn:
        raise UsageError(f"the checkpointer over {self.url} is closed", "", "Open a new one.")

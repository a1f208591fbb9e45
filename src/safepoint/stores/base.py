"""The contract of a store.

A store is synchronous, thread-safe, and takes and gives bytes. Its one writing verb, ``commit``, is atomic, durable when it
returns, compares before it writes, and may be repeated. What a store must keep is tested by ``safepoint.testing``; how the
built-in ones do it, and why, is in docs/stores.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Literal

from safepoint.errors import Damaged, NewerFormat, Unavailable, UsageError
from safepoint.model import Finding, Obj
from safepoint.rows import (
    Aside,
    BranchRow,
    CallRow,
    CheckpointRow,
    Commit,
    Committed,
    Grant,
    Guard,
    Image,
    LeaseRow,
    Lost,
    Part,
    PauseRow,
    Pruned,
    TaskPatch,
    TaskRow,
    WriteRow,
)
from safepoint.stores.sound import unreadable

Durability = Literal["full", "process"]


class Store(ABC):
    """A storage backend.

    Errors every method may raise: Unavailable (no answer within ``timeout``), StoreFull, Damaged (a row that cannot be what
    was written), UsageError after ``close`` or in a forked child that inherited the middle of a transaction.
    """

    persistent: ClassVar[bool] = False
    """What is stored outlives the process."""
    chunked: ClassVar[bool] = True
    """Objects are kept once per task, so that cost follows change. Else every row holds all of its content in its root, and
    has no refs: see ``codec.chunks.pack(flat=True)``."""
    keep_latest: ClassVar[int] = 100
    """What retention keeps here if nobody says otherwise."""
    transactional_tools: ClassVar[bool] = False
    """A tool's effect and its record can be one transaction (``transact``)."""
    sets_unread_aside: ClassVar[bool] = False
    """``set_aside`` keeps also rows that cannot be read, as what they stand in is kept whole."""
    ttl: ClassVar[bool] = False
    multi_host: ClassVar[bool] = False

    url: str
    """Without any password."""
    timeout: float
    durability: Durability

    # -- writing

    @abstractmethod
    def commit(self, commit: Commit) -> Committed:
        """Write all of ``commit`` or nothing.

        Under one lock of the task, in this order: if a checkpoint with ``commit.id`` exists in that space, compare (same
        branch, parent, digest: answer it with ``existed=True``; else UsageError); check the guard, or that no live run
        holds the task; answer a commit without a checkpoint that was the task's last to land, with its rows; compare the branch's head with ``expect``, and with ``at_head`` that of the current branch with
        ``stands_on``; see that ``stands_on`` exists; compare the version of every call and pause row; compare each of ``branches`` with its ``expect``, and see that what it is set to exists in its space; then give numbers (``seq``, ``no``, journal positions), seal the rows, and write. An object that exists with other bytes
        is overwritten. A guardless commit with a checkpoint or with ``writes`` creates the task; other commits need it to exist. Of ``writes``, a row from index 0 on is left out if one of its key is there, and one below 0 replaces it. The first
        branch of space '' becomes the task's current one; later only ``patch.branch`` changes that. A new branch forks from
        its checkpoint's ``parent_seq``. ``Committed.head`` is where the checkpoint's branch stands now.

        Raises:
            Conflict: the branch (or with ``at_head`` the current one, or one of ``branches``) moved, or a call/pause row has another version (``details["row"]`` names it).
            LeaseLost: the guard is no longer the lease's.
            LeaseHeld: no guard, and a live run holds the task.
            NotFound: no such task, call or pause; or ``stands_on``, or what a branch is set to, is gone.
            UsageError: the current branch would be dropped while space '' has others.
            Unavailable: the outcome is not known; ``details["id"]`` is ``commit.id``.
        """

    def transact(self, task: str, guard: Guard, call: CallRow, body: Callable[[Any], Commit]) -> Committed:
        """Run ``body(connection)`` and write the commit it returns, in one transaction that only the store ends.

        ``call`` must still stand at its version. If ``body`` raises, all is rolled back and that very exception comes out,
        whatever it is: a driver's error and a SafepointError of the tool are not translated, as those of the store's own
        statements are. So whoever asks whether an error is the tool's compares with what ``body`` raised, first of all.

        Raises:
            What ``body`` raises, and Conflict, LeaseLost, NotFound as for ``commit``: nothing has happened.
            UsageError: the commit is not one of this task and guard, or its id is taken; nothing has happened.
            Unavailable: what has happened is in ``details``. ``unknown=True``: the transaction in which ``body`` began was
                not there any more at its end; part of the effect may stand without the record. ``landed=False``: COMMIT
                failed, and looking again under the lock found nothing of it. An ``id`` and neither of them: COMMIT failed,
                and nobody can look yet; effect and record are both there or both not, as the call's row will say. No
                ``id``: nothing has happened.
        """
        raise UsageError(
            f"{type(self).__name__} has no transactional tools",
            "effect and record cannot be one transaction there",
            "Use SQLite or PostgreSQL, or declare the tool as idempotent or write.",
        )

    # -- reading: each of these is one consistent snapshot, and leaves no transaction open

    @abstractmethod
    def task(self, task: str) -> TaskRow | None: ...

    @abstractmethod
    def tasks(self, *, after: str | None = None, limit: int = 200) -> list[TaskRow]:
        """Tasks by id (code point order), from the first one greater than ``after``."""

    @abstractmethod
    def branches(self, task: str, space: str | None = "") -> list[BranchRow]:
        """By space and name; with None, those of all spaces."""

    @abstractmethod
    def read(
        self, task: str, *, space: str = "", seq: int | None = None, branch: str | None = None, id: str | None = None
    ) -> tuple[CheckpointRow, Mapping[bytes, Obj]] | None:
        """A checkpoint with its root and all objects that it reaches, or None. With no selector: the head of the current
        branch. Seals are checked by the caller."""

    @abstractmethod
    def headers(
        self,
        task: str,
        *,
        space: str | None = "",
        branch: str | None = None,
        before: int | None = None,
        limit: int | None = None,
        roots: bool = False,
    ) -> list[CheckpointRow]:
        """Checkpoints by falling ``seq``, without root and refs unless ``roots``; with no space, those of all spaces."""

    @abstractmethod
    def calls(
        self,
        task: str,
        *,
        line: int | None = None,
        from_step: int | None = None,
        nos: Iterable[int] | None = None,
        bodies: bool = True,
        limit: int | None = None,
    ) -> tuple[list[CallRow], Mapping[bytes, Obj]]:
        """Calls by number, and with ``bodies`` the objects that their arguments and results reach. ``limit`` keeps the newest."""

    @abstractmethod
    def pauses(self, task: str) -> list[PauseRow]: ...

    @abstractmethod
    def writes(
        self,
        task: str,
        *,
        space: str | None = "",
        checkpoints: Iterable[str] | None = None,
        writer: str | None = None,
        bodies: bool = True,
    ) -> tuple[list[WriteRow], Mapping[bytes, Obj]]:
        """What adapters recorded against these checkpoints (ids; None: against all of the space), by space, checkpoint, path, writer and
        index, and with ``bodies`` the objects that it reaches. With no space, that of all spaces; with ``writer``, only that one's."""

    # -- leases

    @abstractmethod
    def acquire(self, task: str, holder: bytes, *, steal: bool = False) -> Grant:
        """Take the lease: a new fence, one greater than the task's last, and status ``running``, attempts + 1; creates the task.

        A task without a lease before begins above every fence that a deleted task of its name had, since receivers that refuse
        stale fences know no more than the task's name. Where the store cannot tell whether the last holder lives, it is presumed
        dead: ``previous`` says so and ``presumed`` is its fence.

        Raises:
            LeaseHeld: a live run holds it (and ``steal`` is not set); ``details`` has the holder and ``stopped``.
        """

    @abstractmethod
    def release(self, task: str, grant: Grant, patch: TaskPatch | None = None) -> None:
        """Give the lease back, setting ``patch`` in the same step. No error if it is no longer ours."""

    @abstractmethod
    def abandon(self, task: str, grant: Grant) -> None:
        """Let go without a word to the store's data, as a death would: for runs that are collected. Never raises."""

    @abstractmethod
    def lease(self, task: str) -> LeaseRow | None: ...

    @abstractmethod
    def holds(self, task: str, guard: Guard) -> bool:
        """Whether the lease is still this guard's. Cheap: asked right before an effect."""

    # -- removing

    @abstractmethod
    def prune(self, task: str, seqs: Iterable[int], *, space: str = "", dry_run: bool = False, sweep: bool = True) -> Pruned:
        """Delete these checkpoints with the calls that their steps began, and every object that nothing reaches any more.

        All of it need not be one step, as others wait for that; a checkpoint goes with its calls, pauses and writes, and before its
        objects. What a kill in the middle leaves over goes with the next prune. With ``sweep=False`` no object is deleted: while
        part of the task is damaged, nobody knows what it reached.

        Under the task's lock it looks again, and keeps: heads, fork points, pinned ones, and what
        ``rules.retention.stood_on`` names: the checkpoints with calls and pauses that are open, that a resume of the current
        branch would read (or of another one whose line is not the current one's), or that a live run's step stands on. All other calls and pauses go with their checkpoint.
        """

    def pruning(self, task: str, seqs: Iterable[int], *, space: str = "", sweep: bool = True) -> Iterator[None]:
        """``prune``, a little between two yields: for retention, which does it in the time of somebody's saves. Nothing is locked
        at a yield, and work that is left there is left as by a kill."""
        self.prune(task, seqs, space=space, sweep=sweep)
        yield

    def live_objects(self, task: str) -> int:
        """About how many objects the task has: what a sweep will cost. 0 is a fair answer where sweeps cost nothing."""
        return 0

    def unreadable(self, task: str, seqs: Iterable[int], *, space: str = "", sound: set[bytes] | None = None) -> dict[int, str]:
        """Those of these checkpoints that cannot be read whole, and why; retention deletes none of them.

        ``sound`` are names of objects that need not be looked at again; those that were are added.
        """
        bad: dict[int, str] = {}
        for seq in seqs:
            try:
                found = self.read(task, space=space, seq=seq)
            except (Damaged, NewerFormat, Unavailable) as error:
                bad[seq] = error.why or error.what
                continue
            if found is not None:
                row, objects = found
                bad |= unreadable(task, [row], lambda names, o=objects: [o[n] for n in names if n in o], sound)  # type: ignore[misc]
        return bad

    @abstractmethod
    def pin(self, task: str, seq: int, pinned: bool, *, space: str = "") -> bool:
        """Set the mark; False if there is no such checkpoint."""

    @abstractmethod
    def delete_task(self, task: str) -> bool:
        """Remove all rows of a task; False if there is none. LeaseHeld while a live run holds it."""

    # -- a task as a whole: for verify, repair, copies and exports

    @abstractmethod
    def walk(self, task: str) -> Iterator[Part]:
        """Everything of a task, each row and object once, also what nothing reaches, in bounded memory.

        Numbers and the task's row come first, then branches, checkpoints (whole rows, of all spaces) by seq, calls and pauses
        by number, writes by key, and objects by name. What is there and cannot be read is a ``Lost``, and the walk goes on after it: it raises
        for nothing but Unavailable. Nothing is checked against seals and names. Not one snapshot: rows may come and go
        between its parts, but each row is whole. An unknown task gives nothing, or the ``Lost`` that is left of it.
        """

    def walk_tasks(self) -> Iterator[str | Lost]:
        """The id of every task once, going on past what cannot be read; raises for nothing but Unavailable."""
        after: str | None = None
        while rows := self.tasks(after=after):
            yield from (row.task for row in rows)
            after = rows[-1].task

    @abstractmethod
    def write_task(self, image: Image, *, over: Image | None = None) -> bool:
        """Write a whole task, all or nothing, with the numbers and ids that its rows have; the rows are sealed anew.

        The task's lease is not written: the copy was never held. Its fences begin above those that the image knows of. False if the task is
        there already with the very same checkpoints, calls, pauses, writes and branches.

        Args:
            over: What may be there instead, as it was walked: it is replaced in the same step, and is there until then. Its
                lease stays, and no number that it gave out comes a second time. (In the file store, a checkpoint that is in
                both must be the same in both.)

        Raises:
            Conflict: a task of that name is there and is another one. LeaseHeld: a live run holds what would be replaced.
        """

    def accept(self, task: str) -> None:  # noqa: B027
        """Take a task as it stands, where the store refuses it as older than what it acknowledged."""

    def older(self, task: str) -> int | None:
        """How many acknowledged checkpoints a task lacked when it was accepted as it stands; None if it never was, or once a commit
        has said that it is ``guarded``: what was done since is on no record, and must not be done again unseen."""
        return None

    def rolled_back(self, task: str) -> Damaged | None:
        """The error that reading the task raises because the store is older than what it acknowledged, if it knows."""
        return None

    def rescue(self, task: str, seq: int, *, space: str = "") -> tuple[CheckpointRow, Mapping[bytes, Obj]] | None:
        """What ``read`` gave and was damaged, found in another way, if the store knows one: slow, and whole."""
        return None

    def draft(self, task: str, seq: int, space: str = "") -> tuple[CheckpointRow, bytes] | None:
        """On stores whose documents people edit: the row of a checkpoint, and the root that its document stands for now, edited
        or not; None if there is no such checkpoint.

        Raises:
            Damaged: the document is missing, or stands for no root.
        """
        raise UsageError(
            f"{type(self).__name__} keeps no documents that could be edited", "", "Change a state with `safepoint edit`."
        )

    def strays(self) -> list[Lost]:
        """What lies in the store and belongs to no task, or is no part of a store at all."""
        return []

    def place(self, task: str, kind: str, key: Any) -> str:
        """Where a row or object lies, for people; '' if that cannot be said.

        Args:
            kind: ``checkpoint``, ``call`` and ``pause``, with a number as key; ``object``, with its name; ``branch``, with space
                and name; ``write``, with its key.
        """
        return ""

    def beside(self, suffix: str) -> str | None:
        """The URL of a store of the same kind whose name is this one's with a suffix; None where there is no such thing."""
        return None

    def backup(self, suffix: str) -> str:
        """Copy all that is stored to ``beside(suffix)``, damage included, and return its URL."""
        raise _not_in_place(self)

    def set_aside(self, image: Image, gone: Iterable[Aside], put: Iterable[CheckpointRow], bare: Iterable[CallRow]) -> int:
        """Mend a task in place, in one step: move what is ``gone`` out of the way, to where it is kept and not read; write the
        checkpoints ``put`` and the calls ``bare``; and take branches, current branch and counts from ``image``.

        Returns:
            How many rows and objects were set aside.
        Raises:
            LeaseHeld: a live run holds the task. Conflict: it has changed since ``image`` was made.
        """
        raise _not_in_place(self)

    def set_strays_aside(self) -> int:
        """Move what belongs to no task out of the way, likewise."""
        return 0

    def structure(self) -> Iterator[Lost]:
        """What the store finds wrong with its own files, pages and counts, apart from what single rows hold."""
        return iter(())

    # -- the store itself

    @abstractmethod
    def check(self) -> list[Finding]:
        """Fitness: a real write and read, and what is wrong with where the store lives."""

    def connection(self) -> AbstractContextManager[Any]:
        raise UsageError(f"{type(self).__name__} has no connection to lend", "", "Only SQL stores do.")

    @abstractmethod
    def close(self) -> None:
        """Close for good; leases taken through this object are free, as after a death. Repeating it does nothing; any other
        verb raises UsageError from then on."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url}>"


def _not_in_place(store: Store) -> UsageError:
    return UsageError(
        f"{type(store).__name__} cannot be repaired in place", "", "Repair into another store: into=URL.", url=store.url
    )

"""The verbs that look after what is stored: verify, repair, doctor, accept."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from safepoint.checking import store_of
from safepoint.codec import chunks
from safepoint.doctoring import DoctorVerbs
from safepoint.editing import EditingVerbs
from safepoint.errors import Damaged, NotFound, SafepointError, Unavailable, UsageError
from safepoint.model import Obj, check_id, now, to_us
from safepoint.moving import OnProgress, Progress
from safepoint.rows import Aside, Lost
from safepoint.rules.mending import FellBack, Mended, mend
from safepoint.rules.verifying import Audit, BranchReport, Damage, Note, Verification, spans
from safepoint.stores.base import Store

if TYPE_CHECKING:
    from safepoint.checkpointer import Checkpointer

__all__ = ["IntegrityVerbs", "Repair", "audit_task"]

_TICK = 4_000_000
_SURE = 4
"""How many losses are confirmed by another read before the others of the task are believed."""
_AGAIN = 5
"""How often a task that is changed meanwhile is looked at, if something seems wrong with it."""
_TRIES = 10
"""How often a task is repaired that goes on meanwhile."""
_ASKED = 3
"""How many checkpoints that miss an object are asked for again before it is called missing."""


class IntegrityVerbs(DoctorVerbs, EditingVerbs):
    """Part of ``Checkpointer``."""

    store: Store

    if TYPE_CHECKING:

        @staticmethod
        def _no_task(task_id: str) -> NotFound: ...

    def verify(self, task_id: str | None = None, *, progress: OnProgress | None = None) -> Verification:
        """Read everything that is stored, of one task or of all, and say exactly what is damaged and what still loads.

        Every object is hashed once, every row compared with its seal, every reference followed, and the heads of all branches
        are decoded; without a task also the store's own structure, and what lies in it that belongs to no task. Damage never
        raises here. Nothing is changed, and nobody is held up: a store may be verified while agents work in it. Bodies are not
        kept, so that memory grows with the number of objects only.

        Args:
            progress: Called now and then with the tasks done and the bytes read; how many there are is not known (``total`` is 0).

        Raises:
            NotFound: no such task, and nothing that is left of one. Unavailable: the store does not answer.
        """
        begun = time.perf_counter()
        total = _Total(progress)
        if task_id is not None:
            if not total.add(audit_task(self.store, check_id(task_id), True, total.ticker(task_id)), every=True):
                raise self._no_task(task_id)
        else:
            for name in self.store.walk_tasks():
                if isinstance(name, Lost):
                    total.lost(name)
                else:
                    total.add(audit_task(self.store, name, False, total.ticker(name)), every=False)
            for lost in self.store.structure():
                total.lost(lost)
            for lost in self.store.strays():
                if lost.kind == "foreign":
                    total.notes.append(Note(None, f"{lost.what} ({lost.where}): {lost.why}"))
                else:
                    total.lost(lost)
        return Verification(
            url=self.store.url,
            tasks=total.tasks,
            checkpoints=total.checkpoints,
            calls=total.calls,
            pauses=total.pauses,
            writes=total.writes,
            objects=total.objects,
            bytes=total.bytes,
            seconds=time.perf_counter() - begun,
            damages=tuple(total.damages),
            notes=tuple(total.notes),
            branches=tuple(total.branches),
        )

    def repair(
        self,
        task_id: str | None = None,
        *,
        into: str | Store | Checkpointer | None = None,
        in_place: bool = False,
        progress: OnProgress | None = None,
    ) -> Repair:
        """Make a store without the damage of this one: what is whole stays as it is, the rest is set aside, never deleted.

        Writes into a new store, ``into`` or one beside this (``agent.db.repaired``), and leaves this one untouched. With
        ``in_place`` it makes a copy first and then moves what is damaged to a quarantine of the store (SQLite: the table
        ``sp_quarantine``). A branch whose head is lost goes on from the newest whole checkpoint, on a new branch, as automatic
        recovery would. Where records of calls are lost, the current branch stands under a guard: a write that may have been
        made is shown to a person, and not made again.

        Args:
            task_id: Only this one.
            into: An empty store, its URL or its checkpointer.
            progress: As that of ``verify``.

        Raises:
            NotFound: no such task. LeaseHeld: a live run holds it (in place only). Conflict: it has changed meanwhile.
            UsageError: ``into`` is not empty; or damage that cannot be repaired in place. NewerFormat: a newer safepoint must.
            Unavailable: a task never stood still meanwhile.
        """
        if in_place and into is not None:
            raise UsageError("repair takes into= or in_place=, not both", "", "Choose one of them.")
        if in_place:
            return self._repair_in_place(task_id, progress)
        target, own = self._target(into)
        try:
            repaired = Repair(url=target.url, in_place=False, backup=None)
            for name in self._names(task_id, repaired):
                there = _repair_into(self.store, target, name, repaired, progress)
                if not there and task_id is not None:  # else it was deleted meanwhile
                    raise self._no_task(name)
            if task_id is None:
                repaired.left_behind += [
                    str(lost.what) + (f" ({lost.where})" if lost.where else "")
                    for lost in self.store.strays()
                    if lost.kind == "stray"
                ]
            return repaired
        finally:
            if own:
                target.close()

    def _names(self, task_id: str | None, repaired: Repair) -> Iterator[str]:
        if task_id is not None:
            yield check_id(task_id)
            return
        for name in self.store.walk_tasks():
            if isinstance(name, Lost):
                repaired.left_behind.append(f"{name.what} ({name.where})")
            else:
                yield name

    def _target(self, into: str | Store | Checkpointer | None) -> tuple[Store, bool]:
        next(iter(self.store.walk_tasks()), None)  # a store that is closed says so before another is made; damage may be
        if into is None:
            into = self.store.beside(".repaired")
            if into is None:
                raise UsageError(
                    f"there is no place beside {self.store.url}", "", 'Name an empty store: into="sqlite:///repaired.db".'
                )
        target, own = store_of("repair(into=)", into)
        if target.tasks(limit=1):
            url = target.url
            if own:
                target.close()
            raise UsageError(f"{url} is not empty", "a repair begins with an empty store", "Name another one.", url=url)
        return target, own

    def _repair_in_place(self, task_id: str | None, progress: OnProgress | None) -> Repair:
        store = self.store
        broken = next(store.structure(), None)
        if broken is not None and broken.where != "sp_tasks":
            raise UsageError(
                f"{store.url} cannot be repaired in place",
                f"its structure is damaged: {broken.why}",
                "Repair it into another store.",
                url=store.url,
            )
        repaired = Repair(url=store.url, in_place=True, backup=None)
        for name in self._names(task_id, repaired):
            audit = audit_task(store, name, True, _ticker(progress, repaired.tasks, name))
            if not audit.parts:
                if task_id is None:
                    continue  # deleted meanwhile
                raise self._no_task(name)
            repaired.tasks += 1
            if not audit.damages:
                repaired.checkpoints += audit.checkpoints
                continue
            unread = next((d for d in audit.damages if _unread(d, store)), None)
            if unread is not None:
                raise UsageError(
                    f"task {name!r} cannot be repaired in place",
                    f"{unread.what} cannot be read: {unread.why}",
                    "Repair it into another store.",
                    task=name,
                )
            if repaired.backup is None:
                repaired.backup = _backup(store)
            older = _unguarded(store, audit)
            mended = mend(audit, lambda name=name: store.walk(name), to_us(now()), older)  # type: ignore[misc]
            gone = [Aside(d.kind, d.key, d.why) for d in audit.damages if d.key is not None]
            gone += [
                Aside("checkpoint", seq, "objects that it needs are lost")
                for seq in mended.checkpoints
                if seq not in audit.bad_checkpoints
            ]
            gone += [
                Aside("write", key, "objects that it needs are lost") for key in mended.writes if key not in audit.bad_writes
            ]
            gone += [Aside("call", no, "its values are lost") for no in mended.calls if no not in audit.bad_calls]
            bare = [call for call in mended.image.calls if call.no in set(mended.bare_calls)]
            repaired.set_aside += store.set_aside(mended.image, gone, mended.put, bare)
            if any(damage.kind == "older" for damage in audit.damages):
                store.accept(name)
            repaired.take(audit, mended)
        if task_id is None:
            if repaired.backup is None and any(lost.kind == "stray" for lost in store.strays()):
                repaired.backup = _backup(store)
            repaired.set_aside += store.set_strays_aside()
        return repaired


@dataclass(slots=True)
class Repair:
    """What a repair has done."""

    url: str
    """Of the repaired store."""
    in_place: bool
    backup: str | None
    """Of the copy that was made before an in-place repair; None if there was nothing to repair."""
    tasks: int = 0
    checkpoints: int = 0
    """Whole ones, which the repaired store has."""
    damages: list[Damage] = field(default_factory=list)
    """Of the tasks that were repaired, as verify names them."""
    fell_back: list[FellBack] = field(default_factory=list)
    lost_checkpoints: dict[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    """By task: runs of numbers, as far as these are known."""
    lost_calls: dict[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    bare_calls: dict[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    """Kept as calls that were made, while their arguments and results are lost."""
    lost_pauses: dict[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    lost_writes: dict[str, tuple[tuple[str, str, str, int], ...]] = field(default_factory=dict)
    """By task: space, checkpoint, writer and index of what adapters had recorded."""
    left_behind: list[str] = field(default_factory=list)
    """What belongs to no task that is known, and is in the old store only."""
    set_aside: int = 0
    """Rows and objects that an in-place repair has moved to the quarantine."""

    def take(self, audit: Audit, mended: Mended) -> None:
        task = audit.task
        self.checkpoints += len(mended.image.checkpoints)
        self.damages += audit.damages
        self.fell_back += mended.fell_back
        for name, numbers in (
            ("lost_checkpoints", mended.checkpoints),
            ("lost_calls", mended.calls),
            ("bare_calls", mended.bare_calls),
            ("lost_pauses", mended.pauses),
        ):
            if numbers.runs:
                getattr(self, name)[task] = numbers.frozen()
        if mended.writes:
            self.lost_writes[task] = tuple(mended.writes)

    def __str__(self) -> str:
        lines = [
            f"{self.url}: {self.tasks} tasks, {len(self.damages)} damages" + (f"; before: {self.backup}" if self.backup else "")
        ]
        lines += [f"  {fell}" for fell in self.fell_back]
        for name in ("lost_checkpoints", "lost_calls", "bare_calls", "lost_pauses"):
            what = name.replace("_", " ").replace("bare calls", "calls without their values")
            lines += [f"  {task}: {what} {spans(runs)}" for task, runs in getattr(self, name).items()]
        lines += [f"  {task}: lost writes {', '.join(map(repr, keys))}" for task, keys in self.lost_writes.items()]
        lines += [f"  left behind: {text}" for text in self.left_behind]
        return "\n".join(lines)


def _repair_into(store: Store, target: Store, task: str, repaired: Repair, progress: OnProgress | None) -> bool:
    """False if there is nothing of such a task."""
    for _ in range(_TRIES):
        audit = audit_task(store, task, True, _ticker(progress, repaired.tasks, task))
        if not audit.parts:
            return False
        mended = mend(audit, lambda: store.walk(task), to_us(now()), _unguarded(store, audit))
        if not mended.moved:
            break
    else:
        raise Unavailable(
            f"task {task!r} changed {_TRIES} times while it was repaired", "a run is busy with it", "Stop that run.", task=task
        )
    target.write_task(mended.image)
    repaired.tasks += 1
    repaired.take(audit, mended)
    return True


def _unread(damage: Damage, store: Store) -> bool:
    """Whether it is not known which row it is, so that none can be taken out of the way; wrong counts are set right."""
    if damage.kind == "task" or damage.key is not None:
        return damage.kind == "task"
    return damage.kind != "older" and "counts" not in damage.why and not store.sets_unread_aside


def _ticker(progress: OnProgress | None, done: int, task: str, before: int = 0) -> Callable[[int], None]:
    """What is told how many bytes of a task have been read, ``before`` with those of other tasks."""
    return (lambda read: None) if progress is None else (lambda read: progress(Progress(done, 0, before + read, task)))


def _backup(store: Store) -> str | None:
    """A copy beside the store, under the first free name; None for a store that nothing can lie beside."""
    for n in range(1, 1000):
        suffix = f".before-repair-{n}"
        if store.beside(suffix) is None:
            return None
        try:
            return store.backup(suffix)
        except UsageError as error:
            if "path" not in error.details:
                raise
    raise UsageError(f"there are too many copies beside {store.url}", "", "Remove some of them.")


class _Total:
    """What was found in all tasks so far."""

    def __init__(self, progress: OnProgress | None) -> None:
        self.tasks = self.checkpoints = self.calls = self.pauses = self.writes = self.objects = self.bytes = 0
        self.damages: list[Damage] = []
        self.notes: list[Note] = []
        self.branches: list[BranchReport] = []
        self._progress = progress

    def add(self, audit: Audit, *, every: bool) -> bool:
        """False if there is nothing of such a task."""
        if not audit.parts:
            return False
        self.tasks += 1
        for name in ("checkpoints", "calls", "pauses", "writes", "objects", "bytes"):
            setattr(self, name, getattr(self, name) + getattr(audit, name))
        self.damages += audit.damages
        self.notes += audit.notes
        if every or audit.damages:
            self.branches += audit.branches()
        self.ticker(audit.task)(0)
        return True

    def lost(self, lost: Lost) -> None:
        kind: Any = lost.kind
        self.damages.append(Damage(None, lost.what, lost.where, lost.why, kind))

    def ticker(self, task: str) -> Callable[[int], None]:
        return _ticker(self._progress, self.tasks, task, self.bytes)


def audit_task(store: Store, task: str, branches: bool, tick: Callable[[int], None] = lambda more: None) -> Audit:
    """Look at everything of a task. ``Audit.parts`` is 0 if there is nothing of it.

    A walk is not one moment. What looks wrong in a task that was changed meanwhile, deleted and begun anew perhaps, is looked at
    again before it is believed.

    Args:
        branches: Say also of a sound task which checkpoints load.
    """
    for _ in range(_AGAIN):
        before = _standing(store, task)
        audit = _audited(store, task, branches, tick)
        if not audit.damages or _standing(store, task) == before:
            break
    return audit


def _standing(store: Store, task: str) -> Any:
    """What is another where the task has been changed in between; None if that cannot be read."""
    try:
        row = store.task(task)
    except Damaged:
        return None
    return row and (row.created_at, row.updated_at, row.head, row.checkpoints)


def _audited(store: Store, task: str, branches: bool, tick: Callable[[int], None]) -> Audit:
    audit = Audit(task, lambda kind, key: store.place(task, kind, key))
    due = _TICK
    take = audit.take
    for part in store.walk(task):
        take(part)
        if audit.bytes > due:
            due = audit.bytes + _TICK
            tick(audit.bytes)
    walked = audit.parts
    older = _older(store, task) if walked or branches else None
    if older is not None:
        audit.behind(older, store.place(task, "task", task))
    if walked and audit.again(branches=branches):
        again = store.walk(task)
        while (next_part := next(again, None)) is not None and audit.retake(next_part):
            pass
        del again
    confirmed = 0

    def still(damage: Damage) -> bool:
        # What was read and is wrong stays wrong. Asking costs a read, which is slow where the file is damaged: a few tell.
        nonlocal confirmed
        if confirmed >= _SURE or (damage.kind == "object" and damage.key not in audit.missing):
            return True
        there = _still(store, audit, damage)
        confirmed += there
        return there

    audit.finish(still)
    for space, seq in audit.good_heads():
        why = _unreadable(store, task, space, seq)
        if why:
            audit.condemn(seq, why)
    return audit


def _older(store: Store, task: str) -> Damaged | None:
    try:
        return store.rolled_back(task)
    except Damaged:
        return None  # what it would have been compared with cannot be read, as the walk has said


def _unguarded(store: Store, audit: Audit) -> int | None:
    """How many acknowledged checkpoints a task lacks, or did when it was accepted as it stands, that no guard stands for yet."""
    try:
        accepted = store.older(audit.task)
    except Damaged:
        accepted = None
    return max((n for n in (audit.older, accepted) if n is not None), default=None)


def _unreadable(store: Store, task: str, space: str, seq: int) -> str:
    """Why a checkpoint that every part of is sound cannot be read; '' if it can, or is gone by now."""
    try:
        found = store.read(task, space=space, seq=seq)
        if found is not None:
            row, objects = found
            chunks.unpack_plain(row.root, row.refs, objects)
    except Unavailable:
        raise
    except SafepointError as error:
        return error.what
    return ""


def _still(store: Store, audit: Audit, damage: Damage) -> bool:
    """Whether something that a walk missed is missing: what was pruned while it went on leaves the same gaps."""
    try:
        if damage.kind == "branch":
            space, name = damage.key
            at = next((b.head for b in store.branches(audit.task, space) if b.name == name), None)
            if at is None:
                # Gone with its task, or never there: its checkpoints tell.
                return bool(store.headers(audit.task, space=space, branch=name, limit=1))
            found = store.read(audit.task, space=space, seq=at.seq)
            return found is None or found[0].id != at.id
        asked, calls = _newest(damage.checkpoints), _newest(damage.calls)
        if not asked and not calls and not damage.writes:
            return True
        for seq in asked:
            for space in audit.spaces():
                found = store.read(audit.task, space=space, seq=seq)
                if found is not None and not _sound(found[1].get(damage.key)):
                    return True
        for no in calls:
            rows, objects = store.calls(audit.task, nos=[no])
            if rows and not _sound(objects.get(damage.key)):
                return True
        for key in damage.writes[-_ASKED:]:
            found_writes, objects = store.writes(audit.task, space=key[0], checkpoints=[key[1]], writer=key[2])
            if any(row.key == key for row in found_writes) and not _sound(objects.get(damage.key)):
                return True
        return False
    except Damaged:
        return True


def _newest(runs: tuple[tuple[int, int], ...]) -> list[int]:
    """A few of the numbers, the newest: retention takes the oldest first."""
    return [n for first, last in reversed(runs[-_ASKED:]) for n in range(last, max(first - 1, last - _ASKED), -1)][:_ASKED]


def _sound(obj: Obj | None) -> bool:
    return obj is not None and chunks.verify_obj(obj)

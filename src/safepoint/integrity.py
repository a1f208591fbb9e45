"""The verbs that look after what is stored: verify, repair, doctor, accept."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from safepoint.codec import chunks
from safepoint.errors import Damaged, NotFound, SafepointError, Unavailable
from safepoint.model import Obj, check_id
from safepoint.rows import Lost
from safepoint.rules.verifying import Audit, BranchReport, Damage, Note, Verification
from safepoint.stores.base import Store

__all__ = ["IntegrityVerbs", "Progress", "audit_task"]

Progress = Callable[[int, int], Any]
"""Told now and then: bytes read so far, tasks done so far."""

_TICK = 4_000_000
_ASKED = 3
"""How many checkpoints that miss an object are asked for again before it is called missing."""


class IntegrityVerbs:
    """Part of ``Checkpointer``."""

    store: Store

    if TYPE_CHECKING:

        @staticmethod
        def _no_task(task_id: str) -> NotFound: ...

    def verify(self, task_id: str | None = None, *, progress: Progress | None = None) -> Verification:
        """Read everything that is stored, of one task or of all, and say exactly what is damaged and what still loads.

        Every object is hashed once, every row compared with its seal, every reference followed, and the heads of all branches
        are decoded; without a task also the store's own structure, and what lies in it that belongs to no task. Damage never
        raises here. Nothing is changed, and nobody is held up: a store may be verified while agents work in it. Bodies are not
        kept, so that memory grows with the number of objects only.

        Args:
            progress: Called with the bytes read and the tasks done so far.

        Raises:
            NotFound: no such task, and nothing that is left of one. Unavailable: the store does not answer.
        """
        begun = time.perf_counter()
        total = _Total(progress)
        if task_id is not None:
            if not total.add(audit_task(self.store, check_id(task_id), True, total.tick), every=True):
                raise self._no_task(task_id)
        else:
            for name in self.store.walk_tasks():
                if isinstance(name, Lost):
                    total.lost(name)
                else:
                    total.add(audit_task(self.store, name, False, total.tick), every=False)
            for lost in self.store.structure():
                total.lost(lost)
            for lost in self.store.strays():
                if lost.kind == "table":
                    total.notes.append(Note(None, f"{lost.what}: {lost.why}"))
                else:
                    total.lost(lost)
        return Verification(
            url=self.store.url,
            tasks=total.tasks,
            checkpoints=total.checkpoints,
            calls=total.calls,
            pauses=total.pauses,
            objects=total.objects,
            bytes=total.bytes,
            seconds=time.perf_counter() - begun,
            damages=tuple(total.damages),
            notes=tuple(total.notes),
            branches=tuple(total.branches),
        )


class _Total:
    """What was found in all tasks so far."""

    def __init__(self, progress: Progress | None) -> None:
        self.tasks = self.checkpoints = self.calls = self.pauses = self.objects = self.bytes = 0
        self.damages: list[Damage] = []
        self.notes: list[Note] = []
        self.branches: list[BranchReport] = []
        self._progress = progress

    def add(self, audit: Audit, *, every: bool) -> bool:
        """False if there is nothing of such a task."""
        if not audit.parts:
            return False
        self.tasks += 1
        for name in ("checkpoints", "calls", "pauses", "objects", "bytes"):
            setattr(self, name, getattr(self, name) + getattr(audit, name))
        self.damages += audit.damages
        self.notes += audit.notes
        if every or audit.damages:
            self.branches += audit.branches()
        self.tick(0)
        return True

    def lost(self, lost: Lost) -> None:
        kind: Any = lost.kind
        self.damages.append(Damage(None, lost.what, lost.where, lost.why, kind))

    def tick(self, more: int) -> None:
        if self._progress is not None:
            self._progress(self.bytes + more, self.tasks)


def audit_task(store: Store, task: str, branches: bool, tick: Callable[[int], None] = lambda more: None) -> Audit:
    """Look at everything of a task. ``Audit.parts`` is 0 if there is nothing of it.

    Args:
        branches: Say also of a sound task which checkpoints load.
    """
    audit = Audit(task, lambda kind, key: store.place(task, kind, key))
    due = _TICK
    take = audit.take
    for part in store.walk(task):
        take(part)
        if audit.bytes > due:
            due = audit.bytes + _TICK
            tick(audit.bytes)
    if audit.parts and audit.again(branches=branches):
        again = store.walk(task)
        while (next_part := next(again, None)) is not None and audit.retake(next_part):
            pass
        del again
    audit.finish(lambda damage: _still(store, audit, damage))
    for space, seq in audit.good_heads():
        why = _unreadable(store, task, space, seq)
        if why:
            audit.condemn(seq, why)
    return audit


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
            found = None if at is None else store.read(audit.task, space=space, seq=at.seq)
            return at is not None and (found is None or found[0].id != at.id)
        asked, calls = _newest(damage.checkpoints), _newest(damage.calls)
        if not asked and not calls:
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
        return False
    except Damaged:
        return True


def _newest(runs: tuple[tuple[int, int], ...]) -> list[int]:
    """A few of the numbers, the newest: retention takes the oldest first."""
    return [n for first, last in reversed(runs[-_ASKED:]) for n in range(last, max(first - 1, last - _ASKED), -1)][:_ASKED]


def _sound(obj: Obj | None) -> bool:
    return obj is not None and chunks.verify_obj(obj)

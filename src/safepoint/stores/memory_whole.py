"""A task in memory as a whole: walked, written as one, and mended."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from safepoint.model import now, to_us
from safepoint.rows import Aside, CallRow, CheckpointRow, Image, Numbers, Part, TaskRow, replace
from safepoint.stores import refusals, whole

if TYPE_CHECKING:
    from safepoint.stores.memory import _Data, _Task

__all__ = ["Whole"]


class Whole:
    """Needs the store's dicts."""

    if TYPE_CHECKING:

        def _locked(self, task: str) -> AbstractContextManager[tuple[_Data, _Task | None]]: ...

        def _begun(self, row: TaskRow) -> _Task: ...

        def _shown(self, task: _Task) -> TaskRow: ...

        def _refuse(self, data: _Data, task: _Task) -> None: ...

    def walk(self, task: str) -> Iterator[Part]:
        with self._locked(task) as (_data, found):
            if found is None:
                return
            parts: list[Part] = [_numbers(found), self._shown(found)]
            parts += [branch for _, branch in sorted(found.branches.items())]
            numbered: tuple[dict[Any, Any], ...] = (found.checkpoints, found.calls, found.pauses, found.writes, found.objects)
            parts += [rows[key] for rows in numbered for key in sorted(rows)]
        yield from parts

    def write_task(self, image: Image, *, over: Image | None = None) -> bool:
        image = whole.sealed(image)
        with self._locked(image.row.task) as (data, there):
            if there is None:
                data.fence = max(data.fence, whole.fence_of(image))
                data.tasks[image.row.task] = self._made(image)
                return True
            if _facts(there) == whole.facts_of(image):
                return False
            if over is None or _facts(there) != whole.facts_of(over):
                raise whole.another(image.row.task)
            self._refuse(data, there)
            new = self._made(whole.beyond(image, _numbers(there)))
            if there.lease is not None:
                new.lease = replace(there.lease, fence=max(there.lease.fence, whole.fence_of(image)))
            data.tasks[image.row.task] = new
            return True

    def _made(self, image: Image) -> _Task:
        row, last = image.row, image.numbers
        new = self._begun(replace(row, head=None, step=0, in_doubt=0, open_pauses=0, checkpoints=0))
        new.seq, new.no, new.pause_no, new.line, new.position = last.seq, last.call, last.pause, last.line, last.position
        new.branches = {(b.space, b.name): b for b in image.branches}
        new.checkpoints = {c.seq: c for c in image.checkpoints}
        new.ids = {(c.space, c.id): c.seq for c in image.checkpoints}
        new.calls = {c.no: c for c in image.calls}
        new.pauses = {p.no: p for p in image.pauses}
        new.writes = {w.key: w for w in image.writes}
        new.objects = {o.name: o for o in image.objects}
        return new

    def set_aside(self, image: Image, gone: Iterable[Aside], put: Iterable[CheckpointRow], bare: Iterable[CallRow]) -> int:
        name, made = image.row.task, [row.sealed(image.row.task) for row in put]
        with self._locked(name) as (data, task):
            if task is not None:
                self._refuse(data, task)
            if task is None or (task.seq + len(made), task.position) != (image.numbers.seq, image.numbers.position):
                raise refusals.stale(name)
            if task.row.updated_at != image.row.updated_at:  # a commit of writes or of branches alone moves no number
                raise refusals.stale(name)
            before = len(data.quarantine)
            for aside in gone:
                kind: dict[Any, Any] = task.branches if aside.kind == "branch" else getattr(task, f"{aside.kind}s")
                if aside.key in kind:
                    data.quarantine.append((name, aside, kind.pop(aside.key)))
            task.checkpoints |= {row.seq: row for row in made}
            task.ids = {(row.space, row.id): seq for seq, row in task.checkpoints.items()}
            task.calls |= {row.no: row.sealed(name) for row in bare}
            task.branches = {(b.space, b.name): b for b in image.branches}
            task.row = replace(task.row, branch=image.row.branch, updated_at=to_us(now()))
            task.seq, task.line = image.numbers.seq, image.numbers.line
            return len(data.quarantine) - before


def _facts(task: _Task) -> whole.Facts:
    return whole.facts(
        task.checkpoints.values(), task.calls.values(), task.pauses.values(), task.branches.values(), task.writes.values()
    )


def _numbers(task: _Task) -> Numbers:
    return Numbers(task.seq, task.no, task.pause_no, task.line, task.position)

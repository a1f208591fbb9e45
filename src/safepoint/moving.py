"""The verbs that move tasks between stores: copy_to, export, import_."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from safepoint import _probe, imaging, portable, portable_io
from safepoint._version import __version__
from safepoint.checking import check_number, store_of
from safepoint.codec import chunks, states
from safepoint.errors import Conflict, Damaged, LeaseHeld, NewerFormat, NotFound, SafepointError, StoreFull, UsageError
from safepoint.model import Obj, check_id
from safepoint.portable import Content
from safepoint.portable_io import Target
from safepoint.rows import (
    BranchRow,
    CallRow,
    CallWrite,
    CheckpointRow,
    Commit,
    Head,
    Image,
    PauseRow,
    PauseWrite,
    TaskRow,
    replace,
)
from safepoint.rules.journal import UNASKED
from safepoint.stores import holder
from safepoint.stores.base import Store

if TYPE_CHECKING:
    from safepoint.checkpointer import Checkpointer

__all__ = ["CopyReport", "ExportReport", "ImportReport", "MovingVerbs", "Progress", "TaskCopy"]

log = logging.getLogger("safepoint")

_TRIES = 5
"""How often one checkpoint is imported onto a task where somebody else is always first."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a verb is: tasks of all tasks (copy, verify, repair), or checkpoints of all checkpoints (export, import)."""

    done: int
    total: int
    """0 where nobody knows yet."""
    bytes: int
    """Read or written so far, before any packing."""
    task_id: str
    """What it is at."""


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class TaskCopy:
    """What became of one task."""

    task_id: str
    result: Literal["copied", "updated", "unchanged"]
    """``updated``: an earlier copy was there."""
    checkpoints: int
    calls: int
    pauses: int
    bytes: int
    skipped: tuple[str, ...] = ()
    """What was damaged and left out."""
    writes: int = 0
    """What adapters had recorded against checkpoints."""


@dataclass(frozen=True, slots=True)
class CopyReport:
    tasks: tuple[TaskCopy, ...]

    @property
    def changed(self) -> bool:
        """Whether the target is another one than before."""
        return any(t.result != "unchanged" for t in self.tasks)

    @property
    def skipped(self) -> tuple[str, ...]:
        return tuple(f"{t.task_id}: {what}" for t in self.tasks for what in t.skipped)

    def __repr__(self) -> str:
        counts = {r: sum(t.result == r for t in self.tasks) for r in ("copied", "updated", "unchanged")}
        return f"<CopyReport {' '.join(f'{k}={v}' for k, v in counts.items())} skipped={len(self.skipped)}>"


@dataclass(frozen=True, slots=True)
class ExportReport:
    task_id: str
    seq: int | None
    """The one checkpoint that was exported, or None for the whole task."""
    checkpoints: int
    calls: int
    pauses: int
    bytes: int
    """Of the file."""
    writes: int = 0


@dataclass(frozen=True, slots=True)
class ImportReport:
    task_id: str
    what: Literal["task", "checkpoint"]
    result: Literal["imported", "unchanged"]
    branch: str
    """Of a checkpoint: the one that it is on; of a task: its current one."""
    seq: int | None
    """Of a checkpoint: its number here; of a task: its head."""
    checkpoints: int
    calls: int
    pauses: int
    writes: int = 0


class MovingVerbs:
    """Part of ``Checkpointer``."""

    store: Store

    if TYPE_CHECKING:

        @staticmethod
        def _no_task(task_id: str) -> NotFound: ...

    def copy_to(
        self,
        other: str | Store | Checkpointer,
        task_id: str | None = None,
        *,
        skip_damaged: bool = False,
        held: Literal["copy", "refuse"] = "copy",
        progress: OnProgress | None = None,
    ) -> CopyReport:
        """Copy one task, or all of them, into another store, of any sort.

        A task is copied whole, as of one moment: all branches, checkpoints (with their numbers and ids), calls, pauses, writes of adapters, pins,
        status and input; not its lease. It is there whole or not at all, and read back and compared before this returns. Doing it again
        changes nothing; a copy that the original has gone on from is brought up to it.

        A copy is a second task: do not run it while the first one runs, as both would make the same calls.

        Args:
            other: A URL (the store is made if it is not there), a store or a checkpointer.
            skip_damaged: Leave out checkpoints that are damaged, and bodies of calls; the report names them. Never a call, a
                pause or a write of an adapter, as what nobody remembers would be done again.
            held: What to do with a task that a live run holds: copy it as it stands, or refuse (LeaseHeld).
            progress: Called before each task and at the end.

        Raises:
            NotFound: no such task. Conflict: a task of that name is there and is another one, or has gone on by itself. Damaged,
            NewerFormat, LeaseHeld, StoreFull: the task is not copied. Where all are copied, those that can be are before this is raised;
            ``details["report"]`` says which.
        """
        if held not in ("copy", "refuse"):
            raise UsageError(f"copy_to(held={held!r})", "there is no such way", "Use 'copy' or 'refuse'.")
        if task_id is not None and self.store.task(check_id(task_id)) is None and not _left_of(self.store, task_id):
            raise self._no_task(task_id)
        target, own = store_of("copy_to", other)
        done: list[TaskCopy] = []
        problems: list[SafepointError] = []
        try:
            names = [task_id] if task_id is not None else _names(self.store)
            size = 0
            for i, name in enumerate(names):
                _tell(progress, i, len(names), size, name)
                try:
                    copied = _copy(self.store, target, name, skip_damaged, held)
                except (Conflict, Damaged, NewerFormat, LeaseHeld, StoreFull) as error:
                    if task_id is not None:
                        raise
                    problems.append(error)
                    continue
                _probe.at("copy.task")
                if copied is not None:
                    done.append(copied)
                    size += copied.bytes
                    log.info("copied %s to %s: %s, %d checkpoints", name, target.url, copied.result, copied.checkpoints)
            _tell(progress, len(names), len(names), size, names[-1] if names else "")
        finally:
            if own:
                target.close()
        report = CopyReport(tuple(done))
        if problems:
            first = problems[0]
            first.details["report"] = report
            first.details["copied"] = [t.task_id for t in done]
            if len(problems) > 1:
                first.why += f"; {len(problems) - 1} more tasks were not copied either"
            first.details["not_copied"] = [p.details.get("task") for p in problems]
            raise first
        return report

    def export(
        self, task_id: str, path_or_file: Target, *, seq: int | None = None, progress: OnProgress | None = None
    ) -> ExportReport:
        """Write a task, or one checkpoint with the journal that it stands on, as one portable file.

        The file is lines of JSON (docs/moving.md), packed if its name ends in ``.gz``. It holds everything that the task does,
        secrets too. At a path it has mode 0600, and is there as a whole or not at all.

        Args:
            path_or_file: A path, or a file opened for binary writing.
            seq: The one checkpoint; with it go its branch's calls and pauses from its step on.

        Raises:
            NotFound: no such task or checkpoint. Damaged: it cannot be exported as it is. UsageError, StoreFull: it cannot be
            written there.
        """
        if seq is not None:
            check_number("export", "seq", seq)
        try:
            taken = imaging.take(self.store, check_id(task_id), skip_damaged=seq is not None)
        except Damaged as error:
            if "damaged" in error.details:
                error.why = "an export would hand the damage on"
                error.remedy = (
                    f"See `safepoint verify {task_id}`; `safepoint repair` makes a store of what is whole, to be exported from."
                )
            raise
        if taken is None:
            raise self._no_task(task_id)
        image = taken.image if seq is None else _one(taken, seq, self.store)
        what = "task" if seq is None else "checkpoint"
        lines = portable.lines(image, what=what, seq=seq, version=__version__)
        size = portable_io.write(path_or_file, _watched(lines, progress, task_id, len(image.checkpoints)))
        counts = len(image.checkpoints), len(image.calls), len(image.pauses)
        return ExportReport(task_id, seq, *counts, size, len(image.writes))

    def import_(self, path_or_file: Target, *, task_id: str | None = None, progress: OnProgress | None = None) -> ImportReport:
        """Take in what ``export`` has written. All of it is checked before any of it is to be seen.

        A whole task becomes a task. One checkpoint becomes that of a new task; or, where the task is there, a new checkpoint of kind
        ``import`` on a branch of its own, with its journal, and the current branch stays as it is: ``rewind`` goes to it. The same
        import again changes nothing. No name in the file is used as a path.

        Args:
            path_or_file: A path, or a file opened for binary reading.
            task_id: The name that the task gets here, instead of its own.

        Raises:
            Damaged: the file is cut or was changed, or is no export. NewerFormat: of a newer safepoint. Conflict: another task of
            that name is there. LeaseHeld: a live run holds it. NotFound, UsageError: the file cannot be read. StoreFull: a store that
            keeps each state whole has no room for all of them (1 GiB), or there is none on the disk.
        """
        name = None if task_id is None else check_id(task_id)
        self.store.tasks(limit=1)  # a store that is closed says so before a file is read
        with portable_io.reading(path_or_file) as lines:
            content = portable.read(_watched(lines, progress, name or "", None), chunked=self.store.chunked, task=name)
        _probe.at("import.read")
        image = content.image
        there = self.store.task(image.row.task)
        if content.what == "checkpoint" and there is not None:
            return self._import_onto(content)
        try:
            how, now = imaging.put(self.store, image, marks=False)
        except Conflict as error:
            error.remedy = "Give it another name: import_(…, task_id=…)."
            raise
        if imaging.heads_of(now) != {n: content.flats[n] for n in imaging.heads_of(image)}:
            raise Damaged(
                f"task {image.row.task!r} is not as it was imported",
                "what was read back differs",
                "Check the store with `safepoint check`.",
                task=image.row.task,
            )
        head = next((b.head.seq for b in now.branches if (b.space, b.name) == ("", now.row.branch)), None)
        log.info("imported %s: %s, %d checkpoints", image.row.task, content.what, len(image.checkpoints))
        return _imported(content, "imported" if how == "written" else "unchanged", now.row.branch, head)

    def _import_onto(self, content: Content) -> ImportReport:
        """One checkpoint as a new branch of a task that is there."""
        task = content.image.row.task
        row = content.image.checkpoints[0]
        id = f"import-{chunks.name_of(row.id.encode(), content.flats[row.seq]).hex()}"
        result: Literal["imported", "unchanged"] = "unchanged"
        for attempt in range(_TRIES):
            if (there := self._already(content, id)) is not None:
                break
            try:
                if not self.store.commit(self._onto(content, id)).existed:
                    result = "imported"
            except (Conflict, UsageError):  # somebody has taken that branch, or imported the same
                if attempt == _TRIES - 1:
                    raise
        if there is None or portable.flat_digest(*there) != content.flats[row.seq]:
            raise Damaged(
                f"checkpoint {row.seq} is not in task {task!r} as it was imported",
                "what was read back differs",
                "Check the store with `safepoint check`.",
                task=task,
            )
        new = there[0]
        if new.id == id:
            self._tie(new, content)
        if result == "imported":
            log.info("imported %s@%d on branch %s", task, new.seq, new.branch)
        return _imported(content, result, new.branch, new.seq)

    def _already(self, content: Content, id: str) -> tuple[CheckpointRow, Mapping[bytes, Obj]] | None:
        """The checkpoint that was exported, if this is its own task, or what it became when it was imported."""
        task, row = content.image.row.task, content.image.checkpoints[0]
        own = self.store.read(task, id=row.id)
        if own is not None and (own[0].seq, own[0].digest) == (row.seq, row.digest):
            return own
        return self.store.read(task, id=id)

    def _tie(self, row: CheckpointRow, content: Content) -> None:
        """Set right what refers to numbers that were foreseen, and that a save or a fork in between has taken.

        Only what is as it was imported: whatever a run has made of it since is not touched.
        """
        task, image = content.image.row.task, content.image
        line = next((b.line for b in self.store.branches(task) if b.name == row.branch), None)
        # No call that is made on this line later begins before 0.
        there = [c for c in self.store.calls(task, line=line)[0] if c.began < 0] if line is not None else []
        if len(there) != len(image.calls):
            return  # retention has taken the checkpoint's calls
        nos = {call.no: c.no for call, c in zip(image.calls, there, strict=True)}
        calls = [
            (c, replace(c, base_seq=row.seq, scope=nos.get(call.scope, call.scope)))
            for call, c in zip(image.calls, there, strict=True)
        ]
        asked = {(p.step, p.name, p.occurrence): p for p in self.store.pauses(task) if p.line == line}
        pauses = [
            (p, replace(p, base_seq=row.seq, call_no=nos.get(pause.call_no or 0)))
            for pause in image.pauses
            if (p := asked.get((pause.step, pause.name, pause.occurrence))) is not None
        ]
        commit = Commit(
            task=task,
            id=f"{row.id}+",
            anyway=True,
            calls=tuple(CallWrite(b) for a, b in calls if a.version == 1 and a != b),
            pauses=tuple(PauseWrite(b) for a, b in pauses if a.version == 1 and a != b),
        )
        if commit.calls or commit.pauses:
            self.store.commit(commit)

    def _onto(self, content: Content, id: str) -> Commit:
        """The commit that imports one checkpoint, with the numbers that everything in it will get if nobody comes first."""
        image = content.image
        row = image.checkpoints[0]
        last = imaging.numbers_of(self.store, image.row.task)
        taken = {b.name for b in self.store.branches(image.row.task)}
        branch = next(
            b for n in range(1, len(taken) + 2) if (b := f"import-{row.seq}" + (f"~{n}" if n > 1 else "")) not in taken
        )
        seq = last.seq + 1
        # Drawn, as a fork at the same moment takes the next one: two branches that shared a line would share a journal.
        line = last.line + 1 + secrets.randbelow(1000)
        nos = {call.no: last.call + 1 + i for i, call in enumerate(image.calls)}
        # Before whatever this line's calls will get from now on, and in the same order.
        shift = 1 + max([0, *(n for c in image.calls for n in (c.began, c.ended or 0, c.asked))])
        calls = [_call_onto(call, line, seq, nos, shift) for call in image.calls]
        pauses = [_pause_onto(pause, line, seq, nos) for pause in image.pauses]
        new = replace(row, id=id, branch=branch, parent_seq=None, kind="import", seq=0, seal=b"", pinned=False)
        return Commit(
            task=image.row.task,
            id=id,
            checkpoint=new,
            line=line,
            objects=image.objects,
            calls=tuple(map(CallWrite, calls)),
            pauses=tuple(map(PauseWrite, pauses)),
            writes=tuple(replace(write, checkpoint=id, seal=b"") for write in image.writes),
        )


def _call_onto(call: CallRow, line: int, seq: int, nos: dict[int, int], shift: int) -> CallRow:
    return replace(
        call,
        no=0,
        version=0,
        line=line,
        base_seq=seq,
        scope=call.scope if call.scope in (0, UNASKED) else nos.get(call.scope, call.scope),
        asked=call.asked - shift,
        began=call.began - shift,
        ended=None if call.ended is None else call.ended - shift,
        seal=b"",
    )


def _pause_onto(pause: PauseRow, line: int, seq: int, nos: dict[int, int]) -> PauseRow:
    call_no = None if pause.call_no is None else nos.get(pause.call_no)
    return replace(pause, no=0, version=0, line=line, base_seq=seq, call_no=call_no, seal=b"")


def _imported(content: Content, result: Any, branch: str, seq: int | None) -> ImportReport:
    image = content.image
    what: Any = content.what
    counts = len(image.checkpoints), len(image.calls), len(image.pauses), len(image.writes)
    return ImportReport(image.row.task, what, result, branch, seq, *counts)


# -- copying


def _names(store: Store) -> list[str]:
    names: list[str] = []
    while rows := store.tasks(after=names[-1] if names else None, limit=200):
        names += [row.task for row in rows]
    return names


def _left_of(store: Store, task: str) -> bool:
    """Whether anything is left of a task that has no row."""
    with closing(iter(store.walk(task))) as walk:  # type: ignore[type-var]
        return next(walk, None) is not None


def _copy(source: Store, target: Store, task: str, skip_damaged: bool, held: str) -> TaskCopy | None:
    """Copy a task; None if it has been deleted in the meantime."""
    lease = source.lease(task)
    if held == "refuse" and lease is not None and lease.live:
        raise holder.lease_held(task, lease.holder, lease.acquired_at)
    taken = imaging.take(source, task, skip_damaged=skip_damaged)
    if taken is None:
        return None
    image = taken.image
    other_layout = source.chunked != target.chunked
    packed = imaging.repacked(image, chunked=target.chunked) if other_layout else image
    result: Literal["copied", "updated", "unchanged"]
    try:
        how, there = imaging.put(target, packed)
        result = "copied" if how == "written" else "updated" if how == "marks" else "unchanged"
    except Conflict as error:
        old = imaging.take(target, task)
        if old is None or taken.skipped or not imaging.follows(packed, old.image):
            error.remedy = "Delete it there, or export this one and import it under another name; nothing was written."
            if old is not None and imaging.follows(old.image, packed):
                error.what = f"task {task!r} is there already, and has gone on there"
                error.why = "what is there is a copy of this one, and the newer of the two"
                error.remedy = "Go on with that one, and delete this one once it is not needed; nothing was written."
            raise
        _, there = imaging.put(target, packed, replaces=old.image)
        result = "updated"
    if other_layout and imaging.content_of(there, plain=True) != imaging.content_of(image, plain=True):
        raise Damaged(
            f"task {task!r} is not in {target.url} as it is in {source.url}",
            "what was read back differs",
            "Check that store with `safepoint check`.",
            task=task,
        )
    size = imaging.size_of(packed)
    counts = len(image.checkpoints), len(image.calls), len(image.pauses), size
    return TaskCopy(task, result, *counts, tuple(taken.skipped), len(image.writes))


# -- files


def _one(taken: imaging.Taken, seq: int, store: Store) -> Image:
    """One checkpoint and the journal that it stands on, as a task."""
    image = taken.image
    task = image.row.task
    row = next((c for c in image.checkpoints if c.seq == seq and c.space == ""), None)
    if row is None:
        bad = [what for what in taken.skipped if what.startswith(f"checkpoint {seq}:")]
        if bad:
            raise Damaged(f"task {task!r} is damaged: {bad[0]}", "", f"See `safepoint verify {task}`.", task=task, seq=seq)
        raise NotFound(f"task {task!r} has no checkpoint {seq}", "", f"See `safepoint log {task}`.", task=task)
    branch = next((b for b in image.branches if (b.space, b.name) == ("", row.branch)), None)
    if branch is None:  # it was dropped: no call is of it any more
        line = 1 + max([image.numbers.line, *(c.line for c in image.calls)])
        branch = BranchRow("", row.branch, Head(row.seq, row.id), line)
    is_head = branch.head.seq == seq and image.row.branch == branch.name
    if row.kind == "failure":
        row = replace(row, kind="import")  # it is the head of what is exported, and a failure is none
    row = _guarded(image, row, branch.line)
    branch = imaging.standing_at(branch, row)
    calls = tuple(c for c in image.calls if c.line == branch.line and c.step >= row.step)
    nos = {c.no for c in calls}
    return replace(
        image,
        row=_row_of_one(image.row, branch.name, is_head),
        branches=(branch,),
        checkpoints=(row,),
        calls=calls,
        pauses=tuple(
            replace(p, call_no=p.call_no if p.call_no in nos else None)
            for p in image.pauses
            if p.space == "" and p.line == branch.line and p.step >= row.step
        ),
        writes=tuple(w for w in image.writes if (w.space, w.checkpoint) == ("", row.id)),
        objects=image.objects,
    )


def _guarded(image: Image, row: CheckpointRow, line: int) -> CheckpointRow:
    """The row, with a guard where calls of the steps after it have gone with their checkpoints: see ``Control.guard``."""
    there = {c.seq: c for c in image.checkpoints}
    gap, furthest = False, row.step
    for branch in image.branches:
        if branch.line != line or branch.space:
            continue
        at = there.get(branch.head.seq)
        furthest = max(furthest, at.step if at is not None else 0)
        while at is not None and at.seq > row.seq:
            at = there.get(at.parent_seq or 0)
        gap |= at is None
    if not gap:
        return row
    objects = {obj.name: obj for obj in image.objects}
    own = portable.flat_of(row.root, row.refs, objects)[0].get("guard", 0)
    return states.with_guard(row, max(own, furthest + 1))


def _row_of_one(row: TaskRow, branch: str, is_head: bool) -> TaskRow:
    """An older checkpoint is one to go on from, however the task has ended since."""
    return row if is_head else replace(row, branch=branch, status="idle" if row.status == "idle" else "interrupted", raised=b"")


def _watched(lines: Iterator[bytes], progress: OnProgress | None, task: str, total: int | None) -> Iterator[bytes]:
    """The lines, with word of each checkpoint that has passed."""
    if progress is None:
        yield from lines
        return
    done = size = 0
    for line in lines:
        yield line
        size += len(line)
        if line.startswith(b'{"safepoint": ') and total is None:
            task, total = _announced(line, task)
        if line.startswith(b'{"checkpoint": '):
            done += 1
            _tell(progress, done, max(total or 0, done), size, task)
    if not done:
        _tell(progress, 0, 0, size, task)


def _announced(line: bytes, task: str) -> tuple[str, int]:
    """Name and number of checkpoints, as far as the first line of a file tells."""
    try:
        head = json.loads(line)["safepoint"]
        return task or str(head["task"])[:512], int(head["counts"]["checkpoints"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return task, 0


def _tell(progress: OnProgress | None, done: int, total: int, size: int, task: str) -> None:
    if progress is not None:
        progress(Progress(done, total, size, task))

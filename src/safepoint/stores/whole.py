"""What all stores do alike with a task that is written as a whole."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from safepoint.errors import Conflict
from safepoint.model import check_id
from safepoint.rows import BranchRow, CallRow, CheckpointRow, Image, Numbers, PauseRow, WriteRow, replace

__all__ = ["Facts", "another", "beyond", "facts", "facts_of", "fence_of", "sealed"]


class Facts(NamedTuple):
    """By what two tasks are told apart: the seals of their rows, and their branches."""

    checkpoints: frozenset[tuple[int, bytes]]
    calls: frozenset[tuple[int, bytes]]
    pauses: frozenset[tuple[int, bytes]]
    branches: frozenset[tuple[Any, ...]]
    writes: frozenset[tuple[Any, ...]] = frozenset()


def facts(
    checkpoints: Iterable[CheckpointRow],
    calls: Iterable[CallRow],
    pauses: Iterable[PauseRow],
    branches: Iterable[BranchRow],
    writes: Iterable[WriteRow] = (),
) -> Facts:
    return Facts(
        frozenset((row.seq, row.seal) for row in checkpoints),
        frozenset((row.no, row.seal) for row in calls),
        frozenset((row.no, row.seal) for row in pauses),
        frozenset((row.space, row.name, *row.head, row.line, row.forked_from) for row in branches),
        frozenset((*row.key, row.seal) for row in writes),
    )


def facts_of(image: Image) -> Facts:
    """Of an image whose rows are sealed: as it was walked, or after ``sealed``."""
    return facts(image.checkpoints, image.calls, image.pauses, image.branches, image.writes)


def fence_of(image: Image) -> int:
    """Above this begin the fences of the task, wherever it is written: receivers know no more than its name."""
    return max([image.fence, *(call.fence for call in image.calls)])


def beyond(image: Image, there: Numbers) -> Image:
    """The image with no number below what the task that it replaces has given out."""
    numbers = Numbers(**{name: max(getattr(image.numbers, name), getattr(there, name)) for name in Numbers.__struct_fields__})
    return replace(image, numbers=numbers)


def sealed(image: Image) -> Image:
    """The image as it is to be written: rows in order of their numbers, sealed for its task, and numbers not below theirs."""
    name = check_id(image.row.task)
    checkpoints = tuple(row.sealed(name) for row in sorted(image.checkpoints, key=lambda row: row.seq))
    calls = tuple(row.sealed(name) for row in sorted(image.calls, key=lambda row: row.no))
    pauses = tuple(row.sealed(name) for row in sorted(image.pauses, key=lambda row: row.no))
    writes = tuple(row.sealed(name) for row in sorted(image.writes, key=lambda row: row.key))
    given = image.numbers
    numbers = Numbers(
        seq=max([given.seq, *(row.seq for row in checkpoints[-1:])]),
        call=max([given.call, *(row.no for row in calls[-1:])]),
        pause=max([given.pause, *(row.no for row in pauses[-1:])]),
        line=max([given.line, *(row.line for row in image.branches)]),
        position=max([given.position, *(max(row.began, row.ended or 0) for row in calls)]),
    )
    return replace(image, numbers=numbers, checkpoints=checkpoints, calls=calls, pauses=pauses, writes=writes)


def another(task: str) -> Conflict:
    return Conflict(
        f"task {task!r} is there already and is another one",
        "its checkpoints, calls, pauses, writes or branches differ from those that were to be written",
        "Write it under another name, or delete the one that is there; nothing was written.",
        task=task,
    )

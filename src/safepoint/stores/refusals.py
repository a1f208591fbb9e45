"""What a store says when it refuses: one wording, and one set of details, for all stores."""

from __future__ import annotations

from safepoint.errors import Conflict, LeaseLost, NotFound, UsageError
from safepoint.rows import BranchWrite, Commit, Committed, Guard, Head

__all__ = [
    "changed",
    "existing",
    "gone",
    "has_others",
    "lost",
    "moved",
    "moved_away",
    "no_row",
    "no_task",
    "not_at_head",
    "stale",
]


def existing(commit: Commit, head: Head | None, seq: int, branch: str, parent_seq: int | None, digest: bytes) -> Committed:
    """The answer to a commit whose checkpoint id is there already, with the last four as its fields; UsageError if it is another state's.

    ``head`` is where that checkpoint's branch stands now.
    """
    new = commit.checkpoint
    assert new is not None
    if (branch, parent_seq, digest) != (new.branch, new.parent_seq, new.digest):
        raise UsageError(
            f"checkpoint id {commit.id!r} of task {commit.task!r} is taken",
            "another state was saved under it",
            "Use a new id for each checkpoint.",
            task=commit.task,
            id=commit.id,
        )
    return Committed(seq, head, True)


def no_task(task: str) -> NotFound:
    return NotFound(f"task {task!r} does not exist", "", "Save a checkpoint of it first.", task=task)


def gone(task: str, on: Head) -> NotFound:
    return NotFound(
        f"checkpoint {task}@{on.seq} is gone",
        "this commit stands on it",
        "Load the task again; nothing was written.",
        task=task,
        seq=on.seq,
    )


def moved(commit: Commit, head: Head | None) -> Conflict:
    """The checkpoint's branch stands at ``head`` and not at ``commit.expect``."""
    assert commit.checkpoint is not None
    return _elsewhere(commit.task, commit.checkpoint.branch, head, commit.expect, "a new branch was expected")


def moved_away(task: str, move: BranchWrite, head: Head | None) -> Conflict:
    """A branch that is to be set back or dropped stands at ``head`` and not where it was seen."""
    return _elsewhere(task, move.name, head, move.expect, "")


def has_others(task: str, branch: str) -> UsageError:
    return UsageError(
        f"the current branch {branch!r} of task {task!r} cannot be dropped",
        "the task has other branches",
        "Make one of them current first; nothing was written.",
        task=task,
        branch=branch,
    )


def not_at_head(commit: Commit, branch: str, head: Head | None) -> Conflict:
    """The current branch stands at ``head`` and not at ``commit.stands_on``."""
    return _elsewhere(commit.task, branch, head, commit.stands_on, "no branch was expected")


def _elsewhere(task: str, branch: str, head: Head | None, expected: Head | None, none: str) -> Conflict:
    where = "it does not exist" if head is None else f"it stands at {head.seq}"
    wanted = none if expected is None else f"{expected.seq} was expected"
    if head is not None and expected is not None and head.seq == expected.seq:
        wanted += ", with another id"
    return Conflict(
        f"branch {branch!r} of task {task!r} has moved",
        f"{where}, {wanted}",
        "Load it again; nothing was written.",
        task=task,
        branch=branch,
        head=None if head is None else head.seq,
    )


def no_row(task: str, kind: str, no: int) -> NotFound:
    return NotFound(f"{kind} {no} of task {task!r} does not exist", task=task, row=f"{kind} {no}")


def changed(task: str, kind: str, no: int, there: int, expected: int) -> Conflict:
    """A call or pause is at version ``there``; if that is what was expected, it is another one."""
    why = (
        f"it is at version {there}, not {expected}"
        if there != expected
        else "another one has its number: the store has gone back"
    )
    return Conflict(
        f"{kind} {no} of task {task!r} has changed",
        why,
        "Read it again; nothing was written.",
        task=task,
        row=f"{kind} {no}",
    )


def lost(task: str, guard: Guard, fence: int | None) -> LeaseLost:
    """``fence`` is that of whoever holds the lease now, None if nobody does."""
    now = "nobody holds it" if fence in {None, guard.fence} else f"the fence is {fence}"
    return LeaseLost(
        f"the hold of task {task!r} with fence {guard.fence} is over", now, "Resume the task; nothing was written.", task=task
    )


def stale(task: str) -> Conflict:
    return Conflict(f"task {task!r} has changed while it was looked at", "", "Repair it again; nothing was changed.", task=task)

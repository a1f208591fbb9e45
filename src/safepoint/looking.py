"""A look at one checkpoint: whether it can be read and decoded, and whether it is healthy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from safepoint.errors import (
    Damaged,
    InvalidState,
    LeaseLost,
    MissingExtra,
    NewerFormat,
    NewerSchema,
    NotFound,
    RefusedType,
    SafepointError,
    StoreFull,
    Unavailable,
    UsageError,
)
from safepoint.model import State
from safepoint.rules import health
from safepoint.rules.health import Check
from safepoint.rules.recovery import Verdict

if TYPE_CHECKING:
    from safepoint.checkpointer import Checkpointer

NEVER_PASSED = (Unavailable, StoreFull, UsageError, LeaseLost, MissingExtra, NewerFormat, NewerSchema)
"""Errors that say nothing against what is stored: nobody falls back for them. The newer ones mean that the program is old."""


@dataclass(slots=True, repr=False)
class Looked:
    verdict: Verdict
    state: State | None = None
    error: Exception | None = None


def look(cp: Checkpointer, task: str, seq: int | None, checks: Iterable[Check], requires: Sequence[str] = ()) -> Looked | None:
    """Load a checkpoint (None: the head of the current branch) and ask the health checks. None if the task has none at all.

    Raises:
        Unavailable and what else says nothing against what is stored; Damaged if the whole task is older than it was.
    """
    n = seq or 0
    try:
        state = cp._load(task) if seq is None else cp._load(task, seq=seq)
        if state is None:
            if seq is None:
                if cp._with_checkpoints(task) is None:
                    return None
                state = cp.load_latest(task)  # which says what is wrong, if it has not come meanwhile
            if state is None:
                raise NotFound(f"task {task!r} has no checkpoint with seq {seq}", "", "See list_checkpoints.", task=task)
    except NEVER_PASSED:
        raise
    except Damaged as error:
        if error.details.get("rolled_back"):
            raise
        return Looked(Verdict(n or error.details.get("seq") or 0, "damaged"), None, error)
    except NotFound as error:
        return Looked(Verdict(n, "missing"), None, error)
    except RefusedType as error:
        return Looked(Verdict(n or error.details.get("seq") or 0, "refused", _what(error)), None, error)
    except Exception as error:  # of a state that breaks a rule; of a migration, which may raise whatever it likes
        details = error.details if isinstance(error, SafepointError) else {}
        return Looked(Verdict(n or details.get("seq") or 0, "invalid", _reason(error)), None, error)
    assert state.seq is not None
    ill = unwell(state, checks, requires)
    if ill:
        return Looked(Verdict(state.seq, "unhealthy", ill), state, _unhealthy(state, ill))
    return Looked(Verdict(state.seq), state)


def _unhealthy(state: State, ill: str) -> InvalidState:
    task = state.task_id
    return InvalidState(
        f"{task}@{state.seq} is unhealthy", ill, f"Go back: cp.rewind({task!r}, seq).", task=task, seq=state.seq
    )


def _reason(error: Exception) -> str:
    """Why a state is none, in a line: what the library says of it names no content. Nothing is said of what others may raise."""
    if not isinstance(error, InvalidState):
        return type(error).__name__
    version = error.details.get("version")
    if version is None:
        return error.why or error.what
    return f"the migration {version} -> {version + 1} has failed, {error.why}"


def _what(error: RefusedType) -> str:
    kind = error.details.get("type")
    return kind if isinstance(kind, str) else ""


def unwell(state: State, checks: Iterable[Check], requires: Sequence[str] = ()) -> str:
    """What is wrong with a state: by the checks, and by what is required now or was when it was saved."""
    wanted = tuple(requires) or state._base.control.requires
    every = (*checks, health.requires(*wanted)) if wanted else tuple(checks)
    return health.ailing(state, every)

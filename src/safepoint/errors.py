"""Every error of the library, one tree.

SafepointError                     what happened, why, and what to do about it
├── NotFound (LookupError)         the task, checkpoint, call or pause that was named does not exist
├── Unavailable (ConnectionError)  the store did not answer in time; nothing is known to be wrong with the data
├── Damaged (ValueError)           what is stored does not pass its own check
├── NewerFormat (ValueError)       stored by a newer safepoint; left as it is
├── NewerSchema (ValueError)       stored by a newer version of the application; left as it is
├── RefusedType (TypeError)        a value of a type that is not registered, cannot be stored, or nests too deep
├── InvalidState (ValueError)      a state that breaks a rule of the model
├── Conflict                       the branch has moved since this state was loaded
│   └── MergeConflict              two branches changed the same key and no reducer decides
├── LeaseHeld                      a live run holds the task
├── LeaseLost                      this run's hold of the task was taken over
├── InDoubt                        a write may or may not have happened, and only a person can say
├── DecisionNeeded                 a person has to answer a pause, or to choose how to recover
├── CallMismatch                   the same call id came with other arguments
├── CallInProgress                 the same call is being executed by somebody else
├── CallFailed                     a tool failed, now or when it was first called
├── AlreadyAnswered                the pause has been answered before
├── StoreFull (OSError)            the disk, or the quota of the store, is used up
├── MissingExtra (ImportError)     an optional package is not installed
└── UsageError (ValueError)        the library was called in a way that it does not offer

Each leaf also inherits the built-in error that one would catch for it, survives pickling, and carries ``what``, ``why`` and
``remedy``. No message ever shows the content of a state.
"""

from __future__ import annotations

from typing import Any, Self

__all__ = [
    "AlreadyAnswered",
    "CallFailed",
    "CallInProgress",
    "CallMismatch",
    "Conflict",
    "Damaged",
    "DecisionNeeded",
    "DidNotHappen",
    "InDoubt",
    "InvalidState",
    "LeaseHeld",
    "LeaseLost",
    "MergeConflict",
    "MissingExtra",
    "NewerFormat",
    "NewerSchema",
    "NotFound",
    "RefusedType",
    "RunEnded",
    "SafepointError",
    "StoreFull",
    "Unavailable",
    "UsageError",
]


class SafepointError(Exception):
    """The root of all errors that this library raises on purpose.

    Attributes:
        what: What happened, with the name of the thing it happened to.
        why: The cause; may be empty where ``what`` says it all.
        remedy: What to do now; a command or a change of code.
        details: Machine-readable facts (task, seq, path ...), never the content of a state.
    """

    def __init__(self, what: str, why: str = "", remedy: str = "", **details: Any) -> None:
        super().__init__(what, why, remedy)
        self.what = what
        self.why = why
        self.remedy = remedy
        self.details = details

    def __str__(self) -> str:
        text = self.what
        if self.why:
            text += f": {self.why}"
        if self.remedy:
            text += f". {self.remedy}"
        return text

    def __reduce__(self) -> tuple[Any, ...]:
        return (
            _revive,
            (type(self), self.what, self.why, self.remedy, self.details),
            {"__notes__": getattr(self, "__notes__", [])},
        )


def _revive(cls: type[SafepointError], what: str, why: str, remedy: str, details: dict[str, Any]) -> SafepointError:
    return cls(what, why, remedy, **details)


class NotFound(SafepointError, LookupError):
    """The task, checkpoint, call or pause that was named does not exist."""

    __str__ = SafepointError.__str__


class Unavailable(SafepointError, ConnectionError):
    """The store could not be reached, or did not answer in time.

    Where a commit's outcome is not known, ``details["id"]`` is the checkpoint id to ask for: ``cp.load(task, id=…)``.
    """

    __str__ = SafepointError.__str__


class Damaged(SafepointError, ValueError):
    """What is stored does not pass its own integrity check, or cannot be decoded."""


class NewerFormat(SafepointError, ValueError):
    """The checkpoint was written by a newer safepoint than this one. It is left alone."""


class NewerSchema(SafepointError, ValueError):
    """The checkpoint was written by a newer version of the application than ``schema_version`` says."""


class RefusedType(SafepointError, TypeError):
    """A value cannot be stored or loaded; ``details`` has its ``path`` and ``type``, never its content."""


class InvalidState(SafepointError, ValueError):
    """The state breaks a rule of the model."""


class Conflict(SafepointError):
    """The branch has moved since this state was loaded; this commit wrote nothing."""


class MergeConflict(Conflict):
    """Two branches changed the same keys and no reducer decides; nothing was written."""


class LeaseHeld(SafepointError):
    """A live run holds the task; ``details`` tells who (pid, host, since when, stopped or not)."""


class LeaseLost(SafepointError):
    """This run's hold of the task was taken over, or has ended. It can write nothing any more."""


class InDoubt(SafepointError):
    """A write may or may not have happened. ``details["calls"]`` lists the numbers to ``resolve``."""


class DecisionNeeded(SafepointError):
    """A person's word is needed before the task can go on.

    For a pause that waits for its answer ``details["pauses"]`` lists the numbers to ``answer``; where recovery was told to wait
    for a choice, ``details["plan"]`` has the candidates.
    """


class CallMismatch(SafepointError):
    """Within one model reply the same call id came with other arguments."""


class CallInProgress(SafepointError):
    """The same call is being executed by another live run."""


class CallFailed(SafepointError):
    """A tool failed. Raised alike when it happens and when it is replayed.

    Attributes:
        type: Module-qualified name of the tool's exception.
        message: Its text.
        call: Number of the call in the journal.
    """

    @property
    def type(self) -> str:
        return str(self.details.get("type", ""))

    @property
    def message(self) -> str:
        return str(self.details.get("message", ""))

    @property
    def call(self) -> int:
        return int(self.details.get("call", 0))


class AlreadyAnswered(SafepointError):
    """The pause has been answered before; the first answer stands."""


class StoreFull(SafepointError, OSError):
    """No room is left on the disk or in the store's quota."""

    __str__ = SafepointError.__str__


class MissingExtra(SafepointError, ImportError):
    """An optional package is not installed; ``remedy`` is the exact ``pip install`` line."""

    __str__ = SafepointError.__str__


class UsageError(SafepointError, ValueError):
    """The library was called in a way that it does not offer."""


class DidNotHappen(Exception):
    """Raised by a tool to say: I failed, and I am certain that the effect did not happen."""


class RunEnded(BaseException):
    """Raised inside a step when its run is over: a call is in doubt, the lease is lost, or a pause waits for an answer.

    It is no ``Exception``, so that an agent's ``except Exception`` does not swallow it, and it is sticky: every later call,
    save or finish of the same run raises it again. ``error`` is the public error that leaving the run raises.
    """

    def __init__(self, error: SafepointError) -> None:
        super().__init__(error)
        self.error = error

    def __str__(self) -> str:
        return str(self.error)

    def __reduce__(self) -> tuple[type[Self], tuple[SafepointError]]:
        return type(self), (self.error,)

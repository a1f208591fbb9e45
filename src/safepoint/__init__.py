"""Checkpoints for AI agents: stopped at any moment, carried on from the last whole step.

>>> import safepoint
>>> cp = safepoint.open("memory://")
>>> state = cp.load_latest("task-1") or safepoint.State(task_id="task-1")
>>> state.messages.append({"role": "user", "content": "hello"})
>>> cp.save(state)
<Checkpoint task-1@1 branch=main step=0 kind=manual>
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from safepoint._version import __version__
from safepoint.agent import run_agent
from safepoint.checkpointer import Checkpointer, open
from safepoint.codec.kinds import MissingMember
from safepoint.codec.registry import register
from safepoint.codec.resource import Resource
from safepoint.codec.sdk import wire
from safepoint.doctoring import Doctor
from safepoint.errors import (
    AlreadyAnswered,
    CallFailed,
    CallInProgress,
    CallMismatch,
    Conflict,
    Damaged,
    DecisionNeeded,
    DidNotHappen,
    InDoubt,
    InvalidState,
    LeaseHeld,
    LeaseLost,
    MergeConflict,
    MissingExtra,
    NewerFormat,
    NewerSchema,
    NotFound,
    RefusedType,
    RunEnded,
    SafepointError,
    StoreFull,
    Unavailable,
    UsageError,
)
from safepoint.holding import Lease
from safepoint.integrity import Repair
from safepoint.model import (
    Call,
    Checkpoint,
    CleanupLine,
    CleanupReport,
    Done,
    Finding,
    Metrics,
    NotDone,
    Outcome,
    Pause,
    Recovery,
    Retention,
    Retry,
    State,
    StepResult,
    StoreCleanup,
    TaskInfo,
    Unknown,
)
from safepoint.moving import CopyReport, ExportReport, ImportReport, Progress, TaskCopy
from safepoint.resources import resource
from safepoint.rules.collecting import Collector
from safepoint.rules.diffing import Change, Diff
from safepoint.rules.health import messages_complete, requires
from safepoint.rules.planning import Branch, Candidate, Plan, PlannedCall
from safepoint.rules.verifying import Damage, Verification
from safepoint.run import Run
from safepoint.streaming import AsyncStream, Stream
from safepoint.tools import Tool, model, tool

if TYPE_CHECKING:
    from safepoint import history
    from safepoint.aio import AsyncCheckpointer, AsyncRun, open_async, run_agent_async

__all__ = [
    "AlreadyAnswered",
    "AsyncCheckpointer",
    "AsyncRun",
    "AsyncStream",
    "Branch",
    "Call",
    "CallFailed",
    "CallInProgress",
    "CallMismatch",
    "Candidate",
    "Change",
    "Checkpoint",
    "Checkpointer",
    "CleanupLine",
    "CleanupReport",
    "Collector",
    "Conflict",
    "CopyReport",
    "Damage",
    "Damaged",
    "DecisionNeeded",
    "DidNotHappen",
    "Diff",
    "Doctor",
    "Done",
    "ExportReport",
    "Finding",
    "ImportReport",
    "InDoubt",
    "InvalidState",
    "Lease",
    "LeaseHeld",
    "LeaseLost",
    "MergeConflict",
    "Metrics",
    "MissingExtra",
    "MissingMember",
    "NewerFormat",
    "NewerSchema",
    "NotDone",
    "NotFound",
    "Outcome",
    "Pause",
    "Plan",
    "PlannedCall",
    "Progress",
    "Recovery",
    "RefusedType",
    "Repair",
    "Resource",
    "Retention",
    "Retry",
    "Run",
    "RunEnded",
    "SafepointError",
    "State",
    "StepResult",
    "StoreCleanup",
    "StoreFull",
    "Stream",
    "TaskCopy",
    "TaskInfo",
    "Tool",
    "Unavailable",
    "Unknown",
    "UsageError",
    "Verification",
    "__version__",
    "history",
    "messages_complete",
    "model",
    "open",
    "open_async",
    "register",
    "requires",
    "resource",
    "run_agent",
    "run_agent_async",
    "tool",
    "wire",
]

_ASYNC = frozenset({"AsyncCheckpointer", "AsyncRun", "open_async", "run_agent_async"})


def __getattr__(name: str) -> Any:
    # The async face brings asyncio along, which sync programs need not pay for.
    if name in _ASYNC:
        from safepoint import aio

        return getattr(aio, name)
    if name == "history":  # looked for by those who keep messages of a provider
        import importlib

        return importlib.import_module("safepoint.history")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

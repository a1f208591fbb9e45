"""Checkpoints for AI agents: stopped at any moment, carried on from the last whole step.

>>> import safepoint
>>> cp = safepoint.open("memory://")
>>> state = cp.load_latest("task-1") or safepoint.State(task_id="task-1")
>>> state.messages.append({"role": "user", "content": "hello"})
>>> cp.save(state)
<Checkpoint task-1@1 branch=main step=0 kind=manual>
"""

from __future__ import annotations

from safepoint import errors
from safepoint._version import __version__
from safepoint.agent import run_agent
from safepoint.aio import AsyncCheckpointer, AsyncRun, open_async, run_agent_async
from safepoint.checkpointer import Checkpointer, open
from safepoint.codec.registry import register
from safepoint.errors import *  # noqa: F403
from safepoint.model import (
    Call,
    Checkpoint,
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
    TaskInfo,
    Unknown,
)
from safepoint.rules.planning import Plan, PlannedCall
from safepoint.run import Run
from safepoint.tools import Tool, model, tool

__all__ = [
    "AsyncCheckpointer",
    "AsyncRun",
    "Call",
    "Checkpoint",
    "Checkpointer",
    "CleanupReport",
    "Done",
    "Finding",
    "Metrics",
    "NotDone",
    "Outcome",
    "Pause",
    "Plan",
    "PlannedCall",
    "Recovery",
    "Retention",
    "Retry",
    "Run",
    "State",
    "StepResult",
    "TaskInfo",
    "Tool",
    "Unknown",
    "__version__",
    "model",
    "open",
    "open_async",
    "register",
    "run_agent",
    "run_agent_async",
    "tool",
    *errors.__all__,
]

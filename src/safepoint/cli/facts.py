"""What the commands tell, as JSON data: the one form that both outputs are made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from safepoint.cli.text import iso
from safepoint.codec import masked, states, to_json
from safepoint.codec.registry import Registry
from safepoint.codec.states import Control
from safepoint.errors import SafepointError
from safepoint.holding import Lease
from safepoint.model import Checkpoint, Finding, Metrics, Obj, Pause, TaskInfo
from safepoint.rows import CallRow, CheckpointRow
from safepoint.rules.planning import Plan
from safepoint.steps import book_of
from safepoint.stores import holder

__all__ = ["call", "checkpoint", "damaged", "error", "finding", "header", "lease", "pause", "plan", "task"]

Facts = dict[str, Any]
_NO_CLASSES = Registry()


def task(info: TaskInfo) -> Facts:
    return {
        "task_id": info.task_id,
        "status": info.status,
        "unfinished": info.unfinished,
        "step": info.step,
        "branch": info.branch,
        "head": info.seq,
        "checkpoints": info.checkpoints,
        "pending": info.pending,
        "attempts": info.attempts,
        "agent": info.agent,
        "reason": info.reason,
        "created_at": iso(info.created_at),
        "updated_at": iso(info.updated_at),
        "holder": _plain(info.holder),
    }


def lease(found: Lease) -> Facts:
    return {
        "task_id": found.task_id,
        "standing": found.standing,
        "fence": found.fence,
        "pid": _plain(found.holder.get("pid")),
        "host": _plain(found.holder.get("host")),
        "program": _plain(found.holder.get("program")),
        "since": iso(found.since),
        "until": iso(found.until),
        "here": holder.is_local(dict(found.holder)),
    }


def checkpoint(task_id: str, row: CheckpointRow) -> Facts:
    return {**header(states.header(task_id, row, _NO_CLASSES)), "metadata": to_json(masked(states.plain_metadata(row)))}


def header(head: Checkpoint) -> Facts:
    """All but the metadata, which may have classes in it."""
    return {
        "task_id": head.task_id,
        "seq": head.seq,
        "id": head.id,
        "branch": head.branch,
        "parent_seq": head.parent_seq,
        "step": head.step,
        "kind": head.kind,
        "label": _plain(head.label),
        "created_at": iso(head.created_at),
        "schema_version": head.schema_version,
        "bytes": head.bytes,
        "digest": head.digest,
        "pinned": head.pinned,
        "metrics": {f: getattr(head.metrics, f) for f in Metrics.__slots__} if head.metrics else None,
    }


def products(tree: Facts) -> dict[str, str]:
    """How each named step stands."""
    return book_of(Control.of(tree)).standings()


def call(task_id: str, row: CallRow, objects: Mapping[bytes, Obj] | None) -> Facts:
    """A call; arguments and result only where ``objects`` has them. A row that is damaged says so and no more."""
    try:
        row.check(task_id, f"call {row.no}")
        c = states.call(task_id, row, objects, None)
    except SafepointError as problem:
        return {"no": row.no, "status": "damaged", "error": {"type": type(problem).__name__, "message": str(problem)}}
    took = (c.finished_at - c.started_at).total_seconds() * 1000 if c.finished_at and c.started_at else None
    facts: Facts = {
        "no": c.no,
        "step": c.step,
        "line": row.line,
        "tool": c.tool,
        "effect": c.effect,
        "status": c.status,
        "superseded": row.superseded,
        "result_missing": c.status == "succeeded" and row.result is None,
        "attempts": c.attempts,
        "call_id": c.call_id,
        "idempotency_key": c.idempotency_key,
        "has_verifier": c.has_verifier,
        "fence": c.fence,
        "started_at": iso(c.started_at),
        "finished_at": iso(c.finished_at),
        "ms": None if took is None else round(took, 3),
        "error": _plain(c.error),
        "model": _plain(c.model),
        "reason": c.reason,
    }
    if objects is not None:
        # Both are JSON data already: states.call has read them without classes.
        facts["arguments"] = c.arguments
        facts["result"] = c.result
    return facts


def damaged(found: list[Facts]) -> list[int]:
    return [c["no"] for c in found if c["status"] == "damaged"]


def pause(p: Pause) -> Facts:
    return {
        "no": p.no,
        "name": p.name,
        "status": p.status,
        "step": p.step,
        "question": p.question,
        "answer": p.answer,
        "asked_at": iso(p.asked_at),
        "answered_at": iso(p.answered_at),
    }


def plan(p: Plan) -> Facts:
    return {
        "task_id": p.task_id,
        "status": p.status,
        "does": p.does,
        "why": p.why,
        "seq": p.seq,
        "step": p.step,
        "skipped": [{"seq": seq, "why": why} for seq, why in p.skipped],
        "calls": [
            {
                "no": c.call.no,
                "step": c.call.step,
                "tool": c.call.tool,
                "effect": c.call.effect,
                "status": c.call.status,
                "attempts": c.call.attempts,
                "action": c.action,
                "reason": c.call.reason,
            }
            for c in p.calls
        ],
        "pauses": list(p.pauses),
        "products": dict(p.products),
        "newest": p.newest,
        "branch": p.branch,
        "guard": p.guard,
        "candidates": [
            {
                "seq": c.seq,
                "taken": c.taken,
                "problem": c.problem,
                "step": c.step,
                "branch": c.branch,
                "kind": c.kind,
                "label": _plain(c.label),
                "created_at": iso(c.created_at),
            }
            for c in p.candidates
        ],
    }


def finding(f: Finding) -> Facts:
    return {"name": f.name, "level": f.level, "text": f.text, "remedy": f.remedy}


def error(problem: SafepointError, remedy: str) -> Facts:
    return {
        "type": type(problem).__name__,
        "what": _text(problem.what),
        "why": _text(problem.why),
        "remedy": _text(remedy),
        "details": {k: v for k, v in problem.details.items() if _is_json(v)},
    }


def _text(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _is_json(value: Any) -> bool:
    """Details may hold rows and plans, which are no data for others."""
    if isinstance(value, str):
        return _text(value) == value
    if isinstance(value, dict):
        return all(isinstance(k, str) and _is_json(k) and _is_json(v) for k, v in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_json, value))
    return value is None or isinstance(value, bool | int)


def _plain(value: Any) -> Any:
    return to_json(dict(value) if isinstance(value, Mapping) else value)

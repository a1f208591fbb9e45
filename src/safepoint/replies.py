"""What is recorded of a reply or an exception beside the value itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from safepoint.errors import CallFailed, Damaged, InDoubt, RefusedType
from safepoint.rows import CallRow

_MESSAGE_LIMIT = 2000


def error_record(error: BaseException) -> bytes:
    if isinstance(error, RefusedType):
        message = str(error)
    else:
        message = _text(error)
    cls = type(error)
    return msgspec.msgpack.encode(
        {
            "type": f"{cls.__module__}.{cls.__qualname__}",
            "message": message.encode("utf-8", "replace").decode()[:_MESSAGE_LIMIT],
        }
    )


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # somebody's __str__ must not turn a failed call into a lost one
        return ""


def get(reply: Any, name: str) -> Any:
    return reply.get(name) if isinstance(reply, Mapping) else getattr(reply, name, None)


def usage_of(reply: Any) -> tuple[int, int]:
    """Tokens in and out as a reply tells them: OpenAI's ``prompt_tokens``/``completion_tokens`` or Anthropic's (and OpenAI
    Responses') ``input_tokens``/``output_tokens``."""
    usage = get(reply, "usage")
    if usage is None:
        return 0, 0

    def first(*names: str) -> int:
        return next((v for n in names if type(v := get(usage, n)) is int), 0)

    return first("prompt_tokens", "input_tokens"), first("completion_tokens", "output_tokens")


def lost_error(task: str, row: CallRow) -> RefusedType:
    """A call that happened and has no result to give, as it could not be stored."""
    error = msgspec.msgpack.decode(row.error) if row.error else {}
    return RefusedType(
        f"call {row.no} ({row.tool}) succeeded, and its result cannot be stored",
        str(error.get("message", "")),
        f"It is not run again. Give it a result: cp.resolve({task!r}, {row.no}, Done(result)), or "
        f"`safepoint resolve {task} {row.no} --done JSON`; and let the tool return what can be stored (docs/types.md).",
        task=task,
        call=row.no,
    )


def damaged_error(task: str, row: CallRow, error: Damaged) -> Damaged:
    """A call that happened and whose recorded result cannot be read."""
    return Damaged(
        f"call {row.no} ({row.tool}) succeeded, and its result cannot be read",
        ": ".join(filter(None, (error.what, error.why))),
        f"It is not run again. Give it a result: cp.resolve({task!r}, {row.no}, Done(result)), or "
        f"`safepoint resolve {task} {row.no} --done JSON`.",
        task=task,
        call=row.no,
    )


def failed_error(row: CallRow) -> CallFailed:
    error = msgspec.msgpack.decode(row.error) if row.error else {}
    return CallFailed(
        f"call {row.no} ({row.tool}) failed",
        f"{error.get('type', '?')}: {error.get('message', '')}",
        "",
        type=error.get("type", ""),
        message=error.get("message", ""),
        call=row.no,
    )


def in_doubt_error(task: str, *rows: CallRow) -> InDoubt:
    names = ", ".join(f"{r.no} ({r.tool})" for r in rows)
    reason = "; ".join(r.reason for r in rows if r.reason)
    return InDoubt(
        f"task {task!r} has calls in doubt: {names}",
        reason or "they may or may not have happened",
        f"Find out, and tell: cp.resolve({task!r}, {rows[0].no}, Done(result) | NotDone()), or `safepoint resolve`.",
        task=task,
        calls=[r.no for r in rows],
    )

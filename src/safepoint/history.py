"""Message histories as providers take them: ``check``, ``repair`` and ``trim`` for OpenAI Chat Completions, OpenAI Responses and
Anthropic Messages.

>>> from safepoint import history
>>> history.check([{"role": "tool", "tool_call_id": "c1", "content": "12"}])[0].rule
'C2'

Messages may be dicts or the SDKs' own objects; none is changed. docs/histories.md tells the rules.
"""

from __future__ import annotations

from collections.abc import Callable

from safepoint.model import State
from safepoint.rules.health import unlasting
from safepoint.rules.history import (
    INTERRUPTED,
    RULES,
    Answer,
    Context,
    Fault,
    Open,
    Repaired,
    Rule,
    check,
    detect,
    prefix_of,
    repair,
    trim,
)

__all__ = [
    "INTERRUPTED", "RULES", "Answer", "Context", "Fault", "Open", "Repaired", "Rule", "check", "detect", "healthy", "prefix_of",
    "repair", "trim",
]  # fmt: skip


def healthy(context: Context, *, but: tuple[str, ...] = ()) -> Callable[[State], str | None]:
    """``safepoint.messages_complete`` with a context, for ``health=[…]``.

    Args:
        but: Ids of rules to pass over, where messages are put right when they are sent.
    """

    def check(state: State) -> str | None:
        return unlasting(state, context, but)

    check.__name__ = "messages_complete"
    return check

"""Whether a restored state is one that an agent can go on with; pure.

A health check is a function of the state. It returns None or True if all is well, and text (the reason) or False if not; an
exception counts as not well. It must not change the state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from safepoint.codec.kinds import Tagged
from safepoint.errors import UsageError
from safepoint.model import State, a_type

__all__ = ["GONE", "Check", "ailing", "checks", "follow", "messages_complete", "missing", "paths", "requires", "unlasting"]

Check = Callable[[State], Any]

GONE = object()
_MARKS = ("", "-", ".", "+", "~")
"""Before the names of fields, where an instance is read without its class."""
_OF_STATE = ("messages", "metadata", "agent_state")


def checks(given: object, name: str = "health=") -> tuple[Check, ...]:
    """The checks of an option, as a tuple."""
    several = (given,) if callable(given) else given
    found: tuple[Any, ...] = tuple(several) if isinstance(several, Iterable) else (None,)
    if not all(map(callable, found)):
        raise UsageError(f"{name} must be a list of functions of the state", "", "Pass [safepoint.messages_complete].")
    return found


def paths(given: object) -> tuple[str, ...]:
    """The paths of ``requires``, as a tuple."""
    several = (given,) if isinstance(given, str) else given
    if not isinstance(several, Iterable):
        raise UsageError("requires= must be a list of paths", f"it is {a_type(given)}", 'Pass ["goal", "plan.steps"].')
    found = tuple(several)
    for path in found:
        if type(path) is not str or not all(path.split(".")):
            raise UsageError("requires= must be a list of paths", "one is blank or no text", 'Write them as "plan.steps".')
    return found


def ailing(state: State, every: Iterable[Check]) -> str:
    """What is wrong with the state, or ''."""
    for check in every:
        name = getattr(check, "__name__", type(check).__name__)
        try:
            found = check(state)
        except Exception as error:
            return f"{name} raised {type(error).__name__}"  # its text may show what is in the state
        if found is not None and found is not True:
            return found if isinstance(found, str) and found else f"{name} says no"
    return ""


# -- fields


def requires(*fields: str) -> Check:
    """A check that these are there and not None: ``requires("goal", "plan.steps")``.

    Each is a path of keys or attributes within ``agent_state``; one that begins with ``messages``, ``metadata`` or
    ``agent_state`` is looked for in the state itself if ``agent_state`` has no such thing. A state before the first step has
    had no chance to fill anything in: it passes.
    """
    wanted = paths(fields)

    def check(state: State) -> str | None:
        if state.step == 0:
            return None
        lacking = missing(state, wanted)
        return f"{', '.join(lacking)} {'is' if len(lacking) == 1 else 'are'} missing" if lacking else None

    check.__name__ = "requires"
    return check


def missing(state: State, wanted: Sequence[str]) -> list[str]:
    """Which of the paths lead nowhere, or to None."""
    lacking = []
    for path in wanted:
        parts = path.split(".")
        found = follow(state.agent_state, parts)
        if found is GONE and parts[0] in _OF_STATE:
            found = follow(getattr(state, parts[0]), parts[1:])
        if found is GONE or found is None:
            lacking.append(path)
    return lacking


def follow(value: Any, parts: Sequence[str]) -> Any:
    """What a path of keys, indexes and attributes leads to, or ``GONE``."""
    for part in parts:
        if isinstance(value, Tagged):  # read without classes: the fields are in the payload, some with a mark before the name
            value = value.value
            if isinstance(value, Mapping):
                part = next((mark + part for mark in _MARKS if mark + part in value), part)
        if isinstance(value, Mapping):
            value = value.get(part, GONE)
        elif isinstance(value, list | tuple) and part.isdecimal():
            value = value[int(part)] if int(part) < len(value) else GONE
        else:
            value = getattr(value, part, GONE)
        if value is GONE:
            break
    return value


# -- histories


def messages_complete(state: State) -> str | None:
    """A check that ``messages`` is a history that its provider takes, or will be once its tail is mended: each tool call has its
    answer right where the provider wants it, and whatever else docs/histories.md lists.

    The last assistant turn may be open or cut off; a resume sees to that. Knows OpenAI Chat Completions, OpenAI Responses and
    Anthropic Messages; messages of no known format pass. ``metadata["history"]`` may say more, see ``history.Context``.
    """
    return unlasting(state)


def unlasting(state: State, context: Any = None, but: Sequence[str] = ()) -> str | None:
    """The first rule that a state's messages break and no repair of the tail mends, or None."""
    from safepoint.rules import history  # of use to those who ask

    known = history.context_in(state.metadata) if context is None else context
    return next((str(f) for f in history.lasting(state.messages, known) if f.rule not in but), None)

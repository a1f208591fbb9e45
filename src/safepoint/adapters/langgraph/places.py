"""Where in a graph a call is made, and errors that no node takes for a tool's own."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, cast

from langgraph.config import get_config
from langgraph.errors import GraphBubbleUp

from safepoint.errors import SafepointError, UsageError

__all__ = ["Attempt", "Place", "is_of_run", "loud", "place_of", "puts_at_end"]

_kinds: dict[type[SafepointError], type[SafepointError]] = {}


class _Loud(GraphBubbleUp):
    """What no node and no ToolNode takes for a tool's own error, to go on past it."""

    plain: SafepointError

    def __reduce__(self) -> Any:
        return loud, (self.plain,)


def loud(error: SafepointError) -> SafepointError:
    """The same error, to be caught by its own name, as one that ends the run of a graph."""
    if isinstance(error, _Loud):
        return error
    cls = type(error)
    if cls not in _kinds:
        _kinds[cls] = type(cls.__name__, (_Loud, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})
    made: Any = _kinds[cls].__new__(_kinds[cls])
    made.__dict__.update(error.__dict__)
    made.args = error.args
    made.plain = made.__cause__ = error
    return cast(SafepointError, made)


class Attempt:
    """One execution of a task: LangGraph makes a scratchpad for each, and counts the retries of a policy."""

    def __init__(self, scratchpad: Any, number: int) -> None:
        # Of the scratchpad no weak reference can be had, and a strong one would keep the whole run of the graph alive.
        part = getattr(scratchpad, "get_null_resume", None)
        try:
            self.of: Any = weakref.ref(part)
        except TypeError:
            self.of = lambda: part
        self.number = number

    def is_same(self, other: Attempt | None) -> bool:
        return other is not None and self.number == other.number and self.of() is not None and self.of() is other.of()


@dataclass(frozen=True, slots=True)
class Place:
    """Where a call is made."""

    thread: str
    task: str
    attempt: Attempt
    checkpoints: tuple[tuple[str, str], ...]
    """Namespace and id of the checkpoint that each graph around the call runs on, the root graph first."""
    scratchpad: Any
    checkpointer: Any
    """The graph's own."""


def is_of_run(config: Mapping[str, Any]) -> bool:
    """Whether it is a run that calls with this config, and nobody by hand: ``get_state`` and ``update_state`` in a node are not of it."""
    return "__pregel_runtime" in config.get("configurable", {})


def puts_at_end(config: Mapping[str, Any]) -> bool:
    """Whether it is of a run that puts its checkpoints only when it ends."""
    return bool(config.get("configurable", {}).get("__pregel_durability") == "exit")


def place_of(what: str) -> Place:
    """Where we are in a graph.

    Raises:
        UsageError: not in a node; or in one whose task would have another name after a crash.
    """

    def refuse(why: str, remedy: str) -> NoReturn:
        raise loud(UsageError(f"{what} cannot be recorded here", why, remedy))

    config: Mapping[str, Any]
    try:
        config = get_config()
    except RuntimeError:
        config = {}
    named = config.get("configurable", {})
    task, at = named.get("__pregel_task_id"), named.get("checkpoint_map")
    if not task or not is_of_run(config):
        refuse(
            "there is no task of a graph around it: it runs in a thread of its own, or outside of any node",
            "Call it in the node itself; into a thread, take contextvars.copy_context().run along.",
        )
    if puts_at_end(config):
        refuse("durability='exit' stores no checkpoint that the call could stand on", "Use durability='sync' or 'async'.")
    if not at or "thread_id" not in named:
        refuse("the graph has no checkpointer", "Compile it with the SafepointSaver.")
    info = named["__pregel_runtime"].execution_info
    attempt = Attempt(named.get("__pregel_scratchpad"), getattr(info, "node_attempt", 1))
    graphs: dict[str, str] = {}
    for ns, id in sorted(at.items(), key=lambda item: len(item[0])):
        graphs.setdefault(id, ns)  # a function under @task runs on its entrypoint's checkpoint, and is no graph
    around = tuple((ns, id) for id, ns in graphs.items())
    pad, saver = named.get("__pregel_scratchpad"), named.get("__pregel_checkpointer")
    return Place(str(named["thread_id"]), task, attempt, around, pad, saver)

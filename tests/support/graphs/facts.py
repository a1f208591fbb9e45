"""What a program saw, made comparable: ids become numbers in the order in which they appear, times go."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from langchain_core.messages import BaseMessage
from langgraph.types import Interrupt, PregelTask, Send, StateSnapshot

_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|[0-9a-f]{32}")
_VOLATILE = frozenset({"created_at", "ts", "langgraph_version", "langgraph_api_url"})


class Normal:
    """One numbering of ids; an id keeps its number through all facts of a run, so who is whose parent is compared too.

    Args:
        threads: what the program called the threads, by their ids.
    """

    def __init__(self, threads: Mapping[str, str] | None = None) -> None:
        self._ids: dict[str, str] = {}
        self._threads = threads or {}

    @staticmethod
    def bare(text: str) -> str:
        return _ID.sub("#", text)

    def _text(self, text: str) -> str:
        return _ID.sub(lambda m: self._ids.setdefault(m[0], f"#{len(self._ids)}"), text)

    def __call__(self, value: Any) -> Any:
        match value:
            case None | bool() | int() | float() | bytes():
                return value
            case str():
                return self._text(str(value))
            case StateSnapshot():
                return {
                    "config": self._config(value.config),
                    "parent": self._config(value.parent_config),
                    "values": self(value.values),
                    "next": list(value.next),
                    "metadata": self(value.metadata),
                    "tasks": [self(task) for task in value.tasks],
                    "interrupts": [self(one) for one in value.interrupts],
                }
            case PregelTask():
                error = value.error if value.error is None or isinstance(value.error, str) else repr(value.error)
                return {
                    "id": self(value.id),
                    "name": value.name,
                    "path": self(value.path),
                    "error": self(error),
                    "interrupts": self(value.interrupts),
                    "state": self._state(value.state),
                    "result": self(value.result),
                }
            case Interrupt():
                return ("Interrupt", self(value.id), self(value.value))
            case Send():
                return ("Send", value.node, self(value.arg))
            case BaseMessage():
                found = self(value.__dict__)
                # A node's message gets its id from the reducer, in place: while its write may or may not have been encoded.
                if value.id is None or _ID.search(value.id):
                    found["id"] = "given"
                return (type(value).__name__, found)
            case BaseException():
                return (type(value).__name__, self(str(value)))
            case Mapping():
                order = sorted(value, key=lambda key: self.bare(str(key)))
                return {
                    self(key): self._thread(value[key]) if key == "thread_id" else self(value[key])
                    for key in order
                    if key not in _VOLATILE
                }
            case set() | frozenset():
                return ("set", sorted(map(repr, value)))
            case [Interrupt(), Interrupt(), *_]:
                # Of parallel tasks: in the order in which they ended.
                return [self(one) for one in sorted(value, key=lambda one: repr(one.value))]
            case list() | tuple():
                # LangGraph's own codec makes lists of tuples; ours does not.
                return [self(one) for one in value]
            case _ if hasattr(value, "__dict__"):
                return (type(value).__name__, self(vars(value)))
        return (type(value).__name__, self.bare(repr(value)))

    def _state(self, state: Any) -> Any:
        return self._config(state) if isinstance(state, dict) else self(state)

    def _config(self, config: Any) -> Any:
        if config is None:
            return None
        where = config["configurable"]
        others = (self(where.get(name)) for name in ("checkpoint_ns", "checkpoint_id", "checkpoint_map"))
        return [self._thread(where["thread_id"]), *others]

    def _thread(self, name: Any) -> str:
        return self._threads.get(str(name), str(name))


def difference(one: Any, other: Any, where: str = "") -> str:
    """The first place where two facts differ, with what stands there; '' if nowhere."""
    if one == other:
        return ""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return next(found for key in one if (found := difference(one[key], other[key], f"{where}.{key}")))
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        if len(one) == 2 and isinstance(one[0], str) and one[0] == other[0]:
            return difference(one[1], other[1], f"{where}[{one[0]}]")
        pairs = enumerate(zip(one, other, strict=True))
        return next(found for i, (a, b) in pairs if (found := difference(a, b, f"{where}[{i}]")))
    return f"{where}:\n  {one!r}\n  {other!r}"

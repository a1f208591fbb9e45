"""Which classes the LangGraph adapter stores and loads, beside the ones that ``wrapping`` knows.

LangGraph's own rule is taken over: what a graph's schemas and channels declare is allowed. ``compile()`` reports it to
``with_allowlist`` as pairs of a module and a bare class name, so all classes of that name in that module are meant, nested ones
too; which of them a value was is stored by its whole name. Classes that nobody declared (an object under ``Any``, a subclass of a
declared class, an artifact of a tool) are to be named in ``types=``, or their modules in ``trust=``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Final

from safepoint.adapters.langgraph.wrapping import MODELS, SHAPED
from safepoint.codec.registry import Registry, _find, _full_name, shape_of

__all__ = ["Allowed", "GraphRegistry", "pairs_of"]

Allowed = frozenset[tuple[str, str]]
"""Pairs of a module and the bare name of a class in it."""


def _own() -> Registry:
    found = Registry()
    for cls in (*MODELS, *SHAPED):
        if shape_of(cls) is not None:  # Send and Item have none: they stand where ``wrapping`` takes them, or are refused
            found.add(cls)
    return found


OWN: Final = _own()
"""LangChain's and LangGraph's classes, for places that ``wrapping`` does not look into."""


def pairs_of(allow: Iterable[tuple[str, ...] | type]) -> Allowed:
    """What LangGraph hands to ``with_allowlist``, as pairs. Of a parametrised model its origin is meant too."""
    found: set[tuple[str, str]] = set()
    for each in allow:
        module, name = (each.__module__, each.__name__) if isinstance(each, type) else (str(each[0]), str(each[-1]))
        found.add((module, name))
        found.add((module, name.partition("[")[0]))
    return frozenset(found)


class GraphRegistry(Registry):
    """A registry that knows, in addition, every class of the pairs in ``allow``. It imports nothing for them: what compile() has
    reported is loaded."""

    def __init__(self, types: Iterable[type] = (), trust: Iterable[str] = (), allow: Allowed = frozenset()) -> None:
        super().__init__(types, trust, OWN)
        self._types = tuple(types)
        self.allow = allow

    def allowing(self, more: Allowed) -> GraphRegistry:
        """A registry that knows ``more`` besides; this one if it does already."""
        return self if more <= self.allow else GraphRegistry(self._types, self._trust, self.allow | more)

    def name_of(self, cls: type) -> str | None:
        name = super().name_of(cls)
        if name is None and (cls.__module__, cls.__name__) in self.allow and shape_of(cls) is not None:
            name = _full_name(cls)
            module, _, qualname = name.partition(":")
            # One that cannot be found again, made inside a function say, is refused now and not after a restart.
            if name.endswith("]") or not _loaded(module) or _find(module, qualname) is not cls:
                return None
            self._names[cls] = name
        return name

    def class_of(self, name: str) -> type | None:
        found = super().class_of(name)
        if found is None and not name.endswith("]"):
            module, _, qualname = name.partition(":")
            bare = qualname.rpartition(".")[2]
            if any(bare == each for _, each in self.allow) and _loaded(module):
                cls = _find(module, qualname)
                if cls is not None and (cls.__module__, cls.__name__) in self.allow and _full_name(cls) == name:
                    self._classes[name] = found = cls
        return found


def _loaded(module: str) -> bool:
    main = sys.modules.get("__main__")
    return module in sys.modules or getattr(getattr(main, "__spec__", None), "name", None) == module

"""LangGraph on safepoint: a checkpointer for compiled graphs on any store. Needs the extra ``langgraph``.

from safepoint.adapters.langgraph import SafepointSaver

graph = builder.compile(checkpointer=SafepointSaver("sqlite:///agent.db"))
"""

from __future__ import annotations

import contextlib
import importlib
from importlib.metadata import PackageNotFoundError, version

from safepoint.errors import MissingExtra, UsageError

__all__ = ["SafepointSaver", "ToolJournal", "current_call", "import_threads"]

# What the tests have seen: from this version on, and below that one.
_KNOWN = {
    "langgraph": ("langgraph.types", (1, 2), (2,)),
    "langgraph-checkpoint": ("langgraph.checkpoint.base", (4, 1), (5,)),
    "langchain-core": ("langchain_core.runnables", (1,), (2,)),
}
TESTED = "langgraph 1.2.24, langgraph-checkpoint 4.3.2, langchain-core 1.8.3"


def _check(package: str, found: str) -> None:
    _, low, high = _KNOWN[package]
    parts = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    if not low <= parts < high:
        span = f">={'.'.join(map(str, low))},<{'.'.join(map(str, high))}"
        raise UsageError(
            f"safepoint does not know {package} {found}",
            f"its LangGraph adapter was tested with {TESTED}, and takes {package}{span}",
            f'Run: pip install "{package}{span}"',
            package=package,
            version=found,
        )


for _package in _KNOWN:
    try:
        _found = version(_package)
        importlib.import_module(_KNOWN[_package][0])
    except (PackageNotFoundError, ModuleNotFoundError) as _error:
        raise MissingExtra(
            f"the LangGraph adapter needs the package {_package}",
            "it is not installed",
            'Run: pip install "safepoint[langgraph]"',
        ) from _error
    _check(_package, _found)

# `compile` collects the classes of a graph's schemas, and hands them to the checkpointer, only where this is set. It makes no other saver
# strict: theirs have a switch of their own, which is read elsewhere. Without the name, classes have to be given by hand (types=, trust=).
with contextlib.suppress(ImportError, AttributeError):
    from langgraph._internal import _serde

    if hasattr(_serde, "STRICT_MSGPACK_ENABLED"):
        _serde.STRICT_MSGPACK_ENABLED = True

# What they need is known to be there now.
from safepoint.adapters.langgraph.importing import import_threads  # noqa: E402
from safepoint.adapters.langgraph.journal import ToolJournal, current_call  # noqa: E402
from safepoint.adapters.langgraph.saver import SafepointSaver  # noqa: E402

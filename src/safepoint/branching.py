"""The verbs that go back and apart: fork, rewind, branches."""

from __future__ import annotations

from safepoint.stores.base import Store


class BranchVerbs:
    """Part of ``Checkpointer``."""

    store: Store

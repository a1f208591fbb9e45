"""The verb that tells two checkpoints apart: diff."""

from __future__ import annotations

from safepoint.stores.base import Store


class ComparingVerbs:
    """Part of ``Checkpointer``."""

    store: Store

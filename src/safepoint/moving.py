"""The verbs that move tasks between stores: copy_to, export, import_."""

from __future__ import annotations

from safepoint.stores.base import Store


class MovingVerbs:
    """Part of ``Checkpointer``."""

    store: Store

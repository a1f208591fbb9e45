"""The verbs that look after what is stored: verify, repair, accept."""

from __future__ import annotations

from safepoint.stores.base import Store


class IntegrityVerbs:
    """Part of ``Checkpointer``."""

    store: Store

"""Async twins of the verbs that not every program needs: part of ``AsyncCheckpointer``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from safepoint.aio import Offload
    from safepoint.checkpointer import Checkpointer


class MoreAsyncVerbs:
    """Each is the verb of the same name of ``Checkpointer``, awaited."""

    sync: Checkpointer
    _off: Offload

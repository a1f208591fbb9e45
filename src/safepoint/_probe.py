"""Named points inside the library at which tests may stop, kill or disturb it. Nothing in the product sets ``hook``."""

from __future__ import annotations

from collections.abc import Callable

hook: Callable[[str], None] | None = None


def at(name: str) -> None:
    """Tell the hook, if there is one, that this point has been reached."""
    if hook is not None:
        hook(name)

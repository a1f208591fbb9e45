"""A repair in a process that may be killed in it."""

from __future__ import annotations

import safepoint
from safepoint import _probe
from tests.support.children import die

__all__ = ["repairing"]


def repairing(url: str, in_place: bool, point: str, nth: int = 1) -> list[str]:
    """Repair a store; killed at the nth time that a point is passed. Returns the names of the branches that were made."""
    seen = 0

    def hook(name: str) -> None:
        nonlocal seen
        if name == point:
            seen += 1
            if seen >= nth:
                die()

    _probe.hook = hook
    with safepoint.open(url) as cp:
        return [str(fell.new_branch) for fell in cp.repair(in_place=in_place).fell_back]

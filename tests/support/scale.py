"""One switch between the quick numbers of `make test` and the full ones of `make soak`."""

import os

__all__ = ["SOAK", "scale"]

SOAK = os.environ.get("SAFEPOINT_SOAK", "") not in {"", "0"}


def scale(small: int, soak: int) -> int:
    """Return ``small``, or ``soak`` where SAFEPOINT_SOAK=1 is set. Tests that call this carry the marker ``scaled``."""
    return soak if SOAK else small

"""The command line, ``safepoint``: look at tasks and checkpoints, settle calls, answer questions, clean up.

Only ``main`` is public. Its parts are imported when it is called, so that neither ``import safepoint`` nor another program
that looks at this package pays for click and rich.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; ``argv`` is without the program's name.

    The codes are listed in docs/cli.md.
    """
    from safepoint.cli.ending import run

    return run(argv)

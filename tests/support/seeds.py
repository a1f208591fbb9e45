"""Where a test's random numbers come from: new ones in each run, and the same ones where SAFEPOINT_SEED is set.

A gate (``.ci/run``) sets it, so that what it refuses is what a change broke, and not what chance has found in something else. Chance has
its own time: ``make test``, ``make soak`` and ``make fuzz`` without it.

For tests with ``@given`` its value means nothing, only that it is set: they are derandomized then, and Hypothesis draws from the test.
"""

import os
import random
import zlib

from tests.support.scale import SOAK

__all__ = ["FIXED", "fresh_rng", "fresh_seed"]

FIXED = os.environ.get("SAFEPOINT_SEED", "")


def fresh_seed() -> int:
    """A seed for the test that runs; printed, so that a failure shows what to set to have it again."""
    base = FIXED or str(int.from_bytes(os.urandom(4), "big"))
    # How many are drawn goes by SAFEPOINT_SOAK: in a soak the same seed alone gives other numbers.
    print(f"{'SAFEPOINT_SOAK=1 ' if SOAK else ''}SAFEPOINT_SEED={base}")
    # Each test draws its own. (Behind the name stands the phase of the test that runs.)
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    return zlib.crc32(f"{base} {test}".encode())


def fresh_rng() -> random.Random:
    return random.Random(fresh_seed())

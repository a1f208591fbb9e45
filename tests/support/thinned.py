"""Which variants of a test are tried on each server outside of a soak: what a run does is tried in all ways on SQLite."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.scale import SOAK
from tests.support.seeds import FIXED
from tests.support.stores import CLOCKED

__all__ = ["thin"]


def thin(config: pytest.Config, items: list[pytest.Item], folder: Path, most: dict[str, int]) -> None:
    """Of the tests in ``folder`` leave out what is more than ``most``, by module: variants of each test, on each server.

    A soak plays a third of what is left out here, others each time unless SAFEPOINT_SEED is set; a test that is ``scaled`` it plays anyway.
    """
    variants: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        if (
            item.path.parent == folder
            and item.path.stem in most
            and isinstance(item, pytest.Function)
            and hasattr(item, "callspec")
        ):
            kinds = [value for value in item.callspec.params.values() if isinstance(value, str) and value in CLOCKED]
            if kinds:
                variants.setdefault((item.nodeid.partition("[")[0], kinds[0]), []).append(item)
    left_out: list[pytest.Item] = []
    for (_, kind), group in variants.items():
        limit = most[group[0].path.stem]
        # Others on each store: what one leaves out another may try.
        shift = ((CLOCKED.index(kind) + 1) * len(group)) // (len(CLOCKED) * limit)
        kept = {(i * len(group) // limit + shift) % len(group) for i in range(min(limit, len(group)))}
        left_out += [item for i, item in enumerate(group) if i not in kept]
    if SOAK:
        # All workers have to collect the same.
        rng = random.Random(FIXED or getattr(config, "workerinput", {}).get("testrunuid"))
        for item in rng.sample(left_out, len(left_out) // 3):
            item.add_marker("soak")
    elif left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]

"""Sweeps of many short transactions keep what the sweep of one does: the contract of removal, and the oracle."""

import itertools
from pathlib import Path

import pytest
from hypothesis import settings

from safepoint.stores import sqlite_bigsweep, sqlite_sweep
from safepoint.testing import Place, Remote, StoreMachine, run_machine
from safepoint.testing.removal import RemovalTests
from safepoint.testing.writes import WriteTests
from tests.support.seeds import fresh_seed
from tests.support.sweeping import always_large


class TestRemovalInManySteps(RemovalTests, WriteTests):
    @pytest.fixture
    def store(self, tmp_path, monkeypatch):
        for module, name in ((sqlite_sweep, "LARGE"), *((sqlite_bigsweep, n) for n in ("PAGE", "ROWS", "OBJECTS", "PAUSE"))):
            monkeypatch.setattr(module, name, getattr(module, name))  # to be put back
        store = always_large(str(tmp_path / "agent.db"))
        yield store
        store.close()


class LargeMachine(StoreMachine):
    folder: Path
    numbers = itertools.count()
    ALWAYS = frozenset()

    def driver(self):
        return Remote(Place(always_large, (str(self.folder / f"{next(self.numbers)}.db"),)))


@pytest.mark.soak
def test_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(LargeMachine, "folder", tmp_path, raising=False)
    run_machine(LargeMachine, profile=settings(max_examples=40, stateful_step_count=60, deadline=None), seed=fresh_seed())

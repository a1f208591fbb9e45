"""The file store against the contract, and against the oracle in a process that is killed."""

import itertools
from pathlib import Path

import pytest

from safepoint.stores.file import FileStore
from safepoint.testing import Place, Remote, StoreContract, StoreMachine, run_machine
from tests.support.scale import SOAK
from tests.support.seeds import fresh_seed


class TestFile(StoreContract):
    @pytest.fixture
    def opener(self, tmp_path):
        # "process" saves the waits for the disk; what "full" adds is tested where power is cut.
        return lambda: FileStore(tmp_path / "store", durability="process")


class FileMachine(StoreMachine):
    folder: Path
    numbers = itertools.count()
    chunked = False
    if not SOAK:
        # In a process of its own a step takes ten times as long as in memory: what needs no crash is looked for there.
        ALWAYS = frozenset()

    def driver(self):
        path = self.folder / f"{next(self.numbers)}"
        return Remote(Place(FileStore, (str(path),), {"durability": "process"}))


@pytest.mark.scaled
def test_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(FileMachine, "folder", tmp_path, raising=False)
    run_machine(FileMachine, seed=fresh_seed())

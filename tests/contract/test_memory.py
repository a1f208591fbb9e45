"""The memory store against the contract, and against the oracle."""

import pytest

from safepoint.model import new_id
from safepoint.stores.memory import MemoryStore
from safepoint.testing import Local, StoreContract, StoreMachine, run_machine
from tests.support.seeds import fresh_seed


class TestMemory(StoreContract):
    @pytest.fixture
    def opener(self):
        name = new_id()
        return lambda: MemoryStore(name)


class MemoryMachine(StoreMachine):
    def driver(self):
        return Local(MemoryStore())


@pytest.mark.scaled
def test_machine():
    run_machine(MemoryMachine, seed=fresh_seed())

"""The memory store against the contract."""

import pytest

from safepoint.model import new_id
from safepoint.stores.memory import MemoryStore
from safepoint.testing import StoreContract


class TestMemory(StoreContract):
    @pytest.fixture
    def opener(self):
        name = new_id()
        return lambda: MemoryStore(name)

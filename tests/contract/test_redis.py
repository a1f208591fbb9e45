"""The Redis store against the contract, and against the oracle in a process that is killed."""

import pytest
from hypothesis import settings

from safepoint.stores.url import open_store
from safepoint.testing import Place, Remote, StoreContract, StoreMachine, run_machine
from tests.support.scale import SOAK
from tests.support.servers import fresh_redis_url


class TestRedis(StoreContract):
    @pytest.fixture
    def opener(self):
        url = fresh_redis_url()
        return lambda: open_store(url)


# Each step is a trip to a server, and each crash a connection more.
SHORT = settings(max_examples=20, stateful_step_count=60)


class RedisMachine(StoreMachine):
    if not SOAK:
        ALWAYS = frozenset()

    def driver(self):
        return Remote(Place(open_store, (fresh_redis_url(),), {"durability": "process"}))


@pytest.mark.scaled
def test_machine():
    run_machine(RedisMachine, profile=None if SOAK else SHORT)

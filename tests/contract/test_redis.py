"""The Redis store against the contract, and against the oracle in a process that is killed."""

import pytest
from hypothesis import settings

from safepoint.stores.redis.store import RedisStore
from safepoint.stores.url import open_store
from safepoint.testing import Place, Remote, StoreContract, StoreMachine, run_machine
from tests.support.scale import SOAK, scale
from tests.support.seeds import fresh_seed
from tests.support.servers import fresh_redis_url

# Fewer lives than in memory, which looks for all that needs no crash: a step asks a server, from a process of its own.
LIVES = settings(max_examples=scale(30, 50), stateful_step_count=scale(60, 120))


class TestRedis(StoreContract):
    @pytest.fixture
    def opener(self):
        url = fresh_redis_url()
        return lambda: open_store(url)


class RedisMachine(StoreMachine):
    if not SOAK:
        ALWAYS = frozenset()

    def driver(self):
        # The class and not its URL's opener: the processes are forked from one that has imported where that comes from.
        url, _, prefix = fresh_redis_url().partition("?prefix=")
        return Remote(Place(RedisStore, (url,), {"prefix": prefix, "durability": "process"}))


@pytest.mark.scaled
def test_machine():
    run_machine(RedisMachine, profile=LIVES, seed=fresh_seed())

"""The Redis store on a cluster of three, against the contract and against the oracle in a process that is killed."""

import uuid

import pytest
from hypothesis import settings

from safepoint.stores.redis.store import RedisStore
from safepoint.stores.url import open_store
from safepoint.testing import Place, Remote, StoreContract, StoreMachine, run_machine
from tests.support.scale import SOAK, scale
from tests.support.seeds import fresh_seed
from tests.support.servers import shared_cluster


def fresh_cluster_url():
    """An empty store on the shared cluster: a prefix that no key has yet. It ends with the tests, and is not cleared before."""
    return f"{shared_cluster().url}?cluster=true&durability=process&prefix=c{uuid.uuid4().hex[:12]}:"


# Fewer lives than in memory, which looks for all that needs no crash: a step asks a server, from a process of its own.
LIVES = settings(max_examples=scale(20, 30), stateful_step_count=scale(60, 120))


class TestRedisCluster(StoreContract):
    @pytest.fixture
    def opener(self):
        url = fresh_cluster_url()
        return lambda: open_store(url)


class ClusterMachine(StoreMachine):
    if not SOAK:
        ALWAYS = frozenset()

    def driver(self):
        url, _, prefix = fresh_cluster_url().partition("?cluster=true&durability=process&prefix=")
        return Remote(Place(RedisStore, (url,), {"prefix": prefix, "durability": "process", "cluster": True}))


@pytest.mark.soak
def test_machine():
    run_machine(ClusterMachine, profile=LIVES, seed=fresh_seed())

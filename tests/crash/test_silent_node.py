"""A node of a cluster that hangs takes no lease with it but its own, and those only if it hangs for longer than they last."""

import os
import signal
import time
from collections import defaultdict

import pytest
from redis.crc import key_slot

from safepoint.stores.redis.store import RedisStore
from safepoint.stores.renewing import clock
from tests.support.servers import RedisCluster

LEASE = 8.0
TASKS = 12


@pytest.fixture(scope="module")
def cluster():
    # Else a cluster of which one node has failed answers nobody.
    cluster = RedisCluster(3, "--cluster-require-full-coverage", "no")
    yield cluster
    cluster.close()


@pytest.fixture
def store(cluster):
    # It has learnt of the others from the node that is going to be silent.
    store = RedisStore(cluster.url, cluster=True, durability="process", lease=LEASE, timeout=5)
    yield store
    store.close()


@pytest.fixture
def silence(cluster):
    """Stops the first node until it is called again."""
    pid, stopped = cluster.nodes[0].pid, False

    def turn():
        nonlocal stopped
        stopped = not stopped
        os.kill(pid, signal.SIGSTOP if stopped else signal.SIGCONT)

    yield turn
    if stopped:
        turn()


@pytest.fixture
def held(store):
    """By node, the leases on some tasks: name and grant."""
    held = defaultdict(list)
    for i in range(TASKS):
        task = f"task-{i}"
        node = min(2, key_slot(store._client.keys.task(task)) // (16384 // 3))
        held[node].append((task, store.acquire(task, b"me")))
    assert sorted(held) == [0, 1, 2]
    yield held
    for task, grant in (one for some in held.values() for one in some):
        store.release(task, grant)


def holding(store, some):
    return [store.holds(task, grant.guard) for task, grant in some]


def test_one_that_hangs_for_less_than_a_lease_loses_none(store, held, silence):
    everywhere = [one for some in held.values() for one in some]
    time.sleep(1.1 * store._renewals.every)
    silence()
    end = clock() + 1.5 * store._renewals.every
    while clock() < end:
        assert all(holding(store, everywhere))
        time.sleep(0.02)
    silence()
    end = clock() + LEASE * 0.6
    while clock() < end:
        assert all(holding(store, everywhere))
        time.sleep(0.02)


def test_one_that_hangs_for_longer_loses_its_own_only_until_it_is_back(store, held, silence):
    elsewhere = held[1] + held[2]
    silence()  # before the first beat, which knows of the others nevertheless
    end = clock() + LEASE * 1.4
    while clock() < end:
        assert all(holding(store, elsewhere))
        time.sleep(0.02)
    assert not any(holding(store, held[0]))
    silence()
    # Nobody took them meanwhile.
    end = clock() + 20
    while not all(holding(store, held[0])):
        assert clock() < end
        time.sleep(0.02)
    assert all(holding(store, elsewhere))

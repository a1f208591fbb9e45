"""A cluster moves the slot of a task to another node while somebody saves there."""

import threading
import time
import uuid

import pytest
import redis
from redis.crc import key_slot

from safepoint.stores.redis.store import RedisStore
from safepoint.testing.build import Writer, tree


class Move:
    """One slot on its way from one node to another, as redis-cli moves it."""

    def __init__(self, ports, key):
        self.slot = key_slot(key)
        self.nodes = {port: redis.Redis(port=port) for port in ports}
        self.ids = {port: node.execute_command("CLUSTER MYID") for port, node in self.nodes.items()}
        slots = self.nodes[ports[0]].execute_command("CLUSTER SLOTS")
        self.source = next(entry["primary"][1] if isinstance(entry, dict) else entry[2][1] for entry in self._rows(slots))
        self.target = next(port for port in ports if port != self.source)

    def _rows(self, slots):
        if isinstance(slots, dict):
            return [entry for (first, last), entry in slots.items() if first <= self.slot <= last]
        return [entry for entry in slots if entry[0] <= self.slot <= entry[1]]

    def begin(self):
        self._set(self.target, "IMPORTING", self.ids[self.source])
        self._set(self.source, "MIGRATING", self.ids[self.target])

    def carry(self):
        node = self.nodes[self.source]
        keys = node.execute_command("CLUSTER GETKEYSINSLOT", self.slot, 10_000)  # other tests have tasks of that name
        for key in keys:
            node.execute_command("MIGRATE", "127.0.0.1", self.target, key, 0, 5000)
        return len(keys)

    def end(self):
        for port in (self.target, self.source, *self.nodes):
            self._set(port, "NODE", self.ids[self.target])

    def _set(self, port, how, node):
        self.nodes[port].execute_command("CLUSTER SETSLOT", self.slot, how, node)

    def close(self):
        for node in self.nodes.values():
            node.close()


@pytest.fixture
def store(valkey_cluster):
    store = RedisStore(valkey_cluster.url, prefix=f"m{uuid.uuid4().hex[:8]}:", cluster=True, durability="process", timeout=10)
    yield store
    store.close()


@pytest.fixture
def move(valkey_cluster, store):
    made = []

    def there_and_back():
        made.append(Move(valkey_cluster.ports, store._client.keys.task("task")))
        return made[-1]

    yield there_and_back
    for one in made:
        one.close()


def test_saves_go_on_while_their_slot_moves_there_and_back(store, move):
    grant = store.acquire("task", b"me")
    writer = Writer(store, guard=grant.guard)
    writer.save(*tree("0"))
    stop = threading.Event()
    failed: list[BaseException] = []
    done: list[int | None] = [1]

    def save():
        try:
            while not stop.is_set():
                done.append(writer.save(*tree(str(len(done)))).seq)
                assert store.task("task").checkpoints == len(done)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=save)
    thread.start()
    try:
        for _ in range(2):
            one = move()
            one.begin()
            time.sleep(0.1)
            assert one.carry()
            time.sleep(0.1)
            one.end()
            seen = len(done)
            end = time.monotonic() + 5
            while len(done) < seen + 5 and time.monotonic() < end and not failed:
                time.sleep(0.01)
    finally:
        stop.set()
        thread.join(20)
    assert not failed
    assert done == list(range(1, len(done) + 1)), "one was saved twice, or lost"
    assert len(done) > 10
    assert [row.seq for row in store.headers("task")] == done[::-1]
    assert [row.task for row in store.tasks()] == ["task"]
    assert store.holds("task", grant.guard)
    store.release("task", grant)

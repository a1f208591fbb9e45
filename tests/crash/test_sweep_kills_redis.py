"""Whoever removes, writes a whole task, stages a big save or mends is killed in the middle: what is in Redis is whole, and the next
one finishes the work."""

from __future__ import annotations

import contextlib
import uuid
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

import safepoint
from safepoint import Retention, State, _probe
from safepoint.model import Obj
from safepoint.rows import Image, Lost, replace
from safepoint.stores.base import Store
from safepoint.stores.url import open_store
from safepoint.testing.build import Writer, obj, write_row
from tests.support import agents, sweeping
from tests.support.children import Server
from tests.support.rawrows import redis_client
from tests.support.repairing import repairing
from tests.support.scale import SOAK
from tests.support.servers import fresh_redis_url, shared_cluster

LENGTH, MILESTONES = 300, 50


@pytest.fixture(params=["one server", *(["a cluster"] if SOAK else [])])
def url(request: pytest.FixtureRequest) -> str:
    if request.param == "one server":
        return fresh_redis_url()
    return f"{shared_cluster().url}?cluster=true&prefix=t{uuid.uuid4().hex[:12]}:"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with contextlib.closing(open_store(url, durability="process")) as store:
        yield store


def keys_of(url: str) -> list[bytes]:
    """Of the whole store, as they lie there, but for the index."""
    prefix = url.rpartition("prefix=")[2].encode()
    with redis_client(url) as client:
        return sorted(key.removeprefix(prefix) for key in client.scan_iter(match=prefix + b"{*"))


def names(store: Store, task: str = "long") -> set[bytes]:
    return {part.name for part in store.walk(task) if isinstance(part, Obj)}


def check_whole(store: Store) -> set[int]:
    """All that is kept can be read, each checkpoint has the calls of its step and what was recorded against it, and no other is there; what is left."""
    seqs = [row.seq for row in store.headers("long")]
    assert store.unreadable("long", seqs) == {}
    calls, objects = store.calls("long")
    assert [call.base_seq for call in calls] == sorted(seqs)
    assert all(call.result_refs in objects for call in calls)
    writes, objects = store.writes("long")
    assert sorted(int(write.checkpoint[1:]) for write in writes) == sorted([*seqs, LENGTH + 1])
    assert all(write.refs in objects for write in writes)
    row = store.task("long")
    assert row is not None
    assert row.checkpoints == len(seqs)
    assert [part for part in store.walk("long") if isinstance(part, Lost)] == []
    return set(seqs)


def image_of_a_long_task(milestones: int = 0) -> Image:
    """With something recorded against each checkpoint, and against the next, which never comes."""
    image = sweeping.long_task(LENGTH, milestones=milestones)
    objects = [obj(b"recorded %d" % seq) for seq in range(1, LENGTH + 2)]
    writes = [write_row(f"c{seq}", [of]) for seq, of in enumerate(objects, 1)]
    return replace(image, writes=tuple(writes), objects=(*image.objects, *objects))


STAY = {*range(LENGTH - 1, LENGTH + 1), *range(MILESTONES, LENGTH + 1, MILESTONES)}


@pytest.mark.scaled
@pytest.mark.parametrize("point", ["sweep.rows", "sweep.marked", "sweep.objects"])
def test_a_clean_up_killed_at_a_point(point: str, url: str, store: Store, server: Server) -> None:
    image = image_of_a_long_task(MILESTONES)
    assert store.write_task(image)
    hits = server.run(sweeping.small_cleaner, url, "long")
    assert hits[point] > 0
    done = names(store)
    assert check_whole(store) == STAY
    for nth in sorted({1, 1 + hits[point] // 2, hits[point]} if not SOAK else range(1, hits[point] + 1)):
        assert store.delete_task("long")
        assert store.write_task(image)
        child = server.start(sweeping.small_cleaner, url, "long", point, nth)
        child.told()
        assert child.was_killed, f"{point} was not reached {nth} times"
        assert check_whole(store) >= STAY
        server.run(sweeping.small_cleaner, url, "long")
        assert check_whole(store) == STAY
        assert names(store) == done, "nothing is left over, and nothing that is needed is gone"


def writer_of_a_task(url: str, image: Image, point: str, nth: int) -> Any:
    hits: Counter[str] = Counter()
    with contextlib.closing(open_store(url, durability="process")) as store:
        agents.kill_at(point, nth) if point else agents.count_points(hits)
        store.write_task(image)
        _probe.hook = None
    return hits


@pytest.mark.parametrize("point", ["redis.send", "write_task.staged", "write_task.before", "write_task.after"])
def test_a_whole_task_is_there_or_not(point: str, url: str, store: Store, server: Server) -> None:
    image = image_of_a_long_task()
    hits = server.run(writer_of_a_task, url, image, "", 0)
    assert store.delete_task("long")
    for nth in sorted({1, 1 + hits[point] // 2, hits[point]}):
        child = server.start(writer_of_a_task, url, image, point, nth)
        child.told()
        assert child.was_killed
        if store.task("long") is not None:
            assert len(check_whole(store)) == LENGTH
        else:
            assert list(store.walk("long")) == []
            assert store.strays() == [], "what was begun expires"
        server.run(writer_of_a_task, url, image, "", 0)
        assert len(check_whole(store)) == LENGTH
        assert store.delete_task("long")
    with redis_client(url) as client:
        prefix = url.rpartition("prefix=")[2].encode()
        for key in keys_of(url):
            assert key.endswith(b":f") or 0 < client.ttl(prefix + key) <= 600


@pytest.mark.parametrize("nth", [1, 3])
def test_a_big_save_that_is_killed_leaves_nothing_for_long(nth: int, url: str, store: Store, server: Server) -> None:
    assert server.run(sweeping.big_saver, url, "big", 100_000)
    before = names(store, "big")
    child = server.start(sweeping.big_saver, url, "big", 4_000_000, "commit.staged", nth)
    child.told()
    assert child.was_killed
    assert len(store.headers("big")) == 1
    assert names(store, "big") > before
    store.prune("big", [])
    assert names(store, "big") > before, "as far as anybody knows, it is still on its way"
    with redis_client(url) as client:
        key = store._client.keys.task("big")  # type: ignore[attr-defined]
        client.hset(key, "stages", b"/".join([*client.hget(key, "stages").split(b"/")[:-1], b"1000"]))
        store.prune("big", [])
        assert names(store, "big") == before
        assert not [field for field in client.hkeys(key) if field.startswith(b"s:")]
    server.run(sweeping.big_saver, url, "big", 4_000_000)
    assert [row.seq for row in store.headers("big")] == [2, 1]


@pytest.mark.parametrize("point", ["repair.before", "repair.after"])
@pytest.mark.parametrize("nth", [1, 2])
def test_a_repair_in_place_that_is_killed(point: str, nth: int, url: str, store: Store, server: Server) -> None:
    with safepoint.open(url, retention=Retention.keep_all(), durability="process") as cp, redis_client(url) as client:
        for task in ("a", "b", "c"):
            state = State(task)
            for i in range(5):
                state.step = i
                state.messages.append({"role": "user", "content": f"message {i} " + "x" * 400})
                cp.save(state)
        for task in ("a", "b"):
            client.hdel(store._client.keys.task(task), "r:5")  # type: ignore[attr-defined]
        child = server.start(repairing, url, True, point, nth)
        child.told()
        assert child.was_killed
        verified = cp.verify()
        left = 2 - (nth - 1) - (point == "repair.after")
        assert len({damage.task_id for damage in verified.damages}) == left
        assert len(server.run(repairing, url, True, "never")) == left
        assert cp.verify().ok
        for task, step in (("a", 3), ("b", 3), ("c", 4)):
            latest = cp.load_latest(task)
            assert latest is not None
            assert latest.step == step


def test_a_deletion_that_is_killed(url: str, store: Store, server: Server) -> None:
    for point, nth in (("redis.send", 2), ("redis.answer", 2), ("redis.answer", 3)):
        Writer(store).save()
        child = server.start(deleter, url, point, nth)
        child.told()
        assert child.was_killed
        assert (store.task("task") is None) is (point == "redis.answer")
        store.delete_task("task")
        assert store.tasks() == []
        assert keys_of(url) == []


def deleter(url: str, point: str, nth: int) -> None:
    with contextlib.closing(open_store(url, durability="process")) as store:
        agents.kill_at(point, nth)
        store.delete_task("task")

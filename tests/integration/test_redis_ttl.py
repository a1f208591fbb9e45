"""A task in Redis expires as a whole or not at all, and every way to write it writes it whole. Field cases 72 and 74."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis

import safepoint
from safepoint import SafepointError, State, _probe
from safepoint.model import new_id
from safepoint.rows import Lost, replace
from safepoint.stores.redis import layout
from safepoint.stores.redis.store import RedisStore
from safepoint.stores.url import open_store
from safepoint.testing.build import Writer, call_row, obj, pause_row, tree
from safepoint.testing.whole import image_of
from tests.support.scale import scale
from tests.support.servers import Redis, fresh_redis_url, shared_redis

TTL = 1000


@pytest.fixture
def url() -> str:
    return fresh_redis_url()


@pytest.fixture
def raw() -> Iterator[Any]:
    with redis.from_url(shared_redis().url) as client:
        yield client


@pytest.fixture
def store(url: str) -> Iterator[RedisStore]:
    store = open_store(url, ttl=TTL)
    assert isinstance(store, RedisStore)
    yield store
    store.close()


def keys_of(raw: Any, store: RedisStore) -> set[bytes]:
    """Every key of the store but the index, by looking at all there are."""
    prefix = store.prefix.encode()
    return {key for key in raw.scan_iter(match=prefix + b"*") if not key.startswith(prefix + b"tasks:")}


def age(raw: Any, store: RedisStore, seconds: int) -> None:
    """As if so much time had passed since the last write."""
    for key in keys_of(raw, store):
        if (left := raw.pttl(key)) >= 0:
            assert left > seconds * 1000
            raw.pexpire(key, left - seconds * 1000)


def left(raw: Any, store: RedisStore, task: str = "task") -> int:
    """Seconds that are left of the task; -1: it does not expire, -2: it is not there."""
    return int(raw.ttl(store._client.keys.task(task)))


def is_absent(store: RedisStore, task: str = "task") -> bool:
    """Not there, and nothing of it is damaged."""
    assert store.task(task) is None
    assert store.read(task) is None
    assert store.headers(task) == []
    assert store.calls(task) == ([], {})
    assert store.pauses(task) == []
    assert store.branches(task) == []
    assert store.lease(task) is None
    assert list(store.walk(task)) == []
    assert [row.task for row in store.tasks()] == []
    assert store.strays() == []
    return True


# -- field case 72


def test_field_case_72_all_of_a_task_has_the_same_life(store: RedisStore, raw: Any) -> None:
    writer = Writer(store)
    writer.save(*tree("a"))
    writer.settle(writer.call())
    writer.write(pause_row(writer.seq, status="used"))
    Writer(store, space="ns").save(*tree("n"))
    Writer(store, branch="side").save(*tree("s"), row={"parent_seq": 1})
    store.release("task", store.acquire("task", b"me"))
    task, floor = store._client.keys.of("task")
    # Journal, branches, pointers, objects: all of them are fields of one key. Beside it there is only the number of the last fence.
    assert keys_of(raw, store) == {task, floor}
    assert TTL - 5 <= raw.ttl(task) <= TTL
    assert raw.get(floor) == b"1"
    assert raw.ttl(floor) > raw.ttl(task), "a receiver knows the last fence for longer than the task lives"
    age(raw, store, 600)
    assert left(raw, store) <= TTL - 600
    # Reading leaves it; each way of writing refreshes all of it.
    store.read("task")
    store.task("task")
    assert left(raw, store) <= TTL - 600
    for write in (
        lambda: writer.save(*tree("b")),
        lambda: writer.write(call_row(writer.seq, status="succeeded")),
        lambda: store.pin("task", 1, True),
        lambda: store.release("task", store.acquire("task", b"me")),
        lambda: store.write_task(image_of(store, "task"), over=image_of(store, "task")) or store.pin("task", 1, False),
    ):
        age(raw, store, 300)
        assert left(raw, store) <= TTL - 300
        write()
        assert TTL - 5 <= left(raw, store) <= TTL


def test_field_case_72_after_its_time_a_task_is_absent_and_not_damaged(url: str, raw: Any) -> None:
    with contextlib.closing(open_store(url, ttl=1)) as store:
        assert isinstance(store, RedisStore)
        writer = Writer(store)
        writer.save(*tree("a"))
        writer.settle(writer.call())
        grant = store.acquire("task", b"me")
        store.release("task", grant)
        end = time.monotonic() + 20
        while store.task("task") is not None:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert is_absent(store)
        done = Writer(store).save(*tree("a"))
        assert (done.seq, done.existed) == (1, False)
        assert store.acquire("task", b"me").guard.fence == grant.guard.fence + 1


@pytest.mark.parametrize("what", ["call", "call in doubt", "call paused", "pause", "lease"])
def test_field_case_72_what_waits_for_somebody_does_not_expire(what: str, store: RedisStore, raw: Any) -> None:
    writer = Writer(store)
    writer.save(*tree("a"))
    assert left(raw, store) > 0
    if what == "lease":
        grant = store.acquire("task", b"me")
        assert left(raw, store) == -1
        Writer(store, guard=grant.guard, head=writer.head).save()
        assert left(raw, store) == -1
        store.release("task", grant)
    elif what == "pause":
        pause = writer.pause()
        assert left(raw, store) == -1
        writer.save()
        assert left(raw, store) == -1, "an approval that is pending does not expire silently"
        writer.write(replace(pause, status="used"))
    else:
        status = {"call": "started", "call in doubt": "in_doubt", "call paused": "paused"}[what]
        call = writer.call(status=status)
        other = writer.call(status=status)
        assert left(raw, store) == -1
        writer.settle(call)
        store.pin("task", 1, True)
        assert left(raw, store) == -1
        writer.settle(other)
    assert TTL - 5 <= left(raw, store) <= TTL
    assert all(raw.ttl(key) >= left(raw, store) for key in keys_of(raw, store))


def test_field_case_72_a_run_that_was_let_go_expires(store: RedisStore, raw: Any) -> None:
    Writer(store).save()
    grant = store.acquire("task", b"me")
    store.abandon("task", grant)
    end = time.monotonic() + 20
    while left(raw, store) < 0:
        assert time.monotonic() < end
        time.sleep(0.02)


def test_field_case_72_an_expire_that_fails_leaves_one_life_for_all() -> None:
    server = Redis()
    try:
        store = open_store(f"{server.safepoint_url}&ttl={TTL}", durability="process", timeout=1)
        assert isinstance(store, RedisStore)
        with contextlib.closing(store), redis.from_url(server.url) as raw:
            writer = Writer(store)
            writer.save(*tree("a"))
            raw.execute_command("ACL", "SETUSER", "default", "-expire", "-persist")
            commit = writer.commit(*tree("b"))
            with pytest.raises(SafepointError):
                store.commit(commit)
            raw.execute_command("ACL", "SETUSER", "default", "+expire", "+persist")
            # Landed or not, it is whole, and the same commit says which.
            done = store.commit(commit)
            assert done.seq == 2
            found = store.read("task", id=commit.id)
            assert found is not None
            assert found[1] == {o.name: o for o in tree("b")}
            writer.head = done.head
            writer.save(*tree("c"))
            assert keys_of(raw, store) == {store._client.keys.task("task")}
            assert TTL - 5 <= left(raw, store) <= TTL
    finally:
        server.close()


@pytest.mark.parametrize("point", ["redis.send", "redis.answer", "commit.before"])
def test_field_case_72_a_connection_that_is_cut_leaves_one_life_for_all(point: str, store: RedisStore, raw: Any) -> None:
    writer = Writer(store)
    for i in range(4):
        hits = 0

        def cut(name: str, nth: int = i) -> None:
            nonlocal hits
            hits += name == point
            if name == point and hits == nth:
                raw.client_kill_filter(_type="normal", skipme=True)

        _probe.hook = cut
        try:
            writer.save(*tree(f"{i}"))
            writer.settle(writer.call())
        finally:
            _probe.hook = None
        assert TTL - 5 <= left(raw, store) <= TTL
        assert store.read("task", seq=writer.seq) is not None


def test_a_whole_task_that_is_being_written_expires_if_its_writer_dies(store: RedisStore, raw: Any) -> None:
    Writer(store).save(*tree("a"))
    image = image_of(store, "task")
    seen: list[dict[bytes, int]] = []

    def look(name: str) -> None:
        if name == "write_task.staged":
            seen.append({key: raw.ttl(key) for key in keys_of(raw, store)})
            raise KeyboardInterrupt

    store.delete_task("task")
    _probe.hook = look
    try:
        with pytest.raises(KeyboardInterrupt):
            store.write_task(image)
    finally:
        _probe.hook = None
    (ages,) = seen
    (beside,) = ages
    assert 0 < ages[beside] <= 600
    assert keys_of(raw, store) == set(), "and if it lives, it removes it at once"
    assert is_absent(store)


# -- field case 74


def shape(raw: Any, store: RedisStore, seq: int) -> tuple[int, int, bool]:
    """How many values the header of a checkpoint has, whether its root is there, and its id."""
    key = store._client.keys.task("t")
    row = layout.checkpoint(seq, raw.hget(key, f"h:{seq}"), raw.hget(key, f"r:{seq}"))
    row.check("t", "")
    assert raw.hget(key, layout.field("i", "", row.id)) == b"%d" % seq
    return raw.hget(key, f"h:{seq}")[2], int(row.schema), bool(row.metrics or row.metadata or row.kind)


async def _latest(acp: Any) -> State:
    state = await acp.load_latest("t")
    assert state is not None
    return state


@pytest.mark.scaled
@pytest.mark.parametrize("size", [1_000, 6_000_000], ids=["small", "in many parts"])
def test_field_case_74_whatever_a_cancelled_save_wrote_is_a_save_like_any_other(size: int, url: str, raw: Any) -> None:
    points = scale(20, 40)

    async def main() -> list[int]:
        landed: list[int] = []
        passed: list[int] = []
        acp = safepoint.open_async(url, ttl=TTL)
        store = acp.sync.store
        assert isinstance(store, RedisStore)
        loop = asyncio.get_running_loop()
        state = State("t")
        await acp.save(state)
        for point in range(points + 1):
            state.step += 1
            # Each time something of a size that is new.
            state.agent_state = {f"part {i}": f"{point}.{i} " * (size // 10 // 5) for i in range(10)}
            hits, name = 0, new_id()
            saving = asyncio.ensure_future(acp.save(state, id=name))

            def hook(_: str, saving: Any = saving, point: int = point) -> None:
                nonlocal hits
                hits += 1
                if hits == point:
                    loop.call_soon_threadsafe(saving.cancel)
                    time.sleep(0.01)

            _probe.hook = hook
            if point == 0:
                saving.cancel()  # before it has begun
            try:
                await saving
            except asyncio.CancelledError:
                pass
            finally:
                _probe.hook = None
            passed.append(hits)
            # What landed is known by its id, and nothing lands later.
            found = await asyncio.to_thread(store.read, "t", id=name)
            if found is None:
                state = await _latest(acp)
            else:
                landed.append(found[0].seq)
                assert found[0].parent_seq == found[0].seq - 1
        await acp.close()
        assert size < 1_000_000 or max(passed) >= 20, f"each at another point of a save: {passed}"
        return landed

    landed = asyncio.run(main())
    assert 0 < len(landed) <= points
    with contextlib.closing(open_store(url, ttl=TTL)) as store:
        assert isinstance(store, RedisStore)
        rows = store.headers("t")
        assert [row.seq for row in rows] == list(range(len(landed) + 1, 0, -1)), "a gap, or one that came later"
        assert store.unreadable("t", [row.seq for row in rows]) == {}
        assert len({shape(raw, store, row.seq) for row in rows}) == 1
        assert keys_of(raw, store) == {store._client.keys.task("t")}
        assert TTL - 60 <= left(raw, store, "t") <= TTL
        task = raw.hgetall(store._client.keys.task("t"))
        assert not [field for field in task if field.startswith(b"s:")], "parts of a save that did not land"
        assert task.get(b"stages", b"") == b""
        assert [part for part in store.walk("t") if isinstance(part, Lost)] == []


def test_field_case_74_a_cancelled_save_replaces_nothing_newer(url: str) -> None:
    async def main() -> None:
        acp = safepoint.open_async(url)
        store = acp.sync.store
        state = State("t")
        await acp.save(state)
        other = await _latest(acp)
        other.step = 2
        newer = await acp.save(other)
        state.step = 1
        state.agent_state = {"big": "x" * 3_000_000}
        saving = asyncio.ensure_future(acp.save(state))
        await asyncio.sleep(0)
        saving.cancel()
        with pytest.raises((asyncio.CancelledError, safepoint.Conflict)):
            await saving
        assert [row.seq for row in store.headers("t")] == [newer.seq, 1]
        assert (await _latest(acp)).step == 2
        await acp.close()

    asyncio.run(main())


def test_objects_of_a_first_save_that_died_expire(store: RedisStore, raw: Any) -> None:
    big = [obj(b"big %d" % i * 60_000) for i in range(6)]
    commit = Writer(store).commit(*big)
    store._stage(commit)
    (key,) = keys_of(raw, store)
    assert 0 < raw.ttl(key) <= layout.STAGE_FOR
    assert is_absent(store)
    assert not store.delete_task("task")
    assert store.prune("task", [1]).objects == 0
    done = store.commit(commit)
    assert done.seq == 1
    assert TTL - 5 <= left(raw, store) <= TTL

"""What the Redis store does when its server is full, restricts its user, has gone back, or was set up in another way before."""

import os
import signal
import time
from typing import Any

import pytest
import redis

from safepoint import _probe
from safepoint.errors import Conflict, LeaseHeld, NotFound, StoreFull, Unavailable, UsageError
from safepoint.rows import Head, TaskPatch, replace
from safepoint.stores.redis import commit as commits
from safepoint.stores.redis import sweep
from safepoint.stores.redis.store import RedisStore
from safepoint.stores.renewing import clock
from safepoint.stores.url import open_store
from safepoint.testing.build import Writer, obj, tree
from tests.support.redis_line import Line
from tests.support.servers import Redis, fresh_redis_url, shared_redis


@pytest.fixture
def url():
    return fresh_redis_url()


@pytest.fixture
def store(url):
    store = open_store(url, timeout=5, durability="process")
    yield store
    store.close()


@pytest.fixture
def raw():
    with redis.Redis.from_url(shared_redis().url) as raw:
        yield raw


@pytest.fixture(scope="module")
def own_server():
    server = Redis()
    yield server
    server.close()


@pytest.fixture
def own(own_server):
    """A server that a test may put into any state, as long as it takes it out again."""
    yield own_server
    with redis.Redis.from_url(own_server.url) as raw:
        raw.config_set("maxmemory", "0")
        raw.flushall()


# -- no memory


def test_what_frees_memory_can_be_done_when_there_is_none(own):
    """That is what the error tells people to do; and a run that ends because of it must be able to end."""
    store: Any = open_store(own.safepoint_url, timeout=5, durability="process")
    with redis.Redis.from_url(own.url) as raw:
        for task in ("one", "two"):
            grant = store.acquire(task, b"me")
            writer = Writer(store, task, guard=grant.guard)
            for text in "abc":
                writer.save(*tree(text))
            if task == "two":
                store.release(task, grant)
        raw.config_set("maxmemory", "1mb")
        with pytest.raises(StoreFull, match="delete tasks"):
            Writer(store, "three").save(*tree("d"))
        grants = store.lease("one")
        assert grants is not None
        assert store._renew([claim for claim in store._renewals._mine.values() if claim.task == "one"]) == ({grants.token}, {})
        (claim,) = [claim for claim in store._renewals._mine.values() if claim.task == "one"]
        store._forsake([claim])
        gone = store.prune("two", [1, 2])
        assert gone.seqs == (1, 2)
        assert gone.objects == 6
        assert store.delete_task("two")
        assert store.delete_task("one")
        assert store.task("two") is None
    store.close()


def test_a_lease_is_given_back_when_there_is_no_memory(own):
    store = open_store(own.safepoint_url, timeout=5, durability="process")
    with redis.Redis.from_url(own.url) as raw:
        Writer(store).save()
        grant = store.acquire("task", b"me")
        raw.config_set("maxmemory", "1mb")
        store.release("task", grant, TaskPatch(status="failed"))
    row = store.task("task")
    assert row is not None
    assert row.status == "failed"
    store.close()


def test_a_big_save_that_finds_no_memory_half_way_leaves_no_stage(own, monkeypatch):
    monkeypatch.setattr(commits, "BATCH", 1000)
    store: Any = open_store(own.safepoint_url, timeout=5, durability="process")
    writer = Writer(store)
    writer.save()
    staged = 0

    def hook(name):
        nonlocal staged
        staged += name == "commit.staged"
        if staged == 2:
            admin.config_set("maxmemory", "1mb")

    with redis.Redis.from_url(own.url) as admin:
        _probe.hook = hook
        try:
            with pytest.raises(StoreFull):
                writer.save(*[obj(b"%d" % i * 1500) for i in range(5)])
        finally:
            _probe.hook = None
        key = store._client.keys.task("task")
        assert not admin.hget(key, "stages")
        assert not [field for field in admin.hkeys(key) if field.startswith(b"s:")]
        assert store.prune("task", []).objects == 2
    store.close()


# -- rights


def test_a_right_that_is_missing_is_not_taken_for_damage(own):
    with redis.Redis.from_url(own.url) as raw:
        raw.acl_setuser("some", enabled=True, nopass=True, keys=["*"], commands=["+@all", "-info"])
        try:
            url = own.safepoint_url.replace("redis+unix://", "redis+unix://some:x@")
            store = open_store(url, timeout=5, durability="process")
            Writer(store).save(*tree("a"))
            with pytest.raises(UsageError, match="not permitted") as caught:
                store.prune("task", [])
            assert "info" in caught.value.why
            assert "ACL" in caught.value.remedy
            store.close()
        finally:
            raw.acl_deluser("some")


def test_a_right_that_is_missing_at_connecting_is_told_at_once(own):
    with redis.Redis.from_url(own.url) as raw:
        raw.acl_setuser("some", enabled=True, nopass=True, keys=["*"], commands=["+@all", "-select"])
        try:
            url = own.safepoint_url.replace("redis+unix://", "redis+unix://some:x@").replace("db=0", "db=1")
            store = open_store(url, timeout=5, durability="process")
            begun = clock()
            with pytest.raises(UsageError, match="not permitted") as caught:
                store.task("task")
            assert clock() - begun < 3
            assert "ACL" in caught.value.remedy
            store.close()
        finally:
            raw.acl_deluser("some")


# -- addresses


@pytest.mark.parametrize("url", ["redis://user:hunter2/x@localhost/0", "redis://:hunter2?x@localhost"])
def test_a_password_that_is_written_wrongly_is_not_shown(url):
    with pytest.raises(UsageError) as caught:
        open_store(url)
    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("ttl", [0, -1, 2**31, 10**17])
def test_a_ttl_that_no_server_takes_is_refused_before_anything_is_written(url, ttl):
    """EXPIRE is a script's last command: what came before it would stand, and be told as an error."""
    with pytest.raises(UsageError, match="ttl"):
        RedisStore(url, ttl=ttl)


# -- listings


def test_a_task_of_many_numbers_is_listed_while_others_write(store, raw, monkeypatch):
    writer = Writer(store)
    writer.save()
    key = store._client.keys.task("task")
    raw.hset(key, "n", "300000 0 0 1 0")
    writer.save()
    script = store._client.script

    def busy(name, *args, **more):
        answer = script(name, *args, **more)
        raw.hincrby(key, "w", 1)
        return answer

    monkeypatch.setattr(store._client, "script", busy)
    assert [row.seq for row in store.headers("task")] == [300001, 1]


# -- ttl


def test_a_ttl_begins_when_a_store_is_closed_and_not_when_a_lease_has_run_out(url, raw):
    store: Any = open_store(url, timeout=5, durability="process", ttl=1000, lease=1)
    Writer(store).save()
    key = store._client.keys.task("task")
    grant = store.acquire("task", b"me")
    raw.hset(key, "f:until", "1")  # as after a death elsewhere, long ago
    assert not store.lease("task").live
    store.pin("task", 1, pinned=True)
    assert raw.ttl(key) == -1
    store.abandon("task", grant)
    store.close()
    assert 0 < raw.ttl(key) <= 1000
    other = open_store(url, timeout=5, durability="process")
    other.pin("task", 1, pinned=False)
    other.close()
    assert raw.ttl(key) == -1, "who gave no ttl lets it stay"


def test_a_task_that_is_gone_under_a_live_holder_is_not_begun_anew(url, raw):
    store: Any = open_store(url, timeout=5, durability="process", ttl=1000, lease=1)
    writer = Writer(store)
    writer.save()
    guard = store.acquire("task", b"me").guard
    raw.delete(store._client.keys.task("task"))
    with pytest.raises(NotFound):
        store.commit(writer.commit(guard=guard))
    end = clock() + 5
    while store.holds("task", guard) and clock() < end:
        time.sleep(0.02)
    assert not store.holds("task", guard)
    assert store.task("task") is None
    store.close()


# -- fences


def test_fences_go_on_where_ttl_came_later(url, raw):
    plain = open_store(url, timeout=5, durability="process")
    writer = Writer(plain)
    writer.save()
    for fence in (1, 2, 3):
        grant = plain.acquire("task", b"me")
        assert grant.guard.fence == fence
        plain.release("task", grant)
    short: Any = open_store(url, timeout=5, durability="process", ttl=1000)
    Writer(short, head=writer.head).save()
    key = short._client.keys.task("task")
    assert raw.ttl(key) > 0
    raw.delete(key)  # as if the time was over
    assert short.acquire("task", b"me").guard.fence == 4
    plain.close()
    short.close()


# -- replicas


def test_what_was_sent_twice_is_on_the_replicas_too(tmp_path):
    """WAIT waits for the writes of its own connection, and the first one's is gone."""
    primary = Redis(tcp=True)
    replica = Redis("--replicaof", f"127.0.0.1 {primary.port}", "--repl-diskless-sync-delay", "0", tcp=True)
    line = Line(tmp_path, primary.socket_path)
    store = open_store(line.url, timeout=1, durability="process", wait_replicas=1)
    try:
        with redis.Redis.from_url(primary.url) as raw:
            end = time.monotonic() + 20
            while raw.info("replication").get("slave0", {}).get("state") != "online":
                assert time.monotonic() < end
                time.sleep(0.02)
        Writer(store).save()
        assert store.pin("task", 1, False)  # so that the server knows the script
        os.kill(replica.pid, signal.SIGSTOP)
        try:
            line.lose(b"EVALSHA")
            with pytest.raises(Unavailable, match="replicas"):
                store.pin("task", 1, True)
            assert line.lost == 1
            line.lose(b"")
        finally:
            os.kill(replica.pid, signal.SIGCONT)
        assert store.pin("task", 1, True)
    finally:
        store.close()
        line.close()
        replica.close()
        primary.close()


def test_what_wrote_nothing_is_told_as_it_is_also_where_replicas_are_missing(own):
    plain = open_store(own.safepoint_url, durability="process")
    store = open_store(own.safepoint_url, timeout=0.5, durability="process", wait_replicas=1)
    writer = Writer(plain)
    first = writer.save()
    assert first.seq is not None
    writer.save()
    with pytest.raises(Conflict):
        Writer(store, head=Head(first.seq, first.head.id)).save()
    assert plain.pin("task", 9, True) is False  # so that the server knows the script
    grant = plain.acquire("task", b"me")
    with pytest.raises(LeaseHeld):
        Writer(store, head=writer.head).save()
    assert store.pin("task", 9, True) is False
    with pytest.raises(Unavailable, match="replicas"):
        store.pin("task", 1, True)
    plain.release("task", grant)
    assert [row.pinned for row in plain.headers("task")] == [False, True]
    plain.close()
    store.close()


def test_a_refusal_of_the_server_is_told_in_its_words(own):
    store = open_store(own.safepoint_url, timeout=0.3, durability="process")
    with redis.Redis.from_url(own.url) as raw:
        raw.config_set("min-replicas-to-write", "1")
        try:
            with pytest.raises(Unavailable) as caught:
                store.acquire("task", b"me")
        finally:
            raw.config_set("min-replicas-to-write", "0")
    assert caught.value.why.rstrip(".") == "NOREPLICAS Not enough good replicas to write"
    store.close()


# -- a server that has gone back


def test_a_server_that_goes_back_behind_what_a_sweep_has_seen_loses_nothing():
    """Not behind the sweep's own moment, which would be seen by that: a removal that it has met is undone."""
    server = Redis(durable=True)
    try:
        store: Any = open_store(server.safepoint_url, timeout=20)
        writer = Writer(store)
        for text in "abc":
            writer.save(*tree(text))
        key = store._client.keys.task("task")
        with redis.Redis.from_url(server.url) as raw:
            script = store._client.script
            kept: list[Any] = []

            def first(name, *args, **more):
                if name == "sweep_scan" and not kept:
                    kept.append(raw.dump(key))
                    assert store.prune("task", [1], sweep=False).seqs == (1,)
                return script(name, *args, **more)

            def hook(name):
                if name == "sweep.marked" and not failed:
                    failed.append(name)
                    server.restart()
                    raw.restore(key, 0, kept[0], replace=True)

            failed: list[str] = []
            store._client.script = first
            _probe.hook = hook
            try:
                store.prune("task", [])
            finally:
                _probe.hook = None
        assert failed
        found = store.read("task", seq=1)
        assert found is not None
        assert set(found[1]) == {o.name for o in tree("a")}
        store.close()
    finally:
        server.close()


@pytest.mark.parametrize("kind", ["call", "pause"])
def test_a_row_is_not_taken_for_another_that_has_its_number(store, raw, kind):
    writer = Writer(store)
    writer.save()
    grant = store.acquire("task", b"me")
    writer.guard = grant.guard
    key = store._client.keys.task("task")
    before = raw.dump(key)
    make = writer.call if kind == "call" else writer.pause
    at = {"started_at": 1_700_000_000_000_000} if kind == "call" else {"asked_at": 1_700_000_000_000_000}
    lost = make(**at)
    raw.restore(key, 0, before, replace=True)
    there = make(**{name: value + 1 for name, value in at.items()})
    assert (there.no, there.version) == (lost.no, lost.version)
    with pytest.raises(Conflict, match="gone back"):
        writer.write(replace(lost, status="failed" if kind == "call" else "answered"))
    (row,) = store.calls("task")[0] if kind == "call" else store.pauses("task")
    assert row == there
    writer.write(replace(there, status="failed" if kind == "call" else "answered"))


def test_a_number_of_writes_that_comes_again_is_no_proof_that_rows_may_go(monkeypatch):
    monkeypatch.setattr(sweep, "ROWS", 1)
    server = Redis(durable=True)
    try:
        store: Any = open_store(server.safepoint_url, timeout=20)
        writer = Writer(store)
        for text in "abcd":
            writer.save(*tree(text))
        key = store._client.keys.task("task")
        kept: list[Any] = []
        gone: list[int] = []
        with redis.Redis.from_url(server.url) as raw:

            def drop(*args):
                if not kept:
                    kept.append(raw.dump(key))
                elif not gone:
                    # The first removal is undone, and somebody's branch makes as many writes as it did.
                    gone.append(1)
                    server.restart()
                    raw.restore(key, 0, kept[0], replace=True)
                    Writer(store, branch="side").save(row={"parent_seq": 2, "step": 0}, line=1)
                return drop_rows(*args)

            drop_rows = sweep._drop_rows
            monkeypatch.setattr(sweep, "_drop_rows", drop)
            assert 2 not in store.prune("task", [1, 2]).seqs
        assert gone
        assert store.read("task", seq=2) is not None
        store.close()
    finally:
        server.close()


# -- leases


def test_a_task_that_is_damaged_takes_no_other_lease_with_it(url, raw, caplog):
    store: Any = open_store(url, timeout=5, durability="process", lease=2)
    tasks = {task: store.acquire(task, b"me").guard for task in ("odd", "a", "b")}
    key = store._client.keys.task("odd")
    kept = raw.dump(key)
    raw.set(key, "something else")
    end = clock() + 3
    while clock() < end:
        assert [store.holds(task, tasks[task]) for task in ("a", "b")] == [True, True]
        time.sleep(0.02)
    assert not store.holds("odd", tasks["odd"])
    assert "the lease of 1 task is not renewed" in caplog.text
    raw.restore(key, 0, kept, replace=True)
    end = clock() + 5
    while not store.holds("odd", tasks["odd"]):
        assert clock() < end
        time.sleep(0.02)
    store.close()


# -- closed


def test_a_save_whose_answer_was_lost_as_the_store_was_closed_is_unknown(own, tmp_path):
    line = Line(tmp_path, own.socket_path)
    store: Any = open_store(line.url, timeout=5, durability="process")
    writer = Writer(store)
    writer.save()
    line.lose(b"EVALSHA")
    commit = writer.commit()
    answered = 0

    def hook(name):
        nonlocal answered
        answered += name == "redis.send"
        if answered == 1:
            store._client.closed = True

    _probe.hook = hook
    try:
        with pytest.raises(Unavailable) as caught:
            store.commit(commit)
    finally:
        _probe.hook = None
        store._client.closed = False
        line.close()
    assert caught.value.details == {"id": commit.id, "task": "task", "unknown": True}
    store.close()

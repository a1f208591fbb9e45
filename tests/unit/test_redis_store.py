"""What the Redis store does when its server, its line or its process do not: and what lies there for others to see."""

import logging
import os
import signal
import time
from typing import Any

import pytest
import redis

import safepoint
from safepoint import _probe
from safepoint.errors import Conflict, Damaged, LeaseHeld, LeaseLost, StoreFull, Unavailable, UsageError
from safepoint.model import new_id
from safepoint.rows import CallWrite, Commit, TaskPatch, replace
from safepoint.stores.redis import client as clients
from safepoint.stores.redis import commit as commits
from safepoint.stores.redis import layout
from safepoint.stores.redis.store import RedisStore
from safepoint.stores.url import open_store
from safepoint.testing.build import Writer, call_row, obj, tree
from tests.support.redis_line import Line
from tests.support.servers import Redis, fresh_redis_url, shared_redis


@pytest.fixture
def url():
    return fresh_redis_url()


@pytest.fixture
def store(url):
    store = open_store(url, timeout=5)
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
        raw.flushall()


@pytest.fixture
def line(tmp_path, own):
    line = Line(tmp_path, own.socket_path)
    yield line
    line.close()


def keys_of(store, raw):
    return sorted(raw.scan_iter(f"{store.prefix}*", count=10_000))


# -- what lies there


def test_a_task_is_one_hash_and_an_entry_in_the_index(store, raw):
    writer = Writer(store, "}x{ \N{SNOWMAN}")
    writer.save(*tree("a"), patch=TaskPatch(agent="a", input=b"job"))
    writer.call()
    writer.pause()
    key, index = store._client.keys.task(writer.task), store._client.keys.index_of(writer.task)
    assert keys_of(store, raw) == sorted([key, index])
    assert list(raw.hkeys(index)) == [writer.task.encode()]
    fields = {field.partition(b":")[0] for field in raw.hkeys(key)}
    # What layout.py does not name is not there.
    assert fields <= set(b"t n w count h r i b l branches d c p o k g j open asks q stages s f".split())
    (found,) = [layout.obj(o.name, raw.hget(key, b"o:" + o.name)) for o in tree("a")[:1]]
    assert found == tree("a")[0]


def test_the_index_forgets_only_what_has_been_gone_for_long(store, raw):
    Writer(store, "here").save()
    index = store._client.keys.index_of("gone")
    raw.hset(index, "gone", int(time.time()))
    assert [row.task for row in store.tasks()] == ["here"]
    assert raw.hexists(index, "gone"), "somebody may be about to create it"
    raw.hset(index, "gone", int(time.time()) - 7200)
    assert [row.task for row in store.tasks()] == ["here"]
    assert not raw.hexists(index, "gone")


def test_scripts_that_the_server_has_forgotten_are_sent_again(store, raw):
    writer = Writer(store)
    for i in range(3):
        raw.script_flush()
        writer.save(*tree(str(i)))
        raw.script_flush()
        assert store.tasks()[0].checkpoints == i + 1
        raw.script_flush()
        assert store.read("task") is not None


# -- repeated


def write(store, *rows, id=None):
    return Commit(task="task", id=id or new_id(), calls=tuple(CallWrite(row, "began") for row in rows))


def test_the_last_sixteen_journal_writes_are_known_when_they_come_again(store):
    Writer(store).save()
    sent = [write(store, call_row(1)) for _ in range(20)]
    done = [store.commit(commit) for commit in sent]
    changed = store.commit(write(store, replace(done[10].calls[0], status="failed"))).calls[0]
    for i, (commit, first) in enumerate(zip(sent, done, strict=True)):
        if i < 5:
            continue  # they are forgotten: see below
        again = store.commit(commit)
        assert again.existed
        assert again.calls == ((changed,) if i == 10 else first.calls)
    assert len(store.calls("task")[0]) == 20
    # Who comes later than that and changes a row meets its version.
    late = write(store, replace(done[0].calls[0], status="failed"))
    store.commit(late)
    for _ in range(16):
        store.commit(write(store, call_row(1)))
    with pytest.raises(Conflict):
        store.commit(late)


def test_an_answer_that_was_lost_is_asked_for_again(line, own):
    store = open_store(line.url, timeout=5)
    try:
        writer = Writer(store)
        writer.save(*tree("a"))
        call = writer.call()
        line.lose(b"EVALSHA")
        commit = writer.commit(*tree("b"))
        done = store.commit(commit)
        assert (line.lost, done.seq, done.existed) == (1, 2, True)
        line.lose(b"EVALSHA", 3)
        done = store.commit(write(store, replace(call, status="failed")))
        assert (line.lost, done.existed, done.calls[0].version) == (3, True, 2)
        line.lose(b"EVALSHA", 2)
        grant = store.acquire("task", b"me")
        assert (line.lost, grant.guard.fence, grant.previous) == (2, 1, "")
        assert store.holds("task", grant.guard)
        line.lose(b"EVALSHA")
        store.release("task", grant, TaskPatch(status="finished"))
        row = store.task("task")
        assert line.lost == 1
        assert row is not None
        assert (row.status, row.attempts, row.checkpoints) == ("finished", 1, 2)
        line.lose(b"EVALSHA", 2)
        assert store.acquire("task", b"me", steal=True).previous == "released"
    finally:
        store.close()


def test_what_cannot_be_known_in_time_says_so(line, own):
    store = open_store(line.url, timeout=0.5)
    try:
        writer = Writer(store)
        writer.save()
        store.release("task", store.acquire("task", b"me"))
        line.lose(b"EVALSHA", 1000)
        commit = writer.commit(*tree("b"))
        begun = time.monotonic()
        with pytest.raises(Unavailable) as caught:
            store.commit(commit)
        assert time.monotonic() - begun < 3
        assert caught.value.details == {"id": commit.id, "task": "task", "unknown": True}
        with pytest.raises(Unavailable) as caught:
            store.acquire("task", b"me")
        assert caught.value.details == {"task": "task", "unknown": True}
        with pytest.raises(Unavailable) as caught:
            store.read("task")
        assert "unknown" not in caught.value.details
        line.lose(b"")
        found = store.read("task", id=commit.id)
        assert found is not None
        # It was granted, and nobody has it: on this host that is seen at once.
        assert store.acquire("task", b"me").previous == "dead"
    finally:
        store.close()


# -- no answer


def test_nobody_there_is_unavailable_in_time_and_shows_no_password():
    store = RedisStore("redis://user:hush@127.0.0.1:1/0?timeout=0.3", timeout=0.3, durability="process")
    for verb in (lambda: store.commit(Writer(store).commit()), lambda: store.task("x"), lambda: store.acquire("x", b"")):
        begun = time.monotonic()
        with pytest.raises(Unavailable) as caught:
            verb()
        assert time.monotonic() - begun < 2
        assert "hush" not in f"{caught.value!s}{caught.value!r}{caught.value.details}"
        assert "unknown" not in caught.value.details
    assert "hush" not in f"{store!r}{store.url}{store._client!r}{store._client._nodes!r}"
    store.close()


def test_a_wrong_password_is_told_at_once_and_as_what_no_retry_changes(own):
    with redis.Redis.from_url(own.url) as raw:
        raw.config_set("requirepass", "open sesame")
        raw.execute_command("AUTH", "open sesame")
        wrong = RedisStore(own.safepoint_url + "&password=hush", timeout=5)
        none = RedisStore(own.safepoint_url, timeout=5)
        right = RedisStore(own.safepoint_url + "&password=open%20sesame", timeout=5, durability="process")
        try:
            for store in (wrong, none):
                for verb in (lambda s: s.task("x"), lambda s: s.commit(Writer(s).commit()), lambda s: s.acquire("x", b"")):
                    begun = time.monotonic()
                    with pytest.raises(UsageError) as caught:
                        verb(store)
                    assert time.monotonic() - begun < 3
                    assert "in the URL" in caught.value.remedy
                    assert "hush" not in f"{caught.value!s}{caught.value!r}{caught.value.details}{caught.value.__cause__!r}"
                assert store.durability == "process", "as far as is known"
                found = {f.name: f for f in store.check()}
                assert {found["write"].level, found["server"].level} == {"error"}
                assert "in the URL" in found["write"].remedy
                assert "in the URL" in found["server"].remedy
            assert right.task("x") is None
        finally:
            raw.config_set("requirepass", "")
            for store in (wrong, none, right):
                store.close()


def test_an_outcome_that_is_not_known_is_told_also_where_the_login_is_refused_by_then(own, line):
    store = open_store(line.url, timeout=2, durability="process")
    writer = Writer(store)
    writer.save()
    commit = writer.commit()
    sends = 0
    with redis.Redis.from_url(own.url) as raw:

        def rotate(name, *_):
            nonlocal sends
            sends += name == "redis.send"
            if sends == 2:
                raw.config_set("requirepass", "open sesame")

        raw.ping()
        line.lose(b"EVALSHA")
        _probe.hook = rotate
        try:
            with pytest.raises(Unavailable) as caught:
                store.commit(commit)
        finally:
            _probe.hook = None
            raw.execute_command("AUTH", "open sesame")
            raw.config_set("requirepass", "")
        assert sends == 2
        assert caught.value.details["unknown"] is True
        assert "Authentication required" in caught.value.why
    assert store.commit(commit).existed
    store.close()


def test_a_save_whose_outcome_is_not_known_is_saved_again_under_its_id(own, line):
    with safepoint.open(line.url, timeout=0.5, durability="process") as cp:
        state = safepoint.State("task", agent_state={"n": 1})
        cp.save(state)
        state.agent_state["n"] = 2
        line.lose(b"EVALSHA", 10_000)
        with pytest.raises(Unavailable) as caught:
            cp.save(state)
        line.lose(b"", 0)
        assert cp.save(state, id=caught.value.details["id"]).seq == 2
        state.agent_state["n"] = 3
        assert cp.save(state).seq == 3


def test_a_server_that_is_stopped_answers_later(own):
    store = open_store(own.safepoint_url, timeout=0.5)
    os.kill(own.pid, signal.SIGSTOP)
    try:
        begun = time.monotonic()
        with pytest.raises(Unavailable):
            store.task("task")
        assert time.monotonic() - begun < 2
    finally:
        os.kill(own.pid, signal.SIGCONT)
    assert store.task("task") is None
    store.close()


def test_all_connections_in_use_are_told_by_name(url):
    store: Any = open_store(url, timeout=0.3, pool=2)
    pool = store._client._nodes.pool()
    lent = [pool._take(time.monotonic() + 1) for _ in range(2)]
    begun = time.monotonic()
    with pytest.raises(Unavailable, match=r"all 2 connections.*pool"):
        store.task("task")
    assert time.monotonic() - begun < 2
    del lent  # an interrupt that keeps one from being given back costs none
    assert store.task("task") is None
    store.close()


def test_a_replica_is_not_written_to_and_a_promoted_one_is(own):
    store = open_store(own.safepoint_url, timeout=0.5, durability="process")
    with redis.Redis.from_url(own.url) as raw:
        writer = Writer(store)
        writer.save()
        raw.execute_command("REPLICAOF", "127.0.0.1", "1")
        try:
            with pytest.raises(Unavailable, match="READONLY"):
                writer.save()
        finally:
            raw.execute_command("REPLICAOF", "NO", "ONE")
    assert writer.save().seq == 2
    store.close()


def test_used_up_memory_is_a_full_store_that_can_still_be_read(own):
    store = open_store(own.safepoint_url, timeout=5, durability="process")
    with redis.Redis.from_url(own.url) as raw:
        writer = Writer(store)
        writer.save(*tree("a"))
        raw.config_set("maxmemory", "1mb")
        try:
            for verb in (lambda: writer.save(*tree("b")), lambda: store.acquire("task", b"me")):
                with pytest.raises(StoreFull, match="maxmemory"):
                    verb()
            found = store.read("task")
            assert found is not None
            assert found[0].seq == 1
        finally:
            raw.config_set("maxmemory", "0")
    assert writer.save(*tree("b")).seq == 2
    store.close()


def test_replicas_that_are_missing_are_told_and_the_write_stands(own):
    store = open_store(own.safepoint_url, timeout=0.5, durability="process", wait_replicas=1)
    commit = Writer(store).commit()
    with pytest.raises(Unavailable, match="replicas") as caught:
        store.commit(commit)
    assert caught.value.details["unknown"] is True
    assert caught.value.details["id"] == commit.id
    assert store.read("task", id=commit.id) is not None
    store.close()


def test_a_field_of_another_kind_is_damage_and_no_outage(store, raw):
    Writer(store).save()
    raw.hset(store._client.keys.task("task"), "w", "many")
    with pytest.raises(Damaged):
        Writer(store, branch="b").save()


# -- what is kept


def test_durability_is_what_the_server_keeps(own, store, caplog):
    assert store.durability == "full"
    with caplog.at_level(logging.WARNING, "safepoint"):
        weak = open_store(own.safepoint_url)
        Writer(weak).save()
    assert weak.durability == "process"
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "appendfsync always" in caplog.text
    weak.close()
    assert open_store(own.safepoint_url, durability="process").durability == "process"


def test_options_that_nobody_knows_are_refused(url):
    with pytest.raises(UsageError, match="colour"):
        open_store(url + "&colour=red")
    with pytest.raises(UsageError, match="socket_timeout"):
        open_store(url + "&socket_timeout=3")
    with pytest.raises(UsageError, match="braces"):
        open_store(url, prefix="a{b}") if "prefix" not in url else RedisStore("redis://h", prefix="a{b}")
    store = open_store(url + "&client_name=me")
    assert store.task("x") is None
    store.close()


# -- big saves


def big(n=3):
    return [obj(bytes([i]) * 700_000) for i in range(n)]


def test_a_big_save_goes_ahead_in_batches(store, raw, monkeypatch):
    seen = []
    key = store._client.keys.task("task")

    def look(name):
        if name == "commit.staged":
            seen.append((raw.hget(key, "stages"), store.task("task"), store.tasks(), raw.ttl(key)))

    monkeypatch.setattr(_probe, "hook", look)
    Writer(store).save(*big())
    monkeypatch.setattr(_probe, "hook", None)
    assert len(seen) == 2
    for stages, row, rows, left in seen:
        assert stages
        assert row is None, "a task that is not there yet is not shown"
        assert rows == []
        assert 0 < left <= layout.STAGE_FOR, "what a kill leaves goes by itself"
    assert raw.ttl(key) == -1
    assert raw.hget(key, "stages") == b""
    assert [field for field in raw.hkeys(key) if field.startswith(b"s:")] == []
    found = store.read("task")
    assert found is not None
    assert sorted(found[1]) == sorted(o.name for o in big())


def test_a_stage_that_was_swept_is_sent_again(store, raw, monkeypatch):
    writer = Writer(store)
    writer.save()
    key = store._client.keys.task("task")
    swept: list[Any] = []

    def sweep(name):
        if name == "commit.before" and not swept:
            swept.append(raw.hget(key, "stages"))
            raw.hdel(key, "stages", *[f for f in raw.hkeys(key) if f[:2] in {b"s:", b"o:"}])

    monkeypatch.setattr(_probe, "hook", sweep)
    writer.save(*big())
    monkeypatch.setattr(_probe, "hook", None)
    assert swept[0]
    found = store.read("task")
    assert found is not None
    assert len(found[1]) == 3


def test_a_big_save_that_is_refused_leaves_no_stage(store, raw):
    writer = Writer(store)
    writer.save()
    with pytest.raises(Conflict):
        store.commit(writer.commit(*big(), expect=None))
    key = store._client.keys.task("task")
    assert raw.hget(key, "stages") == b""
    assert store.prune("task", []).objects == 3


def test_a_value_that_redis_cannot_take_is_refused_before_anything_is_sent(store, raw, monkeypatch):
    monkeypatch.setattr(commits, "LARGEST", 1000)
    with pytest.raises(UsageError, match="too large"):
        Writer(store).save(obj(b"x" * 1001), obj(b"y"))
    assert keys_of(store, raw) == []


# -- interrupted


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it may come in a callback of the collector
def test_an_interrupt_leaves_no_answer_for_the_next_request(store):
    tasks = [f"t{i}" for i in range(4)]
    for task in tasks:
        Writer(store, task).save(*tree(task))

    class Stop(BaseException):
        pass

    def stop(signum, frame):
        raise Stop

    before = signal.signal(signal.SIGALRM, stop)
    stopped = 0
    try:
        for i in range(400):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.00005 + (i % 40) * 0.00004)
                for task in tasks:
                    store.read(task)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Stop:
                stopped += 1
            for task in tasks:
                row = store.task(task)
                assert row is not None
                assert row.task == task
                found = store.read(task)
                assert found is not None
                assert set(found[1]) == {o.name for o in tree(task)}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert stopped > 50


@pytest.mark.parametrize("point", range(1, 6))
def test_a_save_that_is_cancelled_is_as_any_other_or_none(store, raw, monkeypatch, point):
    # Field case 74: nothing is written by a side path.
    writer = Writer(store)
    writer.save(*tree("a"))
    left = [point]

    def cancel(name):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt

    commit = writer.commit(*tree("b"), row={"metadata": b"m", "label": "l"})
    monkeypatch.setattr(_probe, "hook", cancel)
    try:
        store.commit(commit)
    except KeyboardInterrupt:
        pass
    monkeypatch.setattr(_probe, "hook", None)
    found = store.read("task", id=commit.id)
    if found is not None:
        sent = commit.checkpoint
        assert sent is not None
        assert found[0] == replace(sent, seq=2).sealed("task")
        assert found[1] == {o.name: o for o in tree("b")}
    again = store.commit(commit)
    assert (again.seq, again.existed) == (2, found is not None)


# -- leases


def hold(channel, url, lease):
    store = open_store(url, lease=lease)
    grant = store.acquire("task", b"me")
    channel.send(grant.guard)
    channel.receive()


def in_child(work):
    """A forked process that does ``work`` and waits to be killed; returns its pid once it says that it has."""
    inlet, outlet = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os.write(outlet, b"x")
            time.sleep(60)
        finally:
            os._exit(1)
    os.close(outlet)
    assert os.read(inlet, 1) == b"x"
    os.close(inlet)
    return pid


def end(pid):
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_killed_holder_on_this_host_is_dead_at_once(store, url):
    kept = []
    pid = in_child(lambda: kept.append(open_store(url).acquire("task", b"me")))
    with pytest.raises(LeaseHeld):
        store.acquire("task", b"me")
    with pytest.raises(LeaseHeld):
        Writer(store).save()
    lease = store.lease("task")
    assert lease is not None
    assert lease.live
    end(pid)
    lease = store.lease("task")
    assert lease is not None
    assert not lease.live
    Writer(store).save()
    grant = store.acquire("task", b"me")
    assert (grant.guard.fence, grant.previous, grant.presumed) == (2, "dead", 0)


def test_a_holder_that_is_silent_for_too_long_is_presumed_dead(store, url):
    kept = []
    pid = in_child(lambda: kept.append(open_store(url, lease=1).acquire("task", b"me")))
    try:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.1)
        with pytest.raises(LeaseHeld) as caught:
            store.acquire("task", b"me")
        assert caught.value.details["holder"] == {}
        time.sleep(1.1)
        grant = store.acquire("task", b"me")
        assert (grant.guard.fence, grant.previous, grant.presumed) == (2, "presumed_dead", 1)
    finally:
        end(pid)


def test_a_lease_that_is_renewed_outlives_its_length(store, url):
    other = open_store(url, lease=1)
    grant = other.acquire("task", b"me")
    time.sleep(1.6)
    assert other.holds("task", grant.guard)
    with pytest.raises(LeaseHeld):
        store.acquire("task", b"you")
    # By force, and the first one hears of it with its next beat.
    store.acquire("task", b"you", steal=True)
    end_at = time.monotonic() + 3
    while other.holds("task", grant.guard) and time.monotonic() < end_at:
        time.sleep(0.02)
    assert not other.holds("task", grant.guard)
    other.close()


def test_who_is_refused_for_another_holder_knows_at_once(store, url):
    other = open_store(url)
    writer = Writer(other)
    writer.save()
    grant = other.acquire("task", b"me")
    store.acquire("task", b"you", steal=True)
    assert other.holds("task", grant.guard), "nobody has told it yet"
    with pytest.raises(LeaseLost):
        other.commit(writer.commit(guard=grant.guard))
    assert not other.holds("task", grant.guard)
    other.close()


def test_a_forked_child_has_connections_of_its_own(store):
    writer = Writer(store)
    writer.save()
    grant = store.acquire("task", b"me")
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            good = store.task("task").checkpoints == 1 and not store.holds("task", grant.guard)
            for _ in range(50):
                good = good and store.read("task")[0].seq == 1
            code = 0 if good else 2
        finally:
            os._exit(code)
    for _ in range(50):
        row = store.task("task")
        assert row is not None
        assert row.task == "task"
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert store.holds("task", grant.guard)
    store.release("task", grant)


# -- expiry


def test_with_ttl_a_task_expires_unless_something_of_it_is_open(url, raw):
    store: Any = open_store(url, ttl=100)
    key, floor = store._client.keys.of("task")
    writer = Writer(store)
    writer.save(*tree("a"))
    assert 0 < raw.ttl(key) <= 100
    call = writer.call()
    assert raw.ttl(key) == -1
    pause = writer.pause()
    writer.settle(call)
    assert raw.ttl(key) == -1
    writer.write(replace(pause, status="answered"))
    assert 0 < raw.ttl(key) <= 100
    grant = store.acquire("task", b"me")
    assert (raw.ttl(key), raw.ttl(floor)) == (-1, -1)
    store.release("task", grant)
    assert 0 < raw.ttl(key) <= 100
    assert raw.ttl(floor) > raw.ttl(key)
    # It is gone as a whole, and its fences go on.
    raw.pexpire(key, 1)
    time.sleep(0.02)
    assert (store.task("task"), store.read("task"), store.tasks()) == (None, None, [])
    assert store.acquire("task", b"me").guard.fence == 2
    store.close()


def test_scripts_are_told_apart_by_their_text():
    assert len({clients.source(name)[1] for name in ("commit", "read", "task")}) == 3

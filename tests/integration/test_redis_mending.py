"""Redis tasks that are damaged behind the library's back: what verify says, and what comes of a repair in place or beside."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import redis

import safepoint
from safepoint import Checkpointer, LeaseHeld, State, UsageError
from safepoint.rows import Lost
from safepoint.stores.redis import mend
from safepoint.testing.build import Writer, dump
from tests.integration.test_verify import journaled
from tests.support.servers import Redis, fresh_redis_url, shared_cluster, shared_redis

Raw = "redis.Redis"


@pytest.fixture
def url() -> str:
    return fresh_redis_url()


@pytest.fixture
def cp(url: str) -> Iterator[Checkpointer]:
    with safepoint.open(url) as cp:
        yield cp


@pytest.fixture
def raw() -> Iterator[Any]:
    with redis.from_url(shared_redis().url) as client:
        yield client


@pytest.fixture
def key(cp: Checkpointer) -> bytes:
    found: bytes = cp.store._client.keys.task("t")  # type: ignore[attr-defined]
    return found


def save(cp: Checkpointer, n: int = 4) -> State:
    state = State("t")
    for i in range(n):
        state.messages.append({"role": "user", "content": f"message {i} " * 40})
        state.step = i
        cp.save(state)
    return state


def top_object(raw: Any, key: bytes, seq: int) -> bytes:
    value = raw.hget(key, b"r:%d" % seq)
    return bytes(value[4:20])


def flip(value: bytes) -> bytes:
    return value[:-20] + bytes([value[-20] ^ 1]) + value[-19:]


DAMAGE: dict[str, tuple[Callable[[Any, bytes], Any], str]] = {
    "a header that is gone": (lambda raw, key: raw.hdel(key, "h:4"), "checkpoint 4"),
    "a header that is no row": (lambda raw, key: raw.hset(key, "h:4", b"\xc1"), "checkpoint 4"),
    "a header of another seal": (lambda raw, key: raw.hset(key, "h:4", raw.hget(key, "h:4")[:-1] + b"x"), "checkpoint 4"),
    "a root that is gone": (lambda raw, key: raw.hdel(key, "r:4"), "checkpoint 4"),
    "a root with another bit": (lambda raw, key: raw.hset(key, "r:4", raw.hget(key, "r:4")[:-1] + b"~"), "checkpoint 4"),
    "a branch that is gone": (lambda raw, key: raw.hdel(key, b"b:\0main"), "branch 'main'"),
    "a branch that is no row": (lambda raw, key: raw.hset(key, b"b:\0main", b"\xc1"), "branch 'main'"),
    "a line that is no row": (lambda raw, key: raw.hset(key, b"l:\0main", msgspec.msgpack.encode(["x", 1])), "branch 'main'"),
    "a branch that no list has": (
        lambda raw, key: raw.hset(key, b"b:\0other", msgspec.msgpack.encode([1, "x"])),
        "branch 'other'",
    ),
    "a mark that is gone": (lambda raw, key: raw.hincrby(key, "k:0", -(1 << 2)), "1 checkpoints too many"),
    "a mark too many": (lambda raw, key: raw.hincrby(key, "k:0", 1 << 40), "1 checkpoints are missing"),
    "an id that is gone": (
        lambda raw, key: raw.hdel(key, *[f for f in raw.hkeys(key) if f[:2] == b"i:"][:1]),
        "an id of a checkpoint",
    ),
    "a call that is open in a list only": (lambda raw, key: raw.hset(key, "open", ";s1/1/3"), "the list open"),
    "a field of nobody's": (lambda raw, key: raw.hset(key, "zz", "x"), "field b'zz'"),
    "a count that is wrong": (lambda raw, key: raw.hincrby(key, "count", 5), "the count of checkpoints is wrong"),
}


@pytest.mark.parametrize("what", DAMAGE)
@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "beside"])
def test_damage_is_named_and_mended(what: str, in_place: bool, cp: Checkpointer, raw: Any, key: bytes, url: str) -> None:
    save(cp)
    assert cp.verify().ok
    damage, named = DAMAGE[what]
    damage(raw, key)
    found = cp.verify()
    assert named in [d.what for d in found.damages], found
    before = raw.hgetall(key)
    assert raw.hgetall(key) == before, "verify changed something"
    report = cp.repair(in_place=in_place)
    with safepoint.open(url if in_place else cp.store.beside(".repaired")) as mended:  # type: ignore[arg-type]
        assert (again := mended.verify()).ok, again
        newest = mended.load_latest("t")
        assert newest is not None
        assert newest.step == (3 if named.startswith(("branch", "1 ", "the", "an id", "field")) else 2)
        for header in mended.store.headers("t"):
            mended.load("t", seq=header.seq)
        newest.step += 1
        mended.save(newest)
        assert mended.verify().ok
    if in_place:
        assert report.backup is not None
        with safepoint.open(report.backup) as copy:
            assert named in [d.what for d in copy.verify().damages], "the copy has the damage"
        kept = raw.hgetall(key + b":q")
        assert kept
        lost = {f: v for f, v in before.items() if named == "checkpoint 4" and f in {b"h:4", b"r:4"}}
        assert lost.items() <= {f.partition(b" ")[2]: v for f, v in kept.items()}.items(), "as it was found"
    else:
        assert raw.hgetall(key) == before


def test_an_object_that_is_lost_takes_its_checkpoints_aside(cp: Checkpointer, raw: Any, key: bytes) -> None:
    save(cp)
    with_it = [seq for seq in range(1, 5) if top_object(raw, key, seq) == top_object(raw, key, 4)]
    name = top_object(raw, key, 4)
    raw.hdel(key, b"o:" + name)
    assert not cp.verify().ok
    report = cp.repair(in_place=True)
    assert report.set_aside == len(with_it)
    assert cp.verify().ok
    assert {row.seq for row in cp.store.headers("t")} >= {1, 2, 3} - set(with_it)


def test_an_object_with_another_bit_is_kept_aside(cp: Checkpointer, raw: Any, key: bytes) -> None:
    save(cp)
    name = top_object(raw, key, 4)
    spoiled = flip(raw.hget(key, b"o:" + name))
    raw.hset(key, b"o:" + name, spoiled)
    raw.hset(key, b"o:" + b"x" * 16, b"\0")
    found = cp.verify()
    assert {d.what for d in found.damages} >= {f"object {name.hex()}", f"object {(b'x' * 16).hex()}"}
    cp.repair(in_place=True)
    assert cp.verify().ok
    kept = {f.partition(b" ")[2]: v for f, v in raw.hgetall(key + b":q").items()}
    assert kept[b"o:" + name] == spoiled
    assert kept[b"o:" + b"x" * 16] == b"\0"


def test_calls_that_are_damaged(cp: Checkpointer, raw: Any) -> None:
    journaled(cp)
    task = next(name for name in cp.store.walk_tasks() if isinstance(name, str))
    key = cp.store._client.keys.task(task)  # type: ignore[attr-defined]
    assert cp.verify().ok
    no = max(call.no for call in cp.store.calls(task)[0])
    raw.hset(key, b"c:%d" % no, raw.hget(key, b"c:%d" % no)[:-3] + b"xyz")
    assert f"call {no}" in [d.what for d in cp.verify().damages]
    cp.repair(in_place=True)
    assert cp.verify().ok
    assert no not in [call.no for call in cp.store.calls(task)[0]]


def test_what_belongs_to_no_task(cp: Checkpointer, raw: Any, key: bytes, url: str) -> None:
    save(cp)
    prefix = url.rpartition("=")[2].encode()
    raw.hset(cp.store._client.keys.task("never"), b"o:" + b"x" * 16, b"left by a save that died")  # type: ignore[attr-defined]
    raw.set(prefix + b"{!}", "foreign")
    raw.hdel(cp.store._client.keys.index_of("t"), "t")  # type: ignore[attr-defined]
    raw.set(prefix + b"else", "another's")  # no key of this store: it has no braces
    assert sorted(lost.kind for lost in cp.store.strays()) == ["foreign", "stray", "structure"]
    found = cp.verify()
    assert len(found.damages) == 2
    assert len(found.notes) == 1
    assert cp.store.tasks() == []
    assert list(cp.store.walk_tasks()) == ["t"]
    report = cp.repair(in_place=True)
    assert report.set_aside == 2
    assert [row.task for row in cp.store.tasks()] == ["t"]
    assert cp.verify().ok
    assert raw.get(prefix + b"{!}") == b"foreign"
    assert not cp.store.delete_task("never")


def test_a_task_that_is_deleted_and_begun_anew_beside_a_look_for_strays_is_none(
    cp: Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    cp.save(State("task"))
    look = mend._have_rows
    looks = []

    def meanwhile(*args: Any) -> dict[bytes, bool]:
        looks.append(args)
        if len(looks) > 1:
            return look(*args)
        cp.delete_task("task")
        found = look(*args)
        cp.save(State("task"))
        return found

    monkeypatch.setattr(mend, "_have_rows", meanwhile)
    assert cp.store.strays() == []
    assert looks


def test_a_task_whose_row_is_lost_is_still_found(cp: Checkpointer, raw: Any, key: bytes) -> None:
    save(cp)
    raw.hdel(key, "t:id")
    assert list(cp.store.walk_tasks()) == ["t"]
    kinds = [part.kind for part in cp.store.walk("t") if isinstance(part, Lost)]
    assert kinds[:1] == ["task"]
    cp.repair()
    with safepoint.open(cp.store.beside(".repaired")) as mended:  # type: ignore[arg-type]
        assert mended.verify().ok
        newest = mended.load_latest("t")
        assert newest is not None
        assert newest.step == 3


def test_a_held_task_is_not_mended(cp: Checkpointer, raw: Any, key: bytes) -> None:
    save(cp)
    raw.hdel(key, "h:4")
    grant = cp.store.acquire("t", b"me")
    with pytest.raises(LeaseHeld):
        cp.repair(in_place=True)
    cp.store.release("t", grant)
    cp.repair(in_place=True)
    assert cp.verify().ok


def test_a_task_that_is_written_leaves_nothing_beside_it(cp: Checkpointer, raw: Any, url: str) -> None:
    from safepoint.testing.whole import image_of

    Writer(cp.store).save()
    image = image_of(cp.store, "task")
    prefix = url.rpartition("=")[2].encode()
    cp.store.delete_task("task")
    assert cp.store.write_task(image)
    keys = {k.removeprefix(prefix) for k in raw.scan_iter(match=prefix + b"*")}
    assert all(k.startswith(b"tasks:") or k.endswith((b"}", b":f")) for k in keys), keys
    assert raw.ttl(cp.store._client.keys.task("task")) == -1  # type: ignore[attr-defined]
    assert dump(cp.store)


def test_copies_and_strays_on_a_cluster() -> None:
    prefix = f"t{uuid.uuid4().hex[:12]}:"
    with safepoint.open(f"{shared_cluster().url}?prefix={prefix}", cluster=True, durability="process") as cp:
        client = cp.store._client  # type: ignore[attr-defined]
        names = [f"task-{i:02}" for i in range(12)]  # on all nodes
        for name in names:
            state = State(name)
            for i in range(3):
                state.step = i
                state.messages.append({"role": "user", "content": f"message {i} " * 40})
                cp.save(state)
        assert len({client._nodes.of(client.keys.task(name), client.deadline()) for name in names}) == 3
        assert list(cp.store.walk_tasks()) == names
        client.many([("HDEL", client.keys.task(name), "r:3") for name in names[::2]])
        client.many([("HSET", client.keys.task(f"{name} that never was"), "o:" + "x" * 16, "1") for name in names])
        assert len(cp.store.strays()) == len(names)
        found = cp.verify()
        assert len({d.task_id for d in found.damages if d.task_id}) == 6
        report = cp.repair(in_place=True)
        assert cp.verify().ok
        assert report.backup is not None
        with safepoint.open(report.backup, durability="process") as copy:
            again = copy.verify()
            assert [str(d) for d in again.damages] != []
            assert len(again.damages) == len(found.damages)
            assert [row.task for row in copy.store.tasks()] == names
        with pytest.raises(UsageError, match="there already"):
            cp.store.backup(report.backup.partition(prefix.replace(":", "%3A"))[2].partition("&")[0])
        assert all("before-repair" not in str(lost) for lost in cp.store.strays())


def test_what_lies_beside_a_store_is_opened_with_its_password_and_shown_without() -> None:
    server = Redis(tcp=True)
    try:
        with redis.from_url(server.url) as client:
            client.config_set("requirepass", "sesame")
        url = f"redis://:sesame@127.0.0.1:{server.port}/0?socket_keepalive=true&timeout=3&prefix=a"
        with safepoint.open(url, durability="process") as cp:
            save(cp)
            beside = cp.store.beside(".x")
            assert beside is not None
            assert "socket_keepalive=true&timeout=3" in beside
            report = cp.repair()
            shown = cp.store.backup(".copy")
            assert "sesame" not in f"{report.url} {shown} {report} {cp.store!r}"
            with safepoint.open(cp.store.beside(".copy") or "", durability="process") as copy:
                assert copy.verify().ok
                assert [row.task for row in copy.store.tasks()] == ["t"]
            assert [row.task for row in cp.store.tasks()] == ["t"]
            assert cp.store.strays() == []
    finally:
        server.close()

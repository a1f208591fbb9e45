"""What adapters record, as it lies in Redis: few trips, lists that name each row, and sweeps that it comes in the way of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from safepoint import _probe
from safepoint.errors import Conflict, Damaged, UsageError
from safepoint.model import Obj, new_id
from safepoint.rows import Aside, BranchWrite, Commit, Lost, WriteRow, replace
from safepoint.stores.redis import layout, read
from safepoint.stores.redis.store import RedisStore
from safepoint.stores.url import open_store
from safepoint.testing.build import Writer, obj, tree, write_row
from safepoint.testing.removal import chain
from safepoint.testing.whole import image_of
from tests.support.scale import scale
from tests.support.servers import fresh_redis_url, shared_redis


@pytest.fixture
def store() -> Iterator[RedisStore]:
    store = open_store(fresh_redis_url())
    assert isinstance(store, RedisStore)
    yield store
    _probe.hook = None
    store.close()


@pytest.fixture
def raw() -> Iterator[Any]:
    with redis.from_url(shared_redis().url) as client:
        yield client


@pytest.fixture
def key(store: RedisStore) -> bytes:
    return store._client.keys.task("task")


def once_at(point: str, do: Callable[[], Any]) -> None:
    def hook(name: str) -> None:
        if name == point:
            _probe.hook = None
            do()

    _probe.hook = hook


def trips(do: Callable[[], Any]) -> int:
    hits: Counter[str] = Counter()
    _probe.hook = lambda name: hits.update([name])
    do()
    _probe.hook = None
    return hits["redis.send"]


def names(store: RedisStore) -> set[bytes]:
    return {part.name for part in store.walk("task") if isinstance(part, Obj)}


def lost(store: RedisStore) -> list[tuple[str, str]]:
    return [(part.what, part.kind) for part in store.walk("task") if isinstance(part, Lost)]


def recorded(raw: Any, key: bytes) -> list[bytes]:
    """The fields that hold or name what was recorded."""
    return sorted(field for field in raw.hkeys(key) if field[:2] in {b"w:", b"v:", b"e:"})


# -- trips


def test_a_commit_of_writes_is_one_trip_and_the_writes_of_many_checkpoints_too(store: RedisStore) -> None:
    Writer(store, "another").record(write_row("c"))  # the scripts are known from now on
    store.writes("another")
    writer = Writer(store)
    assert trips(lambda: writer.record(write_row("c0"))) == 3, "a task that is new is announced"
    assert trips(lambda: writer.record(write_row("c0", idx=1), write_row("c1"), write_row("c0", idx=-1))) == 1
    for i in range(300):
        writer.record(write_row(f"c{i}", writer="many", idx=5), sync=False)
    other = open_store(store._given)
    other.tasks()  # connected
    assert other.durability
    assert trips(lambda: Writer(other).record(write_row("c7", writer="other"))) == 1, "it need not know the task's numbers"
    ids = [f"c{i}" for i in range(0, 300, 2)]
    assert trips(lambda: other.writes("task", checkpoints=ids)) == 1
    assert trips(lambda: other.writes("task", space=None, writer="many")) == 1
    assert len(other.writes("task", checkpoints=ids)[0]) == 153
    assert len(other.writes("task", writer="many")[0]) == 300
    other.close()


def test_a_reading_in_pages_is_of_one_moment(store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "TRIP", 50)
    writer = Writer(store)
    writer.record(*[write_row(f"c{i % 7}", writer=f"w{i}") for i in range(450)])
    assert trips(lambda: store.writes("task")) == 5
    seen = 0

    def hook(name: str) -> None:
        nonlocal seen
        if name == "redis.send":
            seen += 1
            if seen in {2, 4, 5}:
                raw_hook, _probe.hook = _probe.hook, None
                writer.record(write_row("c3", writer="new", idx=seen), write_row("c5", writer="new", idx=seen))
                _probe.hook = raw_hook

    _probe.hook = hook
    found = store.writes("task")[0]
    _probe.hook = None
    new = [row.idx for row in found if row.writer == "new"]
    assert len(found) == 450 + len(new)
    assert sorted(new) == sorted(2 * sorted(set(new))), "each commit whole or not at all"


def test_more_rows_and_branches_than_a_script_can_take_at_once(store: RedisStore, raw: Any, key: bytes) -> None:
    n = scale(4_500, 20_000)
    writer = Writer(store)
    writer.save()
    rows = [write_row(f"c{i % 3}", writer=f"w{i}") for i in range(n)]
    writer.record(*rows)
    assert len(store.writes("task", bodies=False)[0]) == n
    heads = [Writer(store, branch=f"b{i}").save(row={"parent_seq": 1}, sync=False).head for i in range(scale(600, 5_000))]
    drops = tuple(BranchWrite(name=f"b{i}", expect=head, to=None) for i, head in enumerate(heads) if head is not None)
    store.commit(Commit(task="task", id=new_id(), branches=drops))
    assert [branch.name for branch in store.branches("task")] == ["main"]
    assert lost(store) == []
    assert raw.hget(key, "branches") == b"\0main\0"


def test_a_space_costs_the_same_however_many_there_are(store: RedisStore, raw: Any, key: bytes) -> None:
    """A subgraph of LangGraph has one for each of its calls."""
    Writer(store).save()

    def cost(do: Callable[[], Any]) -> tuple[int, int]:
        """Commands that the server has run, in scripts too; and how long the lists are that are read."""
        before = raw.info("commandstats")
        do()
        after = raw.info("commandstats")
        calls = [after[name]["calls"] - before.get(name, {"calls": 0})["calls"] for name in ("cmdstat_hget", "cmdstat_hmget")]
        return sum(calls), sum(raw.hstrlen(key, at) for at in [b"branches", layout.roll(b"node:new"), layout.roll(b"none")])

    def look() -> None:
        assert [b.name for b in store.branches("task")] == ["main"]
        assert [b.name for b in store.branches("task", "node:new")] == ["main", "side"]
        assert store.branches("task", "none") == store.branches("task", "no\0ne") == []

    for name in ("main", "side"):
        Writer(store, space="node:new", branch=name).save()
    few = cost(look)
    spaces = [f"node:{i:036}" for i in range(scale(400, 4_000))]
    for space in spaces:
        Writer(store, space=space).save(sync=False)
    many = cost(look)
    assert many[0] == few[0]
    assert many[1] < few[1] + 50 * len(spaces) // 20
    assert [b.space for b in store.branches("task", None)] == sorted(["", "node:new", "node:new", *spaces])
    assert lost(store) == []
    # As one that was written as a whole, and one that was mended; and none is lost to another of the same list.
    image = image_of(store, "task")
    assert store.write_task(replace(image, row=replace(image.row, task="copy")))
    assert store.branches("copy", None) == store.branches("task", None)
    raw.hdel(key, layout.roll(b"node:new"))
    assert ("branch 'main'", "branch") in lost(store)
    store.set_aside(image, [], [], [])
    assert lost(store) == []
    assert image_of(store, "task").branches == image.branches
    raw.hset(key, "branches", raw.hget(key, "branches") + b"node:new\0main\0")
    raw.hset(key, layout.roll(b"node:new"), raw.hget(key, layout.roll(b"node:new")).replace(b"node:new\0main\0", b""))
    assert lost(store) == [("branch 'main'", "branch")], "it is in the list of others"
    drops = tuple(BranchWrite(space=b.space, name=b.name, expect=b.head, to=None) for b in image.branches if b.space)
    row = store.task("task")
    assert row is not None
    store.set_aside(replace(image, row=row), [], [], [])
    store.commit(Commit(task="task", id=new_id(), branches=drops))
    assert [b.space for b in store.branches("task", None)] == [""]
    assert not [field for field in raw.hkeys(key) if field[:2] == b"d:"]
    assert lost(store) == []


def test_one_more_row_costs_the_same_however_many_there_are(store: RedisStore, raw: Any, key: bytes) -> None:
    writer, n = Writer(store), scale(400, 3_000)
    writer.save(row={"id": "c"})
    writer.save()
    for i in range(n):
        writer.record(write_row("c", writer=f"writer {i:050}"), sync=False)
    lists = [field for field in raw.hkeys(key) if field[:2] == b"v:"]
    assert len(lists) > n // 60
    assert max(raw.hstrlen(key, field) for field in lists) < 3_500
    assert len(store.writes("task")[0]) == n
    assert lost(store) == []
    # As one that was written as a whole, it goes on; and as one that was mended.
    image = image_of(store, "task")
    assert store.write_task(replace(image, row=replace(image.row, task="copy")))
    Writer(store, "copy").record(write_row("c", writer="more"))
    assert len(store.writes("copy", checkpoints=["c"])[0]) == n + 1
    raw.hdel(key, *lists[1:])
    assert [kind for _, kind in lost(store)] == ["structure"]
    store.set_aside(image, [], [], [])
    assert lost(store) == []
    writer.record(write_row("c", writer="more"))
    assert len(store.writes("task", checkpoints=["c"])[0]) == n + 1
    told = store.prune("task", [1], dry_run=True)
    assert store.prune("task", [1]) == told
    assert recorded(raw, key) == []


def test_names_with_a_nul_are_refused(store: RedisStore) -> None:
    Writer(store).record(write_row("c"))
    image = image_of(store, "task")
    for row in (write_row("a\0b"), write_row("c", writer="a\0b"), write_row("c", space="a\0b")):
        with pytest.raises(UsageError, match="NUL"):
            Writer(store).record(row)
        with pytest.raises(UsageError, match="NUL"):
            store.write_task(replace(image, writes=(row,)))


def test_a_task_of_writes_alone_expires_as_any_other(store: RedisStore, raw: Any, key: bytes) -> None:
    keeps = open_store(store._given, ttl=1000)
    Writer(keeps).record(write_row("c"))
    assert 990 <= raw.ttl(key) <= 1000
    grant = keeps.acquire("task", b"me")
    Writer(keeps, guard=grant.guard).record(write_row("c", idx=1))
    assert raw.ttl(key) == -1, "a task that is held does not"
    keeps.close()


# -- removing


def test_nothing_of_them_is_left_when_their_checkpoints_are_gone(store: RedisStore, raw: Any, key: bytes) -> None:
    writer = Writer(store)
    for i in range(200):
        writer.save(row={"id": f"c{i}", "step": i}, sync=False)
        writer.record(write_row(f"c{i}"), write_row(f"c{i}", idx=-2), sync=False)
    assert len(store.prune("task", range(1, 200)).seqs) == 199
    assert [field[:2] for field in recorded(raw, key)] == [b"e:", b"v:", b"w:", b"w:"]
    assert lost(store) == []
    writer.record(write_row("c3"))
    assert [row.checkpoint for row in store.writes("task")[0]] == ["c199", "c199", "c3"]
    assert lost(store) == []


def test_what_is_recorded_between_a_look_and_its_script_goes_too(store: RedisStore, raw: Any, key: bytes) -> None:
    writer = Writer(store)
    for i in range(4):
        writer.save(*tree(f"{i}"), row={"id": f"c{i}"})
    work = store.pruning("task", [2])
    next(work)
    writer.record(write_row("c1", tree("late")[:1]), write_row("c2", tree("late")[:1]), objects=tree("late"))
    for _ in work:
        pass
    assert [row.checkpoint for row in store.writes("task")[0]] == ["c2"]
    assert names(store) >= {o.name for o in tree("late")}
    assert store.prune("task", [3]).seqs == (3,)
    assert recorded(raw, key) == []
    assert not names(store) & {o.name for o in tree("late")}


def test_a_write_that_is_sent_after_the_mark_keeps_what_it_reaches(store: RedisStore) -> None:
    writer = chain(store, 3)
    again = tree("task0")
    once_at("sweep.marked", lambda: writer.record(write_row("c", again[:1]), objects=again))
    assert store.prune("task", [1]).objects == 0
    assert store.writes("task")[1] == {o.name: o for o in again}


def test_a_parent_that_goes_while_writes_come_hands_on_what_it_had(store: RedisStore) -> None:
    """At each rest of a look: a write leaves out what a checkpoint has; the checkpoint goes; a new one has it no more."""
    shared = tree("shared")
    writer = Writer(store)
    for i in range(1100):
        writer.save(obj(b"%d" % i), row={"step": i}, sync=False)
    writer.save(*shared, row={"step": 1100})
    work = store.pruning("task", [])
    for i, _ in enumerate(work):
        writer.record(write_row(f"new {i}", shared[:1]), stands_on=writer.head)
        writer.save(obj(b"no more %d" % i), row={"step": 2000 + i})
        store.prune("task", [row.seq for row in store.headers("task")], sweep=i % 2 == 0)
        assert store.writes("task", checkpoints=[f"new {i}"])[1] == {o.name: o for o in shared}
        writer.save(*shared, row={"step": 3000 + i})
    assert i > 3
    assert store.writes("task")[1] == {o.name: o for o in shared}
    store.prune("task", [])
    assert store.writes("task")[1] == {o.name: o for o in shared}


def test_a_write_that_goes_and_comes_again_in_a_look_is_no_damage(store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer(store)
    writer.save(row={"id": "c"})
    writer.save(row={"id": "d"})
    row = write_row("c", tree("c")[:1])
    writer.record(row, objects=tree("c"))
    seen: list[str] = []
    script = store._client.script

    def scripted(name: str, *args: Any, **kwargs: Any) -> Any:
        answer = script(name, *args, **kwargs)
        if name == "sweep_scan" and not seen:
            seen.append(name)
            store.prune("task", [1], sweep=False)
        return answer

    command = store._client.command

    def commanded(*args: Any, **kwargs: Any) -> Any:
        answer = command(*args, **kwargs)
        if seen == ["sweep_scan"] and layout.shelf(b"\0c") in args:
            seen.append("shelves")
            writer.record(row, objects=tree("c"))
        return answer

    monkeypatch.setattr(store._client, "script", scripted)
    monkeypatch.setattr(store._client, "command", commanded)
    store.prune("task", [])
    assert seen == ["sweep_scan", "shelves"]
    assert store.writes("task")[1] == {o.name: o for o in tree("c")}


# -- damage

ROW, LIST = b"w:\0c\x000\0w", b"v:\0c"
DAMAGE: dict[str, tuple[Callable[[Any, bytes], Any], list[tuple[str, str]]]] = {
    "a row that is gone": (lambda raw, key: raw.hdel(key, ROW), [("1 writes are missing", "write")]),
    "a row that is none": (
        lambda raw, key: raw.hset(key, ROW, b"\xc1"),
        [("write 0 of 'w' against checkpoint 'c'", "write")],
    ),
    "a list that is gone": (lambda raw, key: raw.hdel(key, LIST), [("the lists of writes", "structure")]),
    "a list that is none": (lambda raw, key: raw.hset(key, LIST, b"x"), [("the lists of writes", "structure")]),
    "a page that is gone": (lambda raw, key: raw.hset(key, LIST, b"1;"), [("the lists of writes", "structure")]),
    "a page that no list has": (lambda raw, key: raw.hset(key, LIST + b"\x007", b""), [("the lists of writes", "structure")]),
    "the name of a list that is gone": (
        lambda raw, key: raw.hdel(key, *[f for f in raw.hkeys(key) if f[:2] == b"e:"]),
        [("the lists of writes", "structure")],
    ),
    "a row of another class": (lambda raw, key: raw.hset(key, ROW, raw.hget(key, ROW).replace(b"\xa1w", b"\xc4\x01w")), []),
    "a row of another key": (lambda raw, key: raw.hset(key, ROW, raw.hget(key, ROW).replace(b"\xa1w", b"\xa1v")), []),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_told_and_keeps_all_objects_and_is_set_aside(what: str, store: RedisStore, raw: Any, key: bytes) -> None:
    writer = Writer(store)
    writer.save(*tree("a"))
    writer.save(*tree("b"))
    writer.record(write_row("c", tree("c")[:1]), write_row("c", idx=1), objects=tree("c"))
    writer.record(write_row("d"))
    before = names(store)
    assert lost(store) == []
    damage, told = DAMAGE[what]
    damage(raw, key)
    assert lost(store) == told
    rows = [part for part in store.walk("task") if isinstance(part, WriteRow)]
    sound = [row for row in rows if row.seal]
    for row in sound:
        row.check("task", "a write")
    assert {row.key for row in sound} >= {("", "c", "w", 1), ("", "d", "w", 0)}
    if not told:
        (torn,) = [row for row in rows if not row.seal]
        assert torn.key == ("", "c", "w", 0)
    if what.startswith(("a row that", "a list")):
        with pytest.raises(Damaged):
            store.writes("task")
    # Of a row that is gone nobody knows what it reached; what it is one of, verify says.
    if what not in {"a row that is gone", "a page that no list has"}:
        with pytest.raises(Damaged, match=r"No object was deleted|\(row of a write\)|\(list of writes\)"):
            store.prune("task", [1])
        assert names(store) == before
    image = image_of(store, "task") if not told else replace(image_of_what_is_left(store), writes=tuple(sound))
    gone = [Aside("write", key_, "it cannot be read") for key_ in (("", "c", "w", 0), ("", "d", "w", 0))]
    moved = store.set_aside(replace(image, writes=tuple(sound)), gone, [], [])
    assert moved == 1 + (what != "a row that is gone")
    assert lost(store) == []
    assert [row.key for row in store.writes("task")[0]] == [("", "c", "w", 1)]
    if moved == 2:
        assert [field for field in raw.hkeys(key + b":q") if ROW in field]
    store.prune("task", [1])


def image_of_what_is_left(store: RedisStore) -> Any:
    from safepoint.rows import BranchRow, CheckpointRow, Image, Numbers, TaskRow

    parts: dict[type, list[Any]] = {}
    for part in store.walk("task"):
        parts.setdefault(type(part), []).append(part)
    return Image(
        row=parts[TaskRow][0],
        numbers=parts[Numbers][0],
        branches=tuple(parts[BranchRow]),
        checkpoints=tuple(parts[CheckpointRow]),
        objects=tuple(parts[Obj]),
    )


def test_a_task_whose_writes_differ_is_another_one(store: RedisStore) -> None:
    writer = Writer(store)
    writer.save(*tree("a"), writes=(write_row("c", tree("a")[:1]),))
    image = image_of(store, "task")
    copy = replace(image, row=replace(image.row, task="copy"))
    assert store.write_task(copy) is True
    assert store.write_task(copy) is False
    assert store.writes("copy")[1] == store.writes("task")[1]
    (row,) = copy.writes
    for rows in ((), (replace(row, data=b"other"),), (row, write_row("d"))):
        with pytest.raises(Conflict):
            store.write_task(replace(copy, writes=rows))
    assert store.write_task(replace(copy, writes=(write_row("d"),)), over=image_of(store, "copy")) is True
    assert [row.checkpoint for row in store.writes("copy")[0]] == ["d"]
    assert lost(store) == []


def test_where_a_write_lies(store: RedisStore, raw: Any, key: bytes) -> None:
    Writer(store).record(write_row("c"))
    said = store.place("task", "write", ("", "c", "w", 0))
    assert said == f"key {key.decode()}, field w:\\0c\\x000\\0w".replace("\\x000", "\\00")
    assert raw.hexists(key, ROW)

"""What is written between the look of a sweep and its scripts, put there on purpose: nothing that is needed is deleted.

The same races by processes are in tests/crash/test_sweep_races_redis.py; here each of them happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from safepoint import _probe
from safepoint.errors import Damaged
from safepoint.model import Obj
from safepoint.rows import Aside, Guard, TaskPatch, replace
from safepoint.stores.redis import sweep
from safepoint.stores.redis.store import RedisStore
from safepoint.stores.url import open_store
from safepoint.testing.build import Writer, call_row, obj, tree
from safepoint.testing.removal import chain
from safepoint.testing.whole import image_of
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


def once_at(point: str, do: Callable[[], Any]) -> None:
    """Do something at the first time that a point is passed."""

    def hook(name: str) -> None:
        if name == point:
            _probe.hook = None
            do()

    _probe.hook = hook


def names(store: RedisStore, task: str = "task") -> set[bytes]:
    return {part.name for part in store.walk(task) if isinstance(part, Obj)}


def whole(store: RedisStore, *, branch: str = "main") -> bool:
    found = store.read("task", branch=branch)
    assert found is not None
    row, objects = found
    wanted = [row.refs, *(o.refs for o in objects.values())]
    return {run[i : i + 16] for run in wanted for i in range(0, len(run), 16)} == set(objects)


BIG = [obj(b"big %d" % i * 60_000) for i in range(6)]


# -- objects


def test_what_is_sent_again_after_the_mark_stays(store: RedisStore) -> None:
    writer = chain(store, 3)
    again = tree("task0")
    once_at("sweep.marked", lambda: writer.save(*again))
    pruned = store.prune("task", [1])
    assert (pruned.seqs, pruned.objects) == ((1,), 0)
    assert whole(store)
    assert names(store) >= {o.name for o in again}


def test_a_call_whose_result_is_sent_after_the_mark_keeps_it(store: RedisStore) -> None:
    writer = chain(store, 3)
    call = writer.call()
    again = tree("task0")

    def settle() -> None:
        writer.write(replace(call, status="succeeded", result=b"r", result_refs=again[0].name), stamp="ended", objects=again)

    once_at("sweep.marked", settle)
    assert store.prune("task", [1]).objects == 0
    assert store.calls("task")[1] == {o.name: o for o in again}


def test_what_a_later_save_leaves_out_stays_too(store: RedisStore) -> None:
    writer = chain(store, 3)
    again = tree("task0")

    def save_twice() -> None:
        writer.save(*again)
        writer.save(again[0], objects=())  # of its parent's
        store.prune("task", [row.seq for row in store.headers("task")])  # and the parent goes

    once_at("sweep.marked", save_twice)
    store.prune("task", [1])
    assert whole(store)
    found = store.read("task")
    assert found is not None
    assert found[1] == {o.name: o for o in again}


def test_a_big_save_that_is_staged_before_the_mark_and_lands_after_it_is_whole(store: RedisStore) -> None:
    writer = chain(store, 3)
    commit = writer.commit(*BIG)
    stage = store._stage(commit)
    once_at("sweep.marked", lambda: store._commit(commit, stage))
    assert store.prune("task", [1]).objects == 3
    assert whole(store)
    assert store.prune("task", []).objects == 0


@pytest.mark.parametrize("point", ["sweep.marked", "sweep.rows"])
def test_a_big_save_beside_a_sweep_is_whole(point: str, store: RedisStore) -> None:
    writer = chain(store, 3)
    chain(store, 1, "other")
    once_at(point, lambda: writer.save(*BIG))
    assert store.prune("task", [1]).objects == 3
    assert whole(store)


def test_a_sweep_in_the_middle_of_a_big_save_takes_nothing_of_it(store: RedisStore) -> None:
    writer = chain(store, 3)
    once_at("commit.staged", lambda: store.prune("task", [1]))
    writer.save(*BIG)
    assert store.task("task").checkpoints == 3
    assert whole(store)


def test_a_stage_that_has_expired_is_swept_and_its_save_sends_all_again(store: RedisStore, raw: Any) -> None:
    writer = chain(store, 3)
    commit = writer.commit(*BIG)
    stage = store._stage(commit)
    key = store._client.keys.task("task")
    entries = raw.hget(key, "stages")
    raw.hset(key, "stages", b"/".join([*entries.split(b"/")[:-1], b"1000"]))
    assert store.prune("task", []).objects == len(BIG)
    assert not [field for field in raw.hkeys(key) if field.startswith(b"s:")]
    store._commit(commit, stage)
    assert whole(store)


def test_a_stage_that_expired_before_the_mark_cannot_land_after_it(store: RedisStore, raw: Any) -> None:
    writer = chain(store, 3)
    commit = writer.commit(*BIG)
    stage = store._stage(commit)
    key = store._client.keys.task("task")
    raw.hset(key, "stages", b"/".join([*raw.hget(key, "stages").split(b"/")[:-1], b"1000"]))
    once_at("sweep.marked", lambda: store._commit(commit, stage))
    store.prune("task", [1])
    assert whole(store)


def test_a_task_that_was_deleted_and_begun_anew_is_another_one(store: RedisStore) -> None:
    chain(store, 5)

    def anew() -> None:
        assert store.delete_task("task")
        Writer(store).save(*tree("task0"))

    once_at("sweep.marked", anew)
    store.prune("task", [1])
    assert whole(store)


def test_a_task_that_was_written_as_a_whole_is_another_one(store: RedisStore) -> None:
    writer = chain(store, 3)
    one = image_of(store, "task")
    writer.save(*tree("more"))
    two = image_of(store, "task")
    once_at("sweep.marked", lambda: store.write_task(one, over=image_of(store, "task")))
    store.prune("task", [1, 2])
    assert [row.seq for row in store.headers("task")] == [3, 2, 1]
    for seq in (1, 2, 3):
        found = store.read("task", seq=seq)
        assert found is not None
        assert len(found[1]) == 3
    assert two.numbers.seq == 4


def test_a_server_that_has_gone_back_knows_nothing_of_the_mark(store: RedisStore, raw: Any) -> None:
    """A failover to a replica that lagged: the moments of the task come a second time, with other writes."""
    writer = chain(store, 3)
    key = store._client.keys.task("task")
    before = raw.dump(key)

    def go_back() -> None:
        raw.restore(key, 0, before, replace=True)
        writer.save(*tree("task0"))
        assert store.prune("task", [1, 2, 3]).seqs == (1, 2, 3)

    once_at("sweep.marked", go_back)
    store.prune("task", [1])
    assert whole(store)
    found = store.read("task")
    assert found is not None
    assert found[1] == {o.name: o for o in tree("task0")}


def test_rows_are_looked_at_again_by_a_server_that_has_gone_back(store: RedisStore, raw: Any) -> None:
    writer = chain(store, 5)
    key = store._client.keys.task("task")
    before = raw.dump(key)
    store.pin("task", 5, True)  # so that the moment of the look is one that comes again

    def go_back() -> None:
        raw.restore(key, 0, before, replace=True)
        Writer(store, branch="side").save(row={"parent_seq": 2, "step": 7}, line=1)

    assert between(store, [2, 3], go_back) == {1, 2, 4, 5, 6}
    assert writer.seq == 5


def test_a_task_that_was_mended_is_looked_at_anew(store: RedisStore) -> None:
    chain(store, 3)
    image = image_of(store, "task")
    gone = [Aside("checkpoint", 2, "why not")]
    rest = replace(image, checkpoints=tuple(row for row in image.checkpoints if row.seq != 2))
    once_at("sweep.marked", lambda: store.set_aside(rest, gone, [], []))
    assert store.prune("task", [1]).objects == 6
    assert whole(store)


def test_where_a_row_cannot_be_read_nothing_is_garbage(store: RedisStore, raw: Any) -> None:
    chain(store, 3)
    key = store._client.keys.task("task")
    raw.hdel(key, "r:2")
    before = names(store)
    with pytest.raises(Damaged, match="No object was deleted"):
        store.prune("task", [1])
    assert names(store) == before
    raw.hset(key, "r:2", b"\0")
    with pytest.raises(Damaged):
        store.prune("task", [])
    assert names(store) == before


@pytest.mark.parametrize("block", ["k:0", "g:0"])
def test_where_a_mark_is_lost_nothing_is_garbage(
    block: str, store: RedisStore, raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "FEW", 0)  # or the last are found without
    writer = chain(store, 3)
    writer.write(call_row(3, args_refs=tree("args")[0].name), objects=tree("args"))
    before = names(store)
    raw.hdel(store._client.keys.task("task"), block)
    with pytest.raises(Damaged, match="No object was deleted"):
        store.prune("task", [])
    assert names(store) == before


def test_a_parent_that_goes_while_its_child_comes_hands_on_what_it_had(store: RedisStore) -> None:
    """The look is in the middle of the task; the next save leaves out what its parent has; the parent goes; and so on."""
    shared = tree("shared")
    writer = Writer(store)
    writer.save(*shared)
    for i in range(1300):
        writer.save(shared[0], obj(b"%d" % i), objects=[obj(b"%d" % i)], row={"step": i}, sync=False)
    work = store.pruning("task", [])
    for i, _ in enumerate(work):
        writer.save(shared[0], objects=(), row={"step": 2000 + i})
        writer.save(shared[0], obj(b"and %d" % i), objects=[obj(b"and %d" % i)], row={"step": 3000 + i})
        store.prune("task", [row.seq for row in store.headers("task")], sweep=i % 2 == 0)
        assert [row.seq for row in store.headers("task")] == [writer.seq]
    assert i > 3
    assert whole(store)
    store.prune("task", [])
    assert whole(store)
    assert len(names(store)) == 4


# -- rows


def between(store: RedisStore, seqs: list[int], do: Callable[[], Any]) -> set[int]:
    """What is left of the checkpoints, if something is done between a look and the script."""
    work = store.pruning("task", seqs)
    next(work)
    do()
    for _ in work:
        pass
    return {row.seq for row in store.headers("task")}


MEANWHILE: dict[str, Callable[[RedisStore, Writer, Any, Any], Any]] = {
    "forked from": lambda store, writer, call, pause: Writer(store, branch="side").save(
        row={"parent_seq": 3, "step": 7}, line=1
    ),
    "pinned": lambda store, writer, call, pause: store.pin("task", 3, True),
    "stood on by a new call": lambda store, writer, call, pause: writer.write(call_row(3)),
    "stood on by a new pause": lambda store, writer, call, pause: writer.pause(3),
    "stood on by a call begun again": lambda store, writer, call, pause: writer.write(
        replace(call, status="started"), stamp="began"
    ),
    "stood on by a pause opened again": lambda store, writer, call, pause: writer.write(replace(pause, status="open")),
}


@pytest.mark.parametrize("what", MEANWHILE)
def test_what_is_needed_since_stays(what: str, store: RedisStore) -> None:
    writer = chain(store, 6)
    call = writer.call(3, status="succeeded")
    pause = writer.pause(3, status="used")
    left = between(store, [2, 3, 4], lambda: MEANWHILE[what](store, writer, call, pause))
    assert left - {7} == {1, 3, 5, 6}
    assert [c.no for c in store.calls("task")[0]][:1] == [call.no]
    assert [p.no for p in store.pauses("task")][:1] == [pause.no]


def test_what_a_branch_that_went_back_needs_stays(store: RedisStore) -> None:
    writer = chain(store, 6)
    writer.call(2, step=1, status="succeeded")

    def back() -> None:
        Writer(store, branch="back").save(
            *tree("task0"), row={"parent_seq": 1, "step": 1}, line=1, patch=TaskPatch(branch="back")
        )

    assert between(store, [2, 3], back) == {1, 2, 4, 5, 6, 7}
    assert [call.base_seq for call in store.calls("task")[0]] == [2]


def test_what_a_run_that_began_meanwhile_stands_on_stays(store: RedisStore) -> None:
    writer = chain(store, 4)

    def begin() -> None:
        grant = store.acquire("task", b"me")
        run = Writer(store, guard=grant.guard, head=writer.head)
        run.call(4, fence=grant.guard.fence, status="succeeded")
        Writer(store, head=writer.head).save(anyway=True, row={"step": 9})

    assert between(store, [1, 2, 3, 4], begin) == {4, 5}


def test_a_task_that_is_written_to_all_the_time_is_pruned_all_the_same(store: RedisStore) -> None:
    writer = chain(store, 400)
    work = store.pruning("task", range(1, 401))
    for _ in work:
        writer.save(*tree("on"), row={"step": 1000})
    # One of them was a head as the look began.
    assert len([row for row in store.headers("task") if row.seq < 400]) == 0
    assert whole(store)


def test_two_that_prune_the_same_delete_it_once(store: RedisStore) -> None:
    writer = chain(store, 6)
    writer.call(2, status="succeeded")
    assert between(store, [1, 2, 3], lambda: store.prune("task", [2, 3, 4])) == {5, 6}
    assert store.task("task").checkpoints == 2
    assert list(store.structure()) == []
    assert image_of(store, "task").calls == ()


def test_a_prune_that_is_heard_twice_is_done_once(store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = chain(store, 6)
    writer.call(2, status="succeeded")
    write = store._client.write

    def twice(*args: Any, **kwargs: Any) -> Any:
        answer = write(*args, **kwargs)
        write(*args, **kwargs)
        return answer

    monkeypatch.setattr(store._client, "write", twice)
    pruned = store.prune("task", [1, 2, 3])
    assert (pruned.seqs, pruned.calls, pruned.objects) == ((1, 2, 3), 1, 9)
    assert store.pin("task", 4, True)
    image = image_of(store, "task")
    copy = replace(image, row=replace(image.row, task="copy"))
    assert store.write_task(copy) is True
    assert store.delete_task("task") is True
    assert store.task("task") is None
    assert store.write_task(copy) is False
    monkeypatch.undo()
    assert store.task("copy").checkpoints == 3


def test_a_late_deletion_does_not_take_another_task_of_that_name(store: RedisStore) -> None:
    chain(store, 2)
    sent: list[Any] = []
    write = store._client.write

    def kept(name: str, *args: Any, **kwargs: Any) -> Any:
        sent.append((name, *args))
        return write(name, *args, **kwargs)

    store._client.write = kept  # type: ignore[method-assign]
    store.delete_task("task")
    late = next(args for args in sent if args[0] == "delete")
    Writer(store).save()
    assert write(*late) == [b"absent"]
    assert store.task("task") is not None


def test_a_fence_goes_on_after_a_deletion(store: RedisStore) -> None:
    fences = []
    for _ in range(3):
        grant = store.acquire("task", b"me")
        fences.append(grant.guard.fence)
        store.release("task", grant)
        store.delete_task("task")
    assert fences == [1, 2, 3]
    assert not store.holds("task", Guard(3, "x"))

"""Removing: all of what is due, and nothing that is still needed."""

from __future__ import annotations

import pytest

from safepoint.rows import TaskPatch, replace
from safepoint.stores.base import Store
from safepoint.testing.build import Writer, call_row, dump, needs_chunks, obj, pause_row, reached, tree


def chain(store: Store, length: int = 4, task: str = "task") -> Writer:
    """A branch of ``length`` checkpoints, each with objects of its own and one step further; calls of step 0 are passed."""
    writer = Writer(store, task)
    for i in range(length):
        writer.save(*tree(f"{task}{i}"), row={"step": i})
    return writer


class RemovalTests:
    def test_prune_deletes_what_it_is_told(self, store: Store) -> None:
        chain(store)
        kept = [store.read("task", seq=seq) for seq in (2, 4)]
        pruned = store.prune("task", [1, 3])
        assert (pruned.seqs, pruned.calls, pruned.objects) == ((1, 3), 0, len(reached(store, [*tree("task0"), *tree("task2")])))
        assert pruned.bytes > 0
        assert [row.seq for row in store.headers("task")] == [4, 2]
        assert store.read("task", seq=1) is None
        assert [store.read("task", seq=seq) for seq in (2, 4)] == kept
        row = store.task("task")
        assert row is not None
        assert row.checkpoints == 2

    def test_a_deleted_id_is_free_and_a_deleted_number_is_not(self, store: Store) -> None:
        writer = Writer(store)
        writer.save(row={"id": "x"})
        writer.save()
        store.prune("task", [1])
        assert store.read("task", id="x") is None
        done = writer.save(row={"id": "x"})
        assert (done.seq, done.existed) == (3, False)

    def test_a_dry_run_tells_and_does_nothing(self, store: Store) -> None:
        writer = chain(store)
        writer.call(1, status="succeeded")
        before = dump(store)
        told = store.prune("task", [1, 3, 4], dry_run=True)
        assert dump(store) == before
        assert store.prune("task", [1, 3, 4]) == told
        assert told.seqs == (1, 3)
        assert told.calls == 1

    def test_without_a_sweep_the_objects_stay_for_the_next(self, store: Store) -> None:
        chain(store)
        told = store.prune("task", [1, 3], dry_run=True, sweep=False)
        assert store.prune("task", [1, 3], sweep=False) == told
        assert (told.seqs, told.objects) == ((1, 3), 0)
        assert store.prune("task", []).objects == (6 if store.chunked else 0)

    def test_what_is_not_there_is_passed_over(self, store: Store) -> None:
        chain(store, 2)
        Writer(store, space="ns").save()
        before = dump(store)
        for seqs, space in (([], ""), ([0, -1, 9, 10**12], ""), ([1, 2], "ns"), ([3], ""), ([1], "nowhere")):
            assert store.prune("task", seqs, space=space).seqs == ()
        assert store.prune("absent", [1]).seqs == ()
        assert dump(store) == before
        assert store.task("absent") is None
        assert store.prune("task", iter([1, 1])).seqs == (1,)

    def test_many_may_be_deleted_at_once(self, store: Store) -> None:
        writer = Writer(store)
        for i in range(1200):
            writer.save(obj(b"%d" % i), sync=False)
        pruned = store.prune("task", range(1, 1300))
        assert pruned.seqs == tuple(range(1, 1200))
        assert pruned.objects == (1199 if store.chunked else 0)
        assert [row.seq for row in store.headers("task")] == [1200]
        assert store.read("task") is not None

    def test_objects_that_others_reach_stay(self, store: Store) -> None:
        needs_chunks(store)
        writer = Writer(store)
        shared, lost = tree("shared"), tree("lost")
        writer.save(shared[0], lost[0], objects=[*shared, *lost])
        writer.save(shared[0], objects=())
        assert store.prune("task", [1]).objects == 3
        found = store.read("task")
        assert found is not None
        assert found[1] == {o.name: o for o in shared}

    @pytest.mark.parametrize("place", ["args_refs", "result_refs"])
    def test_objects_that_calls_reach_stay_as_long_as_the_call(self, store: Store, place: str) -> None:
        needs_chunks(store)
        writer = Writer(store)
        things = tree("things")
        writer.save(*things)
        writer.save()
        call = writer.write(call_row(2, status="succeeded", **{place: things[0].name}), objects=things).calls[0]
        assert store.prune("task", [1]).objects == 0
        assert store.calls("task") == ([call], {o.name: o for o in things})
        writer.save(row={"step": 1})
        pruned = store.prune("task", [2])
        assert (pruned.seqs, pruned.calls, pruned.objects) == ((2,), 1, 3)
        assert store.calls("task") == ([], {})

    def test_objects_swept_may_come_again(self, store: Store) -> None:
        writer = Writer(store)
        writer.save(*tree("a"))
        writer.save(*tree("b"))
        store.prune("task", [1])
        writer.save(*tree("a"))
        found = store.read("task")
        assert found is not None
        assert found[1] == reached(store, tree("a"))

    def test_heads_stay(self, store: Store) -> None:
        writer = chain(store, 2)
        side = Writer(store, branch="side")
        side.save(row={"parent_seq": 2})
        inner = Writer(store, space="ns")
        inner.save()
        assert store.prune("task", range(9)).seqs == (1,)
        assert store.prune("task", range(9), space="ns").seqs == ()
        inner.save()
        assert store.prune("task", range(9), space="ns").seqs == (4,)
        assert writer.head is not None
        assert store.read("task", branch="main") is not None

    def test_fork_points_stay(self, store: Store) -> None:
        chain(store, 3)
        Writer(store, branch="side").save(*tree("task0"), row={"parent_seq": 1})
        assert store.prune("task", [1, 2]).seqs == (2,)
        assert store.read("task", seq=1) is not None

    def test_pinned_ones_stay_until_unpinned(self, store: Store) -> None:
        chain(store, 3)
        assert store.pin("task", 1, True)
        assert store.prune("task", [1, 2]).seqs == (2,)
        store.pin("task", 1, False)
        assert store.prune("task", [1, 2]).seqs == (1,)

    def test_a_failure_leaf_may_go(self, store: Store) -> None:
        writer = chain(store, 1)
        leaf = writer.leaf(*tree("leaf"))
        pruned = store.prune("task", [1, leaf.seq or 0])
        assert (pruned.seqs, pruned.objects) == ((2,), 3 if store.chunked else 0)

    @pytest.mark.parametrize("status", ["started", "in_doubt", "paused"])
    def test_what_an_open_call_stands_on_stays(self, store: Store, status: str) -> None:
        writer = chain(store, 3)
        things = tree("things")
        row = call_row(1, status=status, line=9, args_refs=things[0].name)  # on whatever line it is
        call = writer.write(row, objects=things).calls[0]
        done = writer.call(2, status="succeeded")
        pruned = store.prune("task", [1, 2])
        assert (pruned.seqs, pruned.calls) == ((2,), 1)
        assert store.calls("task") == ([call], reached(store, things))
        assert done.no != call.no
        writer.settle(call, args_refs=things[0].name)
        pruned = store.prune("task", [1, 2])
        assert (pruned.seqs, pruned.calls) == ((1,), 1)
        assert pruned.objects == (6 if store.chunked else 0)

    @pytest.mark.parametrize("status", ["succeeded", "failed", "quarantined"])
    def test_a_settled_call_goes_with_what_it_stands_on(self, store: Store, status: str) -> None:
        writer = chain(store, 3)
        writer.call(1, status=status)
        writer.call(1, status=status, line=9, step=7)  # a line that no branch goes on with
        kept = writer.call(3, status=status)
        pruned = store.prune("task", [1])
        assert (pruned.seqs, pruned.calls) == ((1,), 2)
        assert store.calls("task")[0] == [kept]

    @pytest.mark.parametrize("status", ["succeeded", "failed", "quarantined"])
    def test_what_the_record_of_a_step_to_be_run_again_stands_on_stays(self, store: Store, status: str) -> None:
        # A write succeeded, then the process died; somebody saves, and retention wants what the step began from.
        writer = Writer(store)
        writer.save()
        call = writer.call(status=status)
        later = writer.call(step=1, status=status, superseded=True)
        writer.save()
        writer.save()
        assert store.prune("task", [1, 2]).seqs == (2,)
        assert store.calls("task")[0] == [call, later]
        writer.save(row={"step": 1})
        assert store.prune("task", [1, 3]).seqs == (3,), "the later step is run again"
        writer.save(row={"step": 2})
        assert store.prune("task", [1, 4]).seqs == (1, 4)
        assert store.calls("task")[0] == []

    @pytest.mark.parametrize("current", ["main", "side", "away"])
    def test_a_record_stays_for_the_current_branch_of_its_line(self, store: Store, current: str) -> None:
        """A branch that was left behind keeps the records of its line only where no current one goes on with it."""
        writer = Writer(store)
        writer.save()
        side = Writer(store, branch="side")
        side.save(row={"parent_seq": 1}, line=1)
        away = Writer(store, branch="away")
        away.save(row={"parent_seq": 1})
        writer.save()
        call = writer.call(status="succeeded")
        for step in (1, 2):
            writer.save(row={"step": step})
        writer.write(patch=TaskPatch(branch=current))
        pruned = store.prune("task", [4, 5])
        assert pruned.seqs == ((4, 5) if current == "main" else (5,))
        assert store.calls("task")[0] == ([] if current == "main" else [call])

    @pytest.mark.parametrize("status", ["open", "answered", "used"])
    def test_what_a_pause_of_a_step_to_be_run_again_stands_on_stays(self, store: Store, status: str) -> None:
        writer = Writer(store)
        writer.save()
        pause = writer.pause(status=status)
        writer.save()
        assert store.prune("task", [1]).seqs == ()
        assert store.pauses("task") == [pause]
        writer.save(row={"step": 1})
        assert store.prune("task", [1, 2]).seqs == ((1, 2) if status == "used" else (2,))

    def test_what_an_unused_pause_stands_on_stays(self, store: Store) -> None:
        writer = chain(store, 3)
        pause = writer.write(pause_row(1)).pauses[0]
        assert store.prune("task", [1]).seqs == ()
        pause = writer.write(replace(pause, status="answered", answer=b"yes"), anyway=True).pauses[0]
        assert store.prune("task", [1]).seqs == ()
        assert store.pauses("task") == [pause]
        writer.write(replace(pause, status="used"))
        assert store.prune("task", [1]).seqs == (1,)
        assert store.pauses("task") == []

    def test_what_a_live_runs_step_stands_on_stays(self, store: Store) -> None:
        chain(store, 2)
        grant = store.acquire("task", b"me")
        row = store.task("task")
        assert row is not None
        run = Writer(store, guard=grant.guard, head=row.head)
        run.call(2, fence=grant.guard.fence, status="succeeded")
        Writer(store, head=row.head).save(anyway=True, row={"step": 9})
        assert store.prune("task", [1, 2]).seqs == (1,)
        store.release("task", grant)
        assert store.prune("task", [1, 2]).seqs == (2,)

    # -- pins

    def test_a_pin_goes_round(self, store: Store) -> None:
        chain(store, 2)
        before = dump(store)
        assert store.pin("task", 1, True)
        assert store.pin("task", 1, True)
        assert [row.pinned for row in store.headers("task")] == [False, True]
        found = store.read("task", seq=1)
        assert found is not None
        assert found[0].pinned is True
        found[0].check("task", "a pinned checkpoint")
        assert store.pin("task", 1, False)
        after = dump(store)
        for seen in (before, after):
            seen["task"]["row"] = replace(seen["task"]["row"], updated_at=0)
        assert after == before

    def test_what_is_not_there_cannot_be_pinned(self, store: Store) -> None:
        chain(store, 1)
        assert not store.pin("task", 2, True)
        assert not store.pin("task", 1, True, space="ns")
        assert not store.pin("absent", 1, True)
        assert store.task("absent") is None

    # -- whole tasks

    def test_a_deleted_task_leaves_nothing(self, store: Store) -> None:
        keep = chain(store, 2, "keep")
        keep.call()
        before = dump(store)
        writer = chain(store, 2)
        writer.call()
        writer.pause()
        Writer(store, space="ns").save()
        store.pin("task", 1, True)
        store.commit(Writer(store, branch="side").commit(row={"id": "old", "parent_seq": 1}, patch=TaskPatch(agent="a")))
        store.release("task", store.acquire("task", b"me"))
        assert store.delete_task("task")
        assert dump(store) == before
        assert dump(store, ["task"])["task"] == dump(store, ["never there"])["never there"]

    def test_a_task_begins_anew_after_its_deletion(self, store: Store) -> None:
        writer = chain(store, 3)
        call = writer.call()
        store.release("task", store.acquire("task", b"me"))
        assert store.delete_task("task")
        again = Writer(store)
        done = again.save(*tree("new"), row={"id": "x"})
        assert (done.seq, done.existed) == (1, False)
        found = store.read("task")
        assert found is not None
        assert found[1] == reached(store, tree("new"))
        assert store.calls("task", nos=[call.no]) == ([], {})
        assert store.lease("task") is None
        row = store.task("task")
        assert row is not None
        assert (row.attempts, row.checkpoints, row.status) == (0, 1, "idle")
        assert [b.name for b in store.branches("task")] == ["main"]
        assert store.acquire("task", b"me").previous == ""

    def test_deleting_what_is_not_there_says_so(self, store: Store) -> None:
        assert store.delete_task("task") is False
        chain(store, 1)
        assert store.delete_task("task") is True
        assert store.delete_task("task") is False

"""Leases: one holder, a fence that only rises, and the truth about how the last one ended."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from safepoint.errors import LeaseHeld, LeaseLost, SafepointError
from safepoint.model import new_id
from safepoint.rows import Commit, Grant, Guard, TaskPatch, replace
from safepoint.stores.base import Store
from safepoint.testing.build import Writer, dump, tree

HOLDER = b"\x81\xa3pid\x01"


class LeaseTests:
    def test_acquiring_makes_the_task_and_marks_it_running(self, store: Store) -> None:
        grant = store.acquire("task", HOLDER)
        assert (grant.guard.fence, grant.previous, grant.presumed) == (1, "", 0)
        assert len(grant.guard.token) >= 16
        row, lease = store.task("task"), store.lease("task")
        assert row is not None
        assert (row.status, row.attempts) == ("running", 1)
        assert lease is not None
        assert (lease.task, lease.fence, lease.token, lease.state) == ("task", *grant.guard, "held")
        assert (lease.holder, lease.presumed, lease.live, lease.stopped) == (HOLDER, 0, True, False)
        assert lease.acquired_at > 0
        assert store.holds("task", grant.guard)

    def test_a_held_task_is_refused_and_says_by_whom(self, store: Store) -> None:
        grant = store.acquire("task", HOLDER)
        before = dump(store)
        with pytest.raises(LeaseHeld) as caught:
            store.acquire("task", b"other")
        assert caught.value.details["holder"] == {"pid": 1}
        assert caught.value.details["stopped"] is False
        assert dump(store) == before
        assert store.holds("task", grant.guard)

    def test_another_handle_of_the_store_is_refused_too(self, store: Store, opener: Callable[[], Store]) -> None:
        # In one process: a lock of the operating system alone would be granted twice there.
        other = opener()
        try:
            grant = store.acquire("task", HOLDER)
            lease = other.lease("task")
            assert lease is not None
            assert lease.live
            with pytest.raises(LeaseHeld):
                other.acquire("task", HOLDER)
            with pytest.raises(LeaseHeld):
                Writer(other).save()
            store.release("task", grant)
            second = other.acquire("task", HOLDER)
            assert second.previous == "released"
        finally:
            other.close()
        assert store.acquire("task", HOLDER).previous == "dead"

    def test_a_released_lease_is_free(self, store: Store) -> None:
        grant = store.acquire("task", HOLDER)
        store.release("task", grant, TaskPatch(status="finished", reason="done"))
        row, lease = store.task("task"), store.lease("task")
        assert row is not None
        assert (row.status, row.reason, row.attempts) == ("finished", "done", 1)
        assert lease is not None
        assert (lease.state, lease.live, lease.fence) == ("released", False, 1)
        assert not store.holds("task", grant.guard)
        second = store.acquire("task", HOLDER)
        assert (second.guard.fence, second.previous, second.presumed) == (2, "released", 0)
        assert second.guard.token != grant.guard.token
        row = store.task("task")
        assert row is not None
        assert (row.status, row.attempts) == ("running", 2)

    def test_an_abandoned_lease_is_free_and_its_holder_dead(self, store: Store) -> None:
        grant = store.acquire("task", HOLDER)
        store.abandon("task", grant)
        lease, row = store.lease("task"), store.task("task")
        assert lease is not None
        assert (lease.state, lease.live) == ("held", False)
        assert row is not None
        assert row.status == "running", "an abandoned lease says nothing to the data, as a death would"
        Writer(store).save()
        second = store.acquire("task", HOLDER)
        assert (second.guard.fence, second.previous, second.presumed) == (2, "dead", 0)
        with pytest.raises(LeaseLost):
            Writer(store, guard=grant.guard, head=Writer(store).head).save()

    def test_a_stolen_lease_is_presumed_dead(self, store: Store) -> None:
        grant = store.acquire("task", HOLDER)
        thief = store.acquire("task", b"thief", steal=True)
        assert (thief.guard.fence, thief.previous, thief.presumed) == (2, "presumed_dead", grant.guard.fence)
        assert not store.holds("task", grant.guard)
        assert store.holds("task", thief.guard)
        lease = store.lease("task")
        assert lease is not None
        assert (lease.presumed, lease.holder, lease.live) == (1, b"thief", True)
        # It was never proven, and whoever asks later must still be told.
        store.release("task", thief)
        third = store.acquire("task", HOLDER)
        assert (third.previous, third.presumed) == ("released", 1)
        fourth = store.acquire("task", HOLDER, steal=True)
        assert (fourth.previous, fourth.presumed) == ("presumed_dead", 3)

    def test_stealing_what_nobody_holds_presumes_nothing(self, store: Store) -> None:
        assert store.acquire("none", HOLDER, steal=True).previous == ""
        grant = store.acquire("released", HOLDER)
        store.release("released", grant)
        assert store.acquire("released", HOLDER, steal=True).previous == "released"
        store.abandon("dead", store.acquire("dead", HOLDER))
        stolen = store.acquire("dead", HOLDER, steal=True)
        assert (stolen.previous, stolen.presumed) == ("dead", 0)

    def test_release_and_abandon_by_others_are_harmless(self, store: Store) -> None:
        first = store.acquire("task", HOLDER)
        holder = store.acquire("task", HOLDER, steal=True)
        before = dump(store)
        wrong = [first, replace(holder, guard=Guard(holder.guard.fence, "0" * 32), handle=None)]
        for grant in wrong:
            store.release("task", grant, TaskPatch(status="failed"))
        store.abandon("task", first)
        store.release("absent", first, TaskPatch(status="failed"))
        store.abandon("absent", first)
        assert dump(store) == before
        assert store.holds("task", holder.guard)
        with pytest.raises(LeaseHeld):
            store.acquire("task", HOLDER)
        store.release("task", holder)
        after = dump(store)
        store.release("task", holder, TaskPatch(status="failed"))
        store.abandon("task", holder)
        assert dump(store) == after

    def test_holds_asks_for_fence_and_token(self, store: Store) -> None:
        grant = store.acquire("task", HOLDER)
        fence, token = grant.guard
        for wrong in (Guard(fence, "0" * 32), Guard(fence + 1, token), Guard(0, "")):
            assert not store.holds("task", wrong)
        assert not store.holds("absent", grant.guard)

    def test_the_fence_only_rises(self, store: Store) -> None:
        fences, tokens, held = [], set(), False
        for end in ("release", "abandon", "stay", "stay", "release", "abandon", "release"):
            grant = store.acquire("task", HOLDER, steal=held)
            held = end == "stay"
            fences.append(grant.guard.fence)
            tokens.add(grant.guard.token)
            if end == "release":
                store.release("task", grant)
            elif end == "abandon":
                store.abandon("task", grant)
        assert fences == sorted(set(fences))
        assert len(tokens) == len(fences)

    def test_the_fence_goes_on_rising_after_a_deletion(self, store: Store) -> None:
        # A receiver that refuses stale fences knows the name of the task, and not that it was deleted.
        for _ in range(3):
            grant = store.acquire("task", HOLDER)
            store.release("task", grant)
        low = store.acquire("other", HOLDER)
        store.release("other", low)
        assert store.delete_task("task")
        assert store.delete_task("other")
        again = store.acquire("task", HOLDER)
        assert again.guard.fence > grant.guard.fence
        assert (again.previous, again.presumed) == ("", 0)
        store.abandon("task", again)
        assert store.delete_task("task")
        Writer(store).save()
        assert store.acquire("task", HOLDER).guard.fence > again.guard.fence

    def test_leases_of_tasks_are_separate(self, store: Store) -> None:
        grants = [store.acquire(f"t{i}", HOLDER) for i in range(300)]
        for i in range(0, 300, 2):
            store.release(f"t{i}", grants[i])
        assert [store.holds(f"t{i}", g.guard) for i, g in enumerate(grants)] == [bool(i % 2) for i in range(300)]
        for i, grant in enumerate(grants):
            if i % 2:
                with pytest.raises(LeaseHeld):
                    store.acquire(f"t{i}", HOLDER)
                store.abandon(f"t{i}", grant)
            assert store.acquire(f"t{i}", HOLDER).previous == ("dead" if i % 2 else "released")

    def test_a_held_task_can_be_read_pinned_and_pruned(self, store: Store) -> None:
        grant = store.acquire("task", HOLDER)
        writer = Writer(store, guard=grant.guard)
        writer.save(*tree("a"))
        writer.save(*tree("b"))
        assert store.pin("task", 1, True)
        assert store.pin("task", 1, False)
        assert store.prune("task", [1]).seqs == (1,)
        assert store.read("task") is not None

    def test_a_held_task_is_not_deleted(self, store: Store) -> None:
        grant = store.acquire("task", HOLDER)
        Writer(store, guard=grant.guard).save(*tree("a"))
        before = dump(store)
        with pytest.raises(LeaseHeld):
            store.delete_task("task")
        assert dump(store) == before
        store.abandon("task", grant)
        assert store.delete_task("task")

    def test_of_many_takers_one_gets_it(self, store: Store) -> None:
        for round_no in range(10):
            grants: list[Grant] = []
            refusals: list[SafepointError] = []
            gate = threading.Barrier(8)

            def take(gate: threading.Barrier, grants: list[Grant], refusals: list[SafepointError]) -> None:
                gate.wait()
                try:
                    grants.append(store.acquire("task", HOLDER))
                except LeaseHeld as error:
                    refusals.append(error)

            threads = [threading.Thread(target=take, args=(gate, grants, refusals)) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert (len(grants), len(refusals)) == (1, 7)
            assert grants[0].guard.fence == round_no + 1
            store.release("task", grants[0])

    def test_a_run_writes_with_its_guard(self, store: Store) -> None:
        grant = store.acquire("task", HOLDER)
        writer = Writer(store, guard=grant.guard)
        writer.save(*tree("a"))
        call = writer.settle(writer.call(fence=grant.guard.fence))
        writer.save(*tree("b"))
        store.commit(Commit(task="task", id=new_id(), guard=grant.guard, patch=TaskPatch(status="waiting")))
        row = store.task("task")
        assert row is not None
        assert (row.status, row.checkpoints) == ("waiting", 2)
        assert store.calls("task")[0] == [call]

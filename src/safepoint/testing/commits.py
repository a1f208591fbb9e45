"""Commits: atomic, compared, repeatable, numbered without gaps."""

from __future__ import annotations

from typing import Any

import pytest

from safepoint.errors import Conflict, LeaseHeld, LeaseLost, NotFound, UsageError
from safepoint.model import Obj, new_id
from safepoint.rows import CallRow, CheckpointRow, Commit, Guard, Head, PauseRow, TaskPatch, replace
from safepoint.stores.base import Store
from safepoint.testing.build import (
    EVERY_BYTE,
    Writer,
    call_row,
    checkpoint_row,
    dump,
    flat,
    needs_chunks,
    obj,
    pause_row,
    reached,
    tree,
)

STATUS = TaskPatch(status="waiting")


def refused(store: Store, commit: Commit, error: Any) -> Any:
    """The commit raises, and leaves no trace."""
    before = dump(store)
    with pytest.raises(error) as caught:
        store.commit(commit)
    assert dump(store) == before, "a commit that raised has written something"
    return caught.value


class CommitTests:
    def test_a_first_commit_makes_the_task(self, store: Store) -> None:
        commit = Writer(store).commit(*tree("a"), row={"step": 3})
        done = store.commit(commit)
        assert (done.seq, done.head, done.existed) == (1, Head(1, commit.id), False)
        row = store.task("task")
        assert row is not None
        assert (row.status, row.branch, row.head, row.step) == ("idle", "main", done.head, 3)
        assert (row.attempts, row.checkpoints, row.in_doubt, row.open_pauses) == (0, 1, 0, 0)
        assert row.created_at > 0
        assert store.lease("task") is None

    def test_a_checkpoint_comes_back_field_by_field(self, store: Store) -> None:
        writer = Writer(store)
        writer.save()
        children = (obj(EVERY_BYTE), obj(b""))
        top = obj(b"top\0", *children)
        sent = checkpoint_row(
            "id with 'quotes' and \N{SNOWMAN}",
            [top],
            parent_seq=1,
            step=2**40,
            kind="milestone",
            label="100 % \N{SNOWMAN}\n",
            created_at=-(2**53),
            format=7,
            schema=2**31,
            size=2**40,
            metadata=EVERY_BYTE,
            metrics=b"\0",
            root=EVERY_BYTE * 3,
        )
        things = (top, *children) if store.chunked else ()
        sent = sent if store.chunked else flat(sent)
        done = store.commit(Commit(task="task", id=sent.id, checkpoint=sent, expect=writer.head, objects=things))
        found = store.read("task")
        assert found is not None
        row, objects = found
        row.check("task", "checkpoint")
        assert row == replace(sent, seq=2).sealed("task")
        assert objects == {o.name: o for o in things}
        assert all(type(v) is Obj for v in objects.values())
        assert done.head == Head(2, sent.id)

    def test_optional_fields_come_back_as_none(self, store: Store) -> None:
        done = Writer(store).save()
        found = store.read("task", seq=done.seq)
        assert found is not None
        row, objects = found
        assert (row.parent_seq, row.label, row.metadata, row.metrics, row.refs) == (None, None, b"", b"", b"")
        assert row.pinned is False
        assert objects == {}

    @pytest.mark.parametrize("full", [True, False])
    def test_a_call_comes_back_field_by_field(self, store: Store, full: bool) -> None:
        writer = Writer(store)
        writer.save()
        args, result = obj(b"args"), obj(b"result\0")
        given: dict[str, Any] = {
            "scope": 4,
            "call_id": "call_0 \N{SNOWMAN}",
            "op_key": EVERY_BYTE,
            "attempts": 3,
            "fence": 2**40,
            "finished_at": 2**50,
            "args": EVERY_BYTE,
            "args_refs": args.name,
            "result": b"",
            "result_refs": result.name,
            "error": b"\0",
            "policy": EVERY_BYTE,
            "model": b"",
            "not_done": True,
            "superseded": True,
            "reason": "a 'reason'\n",
        }
        sent = call_row(1, **(given if full else {}))
        objects = (args, result) if full and store.chunked else ()
        sent = sent if store.chunked else flat(sent)
        written = writer.write(sent, objects=objects).calls[0]
        assert written == replace(sent, no=1, began=written.began, version=1).sealed("task")
        rows, bodies = store.calls("task")
        assert rows == [written]
        assert [type(v) for v in (rows[0].not_done, rows[0].superseded)] == [bool, bool]
        rows[0].check("task", "call")
        assert bodies == {o.name: o for o in objects}

    @pytest.mark.parametrize("full", [True, False])
    def test_a_pause_comes_back_field_by_field(self, store: Store, full: bool) -> None:
        writer = Writer(store)
        writer.save()
        given: dict[str, Any] = {"space": "ns", "occurrence": 3, "call_no": 9, "answer": b"", "answered_at": 2**50}
        sent = pause_row(1, question=EVERY_BYTE, **(given if full else {}))
        written = writer.write(sent).pauses[0]
        assert written == replace(sent, no=written.no, version=1).sealed("task")
        assert store.pauses("task") == [written]
        store.pauses("task")[0].check("task", "pause")

    def test_all_parts_of_a_commit_land_together(self, store: Store) -> None:
        writer = Writer(store)
        writer.save()
        call, pause = writer.call(), writer.pause()
        commit = writer.commit(*tree("b"))
        settled = replace(call, status="succeeded", result=b"r")
        answered = replace(pause, status="answered", answer=b"a")
        inner = writer_parts(settled, answered, call_row(1), pause_row(1))
        done = store.commit(replace(commit, patch=STATUS, **inner))
        assert done.seq == 2
        assert [row.no for row in done.calls] == [call.no, call.no + 1]
        assert [(row.status, row.version) for row in done.pauses] == [("answered", 2), ("open", 1)]
        row = store.task("task")
        assert row is not None
        assert (row.status, row.head, row.open_pauses) == ("waiting", done.head, 1)
        assert store.calls("task")[0] == list(done.calls)
        assert store.pauses("task") == list(done.pauses)

    # -- repeated

    def test_a_repeated_commit_is_answered_and_writes_nothing(self, store: Store) -> None:
        writer = Writer(store)
        writer.save()
        commit = replace(writer.commit(*tree("b")), **writer_parts(call_row(1), pause_row(1)), patch=STATUS)
        done = store.commit(commit)
        before = dump(store)
        again = store.commit(commit)
        assert (again.seq, again.head, again.existed) == (done.seq, done.head, True)
        assert dump(store) == before

    def test_a_repeated_journal_write_is_answered_with_its_rows(self, store: Store) -> None:
        writer = Writer(store)
        writer.save(*tree("a"))
        old = writer.call()
        parts = writer_parts(call_row(1), replace(old, status="failed"), pause_row(1))
        commit = Commit(task="task", id=new_id(), patch=STATUS, **parts)
        done = store.commit(commit)
        before = dump(store)
        again = store.commit(commit)
        assert (again.existed, again.seq, again.calls, again.pauses) == (True, None, done.calls, done.pauses)
        assert dump(store) == before

    def test_a_repeat_is_recognized_after_the_branch_has_moved_on(self, store: Store) -> None:
        writer = Writer(store)
        commit = writer.commit(*tree("a"))
        writer.head = store.commit(commit).head
        last = writer.save(*tree("b"))
        again = store.commit(commit)
        assert (again.seq, again.existed, again.head) == (1, True, last.head)

    def test_a_repeat_is_answered_even_when_the_lease_is_lost(self, store: Store) -> None:
        grant = store.acquire("task", b"me")
        writer = Writer(store, guard=grant.guard)
        commit = writer.commit(*tree("a"))
        store.commit(commit)
        store.acquire("task", b"other", steal=True)
        assert store.commit(commit).existed
        with pytest.raises(LeaseLost):
            store.commit(replace(commit, id=(other := new_id()), checkpoint=checkpoint_row(other), expect=Head(1, commit.id)))

    @pytest.mark.parametrize("other", [{"digest": b"x" * 16}, {"branch": "other"}, {"parent_seq": 7}])
    def test_an_id_that_is_taken_by_another_state_is_refused(self, store: Store, other: dict[str, Any]) -> None:
        writer = Writer(store)
        commit = writer.commit(*tree("a"))
        store.commit(commit)
        assert commit.checkpoint is not None
        refused(store, replace(commit, checkpoint=replace(commit.checkpoint, **other)), UsageError)

    def test_ids_belong_to_a_space_and_a_task(self, store: Store) -> None:
        for task, space in (("task", ""), ("task", "ns"), ("other", "")):
            assert not Writer(store, task, space=space).save(row={"id": "same"}).existed
        found = [store.read(task, space=space, id="same") for task, space in (("task", ""), ("task", "ns"), ("other", ""))]
        assert [f and f[0].seq for f in found] == [1, 2, 1]

    # -- compared

    def test_a_stale_head_is_a_conflict(self, store: Store) -> None:
        writer = Writer(store)
        first = writer.save(*tree("a"))
        writer.save(*tree("b"))
        assert writer.head is not None
        stale: list[Head | None] = [first.head, None, Head(writer.head.seq, "another id"), Head(99, writer.head.id)]
        for expect in stale:
            error = refused(store, writer.commit(*tree("c"), expect=expect), Conflict)
            assert "head" in error.details or "branch" in error.details or str(error)

    def test_a_branch_that_is_expected_must_exist(self, store: Store) -> None:
        refused(store, Writer(store).commit(expect=Head(1, "x")), (Conflict, NotFound))
        assert store.task("task") is None
        Writer(store).save()
        refused(store, Writer(store, branch="other").commit(expect=Head(1, "x")), Conflict)

    def test_only_a_guardless_checkpoint_makes_a_task(self, store: Store) -> None:
        writer = Writer(store)
        for rows in ((call_row(1),), (pause_row(1),)):
            refused(store, Commit(task="task", id=new_id(), **writer_parts(*rows)), NotFound)
        refused(store, Commit(task="task", id=new_id(), patch=STATUS), NotFound)
        refused(store, writer.commit(guard=Guard(1, "x")), (NotFound, LeaseLost))
        assert store.tasks() == []

    def test_rows_are_compared_by_version(self, store: Store) -> None:
        writer = Writer(store)
        writer.save()
        call, pause = writer.call(), writer.pause()
        newer = writer.settle(call)
        assert newer.version == call.version + 1
        error = refused(store, row_commit(replace(call, status="failed")), Conflict)
        assert str(call.no) in str(error.details["row"])
        answered = writer.write(replace(pause, status="answered", answer=b"1")).pauses[0]
        error = refused(store, row_commit(replace(pause, status="answered", answer=b"2")), Conflict)
        assert str(pause.no) in str(error.details["row"])
        assert store.pauses("task") == [answered]
        refused(store, row_commit(replace(newer, version=9)), Conflict)

    def test_rows_that_do_not_exist_cannot_be_changed(self, store: Store) -> None:
        Writer(store).save()
        refused(store, row_commit(call_row(1, no=5, version=1)), NotFound)
        refused(store, row_commit(pause_row(1, no=5, version=1)), NotFound)

    def test_one_bad_row_spoils_the_whole_commit(self, store: Store) -> None:
        writer = Writer(store)
        writer.save(*tree("a"))
        call, pause = writer.call(), writer.pause()
        writer.settle(call)
        writer.write(replace(pause, status="answered"))
        good = writer.commit(*tree("b"), patch=STATUS)
        for bad in (replace(call, status="failed"), replace(pause, status="used")):
            refused(store, replace(good, **writer_parts(call_row(1), pause_row(1), bad)), Conflict)
        refused(store, replace(good, **writer_parts(call_row(1), call_row(1, no=77, version=1))), NotFound)
        refused(store, replace(good, expect=None, **writer_parts(call_row(1))), Conflict)
        assert writer.save(*tree("b")).seq == 2, "a refused commit has used up a number"
        assert writer.call().no == call.no + 1

    def test_what_is_stood_on_must_be_there(self, store: Store) -> None:
        writer = Writer(store)
        first = writer.save(*tree("a"))
        writer.save(*tree("b"))
        assert first.head is not None
        fork = Writer(store, branch="fork")
        commit = fork.commit(*tree("a"), objects=(), row={"parent_seq": 1}, stands_on=first.head)
        refused(store, replace(commit, stands_on=Head(1, "another id")), NotFound)
        refused(store, replace(commit, stands_on=Head(99, first.head.id)), NotFound)
        assert store.prune("task", [1]).seqs == (1,)
        refused(store, commit, NotFound)
        refused(store, Commit(task="task", id=new_id(), stands_on=first.head, **writer_parts(call_row(1))), NotFound)

    def test_a_patch_lands_only_at_the_head_that_it_was_decided_on(self, store: Store) -> None:
        writer = Writer(store)
        first = writer.save(*tree("a"))
        call = writer.call()

        def finish(on: Head | None, **fields: Any) -> Commit:
            patch = TaskPatch(status="finished")
            return Commit(task="task", id=new_id(), patch=patch, stands_on=on, at_head=True, **fields)

        grant = store.acquire("task", b"me")
        refused(store, finish(first.head), LeaseHeld)
        store.abandon("task", grant)
        assert first.head is not None
        for wrong in (None, Head(1, "another id"), Head(2, first.head.id)):
            assert refused(store, finish(wrong), Conflict).details["head"] == 1
        done = store.commit(finish(first.head))
        assert (done.seq, done.head, done.existed) == (None, None, False)
        row = store.task("task")
        assert row is not None
        assert (row.status, row.head) == ("finished", first.head)
        # The head moves, another branch becomes the current one: what was decided on the old one is void.
        second = writer.save(*tree("b"), patch=TaskPatch(status="idle"))
        refused(store, finish(first.head), Conflict)
        refused(store, finish(first.head, **writer_parts(replace(call, status="failed"))), Conflict)
        side = Writer(store, branch="side")
        moved = side.save(row={"parent_seq": 1}, stands_on=second.head, at_head=True, patch=TaskPatch(branch="side"))
        refused(store, finish(second.head), Conflict)
        store.commit(finish(moved.head))

    def test_a_task_without_a_head_stands_on_none(self, store: Store) -> None:
        store.abandon("task", store.acquire("task", b"me"))
        refused(store, Commit(task="task", id=new_id(), patch=STATUS, stands_on=Head(1, "x"), at_head=True), Conflict)
        store.commit(Commit(task="task", id=new_id(), patch=STATUS, at_head=True))
        Writer(store).save(at_head=True)
        refused(store, Commit(task="task", id=new_id(), patch=STATUS, at_head=True), Conflict)

    # -- guards

    def test_every_kind_of_commit_shows_its_guard(self, store: Store) -> None:
        Writer(store).save(*tree("a"))
        grant = store.acquire("task", b"me")
        writer = Writer(store, guard=grant.guard, head=self._head(store))
        call, pause = writer.call(), writer.pause()
        writer.save(*tree("b"))
        fence, token = grant.guard
        head = self._head(store)
        # With the right fence and another token too: a fence may come a second time, after a restored backup.
        for wrong in (Guard(fence, "0" * 32), Guard(fence + 1, token), Guard(0, ""), Guard(fence - 1, token)):
            late = Writer(store, guard=wrong, head=head)
            refused(store, late.commit(*tree("c")), LeaseLost)
            refused(store, replace(late.commit(*tree("c")), moves_head=False), LeaseLost)
            refused(store, Writer(store, branch="new", guard=wrong).commit(*tree("c")), LeaseLost)
            for row in (call_row(1), replace(call, status="failed"), pause_row(1), replace(pause, status="used")):
                refused(store, replace(row_commit(row), guard=wrong), LeaseLost)
            refused(store, Commit(task="task", id=new_id(), guard=wrong, patch=STATUS), LeaseLost)
            refused(store, replace(late.commit(*tree("c")), anyway=True), LeaseLost)

    def test_a_guard_ends_with_the_lease(self, store: Store) -> None:
        Writer(store).save()
        released = store.acquire("task", b"me")
        store.release("task", released)
        stolen = store.acquire("task", b"me")
        held = store.acquire("task", b"thief", steal=True)
        for guard in (released.guard, stolen.guard):
            refused(store, Writer(store, guard=guard, head=self._head(store)).commit(), LeaseLost)
        Writer(store, guard=held.guard, head=self._head(store)).save()
        store.release("task", held)
        refused(store, Writer(store, guard=held.guard, head=self._head(store)).commit(), LeaseLost)
        Writer(store, head=self._head(store)).save()

    def test_a_guard_of_another_task_is_none(self, store: Store) -> None:
        Writer(store).save()
        grant = store.acquire("other", b"me")
        refused(store, Writer(store, guard=grant.guard, head=self._head(store)).commit(), LeaseLost)

    def test_without_a_guard_a_held_task_keeps_its_heads(self, store: Store) -> None:
        writer = Writer(store)
        writer.save(*tree("a"))
        pause = writer.pause()
        grant = store.acquire("task", b"me")
        refused(store, writer.commit(*tree("b")), LeaseHeld)
        refused(store, Commit(task="task", id=new_id(), patch=STATUS), LeaseHeld)
        # Answers, settlements and forks pass, and a head may be moved by who says so.
        answered = writer.write(replace(pause, status="answered"), anyway=True).pauses[0]
        assert answered.version == 2
        Writer(store, branch="fork").save(*tree("a"), row={"parent_seq": 1}, anyway=True)
        moved = writer.save(*tree("b"), anyway=True)
        assert self._head(store) == moved.head
        store.release("task", grant)
        writer.save(*tree("c"))

    # -- numbers

    def test_seq_counts_without_gaps_over_all_spaces_and_branches(self, store: Store) -> None:
        main, inner = Writer(store), Writer(store, space="ns")
        seqs = [main.save().seq, inner.save().seq, main.save().seq]
        fork = Writer(store, branch="fork")
        seqs.append(fork.save(row={"parent_seq": 1}).seq)
        refused(store, main.commit(expect=None), Conflict)
        seqs.append(main.leaf().seq)
        store.prune("task", [5])
        seqs += [inner.save().seq, fork.save().seq, main.save().seq]
        assert seqs == list(range(1, 9))
        assert Writer(store, "other").save().seq == 1

    def test_a_number_is_never_given_twice(self, store: Store) -> None:
        writer = Writer(store)
        writer.save()
        call, pause = writer.call(status="succeeded"), writer.pause(status="used")
        leaf = writer.leaf()
        assert leaf.seq is not None
        second = writer.call(leaf.seq, status="succeeded")
        writer.save(row={"step": 1})
        store.prune("task", [1, leaf.seq])
        assert store.calls("task")[0] == []
        assert store.pauses("task") == []
        assert writer.call().no > second.no > call.no > 0
        assert writer.pause().no > pause.no > 0

    def test_journal_positions_rise_with_every_intent_and_result(self, store: Store) -> None:
        writer = Writer(store)
        writer.save()
        one = writer.call()
        two = writer.call()
        two = writer.settle(two)
        assert two.ended is not None
        one = writer.settle(one)
        assert one.ended is not None
        both = writer.write(call_row(1), call_row(1)).calls
        again = writer.write(replace(one, status="started", attempts=2), stamp="began").calls[0]
        order = [one.began, two.began, two.ended, one.ended, both[0].began, both[1].began, again.began]
        assert order == sorted(set(order))
        assert order[0] > 0
        said = writer.write(replace(again, reason="a person's word")).calls[0]
        assert (said.began, said.ended) == (again.began, again.ended)
        assert store.calls("task", nos=[said.no])[0] == [said]

    # -- branches and leaves

    def test_a_failure_leaf_is_kept_and_moves_nothing(self, store: Store) -> None:
        writer = Writer(store)
        first = writer.save(*tree("a"))
        leaf = writer.leaf(*tree("b"))
        assert (leaf.seq, leaf.head, writer.head) == (2, first.head, first.head)
        assert self._head(store) == first.head
        found = store.read("task", seq=2)
        assert found is not None
        assert (found[0].kind, found[0].parent_seq, len(found[1])) == ("failure", 1, len(reached(store, tree("b"))))
        assert [row.seq for row in store.headers("task")] == [2, 1]
        assert writer.save(*tree("c")).seq == 3

    def test_a_branch_knows_its_line_and_fork_point(self, store: Store) -> None:
        main = Writer(store)
        main.save(*tree("a"))
        (first,) = store.branches("task")
        assert (first.name, first.space, first.head, first.forked_from) == ("main", "", main.head, None)
        fresh, heir = Writer(store, branch="fresh"), Writer(store, branch="heir")
        fresh.save(*tree("a"), row={"parent_seq": 1}, stands_on=main.head)
        heir.save(*tree("a"), row={"parent_seq": 1}, stands_on=main.head, line=first.line)
        main.save(*tree("b"))
        heir.save(*tree("b"))
        rows = {row.name: row for row in store.branches("task")}
        assert set(rows) == {"main", "fresh", "heir"}
        assert rows["heir"].line == rows["main"].line == first.line
        assert rows["fresh"].line != first.line
        assert [rows[n].forked_from for n in ("main", "fresh", "heir")] == [None, 1, 1]
        assert [rows[n].head for n in ("main", "fresh", "heir")] == [main.head, fresh.head, heir.head]
        assert store.branches("task", "ns") == []

    def test_the_current_branch_is_the_first_until_a_patch_says_otherwise(self, store: Store) -> None:
        trunk = Writer(store, branch="trunk")
        trunk.save(row={"step": 1})
        side = Writer(store, branch="side")
        side.save(row={"step": 7, "parent_seq": 1})
        row = store.task("task")
        assert row is not None
        assert (row.branch, row.head, row.step) == ("trunk", trunk.head, 1)
        store.commit(Commit(task="task", id=new_id(), patch=TaskPatch(branch="side")))
        row = store.task("task")
        assert row is not None
        assert (row.branch, row.head, row.step) == ("side", side.head, 7)
        found = store.read("task")
        assert found is not None
        assert found[0].seq == 2
        # In the same commit as the new branch, as recovery does it.
        third = Writer(store, branch="side~1")
        third.save(row={"parent_seq": 1}, patch=TaskPatch(branch="side~1"))
        row = store.task("task")
        assert row is not None
        assert (row.branch, row.head) == ("side~1", third.head)

    # -- the task's row

    def test_a_patch_sets_what_it_names(self, store: Store) -> None:
        writer = Writer(store)
        writer.save()
        full = TaskPatch(status="failed", agent="a", input=EVERY_BYTE, reason="r\0", raised=b"\0", parent="other task")
        writer.write(patch=full)
        row = store.task("task")
        assert row is not None
        seen = (row.status, row.agent, row.input, row.reason, row.raised, row.parent)
        assert seen == ("failed", "a", EVERY_BYTE, "r\0", b"\0", "other task")
        writer.write(patch=TaskPatch(reason=""))
        later = store.task("task")
        assert later is not None
        assert replace(later, updated_at=0) == replace(row, reason="", updated_at=0)

    def test_the_task_counts_what_waits_for_people(self, store: Store) -> None:
        writer = Writer(store)
        writer.save()
        calls = [writer.call() for _ in range(3)]
        doubts = [writer.write(replace(c, status="in_doubt")).calls[0] for c in calls[:2]]
        pauses = [writer.pause() for _ in range(2)]
        assert self._waiting(store) == (2, 2)
        writer.settle(doubts[0])
        writer.write(replace(pauses[0], status="answered"), anyway=True)
        assert self._waiting(store) == (1, 1)

    def test_what_was_passed_waits_for_nobody(self, store: Store) -> None:
        writer = Writer(store)
        writer.save()
        writer.call(status="in_doubt")
        writer.pause()
        writer.save()
        assert self._waiting(store) == (1, 1), "the step is still to be run again"
        writer.call(status="in_doubt", line=9)
        writer.pause(line=9)
        assert self._waiting(store) == (1, 1), "of another line"
        writer.save(row={"step": 1})
        assert self._waiting(store) == (0, 0), "somebody has gone on past it"
        writer.call(status="in_doubt", step=2)
        assert self._waiting(store) == (1, 0)
        side = Writer(store, branch="side")
        side.save(row={"parent_seq": 1}, patch=TaskPatch(branch="side"))
        assert self._waiting(store) == (0, 0), "of the branch that is current"
        writer.write(patch=TaskPatch(branch="main"))
        assert self._waiting(store) == (1, 0)

    def test_bytes_written_follow_what_is_new(self, store: Store) -> None:
        needs_chunks(store)
        writer = Writer(store)
        big = obj(b"x" * 100_000)
        assert 100_000 <= writer.save(big).bytes_written < 110_000
        assert 0 < writer.save(big, objects=()).bytes_written < 10_000

    # -- objects

    def test_an_object_with_other_bytes_is_overwritten(self, store: Store) -> None:
        needs_chunks(store)
        writer = Writer(store)
        good = obj(b"as it was")
        writer.save(Obj(good.name, b"", b"damaged"))
        writer.save(good)
        found = store.read("task")
        assert found is not None
        assert found[1] == {good.name: good}

    def test_what_the_parent_reaches_need_not_be_sent(self, store: Store) -> None:
        needs_chunks(store)
        writer = Writer(store)
        old, new = tree("old"), tree("new")
        writer.save(*old)
        writer.save(old[0], *new, objects=new)
        found = store.read("task")
        assert found is not None
        assert found[1] == {o.name: o for o in (*old, *new)}
        store.prune("task", [1])
        assert store.read("task") == found

    @staticmethod
    def _head(store: Store) -> Head | None:
        row = store.task("task")
        return None if row is None else row.head

    @staticmethod
    def _waiting(store: Store) -> tuple[int, int]:
        row = store.task("task")
        assert row is not None
        return row.in_doubt, row.open_pauses


def writer_parts(*rows: CallRow | PauseRow | CheckpointRow) -> dict[str, Any]:
    """The journal fields of a Commit that writes these rows."""
    from safepoint.rows import CallWrite, PauseWrite

    return {
        "calls": tuple(CallWrite(r, "began" if r.version == 0 else "") for r in rows if isinstance(r, CallRow)),
        "pauses": tuple(PauseWrite(r) for r in rows if isinstance(r, PauseRow)),
    }


def row_commit(row: CallRow | PauseRow) -> Commit:
    return Commit(task="task", id=new_id(), anyway=True, **writer_parts(row))

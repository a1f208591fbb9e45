"""What adapters record against checkpoints, and branches that are set back or dropped."""

from __future__ import annotations

from typing import Any

import pytest

from safepoint.errors import Conflict, LeaseHeld, LeaseLost, NotFound, UsageError
from safepoint.model import new_id
from safepoint.rows import BranchWrite, Commit, Guard, Head, TaskPatch, WriteRow, replace
from safepoint.stores.base import Store
from safepoint.testing.build import (
    EVERY_BYTE,
    Writer,
    call_row,
    dump,
    flat,
    needs_chunks,
    obj,
    pause_row,
    reached,
    tree,
    write_row,
)
from safepoint.testing.commits import refused

__all__ = ["WriteTests"]


def rows_of(store: Store, space: str = "", checkpoints: Any = None, task: str = "task") -> list[WriteRow]:
    found, objects = store.writes(task, space=space, checkpoints=checkpoints)
    for row in found:
        row.check(task, "a write")
    if store.chunked:
        assert {row.refs[:16] for row in found if row.refs} <= set(objects)
    assert store.writes(task, space=space, checkpoints=checkpoints, bodies=False) == (found, {})
    return found


def moves(store: Store, *branches: BranchWrite, **fields: Any) -> Commit:
    return Commit(task="task", id=new_id(), branches=branches, **fields)


class WriteTests:
    # -- writes

    def test_a_write_comes_back_field_by_field(self, store: Store) -> None:
        child = obj(EVERY_BYTE)
        top = obj(b"top\0", child)
        sent = WriteRow(
            space="a:1|b:'2",
            checkpoint="1f'0c \N{SNOWMAN}",
            writer="7e; \N{SNOWMAN}",
            idx=2**31,
            path="~__pregel_pull, \N{SNOWMAN}\n",
            data=EVERY_BYTE,
            refs=top.name,
        )
        sent = sent if store.chunked else flat(sent)
        bare = WriteRow(checkpoint="c", writer="w", idx=-4)
        writer = Writer(store)
        writer.save()
        done = writer.record(sent, bare, objects=(top, child))
        assert (done.seq, done.head, done.existed) == (None, None, False)
        assert done.bytes_written >= 256
        assert store.writes("task", space=sent.space) == ([sent.sealed("task")], reached(store, [top, child]))
        assert store.writes("task") == ([bare.sealed("task")], {})
        rows_of(store, sent.space)

    def test_writes_need_no_checkpoint_and_make_the_task(self, store: Store) -> None:
        writer = Writer(store)
        done = writer.record(write_row("later"))
        assert (done.seq, done.head) == (None, None)
        row = store.task("task")
        assert row is not None
        assert (row.status, row.head, row.checkpoints, row.attempts) == ("idle", None, 0, 0)
        assert store.read("task") is None
        saved = writer.save(row={"id": "later"})
        assert (saved.seq, saved.head) == (1, Head(1, "later"))
        assert [row.checkpoint for row in rows_of(store)] == ["later"]

    def test_they_come_by_checkpoint_path_writer_and_index(self, store: Store) -> None:
        keys = [
            ("a", "p", "w", 0),
            ("a", "p", "w", 1),
            ("a", "p", "x", -1),
            ("a", "q", "a", 0),
            ("b", "", "w", 0),
            ("é", "", "w", 0),
        ]
        rows = [write_row(c, writer=w, idx=i, path=p) for c, p, w, i in keys]
        writer = Writer(store)
        for row in rows[::-1]:
            writer.record(row)
        assert [(r.checkpoint, r.path, r.writer, r.idx) for r in rows_of(store)] == keys
        assert [r.key for r in rows_of(store, checkpoints=["b", "nobody", "a"])] == [r.key for r in rows[:5]]
        assert rows_of(store, checkpoints=[]) == []
        assert rows_of(store, "ns") == []
        assert store.writes("another") == ([], {})

    def test_the_first_stands_and_a_special_one_is_replaced(self, store: Store) -> None:
        writer = Writer(store)
        writer.record(
            write_row("c", data=b"first"), write_row("c", idx=-1, data=b"error"), write_row("c", idx=3, data=b"third")
        )
        writer.record(
            write_row("c", data=b"second", path="elsewhere"),
            write_row("c", idx=-1, data=b"another", path="elsewhere"),
            write_row("c", idx=1, data=b"new"),
        )
        found = {row.idx: (row.data, row.path) for row in rows_of(store)}
        assert found == {0: (b"first", ""), 1: (b"new", ""), 3: (b"third", ""), -1: (b"another", "elsewhere")}

    def test_one_key_of_many_spaces_checkpoints_and_writers(self, store: Store) -> None:
        writer = Writer(store)
        rows = [write_row(c, writer=w, space=s) for s in ("", "a", "a|b") for c in ("x", "y") for w in ("v", "w")]
        writer.record(*rows)
        for space in ("", "a", "a|b"):
            assert [(r.checkpoint, r.writer) for r in rows_of(store, space)] == [(c, w) for c in "xy" for w in "vw"]

    def test_a_repeated_commit_of_writes_is_answered(self, store: Store) -> None:
        writer = Writer(store)
        writer.save()
        commit = Commit(task="task", id=new_id(), writes=(write_row("c", idx=-1, data=b"one"),))
        store.commit(commit)
        before = dump(store)
        assert store.commit(commit).existed
        assert dump(store) == before

    def test_writes_and_a_checkpoint_in_one_commit(self, store: Store) -> None:
        writer = Writer(store)
        writer.save(*tree("a"), writes=(write_row("next"),))
        assert [row.checkpoint for row in rows_of(store)] == ["next"]
        refused(store, writer.commit(expect=None, writes=(write_row("no"),)), Conflict)

    def test_a_guard_is_compared_and_a_live_run_in_the_way(self, store: Store) -> None:
        writer = Writer(store)
        writer.save()
        grant = store.acquire("task", b"me")
        commit = Commit(task="task", id=new_id(), writes=(write_row("c"),))
        refused(store, commit, LeaseHeld)
        refused(store, replace(commit, guard=Guard(grant.guard.fence, "another")), LeaseLost)
        store.commit(replace(commit, guard=grant.guard))
        assert len(rows_of(store)) == 1
        refused(store, Commit(task="none", id=new_id(), writes=(write_row("c"),), guard=grant.guard), NotFound)

    def test_what_writes_reach_is_kept(self, store: Store) -> None:
        needs_chunks(store)
        writer = Writer(store)
        writer.save(row={"id": "base"})
        writer.save(*tree("shared"))
        writer.record(
            write_row("base", tree("own")[:1]),
            write_row("none", tree("shared")[:1]),
            objects=tree("own"),
            stands_on=writer.head,
        )
        writer.save()
        assert store.prune("task", [2]).seqs == (2,)
        _, objects = store.writes("task")
        assert objects == {o.name: o for o in (*tree("own"), *tree("shared"))}

    def test_they_go_with_their_checkpoint(self, store: Store) -> None:
        writer = Writer(store)
        other = Writer(store, space="ns", head=None)
        for i in range(3):
            writer.save(*tree(str(i)), row={"id": f"c{i}"})
            other.save(row={"id": f"c{i}"})
            writer.record(write_row(f"c{i}", tree(f"w{i}")[:1]), write_row(f"c{i}", idx=-1, space="ns"), objects=tree(f"w{i}"))
        writer.record(write_row("never came"))
        told = store.prune("task", [1], dry_run=True)
        assert len(rows_of(store)) == 4
        pruned = store.prune("task", [1])
        assert pruned == told
        assert (pruned.seqs, pruned.objects) == ((1,), len(reached(store, [*tree("0"), *tree("w0")])))
        assert [row.checkpoint for row in rows_of(store)] == ["c1", "c2", "never came"]
        assert [row.checkpoint for row in rows_of(store, "ns")] == ["c0", "c1", "c2"]
        assert store.prune("task", [4], space="ns").seqs == (4,)
        assert [row.checkpoint for row in rows_of(store, "ns")] == ["c0", "c2"]

    def test_they_go_with_their_task(self, store: Store) -> None:
        writer = Writer(store)
        writer.record(write_row("c", tree("a")[:1]), objects=tree("a"))
        Writer(store, "another").record(write_row("c"))
        assert store.delete_task("task")
        assert store.writes("task") == ([], {})
        assert len(rows_of(store, task="another")) == 1
        writer.save(row={"id": "c"})
        assert rows_of(store) == []

    def test_all_spaces_at_once(self, store: Store) -> None:
        chains = {space: Writer(store, space=space) for space in ("", "ns", "n|s:1")}
        for _ in range(2):
            for chain in chains.values():
                chain.save(*tree(chain.space))
        fork = Writer(store, space="ns", branch="side")
        fork.save(row={"parent_seq": 2})
        places = [("", "main"), ("ns", "main"), ("ns", "side"), ("n|s:1", "main")]
        assert [(b.space, b.name) for b in store.branches("task", None)] == places
        rows = store.headers("task", space=None)
        assert [row.seq for row in rows] == [7, 6, 5, 4, 3, 2, 1]
        assert [row.space for row in rows] == ["ns", "n|s:1", "ns", "", "n|s:1", "ns", ""]
        assert [row.seq for row in store.headers("task", space=None, before=6, limit=2)] == [5, 4]
        assert [row.seq for row in store.headers("task", space=None, branch="side")] == [7]
        for space in (None, "", "ns"):
            whole = store.headers("task", space=space, roots=True, limit=3)
            assert [replace(row, root=b"", refs=b"") for row in whole] == store.headers("task", space=space, limit=3)
            for row in whole:
                found = store.read("task", space=row.space, seq=row.seq)
                assert found is not None
                assert found[0] == row
        chains[""].record(write_row("c"), write_row("d", writer="x", space="ns"), write_row("b", writer="x"))
        keys = [("", "b", "x"), ("", "c", "w"), ("ns", "d", "x")]
        assert [r.key[:3] for r in store.writes("task", space=None)[0]] == keys
        assert [r.key[:3] for r in store.writes("task", space=None, writer="x", bodies=False)[0]] == [keys[0], keys[2]]
        assert [r.key[:3] for r in store.writes("task", writer="x", checkpoints=["b", "c"])[0]] == [keys[0]]

    # -- branches

    def test_a_branch_is_set_back(self, store: Store) -> None:
        writer = Writer(store)
        heads = [writer.save(*tree(str(i)), row={"step": i, "id": f"c{i}"}).head for i in range(3)]
        assert heads[2] is not None
        done = store.commit(moves(store, BranchWrite(name="main", expect=heads[2], to=heads[0])))
        assert (done.seq, done.existed) == (None, False)
        (branch,) = store.branches("task")
        assert (branch.name, branch.head, branch.line) == ("main", heads[0], 1)
        row, found = store.task("task"), store.read("task")
        assert row is not None
        assert found is not None
        assert (row.head, row.step, row.checkpoints) == (heads[0], 0, 3)
        assert found[0].id == "c0"
        assert store.prune("task", [1, 2, 3]).seqs == (2, 3)
        writer.head = heads[0]
        assert writer.save().seq == 4

    def test_a_branch_is_dropped(self, store: Store) -> None:
        writer = Writer(store)
        writer.save()
        side = Writer(store, branch="side", head=None)
        side.save(row={"parent_seq": 1}, patch=TaskPatch(branch="side"))
        spare = Writer(store, branch="main", space="ns")
        spare.save()
        assert writer.head is not None
        assert side.head is not None
        assert spare.head is not None
        refused(store, moves(store, BranchWrite(name="side", expect=side.head, to=None)), UsageError)
        store.commit(moves(store, BranchWrite(name="side", expect=side.head, to=None), patch=TaskPatch(branch="main")))
        assert [b.name for b in store.branches("task")] == ["main"]
        assert store.prune("task", [1, 2]).seqs == (2,)
        store.commit(moves(store, BranchWrite(name="main", expect=writer.head, to=None)))
        assert [b.space for b in store.branches("task", None)] == ["ns"]
        store.commit(moves(store, BranchWrite(space="ns", name="main", expect=spare.head, to=None)))
        assert store.branches("task", "ns") == []
        assert store.prune("task", [3], space="ns").seqs == (3,)
        row = store.task("task")
        assert row is not None
        assert (row.head, row.step, store.read("task"), store.branches("task")) == (None, 0, None, [])
        assert store.prune("task", [1]).seqs == (1,)
        writer.head = None
        assert writer.save().seq == 4

    def test_a_branch_that_moved_is_a_conflict(self, store: Store) -> None:
        writer = Writer(store)
        first, second = writer.save().head, writer.save().head
        assert first is not None
        assert second is not None
        for move in (
            BranchWrite(name="main", expect=first, to=None),
            BranchWrite(name="main", expect=Head(2, "another"), to=first),
            BranchWrite(name="none", expect=second, to=first),
            BranchWrite(space="ns", name="main", expect=second, to=first),
        ):
            refused(store, moves(store, move), Conflict)
        elsewhere = Writer(store, space="ns").save().head
        for to in (Head(9, "c"), Head(1, "another"), elsewhere):
            refused(store, moves(store, BranchWrite(name="main", expect=second, to=to)), NotFound)
        refused(store, Commit(task="none", id=new_id(), branches=(BranchWrite(name="main", expect=second, to=None),)), NotFound)

    def test_branches_move_with_all_of_a_commit_or_not_at_all(self, store: Store) -> None:
        writer = Writer(store)
        first, second = writer.save().head, writer.save().head
        side = Writer(store, branch="side")
        side.save(row={"parent_seq": 1})
        assert first is not None
        assert second is not None
        assert side.head is not None
        good = BranchWrite(name="main", expect=second, to=first)
        refused(store, moves(store, good, BranchWrite(name="side", expect=second, to=None), writes=(write_row("c"),)), Conflict)
        store.commit(moves(store, good, BranchWrite(name="side", expect=side.head, to=None), writes=(write_row("c"),)))
        assert [(b.name, b.head) for b in store.branches("task")] == [("main", first)]
        assert len(rows_of(store)) == 1

    def test_branches_are_not_moved_under_a_live_run(self, store: Store) -> None:
        writer = Writer(store)
        first, second = writer.save().head, writer.save().head
        assert second is not None
        move = moves(store, BranchWrite(name="main", expect=second, to=first))
        grant = store.acquire("task", b"me")
        refused(store, move, LeaseHeld)
        store.commit(replace(move, guard=grant.guard))
        (branch,) = store.branches("task")
        assert branch.head == first

    def test_what_is_counted_follows_the_branch(self, store: Store) -> None:
        writer = Writer(store)
        first = writer.save(row={"step": 0}).head
        writer.write(call_row(1, step=0, status="in_doubt"), pause_row(1, step=0))
        second = writer.save(row={"step": 1}).head
        assert second is not None
        row = store.task("task")
        assert row is not None
        assert (row.in_doubt, row.open_pauses, row.step) == (0, 0, 1)
        store.commit(moves(store, BranchWrite(name="main", expect=second, to=first)))
        row = store.task("task")
        assert row is not None
        assert (row.in_doubt, row.open_pauses, row.step) == (1, 1, 0)

    @pytest.mark.parametrize("times", [40])
    def test_many_writers_of_one_checkpoint(self, store: Store, times: int) -> None:
        writer = Writer(store)
        for i in range(times):
            writer.record(write_row("c", writer=f"w{i % 20:02}", data=b"%d" % i))
        assert [(row.writer, row.data) for row in rows_of(store)] == [(f"w{i:02}", b"%d" % i) for i in range(20)]

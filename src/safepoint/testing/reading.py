"""Reading: exact, complete, and separate by task, space, branch and line."""

from __future__ import annotations

from typing import Any, cast

import pytest

from safepoint.model import new_id
from safepoint.rows import CallWrite, Commit, TaskPatch, replace
from safepoint.stores.base import Store
from safepoint.testing.build import EVERY_BYTE, Writer, call_row, dump, needs_chunks, obj, reached, tree

HOSTILE_IDS = [
    "'; DROP TABLE tasks; --",
    'double "quotes"',
    "100%",
    "a_c",
    "abc",
    "ABC",
    "\N{PILE OF POO}",
    "\N{LATIN SMALL LETTER E WITH ACUTE}",
    "e\N{COMBINING ACUTE ACCENT}",
    "\uffff",
    "\U0001f600",
    "x" * 512,
    "\N{PILE OF POO}" * 512,
    "line\nbreak",
    "cr\rlf\r\n",
    "tab\tand\x01\x7f\x1b[0m",
    "../../etc/passwd",
    "/abs",
    "a/b",
    "a\\b",
    "a:b",
    "a:",
    "CON",
    "nul.json",
    ".",
    "..",
    "~",
    "{x}",
    "}x{",
    "*?[a-z]",
    " leading",
    "trailing ",
    "a",
    "a ",
    "A",
    "0",
    "None",
    "null",
    "1e3",
    "\N{ZERO WIDTH SPACE}",
    "\N{RIGHT-TO-LEFT OVERRIDE}abc",
]


class ReadTests:
    def test_what_is_absent_is_none(self, store: Store) -> None:
        assert store.task("task") is None
        assert store.tasks() == []
        assert store.lease("task") is None
        assert [store.branches("task"), store.headers("task"), store.pauses("task")] == [[], [], []]
        assert store.calls("task") == ([], {})
        selectors: list[dict[str, Any]] = [{}, {"seq": 1}, {"branch": "main"}, {"id": "x"}, {"space": "ns"}]
        for selector in selectors:
            assert store.read("task", **selector) is None
        Writer(store).save(row={"id": "x"})
        selectors = [
            {"seq": 2},
            {"seq": 0},
            {"seq": -1},
            {"branch": "other"},
            {"id": "y"},
            {"space": "ns"},
            {"space": "ns", "seq": 1},
            {"space": "ns", "id": "x"},
            {"space": "ns", "branch": "main"},
        ]
        for selector in selectors:
            assert store.read("task", **selector) is None, selector
        assert store.read("TASK") is None

    def test_a_task_without_a_checkpoint_has_no_head(self, store: Store) -> None:
        store.acquire("task", b"me")
        row = store.task("task")
        assert row is not None
        assert (row.head, row.checkpoints, row.branch) == (None, 0, "main")
        assert store.read("task") is None
        assert store.branches("task") == []

    def test_a_checkpoint_is_found_by_seq_branch_and_id(self, store: Store) -> None:
        main, side = Writer(store), Writer(store, branch="side")
        main.save(*tree("a"), row={"id": "one"})
        side.save(*tree("b"), row={"id": "two", "parent_seq": 1})
        main.save(*tree("c"), row={"id": "three"})
        found = [
            store.read("task"),
            store.read("task", branch="main"),
            store.read("task", branch="side"),
            store.read("task", seq=1),
            store.read("task", id="two"),
        ]
        assert [f and f[0].seq for f in found] == [3, 3, 2, 1, 2]

    def test_the_objects_are_all_that_is_reached_and_no_more(self, store: Store) -> None:
        needs_chunks(store)
        leaf = obj(EVERY_BYTE)
        shared = obj(b"shared", leaf)
        left, right = obj(b"left", shared, leaf), obj(b"right", shared, shared)
        stray = obj(b"sent, and reached by nothing")
        deep = [obj(b"0")]
        for depth in range(1, 60):
            deep.append(obj(b"%d" % depth, deep[-1]))
        writer = Writer(store)
        writer.save(left, right, objects=[left, right, shared, leaf, stray])
        writer.save(deep[-1], objects=deep)
        one, two = store.read("task", seq=1), store.read("task", seq=2)
        assert one is not None
        assert two is not None
        assert one[1] == {o.name: o for o in (left, right, shared, leaf)}
        assert two[1] == {o.name: o for o in deep}

    def test_two_tasks_share_no_objects(self, store: Store) -> None:
        one, two = Writer(store, "one"), Writer(store, "two")
        one.save(*tree("same"))
        two.save(*tree("same"))
        store.delete_task("one")
        found = store.read("two")
        assert found is not None
        assert found[1] == reached(store, tree("same"))

    def test_many_and_big_objects_come_back(self, store: Store) -> None:
        needs_chunks(store)
        leaves = [obj(b"%d" % i + b"\0" * (i % 7)) for i in range(3000)]
        pages = [obj(b"page %d" % i, *leaves[i : i + 500]) for i in range(0, 3000, 500)]
        big = obj(EVERY_BYTE * (20 * 2**20 // 256))
        Writer(store).save(*pages, big, objects=[*leaves, *pages, big])
        found = store.read("task")
        assert found is not None
        assert found[1] == {o.name: o for o in (*leaves, *pages, big)}

    def test_what_is_handed_out_is_not_the_stores_own(self, store: Store) -> None:
        writer = Writer(store)
        writer.save(*tree("a"))
        writer.call()
        before = dump(store)
        found = store.read("task")
        assert found is not None
        for mapping in (found[1], store.calls("task")[1]):
            if isinstance(mapping, dict):
                mapping.clear()
        for rows in (store.headers("task"), store.tasks(), store.branches("task"), store.calls("task")[0]):
            cast("list[Any]", rows).clear()
        assert dump(store) == before

    # -- listings

    def test_headers_come_newest_first_without_bodies(self, store: Store) -> None:
        main, side, inner = Writer(store), Writer(store, branch="side"), Writer(store, space="ns")
        main.save(*tree("a"), row={"metadata": b"m", "metrics": b"x", "label": "l"})
        side.save(row={"parent_seq": 1})
        inner.save()
        for _ in range(4):
            main.save()

        def seqs(**selectors: Any) -> list[int]:
            return [row.seq for row in store.headers("task", **selectors)]

        assert seqs() == [7, 6, 5, 4, 2, 1]
        assert seqs(space="ns") == [3]
        assert seqs(branch="main") == [7, 6, 5, 4, 1]
        assert seqs(branch="side") == [2]
        assert seqs(branch="none") == []
        assert seqs(limit=2) == [7, 6]
        assert seqs(before=6) == [5, 4, 2, 1]
        assert seqs(before=6, limit=3) == [5, 4, 2]
        assert seqs(branch="main", before=4, limit=5) == [1]
        assert seqs(before=1) == []
        rows = store.headers("task")
        for row in rows:
            assert (row.root, row.refs) == (b"", b"")
            row.check("task", "header")
        full = store.read("task", seq=1)
        assert full is not None
        assert rows[-1] == replace(full[0], root=b"", refs=b"")

    def test_calls_are_filtered_and_come_by_number(self, store: Store) -> None:
        writer = Writer(store)
        writer.save()
        shared, only = tree("shared"), tree("only")
        places = [(1, 0), (2, 0), (1, 1), (1, 2), (2, 2)]
        rows = [
            writer.write(call_row(1, line=line, step=step, args_refs=shared[0].name), objects=shared).calls[0]
            for line, step in places
        ]
        rows[3] = writer.write(replace(rows[3], result_refs=only[0].name), objects=only).calls[0]

        def nos(**selectors: Any) -> list[int]:
            return [row.no for row in store.calls("task", **selectors)[0]]

        n = [row.no for row in rows]
        assert n == sorted(n)
        assert nos() == n
        assert nos(line=1) == [n[0], n[2], n[3]]
        assert nos(from_step=1) == n[2:]
        assert nos(line=2, from_step=1) == [n[4]]
        assert nos(nos=[n[3], n[1], 999]) == [n[1], n[3]]
        assert nos(nos=[]) == []
        assert nos(nos=iter([n[0]])) == [n[0]]
        assert nos(limit=2) == n[3:]
        assert nos(line=1, limit=2) == [n[2], n[3]]
        assert nos(limit=99) == n
        assert store.calls("task")[1] == reached(store, [*shared, *only])
        assert store.calls("task", line=2)[1] == reached(store, shared)
        bare, bodies = store.calls("task", bodies=False)
        assert not bodies
        assert [row.no for row in bare] == n
        for row in store.calls("task")[0]:
            row.check("task", "call")

    def test_many_numbers_may_be_asked_for(self, store: Store) -> None:
        writer = Writer(store)
        writer.save()
        writes = tuple(CallWrite(call_row(1), "began") for _ in range(1200))
        done = store.commit(Commit(task="task", id=new_id(), calls=writes))
        assert store.calls("task", nos=range(10_000))[0] == list(done.calls)

    def test_pauses_come_by_number(self, store: Store) -> None:
        writer = Writer(store)
        writer.save()
        rows = [writer.pause(name=name) for name in "cab"]
        rows[0] = writer.write(replace(rows[0], status="answered", answer=EVERY_BYTE), anyway=True).pauses[0]
        assert store.pauses("task") == rows

    # -- names

    def test_ids_come_back_exactly_and_in_code_point_order(self, store: Store) -> None:
        for name in HOSTILE_IDS:
            assert Writer(store, name).save().seq == 1, name
        assert [row.task for row in store.tasks()] == sorted(HOSTILE_IDS)
        for name in HOSTILE_IDS:
            row = store.task(name)
            assert row is not None
            assert (row.task, row.checkpoints) == (name, 1)
            assert store.read(name) is not None
            assert store.acquire(name, b"me").guard.fence == 1

    def test_tasks_are_paged(self, store: Store) -> None:
        for name in HOSTILE_IDS:
            Writer(store, name).save()
        seen: list[str] = []
        after = None
        while page := store.tasks(after=after, limit=7):
            assert len(page) <= 7
            assert after is None or page[0].task > after
            seen += [row.task for row in page]
            after = seen[-1]
        assert seen == sorted(HOSTILE_IDS)
        assert [row.task for row in store.tasks(after="a", limit=2)] == sorted(t for t in HOSTILE_IDS if t > "a")[:2]
        assert store.tasks(after="\U0010ffff") == []

    def test_branches_spaces_and_ids_may_have_any_name(self, store: Store) -> None:
        for name in HOSTILE_IDS:
            Writer(store, branch=name).save(row={"id": f"b{name}"}, patch=TaskPatch(branch=name))
            Writer(store, space=name).save(row={"id": name})
        assert sorted(row.name for row in store.branches("task")) == sorted(HOSTILE_IDS)
        for name in HOSTILE_IDS:
            found = store.read("task", branch=name)
            assert found is not None
            assert (found[0].branch, found[0].id) == (name, f"b{name}")
            assert store.headers("task", branch=name) == [replace(found[0], root=b"", refs=b"")]
            inner = store.read("task", space=name, id=name)
            assert inner is not None
            assert (inner[0].space, inner[0].id) == (name, name)
            assert [row.space for row in store.branches("task", name)] == [name]
        row = store.task("task")
        assert row is not None
        assert row.branch == HOSTILE_IDS[-1]

    @pytest.mark.parametrize("name", ["t", "\N{PILE OF POO}"])
    def test_listed_rows_are_those_of_the_single_reads(self, store: Store, name: str) -> None:
        writer = Writer(store, name)
        writer.save(*tree("a"))
        writer.write(call_row(1, status="in_doubt"), patch=TaskPatch(status="waiting", agent="x", input=EVERY_BYTE))
        writer.pause()
        assert store.tasks() == [store.task(name)]

    def test_spaces_are_separate(self, store: Store) -> None:
        outer, inner = Writer(store), Writer(store, space="ns")
        outer.save(*tree("outer"))
        inner.save(*tree("inner"))
        inner.save(*tree("inner"))
        row = store.task("task")
        assert row is not None
        assert (row.head, row.checkpoints) == (outer.head, 3)
        assert [b.head for b in store.branches("task")] == [outer.head]
        assert [b.head for b in store.branches("task", "ns")] == [inner.head]
        found = store.read("task", space="ns")
        assert found is not None
        assert (found[0].seq, found[0].space) == (3, "ns")

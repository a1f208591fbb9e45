"""A task as a whole: everything of it comes out, and goes in again as it was, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from safepoint.errors import Conflict, LeaseHeld, UsageError
from safepoint.model import Obj, new_id
from safepoint.rows import (
    Aside,
    BranchRow,
    BranchWrite,
    CallRow,
    CheckpointRow,
    Commit,
    Head,
    Image,
    Lost,
    Numbers,
    Part,
    PauseRow,
    TaskPatch,
    TaskRow,
    WriteRow,
    replace,
)
from safepoint.stores.base import Store
from safepoint.testing.build import Writer, dump, obj, tree, write_row

__all__ = ["WholeTests", "image_of"]


def image_of(store: Store, task: str) -> Image:
    """A task as ``write_task`` takes it; nothing of it may be lost."""
    parts: dict[type, list[Any]] = {}
    for part in store.walk(task):
        parts.setdefault(type(part), []).append(part)
    assert Lost not in parts, parts[Lost]
    (row,), (numbers,) = parts[TaskRow], parts[Numbers]
    return Image(
        row=row,
        numbers=numbers,
        branches=tuple(parts.get(BranchRow, ())),
        checkpoints=tuple(parts.get(CheckpointRow, ())),
        calls=tuple(parts.get(CallRow, ())),
        pauses=tuple(parts.get(PauseRow, ())),
        writes=tuple(parts.get(WriteRow, ())),
        objects=tuple(parts.get(Obj, ())),
    )


def _grown(store: Store, task: str = "task") -> Writer:
    """A task with branches, a leaf, another space, calls, pauses, a pin, writes, and a branch that was set back and one that was dropped."""
    chunked = store.chunked
    main = Writer(store, task)
    main.save(*(tree("a") if chunked else ()), patch=TaskPatch(agent="mail", input=b"do it", reason="why not"))
    args = obj(b"the arguments")
    main.write(
        *_calls(main.seq, args if chunked else None),
        objects=(args,) if chunked else (),
        stands_on=main.head,
    )
    main.pause(name="approve")
    main.save(*((*tree("a"), *tree("b")) if chunked else ()))
    main.leaf(*(tree("leaf") if chunked else ()))
    Writer(store, task, branch="side").save(*(tree("a") if chunked else ()), row={"parent_seq": 1})
    Writer(store, task, space="ns").save(*(tree("n") if chunked else ()))
    main.save()
    store.pin(task, 2, True)
    rows = [
        write_row(checkpoint, tree("w")[:1] if chunked else (), writer=writer, idx=idx, space=space, path="p")
        for space, checkpoint, writer, idx in KEYS[::-1]
    ]
    main.record(*rows, objects=tree("w"))
    first = main.store.headers(task)[-1]
    to = Head(first.seq, first.id)
    back, gone = (Writer(store, task, branch=name) for name in ("back", "gone"))
    for writer in (back, gone):
        writer.save(row={"parent_seq": 1})
        assert writer.head is not None
        move = BranchWrite(name=writer.branch, expect=writer.head, to=to if writer is back else None)
        store.commit(Commit(task=task, id=new_id(), branches=(move,)))
    return main


KEYS = [("", "c", "v", -1), ("", "c", "w", 0), ("", "c", "w", 7), ("", "d", "v", 0), ("ns", "a", "\N{SNOWMAN}", 0)]


def _calls(base: int, args: Obj | None) -> list[CallRow]:
    from safepoint.testing.build import call_row

    refs = {} if args is None else {"args": b"root", "args_refs": args.name}
    return [call_row(base, **refs), call_row(base, tool="look", effect="read", op_key=b"k", model=b"m", reason="because")]


class WholeTests:
    def test_a_walk_gives_everything_of_a_task_once_and_in_order(self, store: Store) -> None:
        main = _grown(store)
        _grown(store, "task2")
        orphan = [obj(b"nothing reaches this")] if store.chunked else []
        main.save(objects=orphan)
        parts = list(store.walk("task"))
        kinds = [type(part) for part in parts]
        assert kinds[:2] == [Numbers, TaskRow]
        order = [BranchRow, CheckpointRow, CallRow, PauseRow, WriteRow, Obj]
        assert kinds[2:] == sorted(kinds[2:], key=order.index)
        assert parts[1] == store.task("task")
        assert parts[0] == Numbers(seq=8 + 1, call=2, pause=1, line=5, position=2)
        rows = [part for part in parts if isinstance(part, CheckpointRow)]
        assert [row.seq for row in rows] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
        assert [row.space for row in rows] == ["", "", "", "", "ns", "", "", "", ""]
        assert [row.pinned for row in rows] == [False, True, *[False] * 7]
        for row in rows:
            found = store.read("task", space=row.space, seq=row.seq)
            assert found is not None
            assert found[0] == row
            row.check("task", "")
        assert [part for part in parts if isinstance(part, CallRow)] == store.calls("task")[0]
        assert [part for part in parts if isinstance(part, PauseRow)] == store.pauses("task")
        places = [("", "back"), ("", "main"), ("", "side"), ("ns", "main")]
        assert [(p.space, p.name) for p in parts if isinstance(p, BranchRow)] == places
        writes = [part for part in parts if isinstance(part, WriteRow)]
        assert [row.key for row in writes] == KEYS
        assert sorted(writes, key=lambda row: row.key) == sorted(store.writes("task", space=None)[0], key=lambda row: row.key)
        objects = [part for part in parts if isinstance(part, Obj)]
        assert objects == sorted(objects)
        if store.chunked:
            sent = [*tree("a"), *tree("b"), *tree("leaf"), *tree("n"), *tree("w"), obj(b"the arguments"), *orphan]
            assert {o.name: o for o in objects} == {o.name: o for o in sent}
        else:
            assert objects == []

    def test_a_walk_of_what_is_not_there_gives_nothing(self, store: Store) -> None:
        Writer(store).save()
        assert list(store.walk("tas")) == []
        assert list(store.walk("task2")) == []

    def test_the_names_of_all_tasks_are_walked(self, store: Store) -> None:
        names = [f"task-{i:03}" for i in range(30)]
        for name in names:
            Writer(store, name).save()
        assert list(store.walk_tasks()) == names
        assert store.strays() == []
        assert list(store.structure()) == []

    def test_a_walk_holds_up_no_writer_and_no_reader(self, store: Store) -> None:
        main = _grown(store)
        walk = store.walk("task")
        seen = []
        for i, part in enumerate(walk):
            seen.append(part)
            main.save(*(tree(f"while {i}") if store.chunked else ()))
            assert store.task("task") is not None
        assert {row.seq for row in seen if isinstance(row, CheckpointRow)} >= {1, 2, 3, 4, 5, 6}

    def test_a_walk_given_up_leaves_nothing_behind(self, store: Store) -> None:
        main = _grown(store)
        walk = store.walk("task")
        next(walk)
        del walk
        main.save()
        assert store.delete_task("task")

    def test_a_whole_task_goes_in_as_it_came_out(self, store: Store) -> None:
        main = _grown(store)
        image = image_of(store, "task")
        before = dump(store, ["task"])
        assert store.delete_task("task")
        assert store.write_task(image) is True
        after = dump(store, ["task"])
        lease = before["task"].pop("lease"), after["task"].pop("lease")
        assert lease == (None, None)
        assert after == before
        assert image_of(store, "task") == image
        assert list(store.structure()) == []
        # It goes on as it would have: no number comes a second time, and the heads are where they were.
        done = main.save(*(tree("more") if store.chunked else ()))
        assert done.seq == image.numbers.seq + 1
        assert main.call().no == image.numbers.call + 1
        assert main.pause(name="again").no == image.numbers.pause + 1
        assert store.acquire("task", b"me").guard.fence >= 1

    def test_a_whole_task_goes_in_under_another_name(self, store: Store) -> None:
        _grown(store)
        image = image_of(store, "task")
        assert store.write_task(replace(image, row=replace(image.row, task="copy"))) is True
        for part in store.walk("copy"):
            if isinstance(part, CheckpointRow | CallRow | PauseRow | WriteRow):
                part.check("copy", str(part))
        assert [row.task for row in store.tasks()] == ["copy", "task"]
        found = store.read("copy")
        assert found is not None
        assert found[0].seq == 6
        assert [row.key for row in store.writes("copy", space=None, bodies=False)[0]] == KEYS
        assert image_of(store, "task") == image

    def test_fences_go_on_where_those_of_the_original_ended(self, store: Store) -> None:
        """A receiver that refuses stale fences knows the task by its name, in whatever store it is."""
        main = _grown(store)
        main.call(fence=7)
        image = image_of(store, "task")
        assert store.delete_task("task")
        for task, fence, least in (("task", 0, 7), ("copy", 12, 12)):
            assert store.write_task(replace(image, row=replace(image.row, task=task), fence=fence))
            assert store.acquire(task, b"me").guard.fence > least

    def test_writing_a_whole_task_twice_is_writing_it_once(self, store: Store) -> None:
        _grown(store)
        image = image_of(store, "task")
        assert store.write_task(image) is False
        copy = replace(image, row=replace(image.row, task="copy"))
        assert store.write_task(copy) is True
        assert store.write_task(copy) is False
        assert image_of(store, "task") == image

    @pytest.mark.parametrize(
        "change",
        [
            lambda i: replace(i, checkpoints=i.checkpoints[:-1]),
            lambda i: replace(i, checkpoints=(*i.checkpoints[:-1], replace(i.checkpoints[-1], label="other"))),
            lambda i: replace(i, calls=i.calls[:1]),
            lambda i: replace(i, pauses=()),
            lambda i: replace(i, writes=i.writes[1:]),
            lambda i: replace(i, writes=(replace(i.writes[0], path="other"), *i.writes[1:])),
            lambda i: replace(i, branches=(BranchRow("", "main", Head(2, i.checkpoints[1].id), 1), *i.branches[1:])),
        ],
    )
    def test_another_task_of_that_name_is_left_as_it_is(self, store: Store, change: Callable[[Image], Image]) -> None:
        _grown(store)
        image = image_of(store, "task")
        before = dump(store)
        with pytest.raises(Conflict) as caught:
            store.write_task(change(image))
        assert caught.value.details["task"] == "task"
        assert dump(store) == before
        assert list(store.structure()) == []

    def test_a_task_takes_the_place_of_another_moment_of_itself(self, store: Store) -> None:
        main = _grown(store)
        old, grant = image_of(store, "task"), store.acquire("task", b"me")
        main.guard = grant.guard
        main.save(*(tree("later") if store.chunked else ()))
        main.call()
        main.pause(name="later")
        main.record(write_row("later"), write_row("c", writer="v", idx=-1, data=b"later"))
        store.release("task", grant)
        new = image_of(store, "task")
        older, newer = (replace(image, row=replace(image.row, task="copy")) for image in (old, new))
        assert store.write_task(older) is True
        assert store.write_task(older, over=newer) is False
        assert store.write_task(newer, over=image_of(store, "copy")) is True
        there = image_of(store, "copy")
        assert [(r.seq, r.id, r.root) for r in there.checkpoints] == [(r.seq, r.id, r.root) for r in new.checkpoints]
        assert (there.objects, there.branches, there.numbers) == (new.objects, new.branches, new.numbers)
        assert [(r.key, r.data) for r in there.writes] == [(r.key, r.data) for r in new.writes]
        assert dump(store, ["copy"])["copy"]["headers"][""][0].seq == main.seq
        # In its own place, and back: fewer rows, and yet no number comes a second time, nor a fence.
        assert store.write_task(old, over=new) is True
        assert list(store.structure()) == []
        assert store.strays() == []
        back = image_of(store, "task")
        assert replace(back, row=old.row, numbers=old.numbers) == old
        assert back.numbers == new.numbers
        assert store.read("task", seq=main.seq) is None
        assert store.acquire("task", b"me").guard.fence > grant.guard.fence

    @pytest.mark.parametrize("ended", ["released", "died"])
    def test_fences_of_what_takes_a_place_go_on_too(self, store: Store, ended: str) -> None:
        # A receiver has seen those of the copy: lower ones would be refused.
        _grown(store)
        grant = store.acquire("task", b"me")
        if ended == "released":
            store.release("task", grant)
        else:
            store.abandon("task", grant)
        seen = image_of(store, "task")
        assert store.write_task(replace(seen, calls=(), fence=50), over=seen) is True
        second = store.acquire("task", b"me")
        assert second.guard.fence > 50
        assert second.previous == {"released": "released", "died": "dead"}[ended]

    def test_a_task_takes_the_place_only_of_what_was_seen(self, store: Store) -> None:
        _grown(store)
        copy = image_of(store, "task")
        copy = replace(copy, row=replace(copy.row, task="copy"))
        assert store.write_task(copy)
        seen = image_of(store, "copy")
        later = replace(seen, checkpoints=(*seen.checkpoints, replace(seen.checkpoints[-1], seq=11, id="eleven")))
        Writer(store, "copy", head=next(b.head for b in seen.branches if b.name == "main")).save()
        before = dump(store)
        with pytest.raises(Conflict):
            store.write_task(later, over=seen)
        assert dump(store) == before
        grant = store.acquire("copy", b"me")
        with pytest.raises(LeaseHeld):
            store.write_task(later, over=image_of(store, "copy"))
        store.release("copy", grant)
        assert list(store.structure()) == []
        # What has gone is in nobody's way.
        assert store.delete_task("copy")
        assert store.write_task(later, over=seen) is True

    @pytest.mark.parametrize("what", ["writes", "a special write", "a branch set back", "a branch dropped", "a patch"])
    def test_a_task_is_mended_only_as_it_was_seen(self, store: Store, what: str) -> None:
        """None of these gives out a number by which it would be seen."""
        main = _grown(store)
        assert main.head is not None
        first = store.headers("task")[-1]
        side = next(b for b in store.branches("task") if b.name == "side")
        commits: dict[str, dict[str, Any]] = {
            "writes": {"writes": (write_row("c", writer="late"),)},
            "a special write": {"writes": (write_row("c", writer="v", idx=-1, path="other"),)},
            "a branch set back": {"branches": (BranchWrite(name="main", expect=main.head, to=Head(first.seq, first.id)),)},
            "a branch dropped": {"branches": (BranchWrite(name="side", expect=side.head, to=None),)},
            "a patch": {"patch": TaskPatch(reason="another")},
        }
        if type(store).set_aside is Store.set_aside:
            with pytest.raises(UsageError):
                store.set_aside(image_of(store, "task"), [], (), ())
            return
        seen = image_of(store, "task")
        aside = Aside("write", KEYS[1], "it is damaged")
        store.commit(Commit(task="task", id=new_id(), **commits[what]))
        before = dump(store)
        with pytest.raises(Conflict):
            store.set_aside(seen, [aside], (), ())
        assert dump(store) == before
        seen = image_of(store, "task")
        left = replace(seen, writes=tuple(row for row in seen.writes if row.key != aside.key))
        store.set_aside(left, [aside], (), ())
        now = image_of(store, "task")
        assert replace(now, row=left.row, objects=left.objects) == left
        assert list(store.structure()) == []

    def test_a_big_task_goes_in_whole(self, store: Store) -> None:
        big = [obj(bytes([i]) * 300_000) for i in range(20)] if store.chunked else []
        fields = {} if store.chunked else {"root": bytes(3_000_000)}
        main = Writer(store)
        main.save(*big, row=fields)
        for i in range(50):
            main.save(*big, objects=(), row={**fields, "step": i} if i < 3 else {"step": i, "root": bytes([i]) * 50_000})
        image = image_of(store, "task")
        copy = replace(image, row=replace(image.row, task="copy"))
        assert store.write_task(copy)
        assert replace(image_of(store, "copy"), row=image.row, checkpoints=()) == replace(image, checkpoints=())
        assert [row.root for row in image_of(store, "copy").checkpoints] == [row.root for row in image.checkpoints]
        assert store.strays() == []

    def test_a_name_that_is_none_is_refused(self, store: Store) -> None:
        _grown(store)
        image = image_of(store, "task")
        with pytest.raises(UsageError):
            store.write_task(replace(image, row=replace(image.row, task=" ")))

    def test_damage_has_words_for_people(self) -> None:
        lost: Part = Lost("checkpoint 43", "somewhere", "cut off")
        assert "43" in repr(lost)

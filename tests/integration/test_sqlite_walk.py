"""A SQLite file with damaged pages is walked past them: what comes is what was, and what does not come is named."""

import random
import shutil
import time

import apsw
import pytest

from safepoint import _probe
from safepoint.errors import Conflict, Damaged, Unavailable
from safepoint.model import Obj
from safepoint.rows import BranchRow, CallRow, CheckpointRow, Lost, Numbers, PauseRow, TaskRow, WriteRow, replace
from safepoint.stores.sqlite import SQLiteStore
from safepoint.testing.build import Writer, call_row, obj, pause_row, write_row
from safepoint.testing.whole import image_of
from tests.support.scale import scale

PAGE = 8192


def opened(path):
    return SQLiteStore(path, durability="process", timeout=2)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A file in which every kind of row takes several pages, two tasks among each other, and what is in it."""
    path = tmp_path_factory.mktemp("sound") / "agent.db"
    rng = random.Random(1)
    store = opened(path)
    writers = [Writer(store, name) for name in ("one", "two")]
    for i in range(120):
        for writer in writers:
            body = [obj(rng.randbytes(rng.choice([100, 700, 20_000]))) for _ in range(2)]
            writer.save(*body, row={"step": i, "root": rng.randbytes(rng.choice([50, 600, 12_000]))})
            calls = [call_row(writer.seq, step=i, args=rng.randbytes(300)) for _ in range(3)]
            writer.write(*calls, pause_row(writer.seq, step=i, question=rng.randbytes(400)))
            writer.record(*(write_row(f"{rng.random()}", writer=f"w{k}" * 20, data=rng.randbytes(200)) for k in range(3)))
    for i in range(150):
        Writer(store, "one", branch=f"side-{i:03}" + "x" * 60).save(row={"parent_seq": 1})
    parts = {name: list(store.walk(name)) for name in ("one", "two")}
    store.close()
    return path, parts


def mark(part):
    if isinstance(part, CheckpointRow):
        return "checkpoint", part.seq
    if isinstance(part, CallRow | PauseRow):
        return "call" if isinstance(part, CallRow) else "pause", part.no
    if isinstance(part, Obj):
        return "object", part.name
    if isinstance(part, BranchRow):
        return "branch", part.name
    if isinstance(part, WriteRow):
        return "write", part.key
    return type(part).__name__, ""


def covers(lost, kind, key):
    if lost.kind != kind:
        return False
    if kind == "object":
        return lost.name in (key, b"")
    if kind == "branch":
        return True
    if kind == "write":
        return lost.key in (key, None)
    return lost.first is not None and lost.first <= key and (lost.last is None or key <= lost.last)


def judge(before, found):
    """What came is what was, in order, each once; and what did not come is covered by what is said to be lost."""
    lost = [part for part in found if isinstance(part, Lost)]
    there = [part for part in found if not isinstance(part, Lost)]
    was = {mark(part): part for part in before}
    keys = [mark(part) for part in there]
    assert len(set(keys)) == len(keys)
    assert [k for k in was if k in set(keys)] == keys
    missing = [key for key in was if key not in set(keys)]
    for kind, key in missing:
        if kind in ("TaskRow", "Numbers"):
            assert any(one.kind == "task" for one in lost), (kind, lost)
        else:
            assert any(covers(one, kind, key) for one in lost), (kind, key, lost)
    return there, was, missing, lost


@pytest.mark.scaled
def test_every_page_in_turn_is_cut_out(sound, tmp_path):
    path, parts = sound
    data = path.read_bytes()
    pages = len(data) // PAGE
    rng = random.Random(2)
    chosen = sorted(rng.sample(range(1, pages), scale(12, 60)))
    some_came = 0
    for page in chosen:
        copy = tmp_path / f"{page}.db"
        copy.write_bytes(data[: page * PAGE] + rng.choice([bytes(PAGE), rng.randbytes(PAGE)]) + data[(page + 1) * PAGE :])
        try:
            store = opened(copy)
        except Damaged:
            continue  # the list of tables, or what says which version it is
        try:
            for name, before in parts.items():
                there, was, missing, _ = judge(before, list(store.walk(name)))
                some_came += len(missing) < len(was)
                wrong = [part for part in there if part != was[mark(part)]]
                # A page of a row's overflow has no mark of its own: such rows come, and do not pass their seals and names.
                for part in wrong:
                    if isinstance(part, CheckpointRow):
                        assert part.seal == was[mark(part)].seal
                    else:
                        assert isinstance(part, Obj | CallRow | PauseRow | TaskRow | WriteRow), part
        finally:
            store.close()
            copy.unlink()
    assert some_came > len(chosen)


@pytest.mark.scaled
def test_bits_flip_anywhere(sound, tmp_path):
    path, parts = sound
    data = path.read_bytes()
    rng = random.Random(3)
    for i in range(scale(15, 120)):
        copy = tmp_path / f"{i}.db"
        changed = bytearray(data)
        for _ in range(rng.choice([1, 1, 5])):
            changed[rng.randrange(200, len(data))] ^= 1 << rng.randrange(8)
        copy.write_bytes(changed)
        try:
            store = opened(copy)
        except Damaged:
            continue
        try:
            list(store.walk_tasks())
            store.strays()
            for name, before in parts.items():
                found = list(store.walk(name))
                rows = [part for part in found if isinstance(part, CheckpointRow)]
                keys = [row.seq for row in rows]
                assert keys == sorted(set(keys))
                # All but a few come: one page has at most so many rows.
                assert len(found) > len(before) // 2 or any(isinstance(part, Lost) for part in found)
        finally:
            store.close()
            copy.unlink()


def test_a_row_of_a_task_that_was_deleted_by_hand_is_missed_and_the_rest_is_found(sound, tmp_path):
    path, parts = sound
    copy = shutil.copy(path, tmp_path / "copy.db")
    conn = apsw.Connection(str(copy))
    conn.execute("DELETE FROM sp_tasks WHERE task = 'two'")
    conn.close()
    store = opened(copy)
    first, *rest = store.walk("two")
    assert isinstance(first, Lost)
    assert first.kind == "task"
    assert first.where == "sp_tasks, row 2"
    assert rest == [part for part in parts["two"] if not isinstance(part, TaskRow | Numbers)]
    assert list(store.walk("three")) == []
    strays = store.strays()
    assert {stray.where.partition(",")[0] for stray in strays} == {
        "sp_objects", "sp_checkpoints", "sp_calls", "sp_pauses", "sp_branches", "sp_writes",
    }  # fmt: skip
    assert all(stray.first == 2 for stray in strays)
    store.close()


def test_tables_that_are_none_of_ours_are_strays(tmp_path):
    store = opened(tmp_path / "agent.db")
    conn = apsw.Connection(store.path)
    conn.execute("CREATE TABLE mine (x)")
    conn.execute("CREATE TABLE sp_more (x)")
    conn.close()
    assert [stray.where for stray in store.strays()] == ["sp_more"]
    store.close()


# -- writing


class Stop(Exception):
    pass


def grown(store):
    writer = Writer(store)
    for i in range(12):
        writer.save(obj(bytes([i]) * 300_000), objects=[obj(bytes([i]) * 300_000)])
        writer.write(call_row(writer.seq), pause_row(writer.seq))
    return image_of(store, "task")


@pytest.fixture
def stopping():
    def at(point, times=1):
        seen = []

        def hook(name):
            seen.append(name)
            if seen.count(point) >= times:
                raise Stop

        _probe.hook = hook

    yield at
    _probe.hook = None


@pytest.mark.parametrize(("point", "times"), [("write_task.staged", 1), ("write_task.staged", 3), ("write_task.before", 1)])
def test_a_task_half_written_is_not_there_and_leaves_nothing(tmp_path, stopping, point, times):
    store = opened(tmp_path / "agent.db")
    image = grown(store)
    copy = replace(image, row=replace(image.row, task="copy"))
    stopping(point, times)
    with pytest.raises(Stop):
        store.write_task(copy)
    _probe.hook = None
    assert store.task("copy") is None
    assert store.strays() == []
    conn = apsw.Connection(store.path)
    for table, where in (("sp_objects", "task != 1"), ("sp_checkpoints", "task != 1"), ("sp_stages", "true")):
        assert conn.execute(f"SELECT count(*) FROM {table} WHERE {where}").fetchall() == [(0,)]
    conn.close()
    assert store.write_task(copy)
    assert image_of(store, "copy").objects == image.objects
    store.close()


def test_somebody_else_begins_that_task_meanwhile(tmp_path):
    store = opened(tmp_path / "agent.db")
    image = grown(store)
    copy = replace(image, row=replace(image.row, task="copy"))

    def hook(name):
        if name == "write_task.staged":
            _probe.hook = None
            Writer(store, "copy").save()

    _probe.hook = hook
    with pytest.raises(Conflict):
        store.write_task(copy)
    assert len(store.headers("copy")) == 1
    assert store.strays() == []
    store.close()


def test_a_big_task_holds_up_no_small_save(tmp_path):
    store = opened(tmp_path / "agent.db")
    writer = Writer(store)
    bodies = [obj(bytes([i]) * 900_000) for i in range(40)]
    writer.save(*bodies)
    image = image_of(store, "task")
    other = Writer(store, "other")
    waits = []

    def hook(name):
        if name == "write_task.staged":
            start = time.perf_counter()
            other.save()
            waits.append(time.perf_counter() - start)

    _probe.hook = hook
    try:
        assert store.write_task(replace(image, row=replace(image.row, task="copy")))
    finally:
        _probe.hook = None
    assert len(waits) >= 20
    assert len(store.headers("other")) == len(waits)
    store.close()


def test_an_answer_that_does_not_come_is_unavailable(tmp_path):
    store = SQLiteStore(tmp_path / "agent.db", durability="process", timeout=0.2)
    Writer(store).save()
    other = apsw.Connection(store.path)
    other.execute("BEGIN EXCLUSIVE")
    image = None
    with pytest.raises(Unavailable):
        image = store.write_task(replace(image_of(store, "task"), row=TaskRow(task="copy")))
    assert image is None
    other.execute("ROLLBACK")
    other.close()
    assert isinstance(next(store.walk("task")), Numbers)
    store.close()

"""Field cases 84 (retention: references and unreadable items) and 98 (big media); invariant 6. See docs/field-cases.md."""

import logging
import random
from datetime import timedelta
from pathlib import Path

import apsw
import pytest

import safepoint
from safepoint import Damaged, Retention, State, Unavailable
from safepoint.model import Obj
from safepoint.rows import replace
from tests.support.scale import scale


@pytest.fixture
def folder(url, tmp_path):
    return tmp_path


def spoil(url, cp, folder, how, seq):
    """Damage a checkpoint of task ``t`` behind the store's back; what is opened after it is returned."""
    kind = url.partition(":")[0]
    if kind == "memory":
        return _spoil_memory(cp, how, seq)
    cp.close()
    (_spoil_sqlite if kind == "sqlite" else _spoil_file)(folder, how, seq)
    return safepoint.open(url, retention=cp.retention)


def _spoil_memory(cp, how, seq):
    task = cp.store._data.tasks["t"]
    row = task.checkpoints[seq]
    if how == "row":
        task.checkpoints[seq] = replace(row, created_at=0, kind="failure")
    else:
        name = _own(task.checkpoints, row, seq, lambda refs: [task.objects[n] for n in _cut(refs) if n in task.objects])
        if how == "missing":
            del task.objects[name]
        else:
            obj = task.objects[name]
            task.objects[name] = obj._replace(data=obj.data[:-1] + b"?")
    return cp


def _cut(refs):
    return [refs[i : i + 16] for i in range(0, len(refs), 16)]


def _own(rows, row, seq, fetch):
    """An object that only this checkpoint has."""

    def closure(refs):
        found, todo = set(), [refs]
        while todo:
            for obj in fetch(todo.pop()):
                if obj.name not in found:
                    found.add(obj.name)
                    todo.append(obj.refs)
        return found

    others = set().union(*(closure(r.refs) for s, r in rows.items() if s != seq))
    return max(closure(row.refs) - others)


def _spoil_sqlite(folder, how, seq):
    conn = apsw.Connection(str(folder / "agent.db"))
    try:
        if how == "row":
            conn.execute("UPDATE sp_checkpoints SET created_at = 0, kind = 'failure' WHERE seq = ?", (seq,))
        else:
            from safepoint.stores.sqlite_rows import CHECKPOINT, checkpoint

            rows = {r[0]: checkpoint(r) for r in conn.execute(f"SELECT {', '.join(CHECKPOINT)} FROM sp_checkpoints")}

            def fetch(refs):
                marks = ", ".join("?" * len(_cut(refs)))
                return [
                    Obj(*r)
                    for r in conn.execute(f"SELECT name, refs, data FROM sp_objects WHERE name IN ({marks})", _cut(refs))
                ]

            name = _own(rows, rows[seq], seq, fetch)
            if how == "missing":
                conn.execute("DELETE FROM sp_objects WHERE name = ?", (name,))
            else:
                conn.execute(
                    "UPDATE sp_objects SET data = CAST(substr(data, 1, length(data) - 1) || '?' AS BLOB) WHERE name = ?",
                    (name,),
                )
    finally:
        conn.close()


def _spoil_file(folder, how, seq):
    (path,) = (p for p in Path(folder).rglob(f"{seq}.json") if p.is_file())
    text = path.read_text()
    if how == "row":
        path.write_text(text.replace("first", "FIRST"))  # edited by hand
    elif how == "missing":
        path.unlink()
        path.mkdir()  # there, and not to be read: Unavailable, and not Damaged
    else:
        path.write_text(text[: len(text) // 2])


def saved(cp, n, *, start=1):
    state = cp.load_latest("t") or State("t")
    for i in range(start, start + n):
        state.step = i
        # Long enough to be objects of their own.
        state.messages = ["first " * 60, f"number {i} " * 60]
        cp.save(state)
    return state


def loadable(cp):
    good = []
    for head in cp.list_checkpoints("t"):
        try:
            cp.load("t", seq=head.seq)
        except (Damaged, Unavailable):
            continue
        good.append(head.seq)
    return good


def test_field_case_84a_what_the_head_refers_to_stays(cp):
    rng = random.Random(84)
    state = State("t")
    blobs = [rng.randbytes(600) for _ in range(200)]
    for i in range(1, 201, 20):
        state.messages = blobs[: i + 19]
        cp.save(state)
    assert state.messages == blobs
    report = cp.cleanup("t", keep_latest=1, max_bytes=0)
    assert report.kept == 1
    assert cp.load_latest("t").messages == blobs
    assert cp.cleanup("t", keep_latest=1, max_bytes=0).objects_deleted == 0


HOW = ["row", "missing", "damaged"]


@pytest.mark.parametrize("how", HOW)
def test_field_case_84b_an_unreadable_checkpoint_is_kept_and_reported(url, cp, folder, how):
    saved(cp, 6)
    cp = spoil(url, cp, folder, how, 2)
    with cp:
        told = cp.cleanup("t", keep_latest=2, dry_run=True)
        assert (told.deleted, told.unreadable) == ((1, 3, 4), (2,))
        (line,) = (c for c in told.checkpoints if c.seq == 2)
        assert not line.deleted
        assert "cannot be read" in line.why
        done = cp.cleanup("t", keep_latest=2)
        assert (done.deleted, done.unreadable) == ((1, 3, 4), (2,))
        assert loadable(cp) == [6, 5]
        for _ in range(2):
            again = cp.cleanup("t", keep_latest=1, max_bytes=0)
            assert again.unreadable == (2,)
        assert cp.store.task("t").checkpoints == 2
        assert cp.load_latest("t").step == 6
        assert cp.cleanup_all(keep_latest=1).tasks[0].unreadable == (2,)
        cp.finish("t")
        assert cp.cleanup_all(finished_older_than=timedelta(0)).removed == (), "nor is it removed with its task"


@pytest.mark.parametrize("how", HOW)
def test_field_case_84b_damage_does_not_use_up_what_recovery_falls_back_to(url, cp, folder, how):
    saved(cp, 6)
    for seq in (4, 5):
        cp = spoil(url, cp, folder, how, seq)
    with cp:
        report = cp.cleanup("t", keep_latest=2)
        assert (report.deleted, report.unreadable) == ((1, 2), (4, 5))
        assert loadable(cp) == [6, 3]


@pytest.mark.parametrize("how", HOW)
def test_field_case_84b_nor_does_a_save_delete_what_is_unreadable(url, cp, folder, how, caplog):
    saved(cp, 6)
    cp = spoil(url, cp, folder, how, 3)
    with cp, caplog.at_level(logging.WARNING, "safepoint"):
        cp.retention = Retention(keep_latest=2)
        saved(cp, 30, start=7)
        left = [row.seq for row in cp.store.headers("t")]
        assert 3 in left
        assert 2 not in left
        assert len(left) < 12
        assert cp.load_latest("t").step == 36
    if how != "row":  # a broken row is not so much as looked at here: its word, that it is a failure, lets it stay
        assert "retention of task t keeps what cannot be read: 3" in caplog.text


# -- 98: big media and huge strings


def test_field_case_98_large_values_come_back_as_they_were(url):
    n = scale(2_000_000, 60_000_000)
    rng = random.Random(98)
    text = "".join(rng.choices('aé漢😀\n\0"\\', k=1000)) * (n // 1000)
    data = rng.randbytes(n)
    small = [{"role": "user", "content": f"message {i}"} for i in range(scale(1_000, 10_000))]
    with safepoint.open(url) as kept:
        kept.save(State("t", messages=[{"screenshot": text}, *small], agent_state={"raw": data}))
        with safepoint.open(url) as cp:
            state = cp.load_latest("t") or pytest.fail("it is gone")
        assert state.messages[0]["screenshot"] == text
        assert state.messages[1:] == small
        assert state.agent_state == {"raw": data}
        state.messages.append("one more")
        state.step += 1
        kept.save(state)
        assert kept.load_latest("t").messages[-1] == "one more"


def test_field_case_98_what_comes_again_is_stored_once(url, tmp_path):
    if url.startswith("file:"):
        pytest.skip("chunked is False")
    image = random.Random(1).randbytes(500_000)
    with safepoint.open(url, retention=Retention.keep_all(), durability="process") as cp:
        state = State("t")
        for i in range(100):
            state.messages = [{"role": "user", "content": [{"image": image}, f"look {i}"]}]
            state.step = i
            cp.save(state)
        assert cp.load("t", seq=1).messages[0]["content"][0]["image"] == image
        parts = [len(o.data) for o in cp.store.walk("t") if isinstance(o, Obj)]
        assert sum(size > 400_000 for size in parts) == 1
        assert sum(parts) < 600_000 + 100 * 1_000

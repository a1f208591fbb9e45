"""Field cases 84 (retention: references and unreadable items) and 98 (big media); invariant 6. See docs/field-cases.md."""

import contextlib
import logging
import random
from datetime import timedelta
from pathlib import Path

import pytest

import safepoint
from safepoint import Damaged, Retention, State, Unavailable
from safepoint.model import Obj
from tests.support.scale import scale
from tests.support.spoil import change_checkpoint, change_object


@pytest.fixture
def folder(url, tmp_path):
    return tmp_path


def spoil(url, cp, folder, how, seq):
    """Damage a checkpoint of task ``t`` behind the store's back; what is opened after it is returned."""
    if not cp.store.chunked:
        cp.close()
        _spoil_file(folder, how, seq)
        return safepoint.open(url, retention=cp.retention)
    if how == "row":
        change_checkpoint(cp, "t", seq, created_at=0, kind="failure")
    else:
        # One that only this checkpoint has; what else there is may be damaged already.
        others = set()
        for head in cp.store.headers("t"):
            if head.seq != seq:
                with contextlib.suppress(Damaged):
                    others |= cp.store.read("t", seq=head.seq)[1].keys()
        objects = cp.store.read("t", seq=seq)[1]
        name = max(objects.keys() - others)
        change_object(cp, "t", name, None if how == "missing" else objects[name].data[:-1] + b"?")
    if not cp.store.persistent:
        return cp
    cp.close()
    return safepoint.open(url, retention=cp.retention)


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
    image = random.Random(1).randbytes(500_000)
    with safepoint.open(url, retention=Retention.keep_all(), durability="process") as cp:
        if not cp.store.chunked:
            pytest.skip("chunked is False")
        state = State("t")
        for i in range(100):
            state.messages = [{"role": "user", "content": [{"image": image}, f"look {i}"]}]
            state.step = i
            cp.save(state)
        assert cp.load("t", seq=1).messages[0]["content"][0]["image"] == image
        parts = [len(o.data) for o in cp.store.walk("t") if isinstance(o, Obj)]
        assert sum(size > 400_000 for size in parts) == 1
        assert sum(parts) < 600_000 + 100 * 1_000

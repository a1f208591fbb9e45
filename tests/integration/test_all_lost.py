"""A task whose every checkpoint is lost is not a new one: it has done things, and its calls say so."""

import apsw
import pytest

import safepoint
from safepoint import Damaged, InDoubt
from tests.support.runs import declare


@pytest.fixture
def place(request, tmp_path, world):
    """A store that was repaired in place, after the only checkpoint of a task had been lost; its first write has been made."""
    act = declare(world)
    url = f"{request.param}:///{tmp_path}/store"
    with safepoint.open(url) as cp, cp.resume("t") as run:
        run.call(act, 0)
    if request.param == "file":
        (tmp_path / "store" / "t" / "main" / "1.json").unlink()
    else:
        db = apsw.Connection(f"{tmp_path}/store")
        db.execute("UPDATE sp_checkpoints SET root = CAST(root || x'00' AS BLOB)")
        db.close()
    with safepoint.open(url) as cp:
        assert cp.repair("t", in_place=True).damages
        assert cp.verify().ok
    return url


both = pytest.mark.parametrize("place", ["sqlite", "file"], indirect=True)


@both
def test_it_is_not_absent_and_not_begun_by_itself(place, world):
    act = declare(world)
    with safepoint.open(place) as cp:
        with pytest.raises(Damaged):
            cp.load_latest("t")
        for options in ({}, {"recover": "strict"}, {"recover": "manual"}):
            with pytest.raises((Damaged, safepoint.DecisionNeeded)), cp.resume("t", **options) as run:
                run.call(act, 0)
        assert cp.plan("t").does == "refused"
    assert world.log == [(0,)]


@both
def test_a_fresh_start_repeats_no_write(place, world):
    act = declare(world)
    with safepoint.open(place) as cp:
        with cp.resume("t", fresh_start=True) as run:
            assert (run.recovery.mode, run.recovery.guard) == ("fresh", 1)
            run.call(act, 0)  # on record
            run.save()
        with cp.resume("t") as run:
            run.call(act, 1)
            run.save()
    assert world.log == [(0,), (1,)]


@both
def test_nor_one_that_is_not_on_record(place, world):
    act = declare(world)
    with safepoint.open(place) as cp, pytest.raises(InDoubt), cp.resume("t", fresh_start=True) as run:
        run.call(act, 7)
    assert world.log == [(0,)]


def test_nor_if_its_calls_are_lost_too(tmp_path, world):
    act, url = declare(world), f"sqlite:///{tmp_path}/store"
    with safepoint.open(url) as cp, cp.resume("t") as run:
        run.call(act, 0)
        run.save()
    db = apsw.Connection(f"{tmp_path}/store")
    db.execute("UPDATE sp_checkpoints SET root = CAST(root || x'00' AS BLOB), step = 7; UPDATE sp_calls SET step = 7")
    db.close()
    with safepoint.open(url) as cp:
        cp.repair("t", in_place=True)
        assert not cp.calls("t")
        with pytest.raises(Damaged), cp.resume("t"):
            pass
        with pytest.raises(InDoubt), cp.resume("t", fresh_start=True) as run:
            run.call(act, 0)
        assert cp.plan("t").guard > 1
    assert world.log == [(0,)]

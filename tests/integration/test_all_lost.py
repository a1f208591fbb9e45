"""A task whose every checkpoint is lost is not a new one: it has done things, and its calls say so."""

import pytest

import safepoint
from safepoint import Damaged, InDoubt
from safepoint.stores.base import Store
from tests.integration.conftest import STORES, new_url
from tests.support.runs import declare
from tests.support.spoil import change_call, change_checkpoint, lengthen_root


@pytest.fixture
def place(request, tmp_path, world):
    """A store that was repaired, after the only checkpoint of a task had been lost; its first write has been made."""
    act = declare(world)
    url = new_url(request.param, tmp_path, "store")
    with safepoint.open(url) as cp, cp.resume("t") as run:
        run.call(act, 0)
    if request.param == "file":
        (tmp_path / "store" / "t" / "main" / "1.json").unlink()
    else:
        lengthen_root(url, "t", 1)
    return repaired(url, new_url(request.param, tmp_path, "repaired"))


def repaired(url, other):
    """In place, or where a store cannot do that, into another one; the URL of what came of it."""
    with safepoint.open(url) as cp:
        in_place = type(cp.store).set_aside is not Store.set_aside
        report = cp.repair("t", in_place=True) if in_place else cp.repair("t", into=other)
        assert report.damages
    with safepoint.open(url if in_place else other) as cp:
        assert cp.verify().ok
    return url if in_place else other


every = pytest.mark.parametrize("place", [kind for kind in STORES if kind != "memory"], indirect=True)


@every
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


@every
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


@every
def test_nor_one_that_is_not_on_record(place, world):
    act = declare(world)
    with safepoint.open(place) as cp, pytest.raises(InDoubt), cp.resume("t", fresh_start=True) as run:
        run.call(act, 7)
    assert world.log == [(0,)]


@pytest.mark.parametrize("kind", [kind for kind in STORES if kind not in ("memory", "file")])
def test_nor_if_its_calls_are_lost_too(kind, tmp_path, world):
    act, url = declare(world), new_url(kind, tmp_path, "store")
    with safepoint.open(url) as cp, cp.resume("t") as run:
        run.call(act, 0)
        run.save()
    for seq in (1, 2):
        lengthen_root(url, "t", seq)
        change_checkpoint(url, "t", seq, step=7)
    change_call(url, "t", 1, step=7)
    with safepoint.open(repaired(url, new_url(kind, tmp_path, "repaired"))) as cp:
        assert not cp.calls("t")
        with pytest.raises(Damaged), cp.resume("t"):
            pass
        with pytest.raises(InDoubt), cp.resume("t", fresh_start=True) as run:
            run.call(act, 0)
        assert cp.plan("t").guard > 1
    assert world.log == [(0,)]

"""A store that is older than what it acknowledged, taken as it stands in a shell: what the error advises, works."""

import shutil

import pytest

import safepoint
from safepoint import InDoubt, UsageError
from safepoint.cli.ending import run as command
from tests.integration.conftest import STORES
from tests.support.runs import declare


@pytest.fixture
def url(tmp_path, world):
    """Put back to where it stood when a task had done two steps of four, and another was not begun."""
    path = tmp_path / "agent.db"
    url = f"sqlite:///{path}"
    act = declare(world)
    work(url, act, "t", 2)
    shutil.copy(path, tmp_path / "backup")
    work(url, act, "t", 4)
    work(url, act, "gone", 1)
    shutil.copy(tmp_path / "backup", path)
    return url


def work(url, act, task, upto):
    with safepoint.open(url) as cp, cp.resume(task) as run:
        while run.state.step < upto:
            run.call(act, run.state.step)
            run.save()


@pytest.mark.parametrize("words", [["accept", "t"], ["rewind", "t@3", "--yes"]])
def test_the_task_goes_on_under_a_guard(url, world, words, capsys):
    with safepoint.open(url) as cp, pytest.raises(safepoint.Damaged) as caught:
        cp.load_latest("t")
    assert caught.value.remedy.endswith("safepoint accept t")
    assert command([*words, "--store", url]) == 0
    assert "t@" in capsys.readouterr().out
    before = list(world.log)
    with pytest.raises(InDoubt):
        work(url, declare(world), "t", 4)
    assert world.log == before


def test_a_person_is_asked_before_it_is_rewound(url, capsys, monkeypatch):
    monkeypatch.setattr("click.confirm", lambda text, **options: print(text))
    assert command(["rewind", "t@3", "--store", url]) == 0
    assert "is older than what was acknowledged" in capsys.readouterr().out


def test_a_task_that_is_gone(url, capsys):
    assert command(["accept", "gone", "--store", url]) == 0
    assert "it is gone" in capsys.readouterr().out
    with safepoint.open(url) as cp:
        assert cp.load_latest("gone") is None


@pytest.mark.parametrize("kind", STORES)
def test_one_that_is_not_older(kind, tmp_path):
    with safepoint.open(
        {"memory": "memory://", "sqlite": f"sqlite:///{tmp_path}/b.db", "file": f"file:///{tmp_path}/b"}[kind]
    ) as cp:
        cp.save(safepoint.State("t"))
        with pytest.raises(UsageError, match="not older"):
            cp.accept("t")


# -- repaired instead


@pytest.mark.parametrize("accepted", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_repair_stands_under_the_guard_that_accepting_puts(url, world, in_place, accepted):
    """Over the steps that were done and are on no record too, not only those that the store knows of."""
    before = list(world.log)
    with safepoint.open(url) as cp:
        cp.accept("gone")  # what is lost as a whole, no repair in place can bring back
    with safepoint.open(url) as cp:
        if accepted:  # and killed before anything was put under a guard
            cp.store.accept("t")
        report = cp.repair("t", in_place=in_place)
    with safepoint.open(report.url) as mended:
        assert mended.verify("t").ok
        # Heads at steps 0, 1, 2 are there, two more were acknowledged; one that was begun may have been on its way.
        guard = mended.plan("t").guard
        assert guard == 6
        if not (accepted and in_place):  # which finds no damage, and leaves the mark where it is
            assert report.fell_back[0].guard == guard
    for _ in range(2, guard):
        with pytest.raises(InDoubt):
            work(report.url, declare(world), "t", guard)
        with safepoint.open(report.url) as mended:
            (call,) = mended.calls("t", status="in_doubt")
            mended.resolve("t", call, safepoint.Done("made"))
    work(report.url, declare(world), "t", guard)
    assert world.log == before


def test_a_branch_beside_that_is_gone_back_to_after_a_repair_stands_under_it_too(tmp_path, world):
    path = tmp_path / "agent.db"
    url, act = f"sqlite:///{path}", declare(world)
    work(url, act, "t", 2)
    with safepoint.open(url) as cp:
        cp.fork("t", name="beside")
    shutil.copy(path, tmp_path / "backup")
    work(url, act, "t", 4)
    shutil.copy(tmp_path / "backup", path)
    before = list(world.log)
    with safepoint.open(url) as cp:
        report = cp.repair()
    with safepoint.open(report.url) as mended:
        mended.rewind("t", branch="beside")
        assert mended.plan("t").guard >= 6
    with pytest.raises(InDoubt):
        work(report.url, act, "t", 4)
    assert world.log == before


def test_verify_says_what_loads_of_it(url):
    with safepoint.open(url) as cp:
        for found in (cp.verify(), cp.verify("t")):
            (branch,) = found.branches
            assert (branch.head_loads, branch.loads, branch.newest_good) == (True, ((1, 3),), 3)

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

"""The commands that go back and apart, in this process: what they print, what they change, how they end."""

import enum
import io
import json

import pytest

import safepoint
from safepoint.cli.ending import run as command
from tests.support.runs import declare


@safepoint.register
class Stage(enum.StrEnum):
    PLAN = "plan"


@pytest.fixture
def url(tmp_path, world):
    url = f"sqlite:///{tmp_path}/agent.db"
    act = declare(world)
    with safepoint.open(url) as cp, cp.resume("t", requires=["stage"]) as run:
        for i in range(3):
            run.call(act, i)
            run.state.agent_state["stage"] = Stage.PLAN if i < 2 else None
            run.save()
    return url


@pytest.fixture
def sp(url, capsys):
    def run(*args, as_json=False):
        code = command([*args, "--store", url, *(["--json"] if as_json else [])])
        out, err = capsys.readouterr()
        return (code, json.loads(out)) if as_json else (code, out, err)

    return run


def test_plan_lists_the_candidates_with_their_health(sp):
    code, out, _ = sp("plan", "t")
    assert code == 0
    assert "carry on from t@3" in out
    assert "4     3  main    step" in out
    assert "unhealthy: stage is missing" in out
    assert "on a new branch, main~1" in out
    _, data = sp("plan", "t", as_json=True)
    assert [(c["seq"], c["taken"], c["problem"]) for c in data["candidates"]] == [
        (4, False, "unhealthy: stage is missing"), (3, True, ""), (2, False, ""), (1, False, ""),
    ]  # fmt: skip
    assert (data["seq"], data["newest"], data["branch"], data["guard"]) == (3, 4, "main~1", 0)


def test_rewind_and_branches(sp, url):
    code, out, _ = sp("rewind", "t@2", "--yes")
    assert (code, out) == (0, "t stands at t@5 on branch main~1, step 1\n")
    _, data = sp("branches", "t", as_json=True)
    assert [(b["branch"], b["head"], b["current"], b["forked_from"], b["kept"]) for b in data["branches"]] == [
        ("main", 4, False, None, 4), ("main~1", 5, True, 2, 1),
    ]  # fmt: skip
    assert sp("branches", "t")[1].splitlines()[2].startswith("*  main~1     5     1     1     2")
    code, data = sp("rewind", "t@3", "--journal", "block", "-y", as_json=True)
    assert (data["checkpoint"]["seq"], data["checkpoint"]["branch"], data["plan"]["guard"]) == (6, "main~2", 4)
    assert sp("rewind", "t", "--branch", "main", "-y")[0] == 0
    with safepoint.open(url) as cp:
        assert (cp.status("t").branch, cp.status("t").seq) == ("main", 4)
        assert cp.load("t", branch="main~2").agent_state == {"stage": Stage.PLAN}


def test_fork(sp):
    assert sp("fork", "t@2", "try")[:2] == (0, "branch try of t begins at t@5, from 2\n")
    code, data = sp("fork", "t", as_json=True)
    assert (code, data["checkpoint"]["branch"], data["checkpoint"]["parent_seq"]) == (0, "main~1", 4)
    code, _, err = sp("fork", "t", "try")
    assert (code, err.splitlines()[0]) == (2, "error: task 't' has a branch 'try' already")


def test_what_is_refused_changes_nothing(sp, url, monkeypatch):
    for args, code in (
        (("rewind", "t", "-y"), 2), (("rewind", "t@9", "-y"), 3), (("rewind", "nope@1", "-y"), 3), (("fork", "nope"), 3),
        (("rewind", "t@1", "--branch", "main", "-y"), 2), (("rewind", "t", "--branch", "x", "-y"), 3), (("branches", "x"), 3),
        (("rewind", "t@1", "--journal", "x", "-y"), 2),
    ):  # fmt: skip
        assert sp(*args)[0] == code, args
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    code, _, err = sp("rewind", "t@1")
    assert code == 1
    assert "Go on from t@1?" in err
    with safepoint.open(url) as cp:
        assert [b.name for b in cp.branches("t")] == ["main"]
        with cp.resume("t"):
            assert sp("rewind", "t@1", "-y")[0] == 5

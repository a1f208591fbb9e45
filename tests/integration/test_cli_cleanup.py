"""``safepoint cleanup``: a rehearsal that says why, one task or all, and what is asked first."""

import io
import json
import sys
from datetime import timedelta

import pytest

import safepoint
from safepoint import State
from safepoint.cli import main
from safepoint.cli.cleaning import size_of
from safepoint.errors import UsageError
from tests.integration.test_keeping import aged


@pytest.fixture
def db(tmp_path):
    url = f"sqlite:///{tmp_path}/agent.db"
    with safepoint.open(url) as cp:
        for task in ("a", "b\n"):
            state = State(task)
            for i in range(6):
                state.step = i
                cp.save(state, kind="milestone" if i == 1 else "manual")
        cp.pin("a", 1)
        cp.finish("b\n")
    return url


@pytest.fixture
def run(db, capsys, monkeypatch):
    monkeypatch.setenv("SAFEPOINT_URL", db)

    def call(*args, stdin=""):
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = main(list(args))
        out, err = capsys.readouterr()
        return code, out, err

    return call


def test_a_rehearsal_is_a_table_with_reasons(run):
    code, out, _ = run("cleanup", "a", "--keep-latest", "2", "--dry-run")
    assert code == 0
    lines = [line.split(None, 7) for line in out.splitlines()]
    assert lines[0][:4] == ["seq", "age", "kind", "size"]
    why = {line[0]: (line[6], line[7].strip()) for line in lines[1:7]}
    assert why == {
        "6": ("kept", "the head of main"),
        "5": ("kept", "of the newest 2"),
        "4": ("deleted", "beyond the newest 2"),
        "3": ("deleted", "beyond the newest 2"),
        "2": ("kept", "a milestone"),
        "1": ("kept", "pinned"),
    }
    assert json.loads(run("cleanup", "a", "--keep-latest", "2", "--json")[1])["deleted"] == [3, 4]


def test_a_long_rehearsal_is_shortened_where_lines_are_alike(run, db):
    with safepoint.open(db, retention=safepoint.Retention.keep_all()) as cp:
        state = cp.load_latest("a") or pytest.fail("it is gone")
        for _ in range(100):
            cp.save(state)
    _, out, _ = run("cleanup", "a", "--keep-latest", "2", "--dry-run")
    assert len(out.splitlines()) < 20
    assert "\n3-104 " in out
    _, out, _ = run("cleanup", "a", "--keep-latest", "2", "--dry-run", "--full")
    assert len(out.splitlines()) > 106


def test_all_tasks_after_a_question(run):
    assert run("cleanup", "--keep-latest", "1", stdin="n\n")[0] == 1
    code, out, _ = run("cleanup", "--keep-latest", "1", "--dry-run")
    assert code == 0
    assert "in all" in out
    code, out, err = run("cleanup", "--keep-latest", "1", "--yes", "--json")
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert {t["task_id"]: t["deleted"] for t in told["tasks"]} == {"a": [3, 4, 5], "b\n": [1, 3, 4, 5, 6]}
    assert (told["deleted"], told["failed"], told["removed"]) == (8, {}, [])
    assert run("cleanup", "--keep-latest", "1", stdin="y\n")[0] == 0


def test_finished_tasks_go_whole_only_after_so_long(run):
    assert json.loads(run("cleanup", "--finished-older-than", "1d", "--yes", "--json")[1])["removed"] == []
    told = json.loads(run("cleanup", "--finished-older-than", "0s", "--dry-run", "--json")[1])
    assert told["removed"] == ["b\n"]
    code, out, _ = run("cleanup", "--finished-older-than", "0s", "--yes")
    assert code == 0
    assert "removed: it is finished" in out
    assert run("log", "b\n")[0] == 3
    assert run("log", "a")[0] == 0


def test_what_is_refused(run):
    assert run("cleanup", "a")[0] == 2
    assert run("cleanup", "a", "--max-store-bytes", "1GB")[0] == 2
    assert run("cleanup", "--yes")[0] == 2
    assert run("cleanup", "a", "--max-bytes", "lots")[0] == 2
    assert run("cleanup", "nope", "--keep-latest", "1")[0] == 3


def test_sizes():
    assert [size_of(t) for t in ("5", "64kB", "1.5 MB", "2G", "1TB")] == [5, 64_000, 1_500_000, 2 * 10**9, 10**12]
    with pytest.raises(UsageError):
        size_of("5 apples")


def test_age_is_the_checkpoints_own(run, db):
    aged(db, "a", timedelta(days=30), upto=4)
    told = json.loads(run("cleanup", "a", "--max-age", "7d", "--json")[1])
    assert told["deleted"] == [3, 4]

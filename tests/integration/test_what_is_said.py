"""What outcomes, errors and the command line say, where it was less than was known."""

import sqlite3
import threading

import apsw
import pytest

import safepoint
from safepoint import Damaged, State
from safepoint.cli import main


@pytest.fixture
def url(tmp_path, monkeypatch):
    url = f"sqlite:///{tmp_path}/agent.db"
    monkeypatch.setenv("SAFEPOINT_URL", url)
    with safepoint.open(url) as cp:
        state = State("t")
        for _ in range(4):
            state.agent_state["n"] = state.step = state.step + 1
            cp.save(state)
    return url


@pytest.fixture
def run(url, capsys):
    def call(*args):
        code = main(list(args))
        out, err = capsys.readouterr()
        return code, out, err

    return call


def spoil(tmp_path, *seqs):
    conn = apsw.Connection(str(tmp_path / "agent.db"))
    for seq in seqs:
        conn.execute("UPDATE sp_checkpoints SET root = zeroblob(length(root)) WHERE seq = ?", (seq,))
    conn.close()


def test_the_outcome_of_a_new_task_says_so():
    def step(run):
        run.finish(1)

    with safepoint.open("memory://") as cp:
        outcome = safepoint.run_agent(step, task_id="t", input="go", store=cp)
        assert outcome.recovery is not None
        assert (outcome.recovery.mode, outcome.recovery.seq, outcome.recovery.skipped) == ("new", None, ())
        # Nothing was run the second time.
        assert safepoint.run_agent(step, task_id="t", input="go", store=cp).recovery is None


def test_updates_that_meet_step_aside_for_a_moment(monkeypatch):
    from safepoint import checkpointer

    slept: list[float] = []
    monkeypatch.setattr(checkpointer.time, "sleep", slept.append)
    with safepoint.open("memory://") as cp:
        cp.save(State("t", agent_state={"n": 0}))
        other: list[safepoint.Checkpoint] = []

        def add(state):
            if len(other) < 4:
                other.append(cp.save(cp.load("t", branch="main")))
            state.agent_state["n"] += 1

        cp.update("t", add)
        assert cp.load_latest("t").agent_state == {"n": 1}
    assert len(slept) == 4
    assert all(0 <= pause <= 1 for pause in slept)
    assert len(set(slept)) == 4, "by chance, so that two do not meet again"


def test_updates_of_several_writers_all_land(url):
    def work():
        with safepoint.open(url, durability="process") as cp:
            for _ in range(15):
                cp.update("t", lambda s: s.agent_state.update(n=s.agent_state["n"] + 1), retries=20)

    failed = []

    def guarded():
        try:
            work()
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    with safepoint.open(url) as cp:
        assert cp.load_latest("t").agent_state["n"] == 64


def test_an_export_of_damage_names_what_an_export_can_do(url, run, tmp_path):
    spoil(tmp_path, 3)
    with safepoint.open(url) as cp, pytest.raises(Damaged) as caught:
        cp.export("t", tmp_path / "t.safepoint")
    assert "skip" not in str(caught.value)
    assert "copy" not in str(caught.value)
    code, _, err = run("export", "t", str(tmp_path / "t.safepoint"))
    assert code == 6
    assert "skip" not in err
    assert "repair" in err
    assert run("export", "t@2", str(tmp_path / "one.safepoint"))[0] == 0


def test_show_of_a_damaged_head_names_the_newest_good_one(url, run, tmp_path):
    spoil(tmp_path, 4, 3)
    code, out, err = run("show", "t")
    assert (code, out) == (6, "")
    assert "t@2" in err
    assert "load(" not in err


def test_one_is_not_many(run):
    assert "read 1 task, 4 checkpoints, 0 calls, 0 pauses" in run("verify")[1]
    assert "nothing is damaged in 1 task;" in run("repair")[1]
    run("delete", "t", "--yes")


def test_remedies_at_a_shell_are_commands(run):
    for args in (
        ("show", "t@9"),
        ("diff", "t@9", "1"),
        ("accept", "t@9"),
        ("rewind", "t@9", "--yes"),
        ("fork", "t@9"),
        ("edit", "t@9"),
    ):
        code, _, err = run(*args)
        assert code != 0
        assert "list_checkpoints" not in err, args
        assert "cp." not in err, args


def test_what_sqlite_says_of_its_structure_is_one_line(run, tmp_path):
    conn = sqlite3.connect(tmp_path / "agent.db")
    conn.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    size, root = (
        conn.execute(q).fetchone()[0]
        for q in ("PRAGMA page_size", "SELECT rootpage FROM sqlite_schema WHERE name = 'sp_objects'")
    )
    conn.close()
    with open(tmp_path / "agent.db", "r+b") as file:
        file.seek((root - 1) * size)
        file.write(b"\xff" * 100)
    code, out, _ = run("verify")
    assert code == 6
    assert "\\n" not in out

"""What adapters recorded, and what is wrong with it: named, set aside, and no reason to lose anything else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest

import safepoint
from safepoint import Damaged, Retention, State
from tests.integration.test_verify import changed
from tests.support import moved
from tests.support.spoil import change_object

KEYS = [("", "a", "w0", 0), ("", "a", "w1", -1), ("", "a", "w1", 1), ("", "b", "w1", -1), ("ns", "a", "w1", -1)]
NAME = "write 0 of 'w0' against checkpoint 'a'"


@pytest.fixture
def cp(tmp_path: Path) -> Iterator[Any]:
    with safepoint.open(f"sqlite:///{tmp_path}/agent.db", durability="process", retention=Retention.keep_all()) as cp:
        for task in ("t", "u"):
            state = State(task)
            for i in range(3):
                state.step = i
                state.messages.append({"role": "user", "content": f"message {i} " * 30})
                cp.save(state)
            for space, checkpoint, rows in (("", "a", 3), ("", "b", 1), ("ns", "a", 1)):
                moved.written(cp, task, checkpoint, space=space, rows=rows, shared=space + checkpoint)
        found = cp.verify()
        assert (found.ok, found.writes) == (True, 10)
        assert "10 writes" in str(found)
        yield cp


def keys(cp: Any, task: str = "t") -> list[Any]:
    return sorted(row.key for row in cp.store.writes(task, space=None)[0])


def mended(cp: Any, how: str, left: list[Any]) -> None:
    """Repair, and see that all else is there."""
    report = cp.repair("t", in_place=how == "in place")
    lost = report.lost_writes.get("t", ())
    assert len(lost) in (0, len(KEYS) - len(left))
    assert (report.fell_back, report.lost_checkpoints, report.lost_calls) == ([], {}, {})
    with safepoint.open(report.url, durability="process") if how == "into" else safepoint.open("memory://") as other:
        there = other if how == "into" else cp
        assert there.verify("t").ok
        assert keys(there) == left
        assert [c.seq for c in there.list_checkpoints("t")] == [3, 2, 1]
        assert there.load_latest("t").step == 2
    assert keys(cp, "u") == KEYS
    if how == "in place":
        with cp.store.connection() as conn:
            aside = conn.execute("SELECT kind, task, key FROM sp_quarantine ORDER BY key").fetchall()
        assert aside == [("write", "t", str(key)) for key in lost]


@pytest.mark.parametrize("how", ["into", "in place"])
@pytest.mark.parametrize(
    "column", ["path = 'q'", "data = X'80'", "refs = X''", "seal = X'00'", "writer = 'x'", "idx = 9", "checkpoint = 'b'"]
)
def test_a_row(cp: Any, column: str, how: str) -> None:
    changed(cp, f"UPDATE sp_writes SET {column} WHERE task = 1 AND checkpoint = 'a' AND space = '' AND idx = 0")
    found = cp.verify()
    (damage,) = [d for d in found.damages if d.kind == "write"]
    assert (damage.task_id, damage.where) == ("t", f"sp_writes, row {(1 << 32) + 2}")
    if not column.startswith(("writer", "idx", "checkpoint")):
        assert (damage.what, damage.key) == (NAME, KEYS[0])
    assert [d.kind for d in found.damages] == ["write"]
    assert len(cp.store.writes("t", space=None)[0]) == 5
    with pytest.raises(Damaged):
        cp.copy_to("memory://", "t", skip_damaged=True)
    mended(cp, how, KEYS[1:])


@pytest.mark.parametrize("how", ["into", "in place"])
def test_a_row_that_is_gone(cp: Any, how: str) -> None:
    changed(cp, "DELETE FROM sp_writes WHERE task = 1 AND idx = 0")
    changed(cp, "UPDATE sp_tasks SET write_rows = write_rows + 1 WHERE n = 1")
    (damage,) = cp.verify().damages
    assert (damage.what, damage.where) == ("1 writes are missing", "sp_tasks, row 1")
    for verb in (lambda: cp.store.writes("t"), lambda: cp.store.prune("t", [1])):
        with pytest.raises(Damaged):
            verb()
    assert keys(cp, "u") == KEYS
    mended(cp, how, KEYS[1:])


@pytest.mark.parametrize("how", ["into", "in place"])
@pytest.mark.parametrize("data", [None, b"v\0"])
def test_what_only_a_write_refers_to(cp: Any, data: bytes | None, how: str) -> None:
    (row,) = cp.store.writes("t", checkpoints=["b"])[0]
    change_object(cp, "t", row.refs[:16], data)
    (damage,) = cp.verify().damages
    assert (damage.kind, damage.writes, damage.checkpoints, damage.calls) == ("object", (row.key,), (), ())
    assert "takes 1 write with it" in str(damage)
    with pytest.raises(Damaged):
        cp.copy_to("memory://", "t", skip_damaged=True)
    left = [key for key in KEYS if key != row.key]
    report = cp.repair("t", in_place=how == "in place")
    assert report.lost_writes == {"t": (row.key,)}
    with safepoint.open(report.url, durability="process") if how == "into" else safepoint.open("memory://") as other:
        there = other if how == "into" else cp
        assert there.verify("t").ok
        assert keys(there) == left


def test_values_of_other_classes(cp: Any) -> None:
    path = cp.store.path
    cp.close()
    conn = apsw.Connection(path)
    conn.config(apsw.SQLITE_DBCONFIG_DEFENSIVE, 0)
    conn.execute("PRAGMA writable_schema=ON")
    conn.execute(
        "UPDATE sqlite_schema SET sql = replace(replace(sql, 'STRICT', ''), ' TEXT NOT NULL', '') WHERE name = 'sp_writes'"
    )
    conn.close()
    conn = apsw.Connection(path)
    conn.execute("UPDATE sp_writes SET path = 0.5 WHERE k = (1 << 32) + 2")
    conn.close()
    with safepoint.open(f"sqlite:///{path}", durability="process") as again:
        (damage,) = [d for d in again.verify("t").damages if d.kind == "write"]
        assert (damage.what, damage.key, damage.why) == (NAME, KEYS[0], "its values are of other types")
        rows = {row.key: row for row in again.store.writes("t", space=None)[0]}
        assert sorted(rows) == KEYS
        with pytest.raises(Damaged):
            rows[KEYS[0]].check("t", "it")
        for key in KEYS[1:]:
            rows[key].check("t", "it")
        mended(again, "in place", KEYS[1:])


def test_a_dropped_branch_is_told_from_a_lost_one(cp: Any) -> None:
    at = moved_threads(cp)
    assert cp.verify("v").ok
    assert cp.store.read("v", branch="gone") is None
    changed(cp, "UPDATE sp_branches SET name = 'bakk' WHERE name = 'back'")
    with pytest.raises(Damaged):
        cp.store.read("v", branch="back")
    found = cp.verify("v")
    assert [(d.kind, d.key) for d in found.damages][:1] == [("branch", ("", "back"))]
    report = cp.repair("v", in_place=True)
    assert cp.verify("v").ok
    assert {b.name for b in cp.store.branches("v")} >= {"main", "back"}
    assert report.lost_checkpoints == {}
    assert at


def moved_threads(cp: Any) -> Any:
    from tests.integration.test_moving import threaded

    return threaded(cp, "v")


def test_a_repair_in_place_undoes_nothing_that_came_meanwhile(cp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit of writes, or one that moves a branch, gives out no number by which it would be seen."""
    from safepoint import Conflict, integrity
    from safepoint.model import new_id
    from safepoint.rows import BranchWrite, Commit, Head

    changed(cp, "UPDATE sp_writes SET path = 'q' WHERE task = 1 AND idx = 0")
    mend, rows = integrity.mend, cp.store.headers("t")
    move = BranchWrite(name="main", expect=Head(3, rows[0].id), to=Head(2, rows[1].id))

    def meanwhile(*args: Any) -> Any:
        found = mend(*args)
        cp.store.commit(Commit(task="t", id=new_id(), branches=(move,)))
        return found

    monkeypatch.setattr(integrity, "mend", meanwhile)
    with pytest.raises(Conflict):
        cp.repair("t", in_place=True)
    assert [b.head.seq for b in cp.store.branches("t")] == [2]
    monkeypatch.undo()
    cp.repair("t", in_place=True)
    assert cp.verify("t").ok
    assert keys(cp) == KEYS[1:]
    assert [b.head.seq for b in cp.store.branches("t")] == [2]


def test_a_shell_says_how_many_there_are_and_which_are_lost(
    cp: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safepoint.cli import main

    def run(*args: str) -> tuple[int, str]:
        code = main(["--store", f"sqlite:///{tmp_path}/agent.db", *args])
        return code, " ".join(capsys.readouterr().out.split())

    state = State("none")
    cp.save(state)
    out, to = f"{tmp_path}/t.safepoint", f"sqlite:///{tmp_path}/to.db"
    assert "0 pauses, 10 writes, " in run("verify")[1]
    assert "write" not in run("verify", "none")[1]
    assert "0 pauses, 5 writes, " in run("export", "t", out)[1]
    assert json.loads(run("--json", "export", "t", out)[1])["writes"] == 5
    assert "0 pauses, 5 writes, " in run("copy", "t", "--to", to)[1]
    assert json.loads(run("--json", "copy", "u", "--to", to)[1])["tasks"][0]["writes"] == 5
    assert "write" not in run("copy", "none", "--to", to)[1]
    assert "0 pauses, 5 writes)" in run("import", out, "--as", "again")[1]
    assert json.loads(run("--json", "import", out, "--as", "once more")[1])["writes"] == 5
    changed(cp, "UPDATE sp_writes SET path = 'q' WHERE task = 1 AND idx = 0")
    code, told = run("--json", "verify", "t")
    assert (code, json.loads(told)["writes"], json.loads(told)["damages"][0]["writes"]) == (6, 5, [list(KEYS[0])])
    assert f"t: writes left out: {KEYS[0]!r}" in run("repair", "t", "--into", f"sqlite:///{tmp_path}/one.db")[1]
    told = run("--json", "repair", "t", "--into", f"sqlite:///{tmp_path}/two.db")[1]
    assert json.loads(told)["lost_writes"] == {"t": [list(KEYS[0])]}

"""A value of another class in any column of a SQLite store: what a flipped bit in a row's head makes of a number, a text or a blob.

Tables are STRICT and refuse such a value, so the tests make them lax first, behind the library's back. Whatever a verb comes upon
then, its answer is what was saved, or an error of the library's own; never a TypeError from somewhere within.
"""

import random
import shutil
from pathlib import Path
from typing import Any

import apsw
import pytest

import safepoint
from safepoint import Damaged, Done, InDoubt, NotFound, Retention, SafepointError, State
from safepoint.model import new_id
from safepoint.rows import CallWrite, Commit, PauseWrite
from safepoint.testing.build import call_row, pause_row
from tests.support import damage
from tests.support.scale import scale
from tests.support.seeds import fresh_seed

TABLES = (
    "sp_tasks", "sp_inputs", "sp_checkpoints", "sp_branches", "sp_objects", "sp_calls", "sp_pauses", "sp_writes", "sp_leases", "sp_meta",
)  # fmt: skip
OTHERS: tuple[Any, ...] = (None, 0.5, float("inf"), 7, 1 << 62, "other", b"other")
WITHOUT_ROWID = ("sp_meta", "sp_branches", "sp_leases")
TASK = "two"
KNOWN = (
    ("sp_checkpoints", "created_at", None),
    ("sp_checkpoints", "created_at", float("inf")),
    ("sp_tasks", "task", 0.5),
    ("sp_tasks", "checkpoints", "other"),
    ("sp_tasks", "writes", None),
    ("sp_branches", "head_seq", None),
    ("sp_objects", "refs", 7),
    ("sp_tasks", "next_seq", 7),
    ("sp_writes", "refs", 7),
    ("sp_writes", "checkpoint", None),
)
"""What was once answered with a TypeError or the like."""


def connected(path: Path) -> apsw.Connection:
    conn = apsw.Connection(str(path))
    conn.config(apsw.SQLITE_DBCONFIG_DEFENSIVE, 0)
    return conn


@pytest.fixture(scope="module")
def lax(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, damage.Acknowledged]:
    path = tmp_path_factory.mktemp("lax") / "agent.db"
    done = damage.fill(str(path))
    with safepoint.open(f"sqlite:///{path}", durability="process") as cp:
        for task in done:
            with pytest.raises(InDoubt):
                cp.resume(task)
    conn = connected(path)
    conn.execute("PRAGMA writable_schema=ON")
    conn.execute(
        "UPDATE sqlite_schema SET sql = replace(replace(replace(replace(sql, 'INTEGER PRIMARY KEY', '@'), ' INTEGER', ' BLOB'),"
        " ' TEXT', ' BLOB'), '@', 'INTEGER PRIMARY KEY') WHERE type = 'table' AND name LIKE 'sp%'"
    )
    conn.execute(
        "UPDATE sqlite_schema SET sql = replace(replace(replace(replace(sql, ' NOT NULL', ''), ') STRICT, WITHOUT', ') WITHOUT'),"
        " 'STRICT', ''), 'CHECK', '--') WHERE type = 'table' AND name LIKE 'sp%'"
    )
    conn.close()
    return path, done


def columns(path: Path) -> list[tuple[str, str]]:
    conn = connected(path)
    try:
        found = [
            (t, row[1]) for t in TABLES for row in conn.execute(f"PRAGMA table_info({t})") if row[5] == 0 or t == "sp_meta"
        ]
    finally:
        conn.close()
    assert len(found) > 100
    return found


def attempt(verb: Any, *args: Any, **given: Any) -> Any:
    try:
        return verb(*args, **given)
    except SafepointError as error:
        return error


def ask(path: Path, done: damage.Acknowledged, folder: Path) -> None:
    """All that reads, and then all that writes."""
    try:
        cp = safepoint.open(f"sqlite:///{path}", durability="process", retention=Retention(keep_latest=2))
    except SafepointError:
        return
    with cp:
        for seq, saved in done[TASK].items():
            state = attempt(cp.load, TASK, seq=seq)
            assert not isinstance(state, NotFound)
            assert isinstance(state, SafepointError) or damage.content(state) == saved, seq
            attempt(cp.raw, TASK, seq=seq)
        latest = attempt(cp.load_latest, TASK)
        assert isinstance(latest, SafepointError) or damage.content(latest) == done[TASK][max(done[TASK])]
        heads = attempt(cp.list_checkpoints, TASK)
        if not isinstance(heads, SafepointError) and len(heads) != len(done[TASK]):
            # A listing looks at no seals: a row that says it is of another space is not in it, and verify tells.
            assert not cp.verify(TASK).ok
        attempt(cp.list_checkpoints, TASK, filter={"i": 3}, check=True)
        attempt(cp.tasks)
        for verb in (cp.status, cp.calls, cp.branches, cp.doctor, cp.plan):
            attempt(verb, TASK)
        attempt(cp.pauses, TASK, status=None)
        attempt(cp.calls, TASK, status="in_doubt")
        attempt(cp.diff, TASK, 2, 3)
        attempt(cp.store.writes, TASK, space=None)
        attempt(cp.verify)
        attempt(cp.verify, TASK)
        attempt(cp.cleanup, TASK, dry_run=True)
        attempt(cp.cleanup_all, dry_run=True)
        attempt(cp.export, TASK, str(folder / "export"))
        with safepoint.open(f"sqlite:///{folder / 'copy.db'}", durability="process") as other:
            attempt(cp.copy_to, other)
        attempt(cp.check)
        try:
            with cp.resume(TASK, recover="auto") as run:
                run.save()
        except SafepointError:
            pass
        attempt(cp.rewind, TASK, 3)
        attempt(cp.fork, TASK, 3, name="side")
        attempt(cp.resolve, TASK, 1, Done("yes"))
        attempt(cp.answer, TASK, 1, "yes")
        attempt(cp.pin, TASK, 3)
        if isinstance(latest, State):
            attempt(cp.save, latest)
        attempt(cp.cleanup, TASK)
        attempt(cp.repair, TASK)
        attempt(cp.repair)
        attempt(cp.verify)
        attempt(cp.delete_task, TASK)


@pytest.mark.scaled
def test_a_value_of_another_class_is_damage(lax: tuple[Path, damage.Acknowledged], tmp_path: Path) -> None:
    path, done = lax
    ask(damage.copied(path, tmp_path / "sound"), done, tmp_path / "sound")
    changed = 0
    seed = fresh_seed()
    rng = random.Random(seed)
    cases = [(*column, value, every) for column in columns(path) for value in OTHERS for every in (False, True)]
    known = [case for case in cases if case[:3] in KNOWN]
    for table, column, value, every in known + rng.sample(cases, scale(10, 40)):
        folder = tmp_path / "damaged"
        there = damage.copied(path, folder)
        few = "" if every or table in WITHOUT_ROWID else f" WHERE rowid = (SELECT max(rowid) - 2 FROM {table})"
        conn = connected(there)
        try:
            conn.execute(f"UPDATE OR IGNORE {table} SET {column} = ? {few}", (value,))
            changed += conn.changes() > 0
        finally:
            conn.close()
        try:
            ask(there, done, folder)
        except BaseException as error:
            error.add_note(f"seed {seed}: {table}.{column} = {value!r} {few}")
            raise
        shutil.rmtree(folder)
    assert changed > 5


@pytest.mark.parametrize("witness", [True, False], ids=["witness", "no witness"])
@pytest.mark.parametrize("name", [None, 0.5, b"two", "other"], ids=repr)
def test_a_task_without_its_name_is_not_absent(
    lax: tuple[Path, damage.Acknowledged], tmp_path: Path, name: Any, witness: bool
) -> None:
    """No listing by name comes upon it, and nobody may begin it anew. Under another name, only the witness knows of it."""
    path, _ = lax
    there = damage.copied(path, tmp_path / "damaged")
    if not witness:
        Path(f"{there}-locks").unlink()
    conn = connected(there)
    conn.execute("UPDATE sp_tasks SET task = ? WHERE task = ?", (name, TASK))
    assert conn.changes() == 1
    conn.close()
    with safepoint.open(f"sqlite:///{there}", durability="process") as cp:
        found = cp.verify()
        assert [d.where for d in found.damages if d.kind == "task"] == ([] if name == "other" else ["sp_tasks, row 2"])
        assert not found.ok
        assert cp.load("one", seq=1)
        assert cp.load_latest("three")
        if name == "other" and not witness:
            return
        for verb in (cp.load_latest, cp.status, cp.list_checkpoints, cp.branches, cp.calls, cp.plan):
            with pytest.raises(Damaged):
                verb(TASK)
        with pytest.raises(Damaged):
            cp.load(TASK, seq=1)
        with pytest.raises(Damaged):
            cp.save(State(TASK))
        with pytest.raises(Damaged), cp.resume(TASK):
            pass
        if name == "other":
            cp.save(State("new"))  # no name is lost


@pytest.mark.parametrize(("column", "what"), [("next_seq", "checkpoint"), ("next_call", "call"), ("next_pause", "pause")])
def test_a_counter_that_is_too_low_overwrites_nothing(tmp_path: Path, column: str, what: str) -> None:
    path = tmp_path / "agent.db"
    done = damage.fill(str(path))
    conn = connected(path)
    conn.execute(f"UPDATE sp_tasks SET {column} = 1 WHERE task = ?", (TASK,))
    conn.close()
    with safepoint.open(f"sqlite:///{path}", durability="process", retention=Retention.keep_all()) as cp:
        state, calls, pauses = cp.load_latest(TASK), cp.calls(TASK), cp.pauses(TASK, status=None)
        assert state is not None
        assert len(calls) == 3
        assert len(pauses) == 1
        head = cp.list_checkpoints(TASK)[-1]
        call, pause = CallWrite(call_row(head.seq), "began"), PauseWrite(pause_row(head.seq))
        commits = {
            "call": Commit(task=TASK, id=new_id(), calls=(call,)),
            "pause": Commit(task=TASK, id=new_id(), pauses=(pause,)),
        }
        with pytest.raises(Damaged):
            cp.save(state) if what == "checkpoint" else cp.store.commit(commits[what])
        assert (cp.calls(TASK), cp.pauses(TASK, status=None)) == (calls, pauses)
        assert {seq: damage.content(cp.load(TASK, seq=seq)) for seq in done[TASK]} == done[TASK]

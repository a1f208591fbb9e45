"""A file of an earlier schema is brought to today's in one step: killed anywhere it is old or new, and two at once do it once.

Invariants 2 and 3.
"""

from typing import Any

import apsw
import pytest

from safepoint import _probe
from safepoint.errors import Damaged
from safepoint.rows import CallWrite, Commit
from safepoint.stores import sqlite_schema
from safepoint.stores.sqlite import SQLiteStore
from safepoint.testing.build import Writer, call_row
from tests.support import golden, raw
from tests.support.children import Server, die, hear, tell
from tests.support.paths import ROOT

OLD = ROOT / "tests" / "golden" / "store-1.sql"
POINTS = ("migrate.step", "migrate.before", "migrate.after")


@pytest.fixture
def old(db: str) -> str:
    golden.load(OLD.read_text(encoding="utf-8"), db)
    return db


def open_and_die(path: str, point: str) -> None:
    _probe.hook = lambda name: die() if name == point else None
    SQLiteStore(path)


def open_when_told(path: str) -> str:
    tell("ready")
    hear()
    store = SQLiteStore(path)
    name = store._db.name
    assert store.task("journal") is not None
    store.close()
    return name


def meta(path: str) -> dict[str, Any]:
    return dict(raw.rows(path, "SELECT key, value FROM sp_meta"))


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("fresh", [False, True])
def test_killed_in_between_it_is_old_or_new(server: Server, db: str, point: str, fresh: bool) -> None:
    if not fresh:
        golden.load(OLD.read_text(encoding="utf-8"), db)
    child = server.start(open_and_die, db, point)
    assert child.was_killed
    version = raw.rows(db, "PRAGMA user_version")[0][0]
    assert version == (sqlite_schema.SCHEMA if point == "migrate.after" else 0 if fresh else 1)
    tables = {name for (name,) in raw.rows(db, "SELECT name FROM sqlite_schema")}
    assert ("sp_quarantine" in tables) == (version == sqlite_schema.SCHEMA)
    with golden.opened(db) as cp:
        assert len(cp.tasks()) == (0 if fresh else 5)
        assert [f for f in cp.check() if f.level == "error"] == []
    assert meta(db)["schema"] == sqlite_schema.SCHEMA


@pytest.mark.parametrize("fresh", [False, True])
def test_two_at_once_do_it_once(server: Server, db: str, fresh: bool) -> None:
    if fresh:
        SQLiteStore(db).close()
        store = SQLiteStore(db)
        Writer(store, "journal").save()
        store.close()
    else:
        golden.load(OLD.read_text(encoding="utf-8"), db)
    children = [server.start(open_when_told, db) for _ in range(4)]
    for child in children:
        child.until("ready")
    for child in children:
        child.say("go")
    assert len({child.result() for child in children}) == 1
    assert meta(db)["tasks"] == raw.rows(db, "SELECT count(*) FROM sp_tasks")[0][0]


def counted(path: str) -> list[tuple[Any, ...]]:
    return raw.rows(path, "SELECT task, calls, pauses, checkpoints, branch_sum FROM sp_tasks ORDER BY task")


def really(path: str) -> list[tuple[Any, ...]]:
    rows = raw.rows(
        path,
        "SELECT t.task, (SELECT count(*) FROM sp_calls WHERE task = t.n), (SELECT count(*) FROM sp_pauses WHERE task = t.n),"
        " (SELECT count(*) FROM sp_checkpoints WHERE task = t.n), t.branch FROM sp_tasks t ORDER BY task",
    )
    return [(*row[:4], sqlite_schema.branch_sum(row[0], row[4])) for row in rows]


def test_what_there_is_is_counted_and_goes_on_being_counted(old: str) -> None:
    with golden.opened(old) as cp:
        with cp.resume("interrupted"):
            pass
        cp.delete_task("waiting")
        writer = Writer(cp.store, "more")
        done: Any = writer.save()
        cp.store.commit(Commit(task="more", id="c", calls=tuple(CallWrite(call_row(done.seq), "began") for _ in range(3))))
        for _ in range(3):
            writer.save()
        assert cp.store.prune("more", [done.seq]).seqs == ()  # an open call stands on it
        assert cp.cleanup("history", keep_latest=1, keep_milestones=False, keep_failures=0).deleted
    assert counted(old) == really(old)
    assert ("more", 3) in [row[:2] for row in counted(old)]
    assert meta(old)["tasks"] == len(counted(old))


def test_a_process_of_an_older_safepoint_that_has_it_open_is_counted_too(old: str) -> None:
    """Such a one goes on with the statements that it has; it looked at the version when it opened the file."""
    theirs = apsw.Connection(old, flags=apsw.SQLITE_OPEN_READWRITE)
    SQLiteStore(old).close()
    columns = [row[1] for row in theirs.execute("PRAGMA table_info(sp_calls)")]
    names = ", ".join(columns[1:])
    k = theirs.execute("SELECT max(k) FROM sp_calls").fetchall()[0][0]
    theirs.execute(f"INSERT OR REPLACE INTO sp_calls (k, {names}) SELECT k + 1, {names} FROM sp_calls WHERE k = ?", (k,))
    theirs.execute(f"INSERT OR REPLACE INTO sp_calls (k, {names}) SELECT k, {names} FROM sp_calls WHERE k = ?", (k,))
    theirs.execute(
        "INSERT INTO sp_tasks (n, task, status, branch, created_at, updated_at)"
        " VALUES ((SELECT max(n) + 1 FROM sp_tasks), 'theirs', 'idle', 'main', 1, 1)"
    )
    theirs.close()
    with golden.opened(old) as cp:
        assert cp.store.task("theirs") is not None
        assert len(cp.tasks()) == 6
    assert [row[:4] for row in counted(old)] == [row[:4] for row in really(old)]


def test_what_is_damaged_already_does_not_keep_the_rest_closed(db: str) -> None:
    golden.load(OLD.read_text(encoding="utf-8"), db)
    root = raw.rows(db, "SELECT rootpage FROM sqlite_schema WHERE name = 'sp_calls'")[0][0]
    with open(db, "r+b") as file:  # by nobody else now
        file.seek((root - 1) * 8192)
        file.write(b"\xff" * 64)
    with golden.opened(db) as cp:
        assert cp.load_latest("history").messages == golden.messages(150)
        with pytest.raises(Damaged):
            cp.calls("journal")
    assert {row[1] for row in counted(db)} == {None}


def test_a_store_without_its_tables_is_no_new_store(db: str) -> None:
    SQLiteStore(db).close()
    conn = apsw.Connection(db)
    conn.execute("DROP TABLE sp_meta")
    conn.close()
    with pytest.raises(Damaged):
        SQLiteStore(db)

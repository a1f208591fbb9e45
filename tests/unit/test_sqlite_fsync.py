"""A COMMIT whose fsync fails: what the caller is told must still be true after a crash that comes right then.

Real files under a VFS that fails a chosen fsync of the log. The crash is a copy of the files, opened in another process.
"""

import os
import shutil
import subprocess
import sys
from typing import Any

import apsw
import pytest

from safepoint.errors import Unavailable
from safepoint.model import new_id
from safepoint.rows import Commit, TaskPatch
from safepoint.stores import sqlite_db
from safepoint.stores.sqlite import SQLiteStore
from safepoint.testing.build import Writer, obj

VFS = "failing-fsync"


class Disk:
    """How many of the next fsyncs of the log fail."""

    failing = 0
    failed = 0


class File(apsw.VFSFile):
    def __init__(self, name, flags):
        self.is_log = bool(flags[0] & apsw.SQLITE_OPEN_WAL)
        super().__init__("", name, flags)

    def xSync(self, flags):
        if self.is_log and Disk.failing:
            Disk.failing -= 1
            Disk.failed += 1
            raise apsw.IOError("fsync failed")
        return super().xSync(flags)


class FailingFsync(apsw.VFS):
    def __init__(self):
        super().__init__(VFS, "")

    def xOpen(self, name, flags):
        return File(name, flags)


@pytest.fixture
def store(tmp_path, monkeypatch):
    vfs = FailingFsync()
    Disk.failing = Disk.failed = 0
    plain = sqlite_db.Connection.__init__

    def through_the_vfs(conn, path, **options):
        plain(conn, path, vfs=VFS, **options)

    monkeypatch.setattr(sqlite_db.Connection, "__init__", through_the_vfs)
    store: Any = SQLiteStore(tmp_path / "agent.db")
    yield store
    store.close()
    vfs.unregister()


def after_a_crash(store, tmp_path):
    """The ids of the task's checkpoints, as a process finds them that opens the files as they are now."""
    copy = tmp_path / "crashed"
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    # By another process: this one would drop SQLite's locks. The -shm file does not survive a crash.
    for suffix in ("", "-wal"):
        subprocess.run(["cp", f"{store.path}{suffix}", copy], check=True)
    script = (
        "import sys\nfrom safepoint.stores.sqlite import SQLiteStore\n"
        "store = SQLiteStore(sys.argv[1])\nprint(*[row.id for row in store.headers('task')], store.task('task').reason)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, os.fspath(copy / "agent.db")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_trap_is_there(store, tmp_path):
    """Without the rule: the caller got an error, and after a crash the save is there."""
    writer = Writer(store)
    first: Any = writer.save()
    commit = writer.commit(obj(b"new"))
    Disk.failing = 1
    with pytest.raises(sqlite_db.CommitFailed), store._db.writing(True) as conn:
        store._write(conn, store._look(conn, commit), commit, None)
    assert Disk.failed == 1
    assert store.task("task").head == first.head
    assert after_a_crash(store, tmp_path) == [commit.id, first.head.id]


def test_what_was_called_not_saved_stays_so_after_a_crash(store, tmp_path):
    writer = Writer(store)
    first: Any = writer.save()
    Disk.failing = 1
    with pytest.raises(Unavailable) as raised:
        writer.save(obj(b"new"))
    assert Disk.failed == 1
    assert "unknown" not in raised.value.details
    assert after_a_crash(store, tmp_path) == [first.head.id]
    assert writer.save(obj(b"new")).seq == 2


def test_where_the_disk_stays_broken_the_outcome_is_unknown(store, tmp_path):
    writer = Writer(store)
    first: Any = writer.save()
    commit = writer.commit(obj(b"new"))
    Disk.failing = 2
    with pytest.raises(Unavailable) as raised:
        store.commit(commit)
    assert raised.value.details["unknown"] is True
    assert raised.value.details["id"] == commit.id
    assert commit.id in str(raised.value)
    # Repeating it is right, whatever is true.
    done = store.commit(commit)
    assert done.seq == 2
    assert after_a_crash(store, tmp_path) == [commit.id, first.head.id]


def test_a_patch_that_failed_stays_out(store, tmp_path):
    first: Any = Writer(store).save()
    Disk.failing = 1
    with pytest.raises(Unavailable):
        store.commit(Commit(task="task", id=new_id(), patch=TaskPatch(reason="lost")))
    assert after_a_crash(store, tmp_path) == [first.head.id]

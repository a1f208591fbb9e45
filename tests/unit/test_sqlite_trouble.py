"""What befell a store in trials: a disk without room, Ctrl-C in a tool's guard, a folder that is gone."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile

import apsw
import pytest

import safepoint
from safepoint import Damaged, State, StoreFull, Unavailable


@pytest.fixture
def small_disk():
    """A file system of 10 MB that the test may fill."""
    folder = tempfile.mkdtemp(prefix="safepoint-small-")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=10m", "tmpfs", folder], capture_output=True, check=False)
    try:
        if mounted.returncode:
            pytest.skip("mount is not permitted here")
        yield folder
    finally:
        if not mounted.returncode:
            subprocess.run(["umount", folder], check=False)
        os.rmdir(folder)


def fill(folder):
    with contextlib.suppress(OSError), open(f"{folder}/filler", "wb", buffering=0) as file:
        while True:
            file.write(b"z" * 4096)


def test_a_full_disk_is_store_full_and_loses_nothing(small_disk):
    with safepoint.open(f"sqlite:///{small_disk}/agent.db") as cp:
        state = State("t")
        cp.save(state)
        fill(small_disk)
        refused = 0
        for _ in range(12):
            before = (state.seq, state.created_at)
            state.messages.append(os.urandom(30_000))
            try:
                cp.save(state)
            except StoreFull as error:
                refused += 1
                assert "free" in error.remedy.lower()  # noqa: PT017
                assert (state.seq, state.created_at) == before
                state.messages.pop()
            assert cp.load_latest("t").messages == state.messages
        assert refused
        os.unlink(f"{small_disk}/filler")
        state.messages.append("goes on")
        cp.save(state)
        assert cp.load_latest("t").messages == state.messages


def test_a_guard_that_an_interrupt_left_on_harms_no_later_write(tmp_path):
    with safepoint.open(f"sqlite:///{tmp_path / 'agent.db'}") as cp:
        state = State("t")
        cp.save(state)
        with cp.connection() as connection:
            lent = connection
        lent.authorizer = lambda *asked: apsw.SQLITE_DENY  # as if Ctrl-C had kept the guard from being taken off
        state.step += 1
        assert cp.save(state).step == 1


def test_a_folder_that_is_gone_is_unavailable(tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    with safepoint.open(f"sqlite:///{folder / 'agent.db'}") as cp:
        cp.save(State("t"))
        shutil.rmtree(folder)
        with pytest.raises(Unavailable):
            cp.resume("t")


@pytest.mark.parametrize(
    "how", ["DELETE FROM sp_meta WHERE key = 'fence'", "UPDATE sp_meta SET value = 'x' WHERE key = 'fence'"]
)
def test_a_store_that_has_lost_what_fences_there_were_is_damaged(tmp_path, how):
    """A new task might else get a fence that its receiver has seen from a deleted one of that name."""
    path = tmp_path / "agent.db"
    with safepoint.open(f"sqlite:///{path}") as cp:
        with cp.resume("old"):
            pass
        with contextlib.closing(apsw.Connection(str(path))) as db:
            db.execute(how)
        with pytest.raises(Damaged, match="which fences its deleted tasks had"):
            cp.resume("new")

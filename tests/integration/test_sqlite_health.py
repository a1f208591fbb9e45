"""The files of a SQLite store are taken away or closed to it while it is used: health tells the truth, nothing is overwritten.

Field cases 60 and 64.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import safepoint
from safepoint import SafepointError, State
from tests.support.children import Server, tell

NOBODY = 65534


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server("safepoint", "safepoint.stores.sqlite")
    yield made
    made.close()


def elsewhere(code: str, *args: Any) -> None:
    """Run in another process: this one must not open the store's files."""
    subprocess.run([sys.executable, "-c", f"import os, sys, shutil\n{code}", *map(str, args)], check=True)


def save(cp: Any, i: int) -> None:
    state = cp.load_latest("task") or State("task")
    state.agent_state["i"] = i
    cp.save(state)


def errors(cp: Any) -> set[str]:
    return {finding.name for finding in cp.check() if finding.level == "error"}


HARM = {
    "an older log in its place": "shutil.copy(p + '-wal.old', p + '-new'); os.replace(p + '-new', p + '-wal')",
    "an older log written over it": "shutil.copy(p + '-wal.old', p + '-wal')",
    "no log": "os.unlink(p + '-wal')",
    "its header blanked": "f = open(p + '-wal', 'r+b'); f.write(bytes(32)); f.close()",
    "its end cut off": "os.truncate(p + '-wal', 9000)",
    "no shared memory": "os.unlink(p + '-shm')",
    "other shared memory": "os.unlink(p + '-shm'); open(p + '-shm', 'wb').close()",
}


@pytest.mark.parametrize("harm", HARM)
def test_field_case_60_health_tells_the_truth(tmp_path: Path, harm: str) -> None:
    path = tmp_path / "agent.db"
    cp = safepoint.open(f"sqlite:///{path}")
    save(cp, 0)
    elsewhere("shutil.copy(sys.argv[1] + '-wal', sys.argv[1] + '-wal.old')", path)
    for i in range(1, 4):
        save(cp, i)
    assert errors(cp) <= {"disk"}
    elsewhere(f"p = sys.argv[1]; {HARM[harm]}", path)
    files = {name: os.stat(tmp_path / name).st_size for name in os.listdir(tmp_path) if name.endswith(("-wal", ".db"))}

    assert "files" in errors(cp)
    try:
        names = [t.task_id for t in cp.tasks()]
    except SafepointError:
        names = ["task"]
    assert names == ["task"]
    try:
        save(cp, 4)
    except SafepointError:
        saved = 3
        # Nothing was written over: neither by the save nor by looking.
        for name, size in files.items():
            assert os.stat(tmp_path / name).st_size == size, name
    else:
        saved = 4  # what was done to the log harmed nothing that is still needed of it
    # In use, what was acknowledged is there.
    try:
        state = cp.load_latest("task")
    except SafepointError:
        pass
    else:
        assert state is not None
        assert state.agent_state["i"] == saved
    cp.close()


def crash_after(path: str, n: int) -> None:
    cp = safepoint.open(f"sqlite:///{path}")
    for i in range(n):
        save(cp, i)
        tell("saved", i)
    os.kill(os.getpid(), 9)


@pytest.mark.parametrize("harm", [h for h in HARM if "memory" not in h])
def test_field_case_60_after_a_kill_what_is_missing_is_missed(server: Server, tmp_path: Path, harm: str) -> None:
    path = tmp_path / "agent.db"
    child = server.start(crash_after, str(path), 1)
    child.told()
    shutil.copy(f"{path}-wal", f"{path}-wal.old")
    child = server.start(crash_after, str(path), 3)
    assert len(child.told()) == 3
    elsewhere(f"p = sys.argv[1]; {HARM[harm]}", path)
    with safepoint.open(f"sqlite:///{path}") as cp:
        for verb in (cp.load_latest, cp.list_checkpoints, cp.status, cp.resume):
            with pytest.raises(safepoint.Damaged, match=r"older than what was acknowledged|is damaged"):
                verb("task")
        with pytest.raises(safepoint.Damaged):
            cp.tasks()
        with pytest.raises(safepoint.Damaged):
            cp.save(State("task", messages=["over it"]))
        assert "witness" in errors(cp)


def give_up_rights() -> None:
    with tempfile.TemporaryDirectory() as folder, safepoint.open(f"sqlite:///{folder}/warm.db") as cp:
        for i in range(2):  # what is imported late may lie where only root can read
            save(cp, i)
        cp.check()
        os.fsencode("x".encode("ascii").decode("ascii"))
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def as_nobody(path: str) -> Any:
    """What a process without rights meets: (what of it raised, the error's file, its text)."""
    give_up_rights()
    try:
        cp = safepoint.open(f"sqlite:///{path}")
    except SafepointError as error:
        return "open", error.details.get("path"), str(error)
    try:
        loaded = cp.load_latest("task")
        assert loaded is not None
        assert loaded.agent_state["i"] == 2
        save(cp, 3)
    except SafepointError as error:
        return "save", error.details.get("path"), str(error)
    finally:
        cp.close()
    return "fine", None, ""


def make_as_nobody(path: str, n: int) -> None:
    give_up_rights()
    crash_after(path, n)


@pytest.fixture
def owned(server: Server) -> Iterator[Path]:
    """A store of a user without rights, its process killed: what was saved last is in the log only."""
    folder = Path(tempfile.mkdtemp())  # pytest's own folders are closed to others
    os.chmod(folder, 0o711)
    home = folder / "home"
    home.mkdir(0o700)
    if os.getuid() == 0:
        os.chown(home, NOBODY, NOBODY)
    child = server.start(make_as_nobody, str(home / "agent.db"), 3)
    assert len(child.told()) == 3
    yield home / "agent.db"
    os.chmod(home, 0o700)
    shutil.rmtree(folder)


def test_field_case_64_what_only_the_log_has_is_loaded(owned: Path, server: Server) -> None:
    assert os.stat(f"{owned}-wal").st_size > 0
    for suffix in ("", "-wal", "-shm", "-locks"):
        assert os.stat(f"{owned}{suffix}").st_mode & 0o777 == 0o600, suffix
    assert server.run(as_nobody, str(owned))[0] == "fine"


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm", "-locks"])
def test_field_case_64_a_file_that_may_not_be_written_is_named(owned: Path, server: Server, suffix: str) -> None:
    os.chmod(f"{owned}{suffix}", 0o400)
    before = {name: os.stat(owned.parent / name).st_size for name in os.listdir(owned.parent)}
    what, name, text = server.run(as_nobody, str(owned))
    assert name == f"{owned}{suffix}", text
    assert f"{owned}{suffix} cannot be" in text
    assert "permissions" in text or "chmod u+rw" in text
    # Where the store could be opened, closing it has folded the log into the file, as at every good end.
    assert what == "save" or {name: os.stat(owned.parent / name).st_size for name in before} == before
    os.chmod(f"{owned}{suffix}", 0o600)
    assert server.run(as_nobody, str(owned))[0] == "fine"


def test_field_case_64_a_folder_that_may_not_be_written_is_named(owned: Path, server: Server) -> None:
    for suffix in ("-wal", "-shm"):  # else everything that is needed is there
        shutil.move(f"{owned}{suffix}", f"{owned.parent.parent}/x{suffix}")
    os.chmod(owned.parent, 0o500)
    what, name, text = server.run(as_nobody, str(owned))
    assert (what, name) == ("open", str(owned.parent)), text
    assert f"chmod u+rwx {owned.parent}" in text
    os.chmod(owned.parent, 0o700)
    for suffix in ("-wal", "-shm"):
        shutil.move(f"{owned.parent.parent}/x{suffix}", f"{owned}{suffix}")
    assert server.run(as_nobody, str(owned))[0] == "fine"


def test_what_is_left_of_own_connections_is_nothing_foreign(tmp_path):
    url = f"sqlite:///{tmp_path}/agent.db"

    def found(cp):
        return next(f.level for f in cp.check() if f.name == "descriptors")

    with safepoint.open(url) as cp:
        cp.save(State("t"))
        assert cp.verify().ok
        assert found(cp) == "ok"
        with safepoint.open(url) as other:
            other.load_latest("t")
        assert found(cp) == "ok"
        with open(tmp_path / "agent.db", "rb"):
            assert found(cp) == "error"
        with open(tmp_path / "agent.db", "r+b"):
            assert found(cp) == "error"

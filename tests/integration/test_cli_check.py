"""Fitness: ``cp.check()`` and ``safepoint check`` name what is wrong with where a store lives, and leave nothing behind.

What a server can be unfit for is tested beside the store of that server.
"""

import contextlib
import ctypes
import json
import os
import re
import sqlite3
import subprocess
import sys
import tempfile
import time

import pytest

import safepoint
from safepoint import State
from safepoint.cli import main
from tests.integration.conftest import new_url


def levels(cp):
    return {finding.name: finding.level for finding in cp.check()}


def check(url):
    """By the command, in a process of its own: exit code, and level and finding by name."""
    done = subprocess.run(
        [sys.executable, "-m", "safepoint", "--store", url, "check", "--json"], capture_output=True, text=True, check=False
    )
    document = json.loads(done.stdout)
    found = {f["name"]: f for f in document["findings"]}
    assert document["ok"] is (done.returncode == 0)
    return done.returncode, {name: f["level"] for name, f in found.items()}, found


@contextlib.contextmanager
def mounted(options):
    folder = tempfile.mkdtemp(prefix="safepoint-small-")
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, check=False)
    try:
        if done.returncode:
            pytest.skip("mount is not permitted here")
        yield folder
    finally:
        if not done.returncode:
            subprocess.run(["umount", folder], check=True)
        os.rmdir(folder)


@contextlib.contextmanager
def network_share():
    """A mount of sshfs as the kernel has it when the other host is gone."""
    folder = tempfile.mkdtemp(prefix="safepoint-share-")
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        fd = os.open("/dev/fuse", os.O_RDWR)
    except OSError:
        os.rmdir(folder)
        pytest.skip("mount is not permitted here")
    options = f"fd={fd},rootmode=40000,user_id={os.geteuid()},group_id={os.getegid()}".encode()
    failed = libc.mount(b"host:/share", folder.encode(), b"fuse.sshfs", 0, options)
    os.close(fd)
    try:
        if failed:
            pytest.skip("mount is not permitted here")
        yield folder
    finally:
        if not failed:
            libc.umount2(folder.encode(), 2)
        os.rmdir(folder)


def files_below(folder):
    return {
        os.path.join(at, name): os.lstat(os.path.join(at, name)).st_size for at, _, names in os.walk(folder) for name in names
    }


def test_a_check_writes_and_reads_and_leaves_nothing_behind(cp, tmp_path):
    cp.save(State("task", messages=["a"]))
    cp.check()  # what is made once, at the first write
    tasks, files = cp.tasks(), files_below(tmp_path)
    for _ in range(3):
        found = levels(cp)
        if cp.store.persistent:
            assert found["write"] == "ok"
    assert cp.tasks() == tasks
    assert cp.verify().ok
    now = files_below(tmp_path)
    assert set(now) == set(files)
    # SQLite's log has the writes of a number that the store counts on for itself.
    assert [p for p in now if now[p] != files[p] and not p.endswith((".db-wal", ".db"))] == []
    with cp.resume("task") as run:  # also while a run holds its task
        assert levels(cp).get("write", "ok") == "ok"
        run.save()


def test_every_finding_that_is_not_ok_has_a_remedy(url, tmp_path):
    with safepoint.open(url) as cp:
        cp.save(State("task"))
        for entry in files_below(tmp_path):
            os.chmod(entry, 0o644)
        found = cp.check()
        assert any(f.level != "ok" for f in found) or not cp.store.persistent or cp.store.multi_host
        assert [f for f in found if f.level != "ok" and not f.remedy] == []


@pytest.mark.parametrize("kind", ["sqlite:///{}/agent.db", "file:///{}/store"])
def test_a_disk_that_is_nearly_full_is_a_warning_and_one_that_is_full_an_error(kind):
    with mounted("size=10m") as folder:
        url = kind.format(folder)
        with safepoint.open(url) as cp:
            cp.save(State("task"))
        code, found, _ = check(url)
        assert (code, found["disk"], found["write"]) == (0, "warning", "ok")
        with safepoint.open(url) as cp:
            cp.load_latest("task")
            with open(f"{folder}/filler", "wb", buffering=0) as filler, contextlib.suppress(OSError):
                while True:
                    filler.write(b"z" * 4096)
            finding = next(f for f in cp.check() if f.name == "write")
            assert (finding.level, bool(finding.remedy)) == ("error", True)
            # Where the store cannot even be opened any more, that is the answer.
            done = subprocess.run(
                [sys.executable, "-m", "safepoint", "--store", url, "check"], capture_output=True, text=True, check=False
            )
            assert done.returncode in (1, 2)
            assert "error" in done.stdout + done.stderr
            assert re.search("[Ff]ree (some )?space", done.stdout + done.stderr)
            os.unlink(f"{folder}/filler")
            assert levels(cp)["write"] == "ok"


def test_a_disk_without_room_for_more_files_is_a_warning_for_files():
    with mounted("size=1g,nr_inodes=500") as folder:
        with safepoint.open(f"file:///{folder}/store") as cp:
            cp.save(State("task"))
        code, _, said = check(f"file:///{folder}/store")
        assert (code, said["disk"]["level"]) == (0, "warning")
        assert "more files" in said["disk"]["text"]


def test_a_file_on_a_network_share_is_refused_by_name():
    with network_share() as folder:
        url = f"sqlite:///{folder}/agent.db"
        with pytest.raises(safepoint.UsageError, match=r"lies on a network file system \(fuse\.sshfs\)"):
            safepoint.open(url)
        done = subprocess.run(
            [sys.executable, "-m", "safepoint", "--store", url, "check"],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert (done.returncode, done.stdout) == (2, "")
        assert "network file system (fuse.sshfs)" in done.stderr
        assert "?network_ok=true" in done.stderr


def test_the_standard_librarys_sqlite_in_this_process_is_an_error(tmp_path, monkeypatch, capsys):
    path = tmp_path / "agent.db"
    monkeypatch.setenv("SAFEPOINT_URL", f"sqlite:///{path}")
    with safepoint.open(f"sqlite:///{path}") as cp:
        cp.save(State("task"))
        assert levels(cp)["descriptors"] == "ok"
        other = sqlite3.connect(path)
        other.execute("SELECT count(*) FROM sp_meta").fetchall()
        finding = next(f for f in cp.check() if f.name == "descriptors")
        assert (finding.level, "cp.connection()" in finding.remedy) == ("error", True)
        assert main(["check"]) == 1  # in this very process
        assert "something else in this process has" in capsys.readouterr().out
        # Another process sees its own descriptors, and nothing wrong with them.
        assert check(f"sqlite:///{path}")[1]["descriptors"] == "ok"
        other.close()


@pytest.mark.parametrize("kind", ["postgres", "redis"])
def test_a_server_is_checked_by_the_command(kind, tmp_path):
    url = new_url(kind, tmp_path)
    code, found, said = check(url)
    assert {"write", "server", "role", "replicas", "clock"} <= set(found)
    assert found["write"] == "ok"
    assert code == (1 if "error" in found.values() else 0)
    assert [name for name, f in said.items() if f["level"] != "ok" and not f["remedy"]] == []
    with safepoint.open(url) as cp:
        assert cp.tasks() == []


@pytest.mark.parametrize("url", ["postgresql://u:hush@127.0.0.1:1/x?timeout=1", "redis://u:hush@127.0.0.1:1/0?timeout=1"])
def test_a_server_that_is_not_there_is_an_error_within_the_timeout(url):
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "safepoint", "--store", url, "check"], capture_output=True, text=True, check=False, timeout=60
    )
    assert time.monotonic() - began < 20
    assert done.returncode in (1, 4)
    assert "127.0.0.1:1" in done.stdout + done.stderr
    assert "hush" not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_an_error_of_the_check_is_exit_code_1_and_a_warning_0(tmp_path):
    path = tmp_path / "agent.db"
    url = f"sqlite:///{path}"
    with safepoint.open(url) as cp:
        cp.save(State("task"))
    os.chmod(path, 0o640)
    code, found, _ = check(url)
    assert (code, found["permissions"]) == (0, "warning")

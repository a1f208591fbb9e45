"""A repair that is killed: the store is as it was or as it is to be, and doing it again finishes the work."""

import shutil
import signal
from pathlib import Path

import pytest

import safepoint
from safepoint import State
from tests.support.children import Server
from tests.support.repairing import repairing
from tests.support.scale import scale
from tests.support.spoil import spoil
from tests.support.stores import KINDS, place


def message(i: int) -> dict[str, str]:
    return {"role": "user", "content": f"message {i} " + "x" * 400}


def spoiled(url: str, tmp_path: Path) -> str:
    """A store of three tasks, two of which have a damaged head."""
    with safepoint.open(url) as cp:
        for task in ("a", "b", "c"):
            state = State(task)
            for i in range(5):
                state.step = i
                state.messages.append(message(i))
                cp.save(state)
        if cp.store.chunked:
            for task in ("a", "b"):
                assert spoil(cp, task, b"message 4 ", "corrupt") == 1
    if url.startswith("file"):
        for task in ("a", "b"):
            (path,) = (tmp_path / "agent" / task).rglob("*5.json")
            path.write_bytes(path.read_bytes()[:-40])
    return url


def look(url: str) -> dict[str, int]:
    """How far each task's newest good checkpoint is; every one that verify calls good loads."""
    found = {}
    with safepoint.open(url) as cp:
        for task in ("a", "b", "c"):
            (*_, last) = [b for b in cp.verify(task).branches if b.newest_good is not None]
            for first, end in last.loads:
                for seq in range(first, end + 1):
                    assert cp.load(task, seq=seq).messages == [message(i) for i in range(min(seq, 4 if seq > 5 else seq))]
            found[task] = last.newest_good or 0
    return found


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "cluster"])
@pytest.mark.parametrize("point", ["repair.before", "repair.after"])
@pytest.mark.parametrize("nth", [1, 2])
def test_in_place(server: Server, tmp_path: Path, kind: str, point: str, nth: int) -> None:
    with place(kind, tmp_path) as made:
        killed_in_place(server, spoiled(made.url, tmp_path), point, nth)


def killed_in_place(server: Server, url: str, point: str, nth: int) -> None:
    assert look(url) == {"a": 4, "b": 4, "c": 5}
    child = server.start(repairing, url, True, point, nth)
    assert child.wait() == -signal.SIGKILL
    done = nth if point == "repair.after" else nth - 1
    assert look(url) == {"a": 6 if done > 0 else 4, "b": 6 if done > 1 else 4, "c": 5}
    assert server.run(repairing, url, True, "") == ["main~1"] * (2 - done)
    with safepoint.open(url) as cp:
        assert cp.verify().ok
    assert look(url) == {"a": 6, "b": 6, "c": 5}


@pytest.mark.scaled
@pytest.mark.parametrize("point", ["file.renamed", "file.written"])
def test_files_of_one_in_place(server: Server, tmp_path: Path, point: str) -> None:
    """Every file that a repair of the file store writes, as the last one."""
    killed = 0
    for nth in range(1, 30, scale(3, 1)):
        folder = tmp_path / str(nth)
        folder.mkdir()
        url = spoiled(f"file:///{folder}/agent", folder)
        child = server.start(repairing, url, True, point, nth)
        if child.wait() != -signal.SIGKILL:
            break
        killed += 1
        look(url)
        server.run(repairing, url, True, "")
        with safepoint.open(url) as cp:
            found = cp.verify()
            assert found.ok, str(found)
        shutil.rmtree(folder)
    assert killed > 1


def test_into_a_copy(server: Server, tmp_path: Path) -> None:
    url = spoiled(f"sqlite:///{tmp_path}/agent.db", tmp_path)
    child = server.start(repairing, url, False, "write_task.before", 2)
    assert child.wait() == -signal.SIGKILL
    with safepoint.open(f"{url}.repaired") as cp:
        assert [task.task_id for task in cp.tasks()] == ["a"]
        assert cp.verify().ok

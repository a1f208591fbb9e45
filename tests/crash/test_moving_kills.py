"""Copies, imports and exports that are killed: the target has whole tasks only, and doing it again finishes the work."""

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import safepoint
from tests.support import moved
from tests.support.children import Server
from tests.support.moved import facts
from tests.support.scale import scale
from tests.support.stores import CLOCKED, place

SERVERS = [kind for kind in CLOCKED if kind != "cluster"]
COPY_POINTS = ("copy.task", "write_task.staged", "write_task.before", "write_task.after")
REPLACE_POINTS = [
    *(("sqlite", point, 1) for point in ("write_task.staged", "write_task.before", "write_task.after")),
    *(("file", "file.written", n) for n in (1, 2, 3, 4)),
    *(("file", "file.renamed", n) for n in (1, 2, 3, 4)),
    *((to, point, 1) for to in SERVERS for point in ("write_task.staged", "write_task.before", "write_task.after")),
]
IMPORT_POINTS = ("import.read", "write_task.staged", "write_task.before", "write_task.after")


@pytest.fixture(scope="module")
def source(server: Server, tmp_path_factory: pytest.TempPathFactory) -> str:
    url = f"sqlite:///{tmp_path_factory.mktemp('moved')}/source.db"
    server.run(moved.fill_url, url)
    return url


@pytest.fixture(scope="module")
def wanted(source: str) -> dict[str, Any]:
    with safepoint.open(source) as cp:
        return {t.task_id: facts(cp, t.task_id) for t in cp.tasks()}


@pytest.fixture
def target(to: str, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty store of the kind that the test is of."""
    with place(to, tmp_path) as made:
        yield made.url


def check_whole(url: str, wanted: dict[str, Any]) -> set[str]:
    """Every task that is there is whole; which they are."""
    with safepoint.open(url) as cp:
        found = {t.task_id for t in cp.tasks()}
        for task in found:
            assert facts(cp, task) == wanted[task]
        return found


@pytest.mark.scaled
@pytest.mark.parametrize(
    ("to", "point", "every"),
    [
        *(("sqlite", point, scale(4, 1)) for point in COPY_POINTS),
        ("file", "copy.task", scale(4, 1)),
        ("file", "file.written", scale(23, 3)),
        ("file", "file.renamed", scale(23, 3)),
        *((kind, point, scale(7, 1)) for kind in SERVERS for point in COPY_POINTS),
    ],
)
def test_a_copy_killed_at_each_point(
    server: Server, source: str, wanted: dict[str, Any], target: str, to: str, point: str, every: int
) -> None:
    killed = 0
    while True:
        child = server.start(moved.copying, source, target, point, 1 + every * killed)
        if child.wait() != -signal.SIGKILL:
            assert child.result() == len(wanted)
            break
        killed += 1
        check_whole(target, wanted)
        assert killed < 200
    assert killed, "the point was never passed"
    assert check_whole(target, wanted) == set(wanted)


@pytest.mark.parametrize(("to", "point", "nth"), REPLACE_POINTS)
def test_a_copy_that_follows_its_original_killed(
    server: Server, source: str, tmp_path: Path, target: str, to: str, point: str, nth: int
) -> None:
    """The earlier copy is there until the newer one is."""
    one, two = f"sqlite:///{tmp_path}/one.db", target
    server.run(moved.copying, source, one)
    server.run(moved.copying, one, two)
    with safepoint.open(two) as cp:
        before = facts(cp, "kept")
    with safepoint.open(one) as cp:
        for more in ("more", "and more"):
            state = cp.load_latest("kept")
            assert state is not None
            state.messages.append(more)
            cp.save(state)
        cp.store.prune("kept", [2, 3])
        after = facts(cp, "kept")
    child = server.start(moved.copying, one, two, point, nth)
    assert child.wait() == -signal.SIGKILL
    with safepoint.open(two) as cp:
        assert facts(cp, "kept") in (before, after)
        assert [d for d in cp.verify().damages if d.kind != "stray"] == []
    server.run(moved.copying, one, two)
    with safepoint.open(two) as cp:
        assert facts(cp, "kept") == after
        assert cp.verify().ok


@pytest.mark.parametrize("to", ["sqlite", *SERVERS])
@pytest.mark.parametrize("point", IMPORT_POINTS)
def test_an_import_killed_at_each_point(
    server: Server, source: str, wanted: dict[str, Any], tmp_path: Path, target: str, to: str, point: str
) -> None:
    file = str(tmp_path / "rich.gz")
    server.run(moved.exporting, source, "rich", file)
    child = server.start(moved.importing, file, target, point)
    assert child.wait() == -signal.SIGKILL
    assert check_whole(target, wanted) <= {"rich"}
    assert server.run(moved.importing, file, target) == ("unchanged" if point == "write_task.after" else "imported")
    assert check_whole(target, wanted) == {"rich"}


def test_an_export_killed_leaves_the_file_that_was_there(server: Server, source: str, tmp_path: Path) -> None:
    file = tmp_path / "rich.safepoint"
    file.write_text("precious")
    child = server.start(moved.exporting, source, "rich", str(file), "export.written")
    assert child.wait() == -signal.SIGKILL
    assert file.read_text() == "precious"
    server.run(moved.exporting, source, "rich", str(file))
    assert file.read_bytes().startswith(b'{"safepoint": ')
    assert (file.stat().st_mode & 0o777) == 0o600


@pytest.mark.scaled
@pytest.mark.parametrize("to", ["sqlite", "file", *SERVERS])
def test_copies_killed_at_any_moment(server: Server, source: str, wanted: dict[str, Any], tmp_path: Path, to: str) -> None:
    rng = random.Random(3)
    for n in range(scale(3 if to in {"sqlite", "file"} else 2, 10)):
        folder = tmp_path / str(n)
        folder.mkdir()
        with place(to, folder) as made:
            child = server.start(moved.copying, source, made.url)
            time.sleep(rng.uniform(0, 0.15))
            child.kill()
            if to in SERVERS or list(folder.iterdir()):
                check_whole(made.url, wanted)
            assert server.run(moved.copying, source, made.url) == len(wanted)
            assert check_whole(made.url, wanted) == set(wanted)

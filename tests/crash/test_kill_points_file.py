"""Kill -9 at every named point of the file store, and at random moments: nothing acknowledged is lost, nothing is done twice.

Invariants 1, 2 and 5. The agents are those of test_kill_points.py; what is transactional there is idempotent here.
"""

import re
from collections import Counter
from pathlib import Path

import pytest

import safepoint
from tests.crash.test_kill_points import carry_on, nth_hits
from tests.crash.test_random_kills import killed_at_random_moments
from tests.support import agents
from tests.support.children import Server
from tests.support.effects import Effects
from tests.support.paths import ROOT
from tests.support.scale import scale

AGENT_POINTS = (
    *("acquire.after", "acquire.lease", "acquire.locked", "commit.after", "commit.before", "commit.begin", "commit.line"),
    *("file.renamed", "file.written", "release.after", "release.patched"),
)
SAVER_POINTS = ("commit.before", "commit.line", "file.renamed", "file.written", "prune.after", "prune.before")
DELETE_POINTS = ("delete.after", "delete.before")
REPAIR_POINTS = ("repair.after", "repair.before")  # of all stores: see test_repair.py
ROUNDS, SIZE = 5, 20_000


def test_the_lists_name_every_point() -> None:
    found: set[str] = set()
    for path in (ROOT / "src" / "safepoint" / "stores").glob("file*.py"):
        found |= set(re.findall(r'\bat\("([a-z.]+)"\)', path.read_text()))
    assert found == {*AGENT_POINTS, *SAVER_POINTS, *DELETE_POINTS, *REPAIR_POINTS}


@pytest.fixture
def db(tmp_path: Path) -> str:
    return f"file:///{tmp_path}/store"


@pytest.fixture(scope="session")
def agent_hits(server: Server, effects: Effects, tmp_path_factory: pytest.TempPathFactory) -> Counter[str]:
    outcome, hits = server.run(agents.work, f"file:///{tmp_path_factory.mktemp('count')}/s", "t", effects.world())
    assert outcome["status"] == "finished"
    return hits


@pytest.mark.scaled
@pytest.mark.parametrize("point", AGENT_POINTS)
def test_an_agent_killed_at_a_point(point: str, server: Server, effects: Effects, agent_hits: Counter[str], db: str) -> None:
    rounds = scale(1, 5)
    for r, nth in enumerate(nth_hits(agent_hits[point], rounds + 1)[1 : rounds + 1]):
        world, task = effects.world(), f"t{r}"
        child = server.start(agents.work, db, task, world, point, nth)
        messages = child.told()
        assert child.was_killed, f"{point} was not reached {nth} times"
        carry_on(server, world, db, task, messages)
        world.forget()


@pytest.mark.scaled
@pytest.mark.parametrize("point", SAVER_POINTS)
def test_a_saver_killed_at_a_point(point: str, server: Server, db: str, tmp_path: Path) -> None:
    hits = server.run(agents.saver, f"file:///{tmp_path}/count", "t", ROUNDS, SIZE)
    rounds = scale(1, 6)
    for r, nth in enumerate(nth_hits(hits[point], rounds)[:rounds]):
        task = f"t{r}"
        child = server.start(agents.saver, db, task, ROUNDS, SIZE, point, nth)
        saves = child.told()
        assert child.was_killed, f"{point} was not reached {nth} times"
        with safepoint.open(db) as cp:
            state = cp.load_latest(task)
            acknowledged = saves[-1][3] if saves else 0
            i = state.agent_state["i"] if state is not None else 0
            assert i in {acknowledged, acknowledged + 1}
            assert list((tmp_path / "store" / ".tmp").iterdir()) == []
        server.run(agents.saver, db, task, ROUNDS, SIZE)
        with safepoint.open(db) as cp:
            for header in cp.list_checkpoints(task):
                state = cp.load(task, seq=header.seq)
                assert state.messages == [agents.page(state.agent_state["i"], j, SIZE // 8) for j in range(8)]
            assert cp.list_checkpoints(task, limit=1)[0].seq == ROUNDS
            report = cp.verify()
            assert report.ok, report


def delete(db: str, task: str, point: str) -> None:
    with safepoint.open(db) as cp:
        agents.kill_at(point, 1)
        cp.delete_task(task)


@pytest.mark.parametrize("point", DELETE_POINTS)
def test_a_task_is_deleted_whole_or_not_at_all(point: str, server: Server, db: str, tmp_path: Path) -> None:
    server.run(agents.saver, db, "t", ROUNDS, SIZE)
    child = server.start(delete, db, "t", point)
    child.told()
    assert child.was_killed
    with safepoint.open(db) as cp:
        assert (cp.load_latest("t") is None) is (point == "delete.after")
        assert cp.verify().ok
    assert not [p for p in (tmp_path / "store").iterdir() if p.name.startswith(".deleted")]


@pytest.mark.scaled
def test_killed_at_random(server: Server, effects: Effects, db: str) -> None:
    killed_at_random_moments("process", scale(8, 160) // 2, server, effects, db)

"""Kill -9 at every named point of the stores on servers, and at random moments: nothing acknowledged is lost, nothing is done
twice. Invariants 1, 2 and 5.

The agents are those of test_kill_points.py. What is killed here is the client: servers have their own tests.
"""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import safepoint
from tests.crash.test_kill_points import INSIDE, carry_on, nth_hits
from tests.crash.test_random_kills import killed_at_random_moments
from tests.support import agents
from tests.support.children import Server
from tests.support.effects import Effects
from tests.support.paths import ROOT
from tests.support.scale import SOAK, scale
from tests.support.stores import CLOCKED, place

# Of the run's own, which lie around those of the store.
RUN = (
    *("effect.after", "effect.before", "intent.after", "intent.before", "result.after", "result.before"),
    *("save.after", "save.before"),
)
AGENT_POINTS = {
    "postgres": (
        *("acquire.after", "commit.after", "commit.before", "commit.begin", "release.after"),
        *("transact.after", "transact.before", "transact.body"),
    ),
    "redis": (
        *("acquire.after", "commit.after", "commit.before", "commit.begin", "redis.answer", "redis.send", "release.after"),
    ),
}
SAVER_POINTS = {
    "postgres": ("commit.after", "commit.before", "commit.staged", "prune.after", "prune.before", "prune.mark"),
    "redis": ("commit.after", "commit.before", "commit.staged", "redis.answer", "redis.send"),
}
DELETE_POINTS = {"postgres": ("delete.after", "delete.before", "delete.rest"), "redis": ("delete.after",)}
# Of long sweeps, and of whole tasks and repairs: see test_cleanup_kills.py, test_moving_kills.py and test_repair_kills.py.
OTHERS = {
    *("sweep.marked", "sweep.objects", "sweep.rows"),
    *("write_task.staged", "write_task.before", "write_task.after", "repair.before", "repair.after"),
}
ROUNDS, SIZE = 4, 1_600_000
IN_SMALL = {"cluster": ("commit.after", "commit.before", "effect.after", "redis.answer")}
"""What is tried outside of a soak where that is not all: on a cluster, a point of each sort. Its scripts are those of one server."""


def points_of(table: dict[str, tuple[str, ...]], *more: str) -> list[tuple[str, str]]:
    return [
        (kind, point)
        for kind in CLOCKED
        for point in (*table["redis" if kind == "cluster" else kind], *more)
        if SOAK or point in IN_SMALL.get(kind, (point,))
    ]


@pytest.mark.parametrize("kind", ["postgres", "redis"])
def test_the_lists_name_every_point(kind: str) -> None:
    found: set[str] = set()
    for path in (ROOT / "src" / "safepoint" / "stores" / kind).glob("*.py"):
        found |= set(re.findall(r'\bat\("([a-z_.]+)"\)', path.read_text()))
    assert found - OTHERS == {*AGENT_POINTS[kind], *SAVER_POINTS[kind], *DELETE_POINTS[kind]}


@pytest.fixture
def db(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with place(request.param, tmp_path) as made:
        yield made.url


_hits: dict[tuple[str, str], Counter[str]] = {}


def hits_of(what: str, kind: str, server: Server, effects: Effects, folder: Path) -> Counter[str]:
    """How often each point is passed in a whole run."""
    if (what, kind) not in _hits:
        with place(kind, folder) as made:
            if what == "agent":
                outcome, _hits[what, kind] = server.run(agents.work, made.url, "t", effects.world())
                assert outcome["status"] == "finished"
            else:
                _hits[what, kind] = server.run(agents.saver, made.url, "t", ROUNDS, SIZE)
    return _hits[what, kind]


@pytest.mark.scaled
@pytest.mark.parametrize(("db", "point"), points_of(AGENT_POINTS, *RUN, *INSIDE), indirect=["db"])
def test_an_agent_killed_at_a_point(
    point: str, server: Server, effects: Effects, db: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    kind = request.node.callspec.params["db"]
    hits = hits_of("agent", kind, server, effects, tmp_path)
    rounds = scale(1, 2 if kind == "cluster" else 3)
    # Not the very last: how often a request is made anew differs from run to run, as calls are made beside each other.
    assert hits[point]
    spread = nth_hits(max(1, hits[point] * 8 // 10), rounds + 1)[1:]
    for r in range(rounds):
        world, task = effects.world(), f"t{r}"
        # Every other one in a write that nobody can ask about, as in the tests of SQLite.
        if r % 2 == 1 and not point.startswith(("acquire", "release", "save", "transact", "redis")):
            nth, during = 1 + r // 2 % 2, "post"
        else:
            nth, during = spread[r], ""
        child = server.start(agents.work, db, task, world, point, nth, during)
        messages = child.told()
        assert child.was_killed, f"{point} was not reached {nth} times"
        carry_on(server, world, db, task, messages)
        world.forget()


@pytest.mark.scaled
@pytest.mark.parametrize(("db", "point"), points_of(SAVER_POINTS), indirect=["db"])
def test_a_saver_killed_at_a_point(
    point: str, server: Server, effects: Effects, db: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    kind = request.node.callspec.params["db"]
    hits = hits_of("saver", kind, server, effects, tmp_path)
    rounds = scale(1, 2 if kind == "cluster" else 3)
    for r, nth in enumerate(nth_hits(hits[point], rounds + 1)[1 : rounds + 1]):
        task = f"t{r}"
        child = server.start(agents.saver, db, task, ROUNDS, SIZE, point, nth)
        saves = child.told()
        assert child.was_killed, f"{point} was not reached {nth} times"
        with safepoint.open(db) as cp:
            state = cp.load_latest(task)
            acknowledged = saves[-1][3] if saves else 0
            i = state.agent_state["i"] if state is not None else 0
            # Of the save that was under way nobody was told: it is there whole, or it is not there.
            assert i in {acknowledged, acknowledged + 1}
            if state is not None:
                assert state.messages == [agents.page(i, j, SIZE // 8) for j in range(8)]
        server.run(agents.saver, db, task, ROUNDS, SIZE)
        with safepoint.open(db) as cp:
            for header in cp.list_checkpoints(task):
                state = cp.load(task, seq=header.seq)
                assert state.messages == [agents.page(state.agent_state["i"], j, SIZE // 8) for j in range(8)]
            assert cp.list_checkpoints(task, limit=1)[0].seq == ROUNDS
            report = cp.verify(task)
            assert report.ok, str(report)
            cp.delete_task(task)


def delete(db: str, task: str, point: str) -> None:
    if point == "delete.rest":  # what is left of a large task is removed in many steps
        from safepoint.stores.postgres import sweep

        sweep.LARGE, sweep.REST = -1, 2
    with safepoint.open(db) as cp:
        agents.kill_at(point, 1)
        cp.delete_task(task)


@pytest.mark.parametrize(("db", "point"), points_of(DELETE_POINTS), indirect=["db"])
def test_a_task_is_deleted_whole_or_not_at_all(point: str, server: Server, db: str) -> None:
    server.run(agents.saver, db, "t", ROUNDS, SIZE)
    server.run(agents.saver, db, "other", 1, 8000)
    child = server.start(delete, db, "t", point)
    child.told()
    assert child.was_killed
    with safepoint.open(db) as cp:
        there = cp.load_latest("t") is not None
        assert there is (point == "delete.before")
        assert ("t" in {task.task_id for task in cp.tasks()}) is there
        report = cp.verify()
        assert report.ok, str(report)
        if there:
            cp.delete_task("t")
        assert cp.save(safepoint.State("t")).seq == 1, "a new one of that name begins anew"
        report = cp.verify()
        assert report.ok, str(report)


@pytest.mark.scaled
@pytest.mark.parametrize("db", CLOCKED, indirect=True)
def test_killed_at_random(server: Server, effects: Effects, db: str) -> None:
    killed_at_random_moments("process" if "redis" in db else "full", scale(3, 60), server, effects, db)

"""Kill -9 at every named point of a save, an intent, an effect and a result: nothing acknowledged is lost, nothing is done twice.

Invariants 1, 2 and 5.
"""

import re
from collections import Counter
from typing import Any

import pytest

import safepoint
from tests.support import agents
from tests.support.checks import check_end, check_stored, settle_by_hand
from tests.support.children import Server
from tests.support.effects import Effects, World
from tests.support.paths import ROOT
from tests.support.scale import scale

# Of the run's: one agent passes them all.
AGENT_POINTS = (
    "acquire.after",
    "acquire.locked",
    "commit.after",
    "commit.before",
    "commit.begin",
    "commit.objects",
    "commit.row",
    "effect.after",
    "effect.before",
    "intent.after",
    "intent.before",
    "release.after",
    "result.after",
    "result.before",
    "save.after",
    "save.before",
    "transact.after",
    "transact.before",
    "transact.body",
)
# Of the agent's own tools: before and after their effect, with the answer not yet given.
INSIDE = ("inside.after", "inside.before")
# Of large explicit saves with retention.
SAVER_POINTS = (
    "commit.after",
    "commit.before",
    "commit.begin",
    "commit.objects",
    "commit.row",
    "commit.staged",
    "prune.after",
    "prune.before",
    "prune.mark",
)
# Of sweeps of long tasks: see test_sweep_kills.py.
SWEEP_POINTS = ("sweep.marked", "sweep.objects", "sweep.rows")
# Of the migration of an older file: see test_migrate.py.
MIGRATE_POINTS = ("migrate.after", "migrate.before", "migrate.step")
# Of the commit that goes back, and of the acceptance of an older store before it: see test_going_back.py.
BRANCH_POINTS = ("branch.after", "branch.before")
ACCEPT_POINTS = ("accept.after",)
# Of copies, imports and exports: see test_moving_kills.py.
MOVING_POINTS = ("copy.task", "export.written", "import.read")
# Of repairs in place: see test_repair_kills.py.
REPAIR_POINTS = ("repair.after", "repair.before")
ROUNDS, SIZE = 4, 1_600_000


def test_the_lists_name_every_point() -> None:
    found: set[str] = set()
    for path in (ROOT / "src" / "safepoint").rglob("*.py"):
        if "stores" in path.parts and not path.name.startswith("sqlite"):
            continue  # another store's points have another file of tests
        found |= set(re.findall(r'\bat\("([a-z.]+)"\)', path.read_text()))
    assert found == {
        *AGENT_POINTS,
        *SAVER_POINTS,
        *SWEEP_POINTS,
        *MIGRATE_POINTS,
        *BRANCH_POINTS,
        *ACCEPT_POINTS,
        *MOVING_POINTS,
        *REPAIR_POINTS,
    }
    assert len(found) >= 12


def nth_hits(hits: int, rounds: int) -> list[int]:
    """Which hits of a point to die at: spread over the run, the first and the last among them."""
    assert hits > 0, "the point is never reached"
    return sorted({1 + (hits - 1) * r // max(rounds - 1, 1) for r in range(rounds)}) * rounds


@pytest.fixture(scope="session")
def agent_hits(server: Server, effects: Effects, tmp_path_factory: pytest.TempPathFactory) -> Counter[str]:
    db = str(tmp_path_factory.mktemp("count") / "a.db")
    outcome, hits = server.run(agents.work, db, "t", effects.world())
    assert outcome["status"] == "finished"
    return hits


@pytest.fixture(scope="session")
def saver_hits(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Counter[str]:
    db = str(tmp_path_factory.mktemp("count") / "a.db")
    return server.run(agents.saver, db, "t", ROUNDS, SIZE)


@pytest.mark.scaled
@pytest.mark.parametrize("point", [*AGENT_POINTS, *INSIDE])
def test_an_agent_killed_at_a_point(point: str, server: Server, effects: Effects, agent_hits: Counter[str], db: str) -> None:
    rounds = scale(2, 20)
    spread = nth_hits(agent_hits[point], rounds)
    for r in range(rounds):
        world = effects.world()
        task = f"t{r}"
        # Every other one in a write that nobody can ask about, where the point lies in its way; else all over the run.
        if r % 2 == 0 and not point.startswith(("acquire", "release", "save", "transact")):
            nth, during = 1 + r // 2 % 2, "post"
        else:
            nth, during = spread[r], ""
        child = server.start(agents.work, db, task, world, point, nth, during)
        messages = child.told()
        assert child.was_killed, f"{point} was not reached {nth} times"
        carry_on(server, world, db, task, messages)
        world.forget()


def carry_on(server: Server, world: World, db: str, task: str, messages: list[Any]) -> None:
    """After a kill: what was acknowledged is there, and resuming to the end does each thing once."""
    before, given = world.done(), {m[2] for m in messages if m[0] == "got"}
    check_stored(db, task, messages)
    for _ in range(len(agents.keys_of(task)["post"]) + 1):
        child = server.start(agents.work, db, task, world)
        outcome, _ = child.result()
        messages += child.heard
        if outcome["status"] == "finished":
            break
        settle_by_hand(world, db, task, outcome)
    else:
        raise AssertionError("never finished")
    check_end(world, db, task, messages, outcome)
    done = world.done()
    assert {k: done[k] for k in given & done.keys()} == {k: before[k] for k in given & done.keys()}, (
        "a known result was got again"
    )
    for key in agents.keys_of(task)["think"]:
        # One whose reply nobody had seen may have been asked once more.
        assert done[key] - before.get(key, 0) <= 1


@pytest.mark.scaled
@pytest.mark.parametrize("point", SAVER_POINTS)
def test_a_saver_killed_at_a_point(point: str, server: Server, saver_hits: Counter[str], db: str) -> None:
    rounds = scale(1, 20)
    for r, nth in enumerate(nth_hits(saver_hits[point], rounds)[:rounds]):
        task = f"t{r}"
        child = server.start(agents.saver, db, task, ROUNDS, SIZE, point, nth)
        saves = child.told()
        assert child.was_killed, f"{point} was not reached {nth} times"
        with safepoint.open(f"sqlite:///{db}") as cp:
            state = cp.load_latest(task)
            acknowledged = saves[-1][3] if saves else 0
            i = state.agent_state["i"] if state is not None else 0
            # Of the save that was under way nobody was told: it is there whole, or it is not there.
            assert i in {acknowledged, acknowledged + 1}
            if state is not None:
                assert state.messages == [agents.page(i, j, SIZE // 8) for j in range(8)]
        server.run(agents.saver, db, task, ROUNDS, SIZE)
        with safepoint.open(f"sqlite:///{db}") as cp:
            for header in cp.list_checkpoints(task):
                state = cp.load(task, seq=header.seq)
                assert state.messages == [agents.page(state.agent_state["i"], j, SIZE // 8) for j in range(8)]
            assert cp.list_checkpoints(task, limit=1)[0].seq == ROUNDS
            cp.delete_task(task)

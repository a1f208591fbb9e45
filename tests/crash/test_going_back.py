"""Kill -9 in the commit that falls back, rewinds, forks or starts fresh: the old current branch, or the new one whole; nothing
between. And whatever came of it, the agent is then run to its end without a write being made twice. Invariants 2 and 5."""

import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import safepoint
from tests.crash.test_kill_points import BRANCH_POINTS, nth_hits
from tests.support import going_back
from tests.support.children import Server
from tests.support.effects import Effects, World
from tests.support.paths import ROOT
from tests.support.scale import SOAK
from tests.support.spoil import lengthen_root
from tests.support.stores import KINDS, place

HOWS = ("fallback", "fresh", "at", "rewind", "block", "fork", "branch")


STORES = [kind for kind in KINDS if kind != "cluster"]


def points_of(kind: str) -> list[str]:
    """All named points that the store of this kind passes in a commit or a lease, and those around."""
    found = set(BRANCH_POINTS)
    stores = ROOT / "src" / "safepoint" / "stores"
    for path in (*stores.glob(f"{kind}*.py"), *stores.glob(f"{kind}/*.py")):
        found |= set(re.findall(r'\bat\("([a-z._]+)"\)', path.read_text()))
    return sorted(found)


@pytest.fixture(scope="session")
def made(server: Server, effects: Effects, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Counter[str]]:
    """How often each point is passed, by kind of store and way to go back."""
    found = {}
    for kind in STORES:
        for how in HOWS:
            with place(kind, tmp_path_factory.mktemp("count")) as made:
                world = effects.world()
                prepare(server, made.url, "t", world, how)
                found[kind, how] = server.run(going_back.go_back, made.url, "t", world, how)
    return found


def prepare(server: Server, url: str, task: str, world: World, how: str) -> None:
    server.run(going_back.begin, url, task, world)
    if how == "branch":
        server.run(going_back.go_back, url, task, world, "fork")
    if how == "fallback":
        damage(url, task, [4, 3])
    if how == "fresh":
        damage(url, task, [1, 2, 3, 4])


def damage(url: str, task: str, seqs: list[int]) -> None:
    """A byte more in what is stored of these checkpoints."""
    if not url.startswith("file"):
        for seq in seqs:
            lengthen_root(url, task, seq)
        return
    for seq in seqs:
        (path,) = [p for p in Path(url.removeprefix("file:///")).rglob(f"{seq}.json") if f"/{task}/" in str(p)]
        path.write_text(path.read_text().replace('"go"', '"gone"', 1))


def branches(url: str, task: str) -> tuple[str, dict[str, tuple[int, int]]]:
    """The current branch, and of each its head and how many checkpoints it has."""
    with safepoint.open(url) as cp:
        return cp.status(task).branch, {b.name: (b.seq, b.kept) for b in cp.branches(task)}


@pytest.mark.scaled
@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("how", HOWS)
def test_killed_while_going_back(
    kind: str, how: str, server: Server, effects: Effects, made: dict[Any, Counter[str]], tmp_path: Path
) -> None:
    with place(kind, tmp_path) as stored:
        killed_while_going_back(kind, how, server, effects, made[kind, how], stored.url)


def killed_while_going_back(kind: str, how: str, server: Server, effects: Effects, hits: Counter[str], url: str) -> None:
    points = [p for p in points_of(kind) if hits[p]]
    assert how == "branch" or set(BRANCH_POINTS) <= set(points)
    tries = [(p, nth_hits(hits[p], 2)[i % 2]) for i, p in enumerate(points)]  # at its first time, or its last
    if not SOAK:  # another part of them for each way
        tries = [t for i, t in enumerate(tries) if i % 4 == HOWS.index(how) % 4]
    for i, (point, nth) in enumerate(tries):
        world, task = effects.world(), f"t{i}"
        prepare(server, url, task, world, how)
        current, before = branches(url, task)
        child = server.start(going_back.go_back, url, task, world, how, point, nth)
        child.told()
        assert child.was_killed, (point, nth)
        after_current, after = branches(url, task)
        where = (point, nth, before, after)
        new = {name: at for name, at in after.items() if name not in before}
        assert {name: after[name] for name in before} == before, where
        if how == "fork":
            assert after_current == current, where
            assert [n for _, n in new.values()] in ([], [1]), where
        elif how == "branch":
            assert not new, where
            assert after_current in ("main", "main~1"), where
        else:
            assert after_current == (next(iter(new)) if new else current), where
            assert [n for _, n in new.values()] in ([], [1]), where
        check_end(server, url, task, world, how)
        world.forget()


@pytest.mark.parametrize("how", ["rewind", "at"])
@pytest.mark.parametrize("point", ["accept.after", "acquire.after", "branch.before", "branch.after"])
def test_killed_while_an_older_store_is_accepted(
    point: str, how: str, server: Server, effects: Effects, tmp_path: Path
) -> None:
    """From the acceptance on the store raises nothing any more: what it lost must be under a guard all the same."""
    url, world, path = f"sqlite:///{tmp_path}/agent.db", effects.world(), tmp_path / "agent.db"
    server.run(going_back.begin, url, "t", world, 1)
    shutil.copy(path, tmp_path / "backup")
    server.run(going_back.begin, url, "t", world, 3)
    shutil.copy(tmp_path / "backup", path)
    child = server.start(going_back.go_back, url, "t", world, how, point, 1)
    child.told()
    assert child.was_killed
    check_end(server, url, "t", world, how)


def check_end(server: Server, url: str, task: str, world: World, how: str) -> None:
    options: dict[str, Any] = {"fresh_start": True} if how == "fresh" else {}
    for _ in range(going_back.STEPS + 1):
        outcome = server.run(going_back.finish, url, task, world, **options)
        if outcome["status"] == "finished":
            break
        done = world.done()
        with safepoint.open(url) as cp:
            for no, _, key in outcome["pending"]:  # a person looks whether it was made
                cp.resolve(task, no, safepoint.Done("by hand") if done.get(key) else safepoint.NotDone())
    else:
        raise AssertionError("never finished")
    assert set(world.done().values()) == {1}
    assert len(world.done()) == going_back.STEPS
    assert [m["n"] for m in outcome["messages"] if "n" in m] == list(range(going_back.STEPS))

"""Kill -9 anywhere in an agent of named steps that holds an outside resource: what is inside happens once. Invariants 1, 2 and 5."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import safepoint
from tests.support import stepped
from tests.support.children import Server
from tests.support.effects import Effects
from tests.support.scale import scale
from tests.support.stores import KINDS, place


@pytest.mark.scaled
@pytest.mark.parametrize("store", KINDS)
@pytest.mark.parametrize("how", ["handle", "agent"])
def test_each_effect_of_a_step_and_of_a_resource_happens_once(
    how: str, store: str, server: Server, effects: Effects, tmp_path: Path
) -> None:
    with contextlib.ExitStack() as places:

        def begun(n: int) -> str:
            folder = tmp_path / str(n)
            folder.mkdir()
            url = places.enter_context(place(store, folder)).url
            stepped.begin(url)
            return url

        killed_at_each_point(how, store, server, effects, begun)


def killed_at_each_point(how: str, store: str, server: Server, effects: Effects, begun: Callable[[int], str]) -> None:
    whole, points = server.run(stepped.live, begun(0), effects.world(), how)
    rounds = min(scale(4 if store in {"sqlite", "file"} else 2, 60 if store == "sqlite" else 24), points)
    for nth in sorted({1 + (points - 1) * r // (rounds - 1) for r in range(rounds)}):
        url, world = begun(nth), effects.world()
        child = server.start(stepped.live, url, world, how, nth)
        child.told()
        assert child.was_killed, f"point {nth} of {points} was not reached"
        made, _ = server.run(stepped.live, url, world, how)
        assert made == whole
        once(world.done(), nth)
        with safepoint.open(url) as cp:
            assert cp.status("t").status == "finished"
            state = cp.load_latest("t")
            assert state is not None
            assert state.agent_state["cursor"].closed
            assert state._base.control.made.keys() == set(stepped.NAMES)
        world.forget()


def once(done: dict[str, int], nth: int) -> None:
    expected: dict[str, Any] = dict.fromkeys((*stepped.CALLS, *stepped.HOOKS), 1)
    assert done == expected, f"killed at point {nth}"

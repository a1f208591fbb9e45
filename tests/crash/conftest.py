"""What the crash tests share: a server that forks children, and the outside world in which their effects are counted."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.children import Server
from tests.support.effects import Effects
from tests.support.scale import SOAK
from tests.support.stores import CLOCKED, KINDS, place

HERE = Path(__file__).parent


THINNED = {
    "test_cleanup_kills": 4, "test_going_back": 4, "test_kill_points_servers": 9, "test_moving_kills": 4, "test_plan_is_kept": 2,
    "test_races": 3, "test_reasked_model": 3, "test_repair_kills": 2, "test_sticky": 5,
}  # fmt: skip
"""How many variants of each test are tried on each server outside of a soak: what a run does is tried in all ways on SQLite."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if SOAK:
        return
    variants: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        if (
            item.path.parent == HERE
            and item.path.stem in THINNED
            and isinstance(item, pytest.Function)
            and hasattr(item, "callspec")
        ):
            kinds = [value for value in item.callspec.params.values() if isinstance(value, str) and value in CLOCKED]
            if kinds:
                variants.setdefault((item.nodeid.partition("[")[0], kinds[0]), []).append(item)
    left_out: set[pytest.Item] = set()
    for (_, kind), group in variants.items():
        most = THINNED[group[0].path.stem]
        # Others on each store: what one leaves out another may try.
        shift = ((CLOCKED.index(kind) + 1) * len(group)) // (len(CLOCKED) * most)
        kept = {(i * len(group) // most + shift) % len(group) for i in range(min(most, len(group)))}
        left_out |= {item for i, item in enumerate(group) if i not in kept} if len(group) > most else set()
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    made = Server(
        "safepoint",
        "safepoint.aio",
        "tests.support.imports",
        "tests.support.agents",
        "tests.support.effects",
        "tests.support.races",
        "tests.support.programs",
        "tests.support.reasked",
    )
    yield made
    made.close()


@pytest.fixture(scope="session")
def effects(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Effects:
    return Effects(server, str(tmp_path_factory.mktemp("fx")))


@pytest.fixture
def db(tmp_path: Path) -> str:
    """The path of a SQLite store."""
    return str(tmp_path / "agent.db")


@pytest.fixture(params=[kind for kind in KINDS if kind not in {"file", "cluster"}])
def any_db(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Of each store in which rows are looked at: a path for SQLite, else a URL."""
    with place(request.param, tmp_path) as made:
        yield made.url.removeprefix("sqlite:///")

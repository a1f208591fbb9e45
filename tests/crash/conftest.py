"""What the crash tests share: a server that forks children, and the outside world in which their effects are counted."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.children import Server
from tests.support.effects import Effects
from tests.support.stores import KINDS, place
from tests.support.thinned import thin

HERE = Path(__file__).parent


THINNED = {
    "test_cleanup_kills": 4, "test_going_back": 4, "test_kill_points_servers": 9, "test_moving_kills": 4, "test_plan_is_kept": 2,
    "test_races": 3, "test_reasked_model": 3, "test_repair_kills": 2, "test_sticky": 5,
}  # fmt: skip


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    thin(config, items, HERE, THINNED)


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

"""What the crash tests share: a server that forks children, and the outside world in which their effects are counted."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.children import Server
from tests.support.effects import Effects


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    made = Server(
        "safepoint",
        "safepoint.aio",
        "safepoint.stores.sqlite",
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
    return str(tmp_path / "agent.db")

"""What these tests share: each store that a behaviour concerns, and a way to leave a run as a death would."""

import uuid
from pathlib import Path

import pytest

import safepoint
from tests.support import servers
from tests.support.runs import World
from tests.support.thinned import thin

HERE = Path(__file__).parent
THINNED = {
    "test_agent_loop": 4, "test_calls": 4, "test_every_store": 6, "test_field_cases_servers": 3, "test_interruptions": 10,
    "test_journal": 4, "test_keeping": 1, "test_moving": 3, "test_recovery": 4, "test_refusals": 6, "test_steps": 2,
}  # fmt: skip

STORES = ("memory", "sqlite", "file", "postgres", "redis")
"""Where the behaviours that concern every store are tried: any of "memory", "sqlite", "file", "postgres" and "redis"."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    thin(config, items, HERE, THINNED)


def new_url(kind, folder, name="agent"):
    """The URL of an empty store of one of STORES. What is in memory lives as long as somebody has it open."""
    return {
        "memory": lambda: f"memory://{uuid.uuid4()}",
        "sqlite": lambda: f"sqlite:///{folder}/{name}.db",
        "file": lambda: f"file:///{folder}/{name}",
        "postgres": servers.reused_postgres_url,
        "redis": servers.fresh_redis_url,
    }[kind]()


@pytest.fixture(params=STORES)
def url(request, tmp_path):
    """The URL of an empty store that can be opened more than once."""
    made = new_url(request.param, tmp_path)
    if request.param != "memory":
        yield made
        return
    with safepoint.open(made) as kept:
        yield kept.store.url


@pytest.fixture
def cp(url):
    with safepoint.open(url) as opened:
        yield opened


@pytest.fixture
def sqlite(tmp_path):
    with safepoint.open(f"sqlite:///{tmp_path}/agent.db") as opened:
        yield opened


@pytest.fixture
def world():
    return World()

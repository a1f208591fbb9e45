"""What these tests share: each store that a behaviour concerns, and a way to leave a run as a death would."""

import uuid

import pytest

import safepoint
from tests.support import servers
from tests.support.runs import World

STORES = ("memory", "sqlite", "file", "postgres", "redis")
"""Where the behaviours that concern every store are tried: any of "memory", "sqlite", "file", "postgres" and "redis"."""


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

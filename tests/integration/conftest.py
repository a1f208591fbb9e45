"""What these tests share: each store that a behaviour concerns, and a way to leave a run as a death would."""

import uuid

import pytest

import safepoint
from tests.support.runs import World

STORES = ("memory", "sqlite", "file")


@pytest.fixture(params=STORES)
def url(request, tmp_path):
    """The URL of an empty store that can be opened more than once."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/agent.db"
        return
    if request.param == "file":
        yield f"file:///{tmp_path}/checkpoints"
        return
    with safepoint.open(f"memory://{uuid.uuid4()}") as kept:
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

"""What holds for every test: Hypothesis profiles, a clean environment, and soak tests only in soak."""

import gc
import os
import re
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from safepoint import tools
from tests.support import servers
from tests.support.scale import SOAK
from tests.support.seeds import FIXED

# No deadline and no complaint about slowness: on a busy machine with two cores both would only report the machine.
# What is drawn is new in each run, also where CI is set, unless a seed is given.
_common = settings(deadline=None, derandomize=bool(FIXED), print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("small", _common, max_examples=50, stateful_step_count=30)
settings.register_profile("soak", _common, max_examples=250, stateful_step_count=60)
settings.load_profile("soak" if SOAK else "small")

# Inherited by the processes that tests start. The first would hide a missing flush in them, the second makes each start-up
# compile the package anew; the rest would let the caller's own store or paths into a test.
for _name in ("PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "SAFEPOINT_URL"):
    os.environ.pop(_name, None)
for _name in [name for name in os.environ if re.fullmatch("PG[A-Z]+", name)]:  # libpq's own
    del os.environ[_name]

# Where the tests run in the background of a script, Ctrl-C is ignored, here and in every process that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave soak tests out unless this is a soak: also when somebody runs plain `pytest`."""
    if SOAK:
        return
    soak = [item for item in items if item.get_closest_marker("soak")]
    if soak:
        config.hook.pytest_deselected(items=soak)
        items[:] = [item for item in items if not item.get_closest_marker("soak")]


def pytest_collection_finish() -> None:
    """Take what was collected out of sight of the garbage collector: going through five thousand tests takes a quarter of a
    second, each time that a test collects what a dead run leaves behind."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def names_of_tools() -> Iterator[None]:
    """Each test may declare tools as a process of its own would: those of others live on in exceptions that pytest keeps."""
    before = dict(tools._registry.named)
    yield
    tools._registry.named = before


# -- servers: one of each for this process, started at its first use (see tests/support/servers.py)


@pytest.fixture(scope="session")
def postgres() -> servers.Postgres:
    return servers.shared_postgres()


@pytest.fixture(scope="session")
def valkey() -> servers.Redis:
    return servers.shared_redis()


@pytest.fixture(scope="session")
def valkey_cluster() -> servers.RedisCluster:
    return servers.shared_cluster()


@pytest.fixture(autouse=True)
def stores_on_servers() -> Iterator[None]:
    """Clear away what a test has used. What fixtures of a module or session asked for came before the mark, and stays."""
    mark = servers.used()
    yield
    servers.clean_since(mark)


def pytest_unconfigure() -> None:
    servers.stop_shared()

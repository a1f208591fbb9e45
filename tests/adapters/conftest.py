"""What the tests of the LangGraph saver share: a saver of ours on each kind of store."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.graphs.subjects import HERE, Subject, subject
from tests.support.scale import SOAK

FOLDER = Path(__file__).parent
BESIDE = [kind for kind in HERE if kind not in {"memory", "sqlite"}]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Outside of a soak a test of the contract runs on few of the stores: in memory, on SQLite, and on one of the others, a different
    one from test to test; and where it could be sync and async, it is each on another."""
    if SOAK:
        return
    left_out = [item for item in items if item.path.parent == FOLDER and isinstance(item, pytest.Function) and _is_spared(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def _is_spared(item: pytest.Function) -> bool:
    params = item.callspec.params if hasattr(item, "callspec") else {}
    kind = params.get("there")
    if kind is None or "methods" in params:
        return False
    draw = zlib.crc32(item.originalname.encode())
    if kind in BESIDE and BESIDE[draw % len(BESIDE)] != kind:
        return True
    how = params.get("run")
    return how is not None and (draw // 7 + HERE.index(kind)) % 2 == (how == "async")


@pytest.fixture(scope="module", params=HERE)
def there(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    """A place for savers on each kind of store, shared by the tests of a module: each takes threads of its own."""
    with subject(request.param, tmp_path_factory.mktemp("langgraph")) as made:
        yield made


@pytest.fixture(scope="module")
def saver(there: Subject) -> Any:
    return there.saver()

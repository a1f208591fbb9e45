"""What the tests of the LangGraph saver share: a saver of ours on each kind of store."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.graphs.subjects import HERE, Subject, subject


@pytest.fixture(scope="module", params=HERE)
def there(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    """A place for savers on each kind of store, shared by the tests of a module: each takes threads of its own."""
    with subject(request.param, tmp_path_factory.mktemp("langgraph")) as made:
        yield made


@pytest.fixture(scope="module")
def saver(there: Subject) -> Any:
    return there.saver()

"""Verbs that hold a task for a moment let go of it also where the store does not answer at their end."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import safepoint
from safepoint import State
from safepoint.errors import Unavailable
from tests.support.servers import fresh_postgres_url, fresh_redis_url

PLACES: dict[str, Callable[[Path], str]] = {
    "file": lambda folder: f"file:///{folder}/store",
    "memory": lambda _: "memory://",
    "sqlite": lambda folder: f"sqlite:///{folder}/store.db",
    "postgres": lambda _: fresh_postgres_url(),
    "redis": lambda _: fresh_redis_url(),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("verb", ["rewind", "release"])
def test_a_task_is_free_though_its_release_got_no_answer(
    place: str, verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cp = safepoint.open(PLACES[place](tmp_path))
    state = State(task_id="task")
    for _ in range(2):
        cp.save(state)
    if verb == "release":
        cp.store.acquire("task", b"somebody")

    def silent(*_: Any) -> None:
        raise Unavailable("nobody answers")

    with monkeypatch.context() as patched:
        patched.setattr(cp.store, "release", silent)
        with pytest.raises(Unavailable):
            cp.rewind("task", 1) if verb == "rewind" else cp.release("task")
    grant = cp.store.acquire("task", b"next")
    assert grant.previous == "dead"
    cp.close()

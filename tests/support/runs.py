"""Runs that end as by a death, and a store that fails when told to. No mocked crash: real ones are in tests/crash."""

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

from safepoint.stores.base import Store

__all__ = ["Death", "Failing", "died"]


class Death(BaseException):
    """Raised where a process would be killed; the run that it goes through is dropped, not released."""


@contextlib.contextmanager
def died(cp: Any, task: str) -> Iterator[Any]:
    """A run whose block ends by ``Death``: what it recorded stays, its lease is let go of without a word."""
    runs = [cp.resume(task)]
    runs[0]._enter_context()
    seen = []
    try:
        yield runs[0]
    except Death as death:
        seen.append(True)
        death.__traceback__ = None
        death.__context__ = death.__cause__ = None
    finally:
        runs[0]._exit_context()
        grant, store = runs[0]._grant, cp.store
        runs.clear()
        gc.collect()
        store.abandon(task, grant)  # in case a frame of the test still holds the run
    assert seen, "the block was to end by Death"


class Failing(Store):
    """A store that hands everything on, and raises what ``fail`` gives for a commit, before or after it has landed."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.before: Callable[[Any], BaseException | None] = lambda commit: None
        self.after: Callable[[Any], BaseException | None] = lambda commit: None

    def commit(self, commit: Any) -> Any:
        error = self.before(commit)
        if error is not None:
            raise error
        done = self.inner.commit(commit)
        error = self.after(commit)
        if error is not None:
            raise error
        return done


def _hand_on(name: str) -> Any:
    def method(self: Failing, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner, name)(*args, **kwargs)

    return method


for _name in dir(Store):
    if not _name.startswith("_") and _name != "commit" and callable(getattr(Store, _name)):
        setattr(Failing, _name, _hand_on(_name))
for _name in ("url", "timeout", "durability", "persistent", "chunked", "transactional_tools", "ttl", "multi_host"):
    setattr(Failing, _name, property(lambda self, n=_name: getattr(self.inner, n)))
Failing.__abstractmethods__ = frozenset()

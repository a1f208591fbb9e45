"""A world to act on, runs that end as by a death, and a store that fails when told to. Real crashes are in tests/crash."""

import contextlib
import gc
import operator
from collections.abc import Callable, Iterator
from typing import Any

from safepoint import NotDone, tool, tools
from safepoint.stores.base import Store

__all__ = ["CANARY", "Death", "Failing", "NotStorable", "World", "declare", "died", "statuses"]

CANARY = "c4n4ry"


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


_Store: Any = Store  # Failing's other methods are put in below, out of the type checker's sight


class Failing(_Store):
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
    setattr(Failing, _name, property(operator.attrgetter(f"inner.{_name}")))
Failing.__abstractmethods__ = frozenset()


class World:
    """What happened outside, and what happens next: an exception to raise, or a value to return."""

    def __init__(self):
        self.log = []
        self.next = []
        self.says = NotDone()
        self.asked = []

    def act(self, *what):
        self.log.append(what)
        outcome = self.next.pop(0) if self.next else f"done {len(self.log)}"
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def verify(self, call):
        self.asked.append(call)
        if isinstance(self.says, BaseException):
            raise self.says
        return self.says


def declare(world, effect="write", *, name=None, verify=False, **options):
    if verify:
        options["verify"] = world.verify
        options.setdefault("settle_after", 0)

    options["name"] = name or f"test-{effect}"
    # As in the process of a later day: what was declared before is not there any more, whoever may still hold it here.
    tools._registry.named.pop(options["name"], None)
    if effect == "transactional":

        @tool(effect=effect, **options)
        def book(x=0, *more, connection):
            return world.act(x, *more)

        return book

    @tool(effect=effect, **options)
    def act(x=0, *more):
        return world.act(x, *more)

    return act


def statuses(cp, task="t"):
    return [c.status for c in cp.calls(task)]


class NotStorable:
    def __repr__(self):
        return CANARY

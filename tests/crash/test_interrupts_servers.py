"""Ctrl-C at any moment of a verb on a server: no connection, no lock and no lease is left behind."""

import contextlib
import random
import signal
import threading
from typing import Any

import pytest

from safepoint.errors import SafepointError
from safepoint.rows import Guard
from safepoint.stores.url import open_store
from safepoint.testing.build import Writer, obj
from tests.support.scale import scale
from tests.support.servers import fresh_postgres_url, fresh_redis_url

SERVERS = {"postgres": fresh_postgres_url, "redis": fresh_redis_url}


@pytest.fixture(params=list(SERVERS))
def store(request):
    made: Any = open_store(SERVERS[request.param](), pool=2, timeout=3, lease=20)
    yield made
    made.close()


@contextlib.contextmanager
def interrupts(seed: int):
    """Gives a function that runs another one and interrupts it, at random; it returns whether it has."""
    armed: list[int] = []
    rng = random.Random(seed)

    def ring(*_):
        if armed:
            armed.clear()
            raise KeyboardInterrupt

    def once(verb):
        try:
            armed.append(1)
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, 0.003))
            verb()
            armed.clear()
        except KeyboardInterrupt:
            return True
        finally:
            armed.clear()
            signal.setitimer(signal.ITIMER_REAL, 0)
        return False

    before = signal.signal(signal.SIGALRM, ring)
    try:
        yield once
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def elsewhere(verb):
    """What a verb answers in another thread, which sees a lock that is still held; this one would walk through it."""
    seen: list[Any] = []

    def work():
        try:
            seen.append(verb())
        except Exception as error:
            seen.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(20)
    assert seen, "it hangs"
    return seen[0]


# One that comes while a finalizer runs is lost, as Python loses all that finalizers raise.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.scaled
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs a timer")
def test_interrupts_anywhere_leave_the_store_usable(store):
    writer = Writer(store)
    writer.save()
    acknowledged, interrupted = 1, 0
    with interrupts(5) as disturbed:
        for i in range(scale(400, 1500)):

            def verb(i: int = i) -> None:
                nonlocal acknowledged
                if i % 3:
                    acknowledged = writer.save(obj(b"%d" % i)).seq or 0
                else:
                    for _ in range(3):
                        store.read("task")

            interrupted += disturbed(verb)
            row = elsewhere(lambda: store.task("task"))
            assert not isinstance(row, Exception), (i, row)
            writer.head = row.head
            assert row.head.seq >= acknowledged
    assert interrupted > scale(2, 10)  # how many come in time depends on the machine


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.scaled
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs a timer")
def test_a_lease_that_an_interrupt_took_from_its_taker_is_nobodys(store):
    interrupted = fence = 0
    with interrupts(6) as disturbed:
        for i in range(scale(150, 1000)):
            task = f"t{i % 5}"
            got: list[Any] = []

            def verb(task: str = task, got: list[Any] = got) -> None:
                got.append(store.acquire(task, b"first"))

            interrupted += disturbed(verb)
            if got:
                guard: Guard = got[0].guard
                assert store.holds(task, guard), i
                store.release(task, got[0])
            found = elsewhere(lambda task=task: store.acquire(task, b"second"))
            assert not isinstance(found, SafepointError), (i, found)
            fence = max(fence, found.guard.fence)
            assert elsewhere(lambda task=task, found=found: store.release(task, found)) is None
    assert interrupted > scale(2, 10)  # how many come in time depends on the machine
    assert fence > 30

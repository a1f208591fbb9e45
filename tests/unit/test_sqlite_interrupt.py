"""Ctrl-C at any moment: whatever it interrupts, no transaction and no lock is left behind."""

import random
import signal
import threading
from typing import Any

import pytest

from safepoint.stores.sqlite import SQLiteStore
from safepoint.testing.build import Writer, obj
from tests.support.scale import scale


# One that comes while the transaction's finalizer runs is lost, as Python loses all that finalizers raise.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.scaled
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs a timer")
def test_interrupts_anywhere_leave_the_store_usable(tmp_path):
    store: Any = SQLiteStore(tmp_path / "agent.db", durability="process", timeout=2)
    writer = Writer(store)
    writer.save()
    acknowledged = 1
    interrupted = 0
    armed: list[int] = []

    def ring(*_):
        if armed:
            armed.clear()
            raise KeyboardInterrupt

    def save_elsewhere(task, seen):
        try:
            seen.append(Writer(store, task).save().seq if store.task(task) is None else 0)
        except Exception as error:
            seen.append((error, store._db.busy, store._db._write_lock))

    before = signal.signal(signal.SIGALRM, ring)
    rng = random.Random(5)
    try:
        for i in range(scale(300, 5000)):
            try:
                armed.append(1)
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, 3e-4))
                if i % 3:
                    acknowledged = writer.save(obj(b"%d" % i)).seq or 0
                else:
                    for _ in range(5):
                        store.read("task")
                armed.clear()
            except KeyboardInterrupt:
                interrupted += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            # By another thread, which sees a lock that is still held; this one would walk through it.
            seen: list[Any] = []
            thread = threading.Thread(target=save_elsewhere, args=(f"other-{i}", seen))
            thread.start()
            thread.join()
            assert seen == [1]
            writer.head = store.task("task").head
            assert writer.head.seq >= acknowledged
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupted > 10
    store.close()

"""Objects of a store that a disk, or a person, has damaged: found by what they hold, and changed behind the library's back."""

import pickle
import subprocess
import sys
from typing import Any

from safepoint.stores.memory import MemoryStore

__all__ = ["spoil"]


def spoil(cp: Any, task: str, holds: bytes, how: str = "missing", *, seq: int | None = None) -> int:
    """Remove (``missing``) or change (``corrupt``) every object of a checkpoint whose bytes hold these. Returns how many."""
    if not cp.store.chunked:
        return _by_hand(cp, task, holds)
    found = cp.store.read(task, seq=seq)
    assert found is not None
    names = [name for name, obj in found[1].items() if holds in obj.data]
    for name in names:
        if isinstance(cp.store, MemoryStore):
            _in_memory(cp.store, task, name, how)
        else:
            _in_sqlite(cp.store.path, name, how)
    return len(names)


def _by_hand(cp: Any, task: str, holds: bytes) -> int:
    """Where a state is stored whole a damaged part is a damaged state; but a person may take a product out of it."""
    state = cp.load_latest(task)
    products = state._base.control.products
    names = [name for name, value in products.items() if holds in pickle.dumps(value)]
    for name in names:
        del products[name]
    if names:
        cp.save(state)
    return len(names)


def _in_sqlite(path: str, name: bytes, how: str) -> None:
    # From another process: a second connection of this one would drop the store's locks when it is closed.
    change = "data = X'7600'" if how == "corrupt" else "name = randomblob(16)"
    sql = f"UPDATE sp_objects SET {change} WHERE name = X'{name.hex()}'"
    program = "import apsw, sys; c = apsw.Connection(sys.argv[1]); c.set_busy_timeout(10000); c.execute(sys.argv[2])"
    subprocess.run([sys.executable, "-c", program, path, sql], check=True)


def _in_memory(store: Any, task: str, name: bytes, how: str) -> None:
    objects = store._shared.tasks[task].objects
    if how == "missing":
        del objects[name]
    else:
        objects[name] = objects[name]._replace(data=b"v\0")

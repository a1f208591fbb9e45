"""Two stores of one process on the same file, one of them in the middle of a transaction when the process forks."""

import os

import pytest

from safepoint.errors import UsageError
from safepoint.stores.sqlite import SQLiteStore
from safepoint.testing.build import Writer


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_in_the_child_none_of_them_can_be_used(tmp_path):
    idle = SQLiteStore(tmp_path / "agent.db", durability="process", timeout=0.2)
    busy = SQLiteStore(tmp_path / "agent.db", durability="process", timeout=0.2)
    other = SQLiteStore(tmp_path / "other.db", durability="process", timeout=0.2)
    for store in (idle, other):
        Writer(store).save()
    assert busy.task("task") is not None
    with busy._db.reading():
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                assert other.task("task") is not None
                with pytest.raises(UsageError):
                    idle.task("task")
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
    assert status == 0
    assert idle.task("task") is not None
    for store in (idle, busy, other):
        store.close()

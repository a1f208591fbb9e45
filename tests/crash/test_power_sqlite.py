"""SQLite under power cuts and failing system calls: what was acknowledged is there, what was not is whole or absent.

The life of a task runs once on a disk that remembers; every crash point is then replayed as an image, in which what was not
synced is lost, kept, half there or torn at sectors. And it runs once per operation with that operation failing.
"""

import contextlib
import random

import pytest

from safepoint.errors import SafepointError, StoreFull, Unavailable
from safepoint.stores import sqlite as sqlite_store
from tests.support.life import Facts, Life, facts, holds, opened
from tests.support.scale import SOAK, scale
from tests.support.vfs import FAULTS, Disk, images, under

pytestmark = pytest.mark.scaled
SEED = 20261129
PARTS = scale(1, 4)  # so that several workers share the work


@pytest.fixture(autouse=True)
def small_batches(monkeypatch, caplog):
    caplog.set_level("ERROR", "safepoint")  # thousands of lines that nobody reads
    monkeypatch.setattr(sqlite_store, "BATCH", 20_000)  # so that a big save is staged without being big


def live(folder, disk):
    """Run the script; give what the store had after each verb. A verb that raises is as good as one that has no facts."""
    known: list[Facts] = [{}]
    with under(disk):
        life = Life(f"sqlite:///{folder}/agent.db", transactional=True)
        for _, verb in life.verbs:
            verb()
            disk.acked += 1
            known.append(facts(life.cp))
        life.close()
    return known


def look_at(path, files, locks):
    """What a fresh process would find: facts, or the typed error that it gets."""
    for name, data in files.items():
        (path / name).write_bytes(data)
    if locks:
        (path / "agent.db-locks").write_bytes(locks)
    with opened(f"sqlite:///{path}/agent.db", durability="process") as cp:
        found = facts(cp)
        for task in found:
            report = cp.verify(task)
            assert report.ok, report
        return found


def test_every_power_cut(tmp_path):
    """DESIGN 2, invariants 1 and 2."""
    (tmp_path / "life").mkdir()
    disk = Disk(tmp_path / "life")
    known = live(tmp_path / "life", disk)
    rng = random.Random(SEED)
    wanted = None if SOAK else set(rng.sample(range(4 * len(disk.ops)), 250))
    seen = set()
    looked = 0
    for i, (number, variant, op, files) in enumerate(images(disk.ops, rng)):
        if wanted is not None and i not in wanted:
            continue
        key = (op.acked, op.locks, *sorted(files.items()))
        if key in seen:
            continue
        seen.add(key)
        path = tmp_path / f"{i}"
        path.mkdir()
        before = known[op.acked]
        after = known[op.acked + 1] if op.acked + 1 < len(known) else before
        locks = (
            b"" if rng.random() < 0.2 else op.locks
        )  # the file of locks may be gone: then nothing is proven, and nothing is wrong
        found = look_at(path, files, locks)
        looked += 1
        ever = frozenset(c for f in known[: op.acked] for t in f.values() for c in t["checkpoints"].values())
        wrong = holds(found, before, after, ever)
        assert not wrong, f"cut after operation {number} ({op.kind} {op.file}), {variant}, during verb {op.acked}: {wrong}"
    assert looked >= scale(100, 500)


@pytest.mark.parametrize("part", range(PARTS))
def test_every_failing_operation(tmp_path, part):
    """Each write, sync, truncation and deletion fails in turn, for want of space, of the disk, or half way. What the verb says of it is true, and the life goes on after it."""
    (tmp_path / "whole").mkdir()
    whole = Disk(tmp_path / "whole")
    known = live(tmp_path / "whole", whole)
    total = len(whole.ops)
    numbers = range(part, total, PARTS) if SOAK else sorted(random.Random(SEED).sample(range(total), 36))
    for number in numbers:
        fault = FAULTS[number % len(FAULTS)]
        folder = tmp_path / f"{number}"
        folder.mkdir()
        disk = Disk(folder, fail_at=number, fault=fault)
        one_failing(folder, disk, known, f"{fault} at operation {number}")


def one_failing(folder, disk, known, where):
    url = f"sqlite:///{folder}/agent.db"
    said = "nothing"
    with under(disk):
        life = None
        with contextlib.suppress(SafepointError):
            life = Life(url, transactional=True)
        life = life or Life(url, transactional=True)  # the fault was once: the next try must work
        for i, (name, verb) in enumerate(life.verbs):
            failed, error = disk.failed, None
            try:
                verb()
            except SafepointError as raised:
                error = raised
            if failed is None and disk.failed is not None:
                said = f"{disk.failed.kind} of {disk.failed.file} in {name}, which raised {error!r}"
                assert error is None or isinstance(error, StoreFull | Unavailable), f"{where}: {said}"
                # The names of pruned ones come from the whole life, which this one was the same as up to here.
                wrong = holds(facts(life.cp), known[i], known[i + 1])
                assert not wrong, f"{where}: {said}: {wrong}"
                if error is None and name != "raises":  # what a failed step looked like is kept if it can be, as promised
                    assert facts(life.cp) == known[i + 1], f"{where}: {said}, and did not do it"
        last = facts(life.cp)
        life.close()
    with opened(url) as cp:
        assert facts(cp) == last, f"{where}: {said}; reopened, the store is another"
        for task in last:
            report = cp.verify(task)
            assert report.ok, report

"""The file store under power cuts and failing system calls: what was acknowledged is there, what was not is whole or absent.

The life of a task runs once on calls that are recorded; every crash point is then replayed as an image, in which what was not
synced is lost, kept, half there or torn at sectors. And it runs once per call with that call failing.
"""

import contextlib
import os
import random

import pytest

from safepoint import State
from safepoint.errors import SafepointError, StoreFull, Unavailable
from tests.support.fileshim import FAULTS, Shim, images, under
from tests.support.life import Facts, Life, facts, holds, opened
from tests.support.scale import SOAK, scale

pytestmark = pytest.mark.scaled
SEED = 20261130
PARTS = scale(1, 5)
"""A test that takes minutes is taken for one that hangs."""


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level("ERROR", "safepoint")  # thousands of lines that nobody reads


def live(folder, shim):
    """Run the script; give what the store had after each verb."""
    known: list[Facts] = [{}]
    with under(shim):
        life = Life(f"file:///{folder}", transactional=False)
        for _, verb in life.verbs:
            verb()
            shim.acked += 1
            known.append(facts(life.cp))
        life.close()
    return known


def look_at(path, files):
    """What a fresh process would find: facts, or the typed error that it gets."""
    path.mkdir()
    for name, data in files.items():
        if data is None:
            (path / name).mkdir()
        else:
            (path / name).write_bytes(data)
    with opened(f"file:///{path}", durability="process") as cp:
        found = facts(cp)
        for task in found:
            report = cp.verify(task)
            assert report.ok, report
        assert not os.listdir(path / ".tmp"), "an unfinished file is left"
        for task in found:  # and it goes on
            state = cp.load_latest(task)
            assert state is not None or not found[task]["checkpoints"]
            cp.save(state or State(task))
            assert cp.verify(task).ok
        return found


def test_every_power_cut(tmp_path):
    """DESIGN 2, invariants 1 and 2."""
    root = tmp_path / "life"
    root.mkdir()
    shim = Shim()
    node = shim.root_node(root)
    known = live(root, shim)
    rng = random.Random(SEED)
    wanted = None if SOAK else set(rng.sample(range(4 * len(shim.ops)), 160))
    seen = set()
    looked = 0
    for i, (number, variant, op, files) in enumerate(images(shim.ops, node, rng)):
        if wanted is not None and i not in wanted:
            continue
        key = (op.acked, *sorted((name, data or b"") for name, data in files.items()))
        if key in seen:
            continue
        seen.add(key)
        before = known[op.acked]
        after = known[op.acked + 1] if op.acked + 1 < len(known) else before
        where = f"cut after operation {number} ({op.kind} {op.what}), {variant}, during verb {op.acked}"
        try:
            found = look_at(tmp_path / f"{i}", files)
        except Exception as error:
            raise AssertionError(where) from error
        looked += 1
        ever = frozenset(c for f in known[: op.acked] for t in f.values() for c in t["checkpoints"].values())
        wrong = holds(found, before, after, ever)
        assert not wrong, f"{where}: {wrong}"
    assert looked >= scale(60, 500)


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_every_failing_operation(tmp_path, fault, late, part):
    """Field cases 8 and 66: each call fails in turn. What the verb says of it is true, and the life goes on after it."""
    if fault == "short" and late:
        return  # a short write has done what it has done
    (tmp_path / "whole").mkdir()
    whole = Shim()
    known = live(tmp_path / "whole", whole)
    numbers = list(range(whole.count))
    if fault == "short":
        numbers = [number for number, op in enumerate(whole.ops) if op.kind == "write"]
    if not SOAK or late or fault not in {"full", "io", "short"}:
        numbers = sorted(random.Random(SEED).sample(numbers, scale(4, 25)))
    for number in numbers[part::PARTS]:
        folder = tmp_path / f"{number}"
        one_failing(folder, Shim(number, fault, late=late), known, f"{fault} at operation {number}")


def one_failing(folder, shim, known, where):
    url = f"file:///{folder}"
    said = "nothing"
    own = (KeyboardInterrupt, MemoryError, SystemExit)
    with under(shim):
        life = None
        with contextlib.suppress(SafepointError, *own):
            life = Life(url, transactional=False)
        life = life or Life(url, transactional=False)  # the fault was once: the next try must work
        for i, (name, verb) in enumerate(life.verbs):
            failed, error = shim.failed, None
            try:
                verb()
            except (SafepointError, *own) as raised:
                error = raised
            if failed is None and shim.failed is not None:
                said = f"{shim.failed.kind} of {shim.failed.what} in {name}, which raised {error!r}"
                assert error is None or isinstance(error, (StoreFull, Unavailable, *own)), f"{where}: {said}"
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
    empty = [name for at, _, names in os.walk(folder) for name in names if not os.path.getsize(os.path.join(at, name))]
    assert empty == [], "a file without content stands for something"
    assert not os.listdir(folder / ".tmp"), "an unfinished file is left"

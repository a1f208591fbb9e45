"""Random bits and blocks of a SQLite store's files are changed: what is loaded is what was saved, or an error that is typed.

Never other data, never an answer that it is absent, and no fewer loads succeed than a digest per row would allow. Invariants 2, 3 and 7.
"""

import os
import random
from pathlib import Path
from typing import Any

import pytest

import safepoint
from safepoint import Damaged, NotFound, SafepointError
from tests.support import damage
from tests.support.children import Server
from tests.support.damage import Acknowledged, Rows
from tests.support.scale import scale
from tests.support.seeds import fresh_seed


class Template:
    """A store's files as they were left, what was acknowledged of them, and its rows."""

    def __init__(self, folder: Path, kind: str, server: Server) -> None:
        self.path = folder / "agent.db"
        self.done: Acknowledged
        if kind == "closed":
            self.done = damage.fill(str(self.path))
            assert not os.path.exists(f"{self.path}-wal")
        else:
            child = server.start(damage.fill, str(self.path), close=False)
            _, self.done = child.until("filled")
            child.kill()
            assert os.stat(f"{self.path}-wal").st_size > 100_000
        self.rows = Rows(damage.copied(self.path, folder / "sound"))
        self.all = set(damage.seqs(self.done))
        assert self.rows.needs.keys() == self.all


@pytest.fixture(scope="module", params=["closed", "killed"])
def template(request: pytest.FixtureRequest, server: Server, tmp_path_factory: pytest.TempPathFactory) -> Template:
    return Template(tmp_path_factory.mktemp(request.param), request.param, server)


def attempt(verb: Any, *args: Any, **given: Any) -> Any:
    """The answer, or the typed error that it is allowed to be."""
    try:
        return verb(*args, **given)
    except NotFound as error:
        raise AssertionError(f"{verb.__name__}{args}{given} says that it is not there") from error
    except SafepointError as error:
        return error


def look(path: Path, template: Template) -> set[tuple[str, int]]:
    """Compare all that a store says with what was acknowledged; returns what could be loaded by its number."""
    try:
        cp = safepoint.open(f"sqlite:///{path}")
    except SafepointError:
        return set()
    loaded = set()
    with cp:
        for task, seq in sorted(template.all):
            state = attempt(cp.load, task, seq=seq)
            if not isinstance(state, SafepointError):
                assert damage.content(state) == template.done[task][seq], (task, seq)
                loaded.add((task, seq))
        names = attempt(cp.tasks)
        if not isinstance(names, SafepointError):
            assert [t.task_id for t in names] == sorted(template.done)
        for task, saves in template.done.items():
            state = attempt(cp.load_latest, task)
            assert state is not None, f"{task} is said to be absent"
            if isinstance(state, Damaged) and (good := state.details.get("good")):
                assert damage.content(cp.load(task, seq=good)) == saves[good]
            elif not isinstance(state, SafepointError):
                assert (state.seq, damage.content(state)) == (max(saves), saves[max(saves)])
            heads = attempt(cp.list_checkpoints, task)
            if not isinstance(heads, SafepointError):
                # A damaged header says so, and is not believed, its number included.
                assert len(heads) == len(saves)
                sound = [h for h in heads if h.problem is None]
                assert all(h.seq == seq for h, seq in zip(heads, sorted(saves, reverse=True), strict=True) if h in sound)
                assert [h.metadata for h in sound] == [saves[h.seq][2] for h in sound]
            row = attempt(cp.status, task)
            assert isinstance(row, SafepointError) or row.task_id == task
            calls = attempt(cp.calls, task)
            assert isinstance(calls, SafepointError) or [c.tool for c in calls] == ["t" * 20] * 3
            pauses = attempt(cp.pauses, task, status=None)
            assert isinstance(pauses, SafepointError) or [p.question for p in pauses] == ["?"]
        report = attempt(cp.verify)
        if not isinstance(report, SafepointError):
            assert loaded == template.all or not report.ok, "verify says that it is sound"
            assert all(d.where and d.why for d in report.damages)
        for task, saves in template.done.items():
            recover(cp, task, saves, {seq for name, seq in loaded if name == task})
    return loaded


def recover(cp: Any, task: str, saves: dict[int, tuple[Any, ...]], loaded: set[int]) -> None:
    """``auto`` takes the newest checkpoint that is undamaged and says so, or refuses."""
    latest = attempt(cp.load_latest, task)
    try:
        with cp.resume(task, recover="auto") as run:
            recovery, found = run.recovery, damage.content(run.state)
    except SafepointError:
        return
    assert recovery.seq == max(loaded)
    assert found == saves[recovery.seq]
    if isinstance(latest, SafepointError):
        assert (recovery.mode, recovery.seq) != ("head", max(saves))
        assert max(saves) in [seq for seq, _ in recovery.skipped]
    else:
        assert recovery.mode == "head"


@pytest.mark.scaled
def test_what_is_damaged_is_never_taken_for_what_was_saved(template: Template, tmp_path: Path) -> None:
    assert look(damage.copied(template.path, tmp_path / "sound"), template) == template.all
    losses = 0
    seed = fresh_seed()
    for i in range(scale(20, 500)):
        rng = random.Random(f"{seed} {i}")
        path = damage.copied(template.path, tmp_path / "damaged")
        spot = damage.damage(path, rng)
        try:
            loaded = look(path, template)
            again = damage.copied(template.path, tmp_path / "again")
            assert damage.damage(again, random.Random(f"{seed} {i}")) == spot
            missed = template.rows.readable(again) - loaded
            assert not missed, f"{sorted(missed)} are whole, and were not loaded"
        except BaseException as error:
            error.add_note(f"seed {seed}, try {i}, {spot}")
            raise
        losses += len(template.all - loaded)
    assert losses, "nothing was damaged"


@pytest.mark.parametrize(("at", "bit"), [(4, 1), (9, 3)])
def test_the_counts_and_pointers_of_each_page(tmp_path: Path, at: int, bit: int) -> None:
    """What a page says of its cells is one byte: with another value rows are still whole that a step from one to the next does not
    come to, and an index leads to the row of somebody else."""
    done = damage.fill(str(tmp_path / "agent.db"))
    rows = Rows(damage.copied(tmp_path / "agent.db", tmp_path / "sound"))
    size = os.stat(tmp_path / "agent.db").st_size
    for page in range(2, size // 8192):
        path = damage.copied(tmp_path / "agent.db", tmp_path / "damaged")
        with open(path, "r+b") as file:
            file.seek(8192 * page + at)
            (old,) = file.read(1)
            file.seek(8192 * page + at)
            file.write(bytes([old ^ 1 << bit]))
        wanted = rows.readable(damage.copied(path, tmp_path / "again"))
        with safepoint.open(f"sqlite:///{path}") as cp:
            for task, seq in sorted(wanted):
                assert damage.content(cp.load(task, seq=seq)) == done[task][seq]


def test_a_task_that_the_index_of_names_has_lost_is_not_begun_anew(tmp_path: Path) -> None:
    """One bit of a name in the index: what is asked for by it is there, and must not be there twice."""
    damage.fill(str(tmp_path / "agent.db"))
    path = damage.copied(tmp_path / "agent.db", tmp_path / "damaged")
    data = path.read_bytes()
    page = next(p for p in range(0, len(data), 8192) if data[p] == 10 and b"three" in data[p : p + 8192] and b"two" in data[p:])
    at = data.index(b"three", page)
    path.write_bytes(data[:at] + b"t`ree" + data[at + 5 :])
    with safepoint.open(f"sqlite:///{path}") as cp:
        for begin in (lambda: cp.resume("three", recover="auto"), lambda: cp.save(safepoint.State("three"))):
            with pytest.raises(Damaged):
                begin()
        with pytest.raises(Damaged):
            cp.tasks()
        assert cp.load("three", seq=1).seq == 1
        assert cp.save(safepoint.State("four")).seq == 1

"""A store that is older than what it acknowledged, taken as it stands in a shell: what the error advises, works."""

import asyncio
import shutil

import pytest

import safepoint
from safepoint import Damaged, InDoubt, UsageError
from safepoint.cli.ending import run as command
from tests.integration.conftest import STORES, new_url
from tests.support.runs import declare


@pytest.fixture
def url(tmp_path, world):
    """Put back to where it stood when a task had done two steps of four, and another was not begun."""
    path = tmp_path / "agent.db"
    url = f"sqlite:///{path}"
    act = declare(world)
    work(url, act, "t", 2)
    shutil.copy(path, tmp_path / "backup")
    work(url, act, "t", 4)
    work(url, act, "gone", 1)
    shutil.copy(tmp_path / "backup", path)
    return url


def work(url, act, task, upto):
    with safepoint.open(url) as cp, cp.resume(task) as run:
        while run.state.step < upto:
            run.call(act, run.state.step)
            run.save()


@pytest.mark.parametrize("words", [["accept", "t"], ["rewind", "t@3", "--yes"]])
def test_the_task_goes_on_under_a_guard(url, world, words, capsys):
    with safepoint.open(url) as cp, pytest.raises(Damaged) as caught:
        cp.load_latest("t")
    assert caught.value.remedy.endswith("safepoint accept t")
    assert command([*words, "--store", url]) == 0
    assert "t@" in capsys.readouterr().out
    before = list(world.log)
    with pytest.raises(InDoubt):
        work(url, declare(world), "t", 4)
    assert world.log == before


def test_a_person_is_asked_before_it_is_rewound(url, capsys, monkeypatch):
    monkeypatch.setattr("click.confirm", lambda text, **options: print(text))
    assert command(["rewind", "t@3", "--store", url]) == 0
    assert "is older than what was acknowledged" in capsys.readouterr().out


def test_a_task_that_is_gone(url, capsys):
    assert command(["accept", "gone", "--store", url]) == 0
    assert "it is gone" in capsys.readouterr().out
    with safepoint.open(url) as cp:
        assert cp.load_latest("gone") is None


@pytest.mark.parametrize("kind", STORES)
def test_one_that_is_not_older(kind, tmp_path):
    with safepoint.open(new_url(kind, tmp_path)) as cp:
        cp.save(safepoint.State("t"))
        with pytest.raises(UsageError, match="not older"):
            cp.accept("t")


# -- repaired instead


@pytest.mark.parametrize("accepted", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_repair_stands_under_the_guard_that_accepting_puts(url, world, in_place, accepted):
    """Over the steps that were done and are on no record too, not only those that the store knows of."""
    before = list(world.log)
    with safepoint.open(url) as cp:
        cp.accept("gone")  # what is lost as a whole, no repair in place can bring back
    with safepoint.open(url) as cp:
        if accepted:  # and killed before anything was put under a guard
            cp.store.accept("t")
        report = cp.repair("t", in_place=in_place)
    with safepoint.open(report.url) as mended:
        assert mended.verify("t").ok
        # Heads at steps 0, 1, 2 are there, two more were acknowledged; one that was begun may have been on its way.
        guard = mended.plan("t").guard
        assert guard == 6
        if not (accepted and in_place):  # which finds no damage, and leaves the mark where it is
            assert report.fell_back[0].guard == guard
    for _ in range(2, guard):
        with pytest.raises(InDoubt):
            work(report.url, declare(world), "t", guard)
        with safepoint.open(report.url) as mended:
            (call,) = mended.calls("t", status="in_doubt")
            mended.resolve("t", call, safepoint.Done("made"))
    work(report.url, declare(world), "t", guard)
    assert world.log == before


def test_a_branch_beside_that_is_gone_back_to_after_a_repair_stands_under_it_too(tmp_path, world):
    path = tmp_path / "agent.db"
    url, act = f"sqlite:///{path}", declare(world)
    work(url, act, "t", 2)
    with safepoint.open(url) as cp:
        cp.fork("t", name="beside")
    shutil.copy(path, tmp_path / "backup")
    work(url, act, "t", 4)
    shutil.copy(tmp_path / "backup", path)
    before = list(world.log)
    with safepoint.open(url) as cp:
        report = cp.repair()
    with safepoint.open(report.url) as mended:
        mended.rewind("t", branch="beside")
        assert mended.plan("t").guard >= 6
    with pytest.raises(InDoubt):
        work(report.url, act, "t", 4)
    assert world.log == before


def test_verify_says_what_loads_of_it(url):
    with safepoint.open(url) as cp:
        for found in (cp.verify(), cp.verify("t")):
            (branch,) = found.branches
            assert (branch.head_loads, branch.loads, branch.newest_good) == (True, ((1, 3),), 3)


# -- accepted by run_agent(at=), looked at beforehand


@pytest.mark.parametrize("seq", [2, 3])
@pytest.mark.parametrize("face", ["sync", "async"])
def test_run_agent_at_accepts_it(url, world, seq, face):
    act, before = declare(world), list(world.log)

    def step(run):
        run.call(act, run.state.step)
        run.finish()

    async def astep(run):
        await run.call(act, run.state.step)
        run.finish()

    def run(**options):
        if face == "sync":
            return safepoint.run_agent(step, task_id="t", store=url, **options)
        return asyncio.run(safepoint.run_agent_async(astep, task_id="t", store=url, **options))

    for options in ({}, {"branch": "main"}, {"at": 99}):
        with pytest.raises(Damaged) as caught:
            run(**options)
        assert caught.value.details["rolled_back"]
    outcome = run(at=seq)
    assert (outcome.recovery.mode, outcome.recovery.seq, outcome.recovery.guard) == ("at", seq, 6)
    assert outcome.status == ("waiting" if seq == 3 else "finished")  # the call of t@2's step is on record
    assert world.log == before


def test_run_agent_at_the_head_of_a_finished_one(tmp_path):
    path = tmp_path / "agent.db"
    url = f"sqlite:///{path}"
    safepoint.run_agent(lambda run: run.finish("done"), task_id="t", store=url)
    shutil.copy(path, tmp_path / "backup")
    with safepoint.open(url) as cp:
        state = cp.load_latest("t")
        assert state is not None
        cp.save(state)
    shutil.copy(tmp_path / "backup", path)
    outcome = safepoint.run_agent(lambda run: pytest.fail("run"), task_id="t", store=url, at=2)
    assert (outcome.status, outcome.result) == ("finished", "done")
    with safepoint.open(url) as cp:
        assert cp.load_latest("t").step == 1


@pytest.mark.parametrize("more", [[], ["--raw"], ["--json"]])
def test_a_checkpoint_of_it_is_shown_by_its_number(url, capsys, more):
    assert command(["show", "t@2", "--store", url, *more]) == 0
    assert "messages" in capsys.readouterr().out
    for words in (["show", "t"], ["show", "t@99"]):
        assert command([*words, "--store", url, *more]) == 6
        assert "is older than what was acknowledged" in capsys.readouterr().err


# -- tasks that are gone, by name nobody knows which


@pytest.fixture
def bare(tmp_path, world):
    """A store whose log was removed with all that it held."""
    path = tmp_path / "agent.db"
    url = f"sqlite:///{path}"
    with safepoint.open(url):
        pass
    shutil.copy(path, tmp_path / "backup")
    work(url, declare(world), "t", 2)
    shutil.copy(tmp_path / "backup", path)
    return url


@pytest.mark.parametrize("words", [["ls"], ["new"]])
@pytest.mark.parametrize("way", ["accept", "repair"])
def test_what_is_advised_where_tasks_are_gone_works(bare, tmp_path, world, words, way, capsys):
    with safepoint.open(bare) as cp:
        ask = cp.tasks if words == ["ls"] else lambda: cp.save(safepoint.State("new"))
        with pytest.raises(Damaged) as caught:
            ask()
    error = caught.value
    assert (error.details["rolled_back"], error.details["lost"]) == (True, 1)
    assert "number" not in str(error)
    assert "1 task that was acknowledged is not there" in error.why
    assert "safepoint accept NAME" in error.remedy
    assert "safepoint repair" in error.remedy
    assert command(["ls", "--store", bare]) == 6
    if way == "accept":
        assert command(["accept", "new", "--store", bare]) == 3  # not the name of one that was there
        assert command(["accept", "t", "--store", bare]) == 0
        url = bare
    else:
        url = f"sqlite:///{tmp_path}/repaired.db"
        assert command(["repair", "--into", url, "--store", bare]) == 0
    with safepoint.open(url) as cp:
        assert cp.tasks() == []
        cp.save(safepoint.State("new"))


def test_it_does_not_move_before_somebody_has_gone_on_from_it(url, tmp_path):
    """The mark that it lacks steps lies in this store: a copy without it would do them again unseen."""
    with safepoint.open(url) as cp:
        cp.store.accept("t")
        for move in (
            lambda: cp.copy_to(f"sqlite:///{tmp_path}/other.db", "t"),
            lambda: cp.export("t", tmp_path / "t.safepoint"),
        ):
            with pytest.raises(UsageError, match="nobody has gone on"):
                move()
        cp.rewind("t", 2)
        assert cp.export("t", tmp_path / "t.safepoint").checkpoints
    with safepoint.open(f"sqlite:///{tmp_path}/third.db") as there:
        there.import_(tmp_path / "t.safepoint")
        assert there.plan("t").guard

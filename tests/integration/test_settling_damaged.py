"""Calls in doubt and questions are seen and settled although other records of their task are damaged."""

from pathlib import Path

import pytest

import safepoint
from safepoint import Damaged, Done
from safepoint.cli.ending import run as command
from tests.integration.conftest import STORES, new_url
from tests.support.runs import declare
from tests.support.spoil import change_call

LOST = 3


@pytest.fixture(params=STORES)
def cp(request, tmp_path):
    with safepoint.open(new_url(request.param, tmp_path)) as cp:
        yield cp


@pytest.fixture
def torn(cp, world):
    """A task that stopped in its third step, whose third call's record is damaged; a function that goes on with it."""
    act, stop = declare(world), [True]

    def step(run):
        run.call(act, run.state.step)
        if run.state.step == 2 and stop:
            raise KeyboardInterrupt
        if run.state.step == 3:
            run.finish("done")

    with pytest.raises(KeyboardInterrupt):
        safepoint.run_agent(step, task_id="t", input="i", store=cp)
    stop.clear()
    damage(cp)
    return lambda: safepoint.run_agent(step, task_id="t", store=cp)


def damage(cp):
    """Call 3 as a disk would spoil it, past the library."""
    if cp.store.chunked:
        change_call(cp, "t", LOST, seal=bytes(16))
    else:
        (journal,) = Path(cp.store.url.removeprefix("file://")).glob("*/journal*")
        lines = journal.read_bytes().splitlines(keepends=True)
        hit = [i for i, line in enumerate(lines) if b'"no":3' in line.replace(b" ", b"")]
        assert hit
        for i in hit:
            lines[i] = lines[i].replace(b'"calls"', b'"cells"', 1)
        journal.write_bytes(b"".join(lines))


def test_run_agent_says_that_it_waits_and_that_records_are_damaged(cp, torn, world):
    before = list(world.log)
    for _ in range(2):  # where the call is parked, and where it is found parked
        outcome = torn()
        assert outcome.status == "waiting"
        (call,) = outcome.pending
        assert (call.tool, call.status, call.step) == ("test-write", "in_doubt", 2)
        assert next(iter(call.arguments.values())) == 2
        assert outcome.recovery.lost_calls is not None
        assert outcome.recovery.guard == 3
        if cp.store.chunked:  # no line of a journal says which call it told of
            assert outcome.recovery.lost_calls == (LOST,)
    assert world.log == before
    # The whole journal is not given out as if it were whole.
    with pytest.raises(Damaged):
        cp.calls("t")
    assert [c.no for c in cp.calls("t", status="in_doubt")] == [call.no]
    assert cp.resolve("t", call, Done("made")).status == "succeeded"
    outcome = torn()
    while outcome.status == "waiting":
        (call,) = outcome.pending
        cp.resolve("t", call.no, Done("made"))
        outcome = torn()
    assert (outcome.status, outcome.result) == ("finished", "done")
    assert world.log[:3] == before


def test_the_damaged_one_itself_cannot_be_resolved(cp, torn):
    with pytest.raises(Damaged):
        cp.resolve("t", LOST, Done("made"))


def test_a_shell_lists_what_it_can_and_settles(cp, torn, world, capsys):
    if not cp.store.persistent:
        pytest.skip("persistent is False")
    before = list(world.log)
    torn()
    url = cp.store.url
    for words in (["calls", "t"], ["calls", "t", "--status", "in_doubt"]):
        assert command([*words, "--store", url]) in {0, 6}
        said = capsys.readouterr()
        assert "in_doubt" in said.out
    assert command(["calls", "t", "--store", url]) == 6
    assert "damaged" in capsys.readouterr().err
    (call,) = cp.calls("t", status="in_doubt")
    assert command(["resolve", "t", str(call.no), "--done", "1", "--yes", "--store", url]) == 0
    assert world.log == before
    assert cp.calls("t", status="in_doubt") == []


def test_what_is_lost_is_said_in_the_log(cp, torn, caplog):
    torn()
    with caplog.at_level("WARNING"):
        assert len(cp.calls("t", status="in_doubt")) == 1
    assert "damaged" in caplog.text
    for status in (None, "succeeded"):
        with pytest.raises(Damaged):
            cp.calls("t", status=status)

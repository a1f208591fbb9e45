"""Rows that are numbered and sealed before the server has given them their numbers."""

import os
import random

import pytest

from safepoint.model import new_id
from safepoint.rows import CallWrite, Commit, Numbers, PauseRow, PauseWrite, replace
from safepoint.stores import folding
from safepoint.stores.foreseen import REMEMBERED, Foreseen, ready
from safepoint.testing.build import call_row


def pause_row(**changes):
    return replace(PauseRow(line=1, step=0, name="p", base_seq=1, question=b"?"), **changes)


def some_commit(rng: random.Random) -> tuple[Commit, dict, dict, Numbers]:
    """A commit of new and changed rows, some of them written twice, and the rows that it meets."""
    last = Numbers(rng.randrange(100), rng.randrange(1, 100), rng.randrange(1, 100), 1, rng.randrange(100))
    there = {no: call_row(1, no=no, version=rng.randrange(1, 4)).sealed("t") for no in range(1, last.call + 1)}
    asked = {no: pause_row(no=no, version=rng.randrange(1, 4)).sealed("t") for no in range(1, last.pause + 1)}
    calls, pauses, versions = [], [], {no: row.version for no, row in there.items()}
    for _ in range(rng.randrange(5)):
        stamp = rng.choice(["", "began", "ended"])
        if rng.random() < 0.4:
            calls.append(CallWrite(call_row(1), stamp))
        else:
            no = rng.choice([*versions][-2:])
            calls.append(CallWrite(replace(there[no], version=versions[no], reason=str(rng.random())), stamp))
            versions[no] += 1
    for _ in range(rng.randrange(3)):
        pauses.append(PauseWrite(pause_row() if rng.random() < 0.5 else asked[rng.choice([*asked])]))
        if pauses[-1].row.version:
            del asked[pauses[-1].row.no]
    asked |= {ask.row.no: ask.row for ask in pauses if ask.row.version}
    return Commit(task="t", id=new_id(), calls=tuple(calls), pauses=tuple(pauses)), there, asked, last


@pytest.mark.parametrize("seed", range(200))
def test_it_numbers_as_the_stores_do_that_have_the_rows_at_hand(seed):
    commit, there, asked, last = some_commit(random.Random(seed))
    calls, pauses, no, position, pause_no = folding.numbered(commit, there, asked, last.call, last.position, last.pause)
    made = ready(commit, last)
    assert {row.no: row for row in made.calls} == calls
    assert {row.no: row for row in made.pauses} == pauses
    assert made.next == Numbers(last.seq, no, pause_no, last.line, position)
    for row, version in zip(made.calls, made.call_versions, strict=True):
        assert version == (there[row.no].version if row.no in there else 0)
    for pause, version in zip(made.pauses, made.pause_versions, strict=True):
        assert version == (asked[pause.no].version if pause.version > 1 else 0)


def test_what_is_not_known_begins_at_nothing():
    known = Foreseen()
    assert known.get("t") == Numbers()
    known.put("t", Numbers(seq=3))
    assert known.get("t") == Numbers(seq=3)
    known.drop("t")
    assert known.get("t") == Numbers()


def test_it_remembers_only_so_many_and_nothing_over_a_fork():
    known = Foreseen()
    for i in range(REMEMBERED + 1):
        known.put(f"{i}", Numbers(seq=1))
    assert known.get("0") == Numbers()
    assert known.get(f"{REMEMBERED}").seq == 1
    with known._lock:  # as a thread might hold it
        child = os.fork()
        if not child:
            os._exit(0 if known.get(f"{REMEMBERED}") == Numbers() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert known.get(f"{REMEMBERED}").seq == 1

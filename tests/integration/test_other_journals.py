"""Going over to a branch with a journal of its own: what others of the task have done meanwhile is not made again by itself."""

import io
from collections import Counter

import apsw
import pytest

import safepoint
from safepoint import Damaged, Done, InDoubt, NotDone, recovering, tool

MADE: Counter[str] = Counter()


@pytest.fixture(autouse=True)
def _none_made():
    MADE.clear()


@tool(name="orders.place")
def place(item: str) -> str:
    MADE[item] += 1
    return f"order of {item}"


def work(cp, upto, **options):
    with cp.resume("t", **options) as run:
        while run.state.step < upto:
            run.call(place, f"part {run.state.step}")
            run.save()


def finish_with_a_person(cp, upto, **options):
    """The same, and a person who looks at what is in doubt, and says what is true."""
    asked: list[str] = []
    while True:
        try:
            return work(cp, upto, **options) or asked
        except InDoubt as doubt:
            for no in doubt.details["calls"]:
                (call,) = [c for c in cp.calls("t") if c.no == no]
                item = call.arguments["item"]
                asked.append(item)
                cp.resolve("t", no, Done(f"order of {item}") if MADE[item] else NotDone())
            options = {}


def parts(*numbers):
    return [f"part {n}" for n in numbers]


def test_back_to_what_a_blocked_rewind_had_left(cp):
    work(cp, 1)
    cp.rewind("t", 1, journal="block")
    assert finish_with_a_person(cp, 3) == parts(0, 1)  # the last: that which the others stand before, and may have begun
    cp.rewind("t", branch="main")
    assert finish_with_a_person(cp, 5) == parts(1, 2, 3)
    assert all(n == 1 for n in MADE.values())


def test_over_to_a_blocked_fork_that_others_went_past(cp):
    work(cp, 1)
    cp.fork("t", 1, name="aside", journal="block")
    work(cp, 3)
    assert finish_with_a_person(cp, 5, branch="aside") == parts(0, 1, 2, 3)
    assert all(n == 1 for n in MADE.values())


def test_over_to_a_branch_of_the_line_that_was_left(cp):
    work(cp, 1)
    cp.rewind("t", 1, journal="block")
    assert finish_with_a_person(cp, 3) == parts(0, 1)
    cp.fork("t", 2, name="aside")
    assert finish_with_a_person(cp, 5, branch="aside") == parts(1, 2, 3)
    assert all(n == 1 for n in MADE.values())


def test_over_to_an_imported_branch(cp):
    file = io.BytesIO()
    with safepoint.open("memory://") as other:  # another life of the task, of which this one knows nothing
        work(other, 1)
        other.export("t", file, seq=2)
    MADE.clear()
    work(cp, 3)
    branch = cp.import_(io.BytesIO(file.getvalue())).branch
    assert finish_with_a_person(cp, 5, branch=branch) == parts(1, 2, 3)
    assert all(n == 1 for n in MADE.values())


def test_a_fresh_fork_makes_all_anew(cp):
    work(cp, 3)
    cp.fork("t", 1, name="trial", journal="fresh")
    assert finish_with_a_person(cp, 4, branch="trial") == []
    assert finish_with_a_person(cp, 5, branch="main") == []
    assert [MADE[p] for p in parts(0, 1, 2, 3, 4)] == [2, 2, 2, 2, 1]


def test_ahead_of_all_others_nobody_is_asked(cp):
    work(cp, 1)
    cp.fork("t", 1, name="aside", journal="block")
    work(cp, 3)
    assert finish_with_a_person(cp, 5, branch="aside") == parts(0, 1, 2, 3)
    cp.rewind("t", 4)
    cp.rewind("t", branch="aside")
    assert cp.plan("t").guard == 0
    assert finish_with_a_person(cp, 6) == []


def spoil(cp, monkeypatch, *seqs):
    """The bodies of these checkpoints are damaged from now on."""
    read = cp.store.read

    def spoilt(task, **selector):
        found = read(task, **selector)
        if found is not None and found[0].seq in seqs:
            raise Damaged(f"checkpoint {found[0].seq} of task {task!r} is damaged", "", "", task=task)
        return found

    monkeypatch.setattr(cp.store, "read", spoilt)


def test_a_guard_that_came_with_a_new_head_outlives_that_head(cp, monkeypatch):
    work(cp, 1)
    cp.fork("t", 1, name="aside", journal="block")
    work(cp, 3)
    guarded = cp.rewind("t", branch="aside")
    assert (guarded.label, cp.plan("t").guard) == ("under guard", 4)
    spoil(cp, monkeypatch, guarded.seq)
    assert finish_with_a_person(cp, 5) == parts(0, 1, 2, 3)
    assert all(n == 1 for n in MADE.values())


def test_a_guard_over_several_lines_outlives_a_head_that_is_lost(cp, monkeypatch):
    work(cp, 1)
    cp.rewind("t", 1, journal="block")  # 3, on main~1
    cp.rewind("t", branch="main")
    work(cp, 3)
    head = cp.rewind("t", 3)  # on main~2, under a guard for what main has done
    assert cp.plan("t").guard == 4
    spoil(cp, monkeypatch, head.seq)
    assert finish_with_a_person(cp, 5) == parts(0, 1, 2, 3)
    assert all(n == 1 for n in MADE.values())


def test_back_from_a_branch_under_a_guard_on_the_same_line(cp, monkeypatch):
    """Why it stands under a guard, nobody knows any more: records may have been lost that were mended since."""
    work(cp, 2)
    survey = recovering.survey
    with monkeypatch.context() as m:

        def lost(cp, row):
            found = survey(cp, row)
            found.lost_calls = True
            return found

        m.setattr(recovering, "survey", lost)
        cp.rewind("t", 2)
    assert cp.plan("t").guard == 3
    cp.rewind("t", branch="main")
    assert cp.plan("t").guard == 3


@pytest.mark.parametrize("back", ["branch", "seq"])
def test_back_from_a_branch_whose_row_is_lost(tmp_path, back):
    url = f"sqlite:///{tmp_path}/agent.db"
    with safepoint.open(url) as cp:
        work(cp, 1)
        cp.rewind("t", 1, journal="block")
        assert finish_with_a_person(cp, 3) == parts(0, 1)
    db = apsw.Connection(f"{tmp_path}/agent.db")
    db.execute("DELETE FROM sp_branches WHERE name = 'main~1'")
    db.close()
    with safepoint.open(url) as cp:
        cp.rewind("t", branch="main") if back == "branch" else cp.rewind("t", 2)
        assert finish_with_a_person(cp, 5) == parts(1, 2, 3)
    assert all(n == 1 for n in MADE.values())


def test_back_on_a_branch_whose_name_is_as_long_as_may_be(cp):
    """An automatic name is no longer than a name may be: else nobody could go back from there, nor fall back."""
    work(cp, 2)
    for name in ("z" * 512, "y" * 510):
        cp.fork("t", 2, name=name)
        cp.rewind("t", branch=name)
        first, second = cp.rewind("t", 2).branch, cp.rewind("t", 2).branch
        assert (len(first), len(second)) == (512, 512)
        assert first.endswith("~1")
        assert second.endswith("~2")
        cp.rewind("t", branch="main")


def test_a_not_done_that_another_journal_has_overtaken(cp):
    """Said truthfully on two journals, made on one: the other's word is older than that, and is asked for again."""
    work(cp, 0)
    cp.rewind("t", 1, journal="block")

    def parked(**options):
        with pytest.raises(InDoubt) as doubt:
            work(cp, 1, **options)
        return doubt.value.details["calls"][0]

    first = cp.status("t").branch
    cp.resolve("t", parked(), NotDone())
    cp.rewind("t", 1, journal="block")
    cp.resolve("t", parked(), NotDone())
    work(cp, 1)
    assert MADE["part 0"] == 1
    again = parked(branch=first)
    assert MADE["part 0"] == 1
    cp.resolve("t", again, Done("order of part 0"))
    work(cp, 1)
    assert MADE["part 0"] == 1

"""Which checkpoints may be deleted: DESIGN 3, Retention, and invariant 6 as far as it is decided without a store."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safepoint.errors import UsageError
from safepoint.model import Retention, to_us
from safepoint.rows import CheckpointRow
from safepoint.rules.retention import (
    At,
    again_every,
    all_every,
    due,
    first_every,
    judge,
    look_every,
    near,
    overdue_below,
    stood_on,
    threshold,
)

NOW = datetime(2026, 1, 31, tzinfo=UTC)
DAY = timedelta(days=1)


def row(seq, kind="step", *, age=timedelta(0), size=100, pinned=False):
    return CheckpointRow(
        id=str(seq), seq=seq, step=seq, kind=kind, created_at=to_us(NOW - age), format=1, schema=1, size=size, digest=b"",
        pinned=pinned,
    )  # fmt: skip


def headers(*rows):
    return sorted(rows, key=lambda r: -r.seq)


def steps(n, **more):
    return headers(*(row(i, **more) for i in range(1, n + 1)))


def test_the_newest_stay_and_the_oldest_go_first():
    assert due(steps(5), Retention(keep_latest=2), NOW) == [1, 2, 3]
    assert due(steps(2), Retention(keep_latest=2), NOW) == []


def test_limits_delete_only_beyond_the_newest():
    old = steps(5, age=10 * DAY)
    assert due(old, Retention(keep_latest=3, max_age=DAY), NOW) == [1, 2]
    assert due(old, Retention(keep_latest=3, max_age=30 * DAY), NOW) == []
    assert due(old, Retention(keep_latest=None, max_age=DAY), NOW) == [1, 2, 3, 4], "the newest one always stays"


def test_a_limit_of_bytes_counts_from_the_newest():
    assert due(steps(5), Retention(keep_latest=1, max_bytes=250), NOW) == [1, 2, 3]
    assert due(steps(5), Retention(keep_latest=4, max_bytes=0), NOW) == [1]
    assert due(steps(5), Retention(keep_latest=None, max_bytes=0), NOW) == [1, 2, 3, 4]


def test_either_limit_suffices():
    rows = headers(row(1, age=9 * DAY), row(2), row(3), row(4))
    assert due(rows, Retention(keep_latest=1, max_age=DAY, max_bytes=10_000), NOW) == [1]
    assert due(rows, Retention(keep_latest=1, max_age=DAY, max_bytes=200), NOW) == [1, 2]


def test_milestones_stay_unless_told_otherwise():
    rows = headers(row(1, "milestone"), row(2), row(3), row(4))
    assert due(rows, Retention(keep_latest=1), NOW) == [2, 3]
    assert due(rows, Retention(keep_latest=1, keep_milestones=False), NOW) == [1, 2, 3]


def test_pinned_and_named_ones_stay_and_count():
    rows = headers(row(1, pinned=True), row(2), row(3), row(4, pinned=True), row(5))
    assert due(rows, Retention(keep_latest=2), NOW, keep=[2]) == [3]


def test_failure_leaves_have_a_count_of_their_own():
    rows = headers(row(1, "failure"), row(2), row(3, "failure"), row(4, "failure"), row(5))
    assert due(rows, Retention(keep_latest=2, keep_failures=1), NOW) == [1, 3]
    assert due(rows, Retention(keep_latest=2, keep_failures=0), NOW) == [1, 3, 4]
    assert due(rows, Retention(keep_latest=1), NOW) == [2], "leaves take no place of the others"


def test_keep_all_keeps_all():
    assert due(steps(500, age=1000 * DAY), Retention.keep_all(), NOW) == []
    assert Retention.keep_all().keeps_all
    assert not Retention().keeps_all


@pytest.mark.parametrize(
    "wrong", [{"keep_latest": 0}, {"keep_latest": -1}, {"max_age": -DAY}, {"max_bytes": -1}, {"keep_failures": -1}]
)
def test_what_cannot_be_meant_is_refused(wrong):
    with pytest.raises(UsageError):
        Retention(**wrong)


kinds = st.sampled_from(["step", "manual", "milestone", "failure"])
rows_of_any_kind = st.lists(
    st.builds(
        lambda kind, days, size, pinned: (kind, days * DAY, size, pinned),
        kinds, st.integers(0, 20), st.integers(0, 500), st.booleans(),
    ),
    max_size=30,
)  # fmt: skip


@given(
    rows_of_any_kind,
    st.builds(
        Retention,
        st.none() | st.integers(1, 8),
        st.none() | st.integers(0, 20).map(lambda d: d * DAY),
        st.none() | st.integers(0, 2000),
        st.booleans(),
        st.integers(0, 3),
    ),
    st.sets(st.integers(1, 30)),
)
def test_what_must_stay_stays_whatever_the_rules_say(plain, retention, keep):
    rows = headers(*(row(i, k, age=a, size=s, pinned=p) for i, (k, a, s, p) in enumerate(plain, 1)))
    gone = due(rows, retention, NOW, keep)
    by_seq = {r.seq: r for r in rows}
    assert gone == sorted(set(gone))
    assert not any(by_seq[n].pinned or n in keep for n in gone)
    newest = [r.seq for r in rows if r.kind != "failure"][: retention.keep_latest or 1]
    assert not set(newest) & set(gone)
    if retention.keep_milestones:
        assert not any(by_seq[n].kind == "milestone" for n in gone)
    assert due([r for r in rows if r.seq not in gone], retention, NOW, keep) == [], "one cleanup is enough"


def test_sweeps_at_save_time_are_spread():
    assert threshold(100, 0) == 100
    assert threshold(100, 16 * 200) == 200
    assert threshold(None, 0) == 1
    assert look_every(Retention()) == 50
    assert look_every(Retention(keep_latest=1)) == 1
    assert look_every(Retention(keep_latest=None, max_age=DAY)) == 1


def test_what_a_save_reads_does_not_grow_with_the_task():
    assert first_every(100) == 4
    assert first_every(100_000) == 4096
    assert near(Retention(keep_latest=20), 100) == 228
    assert near(Retention(keep_latest=20, max_age=DAY), 100) is None
    assert near(Retention(keep_latest=None, max_bytes=5), 1) is None
    assert again_every(10) == first_every(10)
    assert again_every(100_000) == 512
    for checkpoints in (1, 10, 100_000):
        assert checkpoints / all_every(checkpoints) <= 4
        assert all_every(checkpoints) <= max(1, checkpoints // 2)


def test_one_that_goes_lies_below_where_so_many_are_due():
    """Behind what stays for ever, a look is overdue if, and only if, there is one."""
    rules, due_at = Retention(keep_latest=20), 100
    for n in (1, 20, 119, 120, 121, 300):
        rows = [row(seq, "milestone" if seq <= 200 else "step") for seq in range(1, 201 + n)]
        gone = due(headers(*rows), rules, NOW)
        below = overdue_below(rules, 200 + n, due_at)
        assert below is not None
        assert (len(gone) >= due_at) == any(seq < below for seq in gone), (n, below)
    assert overdue_below(Retention(keep_latest=20, max_age=DAY), 500, 100) is None


def test_what_cannot_be_read_stays_and_counts_for_nothing():
    rows = steps(6)
    assert due(rows, Retention(keep_latest=2), NOW, unreadable={6, 5}) == [1, 2]
    assert due(rows, Retention(keep_latest=2), NOW, unreadable={2}) == [1, 3, 4]
    big = headers(row(1), row(2), row(3, size=10**15), row(4))
    assert due(big, Retention(keep_latest=1, max_bytes=1000), NOW, unreadable={3}) == []
    leaves = headers(row(1, "failure"), row(2, "failure"), row(3))
    assert due(leaves, Retention(keep_latest=1, keep_failures=1), NOW, unreadable={2}) == []


def test_each_verdict_says_why():
    rows = headers(
        row(1), row(2, "milestone"), row(3, pinned=True), row(4, "failure"), row(5, "failure"), row(6), row(7, age=2 * DAY), row(8), row(9)
    )  # fmt: skip
    limits = Retention(keep_latest=1, max_age=DAY, max_bytes=250, keep_failures=1)
    said = {v.seq: (v.goes, v.why) for v in judge(rows, limits, NOW, {6: "the fork point of side"}, {8})}
    assert said == {
        9: (False, "the newest"),
        8: (False, "cannot be read; damaged checkpoints are never deleted"),
        7: (True, "older than max_age"),
        6: (False, "the fork point of side"),
        5: (False, "a failure, of the newest 1"),
        4: (True, "a failure, beyond the newest 1"),
        3: (False, "pinned"),
        2: (False, "a milestone"),
        1: (True, "beyond max_bytes"),
    }
    assert {v.why for v in judge(rows, Retention.keep_all(), NOW)} >= {"all are kept", "pinned"}
    assert not any(v.goes for v in judge(rows, Retention.keep_all(), NOW))
    plain = [v.why for v in judge(steps(3), Retention(keep_latest=2), NOW)]
    assert plain == ["of the newest 2", "of the newest 2", "beyond the newest 2"]


# -- what calls and pauses keep


@dataclass
class Stands:
    base_seq: int
    line: int = 1
    step: int = 0
    status: str = "succeeded"
    fence: int = 0


def kept(heads, *calls, pauses=(), live=None):
    return stood_on([At(*h) for h in heads], calls, pauses, live) - {0}


@pytest.mark.parametrize("status", ["succeeded", "failed", "quarantined"])
def test_what_a_resume_of_a_head_would_read_keeps_its_base(status):
    rows = [Stands(seq, step=step, status=status) for seq, step in ((1, 0), (2, 1), (3, 2))]
    assert kept([(1, 1)], *rows) == {2, 3}
    assert kept([(1, 1), (1, 2), (2, 0)], *rows) == {2, 3}, "of two heads of a line the one further back"
    assert kept([(2, 0)], *rows) == set()
    assert kept([], *rows) == set()


def test_pauses_of_any_status_keep_theirs_alike():
    rows = [Stands(seq, step=step, status=status) for seq, step, status in ((1, 0, "used"), (2, 1, "used"), (3, 0, "answered"))]
    assert kept([(1, 1)], pauses=rows) == {2, 3}


@pytest.mark.parametrize("status", ["started", "paused", "in_doubt"])
def test_an_open_call_keeps_its_base_on_any_line(status):
    assert kept([(1, 9)], Stands(4, line=7, status=status)) == {4}


def test_a_live_run_keeps_the_newest_base_of_its_own():
    rows = [Stands(1, fence=3), Stands(2, fence=3), Stands(3, fence=2)]
    assert kept([(1, 9)], *rows, live=3) == {2}
    assert kept([(1, 9)], *rows) == set()

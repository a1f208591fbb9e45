"""Which checkpoints a task goes back over, on which branch it goes on, and when records of calls may be gone.

The rules are compared with a plain model of a task that forks, goes back and forgets; in it, calls are kept and deleted one by one.
"""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from safepoint import State, UsageError, messages_complete, requires
from safepoint.codec.kinds import Tagged
from safepoint.rows import BranchRow, CallRow, CheckpointRow, Head
from safepoint.rules import health, recovery, retention
from safepoint.rules.recovery import Verdict


def row(seq, parent=None, step=0, branch="main", kind="step"):
    return CheckpointRow(
        id=f"id{seq}", seq=seq, branch=branch, parent_seq=parent, step=step, kind=kind, created_at=0, format=1, schema=1,
        size=0, digest=b"",
    )  # fmt: skip


def branch(name, head, line=1, forked_from=None):
    return BranchRow("", name, Head(head, f"id{head}"), line, forked_from)


def call(no, step, line=1, effect="write", status="succeeded", base=1):
    return CallRow(
        no=no, line=line, step=step, ident=b"", tool="t", effect=effect, idempotency_key="", status=status, base_seq=base
    )


MAIN = [row(1), row(2, 1, 1), row(3, 2, 2), row(4, 3, 3)]
BACK = [*MAIN, row(5, 2, 1, "main~1"), row(6, 5, 2, "main~1"), row(7, 6, 2, "main~1", "failure")]
BRANCHES = [branch("main", 4), branch("main~1", 6, 1, 2)]


# -- lineage


def test_lineage_goes_on_below_the_fork_point():
    assert recovery.lineage(MAIN, BRANCHES[:1], "main") == [4, 3, 2, 1]
    assert recovery.lineage(BACK, BRANCHES, "main~1") == [6, 5, 2, 1]
    assert recovery.lineage(BACK, BRANCHES, "main") == [4, 3, 2, 1]


@pytest.mark.parametrize(
    ("gone", "expected"),
    [
        ({6}, [6, 5, 2, 1]),  # the head is named, and a look at it says that it is not there
        ({5}, [6, 2, 1]),
        ({5, 6}, [6, 2, 1]),
        ({2}, [6, 5, 1]),  # the fork point: the branch's name tells where it came from
        ({1, 2}, [6, 5]),
    ],
)
def test_a_lost_row_does_not_hide_what_lies_below(gone, expected):
    assert recovery.lineage([r for r in BACK if r.seq not in gone], BRANCHES, "main~1") == expected


def test_lineage_without_rows_of_branches():
    assert recovery.lineage(BACK, [], "main~1") == [6, 5, 2, 1]
    assert recovery.lineage(BACK, [], "other") == []
    assert recovery.newest_branch(BACK) == "main~1"
    assert recovery.newest_branch([]) is None


def test_branches_in_a_circle_end():
    rows = [row(1, 2, 0, "a"), row(2, 1, 0, "b")]
    assert recovery.lineage(rows, [branch("a", 1, 1, 2), branch("b", 2, 1, 1)], "a") == [1, 2]


def test_names():
    assert recovery.next_name("main", set()) == "main~1"
    assert recovery.next_name("main~1", {"main", "main~1"}) == "main~2"
    assert recovery.next_name("main", {"main~1", "main~2"}) == "main~3"
    assert recovery.next_name("a~x", set()) == "a~x~1"
    assert recovery.next_name("~1", set()) == "~1~1"


def test_a_head_is_there_by_hand_only_where_it_began_its_branch():
    head = row(5, 2, 1, "main~1", "manual")
    assert recovery.set_by_hand(head, branch("main~1", 5, 1, 2))
    assert not recovery.set_by_hand(row(5, 2, 1, "main~1", "step"), branch("main~1", 5, 1, 2))
    assert not recovery.set_by_hand(row(6, 5, 1, "main~1", "manual"), branch("main~1", 6, 1, 2))
    assert not recovery.set_by_hand(row(1, None, 0, "main", "manual"), branch("main", 1))


# -- gaps


@pytest.mark.parametrize(
    ("gone", "step", "expected"),
    [
        (set(), 0, False), ({3}, 0, True), ({3}, 1, True), ({3}, 3, False), ({2}, 2, False), ({2}, 1, True), ({1}, 1, False),
        ({1}, 0, True), ({4}, 3, True),
    ],
)  # fmt: skip
def test_a_gap_counts_from_the_step_that_is_gone_back_to(gone, step, expected):
    assert recovery.has_gap([r for r in MAIN if r.seq not in gone], BRANCHES[:1], 1, step) is expected


def test_a_gap_on_another_branch_of_the_line_counts_too():
    rows = [r for r in BACK if r.seq != 3]
    assert recovery.has_gap(rows, BRANCHES, 1, 1)
    assert not recovery.has_gap(rows, [branch("main", 4, 9), BRANCHES[1]], 1, 1)


def test_a_torn_row_is_there():
    assert not recovery.has_gap(MAIN[:3], BRANCHES[:1], 1, 0, [MAIN[3]])
    assert recovery.has_gap(MAIN[:3], BRANCHES[:1], 1, 0, [row(4, 2, 3)])
    assert recovery.has_gap([MAIN[0], MAIN[3]], BRANCHES[:1], 1, 1, [row(3, 2, 0)])  # not believed to be that early


def test_reach():
    assert recovery.reach(MAIN, BRANCHES[:1], [], {1}) == 4
    assert recovery.reach(MAIN, BRANCHES[:1], [call(1, 7)], {1}) == 8
    assert recovery.reach(MAIN, BRANCHES[:1], [call(1, 7, line=2)], {1}) == 4
    assert recovery.reach(MAIN[:3], BRANCHES[:1], [], {1}) == 4  # the head is lost: it was one step on at least
    assert recovery.reach([], [], [], {1}) == 0


COURSE = {"journal": "inherit", "left_guard": 0, "lost_calls": False}


def test_courses():
    def course(rows=MAIN, branches=BRANCHES[:1], calls=(), left=BRANCHES[0], chosen=MAIN[1], **more):
        return recovery.course(rows, branches, calls, left=left, chosen=chosen, **{**COURSE, **more})

    assert course() == recovery.Course(1, 0)
    assert course(left_guard=3).guard == 3
    assert course(journal="block") == recovery.Course(None, 4, course(journal="block").why)
    assert course(journal="fresh", left_guard=3, lost_calls=True) == recovery.Course(None, 0)
    assert course(lost_calls=True).guard == 4
    assert course(rows=[MAIN[0], MAIN[1], MAIN[3]]).guard == 4
    assert course(older=0).guard == 5
    assert course(older=2).guard == 7
    assert course(older=2, rows=[row(1), row(4, 1, 3)], chosen=row(1)).guard == 4 + 9
    # Back over the fork of a branch with a journal of its own: the records of the chosen one's branch are taken, under a guard.
    own = [branch("main", 4), branch("try", 6, 2, 2)]
    rows = [*MAIN, row(5, 2, 1, "try"), row(6, 5, 8, "try")]
    assert course(rows=rows, branches=own, left=own[1]) == recovery.Course(
        1, 9, course(rows=rows, branches=own, left=own[1]).why
    )
    assert course(rows=BACK, branches=BRANCHES, left=BRANCHES[1], left_guard=None).guard == 0
    by_hand = [*MAIN, row(5, 2, 1, "main~1", "manual"), row(6, 5, 2, "main~1")]
    assert course(rows=by_hand, branches=BRANCHES, left=BRANCHES[1], left_guard=None).guard == 4
    assert course(left_guard=None).guard == 0  # what is left lies on the same branch: its guard is the chosen one's too


def test_a_guard_that_cannot_be_read_matters_unless_all_branches_in_between_fell_back():
    def back(kind, rows=BACK, branches=BRANCHES):
        rows = [*rows[:4], row(5, 2, 1, "main~1", kind), *rows[5:]]
        return recovery.only_fell_back(rows, branches, branches[1], "main")

    assert back("step")
    assert not back("manual")
    assert not back("fresh")
    assert not recovery.only_fell_back([r for r in BACK if r.seq != 5], BRANCHES, BRANCHES[1], "main")
    assert not recovery.only_fell_back(BACK, BRANCHES, BRANCHES[0], "main~1")
    assert recovery.only_fell_back(BACK, BRANCHES, BRANCHES[1], "main~1")


class Task:
    """A task as retention, rewinds and steps leave it. Each step makes one write, unless one of its line has been made and is on
    record; ``made`` is what the world knows."""

    def __init__(self, rng):
        self.rng = rng
        self.rows, self.branches, self.calls, self.made = {}, {}, {}, set()
        self.seq = self.no = 0
        self.current, self.guard = "main", 0
        self.commit("main", None, 0, None)
        self.branches["main"] = branch("main", 1)

    def commit(self, name, parent, step, guard):
        self.seq += 1
        self.rows[self.seq] = (row(self.seq, parent, step, name), guard or 0)
        return self.seq

    def head(self):
        return self.branches[self.current].head.seq

    def step(self):
        head = self.head()
        at, guard = self.rows[head][0].step, self.rows[head][1]
        line = self.branches[self.current].line
        on_record = any((c.line, c.step) == (line, at) for c in self.calls.values())
        if not on_record:
            if at < guard:
                return False  # parked: a person is asked
            assert (line, at) not in self.made, "a write was made a second time"
            self.made.add((line, at))
            self.no += 1
            self.calls[self.no] = call(self.no, at, line, base=head)
        seq = self.commit(self.current, head, at + 1, guard)
        b = self.branches[self.current]
        self.branches[self.current] = branch(b.name, seq, b.line, b.forked_from)
        return True

    def rewind(self):
        seq = self.rng.choice(sorted(self.rows))
        self.current = self.branch_off(seq, self.current)

    def fork(self):
        seq = self.rng.choice(sorted(self.rows))
        self.branch_off(seq, self.rows[seq][0].branch)

    def switch(self):
        self.current = self.rng.choice(sorted(self.branches))
        b = self.branches[self.current]
        chosen, own = self.rows[b.head.seq]
        guard = recovery.guard_to_return(
            [r for r, _ in self.rows.values()],
            list(self.branches.values()),
            list(self.calls.values()),
            b,
            chosen.step,
            own,
            lost_calls=False,
        )
        if guard > own:
            self.branches[b.name] = branch(b.name, self.commit(b.name, b.head.seq, chosen.step, guard), b.line, b.forked_from)

    def branch_off(self, seq, leaving):
        chosen, own = self.rows[seq]
        left = self.branches[leaving]
        course = recovery.course(
            [r for r, _ in self.rows.values()],
            list(self.branches.values()),
            list(self.calls.values()),
            journal="inherit",
            left=left,
            chosen=chosen,
            left_guard=self.rows[left.head.seq][1],
            lost_calls=False,
        )
        name = recovery.next_name(leaving, self.branches)
        new = self.commit(name, seq, chosen.step, max(course.guard, own))
        self.branches[name] = branch(name, new, course.line, seq)
        return name

    def prune(self):
        """As the stores do it: heads, fork points, and what a resume of any branch would read stay."""
        kept = {b.head.seq for b in self.branches.values()} | {b.forked_from for b in self.branches.values()}
        heads = [retention.At(b.line, self.rows[b.head.seq][0].step, b.name == self.current) for b in self.branches.values()]
        begins = retention.begins(heads)
        kept |= {c.base_seq for c in self.calls.values() if c.step >= begins.get(c.line, 1 << 30)}
        for seq in list(self.rows):
            if seq not in kept and self.rng.random() < 0.5:
                del self.rows[seq]
                self.calls = {n: c for n, c in self.calls.items() if c.base_seq != seq}


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 1 << 32),
    st.lists(st.sampled_from(["step", "step", "step", "rewind", "prune", "fork", "switch"]), max_size=40),
)
def test_no_write_is_made_twice_on_a_line_whatever_was_deleted_and_gone_back_over(seed, acts):
    task = Task(random.Random(seed))
    for act in acts:
        getattr(task, act)()
        found = recovery.lineage([r for r, _ in task.rows.values()], list(task.branches.values()), task.current)
        assert found == sorted(set(found), reverse=True)
        assert found[0] == task.head()
        # Each is an ancestor of the one before, as far as those in between are there.
        for above, below in itertools.pairwise(found):
            parent = task.rows[above][0].parent_seq
            assert parent == below or parent not in task.rows


# -- what is decided


def test_what_the_program_may_be_to_blame_for_comes_out_as_it_is():
    damaged, refused = Verdict(3, "damaged"), Verdict(2, "refused", "app.Plan")
    assert recovery.best_error([damaged, refused, Verdict(1, "invalid")]) is refused
    assert recovery.best_error([damaged, Verdict(2, "unhealthy", "x"), Verdict(1, "missing")]) is None
    assert str(refused) == "refused: app.Plan"
    assert str(damaged) == "damaged"
    assert Verdict(1).good


def test_replay_is_closed_for_reads_after_a_damaged_record():
    rows = [call(1, 0, effect="read"), call(3, 0, effect="read"), call(4, 1), call(5, 1, effect="read", status="failed")]
    assert [r.no for r in recovery.closed_from([2], rows)] == [3]
    assert [r.no for r in recovery.closed_from([], rows)] == [1, 3]  # nobody knows which


def test_damage_to_a_record_of_a_step_long_past_is_nothing_to_stand_guard_for():
    whole = [call(5, 3), call(6, 4)]
    assert recovery.long_past(call(4, 3), whole, 1, 4)
    assert not recovery.long_past(call(4, 4), whole, 1, 4)  # it says so itself
    assert not recovery.long_past(call(5, 3), whole[1:], 1, 4)  # nothing of an earlier step came after it
    assert not recovery.long_past(call(4, 3), whole, 2, 4)


# -- health


class Plan:
    def __init__(self, steps):
        self.steps = steps


@pytest.mark.parametrize(
    ("agent_state", "path", "lacks"),
    [
        ({"goal": "x"}, "goal", False), ({"goal": None}, "goal", True), ({}, "goal", True), ({"goal": ""}, "goal", False),
        ({"plan": {"steps": []}}, "plan.steps", False), ({"plan": Plan(1)}, "plan.steps", False),
        ({"plan": Plan(None)}, "plan.steps", True), ({"plan": 7}, "plan.steps", True),
        ({"plan": [{"a": 1}]}, "plan.0.a", False), ({"plan": [{"a": 1}]}, "plan.1.a", True),
        ({"plan": Tagged("dataclass", "app.Plan", {"steps": 1})}, "plan.steps", False),
        (Plan(1), "steps", False), (None, "steps", True), ({}, "messages", False), ({}, "metadata.x", True),
        ({"messages": None}, "messages", True),
    ],
)  # fmt: skip
def test_requires(agent_state, path, lacks):
    state = State("t", step=1, agent_state=agent_state)
    assert (requires(path)(state) is not None) is lacks
    assert requires(path)(State("t", agent_state=agent_state)) is None  # before the first step
    assert health.missing(state, [path]) == ([path] if lacks else [])


def chat(*roles):
    """a: an assistant turn; aXY: one that calls X and Y; X: the answer to X; u: the user."""
    found = []
    for r in roles:
        if r[0] == "a":
            calls = {"tool_calls": [{"id": c} for c in r[1:]]} if r[1:] else {}
            found.append({"role": "assistant", "content": "", **calls})
        elif r == "u":
            found.append({"role": "user", "content": "x"})
        else:
            found.append({"role": "tool", "tool_call_id": r, "content": ""})
    return found


def blocks(*roles):
    """The same for Anthropic; answers of one turn are one message."""
    found = []
    for r in roles:
        if r[0] == "a":
            uses = [{"type": "tool_use", "id": c, "name": "x", "input": {}} for c in r[1:]]
            found.append({"role": "assistant", "content": [{"type": "text", "text": "."}, *uses]})
        elif r == "u":
            found.append({"role": "user", "content": "x"})
        else:
            found.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": c} for c in r]})
    return found


@pytest.mark.parametrize(
    ("roles", "whole"),
    [
        ((), True), (("u", "a"), True), (("u", "aX", "X", "a"), True), (("u", "aX"), True), (("u", "aXY", "X"), True),
        (("u", "aX", "a"), False), (("u", "aXY", "X", "a"), False), (("u", "aX", "u", "a"), False),
        (("u", "aX", "X", "aY"), True), (("u", "aX", "X", "aY", "a"), False),
    ],
)  # fmt: skip
def test_messages_complete(roles, whole):
    for messages in (chat(*roles), blocks(*roles)):
        assert (messages_complete(State("t", messages=messages)) is None) is whole
    assert messages_complete(State("t", messages=[7, "x", {"role": "assistant"}, None, {"content": 3}])) is None


def test_what_a_check_says():
    def says(value):
        def check(state):
            if isinstance(value, Exception):
                raise value
            return value

        return health.ailing(State("t"), [check])

    assert says(None) == says(True) == ""
    assert says("bad") == "bad"
    assert says(False) == "check says no"
    assert says(ValueError("content")) == "check raised ValueError"
    with pytest.raises(UsageError):
        health.checks([1])
    assert health.checks(messages_complete) == (messages_complete,)
    assert health.paths("goal") == ("goal",)

"""The decision table and the rules around it, pure: DESIGN 6, row by row."""

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safepoint.codec import values
from safepoint.codec.registry import Registry
from safepoint.model import Done, NotDone, Unknown
from safepoint.rows import CallRow, PauseRow, TaskRow, replace
from safepoint.rules import journal, planning, quarantine
from safepoint.rules.journal import Action, Match, Raised, Request, StepJournal
from safepoint.rules.policy import Policy

READ, IDEMPOTENT, TRANSACTIONAL, WRITE = "read", "idempotent", "transactional", "write"
EFFECTS = (READ, IDEMPOTENT, TRANSACTIONAL, WRITE)
IDENT = b"i" * 16
OTHER = b"o" * 16


def row(no=1, status="succeeded", effect=READ, *, ident=IDENT, policy=None, **more):
    given: dict[str, Any] = {"line": 1, "step": 0, "tool": "t", "idempotency_key": "k", "base_seq": 1, "result": b"r"} | more
    return CallRow(no=no, status=status, effect=effect, ident=ident, policy=policy.encode() if policy else b"", **given)


def ask(ident=IDENT, effect=READ, call_id=None, **more):
    return Request(tool=more.pop("tool", "t"), effect=effect, ident=ident, call_id=call_id, **more)


# -- the table


def test_nothing_recorded_is_executed():
    assert journal.decide(None) is Action.EXECUTE


@pytest.mark.parametrize("effect", EFFECTS)
def test_a_success_is_reused_and_never_executed(effect):
    assert journal.decide(row(effect=effect)) is Action.REUSE
    assert journal.decide(row(effect=effect), past=True) is Action.REUSE


@pytest.mark.parametrize("effect", EFFECTS)
def test_a_success_whose_result_is_missing_is_lost_and_never_executed(effect):
    assert journal.decide(row(effect=effect, result=None)) is Action.LOST


@pytest.mark.parametrize("effect", EFFECTS)
def test_a_failure_that_the_step_went_past_is_raised_again(effect):
    assert journal.decide(row(status="failed", effect=effect), past=True) is Action.RAISE


@pytest.mark.parametrize("effect", [READ, IDEMPOTENT, TRANSACTIONAL])
def test_a_failure_that_ended_the_step_is_executed_anew(effect):
    assert journal.decide(row(status="failed", effect=effect)) is Action.REPEAT


def test_a_failed_write_is_executed_anew_only_if_it_did_not_happen():
    assert journal.decide(row(status="failed", effect=WRITE, not_done=True)) is Action.REPEAT
    assert journal.decide(row(status="failed", effect=WRITE)) is Action.PARK


@pytest.mark.parametrize("effect", [READ, IDEMPOTENT, TRANSACTIONAL])
def test_what_may_be_repeated_is(effect):
    assert journal.decide(row(status="started", effect=effect)) is Action.REPEAT


def test_an_open_write_is_verified_or_parked():
    assert journal.decide(row(status="started", effect=WRITE, policy=Policy(verify=True))) is Action.VERIFY
    assert journal.decide(row(status="started", effect=WRITE)) is Action.PARK


def test_an_open_idempotent_call_whose_key_is_forgotten_is_a_write():
    old = row(status="started", effect=IDEMPOTENT, policy=Policy(key_ttl=60.0), started_at=1_000_000)
    assert journal.decide(old, now_us=61_000_000) is Action.REPEAT
    assert journal.decide(old, now_us=61_000_001) is Action.PARK
    assert journal.decide(replace(old, policy=b""), now_us=10**15) is Action.REPEAT


@pytest.mark.parametrize("effect", EFFECTS)
def test_calls_that_wait_for_people(effect):
    assert journal.decide(row(status="in_doubt", effect=effect)) is Action.PARK
    assert journal.decide(row(status="paused", effect=effect), answered=False) is Action.WAIT
    assert journal.decide(row(status="paused", effect=effect), answered=True) is Action.REPEAT
    assert journal.decide(row(status="quarantined", effect=effect)) is Action.RAISE


@given(
    effect=st.sampled_from(EFFECTS),
    status=st.sampled_from(["started", "succeeded", "failed", "paused", "in_doubt", "quarantined"]),
    past=st.booleans(),
    answered=st.booleans(),
    result=st.sampled_from([b"r", None]),
    policy=st.builds(Policy, verify=st.booleans(), final=st.booleans(), dedups=st.booleans()),
)
def test_no_write_is_repeated_blindly_whatever_is_recorded(effect, status, past, answered, result, policy):
    """Invariant 5."""
    action = journal.decide(
        row(status=status, effect=effect, result=result, policy=policy), past=past, answered=answered, now_us=0
    )
    assert action is not Action.EXECUTE
    if effect == WRITE and status != "paused":
        assert action is not Action.REPEAT
    if status == "succeeded":
        assert action in {Action.REUSE, Action.LOST}


# -- a verdict, and who was the holder


@pytest.mark.parametrize(
    ("verdict", "status", "not_done"),
    [
        (Done("x"), "succeeded", False),
        (NotDone(), "failed", True),
        (Unknown("no index"), "in_doubt", False),
        (OSError("gone"), "in_doubt", False),
        (None, "in_doubt", False),
        (True, "in_doubt", False),
        (Done, "in_doubt", False),  # the class, not an answer
    ],
)
def test_what_a_verdict_means(verdict, status, not_done):
    settled = journal.settle(row(status="started", effect=WRITE, fence=3), verdict, presumed=0)
    assert (settled.status, settled.not_done) == (status, not_done)
    assert settled.reason or status != "in_doubt"


@pytest.mark.parametrize(
    ("policy", "status"),
    [
        (Policy(verify=True), "in_doubt"),
        (Policy(verify=True, final=True), "failed"),
        (Policy(verify=True, dedups=True), "failed"),
    ],
)
def test_not_done_after_a_presumed_death_is_believed_only_if_nothing_can_come_later(policy, status):
    open_write = row(status="started", effect=WRITE, fence=3, policy=policy)
    assert journal.settle(open_write, NotDone(), presumed=3).status == status
    assert journal.settle(open_write, NotDone(), presumed=2).status == "failed"  # that holder's death is proven
    assert journal.settle(open_write, Done(1), presumed=3).status == "succeeded"


def test_a_policy_is_stored_whole_and_a_later_versions_extra_field_is_let_be():
    policy = Policy(
        verify=True, final=True, dedups=True, settle=0.5, key_ttl=3.0, replan="reuse", key=True, attempts=4, model=True
    )
    assert Policy.decode(policy.encode()) == policy
    assert Policy().encode() == b""
    assert Policy.decode(b"") == Policy()
    import msgspec

    assert Policy.decode(msgspec.msgpack.encode({"verify": True, "of_2031": 1})) == Policy(verify=True)


# -- went the step past a failure?


def test_a_step_went_past_a_failure_that_a_later_call_had_seen():
    failed = row(1, "failed", began=1, ended=2)
    assert not journal.went_past(failed, [failed])
    assert journal.went_past(failed, [failed, row(2, asked=2, began=3, ended=4)])


def test_calls_asked_together_are_not_later_ones():
    failed = row(1, "failed", began=1, ended=3)
    sibling = row(2, asked=0, began=4, ended=5)  # begins when the first has ended, for want of a free place
    assert not journal.went_past(failed, [failed, sibling])


def test_only_failures_are_gone_past():
    assert not journal.went_past(row(1, ended=2), [row(2, asked=9)])
    assert not journal.went_past(row(1, "started"), [row(2, asked=9)])


# -- matching


def match(step, *requests):
    return [(f.kind, f.row.no if f.row else None) for f in step.match(requests)]


def test_equal_calls_are_told_apart_by_their_order():
    step = StepJournal([row(1), row(2), row(3, ident=OTHER)])
    assert match(step, ask()) == [(Match.RECORDED, 1)]
    assert match(step, ask(OTHER)) == [(Match.RECORDED, 3)]
    assert match(step, ask()) == [(Match.RECORDED, 2)]
    assert match(step, ask()) == [(Match.NEW, None)]


def test_an_id_names_one_call_of_a_reply():
    step = StepJournal([row(1, call_id="a"), row(2, call_id="b")])
    assert match(step, ask(call_id="b")) == [(Match.RECORDED, 2)]
    step.over(ask(call_id="b"), 2, delivered=True)
    assert match(step, ask(call_id="b")) == [(Match.RECORDED, 2)], "asked for twice, it is still that call"
    assert match(step, ask(call_id="a")) == [(Match.RECORDED, 1)]


def test_ids_of_a_model_that_was_asked_anew_do_not_matter():
    step = StepJournal([row(1, call_id="x1", scope=7), row(2, call_id="x2", scope=7)])
    assert match(step, ask(call_id="y1", scope=9), ask(call_id="y2", scope=9)) == [(Match.RECORDED, 1), (Match.RECORDED, 2)]
    step.over(ask(call_id="y1", scope=9), 1, delivered=True)
    assert match(step, ask(call_id="y1", scope=9)) == [(Match.RECORDED, 1)], "the new id sticks to it"


def test_exact_ids_come_before_order():
    step = StepJournal([row(1, call_id="a"), row(2, call_id="b")])
    assert match(step, ask(call_id="c"), ask(call_id="a")) == [(Match.RECORDED, 2), (Match.RECORDED, 1)]


def test_the_same_id_with_other_arguments_in_one_reply_is_a_mismatch():
    step = StepJournal([row(1, call_id="call_0", scope=4)])
    assert match(step, ask(OTHER, call_id="call_0", scope=4)) == [(Match.MISMATCH, 1)]
    assert match(step, ask(OTHER, call_id="call_0", scope=5)) == [(Match.NEW, None)], "each reply counts anew"


def test_the_same_id_twice_at_once_is_one_call():
    step = StepJournal()
    assert match(step, ask(call_id="a"), ask(call_id="a"), ask(OTHER, call_id="a")) == [
        (Match.NEW, None),
        (Match.BUSY, None),
        (Match.MISMATCH, None),
    ]
    assert match(step, ask(call_id="a")) == [(Match.BUSY, None)], "its intent is being written"
    step.over(ask(call_id="a"), 0, delivered=False)
    assert match(step, ask(call_id="a")) == [(Match.NEW, None)], "no intent was written: the id is free"


def test_a_recorded_call_is_served_to_one_at_a_time():
    step = StepJournal([row(1, "started", call_id="a")])
    assert match(step, ask(call_id="a"), ask(call_id="a")) == [(Match.RECORDED, 1), (Match.BUSY, 1)]


def test_what_was_delivered_is_not_offered_again():
    step = StepJournal([row(1, effect=WRITE)])
    assert match(step, ask(effect=WRITE)) == [(Match.RECORDED, 1)]
    step.over(ask(effect=WRITE), 1, delivered=True)
    assert match(step, ask(effect=WRITE)) == [(Match.NEW, None)]


def test_what_could_not_be_delivered_is_offered_again():
    step = StepJournal([row(1, effect=WRITE)])
    for _ in range(3):
        assert match(step, ask(effect=WRITE)) == [(Match.RECORDED, 1)]
        step.over(ask(effect=WRITE), 1, delivered=False)


def test_ids_of_replies_that_came_at_once_are_no_mismatch():
    step = StepJournal()
    assert match(step, ask(call_id="call_0", scope=-4)) == [(Match.NEW, None)]
    step.put(row(5, call_id="call_0", scope=-4))
    step.begun(ask(call_id="call_0", scope=-4), 5)
    step.over(ask(call_id="call_0", scope=-4), 5, delivered=True)
    assert match(step, ask(OTHER, call_id="call_0", scope=-4)) == [(Match.NEW, None)]


def test_what_was_interrupted_is_offered_again():
    step = StepJournal()
    assert match(step, ask()) == [(Match.NEW, None)]
    step.put(row(1, "started"))
    step.begun(ask(), 1)
    step.over(ask(), 1, delivered=False)
    assert match(step, ask()) == [(Match.RECORDED, 1)]


def test_what_was_set_aside_is_not_there():
    assert match(StepJournal([row(1, superseded=True)]), ask()) == [(Match.NEW, None)]


# -- a write that happened and is not asked for again


@pytest.mark.parametrize(
    ("replan", "kind"), [("park", (Match.PARK, 1)), ("execute", (Match.NEW, None)), ("reuse", (Match.RECORDED, 1))]
)
@pytest.mark.parametrize("effect", [WRITE, TRANSACTIONAL])
def test_a_write_of_other_arguments_while_one_is_unclaimed(effect, replan, kind):
    step = StepJournal([row(1, effect=effect)])
    assert match(step, ask(OTHER, effect, replan=replan)) == [kind]


def test_the_business_operation_decides_where_there_is_a_key():
    step = StepJournal([row(1, effect=WRITE, op_key=b"order-7")])
    assert match(step, ask(OTHER, WRITE, op_key=b"order-8")) == [(Match.NEW, None)]
    assert match(step, ask(OTHER, WRITE, op_key=b"order-7")) == [(Match.RECORDED, 1)]


def test_a_write_from_before_the_tool_had_a_key_is_parked():
    step = StepJournal([row(1, effect=WRITE)])
    assert match(step, ask(OTHER, WRITE, op_key=b"order-7")) == [(Match.PARK, 1)]


def test_what_is_claimed_parks_nobody():
    step = StepJournal([row(1, effect=WRITE)])
    assert match(step, ask(effect=WRITE)) == [(Match.RECORDED, 1)]
    assert match(step, ask(OTHER, WRITE)) == [(Match.NEW, None)]


def test_all_exact_matches_are_claimed_before_anything_is_parked():
    step = StepJournal([row(1, effect=WRITE, call_id="a")])
    assert match(step, ask(OTHER, WRITE), ask(effect=WRITE)) == [(Match.NEW, None), (Match.RECORDED, 1)]


@pytest.mark.parametrize(
    "there",
    [row(1, effect=READ), row(1, effect=IDEMPOTENT), row(1, effect=WRITE, tool="u"), row(1, "failed", WRITE, not_done=True)],
    ids=["a read", "idempotent", "another tool", "did not happen"],
)
def test_nothing_else_parks(there):
    assert match(StepJournal([there]), ask(OTHER, WRITE)) == [(Match.NEW, None)]


def test_reads_never_park():
    assert match(StepJournal([row(1, effect=WRITE)]), ask(OTHER, READ)) == [(Match.NEW, None)]


# -- identity of arguments


def canonical(value):
    return journal.canonical(values.decode_plain(values.encode(value, Registry())))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"x": 1, "y": 2}, {"y": 2, "x": 1}),
        ({"x": {"b": [1, {"d": 1, "c": 2}], "a": 0}}, {"x": {"a": 0, "b": [1, {"c": 2, "d": 1}]}}),
        (1, 1.0),
        ([0, -3], [0.0, -3.0]),
        (2**70, float(2**70)),
    ],
)
def test_what_means_the_same_is_the_same(a, b):
    assert canonical(a) == canonical(b)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1, True),
        (0, False),
        (None, False),
        ("1", 1),
        (b"a", "a"),
        ([1, 2], [2, 1]),
        (["ab", "c"], ["a", "bc"]),
        ([[], []], [[[]]]),
        ({"a": 1}, ["a", 1]),
        ({"a": [1]}, {"a": 1}),
        (1.5, 1),
        (Decimal(1), 1),
        ((1,), [1]),
        ({1}, [1]),
        (2**53, 2**53 + 1),
        ("e\u0301", "\u00e9"),
    ],
)
def test_what_differs_is_told_apart(a, b):
    assert canonical(a) != canonical(b)


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4) | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def folded(v):
    """An independent reading of the rule: nested tuples that compare as the calls should."""
    match v:
        case bool() | None:
            return ("const", repr(v))
        case int() | float():
            return ("number", v)
        case str() | bytes():
            return (type(v).__name__, v)
        case list():
            return ("list", tuple(folded(x) for x in v))
        case dict():
            return ("dict", frozenset((k, folded(x)) for k, x in v.items()))
    raise AssertionError(v)


@given(json_like, json_like)
def test_canonical_bytes_are_equal_exactly_where_the_values_are(a, b):
    assert (canonical(a) == canonical(b)) == (folded(a) == folded(b))


def test_the_tools_name_is_part_of_the_identity():
    assert journal.ident_of("a", b"x") != journal.ident_of("b", b"x")


# -- a step that raises twice on the same results


def test_reads_are_asked_anew_after_two_raises_on_the_same_results():
    rows = [row(1, attempts=1, step=5), row(2, effect=WRITE, step=5)]
    once = journal.after_raise(None, 1, 5, rows)
    assert journal.to_ask_anew(once, 1, 5, rows) == []
    twice = journal.after_raise(once, 1, 5, rows)
    assert [r.no for r in journal.to_ask_anew(twice, 1, 5, rows)] == [1], "the write is not set aside"
    assert [r.no for r in journal.to_ask_anew(twice, 1, 3, [row(9, step=3), *rows])] == [1], "the resume begins earlier"
    assert journal.to_ask_anew(twice, 1, 6, rows) == []
    assert journal.to_ask_anew(twice, 2, 5, rows) == []


def test_new_results_begin_the_count_anew():
    once = journal.after_raise(None, 1, 5, [row(1)])
    other = journal.after_raise(once, 1, 5, [row(1), row(2)])
    assert other.times == 1
    assert journal.after_raise(other, 1, 5, [row(1), row(2)]).times == 2
    assert journal.after_raise(other, 1, 6, [row(1), row(2)]).times == 1


def test_a_tool_that_fails_anew_at_each_attempt_does_not_hide_that_the_reply_is_old():
    first = journal.after_raise(None, 1, 0, [row(1), row(2, "failed", attempts=1)])
    second = journal.after_raise(first, 1, 0, [row(1), row(2, "failed", attempts=2)])
    assert second.times == 2


def test_what_is_remembered_of_a_raise_survives_storage():
    raised = Raised(3, 14, b"s" * 16, 2)
    assert Raised.decode(raised.encode()) == raised
    assert Raised.decode(b"") is None


# -- a call that kills its process


def test_only_a_call_that_was_alone_and_under_way_is_counted():
    alone = row(1, "started", fence=4)
    assert quarantine.killer([alone, row(2)], 4) == (alone, 1)
    assert quarantine.killer([alone], 0) is None, "the last holder did not die"
    assert quarantine.killer([alone], 5) is None, "the last holder died before it came to it"
    assert quarantine.killer([alone, row(2, "started", fence=4)], 4) is None
    for effect in (WRITE, TRANSACTIONAL):
        assert quarantine.killer([row(1, "started", effect, fence=4)], 4) is None


def test_the_fifth_death_running_sets_it_aside():
    at = row(1, "started", fence=4)
    for n in (1, 2, 3, 4):
        killer = quarantine.killer([at], 4)
        assert killer is not None
        found, count = killer
        assert count == n
        at = quarantine.noted(found, count)
        assert (at.status, quarantine.deaths(at), quarantine.kept_reason(at)) == ("started", n, at.reason)
        assert journal.decide(at) is Action.REPEAT
    assert quarantine.deaths(quarantine.noted(at, 0)) == 0
    killer = quarantine.killer([at], 4)
    assert killer is not None
    at = quarantine.noted(*killer)
    assert at.status == "quarantined"
    assert journal.decide(at) is Action.RAISE
    assert quarantine.kept_reason(None) == quarantine.kept_reason(row(reason="a person's")) == ""


# -- plan


def task(**more):
    return TaskRow(**({"task": "t", "status": "interrupted"} | more))


def as_it_is(call: CallRow) -> Any:
    return call


def plan(calls=(), pauses=(), *, row_of_task=None, problem=None, seq=4, lease=None):
    return planning.plan(row_of_task or task(), lease, seq, problem, 1, 3, calls, pauses, as_it_is, now_us=0)


def pause(no=1, status="open", **more):
    given: dict[str, Any] = {"line": 1, "step": 3, "name": "p", "base_seq": 1, "question": b""} | more
    return PauseRow(no=no, status=status, **given)


def test_a_plan_says_what_becomes_of_each_call_of_the_steps_to_come():
    p = plan(
        [
            row(1, step=2),  # of a step that is done
            row(2, step=3),
            row(3, "started", step=3),
            row(4, "started", WRITE, step=3, policy=Policy(verify=True)),
            row(5, "failed", step=3, ended=9),
            row(6, step=3, superseded=True),
            row(7, line=2, step=3),
        ]
    )
    assert [(c.call.no, c.action) for c in p.calls] == [(2, "reuse"), (3, "repeat"), (4, "verify"), (5, "repeat")]
    assert p.does == "carry on"
    assert p.seq == 4
    assert "call 4 t (write, started): verify" in str(p)


def test_a_plan_knows_that_later_steps_went_past_what_failed():
    p = plan([row(1, "failed", step=3, ended=2), row(2, step=4)])
    assert [c.action for c in p.calls] == ["raise", "reuse"]


def test_a_plan_waits_for_people():
    assert plan([row(1, "in_doubt", WRITE, step=3)]).does == "wait"
    asked = plan([row(1, "paused", step=3)], [pause(call_no=1)])
    assert (asked.does, asked.pauses, asked.calls[0].action) == ("wait", (1,), "wait")
    told = plan([row(1, "paused", step=3)], [pause(call_no=1, status="answered")])
    assert (told.does, told.calls[0].action) == ("carry on", "repeat")
    both = plan([row(1, "paused", step=3)], [pause(call_no=1, status="answered"), pause(2, call_no=1)])
    assert (both.does, both.calls[0].action) == ("wait", "wait")


def test_a_plan_of_nothing_to_do():
    assert plan(row_of_task=task(status="finished")).does == "nothing"
    assert plan(seq=None).does == "begin"
    refused = plan(problem=ValueError("secret"))
    assert (refused.does, refused.why, refused.skipped) == ("refused", "ValueError", ((4, "ValueError"),))


def test_a_plan_asks_anew_what_the_run_will():
    rows = [row(1, step=3), row(2, effect=WRITE, step=3)]
    twice = journal.after_raise(journal.after_raise(None, 1, 3, rows), 1, 3, rows)
    p = plan(rows, row_of_task=task(status="failed", raised=twice.encode()))
    assert [c.action for c in p.calls] == ["ask_anew", "reuse"]


def test_a_missing_result_that_the_step_was_told_of_is_not_carried_on():
    step = StepJournal([row(1, effect=WRITE, result=None), row(2, effect=WRITE, ident=OTHER)])
    assert match(step, ask(effect=WRITE)) == [(Match.RECORDED, 1)]
    step.over(ask(effect=WRITE), 1, delivered=False, told=True)
    assert [r.no for r in step.left_over()] == [2]
    assert match(step, ask(effect=WRITE)) == [(Match.RECORDED, 1)], "asked again it is still that call"

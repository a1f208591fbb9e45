"""Mending the end of a history, and windows of one: field case 42 by hand, and any cut of any valid history."""

import copy
import json
from itertools import chain
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from safepoint import UsageError, history
from safepoint.history import Answer, Context
from tests.support.histories import FORMATS, cuts, histories, refusal
from tests.support.scale import scale
from tests.unit.test_history_rules import END, NEW, U, a, asks, fc, msg, out, res, rs, server, text, think, tool, u, use

LOST = history.INTERRUPTED


def mended(messages, answers=None, **context):
    """Repair, with what holds of every repair."""
    before = copy.deepcopy(messages)
    known = Context(**context)
    found = history.repair(messages, answers, known)
    assert messages == before
    again = history.repair(found.messages, answers, known)
    assert not again.changed
    assert again.messages == found.messages
    assert found.changed == bool(found.said)
    return found


def tools(*ids):
    return [tool(i, LOST) for i in ids]


def lost(*ids):
    return u(*({"type": "tool_result", "tool_use_id": i, "content": LOST, "is_error": True} for i in ids))


def gone(*ids):
    return [{"type": "function_call_output", "call_id": i, "output": LOST} for i in ids]


# -- field case 42

FORTY_TWO = {
    "a late result": ([U, asks("x"), U, tool("x")], [U, asks("x"), tool("x"), U]),
    "a late result of several": ([U, asks("x", "y"), tool("y"), U, tool("x")], [U, asks("x", "y"), tool("y"), tool("x"), U]),
    "no result, and the user goes on": ([U, asks("x"), U], [U, asks("x"), *tools("x"), U]),
    "two results for one call": ([U, asks("x"), tool("x", "1"), tool("x", "2")], [U, asks("x"), tool("x", "1")]),
    "a result without a call": ([U, asks("x"), tool("x"), tool("z")], [U, asks("x"), tool("x")]),
    "a result and no call at all": ([tool("x"), U], [U]),
    "parallel calls, one result": ([U, asks("x", "y", "z"), tool("y")], [U, asks("x", "y", "z"), tool("y"), *tools("x", "z")]),
    "late, in blocks": ([U, a(use("x")), U, u(res("x"))], [U, a(use("x")), u(res("x")), U]),
    "late, in one message": ([U, a(use("x")), u(text(), res("x"))], [U, a(use("x")), u(res("x")), u(text())]),
    "no result, in blocks": ([U, a(use("x"), use("y")), U], [U, a(use("x"), use("y")), lost("x", "y"), U]),
    "two results, in blocks": ([U, a(use("x")), u(res("x"), res("x"), text())], [U, a(use("x")), u(res("x"), text())]),
    "an orphan, in blocks": ([U, a(use("x")), u(res("z"), res("x"))], [U, a(use("x")), u(res("x"))]),
    "parallel, in blocks": ([U, a(use("x"), use("y")), u(res("y"), text())], [U, a(use("x"), use("y")), lost("x"), u(res("y"), text())]),
    "in two messages": ([U, a(text()), a(use("x")), u(res("x"))], [U, a(text()), a(use("x")), u(res("x"))]),
    "only an orphan": ([U, a(text()), u(res("z"))], [U, a(text())]),
    "late, in items": ([U, fc("x"), U, out("x")], [U, fc("x"), U, out("x")]),
    "no output": ([U, rs(), fc("x"), fc("y"), U], [U, rs(), fc("x"), fc("y"), *gone("x", "y"), U]),
    "two outputs": ([U, fc("x"), out("x"), out("x")], [U, fc("x"), out("x")]),
    "an output of nothing": ([U, fc("x"), out("z"), out("x")], [U, fc("x"), out("x")]),
    "a second output of an older call": ([U, fc("x"), out("x"), fc("y"), out("x")], [U, fc("x"), out("x"), fc("y"), *gone("y")]),
    "a late output of an older call": ([U, fc("x"), U, fc("y"), out("x")], [U, fc("x"), U, fc("y"), *gone("y"), out("x")]),
}  # fmt: skip


@pytest.mark.parametrize("case", FORTY_TWO)
def test_field_case_42_results_out_of_place(case):
    messages, wanted = FORTY_TWO[case]
    found = mended(messages)
    assert found.messages == wanted
    assert [f for f in found.faults if not f.note] == []
    assert refusal(found.format, found.messages) == ""
    assert (refusal(found.format, messages) == "") == (not found.changed)


def test_a_fault_before_the_tail_is_named_and_left_alone():
    for messages, rule, index in [
        ([U, asks("x"), U, END], "C1", 1),
        ([U, asks("x"), END, tool("x")], "C1", 1),
        ([tool("x"), U, asks("y")], "C2", 0),
        ([U, a(use("x")), U, a(text()), U], "A2", 1),
        ([U, fc("x"), U, msg()], "R1", 1),
        ([U, rs(), U, fc("x")], "R3", 1),
    ]:
        found = mended(messages)
        kept = [f for f in found.faults if not f.note]
        assert [(f.rule, f.index) for f in kept] == [(rule, index)]
        assert found.messages[: index + 1] == messages[: index + 1]


# -- real results, and turns that are not whole


def test_real_results_come_first():
    said = {"x": "12", "y": Answer("failed: No", error=True)}
    found = mended([U, asks("x", "y", "z")], said)
    assert found.messages[2:] == [tool("x", "12"), tool("y", "failed: No"), *tools("z")]
    assert [o.id for o in found.closed] == ["x", "y", "z"]
    assert [o.id for o in found.recorded] == ["x", "y"]
    assert found.said == ("answered 3 open calls of message 1: 2 from the journal, 1 as interrupted",)
    asked = []

    def said_of(o):
        asked.append(o)
        return Answer("12")

    found = mended([U, a(use("x", {"k": 1}), use("y")), u(res("y"))], said_of)
    assert found.messages[2] == u({"type": "tool_result", "tool_use_id": "x", "content": "12"})
    assert [(o.index, o.id, o.name, o.arguments) for o in asked] == [(1, "x", "f", {"k": 1})]
    with pytest.raises(UsageError):
        mended([], 7)


@pytest.mark.parametrize(
    ("item", "wanted"),
    [
        ({"type": "custom_tool_call", "call_id": "x", "name": "f", "input": ""}, {"call_id": "x", "output": LOST}),
        ({"type": "local_shell_call", "id": "l", "call_id": "x", "action": {}}, {"id": "x", "output": LOST}),
        (
            {"type": "shell_call", "call_id": "x", "action": {}},
            {"call_id": "x", "output": [{"stdout": "", "stderr": LOST, "outcome": {"type": "timeout"}}]},
        ),
        ({"type": "apply_patch_call", "call_id": "x", "operation": {}}, {"call_id": "x", "status": "failed", "output": LOST}),
    ],
)
def test_each_kind_of_call_is_answered_in_its_own_way(item, wanted):
    assert mended([U, item]).messages[2] == {"type": f"{item['type']}_output", **wanted}


def test_nothing_stands_for_a_screenshot():
    found = mended([U, {"type": "computer_call", "call_id": "x", "id": "cu", "action": {}}])
    assert [f.rule for f in found.faults] == ["R1"]
    assert not found.changed


CUT = {
    "arguments": [
        {**asks(), "tool_calls": [{"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a": "b'}}]}
    ],
    "no arguments yet": [
        {**asks(), "tool_calls": [{"id": "x", "type": "function", "function": {"name": "f", "arguments": ""}}]}
    ],
    "a second call that has begun": [asks("x", tool_calls=[asks("x")["tool_calls"][0], {"id": "y", "type": "function"}])],
    "nothing but a role": [{"role": "assistant", "content": None}],
    "a snapshot with its finish_reason": [{**END, "finish_reason": None}],
    "said so": [{**END, "status": "incomplete"}],
    "input as text": [a(use("x", '{"a'))],
    "no input": [a(text(), {"type": "tool_use", "id": "x", "name": "f"})],
    "a signature that has not come": [a(think(signature=""))],
    "no signature": [a({"type": "thinking", "thinking": "so"}, use("x"))],
    "a snapshot with its stop_reason": [{**a(text()), "stop_reason": None}],
    "no block": [a(), u(text())],
    "an empty block": [a(think(), text(""))],
    "a server's call": [a({"type": "server_tool_use", "id": "s", "name": "w"})],
    "reasoning alone": [rs()],
    "an item in progress": [rs(), msg(status="in_progress")],
    "a call in progress": [rs(), fc("x", '{"a', status="in_progress")],
    "an item without its end": [rs(), msg(), rs("rs_2")],
}


@pytest.mark.parametrize("case", CUT)
def test_a_turn_that_is_not_whole_is_left_out(case):
    turn = CUT[case]
    model = [m for m in turn if m.get("role") != "user"]
    for before in ([U], [U, asks("a"), tool("a"), END, U] if history.detect([U, *turn]) in ("chat", "plain") else [U]):
        for after in ([], [m for m in turn if m.get("role") == "user"] or [U]):
            found = mended([*before, *model, *after])
            assert found.messages == [*before, *after]
            assert found.dropped == tuple(range(len(before), len(before) + len(model)))
            assert "the model is asked again" in found.said[0]
            assert found.faults == ()


def test_a_turn_that_somebody_acted_on_is_kept():
    bad = {**asks(), "tool_calls": [{"id": "x", "type": "function", "function": {"name": "f", "arguments": "{"}}]}
    assert mended([U, bad, tool("x", "no JSON")]).messages == [U, bad, tool("x", "no JSON")]
    both = asks("y", tool_calls=[*bad["tool_calls"], *asks("y")["tool_calls"]])
    assert mended([U, both, tool("y")]).messages == [U, both, tool("y"), *tools("x")]
    marked = fc("x", status="in_progress")
    assert mended([U, rs(), marked, out("x")]).messages == [U, rs(), marked, out("x")]


def test_a_turn_behind_one_that_is_left_out_is_answered():
    cut = CUT["arguments"][0]
    assert mended([U, asks("y"), cut]).messages == [U, asks("y"), *tools("y")]
    assert mended([U, asks("y"), U, cut, cut]).messages == [U, asks("y"), *tools("y"), U]
    assert mended([U, a(use("y")), a()]).messages == [U, a(use("y")), lost("y")]
    assert mended([U, fc("y"), U, rs()]).messages == [U, fc("y"), *gone("y"), U]


def test_a_paused_turn_stays_as_it_is():
    turn = [U, a(think(), server("s"))]
    assert not mended(turn).changed
    assert history.check(turn, Context(model=NEW, asking=True)) == []


def test_the_calls_of_a_kept_conversation_are_on_the_server():
    found = mended([out("x"), U], format="responses", continues=True)
    assert not found.changed
    assert mended([out("x"), U], format="responses").messages == [U]


# -- any valid history, cut anywhere


def dump(messages):
    return [json.dumps(m, ensure_ascii=False).encode() for m in messages]


@pytest.mark.scaled
@pytest.mark.parametrize("format", FORMATS)
def test_any_cut_of_the_last_turn(format):
    @settings(max_examples=scale(12, 120), deadline=None, suppress_health_check=list(HealthCheck))
    @given(histories(format), st.booleans())
    def each(turns, goes_on):
        before = list(chain(*turns[:-1]))
        kept = dump(before)
        assert refusal(format, [*before, *turns[-1]]) == "", "of the generator"
        assert [f for f in history.check([*before, *turns[-1]], Context(format=format)) if not f.note] == []
        for left in cuts(turns[-1]):
            messages = [*before, *left, *([U] if goes_on else [])]
            stored = dump(messages)
            found = mended(messages, format=format)
            assert refusal(format, found.messages) == ""
            assert [f for f in found.faults if not f.note] == []
            assert history.check(found.messages, Context(format=format)) == list(found.faults)
            assert all(x is y for x, y in zip(before, found.messages, strict=False))
            assert dump(found.messages[: len(before)]) == kept
            assert dump(messages) == stored
            # What stays of the turn stays word for word.
            mine = dump(found.messages[len(before) :])
            assert [x for x in dump(left) if x in mine] == dump(left)[: len(left) - len(found.dropped)] or found.dropped
            assert set(found.dropped) <= set(range(len(before), len(before) + len(left)))

    each()


@pytest.mark.scaled
@pytest.mark.parametrize("format", FORMATS)
def test_a_window_never_splits_a_pair(format):
    @settings(max_examples=scale(40, 400), deadline=None, suppress_health_check=list(HealthCheck))
    @given(histories(format, rounds=6), st.integers(1, 12))
    def each(turns, keep):
        messages = list(chain(*turns))
        window = history.trim(messages, keep, Context(format=format))
        assert refusal(format, window) == ""
        places = [next(i for i, m in enumerate(messages) if m is w) for w in window]
        assert places == sorted(set(places))
        assert window[-1] is messages[-1]
        extra = sum(m.get("role") in ("system", "developer") for m in window) + 1
        newest = len(turns[-1]) if turns[-1][0].get("role") != "user" else 1
        assert len(window) <= max(keep, newest) + extra
        assert len(window) >= min(keep, len(messages)) - 12  # no more than a turn is lost to where it may be cut
        again = history.trim(window, keep, Context(format=format))
        assert [id(m) for m in again] == [id(m) for m in window]

    each()


class Odd:
    """Has neither truth, nor equality, nor a hash."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other):
        raise AssertionError

    __bool__ = __eq__


_WORDS = ("role", "content", "type", "id", "call_id", "tool_calls", "tool_call_id", "tool_use_id", "function", "arguments", "input",
          "status", "name", "summary", "phase", "signature", "thinking", "stop_reason", "refusal", "output")  # fmt: skip
_VALUES = st.sampled_from(["assistant", "user", "tool", "system", "function_call", "function_call_output", "reasoning", "message",
                           "tool_use", "tool_result", "thinking", "text", "server_tool_use", "x_tool_result", "x", "", "{}", None, 1,
                           Odd()])  # fmt: skip
_ANY = st.recursive(
    _VALUES, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.sampled_from(_WORDS), v, max_size=6), max_leaves=12
)


@pytest.mark.scaled
def test_messages_may_be_anything():
    @settings(max_examples=scale(100, 800), deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        st.lists(_ANY | st.dictionaries(st.sampled_from(_WORDS), _ANY, max_size=6), max_size=6), st.sampled_from(["", *FORMATS])
    )
    def each(messages, format):
        context = Context(format=format, asking=True, thinking=True, stored=False)
        for f in history.check(messages, context):
            assert f.rule in history.RULES
        found = history.repair(messages, None, context)
        again = history.repair(found.messages, None, context)
        assert not again.changed
        try:
            window = history.trim(messages, 2, context)
        except UsageError:
            return
        assert len(window) <= len(messages)

    each()


def test_windows_by_hand():
    long = [{"role": "system", "content": "s"}, U, asks("x"), tool("x"), asks("y", "z"), tool("y"), tool("z"), END]
    assert history.trim(long, 1) == [*long[:2], END]
    assert history.trim(long, 2) == [*long[:2], END]
    assert history.trim(long, 4) == [*long[:2], *long[4:]]
    assert history.trim(long, 5) == [*long[:2], *long[4:]]
    assert history.trim(long[:-1], 1) == [*long[:2], *long[4:7]]  # the last round is never cut
    assert history.trim(long, 6) == [*long[:2], *long[2:]]
    assert history.trim(long, 99) == long
    assert history.trim([*long, {"role": "user", "content": "next"}], 1) == [long[0], {"role": "user", "content": "next"}]
    assert history.trim([], 3) == []
    assert history.trim([U, END, U, END], 2) == [U, END]
    items = [U, rs(), msg(), U, rs("rs_2"), fc("x"), out("x")]
    assert history.trim(items, 3) == [U, *items[4:]]
    assert history.trim(items, 2) == [U, *items[4:]]
    calls = [
        U,
        a(server("s"), use("x")),
        u(res("x")),
        a({"type": "web_search_tool_result", "tool_use_id": "s", "content": []}, text()),
    ]
    assert history.trim([*calls, U], 3) == [U]
    assert history.trim(calls, 2) == calls
    wrong: list[Any] = [0, True, "3"]
    for keep in wrong:
        with pytest.raises(UsageError):
            history.trim([U], keep)


def test_thinking_that_is_bound_to_what_is_before_it_is_not_cut():
    messages = [U, a(think(), text()), U, a(think(), text()), U]
    with pytest.raises(UsageError, match="A13"):
        history.trim(messages, 3, Context(model=NEW))
    assert history.trim(messages, 3, Context(model=NEW, preserved=False)) == messages[2:]
    assert history.trim(messages, 1, Context(model=NEW)) == [U]
    assert history.trim(messages, 5, Context(model=NEW)) == messages

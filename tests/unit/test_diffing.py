"""The difference of two states: the line, the entries, and that the patch makes exactly the other one."""

import copy
import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safepoint.codec import decode_plain, encode, to_json
from safepoint.errors import UsageError
from safepoint.rules import diffing
from safepoint.rules.diffing import apply, compare, short
from tests.support.samples import REGISTRY, values


def applied(document: Any, patch: Any) -> Any:
    """RFC 6902 as it is written there; shares no code with the library."""
    document = copy.deepcopy(document)
    for op in patch:
        names = [p.replace("~1", "/").replace("~0", "~") for p in op["path"].split("/")[1:]]
        if not names:
            assert op["op"] == "replace"
            document = copy.deepcopy(op["value"])
            continue
        at = document
        for name in names[:-1]:
            at = at[int(name)] if isinstance(at, list) else at[name]
        last = names[-1]
        if isinstance(at, list):
            i = int(last)
            if op["op"] == "add":
                assert 0 <= i <= len(at)
                at.insert(i, copy.deepcopy(op["value"]))
            elif op["op"] == "remove":
                del at[i]
            else:
                assert i < len(at)
                at[i] = copy.deepcopy(op["value"])
        elif op["op"] == "remove":
            del at[last]
        else:
            assert (last in at) == (op["op"] == "replace")
            at[last] = copy.deepcopy(op["value"])
    return document


def exactly(a, b):
    return json.dumps(a) == json.dumps(b)


def check(a, b):
    before = json.dumps([a, b])
    diff = compare("t@1", "t@2", a, b)
    patch = diff.patch()
    assert exactly(applied(a, patch), b)
    assert exactly(apply(a, patch), b)
    assert json.dumps([a, b]) == before, "nothing that was given is changed"
    assert bool(diff) == (not exactly(a, b))
    assert (diff.entries == ()) or bool(diff)
    assert str(diff)
    return diff


keys = st.sampled_from(["a", "b", "a/b", "~", "~1", "m~0n/", "", "$type", "$x", "é", "0", "-"])
scalars = st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([0.0, -0.0, 1.0, 2**70, "a", "", "$"])
trees = st.recursive(scalars, lambda c: st.lists(c, max_size=6) | st.dictionaries(keys, c, max_size=5), max_leaves=30)


@given(trees, trees)
def test_the_patch_makes_exactly_the_other(a, b):
    check(to_json(a), to_json(b))


@given(trees, st.data())
def test_of_a_tree_and_one_that_is_like_it(a, data):
    def changed(x):
        if data.draw(st.integers(0, 9)) == 0:
            return data.draw(scalars)
        if isinstance(x, list):
            kept = [changed(i) for i in x if data.draw(st.integers(0, 5))]
            if data.draw(st.booleans()):
                kept.insert(data.draw(st.integers(0, len(kept))), data.draw(scalars))
            return kept
        if isinstance(x, dict):
            held = {k: changed(v) for k, v in x.items() if data.draw(st.integers(0, 5))}
            if data.draw(st.booleans()):
                held[data.draw(keys)] = data.draw(scalars)
            return dict(reversed(held.items())) if data.draw(st.integers(0, 5)) == 0 else held
        return x

    check(to_json(a), to_json(changed(a)))


@given(values, values)
def test_of_every_type_of_the_table(a, b):
    trees = [to_json(decode_plain(encode({"messages": [x], "agent_state": x}, REGISTRY))) for x in (a, b)]
    check(*trees)


@given(st.lists(st.integers(0, 5), max_size=30), st.lists(st.integers(0, 5), max_size=30))
def test_lists_beyond_the_bound(a, b):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(diffing, "LCS_CELLS", 20)
        check(a, b)
        check([*a, "x", *b, "y"], [*b, "x", *a, "z", "y"])


def test_an_insertion_in_the_middle_is_one_operation():
    a = [{"n": i} for i in range(3000)]
    b = [*a[:10], "new", *a[10:1500], *a[1501:2990], {"n": "other"}, *a[2991:], "end"]
    assert len(compare("a", "b", a, b).patch()) == 4


def test_an_insertion_among_equal_items_is_one_operation():
    a = [0, 1] * 100
    assert len(check(a, [*a[:77], 5, *a[77:]]).patch()) == 1


def state(messages=(), step=0, metadata=None, **fields):
    return {
        "messages": list(messages), "agent_state": fields, "metadata": metadata or {}, "step": step, "turns": [], "finished": False,
    }  # fmt: skip


def line(a, b):
    return str(check(a, b))


USER = {"role": "user", "content": "hello"}


def test_the_line_of_the_issue():
    after = state([USER, {"role": "assistant", "content": "I will"}], phase="act")
    assert line(state(phase="plan"), after) == "+2 messages, phase: plan -> act"


@pytest.mark.parametrize(
    ("a", "b", "text"),
    [
        (state([USER]), state([USER]), "no difference"),
        (state([USER]), state([]), "-1 message"),
        (state([USER]), state([{**USER, "content": "bye"}]), "1 message changed"),
        (state([USER, 1, 2]), state([USER, 3, 2, 4]), "+1 message, 1 message changed"),
        (state([{"content": {"a": 1, "b": 2}}]), state([{"content": {"a": 2, "b": 3}}]), "1 message changed"),
        (state(step=3), state(step=4, x=1), "+x: 1, step: 3 -> 4"),
        (state(x="1"), state(x=1), 'x: "1" -> 1'),
        (state(x=1), state(x=1.0), "x: 1 -> 1.0"),
        (state(x=True), state(x="true"), 'x: true -> "true"'),
        (state(x=[1, 2]), state(x={"a": 1}), "x: [2 items] -> {1 key}"),
        (state(x={"y": {"z": 1}}), state(x={"y": {"z": 2}}), "x.y.z: 1 -> 2"),
        (state(x=[1, [2]]), state(x=[1, [3]]), "x[1][0]: 2 -> 3"),
        (state(metadata={"customer": "a"}), state(), "-metadata.customer: a"),
        (state(**{"a key": 1}), state(**{"a key": 2}), '"a key": 1 -> 2'),
        (state(x={"a.b": 1}), state(x={"a.b": 2}), 'x["a.b"]: 1 -> 2'),
        (state(x="a" * 100), state(x=""), f'x: "{"a" * 39}…" -> ""'),
        (state(a=1, b=2), state(b=2, a=1), "agent_state: {2 keys} -> {2 keys}"),
    ],
)  # fmt: skip
def test_lines(a, b, text):
    assert line(a, b) == text


def test_a_line_names_no_more_than_a_dozen_fields():
    text = line(state(), state(**{f"f{i}": i for i in range(30)}))
    assert text.startswith("+f0: 0, ")
    assert text.endswith(", 18 more")


def test_fields_of_classes_are_shown_and_others_by_type():
    def plan(cls, **fields):
        return state(plan={"$type": "dataclass", "class": cls, "value": fields})

    assert line(plan("app:Plan", goal="a"), plan("app:Plan", goal="b")) == "plan.goal: a -> b"
    assert line(plan("app:Plan", goal="a"), plan("app:Other", goal="a")) == "plan: <app:Plan> -> <app:Other>"
    one, two = (plan("safepoint:Resource", kind="upload", value=v) for v in ("s3cret", "s3cret2"))
    assert line(one, two) == "plan: <Resource upload> -> <Resource upload>"
    assert "s3cret" not in str(check(state(), two).entries) + line(state(), two) + line(two, state())
    when = to_json(decode_plain(encode(datetime(2026, 1, 2, tzinfo=UTC), REGISTRY)))
    assert short(when) == '<datetime "2026-01-02T00:00:00+00:00">'
    assert short({"$bytes": "AAAA"}) == "<3 bytes>"


def test_entries_have_pointers():
    diff = check(state(**{"a/b": {"~": 1}, "gone": 1}), state(**{"a/b": {"~": 2}, "new": [1]}))
    assert [(e.op, e.path) for e in diff.entries] == [
        ("changed", "/agent_state/a~1b/~0"),
        ("removed", "/agent_state/gone"),
        ("added", "/agent_state/new"),
    ]
    assert "before" not in repr(diff.entries[0])
    assert "gone" not in repr(diff)


def test_deep_trees_are_compared():
    a: Any = 1
    b: Any = 2
    for _ in range(190):
        a, b = {"value": [a]}, {"value": [b]}
    check(a, b)


@pytest.mark.parametrize(
    "patch",
    [
        5, [5], [{}], [{"op": "test", "path": "/a", "value": 1}], [{"op": "replace", "path": "/zz", "value": 1}],
        [{"op": "replace", "path": "a", "value": 1}], [{"op": "remove", "path": ""}], [{"op": "remove", "path": "/l/5"}],
        [{"op": "add", "path": "/l/9", "value": 1}], [{"op": "add", "path": "/l/-1", "value": 1}], [{"op": "add", "path": "/l/01", "value": 1}],
        [{"op": "add", "path": "/a/b/c", "value": 1}], [{"op": "add", "path": "/l/0"}], [{"op": "remove", "path": 3}],
        [{"op": "add", "path": "/l/9999999999999999999999", "value": 1}], [{"op": "add", "path": "/l/١", "value": 1}],
    ],
)  # fmt: skip
def test_a_patch_that_does_not_fit_is_refused(patch):
    document = {"a": 1, "l": [1]}
    with pytest.raises(UsageError, match="JSON Patch"):
        apply(document, patch)
    assert document == {"a": 1, "l": [1]}

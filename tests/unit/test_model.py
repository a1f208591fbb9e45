"""The model: ids, states, headers, and what none of them shows."""

import copy
import dataclasses
import importlib
import pickle
import re
import weakref
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import safepoint
from safepoint.checkpointer import Base
from safepoint.codec.states import Control
from safepoint.errors import InvalidState, UsageError
from safepoint.model import State, TaskInfo, a_type, check_id, check_state, from_us, new_id, to_us
from safepoint.rows import Head

CANARY = "c4n4ry"
model = importlib.import_module("safepoint.model")  # safepoint.model itself is the decorator


@pytest.mark.parametrize("good", ["a", " a ", "a" * 512, "é" * 512, "a\nb", "../..", "\x01", "\x7f", "👩‍👩‍👧", "0"])
def test_ids_that_are_taken_are_taken_as_given(good):
    assert check_id(good) is good


@pytest.mark.parametrize("bad", ["", " ", "\u2003", "\n\t", "a" * 513, "a\0", "a\udc00", b"a", None, 1, ["a"]])
def test_ids_that_are_refused(bad):
    with pytest.raises(UsageError, match="branch") as caught:
        check_id(bad, "branch")
    assert not re.search(r"\ba (?:a|int|NoneType)\b|or None", str(caught.value))


def test_types_are_named_with_their_article():
    assert [a_type(v) for v in (1, "x", {}, None, ["a"], object())] == [
        "an int",
        "a str",
        "a dict",
        "None",
        "a list",
        "an object",
    ]


def test_a_text_subclass_is_no_id():
    """Its behaviour is somebody else's, and it would not come back from a store."""

    class Text(str):
        pass

    with pytest.raises(UsageError):
        check_id(Text("a"))


@given(st.text())
def test_every_text_is_taken_or_refused_for_a_named_reason(text):
    fits = 0 < len(text) <= 512 and text.strip() != "" and "\0" not in text
    try:
        text.encode()
    except UnicodeEncodeError:
        fits = False
    if fits:
        assert check_id(text) == text
    else:
        with pytest.raises(UsageError):
            check_id(text)


def test_new_ids_are_unique_and_in_order_of_time(monkeypatch):
    ids = [new_id() for _ in range(1000)]
    assert len(set(ids)) == 1000
    assert all(len(i) == 26 and check_id(i) for i in ids)
    times = iter([1_000_000_000, 2_000_000_000, 10**18, 10**19])
    monkeypatch.setattr(model.time, "time_ns", lambda: next(times))
    rising = [new_id() for _ in range(4)]
    assert rising == sorted(rising)


@given(st.datetimes(min_value=datetime(1, 1, 2), max_value=datetime(9999, 12, 30), timezones=st.just(UTC)))  # noqa: DTZ001
def test_times_are_kept_exactly(t):
    assert from_us(to_us(t)) == t


def test_times_of_other_zones_mean_the_same_moment():
    t = datetime(2026, 5, 1, 12, tzinfo=timezone(timedelta(hours=5, minutes=30)))
    assert from_us(to_us(t)) == t


def test_a_state_of_ones_own_is_new():
    one, two = State("t"), State("t")
    assert one == two
    assert one.messages is not two.messages
    assert one.agent_state is not two.agent_state
    assert (one.step, one.branch, one.seq, one.created_at, one.version, one.recovery) == (0, "main", None, None, 1, None)


def test_copies_leave_what_they_were_loaded_from_out_of_the_value():
    state = State("t", messages=["m"])
    state._base = object()
    assert State("t", messages=["m"]) == state
    assert pickle.loads(pickle.dumps(state))._base is None
    assert copy.deepcopy(state) == state


def test_a_misspelt_attribute_is_refused():
    """It would be lost at the next save."""
    state: Any = State("t")
    for name in ("mesages", "messages_", "agent", "phase"):
        with pytest.raises(AttributeError, match=name):
            setattr(state, name, [])
    with pytest.raises(TypeError):
        State("t", mesages=[])  # type: ignore[call-arg]


@dataclass
class Mine(State):
    extra: int = 0


@pytest.mark.parametrize("cls", [State, Mine])
def test_a_state_can_be_copied_pickled_and_referred_to(cls):
    state = cls("t", step=2, messages=[{"a": [1]}], agent_state={"k": 1}, metadata={"m": 1}, seq=3)
    state._base = object()
    for again in (
        copy.copy(state), copy.deepcopy(state), dataclasses.replace(state, step=2), pickle.loads(pickle.dumps(state)),
        pickle.loads(pickle.dumps(state, 2)),
    ):  # fmt: skip
        assert type(again) is cls
        assert again == state
        assert again._base is None
    assert copy.copy(state).messages is state.messages
    assert copy.deepcopy(state).messages[0] is not state.messages[0]
    assert dataclasses.asdict(dataclasses.replace(state))["messages"] == [{"a": [1]}]
    if cls is Mine:
        state.extra = 7
        assert pickle.loads(pickle.dumps(state)).extra == 7
    assert weakref.ref(state)() is state


@pytest.mark.parametrize("field", ["messages", "agent_state", "metadata"])
def test_nothing_shows_the_content_of_a_state(field):
    value = [CANARY] if field == "messages" else {CANARY: CANARY}
    given: Any = {field: value}
    assert CANARY not in repr(State("t", **given))


def test_what_a_run_keeps_beside_a_state_shows_no_content():
    control = Control([["", CANARY, "finished", CANARY, 3]], True)
    assert repr(control) == "<Control turns=1 finished=True>"
    base: Any = Base(None, "t", Head(3, "id"), None, control)  # type: ignore[arg-type]
    assert repr(base) == "<Base t@3>"
    with safepoint.open() as cp:
        state = State("t", messages=[CANARY], agent_state={CANARY: CANARY}, metadata={CANARY: CANARY})
        assert CANARY not in repr([cp.save(state), state, state._base, cp])
        assert CANARY not in repr(vars_of(state._base))
        safepoint.run_agent(lambda run: run.finish(CANARY), task_id="u", input=CANARY, store=cp)
        loaded: Any = cp.load_latest("u")
        assert CANARY not in repr([loaded, loaded._base, loaded._base.control, loaded._base.packed])


def vars_of(base):
    return [getattr(base, name) for name in ("task", "head", "packed", "control")]


@pytest.mark.parametrize(
    "wrong",
    [{"messages": ({},)}, {"messages": "hi"}, {"messages": None}, {"updates": [("a", 1)]}, {"updates": None}, {"done": "yes"}],
)
def test_what_a_pure_step_returns_is_checked(wrong):
    with pytest.raises(UsageError, match=rf"StepResult\({next(iter(wrong))}=\) must be"):
        model.StepResult(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"keep_latest": "3"}, {"keep_latest": True}, {"keep_latest": 2.5}, {"max_bytes": "1"}, {"keep_failures": None},
        {"max_age": 7}, {"keep_milestones": "no"}, {"keep_latest": 0}, {"max_bytes": -1}, {"keep_failures": -1},
        {"max_age": timedelta(-1)},
    ],
)  # fmt: skip
def test_a_retention_that_cannot_be_meant_is_refused(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        model.Retention(**wrong)


def test_reprs_say_which_and_how_far():
    assert repr(State("t", step=3, seq=7, messages=[1, 2])) == "<State t@7 branch=main step=3 messages=2>"
    nothing: Any = None
    assert repr(State("t", messages=nothing)) == "<State t branch=main step=0 messages=?>"
    done = model.Done(CANARY)
    assert CANARY not in repr(done)
    assert done == model.Done(CANARY)
    assert CANARY not in repr(model.StepResult([CANARY], {CANARY: 1}, result=CANARY))


def test_check_state_names_the_field():
    check_state(State("t"))
    wrong: list[tuple[str, Any]] = [("messages", {}), ("metadata", None), ("step", "1"), ("version", 0), ("seq", -1)]
    for field, value in wrong:
        state = State("t")
        setattr(state, field, value)
        with pytest.raises(InvalidState) as caught:
            check_state(state)
        assert caught.value.details == {"field": field}
    with pytest.raises(UsageError, match=r"must be a safepoint.State: it is a dict"):
        check_state({"task_id": "t"})  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        check_state(State("t", branch=""))


@pytest.mark.parametrize(
    ("status", "pending", "unfinished"),
    [
        ("interrupted", 0, True), ("interrupted", 1, True), ("waiting", 0, True), ("waiting", 1, False), ("idle", 0, False),
        ("running", 0, False), ("failed", 0, False), ("finished", 0, False), ("out_of_steps", 0, False),
    ],
)  # fmt: skip
def test_what_a_restarted_process_takes_up(status, pending, unfinished):
    at = datetime(2026, 1, 1, tzinfo=UTC)
    info = TaskInfo("t", status, "main", 1, 0, at, at, pending=pending)
    assert info.unfinished is unfinished
    assert info.ready is (status == "waiting" and pending == 0)
    assert not dataclasses.replace(info, seq=None).unfinished, "killed before its first save: nothing to carry on with"


def test_what_is_passed_around_is_frozen():
    for name in model.__all__:
        cls = getattr(model, name)
        if dataclasses.is_dataclass(cls) and cls is not State:
            assert vars(cls)["__dataclass_params__"].frozen, name

"""What is refused on the way in, and that the error names the place and the remedy."""

# ruff: noqa: PT012 - a run is a context manager, and what leaving it raises is what is tested

import threading
from dataclasses import dataclass
from typing import Any

import pytest

import safepoint
from safepoint import Done, InDoubt, InvalidState, NotDone, RefusedType, Retention, State, UsageError, run_agent, tool
from tests.integration.conftest import STORES, new_url

CANARY = "c4n4ry"


class NotStorable:
    def __repr__(self):
        return CANARY


# -- results


@tool(name="refusals-make", effect="read")
def make():
    return [1, {"a": NotStorable()}]


@tool(name="refusals-act")
def act():
    raise ConnectionResetError("no reply")


def test_a_result_that_cannot_be_stored_is_named_by_its_path(cp):
    with pytest.raises(RefusedType, match=r"result\[1\]\['a'\]") as caught, cp.resume("t") as run:
        run.call(make)
    assert CANARY not in str(caught.value)


def test_a_word_that_cannot_be_stored_is_named_by_its_path(cp):
    with pytest.raises(InDoubt), cp.resume("t") as run:
        run.call(act)
    with pytest.raises(RefusedType, match=r"result\['lock'\]"):
        cp.resolve("t", 1, Done({"lock": threading.Lock()}))
    assert cp.resolve("t", 1, Done({"ok": 1})).result == {"ok": 1}
    assert cp.calls("t")[0].result == {"ok": 1}


def test_a_result_that_is_missing_can_be_given_by_a_person(cp):
    def step(run):
        run.finish(run.call(make))

    with pytest.raises(RefusedType, match=r"cp\.resolve\('t', 1, Done\(result\)\).*safepoint resolve t 1"):
        run_agent(step, task_id="t", input="go", store=cp)
    with pytest.raises(UsageError, match="succeeded, only its result is missing"):
        cp.resolve("t", 1, NotDone())
    assert cp.plan("t").calls[0].action == "lost"
    settled = cp.resolve("t", 1, Done("by hand"))
    assert (settled.status, settled.result, settled.error) == ("succeeded", "by hand", None)
    with pytest.raises(UsageError, match="not in doubt"):
        cp.resolve("t", 1, Done("twice"))
    assert cp.plan("t").calls[0].action == "reuse"
    assert run_agent(step, task_id="t", store=cp).result == "by hand"
    assert [c.attempts for c in cp.calls("t")] == [1]


# -- states


NO_STATES: list[Any] = [{"task_id": "t"}, None, "t", State]
WRONG: dict[str, list[Any]] = {
    "messages": [None, "hello", ({"role": "user"},), {"a": 1}, 7],
    "metadata": [[1], None, "x"],
    "step": [-1, "1", True, 1.0],
    "branch": ["", 7],
}


@pytest.mark.parametrize("verb", ["save", "check_state"])
def test_only_a_state_is_saved(cp, verb):
    for wrong in NO_STATES:
        with pytest.raises(UsageError, match=f"{verb} takes a State"):
            getattr(cp, verb)(wrong)
    assert cp.tasks() == []


@pytest.mark.parametrize("field", WRONG)
def test_a_state_that_breaks_a_rule_is_refused_by_every_verb(cp, field):
    for wrong in WRONG[field]:
        state = State("t")
        setattr(state, field, wrong)
        for verb in (cp.save, cp.check_state):
            with pytest.raises((InvalidState, UsageError), match=field):
                verb(state)
    assert cp.tasks() == []


@pytest.mark.parametrize("field", ["messages", "metadata"])
def test_a_run_saves_no_state_that_breaks_a_rule(cp, field):
    cp.save(State("t", agent_state={"kept": True}))
    for n, wrong in enumerate(WRONG[field]):

        def step(run, wrong=wrong):
            setattr(run.state, field, wrong)

        with pytest.raises(InvalidState, match=f"state.{field} must be"):
            run_agent(step, task_id=f"r{n}", input="go", store=cp)
        assert cp.load_latest(f"r{n}").step == 0
        with pytest.raises(InvalidState, match=f"state.{field} must be"), cp.resume("t") as run:
            setattr(run.state, field, wrong)
            run.save()
    assert cp.load_latest("t").agent_state == {"kept": True}


# -- arguments of the verbs


@dataclass
class Plain:
    x: int = 0


def never(state):
    raise AssertionError("it was to be refused before")


@pytest.mark.parametrize(
    ("use", "says"),
    [
        (lambda cp: cp.load("t"), r"load takes exactly one .* none was given.* load_latest\('t'\)"),
        (lambda cp: cp.load("t", seq=1, branch="main"), "seq and branch were given"),
        (lambda cp: cp.load("t", seq="1"), r"load\(seq=\) must be an int of at least 1: it is a str"),
        (lambda cp: cp.load("t", seq=True), r"load\(seq=\).* a bool"),
        (lambda cp: cp.load("t", seq=0), r"load\(seq=\).* it is 0"),
        (lambda cp: cp.load("t", branch=3), r"load\(branch=\) must be text: it is an int"),
        (lambda cp: cp.load("t", id=b"x"), r"load\(id=\) must be text: it is a bytes"),
        (lambda cp: cp.load_latest(None), "task_id must be text: it is None"),
        (lambda cp: cp.load_latest(7), "task_id must be text: it is an int"),
        (lambda cp: cp.load_latest(" "), "task_id is blank. Use 1 to 512 characters"),
        (lambda cp: cp.update("t", None), "update was given None as fn"),
        (lambda cp: cp.update("t", "fn"), "update was given a str as fn"),
        (lambda cp: cp.update("t", never, retries="2"), r"update\(retries=\)"),
        (lambda cp: cp.update("t", lambda state: 7), "fn of update returned an int"),
        (lambda cp: cp.update("t", lambda state: state.messages), "fn of update returned a list"),
        (lambda cp: cp.list_checkpoints("t", limit="2"), r"list_checkpoints\(limit=\).* a str"),
        (lambda cp: cp.list_checkpoints("t", limit=-1), r"list_checkpoints\(limit=\).* it is -1"),
        (lambda cp: cp.list_checkpoints("t", before="2"), r"list_checkpoints\(before=\)"),
        (lambda cp: cp.list_checkpoints("t", branch=2), r"list_checkpoints\(branch=\)"),
        (lambda cp: cp.list_checkpoints("t", filter=["k"]), r"list_checkpoints\(filter=\) must be a mapping"),
        (lambda cp: cp.tasks(limit="2"), r"tasks\(limit=\)"),
        (lambda cp: cp.tasks(status="done"), "there is no status 'done'"),
        (lambda cp: cp.calls("t", limit=1.5), r"calls\(limit=\)"),
        (lambda cp: cp.pin("t", "1"), r"pin\(seq=\)"),
        (lambda cp: cp.unpin("t", None), r"unpin\(seq=\).* it is None"),
        (lambda cp: cp.cleanup("t", keep_latest="3"), "keep_latest must be a number: it is a str"),
        (lambda cp: cp.cleanup("t", max_age=3), "max_age must be a timedelta: it is an int"),
        (lambda cp: cp.resolve("t", "1", Done()), "resolve was given a str as the call"),
        (lambda cp: cp.resolve("t", 1, True), r"Done\(result\) or NotDone\(\), not a bool"),
        (lambda cp: cp.answer("t", None, 1), "answer was given None as the pause"),
    ],
)
def test_an_argument_that_cannot_be_meant_is_refused_by_name(cp, use, says):
    cp.save(State("t", metadata={"c": CANARY}))
    with pytest.raises(UsageError, match=says) as caught:
        use(cp)
    assert CANARY not in str(caught.value)
    assert caught.value.remedy or "status" in says
    assert len(cp.list_checkpoints("t")) == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"types": Plain}, r"open\(types=\) must be a list of classes: it is one class.* types=\[Plain\]"),
        ({"types": 3}, r"open\(types=\)"),
        ({"trust": 3}, r"open\(trust=\)"),
        ({"retention": 3}, r"open\(retention=\) must be a Retention.* it is an int"),
        ({"migrations": [1]}, r"open\(migrations=\) must be a mapping.* it is a list"),
        ({"migrations": {"1": never}}, r"open\(migrations=\) .* from a str"),
        ({"migrations": {1: "never"}}, r"open\(migrations=\) .* to a str"),
        ({"state_type": 3}, r"open\(state_type=\) must be a class: it is an int"),
        ({"state_type": Plain()}, r"open\(state_type=\)"),
        ({"schema_version": "2"}, r"open\(schema_version=\)"),
        ({"lease": "30"}, r"open\(lease=\) must be a number"),
        ({"lease": 0}, r"open\(lease=\)"),
        ({"retension": Retention()}, r"unknown option 'retension'.*open itself takes retention, types, trust, .*state_type"),
    ],
)  # fmt: skip
def test_an_option_of_open_that_cannot_be_meant_is_refused_by_name(tmp_path, options, says):
    for kind in STORES:
        with pytest.raises(UsageError, match=says):
            safepoint.open(new_url(kind, tmp_path), **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "option", [{"types": [Plain]}, {"retention": Retention()}, {"schema_version": 2}, {"timeout": 3}, {"new": 1}]
)
def test_a_checkpointer_takes_no_options_any_more(option):
    """They would be ignored otherwise: it was opened with its own."""
    with safepoint.open("memory://") as cp:
        assert safepoint.open(cp) is cp
        with pytest.raises(UsageError, match=f"open takes no {next(iter(option))} beside a checkpointer.* where it is opened"):
            safepoint.open(cp, **option)

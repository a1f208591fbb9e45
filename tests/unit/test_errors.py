"""The error tree: every leaf that is raised so far is provoked, and says what, why and what to do."""

import ast
import copy
import pickle
import re
import sys
import threading
from typing import Any

import pytest

import safepoint
from safepoint import Done, State, errors, model, tool
from safepoint.errors import RunEnded, SafepointError
from tests.support.paths import modules

CANARY = "c4n4ry"
LEAVES = {
    name: cls
    for name, cls in vars(errors).items()
    if isinstance(cls, type) and issubclass(cls, SafepointError) and cls is not SafepointError
}
COMES_LATER = {"MergeConflict"}
"""Part of the tree, and raised by nothing yet."""


@pytest.fixture
def cp(tmp_path):
    with safepoint.open(f"sqlite:///{tmp_path}/agent.db") as opened:
        yield opened


def saved(cp, task="t"):
    state = State(task, messages=[{"role": "user", "content": CANARY}], agent_state={"k": CANARY})
    cp.save(state)
    return state


@tool(name="errors-act", effect="write")
def act(x=0):
    raise ConnectionResetError("lost reply")


@tool(name="errors-look", effect="read")
def look(x=0):
    raise ValueError("no such page")


@model(name="errors-ask")
def ask():
    return {"content": CANARY}


# -- one provocation for each leaf; called with an open SQLite checkpointer and a folder


def not_found(cp, tmp_path):
    saved(cp)
    cp.load("t", seq=9)


def unavailable(cp, tmp_path):
    with safepoint.open(f"sqlite:///{tmp_path}/none/such/agent.db") as other:
        other.tasks()


def damaged(cp, tmp_path):
    saved(cp)
    with cp.connection() as conn:
        conn.authorizer = None  # what a flipped bit does, no tool may
        conn.execute("UPDATE sp_checkpoints SET step = step + 1")
    cp.load_latest("t")


def newer_format(cp, tmp_path):
    from safepoint.codec import states

    states.FORMAT += 1
    try:
        saved(cp)
    finally:
        states.FORMAT -= 1
    cp.load_latest("t")


def newer_schema(cp, tmp_path):
    newer = safepoint.open(cp.store, schema_version=2)
    saved(newer)
    cp.load_latest("t")


def refused_type(cp, tmp_path):
    cp.save(State("t", agent_state={"a": [CANARY, threading.Lock()]}))


def invalid_state(cp, tmp_path):
    text: Any = CANARY
    cp.save(State("t", messages=text))


def conflict(cp, tmp_path):
    saved(cp)
    saved(cp)


def lease_held(cp, tmp_path):
    with cp.resume("t"):
        cp.resume("t")


def lease_lost(cp, tmp_path):
    with cp.resume("t") as run:
        cp.resume("t", steal=True).close()
        run.save()


def in_doubt(cp, tmp_path):
    with cp.resume("t") as run:
        run.call(act, CANARY)


def decision_needed(cp, tmp_path):
    with cp.resume("t") as run:
        run.pause("name", CANARY)


def call_mismatch(cp, tmp_path):
    with cp.resume("t") as run:
        run.call(ask)
        with pytest.raises(safepoint.CallFailed):
            run.call(look, CANARY, call_id="a")
        run.call(look, CANARY * 2, call_id="a")


def call_in_progress(cp, tmp_path):
    with cp.resume("t") as run:
        run.call_many([look.bind(CANARY).with_id("a"), look.bind(CANARY).with_id("a")], return_errors=True)


def call_failed(cp, tmp_path):
    with cp.resume("t") as run:
        run.call(look, CANARY)


def already_answered(cp, tmp_path):
    with pytest.raises(safepoint.DecisionNeeded):
        decision_needed(cp, tmp_path)
    cp.answer("t", 1, CANARY)
    cp.answer("t", 1, CANARY)


def store_full(cp, tmp_path):
    saved(cp)
    with cp.connection() as conn:
        conn.authorizer = None
        (pages,) = conn.execute("PRAGMA page_count").fetchone()
        conn.execute(f"PRAGMA max_page_count = {pages}")
    cp.save(State("u", messages=[CANARY * 100_000]))


def missing_extra(cp, tmp_path):
    hidden = {
        n: sys.modules.pop(n) for n in list(sys.modules) if n == "safepoint.testing" or n.startswith("safepoint.testing.")
    }
    before = sys.modules.get("hypothesis")
    sys.modules["hypothesis"] = None  # type: ignore[assignment]
    try:
        import safepoint.testing  # noqa: F401
    finally:
        for name in [n for n in sys.modules if n.startswith("safepoint.testing")]:
            del sys.modules[name]
        sys.modules.update(hidden)
        if before is None:
            del sys.modules["hypothesis"]
        else:
            sys.modules["hypothesis"] = before


def usage_error(cp, tmp_path):
    cp.load("t")


PROVOKED = {
    "NotFound": (not_found, LookupError),
    "Unavailable": (unavailable, ConnectionError),
    "Damaged": (damaged, ValueError),
    "NewerFormat": (newer_format, ValueError),
    "NewerSchema": (newer_schema, ValueError),
    "RefusedType": (refused_type, TypeError),
    "InvalidState": (invalid_state, ValueError),
    "Conflict": (conflict, Exception),
    "LeaseHeld": (lease_held, Exception),
    "LeaseLost": (lease_lost, Exception),
    "InDoubt": (in_doubt, Exception),
    "DecisionNeeded": (decision_needed, Exception),
    "CallMismatch": (call_mismatch, Exception),
    "CallInProgress": (call_in_progress, Exception),
    "CallFailed": (call_failed, Exception),
    "AlreadyAnswered": (already_answered, Exception),
    "StoreFull": (store_full, OSError),
    "MissingExtra": (missing_extra, ImportError),
    "UsageError": (usage_error, ValueError),
}
SELF_EVIDENT = {"AlreadyAnswered", "CallFailed", "UsageError"}
"""What remains to be done is clear from what happened, or is not ours to say."""


@pytest.mark.parametrize("name", PROVOKED)
def test_each_leaf_says_what_why_and_what_to_do(name, cp, tmp_path):
    provoke, builtin = PROVOKED[name]
    with pytest.raises(LEAVES[name]) as caught:
        provoke(cp, tmp_path)
    error = caught.value
    assert type(error) is LEAVES[name]
    assert isinstance(error, builtin)
    assert isinstance(error, SafepointError)
    assert error.what
    assert error.why or error.remedy
    if name not in SELF_EVIDENT:
        assert error.remedy
        assert error.remedy[0].isupper() or error.remedy.startswith("pip install")
    text = str(error)
    assert text.startswith(error.what)
    assert error.why in text
    assert error.remedy in text
    assert ".." not in text.replace("...", "").replace("…", "")
    assert CANARY not in text + repr(error) + repr(error.details)
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is type(error)
        assert (again.what, again.why, again.remedy, again.details) == (error.what, error.why, error.remedy, error.details)
        assert str(again) == text


def raised_in_the_source():
    """Every leaf that is made anywhere in src."""
    found: dict[str, str] = {}
    for module, path in modules().items():
        if module == "safepoint.errors":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if name in LEAVES:
                    found.setdefault(name, f"{module}:{node.lineno}")
    return found


def test_every_leaf_that_is_raised_is_provoked_here():
    found = raised_in_the_source()
    assert set(found) - set(PROVOKED) == set(), found
    assert set(PROVOKED) <= set(found), "provoked, and raised by nothing"
    assert set(LEAVES) - set(found) == COMES_LATER


def test_the_docstring_draws_the_tree():
    drawn = re.findall(r"^[│ ]*[├└]── (\w+)(?: \((\w+)\))?", errors.__doc__, re.MULTILINE)
    assert {name for name, _ in drawn} == set(LEAVES)
    for name, builtin in drawn:
        bases = {b.__name__ for b in LEAVES[name].__mro__}
        assert not builtin or builtin in bases, name
    assert set(LEAVES) <= set(errors.__all__) <= set(dir(safepoint))


def test_notes_survive_pickling():
    error = errors.NotFound("what", "why", "remedy", task="t")
    error.add_note("a note")
    again = pickle.loads(pickle.dumps(error))
    assert again.__notes__ == ["a note"]
    assert again.details == {"task": "t"}


def test_what_ends_a_run_is_no_exception():
    ended = RunEnded(errors.LeaseLost("gone", "", "Resume."))
    assert not isinstance(ended, Exception)
    again = pickle.loads(pickle.dumps(ended))
    assert (type(again), type(again.error), str(again)) == (RunEnded, errors.LeaseLost, str(ended))


def test_a_tools_own_word_is_no_error_of_ours():
    assert not issubclass(errors.DidNotHappen, SafepointError)
    assert issubclass(errors.DidNotHappen, Exception)


def test_a_failed_call_tells_type_message_and_number(cp, tmp_path):
    with pytest.raises(safepoint.CallFailed) as caught:
        call_failed(cp, tmp_path)
    assert (caught.value.type, caught.value.message, caught.value.call) == ("builtins.ValueError", "no such page", 1)
    with pytest.raises(safepoint.InDoubt):
        in_doubt(cp, tmp_path)
    assert cp.resolve("t", 2, Done(1)).status == "succeeded"

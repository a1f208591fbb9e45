"""The explicit verbs, on each store: DESIGN 3."""

import contextlib
import copy
import inspect
import io
import logging
import pickle
import re
import threading
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import pydantic
import pytest

import safepoint
from safepoint import (
    Conflict,
    Damaged,
    InvalidState,
    LeaseHeld,
    NewerFormat,
    NewerSchema,
    NotFound,
    RefusedType,
    Retention,
    State,
    UsageError,
)
from tests.support.runs import Failing

CANARY = "c4n4ry"


def made(cp, task="t", n=1, **fields):
    """A task of ``n`` checkpoints, and its newest state."""
    state = State(task, **fields)
    for i in range(n):
        state.step = i
        state.messages.append({"role": "user", "content": f"m{i}"})
        cp.save(state, label=f"l{i}")
    return state


def seqs(found):
    return [c.seq for c in found]


# -- save and load


def test_a_state_comes_back_as_it_was(cp):
    state = State("t", messages=[{"role": "user", "content": "hi"}], agent_state={"n": 1}, metadata={"k": "v"}, step=3)
    before = datetime.now(UTC)
    head = cp.save(state, label="first")
    assert (head.task_id, head.seq, head.branch, head.parent_seq, head.step) == ("t", 1, "main", None, 3)
    assert (head.kind, head.label, head.schema_version, head.pinned) == ("manual", "first", 1, False)
    assert head.metadata == {"k": "v"}
    assert before <= head.created_at <= datetime.now(UTC)
    assert head.created_at.tzinfo is UTC
    assert head.bytes > 0
    assert (state.seq, state.created_at) == (1, head.created_at)
    again = cp.load_latest("t")
    assert again == state
    assert again is not state
    assert again.messages is not state.messages


def test_absent_is_none_and_nothing_else(cp):
    assert cp.load_latest("nobody") is None
    assert cp.list_checkpoints("nobody") == []
    assert cp.calls("nobody") == []
    assert cp.pauses("nobody") == []
    for verb in (cp.status, cp.plan, cp.delete_task, cp.cleanup, cp.finish):
        with pytest.raises(NotFound, match="nobody"):
            verb("nobody")
    for verb in (cp.pin, cp.unpin):
        with pytest.raises(NotFound):
            verb("nobody", 1)
    with pytest.raises(NotFound):
        cp.update("nobody", lambda s: None)
    with pytest.raises(NotFound):
        cp.resolve("nobody", 1, safepoint.NotDone())
    with pytest.raises(NotFound):
        cp.answer("nobody", 1, "yes")
    assert cp.tasks() == []


@pytest.mark.parametrize("times", [1, 2, 5])
def test_a_task_that_comes_and_goes_while_it_is_looked_for_is_not_damaged(cp, monkeypatch, times):
    """Each look at its state falls into a moment when it is not there, each look at its row into one when it is."""
    read, task = cp.store.read, cp.store.task
    looks = iter(range(times))

    def gone(name, **selector):
        if next(looks, None) is not None:
            cp.store.delete_task(name)
        return read(name, **selector)

    def there(name):
        if task(name) is None:
            with monkeypatch.context() as calm:
                calm.setattr(cp.store, "read", read)
                cp.save(State(name))
        return task(name)

    monkeypatch.setattr(cp.store, "read", gone)
    monkeypatch.setattr(cp.store, "task", there)
    assert cp.load_latest("t").seq == 1


def test_each_save_builds_on_the_one_before(cp):
    state = made(cp, n=3)
    assert state.seq == 3
    assert [(c.seq, c.parent_seq, c.step) for c in cp.list_checkpoints("t")] == [(3, 2, 2), (2, 1, 1), (1, None, 0)]
    assert len(cp.load("t", seq=1).messages) == 1
    assert len(cp.load("t", branch="main").messages) == 3
    head = cp.list_checkpoints("t", limit=1)[0]
    assert cp.load("t", id=head.id).seq == 3


def test_equal_states_have_equal_digests(cp):
    one = cp.save(State("a", messages=["x"]))
    two = cp.save(State("b", messages=["x"]))
    assert one.digest == two.digest
    assert one.id != two.id
    assert cp.save(State("c", messages=["y"])).digest != one.digest


def test_load_names_one_checkpoint(cp):
    made(cp)
    for wrong in ({}, {"seq": 1, "branch": "main"}):
        with pytest.raises(UsageError):
            cp.load("t", **wrong)
    for absent in ({"seq": 9}, {"branch": "b"}, {"id": "nope"}):
        with pytest.raises(NotFound, match="t"):
            cp.load("t", **absent)


def test_a_save_names_the_parent_that_it_was_made_from(cp):
    """Invariant 4."""
    made(cp)
    mine, yours = cp.load_latest("t"), cp.load_latest("t")
    mine.messages.append("mine")
    cp.save(mine)
    yours.messages.append("yours")
    with pytest.raises(Conflict) as caught:
        cp.save(yours)
    assert caught.value.remedy
    assert (yours.seq, len(cp.list_checkpoints("t"))) == (1, 2)
    with pytest.raises(Conflict):
        cp.save(State("t"))
    with pytest.raises(Conflict):
        cp.save(State("t", seq=77))


def test_copies_go_on_from_where_they_were_made(cp):
    state = made(cp)
    for twin in (copy.deepcopy(state), pickle.loads(pickle.dumps(state)), copy.copy(state)):
        at = cp.load_latest("t").seq
        twin.seq = at
        twin.messages = [*twin.messages, "more"]
        assert cp.save(twin).parent_seq == at


def test_a_save_that_raises_leaves_the_state_as_it_was(cp):
    """Invariant 2, as far as it concerns the caller's object."""
    state = made(cp)
    before = (state.seq, state.created_at, state.step, state.branch, state.version, state._base)
    state.agent_state["bad"] = threading.Lock()
    with pytest.raises(RefusedType):
        cp.save(state)
    assert (state.seq, state.created_at, state.step, state.branch, state.version, state._base) == before
    del state.agent_state["bad"]
    assert cp.save(state).seq == 2


@pytest.mark.parametrize("landed", [False, True])
def test_a_save_of_unknown_outcome_can_be_asked_for_and_repeated(url, landed):
    with safepoint.open(url) as inner:
        store = Failing(inner.store)
        cp = safepoint.open(store)
        state = made(cp)
        state.messages.append("x")
        error = safepoint.Unavailable("no answer", id="mine")
        if landed:
            store.after = lambda c: error
        else:
            store.before = lambda c: error
        with pytest.raises(safepoint.Unavailable):
            cp.save(state, id="mine")
        assert state.seq == 1
        store.before = store.after = lambda c: None
        if landed:
            assert cp.load("t", id="mine").messages[-1] == "x"
        else:
            with pytest.raises(NotFound):
                cp.load("t", id="mine")
        assert cp.save(state, id="mine").seq == 2, "the same content under the same id is one checkpoint"
        assert seqs(cp.list_checkpoints("t")) == [2, 1]
        assert cp.save(state).parent_seq == 2


def test_an_id_of_ones_own_is_taken_once(cp):
    state = made(cp)
    cp.save(state, id="mine")
    state.messages.append("other content")
    with pytest.raises(UsageError):
        cp.save(state, id="mine")


@pytest.mark.parametrize(
    ("field_name", "value"),
    [
        ("messages", ("tuple",)), ("messages", None), ("metadata", []), ("step", -1), ("step", True), ("step", 1.0),
        ("version", 0), ("seq", 0), ("seq", "1"),
    ],
)  # fmt: skip
def test_a_state_that_breaks_a_rule_is_refused(cp, field_name, value):
    state = State("t")
    setattr(state, field_name, value)
    with pytest.raises(InvalidState) as caught:
        cp.save(state)
    assert caught.value.details["field"] == field_name
    with pytest.raises(InvalidState):
        cp.check_state(state)
    assert cp.load_latest("t") is None


def test_metadata_is_small(cp):
    state = State("t", metadata={"k": CANARY * 2000})
    with pytest.raises(InvalidState) as caught:
        cp.save(state)
    assert "8192" in str(caught.value)
    assert CANARY not in str(caught.value)
    state.metadata = {"k": "x" * 8000}
    assert cp.save(state).metadata == state.metadata


@pytest.mark.parametrize("bad", ["", " ", "\t\n", "a" * 513, "a\0b", "\ud800", 7, None, b"t"])
def test_ids_that_no_store_takes(cp, bad):
    for verb in (cp.load_latest, cp.status, cp.list_checkpoints, cp.delete_task, cp.calls, cp.pauses, cp.plan, cp.cleanup):
        with pytest.raises(UsageError):
            verb(bad)
    with pytest.raises(UsageError):
        cp.save(State(bad))
    assert cp.tasks() == []


@pytest.mark.parametrize(
    "good", ["a", "a" * 512, "a/b", "../x", "ünï", "👩‍👩‍👧", " x ", "a\nb", "%00", "'; DROP TABLE sp_tasks;--", "a\u2028b"]
)
def test_ids_that_every_store_takes_and_lists_as_given(cp, good):
    made(cp, good)
    assert cp.load_latest(good).task_id == good
    assert [t.task_id for t in cp.tasks()] == [good]


@pytest.mark.parametrize("options", [{"kind": "mine"}, {"label": 7}, {"id": ""}, {"kind": "failure"}])
def test_options_of_save_that_cannot_be_meant(cp, options):
    with pytest.raises(UsageError):
        cp.save(State("t"), **options)
    assert cp.load_latest("t") is None


def test_retention_happens_as_tasks_are_saved(url):
    with safepoint.open(url, retention=Retention(keep_latest=3)) as cp:
        state = State("t")
        for i in range(40):
            state.step = i
            cp.save(state)
            assert len(cp.list_checkpoints("t")) <= 12
        left = seqs(cp.list_checkpoints("t"))
        assert left[:3] == [40, 39, 38]
        cp.cleanup("t")
        assert seqs(cp.list_checkpoints("t")) == [40, 39, 38]


def test_a_failing_sweep_does_not_fail_the_save(url, caplog, monkeypatch):
    with safepoint.open(url, retention=Retention(keep_latest=1)) as cp:
        monkeypatch.setattr(cp.store, "pruning", lambda *a, **k: 1 / 0)
        made(cp, n=40)
        assert "put off: ZeroDivisionError" in caplog.text
        assert len(cp.list_checkpoints("t")) == 40


# -- update


def test_update_loads_changes_and_saves(cp):
    made(cp)
    head = cp.update("t", lambda s: s.agent_state.update(n=1), label="up")
    assert (head.seq, head.label) == (2, "up")
    assert cp.load_latest("t").agent_state == {"n": 1}


def test_update_takes_a_state_that_is_returned(cp):
    made(cp)

    def replaced(state):
        return State("t", seq=state.seq, agent_state={"new": True})

    cp.update("t", replaced)
    assert cp.load_latest("t").agent_state == {"new": True}


def test_update_tries_again_when_the_branch_moved(cp):
    made(cp, agent_state={"n": 0})
    tries = []

    def count(state):
        tries.append(state.seq)
        if len(tries) <= 2:
            other = cp.load_latest("t")
            other.agent_state["n"] += 10
            cp.save(other)
        state.agent_state["n"] += 1

    cp.update("t", count)
    assert tries == [1, 2, 3]
    assert cp.load_latest("t").agent_state == {"n": 21}
    tries.clear()

    def in_vain(state):
        tries.append(1)
        cp.save(cp.load_latest("t"))

    with pytest.raises(Conflict):
        cp.update("t", in_vain, retries=2)
    assert len(tries) == 3


def test_update_from_many_threads_loses_nothing(cp):
    cp.retention = Retention.keep_all()
    made(cp, agent_state={"n": 0})

    def work():
        for _ in range(10):
            cp.update("t", lambda s: s.agent_state.update(n=s.agent_state["n"] + 1), retries=500)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert cp.load_latest("t").agent_state == {"n": 40}
    assert seqs(cp.list_checkpoints("t")) == list(range(41, 0, -1)), "no gap, no repeat"


def test_update_refuses_what_it_cannot_await(cp):
    made(cp)

    async def fn(state):
        raise AssertionError

    with pytest.raises(UsageError, match="async"):
        cp.update("t", fn)
    with pytest.raises(UsageError):
        cp.update("t", lambda s: None, retries=-1)


# -- listing


def test_listings_page_from_the_newest(cp):
    made(cp, n=5)
    assert seqs(cp.list_checkpoints("t")) == [5, 4, 3, 2, 1]
    assert seqs(cp.list_checkpoints("t", limit=2)) == [5, 4]
    assert seqs(cp.list_checkpoints("t", limit=2, before=4)) == [3, 2]
    assert seqs(cp.list_checkpoints("t", limit=9, before=1)) == []
    assert seqs(cp.list_checkpoints("t", limit=0)) == []
    assert seqs(cp.list_checkpoints("t", branch="main", limit=1)) == [5]
    assert cp.list_checkpoints("t", branch="other") == []
    for wrong in (-1, True, "3", 1.0):
        with pytest.raises(UsageError):
            cp.list_checkpoints("t", limit=wrong)


def test_filters_compare_by_value_and_type(cp):
    values = [1, True, 1.0, "1", None, [1], {"a": 1}, b"1", 2**80, float("inf"), (1,)]
    state = State("t")
    for v in values:
        state.metadata = {"k": v, "other": 0}
        cp.save(state)
    for i, v in enumerate(values, 1):
        assert seqs(cp.list_checkpoints("t", filter={"k": v})) == [i], v
    assert cp.list_checkpoints("t", filter={"absent": None}) == [], "absent is not None"
    assert seqs(cp.list_checkpoints("t", filter={"k": 1, "other": 0})) == [1]
    assert cp.list_checkpoints("t", filter={"k": 1, "other": 9}) == []
    assert len(cp.list_checkpoints("t", filter={"other": 0}, limit=3)) == 3
    assert len(cp.list_checkpoints("t", filter={})) == len(values)


def test_filters_compare_deeply_by_type(cp):
    state = State("t", metadata={"k": [1, {"a": True}]})
    cp.save(state)
    assert cp.list_checkpoints("t", filter={"k": [1, {"a": 1}]}) == []
    assert cp.list_checkpoints("t", filter={"k": [1.0, {"a": True}]}) == []
    assert len(cp.list_checkpoints("t", filter={"k": [1, {"a": True}]})) == 1


def test_a_filter_looks_past_the_first_page(cp, monkeypatch):
    monkeypatch.setattr(cp, "retention", Retention.keep_all())
    state = State("t", metadata={"k": "old"})
    cp.save(state)
    cp.pin("t", 1)
    state.metadata = {}
    for _ in range(230):
        cp.save(state)
    monkeypatch.undo()
    assert seqs(cp.list_checkpoints("t", filter={"k": "old"}, limit=1)) == [1]


def test_tasks_and_their_status(cp):
    made(cp, "a", n=2)
    made(cp, "b")
    info = cp.status("a")
    assert (info.status, info.seq, info.step, info.branch, info.checkpoints, info.attempts) == ("idle", 2, 1, "main", 2, 0)
    assert info.created_at <= info.updated_at
    assert [t.task_id for t in cp.tasks()] == ["a", "b"]
    assert [t.task_id for t in cp.tasks(limit=1)] == ["a"]
    assert cp.tasks(status="running") == []
    with cp.resume("b"):
        assert [t.task_id for t in cp.tasks(status="running")] == ["b"]
        assert cp.status("b").holder["pid"]
    assert [t.task_id for t in cp.tasks(status="interrupted")] == ["b"]
    assert [t.task_id for t in cp.tasks(status="unfinished")] == ["b"], "nobody ever ran a"
    with pytest.raises(UsageError):
        cp.tasks(status="busy")


def test_a_task_kept_by_saves_is_ended_by_finish(cp):
    made(cp)
    head = cp.finish("t", {"answer": 42})
    assert (head.seq, head.label) == (2, "finished")
    assert cp.status("t").status == "finished"
    assert cp.plan("t").does == "nothing"
    outcome = safepoint.run_agent(lambda run: 1 / 0, task_id="t", store=cp)
    assert (outcome.status, outcome.result) == ("finished", {"answer": 42})


def test_a_task_whose_turn_is_open_is_ended_by_finish(cp):
    with pytest.raises(ZeroDivisionError):
        safepoint.run_agent(lambda run: 1 / 0, task_id="t", input="x", store=cp)
    cp.finish("t", "by hand")
    outcome = safepoint.run_agent(lambda run: 1 / 0, task_id="t", input="x", store=cp)
    assert (outcome.status, outcome.result) == ("finished", "by hand")


# -- keeping and removing


def test_cleanup_reports_what_it_deletes(cp):
    made(cp, n=6)
    dry = cp.cleanup("t", keep_latest=2, dry_run=True)
    assert (dry.deleted, dry.kept, dry.dry_run) == ((1, 2, 3, 4), 2, True)
    assert len(cp.list_checkpoints("t")) == 6
    done = cp.cleanup("t", keep_latest=2)
    assert (done.deleted, done.kept, done.dry_run) == (dry.deleted, dry.kept, False)
    assert done.bytes_freed > 0
    assert seqs(cp.list_checkpoints("t")) == [6, 5]
    assert cp.cleanup("t", keep_latest=2).deleted == ()
    assert len(cp.load_latest("t").messages) == 6
    with pytest.raises(NotFound):
        cp.load("t", seq=1)


def test_cleanup_by_age_and_bytes(cp):
    made(cp, n=4)
    assert cp.cleanup("t", keep_latest=1, max_age=timedelta(days=7)).deleted == ()
    assert cp.cleanup("t", keep_latest=3, max_age=timedelta(0)).deleted == (1,)
    assert cp.cleanup("t", max_bytes=0).deleted == (2, 3)
    with pytest.raises(UsageError):
        cp.cleanup("t", keep_latest=0)


def test_pins_and_milestones_stay(cp):
    state = made(cp, n=3)
    cp.pin("t", 1)
    cp.save(state, kind="milestone", label="draft")
    made_more = cp.load_latest("t")
    cp.save(made_more)
    assert cp.cleanup("t", keep_latest=1).deleted == (2, 3)
    assert [c.seq for c in cp.list_checkpoints("t") if c.pinned] == [1]
    cp.unpin("t", 1)
    assert cp.cleanup("t", keep_latest=1, keep_milestones=False).deleted == (1, 4)
    with pytest.raises(NotFound):
        cp.pin("t", 1)


def test_milestones_and_failures_alone_may_be_named(cp):
    state = made(cp)
    cp.save(state, kind="milestone")
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), cp.resume("t"):
            1 / 0  # noqa: B018
    cp.save(cp.load_latest("t"))
    assert cp.cleanup("t", keep_failures=1).deleted == (3, 4)


def test_a_deleted_task_is_gone(cp):
    made(cp)
    made(cp, "other")
    cp.delete_task("t")
    assert cp.load_latest("t") is None
    assert [t.task_id for t in cp.tasks()] == ["other"]
    with pytest.raises(NotFound):
        cp.delete_task("t")
    assert cp.save(State("t")).parent_seq is None


def test_what_moves_a_head_is_refused_while_a_run_holds_the_task(cp):
    state = made(cp, n=2)
    with cp.resume("t") as run:
        for verb in (
            lambda: cp.save(state),
            lambda: cp.update("t", lambda s: None),
            lambda: cp.finish("t"),
            lambda: cp.delete_task("t"),
        ):
            with pytest.raises(LeaseHeld):
                verb()
        with pytest.raises(LeaseHeld):
            cp.resume("t")
        cp.pin("t", 1)
        cp.unpin("t", 1)
        cp.cleanup("t", keep_latest=1)
        cp.load("t", seq=2)
        cp.check()
        cp.plan("t")
        assert cp.calls("t") == cp.pauses("t") == []
        assert run.save().seq == 3
    assert seqs(cp.list_checkpoints("t")) == [3, 2]


def test_what_a_live_run_stands_on_is_not_swept_away(cp):
    made(cp, n=3)
    with cp.resume("t") as run:
        cp.cleanup("t", keep_latest=1)
        run.save()
    assert seqs(cp.list_checkpoints("t"))[:1] == [4]


# -- types and schemas


@safepoint.register
@dataclass
class Progress:
    phase: str = "plan"
    found: list = field(default_factory=list)


@safepoint.register
class Plan(pydantic.BaseModel):
    goal: str = ""
    done: int = 0


@pytest.mark.parametrize("value", [Progress("act", [1, (2,)]), Plan(goal="g", done=3)])
def test_agent_state_may_be_an_object(url, value):
    with safepoint.open(url, state_type=type(value)) as cp:
        cp.save(State("t", agent_state=value))
        again = cp.load_latest("t").agent_state
        assert type(again) is type(value)
        assert again == value
        with pytest.raises(InvalidState):
            cp.save(State("u", agent_state={}))


def test_a_class_that_is_not_registered_is_refused_with_path_and_type(cp):
    class Unknown:
        secret = CANARY

        def __repr__(self):
            return CANARY

    with pytest.raises(RefusedType) as caught:
        cp.save(State("t", agent_state={"a": {"b": [1, Unknown()]}}))
    assert "agent_state" in str(caught.value)
    assert "Unknown" in str(caught.value)
    assert CANARY not in str(caught.value)


def test_check_state_says_what_save_would(cp):
    state = State("t", agent_state={"a": threading.Lock()})
    with pytest.raises(RefusedType):
        cp.check_state(state)
    state.agent_state.clear()
    assert cp.check_state(state) is None
    assert cp.load_latest("t") is None


def test_an_older_schema_is_led_on_and_left_as_it_is(url):
    with safepoint.open(url) as cp:
        cp.save(State("t", agent_state={"name": "A B"}))

    def split(tree):
        first, last = tree["agent_state"].pop("name").split()
        tree["agent_state"] |= {"first": first, "last": last}
        return tree

    with safepoint.open(url, schema_version=2) as cp, pytest.raises(InvalidState, match="migration"):
        cp.load_latest("t")
    with safepoint.open(url, schema_version=3, migrations={1: split, 2: lambda tree: tree}) as cp:
        state = cp.load_latest("t")
        assert state is not None
        assert (state.agent_state, state.version) == ({"first": "A", "last": "B"}, 3)
        assert cp.list_checkpoints("t")[0].schema_version == 1, "the original is untouched"
        assert cp.save(state).schema_version == 3
    with safepoint.open(url) as cp:
        with pytest.raises(NewerSchema) as caught:
            cp.load_latest("t")
        assert "t@2" in caught.value.what
        assert cp.load("t", seq=1).agent_state == {"name": "A B"}
        with pytest.raises(NewerSchema):
            cp.resume("t")


def test_a_newer_format_is_left_alone(url, monkeypatch):
    from safepoint.codec import states

    with safepoint.open(url) as cp:
        with monkeypatch.context() as later:
            later.setattr(states, "FORMAT", states.FORMAT + 1)
            cp.save(State("t"))
        with pytest.raises(NewerFormat) as caught:
            cp.load_latest("t")
        assert "t@1" in caught.value.what
        assert len(cp.list_checkpoints("t")) == 1
        with pytest.raises(NewerFormat):
            cp.resume("t")
        assert cp.plan("t").does == "refused"
        assert len(cp.list_checkpoints("t")) == 1


def test_a_damaged_head_names_the_newest_good_one(sqlite):
    made(sqlite, n=3)
    with sqlite.connection() as conn:
        # The store's own tables are not for tools: this is what a flipped bit does.
        conn.authorizer = None
        conn.execute("UPDATE sp_checkpoints SET step = step + 1 WHERE seq = 3")
    with pytest.raises(Damaged) as caught:
        sqlite.load_latest("t")
    assert "t@2" in caught.value.remedy
    assert caught.value.details["good"] == 2
    assert sqlite.load("t", seq=2).step == 1
    assert len(sqlite.list_checkpoints("t")) == 3


# -- opening, closing, showing


@pytest.mark.parametrize(
    "options", [{"schema_version": 0}, {"schema_version": "1"}, {"lease": 0}, {"redact": ["a"]}, {"durabilty": "full"}]
)
def test_options_of_open_that_cannot_be_meant(options):
    with pytest.raises(UsageError):
        safepoint.open("memory://", **options)


def test_memory_is_private_unless_named():
    with safepoint.open("memory://") as one, safepoint.open("memory://") as two:
        one.save(State("t"))
        assert two.load_latest("t") is None
    with safepoint.open("memory://shared-by-name") as one, safepoint.open("memory://shared-by-name") as two:
        one.save(State("t"))
        assert two.load_latest("t") is not None


def test_a_relative_path_is_resolved_when_it_is_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with safepoint.open("sqlite:///here.db") as cp:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        cp.save(State("t"))
    assert (tmp_path / "here.db").exists()


def verbs_of(cls):
    return {n: f for n, f in inspect.getmembers(cls, inspect.isfunction) if not n.startswith("_")}


ARGUMENTS = {
    "task_id": "t", "state": State("t"), "fn": lambda s: None, "seq": 1, "call": 1, "verdict": safepoint.NotDone(), "pause": 1,
    "answer": 1, "a": 1, "other": "memory://", "path_or_file": io.BytesIO(),
}  # fmt: skip
NEEDS_NO_STORE = {"check_state", "close"}


def arguments_of(verb):
    wanted = [p for p in inspect.signature(verb).parameters.values() if p.default is p.empty and p.name != "self"]
    given = {p.name: ARGUMENTS[p.name] for p in wanted if p.kind not in {p.VAR_KEYWORD, p.VAR_POSITIONAL}}
    if verb.__name__ in ("load", "rewind"):
        given["seq"] = 1
    return given


@pytest.mark.parametrize("owned", [True, False])
def test_every_verb_says_clearly_that_it_is_closed(url, owned):
    names = sorted(set(verbs_of(safepoint.Checkpointer)) - NEEDS_NO_STORE)
    assert len(names) > 30
    inner = safepoint.open(url)
    cp = inner if owned else safepoint.open(inner.store)
    cp.save(State("t"))
    cp.close()
    cp.close()
    wrong = {}
    for name in names:
        given = arguments_of(getattr(safepoint.Checkpointer, name))
        says = "closed" if name != "connection" or inner.store.transactional_tools or not owned else "no connection"
        try:
            with contextlib.ExitStack() as entered:
                entered.enter_context(getattr(cp, name)(**given))  # connection() speaks when it is entered, the others before
            wrong[name] = "nothing"
        except UsageError as error:
            if says not in str(error):
                wrong[name] = str(error)
    assert wrong == {}
    if not owned:
        assert inner.load_latest("t") is not None
        inner.close()


def test_closing_ends_the_runs_that_are_open(url):
    with safepoint.open(url) as other:
        cp = safepoint.open(url)
        run = cp.resume("t")
        assert other.status("t").status == "running"
        cp.close()
        assert other.status("t").status == "interrupted"
        assert other.status("t").reason
        with pytest.raises(UsageError):
            run.save()
        with other.resume("t"):
            pass


def test_check_says_where_the_store_lives(cp):
    findings = cp.check()
    assert findings
    assert all(f.level in {"ok", "warning", "error"} and f.text for f in findings)
    # The tests' PostgreSQL cannot survive a loss of power, and is told off for it.
    assert [
        f.text for f in findings if f.level == "error" and not f.text.startswith(("fsync is off", "full_page_writes is off"))
    ] == []


def test_only_sql_stores_lend_a_connection(cp):
    if not cp.store.transactional_tools:
        with pytest.raises(UsageError):
            cp.connection()
        return
    with cp.connection() as conn:
        conn.execute("CREATE TEMPORARY TABLE mine (x int)")
        conn.execute("INSERT INTO mine VALUES (1)")
        assert list(conn.execute("SELECT x FROM mine")) == [(1,)]
        conn.execute("DROP TABLE mine")


def test_every_save_is_one_line_of_the_log(cp, caplog):
    caplog.set_level(logging.INFO, "safepoint")
    made(cp, n=2)
    cp.update("t", lambda s: None)
    cp.finish("t")
    lines = [r.getMessage() for r in caplog.records if r.name == "safepoint"]
    found = [re.match(r"saved t@(\d+) step=(\d+) kind=manual bytes=\d+", line) for line in lines]
    assert [m and m.groups() for m in found] == [("1", "0"), ("2", "1"), ("3", "1"), ("4", "1")]


def test_no_text_shows_content(cp, caplog):
    """A canary in every place that a state has, and none in any repr, error or log line."""
    caplog.set_level(logging.DEBUG)
    full = State("t", messages=[{"role": "user", "content": CANARY}], agent_state={"s": CANARY}, metadata={"m": CANARY})
    texts = [repr(full), str(full)]
    head = cp.save(full)
    texts += [
        repr(head),
        repr(cp.status("t")),
        repr(cp.list_checkpoints("t")),
        repr(cp),
        repr(cp.store),
        repr(cp.load_latest("t")),
    ]
    full.agent_state["bad"] = {CANARY + "-as-value": [object()]}.popitem()[1]
    texts += [repr(safepoint.Done(CANARY)), repr(safepoint.StepResult([CANARY], {"k": CANARY}, True, CANARY))]
    for attempt in (
        lambda: cp.save(full),
        lambda: cp.save(State("t", messages=[CANARY])),
        lambda: cp.save(State("t", metadata={"m": CANARY * 3000})),
        lambda: cp.save(State("t", messages=CANARY)),  # type: ignore[arg-type]
        lambda: cp.list_checkpoints("t", filter={"m": object(), "n": CANARY}),
    ):
        with pytest.raises(safepoint.SafepointError) as caught:
            attempt()
        texts += [str(caught.value), repr(caught.value)]
    assert not [t for t in texts if CANARY in t]
    assert CANARY not in caplog.text


def test_no_text_shows_a_password():
    for url in (  # nobody listens at port 1
        "postgresql://bob:c4n4ry@127.0.0.1:1/x",
        "postgresql://bob@127.0.0.1:1/x?password=c4n4ry",
        "redis://:c4n4ry@127.0.0.1:1/0",
        "rediss://bob:c4n4ry@127.0.0.1:1/0",
        "redis://127.0.0.1:1/0?password=c4n4ry",
        "nosuch://u:c4n4ry@h",
        "u:c4n4ry@h",
    ):
        texts: list[str] = []

        def ask(url=url, texts=texts):
            with safepoint.open(url, timeout=0.2) as cp:
                texts += [repr(cp), repr(cp.store), cp.store.url, str(cp.store)]
                cp.tasks()

        with pytest.raises(safepoint.SafepointError) as caught:
            ask()
        texts += [str(caught.value), repr(caught.value), repr(caught.value.details)]
        assert not [text for text in texts if CANARY in text]


def test_a_head_that_is_gone_is_no_absent_task(tmp_path):
    """Rows removed by somebody else: never None, and never a new beginning."""
    import apsw

    url = f"sqlite:///{tmp_path / 'agent.db'}"
    with safepoint.open(url) as cp:
        state = State("t")
        cp.save(state)
        state.step += 1
        cp.save(state)
    for broken in ("DELETE FROM sp_checkpoints WHERE seq = 2", "DELETE FROM sp_branches"):
        db = apsw.Connection(str(tmp_path / "agent.db"))
        db.execute(broken)
        db.close()
        with safepoint.open(url) as cp:
            with pytest.raises(Damaged, match=r"not among them|is damaged"):
                cp.load_latest("t")
            with pytest.raises(Damaged):
                safepoint.run_agent(lambda run: run.finish(), task_id="t", input="x", store=cp, recover="strict")

"""Outside resources: seen by the program, reopened where they have expired, closed once, and shown to nobody."""

import asyncio
import json
import logging
from collections import deque, namedtuple
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import safepoint
from safepoint import CallFailed, Resource, State, UsageError, resource, resources
from safepoint.cli.everything import cli
from safepoint.model import now
from tests.support.runs import Death, died

SECRET = "s3cr3t-upl0ad"
LATER = timedelta(hours=1)


@pytest.fixture(autouse=True)
def hooks(monkeypatch):
    monkeypatch.setattr(resources, "_hooks", {})


@dataclass
class Outside:
    """What the hooks are asked to do. ``fails`` is raised as often as it is there."""

    reopened: list[Any] = field(default_factory=list)
    closed: list[Any] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    fails: list[BaseException] = field(default_factory=list)
    lasts: timedelta = LATER

    def reopen(self, r):
        self.reopened.append(r.value)
        if self.fails:
            raise self.fails.pop(0)
        return Resource(r.kind, f"{r.value}+", now() + self.lasts)

    def close(self, r, *, idempotency_key):
        self.closed.append(r.value)
        self.keys.append(idempotency_key)
        if self.fails:
            raise self.fails.pop(0)


@pytest.fixture
def outside():
    world = Outside()
    resource("upload", reopen=world.reopen, close=world.close)
    return world


def upload(value=SECRET, expires=None):
    return Resource("upload", value, None if expires is None else now() + expires)


def begun(cp, *held, task="t"):
    state = State(task, agent_state={"held": list(held)})
    cp.save(state)


# -- the value


def test_it_comes_back_as_it_was(cp):
    begun(cp, one := upload({"id": [1, b"x"]}, LATER), two := Resource("job", 7))
    assert cp.load_latest("t").agent_state["held"] == [one, two]


@pytest.mark.parametrize("r", [upload(), upload(expires=LATER), Resource("upload", SECRET, now(), ended=3)])
def test_its_value_is_in_no_text(r):
    for text in (repr(r), str(r), f"{r}", repr([r]), f"{r!r:>50}"):
        assert SECRET not in text
        assert "Resource upload" in text
        assert ("expires" in text) == (r.expires_at is not None)
        assert ("closed" in text) == r.closed


@pytest.mark.parametrize("wrong", [{"kind": ""}, {"kind": 3}, {"expires_at": 3}, {"expires_at": datetime(2026, 1, 1)}])  # noqa: DTZ001
def test_what_is_no_resource_is_refused(wrong):
    with pytest.raises(UsageError):
        Resource(**{"kind": "upload", "value": 1, **wrong})


def test_found_wherever_it_stands():
    @dataclass(slots=True)
    class Slots:
        here: Any

    class Plain:
        def __init__(self, value):
            self.there = value

    Named = namedtuple("Named", "first")
    r = upload()
    tree: dict[Any, Any] = {"a": [0, (r,)], 3: deque([Slots(r)]), "p": Plain({"x": Named(r)}), "text": "x", "s": {1, 2}}
    tree["self"] = tree
    paths = [path for path, found in resources.find(tree) if found is r]
    assert paths == [
        "agent_state['a'][1][0]",
        "agent_state[3][0].here",
        "agent_state['p'].there['x'].first",
    ]


# -- expired


def test_an_expired_one_is_reported(cp, caplog):
    begun(cp, upload(expires=-LATER), upload("fine", LATER), upload("for ever"))
    with cp.resume("t") as run:
        assert run.recovery.expired == (("agent_state['held'][0]", "upload", "expired"),)
        assert run.state.recovery == run.recovery
        assert run.state.agent_state["held"][0].expired
        run.save()
    assert "had expired" in caplog.text
    assert SECRET not in caplog.text
    row, objects = cp.store.read("t")
    assert safepoint.codec.chunks.unpack_plain(row.root, row.refs, objects)["recovery"]["expired"] == [
        ["agent_state['held'][0]", "upload", "expired"]
    ]


def test_it_is_reopened_and_takes_its_place(cp, outside):
    begun(cp, upload("a", -LATER), upload("b", LATER), upload("a", -LATER))
    with cp.resume("t") as run:
        assert [r.value for r in run.state.agent_state["held"]] == ["a+", "b", "a+"]
        assert [what for _, _, what in run.recovery.expired] == ["reopened"] * 2
        run.save()
    assert outside.reopened == ["a"], "what stands at two places is one"
    with cp.resume("t") as run:
        assert run.recovery.expired == ()
    assert [r.value for r in cp.load_latest("t").agent_state["held"]] == ["a+", "b", "a+"]


def test_a_crash_after_it_was_reopened_reopens_nothing(cp, outside):
    begun(cp, upload("a", -LATER))
    with died(cp, "t") as run:
        assert run.state.agent_state["held"][0].value == "a+"
        raise Death
    with cp.resume("t") as run:
        assert run.state.agent_state["held"][0].value == "a+"
    assert outside.reopened == ["a"]


def test_one_that_was_reopened_and_has_expired_since_is_reopened_once_more(cp, outside):
    outside.lasts = timedelta(0)
    begun(cp, upload("a", -LATER))
    with died(cp, "t") as run:
        assert run.recovery.expired[0][2] == "not reopened: it comes back expired"
        raise Death
    assert outside.reopened == ["a", "a+", "a++"]


@pytest.mark.parametrize(
    ("fault", "what"),
    [(ValueError(SECRET), "ValueError"), (None, "its hook returned None, no resource of its kind")],
)
def test_a_hook_that_fails_is_reported_and_the_run_goes_on(cp, outside, fault, what, caplog):
    if fault is None:
        resource("upload", reopen=lambda r: None)
    else:
        outside.fails = [fault]
    begun(cp, upload("a", -LATER))
    with cp.resume("t") as run:
        assert run.recovery.expired[0][2] == f"not reopened: {what}"
        assert run.state.agent_state["held"][0].value == "a"
        run.save()
    assert SECRET not in caplog.text


# -- closed


def finish_in_handle(cp):
    with cp.resume("t") as run:
        run.finish("done")
        run.save()
    return run.leftovers


def finish_in_agent(cp):
    safepoint.run_agent(lambda run: run.finish("done"), task_id="t", store=cp, input="go")


def finish_by_verb(cp):
    cp.finish("t", "done")


def finish_async(cp):
    async def step(run):
        run.finish("done")

    asyncio.run(safepoint.run_agent_async(step, task_id="t", store=safepoint.open_async(cp), input="go"))


WAYS = [finish_in_handle, finish_in_agent, finish_by_verb, finish_async]


@pytest.mark.parametrize("finish", WAYS)
def test_what_the_ended_task_left_open_is_closed_once(cp, outside, finish):
    begun(cp, upload("a"), upload("b", -LATER) if finish is finish_by_verb else upload("b"), upload("a"), Resource("job", 1))
    finish(cp)
    assert sorted(outside.closed) == ["a", "b"]
    assert cp.status("t").status == "finished"
    assert [r.closed for r in cp.load_latest("t").agent_state["held"]] == [True, True, True, False]
    assert [what for _, _, what in cp.close_leftovers("t")] == ["closed"] * 3
    assert cp.status("t").status == "finished"
    assert len(outside.closed) == 2
    cp.delete_task("t")
    assert len(outside.closed) == 2


def test_a_failed_task_goes_on_and_keeps_what_it_has_open(cp, outside):
    begun(cp, upload("a"))
    with pytest.raises(ValueError, match="no"), cp.resume("t"):
        raise ValueError("no")
    assert cp.status("t").status == "failed"
    assert outside.closed == []
    with pytest.raises(UsageError, match="has not ended"):
        cp.close_leftovers("t")


def test_a_hook_that_fails_masks_nothing_and_is_called_again(cp, outside, caplog):
    outside.fails = [OSError(SECRET)]
    begun(cp, upload("a"), upload("b"))
    assert [what for _, _, what in finish_in_handle(cp)] == ["not closed: OSError", "closed"]
    assert cp.status("t").status == "finished"
    assert SECRET not in caplog.text
    assert cp.close_leftovers("t")[0][2] in ("closed", "not closed: OSError")
    assert outside.closed[:2] == ["a", "b"]


def test_a_crash_between_the_end_and_the_closing(cp, outside):
    begun(cp, upload("a"))
    with died(cp, "t") as run:
        run.finish("done")
        run.save()
        raise Death
    assert outside.closed == []
    assert cp.close_leftovers("t") == (("agent_state['held'][0]", "upload", "closed"),)
    assert outside.closed == ["a"]


def test_a_crash_in_the_closing_calls_it_with_the_same_key(cp, outside):
    begun(cp, upload("a"))
    outside.fails = [Death()]
    with pytest.raises(Death):
        finish_in_handle(cp)
    assert cp.close_leftovers("t")[0][2] == "closed"
    assert outside.closed == ["a", "a"]
    assert len(set(outside.keys)) == 1
    assert cp.status("t").status == "finished"


def test_a_process_that_did_not_know_the_hook(cp, outside):
    begun(cp, upload("a"))
    known, resources._hooks = resources._hooks, {}
    finish_by_verb(cp)
    assert not cp.load_latest("t").agent_state["held"][0].closed
    assert cp.close_leftovers("t") == ()
    resources._hooks = known
    cp.close_leftovers("t")
    assert outside.closed == ["a"]


def test_the_next_turn_finds_it_closed(cp, outside):
    def step(run):
        if run.state.agent_state.get("held") is None:
            run.state.agent_state["held"] = [upload("a")]
        seen.append(run.state.agent_state["held"][0].closed)
        run.finish("done")

    seen: list[bool] = []
    for turn in ("one", "two"):
        safepoint.run_agent(step, task_id="t", store=cp, input="go", turn=turn)
    assert seen == [False, True]
    assert outside.closed == ["a"]


def test_a_save_that_fails_gives_nothing_up(cp, outside):
    begun(cp, upload("a"))
    with cp.resume("t") as run:
        run.state.agent_state["bad"] = object()
        run.finish("done")
        with pytest.raises(safepoint.RefusedType):
            run.save()
        assert not run.state.agent_state["held"][0].closed
    assert outside.closed == []


HERE = Resource("module", 1)


def test_a_search_stays_within_the_state():
    class Plain:
        held: list[Resource]

    def function():
        return HERE

    fn: Any = function
    plain = Plain()
    plain.held = [Resource("plain", 1)]
    fn.held = Resource("fn", 1)
    state = {"plain": plain, "fn": fn, "method": Resource.__repr__, "bound": HERE.__repr__, "builtin": [].append}
    assert [path for path, _ in resources.find(state)] == ["agent_state['plain'].held[0]"]


def test_no_run_begins_while_a_task_is_closed_to_be_deleted(cp):
    told = []

    def close(r):
        try:
            cp.resume("t").__enter__()
        except safepoint.LeaseHeld as error:
            told.append(type(error))

    resource("upload", close=close)
    begun(cp, upload("a"))
    cp.delete_task("t")
    assert told == [safepoint.LeaseHeld]


def test_a_deleted_task_closes_what_it_had_open(cp, outside):
    begun(cp, upload("a"), upload("a"))
    outside.fails = [OSError("no")]
    with cp.resume("t"), pytest.raises(safepoint.LeaseHeld):
        cp.delete_task("t")
    assert outside.closed == []
    cp.delete_task("t")
    assert outside.closed == ["a"]
    with pytest.raises(safepoint.NotFound):
        cp.delete_task("t")


def test_async_hooks(cp):
    done = []

    async def close(r):
        await asyncio.sleep(0)
        done.append(("closed", r.value))

    async def reopen(r):
        await asyncio.sleep(0)
        return Resource("upload", "new", now() + LATER)

    resource("upload", reopen=reopen, close=close)
    begun(cp, upload("a", -LATER))

    async def work():
        acp = safepoint.open_async(cp)
        async with acp.resume("t") as run:
            assert run.state.agent_state["held"][0].value == "new"
            run.finish()
            await run.save()
        assert [what for _, _, what in await acp.close_leftovers("t")] == ["closed"]

    asyncio.run(work())
    begun(cp, upload("b"), task="u")
    cp.delete_task("u")
    assert done == [("closed", "new"), ("closed", "b")]


# -- hooks


@pytest.mark.parametrize("fn", [lambda: 1, lambda a, b: 1, 3, safepoint.tool(effect="write", name="w")(lambda r: r)])
def test_a_hook_that_cannot_be_one_is_refused(fn):
    with pytest.raises(UsageError):
        resource("upload", close=fn)


def test_a_hook_may_be_a_tool(cp):
    @safepoint.tool(effect="idempotent", name="close it", retry=safepoint.Retry(2, backoff=0))
    def close(r):
        tries.append(r)
        if len(tries) == 1:
            raise OSError("once")

    tries: list[Any] = []
    resource("upload", close=close)
    begun(cp, upload("a"))
    finish_by_verb(cp)
    assert len(tries) == 2


# -- shown to nobody


def test_no_command_and_no_log_shows_it(tmp_path, caplog, capsys):
    url = f"sqlite:///{tmp_path}/agent.db"

    @safepoint.tool(effect="idempotent", name="use it")
    def use(r):
        return r

    with caplog.at_level(logging.DEBUG), safepoint.open(url) as cp:
        with cp.resume("t") as run:
            run.state.messages.append({"role": "user", "content": "x"})
            run.state.agent_state["held"] = upload(expires=LATER)
            run.step("open", upload)
            run.call(use, upload())
            run.save()
            with pytest.raises(CallFailed):
                run.call(safepoint.tool(effect="read", name="bad")(bad), upload())
        assert SECRET not in repr(cp.calls("t"))
        assert all(SECRET not in json.dumps([c.arguments, c.result]) for c in cp.calls("t"))
        begun(cp, task="u")
        assert SECRET not in str(cp.diff("t", 1)) + repr(cp.diff("t", 1).entries)
    assert SECRET not in caplog.text

    def printed(*command):
        with pytest.raises(SystemExit):
            cli.main([*command, "--store", url])
        return "".join(capsys.readouterr())

    for command in (
        ["show", "t"],
        ["show", "t", "--json"],
        ["show", "t", "--raw"],
        ["calls", "t", "--full"],
        ["calls", "t", "1", "--json"],
        ["diff", "t@1", "2"],
        ["diff", "t@1", "2", "--patch"],
        ["plan", "t"],
        ["log", "t"],
    ):
        assert SECRET not in printed(*command), command
    shown = printed("show", "t")
    assert "<Resource upload expires" in shown
    assert "open: made" in shown


def bad(r):
    raise ValueError(str(r))


def test_utc_is_now():
    assert Resource("x", 1, datetime(2020, 1, 1, tzinfo=UTC)).expired

"""Histories through the public face: what a resume makes of their end, what it leaves alone, and who says so."""

import asyncio
import json
import logging
import signal
import subprocess
import sys

import pytest

import safepoint
from safepoint import Damaged, InDoubt, State, UsageError, history, messages_complete, run_agent, tool
from tests.support.histories import cuts, refusal
from tests.unit.test_history_rules import END, U, a, asks, call, fc, msg, out, res, rs, text, think, u, use
from tests.unit.test_history_rules import tool as answer

LOST = history.INTERRUPTED


@pytest.fixture(params=["memory", "sqlite"])
def cp(request, tmp_path):
    url = "memory://" if request.param == "memory" else f"sqlite:///{tmp_path / 'h.db'}"
    with safepoint.open(url, durability="process") as cp:
        yield cp


def saved(cp, *messages, **metadata):
    cp.save(State("t", messages=list(messages), metadata=metadata))


def asked(*pairs):
    """An assistant turn that asks for calls: id and arguments."""
    return {"role": "assistant", "content": None, "tool_calls": [call(i, json.dumps(args)) for i, args in pairs]}


# -- what a resume does


def test_open_calls_are_answered_and_the_stored_history_stays(cp, caplog):
    messages = [U, asks("x", "y"), answer("y", "é\u2028 ")]
    saved(cp, *messages)
    caplog.set_level(logging.INFO, "safepoint")
    with cp.resume("t") as run:
        assert run.state.messages == [*messages, answer("x", LOST)]
        said = ("answered 1 open call of message 1: 0 from the journal, 1 as interrupted",)
        assert run.recovery.mended == said == run.state.recovery.mended
        assert cp.load("t", seq=1).messages == messages  # and so it stays
        run.save()
    assert cp.load("t", seq=1).messages == messages
    assert f"history of t mended: {said[0]}" in caplog.text
    assert f"history: {said[0]}" in next(r.message for r in caplog.records if r.message.startswith("resumed t@1"))
    with cp.resume("t") as run:
        assert run.recovery.mended == ()
        assert len(run.state.messages) == 4
    assert cp.doctor("t").recovery["mended"] == list(said)


@pytest.mark.parametrize("mend", [True, False, None])
def test_a_turn_that_was_cut_off_is_left_out(cp, mend):
    cut = {"role": "assistant", "content": [think(signature="s"), {"type": "tool_use", "id": "x", "name": "f", "input": '{"a'}]}
    saved(cp, U, a(text()), U, cut)
    with cp.resume("t", mend=mend) as run:
        assert run.state.messages == ([U, a(text()), U, cut] if mend is False else [U, a(text()), U])
    with pytest.raises(UsageError, match="mend="):
        cp.resume("t", mend="yes")


def test_the_async_face(cp):
    saved(cp, U, a(use("x")))

    async def resumed():
        async with safepoint.AsyncCheckpointer(cp).resume("t") as run:
            return list(run.state.messages)

    found = asyncio.run(resumed())
    assert found[2] == u({"type": "tool_result", "tool_use_id": "x", "content": LOST, "is_error": True})


def test_any_cut_is_resumed(cp):
    args = json.dumps({"k": ["é", 1.0, None]}, ensure_ascii=False)
    turns = {
        "chat": [{"role": "assistant", "content": "hé", "tool_calls": [call("x", args), call("y")]}, answer("y"), answer("x")],
        "responses": [rs(encrypted_content="e"), msg(), fc("x", args), fc("y"), out("x"), out("y")],
        "anthropic": [a(think(), text("hé"), use("x", json.loads(args)), use("y")), u(res("x")), u(res("y"))],
    }
    before = {
        "chat": [U, asks("w"), answer("w"), END, U],
        "responses": [U, rs("rs_0"), fc("w"), out("w"), U],
        "anthropic": [U, a(think(), use("w")), u(res("w"), text())],
    }
    for format, turn in turns.items():
        for n, left in enumerate(cuts(turn)):
            stored = [*before[format], *left]
            cp.save(State(f"{format} {n}", messages=stored, metadata={"history": {"format": format}}))
            with cp.resume(f"{format} {n}", health=[messages_complete], recover="strict") as run:
                found = run.state.messages
                assert refusal(format, found) == ""
                kept = len(before[format])
                assert json.dumps(found[:kept]) == json.dumps(stored[:kept])  # in the same order of keys, too
                assert cp.load_latest(f"{format} {n}").messages == stored


def test_field_case_42_each_saved_by_itself(cp):
    """A call, what the user says meanwhile, and the late result, each saved by itself."""
    state = State("t")
    for message in (U, asks("x", "y"), U, answer("x", "late")):
        state.messages.append(message)
        cp.save(state)
    for seq, wanted in (
        (2, [U, asks("x", "y"), answer("x", LOST), answer("y", LOST)]),
        (3, [U, asks("x", "y"), answer("x", LOST), answer("y", LOST), U]),
        (4, [U, asks("x", "y"), answer("x", "late"), answer("y", LOST), U]),
    ):
        with cp.resume("t", at=seq) as run:
            assert run.state.messages == wanted
            window = history.trim(run.state.messages, 1)
        assert window == ([U] if seq > 2 else wanted)  # never a result without its call
        assert cp.load("t", seq=seq).messages == state.messages[:seq]


# -- the journal


def test_what_the_journal_knows_comes_first(cp):
    made = []

    @tool
    def order(item, n=1):
        made.append(item)
        return {"order": len(made), "item": item}

    @tool(effect="read")
    def look(at):
        raise ValueError("nothing é")

    turn = asked(("c0", {"item": "a"}), ("c1", {"at": 1}), ("c2", {"item": "b"}), ("c3", {"item": "c"}))
    saved(cp, U)

    with cp.resume("t") as run:
        run.state.messages.append(turn)
        run.save()
        run.call_tool(order, {"item": "a"}, call_id="c0")
        with pytest.raises(safepoint.CallFailed):
            run.call_tool(look, {"at": 1}, call_id="c1")
        run.call_tool(order, {"item": "other"}, call_id="c2")  # of another reply, with the same id
    for _ in range(2):  # what is not saved is found again
        with cp.resume("t") as run:
            assert run.state.messages[2:] == [
                answer("c0", '{"order":1,"item":"a"}'), answer("c1", "failed: ValueError: nothing é"), answer("c2", LOST),
                answer("c3", LOST),
            ]  # fmt: skip
            assert run.recovery.mended == ("answered 4 open calls of message 1: 2 from the journal, 2 as interrupted",)
    with pytest.raises(InDoubt), cp.resume("t") as run:
        # That of c0 has reached the model by way of the history. The other one has not, and stands in the way of a third.
        run.call_tool(order, {"item": "z"}, call_id="d0")
    assert made == ["a", "other"]


def test_a_result_that_the_model_was_told_parks_nothing(cp):
    made = []

    @tool
    def order(item):
        made.append(item)
        return "ordered"

    saved(cp, U)
    with cp.resume("t") as run:
        run.state.messages.append(asked(("c0", {"item": "a"})))
        run.save()
        run.call_tool(order, '{"item": "a"}', call_id="c0")
    with cp.resume("t") as run:
        assert run.recovery.unclaimed == (1,)
        assert run.state.messages[-1] == answer("c0", "ordered")
        assert run.call_tool(order, {"item": "b"}, call_id="c0") == "ordered"  # the next reply numbers its calls alike
        assert run.call_tool(order, {"item": "a"}, call_id="c1") == "ordered"  # wanted once more, knowing of the first
        run.save()
    assert made == ["a", "b", "a"]
    assert [c.status for c in cp.calls("t")] == ["succeeded"] * 3


def test_an_answer_that_waits_for_the_step_is_not_taken_from_it(cp):
    @tool
    def pay(item):
        return safepoint.tools.current.get().run.pause("may I", item)

    saved(cp, U)
    with pytest.raises(safepoint.DecisionNeeded), cp.resume("t") as run:  # noqa: PT012
        run.state.messages.append(asked(("c0", {"item": "a"})))
        run.save()
        run.call_tool(pay, {"item": "a"}, call_id="c0")
    cp.answer("t", cp.pauses("t")[0], "yes")
    with cp.resume("t") as run:
        assert run.recovery.mended == ()
        assert run.call_tool(pay, {"item": "a"}, call_id="c0") == "yes"


PROGRAM = """
import os, signal, sys
import safepoint
from safepoint import tool

@tool
def order(item):
    return f"ordered {item}"

@tool(effect="read")
def look(at):
    os.kill(os.getpid(), signal.SIGKILL)

cp = safepoint.open(sys.argv[1])
run = cp.resume("t").__enter__()
run.state.messages.append({"role": "user", "content": [{"type": "text", "text": "go"}]})
run.state.messages.append({"role": "assistant", "content": [
    {"type": "tool_use", "id": "c0", "name": "order", "input": {"item": "é"}},
    {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": 1}},
    {"type": "tool_use", "id": "c2", "name": "order", "input": {"item": "b"}},
]})
run.save()
run.call_tool(order, {"item": "é"}, call_id="c0")
run.call_tool(look, {"at": 1}, call_id="c1")
"""


def test_a_process_killed_in_a_tool(tmp_path):
    url = f"sqlite:///{tmp_path / 'k.db'}"
    done = subprocess.run([sys.executable, "-c", PROGRAM, url], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    with safepoint.open(url) as cp, cp.resume("t") as run:
        assert refusal("anthropic", run.state.messages) == ""
        assert [(b["tool_use_id"], b["content"], b.get("is_error")) for b in run.state.messages[2]["content"]] == [
            ("c0", "ordered é", None), ("c1", LOST, True), ("c2", LOST, True),
        ]  # fmt: skip


# -- the loop


class Stop(BaseException):
    pass


def agent(made, stops_at=None):
    """Asks in one step and makes the calls in the next, as many do; stops once, when so many calls were made."""

    @tool(name=f"order at {stops_at}")
    def order(item):
        made.append(item)
        return f"ordered {item}"

    stops = [stops_at]

    def step(run):
        last = run.state.messages[-1]
        if "tool_calls" not in last:
            n = sum("tool_calls" in m for m in run.state.messages)
            run.state.messages.append(asked(("c0", {"item": f"{n} a"}), ("c1", {"item": f"{n} b"})))
            return
        for c in last["tool_calls"]:
            if len(made) in stops:
                stops.clear()
                raise Stop
            said = run.call_tool(order, c["function"]["arguments"], call_id=c["id"])
            run.state.messages.append(answer(c["id"], said))
        if sum("tool_calls" in m for m in run.state.messages) == 2:
            run.finish("done")

    return step


def test_calls_that_a_step_ended_with_are_the_next_steps(cp):
    """Without a crash the next step would have found them open too, so that it must know what to do with them."""
    plain = run_agent(agent([]), task_id="plain", input="go", store=cp)
    assert refusal("chat", plain.state.messages) == ""
    for stops_at in range(4):
        made: list[str] = []
        task = f"t{stops_at}"
        step = agent(made, stops_at)
        with pytest.raises(Stop):
            run_agent(step, task_id=task, input="go", store=cp)
        done = run_agent(step, task_id=task, input="go", store=cp)
        assert done.recovery.mended == ()
        assert done.state.messages == plain.state.messages
        assert made == ["0 a", "0 b", "1 a", "1 b"]
        cp.rewind(task, 2)  # a person's copy of what a step ended with is one, too
        again = run_agent(step, task_id=task, input="go", store=cp)
        assert again.state.messages == plain.state.messages
        assert len(made) == 4


def test_the_loop_mends_what_no_step_has_left(cp):
    seen = []

    def step(run):
        seen.append(list(run.state.messages))
        run.finish()

    saved(cp, U, asks("x"))
    run_agent(step, task_id="t", store=cp, input=None)
    assert seen == [[U, asks("x"), answer("x", LOST)]]
    # Also behind a person's rewind, where the head is a copy.
    cp.rewind("t", 1)
    run_agent(step, task_id="t", store=cp)
    assert seen[1] == seen[0]


def test_a_new_turn_comes_behind_the_answers(cp):
    def leaves_open(run):
        run.state.messages.append(asks("x"))
        run.finish()

    run_agent(leaves_open, task_id="t", input="go", turn="1", store=cp)
    again = run_agent(leaves_open, task_id="t", input="go", turn="1", store=cp)
    assert again.state.messages == [U, asks("x")]  # the outcome is the stored one
    done = run_agent(lambda run: run.finish(), task_id="t", input="go", turn="2", store=cp)
    assert done.state.messages == [U, asks("x"), answer("x", LOST), U]


# -- health


def test_a_fault_before_the_tail_makes_a_checkpoint_unhealthy(cp, caplog):
    saved(cp, U, asks("x"), answer("x"), END)
    state = cp.load_latest("t")
    del state.messages[2]
    cp.save(state)
    why = "message 1: C1: 1 of its calls has no answer right after it"
    assert cp.plan("t", health=[messages_complete]).skipped == ((2, f"unhealthy: {why}"),)
    with pytest.raises(safepoint.InvalidState, match="C1"):
        cp.resume("t", health=[messages_complete], recover="strict")
    with cp.resume("t") as run:  # nobody asked for health: told, and left to the agent
        assert run.state.messages == [U, asks("x"), END]
        assert run.recovery.mended == ()
    assert f"history of t breaks a rule of chat: {why}" in caplog.text
    with cp.resume("t", health=[messages_complete]) as run:
        assert (run.recovery.mode, run.recovery.seq) == ("fallback", 1)
        assert len(run.state.messages) == 4
    cp.save(State("u", messages=[answer("x"), U, END]))
    with pytest.raises(Damaged, match="no checkpoint that can be used"):
        cp.resume("u", health=[messages_complete])


def test_messages_of_no_known_format_are_nobodys_business(cp, caplog):
    messages = [7, "x", {"kind": "mine", "text": "y"}, None, ("a", {"b": 1})]
    saved(cp, *messages)
    with cp.resume("t", health=[messages_complete]) as run:
        assert run.state.messages == messages
    found = cp.doctor("t")
    assert (found.history, found.mends, found.faults) == ("", (), ())
    assert "history" not in caplog.text


# -- doctor and show


def test_doctor_and_show_say_what_they_see(tmp_path):
    url = f"sqlite:///{tmp_path / 'd.db'}"
    with safepoint.open(url) as cp:
        saved(cp, U, asks("w"), U, asks("secret"))
        found = cp.doctor("t")
    assert found.history == "chat"
    assert found.faults == ("message 1: C1: 1 of its calls has no answer right after it",)
    assert found.mends == ("answered 1 open call of message 3: 0 from the journal, 1 as interrupted",)
    assert "the provider would refuse the history: go back with `safepoint rewind t SEQ`" in found.advice

    def said(*words):
        command = [sys.executable, "-m", "safepoint", *words, "--store", url]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout

    assert json.loads(said("show", "t", "--json"))["history"] == {
        "format": "chat", "mends": list(found.mends), "faults": list(found.faults),
    }  # fmt: skip
    facts = json.loads(said("doctor", "t", "--json"))
    assert [facts[k] for k in ("history", "mends", "faults")] == ["chat", list(found.mends), list(found.faults)]
    for words, before in ((("show", "t"), "the provider would refuse "), (("doctor", "t"), "")):
        shown = said(*words)
        assert f"{before}{found.faults[0]}" in shown
        assert f"mended when it is resumed: {found.mends[0]}" in shown
    assert "OpenAI Chat Completions" in said("doctor", "t")

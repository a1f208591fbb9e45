"""What cleanup keeps and what is waited for, when somebody saves between a crash and the resume."""

import uuid

import pytest

import safepoint
from safepoint import tool
from safepoint.errors import InDoubt


def named(name):
    """A name that no other test's tool has."""
    return f"{name}.{uuid.uuid4()}"


def test_the_record_of_an_interrupted_steps_write_outlives_cleanup(cp):
    sent = []

    @tool(name=named("send"))
    def send(to):
        sent.append(to)
        return "ok"

    def step(run):
        run.call(send, "bob")
        if not resumed:
            raise KeyboardInterrupt
        run.finish("done")

    resumed = False
    with pytest.raises(KeyboardInterrupt):
        safepoint.run_agent(step, task_id="t", input="hi", store=cp)
    for note in range(3):
        cp.update("t", lambda state, note=note: state.metadata.update(note=note))
    assert len(cp.cleanup("t", keep_latest=1).deleted) == 2
    assert cp.cleanup("t", keep_latest=1).deleted == ()
    resumed = True
    assert safepoint.run_agent(step, task_id="t", store=cp).result == "done"
    assert sent == ["bob"]
    assert cp.cleanup("t", keep_latest=1).calls_deleted == 1, "nothing would ask for it any more"


def test_a_call_in_doubt_that_somebody_stepped_past_is_not_waited_for(cp):
    @tool(name=named("lose"))
    def lose():
        raise ConnectionError

    with pytest.raises(InDoubt), cp.resume("t") as run:
        run.call(lose)
    assert (cp.status("t").status, cp.status("t").pending) == ("waiting", 1)
    assert cp.tasks(status="unfinished") == []

    def go_past(state):
        state.step += 1

    cp.update("t", go_past)
    assert cp.status("t").pending == 0
    assert [t.task_id for t in cp.tasks(status="unfinished")] == ["t"]

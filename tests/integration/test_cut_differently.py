"""A step that is done anew and ends elsewhere than before: what happened in the first attempt is not done a second time."""

from __future__ import annotations

import logging

import pytest

import safepoint
from safepoint import NotDone, UsageError, run_agent, tool


class Queue:
    """Works through items, so many a step: what a time budget does to a step that is cut short."""

    def __init__(self, cp, items, **declared):
        self.cp, self.items, self.sent = cp, items, []
        self.send = tool(**({"name": f"queue.send.{id(self)}"} | declared))(self._send)
        self.sizes = []

    def _send(self, item: str) -> str:
        self.sent.append(item)
        return f"sent {item}"

    def step(self, run):
        done = run.state.agent_state.setdefault("done", [])
        for item in self.items[len(done) :][: self.sizes.pop(0) if self.sizes else 2]:
            run.call(self.send, item)
            done.append(item)
            if self.crash_after == item:
                raise KeyboardInterrupt
        if len(done) == len(self.items):
            run.finish(done)

    crash_after = None

    def run(self, **options):
        return run_agent(self.step, task_id="t", store=self.cp, **options)


def interrupted(cp, sizes, crash_after, items="abcdef", save_every=1, **declared):
    queue = Queue(cp, list(items), **declared)
    queue.sizes, queue.crash_after = sizes, crash_after
    with pytest.raises(KeyboardInterrupt):
        queue.run(save_every=save_every)
    queue.crash_after, queue.sizes = None, []
    return queue


def test_a_shorter_step_leaves_the_rest_to_the_next_one(cp, caplog):
    queue = interrupted(cp, [5], "d", replan="reuse")
    queue.sizes = [1, 2, 2, 2]
    with caplog.at_level(logging.WARNING, "safepoint"):
        assert queue.run().result == list("abcdef")
    assert queue.sent == list("abcdef")
    assert "was not asked for in step 0" in caplog.text


def test_a_longer_step_takes_what_a_later_one_had_done(cp):
    queue = interrupted(cp, [2, 2], "d", save_every=3, replan="reuse")
    queue.sizes = [4, 2]
    assert queue.run(save_every=3).result == list("abcdef")
    assert queue.sent == list("abcdef")


def test_what_a_longer_step_took_is_not_taken_again_after_its_save(cp):
    queue = interrupted(cp, [2, 2], "b", items="aabb", save_every=3, replan="reuse")
    queue.sizes = [3, 1]
    queue.run(save_every=1)
    assert queue.sent == list("aabb")
    assert {c.step for c in cp.calls("t")} == {0, 1}


def test_by_default_a_person_is_asked(cp):
    queue = interrupted(cp, [5], "d")
    queue.sizes = [2, 2, 2]
    outcome = queue.run()
    assert outcome.status == "waiting"
    assert "happened in an earlier attempt" in outcome.pending[0].reason
    assert queue.sent == list("abcd")
    cp.resolve("t", outcome.pending[0], safepoint.Done("sent c"))
    outcome = queue.run()
    assert outcome.status == "waiting", "the next one is as doubtful"
    cp.resolve("t", outcome.pending[0], NotDone())
    assert queue.run().status == "finished"
    assert queue.sent == list("abcddef"), "the person said that d had not been the same"


def test_a_key_decides(cp):
    queue = interrupted(cp, [5], "d", key=lambda item: item)
    queue.sizes = [1, 1, 1, 1, 1, 1]
    assert queue.run().status == "finished"
    assert queue.sent == list("abcdef")


def test_execute_is_taken_at_its_word(cp):
    queue = interrupted(cp, [5], "d", replan="execute")
    queue.sizes = [2, 2, 2]
    queue.run()
    assert queue.sent == list("abcdcdef")


def test_what_nobody_asks_for_does_not_stand_in_the_way_for_ever(cp):
    queue = interrupted(cp, [2], "a", items="abcb")
    queue.items = ["b", "c", "d", "a"]
    queue.sizes = [1, 1, 1, 1]
    outcome = queue.run()
    # In the step itself another call of the tool is parked; a person says that it is another one.
    assert outcome.status == "waiting"
    cp.resolve("t", outcome.pending[0], NotDone())
    assert queue.run().status == "finished"
    assert queue.sent == ["a", "b", "c", "d", "a"], "three steps later an equal call is a new one"


def test_it_outlives_a_restart(cp):
    queue = interrupted(cp, [5], "d", replan="reuse")
    queue.sizes = [1]
    assert queue.run(max_steps=1).status == "out_of_steps"
    assert [c.tool for c in cp.calls("t") if c.step == 1] == [queue.send.name] * 3
    assert {p.action for p in cp.plan("t").calls} == {"unclaimed"}
    assert queue.run(max_steps=9).status == "finished"
    assert queue.sent == list("abcdef")


def test_the_call_under_way_of_a_thread_keeps_the_step_open(cp):
    import threading

    inside, go = threading.Event(), threading.Event()

    @tool(effect="read", name=f"slow.{id(cp)}")
    def slow() -> str:
        inside.set()
        go.wait(10)
        return "ok"

    with cp.resume("t") as run:
        thread = threading.Thread(target=lambda: run.call(slow, call_id="a"))
        thread.start()
        inside.wait(10)
        with pytest.raises(UsageError, match="being executed"):
            run.save()
        go.set()
        thread.join()
        run.save()

"""``except BaseException: pass`` around every call of a step commits nothing past the end of its run.

The ends are a call in doubt, a pause, and a lost lease; in ``run_agent`` and in the handle, sync and async. Raw rows tell.
"""

from typing import Any

import pytest

from tests.support import races, raw, swallowing
from tests.support.children import Server
from tests.support.effects import Effects


@pytest.fixture
def db(any_db: str) -> str:
    return any_db


ENDS = ("in-doubt", "in-doubt-async-tool", "in-doubt-verified", "in-doubt-many", "pause", "pause-inside", "lost")


@pytest.mark.parametrize("face", list(swallowing.FACES))
@pytest.mark.parametrize("end", ENDS)
def test_nothing_is_committed_past_the_end(end: str, face: str, server: Server, effects: Effects, db: str) -> None:
    if end == "pause-inside" and face.endswith("async"):
        # A sync tool cannot await a pause: what it would get is a coroutine. Its async run pauses in the step.
        end = "pause"
    world = effects.world()
    child = server.start(swallowing.FACES[face], db, "t", world, end)
    stolen: dict[str, Any] = {}
    if end == "lost":
        child.until("stands")
        server.run(races.thief, db, "t")
        stolen = raw.everything(db)
        child.say("go on")
    outcome = child.result()
    swallowed = [m[1] for m in child.heard if m[0] == "swallowed"]
    assert set(swallowed) == {"RunEnded"}
    # Each of them: the end itself, and all that came after it.
    assert len(swallowed) == 8 + 2 * ("handle" in face)

    # Two checkpoints, the last whole step on top; the thief's, if there was one, is the third.
    steps = [(seq, kind, step) for seq, _, kind, step in raw.checkpoints(db, "t")]
    assert steps == [(1, "step", 0), (2, "step", 1), *([(3, "step", 2)] if end == "lost" else [])]
    calls, effects_done = raw.calls(db, "t"), world.done()
    pauses, status = raw.pauses(db, "t"), raw.status(db, "t")
    if end == "lost":
        assert raw.everything(db) == stolen
        assert (calls, pauses, effects_done) == ([], [], {})
        assert outcome == {"status": "raised", "error": "LeaseLost"}
        return
    assert status == "waiting"
    if end.startswith("pause"):
        assert pauses == [("inside" if end == "pause-inside" else "p", "open")]
        assert [c["status"] for c in calls] == (["paused"] if end == "pause-inside" else [])
        assert effects_done == {}
        error = "DecisionNeeded"
    else:
        assert pauses == []
        # A call made beside it goes on to its end; one that had not begun never does.
        beside = end == "in-doubt-many" and len(calls) == 2
        assert sorted(c["status"] for c in calls) == ["in_doubt", *(["succeeded"] if beside else [])]
        assert effects_done == {"t/first": 1, **({"t/beside": 1} if beside else {})}
        error = "InDoubt"
    if "agent" in face:
        assert outcome["status"] == "waiting"
        assert len(outcome["pending"]) == 1
    else:
        assert outcome == {"status": "raised", "error": error}

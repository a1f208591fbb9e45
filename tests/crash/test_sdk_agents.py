"""The three example agents on the raw SDKs, killed with SIGKILL in the middle of a stream, of a tool and of a save: each reply that
was whole is asked for once, the order is placed once, and every request holds a history that its provider takes."""

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import safepoint
from safepoint import history
from tests.support import sdk_life
from tests.support.children import ChildError, Server
from tests.support.paths import ROOT
from tests.support.scale import scale

AGENTS = ("openai_chat", "openai_responses", "anthropic_messages")

# Where it is killed, and at which time of coming there. "inside" comes once for each request and for the order.
MOMENTS = [
    ("stream.first", 1), ("stream.first", 2), ("stream.middle", 3), ("stream.last", 1), ("stream.last", 2), ("stream.last", 3),
    ("inside", 1), ("inside", 2), ("inside", 3), ("inside", 4),
    ("effect.before", 2), ("effect.after", 1), ("effect.after", 2), ("effect.after", 4), ("effect.after", 5), ("result.before", 1),
    ("result.after", 1), ("result.after", 4), ("intent.after", 5), ("save.before", 2), ("commit.row", 1), ("commit.row", 9),
    ("commit.begin", 4), ("save.after", 2), ("save.after", 3), ("release.after", 1),
]  # fmt: skip


@pytest.fixture(scope="module")
def server():
    made = Server("safepoint", "safepoint.stores.sqlite", "tests.support.sdk_life")
    yield made
    made.close()


def life(server: Server, agent: str, cwd: Path, *kill: Any) -> bool:
    """One life; whether it was killed. Anything but that and a clean end is a failure."""
    child = server.start(sdk_life.live, str(ROOT / "examples" / agent), str(cwd), *kill)
    try:
        printed = child.result()
    except ChildError:
        if not kill or not child.was_killed:
            raise
        return True
    assert printed.splitlines()[-1] == "finished after 3 steps: Done: order 1."
    return False


def lines(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def turns(request: dict[str, Any]) -> int:
    """How many replies of the model a request holds."""
    if "input" in request:
        return sum(item.get("type") == "reasoning" for item in request["input"])
    return sum(message["role"] == "assistant" for message in request["messages"])


def valid(request: dict[str, Any]) -> None:
    """By this test's own reading of the providers' rules, and by the library's: every call is answered, once, at once."""
    messages = request.get("input") or request["messages"]
    assert history.check(messages) == []
    open_: list[str] = []
    for message in messages:
        role = message.get("role")
        blocks = message["content"] if isinstance(message.get("content"), list) else []
        answers = [b["tool_use_id"] for b in blocks if b["type"] == "tool_result"]
        answers += [message["tool_call_id"]] if role == "tool" else []
        answers += [message["call_id"]] if message.get("type") == "function_call_output" else []
        calls = [b["id"] for b in blocks if b["type"] == "tool_use"]
        calls += [c["id"] for c in message.get("tool_calls", ())]
        calls += [message["call_id"]] if message.get("type") == "function_call" else []
        if not calls and not answers and message.get("type") != "reasoning":
            assert open_ == [], message
        for answer in answers:
            open_.remove(answer)
        if "input" not in request:
            assert not (calls and open_), message
        open_ += calls
    assert open_ == []
    assert "null" not in json.dumps([m for m in messages if "tool_calls" in m]).replace('"content": null', "").replace(
        '"refusal": null', ""
    )


def finished(agent: str, cwd: Path, *, lost: int) -> None:
    """The whole of what must hold when it has ended, after deaths of which ``lost`` may each have cost one reply."""
    requests = lines(cwd / "requests.jsonl")
    for request in requests:
        valid(request)
    key = "input" if "input" in requests[0] else "messages"
    asked = [turns(r) for r in requests]
    assert asked == sorted(asked)  # no reply that was whole is asked for again once a later one is
    assert set(asked) == {0, 1, 2}
    assert len(requests) <= 3 + lost
    for a, b in itertools.pairwise(requests):
        # Each request goes on from the one before, byte for byte: signatures, ids and arguments are as they came.
        old, new = json.dumps(a[key]), json.dumps(b[key])
        assert new == old if turns(a) == turns(b) else new.startswith(old[:-1])
    assert len(lines(cwd / "orders.jsonl")) == 1
    with safepoint.open(f"sqlite:///{cwd}/{agent}.db") as cp:
        assert cp.status("lamps").status == "finished"
        state = cp.load_latest("lamps")
        sent, kept = requests[-1][key], json.loads(json.dumps(safepoint.wire(state.messages)))
        assert kept[: len(sent)] == sent
        assert history.check(state.messages) == []
        models = [c for c in cp.calls("lamps") if c.model]
        assert [c.status for c in models] == ["succeeded"] * 3
        assert [c.model and c.model["usage"]["output"] for c in models] == [7] * 3
        assert [f for f in cp.check() if f.level == "error"] == []


@pytest.mark.parametrize("agent", AGENTS)
@pytest.mark.scaled
def test_killed_once_at_every_kind_of_moment(server, agent, tmp_path):
    """Each moment of its own in the soak; few of them, spread over the agents, in the small run."""
    chosen = MOMENTS[AGENTS.index(agent) :: scale(6, 1)]
    for point, n in chosen:
        cwd = tmp_path / f"{point}-{n}"
        cwd.mkdir()
        assert life(server, agent, cwd, point, n), (point, n)
        before = lines(cwd / "requests.jsonl")
        recorded = _recorded(agent, cwd)
        assert not life(server, agent, cwd)
        after = [turns(r) for r in lines(cwd / "requests.jsonl")[len(before) :]]
        # What was on record when it died is not asked for again; what was not, is.
        assert after == list(range(recorded, 3)), (point, n)
        finished(agent, cwd, lost=1)
        if not point.startswith("stream") and point not in ("inside", "effect.after", "result.before"):
            assert len(lines(cwd / "requests.jsonl")) <= 4


def _recorded(agent: str, cwd: Path) -> int:
    """How many of the model's replies are on record, read without the library's loader."""
    if not (cwd / f"{agent}.db").exists():
        return 0
    with safepoint.open(f"sqlite:///{cwd}/{agent}.db") as cp:
        return sum(c.model is not None and c.status == "succeeded" for c in cp.calls("lamps"))


@pytest.mark.parametrize("agent", AGENTS)
def test_run_as_its_user_does(agent, tmp_path):
    command = [sys.executable, "-W", "error", str(ROOT / "examples" / agent / "agent.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "finished after 3 steps: Done: order 1."
    assert done.stdout.count("Done: order 1.\n") == 2  # streamed, and as the result
    finished(agent, tmp_path, lost=0)


@pytest.mark.parametrize("agent", AGENTS)
@pytest.mark.scaled
def test_killed_again_and_again(server, agent, tmp_path):
    """One task, a death in each of its lives: in streams, tools and saves, until it comes through."""
    deaths = [("stream.any", 4), ("stream.last", 1), ("inside", 2), ("effect.after", 2), ("save.before", 1), ("commit.row", 3)]
    deaths = deaths[: scale(4, 6)] * scale(1, 3)
    killed = sum(life(server, agent, tmp_path, *death) for death in deaths)
    assert killed >= 3
    assert not life(server, agent, tmp_path)
    finished(agent, tmp_path, lost=killed)
    assert not life(server, agent, tmp_path)  # it has ended: nothing is asked any more
    finished(agent, tmp_path, lost=killed)

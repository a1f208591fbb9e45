"""verify, repair and doctor at a shell: what they print, as JSON and for people, and their exit codes."""

import json

import apsw
import pytest

import safepoint
from safepoint import State
from safepoint.cli import main
from tests.integration.test_verify import big, made


@pytest.fixture
def url(tmp_path, monkeypatch):
    url = f"sqlite:///{tmp_path}/agent.db"
    with safepoint.open(url) as cp:
        made(cp, "t")
        cp.save(State("$odd\nname", agent_state={"goal": None, "doc": "d" * 5000, "again": ["d" * 5000] * 3}))
    monkeypatch.setenv("SAFEPOINT_URL", url)
    return url


@pytest.fixture
def run(url, capsys):
    def call(*args):
        code = main(list(args))
        out, err = capsys.readouterr()
        return code, out, err

    return call


def spoiled(tmp_path):
    conn = apsw.Connection(str(tmp_path / "agent.db"))
    conn.execute(f"UPDATE sp_objects SET data = X'7600' WHERE instr(data, X'{b'message 4 '.hex()}')")
    conn.execute("UPDATE sp_checkpoints SET step = 9 WHERE seq = 2")
    conn.close()


def test_a_sound_store(run):
    code, out, err = run("verify")
    assert code == 0
    assert "nothing is damaged" in out
    assert "read 2 tasks, 7 checkpoints" in out
    assert err == ""


def test_a_damaged_store(run, tmp_path):
    spoiled(tmp_path)
    code, out, err = run("verify")
    assert code == 6
    assert "2 damaged" in out
    assert f"sp_checkpoints, row {(1 << 32) + 2}" in out
    assert "checkpoints 5-6" in out
    assert "head 6 does not load, the newest that loads is 4; loading: 1, 3-4" in out
    assert "safepoint repair" in err


def test_as_json(run, tmp_path):
    spoiled(tmp_path)
    code, out, _ = run("verify", "--json", "t")
    found = json.loads(out)
    assert code == 6
    assert found["ok"] is False
    assert [(d["kind"], d["checkpoints"]) for d in found["damages"]] == [("checkpoint", [[2, 2]]), ("object", [[5, 6]])]
    (branch,) = found["branches"]
    assert (branch["head"], branch["head_loads"], branch["loads"], branch["newest_good"]) == (6, False, [[1, 1], [3, 4]], 4)


def test_no_such_task(run):
    assert run("verify", "nobody")[0] == 3
    assert run("doctor", "nobody")[0] == 3
    assert run("repair", "nobody")[0] == 3


def test_repair_into_a_copy(run, tmp_path, url):
    spoiled(tmp_path)
    code, out, _ = run("repair", "--json")
    done = json.loads(out)
    assert code == 0
    assert done["url"] == f"{url}.repaired"
    assert done["lost_checkpoints"] == {"t": [[2, 2], [5, 6]]}
    assert done["fell_back"][0]["new_branch"] == "main~1"
    assert run("verify")[0] == 6
    assert run("--store", done["url"], "verify")[0] == 0
    code, _, err = run("repair")
    assert code == 2
    assert "not empty" in err


def test_repair_for_people(run, tmp_path, url):
    spoiled(tmp_path)
    code, out, _ = run("repair", "--into", f"sqlite:///{tmp_path}/other.db", "t")
    assert code == 0
    assert "main~1 goes on from 4" in out
    assert "checkpoints left out: 2, 5-6" in out


def test_repair_in_place(run, tmp_path, url, monkeypatch):
    spoiled(tmp_path)
    code, out, _ = run("repair", "--in-place", "--yes")
    assert code == 0
    assert "agent.db.before-repair-1" in out
    assert run("verify")[0] == 0
    with safepoint.open(url) as cp:
        assert cp.load_latest("t").messages == [big(i) for i in range(4)]
    assert "nothing is damaged" in run("repair", "--in-place", "--yes")[1]


def test_doctor(run, url):
    code, out, _ = run("doctor", "t")
    assert code == 0
    assert "checkpoint 6, step 5" in out
    assert "messages" in out
    code, out, _ = run("doctor", "--json", "$odd\nname")
    found = json.loads(out)
    assert found["ok"] is True
    assert found["sizes"][0]["path"] == "agent_state"
    (repeat,) = found["repeats"]
    assert (repeat["times"], repeat["bytes"]) == (4, 5000)
    assert any("the same content again" in text for text in found["advice"])


def test_doctor_names_what_is_lacking(url, run):
    with safepoint.open(url) as cp, cp.resume("agent", requires=["goal", "plan.steps", "notes", "done"]) as agent:
        agent.state.agent_state = {"goal": "Rome", "plan": {}, "notes": "", "done": None}
        agent.save()
    _, out, _ = run("doctor", "--json", "agent")
    found = json.loads(out)
    assert found["ok"] is False
    assert {f["path"]: (f["found"], f["type"]) for f in found["requires"]} == {
        "goal": ("present", "str"),
        "plan.steps": ("missing", ""),
        "notes": ("empty", "str"),
        "done": ("None", "NoneType"),
    }
    assert "plan.steps" in run("doctor", "agent")[1]


def test_doctor_on_a_damaged_head(run, tmp_path):
    spoiled(tmp_path)
    found = json.loads(run("doctor", "--json", "t")[1])
    assert (found["head"], found["seq"]) == (6, 4)
    assert [seq for seq, _ in found["skipped"]] == [6, 5]
    assert found["ok"] is False

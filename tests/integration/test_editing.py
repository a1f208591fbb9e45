"""What people change in an editor becomes a checkpoint of its own, on every store. ``accept`` of documents: test_file_store.py."""

import dataclasses
import json
import re
import shlex
import sys
from decimal import Decimal

import pytest

import safepoint
from safepoint import Conflict, InvalidState, LeaseHeld, NotFound, RefusedType, State
from safepoint.cli.ending import run as command


@safepoint.register
@dataclasses.dataclass
class Note:
    text: str


def made(cp, n=2):
    state = State("t", agent_state={"price": Decimal("1.50"), "note": Note("old"), "tags": {1, 2}}, metadata={"who": "me"})
    for i in range(n):
        state.messages.append({"role": "user", "content": f"message {i}"})
        state.step = i
        cp.save(state)
    return state


def test_an_edit_is_a_new_checkpoint_and_keeps_every_type(cp):
    made(cp)
    seen = []

    def change(data):
        seen.append(json.loads(json.dumps(data)))
        data["messages"][0]["content"] = "edited"
        return data

    header = cp.edit("t", change)
    assert (header.seq, header.kind, header.parent_seq, header.label, header.metadata) == (
        3,
        "edit",
        2,
        "edited from 2",
        {"who": "me"},
    )
    assert list(seen[0]) == ["messages", "agent_state", "metadata", "step"]
    state = cp.load_latest("t")
    assert state.messages[0]["content"] == "edited"
    assert state.agent_state == {"price": Decimal("1.50"), "note": Note("old"), "tags": {1, 2}}
    assert cp.verify().ok
    assert cp.edit("t", lambda data: data) is None, "nothing was changed"
    # From an earlier one, on top of the newest.
    header = cp.edit("t", lambda data: data | {"step": 9}, seq=1)
    assert (header.parent_seq, header.step) == (3, 9)
    assert cp.load_latest("t").messages == [{"role": "user", "content": "message 0"}]
    with pytest.raises(NotFound):
        cp.edit("none", lambda data: data)
    with pytest.raises(NotFound):
        cp.edit("t", lambda data: data, seq=99)


def test_an_edit_keeps_how_a_run_stands(cp):
    with cp.resume("t") as run:
        run.state.agent_state["n"] = 1
        run.save()
        run.finish("done")
        run.save()
    cp.edit("t", lambda data: data | {"agent_state": {"n": 2}})
    with cp.resume("t") as run:
        assert run.state.agent_state == {"n": 2}


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda d: None, InvalidState),
        (lambda d: {"messages": []}, InvalidState),
        (lambda d: d | {"messages": {}}, InvalidState),
        (lambda d: d | {"step": -1}, InvalidState),
        (lambda d: d | {"step": True}, InvalidState),
        (lambda d: d | {"metadata": {"x": "y" * 10_000}}, InvalidState),
        (lambda d: d | {"agent_state": {"$type": "no such", "value": 1}}, InvalidState),
        (lambda d: d | {"agent_state": {"$type": "dataclass", "class": "os:system", "value": {}}}, (RefusedType, InvalidState)),
    ],
)
def test_what_is_no_state_is_refused_and_nothing_is_written(cp, change, error):
    made(cp)
    with pytest.raises(error):
        cp.edit("t", change)
    assert cp.status("t").seq == 2


def test_a_branch_that_has_moved_meanwhile_is_a_conflict(cp):
    state = made(cp)

    def change(data):
        cp.save(state)
        return data | {"step": 7}

    with pytest.raises(Conflict):
        cp.edit("t", change)
    assert cp.status("t").seq == 3


def test_a_live_run_keeps_its_task_to_itself(cp):
    made(cp)
    with cp.resume("t"):
        asked = []

        def change(data):
            asked.append(1)
            return data

        with pytest.raises(LeaseHeld):
            cp.edit("t", change)
        assert asked == [], "nobody was asked to type in vain"


# -- the commands


@pytest.fixture
def sp(url, tmp_path, capsys, monkeypatch):
    with safepoint.open(url) as cp:
        if not cp.store.persistent:
            pytest.skip("persistent is False")

    def run(*args, editor="pass", stdin="", as_json=False):
        script = tmp_path / "editor.py"
        script.write_text(
            f"import sys\npath = sys.argv[1]\ntext = open(path, encoding='utf-8').read()\n{editor}\nopen(path, 'w', encoding='utf-8').write(text)\n"
        )
        monkeypatch.setenv("VISUAL", f"{sys.executable} {script}")
        monkeypatch.setenv("EDITOR", f"{sys.executable} {script}")
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        monkeypatch.setattr("tempfile.tempdir", None)
        if stdin:
            import io

            monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = command([*args, "--store", url, *(["--json"] if as_json else [])])
        out, err = capsys.readouterr()
        return (code, json.loads(out) if as_json else out, err)

    return run


def test_edit_opens_an_editor_and_saves_what_becomes_of_it(sp, url, tmp_path):
    with safepoint.open(url) as cp:
        made(cp)
    code, out, _ = sp("edit", "t", editor="text = text.replace('message 1', 'something else')")
    assert (code, out) == (0, "t@3 is what was edited; t goes on from there\n")
    with safepoint.open(url) as cp:
        state = cp.load_latest("t")
        assert state.messages[1]["content"] == "something else"
        assert state.agent_state["note"] == Note("old"), "the command needs no class, and loses none"
    assert list(tmp_path.glob("safepoint-*")) == []
    code, out, _ = sp("edit", "t")
    assert (code, out) == (0, "nothing was changed\n")
    code, data, _ = sp("edit", "t@1", editor="text = text.replace('message 0', 'again')", as_json=True)
    assert (code, data["changed"], data["checkpoint"]["seq"], data["checkpoint"]["kind"]) == (0, True, 4, "edit")
    code, data, _ = sp("edit", "t", as_json=True)
    assert (code, data) == (0, {"task_id": "t", "changed": False, "checkpoint": None})


def test_a_text_that_is_no_json_is_kept_and_can_be_gone_on_with(sp, url, tmp_path):
    with safepoint.open(url) as cp:
        made(cp)
    code, out, err = sp("edit", "t", editor="text = text.replace('\"message 1\"', '\"message 1')")
    assert code == 2
    assert "line 9, column" in err
    (kept,) = tmp_path.glob("safepoint-*.json")
    hint = shlex.split(re.findall("is kept: (.*)", err)[0])
    assert hint == ["safepoint", "--store", url, "edit", "--from", str(kept), "t"]
    assert kept.stat().st_mode & 0o777 == 0o600
    code, out, _ = sp(*hint[1:], editor="text = text.replace('\"message 1', '\"mended\"')")
    assert (code, out) == (0, "t@3 is what was edited; t goes on from there\n")
    with safepoint.open(url) as cp:
        assert cp.load_latest("t").messages[1]["content"] == "mended"
    for bad, why in (("NaN", "NaN is no JSON"), ('{"a": 1, "a": 2}', "twice")):
        code, _, err = sp("edit", "t", "--from", "-", stdin=bad)
        assert code == 2
        assert why in err
    with safepoint.open(url) as cp:
        assert cp.status("t").seq == 3


def test_accept(sp, url, tmp_path):
    with safepoint.open(url) as cp:
        made(cp)
    if not url.startswith("file"):
        code, _, err = sp("accept", "t@2")
        assert code == 2
        assert " edit`" in err
        return
    file = tmp_path / "agent" / "t" / "main" / "2.json"
    file.write_text(file.read_text(encoding="utf-8").replace("message 1", "by hand"), encoding="utf-8")
    code, _, err = sp("show", "t")
    assert code != 0
    assert " accept t@2`" in err
    code, out, _ = sp("accept", "t@2")
    assert (code, out) == (0, "t@3 is what was edited; t goes on from there\n")
    code, _, err = sp("accept", "t")
    assert code == 2
    with safepoint.open(url) as cp:
        assert cp.load_latest("t").messages[1]["content"] == "by hand"

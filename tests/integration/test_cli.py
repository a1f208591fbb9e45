"""The command line: every command in both outputs, hostile data, errors and their exit codes, and what it must not touch."""

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import unicodedata
from pathlib import Path
from unittest.mock import ANY

import apsw
import pytest

import safepoint
from safepoint.cli import main
from safepoint.cli.everything import cli
from safepoint.cli.reference import renewed
from safepoint.cli.text import age, clean, dumps, name, ranges, shell, size
from tests.support.cli_store import HOSTILE
from tests.support.paths import ROOT

SCRIPT = ROOT / "tests" / "support" / "cli_store.py"


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A store that another process has filled, with classes that this one does not have registered."""
    path = tmp_path_factory.mktemp("cli") / "agent.db"
    subprocess.run([sys.executable, str(SCRIPT), f"sqlite:///{path}"], check=True, stdout=subprocess.DEVNULL)
    assert not Path(f"{path}-wal").exists(), "the copies below take the one file"
    return path.read_bytes()


@pytest.fixture
def db(template, tmp_path):
    path = tmp_path / "agent.db"
    path.write_bytes(template)
    path.chmod(0o600)
    return path


@pytest.fixture
def run(db, capsys, monkeypatch):
    """Run a command on the store; returns exit code, stdout and stderr."""
    monkeypatch.setenv("SAFEPOINT_URL", f"sqlite:///{db}")

    def call(*args, stdin=""):
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = main([str(a) for a in args])
        out, err = capsys.readouterr()
        assert_harmless(out)
        assert_harmless(err)
        return code, out, err

    return call


def assert_harmless(text):
    bad = {c for c in text if c not in "\n\t" and unicodedata.category(c) in {"Cc", "Cf", "Cs", "Zl", "Zp"}}
    assert not bad, sorted(map(ascii, bad))


def strict(text):
    """Parse one JSON document, as a parser does that knows no NaN and no doubled keys."""

    def pairs(items):
        keys = [k for k, _ in items]
        assert len(keys) == len(set(keys)), keys
        return dict(items)

    def refuse(constant):
        raise AssertionError(constant)

    assert text.isascii()
    return json.loads(text, object_pairs_hook=pairs, parse_constant=refuse)


def rows(db, query, *values):
    """Raw rows, by a path that shares nothing with the command."""
    conn = apsw.Connection(str(db))
    try:
        return conn.execute(query, values).fetchall()
    finally:
        conn.close()


def memo(*notes):
    """A Memo of the other process, as plain data."""
    phase = {"$type": "enum", "class": "__main__:Phase", "value": "COLLECT"}
    due = {"$type": "datetime", "value": "2026-03-01T00:00:00+00:00"}
    return {"$type": "dataclass", "class": "__main__:Memo", "value": {"phase": phase, "due": due, "notes": list(notes)}}


UTC_TIME = re.compile(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")


# -- every command with --json. A command without an entry here fails the test below.


def json_ls(run, db):
    found = {t["task_id"]: t for t in run("ls")["tasks"]}
    assert {*HOSTILE, "mailing", "asking", "done", "failing", "kept", "losing", "ready"} == set(found)
    assert [found[t]["unfinished"] for t in ("mailing", "ready", "asking")] == [False, True, False]
    assert [(found[t]["status"], found[t]["pending"]) for t in ("mailing", "ready")] == [("waiting", 1), ("waiting", 0)]
    assert sorted(found) == [row[0] for row in rows(db, "SELECT task FROM sp_tasks ORDER BY task")]
    mailing = found["mailing"]
    assert (mailing["status"], mailing["step"], mailing["head"], mailing["pending"]) == ("waiting", 1, 2, 1)
    assert (mailing["checkpoints"], mailing["unfinished"], mailing["holder"], mailing["attempts"]) == (2, False, None, 1)
    assert found["asking"]["pending"] == 1
    assert (found["done"]["status"], found["done"]["agent"]) == ("finished", "finisher")
    assert found["failing"]["status"] == "failed"
    assert found["kept"]["status"] == "idle"
    assert all(UTC_TIME.fullmatch(t["updated_at"]) for t in found.values())
    assert [t["task_id"] for t in run("ls", "--status", "finished")["tasks"]] == ["done"]
    assert [t["task_id"] for t in run("ls", "--status", "unfinished")["tasks"]] == ["ready"]


def json_release(run, db):
    assert run("ls", "--leases") == {"leases": []}
    data = run("release", "kept")
    assert set(data) == {"task_id", "released", "lease", "next", "plan"}
    assert (data["task_id"], data["released"], data["lease"], data["plan"]["does"]) == ("kept", False, None, "carry on")
    subprocess.run([sys.executable, "-c", HOLD.replace("sys.stdin.read()", "os._exit(9)"), f"sqlite:///{db}"], check=False)
    (lease,) = run("ls", "--leases")["leases"]
    assert set(lease) == {"task_id", "standing", "fence", "pid", "host", "program", "since", "until", "here"}
    assert (lease["task_id"], lease["standing"], lease["fence"], lease["until"]) == ("held", "dead", 1, None)
    assert run("release", "held")["lease"] == lease


def json_log(run, db):
    data = run("log", "kept")
    assert [(c["seq"], c["step"], c["label"], c["kind"]) for c in data["checkpoints"]] == [
        (n, n, f"label {n}", "manual") for n in (5, 4, 3, 2, 1)
    ]
    assert (data["task_id"], data["branch"], data["head"], data["older"]) == ("kept", "main", 5, False)
    raw = rows(db, "SELECT c.id, c.digest, c.size FROM sp_checkpoints c JOIN sp_tasks t ON c.task = t.n WHERE t.task = 'kept'")
    assert {(c["id"], c["digest"], c["bytes"]) for c in data["checkpoints"]} == {(i, d.hex(), s) for i, d, s in raw}
    assert data["checkpoints"][0]["metadata"] == {
        "customer": "acme",
        "since": {"$type": "datetime", "value": "2026-01-02T00:00:00+00:00"},
    }
    assert data["checkpoints"][0]["metrics"] is None
    page = run("log", "kept", "--limit", "2")
    assert [c["seq"] for c in page["checkpoints"]] == [5, 4]
    assert page["older"]
    page = run("log", "kept", "-n", "2", "--before", "3")
    assert [c["seq"] for c in page["checkpoints"]] == [2, 1]
    assert not page["older"]
    assert len(run("log", "kept", "--branch", "main", "--limit", "0")["checkpoints"]) == 5
    metrics = run("log", "mailing")["checkpoints"][0]["metrics"]
    assert (metrics["phase"], metrics["calls"], metrics["tokens_in"], metrics["tokens_out"]) == ("send", 2, 11, 4)


def json_show(run, db):
    data = run("show", "mailing")
    assert data["checkpoint"]["seq"] == 2
    assert data["messages"][0] == {"role": "user", "content": "send it"}
    assert data["messages"][1]["content"] == "I will send it."
    assert data["agent_state"] == {"phase": "send", "memo": memo("\x1b[2J", "n" * 5000)}
    assert data["turns"] == [{"turn": "", "input": "send it", "status": "open", "result": None, "step": 0}]
    assert not data["finished"]
    old = run("show", "kept@3", "--messages", "1")
    assert old["messages"] == [{"role": "user", "content": "message 3"}]
    assert (old["first_message"], old["message_count"], old["checkpoint"]["step"]) == (2, 3, 3)
    assert run("show", "kept", "-m", "0")["messages"] == []
    done = run("show", "done")
    assert done["finished"]
    assert done["turns"][0]["result"] == {"ok": True}


def json_calls(run, db):
    data = run("calls", "mailing")
    assert [(c["no"], c["step"], c["tool"], c["effect"], c["status"], c["attempts"]) for c in data["calls"]] == [
        (1, 0, "__main__.ask", "read", "succeeded", 1),
        (2, 0, "files.list", "read", "succeeded", 1),
        (3, 1, "mail.send", "write", "in_doubt", 1),
    ]
    assert not data["older"]
    assert "arguments" not in data["calls"][0]
    assert data["calls"][2]["error"] == {"type": "builtins.TimeoutError", "message": "no reply from the server"}
    assert data["calls"][0]["model"]["model"] == "scripted-1"
    assert [c["no"] for c in run("calls", "mailing", "--status", "in_doubt")["calls"]] == [3]
    newest = run("calls", "mailing", "--limit", "1", "--full")
    assert newest["older"]
    assert [c["arguments"] for c in newest["calls"]] == [{"to": "ann@example.com", "subject": "hello"}]
    (one,) = run("calls", "mailing", "2")["calls"]
    assert one["result"] == memo("n")
    keys = {row[0] for row in rows(db, "SELECT idempotency_key FROM sp_calls WHERE tool != 'socket.open'")}
    assert {c["idempotency_key"] for c in data["calls"]} == keys


def json_plan(run, db):
    data = run("plan", "mailing")
    assert (data["does"], data["seq"], data["step"], data["pauses"]) == ("wait", 2, 1, [])
    assert [(c["no"], c["action"]) for c in data["calls"]] == [(3, "park")]
    asked = run("plan", "asking")
    assert (asked["does"], asked["pauses"]) == ("wait", [1])
    assert run("plan", "done")["does"] == "nothing"
    # The state holds classes that are not known here: that is no reason why the application could not resume it.
    assert run("plan", "failing")["does"] == "carry on"


def json_resolve(run, db):
    data = run("resolve", "mailing", "3", "--done", '{"id": "m-1"}', "--yes")
    assert (data["call"]["status"], data["call"]["result"]) == ("succeeded", {"id": "m-1"})
    assert data["plan"]["calls"][0]["action"] == "reuse"
    assert data["next"][0] == "When a resume comes to this call: its recorded result is returned; it is not executed."
    assert rows(db, "SELECT status FROM sp_calls WHERE tool = 'mail.send'") == [("succeeded",)]


def json_pauses(run, db):
    (pause,) = run("pauses", "asking")["pauses"]
    assert (pause["no"], pause["name"], pause["status"], pause["question"]) == (1, "approve", "open", memo())
    assert run("pauses", "kept")["pauses"] == []


def json_answer(run, db):
    data = run("answer", "asking", "approve", '{"ok": true}')
    assert data["pause"]["status"] == "answered"
    assert data["pause"]["answer"] == {"ok": True}
    assert data["plan"]["does"] == "carry on"
    assert run("pauses", "asking")["pauses"] == []
    assert run("pauses", "asking", "--all")["pauses"][0]["answer"] == {"ok": True}
    assert [t["task_id"] for t in run("ls", "--status", "unfinished")["tasks"]] == ["asking", "ready"]


def json_cleanup(run, db):
    expected = {"task_id": "kept", "deleted": [1, 2, 3], "kept": 2, "calls_deleted": 0}
    dry = run("cleanup", "kept", "--keep-latest", "2", "--dry-run")
    assert dry.items() >= {**expected, "dry_run": True}.items()
    assert len(run("log", "kept")["checkpoints"]) == 5
    assert run("cleanup", "kept", "--keep-latest", "2").items() >= {**expected, "dry_run": False}.items()
    assert [c["seq"] for c in run("log", "kept")["checkpoints"]] == [5, 4]
    assert run("cleanup", "kept", "--max-age", "7d")["deleted"] == []


def json_check(run, db):
    data = run("check")
    assert data["ok"]
    assert {"write", "permissions"} <= {f["name"] for f in data["findings"]}


def json_pin(run, db):
    assert run("pin", "kept@1") == {"task_id": "kept", "seq": 1, "pinned": True}
    assert run("cleanup", "kept", "--keep-latest", "1")["deleted"] == [2, 3, 4]


def json_unpin(run, db):
    run("pin", "kept@1")
    assert run("unpin", "kept@1") == {"task_id": "kept", "seq": 1, "pinned": False}
    assert run("log", "kept")["checkpoints"][-1]["pinned"] is False


def json_rm(run, db):
    assert run("rm", "kept", "--yes") == {"task_id": "kept", "deleted": True}
    assert rows(db, "SELECT 1 FROM sp_tasks WHERE task = 'kept'") == []


def json_rewind(run, db):
    data = run("rewind", "kept@2", "--yes")
    assert (data["checkpoint"]["parent_seq"], data["checkpoint"]["branch"], data["plan"]["seq"]) == (2, "main~1", 6)
    assert rows(db, "SELECT branch FROM sp_tasks WHERE task = 'kept'") == [("main~1",)]


def json_fork(run, db):
    data = run("fork", "kept@2", "try")
    assert (data["checkpoint"]["seq"], data["checkpoint"]["branch"], data["checkpoint"]["label"]) == (6, "try", "from 2")
    assert rows(db, "SELECT branch FROM sp_tasks WHERE task = 'kept'") == [("main",)]


def json_branches(run, db):
    run("fork", "kept@2", "try")
    main, tried = run("branches", "kept")["branches"]
    assert (main["branch"], main["head"], main["current"], main["kept"]) == ("main", 5, True, 5)
    assert (tried["branch"], tried["head"], tried["current"], tried["forked_from"]) == ("try", 6, False, 2)


def json_diff(run, db):
    data = run("diff", "kept@1", "3")
    assert (data["a"], data["b"], data["summary"]) == ("kept@1", "kept@3", "+2 messages, step: 1 -> 3")
    assert [e["path"] for e in data["entries"]] == ["/messages/1", "/messages/2", "/step"]
    assert {"op": "replace", "path": "/step", "value": 3} in data["patch"]
    assert run("diff", "kept@1", "3", "--patch") == data["patch"]


def json_copy(run, db):
    to = f"sqlite:///{db.parent}/copy.db"
    data = run("copy", "--to", to)
    assert data["changed"]
    assert {t["result"] for t in data["tasks"]} == {"copied"}
    assert run("copy", "kept", "--to", to) == {
        "changed": False,
        "tasks": [
            {
                "task_id": "kept",
                "result": "unchanged",
                "checkpoints": 5,
                "calls": 0,
                "pauses": 0,
                "writes": 0,
                "bytes": ANY,
                "skipped": [],
            }
        ],
    }


def json_export(run, db):
    file = db.parent / "kept.safepoint"
    assert run("export", "kept@2", file) == {
        "task_id": "kept", "seq": 2, "checkpoints": 1, "calls": 0, "pauses": 0, "writes": 0,
        "bytes": file.stat().st_size, "file": str(file),
    }  # fmt: skip


def json_import(run, db):
    run("export", "kept@2", db.parent / "kept.safepoint")
    data = run("import", db.parent / "kept.safepoint", "--as", "mailing")
    assert data == {
        "task_id": "mailing", "what": "checkpoint", "result": "imported", "branch": "import-2", "seq": 3, "checkpoints": 1, "calls": 0,
        "pauses": 0,
        "writes": 0,
    }  # fmt: skip


def json_accept(run, db):
    folder = f"{db}-files"
    with safepoint.open(f"file:///{folder}") as cp:
        cp.save(safepoint.State("t", agent_state={"phase": "plan"}))
    with open(f"{folder}/t/main/1.json", "r+", encoding="utf-8") as f:
        text = f.read().replace("plan", "next")
        f.seek(0)
        f.write(text)
    data = run("accept", "t@1", "--store", f"file:///{folder}")
    assert (data["task_id"], data["changed"], data["checkpoint"]["seq"], data["checkpoint"]["kind"]) == ("t", True, 2, "edit")


def json_edit(run, db):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VISUAL", 'sed -i \'s/"step": 5/"step": 6/\'')
        data = run("edit", "kept")
        assert (data["changed"], data["checkpoint"]["step"], data["checkpoint"]["parent_seq"]) == (True, 6, 5)
        patch.setenv("VISUAL", "true")
        assert run("edit", "kept") == {"task_id": "kept", "changed": False, "checkpoint": None}


def json_verify(run, db):
    data = run("verify")
    assert (data["ok"], data["damages"], data["tasks"]) == (True, [], rows(db, "SELECT count(*) FROM sp_tasks")[0][0])
    (branch,) = run("verify", "kept")["branches"]
    assert branch == {
        "task_id": "kept", "space": "", "name": "main", "current": True, "head": 5, "head_loads": True, "loads": [[1, 5]],
        "newest_good": 5,
    }  # fmt: skip


def json_repair(run, db):
    data = run("repair")
    assert (data["url"], data["damages"], data["fell_back"]) == (f"sqlite:///{db}.repaired", [], [])
    assert run("--store", data["url"], "verify")["ok"]
    assert run("repair", "--in-place", "--yes")["backup"] is None


def json_doctor(run, db):
    data = run("doctor", "mailing")
    assert (data["ok"], data["head"], data["seq"], data["step"]) == (True, 2, 2, 1)
    assert data["calls"] == [{"no": 3, "tool": "mail.send", "status": "in_doubt"}]
    assert any("safepoint resolve mailing 3" in text for text in data["advice"])


@pytest.mark.parametrize("command", sorted(cli.commands))
def test_every_command_gives_json(command, run, db):
    def with_json(*args):
        code, out, err = run(*args, "--json")
        assert code == 0, out
        assert err == ""
        return strict(out)

    globals()[f"json_{command}"](with_json, db)


def test_options_stand_before_the_command_or_after_it(run, db, monkeypatch):
    monkeypatch.delenv("SAFEPOINT_URL")
    url = f"sqlite:///{db}"
    assert run("--json", "--store", url, "plan", "done")[1] == run("plan", "done", "--json", "--store", url)[1]


# -- for people


def test_ls(run):
    code, out, _ = run("ls")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].split() == ["task", "status", "step", "head", "kept", "pending", "updated", "holder", "reason"]
    mailing = next(line for line in lines if line.startswith("mailing"))
    assert mailing.split()[:6] == ["mailing", "waiting", "1", "2", "2", "1"]
    assert next(line for line in lines if line.startswith("ready")).split()[:5] == ["ready", "waiting", "(ready)", "0", "1"]
    assert next(line for line in lines if line.startswith("failing")).endswith("ZeroDivisionError")
    assert len(lines) == 1 + len(HOSTILE) + 7
    assert "x" * 512 in out, "a pipe gets whole columns"


def test_ls_shows_reasons_only_where_there_are_some(run, tmp_path):
    url = f"sqlite:///{tmp_path}/plain.db"
    with safepoint.open(url) as cp:
        cp.save(safepoint.State("t"))
    _, out, _ = run("ls", "--store", url)
    assert out.splitlines()[0].split()[-1] == "holder"


HOLD = """
import os, safepoint, sys
with safepoint.open(sys.argv[1]) as cp, cp.resume("held") as run:
    run.save()
    print("held", flush=True)
    sys.stdin.read()
"""


def test_ls_shows_who_holds_a_task(run, db):
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            HOLD,
            f"sqlite:///{db}",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == b"held\n"
        code, out, _ = run("ls", "--status", "running")
        assert code == 0
        assert f"pid {holder.pid} on " in out
        code, out, err = run("rm", "held", "--yes", "--json")
        assert code == 5
        assert strict(out)["error"]["type"] == "LeaseHeld"
        assert strict(out)["error"]["details"]["holder"]["pid"] == holder.pid
        assert "pid" in err
        assert run("plan", "held")[1].startswith("held is running; a resume would be refused")
    finally:
        holder.stdin.close()
        holder.wait(30)
        holder.stdout.close()


def test_log(run):
    code, out, err = run("log", "kept", "--limit", "2")
    assert code == 0
    assert re.match(r" *5 +5 +manual +label 5 +main +20\d\d-\d\d-\d\d \d\d:\d\d:\d\d +\d+ B$", out.splitlines()[1])
    assert err == "older ones: safepoint log --before 4 kept\n"


def test_times_are_local_for_people(run, monkeypatch):
    import time

    utc = strict(run("log", "done", "--json")[1])["checkpoints"][0]["created_at"]
    monkeypatch.setenv("TZ", "XXX-05:30")
    time.tzset()
    try:
        local = run("log", "done")[1]
    finally:
        monkeypatch.delenv("TZ")
        time.tzset()
    from datetime import datetime, timedelta

    shown = datetime.fromisoformat(utc) + timedelta(hours=5, minutes=30)
    assert shown.strftime("%Y-%m-%d %H:%M:%S") in local


def test_show(run):
    code, out, _ = run("show", "mailing")
    assert code == 0
    assert out.startswith("checkpoint  mailing@2\n")
    assert "[0] user\n  send it\n" in out
    assert '"class": "__main__:Memo"' in out
    assert "n" * 5000 in out, "a pipe gets whole texts"
    assert "(1 before them)" in run("show", "mailing", "--messages", "1")[1]


def test_calls_and_one_call(run):
    _, out, err = run("calls", "mailing")
    assert "no reply from the server" in out
    assert "safepoint calls mailing 3" in err
    _, out, err = run("calls", "mailing", "3")
    assert '"to": "ann@example.com"' in out
    assert "safepoint resolve --not-done mailing 3" in err


def test_a_result_that_is_missing_is_shown_and_can_be_given(run):
    _, out, err = run("calls", "losing")
    assert "succeeded (result missing)" in out
    assert "safepoint calls losing 1" in err
    _, out, err = run("calls", "losing", "1")
    assert "succeeded (result missing)" in out
    assert "\nresult\n" not in out
    assert "safepoint resolve --done 'RESULT AS JSON' losing 1" in err
    assert [run("calls", "losing", "--json")[1].count(f'"result_missing": {word}') for word in ("true", "false")] == [1, 0]
    code, _, err = run("resolve", "losing", "1", "--not-done", "--yes")
    assert code == 2
    assert "--done JSON" in err
    assert run("resolve", "losing", "1", "--done", "1", stdin="n\n")[0] == 1
    code, out, err = run("resolve", "losing", "1", "--done", '{"ok": 1}', stdin="y\n")
    assert (code, out.splitlines()[:2]) == (
        0,
        [
            "call 1 of losing is settled: it has its result",
            "When a resume comes to this call: its recorded result is returned; it is not executed.",
        ],
    )
    assert "its result is missing" in err
    assert "(result missing)" not in run("calls", "losing")[1]


def test_hints_name_the_store_that_was_named(run, db, monkeypatch):
    monkeypatch.delenv("SAFEPOINT_URL")
    url = f"sqlite:///{db}"
    named = f"safepoint --store {url} "
    for args in (
        ("calls", "mailing"), ("calls", "mailing", "3"), ("calls", "losing", "1"), ("pauses", "asking"), ("plan", "asking"),
        ("log", "kept", "-n", "1"), ("calls", "mailing", "-n", "1"), ("show", "kept@77"), ("log", "nope"),
        ("resolve", "mailing", "1", "--not-done"),
    ):  # fmt: skip
        for call in ((*args, "--store", url), ("--store", url, *args)):
            _, out, err = run(*call)
            assert named in out + err, args
            assert "safepoint " not in (out + err).replace(named, ""), args


PYTHON = re.compile(r"\w\(|\bcp\.|\b[a-z_]+=(?!true)")


@pytest.mark.parametrize(
    "args",
    [
        ("show", "nope"), ("answer", "asking", "7", "1"), ("answer", "asking", "name", "1"), ("resolve", "losing", "1", "--not-done"),
        ("resolve", "mailing", "1", "--not-done"), ("resolve", "mailing", "99", "--not-done"), ("pin", "kept@99"),
        ("rm", "held", "--yes"), ("cleanup", "kept"),
    ],
)  # fmt: skip
def test_remedies_are_for_somebody_at_a_shell(run, db, args):
    with safepoint.open(f"sqlite:///{db}") as cp, cp.resume("held"):
        code, _, err = run(*args)
    assert code in {2, 3, 5}
    remedy = err.partition("remedy: ")[2]
    assert remedy
    assert not PYTHON.search(remedy), remedy


def test_plan(run):
    _, out, _ = run("plan", "mailing")
    assert out.startswith("mailing is waiting; a resume would wait for a person from mailing@2, with step 1\n")
    assert "park: a person has to say whether it happened" in out


@pytest.mark.parametrize("stdin", ["n\n", "", "perhaps\n"])
def test_resolve_needs_a_yes(run, db, stdin):
    code, out, err = run("resolve", "mailing", "3", "--not-done", stdin=stdin)
    assert (code, out) == (1, "")
    assert "ann@example.com" in err
    assert "NOT happen" in err
    assert rows(db, "SELECT status FROM sp_calls WHERE tool = 'mail.send'") == [("in_doubt",)]


def test_resolve_says_what_follows(run):
    code, out, _ = run("resolve", "mailing", "3", "--not-done", stdin="y\n")
    assert code == 0
    assert out == (
        "call 3 of mailing is settled: it did not happen\n"
        "When a resume comes to this call: it is executed again.\n"
        "The task can be resumed: start its agent again.\n"
    )
    code, _, err = run("resolve", "mailing", "3", "--not-done", "--yes")
    assert code == 2
    assert "not in doubt" in err


def test_what_resolve_said_is_what_happens(run, db):
    """The settled result reaches the agent, and the tool is not executed again."""
    run("resolve", "mailing", "3", "--done", '"by hand"', "--yes")
    script = (
        "import sys; sys.path.insert(0, sys.argv[2]); import cli_store as m, safepoint\n"
        "m.Memo.__module__ = m.Phase.__module__ = '__main__'\n"
        "safepoint.register(m.Memo, name='__main__:Memo'); safepoint.register(m.Phase, name='__main__:Phase')\n"
        "def step(run): run.finish(run.call(m.send, 'ann@example.com', subject='hello'))\n"
        "print(safepoint.run_agent(step, task_id='mailing', store=sys.argv[1]).result)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, f"sqlite:///{db}", str(SCRIPT.parent)], capture_output=True, text=True, check=False
    )
    assert done.stdout == "by hand\n", done.stderr


def test_pauses_and_answer(run):
    code, out, err = run("pauses", "asking")
    assert code == 0
    assert "approve" in out
    assert "safepoint answer asking 1 JSON" in err
    code, out, _ = run("answer", "asking", "1", "true")
    assert (code, out) == (
        0,
        "pause 1 (approve) of asking is answered\nThe task can be resumed: start its agent again.\n",
    )
    code, _, err = run("answer", "asking", "1", "false")
    assert code == 2
    assert "answered before" in err
    assert run("pauses", "asking")[1] == "no questions\n"


@pytest.mark.parametrize("text", ["yes", "NaN", "[1,", "[" * 100_000])
def test_an_answer_is_json(run, text):
    code, _, err = run("answer", "asking", "1", text)
    assert code == 2
    assert "is not JSON" in err


def test_cleanup_check_pin_rm(run):
    _, out, _ = run("cleanup", "kept", "--keep-latest", "2", "--dry-run")
    assert re.search(r"^checkpoints would be deleted +3 +1-3$", out, re.MULTILINE)
    code, out, _ = run("check")
    assert code == 0
    assert re.search(r"^ok +write +a write was made durable and read back$", out, re.MULTILINE)
    assert run("pin", "kept@2")[1] == "kept@2 is pinned\n"
    assert " pinned" in run("log", "kept")[1].splitlines()[4]
    assert run("unpin", "kept@2")[1] == "kept@2 is no longer pinned\n"
    assert run("rm", "kept", stdin="n\n")[0] == 1
    assert run("rm", "kept", stdin="y\n")[:2] == (0, "kept is deleted\n")
    assert run("rm", "kept", "-y")[0] == 3


def test_check_fails_on_errors_only(run, db, monkeypatch):
    db.chmod(0o644)
    code, out, _ = run("check", "--json")
    assert code == 0
    assert "warning" in {f["level"] for f in strict(out)["findings"]}
    other = os.open(db, os.O_RDONLY)  # what no program may do that has the store open
    try:
        code, out, _ = run("check", "--json")
        assert code == 1
        assert strict(out)["ok"] is False
        assert run("check")[0] == 1
    finally:
        os.close(other)


# -- hostile data


@pytest.mark.parametrize("task", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_ids(run, task):
    """``run`` looks at all output for control characters."""
    listed = {t["task_id"] for t in strict(run("ls", "--json")[1])["tasks"]}
    assert task in listed
    data = strict(run("show", "--json", "--", task)[1])
    assert data["messages"] == [{"role": "user", "content": task}]
    # A key that looks like one of the markers is written so that it cannot be taken for one.
    assert data["agent_state"] == ({"$dict": [[task, task]]} if task.startswith("$") else {task: task})
    assert data["checkpoint"]["label"] == task
    for command in ("log", "show", "plan", "calls", "pauses"):
        code, _, err = run(command, "--", task)
        assert (code, err) == (0, "")
    code, _, err = run("show", "--", f"{task}@99")
    assert code == 3
    assert err.count("\n") == 2, "one line each for what and remedy"
    assert run("pin", "--", f"{task}@1")[0] == 0
    assert strict(run("rm", "--yes", "--json", "--", task)[1])["task_id"] == task


@pytest.mark.skipif(not Path("/bin/bash").exists(), reason="the quoting is bash's")
@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_a_quoted_name_pastes_into_bash(text):
    done = subprocess.run(
        ["/bin/bash", "-c", f"printf %s {shell(text)}"], capture_output=True, check=True, env={"LC_ALL": "C.UTF-8"}
    )
    assert done.stdout.decode() == text


def test_names_are_one_to_one():
    assert name("two\nlines") == r"$'two\nlines'"
    assert name(r"two\nlines") == r"two\nlines"
    texts = [*HOSTILE, r"$'two\nlines'", r"two\nlines", "two\\\nlines", "two\\\\nlines"]
    assert len({name(t) for t in texts}) == len(texts)


def test_control_characters_are_shown_and_joiners_kept():
    assert clean("a\x1b[0m\x9b\u202e\n") == r"a\x1b[0m\u009b\u202e\n"
    assert clean("a\nb\tc\r", lines=True) == "a\nb\tc\\r"
    assert clean("👩\u200d🚀 naïve 日本") == "👩\u200d🚀 naïve 日本"
    assert clean("\ud800") == r"\ud800"
    assert "\x7f" not in dumps("\x7f")


# -- naming checkpoints


def test_an_at_sign_in_an_id(run, db):
    with safepoint.open(f"sqlite:///{db}") as cp:
        for id, marker in (("a", "of a"), ("a@1", "of a@1"), ("a@1@1", "of a@1@1")):
            cp.save(safepoint.State(task_id=id, metadata={"marker": marker}))
    for given, task in (("a", "a"), ("a@1", "a@1"), ("a@1@1", "a@1@1"), ("a@1@1@1", "a@1@1")):
        data = strict(run("show", given, "--json")[1])
        assert data["metadata"] == {"marker": f"of {task}"}
        assert data["checkpoint"]["task_id"] == task
    code, _, err = run("pin", "a@1")
    assert code == 2
    assert "names a task and no checkpoint" in err


@pytest.mark.parametrize(
    "given", ["kept@0", "kept@99999999999999999999", "kept@" + "9" * 5000, "kept@-1", "kept@٣", "@1", "kept@"]
)
def test_numbers_that_no_checkpoint_has(run, given):
    assert run("show", given)[0] in {2, 3}


# -- errors


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (("log", "nope"), 3),
        (("show", "nope"), 3),
        (("show", "kept@9"), 3),
        (("log", "kept", "--branch", "side"), 3),
        (("calls", "nope"), 3),
        (("calls", "mailing", "9"), 3),
        (("plan", "nope"), 3),
        (("resolve", "nope", "1", "--not-done"), 3),
        (("resolve", "mailing", "9", "--not-done"), 3),
        (("resolve", "mailing", "3"), 2),
        (("resolve", "mailing", "3", "--done", "1", "--not-done"), 2),
        (("resolve", "mailing", "1", "--not-done", "--yes"), 2),
        (("pauses", "nope"), 3),
        (("answer", "asking", "7", "true"), 3),
        (("answer", "nope", "1", "true"), 3),
        (("cleanup", "kept"), 2),
        (("cleanup", "kept", "--max-age", "7"), 2),
        (("cleanup", "nope", "--keep-latest", "1"), 3),
        (("pin", "kept@9"), 3),
        (("unpin", "nope@1"), 3),
        (("rm", "nope"), 3),
        (("log", "  "), 2),
        (("log", "bad \udcff byte"), 2),
        (("ls", "--status", "odd"), 2),
        (("ls", "--no-such-option"), 2),
        (("no-such-command",), 2),
        (("log",), 2),
    ],
)
def test_errors(run, args, code):
    got, out, err = run(*args)
    assert (got, out) == (code, "")
    assert err.startswith("error: ")
    assert "Traceback" not in err
    got, out, err_again = run(*args, "--json")
    error = strict(out)["error"]
    assert (got, error["exit_code"]) == (code, code)
    assert set(error) == {"type", "what", "why", "remedy", "details", "exit_code"}
    assert err_again == err


def test_every_error_has_a_code_and_the_page_lists_it():
    from safepoint import errors
    from safepoint.cli.ending import EXIT_CODES, code_of

    listed = {code for code, _ in EXIT_CODES}
    for leaf in vars(errors).values():
        if isinstance(leaf, type) and issubclass(leaf, safepoint.SafepointError):
            assert code_of(leaf("x")) in listed


def test_no_store_named(run, monkeypatch):
    monkeypatch.delenv("SAFEPOINT_URL")
    code, _, err = run("ls")
    assert code == 2
    assert "--store" in err
    assert "SAFEPOINT_URL" in err


def test_a_store_that_is_not_there_is_not_made(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for url in (
        "sqlite:///gone.db",
        f"sqlite:///{tmp_path}/gone.db",
        "sqlite:///no/such/folder.db",
        "sqlite:///go%6ee.db?timeout=1",
    ):
        for command in (("ls",), ("check",), ("show", "x"), ("rm", "x", "--yes")):
            code, out, err = run(*command, "--store", url)
            assert (code, out) == (3, "")
            assert "does not exist" in err
    assert [p.name for p in tmp_path.iterdir()] == ["agent.db"]


def test_another_programs_file_is_left_alone(run, tmp_path):
    foreign = tmp_path / "other.db"
    conn = apsw.Connection(str(foreign))
    conn.execute("CREATE TABLE theirs (x)")
    conn.close()
    (tmp_path / "empty.db").touch()
    (tmp_path / "text.db").write_text("no database at all, but long enough to look at\n" * 20)
    before = {p.name: p.read_bytes() for p in tmp_path.glob("*.db")}
    assert run("ls", "--store", f"sqlite:///{foreign}")[0] == 3
    assert run("ls", "--store", f"sqlite:///{tmp_path}/empty.db")[0] == 3
    assert run("ls", "--store", f"sqlite:///{tmp_path}/text.db")[0] == 6
    assert run("ls", "--store", f"sqlite:///{tmp_path}")[0] == 2
    assert {p.name: p.read_bytes() for p in tmp_path.glob("*.db")} == before


@pytest.mark.parametrize("url", ["sqlite:agent.db", "sqlite:/agent.db", "SQLITE:/agent.db"])
def test_too_few_slashes_are_named(run, url):
    code, _, err = run("ls", "--store", url)
    assert code == 2
    assert "sqlite:///agent.db" in err
    assert "three slashes" in err


def test_a_tilde_is_not_expanded_and_the_error_says_so(run):
    code, _, err = run("ls", "--store", "sqlite:///~/agent.db")
    assert code == 3
    assert "~ is not expanded" in err


def test_what_was_not_foreseen_is_no_traceback(run, monkeypatch):
    def broken(self, **options):
        raise KeyError("CANARY")

    monkeypatch.setattr(safepoint.Checkpointer, "tasks", broken)
    code, out, err = run("ls")
    assert (code, out) == (2, "")
    assert "did not foresee: KeyError" in err
    assert "Traceback" not in err
    assert "CANARY" not in err
    assert strict(run("ls", "--json")[1])["error"]["exit_code"] == 2
    monkeypatch.setenv("SAFEPOINT_TRACEBACK", "1")
    with pytest.raises(KeyError):
        run("ls")


@pytest.mark.parametrize("output", ["/dev/full", None])
def test_an_output_that_takes_nothing_is_no_traceback(db, output):
    where = f"> {output}" if output else ">&-"
    done = subprocess.run(
        f"{sys.executable} -m safepoint ls --store sqlite:///{db} {where}",
        shell=True, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize(
    "url", ["memory://", "memory://x", "agent.db", "nope://x", "sqlite:///", "sqlite://host/x", "sqlite:///x%00.db"]
)
def test_urls_that_name_no_store_here(run, url):
    code, _, err = run("ls", "--store", url)
    assert code in {2, 3, 4}, err
    assert "Traceback" not in err


def test_a_password_is_not_shown(run):
    _, out, err = run("ls", "--json", "--store", "nope://me:hunter2@host/x")
    assert "hunter2" not in out + err


def test_damage_is_named_and_the_rest_is_shown(run, db):
    conn = apsw.Connection(str(db))
    conn.execute("UPDATE sp_calls SET tool = 'mail.forged' WHERE tool = 'mail.send'")
    conn.execute("UPDATE sp_checkpoints SET root = CAST(replace(CAST(root AS TEXT), 'ok', 'ko') AS BLOB)")
    conn.close()
    code, out, err = run("calls", "mailing")
    assert code == 6
    assert "files.list" in out
    assert "mail.forged" not in out
    assert "call 3 is damaged" in err
    code, out, _ = run("calls", "mailing", "--json")
    assert code == 6
    assert [c["status"] for c in strict(out)["calls"]] == ["succeeded", "succeeded", "damaged"]
    code, _, err = run("show", "done")
    assert code == 6
    assert "done" in err


# -- classes of the application


def test_no_code_of_the_application_is_imported(db, tmp_path):
    """The names of stored classes lead to a module that would be noticed."""
    (tmp_path / "trap.py").write_text("raise SystemExit('imported')\n")
    fill = (
        "import sys, types, dataclasses, safepoint\n"
        "@safepoint.register(name='trap:Trap')\n"
        "@dataclasses.dataclass\n"
        "class Trap:\n    x: int\n"
        "with safepoint.open(sys.argv[1]) as cp:\n"
        "    cp.save(safepoint.State(task_id='trap', messages=[Trap(1)], agent_state=Trap(2), metadata={'t': Trap(3)}))\n"
    )
    url = f"sqlite:///{db}"
    subprocess.run([sys.executable, "-c", fill, url], check=True)
    for command in ("show", "log", "plan"):
        done = subprocess.run(
            [sys.executable, "-m", "safepoint", command, "trap", "--json", "--store", url],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        data = strict(done.stdout)
        if command == "show":
            assert data["agent_state"] == {"$type": "dataclass", "class": "trap:Trap", "value": {"x": 2}}
        if command == "plan":
            assert data["does"] == "carry on"


# -- pipes, terminals, start


def command_line(*args, **options):
    return subprocess.run([sys.executable, "-m", "safepoint", *args], capture_output=True, text=True, check=False, **options)


def test_a_pipe_that_is_closed_early_is_no_error(db):
    # Unbuffered: the first write meets the closed pipe, and not only the end of the process.
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "safepoint", "ls", "--store", f"sqlite:///{db}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert (process.wait(60), err) == (128 + signal.SIGPIPE, b"")


def test_an_output_that_has_not_all_of_unicode(db):
    done = command_line("ls", "--store", f"sqlite:///{db}", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    assert r"\u65e5" in done.stdout


def on_terminal(*args, columns=80, **env):
    """Run on a pseudo terminal and return what it would have shown."""
    ours, theirs = pty.openpty()
    environment = {k: v for k, v in os.environ.items() if k not in {"NO_COLOR", "FORCE_COLOR", "CI"}}
    process = subprocess.Popen(
        [sys.executable, "-m", "safepoint", *args],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**environment, "COLUMNS": str(columns), "TERM": "xterm-256color", **env},
    )
    os.close(theirs)
    found = b""
    try:
        while select.select([ours], [], [], 60)[0]:
            data = os.read(ours, 65536)
            if not data:
                break
            found += data
    except OSError:  # how Linux says that the other side is closed
        pass
    finally:
        os.close(ours)
    assert process.wait(60) == 0, found
    return found.decode().replace("\r\n", "\n")


def test_a_terminal_shows_how_far_a_copy_is(db, tmp_path):
    url = f"sqlite:///{db}"
    seen = on_terminal("copy", "--store", url, "--to", f"sqlite:///{tmp_path}/copy.db")
    assert re.search(r"\r\x1b\[K0/\d+ tasks, 0 B", seen)
    assert "kept: copied (5 checkpoints" in seen
    shown = on_terminal("export", "--store", url, "kept", f"{tmp_path}/kept.safepoint")
    assert "1/5 checkpoints" in shown
    with pytest.raises(AssertionError, match="standard output is a terminal"):
        on_terminal("export", "--store", url, "kept")


def test_a_terminal_gets_colours_and_short_values(db):
    url = f"sqlite:///{db}"
    shown = on_terminal("ls", "--store", url)
    assert re.search("\x1b\\[[0-9;]*mwaiting", shown)
    plain = on_terminal("ls", "--store", url, NO_COLOR="1", TERM="dumb")
    assert "\x1b" not in plain
    assert not re.search("\x1b\\[[0-9;]*3[0-7]m", on_terminal("ls", "--store", url, NO_COLOR="1"))
    folded = re.findall("^x+(?= |$)", plain, re.MULTILINE)
    assert len(folded) > 1
    assert sum(map(len, folded)) == 512, "an id is folded, never cut"
    assert "[bold]no markup[/bold] :smile:" in on_terminal("ls", "--store", url, columns=120)
    # Colour codes are the only control sequences: those in ids are shown as text.
    assert_harmless(re.sub("\x1b\\[[0-9;]*m", "", shown))
    assert all(len(line) <= 80 for line in plain.splitlines() if line.isascii())
    state = on_terminal("show", "mailing", "--store", url)
    assert "more characters; --full shows them" in state
    assert "n" * 5000 not in state
    assert "n" * 5000 in on_terminal("show", "mailing", "--full", "--store", url)


LOADED = "import json, sys\n{}\nprint(json.dumps(sorted(sys.modules)), file=sys.stderr)"


@pytest.mark.parametrize(
    ("program", "unwanted"),
    [
        ("import safepoint", {"click", "rich", "apsw"}),
        ("import safepoint.cli", {"click", "rich", "apsw"}),
        ("from safepoint.cli import main; main(['--help'])", {"rich", "apsw", "safepoint.stores.sqlite"}),
        ("from safepoint.cli import main; main(['show', '--help'])", {"rich", "apsw", "safepoint.stores.sqlite"}),
    ],
)
def test_what_a_start_loads(program, unwanted):
    done = subprocess.run([sys.executable, "-I", "-c", LOADED.format(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not unwanted & set(json.loads(done.stderr))


def test_no_arguments_show_the_help_and_the_version_is_ours():
    assert command_line().stdout == command_line("--help").stdout != ""
    assert command_line("--version").stdout == f"safepoint, version {safepoint.__version__}\n"


def test_the_page_is_up_to_date():
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert renewed(page) == page, "run python -m safepoint.cli.reference docs/cli.md"
    for command in cli.commands:
        assert f"`{command}`" in page.partition("## Exit codes")[0], f"{command} is missing in the table of documents"


# -- small parts


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("15m", 900), ("12h", 43200), ("7d", 604800), ("1.5h", 5400), ("2w", 1209600)]
)
def test_age(text, seconds):
    assert age(text).total_seconds() == seconds


@pytest.mark.parametrize("text", ["", "7", "d", "-7d", "7 days", "7D", "1e9d", "9" * 400 + "w", "٧d", "nan d"])
def test_no_age(text):
    with pytest.raises(safepoint.UsageError):
        age(text)


def test_ranges_and_sizes():
    assert ranges((1, 2, 3, 5, 7, 8)) == "1-3, 5, 7-8"
    assert ranges(()) == ""
    assert [size(n) for n in (0, 999, 1000, 999_949, 999_950, 10**12)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "999.9 kB",
        "1.0 MB",
        "1.0 TB",
    ]

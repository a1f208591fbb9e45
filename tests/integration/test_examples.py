"""Every example runs as it is, and carries on when it is stopped and started again."""

import os
import signal
import subprocess
import sys
import time

from tests.support.paths import ROOT

EXAMPLES = ROOT / "examples"


def start(script, *args, cwd):
    command = [sys.executable, "-W", "error", str(EXAMPLES / script), *map(str, args)]
    return subprocess.Popen(command, cwd=cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(script, *args, cwd, typed=""):
    with start(script, *args, cwd=cwd) as process:
        out, err = process.communicate(typed, timeout=60)
    assert process.returncode == 0, err
    assert not err
    return out


def test_all_examples_are_tested_here():
    assert sorted(p.name for p in EXAMPLES.glob("*.py")) == ["chat_loop.py", "quickstart.py", "state_machine.py"]


def test_quickstart(tmp_path):
    first = run("quickstart.py", cwd=tmp_path)
    assert first == "finished after 2 steps: Ann has been asked.\n"
    assert run("quickstart.py", cwd=tmp_path) == first
    (note,) = (tmp_path / "outbox").iterdir()
    assert note.read_text() == "To: ann\n\nLunch at one?\n"


def test_quickstart_killed_at_many_moments(tmp_path):
    """It takes a few hundred milliseconds, so that these kills fall before, into and behind its work."""
    finished = False
    for turn in range(25):
        with start("quickstart.py", cwd=tmp_path) as process:
            try:
                process.communicate(timeout=0.1 + turn * 0.03)
                finished = process.returncode == 0
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
        if finished:
            break
    assert run("quickstart.py", cwd=tmp_path) == "finished after 2 steps: Ann has been asked.\n"
    assert len(list((tmp_path / "outbox").glob("*.txt"))) == 1


def test_chat_loop(tmp_path):
    out = run("chat_loop.py", cwd=tmp_path, typed="I am Bo.\nThe kettle is broken.\n")
    assert "Bo, you have told me 2 things" in out
    assert "Saved as chat-1@2." in out
    out = run("chat_loop.py", cwd=tmp_path, typed="Still here?\n")
    assert out.startswith("Welcome back; we stopped at checkpoint 2, 4 messages.\n")
    assert "Bo, you have told me 3 things. The first was: 'I am Bo.'" in out


def test_chat_loop_killed_remembers_what_it_showed(tmp_path):
    with start("chat_loop.py", cwd=tmp_path) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("I am Bo.\n")
        process.stdin.flush()
        while "told me 1 things" not in process.stdout.readline():
            assert process.poll() is None
        process.kill()
    assert "Bo, you have told me 2 things" in run("chat_loop.py", cwd=tmp_path, typed="And now?\n")


def test_state_machine(tmp_path):
    out = run("state_machine.py", "--pace", 0, cwd=tmp_path)
    phases = [line.split()[-1] for line in out.splitlines() if line.startswith("order-7 is")]
    assert phases == ["new", "picked", "packed", "labelled", "done"]
    assert "3 boxes under label PX0001" in out
    assert run("state_machine.py", "--pace", 0, cwd=tmp_path) == "order-7 is done\n3 boxes under label PX0001\n"
    assert len((tmp_path / "labels.txt").read_text().splitlines()) == 1


def test_state_machine_stopped_in_each_phase(tmp_path):
    """Ctrl-C and kill in turn, each in the middle of a phase; the order never goes back and the label is bought once."""
    for phase, sent in [
        ("new", signal.SIGINT),
        ("picked", signal.SIGKILL),
        ("packed", signal.SIGINT),
        ("labelled", signal.SIGKILL),
    ]:
        with start("state_machine.py", "--pace", 0.5, cwd=tmp_path) as process:
            assert process.stdout is not None
            seen = [process.stdout.readline().strip()]
            while seen[-1] != f"order-7 is {phase}":
                assert seen[-1], process.communicate()
                seen.append(process.stdout.readline().strip())
            time.sleep(0.1)
            os.kill(process.pid, sent)
            out, err = process.communicate(timeout=60)
        if sent == signal.SIGINT:
            assert process.returncode == 0, err
            assert "status: interrupted" in out
    out = run("state_machine.py", "--pace", 0, cwd=tmp_path)
    assert out == "order-7 is labelled\norder-7 is done\n3 boxes under label PX0001\n"
    assert len((tmp_path / "labels.txt").read_text().splitlines()) == 1

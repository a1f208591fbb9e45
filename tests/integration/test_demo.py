"""The demo keeps its promises, breaks them when its protection is taken away, and counts honestly."""

import email
import email.policy
import importlib
import os
import re
import shutil
import signal
import smtplib
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.scale import scale

DEMO = ROOT / "examples" / "demo"
DOCUMENTS = DEMO / "documents"
BOUND = 100


def demo(*args, keep=None):
    """Run it, and return its exit code, what it printed, and the counts of its table."""
    command = [sys.executable, str(DEMO / "run.py"), *map(str, args), *(["--keep", str(keep)] if keep else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BOUND)
    assert "Traceback" not in done.stderr, done.stderr
    lines = re.findall(r"^ +(\S.*?) {2,}([\d,]+) ", done.stdout, re.MULTILINE)
    return done.returncode, done.stdout, {what: int(count.replace(",", "")) for what, count in lines}


def mails(keep):
    """Receiver, subject and body of each message in the mailbox, by the standard library alone."""
    found = []
    for file in sorted((keep / "mailbox").glob("*.eml")):
        message = email.message_from_bytes(file.read_bytes(), policy=email.policy.default)
        assert message["Delivered-To"] == message["To"]
        found.append((message["To"], message["Subject"], message.get_content()))
    return found


def few_documents(folder):
    """A smaller folder, for runs that are not about size."""
    folder.mkdir()
    for document in sorted(DOCUMENTS.glob("*.txt"))[:12]:
        shutil.copy(document, folder)
    return folder


def test_every_promise_is_kept(tmp_path):
    keep = tmp_path / "keep"
    code, printed, count = demo("--seed", 11, keep=keep)
    assert code == 0, printed
    assert "Every promise was kept." in printed
    sent = mails(keep)
    assert len(sent) == len(set(sent)) == count["mails sent"] == count["mails expected"] == count["ledger rows"]
    assert count["mails sent"] >= 15
    assert count["mails sent twice"] == count["findings booked twice"] == count["recorded replies asked for again"] == 0
    assert count["kills"] >= 7
    assert count["kills inside an effect"] >= 2
    log = (keep / "kills.jsonl").read_text().splitlines()
    assert len(log) == count["kills"]
    assert any("sent and not recorded" in line for line in log)
    assert any("not sent yet" in line for line in log)
    assert count["bytes stored"] == (keep / "agent.db").stat().st_size
    # Where it says to look next, one can.
    commands = re.findall(r"^ +\S*safepoint (log|calls) (\S+) --store (\S+)$", printed, re.MULTILINE)
    assert [verb for verb, _, _ in commands] == ["log", "calls"]
    for verb, task, store in commands:
        command = [sys.executable, "-m", "safepoint", verb, task, "--store", store]
        assert subprocess.run(command, capture_output=True, timeout=BOUND).returncode == 0


@pytest.mark.scaled
@pytest.mark.parametrize("seed", range(scale(1, 4)))
@pytest.mark.parametrize("part", ["verifier", "intents"])
def test_without_its_protection_it_fails(tmp_path, part, seed):
    keep = tmp_path / "keep"
    documents = few_documents(tmp_path / "documents")
    code, printed, count = demo("--break", part, "--seed", 100 + seed, "--documents", documents, keep=keep)
    assert code == 1, printed
    sent = mails(keep)
    twice = sum((Counter(sent) - Counter(set(sent))).values())
    assert twice == count["mails sent twice"] >= 1
    assert "BROKEN: mails sent more than once" in printed
    # It fails for this reason and no other.
    assert printed.count("BROKEN: ") == 1


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(5))
def test_any_seed(tmp_path, seed):
    code, printed, _ = demo("--seed", seed, keep=tmp_path / "keep")
    assert code == 0, printed


def test_a_changed_document_changes_the_mail(tmp_path):
    documents = few_documents(tmp_path / "documents")
    letter = documents / "01-reminder-brettholz.txt"
    text = letter.read_text(encoding="utf-8")
    letter.write_text(text.replace("BT-4471", "BT-9000").replace("EUR 2,318.40", "EUR 77.05"), encoding="utf-8")
    crane = documents / "08-inspection-log-workshop-crane.txt"
    text = crane.read_text(encoding="utf-8")
    crane.write_text(text.replace("Checks done: ", "Checks done: brake under load; "), encoding="utf-8")
    (documents / "99-new.txt").write_text("Action 1: Water the plants. Owner: nobody.\n")
    keep = tmp_path / "keep"
    code, printed, _ = demo("--documents", documents, "--seed", 3, keep=keep)
    assert code == 0, printed
    sent = {subject: body for _, subject, body in mails(keep)}
    assert "EUR 77.05" in sent["Invoice BT-9000 is overdue"]
    assert "Nobody is in charge: Water the plants" in sent
    assert not any("BT-4471" in subject or "brake under load" in subject for subject in sent)


def test_no_process_outlives_the_driver(tmp_path):
    command = [sys.executable, str(DEMO / "run.py"), "--keep", str(tmp_path / "keep")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        try:
            assert driver.stdout is not None
            while "kill 1" not in driver.stdout.readline():
                assert driver.poll() is None
            children = _until(lambda: c if len(c := _children(driver.pid)) == 3 else None)
        finally:
            driver.send_signal(signal.SIGKILL)
            driver.wait(timeout=30)
    assert _until(lambda: not any(_lives(pid, started) for pid, started in children))


def test_a_used_folder_and_an_empty_one_are_refused(tmp_path):
    (tmp_path / "note").touch()
    assert demo("--keep", tmp_path)[0] == 2
    (tmp_path / "empty").mkdir()
    assert demo("--documents", tmp_path / "empty")[0] == 2


def _until(condition):
    end = time.monotonic() + 30
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


def _stat(pid):
    # The name of the program, in brackets, may hold anything; what follows it are numbers.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _children(parent):
    found = []
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and (stat := _stat(entry))[1] == str(parent):
                found.append((int(entry), stat[19]))
        except OSError:
            pass  # it has just ended
    return found


def _lives(pid, started):
    """Whether it is still the same process, and no zombie that nobody has waited for."""
    try:
        stat = _stat(pid)
    except OSError:
        return False
    return stat[19] == started and stat[0] != "Z"


# -- its instruments


@pytest.fixture
def part(monkeypatch):
    """Import a module of the demo by the name that it has there, and forget it afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(DEMO))
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(DEMO) in str(sys.modules[name].__file__):
            del sys.modules[name]


def test_the_count_of_replies_asked_for_again_can_see_one(part):
    evidence = part("evidence")

    def request(no, digest):
        return {"no": no, "digest": digest, "reply": f"r{no}", "bytes": 1}

    def asked(log, *looks):
        return evidence._asked(log, [evidence.Raw(replies=frozenset(r)) for r in looks])

    log = [request(1, "a"), request(2, "b"), request(3, "b")]
    assert asked(log, {"r1"}, {"r1", "r3"}) == ([], ["r2"], [])  # the first try of b was cut short
    assert asked(log, {"r1", "r2"}, {"r1", "r2"}) == (["r2"], ["r3"], [])  # b was on record, and was asked for again
    assert asked(log, {"r1", "r2"}, {"r1", "r3"}) == (["r2"], [], ["r2"])  # ... and the record was written over


def test_the_mail_server_speaks_smtp(tmp_path):
    command = [sys.executable, str(DEMO / "mail.py"), str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdin is not None
        port = int(server.stdout.readline().split()[1])
        with smtplib.SMTP("127.0.0.1", port, timeout=30) as smtp:
            assert smtp.docmd("MAIL", "FROM:<a@example.com>")[0] == 503
            smtp.ehlo_or_helo_if_needed()
            assert smtp.docmd("RCPT", "TO:<b@example.com>")[0] == 503
            assert smtp.docmd("DATA")[0] == 503
            assert smtp.docmd("MAIL", "FROM nobody")[0] == 501
            assert smtp.docmd("MAIL", "FROM:<a@example.com>")[0] == 250
            assert smtp.rset()[0] == 250
            assert smtp.docmd("DATA")[0] == 503
            assert smtp.noop()[0] == 250
            assert smtp.docmd("TURN")[0] == 502
            smtp.sendmail(
                "a@example.com", ["b@example.com", "c@example.com"], "Subject: dots\r\n\r\n.\r\n..x\r\n. y\r\nend\r\n"
            )
        with socket.create_connection(("127.0.0.1", port), timeout=30) as half:
            half.recv(100)
            half.sendall(b"HELO x\r\nMAIL FROM:<a@example.com>\r\nRCPT TO:<b@example.com>\r\nDATA\r\nSubject: half\r\n")
        with smtplib.SMTP("127.0.0.1", port, timeout=30) as smtp:  # a sender that was cut off leaves nothing, and harms nobody
            smtp.sendmail("a@example.com", "b@example.com", "Subject: two\r\n\r\n")
        server.stdin.close()  # the driver's end: its own
        assert server.wait(timeout=30) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["000001.eml", "000002.eml"]
    stored = (tmp_path / "000001.eml").read_bytes()
    assert stored.endswith(b"\r\n\r\n.\r\n..x\r\n. y\r\nend\r\n")
    assert stored.startswith(b"Return-Path: <a@example.com>\r\nDelivered-To: b@example.com\r\nDelivered-To: c@example.com\r\n")


def test_the_model_decides_from_the_text(part):
    model = part("model")
    job = {"role": "user", "content": "Look. Today is 2025-06-30."}

    def answered(messages, *contents):
        reply = model.reply_to(messages)
        calls = reply["tool_calls"]
        assert [c["id"] for c in calls] == [f"call_{i}" for i in range(len(calls))]
        answers = [{"role": "tool", "tool_call_id": c["id"], "content": x} for c, x in zip(calls, contents, strict=True)]
        return [*messages, reply, *answers]

    messages = answered([job], '["a.txt", "b.txt"]')
    messages = answered(messages, "Nothing to see.")
    messages = answered(messages, "Invoice XY-1 over EUR 3.00 was due on 1 June 2025.")
    mail, book = (c["function"] for c in model.reply_to(messages)["tool_calls"])
    assert (mail["name"], book["name"]) == ("send_mail", "book")
    assert "XY-1" in mail["arguments"]
    messages = answered(messages, "{}", "1")
    assert model.reply_to(messages)["content"] == "I have read 2 documents and reported 1 findings."


def test_documents_are_some_thirty_and_some_hold_nothing(part):
    find, day = part("findings").find, part("datetime").date(2025, 6, 30)
    found = {d.name: find(d.name, d.read_text(encoding="utf-8"), day) for d in DOCUMENTS.glob("*.txt")}
    assert len(found) >= 30
    assert 10 <= sum(not f for f in found.values()) <= 20
    assert len({f.kind for each in found.values() for f in each}) == 9, "each rule finds something"

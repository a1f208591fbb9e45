"""The file store as people and git see it: what lies in the files, and what becomes of it when somebody changes them."""

import json
import os
import random
import shutil
import stat
import subprocess
import sys
import threading
import time

import pytest

import safepoint
from safepoint import Conflict, Damaged, LeaseHeld, NotFound, Retention, State, Unavailable, UsageError
from safepoint.errors import SafepointError
from safepoint.rows import Commit
from safepoint.stores.file import FileStore
from safepoint.stores.filenames import encode
from safepoint.testing.build import Writer, call_row
from tests.support.scale import scale


@pytest.fixture
def root(tmp_path):
    return tmp_path / "checkpoints"


@pytest.fixture
def cp(root):
    with safepoint.open(f"file:///{root}") as opened:
        yield opened


def grow(cp, n=4, task="t"):
    state = cp.load_latest(task) or State(task)
    for i in range(n):
        state.messages.append({"role": "user", "content": f"message {len(state.messages)}"})
        state.agent_state["phase"] = f"p{i}"
        state.step += 1
        cp.save(state)
    return state


def document(root, seq, task="t", branch="main"):
    return root / encode(task) / branch / f"{seq}.json"


def fresh(root):
    return safepoint.open(f"file:///{root}", durability="process")


# -- what lies there


def test_a_checkpoint_is_one_document_that_people_can_read(cp, root):
    grow(cp, 2)
    text = document(root, 2).read_text(encoding="utf-8")
    found = json.loads(text)
    assert list(found)[:4] == ["safepoint", "task", "seq", "id"]
    assert (found["task"], found["seq"], found["parent"], found["branch"], found["kind"]) == ("t", 2, 1, "main", "manual")
    assert found["state"]["messages"][1] == {"role": "user", "content": "message 1"}
    assert found["created_at"].endswith("+00:00")
    assert text.endswith("}\n")
    assert '\n    "agent_state": {\n      "phase": "p1"\n' in text
    before = document(root, 1).read_text(encoding="utf-8").splitlines()
    assert sum(line not in before for line in text.splitlines()) < 15, "a diff shows little but what has changed"


def test_only_what_git_should_keep_is_not_ignored(cp, root):
    grow(cp, 1)
    with cp.resume("t") as run:
        run.save()
    subprocess.run(["git", "init", "-q", "."], cwd=root, check=True)
    done = subprocess.run(["git", "status", "--porcelain", "-uall"], cwd=root, capture_output=True, text=True, check=True)
    seen = {line[3:] for line in done.stdout.splitlines()}
    assert seen == {".gitignore", "t/journal.jsonl", "t/main/1.json", "t/main/2.json"}


def test_others_may_not_look_whatever_the_umask(tmp_path):
    old = os.umask(0)
    try:
        with safepoint.open(f"file:///{tmp_path}/s") as cp:
            grow(cp)
            with cp.resume("t") as run:
                run.save()
    finally:
        os.umask(old)
    for at, folders, files in os.walk(tmp_path / "s"):
        for name in folders:
            assert stat.S_IMODE(os.stat(os.path.join(at, name)).st_mode) == 0o700, name
        for name in files:
            assert stat.S_IMODE(os.stat(os.path.join(at, name)).st_mode) == 0o600, name
    assert stat.S_IMODE(os.stat(tmp_path / "s").st_mode) == 0o700


def test_field_case_26_a_strict_parser_reads_what_is_stored(cp, root):
    hard = {
        "nan": float("nan"),
        "inf": [float("inf"), -float("inf")],
        "zero": -0.0,
        "big": 2**80,
        "lone": "\ud800",
        "sep": "\u2028\u0085",
    }
    cp.save(State("t", agent_state=hard, metadata={"nan": float("nan")}))
    with cp.resume("t") as run:
        run.save(label="again")

    def refuse(constant):
        raise AssertionError(constant)

    for text in (document(root, 1).read_bytes(), *(root / "t" / "journal.jsonl").read_bytes().split(b"\n")[:-1]):
        json.loads(text.decode("utf-8"), parse_constant=refuse)
    back = fresh(root).load_latest("t").agent_state
    assert repr(back) == repr(hard)


def test_a_folder_of_other_things_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="holds other things"):
        safepoint.open(f"file:///{tmp_path}")
    assert sorted(os.listdir(tmp_path)) == ["notes.txt"]


def test_the_url(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with safepoint.open("file:///here") as cp:
        grow(cp, 1)
        assert cp.store.url == f"file:///{os.path.realpath(tmp_path / 'here')}"
        assert cp.retention == Retention(20)
    for bad in ("file://host/x", "file:///", "file:///x?network_ok=1"):
        with pytest.raises(UsageError):
            safepoint.open(bad)


# -- names: field case 68

NAMES = [
    *("a:b", "C:foo", "C:x", "a/b", "a\\b", "..", ".", "CON", "con", "x.", "x ", "\x01\x1f", "\N{SNOWMAN}", "x" * 300),
    *("T", "t", "é", "e\u0301", "-rf", "journal.jsonl", ".git", "%spaces", "a\nb", "\N{PILE OF POO}" * 100, "../../x"),
]


def test_field_case_68_any_id_is_stored_safely_and_listed_as_given(tmp_path):
    canary = tmp_path / "x"
    canary.write_text("canary")
    for n, url in enumerate((f"file:///{tmp_path}/in/store", "memory://")):
        with safepoint.open(url) as cp:
            for id in ("", "  ", "a\0b", "\ud800", "x" * 513):
                with pytest.raises(UsageError):
                    cp.save(State(id))
            for id in NAMES:
                state = State(id, branch=id)
                cp.save(state, label=id, id=id)
                cp.fork(id, name=f"{id}2"[:512])
            assert sorted(info.task_id for info in cp.tasks()) == sorted(NAMES)
            for id in NAMES:
                assert cp.load_latest(id).branch == id
                assert cp.load(id, id=id).task_id == id
                assert cp.cleanup(id, keep_latest=1).deleted == ()
            if n == 0:
                assert cp.verify().ok
                with safepoint.open(url) as again:
                    assert sorted(info.task_id for info in again.tasks()) == sorted(NAMES)
                    again.delete_task("../../x")
                    assert cp.load_latest("../../x") is None
    assert canary.read_text() == "canary"
    assert sorted(os.listdir(tmp_path)) == ["in", "x"]
    assert os.listdir(tmp_path / "in") == ["store"]


# -- links: field case 70


@pytest.mark.parametrize("place", ["t", "t/main", "t/main/2.json", "t/journal.jsonl", ".leases", ".tmp", ".locks"])
def test_field_case_70_no_link_is_followed(cp, root, tmp_path, place):
    grow(cp, 2)
    outside = tmp_path / "outside"
    shutil.move(root / place, outside)
    before = tree(outside)
    os.symlink(outside, root / place)
    for verb in (use, lambda _: use_anew(root)):
        with pytest.raises(SafepointError) as caught:
            verb(cp)
        assert isinstance(caught.value, Unavailable if place == ".locks" else Damaged), caught.value
    assert tree(outside) == before, "what a link points to was changed"


def use(cp):
    """Read and write whatever there is of a task."""
    state = cp.load_latest("t")
    cp.save(state)
    with cp.resume("t") as run:
        run.save()


def use_anew(root):
    with fresh(root) as cp:
        use(cp)


def tree(path):
    if path.is_file():
        return path.read_bytes()
    return {str(p.relative_to(path)): p.read_bytes() if p.is_file() else None for p in sorted(path.rglob("*"))}


def test_field_case_70_a_folder_swapped_for_a_link_while_it_is_used(cp, root, tmp_path):
    """What was opened is what is used: a name that means something else a moment later changes nothing."""
    outside = tmp_path / "outside"
    shutil.copytree(make(tmp_path / "other"), outside)
    before = tree(outside)
    state = grow(cp, 2)
    stop = threading.Event()

    def swap():
        while not stop.is_set():
            try:
                os.rename(root / "t", root / "kept")
                os.symlink(outside / "t", root / "t")
                os.unlink(root / "t")
                os.rename(root / "kept", root / "t")
            except OSError:
                time.sleep(0)

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        until = time.monotonic() + scale(5, 60) / 10
        while time.monotonic() < until:
            try:
                cp.save(state)
            except (SafepointError, OSError):
                state = State("t", seq=state.seq, messages=state.messages)
            try:
                loaded = cp.load_latest("t")
                assert loaded is None or loaded.messages[0]["content"] != "theirs"
            except SafepointError:
                pass
    finally:
        stop.set()
        thread.join()
    assert tree(outside) == before


test_field_case_70_a_folder_swapped_for_a_link_while_it_is_used = pytest.mark.scaled(
    test_field_case_70_a_folder_swapped_for_a_link_while_it_is_used
)


def make(path):
    with fresh(path) as cp:
        cp.save(State("t", messages=[{"content": "theirs"}]))
    return path


# -- the journal: field cases 6 and 14b


def test_field_case_06_a_hole_in_the_middle_is_never_passed_over(cp, root):
    writer = Writer(cp.store, "t")
    writer.save()
    for _ in range(20):
        writer.settle(writer.call(status="started"))
    journal = root / "t" / "journal.jsonl"
    lines = journal.read_bytes().split(b"\n")
    cp.close()
    for hole in (b"\0" * 300, b"\0" * 300 + b"\n"):
        journal.write_bytes(b"\n".join(lines[:10]) + b"\n" + hole + b"\n".join(lines[10:]))
        with fresh(root) as again:
            with pytest.raises(Damaged, match=r"line 11 of t/journal\.jsonl"):
                again.store.calls("t")
            report = again.verify("t")
            assert not report.ok
            assert "line 11" in str(report)
            assert again.store.read("t", seq=1) is not None, "what is whole can still be read"
            # All that can be read is read: one lost line is one lost line.
            parts = [part for part in again.store.walk("t") if type(part).__name__ == "CallRow"]
            assert len(parts) >= 19
            assert again.status("t").checkpoints == 1
    journal.write_bytes(b"\n".join(lines))
    with fresh(root) as again:
        assert len(again.store.calls("t")[0]) == 20


def test_field_case_14b_content_separates_no_records_and_a_long_log_loads_in_linear_time(tmp_path):
    hard = "\u2028 \u2029 \u0085 \r \n \x0b \x0c \x1c"
    store = FileStore(tmp_path / "s", durability="process")
    writer = Writer(store, "t")
    writer.save(row={"label": "x"})
    counts = (scale(500, 2500), scale(2000, 10_000))
    took = []
    done = 0
    for count in counts:
        while done < count:
            writer.write(call_row(1, tool=hard, reason=f"{hard}{done}"))
            done += 1
        times = []
        for _ in range(3):
            again = FileStore(tmp_path / "s", durability="process")
            start = time.process_time()
            rows = again.calls("t")[0]
            times.append(time.process_time() - start)
            again.close()
        took.append(min(times))
        assert [row.reason for row in rows] == [f"{hard}{i}" for i in range(count)]
        assert {row.tool for row in rows} == {hard}
    assert took[1] / took[0] < 2.0 * counts[1] / counts[0]
    store.close()


test_field_case_14b_content_separates_no_records_and_a_long_log_loads_in_linear_time = pytest.mark.scaled(
    test_field_case_14b_content_separates_no_records_and_a_long_log_loads_in_linear_time
)


def test_a_torn_last_line_is_cut_and_a_damaged_one_is_not(root):
    with safepoint.open(f"file:///{root}") as cp:
        grow(cp, 3)
    journal = root / "t" / "journal.jsonl"
    whole = journal.read_bytes()
    for torn in (b'{"n":4,"prev":"', b'{"n":4' + b"\0" * 50, b'{"n":4' + b"\0" * 50 + b"\n"):
        journal.write_bytes(whole + torn)
        with fresh(root) as cp:
            assert cp.load_latest("t").seq == 3
            cp.save(cp.load_latest("t"))
            assert cp.load_latest("t").seq == 4
            assert cp.verify().ok
        document(root, 4).unlink()
        journal.write_bytes(whole)
    for at in (len(whole) - 1, len(whole) - 5, len(whole) - 200):
        bad = bytearray(whole)
        bad[at] ^= 4
        journal.write_bytes(bad)
        with fresh(root) as cp:
            with pytest.raises(Damaged):
                cp.load_latest("t")
            assert cp.load("t", seq=3).step == 3, "the document says itself what it is"


# -- by hand: the table in docs/stores.md


def test_the_newest_document_deleted(cp, root):
    grow(cp)
    document(root, 4).unlink()
    with pytest.raises(Damaged, match=r"t/main/4\.json: it is missing") as caught:
        cp.load_latest("t")
    assert caught.value.details["good"] == 3
    assert cp.load("t", seq=3).seq == 3
    assert "t/main/4.json" in str(cp.verify("t"))
    with cp.resume("t") as run:
        assert run.recovery.seq == 3


def test_an_old_document_deleted(cp, root):
    grow(cp)
    document(root, 2).unlink()
    assert cp.load_latest("t").seq == 4
    with pytest.raises(Damaged, match=r"2\.json: it is missing"):
        cp.load("t", seq=2)
    assert "t/main/2.json" in str(cp.verify("t"))


@pytest.mark.parametrize("change", ["value", "key", "cut", "empty", "header", "other"])
def test_a_document_changed(cp, root, change):
    grow(cp)
    file = document(root, 4)
    text = file.read_text(encoding="utf-8")
    new = {
        "value": text.replace("message 3", "message 4"),
        "key": text.replace('"phase"', '"phrase"'),
        "cut": text[: len(text) // 2],
        "empty": "",
        "header": text.replace('"step": 4,\n  "kind"', '"step": 5,\n  "kind"'),
        "other": document(root, 3).read_text(encoding="utf-8"),
    }[change]
    assert new != text
    file.write_text(new, encoding="utf-8")
    with pytest.raises(Damaged, match=r"t/main/4\.json"):
        cp.load_latest("t")
    assert "t/main/4.json" in str(cp.verify("t"))
    file.write_text(text, encoding="utf-8")
    assert cp.load_latest("t").seq == 4
    assert cp.verify().ok


def test_what_editors_and_git_do_to_white_space_is_no_change(cp, root):
    grow(cp)
    file = document(root, 4)
    data = json.loads(file.read_text(encoding="utf-8"))
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps(data, indent=7, ensure_ascii=True).replace("\n", "\r\n").encode())
    journal = root / "t" / "journal.jsonl"
    journal.write_bytes(journal.read_bytes().replace(b"\n", b"\r\n"))
    with fresh(root) as again:
        assert again.load_latest("t").messages[3]["content"] == "message 3"
        assert again.verify().ok
        again.save(again.load_latest("t"))
        assert again.verify().ok
    assert cp.load_latest("t").seq == 5


def test_the_journal_deleted(cp, root):
    grow(cp)
    (root / "t" / "journal.jsonl").unlink()
    for read in (cp.load_latest, cp.resume, lambda t: cp.save(State(t)), cp.calls):
        with pytest.raises(Damaged, match="journal"):
            read("t")
    assert [info.task_id for info in cp.tasks()] == ["t"], "one that cannot be read is listed"
    assert not cp.verify().ok


def test_a_line_changed_under_a_process_that_has_read_it(cp, root):
    """Also where the file has only grown, as by an append."""
    grow(cp)
    journal = root / "t" / "journal.jsonl"
    text = journal.read_bytes()
    for old, new in ((b'"moves":true', b'"moves":true '), (b'"step":1', b'"step":11'), (b'"step":1', b'"step":2')):
        journal.write_bytes(text.replace(old, new, 1))
        with pytest.raises(Damaged, match="journal"):
            cp.calls("t")
        assert not cp.verify().ok
    journal.write_bytes(text)
    assert cp.load_latest("t").seq == 4
    assert cp.verify().ok


def test_the_journal_cut_back(cp, root):
    """Fewer lines than documents: what was acknowledged is not forgotten."""
    grow(cp)
    journal = root / "t" / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:-2]))
    with pytest.raises(Damaged, match="journal"):
        cp.load_latest("t")
    with fresh(root) as again, pytest.raises(Damaged, match="journal"):
        again.load_latest("t")


def test_a_tasks_folder_deleted(cp, root):
    with cp.resume("t") as run:
        run.save()
        fence = run._guard.fence if hasattr(run, "_guard") else 1
    shutil.rmtree(root / "t")
    assert cp.load_latest("t") is None
    assert cp.tasks() == []
    assert cp.verify().ok
    grant = cp.store.acquire("t", b"me")
    assert grant.guard.fence > fence, "fences never go back"


def test_stray_files_are_passed_over_and_named(cp, root):
    grow(cp)
    (root / "notes.txt").write_text("mine")
    (root / "t" / "main" / "4 (copy).json").write_text("{}")
    (root / "t" / "main" / "99.json.orig").write_text("{}")
    assert cp.load_latest("t").seq == 4
    places = {lost.where for lost in cp.store.strays()}
    assert places == {"notes.txt", "t/main/4 (copy).json", "t/main/99.json.orig"}
    grow(cp)
    assert (root / "notes.txt").read_text() == "mine"


# -- accept and edit


def test_an_edited_document_is_accepted_as_a_new_checkpoint(cp, root):
    grow(cp)
    with pytest.raises(UsageError, match="as it was saved"):
        cp.accept("t", 4)
    for seq, phase in ((4, "p9"), (2, "p8")):
        file = document(root, seq)
        edited = file.read_text(encoding="utf-8").replace(f'"phase": "p{seq - 1}"', f'"phase": "{phase}"')
        file.write_text(edited, encoding="utf-8")
        with pytest.raises(Damaged, match=f"safepoint accept t@{seq}"):
            cp.load("t", seq=seq)
        head = cp.status("t").seq
        header = cp.accept("t", seq)
        assert (header.kind, header.parent_seq, header.label) == ("edit", head, f"accepted from {seq}")
        state = cp.load_latest("t")
        assert (state.seq, state.agent_state["phase"]) == (header.seq, phase)
        assert file.read_text(encoding="utf-8") == edited, "it stays as it is"
    grow(cp, 1)
    with pytest.raises(NotFound):
        cp.accept("t", 99)
    document(root, 4).write_text("no JSON", encoding="utf-8")
    with pytest.raises(Damaged, match="JSON"):
        cp.accept("t", 4)
    document(root, 4).write_text(document(root, 3).read_text().replace('"step": 3,\n    "turns"', '"step": "x",\n    "turns"'))
    with pytest.raises(SafepointError, match="step"):
        cp.accept("t", 4)


def test_accept_is_refused_while_a_run_lives(cp, root):
    grow(cp)
    file = document(root, 4)
    file.write_text(file.read_text(encoding="utf-8").replace("message 3", "message 9"), encoding="utf-8")
    with cp.resume("t"), pytest.raises(LeaseHeld):
        cp.accept("t", 4)


def test_accept_is_for_documents(tmp_path):
    with safepoint.open("memory://") as cp:
        cp.save(State("t"))
        with pytest.raises(UsageError, match="no documents"):
            cp.accept("t", 1)


# -- git


def git(root, *args):
    config = ["-c", "user.name=x", "-c", "user.email=x@example.com", "-c", "commit.gpgsign=false", "-c", "gc.auto=0"]
    return subprocess.run(["git", *config, *args], cwd=root, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("autocrlf", ["false", "true"])
def test_every_commit_of_a_repository_gives_that_moment(cp, root, autocrlf):
    git(root, "init", "-q", "-b", "main", ".")
    git(root, "config", "core.autocrlf", autocrlf)
    cp.retention = Retention(keep_latest=3)
    moments = []
    state = State("t")
    fences = []
    for i in range(8):
        state.step = i
        state.agent_state["n"] = i
        state.messages.append({"role": "user", "content": f"line {i}\r\nnext \u2028"})
        cp.save(state)
        if i == 3:
            cp.rewind("t", cp.list_checkpoints("t")[1].seq)
            state = cp.load_latest("t")
        if i == 5:
            with cp.resume("t") as run:
                fences.append(cp.store.lease("t").fence)
                run.save()
            state = cp.load_latest("t")
        git(root, "add", "-A")
        git(root, "commit", "-q", "-m", f"save {i}")
        latest = cp.load_latest("t")
        moments.append((git(root, "rev-parse", "HEAD"), latest.seq, latest.branch, latest.messages, latest.agent_state))
    order = [*moments, *reversed(moments), *random.Random(1).sample(moments, len(moments))]
    for commit, seq, branch, messages, agent_state in order:
        git(root, "checkout", "-q", commit)
        for reader in (cp, fresh(root)):
            got = reader.load_latest("t")
            assert (got.seq, got.branch, got.messages, got.agent_state) == (seq, branch, messages, agent_state)
            report = reader.verify()
            assert report.ok, report
        assert git(root, "status", "--porcelain") == ""
    # Fences never go back, whatever is checked out; and what is saved here goes on from here.
    git(root, "checkout", "-q", moments[0][0])
    with cp.resume("t"):
        assert cp.store.lease("t").fence > max(fences)
    git(root, "checkout", "-q", "-f", moments[2][0])
    git(root, "clean", "-qfd")
    cp.save(cp.load_latest("t"))
    assert cp.verify().ok
    # A clone is a store, and a holder that it knows of by the journal alone is not proven dead.
    clone = root.parent / "clone"
    git(root.parent, "clone", "-q", str(root), str(clone))
    git(clone, "checkout", "-q", moments[-1][0])
    with fresh(clone) as there:
        assert there.load_latest("t").seq == moments[-1][1]
        assert there.verify().ok


# -- damage


def test_random_damage_is_never_read_as_data(tmp_path):
    """Issue 3: single bits and blocks of 64 bytes, in documents and in the journal."""
    root = tmp_path / "s"
    with safepoint.open(f"file:///{root}") as cp:
        grow(cp, 6)
        with cp.resume("t") as run:
            run.save()
        true = {c.seq: cp.load("t", seq=c.seq).messages for c in cp.list_checkpoints("t")}
        newest = max(true)
    files = [p for p in (root / "t").rglob("*") if p.is_file() and not p.name.startswith(".")]
    whole = {file: file.read_bytes() for file in files}
    rng = random.Random(3)
    for i in range(scale(60, 1000)):
        file = rng.choice(files)
        data = bytearray(whole[file])
        at = rng.randrange(len(data))
        if i % 2:
            data[at] ^= 1 << rng.randrange(8)
        else:
            block = rng.randbytes(len(data[at : at + 64])) if rng.random() < 0.7 else bytes(len(data[at : at + 64]))
            data[at : at + 64] = block
        file.write_bytes(data)
        where = f"{i}: {file.name} at {at}"
        with fresh(root) as cp:
            loaded = 0
            for seq, messages in true.items():
                try:
                    assert cp.load("t", seq=seq).messages == messages, where
                    loaded += 1
                except SafepointError:
                    pass
            assert loaded >= len(true) - 1, f"{where}: one digest a document would have saved more"
            try:
                got = cp.load_latest("t")
                assert got is not None, where
                assert (got.seq, got.messages) == (newest, true[newest]), f"{where}: silently older"
                sound = True
            except SafepointError:
                sound = False
            if not sound:
                report = cp.verify("t")
                assert not report.ok, where
                assert file.name in str(report), f"{where}: {report}"
                with cp.resume("t") as run:
                    assert run.recovery.seq is not None, where
                    best = max(s for s in true if s in true)
                    assert run.state.messages == true[run.recovery.seq], where
                    assert run.recovery.seq >= best - 1, where
        shutil.rmtree(root / "t")
        for path, content in whole.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


test_random_damage_is_never_read_as_data = pytest.mark.scaled(test_random_damage_is_never_read_as_data)


# -- two processes

_HOLDER = """
import sys, time
from safepoint.stores.file import FileStore
store = FileStore(sys.argv[1])
with store._f.lock("t", "t"):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_writer_waits_for_another_process_up_to_its_timeout(root):
    with safepoint.open(f"file:///{root}", timeout=0.3) as cp:
        state = grow(cp, 1)
        holder = subprocess.Popen([sys.executable, "-c", _HOLDER, str(root)], stdout=subprocess.PIPE, text=True)
        try:
            assert holder.stdout.readline() == "held\n"
            start = time.monotonic()
            with pytest.raises(safepoint.Unavailable, match="lock"):
                cp.save(state)
            assert 0.25 < time.monotonic() - start < 5
            assert cp.load_latest("t").seq == 1, "no reader waits"
        finally:
            holder.kill()
            holder.wait()
            holder.stdout.close()
        cp.save(state)


def test_another_processes_appends_are_seen(cp, root):
    grow(cp, 1)
    with fresh(root) as other:
        for i in range(2, 6):
            grow(other, 1)
            assert cp.load_latest("t").seq == i
            stale = State("t", seq=i - 1)
            with pytest.raises(Conflict):
                cp.save(stale)
        other.cleanup("t", keep_latest=1)
        assert [c.seq for c in cp.list_checkpoints("t")] == [5]
        assert sorted(p.name for p in (root / "t" / "main").iterdir()) == ["5.json"]


def test_what_a_killed_clean_up_left_goes_with_the_next_write(root):
    with safepoint.open(f"file:///{root}") as cp:
        grow(cp, 4)
        kept = {p: p.read_bytes() for p in (root / "t" / "main").iterdir()}
        cp.cleanup("t", keep_latest=1)
    for path, content in kept.items():
        path.write_bytes(content)
    with fresh(root) as cp:
        assert [c.seq for c in cp.list_checkpoints("t")] == [4]
        cp.save(cp.load_latest("t"))
        assert sorted(p.name for p in (root / "t" / "main").iterdir()) == ["4.json", "5.json"]


def test_no_descriptor_is_left_open(cp):
    def use():
        grow(cp, 25)
        with cp.resume("t") as run:
            run.save()
        cp.rewind("t", cp.status("t").seq)
        with pytest.raises(Conflict):
            cp.save(State("t", seq=1) if cp.list_checkpoints("t")[-1].seq == 1 else State("t"))
        cp.verify()
        cp.delete_task("t")

    use()
    before = len(os.listdir("/proc/self/fd"))
    use()
    assert len(os.listdir("/proc/self/fd")) == before


def test_both_sides_of_a_fork_go_on(cp):
    """Also while other threads save: a child is born with none of their locks, and with nothing half done."""
    stop = threading.Event()
    errors = []

    def save(n):
        state = State(f"thread-{n}")
        try:
            while not stop.is_set():
                state.step += 1
                cp.save(state)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=save, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    try:
        for i in range(10):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    cp.save(State(f"child-{i}"))
                    cp.save(cp.load_latest("shared") or State("shared"))
                    code = 0
                finally:
                    os._exit(code)
            cp.save(State(f"parent-{i}"))
            assert os.waitpid(pid, 0)[1] == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert errors == []
    assert cp.load_latest("shared").seq == 10
    assert len(cp.tasks(limit=100)) == 24
    assert cp.verify().ok


def test_objects_are_refused(cp):
    from safepoint.model import Obj

    commit = Commit(task="t", id="x", objects=(Obj(b"n" * 16, b"", b"d"),))
    with pytest.raises(UsageError, match="flat"):
        cp.store.commit(commit)

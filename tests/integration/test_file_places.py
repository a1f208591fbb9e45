"""The file store where something else lies in the place of its files, and where files go and come while they are used."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

import safepoint
from safepoint import Damaged, NotFound, State, Unavailable
from safepoint.stores.file import FileStore
from safepoint.stores.file_folder import TEMP, Folders
from safepoint.stores.fileops import FileOps


@pytest.fixture
def root(tmp_path):
    return tmp_path / "checkpoints"


@pytest.fixture
def cp(root):
    with safepoint.open(f"file:///{root}") as opened:
        yield opened


def grow(cp, n, task="t"):
    state = cp.load_latest(task) or State(task)
    for _ in range(n):
        state.step += 1
        state.agent_state["n"] = state.step
        cp.save(state)
    return state


def folders_of(cp) -> Folders:
    assert isinstance(cp.store, FileStore)
    return cp.store._f


def latest(root, task="t"):
    with safepoint.open(f"file:///{root}") as cp:
        return cp.load_latest(task).agent_state["n"]


# -- what is no file


def spoil(path, kind, outside):
    path.unlink()
    if kind == "link":
        outside.write_text("{}")
        path.symlink_to(outside)
    elif kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)


KINDS = ["link", "folder", "pipe"]


@pytest.mark.parametrize("kind", KINDS)
def test_something_else_in_the_place_of_a_document_is_damage(cp, root, tmp_path, kind):
    grow(cp, 3)
    spoil(root / "t/main/3.json", kind, tmp_path / "outside")
    with pytest.raises(Damaged, match=r"t/main/3\.json"):
        cp.load_latest("t")
    assert cp.load("t", seq=2).agent_state == {"n": 2}
    assert [damage.key for damage in cp.verify("t").damages] == [3]
    with cp.resume("t", recover="auto") as run:
        assert (run.recovery.mode, run.recovery.seq) == ("fallback", 2)


@pytest.mark.parametrize("kind", KINDS)
def test_something_else_in_the_place_of_a_journal_hides_no_other_task(cp, root, tmp_path, kind):
    grow(cp, 1)
    grow(cp, 1, "u")
    spoil(root / "t/journal.jsonl", kind, tmp_path / "outside")
    assert [info.task_id for info in cp.tasks()] == ["t", "u"]
    report = cp.verify()
    assert not report.ok
    assert "t/journal.jsonl" in str(report)
    with pytest.raises(Damaged, match=r"t/journal\.jsonl"):
        cp.load_latest("t")
    assert latest(root, "u") == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="must become another user")
def test_field_case_64_a_folder_that_may_not_be_read_is_named_and_hides_no_other_task(root):
    # Not below pytest's folder, which that user may not come to.
    code = f"""
import os, safepoint, safepoint.stores.file
os.setgid(65534); os.setuid(65534)
from safepoint import State
with safepoint.open("file:////tmp/{root.parent.name}-{os.getpid()}/s") as cp:
    for task in "tu":
        cp.save(State(task))
    for name, mode in (("t/journal.jsonl", 0), ("t", 0), ("t/main", 0o500), ("t/journal.jsonl", 0o400)):
        path = os.path.join(cp.store.path, name)
        before = os.stat(path).st_mode
        os.chmod(path, mode)
        cp.store._f.kept.clear()
        assert [info.task_id for info in cp.tasks()] == ["t", "u"]
        try:
            cp.save(cp.load_latest("t"))
        except safepoint.Unavailable as error:
            assert path in str(error), (path, str(error))
        else:
            raise AssertionError(name)
        cp.save(cp.load_latest("u"))
        os.chmod(path, before)
        cp.save(cp.load_latest("t"))
"""
    top = f"/tmp/{root.parent.name}-{os.getpid()}"
    os.mkdir(top)
    os.chmod(top, 0o777)
    try:
        subprocess.run([sys.executable, "-c", code], check=True)
    finally:
        shutil.rmtree(top)


# -- other names of one file


class Meanwhile(FileOps):
    """Does something once, right before a file is opened for writing."""

    def __init__(self):
        self.then: Callable[[], object] | None = None

    def open(self, name, flags, dir_fd=None):
        if name == "journal.jsonl" and flags & os.O_WRONLY and self.then is not None:
            then, self.then = self.then, None
            then()
        return super().open(name, flags, dir_fd)


def test_field_case_70_a_journal_that_is_swapped_between_reading_and_writing_is_not_written_to(root, tmp_path):
    ops = Meanwhile()
    canary = tmp_path / "canary"
    canary.write_text("canary")
    with safepoint.open(FileStore(root, ops=ops)) as cp:
        grow(cp, 2)
        kept = (root / "t/journal.jsonl").read_bytes()

        def swap():
            (root / "t/journal.jsonl").unlink()
            os.link(canary, root / "t/journal.jsonl")

        ops.then = swap
        with pytest.raises(Unavailable):
            grow(cp, 1)
        assert canary.read_text() == "canary"
        (root / "t/journal.jsonl").unlink()
        (root / "t/journal.jsonl").write_bytes(kept)
        assert cp.load_latest("t").agent_state == {"n": 2}
        grow(cp, 1)
    assert latest(root) == 3


def test_a_checkout_between_reading_and_writing_damages_nothing(root, tmp_path):
    """git puts an earlier journal there while a save is under way: the save is refused, the task is that moment's."""
    ops = Meanwhile()
    with safepoint.open(FileStore(root, ops=ops)) as cp:
        grow(cp, 2)
        earlier = (root / "t/journal.jsonl").read_bytes()
        grow(cp, 1)

        def checkout():
            (tmp_path / "new").write_bytes(earlier)
            os.rename(tmp_path / "new", root / "t/journal.jsonl")
            (root / "t/main/3.json").unlink()

        ops.then = checkout
        with pytest.raises(Unavailable):
            grow(cp, 1)
        assert cp.load_latest("t").agent_state == {"n": 2}
        grow(cp, 1)
        assert cp.load_latest("t").agent_state == {"n": 3}
        assert cp.verify().ok


def test_field_case_70_the_note_of_what_was_acknowledged_is_written_to_no_second_name(cp, root, tmp_path):
    grow(cp, 1)
    canary = tmp_path / "canary"
    canary.write_text("canary " * 20)
    (root / "t/.acked").unlink()
    os.link(canary, root / "t/.acked")
    grow(cp, 2)
    assert canary.read_text() == "canary " * 20


# -- an earlier moment


def back(root, tmp_path):
    """What git makes of it when the moment after two of three saves is checked out."""
    with safepoint.open(f"file:///{root}") as cp:
        grow(cp, 2)
        shutil.copytree(root / "t", tmp_path / "earlier")
        grow(cp, 1)
    acked = (root / "t/.acked").read_bytes()
    shutil.rmtree(root / "t")
    shutil.copytree(tmp_path / "earlier", root / "t")
    (root / "t/.acked").write_bytes(acked)


@pytest.mark.parametrize("point", ["commit.before", "commit.line"])
def test_a_crash_of_the_first_save_after_a_checkout_is_no_damage(root, tmp_path, point):
    back(root, tmp_path)
    assert latest(root) == 2
    code = f"""
import os, safepoint, safepoint._probe as probe
cp = safepoint.open("file:///{root}")
state = cp.load_latest("t")
state.agent_state["n"] = 9
def at(name):
    if name == "{point}":
        os.kill(os.getpid(), 9)
probe.at = at
cp.save(state)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    if point == "commit.before":
        assert latest(root) == 2
    else:
        assert latest(root) == 9
        with open(root / "t/journal.jsonl", "ab") as file:
            file.truncate(file.tell() - 30)  # as the power went off before it was synced
        assert latest(root) == 2
    with safepoint.open(f"file:///{root}") as cp:
        grow(cp, 1)
        assert cp.verify().ok


@pytest.mark.parametrize("by", ["edit", "swap"])
def test_the_last_line_changed_in_a_clone_is_damage(cp, root, by):
    """Nobody has noted there how far the journal was acknowledged; but a line that a crash has torn has no end."""
    grow(cp, 3)
    (root / "t/.acked").unlink()
    path = root / "t/journal.jsonl"
    lines = path.read_bytes().splitlines(True)
    if by == "edit":
        lines[-1] = lines[-1].replace(b'"moves":true', b'"moves":false')
    else:
        lines[-2:] = lines[:-3:-1]
    path.write_bytes(b"".join(lines))
    with safepoint.open(f"file:///{root}") as again, pytest.raises(Damaged, match=r"line \d of t/journal.jsonl"):
        again.load_latest("t")


# -- opening, while others open, write and delete


def test_a_file_that_is_being_made_is_not_swept_by_another_open(root, monkeypatch):
    """Also one that belongs to no task."""
    with safepoint.open(f"file:///{root}", durability="process") as cp:
        ops, left = folders_of(cp).ops, list[str]()
        rename = ops.rename

        def slow(*args):
            # Of another process: locks of this one are seen by itself anyway.
            code = f"import safepoint; safepoint.open('file:///{root}').close()"
            subprocess.run([sys.executable, "-c", code], check=True)
            left.extend(os.listdir(root / TEMP))
            rename(*args)

        monkeypatch.setattr(ops, "rename", slow)
        assert [finding for finding in cp.check() if finding.level == "error"] == []
        assert left


def test_two_may_remove_the_same_folder(root):
    """The one that deletes a task, and each that opens the store meanwhile."""
    with safepoint.open(f"file:///{root}", durability="process") as cp:
        for _ in range(5):
            grow(cp, 15)
            os.rename(root / "t", root / ".deleted-0")
            errors: list[Exception] = []

            def sweep(errors=errors):
                try:
                    safepoint.open(f"file:///{root}").close()
                except Exception as error:
                    errors.append(error)

            threads = [threading.Thread(target=sweep) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert errors == []
            assert not (root / ".deleted-0").exists()


def test_a_task_deleted_while_it_is_read_is_absent_or_whole(root, monkeypatch):
    with safepoint.open(f"file:///{root}", durability="process") as cp, safepoint.open(f"file:///{root}") as other:
        grow(cp, 2)
        acked, done = Folders._acked, list[int]()

        def deleted(self, folder):
            found = acked(self, folder)
            if self is folders_of(other) and not done:
                done.append(1)
                os.rename(root / "t", root / ".deleted-1")
                os.unlink(root / ".deleted-1/journal.jsonl")
            return found

        monkeypatch.setattr(Folders, "_acked", deleted)
        assert other.load_latest("t") is None
        assert done


def test_a_task_begun_anew_while_it_is_read_is_the_one_or_the_other(root, monkeypatch):
    with safepoint.open(f"file:///{root}", durability="process") as cp, safepoint.open(f"file:///{root}") as other:
        grow(cp, 2)
        read, done = FileStore._bytes_of, list[int]()

        def begun_anew(self, root, task, row):
            if self is other.store and not done:
                done.append(1)
                cp.delete_task("t")
                cp.save(State("t", agent_state={"n": "new"}))
                cp.save(State("t", seq=1, agent_state={"n": "new"}))
            return read(self, root, task, row)

        monkeypatch.setattr(FileStore, "_bytes_of", begun_anew)
        assert other.load_latest("t").agent_state == {"n": "new"}
        assert done
        done.clear()
        assert other.verify("t").ok
        assert done


def test_a_document_whose_line_is_on_its_way_is_no_stray(root, monkeypatch):
    with safepoint.open(f"file:///{root}", durability="process") as cp, safepoint.open(f"file:///{root}") as other:
        grow(cp, 2)
        append, reports = Folders.append, []

        def slow(*args, **kwargs):
            thread = threading.Thread(target=lambda: reports.append(other.verify()))
            thread.start()
            thread.join(0.3)
            done = append(*args, **kwargs)
            thread.join()
            return done

        monkeypatch.setattr(Folders, "append", slow)
        grow(cp, 1)
        (report,) = reports
        assert report.ok, report


def test_white_space_and_a_byte_order_mark_in_a_journal_are_no_change(cp, root):
    grow(cp, 2)
    path = root / "t/journal.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b" \r\n") + b"\r\n \n")
    assert latest(root) == 2
    with safepoint.open(f"file:///{root}") as again:
        grow(again, 2)
        assert again.verify().ok
    assert latest(root) == 4


def test_a_status_that_may_be_older_says_so(cp, root):
    """A damaged line may have been the one that made another branch the current one."""
    grow(cp, 3)
    cp.rewind("t", 1)
    path = root / "t/journal.jsonl"
    lines = path.read_bytes().splitlines(True)
    at = next(i for i, line in enumerate(lines) if b"main~1" in line)
    path.write_bytes(b"".join([*lines[:at], b"{}\n", *lines[at + 1 :]]))
    with safepoint.open(f"file:///{root}") as again:
        for info in (again.status("t"), *again.tasks()):
            assert f"line {at + 1} of its journal is damaged" in info.reason


def test_no_save_goes_past_a_head_that_a_damaged_line_may_have_moved(cp, root):
    """Invariant 4: what was saved meanwhile is not left out because nobody can read where the branch stands."""
    grow(cp, 3)
    mine = cp.load("t", seq=3)
    grow(cp, 1)
    path = root / "t/journal.jsonl"
    lines = path.read_bytes().splitlines(True)
    path.write_bytes(b"".join([*lines[:-1], b"{}\n"]))
    with safepoint.open(f"file:///{root}") as again:
        with pytest.raises(Damaged, match="journal"):
            again.save(mine)
        with again.resume("t", recover="auto") as run:  # which goes on beside it
            run.save()
            assert run.state.branch == "main~1"
        grow(again, 1)


@pytest.mark.parametrize("verb", ["rewind", "resume"])
def test_a_task_whose_folder_is_taken_away_under_a_verb_is_not_found(cp, root, monkeypatch, verb):
    grow(cp, 2)
    acquire = cp.store.acquire

    def and_then(*args, **kwargs):
        grant = acquire(*args, **kwargs)
        shutil.rmtree(root / "t")
        return grant

    monkeypatch.setattr(cp.store, "acquire", and_then)
    with pytest.raises(NotFound):
        cp.rewind("t", 1) if verb == "rewind" else cp.resume("t").__enter__()
    monkeypatch.undo()
    assert cp.load_latest("t") is None
    with cp.resume("t") as run:  # nobody holds it
        run.save()

"""The file store with a lost or changed line of a journal, with what cannot be read just now, and with folders of others."""

import errno
import os
import shutil

import pytest

import safepoint
from safepoint import Damaged, State, Unavailable, tool
from safepoint.stores.file import FileStore
from safepoint.stores.fileops import FileOps


@pytest.fixture
def root(tmp_path):
    return tmp_path / "store"


done: list[int] = []


@tool(effect="write", name="losses.send")
def send(n):
    done.append(n)
    return n


def interrupted(url, steps=2):
    """A task whose run was interrupted in step ``steps``, after its write was recorded."""

    def step(run):
        run.call(send, run.state.step)
        if run.state.step == steps:
            raise KeyboardInterrupt

    done.clear()
    with pytest.raises(KeyboardInterrupt):
        safepoint.run_agent(step, task_id="t", input="go", store=url)
    assert done == list(range(steps + 1))


def goes_on(run):
    run.call(send, run.state.step)
    if run.state.step >= 3:
        run.finish("done")


def lines_of(root, task="t"):
    return (root / task / "journal.jsonl").read_bytes().splitlines(keepends=True)


def spoilt(line):
    at = line.index(b'"at":') + 7
    return line[:at] + bytes([line[at] ^ 1]) + line[at + 1 :]


@pytest.mark.parametrize("how", ["deleted", "changed"])
@pytest.mark.parametrize("back", range(1, 12))
def test_what_plan_says_of_a_task_with_a_lost_line_is_what_happens(root, how, back):
    url = f"file:///{root}"
    interrupted(url)
    lines = lines_of(root)
    assert len(lines) == 12
    at = len(lines) - back
    if how == "deleted":
        if at == len(lines) - 1:
            return  # nobody can tell
        del lines[at]
    else:
        lines[at] = spoilt(lines[at])
    (root / "t/journal.jsonl").write_bytes(b"".join(lines))
    with safepoint.open(url) as cp:
        plan = cp.plan("t")
        try:
            outcome = safepoint.run_agent(goes_on, task_id="t", store=cp)
        except Damaged:
            assert plan.does == "refused", str(plan)
        else:
            pending = [call.no for call in outcome.pending]
            if plan.does == "wait":
                assert (outcome.status, pending) == ("waiting", [p.call.no for p in plan.calls if p.action == "park"])
            else:
                assert plan.does == "carry on"
                assert outcome.status == "finished" or outcome.state.step < plan.guard, (str(plan), outcome.pending)
                assert not {p.call.no for p in plan.calls if p.action == "reuse"} & set(pending)
    assert len(set(done)) == len(done), (str(plan), done)


def test_a_damaged_last_line_that_released_the_lease_costs_no_head_and_no_result(root):
    url = f"file:///{root}"
    interrupted(url)
    lines = lines_of(root)
    assert b'"checkpoint"' not in lines[-1]
    assert b'"calls"' not in lines[-1]
    lines[-1] = spoilt(lines[-1])
    (root / "t/journal.jsonl").write_bytes(b"".join(lines))
    with safepoint.open(url) as cp:
        assert cp.load_latest("t").seq == 3
        assert not cp.verify().ok
    outcome = safepoint.run_agent(goes_on, task_id="t", store=url)
    assert (outcome.status, outcome.recovery.mode) == ("finished", "head")
    assert done == [0, 1, 2, 3]
    with safepoint.open(url) as cp:
        assert cp.load_latest("t").step == 4


def test_a_damaged_last_line_of_a_checkpoint_hides_where_the_head_is(root):
    url = f"file:///{root}"
    with safepoint.open(url) as cp:
        state = State("t")
        for _ in range(3):
            cp.save(state)
    lines = lines_of(root)
    lines[-1] = spoilt(lines[-1])
    (root / "t/journal.jsonl").write_bytes(b"".join(lines))
    with safepoint.open(url) as cp, pytest.raises(Damaged):
        cp.load_latest("t")
    (root / "t/main/3.json").unlink()  # even so: the line itself looks like one of a checkpoint
    with safepoint.open(url) as cp, pytest.raises(Damaged):
        cp.load_latest("t")


def test_a_line_that_may_have_chosen_another_branch_hides_which_one_is_current(root):
    url = f"file:///{root}"
    with safepoint.open(url) as cp:
        state = State("t")
        cp.save(state)
        cp.save(state)
        cp.fork("t", seq=1, name="other")
        cp.rewind("t", branch="other")
    lines = lines_of(root)
    at = next(i for i, line in enumerate(lines) if b'"row":{"branch":"other"' in line or b'"branch":"other","updated' in line)
    assert b'"checkpoint"' not in lines[at]
    lines[at] = spoilt(lines[at])
    (root / "t/journal.jsonl").write_bytes(b"".join(lines))
    with safepoint.open(url) as cp:
        with pytest.raises(Damaged):
            cp.load_latest("t")
        assert cp.load("t", branch="main").seq == 2


class Failing(FileOps):
    def __init__(self):
        self.code, self.name = 0, ""

    def open(self, name, flags, dir_fd=None):
        if self.code and name == self.name:
            raise OSError(self.code, os.strerror(self.code), name)
        return super().open(name, flags, dir_fd)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.EMFILE])
def test_field_case_84_a_document_that_cannot_be_read_just_now_is_no_damage(root, code):
    ops = Failing()
    with safepoint.open(FileStore(root, ops=ops)) as cp, safepoint.open("memory://") as other:
        state = State("t")
        for _ in range(4):
            cp.save(state)
        ops.code, ops.name = code, "3.json"
        for verb in (
            lambda: cp.load("t", seq=3),
            cp.verify,
            lambda: cp.verify("t"),
            lambda: cp.repair(into=other),
            lambda: cp.repair(in_place=True),
            lambda: cp.copy_to(other, skip_damaged=True),
            lambda: cp.copy_to(other, "t", skip_damaged=True),
        ):
            with pytest.raises(Unavailable, match=r"3\.json"):
                verb()
            assert other.tasks() == []
        ops.code = 0
        assert cp.verify().ok
        assert [c.seq for c in cp.list_checkpoints("t")] == [4, 3, 2, 1]


def test_a_document_that_cannot_be_read_just_now_is_not_forgotten_when_its_line_is_lost(root):
    ops = Failing()
    with safepoint.open(FileStore(root, ops=ops)) as cp:
        state = State("t")
        for _ in range(3):
            cp.save(state)
        lines = lines_of(root)
        lines[-1] = spoilt(lines[-1])
        (root / "t/journal.jsonl").write_bytes(b"".join(lines))
        ops.code, ops.name = errno.EIO, "3.json"
        with pytest.raises(Unavailable, match=r"3\.json"):
            cp.load("t", seq=2)
        ops.code = 0
        assert cp.load("t", seq=3).seq == 3


def test_a_copy_that_cannot_be_made_before_a_repair_says_so_and_leaves_nothing(root, monkeypatch):
    with safepoint.open(f"file:///{root}") as cp:
        state = State("t")
        for _ in range(3):
            cp.save(state)
        (root / "t/main/2.json").write_text("{}")

        real = shutil.copyfile

        def refused(source, to, **more):
            if os.fspath(source).endswith("3.json"):
                raise PermissionError(errno.EACCES, "Permission denied", os.fspath(source))
            return real(source, to, **more)

        monkeypatch.setattr(shutil, "copyfile", refused)
        with pytest.raises(Unavailable, match=r"3\.json"):
            cp.repair(in_place=True)
    assert [p.name for p in root.parent.iterdir()] == ["store"]


def test_a_folder_of_somebody_else_is_no_task(root):
    with safepoint.open(f"file:///{root}") as cp:
        cp.save(State("t"))
        (root / "notes").mkdir()
        (root / "notes/todo.txt").write_text("x")
        (root / "notes/more").mkdir()
        assert [info.task_id for info in cp.tasks()] == ["t"]
        report = cp.verify()
        assert report.ok, report
        assert ["notes" in str(note) for note in report.notes] == [True], report
        assert cp.load_latest("notes") is None
        cp.save(State("gone"))
        (root / "gone/journal.jsonl").unlink()
        with pytest.raises(Damaged):  # one of ours, without its journal
            cp.load_latest("gone")
        assert [info.task_id for info in cp.tasks()] == ["gone", "t"]

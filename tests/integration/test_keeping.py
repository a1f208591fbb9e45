"""What cleanup keeps and what is waited for, when somebody saves between a crash and the resume."""

import itertools
import uuid
from datetime import timedelta
from functools import partial

import pytest

import safepoint
from safepoint import Retention, State, tool
from safepoint.errors import InDoubt, NotFound, UsageError
from safepoint.model import Obj
from safepoint.rows import BranchRow, CallRow, CheckpointRow, Image, Numbers, PauseRow, TaskRow, replace
from tests.support.sweeping import long_task


def named(name):
    """A name that no other test's tool has."""
    return f"{name}.{uuid.uuid4()}"


def test_the_record_of_an_interrupted_steps_write_outlives_cleanup(cp):
    sent = []

    @tool(name=named("send"))
    def send(to):
        sent.append(to)
        return "ok"

    def step(run):
        run.call(send, "bob")
        if not resumed:
            raise KeyboardInterrupt
        run.finish("done")

    resumed = False
    with pytest.raises(KeyboardInterrupt):
        safepoint.run_agent(step, task_id="t", input="hi", store=cp)
    for note in range(3):
        cp.update("t", lambda state, note=note: state.metadata.update(note=note))
    assert len(cp.cleanup("t", keep_latest=1).deleted) == 2
    assert cp.cleanup("t", keep_latest=1).deleted == ()
    resumed = True
    assert safepoint.run_agent(step, task_id="t", store=cp).result == "done"
    assert sent == ["bob"]
    assert cp.cleanup("t", keep_latest=1).calls_deleted == 1, "nothing would ask for it any more"


def test_a_call_in_doubt_that_somebody_stepped_past_is_not_waited_for(cp):
    @tool(name=named("lose"))
    def lose():
        raise ConnectionError

    with pytest.raises(InDoubt), cp.resume("t") as run:
        run.call(lose)
    assert (cp.status("t").status, cp.status("t").pending) == ("waiting", 1)
    assert cp.tasks(status="unfinished") == []

    def go_past(state):
        state.step += 1

    cp.update("t", go_past)
    assert cp.status("t").pending == 0
    assert [t.task_id for t in cp.tasks(status="unfinished")] == ["t"]


# -- what retention keeps, and why


def aged(url, task, by, *, upto):
    """Let the first checkpoints of a task be older, as an image that is written under the same name."""
    with safepoint.open(url) as cp:
        image = image_of(cp.store, task)
        older = tuple(
            replace(row, created_at=row.created_at - int(by.total_seconds() * 1e6)) if row.seq <= upto else row
            for row in image.checkpoints
        )
        cp.delete_task(task)
        cp.store.write_task(replace(image, checkpoints=older))


def image_of(store, task):
    parts = list(store.walk(task))

    def of(kind):
        return tuple(part for part in parts if isinstance(part, kind))

    (row,), (numbers,) = of(TaskRow), of(Numbers)
    return Image(
        row=row, numbers=numbers, branches=of(BranchRow), checkpoints=of(CheckpointRow), calls=of(CallRow), pauses=of(PauseRow),
        objects=of(Obj),
    )  # fmt: skip


def steps(cp, task, n, **more):
    state = State(task, messages=[f"{task} {i}" * 100 for i in range(50)])
    for i in range(n):
        state.step = i
        state.messages.append(f"{task} new {i}" * 50)
        cp.save(state, **more)
    return state


def test_a_dry_run_says_of_each_checkpoint_what_and_why(cp):
    @tool(name=named("send"))
    def send(to):
        return "ok"

    with cp.resume("t") as run:
        for i in range(4):
            run.call(send, str(i))
            run.save()
    report = cp.cleanup("t", keep_latest=2, dry_run=True)
    assert [(line.seq, line.deleted, line.calls) for line in report.checkpoints] == [
        (5, False, 0), (4, False, 1), (3, True, 1), (2, True, 1), (1, True, 1)
    ]  # fmt: skip
    assert report.calls_deleted == 3
    assert [line.why for line in report.checkpoints][:3] == ["the head of main", "of the newest 2", "beyond the newest 2"]
    assert all(line.created_at.tzinfo is not None and line.bytes > 0 for line in report.checkpoints)
    done = cp.cleanup("t", keep_latest=2)
    assert (done.deleted, done.calls_deleted, done.checkpoints) == (report.deleted, 3, ())


def test_a_dry_run_names_what_an_open_call_keeps(cp):
    @tool(name=named("lose"))
    def lose():
        raise ConnectionError

    with pytest.raises(InDoubt), cp.resume("t") as run:
        run.call(lose)
    for _ in range(3):
        cp.update("t", lambda state: None)
    lines = {line.seq: line for line in cp.cleanup("t", keep_latest=1, dry_run=True).checkpoints}
    assert not lines[1].deleted
    assert "open" in lines[1].why
    assert lines[2].deleted


def test_all_tasks_at_once(cp):
    for task in "abc":
        steps(cp, task, 5)
    told = cp.cleanup_all(keep_latest=2, dry_run=True)
    assert [(r.task_id, r.deleted) for r in told.tasks] == [(t, (1, 2, 3)) for t in "abc"]
    assert (told.deleted, told.kept, told.dry_run) == (9, 6, True)
    done = cp.cleanup_all(keep_latest=2)
    assert (done.deleted, done.kept, done.failed) == (9, 6, {})
    assert done.bytes_freed == told.bytes_freed > 0
    assert [len(cp.list_checkpoints(t)) for t in "abc"] == [2, 2, 2]


def test_a_limit_for_the_whole_store_takes_the_oldest_of_all(cp):
    for i in range(5):
        for task in "abc":
            state = cp.load_latest(task) or State(task)
            state.step = i
            cp.save(state)
    cp.pin("b", 1)
    one = cp.list_checkpoints("a")[0].bytes
    done = cp.cleanup_all(max_store_bytes=11 * one)
    assert {r.task_id: r.deleted for r in done.tasks} == {"a": (1, 2), "b": (2,), "c": (1,)}
    done = cp.cleanup_all(keep_latest=2, max_store_bytes=0)
    assert {r.task_id: len(cp.list_checkpoints(r.task_id)) for r in done.tasks} == {"a": 2, "b": 3, "c": 2}
    assert [h.seq for h in cp.list_checkpoints("b")] == [5, 4, 1]


def test_only_finished_tasks_are_removed_whole(cp):
    for task in ("done", "pinned", "going", "idle"):
        steps(cp, task, 2)
    for task in ("done", "pinned"):
        cp.finish(task)
    cp.pin("pinned", 1)
    with pytest.raises(KeyboardInterrupt), cp.resume("going"):
        raise KeyboardInterrupt
    assert cp.cleanup_all(finished_older_than=timedelta(days=1)).removed == ()
    assert cp.cleanup_all(finished_older_than=timedelta(0), dry_run=True).removed == ("done",)
    assert cp.status("done").checkpoints == 3
    assert cp.cleanup_all(finished_older_than=timedelta(0)).removed == ("done",)
    assert [t.task_id for t in cp.tasks()] == ["going", "idle", "pinned"]


def test_the_age_that_counts_is_the_checkpoints_own(url):
    with safepoint.open(url) as cp:
        steps(cp, "t", 6)
    aged(url, "t", timedelta(days=30), upto=4)
    with safepoint.open(url) as cp:
        assert cp.cleanup("t", max_age=timedelta(days=60)).deleted == ()
        assert cp.cleanup("t", keep_latest=3, max_age=timedelta(days=7)).deleted == (1, 2, 3)


def test_wrong_limits_are_refused(cp):
    cp.save(State("t"))
    for wrong in (
        {"max_store_bytes": -1},
        {"max_store_bytes": True},
        {"finished_older_than": 5},
        {"finished_older_than": -timedelta(1)},
    ):
        with pytest.raises(UsageError):
            cp.cleanup_all(**wrong)
    with pytest.raises(NotFound):
        cp.cleanup("nope", keep_latest=1)


# -- a branch keeps what it goes on from


def test_calls_on_a_line_that_two_branches_share_stay_while_one_may_need_them(cp):
    @tool(name=named("send"))
    def send(to):
        return "ok"

    with cp.resume("t") as run:
        for i in range(4):
            run.call(send, str(i))
            run.save()
    at = {c.arguments["to"]: c.no for c in cp.calls("t")}
    cp.rewind("t", 2)  # the new branch goes on with the line: its head is one step in, and it would read the calls from there
    cp.update("t", lambda state: None)
    cp.cleanup("t", keep_latest=1)
    assert {c.no for c in cp.calls("t")} == {at["1"], at["2"], at["3"]}
    assert 1 not in {h.seq for h in cp.list_checkpoints("t")}


# -- at save time


def test_what_a_save_reads_does_not_grow_with_what_stays(cp, monkeypatch):
    """Milestones stay. A task that has thousands of them does not read them at each look."""
    cp.retention = Retention(keep_latest=5)
    state = steps(cp, "t", 100, kind="milestone")
    read = []
    headers = cp.store.headers

    def counted(*args, **kwargs):
        rows = headers(*args, **kwargs)
        read.append(len(rows))
        return rows

    monkeypatch.setattr(cp.store, "headers", counted)
    for i in range(120):
        state.step += 1
        cp.save(state, kind="milestone" if i % 3 == 0 else "manual")
    assert sum(read) < 120 * 12
    left = cp.list_checkpoints("t")
    assert len([h for h in left if h.kind == "milestone"]) == 140
    assert len(left) < 140 + 40


def _put(i, state):
    state.agent_state["i"] = i


@pytest.mark.parametrize(
    "limit", [{"keep_latest": 5}, {"keep_latest": None, "max_bytes": 20_000}, {"keep_latest": 2, "max_age": timedelta(0)}]
)
def test_a_short_lived_process_a_save_keeps_to_the_limit_too(url, limit):
    with safepoint.open(url) as keeper:  # a store in memory ends with its last handle
        state = State("t", agent_state={"x": "y" * 800})
        keeper.save(state)
        for i in range(60):
            with safepoint.open(url, retention=Retention(**limit)) as cp:
                cp.update("t", partial(_put, i))
        left = len(keeper.list_checkpoints("t"))
        assert left <= 45, left


# -- what a save has no time for


def rest_at_once(monkeypatch):
    monkeypatch.setattr("safepoint.keeping.SLICE", -1.0)
    monkeypatch.setattr("safepoint.keeping.FINISH", 600.0)


def small_parts(monkeypatch):
    monkeypatch.setattr("safepoint.keeping.ROWS", 32)
    monkeypatch.setattr("safepoint.stores.sqlite_sweep.LARGE", 0)
    for name, value in (("PAGE", 100), ("ROWS", 32), ("OBJECTS", 32), ("PAUSE", 0.0)):
        monkeypatch.setattr(f"safepoint.stores.sqlite_bigsweep.{name}", value)


def test_a_backlog_is_no_one_saves_to_clear(tmp_path, monkeypatch):
    url = f"sqlite:///{tmp_path}/a.db"
    small_parts(monkeypatch)
    rest_at_once(monkeypatch)
    with safepoint.open(url, retention=Retention.keep_all()) as cp:
        steps(cp, "t", 200)
    with safepoint.open(url, retention=Retention(keep_latest=5)) as cp:
        kept = [200]
        state = cp.load_latest("t") or State("t")
        for i in range(200):
            state.messages = [{"role": "user", "content": f"{i} " + "x" * 300}]
            state.step += 1
            cp.save(state)
            kept.append(cp.store.task("t").checkpoints)
        assert [c.problem for c in cp.list_checkpoints("t", check=True)] == [None] * kept[-1]
        assert cp.verify("t").ok
    assert kept[-1] < 120
    assert max(a - b for a, b in itertools.pairwise(kept)) <= 32


def test_processes_that_do_not_live_to_the_end_of_a_look_thin_out_too(tmp_path, monkeypatch):
    """What lies behind what is due, and stays, is not what they come to an end with; and the next does not wait long to go on."""
    small_parts(monkeypatch)
    rest_at_once(monkeypatch)
    with safepoint.open(f"sqlite:///{tmp_path}/a.db", durability="process") as other:
        other.store.write_task(long_task(2000, milestones=1))
        state, most = State("long", branch="b"), 0
        for _ in range(24):
            cp = safepoint.Checkpointer(other.store, retention=Retention(keep_latest=20))
            for _ in range(50):
                state.step += 1
                cp.save(state)
            state = cp.load("long", branch="b")
            most = max(most, other.store.task("long").checkpoints - 2000)
        due_at = 20 + other.store.live_objects("long") // 16
        assert most < due_at + 64, (most, due_at)


def test_what_was_begun_is_ended_by_close(tmp_path, monkeypatch):
    url = f"sqlite:///{tmp_path}/a.db"
    small_parts(monkeypatch)
    rest_at_once(monkeypatch)
    with safepoint.open(url, retention=Retention.keep_all()) as cp:
        steps(cp, "t", 63)
    with safepoint.open(url, retention=Retention(keep_latest=2)) as cp:
        state = cp.load_latest("t") or State("t")
        for i in range(3):
            state.messages = [{"role": "user", "content": f"{i} " + "x" * 300}]
            cp.save(state)
        assert cp.store.task("t").checkpoints > 30
    with safepoint.open(url, retention=Retention.keep_all()) as cp:
        assert cp.store.task("t").checkpoints < 10
        assert cp.verify("t").ok


@pytest.mark.parametrize("by", ["itself", "another"])
def test_what_was_begun_for_a_task_is_not_done_to_another_of_its_name(tmp_path, monkeypatch, by):
    small_parts(monkeypatch)
    rest_at_once(monkeypatch)
    url = f"sqlite:///{tmp_path}/a.db"
    with safepoint.open(url, retention=Retention.keep_all(), durability="process") as other:
        steps(other, "t", 80)
        with safepoint.open(url, retention=Retention(keep_latest=40), durability="process") as cp:
            state = other.load_latest("t") or State("t")
            for i in range(40):
                state.messages = [said(i)]
                cp.save(state)
                if cp.store.task("t").checkpoints < 80 + i:
                    break  # in the middle of it
            (other if by == "another" else cp).delete_task("t")
            steps(other, "t", 39)
            state = cp.load_latest("t") or State("t")
            for i in range(40):
                state.messages = [said(i)]
                cp.save(state)
                newest = cp.list_checkpoints("t", limit=100)
                assert [c.seq for c in newest] == list(range(40 + i, max(0, 40 + i - len(newest)), -1))
                assert len(newest) >= 40


@pytest.mark.parametrize("meanwhile", ["save", "fork", "sweep"])
def test_a_sweep_that_rests_follows_what_is_written_meanwhile(tmp_path, monkeypatch, meanwhile):
    small_parts(monkeypatch)
    for name in ("ROWS", "OBJECTS"):
        monkeypatch.setattr(f"safepoint.stores.sqlite_bigsweep.{name}", 3)
    stops = 0
    while True:
        with safepoint.open(f"sqlite:///{tmp_path}/{stops}.db", retention=Retention.keep_all(), durability="process") as cp:
            state = State("t")
            for i in range(9):
                state.messages = [said(i)]
                cp.save(state)
            work = cp.store.pruning("t", range(1, 8), sweep=True)
            done = sum(1 for _ in zip(range(stops), work, strict=False)) < stops
            # What is garbage by now comes back.
            if meanwhile == "sweep":
                cp.cleanup("t", keep_latest=1)
            elif meanwhile == "fork":
                cp.fork("t", name="b")
                state = cp.load("t", branch="b") or state
            state.messages = [said(2), said(5)]
            cp.save(state)
            for _ in work:
                pass
            assert cp.load("t", branch=state.branch).messages == [said(2), said(5)]
            assert cp.verify("t").ok
            assert cp.store.live_objects("t") < 6
        stops += 1
        if done:
            break
    assert stops > 5


def said(i):
    return {"role": "user", "content": f"{i} " + "x" * 300}

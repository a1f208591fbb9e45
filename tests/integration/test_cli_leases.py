"""Leases for people: who holds which task, and taking one from a holder that hangs, as verbs and as commands.

The holders that are stopped and killed here are processes.
"""

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta

import pytest

import safepoint
from safepoint import LeaseLost, NotDone, NotFound, State
from safepoint.cli import main
from safepoint.holding import lease_of
from safepoint.model import new_id, to_us
from safepoint.rows import Commit, LeaseRow, TaskPatch, replace
from tests.integration.conftest import STORES, new_url

NOW = datetime(2020, 1, 1, tzinfo=UTC)

# Says "held", and then saves once for every line that it reads.
HOLDER = """
import safepoint, sys
with safepoint.open(sys.argv[1]) as cp:
    try:
        with cp.resume("held") as run:
            run.save()
            print("held", flush=True)
            for line in sys.stdin:
                run.state.messages.append(line)
                print("saved", run.save().seq, flush=True)
    except safepoint.LeaseLost:
        print("lost", flush=True)
"""

# Is in the middle of a write when it says so.
SENDER = """
import safepoint, sys, time
@safepoint.tool(effect="write", name="send", verify=lambda to: safepoint.Unknown("not asked here"), settle_after=0)
def send(to: str) -> str:
    print("sending", flush=True)
    time.sleep(3600)
def step(run):
    run.finish(run.call(send, "bob"))
safepoint.run_agent(step, task_id="held", store=sys.argv[1])
"""


class Holder:
    def __init__(self, url, program=HOLDER):
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self.process.pid

    def told(self):
        return self.process.stdout.readline().strip()

    def ask(self):
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return self.told()

    def stop(self):
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED)

    def end(self):
        self.process.kill()
        self.process.wait(30)
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def holding():
    started = []

    def start(url, program=HOLDER):
        started.append(Holder(url, program))
        return started[-1]

    yield start
    for holder in started:
        holder.end()


@pytest.fixture(params=[kind for kind in STORES if kind != "memory"])
def place(request, tmp_path):
    """The URL of an empty store that other processes can use."""
    return new_url(request.param, tmp_path)


@pytest.fixture
def run(capsys, monkeypatch):
    def call(*args, stdin=""):
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = main([str(a) for a in args])
        out, err = capsys.readouterr()
        return code, json.loads(out) if "--json" in args else out, err

    return call


# -- the verbs, on every store


def test_leases_are_listed_while_they_are_held(cp):
    assert cp.leases() == []
    cp.save(State("kept"))
    with cp.resume("held") as run:
        run.save()
        (lease,) = cp.leases()
        assert (lease.task_id, lease.standing, lease.live) == ("held", "live", True)
        assert (lease.holder["pid"], lease.fence) == (os.getpid(), cp.store.lease("held").fence)
        assert abs(lease.since - datetime.now(UTC)) < timedelta(minutes=1)
        assert (lease.until is not None) is cp.store.multi_host
    assert cp.leases() == []


def test_many_leases_are_all_listed(url):
    names = sorted(f"t{i}" for i in range(210))  # more than a page
    with safepoint.open(url, durability="process") as cp:
        grants = {name: cp.store.acquire(name, b"") for name in names}
        assert [lease.task_id for lease in cp.leases()] == names
        for name in names[::2]:
            cp.store.release(name, grants[name], TaskPatch(status="interrupted"))
        assert [lease.task_id for lease in cp.leases()] == names[1::2]


def test_a_holder_that_let_go_without_a_word_is_dead_and_its_task_free(cp):
    cp.store.abandon("t", cp.store.acquire("t", b""))
    (lease,) = cp.leases()
    assert (lease.standing, lease.live) == ("dead", False)
    before = cp.store.lease("t"), cp.status("t")
    assert cp.release("t") is None
    assert (cp.store.lease("t"), cp.status("t")) == before
    with cp.resume("t"):
        assert cp.leases()[0].standing == "live"


@pytest.mark.parametrize(
    ("state", "live", "stopped", "ends_in", "standing"),
    [
        ("held", True, False, None, "live"),
        ("held", True, True, None, "stopped"),
        ("held", False, False, None, "dead"),
        ("held", True, False, 20, "live"),
        ("held", True, True, 20, "stopped"),
        ("held", False, False, 20, "dead"),  # nobody is behind it, and its time has not run out
        ("held", False, False, -1, "expired"),  # nothing is proven
        ("released", False, False, None, None),
        ("released", False, False, -1, None),
    ],
)
def test_how_a_holder_stands(state, live, stopped, ends_in, standing):
    ends = None if ends_in is None else to_us(datetime.now(UTC) + timedelta(seconds=ends_in))
    row = LeaseRow(
        task="t", fence=3, token="x", lease_id=1, state=state, holder=b"", acquired_at=1, live=live, stopped=stopped, until=ends
    )
    lease = lease_of(row)
    assert (lease and lease.standing) == standing
    if lease is not None:
        assert lease.live is (standing in {"live", "stopped"})
        assert (lease.until is None) is (ends_in is None)
    assert lease_of(None) is None


def test_a_task_is_taken_from_a_live_run_which_can_write_nothing_more(cp):
    def old_holder():
        with cp.resume("t") as run:
            run.state.messages.append("a")
            run.save()
            fence = cp.store.lease("t").fence
            lease = cp.release("t")
            assert (lease.task_id, lease.standing, lease.fence) == ("t", "live", fence)
            info = cp.status("t")
            assert (info.status, info.unfinished) == ("interrupted", True)
            assert info.reason == f"taken from pid {os.getpid()} on {lease.holder['host']} by force"
            assert cp.leases() == []
            assert cp.store.lease("t").presumed == fence
            run.state.messages.append("b")
            run.save()

    with pytest.raises(LeaseLost):
        old_holder()
    assert cp.status("t").status == "interrupted", "the old holder's own end says nothing any more"
    with cp.resume("t") as run:
        assert run.state.messages == ["a"]
        assert cp.store.lease("t").fence > cp.store.lease("t").presumed + 1
        run.finish()
        run.save()
    assert (cp.status("t").status, cp.status("t").reason) == ("finished", "")


def test_nothing_is_done_to_what_nobody_holds(cp):
    cp.save(State("kept"))
    with cp.resume("ended") as run:
        run.finish(1)
        run.save()
    before = [(cp.status(t), cp.store.lease(t)) for t in ("ended", "kept")]
    assert cp.release("kept") is None
    assert cp.release("ended") is None
    assert [(cp.status(t), cp.store.lease(t)) for t in ("ended", "kept")] == before
    with pytest.raises(NotFound):
        cp.release("absent")
    assert cp.store.task("absent") is None


def test_what_a_run_has_said_of_its_end_stays(cp):
    # Its last save said finished, and it hangs before it lets go.
    head = cp.save(State("t"))
    grant = cp.store.acquire("t", b"")
    cp.store.commit(Commit(task="t", id=new_id(), guard=grant.guard, patch=TaskPatch(status="finished")))
    assert cp.release("t") is not None
    assert (cp.status("t").status, cp.status("t").seq) == ("finished", head.seq)


@pytest.mark.parametrize("end", ["finished", "interrupted"])
def test_a_holder_that_ends_in_that_very_moment_is_not_forced(cp, monkeypatch, end):
    state = State("t")
    cp.save(state)
    if end == "finished":
        cp.finish("t")
    grant = cp.store.acquire("t", b"")
    lease = cp.store.lease

    def and_then_it_ends(task):
        found = lease(task)
        cp.store.release("t", grant, TaskPatch(status=end))
        return found

    monkeypatch.setattr(cp.store, "lease", and_then_it_ends)
    assert cp.release("t") is None
    monkeypatch.undo()
    info, row = cp.status("t"), cp.store.lease("t")
    assert (info.status, info.reason, row.presumed, row.state) == (end, "", 0, "released")


def test_the_async_face_has_both(url):
    async def main_():
        async with safepoint.open_async(url) as acp:
            grant = await asyncio.to_thread(acp.sync.store.acquire, "t", b"")
            assert [lease.task_id for lease in await acp.leases()] == ["t"]
            assert (await acp.release("t")).fence == grant.guard.fence
            assert await acp.release("t") is None

    asyncio.run(main_())


# -- the commands, against processes


def test_a_stopped_holder_is_shown_and_its_task_taken_after_a_yes(place, holding, run):
    holder = holding(place)
    assert holder.told() == "held"
    store = ("--store", place)
    code, data, _ = run("ls", "--leases", "--json", *store)
    (lease,) = data["leases"]
    assert (code, lease["task_id"], lease["standing"], lease["pid"]) == (0, "held", "live", holder.pid)
    assert (lease["host"], lease["program"], lease["here"]) == (os.uname().nodename, "-c", True)
    assert datetime.fromisoformat(lease["since"]) > NOW

    holder.stop()
    (lease,) = run("ls", "--leases", "--json", *store)[1]["leases"]
    assert lease["standing"] == "stopped"
    out = run("ls", "--leases", *store)[1].splitlines()
    assert out[0].split()[:6] == ["task", "standing", "pid", "host", "program", "since"]
    assert out[1].split()[:3] == ["held", "stopped", str(holder.pid)]

    code, out, err = run("release", "held", *store, stdin="n\n")
    assert (code, out) == (1, "")
    assert f"pid {holder.pid} on " in err
    assert "may still take effect" in err
    assert f"kill -9 {holder.pid}" in err
    assert run("ls", "--status", "running", "--json", *store)[1]["tasks"][0]["task_id"] == "held"

    code, out, err = run("release", "held", *store, stdin="y\n")
    assert code == 0
    assert out.startswith(f"held is taken from pid {holder.pid} on ")
    assert "presumed dead\nThe task can be resumed: start its agent again.\n" in out
    (task,) = run("ls", "--status", "unfinished", "--json", *store)[1]["tasks"]
    assert (task["task_id"], task["status"], task["holder"]) == ("held", "interrupted", None)
    assert task["reason"].startswith("taken from pid ")
    assert run("ls", "--leases", *store)[1] == "no leases\n"

    with safepoint.open(place) as cp, cp.resume("held") as mine:  # another takes it up, and is in nobody's way
        os.kill(holder.pid, signal.SIGCONT)
        assert holder.ask() == "lost"
        mine.save()
    assert holder.process.wait(30) == 0


def test_the_lease_of_a_dead_process_is_free_and_nothing_is_taken(place, holding, run):
    holder = holding(place)
    assert holder.told() == "held"
    holder.end()
    store = ("--store", place)
    (lease,) = run("ls", "--leases", "--json", *store)[1]["leases"]
    assert (lease["standing"], lease["pid"]) == ("dead", holder.pid)
    code, data, err = run("release", "held", "--json", *store)
    assert (code, data["released"], data["lease"]["standing"], err) == (0, False, "dead", "")
    assert data["plan"]["does"] == "carry on"
    out = run("release", "held", *store)[1]
    assert out.startswith("nobody holds held: pid ")
    assert "is dead; nothing was changed" in out
    with safepoint.open(place) as cp:
        assert cp.store.acquire("held", b"").previous == "dead", "its death is still proven to the next holder"


@pytest.mark.parametrize("kind", ["postgres", "redis"])
def test_a_lease_with_a_clock_expires_under_a_stopped_holder(kind, tmp_path, holding, run):
    place = new_url(kind, tmp_path)
    holder = holding(f"{place}{'&' if '?' in place else '?'}lease=1.5")
    assert holder.told() == "held"
    store = ("--store", place)
    time.sleep(2)  # it is renewed
    (lease,) = run("ls", "--leases", "--json", *store)[1]["leases"]
    assert lease["standing"] == "live"
    left = datetime.fromisoformat(lease["until"]) - datetime.now(UTC)
    assert timedelta(0) < left <= timedelta(seconds=1.5)
    assert "until" in run("ls", "--leases", *store)[1].splitlines()[0]

    holder.stop()
    assert run("ls", "--leases", "--json", *store)[1]["leases"][0]["standing"] == "stopped"
    until = time.monotonic() + 20
    while (lease := run("ls", "--leases", "--json", *store)[1]["leases"][0])["standing"] != "expired":
        assert time.monotonic() < until
        time.sleep(0.1)
    code, out, _ = run("release", "held", *store)
    assert (code, out.splitlines()[0].endswith(" is expired; nothing was changed")) == (0, True)
    with safepoint.open(place) as cp:
        grant = cp.store.acquire("held", b"")
        assert (grant.previous, grant.presumed) == ("presumed_dead", lease["fence"]), "its age proves nothing"
        os.kill(holder.pid, signal.SIGCONT)
        assert holder.ask() == "lost"
        cp.store.release("held", grant)


@pytest.mark.parametrize("how", ["released", "killed"])
def test_a_write_of_a_holder_that_was_forced_is_not_believed_undone(place, holding, run, how):
    holder = holding(place, SENDER)
    assert holder.told() == "sending"
    if how == "released":
        code, data, _ = run("release", "held", "--yes", "--json", "--store", place)
        assert (code, data["released"], data["lease"]["pid"]) == (0, True, holder.pid)
    else:
        holder.end()
    sent = []

    @safepoint.tool(effect="write", name="send", verify=lambda to: NotDone(), settle_after=0)
    def send(to: str) -> str:
        sent.append(to)
        return "ok"

    def step(run):
        run.finish(run.call(send, "bob"))

    outcome = safepoint.run_agent(step, task_id="held", store=place)
    if how == "released":
        assert (outcome.status, sent) == ("waiting", []), "it may be under way in a process that nobody has seen end"
    else:
        assert (outcome.status, sent) == ("finished", ["bob"])


def test_what_the_commands_refuse(place, run):
    with safepoint.open(place) as cp:
        cp.save(State("kept"))
    store = ("--store", place)
    assert run("release", "absent", "--yes", *store)[0] == 3
    assert run("release", *store)[0] == 2
    code, _, err = run("ls", "--leases", "--status", "running", *store)
    assert (code, "--leases lists holders" in err) == (2, True)
    code, out, _ = run("release", "kept", *store)
    assert (code, out.splitlines()[0]) == (0, "nobody holds kept: nothing was changed")
    code, data, _ = run("release", "kept", "--json", *store)
    assert (code, data["released"], data["lease"]) == (0, False, None)


def test_a_refusal_names_the_command(place, run):
    with safepoint.open(place) as cp:
        cp.save(State("t"))
        grant = cp.store.acquire("t", b"")
        code, _, err = run("rm", "t", "--yes", "--store", place)
        assert code == 5
        assert "release` takes the task from it by force" in err
        assert "steal=True" not in err
        cp.store.release("t", replace(grant))


def test_hostile_names_of_holders_are_shown_harmless(place, run):
    import msgspec

    task = "\x1b[31mred\n"
    who = {"pid": 7, "host": "\x1b[2Jhost\nx", "program": "p\u202eq", "boot_id": 3, "more": b"\0"}
    with safepoint.open(place) as cp:
        grant = cp.store.acquire(task, msgspec.msgpack.encode(who))
        for holder in (b"", b"\xc1", msgspec.msgpack.encode([1]), msgspec.msgpack.encode({"pid": "no", "host": None, 1: 2})):
            cp.store.acquire(new_id(), holder)
        code, out, _ = run("ls", "--leases", "--store", place)
        assert code == 0
        assert len(out.splitlines()) == 6
        assert not {"\x1b", "\u202e"} & set(out)
        found = run("ls", "--leases", "--json", "--store", place)[1]["leases"]
        assert {lease["task_id"]: lease for lease in found}[task]["host"] == who["host"]
        code, _, err = run("release", task, "--store", place, stdin="n\n")
        assert (code, "\x1b" in err) == (1, False)
        cp.store.release(task, grant)

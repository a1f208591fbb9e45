"""verify: each kind of damage is found with its place, and what it takes with it; what is sound is called sound."""

import asyncio
import subprocess
import sys
import threading

import pytest

import safepoint
from safepoint import NotFound, State
from safepoint.stores.memory import MemoryStore
from tests.support.runs import declare
from tests.support.scale import scale
from tests.support.spoil import spoil, spoil_any

CANARY = "c4n4ry"


def big(i):
    return {"role": "user", "content": f"message {i} " + "x" * 400}


def made(cp, task="t", n=6):
    state = State(task, agent_state={"phase": "plan", "first": "z" * 600})
    for i in range(n):
        state.step = i
        state.messages.append(big(i))
        cp.save(state)
    return state


def journaled(cp, task="t", steps=4):
    """A task whose steps each made a call; with a pause."""
    from tests.support.runs import World

    send = declare(World())
    with cp.resume(task) as run:
        for i in range(steps):
            run.state.messages.append(big(i))
            run.call(send, f"argument {i} " + "y" * 400)
            run.save()


def changed(cp, sql, *values):
    """A change behind the store's back, by another process."""
    program = (
        "import apsw, sys; c = apsw.Connection(sys.argv[1]); c.set_busy_timeout(10000); c.execute(sys.argv[2], sys.argv[3:]);"
        "print(c.changes())"
    )
    args = [sys.executable, "-c", program, cp.store.path, sql, *map(str, values)]
    done = subprocess.run(args, check=True, capture_output=True, text=True)
    assert int(done.stdout) > 0, "nothing was changed"


def test_a_sound_store_is_sound(cp):
    made(cp, "a")
    journaled(cp, "b")
    cp.save(State("c"))
    found = cp.verify()
    assert found.ok, str(found)
    assert (found.tasks, found.calls) == (3, 4)
    assert found.checkpoints == 6 + len(cp.list_checkpoints("b")) + 1
    assert found.bytes > 5000 if cp.store.chunked else found.bytes > 0
    assert found.branches == ()
    assert "sound" in str(found)


def test_of_one_task_it_says_what_loads(cp):
    made(cp, "a")
    made(cp, "b")
    found = cp.verify("a")
    assert found.ok
    assert found.tasks == 1
    (branch,) = found.branches
    assert (branch.name, branch.current, branch.head, branch.head_loads) == ("main", True, 6, True)
    assert branch.loads == ((1, 6),)
    assert branch.newest_good == 6


def test_doctor_looks_where_recovery_goes_back_to(cp):
    if not cp.store.chunked:
        pytest.skip("chunked is False")
    made(cp)
    cp.rewind("t", 3)
    state = cp.load_latest("t")
    state.messages.append({"role": "user", "content": "on the new branch " * 40})
    cp.save(state)
    at = cp.status("t").seq
    spoil(cp, "t", b"on the new branch", seq=at)
    assert cp.doctor("t").seq == at - 1, "the rewind's own"
    spoil(cp, "t", b"message 2", seq=3)
    found = cp.doctor("t")
    assert (found.branch, found.head, found.seq) == ("main~1", at, 2)
    assert [seq for seq, _ in found.skipped] == [at, at - 1, 3]


def test_there_is_no_such_task(cp):
    with pytest.raises(NotFound):
        cp.verify("t")


def test_progress_is_told(cp):
    made(cp, "a")
    made(cp, "b")
    seen: list[safepoint.Progress] = []
    found = cp.verify(progress=seen.append)
    assert seen[-1] == safepoint.Progress(done=2, total=0, bytes=found.bytes, task_id="b")


@pytest.mark.parametrize("how", ["missing", "corrupt"])
def test_an_object_takes_the_checkpoints_that_hold_it(cp, how):
    if not cp.store.chunked:
        pytest.skip("chunked is False")
    made(cp)
    assert spoil(cp, "t", b"message 3 ", how) == 1
    found = cp.verify("t")
    assert not found.ok
    (damage,) = [d for d in found.damages if d.kind == "object" and d.checkpoints]
    assert damage.checkpoints == ((4, 6),)
    assert damage.calls == ()
    assert damage.why == ("it is missing" if how == "missing" else "its bytes have changed")
    if cp.store.persistent:
        assert damage.where.startswith("key " if cp.store.ttl else "sp_objects, ")
    (branch,) = found.branches
    assert branch.loads == ((1, 3),)
    assert not branch.head_loads
    assert branch.newest_good == 3
    assert "takes checkpoints 4-6 with it" in str(found)
    assert "newest good one is 3" in str(found)
    # What it says is what is so.
    assert cp.load("t", seq=3).messages[-1] == big(2)
    with pytest.raises(safepoint.Damaged):
        cp.load("t", seq=4)


def test_an_object_takes_the_calls_that_hold_it(cp):
    if not cp.store.chunked:
        pytest.skip("chunked is False")
    journaled(cp)
    assert spoil_any(cp, "t", b"argument 2 ") == 1
    found = cp.verify("t")
    (damage,) = found.damages
    assert damage.kind == "object"
    assert damage.calls == ((3, 3),)
    assert damage.checkpoints == ()


def test_a_damaged_object_is_healed_by_the_next_save_that_holds_it(cp):
    if not cp.store.chunked:
        pytest.skip("chunked is False")
    state = made(cp)
    spoil(cp, "t", b"message 3 ", "corrupt")
    assert not cp.verify().ok
    fresh = cp.load("t", seq=3)
    fork = State("t2", messages=fresh.messages)
    cp.save(fork)
    assert not cp.verify("t").ok
    # Another branch of the same task, from scratch, with the same message: the object is written anew.
    other = State("t", messages=[*state.messages], branch="again")
    cp.save(other)
    assert cp.verify("t").ok


# -- SQLite: rows, branches, tasks


@pytest.fixture
def db(sqlite):
    journaled(sqlite)
    journaled(sqlite, "u")
    assert sqlite.verify().ok
    return sqlite


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE sp_checkpoints SET step = step + 1 WHERE seq = 3 AND task = 1",
        "UPDATE sp_checkpoints SET root = X'80' WHERE seq = 3 AND task = 1",
        "UPDATE sp_checkpoints SET seal = X'00' WHERE seq = 3 AND task = 1",
        "UPDATE sp_checkpoints SET seq = 77 WHERE seq = 3 AND task = 1",
    ],
)
def test_a_checkpoint_row(db, sql):
    changed(db, sql)
    found = db.verify()
    (damage,) = found.damages
    assert (damage.task_id, damage.what, damage.kind) == ("t", "checkpoint 3", "checkpoint")
    assert damage.where == f"sp_checkpoints, row {(1 << 32) + 3}"
    assert damage.checkpoints == ((3, 3),)
    (branch,) = found.branches
    assert 3 not in {n for first, last in branch.loads for n in range(first, last + 1)}
    assert branch.head_loads


def test_a_checkpoint_row_that_is_gone(db):
    changed(db, "DELETE FROM sp_checkpoints WHERE seq = 2 AND task = 1")
    found = db.verify()
    assert [d.what for d in found.damages] == ["1 checkpoints are missing"]
    assert found.damages[0].where == "sp_tasks, row 1"


def test_a_head_that_is_gone(db):
    head = db.status("t").seq
    changed(db, "DELETE FROM sp_checkpoints WHERE seq = ? AND task = 1", head)
    found = db.verify("t")
    assert [d.what for d in found.damages] == ["1 checkpoints are missing", f"head {head} of branch 'main'"]
    assert found.damages[1].where == "sp_branches, task 1, '', 'main'"
    assert found.branches[0].newest_good == head - 1


def test_a_branch_that_points_elsewhere(db):
    changed(db, "UPDATE sp_branches SET head_id = 'other' WHERE task = 1")
    damages = db.verify("t").damages
    assert [d.kind for d in damages] == ["branch"]


@pytest.mark.parametrize(
    ("sql", "what"),
    [
        ("UPDATE sp_calls SET status = 'failed' WHERE no = 2 AND task = 1", "call 2"),
        ("UPDATE sp_calls SET args = X'80' WHERE no = 2 AND task = 1", "call 2"),
        ("DELETE FROM sp_calls WHERE no = 2 AND task = 1", None),
    ],
)
def test_a_call(db, sql, what):
    if what is None:
        # Not by SQL, whose trigger would count: as a damaged page loses it.
        changed(db, "UPDATE sp_calls SET k = (99 << 32) + 2, task = 99 WHERE no = 2 AND task = 1")
        (damage, stray) = db.verify().damages
        assert stray.kind == "stray"
        assert damage.what == "1 calls are missing"
        return
    changed(db, sql)
    (damage,) = db.verify().damages
    assert (damage.what, damage.where) == (what, f"sp_calls, row {(1 << 32) + 2}")
    assert damage.calls == ((2, 2),)


def test_a_task_row_that_was_deleted(db):
    changed(db, "DELETE FROM sp_tasks WHERE task = 'u'")
    found = db.verify()
    assert {d.kind for d in found.damages} == {"stray"}
    assert {d.where for d in found.damages} >= {"sp_checkpoints, task 2", "sp_calls, task 2", "sp_branches, task 2"}
    # By its name it is found all the same.
    of_task = db.verify("u")
    assert of_task.damages[0].where == "sp_tasks, row 2"
    assert of_task.checkpoints > 3


def test_a_cut_page(tmp_path):
    path = tmp_path / "agent.db"
    with safepoint.open(f"sqlite:///{path}", durability="process") as cp:
        made(cp, n=60)
    program = "import apsw, sys; c = apsw.Connection(sys.argv[1]); print(*c.execute(sys.argv[2]).fetchall()[0])"
    sql = "SELECT pageno FROM dbstat WHERE name = 'sp_checkpoints' AND pagetype = 'leaf' ORDER BY pageno LIMIT 1 OFFSET 1"
    page = int(subprocess.run([sys.executable, "-c", program, path, sql], check=True, capture_output=True, text=True).stdout)
    data = bytearray(path.read_bytes())
    data[(page - 1) * 8192 : page * 8192] = bytes(8192)
    path.write_bytes(data)
    with safepoint.open(f"sqlite:///{path}", durability="process") as cp:
        found = cp.verify()
        assert f"page {page}" in " ".join(d.why for d in found.damages if d.kind == "structure")
        lost = [d for d in found.damages if d.kind == "checkpoint"]
        assert lost
        assert all(d.key is not None for d in lost)
        (branch,) = found.branches
        good = {n for first, last in branch.loads for n in range(first, last + 1)}
        assert good == set(range(1, 61)) - {d.key for d in lost}
        for seq in range(1, 61):
            if seq in good:
                assert cp.load("t", seq=seq).step == seq - 1


def test_it_says_nothing_of_what_is_stored(db):
    db.save(State("secret", messages=[{"role": "user", "content": CANARY * 100}], agent_state={CANARY: 1}))
    changed(db, "UPDATE sp_objects SET data = X'00'")
    changed(db, "UPDATE sp_checkpoints SET step = 77")
    found = db.verify()
    assert not found.ok
    assert CANARY not in str(found)
    assert CANARY not in repr(found)


def test_a_newer_format_is_left_alone(db):
    changed(db, "UPDATE sp_checkpoints SET format = 99 WHERE seq = 3 AND task = 1")
    found = db.verify()
    assert found.ok
    assert "checkpoint 3 is left alone" in str(found.notes[0])


@pytest.mark.scaled
def test_a_store_in_use_is_sound(cp):
    """Agents save, fall under retention and delete while it is verified: nothing of that looks like damage."""
    stop = threading.Event()
    errors = []

    def work(k):
        try:
            i = 0
            while not stop.is_set():
                i += 1
                state = cp.load_latest(f"t{k}") or State(f"t{k}")
                state.step += 1
                state.messages = [*state.messages[-20:], big(i)]
                cp.save(state)
                cp.cleanup(f"t{k}", keep_latest=3)
                if i % 50 == 0:
                    cp.delete_task(f"t{k}")
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(scale(20, 80)):
            found = cp.verify()
            assert found.ok, str(found)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert errors == []


def test_field_case_84b_a_checkpoint_that_cannot_be_read_is_kept_and_reported(cp):
    if not cp.store.chunked:
        pytest.skip("chunked is False")
    state = made(cp)
    state.messages = []
    for i in range(4):
        state.messages = [big(100 + i)]
        cp.save(state)
    spoil(cp, "t", b"message 0 ", "corrupt", seq=6)
    broken = {n for d in cp.verify("t").damages for first, last in d.checkpoints for n in range(first, last + 1)}
    assert broken == {2, 3, 4, 5, 6}
    report = cp.cleanup("t", keep_latest=1)
    assert set(report.deleted).isdisjoint(broken)
    after = cp.verify("t")
    assert {n for d in after.damages for first, last in d.checkpoints for n in range(first, last + 1)} == broken
    assert after.branches[0].loads == ((10, 10),)
    # Repaired, the others come under retention again.
    if isinstance(cp.store, MemoryStore):
        assert cp.repair(in_place=True).lost_checkpoints == {"t": ((2, 6),)}
        assert cp.verify().ok


def test_the_async_twins(sqlite):
    made(sqlite)

    async def twins():
        async with safepoint.open_async(sqlite.store.url) as acp:
            assert (await acp.verify("t")).ok
            assert (await acp.doctor("t")).ok
            assert (await acp.repair()).damages == []

    asyncio.run(twins())

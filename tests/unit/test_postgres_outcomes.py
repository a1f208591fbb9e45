"""What has become of a commit to PostgreSQL is told as it is, whoever comes in between."""

import contextlib
import threading
from typing import Any

import psycopg
import pytest

from safepoint import _probe
from safepoint.errors import Conflict, Unavailable
from safepoint.model import new_id
from safepoint.rows import CallWrite, Commit, replace
from safepoint.stores import whole
from safepoint.stores.postgres import commit as commits
from safepoint.stores.postgres import leases, sweep
from safepoint.stores.url import open_store
from safepoint.testing.build import Writer, call_row, obj, tree
from tests.support import sweeping
from tests.support.proxy import Proxy
from tests.support.servers import fresh_postgres_url


def test_a_commit_that_landed_and_whose_rows_cannot_be_read_is_not_told_as_one_that_was_never_sent(postgres, monkeypatch):
    url = fresh_postgres_url()
    with Proxy(postgres.socket_path, "postgres") as proxy:
        store = open_store(f"{proxy.postgres_url}?schema={url.rpartition('schema=')[2]}", timeout=1)
        writer = Writer(store)
        writer.save()
        commit = Commit(task="task", id=new_id(), calls=(CallWrite(call_row(1), "began"),))
        read = store.calls

        def silent(*args, **given):
            proxy.hold()
            return read(*args, **given)

        monkeypatch.setattr(store, "calls", silent)
        proxy.rewind()
        proxy.arm("cut", "up", lambda message: b"sp_commit_1" in message.data, "answer")
        with pytest.raises(Unavailable) as caught:
            store.commit(commit)
        assert proxy.fired
        assert caught.value.details == {"id": commit.id, "task": "task", "unknown": True}
        monkeypatch.undo()
        proxy.heal()
        again = store.commit(commit)
        assert (again.existed, [call.no for call in again.calls]) == (True, [1])
        store.close()


def test_a_big_save_whose_task_is_deleted_meanwhile_sends_all_again(monkeypatch):
    url = fresh_postgres_url()
    store = open_store(url)
    monkeypatch.setattr(commits, "BATCH", 10_000)
    monkeypatch.setattr(sweep, "LARGE", 1)
    monkeypatch.setattr(sweep, "clear_up", lambda db: None)
    Writer(store).save(*tree("a"))
    other: Any = open_store(url)
    begun: list[Any] = []

    def staged(link, statement, values=()):
        if "sp_stage_1" not in statement or begun:
            return run(link, statement, values)
        link.execute("BEGIN ISOLATION LEVEL READ COMMITTED")
        begun.extend(run(link, statement, values))  # has seen the task, and is not seen yet
        assert other.delete_task("task")
        link.execute("COMMIT")
        monkeypatch.undo()
        sweep.clear_up(other._db)
        return begun

    run = commits.run
    monkeypatch.setattr(commits, "run", staged)
    Writer(store, space="x").save(*[obj(b"%03d" % i * 400) for i in range(30)])
    found = store.read("task", space="x")
    assert found is not None
    assert len(found[1]) == 30
    other.close()
    store.close()


def test_a_task_that_is_begun_anew_is_not_pruned_by_numbers_of_the_old_one(monkeypatch):
    store = open_store(fresh_postgres_url())
    writer = Writer(store)
    for i in range(3):
        writer.save(obj(b"%d" % i))
    amount = sweep._amount

    def anew(*args):
        found = amount(*args)
        monkeypatch.undo()
        assert store.delete_task("task")
        writer = Writer(store)
        for i in range(3):
            writer.save(obj(b"anew %d" % i))
        return found

    monkeypatch.setattr(sweep, "_amount", anew)
    assert store.prune("task", [1, 2]).seqs == ()
    assert [row.seq for row in store.headers("task")] == [3, 2, 1]
    assert store.prune("task", [1, 2]).seqs == (1, 2)
    store.close()


def test_a_lease_whose_task_is_worked_on_for_long_does_not_keep_others_from_being_renewed(monkeypatch, postgres):
    url = fresh_postgres_url()
    store: Any = open_store(url, lease=6)
    other = open_store(url)
    image = whole.sealed(sweeping.long_task(5, task="task"))
    assert other.write_task(image)
    grants = [store.acquire(task, b"me") for task in ("task", "second")]
    with psycopg.connect(postgres.url, autocommit=True) as side:
        side.execute(
            f"UPDATE {store._db.quoted}.sp_leases SET until = '-infinity', process = 'somebody elsewhere' WHERE token = %s",
            (grants[0].guard.token,),
        )
    renewed = []
    at = _probe.at

    def renew(point):
        if point == "write_task.before":
            renewed.extend(store._renew([grant.handle for grant in grants])[0])
        at(point)

    monkeypatch.setattr(_probe, "at", renew)
    other.write_task(sweeping.long_task(4, task="task"), over=image)
    assert sorted(renewed) == sorted(grant.guard.token for grant in grants)
    store.close()
    other.close()


def test_a_tool_may_wait_for_a_lock_of_its_own_tables_longer_than_the_timeout(postgres):
    url = fresh_postgres_url()
    with contextlib.closing(open_store(url)) as made:
        made.tasks()  # makes the tables: the other store has little time
    store: Any = open_store(url, timeout=0.5)
    grant = store.acquire("task", b"me")
    writer = Writer(store, guard=grant.guard)
    writer.save()
    call = writer.call(effect="transactional")
    name = f"{store._db.quoted}.effects"
    with psycopg.connect(postgres.url) as side:
        side.execute(f"CREATE TABLE {name} (what text)")
        side.commit()
        side.execute(f"LOCK TABLE {name}")
        timer = threading.Timer(1.2, side.commit)
        timer.start()

        def body(conn):
            conn.execute(f"INSERT INTO {name} VALUES ('sent')")
            return Commit(
                task="task",
                id=new_id(),
                guard=grant.guard,
                calls=(CallWrite(replace(call, status="succeeded", result=b"r"), "ended"),),
            )

        assert store.transact("task", grant.guard, call, body).calls[0].status == "succeeded"
        timer.join()
        assert side.execute(f"SELECT count(*) FROM {name}").fetchall() == [(1,)]
    store.close()


def test_a_request_for_a_lease_that_arrives_a_second_time_and_late_takes_nothing(monkeypatch):
    store: Any = open_store(fresh_postgres_url())
    sent = []

    def told(link, statement, values=()):
        if "sp_acquire_1" in statement:
            sent.append((statement, values))
        return run(link, statement, values)

    run = leases.run
    monkeypatch.setattr(leases, "run", told)
    store.release("task", store.acquire("task", b"me"))
    store.release("task", store.acquire("task", b"other"))
    before = store.task("task"), store.lease("task")
    assert store._db.ask(*sent[0])[0][0] == "over"
    assert (store.task("task"), store.lease("task")) == before
    for _ in range(20):  # as many as there may be between a request and its double
        grant = store.acquire("task", b"me")
        store.abandon("task", grant)
    assert store._db.ask(*sent[-1])[0][:2] == ("done", [grant.guard.fence, 0])
    # Whoever hears that asks anew: its lease was granted, and another has it had since.
    store.release("task", store.acquire("task", b"me"))
    token = sent[-1][1][1]
    store.release("task", store.acquire("task", b"other"))
    monkeypatch.setattr(leases.secrets, "token_hex", lambda n: token)
    with pytest.raises(Unavailable, match="was over"):
        store.acquire("task", b"me")
    store.close()


@pytest.mark.parametrize("kind", ["call", "pause", "tool"])
def test_a_row_is_not_taken_for_another_that_has_its_number(postgres, kind):
    url = fresh_postgres_url()
    schema = url.rpartition("schema=")[2]
    store = open_store(url)
    writer = Writer(store)
    writer.save()
    grant = store.acquire("task", b"me")
    writer.guard = grant.guard
    make, at = (writer.pause, "asked_at") if kind == "pause" else (writer.call, "started_at")
    lost = make(**{at: 1_700_000_000_000_000})
    with psycopg.connect(postgres.url, autocommit=True) as side:
        # As a standby has it that was not sent the last commit.
        side.execute(f"DELETE FROM {schema}.sp_calls; DELETE FROM {schema}.sp_pauses")
        side.execute(f"UPDATE {schema}.sp_tasks SET last_call = 0, last_pause = 0, last_position = 0, recent = '{{}}'")
    there = make(**{at: 1_700_000_000_000_001})
    assert (there.no, there.version) == (lost.no, lost.version)

    def settle(row):
        if kind != "tool":
            writer.write(replace(row, status="answered" if kind == "pause" else "failed"))
            return
        done = CallWrite(replace(row, status="succeeded", result=b"r"), "ended")
        commit = Commit(task="task", id=new_id(), guard=grant.guard, calls=(done,))

        def body(conn):
            began.append(row)
            return commit

        store.transact("task", grant.guard, row, body)

    began: list[Any] = []
    with pytest.raises(Conflict, match="gone back"):
        settle(lost)
    assert began == [], "no tool may run for a call that is not there"
    (row,) = store.pauses("task") if kind == "pause" else store.calls("task")[0]
    assert row == there
    settle(there)
    store.close()

"""The contract of a store as pytest tests, to be inherited by a backend's test class."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from safepoint.errors import Conflict, LeaseLost, NotFound, Unavailable, UsageError
from safepoint.model import new_id
from safepoint.rows import Commit, Grant, Guard, TaskPatch, replace
from safepoint.stores.base import Store
from safepoint.testing.build import Writer, call_row, dump, needs_chunks, obj, reached, tree
from safepoint.testing.commits import CommitTests, refused
from safepoint.testing.leases import LeaseTests
from safepoint.testing.reading import ReadTests
from safepoint.testing.removal import RemovalTests
from safepoint.testing.whole import WholeTests
from safepoint.testing.writes import WriteTests

__all__ = ["StoreContract"]

Opener = Callable[[], Store]


class StoreContract(CommitTests, ReadTests, WriteTests, LeaseTests, RemovalTests, WholeTests):
    """Subclass it, and give the fixture ``opener``: a function that opens a store at one empty place, the same at each call.

    ``scale`` may be overridden to make the tests with threads longer.
    """

    scale: int = 1

    @pytest.fixture
    def opener(self) -> Opener:
        raise NotImplementedError(f"{type(self).__name__} gives no fixture `opener`")

    @pytest.fixture
    def store(self, opener: Opener) -> Iterator[Store]:
        store = opener()
        yield store
        store.close()

    # -- the store itself

    def test_it_says_what_it_is(self, store: Store) -> None:
        Writer(store).save(obj(b"hush hush"))
        assert store.url in repr(store)
        assert "hush" not in repr(store)
        assert store.durability in {"full", "process"}
        assert store.timeout > 0

    def test_a_check_finds_no_error_and_leaves_no_trace(self, store: Store) -> None:
        Writer(store).save(*tree("a"))
        before = dump(store)
        findings = store.check()
        assert findings
        assert [f for f in findings if f.level == "error"] == []
        assert all(f.remedy for f in findings if f.level != "ok")
        assert dump(store) == before

    def test_a_closed_store_refuses_every_verb(self, opener: Opener) -> None:
        store = opener()
        writer = Writer(store)
        writer.save()
        grant = store.acquire("task", b"me")
        guard = grant.guard
        store.close()
        store.close()
        verbs: dict[str, Callable[[], Any]] = {
            "commit": lambda: store.commit(writer.commit(guard=guard)),
            "task": lambda: store.task("task"),
            "tasks": store.tasks,
            "branches": lambda: store.branches("task"),
            "read": lambda: store.read("task"),
            "headers": lambda: store.headers("task"),
            "calls": lambda: store.calls("task"),
            "pauses": lambda: store.pauses("task"),
            "writes": lambda: store.writes("task"),
            "acquire": lambda: store.acquire("task", b""),
            "release": lambda: store.release("task", grant),
            "lease": lambda: store.lease("task"),
            "holds": lambda: store.holds("task", guard),
            "prune": lambda: store.prune("task", [1]),
            "pin": lambda: store.pin("task", 1, True),
            "delete_task": lambda: store.delete_task("task"),
            "check": store.check,
            "transact": lambda: store.transact("task", guard, call_row(1), lambda _: Commit(task="task", id="x")),
        }
        for name, verb in verbs.items():
            with pytest.raises(UsageError):
                pytest.fail(f"{name} answered {verb()!r}")
        store.abandon("task", grant)
        assert store.url in repr(store)

    def test_what_was_stored_is_there_after_opening_again(self, opener: Opener, store: Store) -> None:
        if not store.persistent:
            pytest.skip("persistent is False")
        writer = Writer(store)
        writer.save(*tree("a"))
        writer.save(*tree("b"), row={"metadata": b"m"})
        Writer(store, space="ns").save()
        call = writer.call(status="in_doubt")
        writer.pause()
        store.pin("task", 1, True)
        store.release("done", store.acquire("done", b"me"), TaskPatch(status="finished"))
        before = dump(store)
        store.close()
        again = opener()
        try:
            assert dump(again) == before
            writer.store = again
            assert writer.save().seq == 4
            assert writer.call().no == call.no + 1
        finally:
            again.close()

    def test_a_closed_stores_leases_are_those_of_the_dead(self, opener: Opener) -> None:
        first, second = opener(), opener()
        grant = first.acquire("task", b"me")
        first.close()
        try:
            assert second.acquire("task", b"me").previous == "dead"
            with pytest.raises(LeaseLost):
                Writer(second, guard=grant.guard).save()
        finally:
            second.close()

    def test_handles_of_one_place_see_each_others_commits(self, opener: Opener, store: Store) -> None:
        other = opener()
        try:
            one, two = Writer(store), Writer(other)
            one.save(*tree("a"))
            assert dump(other) == dump(store)
            two.head = one.head
            two.save(*tree("b"))
            assert dump(other) == dump(store)
            with pytest.raises(Conflict):
                one.save(*tree("c"))
        finally:
            other.close()

    # -- threads

    def test_of_many_writers_of_one_task_each_loser_gets_a_conflict(self, store: Store) -> None:
        Writer(store).save()
        won: list[int] = []
        lost: list[int] = []

        def work(me: int) -> None:
            for i in range(25 * self.scale):
                row = store.task("task")
                assert row is not None
                writer = Writer(store, head=row.head)
                thing = obj(b"%d/%d" % (me, i))
                try:
                    done = writer.save(thing)
                except Conflict:
                    lost.append(me)
                    continue
                assert done.seq is not None
                won.append(done.seq)
                found = store.read("task", seq=done.seq)
                assert found is not None
                assert found[1] == reached(store, [thing])

        _in_threads(8, work)
        assert len(won) + len(lost) == 8 * 25 * self.scale
        assert sorted(won) == list(range(2, len(won) + 2)), "a gap, or a number given twice"
        rows = store.headers("task")
        assert [row.seq for row in rows] == list(range(len(won) + 1, 0, -1))
        assert [row.parent_seq for row in rows] == [*range(len(won), 0, -1), None]

    def test_writers_of_other_tasks_are_no_hindrance(self, store: Store) -> None:
        def work(me: int) -> None:
            writer = Writer(store, f"task-{me}", guard=store.acquire(f"task-{me}", b"me").guard)
            for i in range(20 * self.scale):
                writer.save(obj(b"%d" % i))
                call = writer.settle(writer.call())
                assert call.version == 2

        _in_threads(8, work)
        for me in range(8):
            rows = store.headers(f"task-{me}")
            assert [row.seq for row in rows] == list(range(20 * self.scale, 0, -1))
            calls = store.calls(f"task-{me}")[0]
            assert [row.base_seq for row in calls] == list(range(1, 20 * self.scale + 1))

    def test_a_sweep_beside_savers_breaks_no_checkpoint(self, store: Store) -> None:
        stop = threading.Event()

        def save(me: int) -> None:
            things = [obj(b"%d" % i) for i in range(10)]
            writer = Writer(store, branch=f"b{me}")
            try:
                for i in range(40 * self.scale):
                    # Each state drops objects that a later one has again: what a sweep may take at the wrong moment.
                    top = things[i % 5 :: 2]
                    writer.save(*top)
                    writer.save(*top, objects=())
                    found = store.read("task", branch=f"b{me}")
                    assert found is not None
                    assert found[1] == reached(store, top)
            finally:
                stop.set()

        def sweep() -> None:
            while not stop.is_set():
                store.prune("task", [row.seq for row in store.headers("task")])

        Writer(store).save()
        _in_threads(5, lambda me: save(me) if me < 4 else sweep())
        for branch in store.branches("task"):
            found = store.read("task", branch=branch.name)
            assert found is not None
            assert len(found[1]) * 16 == len(found[0].refs)

    # -- transactional tools

    def _transacting(self, store: Store) -> tuple[Writer, Guard, Grant]:
        if not store.transactional_tools:
            pytest.skip("transactional_tools is False")
        with store.connection() as connection:
            connection.execute("CREATE TABLE effects (what TEXT NOT NULL)")
        grant = store.acquire("task", b"me")
        writer = Writer(store, guard=grant.guard)
        writer.save()
        return writer, grant.guard, grant

    def test_without_transactional_tools_the_error_says_what_to_do(self, store: Store) -> None:
        if store.transactional_tools:
            pytest.skip("transactional_tools is True")
        with pytest.raises(UsageError, match="transactional"):
            store.transact("task", Guard(1, "x"), call_row(1), lambda _: Commit(task="task", id="x"))
        with pytest.raises(UsageError):
            store.connection()

    def test_effect_and_result_land_together(self, store: Store) -> None:
        writer, guard, _ = self._transacting(store)
        call = writer.call(effect="transactional")

        def body(connection: Any) -> Commit:
            connection.execute("INSERT INTO effects VALUES ('sent')")
            return _settled(writer, call)

        done = store.transact("task", guard, call, body)
        assert done.calls[0].status == "succeeded"
        assert store.calls("task")[0] == list(done.calls)
        assert _effects(store) == ["sent"]

    def test_a_tool_that_raises_leaves_neither_effect_nor_result(self, store: Store) -> None:
        writer, guard, _ = self._transacting(store)
        call = writer.call(effect="transactional")
        before = dump(store)

        def body(connection: Any) -> Commit:
            connection.execute("INSERT INTO effects VALUES ('sent')")
            raise ZeroDivisionError("in the middle")

        with pytest.raises(ZeroDivisionError, match="in the middle"):
            store.transact("task", guard, call, body)
        assert _effects(store) == []
        assert dump(store) == before
        writer.settle(call)

    def test_what_a_tool_raises_comes_out_as_it_is(self, store: Store) -> None:
        writer, guard, _ = self._transacting(store)
        call = writer.call(effect="transactional")
        raised: list[BaseException] = []

        def nonsense(connection: Any) -> None:
            connection.execute("INSERT INTO effects VALUES (NULL)")  # against a constraint: the driver's own error

        def unavailable(connection: Any) -> None:
            raise Unavailable("the tool's other service", unknown=True, landed=False)

        def lost(connection: Any) -> None:
            raise LeaseLost("the tool says so")

        def interrupt(connection: Any) -> None:
            raise KeyboardInterrupt

        for tool in (nonsense, unavailable, lost, interrupt):

            def body(connection: Any, tool: Callable[[Any], None] = tool) -> Commit:
                try:
                    tool(connection)
                except BaseException as error:
                    raised.append(error)
                    raise
                raise AssertionError("it did not raise")

            before = dump(store)
            with pytest.raises((Exception, KeyboardInterrupt)) as caught:
                store.transact("task", guard, call, body)
            assert caught.value is raised[-1]
            assert dump(store) == before
        writer.settle(call)

    def test_a_commit_that_is_refused_takes_the_effect_with_it(self, store: Store) -> None:
        writer, guard, _ = self._transacting(store)
        call = writer.call(effect="transactional")

        def body(connection: Any) -> Commit:
            connection.execute("INSERT INTO effects VALUES ('sent')")
            return replace(_settled(writer, call), calls=_settled(writer, replace(call, version=9)).calls)

        with pytest.raises(Conflict):
            store.transact("task", guard, call, body)
        assert _effects(store) == []

    def test_nothing_runs_for_a_guard_or_call_that_is_no_longer_so(self, store: Store) -> None:
        writer, guard, _ = self._transacting(store)
        call = writer.call(effect="transactional")

        def body(connection: Any) -> Commit:
            raise AssertionError("it ran")

        with pytest.raises(LeaseLost):
            store.transact("task", Guard(guard.fence, "0" * 32), call, body)
        with pytest.raises(Conflict):
            store.transact("task", guard, replace(call, version=9), body)
        with pytest.raises(NotFound):
            store.transact("task", guard, replace(call, no=99), body)
        writer.settle(call)
        with pytest.raises(Conflict):
            store.transact("task", guard, call, body)

    @pytest.mark.parametrize("statement", ["COMMIT", "END", "ROLLBACK", "BEGIN"])
    def test_a_tool_cannot_end_the_transaction(self, store: Store, statement: str) -> None:
        writer, guard, _ = self._transacting(store)
        call = writer.call(effect="transactional")
        before = dump(store)

        def body(connection: Any) -> Commit:
            connection.execute("INSERT INTO effects VALUES ('sent')")
            connection.execute(statement)
            return _settled(writer, call)

        with pytest.raises(Exception, match=r"."):
            store.transact("task", guard, call, body)
        assert _effects(store) == []
        assert dump(store) == before
        assert writer.save().seq == 2

    def test_a_tool_may_roll_back_a_part_of_its_own(self, store: Store) -> None:
        writer, guard, _ = self._transacting(store)
        call = writer.call(effect="transactional")

        def body(connection: Any) -> Commit:
            connection.execute("INSERT INTO effects VALUES ('one')")
            connection.execute("SAVEPOINT mine")
            connection.execute("INSERT INTO effects VALUES ('two')")
            connection.execute("ROLLBACK TO mine")
            connection.execute("RELEASE mine")
            connection.execute("INSERT INTO effects VALUES ('three')")
            return _settled(writer, call)

        store.transact("task", guard, call, body)
        assert _effects(store) == ["one", "three"]

    def test_a_connection_sees_the_tools_tables_and_leaves_the_store_usable(self, store: Store) -> None:
        writer, _, _ = self._transacting(store)

        def fail() -> None:
            with store.connection() as connection:
                connection.execute("INSERT INTO effects VALUES ('kept?')")
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        assert writer.save().seq == 2

    def test_a_repeated_transaction_is_refused(self, store: Store) -> None:
        writer, guard, _ = self._transacting(store)
        call = writer.call(effect="transactional")

        def body(connection: Any) -> Commit:
            connection.execute("INSERT INTO effects VALUES ('sent')")
            return _settled(writer, call)

        store.transact("task", guard, call, body)
        with pytest.raises(Conflict):
            store.transact("task", guard, call, body)
        assert _effects(store) == ["sent"]

    def test_journal_commits_carry_objects(self, store: Store) -> None:
        needs_chunks(store)
        writer = Writer(store)
        writer.save(*tree("a"))
        things = tree("args")
        commit = Commit(task="task", id=new_id(), stands_on=writer.head, objects=tuple(things))
        row = call_row(1, args_refs=things[0].name + tree("a")[0].name)
        done = writer.write(row, objects=commit.objects, stands_on=commit.stands_on)
        assert store.calls("task") == (list(done.calls), {o.name: o for o in (*things, *tree("a"))})
        refused(store, replace(commit, guard=Guard(9, "x")), LeaseLost)


def _settled(writer: Writer, call: Any) -> Commit:
    from safepoint.rows import CallWrite

    row = replace(call, status="succeeded", result=b"r", finished_at=9)
    return Commit(task=writer.task, id=new_id(), guard=writer.guard, calls=(CallWrite(row, "ended"),))


def _effects(store: Store) -> list[str]:
    with store.connection() as connection:
        return [row[0] for row in connection.execute("SELECT what FROM effects")]


def _in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run ``work(0)`` to ``work(count - 1)`` at the same time; the first error of any of them is raised here."""
    errors: list[BaseException] = []
    gate = threading.Barrier(count)

    def run(me: int) -> None:
        gate.wait()
        try:
            work(me)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(me,)) for me in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]

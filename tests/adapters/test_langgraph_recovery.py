"""A newest checkpoint that is damaged, blocks that have a thread to themselves, what retention leaves, and versions that are not known."""

from __future__ import annotations

import asyncio
import logging
import operator
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import apsw
import pytest
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.graph import START, StateGraph
from typing_extensions import TypedDict

import safepoint
from safepoint import Conflict, Damaged, LeaseHeld, Retention, UsageError
from safepoint.adapters import langgraph
from safepoint.adapters.langgraph import SafepointSaver

CONFIG: Any = {"configurable": {"thread_id": "t"}}


class Items(TypedDict):
    items: Annotated[list[str], operator.add]


def joined(there: list[str], new: list[str]) -> list[str]:
    """A subgraph gives back what it was given, too."""
    return there + [item for item in new if item not in there]


class Joined(TypedDict):
    items: Annotated[list[str], joined]


def graph(saver: SafepointSaver, body: Any = lambda _: {"items": ["n"]}) -> Any:
    return StateGraph(Items).add_node("n", body).add_edge(START, "n").compile(checkpointer=saver)


def elsewhere(saver: SafepointSaver, item: str, config: Any = CONFIG) -> None:
    """Another request: in a thread that knows nothing of this run, and after what this one has put so far."""
    time.sleep(0.3)
    thread = threading.Thread(target=lambda: graph(saver).invoke({"items": [item]}, config))
    thread.start()
    thread.join()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "g.db"


def damaged(path: Path) -> None:
    """Two turns, and then a byte of the newest root is another one."""
    with SafepointSaver(f"sqlite:///{path}") as saver:
        for turn in ("a", "b"):
            graph(saver).invoke({"items": [turn]}, CONFIG)
    conn = apsw.Connection(str(path))
    ((seq, root),) = conn.execute("SELECT seq, root FROM sp_checkpoints ORDER BY seq DESC LIMIT 1").fetchall()
    assert isinstance(root, bytes)
    at = root.rindex(b"n")
    conn.execute("UPDATE sp_checkpoints SET root = ? WHERE seq = ?", (root[:at] + b"m" + root[at + 1 :], seq))
    conn.close()


def test_a_damaged_head_names_the_newest_sound_one(path: Path) -> None:
    damaged(path)
    with SafepointSaver(f"sqlite:///{path}") as saver:
        with pytest.raises(Damaged, match="t@5"):
            graph(saver).invoke({"items": ["c"]}, CONFIG)
        with pytest.raises(Damaged):
            graph(saver).get_state(CONFIG)
        sound = saver.cp.list_checkpoints("t")[1]
        old = graph(saver).get_state({"configurable": {"thread_id": "t", "checkpoint_id": sound.id}})
        assert old.values["items"] == ["a", "n", "b"]


def test_auto_goes_on_from_it_and_says_so(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    damaged(path)
    with SafepointSaver(f"sqlite:///{path}", recover="auto") as saver:
        with caplog.at_level(logging.WARNING, "safepoint"):
            out = graph(saver).invoke({"items": ["c"]}, CONFIG)
        # The turn that was damaged is lost, and nothing before it.
        assert out["items"] == ["a", "n", "b", "c", "n"]
        assert "t@6: damaged" in caplog.text or "skipped 6" in caplog.text
        assert [b.name for b in saver.cp.branches("t") if b.current] == ["main~1"]
        assert graph(saver).get_state(CONFIG).values["items"] == out["items"]
        assert len(list(graph(saver).get_state_history(CONFIG))) == 8, "all but the damaged one"


def test_what_a_fallback_passed_over_is_on_record_and_of_two_fallbacks_one_has_lost(path: Path) -> None:
    damaged(path)
    with SafepointSaver(f"sqlite:///{path}", recover="auto") as saver:
        both = threading.Barrier(2)
        found: list[Any] = []

        def request(item: str) -> None:
            def body(state: Items) -> Any:
                both.wait(10)
                return {"items": [item]}

            try:
                found.append(graph(saver, body).invoke({"items": ["in"]}, CONFIG, durability="exit")["items"])
            except Conflict as error:
                found.append(error)

        threads = [threading.Thread(target=request, args=(item,)) for item in "xy"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(type(f).__name__ for f in found) == ["Conflict", "list"]
        (won,) = [f for f in found if isinstance(f, list)]
        assert graph(saver).get_state(CONFIG).values["items"] == won
        assert {b.name for b in saver.cp.branches("t")} == {"main", "main~1"}
        # Only in what was put first: what follows it is a line like any other, in which a run can lose.
        graph(saver).invoke({"items": ["d"]}, CONFIG)
        notes = [info.metadata.get("safepoint", {}).get("recovered") for info in saver.cp.list_checkpoints("t")]
        assert [note for note in notes if note] == [{"from": 5, "skipped": [6]}]
        newest = saver.get_tuple(CONFIG)
        assert newest is not None
        assert "safepoint" not in newest.metadata


def test_the_error_of_a_put_that_a_node_hides_is_in_the_log(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with SafepointSaver(f"sqlite:///{path}") as saver:

        def overtaken(state: Items) -> Any:
            elsewhere(saver, "other")
            return {"items": ["mine"]}

        def failing(state: Items) -> Any:
            time.sleep(0.3)  # the put of the step before has failed by now, and nobody has been told
            raise ValueError("the node's own")

        builder = StateGraph(Items).add_node("a", overtaken).add_node("b", failing).add_edge(START, "a").add_edge("a", "b")
        with caplog.at_level(logging.WARNING, "safepoint"), pytest.raises((ValueError, Conflict)):
            builder.compile(checkpointer=saver).invoke({"items": ["a"]}, CONFIG, durability="async")
        assert "put of t/" in caplog.text
        assert "Conflict" in caplog.text
        assert graph(saver).get_state(CONFIG).values["items"] == ["a", "other", "n"]


def test_a_lost_update_is_refused_and_the_switch_lets_it_be(path: Path) -> None:
    for conflicts in ("refuse", "fork"):
        with SafepointSaver(f"sqlite:///{path}", conflicts=conflicts) as saver:
            config: Any = {"configurable": {"thread_id": conflicts}}
            ran: list[str] = []

            def overtaken(state: Items, saver: SafepointSaver = saver, at: Any = config, ran: list[str] = ran) -> Any:
                ran.append("n")
                elsewhere(saver, "other", at)
                return {"items": ["mine"]}

            if conflicts == "refuse":
                with pytest.raises(Conflict):
                    graph(saver, overtaken).invoke({"items": ["a"]}, config)
                # What is put by hand, by the very code whose run has lost, is of no run.
                bare = empty_checkpoint()
                asked: Any = {"configurable": {"thread_id": "by hand", "checkpoint_ns": ""}}
                assert (
                    saver.put(asked, bare, {"source": "input", "step": -1}, {})["configurable"]["checkpoint_id"] == bare["id"]
                )
                assert graph(saver).get_state(config).values["items"] == ["a", "other", "n"]
            else:
                assert graph(saver, overtaken).invoke({"items": ["a"]}, config)["items"] == ["a", "mine"]
                assert {b.name for b in saver.cp.branches(conflicts)} == {"main", "main~1"}
            assert ran == ["n"]


def test_a_history_goes_on_past_a_damaged_value(path: Path) -> None:
    with SafepointSaver(f"sqlite:///{path}") as saver:
        for turn in ("a", "b"):
            graph(saver, lambda _: {"items": ["n" * 600]}).invoke({"items": [turn * 600]}, CONFIG)
    conn = apsw.Connection(str(path))
    ((k, data),) = conn.execute(
        "SELECT rowid, data FROM sp_objects WHERE instr(data, ?) ORDER BY rowid DESC LIMIT 1", (b"nnnn",)
    )
    assert isinstance(data, bytes)
    conn.execute("UPDATE sp_objects SET data = ? WHERE rowid = ?", (data.replace(b"nnnn", b"nmnn", 1), k))
    conn.close()
    with SafepointSaver(f"sqlite:///{path}", recover="auto") as saver:
        before = graph(saver).invoke({"items": ["c"]}, CONFIG)["items"]
        found = [state.values["items"] for state in graph(saver).get_state_history(CONFIG)]
        assert found[0] == before
        assert all(items == before[: len(items)] for items in found)


def test_a_block_keeps_others_out_and_lets_its_own_in(path: Path) -> None:
    with SafepointSaver(f"sqlite:///{path}") as saver, SafepointSaver(f"sqlite:///{path}") as other:
        with saver.exclusive("t"):
            graph(saver).invoke({"items": ["a"]}, CONFIG)
            for refused in (other, saver):
                found: list[Any] = []

                def outside(refused: SafepointSaver = refused, found: list[Any] = found) -> None:
                    for way in (lambda: graph(refused).invoke({"items": ["x"]}, CONFIG), refused.exclusive("t").__enter__):
                        try:
                            found.append(way())
                        except LeaseHeld as error:
                            found.append(error)

                thread = threading.Thread(target=outside)
                thread.start()
                thread.join()
                assert [type(f) for f in found] == [LeaseHeld, LeaseHeld]
            with saver.exclusive("t"):  # once more in itself
                graph(saver).invoke({"items": ["b"]}, CONFIG)
        graph(other).invoke({"items": ["c"]}, CONFIG)
        assert graph(saver).get_state(CONFIG).values["items"] == ["a", "n", "b", "n", "c", "n"]

        async def live() -> list[str]:
            async def request(name: str, wait: float) -> str:
                await asyncio.sleep(wait)
                try:
                    async with saver.exclusive("u"):
                        await graph(saver, slow).ainvoke({"items": [name]}, {"configurable": {"thread_id": "u"}})
                        return "done"
                except LeaseHeld:
                    return "refused"

            async def slow(state: Items) -> Any:
                await asyncio.sleep(0.4)
                return {"items": ["n"]}

            return list(await asyncio.gather(request("a", 0), request("b", 0.1)))

        assert asyncio.run(live()) == ["done", "refused"]


def test_a_block_that_was_taken_over_writes_nothing(path: Path) -> None:
    with SafepointSaver(f"sqlite:///{path}") as saver, SafepointSaver(f"sqlite:///{path}") as other:
        with saver.exclusive("t"):
            graph(saver).invoke({"items": ["a"]}, CONFIG)
            with other.exclusive("t", steal=True):
                with pytest.raises(safepoint.LeaseLost):
                    graph(saver).invoke({"items": ["b"]}, CONFIG)
                graph(other).invoke({"items": ["c"]}, CONFIG)
        assert graph(saver).get_state(CONFIG).values["items"] == ["a", "n", "c", "n"]


@pytest.mark.parametrize("stateful", [False, True])
def test_retention_takes_the_namespaces_of_calls_along(path: Path, stateful: bool) -> None:
    with SafepointSaver(f"sqlite:///{path}", retention=Retention(keep_latest=6)) as saver:
        inner = StateGraph(Joined).add_node("i", lambda _: {"items": ["i"]}).add_edge(START, "i")
        sub = inner.compile(checkpointer=True if stateful else None)
        outer = StateGraph(Joined).add_node("sub", sub).add_edge(START, "sub").compile(checkpointer=saver)
        for turn in range(30):
            outer.invoke({"items": [str(turn)]}, CONFIG)
        rows = saver.store.headers("t", space=None)
        roots = [row for row in rows if row.space == ""]
        assert 6 <= len(roots) <= 6 + 8 + 3
        if stateful:
            assert {row.space for row in rows} == {"", "sub"}
        else:
            assert len({row.space for row in rows}) <= len(roots)
        assert len(rows) <= 3 * len(roots) + 3
        before = outer.get_state(CONFIG).values["items"]
        assert outer.invoke({"items": ["z"]}, CONFIG)["items"][: len(before)] == before
        assert saver.cp.verify().ok


def test_versions_that_are_not_known_are_refused() -> None:
    langgraph._check("langgraph", "1.2.24")
    for package, version in (
        ("langgraph", "2.0.0"),
        ("langgraph", "0.6.1"),
        ("langgraph-checkpoint", "5.0"),
        ("langchain-core", "0.3"),
    ):
        with pytest.raises(UsageError, match=f"does not know {package} {version}"):
            langgraph._check(package, version)


def test_options_and_what_is_closed(tmp_path: Path) -> None:
    for wrong in ({"conflicts": "maybe"}, {"recover": "manual"}):
        with pytest.raises(UsageError, match="is not known"):
            SafepointSaver("memory://", **wrong)  # type: ignore[arg-type]
    with safepoint.open("memory://") as cp:
        with pytest.raises(UsageError, match="lease"):
            SafepointSaver(cp, lease=30)
        saver = SafepointSaver(cp)
        graph(saver).invoke({"items": ["a"]}, CONFIG)
        saver.close()
        assert cp.load_latest("t") is not None, "a checkpointer that was given is not closed"


@pytest.fixture(autouse=True)
def no_other_driver_is_used() -> Iterator[None]:
    """The standard library's SQLite must not open our files: nothing here does."""
    yield
    assert sqlite3.threadsafety >= 0

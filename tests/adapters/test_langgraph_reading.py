"""Reading when something is wrong, and reading much: what is damaged by the store's own measure, flaky reads, filters, cursors."""

from __future__ import annotations

import contextlib
import copy
import logging
import pickle
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from langgraph.checkpoint.base import Checkpoint, copy_checkpoint, empty_checkpoint

from safepoint import Retention
from safepoint.adapters.langgraph import SafepointSaver
from safepoint.errors import Damaged, Unavailable
from tests.support import raw, spoil
from tests.support.graphs.subjects import Subject

Config = dict[str, Any]


def config(thread: str, id: str | None = None, ns: str = "") -> Any:
    return {"configurable": {"thread_id": thread, "checkpoint_ns": ns} | ({} if id is None else {"checkpoint_id": id})}


def put(saver: Any, thread: str, after: str | None = None, ns: str = "", root: str | None = None, **values: Any) -> str:
    """A checkpoint by hand, and its id."""
    made: Checkpoint = empty_checkpoint()
    metadata, seen = values.pop("metadata", {}), values.pop("versions_seen", {})
    made["channel_values"], made["versions_seen"] = values, seen
    made["channel_versions"] = dict.fromkeys(values, 1)
    facts: Any = {"source": "loop", "step": 0, "parents": {} if root is None else {"": root}, **metadata}
    done = saver.put(config(thread, after, ns), made, facts, made["channel_versions"])
    return str(done["configurable"]["checkpoint_id"])


def chain(saver: Any, thread: str, count: int, ns: str = "", **values: Any) -> list[str]:
    ids: list[str] = []
    for no in range(count):
        ids.append(put(saver, thread, ids[-1] if ids else None, ns, no=no, **values))
    return ids


@pytest.fixture
def thread() -> str:
    return uuid.uuid4().hex


def auto(there: Subject) -> Any:
    """A saver of another process, that goes on from what is sound."""
    return there.saver(recover="auto")


def tear(there: Subject, thread: str, seq: int) -> None:
    """Damage the newest checkpoint as this kind of store finds it by itself, when it is asked for it."""
    if there.name == "file":
        folder = Path(there.url.removeprefix("file://"))
        (document,) = [p for p in folder.rglob(f"*{seq}.json") if thread in str(p)]
        document.write_bytes(document.read_bytes()[:100])
    elif raw.kind_of(there.url) in spoil.HASHED:
        spoil._field(there.url, thread, b"h:%d" % seq, lambda old: None)
    else:
        spoil._sql(there.url, "DELETE FROM {s}sp_checkpoints WHERE seq = {at} AND task = {task}", thread, at=seq)


def test_what_the_store_itself_calls_damaged_is_fallen_back_from(
    there: Subject, thread: str, caplog: pytest.LogCaptureFixture
) -> None:
    if there.name == "memory":
        return  # nothing but a program can change what is there
    ids = chain(there.saver(), thread, 3)
    tear(there, thread, 3)
    with pytest.raises(Damaged, match=f"{thread}@2.*{ids[1]}"):
        there.saver().get_tuple(config(thread))
    with caplog.at_level(logging.WARNING, "safepoint"):
        found = auto(there).get_tuple(config(thread))
    assert found.checkpoint["id"] == ids[1]
    assert "skipped 3" in caplog.text
    # A thread that cannot be read keeps nobody from removing a run from the others.
    other = put(there.saver(), f"z{thread}", metadata={"run_id": thread})
    assert there.saver().get_tuple(config(f"z{thread}")).checkpoint["id"] == other
    with contextlib.suppress(Damaged):  # where what a deletion looks at is not all there
        there.saver().delete_for_runs([thread])
    assert there.saver().get_tuple(config(f"z{thread}")) is None
    there.saver().delete_thread(thread)


def test_what_may_well_be_sound_is_not_passed_over(there: Subject, thread: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flaky read of the second newest is none of a damaged one: with the third, a turn would be lost."""
    ids = chain(there.saver(), thread, 3)
    saver = auto(there)
    damage(there, thread, 3)
    read, calls = saver.store.read, []

    def flaky(task: str, **named: Any) -> Any:
        calls.append(named)
        if named.get("seq") == 2 and len(calls) < 3:
            raise Unavailable("no answer", "", "Try again.")
        return read(task, **named)

    monkeypatch.setattr(saver.store, "read", flaky)
    monkeypatch.setattr(saver, "auto", True)
    with pytest.raises(Unavailable):
        saver.get_tuple(config(thread))
    assert saver.get_tuple(config(thread)).checkpoint["id"] == ids[1]
    monkeypatch.setattr(saver, "auto", False)
    calls.clear()
    with pytest.raises(Damaged):  # what is certain; the remedy can wait
        saver.get_tuple(config(thread))


def damage(there: Subject, thread: str, seq: int) -> None:
    """Damage a checkpoint where it is read, and not where it is listed."""
    if there.name == "file":
        tear(there, thread, seq)
    else:
        spoil.lengthen_root(there.saver() if there.name == "memory" else there.url, thread, seq)


def test_what_was_deleted_is_nothing_to_fall_back_to(there: Subject, thread: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = chain(there.saver(), thread, 2, metadata={"run_id": "kept"})
    # Deleted, and kept unseen for the one after it, whose delta channel has its writes from here.
    ids.append(put(there.saver(), thread, ids[-1], no=2, metadata={"run_id": "gone"}))
    needs = {"run_id": "kept", "counters_since_delta_snapshot": {"delta": [1, 1]}}
    ids.append(put(there.saver(), thread, ids[-1], no=3, metadata=needs))
    there.saver().delete_for_runs(["gone"])
    assert [row.seq for row in there.saver().store.headers(thread)] == [4, 3, 2, 1]
    damage(there, thread, 4)
    saver = auto(there)
    monkeypatch.setattr(saver, "auto", True)
    assert saver.get_tuple(config(thread)).checkpoint["id"] == ids[1]


def test_a_filter_looks_into_metadata_that_no_header_holds(there: Subject, thread: str) -> None:
    saver = there.saver()
    for no in range(3):
        put(saver, thread, metadata={"big": "x" * 9000, "mine": no}, no=no)
        put(saver, thread, metadata={"mine": no}, no=no)
    for wanted in ({"mine": 1}, {"mine": 1, "big": "x" * 9000}):
        found = list(saver.list(config(thread), filter=wanted))
        assert [t.metadata["mine"] for t in found] == [1] * (3 - len(wanted))
    assert not list(saver.list(config(thread), filter={"big": "y"}))


def counted(saver: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many headers each ``headers`` gave, and 0 for each whole read, from now on."""
    seen: list[int] = []
    headers, read = saver.store.headers, saver.store.read

    def counting(*args: Any, **named: Any) -> Any:
        before = len(seen)
        rows = headers(*args, **named)
        seen[before:] = [max(1, len(rows))]  # whatever the store does for it inside
        return rows

    def reading(*args: Any, **named: Any) -> Any:
        seen.append(0)
        return read(*args, **named)

    monkeypatch.setattr(saver.store, "headers", counting)
    monkeypatch.setattr(saver.store, "read", reading)
    return seen


def test_a_cursor_costs_what_it_passes_over_and_not_the_whole_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    with SafepointSaver("memory://") as saver:
        roots: list[str] = []
        subs: list[str] = []
        for no in range(300):
            roots.append(put(saver, "t", roots[-1] if roots else None, no=no))
            subs.append(put(saver, "t", subs[-1] if subs else None, "sub", roots[-1], no=no))
        seen = counted(saver, monkeypatch)

        def ids(before: str, ns: str | None, limit: int | None = 1) -> list[str]:
            at = config("t", ns=ns or "")
            if ns is None:
                del at["configurable"]["checkpoint_ns"]
            seen.clear()
            return [t.checkpoint["id"] for t in saver.list(at, before=config("t", before), limit=limit)]

        for at in (1, 150, 290):
            assert ids(roots[at], "") == [roots[at - 1]]
            assert sum(seen) <= 2
            assert ids(subs[at], "sub") == [subs[at - 1]]
            assert sum(seen) <= 2
            assert ids(roots[at], "sub") == [subs[at - 1]]
            assert sum(seen) <= 4 * (300 - at) + 3 * 32
            assert ids(roots[at], None, 2) == [subs[at - 1], roots[at - 1]]
            assert seen.count(0) <= 2
        assert ids(roots[7], None, None) == [id for no in range(6, -1, -1) for id in (subs[no], roots[no])]
        # By its id, with and without a namespace.
        nowhere: Any = {"configurable": {"thread_id": "t", "checkpoint_id": subs[3]}}
        for given in (config("t", subs[3], "sub"), nowhere):
            seen.clear()
            assert [t.checkpoint["id"] for t in saver.list(given)] == [subs[3]]
            assert sum(seen) == 0
            assert len(seen) <= 2


def test_a_list_reads_no_state_whatever_the_number_of_nodes(
    there: Subject, thread: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions that are too large to lie beside the rest are read when they are looked at."""
    nodes = {f"node-{no}": {f"branch:to:node-{no}": no} for no in range(30)}
    values: Any = {f"branch:to:node-{no}": None for no in range(30)}
    saver = there.saver()
    for no in range(3):
        put(saver, thread, no=no, big=[{"item": "x" * 300}] * 5, versions_seen=nodes, **values)
    seen = counted(saver, monkeypatch)
    found = list(saver.list(config(thread), limit=10))
    assert [t.metadata["step"] for t in found] == [0] * 3
    assert seen.count(0) == 0, "no whole read"
    for tuple_ in found:
        same = saver.get_tuple(tuple_.config)
        assert tuple_.checkpoint == same.checkpoint
        assert copy.deepcopy(tuple_.checkpoint) == same.checkpoint
        assert copy_checkpoint(tuple_.checkpoint) == copy_checkpoint(same.checkpoint)
        assert pickle.loads(pickle.dumps(tuple_.checkpoint["versions_seen"])) == nodes
        versions = tuple_.checkpoint["channel_versions"]
        assert saver.get_next_version(max(versions.values()), None) == 2
        versions["new"] = 5
        del versions["no"]
        assert ("no" in versions, versions | {"a": 1} == {"a": 1} | versions, len(versions)) == (False, True, 32)


# -- removing


class Killed(BaseException):
    """In place of a death between two calls of the store."""


def test_a_deletion_that_dies_is_whole_or_not_at_all_and_the_next_one_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with SafepointSaver("memory://") as saver:
        ids = chain(saver, "t", 600, metadata={"run_id": "a"})
        kept = [put(saver, "t", ids[-1], no=1, metadata={"run_id": "b"})]
        late = put(saver, "t", kept[-1], no=2, metadata={"run_id": "a"})

        def visible() -> list[str]:
            return [t.checkpoint["id"] for t in saver.list(config("t"))]

        calls = {"commit": 0, "prune": 0}
        real = {name: getattr(saver.store, name) for name in calls}
        for killed in ("commit", "prune"):

            def dying(*args: Any, name: str = killed, **named: Any) -> Any:
                calls[name] += 1
                if calls[name] == 2 or name == "prune":
                    raise Killed
                return real[name](*args, **named)

            monkeypatch.setattr(saver.store, killed, dying)
        with pytest.raises(Killed):
            saver.delete_for_runs(["a"])
        monkeypatch.undo()
        assert visible() == kept, "all went at once, although the process died"
        assert len(saver.store.headers("t")) == 602
        # What is left over is nobody's newest one, and goes with the next deletion.
        saver.prune(["t"])
        assert visible() == kept
        assert [row.id for row in saver.store.headers("t")] == kept
        assert saver.get_tuple(config("t")).checkpoint["id"] == kept[0]
        assert late not in visible()


def test_pruning_keeps_the_newest_sound_one(there: Subject, thread: str) -> None:
    saver = there.saver()
    ids = chain(saver, thread, 5)
    damage(there, thread, 5)
    saver = there.saver()
    saver.prune([thread])
    assert [row.seq for row in saver.store.headers(thread)] == [5, 4]
    assert saver.get_tuple(config(thread, ids[3])).checkpoint["id"] == ids[3]


@pytest.mark.parametrize("rules", [Retention(max_age=timedelta(days=1)), Retention(keep_latest=4, max_age=timedelta(0))])
def test_retention_looks_at_a_few_headers_for_each_put(rules: Retention, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are that age lets stay; and what is over age is gone by and by."""
    with SafepointSaver("memory://", retention=rules) as saver:
        seen = counted(saver, monkeypatch)
        chain(saver, "t", 800)
        assert sum(seen) <= 8 * 800
        assert (len(saver.store.headers("t")) < 100) == (rules.keep_latest == 4)
        seen.clear()
        again = SafepointSaver(saver.cp, retention=rules)  # processes that live for one put each
        last = saver.store.headers("t", limit=1)[0].id
        for no in range(64):
            again._records.after_fork()
            last = put(again, "t", last, no=no)
        assert sum(seen) <= 64 * 110
        again.close()

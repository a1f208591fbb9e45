"""Databases of LangGraph's own savers become tasks: equal in everything, gone on from alike, and nothing that they name is called."""

from __future__ import annotations

import contextlib
import json
import pickle
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ormsgpack
import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.types import Send

import safepoint
from safepoint.adapters.langgraph import SafepointSaver, import_threads
from safepoint.cli.ending import run as command
from safepoint.errors import Conflict, Damaged, NotFound, RefusedType, SafepointError, UsageError
from tests.support.graphs import PROGRAMS, run_program
from tests.support.graphs.equal import differences, unequal
from tests.support.graphs.facts import difference
from tests.support.graphs.importable import CALLED, DECLARED, VALUES
from tests.support.graphs.raw import NULL, about, id_of, made, task_id, thread
from tests.support.graphs.subjects import Subject, run_on, subject
from tests.support.scale import SOAK, scale
from tests.support.seeds import fresh_rng
from tests.support.stores import KINDS, place

SAMPLE, FULL = {"sqlite": 3, "postgres": 2}, {"sqlite": 40, "postgres": 25}
ORDINARY = [name for name, p in PROGRAMS.items() if p.modes]


def url_of(there: Subject) -> str:
    return f"langgraph-sqlite:///{there.url}" if there.name == "peer-sqlite" else f"langgraph-{there.url}"


def saver(target: str, **options: Any) -> Any:
    """Ours, for configs that are plain dicts."""
    return SafepointSaver(target, **options)


@contextlib.contextmanager
def old(folder: Path, **options: Any) -> Iterator[SqliteSaver]:
    with SqliteSaver.from_conn_string(str(folder / "old.db")) as found:
        if options:
            found.serde = options["serde"]
        yield found


@pytest.fixture
def source(tmp_path: Path) -> str:
    return f"langgraph-sqlite:///{tmp_path / 'old.db'}"


@pytest.fixture
def target(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'new.db'}"


def raw(folder: Path, sql: str, *given: Any) -> list[Any]:
    conn = sqlite3.connect(folder / "old.db")
    try:
        with conn:
            return conn.execute(sql, given).fetchall()
    finally:
        conn.close()


def compared(theirs: Any, target: str, threads: list[str], **options: Any) -> list[str]:
    with saver(target, **options) as ours:
        return differences(theirs, ours, threads)


# -- whole databases of real graphs


@pytest.mark.scaled
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_graphs_go_on_alike(kind: str, tmp_path: Path) -> None:
    """A program runs on LangGraph's saver; what it left is imported and compared; then it runs once more, on its old threads, on both."""
    draw = fresh_rng()
    for name in draw.sample(ORDINARY, scale(SAMPLE[kind], FULL[kind])):
        program = PROGRAMS[name]
        way = draw.choice(program.modes), draw.choice(program.durabilities)
        folder = tmp_path / name
        folder.mkdir()
        with subject(f"peer-{kind}", folder) as there:
            run_on(there, program, *way, alone=True)
            target = f"sqlite:///{folder / 'new.db'}"
            report = import_threads(url_of(there), target, trust=["tests"])
            assert not report.refused, report.refused[0].error
            assert report.threads
            threads = [t.task_id for t in report.threads]
            assert not compared(there.saver(), target, threads, trust=["tests"]), (name, way)
            assert not import_threads(url_of(there), target, trust=["tests"]).changed
            expected = run_on(there, program, *way, alone=True)
            with saver(target, trust=["tests"]) as ours:
                seen = run_program(program, ours, *way)
            assert seen == expected, (name, way, difference(expected, seen))


def test_versions_go_on_in_their_own_format(tmp_path: Path, source: str, target: str) -> None:
    with old(tmp_path) as theirs:
        program = PROGRAMS["several_turns"]
        run_program(program, theirs, "sync", "sync")
        import_threads(source, target)
        last = theirs.get_tuple(thread("t")).checkpoint["channel_versions"]
        with saver(target) as ours:
            run_program(program, ours, "sync", "sync")
            now = ours.get_tuple(thread("t")).checkpoint["channel_versions"]
            assert max(last.values()) < max(now.values())
            assert all(isinstance(v, str) and len(v.partition(".")[0]) == 32 for v in now.values())


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "cluster" or SOAK])
def test_into_each_store(kind: str, tmp_path: Path, source: str) -> None:
    with old(tmp_path) as theirs:
        for name in ("replay_each", "messages"):
            run_program(PROGRAMS[name], theirs, "sync", "sync", alone=False)
        with place(kind, tmp_path) as there:
            report = import_threads(source, there.url, trust=["tests"])
            assert not report.refused
            threads = [t.task_id for t in report.threads]
            assert max(t.branches for t in report.threads) > 2
            assert not compared(theirs, there.url, threads, trust=["tests"])
            assert not import_threads(source, there.url, trust=["tests"]).changed
            with safepoint.open(there.url) as cp:
                for t in threads:
                    assert cp.verify(t).ok
                    assert {row.kind for row in cp.store.headers(t, space=None)} == {"import"}


# -- values


def test_values_of_every_kind(tmp_path: Path, source: str, target: str) -> None:
    """As LangGraph reads them; where it loses a class, as they were."""
    with old(tmp_path) as theirs:
        for name, (value, _) in VALUES.items():
            config = theirs.put(thread(name), made({"one": value, "many": [value, {"in": value}]}), about(), {})
            theirs.put_writes(config, [("many", [value]), ("one", value)], task_id(1), "path")
        CALLED.clear()
        report = import_threads(source, target, types=DECLARED)
        assert not CALLED
        assert {t.task_id: t.error for t in report.refused} == {}
        wrong: list[str] = []
        with saver(target, types=DECLARED) as ours:
            for name, (value, how) in VALUES.items():
                if how == "alike":
                    wrong += differences(theirs, ours, [name])
                found = ours.get_tuple(thread(name))
                values = found.checkpoint["channel_values"]
                if how == "itself":
                    wrong += unequal({"one": value, "many": [value, {"in": value}]}, dict(values), name)
                    wrong += unequal([value, value], [w[2][0] if w[1] == "many" else w[2] for w in found.pending_writes])
        assert not wrong
        assert any("__post_init__" in note for note in report.notes)


def test_json_rows(tmp_path: Path, source: str, target: str) -> None:
    """As LangGraph wrote them before it used MessagePack."""
    call = {"lc": 2, "type": "constructor"}
    values = {
        "messages": [
            {
                "lc": 1,
                "type": "constructor",
                "id": ["langchain", "schema", "messages", "HumanMessage"],
                "kwargs": {"content": "hi", "type": "human", "id": "1"},
            }
        ],
        "one": {**call, "id": ["uuid", "UUID"], "method": None, "args": ["0" * 32], "kwargs": {}},
        "when": {
            **call,
            "id": ["datetime", "datetime"],
            "method": "fromisoformat",
            "args": ["2024-01-02T03:04:05"],
            "kwargs": {},
        },
        "some": {**call, "id": ["builtins", "set"], "method": None, "args": [[1, 2]], "kwargs": {}},
        "send": [
            {**call, "id": ["langgraph", "constants", "Send"], "method": None, "args": [], "kwargs": {"node": "n", "arg": 1}}
        ],
        "plain": {"lc": 5, "type": "x", "id": [1]},
    }
    with old(tmp_path) as theirs:
        config = theirs.put(thread("t"), made({}), about(), {})
        checkpoint = {**made(values), "id": id_of(config)}
        raw(tmp_path, "UPDATE checkpoints SET type = 'json', checkpoint = ?", json.dumps(checkpoint).encode())
        assert not import_threads(source, target).refused
        with saver(target) as ours:
            found = dict(ours.get_tuple(config).checkpoint["channel_values"])
            assert found["messages"] == [HumanMessage("hi", id="1", type="human")]
            assert (found["some"], found["send"], found["plain"]) == ({1, 2}, [Send("n", 1)], values["plain"])
            assert (found["one"].int, found["when"].isoformat()) == (0, "2024-01-02T03:04:05")
            theirs_too = theirs.get_tuple(config).checkpoint["channel_values"]
            for name in ("messages", "one", "some", "plain"):
                assert not unequal(theirs_too[name], found[name])


def test_bare_rows(tmp_path: Path, source: str, target: str) -> None:
    with old(tmp_path) as theirs:
        config = theirs.put(thread("t"), made({"x": 1}), about(), {})
        theirs.put_writes(config, [("a", None), ("b", b"\0x"), ("c", bytearray(b"y"))], NULL)
        assert not import_threads(source, target).refused
        assert not compared(theirs, target, ["t"])


def test_the_comparison_is_exact() -> None:
    assert not unequal([{"a": (1, HumanMessage("a"))}], [{"a": (1, HumanMessage("a"))}])
    for a, b in ((1, True), (1, 1.0), ((1,), [1]), ({"a": 1}, {}), (HumanMessage("a"), HumanMessage("a", name=None))):
        assert unequal([a], [b])


# -- what is refused


class Other:
    """Nobody has declared it."""


def _exts(folder: Path) -> dict[str, Any]:
    """Instructions that LangGraph would follow, or that somebody might hope it does. Each would leave a mark."""
    mark = str(folder / "mark")

    def ext(code: int, *parts: Any) -> Any:
        return ormsgpack.Ext(code, ormsgpack.packb(parts, option=ormsgpack.OPT_NON_STR_KEYS, default=lambda e: e))

    deep: Any = ext(0, "os", "mkdir", mark)
    for _ in range(300):
        deep = ormsgpack.Ext(7, ormsgpack.packb(deep, default=lambda e: e))
    return {
        "single": ext(0, "os", "mkdir", mark),
        "positional": ext(1, "os", "mkdir", [mark]),
        "keywords": ext(2, "os", "mkdir", {"path": mark}),
        "method": ext(3, "pathlib", "Path", mark, "touch"),
        "method of a safe class": ext(3, "datetime", "datetime", "2020", "strptime"),
        "model 1": ext(4, "os", "mkdir", {"path": mark}),
        "model": ext(5, "os", "mkdir", {"path": mark}, "model_validate_json"),
        "import": ext(0, "this", "s", 1),
        "trusted function": ext(0, "tests.support.graphs.importable", "mark", mark),
        "no class": ext(0, "tests.support.graphs.importable", "VALUES", mark),
        "dotted": ext(0, "tests.support.graphs.importable", "Path.mkdir", mark),
        "in a message": ext(5, "langchain_core.messages.human", "HumanMessage", {"content": ext(0, "os", "mkdir", mark)}, ""),
        "in a set": ext(0, "builtins", "set", [ext(0, "os", "mkdir", mark)]),
        "a default": ext(0, "collections", "defaultdict", mark),
        "array of objects": ext(6, "|O", [1], "C", b"\0" * 8),
        "unknown code": ormsgpack.Ext(99, b"x"),
        "deep": deep,
        "not whole": ormsgpack.Ext(0, ormsgpack.packb(["os"])),
        "garbage": ormsgpack.Ext(0, b"\xc1"),
        "names": ext(0, 1, 2, 3),
        "wrong set": ext(0, "builtins", "set", 5),
        "wrong time": ext(2, "datetime", "time", {}),
        "wrong pattern": ext(1, "re", "compile", ["(", 0]),
        "pattern that prints": ext(1, "re", "compile", ["a", 128]),
        "wrong send": ext(1, "langgraph.types", "Send", [1, 2, 3, 4]),
        "wrong message": ext(5, "langchain_core.messages.human", "HumanMessage", ["x"], ""),
    }


def test_crafted_payloads_execute_nothing(tmp_path: Path, source: str, target: str) -> None:
    crafted = _exts(tmp_path)
    this = "this" in sys.modules
    with old(tmp_path) as theirs:
        for name, payload in crafted.items():
            for place_of in ("value", "write", "key"):
                config = theirs.put(thread(f"{name}, {place_of}"), made({"x": 1}), about(), {})
                whole = {**made({"x": [payload]}), "id": id_of(config)}
                if place_of == "key":
                    whole["channel_values"] = {"x": {"k": payload}}
                packed = ormsgpack.packb(whole, default=lambda e: e)
                if place_of == "write":
                    theirs.put_writes(config, [("x", 1)], task_id(1))
                    sql = "UPDATE writes SET value = ? WHERE thread_id = ?"
                    raw(tmp_path, sql, ormsgpack.packb([payload], default=lambda e: e), f"{name}, {place_of}")
                else:
                    raw(tmp_path, "UPDATE checkpoints SET checkpoint = ? WHERE thread_id = ?", packed, f"{name}, {place_of}")
        theirs.put(thread("sound"), made({"x": 1}), about(), {})
        config = theirs.put(thread("pickled"), made({"x": 1}), about(), {})
        theirs.put_writes(config, [("x", 1)], task_id(1))
        evil = b"cos\nmkdir\n(V" + str(tmp_path / "mark").encode() + b"\ntR."
        raw(tmp_path, "UPDATE writes SET type = 'pickle', value = ? WHERE thread_id = 'pickled'", evil)
        theirs.put(thread("json"), made({"x": 1}), about(), {})
        call = {"lc": 2, "type": "constructor", "id": ["os", "mkdir"], "args": [str(tmp_path / "mark")], "kwargs": {}}
        raw(
            tmp_path,
            "UPDATE checkpoints SET type = 'json', checkpoint = ? WHERE thread_id = 'json'",
            json.dumps({**made({"x": [call]}), "id": "x"}).encode(),
        )
    CALLED.clear()
    report = import_threads(source, target, types=DECLARED, trust=["tests"])
    assert [t.task_id for t in report.threads if t.error is None] == ["sound"]
    assert {type(t.error) for t in report.refused} == {RefusedType, Damaged}
    assert not (tmp_path / "mark").exists()
    assert ("this" in sys.modules) == this
    assert not CALLED
    assert pickle.loads(b"N.") is None  # what would have run it is there
    with safepoint.open(target) as cp:
        assert [t.task_id for t in cp.tasks()] == ["sound"]


@pytest.mark.scaled
def test_bytes_gone_bad(tmp_path: Path, source: str, target: str) -> None:
    """Whatever a database holds: a thread is refused, or taken and can be read or is told to be damaged; never anything else."""
    draw = fresh_rng()
    with old(tmp_path) as theirs:
        config = theirs.put(thread("t"), made({k: v for k, (v, _) in VALUES.items() if k != "errors"}), about(), {})
        theirs.put_writes(config, [("x", [HumanMessage("a"), Send("n", 1)])], task_id(1))
        ((good,),) = raw(tmp_path, "SELECT checkpoint FROM checkpoints")
        for i in range(scale(120, 3000)):
            bad = bytearray(good)
            for _ in range(draw.choice((1, 1, 2, 8))):
                at = draw.randrange(len(bad))
                what = draw.choice(("flip", "cut", "set"))
                if what == "cut":
                    del bad[at : at + draw.choice((1, 2, 40))]
                else:
                    bad[at] = draw.randrange(256) if what == "set" else bad[at] ^ 1 << draw.randrange(8)
            sql = "INSERT INTO checkpoints SELECT ?, checkpoint_ns, checkpoint_id, parent_checkpoint_id, type, ?, metadata FROM checkpoints"
            theirs.conn.execute(f"{sql} WHERE thread_id = 't'", (f"bad-{i}", bytes(bad)))
        theirs.conn.commit()
    CALLED.clear()
    report = import_threads(source, target, types=DECLARED)
    assert not CALLED
    assert {type(t.error) for t in report.refused} <= {RefusedType, Damaged}
    assert len(report.refused) < len(report.threads)
    with saver(target, types=DECLARED) as ours:
        for t in report.threads:
            if t.error is None:
                with contextlib.suppress(SafepointError):
                    dict(ours.get_tuple(thread(t.task_id)).checkpoint["channel_values"])


def test_a_refusal_says_where_and_what_can_be_done(tmp_path: Path, source: str, target: str) -> None:
    import tests.support.graphs.importable as own

    with old(tmp_path) as theirs:
        theirs.put(thread("sound"), made({"x": 1}), about(), {})
        config = theirs.put(thread("t"), made({"x": 1, "seen": [{"deep": own.Point(1)}]}), about(), {})
    report = import_threads(source, target)
    (refused,) = report.refused
    error = refused.error
    assert isinstance(error, RefusedType)
    assert error.details["task"] == "t"
    assert error.details["checkpoint"] == id_of(config)
    assert error.details["path"] == "channel 'seen'[0]['deep']"
    assert error.details["type"] == "tests.support.graphs.importable.Point"
    assert all(
        part in str(error) for part in ("'t'", id_of(config), "channel 'seen'[0]['deep']", "--trust tests.support.graphs")
    )
    assert [t.result for t in report.threads] == ["imported", "refused"]
    again = import_threads(source, target, trust=["tests.support.graphs.importable"])
    assert [t.result for t in again.threads] == ["unchanged", "imported"]


class _Xor:
    def encrypt(self, plaintext: bytes) -> tuple[str, bytes]:
        return "aes", bytes(b ^ 7 for b in plaintext)

    def decrypt(self, ciphername: str, ciphertext: bytes) -> bytes:
        assert ciphername == "aes"
        return bytes(b ^ 7 for b in ciphertext)


def test_encrypted_rows(tmp_path: Path, source: str, target: str) -> None:
    with old(tmp_path, serde=EncryptedSerializer(_Xor())) as theirs:
        config = theirs.put(thread("t"), made({"x": [HumanMessage("hi")]}), about(), {})
        theirs.put_writes(config, [("x", 1)], NULL)
        (refused,) = import_threads(source, target).refused
        assert "encrypted (aes)" in refused.error.why
        assert "cipher=" in refused.error.remedy
        assert not import_threads(source, target, cipher=_Xor()).refused
        assert not compared(theirs, target, ["t"])


# -- order, branches, parents


def test_what_clocks_hid_is_told(tmp_path: Path, source: str, target: str) -> None:
    """A host an hour behind goes on from the newest: its checkpoints have lower ids, and the old saver never loads them."""
    with old(tmp_path) as theirs:
        first = theirs.put(thread("t"), made({"x": 1}, id="5"), about(-1), {})
        fork = theirs.put(first, made({"x": 9}, id="6"), about(0), {})
        newest = theirs.put(first, made({"x": 2}, id="8"), about(0), {})
        lost = theirs.put(newest, made({"x": 3}, id="4"), about(1), {})
        lost = theirs.put(lost, made({"x": 4}, id="45"), about(2), {})
        theirs.put(newest, made({"x": 5}, id="3"), about(1), {})
        sub = theirs.put(thread("u", "sub"), made({"x": 1}, id="2"), about(), {})
        theirs.put(sub, made({"x": 2}, id="1"), about(), {})
        t, u = import_threads(source, target).threads
        assert {(h.id, h.newest) for h in t.hidden} == {("45", False), ("3", False)}
        assert [(h.space, h.id, h.newest) for h in u.hidden] == [("sub", "1", True)]
        assert id_of(fork) not in {h.id for h in t.hidden}
        assert not compared(theirs, target, ["t"])
        with saver(target) as ours:
            assert ours.get_tuple(thread("t")).config["configurable"]["checkpoint_id"] == "8"
            assert ours.get_tuple(lost).checkpoint["channel_values"]["x"] == 4
            row = ours.store.task("t")
            assert row.head.id == "8"
            # It goes on from there, and what goes on is the newest from then on.
            ours.put(newest, made({"x": 6}, {"x": 2}, id="1"), about(1), {"x": 2})
            assert ours.get_tuple(thread("t")).checkpoint["channel_values"]["x"] == 6


def test_ordinary_forks(tmp_path: Path, source: str, target: str) -> None:
    """The newest id is the newest here, whatever it stands on; a parent that was pruned is still named."""
    with old(tmp_path) as theirs:
        pruned = {"configurable": {"thread_id": "t", "checkpoint_ns": "", "checkpoint_id": "0"}}
        one = theirs.put(pruned, made({"x": 1}, id="1"), about(3), {})
        two = theirs.put(one, made({"x": 2}, id="2"), about(4), {})
        theirs.put(two, made({"x": 3}, id="3"), about(5), {})
        theirs.put(one, made({"x": 4}, id="4"), about(4, "fork"), {})
        theirs.put(thread("t", "sub"), made({"x": 5}, id="05"), about(), {})
        theirs.put_writes(thread("t", "", "9"), [("x", 1)], task_id(1))  # its checkpoint never came
        (t,) = import_threads(source, target).threads
        assert (t.checkpoints, t.branches, t.writes, t.hidden) == (5, 3, 1, ())
        assert not compared(theirs, target, ["t"])
        with saver(target) as ours:
            heads = {(b.space, b.name): (b.head.id, b.forked_from) for b in ours.store.branches("t", None)}
            assert heads["", "main"][0] == "3"
            assert heads["", "main~1"][0] == "4"
            assert ours.store.task("t").branch == "main~1"
            rows, _ = ours.store.writes("t", checkpoints=["9"])
            assert len(rows) == 1


def test_a_circle_of_parents(tmp_path: Path, source: str, target: str) -> None:
    with old(tmp_path) as theirs:
        theirs.put(thread("t"), made({}, id="1"), about(), {})
        raw(tmp_path, "UPDATE checkpoints SET parent_checkpoint_id = '1'")
        (t,) = import_threads(source, target).refused
        assert isinstance(t.error, Damaged)


def test_writes_in_their_order(tmp_path: Path, source: str, target: str) -> None:
    with old(tmp_path) as theirs:
        config = theirs.put(thread("t"), made({}), about(), {})
        theirs.put_writes(config, [("x", 1), ("y", [2]), ("x", 3)], task_id(9), "a")
        theirs.put_writes(config, [("__error__", "no"), ("__error_source__", "n")], task_id(2), "b")
        theirs.put_writes(config, [("__resume__", [1]), ("x", 4)], task_id(3), "a")
        theirs.put_writes(config, [("__error_first", 1), ("x", 5)], task_id(4), "c")
        theirs.put_writes(config, [("x", 6), ("__interrupt__", ["q"])], NULL, "")
        assert not import_threads(source, target).refused
        assert not compared(theirs, target, ["t"])


# -- layouts


def test_earlier_layouts(tmp_path: Path, source: str, target: str) -> None:
    with old(tmp_path) as theirs:
        config = theirs.put(
            thread("t"), {**made({"x": 1}), "v": 1, "pending_sends": [Send("n", [HumanMessage("m")])]}, about(), {}
        )
        theirs.put_writes(config, [("x", 1)], task_id(1))
        raw(tmp_path, "ALTER TABLE writes DROP COLUMN task_path")
        assert not import_threads(source, target).refused
        with saver(target) as ours:
            theirs._has_task_path = False
            assert not differences(theirs, ours, ["t"])
            # And once more through our own put.
            found = ours.get_tuple(config)
            ours.put(config, {**found.checkpoint, "id": "f"}, found.metadata, {})
            assert ours.get_tuple(thread("t", "", "f")).checkpoint["pending_sends"] == [Send("n", [HumanMessage("m")])]
    with pytest.raises(UsageError, match="no database that can be imported"):
        import_threads(f"langgraph-sqlite:///{tmp_path / 'new.db'}", target)
    (tmp_path / "text").write_text("no database at all, but long enough to be taken for one" * 100)
    with pytest.raises(UsageError, match="no database that can be imported"):
        import_threads(f"langgraph-sqlite:///{tmp_path / 'text'}", target)
    with pytest.raises(NotFound):
        import_threads("langgraph-sqlite:////nowhere/at/all.db", target)
    with pytest.raises(UsageError, match="names no database"):
        import_threads("sqlite:///old.db", target)


def test_old_sends_of_postgres(tmp_path: Path, target: str) -> None:
    """Before version 4 what a superstep sent was no channel: the saver makes it one as it reads."""
    with subject("peer-postgres", tmp_path) as there:
        theirs = there.saver()
        first = theirs.put(thread("t"), made({"x": [1], "n": 1}, {"x": "1", "n": "1"}), about(), {"x": "1", "n": "1"})
        theirs.put_writes(first, [("__pregel_tasks", Send("n", 1)), ("__pregel_tasks", Send("m", 2))], task_id(1), "a")
        second = {**made({"x": [1], "n": 2}, {"x": "1", "n": "2"}), "v": 3}
        theirs.put(first, second, about(1), {"n": "2"})
        assert not import_threads(url_of(there), target).refused
        with saver(target) as ours:
            config = thread("t", "", second["id"])
            assert ours.get_tuple(config).checkpoint["channel_values"]["__pregel_tasks"] == [Send("n", 1), Send("m", 2)]
            (listed,) = [one for one in theirs.list(thread("t")) if one.checkpoint["id"] == second["id"]]
            found = ours.get_tuple(config).checkpoint
            assert not unequal(listed.checkpoint, {**found, "channel_values": dict(found["channel_values"])})
            with theirs._cursor() as cursor:
                cursor.execute("ALTER TABLE checkpoint_writes DROP COLUMN task_path")
            other = f"sqlite:///{tmp_path / 'other.db'}"
            assert not import_threads(url_of(there), other).refused
            with saver(other) as bare:
                assert not differences(ours, bare, ["t"])


# -- again, and what is there


def test_again(tmp_path: Path, source: str, target: str) -> None:
    with old(tmp_path) as theirs:
        one = theirs.put(thread("t"), made({"x": [HumanMessage("a")]}, id="1"), about(), {})
        theirs.put_writes(one, [("x", 1)], task_id(1))
        assert [t.result for t in import_threads(source, target, dry_run=True).threads] == ["imported"]
        assert [t.result for t in import_threads(source, None, dry_run=True).threads] == ["imported"]
        before = (tmp_path / "old.db").read_bytes()
        assert [t.result for t in import_threads(source, target).threads] == ["imported"]
        assert (tmp_path / "old.db").read_bytes() == before
        # The old one goes on, and the import follows it.
        theirs.put(one, made({"x": [HumanMessage("a"), AIMessage("b")]}, id="2"), about(1), {})
        assert [t.result for t in import_threads(source, target, dry_run=True).threads] == ["updated"]
        assert compared(theirs, target, ["t"])
        assert [t.result for t in import_threads(source, target).threads] == ["updated"]
        assert not compared(theirs, target, ["t"])
        # Ours goes on: nothing is done to it.
        with saver(target) as ours:
            two = ours.get_tuple(thread("t")).config
            ours.put(two, made({"x": 3}, id="3"), about(2), {})
            assert [t.result for t in import_threads(source, ours.cp).threads] == ["unchanged"]
            assert ours.get_tuple(thread("t")).checkpoint["id"] == "3"
            # Both go on: they are two.
            theirs.put(two, made({"x": 4}, id="4"), about(2), {})
            (t,) = import_threads(source, ours.cp).refused
            assert isinstance(t.error, Conflict)
            assert ours.get_tuple(thread("t")).checkpoint["id"] == "3"
        theirs.put(thread("u"), made({"x": 1}), about(), {})
        report = import_threads(source, target, threads=["u"])
        assert [(t.task_id, t.result) for t in report.threads] == [("u", "imported")]
        with pytest.raises(NotFound):
            import_threads(source, target, threads=["v"])
        with pytest.raises(UsageError, match="one file"):
            import_threads(source, f"sqlite:///{tmp_path / 'old.db'}")
        with pytest.raises(UsageError, match="no target"):
            import_threads(source, None)


_IMPORTS = """
import sys
from safepoint.adapters.langgraph import import_threads
import_threads(sys.argv[1], sys.argv[2], progress=lambda p: print(p.done, flush=True))
"""


@pytest.mark.scaled
def test_killed_on_the_way(tmp_path: Path, source: str, target: str) -> None:
    """Each thread is there whole or not at all, and the next import does the rest."""
    draw = fresh_rng()
    names = [f"t{i:02}" for i in range(30)]
    with old(tmp_path) as theirs:
        for name in names:
            config, messages = thread(name), []
            for i in range(12):
                messages.append(HumanMessage(f"{name} {i}" * 50))
                config = theirs.put(config, made({"messages": messages}, {"messages": i}), about(i), {"messages": i})
                theirs.put_writes(config, [("messages", messages[-1:])], task_id(i))
        for _ in range(scale(1, 6)):
            for left in tmp_path.glob("new.db*"):
                left.unlink()
            child = subprocess.Popen([sys.executable, "-c", _IMPORTS, source, target], stdout=subprocess.PIPE, text=True)
            try:
                until = draw.randrange(1, 29)
                for line in child.stdout:
                    if int(line) >= until:
                        time.sleep(draw.random() * 0.01)
                        break
                else:
                    pytest.fail("the import ended by itself")
            finally:
                child.kill()
                child.communicate(timeout=60)
            with safepoint.open(target) as cp:
                there = [t.task_id for t in cp.tasks()]
                assert all(cp.verify(t).ok for t in there)
            assert len(there) >= until
            assert not compared(theirs, target, there)
            report = import_threads(source, target)
            assert not report.refused, report.refused[0].error
            assert {t.task_id for t in report.threads if t.result == "unchanged"} == set(there)
            assert not compared(theirs, target, names)


def test_progress(tmp_path: Path, source: str, target: str) -> None:
    with old(tmp_path) as theirs:
        for name in "ab":
            theirs.put(thread(name), made({"x": 1}), about(), {})
    seen: list[Any] = []
    import_threads(source, target, progress=seen.append)
    assert [(p.done, p.total, p.task_id) for p in seen] == [(0, 2, "a"), (1, 2, "b"), (2, 2, "b")]
    assert seen[-1].bytes > 0


# -- the command


def test_command(tmp_path: Path, source: str, target: str, capsys: pytest.CaptureFixture[str]) -> None:
    import tests.support.graphs.importable as own

    def run(*args: str) -> tuple[int, str, str]:
        code = command(["import", *args])
        return (code, *capsys.readouterr())

    with old(tmp_path) as theirs:
        one = theirs.put(thread("a"), made({"x": 1}, id="5"), about(), {})
        theirs.put(one, made({"x": 1}, id="4"), about(1), {})
        theirs.put(thread("b"), made({"x": own.Point(1)}), about(), {})
    code, out, _ = run("--from", source, "--store", target, "--dry-run")
    assert code == 2
    assert "a: would be imported (2 checkpoints, 0 writes, 2 branches" in out
    assert not (tmp_path / "new.db").exists()
    code, out, _ = run("--from", source, "--store", target)
    assert code == 2
    assert "the old saver did not load a@2, branch main~1" in out
    assert "b: refused" in out
    assert "--trust tests.support.graphs.importable" in out
    code, out, _ = run("--from", source, "--store", target, "--json", "--trust", own.__name__)
    found = json.loads(out)
    assert code == 0
    assert [(t["task_id"], t["result"], t["error"]) for t in found["threads"]] == [
        ("a", "unchanged", None),
        ("b", "imported", None),
    ]
    code, out, _ = run("--from", source, "--store", target, "--thread", "b", "--trust", own.__name__)
    assert (code, out.partition("\n")[0]) == (0, "b: unchanged")
    assert run("--from", source, "--store", target, "--thread", "no")[0] == 3
    assert run("--from", f"langgraph-sqlite:///{tmp_path / 'none.db'}", "--store", f"sqlite:///{tmp_path / 'x.db'}")[0] == 3
    assert not (tmp_path / "x.db").exists()
    for wrong in (["--from", source, "file"], ["--from", source, "--as", "x"], ["file", "--trust", "m"], []):
        code, _, told = run(*wrong, "--store", target)
        assert code == 2
        assert "remedy" in told
    code, _, told = run("--from", "langgraph-postgresql://me:hidden@127.0.0.1:1/db", "--store", target)
    assert code == 4
    assert "hidden" not in told


@pytest.mark.parametrize(
    ("missing", "url", "pip"),
    [
        ("langgraph", "langgraph-sqlite:///old.db", 'pip install "safepoint[langgraph]"'),
        ("psycopg", "langgraph-postgresql://localhost/db", 'pip install "safepoint[postgres]"'),
    ],
)
def test_what_is_not_installed(missing: str, url: str, pip: str, tmp_path: Path) -> None:
    program = f"""
import importlib.metadata as metadata, sys
real = metadata.version
def version(name):
    if name == {missing!r}:
        raise metadata.PackageNotFoundError(name)
    return real(name)
metadata.version = version
sys.modules[{missing!r}] = None
from safepoint.cli.ending import run
sys.exit(run(["import", "--from", {url!r}, "--store", "sqlite:///new.db"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert pip in done.stderr
    assert not (tmp_path / "new.db").exists()

"""The saver against LangGraph's contract: its own suite on every store by both kinds of methods, and what that does not test."""

from __future__ import annotations

import asyncio
import copy
import itertools
import random
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from langgraph.checkpoint.base import WRITES_IDX_MAP, get_checkpoint_metadata
from langgraph.checkpoint.base import id as ids
from langgraph.checkpoint.conformance import checkpointer_test, validate
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.types import _DeltaSnapshot

from safepoint import SafepointError
from tests.support.graphs.driver import Driver
from tests.support.graphs.raw import NULL, InSync, about, delta_history, id_of, made, task_id, thread
from tests.support.graphs.shapes import line
from tests.support.graphs.subjects import HERE, Subject
from tests.support.scale import SOAK

pytestmark = pytest.mark.scaled

# -- LangGraph's own suite

SUITE = 81
# The asynchronous methods call the sync ones: outside of a soak, these by themselves on two stores are enough.
SUITES = [(kind, "async") for kind in HERE] + [(kind, "sync") for kind in (HERE if SOAK else ("memory", "sqlite"))]


@pytest.mark.parametrize(("there", "methods"), SUITES, indirect=["there"])
def test_the_whole_suite(there: Subject, methods: str) -> None:
    @checkpointer_test(name=there.name)
    async def mine() -> Any:
        yield there.saver() if methods == "async" else InSync(there.saver())

    report = asyncio.run(validate(mine))
    found = report.to_dict()["results"]
    assert not [failure for result in found.values() for failure in result["failures"]]
    assert sum(result["tests_passed"] for result in found.values()) == SUITE


# -- the delta history: what the suite's unreleased part asks for


def history(
    saver: Any, *steps: tuple[dict[str, Any], dict[str, list[Any]]], ns: str = "", name: str | None = None
) -> list[Any]:
    """A line of checkpoints: values that each holds, and writes on it by channel. Returns their configs."""
    config = thread(name, ns)
    configs = []
    for step, (values, writes) in enumerate(steps):
        config = saver.put(config, made(values), about(step), dict.fromkeys(values, 1))
        for channel, items in writes.items():
            saver.put_writes(config, [(channel, item) for item in items], task_id(step), f"path{step}")
        configs.append(config)
    return configs


def values_of(found: dict[str, Any], channel: str) -> list[Any]:
    return [value for _, _, value in found[channel]["writes"]]


SEED = _DeltaSnapshot(["seed"])


def test_delta_seed_and_writes_oldest_first(saver: Any) -> None:
    configs = history(saver, ({"d": SEED}, {"d": [1, 2]}), ({}, {"d": [3]}), ({}, {"other": [9]}), ({}, {"d": [4]}), ({}, {}))
    found = delta_history(saver, configs[-1], "d")
    assert values_of(found, "d") == [1, 2, 3, 4]
    assert found["d"]["seed"] == SEED


def test_delta_own_writes_are_not_history(saver: Any) -> None:
    """Writes on the checkpoint that is asked for lead to the next one."""
    configs = history(saver, ({"d": SEED}, {"d": [1]}), ({}, {"d": [2]}))
    assert values_of(delta_history(saver, configs[-1], "d"), "d") == [1]


def test_delta_follows_parents_not_time(saver: Any) -> None:
    """Two lines from one checkpoint: each sees its own."""
    configs = history(saver, ({"d": SEED}, {"d": [1]}), ({}, {"d": [2]}))
    left = saver.put(configs[1], made(), about(2), {})
    saver.put_writes(left, [("d", "left")], task_id(7))
    left_end = saver.put(left, made(), about(3), {})
    right = saver.put(configs[0], made(), about(1, "fork"), {})
    saver.put_writes(right, [("d", "right")], task_id(8))
    right_end = saver.put(right, made(), about(2), {})
    assert values_of(delta_history(saver, left_end, "d"), "d") == [1, 2, "left"]
    assert values_of(delta_history(saver, right_end, "d"), "d") == [1, "right"]


def test_delta_in_a_namespace(saver: Any) -> None:
    name = str(uuid.uuid4())
    root = history(saver, ({"d": SEED}, {"d": ["root"]}), ({}, {}), name=name)
    inner = history(saver, ({}, {"d": ["inner"]}), ({}, {}), ns=f"node:{task_id(1)}", name=name)
    assert values_of(delta_history(saver, root[-1], "d"), "d") == ["root"]
    found = delta_history(saver, inner[-1], "d")
    assert values_of(found, "d") == ["inner"]
    assert "seed" not in found["d"]


def test_delta_missing_channel(saver: Any) -> None:
    configs = history(saver, ({"d": SEED}, {"d": [1]}), ({}, {}))
    assert delta_history(saver, configs[-1], "none", "d") == {
        "none": {"writes": []},
        "d": {"seed": SEED, "writes": [(task_id(0), "d", 1)]},
    }
    assert delta_history(saver, configs[-1]) == {}


def test_delta_snapshot_at_the_head(saver: Any) -> None:
    """The value that the checkpoint itself holds is no seed of its history: what came before is."""
    configs = history(saver, ({"d": SEED}, {"d": [1]}), ({"d": _DeltaSnapshot(["seed", 1])}, {"d": [2]}), ({}, {}))
    assert delta_history(saver, configs[1], "d")["d"] == {"seed": SEED, "writes": [(task_id(0), "d", 1)]}
    # The nearest one counts, with the writes on it.
    assert delta_history(saver, configs[2], "d")["d"] == {"seed": _DeltaSnapshot(["seed", 1]), "writes": [(task_id(1), "d", 2)]}


def test_delta_without_a_snapshot(saver: Any) -> None:
    configs = history(saver, ({}, {"d": [1]}), ({}, {"d": [2]}), ({}, {}))
    found = delta_history(saver, configs[-1], "d")
    assert "seed" not in found["d"]
    assert values_of(found, "d") == [1, 2]


def test_delta_of_nothing(saver: Any) -> None:
    """A thread that does not exist, one with a single checkpoint, and the newest one asked for without its id."""
    assert delta_history(saver, thread(), "d") == {"d": {"writes": []}}
    configs = history(saver, ({}, {"d": [1]}))
    assert delta_history(saver, configs[0], "d") == {"d": {"writes": []}}
    configs = history(saver, ({}, {"d": [1]}), ({}, {}))
    newest = thread(configs[0]["configurable"]["thread_id"])
    assert values_of(delta_history(saver, newest, "d"), "d") == [1]


def test_delta_order_within_a_superstep(saver: Any) -> None:
    """Tasks' writes in the order of their paths, whenever they came; several delta channels and a plain value at once."""
    first = saver.put(thread(), made({"d": SEED, "plain": [0]}), about(), {"d": 1, "plain": 1})
    order = [3, 1, 4, 0, 2]
    for i in order:
        saver.put_writes(first, [("d", i), ("e", -i), ("d", i + 0.5)], task_id(9 - i), f"~pull, {i}")
    second = saver.put(first, made(), about(1), {})
    found = delta_history(saver, second, "d", "e", "plain")
    assert values_of(found, "d") == [0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5]
    assert values_of(found, "e") == [0, -1, -2, -3, -4]
    assert found["plain"] == {"seed": [0], "writes": []}


# -- writes


def pending(saver: Any, config: Any) -> list[tuple[str, str, Any]]:
    found = [tuple(write) for write in saver.get_tuple(config).pending_writes]
    assert [tuple(write) for write in asyncio.run(saver.aget_tuple(config)).pending_writes] == found
    (listed,) = [one for one in saver.list(config) if id_of(one.config) == id_of(config)]
    assert [tuple(write) for write in listed.pending_writes] == found
    return found


def test_writes_stand_in_the_order_of_paths(saver: Any) -> None:
    config = saver.put(thread(), made(), about(), {})
    paths = ["~pull, a", "~pull, b", "~push, 0, 00", "~push, 0, 01", ""]
    tasks = list(itertools.product(paths, range(3)))
    random.Random(5).shuffle(tasks)
    for path, i in tasks:
        saver.put_writes(config, [("x", [path, i, n]) for n in range(3)], task_id(i), path)
    # A task is in one place; those of one path are ordered by their ids.
    by_task = {task_id(i): path for path, i in reversed(tasks)}
    found = pending(saver, config)
    assert [value[2] for _, _, value in found] == [0, 1, 2] * (len(found) // 3)
    assert [(by_task[task], task) for task, _, _ in found[::3]] == sorted((by_task[task], task) for task, _, _ in found[::3])
    assert {value[0] for _, _, value in found} == set(by_task.values())


def test_writes_before_their_checkpoint(saver: Any) -> None:
    """LangGraph's executor may store a task's writes first: they wait for the checkpoint, and make none by themselves."""
    first = saver.put(thread(), made({"x": 1}), about(), {"x": 1})
    name, id = first["configurable"]["thread_id"], str(ids.uuid6(clock_seq=1))
    later = thread(name, id=id)
    saver.put_writes(later, [("x", "early")], task_id(1), "path")
    assert saver.get_tuple(later) is None
    assert id_of(saver.get_tuple(thread(name)).config) == id_of(first)
    assert [id_of(found.config) for found in saver.list(thread(name))] == [id_of(first)]
    saver.put(first, made({"x": 2}, {"x": 2}, id), about(1), {"x": 2})
    assert pending(saver, later) == [(task_id(1), "x", "early")]
    # And as the first word on a thread.
    fresh = thread(id=str(ids.uuid6(clock_seq=1)))
    saver.put_writes(fresh, [("x", "first")], task_id(1))
    assert saver.get_tuple(fresh) is None
    assert saver.get_tuple(thread(fresh["configurable"]["thread_id"])) is None
    bare = thread(fresh["configurable"]["thread_id"])
    saver.put(bare, made(id=id_of(fresh)), about(), {})
    assert pending(saver, fresh) == [(task_id(1), "x", "first")]


def test_special_writes_are_told_apart_one_by_one(saver: Any) -> None:
    """Mixed with others in one call: a special one replaces what it stood for, the others stand."""
    config = saver.put(thread(), made(), about(), {})
    task = task_id(1)
    saver.put_writes(config, [("__resume__", ["a"]), ("x", 1)], task)
    saver.put_writes(config, [("__resume__", ["a", "b"]), ("x", 2)], task)
    saver.put_writes(config, [("__interrupt__", "asked")], task)
    saver.put_writes(config, [("__error__", "failed"), ("__interrupt__", "asked again")], task)
    found = pending(saver, config)
    assert sorted((channel, value) for _, channel, value in found) == [
        ("__error__", "failed"), ("__interrupt__", "asked again"), ("__resume__", ["a", "b"]), ("x", 1),
    ]  # fmt: skip
    assert set(WRITES_IDX_MAP) >= {"__resume__", "__interrupt__", "__error__"}


def test_first_whole_set_of_a_task_stands(saver: Any) -> None:
    """Two executions of one task never mix: not one after the other, and not at once."""
    config = saver.put(thread(), made(), about(), {})
    saver.put_writes(config, [("x", "A0"), ("y", "A1")], task_id(1))
    saver.put_writes(config, [("x", "B0"), ("y", "B1"), ("z", "B2")], task_id(1))
    assert pending(saver, config) == [(task_id(1), "x", "A0"), (task_id(1), "y", "A1")]
    gate = threading.Barrier(6)

    def one(i: int) -> None:
        gate.wait()
        saver.put_writes(config, [("x", [i, n]) for n in range(4)], task_id(2))

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(one, range(6)))
    mine = [value for task, _, value in pending(saver, config) if task == task_id(2)]
    assert mine == [[mine[0][0], n] for n in range(4)]


def test_writes_of_commands_grow(saver: Any) -> None:
    """What comes from outside has the null task: a second command adds to the first."""
    config = saver.put(thread(), made(), about(), {})
    saver.put_writes(config, [("__resume__", "one")], NULL)
    saver.put_writes(config, [("x", 1)], NULL)
    saver.put_writes(config, [("x", 1), ("y", 2)], NULL)
    assert sorted(map(repr, pending(saver, config))) == sorted(
        map(repr, [(NULL, "__resume__", "one"), (NULL, "x", 1), (NULL, "y", 2)])
    )


def test_writes_of_many_tasks_at_once(saver: Any) -> None:
    config = saver.put(thread(), made(), about(), {})
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: saver.put_writes(config, [("x", i), ("y", [i] * 50)], task_id(i), f"{i:02}"), range(24)))
    assert pending(saver, config) == [(task_id(i), *w) for i in range(24) for w in (("x", i), ("y", [i] * 50))]


# -- checkpoints


def test_child_before_parent(saver: Any) -> None:
    """A subgraph's checkpoints come before the root's that they ran under."""
    name = str(uuid.uuid4())
    root_id = str(ids.uuid6(clock_seq=0))
    ns = f"node:{task_id(1)}"
    inner = saver.put(thread(name, ns), made({"x": "inner"}), about(parents={"": root_id}), {"x": 1})
    assert saver.get_tuple(thread(name)) is None
    assert saver.get_tuple(thread(name, ns)).checkpoint["channel_values"]["x"] == "inner"
    saver.put(thread(name), made({"x": "root"}, id=root_id), about(), {"x": 1})
    inner = saver.put(inner, made({"x": "inner 2"}, {"x": 2}), about(1, parents={"": root_id}), {"x": 2})
    assert saver.get_tuple(thread(name)).checkpoint["channel_values"]["x"] == "root"
    assert saver.get_tuple(thread(name, ns)).parent_config["configurable"]["checkpoint_ns"] == ns
    of_all = {
        (t.config["configurable"]["checkpoint_ns"], id_of(t.config)) for t in saver.list({"configurable": {"thread_id": name}})
    }
    assert len(of_all) == 3
    assert [id_of(t.config) for t in saver.list(thread(name))] == [root_id]


def test_int_thread_ids(saver: Any) -> None:
    """A raw number is the thread of its digits, in every method."""
    number = int(uuid.uuid4()) % 10**12
    config = saver.put(thread(number), made({"x": 1}), about(), {"x": 1})
    saver.put_writes(thread(number, id=id_of(config)), [("x", 2)], task_id(1))
    for name in (number, str(number)):
        assert saver.get_tuple(thread(name)).checkpoint["channel_values"]["x"] == 1
        assert [id_of(t.config) for t in saver.list(thread(name))] == [id_of(config)]
        assert asyncio.run(saver.aget_tuple(thread(name))).pending_writes
    saver.copy_thread(number, number + 1)
    assert saver.get_tuple(thread(str(number + 1))) is not None
    saver.prune([number + 1], strategy="delete")
    assert saver.get_tuple(thread(str(number + 1))) is None
    saver.delete_thread(number)
    assert saver.get_tuple(thread(number)) is None


def test_put_twice_is_put_once(saver: Any) -> None:
    checkpoint = made({"x": [1, {"deep": (1, "two")}]})
    for _ in range(2):
        config = saver.put(thread("twice" + there_is_none()), checkpoint, about(), {"x": 1})
    name = str(uuid.uuid4())
    for _ in range(2):
        config = saver.put(thread(name), copy.deepcopy(checkpoint), about(), {"x": 1})
    assert [id_of(t.config) for t in saver.list(thread(name))] == [id_of(config)]


def there_is_none() -> str:
    return uuid.uuid4().hex


def test_what_is_unchanged_is_the_parents(saver: Any) -> None:
    """A channel that is not among the new versions has the parent's value; one that is gone is gone."""
    first = saver.put(thread(), made({"x": [1, 2], "y": "kept", "z": 1}), about(), {"x": 1, "y": 1, "z": 1})
    second = saver.put(first, made({"x": [1, 2, 3], "y": "kept"}, {"x": 2, "y": 1, "z": 2}), about(1), {"x": 2, "z": 2})
    assert dict(saver.get_tuple(second).checkpoint["channel_values"]) == {"x": [1, 2, 3], "y": "kept"}
    assert dict(saver.get_tuple(first).checkpoint["channel_values"]) == {"x": [1, 2], "y": "kept", "z": 1}
    third = saver.put(second, made({"y": "kept"}, {"x": 2, "y": 1, "z": 2}), about(2), {})
    assert "z" not in saver.get_tuple(third).checkpoint["channel_values"]


def test_values_belong_to_whoever_got_them(saver: Any) -> None:
    """Changing what was put, or got, changes nothing that is stored."""
    values = {"x": [{"n": 1}]}
    config = saver.put(thread(), made(values), about(), {"x": 1})
    values["x"][0]["n"] = 2
    values["x"].append({"n": 3})
    got = saver.get_tuple(config)
    assert got.checkpoint["channel_values"]["x"] == [{"n": 1}]
    got.checkpoint["channel_values"]["x"].append("more")
    got.checkpoint["channel_values"]["new"] = 1
    got.metadata["step"] = 99
    again = saver.get_tuple(config)
    assert dict(again.checkpoint["channel_values"]) == {"x": [{"n": 1}]}
    assert again.metadata["step"] == 0
    for listed in saver.list(config):
        assert dict(listed.checkpoint["channel_values"]) == {"x": [{"n": 1}]}


def test_what_is_not_there(saver: Any) -> None:
    config = saver.put(thread(), made(), about(), {})
    name = config["configurable"]["thread_id"]
    assert saver.get_tuple(thread(name, id=str(uuid.uuid4()))) is None
    assert saver.get_tuple(thread(name, "other")) is None
    assert saver.get_tuple(thread()) is None
    assert saver.get(thread()) is None
    assert list(saver.list(thread())) == []
    assert list(saver.list(thread(name), limit=0)) == []
    # Keys that the loop adds to configs mean nothing to a saver.
    extra: dict[str, Any] = {"checkpoint_map": {"": id_of(config)}, "__pregel_task_id": "x", "__pregel_send": print}
    assert id_of(saver.get_tuple(thread(name, **extra)).config) == id_of(config)
    saver.delete_thread(there_is_none())


def test_limits_and_cursors(saver: Any) -> None:
    configs = history(saver, *[({}, {})] * 7)
    name = configs[0]["configurable"]["thread_id"]
    stored = [id_of(config) for config in configs][::-1]

    def listed(**how: Any) -> list[str]:
        found = [id_of(t.config) for t in saver.list(thread(name), **how)]

        async def twin() -> list[str]:
            return [id_of(t.config) async for t in saver.alist(thread(name), **how)]

        assert asyncio.run(twin()) == found
        return found

    assert listed() == stored
    assert listed(limit=3) == stored[:3]
    for at in range(7):
        assert listed(before=configs[at]) == stored[7 - at :]
        assert listed(before=configs[at], limit=2) == stored[7 - at :][:2]
        assert listed(before=configs[at], filter={"step": 0}) == (stored[-1:] if at else [])


# -- filters and metadata

STRANGE = [
    "plain", "with space", "with'quote", 'with"double', "a.b", "$.a", "a[0]", "%", "_", "\\", "', 1); DROP TABLE sp_tasks; --",
    "x' OR '1'='1", "ключ", "🔑", "{}", "null", "step'", "}", "*", "?", ":name", "/*", "a\nb", "",
]  # fmt: skip


def test_filter_keys_and_values_are_data(saver: Any) -> None:
    """Every strange key and value finds what holds it, and nothing else."""
    name = str(uuid.uuid4())
    config = thread(name)
    configs = {}
    for i, text in enumerate(STRANGE):
        config = saver.put(config, made(), about(i, **{f"k{text}": text, "shared": "yes", "value": text}), {})
        configs[text] = id_of(config)
    for text in STRANGE:
        wanted: dict[str, Any]
        for wanted in ({f"k{text}": text}, {"value": text}, {f"k{text}": text, "shared": "yes", "value": text}):
            assert [id_of(t.config) for t in saver.list(thread(name), filter=wanted)] == [configs[text]], wanted
        assert [*saver.list(thread(name), filter={f"k{text}": text + "!"})] == []
    # What would be true if any of it were executed, or taken as a pattern.
    for wanted in (
        {"value": "%' OR 1=1 --"},
        {"' OR 1=1 --": ""},
        {"value": "*"},
        {"value": "%"},
        {"nested.a": 1},
        {"$": None},
    ):
        assert len([*saver.list(thread(name), filter=wanted)]) == (wanted.get("value") in STRANGE)
    assert len([*saver.list(thread(name), filter={"shared": "yes"})]) == len(STRANGE)


def test_filters_compare_by_kind(saver: Any) -> None:
    """Text is not a number; nested values are compared whole."""
    name = str(uuid.uuid4())
    config = thread(name)
    facts: list[Any] = [1, "1", None, "None", [1], {"a": {"b": 1}}, "", 0, 2.5, "true"]
    stored = []
    for i, fact in enumerate(facts):
        config = saver.put(config, made(), about(i, fact=fact), {})
        stored.append(id_of(config))
    for i, fact in enumerate(facts):
        assert [id_of(t.config) for t in saver.list(thread(name), filter={"fact": fact})] == [stored[i]], fact
    assert [*saver.list(thread(name), filter={"fact": {"a": {}}})] == []


def test_metadata_takes_what_the_config_says(saver: Any) -> None:
    """Plain values of the caller's metadata and configurable; what is named in both is the checkpoint's own."""
    config = {
        "configurable": {
            "thread_id": str(uuid.uuid4()), "checkpoint_ns": "", "user_id": "u-1", "n": 3, "flag": True, "ratio": 0.5,
            "__secret": "no", "an_object": object(), "a_list": [1], "nul": "a\x00b", "langgraph_step": 9,
        },
        "metadata": {"tenant": "t-1", "step": 99, "user_id": "of the metadata"},
    }  # fmt: skip
    stored = saver.put(config, made(), about(4, score="own"), {})
    found = saver.get_tuple(stored).metadata
    assert found == get_checkpoint_metadata(config, about(4, score="own"))
    assert found["user_id"] == "of the metadata"
    assert [id_of(t.config) for t in saver.list(stored, filter={"tenant": "t-1", "flag": True, "nul": "ab"})] == [id_of(stored)]
    assert "__secret" not in found
    assert "an_object" not in found


# -- clocks


class Clock:
    """The clock that ids are made of, as of a host of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch

    def set_back(self, hours: float) -> None:
        import time

        back = int(hours * 3600e9)

        class Skewed:
            @staticmethod
            def time_ns() -> int:
                return time.time_ns() - back

        self._patch.setattr(ids, "time", Skewed)
        self._patch.setattr(ids, "_last_v6_timestamp", None)


def test_latest_is_the_last_that_was_put(saver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second host's clock is an hour behind: its ids are the smaller ones, and its turn is the newest all the same."""
    clock = Clock(monkeypatch)
    configs = history(saver, ({"x": 0}, {}), ({"x": 1}, {}))
    clock.set_back(1)
    behind = saver.put(configs[-1], made({"x": 2}, {"x": 2}), about(2), {"x": 2})
    assert id_of(behind) < id_of(configs[0])
    name = behind["configurable"]["thread_id"]
    assert id_of(saver.get_tuple(thread(name)).config) == id_of(behind)
    order = [id_of(t.config) for t in saver.list(thread(name))]
    assert order == [id_of(behind), id_of(configs[1]), id_of(configs[0])]
    assert [id_of(t.config) for t in saver.list(thread(name), before=behind)] == order[1:]
    assert [id_of(t.config) for t in saver.list(thread(name), before=configs[1])] == order[2:]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_no_turn_of_a_host_that_is_behind_is_hidden(there: Subject, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts take turns on a thread; the one that is behind in time loses nothing, and neither does the other."""
    clock = Clock(monkeypatch)
    name = str(uuid.uuid4())

    async def turns() -> None:
        hosts = [(Driver(there.saver(), mode, "sync"), 0.0), (Driver(there.saver(), mode, "async"), 1.0)]
        said: list[Any] = []
        for turn in range(6):
            run, behind = hosts[turn % 2]
            clock.set_back(behind)
            graph = run.compile(line(run, "a", "b"))
            found = await run.invoke(graph, {"items": [turn]}, {"configurable": {"thread_id": name}})
            said += [turn, "a", "b"]
            assert found["items"] == said
            for other, skew in hosts:
                clock.set_back(skew)
                state = await other.state(other.compile(line(other, "a", "b")), {"configurable": {"thread_id": name}})
                assert state.values["items"] == said
        states = await run.history(graph, {"configurable": {"thread_id": name}})
        assert [state.values.get("items", []) for state in states if not state.next] == [said[: 3 * n] for n in range(6, 0, -1)]

    if mode == "async":
        asyncio.run(turns())
    else:
        from tests.support.graphs.driver import drive

        drive(turns())


def test_a_saver_that_goes_by_ids_hides_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the two tests above would see if ids decided: they can fail."""
    clock, saver = Clock(monkeypatch), InMemorySaver()
    first = saver.put(thread(), made(), about(), {})
    clock.set_back(1)
    second = saver.put(first, made(), about(1), {})
    newest = saver.get_tuple(thread(second["configurable"]["thread_id"]))
    assert newest.config == first


# -- the object


def test_copies_share_the_store(saver: Any) -> None:
    """compile() makes shallow copies: for a schema's types, and by copy.copy."""
    other = copy.copy(saver)
    config = other.put(thread(), made({"x": 1}), about(), {"x": 1})
    assert saver.get_tuple(config).checkpoint["channel_values"]["x"] == 1
    allowed = saver.with_allowlist({("decimal", "Decimal")})
    assert allowed.get_tuple(config).checkpoint["id"] == id_of(config)


def test_versions_only_rise(saver: Any) -> None:
    version: Any = None
    seen: list[Any] = []
    for _ in range(12):
        version = saver.get_next_version(version, None)
        seen.append(version)
    assert seen == sorted(seen)
    assert len(set(seen)) == 12
    # A thread that came from a saver with text for versions goes on with text.
    text = saver.get_next_version("00000000000000000000000000000009.0.123", None)
    assert isinstance(text, str)
    assert text > "00000000000000000000000000000009.0.999"


def test_strange_names_of_threads(saver: Any) -> None:
    """Any name works, or is refused with an error of safepoint's own; none is taken for another."""
    stored = {}
    for text in STRANGE:
        name = f"{text}-{uuid.uuid4().hex[:6]}" if text else ""
        try:
            stored[name] = id_of(saver.put(thread(name), made({"x": name}), about(), {"x": 1}))
        except SafepointError:
            assert name == "" or not name.isprintable()
    for name, id in stored.items():
        assert id_of(saver.get_tuple(thread(name)).config) == id
        assert [id_of(t.config) for t in saver.list(thread(name))] == [id]


def test_a_task_of_many_namespaces(saver: Any) -> None:
    """Namespaces of all the forms that LangGraph makes, one thread, one newest each."""
    name = str(uuid.uuid4())
    spaces = [
        "",
        "node",
        f"node:{task_id(1)}",
        f"node:{task_id(1)}|inner:{task_id(2)}",
        f"node:{task_id(1)}|1",
        "node|inner",
        "näme:x",
    ]
    for ns in spaces:
        config = thread(name, ns)
        for step in range(2):
            config = saver.put(config, made({"x": [ns, step]}, {"x": step + 1}), about(step), {"x": step + 1})
    for ns in spaces:
        assert saver.get_tuple(thread(name, ns)).checkpoint["channel_values"]["x"] == [ns, 1]
        assert len([*saver.list(thread(name, ns))]) == 2
    found = [t.config["configurable"]["checkpoint_ns"] for t in saver.list({"configurable": {"thread_id": name}})]
    assert sorted(found) == sorted(spaces * 2)

"""Chunks: what goes in comes out, what a save leaves out is in the base, and what it writes follows what has changed."""

import copy
import dataclasses
import math
import random
import sys
import threading
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safepoint.codec.chunks import Packed, name_of, pack, root_digest, unpack, unpack_plain, verify_obj
from safepoint.codec.nodes import BIG, DEPTH_MAX, ITEM_MIN, LIST_MIN, PAGE_MAX, PAGE_MIN, VALUE_MIN
from safepoint.codec.registry import Registry
from safepoint.codec.values import encode
from safepoint.errors import Damaged, RefusedType
from safepoint.model import Obj


@dataclasses.dataclass
class Note:
    text: str
    tags: list[str]


REGISTRY = Registry()
REGISTRY.add(Note)


def same(a: Any, b: Any) -> bool:
    """Equal in value, type, order of keys and sign of zero, all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(k, j) and same(v, w) for (k, v), (j, w) in zip(a.items(), b.items(), strict=True))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    if isinstance(a, Note):
        return same(a.text, b.text) and same(a.tags, b.tags)
    return bool(a == b)


def reachable(refs: bytes, store: Mapping[bytes, Obj]) -> set[bytes]:
    """As a store walks it, by refs alone."""
    found: set[bytes] = set()
    todo = [refs]
    while todo:
        refs = todo.pop()
        for i in range(0, len(refs), 16):
            name = refs[i : i + 16]
            if name not in found:
                found.add(name)
                todo.append(store[name].refs)
    return found


class Task:
    """A store that only ever gets ``new``, with the chain of packs on it."""

    def __init__(self, **options: Any) -> None:
        self.store: dict[bytes, Obj] = {}
        self.base: Packed | None = None
        self.options = options

    def save(self, value: dict[str, Any], **options: Any) -> Packed:
        packed = pack(value, REGISTRY, **{"base": self.base, **self.options, **options})
        if packed.new and "base" in options:
            assert options["base"] is not None
        # What the store holds after this is what the base reaches, and what is new: nothing else is promised to anybody.
        held = {} if self.base is None else {name: self.store[name] for name in reachable(self.base.refs, self.store)}
        for obj in packed.new:
            assert verify_obj(obj)
            held[obj.name] = obj
        assert len({o.name for o in packed.new}) == len(packed.new)
        needed = reachable(packed.refs, held)  # a KeyError is data loss
        assert {o.name for o in packed.new} <= needed, "an object that nothing refers to"
        assert packed.names() == needed
        self.store.update(held)
        scratch = pack(value, REGISTRY, **self.options)
        assert packed.digest == scratch.digest == root_digest(packed.data, packed.refs)
        assert (packed.data, packed.refs, packed.size) == (scratch.data, scratch.refs, scratch.size)
        assert packed.size == len(encode(value, REGISTRY))
        loaded, self.loaded = unpack(packed.data, packed.refs, held, REGISTRY)
        assert same(loaded, value)
        assert (self.loaded.digest, self.loaded.size) == (packed.digest, packed.size)
        assert self.loaded.names() == needed
        self.base = packed
        return packed


def message(i: int, size: int = 300) -> dict[str, Any]:
    return {"role": "user" if i % 2 else "assistant", "content": f"{i} " + "x" * size}


# Any script of edits ---------------------------------------------------------------------------------------------------

atoms: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from([0, 1, True, False, 1.0, 0.0, -0.0, None, "", "x", b"x", bytearray(b"x"), (1,), [1], {}, 2**70, math.nan]),
    st.integers(0, 5).map(lambda n: "long " * 10 * n),
    st.integers(0, 3).map(lambda n: b"bytes" * 20 * n),
    st.integers(0, 3).map(lambda n: bytearray(b"bytes" * 20 * n)),
    st.integers(0, 3).map(lambda n: Note("note" * 10 * n, ["a"] * n)),
    st.integers(0, 2).map(lambda n: {"deep": [{"text": "y" * 9000 * n, "n": n}, "z" * 9000]}),
    st.sampled_from(["\ud800", {"\ud800": 1}, {1: "a" * 70}, {(1, 2): [3]}, {"a": 1, "b": 2}, {"b": 2, "a": 1}]),
)
items: st.SearchStrategy[Any] = st.one_of(atoms, st.integers(0, 40).map(message), st.lists(atoms, max_size=3))
edits = st.lists(
    st.tuples(
        st.sampled_from(
            ["append", "extend", "replace", "remove", "trim", "insert", "deep", "again", "retype", "reorder", "move", "key"]
        ),
        st.integers(0, 10**6),
        items,
    ),
    max_size=12,
)
TWINS: list[tuple[Any, Any]] = [(1, True), (True, 1.0), (1.0, 1), (0.0, -0.0), (b"x" * 80, bytearray(b"x" * 80)), ([1], (1,))]


def edit(value: dict[str, Any], verb: str, n: int, item: Any) -> None:
    xs: list[Any] = value["messages"]
    at = n % (len(xs) + 1)
    match verb:
        case "append":
            xs.append(item)
        case "extend":
            xs.extend(copy.deepcopy([item]) * (n % 90))
        case "replace" if xs:
            xs[at % len(xs)] = item
        case "remove" if xs:
            del xs[at % len(xs) :][: 1 + n % 3]
            xs.pop(at % len(xs)) if xs else None
        case "trim":
            del xs[: n % 40]
        case "insert":
            xs.insert(at, item)
        case "deep" if xs:
            x = xs[at % len(xs)]
            if type(x) is dict and "content" in x:
                x["content"] += "!"
            elif type(x) is list:
                x.append(item)
            elif isinstance(x, Note):
                x.tags.append("more")
        case "again" if xs:
            xs.append(copy.deepcopy(xs[at % len(xs)]))
        case "retype" if xs:
            a, b = TWINS[n % len(TWINS)]
            xs[at % len(xs)] = {"v": b if n % 2 else a, "pad": "p" * 50}
            value["agent_state"]["twin"] = [a if n % 2 else b] * 100
        case "reorder":
            value["agent_state"] = dict(reversed(value["agent_state"].items()))
        case "move":
            value["agent_state"]["history"] = list(xs)
        case "key":
            value["agent_state"][f"k{n % 4}"] = item
            if n % 5 == 0:
                value["agent_state"].pop(f"k{n % 3}", None)
        case _:
            pass


def start(n: int) -> dict[str, Any]:
    return {"messages": [message(i) for i in range(n)], "agent_state": {"phase": "plan"}, "metadata": {}, "step": 0}


@given(st.integers(0, 150), edits)
def test_any_script_of_edits(n: int, script: list[Any]) -> None:
    value = start(n)
    task = Task()
    task.save(value)
    for verb, k, item in script:
        edit(value, verb, k, copy.deepcopy(item))
        task.save(value)


@given(st.integers(0, 150), edits)
def test_any_script_of_edits_from_bases_that_were_loaded(n: int, script: list[Any]) -> None:
    value = start(n)
    task = Task()
    task.save(value)
    for verb, k, item in script:
        packed = task.base
        assert packed is not None
        value, task.base = unpack(packed.data, packed.refs, task.store, REGISTRY)
        if k % 3 == 0:
            assert not task.save(value).new
        edit(value, verb, k, copy.deepcopy(item))
        task.save(value)


@given(st.integers(0, 150), edits, st.booleans())
def test_any_script_of_edits_with_warm_packs(n: int, script: list[Any], loaded: bool) -> None:
    """What a warm pack has may be gone from the store: everything of it is sent again."""
    value = start(n)
    task = Task()
    task.save(value)
    other = Task()
    warm = task.base
    assert warm is not None
    for verb, k, item in script:
        edit(value, verb, k, copy.deepcopy(item))
        if k % 2:
            other.base = None
        other.save(value, warm=(warm,))
        assert other.base is not None
        warm = other.loaded if loaded else task.save(value)


@given(st.integers(0, 100), edits)
def test_arguments_and_states_take_turns(n: int, script: list[Any]) -> None:
    value = start(n)
    task = Task()
    task.save(value)
    state = task.base
    assert state is not None
    for verb, k, item in script:
        edit(value, verb, k, copy.deepcopy(item))
        call = Task(opened=False)
        call.base, call.store = state, dict(task.store)
        call.save({"messages": value["messages"], "agent_state": value["agent_state"], "tail": value["messages"][-k % 50 :]})
        state = task.save(value, warm=(call.base,) if call.base is not state else ())


# Cost follows change ---------------------------------------------------------------------------------------------------


def levels(n: int) -> int:
    """Most levels of index pages over n items: each level has an eighth of the one below, or less."""
    count = 0
    n //= PAGE_MIN
    while n >= PAGE_MIN:
        n //= PAGE_MIN
        count += 1
    return count


@pytest.mark.parametrize("size", [30, 300])
def test_an_append_writes_one_item_one_page_a_level_and_the_list_root(size: int) -> None:
    value = start(0)
    base = None
    most = 0
    total = 0
    for i in range(700):
        value["messages"].append(message(i, size))
        packed = pack(value, REGISTRY, base=base)
        # item, leaf page, an index page for each level, list root; and once, when the list is no longer inline, all its items
        grown = base is not None and bool(packed.refs) and not base.refs
        assert len(packed.new) <= 1 + 1 + levels(i + 1) + 1 + grown * (LIST_MIN // ITEM_MIN)
        most = max(most, len(packed.new))
        total += len(packed.new)
        base = packed
    assert most >= 4
    assert total < 700 * 2.3


def edit_bound(n: int, items: int = 1) -> int:
    """Objects for an edit anywhere: the items; two leaf pages (the one it is in, and the next if the cut moves on), rarely a third;
    up to three index pages a level for the same reason; the list root."""
    return items + 3 + 3 * levels(n) + 1


def test_a_sliding_window_does_not_write_its_pages_again() -> None:
    value = start(0)
    value["messages"] = [message(i) for i in range(500)]
    base = pack(value, REGISTRY)
    counts: list[int] = []
    for i in range(500, 900):
        value["messages"] = [*value["messages"][1:], message(i)]
        packed = pack(value, REGISTRY, base=base)
        counts.append(len(packed.new))
        # the append, and the edit at the front
        assert len(packed.new) <= (3 + levels(500)) + edit_bound(500, 0)
        base = packed
    assert sum(counts) / len(counts) < 6


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("verb", ["replace", "insert", "remove", "deep"])
def test_an_edit_in_the_middle_writes_a_page_or_two(verb: str, loaded: bool) -> None:
    counts: list[int] = []
    for seed in range(60):
        value = start(0)
        value["messages"] = [message(i) for i in range(400)]
        base = pack(value, REGISTRY)
        if loaded:
            value, base = unpack(base.data, base.refs, {o.name: o for o in base.new}, REGISTRY)
        edit(value, verb, random.Random(seed).randrange(400), message(10_000 + seed))
        counts.append(len(pack(value, REGISTRY, base=base).new))
        assert counts[-1] <= edit_bound(400) + 4
    assert sum(counts) / len(counts) <= 6


def test_many_equal_items_make_pages_all_the_same() -> None:
    for item in ("same", message(0)):
        task = Task()
        value: dict[str, Any] = {"messages": [copy.deepcopy(item) for _ in range(10_000)]}
        assert len(task.save(value).new) < 40
        value["messages"].insert(5_000, "other")
        assert len(task.save(value).new) < 40
        del value["messages"][:1]
        assert len(task.save(value).new) < 40


def test_a_large_value_that_has_not_changed_is_not_written_and_a_change_deep_in_it_is_cheap() -> None:
    task = Task()
    table = {f"row{i}": {"cells": [f"{i}.{j}" * 20 for j in range(40)]} for i in range(40)}
    value: dict[str, Any] = {"agent_state": {"tables": {"first": table, "name": "t"}, "text": "t" * 100_000}, "step": 0}
    task.save(value)
    value["step"] = 1
    assert not task.save(value).new
    table["row7"]["cells"][3] = "changed"
    new = task.save(value).new
    assert sum(len(o.data) for o in new) < 12_000
    value["agent_state"]["moved"] = value["agent_state"].pop("text")
    assert sum(len(o.data) for o in task.save(value).new) < 1_000


# Sharing -----------------------------------------------------------------------------------------------------------------


def test_a_call_that_is_given_the_history_costs_one_name() -> None:
    state = start(300)
    head = pack(state, REGISTRY)
    call = pack({"messages": state["messages"]}, REGISTRY, base=head, opened=False)
    assert call.new == ()
    assert len(call.refs) == 16
    assert len(call.data) < 20
    state["messages"].append(message(1000))
    call = pack({"history": state["messages"], "n": 1}, REGISTRY, base=head, opened=False)
    assert len(call.new) <= 3 + levels(301)
    saved = pack(state, REGISTRY, base=head)
    assert {o.name for o in call.new} == {o.name for o in saved.new}


def test_a_reply_is_the_message_that_it_becomes() -> None:
    reply = message(7, 900)
    result = pack({"result": reply}, REGISTRY, opened=False)
    state = start(300)
    state["messages"].append(reply)
    assert [o.name for o in result.new] == [result.refs]
    assert result.refs in {o.name for o in pack(state, REGISTRY, base=pack(start(300), REGISTRY)).new}


def test_equal_items_are_stored_once_and_revived_apart() -> None:
    one = message(1)
    packed = Task().save(
        {"messages": [one, one, copy.deepcopy(one)], "agent_state": {"a": [message(2)] * 9, "b": [message(2)] * 9}}
    )
    value, _ = unpack(packed.data, packed.refs, {o.name: o for o in packed.new}, REGISTRY)
    assert len({id(m) for m in value["messages"]}) == 3
    assert len({id(m) for k in "ab" for m in value["agent_state"][k]}) == 18
    assert len({id(value["agent_state"][k]) for k in "ab"}) == 2


# Fingerprints --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["item", "page", "value", "inline"])
@pytest.mark.parametrize("pair", TWINS)
def test_a_change_of_type_is_a_change(pair: tuple[Any, Any], where: str) -> None:
    for a, b in (pair, pair[::-1]):

        def build(x: Any) -> dict[str, Any]:
            match where:
                case "item":
                    return {"messages": [{"x": x, "pad": "p" * 90}] * 9}
                case "page":
                    return {"messages": [*({"x": x, "i": i, "pad": "p" * 90} for i in range(100))]}
                case "value":
                    return {"agent_state": {"v": {"x": [x] * 50, "pad": "p" * 300}}}
                case _:
                    return {"agent_state": {"v": x}, "messages": [x] * 700}

        task = Task()
        first = task.save(build(a))
        task.save(build(a))
        assert task.save(build(b)).digest != first.digest
        task.base = task.loaded
        assert task.save(build(a)).digest == first.digest


@pytest.mark.parametrize("loaded", [False, True])
def test_an_unchanged_list_is_compared_and_not_encoded(monkeypatch: pytest.MonkeyPatch, loaded: bool) -> None:
    """Marshal's bytes depend on reference counts; were those not the same each time, all would work, and be slow."""
    value = start(500)
    base = pack(value, REGISTRY)
    if loaded:
        value, base = unpack(base.data, base.refs, {o.name: o for o in base.new}, REGISTRY)
        base = pack(value, REGISTRY, base=base)
    encoded: list[str] = []

    def counting(value: Any, registry: Registry, *, path: str = "", depth: int = 0) -> bytes:
        if path.startswith("messages"):
            encoded.append(path)
        return encode(value, registry, path=path, depth=depth)

    monkeypatch.setattr("safepoint.codec.lists.encode", counting)
    base = pack(value, REGISTRY, base=base)
    assert encoded == []
    value["messages"].append(message(1000))
    pack(value, REGISTRY, base=base)
    assert encoded == ["messages[500]"]


def test_reference_counts_cost_time_and_nothing_else() -> None:
    value = start(200)
    base = pack(value, REGISTRY)
    held = [m["content"] for m in value["messages"]]
    packed = pack(value, REGISTRY, base=base)
    assert packed.new == ()
    del held
    assert pack(value, REGISTRY, base=packed).new == ()


def test_a_value_that_another_thread_changes_while_it_is_packed_is_seen_by_the_next_pack() -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(20):
            value = start(60)
            stop = threading.Event()

            def change(messages: list[Any] = value["messages"], stop: threading.Event = stop) -> None:
                i = 0
                while not stop.is_set():
                    i += 1
                    messages[i % 60]["content"] = f"{i}" * 60

            thread = threading.Thread(target=change)
            thread.start()
            base = None
            store: dict[bytes, Obj] = {}
            try:
                for _ in range(10):
                    base = pack(value, REGISTRY, base=base)
                    assert all(verify_obj(o) for o in base.new)
                    store.update((o.name, o) for o in base.new)
                    unpack(base.data, base.refs, store, REGISTRY)
            finally:
                stop.set()
                thread.join()
            last = pack(value, REGISTRY, base=base)
            assert last.digest == pack(value, REGISTRY).digest
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("n", [5, 100])
def test_a_change_right_after_a_value_was_encoded_is_seen_by_the_next_pack(
    monkeypatch: pytest.MonkeyPatch, n: int, loaded: bool
) -> None:
    """The race of the test before, made certain: whatever is encoded is changed before anything else looks at it."""

    def racing(value: Any, registry: Registry, *, path: str = "", depth: int = 0) -> bytes:
        code = encode(value, registry, path=path, depth=depth)
        for m in value if type(value) is list else [value]:
            if type(m) is dict and "content" in m:
                m["content"] = m["content"].replace("x", "y", 1)
        return code

    value = {"messages": [message(i) for i in range(n)], "agent_state": {"last": message(1, 900)}}
    base = None
    if loaded:
        base = pack(value, REGISTRY)
        value, base = unpack(base.data, base.refs, {o.name: o for o in base.new}, REGISTRY)
    monkeypatch.setattr("safepoint.codec.lists.encode", racing)
    base = pack(value, REGISTRY, base=base)
    monkeypatch.undo()
    assert pack(value, REGISTRY, base=base).digest == pack(value, REGISTRY).digest


def test_what_a_dict_loses_is_known_to_be_in_the_base() -> None:
    value = {"agent_state": {"a": "x" * 500, "b": "y" * 500}}
    base = pack(value, REGISTRY)
    value["agent_state"]["c"] = value["agent_state"].pop("a")
    assert pack(value, REGISTRY, base=base).new == ()


# Edges -----------------------------------------------------------------------------------------------------------------------


class Colour(StrEnum):
    RED = "red"


def test_what_cannot_be_stored_is_refused_with_its_path() -> None:
    value = start(100)
    base = pack(value, REGISTRY)
    value["messages"][50]["content"] = Colour.RED
    for b in (None, base):
        with pytest.raises(RefusedType, match=r"messages\[50\]\['content'\]"):
            pack(value, REGISTRY, base=b)
    value = start(3)
    value["agent_state"]["me"] = value["agent_state"]
    with pytest.raises(RefusedType, match="agent_state"):
        pack(value, REGISTRY)
    with pytest.raises(RefusedType, match="key"):
        pack({"\ud800": 1}, REGISTRY)


@pytest.mark.parametrize("wrap", [lambda x: [x], lambda x: {"k": x}, lambda x: [[x], "pad"]])
def test_large_values_nested_to_the_limit(wrap: Any) -> None:
    deepest: Any = ["text" * BIG]
    for _ in range(60):
        deepest = wrap(deepest)
    task = Task()
    value = {"messages": [deepest, "x" * LIST_MIN], "agent_state": {"v": deepest, "w": {"v": deepest}}}
    task.save(value)
    task.save({**value, "step": 2})
    task.base = task.loaded
    task.save(value)


def test_an_item_may_be_nested_as_deep_as_any_value() -> None:
    deep: Any = "leaf"
    for _ in range(198):
        deep = [deep]
    for value in (
        {"messages": [deep] * 30},
        {"messages": [message(1), {"m": deep[0]}, message(2)], "agent_state": {"v": deep}},
    ):
        Task().save(value)


def test_damage_is_found_and_named() -> None:
    state = start(130)
    state["agent_state"]["big"] = {f"k{i}": "v" * 1000 for i in range(30)}
    packed = pack(state, REGISTRY)
    store = {o.name: o for o in packed.new}
    for obj in packed.new:
        for bad in (None, obj._replace(data=obj.data + b"x"), obj._replace(refs=obj.refs + bytes(16))):
            broken = {k: v for k, v in store.items() if k != obj.name}
            if bad is not None:
                assert not verify_obj(bad)
                broken[obj.name] = bad
            with pytest.raises(Damaged, match=obj.name.hex()):
                unpack(packed.data, packed.refs, broken, REGISTRY)
            with pytest.raises(Damaged, match=obj.name.hex()):
                unpack_plain(packed.data, packed.refs, broken)


def forge(*objs: tuple[bytes, bytes]) -> dict[bytes, Obj]:
    return {name_of(refs, data): Obj(name_of(refs, data), refs, data) for refs, data in objs}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x",
        b"v",
        b"v\xc1",
        b"r",
        b"r\x94\x01\x01\x91\x01\x90",
        b"r\x94\x01\x01\x91\xff\x90",
        b"r\x94\x00\x00\x90\x91\x01",
        b"l\x92\x01\x90",
        b"i\x93\x01\x01\x01",
    ],
)
def test_forged_objects_are_damage(data: bytes) -> None:
    for refs in (b"", bytes(16)):
        store = forge((refs, data))
        root = encode({"k": None}, REGISTRY)[:-1] + pack({"k": "x" * 999}, REGISTRY).data[3:]
        with pytest.raises(Damaged):
            unpack(root, next(iter(store)), store, REGISTRY)


def test_forged_depth_is_damage() -> None:
    code = pack({"k": "x" * 999}, REGISTRY).data
    store = forge((b"", b"v\x01"))
    name = next(iter(store))
    for _ in range(DEPTH_MAX * 100):
        more = forge((name, b"v" + code))
        store.update(more)
        name = next(iter(more))
    with pytest.raises(Damaged, match="deep"):
        unpack(code, name, store, REGISTRY)


def test_a_root_that_does_not_use_its_references_is_damage() -> None:
    with pytest.raises(Damaged, match="root"):
        unpack(b"\x80", bytes(16), {}, REGISTRY)
    with pytest.raises(Damaged, match="root"):
        unpack(b"\xc1", b"", {}, REGISTRY)


def test_plain_form_needs_no_class() -> None:
    packed = pack({"messages": [Note("n" * 600, ["t"])] * 3, "step": 1}, REGISTRY)
    plain = unpack_plain(packed.data, packed.refs, {o.name: o for o in packed.new})
    assert plain["step"] == 1
    assert len(plain["messages"]) == 3
    with pytest.raises(RefusedType):
        unpack(packed.data, packed.refs, {o.name: o for o in packed.new}, Registry(parent=None))


def test_a_packed_is_its_own_copy() -> None:
    packed = pack(start(50), REGISTRY)
    assert copy.copy(packed) is packed
    assert copy.deepcopy({"p": packed})["p"] is packed
    assert "x" * 20 not in repr(packed)


def sizes(values: Iterable[Any]) -> list[int]:
    return [len(pack({"v": v}, REGISTRY).refs) // 16 for v in values]


def test_thresholds() -> None:
    text = "x" * (VALUE_MIN - 2)  # and two bytes for its length
    assert sizes([text, text + "x"]) == [0, 1]
    full = ["x" * 97] * 5  # 99 bytes each, and one for the list
    assert sizes([full, [*full, "y" * 15], [*full, "y" * 17]]) == [0, 0, 1]
    assert sizes([2**1000, 2**4000]) == [0, 1]
    assert PAGE_MAX > PAGE_MIN


# The bytes that are stored -----------------------------------------------------------------------------------------------------


def test_the_stored_form_does_not_change_by_accident() -> None:
    """These digests are what stores hold. A change here is a change of format, and needs a new format number."""
    value = {
        "messages": [message(i) for i in range(400)],
        "agent_state": {"a": "x" * 5000, "b": {"c": 1}, "l": ["y" * 99] * 30},
    }
    assert pack(value, REGISTRY).digest.hex() == "44368a567f60e7285eb362978f4f999e"

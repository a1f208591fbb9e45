"""The form of LangGraph's checkpoints: what is stored, what is stored again, and what comes back."""

import copy
import json
import random
import uuid
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, SystemMessage, ToolMessage
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.checkpoint.serde.types import _DeltaSnapshot
from langgraph.types import Send

from safepoint.adapters.langgraph.form import Form, Loaded
from safepoint.adapters.langgraph.lazy import Base, Channels
from safepoint.codec import decode_plain, states, values
from safepoint.codec.chunks import Packed, unpack, unpack_plain
from safepoint.codec.registry import Registry
from safepoint.codec.states import Control
from safepoint.errors import Damaged, InvalidState, RefusedType
from safepoint.model import Obj, State
from tests.support.scale import scale

FORM = Form()


def message(i: int, size: int = 300) -> AnyMessage:
    text = (f"message {i} " * size)[:size]
    if i % 3 == 0:
        return HumanMessage(text, id=f"m{i}")
    if i % 3 == 1:
        call = {"name": "look", "args": {"q": i, "deep": {"a": [1, 2.5, None]}}, "id": f"c{i}"}
        usage: Any = {"input_tokens": 1, "output_tokens": i, "total_tokens": i + 1}
        return AIMessage(text, id=f"m{i}", tool_calls=[call], response_metadata={"model": "m"}, usage_metadata=usage)
    return ToolMessage(text, tool_call_id=f"c{i - 1}", id=f"m{i}")


def checkpoint(values: dict[str, Any], version: Any = 1, **beside: Any) -> dict[str, Any]:
    return {
        "v": 4,
        "id": f"id-{version}",
        "ts": "2026-01-01T00:00:00.000000+00:00",
        "channel_values": values,
        "channel_versions": dict.fromkeys(values, version),
        "versions_seen": {"__input__": {}, "node": {"branch:to:node": version}},
        "updated_channels": sorted(values),
        **beside,
    }


class Store:
    """Holds what a store would: only what a pack has handed out as new."""

    def __init__(self) -> None:
        self.objects: dict[bytes, Obj] = {}

    def keep(self, packed: Packed) -> Packed:
        self.objects.update({obj.name: obj for obj in packed.new})
        assert packed.names() <= self.objects.keys()
        return packed

    def load(self, packed: Packed, form: Form = FORM, **options: Any) -> Loaded:
        return form.unpack(packed.data, packed.refs, self.objects, id="x", size=packed.size, **options)


def exactly(a: Any, b: Any) -> bool:
    """Equal in class and in all that pydantic keeps."""
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(exactly, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(exactly(a[key], b[key]) for key in a)
    if hasattr(a, "__pydantic_fields_set__"):
        names = ("__dict__", "__pydantic_fields_set__", "__pydantic_extra__", "__pydantic_private__")
        return all(exactly(getattr(a, name), getattr(b, name)) for name in names)
    return bool(a == b)


def test_a_checkpoint_comes_back_whole_and_is_an_ordinary_state() -> None:
    history = [message(i) for i in range(100)]
    given_ = checkpoint(
        {"messages": history, "n": 3, "tasks": [Send("x", {"messages": history[:2]})]}, pending_sends=[("t", 1)]
    )
    facts = {"source": "loop", "step": 4, "parents": {"": "abc"}, "counters_since_delta_snapshot": {"m": (1, 2)}}
    store = Store()
    packed = store.keep(FORM.pack(given_, metadata=facts))
    loaded = store.load(packed)
    assert loaded.metadata == facts
    assert loaded.checkpoint["id"] == "x"  # the row's
    assert {**loaded.checkpoint, "channel_values": dict(loaded.checkpoint["channel_values"]), "id": given_["id"]} == given_
    assert exactly(loaded.checkpoint["channel_values"]["messages"], history)

    # Any verb of safepoint reads it, with a registry that knows none of these classes.
    tree, _ = unpack(packed.data, packed.refs, store.objects, Registry(parent=None), size=packed.size)
    assert tree["agent_state"] == unpack_plain(packed.data, packed.refs, store.objects)["agent_state"]
    Control.of(tree)
    assert (tree["step"], tree["metadata"], tree["messages"]) == (4, facts, [])
    first = tree["agent_state"]["messages"][0]
    assert first == {"@class": "HumanMessage", "fields": vars(history[0]), "set": ["content", "id"]}
    assert tree["agent_state"]["tasks"][0]["fields"]["arg"]["messages"][1]["@class"] == "AIMessage"
    assert tree["langgraph"]["channel_versions"] == {"messages": 1, "n": 1, "tasks": 1}


def test_versions_are_stored_bare() -> None:
    class Version(int):
        origin = "here"

    class Text(str):
        __slots__ = ("origin",)

    for version in (Version(7), Text("0007.1"), 7.5):
        given_ = checkpoint({"a": 1}, version)
        loaded = Store().load(FORM.pack(given_))
        assert loaded.checkpoint["channel_versions"] == given_["channel_versions"]
        assert type(loaded.checkpoint["channel_versions"]["a"]) in (int, str, float)
        assert type(loaded.checkpoint["versions_seen"]["node"]["branch:to:node"]) in (int, str, float)


def test_channels_are_decoded_when_they_are_asked_for() -> None:
    store = Store()
    packed = store.keep(FORM.pack(checkpoint({"big": ["x" * 100] * 20, "small": 1})))
    fetched: list[int] = []

    def fetch() -> dict[bytes, Obj]:
        fetched.append(1)
        return store.objects

    loaded = FORM.unpack(packed.data, packed.refs, fetch, id="x")
    values = loaded.checkpoint["channel_values"]
    assert not isinstance(values, dict)
    assert isinstance(values, Channels)
    assert (list(values), len(values), "big" in values, values["small"]) == (["big", "small"], 2, True, 1)
    assert not fetched
    assert values["big"] is values["big"]
    assert values == {"big": ["x" * 100] * 20, "small": 1}
    assert "x" * 100 not in repr(values)
    for made in (values.copy(), copy.deepcopy(values), values | {}, {} | values):
        assert type(made) is dict
        assert made == values
    with pytest.raises(KeyError):
        values["other"]
    values["small"] = 2
    del values["big"]
    assert dict(values) == {"small": 2}
    assert dict(FORM.unpack(packed.data, packed.refs, fetch, id="x").checkpoint["channel_values"])["small"] == 1
    with pytest.raises(TypeError):
        json.dumps(values)  # loud, where a subclass of dict would be written as {}


def test_what_is_kept_is_neither_looked_at_nor_sent_again() -> None:
    store = Store()
    history = [message(i) for i in range(200)]
    first = store.keep(FORM.pack(checkpoint({"messages": history, "n": 1}, 1)))
    then = checkpoint({"messages": object(), "n": 2}, 2)
    then["channel_versions"]["messages"] = 1
    second = store.keep(FORM.pack(then, {"n": 2}, parent=first))  # an object() would be refused
    assert len(second.new) == 0
    assert store.load(second).checkpoint["channel_values"]["messages"] == history

    # Not in new_versions, but in another version than the parent's (a copy put under its grandparent), or not in the parent.
    other = checkpoint({"messages": history[:5], "n": 2, "more": [1]}, 2)
    third = store.keep(FORM.pack(other, {}, parent=first))
    assert dict(store.load(third).checkpoint["channel_values"]) == other["channel_values"]
    assert FORM.pack(other).digest == third.digest


def test_an_append_writes_little_and_a_change_in_place_is_seen() -> None:
    store = Store()
    history = [message(i, 1200) for i in range(400)]
    parent = store.keep(FORM.pack(checkpoint({"messages": history}, 1)))
    history.append(message(401, 1200))
    new = {"messages": 2}
    packed = store.keep(FORM.pack(checkpoint({"messages": history}, 2), new, parent=parent))
    assert sum(len(obj.data) + len(obj.refs) for obj in packed.new) < 4000
    call = history[1]
    assert isinstance(call, AIMessage)
    call.tool_calls[0]["args"]["deep"]["a"][0] = 99
    history[7].additional_kwargs["seen"] = True
    changed = store.keep(FORM.pack(checkpoint({"messages": history}, 3), {"messages": 3}, parent=packed))
    assert exactly(store.load(changed).checkpoint["channel_values"]["messages"], history)
    assert not exactly(store.load(packed).checkpoint["channel_values"]["messages"], history)


def test_a_write_and_the_channel_that_it_goes_into_share_their_objects() -> None:
    store = Store()
    history = [message(i) for i in range(50)]
    base = store.keep(FORM.pack(checkpoint({"messages": history})))
    reply, lone = message(52, 900), message(53, 900)
    written = store.keep(FORM.pack_writes([("messages", [reply]), ("lone", lone), ("__no_writes__", None)], base=base))
    made = {obj.name for obj in written.new}
    after = FORM.pack(checkpoint({"messages": [*history, reply, lone]}, 2), {"messages": 2}, parent=base)
    assert len({obj.name for obj in after.new} & made) == 2
    back = FORM.unpack_writes(written.data, written.refs, store.objects, size=written.size)
    assert exactly(back, [("messages", [reply]), ("lone", lone), ("__no_writes__", None)])
    assert len(written.new) == 2  # no list beside them
    lists: list[list[Any]] = [
        [],
        [reply],
        [[]],
        [message(i) for i in range(8)],
        [message(i) for i in range(9)],
        list("abcdefgh"),
    ]
    for long in lists:
        for flat in (False, True):
            several = [("a", long), ("b", (long,)), ("a", long)]
            packed = store.keep(FORM.pack_writes(several, base=base, flat=flat))
            assert exactly(FORM.unpack_writes(packed.data, packed.refs, store.objects), several)
            assert packed.digest == FORM.pack_writes(several, flat=flat).digest
    for forged in (
        {},
        {"channels": 5},
        {"channels": ["a"]},
        {"channels": [["a", 2]], "0.0": 1},
        {"channels": [], "0": 1},
        {"channels": [5], "0": 1},
    ):
        root = msgspec.msgpack.encode(forged)
        with pytest.raises(Damaged):
            FORM.unpack_writes(root, b"", {})
    # The whole history, handed on by a node, is no more than a name.
    whole = store.keep(FORM.pack_writes([("messages", history)], base=base))
    assert not whole.new
    assert FORM.unpack_writes(*_flat(FORM.pack_writes(back, flat=True))) == back


def _flat(packed: Packed) -> tuple[bytes, bytes, dict[bytes, Obj]]:
    assert not packed.new
    assert not packed.refs
    return packed.data, packed.refs, {}


def test_a_store_that_is_not_chunked() -> None:
    given_ = checkpoint({"messages": [message(i) for i in range(60)], "doc": Document("x", metadata={"a": 1}), "n": None})
    packed = FORM.pack(given_, {"n": 1}, parent=FORM.pack(given_), flat=True)
    root, refs, objects = _flat(packed)
    loaded = FORM.unpack(root, refs, objects, id="x", size=packed.size)
    assert exactly(dict(loaded.checkpoint["channel_values"]), given_["channel_values"])
    assert FORM.pack(loaded.checkpoint, None, parent=loaded, flat=True).digest == packed.digest


def test_plain_containers_with_messages_in_them_and_dicts_that_look_like_ours() -> None:
    inner = message(1)
    values: dict[str, Any] = {
        "__start__": {"messages": [inner, {"role": "user"}], "t": (1, inner), "s": {1, 2}},
        "fake": {"@class": "HumanMessage", "fields": {"content": "x"}, "set": []},
        "fakes": [
            {"@class": "os:system"},
            {"a": {"@class": 5}},
            {"@class": {"@class": inner}},
            {"@class": "dict", "value": {}},
        ],
        "nested": [[inner], (inner,), {"a": {"b": [inner]}}, ((), ((inner,),))],
        "delta": _DeltaSnapshot([inner, inner]),
        "wide": [{"role": "user", "content": "x" * 100, "n": i} for i in range(100)],
        "odd": {1: inner, (2, 3): [inner], "@class": 1},
        "text": inner.text,
        "texts": [HumanMessage([{"type": "text", "text": inner.text}], id="1"), message(2), {"answer": inner.text}],
    }
    for flat in (False, True):
        store = Store()
        packed = store.keep(FORM.pack(checkpoint(values), flat=flat))
        for marked in (False, True):
            loaded = store.load(packed, marked=marked)
            assert exactly(dict(loaded.checkpoint["channel_values"]), values)
            again = FORM.pack({**loaded.checkpoint, "id": "y"}, None, parent=loaded, flat=flat)
            assert again.digest == packed.digest
            assert not again.new


def test_many_channels_and_odd_names() -> None:
    values = {f"channel {i} é'\"[": "x" * (i % 300) for i in range(200)} | {"": 1, "@class": 2, "agent_state": [3]}
    store = Store()
    packed = store.keep(FORM.pack(checkpoint(values)))
    loaded = store.load(packed)
    assert dict(loaded.checkpoint["channel_values"]) == values
    assert loaded.checkpoint["channel_versions"] == dict.fromkeys(values, 1)
    kept = checkpoint(values | {"": 2}, 1)
    kept["channel_versions"][""] = 2
    again = store.keep(FORM.pack(kept, {"": 2}, parent=store.load(packed)))
    assert dict(store.load(again).checkpoint["channel_values"]) == values | {"": 2}
    assert again.digest == FORM.pack(kept).digest
    with pytest.raises(RefusedType):
        FORM.pack(checkpoint({"\ud800": 1}))


def test_metadata_in_a_header() -> None:
    facts = {
        "source": "loop",
        "step": -1,
        "parents": {},
        "counters_since_delta_snapshot": {"m": (1, 2)},
        "user": "é",
        "k": None,
    }
    data = FORM.pack_metadata(facts)
    assert FORM.unpack_metadata(data) == facts
    assert decode_plain(data)["user"] == "é"
    assert states.encode_metadata(facts, FORM.registry) == data
    assert FORM.unpack_metadata(FORM.pack_metadata({})) == {}
    with pytest.raises(InvalidState):
        FORM.pack_metadata({"long": "x" * 9000})
    with pytest.raises(Damaged):
        FORM.unpack_metadata(b"\x93\x01\x02\x03")
    assert Store().load(FORM.pack(checkpoint({}), metadata={"step": -1}, step=7)).checkpoint["channel_values"] == {}


def test_an_empty_checkpoint_and_one_that_is_none_of_langgraphs() -> None:
    empty: Any = empty_checkpoint()
    loaded = Store().load(FORM.pack(empty))
    assert dict(loaded.checkpoint["channel_values"]) == {}
    assert {**loaded.checkpoint, "id": empty["id"], "channel_values": {}} == empty
    plain = states.pack_state(State("t", agent_state={"a": 1}), Control(), Registry(), None)
    with pytest.raises(InvalidState, match="no checkpoint of LangGraph"):
        Store().load(plain)


def test_damage_is_told_where_it_is() -> None:
    store = Store()
    packed = store.keep(FORM.pack(checkpoint({"messages": [message(i) for i in range(60)], "n": 5})))
    gone = next(name for name, obj in store.objects.items() if b"message 7 " in obj.data)
    whole = store.objects.pop(gone)
    loaded = store.load(packed, at="thread@3")
    assert loaded.checkpoint["channel_values"]["n"] == 5
    with pytest.raises(Damaged):
        loaded.checkpoint["channel_values"]["messages"]
    with pytest.raises(Damaged):
        FORM.pack(checkpoint({"n": 6}, 2), {"n": 2}, parent=loaded)
    store.objects[gone] = Obj(whole.name, b"", whole.data.replace(b"message 7 ", b"message 8 ", 1))
    with pytest.raises(Damaged):
        store.load(packed).checkpoint["channel_values"]["messages"]
    for cut in range(0, len(packed.data), 7):
        with pytest.raises(Damaged):
            dict(FORM.unpack(packed.data[:cut], packed.refs, store.objects, id="x").checkpoint["channel_values"])


# Histories of edits --------------------------------------------------------------------------------------------------


class Edit(NamedTuple):
    kind: str
    at: float
    n: int


KINDS = (
    "append",
    "append",
    "append",
    "replace",
    "remove",
    "trim",
    "head",
    "in place",
    "insert",
    "duplicate",
    "class",
    "swap",
    "reopen",
)
edits = st.lists(st.builds(Edit, st.sampled_from(KINDS), st.floats(0, 1, exclude_max=True), st.integers(0, 40)), max_size=25)


def apply(edit: Edit, xs: list[Any], fresh: Any) -> None:
    i = int(edit.at * len(xs)) if xs else 0
    match edit.kind:
        case "append":
            xs.extend(fresh() for _ in range(edit.n % 7 + 1))
        case "insert":
            xs.insert(i, fresh())
        case "trim":
            del xs[: edit.n]
        case "head":
            xs.insert(0, SystemMessage("You are.", id="sys"))
        case _ if not xs:
            pass
        case "replace":
            xs[i] = xs[i].model_copy(update={"content": f"again {edit.n}"})
        case "remove":
            del xs[i]
        case "in place":
            xs[i].response_metadata["n"] = (edit.n,) if edit.n % 5 == 0 else edit.n
        case "duplicate":
            xs.append(xs[i])
        case "class":
            xs[i] = HumanMessage(content=xs[i].content, id=xs[i].id, extra=edit.n)
        case "swap":
            xs[i], xs[-1] = xs[-1], xs[i]


def run_script(script: list[Edit], begin: int) -> None:
    counter = iter(range(begin, 100_000))

    def fresh() -> Any:
        return message(next(counter), 20 + next(counter) % 90)

    store = Store()
    xs = [fresh() for _ in range(begin)]
    parent: Any = None
    seen: list[tuple[Packed, list[Any]]] = []
    for version, edit in enumerate(script):
        if edit.kind == "reopen" and seen:
            parent = store.load(seen[-1][0], marked=edit.n % 2 == 0)
            xs = parent.checkpoint["channel_values"]["messages"]
            if edit.n % 3 == 0:
                parent = None
        else:
            apply(edit, xs, fresh)
        given_ = checkpoint({"messages": xs, "n": version}, version)
        warm = FORM.pack(given_, {"messages": version, "n": version}, parent=parent)
        cold = FORM.pack(given_)
        assert (warm.digest, warm.size, warm.data) == (cold.digest, cold.size, cold.data)
        parent = store.keep(warm)
        seen.append((warm, copy.deepcopy(xs)))
    for packed, was in seen:
        assert exactly(store.load(packed).checkpoint["channel_values"]["messages"], was)


@given(edits, st.sampled_from([0, 3, 40]))
@settings(max_examples=25, deadline=None)
def test_any_history_of_edits_reads_back_and_packs_the_same_from_nothing(script: list[Edit], begin: int) -> None:
    run_script(script, begin)


@pytest.mark.scaled
def test_many_histories_of_edits() -> None:
    draw = random.Random(5)
    for _ in range(scale(6, 150)):
        run_script([Edit(draw.choice(KINDS), draw.random(), draw.randrange(41)) for _ in range(30)], draw.choice([0, 10, 120]))


def test_marks_made_at_load_spare_the_next_pack_its_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    history = [message(i, 600) for i in range(300)]
    packed = store.keep(FORM.pack(checkpoint({"messages": history})))
    loaded = store.load(packed, marked=True)
    history = [*loaded.checkpoint["channel_values"]["messages"], HumanMessage("new", id=str(uuid.uuid4()))]
    base = loaded.base()
    assert isinstance(base, Base)
    encoded = 0
    real = values.encode

    def counting(*args: Any, **options: Any) -> bytes:
        nonlocal encoded
        encoded += 1
        return real(*args, **options)

    monkeypatch.setattr("safepoint.codec.lists.encode", counting)
    again = FORM.pack(checkpoint({"messages": history}, 2), {"messages": 2}, parent=base)
    assert encoded < 100  # the tail, the new one, and pages where somebody else holds a text of theirs
    monkeypatch.undo()
    assert again.digest == FORM.pack(checkpoint({"messages": history}, 2)).digest

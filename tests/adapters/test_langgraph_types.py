"""Which types the LangGraph adapter stores: the same comes back, or it is refused when it is saved; and nothing is executed."""

import pickle
import re
import subprocess
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from ipaddress import ip_address, ip_interface, ip_network
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypedDict, TypeVar
from uuid import UUID
from zoneinfo import ZoneInfo

import langchain_core.messages as lc
import msgspec
import numpy as np
import pytest
from langchain_core.documents import Document
from langgraph._internal import _serde
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.serde._msgpack import SAFE_MSGPACK_TYPES
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.serde.types import _DeltaSnapshot
from langgraph.graph import START, StateGraph
from langgraph.store.base import GetOp, Item
from langgraph.types import Command, Interrupt, Overwrite, PregelTask, Send, StateSnapshot, TimeoutPolicy
from pydantic import BaseModel, ConfigDict, PrivateAttr, SecretStr

from safepoint.adapters.langgraph import SafepointSaver
from safepoint.adapters.langgraph.form import Form
from safepoint.adapters.langgraph.types import pairs_of
from safepoint.adapters.langgraph.wrapping import MODELS
from safepoint.codec import Registry, chunks
from safepoint.codec.chunks import Packed
from safepoint.errors import Damaged, RefusedType, SafepointError
from tests.adapters.test_langgraph_form import Store, checkpoint, exactly

HERE = __name__
T = TypeVar("T")
FORM = Form()


class Order(BaseModel):
    no: int
    note: str = ""


class Rush(Order):
    by: str = "noon"


class Loose(BaseModel):
    model_config = ConfigDict(extra="allow")
    a: int = 0
    _seen: list[int] = PrivateAttr(default_factory=list)


class Box(BaseModel, Generic[T]):
    inside: T


@dataclass
class Plan:
    goal: str
    done: int = field(default=0, init=False)

    @dataclass(frozen=True, slots=True)
    class Step:
        no: int
        color: "Plan.Color | None" = None

    class Color(Enum):
        RED = 1


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Stranger:
    a: Any


class MyMessage(lc.HumanMessage):
    mood: str = "calm"


class State(TypedDict, total=False):
    order: Order
    plan: Plan
    steps: list[Plan.Step]
    color: Plan.Color
    loose: Loose
    box: Box[int]
    anything: Any
    bare: list
    messages: list[lc.AnyMessage]


def trip(value: Any, form: Form = FORM, *, flat: bool = False, fresh: Form | None = None) -> Any:
    store = Store()
    packed = store.keep(form.pack(checkpoint({"x": value}), flat=flat))
    back = store.load(packed, fresh or form).checkpoint["channel_values"]["x"]
    written = store.keep(form.pack_writes([("x", value)], flat=flat))
    again = form.unpack_writes(written.data, written.refs, store.objects)
    assert exactly(again, [("x", back)])
    return back


# What LangGraph calls safe ---------------------------------------------------------------------------------------------

MESSAGES: list[Any] = [
    lc.HumanMessage("h", name="n", id="1", additional_kwargs={"a": 1}, extra_field=(1, 2)),
    lc.HumanMessageChunk(content="h"),
    lc.AIMessage(
        [{"type": "text", "text": "t"}, "x"], tool_calls=[{"name": "f", "args": {"x": 1}, "id": "c", "type": "tool_call"}]
    ),
    lc.AIMessageChunk(
        content="a", tool_call_chunks=[{"name": "f", "args": '{"x', "id": "c", "index": 0, "type": "tool_call_chunk"}]
    ),
    lc.SystemMessage("s"),
    lc.SystemMessageChunk(content="s"),
    lc.ChatMessage(content="c", role="critic"),
    lc.ChatMessageChunk(content="c", role="critic"),
    lc.ToolMessage("t", tool_call_id="c", artifact=[Document("d")], status="error"),
    lc.ToolMessageChunk(content="t", tool_call_id="c"),
    lc.FunctionMessage(content="f", name="f"),
    lc.FunctionMessageChunk(content="f", name="f"),
    lc.RemoveMessage(id="all"),
    lc.BaseMessage(content="b", type="base"),
    lc.BaseMessageChunk(content="b", type="base"),
    Document("page", metadata={"source": Path("x")}, id="7"),
]
INTERRUPT = Interrupt({"ask": lc.HumanMessage("?")}, "i1", response_schema={"type": "string"})
TASK = PregelTask("id", "node", ("a", 1, ("b",)), None, (INTERRUPT,), None, {"r": 1})
SNAPSHOT = StateSnapshot({"a": 1}, ("n",), {"configurable": {}}, {"source": "loop"}, "ts", None, (TASK,), (INTERRUPT,))
NOW = datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC)
LANGGRAPH: list[Any] = [
    Send("n", {"messages": MESSAGES[:2], "t": (1,)}),
    Send("n", None, timeout=TimeoutPolicy(run_timeout=timedelta(seconds=3))),
    TimeoutPolicy(idle_timeout=2.5),
    INTERRUPT,
    Command(update={"messages": MESSAGES[:1]}, goto=[Send("a", 1), "b"], resume={"i1": (1, 2)}, graph=Command.PARENT),
    Overwrite([MESSAGES[0]]),
    TASK,
    SNAPSHOT,
    Item(value={"a": [1]}, key="k", namespace=("a", "b"), created_at=NOW, updated_at=NOW),
    GetOp(("a",), "k"),
    _DeltaSnapshot([MESSAGES[0], 2]),
]
PLAIN: list[Any] = [
    *(
        NOW,
        date(2026, 1, 1),
        time(1, 2, fold=1),
        timedelta(1, 2, 3),
        timezone(timedelta(hours=2), "x"),
        ZoneInfo("Europe/Berlin"),
    ),
    *(
        UUID(int=5),
        Decimal("1.10"),
        {1, 2},
        frozenset({"a"}),
        deque([1, (2,)], 3),
        Path("/a/b"),
        re.compile("a|b", re.IGNORECASE),
    ),
    *(ip_address("10.0.0.1"), ip_interface("10.0.0.1/8"), ip_network("10.0.0.0/8")),
    *(ip_address("::1"), ip_interface("::1/64"), ip_network("::/0"), {ip_address("::1"): {ip_address("10.0.0.1")}}),
]


def test_all_that_langgraph_calls_safe() -> None:
    have = {(type(value).__module__, type(value).__name__) for value in [*MESSAGES, *LANGGRAPH, *PLAIN]} | {("re", "compile")}
    other = {("pathlib", "Path"), ("pathlib", "WindowsPath")} | {(m, n) for m, n in SAFE_MSGPACK_TYPES if m == "pathlib._local"}
    assert not SAFE_MSGPACK_TYPES - have - other
    assert {cls for cls in vars(lc).values() if isinstance(cls, type) and issubclass(cls, lc.BaseMessage)} <= MODELS.keys()
    for flat in (False, True):
        for value in [*MESSAGES, *LANGGRAPH, *PLAIN]:
            for put in (
                value,
                [value],
                {"deep": [(value,)]},
                [1, {"a": [value, value]}],
                Send("n", {"v": value}),
                [value] * 40,
            ):
                assert same(trip(put, flat=flat), put), put
    for each in MESSAGES:
        back = trip([each] * 3)
        assert JsonPlusSerializer().dumps_typed(back[0]) == JsonPlusSerializer().dumps_typed(each)
        back[0].id = "changed"  # every occurrence is an object of its own
        assert back[1] == each


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Send | Interrupt | Command | Overwrite | Item) and type(a) is type(b):
        names = getattr(type(a), "__slots__", None) or vars(a)
        return all(same(getattr(a, name), getattr(b, name)) for name in names if name != "__weakref__")
    if isinstance(a, list | tuple) and type(a) is type(b):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and type(a) is type(b):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return exactly(a, b)


# What a graph declares -------------------------------------------------------------------------------------------------


class Saver(BaseCheckpointSaver[Any]):
    allow: set[tuple[str, ...]]

    def with_allowlist(self, extra_allowlist: Any) -> "Saver":
        self.allow = set(extra_allowlist)
        return self


def declared(monkeypatch: pytest.MonkeyPatch, schema: type = State) -> Form:
    """A form that takes what compile() reports, as the adapter turns it on."""
    monkeypatch.setattr(_serde, "STRICT_MSGPACK_ENABLED", True)
    graph = StateGraph(schema)
    graph.add_node("n", lambda state: state)
    graph.add_edge(START, "n")
    saver = Saver()
    graph.compile(checkpointer=saver)
    return FORM.allowing(saver.allow)


def loose() -> Loose:
    made = Loose.model_validate({"a": 1, "b": (2,)})
    made._seen.append(3)
    return made


def plan() -> Plan:
    made = Plan("g")
    made.done = 7
    return made


RIGHT: dict[str, Any] = {
    "pydantic model": lambda: Order(no=1),
    "field not set": lambda: Order.model_construct(no=2),
    "extras and private attributes": loose,
    "dataclass with init=False": plan,
    "nested class": lambda: [Plan.Step(1, Plan.Color.RED), Plan.Step(2)],
    "nested enum": lambda: Plan.Color.RED,
    "set of frozen ones": lambda: {Plan.Step(1)},
    "generic model": lambda: Box[int](inside=1),
    "tuple": lambda: (1, [2, (3,)]),
    "int keys": lambda: {1: "a", (2, 3): "b", None: "c"},
    "collections": lambda: [defaultdict(list, a=[1]), Counter("aab"), OrderedDict(b=1, a=2), deque([1], 2)],
    "numbers": lambda: [2**200, Fraction(1, 3), 1j, range(3), Decimal("1.50"), -0.0],
    "lone surrogate": lambda: "a\ud800",
    "bytes": lambda: [b"a", bytearray(b"b")],
    "document with metadata": lambda: Document("x", metadata={"when": NOW, "t": (1,)}),
    "artifact of built-in types": lambda: lc.ToolMessage("x", tool_call_id="1", artifact={"t": (1, 2), "s": {3}}),
    "declared class in an artifact": lambda: lc.ToolMessage("x", tool_call_id="1", artifact=[Order(no=1)]),
    "declared class beside a message": lambda: {
        "m": lc.HumanMessage("x"),
        "o": Order(no=3),
        "d": deque([lc.HumanMessage("y")]),
    },
}
UNDECLARED: dict[str, Any] = {
    "object under Any": lambda: Stranger((1,)),
    "object in a bare list": lambda: [Stranger(1)],
    "subclass of a declared class": lambda: Rush(no=1),
    "subclass of a message": lambda: [lc.HumanMessage("x"), MyMessage(content="y", mood="odd")],
    "named tuple": lambda: Pair(1, lc.HumanMessage("x")),
    "artifact": lambda: [lc.ToolMessage("x", tool_call_id="1", artifact=Stranger(1))],
    "interrupt payload": lambda: Interrupt(Stranger(2), "i"),
    "argument of Send": lambda: [Send("n", {"o": Stranger(3)})],
    "write of a command": lambda: Command(update={"o": Stranger(3)}),
}


def _local() -> Any:
    @dataclass
    class Order:
        no: int = 1

    return Order()


def _cycle() -> Any:
    found: list[Any] = [lc.HumanMessage("x")]
    found.append({"again": [found, found]})
    return found


def _deep(n: int) -> Any:
    found: Any = lc.HumanMessage("x")
    for _ in range(n):
        found = [found]
    return found


NEVER: dict[str, Any] = {
    "secret": lambda: SecretStr("s3cret"),
    "function": lambda: len,
    "lambda": lambda: {"f": [lambda: 1]},
    "mappingproxy": lambda: types.MappingProxyType({}),
    "generator": lambda: iter(i for i in range(0)),
    "class": lambda: [Order],
    "str subclass": lambda: [type("Name", (str,), {})("x")],
    "class made in a function": _local,
    "lock in a message": lambda: lc.HumanMessage("x", additional_kwargs={"lock": __import__("threading").Lock()}),
    "cycle": _cycle,
    "too deep": lambda: _deep(300),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_declared_comes_back_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    form = declared(monkeypatch)
    value = RIGHT[name]()
    assert same(trip(value, form), value)
    assert same(trip(value, form, flat=True), value)
    assert same(trip([value, lc.HumanMessage("x")], form), [value, lc.HumanMessage("x")])
    assert same(trip(value, form, fresh=declared(monkeypatch)), value)  # nothing of it lies in the form that has saved it


@pytest.mark.parametrize("name", UNDECLARED)
def test_what_is_not_declared_is_refused_and_is_right_when_trusted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    form, value = declared(monkeypatch), UNDECLARED[name]()
    for flat in (False, True):
        with pytest.raises(RefusedType) as caught:
            form.pack(checkpoint({"x": value}), flat=flat)
        assert caught.value.details["path"].startswith("channel 'x'")
        assert "@class" not in str(caught.value)
        with pytest.raises(RefusedType):
            form.pack_writes([("x", value)], flat=flat)
    trusting = Form(trust=[HERE])
    assert same(trip(value, trusting), value)
    named = Form(types=[Stranger, Rush, MyMessage, Pair])
    assert same(trip(value, named), value)
    # Saved by one that knows the class, loaded by one that does not.
    store = Store()
    packed = store.keep(trusting.pack(checkpoint({"x": value, "y": 1})))
    loaded = store.load(packed, form)
    assert loaded.checkpoint["channel_values"]["y"] == 1
    with pytest.raises(RefusedType):
        loaded.checkpoint["channel_values"]["x"]


@pytest.mark.parametrize("name", NEVER)
def test_what_cannot_be_stored_is_refused_whatever_is_trusted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for form in (declared(monkeypatch), Form(trust=[HERE, "pydantic", "builtins", "threading"])):
        with pytest.raises(RefusedType) as caught:
            form.pack(checkpoint({"x": NEVER[name]()}))
        assert "s3cret" not in str(caught.value)


def test_where_a_refused_value_is() -> None:
    message = lc.ToolMessage("x", tool_call_id="1", artifact={"a": [Stranger(1)]})
    for value, path in (
        ([1, message], "channel 'x'[1].artifact['a'][0]"),
        (Send("n", [Stranger(1)]), "channel 'x'.arg[0]"),
        ({"m": [lc.HumanMessage("y")], "s": Stranger(1)}, "channel 'x'['s']"),
        (Stranger(1), "channel 'x'"),
    ):
        with pytest.raises(RefusedType) as caught:
            FORM.pack(checkpoint({"x": value}))
        assert caught.value.details["path"] == path
        assert path in str(caught.value)
        with pytest.raises(RefusedType) as caught:
            FORM.pack_writes([("x", 1), ("x", value)])
        assert caught.value.details["path"] == f"write to {path}"
    # Neither of 200 steps, nor of a writer that has several.
    with pytest.raises(RefusedType, match=r"^write to channel 'x'(\[0\]){20}") as caught:
        FORM.pack_writes([("y", [1]), ("x", _deep(300))])
    assert len(caught.value.details["path"]) < 150


def test_an_exception_in_a_channel_is_refused() -> None:
    """As its repr, which is what LangGraph's serializer makes of it, it would be a str after a restart and an exception before."""
    for value in (
        ValueError("no"),
        [KeyError(1)],
        {"a": (OSError(2, "x"),)},
        lc.AIMessage("x", additional_kwargs={"e": OSError()}),
    ):
        for pack in (lambda v=value: FORM.pack(checkpoint({"x": v})), lambda v=value: FORM.pack_writes([("x", v)])):
            with pytest.raises(RefusedType, match="channel 'x'"):
                pack()


def test_the_error_of_a_task_is_its_repr_as_all_savers_have_it() -> None:
    with SafepointSaver("memory://") as saver:
        builder = StateGraph(State).add_node("n", failing).add_edge(START, "n")
        at: Any = {"configurable": {"thread_id": "t"}}
        with pytest.raises(ValueError, match="no"):
            builder.compile(checkpointer=saver).invoke({"anything": 1}, at)
        found = saver.get_tuple(at)
        assert found is not None
        assert ("__error__", "ValueError('no')") in [write[1:] for write in found.pending_writes or ()]


def failing(state: State) -> None:
    raise ValueError("no")


def test_forms_are_told_apart_by_what_they_allow() -> None:
    pair = (HERE, "Order")
    form = FORM.allowing([pair])
    assert form is not FORM
    assert form.allowing([pair, Order]) is form
    assert form.allowing([pair]).registry is form.registry
    assert pairs_of([Box[int]]) == {(HERE, "Box[int]"), (HERE, "Box")}
    with pytest.raises(RefusedType):
        trip(Order(no=1))
    assert trip(Order(no=1), form) == Order(no=1)
    with pytest.raises(RefusedType):
        trip(Plan("x"), form)
    store = Store()
    array = store.load(store.keep(FORM.pack(checkpoint({"x": np.arange(3)})))).checkpoint["channel_values"]["x"]
    assert array.dtype == np.arange(3).dtype
    assert array.tolist() == [0, 1, 2]


# Payloads of an attacker -----------------------------------------------------------------------------------------------

CALLS: list[str] = []


@dataclass
class Bomb:
    a: Any = 0

    def __new__(cls, *_: Any, **__: Any) -> "Bomb":
        CALLS.append("new")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        CALLS.append("init")

    def __setattr__(self, name: str, value: Any) -> None:
        CALLS.append("set")

    def __reduce__(self) -> Any:
        CALLS.append("reduce")
        return subprocess.Popen, (["true"],)


NAMES = ("os:system", "os.system", "subprocess:Popen", "builtins:eval", "builtins:exec", "posix:system", f"{HERE}:Bomb", f"{HERE}.Bomb",
         "unloaded_module_of_an_attacker:Thing", "pickle:loads", "functools:partial", "", "Bomb", "langgraph.types:Send", "mixed", "dict")  # fmt: skip


def forged() -> list[Any]:
    """Values as they stand in a root, plain or encoded."""
    pack, ext = msgspec.msgpack.encode, msgspec.msgpack.Ext
    plain: list[Any] = []
    for name in NAMES:
        body = {"a": "id", "args": ["touch /tmp/x"]}
        plain += [
            {"@class": name, "fields": body},
            {"@class": name, "fields": body, "set": ["a"]},
            {"@class": name, "value": body},
        ]
        plain += [ext(code, pack([name, part])) for code in (32, 33, 34, 35, 36, 37, 40) for part in (body, [1], "system", 1)]
        module, _, attribute = name.replace(":", ".").rpartition(".")
        theirs = [[module, attribute, "id"], [module, attribute, ["id"]], [module, attribute, {"a": 1}]]
        plain += [ext(code, pack(each)) for code in range(8) for each in theirs]
        plain += [ext(3, pack([module, attribute, "x", "loads"])), ext(5, pack([module, attribute, {}, "model_validate_json"]))]
    good: dict[str, Any] = {
        "content": "x",
        "additional_kwargs": {},
        "response_metadata": {},
        "type": "human",
        "name": None,
        "id": None,
    }
    plain += [
        {"@class": "HumanMessage", "fields": [1], "set": []},
        {"@class": "HumanMessage", "fields": {"content": "x"}, "set": []},
        {"@class": "HumanMessage", "fields": good, "set": [1]},
        {"@class": "HumanMessage", "fields": good, "set": ["id"], "extra": 5},
        {"@class": "HumanMessage", "fields": good, "set": ["id"], "__class__": "x"},
        {"@class": "Send", "fields": {"node": "x"}},
        {"@class": "Send", "fields": {"node": "x", "arg": {"@class": "os:system", "fields": {}}, "timeout": None}},
        {"@class": "mixed", "value": [{"@class": ["HumanMessage"], "fields": {}}]},
        {"@class": "dict", "value": {"a": 1}},
        {"@class": "TextAccessor", "value": 5},
        {"@class": 5, "fields": {}},
        {"@class": None},
        {"lc": 2, "type": "constructor", "id": ["os", "system"], "args": ["id"], "method": ["x"]},
        pickle.dumps(Bomb.__reduce__),
    ]
    return plain


def test_a_crafted_payload_executes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr("subprocess.Popen", lambda *a, **k: started.append(a))
    monkeypatch.setattr("os.system", lambda *a: started.append(a))
    forms = [FORM, declared(monkeypatch), Form(types=[Bomb]), Form(trust=[HERE])]
    for form in forms:
        for value in forged():
            for root in (value, [value], [value] * 3):
                code = msgspec.msgpack.encode({**_root(), "agent_state": {"x": root}})
                try:
                    loaded = form.unpack(code, b"", {}, id="x")
                    back = loaded.checkpoint["channel_values"]["x"]
                except SafepointError:
                    continue
                for each in back if isinstance(root, list) else [back]:
                    # Whole by its bytes: then it is plain data as before, or one of the classes that were allowed.
                    harmless = (dict, list, str, bytes, bytearray, int, tuple, set, frozenset, lc.HumanMessage)
                    assert isinstance(each, harmless) or (type(each) is Bomb and form in forms[2:]), (value, each)
    assert not started
    assert not CALLS
    assert "unloaded_module_of_an_attacker" not in sys.modules


def _root() -> dict[str, Any]:
    return {
        "messages": [],
        "metadata": {},
        "step": 0,
        "turns": [],
        "finished": False,
        "langgraph": {"v": 4, "ts": "", "channel_versions": {"x": 1}, "versions_seen": {}, "updated_channels": None},
    }


def test_plain_forms_that_are_not_ours_are_refused_or_damaged() -> None:
    """None comes back as a dict: that would be a wrong type. (A message without the fields that have defaults is an old one.)"""
    for value in forged():
        if isinstance(value, dict) and "@class" in value and value["@class"] != "mixed":
            for big in (value, {**value, "pad": "x" * 2000}):
                packed = chunks.pack({**_root(), "agent_state": {"x": big, "y": [big] * 20}}, Registry(parent=None))
                objects = {obj.name: obj for obj in packed.new}
                loaded = FORM.unpack(packed.data, packed.refs, objects, id="x")
                old = value["@class"] == "HumanMessage" and value.get("fields") == {"content": "x"} and "pad" not in big
                for name in ("x", "y"):
                    if old:
                        back = loaded.checkpoint["channel_values"][name]
                        assert {type(each) for each in (back if name == "y" else [back])} == {lc.HumanMessage}
                        continue
                    with pytest.raises((RefusedType, Damaged)):
                        loaded.checkpoint["channel_values"][name]


def test_a_message_of_an_older_langchain_gets_what_it_lacks() -> None:
    packed: Packed = chunks.pack(
        {**_root(), "agent_state": {"x": [{"@class": "AIMessage", "fields": {"content": "x", "old": 1}, "set": ["content"]}]}},
        Registry(parent=None),
    )
    back = FORM.unpack(packed.data, packed.refs, {}, id="x").checkpoint["channel_values"]["x"][0]
    assert type(back) is lc.AIMessage
    assert (back.content, back.tool_calls, vars(back)["old"], back.model_fields_set) == ("x", [], 1, {"content"})

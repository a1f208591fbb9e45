"""Values of every kind that LangGraph's serializer writes, and classes of an application, for tests of the import."""

from __future__ import annotations

import ipaddress
import re
import uuid
from collections import deque
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, Flag, IntEnum, StrEnum
from pathlib import Path
from typing import Any, Literal, NamedTuple
from zoneinfo import ZoneInfo

import pydantic
from langchain_core import messages as lc
from langchain_core.documents import Document
from langgraph.checkpoint.serde.types import _DeltaSnapshot
from langgraph.store.base import GetOp, Item
from langgraph.types import Command, Interrupt, Overwrite, PregelTask, Send, StateSnapshot, TimeoutPolicy
from pydantic import BaseModel, Field, RootModel, computed_field, field_validator

__all__ = ["CALLED", "DECLARED", "VALUES"]

CALLED: list[str] = []
"""What was called of the classes here."""


def mark(path: str) -> None:
    CALLED.append(path)


class Color(Enum):
    RED = "r"
    PAIR = (1, 2)


class Letter(StrEnum):
    A = "a"


class Number(IntEnum):
    ONE = 1


class Bits(Flag):
    A = 1
    B = 2


class Pair(NamedTuple):
    x: int
    y: Any = 3


@dataclass
class Point:
    a: int
    b: list[Any] = field(default_factory=list)
    c: Any = None

    def __post_init__(self) -> None:
        CALLED.append("Point")


@dataclass(frozen=True, slots=True)
class Slotted:
    a: int
    b: Any = 0


@dataclass
class Partly:
    a: int
    made: int = field(init=False, default=5)


class Outer:
    @dataclass
    class Inner:
        a: int


class Sub(BaseModel):
    n: int
    when: datetime | None = None

    @field_validator("n")
    @classmethod
    def _seen(cls, n: int) -> int:
        CALLED.append("Sub")
        return n


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int = 9


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    name: str = "x"


class Model(BaseModel):
    a: int
    sub: Sub
    subs: list[Sub] = []
    by: dict[str, Sub] = {}
    maybe: Sub | None = None
    pair: tuple[int, str] = (1, "a")
    many: tuple[Sub, ...] = ()
    color: Color = Color.RED
    pet: Cat | Dog = Cat()
    some: set[int] = set()
    point: Point | None = None
    anything: Any = None
    path: Path = Path()
    letter: Letter = Letter.A
    _hidden: int = 4


class Extra(BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    a: int = 1


class Aliased(BaseModel):
    a: int = Field(alias="aa", default=1)


class Computed(BaseModel):
    a: int = 1

    @computed_field  # type: ignore[prop-decorator]
    @property
    def twice(self) -> int:
        return self.a * 2


class Root(RootModel[list[int]]):
    pass


class Spoken(BaseModel):
    first: lc.HumanMessage
    rest: list[lc.BaseMessage] = []


DECLARED: list[type] = [
    *(Color, Letter, Number, Bits, Pair, Point, Slotted, Partly, Outer.Inner, Sub, Cat, Dog),
    *(Model, Extra, Aliased, Computed, Root, Spoken),
]


def _all_set(model: Any) -> Any:
    """As one is after it was stored: which fields had been set is not kept."""
    model.__pydantic_fields_set__.update(type(model).__pydantic_fields__)
    return model


_NOW = datetime.now(UTC)
_CALL: Any = {"name": "f", "args": {"a": 1}, "id": "c1"}
_USED: Any = {"input_tokens": 1, "output_tokens": 2, "total_tokens": 3}
_CHUNK: Any = {"name": "f", "args": '{"a": 1}', "id": "c1", "index": 0}

_ALIKE: dict[str, Any] = {
    "scalars": [1, 2**63, -5, 1.5, float("nan"), "ä\0x", b"b", None, True],
    "bytearray": bytearray(b"x"),
    "tuples": (1, (2,)),
    "keys": {1: 2, "a": {2.5: 1, None: 3, True: 4}, (1, 2): 3, _NOW: 1, uuid.UUID(int=1): 2, date(2020, 1, 1): 3},
    "sets": [{1, 2}, frozenset({"a"}), {frozenset({1}), frozenset()}, deque([1, Pair(1)]), {Color.RED, Letter.A}],
    "times": [
        *(
            _NOW,
            datetime(2020, 1, 1, tzinfo=UTC).replace(tzinfo=None),
            datetime(2020, 1, 1, tzinfo=ZoneInfo("Europe/Berlin")),
            date(2020, 1, 2),
        ),
        *(time(1, 2, 3, 4), time(1, 2, tzinfo=UTC), timedelta(days=-1, seconds=3)),
        *(timezone(timedelta(hours=2), "x"), UTC, ZoneInfo("Europe/Berlin")),
    ],
    "others": [Decimal("1.10"), uuid.UUID(int=5), Path("/a/b"), Path(), re.compile("a+", re.IGNORECASE)],
    "addresses": [ipaddress.ip_address("1.2.3.4"), ipaddress.ip_network("10.0.0.0/8"), ipaddress.ip_interface("::1/8")],
    "enums": [Color.RED, Letter.A, Number.ONE, Bits.A, Bits.A | Bits.B],
    "named tuples": Pair(1, Pair(2, Slotted(3))),
    "dataclasses": [Point(1, [Point(2)], {"k": Pair(1)}), Slotted(1, [2])],
    "models": Model(
        a=1,
        sub=Sub(n=2),
        subs=[Sub(n=3, when=_NOW)],
        by={"x": Sub(n=4)},
        maybe=Sub(n=5),
        pair=(2, "b"),
        many=(Sub(n=6),),
        pet=Dog(name="y"),
        some={1},
        anything={"k": [1]},
        path=Path("/x"),
    ),
    "extra": Extra(a=1, z=[1]),  # type: ignore[call-arg]
    "computed": Computed(a=2),
    "spoken": Spoken(first=lc.HumanMessage("h"), rest=[lc.BaseMessage(content="x", type="base")]),
    "human": lc.HumanMessage("hi", id="1", name="n", additional_kwargs={"a": {"b": [1, _NOW]}}),
    "parts": lc.HumanMessage([{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "data:"}}]),
    "more": lc.HumanMessage("x", foo=1),
    "ai": lc.AIMessage(
        "x",
        tool_calls=[_CALL],
        usage_metadata=_USED,
        response_metadata={"m": 1},
        invalid_tool_calls=[{"name": "g", "args": "{", "id": "2", "error": None, "type": "invalid_tool_call"}],
    ),
    "chunk": lc.AIMessageChunk(content="x", tool_call_chunks=[_CHUNK]),
    "last chunk": lc.AIMessageChunk(content="x", tool_call_chunks=[_CHUNK], chunk_position="last"),
    "cut chunk": lc.AIMessageChunk(content="x", tool_call_chunks=[_CHUNK | {"args": '{"a": '}]),
    "tool": lc.ToolMessage("r", tool_call_id="c1", artifact={"df": [1]}, status="error"),
    "roles": [
        lc.SystemMessage("s"),
        lc.ChatMessage(content="c", role="r"),
        lc.FunctionMessage(content="c", name="f"),
        lc.RemoveMessage(id="1"),
    ],
    "chunks": [
        lc.HumanMessageChunk(content="x"),
        lc.SystemMessageChunk(content="x"),
        lc.ToolMessageChunk(content="x", tool_call_id="1"),
    ],
    "document": Document("p", metadata={"a": 1}, id="3"),
    "messages within": lc.HumanMessage("x", additional_kwargs={"m": lc.AIMessage("y"), "s": Send("n", 1)}),
    "messages in others": [Slotted(1, [lc.HumanMessage("x"), Interrupt("v", "i")]), deque([lc.HumanMessage("x")])],
    "sends": [Send("n", {"m": lc.HumanMessage("x"), "d": Slotted(1)}), Send("n", 1, timeout=TimeoutPolicy(run_timeout=1.0))],
    "interrupts": [Interrupt({"q": Point(1)}, "id1"), Overwrite([1]), TimeoutPolicy(idle_timeout=1.0)],
    "commands": Command(goto=[Send("a", 1), "b"], update={"x": lc.HumanMessage("y")}),
    "snapshots": [_DeltaSnapshot([lc.HumanMessage("x"), Slotted(1)])],
    "states": StateSnapshot({"a": 1}, ("n",), {"configurable": {}}, None, "ts", None, (PregelTask("1", "n", ("a",)),), ()),
    "items": [Item(value={"a": 1}, key="k", namespace=("a", "b"), created_at=_NOW, updated_at=_NOW), GetOp(("a",), "k")],
    "errors": ValueError("x"),
}
_ITSELF: dict[str, Any] = {
    "enum of a tuple": Color.PAIR,
    "alias": Aliased(aa=3),
    "root": Root([1, 2]),
    "not in init": Partly(1),
    "nested": Outer.Inner(1),
    "dataclass in a model": _all_set(
        Model(a=1, sub=_all_set(Sub(n=2)), point=Point(1, [1]), color=Color.PAIR, pet=_all_set(Cat()))
    ),
}
VALUES = {name: (value, "alike") for name, value in _ALIKE.items()} | {
    name: (value, "itself") for name, value in _ITSELF.items()
}
"""Each with what it becomes: what LangGraph reads, or, where that is something else, the value itself."""

"""Values of every type that a state may hold: sample classes, Hypothesis strategies, and a comparison that knows no codec."""

import math
import re
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, Flag, IntEnum, IntFlag, StrEnum, auto
from fractions import Fraction
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import Any, Generic, NamedTuple, TypeVar
from uuid import UUID
from zoneinfo import ZoneInfo

import attrs
import msgspec
import numpy as np
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, PrivateAttr, RootModel

from safepoint.codec import Registry

__all__ = ["CLASSES", "REGISTRY", "hashables", "leaves", "same", "values"]

T = TypeVar("T")


class Color(Enum):
    RED = 1
    GREEN = (2, "g")


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Phase(StrEnum):
    PLAN = "plan"
    ACT = "act"


class Perm(Flag):
    R = auto()
    W = auto()
    X = auto()


class Bits(IntFlag):
    A = 1
    B = 2


class Pair(NamedTuple):
    left: Any
    right: Any = None


Old = namedtuple("Old", "x y")


@dataclass
class Point:
    x: Any
    y: Any = None


@dataclass(frozen=True)
class Frozen:
    x: Any


@dataclass(slots=True)
class Slotted:
    x: Any
    late: Any = field(init=False)


@dataclass(frozen=True, slots=True)
class FrozenSlotted:
    x: Any


@dataclass
class Child(Point):
    z: Any = field(default_factory=list)
    total: Any = field(init=False, default=None)


@dataclass
class Boxed(Generic[T]):
    item: T


class Model(BaseModel):
    x: Any
    y: Any = None
    _hidden: Any = PrivateAttr(default=None)


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    x: Any = 1


class Items(RootModel[list[Any]]):
    pass


class Box(BaseModel, Generic[T]):
    item: T


@attrs.define(slots=False)
class Loose:
    x: Any
    _y: Any = None


@attrs.frozen(cache_hash=True)
class Fixed:
    x: Any
    made: Any = attrs.field(init=False, default=attrs.Factory(list), eq=False)


class Record(msgspec.Struct, tag="record", rename="camel", kw_only=True):
    first_part: Any
    second_part: Any = None


class FrozenRecord(msgspec.Struct, frozen=True, gc=False, array_like=True):
    x: Any

    def __post_init__(self) -> None:
        if self.x is msgspec.NODEFAULT:
            raise ValueError("no constructor runs at load")


CLASSES: tuple[type, ...] = (
    *(Color, Level, Phase, Perm, Bits, Pair, Old, Point, Frozen, Slotted, FrozenSlotted, Child, Boxed),
    *(Model, Open, Items, Box),
    *(Loose, Fixed, Record, FrozenRecord),
)
REGISTRY = Registry(CLASSES, parent=None)


def same(a: Any, b: Any) -> bool:
    """Equal in type, value and order, all the way down; NaN is the same as NaN, and -0.0 is not the same as 0.0."""
    cls = type(a)
    if cls is not type(b):
        return False
    if isinstance(a, Flag):
        return a.value == b.value  # bits without a name make a new object each time on some Python 3.11
    if isinstance(a, Enum) or cls is ZoneInfo or a is None or cls is bool:
        return a is b
    if cls is float:
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    if cls is complex:
        return same(a.real, b.real) and same(a.imag, b.imag)
    if cls is Decimal:
        return bool(a.as_tuple() == b.as_tuple())
    if cls in (datetime, time):
        return a.replace(tzinfo=None) == b.replace(tzinfo=None) and a.fold == b.fold and same(a.tzinfo, b.tzinfo)
    if cls is timezone:
        return repr(a) == repr(b)
    if cls in (set, frozenset):
        rest = list(b)
        for item in a:
            found = next((i for i, other in enumerate(rest) if same(item, other)), None)
            if found is None:
                return False
            del rest[found]
        return not rest
    if isinstance(a, dict):
        extra = getattr(a, "default_factory", None) is getattr(b, "default_factory", None)
        return (
            extra
            and len(a) == len(b)
            and all(same(k, m) and same(v, w) for (k, v), (m, w) in zip(a.items(), b.items(), strict=True))
        )
    if isinstance(a, (list, tuple, deque)):
        extra = a.maxlen == b.maxlen if isinstance(a, deque) else True
        return extra and len(a) == len(b) and all(map(same, a, b)) and same(_attributes(a), _attributes(b))
    if isinstance(a, BaseModel):
        return all(
            same(getattr(a, part), getattr(b, part))
            for part in ("__dict__", "__pydantic_fields_set__", "__pydantic_extra__", "__pydantic_private__")
        )
    if cls is np.ndarray:
        alike = a.dtype == b.dtype and a.shape == b.shape and a.flags.writeable == b.flags.writeable
        return alike and a.flags.f_contiguous == b.flags.f_contiguous and a.tobytes("A") == b.tobytes("A")
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and (a.tobytes() == b.tobytes() or bool(a != a and b != b))  # noqa: PLR0124 (NaN)
    if cls in CLASSES:
        return same(_attributes(a), _attributes(b))
    return bool(a == b)


def _attributes(value: Any) -> dict[str, Any]:
    held = {name: item for name, item in getattr(value, "__dict__", {}).items() if name != "__orig_class__"}
    for name in getattr(type(value), "__slots__", getattr(type(value), "__struct_fields__", ())):
        if hasattr(value, name) and not name.startswith(("__", "_attrs_cached")):
            held[name] = getattr(value, name)
    return held


# Strategies

_ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=8)  # NUL and lone surrogates are in it
_ZONES = st.one_of(
    st.none(),
    st.just(UTC),
    st.sampled_from([ZoneInfo("Europe/Berlin"), ZoneInfo("Asia/Kolkata"), ZoneInfo("UTC")]),
    st.builds(timezone, st.timedeltas(timedelta(hours=-23), timedelta(hours=23))),
    st.builds(timezone, st.timedeltas(timedelta(hours=-23), timedelta(hours=23)), _ANY_TEXT),
    st.sampled_from([timezone(timedelta(microseconds=1)), timezone(timedelta(0), "UTC"), timezone(timedelta(seconds=-90))]),
)
_INTS = st.one_of(
    st.integers(), st.integers(-(2**300), 2**300), st.sampled_from([2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1])
)


def _times(times: Any) -> Any:
    return st.builds(lambda value, zone, fold: value.replace(tzinfo=zone, fold=fold), times, _ZONES, st.sampled_from([0, 1]))


def _decimals() -> Any:
    numbers = st.decimals() | st.sampled_from([Decimal(text) for text in ("-0", "-0E+7", "1E+999999", "-Infinity", "NaN123")])
    return numbers.filter(lambda value: not value.is_snan())  # which cannot be hashed


_HASHABLE_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    _INTS,
    st.floats(),
    _ANY_TEXT,
    st.binary(max_size=8),
    st.ip_addresses() | st.sampled_from([IPv4Interface("10.0.0.1/8"), IPv6Network("fe80::/10"), IPv6Address("fe80::1%eth0")]),
    st.sampled_from([re.compile("a|b"), re.compile(b"[^x]*", re.DOTALL), re.compile("é", re.ASCII | re.IGNORECASE)]),
    st.dates(),
    _times(st.datetimes()),
    _times(st.times()),
    st.timedeltas(),
    _ZONES,
    _decimals(),
    st.uuids(),
    st.complex_numbers(),
    st.fractions(),
    st.builds(range, st.integers(), st.integers(), st.integers().filter(bool)),
    st.sampled_from([Path("a/b"), PurePosixPath("/x\udc80"), PureWindowsPath("C:\\a"), Path()]),
    st.sampled_from([*Color, *Level, *Phase, *Perm, *Bits, Perm(0), Perm.R | Perm.X, ~Perm.R, Bits(0), Bits(3), Bits(12)]),
)
_DTYPES = ("?", "i1", "<u2", ">i4", "u8", "f2", "<f4", ">f8", "c16", "M8[ns]", "m8[3h]", "S3", ">U2", "V5", "i4,S2")


def _array(dtype: str, shape: list[int], data: bytes, order: Any, locked: bool) -> Any:
    kind = np.dtype(dtype)
    size = int(np.prod(shape))
    raw = np.resize(np.frombuffer(data or b"\0", np.uint8) & (1 if dtype == "?" else 0x37), size * kind.itemsize)
    if kind.kind == "U":
        raw = raw.copy()
        raw[np.arange(raw.size) % 4 != 3] = 0  # code points of text
    array = np.asarray(np.frombuffer(raw.tobytes(), kind).reshape(shape), order=order).copy("K")
    array.flags.writeable = not locked
    return array


arrays: Any = st.builds(
    _array,
    st.sampled_from(_DTYPES),
    st.lists(st.integers(0, 3), max_size=3),
    st.binary(max_size=20),
    st.sampled_from("CF"),
    st.booleans(),
)
np_scalars: Any = st.one_of(
    st.builds(np.float64, st.floats()),
    st.builds(np.float32, st.floats(width=32)),
    st.builds(np.int8, st.integers(-128, 127)),
    st.builds(np.uint64, st.integers(0, 2**64 - 1)),
    st.builds(np.bool_, st.booleans()),
    st.builds(np.complex128, st.complex_numbers()),
    st.builds(np.str_, _ANY_TEXT),
    st.builds(np.bytes_, st.binary(max_size=5)),
    st.builds(np.datetime64, st.datetimes()),
    st.sampled_from([np.datetime64("NaT", "s"), np.timedelta64(5, "h"), np.float16(0.1), np.void(b"abc")]),
)


leaves = (
    _HASHABLE_LEAVES
    | arrays
    | np_scalars
    | st.just(msgspec.UNSET)
    | st.just(Decimal("sNaN"))
    | st.binary(max_size=8).map(bytearray)
)

hashables = st.recursive(
    _HASHABLE_LEAVES,
    lambda part: st.one_of(
        st.lists(part, max_size=3).map(tuple),
        st.frozensets(part, max_size=3),
        st.builds(Pair, part, part),
        st.builds(Frozen, part),
        st.builds(FrozenSlotted, part),
    ),
    max_leaves=5,
)


def _with(value: Any, **attributes: Any) -> Any:
    for name, item in attributes.items():
        setattr(value, name, item)
    return value


def _containers(part: Any) -> Any:
    lists = st.lists(part, max_size=3)
    pairs = st.lists(st.tuples(hashables, part), max_size=3)
    factories = st.sampled_from([None, list, dict, set, int, str, float, tuple, bool, Point])
    return st.one_of(
        lists,
        lists.map(tuple),
        st.dictionaries(_ANY_TEXT, part, max_size=3),
        st.dictionaries(hashables, part, max_size=3),
        st.sets(hashables, max_size=4),
        st.frozensets(hashables, max_size=4),
        st.builds(defaultdict, factories, pairs),
        pairs.map(OrderedDict),
        pairs.map(lambda items: Counter(dict(items))),
        st.builds(deque, lists, st.none() | st.integers(3, 9)),
        st.builds(Pair, part, part),
        st.builds(Old, part, part),
        st.builds(Point, part, part),
        st.builds(lambda x, y: _with(Point(x), other=y), part, part),
        st.builds(Frozen, part),
        st.builds(Slotted, part),
        st.builds(lambda x, y: _with(Slotted(x), late=y), part, part),
        st.builds(Child, part, part, part),
        st.builds(Boxed[int], part),
        st.builds(lambda x, y: _with(Model(x=x), _hidden=y), part, part),
        st.builds(lambda x, y: Open(x=x, **{"other": y, "+$": y}), part, part),
        st.builds(lambda x: Model.model_construct(y=x), part),
        lists.map(Items),
        st.builds(lambda x: Box[int](item=x), st.integers(-5, 5)),
        st.builds(lambda x: Box[dict[str, Point | None]](item={"a": Point(x)}), part),
        st.builds(Loose, part, part),
        st.builds(Fixed, part),
        st.builds(lambda x, y: Record(first_part=x, second_part=y), part, part),
        st.builds(FrozenRecord, part),
    )


values = st.recursive(leaves | hashables, _containers, max_leaves=12)

# Made once more for each use: what a test gets must not be what another has changed.
GOLDEN: dict[str, str] = {
    "none": "None",
    "true": "True",
    "int": "-7",
    "int_max": "2**64 - 1",
    "int_big": "2**64",
    "int_big_negative": "-(2**63) - 1",
    "float": "1.5",
    "float_negative_zero": "-0.0",
    "float_nan": "float('nan')",
    "str": "'a\\0\\u2028漢'",
    "str_surrogate": "'x\\ud800'",
    "bytes": "b'\\x00\\xff'",
    "bytearray": "bytearray(b'ab')",
    "list": "[1, [2]]",
    "tuple": "(1, (2,), ())",
    "dict": "{'b': 1, 'a': 2}",
    "dict_keys": "{1: 'a', 2.5: 'b', (1, 2): 'c', None: 'd', '\\ud800': 'e'}",
    "set": "{3, 1, 'a', (2,)}",
    "frozenset": "frozenset({2, 1})",
    "date": "date(2024, 2, 29)",
    "time": "time(1, 2, 3, 4)",
    "time_zone": "time(1, 2, fold=1, tzinfo=ZoneInfo('Europe/Berlin'))",
    "datetime": "datetime(2024, 2, 29, 1, 2, 3, 4)",
    "datetime_utc": "datetime(2024, 2, 29, tzinfo=UTC)",
    "datetime_offset": "datetime(2024, 2, 29, tzinfo=timezone(timedelta(hours=5, minutes=30)))",
    "datetime_named_offset": "datetime(2024, 2, 29, tzinfo=timezone(timedelta(hours=1), 'CET'))",
    "datetime_zone_fold": "datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=ZoneInfo('Europe/Berlin'))",
    "timedelta": "timedelta(-1, 2, 3)",
    "timezone": "timezone(timedelta(seconds=-90), 'odd')",
    "zoneinfo": "ZoneInfo('Asia/Kolkata')",
    "decimal": "Decimal('-0.10')",
    "decimal_snan": "Decimal('sNaN12')",
    "uuid": "UUID(int=5)",
    "complex": "complex(1, -0.0)",
    "fraction": "Fraction(-1, 2**70)",
    "range": "range(10, 2**70, -3)",
    "path": "PurePosixPath('/a/b')",
    "path_windows": "PureWindowsPath('C:/a')",
    "defaultdict": "defaultdict(list, {'a': [1]})",
    "defaultdict_class": "defaultdict(Point, {1: Point(1)})",
    "counter": "Counter({'a': 2, 3: 1})",
    "ordereddict": "OrderedDict([('b', 1), ('a', 2)])",
    "deque": "deque([1, 2], maxlen=3)",
    "enum": "Color.GREEN",
    "int_enum": "Level.LOW",
    "str_enum": "Phase.PLAN",
    "flag": "Perm.R | Perm.W",
    "namedtuple": "Pair(1, (2,))",
    "dataclass": "Child(1, 2, [3])",
    "dataclass_unset": "Slotted(1)",
    "dataclass_attribute": "_with(Point(1), other=2)",
    "pydantic": "_with(Model(x=(1,)), _hidden=2)",
    "pydantic_extra": "Open(other={1})",
    "pydantic_root": "Items([1, 'a'])",
    "pydantic_generic": "Box[int](item=1)",
}


# Of the types that came later: not in the golden store, which was written before.
GOLDEN_SINCE: dict[str, str] = {
    "unset": "msgspec.UNSET",
    "attrs": "Loose(1, (2,))",
    "attrs_slots": "Fixed((1,))",
    "struct": "Record(first_part=(1,), second_part=msgspec.UNSET)",
    "struct_frozen": "FrozenRecord({1})",
    "array": "np.arange(6, dtype='<i4').reshape(2, 3)",
    "array_fortran": "np.asfortranarray(np.arange(6, dtype='>f8').reshape(2, 3))",
    "array_read_only": "np.frombuffer(b'ab', 'S1')",
    "array_0d": "np.array('2024-02-29', 'M8[D]')",
    "array_empty": "np.zeros((0, 3), '<c16')",
    "array_structured": "np.zeros(2, np.dtype([('a', 'i1'), ('b', '<f8', (2,)), ('c', [('d', '<U2')])], align=True))",
    "np_float64": "np.float64(1.5)",
    "np_int8": "np.int8(-1)",
    "np_bool": "np.bool_(True)",
    "np_str": "np.str_('a\\0')",
    "np_bytes": "np.bytes_(b'a\\0')",
    "np_complex": "np.complex64(1j)",
    "np_datetime": "np.datetime64('2024-02-29T01', 'h')",
    "np_void": "np.zeros(1, [('a', '>i2'), ('b', 'S2')])[0]",
    "sdk_openai": "sdk_message({'role': 'assistant', 'content': None, 'x': [1, 1.0]})",
    "ipv4": "IPv4Interface('10.0.0.1/8')",
    "ipv6": "IPv6Address('fe80::1%eth0')",
    "ip_network": "IPv4Network('10.0.0.0/8')",
    "pattern": "re.compile('a+', re.IGNORECASE)",
    "pattern_bytes": "re.compile(b'[x]')",
    "sdk_parsed": "sdk_message({'role': 'assistant', 'content': '1'}, parsed=(1,))",
}


def sdk_message(fields: dict[str, Any], **beside: Any) -> Any:
    """A message of the OpenAI SDK, which takes its time to import. ``beside``: what it holds and does not send."""
    from openai.types.chat import ChatCompletionMessage, ParsedChatCompletionMessage

    value = (ParsedChatCompletionMessage if beside else ChatCompletionMessage).model_validate(fields)
    vars(value).update(beside)
    return value


def golden(name: str) -> Any:
    return eval((GOLDEN | GOLDEN_SINCE)[name])


_USED_IN_GOLDEN = (Counter, OrderedDict, Fraction, PurePath, UUID, date, IPv4Network, IPv4Address, IPv6Interface)

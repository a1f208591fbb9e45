"""The value codec and what other libraries bring: attrs classes, msgspec's structs, numpy's arrays and scalars."""

import subprocess
import sys
import tracemalloc
from typing import Any

import attrs
import msgspec
import numpy as np
import pytest

from safepoint.codec import Registry, decode, decode_plain, encode, encode_tree, from_json, to_json
from safepoint.errors import Damaged, InvalidState, RefusedType
from tests.support import samples
from tests.support.codec import EMPTY, ext, refused, trip
from tests.support.samples import REGISTRY, Fixed, FrozenRecord, Loose, Record, same

# attrs


RAN: list[str] = []


def _note(*_: Any) -> Any:
    RAN.append("ran")
    return _[-1]


@attrs.define
class Busy:
    x: int = attrs.field(converter=_note, validator=_note)
    _private: int = 2
    made: int = attrs.field(init=False)
    later: int = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        RAN.append("ran")
        object.__setattr__(self, "made", 2 * self.x)


@attrs.frozen(slots=False)
class BusyFrozen(Busy):
    y: list[int] = attrs.Factory(list)


def test_nothing_of_an_attrs_class_runs_at_load() -> None:
    registry = Registry([Busy, BusyFrozen], parent=None)
    value = [Busy(1), BusyFrozen(3, y=[1])]
    RAN.clear()
    back: Any = trip(value, registry)
    assert not RAN
    assert [(b.x, b._private, b.made, hasattr(b, "later")) for b in back] == [(1, 2, 2, False), (3, 2, 6, False)]
    assert back[1].y == [1]
    assert [type(b) for b in back] == [Busy, BusyFrozen]
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        back[1].y = []


def test_an_attrs_class_is_taken_exactly() -> None:
    class Plain(Loose):  # no attrs class of its own, and not registered
        pass

    assert "not registered" in str(refused(Plain(1), REGISTRY))
    assert "not registered" in str(refused(Loose(1)))

    @attrs.define
    class Mapping(dict):
        x: int = 0

    assert "subclass of dict" in str(refused(Mapping(), REGISTRY))


def test_a_kept_hash_is_made_anew() -> None:
    value = Fixed("text")
    hash(value)
    program = (
        "import sys\nfrom tests.support.samples import Fixed, REGISTRY\nfrom safepoint.codec import decode\n"
        f"v = decode(bytes.fromhex('{encode(value, REGISTRY).hex()}'), REGISTRY)\nassert hash(v) == hash(Fixed('text'))"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=samples.__file__.partition("/tests/")[0])


def _attrs(**fields: Any) -> Registry:
    registry = Registry(parent=None)
    registry.add(attrs.make_class("Thing", fields), name="app:Thing")
    return registry


def test_an_attrs_class_that_has_changed() -> None:
    was = _attrs(x=attrs.field(), y=attrs.field())
    data = encode([was.class_of("app:Thing")(1, 2)], was)  # type: ignore[misc]
    now = _attrs(x=attrs.field(), y=attrs.field(), z=attrs.field(factory=list), w=attrs.field(default=5))
    thing: Any = decode(data, now)[0]
    assert (thing.x, thing.y, thing.z, thing.w) == (1, 2, [], 5)
    needs_self = attrs.field(default=attrs.Factory(lambda self: self.x, takes_self=True))
    for z in (attrs.field(), needs_self):
        with pytest.raises(InvalidState, match=r"state\[0\].*Thing\.z is not in what was stored"):
            decode(data, _attrs(x=attrs.field(), y=attrs.field(), z=z), path="state")
    with pytest.raises(InvalidState, match=r"state\[0\].*Thing has no field 'y' any more"):
        decode(data, _attrs(x=attrs.field()), path="state")


# Structs


class Shape(msgspec.Struct, tag=True):
    made: list[type] = []

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        RAN.append(cls.__name__)

    def __post_init__(self) -> None:
        RAN.append("post_init")


class Circle(Shape, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, weakref=True):
    radius: float
    note: str | msgspec.UnsetType = msgspec.UNSET


class Square(Shape, frozen=True, kw_only=True, cache_hash=True, dict=True):  # type: ignore[misc] # as msgspec lets it
    side: float


class Nothing(msgspec.Struct):
    pass


class NothingBusy(msgspec.Struct):
    def __post_init__(self) -> None:
        pass


def test_nothing_of_a_struct_runs_at_load() -> None:
    registry = Registry([Circle, Square, Nothing, NothingBusy], parent=None)
    value = [Circle(radius=1.5), Square(side=2, made=[]), Nothing()]
    vars(value[1])["other"] = (1,)
    del value[0].made  # type: ignore[attr-defined]
    RAN.clear()
    back: Any = trip(value, registry)
    assert not RAN
    assert [type(b) for b in back] == [Circle, Square, Nothing]
    assert (back[0].radius, back[0].note, hasattr(back[0], "made")) == (1.5, msgspec.UNSET, False)
    assert (back[1], vars(back[1]), hash(back[1].side)) == (value[1], {"other": (1,)}, hash(2))
    with pytest.raises(AttributeError):
        back[1].side = 3
    assert [c.__name__ for c in Shape.__subclasses__()] == ["Circle", "Square"], "and no class of ours is left behind"
    assert "without its __post_init__" in str(refused(NothingBusy(), registry))


def test_a_struct_is_what_msgspec_takes_it_for() -> None:
    back: Any = trip([Record(first_part=1), FrozenRecord((1,))])
    assert msgspec.json.encode(back) == b'[{"type":"record","firstPart":1,"secondPart":null},[[1]]]'
    tree = decode_plain(encode(Record(first_part=1), REGISTRY))
    assert tree.value == {"first_part": 1, "second_part": None}


def _struct(*fields: Any) -> Registry:
    registry = Registry(parent=None)
    registry.add(msgspec.defstruct("Thing", fields), name="app:Thing")
    return registry


def test_a_struct_that_has_changed() -> None:
    was = _struct("x", "y")
    data = encode([was.class_of("app:Thing")(1, 2)], was)  # type: ignore[misc]
    factory = msgspec.field(default_factory=lambda: [7])
    thing: Any = decode(data, _struct("y", "x", ("z", list, []), ("w", int, 5), ("v", list, factory)))[0]
    assert (thing.x, thing.y, thing.z, thing.w, thing.v) == (1, 2, [], 5, [7])
    with pytest.raises(InvalidState, match=r"state\[0\].*Thing\.z is not in what was stored"):
        decode(data, _struct("x", "y", "z"), path="state")
    with pytest.raises(InvalidState, match=r"state\[0\].*Thing has no field 'y' any more"):
        decode(data, _struct("x"), path="state")


# numpy


@pytest.mark.parametrize(
    "value",
    [
        np.arange(12).reshape(3, 4)[:, ::2],
        np.arange(12).reshape(3, 4).T,
        np.arange(24).reshape(2, 3, 4).transpose(1, 0, 2),
        np.broadcast_to(np.float32(1), (3, 4)),
        np.array([[True]] * 3)[::-1],
        np.array(["NaT", "2024-01-01"], "M8[25us]"),
        np.array([np.nan, -0.0, np.inf], ">f2"),
        np.array(["a", "漢"]),
        np.zeros((2, 0, 3), order="F"),
        np.array(5),
        np.zeros((1,) * 32),
        np.array([(1, b"x")], [("a", ">i8"), ("b", "S3")]),
    ],
    ids=lambda v: f"{v.dtype}{v.shape}",
)
def test_arrays_of_every_form(value: Any) -> None:
    back: Any = trip({"a": [value]}, EMPTY)["a"][0]
    assert type(back) is np.ndarray
    assert back.dtype == value.dtype
    assert back.shape == value.shape
    assert back.tobytes() == value.tobytes()
    assert back.flags.writeable == value.flags.writeable
    if value.flags.c_contiguous or value.flags.f_contiguous:
        assert back.flags.c_contiguous == value.flags.c_contiguous
    else:
        assert back.flags.c_contiguous
    tree = decode_plain(encode(value, EMPTY))
    assert encode_tree(from_json(to_json(tree))) == encode(value, EMPTY)


class Angle(np.float64):
    pass


class Grid(np.ndarray):
    pass


@pytest.mark.parametrize(
    "value",
    [
        np.array([{}], object),
        np.zeros(2, [("a", "i4"), ("b", object)]),
        np.zeros(2, np.longdouble),
        np.longdouble(1),
        np.clongdouble(1),
        np.array(["a"], np.dtypes.StringDType()),
        np.zeros(2, np.dtype("f8", metadata={"unit": "m"})),
        np.zeros(2, "V0"),
        np.zeros(2, [(("title", "a"), "i4")]),
        np.rec.array([(1,)], dtype=[("a", "i4")]),
        np.rec.array([(1,)], dtype=[("a", "i4")])[0],
        np.ma.masked_array([1, 2], [True, False]),
        np.zeros(2).view(Grid),
        Angle(1.5),
    ],
    ids=lambda v: f"{type(v).__name__}-{getattr(v, 'dtype', '')}"[:40],
)
def test_what_is_refused_of_numpy_is_named_with_its_path(value: Any) -> None:
    text = str(refused({"a": {"b": [0, value]}}))
    assert text.startswith("agent_state['a']['b'][1] cannot be stored")
    assert "numpy" in text or "Python objects" in text or "dtype" in text or type(value).__name__ in text


def test_scalars_keep_their_type() -> None:
    for value in (
        np.float64(1.5),
        np.float32("nan"),
        np.int64(-(2**63)),
        np.bool_(False),
        np.str_("x\0"),
        np.datetime64("NaT", "s"),
    ):
        back = trip([value], EMPTY)[0]
        assert type(back) is type(value)
        assert same(back, value)
    assert type(trip(np.longlong(5), EMPTY)) is np.int64
    keys = {np.int64(1): "a", np.str_("k"): "b", (np.float64(2.0),): "c"}
    assert same(trip(keys, EMPTY), keys)


@pytest.mark.parametrize(
    "payload",
    [
        ["O", "C", True, b"\0" * 8, 1],
        ["|O", "C", True, b"\0" * 8, 1],
        ["<f8,<f8", "C", True, b"\0" * 16, 1],
        ["<f8", "C", True, b"\0" * 8, 2**40],
        ["<f8", "C", True, b"", 2**40],
        ["<f8", "C", True, b"", 0, 2**63],
        ["<f8", "C", True, b"", -1, 0],
        ["<f8", "C", True, b"\0" * 8, *[1] * 65],
        ["<f8", "C", 1, b"\0" * 8, 1],
        ["<f8", "K", True, b"\0" * 8, 1],
        ["<f8", "F", True, b"\0" * 8, 1],
        ["<f8", "C", True, "text", 1],
        ["<f8"],
        ["<f16", "C", True, b"\0" * 16, 1],
        ["|b1", "C", True, b"\2", 1],
        ["=f8", "C", True, b"\0" * 8, 1],
        ["|V999999999", "C", True, b"", 1],
        ["<M8[0s]", "C", True, b"\0" * 8, 1],
        ["{" * 10_000, "C", True, b"", 0],
        ["{}", "C", True, b"", 0],
        ['{"names":["a"],"formats":["O"],"offsets":[0],"itemsize":8,"aligned":false}', "C", True, b"\0" * 8, 1],
        ['{"names":["a"],"formats":["<f8"],"offsets":[4],"itemsize":8,"aligned":false}', "C", True, b"\0" * 8, 1],
        '{"names":[]}',
        5,
    ],
    ids=str,
)
def test_hostile_arrays_are_damaged(payload: Any) -> None:
    with pytest.raises(Damaged):
        decode(ext("ndarray", payload), EMPTY)
    with pytest.raises(Damaged):
        decode(ext("npscalar", payload), EMPTY)


@pytest.mark.parametrize("payload", [["i1", 300], ["f4", 1e300], ["u1", -1], ["b1", 2], ["O", 1], ["U", 1], ["<f8", b"\0" * 8]])
def test_hostile_scalars_are_damaged(payload: Any) -> None:
    with pytest.raises(Damaged):
        decode(ext("npscalar", payload), EMPTY)


def test_a_large_array_is_copied_no_more_than_needed() -> None:
    size = 8 << 20
    value = {"a": np.zeros(size, np.uint8)}
    tracemalloc.start()
    try:
        data = encode(value, EMPTY)
        saving = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        back: Any = decode(data, EMPTY)
        loading = tracemalloc.get_traced_memory()[1] - size
    finally:
        tracemalloc.stop()
    assert back["a"].nbytes == size
    assert saving < 3.2 * size
    assert loading < 2.7 * size  # the bytes, and the array, which has to be writeable


def test_numpy_is_imported_by_nobody_but_the_application() -> None:
    data = encode([np.float64(1.5), np.zeros(2)], EMPTY)
    program = f"""
import sys
from safepoint.codec import Registry, decode, decode_plain, to_json
from safepoint.errors import RefusedType
data = bytes.fromhex('{data.hex()}')
to_json(decode_plain(data))
try:
    decode(data, Registry(), path="state")
except RefusedType as error:
    assert "state[0]" in str(error) and "Import numpy" in str(error), error
else:
    raise AssertionError
assert "numpy" not in sys.modules
assert decode(data, Registry(trust=["numpy"]))[1].sum() == 0
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_neither_attrs_nor_numpy_is_needed_to_refuse() -> None:
    with pytest.raises(RefusedType, match="neither registered nor trusted"):
        decode(encode(Loose(1), REGISTRY), EMPTY)

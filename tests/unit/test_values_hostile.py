"""The value codec against depth, cycles and bytes that it did not write: a value or a typed error, and nothing else."""

import json
import sys
from collections import defaultdict, deque
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from safepoint.codec import (
    MAX_DEPTH,
    decode,
    decode_plain,
    encode,
    encode_tree,
    from_json,
    to_json,
)
from safepoint.codec.classes import KINDS
from safepoint.errors import Damaged, InvalidState, NewerFormat, RefusedType, SafepointError, UsageError
from tests.support import samples
from tests.support.codec import EMPTY, Ext, ext, pack, refused, trip
from tests.support.samples import (
    REGISTRY,
    Frozen,
    Model,
    Pair,
    Point,
    values,
)

# Values are as big as they are; only a report of a failure would show them.
pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")


# Depth and cycles


def _nested(kind: Any, depth: int) -> Any:
    value = kind()
    for _ in range(depth - 1):
        value = kind(value)
    return value


def _dict(*values: Any) -> Any:
    return dict.fromkeys("k", values[0]) if values else {}


def _odd(*values: Any) -> Any:
    return {1: values[0]} if values else {1: 1}


KINDS_OF_NESTING: list[Any] = [
    lambda *v: [*v],
    lambda *v: (*v,),
    _dict,
    _odd,
    lambda *v: frozenset(v),
    lambda *v: deque(v),
    lambda *v: defaultdict(list, {"a": v[0]} if v else {}),
    lambda *v: Point(*v) if v else Point(1),
    lambda *v: Pair(*v) if v else Pair(1),
    lambda *v: Frozen(*v) if v else Frozen(1),
]


@pytest.mark.parametrize("kind", KINDS_OF_NESTING)
def test_field_case_28_depth(kind: Any) -> None:
    value = _nested(kind, MAX_DEPTH)
    data = encode(value, REGISTRY)
    assert encode(decode(data, REGISTRY), REGISTRY) == data
    tree = decode_plain(data)
    assert encode_tree(tree) == data
    assert encode_tree(from_json(to_json(tree))) == data
    for depth in (MAX_DEPTH + 1, 10_000) if kind is KINDS_OF_NESTING[0] else (MAX_DEPTH + 1, 400):
        error = refused(_nested(kind, depth), REGISTRY)
        assert "nested" in str(error)
        assert "itself" not in str(error)
        assert len(str(error)) < 1000


def test_leaves_may_be_at_the_very_bottom() -> None:
    bottom = [
        Decimal(1),
        2**70,
        "\ud800",
        timedelta(1),
        datetime(2024, 1, 1, tzinfo=timezone(timedelta(hours=1), "\ud800")),
        range(2**70),
    ]
    value = _nested(lambda *v: [*v] or bottom, MAX_DEPTH)
    assert trip(value) == value


def test_field_case_28_cycles() -> None:
    own: list[Any] = [1]
    own.append(own)
    assert "state[1] cannot be stored: it contains itself: it is the same object as state." in str(refused(own, path="state"))
    a: dict[str, Any] = {}
    b = {"a": a}
    a["b"] = b
    text = str(refused({"x": [a]}, path="state"))
    assert "state['x'][0]['b']['a'] cannot be stored: it contains itself: it is the same object as state['x'][0]." in text
    for key in ("k", 1):
        knot: dict[Any, Any] = {}
        knot[key] = knot
        assert f"state[{key!r}] cannot be stored: it contains itself: it is the same object as state." in str(
            refused(knot, path="state")
        )
    point = Point(1)
    point.y = (point,)
    assert "state.y[0] cannot be stored: it contains itself" in str(refused(point, REGISTRY, "state"))


def test_a_caller_with_little_stack_is_not_told_of_damage() -> None:
    value = _nested(lambda *v: (*v,), MAX_DEPTH)
    data = encode(value, REGISTRY)

    def deeper(frames: int) -> None:
        if frames:
            deeper(frames - 1)
        else:
            with pytest.raises(UsageError, match="stack"):
                decode(data, REGISTRY)
            with pytest.raises(UsageError, match="stack"):
                encode(value, REGISTRY)

    deeper(sys.getrecursionlimit() - 350)


def test_field_case_28_hostile_depth() -> None:
    def wrapped(tag: str, depth: int) -> bytes:
        inner = pack(1)
        for _ in range(depth):
            inner = ext(tag, [msgspec.Raw(inner)])
        return inner

    lists = [b"\x91" * depth + b"\xc0" for depth in (MAX_DEPTH + 1, 5000, 1_000_000)]
    maps = [b"\x81\xa1k" * 300_000 + b"\xc0"]
    for data in (
        *lists,
        *maps,
        wrapped("tuple", MAX_DEPTH + 1),
        wrapped("tuple", 2000),
        wrapped("date", 300),
        wrapped("int", 300),
    ):
        for load in (lambda data: decode(data, REGISTRY, path="state"), decode_plain):
            with pytest.raises(Damaged):
                load(data)


# Hostile bytes

_NAMES = [REGISTRY.name_of(cls) for cls in samples.CLASSES]
_PARTS = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(max_size=5), st.binary(max_size=9),
        st.sampled_from([*_NAMES, "x", "-x", ".x", "*", "+x", "~_x", "RED", "builtins:list", "2024-01-01", "+05:30", "-0", "1_0"]),
    ),
    lambda part: st.one_of(
        st.lists(part, max_size=4),
        st.dictionaries(st.sampled_from(["x", "y", "-x", ".x", "*", "+x", "~_hidden", "item", "root", "left"]), part, max_size=4),
        st.builds(
            lambda code, inner: Ext(code, pack(inner)),
            st.one_of(st.sampled_from([kind.code for kind in KINDS.values()]), st.integers(-128, 127)),
            st.one_of(part, st.lists(part, max_size=4), st.tuples(st.sampled_from(_NAMES), part).map(list)),
        ),
    ),
    max_leaves=10,
)  # fmt: skip


def _survives(data: bytes) -> None:
    try:
        value = decode(data, REGISTRY, path="state", refs=[1, (2,)].__getitem__)
    except SafepointError as error:
        assert isinstance(error, (Damaged, NewerFormat, RefusedType, InvalidState))  # noqa: PT017 (anything may come)
    else:
        encode(value, REGISTRY)
    try:
        tree = decode_plain(data, refs=str)
        to_json(tree)
        encode_tree(tree)
    except SafepointError:
        pass


@given(st.binary(max_size=40))
def test_random_bytes_are_a_value_or_a_typed_error(data: bytes) -> None:
    _survives(data)


@given(_PARTS)
def test_well_formed_garbage_is_a_value_or_a_typed_error(part: Any) -> None:
    _survives(pack(part))


@given(values, st.data())
def test_mutated_bytes_are_a_value_or_a_typed_error(value: Any, draw: st.DataObject) -> None:
    data = bytearray(encode(value, REGISTRY))
    for _ in range(draw.draw(st.integers(1, 3))):
        at = draw.draw(st.integers(0, len(data)))
        cut = draw.draw(st.integers(0, 3))
        data[at : at + cut] = draw.draw(st.binary(max_size=3))
    _survives(bytes(data))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x01\x01",
        b"\xa2\xff\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x04",
        b"\x81\x01\x02",
        pack(datetime(2024, 1, 1, tzinfo=UTC)),  # MessagePack's own timestamp
        ext("int", b"\1"),
        ext("int", 1),
        ext("str", b"plain"),
        ext("str", b"\xff"),
        ext("path", ["PosixPath", msgspec.msgpack.Ext(2, pack(b"\xff"))]),
        ext("uuid", msgspec.msgpack.Ext(2, pack(b"\xff"))),
        ext("dict", [1]),
        ext("dict", [1, 2, 1, 3]),
        ext("dict", [[], 1]),
        ext("set", [1, 1]),
        ext("set", {}),
        ext("date", "2024-W01-1"),
        ext("date", "9" * 100),
        ext("datetime", "20240101"),
        ext("datetime", ["2024-01-01T00:00:00", "+99:00", 0]),
        ext("datetime", ["2024-01-01T00:00:00", None, 7]),
        ext("timedelta", [10**15, 0, 0]),
        ext("timedelta", [0, 10**9, 0]),
        ext("timezone", ["+24:00", None]),
        ext("decimal", "1e99999999999999999999999"),
        ext("decimal", "1_000"),
        ext("decimal", " 1"),
        ext("uuid", "0" * 32),
        ext("fraction", [1, 0]),
        ext("fraction", [2, 4]),
        ext("range", [0, 1, 0]),
        ext("range", [0, 1.5, 1]),
        ext("complex", [1, 2]),
        ext("path", ["Path", "a"]),
        ext("path", ["PosixPath", 1]),
        ext("deque", [1, 1, 2]),
        ext("deque", [-1]),
        ext("deque", []),
        ext("defaultdict", []),
        ext("dataclass", []),
        ext("enum", "RED"),
        ext("pydantic", {"x": 1}, REGISTRY.name_of(Model)),
        ext("pydantic", {"x": 1, "*": [1, 2, 3]}, REGISTRY.name_of(Model)),
    ],
)
def test_what_safepoint_does_not_write_is_damaged(data: bytes) -> None:
    with pytest.raises(Damaged, match=r"^state(\[1\])? cannot be loaded"):
        decode(data, REGISTRY, path="state")
    with pytest.raises(
        Damaged, match=r"^state\['a'\]\[0\](\[1\])? cannot be loaded|^state cannot be loaded: it is no MessagePack"
    ):
        decode(b"\x81\xa1a\x91" + data, REGISTRY, path="state")


def test_a_type_from_a_newer_version_is_named_as_such() -> None:
    with pytest.raises(NewerFormat, match="code 99"):
        decode(pack([Ext(99, b"\x01")]), REGISTRY)


@pytest.mark.parametrize(
    "data",
    [
        {"$type": "nothing", "value": 1},
        {"$type": "tuple", "value": [], "more": 1},
        {"$type": "enum", "value": "RED"},
        {"$type": "dict", "value": [1]},
        {"$bytes": "*"},
        {"$bytes": "AAAA", "a": 1},
        {"$float": "1.5"},
        {"$unknown": 1},
        {"$dict": [[[], 1]]},
        {"$dict": 5},
    ],
)
def test_what_is_no_json_form_is_damaged(data: Any) -> None:
    with pytest.raises(Damaged):
        from_json([data])


def test_data_cannot_pass_for_a_type() -> None:
    value = {"$type": "enum", "class": "os:system", "value": "x", "$bytes": [{"$float": "nan"}]}
    again = from_json(json.loads(json.dumps(to_json(decode_plain(encode(value, EMPTY))))))
    assert decode(encode_tree(again), EMPTY) == value

"""Flat packing: everything in the root, and the very same values taken and refused as in chunks."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safepoint.codec.chunks import pack, unpack, unpack_plain
from safepoint.codec.kinds import MAX_DEPTH
from safepoint.codec.nodes import BIG
from safepoint.codec.registry import Registry
from safepoint.errors import RefusedType
from safepoint.model import Obj

REGISTRY = Registry()


def nested(depth: int, wrap: Any = lambda x: [x]) -> Any:
    value: Any = "leaf"
    for _ in range(depth):
        value = wrap(value)
    return value


def loads(value: dict[str, Any], **how: Any) -> bool:
    """Whether a value is taken; if so, it must come back, with all that a second pack on top of it must take too."""
    try:
        packed = pack(value, REGISTRY, **how)
    except RefusedType:
        return False
    objects = {o.name: Obj(*o) for o in packed.new}
    back, base = unpack(packed.data, packed.refs, objects, REGISTRY)
    assert back == value
    unpack_plain(packed.data, packed.refs, objects)
    assert pack(value, REGISTRY, base=base, **how).digest == packed.digest
    return True


WRAPS = {"list": lambda x: [x], "dict": lambda x: {"k": x}, "tuple": lambda x: (x,), "general dict": lambda x: {1: x}}
PADS = {"small": "", "an object": "p" * 600, "split": "p" * (BIG + 1)}
PLACES: dict[str, Any] = {
    "an item": lambda v, pad: {"messages": [v, pad]},
    "at the top": lambda v, pad: {"x": v, "pad": pad},
    "in an opened dict": lambda v, pad: {"agent_state": {"v": v, "pad": pad}},
    "in a list in an opened dict": lambda v, pad: {"agent_state": {"v": [v, pad]}},
    "further down": lambda v, pad: {"agent_state": {"v": {"w": v, "pad": pad}}},
    "in a tuple": lambda v, pad: {"agent_state": (v, pad)},
}


@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("wrap", WRAPS)
def test_size_and_form_have_no_say_in_how_deep_a_value_may_be(place: str, wrap: str, opened: bool) -> None:
    taken = {}
    for depth in range(MAX_DEPTH - 3, MAX_DEPTH + 4):
        verdicts = {
            (pad, flat): loads(PLACES[place](nested(depth, WRAPS[wrap]), PADS[pad]), flat=flat, opened=opened)
            for pad in PADS
            for flat in (False, True)
        }
        assert len(set(verdicts.values())) == 1, (depth, verdicts)
        taken[depth] = verdicts["small", True]
    assert taken[MAX_DEPTH - 3]
    assert not taken[MAX_DEPTH + 3]
    assert sorted(taken, key=lambda d: not taken[d]) == sorted(taken), "deeper, and yet taken"


def test_an_item_as_deep_as_any_value_is_taken_alone_and_among_others() -> None:
    deep = nested(MAX_DEPTH)
    for messages in ([deep], [deep] * 30, [deep, "x" * BIG]):
        assert loads({"messages": messages})
        assert loads({"messages": messages}, flat=True)
        assert not loads({"messages": [*messages, [deep]]})
        assert not loads({"messages": [*messages, [deep]]}, flat=True)


def test_what_was_split_before_may_not_nest_deeper_than_what_is_new() -> None:
    def state(depth: int) -> dict[str, Any]:
        return {"agent_state": {"v": {"w": nested(depth), "pad": "p" * (BIG + 1)}}}

    base = pack(state(5), REGISTRY)
    deepest = max(d for d in range(MAX_DEPTH + 3) if loads(state(d)))
    assert pack(state(deepest), REGISTRY, base=base).digest == pack(state(deepest), REGISTRY).digest
    with pytest.raises(RefusedType):
        pack(state(deepest + 1), REGISTRY, base=base)


scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=400), st.binary())
trees = st.recursive(
    scalars,
    lambda kids: st.one_of(
        st.lists(kids, max_size=6),
        st.dictionaries(st.text(max_size=4), kids, max_size=4),
        st.dictionaries(st.integers(), kids, max_size=3),
        st.tuples(kids),
    ),
    max_leaves=40,
)


@given(st.dictionaries(st.text(max_size=5), trees, max_size=5), st.booleans())
def test_it_is_all_in_the_root(value: dict[str, Any], opened: bool) -> None:
    packed = pack(value, REGISTRY, flat=True, opened=opened)
    chunked = pack(value, REGISTRY, opened=opened)
    assert (packed.refs, packed.new) == (b"", ())
    assert packed.size == chunked.size == len(packed.data)
    back, base = unpack(packed.data, b"", {}, REGISTRY)
    assert repr(back) == repr(value)
    assert pack(back, REGISTRY, base=base, flat=True, opened=opened).data == packed.data
    # A base of the other form is of no use, and does no harm.
    assert pack(back, REGISTRY, base=base, opened=opened).digest == chunked.digest


def test_keys_that_are_no_text_are_refused_likewise() -> None:
    bads: tuple[Any, ...] = ({1: 2}, {"\ud800": 1})
    for bad in bads:
        with pytest.raises(RefusedType, match="key"):
            pack(bad, REGISTRY, flat=True)

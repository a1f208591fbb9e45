"""The value codec: what goes in comes out, with its type, or is refused with path and type named."""

import json
import math
import os
import random
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal, localcontext
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safepoint.codec import (
    REF_CODE,
    Tagged,
    decode,
    decode_plain,
    encode,
    encode_tree,
    from_json,
    prepare,
    ref,
    to_json,
)
from safepoint.codec.classes import KINDS
from safepoint.errors import Damaged, InvalidState, RefusedType, UsageError
from tests.support import samples
from tests.support.codec import EMPTY, Ext, ext, pack, refused, trip
from tests.support.paths import ROOT
from tests.support.samples import (
    REGISTRY,
    Color,
    Pair,
    Point,
    same,
    values,
)

# Values are as big as they are; only a report of a failure would show them.
pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")


# The whole table


@given(values)
def test_what_goes_in_comes_out(value: Any) -> None:
    data = encode(value, REGISTRY)
    assert same(decode(data, REGISTRY), value)
    tree = decode_plain(data)
    assert encode_tree(tree) == data
    assert encode_tree(from_json(json.loads(json.dumps(to_json(tree), allow_nan=False).encode("ascii")))) == data


@given(st.lists(samples.hashables, max_size=6), st.randoms(use_true_random=False))
def test_equal_sets_have_equal_bytes(members: list[Any], shuffled: random.Random) -> None:
    members = [item for item in members if item == item]  # noqa: PLR0124 (NaN: equal to nothing, itself included)
    once = set(members)
    ordered = list(once)
    shuffled.shuffle(ordered)
    assert encode(once, REGISTRY) == encode(set(ordered), REGISTRY)
    assert encode(frozenset(once), REGISTRY) == encode(frozenset(ordered), REGISTRY)


@pytest.mark.parametrize("name", samples.GOLDEN | samples.GOLDEN_SINCE)
def test_stored_bytes_never_change(name: str) -> None:
    """``SAFEPOINT_WRITE_GOLDEN=1`` adds what is new to the file. What is there is never written again."""
    file = ROOT / "tests" / "golden" / "values.json"
    stored = json.loads(file.read_text()) if file.exists() else {}
    value = samples.golden(name)
    if name not in stored and os.environ.get("SAFEPOINT_WRITE_GOLDEN"):
        stored[name] = {"value": (samples.GOLDEN | samples.GOLDEN_SINCE)[name], "hex": encode(value, REGISTRY).hex()}
        file.write_text(json.dumps(stored, indent=1) + "\n")
    assert stored[name]["value"] == (samples.GOLDEN | samples.GOLDEN_SINCE)[name]
    assert encode(value, REGISTRY).hex() == stored[name]["hex"]
    assert same(decode(bytes.fromhex(stored[name]["hex"]), REGISTRY), value)


def test_every_row_of_the_table_has_golden_bytes_and_a_line_in_the_docs() -> None:
    docs = (ROOT / "docs" / "types.md").read_text()
    tags = {tag for tag in KINDS if f"| {KINDS[tag].code} | `{tag}` |" not in docs}
    assert not tags
    seen = set[str]()

    def tags_in(tree: Any) -> None:
        if isinstance(tree, Tagged):
            seen.add(tree.tag)

    for name in samples.GOLDEN | samples.GOLDEN_SINCE:
        tags_in(decode_plain(encode(samples.golden(name), REGISTRY)))
    assert seen | {"int", "str"} == set(KINDS)


def test_codes_are_unique_and_free_of_the_reference() -> None:
    codes = [kind.code for kind in KINDS.values()]
    assert len(set(codes)) == len(codes)
    assert REF_CODE not in codes


# The hot path


def test_plain_data_is_not_copied() -> None:
    value = {"messages": [{"role": "user", "content": "hé"}, {"n": [1, 2.5, None, True, b"x", {"a": {}}]}]}
    assert prepare(value, EMPTY) is value


def test_only_what_changes_is_copied_and_the_caller_keeps_the_original() -> None:
    plain, changed = {"a": "b"}, {"t": (1, 2)}
    value = [plain, changed]
    tree = prepare(value, EMPTY)
    assert tree is not value
    assert tree[0] is plain
    assert changed == {"t": (1, 2)}
    assert value == [plain, changed]


def test_references_stand_for_what_is_stored_elsewhere() -> None:
    data = pack({"a": [ref(0), ref(300)], "b": 1})
    assert decode(data, EMPTY, refs=["x", *[0] * 299, (1,)].__getitem__) == {"a": ["x", (1,)], "b": 1}
    assert decode_plain(data, refs=str) == {"a": ["0", "300"], "b": 1}
    nothing: list[int] = []
    for refs in (None, nothing.__getitem__):
        with pytest.raises(Damaged, match=r"state\['a'\]\[0\]"):
            decode(data, EMPTY, path="state", refs=refs)
    with pytest.raises(Damaged):
        decode(pack(Ext(REF_CODE, pack(-1))), EMPTY, refs=[1].__getitem__)


# Containers


class Text(str):
    __slots__ = ()


class Number(int):
    pass


def test_field_case_16_container_subclasses() -> None:
    groups: Any = trip(defaultdict(list, a=[1]))
    groups["new"].append(2)
    assert groups == {"a": [1], "new": [2]}
    counted: Any = trip(Counter("abca"))
    assert counted.most_common(1) == [("a", 2)]
    assert counted["missing"] == 0
    ordered: Any = trip(OrderedDict(b=1, a=2))
    ordered.move_to_end("b")
    assert list(ordered) == ["a", "b"]
    assert ordered != OrderedDict(b=1, a=2)
    tail: Any = trip(deque([1, 2, 3], maxlen=3))
    tail.append(4)
    assert list(tail) == [2, 3, 4]
    assert trip(Pair(1)).right is None
    for value, base in ((Text("secret"), "str"), (Number(7), "int"), (type("L", (list,), {})(), "list")):
        error = refused({"a": value})
        assert f"subclass of {base}" in str(error)
        assert "secret" not in str(error)
    assert "default_factory" in str(refused(defaultdict(lambda: 0)))


def test_a_dict_keeps_keys_of_every_type_in_order() -> None:
    value = {2: "a", "2": "b", (1, "x"): "c", None: "d", frozenset({1}): "e", Color.RED: "f", "": "g", "\0": "h"}
    assert same(trip(value), value)
    for key in (1, 1.0, True, -0.0, 0, False):
        assert same(trip({key: key}), {key: key})


def test_shared_parts_are_fine() -> None:
    shared = {"a": (1,)}
    assert trip([shared, shared, {"again": shared}]) == [shared, shared, {"again": shared}]


# Numbers


def test_field_case_18_big_integers() -> None:
    for number in (2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 2**256 - 12345, -(2**2000), 10**5000):
        value = {"n": [number], "keys": {number: number}}
        assert same(trip(value), value)
        tree = decode_plain(encode(value, EMPTY))
        assert tree["n"] == [number]
        text = json.dumps(to_json(tree))
        assert from_json(json.loads(text)) == tree
        if abs(number) < 2**2100:
            assert json.loads(text)["n"] == [number]


def test_field_case_26_nan_and_infinity() -> None:
    value = [
        math.nan,
        math.inf,
        -math.inf,
        -0.0,
        Decimal("NaN"),
        Decimal("-Infinity"),
        {"m": math.nan},
        complex(-0.0, math.nan),
    ]
    assert same(trip(value), value)
    text = json.dumps(to_json(decode_plain(encode(value, EMPTY))), allow_nan=False)
    again = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert same(decode(encode_tree(from_json(again)), EMPTY), value)


def test_decimals_do_not_depend_on_the_context_of_the_thread() -> None:
    value = [Decimal("1E+50"), Decimal("1.23456789"), Decimal("sNaN")]
    data = encode(value, EMPTY)
    with localcontext(prec=3, capitals=0, Emax=5, Emin=-5):
        assert encode(value, EMPTY) == data
        assert same(decode(data, EMPTY), value)


# Time

_TIMES = [
    datetime(2024, 5, 1, 12),  # noqa: DTZ001 (naive is the case)
    datetime(2024, 5, 1, 12, tzinfo=UTC),
    datetime(2024, 5, 1, 12, tzinfo=timezone(timedelta(hours=5, minutes=30))),
    datetime.min,  # noqa: DTZ901
    datetime.max,  # noqa: DTZ901
    datetime.max.replace(tzinfo=UTC),
    date(2024, 2, 29),
    time(1, 2, 3, 4),
    time(1, 2, fold=1),
    timedelta(days=-1, microseconds=1),
    timedelta.max,
    timedelta.min,
]


def test_field_case_20_naive_datetimes() -> None:
    program = (
        "import sys, datetime; from safepoint.codec import *; from time import tzname\n"
        f"times = {_TIMES!r}\n"
        "if sys.argv[1:]:\n"
        "    back = decode(bytes.fromhex(sys.argv[1]), Registry())\n"
        "    assert repr(back) == repr(times) and back == times, back\n"
        "    assert back[0] < datetime.datetime.now() and back[1] < datetime.datetime.now(datetime.UTC)\n"
        "print(tzname[0], encode(times, Registry()).hex())\n"
    )

    def run(zone: str, *args: str) -> list[str]:
        env = {**os.environ, "TZ": zone, "PYTHONPATH": str(ROOT / "src")}
        done = subprocess.run([sys.executable, "-c", program, *args], env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    kolkata = run("Asia/Kolkata")
    new_york = run("America/New_York", kolkata[1])
    assert (kolkata[0], new_york[0]) == ("IST", "EST")
    assert kolkata[1] == new_york[1] == encode(_TIMES, EMPTY).hex()


class OwnZone(tzinfo):
    def utcoffset(self, _at: Any) -> timedelta:
        return timedelta(hours=1)

    dst = utcoffset

    def tzname(self, _at: Any) -> str:
        return "own"


def test_a_foreign_time_zone_is_refused() -> None:
    error = refused({"at": [datetime(2024, 1, 1, tzinfo=OwnZone())]})
    assert "agent_state['at'][0]" in str(error)
    assert "OwnZone" in str(error)


def test_a_zone_that_this_machine_lacks_is_no_damage() -> None:
    for key in ("Mars/Olympus", "../../etc/passwd", "Europe", ""):
        with pytest.raises(InvalidState, match="tzdata"):
            decode(ext("zoneinfo", key), EMPTY)


def test_a_path_of_the_other_system_comes_back_as_a_pure_path() -> None:
    assert same(decode(ext("path", ["WindowsPath", "C:\\a"]), EMPTY), PureWindowsPath("C:\\a"))
    assert same(trip(PurePosixPath("a/\udc80")), PurePosixPath("a/\udc80"))


# Migrations


def test_a_migration_works_on_the_plain_tree_without_the_classes() -> None:
    tree = decode_plain(encode({"at": datetime(2024, 1, 1, tzinfo=UTC), "point": Point(1, (2, 3))}, REGISTRY))
    name = "tests.support.samples:Point"
    assert tree["point"] == Tagged("dataclass", name, {"x": 1, "y": Tagged("tuple", None, [2, 3])})
    tree["point"].value["y"] = {"new": (1, Decimal(2))}  # built-in types may be put in as they are
    assert decode(encode_tree(tree), REGISTRY)["point"] == Point(1, {"new": (1, Decimal(2))})
    with pytest.raises(UsageError):
        encode_tree(Tagged("no such", None, []))
    with pytest.raises(UsageError):
        encode_tree(Tagged("tuple", None, 5))
    with pytest.raises(RefusedType):
        encode_tree([Point(1)])

"""The value codec and classes of the application: stored by name, made only if registered or trusted, never constructed."""

import os
import subprocess
import sys
import threading
from collections import defaultdict, deque, namedtuple
from dataclasses import InitVar, dataclass, field, make_dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import Any, Optional

import pytest
from pydantic import BaseModel, PrivateAttr, create_model

from safepoint.codec import (
    Registry,
    Tagged,
    decode,
    decode_plain,
    encode,
    encode_tree,
    register,
)
from safepoint.errors import InvalidState, RefusedType, UsageError
from tests.support import samples
from tests.support.codec import EMPTY, ext, refused, trip
from tests.support.paths import ROOT
from tests.support.samples import (
    REGISTRY,
    Box,
    Boxed,
    Color,
    Frozen,
    Items,
    Model,
    Open,
    Perm,
    Phase,
    Point,
    same,
)

# Enums


def test_field_case_22_enums() -> None:
    value = {Color.RED: [samples.Level.HIGH, Phase.PLAN, Perm.R | Perm.X, samples.Bits(12), Color.GREEN]}
    assert same(trip(value), value)

    class Renamed(Enum):
        CRIMSON = 1
        RED = CRIMSON  # the old name stays as an alias

    class Without(Enum):
        BLUE = 3

    new = Registry(parent=None)
    name = REGISTRY.name_of(Color)
    new.add(Renamed, name=name)
    assert decode(encode(Color.RED, REGISTRY), new) is Renamed.CRIMSON
    less = Registry(parent=None)
    less.add(Without, name=name)
    data = encode({"good": 1, "bad": Color.GREEN}, REGISTRY)
    with pytest.raises(InvalidState, match=r"state\['bad'\].*Without.*GREEN"):
        decode(data, less, path="state")
    # The rest stays readable, and a migration can put it right.
    tree = decode_plain(data)
    assert tree == {"good": 1, "bad": Tagged("enum", name, "GREEN")}
    tree["bad"] = Tagged("enum", name, "BLUE")
    assert decode(encode_tree(tree), less) == {"good": 1, "bad": Without.BLUE}


def test_unknown_bits_of_a_strict_flag() -> None:
    with pytest.raises(InvalidState, match="Perm"):
        decode(ext("enum", 1024, REGISTRY.name_of(Perm)), REGISTRY)


# Dataclasses and their kin

RAN: list[str] = []


@dataclass
class Busy:
    given: int
    scale: InitVar[int]
    made: int = field(init=False)
    log: list[str] = field(default_factory=list)

    def __post_init__(self, scale: int) -> None:
        RAN.append("post_init")
        self.made = self.given * scale


@dataclass(frozen=True, slots=True)
class BusyFrozen:
    given: int
    made: int = field(init=False)

    def __post_init__(self) -> None:
        RAN.append("post_init")
        object.__setattr__(self, "made", self.given + 1)


@dataclass
class BusyChild(Busy):
    extra: tuple[int, ...] = ()


@dataclass
class Lazy:
    raw: int

    @property
    def doubled(self) -> int:
        RAN.append("property")
        return self.raw * 2


def test_field_case_24_dataclass_details() -> None:
    registry = Registry([Busy, BusyFrozen, BusyChild, Lazy], parent=None)
    value = [Busy(2, 10), BusyFrozen(4), BusyChild(1, 3, extra=(1, 2)), Lazy(3)]
    value[0].log.append("x")  # type: ignore[attr-defined]
    RAN.clear()
    back: Any = trip(value, registry)
    assert not RAN
    assert back == value
    assert [type(item) for item in back] == [type(item) for item in value]
    assert (back[0].made, back[1].made, back[2].extra) == (20, 5, (1, 2))

    @dataclass
    class Mapping(dict):
        x: int = 0

    for unsupported in (Mapping, type("Plain", (), {})):
        with pytest.raises(UsageError, match="cannot be registered"):
            Registry([unsupported])
    assert "cannot be stored" in str(refused(Mapping()))


def _version(name: str, **fields: Any) -> tuple[type, Registry]:
    registry = Registry(parent=None)
    cls = make_dataclass(name, [(key, Any, value) if value is not ... else (key, Any) for key, value in fields.items()])
    registry.add(cls, name="app:Thing")
    return cls, registry


def test_a_dataclass_that_has_changed() -> None:
    old, was = _version("Thing", x=..., y=...)
    data = encode([old(1, 2)], was)
    _, now = _version("Thing", x=..., y=..., z=field(default_factory=list), w=5)
    thing: Any = decode(data, now)[0]
    assert (thing.x, thing.y, thing.z, thing.w) == (1, 2, [], 5)
    with pytest.raises(InvalidState, match=r"state\[0\].*Thing\.z is not in what was stored"):
        decode(data, _version("Thing", x=..., y=..., z=...)[1], path="state")
    with pytest.raises(InvalidState, match=r"state\[0\].*Thing has no field 'y'"):
        decode(data, _version("Thing", x=...)[1], path="state")
    other = Registry(parent=None)
    other.add(Color, name="app:Thing")
    with pytest.raises(InvalidState, match=r"stored as dataclass, and is enum now"):
        decode(data, other)


def test_a_named_tuple_that_has_changed() -> None:
    old, new, less = (Registry(parent=None) for _ in range(3))
    old.add(namedtuple("P", "a b"), name="P")
    new.add(namedtuple("P", "b a c", defaults=[3]), name="P")
    less.add(namedtuple("P", "a"), name="P")
    data = encode(old.class_of("P")(1, 2), old)  # type: ignore[misc]
    assert decode(data, new) == (2, 1, 3)
    with pytest.raises(InvalidState, match="'b'"):
        decode(data, less)


class Counted(BaseModel):
    x: int
    _calls: int = PrivateAttr(default=0)

    def model_post_init(self, context: Any, /) -> None:
        RAN.append("post_init")


def test_pydantic_models_are_not_validated_again() -> None:
    registry = Registry([Counted], parent=None)
    value = Counted(x=1)
    value._calls = 7
    value.__dict__["x"] = "not an int"
    RAN.clear()
    back = trip(value, registry)
    assert same(back, value) or (back.x, back._calls) == ("not an int", 7)
    assert not RAN
    assert trip(Open.model_validate({"a": 1})).model_extra == {"a": 1}
    assert trip(Items([1])).root == [1]
    assert trip(Model(x=1, y=2)).model_fields_set == {"x", "y"}


def test_a_pydantic_model_that_has_changed() -> None:
    old, new, less = (Registry(parent=None) for _ in range(3))
    old.add(create_model("M", a=(int, ...), b=(int, ...)), name="M")
    new.add(create_model("M", a=(int, ...), b=(int, ...), c=(list[int], [])), name="M")
    less.add(create_model("M", a=(int, ...)), name="M")
    data = encode(old.class_of("M")(a=1, b=2), old)  # type: ignore[misc]
    assert decode(data, new).model_dump() == {"a": 1, "b": 2, "c": []}
    with pytest.raises(InvalidState, match="'b'"):
        decode(data, less)


def test_generic_models_come_back_as_the_class_they_were() -> None:
    for value in (
        Box[int](item=1),
        Box[list[str]](item=["a"]),
        Box[Point | None](item=Point(1)),
        Box[Optional[Point]](item=None),  # noqa: UP045 (another class than the one above)
        Box[Box[int]](item=Box[int](item=2)),
        Box[Any](item=3),
        Box(item=4),
    ):
        assert same(trip(value), value)
    assert "not registered" in str(refused(Box[datetime](item=datetime.now(UTC)), REGISTRY))
    names = [
        "Box[",
        "Box[]",
        "Box[builtins:int",
        "Box[os:system]",
        "Box[builtins:int]]",
        "Box" + "[Box" * 90 + "]" * 90,
        "x" * 2000,
    ]
    for name in names:
        assert REGISTRY.class_of(f"tests.support.samples:{name}") is None
    assert type(trip(Boxed[int](1))) is Boxed


# Registered, trusted, neither


def test_an_unregistered_class_is_refused_with_path_and_remedy() -> None:
    error = refused({"a": {"b": [0, 0, 0, {"c": Point("secret")}]}})
    text = str(error)
    assert "agent_state['a']['b'][3]['c']" in text
    assert "tests.support.samples.Point" in text
    assert "@safepoint.register" in text
    assert "types=[Point]" in text
    assert "trust=['tests.support.samples']" in text
    assert "secret" not in text
    assert error.details == {"path": "agent_state['a']['b'][3]['c']", "type": "tests.support.samples.Point"}
    with pytest.raises(RefusedType, match=r"state\[0\].*samples:Point"):
        decode(encode([Point(1)], REGISTRY), EMPTY, path="state")


def test_field_case_30_useful_error() -> None:
    unsupported: list[Any] = [
        threading.Lock(),
        (item for item in "x"),
        object(),
        len,
        ValueError("secret"),
        int,
        memoryview(b"secret"),
    ]
    for value in unsupported:
        text = str(refused({"a": {"b": [0, 0, 0, {"c": value}]}}))
        assert "agent_state['a']['b'][3]['c']" in text
        assert type(value).__name__ in text
        assert "secret" not in text
    lock = threading.Lock()
    for value, path in (
        (Point(1, lock), ".y"),
        ((1, lock), "[1]"),
        ({1: {2.5: lock}}, "[1][2.5]"),
        (defaultdict(None, a=lock), "['a']"),
        (deque([0, lock], 5), "[1]"),
        ({lock}, "{…}"),
        ({(1, lock): 0}, ".keys()[0][1]"),
        ({"k" * 200: lock}, "['" + "k" * 57 + "...']"),
        ({"a": Model(x=1, y=[lock])}, "['a'].y[0]"),
        ({Frozen("secret"): lock}, "[<tests.support.samples.Frozen>]"),
        (Tagged("tuple", None, []), ""),
    ):
        assert str(refused(value, REGISTRY, "s")).startswith(f"s{path} cannot be stored: "), value
    assert str(refused(lock, path="")).startswith("the value cannot be stored")


def test_trust_imports_what_is_trusted_and_nothing_else(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("tr_good", "tr_evil"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
        (tmp_path / package / "models.py").write_text(
            "from dataclasses import dataclass\nfrom subprocess import Popen\n@dataclass\nclass Thing:\n    x: int\n"
            "    @dataclass\n    class Inner:\n        y: int\n"
        )
    (tmp_path / "tr_good" / "broken.py").write_text("raise ZeroDivisionError")
    monkeypatch.syspath_prepend(tmp_path)
    registry = Registry(trust=["tr_good"], parent=None)
    for name in (
        "tr_evil.models:Thing",
        "tr_goodish:Thing",
        "tr_evil.models",
        "tr_good.models:Popen",
        "tr_good.models:Missing",
    ):
        with pytest.raises(RefusedType):
            decode(ext("dataclass", {"x": 1}, name), registry)
    for name in (
        "",
        ":",
        "tr_good.models:",
        "tr_good..models:Thing",
        "tr_good.models:Thing.x",
        "tr_good.none:Thing",
        "tr_good.a b:C",
    ):
        with pytest.raises(RefusedType):
            decode(ext("dataclass", {"x": 1}, name), registry)
    assert not [name for name in sys.modules if name.startswith("tr_evil")]
    back: Any = decode(ext("dataclass", {"x": 1}, "tr_good.models:Thing"), registry)
    assert (type(back).__module__, back.x) == ("tr_good.models", 1)
    assert same(trip(type(back).Inner(2), registry).y, 2)
    with pytest.raises(RefusedType, match="cannot be imported") as caught:
        decode(ext("enum", "X", "tr_good.broken:Thing"), registry)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_registering() -> None:
    @register(name="tests:Local", aliases=["tests:Former"])
    @dataclass
    class Local:
        x: int

    assert Registry().name_of(Local) == "tests:Local"
    assert EMPTY.name_of(Local) is None
    assert type(trip(Local(1), Registry())) is Local
    assert type(decode(ext("dataclass", {"x": 1}, "tests:Former"), Registry())) is Local
    registry = Registry([Point], parent=None)
    with pytest.raises(UsageError, match="is taken"):
        registry.add(Color, name="tests.support.samples:Point")
    for wrong in ({"name": "builtins:list"}, {"aliases": "tests:Point"}, {"name": "\ud800"}):
        with pytest.raises(UsageError):
            registry.add(Point, **wrong)
    with pytest.raises(UsageError, match=r"trust=\['app'\]"):
        Registry(trust="app")

    def cell() -> type:
        @dataclass
        class Cell:
            x: int

        return Cell

    first, second = cell(), cell()  # the same cell of a notebook, run twice
    registry.add(first)
    registry.add(second)
    assert type(trip(first(1), registry)) is second


def test_a_script_can_be_run_again_and_as_a_module(tmp_path: Any) -> None:
    (tmp_path / "job.py").write_text(
        "import sys\nfrom dataclasses import dataclass\nfrom safepoint.codec import *\n@register\n@dataclass\nclass Job:\n    x: int\n"
        "if __name__ == '__main__':\n"
        "    registry = Registry(trust=['job'])\n"
        "    if sys.argv[1:]: assert decode(bytes.fromhex(sys.argv[1]), registry) == Job(1)\n"
        "    print(registry.name_of(Job), encode(Job(1), registry).hex())\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(tmp_path)])}

    def run(*args: str) -> list[str]:
        done = subprocess.run([sys.executable, *args], env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    name, data = run(str(tmp_path / "job.py"))
    assert (name, run(str(tmp_path / "job.py"), data)[1]) == ("__main__:Job", data)
    name, data = run("-m", "job")
    assert name == "job:Job"
    assert run("-m", "job", data)[1] == data
    run("-c", f"from safepoint.codec import *; import job; assert decode(bytes.fromhex('{data}'), Registry()) == job.Job(1)")


class Stubborn(BaseModel):
    x: int

    def __getstate__(self) -> dict[Any, Any]:
        raise OSError("secret")


def test_a_class_that_cannot_be_taken_apart_is_refused_with_its_path() -> None:
    with pytest.raises(RefusedType, match=r"state\[0\] cannot be stored: taking it apart failed with OSError") as caught:
        encode([Stubborn(x=1)], Registry([Stubborn], parent=None), path="state")
    assert "secret" not in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)


class Meddler(BaseModel):
    x: int

    def __getstate__(self) -> dict[Any, Any]:
        MEDDLED["more"] = 1
        return super().__getstate__()


MEDDLED: dict[str, Any] = {"first": Meddler(x=1), "last": 2}


def test_a_state_that_changes_while_it_is_saved_is_refused() -> None:
    with pytest.raises(InvalidState, match="state cannot be stored: dictionary changed size"):
        encode(MEDDLED, Registry([Meddler], parent=None), path="state")


def test_an_attribute_whose_name_is_no_text_is_refused() -> None:
    for name in ("\ud800", 1):
        point = Point(1)
        vars(point)[name] = 1  # type: ignore[index]
        with pytest.raises(RefusedType, match="name is no text"):
            encode(point, REGISTRY)

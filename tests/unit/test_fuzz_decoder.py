"""Everything that reads stored bytes, against forged ones: typed errors, bounded memory and time, no import. See tests/support/fuzz.py."""

import os
import subprocess
import sys
import time
import tracemalloc
from enum import IntFlag
from fractions import Fraction

import pytest

from safepoint.codec import Registry, chunks, decode, encode
from safepoint.codec.classes import KINDS
from safepoint.codec.nodes import name_of
from safepoint.codec.salvage import salvaged
from safepoint.errors import Damaged, RefusedType
from safepoint.model import Obj
from tests.support import fuzz
from tests.support.codec import EMPTY, Ext, pack
from tests.support.paths import ROOT
from tests.support.samples import Box
from tests.support.scale import scale
from tests.support.seeds import fresh_seed


@pytest.mark.scaled
@pytest.mark.parametrize("part", range(4))
def test_forged_bytes_are_a_value_or_a_typed_error(part):
    rounds = scale(50, 500)
    with fuzz.NoImports():
        for seed in range(part * 1_000_000, part * 1_000_000 + rounds):
            fuzz.one_round(seed, memory=seed % 8 == 0)


def test_make_fuzz_says_how_to_come_again():
    seed = fresh_seed()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.support.fuzz", "1"],
        cwd=ROOT,
        env={**os.environ, "FUZZ_SEED": str(seed)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"FUZZ_SEED={seed}" in done.stdout


def test_the_harness_would_notice(monkeypatch):
    """A reader that does what it must not is found, whatever it is."""

    def reader(what):
        def target(rng):
            return 10, [what]

        monkeypatch.setattr(fuzz, "TARGETS", (target,))
        with fuzz.NoImports():
            for memory in (False, True):
                fuzz.one_round(1, memory=memory)

    monkeypatch.setattr(fuzz, "SECONDS", 0.2)
    sys.modules.pop("antigravity", None)
    for what in (
        lambda: dict[str, int]()["x"],
        lambda: sum(range(50_000_000)),
        lambda: bytearray(10 << 20),
        lambda: __import__("antigravity"),
        lambda: (_ for _ in ()).throw(SystemExit),
    ):
        with pytest.raises(fuzz.Finding):
            reader(what)
    reader(lambda: (_ for _ in ()).throw(Damaged("x", "y", "z")))


def laughing(levels, wide, bottom):
    """Objects each of which refers to the next many times over: the root, its reference, and all of them."""
    objects = {}
    data, refs = bottom, b""
    for _ in range(levels):
        obj = Obj(name_of(refs, data), refs, data)
        objects[obj.name] = obj
        refs = obj.name * wide
        data = b"v" + pack({str(i): Ext(0, pack(i)) for i in range(wide)})
    obj = Obj(name_of(refs, data), refs, data)
    return pack({"a": Ext(0, pack(0))}), obj.name, {**objects, obj.name: obj}


@pytest.mark.parametrize("size", [1000, 2**62, None])
def test_a_few_objects_do_not_become_more_than_any_memory_holds(size, monkeypatch):
    monkeypatch.setattr("safepoint.codec.chunkread._FREE", 1 << 20)  # a gigabyte takes its time
    root, refs, objects = laughing(9, 30, b"v" + pack("x" * 100))
    tracemalloc.start()
    try:
        for read in (
            lambda: chunks.unpack(root, refs, objects, EMPTY, size=size),
            lambda: chunks.unpack_plain(root, refs, objects, size=size),
        ):
            with pytest.raises(Damaged, match="add up to far more than was saved"):
                read()
        _, problems = salvaged(root, refs, objects)
        assert "add up to far more" in problems[-1]
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_many_equal_parts_are_no_forgery():
    """What really was saved is read, however often one part of it comes again."""
    value = {
        "a": [["x" * 20_000] * 200] * 10,
        "b": [[None] * 40_000],
        "c": [list(range(50))] * 3000,
        "d": {str(i): "y" * 300 for i in range(2000)},
    }
    packed = chunks.pack(value, EMPTY)
    objects = {obj.name: obj for obj in packed.new}
    assert packed.size > 100 * sum(len(obj.data) for obj in packed.new) / 3
    for size in (packed.size, None):
        assert chunks.unpack(packed.data, packed.refs, objects, EMPTY, size=size)[0] == value
        assert chunks.unpack_plain(packed.data, packed.refs, objects, size=size) == value


def test_pages_on_pages_on_pages():
    data = b"l" + pack([0, []])
    obj = Obj(name_of(b"", data), b"", data)
    objects = {obj.name: obj}
    for level in range(1, 3000):
        data = b"i" + pack([level, 0, 0])
        obj = Obj(name_of(obj.name, data), obj.name, data)
        objects[obj.name] = obj
    data = b"r" + pack([0, 0, [1] + [0] * 2999, []])
    top = Obj(name_of(obj.name, data), obj.name, data)
    objects[top.name] = top
    with pytest.raises(Damaged):
        chunks.unpack(pack({"a": Ext(0, pack(0))}), top.name, objects, EMPTY)
    assert salvaged(pack({"a": Ext(0, pack(0))}), top.name, objects)[1]


def test_long_numbers_take_no_time():
    class Wide(IntFlag):
        A = 1

    registry = Registry([Wide], parent=None)
    big = (1 << 4_000_000) + 1
    began = time.perf_counter()
    data = encode(big, EMPTY)
    parts = [Ext(1, pack(KINDS["int"].reduce(number, EMPTY))) for number in (big, big + 2)]
    forged = pack(Ext(KINDS["fraction"].code, pack(parts)))
    value = decode(forged, EMPTY)
    assert isinstance(value, Fraction)
    assert (value.numerator, value.denominator) == (big, big + 2)
    assert decode(encode(value, EMPTY), EMPTY).numerator == big
    assert decode(data, EMPTY) == big
    assert decode(encode(Wide(1 << 100_000), registry), registry).value == 1 << 100_000
    assert time.perf_counter() - began < 5


def test_parametrised_models_are_not_made_without_end(monkeypatch):
    monkeypatch.setattr("safepoint.codec.registry._MAX_MADE", 5)
    registry = Registry([Box], parent=None)
    name = registry.name_of(Box)
    made = [
        "builtins:int",
        "builtins:str",
        "Any",
        "builtins:list",
        "builtins:dict",
        "builtins:set",
        "builtins:bytes",
        "builtins:tuple",
    ]
    whole = [Ext(KINDS["pydantic"].code, pack([f"{name}[{each}]", {"item": 1, "*": [False, False]}])) for each in made]
    with pytest.raises(RefusedType, match="more than 5 parametrised models"):
        decode(pack(whole), registry)
    assert decode(encode(Box[int](item=1), registry), registry).item == 1, "those that are known go on"

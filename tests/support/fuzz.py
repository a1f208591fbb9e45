"""Stored bytes as somebody might forge them, against everything that reads stored bytes.

``make fuzz`` runs this for long; ``tests/unit/test_fuzz_decoder.py`` the same for seconds. Each round is made from one number, which a
failure prints: ``FUZZ_SEED=… make fuzz`` begins with it.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from safepoint.codec import Registry, chunks, decode, decode_plain, encode, encode_tree, from_json, states, to_json
from safepoint.codec.chunkread import _MAP
from safepoint.codec.classes import KINDS
from safepoint.codec.nodes import name_of
from safepoint.codec.salvage import salvaged
from safepoint.codec.states import Control
from safepoint.errors import Damaged, InvalidState, NewerFormat, NewerSchema, RefusedType, UsageError
from safepoint.model import Obj, State
from safepoint.rows import CallRow, CheckpointRow, replace
from tests.support import samples

__all__ = ["Finding", "NoImports", "one_round"]

ALLOWED = (Damaged, InvalidState, NewerFormat, NewerSchema, RefusedType)
pack = msgspec.msgpack.encode
Ext = msgspec.msgpack.Ext

#: A byte of input may become so many of memory: an empty deque takes 6 bytes, and Python 800 for it.
MULTIPLE = 300
SLACK = 2 << 20
SECONDS = 5.0

# Trusts a module that does not exist: nothing else may be imported for a name in the data.
REGISTRY = Registry(samples.CLASSES, trust=["safepoint_fuzz_trusted"], parent=None)
EVIL = (
    *("antigravity:Fly", "this:Zen", "os:system", "subprocess:Popen", "safepoint_fuzz_trusted.x:Thing", "builtins:eval"),
    *(
        "tests.support.samples:Box[builtins:int]",
        "tests.support.samples:Box[" * 8 + "Any" + "]" * 8,
        "Union[Any,Any]",
        "a:b" * 300,
    ),
)
NAMES = tuple(f"tests.support.samples:{cls.__name__}" for cls in samples.CLASSES)
NUMBERS = (0, 1, -1, 127, 255, 65535, 2**31, 2**32 - 1, 2**40, 2**63 - 1, -(2**63), 2**64 - 1)
TEXTS = (
    *("x", "-x", ".x", "+x", "~_hidden", "*", "RED", "item", "root", "first_part", "2024-01-01", "+05:30", "Europe/Berlin"),
    *(
        "../../etc/passwd",
        "1E+999999999",
        "sNaN",
        "<f8",
        "|O",
        "<M8[ns]",
        "<f8,<f8",
        "PosixPath",
        "C",
        "F",
        "builtins:list",
        "",
    ),
)


class Finding(Exception):
    """What should not have happened, and to which input."""


class NoImports:
    """While this is entered, an import that the data might have asked for is an error."""

    FINE = ("tzdata", "encodings", "zoneinfo", "importlib", "safepoint_fuzz_trusted")

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] not in self.FINE:
            raise Finding(f"{name} was to be imported")

    def __enter__(self) -> NoImports:
        self.before = set(sys.modules)
        sys.meta_path.insert(0, self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.meta_path.remove(self)
        new = {name for name in set(sys.modules) - self.before if name.partition(".")[0] not in self.FINE}
        if new:
            raise Finding(f"{sorted(new)} have been imported")


# -- what was saved


def _values() -> list[bytes]:
    return [encode(samples.golden(name), samples.REGISTRY) for name in samples.GOLDEN | samples.GOLDEN_SINCE]


def _state(n: int) -> State:
    message = {"role": "user", "content": "a message that is long enough to be an object of its own, as most of them are"}
    return State(
        "fuzz",
        step=n,
        messages=[{**message, "n": i} for i in range(n)],
        agent_state={
            "big": [[[i] * 30] * 40 for i in range(20)],
            "typed": samples.golden("pydantic_extra"),
            "text": "x" * 2000,
        },
        metadata={"n": n, "color": samples.Color.RED},
    )


VALUES = _values()
PACKED = [
    states.pack_state(_state(n), Control([["", "job", "open", None, 0]]), samples.REGISTRY, None, flat=flat)
    for n, flat in ((0, False), (3, False), (70, False), (3, True), (300, False))
]
CALLS = states.pack_values(
    {"to": "bob", "body": ["x" * 100] * 50, "kept": samples.golden("dataclass")}, samples.REGISTRY, None, ""
)


# -- how it is changed


def _bytes(rng: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(9):
            case 0 if out:
                out[at % len(out)] ^= 1 << rng.randrange(8)
            case 1 if out:
                out[at % len(out)] = rng.randrange(256)
            case 2:
                del out[at:]
            case 3:
                del out[at : at + rng.randrange(1, 9)]
            case 4:  # a length that nothing follows
                out[at : at + 5] = rng.choice((b"\xdd", b"\xdf", b"\xc6", b"\xc9", b"\xdb")) + rng.choice(
                    (b"\xff\xff\xff\xff", b"\0\1\0\0")
                )
            case 5:  # depth
                out[at:at] = rng.choice((b"\x91", b"\x81\xa1k", b"\xc7\x02\x04\x91\x91")) * rng.choice((3, 199, 201, 5000))
            case 6:
                other = rng.choice(VALUES)
                out[at:at] = other[rng.randrange(len(other)) :]
            case 7:  # another type
                out[at : at + 1] = bytes([rng.choice([kind.code for kind in KINDS.values()])])
            case _:
                again = bytes(out[at : at + rng.randrange(1, 40)])
                out[at:at] = again * rng.choice((1, 2, 50))
    return bytes(out)


def _part(rng: random.Random, depth: int = 4) -> Any:
    """Well-formed MessagePack that means nothing."""
    match rng.randrange(12 if depth else 6):
        case 0:
            return rng.choice((None, True, False))
        case 1:
            return rng.choice(NUMBERS)
        case 2:
            return rng.choice((0.0, -0.0, float("nan"), float("inf"), 1.5))
        case 3:
            return rng.choice(TEXTS)
        case 4:
            return rng.choice(NAMES + EVIL)
        case 5:
            return rng.choice((b"", b"\0" * 8, b"\1", bytes(rng.randrange(200)), rng.randbytes(rng.choice((1, 5, 9)))))
        case 6:
            return [_part(rng, depth - 1) for _ in range(rng.choice((0, 1, 2, 3, 4, 40)))]
        case 7:
            return {rng.choice(TEXTS): _part(rng, depth - 1) for _ in range(rng.choice((0, 1, 2, 5)))}
        case 8:
            named = [rng.choice(NAMES + EVIL), _part(rng, depth - 1)]
            return Ext(rng.choice((32, 33, 34, 35, 36, 37)), pack(named))
        case 9:
            return Ext(rng.choice((38, 39)), pack([rng.choice(TEXTS), *(_part(rng, 0) for _ in range(rng.randrange(6)))]))
        case _:
            return Ext(
                rng.choice([0, *(kind.code for kind in KINDS.values()), rng.randrange(-128, 128)]), pack(_part(rng, depth - 1))
            )


def _bomb(rng: random.Random) -> bytes:
    """Small, and large if it is believed."""
    n = rng.choice((300, 3000, 30_000))
    big = b"\xff" * n
    return rng.choice(
        (
            lambda: b"\xdd" + n.to_bytes(4, "big") + rng.choice((b"\x90", b"\x80", b"\xc0")) * n,
            lambda: pack([Ext(KINDS[rng.choice(("set", "deque", "counter"))].code, pack([None] if n % 3 else []))] * (n // 10)),
            lambda: pack(Ext(KINDS["range"].code, pack([0, 2**63, 1]))),
            lambda: pack(Ext(KINDS["deque"].code, pack([2**62, *range(10)]))),
            lambda: pack(Ext(KINDS["fraction"].code, pack([Ext(1, pack(big + b"\1")), Ext(1, pack(b"\3" + big + b"\1"))]))),
            lambda: pack(Ext(KINDS["decimal"].code, pack("9" * n))),
            lambda: pack(Ext(KINDS["decimal"].code, pack("1E+" + "9" * 17))),
            lambda: pack(Ext(KINDS["int"].code, pack(big))),
            lambda: pack(Ext(KINDS["enum"].code, pack(["tests.support.samples:Bits", Ext(1, pack(big + b"\1"))]))),
            lambda: pack(Ext(KINDS["ndarray"].code, pack(["<f8", "C", True, b"", 2**40]))),
            lambda: pack(Ext(KINDS["ndarray"].code, pack(["|V999999999", "C", True, b"", 0, *[2**40] * 60]))),
            lambda: pack(Ext(KINDS["ndarray"].code, pack(["{" * n, "C", True, b"", 1]))),
            lambda: pack([Ext(KINDS["pydantic"].code, pack([f"{NAMES[16]}[{k}]", {}])) for k in range(n // 20)]),
            lambda: pack([Ext(KINDS["enum"].code, pack(["tests.support.samples:Bits", k])) for k in range(n // 10)]),
            lambda: pack(Ext(KINDS["zoneinfo"].code, pack("a/" * (n // 2)))),
        )
    )()


def _forged(rng: random.Random, packed: chunks.Packed) -> tuple[bytes, bytes, dict[bytes, Obj], int]:
    """A packed state with parts of it changed, and all names made to fit again, as somebody would who knows how it is done."""
    root, refs, objects = packed.data, packed.refs, {obj.name: obj for obj in packed.new}
    size = rng.choice((packed.size, packed.size, 0, -1, 2**62))
    for _ in range(rng.choice((1, 1, 2))):
        kind = rng.randrange(6) if objects else rng.randrange(2)
        if kind == 0:
            root = _bytes(rng, root)
        elif kind == 1:
            refs = _refs(rng, refs, list(objects))
        elif kind == 2:
            objects.pop(rng.choice(list(objects)))
        else:
            old = rng.choice(list(objects.values()))
            data = _bytes(rng, old.data) if kind < 5 else _kindly(rng, old.data)
            refs = _rename(objects, refs, old, data, old.refs if rng.random() < 0.6 else _refs(rng, old.refs, list(objects)))
    return root, refs, objects, size


def _refs(rng: random.Random, refs: bytes, names: list[bytes]) -> bytes:
    parts = [refs[i : i + 16] for i in range(0, len(refs), 16)]
    match rng.randrange(5):
        case 0:
            return refs[: rng.randrange(len(refs) + 1)]
        case 1 if names:
            return refs + rng.choice(names) * rng.choice((1, 3, 1000))
        case 2 if parts:
            return rng.choice(parts) * len(parts)
        case 3 if names and parts:
            parts[rng.randrange(len(parts))] = rng.choice(names)
            return b"".join(parts)
        case _:
            rng.shuffle(parts)
            return b"".join(parts)


def _kindly(rng: random.Random, data: bytes) -> bytes:
    """Changed where lists and pages count."""
    numbers = [rng.choice((0, 1, 2, 31, -1, 2**40, 2**63 - 1)) for _ in range(3)]
    return rng.choice(
        (
            b"r" + pack([numbers[0], numbers[1], rng.choice(([], [1], [0, 1], [0] * 5000, [1] * 70, [numbers[2]])), []]),
            b"i" + pack(numbers),
            b"l" + pack([numbers[0], []]),
            rng.choice((b"v", b"r", b"i", b"l", b"x", b"")) + data[1:],
        )
    )


def _rename(objects: dict[bytes, Obj], refs: bytes, old: Obj, data: bytes, new_refs: bytes) -> bytes:
    """Put an object in another's place, and let all that refers to it refer to the new one. Returns the root's references."""
    todo = [(old.name, Obj(name_of(new_refs, data), new_refs, data))]
    seen: set[bytes] = set()
    while todo and len(seen) < 100:  # what refers to itself would go on for ever
        before, after = todo.pop()
        if before in seen:
            continue
        seen.add(before)
        objects[after.name] = after
        refs = _replaced(refs, before, after.name)
        for obj in [obj for obj in objects.values() if before in obj.refs]:
            fixed = _replaced(obj.refs, before, after.name)
            todo.append((obj.name, Obj(name_of(fixed, obj.data), fixed, obj.data)))
    return refs


def _replaced(refs: bytes, old: bytes, new: bytes) -> bytes:
    return b"".join(new if refs[i : i + 16] == old else refs[i : i + 16] for i in range(0, len(refs), 16))


def _laughs(rng: random.Random) -> tuple[bytes, bytes, dict[bytes, Obj], int]:
    """Objects that refer to each other many times over: a few kilobytes that stand for more than any memory."""
    levels, wide = rng.choice(((9, 20), (30, 2), (60, 100), (3000, 1), (4, 1000)))
    objects: dict[bytes, Obj] = {}
    as_pages = rng.random() < 0.5
    data = b"l" + pack([0, []]) if as_pages else b"v" + pack("x" * 60)
    below = Obj(name_of(b"", data), b"", data)
    for level in range(1, levels):
        objects[below.name] = below
        refs = below.name * wide
        if as_pages:
            data = b"i" + pack([level, 0, 0])
        else:
            data = b"v" + pack({str(i): Ext(0, pack(i)) for i in range(wide)})
        below = Obj(name_of(refs, data), refs, data)
    objects[below.name] = below
    if as_pages:
        data = b"r" + pack([0, 0, [wide] + [0] * (levels - 1), []])
        top = Obj(name_of(below.name * wide, data), below.name * wide, data)
        objects[top.name] = top
        below = top
    root = pack({"messages": Ext(0, pack(0)), "agent_state": None, "metadata": {}, "step": 0, "turns": [], "finished": False})
    return root, below.name, objects, rng.choice((500, 5000, 100_000))


def _tree(rng: random.Random, tree: Any) -> Any:
    """JSON with some of its parts changed."""
    if rng.random() < 0.03:
        return rng.choice((None, 5, "x", [], {}, {"$type": "tuple", "value": 5}, {"$bytes": 5}, {"$float": "x"}, {"$int": "z"}, {"$str": "\\q"},
                           {"$str": "\\N{DIGIT ONE}"}, {"$dict": [[1, 2], []]}, {"$lost": "x"}, {"$type": [], "value": 1}, 10**700))  # fmt: skip
    if isinstance(tree, list):
        return [_tree(rng, item) for item in tree] * rng.choice((1, 1, 1, 1, 2))
    if isinstance(tree, dict):
        return {
            rng.choice(("$type", "class", "value", "$bytes", key)) if rng.random() < 0.03 else key: _tree(rng, item)
            for key, item in tree.items()
        }
    return tree


# -- what reads it


def _value(rng: random.Random) -> tuple[int, list[Callable[[], Any]]]:
    data = rng.choice(
        (lambda: _bytes(rng, rng.choice(VALUES)), lambda: pack(_part(rng)), lambda: _bomb(rng), lambda: rng.randbytes(30))
    )()

    def there_and_back() -> None:
        encode(decode(data, REGISTRY, path="state", refs=[1, (2,)].__getitem__), REGISTRY)

    def plainly() -> None:
        tree = decode_plain(data, refs=str)
        json.dumps(to_json(tree), allow_nan=False)
        assert encode_tree(from_json(to_json(tree))) == encode_tree(tree)

    return len(data), [there_and_back, plainly]


def _json(rng: random.Random) -> tuple[int, list[Callable[[], Any]]]:
    data = _tree(rng, to_json(decode_plain(rng.choice(VALUES))))

    def back() -> None:
        try:
            encode_tree(from_json(data))
        except UsageError:  # of a tree that a person might have written
            pass

    return len(json.dumps(data)) * 4, [back]


def _chunks(rng: random.Random) -> tuple[int, list[Callable[[], Any]]]:
    root, refs, objects, size = _laughs(rng) if rng.random() < 0.15 else _forged(rng, rng.choice(PACKED))
    row = CheckpointRow(
        id="x", step=0, kind="step", label=None, created_at=0, format=states.FORMAT, schema=1, size=size, seq=1,
        digest=chunks.root_digest(root, refs), metadata=b"", metrics=b"", root=root, refs=refs,
    ).sealed("fuzz")  # fmt: skip

    def state(schema: int) -> Callable[[], Any]:
        return lambda: states.unpack_state("fuzz", row, objects, REGISTRY, schema=schema, migrations={1: lambda tree: tree})

    def salvage() -> None:
        tree, _ = salvaged(root, refs, objects, 0)
        json.dumps(to_json(tree), allow_nan=False)

    held = len(root) + len(refs) + sum(len(o.data) + len(o.refs) for o in objects.values())
    # A state may be as large as it says, up to what its objects could be said to hold.
    told = held + min(max(size, 0), 8 * held)
    return told, [
        state(1),
        state(2),
        salvage,
        lambda: chunks.unpack_plain(root, refs, objects, size=size if size < 2**40 else held),
    ]


def _rows(rng: random.Random) -> tuple[int, list[Callable[[], Any]]]:
    some = rng.choice(
        (lambda: _bytes(rng, pack([1, 2, {"a": b"x"}])), lambda: pack(_part(rng)), lambda: _bytes(rng, rng.choice(VALUES)))
    )
    row = CheckpointRow(
        id="x", step=0, kind="step", label=None, created_at=rng.choice(NUMBERS), format=states.FORMAT, schema=1, size=1, seq=1,
        digest=b"d" * 16, metadata=some(), metrics=some(), root=b"\x80", refs=b"",
    )  # fmt: skip
    call = CallRow(
        line=1, step=0, scope=2, ident=b"i" * 16, tool="t", effect="write", call_id=None, idempotency_key="k", op_key=b"k" * 16,
        status="succeeded", fence=1, base_seq=1, started_at=5, args=CALLS.data, args_refs=CALLS.refs,
        policy=b"", error=None, model=None,
    )  # fmt: skip
    objects = {obj.name: obj for obj in CALLS.new}
    field = rng.choice(("args", "args_refs", "policy", "error", "model", "result"))
    call = replace(
        call, **{field: _bytes(rng, getattr(call, field) or b"\x81\xa6result\x01") if rng.random() < 0.5 else some()}
    )

    def header() -> None:
        states.header("t", row, REGISTRY)  # never raises

    def read(registry: Registry | None) -> Callable[[], Any]:
        return lambda: states.call("t", call, objects, registry)

    return len(row.metadata) + len(row.metrics) + len(CALLS.data) + 10_000, [header, read(None), read(REGISTRY)]


TARGETS: Sequence[Callable[[random.Random], tuple[int, list[Callable[[], Any]]]]] = (
    _value,
    _value,
    _json,
    _chunks,
    _chunks,
    _rows,
)


def one_round(seed: int, *, memory: bool = False) -> int:
    """One forged input, given to all that may read it. Returns its size.

    Raises:
        Finding: With what happened that should not have.
    """
    rng = random.Random(seed)
    target = rng.choice(TARGETS)
    size, readers = target(rng)
    for number, reader in enumerate(readers):
        where = f"seed {seed}: {target.__name__.lstrip('_')}, reader {number}, {size} bytes"
        if memory:
            tracemalloc.start()
        began = time.process_time()
        try:
            reader()
        except ALLOWED:
            pass
        except Finding:
            raise
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            raise Finding(f"{where}: {type(error).__name__}: {str(error)[:300]}") from error
        finally:
            peak = 0
            if memory:
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
        took = time.process_time() - began
        if took > SECONDS and not memory:  # (being watched takes several times as long)
            raise Finding(f"{where}: it took {took:.1f} s")
        if peak > MULTIPLE * size + SLACK:
            raise Finding(f"{where}: it took {peak >> 10} KiB of memory, {peak / size:.0f} times its size")
    return size


def main() -> int:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 300.0
    given = os.environ.get("FUZZ_SEED")
    seed = int(given) if given else int.from_bytes(os.urandom(6), "big")
    print(f"fuzzing the decoder for {seconds:.0f} s from FUZZ_SEED={seed}", flush=True)
    _MAP.decode(b"\x80")
    rounds, held, end = 0, 0, time.monotonic() + seconds
    with NoImports():
        while time.monotonic() < end:
            try:
                held += one_round(seed + rounds, memory=rounds % 8 == 0 or bool(given and not rounds))
            except Finding as found:
                print(f"FUZZ_SEED={seed + rounds} make fuzz\n{found}", flush=True)
                raise
            rounds += 1
    print(f"{rounds} inputs, {held >> 20} MiB: a value or a typed error, each time")
    return 0


if __name__ == "__main__":
    sys.exit(main())

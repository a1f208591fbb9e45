"""What packing costs, on time and bytes: the figures behind the constants in ``safepoint.codec.nodes``.

python bench/chunks.py
"""

import marshal
import time
from collections.abc import Callable
from typing import Any

from safepoint.codec.chunks import Packed, pack, unpack
from safepoint.codec.nodes import Tree
from safepoint.codec.registry import Registry
from safepoint.model import Obj

REGISTRY = Registry()
REST = {"agent_state": {"phase": "plan", "n": 1}, "metadata": {"a": "b"}, "step": 0, "turns": [["a", 1, 2]], "finished": False}


def message(i: int) -> dict[str, Any]:
    role = "user" if i % 2 else "assistant"
    return {"role": role, "content": (f"message {i} " + "lorem ipsum dolor " * 60)[:960], "id": f"m{i}"}


def best(f: Callable[[], object], n: int) -> str:
    """The quickest of n, in ms."""
    times: list[float] = []
    for _ in range(n):
        start = time.perf_counter()
        kept = f()
        times.append(time.perf_counter() - start)
        del kept
    return f"{min(times) * 1e3:8.3f} ms"


def tree_of(packed: Packed) -> Tree:
    tree = packed._kids["messages"]
    assert isinstance(tree, Tree)
    return tree


def speed(n: int) -> None:
    value = {"messages": [message(i) for i in range(n)], **REST}
    packed = pack(value, REGISTRY)
    store = {o.name: o for o in packed.new}
    more = {**value, "messages": [*value["messages"], message(n)]}  # type: ignore[misc]
    tree = tree_of(packed)
    xs: Any = value["messages"]

    def compare() -> None:
        at = 0
        for page in tree.leaves:
            marshal.dumps(xs[at : at + page.n], 4) == page.mark  # noqa: B015
            at += page.n

    print(f"{n} messages of 1 KB")
    print("  marshal and compare alone ", best(compare, 200))
    print("  pack, nothing changed     ", best(lambda: pack(value, REGISTRY, base=packed), 200))
    print("  pack, one appended        ", best(lambda: pack(more, REGISTRY, base=packed), 200))
    print("  pack from scratch         ", best(lambda: pack(value, REGISTRY), 10))
    print("  unpack                    ", best(lambda: unpack(packed.data, packed.refs, store, REGISTRY), 10))
    loaded = unpack(packed.data, packed.refs, store, REGISTRY)[1]
    print("  first pack after a load   ", best(lambda: pack(value, REGISTRY, base=loaded), 5))


def saves(n: int, window: int | None = None) -> None:
    value: dict[str, Any] = {"messages": [], **REST}
    store: dict[bytes, Obj] = {}
    base = None
    roots = written = 0
    for i in range(n):
        value["messages"] = [*value["messages"], message(i)][-(window or n) :]
        value["step"] = i
        base = pack(value, REGISTRY, base=base)
        store.update((o.name, o) for o in base.new)
        written += len(base.new)
        roots += len(base.data) + len(base.refs)
    assert base is not None
    objects = sum(len(o.name) + len(o.refs) + len(o.data) for o in store.values())
    root = tree_of(base).root
    print(f"{n} saves of +1 KB, all kept" + (f", window of {window}" if window else ""))
    print(f"  objects {objects:,} B in {len(store)}, roots {roots:,} B; list root now {len(root.data) + len(root.refs)} B")
    print(f"  {(objects + roots) / (n * 1000):.2f} x what was added; {written / n:.2f} objects a save")


if __name__ == "__main__":
    for count in (200, 2_000):
        speed(count)
    saves(2_000)
    saves(2_000, window=500)

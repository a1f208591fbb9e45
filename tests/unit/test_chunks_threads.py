"""Packing on several threads at once: what one of them writes, any other process can read."""

import sys
import threading
from typing import Any

from safepoint.codec import chunks, nodes
from safepoint.codec.registry import Registry


def test_the_codes_of_references_do_not_shift_when_threads_ask_at_once(monkeypatch):
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(30):
            monkeypatch.setattr(nodes, "_ref_codes", type(nodes._ref_codes)())
            gate = threading.Barrier(8)
            wrong: list[int] = []

            def ask(gate=gate, wrong=wrong):
                gate.wait()
                wrong.extend(i for i in range(200) if nodes.ref_code(i) != nodes._encode(nodes.ref(i)))

            threads = [threading.Thread(target=ask) for _ in range(8)]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
            assert wrong == []
    finally:
        sys.setswitchinterval(before)


def test_states_packed_at_once_are_read_back(monkeypatch):
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    registry = Registry()
    packed: dict[int, Any] = {}

    def pack(n):
        gate.wait()
        tree = {"messages": [{"role": "user", "content": f"{n} {i} " + "x" * 300} for i in range(100)]}
        packed[n] = tree, chunks.pack(tree, registry)

    try:
        for _ in range(5):
            monkeypatch.setattr(nodes, "_ref_codes", type(nodes._ref_codes)())
            gate = threading.Barrier(6)
            threads = [threading.Thread(target=pack, args=(n,)) for n in range(6)]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
            monkeypatch.setattr(nodes, "_ref_codes", type(nodes._ref_codes)())  # as in another process
            for tree, p in packed.values():
                objects = {o.name: o for o in p.new}
                assert chunks.unpack(p.data, p.refs, objects, registry)[0] == tree
    finally:
        sys.setswitchinterval(before)

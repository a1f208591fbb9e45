"""What safepoint costs, as ratios measured in one run: against the floor (one durable insert) and against LangGraph's SqliteSaver.

    make bench                 prints the table
    make bench BENCH_ARGS=--write      also writes docs/benchmarks.md

Rounds of all candidates are interleaved, so that a noisy moment hits all of them, and medians are compared. Files lie in a new
folder on the disk of the checkout (a memory file system would make every commit free).
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw

import safepoint
from safepoint import Retention, State

ROOT = Path(__file__).resolve().parent.parent
Row = tuple[str, str, str, str]


def message(n: int) -> dict[str, str]:
    return {"role": "user" if n % 2 else "assistant", "content": os.urandom(485).hex()}


def timed(fn: Callable[[], Any]) -> float:
    began = time.perf_counter()
    fn()
    return (time.perf_counter() - began) * 1e3


class Floor:
    """One durable insert of as many new bytes, with the settings that safepoint uses."""

    def __init__(self, folder: Path) -> None:
        self.db = apsw.Connection(str(folder / "floor.db"))
        for pragma in ("page_size=8192", "journal_mode=WAL", "synchronous=FULL"):
            self.db.execute(f"PRAGMA {pragma}").fetchall()
        self.db.execute("CREATE TABLE IF NOT EXISTS t (k INTEGER PRIMARY KEY, data BLOB)")

    def insert(self, size: int) -> None:
        self.db.execute("INSERT INTO t (data) VALUES (?)", (os.urandom(size),))


class Ours:
    def __init__(self, folder: Path, messages: int) -> None:
        self.path = folder / "ours.db"
        self.cp = safepoint.open(f"sqlite:///{self.path}", retention=Retention.keep_all())
        self.state = State("bench", messages=[message(n) for n in range(messages)])
        self.cp.save(self.state)

    def save(self) -> None:
        self.state.messages.append(message(len(self.state.messages)))
        self.state.step += 1
        self.cp.save(self.state)

    def shrink(self) -> None:
        """Back to the history's length, so that all rounds measure the same."""
        self.state.messages.pop()
        self.cp.save(self.state)

    def load(self) -> None:
        self.cp.load_latest("bench")


class Peer:
    """LangGraph's SqliteSaver with the same history in one list channel."""

    def __init__(self, folder: Path, messages: int) -> None:
        import sqlite3

        from langgraph.checkpoint.base import empty_checkpoint
        from langgraph.checkpoint.sqlite import SqliteSaver

        self.path = folder / "peer.db"
        self.db = sqlite3.connect(self.path, check_same_thread=False)
        self.saver = SqliteSaver(self.db)
        self.saver.setup()
        self.messages = [message(n) for n in range(messages)]
        self.empty = empty_checkpoint
        self.config: Any = {"configurable": {"thread_id": "bench", "checkpoint_ns": ""}}
        self.n = 0
        self.save()

    def save(self) -> None:
        self.messages.append(message(len(self.messages)))
        self.n += 1
        checkpoint = self.empty()
        checkpoint["channel_values"] = {"messages": self.messages}
        checkpoint["channel_versions"] = {"messages": self.n}
        self.config = self.saver.put(
            self.config, checkpoint, {"source": "loop", "step": self.n, "parents": {}}, {"messages": self.n}
        )

    def load(self) -> None:
        self.saver.get_tuple({"configurable": {"thread_id": "bench", "checkpoint_ns": ""}})


def percentile(values: list[float], p: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * p))]


def saves(folder: Path, messages: int, rounds: int, with_peer: bool) -> list[Row]:
    place = folder / f"saves-{messages}"
    place.mkdir()
    floor, ours = Floor(place), Ours(place, messages)
    peer = Peer(place, messages) if with_peer else None
    written = measure_written(ours)
    a: list[float] = []
    b: list[float] = []
    c: list[float] = []
    la: list[float] = []
    lc: list[float] = []
    for n in range(rounds):
        a.append(timed(ours.save))
        ours.shrink()
        b.append(timed(lambda: floor.insert(written)))
        if peer is not None and n % 4 == 0:
            c.append(timed(peer.save))
            peer.messages.pop()
        if n % 8 == 0:
            la.append(timed(ours.load))
            if peer is not None:
                lc.append(timed(peer.load))
    save, base = statistics.median(a), statistics.median(b)
    aims = {10: "", 200: "<= 1.5", 2000: "<= 3"}
    rows = [
        (
            f"save, {messages:,} messages",
            f"{save:.2f} ms",
            f"{save / base:.2f} x floor ({base:.2f} ms, {written} bytes)",
            aims[messages],
        ),
        (
            f"save, {messages:,} messages, p99",
            f"{percentile(a, 0.99):.2f} ms",
            f"{percentile(a, 0.99) / save:.1f} x its median",
            "<= 5",
        ),
    ]
    load = statistics.median(la)
    if peer is not None:
        put, get = statistics.median(c), statistics.median(lc)
        rows.append(
            (
                f"save against SqliteSaver, {messages:,}",
                f"{put:.2f} ms",
                f"{put / save:.1f} x faster",
                ">= 12" if messages == 2000 else "",
            )
        )
        rows.append(
            (
                f"load, {messages:,} messages",
                f"{load:.2f} ms",
                f"{get / load:.1f} x faster than SqliteSaver ({get:.2f} ms)",
                ">= 2",
            )
        )
    else:
        rows.append((f"load, {messages:,} messages", f"{load:.2f} ms", "", ""))
    ours.cp.close()
    return rows


def measure_written(ours: Ours) -> int:
    """Bytes that a save adds, as the library's own log would say, checked against nothing: it only sizes the floor's insert."""
    sizes: list[int] = []
    commit = ours.cp.store.commit
    try:
        ours.cp.store.commit = lambda c: note(commit(c), sizes)  # type: ignore[method-assign, assignment]
        for _ in range(20):
            ours.save()
    finally:
        ours.cp.store.commit = commit  # type: ignore[method-assign]
    return int(statistics.median(sizes))


def note(done: Any, sizes: list[int]) -> Any:
    sizes.append(done.bytes_written)
    return done


def headers(folder: Path, rounds: int) -> list[Row]:
    place = folder / "headers"
    place.mkdir()
    ours = Ours(place, 1)
    for _ in range(2000):
        ours.save()
    ours.cp.close()
    cp = safepoint.open(f"sqlite:///{ours.path}")
    cp.list_checkpoints("bench", limit=10)
    t = statistics.median(timed(lambda: cp.list_checkpoints("bench", limit=10)) for _ in range(rounds))
    cp.close()
    size = ours.path.stat().st_size
    state = 2001 * 1000
    return [
        ("10 headers of 2,000 checkpoints", f"{t:.2f} ms", "", "<= 1 ms"),
        (
            "2,000 saves of one more 1 KB message, all kept",
            f"{size / 1e6:.1f} MB",
            f"{size / state:.2f} x the final state",
            "<= 2.5",
        ),
    ]


def verified(folder: Path, messages: int, size: int) -> list[Row]:
    """How fast a store of one growing history is verified."""
    place = folder / f"verify-{size}"
    place.mkdir()
    cp = safepoint.open(f"sqlite:///{place}/agent.db", retention=Retention.keep_all(), durability="process")
    state = State("bench")
    for n in range(messages):
        state.messages.append({"role": "user", "content": os.urandom(size // 2).hex()})
        state.step = n
        cp.save(state)
    found = [cp.verify() for _ in range(5)]
    cp.close()
    assert all(f.ok for f in found)
    best = statistics.median(f.bytes / 1e6 / f.seconds for f in found)
    items = statistics.median(1e6 * f.seconds / (f.objects + f.checkpoints) for f in found)
    what = f"verify, {messages:,} saves of one more {size // 1000} KB message"
    return [(what, f"{best:.0f} MB/s", f"{items:.0f} us a row or object", ">= 200 MB/s")]


def calls(folder: Path, rounds: int) -> list[Row]:
    place = folder / "calls"
    place.mkdir()
    floor = Floor(place)

    @safepoint.tool(effect="idempotent", name="bench.noop")
    def noop(n: int) -> str:
        return "ok"

    def twice() -> None:
        floor.insert(400)
        floor.insert(400)

    cp = safepoint.open(f"sqlite:///{place / 'calls.db'}")
    a: list[float] = []
    b: list[float] = []
    with cp.resume("calls") as run:
        for n in range(rounds):
            a.append(timed(lambda n=n: run.call(noop, n)))  # type: ignore[misc]
            b.append(timed(twice))
            if n % 20 == 19:
                run.save()
    cp.close()
    call, two = statistics.median(a), statistics.median(b)
    return [
        (
            "journaled call (durable intent, durable result)",
            f"{call:.2f} ms",
            f"{call / two:.2f} x two durable inserts ({two:.2f} ms)",
            "<= 1.5",
        )
    ]


def starts(rounds: int) -> list[Row]:
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED")}

    def run(*args: str) -> float:
        return timed(lambda: subprocess.run([sys.executable, *args], env=env, stdout=subprocess.DEVNULL, check=True))

    run("-c", "import safepoint")
    run("-m", "safepoint", "--help")
    bare: list[float] = []
    with_us: list[float] = []
    cli: list[float] = []
    for _ in range(rounds):
        bare.append(run("-c", "pass"))
        with_us.append(run("-c", "import safepoint"))
        cli.append(run("-m", "safepoint", "--help"))
    plain = statistics.median(bare)
    return [
        (
            "import safepoint, over bare Python",
            f"{statistics.median(with_us) - plain:.0f} ms",
            f"bare: {plain:.0f} ms",
            "<= 60 ms",
        ),
        ("safepoint --help", f"{statistics.median(cli):.0f} ms", "", "<= 200 ms"),
    ]


def retention(folder: Path, keep: int, messages: int = 2000) -> list[Row]:
    """What retention adds to saves, its sweeps spread over all of them, as one message is added by each."""
    place = folder / f"retention-{keep}"
    place.mkdir()
    cp = safepoint.open(f"sqlite:///{place / 'kept.db'}", retention=Retention(keep_latest=keep))
    state = State("bench", messages=[message(n) for n in range(messages)])
    cp.save(state)
    spent = [0.0]
    retain = cp._retain

    def timed_retain(task: str, seq: int) -> None:
        spent[0] += timed(lambda: retain(task, seq))

    cp._retain = timed_retain  # type: ignore[method-assign, assignment]
    every = []
    for n in range(900):
        state.messages.append(message(n))
        state.step += 1
        every.append(timed(lambda: cp.save(state)))
    kept = len(cp.list_checkpoints("bench"))
    cp.close()
    save = sum(every) - spent[0]
    return [
        (
            f"retention at save time, {messages:,} messages, keep_latest={keep}",
            f"{spent[0] / len(every) * 1e3:.0f} us a save",
            f"{spent[0] / save:.1%} of a save ({save / len(every):.2f} ms), the longest {max(every):.0f} ms; {kept} kept at the end",
            "<= 15 %",
        )
    ]


def peer_disk(folder: Path, steps: int) -> list[Row]:
    place = folder / "disk"
    place.mkdir()
    peer = Peer(place, 0)
    ours = Ours(place, 0)
    for _ in range(steps):
        peer.save()
        ours.save()
    ours.cp.close()
    peer.db.close()
    p, o = peer.path.stat().st_size, ours.path.stat().st_size
    return [
        (
            f"disk after {steps:,} saves, against SqliteSaver",
            f"{o / 1e6:.1f} MB",
            f"{p / o:.0f} x smaller ({p / 1e6:.0f} MB)",
            "",
        )
    ]


def table(rows: list[Row]) -> str:
    lines = ["| what | measured | ratio | aim |", "|---|---|---|---|"]
    return "\n".join(lines + ["| " + " | ".join(r) + " |" for r in rows])


PAGE = """# Benchmarks

Made by `make bench` in one run; rounds of all candidates are interleaved, and medians are compared. Ratios carry over to other
machines, milliseconds do not. The *floor* is one durable insert of as many bytes as the save adds, through the same driver with
the same settings. The peer is LangGraph's `SqliteSaver` with the same history of 1 KB messages. On servers (fsync on, AOF always, over a
unix socket or loopback) the floor is a bare autocommit INSERT or a bare SET, and the peers are LangGraph's `PostgresSaver` and
`AsyncPostgresSaver`, and steps of DBOS that do nothing.

{table}

Python {python}, apsw {apsw}, {cores} cores, {rounds} rounds.

## LangGraph

`bench/graphs.py`: our saver and LangGraph's own, with a graph that appends a message a superstep, and threads of 10, 200 and 2,000 of
LangChain's message objects. Each round puts, gets and lists, so that a put comes after a get, as in the first superstep of a run.

{graphs}

## What is not reached, and why

- **A save against the floor.** The floor writes one or two pages of 8 KB; a save writes seven: task, branch, checkpoint and its id,
  objects and their index. Each costs some 15 us of copying, checksum and system calls before the same one fsync. In all about
  0.1 ms of a save is spent in Python, and at 2,000 messages another 0.3 ms in comparing the history with what was saved before.
- **Against SqliteSaver** small histories are even: it writes one row, whole, each time. What that costs shows as the history grows.
- **A load** reads each message as an object of its own, checks its digest and the row's seal, and makes values whose types are
  known to be right; the peer decodes one blob and checks nothing. It happens once a start, after which saves are incremental.
- **verify** hashes at the speed of SHA-256 (over 1 GB/s here), and pays some 10 us of Python for each row and object besides: seal,
  references, bookkeeping. So a store of 1 KB messages is bound by their number, and reaches 80 to 100 MB/s. From some 10 KB an object
  on it is bound by SQLite's pages. The head of each branch is read a second time, to decode it whole: where the head is most of the
  store, as in these rows, that is a good third of the time.
- **PostgreSQL against a bare INSERT.** A save is one request; the server spends some 0.2 ms more in its function, which locks the task and
  compares, than on one row, and the client some 0.3 ms in Python, as on SQLite. At 2,000 messages the comparison with what was saved
  before comes on top. **Redis** likewise: one script, 0.06 ms more on the server, the rest is Python.
- **A journaled call against a DBOS step** writes twice durably, an intent before and the result after, where DBOS writes the result: what is
  compared is not the same promise, and two flushes of the disk cannot be a fifth of one.
- **LangGraph, put and get.** A put looks at every message of an unchanged history, to see changes in place: some 1.5 us each, for a plain form
  and its fingerprint; the peer encodes and writes them all. A get checks the digest of each object and makes each message, as the peer does,
  from 2,000 rows instead of one. Small threads are even, as a put is one commit with more rows than the peer's.
- **LangGraph, disk on PostgreSQL.** A row there has 24 bytes of header, and each index entry 8 more than on SQLite.
- **Import.** asyncio, importlib.metadata, click and rich are imported only where they are used; what is left is mostly the
  standard library's dataclasses, inspect, typing and decimal, and some thirty small classes.
"""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--no-servers", action="store_true", help="without PostgreSQL, Redis and DBOS")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix=".bench-", dir=ROOT))
    rows: list[Row] = []
    try:
        for messages in (10, 200, 2000):
            rows += saves(folder, messages, args.rounds, not args.no_peer)
        rows += headers(folder, 50)
        if not args.no_peer:
            rows += peer_disk(folder, 500)
        rows += calls(folder, args.rounds)
        rows += retention(folder, 20)
        rows += retention(folder, 100)
        rows += verified(folder, 2000, 1000)
        rows += verified(folder, 1000, 64_000)
        rows += starts(11)
        if not args.no_servers:
            sys.path.insert(0, str(ROOT))
            from bench import graphs, servers

            rows += servers.rows(folder, args.rounds)
            rows += graphs.rows(folder, args.rounds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    text = table(rows)
    print(text)
    if args.write:
        mine = [row for row in rows if not row[0].startswith("LangGraph on ")]
        page = PAGE.format(
            graphs=table([row for row in rows if row not in mine]),
            table=table(mine),
            python=platform.python_version(),
            apsw=apsw.apsw_version(),
            cores=os.cpu_count(),
            rounds=args.rounds,
        )
        (ROOT / "docs" / "benchmarks.md").write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

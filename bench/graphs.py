"""What the LangGraph saver costs, against LangGraph's own SqliteSaver and PostgresSaver, with and without a DeltaChannel.

Called by bench/run.py. Each saver's graph appends one message a superstep; messages are LangChain's own objects of about 1.2 KB.
"""

from __future__ import annotations

import os
import sqlite3
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import apsw
import psycopg
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, ToolMessage
from langgraph.channels import DeltaChannel
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from psycopg.rows import dict_row
from typing_extensions import TypedDict

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from safepoint.adapters.langgraph import SafepointSaver  # noqa: E402
from tests.support.servers import Postgres  # noqa: E402

Row = tuple[str, str, str, str]


def message(n: int) -> AnyMessage:
    text = os.urandom(485).hex()
    if n % 3 == 0:
        return HumanMessage(content=text, id=f"m{n}")
    if n % 3 == 1:
        call = {"name": "search", "args": {"query": text[:60]}, "id": f"call_{n}", "type": "tool_call"}
        return AIMessage(content=text, id=f"m{n}", tool_calls=[call])
    return ToolMessage(content=text, id=f"m{n}", tool_call_id=f"call_{n - 1}", name="search")


def timed(fn: Callable[[], Any]) -> float:
    began = time.perf_counter()
    fn()
    return (time.perf_counter() - began) * 1e3


class Whole(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]


def extended(there: list[Any], writes: Sequence[list[Any]]) -> list[Any]:
    return [*there, *(item for write in writes for item in write)]


class Deltas(TypedDict):
    messages: Annotated[list[AnyMessage], DeltaChannel(extended)]


def appended(saver: Any, schema: type, steps: int) -> float:
    """Run a graph that appends one message in each of ``steps`` supersteps; seconds."""
    count = [0]

    def grow(state: Any) -> dict[str, Any]:
        count[0] += 1
        return {"messages": [message(count[0])]}

    graph = (
        StateGraph(schema)
        .add_node("grow", grow)
        .add_edge(START, "grow")
        .add_conditional_edges("grow", lambda _: "grow" if count[0] < steps else END)
        .compile(checkpointer=saver)
    )
    began = time.perf_counter()
    graph.invoke({"messages": []}, {"configurable": {"thread_id": "bench"}, "recursion_limit": steps + 5})
    return time.perf_counter() - began


def sqlite_saver(path: Path) -> SqliteSaver:
    saver = SqliteSaver(sqlite3.connect(path, check_same_thread=False))
    saver.setup()
    return saver


def postgres_saver(url: str) -> PostgresSaver:
    conn: Any = psycopg.connect(url, autocommit=True, prepare_threshold=0, row_factory=dict_row)
    saver = PostgresSaver(conn)
    saver.setup()
    return saver


def new_url(server: Postgres) -> str:
    """A database of its own."""
    name = f"bench_{os.urandom(4).hex()}"
    with psycopg.connect(server.url, autocommit=True) as conn:
        conn.execute(f"CREATE DATABASE {name}")
    return urlsplit(server.url)._replace(path=f"/{name}").geturl()


def database_size(url: str) -> int:
    with psycopg.connect(url, autocommit=True) as conn:
        found = conn.execute(
            "SELECT sum(pg_total_relation_size(c.oid)) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
            "WHERE c.relkind = 'r' AND n.nspname NOT LIKE 'pg\\_%' AND n.nspname <> 'information_schema'"
        ).fetchone()
    assert found is not None
    return int(found[0])


def file_size(path: Path) -> int:
    conn = apsw.Connection(str(path))
    conn.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    conn.close()
    return path.stat().st_size


def on_sqlite(folder: Path, steps: int) -> list[Row]:
    sizes: dict[str, int] = {}
    seconds: dict[str, float] = {}
    for name, schema in (("plain", Whole), ("delta", Deltas)):
        path = folder / f"peer-{name}.db"
        peer = sqlite_saver(path)
        seconds[f"peer {name}"] = appended(peer, schema, steps)
        peer.conn.close()
        sizes[f"peer {name}"] = file_size(path)
        path.unlink()
        path = folder / f"ours-{name}.db"
        with SafepointSaver(f"sqlite:///{path}") as ours:
            seconds[f"ours {name}"] = appended(ours, schema, steps)
        sizes[f"ours {name}"] = file_size(path)
    return _disk("SQLite", "SqliteSaver", steps, sizes, seconds)


def on_postgres(server: Postgres, steps: int) -> list[Row]:
    sizes: dict[str, int] = {}
    seconds: dict[str, float] = {}
    for name, schema in (("plain", Whole), ("delta", Deltas)):
        url = new_url(server)
        peer = postgres_saver(url)
        seconds[f"peer {name}"] = appended(peer, schema, steps)
        peer.conn.close()
        sizes[f"peer {name}"] = database_size(url)
        url = new_url(server)
        with SafepointSaver(url) as ours:
            seconds[f"ours {name}"] = appended(ours, schema, steps)
        sizes[f"ours {name}"] = database_size(url)
    return _disk("PostgreSQL", "PostgresSaver", steps, sizes, seconds)


def _disk(store: str, peer: str, steps: int, sizes: dict[str, int], seconds: dict[str, float]) -> list[Row]:
    ours = sizes["ours plain"]
    return [
        (
            f"LangGraph on {store}: disk after {steps:,} appended messages",
            f"{ours / 1e6:.1f} MB",
            f"{sizes['peer plain'] / ours:.0f} x smaller than {peer} ({sizes['peer plain'] / 1e6:.0f} MB)",
            ">= 400",
        ),
        (
            f"LangGraph on {store}: the same against DeltaChannel",
            f"{ours / 1e6:.1f} MB",
            (
                f"{sizes['peer delta'] / ours:.1f} x smaller than {peer} with it ({sizes['peer delta'] / 1e6:.0f} MB); "
                f"ours with it {sizes['ours delta'] / 1e6:.1f} MB"
            ),
            ">= 4",
        ),
        (
            f"LangGraph on {store}: a superstep, {steps:,} of them",
            f"{seconds['ours plain'] / steps * 1e3:.2f} ms",
            (
                f"{peer} {seconds['peer plain'] / steps * 1e3:.2f} ms, with DeltaChannel {seconds['peer delta'] / steps * 1e3:.2f} "
                f"ms; ours with it {seconds['ours delta'] / steps * 1e3:.2f} ms"
            ),
            "",
        ),
    ]


class Thread:
    """One thread in a saver, put to by hand as a graph would."""

    def __init__(self, saver: Any, messages: int) -> None:
        self.saver = saver
        self.messages = [message(n) for n in range(messages)]
        self.config: Any = {"configurable": {"thread_id": "bench", "checkpoint_ns": ""}}
        self.asked: Any = {"configurable": {"thread_id": "bench", "checkpoint_ns": ""}}
        self.version: Any = None
        self.n = 0
        for _ in range(12):
            self.put()

    def put(self) -> None:
        self.n += 1
        self.messages = [*self.messages, message(self.n)]
        self.version = self.saver.get_next_version(self.version, None)
        checkpoint = empty_checkpoint()
        checkpoint["channel_values"] = {"messages": self.messages}
        checkpoint["channel_versions"] = {"messages": self.version}
        metadata: Any = {"source": "loop", "step": self.n, "parents": {}}
        self.config = self.saver.put(self.config, checkpoint, metadata, {"messages": self.version})

    def get(self) -> None:
        found = self.saver.get_tuple(self.asked)
        assert len(found.checkpoint["channel_values"]["messages"]) >= 12

    def ten(self) -> None:
        assert len(list(self.saver.list(self.asked, limit=10))) == 10

    def ten_read(self) -> None:
        for found in self.saver.list(self.asked, limit=10):
            assert found.checkpoint["channel_values"]["messages"]


def latencies(store: str, peer_name: str, make_ours: Callable[[], Any], make_peer: Callable[[], Any], rounds: int) -> list[Row]:
    rows: list[Row] = []
    for messages in (10, 200, 2000):
        ours, peer = Thread(make_ours(), messages), Thread(make_peer(), messages)
        verbs = ("put", "get", "ten", "ten_read")
        found: dict[tuple[str, str], list[float]] = {(who, verb): [] for who in ("ours", "peer") for verb in verbs}
        count = rounds if messages < 2000 else max(8, rounds // 6)
        for _ in range(count):
            for verb in verbs:
                for who, thread in (("ours", ours), ("peer", peer)):
                    if verb == "ten_read" and len(found[who, verb]) >= 8:
                        continue
                    found[who, verb].append(timed(getattr(thread, verb)))
        med = {key: statistics.median(values) for key, values in found.items()}
        aims = {"put": ">= 7", "get": ">= 3", "ten": ">= 300", "ten_read": ""} if messages == 2000 else {}
        names = {
            "put": "put",
            "get": "get",
            "ten": "list(limit=10), values unread",
            "ten_read": "list(limit=10), all values read",
        }
        for verb in verbs:
            mine, theirs = med["ours", verb], med["peer", verb]
            rows.append(
                (
                    f"LangGraph on {store}: {names[verb]}, {messages:,} messages",
                    f"{mine:.2f} ms",
                    f"{theirs / mine:.1f} x faster than {peer_name} ({theirs:.2f} ms)",
                    aims.get(verb, ""),
                )
            )
        ours.saver.close()
    return rows


def rows(folder: Path, rounds: int, steps: int = 2000) -> list[Row]:
    place = folder / "graphs"
    place.mkdir()
    count = iter(range(1000))
    found = latencies(
        "SQLite",
        "SqliteSaver",
        lambda: SafepointSaver(f"sqlite:///{place / f'{next(count)}.db'}"),
        lambda: sqlite_saver(place / f"peer-{next(count)}.db"),
        rounds,
    )
    found += on_sqlite(place, steps)
    server = Postgres(durable=True)
    try:
        found += latencies(
            "PostgreSQL",
            "PostgresSaver",
            lambda: SafepointSaver(new_url(server)),
            lambda: postgres_saver(new_url(server)),
            rounds,
        )
        found += on_postgres(server, steps)
    finally:
        server.close()
    return found


if __name__ == "__main__":
    import shutil
    import tempfile

    at = Path(tempfile.mkdtemp(prefix=".bench-", dir=ROOT))
    try:
        for row in rows(at, int(sys.argv[1]) if len(sys.argv) > 1 else 60, int(sys.argv[2]) if len(sys.argv) > 2 else 2000):
            print(" | ".join(row))
    finally:
        shutil.rmtree(at, ignore_errors=True)

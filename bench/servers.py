"""What the stores on servers cost, against a bare write on the same server and against LangGraph's savers and DBOS.

Servers are started here, with the settings that lose nothing: fsync on, AOF always. Called by bench/run.py.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import redis as client
from psycopg.rows import dict_row

import safepoint
from safepoint import Retention, State

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.support.servers import Postgres, Redis  # noqa: E402

Row = tuple[str, str, str, str]

TASKS = 64


def message(n: int) -> dict[str, str]:
    return {"role": "user" if n % 2 else "assistant", "content": os.urandom(485).hex()}


def timed(fn: Callable[[], Any]) -> float:
    began = time.perf_counter()
    fn()
    return (time.perf_counter() - began) * 1e3


class Ours:
    def __init__(self, url: str, messages: int, task: str) -> None:
        self.cp = safepoint.open(url, retention=Retention.keep_all())
        self.state = State(task, messages=[message(n) for n in range(messages)])
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
        self.cp.load_latest(self.state.task_id)

    def written(self) -> int:
        """Bytes that a save adds: what the floor inserts."""
        sizes: list[int] = []
        commit = self.cp.store.commit

        def noted(c: Any) -> Any:
            done = commit(c)
            sizes.append(done.bytes_written)
            return done

        self.cp.store.commit = noted  # type: ignore[method-assign, assignment]
        for _ in range(10):
            self.save()
        self.cp.store.commit = commit  # type: ignore[method-assign]
        return int(statistics.median(sizes))


class PeerState:
    """The same history as LangGraph's savers take it: one list channel, a new version at each save."""

    def __init__(self, messages: int, thread: str) -> None:
        self.messages = [message(n) for n in range(messages)]
        self.config: Any = {"configurable": {"thread_id": thread, "checkpoint_ns": ""}}
        self.thread = thread
        self.n = 0

    def next(self) -> tuple[Any, Any, Any, Any]:
        from langgraph.checkpoint.base import empty_checkpoint

        self.messages.append(message(len(self.messages)))
        self.n += 1
        checkpoint = empty_checkpoint()
        checkpoint["channel_values"] = {"messages": self.messages}
        version = f"{self.n:032}"
        checkpoint["channel_versions"] = {"messages": version}
        return self.config, checkpoint, {"source": "loop", "step": self.n, "parents": {}}, {"messages": version}


class Peer:
    """LangGraph's PostgresSaver on a connection of its own."""

    def __init__(self, url: str, messages: int, thread: str) -> None:
        from langgraph.checkpoint.postgres import PostgresSaver

        self.conn: Any = psycopg.connect(url, autocommit=True, prepare_threshold=0, row_factory=dict_row)
        self.saver = PostgresSaver(self.conn)
        self.saver.setup()
        self.state = PeerState(messages, thread)
        self.save()

    def save(self) -> None:
        self.state.config = self.saver.put(*self.state.next())

    def load(self) -> None:
        self.saver.get_tuple({"configurable": {"thread_id": self.state.thread, "checkpoint_ns": ""}})


def postgres_saves(url: str, messages: int, rounds: int) -> list[Row]:
    floor: Any = psycopg.connect(url, autocommit=True)
    floor.execute("CREATE TABLE IF NOT EXISTS floor (k bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, data bytea)")
    ours, peer = Ours(url, messages, f"saves-{messages}"), Peer(url, messages, f"saves-{messages}")
    written = ours.written()
    a: list[float] = []
    b: list[float] = []
    c: list[float] = []
    la: list[float] = []
    lc: list[float] = []
    for n in range(rounds):
        a.append(timed(ours.save))
        ours.shrink()
        data = os.urandom(written)
        b.append(timed(lambda data=data: floor.execute("INSERT INTO floor (data) VALUES (%b)", (data,))))  # type: ignore[misc]
        if n % 4 == 0:
            c.append(timed(peer.save))
            peer.state.messages.pop()
        if n % 8 == 0:
            la.append(timed(ours.load))
            lc.append(timed(peer.load))
    ours.cp.close()
    floor.close()
    peer.conn.close()
    save, base, put, load, get = map(statistics.median, (a, b, c, la, lc))
    return [
        (
            f"PostgreSQL: save, {messages:,} messages",
            f"{save:.2f} ms",
            f"{save / base:.2f} x a bare INSERT ({base:.2f} ms, {written} bytes)",
            "<= 2" if messages == 200 else "",
        ),
        (
            f"PostgreSQL: save against PostgresSaver, {messages:,}",
            f"{put:.2f} ms",
            f"{put / save:.1f} x faster",
            ">= 10" if messages == 2000 else "",
        ),
        (f"PostgreSQL: load, {messages:,} messages", f"{load:.2f} ms", f"PostgresSaver {get:.2f} ms", ""),
    ]


def postgres_disk(url: str, saves: int) -> list[Row]:
    """Bytes that so many saves at 2,000 messages add to all tables and indexes."""

    def size(*like: str) -> int:
        with psycopg.connect(url, autocommit=True) as conn:
            conn.execute("CHECKPOINT")
            found = conn.execute(
                "SELECT coalesce(sum(pg_total_relation_size(c.oid)), 0) FROM pg_class c JOIN pg_namespace s ON s.oid = relnamespace"
                " WHERE relkind = 'r' AND s.nspname = %s AND relname LIKE %s",
                like,
            ).fetchone()
            assert found is not None
            return int(found[0])

    ours, peer = Ours(f"{url}&schema=disk", 2000, "disk"), Peer(url, 2000, "disk")
    before, peer_before = size("disk", r"sp\_%"), size("public", "checkpoint%")
    for _ in range(saves):
        ours.save()
        peer.save()
    ours.cp.close()
    peer.conn.close()
    o, p = size("disk", r"sp\_%") - before, size("public", "checkpoint%") - peer_before
    return [
        (
            f"PostgreSQL: disk for {saves} saves at 2,000 messages",
            f"{o / 1e6:.2f} MB",
            f"{p / o:.0f} x smaller than PostgresSaver ({p / 1e6:.0f} MB)",
            ">= 500",
        )
    ]


async def _many(save: Callable[[int], Any], seconds: float) -> float:
    """Saves a second of 64 tasks that do nothing else."""
    done = 0
    end = time.perf_counter() + seconds

    async def one(i: int) -> None:
        nonlocal done
        while time.perf_counter() < end:
            await save(i)
            done += 1

    began = time.perf_counter()
    await asyncio.gather(*[one(i) for i in range(TASKS)])
    return done / (time.perf_counter() - began)


async def _async_rates(url: str, messages: int, seconds: float) -> tuple[float, float]:
    from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
    from psycopg_pool import AsyncConnectionPool

    states = [State(f"async-{messages}-{i}", messages=[message(n) for n in range(messages)]) for i in range(TASKS)]
    acp = safepoint.open_async(url, retention=Retention.keep_all())
    for state in states:
        await acp.save(state)

    async def ours(i: int) -> None:
        states[i].messages.append(message(0))
        states[i].step += 1
        await acp.save(states[i])

    kwargs: Any = {"autocommit": True, "prepare_threshold": 0, "row_factory": dict_row}
    async with AsyncConnectionPool[Any](url, min_size=10, max_size=10, kwargs=kwargs, open=False) as pool:
        saver = AsyncPostgresSaver(pool)
        await saver.setup()
        peers = [PeerState(messages, f"async-{messages}-{i}") for i in range(TASKS)]

        async def theirs(i: int) -> None:
            peers[i].config = await saver.aput(*peers[i].next())

        mine: list[float] = []
        peer: list[float] = []
        for _ in range(3):
            mine.append(await _many(ours, seconds))
            peer.append(await _many(theirs, seconds))
    await acp.close()
    return statistics.median(mine), statistics.median(peer)


def postgres_async(url: str, messages: int, seconds: float) -> list[Row]:
    ours, peer = asyncio.run(_async_rates(url, messages, seconds))
    return [
        (
            f"PostgreSQL: {TASKS} async tasks, {messages:,} messages",
            f"{ours:,.0f} saves/s",
            f"{ours / peer:.1f} x AsyncPostgresSaver ({peer:,.0f}/s, a pool of 10)",
            ">= 1",
        )
    ]


def dbos_steps(url: str, rounds: int) -> float:
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED")}
    command = [sys.executable, str(ROOT / "bench" / "dbos_steps.py"), url, str(rounds)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def calls(url: str, rounds: int) -> float:
    @safepoint.tool(effect="write", name=f"bench.{url.partition(':')[0]}")
    def noop(n: int) -> str:
        return "ok"

    spent: list[float] = []
    with safepoint.open(url) as cp, cp.resume("calls") as run:
        for n in range(rounds + 20):
            spent.append(timed(lambda n=n: run.call(noop, n)))  # type: ignore[misc]
            if n % 20 == 19:
                run.save()
    return statistics.median(spent[20:])


def against_dbos(folder: Path, url: str, rounds: int) -> list[Row]:
    place = folder / "dbos"
    place.mkdir()
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute("CREATE DATABASE dbos")
    rows = []
    for what, mine, theirs in (
        ("SQLite", f"sqlite:///{place}/ours.db", f"sqlite:///{place}/dbos.db"),
        ("PostgreSQL", url, url.replace("/postgres?", "/dbos?", 1)),
    ):
        call, step = calls(mine, rounds), dbos_steps(theirs, rounds)
        rows.append(
            (
                f"{what}: journaled call of a write tool (intent and result durable)",
                f"{call:.2f} ms",
                f"{step / call:.1f} x faster than a DBOS step ({step:.2f} ms; its result only)",
                ">= 5",
            )
        )
    return rows


def redis_saves(rounds: int) -> list[Row]:
    rows: list[Row] = []
    server = Redis("--appendonly", "yes", "--appendfsync", "always")
    try:
        bare = client.Redis.from_url(server.url)
        for messages in (200, 2000):
            ours = Ours(server.safepoint_url, messages, f"saves-{messages}")
            written = ours.written()
            a: list[float] = []
            b: list[float] = []
            for n in range(rounds):
                a.append(timed(ours.save))
                ours.shrink()
                data = os.urandom(written)
                b.append(timed(lambda data=data, n=n: bare.set(f"floor:{n}", data)))  # type: ignore[misc]
            load = statistics.median(timed(ours.load) for _ in range(20))
            ours.cp.close()
            save, base = statistics.median(a), statistics.median(b)
            rows.append(
                (
                    f"Redis (AOF always): save, {messages:,} messages",
                    f"{save:.2f} ms",
                    f"{save / base:.2f} x a bare SET ({base:.2f} ms, {written} bytes)",
                    "<= 2",
                )
            )
            rows.append((f"Redis: load, {messages:,} messages", f"{load:.2f} ms", "", ""))
        bare.close()
    finally:
        server.close()
    return rows


def rows(folder: Path, rounds: int) -> list[Row]:
    """All of it, each server started for it and gone afterwards."""
    found: list[Row] = []
    server = Postgres(durable=True)
    try:
        for messages in (10, 200, 2000):
            found += postgres_saves(server.url, messages, rounds)
        found += postgres_disk(server.url, 100)
        found += postgres_async(server.url, 200, 3.0)
        found += against_dbos(folder, server.url, rounds)
    finally:
        server.close()
    return found + redis_saves(rounds)

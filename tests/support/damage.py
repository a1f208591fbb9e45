"""A store that is damaged at random, and what a digest per row would still let be read of it: found past the library."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import apsw

import safepoint
from safepoint import Retention, State
from safepoint.model import new_id
from safepoint.rows import CallWrite, Commit, PauseWrite
from safepoint.testing.build import call_row, obj, pause_row, write_row
from tests.support.children import tell

TASKS = ("one", "two", "three")
SAVES = 8

Acknowledged = dict[str, dict[int, tuple[Any, ...]]]
"""By task and seq: what was saved."""


def content(state: State) -> tuple[Any, ...]:
    return (state.messages, state.agent_state, state.metadata, state.step)


def fill(path: str, *, close: bool = True) -> Acknowledged:
    """Save some tasks; with ``close=False`` tell what was acknowledged, and wait to be killed."""
    done: Acknowledged = {task: {} for task in TASKS}
    cp = safepoint.open(f"sqlite:///{path}", retention=Retention.keep_all())
    rng = random.Random(7)
    states = {task: State(task) for task in TASKS}
    for i in range(SAVES):
        for task, state in states.items():
            for _ in range(rng.randint(1, 6)):
                state.messages.append({"role": "user", "content": f"{task} {i} " + rng.randbytes(rng.randint(5, 400)).hex()})
            state.agent_state = {"phase": f"p{i}", "notes": rng.randbytes(rng.randint(0, 900)), "n": [i, i / 7]}
            state.metadata = {"i": i}
            state.step = i
            seq = cp.save(state, label=f"{task}-{i}").seq
            done[task][seq] = ([dict(m) for m in state.messages], dict(state.agent_state), dict(state.metadata), i)
            if i % 3 == 1:
                row = call_row(seq, tool="t" * 20, args=b"\x80", step=i)
                cp.store.commit(Commit(task=task, id=new_id(), calls=(CallWrite(row, "began"),)))
            if i == 4:
                pause = pause_row(seq, step=i, question=b"\xa1?")
                cp.store.commit(Commit(task=task, id=new_id(), pauses=(PauseWrite(pause),)))
            if i % 4 == 2:
                body = obj(f"{task} {i}".encode())
                rows = tuple(write_row(f"c{i}", [body], writer=f"w{k}", data=b"\x80") for k in range(2))
                cp.store.commit(Commit(task=task, id=new_id(), writes=rows, objects=(body,)))
    if not close:
        tell("filled", done)
        while True:
            __import__("time").sleep(60)
    cp.close()
    return done


class Spot(NamedTuple):
    """Where bytes were changed."""

    suffix: str
    offset: int
    size: int
    """0: a single bit."""


def damage(path: Path, rng: random.Random) -> Spot:
    """Change a bit or a block of 64 bytes in the database or its log, wherever it falls, weighted by size."""
    sizes = {suffix: os.stat(f"{path}{suffix}").st_size for suffix in ("", "-wal") if os.path.exists(f"{path}{suffix}")}
    suffix = rng.choices(list(sizes), list(sizes.values()))[0]
    with open(f"{path}{suffix}", "r+b") as file:
        if rng.random() < 0.5:
            spot = Spot(suffix, rng.randrange(sizes[suffix]), 0)
            file.seek(spot.offset)
            old = file.read(1)
            new = bytes([old[0] ^ 1 << rng.randrange(8)])
        else:
            spot = Spot(suffix, rng.randrange(sizes[suffix] // 64) * 64, 64)
            file.seek(spot.offset)
            old = file.read(64)
            new = rng.choice((bytes(64), rng.randbytes(64), b"\xff" * 64))
        file.seek(spot.offset)
        file.write(new)
    return spot


def copied(template: Path, to: Path) -> Path:
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir()
    for suffix in ("", "-wal", "-locks"):
        if os.path.exists(f"{template}{suffix}"):
            shutil.copy(f"{template}{suffix}", to / f"agent.db{suffix}")
    return to / "agent.db"


_TABLES = {"sqlite_schema": "name", "sp_meta": "key", "sp_tasks": "n", "sp_checkpoints": "k", "sp_objects": "k"}


class Rows:
    """All rows of a sound file, to be compared one by one with those of a damaged copy."""

    def __init__(self, path: Path) -> None:
        self.rows: dict[str, dict[Any, tuple[Any, ...]]] = {}
        with _connected(path) as conn:
            for table, key in _TABLES.items():
                found = conn.execute(f"SELECT {key}, * FROM {table}").fetchall()
                self.rows[table] = {row[0]: row[1:] for row in found}
            self.needs: dict[tuple[str, int], tuple[int, list[int]]] = {}
            names = {(row[1], row[3]): (k, row[4]) for k, row in self.rows["sp_objects"].items()}
            tasks = {row[0]: row[1] for row in self.rows["sp_tasks"].values()}
            for k, row in self.rows["sp_checkpoints"].items():
                todo, seen = [row[-2]], set[int]()
                while todo:
                    refs = todo.pop()
                    for i in range(0, len(refs), 16):
                        at, more = names[row[1], refs[i : i + 16]]
                        if at not in seen:
                            seen.add(at)
                            todo.append(more)
                self.needs[tasks[row[1]], row[2]] = (k, sorted(seen))

    def readable(self, path: Path) -> set[tuple[str, int]]:
        """Checkpoints all of whose rows are in a damaged copy as they were, each asked for by its number in its table."""
        try:
            with _connected(path) as conn:
                same = {table: self._same(conn, table) for table in _TABLES}
        except (apsw.Error, UnicodeDecodeError):
            return set()
        if any(len(same[table]) < len(self.rows[table]) for table in ("sqlite_schema", "sp_meta")):
            return set()  # what tells where the rows are, and what they are
        tasks = {self.rows["sp_tasks"][n][1] for n in same["sp_tasks"]}
        return {
            name
            for name, (k, objects) in self.needs.items()
            if name[0] in tasks and k in same["sp_checkpoints"] and same["sp_objects"].issuperset(objects)
        }

    def _same(self, conn: apsw.Connection, table: str) -> set[Any]:
        same = set()
        for key, row in self.rows[table].items():
            try:
                if conn.execute(f"SELECT * FROM {table} WHERE {_TABLES[table]} = ?", (key,)).fetchall() == [row]:
                    same.add(key)
            except (apsw.CorruptError, apsw.IOError, UnicodeDecodeError):
                pass
        return same


class _connected:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> apsw.Connection:
        self.conn = apsw.Connection(str(self.path), flags=apsw.SQLITE_OPEN_READWRITE)
        return self.conn

    def __exit__(self, *_: object) -> None:
        self.conn.close()


def seqs(done: Acknowledged) -> Iterator[tuple[str, int]]:
    for task, saves in done.items():
        for seq in saves:
            yield task, seq

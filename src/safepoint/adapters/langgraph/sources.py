"""Databases of LangGraph's SqliteSaver and PostgresSaver, read by SQL and never written.

The savers themselves hide what a copy needs: the path and the index of a pending write, and which values two checkpoints share. Values are
handed on as they lie there, a type and bytes; nothing is decoded here.
"""

from __future__ import annotations

import json
import os
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from safepoint.errors import Damaged, MissingExtra, NotFound, Unavailable, UsageError
from safepoint.stores.url import redact

__all__ = ["At", "Found", "Source", "Typed", "Write", "open_source"]

SQLITE = "langgraph-sqlite:///"
POSTGRES = ("langgraph-postgresql://", "langgraph-postgres://")
SENDS = "__pregel_tasks"


class Typed(NamedTuple):
    """A value as it is stored: what LangGraph's serializer calls its type, and the bytes."""

    tag: str | None
    data: bytes | None


class At(NamedTuple):
    """A checkpoint's place."""

    ns: str
    id: str
    parent: str | None


class Found(NamedTuple):
    """A checkpoint.

    Attributes:
        whole: All of it in one value (SQLite), or None.
        parts: All of it as plain data but the values in ``blobs`` (PostgreSQL); values that JSON has are in its ``channel_values``.
        blobs: Values of channels.
        sends: Of one before version 4: what its parent's tasks sent; by now a channel of it.
        metadata: LangGraph's, plain data.
        size: Bytes that were read for it.
    """

    whole: Typed | None
    parts: dict[str, Any]
    blobs: dict[str, Typed]
    sends: list[Typed]
    metadata: dict[str, Any]
    size: int


class Write(NamedTuple):
    """A pending write."""

    ns: str
    checkpoint: str
    task: str
    path: str
    idx: int
    channel: str
    value: Typed


class Source(ABC):
    """A database, open for reading. Not for several threads."""

    url: str

    @abstractmethod
    def threads(self) -> list[str]:
        """The names of all threads, in order; also of one that has nothing but pending writes."""

    @abstractmethod
    def moment(self) -> AbstractContextManager[None]:
        """All that is read within is as of one moment."""

    @abstractmethod
    def places(self, thread: str) -> list[At]: ...

    @abstractmethod
    def checkpoint(self, thread: str, at: At, known: Mapping[str, Any]) -> Found:
        """One checkpoint. ``known``: channels and versions whose values need not be read, where they lie apart."""

    @abstractmethod
    def writes(self, thread: str, ns: str, id: str) -> list[Write]:
        """What is pending at a checkpoint, in the order in which a superstep applies it."""

    @abstractmethod
    def stray(self, thread: str) -> list[tuple[str, str]]:
        """Checkpoints, by namespace and id, that have pending writes and are not there themselves."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def open_source(url: str) -> Source:
    """Open the database at ``langgraph-sqlite:///path`` or ``langgraph-postgresql://…``.

    Raises:
        UsageError: no such URL, or no database of LangGraph's. NotFound: no such file. Unavailable: no answer.
    """
    if url.startswith(SQLITE):
        return _Sqlite(url)
    if url.startswith(POSTGRES):
        return _Postgres(url)
    raise UsageError(
        f"{redact(url)} names no database of LangGraph's",
        "",
        "Write langgraph-sqlite:///path/to/old.db, or langgraph-postgresql://user@host/db.",
    )


def _no_layout(url: str, why: str) -> UsageError:
    return UsageError(
        f"{redact(url)} is no database that can be imported",
        why,
        "Name one that SqliteSaver or PostgresSaver writes; open an older one with the saver of today once, which brings it up to date.",
    )


def _metadata(text: Any, at: At) -> dict[str, Any]:
    try:
        found = json.loads(text) if text is not None else {}
    except (ValueError, RecursionError):
        found = None
    if type(found) is not dict:
        raise Damaged(f"the metadata of checkpoint {at.id} cannot be read", "it is no JSON", "Leave the thread out.")
    return found


# SQLite


class _Sqlite(Source):
    """By the ``sqlite3`` of Python, as the saver has it: two SQLites in one process would undo each other's locks on a file."""

    def __init__(self, url: str) -> None:
        self.url = url
        path = unquote(url.removeprefix(SQLITE).partition("?")[0])
        if not os.path.isfile(path):
            raise NotFound(f"there is no file {path!r}", "", "Correct the URL.", path=path)
        self.path = path
        self._conn = self._opened(path)
        try:
            self._look()
        except sqlite3.DatabaseError as error:
            self.close()
            raise _no_layout(url, str(error)) from None
        except BaseException:
            self.close()
            raise

    def _opened(self, path: str) -> sqlite3.Connection:
        uri = Path(os.path.abspath(path)).as_uri() + "?mode=ro"
        conn = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=60)
        try:
            conn.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        except sqlite3.OperationalError:
            conn.close()
            # In a folder that cannot be written to, a database in WAL mode has no place for its index; nobody else writes there either.
            if os.path.exists(path + "-wal") or os.access(os.path.dirname(os.path.abspath(path)), os.W_OK):
                raise Unavailable(f"{path!r} cannot be read", "another program holds it", "Try again later.") from None
            conn = sqlite3.connect(uri + "&immutable=1", uri=True, isolation_level=None, check_same_thread=False)
        except sqlite3.DatabaseError as error:
            conn.close()
            raise _no_layout(self.url, str(error)) from None
        return conn

    def _look(self) -> None:
        there = {table: self._columns(table) for table in ("checkpoints", "writes")}
        for table, needs in (
            (
                "checkpoints",
                {"thread_id", "checkpoint_ns", "checkpoint_id", "parent_checkpoint_id", "type", "checkpoint", "metadata"},
            ),
            ("writes", {"thread_id", "checkpoint_ns", "checkpoint_id", "task_id", "idx", "channel", "type", "value"}),
        ):
            if missing := needs - there[table]:
                raise _no_layout(self.url, f"it has no table {table!r} with a column {min(missing)!r}")
        self._path = "task_path" if "task_path" in there["writes"] else "''"

    def _columns(self, table: str) -> set[str]:
        return {row[1] for row in self._conn.execute(f"PRAGMA table_info({table})")}

    def threads(self) -> list[str]:
        sql = "SELECT thread_id FROM checkpoints UNION SELECT thread_id FROM writes ORDER BY 1"
        return [str(row[0]) for row in self._conn.execute(sql)]

    @contextmanager
    def moment(self) -> Iterator[None]:
        self._conn.execute("BEGIN")
        try:
            yield
        except sqlite3.DatabaseError as error:
            raise Damaged(f"{self.path!r} cannot be read", str(error), "Restore it from a backup.") from None
        finally:
            self._conn.execute("ROLLBACK")

    def places(self, thread: str) -> list[At]:
        sql = "SELECT checkpoint_ns, checkpoint_id, parent_checkpoint_id FROM checkpoints WHERE thread_id = ?"
        return [At(ns, id, parent or None) for ns, id, parent in self._conn.execute(sql, (thread,))]

    def checkpoint(self, thread: str, at: At, known: Mapping[str, Any]) -> Found:
        sql = (
            "SELECT type, checkpoint, metadata FROM checkpoints WHERE thread_id = ? AND checkpoint_ns = ? AND checkpoint_id = ?"
        )
        tag, data, metadata = self._conn.execute(sql, (thread, at.ns, at.id)).fetchone()
        return Found(Typed(tag, _bytes(data)), {}, {}, [], _metadata(metadata, at), len(data or b""))

    def writes(self, thread: str, ns: str, id: str) -> list[Write]:
        sql = (
            f"SELECT task_id, {self._path}, idx, channel, type, value FROM writes "
            "WHERE thread_id = ? AND checkpoint_ns = ? AND checkpoint_id = ?"
        )
        found = [
            Write(ns, id, task, path, idx, channel, Typed(tag, _bytes(data)))
            for task, path, idx, channel, tag, data in self._conn.execute(sql, (thread, ns, id))
        ]
        return sorted(found, key=_order)

    def stray(self, thread: str) -> list[tuple[str, str]]:
        sql = (
            "SELECT DISTINCT checkpoint_ns, checkpoint_id FROM writes WHERE thread_id = ? "
            "EXCEPT SELECT checkpoint_ns, checkpoint_id FROM checkpoints WHERE thread_id = ? ORDER BY 1, 2"
        )
        return [(ns, id) for ns, id in self._conn.execute(sql, (thread, thread))]

    def close(self) -> None:
        self._conn.close()


def _order(write: Write) -> tuple[str, str, int]:
    return write.path, write.task, write.idx


def _bytes(data: Any) -> bytes | None:
    return data.encode() if isinstance(data, str) else data


# PostgreSQL


class _Postgres(Source):
    def __init__(self, url: str) -> None:
        self.url = url
        try:
            import psycopg
        except ImportError as error:
            raise MissingExtra(
                "reading a PostgreSQL database needs the package psycopg",
                "it is not installed",
                'Run: pip install "safepoint[postgres]"',
            ) from error
        try:
            self._conn = psycopg.connect(url.removeprefix("langgraph-"), autocommit=True, prepare_threshold=3)
        except psycopg.Error as error:
            raise Unavailable(
                f"{redact(url)} does not answer", type(error).__name__, "Check the URL, and that the server runs."
            ) from None
        self._failures = psycopg.Error
        try:
            self._conn.execute("SET default_transaction_read_only = on")
            self._look()
        except psycopg.Error as error:
            self.close()
            raise _no_layout(url, type(error).__name__) from None
        except BaseException:
            self.close()
            raise

    def _look(self) -> None:
        there = {table: self._columns(table) for table in ("checkpoints", "checkpoint_blobs", "checkpoint_writes")}
        for table, needs in (
            ("checkpoints", {"thread_id", "checkpoint_ns", "checkpoint_id", "parent_checkpoint_id", "checkpoint", "metadata"}),
            ("checkpoint_blobs", {"thread_id", "checkpoint_ns", "channel", "version", "type", "blob"}),
            ("checkpoint_writes", {"thread_id", "checkpoint_ns", "checkpoint_id", "task_id", "idx", "channel", "type", "blob"}),
        ):
            if missing := needs - there[table]:
                shallow = " (ShallowPostgresSaver keeps no history)" if missing >= {"checkpoint_id"} else ""
                raise _no_layout(self.url, f"it has no table {table!r} with a column {min(missing)!r}{shallow}")
        self._path = "task_path" if "task_path" in there["checkpoint_writes"] else "''::text"

    def _columns(self, table: str) -> set[str]:
        sql = "SELECT attname FROM pg_attribute WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped"
        return {row[0] for row in self._conn.execute(sql, (table,))}

    def threads(self) -> list[str]:
        sql = "SELECT thread_id FROM checkpoints UNION SELECT thread_id FROM checkpoint_writes"
        return sorted(row[0] for row in self._conn.execute(sql))

    @contextmanager
    def moment(self) -> Iterator[None]:
        self._conn.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        try:
            yield
        except self._failures as error:
            raise Unavailable(f"{redact(self.url)} cannot be read", type(error).__name__, "Try again.") from None
        finally:
            if not self._conn.closed:
                self._conn.execute("ROLLBACK")

    def places(self, thread: str) -> list[At]:
        sql = "SELECT checkpoint_ns, checkpoint_id, parent_checkpoint_id FROM checkpoints WHERE thread_id = %s"
        return [At(ns, id, parent or None) for ns, id, parent in self._conn.execute(sql, (thread,))]

    def checkpoint(self, thread: str, at: At, known: Mapping[str, Any]) -> Found:
        sql = (
            "SELECT checkpoint, checkpoint::text, metadata::text FROM checkpoints "
            "WHERE thread_id = %s AND checkpoint_ns = %s AND checkpoint_id = %s"
        )
        row = self._conn.execute(sql, (thread, at.ns, at.id)).fetchone()
        assert row is not None  # of the same moment as its place
        parts, text, metadata = row
        versions = parts.get("channel_versions") if type(parts) is dict else None
        if type(versions) is not dict:
            raise Damaged(f"checkpoint {at.id} cannot be read", "it is no checkpoint of LangGraph's", "Leave the thread out.")
        wanted = [(c, v) for c, v in versions.items() if c not in known or known[c] != v]
        blobs: dict[str, Typed] = {}
        size = len(text)
        if wanted:
            found = self._conn.execute(
                "SELECT b.channel, b.type, b.blob FROM unnest(%s::text[], %s::text[]) AS w (channel, version) "
                "JOIN checkpoint_blobs b ON b.thread_id = %s AND b.checkpoint_ns = %s "
                "AND b.channel = w.channel AND b.version = w.version WHERE b.type <> 'empty'",
                ([c for c, _ in wanted], [v if type(v) is str else json.dumps(v) for _, v in wanted], thread, at.ns),
            )
            for channel, tag, data in found:
                blobs[channel] = Typed(tag, data)
                size += len(data or b"")
        return Found(None, parts, blobs, self._sends(thread, at, parts), _metadata(metadata, at), size)

    def _sends(self, thread: str, at: At, parts: dict[str, Any]) -> list[Typed]:
        """As the saver itself brings old checkpoints up to date."""
        if at.parent is None or not isinstance(parts.get("v"), int) or parts["v"] >= 4:
            return []
        sql = (
            "SELECT type, blob FROM checkpoint_writes WHERE thread_id = %s AND checkpoint_id = %s AND channel = %s "
            f"ORDER BY {self._path}, task_id, idx"
        )
        return [Typed(tag, data) for tag, data in self._conn.execute(sql, (thread, at.parent, SENDS))]

    def writes(self, thread: str, ns: str, id: str) -> list[Write]:
        sql = (
            f"SELECT task_id, {self._path}, idx, channel, type, blob FROM checkpoint_writes "
            "WHERE thread_id = %s AND checkpoint_ns = %s AND checkpoint_id = %s"
        )
        found = [
            Write(ns, id, task, path, idx, channel, Typed(tag, data))
            for task, path, idx, channel, tag, data in self._conn.execute(sql, (thread, ns, id))
        ]
        return sorted(found, key=_order)

    def stray(self, thread: str) -> list[tuple[str, str]]:
        sql = (
            "SELECT checkpoint_ns, checkpoint_id FROM checkpoint_writes WHERE thread_id = %s "
            "EXCEPT SELECT checkpoint_ns, checkpoint_id FROM checkpoints WHERE thread_id = %s"
        )
        return sorted((ns, id) for ns, id in self._conn.execute(sql, (thread, thread)))

    def close(self) -> None:
        self._conn.close()

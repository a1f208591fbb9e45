"""From a URL to a checkpointer that needs none of the application's classes, and never makes a store."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote

from safepoint import recovering
from safepoint.checkpointer import Checkpointer
from safepoint.cli.text import name
from safepoint.codec import chunks, states
from safepoint.codec.chunks import Packed
from safepoint.codec.states import Control
from safepoint.errors import Damaged, NotFound, SafepointError, UsageError
from safepoint.model import Obj, Pause, Retention, State, from_us
from safepoint.rows import CheckpointRow, PauseRow
from safepoint.stores.url import open_store, redact

__all__ = ["PlainCheckpointer", "good_named", "open_made", "open_plain", "split_at"]


class PlainCheckpointer(Checkpointer):
    """Reads states and questions as plain data: no class is looked up, no migration run, no code of the application's imported.

    What it decides (``plan``) is therefore about what is stored, and not about what one program can load of it.
    """

    def tree(self, task: str, row: CheckpointRow, objects: Mapping[bytes, Obj]) -> dict[str, Any]:
        """The stored parts of a checkpoint, each object verified.

        Raises:
            Damaged, NewerFormat
        """
        states.check_row(task, row)
        try:
            tree = chunks.unpack_plain(row.root, row.refs, objects, spare=states.SPARE)
            missing = {"messages", "agent_state", "metadata", "step", "turns", "finished"} - tree.keys()
            if missing:
                raise Damaged("its state has no " + ", ".join(sorted(missing)), "", "Look at an earlier checkpoint.")
        except SafepointError as error:
            error.what = f"{task}@{row.seq}: {error.what}"
            error.details.update(task=task, seq=row.seq)
            raise
        return tree

    def _unpack(self, task: str, row: CheckpointRow, objects: Mapping[bytes, Obj]) -> tuple[State, Control, Packed | None]:
        tree = self.tree(task, row, objects)
        state = State(
            task_id=task,
            step=cast(int, tree["step"]),
            messages=tree["messages"],
            agent_state=tree["agent_state"],
            metadata=tree["metadata"],
            version=row.schema,
            created_at=from_us(row.created_at),
            branch=row.branch,
            seq=row.seq,
        )
        return state, Control.of(tree), None

    def _pause(self, task_id: str, row: PauseRow) -> Pause:
        return states.pause(task_id, row, None)


def open_plain(url: str | None) -> PlainCheckpointer:
    """Open the store that ``--store`` or the environment names.

    Raises:
        UsageError: neither names one. NotFound: it would have to be made first.
    """
    if not url:
        raise UsageError(
            "no store is named",
            "neither --store nor the environment variable SAFEPOINT_URL is given",
            "Write --store sqlite:///agent.db, or export SAFEPOINT_URL=sqlite:///agent.db.",
        )
    scheme, sep, rest = url.partition("://")
    slashes = re.fullmatch(r"sqlite:(/?)([^/].*)", url, re.IGNORECASE | re.DOTALL)
    if slashes and not sep:
        file = redact(slashes[2])
        raise UsageError(
            f"{redact(url)!r} is no store URL",
            "there are three slashes before a relative path, and four before an absolute one",
            f"Write sqlite:///{file} for a file below this folder, or sqlite:////{file}.",
        )
    if scheme.lower() == "memory":
        raise UsageError(
            "a memory store cannot be seen from here", "it lives in the process that opened it", "Name a stored one."
        )
    if scheme.lower() == "sqlite" and rest.startswith("/"):
        _sqlite_exists(url, unquote(rest.partition("?")[0])[1:])
    if scheme.lower() == "file" and rest.startswith("/"):
        _folder_exists(url, unquote(rest.partition("?")[0])[1:])
    # Looking at a store must not thin it out.
    return PlainCheckpointer(open_store(url), retention=Retention.keep_all())


def open_made(url: str | None) -> PlainCheckpointer:
    """The same for what is written to: a store that is not there is made; another program's file is left alone."""
    try:
        return open_plain(url)
    except NotFound as error:
        path = error.details.get("path")
        if path is None or os.path.lexists(path):
            raise
    return PlainCheckpointer(open_store(str(url)), retention=Retention.keep_all())


def _folder_exists(url: str, given: str) -> None:
    path = os.path.abspath(given)
    if given and "\0" not in given and not os.path.isdir(path):
        raise NotFound(f"there is no store at {redact(url)}", f"{path} is no folder", "Correct the URL.", path=path)


def _sqlite_exists(url: str, given: str) -> None:
    """Refuse a file that is not there or is another program's: opening it as a store would make tables in it."""
    if not given or "\0" in given or given == ":memory:":
        return  # open_store says what is wrong with it
    path = os.path.abspath(given)
    try:
        st = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        # As open() does it: a shell expands ~ only at the beginning of a word, and there it is not.
        remedy = "Write the path in full: ~ is not expanded in a URL." if given.startswith("~") else "Correct the URL."
        raise NotFound(f"there is no store at {redact(url)}", f"{path} does not exist", remedy, path=path) from None
    except OSError:
        return  # opening it tells more
    if not stat.S_ISREG(st.st_mode):
        raise UsageError(f"{path} is no file", "", "Correct the URL.", path=path)
    import apsw

    # Through SQLite and not by reading the file: closing a descriptor of it would drop the locks that this process may have.
    try:
        conn = apsw.Connection(Path(path).as_uri() + "?mode=ro", flags=apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI)
    except apsw.Error:
        return
    try:
        conn.set_busy_timeout(5000)
        ours = conn.execute("SELECT 1 FROM sqlite_schema WHERE name = 'sp_meta'").fetchall()
    except apsw.Error:
        return  # a damaged file, one that is no database, or one of a newer format: the store's own errors say so
    finally:
        conn.close()
    if not ours:
        raise NotFound(f"{path} holds no safepoint store", "it has none of its tables", "Correct the URL.", path=path)


@contextmanager
def good_named(cp: Checkpointer, task: str, seq: int | None) -> Iterator[None]:
    """Let the error of a damaged head (``seq`` is None) name the newest checkpoint that can be read."""
    try:
        yield
    except Damaged as error:
        if seq is None and not error.details.get("rolled_back") and "good" not in error.details:
            good = recovering.newest_good(cp, task)
            if good is not None:
                error.details["good"] = good
                error.remedy = f"The newest good checkpoint is {name(task)}@{good}. {error.remedy}".strip()
        raise


def split_at(cp: Checkpointer, text: str) -> tuple[str, int | None]:
    """``TASK@SEQ`` or ``TASK``. An id may hold ``@`` itself, so that what names a task as a whole is that task."""
    task, at, seq = text.rpartition("@")
    if not at or not task or not (seq.isascii() and seq.isdecimal()):
        return text, None
    # The length: Python refuses to read numbers of thousands of digits, and no checkpoint has one.
    if len(seq) > 20 or cp.store.task(text) is not None:
        return text, None
    return task, int(seq)

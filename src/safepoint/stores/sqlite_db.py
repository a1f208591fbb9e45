"""One SQLite file as this process sees it: a writing and a reading connection, their locks, and what errors and forks do.

The writing connection is used by one thread at a time, the reading one by another; more connections per process are slower,
not faster. No transaction is left open by an exception, KeyboardInterrupt included, and no connection is taken over a fork.
"""

from __future__ import annotations

import itertools
import os
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import cache
from importlib import resources
from types import TracebackType
from typing import Any

import apsw

from safepoint.errors import Damaged, SafepointError, StoreFull, Unavailable, UsageError
from safepoint.stores import forking  # noqa: F401  (its hook must be there first: see the end of this module)
from safepoint.stores.sqlite_log import SIDES, inode, refused, wrong_log
from safepoint.stores.sqlite_schema import prepare

__all__ = ["CommitFailed", "Database", "sql", "translate"]


LOOK = 0.02
"""Seconds for which the log and the shared memory are believed to lie where they lay."""


@cache
def sql(name: str) -> dict[str, str]:
    """Return the statements of a file in sql/, by the names in their ``-- name:`` lines."""
    text = (resources.files("safepoint.stores") / "sql" / f"{name}.sql").read_text(encoding="utf-8")
    found = {}
    for part in text.split("-- name:")[1:]:
        key, _, statement = part.partition("\n")
        found[key.strip()] = " ".join(statement.split()).removesuffix(";")
    return found


class CommitFailed(Exception):
    """An error came out of COMMIT: whether the transaction landed is not known. ``cause`` is what SQLite said."""

    def __init__(self, cause: SafepointError) -> None:
        super().__init__(cause)
        self.cause = cause


def translate(error: apsw.Error | UnicodeDecodeError, path: str, *, ours: bool = True) -> SafepointError:
    """Say in the library's terms what SQLite said, about a statement of ours or of a tool."""
    if isinstance(error, UnicodeDecodeError):  # its own words would show the text
        return Damaged(f"{path} is damaged", "a text in it is no UTF-8", "Look with safepoint verify.", path=path)
    why = str(error)
    if isinstance(error, apsw.FullError):
        return StoreFull(
            f"no room for {path}",
            why,
            "Free space on its disk and try again; deleting checkpoints does not help, as that needs room too",
            path=path,
        )
    if isinstance(error, apsw.SQLError) and ours:  # "no such column", say: the file's own account of its tables has changed
        return Damaged(f"the tables of {path} are not those of a store", why, "Restore it from a backup.", path=path)
    if (
        isinstance(error, apsw.ConstraintError) and ours
    ):  # a number that was given out is taken, or a table has two rows for one
        return Damaged(
            f"{path} is damaged", why, "See what is left with safepoint verify; mend it with safepoint repair.", path=path
        )
    if isinstance(error, apsw.CorruptError | apsw.NotADBError | apsw.FormatError):
        return Damaged(f"{path} is no sound SQLite database", why, "Restore it from a backup.", path=path)
    if isinstance(error, apsw.BusyError | apsw.LockedError | apsw.ProtocolError):
        return Unavailable(f"{path} is in use", "another process kept writing", "Try again, or raise timeout.", path=path)
    if isinstance(error, apsw.IOError):
        if getattr(error, "extendedresult", 0) in {
            apsw.SQLITE_IOERR_CORRUPTFS,
            apsw.SQLITE_IOERR_DATA,
            apsw.SQLITE_IOERR_SHORT_READ,
        }:
            return Damaged(f"{path} cannot be read whole", why, "Restore it from a backup.", path=path)
        return Unavailable(f"{path} cannot be read or written", why, "Look at the disk and its log.", path=path)
    if isinstance(error, apsw.CantOpenError | apsw.ReadOnlyError | apsw.PermissionsError | apsw.AuthError):
        if (found := refused(path)) is not None:
            return Unavailable(f"{found[0]} cannot be written", why, found[1], path=found[0])
        return Unavailable(f"{path} cannot be opened for writing", why, "Look at its folder and permissions.", path=path)
    if isinstance(error, apsw.TooBigError):
        return UsageError("a value is too large for SQLite", why, "One object may have up to 1 GB.", path=path)
    return Unavailable(f"{path} did not do what was asked", f"{type(error).__name__}: {why}", path=path)


class Connection(apsw.Connection):
    """One that only its Database can close: it is lent to tools."""

    _owned = True

    def close(self, force: bool = False) -> None:
        if self._owned:
            raise UsageError("this connection belongs to the store", "it was only lent", "Leave it open.")
        super().close(force)

    def rows(self, statement: str, values: tuple[Any, ...] = ()) -> list[Any]:
        """All rows, so that no statement stays half read and keeps its snapshot open."""
        return self.execute(statement, values).fetchall()


class _Patience:
    """A busy handler that sleeps a short random time. SQLite's own waits ever longer, and the longest waiter starves."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.until = 0.0

    def __call__(self, tries: int) -> bool:
        now = time.monotonic()
        if tries == 0:
            self.until = now + self.timeout
        elif now >= self.until:
            return False
        time.sleep(random.uniform(0.0001, 0.0015))
        return True


class Database:
    """Connections to one file, opened when needed. Verbs go through ``writing`` and ``reading``."""

    def __init__(self, path: str, *, timeout: float, full: bool) -> None:
        self.path = path
        self.timeout = timeout
        self.full = full
        self.closed = False
        self.poisoned = False
        self._write_lock = threading.RLock()
        self._read_lock = threading.RLock()
        self._writer: Connection | None = None
        self._reader: Connection | None = None
        self._reader_stale = False
        self._inode = (0, 0)
        self._beside: dict[str, tuple[tuple[int, int], int]] = {}
        self._looked = 0.0
        self._sync = ""
        self.name = ""
        """What the file is called inside."""
        self.cells = "ON"
        """Whether a page with a bad cell is refused as a whole."""
        self.busy: object | None = None
        self.reader_busy: object | None = None
        self._got_write = self._got_read = False
        with _opening:
            self._create()
            self.order = next(_counter)
            with self._write_lock:
                self._open_writer()
                _databases.add(self)

    # -- writing

    def writing(self, sync: bool) -> _Writing:
        """A write transaction: ``with db.writing(sync) as conn``. An error out of its COMMIT is CommitFailed."""
        return _Writing(self, sync)

    def lock_writer(self, owner: object) -> Connection:
        """Take the writing connection for ``owner``; it must not be in use by this same thread."""
        self.usable()
        try:
            if not self._write_lock.acquire(timeout=self.timeout):
                raise Unavailable(f"{self.path} is in use", "another thread kept writing", "Try again, or raise timeout.")
            if self.busy is not None:  # the lock is re-entrant: only this thread itself can come here
                self._write_lock.release()
                raise UsageError(
                    "the store is written to from inside one of its own transactions",
                    "a transactional tool, or the body of connection(), called it",
                    "Use the connection that was given, and the store after it.",
                )
            self.busy = owner
            self.usable()
            if self._writer is not None and self._writer.authorizer is not None:
                # Ctrl-C came before a tool's guard was taken off: left on, it would refuse every later write of this process.
                self._writer.set_commit_hook(None)
                self._writer.authorizer = None
            if self._writer is not None and self._writer.in_transaction:
                self.rollback()  # Ctrl-C came between the last transaction and its end
            return self._writer if self._writer is not None and self._in_place() else self._open_writer()
        except BaseException as error:
            if self.busy is None and self._write_lock._is_owned():  # type: ignore[attr-defined]
                self._write_lock.release()  # Ctrl-C came between taking the lock and saying so
            self.unlock_writer(owner)
            if isinstance(error, apsw.Error):
                raise translate(error, self.path) from error
            raise

    def unlock_writer(self, owner: object) -> None:
        """End what ``owner`` has begun, if anything: may be called once too often."""
        if self.busy is owner and not self.poisoned:
            try:
                self.rollback()
            finally:
                self.busy = None
                self._write_lock.release()

    def level(self, conn: Connection, sync: bool) -> None:
        # Inside a transaction SQLite refuses this pragma, so it is chosen before; it costs a microsecond.
        level = "PRAGMA synchronous=FULL" if sync and self.full else "PRAGMA synchronous=NORMAL"
        if level != self._sync:
            self._sync = ""
            conn.execute(level)
            self._sync = level

    def rollback(self) -> None:
        """End the transaction, if there still is one (SQLite ends it by itself after some errors)."""
        conn = self._writer
        try:
            if conn is not None and conn.in_transaction:
                conn.execute("ROLLBACK")
        except apsw.Error:
            self._writer = _shut(conn)  # its transaction ends with it
            self._beside = {}  # and the log, if it was the last connection: the next writer looks anew

    # -- reading

    def reading(self) -> _Reading:
        """A read transaction: one snapshot, ended when the block is left."""
        return _Reading(self)

    # -- opening and closing

    def _create(self) -> None:
        # Made here and not by SQLite, which would make it readable for all. Nothing in this process can have locks on a
        # file that did not exist, so that closing this descriptor drops none.
        try:
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        except FileExistsError:
            pass
        except OSError as error:
            raise Unavailable(
                f"{self.path} cannot be made",
                error.strerror or str(error),
                "Make its folder, or open another file.",
                path=self.path,
            ) from error

    def _connect(self) -> Connection:
        # Never with SQLITE_OPEN_CREATE: if the file was removed under us, that must not look like an empty store.
        conn = Connection(self.path, flags=apsw.SQLITE_OPEN_READWRITE, statementcachesize=100)
        try:
            conn.set_busy_handler(_Patience(self.timeout))
            conn.execute(f"PRAGMA trusted_schema=OFF; PRAGMA cell_size_check={self.cells}; PRAGMA foreign_keys=OFF")
            if sys.platform == "darwin":
                conn.execute("PRAGMA fullfsync=ON; PRAGMA checkpoint_fullfsync=ON")
        except BaseException:
            _shut(conn)
            raise
        return conn

    def _open_writer(self) -> Connection:
        self._writer = _shut(self._writer)
        self._sync = ""
        until = time.monotonic() + self.timeout
        while True:
            conn = None
            try:
                st = os.stat(self.path)
                conn = self._connect()
                conn.execute("PRAGMA page_size=8192")
                if conn.rows("PRAGMA journal_mode=WAL") != [("wal",)]:
                    raise Unavailable(
                        f"{self.path} cannot use a write-ahead log", "", "Put it on a local disk.", path=self.path
                    )
                conn.execute("PRAGMA wal_autocheckpoint=1000")
                self.name = prepare(conn, self.path)
            except (apsw.BusyError, apsw.LockedError) as error:
                # The switch to WAL does not ask the busy handler when two do it at once.
                _shut(conn)
                if time.monotonic() >= until:
                    raise translate(error, self.path) from error
                time.sleep(random.uniform(0.0005, 0.005))
            except apsw.Error as error:
                _shut(conn)
                raise translate(error, self.path) from error
            except FileNotFoundError as error:
                raise self._moved() from error
            except BaseException:
                _shut(conn)
                raise
            else:
                self._inode = (st.st_dev, st.st_ino)
                self._writer = conn
                # While another connection is open, the first look, when they were opened, holds.
                if self._reader is None or self._reader_stale or not self._beside:
                    self._beside = {suffix: (at, 0) for suffix in SIDES if (at := inode(self.path + suffix)) is not None}
                return conn

    def _in_place(self) -> bool:
        """Whether the path still leads to the file that is open: what is written to one that was removed is lost."""
        try:
            st = os.stat(self.path)
        except FileNotFoundError:
            raise self._moved() from None
        if (st.st_dev, st.st_ino) == self._inode:
            # Two stats more are 2 % of a commit: those that follow each other closely share them.
            if (now := time.monotonic()) < self._looked + LOOK:
                return True
            if wrong := self.wrong_files():
                raise Unavailable(
                    f"{wrong[0]} {wrong[1]} while {self.path} is in use",
                    "what is written here would not be seen by others, and could be lost",
                    "Copy all files of the store aside, end every process that uses it, and open it anew.",
                    path=wrong[0],
                )
            self._looked = now
            return True
        self._reader_stale = True
        return False

    def wrong_files(self) -> tuple[str, str] | None:
        """What was done to the log, or to the memory that is shared over it: two stats, and never a descriptor."""
        self._looked = 0.0
        for suffix, (at, size) in self._beside.items():
            path = self.path + suffix
            try:
                st = os.stat(path)
            except OSError:
                return path, "was removed"
            if (st.st_dev, st.st_ino) != at:
                return path, "was replaced"
            # Checkpoints of ours never make it shorter; those of a tool may.
            if st.st_size < size and (wrong := wrong_log(self.path)):
                return path, wrong
            if st.st_size != size:
                self._beside[suffix] = (at, st.st_size)
        return None

    def _moved(self) -> Unavailable:
        return Unavailable(
            f"{self.path} is gone",
            "it was moved or removed while in use",
            "Put it back, or open the store anew.",
            path=self.path,
        )

    def lock_reader(self, owner: object) -> Connection:
        """Take the reading connection for ``owner``."""
        self.usable()
        try:
            if not self._read_lock.acquire(timeout=self.timeout):
                raise Unavailable(f"{self.path} is in use", "another thread kept reading", "Try again, or raise timeout.")
            if self.reader_busy is not None:
                self._read_lock.release()
                raise UsageError("the store is read from inside one of its own reads", "", "Read one after the other.")
            self.reader_busy = owner
            self.usable()
            if self._reader_stale:
                self._reader = _shut(self._reader)
                self._reader_stale = False
            conn = self._reader
            if conn is None:
                conn = self._connect()
                conn.execute("PRAGMA query_only=ON")
                self._reader = conn
            elif conn.in_transaction:
                conn.execute("ROLLBACK")
            return conn
        except BaseException as error:
            if self.reader_busy is None and self._read_lock._is_owned():  # type: ignore[attr-defined]
                self._read_lock.release()
            self.end_read(owner)
            if isinstance(error, apsw.Error):
                raise translate(error, self.path) from error
            raise

    def end_read(self, owner: object) -> None:
        if self.reader_busy is owner and not self.poisoned:
            conn = self._reader
            try:
                if conn is not None and conn.in_transaction:
                    conn.execute("COMMIT")
            except apsw.Error:
                self._reader = _shut(conn)
            finally:
                self.reader_busy = None
                self._read_lock.release()

    def usable(self) -> None:
        if self.closed:
            raise UsageError(f"the store {self.path} is closed", "", "Open it again.")
        if self.poisoned:
            raise UsageError(
                f"the store {self.path} cannot be used in this process",
                "it was forked in the middle of a transaction",
                "Open a store of its own in the child.",
            )

    def close(self) -> None:
        with self._write_lock:
            if self.busy is not None:
                raise UsageError("the store is closed from inside one of its own transactions", "", "Close it after them.")
            with self._read_lock:
                self.closed = True
                self._drop()

    def _drop(self) -> None:
        # The reader first: the last connection to go folds the log into the file, which needs one that may write.
        self._reader = _shut(self._reader)
        self._writer = _shut(self._writer)

    def connections_on_file(self) -> int:
        """How many connections this process has to the same file, through this store and others."""
        return sum((db._writer is not None) + (db._reader is not None) for db in list(_databases) if db._inode == self._inode)

    # -- fork

    def _before_fork(self) -> None:
        # A lock that does not come in time belongs to a thread that is in the middle of something: the child goes without.
        self._got_write = self._write_lock.acquire(timeout=self.timeout)
        self._got_read = self._read_lock.acquire(timeout=self.timeout)
        if self._got_read and self.reader_busy is None:
            self._reader = _shut(self._reader)
        if self._got_write and self.busy is None:
            self._writer = _shut(self._writer)
        if self._writer is None and self._reader is None:
            self._beside = {}  # the last of all connections takes the log along: who opens it again finds another
        else:
            import ctypes  # noqa: F401  (here, not in the child, where another thread may have held the import lock)

    def _after_in_parent(self) -> None:
        if self._got_read:
            self._read_lock.release()
        if self._got_write:
            self._write_lock.release()

    def _after_in_child(self) -> None:
        for conn in (self._writer, self._reader):
            if conn is not None:
                self.poisoned = True
                _leak(conn)
        self._writer = self._reader = None
        if self._got_read:
            self._read_lock.release()
        else:
            self._read_lock = threading.RLock()
        if self._got_write:
            self._write_lock.release()
        else:
            self._write_lock = threading.RLock()


class _Writing:
    __slots__ = ("conn", "db", "foreign", "owner", "sync")

    def __init__(self, db: Database, sync: bool) -> None:
        self.foreign: BaseException | None = None
        """An error that is not SQLite's word to us, whatever its class: it goes on as it is."""
        self.owner = object()  # and not self, which would then never be collected
        self.sync = sync
        self.db = db

    def __enter__(self) -> Connection:
        db = self.db
        try:
            self.conn = conn = db.lock_writer(self.owner)
            db.level(conn, self.sync)
            conn.execute("BEGIN IMMEDIATE")
            return conn
        except BaseException as error:
            db.unlock_writer(self.owner)
            if isinstance(error, apsw.Error):
                raise translate(error, db.path) from error
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        db, foreign = self.db, self.foreign
        self.foreign = None  # its traceback leads back here
        try:
            # In a child that was forked in here, nothing of this transaction is its own.
            if error is None and not db.poisoned:
                try:
                    self.conn.execute("COMMIT")
                except apsw.Error as failure:
                    raise CommitFailed(translate(failure, db.path)) from failure
            elif isinstance(error, apsw.Error | UnicodeDecodeError) and error is not foreign:
                raise translate(error, db.path) from error
        finally:
            db.unlock_writer(self.owner)

    def __del__(self) -> None:
        # Ctrl-C may come between two instructions of the above; then this is what ends the transaction.
        if (db := getattr(self, "db", None)) is not None:
            db.unlock_writer(self.owner)


class _Reading:
    __slots__ = ("db", "owner")

    def __init__(self, db: Database) -> None:
        self.owner = object()
        self.db = db

    def __enter__(self) -> Connection:
        try:
            conn = self.db.lock_reader(self.owner)
            conn.execute("BEGIN")
            return conn
        except BaseException as error:
            self.db.end_read(self.owner)
            if isinstance(error, apsw.Error):
                raise translate(error, self.db.path) from error
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.db.end_read(self.owner)
        if isinstance(error, apsw.Error | UnicodeDecodeError):
            raise translate(error, self.db.path) from error

    def __del__(self) -> None:
        if (db := getattr(self, "db", None)) is not None:
            db.end_read(self.owner)


def _shut(conn: Connection | None) -> Connection | None:
    if conn is not None:
        conn._owned = False
        try:
            conn.close(True)
        except apsw.Error:
            pass  # what could be said was said by the statement that failed
    return None


def _leak(conn: Connection) -> None:
    """Keep an inherited connection from ever being closed in this process.

    Closing would run SQLite's last-connection rites without the locks that the copy believes to hold: the log could be
    deleted under the parent.
    """
    import ctypes

    ctypes.pythonapi.Py_IncRef(ctypes.py_object(conn))


# -- fork hooks. Registered after those of forking (so that is imported above), and hooks run backwards before a fork: these
# locks are taken first. They are the outer ones, held while the locks of oslock are taken.

_opening = threading.RLock()
_databases: weakref.WeakSet[Database] = weakref.WeakSet()
_counter = itertools.count()
_over_fork: list[Database] = []


def _before() -> None:
    _opening.acquire()
    _over_fork[:] = sorted((db for db in _databases if not db.closed), key=lambda db: db.order)
    for db in _over_fork:
        db._before_fork()


def _each(after: Callable[[Database], None]) -> None:
    for db in reversed(_over_fork):
        after(db)
    _over_fork.clear()
    _opening.release()


def _in_parent() -> None:
    _each(Database._after_in_parent)


def _in_child() -> None:
    over = list(_over_fork)
    _each(Database._after_in_child)
    # SQLite keeps its locks by file: one connection that was in the middle of something spoils all others on the same one.
    spoiled = {db._inode for db in over if db.poisoned}
    for db in over:
        db.poisoned |= db._inode in spoiled


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)

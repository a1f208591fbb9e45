"""The folders of a file store: locks, journals as they grow, and documents that are there whole or not at all.

An append to a journal is the commit. It is acknowledged when it has been synced, and then the file ``.acked`` beside it says how
far: what cannot be read beyond that was never acknowledged, was torn by a crash, and is cut; what cannot be read before it is damage.
"""

from __future__ import annotations

import errno
import hashlib
import os
import random
import secrets
import stat
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import RLock
from typing import Any

from safepoint import _probe
from safepoint.errors import Damaged, SafepointError, Unavailable, UsageError
from safepoint.rows import replace
from safepoint.stores import filenames
from safepoint.stores.file_journal import Book, bare, begin, closed
from safepoint.stores.file_rows import checksum, from_document, parse
from safepoint.stores.fileops import FileOps, is_other, translate
from safepoint.stores.oslock import LockFile

__all__ = ["IGNORED", "Folders", "Kept"]

ACKED, DELETED, LEASES, LOCKS, MADE, TEMP = ".acked", ".deleted-", ".leases", ".locks", ".new-", ".tmp"
IGNORED = b"# What is written here by safepoint is for git, but for what lives no longer than a process.\n.*\n!.gitignore\n"
LEASE_BYTES = 61
"""Bits of the bytes that leases lock; those of tasks lie above."""

_holders: dict[tuple[str, int], object] = {}
_all: weakref.WeakSet[Folders] = weakref.WeakSet()


@dataclass(slots=True)
class Kept:
    """A journal that has been read, and the file as it was then."""

    book: Book
    place: tuple[int, int]
    size: int
    """Up to where it could be read."""
    end: int
    """Of the file; beyond ``size`` lies what a crash has torn."""
    stamp: int
    ended: bool = True
    """Whether the last line has its line feed."""

    @property
    def tail(self) -> bytes:
        """What stands right before ``size``, if nobody has changed it since."""
        return b'"sum":"%s"}\n' % self.book.sum.encode()

    acked: bool = False
    """Whether it is on disk how far this journal was acknowledged, or at least how far at some time."""
    writing: bool = False
    """A line is on its way, and is no part of the book yet."""


class Folders:
    """One root, and what is known of it. The lock of a task is held by the callers where they write."""

    def __init__(self, path: str, ops: FileOps, timeout: float, full: bool) -> None:
        self.path = path
        self.ops = ops
        self.timeout = timeout
        self.full = full
        self.locks = LockFile(os.path.join(path, LOCKS))
        self.mutex = RLock()
        """Held while a book is read or changed; never while a task's lock is waited for."""
        self.kept: dict[str, Kept] = {}
        self.closed = False
        _all.add(self)

    def usable(self) -> None:
        if self.closed:
            raise UsageError(f"the store file:///{self.path} is closed", "", "Open it again.")

    # -- the root

    @contextmanager
    def root(self) -> Iterator[int]:
        """The root's descriptor; what the system says against anything inside comes out in the words of the library."""
        self.usable()
        try:
            with self.ops.opened(self.ops.folder(self.path)) as fd:
                yield fd
        except OSError as error:
            if isinstance(error, SafepointError):
                raise
            raise translate(error, self.place_of(error)) from error

    def place_of(self, error: OSError) -> str:
        return os.path.join(self.path, error.filename if isinstance(error.filename, str) else "")

    def prepare(self) -> None:
        """Make the root, and sweep what dead processes have left."""
        made = not os.path.isdir(self.path)
        if made:
            try:
                os.makedirs(self.path, 0o700, exist_ok=True)
                os.chmod(self.path, 0o700)
            except OSError as error:
                raise translate(error, self.path) from error
        ops = self.ops
        with self.root() as root:
            names = set(ops.list(root))
            if made and self.full:
                with ops.opened(ops.folder(os.path.dirname(self.path))) as parent:
                    ops.fsync(parent)
            if any(not name.startswith(".") for name in names) and not self._is_ours(root, names):
                raise UsageError(
                    f"{self.path} holds other things than a store",
                    "it is not empty, and safepoint has not made it",
                    "Name a folder of its own, as in file:///checkpoints.",
                    path=self.path,
                )
            for name in (LEASES, TEMP):
                ops.close(ops.child(name, root, create=True, sync=self.full))
            if ".gitignore" not in names:
                self.put(root, ".gitignore", IGNORED, root)
            with ops.opened(ops.child(TEMP, root)) as temp:
                for name in ops.list(temp):
                    self._sweep(name, temp, file=True)
            for name in names:
                if name.startswith(DELETED):
                    ops.remove_tree(name, root)
                elif name.startswith(MADE):
                    self._sweep(name, root, file=False)

    def _is_ours(self, root: int, names: set[str]) -> bool:
        if LEASES in names:
            return True
        try:  # a clone
            return ".gitignore" in names and self.get(".gitignore", root).startswith(IGNORED[:40])
        except OSError:
            return False

    def _sweep(self, name: str, fd: int, *, file: bool) -> None:
        """Remove what a process was making, if it is dead: its name says which byte was locked meanwhile."""
        try:
            byte = int(name.removeprefix(MADE).partition("-")[0], 16)
        except ValueError:
            return  # none of ours
        if self.locks.is_held(byte) is False:
            try:
                self.ops.unlink(name, fd) if file else self.ops.remove_tree(name, fd)
            except FileNotFoundError:
                pass  # another process came first

    # -- one task at a time

    def byte(self, name: str) -> int:
        return 1 << LEASE_BYTES | int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")

    @contextmanager
    def lock(self, name: str, task: str) -> Iterator[None]:
        """Hold a task against all other writers, in this process and in others."""
        self.usable()
        byte = self.byte(name)
        key, owner = (self.locks.path, byte), object()
        until, pause = time.monotonic() + self.timeout, 0.0002
        try:
            # A place in this process first: the system's lock is of the process, and grants itself twice to one.
            while not (_holders.setdefault(key, owner) is owner and self.locks.claim(byte) is not None):
                if time.monotonic() >= until:
                    raise Unavailable(
                        f"task {task!r} cannot be written to",
                        f"other writers have held its lock for {self.timeout:g} s",
                        "Try again; nothing was written.",
                        task=task,
                    )
                time.sleep(pause * (0.5 + random.random()))
                pause = min(pause * 1.5, 0.01)
            yield
        finally:
            if _holders.get(key) is owner:
                self.locks.free(byte)
                del _holders[key]

    # -- files that are there whole or not at all

    def put(self, root: int, name: str, data: bytes, folder: int, *, byte: int = 0, sync: bool = True) -> None:
        """Write a file beside all others and give it its name. One folder takes all unfinished ones: it is swept at a glance."""
        ops, sync = self.ops, sync and self.full
        with self.made_under(byte) as held, ops.opened(ops.child(TEMP, root, create=True, sync=sync)) as temps:
            temp = f"{held:x}-{secrets.token_hex(8)}"
            try:
                with ops.opened(ops.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, temps)) as fd:
                    ops.chmod(fd, 0o600)  # whatever the umask
                    ops.write_all(fd, data)
                    if sync:
                        ops.fsync(fd)
                _probe.at("file.written")
                ops.rename(temp, name, temps, folder)
            except BaseException:
                try:
                    ops.unlink(temp, temps)
                except OSError:
                    pass  # it has its name already, or the next open sweeps it
                raise
        if sync:
            ops.fsync(folder)
        _probe.at("file.renamed")

    @contextmanager
    def made_under(self, byte: int) -> Iterator[int]:
        """The byte that is locked while a file is made, which says that it is no leftover: one of its own if no task is locked."""
        claim = None
        while not byte and claim is None:
            claim = self.locks.claim(secrets.randbits(LEASE_BYTES))
        try:
            yield byte if claim is None else claim.byte
        finally:
            if claim is not None:
                claim.free()

    def get(self, name: str, folder: int) -> bytes:
        with self.ops.opened(self.ops.open(name, os.O_RDONLY, folder)) as fd:
            return self.ops.read_all(fd)

    @contextmanager
    def branch(self, task: int, space: str, branch: str, *, create: bool = False) -> Iterator[int]:
        """The folder of a branch, by the descriptor of its task's."""
        names = [filenames.encode(branch)]
        if space:
            names = [filenames.SPACES, filenames.encode(space), *names]
        fds = [task]
        try:
            for name in names:
                fds.append(self.ops.child(name, fds[-1], create=create, sync=self.full))
            yield fds[-1]
        finally:
            for fd in fds[1:]:
                self.ops.close(fd)

    def place(self, task: str, space: str, branch: str, seq: int) -> str:
        """Where a document lies, for people: relative to the root."""
        parts = [filenames.encode(task)]
        if space:
            parts += [filenames.SPACES, filenames.encode(space)]
        return "/".join([*parts, filenames.encode(branch), filenames.document(seq)])

    # -- journals

    def book(self, root: int, task: str, *, writer: bool = False) -> Book | None:
        """What the task's journal says now; None if there is no such task. Under ``mutex``; a writer holds the task's lock too."""
        kept = self.journal(root, task, writer=writer)
        return kept.book if kept is not None and kept.book.exists else None

    def journal(self, root: int, task: str, *, writer: bool = False) -> Kept | None:
        name, ops = filenames.encode(task), self.ops
        try:
            folder = ops.folder(name, root)
        except FileNotFoundError:
            self.kept.pop(name, None)
            return None
        with ops.opened(folder):
            # First how far it is acknowledged, then the journal: the other way round it may have grown in between.
            acked = self._acked(folder)
            try:
                fd = ops.open(filenames.JOURNAL, os.O_RDONLY, folder)
            except FileNotFoundError:
                self.kept.pop(name, None)
                names = ops.list(folder)
                if filenames.JOURNAL in names or not self._is_there(folder, name, root):
                    return self.journal(root, task, writer=writer)  # begun at this moment, or deleted
                if self.has_documents(folder):
                    if filenames.JOURNAL in ops.list(folder) or not self._is_there(folder, name, root):
                        return self.journal(root, task, writer=writer)  # the first save came in between
                    raise Damaged(
                        f"the journal of task {task!r} is missing",
                        "there are documents, and no line that tells of them",
                        f"Restore {name}/{filenames.JOURNAL} (git checkout, a backup); calls and heads are in it alone.",
                        task=task,
                    ) from None
                return None
            with ops.opened(fd):
                st = ops.fstat(fd)
                if not stat.S_ISREG(st.st_mode):
                    raise IsADirectoryError(
                        errno.EISDIR, os.strerror(errno.EISDIR), os.path.join(self.path, name, filenames.JOURNAL)
                    )
                place, kept = (st.st_dev, st.st_ino), self.kept.get(name)
                if kept is not None and kept.place == place:
                    if kept.writing or (kept.end, kept.stamp) == (st.st_size, st.st_mtime_ns):
                        if writer:
                            self._leftovers(folder, kept.book)
                        return kept
                    if kept.end == kept.size < st.st_size and not kept.book.gaps and kept.ended:
                        try:
                            data = ops.read_all(fd, kept.size - len(kept.tail))
                            if not data.startswith(kept.tail):
                                raise Damaged("what stood before is not there any more", "")
                            self._grow(kept, data[len(kept.tail) :], acked)
                        except Damaged:
                            pass  # it is another journal by now, or this one was changed: read all of it
                        else:
                            kept.stamp = st.st_mtime_ns
                            if writer:
                                self._leftovers(folder, kept.book)
                            return kept
                # Until all of it was read, nothing is known: an interrupt must not leave half of it.
                self.kept.pop(name, None)
                fresh = Kept(Book.of(task), place, 0, 0, st.st_mtime_ns)
                self._grow(fresh, ops.read_all(fd), acked, whole=True)
                self._cut_back(folder, fresh, acked)
                if fresh.book.gaps and not writer and self._has_changed(folder, st):
                    # Read without a lock, while somebody wrote: what looked like damage may be a matter of moments.
                    return self.journal(root, task)
            if fresh.book.gaps:
                fresh.book.exists = True  # whatever the first line said
                fresh.book.leap(self._rescue(folder, fresh.book))
            if writer:
                self._leftovers(folder, fresh.book)
            self.kept[name] = fresh
            return fresh

    def _is_there(self, folder: int, name: str, root: int) -> bool:
        """Whether an open folder still has its name."""
        opened = self.ops.fstat(folder)
        try:
            named = self.ops.lstat(name, root)
        except FileNotFoundError:
            return False
        return (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)

    def _has_changed(self, folder: int, before: os.stat_result) -> bool:
        try:
            now = self.ops.lstat(filenames.JOURNAL, folder)
        except FileNotFoundError:
            return True
        return (now.st_ino, now.st_size, now.st_mtime_ns) != (before.st_ino, before.st_size, before.st_mtime_ns)

    def _grow(self, kept: Kept, data: bytes, acked: tuple[str, int] | None, *, whole: bool = False) -> None:
        """Take in what has been added. With ``whole``, damage is noted in the book, else it is raised."""
        book = kept.book
        lines = data.split(b"\n")
        ended = not lines[-1]
        if ended:
            lines.pop()
        at = kept.size
        last = len(lines) - 1
        kept.end = at + len(data)
        for i, line in enumerate(lines):
            after = at + len(line) + (i < last or ended)
            if stripped := bare(line):
                try:
                    book.read(stripped)
                except Damaged as error:
                    if not whole:
                        raise
                    sure = acked[1] if acked is not None and acked[0] == book.name else None
                    # Lines that wait for no disk may be torn one after the other; where nobody knows, only the last can be, and
                    # only if it has no end.
                    if at >= sure if sure is not None else i == last and not ended:
                        kept.size, kept.ended = at, True
                        break
                    book.skip(i + 1, ", ".join(filter(None, (error.what, error.why))), line)
                    with suppress(Damaged):
                        book.read(stripped)  # it may be whole itself, and what is lost have come before it
            at = after
        else:
            kept.size, kept.ended = at, ended
        # After a checkout of an earlier moment what is noted lies beyond the end, and what a crash leaves there would be damage.
        kept.acked = acked is not None and acked[0] == book.name and acked[1] <= kept.end
        if whole and book.lines <= book.rows:
            book.skip(len(lines) + 1, "lines are missing")

    def _acked(self, folder: int) -> tuple[str, int] | None:
        try:
            name, size = self.get(ACKED, folder).split()
            return name.decode("ascii"), int(size)
        except FileNotFoundError:
            return None
        except (ValueError, UnicodeDecodeError):
            return None

    def _cut_back(self, folder: int, kept: Kept, acked: tuple[str, int] | None) -> None:
        """Note a journal that knows less than the documents beside it. The next
        number may be there: of a commit that is under way, or that a crash cut off."""
        book = kept.book
        newest = book.numbers.seq
        more = [seq for _, fd in self._branches(folder) for seq in self._seqs(fd) if seq > newest]
        shorter = acked is not None and acked[0] == book.name and kept.end < acked[1]
        if more and (shorter or max(more) > newest + 1):
            book.skip(book.lines + 1, f"lines are missing at its end: checkpoint {max(more)} is there, and none tells of it")

    def has_documents(self, folder: int) -> bool:
        return any(self._seqs(fd) for _, fd in self._branches(folder))

    def _seqs(self, branch: int) -> list[int]:
        return [seq for name in self.ops.list(branch) if (seq := filenames.seq_of(name)) is not None]

    def _branches(self, folder: int) -> Iterator[tuple[str, int]]:
        """The folders of all branches of all spaces, each open until the next is asked for."""
        for name, outer in self._inner(folder):
            if name != filenames.SPACES:
                yield name, outer
                continue
            for space, inner in self._inner(outer):
                for branch, fd in self._inner(inner):
                    yield f"{name}/{space}/{branch}", fd

    def _inner(self, fd: int) -> Iterator[tuple[str, int]]:
        ops = self.ops
        for name in ops.list(fd):
            if name.startswith(".") or not ops.is_folder(name, fd):
                continue
            try:
                inner = ops.child(name, fd)
            except FileNotFoundError:
                continue  # deleted meanwhile
            with ops.opened(inner):
                yield name, inner

    def _rescue(self, folder: int, book: Book) -> bool:
        """Take in the documents that only damaged lines told of: they say themselves what they are. Returns whether there are any,
        whole or not."""
        swept = set(book.swept)
        found = [self._rescue_from(fd, book, swept) for _, fd in self._branches(folder)]  # all of them, found or not
        return any(found)

    def _rescue_from(self, branch: int, book: Book, swept: set[tuple[str, str, int]]) -> bool:
        task, more = book.row.task, False
        for name in self.ops.list(branch):
            seq = filenames.seq_of(name)
            if seq is None or seq in book.checkpoints:
                continue
            more = True
            try:
                row = from_document(task, parse(self.get(name, branch)))
                row.check(task, "")
            except (SafepointError, FileNotFoundError):
                continue
            except OSError as error:
                if not is_other(error):
                    raise  # not now, perhaps; it is not to be forgotten
                continue
            if row.seq == seq and (row.space, row.branch, seq) not in swept:
                book.checkpoints[seq] = replace(row, root=b"")
                book.sums[seq] = checksum(row.root)
                book.ids.setdefault((row.space, row.id), seq)
        return more

    def _leftovers(self, folder: int, book: Book) -> None:
        """Delete the documents that a removal had given up before it was killed."""
        for space, branch, seq in book.swept:
            try:
                with self.branch(folder, space, branch) as fd:
                    self.ops.unlink(filenames.document(seq), fd)
            except FileNotFoundError:
                pass
        book.swept = []  # here only, that they are not looked for at each write

    def begin(self, root: int, task: str, now: int) -> tuple[int, Kept]:
        """The folder of a new task, with a journal that says nothing yet; or of one that was begun so far before."""
        name, ops = filenames.encode(task), self.ops
        folder = ops.child(name, root, create=True, sync=self.full)
        try:
            with self.mutex:
                kept = self.journal(root, task, writer=True)
            if kept is None:
                data, _ = begin(task, now)
                self.put(root, filenames.JOURNAL, data, folder, byte=self.byte(name))
                with self.mutex:
                    kept = self.journal(root, task, writer=True)
            if kept is None:
                why = "something else moves what lies in the store"
                raise Unavailable(f"the folder of task {task!r} was taken away as it was begun", why, "Save again.", task=task)
            return folder, kept
        except BaseException:
            ops.close(folder)
            raise

    def append(
        self, root: int, folder: int, task: str, kept: Kept, body: dict[str, Any], *, id: str = "", sync: bool = True
    ) -> int:
        """Commit a line, and take it into the book; return its bytes. Under the task's lock.

        Raises:
            StoreFull, Unavailable: it is not there; or Unavailable with ``unknown``, if even that could not be made sure.
        """
        ops, sync = self.ops, sync and self.full
        line, _ = closed(body, kept.book.sum)
        data = line if kept.ended else b"\n" + line
        # Before it is written: a line that is there and cannot be read would be the end of the task.
        take = kept.book.understood(line[:-1])
        start = kept.size
        kept.writing = True
        try:
            self.secure(root, folder, kept)
            with ops.opened(ops.open(filenames.JOURNAL, os.O_WRONLY | os.O_APPEND, folder)) as fd:
                self._same(fd, kept, task)
                try:
                    if kept.end > start:  # torn by a crash
                        ops.truncate(fd, start)
                        if sync:
                            ops.fsync(fd)
                        kept.end = start
                    ops.write_all(fd, data)
                    _probe.at("commit.line")
                    if sync:
                        ops.fsync(fd)
                except BaseException as error:
                    self._undo(fd, start, task, id, error)
                    raise
                st = ops.fstat(fd)
            with self.mutex:
                take()
                kept.size = kept.end = start + len(data)
                kept.stamp, kept.ended, kept.writing = st.st_mtime_ns, True, False
        except BaseException:
            self.kept.pop(filenames.encode(task), None)  # to be read anew
            raise
        if sync:
            self._acknowledge(folder, kept)
        return len(data)

    def secure(self, root: int, folder: int, kept: Kept) -> None:
        """Make sure that it is on disk how far the journal is acknowledged: before a crash can leave anything beyond."""
        if self.full and not kept.acked:
            self._acknowledge(folder, kept, root)

    def _same(self, fd: int, kept: Kept, task: str) -> None:
        """Refuse to write to another journal than the one that was read: somebody (git) has put it there since."""
        st = self.ops.fstat(fd)
        if ((st.st_dev, st.st_ino), st.st_size) != (kept.place, kept.end):
            place = f"{self.path}/{filenames.encode(task)}/{filenames.JOURNAL}"
            raise Unavailable(
                f"{place} has been changed by somebody else at this moment",
                "it is not the file that was read right before",
                "Nothing was written. Read the task again.",
                task=task,
                path=place,
                swapped=True,
            )

    def _undo(self, fd: int, start: int, task: str, id: str, error: BaseException) -> None:
        """Take back a line that was not acknowledged: whoever asks must find it there whole, or not at all."""
        try:
            self.ops.truncate(fd, start)
            if self.full:
                self.ops.fsync(fd)
        except OSError as again:
            raise Unavailable(
                f"whether the last write to task {task!r} landed is not known",
                f"{error}; then {again.strerror}",
                f"Ask for checkpoint id {id!r} once the disk answers again, or read the task again.",
                id=id,
                task=task,
                unknown=True,
            ) from error
        if isinstance(error, OSError) and not isinstance(error, SafepointError):
            path = f"{self.path}/{filenames.encode(task)}/{filenames.JOURNAL}"
            said = translate(error, path)
            said.why += "; nothing of this write is stored"
            raise said from error

    def _acknowledge(self, folder: int, kept: Kept, root: int | None = None) -> None:
        """Note how far the journal is on disk. With ``root`` surely; else soon: after a power cut it says less than it could."""
        data = b"%s %020d\n" % (kept.book.name.encode("ascii", "replace"), kept.size)
        if root is not None:
            self.put(root, ACKED, data, folder, byte=self.byte(filenames.encode(kept.book.row.task)))
            kept.acked = True
            return
        try:
            with self.ops.opened(self.ops.open(ACKED, os.O_WRONLY, folder)) as fd:
                if self.ops.fstat(fd).st_nlink == 1:  # else it is another file as well, of somebody else
                    self.ops.write_all(fd, data)
        except OSError:
            pass

    def rewrite(self, root: int, folder: int, task: str, kept: Kept, lines: bytes) -> None:
        """Put a whole new journal in the place of the old one."""
        name = filenames.encode(task)
        with self.mutex:
            self.kept.pop(name, None)
        self.put(root, filenames.JOURNAL, lines, folder, byte=self.byte(name))


def _in_child() -> None:
    _holders.clear()
    for folders in list(_all):
        folders.mutex = RLock()
        folders.kept.clear()


os.register_at_fork(after_in_child=_in_child)

"""Checkpoints as files for people: one indented JSON document each, and a journal of lines beside them.

Made for ``cat``, ``git diff`` and editing by hand; every state is stored whole, so what is big or long belongs into another store.
``<root>/<task>/<branch>/<seq>.json`` are the documents, ``<root>/<task>/journal.jsonl`` says which of them count; see docs/stores.md.
Leases are in file_leases, locks and journals in file_folder and file_journal, what is said of whole tasks in file_whole.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from typing import Any

from safepoint import _probe
from safepoint.errors import Damaged, NewerFormat, SafepointError, UsageError
from safepoint.model import Finding, Obj, check_id
from safepoint.rows import (
    BranchRow,
    CallRow,
    CheckpointRow,
    Commit,
    Committed,
    PauseRow,
    Pruned,
    TaskRow,
    WriteRow,
    replace,
)
from safepoint.stores import file_check, file_rows, filenames, folding, refusals
from safepoint.stores.base import Durability, Store
from safepoint.stores.file_folder import DELETED, LEASES, Folders, Kept
from safepoint.stores.file_journal import Book, rewritten
from safepoint.stores.file_leases import FileLeases, gapped, now
from safepoint.stores.file_mend import Mends
from safepoint.stores.file_whole import Whole
from safepoint.stores.fileops import FileOps, is_other, translate
from safepoint.stores.oslock import Claim

__all__ = ["FileStore"]

WRITTEN = 10_000
"""Documents whose hashes are remembered."""


class FileStore(FileLeases, Whole, Mends, Store):
    """A store in the folder ``path``, which may lie in a git repository. Shared by the threads and processes of one machine."""

    persistent = True
    chunked = False
    keep_latest = 20
    sets_unread_aside = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        timeout: float = 10.0,
        durability: Durability = "full",
        ops: FileOps | None = None,
    ) -> None:
        name = os.fspath(path)
        if not isinstance(name, str) or not name or "\0" in name:
            raise UsageError(f"{name!r} is no path of a folder", "", "Write it as file:///checkpoints.")
        if durability not in {"full", "process"}:
            raise UsageError(f"durability={durability!r} is unknown", "", "Use 'full' or 'process'.")
        if timeout < 0:
            raise UsageError(f"timeout={timeout!r} is below zero", "", "Give seconds.")
        self.path = os.path.realpath(name)
        self.url = f"file:///{self.path}"
        self.timeout = timeout
        self.durability = durability
        self._claims: dict[int, Claim] = {}
        self._written: dict[tuple[str, int], bytes] = {}
        """Hashes of documents that this process wrote, which need not be parsed to know that they can be read."""
        self._f = Folders(self.path, ops or FileOps(), timeout, durability == "full")
        try:
            self._f.prepare()
        except BaseException:
            self._f.locks.close()
            raise

    # -- writing

    def commit(self, commit: Commit) -> Committed:
        f, task, new = self._f, check_id(commit.task), commit.checkpoint
        _flat(commit)
        f.usable()
        _probe.at("commit.begin")
        # What takes its time is done before anybody has to wait for it.
        state = None if new is None else file_rows.unpack(new.root)
        sum = "" if new is None else file_rows.checksum(new.root)
        name = filenames.encode(task)
        with f.root() as root, f.lock(name, task):
            with f.mutex:
                book = f.book(root, task, writer=True)
                if book is not None and new is not None and (seq := book.ids.get((new.space, commit.id))) is not None:
                    there = book.checkpoints[seq]
                    head = book.head(new.space, new.branch)
                    return refusals.existing(commit, head, seq, there.branch, there.parent_seq, there.digest)
            if book is None and ((new is None and not commit.writes) or commit.guard is not None):
                raise refusals.no_task(task)
            if commit.guard is not None:
                self._check_guard(root, task, commit.guard)
            elif not commit.anyway:
                self._refuse_if_held(root, task)
            if book is not None:
                with f.mutex:
                    if new is None and book.last[0] == commit.id:
                        return book.repeated()
                    if commit.branches and book.gaps:
                        raise gapped(task, book)  # they may stand elsewhere, and there may be others
                    book.plan(commit, 0, sum)  # what is refused leaves no folder behind
                    if commit.moves_head and new is not None and commit.expect and not book.is_certain(new.space, new.branch):
                        raise gapped(task, book)  # it may have moved, and what it has moved to would be left out
            else:
                Book.of(task).plan(commit, 0, sum)
            folder, kept = f.begin(root, task, now())
            with f.ops.opened(folder):
                return self._write(root, folder, kept, commit, state, sum)

    def _write(self, root: int, folder: int, kept: Kept, commit: Commit, state: Any, sum: str) -> Committed:
        f, task = self._f, commit.task
        with f.mutex:
            body, row, done = kept.book.plan(commit, now(), sum)
        size = 0
        if row is None:
            _probe.at("commit.before")
            size = f.append(root, folder, task, kept, body, id=commit.id, sync=commit.sync)
        else:
            data = file_rows.document(task, row, state)
            size += len(data)
            with f.branch(folder, row.space, row.branch, create=True) as branch:
                file = filenames.document(row.seq)
                # Whether or not the line waits for the disk: a later one that does takes this line with it, and not the document.
                f.secure(root, folder, kept)
                f.put(root, file, data, branch, byte=f.byte(filenames.encode(task)))
                _probe.at("commit.before")
                try:
                    size += f.append(root, folder, task, kept, body, id=commit.id, sync=commit.sync)
                except BaseException as error:
                    details = error.details if isinstance(error, SafepointError) else {}
                    if not details.get("unknown"):
                        self._withdraw(task, row, branch, data, sure="swapped" in details)
                    raise
            if len(self._written) >= WRITTEN:
                self._written.clear()
            self._written[task, row.seq] = hashlib.sha256(data).digest()
        _probe.at("commit.after")
        return replace(done, bytes_written=size)

    def _withdraw(self, task: str, row: CheckpointRow, branch: int, data: bytes, *, sure: bool) -> None:
        """Remove a document that no line will tell of (surely, or as far as the journal says). If that fails, the next of its
        number takes its place."""
        f, file = self._f, filenames.document(row.seq)
        try:
            with f.root() as root, f.mutex:
                book = None if sure else f.book(root, task)
                # With another journal there may have come another document.
                if (book is None or row.seq not in book.checkpoints) and f.get(file, branch) == data:
                    f.ops.unlink(file, branch)
        except (OSError, SafepointError):
            pass

    # -- reading

    def _book(self, root: int, task: str) -> Book | None:
        return self._f.book(root, task)

    def task(self, task: str) -> TaskRow | None:
        with self._f.root() as root, self._f.mutex:
            book = self._book(root, task)
            return None if book is None else _told(book)

    def tasks(self, *, after: str | None = None, limit: int = 200) -> list[TaskRow]:
        f = self._f
        with f.root() as root:
            ids = sorted(id for id in self._ids(root) if after is None or id > after)
            rows: list[TaskRow] = []
            for id in ids:
                if len(rows) >= limit:
                    break
                try:
                    with f.mutex:
                        book = self._book(root, id)
                        row = None if book is None else _told(book)
                except FileNotFoundError:
                    continue  # deleted meanwhile
                except (SafepointError, OSError) as problem:
                    error = problem if isinstance(problem, SafepointError) else translate(problem, f.place_of(problem))
                    # One bad task must not hide the others; whoever asks for it gets the error.
                    row = TaskRow(task=id, reason=f"cannot be read: {error.why or error.what}")
                if row is not None:
                    rows.append(row)
            return rows

    def branches(self, task: str, space: str | None = "") -> list[BranchRow]:
        with self._f.root() as root, self._f.mutex:
            book = self._book(root, task)
            return [] if book is None else folding.branches_of(book.branches, space)

    def read(
        self, task: str, *, space: str = "", seq: int | None = None, branch: str | None = None, id: str | None = None
    ) -> tuple[CheckpointRow, Mapping[bytes, Obj]] | None:
        with self._f.root() as root:
            row: CheckpointRow | None = None
            while True:
                with self._f.mutex:
                    book = self._book(root, task)
                    if book is None:
                        return None
                    wanted = self._seq(book, task, space, seq, branch, id)
                    before, row = row, None if wanted is None else book.checkpoints.get(wanted)
                if row is None or row.space != space:
                    return None
                # What is missing or another's was removed since, perhaps, and its task begun anew; if the journal tells the same
                # of it when asked again, somebody else has done it.
                again = before is not None and (before.seq, before.id) == (row.seq, row.id)
                try:
                    return self._document(root, task, row), {}
                except FileNotFoundError:
                    if again:
                        raise self._damaged(task, row, "it is missing", "its file was deleted or moved") from None
                except Damaged:
                    if again:
                        raise

    def _seq(self, book: Book, task: str, space: str, seq: int | None, branch: str | None, id: str | None) -> int | None:
        if id is not None:
            found = book.ids.get((space, id))
        elif seq is not None:
            found = seq if seq in book.checkpoints else None
        else:
            if not book.is_certain(space, branch):
                raise gapped(task, book)
            at = book.branches.get((space, book.row.branch if branch is None else branch))
            return None if at is None else at.head.seq
        if found is None and book.gaps:
            raise gapped(task, book)
        return found

    def _document(self, root: int, task: str, row: CheckpointRow) -> CheckpointRow:
        """The whole row, from its file. FileNotFoundError if that is not there."""
        try:
            data = self._bytes_of(root, task, row)
        except OSError as error:
            if not is_other(error):
                raise
            raise self._damaged(task, row, "it is no file of its own", "a link, a folder or a pipe lies there") from error
        try:
            found = file_rows.parse(data)
            if found["safepoint"] > file_rows.LAYOUT:
                raise NewerFormat(
                    f"{self._place(task, row)} has layout {found['safepoint']}",
                    f"this safepoint reads up to {file_rows.LAYOUT}",
                    "Upgrade safepoint; the file is left as it is.",
                    task=task,
                    seq=row.seq,
                )
            whole = file_rows.from_document(task, found)
            if replace(whole, root=b"", pinned=row.pinned) != row:
                raise Damaged("its header is not what the journal says", "")
        except Damaged as error:
            raise self._damaged(task, row, error.what, error.why) from error
        return replace(whole, pinned=row.pinned)

    def _place(self, task: str, row: CheckpointRow) -> str:
        return self._f.place(task, row.space, row.branch, row.seq)

    def _damaged(self, task: str, row: CheckpointRow, what: str, why: str) -> Damaged:
        place = self._place(task, row)
        missing = what == "it is missing"
        at = f"{task}@{row.seq}"
        return Damaged(
            f"checkpoint {row.seq} of task {task!r} is damaged",
            f"{place}: {what}{', ' + why if why else ''}",
            "Restore the file (git checkout, a backup), or load an earlier checkpoint."
            if missing
            else f"Restore the file, or `safepoint accept {at}` makes what it says now a new checkpoint.",
            task=task,
            seq=row.seq,
            path=place,
        )

    def headers(
        self,
        task: str,
        *,
        space: str | None = "",
        branch: str | None = None,
        before: int | None = None,
        limit: int | None = None,
        roots: bool = False,
    ) -> list[CheckpointRow]:
        with self._f.root() as root, self._f.mutex:
            book = self._book(root, task)
            found = [] if book is None else folding.listed(book.checkpoints, space, branch, before, limit)
        if not roots:
            return found
        rows: list[CheckpointRow] = []
        for row in found:
            try:
                whole = self.read(task, space=row.space, seq=row.seq)
            except Damaged:
                rows.append(replace(row, seal=b""))  # whoever looks at it is told, and it hides none of the others
            else:
                rows += [] if whole is None else [whole[0]]  # None: it was removed since
        return rows

    def calls(
        self,
        task: str,
        *,
        line: int | None = None,
        from_step: int | None = None,
        nos: Iterable[int] | None = None,
        bodies: bool = True,
        limit: int | None = None,
    ) -> tuple[list[CallRow], Mapping[bytes, Obj]]:
        wanted = None if nos is None else set(nos)
        with self._f.root() as root, self._f.mutex:
            book = self._book(root, task)
            if book is None:
                return [], {}
            # The record of a call that has happened may be lost; of one that is asked for by its number, and is there, it is not.
            if book.gaps and (wanted is None or not wanted <= book.calls.keys()):
                raise gapped(task, book)
            return folding.chosen(book.calls, line, from_step, wanted, limit), {}

    def pauses(self, task: str) -> list[PauseRow]:
        with self._f.root() as root, self._f.mutex:
            book = self._book(root, task)
            if book is None:
                return []
            # One that a damaged line told of is asked again; `calls` says that there are such lines.
            return [row for _, row in sorted(book.pauses.items())]

    # -- removing

    def writes(
        self,
        task: str,
        *,
        space: str | None = "",
        checkpoints: Iterable[str] | None = None,
        writer: str | None = None,
        bodies: bool = True,
    ) -> tuple[list[WriteRow], Mapping[bytes, Obj]]:
        wanted = None if checkpoints is None else set(checkpoints)
        with self._f.root() as root, self._f.mutex:
            book = self._book(root, task)
            if book is None:
                return [], {}
            if book.gaps:  # what was done may be on a line that is lost
                raise gapped(task, book)
            return folding.written(book.writes.values(), space, wanted, writer), {}

    def unreadable(self, task: str, seqs: Iterable[int], *, space: str = "", sound: set[bytes] | None = None) -> dict[int, str]:
        left = []
        with self._f.root() as root:
            with self._f.mutex:
                book = self._book(root, task)
            for seq in seqs:
                row, known = book.checkpoints.get(seq) if book is not None else None, self._written.get((task, seq))
                if row is None or known is None or row.space != space or not self._is_as(root, task, row, known):
                    left.append(seq)
        return super().unreadable(task, left, space=space, sound=sound)

    def _is_as(self, root: int, task: str, row: CheckpointRow, known: bytes) -> bool:
        try:
            return hashlib.sha256(self._bytes_of(root, task, row)).digest() == known
        except OSError:
            return False

    def prune(self, task: str, seqs: Iterable[int], *, space: str = "", dry_run: bool = False, sweep: bool = True) -> Pruned:
        f, wanted, name = self._f, set(seqs), filenames.encode(task)
        with f.root() as root:
            with f.mutex:
                if f.book(root, task) is None:
                    return Pruned((), 0, 0, 0)
            with f.lock(name, task):
                with f.mutex:
                    kept = f.journal(root, task, writer=True)
                    if kept is None or not kept.book.exists:
                        return Pruned((), 0, 0, 0)
                    if kept.book.gaps:
                        return Pruned((), 0, 0, 0)  # nobody knows what is still needed
                    book = kept.book
                needed = book.needed(self._live_fence(root, task))
                gone = [r for s, r in sorted(book.checkpoints.items()) if s in wanted and r.space == space and s not in needed]
                bases = {row.seq for row in gone}
                calls = [row for row in book.calls.values() if row.base_seq in bases]
                pauses = [row for row in book.pauses.values() if row.base_seq in bases]
                ids = {row.id for row in gone}
                writes = [row for row in book.writes.values() if row.space == space and row.checkpoint in ids]
                size = sum(row.size for row in gone) + sum(map(_bytes, (*gone, *calls, *pauses, *writes)))
                pruned = Pruned(tuple(row.seq for row in gone), len(calls), 0, size)
                if gone and not dry_run:
                    self._remove(root, task, kept, gone, {c.no for c in calls}, {p.no for p in pauses}, {w.key for w in writes})
                return pruned

    def _remove(
        self,
        root: int,
        task: str,
        kept: Kept,
        gone: list[CheckpointRow],
        calls: set[int],
        pauses: set[int],
        writes: set[tuple[str, str, str, int]],
    ) -> None:
        """Write the journal anew without them, and then delete their documents, which it names for the case of a crash."""
        f, book = self._f, kept.book
        swept = [(row.space, row.branch, row.seq) for row in gone]
        seqs = {row.seq for row in gone}
        left = Book(
            row=book.row,
            checkpoints={s: r for s, r in book.checkpoints.items() if s not in seqs},
            sums=book.sums,
            branches=book.branches,
            calls={no: row for no, row in book.calls.items() if no not in calls},
            pauses={no: row for no, row in book.pauses.items() if no not in pauses},
            writes={key: row for key, row in book.writes.items() if key not in writes},
            numbers=book.numbers,
            moves=book.moves,
            fence=book.fence,
            last=book.last,
            exists=True,
        )
        with f.ops.opened(f.ops.child(filenames.encode(task), root)) as folder:
            _probe.at("prune.before")
            f.rewrite(root, folder, task, kept, b"".join(rewritten(left, swept)))
            _probe.at("prune.after")
            for row in gone:
                try:
                    with f.branch(folder, row.space, row.branch) as branch:
                        f.ops.unlink(filenames.document(row.seq), branch)
                except FileNotFoundError:
                    pass
            for space, name in {(row.space, row.branch) for row in gone} - book.branches.keys():
                self._forsake(folder, space, name)

    def _forsake(self, folder: int, space: str, branch: str) -> None:
        """Remove the folder of a branch that is no more, if nothing lies in it."""
        names = [*([filenames.SPACES, filenames.encode(space)] if space else []), filenames.encode(branch)]
        ops, fds = self._f.ops, [folder]
        try:
            for name in names[:-1]:
                fds.append(ops.child(name, fds[-1]))
            ops.rmdir(names[-1], fds[-1])
        except OSError:
            pass  # it is in nobody's way
        finally:
            for fd in fds[1:]:
                ops.close(fd)

    def pin(self, task: str, seq: int, pinned: bool, *, space: str = "") -> bool:
        f, name = self._f, filenames.encode(task)
        with f.root() as root:
            with f.mutex:
                if f.book(root, task) is None:
                    return False
            with f.lock(name, task):
                with f.mutex:
                    kept = f.journal(root, task, writer=True)
                    if kept is None or not kept.book.exists:
                        return False
                row = kept.book.checkpoints.get(seq)
                if row is None or row.space != space:
                    return False
                if row.pinned != pinned:
                    with f.ops.opened(f.ops.child(name, root)) as folder:
                        f.append(root, folder, task, kept, kept.book.mark(now(), kept.book.row, pin=[seq, pinned]))
                return True

    def delete_task(self, task: str) -> bool:
        """Its folder gets another name first, so that it is there whole or not at all."""
        f, name = self._f, filenames.encode(task)
        with f.root() as root:
            if not f.ops.is_folder(name, root):
                return False
            with f.lock(name, task):
                known = 0
                try:
                    with f.mutex:
                        book = f.book(root, task)
                    if book is None:
                        return False
                    known = book.fence
                except (Damaged, NewerFormat):
                    pass  # what cannot be read may be deleted; a lease still counts
                self._refuse_if_held(root, task)
                lease = self._lease(root, task)
                fence = max(known, 0 if lease is None else lease.fence)
                if fence:
                    self._raise_floor(root, fence, f.byte(name))
                gone = f"{DELETED}{os.urandom(8).hex()}"
                _probe.at("delete.before")
                f.ops.rename(name, gone, root, root)
                if f.full:
                    f.ops.fsync(root)
                with f.mutex:
                    f.kept.pop(name, None)
                if lease is not None:
                    with f.ops.opened(f.ops.child(LEASES, root)) as leases:
                        try:
                            f.ops.unlink(name, leases)
                        except FileNotFoundError:
                            pass
                _probe.at("delete.after")
            f.ops.remove_tree(gone, root)
            return True

    # -- the store itself

    def check(self) -> list[Finding]:
        self._f.usable()
        return file_check.check(self._f)

    def close(self) -> None:
        if self._f.closed:
            return
        self._f.closed = True
        # What a closed store held is free, as after a death: nobody is left who could release it.
        for claim in list(self._claims.values()):
            claim.free()
        self._claims.clear()
        self._f.locks.close()


def _told(book: Book) -> TaskRow:
    """A task's row, which says so itself if it may be older than what was written."""
    row = book.task_row()
    if not book.gaps:
        return row
    why = f"line {book.gaps[0].line} of its journal is damaged: head and status may be older than what was written"
    return replace(row, reason=f"{why}; {row.reason}" if row.reason else why)


def _flat(commit: Commit) -> None:
    rows: list[Any] = [write.row for write in commit.calls]
    refs = [r.args_refs or r.result_refs for r in rows] + ([commit.checkpoint.refs] if commit.checkpoint else [])
    refs += [row.refs for row in commit.writes]
    if commit.objects or any(refs):
        raise UsageError(
            "a commit with objects was given to a store of files",
            "it keeps every state whole",
            "Pack it with flat=True, as for all stores that are not chunked.",
        )


def _bytes(row: Any) -> int:
    return sum(len(v) for name in row.__struct_fields__ if isinstance(v := getattr(row, name), bytes | str))

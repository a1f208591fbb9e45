"""Whole tasks of the file store, for verify, copies and exports, and what lies about that belongs to none."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import replace as changed
from typing import TYPE_CHECKING, Any

from safepoint.errors import Damaged, NewerFormat, SafepointError, Unavailable
from safepoint.model import check_id
from safepoint.rows import CheckpointRow, Image, Lost, Numbers, Part, replace
from safepoint.stores import file_rows, filenames, whole
from safepoint.stores.file_folder import LEASE_BYTES, MADE, Folders, Kept
from safepoint.stores.file_journal import Book, bare, opened, rewritten

__all__ = ["Whole", "announce", "book_of"]


class Whole:
    """Needs ``_f`` and ``_refuse_if_held`` from the store."""

    _f: Folders

    if TYPE_CHECKING:

        def _refuse_if_held(self, root: int, task: str) -> None: ...

    def _ids(self, root: int) -> Iterator[str]:
        """The ids of all folders that are tasks."""
        ops = self._f.ops
        for name in ops.list(root):
            if name.startswith(".") or not ops.is_folder(name, root):
                continue
            id = filenames.decode(name)
            if id is None and filenames.is_cut(name):
                id = self._inside(root, name)
            if id is not None and self._is_ours(root, name):
                yield id

    def _is_ours(self, root: int, name: str) -> bool:
        """Whether a folder has something of a task in it, as far as it can be looked at."""
        f = self._f
        try:
            with f.ops.opened(f.ops.child(name, root)) as folder:
                return filenames.JOURNAL in f.ops.list(folder) or f.has_documents(folder)
        except FileNotFoundError:
            return False  # deleted meanwhile
        except OSError:
            return True  # whoever asks for the task is told

    def _is_empty(self, root: int, name: str) -> bool:
        """Whether it is a folder of a task that is being begun, or was, and got no further."""
        f = self._f
        try:
            with f.ops.opened(f.ops.child(name, root)) as folder:
                return not any(not inner.startswith(".") for inner in f.ops.list(folder))
        except OSError:
            return False

    def _inside(self, root: int, name: str) -> str | None:
        """The id of a task whose name was cut, as its journal has it."""
        ops = self._f.ops
        try:
            with ops.opened(ops.child(name, root)) as folder:
                line = self._f.get(filenames.JOURNAL, folder).partition(b"\n")[0]
            id = opened(bare(line))[0].get("task")
        except (OSError, Damaged):
            return None
        return id if isinstance(id, str) and filenames.encode(id) == name else None

    def _bytes_of(self, root: int, task: str, row: CheckpointRow) -> bytes:
        """A document's file. FileNotFoundError if it is not there."""
        f = self._f
        with f.ops.opened(f.ops.child(filenames.encode(task), root)) as folder, f.branch(folder, row.space, row.branch) as fd:
            return f.get(filenames.document(row.seq), fd)

    def draft(self, task: str, seq: int, space: str = "") -> tuple[CheckpointRow, bytes] | None:
        """The row of a checkpoint and the state that its document has now, edited or not; None if there is none.

        Raises:
            Damaged: the document is not there, or is no JSON of ours.
        """
        f = self._f
        with f.root() as root:
            with f.mutex:
                book = f.book(root, task)
                row = None if book is None else book.checkpoints.get(seq)
            if row is None or row.space != space:
                return None
            place = f.place(task, row.space, row.branch, seq)
            try:
                data = self._bytes_of(root, task, row)
                return row, file_rows.root_of(file_rows.parse(data))
            except FileNotFoundError:
                raise Damaged(f"{place} is missing", "", "Restore the file.", task=task, seq=seq, path=place) from None
            except Damaged as error:
                raise Damaged(
                    f"{place} cannot be read: {error.what}", error.why, "Correct it, and accept it then.", task=task, seq=seq
                ) from error

    # -- a task as a whole

    def walk(self, task: str) -> Iterator[Part]:
        f = self._f
        try:
            with f.root() as root, f.mutex:
                book = f.book(root, task)
                if book is None:
                    return
                # A copy, since it may go on while whoever asked does something else between two parts.
                checkpoints = [row for _, row in sorted(book.checkpoints.items())]
                sums = dict(book.sums)
                branches = [row for _, row in sorted(book.branches.items())]
                calls = [row for _, row in sorted(book.calls.items())]
                pauses = [row for _, row in sorted(book.pauses.items())]
                writes = [row for _, row in sorted(book.writes.items())]
                gaps, numbers, row_of_task = list(book.gaps), book.numbers, book.task_row()
        except (Damaged, NewerFormat) as error:
            yield Lost("task", filenames.encode(task), f"{error.what}: {error.why}", "task")
            return
        yield numbers
        yield row_of_task
        journal = f"{filenames.encode(task)}/{filenames.JOURNAL}"
        for gap in gaps:
            yield Lost("rows", f"{journal}, line {gap.line}", gap.why)
        yield from branches
        for row in checkpoints:
            part = self._part(task, row, sums.get(row.seq, ""))
            if part is not None:
                yield part
        yield from calls
        yield from pauses
        yield from writes

    def _part(self, task: str, row: CheckpointRow, sum: str) -> CheckpointRow | Lost | None:
        """A whole row, or what is wrong with it; None if it was removed since its journal was read."""
        f = self._f
        found = self._found(task, row, sum)
        if isinstance(found, Lost):
            try:
                with f.root() as root, f.mutex:
                    book = f.book(root, task)
            except SafepointError:
                return found
            there = None if book is None else book.checkpoints.get(row.seq)
            if there is None or there.id != row.id:  # its task may have been begun anew
                return None
        return found

    def _found(self, task: str, row: CheckpointRow, sum: str) -> CheckpointRow | Lost:
        place = self._f.place(task, row.space, row.branch, row.seq)
        try:
            with self._f.root() as root:
                try:
                    data = self._bytes_of(root, task, row)
                except FileNotFoundError:
                    return _lost(row, place, "it is missing")
            found = file_rows.parse(data)
            read = file_rows.from_document(task, found)
            if replace(read, root=b"", pinned=row.pinned) != row or file_rows.checksum(read.root) != sum:
                return _lost(row, place, "its header is not what the journal says")
            return replace(read, pinned=row.pinned)
        except Unavailable:
            raise  # not now: nothing is known of it
        except SafepointError as error:
            return _lost(row, place, ", ".join(filter(None, (error.what, error.why))))

    def write_task(self, image: Image, *, over: Image | None = None) -> bool:
        f, task = self._f, check_id(image.row.task)
        name = filenames.encode(task)
        image = whole.sealed(image)
        book = book_of(image)
        byte = secrets.randbits(LEASE_BYTES)
        with f.root() as root, f.lock(name, task):
            with f.mutex:
                there = f.journal(root, task, writer=True)
            if there is not None and there.book.exists:
                if _facts(there.book) == _facts(book):
                    return False
                if over is None or there.book.gaps or _facts(there.book) != whole.facts_of(over):
                    raise whole.another(task)
                self._refuse_if_held(root, task)
                self._replace(root, there, image)
                return True
            # A byte of its own says that it is being made, whoever opens the store meanwhile.
            claim = f.locks.claim(byte)
            made = f"{MADE}{byte:x}-{secrets.token_hex(4)}"
            try:
                with f.ops.opened(f.ops.child(made, root, create=True, sync=f.full)) as folder:
                    for row in image.checkpoints:
                        data = file_rows.document(task, row, file_rows.unpack(row.root))
                        with f.branch(folder, row.space, row.branch, create=True) as fd:
                            f.put(root, filenames.document(row.seq), data, fd, byte=f.byte(name))
                    f.put(root, filenames.JOURNAL, b"".join(rewritten(book, [])), folder, byte=f.byte(name))
                    if there is not None:  # one that was begun, and says nothing
                        f.ops.remove_tree(name, root)
                f.ops.rename(made, name, root, root)
                if f.full:
                    f.ops.fsync(root)
            except BaseException:
                try:
                    f.ops.remove_tree(made, root)
                except OSError:
                    pass  # the next open sweeps it
                raise
            finally:
                if claim is not None:
                    claim.free()
        return True

    def _replace(self, root: int, there: Kept, image: Image) -> None:
        """Put a task in the place of the one that is there: in its folder, by a new journal, which is the one step that counts."""
        f, task, old = self._f, image.row.task, there.book
        book = book_of(whole.beyond(image, old.numbers))
        book.fence = max(old.fence, book.fence)
        if any(
            replace(row, pinned=False) != replace(book.checkpoints[seq], pinned=False)
            for seq, row in old.checkpoints.items()
            if seq in book.checkpoints
        ):
            raise whole.another(task)  # its document cannot be two things until the journal says which
        new = [row for row in image.checkpoints if row.seq not in old.checkpoints]
        with f.ops.opened(f.ops.child(filenames.encode(task), root)) as folder:
            announce(f, root, folder, there, new, book.numbers)
            for row in new:
                data = file_rows.document(task, row, file_rows.unpack(row.root))
                with f.branch(folder, row.space, row.branch, create=True) as fd:
                    f.put(root, filenames.document(row.seq), data, fd, byte=f.byte(filenames.encode(task)))
            gone = [_at(row) for seq, row in old.checkpoints.items() if seq not in book.checkpoints]
            f.rewrite(root, folder, task, there, b"".join(rewritten(book, gone)))
            with f.mutex:
                f.journal(root, task, writer=True)  # removes those that are gone

    def place(self, task: str, kind: str, key: Any) -> str:
        if kind == "checkpoint":
            with self._f.root() as root, self._f.mutex:
                book = self._f.book(root, task)
                row = None if book is None else book.checkpoints.get(key)
            if row is not None:
                return self._f.place(task, row.space, row.branch, row.seq)
        return "" if kind == "object" else f"{filenames.encode(task)}/{filenames.JOURNAL}"

    def beside(self, suffix: str) -> str | None:
        return f"file:///{self._f.path}{suffix}"

    # -- what belongs to no task

    def strays(self) -> list[Lost]:
        f, found = self._f, []
        with f.root() as root:
            known = {filenames.encode(id) for id in self._ids(root)}
            for name in sorted(f.ops.list(root)):
                if name not in known:
                    if not name.startswith(".") and not self._is_empty(root, name):
                        found.append(Lost("a stray file", name, "it is no task", "foreign"))
                elif self._strays_of(root, name):
                    with f.lock(name, name):  # a document is there before the line that tells of it
                        found += self._strays_of(root, name)
        return found

    def _strays_of(self, root: int, name: str) -> list[Lost]:
        f, found = self._f, self._strays_now(root, name)
        # A document comes before its line. Whoever is writing now is waited for a little, and what is told of by then is none.
        until, written = time.monotonic() + 1, True
        while written and any(lost.kind == "stray" for lost in found):
            written = f.locks.is_held(f.byte(name)) is True and time.monotonic() < until
            if written:
                time.sleep(0.005)
            now = self._strays_now(root, name)
            found = [lost for lost in found if lost in now]
        return found

    def _strays_now(self, root: int, name: str) -> list[Lost]:
        f, found = self._f, []
        id = filenames.decode(name) or self._inside(root, name)
        if id is None:
            return []  # deleted meanwhile
        try:
            with f.mutex:
                book = f.book(root, id)
        except (SafepointError, OSError):
            return []  # whatever asks for the task is told
        rows = () if book is None else tuple(book.checkpoints.values())
        told = {f.place(id, r.space, r.branch, r.seq) for r in rows} | {f"{name}/{filenames.JOURNAL}"}
        folders = {name, *(place.rpartition("/")[0] for place in told), f"{name}/{filenames.SPACES}"}
        folders |= {folder.rpartition("/")[0] for folder in folders}
        for place in sorted(_files(f, root, name)):
            base = os.path.basename(place)
            if place not in told and not base.startswith("."):
                why = "no line of the journal tells of it"
                found.append(
                    Lost(
                        "a stray file",
                        place,
                        why if filenames.seq_of(base) else "it is no document",
                        "stray" if filenames.seq_of(base) else "foreign",
                    )
                )
        return found


def _files(f: Folders, fd: int, name: str, prefix: str = "") -> Iterator[str]:
    """All that is no folder below a folder, by its path; links are not followed."""
    place = f"{prefix}{name}"
    try:
        folder = f.ops.child(name, fd)
    except FileNotFoundError:
        return  # deleted meanwhile
    with f.ops.opened(folder):
        for inner in f.ops.list(folder):
            if f.ops.is_folder(inner, folder):
                yield from _files(f, folder, inner, f"{place}/")
            else:
                yield f"{place}/{inner}"


def _lost(row: CheckpointRow, place: str, why: str) -> Lost:
    return Lost(f"checkpoint {row.seq}", place, why, "checkpoint", row.seq, row.seq)


def book_of(image: Image) -> Book:
    return Book(
        row=image.row,
        numbers=image.numbers,
        exists=True,
        checkpoints={row.seq: replace(row, root=b"", refs=b"") for row in image.checkpoints},
        sums={row.seq: file_rows.checksum(row.root) for row in image.checkpoints},
        branches={(b.space, b.name): b for b in image.branches},
        calls={row.no: row for row in image.calls},
        pauses={row.no: row for row in image.pauses},
        writes={row.key: row for row in image.writes},
        fence=whole.fence_of(image),
    )


def announce(f: Folders, root: int, folder: int, there: Kept, new: list[CheckpointRow], numbers: Numbers) -> None:
    """Say in the journal that these documents may come to be and may be removed, before a new journal tells of them: should this
    be the end of it, the next writer removes them, and they are not taken for what a journal that was cut had told of."""
    # One alone, of the next number, is what any save may leave.
    if [row.seq for row in new] not in ([], [there.book.numbers.seq + 1]):
        coming = changed(there.book, numbers=numbers)
        f.rewrite(root, folder, there.book.row.task, there, b"".join(rewritten(coming, map(_at, new))))


def _at(row: CheckpointRow) -> tuple[str, str, int]:
    return row.space, row.branch, row.seq


def _facts(book: Book) -> whole.Facts:
    return whole.facts(
        book.checkpoints.values(), book.calls.values(), book.pauses.values(), book.branches.values(), book.writes.values()
    )

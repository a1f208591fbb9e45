"""Mending a task of the file store in place: damaged documents and the old journal move to ``.quarantine``, as they were found.

The new journal is what makes it so, in one rename: a crash before it leaves the task as it was, one after it leaves documents that
no line tells of, which the next repair takes away.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterable
from dataclasses import replace as changed
from typing import TYPE_CHECKING, Any

from safepoint import _probe
from safepoint.errors import Unavailable, UsageError
from safepoint.rows import Aside, CallRow, CheckpointRow, Image, replace
from safepoint.stores import file_rows, filenames, refusals
from safepoint.stores.file_folder import Folders
from safepoint.stores.file_journal import rewritten
from safepoint.stores.file_whole import announce, book_of

__all__ = ["QUARANTINE", "Mends"]

QUARANTINE = ".quarantine"


class Mends:
    """Needs ``_f`` and ``_refuse_if_held`` from the store."""

    _f: Folders

    if TYPE_CHECKING:

        def _refuse_if_held(self, root: int, task: str) -> Any: ...

        def strays(self) -> list[Any]: ...

        def _strays_of(self, root: int, name: str) -> list[Any]: ...

    def backup(self, suffix: str) -> str:
        to = f"{self._f.path}{suffix}"
        # Not what begins with a dot: closing a lock file would drop the locks that this process has on it.
        try:
            shutil.copytree(
                self._f.path,
                to,
                symlinks=True,
                ignore=lambda folder, names: [n for n in names if n.startswith(".") and n != ".gitignore"],
            )
        except FileExistsError:
            raise UsageError(f"{to} is there already", "", "Move it away.", path=to) from None
        except (shutil.Error, OSError) as error:
            shutil.rmtree(to, ignore_errors=True)
            where, why = self._f.path, str(error)
            if isinstance(error, shutil.Error):
                where, _, why = error.args[0][0]
            raise Unavailable(
                f"a copy of the store cannot be made before it is repaired: {where}",
                why.removesuffix(f": {where!r}"),
                "Look at it and its permissions, and at the room on the disk. Nothing was changed.",
                path=where,
            ) from error
        return f"file:///{to}"

    def set_aside(self, image: Image, gone: Iterable[Aside], put: Iterable[CheckpointRow], bare: Iterable[CallRow]) -> int:
        f, task = self._f, image.row.task
        name, new, moved = filenames.encode(task), {row.seq for row in put}, 0
        asides = list(gone)
        with f.root() as root, f.lock(name, task):
            with f.mutex:
                kept = f.journal(root, task, writer=True)
            if kept is None or not kept.book.exists:
                raise refusals.stale(task)
            self._refuse_if_held(root, task)
            old, given = kept.book, image.numbers
            if (old.numbers.seq + len(new), old.numbers.position) != (given.seq, given.position):
                raise refusals.stale(task)
            if old.row.updated_at != image.row.updated_at:  # a commit of writes or of branches alone moves no number
                raise refusals.stale(task)
            sealed = replace(
                image,
                checkpoints=tuple(row.sealed(task) for row in image.checkpoints),
                writes=tuple(row.sealed(task) for row in image.writes),
            )
            left = changed(
                book_of(sealed),
                row=replace(old.row, branch=image.row.branch),
                calls={row.no: row.sealed(task) for row in image.calls},
                fence=old.fence,
                last=old.last,
            )
            with (
                f.ops.opened(f.ops.child(QUARANTINE, root, create=True, sync=f.full)) as all_of_it,
                f.ops.opened(f.ops.child(f"{name[:200]}-{secrets.token_hex(4)}", all_of_it, create=True, sync=f.full)) as aside,
                f.ops.opened(f.ops.child(name, root)) as folder,
            ):
                f.put(root, filenames.JOURNAL, f.get(filenames.JOURNAL, folder), aside)
                if not old.gaps:  # a journal that cannot be read is no word to be written again
                    announce(f, root, folder, kept, [row for row in sealed.checkpoints if row.seq in new], image.numbers)
                for row in sealed.checkpoints:
                    if row.seq in new:
                        data = file_rows.document(task, row, file_rows.unpack(row.root))
                        with f.branch(folder, row.space, row.branch, create=True) as fd:
                            f.put(root, filenames.document(row.seq), data, fd)
                _probe.at("repair.before")
                f.rewrite(root, folder, task, kept, b"".join(rewritten(left, [])))
                _probe.at("repair.after")
                for one in asides:
                    was = old.checkpoints.get(one.key) if one.kind == "checkpoint" else None
                    if was is None:
                        moved += one.kind in {"call", "pause", "write"}  # it is in the old journal
                        continue
                    try:
                        with f.branch(folder, was.space, was.branch) as fd:
                            f.ops.rename(filenames.document(was.seq), filenames.document(was.seq), fd, aside)
                        moved += 1
                    except FileNotFoundError:
                        pass
        return moved

    def set_strays_aside(self) -> int:
        f, moved = self._f, 0
        with f.root() as root, f.ops.opened(f.ops.child(QUARANTINE, root, create=True, sync=f.full)) as aside:
            for name in sorted({stray.where.partition("/")[0] for stray in self.strays() if stray.kind == "stray"}):
                # Looked at again under the lock: the next save may have given its number, and its place, to a checkpoint.
                with f.lock(name, name):
                    for stray in self._strays_of(root, name):
                        moved += stray.kind == "stray" and self._moved_aside(root, stray.where, aside)
        return moved

    def _moved_aside(self, root: int, where: str, aside: int) -> bool:
        f, opened = self._f, [root]
        *folders, last = where.split("/")
        try:
            for folder in folders:
                opened.append(f.ops.child(folder, opened[-1]))
            f.ops.rename(last, f"{last[:200]}-{secrets.token_hex(4)}", opened[-1], aside)
            return True
        except FileNotFoundError:
            return False
        finally:
            for fd in reversed(opened[1:]):
                f.ops.close(fd)

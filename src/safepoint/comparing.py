"""The verb that tells two checkpoints apart: diff."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from safepoint.checking import check_number
from safepoint.codec import chunks, states, to_json
from safepoint.errors import NotFound, SafepointError, UsageError
from safepoint.model import Obj, a_type, check_id
from safepoint.rows import CheckpointRow
from safepoint.rules.diffing import Diff, compare
from safepoint.stores.base import Store


class ComparingVerbs:
    """Part of ``Checkpointer``."""

    store: Store

    if TYPE_CHECKING:

        @staticmethod
        def _no_task(task_id: str) -> NotFound: ...

    def diff(self, task_id: str, a: int | str, b: int | str | None = None, *, task_b: str | None = None) -> Diff:
        """What leads from one checkpoint to another, of the same task or of two.

        ``str`` of it is one line (``+2 messages, phase: plan -> act``), ``entries`` has every difference with its path, and
        ``patch()`` is a JSON Patch. Stored data is compared as it is: no class is needed and no migration run. Values of resources are
        in the patch, as it is data, and in no text.

        Args:
            a: A checkpoint's number, or the name of a branch for its head.
            b: The same of ``task_b`` (``task_id`` if not given); None for the head of its current branch.

        Raises:
            NotFound: there is no such task, checkpoint or branch. Damaged, NewerFormat: one of them cannot be read.
        """
        other = check_id(task_id) if task_b is None else check_id(task_b, "task_b")
        left, right = self._one_of(task_id, "a", a), self._one_of(other, "b", b)
        before = _json(task_id, *left)
        # Equal states have equal digests, and no others: what is the same is not read twice.
        after = before if left[0].digest == right[0].digest else _json(other, *right)
        return compare(f"{task_id}@{left[0].seq}", f"{other}@{right[0].seq}", before, after)

    def _one_of(self, task: str, name: str, which: int | str | None) -> tuple[CheckpointRow, Mapping[bytes, Obj]]:
        if which is None:
            found = self.store.read(check_id(task))
        elif isinstance(which, str):
            found = self.store.read(check_id(task), branch=check_id(which, "diff: the name of a branch"))
        elif isinstance(which, int) and not isinstance(which, bool):
            check_number("diff", name, which)
            found = self.store.read(check_id(task), seq=which)
        else:
            raise UsageError(
                f"diff({name}=) is {a_type(which)}",
                "it names a checkpoint",
                "Pass its number, or the name of a branch for its head.",
            )
        if found is not None:
            return found
        if self.store.task(task) is None:
            raise self._no_task(task)
        what = "no head" if which is None else f"no branch {which!r}" if isinstance(which, str) else f"no checkpoint {which}"
        raise NotFound(f"task {task!r} has {what}", "", f"See `safepoint log {task}`.", task=task)


def _json(task: str, row: CheckpointRow, objects: Mapping[bytes, Obj]) -> object:
    states.check_row(task, row)
    try:
        return to_json(chunks.unpack_plain(row.root, row.refs, objects))
    except SafepointError as error:
        error.what = f"{task}@{row.seq}: {error.what}"
        error.details.update(task=task, seq=row.seq)
        raise

"""The reading verbs of the PostgreSQL store. Each is one or two statements, and leaves no transaction open.

A checkpoint's objects are read by a second statement. What it reaches never changes, so both together are as one snapshot, unless it
was removed in between: then objects are missing, and all is read once more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from safepoint.errors import Damaged
from safepoint.model import Obj
from safepoint.rows import BranchRow, CallRow, CheckpointRow, PauseRow, TaskRow, WriteRow
from safepoint.stores.postgres import rows
from safepoint.stores.postgres.db import Database
from safepoint.stores.postgres.rows import CALL, CHECKPOINT, WRITE, blobs, ints, names, texts

__all__ = ["Reads"]

SPARE = 256_000
"""Bytes of objects beyond what is needed that are read without a thought."""
MOST = (1 << 63) - 1

Found = tuple[CheckpointRow, Mapping[bytes, Obj]]


class Reads:
    """Needs ``_db`` from the store."""

    _db: Database

    def _ask(self, name: str, values: Iterable[Any], more: str = "") -> list[Any]:
        return self._db.ask(self._db.sql("postgres_read")[name] + more, tuple(values))

    def task(self, task: str) -> TaskRow | None:
        if not possible(task):
            return None
        found = self._ask("tasks", (task,), " WHERE t.task = %s")
        return rows.task(found[0]) if found else None

    def tasks(self, *, after: str | None = None, limit: int = 200) -> list[TaskRow]:
        limit = max(limit, 0)
        if after is None:
            found = self._ask("tasks", (limit,), " ORDER BY t.task LIMIT %s")
        else:
            # No id has a NUL in it: those after "a\0b" are those after "a".
            found = self._ask("tasks", (after.partition("\0")[0], limit), " WHERE t.task > %s ORDER BY t.task LIMIT %s")
        return [rows.task(row) for row in found]

    def branches(self, task: str, space: str | None = "") -> list[BranchRow]:
        if not possible(task, space):
            return []
        more, values = "", [task]
        if space is not None:
            more = " AND b.space = %s"
            values.append(space)
        return [rows.branch(row) for row in self._ask("branches", values, more + " ORDER BY b.space, b.name")]

    def read(
        self, task: str, *, space: str = "", seq: int | None = None, branch: str | None = None, id: str | None = None
    ) -> Found | None:
        if not possible(task, space, branch, id) or (seq is not None and not 0 < seq <= MOST):
            self._db.refuse_closed()
            return None
        before: Any = None
        while True:
            found = self._checkpoint(task, space, seq, branch, id)
            if found is None:
                return None
            columns, n, count, size = found
            row = rows.checkpoint(columns)
            objects, whole = self._objects(n, [row.refs], count, size, row.size)
            # Missing in what did not change in between, they are lost.
            if whole or before == (n, row.seq, row.id):
                return row, objects
            before = n, row.seq, row.id

    def _checkpoint(self, task: str, space: str, seq: int | None, branch: str | None, id: str | None) -> Any:
        """The columns of a checkpoint, the number of its task, and how many objects that has, of how many bytes."""
        count = len(CHECKPOINT)
        if id is not None:
            found = self._ask("by_id", (task, space, id))
        elif seq is not None:
            found = self._ask("by_seq", (task, seq))
        else:
            found = self._ask("by_branch", (space, branch, task))
        if not found:
            if id is None and seq is None and self._ask("of_branch", (task, space, branch)):
                if self._ask("by_branch", (space, branch, task)):  # it came into being in between
                    return self._checkpoint(task, space, seq, branch, id)
                if branch is not None or not space:
                    raise _unsound(task, "a head of its branches is missing")
            return None
        columns, (n, objects, size, *head) = found[0][:count], found[0][count:]
        if columns[0] is None:
            raise _unsound(task, f"checkpoint {head[0]} is missing", seq=head[0])
        if head and columns[:2] != tuple(head):
            raise _unsound(task, f"what is found as checkpoint {head[0]} is another one", seq=head[0])
        if columns[2] != space:
            if seq is None:
                raise _unsound(task, f"checkpoint {columns[0]} is of another space", seq=columns[0])
            return None
        if seq is not None and id is not None and columns[0] != seq:
            return None
        return columns, n, objects, size

    def _objects(self, n: int, refs: list[bytes], count: int, size: int, needed: int) -> tuple[dict[bytes, Obj], bool]:
        """All objects that these refs reach, and whether all of them are there.

        The whole task's are read and the others left out, if they are at most twice what is needed: following the refs costs the
        server four times as much for each.
        """
        roots = names(refs)
        if not roots:
            return {}, True
        if size <= 2 * needed + SPARE and count < needed // 64 + 1000:
            found = {name: Obj(name, inner, data) for name, inner, data in self._ask("objects", (n,))}
        else:
            found = {name: Obj(name, inner, data) for name, inner, data in self._ask("reached", (blobs(roots), n, n))}
        return _reached(found, roots)

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
        if not possible(task, space, branch):
            return []
        more, values = "", [task]
        if space is not None:
            more += " AND c.space = %s"
            values.append(space)
        if space:
            more += " AND c.space <> ''"  # for the index of those
        if branch is not None:
            more += " AND c.branch = %s"
            values.append(branch)
        if before is not None:
            more += f" AND c.seq < {min(max(before, 0), MOST)}"
        more += " ORDER BY c.seq DESC"
        if limit is not None:
            more += f" LIMIT {max(limit, 0)}"
        if roots:
            return [rows.checkpoint(row) for row in self._ask("whole", values, more)]
        return [rows.header(row) for row in self._ask("headers", values, more)]

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
        if not possible(task):
            return [], {}
        more, values = "", [task]
        for condition, value in ((" AND c.line = %s", line), (" AND c.step >= %s", from_step)):
            if value is not None:
                more += condition
                values.append(value)  # type: ignore[arg-type]
        if nos is not None:
            more += " AND c.no = ANY(%s)"
            values.append(ints(sorted({no for no in nos if 0 < no <= MOST})))  # type: ignore[arg-type]
        more += " ORDER BY c.no DESC"
        if limit is not None:
            more += f" LIMIT {max(limit, 0)}"
        before: Any = None
        while True:
            found = self._ask("calls", values, more)
            made = [rows.call(row[: len(CALL)]) for row in reversed(found)]
            refs = [run for row in made for run in (row.args_refs, row.result_refs) if run]
            if not bodies or not refs:
                return made, {}
            objects, whole = self._objects(found[0][-1], refs, 0, MOST, 0)
            seen = [(row.no, row.version) for row in made]
            if whole or before == seen:
                return made, objects
            before = seen

    def pauses(self, task: str) -> list[PauseRow]:
        return [rows.pause(row) for row in self._ask("pauses", (task,))] if possible(task) else []

    def writes(
        self,
        task: str,
        *,
        space: str | None = "",
        checkpoints: Iterable[str] | None = None,
        writer: str | None = None,
        bodies: bool = True,
    ) -> tuple[list[WriteRow], Mapping[bytes, Obj]]:
        if not possible(task, space):
            return [], {}
        more, values = "", [task]
        for condition, value in ((" AND c.space = %s", space), (" AND c.writer = %s", writer and rows.encoded(writer))):
            if value is not None:
                more += condition
                values.append(value)
        if checkpoints is not None:
            more += " AND c.checkpoint = ANY(%s)"
            values.append(texts(sorted({id for id in checkpoints if possible(id)})))  # type: ignore[arg-type]
        more += " ORDER BY c.space, c.checkpoint, c.path, c.writer, c.idx"
        before: Any = None
        while True:
            found = self._ask("writes", values, more)
            made = [rows.write(row[: len(WRITE)]) for row in found]
            refs = [row.refs for row in made if row.refs]
            if not bodies or not refs:
                return made, {}
            objects, whole = self._objects(found[0][-1], refs, 0, MOST, 0)
            seen = [(row.key, row.seal) for row in made]
            if whole or before == seen:
                return made, objects
            before = seen


def _reached(found: dict[bytes, Obj], roots: list[bytes]) -> tuple[dict[bytes, Obj], bool]:
    """Those of the objects that the roots reach, and whether any is missing."""
    reached: dict[bytes, Obj] = {}
    whole = True
    level = roots
    while level:
        below: list[bytes] = []
        for name in level:
            obj = found.get(name)
            if obj is None:
                whole = False
            elif name not in reached:
                reached[name] = obj
                if obj.refs:
                    below.append(obj.refs)
        level = [name for name in names(below) if name not in reached]
    return reached, whole


def possible(*ids: str | None) -> bool:
    """Whether something may have these ids: PostgreSQL refuses even to look for a NUL."""
    return not any(id is not None and "\0" in id for id in ids)


def _unsound(task: str, why: str, **details: Any) -> Damaged:
    return Damaged(
        f"task {task!r} is damaged",
        why,
        "Look with safepoint verify; load an earlier checkpoint, or restore the store from a backup.",
        task=task,
        **details,
    )

"""The verbs that look at checkpoints without going on from one: listing them, and reading one raw."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from safepoint import model
from safepoint.checking import check_limit, check_number
from safepoint.codec import states, values
from safepoint.codec.jsonform import to_json
from safepoint.codec.registry import Registry
from safepoint.codec.salvage import salvaged
from safepoint.errors import NotFound, SafepointError, UsageError
from safepoint.model import Checkpoint, State, check_id
from safepoint.rows import CheckpointRow
from safepoint.stores.base import Store

log = logging.getLogger("safepoint")


class ListingVerbs:
    """Part of ``Checkpointer``."""

    store: Store
    registry: Registry

    if TYPE_CHECKING:

        def _load(self, task: str, **selector: Any) -> State | None: ...

        def _header(self, task_id: str, row: CheckpointRow) -> Checkpoint: ...

    def list_checkpoints(
        self,
        task_id: str,
        *,
        limit: int | None = None,
        before: int | None = None,
        branch: str | None = None,
        filter: Mapping[str, Any] | None = None,
        check: bool = False,
    ) -> list[Checkpoint]:
        """Headers, newest first; no body is read. An unknown task has none.

        Args:
            limit: At most so many.
            before: Only those with a smaller seq, to page.
            branch: Only those made on it.
            filter: Only those whose metadata has these top-level keys with equal values of equal type.
            check: Also load each of them, and say in ``problem`` why this program cannot: damage, a class or an enum member
                that is gone, a migration that fails. One that cannot be loaded keeps no other from being listed.
        """
        check_id(task_id)
        check_limit("list_checkpoints", limit)
        if before is not None:
            check_number("list_checkpoints", "before", before)
        if branch is not None:
            check_id(branch, "list_checkpoints(branch=)")
        if filter is not None and not isinstance(filter, Mapping):
            raise UsageError(
                "list_checkpoints(filter=) must be a mapping", f"it is {model.a_type(filter)}", "Write it as {'key': value}."
            )
        found: list[Checkpoint] = []
        if limit == 0:
            return found
        page = limit if not filter else 200
        # Through the codec, so that a value compares as it is stored.
        wanted = values.decode_plain(values.encode(dict(filter), self.registry, path="filter")) if filter else None
        while True:
            rows = self.store.headers(task_id, branch=branch, before=before, limit=page)
            for row in rows:
                head = self._header(task_id, row)
                if wanted is None or self._matches(task_id, row, wanted):
                    problem = self._problem(task_id, row.seq) if check else None
                    found.append(replace(head, problem=problem) if problem else head)
                    if len(found) == limit:
                        return found
            if page is None or len(rows) < page:
                return found
            before = rows[-1].seq

    @staticmethod
    def _matches(task: str, row: CheckpointRow, wanted: Any) -> bool:
        try:
            return _matches(states.plain_metadata(row), wanted)
        except SafepointError as error:
            log.warning("%s@%s is left out of a filtered listing: its metadata cannot be read: %s", task, row.seq, error.why)
            return False

    def _problem(self, task: str, seq: int) -> str | None:
        try:
            self._load(task, seq=seq)
        except SafepointError as error:
            return f"{type(error).__name__}: {error.what}{f': {error.why}' if error.why else ''}"
        return None

    def raw(self, task_id: str, *, seq: int | None = None, branch: str | None = None, id: str | None = None) -> dict[str, Any]:
        """One checkpoint as it is stored, as strict JSON data; the head of the current branch if none is named.

        No class is looked up, no migration run, nothing refused: this reads what a newer program has written, what holds classes
        that are gone, and of what is damaged as much as can be read. In place of what cannot there is ``{"$lost": why}``.

        Returns:
            ``{"checkpoint": header, "state": …, "problems": [line, …]}``. In ``state``, values are in the lossless form of
            docs/types.md.

        Raises:
            NotFound: there is no such checkpoint. Damaged: not even its row can be read.
        """
        given = {k: v for k, v in (("seq", seq), ("branch", branch), ("id", id)) if v is not None}
        if len(given) > 1:
            raise UsageError("raw takes one of seq, branch and id", f"{' and '.join(given)} were given", "Name one.")
        if seq is not None:
            check_number("raw", "seq", seq)
        if branch is not None or id is not None:
            check_id(branch if id is None else id, "raw(branch=)" if id is None else "raw(id=)")
        found = self.store.read(check_id(task_id), **given)  # type: ignore[arg-type]
        if found is None:
            which = next((f" with {name} {value!r}" for name, value in given.items()), "")
            raise NotFound(
                f"task {task_id!r} has no checkpoint{which}", "", "See list_checkpoints, or `safepoint log`.", task=task_id
            )
        row, objects = found
        tree, problems = salvaged(row.root, row.refs, objects, min(row.size, 1 << 27))
        try:
            states.check_row(task_id, row)
        except SafepointError as error:
            problems.insert(0, f"{error.what}: {error.why}")
        return {"checkpoint": _facts(task_id, row, problems), "state": to_json(tree), "problems": problems}


def _facts(task: str, row: CheckpointRow, problems: list[str]) -> dict[str, Any]:
    try:
        metadata = to_json(states.plain_metadata(row))
    except SafepointError as error:
        problems.append(f"metadata of the header: {error.why}")
        metadata = {"$lost": error.why}
    return {
        "task_id": task,
        "seq": row.seq,
        "id": row.id,
        "branch": row.branch,
        "parent_seq": row.parent_seq,
        "step": row.step,
        "kind": row.kind,
        "label": row.label,
        "created_at": model.from_us(row.created_at).isoformat(),
        "schema_version": row.schema,
        "format": row.format,
        "bytes": row.size,
        "digest": row.digest.hex(),
        "pinned": row.pinned,
        "metadata": metadata,
    }


def _matches(metadata: Any, wanted: Any) -> bool:
    if isinstance(metadata, dict) and isinstance(wanted, dict):
        return all(k in metadata and _same(metadata[k], v) for k, v in wanted.items())
    there = _pairs(metadata)
    return all(any(_same(k, key) and _same(v, value) for key, value in there) for k, v in _pairs(wanted))


def _pairs(plain: Any) -> list[tuple[Any, Any]]:
    """Of a dict as a plain tree has it: one whose keys are not all plain text is tagged, keys and values in turn."""
    if isinstance(plain, values.Tagged):
        return list(zip(plain.value[::2], plain.value[1::2], strict=True))
    return list(plain.items())


def _same(a: Any, b: Any) -> bool:
    """Equal value of equal type, all the way down: ``[True]`` is not ``[1]``."""
    if type(a) is not type(b):
        return False
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict):
        # Keys of one value may differ in type too: {1: x} is not {True: x}.
        return len(a) == len(b) and all(
            any(_same(k, other) for other in b if other == k) and _same(v, b[k]) if k in b else False for k, v in a.items()
        )
    if isinstance(a, values.Tagged):
        return a.tag == b.tag and a.name == b.name and _same(a.value, b.value)
    return bool(a == b)

"""States that people have changed: edited in an editor, or in the files of a store that keeps them as such."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from safepoint.codec import chunks, states, values
from safepoint.errors import Damaged, InvalidState, NotFound, UsageError
from safepoint.model import METADATA_LIMIT, Checkpoint, Obj, check_id, new_id, now, to_us
from safepoint.rows import BranchRow, CheckpointRow, Commit, Head, TaskRow, replace
from safepoint.stores import holder
from safepoint.stores.base import Store

__all__ = ["EDITED", "EditingVerbs"]

EDITED = ("messages", "agent_state", "metadata", "step")
"""What a person is shown of a state. The rest is how a run stands, and stays as it is."""


class EditingVerbs:
    """Part of ``Checkpointer``."""

    store: Store

    if TYPE_CHECKING:

        @staticmethod
        def _no_task(task_id: str) -> NotFound: ...
        def _header(self, task: str, row: CheckpointRow) -> Checkpoint: ...
        def rewind(self, task_id: str, seq: int | None = None) -> Checkpoint: ...
        def _unpack(self, task: str, row: CheckpointRow, objects: Any) -> Any: ...

    def accept(self, task_id: str, seq: int | None = None) -> Checkpoint | None:
        """Make what the document of a checkpoint says now a new checkpoint of kind ``edit``, on top of the current branch.

        For stores that keep states in files that people edit (``file:///``). The document itself stays as it is, and damaged:
        it is no longer what was saved under its number.

        Without ``seq``: take a task as it stands that is older than what was acknowledged (a restored backup). It goes on from
        the head that it has, as after ``rewind``: under a guard, as what was done since is on no record. None if it is gone.

        Raises:
            NotFound: no such checkpoint. LeaseHeld: a live run holds the task. Damaged: the document is no JSON of a state.
            UsageError: it has not been changed, or this store has no documents.
            InvalidState, RefusedType: it is no state that this program can load.
        """
        if seq is None:
            return self._accept_older(check_id(task_id))
        head, branch = self._where(check_id(task_id))
        found = self.store.draft(task_id, seq)
        if found is None:
            raise NotFound(f"task {task_id!r} has no checkpoint with seq {seq}", "", "See list_checkpoints.", task=task_id)
        row, root = found
        try:
            if self.store.read(task_id, space=row.space, seq=seq) is not None:
                raise UsageError(f"{task_id}@{seq} is as it was saved", "", "There is nothing to accept.")
        except Damaged:
            pass
        tree = chunks.unpack_plain(root, b"", {})
        return self._save_edited(task_id, tree, row, head, branch, f"accepted from {seq}")

    def _accept_older(self, task: str) -> Checkpoint | None:
        if self.store.rolled_back(task) is None:
            if self.store.task(task) is None:
                raise self._no_task(task)
            raise UsageError(
                f"task {task!r} is not older than what was acknowledged",
                "",
                f"To accept a document that was edited, name it: accept({task!r}, seq).",
            )
        row: TaskRow | None = None
        heads: dict[str, Head] = {}
        for part in self.store.walk(task):
            match part:
                case TaskRow():
                    row = part
                case BranchRow() if part.space == "":
                    heads[part.name] = part.head
                case CheckpointRow() | Obj():
                    break
        if row is None:
            self.store.accept(task)
            return None
        if row.branch not in heads:
            raise Damaged(
                f"task {task!r} has no head to go on from",
                "the row of its current branch is missing",
                f"Choose a checkpoint: rewind({task!r}, seq). See `safepoint verify`.",
                task=task,
            )
        return self.rewind(task, heads[row.branch].seq)

    def edit(self, task_id: str, fn: Callable[[dict[str, Any]], Any], *, seq: int | None = None) -> Checkpoint | None:
        """Let a state be changed as plain JSON data, and save it as a new checkpoint of kind ``edit`` on the current branch.

        Args:
            fn: Is given ``messages``, ``agent_state``, ``metadata`` and ``step``, as ``codec.to_json`` writes them (all types
                are kept), and returns what they are to be. ``safepoint edit`` gives it to an editor.
            seq: Of the checkpoint to begin with; the head of the current branch by default.

        Returns:
            None if nothing was changed.

        Raises:
            NotFound: no such task or checkpoint. LeaseHeld: a live run holds the task.
            Conflict: the branch has moved meanwhile. InvalidState, RefusedType: the result is no state.
        """
        lease = self.store.lease(check_id(task_id))
        if lease is not None and lease.live:  # before somebody has typed for an hour
            raise holder.lease_held(task_id, lease.holder, lease.acquired_at)
        head, branch = self._where(task_id)
        found = self.store.read(task_id, seq=head.seq if seq is None else seq)
        if found is None:
            raise NotFound(f"task {task_id!r} has no checkpoint with seq {seq}", "", "See list_checkpoints.", task=task_id)
        row, objects = found
        states.check_row(task_id, row)
        tree = chunks.unpack_plain(row.root, row.refs, objects)
        shown = values.to_json({name: tree[name] for name in EDITED})
        changed = fn(shown)
        if type(changed) is not dict or changed.keys() != set(EDITED):
            raise InvalidState(
                "the edited state is no state", f"it needs exactly {', '.join(EDITED)}", "Correct it; nothing was written."
            )
        try:
            new = values.from_json(changed)
        except Damaged as error:
            raise InvalidState("the edited state cannot be read", error.why, "Correct it; nothing was written.") from error
        if values.encode_tree([new], depth=chunks.DEPTH) == values.encode_tree(
            [{name: tree[name] for name in EDITED}], depth=chunks.DEPTH
        ):
            return None
        return self._save_edited(task_id, tree | new, row, head, branch, f"edited from {row.seq}")

    def _where(self, task: str) -> tuple[Head, str]:
        row = self.store.task(task)
        if row is None or row.head is None:
            raise self._no_task(task)
        return row.head, row.branch

    def _save_edited(
        self, task: str, tree: dict[str, Any], old: CheckpointRow, head: Head, branch: str, label: str
    ) -> Checkpoint:
        _check(tree)
        metadata = values.encode_tree(tree["metadata"]) if tree["metadata"] else b""
        if len(metadata) > METADATA_LIMIT:
            raise InvalidState(
                f"metadata takes {len(metadata)} bytes",
                f"it lies in every header, and the limit is {METADATA_LIMIT}",
                "Keep large values in agent_state; nothing was written.",
                field="metadata",
            )
        packed = chunks.pack(tree, values._TREES, flat=not self.store.chunked)
        row = CheckpointRow(
            id=new_id(),
            branch=branch,
            parent_seq=head.seq,
            step=tree["step"],
            kind="edit",
            label=label,
            created_at=to_us(now()),
            format=states.FORMAT,
            schema=old.schema,
            size=packed.size,
            digest=packed.digest,
            metadata=metadata,
            root=packed.data,
            refs=packed.refs,
        )
        # Whether it can be loaded is found out now, and not after a restart.
        self._unpack(task, row.sealed(task), {obj.name: obj for obj in packed.new})
        done = self.store.commit(Commit(task=task, id=row.id, checkpoint=row, expect=head, objects=packed.new))
        return self._header(task, replace(row, seq=done.seq or 0))


def _check(tree: dict[str, Any]) -> None:
    kinds = {"messages": list, "metadata": dict, "step": int, "turns": list, "finished": bool}
    wrong = [name for name, kind in kinds.items() if type(tree.get(name)) is not kind]
    if "agent_state" not in tree:
        wrong.append("agent_state")
    if wrong or tree["step"] < 0:
        raise InvalidState(
            f"{', '.join(wrong) or 'step'} of the edited state is not what it must be",
            "messages is a list, metadata an object, step a number of zero or more",
            "Correct it; nothing was written.",
            field=(wrong or ["step"])[0],
        )

"""Schema change: an older state's plain tree led to the schema of the program, link by link, before any class is made."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from safepoint.codec import values
from safepoint.errors import Damaged, InvalidState, RefusedType, SafepointError, UsageError
from safepoint.model import a_type

__all__ = ["Migrations", "blamed", "migrated"]

Migrations = Mapping[int, Callable[[dict[str, Any]], dict[str, Any]]]

# What a state cannot be without, and the types that each of these can have in a plain tree. agent_state may be anything.
_PARTS: dict[str, tuple[type, ...]] = {
    "messages": (list,),
    "agent_state": (),
    "metadata": (dict,),
    "step": (int,),
    "turns": (list,),
    "finished": (bool,),
}


def migrated(tree: dict[str, Any], start: int, goal: int, migrations: Migrations, at: str, *, depth: int) -> bytes:
    """The encoding of ``tree`` under schema ``goal``. The tree is the caller's to give away: a migration may change it in place.

    Raises:
        InvalidState: A link is missing, has raised, or has returned what is no state; names ``at`` and the link.
    """
    for version in range(start, goal):
        step = migrations.get(version)
        if step is None:
            raise InvalidState(
                f"{at} has schema {start}, and no migration leads from {version} to {version + 1}",
                f"this program declares schema_version={goal}",
                f"Give open(migrations={{{version}: function}}); the checkpoint is left as it is.",
                version=version,
            )
        known = _PARTS.keys() | tree.keys()
        try:
            made: Any = step(tree)
        except Exception as error:
            # Its text may tell what is in the state; the cause has it.
            raise _failed(at, version, f"it raised {type(error).__qualname__}", "Correct it") from error
        if inspect.iscoroutine(made):
            made.close()
        if type(made) is not dict:
            raise _failed(at, version, f"it returned {a_type(made)}, not the tree", "Return the tree at its end")
        for part, types in _PARTS.items():
            if part not in made:
                raise _failed(at, version, f"the tree that it returned has no part {part!r}", f"Let it keep {part!r}")
            if types and type(made[part]) not in types:
                raise _failed(at, version, f"{part!r} of the tree that it returned is {a_type(made[part])}", "Correct it")
        if not 0 <= made["step"] < 1 << 63:
            raise _failed(at, version, "'step' of the tree that it returned is no number of a step", "Correct it")
        # What no state has would be gone at the next save.
        more = next((part for part in made if part not in known), None)
        if more is not None:
            why = f"the tree that it returned has a part {more!r:.80}, which no state has"
            raise _failed(at, version, why, "Put it into agent_state or metadata")
        tree = made
    try:
        return values.encode_tree(tree, depth=depth)
    except (RefusedType, UsageError, InvalidState) as error:
        raise _failed(at, goal - 1, f"in the tree that it returned, {error.what}: {error.why}", error.remedy) from error


def blamed(error: SafepointError, start: int, goal: int) -> SafepointError:
    """What it means that a migrated tree cannot be loaded: not that stored data are damaged."""
    if not isinstance(error, Damaged):
        return error
    return InvalidState(error.what, error.why, f"Correct the migrations from schema {start} to {goal}.", **error.details)


def _failed(at: str, version: int, why: str, remedy: str) -> InvalidState:
    return InvalidState(
        f"the migration {version} -> {version + 1} of {at} has failed",
        why,
        f"{remedy.rstrip('.')}; the checkpoint is left as it is.",
        version=version,
    )

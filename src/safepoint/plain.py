"""For migrations: values of the application's classes in the plain tree of a state, before any class is made.

Containers and values that JSON has are in the tree as they are. All else is a ``Tagged``: its ``tag`` is the row of the type table
(docs/types.md), its ``name`` that of the class, ``module:Qualname``, its ``value`` what it is made of. See docs/schema.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from safepoint.codec.kinds import Tagged
from safepoint.errors import UsageError

__all__ = ["Tagged", "change", "drop", "rename"]

_MARKS = ("", "-", ".", "+", "~")


def change(tree: Any, name: str, fn: Callable[[Tagged], Any]) -> Any:
    """Call ``fn`` with every value of the class of that name, wherever it is in the tree; innermost first.

    Args:
        tree: A plain tree, or a part of one. It is changed in place.
        name: As it was stored: ``module:Qualname``, or what ``register(name=…)`` said.
        fn: Changes ``value.value`` in place and returns None, or returns what is to stand in its place: a plain value, or another
            ``Tagged``.

    Returns:
        The tree, or what has taken its place if it is itself such a value.
    """
    if isinstance(tree, dict):
        for key, item in tree.items():
            tree[key] = change(item, name, fn)
    elif isinstance(tree, list):
        tree[:] = [change(item, name, fn) for item in tree]
    elif isinstance(tree, Tagged):
        change(tree.value, name, fn)
        if tree.name == name:
            made = fn(tree)
            return tree if made is None else made
    return tree


def rename(value: Tagged, old: str, new: str) -> None:
    """Rename a field of an instance, set or not; its place among the others stays. Nothing happens if there is no such field."""
    fields = _fields(value)
    if any(mark + new in fields for mark in _MARKS) and any(mark + old in fields for mark in _MARKS):
        raise UsageError(f"{value.name} has a field {new!r} already", "", "Drop one of them first.")
    renamed = {mark + old: mark + new for mark in _MARKS}
    items = [(renamed.get(key, key), item) for key, item in fields.items()]
    fields.clear()
    fields.update(items)
    if "*" in fields:  # pydantic's list of the fields that were set, after two flags
        fields["*"][2:] = [new if name == old else name for name in fields["*"][2:]]


def drop(value: Tagged, field: str) -> None:
    """Take a field or another attribute out of an instance. Nothing happens if there is none."""
    fields = _fields(value)
    for mark in _MARKS:
        fields.pop(mark + field, None)
    if "*" in fields:
        fields["*"][2:] = [name for name in fields["*"][2:] if name != field]


def _fields(value: Tagged) -> dict[str, Any]:
    if not isinstance(value, Tagged) or type(value.value) is not dict:
        raise UsageError(
            "this value has no fields", "", "Pass what change() hands to its function, of a class that has fields."
        )
    return value.value

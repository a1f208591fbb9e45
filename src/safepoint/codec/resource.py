"""Something outside that a state refers to: a cursor, an upload, a job. Its value is for the program, and for no log or page."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from safepoint.codec.kinds import Tagged
from safepoint.codec.registry import GLOBAL
from safepoint.errors import UsageError
from safepoint.model import a_type, check_id, now

__all__ = ["Resource", "masked"]

_NAME = "safepoint:Resource"


@dataclass(repr=False, slots=True)
class Resource:
    """Names something outside that the agent has opened. It may stand anywhere in ``agent_state``.

    Attributes:
        kind: What it is, as in ``safepoint.resource(kind, …)``: text like an id.
        value: What it takes to use it again; any value that can be stored. Never printed.
        expires_at: When it stops being of use, aware; None if nobody knows.
        ended: Set by the library when the task, or a turn of it, ends: how many steps it had done. The close hook was, or is
            still to be, called, and the resource is not to be used any more.
    """

    kind: str
    value: Any
    expires_at: datetime | None = None
    ended: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_id(self.kind, "Resource(kind=)")
        if self.expires_at is None:
            return
        if not isinstance(self.expires_at, datetime):
            raise UsageError("Resource(expires_at=) must be a datetime", f"it is {a_type(self.expires_at)}", "Or leave it out.")
        if self.expires_at.utcoffset() is None:
            raise UsageError(
                "Resource(expires_at=) has no time zone", "nobody could say when that is", "Use datetime.now(UTC) + …."
            )

    @property
    def expired(self) -> bool:
        return self.expires_at is not None and self.expires_at <= now()

    @property
    def closed(self) -> bool:
        return self.ended is not None

    def __repr__(self) -> str:
        return _text(self.kind, self.expires_at, self.ended)


def _text(kind: Any, expires: object, ended: object) -> str:
    until = "" if expires is None else f" expires {expires}"
    return f"<Resource {kind}{until}{'' if ended is None else ' closed'}>"


GLOBAL.add(Resource, name=_NAME)


def masked(tree: Any) -> Any:
    """A plain tree, or its JSON form, with a line of text in place of every Resource: for whatever people read. ``tree`` itself
    stays as it is."""
    if type(tree) is Tagged:
        if tree.name == _NAME:
            return _shown(tree.value)
        inner = masked(tree.value)
        return tree if inner is tree.value else Tagged(tree.tag, tree.name, inner)
    if type(tree) is list:
        items = [masked(item) for item in tree]
        return items if any(a is not b for a, b in zip(items, tree, strict=True)) else tree
    if type(tree) is dict:
        if tree.get("class") == _NAME and "$type" in tree:
            return _shown(tree.get("value"))
        held = {key: masked(item) for key, item in tree.items()}
        return held if any(held[key] is not item for key, item in tree.items()) else tree
    return tree


def _shown(parts: Any) -> str:
    parts = parts if type(parts) is dict else {}
    expires = parts.get("expires_at")
    # A common time is one text; one in a named zone comes in parts: text without zone, zone, fold.
    given = expires.value if type(expires) is Tagged else expires.get("value") if type(expires) is dict else expires
    return _text(parts.get("kind"), " ".join(map(str, given[:2])) if type(given) is list else given, parts.get("ended"))

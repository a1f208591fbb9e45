"""Whether two savers hold the same: every checkpoint by its id, exactly, types and order of pending writes included."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

__all__ = ["differences", "unequal"]


def differences(old: Any, new: Any, threads: list[str]) -> list[str]:
    """Where ``new`` differs from ``old`` in what ``list`` and ``get_tuple`` give."""
    found: list[str] = []
    for thread in threads:
        config = {"configurable": {"thread_id": thread}}
        theirs = {_key(one): one for one in old.list(config)}
        ours = {_key(one): one for one in new.list(config)}
        if theirs.keys() != ours.keys():
            found.append(f"{thread}: other checkpoints: {theirs.keys() ^ ours.keys()}")
            continue
        for key, one in theirs.items():
            found += [f"{thread} {key}, listed: {at}" for at in unequal(_parts(one), _parts(ours[key]))]
            asked = {"configurable": {"thread_id": thread, "checkpoint_ns": key[0], "checkpoint_id": key[1]}}
            found += [f"{thread} {key}: {at}" for at in unequal(_parts(old.get_tuple(asked)), _parts(new.get_tuple(asked)))]
        for ns in {key[0] for key in theirs}:
            asked = {"configurable": {"thread_id": thread, "checkpoint_ns": ns}}
            found += [
                f"{thread} {ns!r}, newest: {at}" for at in unequal(_parts(old.get_tuple(asked)), _parts(new.get_tuple(asked)))
            ]
    return found


def _key(one: Any) -> tuple[str, str]:
    where = one.config["configurable"]
    return where["checkpoint_ns"], where["checkpoint_id"]


def _parts(one: Any) -> Any:
    if one is None:
        return None
    checkpoint = {**one.checkpoint, "channel_values": dict(one.checkpoint["channel_values"])}
    return {**one._asdict(), "checkpoint": checkpoint, "pending_writes": [tuple(write) for write in one.pending_writes or []]}


def unequal(a: Any, b: Any, at: str = "") -> list[str]:
    """Where two values differ, exactly."""
    a, b = _bare(a), _bare(b)
    if type(a) is not type(b):
        return [f"{at}: {a!r} is a {type(a).__name__}, and {b!r} a {type(b).__name__}"]
    if isinstance(a, BaseModel):
        parts = ("__dict__", "__pydantic_fields_set__", "__pydantic_extra__", "__pydantic_private__")
        return [d for part in parts for d in unequal(getattr(a, part, None), getattr(b, part, None), f"{at}.{part}")]
    if isinstance(a, Mapping):
        if list(a) != list(b) and (set(a) != set(b) or at.endswith(".__dict__")):
            return [f"{at}: {list(a)} and {list(b)}"]
        return [d for key in a for d in unequal(a[key], b[key], f"{at}[{key!r}]")]
    if isinstance(a, list | tuple):
        if len(a) != len(b):
            return [f"{at}: {a!r} and {b!r}"]
        return [d for i, (x, y) in enumerate(zip(a, b, strict=True)) for d in unequal(x, y, f"{at}[{i}]")]
    if hasattr(a, "tobytes"):
        same = (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
        return [] if same else [f"{at}: {a!r} and {b!r}"]
    return [] if a == b or repr(a) == repr(b) == "nan" else [f"{at}: {a!r} and {b!r}"]


def _bare(value: Any) -> Any:
    """Versions of ours, and the mapping of them, carry where they are from."""
    if not type(value).__module__.startswith("safepoint"):
        return value
    if isinstance(value, Mapping):
        return dict(value)
    return next((cls(value) for cls in (int, float, str) if isinstance(value, cls)), value)

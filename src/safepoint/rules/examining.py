"""What a state holds, by size, and what it lacks of that which its agent needs; pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from safepoint.codec import values
from safepoint.codec.chunks import name_of
from safepoint.codec.kinds import Tagged
from safepoint.errors import SafepointError
from safepoint.rules import health

__all__ = ["FieldReport", "Repeat", "Size", "fields", "history_of", "repeats", "sizes"]

BIG = 256
"""Bytes from which on a value is looked for at other places too."""
_DEPTH = 6


@dataclass(frozen=True, slots=True)
class FieldReport:
    """Something that the agent declared with ``requires=[…]``."""

    path: str
    found: Literal["present", "missing", "empty", "None"]
    type: str
    """Of what was found; '' if missing."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much a part of a state takes."""

    path: str
    bytes: int
    share: float
    """Of the whole state, 0 to 1."""
    items: int | None = None
    """Of a list, dict or set."""


@dataclass(frozen=True, slots=True)
class Repeat:
    """The same content at several places."""

    paths: tuple[str, ...]
    """The first few of them."""
    times: int
    bytes: int
    """Of one of them."""


def fields(agent_state: Any, tree: Mapping[str, Any], wanted: Sequence[str]) -> tuple[FieldReport, ...]:
    """How each of the paths stands; they are followed as ``health.requires`` does."""
    return tuple(_field(agent_state, tree, path) for path in wanted)


def _field(agent_state: Any, tree: Mapping[str, Any], path: str) -> FieldReport:
    parts = path.split(".")
    found = health.follow(agent_state, parts)
    if found is health.GONE and parts[0] in tree:
        found = health.follow(tree[parts[0]], parts[1:])
    if found is health.GONE:
        return FieldReport(path, "missing", "")
    kind = _type(found)
    if found is None:
        return FieldReport(path, "None", kind)
    plain = found.value if isinstance(found, Tagged) else found
    if isinstance(plain, str | bytes | list | dict | tuple | set | frozenset) and not plain:
        return FieldReport(path, "empty", kind)
    return FieldReport(path, "present", kind)


def _type(value: Any) -> str:
    if isinstance(value, Tagged):
        return str(getattr(value, "name", None) or getattr(value, "kind", "value"))
    return type(value).__name__


def sizes(tree: Mapping[str, Any], most: int = 10) -> tuple[tuple[Size, ...], tuple[Size, ...]]:
    """The parts of a state by size, and the biggest single things within them, each with its path."""
    top = {name: _bytes(value) for name, value in tree.items()}
    whole = sum(top.values()) or 1
    parts = [Size(name, n, n / whole, _items(tree[name])) for name, n in top.items()]
    inner: list[Size] = []
    for path, value in _within(tree):
        n = _bytes(value)
        inner.append(Size(path, n, n / whole, _items(value)))
    inner.sort(key=lambda s: -s.bytes)
    return tuple(sorted(parts, key=lambda s: -s.bytes)), tuple(inner[:most])


def _within(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The items of the lists and dicts at the top."""
    for name, value in tree.items():
        plain = value.value if isinstance(value, Tagged) else value
        if isinstance(plain, Mapping):
            yield from ((f"{name}.{key}", item) for key, item in plain.items())
        elif isinstance(plain, list | tuple):
            yield from ((f"{name}[{i}]", item) for i, item in enumerate(plain))


def repeats(tree: Mapping[str, Any], most: int = 10) -> tuple[Repeat, ...]:
    """Content that stands at more than one place, by what it takes beyond the first."""
    seen: dict[bytes, tuple[list[str], int]] = {}
    for name, value in tree.items():
        _look(name, value, seen, 0)
    found = [Repeat(tuple(paths[:3]), len(paths), n) for paths, n in seen.values() if len(paths) > 1]
    return tuple(sorted(found, key=lambda r: -(r.times - 1) * r.bytes)[:most])


def _look(path: str, value: Any, seen: dict[bytes, tuple[list[str], int]], depth: int) -> None:
    plain = value.value if isinstance(value, Tagged) else value
    if isinstance(plain, str | bytes):
        if len(plain) >= BIG:
            data = plain.encode("utf-8", "surrogatepass") if isinstance(plain, str) else bytes(plain)
            paths, _ = seen.setdefault(name_of(b"", data), ([], len(data)))
            paths.append(path)
    elif depth < _DEPTH:
        if isinstance(plain, Mapping):
            for key, item in plain.items():
                _look(f"{path}.{key}", item, seen, depth + 1)
        elif isinstance(plain, list | tuple):
            for i, item in enumerate(plain):
                _look(f"{path}[{i}]", item, seen, depth + 1)


def _bytes(value: Any) -> int:
    try:
        return len(values.encode_tree(value))
    except SafepointError:  # deeper than a value may be by itself
        return 0


def _items(value: Any) -> int | None:
    plain = value.value if isinstance(value, Tagged) else value
    return len(plain) if isinstance(plain, list | tuple | dict | set | frozenset) else None


def history_of(tree: Mapping[str, Any]) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """The provider format of the messages, what mending their end would do, and which rules they break for good."""
    from safepoint.rules import history  # of use to those who look

    messages, known = tree["messages"], history.context_in(tree["metadata"])
    if not isinstance(messages, list):
        return "", (), ()
    fixed = history.repair(messages, None, known)
    return fixed.format, fixed.said, tuple(map(str, history.lasting(messages, known)))

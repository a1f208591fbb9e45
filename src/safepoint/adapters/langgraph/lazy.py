"""A stored checkpoint that is read as far as it is asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

import msgspec

from safepoint.adapters.langgraph.wrapping import read_messages, unwrapped_value, wrapped_value
from safepoint.codec.chunkread import _MAP, Reader, _Cursor, _List, _opened, read_part
from safepoint.codec.chunks import Packed, root_digest
from safepoint.codec.nodes import Node, Page, Split, Tree, dump, item_level, map_size
from safepoint.codec.registry import Registry
from safepoint.errors import Damaged
from safepoint.model import Obj

__all__ = ["Base", "Channels", "Objects", "Parts", "Versions"]

Objects = Mapping[bytes, Obj] | Callable[[], Mapping[bytes, Obj]]
"""The objects that a root reaches, or what fetches them."""

_GONE: Final = object()
_LOCK: Final = threading.Lock()


@dataclass(frozen=True, slots=True, eq=False)
class Base(Packed):
    """A packed checkpoint, and the versions that its channels had: what the next one is packed against."""

    versions: Mapping[str, Any] = field(repr=False)
    careful: bool
    """Whether some message had in it what is to be looked for; see ``wrapping.wrapped_value``."""

    @classmethod
    def of(cls, packed: Packed, versions: Mapping[str, Any], careful: bool = False) -> Self:
        return cls(packed.data, packed.refs, packed.digest, packed.new, packed.size, packed._kids, versions, careful)


class _Name(bytes):
    """The name of an object that a value lies in; other bytes are the value's encoding."""

    __slots__ = ()


class _ListReader(Reader):
    """Reads one channel, and makes LangChain's messages of the items of a list as it goes."""

    def __init__(self, objects: Mapping[bytes, Obj], registry: Registry, size: int | None) -> None:
        super().__init__(objects, registry, None, size)
        self._registered = registry
        self.firm_at: set[int] = set()
        """Where those pages of the list begin that marshal can tell from all else; see ``nodes.plain``."""

    def firm(self, items: bytes, work: _List) -> list[Any]:
        if work.level != item_level(0):
            return super().firm(items, work)
        try:
            values = read_messages(items)
        except msgspec.MsgspecError:  # mixed with others, or none at all
            values = super().firm(items, work)
        self.firm_at.add(len(work.values))
        return values

    def mark(self, value: list[Any], tree: Tree) -> None:
        """Give the pages the marks that the next pack will compare with. ``value`` has been in nobody's hands yet."""
        plain = wrapped_value(value, self._registered, careful=False)
        leaves: list[Page] = []
        pos = 0
        for page in tree.leaves:
            if pos in self.firm_at:
                part = plain[pos : pos + page.n]  # has a name, as in the pack: marshal's bytes tell how often a thing is held
                mark, head = dump(part), dump(part[0])
                if mark is not None and head is not None:
                    page = Page(page.obj, page.n, page.size, mark, (), (), hash(head))
            leaves.append(page)
            pos += page.n
        tree.leaves = tuple(leaves)


class Parts:
    """The parts of a root, in their stored form, and what has been decoded of them."""

    def __init__(
        self, root: bytes, refs: bytes, objects: Objects, registry: Registry, size: int | None, at: str, marked: bool = False
    ) -> None:
        self.root = root
        self.refs = refs
        self.at = at
        self._registry = registry
        self._size = size
        self._marked = marked
        self._objects = objects
        self._nodes: dict[str, Node] = {}
        try:
            raws = read_part(_MAP, root)
        except msgspec.MsgspecError as error:
            raise self.damaged(str(error)) from None
        cursor = _Cursor(refs)
        self.parts: dict[str, bytes | dict[str, bytes]] = {}
        for key, raw in raws.items():
            code = bytes(raw)
            if code == cursor.code:
                self.parts[key] = _Name(cursor.take())
            elif cursor.code and (inner := _opened(code, cursor.code)) is not None:
                self.parts[key] = _children(inner, cursor)
            else:
                self.parts[key] = code
        cursor.end("the root")
        self._channels: dict[str, bytes] | None = None

    def damaged(self, why: str) -> Damaged:
        return Damaged(f"{self.at} cannot be loaded", why, "Load an earlier checkpoint.")

    def _reader(self) -> _ListReader:
        if callable(self._objects):
            self._objects = self._objects()
        return _ListReader(self._objects, self._registry, self._size)

    @property
    def channels(self) -> dict[str, bytes]:
        """The channels' values as they are stored, by name."""
        if self._channels is None:
            part = self.parts.get("agent_state", b"")
            if type(part) is _Name:
                obj = self._reader().get(part)
                cursor = _Cursor(obj.refs)
                self._channels = _children(self._members(obj.data[1:] if obj.data[:1] == b"v" else b""), cursor)
                cursor.end("agent_state")
            else:
                self._channels = part if isinstance(part, dict) else _children(self._members(part), _Cursor(b""))
        return self._channels

    def _members(self, code: bytes) -> dict[str, msgspec.Raw]:
        try:
            return read_part(_MAP, code)
        except msgspec.MsgspecError as error:
            raise self.damaged(f"its channels cannot be read: {error}") from None

    def value(self, name: str) -> Any:
        """The value of a channel, made anew."""
        code = self.channels[name]
        path = f"{self.at}: channel {name!r}"
        if type(code) is _Name:
            reader = self._reader()
            plain, node = reader.object(code, path, 1)
            value = unwrapped_value(plain, path)
            if self._marked and type(node) is Tree:
                reader.mark(value, node)
        else:
            plain, node = self._read(code, path, 1)
            value = unwrapped_value(plain, path)
        self._nodes.setdefault(name, node)
        return value

    @property
    def fetched(self) -> bool:
        """Whether the objects are at hand."""
        return not callable(self._objects)

    def part(self, key: str, later: Collection[str] = ()) -> Any:
        """A part of the root that is not the channels, with no class of the application in it. What is named ``later`` in it is read
        when it is looked at, if the objects would have to be fetched for it now."""
        part = self.parts.get(key)
        if part is None:
            return None
        if isinstance(part, dict):
            return {
                name: Versions(lambda code=code: self._mapping(code, key))  # type: ignore[misc]
                if type(code) is _Name and name in later and not self.fetched
                else self._read(code, key, 1)[0]
                for name, code in part.items()
            }
        return self._read(part, key, 0)[0]

    def _mapping(self, code: bytes, key: str) -> dict[str, Any]:
        found = self._read(code, key, 1)[0]
        if type(found) is not dict:
            raise self.damaged("its versions are no mapping")
        return found

    def _read(self, code: bytes, path: str, level: int) -> tuple[Any, Node]:
        if type(code) is _Name:
            return self._reader().object(code, path, level)
        # What is inline needs no objects: none are fetched for it.
        return Reader({}, self._registry, None, self._size).decode(code, path), code

    def packed(self) -> Packed:
        """All of it as a base for the next pack. Decodes what has not been decoded."""
        kids: dict[str, Node] = {}
        for key, part in self.parts.items():
            if key == "agent_state":
                for name in self.channels:
                    if name not in self._nodes:
                        self.value(name)
                nodes = {name: self._nodes[name] for name in self.channels}
                kids[key] = Split(bytes(part) if type(part) is _Name else None, map_size(nodes), nodes, 0)
            elif isinstance(part, dict):
                nodes = {name: self._read(code, key, 1)[1] for name, code in part.items()}
                kids[key] = Split(None, map_size(nodes), nodes, 0)
            else:
                kids[key] = self._read(part, key, 0)[1]
        return Packed(self.root, self.refs, root_digest(self.root, self.refs), (), map_size(kids), kids)


def _children(raws: Mapping[str, msgspec.Raw], cursor: _Cursor) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for key, raw in raws.items():
        code = bytes(raw)
        found[key] = _Name(cursor.take()) if code == cursor.code else code
    return found


class _Read(MutableMapping[str, Any]):
    """A mapping that is read when it is looked at.

    No subclass of dict: code in C (json, ormsgpack) would read the empty storage of one, and lose everything without a word. What
    is set or deleted here changes nothing that is stored.
    """

    __slots__ = ()

    def _all(self) -> dict[str, Any]:
        raise NotImplementedError

    def __getitem__(self, name: str) -> Any:
        return self._all()[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._all()[name] = value

    def __delitem__(self, name: str) -> None:
        del self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def __contains__(self, name: object) -> bool:
        return name in self._all()

    def copy(self) -> dict[str, Any]:
        """A dict of all values, decoded."""
        return dict(self)

    def __or__(self, other: Mapping[str, Any]) -> dict[str, Any]:
        return {**self, **other}

    def __ror__(self, other: Mapping[str, Any]) -> dict[str, Any]:
        return {**other, **self}

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class Versions(_Read):
    """Versions of channels, all of which are made when the first is asked for."""

    __slots__ = ("_make", "_values")

    def __init__(self, make: Callable[[], dict[str, Any]]) -> None:
        self._make = make
        self._values: dict[str, Any] | None = None

    def _all(self) -> dict[str, Any]:
        if self._values is None:
            made = self._make()
            with _LOCK:
                if self._values is None:
                    self._values = made
        return self._values

    def __repr__(self) -> str:
        return "<versions>" if self._values is None else repr(self._values)


class Channels(_Read):
    """``channel_values`` whose values are decoded when they are first asked for."""

    __slots__ = ("_parts", "_values")

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._values: dict[str, Any] | None = None

    def _all(self) -> dict[str, Any]:
        if self._values is None:
            made = dict.fromkeys(self._parts.channels, _GONE)
            with _LOCK:
                if self._values is None:
                    self._values = made
        return self._values

    def __getitem__(self, name: str) -> Any:
        values = self._all()
        value = values[name]
        if value is _GONE:
            made = self._parts.value(name)
            with _LOCK:  # another thread may have been here too: both are to see one value
                value = values[name]
                if value is _GONE:
                    value = values[name] = made
        return value

    def __repr__(self) -> str:  # the values are content
        return f"<channel_values {list(self)}>"

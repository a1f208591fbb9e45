"""A state as a small root over content-addressed objects that are stored once; pure.

``pack`` turns a mapping into a root and the objects that are new against a base; ``unpack`` turns them back. What a value becomes
depends on the value alone, never on the base, on history or on object identity: equal values have equal digests, an equal list is
one 16-byte name wherever it stands, and packing against a base gives what packing from scratch does, only sooner.

Layout, by the size of a value's encoding (the constants are in ``nodes``):

- *At the top* of the mapping and in dicts opened there, a list above 512 bytes becomes a tree of pages (``lists``), any other value
  above 256 bytes an object; all else is inline. A top-level value that is exactly a dict with text keys is opened: each of its
  values is placed like this too, and what remains is inline in the root up to 1 KiB, else an object.
- *Below that*, and in list items (inline up to 48 bytes), a value is one object. Only above 16 KiB are exact lists and dicts taken
  apart: a list becomes a tree, a dict's values above 256 bytes become objects, and so on down.
- With ``opened=False`` no dict is opened at the top. Journal entries are packed so: a model's reply is then the same object as the
  message that it becomes in the state.

*Depth.* 200 containers may nest in a value: in each value of the mapping, and where that is a list, or a dict that is opened, in each
item or value of it, and in each item of a list that is a value of an opened dict. Size and base have no say in it.

``flat=True`` makes no objects: every value is inline, for stores that keep each state whole.

What a ``Packed`` keeps beyond root and digest (see ``nodes`` on fingerprints) makes the next pack cheap: about the size of the
state once more in marshal's bytes, of which all but the changed pages are shared with the packs before and after.

Not safe against a value that changes while it is packed, in the sense that the result is then neither the old nor the new value;
but objects are always what their names say, and the next pack sees every difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

from safepoint.codec.chunkread import Reader
from safepoint.codec.lists import Lists
from safepoint.codec.nodes import (
    BIG,
    DICT_MIN,
    LEVELS,
    LIST_MIN,
    VALUE_MIN,
    Node,
    Split,
    Tree,
    Value,
    all_names,
    dump,
    item_level,
    map_size,
    name_of,
    plain,
    under,
    write_map,
)
from safepoint.codec.registry import Registry
from safepoint.codec.values import MAX_DEPTH
from safepoint.errors import RefusedType
from safepoint.model import Obj

__all__ = ["DEPTH", "KEEP", "Packed", "name_of", "pack", "root_digest", "unpack", "unpack_plain", "verify_obj"]

DEPTH: Final = MAX_DEPTH + 3
"""The containers that may nest in a whole mapping: itself, an opened dict, a list in that, and what a value may have."""

KEEP: Final = object()
"""For ``pack``, in place of a value at the top or in a dict opened there: what the base has at that place, without a look at it."""

_SMALL: Final = frozenset((float, bool, type(None)))  # never more than nine bytes
_FAR: Final = 4096  # A new object above this is looked up in all of the base's values: it may have stood at another place.


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A packed mapping: the root, what a store needs besides, and (private) what makes the next pack cheap.

    Attributes:
        data: The root: MessagePack of the mapping with ``ref`` in place of what lies in objects.
        refs: 16-byte names of those objects.
        digest: 16 bytes over both; equal values have equal digests, and no others.
        new: Every object that this root reaches and the base did not. (Some that the base did reach may be among them.)
        size: Bytes of the whole value's encoding, each occurrence counted.
    """

    data: bytes = field(repr=False)
    refs: bytes = field(repr=False)
    digest: bytes
    new: tuple[Obj, ...] = field(repr=False)
    size: int
    _kids: dict[str, Node] = field(repr=False)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def names(self) -> frozenset[bytes]:
        """The names of all objects that this root reaches. Walks everything: for tests and tools."""
        return frozenset(name for kid in self._kids.values() for name in all_names(kid))


def root_digest(data: bytes, refs: bytes) -> bytes:
    """The digest of a root; see ``Packed.digest``."""
    return name_of(refs, data)


def verify_obj(obj: Obj) -> bool:
    """Whether an object is what its name says."""
    return name_of(obj.refs, obj.data) == obj.name


def pack(
    value: Mapping[str, Any],
    registry: Registry,
    *,
    base: Packed | None = None,
    warm: tuple[Packed, ...] = (),
    path: str = "",
    opened: bool = True,
    flat: bool = False,
) -> Packed:
    """Pack a mapping.

    Args:
        value: A state, a call's arguments, or ``{"result": …}``.
        registry: The classes that may be stored.
        base: What the store is certain to hold: objects that it reaches may be left out of ``Packed.new``.
        warm: Other packs to take fingerprints from, of whose objects nothing may be left out.
        path: Where the value stands, for errors.
        opened: Whether dicts at the top are opened (a state), or kept whole up to 16 KiB (arguments and results, so that a
            reply is stored as the same object as the message it becomes).
        flat: Whether everything is to be inline in the root; ``base`` and ``warm`` are then of no use. The same values are taken
            and refused as without it.

    Raises:
        RefusedType: some value cannot be stored; names its path and type.
    """
    if flat:
        return _Flat(registry, None, (), opened).pack(value, path)
    return _Writer(registry, base, warm, opened).pack(value, path)


def unpack(
    data: bytes,
    refs: bytes,
    objects: Mapping[bytes, Obj],
    registry: Registry,
    *,
    path: str = "",
    spare: str | None = None,
    size: int | None = None,
) -> tuple[dict[str, Any], Packed]:
    """The packed mapping, and a ``Packed`` to serve as base for the next pack. Every object that is read is verified.

    Each occurrence of an object is revived anew: two equal messages are one object in the store, and two in the list. Of the
    part named ``spare``, a dict, damaged parts are left out. ``size`` is what ``Packed.size`` was, if that is known.

    Raises:
        Damaged: an object is missing, is not what its name says, or cannot be read.
        RefusedType: a class is not registered.
    """
    value, kids = Reader(objects, registry, spare, size).mapping(data, refs, path, 0)
    return value, Packed(data, refs, root_digest(data, refs), (), map_size(kids), kids)


def unpack_plain(
    data: bytes, refs: bytes, objects: Mapping[bytes, Obj], *, spare: str | None = None, size: int | None = None
) -> dict[str, Any]:
    """The packed mapping as plain data, without any class being needed; see ``values.decode_plain``."""
    return Reader(objects, None, spare, size).mapping(data, refs, "", 0)[0]


# Writing -------------------------------------------------------------------------------------------------------------


class _Writer(Lists):
    def __init__(self, registry: Registry, base: Packed | None, warm: tuple[Packed, ...], opened: bool) -> None:
        super().__init__(
            registry,
            lambda: [] if base is None else list(_trees(base._kids)),
            lambda: [tree for packed in warm for tree in _trees(packed._kids)],
        )
        self.base: dict[str, Node] = {} if base is None else base._kids
        self.level = 0 if opened else 1
        self.replaced: list[Node] = []  # nodes of the base that may have been made again

    def pack(self, value: Mapping[str, Any], path: str) -> Packed:
        value = dict(value)
        if not _text_keys(value):
            raise RefusedType(
                f"{path or 'the mapping'} has a key that is no text",
                "",
                "Use str keys without lone surrogates.",
                path=path,
                type="key",
            )
        kids = {k: self.place(v, self.base.get(k), self.level, under(path, k)) for k, v in value.items()}
        refs: list[bytes] = []
        data = write_map(kids, refs)
        joined = b"".join(refs)
        return Packed(data, joined, root_digest(data, joined), self._left(), map_size(kids), kids)

    def place(self, v: Any, base: Node | None, level: int, path: str) -> Node:
        """Place a value of the top (level 0, where dicts are opened), of a dict opened there (1), or further down (2 and more).

        Without opening, the top is level 1.
        """
        t = type(v)
        if t in _SMALL:
            if base is not None and type(base) is not bytes:
                self.replaced.append(base)
            return self.encode(v, path)
        if v is KEEP and base is not None:
            return base
        node = self._place(v, t, base, level, path)
        if base is not None and node is not base and type(base) is not bytes and type(node) is not type(base):
            self.replaced.append(base)
        return node

    def _place(self, v: Any, t: type, base: Node | None, level: int, path: str) -> Node:
        if t is list and (level <= 1 or type(base) is Tree):
            old = base if type(base) is Tree else None
            tree = self.tree(v, old, LIST_MIN if level <= 1 else BIG, path, level)
            if tree is not None:
                return tree
            if level <= 1:
                return self.encode(v, path, more=1)
        elif t is dict and (level == 0 or type(base) is Split):
            split = self._dict(v, base if type(base) is Split else None, level, path)
            if split is not None:
                return split
        old_mark: bytes | None = None
        mark = None
        if type(base) is Value:
            mark = dump(v)
            if base.by_marshal and mark == base.mark:
                return base
            old_mark = None if base.by_marshal else base.mark
            self.replaced.append(base)
        elif t is not str:
            mark = dump(v)
        code = self.encode(v, path)
        size = len(code)
        if size <= VALUE_MIN:
            return code
        if size > BIG and (t is dict or t is list):
            node = self.split(v, path, level)
            if node is not None:
                return node
        if t is str:
            mark = dump(v)  # A str cannot change between its encoding and this.
        data = b"v" + code
        name = base.name if type(base) is Value and data == old_mark else self.add(b"", data).name
        if mark is not None and plain(v):
            return Value(name, size, mark, True)
        return Value(name, size, data, False)

    def split(self, value: Any, path: str, level: int) -> Node | None:
        if level > LEVELS:
            return None
        if type(value) is list:
            return self.tree(value, None, BIG, path, level)
        return self._dict(value, None, level, path)

    def _dict(self, v: dict[Any, Any], base: Split | None, level: int, path: str) -> Split | None:
        """Place the values of a dict one by one; None if it is to be kept whole."""
        if not _text_keys(v):
            return None
        at_top = level == 0
        if base is not None and base.level != level:
            base = None
        before = {} if base is None else base.kids
        mark = len(self.new)
        self.room -= not at_top
        kids = {k: self.place(x, before.get(k), level + 1, under(path, k)) for k, x in v.items()}
        self.room += not at_top
        size = map_size(kids)
        if not at_top and size <= BIG:
            while len(self.new) > mark:
                self.new.popitem()
            return None
        if base is not None:
            if base.name is not None and _same_kids(kids, before):
                return Split(base.name, size, kids, level)
            self.replaced.append(Split(base.name, 0, {k: kid for k, kid in before.items() if k not in kids}, level))
        refs: list[bytes] = []
        rest = write_map(kids, refs)
        if at_top and len(rest) <= DICT_MIN:
            return Split(None, size, kids, level)
        return Split(self.add(b"".join(refs), b"v" + rest).name, size, kids, level)

    def _left(self) -> tuple[Obj, ...]:
        """What was made, without what the base reaches."""
        if not self.new:
            return ()
        known = set(self.known())
        for node in self.replaced:
            known.update(all_names(node))
        left = tuple([obj for name, obj in self.new.items() if name not in known])
        if any(len(obj.data) > _FAR for obj in left):
            known = set(_value_names(self.base, 1))
            left = tuple([obj for obj in left if obj.name not in known])
        return left


class _Flat(_Writer):
    def place(self, v: Any, base: Node | None, level: int, path: str) -> Node:
        if level == 0 and type(v) is dict and _text_keys(v):
            # One by one, as the chunked form does: only then are both as deep as each other.
            parts: dict[str, Node] = {k: self.place(x, None, 1, under(path, k)) for k, x in v.items()}
            return write_map(parts, [])
        return self.encode(v, path, more=int(type(v) is list))


def _text_keys(value: Mapping[Any, Any]) -> bool:
    try:
        for key in value:
            if type(key) is not str:
                return False
            if not key.isascii():
                key.encode()
    except UnicodeEncodeError:
        return False
    return True


def _same_kids(a: dict[str, Node], b: dict[str, Node]) -> bool:
    if len(a) != len(b):
        return False
    for (k, x), (j, y) in zip(a.items(), b.items(), strict=True):
        if k != j:
            return False
        if x is y:
            continue
        if isinstance(x, bytes) or isinstance(y, bytes):
            if x != y:
                return False
        elif x.name is None or x.name != y.name:
            return False
    return True


def _trees(kids: Mapping[str, Node], depth: int = 1) -> list[Tree]:
    """The lists at the top and in dicts opened there."""
    found: list[Tree] = []
    for kid in kids.values():
        if type(kid) is Tree and kid.level == item_level(0):
            found.append(kid)
        elif type(kid) is Split and depth:
            found += _trees(kid.kids, depth - 1)
    return found


def _value_names(kids: Mapping[str, Node], depth: int) -> list[bytes]:
    found: list[bytes] = []
    for kid in kids.values():
        if not isinstance(kid, bytes) and kid.name is not None:
            found.append(kid.name)
        if isinstance(kid, Split) and depth:
            found += _value_names(kid.kids, depth - 1)
    return found

"""What chunks are made of: names, kinds, constants, and what a pack keeps so that the next one is cheap.

The first byte of an object's data is its kind; what follows is MessagePack, with ``ref(i)`` standing for the i-th name in refs:

====  ==========  ==================================================================================================
kind  object      data after the kind
====  ==========  ==================================================================================================
v     value       the value's encoding; in a large dict, ``ref`` in place of the children that are objects
l     leaf page   ``[size, [item or ref, ...]]``
i     index page  ``[level, items, size]``; refs are pages of the level below (leaf pages are level 0)
r     list root   ``[items, size, [open pages per level, highest first], [item or ref, ...]]``; refs are those open pages in
                  that order, then the objects of the open tail
====  ==========  ==================================================================================================

References appear in data in the order of refs, each once per place, so a reader needs no more than a counter. A root has no
kind: it starts with the MessagePack head of a map, which is none of these letters.

**Fingerprints.** To see that a value has not changed since the last pack, its ``marshal.dumps`` is compared with the one kept
then: one call in C, at the speed of memcpy. ``marshal.loads`` gives back type and value of every builtin exactly, so equal
bytes mean equal values, but for one thing: all that has a buffer (bytes, bytearray, memoryview, arrays) looks like bytes. So a
marshal fingerprint is kept only of values in which ``plain`` finds no such thing; a later value with a buffer in it then cannot
give the same bytes. All else (user classes make marshal raise) is compared by its encoding. The flags that marshal sets depend
on reference counts: that can make equal values look different, never the other way round, and costs one look at a page.

A fingerprint is taken *before* the encoding that it stands for, or checked again after it: if another thread changes a value
while it is being packed, the next pack sees a difference rather than a match with what was never stored.
"""

from __future__ import annotations

import marshal
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from typing import Any, Final

import msgspec

from safepoint.codec.kinds import key_text
from safepoint.codec.values import ref
from safepoint.model import Obj

# Chosen by trial with bench/chunks.py: 2,000 saves of +1 KB, all kept, on bytes, and on microseconds of one pack.
ITEM_MIN: Final = (
    48  # An item up to this is inline: a name is 16 bytes, a store's row 50 to 100, but the tail is written again.
)
VALUE_MIN: Final = 256  # The same for top-level values, higher because few of them are shared between roots.
LIST_MIN: Final = 512  # A list up to this is not worth an object of its own.
DICT_MIN: Final = 1024  # What remains of an opened dict goes into the root up to this, else into an object.
BIG: Final = 16 * 1024  # A value above this is split further, so that a change deep in it does not write it all again.
PAGE_BITS: Final = 0x07  # A page ends after an item whose name has these bits clear: one in 8,
PAGE_MIN: Final = (
    8  # but not before this many: 15 on average. Pages of 20 made 9 % more bytes, and of 11 more pages to compare;
)
PAGE_MAX: Final = 64  # and at this many, so that 10,000 items without any such bits still make pages.
LEVELS: Final = 10  # A value this many levels down is not split any more: reading recurs some ten calls a level.
PAGED_MAX: Final = 64  # Levels of pages at load; 32 to the power of that is the list that a save would need for as many.
DEPTH_MAX: Final = 32  # Objects within objects at load, for whoever forges some; a save makes no more than LEVELS + 2.

PREFIX: Final = b"o1"
LEAF: Final = PREFIX + bytes(4)  # what is hashed before the data of an object without references

_encode = msgspec.msgpack.Encoder().encode
_ref_codes: dict[int, bytes] = {}


def name_of(refs: bytes, data: bytes) -> bytes:
    """The name of an object: 16 bytes of SHA-256 over what it refers to and what it holds."""
    if not refs and len(data) < 65536:
        return sha256(LEAF + data).digest()[:16]
    h = sha256(PREFIX + len(refs).to_bytes(4, "big") + refs)
    h.update(data)
    return h.digest()[:16]


def make(refs: bytes, data: bytes) -> Obj:
    return Obj(name_of(refs, data), refs, data)


def ref_code(index: int) -> bytes:
    """The encoding of ``ref(index)``."""
    code = _ref_codes.get(index)
    if code is None:
        # By index, not by position: two threads that append at once would shift every later code, and what is packed from
        # then on could not be read by any other process.
        code = _ref_codes[index] = _encode(ref(index))
    return code


def array_head(n: int) -> bytes:
    if n < 16:
        return bytes((0x90 | n,))
    return b"\xdc" + n.to_bytes(2, "big") if n < 65536 else b"\xdd" + n.to_bytes(4, "big")


def map_head(n: int) -> bytes:
    if n < 16:
        return bytes((0x80 | n,))
    return b"\xde" + n.to_bytes(2, "big") if n < 65536 else b"\xdf" + n.to_bytes(4, "big")


def dump(value: Any) -> bytes | None:
    """``value`` as marshal has it, or None if marshal cannot."""
    try:
        return marshal.dumps(value, 4)
    except Exception:  # Whatever marshal has against it: such a value is compared by its encoding.
        return None


_ATOMS: Final = frozenset((str, int, float, bool, type(None)))


def plain(value: Any, depth: int = 128) -> bool:
    """Whether marshal tells all of ``value`` apart from all else: exact builtins, and nothing with a buffer."""
    t = type(value)
    if t in _ATOMS:
        return True
    if depth == 0:
        return False
    if t is dict:
        for k, v in value.items():  # noqa: SIM110 - a generator costs twice the time
            if type(k) not in _ATOMS or (type(v) not in _ATOMS and not plain(v, depth - 1)):
                return False
        return True
    if t is list or t is tuple:
        for v in value:  # noqa: SIM110
            if type(v) not in _ATOMS and not plain(v, depth - 1):
                return False
        return True
    return False


class Value:
    """A value that is an object without children. ``mark`` is its fingerprint: marshal bytes, or else the object's data."""

    __slots__ = ("by_marshal", "mark", "name", "size")

    def __init__(self, name: bytes, size: int, mark: bytes, by_marshal: bool) -> None:
        self.name = name
        self.size = size
        self.mark = mark
        self.by_marshal = by_marshal


class Split:
    """A dict whose children were placed one by one; ``name`` is None if what remains is inline in the root."""

    __slots__ = ("kids", "level", "name", "size")

    def __init__(self, name: bytes | None, size: int, kids: dict[str, Node], level: int) -> None:
        self.level = level
        self.name = name
        self.size = size
        self.kids = kids


class Item:
    """One item of a list. ``code`` is its encoding if it is inline (then there is no ``name``).

    ``below`` are the names of all objects under its own; ``cut`` says that a page may end after it. ``mark`` is marshal's bytes,
    or the object's data, or the inline encoding; None if nothing is kept, and then it never compares equal.
    """

    __slots__ = ("below", "by_marshal", "code", "cut", "mark", "name", "size")

    def __init__(
        self,
        name: bytes | None,
        code: bytes,
        size: int,
        mark: bytes | None,
        by_marshal: bool,
        cut: bool,
        below: tuple[bytes, ...] = (),
    ) -> None:
        self.name = name
        self.code = code
        self.size = size
        self.mark = mark
        self.by_marshal = by_marshal
        self.cut = cut
        self.below = below


class Page:
    """A sealed leaf page. ``mark`` fingerprints all of it in one; without it, ``items`` has a mark for each item.

    ``below`` are names under the items' own objects. ``head`` is the hash of the first item's mark, to find this page by. A page
    that was read from a store makes its ``items`` when they are first asked for: most loads are not followed by a save. Such a
    page has a ``code`` too, unless objects lie under its items: the encoding of the items as one list.
    """

    __slots__ = ("_head", "_items", "below", "code", "mark", "n", "obj", "size")

    def __init__(
        self,
        obj: Obj,
        n: int,
        size: int,
        mark: bytes | None,
        items: tuple[Item, ...] | Callable[[], tuple[Item, ...]],
        below: tuple[bytes, ...],
        head: int | None = None,
        code: Callable[[], bytes] | None = None,
    ) -> None:
        self.code = code
        self.obj = obj
        self.n = n
        self.size = size
        self.mark = mark
        self._items = items
        self.below = below
        self._head = head

    @property
    def items(self) -> tuple[Item, ...]:
        if callable(self._items):
            self._items = self._items()
        return self._items

    @property
    def head(self) -> int:
        if self._head is None:
            self._head = hash(self.items[0].mark)
        return self._head


class Upper:
    """A sealed index page over ``width`` pages of the level below."""

    __slots__ = ("n", "obj", "size", "width")

    def __init__(self, obj: Obj, width: int, n: int, size: int) -> None:
        self.obj = obj
        self.width = width
        self.n = n
        self.size = size


class Tree:
    """A list: its root object, the sealed leaf pages, the sealed index pages of each level, and the open tail.

    ``level`` is that of its items: how far they may be split, so only a list whose items have the same can use its pages.
    """

    __slots__ = ("_heads", "_names", "leaves", "level", "n", "root", "size", "tail", "uppers")

    def __init__(
        self,
        root: Obj,
        n: int,
        size: int,
        leaves: tuple[Page, ...],
        uppers: tuple[tuple[Upper, ...], ...],
        tail: tuple[Item, ...],
        level: int,
    ) -> None:
        self.level = level
        self.root = root
        self.n = n
        self.size = size
        self.leaves = leaves
        self.uppers = uppers
        self.tail = tail
        self._heads: dict[int, int] | None = None
        self._names: dict[bytes, int] | None = None

    @property
    def name(self) -> bytes:
        return self.root.name

    @property
    def heads(self) -> dict[int, int]:
        """Leaf pages by the fingerprint of their first item; of several, the first."""
        if self._heads is None:
            self._heads = {p.head: i for i, p in reversed(tuple(enumerate(self.leaves)))}
        return self._heads

    @property
    def names(self) -> dict[bytes, int]:
        """Leaf pages by name; of several, the first."""
        if self._names is None:
            self._names = {p.obj.name: i for i, p in reversed(tuple(enumerate(self.leaves)))}
        return self._names


Node = bytes | Value | Split | Tree
"""How a value was placed; bytes are an inline encoding."""


def size_of(node: Node) -> int:
    """Bytes of the value's whole encoding."""
    return len(node) if isinstance(node, bytes) else node.size


def write(node: Node, refs: list[bytes]) -> bytes:
    """The encoding that stands for ``node`` in the object (or root) that holds it; appends to that object's ``refs``."""
    if isinstance(node, bytes):
        return node
    if isinstance(node, Split) and node.name is None:
        return write_map(node.kids, refs)
    assert node.name is not None
    refs.append(node.name)
    return ref_code(len(refs) - 1)


def write_map(kids: dict[str, Node], refs: list[bytes]) -> bytes:
    parts = [map_head(len(kids))]
    for key, kid in kids.items():
        parts.append(_encode(key))
        parts.append(kid if type(kid) is bytes else write(kid, refs))
    return b"".join(parts)


def map_size(kids: Mapping[str, Node]) -> int:
    return len(map_head(len(kids))) + sum([len(_encode(k)) + size_of(kid) for k, kid in kids.items()])


def under(path: str, key: str) -> str:
    """Where a dict's value stands, as ``values`` has it."""
    return f"{path}[{key_text(key)}]" if path else key


def item_level(level: int) -> int:
    """The level of the items of a list; the same at the top and in an opened dict, so that both have the same pages."""
    return max(level, 1) + 1


def cuts(name: bytes) -> bool:
    """Whether a page may end after the item of that name."""
    return not name[-1] & PAGE_BITS


def names_in(refs: bytes) -> Iterator[bytes]:
    return (refs[i : i + 16] for i in range(0, len(refs), 16))


def page_names(page: Page) -> Iterator[bytes]:
    """Every object that the page stands for, itself first."""
    yield page.obj.name
    yield from names_in(page.obj.refs)
    yield from page.below


def tail_names(items: tuple[Item, ...]) -> Iterator[bytes]:
    for item in items:
        if item.name is not None:
            yield item.name
            yield from item.below


def all_names(node: Node) -> Iterator[bytes]:
    """Every object that is reachable from ``node``, its own included."""
    if isinstance(node, Value):
        yield node.name
    elif isinstance(node, Split):
        if node.name is not None:
            yield node.name
        for kid in node.kids.values():
            yield from all_names(kid)
    elif isinstance(node, Tree):
        yield node.name
        for page in node.leaves:
            yield from page_names(page)
        for level in node.uppers:
            for upper in level:
                yield upper.obj.name
        yield from tail_names(node.tail)

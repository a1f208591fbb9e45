"""Chunks back to values: every object is verified as it is read, and every occurrence revived anew."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from functools import lru_cache
from hashlib import sha256
from typing import Any, Final, TypeVar, cast

import msgspec

from safepoint.codec.nodes import (
    DEPTH_MAX,
    LEAF,
    PAGE_BITS,
    PAGED_MAX,
    Item,
    Node,
    Page,
    Split,
    Tree,
    Upper,
    Value,
    all_names,
    array_head,
    cuts,
    item_level,
    map_size,
    name_of,
    names_in,
    ref_code,
    size_of,
    under,
)
from safepoint.codec.registry import Registry
from safepoint.codec.values import MAX_DEPTH, decode, decode_plain, enough_stack
from safepoint.errors import Damaged, SafepointError
from safepoint.model import Obj

_T = TypeVar("_T")


def nested(depth: int) -> Any:
    """The type of a value of text, numbers, lists and dicts with text keys, with so many containers in one another."""
    scalar = None | bool | int | float | str
    found: Any = scalar
    for _ in range(depth):
        found = scalar | list[found] | dict[str, found]
    return found


# What messages are made of. Such a page is read in one call in C, without the walk over what it gave: there is nothing in it that
# the walk would change or refuse. Whatever does not fit goes the long way, and so does what is damaged.
_FIRM: Final = msgspec.msgpack.Decoder(list[nested(8)])  # type: ignore[misc]
_MAP: Final = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
_LEAF: Final = msgspec.msgpack.Decoder(tuple[int, list[msgspec.Raw]])
_SIZE: Final = msgspec.msgpack.Decoder(int)
_INDEX: Final = msgspec.msgpack.Decoder(tuple[int, int, int])
_ROOT: Final = msgspec.msgpack.Decoder(tuple[int, int, list[int], list[msgspec.Raw]])


# An opened dict and a list in it may stand around a value that is as deep as may be, all in one piece.
_DEPTH: Final = MAX_DEPTH + 2


class _Cursor:
    """The references of an object, used up in the order in which they stand."""

    __slots__ = ("code", "i", "refs")

    def __init__(self, refs: bytes) -> None:
        self.refs = refs
        self.i = 0
        self.code = ref_code(0) if refs else b""

    def take(self) -> bytes:
        start = 16 * self.i
        self.i += 1
        self.code = ref_code(self.i) if 16 * self.i < len(self.refs) else b""
        return self.refs[start : start + 16]

    def end(self, what: str) -> None:
        if 16 * self.i != len(self.refs):
            raise _damaged(f"{what} cannot be read", "it does not use all of its references")


def read_part(decoder: msgspec.msgpack.Decoder[_T], data: bytes) -> _T:
    """
    Raises:
        msgspec.MsgspecError: whatever is the matter with the bytes.
    """
    try:
        return decoder.decode(data)
    except RecursionError:
        enough_stack("loaded")
        raise msgspec.DecodeError("it nests too deep") from None
    except (ValueError, OverflowError) as error:  # what msgspec passes on: text that is no UTF-8
        raise msgspec.DecodeError(type(error).__name__) from None


def _damaged(what: str, why: str) -> Damaged:
    return Damaged(what, why, "Restore it from a backup, or go back to an earlier checkpoint.")


class _List:
    """A list while it is read."""

    __slots__ = ("leaves", "level", "limit", "path", "uppers", "values")

    def __init__(self, path: str, level: int, limit: int, uppers: int) -> None:
        self.path = path
        self.level = level  # of the items
        self.limit = limit
        self.values: list[Any] = []
        self.leaves: list[Page] = []
        self.uppers: list[list[Upper]] = [[] for _ in range(uppers)]


_Deep = dict[int, tuple[int, tuple[bytes, ...]]]
"""Of items with objects under them, by their place among an object's references: size, and the names of those objects."""


# Objects refer to objects, so that a few of them can stand for more than any memory holds. A value that was saved is no larger
# than its header says; where there is no header, this is more than any of a sensible size has.
_FREE: Final = 1 << 30
_MULTIPLE: Final = 64
_PER_OBJECT: Final = 64
_SPARE_ROOM: Final = 1 << 16


class Reader:
    """
    Args:
        size: Bytes of the whole value's encoding, if that is known.
        spare: The part at the top whose own parts may be damaged: those are left out, and named in ``lost``. All else is read
            whole or not at all.
    """

    def __init__(
        self, objects: Mapping[bytes, Obj], registry: Registry | None, spare: str | None = None, size: int | None = None
    ) -> None:
        self.objects = objects
        self.registry = registry
        self.spare = spare
        self.lost: list[str] = []
        self.seen: dict[bytes, Obj] = {}
        self.limit = _FREE if size is None else min(max(size, 0) * 8 + _SPARE_ROOM, _FREE)
        self.at_most: int | None = None if size is None else max(size, 0) * 8 + _SPARE_ROOM
        self.spent = 0

    def spend(self, count: int) -> None:
        """Count what is read, each occurrence; refuse what multiplies."""
        self.spent += count + _PER_OBJECT
        if self.spent > self.limit:
            most = _FREE + _MULTIPLE * sum([len(obj.data) + len(obj.refs) for obj in self.objects.values()])
            self.limit = most if self.at_most is None else min(self.at_most, most)
            if self.spent > self.limit:
                raise _damaged("the value cannot be read", "its parts add up to far more than was saved")

    def get(self, name: bytes) -> Obj:
        obj = self.seen.get(name)
        if obj is None:
            obj = self.objects.get(name)
            if obj is None:
                raise _damaged(f"object {name.hex()} is missing", "")
            if name_of(obj.refs, obj.data) != name or obj.name != name:
                raise _damaged(f"object {name.hex()} is not what its name says", "its bytes have changed")
            self.seen[name] = obj
        return obj

    def decode(self, data: bytes, path: str, refs: Callable[[int], Any] | None = None) -> Any:
        self.spend(len(data))
        if self.registry is None:
            return decode_plain(data, path=path, refs=refs, depth=_DEPTH)
        return decode(data, self.registry, path=path, refs=refs, depth=_DEPTH)

    def object(self, name: bytes, path: str, level: int, *, spare: bool = False) -> tuple[Any, Node]:
        if level > DEPTH_MAX:
            raise _damaged(f"object {name.hex()} is nested too deep", f"more than {DEPTH_MAX} objects lie within each other")
        obj = self.get(name)
        kind = obj.data[:1]
        if kind == b"v":
            if obj.refs:
                value, kids = self.mapping(obj.data[1:], obj.refs, path, level + 1, name, spare=spare)
                return value, Split(name, map_size(kids), kids, level)
            return self.decode(obj.data[1:], path), Value(name, len(obj.data) - 1, obj.data, False)
        if kind == b"r":
            return self.tree(obj, path, level)
        raise _damaged(f"object {name.hex()} is no value", f"its kind is {kind!r}")

    def mapping(
        self, data: bytes, refs: bytes, path: str, level: int, name: bytes | None = None, *, spare: bool = False
    ) -> tuple[dict[str, Any], dict[str, Node]]:
        what = "the root" if name is None else f"object {name.hex()}"
        cursor = _Cursor(refs)
        try:
            raws = read_part(_MAP, data)
        except msgspec.MsgspecError as e:
            raise _damaged(f"{what} cannot be read", str(e)) from None
        found = self._members(raws, cursor, path, level, at_root=name is None, spare=spare)
        cursor.end(what)
        return found

    def _members(
        self, raws: dict[str, msgspec.Raw], cursor: _Cursor, path: str, level: int, at_root: bool, *, spare: bool = False
    ) -> tuple[dict[str, Any], dict[str, Node]]:
        """``spare``: these may be damaged, each for itself."""
        values: dict[str, Any] = {}
        kids: dict[str, Node] = {}
        for key, raw in raws.items():
            code = bytes(raw)
            at = under(path, key)
            its_parts = at_root and key == self.spare
            if code == cursor.code:
                name = cursor.take()
                try:
                    values[key], kids[key] = self.object(name, at, level, spare=its_parts)
                except Damaged:
                    if its_parts:
                        values[key] = {}
                    elif not spare:
                        raise
                    self.lost.append(key)
            elif at_root and cursor.code and (inner := _opened(code, cursor.code)) is not None:
                values[key], sub = self._members(inner, cursor, at, level + 1, at_root=False, spare=its_parts)
                kids[key] = Split(None, map_size(sub), sub, level)
            else:
                values[key] = self.decode(code, at)
                kids[key] = code
            if its_parts and self.lost:
                # Not as it is stored: the next pack makes all of it again, and so heals what is made anew and equal.
                kids.pop(key, None)
        return values, kids

    def tree(self, root: Obj, path: str, level: int) -> tuple[list[Any], Tree]:
        what = f"object {root.name.hex()}"
        try:
            n, size, counts, tail = read_part(_ROOT, root.data[1:])
        except msgspec.MsgspecError as e:
            raise _damaged(f"{what} cannot be read", str(e)) from None
        if any(c < 0 for c in counts) or 16 * sum(counts) > len(root.refs) or len(counts) > PAGED_MAX:
            raise _damaged(f"{what} cannot be read", "it counts more pages than it refers to")
        work = _List(path, item_level(level), n, len(counts) - 1)
        cursor = _Cursor(root.refs)
        for k, count in enumerate(counts):
            for _ in range(count):
                self._page(cursor.take(), len(counts) - 1 - k, work)
        objs, deep = self._items(tail, cursor, work)
        cursor.end(what)
        if len(work.values) != n:
            raise _damaged(f"{what} cannot be read", f"it has {len(work.values)} items and counts {n}")
        items = _thaw(tail, root.refs, sum(counts), objs, deep)
        uppers = tuple([tuple(u) for u in work.uppers])
        return work.values, Tree(root, n, size, tuple(work.leaves), uppers, items, work.level)

    def _page(self, name: bytes, level: int, work: _List) -> None:
        """Read a page and all under it."""
        self.spend(0)
        obj = self.get(name)
        what = f"object {name.hex()}"
        start = len(work.values)
        try:
            if level == 0:
                if obj.data[:1] != b"l":
                    raise _damaged(f"{what} is no leaf page", f"its kind is {obj.data[:1]!r}")
                simple = self._simple(obj, work)
                if simple is not None:
                    size, objs = simple
                    deep: _Deep = {}
                else:
                    size, raws = read_part(_LEAF, obj.data[1:])
                    cursor = _Cursor(obj.refs)
                    objs, deep = self._items(raws, cursor, work)
                    cursor.end(what)
                n = len(work.values) - start
                below = tuple([name for _, names in deep.values() for name in names])
                code = None if deep else _code_later(obj, objs)
                work.leaves.append(Page(obj, n, size, None, _thaw_later(obj, objs, deep), below, None, code))
                return
            if obj.data[:1] != b"i":
                raise _damaged(f"{what} is no index page", f"its kind is {obj.data[:1]!r}")
            own, n, size = read_part(_INDEX, obj.data[1:])
        except msgspec.MsgspecError as e:
            raise _damaged(f"{what} cannot be read", str(e)) from None
        if own == level:
            for child in names_in(obj.refs):
                self._page(child, level - 1, work)
                if len(work.values) > work.limit:
                    break
        if own != level or len(work.values) - start != n:
            raise _damaged(f"{what} cannot be read", "its level or count is not that of its place")
        work.uppers[level - 1].append(Upper(obj, len(obj.refs) // 16, n, size))

    def firm(self, items: bytes, work: _List) -> list[Any]:
        """The items of a page, if text, numbers, lists and dicts are all that is in them; else msgspec's error. For subclasses too,
        which may make more of the items of a list."""
        return cast(list[Any], _FIRM.decode(items))

    def _simple(self, page: Obj, work: _List) -> tuple[int, list[Obj]] | None:
        """Read a leaf page each of whose items is an object of its own that is made of what ``_FIRM`` takes; None if it is another."""
        data, refs, get = page.data, page.refs, self.objects.get
        items = _all_refs(len(refs) // 16)
        if not refs or len(refs) % 16 or not data.endswith(items) or data[1:2] != b"\x92":
            return None
        # In lists rather than one by one: this is the hot loop of every load, of a microsecond or two for each item.
        names = list(names_in(refs))
        objs = [obj for name in names if (obj := get(name)) is not None]
        codes = [code for own, below, code in objs if not below and code[:1] == b"v"]
        if len(codes) != len(names) or [own for own, _, _ in objs] != names:
            return None
        if [sha256(LEAF + code).digest()[:16] for code in codes] != names:
            return None
        joined = array_head(len(names)) + b"".join([code[1:] for code in codes])
        try:
            size = _SIZE.decode(data[2 : -len(items)])
            values = self.firm(joined, work)
        except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError):
            return None
        self.spend(len(joined))
        work.values += values
        return size, objs

    def _items(self, raws: list[msgspec.Raw], cursor: _Cursor, work: _List) -> tuple[list[Obj], _Deep]:
        """Revive the items of a page or tail, all in one call."""
        objs: list[Obj] = []
        parts = [array_head(len(raws))]
        nested: list[tuple[int, int]] = []  # items with objects under them: place among the references, and in the page
        # The hot loop of every load: what `get` and `take` do is written out, for half of its time.
        objects = self.objects
        i, refs, expected, count = cursor.i, cursor.refs, cursor.code, len(cursor.refs) // 16
        for raw in raws:
            code = bytes(raw)
            if code != expected:
                parts.append(code)
                continue
            name = refs[16 * i : 16 * i + 16]
            i += 1
            expected = ref_code(i) if i < count else b""
            obj = objects.get(name)
            if obj is not None:
                own, below, data = obj
                if not below and own == name and data[:1] == b"v" and sha256(LEAF + data).digest()[:16] == name:
                    parts.append(data[1:])
                    objs.append(obj)
                    continue
            obj = self.get(name)
            parts.append(ref_code(len(nested)))
            nested.append((len(objs), len(parts) - 2))
            objs.append(obj)
        cursor.i, cursor.code = i, expected

        start = len(work.values)
        deep: _Deep = {}

        def revive(j: int) -> Any:
            k, at = nested[j]
            value, node = self.object(objs[k].name, f"{work.path}[{start + at}]", work.level)
            deep[k] = size_of(node), tuple(all_names(node))[1:]
            return value

        joined = b"".join(parts)
        try:
            values = self.firm(joined, work)
        except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError):
            pass
        else:
            self.spend(len(joined))
            work.values += values
            return objs, deep
        try:
            work.values += self.decode(joined, work.path, revive)
        except SafepointError:
            # Packed one by one, an item may be nested as deep as a value may, and that is one level more with the list around
            # it. If it is something else, this says it again, with the right index.
            work.values += [self.decode(part, f"{work.path}[{start + j}]", revive) for j, part in enumerate(parts[1:])]
        return objs, deep


@lru_cache(maxsize=128)
def _all_refs(n: int) -> bytes:
    """The items of a page whose every item is an object."""
    return array_head(n) + b"".join([ref_code(i) for i in range(n)])


def _opened(code: bytes, first: bytes) -> dict[str, msgspec.Raw] | None:
    """The members of a dict that is inline in the root and has a reference in it."""
    if not (0x80 <= code[0] <= 0x8F or code[0] in (0xDE, 0xDF)):
        return None
    try:
        raws = read_part(_MAP, code)
    except msgspec.MsgspecError:
        return None  # its keys are no text, so it was never opened
    return raws if any(bytes(raw) == first for raw in raws.values()) else None


def _thaw_later(page: Obj, objs: list[Obj], deep: _Deep) -> Callable[[], tuple[Item, ...]]:
    return lambda: _thaw(read_part(_LEAF, page.data[1:])[1], page.refs, 0, objs, deep)


def _code_later(page: Obj, objs: list[Obj]) -> Callable[[], bytes]:
    def code() -> bytes:
        raws = read_part(_LEAF, page.data[1:])[1]
        cursor = _Cursor(page.refs)
        parts = [array_head(len(raws))]
        for raw in raws:
            part = bytes(raw)
            if part == cursor.code:
                part = objs[cursor.i].data[1:]
                cursor.take()
            parts.append(part)
        return b"".join(parts)

    return code


def _thaw(raws: list[msgspec.Raw], refs: bytes, first: int, objs: list[Obj], deep: _Deep) -> tuple[Item, ...]:
    """Items as they were read, with their encodings for marks."""
    cursor = _Cursor(refs)
    for _ in range(first):
        cursor.take()
    items: list[Item] = []
    k = 0
    for raw in raws:
        code = bytes(raw)
        if code != cursor.code:
            items.append(Item(None, code, len(code), code, False, not zlib.crc32(code) & PAGE_BITS))
            continue
        obj = objs[k]
        name = cursor.take()
        if k in deep:
            size, below = deep[k]
            items.append(Item(name, b"", size, None, False, cuts(name), below))
        else:
            items.append(Item(name, b"", len(obj.data) - 1, obj.data, False, cuts(name)))
        k += 1
    return tuple(items)

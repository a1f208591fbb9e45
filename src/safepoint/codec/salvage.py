"""What can still be read of a packed state, for people: no class is looked up, and what is missing or damaged is marked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from safepoint.codec.chunkread import _DEPTH, _INDEX, _LEAF, _MAP, _ROOT, _Cursor, _opened, read_part
from safepoint.codec.jsonform import LOST
from safepoint.codec.nodes import DEPTH_MAX, PAGED_MAX, name_of, names_in, under
from safepoint.codec.values import Tagged, decode_plain
from safepoint.errors import SafepointError
from safepoint.model import Obj

__all__ = ["salvaged"]


def salvaged(root: bytes, refs: bytes, objects: Mapping[bytes, Obj], size: int = 0) -> tuple[Any, list[str]]:
    """The plain tree as far as it can be read, and a line for each part that cannot. In its place stands ``Tagged("lost", …)``.

    ``size`` is what the header says of the whole value: a few objects that refer to each other can stand for any number.
    """
    work = _Salvage(objects, max(size, sum([len(o.data) for o in objects.values()])) * 8 + (1 << 16))
    return work.mapping(root, refs, "", 0), work.problems


class _Salvage:
    def __init__(self, objects: Mapping[bytes, Obj], room: int) -> None:
        self.objects = objects
        self.room = room
        self.problems: list[str] = []

    def lost(self, path: str, why: str) -> Tagged:
        self.problems.append(f"{path or 'the state'}: {why}")
        return Tagged(LOST, None, why)

    def plain(self, code: bytes, path: str) -> Any:
        try:
            return decode_plain(code, path=path, depth=_DEPTH)
        except SafepointError as error:
            return self.lost(path, error.why)

    def whole(self, name: bytes, kinds: bytes) -> tuple[Obj | None, str]:
        obj = self.objects.get(name)
        if obj is None:
            return None, f"object {name.hex()} is missing"
        self.room -= len(obj.data) + len(obj.refs) + 64
        if self.room < 0:
            return None, "the parts add up to far more than was saved"
        if name_of(obj.refs, obj.data) != name:
            return None, f"object {name.hex()} is not what its name says"
        if obj.data[:1] not in [kinds[i : i + 1] for i in range(len(kinds))]:
            return None, f"object {name.hex()} is of another kind than its place asks for"
        return obj, ""

    def value(self, name: bytes, path: str, level: int) -> Any:
        obj, why = self.whole(name, b"vr")
        if obj is None:
            return self.lost(path, why)
        if level > DEPTH_MAX:
            return self.lost(path, "it is nested too deep")
        if obj.data[:1] == b"r":
            return self.tree(obj, path, level)
        return self.mapping(obj.data[1:], obj.refs, path, level + 1) if obj.refs else self.plain(obj.data[1:], path)

    def mapping(self, data: bytes, refs: bytes, path: str, level: int) -> Any:
        try:
            raws = read_part(_MAP, data)
        except msgspec.MsgspecError:
            return self.lost(path, "it cannot be read")
        return self.members(raws, _Cursor(refs), path, level, level == 0)

    def members(self, raws: dict[str, msgspec.Raw], cursor: _Cursor, path: str, level: int, at_root: bool) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, raw in raws.items():
            code, at = bytes(raw), under(path, key)
            if code == cursor.code:
                found[key] = self.value(cursor.take(), at, level)
            elif at_root and cursor.code and (inner := _opened(code, cursor.code)) is not None:
                found[key] = self.members(inner, cursor, at, level + 1, False)
            else:
                found[key] = self.plain(code, at)
        return found

    def tree(self, root: Obj, path: str, level: int) -> Any:
        try:
            _, _, counts, tail = read_part(_ROOT, root.data[1:])
        except msgspec.MsgspecError:
            return self.lost(path, "it cannot be read")
        if any(c < 0 for c in counts) or 16 * sum(counts) > len(root.refs) or len(counts) > PAGED_MAX:
            return self.lost(path, "it counts more pages than it refers to")
        items: list[Any] = []
        cursor = _Cursor(root.refs)
        for k, count in enumerate(counts):
            for _ in range(count):
                self.page(cursor.take(), len(counts) - 1 - k, items, path, level)
        self.items(tail, cursor, items, path, level)
        return items

    def page(self, name: bytes, height: int, items: list[Any], path: str, level: int) -> None:
        obj, why = self.whole(name, b"i" if height else b"l")
        try:
            if obj is None:
                pass
            elif height == 0:
                self.items(read_part(_LEAF, obj.data[1:])[1], _Cursor(obj.refs), items, path, level)
                return
            elif read_part(_INDEX, obj.data[1:])[0] == height:
                for child in names_in(obj.refs):
                    if self.room < 0:
                        break
                    self.page(child, height - 1, items, path, level)
                return
        except msgspec.MsgspecError:
            why = f"object {name.hex()} cannot be read"
        # How many there were is told only by what is lost: later items have smaller indices than they had.
        items.append(self.lost(f"{path}[{len(items)}]", f"several items, as {why or 'a page is not at its place'}"))

    def items(self, raws: list[msgspec.Raw], cursor: _Cursor, items: list[Any], path: str, level: int) -> None:
        for raw in raws:
            if self.room < 0:
                break
            code, at = bytes(raw), f"{path}[{len(items)}]"
            items.append(self.value(cursor.take(), at, level + 1) if code == cursor.code else self.plain(code, at))

"""Plain trees as strict JSON and back, without loss: for people who read, for files, for export.

What JSON has is written as such. The rest is an object with one telling key that starts with "$"; a dict whose own keys start with
"$" is written as a list of pairs, so that no data can pass for a type.
"""

from __future__ import annotations

import base64
import math
import re
import struct
from functools import partial
from typing import Any

from safepoint.codec.classes import KINDS
from safepoint.codec.kinds import MAX_DEPTH, Kind, Tagged
from safepoint.errors import Damaged, UsageError

__all__ = ["LOST", "from_json", "to_json"]

LOST = "lost"
"""The tag of what could not be read, in a tree for people. It can be shown, and neither stored nor read back."""

# Python refuses to write longer ints in decimal (sys.set_int_max_str_digits); 640 digits is the lowest limit that can be set.
_DECIMAL_BITS = 2_100


def to_json(tree: Any) -> Any:
    """Strict JSON data for a plain tree: ints of any usual size as ints, no NaN, no lone surrogates.

    ``Tagged`` becomes ``{"$type": tag, "class": name, "value": …}`` with keys and values of mappings in pairs, bytes
    ``{"$bytes": base64}``.
    """
    cls = type(tree)
    if cls is str:
        return tree if _is_text(tree) else {"$str": tree.encode("unicode_escape").decode("ascii")}
    if tree is None or cls is bool:
        return tree
    if cls is int:
        return tree if tree.bit_length() <= _DECIMAL_BITS else {"$int": hex(tree)}
    if cls is float:
        return tree if math.isfinite(tree) else {"$float": _NAMES.get(bits := _bits(tree), bits)}
    if cls is bytes:
        return {"$bytes": base64.b64encode(tree).decode("ascii")}
    if cls is list:
        return list(map(to_json, tree))
    if cls is dict:
        values = map(to_json, tree.values())
        if any(key[:1] == "$" or not _is_text(key) for key in tree):
            return {"$dict": [[to_json(key), value] for key, value in zip(tree, values, strict=True)]}
        return dict(zip(tree, values, strict=True))
    if cls is Tagged and tree.tag in KINDS and KINDS[tree.tag].whole(tree.value):
        named = {} if tree.name is None else {"class": tree.name}
        return {"$type": tree.tag, **named, "value": _paired(KINDS[tree.tag], to_json(tree.value))}
    if cls is Tagged and tree.tag == LOST:
        return {"$lost": tree.value}
    raise UsageError(f"such a {cls.__qualname__} is in no plain tree", remedy="Pass what decode_plain has returned")


def from_json(data: Any) -> Any:
    """The plain tree that ``to_json`` was given.

    Raises:
        Damaged: ``data`` is not of that form.
    """
    try:
        return _from_json(data, 3 * MAX_DEPTH)  # a Tagged and its payload are two levels here, and one in the value
    except Damaged:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, struct.error) as error:
        raise _unreadable(type(error).__name__) from error


def _from_json(data: Any, depth: int) -> Any:
    if depth <= 0:
        raise _unreadable("it nests too deep")
    below = partial(_from_json, depth=depth - 1)
    if type(data) is list:
        return list(map(below, data))
    if type(data) is not dict:
        return data
    mark = next((key for key in data if key[:1] == "$"), None)
    if mark is None:
        return dict(zip(data, map(below, data.values()), strict=True))
    if mark == "$type":
        kind = KINDS[data["$type"]]
        if data.keys() != ({"$type", "class", "value"} if kind.named else {"$type", "value"}):
            raise _unreadable(f"it holds no whole {kind.tag}")
        return Tagged(kind.tag, data.get("class"), below(_unpaired(kind, data["value"])))
    if len(data) != 1:
        raise _unreadable(f"{mark!r:.40} is not alone")
    if mark == "$dict":
        pairs = list(map(list, data[mark]))
        return dict(zip((below(key) for key, _ in pairs), map(below, (item for _, item in pairs)), strict=True))
    return _SCALARS[mark](data[mark])


def _paired(kind: Kind, payload: Any) -> Any:
    if not kind.pairs:
        return payload
    own = payload[kind.head :]
    return [*payload[: kind.head], *map(list, zip(own[::2], own[1::2], strict=True))]


def _unpaired(kind: Kind, payload: Any) -> Any:
    if not kind.pairs:
        return payload
    return [*payload[: kind.head], *(part for key, item in payload[kind.head :] for part in (key, item))]


def _unreadable(why: str) -> Damaged:
    return Damaged("the JSON form of a value cannot be read", why)


def _bits(number: float) -> str:
    return struct.pack(">d", number).hex()


# There are many NaNs: the others are written as their bits, or a digest of what is read would differ.
_NAMED = {"nan": "7ff8000000000000", "inf": _bits(math.inf), "-inf": _bits(-math.inf)}
_NAMES = {bits: name for name, bits in _NAMED.items()}
# As unicode_escape writes them, and no others: what it reads is more, and partly deprecated.
_ESCAPED = re.compile(r"(?:[ -\[\]-~]|\\(?:[\\tnr]|x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8}))*", re.ASCII)


def _str_back(text: str) -> str:
    if not _ESCAPED.fullmatch(text):
        raise _unreadable("text with other escapes than safepoint writes")
    return text.encode("ascii").decode("unicode_escape")


_SCALARS: dict[str, Any] = {
    "$str": _str_back,
    "$int": lambda text: int(text, 16),
    "$float": lambda text: struct.unpack(">d", bytes.fromhex(_NAMED.get(text, str(text))))[0],
    "$bytes": lambda text: base64.b64decode(text, validate=True),
}


def _is_text(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True

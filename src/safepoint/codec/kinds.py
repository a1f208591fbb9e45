"""The type table: one row per type that MessagePack does not have, with the two functions that take a value apart and rebuild it.

A row's *payload* is a value of simpler types: for a *leaf* a scalar or a list of scalars, otherwise one list or dict whose items
are any values. Rows for classes of the application are in ``classes.py``. Codes are for ever: never change one, never use one
again; ``docs/types.md`` is their public list.
"""

from __future__ import annotations

import os
import re
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import MAX_EMAX, MAX_PREC, MIN_EMIN, Context, Decimal
from enum import Enum
from fractions import Fraction
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network
from pathlib import PosixPath, PurePath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any, cast
from zoneinfo import ZoneInfo

from msgspec import UNSET, UnsetType

from safepoint.codec.registry import BUILTIN_NAMES, BUILTINS, Registry
from safepoint.errors import Damaged, InvalidState, RefusedType, SafepointError

__all__ = [
    "BUILTIN_KINDS",
    "MAX_DEPTH",
    "Fault",
    "Kind",
    "MissingMember",
    "Step",
    "Tagged",
    "damaged",
    "key_text",
    "type_name",
    "unknown_class",
]


#: How many containers may be nested in one another, when saving and when loading.
MAX_DEPTH = 200


@dataclass(frozen=True, slots=True)
class Tagged:
    """In a plain tree: a value that is more than None, bool, int, float, str, bytes, a list, or a dict with text keys.

    ``tag`` is its row of the type table (docs/types.md), ``name`` the stored name of its class if it has one, ``value`` its payload:
    scalars, or a list or dict whose items are plain trees again. Migrations may change what is in the payload, and make new ones.
    """

    tag: str
    name: str | None
    value: Any


@dataclass(frozen=True, slots=True, repr=False)
class MissingMember:
    """A stored member that its enum no longer has, where ``@register(missing="placeholder")`` asks for one.

    It is equal to itself and to no member, and is saved as what it was: when the member comes back, so does the value.
    """

    enum: type[Enum]
    stored: str | int
    """The name of the member; for a combination of flags its value."""

    def __repr__(self) -> str:
        return f"<{self.enum.__qualname__}.{self.stored} missing>"


class Step(str):
    """A piece of a path that is already written out; any other piece is a key or an index."""

    __slots__ = ()


class Fault(Exception):
    """A refusal on its way up. Each container that it passes adds itself and the step to its child, so that values that are
    fine cost nothing for their paths. ``values.py`` turns it into the public error."""

    def __init__(self, error: type[SafepointError], why: str, remedy: str = "", **details: Any) -> None:
        super().__init__(why)
        self.error = error
        self.why = why
        self.remedy = remedy
        self.details = details
        self.trail: list[tuple[object, object]] = []  # innermost first


def damaged(why: str) -> Fault:
    return Fault(Damaged, why)


def type_name(cls: type) -> str:
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def key_text(key: object) -> str:
    """A dict key as it is shown in a path: short, and never the content of something big or of a user's class."""
    if type(key) is str:
        return repr(key if len(key) <= 60 else key[:57] + "...")
    if key is None or type(key) in (bool, float) or (type(key) is int and key.bit_length() <= 64):
        return repr(key)
    return f"<{type_name(type(key))}>"


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """A row of the type table.

    Attributes:
        code: The extension type of MessagePack that it is stored as.
        tag: Its name in the plain tree and in JSON.
        types: The exact types it takes; empty for classes of the application, which are found by their shape.
        reduce: From the value to its payload.
        revive: From a payload, whatever it is, and the stored name of the class, back to the value; any exception means damage.
        payload: ``object`` for a leaf, else ``list`` or ``dict``.
        named: Whether the name of the class is stored with it.
        ordered: False if the order of the payload means nothing, so that it can be the same for equal values.
        head: How many items of a list payload come before the value's own.
        pairs: Whether the items of a list payload are keys and values in turn.
    """

    code: int
    tag: str
    types: tuple[type, ...]
    reduce: Callable[[Any, Registry], Any]
    revive: Callable[[Any, str, Registry], Any]
    payload: type = object
    named: bool = False
    ordered: bool = True
    head: int = 0
    pairs: bool = False

    def whole(self, payload: Any) -> bool:
        """Whether a list payload has its head, and to each key a value."""
        return (not self.head and not self.pairs) or (
            len(payload) >= self.head and not (self.pairs and (len(payload) - self.head) % 2)
        )

    def step(self, payload: Any, key: Any) -> Step:
        """How the path goes on from a value of this kind to the part of its payload at ``key``."""
        if self.payload is dict:
            return Step(f".{key.lstrip('-.+~')}")
        if not self.ordered:
            return Step("{…}")
        if not self.pairs:
            return Step(f"[{key - self.head}]")
        own = payload[key - (key - self.head) % 2]
        return Step(f"[{key_text(own)}]" if (key - self.head) % 2 else f".keys()[{(key - self.head) // 2}]")


def _scalar(code: int, cls: type, out: Callable[[Any], Any], back: Callable[[Any], Any], *expects: type) -> Kind:
    """A leaf that is stored as one scalar, or as a list of scalars of the given types."""

    def revive(payload: Any, _name: str, _registry: Registry) -> Any:
        parts = payload if type(payload) is list else [payload]
        if tuple(map(type, parts)) != expects or (type(payload) is list) != (len(expects) > 1):
            raise damaged(f"not the parts of a {cls.__name__}")
        value = back(payload)
        # One value, one encoding: a digest must not depend on who wrote it.
        if type(value) is not cls or out(value) != payload:
            raise damaged(f"a {cls.__name__} that was not written by safepoint")
        return value

    return Kind(code, cls.__name__.lower(), (cls,), lambda value, _: out(value), revive)


# Scalars that MessagePack has, but not in full


def _int_out(value: int) -> bytes:
    return value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)


def _int_back(payload: bytes) -> int:
    value = int.from_bytes(payload, "little", signed=True)
    if -(2**63) <= value < 2**64:
        raise damaged("a big int that is not big")
    return value


def _str_back(payload: bytes) -> str:
    try:
        value = payload.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:  # also in a leaf, which nobody looks at again
        raise damaged("a str that is no UTF-8") from None
    if value.isascii() or not any("\ud800" <= char <= "\udfff" for char in value):
        raise damaged("a str that needs no extension")
    return value


# Numbers

# A decimal's text must not depend on the context of the thread that writes it, and reading one must raise no signal there.
_DECIMALS = Context(prec=MAX_PREC, Emax=MAX_EMAX, Emin=MIN_EMIN, capitals=1, traps=[])


def _complex_revive(payload: Any, _name: str, _registry: Registry) -> complex:
    real, imag = payload  # not compared with what would be written: NaN is not equal to itself
    if type(real) is not float or type(imag) is not float:
        raise damaged("not the parts of a complex")
    return complex(real, imag)


_LONG = 1 << 15


def _fraction_back(parts: list[int]) -> Fraction:
    numerator, denominator = parts
    if denominator <= 0:
        raise damaged("not the parts of a fraction")
    if numerator.bit_length() + denominator.bit_length() < _LONG:
        return Fraction(numerator, denominator)
    # Reducing takes the square of their length: minutes for a megabyte that somebody forged.
    value = object.__new__(Fraction)
    value._numerator, value._denominator = numerator, denominator  # type: ignore[attr-defined]
    return value


# Time. Common values are one ISO text; zones with a key, zones with a name, and the second of two equal wall-clock times
# (fold=1) have parts of their own: [ISO text without zone, zone, fold, name of the zone].


# By hand, because fromisoformat takes +00:00:00.000001 for UTC.
_OFFSET = re.compile(r"[+-](\d\d):(\d\d)(?::(\d\d)(?:\.(\d{6}))?)?", re.ASCII)


def _offset_text(zone: timezone) -> str:
    return datetime(2000, 1, 1, tzinfo=zone).isoformat()[19:]


def _zone_parts(zone: tzinfo | None) -> tuple[str | None, str | None]:
    """(offset or key, name)."""
    if zone is None:
        return None, None
    if type(zone) is timezone:
        args: tuple[Any, ...] = zone.__getinitargs__()  # type: ignore[attr-defined]  # alone tells UTC from a zone named "UTC"
        return _offset_text(zone), args[1] if len(args) > 1 else None
    if type(zone) is ZoneInfo and zone.key is not None:
        return zone.key, None
    raise Fault(
        RefusedType,
        f"its time zone is a {type_name(type(zone))}, which cannot be stored",
        "Use datetime.timezone or zoneinfo.ZoneInfo(key)",
        type=type_name(type(zone)),
    )


def _zone_back(text: str | None, name: str | None) -> tzinfo | None:
    if text is None:
        return None
    if text[:1] in ("+", "-"):
        parts = _OFFSET.fullmatch(text)
        if parts is None:
            raise damaged("a time zone without offset")
        hours, minutes, seconds, microseconds = (int(part or 0) for part in parts.groups())
        offset = timedelta(hours=hours, minutes=minutes, seconds=seconds, microseconds=microseconds) * (
            -1 if text[0] == "-" else 1
        )
        return timezone(offset) if name is None else timezone(offset, name)
    try:
        return ZoneInfo(text)
    except (KeyError, ValueError, OSError) as error:
        raise Fault(
            InvalidState,
            f"this machine knows no time zone {text!r:.80}",
            "Install the tzdata package of Python or of the system",
        ) from error


def _time_kind(code: int, cls: type[datetime] | type[time]) -> Kind:
    def reduce(value: Any, _registry: object = None) -> Any:
        zone, name = _zone_parts(value.tzinfo)
        if not value.fold and name is None and (zone is None or (zone[0] in "+-" and len(zone) == 6)):
            return value.isoformat()
        parts = [value.replace(tzinfo=None, fold=0).isoformat(), zone, value.fold]
        return parts if name is None else [*parts, name]

    def revive(payload: Any, _name: str, _registry: Registry) -> Any:
        if type(payload) is str:
            value: Any = cls.fromisoformat(payload)
        else:
            text, zone, fold, name = payload if len(payload) == 4 else (*payload, None)
            value = cls.fromisoformat(text).replace(tzinfo=_zone_back(zone, name), fold=fold)
        if reduce(value) != payload:
            raise damaged(f"a {cls.__name__} that was not written by safepoint")
        return value

    return Kind(code, cls.__name__, (cls,), reduce, revive)


def _timezone_reduce(value: timezone, _registry: object = None) -> list[str | None]:
    return list(_zone_parts(value))


def _timezone_revive(payload: Any, _name: str, _registry: Registry) -> Any:
    text, name = payload
    value = _zone_back(text, name)
    if type(value) is not timezone or _timezone_reduce(value) != payload:
        raise damaged("a timezone that was not written by safepoint")
    return value


# Paths. One that belongs to the other system comes back as the pure path of its kind.

_PATHS: dict[str, type[PurePath]] = {
    "PurePosixPath": PurePosixPath,
    "PosixPath": PosixPath if os.name == "posix" else PurePosixPath,
    "PureWindowsPath": PureWindowsPath,
    "WindowsPath": WindowsPath if os.name == "nt" else PureWindowsPath,
}


def _path_reduce(value: PurePath, _registry: Registry) -> list[str]:
    text = str(value)
    if type(value)(text) != value:
        raise Fault(RefusedType, "its text stands for another path", "Store its parts", type=type_name(type(value)))
    return [type(value).__name__, text]


def _path_revive(payload: Any, _name: str, _registry: Registry) -> PurePath:
    flavour, text = payload
    if type(text) is not str:
        raise damaged("a path without text")
    return _PATHS[flavour](text)


# Addresses and patterns

_ADDRESSES = (IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network)
_ADDRESS_NAMES: dict[str, Any] = {cls.__name__: cls for cls in _ADDRESSES}


def _address_reduce(value: Any, _registry: object = None) -> list[str]:
    return [type(value).__name__, str(value)]


def _address_revive(payload: Any, _name: str, _registry: Registry) -> Any:
    name, text = payload
    value = _ADDRESS_NAMES[name](text)
    if _address_reduce(value) != payload:
        raise damaged("an address that was not written by safepoint")
    return value


def _pattern_reduce(value: re.Pattern[Any], _registry: Registry) -> list[Any]:
    if value.flags & re.DEBUG:
        raise Fault(RefusedType, "it was compiled with re.DEBUG, which prints", "Compile it without", type="re.Pattern")
    return [value.pattern, value.flags]


def _pattern_revive(payload: Any, _name: str, _registry: Registry) -> re.Pattern[Any]:
    pattern, flags = payload
    if type(pattern) not in (str, bytes) or type(flags) is not int or flags & re.DEBUG:
        raise damaged("not the parts of a pattern")
    value = re.compile(pattern, flags)
    if value.flags != flags:
        raise damaged("a pattern that was not written by safepoint")
    return value


# Containers


def _flat(items: Mapping[Any, Any]) -> list[Any]:
    return [part for pair in items.items() for part in pair]


def _unflat(payload: list[Any], into: dict[Any, Any], head: int = 0) -> Any:
    keys = payload[head::2]
    for key, item in zip(keys, payload[head + 1 :: 2], strict=True):
        into[key] = item  # noqa: PERF403 (no update: a Counter's adds up, and dict's own goes past the order of an OrderedDict)
    if len(into) != len(keys):
        raise _equals(keys, "keys")
    return into


def _members(cls: type[set[Any]] | type[frozenset[Any]], payload: list[Any]) -> Any:
    value = cls(payload)
    if len(value) != len(payload):
        raise _equals(payload, "members")
    return value


def _equals(items: list[Any], what: str) -> Fault:
    if any(isinstance(item, Enum) for item in items):  # no damage: an enum has joined two of its members since
        return Fault(InvalidState, f"two of its {what} are equal now", "Write a migration that joins them")
    return damaged(f"two {what} that are equal")


def _defaultdict_reduce(value: defaultdict[Any, Any], registry: Registry) -> list[Any]:
    factory = value.default_factory
    name = None
    if factory is not None:
        name = BUILTIN_NAMES.get(factory) if isinstance(factory, type) else None
        name = name or (registry.name_of(factory) if isinstance(factory, type) else None)
        if name is None:
            raise Fault(
                RefusedType,
                "its default_factory is neither None, nor a built-in type, nor a registered class",
                "Use a class, or store a plain dict",
                type="collections.defaultdict",
            )
    return [name, *_flat(value)]


def _defaultdict_revive(payload: Any, _name: str, registry: Registry) -> defaultdict[Any, Any]:
    name = payload[0]
    factory = None if name is None else BUILTINS.get(name) or registry.class_of(name)
    if factory is None and name is not None:
        raise unknown_class(name)
    return cast("defaultdict[Any, Any]", _unflat(payload, defaultdict(factory), 1))


def _deque_revive(payload: Any, _name: str, _registry: Registry) -> deque[Any]:
    maxlen, *items = payload
    if maxlen is not None and (type(maxlen) is not int or len(items) > maxlen):
        raise damaged("a deque longer than it can be")
    return deque(items, maxlen)


def unknown_class(name: str) -> Fault:
    return Fault(
        RefusedType,
        f"the class {name!r:.200} is neither registered nor trusted",
        "Register it (@safepoint.register, open(types=[…])), give its new name with register(aliases=[…]), or open(trust=[…])",
        type=name[:200],
    )


BUILTIN_KINDS: tuple[Kind, ...] = (
    _scalar(1, int, _int_out, _int_back, bytes),
    _scalar(2, str, lambda value: value.encode("utf-8", "surrogatepass"), _str_back, bytes),
    _scalar(3, bytearray, bytes, bytearray, bytes),
    Kind(4, "tuple", (tuple,), lambda value, _: list(value), lambda items, *_: tuple(items), list),
    Kind(5, "dict", (dict,), lambda value, _: _flat(value), lambda items, *_: _unflat(items, {}), list, pairs=True),
    Kind(6, "set", (set,), lambda value, _: list(value), lambda items, *_: _members(set, items), list, ordered=False),
    Kind(
        7,
        "frozenset",
        (frozenset,),
        lambda value, _: list(value),
        lambda items, *_: _members(frozenset, items),
        list,
        ordered=False,
    ),
    _scalar(8, date, date.isoformat, date.fromisoformat, str),
    _time_kind(9, time),
    _time_kind(10, datetime),
    _scalar(
        11,
        timedelta,
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda parts: timedelta(*parts),
        int,
        int,
        int,
    ),
    Kind(12, "timezone", (timezone,), _timezone_reduce, _timezone_revive),
    _scalar(13, ZoneInfo, lambda zone: _zone_parts(zone)[0], lambda key: _zone_back(key, None), str),
    _scalar(14, Decimal, _DECIMALS.to_sci_string, lambda text: Decimal(text, _DECIMALS), str),
    _scalar(15, uuid.UUID, str, uuid.UUID, str),
    Kind(16, "complex", (complex,), lambda value, _: [value.real, value.imag], _complex_revive),
    _scalar(17, Fraction, lambda value: [value.numerator, value.denominator], _fraction_back, int, int),
    _scalar(
        18,
        range,
        lambda value: [int(value.start), int(value.stop), int(value.step)],
        lambda parts: range(*parts),
        int,
        int,
        int,
    ),
    Kind(19, "path", (PurePosixPath, PosixPath, PureWindowsPath, WindowsPath), _path_reduce, _path_revive),
    Kind(20, "defaultdict", (defaultdict,), _defaultdict_reduce, _defaultdict_revive, list, head=1, pairs=True),
    Kind(
        21, "counter", (Counter,), lambda value, _: _flat(value), lambda items, *_: _unflat(items, Counter()), list, pairs=True
    ),
    Kind(
        22,
        "ordereddict",
        (OrderedDict,),
        lambda value, _: _flat(value),
        lambda items, *_: _unflat(items, OrderedDict()),
        list,
        pairs=True,
    ),
    Kind(23, "deque", (deque,), lambda value, _: [value.maxlen, *value], _deque_revive, list, head=1),
    _scalar(24, UnsetType, lambda _: None, lambda _: UNSET, type(None)),
    Kind(25, "ipaddress", _ADDRESSES, _address_reduce, _address_revive),
    Kind(26, "pattern", (re.Pattern,), _pattern_reduce, _pattern_revive),
)

"""Values to MessagePack and back, keeping every type.

MessagePack by way of msgspec is quick, and silently turns tuples into lists, enums into their values and bool keys into numbers.
So each value is walked first, by exact type. What MessagePack has natively (None, bool, ints of 64 bits, floats, text, bytes, lists,
dicts with text keys) is left as the same object; all else becomes an extension whose payload is MessagePack again.

The walk is the hot path of every save. It calls nothing for plain text in a list or dict, copies nothing that needs no change, and
knows no path: a ``Fault`` collects that on its way up.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from io import IOBase
from types import NoneType
from typing import Any, NoReturn

import msgspec
from msgspec.msgpack import Ext

from safepoint.codec.arrays import ARRAY_KINDS, array_tag
from safepoint.codec.classes import CLASS_KINDS, KINDS
from safepoint.codec.jsonform import from_json, to_json
from safepoint.codec.kinds import (
    BUILTIN_KINDS,
    MAX_DEPTH,
    Fault,
    Kind,
    MissingMember,
    Step,
    Tagged,
    damaged,
    key_text,
    type_name,
)
from safepoint.codec.registry import Registry, sdk_name, shape_of
from safepoint.codec.sdk import SDK_KINDS
from safepoint.errors import Damaged, InvalidState, NewerFormat, RefusedType, SafepointError, UsageError

__all__ = [
    "MAX_DEPTH",
    "REF_CODE",
    "Tagged",
    "decode",
    "decode_plain",
    "encode",
    "encode_tree",
    "enough_stack",
    "from_json",
    "prepare",
    "ref",
    "to_json",
]

#: The extension that stands for a value stored elsewhere; its payload is an index for ``refs``.
REF_CODE = 0

_BY_CODE = {kind.code: kind for kind in KINDS.values()}
_AS_THEY_ARE = frozenset((NoneType, bool, float, bytes))
_SCALARS = _AS_THEY_ARE | {int, str}
_IN_BOTH_FORMS = (KINDS["int"], KINDS["str"])

_pack = msgspec.msgpack.Encoder().encode
# Payloads stay views of the one buffer until they are needed: a copy per level would multiply hostile input.
_unpack = msgspec.msgpack.Decoder(ext_hook=Ext).decode


def encode(value: Any, registry: Registry, *, path: str = "", depth: int = MAX_DEPTH) -> bytes:
    """MessagePack for any value of the type table.

    ``path`` is where ``value`` is, for error texts (``agent_state``); ``depth`` how many containers may nest in it.

    Raises:
        RefusedType: Something in it cannot be stored. ``details`` has ``path`` and ``type``; the content is in no text.
    """
    return _encoded(prepare(value, registry, path, depth), path)


def prepare(value: Any, registry: Registry, path: str = "", depth: int = MAX_DEPTH) -> Any:
    """The tree that ``msgspec.msgpack.encode`` turns into what ``decode`` reads: ``value`` itself where nothing needs changing.

    Nothing in ``value`` is changed, and the result shares its parts: encode it before anything else touches ``value``.
    """
    try:
        return _walk(value, depth, registry)
    except Fault as fault:
        _raise(fault, path, value, "stored")
    except RecursionError:
        raise _no_room(path, "stored") from None
    except (RuntimeError, IndexError) as error:  # "dictionary changed size during iteration"
        raise InvalidState(
            f"{path or 'the value'} cannot be stored",
            str(error),
            "Change a state only where it is saved, or under a lock",
            path=path,
        ) from error


def encode_tree(tree: Any, *, depth: int = MAX_DEPTH) -> bytes:
    """The bytes of a plain tree, as made by ``decode_plain``. Values of the built-in types of the table may be in it as they are."""
    return encode(tree, _TREES, depth=depth)


def decode(
    data: bytes, registry: Registry, *, path: str = "", refs: Callable[[int], Any] | None = None, depth: int = MAX_DEPTH
) -> Any:
    """The value that ``encode`` was given. ``refs`` supplies what a ``ref(index)`` stands for.

    Raises:
        Damaged: These are not bytes that ``encode`` writes.
        RefusedType: They name a class that is neither registered nor trusted; nothing was imported.
        InvalidState: A class has changed since, in a way that needs a migration.
        NewerFormat: They hold a type that this version does not know.
    """
    return _load(data, registry, path, refs, depth)


def decode_plain(data: bytes, *, path: str = "", refs: Callable[[int], Any] | None = None, depth: int = MAX_DEPTH) -> Any:
    """The plain tree of what ``encode`` was given: no class is looked up, ``Tagged`` stands for all that is not plain."""
    return _load(data, None, path, refs, depth)


def ref(index: int) -> Ext:
    """What to put into a prepared tree in place of a value that is stored elsewhere."""
    return Ext(REF_CODE, _pack(index))


# Saving


def _encoded(tree: Any, path: str) -> bytes:
    try:
        return _pack(tree)
    except (ValueError, OverflowError) as error:  # over 4 GiB in one piece
        raise RefusedType(f"{path or 'the value'} cannot be stored", str(error), "Store it in parts", path=path) from None


def _walk(value: Any, depth: int, registry: Registry) -> Any:
    cls = type(value)
    return (_WALKERS.get(cls) or _walker(cls))(value, depth, registry)


def _list(value: list[Any], depth: int, registry: Registry) -> list[Any]:
    if depth <= 0:
        raise _too_deep(value)
    out = None
    index = 0
    try:
        for index, item in enumerate(value):
            cls = type(item)
            if cls in _AS_THEY_ARE or (cls is str and item.isascii()):
                continue
            new = (_WALKERS.get(cls) or _walker(cls))(item, depth - 1, registry)
            if new is not item:
                out = value.copy() if out is None else out
                out[index] = new
    except Fault as fault:
        fault.trail.append((value, index))
        raise
    return value if out is None else out


def _dict(value: dict[Any, Any], depth: int, registry: Registry) -> Any:
    if depth <= 0:
        raise _too_deep(value)
    out = None
    key = None
    text_keys = True
    try:
        for key, item in value.items():
            if type(key) is not str or not (key.isascii() or _is_text(key)):
                text_keys = False
                break
            cls = type(item)
            if cls in _AS_THEY_ARE or (cls is str and item.isascii()):
                continue
            new = (_WALKERS.get(cls) or _walker(cls))(item, depth - 1, registry)
            if new is not item:
                out = value.copy() if out is None else out
                out[key] = new
    except Fault as fault:
        fault.trail.append((value, key))
        raise
    if not text_keys:
        return _GENERAL_DICT(value, depth, registry)
    return value if out is None else out


def _str(value: str, _depth: int, _registry: Registry) -> Any:
    return value if value.isascii() or _is_text(value) else Ext(KINDS["str"].code, _pack(KINDS["str"].reduce(value, _registry)))


def _int(value: int, _depth: int, registry: Registry) -> Any:
    return value if -(2**63) <= value < 2**64 else Ext(KINDS["int"].code, _pack(KINDS["int"].reduce(value, registry)))


def _same(value: Any, _depth: int, _registry: Registry) -> Any:
    return value


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _walker_of(kind: Kind) -> Callable[[Any, int, Registry], Any]:
    def walk(value: Any, depth: int, registry: Registry) -> Any:
        name = None
        if kind.named and (name := registry.name_of(type(value))) is None:
            raise _unregistered(type(value))
        if kind.payload is not object and depth <= 0:
            raise _too_deep(value)
        try:
            payload = kind.reduce(value, registry)
        except (Fault, MemoryError, RecursionError):
            raise
        except Exception as error:  # a class with a __getstate__ of its own, or a set that another thread is changing
            raise Fault(
                RefusedType, f"taking it apart failed with {type_name(type(error))}", type=type_name(type(value))
            ) from error
        return _ext(kind, name, payload, value, depth, registry)

    return walk


def _ext(kind: Kind, name: str | None, payload: Any, value: Any, depth: int, registry: Registry) -> Ext:
    try:
        # A leaf is no container, so that it may be at the very bottom; one level holds all that its payload can have.
        tree = _PAYLOAD_WALKERS[type(payload)](payload, 1 if kind.payload is object else depth, registry)
    except Fault as fault:
        if fault.trail and fault.trail[-1][0] is payload:  # say it in the words of the value, not of its payload
            fault.trail[-1] = (value, kind.step(payload, fault.trail[-1][1]))
        raise
    if kind.payload is dict and type(tree) is not dict:
        raise Fault(RefusedType, "it has an attribute whose name is no text", type=type_name(type(value)))
    if not kind.ordered:
        tree = sorted(tree, key=_pack)
    return Ext(kind.code, _pack([name, tree] if kind.named else tree))


def _tagged(value: Tagged, depth: int, registry: Registry) -> Ext:
    if registry is not _TREES:
        raise _unsupported(Tagged)
    kind = KINDS.get(value.tag)
    if kind is None or kind.named != (type(value.name) is str) or type(value.value) not in _PAYLOAD_WALKERS:
        raise Fault(UsageError, f"there is no {value.tag!r:.80} with such parts in the type table", "See docs/types.md")
    if kind.payload is not object and (depth <= 0 or type(value.value) is not kind.payload or not kind.whole(value.value)):
        raise _too_deep(value) if depth <= 0 else Fault(UsageError, f"{kind.tag} needs another payload", "See docs/types.md")
    return _ext(kind, value.name, value.value, value, depth, registry)


def _walker(cls: type) -> Callable[[Any, int, Registry], Any]:
    # Not kept by class: what a class can do may change while its decorators run, and classes should be free to go.
    shape = "sdk" if sdk_name(cls) is not None else shape_of(cls) or array_tag(cls)
    if shape is None:
        raise _unsupported(cls)
    return _CLASS_WALKERS[shape]


def _missing(value: MissingMember, depth: int, registry: Registry) -> Ext:
    name = registry.name_of(value.enum)
    if name is None:
        raise _unregistered(value.enum)
    if type(value.stored) not in (str, int):
        raise _unsupported(type(value.stored))
    return _ext(KINDS["enum"], name, value.stored, value, depth, registry)


_CLASS_WALKERS = {kind.tag: _walker_of(kind) for kind in (*CLASS_KINDS, *ARRAY_KINDS, *SDK_KINDS)}
_GENERAL_DICT = _walker_of(KINDS["dict"])
_PAYLOAD_WALKERS: dict[type, Callable[[Any, int, Registry], Any]] = {
    **dict.fromkeys(_AS_THEY_ARE, _same),
    str: _str,
    int: _int,
    list: _list,
    dict: _dict,
}
_WALKERS: dict[type, Callable[[Any, int, Registry], Any]] = {
    **{cls: _walker_of(kind) for kind in BUILTIN_KINDS for cls in kind.types},
    **_PAYLOAD_WALKERS,
    Tagged: _tagged,
    MissingMember: _missing,
}
# Marks that a plain tree is being encoded, where Tagged is allowed and a class of the application is not.
_TREES = Registry(parent=None)


# Refusals


def _too_deep(value: object) -> Fault:
    fault = Fault(RefusedType, f"more than {MAX_DEPTH} containers are nested in one another", "Store a flatter structure")
    fault.trail.append((value, Step("")))
    return fault


def _unregistered(cls: type) -> Fault:
    name = type_name(cls)
    return Fault(
        RefusedType,
        f"the class {name} is not registered",
        f"Decorate it with @safepoint.register, or open the store with types=[{cls.__name__}] or trust=[{cls.__module__!r}]",
        type=name,
    )


def _unsupported(cls: type) -> Fault:
    base = next((base for base in cls.__mro__[1:] if base in _WALKERS), None)
    why = f"the type {type_name(cls)} cannot be stored"
    if base is not None:
        why = f"the type {type_name(cls)} would be lost: it is a subclass of {type_name(base)}"
    remedy = "Store what it stands for as a dataclass or a built-in type (docs/types.md)"
    if issubclass(cls, IOBase):
        why += ": what it holds is there for the first request that reads it, and for no other"
        remedy = "Read it once, and store what was read: bytes, or for a request the base64 text"
    return Fault(RefusedType, why, remedy, type=type_name(cls))


def _raise(fault: Fault, path: str, value: object, verb: str) -> NoReturn:
    trail = fault.trail[::-1]
    seen: dict[int, int] = {}
    for at, (owner, _) in enumerate(trail):
        first = seen.setdefault(id(owner), at)
        if first != at:
            fault.why = f"it contains itself: it is the same object as {_path(path, trail[:first])}"
            fault.remedy = "Store an id in place of the reference back"
            trail = trail[:at]
            break
    where = _path(path, trail)
    fault.details.setdefault("path", where)
    if verb == "stored":
        fault.details.setdefault("type", type_name(type(trail[-1][0] if trail else value)))
    raise fault.error(f"{where} cannot be {verb}", fault.why, fault.remedy, **fault.details) from fault.__cause__


# What the deepest value needs. A caller with less stack than that must not be told that sound data are damaged.
_FRAMES = 4 * MAX_DEPTH


def _room() -> int:
    used, frame = 0, sys._getframe()
    while frame.f_back:
        used, frame = used + 1, frame.f_back
    return sys.getrecursionlimit() - used


def enough_stack(verb: str) -> None:
    """Raise if it is the caller's depth, and not that of the data, that a RecursionError is about."""
    if _room() < _FRAMES:
        raise _no_room("", verb)


def _no_room(path: str, verb: str) -> UsageError:
    return UsageError(
        f"{path or 'the value'} cannot be {verb} here", "too little is left of the stack", "Call from less deep", path=path
    )


def _path(path: str, trail: list[tuple[object, object]]) -> str:
    text = path + "".join(key if type(key) is Step else f"[{key_text(key)}]" for _, key in trail)
    if len(text) > 400:
        text = f"{text[:200]} … {text[-120:]}"
    return text or "the value"


# Loading


@dataclass(frozen=True, slots=True)
class _Loader:
    registry: Registry | None  # None: a plain tree is made
    refs: Callable[[int], Any] | None


def _load(data: bytes, registry: Registry | None, path: str, refs: Callable[[int], Any] | None, depth: int) -> Any:
    try:
        value = _unpacked(data)
        loader = _Loader(registry, refs)
        if type(value) not in _SCALARS:
            value = _load_part(value, depth, loader)
        return value
    except Fault as fault:
        _raise(fault, path, data, "loaded")
    except RecursionError:
        if _room() < _FRAMES:
            raise _no_room(path, "loaded") from None
        raise Damaged(f"{path or 'the value'} cannot be loaded", "it nests too deep", path=path) from None


def _unpacked(data: Any) -> Any:
    try:
        return _unpack(data)
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError, OverflowError) as error:
        raise damaged(f"it is no MessagePack ({type(error).__name__})") from error


# Containers are mended in place: they have just been made, and nobody else holds them.


def _load_part(part: Any, depth: int, loader: _Loader) -> Any:
    cls = type(part)
    if cls is Ext:
        return _load_ext(part, depth, loader)
    if depth <= 0:
        raise damaged(f"more than {MAX_DEPTH} containers are nested in one another")
    if cls is dict:
        return _load_dict(part, depth, loader)
    if cls is list:
        return _load_list(part, depth, loader)
    raise damaged("it holds what safepoint does not write")  # msgspec's own timestamps


def _load_list(part: list[Any], depth: int, loader: _Loader) -> list[Any]:
    index = 0
    try:
        for index, item in enumerate(part):
            if type(item) not in _SCALARS:
                part[index] = _load_part(item, depth - 1, loader)
    except Fault as fault:
        fault.trail.append((part, index))
        raise
    return part


def _load_dict(part: dict[Any, Any], depth: int, loader: _Loader) -> dict[str, Any]:
    key = None
    try:
        for key, item in part.items():
            if type(key) is not str:
                raise damaged("it has a key that is no text")
            if type(item) not in _SCALARS:
                part[key] = _load_part(item, depth - 1, loader)
    except Fault as fault:
        fault.trail.append((part, key))
        raise
    return part


def _load_ext(ext: Ext, depth: int, loader: _Loader) -> Any:
    payload = _unpacked(ext.data)
    if ext.code == REF_CODE:
        return _load_ref(payload, loader)
    kind = _BY_CODE.get(ext.code)
    if kind is None:
        if ext.code < 0:
            raise damaged("it holds what safepoint does not write")
        raise Fault(NewerFormat, f"it holds a type that this version does not know (code {ext.code})", "Update safepoint")
    name = ""
    if kind.named:
        if type(payload) is not list or len(payload) != 2 or type(payload[0]) is not str:
            raise damaged(f"it holds no whole {kind.tag}")
        name, payload = payload
    if kind.payload is object:
        payload = _load_leaf(payload, loader)
    else:
        if type(payload) is not kind.payload or not kind.whole(payload):
            raise damaged(f"it holds no whole {kind.tag}")
        raw = payload
        try:
            payload = _load_part(payload, depth, loader)
        except Fault as fault:
            if fault.trail and fault.trail[-1][0] is raw:
                fault.trail[-1] = (ext, kind.step(raw, fault.trail[-1][1]))
            raise
    if loader.registry is None and kind not in _IN_BOTH_FORMS:
        return Tagged(kind.tag, name if kind.named else None, payload)
    try:
        return kind.revive(payload, name, loader.registry or _TREES)
    except (Fault, SafepointError, MemoryError):
        raise
    except Exception as error:
        raise damaged(f"it holds no whole {kind.tag} ({type(error).__name__})") from error


def _load_leaf(payload: Any, loader: _Loader) -> Any:
    """Scalars only, so that leaves in leaves cannot get round the limit of depth."""
    parts = payload if type(payload) is list else [payload]
    for index, part in enumerate(parts):
        if type(part) is Ext and part.code in (KINDS["int"].code, KINDS["str"].code):
            inner = _unpacked(part.data)
            if type(inner) is not bytes:
                raise damaged("it holds no whole number or text")
            parts[index] = _BY_CODE[part.code].revive(inner, "", loader.registry or _TREES)
        elif type(part) not in _SCALARS:
            raise damaged("it holds parts that do not belong there")
    return payload if type(payload) is list else parts[0]


def _load_ref(index: Any, loader: _Loader) -> Any:
    if loader.refs is None or type(index) is not int or index < 0:
        raise damaged("it refers to a part that is not there")
    try:
        return loader.refs(index)
    except SafepointError:
        raise
    except LookupError as error:
        raise damaged("it refers to a part that is not there") from error

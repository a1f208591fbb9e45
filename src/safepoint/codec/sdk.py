"""The row of the type table for objects of the ``openai`` and ``anthropic`` SDKs: kept in wire form, revived as the same class.

What is stored is what the SDK would send: the fields that were set, under the API's names, in the SDK's order, with unknown fields
of a vendor and with texts, ids, ``arguments`` and signatures as they came. So a history is readable without the SDK, does not hang
on how its classes are laid out, and is sent again byte for byte. (``model_dump()`` would add nulls that providers refuse, pickle
would run code.)

An object may hold more than it sends: the request's id, or the ``parsed`` value of a structured output, which a provider refuses to
get back. Such attributes are kept beside the wire form, under keys that are ``"~"`` and their place (``"~parsed"``,
``"~choices.0.message.parsed"``), and are attributes again after loading, but not *set*: they are never sent. At save each object is revived once, to see that it is itself again; one that is not is refused.

The SDKs are imported only to revive an object, and nothing outside of ``openai.types`` and ``anthropic.types`` is: these modules
declare data and have no constructors or validators of their own.
"""

from __future__ import annotations

import importlib.util
import math
import sys
import weakref
from typing import Any

import msgspec

from safepoint.codec.kinds import Fault, Kind, damaged, type_name, unknown_class
from safepoint.codec.registry import Registry, sdk_name, sdk_of
from safepoint.errors import InvalidState, MissingExtra, RefusedType

__all__ = ["KNOWN", "SDK_KINDS", "wire"]

#: The major versions that the tests have seen, by package.
KNOWN = {"openai": (3,), "anthropic": (2,)}

_ASIDE = "~"
_CONSTRUCT = "construct"
# Made by the SDKs' parsing helpers from what was received, and refused by the providers when sent.
_PARSED = ("parsed", "parsed_arguments", "parsed_output")
# What the clients note on the outermost object of a response.
_NOTES = ("_request_id", "_workspace_id")

_pack = msgspec.msgpack.Encoder().encode


# Out


def wire(value: Any) -> Any:
    """What to send of a value: objects of the ``openai`` and ``anthropic`` SDKs as dicts in the API's own names, with the fields
    that were set and nothing else.

    Lists, tuples and dicts are gone through; any other value is returned as it is. Of an Anthropic ``Message`` this is ``role`` and
    ``content``, as the API takes it back (it refuses the ``id``, ``model``, ``usage`` and ``stop_reason`` that the whole object
    would be sent with). Of a message with a ``parsed`` value, it is the message without that.
    """
    cls = type(value)
    if cls is list or cls is tuple:
        return [wire(item) for item in value]
    if cls is dict:
        return {key: wire(item) for key, item in value.items()}
    if sdk_name(cls) is None:
        return value
    whole = _dump(value)
    if whole.get("type") == "message" and whole.keys() >= {"role", "content", "usage", "stop_reason"}:
        return {"role": whole["role"], "content": whole["content"]}
    return whole


def _dump(value: Any) -> dict[str, Any]:
    exclude = _parsed(value) if _is_parsed(type(value)) else None
    # Values of kinds that the SDK does not know yet are sent as they are: no warning about each of them.
    dumped = value.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude=exclude, warnings=False)
    return dumped if type(dumped) is dict else {}


def _origin(cls: Any) -> Any:
    """The class without parameters: what ``parse()`` returns is parametrised by a variable, and no process finds that again."""
    return (getattr(cls, "__pydantic_generic_metadata__", None) or {}).get("origin") or cls


def _is_parsed(cls: type) -> bool:
    return "Parsed" in cls.__name__ and str(_origin(cls).__name__).startswith("Parsed")


def _parsed(value: Any) -> dict[Any, Any]:
    """What is not to be sent of an object that a parsing helper made, in pydantic's form."""
    out: dict[Any, Any] = {}
    for name, part in vars(value).items():
        if _is_parsed(type(value)) and (name in _PARSED or (name == "tool_calls" and not part)):
            out[name] = True
        elif isinstance(part, list):
            inner = {i: found for i, item in enumerate(part) if sdk_name(type(item)) and (found := _parsed(item))}
            if inner:
                out[name] = inner
        elif sdk_name(type(part)) and (found := _parsed(part)):
            out[name] = found
    return out


# What was found to come back as it was need not be tried again while it sends the same.
_tried: dict[int, tuple[weakref.ref[Any], bytes]] = {}


def _code(tree: Any) -> bytes:
    """Bytes that differ where trees of JSON do: in order, and True from 1."""
    try:
        return _pack(tree)
    except (ValueError, OverflowError, TypeError):  # ints beyond 64 bits, lone surrogates
        return repr(tree).encode("utf-8", "surrogatepass")


def _reduce(value: Any, _registry: Registry) -> dict[str, Any]:
    cls = type(value)
    tree = _dump(value)
    code = _code(tree)
    known = _tried.get(id(value))
    if known is not None and known[0]() is value and known[1] == code:
        return tree
    if any(key[:1] == _ASIDE for key in tree):
        raise Fault(RefusedType, f"it has a field whose name begins with {_ASIDE}", type=type_name(cls))
    for how in ("", _CONSTRUCT):
        again = _made(_origin(cls), tree, how)
        if again is None or _code(_dump(again)) != code:
            continue
        aside: dict[str, Any] = {_ASIDE: how} if how else {}
        if _same(value, again, _ASIDE, aside):
            if aside:
                return {**tree, **aside}
            _remember(value, code)
            return tree
    raise Fault(
        RefusedType,
        f"this {cls.__name__} would not come back as it is: it holds what it does not send, or what JSON does not have",
        "Store safepoint.wire(…) of it, or what you need of it",
        type=type_name(cls),
    )


def _remember(value: Any, code: bytes) -> None:
    key = id(value)

    def forget(ref: weakref.ref[Any]) -> None:
        if (entry := _tried.get(key)) is not None and entry[0] is ref:
            del _tried[key]

    _tried[key] = (weakref.ref(value, forget), code)


def _same(value: Any, again: Any, path: str, aside: dict[str, Any]) -> bool:
    """Whether ``again`` is ``value`` all the way down, but for attributes that are put aside. (By pydantic's ``==`` two objects are
    equal that are not: it compares only fields.)"""
    cls = type(value)
    if cls is list or cls is dict:
        if type(again) is not cls or len(value) != len(again):
            return False
        if cls is dict:
            return list(value) == list(again) and all(_same(v, again[k], f"{path}{k}.", {}) for k, v in value.items())
        return all(_same(v, again[i], f"{path}{i}.", aside) for i, v in enumerate(value))
    if sdk_name(cls) is None:
        return cls is type(again) and bool(value == again or (cls is float and math.isnan(value) and math.isnan(again)))
    if _origin(cls) is not _origin(type(again)) or value.__pydantic_private__:
        return False
    if not _same(value.__pydantic_extra__ or {}, again.__pydantic_extra__ or {}, path, aside):
        return False
    mine, other, parsed = vars(value), vars(again), _is_parsed(cls)
    if not parsed and value.__pydantic_fields_set__ != again.__pydantic_fields_set__:
        return False
    if not other.keys() <= mine.keys():
        return False
    for name, part in mine.items():
        if name in other and _same(part, other[name], f"{path}{name}.", aside):
            continue
        if (name in value.__pydantic_fields_set__ and not (parsed and name in (*_PARSED, "tool_calls"))) or not _may_be_aside(
            cls, name
        ):
            return False
        aside[path + name] = part
    return True


def _may_be_aside(cls: Any, name: str) -> bool:
    return name in _NOTES or name in cls.model_fields


# Back


def _made(cls: Any, tree: dict[str, Any], how: str) -> Any:
    """An object of this wire form, or None. By validating, which is quick, or as the SDK makes one of a response, which takes what
    its types do not allow."""
    try:
        return cls.construct(**tree) if how else cls.model_validate(tree)
    except Exception:  # whatever the class has against it
        return None


def _revive(payload: Any, name: str, registry: Registry) -> Any:
    cls = _class(name, registry)
    aside = {key: payload.pop(key) for key in list(payload) if key[:1] == _ASIDE}
    how = aside.pop(_ASIDE, "")
    for each in (how,) if how else ("", _CONSTRUCT):
        value = _made(cls, payload, each)
        if value is not None and _dump(value) == payload:
            break
    else:
        raise Fault(
            InvalidState,
            f"{type_name(cls)} has changed: it does not send any more what was stored",
            "Write a migration, or use the version of the SDK that it was stored with",
            type=type_name(cls),
        )
    for path, part in aside.items():
        *way, last = path[1:].split(".")
        owner = value
        for step in way:
            owner = owner[int(step)] if isinstance(owner, list) else vars(owner)[step]
        if sdk_name(type(owner)) is None or not _may_be_aside(type(owner), last):
            raise damaged("not the parts of an SDK's object")
        vars(owner)[last] = part  # past pydantic's own way, which would make it one of those that are sent
    return value


def _class(name: str, registry: Registry) -> Any:
    module = name.partition(":")[0]
    package = sdk_of(module)
    if package is None:
        raise unknown_class(name)
    if sys.modules.get(package) is None and importlib.util.find_spec(package) is None:
        raise Fault(
            MissingExtra,
            f"it is an object of the {package} SDK, which is not installed",
            f"pip install 'safepoint[{package}]'. `safepoint show` and `export` read it without",
            extra=package,
        )
    cls = registry.sdk_class(name)
    if cls is None or sdk_name(cls) is None:
        raise Fault(
            RefusedType,
            f"the {package} SDK here has no class {name.partition(':')[2]!r:.80} in {module:.120}",
            "Use the version that it was stored with, or write a migration",
            type=name[:200],
        )
    check_version(package)
    return cls


_checked: dict[str, str] = {}


def check_version(package: str) -> None:
    """Raise if the SDK that is imported is of a version whose objects nobody has tried."""
    version = str(getattr(sys.modules.get(package), "__version__", ""))
    major = version.partition(".")[0]
    if not major.isdecimal() or int(major) not in KNOWN[package]:
        known = " or ".join(f"{major}.x" for major in KNOWN[package])
        raise Fault(
            RefusedType,
            f"it is an object of {package} {version[:20]}, and this version of safepoint knows {known}",
            f"pip install 'safepoint[{package}]', or store safepoint.wire(…) of it",
            package=package,
            version=version[:20],
        )
    _checked[package] = version


def _checked_reduce(value: Any, registry: Registry) -> dict[str, Any]:
    package = type(value).__module__.partition(".")[0]
    if getattr(sys.modules.get(package), "__version__", None) != _checked.get(package, ""):
        check_version(package)
    return _reduce(value, registry)


SDK_KINDS: tuple[Kind, ...] = (Kind(40, "sdk", (), _checked_reduce, _revive, dict, named=True),)

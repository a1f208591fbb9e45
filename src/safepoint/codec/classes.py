"""The rows of the type table for classes of the application: enum, named tuple, dataclass, pydantic model, attrs class, Struct.

All but enums are stored as one dict of what the instance holds. A plain key is a field; "-x" says that the field x was not set,
".x" is another attribute, "+x" an extra of a pydantic model, "~x" a private attribute of one, "*" its list of fields set. (Names
of fields are identifiers, so none of them begins like that.) No constructor and no ``__post_init__`` runs at load: what they
did has been stored.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields
from enum import Enum, Flag
from functools import lru_cache
from types import MemberDescriptorType
from typing import Any

from msgspec import NODEFAULT, Struct
from msgspec.structs import force_setattr

from safepoint.codec.arrays import ARRAY_KINDS
from safepoint.codec.kinds import BUILTIN_KINDS, Fault, Kind, MissingMember, damaged, type_name, unknown_class
from safepoint.codec.registry import Registry, shape_of
from safepoint.codec.sdk import SDK_KINDS
from safepoint.errors import InvalidState, RefusedType

__all__ = ["CLASS_KINDS", "KINDS", "inside"]


def _class(name: str, shape: str, registry: Registry) -> Any:
    cls = registry.class_of(name)
    if cls is None:
        raise unknown_class(name)
    # An SDK's object may have been stored before these had a row of their own.
    if shape_of(cls) != shape and (shape_of(cls), shape) != ("sdk", "pydantic"):
        raise Fault(
            InvalidState, f"{name} was stored as {shape}, and is {shape_of(cls)} now", "Write a migration for it", type=name
        )
    return cls


def _pack(held: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Fields in their order, then what else the instance holds."""
    packed = {name if name in held else f"-{name}": held.get(name) for name in names}
    packed |= {f".{name}" if type(name) is str else name: value for name, value in held.items() if name not in packed}
    packed.pop(".__orig_class__", None)  # typing's own note on instances of generic classes
    return packed


def _unpack(cls: type, packed: dict[str, Any], defaults: Mapping[str, Callable[[], Any] | None]) -> dict[str, Any]:
    """All that the instance held; what was stored before a field existed takes the field's default."""
    held: dict[str, Any] = {}
    for key, value in packed.items():
        if key[:1] == ".":
            held[key[1:]] = value
        elif key.lstrip("-") not in defaults:
            problem = f"{type_name(cls)} has no field {key.lstrip('-')!r} any more"
            raise Fault(InvalidState, problem, "Write a migration that drops or renames it", type=type_name(cls))
        elif key[:1] != "-":
            held[key] = value
    for name, default in defaults.items():
        if name in held or f"-{name}" in packed:
            continue
        if default is None:
            problem = f"{type_name(cls)}.{name} is not in what was stored, and has no default"
            raise Fault(InvalidState, problem, "Give it a default, or write a migration that adds it", type=type_name(cls))
        held[name] = default()
    return held


def _attach(value: Any, held: dict[str, Any]) -> Any:
    if held:
        if not hasattr(value, "__dict__"):
            problem = f"{type_name(type(value))} has no room for the attribute {next(iter(held))!r} any more"
            raise Fault(InvalidState, problem, "Write a migration that drops it", type=type_name(type(value)))
        vars(value).update(held)
    return value


# Enums: by the name of the member, so that values may change; combinations of flags by their value, as they have no name.


def _enum_reduce(value: Enum, _registry: Registry) -> str | int:
    cls = type(value)
    if cls.__members__.get(value._name_) is value:
        return value._name_
    if isinstance(value, Flag) and type(value._value_) is int:
        return value._value_
    raise Fault(RefusedType, f"it is no declared member of {type_name(cls)}", type=type_name(cls))


def _enum_revive(payload: Any, name: str, registry: Registry) -> Any:
    cls = _class(name, "enum", registry)
    member: Any = cls.__members__.get(payload) if type(payload) is str else None
    if type(payload) is int and issubclass(cls, Flag):
        try:
            member = cls(payload)
        except ValueError:
            member = None
        if type(member) is not cls or member._value_ != payload:
            member = None
    if member is None:
        return _missing_member(cls, payload, registry)
    return member


def _missing_member(cls: Any, stored: Any, registry: Registry) -> Any:
    """What the enum's policy says about a member that is no longer there."""
    if type(stored) not in (str, int):
        raise damaged("a member without name")
    policy = registry.missing_of(cls)
    if policy == "placeholder" and type(policy) is str:
        return MissingMember(cls, stored)
    found: Any = None
    if isinstance(policy, cls):
        found = policy
    elif isinstance(policy, Mapping):
        found = policy.get(stored)
    elif callable(policy):
        try:
            found = policy(stored)
        except Exception as error:
            problem = f"the policy for missing members of {type_name(cls)} failed with {type_name(type(error))}"
            raise Fault(InvalidState, problem, "Correct the function under missing=", type=type_name(cls)) from error
    if type(found) is str:
        found = cls.__members__.get(found)
    if type(found) is not cls:
        raise Fault(
            InvalidState,
            f"{type_name(cls)} has no member {str(stored)[:80]} any more",
            f"Keep the old name as an alias in the enum, say @safepoint.register(missing={{{stored!r:.80}: …}}) or "
            "missing='placeholder', or write a migration",
            type=type_name(cls),
            member=str(stored)[:80],
        )
    return found


# Named tuples


def _namedtuple_reduce(value: Any, _registry: Registry) -> dict[str, Any]:
    names = type(value)._fields
    if len(names) != len(value):
        raise Fault(RefusedType, "it does not have as many items as its class has fields", type=type_name(type(value)))
    return _pack(dict(zip(names, value, strict=True)) | getattr(value, "__dict__", {}), names)


def _namedtuple_revive(payload: Any, name: str, registry: Registry) -> Any:
    cls = _class(name, "namedtuple", registry)
    held = _unpack(cls, payload, _constants(cls._fields, getattr(cls, "_field_defaults", {})))
    return _attach(tuple.__new__(cls, [held.pop(field) for field in cls._fields]), held)


def _constants(names: Iterable[str], defaults: Mapping[str, Any]) -> dict[str, Callable[[], Any] | None]:
    return {name: _constant(defaults[name]) if name in defaults else None for name in names}


def _constant(value: Any) -> Callable[[], Any]:
    return lambda: value


# Dataclasses: attributes are read and written past properties, descriptors and a frozen class's __setattr__.


@lru_cache(maxsize=256)
def _slots(cls: type) -> dict[str, MemberDescriptorType]:
    return {
        name: slot for base in reversed(cls.__mro__) for name, slot in vars(base).items() if type(slot) is MemberDescriptorType
    }


def _held(value: Any) -> dict[str, Any]:
    """All that an instance holds, by name: its attributes and the slots of its class and of those above it."""
    held = dict(getattr(value, "__dict__", {}))
    cls: Any = type(value)
    for name, slot in _slots(cls).items():
        try:
            held[name] = slot.__get__(value)
        except AttributeError:  # not set
            pass
    return held


def inside(value: Any) -> dict[str, Any]:
    """For a walk through what was not stored yet: what an instance of an application's class holds. Of anything else no more than
    its ``__dict__``: by way of a method or a function, say, one would come to all of the program."""
    return _held(value) if shape_of(type(value)) is not None else dict(getattr(value, "__dict__", None) or {})


def _put(value: Any, held: dict[str, Any]) -> Any:
    cls: Any = type(value)
    slots = _slots(cls)
    for key in held.keys() & slots.keys():
        slots[key].__set__(value, held.pop(key))
    return _attach(value, held)


def _dataclass_reduce(value: Any, _registry: Registry) -> dict[str, Any]:
    return _pack(_held(value), [field.name for field in fields(value)])


def _dataclass_revive(payload: Any, name: str, registry: Registry) -> Any:
    cls = _class(name, "dataclass", registry)
    defaults: dict[str, Callable[[], Any] | None] = {}
    for field in fields(cls):
        constant = _constant(field.default) if field.default is not MISSING else None
        defaults[field.name] = field.default_factory if field.default_factory is not MISSING else constant
    return _put(object.__new__(cls), _unpack(cls, payload, defaults))


# attrs classes: as dataclasses. Converters and validators have had their say when the instance was made.

# Hashes of texts differ from process to process: the one that attrs keeps must be made anew.
_KEPT_HASH = "_attrs_cached_hash"


def _attrs_reduce(value: Any, _registry: Registry) -> dict[str, Any]:
    held = _held(value)
    if _KEPT_HASH in held:
        held[_KEPT_HASH] = None
    return _pack(held, [field.name for field in type(value).__attrs_attrs__])


def _attrs_revive(payload: Any, name: str, registry: Registry) -> Any:
    cls = _class(name, "attrs", registry)
    attr = sys.modules["attr"]
    defaults: dict[str, Callable[[], Any] | None] = {}
    for field in cls.__attrs_attrs__:
        if isinstance(field.default, attr.Factory):
            defaults[field.name] = None if field.default.takes_self else field.default.factory
        else:
            defaults[field.name] = None if field.default is attr.NOTHING else _constant(field.default)
    return _put(object.__new__(cls), _unpack(cls, payload, defaults))


# msgspec's structs. They cannot be made past their constructor, which only stores what it is given, but then calls __post_init__.
# So one with a __post_init__ begins its life as an instance of a subclass that has none.


class _Quiet:
    __slots__ = ()

    def __init_subclass__(cls, **_: Any) -> None:
        pass

    def __post_init__(self) -> None:
        pass


@lru_cache(maxsize=256)
def _maker(cls: Any) -> Callable[[], Any]:
    empty = dict.fromkeys(cls.__struct_fields__)
    if not hasattr(cls, "__post_init__"):
        return lambda: cls(**empty)
    blank = type(cls)(cls.__name__, (_Quiet, cls), {"__module__": cls.__module__})
    change = object.__dict__["__class__"].__set__  # a frozen struct refuses the plain way

    def make() -> Any:
        value = blank(**empty)
        change(value, cls)
        return value

    make()
    return make


def _struct_reduce(value: Any, _registry: Registry) -> dict[str, Any]:
    cls: Any = type(value)
    try:
        _maker(cls)
    except Exception as error:
        problem = f"a {type_name(cls)} cannot be made without its __post_init__"
        raise Fault(RefusedType, problem, "Take __post_init__ away, or store a dataclass", type=type_name(cls)) from error
    return _pack(_held(value), cls.__struct_fields__)


def _struct_revive(payload: Any, name: str, registry: Registry) -> Any:
    cls = _class(name, "struct", registry)
    names = cls.__struct_fields__
    own = cls.__struct_defaults__
    defaults: dict[str, Callable[[], Any] | None] = dict.fromkeys(names)
    for field, default in zip(names[len(names) - len(own) :], own, strict=True):
        if default is not NODEFAULT:
            defaults[field] = getattr(default, "factory", None) if type(default) is _FACTORY else _constant(default)
    held = _unpack(cls, payload, defaults)
    value = _maker(cls)()
    slots = _slots(cls)
    for field in names:
        if field in held:
            force_setattr(value, field, held.pop(field))
        else:
            slots[field].__delete__(value)
    return _attach(value, held)


class _WithFactory(Struct):
    made: list[Any] = []


_FACTORY: type = type(_WithFactory.__struct_defaults__[0])


# Pydantic models, through BaseModel's own __getstate__ and __setstate__. None where a model has no extras or private attributes
# is told from an empty dict by the two flags that lead the list of fields set.

_PYDANTIC_STATE = {"__dict__", "__pydantic_fields_set__", "__pydantic_extra__", "__pydantic_private__"}


def _pydantic_reduce(value: Any, _registry: Registry) -> dict[str, Any]:
    cls = type(value)
    state = value.__getstate__()
    if type(state) is not dict or not _PYDANTIC_STATE >= state.keys() >= {"__dict__", "__pydantic_fields_set__"}:
        raise Fault(RefusedType, "its __getstate__ is not the one of pydantic.BaseModel", type=type_name(cls))
    extra, private = state.get("__pydantic_extra__"), state.get("__pydantic_private__")  # a RootModel has neither
    return {
        **_pack(state["__dict__"], cls.__pydantic_fields__),
        **{f"+{name}": item for name, item in (extra or {}).items()},
        **{f"~{name}": item for name, item in (private or {}).items()},
        "*": [extra is not None, private is not None, *sorted(state["__pydantic_fields_set__"])],
    }


def _pydantic_revive(payload: Any, name: str, registry: Registry) -> Any:
    cls = _class(name, "pydantic", registry)
    has_extra, has_private, *fields_set = payload.pop("*")
    extra = {key[1:]: payload.pop(key) for key in list(payload) if key[:1] == "+"}
    private = {key[1:]: payload.pop(key) for key in list(payload) if key[:1] == "~"}
    defaults: dict[str, Callable[[], Any] | None] = {}
    for field_name, field in cls.__pydantic_fields__.items():
        computed = field.is_required() or getattr(field, "default_factory_takes_validated_data", False)
        defaults[field_name] = None if computed else _factory(field)
    missing = sys.modules["pydantic_core"].PydanticUndefined
    for key, attribute in cls.__private_attributes__.items():
        if key not in private and (default := attribute.get_default()) is not missing:
            private[key] = default
    if not all(type(each) is str for each in fields_set) or type(has_extra) is not bool or type(has_private) is not bool:
        raise damaged("not the parts of a pydantic model")
    value = object.__new__(cls)
    value.__setstate__(
        {
            "__dict__": _unpack(cls, payload, defaults),
            "__pydantic_fields_set__": set(fields_set),
            "__pydantic_extra__": extra if has_extra else None,
            "__pydantic_private__": private if has_private or private else None,
        }
    )
    return value


def _factory(field: Any) -> Callable[[], Any]:
    return lambda: field.get_default(call_default_factory=True)


CLASS_KINDS: tuple[Kind, ...] = (
    Kind(32, "enum", (), _enum_reduce, _enum_revive, named=True),
    Kind(33, "namedtuple", (), _namedtuple_reduce, _namedtuple_revive, dict, named=True),
    Kind(34, "dataclass", (), _dataclass_reduce, _dataclass_revive, dict, named=True),
    Kind(35, "pydantic", (), _pydantic_reduce, _pydantic_revive, dict, named=True),
    Kind(36, "attrs", (), _attrs_reduce, _attrs_revive, dict, named=True),
    Kind(37, "struct", (), _struct_reduce, _struct_revive, dict, named=True),
)

#: The whole type table, by tag.
KINDS: dict[str, Kind] = {kind.tag: kind for kind in (*BUILTIN_KINDS, *CLASS_KINDS, *ARRAY_KINDS, *SDK_KINDS)}

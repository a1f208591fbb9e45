"""Whether a value still fits the class that it is of, by the rules of the library that the class was made with.

Attributes can be set to anything after an instance was made. Pydantic models, structs and attrs classes know what their fields may
hold, and are asked; the standard library's dataclasses do not, and only their class counts.
"""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import msgspec

from safepoint.codec.classes import inside
from safepoint.codec.kinds import key_text, type_name
from safepoint.codec.registry import shape_of

__all__ = ["misfit"]

_SCALARS = frozenset((str, int, float, bool, bytes, type(None)))


def misfit(value: Any, cls: type, path: str) -> tuple[str, str] | None:
    """Where in ``value`` what does not fit, without showing it; None if all fits."""
    if not isinstance(value, cls):
        return path, f"it is of type {type_name(type(value))}, and should be {type_name(cls)}"
    todo: deque[tuple[Any, str]] = deque([(value, path)])
    seen: set[int] = set()
    while todo:
        part, at = todo.popleft()
        if type(part) in _SCALARS or id(part) in seen:
            continue
        seen.add(id(part))
        shape = shape_of(type(part))
        found = _CHECKS[shape](part) if shape in _CHECKS else None
        if found is not None:
            return at + found[0], found[1]
        todo.extend((child, at + step) for child, step in _children(part))
    return None


def _children(value: Any) -> Iterator[tuple[Any, str]]:
    if isinstance(value, Mapping):
        return ((item, f"[{key_text(key)}]") for key, item in list(value.items()))
    if isinstance(value, list | tuple | deque):
        return ((item, f"[{index}]") for index, item in enumerate(list(value)))
    if isinstance(value, set | frozenset):
        return ((item, "{…}") for item in list(value))
    return ((item, f".{name}") for name, item in inside(value).items())


def _pydantic(value: Any) -> tuple[str, str] | None:
    cls = type(value)
    held = vars(value)
    root = "root" in held and hasattr(cls, "__pydantic_root_model__") and cls.__pydantic_root_model__
    # Only fields: a cached_property lies beside them.
    data = held["root"] if root else {name: held[name] for name in cls.__pydantic_fields__ if name in held}
    if not root:
        data.update(value.__pydantic_extra__ or {})
    error = sys.modules["pydantic_core"].ValidationError
    try:
        try:
            cls.__pydantic_validator__.validate_python(data, by_alias=False, by_name=True)
        except TypeError:  # pydantic before 2.11 knows fields by their aliases alone
            if any(field.alias or field.validation_alias for field in cls.__pydantic_fields__.values()):
                return None
            cls.__pydantic_validator__.validate_python(data)
    except error as failed:
        first = failed.errors(include_url=False, include_context=False, include_input=False)[0]
        steps = [f".{part}" if not at and type(part) is str else f"[{key_text(part)}]" for at, part in enumerate(first["loc"])]
        return "".join(steps), f"pydantic says {first['type']}"
    except Exception as failed:
        return "", f"its validation raised {type_name(type(failed))}"
    return None


_SAID = re.compile(r"(Expected `[^`]*`(?:, got `[^`]*`)?|Object missing required field `[^`]*`)")
_AT = re.compile(r" - at `\$?([^`]*)`$")


def _struct(value: Any) -> tuple[str, str] | None:
    cls = type(value)
    held = {name: getattr(value, name) for name in cls.__struct_fields__ if hasattr(value, name)}
    view = SimpleNamespace(**{name: item for name, item in held.items() if item is not msgspec.UNSET})
    try:
        msgspec.convert(view, cls, from_attributes=True)
    except msgspec.ValidationError as failed:
        text = str(failed)
        said, at = _SAID.match(text), _AT.search(text)
        return at[1] if at else "", said[1] if said else "msgspec's validation refuses it"
    except Exception as failed:
        return "", f"its validation raised {type_name(type(failed))}"
    return None


def _attrs(value: Any) -> tuple[str, str] | None:
    if not sys.modules["attr"].get_run_validators():
        return None
    for field in type(value).__attrs_attrs__:
        if field.validator is not None:
            if not hasattr(value, field.name):
                return f".{field.name}", "it is not set"
            try:
                field.validator(value, field, getattr(value, field.name))
            except Exception as failed:
                return f".{field.name}", f"its validator raised {type_name(type(failed))}"
    return None


_CHECKS = {"pydantic": _pydantic, "struct": _struct, "attrs": _attrs}

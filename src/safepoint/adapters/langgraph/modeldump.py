"""Classes of the application in the plain form that the codec stores, made from what LangGraph's serializer kept of an instance.

That is the fields of a dataclass or a named tuple, the value of an enum's member, and the ``model_dump()`` of a pydantic model, in which
models within models are dicts: which class a dict was is told by the annotation of its field. Where more than one would do, or none, the
value is refused. No class is called, and no validator or ``__post_init__`` runs.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from enum import Enum, Flag
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from safepoint.adapters.langgraph.types import OWN, GraphRegistry
from safepoint.codec.kinds import Tagged
from safepoint.codec.registry import shape_of
from safepoint.errors import RefusedType

__all__ = ["Shapes", "defaults_of", "refusal"]


_CONTAINERS = (dict, list, tuple)
_UNTOLD = object()


def refusal(path: str, why: str, remedy: str, *, cls: str = "") -> RefusedType:
    """That a value is not taken: where it stands, why, and what can be done."""
    return RefusedType(f"{path} cannot be imported", why, remedy, path=path, type=cls)


def defaults_of(cls: Any) -> dict[str, Callable[[], Any]]:
    """What fields have where nothing was stored for them, by name: of a dataclass or a named tuple."""
    if dataclasses.is_dataclass(cls):
        found: dict[str, Callable[[], Any]] = {}
        for field in dataclasses.fields(cls):
            if field.default_factory is not dataclasses.MISSING:
                found[field.name] = field.default_factory
            elif field.default is not dataclasses.MISSING:
                found[field.name] = _constant(field.default)
        return found
    return {name: _constant(value) for name, value in getattr(cls, "_field_defaults", {}).items()}


def _constant(value: Any) -> Callable[[], Any]:
    return lambda: value


class Shapes:
    """Plain forms of the classes that a registry knows."""

    def __init__(self, registry: GraphRegistry) -> None:
        self._registry = registry

    def tagged(self, cls: Any, how: str, given: Any, path: str) -> Tagged:
        """An instance of a class of the application, of what was written for it (``how``, as ``jsonplus.Call`` has it).

        Raises:
            RefusedType
        """
        shape = shape_of(cls)
        name = self._name(cls, path)
        if shape == "enum" and how == "single":
            return self._enum(cls, name, given, path)
        if type(given) is dict and all(type(key) is str for key in given):
            if shape in ("dataclass", "namedtuple") and how == "keywords":
                return self._fields(cls, shape, name, given, path)
            if shape == "pydantic" and how in ("pydantic", "keywords"):
                return self._model(cls, name, given, path)
        if shape == "pydantic" and how == "pydantic" and "root" in cls.__pydantic_fields__:
            return self._model(cls, name, {"root": given}, path)
        raise refusal(
            path,
            f"it was stored as something else than {_full(cls)} is now ({shape or 'no class of data'})",
            "Import it with the version of your program that wrote it.",
            cls=_full(cls),
        )

    def own(self, cls: Any, fields: dict[str, Any], path: str) -> Tagged:
        """An instance of one of LangChain's or LangGraph's classes, within an object of the application's."""
        name = OWN.name_of(cls)
        assert name is not None
        shape = shape_of(cls)
        if shape == "pydantic":
            return self._model(cls, name, fields, path)
        return self._fields(cls, "namedtuple" if shape == "namedtuple" else "dataclass", name, fields, path)

    def _name(self, cls: type, path: str) -> str:
        name = OWN.name_of(cls) or self._registry.name_of(cls)
        if name is None:
            raise refusal(
                path,
                f"it is a {_full(cls)}, which is neither declared nor trusted",
                f"If that module is yours, trust it: --trust {cls.__module__}, or import_threads(…, types=[{cls.__name__}]) from Python.",
                cls=_full(cls),
            )
        return name

    # Enums

    def _enum(self, cls: Any, name: str, given: Any, path: str) -> Tagged:
        for member in cls.__members__.values():
            if type(member._value_) is type(given) and member._value_ == given:
                return Tagged("enum", name, member._name_)
        for member in cls.__members__.values():
            if _loosened(member._value_) == _loosened(given) and isinstance(given, bool) == isinstance(member._value_, bool):
                return Tagged("enum", name, member._name_)
        if issubclass(cls, Flag) and type(given) is int:
            known = 0
            for member in cls.__members__.values():
                known |= member._value_
            if given >= 0 and not given & ~known:
                return Tagged("enum", name, given)
        raise refusal(
            path, f"{_full(cls)} has no member of the value that was stored", "Give it back to the enum.", cls=_full(cls)
        )

    # Dataclasses and named tuples

    def _fields(self, cls: Any, shape: str, name: str, given: Mapping[str, Any], path: str) -> Tagged:
        names = list(cls._fields) if shape == "namedtuple" else [field.name for field in dataclasses.fields(cls)]
        self._fit(cls, names, given, defaults_of(cls), path)
        return Tagged(shape, name, {field: given[field] for field in names if field in given})

    def _fit(self, cls: Any, names: Any, given: Any, optional: Any, path: str) -> None:
        for key in given:
            if key not in names:
                raise refusal(path, f"{_full(cls)} has no field {key[:60]!r} any more", _MIGRATE, cls=_full(cls))
        for field in names:
            if field not in given and field not in optional:
                raise refusal(
                    path, f"{_full(cls)}.{field} is not in what was stored, and has no default", _MIGRATE, cls=_full(cls)
                )

    # Pydantic models

    def _model(self, cls: Any, name: str, dump: Mapping[str, Any], path: str) -> Tagged:
        fields = cls.__pydantic_fields__
        aliases = {alias: n for n, f in fields.items() for alias in (f.serialization_alias, f.alias) if alias}
        decorators = cls.__pydantic_decorators__
        own = OWN.name_of(cls) is not None
        if not own and decorators.model_serializers:
            raise refusal(path, f"{_full(cls)} has a serializer of its own", _BY_HAND, cls=_full(cls))
        changed = set()
        if not own:  # LangChain's serializers give what the constructor takes
            changed = {f for each in decorators.field_serializers.values() for f in each.info.fields}
        held: dict[str, Any] = {}
        extra: dict[str, Any] = {}
        for key, value in dump.items():
            field = key if key in fields else aliases.get(key)
            if field is None:
                if key in decorators.computed_fields:
                    continue
                extra[key] = value
                continue
            if not own and (
                field in changed or "*" in changed or any("Serializer" in type(m).__name__ for m in fields[field].metadata)
            ):
                raise refusal(f"{path}.{field}", f"{_full(cls)} has a serializer of its own for it", _BY_HAND, cls=_full(cls))
            annotation = Any if own else fields[field].annotation
            held[field] = self._typed(annotation, value, f"{path}.{field}", bool(cls.model_config.get("use_enum_values")))
        allows = cls.model_config.get("extra") == "allow"
        if extra and not allows:
            self._fit(cls, fields, extra, fields, path)
        optional = {n for n, f in fields.items() if not f.is_required()}
        self._fit(cls, fields, held, optional, path)
        payload: dict[str, Any] = {field: held[field] for field in fields if field in held}
        payload |= {f"+{key}": value for key, value in extra.items()}
        payload["*"] = [allows, bool(cls.__private_attributes__), *sorted(held.keys() | extra.keys())]
        return Tagged("pydantic", name, payload)

    def _typed(self, annotation: Any, value: Any, path: str, enum_values: bool = False) -> Any:
        """A value of a dump, as what its field is annotated with."""
        while True:
            if get_origin(annotation) is Annotated:
                annotation = get_args(annotation)[0]
            elif hasattr(annotation, "__value__") and not isinstance(annotation, type):
                annotation = annotation.__value__
            else:
                break
        if isinstance(annotation, type) and issubclass(annotation, Enum) and get_origin(annotation) is None:
            if isinstance(value, Tagged) or enum_values:
                return value
            return self._enum(annotation, self._name(annotation, path), value, path)
        if type(value) not in _CONTAINERS:
            return self._root(annotation, value, path)
        origin, args = get_origin(annotation), get_args(annotation)
        if annotation is Any or annotation is object or annotation is type(None):
            return value
        if origin is Union or origin is types.UnionType:
            return self._one_of(args, value, path, enum_values)
        if origin is not None and not isinstance(origin, type):
            return value if origin is Literal else self._untold(annotation, path)
        if isinstance(annotation, typing.TypeVar):
            bound = annotation.__bound__
            return value if bound is None and not annotation.__constraints__ else self._typed(bound or Any, value, path)
        cls = origin or annotation
        if not isinstance(cls, type):
            return self._untold(annotation, path)
        if typing.is_typeddict(cls):
            hints = typing.get_type_hints(cls)
            return (
                {k: self._typed(_bare_hint(hints.get(k, Any)), v, f"{path}[{k!r}]") for k, v in value.items()}
                if type(value) is dict
                else value
            )
        shape = shape_of(cls)
        if shape == "pydantic":
            whole = value if "root" not in cls.__pydantic_fields__ else {"root": value}  # type: ignore[attr-defined]
            if type(whole) is dict:
                return self._model(cls, self._name(cls, path), whole, path)
        elif shape == "dataclass" and type(value) is dict:
            hints = typing.get_type_hints(cls)
            typed = {k: self._typed(hints.get(k, Any), v, f"{path}.{k}") for k, v in value.items()}
            return self._fields(cls, shape, self._name(cls, path), typed, path)
        elif shape == "namedtuple" and type(value) in (list, tuple) and len(value) == len(cls._fields):  # type: ignore[attr-defined]
            hints = typing.get_type_hints(cls)
            pairs = zip(cls._fields, value, strict=True)  # type: ignore[attr-defined]
            typed = {k: self._typed(hints.get(k, Any), v, f"{path}.{k}") for k, v in pairs}
            return self._fields(cls, shape, self._name(cls, path), typed, path)
        elif shape is None:
            return self._container(cls, args, value, path)
        return self._untold(annotation, path)

    def _root(self, annotation: Any, value: Any, path: str) -> Any:
        """A scalar, or a value that was stored by its class: only a model with nothing but a root is annotated with something else."""
        is_model = isinstance(annotation, type) and shape_of(annotation) == "pydantic" and not isinstance(value, Tagged)
        if is_model and "root" in annotation.__pydantic_fields__:
            return self._model(annotation, self._name(annotation, path), {"root": value}, path)
        return value

    def _container(self, cls: type, args: tuple[Any, ...], value: Any, path: str) -> Any:
        if type(value) is dict:
            item = args[1] if len(args) == 2 else Any
            return {k: self._typed(item, v, f"{path}[{k!r}]" if type(k) is str else path) for k, v in value.items()}
        if issubclass(cls, tuple):
            each = list(args)
            if len(each) == 2 and each[1] is Ellipsis:
                each = [each[0]] * len(value)
            if len(each) != len(value):
                each = [Any] * len(value)
            return tuple(self._typed(t, v, f"{path}[{i}]") for i, (t, v) in enumerate(zip(each, value, strict=True)))
        item = args[0] if len(args) == 1 else Any
        return [self._typed(item, v, f"{path}[{i}]") for i, v in enumerate(value)]

    def _one_of(self, choices: tuple[Any, ...], value: Any, path: str, enum_values: bool) -> Any:
        fitting = []
        refused: RefusedType | None = None
        for choice in choices:
            if not _could_be(choice, value):
                continue
            try:
                made = self._typed(choice, value, path, enum_values)
            except RefusedType as error:
                refused = error
            else:
                if made not in fitting:
                    fitting.append(made)
        if len(fitting) == 1:
            return fitting[0]
        if not fitting:
            raise refused or self._untold(Union[choices], path)  # noqa: UP007 (no operator joins a list)
        return self._untold(Union[choices], path)  # noqa: UP007

    def _untold(self, annotation: Any, path: str) -> Any:
        raise refusal(path, f"its class is not told by the annotation {str(annotation)[:80]}", _BY_HAND)


_MIGRATE = "Import it with the version of your program that wrote it."
_BY_HAND = "Load it with the program that wrote it, and store it there in another form."


def _could_be(annotation: Any, value: Any) -> bool:
    """Whether a container may be of this annotation, by its outermost form and by the literals that tell models apart."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    cls = get_origin(annotation) or annotation
    if cls is Any or cls is object:
        return True
    if cls is Union or cls is types.UnionType:
        return any(_could_be(each, value) for each in get_args(annotation))
    if not isinstance(cls, type):
        return False
    shape = shape_of(cls)
    if shape == "pydantic":
        fields = cls.__pydantic_fields__  # type: ignore[attr-defined]
        if "root" in fields:
            return _could_be(fields["root"].annotation, value)
        if type(value) is not dict:
            return False
        for name, field in fields.items():
            if get_origin(field.annotation) is Literal and value.get(name, _UNTOLD) not in get_args(field.annotation):
                return False
        return True
    if shape == "dataclass" or typing.is_typeddict(cls):
        return type(value) is dict
    if shape == "namedtuple":
        return type(value) in (list, tuple)
    if issubclass(cls, str | bytes | int | float):
        return False
    return issubclass(cls, Mapping) == (type(value) is dict)


def _bare_hint(hint: Any) -> Any:
    while get_origin(hint) in (typing.Required, typing.NotRequired, getattr(typing, "ReadOnly", None)):
        hint = get_args(hint)[0]
    return hint


def _loosened(value: Any) -> Any:
    """As it is after it was stored, where a tuple is a list."""
    if type(value) in (list, tuple):
        return [_loosened(item) for item in value]
    if type(value) is dict:
        return {key: _loosened(item) for key, item in value.items()}
    return value


def _full(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"

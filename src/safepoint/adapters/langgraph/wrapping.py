"""LangChain's and LangGraph's own objects as plain dicts and back, where they stand as a channel's value or as an item of it.

An object becomes ``{"@class": name, …}``, so that a checkpoint can be read where neither package is installed, and so that an
unchanged list of messages is recognised by its marshal bytes (see ``codec.nodes``). What stands in such a place becomes:

=============================  =======================================================================================
value                          plain form
=============================  =======================================================================================
a LangChain message            ``{"@class": "HumanMessage", "fields": its __dict__ itself, "set": [names of the fields set]}``,
                               with ``"extra"`` and ``"private"`` where pydantic keeps such. Nothing in them is looked at, unless
                               the type table would refuse it: then they are in this form again, which ``"deep"`` says
``Send``, ``Interrupt`` …      ``{"@class": "Send", "fields": {"node": …, "arg": …}}``, the fields in this form again
what ``message.text`` gives     ``{"@class": "TextAccessor", "value": the text}``
a dict with the key "@class"   ``{"@class": "dict", "value": the dict}``, its values in this form again
a container with any of these  ``{"@class": "mixed", "value": the container}``, with these in their plain forms; of a top-level
in it                          list this is said of each item, not of the list
anything else                  itself: the codec's type table and registry decide
=============================  =======================================================================================

Anywhere else the registry stores objects in its own way. Nothing that was stored is called at load: an object is made
past its constructor and its parts are set, and a name is looked up in the tables here and nowhere else.
"""

from __future__ import annotations

import marshal
from typing import Any, Final, NamedTuple, cast

import msgspec
from langchain_core import documents, messages
from langchain_core.messages.base import TextAccessor
from langgraph.checkpoint.serde.types import _DeltaSnapshot
from langgraph.store import base as store
from langgraph.types import Command, Interrupt, Overwrite, PregelTask, Send, StateSnapshot, TimeoutPolicy
from pydantic import BaseModel

from safepoint.codec import MAX_DEPTH, Registry, prepare
from safepoint.codec.chunkread import nested
from safepoint.errors import Damaged, RefusedType

__all__ = ["CLASS", "MODELS", "SHAPED", "read_messages", "unwrapped", "unwrapped_value", "wrapped", "wrapped_value"]

CLASS: Final = "@class"
"""The key that tells a plain form from a dict of the application's; one with that key is stored as ``{"@class": "dict"}``."""

_TEXT: Final = "TextAccessor"
_MARK: Final = CLASS.encode()
_ATOMS: Final = frozenset((str, int, float, bool, type(None), bytes))
_MOST_SETS: Final = 512


class _Model(NamedTuple):
    """A pydantic model of LangChain's."""

    cls: type
    name: str
    fields: frozenset[str]


class _Shape(NamedTuple):
    """A class of LangGraph's with a fixed list of fields."""

    cls: type
    name: str
    fields: tuple[str, ...]
    is_tuple: bool


MODELS: Final[dict[type, _Model]] = {
    cls: _Model(cls, cls.__name__, frozenset(cls.__pydantic_fields__))
    for cls in (
        messages.HumanMessage,
        messages.HumanMessageChunk,
        messages.AIMessage,
        messages.AIMessageChunk,
        messages.ToolMessage,
        messages.ToolMessageChunk,
        messages.SystemMessage,
        messages.SystemMessageChunk,
        messages.ChatMessage,
        messages.ChatMessageChunk,
        messages.FunctionMessage,
        messages.FunctionMessageChunk,
        messages.RemoveMessage,
        messages.BaseMessage,
        messages.BaseMessageChunk,
        documents.Document,
    )
}
"""Stored by their ``__dict__``. The names are those of the classes alone, and for ever."""

SHAPED: Final[dict[type, _Shape]] = {
    cls: _Shape(cls, cls.__name__, fields, issubclass(cls, tuple))
    for cls, fields in (
        (Send, ("node", "arg", "timeout")),
        (Interrupt, ("value", "id", "response_schema")),
        (Command, ("graph", "update", "resume", "goto")),
        (Overwrite, ("value", "type")),
        (TimeoutPolicy, ("run_timeout", "idle_timeout", "refresh_on")),
        (StateSnapshot, StateSnapshot._fields),
        (PregelTask, PregelTask._fields),
        (store.Item, store.Item.__slots__),
        (store.GetOp, store.GetOp._fields),
        (_DeltaSnapshot, _DeltaSnapshot._fields),
    )
}
_MODEL_PARTS: Final = frozenset({CLASS, "fields", "set", "extra", "private", "deep"})
_MODEL_NAMES: Final = {info.name: info for info in MODELS.values()}
_QUICK: Final = {info.name: info for info in MODELS.values() if cast(Any, info.cls).model_config.get("extra") == "allow"}
_SHAPE_NAMES: Final = {info.name: info for info in SHAPED.values()}

# Past __setattr__, and quicker than object.__setattr__. Pydantic has these four as slots of every model.
_get_set = BaseModel.__dict__["__pydantic_fields_set__"].__get__
_get_extra = BaseModel.__dict__["__pydantic_extra__"].__get__
_get_private = BaseModel.__dict__["__pydantic_private__"].__get__
_put_dict = BaseModel.__dict__["__dict__"].__set__
_put_set = BaseModel.__dict__["__pydantic_fields_set__"].__set__
_put_extra = BaseModel.__dict__["__pydantic_extra__"].__set__
_put_private = BaseModel.__dict__["__pydantic_private__"].__set__
_new = object.__new__

_sets: dict[frozenset[str], list[str]] = {}
"""Field sets as sorted lists. One list for all messages with the same: nobody changes them, and marshal writes them once."""


def _listed(fields_set: set[str]) -> list[str]:
    key = frozenset(fields_set)
    found = _sets.get(key)
    if found is None:
        found = sorted(key)
        if len(_sets) < _MOST_SETS:
            found = _sets.setdefault(key, found)
    return found


# Saving --------------------------------------------------------------------------------------------------------------


def wrapped_value(value: Any, registry: Registry, *, careful: bool) -> Any:
    """The plain form of a channel's value: of a list, of each item. ``value`` itself where nothing is to be done.

    ``careful``: look into each message for what the type table would refuse. To be asked for after a refusal; what comes out is
    the same where there is nothing.
    """
    if type(value) is not list:
        return wrapped(value, registry)
    if _is_plain(value):
        return value
    models = MODELS
    out: list[Any] = []
    add = out.append
    for item in value:
        info = models.get(type(item))
        # The hot loop of every put. The common message has no private attributes and no extra ones.
        if info is None:
            add(wrapped(item, registry))
        elif careful or _get_extra(item) or _get_private(item) is not None:
            add(_model(item, info, registry))
        else:
            add({CLASS: info.name, "fields": item.__dict__, "set": _listed(_get_set(item))})
    return out


def wrapped(value: Any, registry: Registry) -> Any:
    """The plain form of one value that stands for itself."""
    cls = type(value)
    if cls in _ATOMS:
        return value
    info = MODELS.get(cls)
    if info is not None:
        return _model(value, info, registry)
    if _is_plain(value):
        return value
    made = _deep(value, MAX_DEPTH, set(), registry)
    if made is value or (cls is not dict and cls is not list and cls is not tuple) or (cls is dict and CLASS in value):
        return made
    return {CLASS: "mixed", "value": made}


def _is_plain(value: Any) -> bool:
    """Whether there is certainly nothing to do. At memcpy speed: marshal takes no instance of any class but builtins."""
    try:
        return _MARK not in marshal.dumps(value)
    except Exception:  # whatever marshal has against it
        return False


def _model(
    value: Any, info: _Model, registry: Registry, room: int = MAX_DEPTH, above: set[int] | None = None
) -> dict[str, Any]:
    made = {CLASS: info.name, "fields": value.__dict__, "set": _listed(_get_set(value))}
    extra, private = _get_extra(value), _get_private(value)
    if extra:
        made["extra"] = extra
    if private is not None:
        made["private"] = private
    try:
        marshal.dumps(made)
    except Exception:  # as in `_is_plain`
        try:
            prepare(made, registry)
        except RefusedType:
            above = set() if above is None else above
            if room > 0 and id(value) not in above:
                above.add(id(value))
                for part in ("fields", "extra", "private"):
                    if part in made:
                        made[part] = {key: _deep(each, room - 1, above, registry) for key, each in made[part].items()}
                above.discard(id(value))
                made["deep"] = True
    return made


def _deep(value: Any, room: int, above: set[int], registry: Registry) -> Any:
    """Every object below in its plain form; the same container if there is none. ``above``: the containers around it."""
    cls = type(value)
    if cls in _ATOMS:
        return value
    model = MODELS.get(cls)
    if model is not None:
        return _model(value, model, registry, room, above)
    shape = SHAPED.get(cls)
    if shape is None and cls is not dict and cls is not list and cls is not tuple:
        if cls is TextAccessor:
            return {CLASS: _TEXT, "value": str.__str__(value)}
        return value
    if room == 0 or id(value) in above:
        return value  # The codec will refuse it, and say where it is.
    above.add(id(value))
    try:
        if shape is not None:
            parts = zip(shape.fields, value, strict=True) if shape.is_tuple else [(f, getattr(value, f)) for f in shape.fields]
            return {CLASS: shape.name, "fields": {name: _deep(part, room - 1, above, registry) for name, part in parts}}
        if cls is dict:
            made = {key: _deep(part, room - 1, above, registry) for key, part in value.items()}
            if CLASS in made:
                return {CLASS: "dict", "value": made}
            return made if any(made[key] is not part for key, part in value.items()) else value
        items = [_deep(part, room - 1, above, registry) for part in value]
        if all(a is b for a, b in zip(items, value, strict=True)):
            return value
        return tuple(items) if cls is tuple else items
    finally:
        above.discard(id(value))


# Loading -------------------------------------------------------------------------------------------------------------


def unwrapped_value(value: Any, path: str) -> Any:
    """What ``wrapped_value`` was given; lists are changed in place.

    Raises:
        RefusedType: it names a class that is not in the tables.
        Damaged: it is none of the plain forms.
    """
    if type(value) is not list:
        return unwrapped(value, path)
    for i, item in enumerate(value):
        if type(item) is dict and CLASS in item:
            value[i] = _revive(item, f"{path}[{i}]")
    return value


# A message that has nothing but its fields, as msgspec reads it; what it holds is checked on the way.
_PARTS: Final[list[Any]] = [("name", str, msgspec.field(name=CLASS)), ("fields", dict[str, nested(7)]), ("set", set[str])]  # type: ignore[misc]
_STORED: Final = msgspec.msgpack.Decoder(
    list[msgspec.defstruct("Stored", _PARTS, forbid_unknown_fields=True, gc=False)]  # type: ignore[misc]
)


def read_messages(items: bytes) -> list[Any]:
    """The hot loop of every load: items of a list that are all LangChain messages, straight from their encoding.

    Raises:
        msgspec.MsgspecError: one of them is something else, or is to be looked at closely.
    """
    made: list[Any] = []
    add = made.append
    for stored in _STORED.decode(items):
        info = _QUICK.get(stored.name)
        if info is None or stored.fields.keys() != info.fields:
            raise msgspec.ValidationError("not the fields of a message")
        message: Any = _new(info.cls)
        _put_dict(message, stored.fields)
        _put_set(message, stored.set)
        _put_extra(message, {})
        _put_private(message, None)
        add(message)
    return made


def unwrapped(value: Any, path: str) -> Any:
    """What ``wrapped`` was given."""
    return _revive(value, path) if type(value) is dict and CLASS in value else value


def _revive(plain: dict[str, Any], path: str) -> Any:
    try:
        return _made(plain, path)
    except (TypeError, ValueError, AttributeError, KeyError, RecursionError):
        raise _damaged(path) from None


def _made(plain: dict[str, Any], path: str) -> Any:
    name = plain[CLASS]
    if type(name) is not str:
        raise _damaged(path)
    model = _MODEL_NAMES.get(name)
    if model is not None:
        return _revived_model(plain, model, path)
    shape = _SHAPE_NAMES.get(name)
    if shape is not None:
        fields = plain["fields"]
        if len(plain) != 2 or type(fields) is not dict or fields.keys() != set(shape.fields):
            raise _damaged(path)
        return _revived_shape(shape, [_under(fields[each], path) for each in shape.fields], path)
    if name not in ("dict", "mixed", _TEXT):
        raise RefusedType(
            f"{path} cannot be loaded",
            "it names a class that is none of LangChain's or LangGraph's that are stored like this",
            "Look at it with safepoint show; a newer safepoint may know it",
            path=path,
            type=name[:200],
        )
    value = plain["value"]
    if len(plain) != 2 or (name == "dict" and (type(value) is not dict or CLASS not in value)):
        raise _damaged(path)
    if name == _TEXT:
        if type(value) is not str:
            raise _damaged(path)
        return str.__new__(TextAccessor, value)
    return _inside(value, path)


def _under(value: Any, path: str) -> Any:
    return _made(value, path) if type(value) is dict and CLASS in value else _inside(value, path)


def _inside(value: Any, path: str) -> Any:
    """The values of a container revived, in place where that can be."""
    cls = type(value)
    if cls is dict:
        for key, part in value.items():
            value[key] = _under(part, path)
    elif cls is list:
        value[:] = [_under(part, path) for part in value]
    elif cls is tuple:
        items = [_under(part, path) for part in value]
        return value if all(a is b for a, b in zip(items, value, strict=True)) else tuple(items)
    return value


def _revived_model(plain: dict[str, Any], info: _Model, path: str) -> Any:
    fields, names, extra, private = plain["fields"], plain["set"], plain.get("extra"), plain.get("private")
    if not plain.keys() <= _MODEL_PARTS or type(fields) is not dict or type(names) is not list:
        raise _damaged(path)
    if (
        type(extra) not in (dict, type(None))
        or type(private) not in (dict, type(None))
        or not all(type(n) is str for n in names)
    ):
        raise _damaged(path)
    if "deep" in plain:
        for part in (fields, extra, private):
            if part:
                _inside(part, path)
    cls = cast(Any, info.cls)
    for name in info.fields - fields.keys():  # a field that this version of LangChain has added
        field = cls.__pydantic_fields__[name]
        if field.is_required():
            raise Damaged(f"{path} cannot be loaded", f"a {info.name} without its field {name!r}", "", path=path)
        fields[name] = field.get_default(call_default_factory=True)
    made: Any = _new(info.cls)
    _put_dict(made, fields)
    _put_set(made, set(names))
    _put_extra(made, extra if extra is not None else {} if cls.model_config.get("extra") == "allow" else None)
    _put_private(made, private)
    return made


def _revived_shape(shape: _Shape, parts: list[Any], path: str) -> Any:
    if shape.is_tuple:
        return tuple.__new__(cast(type[tuple[Any, ...]], shape.cls), parts)
    made: Any = _new(shape.cls)
    for name, part in zip(shape.fields, parts, strict=True):
        object.__setattr__(made, name, part)
    return made


def _damaged(path: str) -> Damaged:
    return Damaged(
        f"{path} cannot be loaded", "it is no whole object of LangChain or LangGraph", "Load an earlier checkpoint.", path=path
    )

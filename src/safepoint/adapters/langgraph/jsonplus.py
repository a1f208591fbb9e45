"""What LangGraph's serializer (JsonPlus) has written, as what our codec stores; nothing that the bytes name is called.

JsonPlus writes most objects as instructions: import this module, take that name, call it with these arguments. Here they are cut out of
the MessagePack as they stand (``Raw``), and each is looked at as data:

- values of the standard library and of numpy, by a fixed list, are made by functions of ours;
- LangChain's and LangGraph's own objects are made past their constructors, by ``wrapping``;
- a class of the application becomes the plain form that the codec has for it (``Tagged``), once the registry knows the class: it is
  looked up to see of which kind it is and which fields it has, and no instance is made;
- everything else is refused.
"""

from __future__ import annotations

import ipaddress
import json
import math
import pathlib
import re
import sys
import uuid
from collections import deque
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any, Final, NamedTuple, Protocol
from zoneinfo import ZoneInfo

import ormsgpack
from langgraph.checkpoint.serde.types import _DeltaSnapshot

from safepoint.adapters.langgraph import modeldump
from safepoint.adapters.langgraph.modeldump import refusal
from safepoint.adapters.langgraph.types import OWN, GraphRegistry
from safepoint.adapters.langgraph.wrapping import MODELS, SHAPED, unwrapped
from safepoint.codec import MAX_DEPTH
from safepoint.codec.kinds import Tagged
from safepoint.codec.registry import GLOBAL
from safepoint.errors import Damaged

__all__ = ["Cipher", "Reader", "refusal"]

_SINGLE, _POSITIONAL, _KEYWORDS, _METHOD, _PYDANTIC_1, _PYDANTIC_2, _ARRAY, _DELTA = range(8)
_OPTION: Final = ormsgpack.OPT_NON_STR_KEYS
_PLAIN: Final = frozenset((str, int, float, bool, type(None), bytes))
_KEPT: Final = 20_000
_KEPT_BYTES: Final = 16 << 20
_MODULES: Final = {(cls.__module__, cls.__name__): cls for cls in MODELS}
_SHAPES: Final = {(cls.__module__, cls.__name__): cls for cls in SHAPED}
for _name in ("Send", "Interrupt"):  # where LangGraph's earlier versions had them
    _SHAPES["langgraph.constants", _name] = _SHAPES["langgraph.types", _name]
_LANGCHAIN: Final = {cls.__name__: cls for cls in MODELS}


class Cipher(Protocol):
    """As LangGraph's ``CipherProtocol``."""

    def decrypt(self, ciphername: str, ciphertext: bytes, /) -> bytes: ...


class Raw(NamedTuple):
    """An extension of MessagePack as it was written."""

    code: int
    data: bytes


class Call(NamedTuple):
    """An instruction to make an object, as it was written."""

    module: str
    name: str
    how: str
    """``single``, ``positional``, ``keywords``, ``method`` or ``pydantic``."""
    given: Any
    method: str = ""

    @property
    def cls(self) -> str:
        return f"{self.module}.{self.name}"


_HOW: Final = {
    _SINGLE: "single",
    _POSITIONAL: "positional",
    _KEYWORDS: "keywords",
    _METHOD: "method",
    _PYDANTIC_1: "pydantic",
    _PYDANTIC_2: "pydantic",
}


class Reader:
    """Reads typed values. Not for several threads at once.

    Args:
        types, trust: As for ``SafepointSaver``.
        cipher: Decrypts rows that LangGraph's ``EncryptedSerializer`` has written.
    """

    def __init__(self, types: tuple[type, ...] = (), trust: tuple[str, ...] = (), cipher: Cipher | None = None) -> None:
        self._registry = GraphRegistry(types, trust)
        self._types = types
        self._cipher = cipher
        self._shapes = modeldump.Shapes(self._registry)
        self.notes: set[str] = set()
        # Messages stand in every checkpoint anew. Of what was made of them nothing is ever changed.
        self._young: dict[Raw, Any] = {}
        self._old: dict[Raw, Any] = {}
        self._bytes = 0

    # Rows

    def typed(self, tag: str | None, data: bytes | None, path: str) -> Any:
        """The value of a row of this type.

        Raises:
            RefusedType: it holds what may not be taken; names the path. Damaged: it is no such value.
        """
        raw, old = self._opened(tag, data, path)
        return self._value(raw, path, MAX_DEPTH, False, old)

    def checkpoint(self, tag: str | None, data: bytes | None) -> dict[str, Any]:
        """As ``typed``, of a whole checkpoint: paths begin with the channel."""
        raw, old = self._opened(tag, data, "the checkpoint")
        channels = raw.get("channel_values") if type(raw) is dict else None
        if type(raw) is not dict or type(channels) is not dict:
            raise _broken("the checkpoint", "none of LangGraph's")
        made = {
            key: self._value(value, str(key), MAX_DEPTH, False, old) for key, value in raw.items() if key != "channel_values"
        }
        made["channel_values"] = {
            name: self._value(value, f"channel {_shown(name)}", MAX_DEPTH, False, old) for name, value in channels.items()
        }
        return made

    def _opened(self, tag: str | None, data: bytes | None, path: str) -> tuple[Any, bool]:
        """A row's value as it was written, and whether that is JSON."""
        data = data or b""
        if tag is not None and "+" in tag:
            tag, _, cipher = tag.partition("+")
            if self._cipher is None:
                raise refusal(
                    path,
                    f"it is encrypted ({cipher[:40]})",
                    "Import it from Python, with import_threads(…, cipher=) and the cipher that wrote it.",
                )
            try:
                data = self._cipher.decrypt(cipher, data)
            except Exception as error:
                raise refusal(path, f"it cannot be decrypted ({type(error).__name__})", "Check the key.") from None
        match tag:
            case "null":
                return None, False
            case "bytes":
                return bytes(data), False
            case "bytearray":
                return bytearray(data), False
            case "msgpack":
                return self._unpacked(data, path), False
            case "json":
                try:
                    return json.loads(data), True
                except (ValueError, RecursionError):
                    raise _broken(path, "no JSON") from None
            case "pickle":
                raise refusal(
                    path,
                    "it is a pickle, and loading one runs whatever it says",
                    "Load it with the program that wrote it, and save it there without pickle_fallback.",
                    cls="pickle",
                )
        raise refusal(path, f"its type {str(tag)[:40]!r} is not known", "Update safepoint.")

    def _unpacked(self, data: bytes, path: str) -> Any:
        try:
            return ormsgpack.unpackb(data, ext_hook=Raw, option=_OPTION)
        except (ValueError, RecursionError):
            raise _broken(path, "no MessagePack") from None

    # Values. ``inside``: within what the codec takes apart by itself, where ``wrapping`` does not look.

    def _value(self, raw: Any, path: str, room: int, inside: bool, old: bool) -> Any:
        cls = type(raw)
        if cls in _PLAIN:
            return raw
        if room <= 0:
            raise refusal(path, f"more than {MAX_DEPTH} containers are nested in one another", "Store a flatter structure.")
        if cls is Raw:
            return self._ext(raw, path, room - 1, inside)
        if cls is dict:
            if old and raw.get("type") == "constructor" and raw.get("lc") in (1, 2) and isinstance(raw.get("id"), list):
                return self._call(_json_call(raw, path), path, room - 1, inside, old)
            if old and raw.get("lc") == 1 and raw.get("type") in ("not_implemented", "secret"):
                raise refusal(path, "LangChain could not write it", "Nothing can be done: only its name was stored.")
            made: dict[Any, Any] = {}
            for key, item in raw.items():
                if type(key) is not str:
                    key = self._key(key, path, room - 1, inside)
                plain = type(item) in _PLAIN
                made[key] = item if plain else self._value(item, f"{path}[{_shown(key)}]", room - 1, inside, old)
            return made
        if cls is list or cls is tuple:
            items = [
                item if type(item) in _PLAIN else self._value(item, f"{path}[{i}]", room - 1, inside, old)
                for i, item in enumerate(raw)
            ]
            return items if cls is list else tuple(items)
        return raw

    def _key(self, raw: Any, path: str, room: int, inside: bool) -> Any:
        found = self._value(raw, path, room, inside, False)
        try:
            hash(found)
        except TypeError:
            raise refusal(path, "it has a key that is none here", "Use text or numbers as keys.") from None
        return found

    def _ext(self, raw: Raw, path: str, room: int, inside: bool) -> Any:
        if not inside and raw.code == _PYDANTIC_2:
            known = self._young.get(raw)
            if known is None and (known := self._old.get(raw)) is not None:
                self._keep(raw, known)
            if known is not None:
                return known
        if raw.code == _DELTA:
            return self._of_ours(_DeltaSnapshot, {"value": self._raw(raw, path)}, path, room, inside, False)
        if raw.code == _ARRAY:
            return _array(self._raw(raw, path), path)
        parts = self._raw(raw, path)
        how = _HOW.get(raw.code)
        if how is None:
            raise refusal(path, f"it has the extension code {raw.code}, which LangGraph does not write", "Update safepoint.")
        if type(parts) is not list or len(parts) < 3 or type(parts[0]) is not str or type(parts[1]) is not str:
            raise _broken(path, "no whole object")
        method = parts[3] if how == "method" and len(parts) > 3 and type(parts[3]) is str else ""
        call = Call(parts[0], parts[1], how, parts[2], method)
        made = self._call(call, path, room, inside, False)
        if not inside and raw.code == _PYDANTIC_2 and type(made) in MODELS:
            self._keep(raw, made)
        return made

    def _raw(self, raw: Raw, path: str) -> Any:
        return self._unpacked(raw.data, path)

    def _keep(self, raw: Raw, made: Any) -> None:
        self._young[raw] = made
        self._bytes += len(raw.data)
        if len(self._young) > _KEPT or self._bytes > _KEPT_BYTES:
            self._old, self._young, self._bytes = self._young, {}, 0

    # Objects

    def _call(self, call: Call, path: str, room: int, inside: bool, old: bool) -> Any:
        where = call.module, call.name
        if (model := _MODULES.get(where)) is not None:
            return self._of_ours(model, call.given, path, room, inside, old)
        if (shape := _SHAPES.get(where)) is not None:
            return self._of_ours(shape, _fields_of(shape, call, path), path, room, inside, old)
        if where == ("typing", "Any") or not call.name:
            raise _broken(path, "no whole object")
        make = _STANDARD.get((*where, call.how if call.how != "method" else call.method))
        if make is not None:
            given = self._value(call.given, path, room, inside or where in _HOLDERS, old)
            try:
                return make(given)
            except (TypeError, ValueError, ArithmeticError, KeyError, IndexError, OSError, re.error):
                raise _broken(path, f"no {call.name}") from None
        if call.how == "method":
            raise refusal(
                path,
                f"to make it, {call.cls}.{call.method}(…) would have to be called",
                "Nothing that is stored is called. Store what it stands for.",
                cls=call.cls,
            )
        cls = self._known(call, path)
        given = self._value(call.given, path, room, True, old)
        if hasattr(cls, "__post_init__") and call.how == "keywords":
            self.notes.add(f"{call.cls} has a __post_init__, which did not run")
        return self._shapes.tagged(cls, call.how, given, path)

    def _of_ours(self, cls: type, given: Any, path: str, room: int, inside: bool, old: bool) -> Any:
        """An object of LangChain's or LangGraph's."""
        if type(given) is not dict or not all(type(key) is str for key in given):
            raise _broken(path, f"no {cls.__name__}")
        fields = {key: self._value(item, f"{path}.{key}", room, inside, old) for key, item in given.items()}
        if inside:
            if OWN.name_of(cls) is None:
                raise refusal(path, f"a {cls.__name__} cannot be stored in this place", "Put it into a list.", cls=cls.__name__)
            return self._shapes.own(cls, fields, path)
        if cls in SHAPED:
            return _shaped(cls, fields, path)
        info = MODELS[cls]
        plain: dict[str, Any] = {"@class": info.name, "fields": {}, "set": []}
        # In the order of the class, as its constructor has them.
        for name, field in cls.__pydantic_fields__.items():  # type: ignore[attr-defined]
            if name in fields:
                plain["fields"][name] = fields.pop(name)
                plain["set"].append(name)
            elif field.is_required():
                raise _broken(path, f"no whole {cls.__name__}")
            else:
                plain["fields"][name] = field.get_default(call_default_factory=True)
        if cls.model_config.get("extra") == "allow":  # type: ignore[attr-defined]
            plain["extra"] = fields
            plain["set"] += fields
        return unwrapped(plain, path)

    def _known(self, call: Call, path: str) -> type:
        """The class that a name stands for, if it may be stored. It is stored by its bare name, so a nested one is looked for."""
        found = self._looked_up(call.module, call.name)
        if found is None:
            python = f"import_threads(…, types=[{call.name}])"
            raise refusal(
                path,
                f"it is a {call.cls}, which is neither declared nor trusted",
                f"If that module is yours, trust it: --trust {call.module}, or {python} from Python."
                if call.module != "__main__"
                else f"Import it in the program that defines the class: {python}.",
                cls=call.cls,
            )
        return found

    def _looked_up(self, module: str, name: str) -> type | None:
        if not re.fullmatch(r"[\w.]+", module) or not name.isidentifier():
            return None
        for cls in (*self._types, *GLOBAL._names):
            if cls.__module__ == module and cls.__name__ == name:
                return cls
        found = self._registry.class_of(f"{module}:{name}")
        if found is None and self._registry.trusts(module) and module in sys.modules:
            nested = [cls for cls in _nested(sys.modules[module]) if cls.__name__ == name]
            if len(nested) == 1 and self._registry.name_of(nested[0]) is not None:
                found = nested[0]
        return found


# The standard library. Each takes the argument as it was written.


def _strict(cls: type) -> Callable[[Any], Any]:
    def make(text: Any) -> Any:
        if type(text) is not str:
            raise TypeError
        return cls(text)

    return make


def _path(cls: type[pathlib.PurePath]) -> Callable[[Any], Any]:
    def make(parts: Any) -> Any:
        if not all(type(part) is str for part in parts):
            raise TypeError
        return cls(*parts)

    return make


def _pattern(given: Any) -> re.Pattern[Any]:
    pattern, flags = given
    if type(pattern) not in (str, bytes) or type(flags) is not int or flags & re.DEBUG:
        raise TypeError
    return re.compile(pattern, flags)


def _members(kind: type[set[Any]] | type[frozenset[Any]]) -> Callable[[Any], Any]:
    def make(given: Any) -> Any:
        if type(given) not in (list, tuple):
            raise TypeError
        # What an instance of a class became has no hash of its own: the plain form of the set takes it as it is.
        if any(type(item) is Tagged for item in given):
            return Tagged(kind.__name__, None, list(given))
        return kind(given)

    return make


def _time(given: Any) -> time:
    hour, minute, second, micro = (given[key] for key in ("hour", "minute", "second", "microsecond"))
    return time(hour, minute, second, micro, given.get("tzinfo"), fold=given.get("fold", 0))


_STANDARD: Final[dict[tuple[str, str, str], Callable[[Any], Any]]] = {
    ("uuid", "UUID", "single"): _strict(uuid.UUID),
    ("decimal", "Decimal", "single"): _strict(Decimal),
    ("builtins", "set", "single"): _members(set),
    ("builtins", "frozenset", "single"): _members(frozenset),
    ("collections", "deque", "single"): deque,
    ("datetime", "datetime", "fromisoformat"): datetime.fromisoformat,
    ("datetime", "date", "positional"): lambda given: date(*given),
    ("datetime", "timedelta", "positional"): lambda given: timedelta(*given),
    ("datetime", "timezone", "positional"): lambda given: timezone(*given),
    ("datetime", "time", "keywords"): _time,
    # As LangGraph wrote them in JSON.
    ("datetime", "date", "fromisoformat"): date.fromisoformat,
    ("datetime", "time", "fromisoformat"): time.fromisoformat,
    ("datetime", "timedelta", "keywords"): lambda given: timedelta(**given),
    ("datetime", "timezone", "single"): timezone,
    ("zoneinfo", "ZoneInfo", "single"): _strict(ZoneInfo),
    ("re", "compile", "positional"): _pattern,
}
for _cls in (
    ipaddress.IPv4Address,
    ipaddress.IPv4Interface,
    ipaddress.IPv4Network,
    ipaddress.IPv6Address,
    ipaddress.IPv6Interface,
    ipaddress.IPv6Network,
):
    _STANDARD["ipaddress", _cls.__name__, "single"] = _strict(_cls)
for _module in ("pathlib", "pathlib._local"):
    _posix = pathlib.PosixPath if isinstance(pathlib.Path(), pathlib.PosixPath) else pathlib.PurePosixPath
    _windows = pathlib.PureWindowsPath if isinstance(pathlib.Path(), pathlib.PosixPath) else pathlib.WindowsPath
    _STANDARD[_module, "PosixPath", "positional"] = _path(_posix)
    _STANDARD[_module, "WindowsPath", "positional"] = _path(_windows)
    _STANDARD[_module, "Path", "positional"] = _path(type(pathlib.Path()))
_HOLDERS: Final = frozenset({("builtins", "set"), ("builtins", "frozenset"), ("collections", "deque")})

_DTYPE: Final = re.compile(
    r"[<>|=](?:b1|[iu][1248]|f[248]|c(?:8|16)|[SUV][1-9][0-9]{0,8}|[mM]8(?:\[[1-9]?[0-9]{0,8}\w{1,2}\])?)"
)


def _array(parts: Any, path: str) -> Any:
    try:
        dtype, shape, order, data = parts
        if type(dtype) is not str or type(data) is not bytes or not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError
    except (TypeError, ValueError):
        raise _broken(path, "no array") from None
    if not _DTYPE.fullmatch(dtype):
        raise refusal(
            path, f"it is an array of items {dtype[:40]!r}", "Store an array of numbers, or a list.", cls="numpy.ndarray"
        )
    try:
        import numpy
    except ImportError:
        raise refusal(
            path, "it is an array of numpy, which is not installed", "Run: pip install numpy", cls="numpy.ndarray"
        ) from None
    try:
        kind = numpy.dtype(dtype)
        if len(data) != math.prod(shape) * kind.itemsize:
            raise ValueError
        return numpy.frombuffer(data, dtype=kind).reshape(shape, order=order)
    except (TypeError, ValueError):
        raise _broken(path, "no array") from None


# LangGraph's


def _fields_of(cls: type, call: Call, path: str) -> Any:
    if call.how in ("keywords", "pydantic"):  # the latter for an Item, as it has a method ``dict``
        given = call.given
        if cls.__name__ == "Interrupt" and type(given) is dict:
            # Before version 0.6 its id was told by the namespace that it came from.
            kept = {key: value for key, value in given.items() if key not in {"ns", "resumable", "when", "interrupt_id"}}
            if "id" not in kept and type(given.get("ns")) in (list, tuple) and all(type(n) is str for n in given["ns"]):
                from xxhash import xxh3_128_hexdigest

                kept["id"] = xxh3_128_hexdigest("|".join(given["ns"]).encode())
            return kept
        return given
    names = SHAPED[cls].fields
    if call.how == "positional" and type(call.given) in (list, tuple) and len(call.given) <= len(names):
        return dict(zip(names, call.given, strict=False))
    raise _broken(path, f"no {cls.__name__}")


def _shaped(cls: type, fields: dict[str, Any], path: str) -> Any:
    names = SHAPED[cls].fields
    if unknown := fields.keys() - set(names):
        raise refusal(
            path,
            f"it is a {cls.__name__} with the field {min(unknown)[:40]!r}, which it has not here",
            "Import with the version of LangGraph that wrote it.",
            cls=cls.__name__,
        )
    if cls.__name__ == "Item":
        fields = _item(fields, path)
    defaults = modeldump.defaults_of(cls)
    if cls.__name__ == "Interrupt":
        defaults["id"] = lambda: "placeholder-id"  # as its constructor has it
    if cls.__name__ == "Send":
        defaults["timeout"] = lambda: None
    made: dict[str, Any] = {}
    for name in names:
        if name in fields:
            made[name] = fields[name]
        elif name in defaults:
            made[name] = defaults[name]()
        else:
            raise _broken(path, f"no whole {cls.__name__}")
    return unwrapped({"@class": SHAPED[cls].name, "fields": made}, path)


def _item(fields: dict[str, Any], path: str) -> dict[str, Any]:
    """As the constructor of the item has it."""
    made = dict(fields)
    if type(made.get("namespace")) is list:
        made["namespace"] = tuple(made["namespace"])
    for name in ("created_at", "updated_at"):
        if type(made.get(name)) is str:
            try:
                made[name] = datetime.fromisoformat(made[name])
            except ValueError:
                raise _broken(path, "no Item") from None
    return made


# JSON, as LangGraph wrote it before MessagePack


def _json_call(raw: dict[str, Any], path: str) -> Call:
    names = raw["id"]
    if len(names) < 2 or not all(type(name) is str for name in names):
        raise _broken(path, "no whole object")
    module, name = ".".join(names[:-1]), names[-1]
    args, kwargs = raw.get("args") or [], raw.get("kwargs") or {}
    if type(args) not in (list, tuple) or type(kwargs) is not dict or (args and kwargs):
        raise _broken(path, "no whole object")
    if raw["lc"] == 1 or (module, name) not in _MODULES:
        # LangChain names its classes by where they were long ago.
        known = _LANGCHAIN.get(name) if names[0] in ("langchain", "langchain_core") else None
        if known is not None:
            return Call(known.__module__, known.__name__, "keywords", kwargs)
    method = raw.get("method")
    if type(method) is str and method:
        return Call(module, name, "method", args[0] if len(args) == 1 else args, method)
    if kwargs or not args:
        is_model = type(method) is list and "construct" in method
        return Call(module, name, "pydantic" if is_model else "keywords", kwargs)
    many = (module, name, "positional") in _STANDARD or (module, name) in _SHAPES
    return Call(module, name, "positional", args) if many or len(args) > 1 else Call(module, name, "single", args[0])


def _nested(owner: Any, seen: set[int] | None = None) -> list[type]:
    """Classes of a module, and those inside of them: dictionaries only."""
    seen = set() if seen is None else seen
    found: list[type] = []
    module = getattr(owner, "__name__", "") if not isinstance(owner, type) else owner.__module__
    for each in list(vars(owner).values()):
        if isinstance(each, type) and each.__module__ == module and id(each) not in seen:
            seen.add(id(each))
            found += [each, *_nested(each, seen)]
    return found


def _shown(key: Any) -> str:
    text = repr(key) if type(key) in (str, int, bool) else type(key).__name__
    return text if len(text) <= 60 else text[:57] + "…"


def _broken(path: str, why: str) -> Damaged:
    return Damaged(
        f"{path} cannot be read", f"it is {why}", "Restore the old database from a backup, or leave the thread out.", path=path
    )

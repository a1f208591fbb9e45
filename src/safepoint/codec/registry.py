"""Which classes of the application may be stored and loaded.

Data is never code: a name that arrives with stored bytes is looked up here and nowhere else. Only classes that were registered,
and classes defined in modules that are trusted by name, come out; only a trusted module is ever imported.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from enum import Enum
from functools import lru_cache, reduce
from operator import or_
from types import EllipsisType, NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, overload

import msgspec

from safepoint.errors import RefusedType, UsageError

__all__ = ["BUILTINS", "BUILTIN_NAMES", "GLOBAL", "MissingPolicy", "Registry", "register", "sdk_name", "sdk_of", "shape_of"]

C = TypeVar("C", bound=type)

MissingPolicy = str | Enum | Mapping[Any, Any] | Callable[[Any], Any]
"""What becomes of a stored member that its enum no longer has: ``"error"``, ``"placeholder"`` (a ``MissingMember``), one member for
all, a mapping from the stored name (an int for combinations of flags) to a member or its name, or a function that does so."""

#: Classes that need no registration: as default factories, and as the parameters of generic models.
BUILTINS: dict[str, Any] = {
    f"builtins:{cls.__name__}": cls for cls in (list, dict, set, int, str, float, tuple, bool, frozenset, bytes, NoneType)
}
BUILTIN_NAMES: dict[type, str] = {cls: name for name, cls in BUILTINS.items()}
_MAX_NAME = 1_000
_MAX_NESTED_PARAMETERS = 8
_MAX_MADE = 1_000
_STRUCTS = type(msgspec.Struct)
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: set for every class made by a class statement


#: Where the SDKs whose objects need no registration declare their types, by package.
_SDKS = {"openai": "openai.types", "anthropic": "anthropic.types"}


def sdk_of(where: type | str) -> str | None:
    """The SDK among whose types a class, or a module of that name, is: ``"openai"``, ``"anthropic"`` or None."""
    module = where if isinstance(where, str) else where.__module__
    package = module.partition(".")[0]
    types = _SDKS.get(package)
    return package if types is not None and (module == types or module.startswith(types + ".")) else None


_SDK_PREFIXES = tuple(f"{types}." for types in _SDKS.values())


def sdk_name(cls: type) -> str | None:
    """The name that a class of an SDK is stored under, without parameters; None if its instances are no objects of an SDK."""
    return _sdk_name(cls) if cls.__module__.startswith(_SDK_PREFIXES) else None


@lru_cache(maxsize=1_000)  # asked for with each message of each save; what these modules declare does not change
def _sdk_name(cls: Any) -> str | None:
    if shape_of(cls) != "sdk":
        return None
    return _full_name((getattr(cls, "__pydantic_generic_metadata__", None) or {}).get("origin") or cls)


def shape_of(cls: type) -> str | None:
    """The way instances of a user class are taken apart: the tag of its row in the type table, or None if there is no way."""
    if issubclass(cls, Enum):
        return "enum"
    if issubclass(cls, tuple):
        fields = getattr(cls, "_fields", None)
        return "namedtuple" if isinstance(fields, tuple) and _written_in_python(cls, tuple) else None
    base = pydantic_base()
    if base is not None and issubclass(cls, base):
        return "pydantic" if sdk_of(cls) is None else "sdk"
    if is_dataclass(cls) and _written_in_python(cls):
        return "dataclass"
    if isinstance(cls, _STRUCTS):
        return "struct"
    if "attr" in sys.modules and hasattr(cls, "__attrs_attrs__") and _written_in_python(cls):
        return "attrs"
    return None


def pydantic_base() -> type | None:
    """``BaseModel`` if the application has imported pydantic 2; importing it here would cost everybody else 100 ms."""
    module = sys.modules.get("pydantic.main")
    base = getattr(module, "BaseModel", None)
    return base if hasattr(base, "model_fields") else None


def _written_in_python(cls: type, *besides: type) -> bool:
    # A dataclass that is also a dict, a str or an Exception has content that is in no attribute, and that would be lost.
    return all(base.__flags__ & _HEAP_TYPE or base in besides for base in cls.__mro__ if base is not object)


class Registry:
    """Which user classes may be stored and loaded, by name.

    A class is known if it was added here or to ``parent``, or if the module that defines it, or a package above that, is in
    ``trust``. The name of a class is ``module:Qualname`` unless another one was given.
    """

    def __init__(
        self, types: Iterable[type] = (), trust: Iterable[str] = (), parent: Registry | EllipsisType | None = ...
    ) -> None:
        if isinstance(trust, str):
            raise UsageError("trust is a string", "a list of module names is expected", f"Write trust=[{trust!r}]")
        self._parent: Registry | None = GLOBAL if isinstance(parent, EllipsisType) else parent
        self._trust = tuple(trust)
        self._names: dict[type, str] = {}
        self._classes: dict[str, type] = {}
        self._made = 0
        self._missing: dict[type, MissingPolicy] = {}
        for cls in types:
            self.add(cls)

    def __repr__(self) -> str:
        return f"Registry({sorted(self._classes)}, trust={list(self._trust)})"

    def add(
        self, cls: type, *, name: str | None = None, aliases: Iterable[str] = (), missing: MissingPolicy | None = None
    ) -> None:
        """Let ``cls`` be stored under ``name``, and loaded by that name and by ``aliases`` (its former names).

        ``missing``, for enums, says what becomes of stored members that are no longer there.

        A class that is defined again (a notebook cell run twice, a module reloaded) takes the place of the earlier one. Two
        different classes under one name are a ``UsageError``, and so is a class that could not be stored anyway.
        """
        if not isinstance(cls, type) or shape_of(cls) is None:
            raise UsageError(
                f"{getattr(cls, '__qualname__', type(cls).__qualname__)} cannot be registered",
                "it is no enum, named tuple, dataclass, pydantic model, msgspec.Struct or attrs class",
                "Put @safepoint.register above @dataclass, not below it; for other classes see docs/types.md",
            )
        if isinstance(aliases, str):
            raise UsageError("aliases is a string", "a list of names is expected", f"Write aliases=[{aliases!r}]")
        name = name or _full_name(cls)
        names = [name, *aliases]
        for each in names:
            known = self._classes.get(each)
            if known is not None and known is not cls and _full_name(known) != _full_name(cls):
                raise UsageError(
                    f"the name {each!r} is taken", f"{_full_name(known)} is registered under it", "Choose another one"
                )
            if not each or len(each) > _MAX_NAME or each.startswith("builtins:") or not _is_text(each):
                raise UsageError(f"{each!r:.80} cannot be the name of a class", remedy=f"Choose 1 to {_MAX_NAME} characters")
        if missing is not None:
            self._missing[cls] = _checked_policy(cls, missing)
        self._classes.update(dict.fromkeys(names, cls))
        self._names[cls] = name

    def missing_of(self, cls: type) -> MissingPolicy:
        """The policy for stored members that the enum ``cls`` no longer has."""
        own = self._missing.get(cls)
        if own is not None:  # not "or": a member may be falsy
            return own
        return self._parent.missing_of(cls) if self._parent else "error"

    def trusts(self, module: str) -> bool:
        """Whether the classes of a module may be made, and the module imported for it."""
        return self._trusts(module) or bool(self._parent and self._parent.trusts(module))

    def name_of(self, cls: type) -> str | None:
        """The name that ``cls`` is stored under; None if it is neither registered nor trusted."""
        if (sdk := sdk_name(cls)) is not None:
            return sdk
        name = self._names.get(cls) or (self._parent.name_of(cls) if self._parent else None)
        if name is None and (name := self._parametrised_name(cls) or self._trusted_name(cls)) is not None:
            self._names[cls] = name  # for speed only: what is trusted, and what a parameter is called, never changes
        return name

    def class_of(self, name: str) -> type | None:
        """The class that was stored under ``name``; None if it is neither registered nor trusted.

        Raises:
            RefusedType: The module that it is in is trusted, but cannot be imported.
        """
        found = self._classes.get(name) or (self._parent.class_of(name) if self._parent else None)
        if found is None and len(name) <= _MAX_NAME:
            if name.endswith("]"):
                if self._made > _MAX_MADE:
                    raise RefusedType(
                        f"more than {_MAX_MADE} parametrised models",
                        "each is a class of its own, made when it is asked for, and stays for the life of the process",
                        "Register those that are meant",
                        type=name[:200],
                    )
                if (found := self._parametrise(name)) is not None:
                    self._classes[name] = found
            elif self._trusts(module := name.partition(":")[0]):
                found = _find(module, name.partition(":")[2])
                if found is not None and _full_name(found) != name:
                    found = None  # something that the module imported from elsewhere, which nobody has trusted
        return found

    def sdk_class(self, name: str) -> type | None:
        """The class of an SDK that was stored under ``name``; None if the SDK that is installed has none. Its module is imported."""
        module, _, qualname = name.partition(":")
        if len(name) > _MAX_NAME or sdk_of(module) is None:
            return None
        try:
            found = _find(module, qualname)
        except RefusedType:  # no such module in this version
            return None
        return found if found is not None and _full_name(found) == name else None

    def _trusts(self, module: str) -> bool:
        return any(module == each or module.startswith(each + ".") for each in self._trust)

    def _trusted_name(self, cls: type) -> str | None:
        name = _full_name(cls)
        module, _, qualname = name.partition(":")
        # The class must be found again by its name: one made inside a function, or hidden by another of its name, is not.
        # (Parametrised models are, because pydantic puts them into their module, but only in processes that have used them.)
        trusted = self._trusts(module) and not name.endswith("]")
        return name if trusted and _find(module, qualname) is cls else None

    # Generic pydantic models. Box[int] is a class of its own, made when it is asked for; registering Box is enough for it, and
    # it is stored as "app:Box[builtins:int]".

    def _parametrised_name(self, cls: Any, nested: int = 0) -> str | None:
        if nested > _MAX_NESTED_PARAMETERS:
            return None
        if cls is Any:
            return "Any"
        generic = getattr(cls, "__pydantic_generic_metadata__", None) or {}
        origin, args = (generic["origin"], generic["args"]) if generic.get("args") else (get_origin(cls), get_args(cls))
        if origin is None:
            return BUILTIN_NAMES.get(cls) or self.name_of(cls) if nested and isinstance(cls, type) else None
        if origin is Union or origin is UnionType:  # Optional[X] and X | None make two classes, for pydantic
            head: str | None = "Union" if origin is Union else "|"
        else:
            head = BUILTIN_NAMES.get(origin) or self.name_of(origin) if isinstance(origin, type) else None
        parts = [self._parametrised_name(arg, nested + 1) for arg in args]
        return None if head is None or None in parts else f"{head}[{','.join(map(str, parts))}]"

    def _parametrise(self, name: str) -> type | None:
        try:
            tokens = iter(_tokens(name))
            found = self._read(next(tokens), tokens, 0)[0]
        except (StopIteration, TypeError, KeyError):  # unbalanced, not generic, or not known
            return None
        if not isinstance(found, type) or self._parametrised_name(found) != name:
            return None
        self._made += 1
        return found

    def _read(self, head: str, tokens: Iterator[str], nested: int) -> tuple[Any, str]:
        args: list[Any] = []
        after = next(tokens, "")
        if nested > _MAX_NESTED_PARAMETERS or head in "[],":
            raise KeyError(head)
        if after == "[":
            while after != "]":
                arg, after = self._read(next(tokens), tokens, nested + 1)
                args.append(arg)
                if after not in (",", "]"):
                    raise KeyError(head)
            after = next(tokens, "")
        if head in ("Union", "|"):
            return (Union[tuple(args)] if head == "Union" else reduce(or_, args)), after  # noqa: UP007 (no operator joins a list)
        found: Any = Any if head == "Any" else BUILTINS.get(head) or self.class_of(head)
        if found is None:
            raise KeyError(head)
        return (found[args[0] if len(args) == 1 else tuple(args)] if args else found), after


def _checked_policy(cls: type, policy: MissingPolicy) -> MissingPolicy:
    members = getattr(cls, "__members__", {})
    if not issubclass(cls, Enum):
        wrong = f"{cls.__qualname__} is no enum"
    elif isinstance(policy, Enum):
        wrong = "" if isinstance(policy, cls) else f"{policy!r:.80} is no member of {cls.__qualname__}"
    elif isinstance(policy, Mapping):
        unknown = [to for to in policy.values() if not isinstance(to, cls) and not (isinstance(to, str) and to in members)]
        wrong = f"it leads to {unknown[0]!r:.80}, which is no member of {cls.__qualname__}" if unknown else ""
    else:
        wrong = "" if callable(policy) or policy in ("error", "placeholder") else "it is something else"
    if wrong:
        raise UsageError(
            "register(missing=) is for enums: 'error', 'placeholder', a member, a mapping or a function",
            wrong,
            "Write missing={'OLD': 'NEW'}, or missing='placeholder'",
        )
    return policy


def _tokens(name: str) -> list[str]:
    for mark in "[],":
        name = name.replace(mark, f"\0{mark}\0")
    return [token for token in name.split("\0") if token]


def _is_text(name: str) -> bool:
    try:
        return bool(name.encode())
    except UnicodeEncodeError:
        return False


def _full_name(cls: type) -> str:
    module = cls.__module__
    if module in ("__main__", "__mp_main__"):  # (the second in a process that multiprocessing has spawned)
        module = "__main__"  # but under "python -m app.run", the name by which other processes import the same class
        spec = getattr(sys.modules.get("__main__"), "__spec__", None)
        module = getattr(spec, "name", None) or module
    return f"{module}:{cls.__qualname__}"


def _find(module: str, qualname: str) -> type | None:
    """Look a class up in a trusted module. Dictionaries only, no ``getattr``: a lazy module would run code for it."""
    main = sys.modules.get("__main__")
    if getattr(getattr(main, "__spec__", None), "name", None) == module:
        found: Any = main  # importing it once more under its real name would make a second class
    elif module in sys.modules:
        found = sys.modules[module]
    elif all(part.isidentifier() for part in module.split(".")):
        try:
            found = importlib.import_module(module)
        except Exception as error:
            raise RefusedType(
                f"the trusted module {module} cannot be imported",
                f"{type(error).__name__}",
                "Install or mend it, or register its classes under aliases",
                module=module,
            ) from error
    else:
        return None
    for part in qualname.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return found if isinstance(found, type) else None


#: The process-wide registry, which ``@safepoint.register`` fills and every other registry asks last.
GLOBAL = Registry(parent=None)


@overload
def register(cls: C, *, name: str | None = None, aliases: Iterable[str] = (), missing: MissingPolicy | None = None) -> C: ...
@overload
def register(
    cls: None = None, *, name: str | None = None, aliases: Iterable[str] = (), missing: MissingPolicy | None = None
) -> Callable[[C], C]: ...
def register(
    cls: C | None = None, *, name: str | None = None, aliases: Iterable[str] = (), missing: MissingPolicy | None = None
) -> C | Callable[[C], C]:
    """Let instances of a class be stored and loaded, in every checkpointer of this process.

    ``name`` is what is stored, ``module:Qualname`` if not given: give one if the class may move, or if it is defined in a script
    (whose module is ``__main__`` for one process and something else for the next). After a renaming list the old full name in
    ``aliases``. ``missing`` says, for an enum, what becomes of a stored member that it no longer has: ``"error"`` (the default),
    ``"placeholder"`` (a ``MissingMember`` that is stored again as what it was), a member that stands in for all of them, a mapping
    such as ``{"OLD": "NEW"}``, or a function from the stored name to a member. See docs/schema.md.
    """

    def add(cls: C) -> C:
        GLOBAL.add(cls, name=name, aliases=aliases, missing=missing)
        return cls

    return add if cls is None else add(cls)

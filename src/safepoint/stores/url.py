"""From a URL to a store: the only place that knows schemes and their options.

What every scheme shares: options may be given in the query (``?timeout=5``) or as keywords; one that is unknown is refused
with the list of the known ones, since a misspelt ``durabilty`` must not become a silent default; and no password is ever
part of a message. In a path or name, ``%``, ``?`` and ``#`` are written as in any URL: ``%25``, ``%3F``, ``%23``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from importlib import import_module
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote, urlencode

from safepoint.errors import SafepointError, Unavailable, UsageError
from safepoint.model import check_id
from safepoint.stores.base import Store

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint, EntryPoints

__all__ = ["ENTRY_POINTS", "clocked", "open_store", "redact", "schemes", "split_url"]

ENTRY_POINTS = "safepoint.stores"
"""Group under which a package registers ``scheme = "module:callable"``; the callable takes (url, **options)."""

BILLION = 1_000_000_000
"""Seconds; more cannot be waited for, as clocks count them."""

Options = dict[str, Any]


def open_store(where: str | Store, **options: Any) -> Store:
    """Open the store that a URL names; a store is handed back as it is.

    Options that are None count as not given.

    Raises:
        UsageError: no URL, an unknown scheme or option, or a value that an option cannot have.
    """
    options = {name: value for name, value in options.items() if value is not None}
    if isinstance(where, Store):
        if options:
            raise UsageError(f"options {_listed(options)} come too late", "the store is open", "Give them where it is opened.")
        return where
    if not isinstance(where, str):
        raise UsageError(f"a store is named by a URL, not by a {type(where).__name__}", "", "Write it as sqlite:///agent.db.")
    scheme, sep, rest = where.partition("://")
    if not sep:
        raise UsageError(f"{redact(where)!r} is no store URL", "it has no scheme", "Write a file as sqlite:///agent.db.")
    scheme = scheme.lower()
    if scheme in _BUILT_IN:
        opener, known = _BUILT_IN[scheme]
        path, _, query = rest.partition("?")
        return opener(where, unquote(path), _options(where, known, query, options))
    if scheme in _SERVERS:
        module, names = _SERVERS[scheme]
        return _server(where, module, _options(where, names, *_own(rest, names), options))
    found = [point for point in _entry_points() if point.name.lower() == scheme]
    if found:
        return _third_party(where, scheme, found, options)
    raise UsageError(
        f"unknown scheme {scheme!r} in {redact(where)!r}", f"known ones are {_listed(schemes())}", "Correct the URL."
    )


def schemes() -> list[str]:
    """The schemes that can be opened here: built-in ones and those of installed packages."""
    return sorted({*_BUILT_IN, *_SERVERS, *(point.name for point in _entry_points())})


_SECRET = re.compile(r"(?i)([\w.-]*(?:passw|passphrase|secret|token|credential|api_?key)[\w.-]*\s*=\s*)('[^']*'|[^&\s#]*)")


def redact(url: str) -> str:
    """The URL with ``***`` for its password, fit for messages and logs.

    It rather hides too much: people forget to escape ``/``, ``?`` or ``@`` in a password, so all up to the last ``@`` counts.
    """
    scheme, sep, rest = url.partition("://") if "://" in url else ("", "", url)
    if not rest.startswith("/") or (not sep and rest.startswith("//")):
        login, at, place = rest.rpartition("@")
        if at and ":" in login.lstrip("/"):
            rest = f"{login.partition(':')[0]}:***@{place}"
    return _SECRET.sub(r"\1***", f"{scheme}{sep}{rest}")


# -- options


def _seconds(value: Any) -> float:
    seconds = float(value)
    if isinstance(value, bool) or not 0 <= seconds <= BILLION:
        raise ValueError
    return seconds


def _durability(value: Any) -> str:
    if value not in {"full", "process"}:
        raise ValueError
    return str(value)


_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    try:
        return _WORDS[value.lower()]
    except (KeyError, AttributeError):
        raise ValueError from None


def _lease(value: Any) -> float:
    seconds = _seconds(value)
    if seconds < 1:
        raise ValueError
    return seconds


def _number(value: Any) -> int:
    if isinstance(value, bool) or int(value) != float(value) or int(value) < 0:
        raise ValueError
    return int(value)


def _count(value: Any) -> int:
    if (number := _number(value)) < 2:
        raise ValueError
    return number


def _ttl(value: Any) -> int:
    if (number := _number(value)) < 1:
        raise ValueError
    return number


def _word(value: Any) -> str:
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise ValueError
    return value


Parser = tuple[Callable[[Any], Any], str]
_COMMON: dict[str, Parser] = {
    "timeout": (_seconds, "a number of seconds, zero or more, up to a billion"),
    "durability": (_durability, "full or process"),
}


def _options(url: str, known: Mapping[str, Parser], query: str, keywords: Options) -> Options:
    given: Options = {}
    for name, text in parse_qsl(query, keep_blank_values=True):
        if name in given:
            raise UsageError(f"option {name!r} comes twice in {redact(url)!r}", "", "Leave one.")
        given[name] = text
    parsed = _parsed(url, known, given)
    for name, value in _parsed(url, known, keywords).items():
        # Which of two differing values was meant cannot be known, and a wrong durability is not noticed until it matters.
        if parsed.setdefault(name, value) != value:
            raise UsageError(f"option {name!r} is in the URL and in the call, with two values", "", "Leave one.")
    return parsed


def _own(rest: str, known: Mapping[str, Parser]) -> tuple[str]:
    """The part of a server's query that is ours: all else in it is for the client library, which has names of its own."""
    query = parse_qsl(rest.partition("?")[2], keep_blank_values=True)
    return (urlencode([(name, text) for name, text in query if name in known]),)


def _parsed(url: str, known: Mapping[str, Parser], given: Options) -> Options:
    parsed = {}
    for name, value in given.items():
        if name not in known:
            raise UsageError(
                f"unknown option {name!r} for {redact(url).partition('?')[0]!r}",
                f"known ones are {_listed(known)}",
                "Correct it.",
            )
        parse, wanted = known[name]
        try:
            parsed[name] = parse(value)
        except (ValueError, TypeError):
            raise UsageError(
                f"option {name!r} must be {wanted}", "", f"Correct it in {redact(url)!r} or in the call."
            ) from None
    return parsed


# -- schemes


def _memory(url: str, path: str, options: Options) -> Store:
    from safepoint.stores.memory import MemoryStore

    store = MemoryStore(check_id(path, "name of a memory store") if path else None)
    store.timeout = options.get("timeout", store.timeout)
    return store  # durability is taken and has no bearing: what is in memory survives neither kill nor power loss


def _sqlite(url: str, path: str, options: Options) -> Store:
    if not path.startswith("/"):
        raise UsageError(f"{redact(url)!r} names a host", "SQLite files are local", "Write three slashes: sqlite:///agent.db.")
    if path in {"/", "/:memory:"}:
        raise UsageError(f"{redact(url)!r} names no file", "", "Use memory:// for a store that ends with the process.")
    from safepoint.stores.sqlite import SQLiteStore

    # Resolved now: the process may change its directory before the file is opened again after a fork.
    return SQLiteStore(os.path.abspath(path[1:]), **options)


def _file(url: str, path: str, options: Options) -> Store:
    if not path.startswith("/"):
        raise UsageError(f"{redact(url)!r} names a host", "the files are local", "Write three slashes: file:///checkpoints.")
    if path == "/":
        raise UsageError(f"{redact(url)!r} names no folder", "", "Write one, as in file:///checkpoints.")
    from safepoint.stores.file import FileStore

    return FileStore(os.path.abspath(path[1:]), **options)


_BUILT_IN: dict[str, tuple[Callable[[str, str, Options], Store], dict[str, Parser]]] = {
    "memory": (_memory, _COMMON),
    "file": (_file, _COMMON),
    "sqlite": (_sqlite, {**_COMMON, "network_ok": (_flag, "true or false")}),
}


def clocked(where: object) -> bool:
    """Whether the leases of the store that is named have a clock, so that they have a length."""
    return isinstance(where, str) and where.partition("://")[0].lower() in _SERVERS


_LEASED: dict[str, Parser] = {
    **_COMMON,
    "lease": (_lease, "a number of seconds, 1 or more, up to a billion"),
    "pool": (_count, "a number of connections, 2 or more"),
}
_POSTGRES: dict[str, Parser] = {**_LEASED, "schema": (_word, "the name of a schema")}
_REDIS: dict[str, Parser] = {
    **_LEASED,
    "prefix": (_word, "the beginning of all keys"),
    "ttl": (_ttl, "a number of whole seconds, 1 or more"),
    "wait_replicas": (_number, "a number of replicas"),
    "cluster": (_flag, "true or false"),
}
_SERVERS: dict[str, tuple[str, dict[str, Parser]]] = {
    "postgresql": ("postgres", _POSTGRES),
    "postgres": ("postgres", _POSTGRES),
    "redis": ("redis", _REDIS),
    "rediss": ("redis", _REDIS),
    "redis+unix": ("redis", _REDIS),
    "valkey": ("redis", _REDIS),
    "valkeys": ("redis", _REDIS),
}
"""Package beside this module, with a function ``from_url(url, options)``, and the options that are ours."""


def _server(url: str, module: str, options: Options) -> Store:
    # Raises MissingExtra itself where its client library is not installed.
    found = import_module(f"safepoint.stores.{module}")
    store: Store = found.from_url(url, options)
    return store


def _entry_points() -> EntryPoints:
    from importlib.metadata import entry_points  # slow to import, and only needed for schemes that are not built in

    return entry_points(group=ENTRY_POINTS)


def _third_party(url: str, scheme: str, found: list[EntryPoint], options: Options) -> Store:
    if len({point.value for point in found}) > 1:
        homes = _listed({point.dist.name if point.dist else point.value for point in found})
        raise UsageError(f"{scheme}:// is offered by more than one package", homes, "Uninstall all but one.")
    point = found[0]
    blame = f"Report it to the authors of {point.dist.name if point.dist else point.value}."
    try:
        opener: Any = point.load()
    except SafepointError:
        raise  # MissingExtra and its like say themselves what to do
    except Exception as error:
        raise UsageError(f"the package behind {scheme}:// cannot be loaded", _said(error), "Install it again.") from error
    if not callable(opener):
        raise UsageError(f"{point.value} opens nothing", f"it is a {type(opener).__name__}", blame)
    _check_takes(url, point.value, opener, options, blame)
    try:
        store: object = opener(url, **options)
    except SafepointError:
        raise
    except OSError as error:
        raise Unavailable(f"{redact(url)!r} cannot be opened", _said(error), "Look at the place that it names.") from error
    except Exception as error:
        if isinstance(error, TypeError) and "abstract" in str(error):
            raise UsageError(f"the store behind {scheme}:// lacks methods of the contract", _said(error), blame) from error
        raise UsageError(f"{point.value} failed to open {redact(url)!r}", _said(error), blame) from error
    if not isinstance(store, Store):
        raise UsageError(f"{point.value} made no store", f"it made a {type(store).__name__}", blame)
    lacking = [name for name in ("url", "timeout", "durability") if not hasattr(store, name)]
    if lacking:
        raise UsageError(f"the store behind {scheme}:// does not say what it is", f"it has no {_listed(lacking)}", blame)
    if redact(store.url) != store.url:
        raise UsageError(f"the store behind {scheme}:// shows a password", "in its url, which goes into logs", blame)
    return store


def _check_takes(url: str, name: str, opener: Any, options: Options, blame: str) -> None:
    """Name an option that an opener does not take, before it says so in a TypeError of its own."""
    try:
        takes = signature(opener).parameters
    except (TypeError, ValueError):  # written in C: nobody knows
        return
    if any(p.kind is Parameter.VAR_KEYWORD for p in takes.values()):
        return
    for option in options:
        if option not in takes and option in _COMMON:
            raise UsageError(f"{name} does not take {option}=", "every store is opened with durability and timeout", blame)
        if option not in takes:
            known = _listed(list(takes)[1:])
            raise UsageError(
                f"unknown option {option!r} for {redact(url).partition('?')[0]!r}", f"known ones are {known}", "Correct it."
            )


def _said(error: Exception) -> str:
    return redact(f"{type(error).__name__}: {error}")


def split_url(url: str, given: Mapping[str, Any], known: Mapping[str, Parser] | None = None) -> tuple[str, Options]:
    """For openers of other packages: what stands between ``scheme://`` and ``?``, and the options of the query and of the call.

    Options are parsed, compared and refused as those of the built-in stores are; ``durability`` and ``timeout`` are known.

    Args:
        known: For each option of the store's own a function that makes a value of what was given (text, where it comes from the
            URL) or raises ValueError, and words for what it takes: ``{"pages": (int, "a number of pages")}``.

    Raises:
        UsageError: an option that is unknown, given twice with two values, or has a value that it cannot have.
    """
    path, _, query = url.partition("://")[2].partition("?")
    return unquote(path), _options(url, {**_COMMON, **(known or {})}, query, dict(given))


def _listed(names: Any) -> str:
    return ", ".join(sorted(names)) or "none"

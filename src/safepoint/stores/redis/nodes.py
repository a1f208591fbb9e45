"""Where to send what: the one server of a URL, or the nodes of a cluster and which of them has a key."""

from __future__ import annotations

import bisect
import re
import time
from collections.abc import Callable
from typing import Any

from redis.backoff import NoBackoff
from redis.connection import Connection, UnixDomainSocketConnection, parse_url
from redis.crc import key_slot
from redis.exceptions import RedisError
from redis.retry import Retry

from safepoint.errors import UsageError
from safepoint.stores.redis.pool import Lost, Pool, Unsent
from safepoint.stores.redis.wire import Refused
from safepoint.stores.url import redact

__all__ = ["Nodes", "kept_query", "settings_of"]

_SCHEMES = {"valkey": "redis", "valkeys": "rediss", "redis+unix": "unix"}
_REPLACED = {
    "socket_timeout",
    "socket_connect_timeout",
    "retry",
    "retry_on_timeout",
    "retry_on_error",
    "max_connections",
    "timeout",
}
_FIXED = {"decode_responses", "encoding", "encoding_errors", "parser_class", "protocol", "health_check_interval"}
LEAST_TIME = 0.5
"""Seconds between two looks at how a cluster is laid out, unless a node itself says that it has changed."""

Settings = dict[str, Any]
Address = tuple[str, int]


def settings_of(url: str, ours: set[str]) -> tuple[type[Any], Settings]:
    """The class of redis-py's connections to the server of a URL, and what it is to be made with.

    Args:
        ours: Options that are the store's own.
    """
    scheme, _, rest = url.partition("://")
    place, _, query = rest.partition("?")
    plain = f"{_SCHEMES.get(scheme.lower(), scheme.lower())}://{place}"
    theirs = kept_query(query, ours)
    try:
        given: Settings = parse_url(plain + (f"?{theirs}" if theirs else ""))  # type: ignore[no-untyped-call]
        made = {name: value for name, value in given.items() if name != "connection_class"}
        kind: type[Any] = given.get("connection_class", Connection)
        kind(**made)
    except TypeError as error:
        unknown = re.search(r"'(\w+)'", str(error))
        raise UsageError(
            f"unknown option {unknown[1] if unknown else '?'!r} for {redact(url).partition('?')[0]!r}",
            f"it is none of ours ({', '.join(sorted(ours))}), and redis-py knows none of that name",
            "Correct it.",
        ) from None
    except (ValueError, RedisError) as error:
        # Its text may have in it what stands before an `@`, if that was not understood as one.
        why = str(error) if str(error).startswith("Invalid value for") else "its host or port cannot be read"
        remedy = "Correct it. In a user and a password, write : / ? # @ and % as %3A, %2F and so on."
        raise UsageError(f"{redact(url)!r} is no URL of a Redis server", why, remedy) from None
    database = place.partition("/")[2].strip("/")
    if kind is not UnixDomainSocketConnection and database and not database.isdecimal():
        # redis-py would take the first database for it.
        why = "its database is not a number"
        raise UsageError(f"{redact(url)!r} is no URL of a Redis server", why, "Correct it, as in redis://host:6379/0.")
    for name in made:
        if name in _REPLACED | _FIXED:
            instead = "Use timeout, pool or lease." if name in _REPLACED else "Leave it out."
            raise UsageError(f"option {name!r} cannot be set here", "the store sets it itself", instead)
    return kind, made


def kept_query(query: str, ours: set[str]) -> str:
    """The parts of a query that are not ours, as they are written."""
    parts = [part for part in query.split("&") if part]
    return "&".join(part for part in parts if part.partition("=")[0] not in ours)


class Nodes:
    """Pools of connections by address."""

    def __init__(self, url: str, ours: set[str], *, pool: int, cluster: bool) -> None:
        self._kind, self._settings = settings_of(url, ours)
        self._settings |= {"retry": Retry(NoBackoff(), 0), "protocol": 2, "decode_responses": False}
        self._most = pool
        self.cluster = cluster
        if cluster and "path" in self._settings:
            raise UsageError("a cluster has no unix socket", "its nodes name each other by host and port", "Use redis://.")
        if cluster and self._settings.pop("db", 0):
            raise UsageError("a cluster has one database only", "", "Leave the number out of the URL.")
        self._home: Address = (self._settings.get("host", "localhost"), self._settings.get("port", 6379))
        self.start_over()

    def start_over(self) -> None:
        """Have no connection and know nothing."""
        self._pools: dict[Address, Pool] = {}
        # First slots, and last slot and node of each range: one value, as other threads read it while it is replaced.
        self._layout: tuple[list[int], list[tuple[int, Address]]] = ([], [])
        self._looked = 0.0

    def pool(self, at: Address | None = None) -> Pool:
        at = at or self._home
        found = self._pools.get(at)
        if found is None:
            # Of two threads that come here at once, one takes the other's.
            found = self._pools.setdefault(at, Pool(self._maker(at), self._most))
        return found

    def _maker(self, at: Address) -> Callable[[], Any]:
        place: Settings = {} if "path" in self._settings else {"host": at[0], "port": at[1]}
        kind, settings = self._kind, {**self._settings, **place}
        return lambda: kind(**settings)

    def of(self, key: bytes, deadline: float) -> Pool:
        """The connections to who has a key."""
        if not self.cluster:
            return self.pool()
        if not self._layout[0]:
            self._look(deadline)
        starts, owners = self._layout
        slot = key_slot(key)
        i = bisect.bisect_right(starts, slot) - 1
        if i < 0 or owners[i][0] < slot:
            self.changed(deadline)
            raise Unsent(f"no node has slot {slot}")
        return self.pool(owners[i][1])

    def learn(self, other: Nodes) -> None:
        """Know what others of this process have found out: the one node that the URL names may be silent by now."""
        if not self._layout[0]:
            self._layout = other._layout

    def primaries(self, deadline: float) -> list[Address]:
        """Every server that takes writes."""
        if not self.cluster:
            return [self._home]
        self._look(deadline)
        return sorted({at for _, at in self._layout[1]})

    def changed(self, deadline: float, *, surely: bool = False) -> None:
        """Something speaks for another layout of the cluster than the one that is known."""
        if self.cluster and (surely or time.monotonic() - self._looked > LEAST_TIME):
            self._look(deadline)

    def _look(self, deadline: float) -> None:
        cause: Exception | None = None
        for at in dict.fromkeys([*(at for _, at in self._layout[1]), self._home]):
            # Nobody that does not answer may use up the time of all the others.
            share = min(deadline, time.monotonic() + max(0.2, (deadline - time.monotonic()) / 3))
            try:
                (found,) = self.pool(at).exchange([("CLUSTER", "SLOTS")], share)
                if isinstance(found, Refused):
                    raise Unsent from found
            except (Unsent, Lost) as error:
                cause = error
                continue
            ranges = sorted((first, last, _address(entry[0], entry[1], at)) for first, last, entry, *_ in found)
            self._layout = [first for first, _, _ in ranges], [(last, owner) for _, last, owner in ranges]
            self._looked = time.monotonic()
            return
        if isinstance(cause, Unsent):
            raise cause  # with what it has for a cause
        raise Unsent from cause

    def close(self) -> None:
        for pool in list(self._pools.values()):
            pool.close()

    def __repr__(self) -> str:
        return f"<Nodes {'cluster' if self.cluster else 'server'}>"


def _address(host: bytes | None, port: int, asked: Address) -> Address:
    # A node that does not know how it is called is called as it was asked.
    return (host.decode() if host else asked[0], port)

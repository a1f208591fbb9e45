"""Requests to Redis, one time-out over each: sent again until their outcome is known, which every one of them stands.

All writes are scripts (``stores/lua``), each prepared for being run twice: so after a lost connection the same is sent again, on
another one, until somebody answers or the time is over. Only then is the outcome unknown, and the error says so.
"""

from __future__ import annotations

import hashlib
import random
import re
import time
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import resources
from typing import Any

from redis.crc import key_slot
from redis.exceptions import AuthenticationError, NoPermissionError

from safepoint import _probe
from safepoint.errors import Damaged, SafepointError, StoreFull, Unavailable, UsageError
from safepoint.stores.forking import each_at_fork
from safepoint.stores.redis.layout import Keys
from safepoint.stores.redis.nodes import Address, Nodes
from safepoint.stores.redis.pool import Exhausted, Lost, Pool, Unsent
from safepoint.stores.redis.wire import Refused
from safepoint.stores.url import redact

__all__ = ["Client", "Command", "source"]

Command = Sequence[Any]
Replies = list[Any]

OURS = {"timeout", "durability", "lease", "pool", "prefix", "ttl", "wait_replicas", "cluster"}
"""Options in the query of a URL that redis-py is not told of."""

_AGAIN = {"LOADING", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN", "READONLY", "BUSY", "NOREPLICAS", "MOVED", "UNBLOCKED"}
"""Refusals that pass by themselves. None of them comes after a script has begun to write."""
_EARLIER = {b"existed", b"recent", b"granted"}
"""Answers of scripts to what they may have done before."""
_NOTHING = {b"absent", b"announce", b"ask", b"away", b"changed", b"floor", b"gone", b"held", b"lost", b"moved", b"numbers"}
"""Answers of scripts that have written nothing."""
_PLACE = re.compile(r" script: (?:[0-9a-f]+, )?on @")
"""Where in a script: of no use to people, and whatever stands before an `@` would be taken for a password."""
_LOGIN = {"NOAUTH", "WRONGPASS"}
_RIGHTS = re.compile(r"ACL failure|NOPERM|[Uu]nknown (Redis |Valkey |Server )?command")
_FULL = re.compile(r"no space|disk (is )?full|quota|RDB snapshots", re.IGNORECASE)


@cache
def source(name: str) -> tuple[bytes, bytes]:
    """A script, and the hash by which the server knows it."""
    folder = resources.files("safepoint.stores") / "lua"
    text = (folder / "shared.lua").read_bytes() + (folder / f"{name}.lua").read_bytes()
    return text, hashlib.sha1(text, usedforsecurity=False).hexdigest().encode()


class Client:
    """A store's way to its server or cluster.

    Args:
        pool: Connections to each server, at most.
        wait_replicas: How many replicas must have a write before it is acknowledged.
    """

    def __init__(
        self, url: str, *, timeout: float, pool: int, prefix: str, cluster: bool = False, wait_replicas: int = 0
    ) -> None:
        self.name = redact(url).partition("?")[0]
        self.keys = Keys(prefix)
        self.timeout = timeout
        self.wait_replicas = wait_replicas
        self.closed = False
        self._nodes = Nodes(url, OURS, pool=pool, cluster=cluster)
        each_at_fork(self)

    def after_fork(self) -> None:
        # The sockets are the parent's: dropping them here closes this process's copies, and says nothing to the server.
        self._nodes.start_over()

    @property
    def cluster(self) -> bool:
        return self._nodes.cluster

    def learn(self, other: Client) -> None:
        self._nodes.learn(other._nodes)

    def deadline(self) -> float:
        """Until when a verb that begins now has to end; of ``time.monotonic``."""
        return time.monotonic() + self.timeout

    # -- requests

    def script(self, name: str, keys: Sequence[bytes], args: Sequence[Any] = (), *, deadline: float | None = None) -> Any:
        """Run ``name.lua``, which only reads, or what it writes is of no consequence by itself."""
        text, sha = source(name)
        (reply,) = self._run(keys[0], [("EVALSHA", sha, len(keys), *keys, *args)], deadline, {0: text})
        return reply

    def write(self, name: str, keys: Sequence[bytes], args: Sequence[Any] = (), *, deadline: float | None = None) -> Any:
        """Run ``name.lua``, which writes; replicas that must have it have it then.

        Raises:
            Unavailable: with ``unknown=True``, if it may have been done.
        """
        deadline = self.deadline() if deadline is None else deadline
        text, sha = source(name)
        request: list[Command] = [("EVALSHA", sha, len(keys), *keys, *args)]
        if not self.wait_replicas:
            return self._run(keys[0], request, deadline, {0: text}, writes=True)[0]
        wait = ("WAIT", self.wait_replicas, max(1, int((deadline - time.monotonic()) * 800)))
        (reply, had), again = self._tries(keys[0], [*request, wait], deadline, {0: text}, writes=True)
        word = reply[0] if isinstance(reply, list) and reply else reply
        if not again and (word == 0 or word in _NOTHING):
            return reply
        if again or word in _EARLIER:
            # It was written over another connection, and WAIT waits for the writes of its own.
            _, had = self._run(keys[0], [("SET", keys[0] + b":w", 1, "EX", 60), wait], deadline, {}, writes=True)
        if had < self.wait_replicas:
            raise Unavailable(
                f"a write to {self.name} is not on enough replicas",
                f"{had} of {self.wait_replicas} have it; it stands on the primary",
                "Look at the replicas, then read again.",
                unknown=True,
            )
        return reply

    def command(self, *command: Any, deadline: float | None = None) -> Any:
        """One command, whose first argument is its key. It must be one that may be done twice."""
        (reply,) = self._run(command[1], [command], deadline, {})
        return reply

    def many(self, commands: Sequence[Command], *, deadline: float | None = None) -> Replies:
        """As ``command``, in as few trips as can be."""
        return self._spread([(command[1], command) for command in commands], deadline, None)

    def scripts(
        self, name: str, calls: Sequence[tuple[Sequence[bytes], Sequence[Any]]], *, deadline: float | None = None
    ) -> Replies:
        """As ``script``, many at once; none of them waits for replicas."""
        text, sha = source(name)
        requests: list[tuple[bytes, Command]] = [(keys[0], ("EVALSHA", sha, len(keys), *keys, *args)) for keys, args in calls]
        return self._spread(requests, deadline, text)

    def each(self, name: str, calls: Sequence[tuple[Sequence[bytes], Sequence[Any]]], deadline: float) -> Replies:
        """As ``scripts``, but a node that is silent, or a task that is damaged, costs the others nothing: the error is in its place."""
        self.refuse_if_closed()
        text, sha = source(name)
        requests: list[tuple[bytes, Command]] = [(keys[0], ("EVALSHA", sha, len(keys), *keys, *args)) for keys, args in calls]
        replies: Replies = [None] * len(requests)
        silent: dict[int, Exception] = dict.fromkeys(range(len(requests)), Unsent())
        # Who is silent is asked again: only the connection may have been lost, or another node may have by now what it had.
        for tries in (2, 1):
            refused, silent = self._by_node(requests, replies, _share(deadline, tries), silent, shared=True)
            for done, i in enumerate(refused):
                key, request = requests[i]
                try:
                    (replies[i],) = self._run(key, [request], _share(deadline, len(refused) - done), {0: text})
                except SafepointError as error:
                    replies[i] = error
            if not silent:
                break
            try:
                self._nodes.changed(_share(deadline, 3))
            except Unsent:
                pass
        for i, cause in silent.items():
            replies[i] = self._unavailable(_why(cause.__cause__ or cause), False, "Look at the server, then try again.")
        return replies

    def announce(self, task: str, *, deadline: float | None = None) -> None:
        """Name a task in the index, before it is created: from then on it is listed, once it is there."""
        # Whether it was heard twice is of no consequence, and no replica is waited for.
        self.script("announce", [self.keys.index_of(task)], [task.encode()], deadline=deadline)

    def primaries(self) -> list[Address]:
        """Every server that takes writes. ``ask`` speaks to one."""
        return self._within(self._nodes.primaries, self.deadline())[0]  # type: ignore[no-any-return]

    def ask(self, at: Address, *command: Any) -> Any:
        """One command to one server; what it refuses is ``Refused``."""
        deadline = self.deadline()
        (reply,), _ = self._within(lambda deadline: self._nodes.pool(at).exchange([command], deadline), deadline)
        if isinstance(reply, Refused):
            if reply.code in _LOGIN:
                self._refuse(reply, False)
            raise reply
        return reply

    def refuse_if_closed(self) -> None:
        if self.closed:
            raise UsageError(f"the store {self.name} is closed", "", "Open it again.")

    def close(self) -> None:
        self.closed = True
        self._nodes.close()

    # -- again, until the outcome is known

    def _spread(self, requests: Sequence[tuple[bytes, Command]], deadline: float | None, text: bytes | None) -> Replies:
        deadline = self.deadline() if deadline is None else deadline
        replies: Replies = [None] * len(requests)
        groups: dict[Any, list[int]] = {0: list(range(len(requests)))} if requests else {}
        if self.cluster:
            # By slot: whichever node has it, has all of it.
            groups = {}
            refused, silent = self._by_node(requests, replies, deadline, range(len(requests)))
            for i in [*refused, *silent]:
                groups.setdefault(key_slot(requests[i][0]), []).append(i)
        for group in groups.values():
            texts = {} if text is None else dict.fromkeys(range(len(group)), text)
            found = self._run(requests[group[0]][0], [requests[i][1] for i in group], deadline, texts)
            for i, reply in zip(group, found, strict=True):
                replies[i] = reply
        return replies

    def _by_node(
        self,
        requests: Sequence[tuple[bytes, Command]],
        replies: Replies,
        deadline: float,
        which: Iterable[int],
        *,
        shared: bool = False,
    ) -> tuple[list[int], dict[int, Exception]]:
        """Ask each node once for all that it has. Returns which requests were refused, and which have no answer at all.

        Args:
            shared: Nobody that does not answer may use up the time of all the others.
        """
        nodes: dict[Pool, list[int]] = {}
        refused: list[int] = []
        silent: dict[int, Exception] = {}
        for i in which:
            try:
                nodes.setdefault(self._nodes.of(requests[i][0], deadline), []).append(i)
            except Unsent as error:
                silent[i] = error
        # Last those that were silent the last time.
        for done, (pool, group) in enumerate(sorted(nodes.items(), key=lambda node: not node[0].answers)):
            end = _share(deadline, len(nodes) - done) if shared else deadline
            try:
                found = pool.exchange([requests[i][1] for i in group], end)
            except (Unsent, Lost) as error:
                silent |= dict.fromkeys(group, error)
                continue
            for i, reply in zip(group, found, strict=True):
                if isinstance(reply, Refused):
                    refused.append(i)
                else:
                    replies[i] = reply
        return refused, silent

    def _run(
        self, key: bytes, commands: Sequence[Command], deadline: float | None, texts: dict[int, bytes], *, writes: bool = False
    ) -> Replies:
        """The answers to commands of one key. ``texts`` are the scripts of those that are EVALSHA."""
        return self._tries(key, commands, deadline, texts, writes=writes)[0]

    def _tries(
        self, key: bytes, commands: Sequence[Command], deadline: float | None, texts: dict[int, bytes], *, writes: bool
    ) -> tuple[Replies, bool]:
        """As ``_run``, and whether it may have been done by an earlier try, whose answer got lost."""
        asking: Address | None = None
        request = list(commands)

        def once(deadline: float) -> Replies:
            nonlocal asking
            if asking is not None:
                # The key is moving, and this one request is answered by where it goes.
                at, asking = asking, None
                both = [part for command in request for part in (("ASKING",), command)]
                replies = self._nodes.pool(at).exchange(both, deadline)[1::2]
            else:
                replies = self._nodes.of(key, deadline).exchange(request, deadline)
            errors = [(i, reply) for i, reply in enumerate(replies) if isinstance(reply, Refused)]
            unknown = [i for i, error in errors if error.code == "NOSCRIPT"]
            if unknown:
                for i in unknown:
                    request[i] = ("EVAL", texts[i], *request[i][2:])
                return once(deadline)
            for _, error in errors:
                if error.code == "ASK":
                    asking = _address(error)
                raise error
            return replies

        return self._within(once, self.deadline() if deadline is None else deadline, writes=writes)

    def _within(self, once: Any, deadline: float, *, writes: bool = False) -> tuple[Any, bool]:
        """The answer of ``once``, which is called until it gives one or the time is over, and whether an earlier call may have
        done it. ``writes``: what it does is of consequence, so that an error has to say if it may have been done."""
        pause, sent = 0.005, False
        while True:
            if self.closed and sent:
                raise self._unavailable("the store was closed meanwhile", sent, "Open it again, and look.")
            self.refuse_if_closed()
            _probe.at("redis.send")
            try:
                answer = once(deadline)
                _probe.at("redis.answer")
                return answer, sent
            except Exhausted as error:
                raise self._unavailable(f"{error} (of this process)", sent, "Raise pool, or do less at once.") from None
            except Unsent as error:
                cause: BaseException = error.__cause__ or error
                if isinstance(cause, AuthenticationError):
                    raise self._no_login(_why(cause), sent) from None
                if isinstance(cause, NoPermissionError):
                    raise self._no_right(_why(cause), sent) from None
                if "DB index" in str(cause):
                    remedy = "Correct the number of its database in the URL."
                    raise UsageError(f"{self.name} is not there", _why(cause), remedy) from None
                if isinstance(cause, Refused):
                    self._refuse(cause, sent)
            except Lost as error:
                cause, sent = error.__cause__ or error, writes
            except Refused as error:
                cause = error
                self._refuse(error, sent)
            if self.closed:
                continue
            left = deadline - time.monotonic()
            if left <= pause:
                remedy = "Look whether the server runs, and is the one that the URL names; then try again."
                raise self._unavailable(_why(cause), sent, remedy) from None
            if not (isinstance(cause, Refused) and cause.code == "ASK"):
                # Jitter, or all who lost the same server come back to it at once.
                time.sleep(random.uniform(pause / 2, pause))
                pause = min(pause * 2, 0.5)
            try:
                self._nodes.changed(deadline, surely=isinstance(cause, Refused) and cause.code == "MOVED")
            except Unsent:
                pass  # so the next try fails likewise

    def _refuse(self, error: Refused, sent: bool) -> None:
        """Raise what an answer means, unless it passes by itself."""
        code, text = error.code, str(error)
        if code == "OOM" or (code == "MISCONF" and _FULL.search(text)):
            what, remedy = (
                ("the memory that Redis may use", "Raise maxmemory, or delete tasks; maxmemory-policy must stay noeviction.")
                if code == "OOM"
                else ("the disk of the Redis server", "Free some space there; the log of the server says more.")
            )
            raise StoreFull(f"{what} at {self.name} is used up", text, remedy, **({"unknown": True} if sent else {})) from None
        if code == "READONLY":
            # A primary that became a replica: whoever is the primary now is found by connecting anew.
            for pool in list(self._nodes._pools.values()):
                pool.forget()
        if code == "MOVED" and not self.cluster:
            remedy = "Open the store with cluster=true."
            raise UsageError(f"{self.name} is a node of a cluster", "it was asked as a single server", remedy) from error
        if "cluster support disabled" in text:
            raise UsageError(f"{self.name} is no node of a cluster", text, "Leave out cluster=true.") from error
        if _RIGHTS.search(text):
            raise self._no_right(text, sent) from error
        if code in _LOGIN:
            raise self._no_login(text, sent) from error
        if code == "WRONGTYPE" or (code == "ERR" and "user_script" in text):
            # The scripts take everything to be as it was written.
            raise Damaged(f"a task in {self.name} is damaged", text, "Restore the server from a backup.") from error
        if code not in _AGAIN and code != "ASK":
            raise self._unavailable(text, sent, "Look at the server, then try again.") from error

    def _no_login(self, why: str, sent: bool) -> SafepointError:
        return self._not_allowed(f"{self.name} refuses the login", why, sent, "Correct user and password in the URL.")

    def _no_right(self, why: str, sent: bool) -> SafepointError:
        why = f"something that the store needs is not permitted: {why}"
        return self._not_allowed(
            f"the user of {self.name} may not do that", why, sent, "Give its user the right (ACL SETUSER)."
        )

    def _not_allowed(self, what: str, why: str, sent: bool, remedy: str) -> SafepointError:
        if sent:  # what became of the request is not known, and that comes first
            return self._unavailable(why, sent, remedy)
        # Not Unavailable: whoever tries again on that would do so for ever.
        return UsageError(what, redact(_PLACE.split(why)[0]), remedy)

    def _unavailable(self, why: str, sent: bool, remedy: str) -> SafepointError:
        what = f"{self.name} gave no answer in {self.timeout:g} s" if sent else f"{self.name} is not available"
        return Unavailable(what, redact(_PLACE.split(why)[0]), remedy, **({"unknown": True} if sent else {}))


def _address(error: Refused) -> Address:
    """Where an ASK points."""
    host, _, port = str(error).rpartition(" ")[2].rpartition(":")
    return host, int(port)


def _share(deadline: float, among: int) -> float:
    """Until when one of so many may take: for a third of the time at most, unless it is one of the last."""
    now = time.monotonic()
    return now + max(0.0, deadline - now) / min(among, 3)


def _why(cause: BaseException) -> str:
    return str(cause).rstrip(".") or type(cause).__name__

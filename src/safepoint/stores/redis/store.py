"""Checkpoints in Redis or Valkey, one server or a cluster, shared by many hosts.

How a task lies there is told in layout.py, and what goes over the wire in client.py. Writing is in commit.py, leases in leases.py,
reading in read.py, removing in sweep.py, and tasks as a whole in whole.py.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from safepoint.errors import SafepointError, Unavailable, UsageError
from safepoint.model import Finding
from safepoint.rows import Commit, Committed, Image
from safepoint.stores import whole
from safepoint.stores.base import Durability, Store
from safepoint.stores.foreseen import Foreseen
from safepoint.stores.redis import check
from safepoint.stores.redis.client import Client
from safepoint.stores.redis.commit import Commits, refuse_names
from safepoint.stores.redis.leases import Leases
from safepoint.stores.redis.nodes import Address
from safepoint.stores.redis.read import Reads
from safepoint.stores.redis.sweep import Removals
from safepoint.stores.redis.whole import Whole
from safepoint.stores.redis.wire import Refused
from safepoint.stores.renewing import Renewals
from safepoint.stores.url import redact

__all__ = ["RedisStore"]

HIGHEST = 100_000_000
"""The highest number with which a task may come from elsewhere: what lists it looks through all numbers, fifty at a time."""
HIGHEST_FENCE = 2**52
"""Scripts count in doubles."""

LONGEST = 2**31 - 1
"""Seconds of a ttl. EXPIRE refuses what is far above, and it comes last in a script: all else would stand."""

log = logging.getLogger("safepoint")


class RedisStore(Commits, Leases, Reads, Removals, Whole, Store):
    """A store on a server.

    Args:
        url: As redis-py takes it, or with ``redis+unix``, ``valkey`` or ``valkeys`` as its scheme.
        timeout: Seconds within which every verb ends, whatever it has to wait for.
        durability: ``full`` needs ``appendonly yes`` and ``appendfsync always`` on the server; ``store.durability`` says what is
            kept there.
        lease: Seconds after which a holder that does not answer is presumed dead.
        pool: Connections to each server, at most.
        prefix: The beginning of all keys.
        ttl: Seconds after its last write at which a task expires, as a whole, if nothing of it is open and nobody holds it.
        wait_replicas: Replicas that must have a write before it is acknowledged.
        cluster: The server is a node of a cluster.
    """

    persistent = True
    chunked = True
    ttl = True
    multi_host = True

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 10.0,
        durability: Durability = "full",
        lease: float = 30.0,
        pool: int = 10,
        prefix: str = "safepoint:",
        ttl: int | None = None,
        wait_replicas: int = 0,
        cluster: bool = False,
    ) -> None:
        if durability not in {"full", "process"}:
            raise UsageError(f"durability={durability!r} is unknown", "", "Use 'full' or 'process'.")
        if timeout <= 0:
            raise UsageError(f"timeout={timeout!r} is not above zero", "a server takes time to answer", "Give seconds.")
        if ttl is not None and not 1 <= ttl <= LONGEST:
            raise UsageError(f"ttl={ttl!r} is out of range", "", f"Give seconds from 1 to {LONGEST:,}.")
        if "{" in prefix or "}" in prefix:
            raise UsageError(f"prefix {prefix!r} has braces", "they say where in a cluster a key lies", "Leave them out.")
        self.url = redact(url)
        self._given = url
        self.timeout = timeout
        self.prefix = prefix
        self._ttl = ttl or 0
        self._client = Client(url, timeout=timeout, pool=pool, prefix=prefix, cluster=cluster, wait_replicas=wait_replicas)
        self._beats = Client(url, timeout=min(timeout, lease), pool=1, prefix=prefix, cluster=cluster)
        self._foreseen = Foreseen()
        self._renewals = Renewals(lease, self._renew, self._forsake)
        self._asked = durability
        self._kept: Durability | None = None

    @property
    def durability(self) -> Durability:  # type: ignore[override]
        """What outlives a loss of power there: the server is asked once, at the latest before the first commit."""
        if self._kept is None:
            try:
                self._kept = self._durability()
            except (Unavailable, UsageError):
                return "process"  # and asked again, once somebody answers, or lets us in
        return self._kept

    def _durability(self) -> Durability:
        if self._asked == "process":
            return "process"
        try:
            for at in self._client.primaries():
                for name, wanted in (("appendonly", b"yes"), ("appendfsync", b"always")):
                    found = self._client.ask(at, "CONFIG", "GET", name)
                    if list(found[:2]) != [name.encode(), wanted]:
                        log.warning(
                            "durability is 'process': %s has %s %s, and may lose with its power what it has acknowledged; "
                            "set appendonly yes and appendfsync always there",
                            *(self.url, name, found[1].decode() if len(found) == 2 else "of its own"),
                        )
                        return "process"
        except Refused as error:
            log.warning("durability is 'process', as far as is known: %s does not tell how it is set up: %s", self.url, error)
            return "process"
        return "full"

    def commit(self, commit: Commit) -> Committed:
        if self._kept is None:
            self._kept = self._durability()
        return super().commit(commit)

    def check(self) -> list[Finding]:
        client = self._client
        nodes = [check.Node(f"{at[0]}:{at[1]}" if client.cluster else "", partial(self._ask, at)) for at in client.primaries()]
        return check.check(
            nodes,
            partial(check.write_and_read, client),
            full=self._asked == "full",
            wait_replicas=client.wait_replicas,
            cluster=client.cluster,
        )

    def _ask(self, at: Address, *command: Any) -> Any:
        try:
            return self._client.ask(at, *command)
        except Refused as error:
            raise check.Refused(str(error)) from None

    def write_task(self, image: Image, *, over: Image | None = None) -> bool:
        _refuse_numbers(image)
        refuse_names(image.row.task, image.writes)
        return super().write_task(image, over=over)

    def close(self) -> None:
        if self._client.closed:
            return
        left = self._renewals.stop()
        try:
            # What a closed store held is free, as after a death: nobody is left who could release it.
            if left:
                self._forsake(left)
        except SafepointError:
            pass  # age will tell, and on this host the process
        self._beats.close()
        self._client.close()


def _refuse_numbers(image: Image) -> None:
    last = image.numbers
    found = [last.seq, last.call, last.pause, *(row.seq for row in image.checkpoints)]
    found += [row.no for row in image.calls]
    found += [row.no for row in image.pauses]
    for what, most, number in (("number", HIGHEST, max(found)), ("fence", HIGHEST_FENCE, whole.fence_of(image))):
        if number > most:
            raise UsageError(
                f"a {what} of task {image.row.task!r} is too high for Redis",
                f"it is {number}, and {most} is the limit",
                "Keep the task in another store.",
                task=image.row.task,
            )

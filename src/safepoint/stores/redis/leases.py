"""Leases in Redis: fields of the task's hash, and the server's time. What they promise is told in ``stores.renewing``."""

from __future__ import annotations

import secrets
import time
from contextlib import suppress
from typing import Any

from safepoint import _probe
from safepoint.errors import Damaged, SafepointError, Unavailable
from safepoint.model import check_id
from safepoint.rows import Grant, Guard, LeaseRow, TaskPatch
from safepoint.stores import holder as people
from safepoint.stores.foreseen import Foreseen
from safepoint.stores.redis import layout
from safepoint.stores.redis.client import Client
from safepoint.stores.redis.commit import now, patched
from safepoint.stores.renewing import Claim, Renewals, Renewed, asking, clock, is_dead, this_process

__all__ = ["Leases"]


class Leases:
    """Needs both clients, what is foreseen, the renewals and the TTL from the store."""

    _client: Client
    _beats: Client
    _foreseen: Foreseen
    _renewals: Renewals
    _ttl: int

    def acquire(self, task: str, holder: bytes, *, steal: bool = False) -> Grant:
        check_id(task)
        token = secrets.token_hex(16)
        try:
            with asking(token):
                return self._acquire(task, holder, token, steal)
        except BaseException:
            self._renewals.interrupted(token)
            raise

    def _acquire(self, task: str, holder: bytes, token: str, steal: bool) -> Grant:
        client = self._client
        deadline = client.deadline()
        announced, dead, asked, deleted = 0, "", "", b""
        while True:
            sent_at = clock()
            lease = int(self._renewals.lease * 1_000_000)
            args = [
                self._ttl,
                token,
                bytes(holder),
                this_process(),
                lease,
                int(steal),
                dead,
                asked,
                now(),
                task.encode(),
                announced,
                deleted,
            ]
            try:
                word, n, *more = client.write("acquire", client.keys.of(task), args, deadline=deadline)
            except SafepointError as error:
                if error.details.get("unknown"):
                    error.details["task"] = task
                raise
            self._foreseen.put(task, layout.numbers_of(n))
            if word == b"granted":
                break
            if word == b"floor":  # of a task that never had a lease
                deleted = client.command("GET", client.keys.fences, deadline=deadline) or b"0"
            elif word == b"announce":
                client.announce(task, deadline=deadline)
                announced = 1
            else:
                theirs, process, who, at = more
                if is_dead(process, theirs.decode()):
                    dead = theirs.decode()
                elif word == b"held":
                    raise people.lease_held(task, who, int(at))
                else:
                    asked = theirs.decode()
        fence, previous, presumed = more
        _probe.at("acquire.after")
        guard = Guard(int(fence), token)
        self._renewals.lose(task, token)
        grant = Grant(guard, previous.decode(), int(presumed), self._renewals.claim(task, guard, sent_at))
        if client.cluster and not announced:
            # The index lies on other nodes, and one of them may have lost the task's name in a failover.
            with suppress(SafepointError):
                client.announce(task, deadline=min(deadline, time.monotonic() + 1))
        return grant

    def release(self, task: str, grant: Grant, patch: TaskPatch | None = None) -> None:
        fence, token = grant.guard
        args = [self._ttl, fence, token, now(), *patched(patch)]
        if isinstance(grant.handle, Claim):
            grant.handle.leaving = True
        try:
            self._client.write("release", self._client.keys.of(task), args)
        except SafepointError as error:
            if not error.details.get("unknown"):
                raise
            raise Unavailable(
                f"whether task {task!r} was released is not known", str(error), "Release it again.", task=task, unknown=True
            ) from error
        # After the row: the other way round, the holder would look dead for a moment.
        if isinstance(grant.handle, Claim):
            self._renewals.let_go(grant.handle)
        _probe.at("release.after")

    def abandon(self, task: str, grant: Grant) -> None:
        if isinstance(grant.handle, Claim):
            self._renewals.let_go(grant.handle, silently=True)

    def lease(self, task: str) -> LeaseRow | None:
        found = self._client.script("lease", self._client.keys.of(task))
        id, fence, token, state, until, gone, process, holder, at, presumed, time = found
        if id is None or fence is None:
            return None
        try:
            row = LeaseRow(
                task=task,
                fence=int(fence),
                token=token.decode(),
                lease_id=int(fence),
                state=state.decode(),
                holder=holder,
                acquired_at=int(at),
                presumed=int(presumed),
                until=int(until),
                live=state == b"held" and gone != b"1" and int(until) > int(time) and not is_dead(process, token.decode()),
            )
        except (AttributeError, TypeError, ValueError):
            raise Damaged(
                f"the lease of task {task!r} is damaged", "its values are of other types", "Restore the store."
            ) from None
        stopped = row.live and people.is_stopped(people.read(holder))
        return LeaseRow(**{**{f: getattr(row, f) for f in row.__struct_fields__}, "stopped": stopped})

    def holds(self, task: str, guard: Guard) -> bool:
        self._client.refuse_if_closed()
        return self._renewals.holds(task, guard)

    # -- for the thread that renews

    def _renew(self, claims: list[Claim]) -> Renewed:
        lease = int(self._renewals.lease * 1_000_000)
        answers = self._each("renew", claims, [[*c.guard, lease] for c in claims])
        silent = {token: str(answer) for token, answer in answers if isinstance(answer, SafepointError)}
        return {token for token, answer in answers if answer == 1}, silent

    def _forsake(self, claims: list[Claim]) -> None:
        self._each("forsake", claims, [[self._ttl, *c.guard] for c in claims])

    def _each(self, name: str, claims: list[Claim], args: list[list[Any]]) -> list[tuple[str, Any]]:
        calls = [(self._beats.keys.of(claim.task), given) for claim, given in zip(claims, args, strict=True)]
        self._beats.learn(self._client)
        # Not for longer than a beat: while one node is waited for, nothing is renewed on the others.
        answers = self._beats.each(name, calls, time.monotonic() + min(self._renewals.every, self._beats.timeout))
        return [(claim.guard.token, answer) for claim, answer in zip(claims, answers, strict=True)]

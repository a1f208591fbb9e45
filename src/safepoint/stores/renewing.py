"""Leases with a clock: for stores on servers, where no lock of an operating system can prove that a holder lives.

A lease is a row with the server's own time at which it ends. Its holder has it renewed every few seconds by a thread of its own,
and keeps by its own clock until when it surely holds: counted from before the request was sent, so that it stops sooner than
the server would let another in. An outage that is shorter than the lease loses nothing. A holder that ended on this very host
is seen to be dead at once, by its process; elsewhere only its age tells, and that proves nothing.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

from safepoint.errors import SafepointError
from safepoint.rows import Guard
from safepoint.stores import holder as people
from safepoint.stores.forking import each_at_fork

__all__ = ["Claim", "Renewals", "Renewed", "asking", "clock", "is_dead", "this_process"]

log = logging.getLogger("safepoint")

EVERY = 5.0
"""Seconds between two beats, or a sixth of the lease, if that is less."""
MARGIN = 0.05
"""The part of a lease that is not relied upon: clocks of two hosts do not run equally fast."""


def clock() -> float:
    """Seconds of a clock that nobody sets, and that goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class Claim:
    """A lease that this process has: ``Grant.handle`` of the stores that renew."""

    __slots__ = ("__weakref__", "guard", "leaving", "lost", "pid", "task", "until")

    def __init__(self, task: str, guard: Guard, until: float) -> None:
        self.task = task
        self.guard = guard
        self.until = until
        self.lost = False
        self.leaving = False
        """Its release is under way: that the server does not know it any more means nothing."""
        self.pid = os.getpid()

    def __repr__(self) -> str:
        return f"<Claim task={self.task!r} fence={self.guard.fence} lost={self.lost}>"


_claims: weakref.WeakValueDictionary[str, Claim] = weakref.WeakValueDictionary()
"""By token, those of all stores of this process: a holder of this process whose token is not here has let go without a word."""
# Re-entrant: a run may be collected, and let go, at any allocation, also in the middle of a claim.
_claims_lock = threading.RLock()
_asked_for: set[str] = set()
"""Tokens that requests for a lease are under way with: the server may have granted one of which nobody has heard here yet."""


Renewed = tuple[Collection[str], Mapping[str, str]]
"""Tokens of leases that are still held; and of those that were not heard of, with why."""


class Renewals:
    """The claims that one store has taken, and the thread that renews them.

    Args:
        lease: Seconds that the server gives at each renewal.
        renew: Renews claims in as few trips as can be, and returns the tokens of those that are still held, and of those that
            nobody answered for, with why. Any other is lost. On a connection of its own, since the others may all be waiting;
            and where some may be silent while others answer, within ``every`` seconds: until it returns, nothing is held for
            longer. Raises a SafepointError if nobody answers.
        forsake: Tells the server that these claims were let go of, if it can; what it raises is forgotten.
    """

    def __init__(
        self,
        lease: float,
        renew: Callable[[list[Claim]], Renewed],
        forsake: Callable[[list[Claim]], None],
    ) -> None:
        self.lease = lease
        self.every = min(EVERY, lease / 6)
        # Weakly: a store that nobody has any more must not live on by its thread.
        self._renew: Any = weakref.WeakMethod(renew)
        self._forsake: Any = weakref.WeakMethod(forsake)
        self._start_over()
        each_at_fork(self)

    def _start_over(self) -> None:
        self._mine: dict[str, Claim] = {}
        self._left: list[Claim] = []
        # Entered by itself and not by the condition, whose own ``with`` is Python code: Ctrl-C in its middle would leave it locked.
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._silent = False

    def after_fork(self) -> None:
        # The child holds nothing: its parent does, and goes on renewing.
        global _claims, _claims_lock
        _claims_lock = threading.RLock()
        _claims = weakref.WeakValueDictionary()
        stopped = self._stopped
        self._start_over()
        self._stopped = stopped

    # -- taking and letting go

    def claim(self, task: str, guard: Guard, sent_at: float) -> Claim:
        """A lease was granted to a request that was sent at ``sent_at`` (by ``clock``): from now on it is renewed."""
        claim = Claim(task, guard, sent_at + self.lease)
        with _claims_lock:
            _claims[guard.token] = claim
        with self._lock:
            self._mine[guard.token] = claim
            # (Ctrl-C may have come before it was started.)
            if (self._thread is None or not self._thread.is_alive()) and not self._stopped:
                self._thread = threading.Thread(target=_beat, args=(weakref.ref(self),), name="safepoint-leases", daemon=True)
                self._thread.start()
            self._wake.notify()
        return claim

    def let_go(self, claim: Claim, *, silently: bool = False) -> None:
        """A lease was released; or ``silently``, when its row still says held, and is told later that nobody is behind it."""
        # In this order, for Ctrl-C in its middle: one that is not renewed ends by itself.
        with self._lock:
            known = self._mine.pop(claim.guard.token, None) is not None
            if silently and known and not claim.lost and claim.pid == os.getpid():
                self._left.append(claim)
                self._wake.notify()
        with _claims_lock:
            _claims.pop(claim.guard.token, None)

    def interrupted(self, token: str) -> None:
        """Whoever asked for a lease with this token will not hear of it: if it was granted, nobody has it."""
        if (claim := self._mine.get(token)) is not None:
            self.let_go(claim, silently=True)

    def lose(self, task: str, token: str) -> None:
        """Another holder was seen: whoever of this store has another token for the task has lost it."""
        with self._lock:
            for claim in self._mine.values():
                if claim.task == task and claim.guard.token != token:
                    claim.lost = True

    def holds(self, task: str, guard: Guard) -> bool:
        """Whether the lease is surely still this guard's; asks nobody."""
        claim = _claims.get(guard.token)
        if claim is None or claim.lost or claim.task != task or claim.guard != guard:
            return False
        return clock() < claim.until - self.lease * MARGIN

    def stop(self) -> list[Claim]:
        """End the thread. Returns the claims that were held: they are to be forsaken by the caller, who still has a connection."""
        with self._lock:
            self._stopped = True
            left = [*self._mine.values(), *self._left]
            self._mine, self._left = {}, []
            thread = self._thread
            self._wake.notify()
        with _claims_lock:
            for claim in left:
                _claims.pop(claim.guard.token, None)
        if thread is not None and thread is not threading.current_thread():
            thread.join(self.every + 1)
        return left

    # -- the thread

    def _rest(self, seconds: float) -> bool:
        """Wait for the next beat, or for something to say. False: there is nothing more to do."""
        with self._lock:
            if not self._left and not self._stopped:
                self._wake.wait(seconds)
            if self._stopped or not (self._mine or self._left):
                self._thread = None
                return False
            return True

    def _say_goodbyes(self) -> None:
        with self._lock:
            left, self._left = self._left, []
        forsake = self._forsake()
        if left and forsake is not None:
            try:
                forsake(left)
            except SafepointError:
                pass  # age will tell, and on this host the process
            except Exception:  # whatever it is, the leases that are held must go on
                log.warning("%s could not be given up", _leases(len(left)), exc_info=True)

    def _renew_all(self) -> bool:
        """One beat; False if it should soon be done again, as not all were heard of."""
        with self._lock:
            mine = [claim for claim in self._mine.values() if not claim.lost]
        renew = self._renew()
        if not mine or renew is None:
            return True
        sent_at = clock()
        try:
            held, silent = renew(mine)
        except Exception as error:  # also one that nobody thought of: a thread that ends on it would let all leases run out
            known_of = isinstance(error, SafepointError)
            self._say_silent(len(mine), str(error) if known_of else type(error).__name__, exc_info=not known_of)
            return False
        for claim in mine:
            if claim.guard.token in held:
                claim.until = max(claim.until, sent_at + self.lease)
            elif claim.guard.token not in silent:
                with self._lock:
                    known = self._mine.get(claim.guard.token) is claim
                    claim.lost = True
                if known and not claim.leaving:  # else it was released meanwhile
                    log.warning("the lease on task %s with fence %d was taken over", claim.task, claim.guard.fence)
        if silent:
            self._say_silent(len(silent), next(iter(silent.values())))
            return False
        if self._silent:
            log.info("leases are renewed again")
            self._silent = False
        return True

    def _say_silent(self, tasks: int, why: str, *, exc_info: bool = False) -> None:
        if not self._silent:  # once for an outage, not once for each try
            verb = "is" if tasks == 1 else "are"
            log.warning("%s %s not renewed, trying again: %s", _leases(tasks), verb, why, exc_info=exc_info)
        self._silent = True


def _leases(tasks: int) -> str:
    return "the lease of 1 task" if tasks == 1 else f"leases of {tasks} tasks"


def _beat(ref: weakref.ref[Renewals]) -> None:
    """The thread: beats until there is nothing to renew, or nobody has the store any more."""
    due = 0.0
    while (renewals := ref()) is not None:
        every = renewals.every
        due = due or clock() + every
        if not renewals._rest(max(0.0, min(due - clock(), every))):
            return
        renewals._say_goodbyes()
        if clock() >= due:
            # After a failure soon again: what is left of the lease is the time there is.
            due = clock() + (every if renewals._renew_all() else min(1.0, every / 2))
        del renewals


@contextmanager
def asking(token: str) -> Iterator[None]:
    """While a lease is asked for, up to and with ``Renewals.claim``: to the other threads its holder is alive."""
    _asked_for.add(token)
    try:
        yield
    finally:
        _asked_for.discard(token)


# -- who is dead


def this_process() -> bytes:
    """Who this process is, for a lease row: nothing of it is shown, and it is compared only on the host it lives on."""
    return _process(os.getpid())


@cache
def _process(pid: int) -> bytes:
    return people.describe("", started=_started(pid))


def _started(pid: int) -> str | None:
    """When a process began, in ticks since the boot; '' if none of that number runs any more; None if that cannot be seen."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except OSError:
        pass  # it is somebody else's, whose /proc entry may be hidden: that is no sign of its end
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            # The name of the program stands in brackets and may hold anything, brackets too.
            fields = f.read().rpartition(b") ")[2].split()
    except OSError:
        return None
    if len(fields) < 20:
        return None
    # A zombie still has its entry; and so has a process whose first thread has ended before the others.
    if fields[0] in {b"Z", b"X", b"x"} and int(fields[17]) <= 1:
        return ""
    return fields[19].decode("ascii", "replace")


def is_dead(process: bytes, token: str) -> bool:
    """Whether a lease's holder is proven to have ended; False if that cannot be seen from here.

    Args:
        process: What ``this_process`` gave in the holder.
    """
    who = people.read(process)
    pid, started = who.get("pid"), who.get("started")
    if not isinstance(pid, int) or not started or not people.is_local(who):
        return False
    now = _started(pid)
    if pid == os.getpid() and now == started:
        # In this order: a token is a claim before it is no longer asked for.
        return token not in _asked_for and token not in _claims
    return now is not None and now != started

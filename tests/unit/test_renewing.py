"""Leases with a clock, as a holder keeps them: renewed, lost, let go of, and proven dead."""

import gc
import itertools
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import weakref

import msgspec
import pytest

from safepoint.errors import Unavailable
from safepoint.rows import Guard
from safepoint.stores import holder, renewing
from safepoint.stores.renewing import Renewals, clock, is_dead, this_process

LEASE = 0.6


class Server:
    """What a store does for its leases, against a dictionary."""

    def __init__(self, lease=LEASE):
        self.tokens = set()
        self.times = []
        self.out = self.strange = False
        self.silent = {}
        self.told = []
        self.renewals = Renewals(lease, self.renew, self.forsake)

    @property
    def beats(self):
        return len(self.times)

    def renew(self, claims):
        self.times.append(clock())
        if self.out:
            raise Unavailable("nobody answers")
        if self.strange:
            raise ValueError("no host")
        asked = {claim.guard.token for claim in claims}
        return asked & self.tokens - self.silent.keys(), self.silent

    def forsake(self, claims):
        if self.out:
            raise Unavailable("nobody answers")
        if self.strange:
            raise ValueError("no goodbye")
        self.told += [claim.guard.token for claim in claims]

    def take(self, task="t", fence=1, token=None):
        guard = Guard(fence, token or os.urandom(8).hex())
        self.tokens.add(guard.token)
        return guard, self.renewals.claim(task, guard, clock())


@pytest.fixture
def server():
    server = Server()
    yield server
    server.renewals.stop()


def until(seen, seconds=5.0):
    end = time.monotonic() + seconds
    while not seen():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def test_it_is_held_for_longer_than_its_time(server):
    guard, _ = server.take()
    end = clock() + 3 * LEASE
    while clock() < end:
        assert server.renewals.holds("t", guard)
        time.sleep(0.01)
    assert server.beats > 3


def test_only_the_very_guard_holds_the_very_task(server):
    guard, _ = server.take()
    assert not server.renewals.holds("u", guard)
    assert not server.renewals.holds("t", Guard(2, guard.token))
    assert not server.renewals.holds("t", Guard(1, "other"))


def test_a_takeover_is_seen_at_the_next_beat(server, caplog):
    guard, claim = server.take()
    server.tokens.clear()
    until(lambda: claim.lost)
    assert not server.renewals.holds("t", guard)
    assert "taken over" in caplog.text


def test_it_ends_before_the_server_lets_another_in_and_comes_back_after_a_short_outage(server, caplog):
    guard, claim = server.take()
    until(lambda: server.beats > 1)
    server.out = True
    sure = now = clock()
    # The clock is read before each look: a late wake-up of this thread is none of the holder's.
    while server.renewals.holds("t", guard):
        sure = now
        time.sleep(0.005)
        now = clock()
        assert now < claim.until + 5, "it did not happen"
    # A twentieth of the lease is not relied upon: without that, the last look would have come closer.
    assert sure < claim.until - 0.04 * LEASE
    assert not claim.lost
    server.out = False
    until(lambda: server.renewals.holds("t", guard))
    assert [r.levelno for r in caplog.records].count(logging.WARNING) == 1, "one line for an outage"


def test_an_outage_that_is_shorter_than_the_lease_loses_nothing():
    lease = 3  # what is left of it after the outage must be more than a busy machine may take
    server = Server(lease)
    guard, _ = server.take()
    until(lambda: server.beats > 1)
    server.out = True
    end = clock() + lease / 2
    while clock() < end:
        assert server.renewals.holds("t", guard)
        time.sleep(0.01)
    server.out = False
    until(lambda: server.beats > 8)
    assert server.renewals.holds("t", guard)
    server.renewals.stop()


def test_what_is_not_heard_of_keeps_its_time_and_is_asked_for_soon_while_the_others_go_on(caplog):
    lease = 2  # what is left of it must be more than a busy machine may take
    server = Server(lease)
    (first, near), (second, far) = server.take("near"), server.take("far")
    until(lambda: server.beats > 1)
    server.silent = {second.token: "its node is silent"}
    beats, since = server.beats, clock()
    while clock() < since + lease:  # (a beat may have been under way)
        assert server.renewals.holds("near", first)
        assert not far.lost
        time.sleep(0.01)
    assert far.until <= since + lease
    assert not server.renewals.holds("far", second)
    # Not how many there were, which a busy machine makes fewer; two usual beats are never so close to each other.
    gaps = [after - before for before, after in itertools.pairwise(server.times[beats:])]
    assert min(gaps) < 0.75 * server.renewals.every, "it is asked for more often than at each beat"
    server.silent = {}
    until(lambda: server.renewals.holds("far", second))
    assert (near.lost, far.lost) == (False, False)
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert said == ["the lease of 1 task is not renewed, trying again: its node is silent"], "one line for an outage"
    server.renewals.stop()


def test_who_is_lost_is_told_of_apart_from_who_is_not_heard_of(server):
    (_, one), (second, two) = server.take("a"), server.take("b")
    server.silent = {second.token: "silent"}
    server.tokens.clear()
    until(lambda: one.lost)
    assert not two.lost


def test_an_error_that_nobody_thought_of_ends_no_thread(server, caplog):
    guard, _ = server.take()
    _, left = server.take("u")
    until(lambda: server.beats > 1)
    server.strange = True
    server.renewals.let_go(left, silently=True)
    until(lambda: "no host" in caplog.text)
    server.strange = False
    beats = server.beats
    until(lambda: server.beats > beats + 6)
    assert server.renewals.holds("t", guard)


def test_another_holder_that_is_seen_takes_it_at_once(server):
    guard, _ = server.take()
    second, _ = server.take(fence=2)
    server.renewals.lose("t", second.token)
    assert not server.renewals.holds("t", guard)
    assert server.renewals.holds("t", second)


def test_what_was_let_go_of_silently_is_told_and_what_was_released_is_not(server):
    (first, one), (second, two) = server.take("a"), server.take("b")
    server.renewals.let_go(one, silently=True)
    server.renewals.let_go(two)
    assert not server.renewals.holds("a", first)
    assert not server.renewals.holds("b", second)
    until(lambda: server.told)
    assert server.told == [first.token]


def test_the_thread_ends_with_the_last_claim_and_begins_again(server):
    _, claim = server.take()
    thread = server.renewals._thread
    server.renewals.let_go(claim)
    until(lambda: not thread.is_alive())
    guard, _ = server.take()
    until(lambda: server.beats > 0)
    assert server.renewals.holds("t", guard)


def test_stop_gives_back_what_was_held_and_ends_the_thread(server):
    guard, claim = server.take()
    thread = server.renewals._thread
    assert server.renewals.stop() == [claim]
    assert not thread.is_alive()
    assert not server.renewals.holds("t", guard)


def test_a_store_that_nobody_has_any_more_does_not_live_on_by_its_thread():
    server = Server()
    guard = server.take()[0]
    thread, gone = server.renewals._thread, weakref.ref(server)
    del server
    gc.collect()
    assert gone() is None
    thread.join(5)
    assert not thread.is_alive()
    assert is_dead(this_process(), guard.token)


def test_threads_that_take_and_let_go_at_once_leave_nothing(server):
    def work():
        for _ in range(50):
            guard, claim = server.take(os.urandom(4).hex())
            assert server.renewals.holds(claim.task, guard)
            server.renewals.let_go(claim, silently=True)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    until(lambda: len(server.told) == 200)
    assert server.renewals._mine == {}


def test_a_forked_child_holds_nothing_and_its_parent_goes_on(server):
    guard, _ = server.take()
    with server.renewals._wake:
        child = os.fork()
        if not child:
            held = server.renewals.holds("t", guard)
            mine, _ = server.take("u")
            good = not held and server.renewals.holds("u", mine) and is_dead(this_process(), guard.token)
            os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0
    beats = server.beats
    until(lambda: server.beats > beats)
    assert server.renewals.holds("t", guard)


# -- who is dead

SLEEPER = """
import sys, time
from safepoint.stores.renewing import this_process
sys.stdout.buffer.write(this_process().hex().encode() + b"\\n")
sys.stdout.flush()
time.sleep(60)
"""


@pytest.fixture
def other():
    process = subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE)
    yield process, bytes.fromhex(process.stdout.readline().decode())
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_process_is_dead_when_it_was_killed_and_not_when_it_is_stopped(other):
    process, who = other
    assert not is_dead(who, "token")
    process.send_signal(signal.SIGSTOP)
    until(lambda: holder.is_stopped(holder.read(who)))
    assert not is_dead(who, "token")
    process.kill()
    until(lambda: is_dead(who, "token"))  # a zombie already is
    process.wait()
    assert is_dead(who, "token")


def test_a_number_that_went_to_another_process_is_no_sign_of_life(other):
    _, who = other
    assert is_dead(msgspec.msgpack.encode(holder.read(who) | {"started": "1"}), "token")


@pytest.mark.parametrize("field", ["host", "boot_id", "pid_ns"])
def test_nothing_is_known_of_another_host(other, field):
    process, who = other
    process.kill()
    process.wait()
    elsewhere = msgspec.msgpack.encode(holder.read(who) | {field: "elsewhere"})
    assert not is_dead(elsewhere, "token")


@pytest.mark.parametrize("who", [b"", b"\xc1", b"\x80", b"\x81\xa3pid\x01", b"\x81\xa3pid\xa1x"])
def test_what_names_no_process_proves_nothing(who):
    assert not is_dead(who, "token")


def test_in_this_process_the_claims_tell(server):
    guard, claim = server.take()
    assert not is_dead(this_process(), guard.token)
    server.renewals.let_go(claim)
    assert is_dead(this_process(), guard.token)


def test_a_process_that_cannot_be_seen_is_not_taken_for_dead(monkeypatch, other):
    # As where /proc hides the processes of others, or is not there.
    _, who = other

    def hidden(*_args, **_kwargs):
        raise PermissionError

    monkeypatch.setattr("builtins.open", hidden)
    assert renewing._started(holder.read(who)["pid"]) is None
    assert not is_dead(who, "token")

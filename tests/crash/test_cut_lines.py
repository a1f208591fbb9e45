"""A line to the server that is cut, reset, closed by halves, delayed and dead, at every message of a life.

A fault that leaves the server reachable is not noticed by the caller. One that lasts longer than ``timeout`` is ``Unavailable``,
within that time; when it is over, the same object goes on. In both, what is stored at the end is what is stored without any fault.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

import safepoint
from safepoint import NotFound, Retention, State, Unavailable
from tests.support import rawrows
from tests.support.lines import Life, facts
from tests.support.proxy import Message, Proxy
from tests.support.scale import scale
from tests.support.seeds import fresh_rng
from tests.support.stores import CLOCKED, Place, place, server_of, through
from tests.support.wire import PROTOCOLS

SHORT = 0.6
"""The ``timeout`` of a life in which somebody is to run into it."""
MARGIN = 1.0
"""By how much an error may be late, on a machine with other things to do: up to two processes for each of its cores."""

Fault = tuple[str, str, str]
"""What, in which direction, at which part of the message."""
BRIEF: tuple[Fault, ...] = (
    ("cut", "up", "before"),
    ("cut", "up", "answer"),
    ("reset", "up", "inside"),
    ("half", "up", "after"),
    ("reset", "up", "answer"),
    ("cut", "down", "before"),
    ("reset", "down", "inside"),
    ("half", "down", "before"),
)
LASTING: tuple[Fault, ...] = (
    ("hold", "up", "before"),
    ("hold", "up", "after"),
    ("delay", "up", "before"),
    ("delay", "down", "before"),
    ("outage", "up", "before"),
    ("outage", "up", "answer"),
    ("lost", "up", "before"),
)
"""``outage``: cut, and nobody is let in. ``lost``: held, and what was held is never delivered."""


class Line:
    """A store, a proxy before it, and what a life leaves there if nothing happens."""

    def __init__(self, where: Place, proxy: Proxy) -> None:
        self.place = where
        self.proxy = proxy
        self.url = through(where.url, proxy.port)
        self.insert = where.make_ledger()
        self.direct = safepoint.open(where.url, retention=Retention.keep_all())
        self.prefix = f"{uuid.uuid4().hex[:6]}-"
        self._names = itertools.count(1)

    def live(self, timeout: float, healed: Any, late: float = 0.0) -> tuple[str, Life]:
        name = f"{self.prefix}{next(self._names)}"
        with safepoint.open(self.url, retention=Retention.keep_all(), timeout=timeout) as cp:
            life = Life(cp, name, self.insert, healed, late)
            life.live()
        return name, life

    def facts(self, name: str, raw: dict[str, rawrows.RawTask]) -> dict[str, Any]:
        return facts(self.direct, name, self.place.read_ledger() if self.insert else [], raw)

    def clear(self) -> None:
        """Take all tasks away: what lies there is read as a whole after each life."""
        for info in self.direct.tasks():
            self.direct.delete_task(info.task_id)

    @cached_property
    def whole(self) -> tuple[dict[str, list[list[int]]], dict[str, Any]]:
        """A life without a fault: the numbers of its messages, request by request and answer by answer, as many as there surely
        are; and what it leaves. Of many requests in a row that are alike, as where a store looks through an index, some."""
        self.live(5.0, lambda: None)  # makes the tables
        lives = []
        for _ in range(2):
            self.proxy.rewind()
            name, life = self.live(5.0, lambda: None)
            assert not life.unavailable
            lives.append(self.proxy.messages)
        least = min(lives, key=len)
        return {"up": self._groups(least, "up")[:-4], "down": self._groups(least, "down")[:-4]}, self.facts(
            name, rawrows.read_tasks(self.place.url)
        )

    def _groups(self, messages: list[Message], way: str) -> list[list[int]]:
        pair = PROTOCOLS[self.proxy.protocol]()
        ends = pair.ends_request if way == "up" else pair.ends_answer
        found: list[list[int]] = [[]]
        kinds: list[str] = [""]
        for m in messages:
            if m.direction == way:
                found[-1].append(m.number)
                kinds[-1] += m.kind
                if ends(m.kind):
                    found.append([])
                    kinds.append("")
        alike = [way == "up" and kinds[max(0, i - 2) : i + 3].count(kind) == 5 for i, kind in enumerate(kinds)]
        return [group for i, group in enumerate(found[:-1]) if i % 10 == 0 or not alike[i] or self.proxy.protocol != "resp"]


@contextmanager
def lined(kind: str, folder: Path) -> Iterator[Line]:
    with place(kind, folder) as where, Proxy(*server_of(kind)) as proxy:
        made = Line(where, proxy)
        yield made
        made.direct.close()


ON_A_LINE = [kind for kind in CLOCKED if kind != "cluster"]


@pytest.fixture(scope="module", params=ON_A_LINE)
def line(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Line]:
    """For lives, each of which has tasks of its own."""
    with lined(request.param, tmp_path_factory.mktemp("line")) as made:
        yield made


@pytest.fixture(params=ON_A_LINE)
def empty(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Line]:
    with lined(request.param, tmp_path) as made:
        yield made


def moments(groups: list[list[int]], small: int, most: int) -> list[int]:
    """At which messages a fault strikes: one of each request or answer, or of some spread over the life, with a random offset."""
    rng = fresh_rng()
    every = -(-len(groups) // scale(small, most))
    return [rng.choice(group) for group in groups[rng.randrange(every) :: every]]


@pytest.mark.scaled
@pytest.mark.parametrize("fault", BRIEF, ids="-".join)
def test_a_line_that_breaks_is_not_noticed(fault: Fault, line: Line) -> None:
    seen, expected = line.whole
    action, way, part = fault
    for n in moments(seen[way], 1, 9):
        when = f"{fault} at {n}"
        line.proxy.rewind()
        line.proxy.arm(action, way, n, part)
        name, life = line.live(5.0, lambda: None)
        assert line.proxy.fired, when
        # What a transactional tool has done is rolled back with its connection: the store cannot do it again for it.
        noticed = [u for u in life.unavailable if u[0] != "call book (begun)"]
        assert not noticed, f"{when}: {noticed}"
        check(line, name, life, expected, when)


def check(line: Line, name: str, life: Life, expected: dict[str, Any], when: str) -> None:
    raw = rawrows.read_tasks(line.place.url)
    found = line.facts(name, raw)
    if life.unavailable:  # an intent that landed late is no attempt, and what goes on from it is one more
        found, expected = without_attempts(found), without_attempts(expected)
    wrong = list(differences(found, expected))
    assert not wrong, f"{when}: {wrong}\n{[(what, round(took, 2)) for what, took, _ in life.unavailable]}"
    for task, seq, id in life.acknowledged:
        if task == life.a:
            assert [c.id for c in raw[task].checkpoints if c.seq == seq] == [id], f"{when}: {task}@{seq} was acknowledged"
    line.clear()


def without_attempts(facts: dict[str, Any]) -> dict[str, Any]:
    return {
        key: {**task, "calls": [call[:-1] for call in task["calls"]]} if isinstance(task, dict) and "calls" in task else task
        for key, task in facts.items()
    }


def differences(found: Any, expected: Any, where: str = "") -> Iterator[str]:
    """What differs, as short as it can be told: the whole facts are pages long."""
    if isinstance(found, dict) and isinstance(expected, dict):
        for key in found.keys() | expected.keys():
            yield from differences(found.get(key), expected.get(key), f"{where}.{key}")
    elif isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        for i, pair in enumerate(zip(found, expected, strict=True)):
            yield from differences(*pair, f"{where}[{i}]")
    elif found != expected:
        yield f"{where}: {str(found)[:600]} and not {str(expected)[:600]}"


@pytest.mark.scaled
@pytest.mark.parametrize("fault", LASTING, ids="-".join)
def test_a_line_that_stays_broken_is_unavailable_in_time(fault: Fault, line: Line) -> None:
    seen, expected = line.whole
    action, way, part = fault
    noticed = 0

    def healed() -> None:
        if action == "lost":
            line.proxy.cut()
        line.proxy.heal()

    def late_at(n: int) -> list[str]:
        """A life with the fault at this message; which calls took too long in it."""
        nonlocal noticed
        when = f"{fault} at {n}"
        line.proxy.rewind()
        if action == "delay":
            line.proxy.arm("delay", way, n, part, seconds=2 * SHORT)
        else:
            line.proxy.arm({"outage": "cut", "lost": "hold"}.get(action, action), way, n, part, outage=action == "outage")
        with mended_after(WITHOUT_END, healed) as waited:
            name, life = lived(line, healed, 2 * SHORT if action == "delay" else 0.0)
        most = in_time()
        assert line.proxy.fired, when
        noticed += bool(life.unavailable)
        calls = [u for u in life.unavailable if not (waited and u[0].startswith("call book"))]
        late = [f"{when}: {what} took {took:.2f} s: {error}" for what, took, error in calls if took >= most]
        if life.slowest[1] >= most and not (waited and life.slowest[0].startswith("call book")):
            late.append(f"{when}: {life.slowest}")
        if action == "delay":
            time.sleep(2 * SHORT)  # what was under way arrives now
        check(line, name, life, expected, when)
        return late

    for n in moments(seen[way], 1, 3):
        # A verb of several requests may pay the timeout more than once, as a resume that fails does for its release, and then little
        # of the margin is left for the machine. What the library does wrong is as late the second time.
        if late := late_at(n):
            again = late_at(n)
            assert not again, [*late, *again]
    assert noticed or action in {"delay", "outage"}  # the other connections of the pool may do


WITHOUT_END = 10.0
"""Seconds. A transactional tool's own statement may run as long as it likes: where a line takes what is sent and never answers, which
TCP does not notice, the tool waits until the line changes."""


@contextmanager
def mended_after(seconds: float, mend: Any) -> Iterator[list[bool]]:
    """Mend the line while the block is still at it; the list is then not empty."""
    done: list[bool] = []

    def act() -> None:
        done.append(True)
        mend()

    timer = threading.Timer(seconds, act)
    timer.start()
    try:
        yield done
    finally:
        timer.cancel()
        timer.join()


def in_time() -> float:
    """How long a call may take. Where many wait for each core, each of the threads and processes that it goes through waits too."""
    return SHORT + MARGIN * max(1.0, os.getloadavg()[0] / (2 * (os.cpu_count() or 1)))


def lived(line: Line, healed: Any, late: float) -> tuple[str, Life]:
    """A life with a short timeout, in which opening may be what fails."""
    while True:
        try:
            return line.live(SHORT, healed, late)
        except Unavailable:
            healed()


@pytest.mark.scaled
def test_an_outage_shorter_than_the_timeout_is_not_noticed(line: Line) -> None:
    seen, expected = line.whole
    for i, n in enumerate(moments(seen["up"], 2, 4)):
        line.proxy.rewind()
        line.proxy.arm("hold", "up", n, ("before", "after")[i % 2])
        done = threading.Event()

        def heal(done: threading.Event = done) -> None:
            while line.proxy.fired is None and not done.wait(0.002):
                pass
            time.sleep(0.3)
            line.proxy.heal()

        healer = threading.Thread(target=heal)
        healer.start()
        try:
            name, life = line.live(5.0, lambda: None)
        finally:
            done.set()
            healer.join()
        assert line.proxy.fired
        assert not life.unavailable
        check(line, name, life, expected, f"held for a while at {n}")


# -- field case 58: the outcome of a commit is not known


def requests(empty: Line, do: Any) -> int:
    """How many messages up something takes, on a connection that is there."""
    empty.proxy.rewind()
    do()
    return empty.proxy.seen["up"]


def test_field_case_58_a_save_whose_answer_is_lost_is_one_version(empty: Line) -> None:
    with safepoint.open(empty.url, retention=Retention.keep_all(), timeout=5.0) as cp:
        state = State("t")
        cp.save(state)
        saved = 1
        count = requests(empty, lambda: cp.save(state))
        saved += 1
        for n in range(1, count + 1):
            empty.proxy.rewind()
            empty.proxy.arm("cut", "up", n, "answer")
            assert cp.save(state).seq == saved + 1
            assert empty.proxy.fired
            saved += 1
            raw = rawrows.read_tasks(empty.place.url)["t"]
            assert [c.seq for c in raw.checkpoints] == list(range(1, saved + 1))


def test_field_case_58_a_save_nobody_can_tell_of_has_an_id(empty: Line) -> None:
    """The line stays dead after COMMIT was sent: unknown, with an id that can be asked for; asked, it is there, once."""
    with safepoint.open(empty.url, retention=Retention.keep_all(), timeout=SHORT) as cp:
        state = State("t")
        cp.save(state)
        count = requests(empty, lambda: cp.save(state))
        known = {"there": 0, "absent": 0}
        for n in range(1, count + 1):
            before = rawrows.read_tasks(empty.place.url)["t"]
            empty.proxy.rewind()
            empty.proxy.arm("cut", "up", n, "answer", outage=True)
            with pytest.raises(Unavailable) as caught:
                cp.save(state)
            empty.proxy.heal()
            id = caught.value.details["id"]
            try:
                state = cp.load("t", id=id)
            except NotFound:
                known["absent"] += 1
                cp.save(state)
            else:
                known["there"] += 1
            after = rawrows.read_tasks(empty.place.url)["t"]
            assert len(after.checkpoints) == len(before.checkpoints) + 1
        assert known["there"]


def test_field_case_58_a_completion_whose_answer_is_lost_is_one_result(empty: Line) -> None:
    done = 0
    n = 0

    @safepoint.tool(effect="write", name=f"once {empty.place.url[-12:]}")
    def once(i: int) -> int:
        nonlocal done
        done += 1
        if n:
            # From here on the next messages are the result's.
            empty.proxy.rewind()
            empty.proxy.arm("cut", "up", n, "answer")
        return i

    with safepoint.open(empty.url, retention=Retention.keep_all(), timeout=5.0) as cp, cp.resume("t") as run:
        run.call(once, 0)
        for n in range(1, 4):
            before = done
            assert run.call(once, n) == n
            assert done == before + 1
        run.save()
    raw = rawrows.read_tasks(empty.place.url)["t"]
    assert [(c.no, c.status, c.version) for c in raw.calls] == [(i, "succeeded", 2) for i in range(1, 5)]


def test_field_case_58_a_lease_whose_answer_is_lost_is_ours_once(empty: Line) -> None:
    with safepoint.open(empty.url, timeout=5.0) as cp:
        cp.save(State("t"))
        cp.store.release("t", cp.store.acquire("t", b""))

        def take() -> int:
            grant = cp.store.acquire("t", b"")
            assert cp.store.holds("t", grant.guard)
            assert grant.previous == "released"
            cp.store.release("t", grant)
            return grant.guard.fence

        fence = 2
        count = requests(empty, take)
        for n in range(1, count + 1):
            empty.proxy.rewind()
            empty.proxy.arm("cut", "up", n, "answer")
            fence += 1
            assert take() == fence
            assert empty.proxy.fired

"""What has gone wrong with other software, each case under its number: see docs/field-cases.md."""

import ast
import asyncio
import contextlib
import gc
import json
import math
import os
import re
import socket
import threading
import time
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import InitVar, dataclass, field
from datetime import UTC, date, datetime, timedelta, timezone
from datetime import time as day_time
from decimal import Decimal
from enum import Enum, Flag, IntEnum, StrEnum
from typing import Any, ClassVar

import pytest

import safepoint
from safepoint import Conflict, Done, InDoubt, LeaseHeld, NotDone, RefusedType, Retention, State, run_agent, tool
from safepoint.codec import Registry, values
from safepoint.stores.memory import MemoryStore
from tests.support import raw, rawrows
from tests.support.paths import ROOT
from tests.support.runs import Death, Failing, died

CANARY = "c4n4ry"


def reloaded(url, value, **options):
    """A value saved by one checkpointer and loaded by another."""
    with safepoint.open(url, **options) as cp:
        cp.save(State("t", agent_state={"v": value, "nested": [{"v": (value,)}]}, messages=[value]))
    with safepoint.open(url, **options) as cp:
        state = cp.load_latest("t")
    assert type(state.agent_state["nested"][0]["v"]) is tuple
    return [state.agent_state["v"], state.agent_state["nested"][0]["v"][0], state.messages[0]]


# -- 4: any session that finished one turn can be resumed


def test_field_case_04_every_turn_is_saved_by_default(url):
    with safepoint.open(url) as kept_open:

        def finishing(n):
            return lambda run: run.finish(n)

        def turns():
            cp = safepoint.open(url)
            for n in (1, 2, 3):
                run_agent(finishing(n), task_id="t", input=f"turn {n}", turn=str(n), store=cp)
            # No close: the process is gone.

        turns()
        gc.collect()
        with safepoint.open(url) as cp:
            assert [m["content"] for m in cp.load_latest("t").messages] == ["turn 1", "turn 2", "turn 3"]
            assert run_agent(lambda run: 1 / 0, task_id="t", turn="2", store=cp).result == 2
        del kept_open


def test_field_case_04_a_run_tells_what_is_not_saved_yet(cp):
    told = []

    def step(run):
        told.append(run.status["steps_since_save"])
        if run.state.step == 4:
            run.finish()

    run_agent(step, task_id="t", store=cp, save_every=3)
    assert told == [0, 1, 2, 0, 1]


# -- 12 and 14a: growth


@pytest.mark.scaled
def test_field_case_12_storage_grows_with_what_is_new(cp):
    if not cp.store.chunked:
        pytest.skip("chunked is False")
    cp.retention = Retention.keep_all()
    state = State("t")
    at = {}
    for i in range(1, 401):
        state.step = i
        state.messages.append({"role": "user", "content": f"{i:06}" + "x" * 1000})
        cp.save(state)
        if i in {100, 200, 400}:
            at[i] = sum_of_bytes(cp)
    assert at[400] / at[200] < 2.2
    assert at[200] / at[100] < 2.4
    assert len(cp.list_checkpoints("t")) == 400, "one row a save"
    assert at[400] < 2.5 * 400 * 1000
    dry = cp.cleanup("t", keep_latest=10, dry_run=True)
    assert (len(dry.deleted), dry.kept) == (390, 10)
    assert cp.cleanup("t", keep_latest=10, max_age=timedelta(days=1)).deleted == (), "none is old"
    done = cp.cleanup("t", keep_latest=10)
    assert done.deleted == dry.deleted
    assert done.bytes_freed > 0
    assert len(cp.load_latest("t").messages) == 400


def sum_of_bytes(cp):
    """Of all objects and rows, by the store's own rows, not by our counters."""
    if isinstance(cp.store, MemoryStore):
        data = cp.store._data.tasks.get("t")
        return (
            0
            if data is None
            else sum(len(o.data) + len(o.refs) + 16 for o in data.objects.values())
            + sum(len(c.root) + len(c.refs) + 200 for c in data.checkpoints.values())
        )
    kind = raw.kind_of(cp.store.url)
    if kind == "redis":
        lengths = raw.lengths(cp.store.url, "t")
        return sum(n + 12 for name, n in lengths.items() if name[:2] == b"o:") + sum(
            n + 200 for name, n in lengths.items() if name[:2] == b"r:"
        )
    schema = f'"{rawrows.split_postgres(cp.store.url)[1]}".' if kind == "postgres" else ""
    with cp.connection() as conn:
        sizes = "SELECT coalesce(sum(length({}) + length(refs) + {}), 0) FROM {}{}"
        (n,) = conn.execute(sizes.format("data", 16, schema, "sp_objects")).fetchone()
        (m,) = conn.execute(sizes.format("root", 200, schema, "sp_checkpoints")).fetchone()
        return int(n + m)


@pytest.mark.scaled
def test_field_case_14a_an_unchanged_state_costs_next_to_nothing(cp):
    if not cp.store.chunked:
        pytest.skip("chunked is False")
    cp.retention = Retention.keep_all()
    state = State(
        "t", messages=[{"role": "user", "content": f"{i}" * 500} for i in range(2000)], agent_state={"big": "y" * 10**6}
    )
    cp.save(state)
    first = sum_of_bytes(cp)
    for _ in range(50):
        cp.save(state)
    assert (sum_of_bytes(cp) - first) / 50 < 2048
    fresh = cp.load_latest("t")
    before = sum_of_bytes(cp)
    cp.save(State("t", seq=fresh.seq, messages=json.loads(json.dumps(fresh.messages)), agent_state=dict(fresh.agent_state)))
    assert sum_of_bytes(cp) - before < 2048, "an equal state that is another object costs no more"
    with cp.resume("t") as run:
        before = run.metrics.bytes_written
        run.save()
        assert 0 < run.metrics.bytes_written - before < 4096, "a metric tells"


# -- 16 to 30: values

Point = namedtuple("Point", "x y")


class Text(str):
    pass


class Number(int):
    pass


def test_field_case_16_container_subclasses_keep_their_behaviour(url):
    groups = defaultdict(list, a=[1])
    for again in reloaded(url, groups):
        assert again == groups
        assert again["missing"] == []
    count = Counter("abracadabra")
    again = roundtrip(url, count)
    assert again.most_common(1) == [("a", 5)]
    again.update("z")
    assert (again["z"], again["none"]) == (1, 0)
    ordered = roundtrip(url, OrderedDict([("z", 1), ("a", 2)]))
    ordered.move_to_end("z")
    assert list(ordered) == ["a", "z"]
    bounded = roundtrip(url, deque([1, 2, 3], maxlen=3))
    bounded.append(4)
    assert bounded == deque([2, 3, 4], maxlen=3)
    point = roundtrip(url, Point(1, 2), types=[Point])
    assert (point.x, type(point)) == (1, Point)


_numbers = iter(range(10**6))


def roundtrip(url, value, **options):
    task = f"r{next(_numbers)}"
    with safepoint.open(url, **options) as cp:
        cp.save(State(task, agent_state={"v": value}))
    with safepoint.open(url, **options) as cp:
        return cp.load_latest(task).agent_state["v"]


@pytest.mark.parametrize("value", [Text("a"), Number(5), Point(1, 2)])
def test_field_case_16_other_subclasses_are_refused_not_flattened(cp, value):
    with pytest.raises(RefusedType) as caught:
        cp.save(State("t", agent_state={"a": [value]}))
    assert type(value).__name__ in str(caught.value)
    assert cp.load_latest("t") is None


BIG = [2**63 - 1, 2**63, 2**64, -(2**63), -(2**63) - 1, int("f" * 64, 16), -(10**300)]


@pytest.mark.parametrize("value", BIG)
def test_field_case_18_integers_of_any_size(url, value):
    again = roundtrip(url, {"n": value, value: "as key", "l": [(value,)]})
    assert again == {"n": value, value: "as key", "l": [(value,)]}
    assert all(type(k) in {int, str} for k in again)
    assert type(again["n"]) is int
    assert type(again["l"][0][0]) is int


def test_field_case_18_filters_on_big_integers(cp):
    state = State("t")
    for n in BIG:
        state.metadata = {"n": n}
        cp.save(state)
    for i, n in enumerate(BIG, 1):
        assert [c.seq for c in cp.list_checkpoints("t", filter={"n": n})] == [i]
        assert cp.list_checkpoints("t", filter={"n": float(n)}) == [], "no float in between"


@pytest.fixture
def zone():
    before = os.environ.get("TZ")

    def move(name):
        os.environ["TZ"] = name
        time.tzset()

    yield move
    if before is None:
        os.environ.pop("TZ", None)
    else:
        os.environ["TZ"] = before
    time.tzset()


def test_field_case_20_naive_stays_naive_wherever_it_is_loaded(url, zone):
    moments: list[Any] = [
        datetime(2026, 3, 29, 2, 30), datetime(2026, 3, 29, 2, 30, fold=1), datetime.min, datetime.max,  # noqa: DTZ001, DTZ901
        datetime(2026, 3, 29, tzinfo=UTC), datetime(2026, 3, 29, 2, 30, 0, 7, tzinfo=timezone(timedelta(hours=5, minutes=30))),
        datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC),
        date(2026, 3, 29), day_time(2, 30, 0, 1), day_time(2, 30, tzinfo=UTC), timedelta(days=-1, microseconds=1),
    ]  # fmt: skip
    zone("Asia/Kolkata")
    with safepoint.open(url) as cp:
        saved_at = cp.save(State("t", messages=moments)).created_at
        zone("America/New_York")
        with safepoint.open(url) as other:
            state = other.load_latest("t")
    assert state.created_at == saved_at
    for before, after in zip(moments, state.messages, strict=True):
        assert after == before
        assert type(after) is type(before)
        if not isinstance(before, date | timedelta) or isinstance(before, datetime):
            assert after.tzinfo == before.tzinfo
            assert after.fold == before.fold
        if isinstance(before, datetime | timedelta):
            after - before


class Color(Enum):
    RED = "red"
    DEEP = (1, "x")


class Level(IntEnum):
    LOW = 1


class Phase(StrEnum):
    PLAN = "plan"


class Perm(Flag):
    R = 1
    W = 2


@pytest.mark.parametrize(
    "value", [Color.RED, Color.DEEP, Level.LOW, Phase.PLAN, Perm.R | Perm.W, Perm(0), {Phase.PLAN: Level.LOW}]
)
def test_field_case_22_enums_keep_their_type(url, value):
    for again in reloaded(url, value, types=[Color, Level, Phase, Perm]):
        assert again == value
        assert type(again) is type(value)
        if isinstance(value, dict):
            assert [type(k) for k in again] == [Phase]
            assert [type(v) for v in again.values()] == [Level]


def test_field_case_22_an_enum_that_is_not_registered_is_refused(cp):
    with pytest.raises(RefusedType, match="Phase"):
        cp.save(State("t", agent_state={"phase": Phase.PLAN}))


@dataclass
class Base24:
    made: ClassVar[int] = 0
    a: int = 1
    computed: int = field(init=False, default=0)

    def __post_init__(self):
        type(self).made += 1
        self.computed = self.a * 10


@dataclass
class Child24(Base24):
    items: list = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Frozen24:
    a: int
    b: tuple = ()
    late: int = field(init=False, default=7)


@dataclass
class Init24:
    a: InitVar[int]
    b: int = 0

    def __post_init__(self, a):
        self.b = a


def test_field_case_24_dataclass_fields_come_back_one_by_one(url):
    child = Child24(a=3, items=[1])
    child.computed = 99
    frozen = Frozen24(1, (2,))
    again, frozen_again = roundtrip(url, [child, frozen], types=[Child24, Frozen24])
    assert type(again) is Child24
    assert vars(again) == vars(child)
    assert (type(frozen_again), frozen_again, frozen_again.late) == (Frozen24, frozen, 7)


def test_field_case_24_no_constructor_runs_a_second_time(url):
    child = Child24(a=3)
    before = Child24.made
    roundtrip(url, child, types=[Child24])
    assert Child24.made == before


def test_field_case_24_fields_that_only_the_constructor_sees(url):
    again = roundtrip(url, Init24(5), types=[Init24])
    assert vars(again) == {"b": 5}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.0, Decimal("NaN"), Decimal("-Infinity"), Decimal("1.10")])
def test_field_case_26_numbers_that_json_does_not_have(url, value):
    for again in [*reloaded(url, value), meta(url, value)]:
        assert type(again) is type(value)
        assert repr(again) == repr(value)
        if isinstance(value, float):
            assert math.copysign(1, again) == math.copysign(1, value)


def meta(url, value):
    with safepoint.open(url) as cp:
        cp.save(State("m", metadata={"v": [value]}))
        assert repr(cp.list_checkpoints("m")[0].metadata["v"][0]) == repr(value)
        return cp.load_latest("m").metadata["v"][0]


def cyclic_list():
    loop: list[Any] = [1]
    loop.append(loop)
    return loop


def cyclic_dicts():
    one: dict[str, Any] = {}
    two: dict[str, Any] = {}
    one["two"], two["one"] = two, one
    return one


def deep(n=10_000):
    value: list[Any] = []
    for _ in range(n):
        value = [value]
    return value


@pytest.mark.parametrize("make", [cyclic_list, cyclic_dicts, deep])
@pytest.mark.parametrize("place", ["messages", "agent_state", "metadata"])
def test_field_case_28_cycles_and_depth_are_refused_with_their_path(cp, make, place):
    state = State("t", messages=["kept"])
    cp.save(state)
    bad = make()
    if place == "messages":
        state.messages.append(bad)
    else:
        getattr(state, place)["bad"] = bad
    with pytest.raises(safepoint.SafepointError) as caught:
        cp.save(state)
    assert isinstance(caught.value, RefusedType)
    assert place in str(caught.value)
    assert len(str(caught.value)) < 2000
    assert cp.load_latest("t").messages == ["kept"]
    assert len(cp.list_checkpoints("t")) == 1


def test_field_case_28_a_child_used_twice_is_fine(url):
    shared = {"x": [1]}
    assert roundtrip(url, [shared, {"again": shared}]) == [shared, {"again": shared}]


@pytest.mark.parametrize("unit", [b"\x91", b"\x81\xa1k"])
def test_field_case_28_deep_stored_bytes_are_refused_without_a_stack_overflow(unit):
    with pytest.raises(safepoint.SafepointError):
        values.decode(unit * 200_000 + b"\xc0", Registry())


def generator():
    yield CANARY


@contextlib.contextmanager
def unstorable(kind):
    with contextlib.ExitStack() as stack:
        if kind == "socket":
            yield stack.enter_context(socket.socket())
        else:
            yield {"lock": threading.Lock, "generator": generator, "function": lambda: unstorable}[kind]()


@pytest.mark.parametrize("kind", ["lock", "socket", "generator", "function"])
def test_field_case_30_the_error_names_path_and_type(cp, kind):
    with unstorable(kind) as bad:
        state = State("t", agent_state={"a": {"b": [CANARY, CANARY, CANARY, {"c": bad}]}})
        for refuse in (cp.check_state, cp.save):
            with pytest.raises(RefusedType) as caught:
                refuse(state)
            text = str(caught.value)
            assert re.search(r"agent_state.*a.*b.*3.*c", text), text
            assert kind in text
            assert CANARY not in text
            assert caught.value.details["path"]
            assert caught.value.details["type"]
    assert cp.load_latest("t") is None


def test_field_case_30_the_finished_steps_results_are_not_lost(cp):
    calls = []

    @tool(name="fc30")
    def act():
        calls.append(1)
        return "result"

    def step(run):
        run.state.agent_state["r"] = act()
        run.state.agent_state["bad"] = threading.Lock()

    with pytest.raises(RefusedType):
        run_agent(step, task_id="t", store=cp)
    assert [(c.status, c.result) for c in cp.calls("t")] == [("succeeded", "result")]
    assert run_agent(lambda run: run.finish(act()), task_id="t", store=cp).result == "result"
    assert calls == [1]


# -- 36: the model plans the same operation again under another id


class Mail:
    def __init__(self):
        self.sent = []

    def was_sent(self, call):
        return Done("sent") if call.arguments["to"] in self.sent else NotDone()


@pytest.mark.parametrize(
    ("options", "crash", "ends"),
    [
        ({}, "before the result", "parked"),
        ({}, "after the result", "reused"),
        ({"verify": True}, "before the result", "reused"),
        ({"verify": True}, "before the effect", "sent"),
        ({"effect": "idempotent"}, "before the result", "sent"),
    ],
)
def test_field_case_36_a_replanned_call_is_the_same_operation(cp, options, crash, ends):
    mail = Mail()
    options = dict(options)
    if options.pop("verify", False):
        options |= {"verify": mail.was_sent, "settle_after": 0}
    die = [True]

    @tool(name="fc36", **options)
    def send(to, amount, extra=None):
        if die and crash == "before the effect":
            die.clear()
            raise Death
        mail.sent.append(to)
        if die and crash == "before the result":
            die.clear()
            raise Death
        return "sent"

    with died(cp, "t") as run:
        run.call(send, to="a@b", amount=1, extra={"x": 1, "y": 2}, call_id="call_abc")
        raise Death
    if ends == "parked":
        with pytest.raises(InDoubt):
            cp.resume("t")
        assert cp.status("t").status == "waiting", "visible"
    else:
        with cp.resume("t") as run:
            assert run.call(send, amount=1.0, to="a@b", extra={"y": 2, "x": 1}, call_id="call_xyz") == "sent"
            run.save()
        assert len(cp.calls("t")) == 1
    assert len(mail.sent) == (2 if options.get("effect") == "idempotent" else 1)


def test_field_case_36_other_words_for_the_same_operation(cp):
    paid = []

    @tool(name="fc36-pay", key=lambda order, note: order)
    def pay(order, note):
        paid.append(order)
        return "paid"

    with died(cp, "t") as run:
        run.call(pay, 7, "first words", call_id="1")
        raise Death
    with cp.resume("t") as run:
        assert run.call(pay, 7, "other words", call_id="2") == "paid"
        assert run.call(pay, 8, "another order", call_id="3") == "paid"
    assert paid == [7, 8]


# -- 38: the same task is delivered again


def test_field_case_38_a_task_delivered_again_is_run_once(cp):
    ran, began, go = [], threading.Event(), threading.Event()

    def step(run):
        ran.append(1)
        began.set()
        assert go.wait(10)
        run.finish("once")

    outcomes = []

    def deliver():
        try:
            outcomes.append(run_agent(step, task_id="t", input="job", store=cp).result)
        except LeaseHeld:
            outcomes.append("held")

    first = threading.Thread(target=deliver)
    first.start()
    assert began.wait(10)
    during = [threading.Thread(target=deliver) for _ in range(4)]
    for t in during:
        t.start()
    for t in during:
        t.join()
    assert outcomes == ["held"] * 4
    go.set()
    first.join()
    for _ in range(5):
        deliver()
    assert outcomes == ["held"] * 4 + ["once"] * 6
    assert ran == [1]
    assert cp.status("t").attempts == 1


# -- 50: order is a counter, never a clock


@pytest.mark.parametrize("steps", ["frozen", "backwards", "sub-microsecond"])
def test_field_case_50_versions_not_clocks_decide(cp, monkeypatch, steps):
    ns = [1_700_000_000_000_000_000]

    def tick():
        ns[0] += {"frozen": 0, "backwards": -(10**9), "sub-microsecond": 7}[steps]
        return ns[0]

    monkeypatch.setattr(time, "time_ns", tick)
    monkeypatch.setattr(time, "time", lambda: tick() / 1e9)
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    monkeypatch.setattr("safepoint.checkpointer.now", lambda: moment)
    cp.retention = Retention.keep_all()
    state = State("t")
    stale: dict[str, Any] = {}
    for i in range(100):
        state.step = i
        cp.save(state)
        token = json.loads(json.dumps({"seq": state.seq}))
        if i == 50:
            stale = token
        state = State("t", seq=token["seq"], step=i)
    assert [c.seq for c in cp.list_checkpoints("t")] == list(range(100, 0, -1))
    assert cp.load_latest("t").step == 99
    with pytest.raises(Conflict):
        cp.save(State("t", seq=stale["seq"]))
    assert len(cp.list_checkpoints("t")) == 100


# -- 52: one object, several event loops

ACP = safepoint.open_async("memory://")  # (c) made at import time


def test_field_case_52_several_loops(url):
    async def save(acp, task, n):
        for i in range(n):
            state = await acp.load_latest(task) or State(task)
            state.messages.append(i)
            await acp.save(state)

    acp = safepoint.open_async(url)
    for _ in range(2):  # (b) two asyncio.run in turn
        asyncio.run(save(acp, "in turn", 5))
        asyncio.run(save(ACP, "at import", 5))
    problems = []

    def work(task):
        try:
            asyncio.run(save(acp, task, 20))
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(f"thread {i}",)) for i in range(2)]
    for t in threads:  # (a) two threads with loops of their own, at once
        t.start()
    for t in threads:
        t.join()
    assert problems == []
    assert acp.sync.load_latest("in turn").messages == [*range(5), *range(5)]
    assert ACP.sync.load_latest("at import").messages[-5:] == list(range(5))
    assert [acp.sync.load_latest(f"thread {i}").messages for i in range(2)] == [list(range(20))] * 2
    asyncio.run(acp.close())


# -- 88: filters are data

HOSTILE = [
    "'; DROP TABLE sp_checkpoints;--", 'a"b', "a.b", "$.a", "$", "a[0]", "*", "%", "_", "--", "/* */", "a' OR '1'='1", "\\", "{", "}",
    "@tag:{x}", "a\0b", "\u2028", "k) OR (1=1", "?", ":k", "%s", "",
]  # fmt: skip


def test_field_case_88_keys_and_values_of_filters_are_data(cp):
    cp.save(State("other", metadata=dict.fromkeys(HOSTILE, "x")))
    state = State("t", metadata={"plain": 1})
    cp.save(state)
    for key in HOSTILE:
        state.metadata = {key: "x", "v": key}
        cp.save(state)
    for i, key in enumerate(HOSTILE, 2):
        assert [c.seq for c in cp.list_checkpoints("t", filter={key: "x"})] == [i], key
        assert [c.seq for c in cp.list_checkpoints("t", filter={"v": key})] == [i], key
        assert cp.list_checkpoints("t", filter={"plain": key}) == []
    assert cp.list_checkpoints("t", filter={"absent": "x"}) == []
    assert cp.list_checkpoints("other", filter={"v": "x"}) == []
    assert len(cp.list_checkpoints("t")) == len(HOSTILE) + 1
    assert {c.task_id for c in cp.list_checkpoints("t", filter={"v": "*"})} == {"t"}


@pytest.mark.parametrize("hostile", [*HOSTILE[:-6], "t' OR '1'='1"])
def test_field_case_88_so_are_ids(cp, hostile):
    cp.save(State("t"))
    if "\0" not in hostile and hostile.strip():
        assert cp.load_latest(hostile) is None
        assert cp.list_checkpoints(hostile) == []
        assert cp.list_checkpoints("t", branch=hostile) == []
        with pytest.raises(safepoint.NotFound):
            cp.load("t", id=hostile)
    assert len(cp.tasks()) == 1


# -- 90: no zombie saves


def test_field_case_90_a_cancelled_save_counts_or_has_no_effect_later(url):
    started, go = threading.Event(), threading.Event()
    with safepoint.open(url) as inner:
        store = Failing(inner.store)
        state = State("t")
        inner.save(state)

        def slow(commit):
            started.set()
            assert go.wait(10)

        async def main():
            acp = safepoint.open_async(store)
            store.before = slow
            writing_state = await acp.load_latest("t")
            assert writing_state is not None
            writing = asyncio.ensure_future(acp.save(writing_state, id="v5-writing"))
            await asyncio.to_thread(started.wait, 10)
            queued = [asyncio.ensure_future(acp.save(State(f"q{i}"), id=f"q{i}")) for i in range(20)]
            await asyncio.sleep(0.05)
            for save in (writing, *queued):
                save.cancel()
            await asyncio.sleep(0.02)
            go.set()
            results = await asyncio.gather(writing, *queued, return_exceptions=True)
            assert all(isinstance(r, asyncio.CancelledError) for r in results)
            store.before = lambda commit: None
            assert (await acp.load("t", id="v5-writing")).seq == 2, "a query tells"
            landed = [t.task_id for t in await acp.tasks()]
            assert len(landed) <= 8, "what was queued is absent"
            v6 = await acp.load_latest("t")
            assert v6 is not None
            await acp.save(v6, id="v6")
            await asyncio.wait_for(acp.close(), 10)
            return landed

        landed = asyncio.run(main())
        time.sleep(0.05)
        assert [t.task_id for t in inner.tasks()] == landed, "nothing lands later"
        assert inner.load("t", id="v6").seq == inner.load_latest("t").seq == 3


# -- the list

NUMBERS = [
    "2",
    "4",
    "6",
    "8",
    "10",
    "12",
    "14a",
    "14b",
    "16",
    "18",
    "20",
    "22",
    "24",
    "26",
    "28",
    "30",
    "32",
    "34",
    "36",
    "38",
    "42",
    "44",
    "46",
    "48",
    "50",
    "52",
    "54",
    "56",
    "58",
    "60",
    "62",
    "64",
    "66",
    "68",
    "70",
    "72",
    "74",
    "84",
    "88",
    "90",
    "94",
    "98",
]


def listed():
    text = (ROOT / "docs" / "field-cases.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+\w?) \|[^|]*\|([^|]*)\|([^|]*)\|", text, re.MULTILINE)
    return [(number, re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", tests), stores.strip()) for number, tests, stores in rows]


def names_in(path):
    return {n.name for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.FunctionDef)}


def test_the_list_of_field_cases_names_every_case_and_only_tests_that_exist():
    assert [number for number, _, _ in listed()] == NUMBERS
    for number, tests, stores in listed():
        assert tests, number
        assert stores, number
        for path, name in tests:
            assert (ROOT / path).exists(), path
            assert not name or any(n.startswith(name) for n in names_in(ROOT / path)), (path, name)


def test_every_test_of_a_field_case_is_in_the_list():
    rows = listed()
    missing = set()
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name in names_in(path):
            if of := re.match(r"test_field_case_0*(\d+)([a-z]?)_", name):
                mine = [tests for number, tests, _ in rows if number in (of[1], of[1] + of[2])]
                if not any(ROOT / p == path and n and name.startswith(n) for tests in mine for p, n in tests):
                    missing.add((of[0], path.name))
    assert not missing

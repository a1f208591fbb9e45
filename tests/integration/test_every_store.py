"""What must be the same on every store, and what many users of one store at once must not do to each other.

What is the same is told by the store in memory: the same verbs are asked of both, and must answer alike, refusals too.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
from typing import Any

import pytest

import safepoint
from safepoint import CallFailed, Conflict, Done, Retention, SafepointError, State, Unavailable, UsageError, tool, tools
from safepoint.testing.reading import HOSTILE_IDS
from tests.integration.conftest import STORES, new_url
from tests.support import rawrows
from tests.support.scale import scale

POOLED = [kind for kind in STORES if kind in {"postgres", "redis"}]


def answer(verb, *args, **kwargs):
    """What a verb comes to, in a shape that can be compared."""
    try:
        return verb(*args, **kwargs)
    except SafepointError as error:
        return type(error).__name__


@pytest.fixture(params=[kind for kind in STORES if kind != "memory"])
def pair(request, tmp_path):
    """A store in memory, and another one."""
    with safepoint.open("memory://") as memory, safepoint.open(new_url(request.param, tmp_path)) as other:
        yield memory, other


def same(pair, fn):
    """``fn(cp)`` of both; what it is."""
    expected, found = map(fn, pair)
    assert found == expected
    return expected


# -- texts

TEXTS = ["\0", "a\0b", "\0\0", "\ud800", "a\udfffb", "\ud83d\ude00", "\\u0000", "\\x00", "\x7f\x80\x9f", "é\u0301", "\U0010ffff", "'\"`;--", "%s%(x)s", "{s}", "\r\n\u2028\u0085"]  # fmt: skip


def ids_of(texts):
    return [ascii(text) for text in texts]


@pytest.mark.parametrize("text", TEXTS, ids=ids_of(TEXTS))
def test_any_text_anywhere_in_a_state(pair, text):
    def act(cp):
        state = State(
            "t",
            messages=[text, {"role": "user", "content": text, text: [text]}],
            agent_state={text: text, "phase": text, "deep": {text: (text, {text})}, "long": text * 3000},
            metadata={text: text, "k": [text]},
        )
        found = [answer(lambda: cp.save(state, label=text).label)]
        if isinstance(found[0], str) and state.seq is None:
            found.append(answer(lambda: cp.save(state).label))
        back = cp.load_latest("t")
        found.append(back and (back.messages, back.agent_state, back.metadata))
        found += [
            [(c.seq, c.label, c.metadata) for c in cp.list_checkpoints("t", filter=f)]
            for f in (None, {text: text}, {"k": [text]})
        ]
        found.append(answer(lambda: [(c.seq, c.branch) for c in [cp.fork("t", name=text)]]))
        found.append(sorted(b.name for b in cp.branches("t")))
        found.append(answer(lambda: cp.load("t", id=text)))
        found.append(answer(lambda: cp.load("t", branch=text).messages))
        found.append(answer(lambda: cp.save(State("u"), id=text).id))
        found.append(answer(lambda: cp.save(State(text)).task_id))
        found.append(answer(lambda: cp.load_latest(text)) == answer(lambda: None))
        found.append([t.task_id for t in cp.tasks()])
        return found

    found = same(pair, act)
    (back,) = [part for part in found if type(part) is tuple and len(part) == 3]
    assert back[0][0] == text
    assert back[1]["long"] == text * 3000


@pytest.mark.parametrize("text", TEXTS, ids=ids_of(TEXTS))
def test_any_text_anywhere_in_a_journal(pair, text):
    def act(cp):
        tools._registry.named.clear()
        found: list[Any] = []

        def named():
            @tool(name=text, effect="read")
            def echo(value, *, idempotency_key=None):
                return [value, text]

            return echo

        echo = answer(named)
        if isinstance(echo, str):
            found.append(echo)

            @tool(name="echo", effect="read")
            def echo(value, *, idempotency_key=None):
                return [value, text]

        @tool(name="fails", effect="read")
        def fails(value):
            raise ValueError(text)

        @tool(name="lost")
        def lost(value):
            raise TimeoutError(text)

        with cp.resume("t") as run:
            found.append(answer(lambda: run.call(echo, {text: [text]}, call_id=text)))
            found.append(answer(lambda: run.call(echo, {text: [text]})))
            try:
                run.call(fails, text)
            except CallFailed as error:
                found.append((error.type, error.message))
            run.milestone("m")
            found.append(answer(lambda: run.save(text).label))
        for ending in (
            lambda run: run.call(lost, text),
            lambda run: run.pause(text, {text: text}),
        ):
            try:
                with cp.resume("t") as run:
                    ending(run)
            except (SafepointError, UsageError) as error:
                found.append(type(error).__name__)
            for call in cp.calls("t", status="in_doubt"):
                cp.resolve("t", call, Done({text: text}))
            for pause in cp.pauses("t"):
                found.append((pause.name, pause.question))
                cp.answer("t", pause.no, text)
        found.append(answer(lambda: cp.finish("t", text).kind) if hasattr(cp, "finish") else None)
        found += [
            (
                c.tool,
                c.call_id,
                c.arguments,
                c.status,
                c.result,
                c.error and c.error.message if hasattr(c.error, "message") else c.error,
            )
            for c in cp.calls("t")
        ]
        found += [(p.name, p.question, p.answer, p.status) for p in cp.pauses("t", status=None)]
        info = cp.status("t")
        found.append((info.status, info.reason))
        assert cp.verify("t").ok
        return found

    same(pair, act)


# -- ids, filters

IDS = list(
    dict.fromkeys(
        [*HOSTILE_IDS, "a:b", "C:foo", "a/b", "a\\b", ".", "..", "CON", "x.", "x ", "\x01\x1f", "😀", "", "i" * 300, "é" * 512,
         "i" * 513, " ", "\0", "\ud800", "}x", "{x}", "*", "t[1]", "../../x", "%00", "?", "#", "\u2028", "İ", "ı", "A", "a"]
    )
)  # fmt: skip


def test_ids_are_taken_refused_and_listed_as_in_memory(pair):
    def act(cp):
        found: list[Any] = []
        for id in IDS:
            found.append(answer(lambda: cp.save(State(id, messages=[id])).seq))  # noqa: B023
            found.append(answer(lambda: cp.load_latest(id).messages))  # noqa: B023
            found.append(answer(lambda: cp.save(State("ids"), id=id).id))  # noqa: B023
            found.append(answer(lambda: cp.load("ids", id=id).seq))  # noqa: B023
            found.append(answer(lambda: cp.fork("ids", name=id).branch))  # noqa: B023
        found.append([t.task_id for t in cp.tasks()])
        found.append([[row.task for row in cp.store.tasks(after=after, limit=3)] for after in found[-1][::5]])
        found.append(sorted(b.name for b in cp.branches("ids")))
        for id in IDS[::3]:
            found.append(answer(lambda: cp.delete_task(id)))  # noqa: B023, PERF401
        found.append([t.task_id for t in cp.tasks()])
        return found

    same(pair, act)


KEYS: list[Any] = [
    "k",
    "",
    "a.b",
    "$.a",
    "'; DROP TABLE sp_checkpoints;--",
    "a\0b",
    "\ud800",
    "*",
    "%",
    "{",
    "@x",
    "\\",
    "é",
    "e\u0301",
    5,
    None,
    ("k",),
]
VALUES: list[Any] = [
    0, 1, -1, True, False, None, 1.0, 0.0, -0.0, float("nan"), float("inf"), 2**63, 2**64, -(2**70), float(2**63), "", "1", "true", "null",
    "a\0b", "\ud800", "é", "e\u0301", "%", "*", b"1", b"", [1], [True], [1.0], (1,), {"a": 1}, {"a": True}, {1}, "'; DROP TABLE x;--",
    "x" * 2000, object(), [[[[]]]], {"$x": 1}, {"$type": "set"},
]  # fmt: skip


@pytest.mark.scaled
def test_filters_find_what_they_find_in_memory(pair):
    def act(cp):
        cp.retention = Retention.keep_all()
        state = State("t")
        saved = []
        for key, value in [*((k, v) for k in KEYS[:2] for v in VALUES), *((k, "v") for k in KEYS)]:
            state.metadata = {key: value}
            saved.append(answer(lambda: cp.save(state).seq))
        found: list[Any] = [saved]
        for n, key in enumerate(KEYS):
            for value in VALUES if n < 2 else VALUES[n :: scale(9, 1)]:
                found.append(answer(lambda f={key: value}: [c.seq for c in cp.list_checkpoints("t", filter=f)]))  # noqa: PERF401
        odd: list[Any] = [{}, None, [], "k", {"k": 1, "": 1}]
        for f in odd:
            found.append(answer(lambda f=f: [c.seq for c in cp.list_checkpoints("t", filter=f, limit=3)]))  # noqa: PERF401
        found += [[c.seq for c in cp.list_checkpoints("t", filter={k: "v"})] for k in KEYS]
        return found

    found = same(pair, act)
    last = found[0][-len(KEYS) :]
    assert found[-len(KEYS) :] == [[seq] for seq in last], "each key finds its own checkpoint, and no other"


# -- size


@pytest.mark.scaled
def test_a_large_state_comes_back_as_it_was(url):
    """100 MB in soak: many parts, and one that alone is a quarter of it."""
    size = scale(8_000_000, 100_000_000)
    rng = random.Random(1)
    parts = [rng.randbytes(size // 40) for _ in range(30)]
    state = State(
        "t", messages=[{"n": i, "data": part} for i, part in enumerate(parts)], agent_state={"big": rng.randbytes(size // 4)}
    )
    with safepoint.open(url, timeout=60, durability="process") as cp:
        cp.save(state)
        with safepoint.open(url, timeout=60) as other:
            back = other.load_latest("t")
            assert back is not None
            assert [m["data"] for m in back.messages] == parts
            assert back.agent_state == state.agent_state
        state.messages.append("more")
        state.step += 1
        cp.save(state)
        del back
        assert cp.load_latest("t").messages[-1] == "more"
        assert cp.verify("t").ok


# -- many at once


@pytest.mark.scaled
def test_sixteen_threads_on_eight_tasks_lose_no_update(url):
    each = scale(5, 50)
    errors: list[BaseException] = []

    def count(state):
        state.agent_state["n"] = state.agent_state.get("n", 0) + 1

    def work(n, cp):
        try:
            for _ in range(each):
                cp.update(f"t{n % 8}", count, retries=200)
        except BaseException as error:
            errors.append(error)

    with safepoint.open(url) as cp, safepoint.open(url) as other:
        for i in range(8):
            cp.save(State(f"t{i}"))
        threads = [threading.Thread(target=work, args=(n, (cp, other)[n // 8])) for n in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert {cp.load_latest(f"t{i}").agent_state["n"] for i in range(8)} == {2 * each}
        assert {other.status(f"t{i}").seq for i in range(8)} == {1 + 2 * each}
        assert cp.verify().ok


@pytest.mark.scaled
def test_sixty_four_tasks_of_one_loop(url):
    """Each with a run, calls, saves and reads of its own; on servers over a pool of four connections."""
    options = {"pool": 4} if url.startswith(("postgres", "redis")) else {}
    rounds = scale(2, 20)

    @tool(effect="read", name="every.look")
    async def look(key: str) -> str:
        await asyncio.sleep(0)
        return f"saw {key}"

    async def one(acp, task):
        for n in range(rounds):
            async with acp.resume(task) as run:
                run.state.messages.append(await run.call(look, f"{task}/{n}"))
                await run.save()
        return (await acp.load_latest(task)).messages

    async def main():
        async with safepoint.open_async(url, **options) as acp:
            told = await asyncio.gather(*(one(acp, f"t{i}") for i in range(64)))
            assert len(await acp.tasks()) == 64
            return told

    assert asyncio.run(main()) == [[f"saw t{i}/{n}" for n in range(rounds)] for i in range(64)]


@pytest.mark.parametrize("kind", POOLED)
def test_a_pool_at_its_limit_is_an_error_in_time(kind, tmp_path):
    timeout = 0.6
    with safepoint.open(new_url(kind, tmp_path), pool=2, timeout=timeout) as cp:
        cp.save(State("t", messages=["there"]))
        with occupied(cp, kind, 4 * timeout):
            for verb in (cp.load_latest, cp.status, lambda task: cp.save(State("u")), cp.resume):
                begun = time.monotonic()
                with pytest.raises(Unavailable) as caught:
                    verb("t")
                assert time.monotonic() - begun < timeout + 1
                assert caught.value.remedy
                if kind == "redis":
                    break  # the others would find the same
        assert cp.load_latest("t").messages == ["there"], "and it goes on as before"
        cp.update("t", lambda state: state.messages.append("more"))
        assert cp.load_latest("t").messages == ["there", "more"]


class occupied:
    """Both connections of a pool are in use: lent out, or waiting for a server that is busy."""

    def __init__(self, cp, kind, seconds):
        self.cp, self.kind, self.seconds = cp, kind, seconds

    def __enter__(self):
        if self.kind == "postgres":
            self.lent = [self.cp.connection(), self.cp.connection()]
            for lent in self.lent:
                lent.__enter__()
            return
        with rawrows.redis_client(self.cp.store.url) as client:
            client.client_pause(int(self.seconds * 1000))
        self.threads = [threading.Thread(target=answer, args=(self.cp.load_latest, "t")) for _ in range(2)]
        for thread in self.threads:
            thread.start()
        time.sleep(0.05)

    def __exit__(self, *_):
        if self.kind == "postgres":
            for lent in reversed(self.lent):
                lent.__exit__(None, None, None)
            return
        for thread in self.threads:
            thread.join()
        with rawrows.redis_client(self.cp.store.url) as client:
            client.client_unpause()


@pytest.mark.scaled
@pytest.mark.parametrize("size", [100, 2_000_000], ids=["small", "staged"])
def test_closed_during_saves(url, size):
    """Each save has landed whole and was acknowledged, or was refused as too late; none lands after that."""
    acknowledged: dict[str, int] = {}
    ended: dict[str, BaseException] = {}
    rng = random.Random(size)
    body = rng.randbytes(size)

    def work(cp, task, begun):
        state = State(task, agent_state={"body": body})
        try:
            for n in itertools.count(1):
                state.step = n
                state.messages = [f"{task} {n}", *state.messages[:20]]
                state.agent_state["other"] = body[: size // 2] + n.to_bytes(4)
                cp.save(state)
                acknowledged[task] = n
                begun.set()
        except BaseException as error:
            ended[task] = error

    with safepoint.open(url) as kept:  # what is in memory would end with its last user
        for turn in range(scale(1, 8)):
            cp = safepoint.open(url)
            tasks = [f"t{turn}.{i}" for i in range(4)]
            events = [threading.Event() for _ in tasks]
            threads = [threading.Thread(target=work, args=(cp, task, event)) for task, event in zip(tasks, events, strict=True)]
            for thread in threads:
                thread.start()
            for event in events:
                assert event.wait(30)
            time.sleep(rng.uniform(0, 0.05))
            cp.close()
            for thread in threads:
                thread.join(30)
                assert not thread.is_alive()
            assert {type(ended[task]) for task in tasks} == {UsageError}, ended
            for task in tasks:
                state = kept.load_latest(task)
                # Refused, and landed all the same, may be only what the closing fell into.
                assert state.step == acknowledged[task], task
                assert state.messages[0] == f"{task} {state.step}"
                assert state.agent_state["other"] == body[: size // 2] + state.step.to_bytes(4)
            assert kept.verify().ok


def test_one_object_on_the_loops_of_eight_threads(url):
    """Field case 52: all of them at once, each loop made and ended several times."""
    errors: list[BaseException] = []
    with safepoint.open(url) as kept:
        acp = safepoint.open_async(kept)

        async def add(task, n):
            def change(state):
                state.messages.append(n)

            await asyncio.gather(*(acp.update(task, change, retries=50) for _ in range(3)))

        def work(i):
            try:
                for n in range(3):
                    asyncio.run(add(f"t{i % 4}", n))
            except BaseException as error:
                errors.append(error)

        for i in range(4):
            kept.save(State(f"t{i}"))
        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert [sorted(kept.load_latest(f"t{i}").messages) for i in range(4)] == [sorted([*range(3)] * 6)] * 4
        asyncio.run(acp.close())


def test_two_checkpointers_of_one_store_see_each_other(url):
    with safepoint.open(url) as one, safepoint.open(url) as two:
        state = State("t")
        one.save(state)
        other = two.load_latest("t")
        assert other is not None
        other.messages.append("two")
        two.save(other)
        with pytest.raises(Conflict):
            one.save(state)
        assert one.load_latest("t").messages == ["two"]
        with one.resume("t"), pytest.raises(safepoint.LeaseHeld):
            two.resume("t")
        with two.resume("t") as run:
            assert run.recovery.previous == "released"


def test_options_may_stand_in_the_url(url):
    more = f"{url}{'&' if '?' in url else '?'}durability=process&timeout=7"
    with safepoint.open(url) as kept, safepoint.open(more) as cp:
        assert cp.store.timeout == 7
        assert cp.store.durability == ("process" if cp.store.persistent else kept.store.durability)
        cp.save(State("t"))
        assert kept.load_latest("t") is not None
    with safepoint.open(more, durability="process", timeout=7) as cp:
        assert cp.store.timeout == 7
    for contrary in ({"durability": "full"}, {"timeout": 8}):
        with pytest.raises(UsageError, match="two values"):
            safepoint.open(more, **contrary)
    neither: Any = ""
    with pytest.raises(UsageError, match="full or process"):
        safepoint.open(url, durability=neither)

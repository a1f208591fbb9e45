"""Calls inside nodes: recorded before they are made, served when the node is run again, put before a person when nobody knows."""

from __future__ import annotations

import asyncio
import contextlib
import operator
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import Command, RetryPolicy, Send, interrupt
from typing_extensions import TypedDict

import safepoint
from safepoint import Call, CallInProgress, DidNotHappen, Done, InDoubt, LeaseHeld, NotDone, Retry, Unavailable, UsageError
from safepoint.adapters.langgraph import SafepointSaver, ToolJournal, current_call

CONFIG: Any = {"configurable": {"thread_id": "t"}}


@pytest.fixture(params=["memory", "sqlite"])
def saver(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SafepointSaver]:
    url = "memory://" if request.param == "memory" else f"sqlite:///{tmp_path / 'g.db'}"
    with SafepointSaver(url) as opened:
        yield opened


class Scripted(BaseChatModel):
    """Asks for the calls that the last human message names (``name:id name:id``), and says "done" after them."""

    asked: Any = None

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        last = messages[-1]
        self.asked["times"] += 1
        if isinstance(last, HumanMessage):
            names = [part.split(":") for part in str(last.content).split()]
            calls = [{"name": name, "args": {"to": id.rstrip("'")}, "id": id} for name, id in names]
            reply = AIMessage("", tool_calls=calls)
        else:
            reply = AIMessage("done")
        return ChatResult(generations=[ChatGeneration(message=reply)])


class World:
    """What tools do, and how they are made to fail."""

    def __init__(self) -> None:
        self.done: Counter[str] = Counter()
        self.keys: list[str] = []
        self.fail: dict[str, BaseException] = {}

    def act(self, name: str, to: str) -> str:
        row = current_call()
        self.keys.append("" if row is None else row.idempotency_key)
        self.done[f"{name} {to}"] += 1
        if (error := self.fail.pop(name, None)) is not None:
            raise error
        return f"{name} {to}"

    def was_done(self, call: Call) -> Done | NotDone:
        name = call.tool.rpartition(".")[2]
        to = call.arguments["to"]
        return Done(f"{name} {to}") if self.done[f"{name} {to}"] else NotDone()


def agent(saver: SafepointSaver, world: World, *, model: bool = True, **tools: Any) -> tuple[Any, Scripted]:
    @tool
    def send(to: str) -> str:
        """Send."""
        return world.act("send", to)

    @tool
    def look(to: str) -> str:
        """Look."""
        return world.act("look", to)

    @tool
    def ask(to: str) -> str:
        """Ask."""
        world.act("ask", to)
        return f"told {interrupt('what?')}"

    asked = Scripted(asked=Counter())
    journal = ToolJournal(saver, tools={"look": "read", **tools})
    made = create_agent(asked, tools=[send, look, ask], checkpointer=saver, middleware=[journal.middleware(model=model)])
    return made, asked


def contents(state: Any) -> list[str]:
    return [message.content for message in state["messages"]]


class Killed(BaseException):
    """Not an error of the tool's: what Ctrl-C is to a process."""


def test_a_node_that_is_run_again_is_served_from_the_journal(saver: SafepointSaver) -> None:
    world = World()
    graph, model = agent(saver, world)
    world.fail["look"] = Killed()
    with pytest.raises(Killed):
        graph.invoke({"messages": [("user", "send:1 look:2")]}, CONFIG)
    assert world.done["send 1"] == 1
    assert contents(graph.invoke(None, CONFIG)) == ["send:1 look:2", "", "send 1", "look 2", "done"]
    assert world.done == {"send 1": 1, "look 2": 2}
    assert model.asked["times"] == 2
    calls = saver.cp.calls("t")
    assert Counter((c.tool, c.status) for c in calls) == {
        ("langgraph.model.Scripted", "succeeded"): 2,
        ("langgraph.send", "succeeded"): 1,
        ("langgraph.look", "succeeded"): 1,
    }
    assert [c.arguments for c in calls if c.tool == "langgraph.send"] == [{"to": "1"}]


def test_async_tools_and_models_too(saver: SafepointSaver) -> None:
    world = World()
    graph, model = agent(saver, world)

    async def live() -> Any:
        world.fail["look"] = Killed()
        with pytest.raises(Killed):
            await graph.ainvoke({"messages": [("user", "send:1 look:2")]}, CONFIG)
        return await graph.ainvoke(None, CONFIG)

    assert contents(asyncio.run(live())) == ["send:1 look:2", "", "send 1", "look 2", "done"]
    assert world.done == {"send 1": 1, "look 2": 2}
    assert model.asked["times"] == 2


def test_an_interrupt_in_a_tool_is_a_pause(saver: SafepointSaver) -> None:
    world = World()
    graph, _ = agent(saver, world)
    out = graph.invoke({"messages": [("user", "send:1 ask:2")]}, CONFIG)
    assert [i.value for i in out["__interrupt__"]] == ["what?"]
    assert {c.tool: c.status for c in saver.cp.calls("t")}["langgraph.ask"] == "paused"
    lease = saver.store.lease("t")
    assert lease is not None
    assert not lease.live
    assert contents(graph.invoke(Command(resume="it"), CONFIG))[2:] == ["send 1", "told it", "done"]
    assert world.done == {"send 1": 1, "ask 2": 2}


def test_nobody_knows_until_a_person_says_so(saver: SafepointSaver) -> None:
    world = World()
    graph, _ = agent(saver, world)
    world.fail["send"] = OSError("the line broke")
    for _ in range(2):
        with pytest.raises(InDoubt, match="in doubt"):
            graph.invoke({"messages": [("user", "send:1")]} if not world.done else None, CONFIG)
    assert world.done == {"send 1": 1}
    assert [t.task_id for t in saver.cp.tasks(status="waiting")] == ["t"]
    (call,) = [c for c in saver.cp.calls("t") if c.status == "in_doubt"]
    saver.cp.resolve("t", call.no, Done("it was sent"))
    assert contents(graph.invoke(None, CONFIG))[2:] == ["it was sent", "done"]
    assert world.done == {"send 1": 1}


def test_a_verifier_is_asked(saver: SafepointSaver) -> None:
    world = World()
    declared = safepoint.tool(effect="write", verify=world.was_done, settle_after=0, name="declared.send")(lambda to: "")
    graph, _ = agent(saver, world, send=declared)
    world.fail["send"] = OSError("the reply was lost")
    assert contents(graph.invoke({"messages": [("user", "send:1")]}, CONFIG))[2:] == ["send 1", "done"]
    assert world.done == {"send 1": 1}


def test_what_certainly_did_not_happen_is_tried_again(saver: SafepointSaver) -> None:
    world = World()
    declared = safepoint.tool(effect="write", retry=Retry(2, 0.001), name="retried.send")(lambda to: "")
    graph, _ = agent(saver, world, send=declared)
    world.fail["send"] = DidNotHappen("refused")
    assert contents(graph.invoke({"messages": [("user", "send:1")]}, CONFIG))[2:] == ["send 1", "done"]
    assert world.done == {"send 1": 2}
    assert len(set(world.keys)) == 1, "one call has one key"


def test_a_read_that_fails_is_the_nodes_own_error(saver: SafepointSaver) -> None:
    world = World()
    graph, _ = agent(saver, world)
    world.fail["look"] = ValueError("no such page")
    with pytest.raises(ValueError, match="no such page"):
        graph.invoke({"messages": [("user", "look:1")]}, CONFIG)
    assert contents(graph.invoke(None, CONFIG))[2:] == ["look 1", "done"]
    assert world.done == {"look 1": 2}


def test_a_tool_node_and_its_messages_about_errors(saver: SafepointSaver) -> None:
    world = World()

    @tool
    def send(to: str) -> str:
        """Send."""
        return world.act("send", to)

    journal = ToolJournal(saver, tools={"send": "idempotent"})
    node = ToolNode(
        [send],
        handle_tool_errors=True,
        wrap_tool_call=journal.wrap_tool_call,
        awrap_tool_call=journal.awrap_tool_call,
    )

    def reply(state: MessagesState) -> Any:
        calls = [{"name": "send", "args": {"to": id}, "id": id} for id in ("1", "2")]
        return {"messages": [AIMessage("", tool_calls=calls)]}

    builder = StateGraph(MessagesState).add_node("reply", reply).add_node("tools", node)
    graph = builder.add_edge(START, "reply").add_edge("reply", "tools").compile(checkpointer=saver)
    world.fail["send"] = ValueError("no")
    found = graph.invoke({"messages": [("user", "go")]}, CONFIG)["messages"][2:]
    assert sorted(message.status for message in found) == ["error", "success"]
    assert sorted(c.status for c in saver.cp.calls("t")) == ["failed", "succeeded"]
    assert len(set(world.keys)) == 2


def test_each_question_gets_its_own_answer(saver: SafepointSaver) -> None:
    """A tool that is served from the journal asks nothing: the next question must not be given its answer."""
    journal, deleted = ToolJournal(saver), []

    @journal.tool(effect="write", name="approved.delete")
    def delete(what: str) -> str:
        if interrupt(f"delete {what}?") == "yes":
            deleted.append(what)
        return what

    def body(state: Items) -> Any:
        return {"items": [delete("junk"), delete("thesis"), interrupt("sure?")]}

    graph = plain(saver, body)
    asked = []
    out = graph.invoke({"items": []}, CONFIG)
    for answer in ("yes", "no", "very"):
        asked.append(out["__interrupt__"][0].value)
        out = graph.invoke(Command(resume=answer), CONFIG)
    assert asked == ["delete junk?", "delete thesis?", "sure?"]
    assert out["items"] == ["junk", "thesis", "very"]
    assert deleted == ["junk"]


@pytest.mark.parametrize("way", ["node", "middleware", "cancelled"])
def test_no_run_goes_past_a_doubt_that_it_swallows(saver: SafepointSaver, way: str) -> None:
    world = World()
    world.fail["send"] = OSError("the line broke")
    if way == "middleware":
        from langchain.agents.middleware import wrap_tool_call

        @wrap_tool_call
        def swallowing(request: Any, handler: Any) -> Any:
            try:
                return handler(request)
            except Exception as error:
                return ToolMessage(f"Tool error: {error}", tool_call_id=request.tool_call["id"])

        @tool
        def send(to: str) -> str:
            """Send."""
            return world.act("send", to)

        journal = ToolJournal(saver)
        model = Scripted(asked=Counter())
        graph: Any = create_agent(model, tools=[send], checkpointer=saver, middleware=[swallowing, journal.middleware()])
        given: Any = {"messages": [("user", "send:1")]}
    elif way == "node":
        journal = ToolJournal(saver)
        plain_send = journal.tool(effect="write", name="swallowed.send")(lambda to: world.act("send", to))

        def body(state: Items) -> Any:
            for _ in range(2):
                with contextlib.suppress(Exception):
                    plain_send("1")
            return {"items": ["went on"]}

        graph, given = plain(saver, body), {"items": []}
    else:
        journal = ToolJournal(saver)
        limits: list[asyncio.Timeout] = []

        @journal.tool(effect="write", name="cancelled.send")
        async def slow(to: str) -> str:
            world.done[f"send {to}"] += 1
            # Its time is up now that it has begun, however long it took to get here.
            limits[-1].reschedule(asyncio.get_running_loop().time())
            await asyncio.sleep(20)
            return "sent"

        async def waiting(state: Items) -> Any:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None) as limit:
                    limits.append(limit)
                    await slow("1")
            return {"items": ["went on"]}

        graph, given = plain(saver, waiting), {"items": []}
    for turn in (given, None):
        with pytest.raises(InDoubt):
            asyncio.run(graph.ainvoke(turn, CONFIG)) if way == "cancelled" else graph.invoke(turn, CONFIG)
        assert world.done == {"send 1": 1}
        assert "went on" not in graph.get_state(CONFIG).values.get("items", [])
    assert [t.task_id for t in saver.cp.tasks(status="waiting")] == ["t"]


def test_functions_of_the_functional_api(saver: SafepointSaver) -> None:
    from langgraph.func import entrypoint, task

    journal, world = ToolJournal(saver), World()
    send = journal.tool(effect="write", name="functional.send")(lambda to: world.act("send", to))
    failing = [True]

    @task
    def one(to: str) -> str:
        done = send(to)
        if failing:
            failing.pop()
            raise ValueError("after the call")
        return str(done)

    @entrypoint(checkpointer=saver)
    def flow(to: str) -> str:
        return str(one(to).result())

    with pytest.raises(ValueError, match="after the call"):
        flow.invoke("1", CONFIG)
    assert flow.invoke(None, CONFIG) == "send 1"
    assert world.done == {"send 1": 1}


def test_calls_that_come_in_another_order(saver: SafepointSaver) -> None:
    journal, world = ToolJournal(saver), World()

    @journal.tool(effect="write", name="ordered.send")
    async def send(to: str) -> str:
        return world.act("send", to)

    orders = [[0, 1, 2], [2, 0, 1]]

    async def body(state: Items) -> Any:
        order = orders.pop(0)

        async def one(i: int) -> str:
            await asyncio.sleep(0.02 * order.index(i))
            return str(await send(str(i)))

        found = await asyncio.gather(*map(one, range(3)))
        if orders:
            raise ConnectionError("try again")
        return {"items": found}

    graph = plain(saver, body, retry_policy=RetryPolicy(initial_interval=0.001, retry_on=ConnectionError))
    assert asyncio.run(graph.ainvoke({"items": []}, CONFIG))["items"] == ["send 0", "send 1", "send 2"]
    assert set(world.done.values()) == {1}


def test_a_failure_is_not_gone_past_by_a_call_beside_it(saver: SafepointSaver) -> None:
    world = World()

    @tool
    def flaky(to: str) -> str:
        """Fail once."""
        return world.act("flaky", to)

    @tool
    def ok(to: str) -> str:
        """Come later."""
        time.sleep(0.1)
        return world.act("ok", to)

    journal = ToolJournal(saver, tools={"flaky": "read", "ok": "read"})
    node = ToolNode([flaky, ok], handle_tool_errors=False, wrap_tool_call=journal.wrap_tool_call)
    calls = [{"name": name, "args": {"to": "1"}, "id": name} for name in ("flaky", "ok")]
    builder = StateGraph(MessagesState).add_node("reply", lambda _: {"messages": [AIMessage("", tool_calls=calls)]})
    builder.add_node("tools", node, retry_policy=RetryPolicy(initial_interval=0.001, max_attempts=3, retry_on=ConnectionError))
    graph = builder.add_edge(START, "reply").add_edge("reply", "tools").compile(checkpointer=saver)
    world.fail["flaky"] = ConnectionError("once")
    found = graph.invoke({"messages": [("user", "go")]}, CONFIG)["messages"]
    assert [(m.content, m.status) for m in found[2:]] == [("flaky 1", "success"), ("ok 1", "success")]
    assert world.done == {"flaky 1": 2, "ok 1": 1}


class Items(TypedDict):
    items: Annotated[list[str], operator.add]


def plain(saver: SafepointSaver, body: Callable[[Any], Any], **node: Any) -> Any:
    return StateGraph(Items).add_node("n", body, **node).add_edge(START, "n").compile(checkpointer=saver)


def test_plain_functions_in_order_of_their_calls(saver: SafepointSaver) -> None:
    journal, world = ToolJournal(saver), World()

    @journal.tool(effect="write", name="plain.send")
    def send(to: str, *, idempotency_key: str) -> str:
        done = world.act("send", to) + str(world.done[f"send {to}"])
        assert idempotency_key == world.keys[-1]
        return done

    failing = [True]

    def body(state: Items) -> Any:
        found = [send("a"), send("b"), send("a")]
        if failing:
            failing.pop()
            raise ValueError("after the calls")
        return {"items": found}

    graph = plain(saver, body)
    with pytest.raises(ValueError, match="after the calls"):
        graph.invoke({"items": []}, CONFIG)
    assert graph.invoke(None, CONFIG)["items"] == ["send a1", "send b1", "send a2"]
    assert world.done == {"send a": 2, "send b": 1}
    assert len(set(world.keys)) == 3


def test_a_retry_policy_does_nothing_twice(saver: SafepointSaver) -> None:
    journal, world = ToolJournal(saver), World()

    @journal.tool(effect="write", name="policy.send")
    async def send(to: str) -> str:
        await asyncio.sleep(0)
        return world.act("send", to)

    failing = [True, True]

    async def body(state: Items) -> Any:
        found = [await send("a")]
        if failing:
            failing.pop()
            raise ConnectionError("try again")
        return {"items": found}

    graph = plain(saver, body, retry_policy=RetryPolicy(initial_interval=0.001, max_attempts=3, retry_on=ConnectionError))
    assert asyncio.run(graph.ainvoke({"items": []}, CONFIG))["items"] == ["send a"]
    assert world.done == {"send a": 1}


def test_equal_calls_of_parallel_tasks_are_calls_of_their_own(saver: SafepointSaver) -> None:
    journal, world = ToolJournal(saver), World()

    @journal.tool(effect="write", name="parallel.send")
    def send(to: str) -> str:
        return world.act("send", to)

    builder = StateGraph(Items).add_node("one", lambda _: {"items": [send("x")]})
    builder.add_node("start", lambda _: {}).add_edge(START, "start")
    graph = builder.add_conditional_edges("start", lambda _: [Send("one", {}) for _ in range(5)]).compile(checkpointer=saver)
    assert graph.invoke({"items": []}, CONFIG)["items"] == ["send x"] * 5
    assert world.done == {"send x": 5}
    assert len(set(world.keys)) == 5


def test_what_cannot_be_recorded_is_loud(saver: SafepointSaver) -> None:
    journal, world = ToolJournal(saver), World()

    @journal.tool(effect="write", name="loud.send")
    def send(to: str) -> str:
        return world.act("send", to)

    with pytest.raises(UsageError, match="outside of any node"):
        send("x")
    graph = plain(saver, lambda _: {"items": [send("x")]})
    with pytest.raises(UsageError, match="exit"):
        graph.invoke({"items": []}, CONFIG, durability="exit")
    told: list[BaseException] = []

    def in_a_thread(state: Items) -> Any:
        def run() -> None:
            try:
                send("x")
            except UsageError as error:
                told.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return {}

    plain(saver, in_a_thread).invoke({"items": []}, {"configurable": {"thread_id": "u"}})
    assert len(told) == 1
    inner = StateGraph(Items).add_node("n", lambda _: {"items": [send("x")]}).add_edge(START, "n")
    outer = StateGraph(Items).add_node("sub", inner.compile(checkpointer=False)).add_edge(START, "sub")
    with pytest.raises(UsageError, match="checkpointer=False"):
        outer.compile(checkpointer=saver).invoke({"items": []}, {"configurable": {"thread_id": "v"}})
    assert not world.done
    sub = StateGraph(Items).add_node("sub", inner.compile()).add_edge(START, "sub").compile(checkpointer=saver)
    assert sub.invoke({"items": []}, {"configurable": {"thread_id": "w"}})["items"] == ["send x"]
    for wrong in ({"send": "often"}, {"send": 7}):
        with pytest.raises(UsageError, match="'send'"):
            ToolJournal(saver, tools=wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="transactional"):
        journal.tool(effect="transactional")(lambda *, connection: None)


def test_another_process_is_kept_out_while_a_call_runs(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'g.db'}"
    with SafepointSaver(url) as saver, SafepointSaver(url) as other:
        journal = ToolJournal(saver)
        begun, go = threading.Event(), threading.Event()

        @journal.tool(effect="write", name="held.send")
        def send() -> str:
            begun.set()
            assert go.wait(20)
            return "sent"

        graph = plain(saver, lambda _: {"items": [send()]})
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(graph.invoke({"items": []}, CONFIG)))
        thread.start()
        assert begun.wait(20)
        with pytest.raises(LeaseHeld):
            plain(other, lambda _: {}).update_state(CONFIG, {"items": ["from elsewhere"]})
        go.set()
        thread.join()
        assert found[0]["items"] == ["sent"]
        plain(other, lambda _: {}).update_state(CONFIG, {"items": ["later"]})


def test_a_graph_that_a_served_call_ran_keeps_its_place(saver: SafepointSaver) -> None:
    journal, world = ToolJournal(saver, tools={}), World()
    inner = StateGraph(Items).add_node("pay", lambda state: {"items": [world.act("pay", state["items"][0])]})
    agent = inner.add_edge(START, "pay").compile()

    @journal.tool(effect="idempotent", name="nested.agent")
    def call(to: str) -> str:
        return str(agent.invoke({"items": [to]})["items"][-1])

    failing = [True]

    def body(state: Items) -> Any:
        first = call("a")
        if failing:
            failing.pop()
            raise ValueError("after the first")
        return {"items": [first, call("b")]}

    graph = plain(saver, body)
    with pytest.raises(ValueError, match="after the first"):
        graph.invoke({"items": []}, CONFIG)
    assert graph.invoke(None, CONFIG)["items"] == ["pay a", "pay b"]
    assert world.done == {"pay a": 1, "pay b": 1}


def test_no_new_input_goes_past_a_doubt(saver: SafepointSaver) -> None:
    journal, world = ToolJournal(saver), World()
    send = journal.tool(effect="write", name="input.send")(lambda to: world.act("send", to))
    graph = plain(saver, lambda _: {"items": [send("1")]})
    world.fail["send"] = OSError("the line broke")
    for _ in range(3):
        with pytest.raises(InDoubt):
            graph.invoke({"items": ["again"]}, CONFIG)
    assert world.done == {"send 1": 1}
    saver.cp.resolve("t", 1, Done("send 1"))
    assert graph.invoke({"items": ["now"]}, CONFIG)["items"][-1] == "send 1"
    assert world.done == {"send 1": 2}
    assert saver.cp.tasks(status="waiting") == []


def test_more_async_calls_at_once_than_threads(saver: SafepointSaver) -> None:
    journal, world = ToolJournal(saver), World()

    @journal.tool(effect="write", name="wide.send")
    async def send(to: str) -> str:
        await asyncio.sleep(0.01)
        return world.act("send", to)

    async def one(state: Any) -> Any:
        return {"items": [await send(state["to"])]}

    builder = StateGraph(Items).add_node("one", one).add_node("start", lambda _: {}).add_edge(START, "start")
    graph = builder.add_conditional_edges("start", lambda _: [Send("one", {"to": str(i)}) for i in range(40)]).compile(
        checkpointer=saver
    )
    out = asyncio.run(asyncio.wait_for(graph.ainvoke({"items": []}, CONFIG), 25))
    assert out["items"] == [f"send {i}" for i in range(40)]


def test_two_runs_of_one_process_do_not_take_each_other_for_dead(saver: SafepointSaver) -> None:
    journal, begun, go = ToolJournal(saver), threading.Event(), threading.Event()
    ran: list[int] = []

    @journal.tool(effect="write", verify=lambda _: NotDone(), settle_after=0, name="twice.send")
    def send() -> str:
        ran.append(1)
        begun.set()
        assert go.wait(20)
        return "sent"

    failing = [True]

    def body(state: Items) -> Any:
        if failing:
            failing.pop()
            raise ValueError("before the call")
        return {"items": [send()]}

    graph = plain(saver, body)
    with pytest.raises(ValueError, match="before"):
        graph.invoke({"items": []}, CONFIG)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(graph.invoke(None, CONFIG)))
    thread.start()
    assert begun.wait(20)
    with pytest.raises(CallInProgress):
        graph.invoke(None, CONFIG)
    go.set()
    thread.join()
    assert [f["items"] for f in found] == [["sent"]]
    assert ran == [1]


def test_a_cancellation_leaves_nothing_held(saver: SafepointSaver, monkeypatch: pytest.MonkeyPatch) -> None:
    acquire = saver.store.acquire

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.3)
        return acquire(*args, **kwargs)

    monkeypatch.setattr(saver.store, "acquire", slow)

    async def cancelled(enter: Any) -> None:
        task = asyncio.ensure_future(enter)
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def held() -> None:
        async with saver.exclusive("t"):
            await asyncio.sleep(20)

    asyncio.run(cancelled(held()))
    journal = ToolJournal(saver)

    @journal.tool(effect="read", name="cancelled.look")
    async def look() -> str:
        await asyncio.sleep(20)
        return ""

    async def body(state: Items) -> Any:
        return {"items": [await look()]}

    asyncio.run(cancelled(plain(saver, body).ainvoke({"items": []}, CONFIG)))
    monkeypatch.undo()
    lease = saver.store.lease("t")
    assert lease is not None
    assert not lease.live
    with saver.exclusive("t"):
        pass


@pytest.mark.parametrize("part", ["intent", "result"])
def test_a_store_that_fails_is_no_error_of_the_tool(saver: SafepointSaver, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()

    @tool
    def send(to: str) -> str:
        """Send."""
        return world.act("send", to)

    journal = ToolJournal(saver)
    node = ToolNode([send], handle_tool_errors=True, wrap_tool_call=journal.wrap_tool_call)
    calls = [{"name": "send", "args": {"to": "1"}, "id": "1"}]
    builder = StateGraph(MessagesState).add_node("reply", lambda _: {"messages": [AIMessage("", tool_calls=calls)]})
    builder.add_node("tools", node)
    graph = builder.add_edge(START, "reply").add_edge("reply", "tools").compile(checkpointer=saver)
    commit, failing = saver.store.commit, [True]

    def cut(sent: Any) -> Any:
        if sent.calls and failing and (sent.calls[0].row.status == "started") == (part == "intent"):
            failing.pop()
            raise Unavailable("the store does not answer", "the line is cut", "Wait.")
        return commit(sent)

    monkeypatch.setattr(saver.store, "commit", cut)
    with pytest.raises(Unavailable) as caught:
        graph.invoke({"messages": [("user", "go")]}, CONFIG, durability="sync")
    again = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(again, Unavailable)
    assert (again.what, again.why) == (caught.value.what, caught.value.why)
    assert [m.content for m in graph.invoke(None, CONFIG)["messages"]][-1] == "send 1"
    assert world.done == {"send 1": 1}


def test_a_class_of_the_graphs_schema_is_a_result(saver: SafepointSaver) -> None:
    journal = ToolJournal(saver)
    made = journal.tool(effect="read", name="schema.make")(lambda: Own(3))
    graph = StateGraph(OwnState).add_node("n", lambda _: {"own": made()}).add_edge(START, "n").compile(checkpointer=saver)
    assert graph.invoke({}, CONFIG)["own"] == Own(3)


@dataclass
class Own:
    n: int


class OwnState(TypedDict, total=False):
    own: Own


def test_a_journal_of_another_saver_is_refused(saver: SafepointSaver) -> None:
    with SafepointSaver("memory://") as other:
        send = ToolJournal(other).tool(effect="write", name="other.send")(lambda: "sent")
        with pytest.raises(UsageError, match="not the saver of this journal"):
            plain(saver, lambda _: {"items": [send()]}).invoke({"items": []}, CONFIG)

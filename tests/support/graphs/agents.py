"""Programs of ``create_agent``: a model that answers by rule, tools that note their runs, middlewares of LangChain's own."""

from __future__ import annotations

import re
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import (
    AgentMiddleware,
    AgentState,
    HumanInTheLoopMiddleware,
    ModelCallLimitMiddleware,
    PIIMiddleware,
    SummarizationMiddleware,
    TodoListMiddleware,
    ToolCallLimitMiddleware,
    hook_config,
)
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import StructuredTool
from langgraph.types import Command, interrupt

from tests.support.graphs.driver import NOT_EXIT, Driver, program


class Ruled(BaseChatModel):
    """A model that reads its orders in the question: ``look(1) look(2); look(3); done`` are two replies with tool calls and a last one.

    The reply depends on the messages alone, so a replay gives the same one. Ids of calls and messages depend on them too.
    """

    @property
    def _llm_type(self) -> str:
        return "ruled"

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self

    def _generate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=reply_to(messages))])


def reply_to(messages: list[BaseMessage]) -> AIMessage:
    last = max((i for i, one in enumerate(messages) if isinstance(one, HumanMessage)), default=0)
    orders = str(messages[last].content).split(";")
    done = sum(isinstance(one, AIMessage) for one in messages[last:])
    order = orders[min(done, len(orders) - 1)].strip()
    name = f"{last}.{done}"
    calls: list[Any] = [
        {"name": m[1], "args": {"what": m[2]}, "id": f"call-{name}-{i}", "type": "tool_call"}
        for i, m in enumerate(re.finditer(r"(\w+)\(([^)]*)\)", order))
    ]
    heard = [str(one.content) for one in messages[last:] if isinstance(one, ToolMessage)]
    return AIMessage("" if calls else f"{order} after {heard}", tool_calls=calls, id=f"ai-{name}")


def tool_of(run: Driver, name: str, body: Any) -> StructuredTool:
    """A tool that is asked ``what``."""
    if run.is_async:
        return StructuredTool.from_function(coroutine=body, name=name, description=name)
    return StructuredTool.from_function(run.node(body), name=name, description=name)


def noting(run: Driver, name: str, ran: list[str]) -> StructuredTool:
    async def tool(what: str) -> str:
        ran.append(f"{name}({what})")
        return f"{name} saw {what}"

    return tool_of(run, name, tool)


def ask(text: str) -> dict[str, Any]:
    return {"messages": [HumanMessage(text, id=f"h-{abs(hash_of(text))}")]}


def hash_of(text: str) -> int:
    return sum(i * ord(c) for i, c in enumerate(text))


def agent(run: Driver, tools: list[Any], *middleware: Any, **options: Any) -> Any:
    return create_agent(Ruled(), tools, middleware=middleware, checkpointer=run.saver, **options)


@program()
async def agent_parallel_tools(run: Driver) -> None:
    """Two rounds of tool calls, the first of four at once; two turns."""
    ran: list[str] = []
    graph = agent(run, [noting(run, "look", ran), noting(run, "listen", ran)], system_prompt="Be brief.")
    run.note("first", await run.invoke(graph, ask("look(1) look(2) listen(1) look(1); listen(2); done"), run.thread()))
    run.note("second", await run.invoke(graph, ask("look(3); done again"), run.thread()))
    run.note("ran", sorted(ran))
    await run.look(graph, run.thread())
    await run.spaces(run.thread())


async def _reviewed(run: Driver, *decisions: dict[str, Any]) -> None:
    ran: list[str] = []
    review = HumanInTheLoopMiddleware(interrupt_on={"send": True, "look": False})
    graph = agent(run, [noting(run, "look", ran), noting(run, "send", ran)], review)
    run.note("asked", await run.invoke(graph, ask("look(1); send(a) look(2) send(b); done"), run.thread()))
    await run.look(graph, run.thread(), "asked")
    run.note("answered", await run.invoke(graph, Command(resume={"decisions": list(decisions)}), run.thread()))
    run.note("next turn", await run.invoke(graph, ask("look(3); bye"), run.thread()))
    run.note("ran", sorted(ran))
    await run.look(graph, run.thread())


@program()
async def agent_approved(run: Driver) -> None:
    """A person approves two calls."""
    await _reviewed(run, {"type": "approve"}, {"type": "approve"})


@program()
async def agent_edited(run: Driver) -> None:
    """A person changes one call and approves the other."""
    await _reviewed(run, {"type": "edit", "edited_action": {"name": "send", "args": {"what": "changed"}}}, {"type": "approve"})


@program()
async def agent_rejected(run: Driver) -> None:
    """A person rejects one call, and answers for the other."""
    await _reviewed(run, {"type": "reject", "message": "no"}, {"type": "approve"})


@program()
async def agent_interrupt_in_tool(run: Driver) -> None:
    """A tool that asks, beside one that does not and does not run again."""
    ran: list[str] = []

    async def confirm(what: str) -> str:
        return f"{what}: {interrupt(f'{what}?')}"

    graph = agent(run, [noting(run, "look", ran), tool_of(run, "confirm", confirm)])
    run.note("asked", await run.invoke(graph, ask("look(1) confirm(a) confirm(b); done"), run.thread()))
    state = await run.state(graph, run.thread())
    run.note("state", state)
    answers = {one.id: f"yes, {one.value}" for one in state.interrupts}
    run.note("answered", await run.invoke(graph, Command(resume=answers), run.thread()))
    run.note("ran", ran)
    await run.look(graph, run.thread())


@program()
async def agent_as_a_tool(run: Driver) -> None:
    """A tool that is an agent, called in two turns; its own tool is reviewed by a person."""
    ran: list[str] = []
    review = HumanInTheLoopMiddleware(interrupt_on={"send": True})
    inner = create_agent(Ruled(), [noting(run, "send", ran), noting(run, "look", ran)], middleware=[review], name="inner")

    async def delegate(what: str) -> str:
        found = await run.call(inner, ask(f"look({what}); send({what}); inner done"))
        return str(found["messages"][-1].content)

    graph = agent(run, [tool_of(run, "delegate", delegate)])
    for turn in range(2):
        run.note("asked", await run.invoke(graph, ask(f"delegate(job {turn}); done"), run.thread()))
        run.note("answered", await run.invoke(graph, Command(resume={"decisions": [{"type": "approve"}]}), run.thread()))
    run.note("sent", [one for one in ran if one.startswith("send")])
    await run.look(graph, run.thread())
    await run.spaces(run.thread())


class Counting(AgentMiddleware[Any, Any]):
    """A middleware with a state of its own and hooks at both ends."""

    class State(AgentState[Any], total=False):
        """What is counted."""

        counted: int

    state_schema = State

    def before_model(self, state: Any, runtime: Any) -> dict[str, Any]:
        return {"counted": state.get("counted", 0) + 1}

    @hook_config(can_jump_to=["model"])
    def after_model(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        if state["counted"] == 2:
            return {"messages": [HumanMessage("look(9); by the middleware", id="h-middleware")], "jump_to": "model"}
        return None


@program()
async def agent_middlewares(run: Driver) -> None:
    """Six middlewares, some of which replace messages, over three turns."""
    ran: list[str] = []
    graph = agent(
        run,
        [noting(run, "look", ran)],
        Counting(),
        TodoListMiddleware(),
        SummarizationMiddleware(Ruled(), trigger=("messages", 9), keep=("messages", 4)),
        PIIMiddleware("email", strategy="redact"),
        ModelCallLimitMiddleware(thread_limit=20),
        ToolCallLimitMiddleware(thread_limit=10),
    )
    for turn in range(3):
        question = f"look({turn}) look(x{turn}); done for me@there.example"
        run.note(f"turn {turn}", await run.invoke(graph, ask(question), run.thread()))
    run.note("ran", sorted(ran))
    await run.look(graph, run.thread())


@program(durabilities=NOT_EXIT)
async def agent_replayed(run: Driver) -> None:
    """Every checkpoint of an agent's turn is run from."""
    ran: list[str] = []
    graph = agent(run, [noting(run, "look", ran)])
    await run.invoke(graph, ask("look(1) look(2); done"), run.thread())
    for state in reversed(await run.history(graph, run.thread())):
        run.note(f"from {state.metadata['step']}", await run.attempt(run.invoke(graph, None, state.config)))
    run.note("in", await run.invoke(graph, ask("look(3); more"), run.thread()))
    await run.look(graph, run.thread())


@program()
async def agent_structured(run: Driver) -> None:
    """An agent whose tool's result carries an artifact and whose state holds what is no message."""

    async def measure(what: str) -> Any:
        return Command(
            update={"messages": [ToolMessage(f"{what} measured", tool_call_id=called[0], artifact={"raw": [1, 2.5]})]}
        )

    called = ["call-0.0-0"]
    graph = agent(run, [tool_of(run, "measure", measure)])
    run.note("result", await run.invoke(graph, ask("measure(it); done"), run.thread()))
    await run.look(graph, run.thread())

"""Programs that stop and are answered: in nodes, in tools, in subgraphs, in parallel, before and after nodes."""

from __future__ import annotations

from typing import Any

from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, Send, interrupt

from tests.support.graphs.driver import NOT_EXIT, Driver, program
from tests.support.graphs.shapes import Log, adds, chain, line, step
from tests.support.graphs.subgraphs import outer


def asks(run: Driver, name: str, *questions: str) -> Any:
    """A node that interrupts with each question, and adds the answers."""

    async def node(state: Log) -> dict[str, Any]:
        return {"items": [name, *(interrupt(question) for question in questions)]}

    return run.node(node)


def asking(run: Driver, *questions: str) -> StateGraph:
    builder = StateGraph(Log)
    builder.add_node("a", step(run, "a"))
    builder.add_node("ask", asks(run, "ask", *questions))
    builder.add_node("b", step(run, "b"))
    return chain(builder, "a", "ask", "b")


@program()
async def interrupt_and_resume(run: Driver) -> None:
    """A question, its answer, and the same again in a second turn."""
    graph = run.compile(asking(run, "sure?"))
    for turn in range(2):
        run.note("asked", await run.invoke(graph, {"items": [turn]}, run.thread()))
        await run.look(graph, run.thread(), "asked")
        run.note("answered", await run.invoke(graph, Command(resume={"yes": [turn]}), run.thread()))
    await run.look(graph, run.thread())


@program()
async def interrupt_twice_in_a_node(run: Driver) -> None:
    """Three questions of one node: it runs again for each, and gets the answers that it has in order."""
    graph = run.compile(asking(run, "one?", "two?", "three?"))
    run.note("asked", await run.invoke(graph, {"items": []}, run.thread()))
    for answer in (1, ["two"], "three"):
        run.note("answered", await run.invoke(graph, Command(resume=answer), run.thread()))
        await run.look(graph, run.thread(), repr(answer))
    run.note("nothing left", await run.invoke(graph, None, run.thread()))


@program()
async def interrupts_in_parallel(run: Driver) -> None:
    """Two nodes and three Sends that ask at once; answered by a map of ids, part by part."""
    builder = StateGraph(Log)
    builder.add_node("ask", asks(run, "ask", "left?"))
    builder.add_node("ask2", asks(run, "ask2", "right?"))
    builder.add_node("quiet", adds(run, "quiet"))

    async def each(given: dict[str, Any]) -> dict[str, Any]:
        return {"items": [interrupt(f"each {given['i']}?")]}

    builder.add_node("each", run.node(each))
    builder.add_node("end", step(run, "end"))
    builder.add_conditional_edges(
        START,
        lambda state: ["ask", "ask2", "quiet", *(Send("each", {"i": i}) for i in range(3))],
        ["ask", "ask2", "quiet", "each"],
    )
    for name in ("ask", "ask2", "quiet", "each"):
        builder.add_edge(name, "end")
    graph = run.compile(builder)
    found = await run.invoke(graph, {"items": []}, run.thread())
    asked = {one.value: one.id for one in found["__interrupt__"]}
    run.note("asked", sorted(asked))
    await run.look(graph, run.thread(), "asked")
    some = {asked[q]: q.upper() for q in sorted(asked)[:2]}
    run.note(
        "some", sorted(one.value for one in (await run.invoke(graph, Command(resume=some), run.thread()))["__interrupt__"])
    )
    rest = {asked[q]: q.upper() for q in sorted(asked)[2:]}
    run.note("all", await run.invoke(graph, Command(resume=rest), run.thread()))
    await run.look(graph, run.thread())


@program()
async def interrupt_in_a_subgraph(run: Driver) -> None:
    """The question comes from two graphs down; asked and answered at the top, twice."""
    inner = StateGraph(Log)
    inner.add_node("deep", asking(run, "deep?").compile())
    inner.add_node("after", step(run, "after"))
    graph = outer(run, chain(inner, "deep", "after").compile())
    for turn in range(2):
        run.note("asked", await run.invoke(graph, {"items": [turn]}, run.thread()))
        run.note("with subgraphs", await run.state(graph, run.thread(), subgraphs=True))
        run.note("answered", await run.invoke(graph, Command(resume=f"answer {turn}"), run.thread()))
    await run.look(graph, run.thread())
    await run.spaces(run.thread())


@program()
async def interrupt_in_a_stateful_subgraph(run: Driver) -> None:
    """A subgraph that remembers, and asks in every turn."""
    graph = outer(run, asking(run, "sure?").compile(checkpointer=True))
    for turn in range(3):
        run.note("asked", await run.invoke(graph, {"items": [turn]}, run.thread()))
        run.note("answered", await run.invoke(graph, Command(resume=f"answer {turn}"), run.thread()))
    await run.look(graph, run.thread())
    await run.spaces(run.thread())


@program()
async def interrupts_in_subgraphs_under_send(run: Driver) -> None:
    """Three calls of one subgraph ask at once; answered by a map."""
    builder = StateGraph(Log)
    inner = StateGraph(Log)
    inner.add_node("x", adds(run, "x"))

    async def ask(state: Log) -> dict[str, Any]:
        return {"items": [interrupt(f"which {state['items'][0]}?")]}

    inner.add_node("ask", run.node(ask))
    builder.add_node("inner", chain(inner, "x", "ask").compile())
    builder.add_conditional_edges(START, lambda state: [Send("inner", {"items": [i]}) for i in range(3)], ["inner"])
    graph = run.compile(builder)
    found = await run.invoke(graph, {"items": []}, run.thread())
    answers = {one.id: one.value.upper() for one in found["__interrupt__"]}
    run.note("asked", len(answers))
    run.note("answered", await run.invoke(graph, Command(resume=answers), run.thread()))
    await run.look(graph, run.thread())
    await run.spaces(run.thread())


@program()
async def stop_before_and_after(run: Driver) -> None:
    """Stops around nodes, named at compile time and by the caller."""
    graph = run.compile(line(run, "a", "b", "c", "d"), interrupt_before=["b"], interrupt_after=["c"])
    run.note("in", await run.invoke(graph, {"items": []}, run.thread()))
    for i in range(3):
        await run.look(graph, run.thread(), f"stop {i}")
        run.note(f"on {i}", await run.invoke(graph, None, run.thread()))
    bare = run.compile(line(run, "a", "b", "c", "d"))
    run.note("all", await run.invoke(bare, {"items": []}, run.thread("u"), interrupt_after="*"))
    while (await run.state(bare, run.thread("u"))).next:
        run.note("on", await run.stream(bare, None, run.thread("u"), interrupt_after="*"))
    await run.look(bare, run.thread("u"))


@program()
async def interrupt_then_new_input(run: Driver) -> None:
    """A question that nobody answers: new input comes instead."""
    graph = run.compile(asking(run, "sure?"))
    run.note("asked", await run.invoke(graph, {"items": [1]}, run.thread()))
    run.note("asked anew", await run.invoke(graph, {"items": [2]}, run.thread()))
    await run.look(graph, run.thread(), "anew")
    run.note("answered", await run.invoke(graph, Command(resume="yes"), run.thread()))
    await run.look(graph, run.thread())


@program()
async def resume_at_explicit_head(run: Driver) -> None:
    """The answer is given with the id of the checkpoint that asks; and a run goes on from an explicit newest one."""
    graph = run.compile(asking(run, "one?", "two?"))
    await run.invoke(graph, {"items": [1]}, run.thread())
    for answer in ("yes", "no"):
        head = (await run.state(graph, run.thread())).config
        run.note(answer, await run.invoke(graph, Command(resume=answer), head))
    head = (await run.state(graph, run.thread())).config
    run.note("input at head", await run.invoke(graph, {"items": [2]}, head))
    await run.look(graph, run.thread())


@program()
async def resume_with_update_and_goto(run: Driver) -> None:
    """An answer that brings values, and one that goes elsewhere."""
    graph = run.compile(asking(run, "sure?"))
    await run.invoke(graph, {"items": [1]}, run.thread())
    run.note("update", await run.invoke(graph, Command(resume="yes", update={"items": ["by the way"]}), run.thread()))
    await run.invoke(graph, {"items": [2]}, run.thread())
    run.note("goto", await run.invoke(graph, Command(goto="b", update={"items": ["skipped"]}), run.thread()))
    await run.look(graph, run.thread())


@program(durabilities=NOT_EXIT)
async def interrupt_replayed(run: Driver) -> None:
    """Back to before the question: it is asked again, and answered otherwise, beside the first answer."""
    graph = run.compile(asking(run, "sure?"))
    await run.invoke(graph, {"items": [1]}, run.thread())
    run.note("first", await run.invoke(graph, Command(resume="yes"), run.thread()))
    before = next(state for state in reversed(await run.history(graph, run.thread())) if state.next == ("a",))
    asked = await run.invoke(graph, None, before.config)
    run.note("asked again", asked)
    run.note("second", await run.invoke(graph, Command(resume="no"), run.thread()))
    await run.look(graph, run.thread())


@program()
async def interrupts_in_a_loop(run: Driver) -> None:
    """A graph that asks in a loop until it is told to stop."""
    builder = StateGraph(Log)
    builder.add_node("ask", asks(run, "ask", "again?"))
    builder.add_edge(START, "ask")
    builder.add_conditional_edges("ask", lambda state: "ask" if state["items"][-1] == "again" else END)
    graph = run.compile(builder)
    await run.invoke(graph, {"items": []}, run.thread())
    for answer in ("again", "again", "again", "stop"):
        run.note(answer, await run.invoke(graph, Command(resume=answer), run.thread()))
    await run.look(graph, run.thread())

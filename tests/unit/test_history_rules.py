"""Every rule of docs/histories.md by a history that keeps it and one that breaks it; and how a format is told."""

import copy
import importlib
import re
import typing

import pytest

from safepoint import State, UsageError, history, messages_complete
from safepoint.codec.kinds import Tagged
from safepoint.history import Context
from safepoint.rules.history import anthropic, base, responses
from tests.support.paths import ROOT

U = {"role": "user", "content": "go"}
END = {"role": "assistant", "content": "done"}


def call(id, arguments="{}"):
    return {"id": id, "type": "function", "function": {"name": "f", "arguments": arguments}}


def asks(*ids, **more):
    return {"role": "assistant", "content": None, "tool_calls": [call(i) for i in ids], **more}


def tool(id, content="r", **more):
    return {"role": "tool", "tool_call_id": id, "content": content, **more}


def fc(id, arguments="{}", **more):
    return {"type": "function_call", "id": f"fc_{id}", "call_id": id, "name": "f", "arguments": arguments, **more}


def out(id, **more):
    return {"type": "function_call_output", "call_id": id, "output": "r", **more}


def rs(id="rs_1", **more):
    return {"type": "reasoning", "id": id, "summary": [], **more}


def msg(id="msg_1", **more):
    content = [{"type": "output_text", "text": "hi", "annotations": []}]
    return {"type": "message", "id": id, "role": "assistant", "status": "completed", "content": content, **more}


def use(id, input=None, **more):
    return {"type": "tool_use", "id": id, "name": "f", "input": {} if input is None else input, **more}


def res(id, **more):
    return {"type": "tool_result", "tool_use_id": id, "content": "r", **more}


def text(value="t"):
    return {"type": "text", "text": value}


def a(*blocks, **more):
    return {"role": "assistant", "content": list(blocks), **more}


def u(*blocks):
    return {"role": "user", "content": list(blocks)}


def think(**more):
    return {"type": "thinking", "thinking": "", "signature": "sig", **more}


def server(id):
    return {"type": "server_tool_use", "id": id, "name": "web_search", "input": {}}


def found(id):
    return {"type": "web_search_tool_result", "tool_use_id": id, "content": []}


NEW = "claude-opus-5-5"
UNKNOWN_THOUGHT = {"type": "redacted_thinking", "data": ""}

# Rule, format, context, a history that keeps it, one that breaks it, and the message that is named.
CASES = [
    ("C1", "chat", {}, [U, asks("x", "y"), tool("y"), tool("x"), END], [U, asks("x", "y"), tool("x"), U], 1),
    ("C1", "chat", {}, [U, asks("x"), tool("x")], [U, asks("x")], 1),
    ("C2", "chat", {}, [U, asks("x"), tool("x")], [U, asks("x"), tool("x"), tool("z")], 3),
    ("C2", "chat", {}, [U, asks("x"), tool("x"), U], [U, asks("x"), U, tool("x")], 3),
    ("C2", "chat", {}, [U, asks("x"), tool("x")], [tool("x"), U], 0),
    ("C3", "chat", {}, [U, asks("x"), tool("x")], [U, asks("x"), tool("x"), tool("x")], 3),
    ("C4", "chat", {}, [U, END], [U, {**END, "tool_calls": []}], 1),
    ("C4", "chat", {}, [U, END], [U, {**END, "tool_calls": None}], 1),
    ("C5", "chat", {}, [U, asks("x"), tool("x")], [U, {"role": "assistant", "content": None}, U], 1),
    ("C5", "chat", {}, [U, {"role": "assistant", "refusal": "no"}, U], [U, {"role": "assistant"}, U], 1),
    ("C6", "chat", {}, [U, asks("x", "y"), tool("x"), tool("y")], [U, asks("x", "x"), tool("x")], 1),
    ("C6", "chat", {}, [U, asks("x"), tool("x")], [U, asks(None), U], 1),
    ("C7", "chat", {}, [U, asks("x"), tool("x", "")], [U, asks("x"), tool("x", None)], 2),
    ("C7", "chat", {}, [U, asks("x"), tool("x", [text()])], [U, asks("x"), tool("x", [{"type": "image_url"}])], 2),
    ("C8", "chat", {}, [U, asks("x"), tool("x")], [U, {**asks(), "tool_calls": [call("x", '{"a')]}, tool("x")], 1),
    ("C8", "chat", {}, [U, asks("x"), tool("x")], [U, {**asks(), "tool_calls": [call("x", {})]}, tool("x")], 1),
    ("C9", "chat", {}, [U, END], [U, {**END, "parsed": None}], 1),
    ("C9", "chat", {}, [U, END], [U, {**END, "function_call": None}], 1),
    ("R1", "responses", {}, [U, fc("x"), fc("y"), out("y"), out("x")], [U, fc("x"), fc("y"), out("y"), U], 1),
    ("R1", "responses", {}, [U, {**fc("x"), "type": "custom_tool_call", "input": ""}, {**out("x"), "type": "custom_tool_call_output"}],
     [U, {**fc("x"), "type": "custom_tool_call", "input": ""}, out("x")], 1),
    ("R2", "responses", {}, [U, fc("x"), out("x")], [U, out("x"), fc("x"), out("x")], 1),
    ("R2", "responses", {}, [U, fc("x"), out("x")], [U, fc("x"), out("x"), out("x")], 3),
    ("R3", "responses", {}, [U, rs(), fc("x"), out("x")], [U, rs(), U], 1),
    ("R3", "responses", {}, [U, rs(), msg()], [U, rs()], 1),
    ("R3", "responses", {}, [U, rs(), msg()], [U, rs(), {k: v for k, v in msg().items() if k != "id"}], 1),
    ("R4", "responses", {}, [U, msg("m1"), U, msg("m2")], [U, msg("m1"), U, msg("m1")], 3),
    ("R5", "responses", {"stored": False}, [U, rs(encrypted_content="e"), msg()], [U, rs(), msg()], 1),
    ("R5", "responses", {"stored": False}, [U, msg()], [U, {"type": "item_reference", "id": "msg_7"}], 1),
    ("R5", "responses", {}, [U, msg()], [U, {"type": "item_reference", "id": "msg_7"}], 1),
    ("R6", "responses", {}, [U, rs(), msg()], [U, {k: v for k, v in rs().items() if k != "summary"}, msg()], 1),
    ("R7", "responses", {}, [U, rs(encrypted_content=None), msg(phase=None)], [U, msg(status=None)], 1),
    ("R7", "responses", {}, [U, fc("x"), out("x", status=None)], [U, fc("x", status=None), out("x")], 1),
    ("R8", "responses", {}, [U, msg("m1", phase="final_answer"), U, msg("m2", phase="final_answer")],
     [U, msg("m1", phase="final_answer"), U, msg("m2")], 3),
    ("R9", "responses", {"continues": True}, [out("x"), U], [U, msg()], 1),
    ("A1", "anthropic", {}, [U, a(text())], [a(text()), U], 0),
    ("A2", "anthropic", {}, [U, a(use("x"), use("y")), u(res("y")), u(res("x"))], [U, a(use("x"), use("y")), u(res("x"))], 1),
    ("A2", "anthropic", {}, [U, a(use("x")), u(res("x")), a(text())], [U, a(use("x")), U, a(text()), u(res("x"))], 1),
    ("A3", "anthropic", {}, [U, a(use("x")), u(res("x"))], [U, a(text()), u(res("x"))], 2),
    ("A3", "anthropic", {}, [U, a(use("x")), u(res("x"))], [U, a(use("x")), u(res("x"), res("x"))], 2),
    ("A3", "anthropic", {}, [U, a(use("x")), u(res("x"))], [u(res("x")), a(text())], 0),
    ("A4", "anthropic", {}, [U, a(use("x")), u(res("x")), a(use("y")), u(res("y"))],
     [U, a(use("x")), u(res("x")), a(use("x")), u(res("x"))], 3),
    ("A4", "anthropic", {}, [U, a(use("x_-9")), u(res("x_-9"))], [U, a(use("x.9")), u(res("x.9"))], 1),
    ("A5", "anthropic", {"model": NEW, "asking": True}, [U, a(text()), U], [U, a(text())], 1),
    ("A5", "anthropic", {"model": NEW, "asking": True}, [U, a(server("s"))], [U, END], 1),
    ("A6", "anthropic", {}, [U, a()], [U, a(), U], 1),
    ("A6", "anthropic", {}, [U, a(text("t"))], [U, a(text(""))], 1),
    ("A7", "anthropic", {}, [U, a(think(), text())], [U, a({"type": "thinking", "thinking": "so"}, text())], 1),
    ("A7", "anthropic", {}, [U, a(think(), text())], [U, a(UNKNOWN_THOUGHT, text())], 1),
    ("A7", "anthropic", {"thinking": True}, [U, a(think(), use("x")), u(res("x"))], [U, a(use("x")), u(res("x"))], 1),
    ("A7", "anthropic", {"before": [U, a(think(), text())]}, [U, a(think(), text()), U], [U, a(think(signature="n"), text()), U], 1),
    ("A8", "anthropic", {}, [U, a(use("x", {"k": 1})), u(res("x"))], [U, a(use("x", "{}")), u(res("x"))], 1),
    ("A9", "anthropic", {}, [U, a(text())], [U, a(text(), id="msg_1")], 1),
    ("A9", "anthropic", {}, [U, a(text())], [U, a({**text(), "parsed": None})], 1),
    ("A10", "anthropic", {}, [U, a(server("s"), found("s"), text()), U], [U, a(server("s")), U], 1),
    ("A10", "anthropic", {}, [U, a(server("s"), use("x")), u(res("x")), a(found("s"))], [U, a(found("s"))], 1),
    ("A11", "anthropic", {}, [U, a(use("x")), u(res("x"), text())], [U, a(use("x")), u(text(), res("x"))], 2),
    ("A11", "anthropic", {}, [U, a(use("x")), u(res("x")), U], [U, a(use("x")), U, u(res("x"))], 3),
    ("A12", "anthropic", {}, [U, a(text(), use("x")), u(res("x"))], [U, a(use("x"), text()), u(res("x"))], 1),
    ("A13", "anthropic", {"model": NEW, "prefix": "p", "kept_prefix": "q"}, [U, a(text()), U], [U, a(think(), text()), U], 1),
    ("A13", "anthropic", {"model": NEW, "before": [U, a(think())]}, [U, a(think()), U], [{**U, "content": "GO"}, a(think())], 0),
]  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "format", "context", "good", "bad", "index"), CASES, ids=[f"{c[0]}-{n}" for n, c in enumerate(CASES)]
)
def test_a_rule(rule, format, context, good, bad, index):
    known = Context(format=format, **context)
    before = copy.deepcopy((good, bad))
    assert history.check(good, known) == []
    broken = [f for f in history.check(bad, known) if f.rule == rule]
    assert [f.index for f in broken] == [index]
    (fault,) = broken
    assert fault.format == format
    assert fault.why
    assert fault.remedy == history.RULES[rule].remedy
    assert str(fault).startswith(f"message {index}: {rule}: ")
    assert (good, bad) == before
    # The format is told by the messages where they show it.
    if history.detect(bad) == format:
        assert fault in history.check(bad, Context(**context))


def test_every_rule_has_both_examples_and_is_in_the_docs():
    wanted = {f"C{n}" for n in range(1, 10)} | {f"R{n}" for n in range(1, 10)} | {f"A{n}" for n in range(1, 14)}
    assert set(history.RULES) == wanted == {c[0] for c in CASES}
    page = (ROOT / "docs" / "histories.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| ([CRA]\d+) \|", page, re.MULTILINE)) == wanted


def test_rules_about_the_history_as_a_whole():
    many = history.check([U] * (anthropic.MOST + 1), Context(format="anthropic"))
    assert [(f.rule, f.index) for f in many] == [("A1", -1)]
    both = history.check([U], Context(format="responses", continues=True, stored=False))
    assert [(str(f)) for f in both] == ["the history: R5: the request goes on from a response that is not kept"]


def test_the_format_of_a_history():
    kept = {"type": "message", "id": "m", "model": "c", "stop_reason": "end_turn", **a(text())}
    formats: dict[str, list[list]] = {
        "plain": [[], [U], [{"role": "system", "content": "s"}, U, END], [u(text()), a(text())]],
        "chat": [[U, asks("x")], [tool("x")], [{"role": "user", "content": [{"type": "image_url"}]}]],
        "responses": [[U, fc("x")], [rs()], [msg()], [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}]],
        "anthropic": [[U, a(use("x"))], [u(res("x"))], [a(think())], [U, kept], [a(found("s"))]],
        "": [[7], ["x"], [None], [U, {"content": 3}], [asks("x"), a(use("x"))], [fc("x"), tool("x")], [{"role": "model"}],
             [{"type": "ai", "content": ""}]],
    }  # fmt: skip
    for format, messages in formats.items():
        for m in messages:
            assert history.detect(m) == format, m
            if not format:
                assert history.check(m) == []
                assert history.repair(m).messages == m
                assert messages_complete(State("t", messages=m)) is None
                with pytest.raises(UsageError, match="no format"):
                    history.trim(m, 1)
    assert history.check([7, tool("x")], Context(format="chat")) == []  # no word can make messages of these
    with pytest.raises(UsageError, match="'xml'"):
        Context(format="xml")


def test_models_by_name():
    for name, prefill, binds in [
        ("", True, False), ("claude-opus-4-5", True, False), ("claude-haiku-4-5-20251001", True, False),
        ("claude-opus-4-6", False, False), ("claude-opus-5", False, False), ("claude-fable-5", False, False),
        ("claude-fable-5-1", False, True), ("claude-mythos-5-2", False, True), ("claude-sonnet-5-5", False, True),
        ("claude-haiku-5-5", False, True), ("claude-opus-5-51", False, False), ("gpt-7", True, False),
    ]:  # fmt: skip
        known = Context(model=name)
        assert (known.has_prefill, known.binds) == (prefill, binds), name
    assert Context(model=NEW, prefill=True, preserved=False).has_prefill
    assert not Context(model=NEW, preserved=False).binds


def test_the_prefix_that_thinking_is_bound_to():
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    same = [{"input_schema": {"type": "object"}, "name": "f"}]
    assert history.prefix_of("s", tools) == history.prefix_of("s", same)
    assert (
        len({history.prefix_of("s", tools), history.prefix_of("t", tools), history.prefix_of("s"), history.prefix_of("s", [])})
        == 3
    )


def test_what_a_state_says_of_its_messages():
    ctx = {"format": "anthropic", "model": NEW, "stored": False, "prefix": "p", "other": 1, "thinking": "yes"}
    known = base.context_in({"history": ctx})
    assert (known.format, known.model, known.stored, known.prefix, known.thinking) == ("anthropic", NEW, False, "p", False)
    for other in ({}, {"history": "mine"}, {"history": {"format": "xml"}}, None):
        assert base.context_in(other) == Context()
    bad = [a(text()), U]
    assert messages_complete(State("t", messages=bad)) is None  # text alone, of any provider
    said = messages_complete(State("t", messages=bad, metadata={"history": {"format": "anthropic"}}))
    assert said == "message 0: A1: the history begins with assistant"


def test_what_makes_a_checkpoint_unhealthy():
    def says(messages, **more):
        return messages_complete(State("t", messages=messages, metadata=more))

    assert says([U, asks("x", "y"), tool("x")]) is None  # a resume answers y
    assert says([U, asks("x"), U]) is None
    assert says([U, asks("x"), END]) == "message 1: C1: 1 of its calls has no answer right after it"
    assert says([U, asks("x"), tool("x"), {**END, "annotations": []}]) == (
        "message 3: C9: it has the key annotations, which only replies have"
    )
    assert says([U, {**asks(), "tool_calls": [call("x", "{")]}, tool("x"), END]) is None  # a note
    assert says([U, rs(), fc("x"), rs("rs_2")]) is None  # cut off
    check = history.healthy(Context(), but=("C9",))
    assert (
        check(State("t", messages=[U, {**END, "tool_calls": [], "parsed": None}])) == "message 1: C4: its tool_calls is empty"
    )
    assert (
        history.healthy(Context(), but=("C9", "C4"))(State("t", messages=[U, {**END, "tool_calls": [], "parsed": None}]))
        is None
    )


def test_objects_of_the_sdks_are_looked_at_in_wire_form():
    openai_chat = importlib.import_module("openai.types.chat")
    anthropic_types = importlib.import_module("anthropic.types")
    reply = openai_chat.ChatCompletionMessage.model_validate(asks("x", "y"))
    mended = history.repair([U, reply, tool("x")])
    assert mended.format == "chat"
    assert mended.messages[1] is reply
    assert mended.messages[3]["tool_call_id"] == "y"
    block = anthropic_types.ToolUseBlock.model_validate(use("x"))
    assert [f.rule for f in history.check([U, {"role": "assistant", "content": [block]}])] == ["A2"]
    whole = {"id": "m", "type": "message", "model": "c", "usage": {"input_tokens": 1, "output_tokens": 1}, **a(use("x"))}
    for stop, dropped in (("tool_use", ()), (None, (1,))):
        message = anthropic_types.Message.model_validate({**whole, "stop_reason": stop})
        # Live, and read without its class, as doctor and show do.
        for kept in (message, Tagged("sdk", "anthropic:Message", {**whole, "stop_reason": stop, "~_request_id": "r"})):
            found = history.repair([U, kept])
            assert (found.format, found.dropped, [f.rule for f in found.faults]) == ("anthropic", dropped, [])
    assert [f.rule for f in history.check([U, Tagged("sdk", "openai:Message", {**asks("x"), "~parsed": 1})])] == ["C1"]
    fields = {"-role": "tool", ".tool_call_id": "x", "+content": ""}
    assert [f.rule for f in history.check([U, Tagged("dataclass", "app:Message", fields)])] == ["C2"]


def test_the_tables_of_keys_are_those_of_the_installed_sdks():
    types = importlib.import_module("anthropic.types")
    params = importlib.import_module("openai.types.responses.response_input_param")
    for name, keys in anthropic.KEYS.items():
        param = getattr(types, "".join(p.title() for p in name.split("_")) + "BlockParam")
        assert set(typing.get_type_hints(param)) == keys, name
    seen: dict[str, set[str]] = {}
    for param in typing.get_args(params.ResponseInputItemParam):
        hints = typing.get_type_hints(param)
        found = [t for t in typing.get_args(hints["type"]) if isinstance(t, str)] or [
            s for t in typing.get_args(hints["type"]) for s in typing.get_args(t)
        ]
        seen.setdefault(found[0], set()).update(k for k, t in hints.items() if type(None) in typing.get_args(t))
    assert set(seen) == responses.TYPES | {"message"}
    assert {t: n for t, n in seen.items() if n} == responses._NULLS

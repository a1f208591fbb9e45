"""Objects of the OpenAI and Anthropic SDKs: what is stored is what is sent, and what comes back sends it again, byte for byte."""

import base64
import copy
import gc
import io
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pydantic
import pytest
from anthropic.types import Message, RedactedThinkingBlock, TextBlock, ThinkingBlock, ToolUseBlock
from anthropic.types.parsed_message import ParsedMessage, ParsedTextBlock
from openai.types.chat import ChatCompletion, ChatCompletionMessage, ParsedChatCompletionMessage
from openai.types.responses import Response, ResponseFunctionToolCall, ResponseOutputMessage, ResponseReasoningItem

import safepoint
from safepoint.codec import GLOBAL, Registry, chunks, decode, decode_plain, encode, encode_tree, from_json, sdk, to_json
from safepoint.errors import Damaged, InvalidState, MissingExtra, RefusedType, SafepointError
from tests.support.codec import ext, refused

ARGUMENTS = '{"x":  12, "ü": "\\u00e9\\ud83d\\ude00"}'  # neither compact nor normalised, on purpose


class Plan(pydantic.BaseModel):
    goal: str


KNOWS_PLAN = Registry(types=[Plan])


def openai_client(answer: Any, sent: list[bytes]) -> openai.OpenAI:
    def handle(request: httpx2.Request) -> httpx2.Response:
        sent.append(request.content)
        return httpx2.Response(200, json=answer, headers={"x-request-id": "req_1"})

    transport = httpx2.MockTransport(handle)
    return openai.OpenAI(
        api_key="none", base_url="http://mock/v1", max_retries=0, http_client=openai.DefaultHttpxClient(transport=transport)
    )


def anthropic_client(answer: Any, sent: list[bytes]) -> anthropic.Anthropic:
    def handle(request: httpx2.Request) -> httpx2.Response:
        sent.append(request.content)
        return httpx2.Response(200, json=answer, headers={"request-id": "req_1"})

    transport = httpx2.MockTransport(handle)
    return anthropic.Anthropic(
        api_key="none", base_url="http://mock", max_retries=0, http_client=anthropic.DefaultHttpxClient(transport=transport)
    )


def completion(**message: Any) -> dict[str, Any]:
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "logprobs": None,
        "message": {"role": "assistant", "content": None, "refusal": None, **message},
    }
    usage = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
    return {"id": "c1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}


CALLS = [{"id": "call_0", "type": "function", "function": {"name": "add", "arguments": ARGUMENTS}}]
CHAT: dict[str, dict[str, Any]] = {
    "text": completion(content=" a\u0000b  é\n", annotations=[]),
    "tools": completion(tool_calls=CALLS),
    "vendor": completion(content="x", reasoning_content="first I …", x_vendor={"b": 1, "a": [True, 1, 1.0, None]}),
    "refusal": completion(refusal="no"),
    "unknown finish": completion(content="x") | {"service_tier": "warp"},
}

RESPONSE: dict[str, Any] = {
    "id": "resp_1", "object": "response", "created_at": 1.0, "model": "m", "status": "completed", "error": None,
    "incomplete_details": None, "instructions": None, "metadata": {}, "parallel_tool_calls": True, "temperature": 1.0,
    "tool_choice": "auto", "tools": [], "top_p": 1.0,
    "usage": {
        "input_tokens": 3, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 1}, "total_tokens": 7,
    },
    "output": [
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA=="},
        {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "add", "arguments": ARGUMENTS, "status": "completed"},
        {
            "type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "phase": "commentary",
            "content": [{"type": "output_text", "text": "Hello  ", "annotations": [], "vendor": 1}],
        },
        {"type": "brand_new_item", "id": "bn_1", "payload": {"z": 1, "a": 2}},
    ],
}  # fmt: skip

MESSAGE: dict[str, Any] = {
    "id": "msg_1", "type": "message", "role": "assistant", "model": "c", "stop_reason": "tool_use", "stop_sequence": None,
    "usage": {"input_tokens": 3, "output_tokens": 4, "cache_read_input_tokens": None},
    "container": {"id": "cont_1", "expires_at": "2026-01-02T03:04:05.678Z"},
    "content": [
        {"type": "thinking", "thinking": "hm …", "signature": "EqQBCkYIARgCKkA+/=="},
        {"type": "thinking", "thinking": "", "signature": "Eq"},
        {"type": "redacted_thinking", "data": "EmwKAhgBEgy3va3pzix=="},
        {"type": "text", "text": " I will add. ", "citations": None},
        {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"b": 1, "a": [1.0, 1, True, None, "\u00e9"]}},
        {"type": "brand_new_block", "x": {"z": 1, "a": 2}},
    ],
}  # fmt: skip


def trip(value: Any, registry: Registry = GLOBAL) -> Any:
    """There and back in both forms, which must agree."""
    data = encode(value, registry)
    tree = decode_plain(data)
    assert encode_tree(from_json(json.loads(json.dumps(to_json(tree))))) == data
    return decode(data, registry)


def alike(a: Any, b: Any) -> None:
    """Class for class and field for field, all the way down, with what was set and what was not."""
    assert type(a) is type(b)
    if isinstance(a, pydantic.BaseModel):
        assert a.model_fields_set == b.model_fields_set
        assert (a.__pydantic_extra__ or {}).keys() == (b.__pydantic_extra__ or {}).keys()
        assert list(vars(a)) == list(vars(b))
        for name in (*vars(a), *(a.__pydantic_extra__ or {})):
            alike(getattr(a, name), getattr(b, name))
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            alike(a[key], b[key])
    elif isinstance(a, list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            alike(x, y)
    else:
        assert a == b


@pytest.mark.parametrize("kind", CHAT)
def test_chat_completions_send_the_same_bytes_after_loading(kind):
    sent: list[bytes] = []
    client = openai_client(CHAT[kind], sent)
    reply = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    again = trip(reply)
    alike(again, reply)
    assert again._request_id == "req_1"  # what the client notes is not sent, and is not lost
    message = trip(reply.choices[0].message)
    alike(message, reply.choices[0].message)
    create: Any = client.chat.completions.create
    create(model="m", messages=[reply.choices[0].message])
    create(model="m", messages=[message])
    create(model="m", messages=[safepoint.wire(message)])
    assert sent[1] == sent[2] == sent[3]
    assert json.loads(sent[1])["messages"] == [CHAT[kind]["choices"][0]["message"]]
    assert b"null" not in sent[1].replace(b'"content":null', b"").replace(b'"refusal":null', b"").replace(b"1.0,null]", b"")


def test_responses_send_every_item_in_order_with_nothing_added():
    sent: list[bytes] = []
    client = openai_client(RESPONSE, sent)
    reply = client.responses.create(model="m", input="hi")
    again = trip(reply)
    alike(again, reply)
    assert [type(item) for item in again.output[:3]] == [ResponseReasoningItem, ResponseFunctionToolCall, ResponseOutputMessage]
    create: Any = client.responses.create
    for output in (reply.output, again.output, trip(reply.output), safepoint.wire(again.output)):
        create(model="m", input=output)
    assert sent[1] == sent[2] == sent[3] == sent[4]
    assert json.loads(sent[1])["input"] == RESPONSE["output"]


def test_anthropic_blocks_and_whole_messages_send_the_same_bytes_after_loading():
    sent: list[bytes] = []
    client = anthropic_client(MESSAGE, sent)
    ask: Any = client.messages.create
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pydantic, at a block that the SDK does not know
        reply = ask(model="m", max_tokens=9, messages=[{"role": "user", "content": "hi"}])
        again = trip(reply)
        alike(again, reply)
        assert [type(b) for b in again.content[:5]] == [
            ThinkingBlock, ThinkingBlock, RedactedThinkingBlock, TextBlock, ToolUseBlock,
        ]  # fmt: skip
        assert again._request_id == "req_1"
        assert again.container.expires_at == reply.container.expires_at
        blocks = trip({"role": "assistant", "content": reply.content})
        for message in (
            {"role": "assistant", "content": reply.content},
            blocks,
            {"role": "assistant", "content": again.content},
            safepoint.wire(again),
            safepoint.wire(blocks),
        ):
            ask(model="m", max_tokens=9, messages=[message])
    assert len(set(sent[1:])) == 1
    assert json.loads(sent[1])["messages"][0]["content"] == MESSAGE["content"]
    # Appended whole, it comes back whole. wire() has what may be sent of it; the object itself would send its id and usage.
    assert safepoint.wire(again) == {"role": "assistant", "content": MESSAGE["content"]}


def parsed_reply() -> Any:
    client = openai_client(completion(content='{"goal": "x"}', annotations=[]), [])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return client.chat.completions.parse(model="m", messages=[{"role": "user", "content": "hi"}], response_format=Plan)


def test_a_parsed_message_keeps_its_value_and_does_not_send_it():
    whole = parsed_reply()
    message = whole.choices[0].message
    assert message.to_dict(warnings=False)["parsed"] == {"goal": "x"}  # what the object would send
    again = trip(message, KNOWS_PLAN)
    assert type(again) is ParsedChatCompletionMessage
    assert again.parsed == Plan(goal="x")
    assert again.tool_calls is None
    assert again.to_dict() == {"content": '{"goal": "x"}', "refusal": None, "role": "assistant", "annotations": []}
    assert safepoint.wire(message) == again.to_dict() == trip(again, KNOWS_PLAN).to_dict()
    assert trip(again, KNOWS_PLAN).parsed == Plan(goal="x")
    sent: list[bytes] = []
    create: Any = openai_client(completion(), sent).chat.completions.create
    create(model="m", messages=[again])
    assert json.loads(sent[0])["messages"] == [again.to_dict()]
    back = trip(whole, KNOWS_PLAN)
    assert back.choices[0].message.parsed == Plan(goal="x")
    assert back.usage == whole.usage
    assert "parsed" not in back.to_dict()["choices"][0]["message"]
    message.tool_calls = []  # a known 400
    assert "tool_calls" not in safepoint.wire(message)
    assert trip(message, KNOWS_PLAN).tool_calls == []
    error = refused(message, Registry(), path="messages[0]")
    assert "Plan is not registered" in str(error)
    assert error.details["path"] == "messages[0].parsed"
    assert "goal" not in str(error)


def test_parsed_parts_of_responses_and_anthropic_messages():
    block = ParsedTextBlock.construct(type="text", text='{"goal": "x"}')
    block.__dict__["parsed_output"] = Plan(goal="x")
    message = ParsedMessage.construct(**{k: v for k, v in MESSAGE.items() if k != "content"}, content=[block])
    again = trip(message, KNOWS_PLAN)
    assert type(again) is ParsedMessage
    assert again.parsed_output == Plan(goal="x")
    assert safepoint.wire(again) == {"role": "assistant", "content": [{"text": '{"goal": "x"}', "type": "text"}]}

    answer = copy.deepcopy(RESPONSE)
    answer["output"] = [answer["output"][1], answer["output"][2]]
    answer["output"][1]["phase"] = "final_answer"
    answer["output"][1]["content"][0]["text"] = '{"goal": "x"}'
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reply = openai_client(answer, []).responses.parse(model="m", input="hi", text_format=Plan)
        assert reply.output_parsed == Plan(goal="x")
        again = trip(reply, KNOWS_PLAN)
        assert again.output_parsed == Plan(goal="x")
        item = trip(reply.output[1], KNOWS_PLAN)
        assert item.content[0].parsed == Plan(goal="x")
        assert safepoint.wire(again.output) == safepoint.wire([reply.output[0], item]) == answer["output"]


def function_call() -> Any:
    fields: Any = {"type": "function_call", "call_id": "c", "name": "n", "arguments": "{}", "async": True}
    return ResponseFunctionToolCall.construct(**fields)


def test_made_by_hand_with_what_was_set_and_what_was_not():
    for value in (
        ChatCompletionMessage(role="assistant", content="x"),
        ChatCompletionMessage(role="assistant", content=None, tool_calls=None),
        ChatCompletionMessage.model_validate({"role": "assistant", "content": "x", "audio": None}),
        TextBlock(type="text", text="x"),
        ToolUseBlock(type="tool_use", id="t", name="n", input={}),
        function_call(),
    ):
        alike(trip(value), value)
    assert safepoint.wire(function_call())["async"] is True  # the object itself sends Python's name for it, too
    assert "async_" not in safepoint.wire(function_call())


def test_what_would_not_come_back_is_refused_with_its_path():
    secret = b"\xff\xd8secret"
    message = ChatCompletionMessage.model_validate({"role": "assistant", "content": "x", "data": b"jpeg"})
    error = refused([message], GLOBAL, path="messages")
    assert "messages[0] cannot be stored" in str(error)
    assert "jpeg" not in str(error)
    odd = ChatCompletionMessage(role="assistant", content="x")
    odd.__dict__["content"] = ("a", "tuple")
    refused(odd, GLOBAL)
    refused(ChatCompletionMessage.model_validate({"role": "assistant", "content": "x", "~x": 1}), GLOBAL)
    # Image data. What can be read only once is refused; text, bytes and paths are values like others.
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": io.BytesIO(secret)}}
    error = refused([{"role": "user", "content": [image]}], GLOBAL, path="messages")
    assert "messages[0]['content'][0]['source']['data']" in str(error)
    assert "Read it once" in error.remedy
    assert "secret" not in str(error)
    for data in (base64.b64encode(secret).decode(), secret, Path("a.png")):
        image["source"]["data"] = data  # type: ignore[index]
        assert trip(image) == image


def test_nothing_is_normalised_when_a_text_is_odd():
    odd = "a\u0301 \ufb01 \r\n\t\u2028 \U0001f600 " + "\ud800"
    message = ChatCompletionMessage.construct(role="assistant", content=odd, big=2**80, tiny=5e-324)
    alike(trip(message), message)


def test_chunks_know_an_unchanged_object_and_see_a_changed_one():
    messages: list[Any] = [ChatCompletionMessage(role="assistant", content=f"{i} " * 40) for i in range(300)]
    first = chunks.pack({"messages": messages}, GLOBAL)
    messages.append({"role": "user", "content": "x" * 60})
    second = chunks.pack({"messages": messages}, GLOBAL, base=first)
    assert len(second.new) < 6
    assert second.digest == chunks.pack({"messages": messages}, GLOBAL).digest
    messages[7].content = "changed"
    third = chunks.pack({"messages": messages}, GLOBAL, base=second)
    assert third.digest != second.digest
    back, _ = chunks.unpack(third.data, third.refs, {o.name: o for p in (first, second, third) for o in p.new}, GLOBAL)
    for a, b in zip(back["messages"], messages, strict=True):
        alike(a, b)
    messages[8].__dict__["content"] = ("not", "text")
    refused(messages, GLOBAL)


def test_the_table_of_tried_objects_does_not_grow():
    gc.collect()
    before = len(sdk._tried)
    for i in range(50):
        encode(ChatCompletionMessage(role="assistant", content=str(i)), GLOBAL)
    gc.collect()
    assert len(sdk._tried) <= before + 1


# Versions, absence, hostility


@pytest.mark.parametrize(
    ("package", "made"),
    [("openai", ChatCompletionMessage(role="assistant", content="x")), ("anthropic", TextBlock(type="text", text="x"))],
)
@pytest.mark.parametrize("version", ["1.99.0", "17.0.0", "", "dev"])
def test_a_version_that_nobody_has_tried_is_said_at_the_first_object(package, made, version, monkeypatch):
    data = encode(made, GLOBAL)
    monkeypatch.setattr(sys.modules[package], "__version__", version)
    error = refused(made, GLOBAL)
    assert f"pip install 'safepoint[{package}]'" in error.remedy
    with pytest.raises(RefusedType, match="this version of safepoint knows"):
        decode(data, GLOBAL)
    assert decode_plain(data).value in ({"content": "x", "role": "assistant"}, {"text": "x", "type": "text"})


def test_the_tested_versions_are_those_that_the_extras_install():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    for package, majors in sdk.KNOWN.items():
        assert f'{package} = ["{package}>={majors[0]},<{majors[-1] + 1}"]' in text


def test_without_the_sdk_the_dict_is_shown_and_exported(tmp_path):
    url = f"sqlite:///{tmp_path}/a.db"
    with safepoint.open(url) as cp:
        state = safepoint.State(task_id="t")
        state.messages += [{"role": "user", "content": "hi"}, ChatCompletionMessage(role="assistant", content="Hello there")]
        cp.save(state)
        alike(cp.load_latest("t").messages[1], state.messages[1])
    program = f"""
import sys
sys.modules["openai"] = None  # as if it were not installed
import safepoint
from safepoint.cli import main
for words in (["show", "t"], ["show", "--raw", "t"], ["export", "t", "out.json"], ["doctor", "t"]):
    try:
        main(["--store", {url!r}, *words])
    except SystemExit as end:
        assert not end.code, (words, end.code)
with safepoint.open({url!r}) as cp:
    try:
        cp.load_latest("t")
    except safepoint.MissingExtra as error:
        print("MISSING", error)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "[1] assistant\n" in done.stdout
    assert "Hello there" in done.stdout
    assert "pip install 'safepoint[openai]'" in done.stdout.partition("MISSING")[2]
    assert "Hello there" in (tmp_path / "out.json").read_text()


def test_loading_imports_the_sdk_by_itself_and_nothing_else():
    data = encode(ChatCompletionMessage(role="assistant", content="x"), GLOBAL)
    program = f"""
import sys
from safepoint.codec import GLOBAL, decode
value = decode({data!r}, GLOBAL)
assert value.to_dict() == {{"content": "x", "role": "assistant"}}
assert "anthropic" not in sys.modules
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)


HOSTILE: list[tuple[str, Any]] = [
    ("os:system", {"command": "true"}),
    ("subprocess:Popen", {"args": ["true"]}),
    ("openai:OpenAI", {"api_key": "x"}),
    ("openai:types", {}),
    ("openai._client:OpenAI", {"api_key": "x"}),
    ("openai.lib.azure:AzureOpenAI", {}),
    ("openai.cli:main", {}),
    ("openai.typesx:A", {}),
    ("openai.types:os", {}),
    ("openai.types.chat.chat_completion_message:BaseModel", {"x": 1}),
    ("openai.types.chat.chat_completion_message:ChatCompletionMessage.__init__", {}),
    ("openai.types.chat.chat_completion_message:ChatCompletionMessage[os:system]", {"role": "assistant"}),
    ("openai.types.chat.chat_completion_message_param:ChatCompletionMessageParam", {"role": "assistant"}),
    ("openai.types.chat.no_such_module:X", {}),
    ("openai.types.chat.:X", {}),
    ("openai.types.chat/../../_client:X", {}),
    ("anthropic.types.text_block:TextBlock", {"text": "x", "type": "text", "~__class__": 1}),
    ("anthropic.types.text_block:TextBlock", {"text": "x", "type": "text", "~model_dump": "x"}),
    ("anthropic.types.text_block:TextBlock", {"text": "x", "type": "text", "~__dict__.x": "x"}),
    ("anthropic.types.text_block:TextBlock", {"text": "x", "type": "text", "~text.x": "x"}),
    ("anthropic.types.text_block:TextBlock", {"text": "x", "type": "text", "~": "eval"}),
    ("anthropic.types.text_block:TextBlock", {"text": "x", "type": "text", "~": 7}),
    ("anthropic.types.text_block:TextBlock", {"text": 7, "type": "text", "_fields_set": 7}),
    ("anthropic.types.text_block:TextBlock", {"_BaseModel__cls": 7, "self": 1}),
    ("openai.types.chat.chat_completion_message:ChatCompletionMessage", 7),
]


@pytest.mark.parametrize(("name", "payload"), HOSTILE)
def test_a_crafted_payload_makes_nothing_but_data(name, payload, monkeypatch):
    for cls in (openai.OpenAI, openai.AzureOpenAI, anthropic.Anthropic, subprocess.Popen):
        monkeypatch.setattr(cls, "__init__", lambda *_a, **_k: pytest.fail("a constructor was called"))
    before = set(sys.modules)
    try:
        value = decode(ext("sdk", payload, name), GLOBAL)
    except (RefusedType, Damaged, InvalidState, MissingExtra):
        pass
    except SafepointError as error:
        pytest.fail(f"{type(error).__name__}: {error}")
    else:
        # An object of data, of an SDK's own types, that sends what was in the payload and no more.
        assert type(value).__module__.startswith(("openai.types.", "anthropic.types."))
        assert value.to_dict(warnings=False) == {k: v for k, v in payload.items() if k[:1] != "~"}
        assert not any(callable(v) for v in vars(value).values())
    assert {m for m in set(sys.modules) - before if not m.startswith(("openai.types", "anthropic.types"))} == set()


def test_what_was_stored_as_a_pydantic_model_of_a_trusted_module_is_read_still():
    """Before SDK objects had a row of their own, ``trust=["openai.types"]`` stored them so."""
    held = {"content": "x", "-refusal": None, "role": "assistant", "-annotations": None, "-audio": None, "-function_call": None,
            "-tool_calls": None, "*": [True, False, "content", "role"]}  # fmt: skip
    name = "openai.types.chat.chat_completion_message:ChatCompletionMessage"
    value = decode(ext("pydantic", held, name), Registry(trust=["openai.types"]))
    assert value.content == "x"
    assert value.to_dict() == {"content": "x", "role": "assistant"}
    with pytest.raises(RefusedType):
        decode(ext("pydantic", held, name), Registry())


def test_a_class_that_sends_something_else_now_is_told():
    name = "openai.types.chat.chat_completion_message_function_tool_call:Function"
    with pytest.raises(InvalidState, match="has changed"):
        decode(ext("sdk", {"_fields_set": "x", "name": "n"}, name), GLOBAL)


def test_replies_and_usage_of_a_model(tmp_path):
    sent: list[bytes] = []
    chat, claude = openai_client(CHAT["tools"], sent), anthropic_client(MESSAGE, sent)
    responses = openai_client(RESPONSE, sent)

    @safepoint.model(name="ask chat")
    def ask_chat(messages: list[Any]) -> ChatCompletion:
        return chat.chat.completions.create(model="m", messages=messages)

    @safepoint.model(name="ask claude")
    def ask_claude(messages: list[Any]) -> Message:
        return claude.messages.create(model="m", max_tokens=9, messages=messages)

    @safepoint.model(name="ask responses")
    def ask_responses(input: list[Any]) -> Response:
        return responses.responses.create(model="m", input=input)

    def step(run: Any) -> None:
        messages: list[Any] = [{"role": "user", "content": "hi"}]
        seen.append([run.call(ask, messages) for ask in (ask_chat, ask_claude, ask_responses)])
        if len(seen) == 1:
            raise InterruptedError
        run.state.messages += [
            seen[1][0].choices[0].message,
            {"role": "assistant", "content": seen[1][1].content},
            *seen[1][2].output,
        ]
        run.finish()

    seen: list[list[Any]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with safepoint.open(f"sqlite:///{tmp_path}/a.db") as cp:
            with pytest.raises(InterruptedError):
                safepoint.run_agent(step, task_id="t", input="hi", store=cp)
            safepoint.run_agent(step, task_id="t", store=cp)
            assert len(sent) == 3
            for a, b in zip(*seen, strict=True):
                alike(a, b)
            assert [c.model for c in cp.calls("t")] == [
                {"model": "m", "usage": {"input": 7, "output": 5}},
                {"model": "c", "usage": {"input": 3, "output": 4}},
                {"model": "m", "temperature": 1.0, "usage": {"input": 3, "output": 4}},
            ]
            state = cp.load_latest("t")
            assert safepoint.wire(state.messages[1:]) == [
                CHAT["tools"]["choices"][0]["message"], {"role": "assistant", "content": MESSAGE["content"]}, *RESPONSE["output"],
            ]  # fmt: skip
            assert [c for c in cp.check() if c.level == "error"] == []

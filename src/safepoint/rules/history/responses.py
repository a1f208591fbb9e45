"""OpenAI Responses: rules R1 to R9, the repair of a tail, and where a window may begin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from safepoint.rules.history.base import (
    Answer,
    Answers,
    Context,
    Fault,
    Mending,
    Open,
    Plain,
    answered,
    crossing,
    fault,
    given,
    is_json,
    is_marked,
    kind,
    role,
    rule,
    text_of,
)

R1 = rule("R1", "each call has its output", "Append an output with its call_id.")
R2 = rule("R2", "an output has its call before it, and is the only one", "Put it after its call, or take it out.")
R3 = rule("R3", "a reasoning item is followed by the item it came with", "Keep both, with their ids, or leave both out.")
R4 = rule("R4", "an item's id is there once", "Leave the second one out.")
R5 = rule("R5", "with store=False nothing refers to what the server keeps",
          "Keep whole items, and reasoning with encrypted_content (include=['reasoning.encrypted_content']).")  # fmt: skip
R6 = rule("R6", "a reasoning item has a summary", "Keep it as it came; [] will do.")
R7 = rule("R7", "an item has no nulls where the API takes none", "Dump items with exclude_unset=True.")
R8 = rule("R8", "assistant messages keep their phase", "Keep items as they came.", note=True)
R9 = rule("R9", "a history of one's own does not go with conversation or previous_response_id", "Use one of them.")

OUTPUTS = {
    "function_call": "function_call_output",
    "custom_tool_call": "custom_tool_call_output",
    "computer_call": "computer_call_output",
    "local_shell_call": "local_shell_call_output",
    "shell_call": "shell_call_output",
    "apply_patch_call": "apply_patch_call_output",
}
"""Calls that the client answers, and how."""
_CALL_OF = {o: c for c, o in OUTPUTS.items()}
_HOSTED = frozenset({
    "web_search_call", "file_search_call", "image_generation_call", "code_interpreter_call", "mcp_list_tools",
    "mcp_approval_request", "mcp_call", "tool_search_call", "tool_search_output", "program", "program_output",
})  # fmt: skip
TYPES = frozenset({*OUTPUTS, *_CALL_OF, *_HOSTED, "reasoning", "item_reference", "compaction", "compaction_trigger",
                   "mcp_approval_response", "additional_tools", "configuration_update"})  # fmt: skip
_NULLS = {
    "message": {"phase"},
    "reasoning": {"encrypted_content"},
    "file_search_call": {"results"},
    "function_call": {"caller"},
    "custom_tool_call": {"caller"},
    "custom_tool_call_output": {"caller"},
    "function_call_output": {"id", "call_id", "caller", "name", "namespace", "status"},
    "computer_call_output": {"id", "acknowledged_safety_checks", "status"},
    "local_shell_call_output": {"status"},
    "shell_call": {"id", "caller", "environment", "status"},
    "shell_call_output": {"id", "caller", "max_output_length", "status"},
    "apply_patch_call": {"id", "caller"},
    "apply_patch_call_output": {"id", "caller", "output"},
    "image_generation_call": {"result", "action", "background", "output_format", "quality", "revised_prompt", "size"},
    "code_interpreter_call": {"code", "outputs"},
    "mcp_list_tools": {"error"},
    "mcp_call": {"approval_request_id", "error", "output"},
    "mcp_approval_response": {"id", "reason"},
    "tool_search_call": {"id", "call_id", "status"},
    "tool_search_output": {"id", "call_id", "status"},
    "item_reference": {"type"},
    "compaction": {"id"},
    "compaction_trigger": {"id"},
    "additional_tools": {"id"},
    "configuration_update": {"id"},
}
"""Keys that may be null, by the parameter types of openai 3.57."""


def type_of(item: Any) -> str:
    found = kind(item)
    return found or ("message" if role(item) else "")


def _is_model(item: Any) -> bool:
    """Whether the item came from the model."""
    t = type_of(item)
    return t in OUTPUTS or t in _HOSTED or t == "reasoning" or (t == "message" and role(item) == "assistant")


def _key(item: Plain) -> str:
    # The output of a local shell call names its call by id, in the API's own types.
    return text_of(item.get("call_id")) or (text_of(item.get("id")) if "local_shell" in type_of(item) else "")


def _f(i: int, r: Any, why: str, *, note: bool | None = None) -> Fault:
    return fault("responses", i, r, why, note=note)


def check(items: Sequence[Plain], context: Context) -> Iterator[Fault]:
    outputs: dict[tuple[str, str], int] = {}
    for i, item in enumerate(items):
        if (call := _CALL_OF.get(type_of(item))) is not None:
            outputs[call, _key(item)] = i
    asked: set[tuple[str, str]] = set()
    done: set[tuple[str, str]] = set()
    ids: set[str] = set()
    phased = any(type_of(x) == "message" and given(x.get("phase")) for x in items)
    mixed = False
    for i, item in enumerate(items):
        t = type_of(item)
        id = text_of(item.get("id"))
        if id and t not in _CALL_OF:
            if id in ids:
                yield _f(i, R4, "an item before it has its id")
            ids.add(id)
        if t in OUTPUTS:
            asked.add((t, _key(item)))
            if outputs.get((t, _key(item)), -1) <= i:
                yield _f(i, R1, f"the {t} has no output")
        elif t in _CALL_OF:
            pair = (_CALL_OF[t], _key(item))
            if pair in done:
                yield _f(i, R2, "its call has an output already")
            elif pair not in asked and not context.continues:
                yield _f(i, R2, "no call before it has its call_id")
                continue
            done.add(pair)
        elif t == "reasoning":
            yield from _reasoning(i, item, items, context)
        elif t == "item_reference":
            why = "it refers to an item that the server keeps" + ("" if context.stored is False else ", and lets go of in time")
            yield _f(i, R5, why, note=context.stored is not False)
        elif t == "message" and role(item) == "assistant" and phased and id and not given(item.get("phase")):
            yield _f(i, R8, "it has no phase, and others have one")
        nulls = [k for k, v in item.items() if v is None and k not in _NULLS.get(t, ())]
        if nulls:
            yield _f(i, R7, f"null stands under {', '.join(sorted(nulls)[:3])}")
        if context.continues and not mixed and _is_model(item):
            mixed = True
            yield _f(i, R9, "it is the model's, and the request goes on from what the server keeps")
    if context.continues and context.stored is False:
        yield _f(-1, R5, "the request goes on from a response that is not kept")


def _reasoning(i: int, item: Plain, items: Sequence[Plain], context: Context) -> Iterator[Fault]:
    after = items[i + 1] if i + 1 < len(items) else None
    if after is None or not _is_model(after):
        yield _f(i, R3, "the item that it came with does not follow")
    elif type_of(after) != "reasoning" and text_of(item.get("id")) and not text_of(after.get("id")):
        yield _f(i, R3, "the item after it has lost its id")
    if context.stored is False and not given(item.get("encrypted_content")):
        yield _f(i, R5, "the reasoning has no encrypted_content")
    if not isinstance(item.get("summary"), list):
        yield _f(i, R6, "it has no summary")


# -- repair


def _is_cut(items: Sequence[Plain]) -> bool:
    """Whether a turn was cut off; none of its calls is answered."""
    last = items[-1]
    if type_of(last) == "reasoning" or any(is_marked(x) for x in items):
        return True
    for x in items:
        t = type_of(x)
        if t == "function_call" and not (is_json(x.get("arguments")) and _key(x) and text_of(x.get("name"))):
            return True
        if t == "custom_tool_call" and not (isinstance(x.get("input"), str) and _key(x)):
            return True
        if t in OUTPUTS and not _key(x):
            return True
        if t == "message" and not given(x.get("content")):
            return True
    return False


def mend(items: Sequence[Plain], answers: Answers, context: Context) -> Mending:
    order = list(range(len(items)))
    done = Mending([*order])
    while True:
        end = next((k + 1 for k in range(len(order) - 1, -1, -1) if _is_model(items[order[k]])), 0)
        begin = end
        while begin and _is_model(items[order[begin - 1]]):
            begin -= 1
        turn, rest = order[begin:end], order[end:]
        has = {(_CALL_OF[t], _key(items[i])) for i in rest if (t := type_of(items[i])) in _CALL_OF}
        calls = [i for i in turn if type_of(items[i]) in OUTPUTS]
        acted = any((type_of(items[i]), _key(items[i])) in has for i in calls)
        if not turn or acted or not _is_cut([items[i] for i in turn]):
            break
        done.dropped += turn
        order = order[:begin] + rest
    edit: list[int | dict[str, Any]] = list(order[:end])
    known: set[tuple[str, str]] = set()
    for i in calls:
        item, t = items[i], type_of(items[i])
        pair = (t, _key(item))
        if pair in has or pair in known or t == "computer_call":  # nothing stands for a screenshot
            continue
        known.add(pair)
        said = item.get("arguments", item.get("input", item.get("action", item.get("operation"))))
        o = Open(i, _key(item), text_of(item.get("name")), said, t)
        edit.append(_output(o, answered(o, answers, done)))
    before = {
        (t, _key(items[i])) for i in order[:begin] if (t := type_of(items[i])) in OUTPUTS
    }  # an output whose call is further back stays, for that call may have no other
    taken = {(_CALL_OF[t], _key(items[i])) for i in order[:begin] if (t := type_of(items[i])) in _CALL_OF}
    own = {(type_of(items[i]), _key(items[i])) for i in calls} | before
    for i in rest:
        t = type_of(items[i])
        if t in _CALL_OF:
            pair = (_CALL_OF[t], _key(items[i]))
            if (pair not in own and not context.continues) or pair in taken:
                done.removed += 1
                continue
            taken.add(pair)
        edit.append(i)
    done.edit = edit
    return done


def _output(o: Open, answer: Answer) -> dict[str, Any]:
    out: dict[str, Any] = {"type": OUTPUTS[o.type], "call_id": o.id}
    match o.type:
        case "local_shell_call":
            out = {"type": OUTPUTS[o.type], "id": o.id, "output": answer.text}
        case "shell_call":
            said = {"stdout": "", "stderr": answer.text} if answer.error else {"stdout": answer.text, "stderr": ""}
            out["output"] = [{**said, "outcome": {"type": "timeout"} if answer.error else {"type": "exit", "exit_code": 0}}]
        case "apply_patch_call":
            out |= {"status": "failed" if answer.error else "completed", "output": answer.text}
        case _:
            out["output"] = answer.text
    return out


# -- windows


def starts(items: Sequence[Plain]) -> list[bool]:
    """For each index whether a window may begin there."""

    def pairs() -> Iterator[tuple[int, int]]:
        at: dict[tuple[str, str], int] = {}
        for i, item in enumerate(items):
            t = type_of(item)
            if t in OUTPUTS:
                at[t, _key(item)] = i
            elif t in _CALL_OF:
                yield at.get((_CALL_OF[t], _key(item)), -1), i
            elif t == "mcp_approval_response":
                yield at.get(("mcp_approval_request", text_of(item.get("approval_request_id"))), -1), i
            if t == "mcp_approval_request":
                at[t, text_of(item.get("id"))] = i
            if i and _is_model(item) and _is_model(items[i - 1]):
                yield i - 1, i  # one turn: what came with a reasoning item stays with it

    split = crossing(pairs(), len(items))
    return [not split[i] and type_of(x) not in _CALL_OF for i, x in enumerate(items)]

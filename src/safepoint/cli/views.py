"""The facts as people read them."""

from __future__ import annotations

import sys
from datetime import datetime
from typing import Any

from safepoint.cli.ending import STORE
from safepoint.cli.screen import Column, Screen, Styled, status
from safepoint.cli.text import clean, clock, command, ms, name, shell, size
from safepoint.model import now

Facts = dict[str, Any]


def _when(iso: str | None, *, short: bool = False) -> str:
    """Local time; ``short``, for narrow places: the time of today, the date of other days."""
    if not iso:
        return ""
    shown = clock(datetime.fromisoformat(iso))
    day, _, time = shown.partition(" ")
    if not short:
        return shown
    return time if day == clock(now())[:10] else day


def _holder(facts: Facts | None) -> str:
    if not facts:
        return ""
    who = f"pid {facts.get('pid', '?')} on {facts.get('host', '?')}"
    return who + (" (stopped)" if facts.get("stopped") else "")


def _task_status(t: Facts) -> Styled:
    if t["status"] == "waiting" and not t["pending"]:
        return Styled("waiting (ready)", status("interrupted").style)  # all is settled and answered: it can be resumed
    return status(t["status"])


def tasks(screen: Screen, found: list[Facts]) -> None:
    if not found:
        screen.line("no tasks")
        return
    reasons = any(t["reason"] for t in found)
    screen.table(
        [
            Column("task", fold=True),
            Column("status"),
            Column("step", right=True),
            Column("head", right=True),
            Column("kept", right=True),
            Column("pending", right=True),
            Column("updated"),
            Column("holder"),
            *([Column("reason", fold=True)] if reasons else []),
        ],
        [
            (
                name(t["task_id"]),
                _task_status(t),
                str(t["step"]),
                "" if t["head"] is None else str(t["head"]),
                str(t["checkpoints"]),
                str(t["pending"]) if t["pending"] else "",
                _when(t["updated_at"], short=screen.terminal),
                _holder(t["holder"]),
                *([t["reason"]] if reasons else []),
            )
            for t in found
        ],
    )


def who(lease: Facts) -> str:
    """A holder in a sentence."""
    program = f" ({name(str(lease['program']))})" if lease["program"] else ""
    return f"pid {lease['pid'] or '?'} on {name(str(lease['host'] or '?'))}{program}"


def leases(screen: Screen, found: list[Facts]) -> None:
    if not found:
        screen.line("no leases")
        return
    clocked = any(lease["until"] for lease in found)
    screen.table(
        [
            Column("task", fold=True), Column("standing"), Column("pid", right=True), Column("host"), Column("program", fold=True),
            Column("since"), *([Column("until")] if clocked else []), Column("fence", right=True),
        ],
        [
            (
                name(lease["task_id"]),
                Styled(lease["standing"], _STANDINGS[lease["standing"]]),
                str(lease["pid"] or "?"),
                name(str(lease["host"] or "?")),
                name(str(lease["program"] or "")),
                _when(lease["since"], short=screen.terminal),
                *([_when(lease["until"], short=screen.terminal)] if clocked else []),
                str(lease["fence"]),
            )
            for lease in found
        ],
    )  # fmt: skip


_STANDINGS = {"live": "green", "stopped": "yellow", "dead": "dim", "expired": "dim"}


def held(task: str, lease: Facts) -> None:
    """What somebody has to know before they take a task from its holder; on stderr, where the question is asked."""
    until = f", until {_when(lease['until'])} unless it renews" if lease["until"] else ""
    _note(f"{who(lease)} holds {name(task)} since {_when(lease['since'])}{until}, and is {lease['standing']}")
    _note(
        "By force it is presumed dead: it can write nothing more, but a call that it is in the middle of may still take effect."
    )
    if lease["here"]:
        _note(f"To end it is better, its death is proven then and the task is free: kill -9 {lease['pid']}")


def log(screen: Screen, task: str, found: list[Facts], older: bool) -> None:
    if not found:
        screen.line("no checkpoints")
        return

    def row(c: Facts) -> tuple[str | Styled, ...]:
        m = c["metrics"] or {}
        tokens = f"{m['tokens_in']}+{m['tokens_out']}" if m.get("tokens_in") or m.get("tokens_out") else ""
        return (
            str(c["seq"]),
            str(c["step"]),
            Styled(c["kind"], "red" if c["kind"] == "failure" else ""),
            c["label"] or "",
            name(c["branch"]),
            _when(c["created_at"]),
            size(c["bytes"]),
            "pinned" if c["pinned"] else "",
            m.get("phase", ""),
            str(m["calls"]) if m.get("calls") else "",
            tokens,
        )

    screen.table(
        [
            Column("seq", right=True),
            Column("step", right=True),
            Column("kind"),
            Column("label"),
            Column("branch"),
            Column("saved"),
            Column("size", right=True),
            Column("pinned"),
            Column("phase"),
            Column("calls", right=True),
            Column("tokens", right=True),
        ],
        map(row, found),
    )
    if older:
        _note(f"older ones: {_safepoint()} log --before {found[-1]['seq']} {_word(task)}")


def state(screen: Screen, data: Facts) -> None:
    c = data["checkpoint"]
    m = c["metrics"] or {}
    screen.pairs(
        [
            ("checkpoint", f"{name(c['task_id'])}@{c['seq']}"),
            ("branch", name(c["branch"])),
            ("parent", c["parent_seq"]),
            ("step", c["step"]),
            ("kind", c["kind"]),
            ("label", c["label"]),
            ("saved", _when(c["created_at"])),
            ("size", size(c["bytes"])),
            ("schema", c["schema_version"]),
            ("id", name(c["id"])),
            ("digest", c["digest"]),
            ("pinned", "yes" if c["pinned"] else ""),
            ("phase", m.get("phase")),
            ("calls", m.get("calls") or ""),
            ("retries", m.get("retries") or ""),
            ("errors", m.get("errors") or ""),
            ("tokens", f"{m['tokens_in']} in, {m['tokens_out']} out" if m.get("tokens_in") or m.get("tokens_out") else ""),
        ]
    )
    left_out = f" ({data['first_message']} before them)" if data["first_message"] else ""
    screen.line()
    screen.line(f"messages: {len(data['messages'])}{left_out}", "bold")
    for i, message in enumerate(data["messages"], data["first_message"]):
        _message(screen, i, message)
    for part in ("agent_state", "metadata"):
        screen.line()
        screen.line(part, "bold")
        screen.value(data[part])
    if data["products"]:
        screen.line()
        screen.line("products", "bold")
        for step, standing in data["products"].items():
            screen.line(f"{name(step)}: {standing}")
    for turn in data["turns"]:
        if turn["status"] == "finished":
            screen.line()
            screen.line(f"result of turn {name(turn['turn'])}" if turn["turn"] else "result", "bold")
            screen.value(turn["result"])


def _message(screen: Screen, i: int, message: Any) -> None:
    """A chat message in the shape of OpenAI or Anthropic as text, anything else as data."""
    if isinstance(message, dict) and message.get("$type") == "sdk":  # an object of their SDKs, in wire form
        message = message["value"]
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str):
        screen.line(f"[{i}]", "cyan")
        screen.value(message)
        return
    screen.line(f"[{i}] {role}", "cyan")
    rest = {k: v for k, v in message.items() if k not in {"role", "content"}}
    content = message.get("content")
    for part in content if isinstance(content, list) else [content]:
        if isinstance(part, str):
            screen.block(part)
        elif isinstance(part, dict) and part.keys() == {"type", "text"} and isinstance(part["text"], str):
            screen.block(part["text"])
        elif part is not None:
            screen.value(part)
    if rest:
        screen.value(rest)


def _trouble(c: Facts) -> str:
    """Why a call is as it is: in one line."""
    error = c["error"]
    text = c.get("reason") or ""
    if isinstance(error, dict) and (c["status"] != "succeeded" or c["result_missing"]):
        said = f"{error.get('type', '')}: {error.get('message', '')}"
        text = f"{text}; {said}" if text else said
    return text


def _call_status(c: Facts) -> Styled:
    if c.get("result_missing"):
        return Styled(f"{c['status']} (result missing)", status("in_doubt").style)
    return status(c["status"])


def calls(screen: Screen, task: str, found: list[Facts], older: bool) -> None:
    if not found:
        screen.line("no calls")
        return
    screen.table(
        [
            Column("no", right=True),
            Column("step", right=True),
            Column("tool", fold=True),
            Column("effect"),
            Column("status"),
            Column("attempts", right=True),
            Column("ms", right=True),
            Column("error or reason"),
        ],
        [
            (
                str(c["no"]),
                str(c.get("step", "")),
                c.get("tool", ""),
                c.get("effect", ""),
                Styled("set aside", "dim") if c.get("superseded") else _call_status(c),
                str(c.get("attempts", "")),
                ms(c.get("ms")),
                _trouble(c),
            )
            for c in found
        ],
    )
    if older:
        _note(f"older ones: {_safepoint()} calls --limit 0 {_word(task)}")
    doubt = next((c["no"] for c in found if c["status"] == "in_doubt"), None)
    if doubt is not None:
        _note(f"in doubt: see `{_safepoint()} calls {_word(task)} {doubt}`, which says how to settle it")
    missing = next((c["no"] for c in found if c.get("result_missing") and not c.get("superseded")), None)
    if missing is not None:
        _note(f"result missing: see `{_safepoint()} calls {_word(task)} {missing}`, which says how to give it one")


def call(screen: Screen, task: str, c: Facts) -> None:
    if c["status"] == "damaged":
        screen.line(f"call {c['no']}  damaged", "bold red")
        return
    screen.line(f"call {c['no']}  {c['tool']}", "bold")
    screen.pairs(
        [
            ("status", f"{c['status']}, set aside" if c["superseded"] else _call_status(c)),
            ("reason", c["reason"]),
            ("effect", c["effect"] + (", has a verifier" if c["has_verifier"] else "")),
            ("step", c["step"]),
            ("attempts", c["attempts"]),
            ("call id", None if c["call_id"] is None else name(c["call_id"])),
            ("idempotency key", name(c["idempotency_key"]) if c["idempotency_key"] else ""),
            ("fence", c["fence"]),
            ("started", _when(c["started_at"])),
            ("finished", _when(c["finished_at"])),
            ("ms", ms(c["ms"])),
        ]
    )
    _bodies(screen, c)
    if c["status"] == "in_doubt":
        _note(f"it happened:         {_safepoint()} resolve --done 'RESULT AS JSON' {_word(task)} {c['no']}")
        _note(f"it did not happen:   {_safepoint()} resolve --not-done {_word(task)} {c['no']}")
    elif c["result_missing"] and not c["superseded"]:
        _note("it happened and is not run again; its result could not be stored, and each resume that comes to it fails")
        _note(f"give it one:   {_safepoint()} resolve --done 'RESULT AS JSON' {_word(task)} {c['no']}")
    screen.line()


def _bodies(screen: Screen, c: Facts) -> None:
    screen.line("arguments")
    screen.value(c["arguments"])
    if c["status"] == "succeeded" and not c["result_missing"]:
        screen.line("result")
        screen.value(c["result"])
    for part in ("error", "model"):
        if c[part] is not None:
            screen.line(part)
            screen.value(c[part])


def doubt(task: str, c: Facts) -> None:
    """What somebody has to know before they settle a call; on stderr, where the question is asked."""
    import json

    how = "succeeded, its result is missing" if c.get("result_missing") else "is in doubt"
    lines = [
        f"call {c['no']} of {name(task)}: {c.get('tool', '')} ({c.get('effect', '')}) {how}",
        f"  {_trouble(c)}",
        f"  started {_when(c.get('started_at'))}, attempts {c.get('attempts', '')}",
        f"  idempotency key {name(c.get('idempotency_key', ''))}",
    ]
    lines += [f"  {key} = {json.dumps(value, ensure_ascii=False)[:500]}" for key, value in (c.get("arguments") or {}).items()]
    sys.stderr.write("".join(clean(line) + "\n" for line in lines))


ACTIONS = {
    "reuse": "its recorded result is returned; it is not executed",
    "lost": "it happened, but its result could not be stored; that is reported again, it is not executed",
    "raise": "its failure is raised again; it is not executed",
    "repeat": "it is executed again",
    "verify": "its verifier is asked whether it happened",
    "park": "a person has to say whether it happened",
    "wait": "its question has to be answered first",
    "ask_anew": "the step raised twice on its result, or a record before it is damaged: it is asked anew",
}


def _candidates(screen: Screen, found: list[Facts]) -> None:
    screen.table(
        [
            Column(""),
            Column("seq", right=True),
            Column("step", right=True),
            Column("branch", fold=True),
            Column("kind"),
            Column("saved"),
            Column("health", fold=True),
        ],
        [
            (
                Styled("*", "green") if c["taken"] else "",
                str(c["seq"]),
                "" if c["step"] is None else str(c["step"]),
                name(c["branch"]) if c["branch"] else "",
                c["kind"],
                _when(c["created_at"]),
                Styled(c["problem"], "bold red") if c["problem"] else Styled("good", "green"),
            )
            for c in found
        ],
    )


def plan(screen: Screen, p: Facts) -> None:
    start = f" from {name(p['task_id'])}@{p['seq']}, with step {p['step']}" if p["seq"] is not None else ""
    does = {
        "begin": "begin the task",
        "carry on": "carry on" + start,
        "wait": "wait for a person" + start,
        "nothing": "do nothing: the task is finished",
        "refused": "be refused",
    }[p["does"]]
    screen.line(f"{name(p['task_id'])} is {p['status']}; a resume would {does}")
    if p["why"]:
        screen.line(f"  {p['why']}")
    for skipped in p["skipped"]:
        screen.line(f"  checkpoint {skipped['seq']} cannot be used: {skipped['why']}")
    if p["skipped"] and p["does"] in ("carry on", "begin"):
        screen.line(f"  on a new branch, {name(p['branch'])}; what cannot be used stays where it is")
    if p["guard"]:
        screen.line(f"  below step {p['guard']} a write that is not on record waits for a person")
    if any(c["problem"] for c in p["candidates"]):
        _candidates(screen, p["candidates"])
    if p["calls"]:
        screen.table(
            [
                Column("call", right=True),
                Column("step", right=True),
                Column("tool", fold=True),
                Column("effect"),
                Column("status"),
                Column("what becomes of it", fold=True),
            ],
            [
                (
                    str(c["no"]),
                    str(c["step"]),
                    c["tool"],
                    c["effect"],
                    status(c["status"]),
                    Styled(f"{c['action']}: {ACTIONS.get(c['action'], '')}", status(c["action"]).style),
                )
                for c in p["calls"]
            ],
        )
    for step, standing in p["products"].items():
        if standing in ("lost", "fallen"):
            screen.line(f"product {name(step)} is {standing}: it is made anew when its step is reached")
    for no in p["pauses"]:
        screen.line(f"pause {no} waits for an answer: {_safepoint()} answer {_word(p['task_id'])} {no} JSON")


def follows(p: Facts, no: int | None = None) -> list[str]:
    """What happens next, after a person's word."""
    lines = []
    if no is not None:
        action = next((c["action"] for c in p["calls"] if c["no"] == no), None)
        if action is None:
            lines.append("A resume does not run its step again, so that this word is for the record only.")
        else:
            lines.append(f"When a resume comes to this call: {ACTIONS.get(action, action)}.")
    if p["does"] == "wait":
        lines.append(f"{'The task goes on waiting' if p['status'] == 'waiting' else 'A resume would wait'}: {p['why']}.")
    elif p["does"] == "refused":
        lines.append(f"A resume would be refused now: {p['why']}.")
    elif p["does"] == "nothing":
        lines.append("The task is finished.")
    else:
        lines.append("The task can be resumed: start its agent again.")
    return lines


def pauses(screen: Screen, task: str, found: list[Facts]) -> None:
    if not found:
        screen.line("no questions")
        return
    for p in found:
        screen.line(f"pause {p['no']}  {name(p['name'])}  {p['status']}, step {p['step']}, {_when(p['asked_at'])}", "bold")
        screen.value(p["question"])
        if p["status"] == "open":
            _note(f"answer it: {_safepoint()} answer {_word(task)} {p['no']} JSON")
        else:
            screen.line("answer")
            screen.value(p["answer"])


def findings(screen: Screen, found: list[Facts]) -> None:
    screen.table(
        [Column("level"), Column("check"), Column("found", fold=True), Column("remedy", fold=True)],
        [(status(f["level"]), f["name"], f["text"], f["remedy"]) for f in found],
    )


def _safepoint() -> str:
    import click

    context = click.get_current_context(silent=True)
    return command(context.meta.get(STORE) if context is not None else None)


def _word(task: str) -> str:
    """A task as the next word of a command; the options stand before it."""
    return ("-- " if task.startswith("-") else "") + shell(task)


def _note(text: str) -> None:
    # On stderr: what stands in the output is data, also for those who cut it with awk.
    sys.stderr.write(clean(text) + "\n")

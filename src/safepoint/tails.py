"""The end of a restored history, put so that its provider takes it: what the journal knows of open calls goes in, a turn that was
cut off goes out. What is decided lies in ``rules.history``; here it meets the records of a run.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from safepoint.codec import chunks, jsonform, values
from safepoint.errors import Damaged, SafepointError
from safepoint.model import State
from safepoint.rows import CallRow
from safepoint.rules import journal, recovery
from safepoint.script import Io, Script

if TYPE_CHECKING:
    from safepoint.restoring import Restoring
    from safepoint.rules.history import Answer, Context, Open, Repaired

log = logging.getLogger("safepoint")

_OF_STEPS = ("step", "milestone")


def restored(run: Restoring, rows: Iterable[CallRow], origin: int | None) -> Script[None]:
    """Mend the history that a run begins with, as its ``mend=`` says; what was done is in ``run.recovery.mended``.

    Args:
        rows: The calls of the interrupted step, settled as far as they can be.
        origin: The checkpoint that was chosen.
    """
    wish = run._wish.mend
    if wish is False or not run._state.messages or (wish is None and run._control.finished):
        return
    known = [r for r in rows if r.call_id is not None]
    # Decided before anything else, as reading the rows is a matter for the store.
    keep = _waits_for_step(run, known) or (wish is None and (yield Io(lambda: _ended_step(run, origin))))
    done: tuple[Repaired, list[int]] = yield Io(lambda: _mended(run, known))
    found, used = done
    if keep:
        dropped = set(found.dropped)
        found = replace(found, closed=(), recorded=(), moved=0, removed=0)
        found = replace(found, messages=[m for i, m in enumerate(run._state.messages) if i not in dropped])
        used = []
    _apply(run, found, used)


def before_input(run: Restoring) -> None:
    """A new turn's input comes next: nothing that is open before it can be answered after it."""
    if run._wish.mend is False or not run._state.messages:
        return
    _apply(run, *_mended(run, []))


def _mended(run: Restoring, known: list[CallRow]) -> tuple[Repaired, list[int]]:
    from safepoint.rules import history  # of use to tasks with messages alone

    state, used = run._state, []

    def answers(o: Open) -> Answer | None:
        row = _row_of(run, o, known)
        if row is None:
            return None
        used.append(row.no)
        return _answer(run, row)

    return history.repair(state.messages, answers, _context(state)), used


def _apply(run: Restoring, found: Repaired, used: list[int]) -> None:
    state = run._state
    if found.changed:
        state.messages[:] = found.messages
        for no in used:
            # It has reached the step by way of the history: nobody is to be served it again, or be told that it was not asked for.
            run._flow.journal.over_by_history(no)
        run.recovery = replace(run.recovery, mended=(*run.recovery.mended, *found.said))
        if state.recovery is not None:
            state.recovery = run.recovery
        log.info("history of %s mended: %s", run.task_id, "; ".join(found.said))
    refused = [f for f in found.faults if not f.note]
    if refused:
        more = f" and {len(refused) - 1} more" if len(refused) > 1 else ""
        log.warning("history of %s breaks a rule of %s: %s%s", run.task_id, found.format, refused[0], more)


def _context(state: State) -> Context:
    from safepoint.rules import history

    return history.context_in(state.metadata)


def _waits_for_step(run: Restoring, known: list[CallRow]) -> bool:
    """Whether only the step itself can answer: it asked a person, and the answer waits for it to come by again."""
    line, step = run._flow.line, run._state.step
    return any(p.line == line and p.step == step and p.status in ("open", "answered") for p in run._pauses) or any(
        r.status == "paused" for r in known
    )


def _ended_step(run: Restoring, origin: int | None) -> bool:
    """Whether the state is one that a step ended with. The next step would have been given it without a crash too, so what is open
    in it is the next step's to answer."""
    for _ in range(8):
        if origin is None:
            return False
        rows = run.cp.store.headers(run.task_id, before=origin + 1, limit=1)
        if not rows or rows[0].seq != origin:
            return False
        copied = rows[0].label in (f"from {rows[0].parent_seq}", recovery.UNDER_GUARD)
        if not copied:
            return rows[0].kind in _OF_STEPS
        origin = rows[0].parent_seq
    return False


# -- what the journal knows


def _row_of(run: Restoring, o: Open, known: list[CallRow]) -> CallRow | None:
    """The record of an open call: its id, made in this step with the arguments that the model gave. Ids alone do not tell, as some
    providers give the same ones in each reply."""
    try:
        asked = json.loads(o.arguments) if isinstance(o.arguments, str) and o.arguments.strip() else o.arguments or {}
    except ValueError:
        return None
    for row in sorted(known, key=lambda r: r.no):
        if row.call_id == o.id and row.status in ("succeeded", "failed", "quarantined") and _same(run, row, asked):
            return row
    return None


def _same(run: Restoring, row: CallRow, asked: Any) -> bool:
    if not isinstance(asked, dict):
        return False
    rows, objects = run.cp.store.calls(run.task_id, nos=[row.no])
    try:
        given = chunks.unpack_plain(rows[0].args, rows[0].args_refs, objects)
        # The tool's defaults stand among them too.
        pairs = [(given[k], v) for k, v in asked.items()]
        return all(journal.canonical(a) == journal.canonical(b) for a, b in pairs)
    except (SafepointError, LookupError, TypeError, ValueError):
        return False


def _answer(run: Restoring, row: CallRow) -> Answer:
    from safepoint.rules.history import Answer

    if row.status != "succeeded":
        error = msgspec.msgpack.decode(row.error) if row.error else {}
        name = str(error.get("type", "")).rpartition(".")[2]
        said = ": ".join(filter(None, (name, str(error.get("message", "")), row.reason if not error else "")))
        return Answer(f"failed: {said}" if said else "failed", error=True)
    try:
        return Answer(_text(run._flow._recorded(row), run))
    except (Damaged, SafepointError):
        return Answer("succeeded; its result is not on record")


def _text(value: Any, run: Restoring) -> str:
    """A result as a model is told it: text as it is, all else as JSON."""
    if isinstance(value, str):
        return value
    plain = jsonform.to_json(values.decode_plain(values.encode(value, run.cp.registry, path="result")))
    return json.dumps(plain, ensure_ascii=False, separators=(",", ":"))

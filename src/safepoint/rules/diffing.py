"""What tells two states apart: a line for people, entries by path, and a JSON Patch; pure.

Everything works on the lossless JSON form (``codec.jsonform``) of the stored trees, so that no class is needed. Two values are the
same if their JSON is the same text: 1 is not 1.0 and not True, and the order of a dict's keys counts, since it is kept by the
stores. Hence ``apply(a, patch)`` gives b with the order of its keys.

A list is compared by the digests of its items: what is equal at both ends is set aside, and of the rest the longest common
subsequence stays. Beyond ``LCS_CELLS`` the rest is compared place by place, which is as right and only longer.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec

from safepoint.codec.classes import KINDS
from safepoint.codec.resource import masked
from safepoint.errors import UsageError

__all__ = ["LCS_CELLS", "Change", "Diff", "apply", "compare", "short", "summary"]

Op = Literal["added", "removed", "changed"]
Steps = tuple[str | int, ...]

LCS_CELLS: Final = 250_000
"""How many pairs of items are looked at for a list: some 500 by 500 in the part that differs."""
DEEP: Final = 100
"""Below this many containers a value is replaced as a whole: a walk in Python must not run out of stack."""
SHORT: Final = 40
"""Characters of a value in a summary."""
MANY: Final = 12
"""Changed fields that a summary names."""

_SHOWN = frozenset({"datetime", "date", "time", "timedelta", "decimal", "uuid", "fraction", "complex", "path", "enum"})
"""Types whose value says more than their name and is short. Of all others, resources among them, the type alone is shown."""


@dataclass(frozen=True, slots=True)
class Change:
    """One difference. ``before`` and ``after`` are short texts for people, None where there is nothing."""

    op: Op
    path: str
    """A JSON Pointer into the JSON form; of what was removed and changed into that of a, of what was added into that of b."""
    label: str
    """The same for people: ``phase``, ``plan.steps[2]``, ``metadata.customer``, ``messages[3]``."""
    before: str | None = field(default=None, repr=False)
    after: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        if self.op == "changed":
            return f"{self.label}: {self.before} -> {self.after}"
        return f"+{self.label}: {self.after}" if self.op == "added" else f"-{self.label}: {self.before}"


@dataclass(frozen=True, slots=True, repr=False)
class Diff:
    """What leads from one checkpoint to another. ``str`` is one line for people; false if there is no difference.

    Attributes:
        a, b: The checkpoints, as ``task@seq``.
        entries: Every difference, in the order of the state's parts.
        before, after: The JSON forms of both states, which ``patch`` is about.
    """

    a: str
    b: str
    entries: tuple[Change, ...]
    before: Any
    after: Any
    _ops: tuple[dict[str, Any], ...]

    def __repr__(self) -> str:
        return f"<Diff {self.a} -> {self.b} entries={len(self.entries)}>"

    def __bool__(self) -> bool:
        return bool(self._ops)

    def patch(self) -> list[dict[str, Any]]:
        """A JSON Patch (RFC 6902) that makes ``after`` of ``before``, the order of keys included. The caller's own."""
        return deepcopy(list(self._ops))

    def __str__(self) -> str:
        return summary(self.entries) if self.entries else "no difference" if not self._ops else "order of keys"


Texts = dict[int, list[bytes]]
"""Of lists, by identity: the texts of their items."""


def compare(a: str, b: str, before: Any, after: Any, known: Texts | None = None) -> Diff:
    """The difference between two states in their JSON form; ``a`` and ``b`` name them.

    ``known`` is for who compares many in a row: it is used for the lists of ``before``, and then holds those of ``after``.
    """
    walk = _Walk(known)
    walk.value(before, after, (), (), shown=True)
    return Diff(a, b, tuple(walk.entries), before, after, tuple(walk.ops))


def summary(entries: Sequence[Change]) -> str:
    """``+2 messages, phase: plan -> act``: messages are counted, fields named, the number of the step comes last."""
    messages: dict[tuple[str, str], None] = {}
    fields: list[str] = []
    last: list[str] = []
    for entry in entries:
        steps = entry.path.split("/")[1:]
        if steps[:1] == ["messages"] and len(steps) > 1:
            # A message counts once, however much of it has changed.
            messages["changed" if len(steps) > 2 else entry.op, steps[1]] = None
        elif entry.path == "/step":
            last.append(str(entry))
        else:
            fields.append(str(entry))
    if len(fields) > MANY:
        fields[MANY:] = [f"{len(fields) - MANY} more"]
    return ", ".join([*_counted(op for op, _ in messages), *fields, *last])


def _counted(ops: Iterator[str]) -> list[str]:
    counts = {"added": 0, "removed": 0, "changed": 0}
    for op in ops:
        counts[op] += 1
    nouns = {op: f"{n} message{'s' * (n != 1)}" for op, n in counts.items() if n}
    return [
        f"{ {'added': '+', 'removed': '-', 'changed': ''}[op] }{text}{' changed' * (op == 'changed')}"
        for op, text in nouns.items()
    ]


def apply(before: Any, patch: Any) -> Any:
    """What a JSON Patch of ``add``, ``remove`` and ``replace`` makes of ``before``, which is left as it is.

    Raises:
        UsageError: it is no such patch, or does not fit.
    """
    try:
        own: dict[int, Any] = {}
        box = [before]
        for op in patch:
            _apply(box, op["op"], _steps_of(op["path"]), op, own)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise UsageError("a JSON Patch does not fit what it is applied to", type(error).__name__, "") from None
    return box[0]


def _apply(box: list[Any], op: str, steps: list[str], parts: Any, own: dict[int, Any]) -> None:
    at: Any = box
    key: Any = 0
    for step in steps:
        child = at[key]
        if id(child) not in own:
            # Copied once for all operations; kept alive here, so that no other object can get its identity.
            child = at[key] = child.copy()
            own[id(child)] = child
        at = child
        if type(at) is list:
            if not re.fullmatch(r"0|[1-9][0-9]{0,17}|-", step, re.ASCII):
                raise ValueError
            key = len(at) if step == "-" else int(step)
        else:
            key = step
    if op == "remove" and steps:
        del at[key]
    elif op == "replace":
        at[key]  # it must be there
        at[key] = parts["value"]
    elif op == "add":
        if type(at) is list and steps:
            if key > len(at):
                raise IndexError
            at.insert(key, parts["value"])
        else:
            at[key] = parts["value"]
    else:
        raise ValueError


# -- the walk


class _Walk:
    def __init__(self, known: Texts | None) -> None:
        self.old: Texts = {} if known is None else dict(known)
        self.new: Texts = {} if known is None else known
        self.new.clear()
        self.ops: list[dict[str, Any]] = []
        self.entries: list[Change] = []

    def value(self, a: Any, b: Any, at: Steps, label: Steps, *, shown: bool) -> None:
        if a is b or (not (len(at) < 3 and _is_large(a, b)) and _text(a) == _text(b)):
            return
        if len(at) < DEEP and type(a) is type(b):
            if type(a) is list:
                self.list(a, b, at, label, shown=shown)
                return
            if type(a) is dict and _goes_on(a, b):
                inside = shown and _is_open(a)
                if shown and not inside:
                    self.entry("changed", at, label, a, b)
                self.dict(a, b, at, label, shown=inside)
                return
        self.op("replace", at, b)
        if shown:
            self.entry("changed", at, label, a, b)

    def dict(self, a: Any, b: Any, at: Steps, label: Steps, *, shown: bool) -> None:
        typed = "$type" in a
        for key, x in a.items():
            below = (*at, key)
            # The fields of a class stand under "value", which is no word of the user's.
            name = label if typed else (*label, key)
            if key in b:
                self.value(x, b[key], below, name, shown=shown)
            else:
                self.op("remove", below)
                if shown:
                    self.entry("removed", below, name, x, None)
        for key, y in b.items():
            if key not in a:
                self.op("add", (*at, key), y)
                if shown:
                    self.entry("added", (*at, key), (*label, key), None, y)

    def list(self, a: list[Any], b: list[Any], at: Steps, label: Steps, *, shown: bool) -> None:
        parts: list[list[dict[str, Any]]] = []
        ops = self.ops
        texts = self.old.get(id(a)) or list(map(_text, a))
        self.new[id(b)] = list(map(_text, b))
        for i, i_end, j, j_end in _gaps(texts, self.new[id(b)]):
            self.ops = []
            pairs = min(i_end - i, j_end - j)
            for k in range(pairs):
                self.value(a[i + k], b[j + k], (*at, i + k), (*label, i + k), shown=shown)
            for k in range(i + pairs, i_end):
                self.op("remove", (*at, i + pairs))
                if shown:
                    self.entry("removed", (*at, k), (*label, k), a[k], None)
            for k in range(j + pairs, j_end):
                self.op("add", (*at, i + k - j), b[k])
                if shown:
                    self.entry("added", (*at, k), (*label, k), None, b[k])
            parts.append(self.ops)
        # From the end of the list to its beginning: no operation moves the place of one that is still to come.
        self.ops = ops
        for part in reversed(parts):
            self.ops += part

    def op(self, op: str, at: Steps, *value: Any) -> None:
        self.ops.append({"op": op, "path": _pointer(at), **({"value": value[0]} if value else {})})

    def entry(self, op: Op, at: Steps, label: Steps, a: Any, b: Any) -> None:
        before, after = None if op == "added" else short(a), None if op == "removed" else short(b)
        self.entries.append(Change(op, _pointer(at), _label(label), before, after))


def _is_large(a: Any, b: Any) -> bool:
    """Whether looking at the parts is quicker than looking at the whole first."""
    return type(a) is type(b) and ((type(a) is dict and _mark(a) is None and _mark(b) is None) or (type(a) is list))


def _goes_on(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether going into two dicts ends in b with its keys in their order, and says more than replacing it."""
    marks = _mark(a), _mark(b)
    if marks != (None, None):
        return (
            marks == ("$type", "$type")
            and (a["$type"], a.get("class")) == (b["$type"], b.get("class"))
            and type(a.get("value")) is type(b.get("value"))
            and type(a.get("value")) in (dict, list)
            and list(a) == list(b)
        )
    if not a.keys() & b.keys():
        return not a or not b
    return [*(k for k in a if k in b), *(k for k in b if k not in a)] == list(b)


def _is_open(value: dict[str, Any]) -> bool:
    """Whether people are shown what is in it: plain dicts, and the fields of the application's own classes."""
    if _mark(value) is None:
        return True
    kind = KINDS.get(value.get("$type", ""))
    return kind is not None and kind.payload is dict and not value.get("class", "").startswith("safepoint")


def _mark(value: dict[str, Any]) -> str | None:
    return next((key for key in value if key[:1] == "$"), None)


# -- lists


def _gaps(a: Sequence[bytes], b: Sequence[bytes]) -> list[tuple[int, int, int, int]]:
    """Where two lists differ, in order: ``a[i:i_end]`` became ``b[j:j_end]``."""
    found: list[tuple[int, int, int, int]] = []
    i = j = 0
    for x, y in [*_kept(a, b, 0, len(a), 0, len(b)), (len(a), len(b))]:
        if (i, j) != (x, y):
            found.append((i, x, j, y))
        i, j = x + 1, y + 1
    return found


def _kept(a: Sequence[bytes], b: Sequence[bytes], i: int, i_end: int, j: int, j_end: int) -> list[tuple[int, int]]:
    """Pairs of places of equal items, rising in both."""
    first: list[tuple[int, int]] = []
    while i < i_end and j < j_end and a[i] == b[j]:
        first.append((i, j))
        i, j = i + 1, j + 1
    last: list[tuple[int, int]] = []
    while i < i_end and j < j_end and a[i_end - 1] == b[j_end - 1]:
        i_end, j_end = i_end - 1, j_end - 1
        last.append((i_end, j_end))
    middle: list[tuple[int, int]] = []
    if i < i_end and j < j_end:
        if (i_end - i) * (j_end - j) <= LCS_CELLS:
            middle = _longest(a, b, i, i_end, j, j_end)
        else:
            # Items that are there once in both hold the rest together, as in a patience diff.
            for x, y in [*(anchors := _anchors(a, b, i, i_end, j, j_end)), *([(i_end, j_end)] if anchors else [])]:
                middle += _kept(a, b, i, x, j, y)
                if (x, y) != (i_end, j_end):
                    middle.append((x, y))
                i, j = x + 1, y + 1
    return [*first, *middle, *reversed(last)]


def _longest(a: Sequence[bytes], b: Sequence[bytes], i: int, i_end: int, j: int, j_end: int) -> list[tuple[int, int]]:
    """A longest common subsequence."""
    width = j_end - j + 1
    lengths = [[0] * width]
    for x in range(i_end - 1, i - 1, -1):
        below, row = lengths[-1], [0] * width
        for y in range(width - 2, -1, -1):
            row[y] = below[y + 1] + 1 if a[x] == b[j + y] else max(below[y], row[y + 1])
        lengths.append(row)
    lengths.reverse()
    found: list[tuple[int, int]] = []
    x, y = i, j
    while x < i_end and y < j_end:
        if a[x] == b[y]:
            found.append((x, y))
            x, y = x + 1, y + 1
        elif lengths[x - i + 1][y - j] >= lengths[x - i][y - j + 1]:
            x += 1
        else:
            y += 1
    return found


def _anchors(a: Sequence[bytes], b: Sequence[bytes], i: int, i_end: int, j: int, j_end: int) -> list[tuple[int, int]]:
    """The longest rising row of items that are there exactly once in both."""
    once_a, once_b = Counter(a[i:i_end]), Counter(b[j:j_end])
    places = {b[y]: y for y in range(j, j_end) if once_b[b[y]] == 1}
    ends: list[int] = []
    rows: list[tuple[int, int, Any]] = []
    for x in range(i, i_end):
        y = places.get(a[x]) if once_a[a[x]] == 1 else None
        if y is None:
            continue
        k = bisect_left(ends, y)
        row = (x, y, rows[k - 1] if k else None)
        ends[k:], rows[k:] = [y, *ends[k + 1 :]], [row, *rows[k + 1 :]]
    found: list[tuple[int, int]] = []
    at = rows[-1] if rows else None
    while at is not None:
        found.append((at[0], at[1]))
        at = at[2]
    return found[::-1]


# -- text


_text = msgspec.json.Encoder().encode
"""The same for what is the same, in type, value and order of keys, and for nothing else."""


def _pointer(steps: Steps) -> str:
    return "".join("/" + str(step).replace("~", "~0").replace("/", "~1") for step in steps)


def _steps_of(pointer: str) -> list[str]:
    if pointer and pointer[0] != "/":
        raise ValueError
    return [step.replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:]]


_WORD = re.compile(r"[^\W\d]\w*")


def _label(steps: Steps) -> str:
    # The fields of agent_state are what people speak of: they stand for themselves.
    own = steps[1:] if steps[:1] == ("agent_state",) and len(steps) > 1 else steps
    text = ""
    for step in own:
        if isinstance(step, int):
            text += f"[{step}]"
        elif _WORD.fullmatch(step):
            text += f".{step}" if text else step
        else:
            name = json.dumps(step if len(step) <= SHORT else step[: SHORT - 1] + "…", ensure_ascii=False)
            text += f"[{name}]" if text else name
    return text or "state"


_BARE = re.compile(r"[^\W\d][\w./@-]*(?: [\w./@-]+)*")


def short(value: Any) -> str:
    """A value of the JSON form in a few characters: what is long is cut, what is nested counted, what has a class named."""
    if type(value) is str:
        cut = value if len(value) <= SHORT else value[: SHORT - 1] + "…"
        bare = _BARE.fullmatch(value) and value not in ("true", "false", "null") and len(value) <= SHORT
        return cut if bare else json.dumps(cut, ensure_ascii=False)
    if type(value) is list:
        return f"[{len(value)} item{'s' * (len(value) != 1)}]" if value else "[]"
    if type(value) is dict:
        mark = _mark(value)
        if mark is not None:
            return _short_typed(mark, value)
        if type(value.get("role")) is str and "content" in value:
            return f"{value['role'][:SHORT]}: {short(value['content'])}"
        return f"{{{len(value)} key{'s' * (len(value) != 1)}}}" if value else "{}"
    text = json.dumps(value)
    return text if len(text) <= SHORT else text[: SHORT - 1] + "…"


def _short_typed(mark: str, value: dict[str, Any]) -> str:
    inner = value[mark]
    if mark == "$bytes":
        return f"<{len(inner) // 4 * 3 - inner.count('=')} bytes>"
    if mark == "$float":
        return str(inner)
    if mark == "$dict":
        return f"{{{len(inner)} keys}}"
    if mark != "$type":
        return f"<{mark[1:]}>"
    hidden = masked(value)
    if type(hidden) is str:
        return hidden[:80]  # a resource: its value is for nobody to see
    name = str(value.get("class", inner))[:80]
    if inner in _SHOWN and type(payload := value.get("value")) in (str, int, float):
        return f"<{name} {short(payload)}>"
    return f"<{name}>"

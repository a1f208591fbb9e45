"""Text for people, made of stored data that nobody vouches for.

What an agent stored may hold terminal commands: a title that rewrites the screen, a link that is none, text that runs from
right to left over its neighbours. So nothing stored reaches a terminal but through ``clean``, ``name`` or ``shell``.
"""

from __future__ import annotations

import json
import re
import shlex
import unicodedata
from datetime import UTC, datetime, timedelta
from typing import Any

from safepoint.errors import UsageError
from safepoint.stores.url import redact

__all__ = [
    "age",
    "clean",
    "clock",
    "command",
    "cut",
    "dumps",
    "in_shell",
    "iso",
    "many",
    "ms",
    "name",
    "ranges",
    "shell",
    "size",
]

_DANGEROUS = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
_JOINERS = frozenset("\u200c\u200d")
"""Format characters that many scripts and emoji need, and that move nothing."""
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def _escape(char: str) -> str:
    if char in _SHORT:
        return _SHORT[char]
    code = ord(char)
    # Not \x80 to \xff: in a shell's $'…' that would be a byte, and no character.
    return f"\\x{code:02x}" if code < 0x80 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def clean(text: str, *, lines: bool = False) -> str:
    """``text`` with control and format characters as escapes; ``lines`` leaves line ends and tabs."""
    if text.isprintable():
        return text
    return "".join(
        c
        if c.isprintable() or c in _JOINERS or (lines and c in "\n\t") or unicodedata.category(c) not in _DANGEROUS
        else _escape(c)
        for c in text
    )


def name(text: str) -> str:
    """An id or another name on one line: as it is, or quoted as bash takes it where it could not be read or typed."""
    shown = clean(text)
    if shown == text and text == text.strip() and not text.startswith("$'"):
        return text
    return "$'" + clean(text.replace("\\", "\\\\").replace("'", "\\'")) + "'"


def shell(text: str) -> str:
    """A name as a word of a command that can be pasted into bash."""
    shown = name(text)
    return shown if shown != text else shlex.quote(text)


_IN_SHELL = (
    # Remedies of the library, as far as they name Python, in the words of the command line.
    (re.compile(r"See tasks\(\), or `safepoint ls`"), "See `safepoint ls`"),
    (re.compile(r"See list_checkpoints(?:, or `safepoint log`)?"), "See `safepoint log`"),
    (re.compile(r"See cp\.branches, or `"), "See `"),
    (re.compile(r": load\(…, seq=\d+\)"), ""),
    (re.compile(r"cp\.resolve\([^`]*\), or `"), "`"),
    (re.compile(r"cp\.rewind\([^`]*?, seq\)(?:, or resume it with at=seq)?"), "`safepoint rewind TASK@SEQ`"),
    (re.compile(r"\b([Ss])ee pauses\(\)"), r"\1ee `safepoint pauses`"),
    (
        re.compile(r"; steal=True takes the task from it(?: by force)?"),
        "; `safepoint release` takes the task from it by force",
    ),
    (re.compile(r"skip_damaged=True leaves"), "--skip-damaged leaves"),
    (re.compile(r"Give it another name: import_\(…, task_id=…\)"), "Give it another name: --as NAME"),
    (re.compile(r"pass network_ok=True"), "add ?network_ok=true to its URL"),
    (re.compile(r"Give it a result: Done\(result\)"), "Give it a result: --done JSON"),
)


def in_shell(text: str, store: str | None) -> str:
    """A remedy for somebody at a shell; commands in it name the store that was named to this one."""
    for python, words in _IN_SHELL:
        text = python.sub(words, text)
    return text.replace("`safepoint ", f"`{command(store)} ")


def command(store: str | None) -> str:
    """``safepoint``, with the --store that was given: what is pasted has to go to the same place."""
    return f"safepoint --store {shell(redact(store))}" if store else "safepoint"


def dumps(value: Any, *, indent: int | None = 2) -> str:
    """Strict JSON in ASCII: it holds no control characters, whatever the data, and any parser takes it."""
    return json.dumps(value, indent=indent, allow_nan=False).replace("\x7f", "\\u007f")


def cut(text: str, limit: int | None) -> str:
    if limit is None or len(text) <= limit:
        return text
    return f"{text[:limit]}… ({len(text) - limit} more characters; --full shows them)"


def clock(t: datetime | None) -> str:
    """Local time."""
    return t.astimezone().strftime("%Y-%m-%d %H:%M:%S") if t is not None else ""


def iso(t: datetime | None) -> str | None:
    return t.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z") if t is not None else None


def size(n: int) -> str:
    if n < 1000:
        return f"{n} B"
    value = float(n)
    for unit in ("kB", "MB", "GB"):
        value /= 1000
        if value < 999.95:
            return f"{value:.1f} {unit}"
    return f"{value / 1000:.1f} TB"


def many(n: int, things: str) -> str:
    """``1 task``, ``2 tasks``."""
    return f"{n} {things.removesuffix('s') if n == 1 else things}"


def ms(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def ranges(numbers: tuple[int, ...]) -> str:
    """``1-80, 82``: a cleanup may delete thousands."""
    found: list[list[int]] = []
    for n in sorted(numbers):
        if found and n == found[-1][1] + 1:
            found[-1][1] = n
        else:
            found.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in found)


_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])", re.ASCII)
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


def age(text: str) -> timedelta:
    """``90s``, ``15m``, ``12h``, ``7d``, ``2w``. A bare number is refused: days and seconds are too far apart to guess."""
    found = _AGE.fullmatch(text.strip())
    try:
        if found:
            return timedelta(seconds=float(found[1]) * _UNITS[found[2]])
    except OverflowError:
        pass
    raise UsageError(f"{clean(text)!r} is no length of time", "", "Write a number and one of s, m, h, d, w, as in 7d.")

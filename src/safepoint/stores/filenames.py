"""Names of files for ids of any text: one to one, readable where that can be, fit for POSIX and Windows; pure.

What stands for itself: lower-case letters and digits of any script that have no other case or form, spaces inside, and
``-_.~+=@,``. A capital ASCII letter is written ``^A``, since some file systems do not tell cases apart; every other byte is
``%xx``. So two ids differ in their names also when letters are folded or composed. A name that Windows keeps for a device, or
that begins with a dot or a dash or ends in a dot or a space, has that character escaped. A long one is cut, and ends in ``%~`` and
a digest of the id, which then has to be stored inside.
"""

from __future__ import annotations

import base64
import hashlib
import re
import unicodedata

__all__ = ["JOURNAL", "SPACES", "decode", "document", "encode", "seq_of"]

JOURNAL = "journal.jsonl"
SPACES = "%spaces"
"""The folder of all spaces but ``''``. No id has this name: ``%s`` is no escape."""

_LONGEST = 120  # bytes, of the 255 that file systems take: tools add suffixes of their own
_READABLE = 60
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-_~+=@,.")
_RESERVED = re.compile(
    r"(?:con|prn|aux|nul|conin\^?\$|conout\^?\$|com[0-9\u00b9\u00b2\u00b3]|lpt[0-9\u00b9\u00b2\u00b3])(?:[ .]|$)"
)
_OURS = frozenset({JOURNAL})
# Letters that stand for themselves one by one, and that some file systems would put together.
_JAMO = ((0x1100, 0x11FF), (0xA960, 0xA97F), (0xD7B0, 0xD7FF))
_DOCUMENT = re.compile(r"([1-9][0-9]{0,18})\.json")


def encode(id: str) -> str:
    """The name of the file or folder that stands for an id."""
    parts = [_escaped(c) for c in id]
    name = "".join(parts)
    if parts[0] in {".", "-", " "} or _RESERVED.match(name) or name in _OURS:
        parts[0] = _hex(id[0])
    if parts[-1] in {".", " "}:
        parts[-1] = _hex(id[-1])
    name = "".join(parts)
    if len(name.encode()) <= _LONGEST:
        return name
    kept, size = [], 0
    for part in parts:
        size += len(part.encode())
        if size > _READABLE:
            break
        kept.append(part)
    digest = hashlib.sha256(id.encode()).digest()[:20]
    return f"{''.join(kept)}%~{base64.b32encode(digest).decode().lower()}"


def decode(name: str) -> str | None:
    """The id that a name stands for; None if it is none of ours, or too long to say (see ``is_cut``)."""
    name = unicodedata.normalize("NFC", name)  # some file systems list a name in another form
    out = bytearray()
    i = 0
    while i < len(name):
        c = name[i]
        if c == "%":
            try:
                out.append(int(name[i + 1 : i + 3], 16))
            except ValueError:
                return None
            i += 3
        elif c == "^":
            out += name[i + 1 : i + 2].upper().encode()
            i += 2
        else:
            out += c.encode("utf-8", "surrogatepass")
            i += 1
    try:
        id = out.decode()
    except UnicodeDecodeError:
        return None
    return id if id and encode(id) == name else None


def is_cut(name: str) -> bool:
    """Whether the id must be looked up inside."""
    return "%~" in name


def document(seq: int) -> str:
    return f"{seq}.json"


def seq_of(name: str) -> int | None:
    found = _DOCUMENT.fullmatch(name)
    return int(found[1]) if found else None


def _escaped(c: str) -> str:
    if c in _PLAIN or c == " ":
        return c
    if "A" <= c <= "Z":
        return f"^{c}"
    if c > "\x7f" and _alone(c):
        return c
    return _hex(c)


def _hex(c: str) -> str:
    return "".join(f"%{byte:02x}" for byte in c.encode())


def _alone(c: str) -> bool:
    """Whether no file system takes this letter for another one, or joins it with its neighbour."""
    return (
        c.isalnum()
        and c.casefold() == c
        and c.upper().casefold() == c
        and c.lower() == c
        and unicodedata.normalize("NFC", c) == c
        and unicodedata.normalize("NFKC", c) == c
        and not any(low <= ord(c) <= high for low, high in _JAMO)
    )

"""How a task lies in Redis: every key and field, what its value is, and which of them count.

Keys (``<prefix>`` has no braces, so that the braces below are the hash tag of a cluster):

    <prefix>{<base64url of the task's id>}      hash: the whole task
    <prefix>{<base64url of the task's id>}:f    string: fence floor, a decimal; the next lease of a task without one is above it.
                                                Set when a task is deleted or written as a whole; with ``ttl`` also by each acquire
    <prefix>fences                              string: the highest fence that a deleted task of whatever name had
    <prefix>tasks:{<k>}, k = 0..63              hash: task id -> unix seconds when it was last announced; k = crc32(id) % 64.
                                                Announced before a task is created (``Client.announce``), so every task is in it; an
                                                entry whose task is not there is removed when it is old (``index.lua``)

A task is there if its hash has ``t:id``: objects of a big first save are staged before. Fields of the hash (``<no>``, ``<seq>``:
decimals; text is UTF-8 as ``layout.text`` makes it; "row": MessagePack array of 16 or more elements, so that its header is three
bytes, and what scripts compare stands right behind it):

    t:id t:status t:branch t:agent t:input t:reason t:raised t:parent    the task's row; t:parent is absent for None
    t:attempts t:created t:updated                                       decimals
    n           last numbers given out: "seq call pause line position"; compared as text (``layout.numbers``)
    w           decimal, one more with each write of whatever kind (also of removals, pins and leases, but not of renewals):
                what was read in two steps was one state if it is the same
    count       decimal: checkpoints that are there (of all spaces)
    h:<seq>     row of a checkpoint without root and refs: [pinned, id, ...] (``layout.HEADER``); byte 4 is \\xc2 or \\xc3, id from 5 on
    r:<seq>     its root and refs: ``layout.body``, as an object
    i:<space>\\0<id>     decimal: the seq of the checkpoint with that id
    b:<space>\\0<name>   MessagePack [seq, id]: head of a branch, compared as bytes (``layout.head``)
    l:<space>\\0<name>   MessagePack [line, forked_from]: what of a branch does not change
    branches    "\\0<name>\\0" of each branch of space "", in the order in which they came
    d:<k>       "<space>\\0<name>\\0" of each branch of other spaces, likewise; k = crc32(<space>) % 128 (``layout.roll``). Adapters make
                spaces without end: what is of one of them is found, and added to, without a look at all
    c:<no>      row of a call: [version, line, step, base_seq, ...] (``layout.CALL``); version from byte 4 on
    p:<no>      row of a pause: [version, line, step, ...] (``layout.PAUSE``), likewise
    w:<space>\\0<checkpoint>\\0<idx>\\0<writer>    what an adapter recorded: MessagePack array (``layout.WRITE``); <checkpoint> is an id
    v:<space>\\0<checkpoint>    "<pages>;" and then "<idx>\\0<writer>\\0" of each of those of a checkpoint; all go at once. What is longer
                than a few kilobytes becomes a page, so that one more row costs no more than that:
    v:<space>\\0<checkpoint>\\0<k>    k = 0..pages-1, without "<pages>;"
    e:<k>       "<space>\\0<checkpoint>\\0" of each ``v:``; k = crc32(<space>\\0<checkpoint>) % 1024 (``layout.shelf``)
    o:<name>    an object (name: its 16 bytes): 4 bytes big-endian length of refs, refs, data (``layout.body``), and 12 hexadecimal
                digits: what ``w`` became with the write that sent it last. Whatever is sent is written, also over equal bytes: a
                sweep removes only what it did not reach and nobody has sent since
    k:<block> g:<block> j:<block>    which checkpoints, calls, pauses are there: decimal, bit i is number block * 50 + i. Changed with
                HINCRBY by the power of two; a field may be missing for 0
    open        ";<letter><no>/<line>/<step>" of each call that is s(tarted), p(aused) or in d(oubt)
    asks        ";<letter><no>/<line>/<step>" of each pause that is o(pen) or a(nswered)
    q:<k>       k = 0..15, the last commits without a checkpoint: MessagePack [id, call numbers, pause numbers] (from byte 2 on: id)
    q           decimal: how many there were; the next goes to q % 16
    stages      ";<stage>/<batches>/<expires>" of each big save on its way: expires in unix seconds of the server
    s:<stage>/<k>        k = 1..batches: the names (16 bytes each) of what was staged. While a stage is in ``stages`` and has not
                expired, a sweep takes these as roots (with all that they reach), and removes neither; a stage that has expired is
                removed from ``stages`` with its fields before (or in the same script as) its objects. A commit goes by ``stages``
    sweeps      ";<token>" of the last eight looks of removals, repairs and writes of whole tasks: where its token is missing, this is
                another task by now, or one that has gone back to before that moment, as after a failover
    born        token of who wrote the task as a whole or mended it last: by it a request that is heard twice is known
    f:fence f:token f:state f:until f:gone f:process f:holder f:at f:presumed f:previous
                the lease; absent all, if there never was one. state: held or released; until: microseconds of the server's TIME;
                gone: 1 if the holder said that nobody is behind it, else 0; at: microseconds; previous:
                how the holder before ended

With ``ttl`` each write ends with ``touch`` (lua/shared.lua): EXPIRE, or PERSIST while a call is open, a pause is open, or the lease
is held and not gone. The floor key outlives the hash by ``FLOOR_FOR``.
"""

from __future__ import annotations

import base64
import re
import struct
import zlib
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, TypeVar

import msgspec

from safepoint.errors import Damaged
from safepoint.model import Obj
from safepoint.rows import CallRow, CheckpointRow, Head, Numbers, PauseRow, WriteRow, fitting, torn

__all__ = [
    "BLOCK",
    "CALL",
    "HEADER",
    "INDEXES",
    "PAUSE",
    "ROLLS",
    "SHELVES",
    "STAMP",
    "WRITE",
    "Keys",
    "bits",
    "block",
    "body",
    "call",
    "checkpoint",
    "decoded",
    "encoded_call",
    "encoded_header",
    "encoded_pause",
    "encoded_write",
    "entry",
    "field",
    "fixed_of",
    "head",
    "head_of",
    "header",
    "key_of",
    "listed",
    "lists",
    "mark",
    "mask",
    "names",
    "numbers",
    "numbers_of",
    "obj",
    "open_entry",
    "opened",
    "pack",
    "pages_of",
    "parts",
    "pause",
    "roll",
    "shelf",
    "shelved",
    "text",
    "with_root",
    "write",
    "write_field",
]

INDEXES = 64
BLOCK = 50
"""Numbers a block: scripts count its bits in a double."""
RECENT = 16
STAMP = 12
STAGE_FOR = 600
"""Seconds for which staged objects are safe from sweeps after the last batch."""
FLOOR_FOR = 30 * 86400
"""Seconds by which a fence floor outlives a task that expires."""

HEADER = (
    "pinned", "id", "seq", "space", "branch", "parent_seq", "step", "kind", "label", "created_at", "format", "schema", "size",
    "digest", "metadata", "metrics", "seal",
)  # fmt: skip
CALL = (
    "version", "line", "step", "base_seq", "no", "scope", "ident", "tool", "effect", "call_id", "idempotency_key", "op_key", "status",
    "attempts", "fence", "started_at", "finished_at", "asked", "began", "ended", "args", "args_refs", "result", "result_refs",
    "error", "policy", "model", "not_done", "superseded", "reason", "seal",
)  # fmt: skip
PAUSE = (
    "version", "line", "step", "no", "space", "name", "occurrence", "call_no", "base_seq", "question", "answer", "status",
    "asked_at", "answered_at", "seal",
)  # fmt: skip

WRITE = ("space", "checkpoint", "writer", "idx", "path", "data", "refs", "seal")

SHELVES = [b"e:%d" % k for k in range(1024)]
"""The fields that name the lists of what was recorded: each is written anew with every list that it comes to name."""

ROLLS = [b"branches", *(b"d:%d" % k for k in range(128))]
"""The fields that name the branches."""

_LETTERS = {"started": "s", "paused": "p", "in_doubt": "d"}
_ASKED = {"open": "o", "answered": "a"}

Row = TypeVar("Row", CheckpointRow, CallRow, PauseRow)


class Keys:
    """The keys of a store with this prefix."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix.encode()
        self.fences = self.prefix + b"fences"

    def task(self, task: str) -> bytes:
        return b"%s{%s}" % (self.prefix, base64.urlsafe_b64encode(task.encode()))

    def floor(self, task: str) -> bytes:
        return self.task(task) + b":f"

    def of(self, task: str) -> tuple[bytes, bytes]:
        """The keys that every script of a task is given: its hash and its fence floor."""
        key = self.task(task)
        return key, key + b":f"

    def index(self, k: int) -> bytes:
        return b"%stasks:{%d}" % (self.prefix, k)

    def index_of(self, task: str) -> bytes:
        return self.index(zlib.crc32(task.encode()) % INDEXES)


def text(value: str) -> bytes:
    return value.encode()


def decoded(value: bytes) -> str:
    """Damaged if these bytes are no text."""
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise _damaged("text", str(error)) from None


def field(kind: str, space: str, name: str) -> bytes:
    """``i:``, ``b:`` and ``l:`` fields."""
    return b"%s:%s\0%s" % (kind.encode(), text(space), text(name))


pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder().decode


def mark(value: Any) -> bytes:
    """What scripts compare with the first elements of a row: MessagePack of one value is no beginning of another's."""
    return pack(value)


def head(at: Head | None) -> bytes:
    """The value of a ``b:`` field; empty for a branch that is not there."""
    return b"" if at is None else pack([at.seq, at.id])


def head_of(value: bytes | None) -> Head | None:
    if not value:
        return None
    seq, id = _array(value, 2, "head of a branch")
    if type(seq) is not int or type(id) is not str:
        raise _damaged("head of a branch", "its values are of other types")
    return Head(seq, id)


def roll(space: bytes) -> bytes:
    """The field that names the branches of a space."""
    return ROLLS[1 + zlib.crc32(space) % (len(ROLLS) - 1)] if space else ROLLS[0]


def fixed_of(value: bytes | None) -> tuple[int, int | None] | None:
    """Line and fork point of an ``l:`` field."""
    if not value:
        return None
    line, forked_from = _array(value, 2, "line of a branch")
    if type(line) is not int or type(forked_from) not in {int, type(None)}:
        raise _damaged("line of a branch", "its values are of other types")
    return line, forked_from


def numbers(last: Numbers) -> bytes:
    return b"%d %d %d %d %d" % (last.seq, last.call, last.pause, last.line, last.position)


def numbers_of(value: bytes | None) -> Numbers:
    if not value:
        return Numbers()
    if re.fullmatch(rb"\d+( \d+){4}", value) is None:
        raise _damaged("numbers", "they are no five numbers")
    return Numbers(*map(int, value.split()))


_LENGTH = struct.Struct(">I")


def body(refs: bytes, data: bytes) -> bytes:
    return b"%s%s%s" % (_LENGTH.pack(len(refs)), refs, data)


def parts(value: bytes) -> tuple[bytes, bytes]:
    """Refs and data of a ``body``."""
    end = 4 + int.from_bytes(value[:4])
    return value[4:end], value[end:]


def obj(name: bytes, value: bytes) -> Obj:
    """The object of an ``o:`` field. One that was cut off comes out with other bytes than its name says: the reader sees that."""
    end = 4 + int.from_bytes(value[:4])
    return tuple.__new__(Obj, (name, value[4:end], value[end:-STAMP]))  # what Obj itself does, without a call of its own


def block(number: int) -> tuple[int, int]:
    """The block of a number, and what its field is changed by."""
    return number // BLOCK, 1 << number % BLOCK


def mask(kind: str, numbers: Iterable[int]) -> dict[bytes, int]:
    """By how much the fields of a kind (``k``, ``g``, ``j``) change when these numbers come; negated, when they go."""
    found: dict[bytes, int] = {}
    for number in numbers:
        at, bit = block(number)
        name = b"%s:%d" % (kind.encode(), at)
        found[name] = found.get(name, 0) + bit
    return found


def bits(at: int, value: bytes | None) -> list[int]:
    """The numbers in a block, rising."""
    if not value:
        return []
    try:
        found = int(value)
    except ValueError:
        raise _damaged("block of numbers", "it is no number") from None
    return [at * BLOCK + i for i in range(BLOCK) if found >> i & 1]


def open_entry(row: CallRow | PauseRow) -> bytes:
    """What ``open`` or ``asks`` has of a row; empty if it is settled."""
    letter = (_LETTERS if isinstance(row, CallRow) else _ASKED).get(row.status)
    return b"" if letter is None else b";%s%d/%d/%d" % (letter.encode(), row.no, row.line, row.step)


_OPENED = re.compile(rb";([a-z])(\d+)/(\d+)/(\d+)")


def opened(value: bytes | None) -> list[tuple[str, int, int, int]]:
    """Letter, number, line and step of each entry of ``open`` or ``asks``."""
    return [(m[1].decode(), int(m[2]), int(m[3]), int(m[4])) for m in _OPENED.finditer(value or b"")]


# -- what adapters recorded


def shelf(place: bytes) -> bytes:
    """The ``e:`` field that names the list of a checkpoint: ``<space>\\0<checkpoint>``, of a ``v:`` or an ``i:`` field."""
    return SHELVES[zlib.crc32(place) % len(SHELVES)]


def entry(row: WriteRow) -> bytes:
    """What the ``v:`` field of a row's checkpoint has of it."""
    return b"%d\0%s\0" % (row.idx, text(row.writer))


def write_field(key: tuple[str, str, str, int]) -> bytes:
    """The ``w:`` field of a row with this key."""
    space, checkpoint, writer, idx = key
    return b"w:%s\0%s\0%d\0%s" % (text(space), text(checkpoint), idx, text(writer))


def names(value: bytes | None) -> list[bytes]:
    """What ``branches`` and ``d:`` and ``v:`` and ``e:`` fields hold: names of two parts."""
    parts = (value or b"").split(b"\0")
    return list(map(b"\0".join, zip(parts[:-1:2], parts[1::2], strict=False)))


def shelved(value: bytes | None) -> list[bytes]:
    """The ``v:`` fields that an ``e:`` field names."""
    return [b"v:" + place for place in names(value)]


def pages_of(group: bytes, value: bytes | None) -> list[bytes]:
    """The pages of a ``v:`` field, which go before what itself has. Damaged if it is no list."""
    if value is None:
        return []
    count, found, _ = value.partition(b";")
    if not found or not count.isdigit():
        raise _damaged("list of writes", "it does not tell its pages")
    return [b"%s\0%d" % (group, k) for k in range(int(count))]


def listed(group: bytes, value: bytes | None, *, page: bool = False) -> list[bytes]:
    """The ``w:`` fields that this ``v:`` field names, or one of its pages."""
    own = value if page or value is None else value.partition(b";")[2]
    return [b"w:%s\0%s" % (group[2:], name) for name in names(own)]


def lists(fields: Iterable[bytes]) -> dict[bytes, bytes]:
    """The ``v:`` and ``e:`` fields that name just these ``w:`` fields."""
    found: dict[bytes, bytes] = {}
    for name in sorted(fields):
        space, checkpoint, own = name[2:].split(b"\0", 2)
        place = b"%s\0%s" % (space, checkpoint)
        if (group := b"v:" + place) not in found:
            found[shelf(place)] = b"%s%s\0" % (found.get(shelf(place), b""), place)
        found[group] = b"%s%s\0" % (found.get(group, b"0;"), own)
    return found


# -- rows

_getters: dict[tuple[str, ...], Any] = {names: attrgetter(*names) for names in (HEADER, CALL, PAUSE)}
_written = attrgetter(*WRITE)
_PADDING = 16


def _encoded(row: Any, names: tuple[str, ...]) -> bytes:
    values = [*_getters[names](row)]
    values += [None] * (_PADDING - len(values))
    return pack(values)


def encoded_header(row: CheckpointRow) -> bytes:
    return _encoded(row, HEADER)


def encoded_call(row: CallRow) -> bytes:
    return _encoded(row, CALL)


def encoded_pause(row: PauseRow) -> bytes:
    return _encoded(row, PAUSE)


def encoded_write(row: WriteRow) -> bytes:
    return pack(_written(row))


def _maker(cls: type[Row], names: tuple[str, ...], number: str) -> Callable[[int, bytes], Row]:
    """What makes a row of its number and value. One whose values are of other classes becomes one whose seal is broken."""
    fits = fitting(cls, names)
    at = names.index(number)
    sealed_at = names.index("seal")

    def make(no: int, value: bytes) -> Row:
        given = _array(value, max(len(names), _PADDING), f"row of {cls.__name__} {no}")[: len(names)]
        if not fits(tuple(given)):
            given[at] = no
            return torn(cls, names, tuple(given))
        if given[at] != no:  # its number is that of its field: a listing goes on from it
            given[at], given[sealed_at] = no, b""
        return cls(**dict(zip(names, given, strict=True)))

    return make


header = _maker(CheckpointRow, HEADER, "seq")
call = _maker(CallRow, CALL, "no")
pause = _maker(PauseRow, PAUSE, "no")


_fits_write = fitting(WriteRow, WRITE)


def key_of(field: bytes) -> tuple[str, str, str, int]:
    """The key of the row in a ``w:`` field; Damaged if no row has such a field."""
    space, checkpoint, idx, writer = (field[2:].split(b"\0") + [b""] * 4)[:4]
    try:
        key = decoded(space), decoded(checkpoint), decoded(writer), int(idx)
    except ValueError:
        raise _damaged("name of a write", "it is no name") from None
    if write_field(key) != field:
        raise _damaged("name of a write", "it is no name")
    return key


def write(field: bytes, value: bytes) -> WriteRow:
    """The row of a ``w:`` field. As of other rows: one that is not what its field says has a broken seal."""
    key = key_of(field)
    given = _array(value, len(WRITE), "row of a write")
    if tuple(given[:4]) != key:
        given[:4], given[-1] = key, b""
    if not _fits_write(tuple(given)):
        return torn(WriteRow, WRITE, tuple(given))
    return WriteRow(**dict(zip(WRITE, given, strict=True)))


def checkpoint(seq: int, top: bytes, below: bytes | None) -> CheckpointRow:
    """The whole row, of its ``h:`` and ``r:`` fields. Damaged if the latter is missing."""
    return with_root(header(seq, top), below)


def with_root(row: CheckpointRow, below: bytes | None) -> CheckpointRow:
    if below is None:
        raise _damaged(f"checkpoint {row.seq}", "its root is missing")
    refs, root = parts(below)
    return msgspec.structs.replace(row, root=root, refs=refs)


def _array(value: bytes, length: int, what: str) -> list[Any]:
    try:
        found = _unpack(value)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _damaged(what, str(error)) from None
    if type(found) is not list or len(found) != length:
        raise _damaged(what, "it has another shape")
    return found


def _damaged(what: str, why: str) -> Damaged:
    return Damaged(
        f"a value of the store ({what}) is damaged",
        why,
        "See what is left with safepoint verify; restore the store from a backup, or repair it into another one.",
    )

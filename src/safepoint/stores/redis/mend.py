"""Tasks in Redis mended in place, what belongs to no task, and copies of a store beside it.

What is taken out of a task goes, as it was found, to a hash of its own: the task's key with ``:q`` after it. There a field ``<when>``
says what was set aside and why, and ``<when> <field>`` has the bytes.
"""

from __future__ import annotations

import base64
import binascii
import re
import secrets
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from safepoint import _probe
from safepoint.errors import Unavailable, UsageError
from safepoint.model import now, to_us
from safepoint.rows import Aside, CallRow, CheckpointRow, Image, Lost, replace
from safepoint.stores import refusals
from safepoint.stores.redis import layout, walk
from safepoint.stores.redis.fields import values_of
from safepoint.stores.redis.sweep import asked, start
from safepoint.stores.url import redact

if TYPE_CHECKING:
    from safepoint.stores.redis.client import Client

__all__ = ["Mends"]

TRIES = 20
"""How often a task is looked at again that is written to meanwhile."""
_MARKS = re.compile(rb"[kgjed]:\d+|v:.*", re.DOTALL)
_SUFFIXES = re.compile(rb"(:f|(:w:[0-9a-f]+)?(:q(:\d+)?)?)")


class Mends:
    """Needs ``_client``, ``_ttl`` and ``_given`` (the URL, with its password) from the store."""

    _client: Client
    _ttl: int
    _given: str
    sets_unread_aside = True

    # -- in place

    def set_aside(self, image: Image, gone: Iterable[Aside], put: Iterable[CheckpointRow], bare: Iterable[CallRow]) -> int:
        task, client = image.row.task, self._client
        made = [row.sealed(task) for row in put]
        calls = [row.sealed(task) for row in bare]
        asides = list(gone)
        born, dead = secrets.token_hex(8).encode(), b""
        keys = client.keys.of(task)
        for _ in range(TRIES):
            at = start(client, task)
            if at is None or (at.numbers.seq + len(made), at.numbers.position) != (image.numbers.seq, image.numbers.position):
                raise refusals.stale(task)
            # A commit of writes or of branches alone moves no number. Whatever comes after this look moves ``w``.
            if client.command("HGET", keys[0], "t:updated") != b"%d" % image.row.updated_at:
                raise refusals.stale(task)
            plan = _Plan(client, task, image, asides, made, calls)
            last = replace(at.numbers, seq=image.numbers.seq, line=max(at.numbers.line, image.numbers.line))
            plan.write |= {
                b"n": layout.numbers(last),
                b"t:branch": layout.text(image.row.branch),
                b"t:updated": b"%d" % to_us(now()),
            }
            when = b"%d" % to_us(now())
            said = layout.pack([[aside.kind, _shown(aside.key), aside.why] for aside in asides])
            _probe.at("repair.before")
            pairs = [part for pair in plan.write.items() for part in pair]
            args = [
                self._ttl,
                dead,
                at.w,
                at.token,
                born,
                when,
                said,
                len(plan.move),
                *plan.move,
                len(plan.drop),
                *plan.drop,
                *pairs,
            ]
            answer = client.write("mend", [*keys, keys[0] + b":q"], args)
            _probe.at("repair.after")
            if answer[0] == b"done":
                return plan.moved
            if answer[0] == b"absent":
                raise refusals.stale(task)
            if answer[0] == b"held":
                dead = asked(task, answer)
        raise Unavailable(
            f"task {task!r} changed {TRIES} times while it was repaired", "a run is busy with it", "Stop that run.", task=task
        )

    # -- what is there

    def walk_tasks(self) -> Iterator[str | Lost]:
        client = self._client
        names: dict[str, bytes] = {}
        for key in _keys(client):
            task, suffix = _task_of(client, key)
            if task is not None and not suffix:
                names[task] = key
        there = _have_rows(client, list(names.values()))
        yield from sorted(task for task, key in names.items() if there[key])

    def strays(self) -> list[Lost]:
        return [lost for lost, _ in self._strays()]

    def set_strays_aside(self) -> int:
        moved = 0
        for lost, key in self._strays():
            if lost.kind == "stray":
                # With the same hash tag, so in the same slot of a cluster.
                moved += bool(self._client.command("RENAMENX", key, b"%s:q:%d" % (key, to_us(now()))))
            elif lost.kind == "structure" and (task := _task_of(self._client, key)[0]) is not None:
                self._client.announce(task)
                moved += 1
        return moved

    def _strays(self) -> Iterator[tuple[Lost, bytes]]:
        client = self._client
        indexes = [client.keys.index(k) for k in range(layout.INDEXES)]
        keys = sorted(_keys(client) - set(indexes))
        kinds = dict(zip(keys, client.many([("TYPE", key) for key in keys]), strict=True))
        there = _have_rows(client, keys, kinds)
        # After the keys: a task is in the index before it is there.
        listed = {name for names in client.many([("HKEYS", key) for key in indexes]) for name in names}
        for key, kind in kinds.items():
            where = f"key {key.decode('utf-8', 'backslashreplace')}"
            task, suffix = _task_of(client, key)
            if kind == b"none":
                continue  # it has gone meanwhile
            if task is None or kind != (b"string" if suffix == b":f" else b"hash"):
                yield Lost(f"a {kind.decode()}", where, "no such key belongs to a store", kind="foreign"), key
            elif not suffix and there[key]:
                if task.encode() not in listed:
                    why = "it is not in the index of tasks, so that no listing shows it"
                    yield Lost(f"task {task!r}", f"key {client.keys.index_of(task).decode()}", why, kind="structure"), key
            elif b":q" not in suffix and suffix != b":f" and client.command("TTL", key) == -1:
                if not suffix and _have_rows(client, [key], kinds)[key]:
                    continue  # deleted when it was looked at, and begun anew since
                why = "it belongs to no task, and does not expire"
                yield Lost(f"a part of task {task!r}", where, why, kind="stray"), key

    # -- copies

    def beside(self, suffix: str) -> str | None:
        # With its password, as it is to be opened.
        return _renamed(self._given, self._client.keys.prefix.decode() + suffix, self._client.cluster)

    def backup(self, suffix: str) -> str:
        client = self._client
        prefix = client.keys.prefix
        to = prefix + suffix.encode()
        url = redact(_renamed(self._given, to.decode(), client.cluster))
        if any(True for _ in _keys(client, to)):
            raise UsageError(f"{url} is there already", "", "Remove its keys.", path=url)
        for key in sorted(_keys(client)):
            # A hash at a time: whoever writes to a task meanwhile has it copied whole, as it was before or after.
            client.command("COPY", key, to + key.removeprefix(prefix), "REPLACE")
        return url


def _renamed(url: str, prefix: str, cluster: bool) -> str:
    place, _, query = url.partition("?")
    parts = [part for part in query.split("&") if part and part.partition("=")[0] not in {"prefix", "cluster"}]
    parts += [f"prefix={quote(prefix, safe='')}", *(["cluster=true"] if cluster else [])]
    return f"{place}?{'&'.join(parts)}"


def _keys(client: Client, prefix: bytes | None = None) -> set[bytes]:
    """Every key of the store with that prefix, or of this one."""
    prefix = client.keys.prefix if prefix is None else prefix
    pattern = re.sub(rb"([\\*?\[\]^])", rb"\\\1", prefix) + b"*"
    found: set[bytes] = set()
    for at in client.primaries():
        cursor = b"0"
        while True:
            cursor, page = client.ask(at, "SCAN", cursor, "MATCH", pattern, "COUNT", 1000)
            # Another store's name may begin with that of this one.
            found.update(key for key in page if key.removeprefix(prefix).startswith((b"{", b"tasks:{")))
            if cursor == b"0":
                break
    return found


def _have_rows(client: Client, keys: list[bytes], kinds: dict[bytes, bytes] | None = None) -> dict[bytes, bool]:
    """Which of the keys are tasks, also where it is lost which."""
    found = kinds or dict(zip(keys, client.many([("TYPE", key) for key in keys]), strict=True))
    hashes = [key for key in keys if found[key] == b"hash"]
    named = dict(zip(hashes, client.many([("HEXISTS", key, "t:id") for key in hashes]), strict=True))
    return {key: key in named and bool(named[key] or walk.has_rows(client, key)) for key in keys}


def _task_of(client: Client, key: bytes) -> tuple[str | None, bytes]:
    """The task that a key is of, None if it is none's; and what comes after it."""
    tag, _, suffix = key.removeprefix(client.keys.prefix)[1:].partition(b"}")
    try:
        task = base64.b64decode(tag, b"-_", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return None, suffix
    if client.keys.task(task) + suffix != key or _SUFFIXES.fullmatch(suffix) is None:
        return None, suffix
    return task, suffix


def _shown(key: Any) -> Any:
    return key.hex() if isinstance(key, bytes) else list(key) if isinstance(key, tuple) else key


# -- what a mended task is made of


class _Plan:
    """Which fields are set aside, removed and written, as the task was seen."""

    def __init__(
        self, client: Client, task: str, image: Image, gone: list[Aside], put: list[CheckpointRow], bare: list[CallRow]
    ) -> None:
        key = client.keys.task(task)
        names = walk.names_of(client, key)
        self.moved = 0
        """How many rows and objects are set aside."""
        self.move: list[bytes] = []
        for aside in gone:
            self._aside(names, aside)
        for call in bare:
            self._take(names, [b"c:%d" % call.no])
        for name in names:
            if not walk.is_known(name):
                self._take(names, [name])
        moved = set(self.move)
        there = {name for name in names if name not in moved}

        def rows(kind: bytes) -> dict[int, bytes]:
            return {int(m[2]): field for field in there if (m := walk.ROW.fullmatch(field)) and m[1] == kind}

        seqs = {*rows(b"h"), *(row.seq for row in put)}
        open_calls, open_pauses = list(bare), []
        for no, value in _values(client, key, rows(b"c")):
            open_calls.append(layout.call(no, value))
        for no, value in _values(client, key, rows(b"p")):
            open_pauses.append(layout.pause(no, value))
        mended = replace(
            image,
            checkpoints=tuple(row for row in image.checkpoints if row.seq in seqs),
            calls=tuple(sorted(open_calls, key=lambda row: row.no)),
            pauses=tuple(sorted(open_pauses, key=lambda row: row.no)),
        )
        self.write = walk.row_fields(mended) | layout.lists(name for name in there if name[:2] == b"w:")
        unknown = seqs - {row.seq for row in mended.checkpoints}
        if unknown:  # rows that came with no number of their own being new: they stay
            self.write |= {name: b"%d" % bits for name, bits in layout.mask("k", seqs).items()}
            self.write[b"count"] = b"%d" % len(seqs)
            for seq, value in _values(client, key, {seq: b"h:%d" % seq for seq in unknown}):
                row = layout.header(seq, value)
                self.write[layout.field("i", row.space, row.id)] = b"%d" % seq
        for row in put:
            self.write[b"h:%d" % row.seq] = layout.encoded_header(row)
            self.write[b"r:%d" % row.seq] = layout.body(row.refs, row.root)
        for call in bare:
            self.write[b"c:%d" % call.no] = layout.encoded_call(call)
        of_rows = sorted(name for name in there if name[:2] in {b"b:", b"l:", b"i:"})
        for name, old in values_of(client, key, of_rows):
            # Where a branch stands, and a row's id, are told by the rows that are left. What differs is kept, as it was.
            if old is not None and self.write.get(name) != old:
                self.move.append(name)
        self.drop = [name for name in there if _MARKS.fullmatch(name) and name not in self.write]

    def _aside(self, names: dict[bytes, int], aside: Aside) -> None:
        match aside.kind, aside.key:
            case "checkpoint", int():
                self._take(names, [b"h:%d" % aside.key, b"r:%d" % aside.key])
            case (("call" | "pause"), int()):
                self._take(names, [b"%s:%d" % (aside.kind[0].encode(), aside.key)])
            case "object", bytes():
                self._take(names, [b"o:" + aside.key])
            case "write", (str(), str(), str(), int()):
                self._take(names, [layout.write_field(aside.key)])
            case "branch", (str() as space, str() as name):
                self._take(names, [layout.field("b", space, name), layout.field("l", space, name)])

    def _take(self, names: dict[bytes, int], fields: list[bytes]) -> None:
        found = [field for field in fields if field in names and field not in self.move]
        self.move += found
        self.moved += bool(found)


def _values(client: Client, key: bytes, fields: dict[int, bytes]) -> Iterator[tuple[int, bytes]]:
    for no, (_, value) in zip(fields, values_of(client, key, list(fields.values())), strict=True):
        if value is not None:
            yield no, value

"""What the table at the end is computed from: files of other processes and raw rows, never the library's own counters.

The database is looked at as a copy, with SQLite alone, while no agent runs. So looking changes nothing, and rows are read as
they lie on the disk.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import apsw
from findings import Finding, find  # type: ignore[import-not-found]
from mail import Mailbox  # type: ignore[import-not-found]

_REPLY = re.compile(rb"chatcmpl-\d{6}")


@dataclass(frozen=True, slots=True)
class Raw:
    """The database at one moment."""

    replies: frozenset[str] = frozenset()
    """Ids of the model replies that are on record, found in the bytes of the rows."""
    open_calls: tuple[tuple[str, str], ...] = ()
    """Tool and idempotency key of each call that has an intent and no result."""
    unsettled: int = 0
    calls: int = 0
    checkpoints: frozenset[tuple[int, str]] = frozenset()
    step: int = 0
    ledger: tuple[tuple[Any, ...], ...] = ()


def look(db: Path) -> Raw:
    """Read the rows. None of the agent's processes may be alive: files are copied one after the other."""
    if not db.exists():
        return Raw()
    with tempfile.TemporaryDirectory(prefix="safepoint-look-") as folder:
        for suffix in ("", "-wal"):
            if (file := Path(f"{db}{suffix}")).exists():
                shutil.copy(file, Path(folder) / f"copy.db{suffix}")
        connection = apsw.Connection(f"{folder}/copy.db")
        try:
            return _read(connection)
        finally:
            connection.close()


def _read(connection: apsw.Connection) -> Raw:
    def rows(sql: str, *values: Any) -> list[Any]:
        return connection.execute(sql, values).fetchall()

    tables = {name for (name,) in rows("SELECT name FROM sqlite_schema WHERE type = 'table'")}
    if "sp_calls" not in tables:
        return Raw()
    replies = set()
    for task, result, refs in rows(
        "SELECT task, result, result_refs FROM sp_calls WHERE tool = 'ask' AND status = 'succeeded' AND result IS NOT NULL"
    ):
        # A large result lies in objects that the row names, and these may name others.
        parts, todo = [result], [refs]
        known: set[bytes] = set()
        while todo:
            names = todo.pop()
            for name in {names[i : i + 16] for i in range(0, len(names), 16)} - known:
                known.add(name)
                for data, more in rows("SELECT data, refs FROM sp_objects WHERE task = ? AND name = ?", task, name):
                    parts.append(data)
                    todo.append(more)
        replies |= {m.decode() for m in _REPLY.findall(b"\n".join(parts))}
    return Raw(
        replies=frozenset(replies),
        open_calls=tuple(rows("SELECT tool, idempotency_key FROM sp_calls WHERE status = 'started' ORDER BY no")),
        unsettled=rows("SELECT count(*) FROM sp_calls WHERE status NOT IN ('succeeded', 'failed')")[0][0],
        calls=rows("SELECT count(*) FROM sp_calls")[0][0],
        checkpoints=frozenset(rows("SELECT seq, id FROM sp_checkpoints")),
        step=rows("SELECT coalesce(max(step), 0) FROM sp_checkpoints WHERE kind != 'failure'")[0][0],
        ledger=tuple(rows("SELECT document, finding, cents FROM ledger")) if "ledger" in tables else (),
    )


@dataclass(frozen=True, slots=True)
class Kill:
    """A line of the driver's kill log."""

    after: float
    """Seconds since the start of the demo."""
    pid: int
    why: str
    place: str
    in_effect: bool
    step: int


@dataclass(slots=True)
class Notes:
    """What the driver saw."""

    kills: list[Kill] = field(default_factory=list)
    deaths: list[Raw] = field(default_factory=list)
    """The rows as each dead agent left them."""
    sizes: list[int] = field(default_factory=list)
    """Bytes of the database files at each death."""
    steps: Counter[int] = field(default_factory=Counter)
    """How often each step was begun."""


@dataclass(frozen=True, slots=True)
class Line:
    what: str
    value: int
    source: str
    kept: bool | None = None
    """Whether the promise was kept; None if the line is no promise."""
    broken: str = ""
    """What to say if it was not."""


def expected(documents: Path, today: date) -> list[Finding]:
    """What there is to report, by the rules alone."""
    return [f for d in sorted(documents.glob("*.txt")) for f in find(d.name, d.read_text(encoding="utf-8"), today)]


def table(notes: Notes, wanted: list[Finding], db: Path, mailbox: Path, requests: Path, documents: Path) -> list[Line]:
    raw = look(db)
    mails = Counter((str(m["To"]), str(m["Subject"]), _text(m.get_content())) for m in Mailbox(mailbox).messages())
    due = Counter((f.to, f.subject, _text(f.body)) for f in wanted)
    booked, due_booked = Counter(raw.ledger), Counter((f.document, f.kind, f.cents) for f in wanted)
    missing, surplus = due_booked - booked, booked - due_booked
    twice = mails - Counter(set(mails))
    wrong = sorted(f"{to}: {subject}" for to, subject, _ in set(mails) ^ set(due))
    log = [json.loads(line) for line in requests.read_text().splitlines()]
    again, cut, lost = _asked(log, [*notes.deaths, raw])
    repeated = notes.steps.total() - len(notes.steps)
    gone = {c for death in notes.deaths for c in death.checkpoints} - raw.checkpoints
    in_effect = sum(k.in_effect for k in notes.kills)
    places = Counter(k.place for k in notes.kills)
    read = sum(d.stat().st_size for d in documents.glob("*.txt"))
    asked = sum(r["bytes"] for r in log)

    return [
        Line(
            "kills",
            len(notes.kills),
            "kill log",
            len(notes.kills) >= 5,
            "the agent was killed fewer than five times; the folder may be too small",
        ),
        *(Line(f"  {place}", n, "kill log") for place, n in sorted(places.items())),
        Line(
            "kills inside an effect",
            in_effect,
            "kill log",
            in_effect >= 1,
            "no kill hit an effect; the documents may hold no finding",
        ),
        Line("mails expected", due.total(), "rules over documents"),
        Line("mails sent", mails.total(), "mailbox"),
        Line("mails missing or wrong", len(wrong), "mailbox", not wrong, f"mails missing or wrong: {'; '.join(wrong)}"),
        Line(
            "mails sent twice",
            twice.total(),
            "mailbox",
            not twice,
            f"mails sent more than once: {'; '.join(f'{to}: {subject}' for to, subject, _ in twice)}",
        ),
        Line("ledger rows", booked.total(), "table ledger"),
        Line("findings not booked", missing.total(), "table ledger", not missing, f"findings not booked: {_names(missing)}"),
        Line(
            "findings booked twice",
            surplus.total(),
            "table ledger",
            not surplus,
            f"findings booked more than once, or for no reason: {_names(surplus)}",
        ),
        Line("requests to the model", len(log), "request log"),
        Line(
            "recorded replies asked for again",
            len(again),
            "request log, rows",
            not again,
            f"replies asked for again although they were on record: {', '.join(again)}",
        ),
        Line(
            "model calls cut short, asked again",
            len(cut),
            "request log, rows",
            len(cut) <= len(notes.kills),
            "a kill cost more than the one model call that it hit",
        ),
        Line(
            "recorded replies lost",
            len(lost),
            "rows at each death",
            not lost,
            f"replies that were on record and are gone: {', '.join(lost)}",
        ),
        Line(
            "checkpoints lost",
            len(gone),
            "rows at each death",
            not gone,
            f"checkpoints that were stored and are gone: {', '.join(str(seq) for seq, _ in sorted(gone))}",
        ),
        Line(
            "calls left open or in doubt",
            raw.unsettled,
            "raw rows",
            raw.unsettled == 0,
            f"{raw.unsettled} calls have no outcome",
        ),
        Line("steps", len(notes.steps), "agents' output"),
        Line(
            "steps repeated",
            repeated,
            "agents' output",
            repeated <= len(notes.kills),
            "a kill cost more than the step that it hit",
        ),
        Line("bytes stored", size(db), "database files"),
        Line("  most at a death, with log file", max(notes.sizes, default=0), "database files"),
        Line("  bytes of the documents", read, "files"),
        Line("  bytes sent to the model", asked, "request log"),
    ]


def size(db: Path) -> int:
    """Bytes of the database and its write-ahead log."""
    return sum(file.stat().st_size for s in ("", "-wal") if (file := Path(f"{db}{s}")).exists())


def _asked(log: list[dict[str, Any]], looks: Iterable[Raw]) -> tuple[list[str], list[str], list[str]]:
    """Replies asked for again although they were on record; requests whose reply never got there; recorded replies lost.

    A reply counts as recorded from the first look that shows it: a product that asks again and writes over the old record
    would otherwise look innocent.
    """
    looks = list(looks)
    recorded = frozenset[str]().union(*(r.replies for r in looks))
    known: dict[str, str] = {}
    again = []
    for request in log:
        if request["digest"] in known:
            again.append(known[request["digest"]])
        if request["reply"] in recorded:
            known[request["digest"]] = request["reply"]
    cut = [r["reply"] for r in log if r["reply"] not in recorded]
    return again, cut, sorted(recorded - looks[-1].replies)


def _text(content: str) -> str:
    return content.replace("\r\n", "\n").strip()


def _names(rows: Counter[tuple[Any, ...]]) -> str:
    return "; ".join(f"{document} ({finding})" for document, finding, _ in rows)

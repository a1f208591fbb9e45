"""Mending a PostgreSQL store in place: what is damaged goes to sp_quarantine as it was found, and is never deleted."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from hashlib import sha256
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import psycopg

from safepoint import _probe
from safepoint.errors import UsageError
from safepoint.model import now, to_us
from safepoint.rows import Aside, CallRow, CheckpointRow, Image
from safepoint.stores import refusals
from safepoint.stores.postgres import needed, rows, schema, stray, sweep
from safepoint.stores.postgres.walk import rows_of
from safepoint.stores.url import redact

if TYPE_CHECKING:
    from safepoint.stores.foreseen import Foreseen
    from safepoint.stores.postgres.db import Database
    from safepoint.stores.postgres.link import Link

__all__ = ["Mends"]

LONGEST = 63
"""Bytes of a name in PostgreSQL; what is longer is cut off without a word, and would be another's."""


class Mends:
    """Needs ``_db`` and ``_foreseen`` from the store."""

    _db: Database
    _foreseen: Foreseen

    def beside(self, suffix: str) -> str | None:
        return url_of(self._db, beside(self._db.schema, suffix))

    def backup(self, suffix: str) -> str:
        db, name = self._db, beside(self._db.schema, suffix)
        quoted = '"' + name.replace('"', '""') + '"'
        try:
            link = db.open(time.monotonic() + db.timeout)
        except psycopg.Error as error:
            raise db.translate(error) from error
        try:
            link.end = time.monotonic() + db.timeout
            if link.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", (name,)).fetchall():
                raise UsageError(f"schema {name!r} is there already", "", "Drop it, or rename it.", path=name)
            schema.prepare(link, name, quoted, db.url)
            try:
                _copy(db, link, quoted)
            except BaseException:
                if not link.closed:
                    link.execute("ROLLBACK")
                    link.execute(f"DROP SCHEMA {quoted} CASCADE")  # half a copy must not be taken for one
                raise
        except psycopg.Error as error:
            raise db.translate(error) from error
        finally:
            link.close()
        return redact(url_of(db, name))

    def set_aside(self, image: Image, gone: Iterable[Aside], put: Iterable[CheckpointRow], bare: Iterable[CallRow]) -> int:
        db, task = self._db, image.row.task
        asides, made, calls = list(gone), [row.sealed(task) for row in put], [row.sealed(task) for row in bare]
        done: list[int] = []
        """What each try has moved."""
        tries = needed.Tries()

        def write(link: Link) -> int:
            found = rows_of(db, link, "lock", task=task)
            if tries.landed(link):
                return done[-1]
            if not found:
                raise refusals.stale(task)
            n, seq, _, _, line, position, updated = found[0]
            sweep.refuse_if_held(db, link, task, n)
            before = image.numbers
            # Numbers that repair itself gave out are not there yet.
            if seq != before.seq - len(made) or line > before.line or position != before.position:
                raise refusals.stale(task)
            if updated != image.row.updated_at:  # a commit of writes or of branches alone moves none of them
                raise refusals.stale(task)
            moved = sum(_aside(db, link, task, n, aside) for aside in asides)
            for row in made:
                _put(db, link, "checkpoints", rows.CHECKPOINT, n, rows.values(row, rows.CHECKPOINT))
            for call in calls:
                given = {"n": n, "no": call.no}
                moved += _keep(
                    db,
                    link,
                    "calls",
                    "task = %(n)s AND no = %(no)s",
                    given,
                    ("call", task, str(call.no), "its values are lost"),
                )
                _put(db, link, "calls", rows.CALL, n, rows.values(call, rows.CALL))
            rows_of(db, link, "drop_branches", n=n)
            for b in image.branches:
                _put(db, link, "branches", rows.Branch._fields, n, [b.space, b.name, *b.head, b.line, b.forked_from])
            rows_of(db, link, "mended", n=n, branch=image.row.branch, seq=before.seq, line=before.line, at=to_us(now()))
            tries.ends(link)
            _probe.at("repair.before")
            done.append(moved)
            return moved

        moved = db.write(write, again=True, facts={"task": task})
        _probe.at("repair.after")
        self._foreseen.drop(task)
        return moved

    def set_strays_aside(self) -> int:
        db, moved = self._db, 0
        for lost in stray.strays(db):
            if lost.kind == "stray" and lost.first is not None:
                moved += db.write(lambda link, lost=lost: _stray_aside(db, link, lost), again=True, facts={})  # type: ignore[misc]
        return moved


def beside(name: str, suffix: str) -> str:
    """The name of a schema with a suffix, shortened where that would be too long."""
    room = LONGEST - len(suffix.encode())
    if len(name.encode()) > room:
        name = name.encode()[: room - 9].decode("utf-8", "ignore") + "-" + sha256(name.encode()).hexdigest()[:8]
    return name + suffix


def url_of(db: Database, name: str) -> str:
    """The URL of a store in another schema of the same database; with the password, if there is one."""
    info = db._info
    return f"{info}{'&' if '?' in info else '?'}{urlencode({'schema': name})}"


# -- copies


def _copy(db: Database, link: Link, quoted: str) -> None:
    """All that is there, as of one moment. Nobody waits for it, and it waits as long as it takes."""
    link.end = None
    link.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ WRITE")
    for name in stray.ALL_TABLES:
        old, new = needed.table_of(db, name), f"{quoted}.sp_{name}"
        columns = ", ".join(f'"{column}"' for column in _columns(link, new))
        link.execute(f"DELETE FROM {new}")  # what a new store has by itself
        link.execute(f"INSERT INTO {new} ({columns}) OVERRIDING SYSTEM VALUE SELECT {columns} FROM {old}")
    for name, column in (("tasks", "n"), ("writes", "k"), ("stages", "k"), ("outbox", "k"), ("quarantine", "k")):
        # Numbers of tasks that are gone too: none may come a second time.
        old, new = needed.table_of(db, name), f"{quoted}.sp_{name}"
        given = link.execute("SELECT pg_get_serial_sequence(%s, %s)", (old, column)).fetchall()[0][0]
        link.execute(f"SELECT setval(pg_get_serial_sequence(%s, %s), s.last_value, s.is_called) FROM {given} s", (new, column))
    link.execute("COMMIT")


def _columns(link: Link, table: str) -> list[str]:
    found = link.execute(
        "SELECT attname::text FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attnum",
        (table,),
    ).fetchall()
    return [name for (name,) in found]


# -- out of the way


def _aside(db: Database, link: Link, task: str, n: int, aside: Aside) -> int:
    key = aside.key.hex() if isinstance(aside.key, bytes) else str(aside.key)
    what = (aside.kind, task, key, aside.why)
    match aside.kind:
        case "object":
            return _move(db, link, "objects", "task = %(n)s AND name = %(name)s", {"n": n, "name": aside.key}, what)
        case "branch":
            given = {"n": n, "space": aside.key[0], "name": aside.key[1]}
            return _keep(db, link, "branches", "task = %(n)s AND space = %(space)s AND name = %(name)s", given, what)
        case "write":
            given = {"n": n, **dict(zip(rows.WRITE[:4], aside.key, strict=True))}
            given["writer"] = rows.encoded(given["writer"])
            which = (
                "task = %(n)s AND space = %(space)s AND checkpoint = %(checkpoint)s AND writer = %(writer)s AND idx = %(idx)s"
            )
            return _move(db, link, "writes", which, given, what)
        case "checkpoint":
            return _move(db, link, "checkpoints", "task = %(n)s AND seq = %(seq)s", {"n": n, "seq": aside.key}, what)
    return _move(db, link, f"{aside.kind}s", "task = %(n)s AND no = %(no)s", {"n": n, "no": aside.key}, what)


def _stray_aside(db: Database, link: Link, lost: Any) -> int:
    name = lost.where.partition(",")[0].removeprefix("sp_")
    owned = rows_of(db, link, "owned", n=lost.first)
    return 0 if owned else _move(db, link, name, "task = %(n)s", {"n": lost.first}, ("stray", "", lost.where, lost.why))


def _move(db: Database, link: Link, table: str, where: str, given: dict[str, Any], what: tuple[str, str, str, str]) -> int:
    moved = _keep(db, link, table, where, given, what)
    link.execute(f"DELETE FROM {needed.table_of(db, table)} WHERE {where}", given)
    return moved


def _keep(db: Database, link: Link, table: str, where: str, given: dict[str, Any], what: tuple[str, str, str, str]) -> int:
    """Copy rows to the quarantine as JSON, which the server makes; what cannot be read of one is named in its place."""
    name = needed.table_of(db, table)
    kind, task, key, why = what
    values = {
        **given,
        "q_kind": kind,
        "q_task": task,
        "q_key": key,
        "q_why": rows.encoded(why),
        "q_at": to_us(now()),
        "q_table": f"sp_{table}",
    }
    link.execute("SAVEPOINT kept")
    try:
        kept = link.execute(
            f"INSERT INTO {needed.table_of(db, 'quarantine')} (kind, task, key, why, at, data)"
            " SELECT %(q_kind)s::text, %(q_task)s::text, %(q_key)s::text, %(q_why)s::text, %(q_at)s::bigint,"
            " convert_to(json_build_object('table', %(q_table)s::text, 'row', row_to_json(t))::text, 'UTF8')"
            f" FROM {name} t WHERE {where}",
            values,
        ).rowcount
    except psycopg.Error as error:
        if (error.sqlstate or "")[:2] != "XX":
            raise
        link.execute("ROLLBACK TO SAVEPOINT kept")
        data = json.dumps({"table": f"sp_{table}", "row": _readable(link, name, where, given)}, ensure_ascii=False).encode()
        rows_of(db, link, "quarantine", kind=kind, task=task, key=key, why=rows.encoded(why), at=to_us(now()), data=data)
        return 1
    return kept


def _readable(link: Link, name: str, where: str, given: dict[str, Any]) -> dict[str, Any]:
    """Column by column, since one that is damaged takes all others of the row with it."""
    found: dict[str, Any] = {}
    for column in _columns(link, name):
        link.execute("SAVEPOINT kept_column")
        try:
            value = link.execute(f'SELECT "{column}"::text FROM {name} WHERE {where}', given).fetchall()
            found[column] = value[0][0] if value else None
        except psycopg.Error as error:
            if (error.sqlstate or "")[:2] != "XX":
                raise
            link.execute("ROLLBACK TO SAVEPOINT kept_column")
            found[column] = {"cannot be read": error.diag.message_primary}
    return found


def _put(db: Database, link: Link, table: str, names: tuple[str, ...], n: int, values: list[Any]) -> None:
    keys = {"checkpoints": "task, seq", "calls": "task, no", "branches": "task, space, name"}[table]
    sets = ", ".join(f"{name} = excluded.{name}" for name in names)
    link.execute(
        f"INSERT INTO {needed.table_of(db, table)} (task, {', '.join(names)}) VALUES (%s{', %s' * len(names)})"
        f" ON CONFLICT ({keys}) DO UPDATE SET {sets}",
        [n, *values],
    )

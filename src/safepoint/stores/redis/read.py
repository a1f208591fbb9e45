"""Reading: rows by one script call, and what they reach by as many trips as the tree is deep.

Objects never change, so a checkpoint that is still there after one of its objects was found missing is damaged; one that is not
was pruned meanwhile, and is read anew. A listing is read page by page as long as nobody writes, and else in one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from safepoint.codec.nodes import names_in
from safepoint.errors import Damaged
from safepoint.model import Obj
from safepoint.rows import BranchRow, CallRow, CheckpointRow, Head, PauseRow, TaskRow, WriteRow
from safepoint.stores.redis import layout
from safepoint.stores.redis.client import Client

__all__ = ["Reads", "closure", "task_row"]

PAGE = 1_000
"""Rows a script call."""
BATCH = 1_000
"""Objects a command; several go in one trip."""
TRIP = 4_000_000
"""Bytes, about, that a trip fetches: others wait for as long as the server copies them."""
TRIES = 5
MOST = 2**53


class Reads:
    """Needs the client from the store."""

    _client: Client

    def task(self, task: str) -> TaskRow | None:
        return task_row(task, self._client.script("task", self._client.keys.of(task)))

    def tasks(self, *, after: str | None = None, limit: int = 200) -> list[TaskRow]:
        client = self._client
        keys = [client.keys.index(k) for k in range(layout.INDEXES)]
        listed = {layout.decoded(id) for ids in client.many([("HKEYS", key) for key in keys]) for id in ids}
        names = sorted(name for name in listed if after is None or name > after)
        rows: list[TaskRow] = []
        absent: dict[bytes, list[bytes]] = {}
        at = 0
        while len(rows) < limit and at < len(names):
            page = names[at : at + min(max(limit - len(rows), 16), PAGE)]
            at += len(page)
            found = client.scripts("task", [(client.keys.of(name), ()) for name in page])
            for name, values in zip(page, found, strict=True):
                row = task_row(name, values)
                if row is None:
                    absent.setdefault(client.keys.index_of(name), []).append(name.encode())
                elif len(rows) < limit:
                    rows.append(row)
        for key, gone in absent.items():
            client.write("index", [key], gone)
        return rows

    def branches(self, task: str, space: str | None = "") -> list[BranchRow]:
        if space is not None and "\0" in space:
            self._client.refuse_if_closed()
            return []
        return branches_of(task, None if space is None else layout.text(space), self._client)

    def read(
        self, task: str, *, space: str = "", seq: int | None = None, branch: str | None = None, id: str | None = None
    ) -> tuple[CheckpointRow, Mapping[bytes, Obj]] | None:
        client = self._client
        deadline = client.deadline()
        which: list[Any]
        if id is not None:
            which = ["id", layout.field("i", space, id)]
        elif seq is not None:
            if not 0 < seq < MOST:
                client.refuse_if_closed()
                return None
            which = ["seq", seq]
        elif branch is not None:
            which = ["branch", layout.text(space) + b"\0" + layout.text(branch)]
        else:
            which = ["current", layout.text(space) + b"\0"]
        found = client.script("read", client.keys.of(task), which, deadline=deadline)
        while True:
            if not found or (found[1] is None and which[0] == "seq"):
                return None
            number, top, below = found
            if top is None:
                raise _missing(task, int(number))
            row = layout.checkpoint(int(number), top, below)
            if row.space != space or (id is not None and row.id != id):
                if which[0] != "seq":
                    raise _missing(task, row.seq)
                return None
            objects, missing = closure(client, task, [row.refs], deadline, size=row.size)
            if not missing:
                return row, objects
            again = client.script("read", client.keys.of(task), which, deadline=deadline)
            if again == found:
                return row, objects
            found = again

    def headers(
        self,
        task: str,
        *,
        space: str | None = "",
        branch: str | None = None,
        before: int | None = None,
        limit: int | None = None,
        roots: bool = False,
    ) -> list[CheckpointRow]:
        def fits(row: CheckpointRow) -> bool:
            return space in {None, row.space} and branch in {None, row.branch}

        beside = "r:" if roots else ""
        found = self._list(task, "k", "h:", 1, layout.header, before=before, limit=limit, fits=fits, beside=beside)
        return [layout.with_root(row, below or None) for row, _, below in found] if roots else [row for row, *_ in found]

    def calls(
        self,
        task: str,
        *,
        line: int | None = None,
        from_step: int | None = None,
        nos: Iterable[int] | None = None,
        bodies: bool = True,
        limit: int | None = None,
    ) -> tuple[list[CallRow], Mapping[bytes, Obj]]:
        wanted = None if nos is None else sorted({no for no in nos if 0 < no < MOST})
        before: list[tuple[CallRow, bytes]] | None = None

        def fits(row: CallRow) -> bool:
            return (line is None or row.line == line) and (from_step is None or row.step >= from_step)

        while True:
            if wanted is None:
                listed = self._list(task, "g", "c:", 2, layout.call, limit=limit, fits=fits, line=line, step=from_step)
                found = [(row, value) for row, value, _ in listed[::-1]]
            else:
                found = [pair for pair in self._get(task, wanted) if fits(pair[0])]
                found = found if limit is None else found[max(0, len(found) - limit) :]
            rows = [row for row, _ in found]
            if not bodies:
                return rows, {}
            roots = [refs for row in rows for refs in (row.args_refs, row.result_refs) if refs]
            objects, missing = closure(self._client, task, roots, self._client.deadline())
            if not missing or before == found:
                return rows, objects
            before = found

    def pauses(self, task: str) -> list[PauseRow]:
        return [row for row, *_ in self._list(task, "j", "p:", 3, layout.pause)][::-1]

    def writes(
        self,
        task: str,
        *,
        space: str | None = "",
        checkpoints: Iterable[str] | None = None,
        writer: str | None = None,
        bodies: bool = True,
    ) -> tuple[list[WriteRow], Mapping[bytes, Obj]]:
        by = b"" if writer is None else b"\0" + layout.text(writer)
        ids = None if checkpoints is None else list({layout.text(id): None for id in checkpoints})
        if ids is None or space is None:
            within = b"" if space is None else layout.text(space) + b"\0"
            which = [by, within, len(layout.SHELVES), *(ids or ())]
        else:
            which = [by, b"", 0, *[b"%s\0%s" % (layout.text(space), id) for id in ids]]
        if ids == []:
            self._client.refuse_if_closed()
            return [], {}
        before: list[WriteRow] | None = None
        while True:
            rows = self._written(task, which)
            if not bodies:
                return rows, {}
            objects, missing = closure(self._client, task, [row.refs for row in rows if row.refs], self._client.deadline())
            if not missing or before == rows:
                return rows, objects
            before = rows

    def _written(self, task: str, which: list[Any]) -> list[WriteRow]:
        """As they were at one moment: page by page as long as nobody writes, and else in one."""
        client = self._client
        deadline = client.deadline()
        for tries in range(TRIES + 1):
            found: list[WriteRow] = []
            same, at = b"", 0
            while at >= 0:
                args = [at, MOST if tries == TRIES else TRIP, same, *which]
                same, at, *values = client.script("writes", client.keys.of(task), args, deadline=deadline)
                for field, value in zip(values[::2], values[1::2], strict=True):
                    if not value:
                        raise _damaged(task, f"its field {field!r}")
                    found.append(layout.write(field, value))
                if at == 0:
                    return sorted(found, key=lambda row: (row.space, row.checkpoint, row.path, row.writer, row.idx))
        raise AssertionError("one call reads all")

    # -- pages

    def _list(
        self,
        task: str,
        kind: str,
        prefix: str,
        which: int,
        make: Callable[[int, bytes], Any],
        *,
        before: int | None = None,
        limit: int | None = None,
        fits: Callable[[Any], bool] = lambda _: True,
        line: int | None = None,
        step: int | None = None,
        beside: str = "",
    ) -> list[tuple[Any, bytes, bytes]]:
        """Rows by falling number, each with its bytes and those of the field ``beside`` it, as they were at one moment."""
        client = self._client
        deadline = client.deadline()
        if limit is not None and limit <= 0:
            client.refuse_if_closed()
            return []
        top = "" if before is None else max(0, min(before, MOST))
        for tries in range(TRIES + 1):
            found: list[tuple[Any, bytes, bytes]] = []
            page = MOST if tries == TRIES else PAGE if limit is None else min(PAGE, max(limit, 16))
            below: Any = top
            same: bytes | str = ""
            while True:
                args = [kind, prefix, which, below, page, _or(line), _or(step), same, beside, TRIP]
                w, below, *rest = client.script("list", client.keys.of(task), args, deadline=deadline)
                if below < 0:
                    break  # somebody has written meanwhile
                same = w
                for no, value, other in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
                    row = make(int(no), value)
                    if fits(row):
                        found.append((row, value, other))
                        if len(found) == limit:
                            return found
                if below == 0:
                    return found
        raise AssertionError("one call reads all")

    def _get(self, task: str, nos: list[int]) -> list[tuple[CallRow, bytes]]:
        """Calls by number."""
        client = self._client
        deadline = client.deadline()
        for tries in range(TRIES + 1):
            page = len(nos) or 1 if tries == TRIES else 4 * PAGE
            found: list[tuple[CallRow, bytes]] = []
            same = b""
            for i in range(0, max(len(nos), 1), page):
                some = nos[i : i + page]
                w, *values = client.script(
                    "get", client.keys.of(task), [same, *(b"c:%d" % no for no in some)], deadline=deadline
                )
                if len(values) != len(some):
                    break
                same = w
                found += [(layout.call(no, value), value) for no, value in zip(some, values, strict=True) if value is not None]
            else:
                return found
        raise AssertionError("one call reads all")


def _or(value: int | None) -> int | str:
    return "" if value is None else value


def closure(
    client: Client, task: str, roots: Iterable[bytes], deadline: float, *, size: int = 0
) -> tuple[dict[bytes, Obj], list[bytes]]:
    """The objects that these refs reach, level by level; and the names of those that are not there.

    Args:
        size: Of all of them together, about.
    """
    key = client.keys.task(task)
    found: dict[bytes, Obj] = {}
    missing: list[bytes] = []
    level = _new(roots, found)
    while level:
        each = min(BATCH, max(1, TRIP * len(level) // max(size, 1)))
        batches = [level[i : i + each] for i in range(0, len(level), each)]
        replies: list[Any] = []
        together = 1 if each < BATCH else max(1, TRIP // max(1, BATCH * size // len(level)))
        for i in range(0, len(batches), together):
            commands = [("HMGET", key, *(b"o:" + name for name in batch)) for batch in batches[i : i + together]]
            replies += client.many(commands, deadline=deadline)
        below: list[bytes] = []
        for batch, values in zip(batches, replies, strict=True):
            for name, value in zip(batch, values, strict=True):
                if value is None:
                    missing.append(name)
                    continue
                thing = found[name] = layout.obj(name, value)
                if thing.refs:
                    below.append(thing.refs)
        gone = set(missing)
        level = [name for name in _new(below, found) if name not in gone]
    return found, missing


def _new(runs: Iterable[bytes], known: Mapping[bytes, Obj]) -> list[bytes]:
    found: dict[bytes, None] = {}
    for run in runs:
        found.update((name, None) for name in names_in(run) if name not in known)
    return list(found)


def branches_of(task: str, space: bytes | None, client: Client) -> list[BranchRow]:
    """Of a space, or of all, by space and name. Damaged if one of them is."""
    which = [b"", b""] if space is None else [space, layout.roll(space)]
    listed, *values = client.script("branches", client.keys.of(task), which)
    names = listed.split(b"\0")
    pairs = [pair for pair in zip(names[:-1:2], names[1::2], strict=False) if space in {None, pair[0]}]
    if len(names) % 2 == 0 or names[-1] or len(values) != 2 * len(pairs):
        raise _damaged(task, "its list of branches")
    rows: list[BranchRow] = []
    for pair, head, line in zip(pairs, values[::2], values[1::2], strict=True):
        rows.append(branch_row(task, *pair, head, line))
    return sorted(rows, key=lambda row: (row.space, row.name))


def branch_row(task: str, space: bytes, name: bytes, head: bytes | None, line: bytes | None) -> BranchRow:
    at, fixed = layout.head_of(head), layout.fixed_of(line)
    if at is None or fixed is None:
        raise _damaged(task, "a branch")
    return BranchRow(layout.decoded(space), layout.decoded(name), at, *fixed)


def task_row(task: str, found: list[Any]) -> TaskRow | None:
    """The row of what ``task.lua`` answers; None if there is no such task."""
    if not found:
        return None
    id, status, branch, agent, given, reason, raised, parent, attempts, created, updated, _n, count, calls, asks, *rest = found
    head, line, top = (*rest, None, None, None)[:3]
    try:
        at: Head | None = layout.head_of(head)
        step = 0 if at is None or top is None else layout.header(at.seq, top).step
        on = (layout.fixed_of(line) or (1, None))[0]
        row = TaskRow(
            task=layout.decoded(id),
            status=layout.decoded(status),
            branch=layout.decoded(branch),
            head=at,
            step=step,
            agent=layout.decoded(agent or b""),
            input=given or b"",
            attempts=int(attempts),
            reason=layout.decoded(reason or b""),
            parent=None if parent is None else layout.decoded(parent),
            raised=raised or b"",
            created_at=int(created),
            updated_at=int(updated),
            in_doubt=_waiting(calls, "d", on, step),
            open_pauses=_waiting(asks, "o", on, step),
            checkpoints=int(count),
        )
    except (AttributeError, TypeError, ValueError):
        raise _damaged(task, "its row") from None
    if row.task != task:
        raise _damaged(task, "its name")
    return row


def _waiting(entries: bytes | None, letter: str, line: int, step: int) -> int:
    return sum(a == letter and on == line and at >= step for a, _, on, at in layout.opened(entries))


def _missing(task: str, seq: int) -> Damaged:
    return Damaged(
        f"checkpoint {seq} of task {task!r} is damaged",
        "its row is missing, or is another one",
        "Load an earlier checkpoint, or restore the store from a backup.",
        task=task,
        seq=seq,
    )


def _damaged(task: str, what: str) -> Damaged:
    return Damaged(
        f"task {task!r} is damaged", f"{what} is not as it was written", "Restore the store from a backup.", task=task
    )

"""The journal of a task in the file store: lines of JSON, and what they add up to.

A line is one atomic commit. It names the line before it and ends in a checksum over itself, so that a line that was changed, left
out or moved is found; and lines end at line feeds alone, of which JSON as it is written here has none inside.
The first line says whose journal it is and how many lines after it hold one row each, as they stood when it was last written anew;
all further lines are commits.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from safepoint.errors import Damaged, NewerFormat
from safepoint.rows import (
    BranchRow,
    CallRow,
    CheckpointRow,
    Commit,
    Committed,
    Head,
    Numbers,
    PauseRow,
    TaskRow,
    WriteRow,
    replace,
)
from safepoint.stores import folding, refusals
from safepoint.stores.file_rows import (
    LAYOUT,
    changed,
    changes,
    checksum,
    header,
    read_row,
    row_as_json,
    task_as_json,
    task_from_json,
)

__all__ = ["Book", "Gap", "bare", "begin", "closed", "rewritten"]

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode
_SUM = 32
TAIL = _SUM + len(b',"sum":""}')


@dataclass(frozen=True, slots=True)
class Gap:
    """A line of a journal that cannot be read."""

    line: int
    """Counted from 1."""
    why: str
    bare: bool = False
    """Something is there, and nothing in it looks like a line that moves a branch."""


def closed(body: dict[str, Any], before: str) -> tuple[bytes, str]:
    """A line with its line feed, and its sum, which the next one names. ``before`` is the sum of the one before it."""
    text = _encode({"n": body["n"], "prev": before[:16], **body})
    sum = checksum(text)
    return b'%s,"sum":"%s"}\n' % (text[:-1], sum.encode()), sum


def bare(line: bytes) -> bytes:
    """A line without what editors put around it: white space, and a byte order mark before the first."""
    return line.removeprefix(b"\xef\xbb\xbf").strip(b" \t\r")


def opened(line: bytes) -> tuple[dict[str, Any], str]:
    """The content of a line and its sum. Raises Damaged."""
    body, sum = line[:-TAIL] + b"}", line[-TAIL:]
    if len(line) <= TAIL or sum != b',"sum":"%s"}' % checksum(body).encode():
        raise Damaged("it is not as it was written", "")
    try:
        return cast(dict[str, Any], _decode(body)), sum[8:-2].decode()
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise Damaged("it is no JSON", str(error)) from error
    except RecursionError:
        raise Damaged("it is no JSON of ours", "it nests too deep") from None


@dataclass(slots=True)
class Book:
    """What a journal adds up to."""

    row: TaskRow
    checkpoints: dict[int, CheckpointRow] = field(default_factory=dict)
    """Without their states."""
    sums: dict[int, str] = field(default_factory=dict)
    """Of the states, as the journal has them."""
    ids: dict[tuple[str, str], int] = field(default_factory=dict)
    branches: dict[tuple[str, str], BranchRow] = field(default_factory=dict)
    calls: dict[int, CallRow] = field(default_factory=dict)
    pauses: dict[int, PauseRow] = field(default_factory=dict)
    writes: dict[tuple[str, str, str, int], WriteRow] = field(default_factory=dict)
    numbers: Numbers = field(default_factory=Numbers)
    moves: int = 0
    """How many lines have set branches back or dropped them: each line tells, so that it is seen whether one is lost."""
    fence: int = 0
    """The highest that the journal knows of; leases lie elsewhere."""
    last: tuple[str, tuple[int, ...], tuple[int, ...]] = ("", (), ())
    """The newest commit: its id, and the numbers of the calls and pauses it wrote."""
    swept: list[tuple[str, str, int]] = field(default_factory=list)
    """Documents that the last removal was to delete: space, branch, seq."""
    gaps: list[Gap] = field(default_factory=list)
    doubts: int = 0
    """How many damaged lines may have moved a branch, as those of checkpoints do."""
    open_gaps: int = 0
    """Of these, those after which no line has come yet. The next one tells by its numbers whether one of them did."""
    certain: dict[tuple[str, str] | None, tuple[int, int]] = field(default_factory=dict)
    """How many lines were damaged before the last one that moved a branch, or (under None) chose the current one, and how many
    of them count as ``doubts``."""
    exists: bool = False
    lines: int = 0
    """The number of the next line."""
    sum: str = ""
    """Of the last line; '' if that is damaged."""
    name: str = ""
    """Of this journal; drawn anew each time it is written anew."""
    rows: int = 0
    """How many lines after the first hold rows."""

    @classmethod
    def of(cls, task: str) -> Book:
        return cls(TaskRow(task=task))

    # -- reading lines

    def read(self, line: bytes) -> None:
        """Take in the next line. Raises Damaged, and then nothing of it was taken."""
        self.understood(line)()

    def understood(self, line: bytes) -> Callable[[], None]:
        """What takes in the next line, and cannot fail. Raises Damaged if the line cannot be read."""
        body, sum = opened(line)
        torn, before, moves = bool(self.gaps) and not self.sum, self.numbers.seq, self.moves
        if type(body) is not dict or (not torn and (body.get("n") != self.lines or body.get("prev") != self.sum[:16])):
            raise Damaged("it is not the next line", "one before it is missing")
        if type(number := body.get("n")) is not int or number < self.lines:
            raise Damaged("it is not the next line", "it has come before")
        try:
            if number == 0:
                take = self._first(body)
            elif "at" in body:
                take = self._commit(body)
            else:
                take = self._row(body)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise Damaged("it is no line of a journal", type(error).__name__) from error

        def taken() -> None:
            take()
            same = (self.numbers.seq, self.moves) == (before + ("checkpoint" in body), moves + ("branches" in body))
            if self.open_gaps and "at" in body and same:
                self.doubts -= self.open_gaps
                self._no_later_than(self.doubts)
            self.open_gaps = 0
            self.lines = number + 1
            self.sum = sum

        return taken

    def skip(self, line: int, why: str, text: bytes = b"") -> None:
        """Go on after a line that cannot be read: what it said is lost, and is known to be.

        Args:
            text: The line as it is now; empty if it is not there.
        """
        moved = b'"checkpoint"' in text or b'"branches"' in text
        self.gaps.append(Gap(line, why, not moved and text != b""))
        self.doubts += 1
        if self.lines > self.rows:  # else it may have been any row
            self.open_gaps += 1
        self.sum = ""

    def _no_later_than(self, doubts: int) -> None:
        """What the line itself has said before it was known that the ones before it hid nothing."""
        self.certain = {key: (gaps, min(at, doubts)) for key, (gaps, at) in self.certain.items()}

    def leap(self, more: bool) -> None:
        """After a damaged last line, give out no number that it may have given.

        Args:
            more: There are documents that no line tells of. Where there are none, a line that does not look like a checkpoint's
                either was none.
        """
        if self.gaps and not self.sum:
            n, far, seq = self.numbers, 1000, max([self.numbers.seq, *self.checkpoints])
            if not more and self.open_gaps and all(gap.bare for gap in self.gaps[-self.open_gaps :]):
                self.doubts -= self.open_gaps
            else:
                seq += len(self.gaps)
            self.open_gaps = 0
            self.numbers = Numbers(seq, n.call + far, n.pause + far, n.line + far, n.position + far)
            self.lines += 1

    def is_certain(self, space: str, branch: str | None) -> bool:
        """Whether no damaged line may have moved a branch (None: or have made another one the current one)."""
        if not self.gaps:
            return True
        nothing = (-1, -1)
        if self.certain.get((space, self.row.branch if branch is None else branch), nothing)[1] < self.doubts:
            return False
        if branch is not None:
            return True
        gaps, doubts = self.certain.get(None, nothing)
        # Where there is one branch, and no line is lost that may have begun another, none was chosen.
        return gaps == len(self.gaps) or (doubts == self.doubts and sum(space == "" for space, _ in self.branches) == 1)

    def _first(self, body: dict[str, Any]) -> Callable[[], None]:
        if body["safepoint"] > LAYOUT:
            raise NewerFormat(
                f"the journal of task {self.row.task!r} has layout {body['safepoint']}",
                f"this safepoint reads up to {LAYOUT}",
                "Upgrade safepoint; the task is left as it is.",
                task=self.row.task,
            )
        if body["task"] != self.row.task:
            raise Damaged("it is of another task", "")
        row, numbers = task_from_json(self.row.task, body["row"]), Numbers(*body["numbers"])
        last = (str(body["last"][0]), tuple(body["last"][1]), tuple(body["last"][2]))
        swept = [(space, branch, seq) for space, branch, seq in body.get("swept", ())]
        name, rows, fence, exists = str(body["journal"]), int(body["rows"]), int(body["fence"]), bool(body["exists"])
        moves = int(body.get("moved", 0))

        def take() -> None:
            self.moves = moves
            self.row, self.numbers, self.last, self.swept = row, numbers, last, swept
            self.name, self.rows, self.fence, self.exists = name, rows, fence, exists
            self.certain[None] = self._now()

        return take

    def _row(self, body: dict[str, Any]) -> Callable[[], None]:
        if "checkpoint" in body:
            row, sum = replace(read_row(CheckpointRow, body["checkpoint"]), pinned=bool(body.get("pinned"))), body["state_sum"]
            return lambda: self._put(row, sum)
        if "branch" in body:
            branch = _branch(body["branch"])

            def put() -> None:
                self.branches[branch.space, branch.name] = branch
                self.certain[branch.space, branch.name] = self._now()

            return put
        if "write" in body:
            write = read_row(WriteRow, body["write"])
            return lambda: self.writes.update({write.key: write})
        if "call" in body:
            call = read_row(CallRow, body["call"])
            return lambda: self.calls.update({call.no: call})
        pause = read_row(PauseRow, body["pause"])
        return lambda: self.pauses.update({pause.no: pause})

    def _put(self, row: CheckpointRow, sum: str) -> None:
        self.checkpoints[row.seq] = row
        self.sums[row.seq] = sum
        self.ids[row.space, row.id] = row.seq

    def _commit(self, body: dict[str, Any]) -> Callable[[], None]:
        calls = [read_row(CallRow, data) for data in body.get("calls", ())]
        pauses = [read_row(PauseRow, data) for data in body.get("pauses", ())]
        writes = [read_row(WriteRow, data) for data in body.get("writes", ())]
        branches = {(b["space"], b["name"]): _branch(b) if "head" in b else None for b in body.get("branches", ())}
        moved = int(body.get("moved", 0))
        row, numbers = changed(self.row, body.get("row", {})), Numbers(*body["numbers"])
        new = read_row(CheckpointRow, body["checkpoint"]) if "checkpoint" in body else None
        state_sum, moves, line = str(body.get("state_sum", "")), bool(body.get("moves")), int(body.get("line", 0))
        pin, fence = body.get("pin"), int(body.get("fence", 0))
        if pin is not None:
            pin = int(pin[0]), bool(pin[1])

        def take() -> None:
            if new is not None:
                self._put(new, state_sum)
                if moves:
                    key, head = (new.space, new.branch), Head(new.seq, new.id)
                    self.certain[key] = self._now()
                    at = self.branches.get(key)
                    if at is None:
                        self.branches[key] = BranchRow(*key, head, line, new.parent_seq)
                    else:
                        self.branches[key] = BranchRow(*key, head, at.line, at.forked_from)
            if pin is not None and pin[0] in self.checkpoints:
                self.checkpoints[pin[0]] = replace(self.checkpoints[pin[0]], pinned=pin[1])
            self.calls.update((call.no, call) for call in calls)
            self.pauses.update((pause.no, pause) for pause in pauses)
            self.writes.update((write.key, write) for write in writes)
            for place, branch in branches.items():
                self.certain[place] = self._now()
                if branch is None:
                    self.branches.pop(place, None)
                else:
                    self.branches[place] = branch
            self.moves = moved
            if row.branch != self.row.branch or not self.exists:
                self.certain[None] = self._now()
            self.row, self.numbers = row, numbers
            self.fence = max(self.fence, fence)
            if "id" in body:
                self.last = (body["id"], tuple(c.no for c in calls), tuple(p.no for p in pauses))
            self.exists = True

        return take

    def _now(self) -> tuple[int, int]:
        return len(self.gaps), self.doubts

    # -- what it says

    def head(self, space: str, branch: str) -> Head | None:
        at = self.branches.get((space, branch))
        return None if at is None else at.head

    def task_row(self) -> TaskRow:
        return folding.task_row(self.row, self.branches, self.checkpoints, self.calls, self.pauses)

    def needed(self, live_fence: int | None) -> set[int]:
        """The checkpoints that no retention may delete."""
        return folding.needed(self.row.branch, self.branches, self.checkpoints, self.calls, self.pauses, live_fence)

    # -- the next line

    def plan(self, commit: Commit, now: int, state_sum: str) -> tuple[dict[str, Any], CheckpointRow | None, Committed]:
        """The line that a commit becomes, its sealed checkpoint, and what it is answered. Raises what the contract says."""
        new, task = commit.checkpoint, commit.task
        at = None
        if new is not None:
            at = self.branches.get((new.space, new.branch))
            if (head := None if at is None else at.head) != commit.expect:
                raise refusals.moved(commit, head)
        if commit.at_head and (head := self.head("", self.row.branch)) != commit.stands_on:
            raise refusals.not_at_head(commit, self.row.branch, head)
        if (on := commit.stands_on) is not None:
            base = self.checkpoints.get(on.seq)
            if base is None or base.id != on.id:
                raise refusals.gone(task, on)
        last = self.numbers
        calls, pauses, no, position, pause_no = folding.numbered(
            commit, self.calls, self.pauses, last.call, last.position, last.pause
        )
        moves = folding.moved(commit, folding.patched(self.row, commit.patch).branch, self.branches, self.checkpoints)
        writes = folding.wrote(commit, self.writes)
        body: dict[str, Any] = {"n": self.lines, "at": now, "id": commit.id}
        seq, line_no, head, sealed = self.numbers.seq, self.numbers.line, None, None
        branch = self.row.branch
        if new is not None:
            seq += 1
            sealed = replace(new, id=commit.id, seq=seq, pinned=False).sealed(task)
            body |= {"checkpoint": header(sealed), "state_sum": state_sum, "moves": commit.moves_head}
            head = commit.expect
            if commit.moves_head:
                head = Head(seq, commit.id)
                if at is None:
                    body["line"] = line = commit.line if commit.line is not None else line_no + 1
                    line_no = max(line_no, line)
                    if new.space == "" and not any(space == "" for space, _ in self.branches):
                        branch = new.branch  # a task's first branch is its current one
        if calls:
            body["calls"] = [row_as_json(row) for row in calls.values()]
        if pauses:
            body["pauses"] = [row_as_json(row) for row in pauses.values()]
        if writes:
            body["writes"] = [row_as_json(row) for row in writes]
        if moves:
            body["branches"] = [
                {"space": space, "name": name} if b is None else branch_as_json(b) for (space, name), b in moves.items()
            ]
        self._tell(body)
        row_of_task = folding.patched(replace(self.row, branch=branch, updated_at=now), commit.patch)
        numbers = Numbers(seq, no, pause_no, line_no, position)
        body |= {"row": changes(self.row, row_of_task), "numbers": msgspec.structs.astuple(numbers)}
        done = Committed(seq if sealed else None, head, False, tuple(calls.values()), tuple(pauses.values()))
        return body, sealed, done

    def mark(self, now: int, row: TaskRow, **more: Any) -> dict[str, Any]:
        """A line that is no commit of the public kind: of a lease or a pin. It leaves ``last`` as it is."""
        numbers = msgspec.structs.astuple(self.numbers)
        body = {"n": self.lines, "at": now, "row": changes(self.row, row), "numbers": numbers, **more}
        self._tell(body)
        return body

    def _tell(self, body: dict[str, Any]) -> None:
        if moves := self.moves + ("branches" in body):
            body["moved"] = moves

    def repeated(self) -> Committed:
        _, calls, pauses = self.last
        return Committed(
            None,
            None,
            True,
            tuple(self.calls[no] for no in calls if no in self.calls),
            tuple(self.pauses[no] for no in pauses if no in self.pauses),
        )


# -- whole journals


def begin(task: str, now: int) -> tuple[bytes, Book]:
    """A journal that says no more than whose it is: the task does not exist yet."""
    book = Book(TaskRow(task=task, created_at=now, updated_at=now))
    data = b"".join(rewritten(book, []))
    return data, loaded(task, data)


def _branch(data: dict[str, Any]) -> BranchRow:
    return BranchRow(data["space"], data["name"], Head(*data["head"]), data["line"], data["forked_from"])


def branch_as_json(b: BranchRow) -> dict[str, Any]:
    return {"space": b.space, "name": b.name, "head": list(b.head), "line": b.line, "forked_from": b.forked_from}


def rewritten(book: Book, swept: Iterable[tuple[str, str, int]]) -> Iterator[bytes]:
    """The lines of a journal that says in rows what this one says in commits."""
    rows: list[dict[str, Any]] = [{"branch": branch_as_json(b)} for b in book.branches.values()]
    rows += [
        {"checkpoint": header(c), "state_sum": book.sums[c.seq], **({"pinned": True} if c.pinned else {})}
        for _, c in sorted(book.checkpoints.items())
    ]
    rows += [{"call": row_as_json(row)} for _, row in sorted(book.calls.items())]
    rows += [{"pause": row_as_json(row)} for _, row in sorted(book.pauses.items())]
    rows += [{"write": row_as_json(row)} for _, row in sorted(book.writes.items())]
    first: dict[str, Any] = {
        "n": 0,
        "safepoint": LAYOUT,
        "task": book.row.task,
        "journal": secrets.token_hex(8),
        "rows": len(rows),
        "row": task_as_json(book.row),
        "numbers": msgspec.structs.astuple(book.numbers),
        "fence": book.fence,
        "exists": book.exists,
        "last": [book.last[0], list(book.last[1]), list(book.last[2])],
    }
    if book.moves:
        first["moved"] = book.moves
    if gone := [list(place) for place in swept]:
        first["swept"] = gone
    sum = ""
    for n, body in enumerate([first, *rows]):
        line, sum = closed(body | {"n": n}, sum)
        yield line


def loaded(task: str, data: bytes) -> Book:
    book = Book.of(task)
    for line in data.split(b"\n")[:-1]:
        book.read(line)
    return book

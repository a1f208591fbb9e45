"""What is damaged in a task, and what that takes with it: an answer made of the parts that a walk gives.

Nothing is kept of bodies, and each object is hashed once: the names of objects, what they refer to, and what is wrong. Where
something is, a second look at the rows says which of them it concerns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from safepoint.codec import states, values
from safepoint.codec.chunks import name_of
from safepoint.codec.nodes import names_in
from safepoint.errors import Damaged, NewerFormat, SafepointError
from safepoint.model import Obj
from safepoint.rows import BranchRow, CallRow, CheckpointRow, Lost, Numbers, Part, PauseRow, TaskRow, WriteRow

__all__ = ["Audit", "BranchReport", "Damage", "Note", "Ranges", "Verification", "spans"]

DamageKind = Literal[
    "checkpoint", "call", "pause", "write", "object", "branch", "task", "input", "stray", "structure", "older", ""
]


class Ranges:
    """Numbers that come by rising order, as runs: a hundred thousand checkpoints in a row are one."""

    __slots__ = ("runs",)

    def __init__(self, numbers: Iterable[int] = ()) -> None:
        self.runs: list[list[int]] = []
        for n in numbers:
            self.add(n)

    def add(self, n: int) -> None:
        if self.runs and self.runs[-1][0] <= n <= self.runs[-1][1] + 1:
            self.runs[-1][1] = max(n, self.runs[-1][1])
        else:
            self.runs.append([n, n])

    def __iter__(self) -> Iterator[int]:
        for first, last in self.runs:
            yield from range(first, last + 1)

    def __len__(self) -> int:
        return sum(last - first + 1 for first, last in self.runs)

    def frozen(self) -> tuple[tuple[int, int], ...]:
        return tuple((first, last) for first, last in self.runs)


def spans(runs: Iterable[tuple[int, int]]) -> str:
    """``1-80, 82``."""
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


@dataclass(frozen=True, slots=True)
class Damage:
    """One thing that is lost or not what was written."""

    task_id: str | None
    """None for what belongs to no task that is known."""
    what: str
    """``checkpoint 43``, ``object 1f…``, ``call 12 (send_email)``."""
    where: str
    """In the store's own terms: a table and its row, a file and its line."""
    why: str
    kind: DamageKind = ""
    checkpoints: tuple[tuple[int, int], ...] = ()
    """Runs of checkpoints that do not load for it, first and last."""
    calls: tuple[tuple[int, int], ...] = ()
    """Runs of calls whose arguments or results it takes with it."""
    writes: tuple[tuple[str, str, str, int], ...] = ()
    """Writes of adapters that it takes with it: space, checkpoint, writer and index of each."""
    key: Any = field(default=None, repr=False, compare=False)
    """Which row: a number, an object's name, space and name of a branch, or a write's key. None where it is a run of them."""

    def __str__(self) -> str:
        at = f"{self.task_id}: " if self.task_id is not None else ""
        takes = []
        if self.checkpoints and self.kind != "checkpoint":
            takes.append(f"checkpoints {spans(self.checkpoints)}")
        if self.calls and self.kind != "call":
            takes.append(f"calls {spans(self.calls)}")
        if self.writes and self.kind != "write":
            takes.append(f"{len(self.writes)} write{'' if len(self.writes) == 1 else 's'}")
        with_it = f"; takes {' and '.join(takes)} with it" if takes else ""
        return f"{at}{self.what}: {self.why}{f' ({self.where})' if self.where else ''}{with_it}"


@dataclass(frozen=True, slots=True)
class Note:
    """Something worth knowing that is no damage."""

    task_id: str | None
    text: str

    def __str__(self) -> str:
        return self.text if self.task_id is None else f"{self.task_id}: {self.text}"


@dataclass(frozen=True, slots=True)
class BranchReport:
    """How a branch stands."""

    task_id: str
    space: str
    name: str
    current: bool
    head: int
    head_loads: bool
    loads: tuple[tuple[int, int], ...]
    """Runs of the checkpoints made on it that load; failure leaves among them."""
    newest_good: int | None
    """Of those made on it, leaves aside; None if none loads."""

    def __str__(self) -> str:
        where = f"{self.task_id}, branch {self.name}" + (f" of space {self.space!r}" if self.space else "")
        if self.head_loads:
            good = f"head {self.head} loads"
        elif self.newest_good is None:
            good = f"head {self.head} does not load, and no other does"
        else:
            good = f"head {self.head} does not load; the newest good one is {self.newest_good}"
        return f"{where}: {good}; loading: {spans(self.loads) or 'none'}"


@dataclass(frozen=True, slots=True)
class Verification:
    """What ``verify`` has read, and what is wrong with it."""

    url: str
    tasks: int
    checkpoints: int
    calls: int
    pauses: int
    objects: int
    bytes: int
    """Read and hashed."""
    seconds: float
    damages: tuple[Damage, ...] = ()
    notes: tuple[Note, ...] = ()
    branches: tuple[BranchReport, ...] = ()
    """Of the task that was asked for, else of those with damage."""
    writes: int = 0
    """What adapters recorded against checkpoints."""

    @property
    def ok(self) -> bool:
        """Nothing is damaged."""
        return not self.damages

    def __str__(self) -> str:
        def of(n: int, word: str) -> str:
            return f"{n} {word}{'' if n == 1 else 's'}"

        kinds = ("task", "checkpoint", "call", "pause", *(("write",) if self.writes else ()), "object")
        read = ", ".join(of(getattr(self, w + "s"), w) for w in kinds)
        lines = [f"{self.url}: {'sound' if self.ok else of(len(self.damages), 'damage')}; read {read}"]
        return "\n".join([*lines, *(f"  {x}" for x in (*self.damages, *self.branches, *self.notes))])


@dataclass(slots=True)
class _Head:
    branch: BranchRow
    found: bool = False
    good: bool = False


@dataclass(slots=True)
class _Takes:
    """What is lost with an object."""

    checkpoints: Ranges = field(default_factory=Ranges)
    calls: Ranges = field(default_factory=Ranges)
    writes: list[tuple[str, str, str, int]] = field(default_factory=list)


class Audit:
    """Of one task. ``take`` every part of a walk; if ``again`` then says so, ``retake`` every part of another up to the first
    object; then ``damages``, ``branches`` and ``notes`` have the answer."""

    def __init__(self, task: str, place: Callable[[str, Any], str] = lambda kind, key: "") -> None:
        """``place`` says where a row or object lies, by kind and key."""
        self.task = task
        self.place = place
        self.row: TaskRow | None = None
        self.numbers: Numbers | None = None
        self.last_seq = 0
        """Of the newest checkpoint that came."""
        self.checkpoints = self.calls = self.pauses = self.writes = self.objects = self.bytes = 0
        self.damages: list[Damage] = []
        self.notes: list[Note] = []
        self.parts = 0
        self.bad_checkpoints: dict[int, Damage | None] = {}
        """By number; None where the row is as it was written and needs a newer program."""
        self.bad_calls: set[int] = set()
        self.bad_objects: dict[bytes, Damage] = {}
        self.bad_pauses: set[int] = set()
        self.bad_writes: set[tuple[str, str, str, int]] = set()
        self.lost_branches: list[tuple[str, str]] = []
        """Space and name of those that checkpoints were made on and that must be there, and are not."""
        self.older: int | None = None
        """So many checkpoints were acknowledged and are not there any more; None if the task is not older than it was."""
        self._heads: dict[int, list[_Head]] = {}
        self._branches: list[_Head] = []
        self._made_on: set[tuple[str, str]] = set()
        self._roots: set[bytes] = set()
        self._refs: dict[bytes, bytes] = {}
        self._sizes: dict[bytes, int] | None = None
        self._garbage = 0
        self._blame: dict[bytes, set[bytes]] = {}
        self._takes: dict[bytes, _Takes] = {}
        self._loads: dict[tuple[str, str], Ranges] = {}
        self._newest: dict[tuple[str, str], int] = {}
        self._looked_again = False
        self.missing: set[bytes] = set()
        """Objects that are referred to and did not come, as if retention had taken them meanwhile."""

    # -- the first time

    def take(self, part: Part) -> None:
        self.parts += 1
        match part:
            case Obj():
                self._object(part)
            case CheckpointRow():
                self._checkpoint(part)
            case CallRow():
                self.calls += 1
                self.bytes += len(part.args) + len(part.result or b"")
                self._journal(part, "call", self.bad_calls)
                self._roots.update(names_in(part.args_refs))
                self._roots.update(names_in(part.result_refs))
            case PauseRow():
                self.pauses += 1
                self._pause(part)
            case WriteRow():
                self.writes += 1
                self._write(part)
            case BranchRow():
                head = _Head(part)
                self._branches.append(head)
                self._heads.setdefault(part.head.seq, []).append(head)
            case TaskRow():
                self.row = part
            case Numbers():
                self.numbers = part
            case Lost():
                self._lost(part)

    def behind(self, error: Damaged, place: str) -> None:
        """The task as a whole is older than what the store acknowledged."""
        known, acknowledged = error.details.get("known"), error.details.get("acknowledged")
        self.older = 0
        if isinstance(known, int) and isinstance(acknowledged, int):
            self.older = max(0, acknowledged - known)
        self.parts += 1
        self.damages.append(Damage(self.task, f"task {self.task!r}", place, error.why or error.what, "older"))

    def _damaged(self, kind: DamageKind, key: Any, what: str, why: str, **more: Any) -> Damage:
        damage = Damage(self.task, what, self.place(kind, key), why, kind, key=key, **more)
        self.damages.append(damage)
        return damage

    def _object(self, obj: Obj) -> None:
        self.objects += 1
        name, refs, data = obj
        self.bytes += len(refs) + len(data)
        self._refs[name] = refs
        if name_of(refs, data) != name:
            self.bad_objects[name] = self._damaged("object", name, _object_name(name), "its bytes have changed")

    def _checkpoint(self, row: CheckpointRow) -> None:
        self.checkpoints += 1
        self.last_seq = max(self.last_seq, row.seq)
        self.bytes += len(row.root) + len(row.refs)
        if row.kind != "failure":
            self._made_on.add((row.space, row.branch))
        for head in self._heads.get(row.seq, ()):
            # One that was set back may stand at another branch's checkpoint.
            head.found = (row.id, row.space) == (head.branch.head.id, head.branch.space)
        try:
            states.check_row(self.task, row)
            self._roots.update(names_in(row.refs))
        except NewerFormat as error:
            # Its form is not known here, so neither is whether it is whole: no word against it.
            self.bad_checkpoints[row.seq] = None
            self.notes.append(Note(self.task, f"checkpoint {row.seq} is left alone: {error.what}"))
        except Damaged as error:
            self._bad_checkpoint(row.seq, error.why)
        except (TypeError, ValueError, AttributeError):
            self._bad_checkpoint(row.seq, "its values are of other types")

    def _bad_checkpoint(self, seq: int, why: str) -> None:
        self.bad_checkpoints[seq] = self._damaged("checkpoint", seq, f"checkpoint {seq}", why, checkpoints=((seq, seq),))

    def _write(self, row: WriteRow) -> None:
        self.bytes += len(row.data)
        if why := self._broken(row):
            self.bad_writes.add(row.key)
            self._damaged("write", row.key, _write_name(row.key), why, writes=(row.key,))
        else:
            self._roots.update(names_in(row.refs))

    def _broken(self, row: CallRow | PauseRow | WriteRow) -> str:
        """What is wrong with a row; '' if it is as it was sealed."""
        try:
            row.check(self.task, "")
        except Damaged as error:
            return error.why
        except (TypeError, ValueError, AttributeError):
            return "its values are of other types"
        return ""

    def _journal(self, row: CallRow | PauseRow, kind: DamageKind, bad: set[int]) -> bool:
        why = self._broken(row)
        if not why:
            return True
        bad.add(row.no)
        takes = {"calls": ((row.no, row.no),)} if kind == "call" else {}
        self._damaged(kind, row.no, f"{kind} {row.no}", why, **takes)
        return False

    def _pause(self, row: PauseRow) -> None:
        self.bytes += len(row.question) + len(row.answer or b"")
        if not self._journal(row, "pause", self.bad_pauses):
            return
        try:
            for body in (row.question, row.answer):
                if body is not None:
                    values.decode_plain(body)
        except SafepointError as error:
            self.bad_pauses.add(row.no)
            self._damaged("pause", row.no, f"pause {row.no}", error.what)

    def _lost(self, lost: Lost) -> None:
        numbers: tuple[tuple[int, int], ...] = ()
        if lost.first is not None:
            numbers = ((lost.first, lost.first if lost.last is None else lost.last),)
        more: dict[str, Any] = {}
        key: Any = None
        if lost.kind in ("checkpoint", "call") and numbers:
            more = {f"{lost.kind}s": numbers}
        if lost.first is not None and lost.first == lost.last:
            key = lost.first
        if lost.name:
            key = lost.name
        if lost.kind == "write" and lost.key is not None:
            key = lost.key
            more = {"writes": (key,)}
            self.bad_writes.add(key)
        kind: Any = lost.kind
        damage = Damage(self.task, lost.what, lost.where, lost.why, kind, key=key, **more)
        self.damages.append(damage)
        if lost.kind == "object" and lost.name:
            self.bad_objects[lost.name] = damage
        elif lost.kind == "checkpoint" and isinstance(key, int):
            self.bad_checkpoints[key] = damage
        elif lost.kind == "call" and isinstance(key, int):
            self.bad_calls.add(key)
        elif lost.kind == "pause" and isinstance(key, int):
            self.bad_pauses.add(key)

    # -- in between

    def again(self, *, branches: bool = False) -> bool:
        """Whether the rows have to be looked at once more. With ``branches`` also where nothing is wrong, to say what loads."""
        missing = self._reach()
        self.missing = set(missing)
        for name in missing:
            self.bad_objects[name] = self._damaged("object", name, _object_name(name), "it is missing")
        self._spread()
        self._looked_again = bool(
            branches or self.damages or self.bad_checkpoints or self._unnamed() or not all(h.found for h in self._branches)
        )
        return self._looked_again

    def _reach(self) -> list[bytes]:
        """Follow all references; name what is missing, and count what nothing reaches."""
        known, reached, missing = self._refs, set(self._roots), []
        todo = list(self._roots)
        while todo:
            name = todo.pop()
            refs = known.get(name)
            if refs is None:
                if name not in self.bad_objects:
                    missing.append(name)
                continue
            for child in names_in(refs):
                if child not in reached:
                    reached.add(child)
                    todo.append(child)
        idle = len(known) - len(known.keys() & reached)
        if idle and not self.damages:
            self.notes.append(Note(self.task, f"{idle} objects that nothing reaches: the next clean-up takes them"))
        self._roots = set()
        return sorted(missing)

    def reach(self, roots: Iterable[bytes]) -> set[bytes]:
        """Names of all objects that these reach."""
        found = set(roots)
        todo = list(found)
        while todo:
            for child in names_in(self._refs.get(todo.pop(), b"")):
                if child not in found:
                    found.add(child)
                    todo.append(child)
        return found

    @property
    def lost_calls(self) -> bool:
        """Whether rows of calls are gone, or say nothing that can be relied on."""
        return any(damage.kind in {"call", "older", ""} for damage in self.damages) or any(
            damage.kind == "task" and self.row is None for damage in self.damages
        )

    def _spread(self) -> None:
        """Which objects cannot be read for the sake of which damaged ones."""
        if not self.bad_objects:
            return
        parents: dict[bytes, list[bytes]] = {}
        for name, refs in self._refs.items():
            for child in names_in(refs):
                parents.setdefault(child, []).append(name)
        for bad in self.bad_objects:
            todo, seen = [bad], {bad}
            while todo:
                name = todo.pop()
                self._blame.setdefault(name, set()).add(bad)
                for parent in parents.get(name, ()):
                    if parent not in seen:
                        seen.add(parent)
                        todo.append(parent)

    # -- the second time

    def retake(self, part: Part) -> bool:
        """False once there is nothing more to learn."""
        match part:
            case CheckpointRow():
                blamed = self._blamed(part.refs)
                for name in blamed:
                    self._takes.setdefault(name, _Takes()).checkpoints.add(part.seq)
                self._row(part, not blamed)
            case CallRow():
                for name in self._blamed(part.args_refs) | self._blamed(part.result_refs):
                    self._takes.setdefault(name, _Takes()).calls.add(part.no)
            case WriteRow():
                for name in self._blamed(part.refs) if part.key not in self.bad_writes else ():
                    self._takes.setdefault(name, _Takes()).writes.append(part.key)
            case Obj():
                return False
        return True

    def _blamed(self, refs: bytes) -> set[bytes]:
        found: set[bytes] = set()
        if self._blame:
            for name in names_in(refs):
                found |= self._blame.get(name, set())
        return found

    def _row(self, row: CheckpointRow, whole: bool) -> None:
        good = whole and row.seq not in self.bad_checkpoints
        for head in self._heads.get(row.seq, ()):
            head.good = head.found and good
        if good:
            branch = row.space, row.branch
            self._loads.setdefault(branch, Ranges()).add(row.seq)
            if row.kind != "failure":
                self._newest[branch] = row.seq

    def finish(self, still: Callable[[Damage], bool] = lambda damage: True) -> None:
        """Say what each damaged object takes with it, and what became of the heads.

        Args:
            still: Asked of what may have come from rows that went while they were walked: whether it is so now.
        """
        damages: list[Damage] = []
        for damage in self.damages:
            if damage.kind == "object" and damage.key is not None:
                found = self._takes.get(damage.key, _Takes())
                checkpoints, calls = found.checkpoints, found.calls
                damage = replace(damage, checkpoints=checkpoints.frozen(), calls=calls.frozen(), writes=tuple(found.writes))
                # Missed by rows that were there at the first look and are not at the second: retention took both.
                went = damage.key in self.missing and not checkpoints.runs and not calls.runs and not found.writes
                if went or not still(damage):
                    self.bad_objects.pop(damage.key, None)
                    continue
            damages.append(damage)
        self.damages = damages
        for head in self._branches:
            seq, b = head.branch.head.seq, head.branch
            if not self._looked_again:
                head.good = head.found
            if head.found or self.bad_checkpoints.get(seq) is not None:
                continue
            damage = Damage(
                self.task,
                f"head {seq} of branch {b.name!r}",
                self.place("branch", (b.space, b.name)),
                "its checkpoint is not there, or is another one",
                "branch",
                key=(b.space, b.name),
            )
            if still(damage):
                self.damages.append(damage)
                head.good = False
        self.lost_branches = self._lost_branches()
        if self.lost_branches:  # they are named: that some are missing need not be said as well
            self.damages = [d for d in self.damages if d.kind != "branch" or d.key is not None or "counts" not in d.why]
        for space, name in self.lost_branches:
            place = self.place("branch", (space, name))
            damage = Damage(
                self.task,
                f"branch {name!r}",
                place,
                "checkpoints were made on it, and it is not there",
                "branch",
                key=(space, name),
            )
            if still(damage):
                self.damages.append(damage)

        dropped = [name for name in self._unnamed() if name not in self.lost_branches]
        if dropped:
            names = ", ".join(repr(name) for _, name in dropped)
            self.notes.append(Note(self.task, f"there are checkpoints of branches that were dropped: {names}"))

    def _lost_branches(self) -> list[tuple[str, str]]:
        """Those of the branches that checkpoints name and that are not there, as far as they cannot have been dropped: the store says
        that some are lost, or it is the current one, without which no task is."""
        unnamed = self._unnamed()
        if any(damage.kind == "branch" and damage.key is None for damage in self.damages):
            return unnamed
        return [place for place in unnamed if self.row is None or place == ("", self.row.branch)]

    def _unnamed(self) -> list[tuple[str, str]]:
        """Branches that checkpoints name and that were not among the branches."""
        return sorted(self._made_on - {(h.branch.space, h.branch.name) for h in self._branches})

    def branches(self) -> list[BranchReport]:
        current = None if self.row is None else self.row.branch
        return [
            BranchReport(
                task_id=self.task,
                space=h.branch.space,
                name=h.branch.name,
                current=h.branch.space == "" and h.branch.name == current,
                head=h.branch.head.seq,
                head_loads=h.good,
                loads=self._loads.get((h.branch.space, h.branch.name), Ranges()).frozen(),
                newest_good=self._newest.get((h.branch.space, h.branch.name)),
            )
            for h in self._branches
        ]

    def good_heads(self) -> list[tuple[str, int]]:
        """Space and number of the heads that nothing is known against and that this version can read."""
        return [
            (h.branch.space, h.branch.head.seq)
            for h in self._branches
            if h.good and h.branch.head.seq not in self.bad_checkpoints
        ]

    def spaces(self) -> list[str]:
        return sorted({"", *(head.branch.space for head in self._branches)})

    def condemn(self, seq: int, why: str) -> None:
        """A head that passed everything and could not be read all the same."""
        self._bad_checkpoint(seq, why)
        for head in self._heads.get(seq, ()):
            head.good = False

    def good_checkpoint(self, row: CheckpointRow) -> bool:
        """Whether a row loads: for repair, which copies what does. Also true of what only a newer program can tell."""
        if row.seq in self.bad_checkpoints:
            return self.bad_checkpoints[row.seq] is None
        return not self._blamed(row.refs)

    def good_call(self, row: CallRow) -> bool:
        return row.no not in self.bad_calls and not self._blamed(row.args_refs) and not self._blamed(row.result_refs)

    def good_write(self, row: WriteRow) -> bool:
        return row.key not in self.bad_writes and not self._blamed(row.refs)


def _write_name(key: tuple[str, str, str, int]) -> str:
    space, checkpoint, writer, idx = key
    where = f" of space {space!r}" if space else ""
    return f"write {idx} of {writer!r} against checkpoint {checkpoint!r}{where}"


def _object_name(name: bytes) -> str:
    return f"object {name.hex()}"

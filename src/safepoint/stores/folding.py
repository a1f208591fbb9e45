"""What a commit makes of a task's rows, and what is told of them: for stores that have the rows of a task at hand."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from safepoint.rows import BranchRow, CallRow, CheckpointRow, Commit, PauseRow, TaskPatch, TaskRow, WriteRow, replace
from safepoint.rules import retention
from safepoint.stores import refusals

__all__ = ["branches_of", "chosen", "listed", "moved", "needed", "numbered", "patched", "task_row", "written", "wrote"]

Branches = Mapping[tuple[str, str], BranchRow]
Checkpoints = Mapping[int, CheckpointRow]


def branches_of(branches: Branches, space: str | None) -> list[BranchRow]:
    """Of a space, or of all, by space and name."""
    return [branches[place] for place in sorted(place for place in branches if space in {None, place[0]})]


def numbered(
    commit: Commit, calls: Mapping[int, CallRow], pauses: Mapping[int, PauseRow], no: int, position: int, pause_no: int
) -> tuple[dict[int, CallRow], dict[int, PauseRow], int, int, int]:
    """The calls and pauses of a commit with their numbers, positions, versions and seals; and the last of each number then.

    Raises:
        NotFound, Conflict: a row that it changes is not there, or has another version.
    """
    new_calls: dict[int, CallRow] = {}
    for write in commit.calls:
        row = write.row
        if row.version == 0:
            no += 1
            row = replace(row, no=no)
        else:
            _compare(commit.task, "call", row, new_calls.get(row.no) or calls.get(row.no))
        position += bool(write.stamp)
        stamp = {write.stamp: position} if write.stamp else {}
        new_calls[row.no] = replace(row, version=row.version + 1, **stamp).sealed(commit.task)
    new_pauses: dict[int, PauseRow] = {}
    for ask in commit.pauses:
        pause = ask.row
        if pause.version == 0:
            pause_no += 1
            pause = replace(pause, no=pause_no)
        else:
            _compare(commit.task, "pause", pause, new_pauses.get(pause.no) or pauses.get(pause.no))
        new_pauses[pause.no] = replace(pause, version=pause.version + 1).sealed(commit.task)
    return new_calls, new_pauses, no, position, pause_no


def moved(
    commit: Commit, current: str, branches: Branches, checkpoints: Checkpoints
) -> dict[tuple[str, str], BranchRow | None]:
    """The branches of a commit as they stand after it; None for those that it drops. ``current`` is the one that is current then.

    Raises:
        Conflict, NotFound, UsageError: as ``Store.commit`` does.
    """
    found: dict[tuple[str, str], BranchRow | None] = {}
    for move in commit.branches:
        at = branches.get((move.space, move.name))
        if at is None or at.head != move.expect:
            raise refusals.moved_away(commit.task, move, None if at is None else at.head)
        if move.to is None:
            found[move.space, move.name] = None
            continue
        base = checkpoints.get(move.to.seq)
        if base is None or (base.id, base.space) != (move.to.id, move.space):
            raise refusals.gone(commit.task, move.to)
        found[move.space, move.name] = replace(at, head=move.to)
    others = any(space == "" and found.get((space, name), True) is not None for space, name in branches)
    if others and ("", current) in found and found["", current] is None:
        raise refusals.has_others(commit.task, current)
    return found


def wrote(commit: Commit, there: Collection[tuple[str, str, str, int]]) -> list[WriteRow]:
    """The writes of a commit that come to stand where those keys are taken, with their seals."""
    return [row.sealed(commit.task) for row in commit.writes if row.idx < 0 or row.key not in there]


def written(
    rows: Iterable[WriteRow], space: str | None, checkpoints: Collection[str] | None, writer: str | None
) -> list[WriteRow]:
    """The rows that ``Store.writes`` asks for."""
    found = [
        row
        for row in rows
        if space in {None, row.space}
        and writer in {None, row.writer}
        and (checkpoints is None or row.checkpoint in checkpoints)
    ]
    return sorted(found, key=lambda row: (row.space, row.checkpoint, row.path, row.writer, row.idx))


def _compare(task: str, kind: str, row: CallRow | PauseRow, there: CallRow | PauseRow | None) -> None:
    if there is None:
        raise refusals.no_row(task, kind, row.no)
    if there.version != row.version:
        raise refusals.changed(task, kind, row.no, there.version, row.version)


def patched(row: TaskRow, patch: TaskPatch | None) -> TaskRow:
    if patch is None:
        return row
    names = ("status", "agent", "input", "reason", "raised", "parent", "branch")
    return replace(row, **{n: v for n in names if (v := getattr(patch, n)) is not None})


def task_row(
    row: TaskRow, branches: Branches, checkpoints: Checkpoints, calls: Mapping[int, CallRow], pauses: Mapping[int, PauseRow]
) -> TaskRow:
    """The task's row with what is counted at the time of reading."""
    at = branches.get(("", row.branch))
    head = None if at is None else checkpoints.get(at.head.seq)
    line, step = 1 if at is None else at.line, 0 if head is None else head.step
    return replace(
        row,
        head=None if at is None else at.head,
        step=step,
        in_doubt=sum(c.status == "in_doubt" and c.line == line and c.step >= step for c in calls.values()),
        open_pauses=sum(p.status == "open" and p.line == line and p.step >= step for p in pauses.values()),
        checkpoints=len(checkpoints),
    )


def needed(
    current: str,
    branches: Branches,
    checkpoints: Checkpoints,
    calls: Mapping[int, CallRow],
    pauses: Mapping[int, PauseRow],
    live: int | None,
) -> set[int]:
    """The checkpoints that no retention may delete. ``live`` is the fence of the live run."""
    kept = {row.seq for row in checkpoints.values() if row.pinned}
    heads = []
    for place, branch in branches.items():
        kept.add(branch.head.seq)
        if branch.forked_from is not None:
            kept.add(branch.forked_from)
        if (row := checkpoints.get(branch.head.seq)) is not None:
            heads.append(retention.At(branch.line, row.step, place == ("", current)))
    return kept | retention.stood_on(heads, calls.values(), pauses.values(), live)


def listed(
    checkpoints: Checkpoints, space: str | None, branch: str | None, before: int | None, limit: int | None
) -> list[CheckpointRow]:
    """What ``Store.headers`` asks for; the rows as they are."""
    rows: list[CheckpointRow] = []
    for seq in sorted(checkpoints, reverse=True):
        if limit is not None and len(rows) >= limit:
            break
        row = checkpoints[seq]
        if space in {None, row.space} and branch in {None, row.branch} and (before is None or seq < before):
            rows.append(row)
    return rows


def chosen(
    calls: Mapping[int, CallRow], line: int | None, from_step: int | None, nos: Collection[int] | None, limit: int | None
) -> list[CallRow]:
    """The rows that ``Store.calls`` asks for."""
    rows = [
        row
        for no, row in sorted(calls.items())
        if (line is None or row.line == line) and (from_step is None or row.step >= from_step) and (nos is None or no in nos)
    ]
    return rows if limit is None else rows[max(0, len(rows) - limit) :]

"""The command that removes what is not needed any more: cleanup. Registers itself with the group of ``app``."""

from __future__ import annotations

import re
from itertools import groupby
from typing import Any

import click

from safepoint.cli.app import as_json, cli, common, opened, yes
from safepoint.cli.screen import Column, Screen
from safepoint.cli.text import age, clean, clock, iso, name, ranges, size
from safepoint.errors import UsageError
from safepoint.model import CleanupLine, CleanupReport, StoreCleanup, now

__all__ = ["cleanup", "size_of"]

SHOWN = 50
"""Lines of a rehearsal from which on neighbours that are alike share one."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT]?)B?", re.ASCII)
_POWERS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def size_of(text: str) -> int:
    """``500``, ``64kB``, ``200MB``, ``2GB``."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise UsageError(
            f"{clean(text)!r} is no number of bytes", "", "Write a number, with kB, MB or GB behind it if you like."
        )
    return int(float(found[1]) * _POWERS[found[2]])


@cli.command()
@click.argument("task", required=False)
@click.option("--keep-latest", type=click.IntRange(1), metavar="N", help="The newest N stay in any case.")
@click.option("--max-age", metavar="AGE", help="Delete beyond them only what is older, as in 90m, 12h, 7d, 2w.")
@click.option("--max-bytes", metavar="SIZE", help="Delete beyond them what is over this in all, as in 200MB.")
@click.option("--keep-failures", type=click.IntRange(0), metavar="N", help="The newest N failures stay; 10 by default.")
@click.option("--drop-milestones", is_flag=True, help="Milestones go like any other.")
@click.option("--max-store-bytes", metavar="SIZE", help="All tasks together: the oldest go beyond it.")
@click.option("--finished-older-than", metavar="AGE", help="All tasks: remove finished ones whole after so long.")
@click.option("--dry-run", is_flag=True, help="Delete nothing; say what would become of each checkpoint, and why.")
@click.option("--full", is_flag=True, help="A line for each checkpoint, however many there are.")
@yes
@common
def cleanup(
    task: str | None,
    keep_latest: int | None,
    max_age: str | None,
    max_bytes: str | None,
    keep_failures: int | None,
    drop_milestones: bool,
    max_store_bytes: str | None,
    finished_older_than: str | None,
    dry_run: bool,
    full: bool,
    yes: bool,
) -> None:
    """Delete old checkpoints of a task, or of all tasks.

    Heads, fork points, milestones, pinned and damaged checkpoints, and what an open call or pause stands on are kept in any case.
    Without TASK every task is cleaned up, after a question.
    """
    if (
        keep_latest is None
        and max_age is None
        and max_bytes is None
        and max_store_bytes is None
        and finished_older_than is None
    ):
        raise UsageError(
            "say what to keep", "the retention that the application uses is not known here", "Give --keep-latest or --max-age."
        )
    if task is not None and (max_store_bytes is not None or finished_older_than is not None):
        raise UsageError(
            "a limit for the whole store was given, and a task",
            "--max-store-bytes and --finished-older-than look at all tasks",
            "Leave out the task.",
        )
    limits: dict[str, Any] = {
        "keep_latest": keep_latest,
        "max_age": age(max_age) if max_age is not None else None,
        "max_bytes": size_of(max_bytes) if max_bytes is not None else None,
        "keep_failures": keep_failures,
        "keep_milestones": False if drop_milestones else None,
        "dry_run": dry_run,
    }
    more: dict[str, Any] = {
        "max_store_bytes": size_of(max_store_bytes) if max_store_bytes is not None else None,
        "finished_older_than": age(finished_older_than) if finished_older_than is not None else None,
    }
    screen = Screen(full=full)
    with opened() as cp:
        if task is not None:
            report = cp.cleanup(task, **limits)
            if as_json():
                screen.json(_facts(report))
            else:
                _show(screen, report, full)
            return
        if not (dry_run or yes):
            click.confirm(f"Clean up all tasks of {cp.store.url}?", abort=True, err=True)
        everything = cp.cleanup_all(**limits, **more)
    if as_json():
        screen.json(_all_facts(everything))
    else:
        _show_all(screen, everything, full)


def _facts(report: CleanupReport) -> dict[str, Any]:
    lines = {
        "checkpoints": [
            {
                "seq": line.seq,
                "created_at": iso(line.created_at),
                "kind": line.kind,
                "bytes": line.bytes,
                "deleted": line.deleted,
                "why": line.why,
                "calls": line.calls,
            }
            for line in report.checkpoints
        ]
    }
    return {
        "task_id": report.task_id,
        "dry_run": report.dry_run,
        "deleted": list(report.deleted),
        "kept": report.kept,
        "calls_deleted": report.calls_deleted,
        "objects_deleted": report.objects_deleted,
        "bytes_freed": report.bytes_freed,
        "unreadable": list(report.unreadable),
        **(lines if report.dry_run else {}),
    }


def _all_facts(found: StoreCleanup) -> dict[str, Any]:
    return {
        "dry_run": found.dry_run,
        "tasks": [_facts(report) for report in found.tasks],
        "removed": list(found.removed),
        "failed": found.failed,
        "deleted": found.deleted,
        "kept": found.kept,
        "calls_deleted": found.calls_deleted,
        "objects_deleted": found.objects_deleted,
        "bytes_freed": found.bytes_freed,
    }


def _show(screen: Screen, r: CleanupReport, full: bool) -> None:
    if r.dry_run:
        _show_lines(screen, r, full)
    would = "would be " if r.dry_run else ""
    rows = [
        (f"checkpoints {would}deleted", str(len(r.deleted)), ranges(r.deleted)),
        ("checkpoints kept", str(r.kept), ""),
        (f"calls {would}deleted", str(r.calls_deleted), ""),
        (f"objects {would}deleted", str(r.objects_deleted), ""),
        (f"bytes {would}freed", str(r.bytes_freed), size(r.bytes_freed)),
    ]
    if r.unreadable:
        rows.append(("damaged, and kept", str(len(r.unreadable)), ranges(r.unreadable)))
    screen.table([Column("of " + name(r.task_id)), Column("count", right=True), Column("which", fold=True)], rows)


def _show_lines(screen: Screen, r: CleanupReport, full: bool) -> None:
    alike = len(r.checkpoints) > SHOWN and not full
    groups = (
        [list(g) for _, g in groupby(r.checkpoints, key=lambda line: (line.deleted, line.why, line.kind))]
        if alike
        else [[line] for line in r.checkpoints]
    )
    if groups:
        columns = [
            Column("seq", right=True), Column("age", right=True), Column("kind"), Column("size", right=True),
            Column("would be"), Column("why", fold=True), Column("calls", right=True),
        ]  # fmt: skip
        screen.table(columns, [_row(group) for group in groups])
        screen.line()


def _row(lines: list[CleanupLine]) -> tuple[str, ...]:
    """One checkpoint, or several in a row that are alike."""
    seqs = str(lines[0].seq) if len(lines) == 1 else f"{lines[-1].seq}-{lines[0].seq}"
    return (
        seqs,
        _age(lines[0]) if len(lines) == 1 or _age(lines[0]) == _age(lines[-1]) else f"{_age(lines[0])} to {_age(lines[-1])}",
        lines[0].kind,
        size(sum(line.bytes for line in lines)),
        "deleted" if lines[0].deleted else "kept",
        lines[0].why,
        str(sum(line.calls for line in lines) or ""),
    )


def _age(line: CleanupLine) -> str:
    seconds = (now() - line.created_at).total_seconds()
    if seconds < 0:
        return clock(line.created_at)  # by a clock that goes ahead of this one
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _show_all(screen: Screen, found: StoreCleanup, full: bool) -> None:
    would = "would be " if found.dry_run else ""
    if found.dry_run and full:
        for report in found.tasks:
            _show(screen, report, full)
            screen.line()
    rows = [
        (name(r.task_id), str(len(r.deleted)), str(r.kept), str(r.calls_deleted), size(r.bytes_freed), ranges(r.unreadable))
        for r in found.tasks
        if r.deleted or r.bytes_freed or r.unreadable
    ]
    rows.append(("in all", str(found.deleted), str(found.kept), str(found.calls_deleted), size(found.bytes_freed), ""))
    screen.table(
        [
            Column("task"), Column(f"{would}deleted", right=True), Column("kept", right=True), Column("calls", right=True),
            Column("freed", right=True), Column("damaged, kept"),
        ],
        rows,
    )  # fmt: skip
    for task in found.removed:
        screen.line(f"{name(task)} {'would be' if found.dry_run else 'is'} removed: it is finished")
    for task, why in found.failed.items():
        screen.line(f"{name(task)} was left alone: {clean(why)}", "yellow")

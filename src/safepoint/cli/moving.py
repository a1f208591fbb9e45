"""Commands that move and compare: copy, export, import, diff. Each registers itself with the group of ``app``."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click

from safepoint.checkpointer import Checkpointer
from safepoint.cli import facts
from safepoint.cli.app import as_json, cli, common, opened, shown
from safepoint.cli.ending import STORE, code_of
from safepoint.cli.opening import open_made, split_at
from safepoint.cli.screen import Screen
from safepoint.cli.text import clean, in_shell, many, name, shell, size
from safepoint.codec import masked
from safepoint.errors import NotFound, SafepointError, UsageError
from safepoint.moving import CopyReport
from safepoint.rules.diffing import compare

if TYPE_CHECKING:
    from safepoint.adapters.langgraph.importing import ThreadsReport

__all__: list[str] = []

_SIGNS = {"added": "green", "removed": "red", "changed": "yellow"}


@cli.command()
@click.argument("task", required=False)
@click.option("--to", "to", metavar="URL", required=True, help="The store that is copied to; made if it is not there.")
@click.option("--skip-damaged", is_flag=True, help="Leave out checkpoints that are damaged, and say which.")
@click.option(
    "--held", type=click.Choice(["copy", "refuse"]), default="copy", show_default=True, help="Tasks that a live run holds."
)
@common
def copy(task: str | None, to: str, skip_damaged: bool, held: Any) -> None:
    """Copy a task into another store, or all tasks of this one.

    Whole tasks, with all branches, checkpoints, calls and pauses. Doing it again changes nothing, or brings the copy up to date.
    """
    try:
        with opened() as cp, open_made(to) as other, shown("tasks") as progress:
            report = cp.copy_to(other, task, skip_damaged=skip_damaged, held=held, progress=progress)
    except SafepointError as error:
        if isinstance(done := error.details.get("report"), CopyReport) and not as_json():
            _tell(done)
        raise
    if as_json():
        Screen().json(_copied(report))
        return
    if not report.tasks:
        Screen().line("no tasks")
    _tell(report)


def _tell(report: CopyReport) -> None:
    screen = Screen()
    for t in report.tasks:
        what = f"{_counted(t)}, {size(t.bytes)}"
        screen.line(f"{name(t.task_id)}: {t.result}" + (f" ({what})" if t.result != "unchanged" else ""))
        for left in t.skipped:
            screen.line(f"  left out: {left}", "yellow")


def _counted(report: object) -> str:
    kinds = ("checkpoints", "calls", "pauses", *(("writes",) if getattr(report, "writes", 0) else ()))
    return ", ".join(many(getattr(report, kind), kind) for kind in kinds)


def _copied(report: CopyReport) -> dict[str, Any]:
    fields = ("task_id", "result", "checkpoints", "calls", "pauses", "writes", "bytes")
    return {
        "changed": report.changed,
        "tasks": [{**{f: getattr(t, f) for f in fields}, "skipped": list(t.skipped)} for t in report.tasks],
    }


@cli.command()
@click.argument("task", metavar="TASK[@SEQ]")
@click.argument("file", metavar="[FILE|-]", default="-")
@common
def export(task: str, file: str) -> None:
    """Write a task, or one checkpoint with its journal, as one portable file.

    Lines of JSON; packed if the name ends in .gz. The file holds all that is stored, secrets too, and only you may read it.
    """
    out: Any = file
    if file == "-":
        if as_json():
            raise UsageError("the export itself goes to standard output", "and --json prints its report there", "Name a FILE.")
        if sys.stdout.isatty():
            raise UsageError("standard output is a terminal", "an export is data", "Name a FILE, or redirect the output.")
        sys.stdout.flush()
        out = sys.stdout.buffer
    with opened() as cp, shown("checkpoints") as progress:
        task, seq = split_at(cp, task)
        report = cp.export(task, out, seq=seq, progress=progress)
    if file == "-":
        out.flush()
    elif as_json():
        fields = ("task_id", "seq", "checkpoints", "calls", "pauses", "writes", "bytes")
        Screen().json({**{f: getattr(report, f) for f in fields}, "file": os.path.abspath(file)})
    else:
        what = _counted(report)
        at = name(task) if seq is None else f"{name(task)}@{seq}"
        Screen().line(f"{at} is in {name(file)} ({what}, {size(report.bytes)})")


@cli.command("import")
@click.argument("file", metavar="[FILE|-]", required=False)
@click.option("--as", "task", metavar="TASK", help="The name that the task gets here.")
@click.option(
    "--from", "source", metavar="URL", help="A database of LangGraph's: langgraph-sqlite:///old.db, langgraph-postgresql://…"
)
@click.option(
    "--thread", "threads", metavar="THREAD", multiple=True, help="With --from: only this thread; may be given several times."
)
@click.option(
    "--trust",
    metavar="MODULE",
    multiple=True,
    help="With --from: a module of yours, whose classes may be stored; it is imported.",
)
@click.option("--dry-run", is_flag=True, help="With --from: read and compare everything, and write nothing.")
@common
def import_(
    file: str | None, task: str | None, source: str | None, threads: tuple[str, ...], trust: tuple[str, ...], dry_run: bool
) -> int:
    """Take in an exported task or checkpoint, or the threads of a LangGraph database.

    The store is made if it is not there. A checkpoint of a task that is there goes on a branch of its own. With --from, the threads
    of SqliteSaver or PostgresSaver become tasks; the old database is only read, and nothing that it names is called. If a thread is
    refused, the others are imported, and the exit code is that of the first refusal.
    """
    url = click.get_current_context().meta.get(STORE) or os.environ.get("SAFEPOINT_URL")
    if source is not None:
        if file is not None or task is not None:
            raise UsageError("import takes a FILE or --from", "and --as is for a FILE", "Leave one of them out.")
        return _from_langgraph(source, url, threads, trust, dry_run)
    if threads or trust or dry_run:
        raise UsageError("--thread, --trust and --dry-run are for --from", "", "Name the old database with --from.")
    if file is None:
        raise UsageError("import needs a FILE, or --from", "", "Name one: `safepoint import task.safepoint`.")
    _from_file(file, url, task)
    return 0


def _from_file(file: str, url: str | None, task: str | None) -> None:
    given: Any = file
    if file == "-":
        given = sys.stdin.buffer
    elif not os.path.exists(file):
        raise NotFound(f"there is no file {name(file)}", "", "Correct the path.")  # before a store is made for it
    with open_made(url) as cp, shown("checkpoints") as progress:
        report = cp.import_(given, task_id=task, progress=progress)
    fields = ("task_id", "what", "result", "branch", "seq", "checkpoints", "calls", "pauses", "writes")
    if as_json():
        Screen().json({f: getattr(report, f) for f in fields})
        return
    at = name(report.task_id) if report.what == "task" else f"{name(report.task_id)}@{report.seq}"
    if report.result == "unchanged":
        Screen().line(f"{at} is there already, and the same")
        return
    what = _counted(report)
    Screen().line(f"{at} is imported on branch {name(report.branch)} ({what})")


def _from_langgraph(source: str, url: str | None, threads: tuple[str, ...], trust: tuple[str, ...], dry_run: bool) -> int:
    from safepoint.adapters.langgraph.importing import import_threads
    from safepoint.adapters.langgraph.sources import open_source

    if trust and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # where a program is started, its modules are found
    with ExitStack() as stack:
        stack.enter_context(open_source(source))  # before a store is made for it
        target = None
        try:
            target = stack.enter_context(opened() if dry_run else open_made(url))
        except NotFound:
            if not dry_run:
                raise
        progress = stack.enter_context(shown("threads"))
        report = import_threads(source, target, threads=threads or None, trust=trust, dry_run=dry_run, progress=progress)
    if as_json():
        fields = ("task_id", "result", "checkpoints", "writes", "branches", "bytes")
        told = [
            {
                **{f: getattr(t, f) for f in fields},
                "hidden": [h._asdict() for h in t.hidden],
                "error": None if t.error is None else facts.error(t.error, in_shell(t.error.remedy, None)),
            }
            for t in report.threads
        ]
        Screen().json({"changed": report.changed, "dry_run": dry_run, "threads": told, "notes": list(report.notes)})
    else:
        _tell_threads(report, dry_run)
    refused = [t.error for t in report.threads if t.error is not None]
    return code_of(refused[0]) if refused else 0


def _tell_threads(report: ThreadsReport, dry_run: bool) -> None:
    screen = Screen()
    if not report.threads:
        screen.line("no threads")
    for t in report.threads:
        if t.error is not None:
            screen.line(f"{name(t.task_id)}: refused", "red")
            for text in filter(None, (t.error.what, t.error.why, in_shell(t.error.remedy, None))):
                screen.line(f"  {clean(text)}")
            continue
        would = "would be " if dry_run and t.result != "unchanged" else ""
        counts = (
            f"{many(t.checkpoints, 'checkpoints')}, {many(t.writes, 'writes')}, {t.branches} branch{'es' * (t.branches != 1)}"
        )
        screen.line(
            f"{name(t.task_id)}: {would}{t.result}" + (f" ({counts}, {size(t.bytes)})" if t.result != "unchanged" else "")
        )
        for h in t.hidden:
            where = f" of {name(h.space)}" if h.space else ""
            now = "; it is the newest of its namespace now" if h.newest else ""
            screen.line(
                f"  the old saver did not load {name(t.task_id)}@{h.seq}{where}, branch {name(h.branch)}: clocks differed{now}",
                "yellow",
            )
    for note in report.notes:
        screen.line(f"note: {clean(note)}", "yellow")


@cli.command()
@click.argument("a", metavar="TASK@A")
@click.argument("b", metavar="[TASK@B|B]", required=False)
@click.option("--patch", is_flag=True, help="Print a JSON Patch (RFC 6902) on the `state` of `show --raw`.")
@common
def diff(a: str, b: str | None, patch: bool) -> None:
    """Say what leads from one checkpoint to another.

    A and B are numbers of checkpoints, or names of branches for their heads; TASK alone is the head of its current branch. Without a
    second one, that of the same task.
    """
    with opened() as cp:
        task, left = _which(cp, a, None)
        other, right = _which(cp, b, task) if b is not None else (task, None)
        cp.status(task)
        found = cp.diff(task, _head(cp, task) if left is None else left, right, task_b=other)
    screen = Screen()
    if patch or as_json():
        # What is printed is read: values of resources are not in it.
        ops = compare(found.a, found.b, masked(found.before), masked(found.after)).patch()
    if patch:
        screen.json(ops)
        return
    if as_json():
        fields = ("op", "path", "label", "before", "after")
        entries = [{f: getattr(e, f) for f in fields} for e in found.entries]
        screen.json({"a": found.a, "b": found.b, "summary": str(found), "entries": entries, "patch": ops})
        return
    screen.line(f"{found.a} -> {found.b}: {found}")
    for entry in found.entries:
        screen.line(f"  {entry}", _SIGNS[entry.op])


def _which(cp: Checkpointer, text: str, task: str | None) -> tuple[str, int | str | None]:
    """A checkpoint as it is written: of which task, and its number, its branch, or None for the head."""
    if task is not None:
        if text.isascii() and text.isdecimal() and len(text) <= 20:
            return task, int(text)
        if any(branch.name == text for branch in cp.store.branches(task)):
            return task, text
    found, seq = split_at(cp, text)
    if seq is not None or cp.store.task(text) is not None:
        return found, seq
    other, at, branch_name = text.rpartition("@")
    if at and other and branch_name and cp.store.task(other) is not None:
        return other, branch_name
    return text, None


def _head(cp: Checkpointer, task: str) -> int:
    seq = cp.status(task).seq
    if seq is None:
        raise NotFound(f"task {name(task)} has no checkpoint yet", "", f"See `safepoint log {shell(task)}`.", task=task)
    return seq

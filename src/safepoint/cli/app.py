"""The commands. Each gathers facts, and prints them as JSON or hands them to ``views``."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import click

from safepoint import recovering
from safepoint._version import __version__
from safepoint.cli import facts, views
from safepoint.cli.ending import STORE, code_of
from safepoint.cli.opening import PlainCheckpointer, good_named, open_plain, split_at
from safepoint.cli.screen import Screen
from safepoint.cli.text import clean, many, name, shell, size
from safepoint.codec import masked, to_json
from safepoint.errors import Damaged, NotFound, UsageError
from safepoint.model import CALL_STATUSES, STATUSES, Done, NotDone
from safepoint.moving import OnProgress, Progress
from safepoint.rules import examining

__all__ = ["as_json", "cli", "common", "limit", "opened", "shown", "yes"]

F = TypeVar("F", bound=Callable[..., Any])
_JSON = "safepoint.json"


def _keep(context: click.Context, option: click.Parameter, value: Any) -> Any:
    # meta is shared by a command and the group: an option may stand before the command's name or after it.
    if value:
        context.meta[f"safepoint.{option.name}"] = value
    return value


def common(f: F) -> F:
    f = click.option("--json", is_flag=True, expose_value=False, callback=_keep, help="Print one JSON document.")(f)
    return click.option(
        "--store", metavar="URL", expose_value=False, callback=_keep, help="The store; else $SAFEPOINT_URL names it."
    )(f)


def as_json() -> bool:
    return bool(click.get_current_context().meta.get(_JSON))


@contextmanager
def opened() -> Iterator[PlainCheckpointer]:
    meta = click.get_current_context().meta
    with open_plain(meta.get(STORE) or os.environ.get("SAFEPOINT_URL")) as cp:
        yield cp


yes = click.option("--yes", "-y", is_flag=True, help="Do not ask.")
limit = click.option("--limit", "-n", type=click.IntRange(0), default=50, show_default=True, help="At most so many; 0 for all.")


@click.group(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="An id that begins with a dash goes after --, as in: safepoint log -- -x. Exit codes are listed in docs/cli.md.",
)
@common
@click.version_option(__version__, prog_name="safepoint")
def cli() -> None:
    """Look at the tasks of AI agents, settle their calls, answer their questions.

    The store is named by --store or by SAFEPOINT_URL, as in sqlite:///agent.db.
    """


@cli.command()
@click.option("--status", type=click.Choice([*STATUSES, "unfinished"]), help="Only tasks of this status.")
@click.option("--leases", is_flag=True, help="List who holds which task instead.")
@common
def ls(status: str | None, leases: bool) -> None:
    """List tasks: how each stands, and who holds it.

    "unfinished" are those that a restarted process should take up. With --leases a line for each holder: since when, until when
    unless it renews, and whether it lives. One that is "dead" or "expired" holds nothing any more: a resume takes the task.
    """
    if leases:
        if status is not None:
            raise UsageError("--leases lists holders, not tasks", "--status chooses tasks", "Leave out one of them.")
        with opened() as cp:
            holders = [facts.lease(lease) for lease in cp.leases()]
        if as_json():
            Screen().json({"leases": holders})
        else:
            views.leases(Screen(), holders)
        return
    with opened() as cp:
        tasks = [facts.task(info) for info in cp.tasks(status=status)]
    if as_json():
        Screen().json({"tasks": tasks})
    else:
        views.tasks(Screen(), tasks)


@cli.command()
@click.argument("task")
@limit
@click.option("--before", type=click.IntRange(1), metavar="SEQ", help="Only older ones than this, to page.")
@click.option("--branch", metavar="NAME", help="Only those made on this branch.")
@common
def log(task: str, limit: int, before: int | None, branch: str | None) -> None:
    """List a task's checkpoints, newest first."""
    with opened() as cp:
        info = cp.status(task)
        branches = {b.name: b for b in cp.store.branches(task)}
        if branch is not None and branch not in branches:
            raise NotFound(
                f"task {name(task)} has no branch {name(branch)}",
                f"it has {', '.join(map(name, branches)) or 'none'}",
                "Name one of them.",
            )
        rows = cp.store.headers(task, branch=branch, before=before, limit=limit + 1 if limit else None)
        shown = [facts.checkpoint(task, row) for row in (rows[:limit] if limit else rows)]
        older = len(rows) > len(shown)
    if as_json():
        Screen().json({"task_id": task, "branch": info.branch, "head": info.seq, "checkpoints": shown, "older": older})
    else:
        views.log(Screen(), task, shown, older)


@cli.command()
@click.argument("task", metavar="TASK[@SEQ]")
@click.option("--messages", "-m", type=click.IntRange(0), metavar="N", help="Only the last N messages.")
@click.option("--full", is_flag=True, help="Do not cut long texts on a terminal.")
@click.option("--raw", is_flag=True, help="As it is stored, as JSON; of a damaged one, what can be read.")
@common
def show(task: str, messages: int | None, full: bool, raw: bool) -> None:
    """Show a checkpoint: header, messages, agent_state, metadata.

    Without @SEQ the head of the current branch. Values of the application's own classes are shown as plain data; none of
    its code is imported.
    """
    with opened() as cp:
        task, seq = split_at(cp, task)
        if seq is None:
            cp.status(task)
        if raw:
            Screen().json(masked(cp.raw(task, seq=seq)))
            return
        with good_named(cp, task, seq):
            found = cp.store.read(task, seq=seq)
        if found is None:
            cp.status(task)
            what = f"no checkpoint {seq}" if seq is not None else "no checkpoint yet"
            raise NotFound(f"task {name(task)} has {what}", "", f"See `safepoint log {shell(task)}`.", task=task)
        row, objects = found
        with good_named(cp, task, seq):
            tree = masked(cp.tree(task, row, objects))
    history = to_json(tree["messages"])
    first = max(len(history) - messages, 0) if messages is not None else 0
    form, mends, faults = examining.history_of(tree)
    data = {
        "checkpoint": facts.checkpoint(task, row),
        "messages": history[first:],
        "first_message": first,
        "message_count": len(history),
        "history": {"format": form, "mends": list(mends), "faults": list(faults)},
        "agent_state": to_json(tree["agent_state"]),
        "metadata": to_json(tree["metadata"]),
        "finished": tree["finished"],
        "products": facts.products(tree),
        "turns": [dict(zip(("turn", "input", "status", "result", "step"), to_json(t), strict=False)) for t in tree["turns"]],
        "recovery": to_json(tree.get("recovery")),
    }
    if as_json():
        Screen().json(data)
    else:
        screen = Screen(full=full)
        views.state(screen, data)
        for text in faults:
            screen.line(f"the provider would refuse {text}", "bold red")
        for text in mends:
            screen.line(f"mended when it is resumed: {text}", "yellow")


@cli.command()
@click.argument("task")
@click.argument("no", type=click.IntRange(1), required=False)
@click.option("--status", type=click.Choice(CALL_STATUSES), help="Only calls of this status.")
@limit
@click.option("--full", is_flag=True, help="With arguments and results, uncut.")
@common
def calls(task: str, no: int | None, status: str | None, limit: int, full: bool) -> int:
    """List a task's journaled calls, or show one in full.

    Oldest first, the newest --limit of them. With NO, the call of that number with its arguments and result.
    """
    unread: Damaged | None = None
    with opened() as cp:
        cp.status(task)
        bodies = full or no is not None
        if no is not None:
            # Number and status: whoever gives both wants to know whether that call has it.
            rows, objects = cp.store.calls(task, nos=[no])
            rows = [r for r in rows if status is None or r.status == status]
            if not rows:
                which = f"no call {no}" + (f" that is {status}" if status else "")
                raise NotFound(f"task {name(task)} has {which}", "", f"See `safepoint calls {shell(task)}`.", task=task)
            older = False
        else:
            try:
                rows, objects = cp.store.calls(task, bodies=False, limit=limit + 1 if limit and status is None else None)
            except Damaged as error:
                row = cp.store.task(task)
                if row is None or error.details.get("rolled_back"):
                    raise
                # Those that can be read, and then that others cannot.
                unread, rows = error, recovering.survey(cp, row).calls
            rows = [r for r in rows if status is None or r.status == status]
            older = bool(limit) and len(rows) > limit
            rows = rows[-limit:] if limit else rows
            if bodies:
                rows, objects = cp.store.calls(task, nos=[r.no for r in rows])
        found = [facts.call(task, row, objects if bodies else None) for row in rows]
    screen = Screen(full=full)
    if as_json():
        screen.json({"task_id": task, "calls": found, "older": older})
    elif bodies:
        for call in found:
            views.call(screen, task, call)
    else:
        views.calls(screen, task, found, older)
    damaged = facts.damaged(found)
    if not damaged and unread is None:
        return 0
    problem = unread or Damaged(
        f"of task {name(task)}, call {', '.join(map(str, damaged))} is damaged",
        "what is stored does not match its seal",
        "The others are as they were written. Restore the store from a backup.",
    )
    if as_json():
        return code_of(problem)  # what was found is printed, and says so itself
    raise problem


@cli.command()
@click.argument("task")
@common
def plan(task: str) -> None:
    """Say what a resume would do, before anything runs.

    Which checkpoint it begins from, and what becomes of each recorded call of the steps that are run again.
    """
    with opened() as cp:
        data = facts.plan(cp.plan(task))
    if as_json():
        Screen().json(data)
    else:
        views.plan(Screen(), data)


@cli.command()
@click.argument("task")
@click.argument("no", type=click.IntRange(1))
@click.option("--done", metavar="JSON", help="It happened, and this was its result (null if it has none).")
@click.option("--not-done", is_flag=True, help="It did not happen.")
@yes
@common
def resolve(task: str, no: int, done: str | None, not_done: bool, yes: bool) -> None:
    """Settle a call that is in doubt: it happened, or it did not.

    Look at the receiver first: this word decides whether the call is executed once more. A call that succeeded and whose
    result is missing, as it could not be stored, takes --done as well.
    """
    if (done is None) == (not not_done):
        raise UsageError("say what happened", "resolve takes exactly one of --done JSON and --not-done", "Give one of them.")
    verdict = Done(_json(done, "--done")) if done is not None else NotDone()
    screen = Screen()
    with opened() as cp:
        cp.status(task)
        rows, objects = cp.store.calls(task, nos=[no])
        before = facts.call(task, rows[0], objects) if rows else {}
        missing = before.get("result_missing", False)
        if (before.get("status") == "in_doubt" or (missing and not not_done)) and not yes:
            views.doubt(task, before)
            click.confirm(
                "Record that it did NOT happen? It may then be executed again."
                if not_done
                else "Record this as its result?"
                if missing
                else "Record that it happened, with this result?",
                abort=True,
                err=True,
            )
        cp.resolve(task, no, verdict)  # refuses a call that is not there or not in doubt
        rows, objects = cp.store.calls(task, nos=[no])
        settled = facts.call(task, rows[0], objects)
        after = facts.plan(cp.plan(task))
    follows = views.follows(after, no)
    if as_json():
        screen.json({"task_id": task, "call": settled, "next": follows, "plan": after})
    else:
        how = "it has its result" if missing else "it did not happen" if not_done else "it happened"
        screen.line(f"call {no} of {name(task)} is settled: {how}")
        for text in follows:
            screen.line(text)


@cli.command()
@click.argument("task")
@click.option("--all", "everything", is_flag=True, help="Also those that have been answered.")
@common
def pauses(task: str, everything: bool) -> None:
    """List the questions that wait for a person."""
    with opened() as cp:
        cp.status(task)
        found = [facts.pause(p) for p in cp.pauses(task, status=None if everything else "open")]
    if as_json():
        Screen().json({"task_id": task, "pauses": found})
    else:
        views.pauses(Screen(), task, found)


@cli.command()
@click.argument("task")
@click.argument("pause", metavar="NO|NAME")
@click.argument("answer", metavar="JSON")
@common
def answer(task: str, pause: str, answer: str) -> None:
    """Answer a question. The first answer stands.

    The answer is JSON: true, 42, '"text"', '{"approved": true}'.
    """
    value = _json(answer, "the answer")
    with opened() as cp:
        cp.status(task)
        which: int | str = pause
        if pause.isascii() and pause.isdecimal() and len(pause) < 10:
            # A pause may be named with digits too; numbers go first, as they are what the list shows.
            numbers = {p.no for p in cp.store.pauses(task)}
            which = int(pause) if int(pause) in numbers else pause
        answered = facts.pause(cp.answer(task, which, value))
        after = facts.plan(cp.plan(task))
    follows = views.follows(after)
    if as_json():
        Screen().json({"task_id": task, "pause": answered, "next": follows, "plan": after})
        return
    screen = Screen()
    screen.line(f"pause {answered['no']} ({name(answered['name'])}) of {name(task)} is answered")
    for text in follows:
        screen.line(text)


@cli.command()
@common
def check() -> int:
    """Test the store's fitness.

    Makes a real write and reads it back, and looks at the place that the store lies in. Exit code 1 if there is an error;
    warnings leave it at 0.
    """
    with opened() as cp:
        found = [facts.finding(f) for f in cp.check()]
    ok = all(f["level"] != "error" for f in found)
    if as_json():
        Screen().json({"ok": ok, "findings": found})
    else:
        views.findings(Screen(), found)
    return 0 if ok else 1


@cli.command()
@click.argument("checkpoint", metavar="TASK@SEQ")
@common
def pin(checkpoint: str) -> None:
    """Keep a checkpoint whatever retention says."""
    _pin(checkpoint, True)


@cli.command()
@click.argument("checkpoint", metavar="TASK@SEQ")
@common
def unpin(checkpoint: str) -> None:
    """Let retention have a checkpoint again."""
    _pin(checkpoint, False)


def _pin(checkpoint: str, pinned: bool) -> None:
    with opened() as cp:
        task, seq = split_at(cp, checkpoint)
        cp.status(task)
        if seq is None:
            raise UsageError(f"{name(checkpoint)} names a task and no checkpoint", "", "Write TASK@SEQ.")
        (cp.pin if pinned else cp.unpin)(task, seq)
    if as_json():
        Screen().json({"task_id": task, "seq": seq, "pinned": pinned})
    else:
        Screen().line(f"{name(task)}@{seq} is {'pinned' if pinned else 'no longer pinned'}")


@cli.command()
@click.argument("task")
@yes
@common
def rm(task: str, yes: bool) -> None:
    """Delete a task with all its checkpoints, calls and pauses."""
    with opened() as cp:
        info = cp.status(task)
        if not yes:
            click.confirm(
                f"Delete {name(task)} ({info.status}, {many(info.checkpoints, 'checkpoints')}, {info.pending} pending) for good?",
                abort=True,
                err=True,
            )
        cp.delete_task(task)
    if as_json():
        Screen().json({"task_id": task, "deleted": True})
    else:
        Screen().line(f"{name(task)} is deleted")


def _json(text: str, what: str) -> Any:
    def refuse(constant: str) -> Any:
        raise ValueError(constant)

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        # The text may be an answer that is nobody else's business: it is not shown.
        raise UsageError(
            f"{what} is not JSON", "", """Text needs its own quotes: '"sent"'; nothing is written as null."""
        ) from None


@contextmanager
def shown(things: str) -> Iterator[OnProgress | None]:
    """For ``progress=``: a line that tells how far it is, on a terminal; None anywhere else."""
    if as_json() or not sys.stderr.isatty():
        yield None
        return
    last = 0.0

    def show(p: Progress) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= 0.1:
            last = now
            done = f"{p.done}/{p.total}" if p.total else f"{p.done}"
            sys.stderr.write(f"\r\x1b[K{done} {things}, {size(p.bytes)}  {clean(p.task_id)[:40]}")
            sys.stderr.flush()

    try:
        yield show
    finally:
        if last:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

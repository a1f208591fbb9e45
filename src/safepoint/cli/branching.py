"""Commands that go back and apart: rewind, fork, branches. Each registers itself with the group of ``app``."""

from __future__ import annotations

from typing import Any

import click

from safepoint.cli import facts
from safepoint.cli.app import as_json, cli, common, opened, yes
from safepoint.cli.opening import PlainCheckpointer, split_at
from safepoint.cli.screen import Column, Screen, Styled
from safepoint.cli.text import clean, clock, iso, name, shell
from safepoint.errors import Damaged, UsageError
from safepoint.rules.planning import Branch
from safepoint.rules.recovery import JOURNALS

journal = click.option(
    "--journal",
    type=click.Choice(JOURNALS),
    default="inherit",
    show_default=True,
    help="Recorded calls: serve them, show every write to a person first, or do all anew.",
)


@cli.command()
@click.argument("checkpoint", metavar="TASK[@SEQ]")
@click.option("--branch", metavar="NAME", help="Instead of @SEQ: go on on this branch, as it stands.")
@journal
@yes
@common
def rewind(checkpoint: str, branch: str | None, journal: Any, yes: bool) -> None:
    """Make a task go on from an earlier checkpoint, on a new branch.

    Nothing is deleted: what is left stays as a branch of its own, and can be gone back to. Refused while a live run holds the
    task.
    """
    with opened() as cp:
        task, seq = _at(cp, checkpoint, needed=branch is None)
        if branch is not None and seq is not None:
            raise UsageError("a checkpoint and a branch were named", "", "Write TASK@SEQ, or TASK --branch NAME.")
        if not yes:
            _ask(cp, task, seq, branch, journal)
        header = cp.rewind(task, seq, branch=branch, journal=journal)
        data = facts.header(header)
        after = facts.plan(cp.plan(task))
    if as_json():
        Screen().json({"task_id": task, "checkpoint": data, "plan": after})
        return
    screen = Screen()
    screen.line(f"{name(task)} stands at {name(task)}@{data['seq']} on branch {name(data['branch'])}, step {data['step']}")
    if after["guard"]:
        screen.line(f"below step {after['guard']} a write that is not on record waits for a person")


def _ask(cp: PlainCheckpointer, task: str, seq: int | None, branch: str | None, journal: str) -> None:
    where = f"{name(task)}@{seq}" if branch is None else f"branch {name(branch)}"
    try:
        info = cp.status(task)
    except Damaged as error:
        if not error.details.get("rolled_back") or branch is not None:
            raise
        click.confirm(f"{error}\nTake it as it stands, and go on from {where}?", abort=True, err=True)
        return
    text = f"{name(task)} is {info.status} at {info.seq}, step {info.step}, on branch {name(info.branch)}."
    if journal == "fresh" and branch is None:
        text += " Calls of the steps that are done again are made again, writes too."
    click.confirm(f"{text} Go on from {where}?", abort=True, err=True)


@cli.command()
@click.argument("checkpoint", metavar="TASK[@SEQ]")
@click.argument("branch", metavar="[NAME]", required=False)
@journal
@common
def fork(checkpoint: str, branch: str | None, journal: Any) -> None:
    """Begin a branch beside the current one.

    At a checkpoint, or else at the head. Nothing is copied, the current branch stays the current one, and a live run goes on.
    """
    with opened() as cp:
        task, seq = _at(cp, checkpoint)
        data = facts.header(cp.fork(task, seq, name=branch, journal=journal))
    if as_json():
        Screen().json({"task_id": task, "checkpoint": data})
    else:
        Screen().line(f"branch {name(data['branch'])} of {name(task)} begins at {name(task)}@{data['seq']}, {data['label']}")


@cli.command()
@click.argument("task")
@common
def branches(task: str) -> None:
    """List a task's branches. The current one has a star."""
    with opened() as cp:
        found = [_branch(b) for b in cp.branches(task)]
    screen = Screen()
    if as_json():
        screen.json({"task_id": task, "branches": found})
        return
    screen.table(
        [
            Column(""),
            Column("branch", fold=True),
            Column("head", right=True),
            Column("step", right=True),
            Column("kept", right=True),
            Column("from", right=True),
            Column("journal", right=True),
            Column("updated"),
        ],
        [
            (
                Styled("*", "green") if b["current"] else "",
                name(b["branch"]),
                str(b["head"]),
                "" if b["step"] is None else str(b["step"]),
                str(b["kept"]),
                "" if b["forked_from"] is None else str(b["forked_from"]),
                str(b["line"]),
                b["shown"],
            )
            for b in found
        ],
    )


def _branch(b: Branch) -> dict[str, Any]:
    found: dict[str, Any] = {
        "branch": b.name,
        "head": b.seq,
        "current": b.current,
        "forked_from": b.forked_from,
        "line": b.line,
        "step": b.step,
        "kept": b.kept,
        "created_at": iso(b.created_at),
        "updated_at": iso(b.updated_at),
    }
    if not as_json():
        found["shown"] = clock(b.updated_at) if b.updated_at is not None else ""
    return found


def _at(cp: PlainCheckpointer, text: str, *, needed: bool = False) -> tuple[str, int | None]:
    task, seq = split_at(cp, text)
    try:
        cp.status(task)
    except Damaged as error:  # who names a checkpoint of an older store takes it as it stands
        if not (needed and seq is not None and error.details.get("rolled_back")):
            raise
    if needed and seq is None:
        raise UsageError(
            f"{clean(text)} names a task and no checkpoint",
            "",
            f"Write TASK@SEQ; `safepoint plan {shell(task)}` and `safepoint log {shell(task)}` list them.",
        )
    return task, seq

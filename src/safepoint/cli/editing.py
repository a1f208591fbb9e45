"""Commands for states that people change: accept, edit. Each registers itself with the group of ``app``."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from typing import Any

import click
from click.termui import edit as in_editor

from safepoint.cli import facts
from safepoint.cli.app import as_json, cli, common, opened
from safepoint.cli.ending import STORE
from safepoint.cli.opening import split_at
from safepoint.cli.screen import Screen
from safepoint.cli.text import command, name, shell
from safepoint.errors import SafepointError, UsageError


@cli.command()
@click.argument("checkpoint", metavar="TASK[@SEQ]")
@common
def accept(checkpoint: str) -> None:
    """Make a document that was edited by hand a new checkpoint; or take a task as it stands.

    TASK@SEQ is for file stores: the new checkpoint goes on top of the current branch, and the edited file stays as it is. TASK alone
    is for one that is older than what was acknowledged, as after a restored backup: it goes on from the head that it has, and a
    write that may have been made since waits for a person. Refused while a live run holds the task.
    """
    with opened() as cp:
        task, seq = split_at(cp, checkpoint)
        header = cp.accept(task, seq)
    if seq is None and not as_json():
        stands = "it is gone" if header is None else f"it stands at {name(task)}@{header.seq} on branch {name(header.branch)}"
        Screen().line(f"{name(task)} was taken as it is: {stands}")
        return
    _said(task, None if header is None else facts.header(header))


@cli.command()
@click.argument("checkpoint", metavar="TASK[@SEQ]")
@click.option(
    "--from",
    "source",
    metavar="FILE",
    help="Begin with the text that an earlier edit has left; - takes it from stdin as it is.",
)
@common
def edit(checkpoint: str, source: str | None) -> None:
    """Open a state in $EDITOR, and save it as a new checkpoint.

    Shown are messages, agent_state, metadata and step, as JSON in which every type is kept. The result goes on top of the
    current branch. Refused while a live run holds the task; what cannot be saved stays in a file, which is named.
    """
    with opened() as cp:
        task, seq = split_at(cp, checkpoint)
        pen = _Pen(source)
        try:
            header = cp.edit(task, pen, seq=seq)
        except (SafepointError, click.ClickException):
            if pen.kept:
                to = command(click.get_current_context().meta.get(STORE))
                click.echo(f"the edited text is kept: {to} edit --from {shell(pen.path)} {shell(checkpoint)}", err=True)
            raise
        pen.drop()
    _said(task, None if header is None else facts.header(header))


def _said(task: str, data: dict[str, Any] | None) -> None:
    if as_json():
        Screen().json({"task_id": task, "changed": data is not None, "checkpoint": data})
    elif data is None:
        Screen().line("nothing was changed")
    else:
        Screen().line(f"{name(task)}@{data['seq']} is what was edited; {name(task)} goes on from there")


class _Pen:
    """Gives JSON data to a person, and takes back what became of it."""

    def __init__(self, source: str | None) -> None:
        self.source = source
        self.path = ""
        self.kept = False

    def __call__(self, shown: dict[str, Any]) -> Any:
        if self.source == "-":
            return _parsed(sys.stdin.read())
        text = json.dumps(shown, indent=2, ensure_ascii=False) + "\n"
        if self.source is not None:
            with open(self.source, encoding="utf-8") as f:
                text = f.read()
        fd, self.path = tempfile.mkstemp(prefix="safepoint-", suffix=".json")  # mode 0600
        with os.fdopen(fd, "w", encoding="utf-8") as f:
            f.write(text)
        in_editor(filename=self.path)
        with open(self.path, encoding="utf-8") as f:
            edited = f.read()
        self.kept = edited != text or self.source is not None
        return _parsed(edited)

    def drop(self) -> None:
        if self.path:
            os.unlink(self.path)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refused, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        raise UsageError(
            f"line {error.lineno}, column {error.colno}: it is no JSON", re.sub(r":.*", "", error.msg).lower(), "Correct it."
        ) from None
    except RecursionError:
        raise UsageError("it is no JSON of a state", "it nests too deep", "Correct it.") from None


def _refused(constant: str) -> Any:
    raise UsageError(
        f"{constant} is no JSON", "", f'Write it as {{"$float": "{constant.lower().replace("infinity", "inf")}"}}.'
    )


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))
        raise UsageError("a key comes twice in one object", json.dumps(twice)[:60], "Leave one.")
    return found

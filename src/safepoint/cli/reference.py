"""The part of docs/cli.md that is made from the commands themselves: ``python -m safepoint.cli.reference docs/cli.md``."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from safepoint.cli.ending import EXIT_CODES
from safepoint.cli.everything import cli

__all__ = ["BEGIN", "reference", "renewed"]

BEGIN = "<!-- From here on made by `python -m safepoint.cli.reference docs/cli.md`; a test fails when it is stale. -->"
WIDTH = 96


def reference() -> str:
    """Exit codes and the help of every command, as Markdown."""
    parts = ["## Exit codes", "", "| code | meaning |", "|---|---|"]
    parts += [f"| {code} | {meaning} |" for code, meaning in EXIT_CODES]
    parts += ["", "## Commands", "", *_help(cli, None)]
    root = _context(cli, None)
    for name in cli.list_commands(root):
        command = cli.get_command(root, name)
        assert command is not None
        parts += ["", f"### {name}", "", *_help(command, root)]
    return "\n".join(parts) + "\n"


def renewed(page: str) -> str:
    """The page with the part below the mark made anew."""
    head, mark, _ = page.partition(BEGIN)
    if not mark:
        raise ValueError(f"the page has no line {BEGIN!r}")
    return f"{head}{mark}\n\n{reference()}"


def _context(command: click.Command, parent: click.Context | None) -> click.Context:
    # One width, whatever terminal this runs on.
    return click.Context(
        command, parent, info_name=command.name if parent else "safepoint", terminal_width=WIDTH, max_content_width=WIDTH,
        **{k: v for k, v in command.context_settings.items() if parent is None},
    )  # fmt: skip


def _help(command: click.Command, parent: click.Context | None) -> list[str]:
    return ["```text", command.get_help(_context(command, parent)).rstrip(), "```"]


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text(renewed(path.read_text(encoding="utf-8")), encoding="utf-8")

"""Where the output goes: plain lines into a pipe, styled ones onto a terminal. All text is made harmless here."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from safepoint.cli.text import clean, cut, dumps

__all__ = ["Column", "Screen", "Styled"]

WIDEST = 60
"""Cells to which a column is padded in a pipe; what is longer sticks out."""
LONGEST = 1500
"""Characters of one value that a terminal shows without --full."""

STYLES = {
    "running": "cyan",
    "waiting": "yellow",
    "interrupted": "yellow",
    "out_of_steps": "yellow",
    "finished": "green",
    "succeeded": "green",
    "failed": "red",
    "damaged": "bold red",
    "in_doubt": "bold yellow",
    "open": "yellow",
    "park": "bold yellow",
    "wait": "yellow",
    "ok": "green",
    "warning": "yellow",
    "error": "bold red",
}


@dataclass(frozen=True, slots=True)
class Column:
    title: str
    right: bool = False
    fold: bool = False
    """Long values go on in the next line of a narrow terminal; others are shortened. Ids are never shortened."""


@dataclass(frozen=True, slots=True)
class Styled:
    text: str
    style: str


class Screen:
    def __init__(self, *, full: bool = False) -> None:
        self.terminal = sys.stdout.isatty()
        self.limit = LONGEST if self.terminal and not full else None
        self._console: Any = None

    def json(self, value: Any) -> None:
        sys.stdout.write(dumps(value) + "\n")

    def line(self, text: str = "", style: str = "") -> None:
        self._write(clean(text), style)

    def block(self, text: str, indent: str = "  ") -> None:
        """Text of several lines, which keeps them."""
        text = cut(text, self.limit)
        # By line ends alone: splitlines() would take characters for line ends that clean() shows.
        self._write("\n".join(indent + line for line in clean(text, lines=True).split("\n")))

    def value(self, value: Any, indent: str = "  ") -> None:
        """JSON data. In Unicode, as people read it: ``block`` makes it harmless."""
        import json

        self.block(json.dumps(value, indent=2, ensure_ascii=False), indent)

    def pairs(self, pairs: Iterable[tuple[str, Any]]) -> None:
        """One name and value a line; what is None or empty is left out."""
        shown = [(k, v) for k, v in pairs if v is not None and v != ""]
        width = max((len(k) for k, _ in shown), default=0)
        for key, value in shown:
            text = value.text if isinstance(value, Styled) else str(value)
            self.line(f"{key:<{width}}  {cut(text, self.limit)}", value.style if isinstance(value, Styled) else "")

    def table(self, columns: Sequence[Column], rows: Iterable[Sequence[str | Styled]]) -> None:
        cells = [
            [Styled(clean(c.text), c.style) if isinstance(c, Styled) else Styled(clean(c), "") for c in row] for row in rows
        ]
        if self.terminal:
            self._rich_table(columns, cells)
        else:
            self._plain_table(columns, cells)

    # -- plain

    @staticmethod
    def _plain_table(columns: Sequence[Column], rows: list[list[Styled]]) -> None:
        # Not rich: it takes a millisecond for a row, and cuts or folds to a width that a pipe does not have.
        from rich.cells import cell_len

        texts = [[c.title for c in columns], *([cell.text for cell in row] for row in rows)]
        # One very long id must not push every line's other columns out of sight.
        widths = [min(max(map(cell_len, column)), WIDEST) for column in zip(*texts, strict=True)]
        for row in texts:
            parts = []
            for column, text, width in zip(columns, row, widths, strict=True):
                blanks = " " * (width - cell_len(text))
                parts.append(blanks + text if column.right else text + blanks)
            sys.stdout.write("  ".join(parts).rstrip() + "\n")

    # -- rich

    def _rich(self) -> Any:
        if self._console is None:
            from rich.console import Console

            # It honours NO_COLOR and TERM=dumb. Nothing stored may be taken for markup or an emoji's name.
            self._console = Console(file=sys.stdout, markup=False, emoji=False, highlight=False)
        return self._console

    def _write(self, text: str, style: str = "") -> None:
        if not self.terminal or not style:
            sys.stdout.write(text + "\n")
            return
        from rich.text import Text

        self._rich().print(Text(text, style=style), soft_wrap=True)

    def _rich_table(self, columns: Sequence[Column], rows: list[list[Styled]]) -> None:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, header_style="bold")
        for c in columns:
            table.add_column(
                Text(c.title),
                justify="right" if c.right else "left",
                no_wrap=not c.fold,
                overflow="fold" if c.fold else "ellipsis",
            )
        for row in rows:
            table.add_row(*(Text(cell.text, style=cell.style) for cell in row))
        self._rich().print(table)


def status(text: str) -> Styled:
    return Styled(text, STYLES.get(text, ""))

"""What commands print: rich on a terminal, plain lines elsewhere or with NO_COLOR set."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, TextIO

import typer


def is_plain(stream: TextIO | None = None) -> bool:
    """Whether to write without colour and frames: not a terminal, or the user said NO_COLOR."""
    stream = stream or sys.stdout
    return bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb" or not stream.isatty()


def stdout(text: str = "") -> None:
    """Print one result for a reader or a pipe."""
    typer.echo(text)


def stderr(text: str) -> None:
    """Print a message beside the result."""
    typer.echo(text, err=True)


def error(text: str) -> None:
    """Print an error as one block on stderr."""
    _labelled("Error", text, typer.colors.RED)


def warning(text: str) -> None:
    """Print a warning on stderr."""
    _labelled("Warning", text, typer.colors.YELLOW)


def _labelled(label: str, text: str, colour: str) -> None:
    first, *rest = text.splitlines() or [""]
    head = f"{label}:" if is_plain(sys.stderr) else typer.style(f"{label}:", fg=colour, bold=True)
    if rest:
        # Several lines stand below the label, so that each can be read (and clicked on) by itself.
        typer.echo("\n".join([head, *(f"  {line}" for line in [first, *rest])]), err=True)
    else:
        typer.echo(f"{head} {first}", err=True)


def print_json(data: Any) -> None:
    """Print data for a program."""
    import json

    typer.echo(json.dumps(data, indent=2, ensure_ascii=False, default=str))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str | None = None) -> None:
    """Print a table; on a terminal it fits the width, elsewhere no cell is cut."""
    if is_plain():
        if title:
            typer.echo(title)
        widths = [max(len(row[index]) for row in [columns, *rows]) for index in range(len(columns))]
        for row in [columns, *rows]:
            typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)

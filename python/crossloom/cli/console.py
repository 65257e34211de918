"""What ``tvmc`` prints: results on standard output, progress and remarks on standard error."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer

_PIPE_WIDTH = 240


def say(text: str) -> None:
    """Write a remark to standard error."""
    typer.echo(text, err=True)


def print_json(value: Any) -> None:
    """Write a value to standard output as JSON."""
    typer.echo(json.dumps(value, indent=1))


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a table to standard output; wide where it goes to a file, so that lines stay whole.

    Columns without any name get no header line.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)
    table = Table(box=None, pad_edge=False, header_style="bold", show_header=any(columns))
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    if title:
        console.print(f"\n{title}", markup=False)
    console.print(table)


@contextmanager
def progress(first: str) -> Iterator[Callable[[str], None]]:
    """Show the step at work and its time on standard error, if that is a terminal; yields the setter."""
    if not sys.stderr.isatty():
        yield lambda step: None
        return
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    with console.status(first) as status:
        name, start = first, time.perf_counter()

        def show(step: str) -> None:
            nonlocal name, start
            now = time.perf_counter()
            if now - start >= 1.0:
                console.print(f"{name}: {now - start:.1f} s", style="dim", markup=False)
            name, start = step, now
            status.update(step.replace("[", r"\["))

        yield show


def size_text(count: float) -> str:
    """Return a number of bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"

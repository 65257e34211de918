"""A report: sections of text, tables and pictures, rendered as one HTML file that loads nothing."""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from ..atomic import write_bytes
from ..errors import UsageError

TEMPLATE = "page.html.j2"


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes
    ----------
    caption : str
    columns : sequence of str
    rows : sequence of sequence
        Numbers are set to the right, floats with four significant digits; None is a dash.
    bar : str
        Column of numbers >= 0 drawn as bars, its largest value as long as the cell; none where empty.
    folded : bool
        Whether the reader opens the table.
    """

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    bar: str = ""
    folded: bool = False

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise UsageError(f"table {self.caption!r}: a row of {len(row)} cells, {len(self.columns)} columns")
        if self.bar and self.bar not in self.columns:
            raise UsageError(f"table {self.caption!r} has no column {self.bar!r} to draw bars of")

    def share(self, row: Sequence[object], column: int) -> float:
        """Return the length of a cell's bar in percent of the longest; 0 for a cell without one."""
        if self.columns[column] != self.bar:
            return 0.0
        value, longest = _number(row[column]), max(_number(r[column]) for r in self.rows)
        return 100.0 * value / longest if longest > 0 else 0.0


@dataclass(frozen=True)
class Picture:
    """A PNG and what it shows; `width_px` is how wide the page draws it."""

    png: bytes
    caption: str
    width_px: int = 288

    @property
    def source(self) -> str:
        """The picture as a data URI."""
        return "data:image/png;base64," + base64.b64encode(self.png).decode()


@dataclass(frozen=True)
class Section:
    """A heading with text, pictures and tables under it."""

    title: str
    text: str = ""
    pictures: Sequence[Picture] = ()
    tables: Sequence[Table] = ()


@dataclass(frozen=True)
class Report:
    """A page: its title, one or two sentences, and its sections in order."""

    title: str
    lead: str
    sections: Sequence[Section]


def render(report: Report) -> str:
    """Return the page's HTML; all text is escaped."""
    import jinja2

    source = resources.files(__package__).joinpath(TEMPLATE).read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters["cell"] = cell_text
    environment.tests["numeric"] = lambda value: isinstance(value, (int, float)) and not isinstance(value, bool)
    return environment.from_string(source).render(report=report)


def write_report(report: Report, path: str | os.PathLike[str]) -> Path:
    """Write the page whole or not at all.

    Raises
    ------
    UsageError
        `path` cannot be written.
    """
    write_bytes(path, render(report).encode("utf-8"))
    return Path(path)


def cell_text(value: object) -> str:
    """Return a cell's text."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0

"""A page as plain data: a list of sections; a section is a title, sentences, charts and tables."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Literal

from markupsafe import Markup

from reagent_lite.errors import printable
from reagent_lite.evaluation.interval import Interval, number, percent

if TYPE_CHECKING:
    from reagent_lite.evaluation.decision import ShipDecision

Cell = str | int | float | Interval | None
CellKind = Literal["name", "number", "share", "bar", "words", "mark"]
"""Kinds of columns: names and paths, numbers, shares, shares drawn as bars, sentences, cells without line breaks."""
Column = tuple[str, CellKind]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table; the first cell of a row is its heading.

    Attributes:
        title: caption.
        columns: name and kind of each column.
        rows: cells of each row, one per column; None is an unknown number.
        note: sentence below the table.
    """

    title: str
    columns: tuple[Column, ...]
    rows: Sequence[Sequence[Cell]]
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A drawing, with legend and a table of its numbers.

    Attributes:
        title: heading.
        svg: the drawing.
        legend: sample and name of each series.
        note: sentence below the legend.
        table: the numbers; None if a table of the section has them.
    """

    title: str
    svg: Markup
    legend: tuple[tuple[Markup, str], ...] = ()
    note: str = ""
    table: Table | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSection:
    """A part of the page, shown in the order of its attributes. A section that has only sentences is not shown.

    Attributes:
        title: heading.
        notes: sentences before the rest.
        charts, facts, tables: content; a fact is a name and its value.
        rest: sentences about omitted parts.
        folded: (name, text) that opens on demand.
        in_brief: number of its tables that the log shows; a notebook shows the first of them.
    """

    title: str
    notes: tuple[str, ...] = ()
    charts: tuple[Chart, ...] = ()
    facts: tuple[tuple[str, Cell], ...] = ()
    tables: tuple[Table, ...] = ()
    rest: tuple[str, ...] = ()
    folded: tuple[str, str] | None = None
    in_brief: int = 0

    def __bool__(self) -> bool:
        return bool(self.charts or self.facts or self.tables or self.folded)

    @property
    def anchor(self) -> str:
        """The fragment for links to the section."""
        return self.title.lower().replace(" ", "-")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A page.

    Attributes:
        title: the title of the page.
        decision: recommendation with its reason; first on the page.
        notes: important sentences, for example about episodes that were not scored.
        facts: the summary.
        made: when the report was made, and how long that took.
        sections: the sections in order; empty ones are left out.
    """

    title: str
    decision: "ShipDecision"
    notes: tuple[str, ...] = ()
    facts: tuple[tuple[str, Cell], ...] = ()
    made: str = ""
    sections: tuple[PageSection, ...] = ()


def made_now(seconds: float) -> str:
    """Returns the present time (UTC), and the length of a run in seconds, in words."""
    length = timedelta(seconds=max(round(seconds), 1))
    return f"Written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC, after a run of {length} (hours, minutes, seconds)."


def format_cell(cell: Cell, kind: CellKind = "name") -> str:
    """Returns a cell as the page and the model card show it."""
    if isinstance(cell, int):
        return f"{cell:,}"
    if cell is None or isinstance(cell, float):
        return percent(cell) if kind in ("share", "bar") else number(cell)
    return printable(str(cell))


def note_omitted(count: int, what: str, where: str) -> str:
    """Returns a sentence about omitted entries, or "" if there are none."""
    return f"{count:,} more {what} in {where}." if count > 0 else ""

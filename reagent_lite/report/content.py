"""A page as plain data: a list of sections; a section is a title, sentences, charts and tables."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup

from reagent_lite.evaluation.decision import ShipDecision
from reagent_lite.evaluation.interval import Interval, number, percent

Cell = str | int | float | Interval | None
Kind = Literal["name", "number", "share", "bar", "words", "mark"]
"""Kinds of columns: names and paths, figures, shares, shares drawn as bars, sentences, cells without line breaks."""
Column = tuple[str, Kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table; the first cell of a row is its heading.

    Attributes:
        title: its caption.
        columns: name and kind of each.
        rows: lists of as many cells; None is a figure that is unknown.
        note: a sentence below it.
    """

    title: str
    columns: tuple[Column, ...]
    rows: Sequence[Sequence[Cell]]
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A drawing, with what a reader who cannot see it needs.

    Attributes:
        title: its heading.
        svg: the drawing.
        legend: sample and name of each series.
        note: a sentence below the legend.
        table: the numbers; None where a table of the section has them.
    """

    title: str
    svg: Markup
    legend: tuple[tuple[Markup, str], ...] = ()
    note: str = ""
    table: Table | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSection:
    """A part of the page, in the order of its attributes; one that holds nothing but sentences is not shown.

    Attributes:
        title: its heading.
        notes: sentences before the rest.
        charts, facts, tables: what it holds; a fact is a name and its value.
        rest: sentences on omitted parts.
        folded: (name, text) that opens on demand.
        in_brief: how many of its tables a log shows as well; a notebook shows the first of them.
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
        """The fragment of links to it."""
        return self.title.lower().replace(" ", "-")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A page.

    Attributes:
        title: the title of the page.
        decision: what to do, and why; first on the page.
        notes: sentences that a reader must know, such as what was not scored.
        facts: the summary.
        sections: in order; empty ones are left out.
    """

    title: str
    decision: ShipDecision
    notes: tuple[str, ...] = ()
    facts: tuple[tuple[str, Cell], ...] = ()
    sections: tuple[PageSection, ...] = ()


def written(cell: Cell, kind: Kind = "name") -> str:
    """Returns a cell as the page and the model card show it."""
    if isinstance(cell, int):
        return f"{cell:,}"
    if cell is None or isinstance(cell, float):
        return percent(cell) if kind in ("share", "bar") else number(cell)
    return str(cell)


def left_out(count: int, what: str, where: str) -> str:
    """Returns a sentence on omitted entries; an empty one where there are none."""
    return f"{count:,} more {what} in {where}." if count > 0 else ""

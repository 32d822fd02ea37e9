"""What a report shows, as plain data: headlines, then sections of paragraphs, charts, facts and tables."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup

State = Literal["good", "unclear", "bad"]
Fact = tuple[str, str]
"""A name and its value, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of words; the first cell of a row is its heading.

    Attributes:
        title: its caption.
        head: names of the columns.
        rows: as many cells each.
        figures, bars, words, short: columns of numbers, of percentages drawn as bars, of sentences, and of cells that
            are not broken.
        note: a sentence below it.
    """

    title: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    figures: tuple[int, ...] = ()
    bars: tuple[int, ...] = ()
    words: tuple[int, ...] = ()
    short: tuple[int, ...] = ()
    note: str = ""

    def kind(self, column: int) -> str:
        """Returns the class of a column's cells."""
        kinds = {"figure": self.figures, "bar": self.bars, "words": self.words, "short": self.short}
        return next((name for name, columns in kinds.items() if column in columns), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A drawing with what a reader without eyes for it needs.

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
class Section:
    """A part of the page, in the order of its attributes; one that holds nothing but sentences is not shown.

    Attributes:
        title: its heading.
        notes: sentences before the rest.
        charts, facts, tables: what it holds.
        rest: sentences on what is left out.
        folded: (name, text) that opens on demand.
    """

    title: str
    notes: tuple[str, ...] = ()
    charts: tuple[Chart, ...] = ()
    facts: tuple[Fact, ...] = ()
    tables: tuple[Table, ...] = ()
    rest: tuple[str, ...] = ()
    folded: Fact | None = None

    def __bool__(self) -> bool:
        return bool(self.charts or self.facts or self.tables or self.folded)

    @property
    def anchor(self) -> str:
        """What links to it end with."""
        return self.title.lower().replace(" ", "-")


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """A conclusion: what it rests on, how it turns out, one sentence, and the sentences that carry it."""

    source: str
    state: State
    sentence: str
    because: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A page.

    Attributes:
        title: of the page.
        headlines: conclusions, first.
        notes: sentences that a reader must know, such as what was not scored.
        facts: the summary.
        sections: in order; empty ones are left out.
    """

    title: str
    headlines: tuple[Headline, ...] = ()
    notes: tuple[str, ...] = ()
    facts: tuple[Fact, ...] = ()
    sections: tuple[Section, ...] = ()


def left_out(count: int, what: str, where: str) -> str:
    """Returns a sentence on what is left out; an empty one where nothing is."""
    return f"{count:,} more {what} in {where}." if count > 0 else ""

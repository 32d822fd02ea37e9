"""A report as one HTML document that needs nothing but itself, and as Markdown for the model card."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from reagent_lite.errors import counted
from reagent_lite.evaluation.decision import Choice
from reagent_lite.evaluation.interval import Interval
from reagent_lite.export.model_card import plain
from reagent_lite.report.content import Cell, Column, Report, Section, written

_STATES = {Choice.SHIP: ("good", "✓"), Choice.DO_NOT_SHIP: ("bad", "✕"), Choice.NOT_ENOUGH: ("unclear", "?")}
_MARKS = re.compile(r"(?<=\w)([/\\_.]+)(?=\w*[^\W\d])")


def render(report: Report) -> str:
    """Returns the page as one HTML document: no script, no request, every word escaped."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"breakable": breakable, "written": written, "full": full}
    environment.globals |= {"counted": counted}
    state, sign = _STATES[report.decision.choice]
    sections = [section for section in report.sections if section]
    page = environment.get_template("page.html.j2")
    return page.render(report=report, state=state, sign=sign, sections=sections)


def breakable(text: str) -> Markup:
    """Returns text as HTML in which paths and names may break behind their marks."""
    parts = _MARKS.split(text)  # word, mark, word, mark, ... word
    return Markup("").join(escape(part) + Markup("<wbr>" if n % 2 else "") for n, part in enumerate(parts))


def full(cell: Cell) -> str:
    """Returns a figure with all its digits, empty where the written cell has them already."""
    if isinstance(cell, Interval):
        return f"{cell.value} ({cell.low} to {cell.high})"
    return str(cell) if isinstance(cell, float) else ""


def decision_in_markdown(report: Report) -> str:
    """Returns what the model card begins with."""
    one = report.decision
    return f"**{plain(one.choice.capitalize())}**: {plain(one.reason)}. Next: {plain(one.next_step)}"


def findings_in_markdown(report: Report) -> str:
    """Returns findings, warnings, facts and tables, every word escaped; the page has the charts as well."""
    return "\n\n".join(_blocks(report))


def _blocks(report: Report) -> Iterator[str]:
    for one in report.decision.findings:
        yield f"{plain(one.source)}: {plain(one.reason)}."
    for note in report.notes:
        yield f"**Warning**: {plain(note)}"
    if report.facts:
        yield _grid((("figure", "name"), ("value", "number")), report.facts)
    for section in filter(None, report.sections):
        yield from _section_blocks(section)


def _section_blocks(section: Section) -> Iterator[str]:
    if section.facts:
        yield f"### {plain(section.title)}"
        yield _grid((("figure", "name"), ("value", "number")), section.facts)
    for table in section.tables:
        yield f"### {plain(table.title)}"
        yield _grid(table.columns, table.rows)
        if table.note:
            yield plain(table.note)


def _grid(columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> str:
    lines = [[plain(name) for name, _ in columns], ["---"] * len(columns)]
    lines += [[plain(written(cell, kind)) for cell, (_, kind) in zip(row, columns, strict=True)] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

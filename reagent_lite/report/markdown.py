"""A report in Markdown, for the model card, and as text, for the log: the facts and tables of the page."""

from collections.abc import Iterator, Sequence

from reagent_lite.export.model_card import escape_text
from reagent_lite.report.content import Cell, Column, PageSection, Report, format_cell


def decision_of(report: Report) -> str:
    """Returns the decision as the first paragraph of the model card."""
    decision = report.decision
    choice = escape_text(decision.choice.capitalize())
    return f"**{choice}**: {escape_text(decision.reason)}. Next: {escape_text(decision.next_step)}"


def findings(report: Report) -> str:
    """Returns notes, facts and tables with all text escaped; only the page has the charts."""
    return "\n\n".join(_blocks(report))


def _blocks(report: Report) -> Iterator[str]:
    for finding in report.decision.findings:
        yield f"{escape_text(finding.source)}: {escape_text(finding.reason)}."
    for note in report.notes:
        yield f"**Warning**: {escape_text(note)}"
    if report.facts:
        yield _grid((("figure", "name"), ("value", "number")), report.facts)
    for section in filter(None, report.sections):
        yield from _section_blocks(section)


def _section_blocks(section: PageSection) -> Iterator[str]:
    if section.facts:
        yield f"### {escape_text(section.title)}"
        yield _grid((("figure", "name"), ("value", "number")), section.facts)
    for table in section.tables:
        yield f"### {escape_text(table.title)}"
        yield _grid(table.columns, table.rows)
        if table.note:
            yield escape_text(table.note)


def _grid(columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> str:
    head, *lines = _words(columns, rows)
    lines = [head, ["---"] * len(columns), *lines]
    return "\n".join(f"| {' | '.join(map(escape_text, line))} |" for line in lines)


def _words(columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> list[list[str]]:
    """Returns the names of columns, then the text of every row."""
    shown = [[format_cell(cell, kind) for cell, (_, kind) in zip(row, columns, strict=True)] for row in rows]
    return [[name for name, _ in columns], *shown]


def lines_of_report(report: Report) -> Iterator[str]:
    """Yields lines of text: facts and estimates of the policy's value, without warnings and decision."""
    for name, value in report.facts:
        yield f"{name}: {format_cell(value)}"
    for section in report.sections:
        for note in filter(None, section.notes if section.in_brief else ()):
            yield f"{section.title}: {note}"
        for table in section.tables[: section.in_brief]:
            yield table.title
            lines = _words(table.columns, table.rows)
            widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
            for line in lines:
                yield "  " + "  ".join(map(str.ljust, line, widths)).rstrip()

"""A report in Markdown, for the model card: the same decision, facts and tables as on the page."""

from collections.abc import Iterator, Sequence

from reagent_lite.export.model_card import plain
from reagent_lite.report.content import Cell, Column, Report, Section, written


def decision_of(report: Report) -> str:
    """Returns what the model card begins with."""
    one = report.decision
    return f"**{plain(one.choice.capitalize())}**: {plain(one.reason)}. Next: {plain(one.next_step)}"


def findings(report: Report) -> str:
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

"""What an evaluation found in Markdown, for the model card: the same headlines, facts and tables as on the page."""

from collections.abc import Iterator, Sequence

from reagent_lite.export.model_card import plain
from reagent_lite.report.content import Report, Table


def findings(report: Report) -> str:
    """Returns headlines, warnings, facts and tables, every word escaped; the page has the charts as well."""
    return "\n\n".join(_blocks(report))


def _blocks(report: Report) -> Iterator[str]:
    for one in report.headlines:
        yield f"{plain(one.source)}: **{plain(one.sentence)}** {' '.join(map(plain, one.because))}".strip()
    for note in report.notes:
        yield f"**Warning**: {plain(note)}"
    if report.facts:
        yield _table(("figure", "value"), report.facts)
    for section in filter(None, report.sections):
        if section.facts:
            yield f"### {plain(section.title)}"
            yield _table(("figure", "value"), section.facts)
        for table in section.tables:
            yield from _titled(table)


def _titled(table: Table) -> Iterator[str]:
    yield f"### {plain(table.title)}"
    yield _table(table.head, table.rows)
    if table.note:
        yield plain(table.note)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = (head, ["---"] * len(head), *rows)
    return "\n".join(f"| {' | '.join(one if one == '---' else plain(one) for one in line)} |" for line in lines)

"""The report page: one HTML document that needs nothing but itself. No script, no request, every word escaped.

Report (plain data) ─► verdict, summary ─► estimates ─► weights ─► curves ─► actions ─► features ─► lineage ─► config
"""

import json
from collections.abc import Callable, Sequence
from html import escape

from reagent_lite.evaluation.charts import MOST_BARS, MOST_LINES, bar_chart, curve_chart, swatch, whisker_chart
from reagent_lite.evaluation.webpage_content import (
    Comparison,
    Curves,
    Interval,
    Line,
    Report,
    Table,
    number,
    percent,
    spread,
    thinned,
)
from reagent_lite.evaluation.webpage_headline import Headline, headlines
from reagent_lite.evaluation.webpage_style import STYLE

_TABLE_ROWS = 20  # of a curve's table; metrics.jsonl has them all
_MOST_FEATURES = 500
_MOST_POINTS = 500  # of a curve by step
_SIGN = {"good": "✓", "unclear": "?", "bad": "✕"}
_VERDICT_SIGN = {"trustworthy": "●", "wide": "◇", "do not use": "✕"}
_SHIFT_SIGN = {"stable": "●", "moderate": "◇", "large": "✕"}


def render(report: Report) -> str:
    """Returns the page as one HTML document; parts that are empty have no section."""
    sections = [
        (title, body) for title, write in _SECTIONS.items() if (body := write(report))
    ]  # fmt: skip
    anchors = {title: title.lower().replace(" ", "-") for title, _ in sections}
    links = "".join(f'<li><a href="#{anchors[title]}">{title}</a></li>' for title, _ in sections)
    main = "".join(
        f'<section aria-labelledby="{anchors[title]}"><h2 id="{anchors[title]}">{title}</h2>{body}</section>\n'
        for title, body in sections
    )
    title = escape(report.title)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # nothing may be fetched, whatever a name from outside might smuggle in
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        'img-src data:"><link rel="icon" href="data:,">'
        f"<title>{title}</title><style>{STYLE}</style></head>\n<body><header><h1>{title}</h1>"
        f"{''.join(map(_banner, headlines(report)))}{_paragraphs(report.notes)}{_facts(report.facts)}"
        f'<nav aria-label="Sections"><ul>{links}</ul></nav></header>\n<main>\n{main}</main></body></html>\n'
    )


def _banner(headline: Headline) -> str:
    return (
        f'<div class="verdict {headline.state}"><span>{escape(headline.source)}</span>'
        f"<strong>{_SIGN[headline.state]} {escape(headline.sentence)}</strong>{_paragraphs(headline.because)}</div>"
    )


def _estimates(report: Report) -> str:
    if not report.comparisons:
        return ""
    level = (
        f"<p>A dot is an estimate, its whisker the {report.level:.0%} interval, the dashed line and band what it is "
        "compared with. ● trustworthy, ◇ wide, ✕ do not use. An arrow says that a whisker goes on.</p>"
    )
    charts = "".join(
        f'<figure class="card"><h3>{escape(_title(one))}</h3>{whisker_chart(one)}</figure>'
        for one in report.comparisons
    )
    return f'{level}<div class="cards">{charts}</div>{"".join(map(_estimates_table, report.comparisons))}'


def _estimates_table(comparison: Comparison) -> str:
    head = ("Estimator", "Estimate (interval)", "Difference", "Times as much",
            "Verdict", "Reason")  # fmt: skip
    first = ("", spread(comparison.reference), "", "", "", "")
    rows = [
        (
            row.name,
            spread(row.figure),
            spread(row.difference) if row.difference else "–",
            number(row.ratio),
            f"{_VERDICT_SIGN[row.verdict.value]} {row.verdict.value}",
            row.reason,
        )
        for row in comparison.rows
    ]
    named = [(comparison.reference_name, *first[1:]), *rows]
    caption = f"{_title(comparison)}, beside the {comparison.reference_name}"
    return _table(caption, head, named, figures=(1, 2, 3), words=(5,), short=(4,))


def _title(comparison: Comparison) -> str:
    return f"{comparison.outcome}: {comparison.unit}"


def _simulated(report: Report) -> str:
    rows = [(name, number(one.value), _range(one)) for name, one in report.simulated]
    head = ("Policy", "Mean", f"{report.level:.0%} interval")
    note = _paragraphs((report.simulated_note,)) if report.simulated_note else ""
    return note + _table("Returns in simulation", head, rows, figures=(1, 2)) if rows else ""


def _range(figure: Interval) -> str:
    return f"{number(figure.low)} to {number(figure.high)}"


def _weights(report: Report) -> str:
    weights = report.weights
    if weights is None:
        return ""
    enough = None if weights.enough is None else (weights.enough, f"enough: {number(weights.enough)}")
    charts = _by_step("Effective episodes by step", "effective episodes", weights.effective_episodes, enough)
    charts += _by_step("Mean weight of episodes by step", "mean weight", weights.mean_weight, (1.0, "should be 1"))
    intro = (
        "<p>Estimates that weight the log can tell only what the log has tried. Effective episodes say how many "
        "equally weighted ones would tell as much; a return is judged at step "
        f"{weights.judged_step}, by which 95% of discounted time has passed.</p>"
    )
    return f'{intro}<div class="cards">{charts}</div>{_facts(weights.facts)}'


def _by_step(title: str, unit: str, values: Sequence[float | None], mark: tuple[float, str] | None) -> str:
    points = tuple((float(step), value) for step, value in enumerate(values) if value is not None)
    if not points:
        return ""
    lines = (Line(name=unit, points=thinned(points, _MOST_POINTS)),)
    return _figure(Curves(title=title, x="step of the episode", y=unit, lines=lines, mark=mark))


def _curves(report: Report) -> str:
    figures = "".join(_figure(one) for one in report.curves if any(line.points for line in one.lines))
    return f'<div class="cards">{figures}</div>' if figures else ""


def _figure(curves: Curves) -> str:
    """Returns curves as chart, legend and table."""
    lines = curves.lines[:MOST_LINES]
    legend = "".join(f"<li>{swatch(place)}{escape(line.name)}</li>" for place, line in enumerate(lines))
    more = len(curves.lines) - len(lines)
    note = f"<p>{more} more in metrics.jsonl.</p>" if more > 0 else ""
    kept = [line.points[:: max(-(-len(line.points) // _TABLE_ROWS), 1)] for line in lines]
    kept = [
        rows if rows[-1] == line.points[-1] else (*rows, line.points[-1])
        for rows, line in zip(kept, lines, strict=True)
    ]
    rows = [(line.name, number(x), number(y)) for line, points in zip(lines, kept, strict=True) for x, y in points]
    table = _table(f"{curves.title}, some points", ("Curve", curves.x, curves.y), rows, figures=(1, 2))
    return (
        f'<figure class="card"><h3>{escape(curves.title)}</h3>{curve_chart(curves)}'
        f'<ul class="legend">{legend}</ul>{note}<details><summary>As a table</summary>{table}</details></figure>'
    )


def _actions(report: Report) -> str:
    if not report.actions:
        return ""
    rows = [(one.name, percent(one.logged), percent(one.greedy), percent(one.propensity)) for one in report.actions]
    head = ("Action", "Log", "Learned policy's choice", "Mean propensity of the evaluated policy")
    legend = "".join(
        f'<li><svg class="swatch" viewBox="0 0 34 12" aria-hidden="true"><rect class="bar b{place}" x="1" y="2" '
        f'width="32" height="8"/></svg>{name}</li>'
        for place, name in enumerate(head[1:])
    )
    most = f"<p>The {MOST_BARS} most frequent are drawn.</p>" if len(rows) > MOST_BARS else ""
    return (
        f'<div class="cards"><figure class="card">{bar_chart(report.actions)}<ul class="legend">{legend}</ul>{most}'
        f"</figure></div>{_table('Shares of actions on judged rows', head, rows, figures=(1, 2, 3))}"
    )


def _features(report: Report) -> str:
    rows = [
        (one.name, one.column, one.type, percent(one.present), number(one.mean), number(one.stddev))
        for one in report.features
    ]
    if not rows:
        return ""
    head = ("Feature", "Of", "Type", "Present", "Mean", "Standard deviation")
    note = _paragraphs((report.features_note,)) if report.features_note else ""
    return note + _long("Normalization of features; mean and deviation in the space of the type", head, rows, (3, 4, 5))


def _drift(report: Report) -> str:
    rows = [
        (
            one.name, one.column, f"{_SHIFT_SIGN.get(one.verdict, '')} {one.verdict}", number(one.psi), number(one.ks),
            " → ".join(map(percent, one.present)), " → ".join(map(number, one.mean)),
        )
        for one in report.shifts
    ]  # fmt: skip
    if not rows:
        return ""
    head = ("Feature", "Of", "Drift", "PSI", "KS", "Present: reference → training", "Mean: reference → training")
    return _long("Features against the reference data, most drifted first", head, rows, (3, 4, 5, 6))


def _long(caption: str, head: tuple[str, ...], rows: Sequence[tuple[str, ...]], figures: tuple[int, ...]) -> str:
    more = len(rows) - _MOST_FEATURES
    note = f"<p>{more:,} more are not shown.</p>" if more > 0 else ""
    return _table(caption, head, rows[:_MOST_FEATURES], figures=figures) + note


def _lineage(report: Report) -> str:
    return "".join(_plain_table(table) for table in report.lineage if table.rows)


def _plain_table(table: Table) -> str:
    return _table(table.title, table.head, table.rows)


def _config(report: Report) -> str:
    if report.config is None:
        return ""
    text = escape(json.dumps(report.config, indent=2, sort_keys=True, ensure_ascii=False))
    return f"<details><summary>The resolved config</summary><pre>{text}</pre></details>"


_SECTIONS: dict[str, Callable[[Report], str]] = {
    "Estimates": _estimates,
    "Returns in simulation": _simulated,
    "Weights and overlap": _weights,
    "Learning curves": _curves,
    "Actions": _actions,
    "Features": _features,
    "Drift": _drift,
    "Data lineage": _lineage,
    "Config": _config,
}


def _facts(facts: Sequence[tuple[str, str]]) -> str:
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts)
    return f'<dl class="facts">{items}</dl>' if items else ""


def _paragraphs(sentences: Sequence[str]) -> str:
    return "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences)


def _table(
    caption: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    figures: tuple[int, ...] = (),
    words: tuple[int, ...] = (),
    short: tuple[int, ...] = (),
) -> str:
    """Returns a table that scrolls by itself; the first cell of a row is its heading.

    `figures` are columns of numbers, `words` columns of sentences, `short` columns that do not break.
    """
    classes = {"figure": figures, "words": words, "short": short}
    kinds = {column: f' class="{name}"' for name, columns in classes.items() for column in columns}
    heads = "".join(f'<th scope="col"{kinds.get(i, "")}>{escape(name)}</th>' for i, name in enumerate(head))
    body = "".join(
        "<tr>" + "".join(_cell(i, value, kinds.get(i, "")) for i, value in enumerate(row)) + "</tr>" for row in rows
    )
    # a box that scrolls must be reachable by keyboard, and then needs a name
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
        f"<caption>{escape(caption)}</caption><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _cell(column: int, value: str, kind: str) -> str:
    text = escape(value).replace("_", "_<wbr>")
    return f'<th scope="row">{text}</th>' if column == 0 else f"<td{kind}>{text}</td>"

"""The report page: one HTML document that needs nothing but itself. No script, no request, every word escaped.

Report (plain data) ─► verdict, summary ─► estimates ─► weights ─► curves ─► actions ─► features ─► lineage ─► config
"""

import json
from collections.abc import Callable, Sequence
from html import escape

from reagent_lite.evaluation.charts import MOST_LINES, curve_chart, swatch, thinned, whisker_chart
from reagent_lite.evaluation.webpage_actions import actions
from reagent_lite.evaluation.webpage_content import (
    Comparison,
    Curves,
    Interval,
    Line,
    Report,
    number,
    percent,
    spread,
)
from reagent_lite.evaluation.webpage_headline import Headline, headlines
from reagent_lite.evaluation.webpage_style import STYLE
from reagent_lite.evaluation.webpage_table import breakable, facts, more, paragraphs, table

_TABLE_ROWS = 20  # of a curve's table; metrics.jsonl has them all
_MOST_FEATURES = 500
_MOST_COMPARISONS = 12  # six outcomes
_MOST_CHARTS = 24
_MOST_TABLES = 20  # of where data came from
_MOST_POINTS = 500  # of a curve by step
_MOST_LETTERS = 100_000  # of the config
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
    top = "".join(map(_banner, headlines(report))) + paragraphs(report.notes) + facts(report.facts)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # nothing may be fetched, whatever a name from outside might smuggle in
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        'img-src data:"><link rel="icon" href="data:,">'
        f"<title>{title}</title><style>{STYLE}</style></head>\n<body><header><h1>{breakable(report.title)}</h1>{top}"
        f'<nav aria-label="Sections"><ul>{links}</ul></nav></header>\n<main>\n{main}</main></body></html>\n'
    )


def _banner(headline: Headline) -> str:
    return (
        f'<div class="verdict {headline.state}"><span>{escape(headline.source)}</span>'
        f"<strong>{_SIGN[headline.state]} {escape(headline.sentence)}</strong>{paragraphs(headline.because)}</div>"
    )


def _estimates(report: Report) -> str:
    if not report.comparisons:
        return ""
    simulated = any(one.simulated is not None for one in report.comparisons)
    level = (
        f"<p>A dot is an estimate, its whisker the {report.level:.0%} interval, the dashed line and band what it is "
        f"compared with{', the dotted line the value in simulation' if simulated else ''}. ● trustworthy, ◇ wide, "
        "✕ do not use. An arrow says that a whisker goes on.</p>"
    )
    shown = report.comparisons[:_MOST_COMPARISONS]
    charts = "".join(
        f'<figure class="card"><h3>{escape(_title(one))}</h3>{whisker_chart(one)}</figure>' for one in shown
    )
    rest = more(len(report.comparisons) - len(shown), "comparisons", report.beside)
    return f'{level}<div class="cards">{charts}</div>{"".join(map(_estimates_table, shown))}{rest}'


def _estimates_table(comparison: Comparison) -> str:
    head = ("Estimator", "Estimate (interval)", "Difference", "Times as much",
            "Verdict", "Reason")  # fmt: skip
    beside = [(comparison.reference_name, spread(comparison.reference), "", "", "", "")]
    if comparison.simulated is not None:
        beside.append(("in simulation", spread(comparison.simulated), "", "", "", "the value that estimates aim at"))
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
    caption = f"{_title(comparison)}, beside the {comparison.reference_name}"
    return table(caption, head, [*beside, *rows], figures=(1, 2, 3), words=(5,), short=(4,))


def _title(comparison: Comparison) -> str:
    return f"{comparison.outcome}: {comparison.unit}"


def _simulated(report: Report) -> str:
    rows = [
        (one.name, spread(one.returns), *(_optional(figure) for figure in (one.discounted, one.difference)),
         number(one.length), percent(one.cut_share))
        for one in report.simulated
    ]  # fmt: skip
    if not rows:
        return ""
    first = report.simulated[0].name
    head = ("Policy", "Return of an episode", "Discounted return", f"{first}, more by", "Mean length in steps",
            "Cut by the time limit")  # fmt: skip
    used = [column for column in range(len(head)) if column < 2 or any(row[column] != "–" for row in rows)]
    note = paragraphs((report.simulated_note,)) if report.simulated_note else ""
    return note + table(
        f"Returns in simulation with {report.level:.0%} intervals",
        [head[column] for column in used],
        [[row[column] for column in used] for row in rows],
        figures=(1, 2, 3, 4, 5),
    )


def _optional(figure: Interval | None) -> str:
    return "–" if figure is None else spread(figure)


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
    return f'{intro}<div class="cards">{charts}</div>{facts(weights.facts)}'


def _by_step(title: str, unit: str, values: Sequence[float | None], mark: tuple[float, str] | None) -> str:
    points = tuple((float(step), value) for step, value in enumerate(values) if value is not None)
    if not points:
        return ""
    lines = (Line(name=unit, points=thinned(points, _MOST_POINTS)),)
    return _figure(Curves(title=title, x="step of the episode", y=unit, lines=lines, mark=mark))


def _curves(report: Report) -> str:
    drawn = [one for one in report.curves if any(line.points for line in one.lines)]
    figures = "".join(map(_figure, drawn[:_MOST_CHARTS]))
    rest = more(len(drawn) - _MOST_CHARTS, "curves", "metrics.jsonl")
    return f'<div class="cards">{figures}</div>{rest}' if figures else ""


def _figure(curves: Curves) -> str:
    """Returns curves as chart, legend and table."""
    lines = curves.lines[:MOST_LINES]
    legend = "".join(f"<li>{swatch(place)}<span>{breakable(line.name)}</span></li>" for place, line in enumerate(lines))
    note = more(len(curves.lines) - len(lines), "curves", "metrics.jsonl")
    kept = [line.points[:: max(-(-len(line.points) // _TABLE_ROWS), 1)] for line in lines]
    kept = [
        rows if rows[-1] == line.points[-1] else (*rows, line.points[-1])
        for rows, line in zip(kept, lines, strict=True)
    ]
    rows = [(line.name, number(x), number(y)) for line, points in zip(lines, kept, strict=True) for x, y in points]
    points = table(f"{curves.title}, some points", ("Curve", curves.x, curves.y), rows, figures=(1, 2))
    return (
        f'<figure class="card"><h3>{escape(curves.title)}</h3>{curve_chart(curves)}'
        f'<ul class="legend">{legend}</ul>{note}<details><summary>As a table</summary>{points}</details></figure>'
    )


def _features(report: Report) -> str:
    rows = [
        (one.name, one.column, one.type, percent(one.present), number(one.mean), number(one.stddev))
        for one in report.features
    ]
    if not rows:
        return ""
    head = ("Feature", "Of", "Type", "Present", "Mean", "Standard deviation")
    note = paragraphs((report.features_note,)) if report.features_note else ""
    return note + _long("Normalization of features; mean and deviation in the space of the type", head, rows, (3, 4, 5),
                        "normalization.json")  # fmt: skip


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
    return _long("Features against the reference data, most drifted first", head, rows, (3, 4, 5, 6), "drift.json")


def _long(
    caption: str, head: tuple[str, ...], rows: Sequence[tuple[str, ...]], figures: tuple[int, ...], where: str
) -> str:
    shown = rows[:_MOST_FEATURES]
    return table(caption, head, shown, figures=figures) + more(len(rows) - len(shown), "features", where)


def _lineage(report: Report) -> str:
    tables = [one for one in report.lineage if one.rows]
    shown = "".join(table(one.title, one.head, one.rows) for one in tables[:_MOST_TABLES])
    return shown + more(len(tables) - _MOST_TABLES, "tables", "the manifests of the stages")


def _config(report: Report) -> str:
    if report.config is None:
        return ""
    text = json.dumps(report.config, indent=2, sort_keys=True, ensure_ascii=False)
    rest = more(len(text) - _MOST_LETTERS, "letters", "config.json")
    shown = f"<pre>{escape(text[:_MOST_LETTERS])}</pre>{rest}"
    return f"<details><summary>The resolved config</summary>{shown}</details>"


_SECTIONS: dict[str, Callable[[Report], str]] = {
    "Estimates": _estimates,
    "Returns in simulation": _simulated,
    "Weights and overlap": _weights,
    "Learning curves": _curves,
    "Actions": actions,
    "Features": _features,
    "Drift": _drift,
    "Data lineage": _lineage,
    "Config": _config,
}

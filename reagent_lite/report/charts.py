"""Charts as inline SVG on one scale: curves with bands, and estimates with their intervals.

Colors and fonts come from the page's style sheet by class, so a drawing works in light and dark mode and in print.
Dashes and shapes distinguish series without color. A drawing is 480 units wide; on a phone it shrinks to two thirds,
and the style sheet makes its letters larger.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from markupsafe import Markup

from reagent_lite.evaluation.interval import Interval, number
from reagent_lite.evaluation.trust import Verdict
from reagent_lite.report.content import Chart, Column, Table, note_omitted

Point = tuple[float, float]

_WIDTH = 480
_RIGHT = 466
# edges of the plot of curves
_LEFT = 58
_TOP = 26
_BOTTOM = 246
_EDGE = 14  # left edge of the plot of intervals
_ROW = 44  # height of an estimate's row: text above, interval below
_LANE = 20  # height of the text of an estimate's row, where no lines are drawn
_FINAL_RADIUS = 4
_FINAL = "the final evaluation, of all rows or of other episodes"
_SIMULATED = "in simulation"
_MOST_LINES = 8
_TABLE_ROWS = 20  # rows of a curve's table
_LOGARITHMIC_FROM = 200.0  # ratio of largest to smallest value above which a linear axis hides small values
_LETTER = 9.6  # width of a letter on a phone: digits of DejaVu Sans, a wide font
_CLASSES: Final = {Verdict.TRUSTWORTHY: "good", Verdict.SUPPORT: "unclear", Verdict.DO_NOT_USE: "bad"}  # of style.css

_WORDS: Final = {verdict: verdict.value for verdict in Verdict}


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A curve.

    Attributes:
        name: its name in the legend.
        points: points (x, y), ascending in x.
        band: ends of a band at the same x; empty without one.
        final: whether the last point is that of the final evaluation, which has other rows or episodes: it is a mark
            of its own and not joined to the curve.
    """

    name: str
    points: tuple[Point, ...]
    band: tuple[Point, ...] = ()
    final: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """Curves that share axes.

    Attributes:
        title: heading.
        x, y: names of the axes, with units.
        lines: the curves.
        mark: a value of y that is drawn as a horizontal line, and the line's name.
    """

    title: str
    x: str
    y: str
    lines: tuple[Line, ...]
    mark: tuple[float, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisScale:
    """Maps values `low` to `high` to positions `start` to `stop`; values outside are extrapolated."""

    low: float
    high: float
    start: float
    stop: float
    ticks: tuple[float, ...] = ()
    logarithmic: bool = False

    @classmethod
    def over(cls, values: Iterable[float], start: float, stop: float, *, powers: bool = False) -> "AxisScale":
        """Returns a scale with round ends; it is logarithmic if `powers` is true and the values span a large range."""
        values = list(values)
        low, high = min(values), max(values)
        logarithmic = powers and low > 0 and high / low >= _LOGARITHMIC_FROM
        marks = ticks(low, high)
        if logarithmic:
            marks = tuple(10.0**n for n in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1))
        shown = marks[:: 1 + len(marks) // 8]
        return cls(low=marks[0], high=marks[-1], start=start, stop=stop, ticks=shown, logarithmic=logarithmic)

    def __call__(self, value: float) -> float:
        """Returns the position of a value."""
        low, high, value = (math.log10(bound) if self.logarithmic else bound for bound in (self.low, self.high, value))
        return self.start + (value - low) / (high - low) * (self.stop - self.start)


def ticks(low: float, high: float) -> tuple[float, ...]:
    """Returns at most seven round numbers, 1, 2 or 5 x 10^n apart, from at most `low` to at least `high`."""
    size = max(abs(low), abs(high))
    rough = (high - low if high - low > 1e-9 * size else size or 1.0) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return tuple(float(f"{i * step:.12g}") for i in range(first, max(last, first + 1) + 1))


def thin(points: Sequence[Point], most: int) -> tuple[Point, ...]:
    """Returns at most `most` points (x, y): both ends, and the lowest and highest point in equal intervals of x.

    Points may be added and thinned again; all parts of x keep the same resolution.

    Args:
        points: points with distinct x in ascending order.
        most: largest number of points, at least 4.
    """
    if len(points) <= most:
        return tuple(points)
    first, *inner, last = points
    stretches: dict[int, list[Point]] = {}
    for point in inner:
        stretches.setdefault(int((point[0] - first[0]) / (last[0] - first[0]) * ((most - 2) // 2)), []).append(point)
    by_height = [sorted(part, key=lambda point: point[1]) for part in stretches.values()]
    return tuple(sorted({first, last, *(part[0] for part in by_height), *(part[-1] for part in by_height)}))


def curve_chart(curves: Curves) -> Chart:
    """Returns a chart of at most eight curves over common axes, with a line at the mark."""
    lines = curves.lines[:_MOST_LINES]
    mark = curves.mark
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points] + [end for line in lines for ends in line.band for end in ends]
    # the x axis ends with the data, so that the last value is at the right edge
    x = AxisScale(low=min(xs), high=max(xs) if max(xs) > min(xs) else min(xs) + 1, start=_LEFT, stop=_RIGHT)
    y = AxisScale.over(ys if mark is None else [*ys, mark[0]], _BOTTOM, _TOP, powers=True)
    parts = [_segment("axis", _LEFT, _BOTTOM, _RIGHT, _BOTTOM)]
    for tick in y.ticks:
        parts.append(_segment("grid", _LEFT, y(tick), _RIGHT, y(tick)))
        parts.append(_text(_LEFT - 6, y(tick) + 4, _short(tick), anchor="end", kind="tick"))
    for tick in ticks(x.low, max(xs)):
        if x.low <= tick <= x.high:
            parts.append(_centre_text(x(tick), _BOTTOM + 16, _short(tick), kind="tick"))
    for index, line in enumerate(lines):
        at = [(x(step), y(value)) for step, value in line.points]
        joined = len(at) - line.final
        band = [(y(low), y(high)) for low, high in line.band]
        if band:
            upper = [(step_x, high) for (step_x, _), (_, high) in zip(at[:joined], band[:joined], strict=True)]
            lower = [(step_x, low) for (step_x, _), (low, _) in zip(at[:joined], band[:joined], strict=True)]
            parts.append(_tag("path", class_=f"fill s{index}", d=f"{_path([*upper, *reversed(lower)])}Z"))
        # a curve of one point is a dot
        parts.append(_tag("path", class_=f"curve s{index}", d=f"{_path(at[:joined])}{'h0' if joined == 1 else ''}"))
        if line.final:
            (step_x, height) = at[-1]
            if band:
                parts.append(_segment(f"curve s{index}", step_x, band[-1][0], step_x, band[-1][1]))
            parts.append(_tag("circle", class_=f"final s{index}", cx=step_x, cy=height, r=_FINAL_RADIUS))
    if mark is not None:
        height = y(mark[0])
        # the name is at the end that is farther away from the curves
        left, right = (min(abs(y(line.points[end][1]) - height) for line in lines) for end in (0, -1))
        x_of_name, anchor = (_LEFT + 4, "start") if left > right else (_RIGHT, "end")
        parts.append(_segment("mark", _LEFT, height, _RIGHT, height))
        parts.append(_text(x_of_name, height - 4, mark[1], anchor=anchor))
    parts += [_centre_text((_LEFT + _RIGHT) / 2, _BOTTOM + 34, curves.x), _text(2, 12, curves.y)]
    ends = "; ".join(f"{line.name} ends at {number(line.points[-1][1])}" for line in lines)
    words = f"{curves.y} over {curves.x}{', logarithmic axis' if y.logarithmic else ''}. {ends}"
    rows = [(line.name, *point) for line in lines for point in _table_points(line.points)]
    columns: tuple[Column, ...] = (("Curve", "name"), (curves.x, "number"), (curves.y, "number"))
    return Chart(
        title=curves.title,
        svg=_svg(curves.title, words, _BOTTOM + 40, parts),
        legend=(*((_swatch(index), line.name) for index, line in enumerate(lines)), *_final_legend(lines)),
        note=note_omitted(len(curves.lines) - len(lines), "curves", "metrics.jsonl"),
        table=Table(title=f"{curves.title}, some points", columns=columns, rows=rows),
    )


def _table_points(points: tuple[Point, ...]) -> tuple[Point, ...]:
    """Returns about _TABLE_ROWS evenly spaced points, including the last."""
    kept = points[:: max(-(-len(points) // _TABLE_ROWS), 1)]
    return kept if kept[-1] == points[-1] else (*kept, points[-1])


def interval_chart(
    title: str,
    rows: Sequence[tuple[str, Interval, Verdict]],
    references: Mapping[str, Interval],
    simulated: Interval | None = None,
    *,
    plain: bool = False,
    words_of: Mapping[Verdict, str] = _WORDS,
) -> Chart:
    """Returns a chart with a dot and an interval for each estimate, and lines and bands for the references.

    Unusable estimates extend the axis only to a limit: an interval that continues beyond it has no end mark.

    Args:
        title: the title of the chart.
        rows: name, estimate and verdict.
        references: references that the estimates are compared with, by name.
        simulated: the value in simulation, if there is one.
        plain: whether trustworthy estimates are drawn without color, because they do not decide.
        words_of: words for each verdict.
    """
    marks = dict(references) if simulated is None else {**references, _SIMULATED: simulated}
    x = _scale_of(rows, marks.values(), judged=words_of is _WORDS)
    start = 10 + 14 * len(marks)  # below the names
    bottom = start + _ROW * len(rows)
    parts = []
    labels = {name: f"{name} {figure.format_end(figure.value)}" for name, figure in marks.items() if figure.defined}
    for row, (name, figure) in enumerate(marks.items()):
        if not figure.defined:
            continue
        kind = " simulated" if name == _SIMULATED else ""
        top = 12 + 14 * row
        later = [(x(marks[other].value), labels[other]) for other in [*labels][[*labels].index(name) + 1 :]]
        free = all(abs(x(figure.value) - middle) > _half_width(label) for middle, label in later)
        lanes = [(start + _ROW * index + _LANE, start + _ROW * (index + 1)) for index in range(len(rows))]
        width = max(x(figure.high) - x(figure.low), 0.5)
        for lane, stop in lanes:
            parts.append(_tag("rect", class_=f"band{kind}", x=x(figure.low), y=lane, width=width, height=stop - lane))
        # no line crosses a text: neither the name of a later mark nor those of a row
        for first, stop in ([(top + 6, start)] if free else []) + lanes:
            parts.append(_segment(f"mark{kind}", x(figure.value), first, x(figure.value), stop))
        parts.append(_centre_text(x(figure.value), top, labels[name]))
    for row, (name, figure, verdict) in enumerate(rows):
        top = start + _ROW * row
        state = _CLASSES[verdict]
        kind = "plain" if plain and state == "good" else state
        parts.append(_text(_EDGE, top + 14, name))
        parts.append(_text(_RIGHT, top + 14, words_of[verdict], anchor="end", kind=kind))
        parts += _interval(figure, state, kind, x, top + 28)
    parts.append(_segment("axis", _EDGE, bottom, _RIGHT, bottom))
    for tick in x.ticks:
        parts.append(_segment("axis", x(tick), bottom, x(tick), bottom + 4))
        parts.append(_centre_text(x(tick), bottom + 17, _short(tick), kind="tick"))
    words = [f"{name} {figure.format_end(figure.value)}" for name, figure in marks.items()]
    words += [f"{name} {figure.format_end(figure.value)}, {words_of[verdict]}" for name, figure, verdict in rows]
    return Chart(title=title, svg=_svg(title, "; ".join(words), bottom + 24, parts))


def _scale_of(rows: Sequence[tuple[str, Interval, Verdict]], marks: Iterable[Interval], *, judged: bool) -> AxisScale:
    """Returns a scale over the marks and all usable intervals; unusable ones extend it by at most this width.

    Args:
        rows: name, estimate and verdict.
        marks: references.
        judged: whether verdicts are those on estimates; otherwise all of them are usable.
    """
    unusable = {Verdict.DO_NOT_USE} if judged else set()
    usable = [figure for _, figure, verdict in rows if verdict not in unusable]
    others = _finite(figure for _, figure, verdict in rows if verdict in unusable)
    core = _finite((*marks, *usable)) or others or [0.0]
    low, high = min(core), max(core)
    width = high - low or abs(high) * 0.1 or 1.0
    return AxisScale.over([*core, *(min(max(value, low - width), high + width) for value in others)], _EDGE, _RIGHT)


def _finite(figures: Iterable[Interval]) -> list[float]:
    return [bound for figure in figures for bound in (figure.value, figure.low, figure.high) if math.isfinite(bound)]


def _interval(figure: Interval, state: str, kind: str, x: AxisScale, y: float) -> list[Markup]:
    if not math.isfinite(figure.value):
        return [_text(_EDGE, y + 6, "undefined on this log", kind="tick")]
    parts = []
    if figure.defined:
        ends = [x(value) for value in (figure.low, figure.high)]
        shown = [min(max(end, _EDGE), _RIGHT) for end in ends]
        parts.append(_segment(f"whisker {kind}", shown[0], y, shown[1], y))
        parts += [_segment(f"whisker {kind}", end, y - 4, end, y + 4) for end in ends if _EDGE <= end <= _RIGHT]
    at = x(figure.value)
    if _EDGE <= at <= _RIGHT:
        draw = {
            "good": f"M{_coordinate(at - 5)} {y}a5 5 0 1 0 10 0a5 5 0 1 0 -10 0Z",
            "unclear": f"M{_coordinate(at)} {y - 6}l6 6l-6 6l-6 -6Z",
            "bad": f"M{_coordinate(at - 4.5)} {y - 4.5}l9 9M{_coordinate(at - 4.5)} {y + 4.5}l9 -9",
        }[state]
        parts.append(_tag("path", class_=f"dot {kind}", d=draw))
    return parts


def _svg(title: str, words: str, height: float, parts: Iterable[Markup]) -> Markup:
    box = f"0 -4 {_WIDTH} {_coordinate(height + 4)}"  # 4 is the ascent of the first words on a phone
    inside = (_tag("title", title), *parts)
    return _tag("svg", *inside, class_="chart", role="img", aria_label=f"{title}: {words}", viewBox=box)


def _swatch(index: int) -> Markup:
    line = _tag("path", class_=f"curve s{index}", d="M1 6H33")
    return _tag("svg", line, class_="swatch", viewBox="0 0 34 12", aria_hidden="true")


def _final_legend(lines: Sequence[Line]) -> tuple[tuple[Markup, str], ...]:
    """Returns the legend of marks at the end of curves, () if there are none."""
    if not any(line.final for line in lines):
        return ()
    dot = _tag("circle", class_="final s0", cx=17, cy=6, r=_FINAL_RADIUS)
    return ((_tag("svg", dot, class_="swatch", viewBox="0 0 34 12", aria_hidden="true"), _FINAL),)


def _segment(kind: str, x1: float, y1: float, x2: float, y2: float) -> Markup:
    return _tag("line", class_=kind, x1=x1, x2=x2, y1=y1, y2=y2)


def _text(x: float, y: float, words: str, *, anchor: str = "start", kind: str = "label") -> Markup:
    return _tag("text", words, class_=kind, x=x, y=y, text_anchor=anchor)


def _centre_text(x: float, y: float, words: str, *, kind: str = "label") -> Markup:
    """Returns text centered at x, moved if it would otherwise cross the drawing's edges on a phone."""
    half = _half_width(words)
    return _text(min(max(x, half), _WIDTH - half), y, words, anchor="middle", kind=kind)


def _half_width(words: str) -> float:
    """Returns half of the width of text on a phone."""
    return len(words) * _LETTER / 2


def _path(points: Sequence[Point]) -> str:
    return "M" + "L".join(f"{_coordinate(x)} {_coordinate(y)}" for x, y in points)


def _tag(name: str, *inside: str, **attributes: str | float) -> Markup:
    """Returns an element; text and attributes are escaped, coordinates are rounded to a tenth of a unit."""
    shown = (
        Markup(' {}="{}"').format(
            key.rstrip("_").replace("_", "-"), value if isinstance(value, str) else _coordinate(value)
        )
        for key, value in attributes.items()
    )
    return Markup("<{0}{1}>{2}</{0}>").format(name, Markup("").join(shown), Markup("").join(inside))


def _short(value: float) -> str:
    """Returns a tick's number in at most seven characters."""
    for size, unit, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= size:
            return f"{value / unit:.4g}{letter}"
    text = f"{value:.5g}"
    return text if len(text) <= 7 else f"{value:.1e}".replace("e-0", "e-")


def _coordinate(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")

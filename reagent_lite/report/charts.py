"""Charts as inline SVG: curves, and dots with whiskers. Shape and dash tell marks apart first, colour second.

Colours and fonts come from the page's style sheet by class, so that one drawing serves light, dark and print.
A drawing is 480 units wide; on a phone it shrinks to two thirds, and the style sheet makes its letters larger.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from reagent_lite.evaluation.interval import Interval, number
from reagent_lite.evaluation.verdict import Verdict
from reagent_lite.report.content import Chart, State, Table, left_out

Point = tuple[float, float]

_WIDTH = 480
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 466, 26, 246  # of the plot of curves
_EDGE = 14  # left edge of the plot of whiskers
_MOST_LINES = 8
_TABLE_ROWS = 20  # of a curve's table
_ROW = 44  # height of an estimator's row: words above, whisker below
_LOGARITHMIC_FROM = 200.0  # largest over smallest, from where a linear axis hides the small half of a curve
_LETTER = 9.6  # width of a letter on a phone: digits of DejaVu Sans, a wide font
_STATE: dict[Verdict, State] = {Verdict.TRUSTWORTHY: "good", Verdict.WIDE: "unclear", Verdict.DO_NOT_USE: "bad"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A curve: (x, y) ascending in x, and at the same x the ends of a band, or none."""

    name: str
    points: tuple[Point, ...]
    band: tuple[Point, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """Curves that share axes: names of the axes with units, and a value of y to draw a line at, with its name."""

    title: str
    x: str
    y: str
    lines: tuple[Line, ...]
    mark: tuple[float, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A scale: values `low` to `high` lie at `start` to `stop`."""

    low: float
    high: float
    start: float
    stop: float
    ticks: tuple[float, ...] = ()
    logarithmic: bool = False

    def at(self, value: float) -> float:
        """Returns where a value lies; values beyond the ends lie beyond."""
        low, high, value = (math.log10(one) if self.logarithmic else one for one in (self.low, self.high, value))
        return self.start + (value - low) / (high - low) * (self.stop - self.start)


def ticks(low: float, high: float, most: int = 5) -> tuple[float, ...]:
    """Returns round numbers 1, 2 or 5 x 10^n apart; the first is at most `low`, the last at least `high`."""
    size = max(abs(low), abs(high))
    rough = (high - low if high - low > 1e-9 * size else size or 1.0) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return tuple(float(f"{i * step:.12g}") for i in range(first, max(last, first + 1) + 1))


def thinned(points: Sequence[Point], most: int) -> tuple[Point, ...]:
    """Returns at most so many (x, y): the ends, and of equal stretches of x the lowest and the highest.

    Points may be added and thinned again: every part of x stays as fine as the others.

    Args:
        points: ascending in x, no x twice.
        most: at least 4.
    """
    if len(points) <= most:
        return tuple(points)
    first, *inner, last = points
    stretches: dict[int, list[Point]] = {}
    for point in inner:
        stretches.setdefault(int((point[0] - first[0]) / (last[0] - first[0]) * ((most - 2) // 2)), []).append(point)
    kept = {end for part in stretches.values() for end in (min(part, key=_y), max(part, key=_y))}
    return tuple(sorted({first, *kept, last}))


def _y(point: Point) -> float:
    return point[1]


def curve_chart(curves: Curves) -> Chart:
    """Returns curves over common axes, at most eight of them, with a line at the mark."""
    lines = curves.lines[:_MOST_LINES]
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points] + [end for line in lines for ends in line.band for end in ends]
    # the x axis ends with the data: the last figure is the one that counts
    x = Axis(low=min(xs), high=max(xs) if max(xs) > min(xs) else min(xs) + 1, start=_LEFT, stop=_RIGHT)
    y = _height(ys if curves.mark is None else [*ys, curves.mark[0]])
    parts = [_tag("line", class_="axis", x1=_LEFT, x2=_RIGHT, y1=_BOTTOM, y2=_BOTTOM)]
    for tick in y.ticks:
        parts.append(_tag("line", class_="grid", x1=_LEFT, x2=_RIGHT, y1=y.at(tick), y2=y.at(tick)))
        parts.append(_text(_LEFT - 6, y.at(tick) + 4, _short(tick), anchor="end", kind="tick"))
    for tick in ticks(x.low, max(xs)):
        if x.low <= tick <= x.high:
            parts.append(_centred(x.at(tick), _BOTTOM + 16, _short(tick), kind="tick"))
    parts += [_curve(line, x, y, place) for place, line in enumerate(lines)]
    if curves.mark is not None:
        at, name = y.at(curves.mark[0]), curves.mark[1]
        # the name stands at the end from which the curves are farther away
        left, right = (min(abs(y.at(line.points[end][1]) - at) for line in lines) for end in (0, -1))
        place, anchor = (_LEFT + 4, "start") if left > right else (_RIGHT, "end")
        parts.append(_tag("line", class_="mark", x1=_LEFT, x2=_RIGHT, y1=at, y2=at))
        parts.append(_text(place, at - 4, name, anchor=anchor))
    parts += [_centred((_LEFT + _RIGHT) / 2, _BOTTOM + 34, curves.x), _text(2, 12, curves.y)]
    ends = "; ".join(f"{line.name} ends at {number(line.points[-1][1])}" for line in lines)
    words = f"{curves.y} over {curves.x}{', logarithmic axis' if y.logarithmic else ''}. {ends}"
    rows = [(line.name, number(x), number(y)) for line in lines for x, y in _some(line.points)]
    return Chart(
        title=curves.title,
        svg=_svg(curves.title, words, _BOTTOM + 40, parts),
        legend=tuple((_swatch(place), line.name) for place, line in enumerate(lines)),
        note=left_out(len(curves.lines) - len(lines), "curves", "metrics.jsonl"),
        table=Table(
            title=f"{curves.title}, some points", head=("Curve", curves.x, curves.y), rows=rows, figures=(1, 2)
        ),
    )


def _some(points: tuple[Point, ...]) -> tuple[Point, ...]:
    """Returns about _TABLE_ROWS points, evenly spread, the last among them."""
    kept = points[:: max(-(-len(points) // _TABLE_ROWS), 1)]
    return kept if kept[-1] == points[-1] else (*kept, points[-1])


def _height(values: Sequence[float]) -> Axis:
    """Returns the axis of y: logarithmic where the values are positive and span orders of magnitude."""
    low, high = min(values), max(values)
    logarithmic = low > 0 and high / low >= _LOGARITHMIC_FROM
    marks = ticks(low, high)
    if logarithmic:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        marks = tuple(10.0**power for power in powers)
    shown = marks[:: 1 + len(marks) // 8] if logarithmic else marks
    return Axis(low=marks[0], high=marks[-1], start=_BOTTOM, stop=_TOP, ticks=shown, logarithmic=logarithmic)


def _curve(line: Line, x: Axis, y: Axis, place: int) -> Markup:
    at = [(x.at(one), y.at(value)) for one, value in line.points]
    parts = []
    if line.band:
        upper = [(there, y.at(high)) for (there, _), (_, high) in zip(at, line.band, strict=True)]
        lower = [(there, y.at(low)) for (there, _), (low, _) in zip(at, line.band, strict=True)]
        parts.append(_tag("path", class_=f"fill s{place}", d=f"{_path([*upper, *reversed(lower)])}Z"))
    parts.append(_tag("path", class_=f"curve s{place}", d=_path(at)))
    # shapes every seventh of the way, and at the end, tell crossing lines apart without colour
    shown = {*range(0, len(at), max(len(at) // 7, 1)), len(at) - 1}
    return Markup("").join((*parts, *(_shape(place, *at[i]) for i in sorted(shown))))


def _path(places: Sequence[Point]) -> str:
    return "M" + "L".join(f"{_n(x)} {_n(y)}" for x, y in places)


def _shape(place: int, x: float, y: float) -> Markup:
    """Returns the mark of a curve: circle, square, diamond, triangle, then the same hollow."""
    draw = (
        f"M{_n(x - 3.5)} {_n(y)}a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0 -7 0Z",
        f"M{_n(x - 3.2)} {_n(y - 3.2)}h6.4v6.4h-6.4Z",
        f"M{_n(x)} {_n(y - 4.5)}l4.5 4.5l-4.5 4.5l-4.5 -4.5Z",
        f"M{_n(x)} {_n(y - 4)}l4.2 7.4h-8.4Z",
    )[place % 4]
    return _tag("path", class_=f"shape {'hollow' if place >= 4 else 'solid'} s{place}", d=draw)


def _swatch(place: int) -> Markup:
    line = _tag("path", class_=f"curve s{place}", d="M1 6H33")
    return _tag("svg", line, _shape(place, 17, 6), class_="swatch", viewBox="0 0 34 12", aria_hidden="true")


def whisker_chart(title: str, rows: Sequence[tuple[str, Interval, Verdict]], marks: Mapping[str, Interval]) -> Chart:
    """Returns a dot with a whisker for each estimate, against the lines and bands of what they are compared with.

    Estimates that may not be used do not stretch the axis far: an arrow marks a whisker that continues.

    Args:
        title: of the chart.
        rows: name, estimate and whether it may be used.
        marks: named values; the first is the reference, a second the value in simulation.
    """
    axis = _whisker_axis(rows, marks.values())
    start = 10 + 14 * len(marks)  # below the names
    bottom = start + _ROW * len(rows)
    parts = []
    for place, (name, figure) in enumerate(marks.items()):
        if not figure.defined:
            continue
        kind, top = "simulated" if place else "", 12 + 14 * place
        low, high, value = (axis.at(one) for one in (figure.low, figure.high, figure.value))
        box = {"y": top + 6, "width": max(high - low, 0.5), "height": bottom - top - 6}
        parts.append(_tag("rect", class_=f"band {kind}".strip(), x=low, **box))
        parts.append(_tag("line", class_=f"mark {kind}".strip(), x1=value, x2=value, y1=top + 6, y2=bottom))
        parts.append(_centred(value, top, f"{name} {number(figure.value)}"))
    for place, (name, figure, verdict) in enumerate(rows):
        top = start + _ROW * place
        parts.append(_text(_EDGE, top + 14, name))
        parts.append(_text(_RIGHT, top + 14, verdict.value, anchor="end", kind=_STATE[verdict]))
        parts.append(_whisker(figure, verdict, axis, top + 28))
    parts.append(_tag("line", class_="axis", x1=_EDGE, x2=_RIGHT, y1=bottom, y2=bottom))
    for tick in axis.ticks:
        parts.append(_tag("line", class_="axis", x1=axis.at(tick), x2=axis.at(tick), y1=bottom, y2=bottom + 4))
        parts.append(_centred(axis.at(tick), bottom + 17, number(tick), kind="tick"))
    words = [f"{name} {number(figure.value)}" for name, figure in marks.items()]
    words += [f"{name} {number(figure.value)}, {verdict.value}" for name, figure, verdict in rows]
    return Chart(title=title, svg=_svg(title, "; ".join(words), bottom + 24, parts))


def _whisker_axis(rows: Sequence[tuple[str, Interval, Verdict]], marks: Iterable[Interval]) -> Axis:
    """Returns an axis over the marks and all usable intervals; unusable ones widen it by that width at most."""
    usable = [figure for _, figure, verdict in rows if verdict is not Verdict.DO_NOT_USE]
    others = _finite(figure for _, figure, verdict in rows if verdict is Verdict.DO_NOT_USE)
    core = _finite((*marks, *usable)) or others or [0.0]
    low, high = min(core), max(core)
    width = high - low or abs(high) * 0.1 or 1.0
    every = [*core, *others]
    ends = ticks(max(min(every), low - width), min(max(every), high + width))
    return Axis(low=ends[0], high=ends[-1], start=_EDGE, stop=_RIGHT, ticks=ends)


def _finite(figures: Iterable[Interval]) -> list[float]:
    return [one for figure in figures for one in (figure.value, figure.low, figure.high) if math.isfinite(one)]


def _whisker(figure: Interval, verdict: Verdict, axis: Axis, y: int) -> Markup:
    kind, parts = _STATE[verdict], []
    if not math.isfinite(figure.value):
        return _text(_EDGE, y + 6, "undefined on this log", kind="tick")
    if figure.defined:
        ends = [axis.at(one) for one in (figure.low, figure.high)]
        shown = [min(max(end, _EDGE), _RIGHT) for end in ends]
        parts.append(_tag("line", class_=f"whisker {kind}", x1=shown[0], x2=shown[1], y1=y, y2=y))
        for inside, end, way in zip(shown, ends, (-1, 1), strict=True):
            if abs(inside - end) < 1e-9:
                parts.append(_tag("line", class_=f"whisker {kind}", x1=end, x2=end, y1=y - 4, y2=y + 4))
            else:
                parts.append(_tag("path", class_=f"arrow {kind}", d=f"M{_n(inside)} {y - 5}l{7 * way} 5l{-7 * way} 5Z"))
    at = axis.at(figure.value)
    if _EDGE <= at <= _RIGHT:
        draw = {
            Verdict.TRUSTWORTHY: f"M{_n(at - 5)} {y}a5 5 0 1 0 10 0a5 5 0 1 0 -10 0Z",
            Verdict.WIDE: f"M{_n(at)} {y - 6}l6 6l-6 6l-6 -6Z",
            Verdict.DO_NOT_USE: f"M{_n(at - 4.5)} {y - 4.5}l9 9M{_n(at - 4.5)} {y + 4.5}l9 -9",
        }[verdict]
        parts.append(_tag("path", class_=f"dot {kind}", d=draw))
    return Markup("").join(parts)


def _svg(title: str, words: str, height: float, parts: Iterable[Markup]) -> Markup:
    box = f"0 -4 {_WIDTH} {_n(height + 4)}"  # 4 is the ascent of the first words on a phone
    inside = (_tag("title", title), *parts)
    return _tag("svg", *inside, class_="chart", role="img", aria_label=f"{title}: {words}", viewBox=box)


def _text(x: float, y: float, words: str, *, anchor: str = "start", kind: str = "label") -> Markup:
    return _tag("text", words, class_=kind, x=x, y=y, text_anchor=anchor)


def _centred(x: float, y: float, words: str, *, kind: str = "label") -> Markup:
    """Returns words around a place, or as near to it as the drawing's edges let a phone's letters come."""
    half = len(words) * _LETTER / 2
    return _text(min(max(x, half), _WIDTH - half), y, words, anchor="middle", kind=kind)


def _tag(name: str, *inside: str, **attributes: str | float) -> Markup:
    """Returns an element; words and attributes are escaped, coordinates have a tenth of a unit."""
    shown = (
        Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), value if isinstance(value, str) else _n(value))
        for key, value in attributes.items()
    )
    return Markup("<{0}{1}>{2}</{0}>").format(name, Markup("").join(shown), Markup("").join(inside))


def _short(value: float) -> str:
    """Returns a tick's number in at most seven characters."""
    for size, unit, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= size:
            return f"{value / unit:.4g}{letter}"
    return f"{value:.4g}"


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")

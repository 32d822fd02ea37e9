"""Charts as inline SVG: curves, dots with whiskers, bars. What tells marks apart is shape or dash first, colour second.

Colours and fonts come from the page's style sheet by class, so that one drawing serves light, dark and print.
A drawing is 480 units wide; on a phone it shrinks to two thirds, and the style sheet makes its letters larger.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from reagent_lite.evaluation.verdict import Verdict
from reagent_lite.evaluation.webpage_content import ActionShare, Comparison, Curves, Interval, Line, number

WIDTH = 480
LEFT, RIGHT = 58, 466  # of the plot of curves
TOP, BOTTOM = 26, 246
MOST_LINES = 8
MOST_BARS = 12

_EDGE_LEFT, _EDGE_RIGHT = 14, 466  # of the plot of whiskers and bars
_ROW = 44  # height of an estimator's row: words above, whisker below
_BAR = 10
_LOGARITHMIC_FROM = 200.0  # largest over smallest, from where a linear axis hides the small half of a curve
_TICKS = 5
_ROUNDING = 1e-9  # of their size, by which values that differ less are one
_ABOVE = 4  # the first words' ascent on a phone
_LETTER = 9.6  # width of a wide font's letters on a phone, [m] of digits of DejaVu Sans


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A scale: values `low` to `high` lie at `start` to `stop`."""

    low: float
    high: float
    start: float
    stop: float
    logarithmic: bool = False

    def at(self, value: float) -> float:
        """Returns where a value lies; values beyond the ends lie beyond."""
        low, high, value = (math.log10(one) if self.logarithmic else one for one in (self.low, self.high, value))
        return self.start + (value - low) / (high - low) * (self.stop - self.start)


def ticks(low: float, high: float, most: int = _TICKS) -> tuple[float, ...]:
    """Returns round numbers 1, 2 or 5 x 10^n apart; the first is at most `low`, the last at least `high`."""
    size = max(abs(low), abs(high))
    span = high - low if high - low > _ROUNDING * size else size or 1.0
    rough = span / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return tuple(float(f"{i * step:.12g}") for i in range(first, max(last, first + 1) + 1))


def thinned(points: Sequence[tuple[float, float]], most: int) -> tuple[tuple[float, float], ...]:
    """Returns at most so many (x, y): the ends, and of equal stretches of x the lowest and the highest.

    Points may be added and thinned again: every part of x stays as fine as the others.

    Args:
        points: ascending in x, no x twice.
        most: at least 4.
    """
    if len(points) <= most:
        return tuple(points)
    first, *inner, last = points
    stretches = (most - 2) // 2
    lowest: dict[int, tuple[float, float]] = {}
    highest: dict[int, tuple[float, float]] = {}
    for point in inner:
        stretch = int((point[0] - first[0]) / (last[0] - first[0]) * stretches)
        if stretch not in lowest or point[1] < lowest[stretch][1]:
            lowest[stretch] = point
        if stretch not in highest or point[1] > highest[stretch][1]:
            highest[stretch] = point
    return tuple(sorted({first, *lowest.values(), *highest.values(), last}))


def curve_chart(curves: Curves) -> str:
    """Returns curves over common axes as SVG; at most MOST_LINES of them, and a line at the mark."""
    lines = curves.lines[:MOST_LINES]
    x, y, x_ticks, y_ticks = _axes(lines, curves.mark)
    parts = [_grid(x, y, x_ticks, y_ticks)]
    parts += [_curve(line, x, y, place) for place, line in enumerate(lines)]
    if curves.mark is not None:
        parts.append(_horizontal(*curves.mark, lines, y))
    parts.append(_centred((LEFT + RIGHT) / 2, BOTTOM + 34, curves.x))
    parts.append(_text(2, 12, curves.y))
    says = "; ".join(f"{line.name} ends at {number(line.points[-1][1])}" for line in lines)
    scale = ", logarithmic axis" if y.logarithmic else ""
    return _svg(curves.title, f"{curves.y} over {curves.x}{scale}. {says}", BOTTOM + 40, parts)


def _horizontal(value: float, name: str, lines: Sequence[Line], y: Axis) -> str:
    """Returns the line at a value, its name at the end from which the curves are farther away."""
    at = y.at(value)
    left, right = (min(abs(y.at(line.points[end][1]) - at) for line in lines) for end in (0, -1))
    place, anchor = (LEFT + 4, "start") if left > right else (RIGHT, "end")
    mark = f'<line class="mark" x1="{LEFT}" x2="{RIGHT}" y1="{_n(at)}" y2="{_n(at)}"/>'
    return mark + _text(place, at - 4, name, anchor=anchor)


def swatch(place: int) -> str:
    """Returns the sample of a curve's line and shape, for a legend."""
    return (
        '<svg class="swatch" viewBox="0 0 34 12" aria-hidden="true">'
        f'<path class="curve s{place}" d="M1 6H33"/>{_shape(place, 17, 6)}</svg>'
    )


def whisker_chart(comparison: Comparison) -> str:
    """Returns a dot with a whisker for each estimate, against the reference's line and band, as SVG.

    Estimates that may not be used do not stretch the axis far: an arrow says that a whisker goes on.
    """
    rows, reference = comparison.rows, comparison.reference
    axis, axis_ticks = _whisker_axis(comparison)
    names = [("mark", comparison.reference_name, reference)]
    if comparison.simulated is not None:
        names.append(("mark simulated", "in simulation", comparison.simulated))
    start = 10 + 14 * len(names)  # below the names
    bottom = start + _ROW * len(rows)
    parts = [_vertical(*one, axis, 12 + 14 * place, bottom) for place, one in enumerate(names)]
    for place, row in enumerate(rows):
        top = start + _ROW * place
        parts.append(_text(_EDGE_LEFT, top + 14, row.name.replace("_", " ")))
        parts.append(_text(_EDGE_RIGHT, top + 14, row.verdict.value, anchor="end", kind=_VERDICT_CLASS[row.verdict]))
        parts.append(_whisker(row.figure, row.verdict, axis, top + 28))
    parts.append(f'<line class="axis" x1="{_EDGE_LEFT}" x2="{_EDGE_RIGHT}" y1="{bottom}" y2="{bottom}"/>')
    for tick in axis_ticks:
        at = axis.at(tick)
        if _EDGE_LEFT <= at <= _EDGE_RIGHT:
            parts.append(f'<line class="axis" x1="{_n(at)}" x2="{_n(at)}" y1="{bottom}" y2="{bottom + 4}"/>')
            parts.append(_centred(at, bottom + 17, number(tick), kind="tick"))
    says = "; ".join(f"{row.name} {number(row.figure.value)}, {row.verdict.value}" for row in rows)
    beside = "; ".join(f"{name} {number(figure.value)}" for _, name, figure in names)
    says = f"{beside}; {says}"
    return _svg(f"{comparison.outcome}, {comparison.unit}", says, bottom + 24, parts)


def _vertical(kind: str, name: str, figure: Interval, axis: Axis, top: int, bottom: int) -> str:
    """Returns the line and band of what estimates are compared with, from below its name."""
    if figure.low is None or figure.high is None or figure.value is None:
        return ""
    low, high, value = (axis.at(one) for one in (figure.low, figure.high, figure.value))
    return (
        f'<rect class="{kind.replace("mark", "band")}" x="{_n(low)}" y="{top + 6}" width="{_n(max(high - low, 0.5))}" '
        f'height="{bottom - top - 6}"/>'
        f'<line class="{kind}" x1="{_n(value)}" x2="{_n(value)}" y1="{top + 6}" y2="{bottom}"/>'
        + _centred(value, top, f"{name} {number(figure.value)}")
    )


def bar_chart(actions: Sequence[ActionShare]) -> str:
    """Returns up to three bars for each action, the most frequent MOST_BARS of them, as SVG."""
    shown = sorted(actions, key=lambda one: -max(_shares(one), default=0.0))[:MOST_BARS]
    largest = max((share for one in shown for share in _shares(one)), default=0.0) or 1.0
    axis = Axis(low=0.0, high=largest, start=_EDGE_LEFT, stop=400)
    parts, top = [], 4
    for one in shown:
        parts.append(_text(_EDGE_LEFT, top + 12, _cut(one.name)))
        top += 17
        for kind, share in enumerate((one.logged, one.greedy, one.propensity)):
            if share is None:
                continue
            width = axis.at(share) - _EDGE_LEFT
            parts.append(f'<rect class="bar b{kind}" x="{_EDGE_LEFT}" y="{top}" width="{_n(width)}" height="{_BAR}"/>')
            parts.append(_text(axis.at(share) + 5, top + _BAR, f"{share:.1%}", kind="tick"))
            top += _BAR + 3
        top += 8
    says = "; ".join(f"{one.name}: " + ", ".join(f"{share:.1%}" for share in _shares(one)) for one in shown)
    return _svg("Shares of actions", says, top, parts)


def _shares(one: ActionShare) -> list[float]:
    return [share for share in (one.logged, one.greedy, one.propensity) if share is not None]


def _axes(
    lines: Sequence[Line], mark: tuple[float, str] | None
) -> tuple[Axis, Axis, tuple[float, ...], tuple[float, ...]]:
    xs = [point[0] for line in lines for point in line.points]
    ys = [value for line in lines for _, *values in (*line.points,) for value in values]
    ys += [end for line in lines for ends in line.band for end in ends]
    ys += [] if mark is None else [mark[0]]
    x_ticks, low, high = ticks(min(xs), max(xs)), min(ys), max(ys)
    # the x axis ends with the data: the last figure is the one that counts
    x = Axis(low=min(xs), high=max(xs) if max(xs) > min(xs) else min(xs) + 1, start=LEFT, stop=RIGHT)
    x_ticks = tuple(tick for tick in x_ticks if x.low <= tick <= x.high)
    if low > 0 and high / low >= _LOGARITHMIC_FROM:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        y_ticks = tuple(10.0**power for power in powers)[:: 1 + len(powers) // 8]
        y = Axis(low=10.0 ** powers[0], high=10.0 ** powers[-1], start=BOTTOM, stop=TOP, logarithmic=True)
    else:
        y_ticks = ticks(low, high)
        y = Axis(low=y_ticks[0], high=y_ticks[-1], start=BOTTOM, stop=TOP)
    return x, y, x_ticks, y_ticks


def _grid(x: Axis, y: Axis, x_ticks: Sequence[float], y_ticks: Sequence[float]) -> str:
    parts = [f'<line class="axis" x1="{LEFT}" x2="{RIGHT}" y1="{BOTTOM}" y2="{BOTTOM}"/>']
    for tick in y_ticks:
        at = y.at(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{_n(at)}" y2="{_n(at)}"/>')
        parts.append(_text(LEFT - 6, at + 4, _short(tick), anchor="end", kind="tick"))
    for tick in x_ticks:
        parts.append(_centred(x.at(tick), BOTTOM + 16, _short(tick), kind="tick"))
    return "".join(parts)


def _curve(line: Line, x: Axis, y: Axis, place: int) -> str:
    places = [(x.at(one), y.at(value)) for one, value in line.points]
    band = ""
    if line.band:
        upper = [(at, y.at(high)) for (at, _), (_, high) in zip(places, line.band, strict=True)]
        lower = [(at, y.at(low)) for (at, _), (low, _) in zip(places, line.band, strict=True)]
        band = f'<path class="fill f{place}" d="{_path([*upper, *reversed(lower)])}Z"/>'
    # shapes every seventh of the way, and at the end, tell crossing lines apart without colour
    every = max(len(places) // 7, 1)
    shapes = "".join(_shape(place, *places[i]) for i in sorted({*range(0, len(places), every), len(places) - 1}))
    return f'{band}<path class="curve s{place}" d="{_path(places)}"/>{shapes}'


def _path(places: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{_n(x)} {_n(y)}" for x, y in places)


def _shape(place: int, x: float, y: float) -> str:
    """Returns the mark of a curve: circle, square, diamond, triangle, then the same hollow."""
    draw = (
        f"M{_n(x - 3.5)} {_n(y)}a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0 -7 0Z",
        f"M{_n(x - 3.2)} {_n(y - 3.2)}h6.4v6.4h-6.4Z",
        f"M{_n(x)} {_n(y - 4.5)}l4.5 4.5l-4.5 4.5l-4.5 -4.5Z",
        f"M{_n(x)} {_n(y - 4)}l4.2 7.4h-8.4Z",
    )[place % 4]
    return f'<path class="shape {"hollow" if place >= 4 else "solid"} s{place}" d="{draw}"/>'


_VERDICT_CLASS = {Verdict.TRUSTWORTHY: "good", Verdict.WIDE: "unclear", Verdict.DO_NOT_USE: "bad"}


def _whisker_axis(comparison: Comparison) -> tuple[Axis, tuple[float, ...]]:
    """Returns an axis over the reference and all usable intervals; unusable ones widen it by that width at most."""
    usable = [row.figure for row in comparison.rows if row.verdict is not Verdict.DO_NOT_USE]
    others = [row.figure for row in comparison.rows if row.verdict is Verdict.DO_NOT_USE]
    simulated = [] if comparison.simulated is None else [comparison.simulated]
    core = _finite([comparison.reference, *simulated, *usable]) or _finite(others) or [0.0]
    low, high = min(core), max(core)
    width = high - low or abs(high) * 0.1 or 1.0
    every = [*core, *_finite(others)]
    ends = ticks(max(min(every), low - width), min(max(every), high + width))
    return Axis(low=ends[0], high=ends[-1], start=_EDGE_LEFT, stop=_EDGE_RIGHT), ends


def _finite(figures: Sequence[Interval]) -> list[float]:
    values = (one for figure in figures for one in (figure.value, figure.low, figure.high))
    return [one for one in values if one is not None and math.isfinite(one)]


def _whisker(figure: Interval, verdict: Verdict, axis: Axis, y: float) -> str:
    kind, parts = _VERDICT_CLASS[verdict], []
    if figure.value is None or not math.isfinite(figure.value):
        return _text(_EDGE_LEFT, y + 6, "undefined on this log", kind="tick")
    if figure.low is not None and figure.high is not None:
        ends = [axis.at(one) for one in (figure.low, figure.high)]
        low, high = (min(max(end, _EDGE_LEFT), _EDGE_RIGHT) for end in ends)
        parts.append(f'<line class="whisker {kind}" x1="{_n(low)}" x2="{_n(high)}" y1="{_n(y)}" y2="{_n(y)}"/>')
        for inside, end, way in ((low, ends[0], -1), (high, ends[1], 1)):
            if abs(inside - end) < 1e-9:
                parts.append(f'<line class="whisker {kind}" x1="{_n(end)}" x2="{_n(end)}" y1="{y - 4}" y2="{y + 4}"/>')
            else:
                parts.append(f'<path class="arrow {kind}" d="M{_n(inside)} {y - 5}l{7 * way} 5l{-7 * way} 5Z"/>')
    at = axis.at(figure.value)
    if _EDGE_LEFT <= at <= _EDGE_RIGHT:
        draw = {
            Verdict.TRUSTWORTHY: f"M{_n(at - 5)} {y}a5 5 0 1 0 10 0a5 5 0 1 0 -10 0Z",
            Verdict.WIDE: f"M{_n(at)} {y - 6}l6 6l-6 6l-6 -6Z",
            Verdict.DO_NOT_USE: f"M{_n(at - 4.5)} {y - 4.5}l9 9M{_n(at - 4.5)} {y + 4.5}l9 -9",
        }[verdict]
        parts.append(f'<path class="dot {kind}" d="{draw}"/>')
    return "".join(parts)


def _svg(title: str, says: str, height: float, parts: Sequence[str]) -> str:
    label = escape(f"{title}: {says}")
    return (
        f'<svg class="chart" role="img" aria-label="{label}" viewBox="0 {-_ABOVE} {WIDTH} {_n(height + _ABOVE)}">'
        f"<title>{escape(title)}</title>{''.join(parts)}</svg>"
    )


def _text(x: float, y: float, words: str, *, anchor: str = "start", kind: str = "label") -> str:
    return f'<text class="{kind}" x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}">{escape(words)}</text>'


def _centred(x: float, y: float, words: str, *, kind: str = "label") -> str:
    """Returns words around a place, or as near to it as the drawing's edges let a phone's letters come."""
    half = len(words) * _LETTER / 2
    return _text(min(max(x, half), WIDTH - half), y, words, anchor="middle", kind=kind)


def _cut(name: str) -> str:
    return name if len(name) <= 60 else f"{name[:59]}…"


def _short(value: float) -> str:
    """Returns a tick's number in at most seven characters."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.4g}{letter}"
    return f"{value:.4g}"


def _n(value: float) -> str:
    """Returns a coordinate to a tenth of a unit."""
    return f"{value:.1f}".removesuffix(".0")

"""Figures with intervals, and their text in log lines, the report page, the model card and JSON."""

import math
from dataclasses import dataclass
from statistics import NormalDist


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A figure and the ends of its interval; NaN if undefined."""

    value: float
    low: float
    high: float

    @classmethod
    def normal(cls, value: float, error: float, level: float) -> "Interval":
        """Returns the interval of a mean from its standard error, by the central limit theorem."""
        half = NormalDist().inv_cdf((1 + level) / 2) * error
        return cls(value=value, low=value - half, high=value + half)

    def within(self, low: float, high: float) -> "Interval":
        """Returns the part of the interval in a range, extended to contain the figure."""
        return Interval(
            value=self.value,
            low=min(max(self.low, low), self.value) if self.low < low else self.low,
            high=max(min(self.high, high), self.value) if self.high > high else self.high,
        )

    def json(self) -> dict[str, float | None]:
        """Returns value, low and high, null if undefined."""
        return {
            "value": none_if_infinite(self.value),
            "low": none_if_infinite(self.low),
            "high": none_if_infinite(self.high),
        }

    def tags(self, name: str) -> dict[str, float]:
        """Returns the interval as TensorBoard tags: `{name}/mean`, `/lower` and `/upper`."""
        return {f"{name}/mean": self.value, f"{name}/lower": self.low, f"{name}/upper": self.high}

    @property
    def defined(self) -> bool:
        """Whether the figure and both ends are finite."""
        return all(map(math.isfinite, (self.value, self.low, self.high)))

    @property
    def side(self) -> int:
        """1 or -1 if the whole interval lies above or below 0, else 0."""
        return int(self.low > 0) - int(self.high < 0)

    def excludes(self, value: float) -> bool:
        """Returns whether a value lies outside the interval; false if the interval is undefined."""
        return value < self.low or value > self.high

    def __str__(self) -> str:
        if not math.isfinite(self.value) or (math.isnan(self.low) and math.isnan(self.high)):
            return number(self.value)
        value, low, high = map(self.format_end, (self.value, self.low, self.high))
        return f"{value} ({low} to {high})"

    def format_end(self, end: float) -> str:
        """Returns a figure as text, with as many decimals as show two digits of the interval's width."""
        width = self.high - self.low
        integers = self.defined and all(figure == int(figure) for figure in (self.value, self.low, self.high))
        if integers or not (self.defined and 0 < width < 1e7):
            return number(end)
        decimals = max(1 - math.floor(math.log10(width)), 0)
        text = f"{end:,.{decimals}f}"
        if not text.strip("-0."):
            text = text.lstrip("-")
        vanished = abs(end) > 1e-6 * width and not text.strip("-0.")  # an end near 0 keeps its sign
        return number(end) if vanished or decimals > 6 else text


def none_if_infinite(value: float | None) -> float | None:
    """Returns a figure, or None (null in JSON) for NaN and infinity."""
    return value if value is not None and math.isfinite(value) else None


def number(value: float | None) -> str:
    """Returns a figure as text with three digits, in whole units from 1,000 to a million; "–" if it is undefined."""
    if value is None or not math.isfinite(value):
        return "–"
    if 1e6 <= abs(value) < 1e12:
        value = float(f"{value:.3g}")
    units = abs(value) < 1e12 and (abs(value) >= 999.5 or value == int(value))
    return f"{round(value):,}" if units else f"{value:.3g}"


def effective(count: float, unit: str) -> str:
    """Returns an effective number with its unit, such as "12.5 effective rows" or "1 effective episode"."""
    text = number(count)
    return f"{text} effective {unit}{'' if text == '1' else 's'}"


def percent(share: float | None) -> str:
    """Returns a share as a percentage with three digits; "–" if it is undefined."""
    return "–" if share is None or not math.isfinite(share) else f"{100 * share:.3g}%"

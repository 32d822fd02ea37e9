"""Figures with intervals: one text, one JSON form, one set of tags."""

import math

import pytest
from helpers.reports import UNDEFINED

from reagent_lite.evaluation.interval import Interval, number


def test_text_json_and_tags() -> None:
    half = Interval(value=1234.5, low=0.5, high=math.inf)
    assert [str(interval) for interval in (half, UNDEFINED, Interval(value=5.8, low=math.nan, high=math.nan))] == [
        "1,234 (0.5 to –)", "–", "5.8",
    ]  # fmt: skip
    assert half.json() == {"value": 1234.5, "low": 0.5, "high": None}
    assert half.tags("a") == {"a/mean": 1234.5, "a/lower": 0.5, "a/upper": math.inf}


@pytest.mark.parametrize(
    ("value", "text"),
    [(-0.0, "0"), (0.12345, "0.123"), (-7.0, "-7"), (999.6, "1,000"), (-1234.4, "-1,234"), (999_999.7, "1,000,000"),
     (23_456_789.0, "23,500,000"), (4.56e12, "4.56e+12"), (-1e15, "-1e+15"), (1.234e-9, "1.23e-09"), (math.inf, "–")],
)  # fmt: skip
def test_numbers_have_three_digits_or_units(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(("low", "high", "side"), [(0.1, 2.0, 1), (-2.0, -0.1, -1), (-1.0, 1.0, 0), (math.nan, 1.0, 0)])
def test_the_side_of_zero_needs_the_whole_interval(low: float, high: float, side: int) -> None:
    interval = Interval(value=0.0, low=low, high=high)
    assert (interval.side, interval.excludes(0.0), interval.defined) == (side, bool(side), math.isfinite(low))

"""Charts by hand arithmetic: where curves, whiskers and bars lie."""

import re

import pytest
from oracles.reports import around, estimated, undefined

from reagent_lite.evaluation.cpe import Estimate
from reagent_lite.evaluation.interval import Interval
from reagent_lite.evaluation.verdict import Verdict
from reagent_lite.report.charts import AxisScale, Curves, Line, curve_chart, interval_chart, thinned, ticks


def whiskers(*rows: Estimate, simulated: Interval | None = None, **references: Interval) -> str:
    marks = {"logged policy": around(10.0, 1.0), **references}
    return interval_chart("t", [(row.name, row.figure, row.verdict) for row in rows], marks, simulated).svg


def test_a_scale_is_linear_between_its_ends_or_in_powers() -> None:
    assert AxisScale(low=0.0, high=10.0, start=60.0, stop=460.0)(2.5) == 160.0  # 60 + 400 / 4
    assert AxisScale(low=1.0, high=100.0, start=0.0, stop=10.0, logarithmic=True)(10.0) == 5.0


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 10.0, (0, 2, 4, 6, 8, 10)),
        (0.3, 0.94, (0.2, 0.4, 0.6, 0.8, 1.0)),
        (-7.0, 3.0, (-8, -6, -4, -2, 0, 2, 4)),
        (5.0, 5.0, (5, 6)),
        (0.0, 0.0, (0.0, 0.2)),
        (1.0, 1.0 + 2e-16, (1.0, 1.2)),
        (-2.0, -2.0, (-2.0, -1.5)),
    ],
)
def test_ticks_are_round(low: float, high: float, expected: tuple[float, ...]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


def test_ticks_of_a_narrow_range_are_told_apart() -> None:
    references = {"logged policy": around(1.0005, 0.0001)}
    drawn = whiskers(estimated("IPS", 1.0009, 0.0009), **references)
    labels = re.findall(r'<text class="tick"[^>]*>([^<]+)<', drawn)
    assert labels == ["1", "1.0005", "1.001", "1.0015", "1.002"]


def test_a_curve_goes_through_its_points() -> None:
    line = Line(name="loss", points=((0.0, 0.0), (5.0, 4.0), (10.0, 10.0)))
    drawn = curve_chart(Curves(title="Loss", x="steps", y="loss", lines=(line,))).svg
    # x: 58 + 408 * (0, .5, 1) = 58, 262, 466;  y: 246 - 220 * (0, .4, 1) = 246, 158, 26
    assert '<path class="curve s0" d="M58 246L262 158L466 26">' in drawn
    assert "loss ends at 10" in drawn


def test_curves_over_many_powers_have_a_logarithmic_axis() -> None:
    line = Line(name="w", points=((0.0, 1.0), (1.0, 0.1), (2.0, 0.001)))
    drawn = curve_chart(Curves(title="W", x="steps", y="w", lines=(line,))).svg
    # powers -3 to 0 over 220 units: 0.1 lies two thirds up, 246 - 146.7 = 99.3
    assert 'd="M58 26L262 99.3L466 246"' in drawn
    assert "logarithmic axis" in drawn


def test_dots_and_whiskers_lie_at_their_values() -> None:
    drawn = whiskers(estimated("IPS", 12.0, 2.0))
    # values 9 to 14: ticks 9 to 14 over 14..466, 90.4 a unit; whisker 10 to 14: 104.4 and 466; dot at 12: 285.2 - 5
    assert '<line class="whisker good" x1="104.4" x2="466" y1="52" y2="52">' in drawn
    assert 'd="M280.2 52a5 5' in drawn
    assert '<line class="mark" x1="104.4" x2="104.4"' in drawn
    assert '<rect class="band" x="14" y="18" width="180.8"' in drawn  # 9 to 11


def test_a_second_mark_has_a_line_of_its_own() -> None:
    drawn = whiskers(estimated("IPS", 12.0, 1.0), simulated=around(12.0, 2.0))
    # 9 to 14 in ticks of 1 over 14..466, 90.4 a unit: 12 lies at 285.2; a second name moves the first row down by 14
    assert '<line class="mark simulated" x1="285.2" x2="285.2" y1="32"' in drawn
    assert '<line class="whisker good" x1="194.8" x2="375.6" y1="66" y2="66">' in drawn  # 11 to 13
    assert ">in simulation 12<" in drawn
    drawn = whiskers(estimated("IPS", 12.0, 1.0), continued=around(12.0, 0.01))
    assert '<line class="mark" x1="353" x2="353" y1="32"' in drawn  # 9 to 13: 113 a unit
    assert ">continued 12.000<" in drawn  # with the digits that its interval has in the table


def test_a_wild_estimate_that_may_not_be_used_leaves_the_others_readable() -> None:
    drawn = whiskers(estimated("IPS", 12.0, 1.0), estimated("PDIS", 1e9, 1e9, Verdict.DO_NOT_USE))
    # usable values are 9 to 13, so the axis goes at most one such width further: 5 to 17, in ticks of 5
    assert re.findall(r'<text class="tick"[^>]*>([^<]*)', drawn) == ["5", "10", "15", "20"]
    assert re.findall('<line class="whisker bad" x1="14" x2="466"', drawn)  # from edge to edge, without ends
    assert drawn.count("whisker bad") == 1
    assert "1,000,000,000, do not use" in drawn


def test_an_undefined_estimate_is_said_to_be_one() -> None:
    assert "undefined on this log" in whiskers(undefined("IPS"))


def test_thinning_keeps_ends_and_spikes() -> None:
    points = [(float(i), 0.0) for i in range(10_000)]
    points[7777], points[1234] = (7777.0, 9.0), (1234.0, -9.0)
    kept = thinned(points, 500)
    assert len(kept) <= 500
    assert {kept[0][0], kept[-1][0]} == {0.0, 9999.0}
    assert {(7777.0, 9.0), (1234.0, -9.0)} <= set(kept)
    assert list(kept) == sorted(kept)
    assert thinned(points[:500], 500) == tuple(points[:500])

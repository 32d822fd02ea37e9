"""Charts by hand arithmetic: where curves, whiskers and bars lie."""

import re

import pytest
from helpers.reports import around, estimated, undefined

from reagent_lite.evaluation.cpe import Estimate
from reagent_lite.evaluation.interval import Interval
from reagent_lite.evaluation.verdict import Verdict
from reagent_lite.report.charts import Curves, Line, curve_chart, interval_chart, thin, ticks


def whiskers(*rows: Estimate, simulated: Interval | None = None, **references: Interval) -> str:
    marks = {"logged policy": around(10.0, 1.0), **references}
    return interval_chart("t", [(row.name, row.figure, row.verdict) for row in rows], marks, simulated).svg


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


def tick_labels(drawn: str) -> list[str]:
    return re.findall(r'<text class="tick"[^>]*>([^<]+)<', drawn)


def test_ticks_of_a_narrow_range_are_told_apart() -> None:
    assert tick_labels(whiskers(estimated("IPS", 1.0009, 0.0009), **{"logged policy": around(1.0005, 0.0001)})) == [
        "1", "1.0005", "1.001", "1.0015", "1.002",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("points", "path", "words"),
    [
        # x: 58 + 408 * (0, .5, 1) = 58, 262, 466;  y: 246 - 220 * (0, .4, 1) = 246, 158, 26
        (((0.0, 0.0), (5.0, 4.0), (10.0, 10.0)), "M58 246L262 158L466 26", "loss ends at 10"),
        # powers -3 to 0 over 220 units: 0.1 lies two thirds up, 246 - 146.7 = 99.3
        (((0.0, 1.0), (1.0, 0.1), (2.0, 0.001)), "M58 26L262 99.3L466 246", "logarithmic axis"),
    ],
)
def test_a_curve_goes_through_its_points(points: tuple[tuple[float, float], ...], path: str, words: str) -> None:
    drawn = curve_chart(Curves(title="Loss", x="steps", y="loss", lines=(Line(name="loss", points=points),))).svg
    assert [part for part in (f'<path class="curve s0" d="{path}">', words) if part not in drawn] == []


def test_the_last_point_of_other_rows_is_a_mark_of_its_own() -> None:
    points = ((0.0, 0.0), (5.0, 4.0), (10.0, 10.0))
    line = Line(name="loss", points=points, band=((0.0, 0.0), (3.0, 5.0), (9.0, 10.0)), final=True)
    chart = curve_chart(Curves(title="Loss", x="steps", y="loss", lines=(line,)))
    assert '<path class="curve s0" d="M58 246L262 158">' in chart.svg
    assert '<circle class="final s0" cx="466" cy="26" r="4">' in chart.svg
    assert '<line class="curve s0" x1="466" x2="466" y1="48" y2="26">' in chart.svg  # 9 to 10
    assert '<path class="fill s0" d="M58 246L262 136L262 180L58 246Z">' in chart.svg
    assert [name for _, name in chart.legend] == [
        "loss", "the final evaluation, of all rows or of other episodes",
    ]  # fmt: skip
    assert chart.table is not None
    assert chart.table.rows[-1] == ("loss", 10.0, 10.0)
    one = curve_chart(Curves(title="t", x="x", y="y", lines=(Line(name="v", points=points[1:], final=True),)))
    assert '<path class="curve s0" d="M58 246h0">' in one.svg


def test_no_line_crosses_a_text() -> None:
    """Rows begin at 24 + 14 for each further mark and are 44 high; their text ends 20 below their top."""
    rows = [estimated(f"E{number}", 10.0 + number, 2.0) for number in range(3)]
    drawn = whiskers(*rows, **{"other policy": around(10.2, 0.5)}, simulated=around(12.0, 2.0))
    start = 10 + 14 * 3
    texts = [(start + 44 * row, start + 44 * row + 20) for row in range(3)]
    spans = [
        (float(x), *map(float, ends))
        for x, *ends in re.findall(
            r'<line class="mark[^"]*" x1="([\d.]+)" x2="[\d.]+" y1="([\d.]+)" y2="([\d.]+)">', drawn
        )
    ]
    assert len(spans) == 3 * 3 + 2  # in each row, and from the names but the first, which the second would hide
    assert not [span for span in spans for top, bottom in texts if span[1] < bottom and span[2] > top]


IPS = estimated("IPS", 12.0, 1.0)


@pytest.mark.parametrize(
    ("row", "marks", "parts"),
    [
        # values 9 to 14: ticks 9 to 14 over 14..466, 90.4 a unit; whisker 10 to 14: 104.4 and 466; dot at 12: 285.2 - 5
        (estimated("IPS", 12.0, 2.0), {}, [
            '<line class="whisker good" x1="104.4" x2="466" y1="52" y2="52">',
            'd="M280.2 52a5 5',
            '<line class="mark" x1="104.4" x2="104.4" y1="18" y2="24">',  # from its name
            '<line class="mark" x1="104.4" x2="104.4" y1="44" y2="68">',  # below the row's text to the axis
            '<rect class="band" x="14" y="44" width="180.8" height="24"',  # 9 to 11
        ]),
        # 9 to 14, 90.4 a unit: 12 lies at 285.2; the name of a second mark moves the first row down by 14
        (IPS, {"simulated": around(12.0, 2.0)}, [
            '<line class="mark simulated" x1="285.2" x2="285.2" y1="32"',
            '<line class="whisker good" x1="194.8" x2="375.6" y1="66" y2="66">',  # 11 to 13
            ">in simulation 12<",
        ]),
        # 9 to 13: 113 a unit; with the digits that its interval has in the table
        (IPS, {"continued": around(12.0, 0.01)}, [
            '<line class="mark" x1="353" x2="353" y1="32"', ">continued 12.000<",
        ]),
        (undefined("IPS"), {}, ["undefined on this log"]),
    ],
)  # fmt: skip
def test_estimates_and_marks_lie_at_their_values(row: Estimate, marks: dict[str, Interval], parts: list[str]) -> None:
    drawn = whiskers(row, **marks)
    assert [part for part in parts if part not in drawn] == []


def test_a_wild_estimate_that_may_not_be_used_leaves_the_others_readable() -> None:
    drawn = whiskers(IPS, estimated("PDIS", 1e9, 1e9, Verdict.DO_NOT_USE))
    # usable values are 9 to 13, so the axis goes at most one such width further: 5 to 17, in ticks of 5
    assert tick_labels(drawn) == ["5", "10", "15", "20"]
    assert re.findall('<line class="whisker bad" x1="(.+?)" x2="(.+?)"', drawn) == [("14", "466")]  # edge to edge
    assert "1,000,000,000, do not use" in drawn


def test_thinning_keeps_ends_and_spikes() -> None:
    points = [(float(i), {7777: 9.0, 1234: -9.0}.get(i, 0.0)) for i in range(10_000)]
    kept = thin(points, 500)
    assert len(kept) <= 500
    assert {(0.0, 0.0), (7777.0, 9.0), (1234.0, -9.0), (9999.0, 0.0)} <= set(kept)
    assert list(kept) == sorted(kept)
    assert thin(points[:500], 500) == tuple(points[:500])

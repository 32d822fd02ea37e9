"""The report page from plain data: its figures, its drawings by hand arithmetic, and names that would break it."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from reagent_lite.evaluation.charts import Axis, bar_chart, curve_chart, thinned, ticks, whisker_chart
from reagent_lite.evaluation.verdict import Verdict
from reagent_lite.evaluation.webpage import render
from reagent_lite.evaluation.webpage_candidates import CandidateFeature, Candidates, PropensityBin
from reagent_lite.evaluation.webpage_content import (
    ActionShare,
    Comparison,
    Curves,
    Estimated,
    Feature,
    FeatureShift,
    Interval,
    Line,
    Report,
    Simulated,
    Table,
    Weights,
    compared,
    number,
    weighed,
)
from reagent_lite.evaluation.webpage_headline import headlines
from reagent_lite.evaluation.webpage_table import breakable, table

NASTY = "<script>alert(1)</script>\"'&"
VOID = {"meta", "link", "wbr"}


class Page(HTMLParser):
    """Reads a document, holds every tag to its end, and collects headings, cells and tag names."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
            self.text.setdefault(tag, []).append("")
        if tag == "svg":
            assert {"aria-label", "aria-hidden"} & dict(attributes).keys()

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        for tag in set(self.open):
            self.text[tag][-1] += data


def estimated(name: str, value: float, half: float, verdict: Verdict = Verdict.TRUSTWORTHY) -> Estimated:
    """An estimate with a symmetric interval, against a reference of 10."""
    figure = Interval(value=value, low=value - half, high=value + half)
    difference = Interval(value=value - 10, low=value - half - 10, high=value + half - 10)
    return Estimated(name=name, figure=figure, difference=difference, ratio=value / 10, verdict=verdict, reason="why")


def comparison(*rows: Estimated) -> Comparison:
    return Comparison(outcome="Reward", unit="return of an episode", decides=True, reference_name="logged policy",
                      reference=Interval(value=10.0, low=9.0, high=11.0), rows=rows)  # fmt: skip


def full(name: str) -> Report:
    """A report with every section, all of whose words are `name`."""
    line = Line(name=name, points=((0.0, 1.0), (10.0, 3.0)), band=((0.5, 1.5), (2.0, 4.0)))
    return Report(
        title=name, facts=((name, name),), notes=(name,),
        simulated=(Simulated(name=name, returns=Interval(value=5.0, low=4.0, high=6.0)),),
        simulated_note=name,
        comparisons=(comparison(replace(estimated("IPS", 12.0, 1.0), name=name, reason=name)),),
        weights=Weights(facts=((name, name),), effective_episodes=(9.0, 4.0), mean_weight=(1.0, 0.5), enough=5.0,
                        judged_step=1),
        curves=(Curves(title=name, x=name, y=name, lines=(line,), mark=(2.0, name)),),
        actions=(ActionShare(name=name, logged=0.75, greedy=0.25, propensity=0.5),),
        candidates=Candidates(
            rows=3, same=0.5, propensity=0.25, policy=0.75, lengths=((name, 1.0),),
            bins=(PropensityBin(low=0.0, high=0.1, rows=1.0, propensity=0.05, policy=0.125),),
            features=(CandidateFeature(name=name, logged=(1.5, 2.5), policy=(3.5, 4.5), difference=0.625),),
        ),
        features=(Feature(name=name, column=name, type=name, present=0.5, mean=1.25, stddev=None),),
        shifts=(FeatureShift(name=name, column=name, verdict=name, psi=0.125, ks=None, present=(0.5, 1.0),
                             mean=(2.0, 3.0)),),
        lineage=(Table(title=name, head=(name, name), rows=((name, name),)),),
        config={name: name},
    )  # fmt: skip


def test_a_full_page_is_well_formed_and_needs_nothing_but_itself() -> None:
    text = render(full("one"))
    page = Page(text)
    assert page.text["h2"] == ["Estimates", "Returns in simulation", "Weights and overlap", "Learning curves",
                               "Actions", "Features", "Drift", "Data lineage", "Config"]  # fmt: skip
    assert "script" not in page.tags
    assert re.findall(r"(?:https?:|//|url\(|@import)[^\s<]*", text) == []
    assert page.text["caption"].count("Shares of actions on judged rows") == 1


def test_words_from_outside_cannot_become_tags() -> None:
    text = render(full(NASTY))
    page = Page(text)
    assert "script" not in page.tags
    assert "<script" not in text.lower()
    assert page.text["h1"] == [NASTY]
    assert [row for row in page.text["tr"] if "75.00%" in row] == [f"{NASTY}75.00%25.00%50.00%"]


def test_an_empty_report_has_no_section_and_says_so() -> None:
    page = Page(render(Report(title="t")))
    assert "section" not in page.tags
    assert "table" not in page.tags
    assert page.text["strong"] == ["? Nothing was evaluated."]


@pytest.mark.parametrize(
    ("part", "section"),
    [
        ("comparisons", "Estimates"), ("simulated", "Returns in simulation"), ("weights", "Weights and overlap"),
        ("curves", "Learning curves"), ("features", "Features"), ("shifts", "Drift"),
        ("lineage", "Data lineage"), ("config", "Config"),
    ],
)  # fmt: skip
def test_what_is_missing_leaves_no_section(part: str, section: str) -> None:
    empty = {part: None if part in ("weights", "config") else ()}
    assert section not in Page(render(replace(full("one"), **empty))).text["h2"]


def test_tables_say_the_figures_given() -> None:
    row = replace(estimated("MAGIC", 12.5, 1.0), reason="enough of them")
    page = Page(render(Report(title="t", comparisons=(comparison(row),))))
    cells = page.text["td"]
    assert cells[5:] == ["12.5 (11.5 to 13.5)", "2.5 (1.5 to 3.5)", "1.25", "● trustworthy", "enough of them"]
    assert cells[0] == "10 (9 to 11)"


def test_figures_are_cut_to_four_digits() -> None:
    values = [0.123456, 12.0, 1234.4, 12345678.9, None, float("nan"), -0.00012345]
    assert [number(one) for one in values] == ["0.1235", "12", "1,234", "1.235e+07", "–", "–", "-0.0001234"]


def test_an_axis_is_linear_between_its_ends_or_in_powers() -> None:
    assert Axis(low=0.0, high=10.0, start=60.0, stop=460.0).at(2.5) == 160.0  # 60 + 400 / 4
    assert Axis(low=1.0, high=100.0, start=0.0, stop=10.0, logarithmic=True).at(10.0) == 5.0


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 10.0, (0, 2, 4, 6, 8, 10)), (0.3, 0.94, (0.2, 0.4, 0.6, 0.8, 1.0)),
        (-7.0, 3.0, (-8, -6, -4, -2, 0, 2, 4)),
        (5.0, 5.0, (5, 6)), (0.0, 0.0, (0.0, 0.2)), (1.0, 1.0 + 2e-16, (1.0, 1.2)), (-2.0, -2.0, (-2.0, -1.5)),
    ],
)  # fmt: skip
def test_ticks_are_round(low: float, high: float, expected: tuple[float, ...]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


def test_a_curve_goes_through_its_points() -> None:
    line = Line(name="loss", points=((0.0, 0.0), (5.0, 4.0), (10.0, 10.0)))
    drawn = curve_chart(Curves(title="Loss", x="steps", y="loss", lines=(line,)))
    # x: 58 + 408 * (0, .5, 1) = 58, 262, 466;  y: 246 - 220 * (0, .4, 1) = 246, 158, 26
    assert '<path class="curve s0" d="M58 246L262 158L466 26"/>' in drawn
    assert "loss ends at 10" in drawn


def test_curves_over_many_powers_have_a_logarithmic_axis() -> None:
    line = Line(name="w", points=((0.0, 1.0), (1.0, 0.1), (2.0, 0.001)))
    drawn = curve_chart(Curves(title="W", x="steps", y="w", lines=(line,)))
    # powers -3 to 0 over 220 units: 0.1 lies two thirds up, 246 - 146.7 = 99.3
    assert 'd="M58 26L262 99.3L466 246"' in drawn
    assert "logarithmic axis" in drawn


def test_dots_and_whiskers_lie_at_their_values() -> None:
    drawn = whisker_chart(comparison(estimated("IPS", 12.0, 2.0)))
    # values 9 to 14: ticks 9 to 14 over 14..466, 90.4 a unit; whisker 10 to 14: 104.4 and 466; dot at 12: 285.2 - 5
    assert '<line class="whisker good" x1="104.4" x2="466" y1="52" y2="52"/>' in drawn
    assert 'd="M280.2 52a5 5' in drawn
    assert '<line class="mark" x1="104.4" x2="104.4"' in drawn
    assert '<rect class="band" x="14" y="18" width="180.8"' in drawn  # 9 to 11


def test_a_wild_estimate_that_may_not_be_used_leaves_the_others_readable() -> None:
    good, wild = estimated("IPS", 12.0, 1.0), estimated("PDIS", 1e9, 1e9, Verdict.DO_NOT_USE)
    drawn = whisker_chart(comparison(good, wild))
    # usable values are 9 to 13, so the axis goes at most one such width further: 5 to 17, in ticks of 5
    assert re.findall(r'<text class="tick"[^>]*>([^<]*)', drawn) == ["5", "10", "15", "20"]
    assert 'class="arrow bad"' in drawn
    assert "1e+09" in drawn


def test_an_undefined_estimate_is_said_to_be_one() -> None:
    nothing = Interval(value=None, low=None, high=None)
    row = Estimated(name="IPS", figure=nothing, verdict=Verdict.DO_NOT_USE, reason="no propensities")
    page = Page(render(Report(title="t", comparisons=(comparison(row),))))
    assert "undefined on this log" in page.text["svg"][0]
    assert page.text["td"][5:] == ["– (– to –)", "–", "–", "✕ do not use", "no propensities"]


def test_bars_are_as_long_as_their_shares() -> None:
    drawn = bar_chart((ActionShare(name="a", logged=0.5, greedy=0.25, propensity=None),))
    # the largest share fills 14 to 400: 386 and 193
    assert re.findall(r'<rect class="bar b(\d)" x="14" y="\d+" width="([\d.]+)"', drawn) == [("0", "386"), ("1", "193")]


def test_thinning_keeps_ends_and_spikes() -> None:
    points = [(float(i), 0.0) for i in range(10_000)]
    points[7777], points[1234] = (7777.0, 9.0), (1234.0, -9.0)
    kept = thinned(points, 500)
    assert len(kept) <= 500
    assert {kept[0][0], kept[-1][0]} == {0.0, 9999.0}
    assert {(7777.0, 9.0), (1234.0, -9.0)} <= set(kept)
    assert list(kept) == sorted(kept)
    assert thinned(points[:500], 500) == tuple(points[:500])


@pytest.mark.parametrize(
    ("rows", "state", "sentence"),
    [
        ([estimated("a", 12, 1), estimated("b", 13, 1)], "good", "Better than the logged policy."),
        ([estimated("a", 8, 1), estimated("b", 20, 1, Verdict.DO_NOT_USE)], "bad", "Worse than the logged policy."),
        ([estimated("a", 12, 1), estimated("b", 10, 1)], "unclear", "No difference from the logged policy is shown by "
         "all trustworthy estimates."),
        ([estimated("a", 12, 1), estimated("b", 8, 1)], "unclear", "Trustworthy estimates contradict each other about "
         "the logged policy."),
        ([estimated("a", 12, 1, Verdict.WIDE)], "unclear", "The log does not tell whether this policy beats the logged "
         "policy."),
    ],
)  # fmt: skip
def test_the_verdict_rests_on_trustworthy_differences(rows: list[Estimated], state: str, sentence: str) -> None:
    (found,) = headlines(Report(title="t", comparisons=(comparison(*rows),)))
    assert (found.state, found.sentence) == (state, sentence)


def interval_at(value: float, half: float) -> Interval:
    return Interval(value=value, low=value - half, high=value + half)


def simulated_state(*policies: Simulated) -> tuple[str, str]:
    (found,) = headlines(Report(title="t", simulated=policies))
    return found.state, found.sentence


def test_simulation_is_judged_by_intervals_that_do_not_meet() -> None:
    ours, random = interval_at(5.0, 1.0), interval_at(2.0, 1.0)
    found = [
        simulated_state(Simulated(name="The policy", returns=one), Simulated(name="Random actions", returns=other))
        for one, other in ((ours, random), (random, ours), (ours, ours))
    ]
    assert found == [("good", "Better than random actions in simulation."),
                     ("bad", "Worse than random actions in simulation."),
                     ("unclear", "No difference from random actions is shown in simulation.")]  # fmt: skip
    alone = simulated_state(Simulated(name="The policy", returns=ours))
    assert alone == ("unclear", "Returns 5 in simulation.")


@pytest.mark.parametrize(("difference", "state"), [(0.5, "good"), (-0.5, "bad"), (0.1, "unclear")])
def test_a_paired_difference_decides_where_intervals_meet(difference: float, state: str) -> None:
    one = Simulated(name="The model", returns=interval_at(5.0, 3.0))
    other = Simulated(name="The other", returns=interval_at(4.5, 3.0), difference=interval_at(difference, 0.25))
    assert simulated_state(one, other)[0] == state


def test_a_simulated_value_stands_beside_the_estimates() -> None:
    beside = replace(comparison(estimated("IPS", 12.0, 1.0)), simulated=interval_at(12.0, 2.0))
    text = render(Report(title="t", comparisons=(beside,)))
    page = Page(text)
    assert page.text["td"][5:10] == ["12 (10 to 14)", "", "", "", "the value that estimates aim at"]
    assert "in simulation 12" in page.text["svg"][0]
    # 9 to 14 in ticks of 1 over 14..466, 90.4 a unit: 12 lies at 285.2; a second name moves the first row down by 14
    assert '<line class="mark simulated" x1="285.2" x2="285.2" y1="32"' in text
    assert '<line class="whisker good" x1="194.8" x2="375.6" y1="66" y2="66"/>' in text  # 11 to 13
    assert "dotted line" in text


def test_returns_in_simulation_have_only_the_columns_that_are_known() -> None:
    first = Simulated(name="one", returns=interval_at(5.0, 1.0), discounted=interval_at(3.0, 1.0), cut_share=0.25)
    other = Simulated(name="two", returns=interval_at(4.0, 1.0), difference=interval_at(1.0, 0.5))
    page = Page(render(Report(title="t", simulated=(first, other))))
    assert page.text["thead"] == ["PolicyReturn of an episodeDiscounted returnone, more byCut by the time limit"]
    assert page.text["td"] == ["5 (4 to 6)", "3 (2 to 4)", "–", "25.00%", "4 (3 to 5)", "–", "1 (0.5 to 1.5)", "–"]


def test_candidates_are_told_by_their_features() -> None:
    page = Page(render(Report(title="t", candidates=full("one").candidates)))
    assert page.text["h2"] == ["Actions"]
    assert page.text["dd"] == ["3", "50.00%", "25.00%", "75.00%"]
    assert page.text["td"] == ["1.5 (2.5)", "3.5 (4.5)", "0.625", "100.00%", "5.00%", "12.50%", "100.00%"]
    assert page.text["caption"][0] == "Features of chosen candidates, largest difference first"


def test_unknown_propensities_of_candidates_are_not_shown() -> None:
    known = full("one").candidates
    assert known is not None
    page = Page(render(Report(title="t", candidates=replace(known, propensity=None, bins=()))))
    assert page.text["dd"] == ["3", "50.00%", "75.00%"]
    assert len(page.text["caption"]) == 2


def test_paths_break_behind_their_marks_and_names_behind_underscores() -> None:
    assert breakable("../data/my_log-1.json.bz2") == (
        "../data/<wbr>my_<wbr>log-<wbr>1.<wbr>json.<wbr>bz2"
    )  # fmt: skip
    assert breakable("Fitted_Q_Evaluation at -1.5 <b>") == "Fitted_<wbr>Q_<wbr>Evaluation at -1.5 &lt;b&gt;"
    assert breakable("") == ""


def test_long_tables_unfold() -> None:
    rows = [(f"row {n}", f"{n}") for n in range(31)]
    page = Page(table("t", ("Name", "Figure"), rows))
    assert page.text["summary"] == ["11 more rows"]
    assert page.text["td"] == [f"{n}" for n in range(31)]
    assert page.text["caption"] == ["t", "t, the other rows"]
    assert "summary" not in Page(table("t", ("Name", "Figure"), rows[:30])).text


def test_a_page_says_where_the_rest_stands() -> None:
    many = tuple(replace(comparison(estimated("IPS", 12.0, 1.0)), outcome=f"m{n}") for n in range(15))
    shares = tuple(ActionShare(name=f"a{n}", logged=0.01, greedy=0.01, propensity=0.01) for n in range(205))
    page = Page(render(Report(title="t", comparisons=many, actions=shares, beside="found.json")))
    assert {"3 more comparisons in found.json.", "5 more actions in found.json."} <= set(page.text["p"])


def test_an_evaluation_becomes_comparisons_and_weights() -> None:
    figure = {"value": 2.0, "low": 1.0, "high": 3.0}
    row = {
        "name": "MAGIC",
        "figure": figure,
        "difference": figure,
        "normalized": None,
        "verdict": "wide",
        "reason": "r",
    }
    family = {"logged": figure, "estimates": [row], "disagreement": figure}
    overlap = {
        "num_rows": 1200, "num_episodes": 30, "effective_rows": 400.0, "mean_weight": figure,
        "largest_row_share": 0.25, "unsupported_share": 0.0, "horizon": 40, "horizon_reached": 7, "judged_step": 3,
        "effective_episodes": 12.5, "mean_episode_weight": figure, "largest_episode_share": 0.5,
        "effective_episodes_by_step": [30.0, None], "mean_weight_by_step": [1.0, None], "cut_share": 0.125,
    }  # fmt: skip
    outcomes = [{"name": name, "one_step": family, "sequential": family} for name in ("Reward", "reward")]
    cpe = {"outcomes": outcomes, "overlap": overlap}
    sequential, one_step, *metric = compared(cpe)
    assert [one.outcome for one in metric] == ["Metric reward"] * 2  # the 2019 log has a metric of that name
    assert (sequential.decides, one_step.decides) == (True, False)
    assert sequential.rows[0].figure == Interval(value=2.0, low=1.0, high=3.0)
    weights = weighed(cpe, enough=10.0)
    assert weights is not None
    assert dict(weights.facts)["Mean weight of an episode there, should be 1"] == "2 (1 to 3)"
    assert dict(weights.facts)["Rows scored"] == "1,200"
    assert dict(weights.facts)["Effective episodes at step 3"] == "12.5"
    assert dict(weights.facts)["Episodes cut before their end"] == "12.50%"
    assert weights.effective_episodes == (30.0, None)
    assert weighed({"overlap": None}, enough=10.0) is None

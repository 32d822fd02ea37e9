"""The page from plain data: its figures, names that would break it, its limits; headlines and sections by hand."""

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from oracles.reports import (
    FIGURE,
    OVERLAP,
    Page,
    around,
    candidates,
    comparison,
    estimated,
    full,
    report_of,
    undefined,
)

from reagent_lite.evaluation.cpe import Estimate
from reagent_lite.evaluation.interval import number
from reagent_lite.evaluation.verdict import Verdict
from reagent_lite.report.content import Section, Table
from reagent_lite.report.curves import curves_of, curves_section, read_series
from reagent_lite.report.evaluation import (
    Simulated,
    actions_section,
    candidates_section,
    compared,
    estimates_section,
    headlines,
    simulated_section,
    weights_section,
)
from reagent_lite.report.markdown import findings
from reagent_lite.report.page import breakable, render
from reagent_lite.report.run import PAGE, config_section, drift_section, features_section, write_page
from reagent_lite.rl.estimators import ONE_STEP_ESTIMATORS, SEQUENTIAL_ESTIMATORS

ROOT = Path(__file__).resolve().parents[2]
NASTY = "<script>alert(1)</script>\"'&"
TITLES = ["Estimates", "Returns in simulation", "Weights and overlap", "Learning curves", "Actions", "Features",
          "Data lineage", "Config", "Candidates"]  # fmt: skip


# ---- the document


def test_a_full_page_is_well_formed_and_needs_nothing_but_itself() -> None:
    text = render(full("one"))
    page = Page(text)
    assert page.text["h2"] == TITLES
    assert "script" not in page.tags
    assert re.findall(r"(?:https?:|//|url\(|@import)[^\s<]*", text) == []
    assert page.text["caption"].count("Shares of actions on evaluated rows") == 1


def test_words_from_outside_cannot_become_tags() -> None:
    text = render(full(NASTY))
    page = Page(text)
    assert "script" not in page.tags
    assert "<script" not in text.lower()
    assert page.text["h1"] == [NASTY]
    assert [row for row in page.text["tr"] if "75.00%" in row] == [f"{NASTY}75.00%25.00%50.00%"]


def test_an_empty_report_has_no_section_and_says_so() -> None:
    empty = [estimates_section((), 0.95, ""), simulated_section((), 0.95, ""), weights_section({"overlap": None}, None),
             weights_section(None, None), actions_section({}, ""), candidates_section(None, ""),
             candidates_section({"rows": 0}, ""), features_section({}, {}, "note"), curves_section({})]  # fmt: skip
    page = Page(report_of(*empty))
    assert "section" not in page.tags
    assert "table" not in page.tags
    assert page.text["strong"] == ["? Nothing was evaluated."]


def test_template_and_style_sheet_are_in_the_wheel() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    folder = ROOT / "reagent_lite/report"
    packed = {file for pattern in patterns["reagent_lite.report"] for file in folder.glob(pattern)}
    assert packed == {file for file in folder.iterdir() if file.suffix in (".j2", ".css")}


def test_figures_are_cut_to_four_digits() -> None:
    values = [0.123456, 12.0, 1234.4, 12345678.9, None, float("nan"), -0.00012345]
    assert [number(one) for one in values] == ["0.1235", "12", "1,234", "1.235e+07", "–", "–", "-0.0001234"]
    assert str(around(12.5, 1.0)) == "12.5 (11.5 to 13.5)"


def test_paths_break_behind_their_marks_and_names_behind_underscores() -> None:
    assert breakable("../data/my_log-1.json.bz2") == "../data/<wbr>my_<wbr>log-<wbr>1.<wbr>json.<wbr>bz2"
    assert breakable("Fitted_Q_Evaluation at -1.5 <b>") == "Fitted_<wbr>Q_<wbr>Evaluation at -1.5 &lt;b&gt;"
    assert breakable("") == ""


def test_long_tables_unfold() -> None:
    table = Table(title="t", head=("Name", "Figure"), rows=[(f"row {n}", f"{n}") for n in range(31)])
    page = Page(report_of(Section(title="s", tables=(table,))))
    assert page.text["summary"] == ["11 more rows"]
    assert page.text["td"] == [f"{n}" for n in range(31)]
    assert page.text["caption"] == ["t", "t, the other rows"]
    table = replace(table, rows=table.rows[:30])
    assert "summary" not in Page(report_of(Section(title="s", tables=(table,)))).text


def test_shares_of_actions_are_bars_of_their_length() -> None:
    text = render(report_of(actions_section({"a": (0.75, None, 0.5), "b": (0.25, None, None)}, "")))
    found = re.findall(r'<td class="bar"(?: style="--w:([\d.]+%)")?>([\d.%–]+)', text)
    assert found == [("75.00%", "75.00%"), ("50.00%", "50.00%"), ("25.00%", "25.00%"), ("", "–")]
    assert Page(text).text["thead"] == ["ActionLogMean propensity of the evaluated policy"]


# ---- headlines


@pytest.mark.parametrize(
    ("rows", "state", "sentence"),
    [
        ([estimated("a", 12, 1), estimated("b", 13, 1)], "good", "Better than the logged policy."),
        ([estimated("a", 8, 1), estimated("b", 20, 1, Verdict.DO_NOT_USE)], "bad", "Worse than the logged policy."),
        ([estimated("a", 12, 1), estimated("b", 10, 1)], "unclear",
         "No difference from the logged policy is shown by all trustworthy estimates."),
        ([estimated("a", 12, 1), estimated("b", 8, 1)], "unclear",
         "Trustworthy estimates contradict each other about the logged policy."),
        ([estimated("a", 12, 1, Verdict.WIDE)], "unclear",
         "The log is not enough to say whether this policy beats the logged policy."),
    ],
)  # fmt: skip
def test_the_headline_rests_on_trustworthy_differences(rows: list[Estimate], state: str, sentence: str) -> None:
    (found,) = headlines([comparison(*rows)], (), "")
    assert (found.state, found.sentence) == (state, sentence)


def test_simulation_is_decided_by_intervals_that_do_not_meet() -> None:
    def conclusion(*returns: float) -> tuple[str, str]:
        names = ("The policy", "Random actions")
        played = [Simulated(name=name, returns=around(one, 1.0)) for name, one in zip(names, returns, strict=False)]
        (found,) = headlines((), played, "")
        return found.state, found.sentence

    assert conclusion(5.0, 2.0) == ("good", "Better than random actions in simulation.")
    assert conclusion(2.0, 5.0) == ("bad", "Worse than random actions in simulation.")
    assert conclusion(5.0, 5.0) == ("unclear", "No difference from random actions is shown in simulation.")
    assert conclusion(5.0) == ("unclear", "Episodes earn 5 in simulation.")


@pytest.mark.parametrize(("difference", "state"), [(0.5, "good"), (-0.5, "bad"), (0.1, "unclear")])
def test_a_paired_difference_decides_where_intervals_meet(difference: float, state: str) -> None:
    one = Simulated(name="The model", returns=around(5.0, 3.0))
    other = Simulated(name="The other", returns=around(4.5, 3.0), difference=around(difference, 0.25))
    assert headlines((), (one, other), "")[0].state == state


# ---- sections of an evaluation


def test_tables_say_the_figures_given() -> None:
    row = replace(estimated("MAGIC", 12.5, 1.0), reason="enough of them")
    cells = Page(report_of(estimates_section([comparison(row, undefined("IPS"))], 0.95, ""))).text["td"]
    assert cells[0] == "10 (9 to 11)"
    assert cells[5:10] == ["12.5 (11.5 to 13.5)", "2.5 (1.5 to 3.5)", "1.25", "● trustworthy", "enough of them"]
    assert cells[10:] == ["–", "–", "–", "✕ do not use", "no propensities"]


def test_a_simulated_value_stands_beside_the_estimates() -> None:
    beside = replace(comparison(estimated("IPS", 12.0, 1.0)), simulated=around(12.0, 2.0))
    page = Page(report_of(estimates_section([beside], 0.95, "")))
    assert page.text["td"][5:10] == ["12 (10 to 14)", "", "", "", "the value that estimates aim at"]
    assert "in simulation 12" in page.text["svg"][0]
    assert "dotted line" in page.text["p"][0]


def test_returns_in_simulation_have_only_the_columns_that_are_known() -> None:
    first = Simulated(name="one", returns=around(5.0, 1.0), discounted=around(3.0, 1.0), cut_share=0.25)
    other = Simulated(name="two", returns=around(4.0, 1.0), difference=around(1.0, 0.5))
    page = Page(report_of(simulated_section((first, other), 0.95, "")))
    assert page.text["thead"] == [
        "PolicySum of rewards of an episodeDiscounted returnone minus this policyCut by the time limit"
    ]
    assert page.text["td"] == ["5 (4 to 6)", "3 (2 to 4)", "–", "25.00%", "4 (3 to 5)", "–", "1 (0.5 to 1.5)", "–"]


def test_an_evaluation_becomes_comparisons_and_weights() -> None:
    row = {"name": "MAGIC", "figure": FIGURE, "difference": FIGURE, "normalized": None, "verdict": "wide",
           "reason": "r"}  # fmt: skip
    family = {"logged": FIGURE, "estimates": [row], "disagreement": FIGURE}
    outcomes = [{"name": name, "one_step": family, "sequential": family} for name in ("Reward", "reward")]
    sequential, one_step, *metric = compared({"outcomes": outcomes})
    assert [one.outcome for one in metric] == ["Metric reward"] * 2  # the 2019 log has a metric of that name
    assert (sequential.decides, one_step.decides) == (True, False)
    assert sequential.rows[0].figure == around(2.0, 1.0)
    weights = weights_section({"overlap": OVERLAP}, 10.0)
    facts = dict(weights.facts)
    assert facts["Mean weight of an episode there, should be 1"] == "2 (1 to 3)"
    assert facts["Rows scored"] == "1,200"
    assert facts["Effective episodes at step 3"] == "12.5"
    assert facts["Episodes cut before their end"] == "12.50%"
    table = weights.charts[0].table
    assert table is not None
    assert [row[1:] for row in table.rows] == [("0", "30"), ("1", "4")]


def test_candidates_are_told_by_their_features() -> None:
    page = Page(report_of(candidates_section(candidates("7"), "")))
    assert page.text["h2"] == ["Actions"]
    assert page.text["dd"] == ["3", "50.00%", "25.00%", "75.00%"]
    assert page.text["td"] == ["1.5 (2.5)", "3.5 (4.5)", "0.625", "100.00%", "5.00%", "12.50%", "100.00%"]
    assert page.text["caption"][0] == "Features of chosen candidates, largest difference first"
    unknown = candidates("7") | {"propensity": None, "by_propensity": []}
    page = Page(report_of(candidates_section(unknown, "")))
    assert page.text["dd"] == ["3", "50.00%", "75.00%"]
    assert len(page.text["caption"]) == 2


def test_candidates_with_large_differences_come_first() -> None:
    document = candidates("", 3)
    for name, difference in zip(document["features"], (0.1, -0.9, None), strict=True):
        document["features"][name] = document["features"][name] | {"difference": difference}
    features, _, lengths = candidates_section(document | {"candidates": {"17 to 32": 0.25, "2": 0.75}}, "").tables
    assert [row[3] for row in features.rows] == ["-0.9", "0.1", "–"]
    assert [row[0] for row in lengths.rows] == ["2", "17 to 32"]


def test_the_model_card_says_the_same_in_markdown() -> None:
    report = report_of(estimates_section([comparison(estimated("IPS_a", 12.0, 1.0))], 0.95, ""))
    report = replace(report, headlines=headlines([comparison(estimated("a", 12.0, 1.0))], (), ""), notes=("*x*",))
    text = findings(report)
    assert "From the log: **Better than the logged policy.** 1 of 1 estimates are trustworthy." in text
    assert r"**Warning**: \*x\*" in text
    assert "| IPS_a | 12 (11 to 13) | 2 (1 to 3) | 1.2 | ● trustworthy | why |" in text


# ---- sections of a run


def write_metrics(folder: Path, lines: list[dict[str, float | None]]) -> Path:
    file = folder / "metrics.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_curves_are_read_from_the_metrics(tmp_path: Path) -> None:
    file = write_metrics(tmp_path, [
        {"step": 10, "train/td_loss": 3.0, "td_loss/mean": None, "train/extra": 1.0, "train/same": 1.0},
        {"step": 20, "train/td_loss": 2.0, "td_loss/mean": 4.0, "train/extra": 2.0, "train/same": 1.0,
         "simulation/return/mean": 5.0},
        {"step": 20, "simulation/return/mean": 6.0, "simulation/return/lower": 5.5, "simulation/return/upper": 6.5},
        {"step": 30, "simulation/return/mean": 7.0, "simulation/return/lower": 6.5, "simulation/return/upper": 7.5,
         "simulation/random_return/mean": 1.0},
    ])  # fmt: skip
    charts = {chart.title: chart for chart in curves_of(read_series(file))}
    assert list(charts) == ["Return in simulation", "TD loss", "Extra"]
    assert [line.points for line in charts["TD loss"].lines] == [((10.0, 3.0), (20.0, 2.0))]  # one value is no curve
    (returns,) = charts["Return in simulation"].lines
    assert returns.points == ((20.0, 6.0), (30.0, 7.0))  # of two at one step the later
    assert returns.band == ((5.5, 6.5), (6.5, 7.5))
    assert charts["Return in simulation"].mark == (1.0, "random actions")
    assert read_series(tmp_path / "none") == {}


def test_drift_is_taken_from_beside_the_normalization(tmp_path: Path) -> None:
    one = {"feature_id": 3, "verdict": "large", "psi": 0.5, "psi_by_chance": 0.1, "ks": None, "ks_by_chance": None,
           "present": 0.25, "reference_present": 1.0, "mean": 2.0, "reference_mean": None}  # fmt: skip
    (tmp_path / "drift.json").write_text(json.dumps({"state_features": {"features": [one]}}))
    config = SimpleNamespace(state_norm_data_path=str(tmp_path / "norm.json"), action_norm_data_path=None)
    (table,) = drift_section(config).tables  # type: ignore[arg-type]
    assert table.rows == [("3", "state_features", "✕ large", "0.5", "–", "100.00% → 25.00%", "– → 2")]


def test_a_page_that_cannot_be_written_ends_no_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("no JSON")
    assert write_page(tmp_path, SimpleNamespace(config=None, evaluation={})) is not None  # type: ignore[arg-type]
    assert not (tmp_path / PAGE).exists()


def test_a_long_run_s_page_stays_small(tmp_path: Path) -> None:
    rng, tags = np.random.default_rng(0), [f"actions/model/{i}" for i in range(8)] + [f"train/{i}" for i in range(6)]
    tags += ["train/td_loss", "td_loss/mean", "value/logged/mean", "value/model/mean", "time/learn", "time/step"]
    lines = [{"step": step, **dict(zip(tags, rng.normal(size=20).tolist(), strict=True))} for step in range(20_000)]
    series = read_series(write_metrics(tmp_path, lines))
    assert max(map(len, series.values())) <= 5000
    assert series["train/td_loss"][0][0] == 0
    early = [x for x, _ in series["train/td_loss"] if x < 10_000]
    assert len(early) >= 200  # the first half is as fine as the second, though it was thinned more often
    assert len(render(report_of(curves_section(series)))) < 500_000


def test_a_large_run_s_page_is_bounded_and_says_what_it_leaves_out(tmp_path: Path) -> None:
    """1000 features of states and of candidates, 205 actions, 1000 reports, 100 metrics: 1.6 MB, however much more."""
    rng, names = np.random.default_rng(0), [f"action {i}" for i in range(205)]
    estimators = (*SEQUENTIAL_ESTIMATORS, *ONE_STEP_ESTIMATORS)
    tags = [f"{kind}/{name}" for kind in ("actions/logged", "actions/model") for name in names]
    tags += [f"train/{i}" for i in range(40)] + [f"time/{i}" for i in range(20)]
    tags += [f"CPE/Reward/{name}" for name in estimators]
    series = {tag: [(200.0 * i, value) for i, value in enumerate(rng.normal(size=1000).tolist())] for tag in tags}
    rows = [replace(estimated(name, 0.123456, 0.1, Verdict.WIDE), reason="w" * 80) for name in estimators]
    feature = json.dumps({"feature_type": "CONTINUOUS", "mean": 0.123456, "stddev": 0.123456})

    def page(times: int) -> str:
        normalization = {column: {str(i): feature for i in range(1000 * times)} for column in ("state", "action")}
        return render(report_of(
            estimates_section([comparison(*rows)] * 100 * times, 0.95, "evaluation.json"),
            curves_section(series),
            actions_section({name: (0.01, 0.01, 0.01) for name in names}, "evaluation.json"),
            candidates_section(candidates("", 1000 * times), "evaluation.json"),
            features_section(normalization, {}, ""),
            config_section({str(i): "CONTINUOUS" for i in range(20_000 * times)}),
        ))  # fmt: skip

    text = page(1)
    assert len(text.encode()) < 1_600_000
    for sentence in ("88 more comparisons in evaluation.json.", "5 more actions in evaluation.json.",
                     "900 more features in evaluation.json.", "1,500 more features in normalization.json.",
                     "more curves in metrics.jsonl.", "more letters in config.json."):  # fmt: skip
        assert sentence in text
    assert len(page(10).encode()) < len(text.encode()) + 100

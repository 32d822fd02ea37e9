"""The page from plain data: its figures, names that would break it, its limits; headlines and sections by hand."""

import json
import re
import tomllib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.logs import write_lines
from helpers.reports import (
    OVERLAP,
    RESULT,
    Page,
    around,
    candidates,
    comparison,
    decided,
    estimated,
    estimates,
    explanation,
    full,
    game,
    report_of,
    undefined,
)
from helpers.runs import ROOT

from reagent_lite.config.evaluation import EvaluationConfig
from reagent_lite.evaluation.decision import Choice, Evidence
from reagent_lite.evaluation.explanation import Explanation
from reagent_lite.evaluation.verdict import Verdict
from reagent_lite.report import sections
from reagent_lite.report.content import PageSection, Report, Table, format_cell
from reagent_lite.report.curves import curves_of, curves_section, read_series
from reagent_lite.report.explanation_sections import explanation_sections
from reagent_lite.report.html_page import render
from reagent_lite.report.markdown import decision_of, findings, lines_of_report
from reagent_lite.report.run import PAGE, config_section, drift_section, features_section, write_page
from reagent_lite.report.sections import actions_section, candidates_section, simulated_section, weights_section
from reagent_lite.report.templates import breakable
from reagent_lite.rl.estimators import ESTIMATORS

# ---- the document


@pytest.mark.parametrize("name", ["one", "<script>alert(1)</script>\"'&"])
def test_a_full_page_is_well_formed_and_needs_nothing_but_itself(name: str) -> None:
    text = render(full(name))
    page = Page(text)
    assert (page.text["h1"], page.text["h2"]) == ([name], [
        "Estimates", "Who gains and who loses", "Who gets what", "Simulation", "Weights and overlap",
        "Learning curves", "Actions", "Features", "Data lineage",
        "Config", "Candidates",
    ])  # fmt: skip
    assert [row for row in page.text["tr"] if "75%" in row] == [f"{name}75%\n25%\n50%\n"]
    assert "script" not in page.text
    assert re.findall(r"(?:https?:|//|url\(|@import)[^\s<]*", text) == []
    levels = [int(level) for level in re.findall(r"<h(\d)", text)]
    assert all(after <= before + 1 for before, after in pairwise([0, *levels]))
    assert '<html lang="en"' in text
    # cells of heads have a scope, tables a caption, charts a role and a label; other drawings may be hidden
    unlabelled = r"<svg(?![^>]* aria-(?:label|hidden)=)|<svg class=\"chart(?!(?=[^>]* role=)[^>]* aria-label=)"
    assert re.findall(rf"<th(?![^>]* scope=)[ >]|<table[^>]*>(?!\s*<caption)|{unlabelled}", text) == []
    # every drawing has its numbers as a table
    assert all("<table" in section for section in text.split("<section")[1:] if '<svg class="chart' in section)


def test_an_empty_report_has_no_section() -> None:
    empty = [estimates(), simulated_section(None, {}, 0.95, ""), weights_section(None, 10.0), actions_section({}, ""),
             candidates_section(None, ""),
             candidates_section({"rows": 0}, ""), features_section({}, {}, "note"), curves_section({})]  # fmt: skip
    assert {"section", "table"}.isdisjoint(Page(report_of(*empty)).text)


@pytest.mark.parametrize(("choice", "state"), [(Choice.SHIP, "good"), (Choice.DO_NOT_SHIP, "bad"),
                                               (Choice.NOT_ENOUGH, "unclear")])  # fmt: skip
def test_the_decision_stands_first(choice: Choice, state: str) -> None:
    text = render(Report(title="t", decision=decided(choice)))
    assert f'<div class="verdict {state}">' in text
    first, *others = Page(text).text["p"]
    assert [first[2:], *others] == [f"{choice.value.capitalize()}: why.", "Next: why", "From the log: why too."]


def test_template_and_style_sheet_are_in_the_wheel() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    folder = ROOT / "reagent_lite/report"
    packed = {file for pattern in patterns["reagent_lite.report"] for file in folder.glob(pattern)}
    assert packed == {*folder.glob("*.j2"), *folder.glob("*.css")}


@pytest.mark.parametrize(
    ("words", "html"),
    [
        ("../data/my_log-1.json.bz2", "../data/<wbr>my_<wbr>log-<wbr>1.<wbr>json.<wbr>bz2"),
        ("rl.cql_alpha at -1.5 <b>", "rl.cql_<wbr>alpha at -1.5 &lt;b&gt;"),
        ("", ""),
    ],
)
def test_paths_break_behind_their_marks_and_names_behind_underscores(words: str, html: str) -> None:
    assert breakable(words) == html


def numbered(rows: int) -> PageSection:
    """A section of one table with so many rows."""
    columns = (("Name", "name"), ("Figure", "number"))
    return PageSection(title="s", tables=(Table(title="t", columns=columns, rows=[(f"{n}", n) for n in range(rows)]),))


@pytest.mark.parametrize(
    ("section", "texts"),
    [
        (numbered(30), {"summary": None, "td": [f"{n}" for n in range(30)], "caption": ["t"]}),
        (numbered(31), {"summary": ["11 more rows"], "td": [f"{n}" for n in range(31)],
                        "caption": ["t", "t, the other rows"]}),
        (actions_section({"a": (0.75, None, 0.5), "b": (0.25, None, None)}, ""),
         {"thead": ["ActionLogMean propensity of the evaluated policy"]}),
        (simulated_section(game(around(5.0, 1.0), around(4.0, 1.0), around(1.0, 0.5)), {"model": "One"}, 0.95, ""),
         {"tbody": ["\nOne5 (4 to 6)\n5 (4 to 6)\n–\n1,234\n12.5%\n"
                    "\nRandom actions4 (3 to 5)\n4 (3 to 5)\n1.0 (0.5 to 1.5)\n1,234\n12.5%\n\n"]}),
        (candidates_section(candidates("7"), ""),
         {"dd": ["3", "50%", "25%", "75%"],
          "td": ["1.5 (2.5)", "3.5 (4.5)", "0.625", "100%", "5%", "12.5%", "100%"]}),
        (candidates_section(candidates("7") | {"propensity": None}, ""), {"dd": ["3", "50%", "75%"]}),
    ],
    ids=["short", "long", "actions", "simulation", "candidates", "candidates without propensities"],
)  # fmt: skip
def test_sections_say(section: PageSection, texts: dict[str, list[str] | None]) -> None:
    page = Page(report_of(section))
    assert {tag: page.text.get(tag) for tag in texts} == texts


def test_shares_of_actions_are_bars_of_their_length() -> None:
    text = render(report_of(actions_section({"a": (0.75, None, 0.5), "b": (0.25, None, None)}, "")))
    assert re.findall(r'<td class="bar"[^>]*?(?: style="--w:([\d.]+%)")?>([\d.%–]+)', text) == [
        ("75%", "75%"), ("50%", "50%"), ("25%", "25%"), ("", "–"),
    ]  # fmt: skip


# ---- sections of an evaluation


def test_tables_say_the_figures_and_a_shared_reason_once() -> None:
    rows = comparison(undefined("IPS"), estimated("MAGIC", 12.5, 1.0), undefined("WDR"))
    page = Page(report_of(estimates(replace(rows, simulated=around(12.0, 2.0)))))
    assert [page.text["td"][start : start + 5] for start in range(0, 25, 5)] == [
        ["10 (9 to 11)", "", "", "", ""],
        ["12 (10 to 14)", "", "", "", "the value that estimates aim at"],
        ["–", "–", "–", "✕ do not use", "no propensities"],
        ["–", "–", "–", "✕ do not use", "as above"],
        ["12.5 (11.5 to 13.5)", "2.5 (1.5 to 3.5)", "1.25", "● trustworthy", "why"],
    ]
    assert "in simulation 12" in page.text["svg"][0]


def test_candidates_are_told_by_their_features_the_largest_differences_first() -> None:
    document = candidates("", 3) | {"by_propensity": [], "candidates": {"17 to 32": 0.25, "2": 0.75}}
    document["features"] = {
        name: figures | {"difference": difference}
        for (name, figures), difference in zip(document["features"].items(), (0.1, -0.9, None), strict=True)
    }
    features, lengths = candidates_section(document, "").tables
    assert ([row[3] for row in features.rows], [row[0] for row in lengths.rows]) == (
        [-0.9, 0.1, None], ["2", "17 to 32"],
    )  # fmt: skip


def test_the_model_card_says_the_same_in_markdown() -> None:
    text = findings(replace(report_of(estimates(comparison(estimated("IPS_a", 12.0, 1.0)))), notes=("*x*",)))
    assert decision_of(report_of()) == "**Ship**: why. Next: why"
    row = "| IPS a | 12 (11 to 13) | 2 (1 to 3) | 1.2 | ● trustworthy | why |"
    assert [part for part in ("From the log: why too.\n\n", r"**Warning**: \*x\*", row) if part not in text] == []


def test_the_log_says_the_same_as_text() -> None:
    """Facts, sentences and tables of what the policy is worth, but the definitions of estimators, in columns."""
    section = estimates(comparison(estimated("IPS_Reward", 12.0, 1.0)), result=RESULT)
    about, cut = section.notes[:2]
    assert list(
        lines_of_report(replace(report_of(section, weights_section(OVERLAP, 10.0)), facts=(("Rows", 1200),)))
    ) == [
        "Rows: 1,200",
        f"Estimates: {about}",
        f"Estimates: {cut}",
        section.tables[0].title,
        "  Estimator      Estimate (95% interval)  Difference  Times the logged policy  Verdict        Reason",
        "  logged policy  10 (9 to 11)",
        "  IPS Reward     12 (11 to 13)            2 (1 to 3)  1.2                      ● trustworthy  why",
    ]


def test_how_much_the_log_tells_stands_beside_the_estimates_and_trust_is_green_only_where_it_decides() -> None:
    row = comparison(estimated("IPS", 12.0, 1.0))
    notes = "\n".join(estimates(row, result=RESULT).notes)
    assert notes.startswith("30 scored episodes with an effective sample size of 12.5")
    assert "\n12.5% of the episodes are cut before their end" in notes
    assert 'class="dot good"' in estimates(row).charts[0].svg
    seen, *_ = sections.evaluation_sections(Evidence(comparisons=(row,), seen=True), decided(Choice.SHIP),
                                            EvaluationConfig(), names={}, note="", where="",
                                            explanation=Explanation())  # fmt: skip
    for section in (estimates(row, plain=True), estimates(replace(row, decides=False)), seen):
        assert re.findall(r'class="dot (\w+)"|good', section.charts[0].svg) == ["plain"]


def test_segments_are_shown_with_the_largest_loss_first() -> None:
    gains, gets = explanation_sections(explanation("old", around(2.0, 1.0)), "e.json")
    effects, choices = gains.tables
    assert [row[0] for row in effects.rows] == ["1. old 1", "2. old 2", "3. old 0", "all, weighted by share"]
    results = [f"{standing} (trustworthy: old)" for standing in ("loses", "not enough to say", "gains")]
    assert [row[6] for row in effects.rows] == [*results, ""]
    assert [format_cell(row[5]) for row in effects.rows][:2] == ["-1.0 (-1.5 to -0.5)", "0.2 (-0.2 to 0.8)"]
    assert gains.notes[0].startswith("The policy's discounted return of an episode minus the logged one")
    assert choices.rows[0] == ("1. old 1: old 0", 0.5, 0.25)
    # losses are as usable as gains, so that the axis holds both: 14 + 452 / 4 * (0.5 and 1.5)
    assert '<line class="whisker bad" x1="70.5" x2="183.5"' in gains.charts[0].svg
    assert gets.notes[0].startswith("A small tree predicts 75% of the policy's decisions in 1,000 rows")
    assert [row for row in gets.tables[1].rows] == [("old", 0.5), ("other", 0.0)]
    absent = explanation_sections(Explanation.without_log(), "e.json")
    assert [section.facts[0][0] for section in absent] == ["Not shown"] * 2


def test_diagnostics_of_weights() -> None:
    weights = weights_section(OVERLAP, 10.0)
    facts = {name: format_cell(value) for name, value in weights.facts}
    assert facts | {
        "Mean weight of an episode there, should be 1": "2 (1 to 3)", "Rows scored": "1,200",
        "Effective episodes at step 3": "12.5", "Episodes cut before their end": "12.5%",
    } == facts  # fmt: skip
    assert [row[1:] for row in weights.charts[0].table.rows] == [(0, 30), (1, 4)]


def test_rounded_figures_have_all_digits_as_a_title() -> None:
    table = Table(title="t", columns=(("a", "name"), ("b", "number")), rows=[("x", 0.123456), ("y", around(1.5, 0.25))])
    assert re.findall(r'title="([^"]+)">(.+?)</td>', render(report_of(PageSection(title="s", tables=(table,))))) == [
        ("0.123456", "0.123"), ("1.5 (1.25 to 1.75)", "1.50 <span>(1.25 to 1.75)</span>"),
    ]  # fmt: skip


# ---- sections of a run


def test_curves_are_read_from_the_metrics(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "metrics.jsonl", [
        {"step": 10, "train/td_loss": 3.0, "td_loss/mean": None, "train/extra": 1.0, "train/same": 1.0},
        {"step": 20, "train/td_loss": 2.0, "td_loss/mean": 4.0, "train/extra": 2.0, "train/same": 1.0,
         "simulation/return/mean": 5.0},
        {"step": 20, "simulation/return/mean": 6.0, "simulation/return/lower": 5.5, "simulation/return/upper": 6.5},
        {"step": 30, "simulation/return/mean": 7.0, "simulation/return/lower": 6.5, "simulation/return/upper": 7.5,
         "simulation/random_return/mean": 1.0},
        {"step": 40, "simulation/return/mean": 8.0, "simulation/return/lower": None, "simulation/return/upper": None},
    ])  # fmt: skip
    charts = {chart.title: chart for chart in curves_of(read_series(file))}
    assert list(charts) == ["Return in simulation", "TD loss", "Extra"]
    assert [line.points for line in charts["TD loss"].lines] == [((10.0, 3.0), (20.0, 2.0))]  # one value is no curve
    returns = charts["Return in simulation"]
    assert (returns.lines[0].points, returns.lines[0].band, returns.mark) == (  # of two at one step the later
        ((20.0, 6.0), (30.0, 7.0), (40.0, 8.0)), ((5.5, 6.5), (6.5, 7.5), (8.0, 8.0)), (1.0, "random actions"),
    )  # fmt: skip
    assert read_series(tmp_path / "none") == {}


def test_lines_of_metrics_that_are_torn_are_left_out(tmp_path: Path) -> None:
    """What a machine leaves that loses power: a line without its end, another one after it, zeros, no figures."""
    whole = [json.dumps({"step": step, "x": step}) for step in range(4)]
    torn = [whole[0], whole[1][:9] + whole[2], "\0" * 20, "[1]", "{}", "\xff", '{"step": 1, "x": []}', whole[3]]
    (tmp_path / "metrics.jsonl").write_bytes("\n".join([*torn, whole[2][:-1]]).encode("latin-1"))
    assert read_series(tmp_path / "metrics.jsonl") == {"x": [(0.0, 0.0), (3.0, 3.0)]}


def test_drift_is_taken_from_beside_the_normalization(tmp_path: Path) -> None:
    feature = {"feature_id": 3, "verdict": "large", "psi": 0.5, "psi_by_chance": 0.1, "ks": None, "ks_by_chance": None,
           "present": 0.25, "reference_present": 1.0, "mean": 2.0, "reference_mean": None}  # fmt: skip
    (tmp_path / "drift.json").write_text(json.dumps({"state_features": {"features": [feature]}}))
    config = SimpleNamespace(state_norm_data_path=str(tmp_path / "norm.json"), action_norm_data_path=None)
    assert drift_section(config).tables[0].rows == [  # type: ignore[arg-type]
        ("3", "state_features", "✕ large", 0.5, None, "100% → 25%", "– → 2", None)
    ]


def test_a_page_that_cannot_be_written_ends_no_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("no JSON")
    assert write_page(tmp_path, SimpleNamespace(config=None, evaluation={})) is not None  # type: ignore[arg-type]
    assert not (tmp_path / PAGE).exists()


def test_curves_of_a_long_run_are_thinned_evenly(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=11_000).tolist()
    lines = [{"step": step, "train/td_loss": value} for step, value in enumerate(values)]
    (points,) = read_series(write_lines(tmp_path / "metrics.jsonl", lines)).values()
    # the first half is as fine as the second, though it was thinned more often
    assert 200 <= sum(x < 5500 for x, _ in points) <= len(points) <= 5000
    assert points[0][0] == 0


def test_a_large_run_s_page_is_bounded_and_says_what_it_leaves_out() -> None:
    """1000 features of states and of candidates, 205 actions, 1000 reports, 100 metrics: 1.6 MB, however much more."""
    names = [f"action {i}" for i in range(205)]
    tags = [
        *(f"{kind}/{name}" for kind in ("actions/logged", "actions/model") for name in names),
        *(f"train/{i}" for i in range(40)), *(f"time/{i}" for i in range(20)),
        *(f"CPE/Reward/{name}" for name in ESTIMATORS),
    ]  # fmt: skip
    rng = np.random.default_rng(0)
    series = {tag: [(200.0 * i, value) for i, value in enumerate(rng.normal(size=1000).tolist())] for tag in tags}
    rows = [replace(estimated(name, 0.123456, 0.1, Verdict.SUPPORT), reason=f"{name:w>80}") for name in ESTIMATORS]
    feature = json.dumps({"feature_type": "CONTINUOUS", "mean": 0.123456, "stddev": 0.123456})

    def bytes_of(times: int, *sentences: str) -> int:
        normalization = {column: {str(i): feature for i in range(1000 * times)} for column in ("state", "action")}
        text = render(report_of(
            estimates(*[comparison(*rows)] * 100 * times),
            curves_section(series),
            actions_section({name: (0.01, 0.01, 0.01) for name in names}, "evaluation.json"),
            candidates_section(candidates("", 1000 * times), "evaluation.json"),
            features_section(normalization, {}, ""),
            config_section({str(i): "CONTINUOUS" for i in range(20_000 * times)}),
        ))  # fmt: skip
        assert [sentence for sentence in sentences if sentence not in text] == []
        return len(text.encode())

    size = bytes_of(1, "88 more comparisons in evaluation.json.", "5 more actions in evaluation.json.",
                    "900 more features in evaluation.json.", "1,500 more features in normalization.json.",
                    "more curves in metrics.jsonl.", "more letters in config.json.")  # fmt: skip
    assert bytes_of(10) - 100 < size < 1_600_000


def test_rows_without_segments_have_no_table_of_effects() -> None:
    whole = explanation("old", around(2.0, 1.0))
    assert whole.segments is not None
    alone = replace(whole, segments=replace(whole.segments, effects=whole.segments.effects[:1]))
    gains, _ = explanation_sections(alone, "e.json")
    assert gains.notes[0].startswith("In ")
    assert "no feature divides them" in gains.notes[0]
    assert (gains.charts, [table.title for table in gains.tables]) == (
        (), ["Shares of choices by segment, the most frequent ones"],
    )  # fmt: skip

"""report.html of a real run, looked at in a real browser: on a phone, on a desk, and in print."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from oracles.browser import Browser, browsing, needs_browser
from oracles.events import event
from oracles.logs import write_lines
from oracles.runs import Runner

from reagent_lite.evaluation.verdict import Verdict
from reagent_lite.evaluation.webpage import render
from reagent_lite.evaluation.webpage_candidates import CandidateFeature, Candidates
from reagent_lite.evaluation.webpage_content import (
    ActionShare,
    Comparison,
    Estimated,
    Feature,
    FeatureShift,
    Interval,
    Report,
    Table,
)
from reagent_lite.rl.estimators import ONE_STEP_ESTIMATORS, SEQUENTIAL_ESTIMATORS
from workflows import pages
from workflows.pages_curves import curves_of, read_series
from workflows.pages_data import shifts_of

NASTY = "<script>document.title='broken'</script>"
HEADINGS = ["Estimates", "Weights and overlap", "Learning curves", "Actions", "Features", "Data lineage", "Config"]


def config_of(folder: Path) -> dict[str, Any]:
    """A config over 60 episodes of events, one row of which no rule allows."""
    rng = np.random.default_rng(0)
    rows = [
        event(f"e{n}", k, 0.0, float(rng.normal()), action=[NASTY, "b"][int(rng.integers(2))], terminal=k == 4,
              action_probability=0.5, possible_actions=[NASTY, "b"],
              state_features={str(i): float(rng.normal()) for i in range(3)})
        for n in range(60) for k in range(5)
    ]  # fmt: skip
    rows[7]["action_probability"] = 2.0
    return {
        "training_data_path": str(write_lines(folder / "log.jsonl", rows)), "model_output_path": str(folder / "out"),
        "use_gpu": False, "epochs": 3, "actions": [NASTY, "b"], "timeline": {"on_refused": "drop_episode"},
        "training": {"layers": [-1, 8, -1], "activations": ["relu", "linear"], "minibatch_size": 32},
        "rl": {"temperature": 1.0}, "evaluation": {"bootstrap_resamples": 200, "held_out_share": 0.5},
    }  # fmt: skip


@pytest.fixture
def page(run: Runner, tmp_path: Path) -> Path:
    """The report page of a run."""
    done = run("dqn", config_of(tmp_path))
    assert done.code == 0, done.err
    assert f"report: {tmp_path / 'out' / 'report.html'}" in done.err
    return tmp_path / "out" / "report.html"


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with browsing(tmp_path / "profile") as started:
        yield started


@needs_browser
def test_a_run_s_page_in_a_browser(page: Path, browser: Browser) -> None:
    for width in (360, 768, 1000, 1440):
        browser.open(page, width=width)
        browser.unfold()
        assert browser.value("document.documentElement.scrollWidth") <= width
        assert browser.overflowing() == []
        assert browser.broken_words() == []
        assert browser.colliding() == []
        assert browser.requests() == [page.as_uri()]
        assert browser.complaints() == []
    assert browser.value("document.title") == "DQN run: out"
    assert browser.value("document.scripts.length") == 0
    assert json.loads(browser.value("JSON.stringify([...document.querySelectorAll('h2')].map(h => h.innerText))")) == (
        HEADINGS
    )
    tables = browser.value("[...document.querySelectorAll('section table')].map(t => t.textContent).join('\\n')")
    evaluation = json.loads((page.parent / "model/evaluation.json").read_text())
    estimate = evaluation["cpe"]["outcomes"][0]["sequential"]["estimates"][0]
    assert estimate["reason"] in tables
    assert f"{estimate['figure']['value']:.4g}" in tables
    assert "rows: 1, episodes: 1, rule: propensity_outside" in tables  # refused: the row, and its episode left out
    assert "rows in files300" in tables
    assert NASTY in tables

    # letters of drawings, on the screen of a phone, in CSS pixels
    browser.open(page, width=360)
    sizes = """[...document.querySelectorAll('svg.chart text')].map(t => parseFloat(getComputedStyle(t).fontSize)
      * t.ownerSVGElement.getBoundingClientRect().width / 480)"""
    assert browser.value(f"Math.min(...{sizes})") >= 9
    printed = browser.pdf()
    assert printed.startswith(b"%PDF")
    assert set(HEADINGS) <= {name.decode() for name in re.findall(rb"/Title \(([^)]*)\)", printed)}


@needs_browser
def test_light_and_dark_have_enough_contrast(tmp_path: Path, browser: Browser) -> None:
    page = tmp_path / "page.html"
    page.write_text(render(Report(title="t")))
    browser.open(page, width=1200)
    grounds = []
    for scheme in ("light", "dark"):
        browser.media(prefers_color_scheme=scheme)
        colours = json.loads(browser.value(_COLOURS))
        grounds.append(colours["--ground"])
        for name in ("ink", "soft", "good", "unclear", "bad", *(f"c{i}" for i in range(8))):
            # WCAG 2.2: 4.5 for text, 3 for drawings
            least = 3.0 if re.fullmatch(r"c\d", name) else 4.5
            for under in ("--ground", "--card"):
                assert contrast(colours[f"--{name}"], colours[under]) >= least, (scheme, name, under)
        for name, sight in SIGHTS.items():
            seen = {key: cielab(sight @ linear(colours[f"--{key}"])) for key in (*SERIES, *VERDICTS)}
            for family in (SERIES, VERDICTS):
                for one, other in combinations(family, 2):
                    assert np.linalg.norm(seen[one] - seen[other]) >= 20, (scheme, name, one, other)
    assert len(set(grounds)) == 2


_COLOURS = """JSON.stringify(Object.fromEntries(['ground','card','ink','soft','good','unclear','bad',
  'c0','c1','c2','c3','c4','c5','c6','c7'].map(n => ['--'+n,
  getComputedStyle(document.documentElement).getPropertyValue('--'+n).trim()])))"""


def contrast(one: str, other: str) -> float:
    """Ratio of relative luminances, https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio."""
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    return float(np.dot(linear(colour), [0.2126, 0.7152, 0.0722]))


def linear(colour: str) -> NDArray[np.float64]:
    """Linear sRGB."""
    parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def cielab(rgb: NDArray[np.float64]) -> NDArray[np.float64]:
    """CIE 1976 L*a*b* under D65 of linear sRGB; a distance of 2.3 is just noticeable."""
    to_xyz = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750],
                       [0.0193339, 0.1191920, 0.9503041]])  # fmt: skip
    share = to_xyz @ np.clip(rgb, 0, 1) / (0.95047, 1.0, 1.08883)
    x, y, z = np.where(share > 216 / 24389, np.cbrt(share), (24389 / 27 * share + 16) / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


# Machado, Oliveira & Fernandes (2009), A physiologically-based model for simulation of color vision deficiency,
# severity 1.0, of linear sRGB
SIGHTS = {
    "all cones": np.eye(3),
    "protanopia": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
                            [-0.003882, -0.048116, 1.051998]]),
    "deuteranopia": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
                              [-0.011820, 0.042940, 0.968881]]),
    "tritanopia": np.array([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
                            [0.004733, 0.691367, 0.303900]]),
}  # fmt: skip
SERIES, VERDICTS = tuple(f"c{i}" for i in range(8)), ("good", "unclear", "bad")


def test_distances_of_colours() -> None:
    # white is L* 100 and black 0 on the grey axis; who lacks the red cones sees red much darker
    assert cielab(linear("#ffffff")) == pytest.approx([100, 0, 0], abs=0.02)
    assert cielab(linear("#000000")) == pytest.approx([0, 0, 0], abs=0.02)
    assert cielab(linear("#ff0000")) == pytest.approx([53.24, 80.09, 67.20], abs=0.05)  # table value of sRGB red
    assert all(sight.sum(1) == pytest.approx(1.0, abs=1e-5) for sight in SIGHTS.values())  # white stays white
    assert cielab(SIGHTS["protanopia"] @ linear("#ff0000"))[0] < 50


def test_contrast_of_black_on_white_is_21() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21.0)


def test_a_page_that_cannot_be_written_ends_no_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("no JSON")
    failure = pages.write_page(tmp_path, SimpleNamespace(config=None, document={}))  # type: ignore[arg-type]
    assert failure is not None
    assert not (tmp_path / pages.PAGE).exists()


def test_curves_are_read_from_the_metrics(tmp_path: Path) -> None:
    lines = [
        {"step": 10, "train/td_loss": 3.0, "td_loss/mean": None, "train/extra": 1.0, "train/same": 1.0},
        {"step": 20, "train/td_loss": 2.0, "td_loss/mean": 4.0, "train/extra": 2.0, "train/same": 1.0,
         "simulation/return/mean": 5.0},
        {"step": 20, "simulation/return/mean": 6.0, "simulation/return/lower": 5.5, "simulation/return/upper": 6.5},
        {"step": 30, "simulation/return/mean": 7.0, "simulation/return/lower": 6.5, "simulation/return/upper": 7.5,
         "simulation/random_return/mean": 1.0},
    ]  # fmt: skip
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
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
    drift = {"state_features": {"features": [one], "only_in_training": [], "only_in_reference": []}}
    (tmp_path / "drift.json").write_text(json.dumps(drift))
    config = SimpleNamespace(
        state_norm_data_path=str(tmp_path / "state_features_norm.json"), action_norm_data_path=None
    )
    (shift,) = shifts_of(config)  # type: ignore[arg-type]
    assert (shift.name, shift.verdict, shift.psi, shift.ks) == ("3", "large", 0.5, None)
    assert (shift.present, shift.mean) == ((1.0, 0.25), (None, 2.0))


@needs_browser
def test_the_browser_would_tell_of_faults(tmp_path: Path, browser: Browser) -> None:
    page = tmp_path / "page.html"
    page.write_text('<img src="http://leak.invalid/x.png"><p style="width: 900px">wide</p><script>throw 1</script>')
    browser.open(page, width=390)
    assert browser.requests() == [page.as_uri(), "http://leak.invalid/x.png"]
    assert any("Uncaught" in one for one in browser.complaints())
    assert browser.value("document.documentElement.scrollWidth") >= 900


def test_a_long_run_s_page_stays_small(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(20_000):
            noise = rng.normal(size=20)
            tags = [f"actions/model/{i}" for i in range(8)] + [f"train/{i}" for i in range(6)]
            tags += [
                "train/td_loss",
                "td_loss/mean",
                "value/logged/mean",
                "value/model/mean",
                "time/learn",
                "time/step",
            ]
            file.write(json.dumps({"step": step, **dict(zip(tags, noise.tolist(), strict=True))}) + "\n")
    series = read_series(tmp_path / "metrics.jsonl")
    assert max(map(len, series.values())) <= 5000
    assert series["train/td_loss"][0][0] == 0
    early = [x for x, _ in series["train/td_loss"] if x < 10_000]
    assert len(early) >= 200  # the first half is as fine as the second, though it was thinned more often
    report = Report(title="t", curves=curves_of(series))
    assert len(render(report)) < 500_000


def test_a_large_run_s_page_is_bounded_and_says_what_it_leaves_out(tmp_path: Path) -> None:
    """1000 features of states and of candidates, 100 actions, 200 epochs, 100 metrics: 1.55 MB, however much more."""
    rng, names = np.random.default_rng(0), [f"action {i}" for i in range(100)]
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for report_number in range(1000):  # five an epoch
            tags = [f"{kind}/{name}" for kind in ("actions/logged", "actions/model") for name in names]
            tags += [f"train/{i}" for i in range(40)] + [f"time/{i}" for i in range(20)]
            tags += [f"CPE/Reward/{name}" for name in (*SEQUENTIAL_ESTIMATORS, *ONE_STEP_ESTIMATORS)]
            values = rng.normal(size=len(tags)).tolist()
            file.write(json.dumps({"step": report_number * 200, **dict(zip(tags, values, strict=True))}) + "\n")
    figure = Interval(value=0.123456, low=0.0123456, high=1.23456)
    rows = tuple(
        Estimated(name=name, figure=figure, difference=figure, ratio=0.5, verdict=Verdict.WIDE, reason="w" * 80)
        for name in (*SEQUENTIAL_ESTIMATORS, *ONE_STEP_ESTIMATORS)
    )
    features = tuple(
        Feature(name=str(i), column=column, type="CONTINUOUS", present=0.5, mean=0.123456, stddev=0.123456)
        for column in ("state", "action") for i in range(1000)
    )  # fmt: skip
    chosen = tuple(
        CandidateFeature(name=str(i), logged=(0.1, 0.2), policy=(0.3, 0.4), difference=0.5) for i in range(1000)
    )
    report = Report(
        title="t",
        comparisons=tuple(
            Comparison(outcome=f"Metric {i}", unit="return of an episode", decides=i == 0, reference_name="logged",
                       reference=figure, rows=rows) for i in range(100)
        ),
        curves=curves_of(read_series(tmp_path / "metrics.jsonl")),
        actions=tuple(ActionShare(name=name, logged=0.01, greedy=0.01, propensity=0.01) for name in names),
        candidates=Candidates(rows=1, same=0.5, propensity=0.5, policy=0.5, bins=(), lengths=(), features=chosen),
        features=features,
        shifts=tuple(FeatureShift(name=str(i), column="state", verdict="stable", psi=0.1, ks=0.1, present=(0.5, 0.5),
                                  mean=(0.1, 0.1)) for i in range(1000)),
        lineage=tuple(Table(title="t", head=("File", "Bytes", "SHA-256"), rows=(("f" * 99, "1", "0" * 64),) * 50)
                      for _ in range(100)),
        config={"norm_params": {"feature_overrides": {str(i): "CONTINUOUS" for i in range(20_000)}}},
    )  # fmt: skip
    page = render(report)
    assert len(page.encode()) < 1_600_000
    for sentence in ("88 more comparisons in evaluation.json.", "900 more features in evaluation.json.",
                     "1,500 more features in normalization.json.", "500 more features in drift.json.",
                     "more curves in metrics.jsonl.",
                     "80 more tables in the manifests of the stages.", "more letters in config.json."):  # fmt: skip
        assert sentence in page
    twice = replace(report, features=features * 10, comparisons=report.comparisons * 10, lineage=report.lineage * 10)
    assert len(render(twice).encode()) < len(page.encode()) + 100

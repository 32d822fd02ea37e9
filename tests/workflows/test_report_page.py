"""report.html of a real run, looked at in a real browser: on a phone, on a desk, and in print."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from oracles.browser import Browser, browsing, needs_browser
from oracles.events import event
from oracles.logs import write_lines
from oracles.runs import Runner

from reagent_lite.evaluation.webpage import render
from reagent_lite.evaluation.webpage_content import Report
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
    for width in (390, 1200):
        browser.open(page, width=width)
        assert browser.value("document.documentElement.scrollWidth") <= width
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
    browser.open(page, width=390)
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
        browser.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        colours = json.loads(browser.value(_COLOURS))
        grounds.append(colours["--ground"])
        for name in ("ink", "soft", "good", "unclear", "bad", *(f"c{i}" for i in range(8))):
            # WCAG 2.2: 4.5 for text, 3 for drawings
            least = 3.0 if re.fullmatch(r"c\d", name) else 4.5
            for under in ("--ground", "--card"):
                assert contrast(colours[f"--{name}"], colours[under]) >= least, (scheme, name, under)
    assert len(set(grounds)) == 2


_COLOURS = """JSON.stringify(Object.fromEntries(['ground','card','ink','soft','good','unclear','bad',
  'c0','c1','c2','c3','c4','c5','c6','c7'].map(n => ['--'+n,
  getComputedStyle(document.documentElement).getPropertyValue('--'+n).trim()])))"""


def contrast(one: str, other: str) -> float:
    """Ratio of relative luminances, https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio."""
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


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

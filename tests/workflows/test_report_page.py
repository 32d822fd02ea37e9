"""report.html of a real run, opened in a real browser: on a phone, on a desk, and in print."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracles.browser import Browser, browsing, needs_browser
from oracles.events import event
from oracles.logs import write_lines
from oracles.runs import quick, trained

from reagent_lite.evaluation.interval import Interval

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
    return quick(
        write_lines(folder / "log.jsonl", rows), folder / "out", epochs=3, actions=[NASTY, "b"],
        rl={"temperature": 1.0}, timeline={"on_refused": "drop_episode"},
        evaluation={"bootstrap_resamples": 200, "held_out_share": 0.5},
    )  # fmt: skip


@needs_browser
def test_a_run_s_page_in_a_browser(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    page = tmp_path / "out/report.html"
    trained(config_of(tmp_path))
    assert f"report: {page}" in caplog.text
    with browsing(tmp_path / "profile") as browser:
        check_page(page, browser)


def check_page(page: Path, browser: Browser) -> None:
    for width in (360, 1440):  # every width: tests/report/test_layout.py
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
    assert str(Interval(**estimate["figure"])) in tables
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

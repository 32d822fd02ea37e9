"""The report page in a real browser: at every width nothing scrolls sideways, is cut or broken; keyboard and print."""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from oracles.browser import Browser, browsing, needs_browser

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
)
from reagent_lite.rl.estimators import ONE_STEP_ESTIMATORS, SEQUENTIAL_ESTIMATORS

pytestmark = needs_browser

WIDTHS = (360, 768, 1000, 1440)
PATH = "/mnt/storage/experiments/2019_recommendations/run-17/a_rather_long_name/training.json.bz2"
HASH = "0123456789abcdef" * 4
REASON = "the model says -0.0001234, outside the weighted estimate's interval -0.0001234 to 0.0001234"


def figure(value: float) -> Interval:
    """Figures of as many letters as they get."""
    return Interval(value=-0.0001234, low=-0.0005678 * value, high=-1.2345e-05 * value)


def comparison(outcome: str, names: list[str]) -> Comparison:
    verdicts = list(Verdict)
    rows = tuple(
        Estimated(name=name, figure=figure(1 + place), difference=figure(2 + place), ratio=-0.0001234,
                  verdict=verdicts[place % 3], reason=REASON)
        for place, name in enumerate(names)
    )  # fmt: skip
    return Comparison(outcome=outcome, unit="return of an episode", decides=True, reference_name="logged policy",
                      reference=figure(1), rows=rows, simulated=figure(2))  # fmt: skip


def crowded() -> Report:
    """A report in which every part has the longest words that it may get."""
    points = tuple((float(x), x * 1e-5) for x in range(200))
    lines = tuple(Line(name=name, points=points) for name in SEQUENTIAL_ESTIMATORS)
    names = ("buy the blue one", "Weighted_Per_Decision_Importance_Sampling", "b")
    return Report(
        title=f"Evaluation of {PATH}",
        facts=(("Learned from", PATH), ("Seed", "0"), ("Data hash", HASH[:16]), ("Config hash", HASH[:16])),
        comparisons=(comparison("Reward", [*SEQUENTIAL_ESTIMATORS]), comparison("Metric", [*ONE_STEP_ESTIMATORS])),
        weights=Weights(facts=(("Mean weight of a row, should be 1", "0.0001234 (0.0001234 to 0.0001234)"),),
                        effective_episodes=tuple(200.0 / (1 + k) for k in range(200)),
                        mean_weight=tuple(0.9**k for k in range(200)), enough=10.0, judged_step=17),
        simulated=tuple(Simulated(name=name, returns=figure(1), discounted=figure(2), length=1234.5, cut_share=0.125,
                                  difference=figure(3)) for name in ("The learned policy, greedy", "Random actions")),
        simulated_note=f"1,000 episodes of {PATH}.",
        curves=(Curves(title="Estimated return of an episode", x="optimizer steps", y="return", lines=lines,
                       mark=(0.0005, "logged policy")),),
        actions=tuple(ActionShare(name=name, logged=0.3333, greedy=1.0, propensity=0.1) for name in names),
        candidates=Candidates(
            rows=1_000_000, same=0.123, propensity=0.1234, policy=0.1234, lengths=(("17 to 32", 1.0),),
            bins=(PropensityBin(low=0.0, high=0.1, rows=1.0, propensity=0.05, policy=0.125),),
            features=(CandidateFeature(name="4294967295", logged=(-0.0001234, 0.0001234), policy=(1.7e9, 0.001234),
                                       difference=-0.0001234),),
        ),
        features=tuple(Feature(name=f"{n}", column="state", type="CONTINUOUS_ACTION", present=0.9999, mean=-0.0001234,
                               stddev=0.0001234) for n in range(40)),
        shifts=(FeatureShift(name="4294967295", column="state_features", verdict="moderate", psi=0.0001234,
                             ks=0.0001234, present=(0.1234, 0.1234), mean=(-0.0001234, -0.0001234)),),
        lineage=(Table(title=f"Inputs of {PATH}", head=("File", "Bytes", "SHA-256"),
                       rows=((PATH, "123,456,789,012", HASH),)),
                 Table(title="Models", head=("Folder", "Workflow", "Steps", "Data hash", "Config hash"),
                       rows=((PATH, "parametric_dqn", "1000000", HASH, HASH),)),
                 Table(title="Data that was asked for", head=("Use", "Path", "Rows", "Counts"),
                       rows=(("training data", PATH, "123,456,789", "123,456 lists, 123,456 candidates"),)),
                 Table(title="Stage", head=("What", "How many"), rows=(("refused", f"rule: x, line: {PATH}:17"),))),
        config={"training_data_path": PATH * 3},
        notes=(f"{PATH} was not read.",),
    )  # fmt: skip


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("browser") / "profile") as started:
        yield started


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("page") / "page.html"
    file.write_text(render(crowded()))
    return file


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_scrolls_sideways_is_cut_or_broken(page: Path, browser: Browser, width: int) -> None:
    browser.media()
    browser.open(page, width=width)
    browser.unfold()
    assert browser.value("document.documentElement.scrollWidth") <= width
    assert browser.overflowing() == []
    assert browser.broken_words() == []
    assert browser.complaints() == []


def test_words_of_drawings_do_not_lie_on_each_other(page: Path, browser: Browser) -> None:
    for width in WIDTHS:
        browser.media()
        browser.open(page, width=width)
        assert browser.colliding() == []


def test_print_cuts_nothing(page: Path, browser: Browser) -> None:
    browser.open(page, width=718)  # A4 without margins of a centimetre, in CSS pixels
    browser.media("print")
    assert browser.overflowing() == []
    held = "[...document.querySelectorAll('.card, svg.chart, .verdict, tr')].map(e => getComputedStyle(e).breakInside)"
    assert set(json.loads(browser.value(f"JSON.stringify({held})"))) == {"avoid"}
    # a drawing that is higher than a page would be cut all the same
    high = "Math.max(...[...document.querySelectorAll('.card')].map(e => e.getBoundingClientRect().height))"
    assert browser.value(high) < 1000
    browser.unfold()
    assert browser.overflowing() == []
    assert browser.broken_words() == []
    browser.media()


def test_the_oracles_would_tell_of_faults(tmp_path: Path, browser: Browser) -> None:
    file = tmp_path / "bad.html"
    file.write_text(
        '<!DOCTYPE html><body style="width: 200px; overflow-wrap: anywhere">'
        "<p>anuninterruptedwordthatisfartoolongforthat</p>"
        '<p style="width: 4em">1.2345e-05</p>'
        '<p style="overflow: hidden; white-space: nowrap">a sentence that is cut where the box ends</p>'
        '<svg class="chart" viewBox="0 0 100 100" width="100"><text x="90" y="50">one</text><text x="91" y="52">two'
        "</text></svg></body>"
    )
    browser.media()
    browser.open(file, width=1000)
    assert browser.broken_words() == ["anuninterruptedwordthatisfartoolongforthat", "1.2345e-05"]
    assert [found[:20].strip() for found in browser.overflowing()] == ["P  a sentence that i", "text [object SVGAnim",
                                                                    "text [object SVGAnim"]  # fmt: skip
    assert browser.colliding() == ["one | two"]


def test_who_cannot_see_finds_the_same_tables_on_a_phone(page: Path, browser: Browser) -> None:
    counts = []
    for width in (360, 1440):
        browser.media()
        browser.open(page, width=width)
        browser.unfold()
        roles = browser.roles()
        counts.append({name: roles[name] for name in ("table", "row", "columnheader", "rowheader", "image")})
        empty = "document.querySelectorAll('td.none').length"
        counts[-1]["cell"] = roles["cell"] + (browser.value(empty) if width == 360 else 0)
    assert counts[0] == counts[1]
    assert counts[0]["image"] == browser.value("document.querySelectorAll('svg.chart').length")


def test_headings_and_tables_say_what_they_are(page: Path, browser: Browser) -> None:
    browser.open(page, width=1000)
    levels = json.loads(browser.value(
        "JSON.stringify([...document.querySelectorAll('h1, h2, h3, h4')].map(h => Number(h.tagName[1])))"
    ))  # fmt: skip
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert browser.value("document.documentElement.lang") == "en"
    assert browser.value("document.querySelectorAll('th:not([scope])').length") == 0
    assert browser.value("document.querySelectorAll('table:not(:has(> caption))').length") == 0
    assert browser.value("document.querySelectorAll('svg.chart:not([role=img][aria-label])').length") == 0
    # every drawing has its numbers as a table: beside it, or folded below it
    assert browser.value("[...document.querySelectorAll('section')].every(s => !s.querySelector('svg.chart') "
                         "|| s.querySelector('table'))")  # fmt: skip


def test_the_keyboard_reaches_what_is_folded(page: Path, browser: Browser) -> None:
    browser.open(page, width=1000)
    total = browser.value("document.querySelectorAll('summary').length")
    opened = 0
    for _ in range(200):
        browser.press("Tab")
        if browser.value("document.activeElement.tagName") == "SUMMARY":
            assert browser.value("getComputedStyle(document.activeElement).outlineStyle") == "solid"
            browser.press("Enter")
            assert browser.value("document.activeElement.parentElement.open") is True
            opened += 1
        if opened == total:
            break
    assert opened == total > 3

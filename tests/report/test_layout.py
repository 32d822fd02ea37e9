"""The report page in a real browser: at no width anything scrolls sideways or is cut; colours, keyboard, print."""

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from oracles.browser import Browser, browsing, needs_browser
from oracles.reports import SEQUENTIAL, full

from reagent_lite.evaluation.interval import Interval
from reagent_lite.report.page import render

pytestmark = needs_browser

WIDTHS = (360, 768, 1000, 1440)
PATH = "/mnt/storage/experiments/2019_recommendations/run-17/a_rather_long_name/training.json.bz2"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("browser") / "profile") as started:
        yield started


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("page") / "page.html"
    figure = Interval(value=-0.0001234, low=-0.0005678, high=-1.2345e-05)  # as many letters as figures get
    file.write_text(render(full(PATH, title="Logged policy", figure=figure)))
    return file


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_scrolls_sideways_is_cut_or_broken(page: Path, browser: Browser, width: int) -> None:
    browser.media()
    browser.open(page, width=width)
    assert browser.colliding() == []
    browser.unfold()
    assert browser.value("document.documentElement.scrollWidth") <= width
    assert browser.overflowing() == []
    assert browser.broken_words() == []
    assert browser.complaints() == []
    assert browser.requests() == [page.as_uri()]
    # letters of drawings in CSS pixels
    sizes = """[...document.querySelectorAll('svg.chart text')].map(t => parseFloat(getComputedStyle(t).fontSize)
      * t.ownerSVGElement.getBoundingClientRect().width / 480)"""
    assert browser.value(f"Math.min(...{sizes})") >= 9


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


def test_light_and_dark_have_enough_contrast(page: Path, browser: Browser) -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21.0)
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
    browser.media()
    assert len(set(grounds)) == 2
    # who does not see colours tells the eight curves by their dashes
    dashes = "[...document.querySelectorAll('svg.swatch path')].map(e => getComputedStyle(e).strokeDasharray)"
    assert len(set(json.loads(browser.value(f"JSON.stringify({dashes})")))) == len(SEQUENTIAL)


_COLOURS = """JSON.stringify(Object.fromEntries(['ground','card','ink','soft','good','unclear','bad',
  'c0','c1','c2','c3','c4','c5','c6','c7'].map(n => ['--'+n,
  getComputedStyle(document.documentElement).getPropertyValue('--'+n).trim()])))"""


def contrast(one: str, other: str) -> float:
    """Ratio of relative luminances, https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio."""
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))

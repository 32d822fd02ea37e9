"""The report page in a real browser: at no width anything scrolls sideways or is cut; colors and print."""

import re
from collections import Counter
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from helpers.browser import BROKEN_WORDS, COLLIDING, OVERFLOWING, Browser, browsing, needs_browser
from helpers.reports import SEQUENTIAL, full

from reagent_lite.evaluation.interval import Interval
from reagent_lite.report.html_page import render

COMPLAINTS = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
# in CSS pixels
SMALLEST_LETTERS = (
    "Math.min(...[...document.querySelectorAll('svg.chart text')].map(t => "
    "parseFloat(getComputedStyle(t).fontSize) * t.ownerSVGElement.getBoundingClientRect().width / 480))"
)
HIGHEST_CARD = "Math.max(...[...document.querySelectorAll('.card')].map(e => e.getBoundingClientRect().height))"
BREAKS = "[...document.querySelectorAll('.card, svg.chart, .verdict, tr')].map(e => getComputedStyle(e).breakInside)"
STYLE = Path(__file__).parents[2] / "reagent_lite/report/style.css"


@needs_browser
def test_a_page_fits_screens_and_paper(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    figure = Interval(value=-0.0001234, low=-0.0005678, high=-1.2345e-05)  # as many letters as figures get
    file.write_text(render(full(
        "/mnt/storage/experiments/2019_recommendations/run-17/a_rather_long_name/training.json.bz2",
        title="Logged policy", figure=figure,
    )))  # fmt: skip
    tables = []
    with browsing(tmp_path / "profile") as browser:
        for width in (360, 768, 1440):
            browser.open(file, width=width)
            whole(browser)
            assert browser.value("document.documentElement.scrollWidth") <= width
            assert browser.value(COLLIDING) == browser.sent(*COMPLAINTS) == []
            assert [sent["request"]["url"] for sent in browser.sent("Network.requestWillBeSent")] == [file.as_uri()]
            assert browser.value(SMALLEST_LETTERS) >= 9
            # who cannot see finds the same tables on a phone
            nodes = browser.ask("Accessibility.getFullAXTree")["nodes"]
            roles = Counter(node["role"]["value"] for node in nodes if not node["ignored"])
            tables.append([roles[name] for name in ("table", "row", "columnheader", "rowheader", "image")])
        assert tables[0] == tables[1] == tables[2]
        browser.open(file, width=718)  # A4 without margins of a centimetre, in CSS pixels
        browser.ask("Emulation.setEmulatedMedia", media="print")
        assert set(browser.value(BREAKS)) == {"avoid"}
        assert browser.value(HIGHEST_CARD) < 1000  # a drawing that is higher than a page would be cut all the same
        whole(browser)


def whole(browser: Browser) -> None:
    """Asserts that nothing is cut, folded or unfolded."""
    assert browser.value(OVERFLOWING) == []
    browser.value("document.querySelectorAll('details').forEach(each => { each.open = true; })")
    assert browser.value(OVERFLOWING) == browser.value(BROKEN_WORDS) == []


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_colors_have_enough_contrast(scheme: int) -> None:
    """WCAG 2.2: 4.5 for text, 3 for drawings."""
    colors = dict(re.findall(r"--(\w+): (#\w{6})", STYLE.read_text().split(":root {")[1 + scheme]))
    least = dict.fromkeys(("ink", "soft", "good", "unclear", "bad"), 4.5) | {f"c{i}": 3.0 for i in range(8)}
    assert [
        (name, under)
        for (name, ratio), under in product(least.items(), ("ground", "card"))
        if contrast(colors[name], colors[under]) < ratio
    ] == []


def test_curves_are_told_apart_without_colors() -> None:
    dashes = re.findall(r"\.s(\d) \{ --s: var\(--c\1\);(?: --dash: ([\d ]+);)? \}", STYLE.read_text())
    assert len(dashes) == len({dash for _, dash in dashes}) >= len(SEQUENTIAL)


def contrast(*colors: str) -> float:
    """Ratio of relative luminances, https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio."""
    parts = np.array([list(bytes.fromhex(color[1:])) for color in colors]) / 255
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    low, high = sorted(linear @ [0.2126, 0.7152, 0.0722])
    return float((high + 0.05) / (low + 0.05))

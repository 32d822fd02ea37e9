"""The page of a rollout in a real browser, at every stage: nothing is cut, nothing else is asked for."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.browser import BROKEN_WORDS, COLLIDING, OVERFLOWING, browsing, needs_browser

from reagent_lite.config.rollout_config import ComparisonConfig, RolloutGuardrailConfig
from reagent_lite.evaluation.policy_comparison import Comparer, Units
from reagent_lite.report.rollout_page import render_rollout

CONFIG = ComparisonConfig(
    reward_range=(0, 1), guardrails={"complaints": RolloutGuardrailConfig(at_most_worse_by=0.02, range=(0, 1))}
)


def document(units: int = 0, *, lift: float = 0.0, state: str = "running") -> dict[str, Any]:
    """A rollout after some units, as GET /rollout.json has it."""
    rng = np.random.default_rng(0)
    is_new = rng.random(units) < 0.2
    second = rng.random(units) < np.where(is_new, 0.9, 0.1)
    outcomes = [rng.random(units) < 0.3 + lift * second, rng.random(units) < 0.05]
    comparer = Comparer(CONFIG)
    comparer.add(
        Units(
            is_new=is_new,
            share=np.full(units, 0.2),
            log_ratio=np.where(second, 1, -1) * np.log(9.0),
            outcomes=np.stack(outcomes, 1).astype(float),
        )
    )
    comparison = comparer.comparison()
    history = [{name: getattr(point, name) for name in point.__slots__} for point in comparison.history]
    event = {"event": "begin", "time": "2026-11-28T10:00:00+00:00", "share": 0.2,
             "cause": "the new model is given 0.2 of the units"}  # fmt: skip
    last = {"event": "stop", "time": "2026-11-29T11:30:00+00:00", "share": 0.0, "cause": comparison.sentence}
    return {
        "rollout": "5f3a9c01", "state": state, "share": 0.2, "current": "a" * 64, "new": "b" * 64,
        "comparison": comparison.figures() | {"history": history}, "waiting_units": 12,
        "late_rows": 0, "unmeasured": [],
        "first": 1_795_860_000_000_000, "last": 1_795_946_400_000_000,
        "events": [event] if state == "running" else [event, last],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("units", "lift", "state", "words"),
    [
        (0, 0.0, "running", "No unit has been compared yet"),
        (700, 0.06, "running", "At the present rate the difference would be known in about"),
        (6000, 0.2, "running", "The new policy is better after 6,000 units: the reward differs by"),
        (6000, -0.2, "stopped", "was stopped, and the current model decides alone, since 2026-11-29 11:30 UTC"),
    ],
)
def test_the_page_says_what_is_known(units: int, lift: float, state: str, words: str) -> None:
    page = render_rollout(document(units, lift=lift, state=state))
    assert words in page.replace("<wbr>", "")
    assert ("Reward per unit" in page) == (units > 0)
    assert "<script" not in page


def test_names_are_escaped() -> None:
    tree = document(100)
    tree["comparison"]["differences"][1]["name"] = "<script>alert(1)</script>"
    tree["events"][0]["cause"] = "<img src=x>"
    page = render_rollout(tree)
    assert "<script" not in page
    assert "<img" not in page


@needs_browser
def test_it_fits_screens_and_paper(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(render_rollout(document(6000, lift=-0.2, state="stopped")))
    with browsing(tmp_path / "profile") as browser:
        for width in (390, 1280):
            browser.open(file, width=width)
            assert browser.value(OVERFLOWING) == browser.value(BROKEN_WORDS) == browser.value(COLLIDING) == []
            assert browser.value("document.documentElement.scrollWidth") <= width
            assert browser.sent("Runtime.exceptionThrown", "Log.entryAdded") == []
            assert [sent["request"]["url"] for sent in browser.sent("Network.requestWillBeSent")] == [file.as_uri()]
        browser.ask("Emulation.setEmulatedMedia", media="print")
        assert browser.value(OVERFLOWING) == []


@needs_browser
def test_it_is_read_with_the_keyboard(tmp_path: Path) -> None:
    """Tab visits the link and what opens and scrolls, in the order of the page, each with a visible mark."""
    file = tmp_path / "page.html"
    file.write_text(render_rollout(document(6000, lift=-0.2)))
    with browsing(tmp_path / "profile") as browser:
        browser.open(file, width=1280)
        visited = []
        for _ in range(5):
            browser.press("Tab")
            visited.append(browser.value("document.activeElement.tagName"))
            mark = "(({outlineStyle, outlineWidth}) => outlineStyle + ' ' + outlineWidth)"
            assert browser.value(f"{mark}(getComputedStyle(document.activeElement))") == "solid 3px"
            if visited == ["A", "SUMMARY"]:
                is_open = "document.querySelector('details').open"
                for key, opened in (("Enter", True), (" ", False)):
                    browser.press(key)
                    assert browser.value(is_open) == opened
        assert visited == ["A", "SUMMARY", "SUMMARY", "DIV", "DIV"]


def test_it_stays_as_it_is_if_asked_to() -> None:
    """A page that loads itself again closes its tables and loses the place of the keyboard."""
    assert 'http-equiv="refresh" content="30"' in render_rollout(document())
    still = render_rollout(document(), refreshes=False)
    assert 'http-equiv="refresh"' not in still
    assert '<a href="?">Load it again every 30 seconds</a>' in still

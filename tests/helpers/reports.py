"""Reports by hand, and what a reader finds in a page: headings, cells, whether every tag is closed."""

import math
from dataclasses import replace
from html.parser import HTMLParser
from itertools import cycle
from typing import Any

import numpy as np
import torch

from reagent_lite.evaluation.cpe import CPEResult, Estimate, IntervalInput
from reagent_lite.evaluation.decision import (
    Choice,
    Comparison,
    Conclusion,
    Evidence,
    Finding,
    FindingSource,
    ShipDecision,
)
from reagent_lite.evaluation.explanation import Explanation, Importance, PolicyGroup, PolicyTree
from reagent_lite.evaluation.interval import Interval
from reagent_lite.evaluation.overlap import Overlap
from reagent_lite.evaluation.played import AGAINST, MODEL, RANDOM, Earned, Played, PlayedPolicy
from reagent_lite.evaluation.segment_effects import SegmentEffect, Segments
from reagent_lite.evaluation.verdict import Verdict
from reagent_lite.report.charts import Curves, Line, curve_chart
from reagent_lite.report.content import PageSection, Report, Table
from reagent_lite.report.explanation_sections import explanation_sections
from reagent_lite.report.html_page import render
from reagent_lite.report.run import FeatureFacts, config_section, features_section
from reagent_lite.report.sections import (
    actions_section,
    candidates_section,
    estimates_section,
    simulated_section,
    weights_section,
)
from reagent_lite.rl.estimators import ESTIMATORS

SEQUENTIAL = [name for name, estimator in ESTIMATORS.items() if estimator.sequential]
UNDEFINED = Interval(value=math.nan, low=math.nan, high=math.nan)
FIGURE = Interval(value=2.0, low=1.0, high=3.0)
OVERLAP = Overlap(
    num_rows=1200, num_episodes=30, effective_rows=400.0, effective_groups=25.0, mean_weight=FIGURE,
    largest_row_share=0.25, matched_rows=900, rows_above_tau=3,
    shrunk_share=0.125, unsupported_share=0.0, enough=10.0, horizon=40, horizon_reached=7, effective_horizon=3,
    effective_episodes=12.5,
    mean_episode_weight=FIGURE, largest_episode_share=0.5, effective_episodes_by_step=(30.0, 4.0),
    mean_weight_by_step=(1.0, 0.5), cut_share=0.125,
)  # fmt: skip
RESULT = CPEResult(
    outcomes=(),
    overlap=OVERLAP,
    weighted=True,
    gamma=0.9,
    level=0.95,
    num_episodes_left_out=0,
    num_rows_beyond_horizon=0,
)


class Page(HTMLParser):
    """Reads a document, holds every tag to its end, and collects texts by tag."""

    void = frozenset({"meta", "link", "wbr"})

    def __init__(self, page: Report | str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: dict[str, list[str]] = {}
        self.feed(page if isinstance(page, str) else render(page))
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.void:
            self.open.append(tag)
            self.text.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        for tag in set(self.open):
            self.text[tag][-1] += data


def around(value: float, half: float) -> Interval:
    return Interval(value=value, low=value - half, high=value + half)


def estimated(name: str, value: float, half: float, verdict: Verdict = Verdict.TRUSTWORTHY) -> Estimate:
    """An estimate with a symmetric interval, against a reference of 10."""
    return estimate(name, around(value, half), around(value - 10, half), value / 10, verdict, "why")


def undefined(name: str) -> Estimate:
    return estimate(name, UNDEFINED, UNDEFINED, UNDEFINED.value, Verdict.DO_NOT_USE, "no propensities")


def estimate(
    name: str, figure: Interval, difference: Interval, normalized: float, verdict: Verdict, reason: str
) -> Estimate:
    return Estimate(name=name, figure=figure, difference=difference, normalized=normalized, verdict=verdict,
                    reason=reason, basis=IntervalInput(samples=torch.zeros(0), question=None))  # fmt: skip


def comparison(*rows: Estimate) -> Comparison:
    return Comparison(
        outcome="Reward", unit="discounted return per episode", decides=True, reference=around(10.0, 1.0), rows=rows
    )


def game(first: Interval, other: Interval, difference: Interval, *, against: bool = False) -> Played:
    """Two policies that played, the second one another model or random actions; discounted returns are the same."""
    key = AGAINST if against else RANDOM
    policies = {
        name: PlayedPolicy(total=total, discounted=total, length=1234.5, cut_share=0.125)
        for name, total in ((MODEL, first), (key, other))
    }
    return Played(env="x", parameters={}, time_limit=200, episodes=10, longest=150, policies=policies,
                  differences={key: Earned(total=difference, discounted=difference)})  # fmt: skip


def candidates(name: str, number: int = 1) -> dict[str, Any]:
    """What is chosen among candidates of so many features, as evaluation.candidates.tally gives it."""
    figures = {"logged": {"mean": 1.5, "stddev": 2.5}, "policy": {"mean": 3.5, "stddev": 4.5}, "difference": 0.625}
    return {
        "rows": 3, "same": 0.5, "propensity": 0.25, "probability": 0.75, "candidates": {"17 to 32": 1.0},
        "by_propensity": [{"low": 0.0, "high": 0.1, "rows": 1.0, "propensity": 0.05, "policy": 0.125}],
        "features": {f"{name}{place or ''}": figures for place in range(number)},
    }  # fmt: skip


def explanation(name: str, figure: Interval) -> Explanation:
    """Three segments, choices and leaves with this name, and features."""
    choices = {f"{name} {number}": (0.5, 0.25) for number in range(3)}
    groups = tuple(PolicyGroup(words=f"{name} {number}", share=1 / 3, choices=choices) for number in range(3))
    effects = tuple(
        SegmentEffect(
            words=group.words, share=group.share, count=100, effective=12.5, estimator=SEQUENTIAL[0], logged=figure,
            figure=figure, difference=around(difference, 0.5), verdict=Verdict.TRUSTWORTHY, reason=name,
        )
        for group, difference in zip(groups, (1.0, -1.0, 0.25), strict=True)
    )  # fmt: skip
    return Explanation(
        tree=PolicyTree(leaves=groups, fidelity=0.75, best=0.875, constant=0.5, rows=1000),
        segments=Segments(effects=effects, total=around(0.125, 0.25), level=0.95, unit="episode",
                          segment=np.zeros(0, np.int64), choosing=500),
        choices=groups,
        importance=Importance(changes={name: 0.5, "other": 0.0}, rows=2000, of_tree=True),
    )  # fmt: skip


def estimates(*rows: Comparison, result: CPEResult | None = None, plain: bool = False) -> PageSection:
    return estimates_section(Evidence(comparisons=rows, result=result), 0.95, "evaluation.json", plain=plain)


def decided(choice: Choice = Choice.SHIP, words: str = "why") -> ShipDecision:
    finding = Finding(source=FindingSource.LOG, standing=Conclusion.BETTER, reason=f"{words} too", next_step=words)
    return ShipDecision(choice=choice, reason=words, next_step=words, findings=(finding,))


def report_of(*sections: PageSection) -> Report:
    return Report(title="t", decision=decided(), sections=sections)


def full(name: str, *, title: str = "", figure: Interval | None = None) -> Report:
    """A report with every section and every kind of cell.

    Args:
        name: every word that comes from outside, such as paths and reasons.
        title: in the place of words that the program writes itself; by default name as well.
        figure: every estimate.
    """
    title, figure = title or name, figure or around(12.0, 1.0)
    points = tuple((float(x), x * 1e-5) for x in range(200))
    band = tuple((0.5 * y, 2 * y) for _, y in points)
    lines = tuple(Line(name=estimator, points=points, band=band, final=True) for estimator in SEQUENTIAL)
    rows = tuple(
        estimate(estimator, figure, figure, figure.value, verdict, name)
        for estimator, verdict in zip(SEQUENTIAL, cycle(Verdict), strict=False)
    )
    compared = replace(comparison(*rows), outcome=title, reference_name=title, reference=figure, simulated=figure)
    long = replace(
        OVERLAP, effective_episodes_by_step=tuple(200.0 / (1 + k) for k in range(200)),
        mean_weight_by_step=tuple(0.9**k for k in range(200)),
    )  # fmt: skip
    digest = "0123456789abcdef" * 4
    feature = {"feature_type": title, "mean": -0.0001234, "stddev": 0.0001234}
    return Report(
        title=name, notes=(name,), facts=((title, name), (title, digest[:16])),
        decision=decided(Choice.NOT_ENOUGH, words=name),
        sections=(
            estimates(compared, result=RESULT),
            *explanation_sections(explanation(title, figure), name),
            simulated_section(game(figure, figure, figure), {MODEL: title}, 0.95, name),
            weights_section(long, 10.0),
            PageSection(title="Learning curves", charts=(
                curve_chart(Curves(title=title, x=title, y=title, lines=lines, mark=(0.0005, title))),
            )),
            actions_section({name: (0.75, 0.25, 0.5)}, name),
            features_section({title: {str(n): feature for n in range(40)}},
                             {title: {1: FeatureFacts(present=0.5, mean=1.0, stddev=2.0)}}, name),
            PageSection(title="Data lineage", tables=(
                Table(title=name,
                      columns=tuple((title, kind) for kind in ("name", "name", "mark", "share", *["number"] * 3)),
                      rows=[("7", title, "◇ moderate", 0.1234, 0.0001234, figure, figure)]),
                Table(title=name, columns=tuple((title, kind) for kind in ("name", "words", "name", "number")),
                      rows=[(name, name, digest, 123_456_789_012)]),
            )),
            config_section({name: name}),
            replace(candidates_section(candidates(title), name), title="Candidates"),
        ),
    )  # fmt: skip

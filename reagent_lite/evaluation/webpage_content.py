"""What a report page says, as plain data; None stands for a figure that is undefined."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from reagent_lite.errors import counted
from reagent_lite.evaluation.verdict import Verdict
from reagent_lite.evaluation.webpage_candidates import Candidates

State = Literal["good", "unclear", "bad"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A figure and the ends of its interval."""

    value: float | None
    low: float | None
    high: float | None

    @property
    def defined(self) -> bool:
        """Whether figure and interval are finite numbers."""
        return all(one is not None and math.isfinite(one) for one in (self.value, self.low, self.high))


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimated:
    """One estimator's line in a comparison.

    Attributes:
        name: of the estimator.
        figure: the estimate.
        difference: estimate - reference, resampled in pairs; None where it was not computed.
        ratio: estimate / reference; None where undefined.
        verdict, reason: whether it may be used, in words.
    """

    name: str
    figure: Interval
    difference: Interval | None = None
    ratio: float | None = None
    verdict: Verdict
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Estimates of one quantity beside what they are compared with.

    Attributes:
        outcome: "Reward", or "Metric" and its name, which may be "reward" as well.
        unit: what is averaged, such as "return of an episode".
        decides: whether the page's verdict rests on it; the first that does is used.
        reference_name: such as "logged policy".
        reference: its value.
        rows: estimates.
        simulated: what the estimates aim at, from simulation; None where it was not played or is another quantity.
    """

    outcome: str
    unit: str
    decides: bool
    reference_name: str
    reference: Interval
    rows: tuple[Estimated, ...]
    simulated: Interval | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """Returns of one policy in simulation.

    Attributes:
        name: of the policy.
        returns: mean sum of an episode's rewards.
        discounted: mean discounted sum; None where it was not counted.
        length: mean steps of an episode; None where unknown.
        cut_share: share of episodes that the time limit ended; None where unknown.
        difference: returns of the page's first policy minus this one's, paired; None where they were not.
    """

    name: str
    returns: Interval
    discounted: Interval | None = None
    length: float | None = None
    cut_share: float | None = None
    difference: Interval | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Diagnostics of importance weights.

    Attributes:
        facts: (name, value in words), in order.
        effective_episodes: at each step of an episode.
        mean_weight: of episodes at each step, should be 1; empty where it is unknown.
        enough: effective episodes that estimates of a return need at least; None draws no line.
        judged_step: the step at which estimates of a return are judged.
    """

    facts: tuple[tuple[str, str], ...]
    effective_episodes: tuple[float | None, ...]
    mean_weight: tuple[float | None, ...] = ()
    enough: float | None
    judged_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A curve: (x, y) ascending in x, and at the same x the ends of a band, or none."""

    name: str
    points: tuple[tuple[float, float], ...]
    band: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """Curves that share axes.

    Attributes:
        title: of the chart.
        x, y: what the axes count, with units.
        lines: at most eight are told apart.
        mark: a value of y to draw a line at, with its name.
    """

    title: str
    x: str
    y: str
    lines: tuple[Line, ...]
    mark: tuple[float, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionShare:
    """How often an action is chosen, as shares of held-out rows.

    Attributes:
        name: of the action.
        logged: by the log.
        greedy: by the learned policy's largest value; None where unknown.
        propensity: mean probability under the evaluated policy; None where unknown.
    """

    name: str
    logged: float | None
    greedy: float | None
    propensity: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """A feature's normalization and drift.

    Attributes:
        name: its id.
        column: "state" or "action".
        type: of the normalization.
        present: share of rows that have it; None where unknown.
        mean, stddev: of the normalization, in its own space; None where the type has none.
    """

    name: str
    column: str
    type: str
    present: float | None
    mean: float | None
    stddev: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureShift:
    """A feature's drift against a reference.

    Attributes:
        name: its id.
        column: of the data, such as "state_features".
        verdict: "stable", "moderate" or "large".
        psi, ks: population stability index, Kolmogorov-Smirnov distance.
        present, mean: (reference, training data).
    """

    name: str
    column: str
    verdict: str
    psi: float | None
    ks: float | None
    present: tuple[float | None, float | None]
    mean: tuple[float | None, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A titled table of words: where data came from, what a stage kept, returns in simulation.

    Attributes:
        title: its caption.
        head: names of columns.
        rows: as many cells each.
    """

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A report page; what is empty or None has no section.

    Attributes:
        title: of the page.
        facts: (name, value) of the summary, in order.
        comparisons: estimates, see compared().
        level: of all intervals.
        weights: see weighed().
        simulated: returns in simulation, the judged policy first; the second is what it is held against.
        simulated_note: how it was simulated.
        curves: of learning.
        actions: logged against learned, where they have names.
        candidates: logged against learned, where they have features.
        features, shifts: statistics and drift.
        features_note: what the shares of rows are of.
        lineage: where the data came from.
        config: resolved, JSON.
        notes: sentences a reader must know, such as what was not scored.
        beside: the file that has what the page leaves out.
    """

    title: str
    facts: tuple[tuple[str, str], ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    level: float = 0.95
    weights: Weights | None = None
    simulated: tuple[Simulated, ...] = ()
    simulated_note: str = ""
    curves: tuple[Curves, ...] = ()
    actions: tuple[ActionShare, ...] = ()
    candidates: Candidates | None = None
    features: tuple[Feature, ...] = ()
    features_note: str = ""
    shifts: tuple[FeatureShift, ...] = ()
    lineage: tuple[Table, ...] = ()
    config: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()
    beside: str = "evaluation.json"


_UNITS = (
    (("sequential", "return of an episode"), ("one_step", "reward of a row")),
    (("sequential", "discounted sum over an episode"), ("one_step", "mean of a row")),
)


def compared(cpe: Mapping[str, Any], *, reference_name: str = "logged policy") -> tuple[Comparison, ...]:
    """Returns the comparisons of an evaluation, as report.as_json gives it; returns of episodes decide."""
    return tuple(
        Comparison(
            outcome=f"Metric {outcome['name']}" if place else outcome["name"],
            unit=unit,
            decides=family == "sequential",
            reference_name=reference_name,
            reference=interval(outcome[family]["logged"]),
            rows=tuple(
                Estimated(
                    name=row["name"],
                    figure=interval(row["figure"]),
                    difference=interval(row["difference"]),
                    ratio=row["normalized"],
                    verdict=Verdict(row["verdict"]),
                    reason=row["reason"],
                )
                for row in outcome[family]["estimates"]
            ),
        )
        for place, outcome in enumerate(cpe["outcomes"])
        for family, unit in _UNITS[place > 0]
    )


def interval(figure: Mapping[str, float | None]) -> Interval:
    """Returns a figure of report.as_json."""
    return Interval(**{one.name: figure[one.name] for one in fields(Interval)})


def weighed(cpe: Mapping[str, Any], *, enough: float | None) -> Weights | None:
    """Returns the diagnostics of an evaluation, as report.as_json gives it; None where nothing was scored.

    Args:
        cpe: the evaluation.
        enough: evaluation.min_effective_episodes.
    """
    overlap = cpe["overlap"]
    if overlap is None:
        return None
    facts = (
        ("Episodes scored", f"{overlap['num_episodes']:,}"),
        ("Rows scored", f"{overlap['num_rows']:,}"),
        ("Effective rows", number(overlap["effective_rows"])),
        (f"Effective episodes at step {overlap['judged_step']}", number(overlap["effective_episodes"])),
        ("Mean weight of a row, should be 1", spread(interval(overlap["mean_weight"]))),
        ("Mean weight of an episode there, should be 1", spread(interval(overlap["mean_episode_weight"]))),
        ("Largest share of one row", percent(overlap["largest_row_share"])),
        ("Largest share of one episode", percent(overlap["largest_episode_share"])),
        ("Rows logged as certain where the policy may differ", percent(overlap["unsupported_share"])),
        ("Steps with enough effective episodes", f"{overlap['horizon_reached']} of {overlap['horizon']}"),
        ("Episodes cut before their end", percent(overlap["cut_share"])),
    )
    return Weights(
        facts=facts,
        effective_episodes=tuple(overlap["effective_episodes_by_step"]),
        mean_weight=tuple(overlap["mean_weight_by_step"]),
        enough=enough,
        judged_step=overlap["judged_step"],
    )


def unscored(cpe: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns sentences on what an evaluation left out, none where it left out nothing."""
    if cpe["overlap"] is None:
        return ("No held-out rows: nothing could be estimated from the log.",)
    episodes, rows = cpe["num_episodes_left_out"], cpe["num_rows_beyond_horizon"]
    if not episodes and not rows:
        return ()
    return (f"Not scored: {counted(episodes, 'episode')}, and {counted(rows, 'row')} beyond the horizon.",)


def number(value: float | None) -> str:
    """Returns a figure to four digits, "–" where it is undefined."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e7 else f"{value:.4g}"


def percent(share: float | None) -> str:
    """Returns a share as a percentage, "–" where it is undefined."""
    return "–" if share is None or not math.isfinite(share) else f"{share:.2%}"


def spread(figure: Interval) -> str:
    """Returns a figure with its interval in words."""
    return f"{number(figure.value)} ({number(figure.low)} to {number(figure.high)})"

"""An evaluation as JSON and back, as TensorBoard scalars and as lines of text."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from reagent_lite.errors import counted
from reagent_lite.evaluation.cpe import CPEResult, Estimate, OutcomeResult
from reagent_lite.evaluation.decision import Comparison
from reagent_lite.evaluation.interval import Interval, finite, number
from reagent_lite.evaluation.page import EvaluationPage
from reagent_lite.evaluation.verdict import Verdict


def as_json(result: CPEResult) -> dict[str, Any]:
    """Returns the whole result as JSON types; what is undefined (NaN, infinity) is null."""
    cleaned: dict[str, Any] = _clean(asdict(result))
    return cleaned


def scalars(result: CPEResult) -> dict[str, float]:
    """Returns {tag: value} for TensorBoard: `CPE/{outcome}/{estimator}`, intervals and diagnostics beside them.

    Undefined figures are left out.
    """
    tags: dict[str, float] = {}
    for outcome in result.outcomes:
        for family in (outcome.one_step, outcome.sequential):
            for estimate in family.estimates:
                tag = f"CPE/{outcome.name}/{estimate.name}"
                tags[tag] = estimate.figure.value
                tags[f"{tag}/low"], tags[f"{tag}/high"] = estimate.figure.low, estimate.figure.high
                tags[f"{tag}/normalized"] = estimate.normalized
        tags[f"CPE/{outcome.name}/Logged_Reward"] = outcome.one_step.logged.value
        tags[f"CPE/{outcome.name}/Logged_Return"] = outcome.sequential.logged.value
    if result.overlap is not None:
        tags["CPE/overlap/mean_weight"] = result.overlap.mean_weight.value
        tags["CPE/overlap/effective_rows"] = result.overlap.effective_rows
        tags["CPE/overlap/effective_episodes"] = result.overlap.effective_episodes
        tags["CPE/overlap/unsupported_share"] = result.overlap.unsupported_share
        tags["CPE/overlap/horizon_reached"] = float(result.overlap.horizon_reached)
    return {tag: value for tag, value in tags.items() if math.isfinite(value)}


def reward_model_scalars(page: EvaluationPage, action_names: tuple[str, ...]) -> dict[str, float]:
    """Returns {`reward/model/{a}/mean`: value}: the reward model's mean over rows in which the action is allowed."""
    allowed = [page.mask[:, k] for k in range(len(action_names))]
    return {
        f"reward/model/{name}/mean": float(page.reward_model[rows, k, 0].mean())
        for k, (name, rows) in enumerate(zip(action_names, allowed, strict=True))
        if bool(rows.any())
    }


def lines(result: CPEResult) -> list[str]:
    """Returns the result as text: what it rests on, then one line per estimate with interval and verdict."""
    if result.overlap is None:
        return ["CPE: no held-out rows to evaluate on"]
    overlap = result.overlap
    text = [
        f"CPE on {counted(overlap.num_episodes, 'held-out episode')}, {counted(overlap.num_rows, 'row')}: "
        f"{number(overlap.effective_episodes)} effective episodes at step {overlap.judged_step}, "
        f"mean weight {number(overlap.mean_weight.value)}, "
        f"{overlap.horizon_reached} of {overlap.horizon} steps reached; intervals at {result.level:.0%}"
    ]
    if result.num_episodes_left_out or result.num_rows_beyond_horizon:
        text.append(
            f"  not scored: {counted(result.num_episodes_left_out, 'episode')}, "
            f"{counted(result.num_rows_beyond_horizon, 'row')} beyond the horizon"
        )
    for outcome in result.outcomes:
        text += _outcome_lines(outcome)
    return text


def _outcome_lines(outcome: OutcomeResult) -> list[str]:
    text: list[str] = []
    for unit, family in (
        ("reward of a row", outcome.one_step),
        ("discounted return of an episode", outcome.sequential),
    ):
        text.append(f"{outcome.name}, {unit}: logged {family.logged}")
        text += [_estimate_line(estimate) for estimate in family.estimates]
    return text


def _estimate_line(estimate: Estimate) -> str:
    ratio = f" = {number(estimate.normalized)} x logged" if math.isfinite(estimate.normalized) else ""
    return f"  {estimate.name}: {estimate.figure}{ratio}; {estimate.verdict}: {estimate.reason}"


def _clean(value: Any) -> Any:
    if isinstance(value, float):
        return finite(value)
    if isinstance(value, dict):
        return {key: _clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    return value


_UNITS = (
    (("sequential", "discounted return of an episode"), ("one_step", "reward of a row")),
    (("sequential", "discounted sum over an episode"), ("one_step", "mean of a row")),
)
"""What is averaged: of the reward, and of a metric."""


def compared(cpe: Mapping[str, Any] | None) -> tuple[Comparison, ...]:
    """Returns the comparisons of a document of `as_json`; the reward's return decides."""
    return tuple(
        Comparison(
            outcome=f"Metric {outcome['name']}" if place else outcome["name"],
            unit=unit,
            decides=family == "sequential" and not place,
            reference=Interval.read(outcome[family]["logged"]),
            rows=tuple(map(estimate_of, outcome[family]["estimates"])),
        )
        for place, outcome in enumerate(cpe["outcomes"] if cpe else ())
        for family, unit in _UNITS[place > 0]
    )


def estimate_of(row: Mapping[str, Any]) -> Estimate:
    """Returns an estimate of such a document."""
    ratio = row["normalized"]
    return Estimate(
        name=row["name"],
        figure=Interval.read(row["figure"]),
        normalized=math.nan if ratio is None else ratio,
        difference=Interval.read(row["difference"]),
        verdict=Verdict(row["verdict"]),
        reason=row["reason"],
    )

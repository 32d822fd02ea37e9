"""Whether an evaluation shows what `publish_if` asks for."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reagent_lite.config.publish import PublishConfig
from reagent_lite.errors import counted
from reagent_lite.evaluation.interval import number
from reagent_lite.evaluation.verdict import Verdict
from reagent_lite.evaluation.withheld import WEIGHTED


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """A decision.

    Attributes:
        passed: whether the model may be exported.
        reason: why, or why not, in words.
        document: condition, estimate with interval, bound and reason as JSON types; null where undefined.
    """

    passed: bool
    reason: str
    document: dict[str, Any]


def decide(cpe: Mapping[str, Any], condition: PublishConfig, *, rows_without_propensity: int) -> Gate:
    """Holds a condition against an evaluation.

    Args:
        cpe: as report.as_json gives it.
        condition: what is asked for.
        rows_without_propensity: of the log; with any, no estimate by weights counts.
    """
    asked = condition.model_dump(mode="json")
    found = _find(cpe, condition)
    if found is None:
        reason = "no held-out episodes could be scored"
        nothing = dict.fromkeys(("estimate", "difference", "logged", "bound", "lower", "verdict"))
        return Gate(passed=False, reason=reason, document={**asked, **nothing, "reason": reason})
    estimate, logged = found
    paired = condition.lower_bound_above == "logged"
    bound = 0.0 if condition.lower_bound_above == "logged" else condition.lower_bound_above
    lower = estimate["difference" if paired else "figure"]["low"]
    passed, reason = _judged(estimate, condition, lower, bound, rows_without_propensity)
    document = {
        **asked, "estimate": estimate["figure"], "difference": estimate["difference"], "logged": logged,
        "bound": bound, "lower": lower, "verdict": estimate["verdict"], "reason": reason,
    }  # fmt: skip
    return Gate(passed=passed, reason=reason, document=document)


def _find(cpe: Mapping[str, Any], condition: PublishConfig) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Returns the estimate that is asked for, and the logged policy's value of its family."""
    for outcome in cpe["outcomes"]:
        for family in (outcome["one_step"], outcome["sequential"]):
            for estimate in family["estimates"]:
                if outcome["name"] == condition.outcome and estimate["name"] == condition.estimator:
                    return estimate, family["logged"]
    return None


def _judged(
    estimate: dict[str, Any], condition: PublishConfig, lower: float | None, bound: float, rows_without_propensity: int
) -> tuple[bool, str]:
    name = f"{condition.estimator} of {condition.outcome}"
    if rows_without_propensity and condition.estimator in WEIGHTED:
        rows = counted(rows_without_propensity, "row of the log has", "rows of the log have")
        return False, f"{name} cannot be had: {rows} no propensity"
    if lower is None:
        return False, f"{name} has no interval: {estimate['reason']}"
    if estimate["verdict"] == Verdict.DO_NOT_USE:
        return False, f"{name} is not to be used: {estimate['reason']}"
    what = f"{name} is {number(estimate['figure']['value'])}"
    if condition.lower_bound_above == "logged":
        what += f"; its difference to the logged policy is {number(estimate['difference']['value'])} and"
    else:
        what += " and"
    relation = "above" if lower > bound else "not above"
    return lower > bound, f"{what} at least {number(lower)}, {relation} {number(bound)}"

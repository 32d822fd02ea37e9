"""The check of an evaluation against `publish_if`."""

from dataclasses import dataclass
from typing import Any

from reagent_lite.config.publish import PublishConfig
from reagent_lite.evaluation.cpe import CPEResult, Estimate, ReturnOrReward
from reagent_lite.evaluation.interval import none_if_infinite, number
from reagent_lite.evaluation.verdict import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """The decision of publish_if.

    Attributes:
        passed: whether the model may be exported.
        reason: the reason, in words.
        document: condition, estimate, reference and reason as JSON types; null if undefined.
    """

    passed: bool
    reason: str
    document: dict[str, Any]


def apply_gate(result: CPEResult, condition: PublishConfig) -> Gate:
    """Returns whether an evaluation fulfils a condition, and why."""
    settings = condition.model_dump(mode="json")
    for outcome in result.outcomes:
        for family in (outcome.one_step, outcome.sequential):
            for estimate in family.estimates:
                if (outcome.name, estimate.name) == (condition.outcome, condition.estimator):
                    return _decide(estimate, family, condition, settings)
    undefined = dict.fromkeys(("estimate", "difference", "logged", "continued", "bound", "lower", "verdict"))
    reason = "no episodes could be scored"
    return Gate(passed=False, reason=reason, document={**settings, **undefined, "reason": reason})


def _decide(estimate: Estimate, family: ReturnOrReward, condition: PublishConfig, settings: dict[str, Any]) -> Gate:
    above = condition.lower_bound_above
    bound, tested = (0.0, estimate.difference) if above == "logged" else (above, estimate.figure)
    lower = none_if_infinite(tested.low)
    name = f"{condition.estimator} of {condition.outcome}"
    passed = False
    if lower is None:
        reason = f"{name} has no interval: {estimate.reason}"
    elif estimate.verdict is Verdict.DO_NOT_USE:
        reason = f"{name} is not to be used: {estimate.reason}"
    else:
        passed = lower > bound
        difference = f"; its difference to the logged policy is {number(tested.value)}" if above == "logged" else ""
        reason = (
            f"{name} is {number(estimate.figure.value)}{difference} and at least {number(lower)}, "
            f"{'above' if passed else 'not above'} {number(bound)}"
        )
    document = {
        **settings,
        "estimate": estimate.figure.json(),
        "difference": estimate.difference.json(),
        "logged": family.logged.json(),
        "continued": None if family.continued is None else family.continued.json(),
        "bound": bound,
        "lower": lower,
        "verdict": estimate.verdict,
        "reason": reason,
    }
    return Gate(passed=passed, reason=reason, document=document)

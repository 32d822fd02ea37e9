"""Estimates that a log, or what was fitted to it, cannot give: left out, each with the reason."""

import math
from dataclasses import replace
from typing import Final

from reagent_lite.evaluation.cpe import CPEResult, Estimate, Family
from reagent_lite.evaluation.interval import UNDEFINED
from reagent_lite.evaluation.verdict import Verdict
from reagent_lite.rl.estimators import ESTIMATORS

WEIGHTED: Final = tuple(name for name, one in ESTIMATORS.items() if one.weighted)
MODELLED: Final = tuple(name for name, one in ESTIMATORS.items() if one.model)


def withhold(result: CPEResult, reasons: dict[str, str]) -> CPEResult:
    """Returns the result with some estimates undefined and not to be used.

    Where every estimate by weights is among them, a model's own estimate is at best wide: nothing checks it.

    Args:
        result: all estimates.
        reasons: {name of an estimator: why it cannot be had}.
    """
    unchecked = set(WEIGHTED) <= set(reasons)

    def of_estimate(estimate: Estimate) -> Estimate:
        reason = reasons.get(estimate.name)
        if reason is not None:
            return replace(estimate, figure=UNDEFINED, normalized=math.nan, difference=UNDEFINED,
                           verdict=Verdict.DO_NOT_USE, reason=reason)  # fmt: skip
        if unchecked and math.isfinite(estimate.figure.low):
            why = "the model cannot be checked against the log: there are no weighted estimates"
            return replace(estimate, verdict=Verdict.WIDE, reason=why)
        return estimate

    def of_family(family: Family) -> Family:
        estimates = tuple(map(of_estimate, family.estimates))
        known = not unchecked and estimates[0].name not in reasons
        return replace(family, estimates=estimates, disagreement=family.disagreement if known else UNDEFINED)

    outcomes = tuple(
        replace(outcome, one_step=of_family(outcome.one_step), sequential=of_family(outcome.sequential))
        for outcome in result.outcomes
    )
    return replace(result, outcomes=outcomes)

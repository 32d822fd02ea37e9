"""Two policies on one log: the difference of their values, resampled in pairs."""

import math
from dataclasses import dataclass

import torch

from reagent_lite.config.evaluation import EvaluationConfig
from reagent_lite.evaluation.cpe import CPEResult, Estimate, interval_of, limit, log_of_rows
from reagent_lite.evaluation.interval import UNDEFINED, Interval
from reagent_lite.evaluation.page import EvaluationPage
from reagent_lite.evaluation.verdict import Verdict
from reagent_lite.rl.bootstrap import resamples
from reagent_lite.rl.estimators import ESTIMATORS


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One estimator's value of a policy minus that of another.

    Attributes:
        name: a key of rl.estimators.ESTIMATORS.
        figure: difference and interval.
        verdict, reason: the worse of both estimates' own; where both may be used, which policy is better.
    """

    name: str
    figure: Interval
    verdict: Verdict
    reason: str


def differences(
    pages: tuple[EvaluationPage, EvaluationPage],
    results: tuple[CPEResult, CPEResult],
    *,
    gamma: float,
    config: EvaluationConfig,
    seed: int,
) -> dict[str, tuple[Difference, ...]]:
    """Returns {outcome: differences}, the first page's policy minus the second's; {} where no rows were scored.

    Each resample draws the same episodes for both: what they share cancels, and the interval is narrower than those of
    the two values suggest.

    Args:
        pages: the same rows in the same order, for two policies.
        results: those of evaluate_page; an estimate that is undefined there is undefined here.
        gamma: discount per step.
        config: as for evaluate_page.
        seed: of the resamples.
    """
    # limit draws by the seed alone, so both keep the same episodes
    chosen = [limit(page, config, torch.Generator().manual_seed(seed))[0] for page in pages]
    if not len(chosen[0]):
        return {}
    logs = [log_of_rows(page, rows, gamma) for page, rows in zip(pages, chosen, strict=True)]
    count = config.bootstrap_resamples if logs[0].num_episodes > 1 else 0
    drawn = resamples(logs[0].num_episodes, count, torch.Generator().manual_seed(seed))
    samples = [log.estimates(drawn.blocks()) for log in logs]
    found = {}
    for target, name in enumerate(pages[0].names):
        own = [{estimate.name: estimate for estimate in result.outcomes[target].estimates} for result in results]
        found[name] = tuple(
            _difference(
                own[0][key],
                own[1][key],
                interval_of(samples[0][target][key] - samples[1][target][key], config.confidence_level),
            )
            for key in ESTIMATORS
        )
    return found


def _difference(one: Estimate, other: Estimate, figure: Interval) -> Difference:
    if not (math.isfinite(one.figure.value) and math.isfinite(other.figure.value)):
        figure = UNDEFINED
    for verdict in (Verdict.DO_NOT_USE, Verdict.WIDE):
        for whose, estimate in (("model", one), ("against", other)):
            if estimate.verdict is verdict:
                return Difference(name=one.name, figure=figure, verdict=verdict, reason=f"{whose}: {estimate.reason}")
    found = "the interval contains 0: no difference is shown"
    if figure.excludes(0.0):
        found = "model is better" if figure.value > 0 else "against is better"
    return Difference(name=one.name, figure=figure, verdict=Verdict.TRUSTWORTHY, reason=found)

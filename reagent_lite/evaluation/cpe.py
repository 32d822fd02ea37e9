"""Counterfactual policy evaluation: every estimator on one page, with interval, diagnostics and verdict.

page ─► limit: rows ─► contributions of each episode (rl.sums.Log) ─► estimates of all resamples ─► CPEResult
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from reagent_lite.config.evaluation import EvaluationConfig
from reagent_lite.errors import counted
from reagent_lite.evaluation.interval import Interval
from reagent_lite.evaluation.overlap import Overlap, measure_overlap
from reagent_lite.evaluation.page import EvaluationPage, episode_groups, tables_of
from reagent_lite.evaluation.verdict import UNCHECKED, Reasoned, Verdict, model_verdict, weighted_verdict
from reagent_lite.rl.bootstrap import percentile_interval, resamples
from reagent_lite.rl.estimators import ESTIMATORS, LOGGED
from reagent_lite.rl.sums import Estimator, Log

WEIGHTED: Final = tuple(name for name, one in ESTIMATORS.items() if one.weighted)
MODELLED: Final = tuple(name for name, one in ESTIMATORS.items() if one.model)

# Of episodes that are laid out together, padding included; a longer one is a group of its own.
_GROUP_ROWS, _GROUP_BYTES = 2**17, 2**24
_OUTCOMES_AT_ONCE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """One estimator's figures for one outcome.

    Attributes:
        name: a key of rl.estimators.ESTIMATORS.
        figure: estimate and interval.
        normalized: estimate / logged value; NaN unless the logged value's interval excludes 0.
        difference: estimate - logged value, resampled in pairs. In both, an estimate that continues where records are
            cut is compared with the logged value continued by the same value model, Family.continued.
        verdict, reason: whether it may be used.
        samples: [1 + R] the estimate, and that of every resample.
    """

    name: str
    figure: Interval
    normalized: float
    difference: Interval
    verdict: Verdict
    reason: str
    samples: Tensor = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Estimates of one quantity: the mean reward of a row, or the mean discounted return of an episode.

    Attributes:
        logged: the logged policy's own value.
        continued: that and what the value model expects after the cuts of records; None where none is cut.
        estimates: in the order of the registry; the first rests on a model alone.
        disagreement: the model's estimate minus the self-normalized weighted one.
    """

    logged: Interval
    continued: Interval | None
    estimates: tuple[Estimate, ...]
    disagreement: Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeResult:
    """All estimates of the reward or of a metric."""

    name: str
    one_step: Family
    sequential: Family

    @property
    def estimates(self) -> tuple[Estimate, ...]:
        """Both families."""
        return self.one_step.estimates + self.sequential.estimates


@dataclass(frozen=True, slots=True, kw_only=True)
class CPEResult:
    """The evaluation of one policy on one page.

    Attributes:
        outcomes: "Reward" first, then metrics; empty where the page has no rows.
        overlap: diagnostics of weights, the same for every outcome; None where the page has no rows.
        weighted: whether the log has the propensities that weights are made of.
        level: confidence level of all intervals.
        num_episodes_left_out, num_rows_beyond_horizon: what the config's limits left unscored.
    """

    outcomes: tuple[OutcomeResult, ...]
    overlap: Overlap | None
    weighted: bool
    level: float
    num_episodes_left_out: int
    num_rows_beyond_horizon: int


def evaluate_page(
    page: EvaluationPage,
    *,
    gamma: float,
    config: EvaluationConfig,
    generator: torch.Generator,
    estimators: Mapping[str, Estimator] = ESTIMATORS,
    missing: Mapping[str, str] | None = None,
    show: Callable[[int, int], None] = lambda done, total: None,
) -> CPEResult:
    """Evaluates the page's policy for the reward and every metric.

    Memory beside the page: 8 (1 + 2 T) bytes a row and 8 (3 + 11 T) an episode for T outcomes, at most 32 at a time; a
    few numbers a row for a moment; and a constant below 70 MB, whatever the lengths of episodes. With ten choices that
    is less than a page of 75 MB. The result holds the estimates of all resamples, 0.2 MB an outcome.

    Args:
        page: rows of episodes that the models of the policy were not fitted to.
        gamma: discount per step.
        config: limits, level and number of resamples.
        generator: draws the resamples, and the episodes where there are too many; on the CPU.
        estimators: by name, those of ESTIMATORS or of CHEAP_ESTIMATORS.
        missing: what missing_estimates returns: these are undefined and not to be used.
        show: called with the number of outcomes done and of all outcomes.
    """
    missing = missing or {}
    rows, left_out, beyond = limit(page, config, generator)
    outcomes: list[OutcomeResult] = []
    overlap = None
    if len(rows):
        num_episodes = len(torch.unique_consecutive(page.episode[rows]))
        # resamples of one episode are all alike: no interval rather than one of width 0
        count = config.bootstrap_resamples if num_episodes > 1 else 0
        drawn = resamples(num_episodes, count, generator)
        for first in range(0, len(page.names), _OUTCOMES_AT_ONCE):
            part = page.only(first, first + _OUTCOMES_AT_ONCE)
            log = log_of_rows(part, rows, gamma, estimators)
            found = log.estimates(drawn.blocks())
            overlap = overlap or measure_overlap(page, rows, log, found[0]["mean_weight"], config)
            for place, name in enumerate(part.names):
                returns = log.per_episode("discounted_reward", place)
                one_step, sequential = (
                    _family(kind, found[place], missing, overlap, _spread(averaged), config)
                    for kind, averaged in ((_ONE_STEP, part.outcomes[rows, place]), (_SEQUENTIAL, returns))
                )
                outcomes.append(OutcomeResult(name=name, one_step=one_step, sequential=sequential))
                show(len(outcomes), len(page.names))
    return CPEResult(
        outcomes=tuple(outcomes),
        overlap=overlap,
        weighted=not set(WEIGHTED) <= set(missing),
        level=config.confidence_level,
        num_episodes_left_out=left_out,
        num_rows_beyond_horizon=beyond,
    )


def missing_estimates(*, rows: int, without_propensity: int, fitted: bool) -> dict[str, str]:
    """Returns the estimators that a log or its fitted models cannot feed, with the reason.

    Args:
        rows: the rows of the log.
        without_propensity: how many of these are without a propensity.
        fitted: whether there were rows to fit the models to.
    """
    reasons = {} if fitted else dict.fromkeys(MODELLED, "no other episode is there to fit its model to")
    if without_propensity:
        of = counted(rows, "row of the log has", "rows of the log have")
        reasons |= dict.fromkeys(WEIGHTED, f"{without_propensity:,} of {of} no propensity")
    return reasons


def differences(one: CPEResult, other: CPEResult) -> dict[str, tuple[Estimate, ...]]:
    """Returns {outcome: estimates of the first policy's value minus the second's}; {} where no rows were scored.

    Each resample draws the same episodes for both: what they share cancels, and the interval is narrower than those of
    the two values suggest. A verdict is the worse of both estimates' own; where both may be used, the reason says which
    policy is better.

    Args:
        one: the result of the first policy.
        other: the result of the second, on the same rows and with a generator of the same seed.
    """
    return {
        first.name: tuple(
            _difference(first_estimate, second_estimate, one.level)
            for first_estimate, second_estimate in zip(first.estimates, second.estimates, strict=True)
        )
        for first, second in zip(one.outcomes, other.outcomes, strict=True)
    }


def _difference(one: Estimate, other: Estimate, level: float) -> Estimate:
    samples = _differences(one.samples, other.samples)
    figure = interval_of(samples, level)
    verdict, reason = Verdict.TRUSTWORTHY, "the interval contains 0: no difference is shown"
    if figure.excludes(0.0):
        reason = "model is better" if figure.value > 0 else "against is better"
    for worse in (Verdict.WIDE, Verdict.DO_NOT_USE):
        for whose, estimate in (("against", other), ("model", one)):
            if estimate.verdict is worse:
                verdict, reason = worse, f"{whose}: {estimate.reason}"
    return Estimate(
        name=one.name,
        figure=figure,
        normalized=float("nan"),
        difference=figure,
        verdict=verdict,
        reason=reason,
        samples=samples,
    )


def limit(page: EvaluationPage, config: EvaluationConfig, generator: torch.Generator) -> tuple[Tensor, int, int]:
    """Chooses at most so many whole episodes, up to so many rows of each.

    Returns:
        The rows' numbers, ascending, and what was left out: episodes and rows.
    """
    within = page.position < config.max_horizon
    beyond = int((~within).sum())
    rank = page.rank
    num_episodes = int(rank[-1]) + 1 if len(page) else 0
    if num_episodes > config.max_episodes:
        kept = torch.zeros(num_episodes, dtype=torch.bool)
        kept[torch.randperm(num_episodes, generator=generator)[: config.max_episodes]] = True
        within &= kept[rank]
    return within.nonzero().squeeze(1), max(0, num_episodes - config.max_episodes), beyond


def log_of_rows(
    page: EvaluationPage, rows: Tensor, gamma: float, estimators: Mapping[str, Estimator] = ESTIMATORS
) -> Log:
    """Returns the log of some rows of a page; `rows` are numbers, an episode's in order of time."""
    # a group's rows are copied: with many choices or outcomes as many as were the page again
    groups = episode_groups(page.episode[rows], max_cells=min(_GROUP_ROWS, max(1, _GROUP_BYTES // page.row_bytes)))
    return Log.of((tables_of(page.rows(rows[group]), gamma) for group in groups), (*LOGGED, *estimators.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """A family: the log's own figure, the estimate by a model alone, and the weighted one that checks it."""

    sequential: bool
    logged: str
    model: str
    check: str


_ONE_STEP = _Kind(
    sequential=False, logged="mean_reward", model="Direct_Method_Reward", check="Self_Normalized_IPS_Reward"
)
_SEQUENTIAL = _Kind(
    sequential=True,
    logged="mean_return",
    model="Fitted_Q_Evaluation",
    check="Weighted_Per_Decision_Importance_Sampling",
)


def _family(
    kind: _Kind,
    found: Mapping[str, Tensor],
    missing: Mapping[str, str],
    overlap: Overlap,
    spread: float,
    config: EvaluationConfig,
) -> Family:
    level, base = config.confidence_level, found[kind.logged]
    logged = interval_of(base, level)
    samples = {
        name: found[name] * torch.nan if name in missing else found[name]
        for name, one in ESTIMATORS.items()
        if one.sequential == kind.sequential and name in found
    }
    figures = {name: interval_of(values, level) for name, values in samples.items()}
    continued = base + found["continuation"]
    bases = {name: continued if ESTIMATORS[name].continues else base for name in samples}
    verdicts = _verdicts(kind, figures, missing, overlap, max(abs(logged.value), spread), config)
    estimates = tuple(
        Estimate(
            name=name,
            figure=figures[name],
            normalized=float(values[0] / bases[name][0]) if logged.excludes(0.0) else float("nan"),
            difference=interval_of(_differences(values, bases[name]), level),
            verdict=verdicts[name][0],
            reason=verdicts[name][1],
            samples=values,
        )
        for name, values in samples.items()
    )
    cut = kind.sequential and overlap.cut_share > 0 and kind.model not in missing
    return Family(
        logged=logged,
        continued=interval_of(continued, level) if cut else None,
        estimates=estimates,
        disagreement=interval_of(samples[kind.model] - samples[kind.check], level),
    )


def _verdicts(
    kind: _Kind,
    figures: Mapping[str, Interval],
    missing: Mapping[str, str],
    overlap: Overlap,
    size: float,
    config: EvaluationConfig,
) -> dict[str, Reasoned]:
    verdicts = {
        name: weighted_verdict(
            figure,
            overlap,
            sequential=kind.sequential,
            scale=max(abs(figure.value), size),
            min_effective=config.min_effective_episodes,
        )
        for name, figure in figures.items()
    }
    own = model_verdict(
        figures[kind.model],
        overlap,
        sequential=kind.sequential,
        check=figures[kind.check],
        check_verdict=verdicts[kind.check][0],
    )
    if kind.check in missing and figures[kind.model].defined:
        own = Verdict.WIDE, f"{UNCHECKED}: there are no weighted estimates"
    verdicts[kind.model] = own
    return verdicts | {name: (Verdict.DO_NOT_USE, missing[name]) for name in figures if name in missing}


def interval_of(samples: Tensor, level: float) -> Interval:
    """Returns the estimate of row 0 with the percentile interval of the others, [1 + R]."""
    low, high = percentile_interval(samples[1:], level)
    return Interval(value=float(samples[0]), low=low, high=high)


def _differences(samples: Tensor, others: Tensor) -> Tensor:
    """Returns samples - others, [1 + R]; 0 where sums in another order explain the difference."""
    return (samples - others).masked_fill(torch.isclose(samples, others, rtol=1e-9, atol=0.0), 0.0)


def _spread(values: Tensor) -> float:
    """Mean absolute deviation of what is averaged: a size that does not vanish where the mean does.

    A standard deviation grows with a single outlier as fast as intervals do: none would be called wide.
    """
    return float((values - values.mean()).abs().mean())

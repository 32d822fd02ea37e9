"""Counterfactual policy evaluation: every estimator on one page, with interval, diagnostics and verdict.

page ─► limit: rows ─► what each episode adds (rl.sums.Log) ─► estimates of all resamples ─► CPEResult
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from reagent_lite.config.evaluation import EvaluationConfig
from reagent_lite.evaluation.interval import Interval
from reagent_lite.evaluation.overlap import Overlap, measure_overlap
from reagent_lite.evaluation.page import EvaluationPage, episode_groups, tables_of
from reagent_lite.evaluation.verdict import Reasoned, Verdict, model_verdict, weighted_verdict
from reagent_lite.rl.bootstrap import percentile_interval, resamples
from reagent_lite.rl.estimators import ESTIMATORS, LOGGED
from reagent_lite.rl.sums import Estimator, Log

# Of episodes that are laid out together, padding included; one that is longer stands alone.
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
            cut is held against the logged value continued by the same value model.
        verdict, reason: whether it may be used.
    """

    name: str
    figure: Interval
    normalized: float
    difference: Interval
    verdict: Verdict
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Estimates of one quantity: the mean reward of a row, or the mean discounted return of an episode.

    Attributes:
        logged: the logged policy's own value.
        estimates: in the order of the registry; the first rests on a model alone.
        disagreement: the model's estimate minus the self-normalized weighted one.
    """

    logged: Interval
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
        level: of all intervals.
        num_episodes_left_out, num_rows_beyond_horizon: what the config's limits left unscored.
    """

    outcomes: tuple[OutcomeResult, ...]
    overlap: Overlap | None
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
    show: Callable[[int, int], None] = lambda done, total: None,
) -> CPEResult:
    """Evaluates the page's policy for the reward and every metric.

    Beside the page it needs, for T outcomes or 32 of more, 8 (1 + 2 T) bytes a row and 8 (3 + 11 T) an episode, a few
    numbers a row for a while, and a constant below 70 MB, whatever the lengths of episodes. With ten choices that is
    less than a page of 75 MB or more.

    Args:
        page: held-out rows; models and policy have not seen these episodes where the caller split them (held_out).
        gamma: discount per step.
        config: limits, level and number of resamples.
        generator: of the resamples, and of the draw of episodes where there are too many; on the CPU.
        estimators: by name, those of ESTIMATORS or of CHEAP_ESTIMATORS.
        show: takes the number of outcomes that are estimated, and of all.
    """
    rows, left_out, beyond = limit(page, config, generator)
    outcomes: tuple[OutcomeResult, ...] = ()
    overlap = None
    if len(rows):
        log = log_of_rows(page.only(0, _OUTCOMES_AT_ONCE), rows, gamma, estimators)
        # resamples of one episode are all alike: no interval rather than one of width 0
        count = config.bootstrap_resamples if log.num_episodes > 1 else 0
        drawn = resamples(log.num_episodes, count, generator)
        samples = log.estimates(drawn.blocks())
        overlap = measure_overlap(page, rows, log, samples[0]["mean_weight"], config)
        for target, name in enumerate(page.names):
            place = target % _OUTCOMES_AT_ONCE
            if target and not place:
                log = log_of_rows(page.only(target, target + _OUTCOMES_AT_ONCE), rows, gamma, estimators)
                samples = log.estimates(drawn.blocks())
            returns = log.per_episode("discounted_reward", place)
            one_step = _family(_ONE_STEP, samples[place], overlap, _spread(page.outcomes[rows, target]), config)
            sequential = _family(_SEQUENTIAL, samples[place], overlap, _spread(returns), config)
            outcomes += (OutcomeResult(name=name, one_step=one_step, sequential=sequential),)
            show(target + 1, len(page.names))
    return CPEResult(
        outcomes=outcomes, overlap=overlap, level=config.confidence_level,
        num_episodes_left_out=left_out, num_rows_beyond_horizon=beyond,
    )  # fmt: skip


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
    kind: _Kind, samples: dict[str, Tensor], overlap: Overlap, spread: float, config: EvaluationConfig
) -> Family:
    level, base = config.confidence_level, samples[kind.logged]
    logged = interval_of(base, level)
    names = [name for name, one in ESTIMATORS.items() if one.sequential == kind.sequential and name in samples]
    figures = {name: interval_of(samples[name], level) for name in names}
    bases = {name: base + samples["continuation"] if ESTIMATORS[name].continues else base for name in names}
    verdicts = _verdicts(kind, figures, overlap, max(abs(logged.value), spread), config)
    estimates = tuple(
        Estimate(
            name=name,
            figure=figures[name],
            normalized=float(samples[name][0] / bases[name][0]) if logged.excludes(0.0) else float("nan"),
            difference=interval_of(samples[name] - bases[name], level),
            verdict=verdicts[name][0],
            reason=verdicts[name][1],
        )
        for name in names
    )
    disagreement = interval_of(samples[kind.model] - samples[kind.check], level)
    return Family(logged=logged, estimates=estimates, disagreement=disagreement)


def _verdicts(
    kind: _Kind, figures: dict[str, Interval], overlap: Overlap, size: float, config: EvaluationConfig
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
    verdicts[kind.model] = model_verdict(
        figures[kind.model], overlap, check=figures[kind.check], check_verdict=verdicts[kind.check][0]
    )
    return verdicts


def interval_of(samples: Tensor, level: float) -> Interval:
    """Returns the estimate of row 0 with the percentile interval of the others, [1 + R]."""
    low, high = percentile_interval(samples[1:], level)
    return Interval(value=float(samples[0]), low=low, high=high)


def _spread(values: Tensor) -> float:
    """Standard deviation of what is averaged: a size that does not vanish where the mean does."""
    return float(values.std(correction=0))

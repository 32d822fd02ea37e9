"""Counterfactual policy evaluation: every estimator on one page, with interval, diagnostics and verdict.

page ─► first rows of at most so many episodes ─► Episodes per outcome ─► estimators on all resamples ─► CPEResult
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from reagent_lite.config.evaluation import EvaluationConfig
from reagent_lite.evaluation.overlap import Figure, Overlap, measure_overlap
from reagent_lite.evaluation.page import EvaluationPage, episodes_of
from reagent_lite.evaluation.verdict import Judgement, Verdict, judge_model, judge_weighted
from reagent_lite.rl.bootstrap import percentile_interval, resample_counts
from reagent_lite.rl.estimators import (
    ONE_STEP_ESTIMATORS,
    SEQUENTIAL_ESTIMATORS,
    Episodes,
    Estimator,
    mean_return,
    mean_reward,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """One estimator's figures for one outcome.

    Attributes:
        name: a key of rl.estimators.ESTIMATORS.
        figure: estimate and interval.
        normalized: estimate / logged value; NaN unless the logged value's interval excludes 0.
        difference: estimate - logged value, resampled in pairs.
        verdict, reason: whether it may be used.
    """

    name: str
    figure: Figure
    normalized: float
    difference: Figure
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

    logged: Figure
    estimates: tuple[Estimate, ...]
    disagreement: Figure


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
    page: EvaluationPage, *, gamma: float, config: EvaluationConfig, generator: torch.Generator
) -> CPEResult:
    """Evaluates the page's policy for the reward and every metric.

    Args:
        page: held-out rows; models and policy have not seen these episodes where the caller split them (held_out).
        gamma: discount per step.
        config: limits, level and number of resamples.
        generator: of the resamples, and of the draw of episodes where there are too many; on the CPU.
    """
    scored, left_out, beyond = limit(page, config, generator)
    if not len(scored):
        return CPEResult(
            outcomes=(), overlap=None, level=config.confidence_level,
            num_episodes_left_out=left_out, num_rows_beyond_horizon=beyond,
        )  # fmt: skip
    tables = [episodes_of(scored, target, gamma) for target in range(len(scored.names))]
    num_episodes = len(tables[0].reward)
    # resamples of one episode are all alike: no interval rather than one of width 0
    counts = resample_counts(num_episodes, config.bootstrap_resamples if num_episodes > 1 else 0, generator)
    overlap = measure_overlap(
        scored, tables[0], counts,
        level=config.confidence_level, min_effective_episodes=config.min_effective_episodes,
    )  # fmt: skip
    outcomes = tuple(
        OutcomeResult(
            name=name,
            one_step=_family(_ONE_STEP, table, counts, overlap, config),
            sequential=_family(_SEQUENTIAL, table, counts, overlap, config),
        )
        for name, table in zip(scored.names, tables, strict=True)
    )
    return CPEResult(
        outcomes=outcomes, overlap=overlap, level=config.confidence_level,
        num_episodes_left_out=left_out, num_rows_beyond_horizon=beyond,
    )  # fmt: skip


def limit(
    page: EvaluationPage, config: EvaluationConfig, generator: torch.Generator
) -> tuple[EvaluationPage, int, int]:
    """Returns at most so many whole episodes, up to so many rows of each; and what was left out: episodes and rows."""
    within = page.position < config.max_horizon
    beyond = int((~within).sum())
    page = page.rows(within)
    num_episodes = int(page.rank[-1]) + 1 if len(page) else 0
    if num_episodes <= config.max_episodes:
        return page, 0, beyond
    kept = torch.zeros(num_episodes, dtype=torch.bool)
    kept[torch.randperm(num_episodes, generator=generator)[: config.max_episodes]] = True
    return page.rows(kept[page.rank]), num_episodes - config.max_episodes, beyond


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """A family's registry, and which of its estimates are compared with which."""

    estimators: dict[str, Estimator]
    logged: Estimator
    model: str
    check: str
    sequential: bool


_ONE_STEP = _Kind(
    estimators=ONE_STEP_ESTIMATORS,
    logged=mean_reward,
    model="Direct_Method_Reward",
    check="Self_Normalized_IPS_Reward",
    sequential=False,
)
_SEQUENTIAL = _Kind(
    estimators=SEQUENTIAL_ESTIMATORS,
    logged=mean_return,
    model="Fitted_Q_Evaluation",
    check="Weighted_Per_Decision_Importance_Sampling",
    sequential=True,
)


def _family(kind: _Kind, table: Episodes, counts: Tensor, overlap: Overlap, config: EvaluationConfig) -> Family:
    level = config.confidence_level
    base = kind.logged(table, counts)
    logged = _figure(base, level)
    samples = {name: estimator(table, counts) for name, estimator in kind.estimators.items()}
    figures = {name: _figure(values, level) for name, values in samples.items()}
    judgements = _judgements(kind, figures, overlap, max(abs(logged.value), _spread(kind, table)), config)
    estimates = tuple(
        Estimate(
            name=name,
            figure=figures[name],
            normalized=figures[name].value / logged.value if logged.excludes(0.0) else float("nan"),
            difference=_figure(values - base, level),
            verdict=judgements[name][0],
            reason=judgements[name][1],
        )
        for name, values in samples.items()
    )
    disagreement = _figure(samples[kind.model] - samples[kind.check], level)
    return Family(logged=logged, estimates=estimates, disagreement=disagreement)


def _judgements(
    kind: _Kind, figures: dict[str, Figure], overlap: Overlap, size: float, config: EvaluationConfig
) -> dict[str, Judgement]:
    judged = {
        name: judge_weighted(
            figure,
            overlap,
            sequential=kind.sequential,
            scale=max(abs(figure.value), size),
            min_effective=config.min_effective_episodes,
        )
        for name, figure in figures.items()
    }
    model = figures[kind.model]
    judged[kind.model] = judge_model(
        model,
        overlap,
        scale=max(abs(model.value), size),
        check=figures[kind.check],
        check_verdict=judged[kind.check][0],
    )
    return judged


def _figure(samples: Tensor, level: float) -> Figure:
    low, high = percentile_interval(samples[1:], level)
    return Figure(value=float(samples[0]), low=low, high=high)


def _spread(kind: _Kind, table: Episodes) -> float:
    """Standard deviation of what is averaged: a size that does not vanish where the mean does."""
    returns = (table.discount * table.reward).sum(1)
    return float((returns if kind.sequential else table.reward[table.running > 0]).std(correction=0))

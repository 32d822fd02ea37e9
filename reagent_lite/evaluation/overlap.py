"""How far the log tells anything about the evaluated policy: sizes of importance weights and support."""

from dataclasses import dataclass

import torch

from reagent_lite.evaluation.page import EvaluationPage
from reagent_lite.rl.bootstrap import effective_sample_size, percentile_interval
from reagent_lite.rl.estimators import Episodes
from reagent_lite.rl.weights import log_cumulative_weights, relative_weights

# Discounted time that may lie beyond the step at which weights of whole episodes are judged.
_TAIL = 0.05
_CERTAIN = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A number and its bootstrap interval over episodes."""

    value: float
    low: float
    high: float

    def excludes(self, value: float) -> bool:
        """Whether a value lies outside the interval; false where the interval is undefined."""
        return value < self.low or value > self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Diagnostics of importance weights; rho_t is an episode's product of weights up to step t.

    Attributes:
        num_rows, num_episodes: scored.
        effective_rows: (sum w)^2 / sum w^2 over rows.
        mean_weight: mean w over rows: 1 where the propensities are right and the log covers the policy.
        largest_row_share: of the largest w in their sum.
        unsupported_share: rows logged with probability 1 where the policy may choose otherwise; 1.0 in every row
            is also what a log without propensities looks like.
        horizon: rows of the longest episode.
        horizon_reached: leading steps at which at least the asked number of effective episodes remains.
        judged_step: the step by which 95 % of discounted time has passed; the four figures below are of rho there.
        effective_episodes: (sum rho)^2 / sum rho^2.
        mean_episode_weight: mean rho, should be 1.
        largest_episode_share: of the largest rho in their sum.
        effective_episodes_by_step: [horizon].
        mean_weight_by_step: [horizon] mean rho_t.
        cut_share: episodes whose last row does not end (time limit, or cut at the horizon scored): weighted estimates
            count the part seen, value models also what follows.
    """

    num_rows: int
    num_episodes: int
    effective_rows: float
    mean_weight: Figure
    largest_row_share: float
    unsupported_share: float
    horizon: int
    horizon_reached: int
    judged_step: int
    effective_episodes: float
    mean_episode_weight: float
    largest_episode_share: float
    effective_episodes_by_step: tuple[float, ...]
    mean_weight_by_step: tuple[float, ...]
    cut_share: float


def measure_overlap(
    page: EvaluationPage, episodes: Episodes, counts: torch.Tensor, *, level: float, min_effective_episodes: float
) -> Overlap:
    """Returns the diagnostics of a page, of its episodes and of counts [1 + R, n] of resampled episodes."""
    weight = page.weight
    log_rho = log_cumulative_weights(episodes.weight)
    relative = relative_weights(log_rho)
    by_step = effective_sample_size(relative)
    mean_by_step = log_rho.clamp(max=600).exp().mean(0)
    judged = _judged_step(episodes)
    means = counts @ (episodes.weight * episodes.running).sum(1) / (counts @ episodes.running.sum(1))
    low, high = percentile_interval(means[1:], level)
    taken = page.of_taken(page.model_propensities)
    unsupported = (page.propensity >= 1 - _CERTAIN) & (taken < 1 - _CERTAIN)
    last = torch.cat((page.episode[1:] != page.episode[:-1], torch.ones(1, dtype=torch.bool)))
    enough = by_step >= min_effective_episodes
    return Overlap(
        num_rows=len(page),
        num_episodes=len(relative),
        effective_rows=float(effective_sample_size(weight)),
        mean_weight=Figure(value=float(means[0]), low=low, high=high),
        largest_row_share=_largest_share(weight),
        unsupported_share=float(unsupported.double().mean()),
        horizon=len(by_step),
        horizon_reached=int(enough.long().cumprod(0).sum()),
        judged_step=judged,
        effective_episodes=float(by_step[judged]),
        mean_episode_weight=float(mean_by_step[judged]),
        largest_episode_share=_largest_share(relative[:, judged]),
        effective_episodes_by_step=tuple(by_step.tolist()),
        mean_weight_by_step=tuple(mean_by_step.tolist()),
        cut_share=float((page.bootstrap[last] > 0).double().mean()),
    )


def _judged_step(episodes: Episodes) -> int:
    # far steps of a discounted return hardly count, and weights there say little about the estimate
    passed = episodes.discount.sum(0).cumsum(0)
    return int((passed < (1 - _TAIL) * passed[-1]).sum())


def _largest_share(weight: torch.Tensor) -> float:
    total = float(weight.sum())
    return float(weight.max()) / total if total > 0 else 1.0

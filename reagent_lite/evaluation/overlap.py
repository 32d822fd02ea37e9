"""Coverage of the evaluated policy by the log: sizes of importance weights, and support."""

from dataclasses import dataclass, field

import numpy as np
import torch

from reagent_lite.config.evaluation import EvaluationConfig
from reagent_lite.evaluation.calibration import Calibration
from reagent_lite.evaluation.evaluation_rows import EvaluationRows
from reagent_lite.evaluation.interval import Interval, number
from reagent_lite.evaluation.shared_draws import SharedDraws
from reagent_lite.export.exploration import certain_share
from reagent_lite.rl.bootstrap import effective_sample_size, percentile_interval
from reagent_lite.rl.likelihood import Alternatives
from reagent_lite.rl.sums import SHRINKAGE, SWITCH_TAU, EpisodeSums

_CERTAIN = 1e-9
_USUAL_SHARE = 0.5
# With about 6 purchases of lognormal amounts, 95 % intervals covered the truth in only 83 % of 500 logs.
FEWEST_SIZES = 100
_SPREAD = 0.5
# Among 10 % purchases, about five lognormal chargebacks that cancel a gain: 9 % of 100 logs of 2 000 rows were shipped
# by the rule for all of them alone, now 3 %. Neither fees next to purchases nor symmetric noise has a larger side.
_SPREAD_OF_SIDE = 0.25
# Without this rule a policy whose rare lognormal losses cancel its gain is shipped in up to 40 % of logs of 2000 rows.
_FARTHEST = 5
_MORE = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class RareOutcomes:
    """Outcomes other than the usual one, if most outcomes are equal: clicks, purchases, failures.

    Attributes:
        unsized: number of outcomes that are too few, and of too different sizes, to show how large one may be: all, or
            those on the side of the usual outcome that has the larger ones; 0 if they show it.
        expected: number that the evaluated policy would meet if rare outcomes did not depend on the choice.
        seen: number that it met: the effective number of weighted rare outcomes.
    """

    unsized: int
    expected: float
    seen: float

    def __str__(self) -> str:
        return f"{number(self.seen)} rare outcomes in matching decisions, {number(self.expected)} expected by chance"


def match_rare_outcomes(
    weights: torch.Tensor, outcomes: torch.Tensor, sample_weight: torch.Tensor
) -> RareOutcomes | None:
    """Counts rare outcomes among outcomes [n] with weights [n]; None if no outcome is as frequent as all others.

    Sample weights [n] count for the usual outcome. A log with all rare outcomes and few other rows has as many rare
    outcomes as the whole log.
    """
    distance = outcomes - _weighted_median(outcomes, sample_weight)  # the usual outcome, if there is one
    rare = distance != 0
    if not rare.any() or float(sample_weight[rare].sum() / sample_weight.sum()) >= _USUAL_SHARE:
        return None
    return RareOutcomes(
        unsized=_count_unsized(distance[rare]),
        expected=float(effective_sample_size(weights) * rare.double().mean()),
        seen=float(effective_sample_size((weights * sample_weight)[rare])),
    )


def _weighted_median(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Returns the median of values [n]; a value with more than half of the weight is the median."""
    if bool((weights == weights[0]).all()):
        return values.median()
    order = values.argsort()
    passed = weights[order].cumsum(0)
    return values[order[int((passed < passed[-1] / 2).sum())]]


def _count_unsized(distance: torch.Tensor) -> int:
    """Returns RareOutcomes.unsized for the distances [n] of rare outcomes from the usual one."""
    groups = [(distance.abs(), _SPREAD)]
    sides = [-distance[distance < 0], distance[distance > 0]]
    if all(map(len, sides)):
        smaller, larger = sorted(sides, key=torch.mean)
        if larger.mean() > _MORE * smaller.mean():
            groups.append((larger, _SPREAD_OF_SIDE))
    few = [
        len(sizes)
        for sizes, most in groups
        if len(sizes) < FEWEST_SIZES and sizes.std(correction=0) > most * sizes.mean()
    ]
    return min(few, default=0)


def outlying_outcomes(outcomes: torch.Tensor) -> str:
    """Returns the lowest or highest outcomes of [n] if the log does not show how far one may lie, in words; else "".

    Of the m = n / 4 outcomes on a side, or as many as differ from the median, let d_k be the distance of the k-th
    farthest. In a normal, exponential or lognormal log d_1 / d_sqrt(m) is less than d_sqrt(m) / d_m. If it is more,
    outcomes are of two kinds, and the log has few of the second. If d_1 is about d_5, these are of one size.
    """
    ascending = torch.from_numpy(np.sort(outcomes.numpy()))  # four times as fast as torch
    median = ascending[(len(outcomes) - 1) // 2]
    quarter = len(outcomes) // 4
    for side, beyond, farthest in (
        ("lowest", "lower", ascending[:quarter]),
        ("highest", "higher", ascending[len(outcomes) - quarter :].flip(0)),
    ):
        distance = (farthest - median).abs()
        last = int((distance > 0).sum())
        if last < _FARTHEST**2:
            continue
        first = distance[0]
        fifth = distance[_FARTHEST - 1]
        between = distance[round(last**0.5) - 1]
        if first > _MORE * fifth and first * distance[last - 1] > _MORE * between.square():
            least, most = (number(float(farthest[index])) for index in (_FARTHEST - 1, 0))
            return (
                f"the {_FARTHEST} {side} outcomes, {most} to {least}, lie farther out than the others suggest, and "
                f"{beyond} ones may be possible"
            )
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Diagnostics of importance weights; rho_t is an episode's product of weights up to step t.

    Attributes:
        num_rows, num_episodes: number of scored rows and episodes.
        num_units: number of units of episodes that are drawn as one; that of episodes if the log does not name units.
        effective_rows: (sum w)^2 / sum w^2 over rows.
        effective_groups: the same over episodes, or units of episodes, with the sum of w over their rows for w: rows of
            an episode are not independent.
        mean_weight: mean w over rows: about 1 if the propensities are right and the log covers the policy.
        largest_row_share: share of the largest w in the sum of all w.
        matched_rows: number of rows whose action the policy may choose, w > 0.
        rows_above_tau: number of rows whose w exceeds SWITCH_TAU.
        shrunk_share: share of the sum of w that Shrunk_Doubly_Robust_Reward leaves to its model.
        unsupported_share: share of rows logged with probability 1 although the policy may choose otherwise; a log
            without propensities also has 1.0 in every row.
        enough: required number of effective episodes, evaluation.min_effective_episodes.
        horizon: number of rows of the longest episode.
        horizon_reached: number of leading steps with at least `enough` effective episodes.
        effective_horizon: step by which 95 % of discounted time has passed; the next three figures are of rho at this
            step.
        effective_episodes: (sum rho)^2 / sum rho^2.
        mean_episode_weight: mean rho, should be 1; its interval is a normal one, which needs no resamples.
        largest_episode_share: share of the largest rho in the sum of all rho.
        effective_episodes_by_step: [horizon] (sum rho_t)^2 / sum rho_t^2.
        mean_weight_by_step: [horizon] mean rho_t.
        cut_share: share of episodes whose last row is not an end (time limit, or cut at the scored horizon): estimates
            by weights alone count the logged part, those with value models also what follows.
        untried_share: share of the policy's decisions that the log is expected to try less than ENOUGH_TRIES times.
        expected_tries: how often the log is expected to try them.
        certain_share: share of the policy's decisions among several choices that it takes with certainty.
        changed_share: share of decisions that the policy takes otherwise than the logging policy, the mean of
            |w - 1| / 2: the expectation is half the sum of absolute differences of their probabilities.
        untried_segment: in which rows these decisions are, in words; empty if they are in no simple segment.
        shared_draws: whether rows share draws of the action.
        calibration: calibration of the propensities, if they are estimated.
        effective_sample: (sum s)^2 / sum s^2 over rows that stand for s decisions each; None if each stands for one.
            All other figures count a row s times.
    """

    num_rows: int
    num_episodes: int
    effective_rows: float
    effective_groups: float
    mean_weight: Interval
    largest_row_share: float
    matched_rows: int
    rows_above_tau: int
    shrunk_share: float
    unsupported_share: float
    enough: float
    horizon: int
    horizon_reached: int
    effective_horizon: int
    effective_episodes: float
    mean_episode_weight: Interval
    largest_episode_share: float
    effective_episodes_by_step: tuple[float, ...]
    mean_weight_by_step: tuple[float, ...]
    cut_share: float
    untried_share: float = 0.0
    num_units: int = 0
    expected_tries: float = 0.0
    certain_share: float = 0.0
    changed_share: float = 1.0
    untried_segment: str = ""
    shared_draws: SharedDraws = field(default_factory=SharedDraws)
    calibration: Calibration | None = None
    effective_sample: float | None = None

    @property
    def scored_unit(self) -> str:
        """The scored unit, in words: a decision where every episode has one row, else an episode."""
        return "episode" if self.horizon > 1 else "decision"


def measure_overlap(
    page: EvaluationRows,
    sums: EpisodeSums,
    mean_weight: torch.Tensor,
    alternatives: Alternatives,
    config: EvaluationConfig,
) -> Overlap:
    """Returns the diagnostics of a page.

    Args:
        page: the scored rows.
        sums: terms of their episodes.
        mean_weight: [1 + R] mean weight in each sample.
        alternatives: actions that could have been logged in the rows.
        config: level, and the required number of effective episodes.
    """
    probability = page.at_logged(page.model_propensities)
    propensity = page.propensity
    counts = page.relative_sample_weight
    weight = page.weight
    counted = counts * weight
    level = config.level
    by_step = sums.effective_episodes()
    # weights are at most e^600, so that means stay finite
    mean_by_step = sums.log_largest.clamp(max=600).exp() * sums.weights / sums.num_episodes
    step = sums.effective_horizon
    total = float(counted.sum())
    shrunk = float((SHRINKAGE * counted / (weight.square() + SHRINKAGE)).sum())
    relative = sums.relative_weights(step)
    low, high = percentile_interval(mean_weight[1:], level)
    unsupported = (propensity >= 1 - _CERTAIN) & (probability < 1 - _CERTAIN)
    last = page.lengths.cumsum(0) - 1
    cut = (page.bootstrap[last] > 0).double()
    untried_share, expected_tries = measure_untried(alternatives)
    enough = by_step >= config.min_effective_episodes
    return Overlap(
        num_rows=len(page),
        num_episodes=len(relative),
        effective_rows=float(effective_sample_size(counted)),
        effective_groups=float(effective_sample_size(sums.by_unit(sums.per_episode("weight", 0)))),
        num_units=sums.num_units,
        mean_weight=Interval(value=float(mean_weight[0]), low=low, high=high),
        largest_row_share=_largest_share(counted),
        matched_rows=int((weight > 0).sum()),
        rows_above_tau=int((weight > SWITCH_TAU).sum()),
        shrunk_share=1 - shrunk / total if total > 0 else 1.0,
        unsupported_share=float((counts * unsupported).mean()),
        enough=config.min_effective_episodes,
        horizon=len(by_step),
        horizon_reached=int(enough.long().cumprod(0).sum()),
        effective_horizon=step,
        effective_episodes=float(by_step[step]),
        mean_episode_weight=_mean(float(mean_by_step[step]), relative, sums, level),
        largest_episode_share=_largest_share(sums.by_unit(relative)),
        effective_episodes_by_step=tuple(by_step.tolist()),
        mean_weight_by_step=tuple(mean_by_step.tolist()),
        cut_share=float((counts[last] * cut).sum() / counts[last].sum()),
        untried_share=untried_share,
        expected_tries=expected_tries,
        changed_share=float((counts * (weight - 1).abs()).mean()) / 2,
        certain_share=certain_share(page.model_propensities.numpy(), page.mask.numpy()),
        effective_sample=None if page.sample_weight is None else float(effective_sample_size(counts)),
    )


def measure_untried(alternatives: Alternatives) -> tuple[float, float]:
    """Returns which share of the policy's decisions the log hardly tries, and how often it is expected to try them."""
    rows = alternatives.hardly_tried
    share = float(alternatives.wanted[rows].sum()) / len(alternatives.wanted)
    return share, float(alternatives.probability[rows].sum())


def _mean(mean: float, relative: torch.Tensor, sums: EpisodeSums, level: float) -> Interval:
    """Returns a mean with its normal interval, given the ratios of the episodes' weights to the largest one, [n]."""
    if sums.num_units < 2:
        return Interval(value=mean, low=float("nan"), high=float("nan"))
    share = float(relative.mean())
    residual = relative - share * sums.per_episode("episodes", 0)
    deviation = float(sums.by_unit(residual).std()) * sums.num_units / len(relative)
    error = mean * deviation / (share * sums.num_units**0.5) if share > 0 else 0.0
    return Interval.normal(mean, error, level)


def _largest_share(weight: torch.Tensor) -> float:
    total = float(weight.sum())
    return float(weight.max()) / total if total > 0 else 1.0

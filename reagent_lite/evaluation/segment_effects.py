"""The effect of a policy in segments of a log, with intervals that hold together.

scored rows ─┬─► a third of the units: a tree on their effects chooses the segments ─┐
             └─► the others ─────────────────────────────────────────────────────────┴─► an interval for each segment

The rows that choose the segments do not give the intervals, so that a segment is not found to gain because it was
chosen for its luck: an honest tree; Athey & Imbens (2016), Recursive Partitioning for Heterogeneous Causal Effects.
Every interval has the level 1 - (1 - level) / (1 + S) for S segments, so that all of them and that of their sum hold
together (Bonferroni).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from reagent_lite.config.evaluation import EvaluationConfig
from reagent_lite.evaluation.calibration import Calibration
from reagent_lite.evaluation.cpe import ReturnOrReward, evaluate_reward, limit, sums_of_page
from reagent_lite.evaluation.evaluation_rows import EvaluationRows, held_out
from reagent_lite.evaluation.interval import Interval
from reagent_lite.evaluation.overlap import Overlap
from reagent_lite.evaluation.segment import StateFeatures
from reagent_lite.evaluation.shared_draws import SharedDraws
from reagent_lite.evaluation.small_tree import grow_tree
from reagent_lite.evaluation.verdict import Verdict
from reagent_lite.rl.estimators import (
    logged_returns_of,
    returns_of_episodes,
    self_normalized_inverse_propensity,
    weighted_per_decision,
)
from reagent_lite.rl.sums import OF_LOG

_CHOOSING_SHARE = 1 / 3
_SALT = np.uint64(0x7365676D656E7473)  # another choice of episodes than that of the scored ones, by the same hash
_MOST_SEGMENTS = 6
_LEAST_SHARE = 0.05  # of the rows, in a segment
_FEWEST = 50
# A split of the choosing rows has to explain so many of their variances: of noise, the best split of a feature explains
# more than 10 in 5 % of all logs; Andrews (1993), Tests for parameter instability, table I. A split that is noise only
# costs power, so that some are let through.
_LEAST_EXPLAINED = 6.0
_MOST_CHOOSING = 20_000  # episodes, or rows, that choose the segments
_RESAMPLES = 200  # for the interval of the mean weight; the likelihood needs none
_ESTIMATORS = {True: self_normalized_inverse_propensity, False: weighted_per_decision}
"""The estimator, which needs no fitted model, by whether rewards of rows are compared."""
_LEARNED = "the policy has learned from these episodes, which flatters it"


class SegmentChange(StrEnum):
    """Effect of a policy in a segment."""

    GAINS = "gains"
    LOSES = "loses"
    UNDECIDED = "not enough to say"


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentEffect:
    """The effect of a policy in a segment.

    Attributes:
        words: which rows are in the segment; for episodes, their first rows.
        share: share of the segment in the rows, or episodes, that give the intervals.
        count: number of these rows, or episodes.
        effective: effective number of rows, or episodes, by the policy's weights.
        estimator: the estimator of `figure`, a key of rl.estimators.ESTIMATORS.
        logged: logged reward a row, or discounted return an episode.
        figure: the policy's.
        difference: figure - logged, from the same rows; the intervals of all segments hold together.
        verdict, reason: whether to trust the interval, and why.
    """

    words: str
    share: float
    count: int
    effective: float
    estimator: str
    logged: Interval
    figure: Interval
    difference: Interval
    verdict: Verdict
    reason: str

    @property
    def standing(self) -> SegmentChange:
        """Whether the segment gains or loses; undecided unless a trustworthy interval excludes 0."""
        if self.verdict is not Verdict.TRUSTWORTHY:
            return SegmentChange.UNDECIDED
        return {1: SegmentChange.GAINS, -1: SegmentChange.LOSES, 0: SegmentChange.UNDECIDED}[self.difference.side]

    def json(self) -> dict[str, Any]:
        """Returns the effect as JSON types; undefined figures are null."""
        return {
            "rows_with": self.words,
            "share": self.share,
            "count": self.count,
            "effective": self.effective,
            "estimator": self.estimator,
            "logged": self.logged.json(),
            "policy": self.figure.json(),
            "difference": self.difference.json(),
            "standing": self.standing.value,
            "verdict": self.verdict.value,
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """Segments of a log with a policy's effect in each.

    Attributes:
        effects: effect of each segment.
        total: sum of the segments' differences, each times its share.
        level: level at which all intervals hold together.
        unit: "row" if rewards of rows are compared, "episode" for discounted returns of episodes.
        segment: [N] number of the segment of each row of the page, -1 for rows that give no interval.
        choosing: number of rows, or episodes, that chose the segments.
    """

    effects: tuple[SegmentEffect, ...]
    total: Interval
    level: float
    unit: str
    segment: NDArray[np.int64]
    choosing: int

    def json(self) -> dict[str, Any]:
        """Returns the segments as JSON types."""
        return {
            "level": self.level,
            "unit": self.unit,
            "chosen_by": self.choosing,
            "total": self.total.json(),
            "segments": [effect.json() for effect in self.effects],
        }


def choosing_rows(page: EvaluationRows) -> NDArray[np.bool_]:
    """Returns which rows choose the segments and grow the trees, [N]: about a third of the units, whole ones."""
    unit = (page.episode if page.unit is None else page.unit).numpy()
    return held_out(unit.view(np.uint64) ^ _SALT, _CHOOSING_SHARE)


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectSettings:
    """Results of the evaluation of the whole log.

    Attributes:
        gamma: discount per step.
        config: horizon, level and range of rewards.
        missing: estimators without an estimate, with the reason.
        calibration: calibration of the propensities, if they are estimated.
        shared_draws: whether rows share draws of the action.
        seen: whether the policy has learned from the scored rows.
        seed: seed of resamples of weights, and of shuffled values.
    """

    gamma: float
    config: EvaluationConfig
    missing: Mapping[str, str] = field(default_factory=dict)
    calibration: Calibration | None = None
    shared_draws: SharedDraws = field(default_factory=SharedDraws)
    seen: bool = False
    seed: int = 0


def effects_by_segment(page: EvaluationRows, features: StateFeatures, settings: EffectSettings) -> Segments | None:
    """Chooses segments in which a policy's effect differs, and estimates it in each.

    Args:
        page: scored rows that `features` describes by `page.number`; not all weighted estimators are missing.
        features: raw state features.
        settings: settings of the evaluation.

    Returns:
        None if the rows that choose or those that estimate are missing.
    """
    config = settings.config
    gamma = settings.gamma
    page, _ = limit(page, config)
    by_row = gamma == 0 or len(page.lengths) == len(page)
    first = _first_rows(page, by_row=by_row)
    of_first = torch.from_numpy(np.repeat(np.arange(len(first)), np.diff(first, append=len(page))))
    choosing = choosing_rows(page)
    chooser = np.flatnonzero(choosing[first])
    if not len(chooser) or len(chooser) == len(first):
        return None
    chooser = chooser[:: -(-len(chooser) // _MOST_CHOOSING)]
    assert page.number is not None
    numbers = page.number.numpy()[first]
    values = np.asarray(features.values[numbers[chooser]])
    inside = np.zeros(len(first), np.bool_)
    inside[chooser] = True
    effect = _effects_of(page.only(0, 1).rows(torch.from_numpy(np.flatnonzero(inside[of_first]))), gamma, by_row=by_row)
    tree = grow_tree(
        features,
        values,
        effect[:, None],
        leaves=_MOST_SEGMENTS,
        fewest=max(_FEWEST, math.ceil(_LEAST_SHARE * len(chooser))),
        least_gain=(_LEAST_EXPLAINED + 2 * math.log(max(values.shape[1], 1))) / len(chooser),
    )
    leaf = tree.leaf_by_columns(lambda column: np.asarray(features.values[numbers, column]), len(numbers))
    leaf[choosing[first]] = -1
    used = [number for number in range(len(tree.leaves)) if (leaf == number).any()]
    segment = leaf[of_first]
    # the level of the config may be divided among guardrails already
    level = 1 - (1 - config.confidence_level) / (1 + len(used))
    divided = config.model_copy(update={"confidence_level": level, "bootstrap_resamples": _RESAMPLES})
    effects = []
    counts = page.relative_sample_weight.numpy()[first]
    for number in used:
        family, overlap = evaluate_reward(
            page.rows(torch.from_numpy(np.flatnonzero(segment == number))),
            gamma=gamma,
            config=divided,
            generator=torch.Generator().manual_seed(settings.seed),
            estimator=_ESTIMATORS[by_row],
            missing=settings.missing,
            calibration=settings.calibration,
            features=features,
            shared=settings.shared_draws,
        )
        share = float(counts[leaf == number].sum() / counts[leaf >= 0].sum())
        effects.append(_effect_of(family, overlap, tree.words[number], share, seen=settings.seen, by_row=by_row))
    whole = np.full(len(segment), -1, np.int64)
    for index, number in enumerate(used):
        whole[segment == number] = index
    return Segments(
        effects=tuple(effects),
        total=_total(effects),
        level=config.level,
        unit="row" if by_row else "episode",
        segment=whole,
        choosing=len(chooser),
    )


def _first_rows(page: EvaluationRows, *, by_row: bool) -> NDArray[np.int64]:
    """Returns the numbers of all rows, or of the first rows of episodes."""
    if by_row:
        return np.arange(len(page))
    episode = page.episode.numpy()
    return np.flatnonzero(np.concatenate(([True], episode[1:] != episode[:-1])))


def _effects_of(page: EvaluationRows, gamma: float, *, by_row: bool) -> NDArray[np.float64]:
    """Returns a number for each row, or episode, whose expectation is the policy's effect, in the page's order.

    That is (w - 1) (r - mean r), as the expectation of w - 1 is 0 whatever the features are; for episodes the
    difference of PDIS and the return, minus (rho - 1) times the mean return.
    """
    if by_row:
        reward = page.outcomes[:, 0]
        counts = page.relative_sample_weight
        return np.asarray(counts * (page.weight - 1) * (reward - (counts * reward).mean()))
    of_episodes = replace(page, unit=page.episode)
    sums = sums_of_page(of_episodes, gamma, OF_LOG)
    evaluated = returns_of_episodes(sums, 0)
    logged = logged_returns_of(sums, 0).total
    effect = evaluated.total - logged - evaluated.control * logged.mean()
    assert sums.unit is not None
    in_order = torch.zeros_like(effect)
    in_order[sums.unit] = effect
    return in_order.numpy()


def _effect_of(
    family: ReturnOrReward, overlap: Overlap, words: str, share: float, *, seen: bool, by_row: bool
) -> SegmentEffect:
    """Returns the effect that the evaluation of a segment's rows found."""
    (estimate,) = (estimate for estimate in family.estimates if estimate.name == _ESTIMATORS[by_row].name)
    verdict = estimate.verdict
    reason = estimate.reason
    if seen and verdict is Verdict.TRUSTWORTHY:
        verdict = Verdict.SUPPORT
        reason = _LEARNED
    return SegmentEffect(
        words=words,
        share=share,
        count=overlap.num_rows if by_row else overlap.num_episodes,
        effective=overlap.effective_rows if by_row else overlap.effective_episodes,
        estimator=estimate.name,
        logged=family.logged,
        figure=estimate.figure,
        difference=estimate.difference,
        verdict=verdict,
        reason=reason,
    )


def _total(effects: Sequence[SegmentEffect]) -> Interval:
    """Returns the weighted sum of all differences, with an interval from the distances of their ends.

    The distances are added as those of independent estimates are; Zou & Donner (2008), Construction of confidence
    limits about effect measures. The segments' level leaves room for rows of a unit in several segments.
    """
    value = sum(effect.share * effect.difference.value for effect in effects)
    below = math.hypot(*(effect.share * (effect.difference.value - effect.difference.low) for effect in effects))
    above = math.hypot(*(effect.share * (effect.difference.high - effect.difference.value) for effect in effects))
    return Interval(value=value, low=value - below, high=value + above)

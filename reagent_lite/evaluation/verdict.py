"""Verdicts on the intervals of estimates, with reasons in words.

The width of an interval does not affect its verdict.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from reagent_lite.evaluation.calibration import Calibration
from reagent_lite.evaluation.interval import Interval, effective, number, percent
from reagent_lite.evaluation.overlap import Overlap, RareOutcomes
from reagent_lite.evaluation.trust import Verdict as Verdict
from reagent_lite.rl.likelihood import ENOUGH_TRIES
from reagent_lite.rl.sums import SWITCH_TAU

# The mean of correct weights is 1. A significant deviation of more than a tenth is a fault of propensities or support.
_MEAN_WEIGHT_TOLERANCE = 0.1
# The mean weight of whole episodes is usually too small: the log lacks episodes that the policy makes likely, while the
# effective number looks fine. On the gridworld with at least 10 effective episodes, 95 % intervals of PDIS missed in 21
# of 23 logs with a mean below 0.7 and in 12 of 45 with a mean from 0.7 to 0.9, whether or not its interval contained 1.
_EPISODES_MISSING = 0.7
_EPISODES_SCARCE = 0.85
_EPISODES_TOO_HEAVY = 2.0
_MAX_UNSUPPORTED_SHARE = 0.01
_FITTED_ERROR = 1e-3  # relative error of a fitted value, which never equals an estimate without spread exactly
_MAX_LARGEST_SHARE = 0.25
# A reward one range of all rewards farther out than any seen, earned where the log hardly tries the policy's choices,
# must not move an estimate by more than this share of half its interval.
_MAX_UNTRIED = 0.1
_MOST_ROWS = 1e12
_FEW_SIZES = 2  # of the outcomes of clicks
# Estimated propensities that may be off by more than this without being noticed support other estimates only.
_MAX_RESOLUTION = 0.5

_UNCHECKED = "the model cannot be checked against the log: there are no weighted estimates that may be believed"
_FEWEST = 2  # episodes
SHARED_DRAWS = "rows share a draw of the action, such as those of a user or an hour: say in data.columns.unit which do"
UNMODELLED = "propensities are estimated, and no doubly robust estimate checks them"
_ARTICLE = {"unit": "a unit", "episode": "an episode"}
_ONE_EPISODE = "one episode has no interval"
_UNDEFINED = "the estimate or its interval is undefined on this log"
_SAY_RANGE = ", or say in evaluation.reward_range which rewards are possible"


Reasoned = tuple[Verdict, str]
"""A verdict and its reason in words."""


def weights_verdict(overlap: Overlap, *, sequential: bool, events: RareOutcomes | None, modeled: bool) -> Reasoned:
    """Returns the verdict on weighted estimates of the policy from this log.

    Args:
        overlap: diagnostics of the weights.
        sequential: whether whole episodes are weighted instead of rows.
        events: rare outcomes that the policy met.
        modeled: whether a model of the outcome was fitted, so that there are doubly robust estimates.
    """
    count, unit = (overlap.effective_episodes, "episode") if sequential else (overlap.effective_rows, "row")
    mean = overlap.mean_weight
    reason = f"{effective(count, unit)}, mean weight {mean.format_end(mean.value)}{f', {events}' if events else ''}"
    faults = [*_faults(overlap, count, unit, sequential=sequential)]
    if overlap.calibration is not None and not modeled:
        faults.append((Verdict.SUPPORT, UNMODELLED))
    # of equally severe faults, max returns the first
    return max(faults, key=lambda fault: fault[0].severity, default=(Verdict.TRUSTWORTHY, reason))


def _faults(overlap: Overlap, count: float, unit: str, *, sequential: bool) -> Iterator[Reasoned]:
    """Yields faults of weighted estimates, each with the verdict that it entails, the most telling first."""
    if overlap.unsupported_share > _MAX_UNSUPPORTED_SHARE:
        yield (
            Verdict.DO_NOT_USE,
            (
                f"{overlap.unsupported_share:.1%} of rows were logged with probability 1 where the policy may choose "
                "otherwise, or the log has no propensities"
            ),
        )
    if overlap.num_episodes < _FEWEST:
        yield Verdict.DO_NOT_USE, _ONE_EPISODE
    if count < overlap.enough:
        yield Verdict.DO_NOT_USE, f"weights leave {effective(count, unit)}, fewer than {overlap.enough:g}"
    calibration = overlap.calibration
    if calibration is not None and not calibration.calibrated:
        yield Verdict.DO_NOT_USE, "the estimated logging policy has not passed its check"
    elif calibration is not None and calibration.resolution > _MAX_RESOLUTION:
        yield Verdict.SUPPORT, "too few rows check the estimated logging policy closely"
    mean = overlap.mean_weight
    if _differs_from_one(mean):
        rare = "the log rarely has the policy's choices, or state features reveal the logged ones"
        cause = rare if mean.value < 1 else "logged propensities are too small"
        evidence = f"(the mean weight of a row is {mean.format_end(mean.value)} instead of 1)"
        yield Verdict.DO_NOT_USE, f"{cause} {evidence}"
    if sequential:
        yield from _faults_of_episodes(overlap)
    if overlap.effective_groups < overlap.enough and (not sequential or overlap.num_units < overlap.num_episodes):
        kind = "unit" if overlap.num_units < overlap.num_episodes else "episode"
        few = effective(overlap.effective_groups, kind)
        yield Verdict.SUPPORT, f"{few}: rows of {_ARTICLE[kind]} are not independent, and so few show no spread"
    shared = overlap.shared_draws
    if shared.between:
        yield Verdict.SUPPORT, SHARED_DRAWS
    elif sequential and shared.within:
        yield Verdict.SUPPORT, "rows of an episode share a draw of the action: give a row for each draw"
    largest = overlap.largest_episode_share if sequential else overlap.largest_row_share
    if largest > _MAX_LARGEST_SHARE:
        yield Verdict.SUPPORT, f"one {unit} carries {largest:.0%} of the weight"


def estimate_verdict(
    figure: Interval,
    *,
    weights: Reasoned,
    reliance: str,
    constant: bool,
    events: RareOutcomes | None,
    outlying: str,
    untried: str = "",
    is_reward: bool,
) -> Reasoned:
    """Returns the verdict on an estimate that weights logged outcomes.

    Args:
        figure: the estimate.
        weights: result of weights_verdict.
        reliance: result of reliance_on_model, or of reliance_on_propensities.
        constant: whether all outcomes are equal and no others are known to be possible.
        events: outcomes other than the usual one; None if the possible rewards are known.
        outlying: result of outlying_outcomes; empty if the possible rewards are known.
        untried: result of untried_decisions; empty if the possible rewards are known.
        is_reward: whether the reward is estimated, not a metric, which has no range in the config.
    """
    advice = f"log more rows{_SAY_RANGE if is_reward else ''}"
    if weights[0] is Verdict.DO_NOT_USE:
        return weights
    if constant:
        return Verdict.DO_NOT_USE, (
            f"all scored outcomes are equal, so the log does not show the effect of others: {advice}"
        )
    if not figure.defined:
        return Verdict.DO_NOT_USE, _UNDEFINED
    if weights[0] is Verdict.TRUSTWORTHY and events and events.unsized:
        return Verdict.SUPPORT, (
            f"{events.unsized} of the log's rare outcomes differ too much in size to show how large one may be: "
            f"{advice}"
        )
    if weights[0] is Verdict.TRUSTWORTHY and outlying:
        return Verdict.SUPPORT, f"{outlying}: {advice}"
    if weights[0] is Verdict.TRUSTWORTHY and untried:
        return Verdict.SUPPORT, f"{untried}, and may earn rewards that no row has: {advice}"
    if weights[0] is Verdict.TRUSTWORTHY and reliance:
        return Verdict.SUPPORT, reliance
    return weights


def reliance_on_propensities(difference: Interval, added: float) -> str:
    """Returns how a difference rests on errors of estimated propensities; empty if its side of 0 does not.

    Its interval assumes a mean weight of 1, which such errors change: intervals of steep loggers lay up to half their
    width away from the estimate. And errors that depend on features add rewards that features predict.

    Args:
        difference: the estimate's difference from the logged value.
        added: what the propensities add to it through rewards that features predict.
    """
    half = (difference.high - difference.low) / 2
    value = difference.value - added
    without = Interval(value=value, low=value - half, high=value + half)
    if without.side == difference.side:
        return ""
    return (
        f"the difference of {difference} rests on estimated propensities: with the mean weight that they give, and "
        f"without rewards that features predict, it is {without}"
    )


def untried_decisions(overlap: Overlap) -> str:
    """Returns which decisions of the policy the log hardly tries, in words; empty if there are none."""
    if not overlap.untried_share:
        return ""
    segment = f", {overlap.untried_segment}," if overlap.untried_segment else ""
    needed = overlap.num_rows * ENOUGH_TRIES / overlap.expected_tries if overlap.expected_tries > 0 else math.inf
    enough = f", {ENOUGH_TRIES:g} would take {number(float(f'{needed:.2g}'))} rows" if needed < _MOST_ROWS else ""
    return (
        f"{percent(overlap.untried_share)} of the policy's decisions{segment} are hardly tried by the log "
        f"({number(overlap.expected_tries)} tries expected in {overlap.num_rows:,} rows{enough})"
    )


def moved_by_untried(overlap: Overlap, difference: Interval, outcomes: Tensor) -> bool:
    """Returns whether rewards that no row has could move an estimate notably, if the policy alone earns them.

    False if outcomes have at most two sizes, such as those of clicks: no other is possible then.

    Args:
        overlap: diagnostics of the weights.
        difference: the estimate's difference from the logged value.
        outcomes: outcome of each row, or episode.
    """
    if not overlap.untried_share or len(torch.unique(outcomes)) <= _FEW_SIZES:
        return False
    spread = float(outcomes.max() - outcomes.min())
    return overlap.untried_share * spread > _MAX_UNTRIED * (difference.high - difference.low) / 2


def has_small_propensities(overlap: Overlap) -> bool:
    """Returns whether weights are larger on average than chance explains, so that propensities are too small."""
    means = overlap.mean_weight, overlap.mean_episode_weight
    return any(_differs_from_one(mean) and mean.value > 1 for mean in means)


def reliance_on_model(name: str, overlap: Overlap) -> str:
    """Returns how far a weighted estimator replaces logged outcomes by a fitted model; empty if it does not."""
    if name == "Switch_Doubly_Robust_Reward":
        return (
            f"a model replaces outcomes with weights above {SWITCH_TAU:g}: "
            f"{overlap.rows_above_tau:,} of {overlap.matched_rows:,} matched rows"
        )
    if name == "Shrunk_Doubly_Robust_Reward":
        return f"a model replaces {percent(overlap.shrunk_share)} of the weights"
    return "blends in a model, whose error its interval leaves out" if name == "MAGIC" else ""


def model_verdict(figure: Interval, overlap: Overlap, *, check: Interval, checked: Verdict) -> Reasoned:
    """Returns the verdict on an estimate by a fitted model alone, checked by a weighted estimate of the same quantity.

    Resampling episodes does not show a model's error, so even a narrow interval is never called trustworthy.

    Args:
        figure: the estimate.
        overlap: diagnostics of the weights.
        check: the weighted estimate.
        checked: verdict on the weighted estimate.
    """
    if overlap.num_episodes < _FEWEST:
        return Verdict.DO_NOT_USE, _ONE_EPISODE
    if not figure.defined:
        return Verdict.DO_NOT_USE, _UNDEFINED
    if checked is Verdict.DO_NOT_USE or not check.defined:
        return Verdict.SUPPORT, _UNCHECKED
    slack = _FITTED_ERROR * abs(figure.value)
    interval = f"{check.format_end(check.low)} to {check.format_end(check.high)}"
    if figure.value + slack < check.low or figure.value - slack > check.high:
        return Verdict.DO_NOT_USE, (
            f"the model says {figure.format_end(figure.value)}, outside the weighted estimate's interval {interval}"
        )
    return Verdict.SUPPORT, (
        f"agrees with the weighted estimate, {interval}; its own interval leaves out the model's error"
    )


def with_calibration(verdict: Reasoned, calibration: Calibration) -> Reasoned:
    """Returns a verdict whose reason says that propensities are estimated, and how well."""
    return verdict[0], f"{verdict[1]}; {calibration}"


def _faults_of_episodes(overlap: Overlap) -> Iterator[Reasoned]:
    mean = overlap.mean_episode_weight
    differs = _differs_from_one(mean)
    if not differs and mean.value >= _EPISODES_SCARCE:
        return
    weight = number(mean.value) if mean.value > 0 else "0, or too small for a number,"
    evidence = (
        f"(the mean weight of an episode up to step {overlap.effective_horizon} is {weight} instead of 1, with "
        f"{effective(overlap.effective_episodes, 'episode')})"
    )
    if mean.value < 1:
        unusable = differs and mean.value < _EPISODES_MISSING
        cause = "the log lacks episodes that the policy makes likely"
    else:
        unusable = mean.value > _EPISODES_TOO_HEAVY
        cause = "logged propensities are too small"
    yield Verdict.DO_NOT_USE if unusable else Verdict.SUPPORT, f"{cause} {evidence}"


def _differs_from_one(mean: Interval) -> bool:
    return abs(mean.value - 1) > _MEAN_WEIGHT_TOLERANCE and mean.excludes(1.0)

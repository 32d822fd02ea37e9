"""Whether an estimate may be used, with the reason in words."""

import math
from enum import StrEnum

from reagent_lite.errors import counted
from reagent_lite.evaluation.interval import Interval, number
from reagent_lite.evaluation.overlap import Overlap

# An interval wider than this share of the figure's own size cannot separate policies.
_WIDE_SHARE = 0.5
# The mean of correct weights is 1; a tenth off, and significantly so, is a fault of propensities or support.
_MEAN_WEIGHT_TOLERANCE = 0.1
# Of whole episodes too little is the usual fault: those that the policy makes likely are missing from the log, while
# the effective number looks fine. Gridworld, 10 effective episodes and more: below 0.7 the 95 % intervals of PDIS
# missed in 21 of 23 logs, from 0.7 to 0.9 in 12 of 45, whether or not the mean's own interval held 1.
_EPISODES_MISSING, _EPISODES_SCARCE, _EPISODES_TOO_HEAVY = 0.7, 0.85, 2.0
_MAX_UNSUPPORTED_SHARE = 0.01
_MAX_LARGEST_SHARE = 0.25

UNCHECKED = "the model cannot be checked against the log"


class Verdict(StrEnum):
    """What an estimate is good for."""

    TRUSTWORTHY = "trustworthy"
    WIDE = "wide"
    DO_NOT_USE = "do not use"


Reasoned = tuple[Verdict, str]
"""A verdict and its reason in words."""


def weighted_verdict(
    figure: Interval, overlap: Overlap, *, sequential: bool, scale: float, min_effective: float
) -> Reasoned:
    """Returns the verdict on an estimate that weights logged outcomes.

    `scale` is the size of figures of this kind; a sequential estimate weights whole episodes, another one rows.
    """
    effective = overlap.effective_episodes if sequential else overlap.effective_rows
    largest = overlap.largest_episode_share if sequential else overlap.largest_row_share
    unit = "episode" if sequential else "row"
    mean = overlap.mean_weight
    if overlap.unsupported_share > _MAX_UNSUPPORTED_SHARE:
        return Verdict.DO_NOT_USE, (
            f"{overlap.unsupported_share:.1%} of rows were logged with probability 1 where the policy may choose "
            "otherwise, or the log has no propensities"
        )
    if abs(mean.value - 1) > _MEAN_WEIGHT_TOLERANCE and mean.excludes(1.0):
        return Verdict.DO_NOT_USE, (
            f"the mean weight is {mean.value:.3g} and should be 1: logged propensities are wrong, or the policy "
            "chooses what was not logged"
        )
    episodes = _episode_weight(overlap) if sequential else None
    if episodes is not None and episodes[0] is Verdict.DO_NOT_USE:
        return episodes
    if effective < min_effective:
        return Verdict.DO_NOT_USE, f"weights leave {effective:.1f} effective {unit}s, less than {min_effective:g}"
    if (unusable := _undefined(figure, overlap)) is not None:
        return unusable
    if overlap.num_episodes < min_effective:
        return (
            Verdict.WIDE,
            f"{counted(overlap.num_episodes, 'episode')}: an interval over so few promises more than it holds",
        )
    if largest > _MAX_LARGEST_SHARE:
        return Verdict.WIDE, f"one {unit} carries {largest:.0%} of the weight"
    trusted = (Verdict.TRUSTWORTHY, f"{effective:.0f} effective {unit}s, mean weight {mean.value:.3g}")
    return episodes or _by_width(figure, scale) or trusted


def model_verdict(figure: Interval, overlap: Overlap, *, check: Interval, check_verdict: Verdict) -> Reasoned:
    """Returns the verdict on an estimate by a fitted model alone, from a weighted estimate of the same quantity.

    Resampling episodes does not show a model's error, so its interval, however narrow, is never called trustworthy.
    """
    if (unusable := _undefined(figure, overlap)) is not None:
        return unusable
    if check_verdict is Verdict.DO_NOT_USE:
        return Verdict.WIDE, f"{UNCHECKED}: weighted estimates are unusable"
    if check.excludes(figure.value):
        both = Interval(value=figure.value, low=min(check.low, figure.value), high=max(check.high, figure.value))
        beyond = f"; {overlap.cut_share:.0%} of episodes are cut, only the model counts what follows"
        return Verdict.DO_NOT_USE, (
            f"the model says {both.written(figure.value)}, outside the weighted estimate's interval "
            f"{both.written(check.low)} to {both.written(check.high)}{beyond if overlap.cut_share else ''}"
        )
    if check_verdict is Verdict.WIDE:
        return Verdict.WIDE, "agrees with the weighted estimate, which is wide itself"
    return Verdict.WIDE, (
        f"agrees with the weighted estimate, {check.written(check.low)} to {check.written(check.high)}; "
        "its own interval leaves out the model's error"
    )


def _episode_weight(overlap: Overlap) -> Reasoned | None:
    """Returns the verdict on the mean of whole episodes' weights, None where it may be 1."""
    mean = overlap.mean_episode_weight
    apart = abs(mean.value - 1) > _MEAN_WEIGHT_TOLERANCE and mean.excludes(1.0)
    if not apart and mean.value >= _EPISODES_SCARCE:
        return None
    weight = f"the mean weight of an episode up to step {overlap.judged_step} is {_size(mean.value)} instead of 1"
    left = f"({overlap.effective_episodes:.1f} effective episodes)"
    if mean.value < 1:
        unusable = apart and mean.value < _EPISODES_MISSING
        verdict = Verdict.DO_NOT_USE if unusable else Verdict.WIDE
        return verdict, f"{weight}, as episodes that the policy makes likely are missing from the log {left}"
    verdict = Verdict.DO_NOT_USE if mean.value > _EPISODES_TOO_HEAVY else Verdict.WIDE
    return verdict, f"{weight}, as logged propensities are too small {left}"


def _size(weight: float) -> str:
    return f"{weight:.3g}" if weight > 0 else "0, or too small for a number,"


def _undefined(figure: Interval, overlap: Overlap) -> Reasoned | None:
    if overlap.num_episodes < 2:
        return Verdict.DO_NOT_USE, "one episode has no interval"
    if not all(map(math.isfinite, (figure.value, figure.low, figure.high))):
        return Verdict.DO_NOT_USE, "the estimate or its interval is undefined on this log"
    return None


def _by_width(figure: Interval, scale: float) -> Reasoned | None:
    width = figure.high - figure.low
    if width > _WIDE_SHARE * scale:
        return Verdict.WIDE, f"the interval is {number(width)} wide where figures are of size {number(scale)}"
    return None

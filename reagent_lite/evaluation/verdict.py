"""Whether an estimate may be used, with the reason in words."""

from collections.abc import Iterator
from enum import StrEnum

from reagent_lite.errors import counted
from reagent_lite.evaluation.interval import Interval, effective, number, percent
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
_FITTED_ERROR = 1e-3  # of a fitted value, which never meets an estimate without spread exactly
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

    Args:
        figure: the estimate.
        overlap: the overlap of the weights.
        sequential: whether whole episodes are weighted, not rows.
        scale: size of figures of this kind.
        min_effective: evaluation.min_effective_episodes.
    """
    unit = "episode" if sequential else "row"
    count = overlap.effective_episodes if sequential else overlap.effective_rows
    largest = overlap.largest_episode_share if sequential else overlap.largest_row_share
    faults = [*_faults_of_rows(overlap), *(_faults_of_episodes(overlap) if sequential else ())]
    if count < min_effective:
        reason = f"weights leave {effective(count, unit)}, fewer than {min_effective:g}"
        faults.append((Verdict.DO_NOT_USE, reason))
    faults += _undefined(figure, overlap)
    if overlap.num_episodes < min_effective:
        reason = f"{counted(overlap.num_episodes, 'episode')}: an interval from so few is too narrow"
        faults.append((Verdict.WIDE, reason))
    if largest > _MAX_LARGEST_SHARE:
        faults.append((Verdict.WIDE, f"one {unit} carries {largest:.0%} of the weight"))
    width = figure.high - figure.low
    if width > _WIDE_SHARE * scale:
        reason = f"the interval is {number(width)} wide, for values of size {number(scale)}"
        faults.append((Verdict.WIDE, reason))
    unusable = (one for one in faults if one[0] is Verdict.DO_NOT_USE)
    mean = overlap.mean_weight
    reason = f"{effective(count, unit)}, mean weight {mean.written(mean.value)}"
    return next(unusable, faults[0] if faults else (Verdict.TRUSTWORTHY, reason))


def model_verdict(
    figure: Interval, overlap: Overlap, *, sequential: bool, check: Interval, check_verdict: Verdict
) -> Reasoned:
    """Returns the verdict on an estimate by a fitted model alone, from a weighted estimate of the same quantity.

    Resampling episodes does not show a model's error, so its interval, however narrow, is never called trustworthy.
    """
    for unusable in _undefined(figure, overlap):
        return unusable
    if check_verdict is Verdict.DO_NOT_USE:
        return Verdict.WIDE, f"{UNCHECKED}: weighted estimates are unusable"
    slack = _FITTED_ERROR * abs(figure.value)
    if figure.value + slack < check.low or figure.value - slack > check.high:
        beyond = f"; {percent(overlap.cut_share)} of episodes are cut, only the model counts what follows"
        return Verdict.DO_NOT_USE, (
            f"the model says {figure.written(figure.value)}, outside the weighted estimate's interval "
            f"{check.written(check.low)} to {check.written(check.high)}"
            f"{beyond if sequential and overlap.cut_share else ''}"
        )
    if check_verdict is Verdict.WIDE:
        return Verdict.WIDE, "agrees with the weighted estimate, which is wide itself"
    return Verdict.WIDE, (
        f"agrees with the weighted estimate, {check.written(check.low)} to {check.written(check.high)}; "
        "its own interval leaves out the model's error"
    )


def _faults_of_rows(overlap: Overlap) -> Iterator[Reasoned]:
    if overlap.unsupported_share > _MAX_UNSUPPORTED_SHARE:
        yield (
            Verdict.DO_NOT_USE,
            (
                f"{overlap.unsupported_share:.1%} of rows were logged with probability 1 where the policy may choose "
                "otherwise, or the log has no propensities"
            ),
        )
    if _off_one(overlap.mean_weight):
        yield (
            Verdict.DO_NOT_USE,
            (
                "logged propensities are wrong, or the policy chooses what was not logged (the mean weight of a row is "
                f"{overlap.mean_weight.written(overlap.mean_weight.value)} instead of 1)"
            ),
        )


def _faults_of_episodes(overlap: Overlap) -> Iterator[Reasoned]:
    mean, apart = overlap.mean_episode_weight, _off_one(overlap.mean_episode_weight)
    if not apart and mean.value >= _EPISODES_SCARCE:
        return
    weight = number(mean.value) if mean.value > 0 else "0, or too small for a number,"
    evidence = (
        f"(the mean weight of an episode up to step {overlap.judged_step} is {weight} instead of 1, with "
        f"{effective(overlap.effective_episodes, 'episode')})"
    )
    if mean.value < 1:
        unusable, cause = (
            apart and mean.value < _EPISODES_MISSING,
            "the log lacks episodes that the policy makes likely",
        )
    else:
        unusable, cause = mean.value > _EPISODES_TOO_HEAVY, "logged propensities are too small"
    yield Verdict.DO_NOT_USE if unusable else Verdict.WIDE, f"{cause} {evidence}"


def _off_one(mean: Interval) -> bool:
    return abs(mean.value - 1) > _MEAN_WEIGHT_TOLERANCE and mean.excludes(1.0)


def _undefined(figure: Interval, overlap: Overlap) -> Iterator[Reasoned]:
    if overlap.num_episodes < 2:
        yield Verdict.DO_NOT_USE, "one episode has no interval"
    elif not figure.defined:
        yield Verdict.DO_NOT_USE, "the estimate or its interval is undefined on this log"

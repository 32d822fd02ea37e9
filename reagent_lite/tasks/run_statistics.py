"""Statistics over the runs of a config that differ in their seeds.

Agarwal et al. (2021), Deep Reinforcement Learning at the Edge of the Statistical Precipice, with the definitions of
rliable: the interquartile mean over all runs and tasks, and a percentile bootstrap stratified by task.
"""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from reagent_lite.evaluation.interval import Interval

_RESAMPLES: Final = 2000
_TRIMMED: Final = 0.25


def interquartile_mean(scores: ArrayLike) -> float:
    """Returns the mean of the middle half of scores of any shape; of fewer than four scores, their mean."""
    return float(stats.trim_mean(np.asarray(scores, np.float64), _TRIMMED, axis=None))


def bootstrap_interval(scores: ArrayLike, level: float, seed: int = 0) -> Interval:
    """Returns the interquartile mean of scores [runs, tasks] with its stratified bootstrap interval.

    Each resample draws as many runs of each task as it has. The interval is too narrow for few runs: of normal scores
    of one task it holds the truth at a level of 95 % in 76 % of the cases with 3 runs, in 91 % with 5 and in 94 % with
    20. It is undefined for a single run.
    """
    table = np.asarray(scores, np.float64)
    value = interquartile_mean(table)
    runs, tasks = table.shape
    if runs < 2:
        return Interval(value=value, low=math.nan, high=math.nan)
    drawn = np.random.default_rng(seed).integers(runs, size=(_RESAMPLES, runs, tasks))
    resampled = np.take_along_axis(table[None], drawn, axis=1).reshape(_RESAMPLES, runs * tasks)
    means = stats.trim_mean(resampled, _TRIMMED, axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(value=value, low=float(low), high=float(high))


def mean_interval(scores: Sequence[float], level: float) -> Interval:
    """Returns the mean of scores with the interval of Student's t, which holds for few runs as well.

    It is undefined for a single run.
    """
    value = float(np.mean(scores))
    if len(scores) < 2:
        return Interval(value=value, low=math.nan, high=math.nan)
    error = float(np.std(scores, ddof=1)) / math.sqrt(len(scores))
    half = float(stats.t.ppf((1 + level) / 2, len(scores) - 1)) * error
    return Interval(value=value, low=value - half, high=value + half)

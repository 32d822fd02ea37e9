"""Signs that columns of a log are not what they seem: features that reveal the reward, rewards of another row."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from reagent_lite.data.copy.training_copy import TrainingCopy
from reagent_lite.errors import join_names, pluralize

_FEWEST_ROWS = 200
_MOST_ROWS = 2**16
_BINS = 64
# Share of the reward's variance that a feature alone explains. What a state is worth may depend on one feature, so that
# logs of several steps are warned of later.
_REVEALING = 0.9
_REVEALING_OF_STEPS = 0.99
_NAMED = 3
_MOST_ACTIONS = 20
_FEWEST_OF_ACTION = 30
_NO_EFFECT = 3.0  # largest normal deviate of an action's effect that counts as none
_EFFECT = 6.0


def doubts(copy: TrainingCopy) -> tuple[str, ...]:
    """Returns sentences on columns that may be wrong; empty for logs of fewer than 200 rows or with one reward."""
    reward = np.asarray(copy.reward)
    if len(copy) < _FEWEST_ROWS or (reward == reward[0]).all():
        return ()
    return (*_revealing_features(copy), *_shifted_rewards(copy))


def _revealing_features(copy: TrainingCopy) -> Iterator[str]:
    """Yields a sentence if few features alone tell the reward of a row."""
    rows = np.arange(0, len(copy), -(-len(copy) // _MOST_ROWS))
    reward = _ranks(np.asarray(copy.reward[rows]))
    least = _REVEALING if _is_of_single_rows(copy) else _REVEALING_OF_STEPS
    shares = {
        str(feature): _measure_explained(np.asarray(copy.state[rows, column]), reward)
        for column, feature in enumerate(copy.state_ids)
    }
    revealing = sorted((name for name, share in shares.items() if share >= least), key=lambda name: -shares[name])
    if not revealing:
        return
    named = [f"{name} ({shares[name]:.0%})" for name in revealing[:_NAMED]]
    more = (
        f" and {pluralize(len(revealing) - _NAMED, 'further one', 'further ones')}" if len(revealing) > _NAMED else ""
    )
    yield (
        f"state features that alone explain nearly all differences of rewards: {join_names(named)}{more}. If they are "
        "written after the decision, such as outcomes, flags and sampling weights, leave them out of state_features: "
        "no policy knows them in time"
    )


def _measure_explained(values: NDArray[np.float32], reward: NDArray[np.float64]) -> float:
    """Returns which share of the variance of rewards [n] a feature [n] explains, by means of bins of other rows."""
    ordered = np.sort(values)
    distinct = ordered[np.concatenate(([True], ordered[1:] != ordered[:-1]))]  # NaN last, each of its own
    distinct = distinct[~np.isnan(distinct)]
    if len(distinct) > _BINS:
        present = ordered[~np.isnan(ordered)]
        distinct = present[(np.arange(1, _BINS) * len(present)) // _BINS]
    code = np.where(np.isnan(values), 0, 1 + np.searchsorted(distinct, values))
    error = 0.0
    for fitted in (0, 1):
        known = np.arange(len(values)) % 2 == fitted
        count = np.bincount(code[known], minlength=len(distinct) + 2)
        total = np.bincount(code[known], reward[known], len(distinct) + 2)
        error += float(np.square(reward[~known] - (total / count.clip(min=1))[code[~known]]).sum())
    return 1 - error / float(np.square(reward).sum())


def _shifted_rewards(copy: TrainingCopy) -> Iterator[str]:
    """Yields a sentence if the action of a row has an effect on the reward of the row before or after it only.

    The effect of action k is the mean of (1[a = k] / p - 1) times the rank of the reward. An action cannot change the
    reward of an earlier decision; in a log of single decisions it does not change that of a later one either.
    """
    if copy.parametric:
        return
    order = np.arange(len(copy))
    unit = copy.episode
    lags = {0: "", -1: "before"}
    if _is_of_single_rows(copy):
        order = np.argsort(np.asarray(copy.origin_file, np.int64) << 40 | copy.origin_line, kind="stable")
        unit = copy.origin_file
        lags[1] = "after"
    order = order[:_MOST_ROWS]
    unit = unit[order]
    action = copy.action[order]
    reward = _ranks(copy.reward[order])
    weight = np.ones(len(order)) if copy.counts.get("propensity_absent_rows") else 1.0 / copy.propensity[order]
    counts = np.bincount(action[action >= 0], minlength=1)
    common = [index for index in np.argsort(-counts)[:_MOST_ACTIONS] if counts[index] >= _FEWEST_OF_ACTION]
    effects = {}
    for lag in lags:
        rows = np.arange(max(-lag, 0), len(action) - max(lag, 0))
        rows = rows[unit[rows] == unit[rows + lag]]
        of_action = (np.where(action[rows] == index, weight[rows], 0.0) for index in common)
        effects[lag] = max((_effect(weights, reward[rows + lag]) for weights in of_action), default=0.0)
    lag = max(effects, key=lambda lag: effects[lag])
    if lag and effects[0] < _NO_EFFECT and effects[lag] > _EFFECT:
        yield (
            f"actions have no effect on the reward of their own row, but on that of the row {lags[lag]} it "
            f"(z = {effects[lag]:.1f}): check that every row has the reward of its own decision"
        )


def _effect(weight: NDArray[np.float64], reward: NDArray[np.float64]) -> float:
    """Returns the absolute normal deviate of the mean product of deviations of weights [n] and of rewards [n]."""
    if len(weight) < _FEWEST_ROWS or not weight.any():
        return 0.0
    product = (weight / weight.mean() - 1) * (reward - reward.mean())
    error = float(product.std()) / len(product) ** 0.5
    return abs(float(product.mean())) / error if error > 0 else 0.0


def _ranks(values: NDArray[np.float32]) -> NDArray[np.float64]:
    """Returns the mean ranks of values [n], which no outlier dominates, around 0."""
    ordered = np.sort(values)
    ranks = (np.searchsorted(ordered, values) + np.searchsorted(ordered, values, side="right")) / (2 * len(values))
    return np.asarray(ranks - ranks.mean())


def _is_of_single_rows(copy: TrainingCopy) -> bool:
    return len(copy.episode_hash) == len(copy)

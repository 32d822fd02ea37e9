"""Mean and standard deviation of logged returns, the unit in which a network learns values."""

import numpy as np
import torch
from numpy.typing import NDArray

from reagent_lite.data.copy.training_copy import TrainingCopy
from reagent_lite.data.sampling.shards import Shards

Floats = NDArray[np.float64]
_NEGLIGIBLE = 1e-3  # factor of a reward that hardly changes a return


def value_scale(copy: TrainingCopy, gamma: float, shards: Shards) -> tuple[float, float]:
    """Returns mean and standard deviation of the returns of all machines' rows; every rank calls it.

    The scale is 1 if all returns are equal.

    Args:
        copy: this machine's rows.
        gamma: discount per step.
        shards: assigns rows to processes.
    """
    returns = np.zeros(0)
    if shards.is_first and len(copy):
        factor = np.where(copy.follows, gamma ** copy.step.astype(np.float64) * copy.bootstrap, 0)
        returns = discount_rewards(copy.reward.astype(np.float64), factor)
    count, total = shards.group.all_reduce(torch.tensor([len(returns), returns.sum()], dtype=torch.float64)).tolist()
    mean = total / max(count, 1)
    squares = shards.group.all_reduce(torch.tensor(np.square(returns - mean).sum(), dtype=torch.float64)).item()
    deviation = (squares / max(count, 1)) ** 0.5
    return mean, deviation if deviation > 1e-6 * abs(mean) else 1.0


def discount_rewards(reward: Floats, factor: Floats) -> Floats:
    """Returns the discounted sum of each row's reward and those of the rows after it, [R].

    The sum over 2n rows is that over n rows, and discounted that over the n rows that follow them.

    Args:
        reward: [R] rewards.
        factor: [R] factor of the next row's return, 0 if it is of another episode.
    """
    returns = reward.copy()
    factor = factor.copy()
    span = 1
    while span < len(returns) and factor.max() > _NEGLIGIBLE:
        returns[:-span] += factor[:-span] * returns[span:]
        factor[:-span] *= factor[span:]
        factor[-span:] = 0
        span *= 2
    return returns

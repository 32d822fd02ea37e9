"""Mean and standard deviation of logged returns, the unit in which a network learns values."""

import numpy as np
import torch
from numpy.typing import NDArray

from reagent_lite.data.copy.training_copy import TrainingCopy
from reagent_lite.data.sampling.shards import Shards

_NEGLIGIBLE = 1e-3  # factor of a reward that hardly changes a return


def value_scale(copy: TrainingCopy, gamma: float, shards: Shards) -> tuple[float, float]:
    """Returns mean and standard deviation of the returns of all machines' rows; every rank calls it.

    The scale is 1 if all returns are equal.

    Args:
        copy: this machine's rows.
        gamma: discount per step.
        shards: assigns rows to processes.
    """
    returns = logged_returns(copy, gamma) if shards.is_first else np.zeros(0)
    count, total = shards.group.all_reduce(torch.tensor([len(returns), returns.sum()], dtype=torch.float64)).tolist()
    mean = total / max(count, 1)
    squares = shards.group.all_reduce(torch.tensor(np.square(returns - mean).sum(), dtype=torch.float64)).item()
    deviation = (squares / max(count, 1)) ** 0.5
    return mean, deviation if deviation > 1e-6 * abs(mean) else 1.0


def logged_returns(copy: TrainingCopy, gamma: float) -> NDArray[np.float64]:
    """Returns the discounted sum of a row's reward and those that the log has after it, [R].

    The sum over 2n rows is that over n rows, and discounted that over the n rows that follow them.
    """
    rows = len(copy)
    returns = copy.reward.astype(np.float64)
    factor = np.where(copy.follows, gamma ** copy.step.astype(np.float64) * copy.bootstrap, 0)
    span = 1
    while span < rows and factor.max() > _NEGLIGIBLE:
        returns[:-span] += factor[:-span] * returns[span:]
        factor[:-span] *= factor[span:]
        factor[-span:] = 0
        span *= 2
    return returns

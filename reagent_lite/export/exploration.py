"""Whether a policy explores: whether the log of its decisions could evaluate another policy; numpy only."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_CERTAIN: Final = 0.999
_MOSTLY: Final = 0.5
EXPLORE: Final = 'rl.softmax_policy 0 and an rl.epsilon above 0, such as 0.1, or rl.temperature "auto"'
"""Keys of a policy that explores, in words."""


def certain_share(propensities: NDArray[Any], choices: NDArray[np.bool_]) -> float:
    """Returns the share of decisions among several choices in which one has a propensity of at least 0.999.

    Args:
        propensities: [N, K] probabilities of the policy.
        choices: [N, K] choices that exist and are allowed.
    """
    several = choices.sum(1) > 1
    certain = several & (propensities.max(1) >= _CERTAIN)
    return float(certain.sum() / several.sum()) if several.any() else 0.0


def lack_of_exploration(share: float) -> str:
    """Returns what is wrong with a policy of a `certain_share`, as the rest of a sentence about it; "" if it explores.

    A policy explores if it draws among its choices in at least half of its decisions.
    """
    if share <= _MOSTLY:
        return ""
    return (
        f"takes one action with propensity 1.0 in {share:.0%} of its decisions, as a greedy policy does: a log of them "
        "is not enough to evaluate another policy"
    )

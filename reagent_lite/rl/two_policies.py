"""Two policies behind one service: propensities of units that stay with one, and the difference of their values.

A unit, an episode or a single decision, is given to the new policy with probability p, its share. With w_k the product
of policy k's probabilities of the unit's actions, its actions have density p w_new + (1 - p) w_current, whoever draws
them. All functions need only log w_new - log w_current, the log ratio; numpy only.

Karampatziakis, Mineiro & Ramdas (2021), Off-policy Confidence Sequences; Waudby-Smith, Wu, Ramdas, Karampatziakis &
Mineiro (2022), Anytime-valid off-policy inference for contextual bandits; the balance heuristic is that of Veach &
Guibas (1995).
"""

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


def mixed_propensity(share: float, log_ratio: float, current: float, new: float) -> float:
    """Returns the propensity of a unit's next action: the product over a unit is the density of all its actions.

    Args:
        share: share of the unit.
        log_ratio: of the unit's actions before.
        current: the current policy's probability of the action.
        new: the new policy's.
    """
    smaller = math.exp(-abs(log_ratio))  # weight of the less likely policy, relative to the other
    of_new = share * (1.0 if log_ratio > 0 else smaller)
    of_current = (1 - share) * (smaller if log_ratio > 0 else 1.0)
    return (of_new * new + of_current * current) / (of_new + of_current)


def log_ratio_of(current: ArrayLike, new: ArrayLike) -> Any:
    """Returns what an action adds to the log ratio; infinite if one policy never takes it."""
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(new, np.float64)) - np.log(np.asarray(current, np.float64))


def relative_difference(share: ArrayLike, log_ratio: ArrayLike) -> Any:
    """Returns (w_new - w_current) / (p w_new + (1 - p) w_current), in [-1 / (1 - p), 1 / p] for any horizon.

    Its product with the unit's return has the difference of the policies' values as expectation; its own is 0.
    """
    share = np.asarray(share, np.float64)
    smaller = np.exp(-np.abs(log_ratio))  # weight of the less likely policy, relative to the other
    is_new = np.asarray(log_ratio) > 0
    of_new = np.where(is_new, 1.0, smaller)
    of_current = np.where(is_new, smaller, 1.0)
    return (of_new - of_current) / (share * of_new + (1 - share) * of_current)


def difference_bounds(share: ArrayLike, below: ArrayLike, above: ArrayLike) -> tuple[Any, Any]:
    """Returns the lowest and the highest possible relative difference times (return - center).

    Args:
        share: share of the unit.
        below: center - smallest possible return, at least 0.
        above: largest possible return - center, at least 0.
    """
    share = np.asarray(share, np.float64)
    return -np.maximum(above / (1 - share), below / share), np.maximum(above / share, below / (1 - share))

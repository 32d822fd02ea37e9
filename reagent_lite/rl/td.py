"""Temporal-difference targets over [B, K] choices.

A row with no allowed choice has value 0: never -inf (-inf * 0 is NaN), never a large negative number.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

Values = Callable[[Tensor], Tensor]
"""Maps one choice per row, [B] int64, to its value [B], or to the outputs [B, H] whose mean is its value."""
Bounds = tuple[float, float] | None
"""Lowest and highest value of a target."""


def discount(gamma: float, steps: Tensor, bootstrap: Tensor) -> Tensor:
    """Returns the factor that multiplies the next state's value, [B].

    gamma^steps * bootstrap: 0 after a true end. Sutton & Barto (2018), sections 7.1 and 10.4.
    """
    return torch.pow(gamma, steps) * bootstrap


def greedy_choice(q: Tensor, mask: Tensor) -> Tensor:
    """Returns the allowed choice with the largest value, [B] int64, for q [B, K] and mask [B, K].

    Ties go to the lowest index; a row with no allowed choice gives 0.
    """
    return torch.where(mask, q, -torch.inf).argmax(1)


def select_choice(q: Tensor, choice: Tensor) -> Tensor:
    """Returns q at one choice per row, [B] or [B, H], for q [B, K] or [B, K, H]."""
    index = choice.view(-1, 1, *[1] * (q.dim() - 2)).expand(-1, 1, *q.shape[2:])
    return q.gather(1, index).squeeze(1)


def double_q_value(q: Tensor, target: Values, mask: Tensor) -> Tensor:
    """Returns the target network's value of the online network's choice; van Hasselt et al. (2016), eq. 4.

    A row with no allowed choice has value 0.

    Args:
        q: [B, K] of the online network.
        target: the target network's values.
        mask: [B, K] bool, the allowed choices.
    """
    choice = greedy_choice(q, mask)
    value = target(choice)
    allowed = mask.gather(1, choice.unsqueeze(1))
    return value * (allowed if value.dim() == 2 else allowed.squeeze(1))


def greedy_value(q: Tensor, outputs: Tensor, mask: Tensor) -> Tensor:
    """Returns the largest allowed value, or the outputs whose mean it is; Watkins & Dayan (1992).

    q is [B, K], outputs [B, K] or [B, K, H], both of the same network; a row with no allowed choice gives 0.
    """
    return double_q_value(q, partial(select_choice, outputs), mask)


def expected_value(q: Tensor, propensities: Tensor) -> Tensor:
    """Returns the mean value under a policy, [B], for q and propensities [B, K]; Expected SARSA."""
    return (q * propensities).sum(1)


def value_bounds(reward: Tensor, discount: Tensor) -> tuple[float, float]:
    """Returns the lowest and the highest value that the rewards allow; -inf and inf if there is no bound.

    The range always contains 0. The highest value is the smallest B with r + d B <= B in every row: the largest
    r / (1 - d).

    Args:
        reward: [R] float64, the discounted sum if a row covers several steps.
        discount: [R] float64, the factor of the next value, 0 at a true end.
    """
    values = torch.where(reward == 0, 0, reward / (1 - discount))
    values = torch.cat((values, values.new_zeros(1)))
    return float(values.amin()), float(values.amax())


def td_target(reward: Tensor, discount: Tensor, next_value: Tensor, bounds: Bounds = None) -> Tensor:
    """Returns r + d * v, [B] or [B, H] for next_value [B] or [B, H], clipped to bounds; Sutton (1988)."""
    if next_value.dim() == 2:
        reward = reward.unsqueeze(1)
        discount = discount.unsqueeze(1)
    target = torch.addcmul(reward, discount, next_value)
    return target if bounds is None else target.clamp(*bounds)

"""Temporal-difference targets over [B, K] choices.

A row with no allowed choice has value 0: never -inf (-inf * 0 is NaN), never a large negative number.
"""

import torch
from torch import Tensor


def discount(gamma: float, steps: Tensor, bootstrap: Tensor) -> Tensor:
    """Returns what the next state's value is multiplied by, [B].

    gamma^steps * bootstrap: 0 after a true end. Sutton & Barto (2018), sections 7.1 and 10.4.
    """
    return torch.pow(gamma, steps) * bootstrap


def greedy_choice(q: Tensor, mask: Tensor) -> Tensor:
    """Returns the allowed choice of largest value, [B] int64, for q [B, K] and mask [B, K].

    Ties go to the lowest index; a row with no allowed choice gives 0.
    """
    return torch.where(mask, q, -torch.inf).argmax(1)


def chosen(q: Tensor, choice: Tensor) -> Tensor:
    """Returns the entry of one choice per row, [B] or [B, H], for q [B, K] or [B, K, H]; logged choices are allowed."""
    index = choice.view(-1, 1, *[1] * (q.dim() - 2)).expand(-1, 1, *q.shape[2:])
    return q.gather(1, index).squeeze(1)


def taken_value(q: Tensor, choice: Tensor, mask: Tensor) -> Tensor:
    """Returns the value of one choice per row, [B] or [B, H], for q [B, K] or [B, K, H].

    A choice that is not allowed has value 0.
    """
    allowed = mask.gather(1, choice.unsqueeze(1))
    return chosen(q, choice) * (allowed if q.dim() == 3 else allowed.squeeze(1))


def greedy_value(q: Tensor, mask: Tensor) -> Tensor:
    """Returns the largest allowed value, [B], for q [B, K]; Watkins & Dayan (1992)."""
    return taken_value(q, greedy_choice(q, mask), mask)


def double_q_value(q: Tensor, q_target: Tensor, mask: Tensor) -> Tensor:
    """Returns the target network's value of the online network's choice, [B]; van Hasselt et al. (2016), eq. 4."""
    return taken_value(q_target, greedy_choice(q, mask), mask)


def expected_value(q: Tensor, propensities: Tensor) -> Tensor:
    """Returns the mean value under a policy, [B], for q and propensities [B, K]; Expected SARSA."""
    return (q * propensities).sum(1)


def value_bounds(reward: Tensor, discount: Tensor) -> tuple[float, float]:
    """Returns the lowest and the highest value that such rewards can pay, 0 among them; -inf and inf without a bound.

    The highest is the smallest B with r + d B <= B in every row: the largest r / (1 - d).

    Args:
        reward: [R] float64 of rows; those of several steps are summed up.
        discount: [R] float64 of what follows each, 0 at a true end.
    """
    worth = torch.where(reward == 0, 0, reward / (1 - discount))
    worth = torch.cat((worth, worth.new_zeros(1)))
    return float(worth.amin()), float(worth.amax())


def td_target(reward: Tensor, discount: Tensor, next_value: Tensor) -> Tensor:
    """Returns r + d * v, [B]; Sutton (1988)."""
    return torch.addcmul(reward, discount, next_value)

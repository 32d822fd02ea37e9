"""Logged episodes laid out beside each other, as the estimators of a policy's value read them."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Episodes:
    """Logged episodes beside each other, float64; past an episode's end weight is 1 and everything else 0.

    Attributes:
        running: [n, L] 1 where the episode has a row, else 0.
        weight: [n, L] pi / mu of the logged action.
        discount: [n, L] gamma to the power of the time since the episode's start.
        reward: [n, L].
        reward_taken: [n, L] reward model at the logged action.
        reward_expected: [n, L] reward model, mean over the evaluated policy.
        value_taken: [n, L] q of the logged action.
        value_expected: [n, L] v, mean of q over the evaluated policy.
        tail: [n, L] discounted v of the next state at the last row of an episode that was cut, 0 elsewhere.
    """

    running: Tensor
    weight: Tensor
    discount: Tensor
    reward: Tensor
    reward_taken: Tensor
    reward_expected: Tensor
    value_taken: Tensor
    value_expected: Tensor
    tail: Tensor

"""How strong a hidden cause of logged actions would have to be to undo a decision.

If the logging policy saw something that the log lacks and rewards depend on, logged propensities p are means of true
ones p*. In the marginal sensitivity model their odds differ by at most a factor Gamma, so that a weight pi / p* lies
between pi (1 + (1 / p - 1) / Gamma) and pi (1 + (1 / p - 1) Gamma); Tan (2006). The worst self-normalized estimate has
upper weights below a reward and lower ones above it; Kallus & Zhou (2018), Zhao, Small & Bhattacharya (2019).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_MOST = 100.0  # stronger causes are as good as any
_HALVINGS = 13  # to 0.1 %
_MOST_ROWS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenCause:
    """One-step rows by ascending reward.

    Attributes:
        reward: [n] rewards.
        evaluated: [n] probability of the logged action under the evaluated policy, times the row's sample weight.
        logged: [n] the same under the logging policy.
    """

    reward: Tensor
    evaluated: Tensor
    logged: Tensor

    @classmethod
    def of(cls, reward: Tensor, evaluated: Tensor, logged: Tensor) -> "HiddenCause":
        """Returns the rows by ascending reward, given in any order; of many, evenly spread ones."""
        order = reward.argsort(stable=True)
        order = order[:: -(-len(order) // _MOST_ROWS)]
        return cls(reward=reward[order], evaluated=evaluated[order], logged=logged[order])

    def shift(self, gamma: float, side: int) -> float:
        """Returns how far a cause of strength gamma moves the self-normalized estimate at most.

        Args:
            gamma: at least 1.
            side: 1 if it lowers the estimate, -1 if it raises it.
        """
        odds = (1 / self.logged - 1).clamp(min=0)
        least = self.evaluated * (1 + odds / gamma)
        most = self.evaluated * (1 + odds * gamma)
        first, last = (most, least) if side > 0 else (least, most)
        # weights of the k first rows are `first`, those of the others `last`
        total = first.cumsum(0) + last.sum() - last.cumsum(0)
        weighted = (first * self.reward).cumsum(0) + (last * self.reward).sum() - (last * self.reward).cumsum(0)
        ends = weighted[total > 0] / total[total > 0]
        plain = self.evaluated * (1 + odds)
        if not len(ends) or not float(plain.sum()) > 0:
            return torch.inf
        estimate = float((plain * self.reward).sum() / plain.sum())
        return max(0.0, estimate - float(ends.min()) if side > 0 else float(ends.max()) - estimate)

    def strength(self, slack: float, side: int) -> float:
        """Returns the largest gamma, at most 100, that moves the estimate by no more than `slack`."""
        if self.shift(_MOST, side) <= slack:
            return _MOST
        low, high = 1.0, _MOST
        for _ in range(_HALVINGS):
            middle = (low * high) ** 0.5
            low, high = (middle, high) if self.shift(middle, side) <= slack else (low, middle)
        return low

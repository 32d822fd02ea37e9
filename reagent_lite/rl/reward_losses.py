"""Losses of scores that predict rewards, as weighted least squares near given scores.

SquaredLoss   (y - score)^2                                     expected value: score
LogLoss       log(1 + exp(score)) - y score, for y of 0 or 1    expected value: sigmoid(score)
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import softplus


@dataclass(frozen=True, slots=True)
class SquaredLoss:
    """The squared error.

    Attributes:
        steps: most Newton steps of a fit; one is exact.
        curvature: usual second derivative of half the loss, by which penalties are scaled.
        objective: LightGBM's name of the loss.
    """

    steps: ClassVar[int] = 1
    objective: ClassVar[str] = "regression"
    curvature: float = 1.0

    def constant(self, total: Tensor, count: Tensor) -> Tensor:
        """Returns the score of rows whose targets have a given sum."""
        return total / count

    def rows(self, scores: Tensor, target: Tensor) -> Tensor:
        """Returns the loss of each row."""
        return (target - scores).square()

    def predict(self, scores: Tensor) -> Tensor:
        """Returns expected targets."""
        return scores

    def linearize(self, scores: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns what is missing in the scores, and the rows' weights; None: 1."""
        return target - scores, None

    def for_trees(self, scores: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the labels of trees, and the scores from which they start; None: 0."""
        return target - scores, None


@dataclass(frozen=True, slots=True)
class LogLoss:
    """The negative log-likelihood of the higher reward; scores are log-odds."""

    steps: ClassVar[int] = 6
    objective: ClassVar[str] = "cross_entropy"
    curvature: float

    def constant(self, total: Tensor, count: Tensor) -> Tensor:
        """Returns the log-odds of `total` higher rewards in `count` rows; half a row more of each keeps them finite."""
        return torch.logit((total + 0.5) / (count + 1))

    def rows(self, scores: Tensor, target: Tensor) -> Tensor:
        """Returns the loss of each row."""
        return softplus(scores) - target * scores

    def predict(self, scores: Tensor) -> Tensor:
        """Returns probabilities."""
        return scores.sigmoid()

    def linearize(self, scores: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the working residuals of a Newton step, and the rows' weights."""
        probability = scores.sigmoid()
        weight = (probability * (1 - probability)).clamp(min=0.01 * self.curvature)
        return (target - probability) / weight, weight

    def for_trees(self, scores: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the labels of trees, and the scores from which they start."""
        return target, scores


RewardLoss = SquaredLoss | LogLoss

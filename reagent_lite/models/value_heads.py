"""Meaning of the H outputs of a choice: a value, a categorical distribution, or quantiles of the return.

A head's `loss` returns the loss of each row, [B], and its priority in replay, [B] without a gradient: the absolute TD
error, and for distributions the loss, as in Rainbow (Hessel et al., 2018). `half_squares` is the loss of a small TD
error divided by half of its square, the unit of CQL's objective, and `scale` is the unit of values in this loss.
"""

from typing import Final

import torch
from torch import Tensor, nn

from reagent_lite.rl.losses import categorical_projection, quantile_huber_loss, td_error, td_loss
from reagent_lite.rl.td import Bounds, td_target


class ScalarHead(nn.Module):
    """One output: the value itself, or with "bce_with_logits" the logit of the value, a probability."""

    outputs: Final[int] = 1
    scale: float = 1.0

    def __init__(self, loss: str = "mse") -> None:
        super().__init__()
        self.kind = loss
        self.half_squares = 2.0 if loss == "mse" else 1.0

    def forward(self, outputs: Tensor) -> Tensor:
        """Returns values [B, K] for [B, K, 1]."""
        values = outputs.squeeze(2)
        return values.sigmoid() if self.kind == "bce_with_logits" else values

    @torch.jit.unused
    def loss(
        self, outputs: Tensor, next_outputs: Tensor, reward: Tensor, discount: Tensor, bounds: Bounds
    ) -> tuple[Tensor, Tensor]:
        """Returns TD loss and absolute TD error; see rl.losses.td_loss."""
        target = td_target(reward, discount, next_outputs.squeeze(1), bounds)
        prediction = outputs.squeeze(1)
        return td_loss(prediction, target, self.kind), td_error(prediction.detach(), target, self.kind)


class ScaledHead(ScalarHead):
    """One output: (value - center) / scale, so that outputs, losses and gradients do not depend on the unit of rewards.

    A fixed form of the normalization of targets of van Hasselt et al. (2016), "Learning values across many orders of
    magnitude".
    """

    def __init__(self, loss: str, center: float, scale: float) -> None:
        super().__init__(loss)
        self.center = center
        self.scale = scale

    def forward(self, outputs: Tensor) -> Tensor:
        """Returns values [B, K] for [B, K, 1]."""
        return outputs.squeeze(2) * self.scale + self.center

    @torch.jit.unused
    def loss(
        self, outputs: Tensor, next_outputs: Tensor, reward: Tensor, discount: Tensor, bounds: Bounds
    ) -> tuple[Tensor, Tensor]:
        """Returns TD loss in units of the outputs, and absolute TD error in units of the reward."""
        next_value = next_outputs.squeeze(1) * self.scale + self.center
        target = (td_target(reward, discount, next_value, bounds) - self.center) / self.scale
        prediction = outputs.squeeze(1)
        return td_loss(prediction, target, self.kind), td_error(prediction.detach(), target, self.kind) * self.scale


class CategoricalHead(nn.Module):
    """Logits over fixed returns: C51, Bellemare, Dabney & Munos (2017). Targets stay within their range."""

    half_squares: Final[float] = 1.0
    scale: float = 1.0

    def __init__(self, num_atoms: int, lowest: float, highest: float) -> None:
        super().__init__()
        self.outputs: Final[int] = num_atoms
        self.support = nn.Buffer(torch.linspace(lowest, highest, num_atoms))

    def forward(self, outputs: Tensor) -> Tensor:
        """Returns the mean return, [B, K], for logits [B, K, H]."""
        return (outputs.softmax(2) * self.support).sum(2)

    @torch.jit.unused
    def loss(
        self, outputs: Tensor, next_outputs: Tensor, reward: Tensor, discount: Tensor, bounds: Bounds
    ) -> tuple[Tensor, Tensor]:
        """Returns the cross-entropy with the projected target distribution, also as the priority."""
        returns = td_target(reward, discount, self.support.expand_as(next_outputs))
        target = categorical_projection(next_outputs.softmax(1), returns, self.support)
        loss = -(target * outputs.log_softmax(1)).sum(1)
        return loss, loss.detach()


class QuantileHead(nn.Module):
    """Quantiles of the return at midpoints: QR-DQN, Dabney et al. (2018)."""

    half_squares: Final[float] = 1.0
    scale: float = 1.0

    def __init__(self, num_quantiles: int) -> None:
        super().__init__()
        self.outputs: Final[int] = num_quantiles

    def forward(self, outputs: Tensor) -> Tensor:
        """Returns the mean of the quantiles, [B, K], for [B, K, H]."""
        return outputs.mean(2)

    @torch.jit.unused
    def loss(
        self, outputs: Tensor, next_outputs: Tensor, reward: Tensor, discount: Tensor, bounds: Bounds
    ) -> tuple[Tensor, Tensor]:
        """Returns the quantile Huber loss, also as the priority."""
        target = td_target(reward, discount, next_outputs, bounds)
        loss = quantile_huber_loss(outputs, target)
        return loss, loss.detach()


class Scorer(nn.Module):
    """Network and head as one module, from states and choices to values, for evaluation and export."""

    def __init__(self, network: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.head = head
        self.needs_candidate_list: Final[bool] = bool(network.needs_candidate_list)

    def forward(self, state: Tensor, mask: Tensor, features: Tensor | None = None) -> Tensor:
        """Returns values [B, K] for state [B, S], mask [B, K] and features [B, K, F] of candidates."""
        return self.head(self.network(state, mask, features))  # type: ignore[no-any-return]

"""What the H outputs of a choice mean: a value, a categorical distribution, or quantiles of the return."""

from typing import Final

import torch
from torch import Tensor, nn

from reagent_lite.rl.losses import categorical_projection, quantile_huber_loss, td_loss
from reagent_lite.rl.td import td_target


class ScalarHead(nn.Module):
    """One output: the value itself."""

    outputs: Final[int] = 1

    def __init__(self, loss: str = "mse") -> None:
        super().__init__()
        self.kind = loss

    def forward(self, outputs: Tensor) -> Tensor:
        """Returns [B, K] for [B, K, 1]."""
        return outputs.squeeze(2)

    @torch.jit.unused
    def loss(self, taken: Tensor, next_taken: Tensor, reward: Tensor, discount: Tensor) -> Tensor:
        """Returns the TD loss of each row; rl.losses.td_loss has the kinds."""
        return td_loss(taken.squeeze(1), td_target(reward, discount, next_taken.squeeze(1)), self.kind)


class CategoricalHead(nn.Module):
    """Logits over fixed returns: C51, Bellemare, Dabney & Munos (2017)."""

    def __init__(self, num_atoms: int, lowest: float, highest: float) -> None:
        super().__init__()
        self.outputs: Final[int] = num_atoms
        self.support: Tensor
        self.register_buffer("support", torch.linspace(lowest, highest, num_atoms))

    def forward(self, outputs: Tensor) -> Tensor:
        """Returns the mean return, [B, K], for logits [B, K, H]."""
        return (outputs.softmax(2) * self.support).sum(2)

    @torch.jit.unused
    def loss(self, taken: Tensor, next_taken: Tensor, reward: Tensor, discount: Tensor) -> Tensor:
        """Returns the cross-entropy against the projected target distribution."""
        returns = reward.unsqueeze(1) + discount.unsqueeze(1) * self.support
        target = categorical_projection(next_taken.softmax(1), returns, self.support)
        return -(target * taken.log_softmax(1)).sum(1)


class QuantileHead(nn.Module):
    """Quantiles of the return at midpoints: QR-DQN, Dabney et al. (2018)."""

    def __init__(self, num_quantiles: int) -> None:
        super().__init__()
        self.outputs: Final[int] = num_quantiles

    def forward(self, outputs: Tensor) -> Tensor:
        """Returns the mean of the quantiles, [B, K], for [B, K, H]."""
        return outputs.mean(2)

    @torch.jit.unused
    def loss(self, taken: Tensor, next_taken: Tensor, reward: Tensor, discount: Tensor) -> Tensor:
        """Returns the quantile Huber loss."""
        target = reward.unsqueeze(1) + discount.unsqueeze(1) * next_taken
        return quantile_huber_loss(taken, target)


class Scorer(nn.Module):
    """Network and head as one: state and choices in, values out. This is what evaluation and export see."""

    def __init__(self, network: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.head = head
        self.needs_candidate_list: Final[bool] = bool(network.needs_candidate_list)

    def forward(self, state: Tensor, mask: Tensor, features: Tensor | None = None) -> Tensor:
        """Returns values [B, K] for state [B, S], mask [B, K] and features [B, K, F] of candidates."""
        return self.head(self.network(state, mask, features))  # type: ignore[no-any-return]

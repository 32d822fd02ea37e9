"""Choices that a policy may take: all allowed choices, unless its algorithm restricts them."""

from torch import Tensor, nn


class Unrestricted(nn.Module):
    """Every allowed choice."""

    def forward(self, state: Tensor, mask: Tensor, features: Tensor | None = None) -> Tensor:
        """Returns mask [B, K] unchanged."""
        return mask

"""Importance weights of episodes: products over steps, in logarithms so that long ones neither overflow nor vanish."""

import torch
from torch import Tensor


def log_cumulative_weights(weight: Tensor) -> Tensor:
    """Returns log rho_t, [n, L], for per-step weights [n, L] that are 1 past an episode's end.

    rho_t is therefore held constant after the end: a weight of 0 there would hand the ended episode's share to the
    others and overestimate. Precup, Sutton & Singh (2000).
    """
    return weight.log().cumsum(1)


def relative_weights(log_weights: Tensor, log_reference: Tensor) -> Tensor:
    """Returns rho_t divided by its reference of the same step, for logarithms [n, L] and [L].

    With the largest rho_t of any episode as reference, ratios rho^i / rho^j are kept exactly, which is all that
    self-normalized estimators use. Where that reference is 0, no episode has weight and all are 0.
    """
    return (log_weights - finite_or_zero(log_reference)).exp()


def finite_or_zero(log_weights: Tensor) -> Tensor:
    """Returns logarithms, and 0 for those of weights 0."""
    return torch.where(log_weights.isfinite(), log_weights, 0)


def safe_divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Returns numerator / denominator, and 0 where the denominator is 0."""
    return numerator / torch.where(denominator > 0, denominator, torch.inf)

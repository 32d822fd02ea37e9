"""Importance weights of episodes: products over steps, in logarithms so that long ones neither overflow nor vanish."""

import torch
from torch import Tensor


def log_cumulative_weights(weight: Tensor) -> Tensor:
    """Returns log rho_t, [n, L], for per-step weights [n, L] that are 1 past an episode's end.

    rho_t is therefore held constant after the end: a weight of 0 there would hand the ended episode's share to the
    others and overestimate. Precup, Sutton & Singh (2000).
    """
    return weight.log().cumsum(1)


def relative_weights(log_weights: Tensor) -> Tensor:
    """Returns rho_t divided by the largest rho_t of any episode, [n, L]; 0 where none has weight.

    Ratios rho^i / rho^j are kept exactly, which is all that self-normalized estimators use.
    """
    largest = log_weights.amax(0)
    return (log_weights - torch.where(largest.isfinite(), largest, 0)).exp()


def weighted_sums(relative: Tensor, values: Tensor, counts: Tensor) -> Tensor:
    """Returns sum_i omega_t^i x_t^i in each sample, [R, L], for weights and values [n, L] and counts [R, n].

    omega is normalized over all episodes of the sample, ended ones too; where none has weight the sum is 0.
    """
    return safe_divide(counts @ (relative * values), counts @ relative)


def safe_divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Returns numerator / denominator, and 0 where the denominator is 0."""
    return numerator / torch.where(denominator > 0, denominator, torch.inf)

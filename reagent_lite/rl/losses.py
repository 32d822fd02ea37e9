"""Losses of single rows; the caller weights and sums them."""

from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

_LOSSES: Final[dict[str, Callable[..., Tensor]]] = {
    "mse": F.mse_loss,
    "huber": F.smooth_l1_loss,
    "bce_with_logits": F.binary_cross_entropy_with_logits,
}


def td_loss(prediction: Tensor, target: Tensor, kind: str) -> Tensor:
    """Returns the loss of each row, [B], for prediction and target [B].

    kind: "mse" is the squared error, "huber" is smooth L1 with beta 1 (Mnih et al., 2015), "bce_with_logits" the
    cross-entropy of a logit against a target in [0, 1].
    """
    return _LOSSES[kind](prediction, target, reduction="none")


def td_error(prediction: Tensor, target: Tensor, kind: str) -> Tensor:
    """Returns |target - prediction| of each row, [B]; "bce_with_logits" compares the predicted probability."""
    if kind == "bce_with_logits":
        prediction = prediction.sigmoid()
    return (target - prediction).abs()


def constant_loss(mean: float, variance: float, kind: str) -> float:
    """Returns an upper bound on the td_loss of the best constant prediction, for targets of this mean and variance.

    For "mse" and "bce_with_logits" the constant is the mean and the bound is exact: the variance and the entropy.
    "huber" is a concave function of the squared error. By Jensen's inequality its mean is at most the loss of one
    standard deviation, and equal to it while errors are below 1.
    """
    if kind == "bce_with_logits":
        target = torch.tensor(mean, dtype=torch.float64)
        return float(F.binary_cross_entropy(target, target))
    deviation = torch.tensor(variance, dtype=torch.float64).sqrt()
    return float(td_loss(deviation, torch.zeros_like(deviation), kind))


def categorical_projection(probabilities: Tensor, returns: Tensor, support: Tensor) -> Tensor:
    """Projects a distribution over shifted returns onto the fixed support, [B, H].

    probabilities and returns are [B, H], support is [H], equally spaced; mass beyond its ends goes to the ends.
    Bellemare, Dabney & Munos (2017), eq. 7.
    """
    spacing = (support[-1] - support[0]) / (support.shape[0] - 1)
    distance = (returns.clamp(support[0], support[-1]).unsqueeze(2) - support).abs() / spacing
    return (probabilities.unsqueeze(2) * (1 - distance).clamp(min=0)).sum(1)


def quantile_huber_loss(quantiles: Tensor, target: Tensor) -> Tensor:
    """Returns the quantile Huber loss of each row with kappa 1, [B], for quantiles and target [B, H].

    Quantile i has midpoint (i + 1/2) / H. The loss is summed over quantiles and averaged over target samples.
    Dabney et al. (2018), eq. 10.
    """
    count = quantiles.shape[1]
    midpoints = (torch.arange(count, device=quantiles.device, dtype=quantiles.dtype) + 0.5) / count
    error = target.unsqueeze(1) - quantiles.unsqueeze(2)
    targets = target.unsqueeze(1).expand_as(error)
    predictions = quantiles.unsqueeze(2).expand_as(error)
    huber = F.huber_loss(targets, predictions, reduction="none")
    return ((midpoints.unsqueeze(1) - (error.detach() < 0).to(huber.dtype)).abs() * huber).mean(2).sum(1)


def conservative_loss(q: Tensor, mask: Tensor, action: Tensor) -> Tensor:
    """Returns logsumexp over allowed Q minus the logged action's Q, [B]; Kumar et al. (2020), CQL(H), eq. 4."""
    lowest = torch.finfo(q.dtype).min
    return q.masked_fill(~mask, lowest).logsumexp(1) - q.gather(1, action.unsqueeze(1)).squeeze(1)


def imitation_loss(logits: Tensor, mask: Tensor, action: Tensor) -> Tensor:
    """Returns the cross-entropy of the logged action among allowed choices, [B]; for behavior cloning (BCQ)."""
    log_probability = logits.masked_fill(~mask, torch.finfo(logits.dtype).min).log_softmax(1)
    return -log_probability.gather(1, action.unsqueeze(1)).squeeze(1)


def expectile_loss(prediction: Tensor, target: Tensor, expectile: float) -> Tensor:
    """Returns |expectile - [u < 0]| u^2 of u = target - prediction, [B]; Newey & Powell (1987)."""
    error = target - prediction
    return torch.where(error < 0, 1 - expectile, expectile) * error.square()

"""Percentile bootstrap over episodes.

Rows of one episode are not independent, so whole episodes are drawn. A resample is a row of counts: how often each
episode was drawn. Estimators take such counts, so that all resamples are evaluated by one matrix product.
"""

import torch
from torch import Tensor


def resample_counts(num_episodes: int, num_resamples: int, generator: torch.Generator) -> Tensor:
    """Returns how often each episode is in each sample, [1 + num_resamples, num_episodes] float64.

    Row 0 is the sample itself, all ones; each other row draws num_episodes episodes with replacement.
    Efron & Tibshirani (1993), An Introduction to the Bootstrap, section 6.2.
    """
    counts = torch.zeros(1 + num_resamples, num_episodes, dtype=torch.float64)
    counts[0] = 1
    draws = torch.randint(num_episodes, (num_resamples, num_episodes), generator=generator)
    return counts.index_put_(
        (torch.arange(1, 1 + num_resamples).unsqueeze(1), draws), counts.new_ones(()), accumulate=True
    )


def percentile_interval(samples: Tensor, level: float) -> tuple[float, float]:
    """Returns the (1 - level) / 2 and (1 + level) / 2 quantiles of resampled estimates [R].

    Resamples in which the estimate is undefined (NaN: no weight was drawn) make both bounds NaN when they are more than
    1 - level of all, else they are left out. Efron & Tibshirani (1993), section 13.3.
    """
    defined = samples[samples.isfinite()]
    if len(defined) < max(level * len(samples), 1):
        return float("nan"), float("nan")
    bounds = torch.quantile(defined, defined.new_tensor([(1 - level) / 2, (1 + level) / 2]))
    return float(bounds[0]), float(bounds[1])


def effective_sample_size(weights: Tensor) -> Tensor:
    """Returns (sum w)^2 / sum w^2 over the first axis; 0 where all weights are 0. Kong (1992)."""
    scaled = weights / weights.amax(0).clamp(min=torch.finfo(weights.dtype).tiny)
    return scaled.sum(0).square() / scaled.square().sum(0).clamp(min=torch.finfo(weights.dtype).tiny)

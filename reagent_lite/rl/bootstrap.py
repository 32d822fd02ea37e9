"""Percentile bootstrap over episodes.

Rows of an episode are not independent, so whole episodes are drawn. A resample is a row of counts: how often each
episode was drawn. Estimators take these counts, so that one matrix product evaluates many resamples.
"""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# Draws and samples per random stream, at most; changing them changes the resamples of a seed.
_STREAM_DRAWS = 2**18
_STREAM_SAMPLES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Resamples:
    """Samples of n episodes each, drawn with replacement; they do not depend on the size of blocks.

    Efron & Tibshirani (1993), An Introduction to the Bootstrap, section 6.2.
    """

    num_episodes: int
    num_resamples: int
    seed: int

    def blocks(self, max_samples: int = 256, max_bytes: int = 2**25) -> Iterator[Tensor]:
        """Yields blocks of [samples, num_episodes] uint8: how often each episode is in each sample.

        The first block is a row of ones, the original sample. Blocks have at most `max_samples` rows and `max_bytes`,
        but at least one random stream. They are drawn by as many threads as torch uses.
        """
        yield torch.ones(1, self.num_episodes, dtype=torch.uint8)
        per_stream = max(1, min(_STREAM_SAMPLES, _STREAM_DRAWS // self.num_episodes))
        streams = max(1, min(max_samples, max_bytes // self.num_episodes) // per_stream)
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            for start in range(0, self.num_resamples, streams * per_stream):
                rows = min(streams * per_stream, self.num_resamples - start)
                counts = torch.zeros(rows, self.num_episodes, dtype=torch.uint8)
                list(threads.map(self._draw, itertools.count(start // per_stream), torch.split(counts, per_stream)))
                yield counts

    def _draw(self, stream: int, counts: Tensor) -> None:
        """Adds the draws of a random stream to counts [samples, n], which are zeros before."""
        generator = np.random.default_rng([self.seed, stream])
        draws = torch.from_numpy(generator.integers(self.num_episodes, size=counts.shape))
        # a count beyond 255 needs more than 255 episodes, and then has a chance below 1 / 256!
        counts.scatter_add_(1, draws, counts.new_ones(()).expand(counts.shape))


def resamples(num_episodes: int, num_resamples: int, generator: torch.Generator) -> Resamples:
    """Returns resamples with a seed drawn from a generator on the CPU."""
    seed = int(torch.randint(2**63 - 1, (), generator=generator))
    return Resamples(num_episodes=num_episodes, num_resamples=num_resamples, seed=seed)


def percentile_interval(samples: Tensor, level: float) -> tuple[float, float]:
    """Returns the (1 - level) / 2 and (1 + level) / 2 quantiles of resampled estimates [R].

    Resamples with an undefined estimate (NaN: no weight was drawn) are left out; if they are more than 1 - level of
    all, both bounds are NaN. Efron & Tibshirani (1993), section 13.3.
    """
    defined = samples[samples.isfinite()]
    if len(defined) < max(level * len(samples), 1):
        return float("nan"), float("nan")
    bounds = torch.quantile(defined, defined.new_tensor([(1 - level) / 2, (1 + level) / 2]))
    return float(bounds[0]), float(bounds[1])


def effective_sample_size(weights: Tensor) -> Tensor:
    """Returns (sum w)^2 / sum w^2 over the first axis; 0 if all weights are 0. Kong (1992)."""
    scaled = weights / weights.amax(0).clamp(min=torch.finfo(weights.dtype).tiny)
    return scaled.sum(0).square() / scaled.square().sum(0).clamp(min=torch.finfo(weights.dtype).tiny)

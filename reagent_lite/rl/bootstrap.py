"""Percentile bootstrap over episodes.

Rows of one episode are not independent, so whole episodes are drawn. A resample is a row of counts: how often each
episode was drawn. Estimators take such counts, so that many resamples are evaluated by one matrix product.
"""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# One random stream per about so many draws and at most so many samples: part of what a seed means.
_STREAM_DRAWS = 2**18
_STREAM_SAMPLES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Resamples:
    """Samples of n episodes each, drawn with replacement; the same however they are cut into blocks.

    Efron & Tibshirani (1993), An Introduction to the Bootstrap, section 6.2.
    """

    num_episodes: int
    num_resamples: int
    seed: int

    def blocks(self, max_samples: int = 256, max_bytes: int = 2**25) -> Iterator[Tensor]:
        """Yields how often each episode is in each sample, [samples, num_episodes] uint8, block after block.

        The first block is the sample itself, one row of ones. Blocks have at most `max_samples` rows and `max_bytes`,
        but never less than one random stream; torch's number of threads draws them.
        """
        yield torch.ones(1, self.num_episodes, dtype=torch.uint8)
        each = max(1, min(_STREAM_SAMPLES, _STREAM_DRAWS // self.num_episodes))
        together = max(1, min(max_samples, max_bytes // self.num_episodes) // each)
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            for start in range(0, self.num_resamples, together * each):
                rows = min(together * each, self.num_resamples - start)
                counts = torch.zeros(rows, self.num_episodes, dtype=torch.uint8)
                list(threads.map(self._draw, itertools.count(start // each), torch.split(counts, each)))
                yield counts

    def _draw(self, stream: int, counts: Tensor) -> None:
        """Counts the draws of a random stream into zeros [samples, n]."""
        generator = np.random.default_rng([self.seed, stream])
        draws = torch.from_numpy(generator.integers(self.num_episodes, size=counts.shape))
        # a count beyond 255 needs more than 255 episodes, and then has a chance below 1 / 256!
        counts.scatter_add_(1, draws, counts.new_ones(()).expand(counts.shape))


def resamples(num_episodes: int, num_resamples: int, generator: torch.Generator) -> Resamples:
    """Returns samples whose seed is one draw of a generator on the CPU."""
    seed = int(torch.randint(2**63 - 1, (), generator=generator))
    return Resamples(num_episodes=num_episodes, num_resamples=num_resamples, seed=seed)


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

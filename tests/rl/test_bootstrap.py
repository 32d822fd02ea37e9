"""Resampling against the theory of means, and intervals against NumPy's quantiles."""

import math

import numpy as np
import pytest
import torch

from reagent_lite.rl.bootstrap import Resamples, effective_sample_size, percentile_interval


@pytest.mark.parametrize("num_episodes", [1, 2, 255, 300, 9000, 70_000])
def test_counts_do_not_depend_on_blocks_or_threads(num_episodes: int):
    drawn = Resamples(num_episodes=num_episodes, num_resamples=60, seed=3)
    whole = torch.cat(list(drawn.blocks()))
    assert whole[0].tolist() == [1] * num_episodes
    assert whole.long().sum(1).tolist() == [num_episodes] * 61
    for count, samples, size in ((1, 7, 2**25), (3, 256, 200_000), (2, 1, 1)):
        torch.set_num_threads(count)
        assert torch.equal(torch.cat(list(drawn.blocks(samples, size))), whole)


def test_blocks_stay_below_their_size():
    sizes = [block.nbytes for block in Resamples(num_episodes=70_000, num_resamples=20, seed=0).blocks(256, 300_000)]
    # a stream has 3 samples of 70 000 bytes, so that a block has no more
    assert sizes == [70_000, *[210_000] * 6, 140_000]


def test_how_often_an_episode_is_drawn_is_binomial():
    # Binomial(n, 1 / n): mean 1, variance 1 - 1 / n, P(0) = (1 - 1 / n)^n; 400 000 counts, so within 0.01
    counts = torch.cat(list(Resamples(num_episodes=200, num_resamples=2000, seed=0).blocks()))[1:].double()
    assert float(counts.var()) == pytest.approx(1 - 1 / 200, abs=0.01)
    assert float((counts == 0).double().mean()) == pytest.approx((1 - 1 / 200) ** 200, abs=0.005)
    # nor does an episode's count depend on that of its neighbor, beyond -1 / (n - 1)
    beside = torch.stack((counts[:, :-1].flatten(), counts[:, 1:].flatten()))
    assert float(torch.corrcoef(beside)[0, 1]) == pytest.approx(-1 / 199, abs=0.008)


def test_interval_is_numpys_quantiles():
    samples = torch.from_numpy(np.random.default_rng(1).exponential(size=999))
    assert percentile_interval(samples, 0.9) == pytest.approx(tuple(np.quantile(samples.numpy(), [0.05, 0.95])))


@pytest.mark.parametrize(("undefined", "end"), [(4, 1.0), (6, math.nan)])
def test_undefined_samples(undefined: int, end: float):
    samples = torch.tensor([math.nan] * undefined + [1.0] * (100 - undefined), dtype=torch.float64)
    assert percentile_interval(samples, 0.95) == pytest.approx((end, end), nan_ok=True)


def test_effective_sample_size_by_hand():
    # (1 + 1 + 2)^2 / (1 + 1 + 4) = 16 / 6; equal weights count fully; one weight counts once; none counts nothing
    weights = torch.tensor([[1, 3, 0, 0], [1, 3, 0, 0], [2, 3, 5, 0]], dtype=torch.float64)
    assert effective_sample_size(weights).tolist() == pytest.approx([16 / 6, 3, 1, 0])

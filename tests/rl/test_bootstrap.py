"""Resampling against the theory of means, and intervals against NumPy's quantiles."""

import math

import numpy as np
import pytest
import torch

from reagent_lite.rl.bootstrap import effective_sample_size, percentile_interval, resample_counts


def test_counts_draw_whole_samples():
    counts = resample_counts(7, 50, torch.Generator().manual_seed(0))
    assert counts.shape == (51, 7)
    assert counts[0].tolist() == [1.0] * 7
    assert counts.sum(1).tolist() == [7.0] * 51  # as many episodes as there are, not a share of them
    assert len({tuple(row) for row in counts.tolist()}) > 40


def test_counts_repeat_with_the_generators_seed():
    first, again = (resample_counts(9, 20, torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, resample_counts(9, 20, torch.Generator().manual_seed(6)))


def test_interval_of_a_mean_has_the_width_of_theory():
    # 95 % of a normal mean: 2 * 1.96 * s / sqrt(n). Resampling a quarter of the rows would double it.
    rng = np.random.default_rng(0)
    values = torch.from_numpy(rng.normal(size=400))
    counts = resample_counts(400, 4000, torch.Generator().manual_seed(0))
    low, high = percentile_interval((counts @ values / counts.sum(1))[1:], 0.95)
    theory = 2 * 1.96 * float(values.std()) / math.sqrt(400)
    assert high - low == pytest.approx(theory, rel=0.05)
    assert (high + low) / 2 == pytest.approx(float(values.mean()), abs=0.1 * theory)


def test_interval_is_numpys_quantiles():
    samples = torch.from_numpy(np.random.default_rng(1).exponential(size=999))
    expected = np.quantile(samples.numpy(), [0.05, 0.95])
    assert percentile_interval(samples, 0.9) == pytest.approx(tuple(expected))


def test_interval_of_many_samples():
    # more than torch.quantile's limit is not needed, 2^16 is
    assert percentile_interval(torch.linspace(0, 1, 2**16, dtype=torch.float64), 0.5) == pytest.approx((0.25, 0.75))


@pytest.mark.parametrize(("undefined", "defined"), [(4, True), (6, False)])
def test_undefined_samples(undefined: int, defined: bool):
    samples = torch.ones(100, dtype=torch.float64)
    samples[:undefined] = torch.nan
    low, high = percentile_interval(samples, 0.95)
    assert (low, high) == (1.0, 1.0) if defined else math.isnan(low) and math.isnan(high)


def test_no_samples_have_no_interval():
    assert all(math.isnan(bound) for bound in percentile_interval(torch.empty(0, dtype=torch.float64), 0.95))


def test_effective_sample_size_by_hand():
    # (1 + 1 + 2)^2 / (1 + 1 + 4) = 16 / 6; equal weights count fully; one weight counts once; none counts nothing
    weights = torch.tensor([[1, 3, 0, 0], [1, 3, 0, 0], [2, 3, 5, 0]], dtype=torch.float64)
    assert effective_sample_size(weights).tolist() == pytest.approx([16 / 6, 3, 1, 0])

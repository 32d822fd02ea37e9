"""The blend: its quadratic program by the conditions of a minimum, its matrix against resamples."""

import numpy as np
import pytest
import torch
from oracles import gridworld
from oracles.repeated import Study, repetitions, resample_counts, step_returns
from oracles.tables import estimates, rows

from reagent_lite.rl.estimators import ESTIMATORS
from reagent_lite.rl.magic import blend, covariance, interval_distance, minimize_on_simplex, step_contributions
from reagent_lite.rl.sums import EpisodeSums


@pytest.mark.parametrize("m", [1, 2, 5, 12])
def test_no_direction_of_the_simplex_descends(m: int):
    rng = np.random.default_rng(m)
    factors = rng.normal(size=(20, m, m)) + rng.normal(size=(20, 1, m))
    matrices = np.einsum("rik,rjk->rij", factors, factors) + 1e-6 * np.eye(m)
    shares = minimize_on_simplex(torch.from_numpy(matrices)).numpy()
    assert (shares >= 0).all()
    np.testing.assert_allclose(shares.sum(1), 1, atol=1e-12)
    for matrix, x in zip(matrices, shares, strict=True):
        gradient = matrix @ x
        assert gradient.min() >= x @ gradient - 1e-8 * np.abs(matrix).max()


def test_simplex_minimum_of_nearly_singular_matrices():
    # j-step returns beyond the horizon reached are equal: rank far below m
    rng = np.random.default_rng(0)
    low = rng.normal(size=(50, 32, 3))
    matrices = torch.from_numpy(np.einsum("rik,rjk->rij", low, low)) + 1e-9 * torch.eye(32, dtype=torch.float64)
    x = minimize_on_simplex(matrices)
    gradient = (matrices @ x.unsqueeze(2)).squeeze(2)
    assert float(((x * gradient).sum(1) - gradient.amin(1)).max()) < 1e-7
    assert bool(x.isfinite().all())


def test_bias_enters_as_an_outer_product():
    # WDR 0 and no resamples: distances b = (2, 1, 0), and Omega = I, so that A = (5 2 0; 2 2 0; 0 0 1).
    # A x = lambda: 5 x_1 + 2 x_2 = 2 x_1 + 2 x_2 gives x_1 = 0, then x_2 : x_3 = 1 : 2, and the blend is -1 / 3.
    # An elementwise product, A = diag(5, 2, 1), would give x = (2, 5, 10) / 17 and -1 / 17.
    returns = torch.tensor([[2.0, -1.0, 0.0]], dtype=torch.float64)
    assert float(blend(returns, torch.eye(3, dtype=torch.float64))[0]) == pytest.approx(-1 / 3, rel=1e-6)


def test_distance_from_the_interval():
    # resamples of WDR 9, 11 around 10: at level 1 the interval is 9 to 11
    returns = torch.tensor([[13.0, 9.5, 7.0, 10.0], [0, 0, 0, 9.0], [0, 0, 0, 11.0]], dtype=torch.float64)
    torch.testing.assert_close(
        interval_distance(returns, 1.0)[0], torch.tensor([2.0, 0.0, 2.0, 0.0], dtype=torch.float64)
    )
    # in the resample with WDR 9 the interval is 8 to 10
    assert float(interval_distance(returns, 1.0)[1, 0]) == pytest.approx(8)


def test_the_blend_of_two_rows_by_hand() -> None:
    # Weights 1 and 3: omega 1/4, 3/4. Rewards 2 and 6: WDR 1/4 * 2 + 3/4 * 6 = 5; no model: DM 0.
    # Rows add omega (r - 5) to it beside what they share: -3/4 and 3/4, so Omega = n sum / (n - 1) = 2 * 9/8 = 9/4.
    # DM is 5 away and does not vary: x' diag(25, 9/4) x is least at WDR's share 25 / (25 + 9/4).
    # Without the mean they add 1/2 and 9/2: Omega would be 16, and the blend 3.05.
    episodes = rows([1, 3], [2, 6], [0, 0], [0, 0])
    estimate = estimates(ESTIMATORS["MAGIC"], episodes, torch.ones(1, 2, dtype=torch.float64))
    assert float(estimate[0]) == pytest.approx(5 * 25 / 27.25, rel=1e-6)


@pytest.mark.parametrize("model_error", [0.5, None], ids=["model off by 0.5", "no model"])
def test_omega_is_the_variance_of_resampled_returns(model_error: float | None) -> None:
    # 2000 resamples tell a standard deviation to 1.6 %; what is left is that episodes add up to first order only
    study = Study(
        behaviour=0.5, evaluated=0.3, num_episodes=2000, start=gridworld.fixed_start(), model_error=model_error
    )
    (episodes,) = repetitions(study, 1, np.random.default_rng(0))
    counts = resample_counts(2000, 2000, torch.Generator().manual_seed(0))
    returns = step_returns(episodes, counts)
    resampled = np.cov(returns[1:].numpy().T)
    deviation = np.sqrt(resampled.diagonal())
    sums = EpisodeSums.of([[episodes]])
    omega = covariance(step_contributions(sums, 0), returns[0] / 2000).numpy()
    assert deviation[0] < 1e-12  # one start state: DM does not vary
    vary = deviation > 0.01 * deviation.max()  # without a model nor do lengths up to which hardly any log is rewarded
    assert vary.sum() > 20
    np.testing.assert_allclose(np.sqrt(omega.diagonal()[vary]), deviation[vary], rtol=0.06)
    scale = np.outer(deviation[vary], deviation[vary])
    np.testing.assert_allclose(omega[np.ix_(vary, vary)] / scale, resampled[np.ix_(vary, vary)] / scale, atol=0.12)

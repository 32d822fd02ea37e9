"""The blend: its quadratic program by the conditions of a minimum, its matrix against resamples."""

import numpy as np
import pytest
import torch
from helpers.tables import estimates, rows
from oracles import gridworld
from oracles.repeated import Study, repetitions, resample_counts, step_returns

from reagent_lite.rl.estimators import ESTIMATORS
from reagent_lite.rl.magic import blend, covariance, interval_distance, minimize_on_simplex, step_contributions
from reagent_lite.rl.sums import EpisodeSums


@pytest.mark.parametrize(("m", "rank"), [(1, 1), (2, 2), (5, 5), (12, 12), (32, 3)])
def test_no_direction_of_the_simplex_descends(m: int, rank: int):
    # j-step returns beyond the horizon reached are equal, so that matrices are nearly singular: rank far below m
    rng = np.random.default_rng(m)
    factors = rng.normal(size=(50, m, rank)) + rng.normal(size=(50, 1, rank))
    matrices = np.einsum("rik,rjk->rij", factors, factors) + (1e-6 if rank == m else 1e-9) * np.eye(m)
    shares = minimize_on_simplex(torch.from_numpy(matrices)).numpy()
    assert (shares >= 0).all()
    np.testing.assert_allclose(shares.sum(1), 1, atol=1e-12)
    gradient = np.einsum("rij,rj->ri", matrices, shares)
    assert (gradient.min(1) >= (shares * gradient).sum(1) - 1e-8 * np.abs(matrices).max((1, 2))).all()


def test_bias_enters_as_an_outer_product():
    # WDR 0 and no resamples: distances b = (2, 1, 0), and Omega = I, so that A = (5 2 0; 2 2 0; 0 0 1).
    # A x = lambda: 5 x_1 + 2 x_2 = 2 x_1 + 2 x_2 gives x_1 = 0, then x_2 : x_3 = 1 : 2, and the blend is -1 / 3.
    # An elementwise product, A = diag(5, 2, 1), would give x = (2, 5, 10) / 17 and -1 / 17.
    returns = torch.tensor([[2.0, -1.0, 0.0]], dtype=torch.float64)
    assert float(blend(returns, torch.eye(3, dtype=torch.float64))[0]) == pytest.approx(-1 / 3, rel=1e-6)


def test_distance_from_the_interval():
    # resamples of WDR 9, 11 around 10: at level 1 the interval is 9 to 11
    returns = torch.tensor([[13.0, 9.5, 7.0, 10.0], [0, 0, 0, 9.0], [0, 0, 0, 11.0]], dtype=torch.float64)
    # in the resample with WDR 9 the interval is 8 to 10
    distance = interval_distance(returns, 1.0)
    assert [*distance[0].tolist(), float(distance[1, 0])] == pytest.approx([2, 0, 2, 0, 8])


def test_the_blend_of_two_rows_by_hand() -> None:
    # Weights 1 and 3: omega 1/4, 3/4. Rewards 2 and 6: WDR 1/4 * 2 + 3/4 * 6 = 5; no model: DM 0.
    # Rows add omega (r - 5) to it beside what they share: -3/4 and 3/4, so Omega = n sum / (n - 1) = 2 * 9/8 = 9/4.
    # DM is 5 away and does not vary: x' diag(25, 9/4) x is least at WDR's share 25 / (25 + 9/4).
    # Without the mean they add 1/2 and 9/2: Omega would be 16, and the blend 3.05.
    estimate = estimates(ESTIMATORS["MAGIC"], rows([1, 3], [2, 6], [0, 0], [0, 0]), torch.ones(1, 2).double())
    assert float(estimate[0]) == pytest.approx(5 * 25 / 27.25, rel=1e-6)


@pytest.mark.parametrize("model_error", [0.5, None], ids=["model off by 0.5", "no model"])
def test_omega_is_the_variance_of_resampled_returns(model_error: float | None) -> None:
    # 2000 resamples tell a standard deviation to 1.6 %; what is left is that episodes add up to first order only
    study = Study(
        behavior=0.5, evaluated=0.3, num_episodes=2000, start=gridworld.fixed_start(), model_error=model_error
    )
    (episodes,) = repetitions(study, 1, np.random.default_rng(0))
    returns = step_returns(episodes, resample_counts(2000, 2000, torch.Generator().manual_seed(0)))
    resampled = np.cov(returns[1:].numpy().T)
    deviation = np.sqrt(resampled.diagonal())
    omega = covariance(step_contributions(EpisodeSums.of([[episodes]]), 0), returns[0] / 2000).numpy()
    assert deviation[0] < 1e-12  # one start state: DM does not vary
    vary = deviation > 0.01 * deviation.max()  # without a model nor do lengths up to which hardly any log is rewarded
    assert vary.sum() > 20
    np.testing.assert_allclose(np.sqrt(omega.diagonal()[vary]), deviation[vary], rtol=0.06)
    scale = np.outer(deviation[vary], deviation[vary])
    np.testing.assert_allclose(omega[np.ix_(vary, vary)] / scale, resampled[np.ix_(vary, vary)] / scale, atol=0.12)

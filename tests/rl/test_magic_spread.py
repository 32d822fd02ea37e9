"""MAGIC's Omega: how far j-step returns vary from log to log, when weights are normalized over all its episodes."""

import numpy as np
import pytest
import torch
from oracles import gridworld
from oracles.repeated import Study, repetitions

from reagent_lite.rl.bootstrap import resample_counts
from reagent_lite.rl.episodes import Episodes
from reagent_lite.rl.estimators import ESTIMATORS
from reagent_lite.rl.sums import sample_sums, table_of


def test_the_blend_of_two_rows_by_hand() -> None:
    # Weights 1 and 3: omega 1/4, 3/4. Rewards 2 and 6: WDR 1/4 * 2 + 3/4 * 6 = 5; no model: DM 0.
    # Rows add omega (r - 5) to it beside what they share: -3/4 and 3/4, so Omega = n sum / (n - 1) = 2 * 9/8 = 9/4.
    # DM is 5 away and does not vary: x' diag(25, 9/4) x is least at WDR's share 25 / (25 + 9/4).
    # Without the mean they add 1/2 and 9/2: Omega would be 16, and the blend 3.05.
    column = {"weight": [1.0, 3.0], "reward": [2.0, 6.0], "one": [1.0, 1.0], "none": [0.0, 0.0]}
    w, r, one, none = (torch.tensor(values, dtype=torch.float64).unsqueeze(1) for values in column.values())
    episodes = Episodes(
        running=one, weight=w, discount=one, reward=r,
        reward_taken=none, reward_expected=none, value_taken=none, value_expected=none, tail=none,
    )  # fmt: skip
    found = ESTIMATORS["MAGIC"](episodes, torch.ones(1, 2, dtype=torch.float64))
    assert float(found[0]) == pytest.approx(5 * 25 / 27.25, rel=1e-6)


@pytest.mark.parametrize("model_error", [0.5, None], ids=["model off by 0.5", "no model"])
def test_omega_is_the_variance_of_resampled_returns(model_error: float | None) -> None:
    # 2000 resamples tell a standard deviation to 1.6 %; what is left is that episodes add up to first order only
    study = Study(
        behaviour=0.5, evaluated=0.3, num_episodes=2000, start=gridworld.fixed_start(), model_error=model_error
    )
    (episodes,) = repetitions(study, 1, np.random.default_rng(0))
    counts = resample_counts(2000, 2000, torch.Generator().manual_seed(0))
    sums = sample_sums(table_of([[episodes]]), [counts])[0]
    resampled = np.cov(sums.step_returns[1:].numpy().T)
    deviation, omega = np.sqrt(resampled.diagonal()), sums.omega.numpy()
    assert deviation[0] < 1e-12  # one start state: DM does not vary
    vary = deviation > 0.01 * deviation.max()  # without a model nor do lengths up to which hardly any log is rewarded
    assert vary.sum() > 20
    np.testing.assert_allclose(np.sqrt(omega.diagonal()[vary]), deviation[vary], rtol=0.06)
    scale = np.outer(deviation[vary], deviation[vary])
    np.testing.assert_allclose(omega[np.ix_(vary, vary)] / scale, resampled[np.ix_(vary, vary)] / scale, atol=0.12)

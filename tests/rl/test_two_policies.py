"""Propensities of units that stay with one policy, and differences of values, by enumeration."""

from itertools import product

import numpy as np
import pytest

from reagent_lite.rl.two_policies import (
    difference_bounds,
    log_ratio_of,
    mixed_propensity,
    relative_difference,
)

CURRENT, NEW = np.array([0.9, 0.1]), np.array([0.2, 0.8])
SHARE = 0.25


def test_the_product_of_propensities_is_the_density_of_the_mixture() -> None:
    total = 0.0
    for actions in product((0, 1), repeat=4):
        log_ratio, density = 0.0, 1.0
        for action in actions:
            density *= mixed_propensity(SHARE, log_ratio, CURRENT[action], NEW[action])
            log_ratio += log_ratio_of(CURRENT[action], NEW[action])
        of_new, of_current = np.prod(NEW[list(actions)]), np.prod(CURRENT[list(actions)])
        assert density == pytest.approx(SHARE * of_new + (1 - SHARE) * of_current, rel=1e-12)
        total += density
    assert total == pytest.approx(1, abs=1e-12)


def test_by_hand() -> None:
    # first action 1: 1/4 * 0.8 + 3/4 * 0.1 = 0.275, after which the new policy has the unit with 0.2 / 0.275 = 8 / 11
    assert mixed_propensity(0.25, 0.0, 0.1, 0.8) == pytest.approx(0.275)
    assert mixed_propensity(0.25, np.log(8), 0.0, 1.0) == pytest.approx(8 / 11)
    assert relative_difference(0.25, np.log(8)) == pytest.approx(0.7 / 0.275)
    assert relative_difference(0.25, 0.0) == 0
    assert difference_bounds(0.25, 0.5, 0.5) == (-2.0, 2.0)
    assert difference_bounds(0.25, 0.0, 1.0) == (pytest.approx(-4 / 3), 4.0)


def test_an_action_that_one_policy_never_takes() -> None:
    assert log_ratio_of(0.0, 0.5) == np.inf
    assert log_ratio_of(0.5, 0.0) == -np.inf
    assert [float(relative_difference(0.25, ratio)) for ratio in (np.inf, -np.inf)] == [4.0, pytest.approx(-4 / 3)]
    assert mixed_propensity(0.25, np.inf, 0.3, 0.9) == 0.9
    assert mixed_propensity(0.25, -np.inf, 0.3, 0.9) == 0.3


def test_long_episodes_stay_within_bounds() -> None:
    ratios = np.array([-5000.0, -700.0, -1.0, 0.0, 1.0, 700.0, 5000.0])
    for share in (0.02, 0.5, 0.98):
        relative = relative_difference(share, ratios)
        assert (np.diff(relative) >= 0).all()
        assert relative.min() >= -1 / (1 - share)
        assert relative.max() <= 1 / share
        assert all(0.1 <= mixed_propensity(share, ratio, 0.1, 0.2) <= 0.2 for ratio in ratios)


def test_the_mean_is_the_difference_of_values_and_of_centres_zero() -> None:
    rewards = np.array([1.0, 3.0])
    density = SHARE * NEW + (1 - SHARE) * CURRENT
    relative = relative_difference(SHARE, log_ratio_of(CURRENT, NEW))
    assert density @ relative == pytest.approx(0, abs=1e-15)
    for center in (0.0, 2.0):
        assert density @ (relative * (rewards - center)) == pytest.approx((NEW - CURRENT) @ rewards)

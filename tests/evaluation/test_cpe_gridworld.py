"""The gridworld that estimates are compared with: published values."""

import numpy as np
from oracles import gridworld


def test_optimal_values_are_the_published_ones():
    values = gridworld.optimal_q().max(1)
    np.testing.assert_allclose(values[:5], [4.7250, 5.2554, 5.8457, 6.5084, 7.2047], atol=5e-5)
    np.testing.assert_allclose(values[20:24], [7.2107, 8.0356, 8.9551, 9.9704], atol=5e-5)


def test_values_of_the_random_policy_are_the_published_ones():
    values = gridworld.policy_values(gridworld.random_policy())
    np.testing.assert_allclose(values[:5], [0.3324, 0.4027, 0.6512, 1.0473, 1.2433], atol=5e-5)
    np.testing.assert_allclose(values[[15, 16, 18, 19]], [0.6345, 0.7575, 4.0237, 5.4001], atol=5e-5)

"""The gridworld that estimates are compared with: published values."""

import numpy as np
from oracles import gridworld


def test_optimal_values_are_the_published_ones():
    published = [4.7250, 5.2554, 5.8457, 6.5084, 7.2047, 7.2107, 8.0356, 8.9551, 9.9704]
    np.testing.assert_allclose(gridworld.optimal_values()[[0, 1, 2, 3, 4, 20, 21, 22, 23]], published, atol=5e-5)


def test_values_of_the_random_policy_are_the_published_ones():
    published = [0.3324, 0.4027, 0.6512, 1.0473, 1.2433, 0.6345, 0.7575, 4.0237, 5.4001]
    values = gridworld.policy_values(gridworld.random_policy())
    np.testing.assert_allclose(values[[0, 1, 2, 3, 4, 15, 16, 18, 19]], published, atol=5e-5)

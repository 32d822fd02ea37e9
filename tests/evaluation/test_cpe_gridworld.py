"""The gridworld that estimates are compared with: published values."""

import numpy as np
import pytest
from oracles import gridworld


@pytest.mark.parametrize(
    ("values", "published"),
    [
        (gridworld.optimal_q().max(1), {0: 4.7250, 1: 5.2554, 2: 5.8457, 3: 6.5084, 4: 7.2047,
                                      20: 7.2107, 21: 8.0356, 22: 8.9551, 23: 9.9704}),
        (gridworld.policy_values(gridworld.random_policy()), {0: 0.3324, 1: 0.4027, 2: 0.6512, 3: 1.0473, 4: 1.2433,
                                                              15: 0.6345, 16: 0.7575, 18: 4.0237, 19: 5.4001}),
    ],
    ids=["optimal", "random"],
)  # fmt: skip
def test_values_are_the_published_ones(values: gridworld.Array, published: dict[int, float]):
    np.testing.assert_allclose(values[list(published)], list(published.values()), atol=5e-5)

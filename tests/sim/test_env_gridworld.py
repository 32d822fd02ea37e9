"""The gridworld of the kernels is the oracle's: transitions, allowed moves, starts, and values under known policies."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from oracles import gridworld
from oracles.episodes import as_policy, environments, first_episodes
from scipy import stats

ALLOWED = gridworld.allowed()
FREE = np.flatnonzero(ALLOWED.any(1))  # 21 cells: neither wall nor goal


def fixed_actions(observation: NDArray[np.float32]) -> NDArray[np.int64]:
    """The oracle's fixed policy on one-hot observations."""
    table = gridworld.fixed_policy().argmax(1)
    return table[observation.argmax(1)]


def test_transition_frequencies() -> None:
    num, steps = 200_000, 5
    env = environments("gridworld", num, seed=1)
    rng = np.random.default_rng(3)
    pairs = np.argwhere(ALLOWED)
    counts = np.zeros((25, 4, 25))
    for _ in range(steps):
        cell, action = pairs[rng.integers(len(pairs), size=num)].T
        env.field("cell").copy_(torch.from_numpy(cell))
        env.action.copy_(torch.from_numpy(action))
        env.step()
        after = env.next_observation.numpy().argmax(1)
        np.add.at(counts, (cell, action, after), 1)
        assert (env.terminated.numpy() == (after == gridworld.GOAL)).all()
        assert (env.reward.numpy() == gridworld.REWARD * (after == gridworld.GOAL)).all()
    env.check()
    expected = gridworld.transition_matrix() * counts.sum(2, keepdims=True)
    possible = expected > 0
    assert (counts[~possible] == 0).all()
    assert expected[possible].min() > 100
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = possible.sum() - len(pairs)
    assert 1e-3 < stats.chi2.sf(statistic, freedom) < 1 - 1e-3


def test_observation_and_mask_of_every_cell() -> None:
    env = environments("gridworld", 25)
    cells = torch.tensor([*FREE, gridworld.GOAL])
    env.field("cell")[: len(cells)] = cells.int()
    env.observe()
    assert env.mask is not None
    np.testing.assert_array_equal(env.mask[: len(cells)].numpy(), ALLOWED[cells])
    np.testing.assert_array_equal(env.observation[: len(cells)].numpy(), np.eye(25)[cells])
    assert env.spec.action_names == gridworld.ACTIONS


@pytest.mark.parametrize("again", [False, True], ids=["reset", "autoreset"])
def test_starts(again: bool) -> None:
    plain = environments("gridworld", 100, time_limit=1)
    drawn = environments("gridworld", 21_000, time_limit=1, parameters={"random_start": 1.0})
    if again:
        plain.step()
        drawn.step()
    assert (plain.field("cell") == gridworld.START).all()
    counts = np.bincount(drawn.field("cell").numpy(), minlength=25)
    assert sorted(np.flatnonzero(counts)) == sorted(FREE)
    assert stats.chisquare(counts[FREE]).pvalue > 1e-3  # 1000 expected in each


@pytest.mark.parametrize(("epsilon", "value"), [(1.0, 0.332371), (0.5, 2.588442), (0.2, 4.003114), (0.0, 4.711349)])
def test_discounted_return_is_the_known_value(epsilon: float, value: float) -> None:
    env = environments(
        "gridworld", 20_000, seed=9, time_limit=150
    )  # what comes later is worth less than 10 * 0.9^150 < 2e-6
    episodes = first_episodes(env, as_policy(fixed_actions, 4), epsilon)
    # the reward of 10 comes with the last step alone: its discount is known from the length
    discounted = episodes.returns * gridworld.GAMMA ** (episodes.lengths - 1)
    assert gridworld.policy_values(gridworld.epsilon_greedy(epsilon))[gridworld.START] == pytest.approx(value, abs=1e-6)
    assert set(np.unique(episodes.returns)) <= {0.0, 10.0}
    assert ((episodes.returns == 10.0) == episodes.terminated).all()
    assert abs(discounted.mean() - value) < 4 * discounted.std() / len(discounted) ** 0.5

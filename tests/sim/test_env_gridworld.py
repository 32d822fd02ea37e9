"""The gridworld of the kernels is the oracle's: transitions, allowed moves and starts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracles import gridworld
from scipy import stats
from sim.conftest import environments

ALLOWED = gridworld.allowed()
FREE = np.flatnonzero(ALLOWED.any(1))  # 21 cells: neither wall nor goal


def test_transition_frequencies() -> None:
    num = 200_000
    env = environments("gridworld", num, seed=1)
    rng = np.random.default_rng(3)
    pairs = np.argwhere(ALLOWED)
    counts = np.zeros((25, 4, 25))
    for _ in range(5):
        cell, action = pairs[rng.integers(len(pairs), size=num)].T
        env.field("cell").copy_(torch.from_numpy(cell))
        env.action.copy_(torch.from_numpy(action))
        env.step()
        after = env.next_observation.numpy().argmax(1)
        np.add.at(counts, (cell, action, after), 1)
        assert (env.terminated.numpy() == (after == gridworld.GOAL)).all()
        assert (env.reward.numpy() == gridworld.REWARD * (after == gridworld.GOAL)).all()
    expected = gridworld.transition_matrix() * counts.sum(2, keepdims=True)
    possible = expected > 0
    assert (counts[~possible] == 0).all()
    assert expected[possible].min() > 100
    # as many degrees of freedom as there are ends, less one for each pair
    assert 1e-3 < stats.chisquare(counts[possible], expected[possible], ddof=len(pairs) - 1).pvalue < 1 - 1e-3


def test_observation_and_mask_of_every_cell() -> None:
    env = environments("gridworld", 25)
    cells = torch.tensor([*FREE, gridworld.GOAL])
    env.field("cell")[: len(cells)] = cells.int()
    env.observe()
    np.testing.assert_array_equal(env.mask[: len(cells)].numpy(), ALLOWED[cells])
    np.testing.assert_array_equal(env.observation[: len(cells)].numpy(), np.eye(25)[cells])
    assert env.spec.action_names == gridworld.ACTIONS


@pytest.mark.parametrize("again", [False, True], ids=["reset", "autoreset"])
def test_starts(again: bool) -> None:
    plain = environments("gridworld", 100, time_limit=1)
    drawn = environments("gridworld", 21_000, time_limit=1, parameters={"random_start": 1.0})
    for env in (plain, drawn) if again else ():
        env.step()
    assert (plain.field("cell") == gridworld.START).all()
    counts = np.bincount(drawn.field("cell").numpy(), minlength=25)
    assert sorted(np.flatnonzero(counts)) == sorted(FREE)
    assert stats.chisquare(counts[FREE]).pvalue > 1e-3  # 1000 expected in each

"""The drawing of actions: probabilities worked out by hand, frequencies, propensities, and odd values."""

from contextlib import nullcontext
from math import inf, nan

import numpy as np
import pytest
import torch
from oracles import philox
from scipy import stats
from sim.conftest import COUNTER, MASKED_COUNTER, MakeEnv

from reagent_lite.errors import SimulationError

UNEQUAL = [1.0, 3.0, 2.0]
POWERS = np.exp(UNEQUAL)


@pytest.mark.parametrize(
    ("q", "epsilon", "temperature", "allowed", "expected"),
    [
        (UNEQUAL, 0.3, 0, "", [0.1, 0.8, 0.1]),  # 0.3 / 3 each, and 0.7 on the greatest
        (UNEQUAL, 0.0, 0, "", [0, 1, 0]),
        (UNEQUAL, 1.0, 0, "", [1 / 3, 1 / 3, 1 / 3]),
        ([2.0, 1.0, 2.0], 0.3, 0, "", [0.8, 0.1, 0.1]),  # the first of equals
        ([nan, -5.0, -6.0], 0.3, 0, "", [0.1, 0.8, 0.1]),
        ([nan] * 3, 0.0, 0, "", [1, 0, 0]),
        ([-inf, -inf, -1e38], 0.0, 0, "", [0, 0, 1]),
        ([0.0, inf, 1.0], 0.0, 0, "", [0, 1, 0]),
        (None, 0.0, 0, "", [1 / 3, 1 / 3, 1 / 3]),
        (UNEQUAL, 0.4, 0, "02", [0.2, 0, 0.8]),  # 0.4 / 2 each, and 0.6 on the better
        (UNEQUAL, 0.4, 0, "0", [1, 0, 0]),
        ([nan, 3.0, nan], 0.0, 0, "02", [1, 0, 0]),
        (None, 0.0, 0, "12", [0, 0.5, 0.5]),
        (UNEQUAL, 0.5, 0, "none", [1, 0, 0]),  # a fault
        # softmax
        (UNEQUAL, 0.0, 1.0, "", POWERS / POWERS.sum()),
        (UNEQUAL, 0.0, 0.5, "", POWERS**2 / (POWERS**2).sum()),
        (UNEQUAL, 0.0, 10.0, "", POWERS**0.1 / (POWERS**0.1).sum()),
        (UNEQUAL, 0.0, 1.0, "02", POWERS * [1, 0, 1] / POWERS[[0, 2]].sum()),
        ([3e38, -3e38, 0.0], 0.0, 1.0, "", [1, 0, 0]),
        ([inf, inf, 0.0], 0.0, 1.0, "", [0.5, 0.5, 0]),
        ([nan, 0.0, 0.0], 0.0, 1.0, "", [0, 0.5, 0.5]),
        ([nan] * 3, 0.0, 1.0, "", [1 / 3, 1 / 3, 1 / 3]),
        ([1e-30, 0.0, -1e-30], 0.0, 1.0, "", [1 / 3, 1 / 3, 1 / 3]),
    ],
)
def test_actions_are_as_frequent_as_they_should_be_and_each_propensity_is_its_probability(
    counter: MakeEnv, q: list[float] | None, epsilon: float, temperature: float, allowed: str, expected: list[float]
) -> None:
    """100 000 environments draw one action each."""
    env = counter(MASKED_COUNTER if allowed else COUNTER, num_envs=100_000)
    if allowed:
        env.mask.copy_(torch.tensor([str(k) in allowed for k in range(3)]).expand(env.num_envs, -1))
    values = None if q is None else torch.tensor(q).repeat(env.num_envs, 1)
    env.act(values, epsilon=torch.tensor([epsilon]), temperature=temperature)
    counts, probabilities = np.bincount(env.action.numpy(), minlength=3), np.array(expected)
    np.testing.assert_allclose(env.propensity.numpy(), probabilities[env.action.numpy()], rtol=1e-6)
    possible = probabilities > 0
    assert counts[~possible].sum() == 0
    # nan where there is but one
    assert not stats.chisquare(counts[possible], env.num_envs * probabilities[possible]).pvalue <= 1e-4
    with pytest.raises(SimulationError, match="100000 that are not") if allowed == "none" else nullcontext():
        env.check()


def test_the_draw_inverts_the_distribution_function(counter: MakeEnv) -> None:
    env = counter(num_envs=1000, first_env=3, seed=8, stream=1)
    env.step()
    env.act(torch.tensor([[1.0, 3.0, 2.0]]).repeat(1000, 1), epsilon=torch.tensor([0.3]))
    u = philox.uniform(
        philox.draws(1, np.arange(1000) + 3, env.episode.numpy(), philox.ACT, env.step_count.numpy() << 8, (8, 1))
    )[:, 0]
    assert env.action.tolist() == (1 * (u >= 0.1) + 1 * (u >= 0.9)).tolist()


def test_many_actions(counter: MakeEnv) -> None:
    env = counter(COUNTER.replace("NUM_ACTIONS 3", "NUM_ACTIONS 300"), num_envs=1000)
    env.act(torch.arange(300.0).repeat(1000, 1), epsilon=torch.zeros(1))
    assert (env.action == 299).all()
    env.act(None, epsilon=torch.ones(1))
    assert env.action.float().mean().item() == pytest.approx(149.5, abs=300 / 12**0.5 / 1000**0.5 * 5)
    np.testing.assert_allclose(env.propensity.numpy(), 1 / 300, rtol=1e-6)
    env.step()
    assert env.reward.tolist() == (1 + env.action).float().tolist()
    env.check()


def test_values_of_another_type_or_layout(counter: MakeEnv) -> None:
    env = counter(num_envs=4)
    q = torch.tensor([[1.0, 2.0, 3.0], [3.0, 1.0, 2.0], [2.0, 3.0, 1.0], [1.0, 3.0, 2.0]])
    for values in (q, q.double(), q.T.contiguous().T, torch.cat([q, q], 1)[:, :3], q.half()):
        env.act(values, epsilon=torch.zeros(1))
        assert env.action.tolist() == [2, 0, 1, 1]


@pytest.mark.parametrize("shape", [(4, 2), (3, 3), (12,)])
def test_values_of_another_shape_are_refused(counter: MakeEnv, shape: tuple[int, ...]) -> None:
    with pytest.raises(SimulationError, match=r"q.*\[4, 3\]"):
        counter(num_envs=4).act(torch.zeros(shape), epsilon=torch.ones(1))

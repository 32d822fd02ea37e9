"""The drawing of actions: probabilities worked out by hand, frequencies, propensities, and odd values."""

import numpy as np
import pytest
import torch
from oracles import philox
from scipy import stats
from sim.conftest import COUNTER, MASKED_COUNTER, MakeEnv

from reagent_lite.errors import SimulationError
from reagent_lite.sim.env import VectorEnv

ONE = torch.ones(1)


def play(counter: MakeEnv, q: list[float] | None, mask: list[bool] | None = None, **policy: float) -> VectorEnv:
    """100 000 environments that draw one action each."""
    env = counter(COUNTER if mask is None else MASKED_COUNTER, num_envs=100_000)
    if mask is not None:
        assert env.mask is not None
        env.mask.copy_(torch.tensor(mask).expand(env.num_envs, -1))
    values = None if q is None else torch.tensor(q).repeat(env.num_envs, 1)
    env.act(values, epsilon=torch.tensor([policy.get("epsilon", 0.0)]), temperature=policy.get("temperature", 0.0))
    return env


def require_probabilities(env: VectorEnv, expected: list[float]) -> None:
    """Actions are as frequent as they should be, and each propensity is its action's probability."""
    counts = np.bincount(env.action.numpy(), minlength=3)
    np.testing.assert_allclose(env.propensity.numpy(), np.array(expected)[env.action.numpy()], rtol=1e-6)
    possible = np.array(expected) > 0
    assert counts[~possible].sum() == 0
    if possible.sum() > 1:
        assert stats.chisquare(counts[possible], env.num_envs * np.array(expected)[possible]).pvalue > 1e-4


UNEQUAL = [1.0, 3.0, 2.0]
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("q", "epsilon", "mask", "expected"),
    [
        (UNEQUAL, 0.3, None, [0.1, 0.8, 0.1]),  # 0.3 / 3 each, and 0.7 on the greatest
        (UNEQUAL, 0.0, None, [0, 1, 0]),
        (UNEQUAL, 1.0, None, [1 / 3, 1 / 3, 1 / 3]),
        ([2.0, 1.0, 2.0], 0.3, None, [0.8, 0.1, 0.1]),  # the first of equals
        ([NAN, -5.0, -6.0], 0.3, None, [0.1, 0.8, 0.1]),
        ([NAN] * 3, 0.0, None, [1, 0, 0]),
        ([-INF, -INF, -1e38], 0.0, None, [0, 0, 1]),
        ([0.0, INF, 1.0], 0.0, None, [0, 1, 0]),
        (None, 0.0, None, [1 / 3, 1 / 3, 1 / 3]),
        (UNEQUAL, 0.4, [True, False, True], [0.2, 0, 0.8]),  # 0.4 / 2 each, and 0.6 on the better
        (UNEQUAL, 0.4, [True, False, False], [1, 0, 0]),
        ([NAN, 3.0, NAN], 0.0, [True, False, True], [1, 0, 0]),
        (None, 0.0, [False, True, True], [0, 0.5, 0.5]),
    ],
)
def test_epsilon_greedy(
    counter: MakeEnv, q: list[float] | None, epsilon: float, mask: list[bool] | None, expected: list[float]
) -> None:
    require_probabilities(play(counter, q, mask, epsilon=epsilon), expected)


POWERS = np.exp(UNEQUAL)


@pytest.mark.parametrize(
    ("q", "temperature", "mask", "expected"),
    [
        (UNEQUAL, 1.0, None, POWERS / POWERS.sum()),
        (UNEQUAL, 0.5, None, POWERS**2 / (POWERS**2).sum()),
        (UNEQUAL, 10.0, None, POWERS**0.1 / (POWERS**0.1).sum()),
        (UNEQUAL, 1.0, [True, False, True], POWERS * [1, 0, 1] / POWERS[[0, 2]].sum()),
        ([3e38, -3e38, 0.0], 1.0, None, [1, 0, 0]),
        ([INF, INF, 0.0], 1.0, None, [0.5, 0.5, 0]),
        ([NAN, 0.0, 0.0], 1.0, None, [0, 0.5, 0.5]),
        ([NAN] * 3, 1.0, None, [1 / 3, 1 / 3, 1 / 3]),
        ([1e-30, 0.0, -1e-30], 1.0, None, [1 / 3, 1 / 3, 1 / 3]),
    ],
)
def test_softmax(
    counter: MakeEnv, q: list[float], temperature: float, mask: list[bool] | None, expected: list[float]
) -> None:
    require_probabilities(play(counter, q, mask, temperature=temperature), list(expected))


def test_nothing_allowed(counter: MakeEnv) -> None:
    env = play(counter, [1.0, 3.0, 2.0], [False, False, False], epsilon=0.5)
    assert not env.action.any()
    assert (env.propensity == 1).all()
    with pytest.raises(SimulationError, match="100000 that are not"):
        env.check()


def test_the_draw_inverts_the_distribution_function(counter: MakeEnv) -> None:
    env = counter(num_envs=1000, first_env=3, seed=8, stream=1)
    env.step()
    env.act(torch.tensor([[1.0, 3.0, 2.0]]).repeat(1000, 1), epsilon=torch.tensor([0.3]))
    word = philox.draws(1, np.arange(1000) + 3, env.episode.numpy(), philox.ACT, env.step_count.numpy() << 8, (8, 1))
    u = philox.uniform(word)[:, 0]
    assert env.action.tolist() == (1 * (u >= 0.1) + 1 * (u >= 0.9)).tolist()


def test_many_actions(counter: MakeEnv) -> None:
    source = COUNTER.replace("NUM_ACTIONS 3", "NUM_ACTIONS 300")
    env = counter(source, num_envs=1000)
    assert env.action.dtype == torch.int32
    q = torch.zeros(1000, 300)
    q[:, 299] = 1
    env.act(q, epsilon=torch.zeros(1))
    assert (env.action == 299).all()
    env.act(None, epsilon=ONE)
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


def test_values_of_another_shape_are_refused(counter: MakeEnv) -> None:
    env = counter(num_envs=4)
    for shape in ((4, 2), (3, 3), (12,)):
        with pytest.raises(SimulationError, match=r"q.*\[4, 3\]"):
            env.act(torch.zeros(shape), epsilon=ONE)

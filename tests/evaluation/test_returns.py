"""Returns in simulation: by hand on episodes of known length, no bias to short episodes."""

from pathlib import Path

import pytest
import torch
from oracles import gridworld
from torch import Tensor

from reagent_lite.config.environment import EnvironmentConfig
from reagent_lite.errors import SimulationError
from reagent_lite.evaluation.returns import play
from reagent_lite.sim.backend import open_backend
from reagent_lite.sim.env import ObservationPolicy, VectorEnv
from reagent_lite.sim.experience import Actor

# An episode lasts 2 or 8 steps, drawn at its start; each step pays 1. Action 1 ends it at once.
COIN = """
#define NUM_ACTIONS 2
#define OBSERVATION_SIZE 1
#define TIME_LIMIT 100
#define STATE(FIELD, ARRAY) FIELD(int, left)
DECLARE_ENVIRONMENT
DEVICE void reset(State &s, Random &random) { s.left = bernoulli(random, 0.5f) ? 2 : 8; }
DEVICE void observe(const State &s, float *observation) { observation[0] = float(s.left); }
DEVICE float step(State &s, int action, Random &random, bool &terminated) {
  s.left -= 1;
  terminated = (s.left <= 0) | (action == 1);
  return 1.0f;
}
"""


def coins(folder: Path, num_envs: int, *, time_limit: int = 100, source: str = COIN) -> VectorEnv:
    (folder / "coin.cuh").write_text(source)
    backend = open_backend(EnvironmentConfig(env=str(folder / "coin.cuh"), backend="cpu"), torch.device("cpu"))
    return VectorEnv(backend, num_envs=num_envs, seed=5, time_limit=time_limit)


def stay(observation: Tensor, mask: Tensor | None, features: Tensor | None) -> Tensor:
    return torch.tensor([1.0, 0.0]).expand(len(observation), 2)


def played(env: VectorEnv, policy: ObservationPolicy, gamma: float = 1.0, epsilon: float = 0.0) -> Tensor:
    """Total and discounted return, length, and whether the time limit has cut it, of each episode [4, N]."""
    (table,) = play(env, [Actor(policy=policy, epsilon=torch.tensor([epsilon]))], gamma=gamma)
    return table


def test_each_environment_counts_once_with_its_first_episode(tmp_path: Path) -> None:
    env = coins(tmp_path, 4000)
    env.reset()
    first = env.observation[:, 0].double().clone()
    # 1 + 1/2, or 1 + ... + 1/128
    discounted = torch.where(first == 2, 1.5, 2 - 2.0**-7).double()
    assert torch.equal(played(env, stay, gamma=0.5), torch.stack((first, discounted, first, 0 * first)))
    assert first.mean() == pytest.approx(5, abs=4 * 3 / 4000**0.5)  # not 3.2, as by episodes ended per step


def test_infinite_returns_are_refused_where_other_episodes_have_followed(tmp_path: Path) -> None:
    env = coins(tmp_path, 3, source=COIN.replace("return 1.0f", "return 1.0f + float(action) * 3e38f * 10.0f"))
    ends = iter([-1.0, 1.0])  # the second step ends all episodes
    with pytest.raises(SimulationError, match="rewards of coin: expected finite"):
        played(env, lambda *seen: torch.tensor([0.0, next(ends, -1.0)]).expand(3, 2))


def test_a_time_limit_truncates(tmp_path: Path) -> None:
    total, _, _, truncated = played(coins(tmp_path, 50, time_limit=5), stay)
    assert torch.equal(total, torch.where(truncated == 0, 2.0, 5.0).double())
    assert 0 < truncated.sum() < 50


def test_episodes_that_are_over_are_not_decided_any_more() -> None:
    """The policy acts in fewer and fewer environments; each episode is the same as if its environment played alone."""
    backend = open_backend(EnvironmentConfig(env="gridworld", backend="cpu"), torch.device("cpu"))
    weight = torch.from_numpy(gridworld.optimal_q()).float()
    asked = []

    def values(observation: Tensor, mask: Tensor, features: Tensor | None) -> Tensor:
        assert len(mask) == len(observation)
        asked.append(len(observation))
        return observation @ weight

    def episode(first: int, count: int) -> Tensor:
        return played(VectorEnv(backend, num_envs=count, first_env=first, seed=3), values, gamma=0.9, epsilon=0.8)

    together = episode(0, 400)
    assert min(asked) < 50 < asked[0] == 400
    torch.testing.assert_close(together[1], 10 * 0.9 ** (together[2] - 1))  # the discounted return, and the length
    assert not together[3].any()
    for number in together[2].argsort()[[0, 100, 200, 300, 390, 395, 399]].tolist():
        assert torch.equal(episode(number, 1)[:, 0], together[:, number])

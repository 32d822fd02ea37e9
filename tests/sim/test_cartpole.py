"""CartPole is Gymnasium's: one step from the same state, starts, limits, rewards."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleEnv, CartPoleVectorEnv
from numpy.typing import NDArray
from scipy import stats
from sim.conftest import MakeEnv

from reagent_lite.sim.cpu import CpuBackend
from reagent_lite.sim.env import VectorEnv
from reagent_lite.sim.sources import find_environment

NUM = 100_000
SCALE = np.array([2.4, 10.0, 0.21, 10.0])  # of position, speed, angle, angular speed
LIMIT = np.array([2.4, np.deg2rad(12)])


def states(num: int, seed: int = 0) -> NDArray[np.float32]:
    """[4, num] in and a little beyond the limits, at speeds that players reach."""
    high = np.array([[2.5], [5.0], [0.25], [5.0]])
    return np.random.default_rng(seed).uniform(-high, high, (4, num)).astype(np.float32)


def step_ours(env: VectorEnv, state: NDArray[np.float32], action: int) -> None:
    for name, row in zip(("x", "v", "theta", "omega"), state, strict=True):
        env.field(name).copy_(torch.from_numpy(row))
    env.step_count.zero_()
    env.action.fill_(action)
    env.step()


def compare(env: VectorEnv, truth: NDArray[np.float64], ended: NDArray[np.bool_], where: str) -> None:
    """Ours after a step, [N, 4], against the truth, [4, N]."""
    error = np.abs(env.next_observation.numpy() - truth.T)
    assert (error / SCALE).max() < 1e-6, where
    margin = np.abs(np.abs(truth[[0, 2]]) / LIMIT[:, None] - 1).min(0)
    clear = margin > 1e-6
    assert clear.mean() > 0.99
    assert np.array_equal(env.terminated.numpy()[clear], ended[clear]), where
    assert not env.truncated.any()
    assert (env.reward == 1).all()


@pytest.mark.parametrize("action", [0, 1])
def test_one_step_from_any_state_as_gymnasiums_vector_environment(cartpole: MakeEnv, action: int) -> None:
    state = states(NUM)
    theirs = CartPoleVectorEnv(num_envs=NUM)
    theirs.reset(seed=0)
    theirs.state = state.astype(np.float64)
    _, reward, terminated, _, _ = theirs.step(np.full(NUM, action))
    ours = cartpole(num_envs=NUM)
    step_ours(ours, state, action)
    compare(ours, theirs.state, terminated, f"action {action}")
    assert (reward == 1).all()  # the last step counts too
    assert 0.1 < terminated.mean() < 0.9


@pytest.mark.parametrize("action", [0, 1])
def test_one_step_from_any_state_as_gymnasiums_environment(cartpole: MakeEnv, action: int) -> None:
    num = 5000
    state = states(num, seed=1)
    theirs = CartPoleEnv()
    theirs.reset(seed=0)
    after, ended = np.empty((4, num)), np.empty(num, bool)
    for i in range(num):
        theirs.state = state[:, i].astype(np.float64)
        theirs.steps_beyond_terminated = None
        _, _, ended[i], _, _ = theirs.step(action)
        after[:, i] = theirs.state
    ours = cartpole(num_envs=num)
    step_ours(ours, state, action)
    compare(ours, after, ended, f"action {action}")


def test_fast_mathematics_is_as_near(cartpole: MakeEnv) -> None:
    state = states(NUM)
    exact = cartpole(num_envs=NUM)
    fast = VectorEnv(CpuBackend(find_environment("cartpole_v1"), {}, "fast"), num_envs=NUM)
    fast.reset()
    for env in (exact, fast):
        step_ours(env, state, 1)
    error = (exact.next_observation - fast.next_observation).abs().numpy() / SCALE
    assert error.max() < 1e-6


def test_starts_are_uniform(cartpole: MakeEnv) -> None:
    env = cartpole(num_envs=NUM, seed=3)
    start = env.observation.numpy().astype(np.float64)
    assert np.abs(start).max() <= 0.05
    for column in start.T:
        assert stats.kstest(column, stats.uniform(-0.05, 0.1).cdf).pvalue > 1e-3
    correlation = np.corrcoef(start.T) - np.eye(4)
    assert np.abs(correlation).max() < 5 / np.sqrt(NUM)


@pytest.mark.parametrize(("name", "limit"), [("cartpole_v0", 200), ("cartpole_v1", 500)])
def test_time_limits_are_gymnasiums(cartpole: MakeEnv, name: str, limit: int) -> None:
    env = cartpole(name, num_envs=4)
    assert env.time_limit == limit == gymnasium.spec(name.replace("cartpole_", "CartPole-")).max_episode_steps
    assert env.spec.name == name


def test_limits_are_where_gymnasium_ends() -> None:
    theirs = CartPoleEnv()
    assert theirs.x_threshold == 2.4
    assert theirs.theta_threshold_radians == pytest.approx(np.deg2rad(12))
    assert np.float32(0.20943951) == np.float32(np.deg2rad(12))


def test_a_balancing_policy_reaches_the_time_limit(cartpole: MakeEnv) -> None:
    env = cartpole(num_envs=1000)
    for _ in range(500):
        env.action.copy_((env.observation[:, 2] + env.observation[:, 3]) > 0)
        env.step()
    full = env.last_length == 500
    assert full.float().mean() > 0.3  # pushing towards where the pole falls balances it
    assert env.truncated[full].all()
    assert not env.terminated[full].any()
    assert (env.last_return[full] == 500).all()


def test_random_play_lasts_as_long_as_gymnasiums(cartpole: MakeEnv) -> None:
    env = cartpole(num_envs=20_000)
    length = torch.zeros(20_000)
    running = torch.ones(20_000, dtype=torch.bool)
    while running.any():
        env.act(None, epsilon=torch.ones(1))
        env.step()
        length += running
        running &= env.ended == 0
    theirs = CartPoleVectorEnv(num_envs=4000)
    theirs.reset(seed=1)
    rng = np.random.default_rng(2)  # not the seed of the starts, or these depend on each other
    lengths, alive = np.zeros(4000), np.ones(4000, bool)
    while alive.any():
        _, _, terminated, _, _ = theirs.step(rng.integers(0, 2, 4000))
        lengths += alive
        alive &= ~terminated
    assert stats.ks_2samp(length.numpy(), lengths).pvalue > 1e-3


def test_a_lighter_pole_falls_otherwise(cartpole: MakeEnv) -> None:
    state = states(1000)
    usual, light = (
        cartpole(num_envs=1000, parameters=parameters) for parameters in ({}, {"pole_mass": 0.05, "gravity": 1.62})
    )
    theirs = CartPoleVectorEnv(num_envs=1000)
    theirs.reset(seed=0)
    theirs.gravity, theirs.masspole = 1.62, 0.05
    theirs.total_mass = theirs.masspole + theirs.masscart
    theirs.polemass_length = theirs.masspole * theirs.length
    theirs.state = state.astype(np.float64)
    _, _, terminated, _, _ = theirs.step(np.ones(1000, int))
    for env in (usual, light):
        step_ours(env, state, 1)
    compare(light, theirs.state, terminated, "on the Moon")
    assert not torch.equal(usual.next_observation, light.next_observation)
    assert light.spec.parameters["gravity"] == pytest.approx(1.62)

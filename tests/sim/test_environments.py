"""What every environment of the kernels folder keeps: shapes, finite numbers, counters, the same bits however run."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from oracles.episodes import environments
from torch import Tensor

from reagent_lite.sim.env import VectorEnv
from reagent_lite.sim.sources import find_environment, known_environments

every_environment = pytest.mark.parametrize("name", known_environments())


def outputs(env: VectorEnv) -> Iterator[Tensor]:
    """Everything an environment writes."""
    yield from (env.observation, env.next_observation, env.action, env.propensity, env.reward, env.ended)
    yield from (env.last_return, env.last_length, env.episode, env.step_count, env.episode_return)
    for tensor in (env.mask, env.next_mask, env.features, env.next_features):
        if tensor is not None:
            yield tensor
    for field in env.spec.fields:
        yield env.field(field.name).view(field.size, -1).T


def rows_hash(env: VectorEnv, steps: int) -> list[str]:
    """Hash per environment of everything written over random steps."""
    hashes = [hashlib.sha256() for _ in range(env.num_envs)]
    for _ in range(steps):
        env.act(None, epsilon=torch.ones(1))
        env.step()
        columns = [tensor.reshape(env.num_envs, -1).contiguous().numpy() for tensor in outputs(env)]
        for i, digest in enumerate(hashes):
            for column in columns:
                digest.update(column[i].tobytes())
    return [digest.hexdigest() for digest in hashes]


def test_every_file_is_an_environment() -> None:
    assert {"acrobot", "cartpole_v0", "cartpole_v1", "gridworld", "mountain_car", "mountain_car_continuous"} <= set(
        known_environments()
    )
    assert {"pendulum", "recommend"} <= set(known_environments())


@every_environment
def test_shapes_and_names(name: str) -> None:
    env = environments(name, 3, parametric=True)
    spec = env.spec
    assert env.observation.shape == env.next_observation.shape == (3, spec.observation_size)
    assert len(spec.action_names) == len(set(spec.action_names)) == spec.num_actions
    assert (env.mask is not None) == (spec.masked or spec.candidates)
    for mask in (env.mask, env.next_mask):
        assert mask is None or mask.shape == (3, spec.num_actions)
    for features in (env.features, env.next_features):
        assert features is not None
        assert features.shape == (3, spec.num_actions, spec.action_feature_size)
    if not spec.candidates:
        rows = np.array(spec.action_features)
        assert len(np.unique(rows, axis=0)) == spec.num_actions  # choices that look the same could not be told apart


@every_environment
def test_header_says_what_it_is(name: str) -> None:
    lines = find_environment(name).read_text(encoding="utf-8").splitlines()
    header = "\n".join(lines[: next(i for i, line in enumerate(lines) if not line.startswith("//"))])
    if name == "cartpole_v0":  # says that it is cartpole_v1 with another limit
        assert "CartPole-v1" in header
        return
    for word in ("Source", "State", "Actions", "Reward", "Start", "Ends", "Limit"):
        assert f"// {word} " in header


@every_environment
def test_random_episodes(name: str) -> None:
    num, steps = 64, 300
    env = environments(name, num, seed=3, parametric=True)
    assert torch.isfinite(env.observation).all()
    assert env.observation.abs().max() < 100
    ends = torch.zeros(num, dtype=torch.int32)
    length, total = torch.zeros(num, dtype=torch.int32), torch.zeros(num)
    for _ in range(steps):
        env.act(None, epsilon=torch.ones(1))
        if env.mask is not None:
            assert env.mask[torch.arange(num), env.action.long()].all()
        env.step()
        length, total = length + 1, total + env.reward
        for tensor in (env.observation, env.next_observation, env.reward, env.features, env.next_features):
            assert tensor is None or torch.isfinite(tensor).all()
        assert ((env.ended >= 0) & (env.ended <= 2)).all()  # terminated or truncated, never both
        over = env.ended != 0
        assert torch.equal(env.last_length[over], length[over])
        assert torch.equal(env.last_return[over], total[over])  # both sum in float32, in the same order
        assert (length[env.truncated] == env.time_limit).all()
        assert torch.equal(env.next_observation[~over], env.observation[~over])
        ends += over
        length[over], total[over] = 0, 0.0
        assert torch.equal(env.step_count, length)
        assert torch.equal(env.episode_return, total)
    assert torch.equal(env.episode, ends)
    env.check()


@every_environment
def test_same_numbers_however_split(name: str) -> None:
    whole = rows_hash(environments(name, 37, seed=8, first_env=100, time_limit=12, parametric=True), 40)
    first = rows_hash(environments(name, 20, seed=8, first_env=100, time_limit=12, parametric=True), 40)
    second = rows_hash(environments(name, 17, seed=8, first_env=120, time_limit=12, parametric=True), 40)
    assert whole == first + second
    assert len(set(whole)) == 37
    other = rows_hash(environments(name, 37, seed=9, first_env=100, time_limit=12, parametric=True), 40)
    assert not set(whole) & set(other)


@every_environment
def test_same_bits_at_any_optimization(name: str) -> None:
    fast, plain = (
        rows_hash(environments(name, 33, seed=2, time_limit=60, parametric=True, optimization=level), 100)
        for level in ("-O3", "-O0")
    )
    assert fast == plain

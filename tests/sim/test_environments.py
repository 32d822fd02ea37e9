"""What every environment of the kernels folder keeps: shapes, finite numbers, counters, the same bits however run."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from sim.conftest import environments
from torch import Tensor

from reagent_lite.sim import cpu
from reagent_lite.sim.compiler import find_compiler, zig_compiler
from reagent_lite.sim.cpu import CpuBackend
from reagent_lite.sim.env import VectorEnv
from reagent_lite.sim.sources import find_environment, known_environments

every_environment = pytest.mark.parametrize("name", known_environments())


def outputs(env: VectorEnv) -> Iterator[Tensor]:
    """Everything an environment writes."""
    yield from (env.observation, env.next_observation, env.action, env.propensity, env.reward, env.ended)
    yield from (env.last_return, env.last_length, env.episode, env.step_count, env.episode_return)
    features = (env.features, env.next_features) if env.spec.candidates else ()
    for tensor in (env.mask, env.next_mask, *features, env.in_game, env.next_in_game):
        if tensor is not None:
            yield tensor
    for field in env.spec.fields:
        yield env.field(field.name).view(field.size, -1).T.contiguous()


def backend(name: str = "cartpole_v1", optimization: str = "-O3", threads: int = 1, *, zig: bool = False) -> CpuBackend:
    compiler = zig_compiler() if zig else find_compiler()
    path = find_environment(name)
    return CpuBackend(path, {}, "exact", threads=threads, optimization=optimization, compiler=compiler)


def digest(opened: CpuBackend, steps: int, *sizes: int) -> str:
    """sha256 of everything that environments write, as if they were one, over steps of drawn actions."""
    firsts = np.cumsum([0, *sizes])
    settings = {"seed": 11, "stream": 3, "time_limit": 60, "parametric": True}
    envs = [
        VectorEnv(opened, num_envs=num, first_env=100 + int(first), **settings)
        for num, first in zip(sizes, firsts, strict=False)
    ]
    rows = [size * opened.spec.agents for size in sizes]
    q = torch.randn(sum(rows), opened.spec.num_actions, generator=torch.Generator().manual_seed(0))
    everything = hashlib.sha256()
    for env in envs:
        env.reset()
    for step in range(steps):
        for env, values in zip(envs, q.split(rows), strict=True):
            env.act(values if step % 3 else None, epsilon=torch.tensor([0.2]), temperature=0.5 * (step % 2))
            env.step()
        for parts in zip(*map(outputs, envs), strict=True):
            everything.update(torch.cat(parts).numpy().data)
    return everything.hexdigest()


@every_environment
def test_shapes_and_names(name: str) -> None:
    env = environments(name, 3, parametric=True)
    spec = env.spec
    rows = 3 * spec.agents
    assert env.observation.shape == env.next_observation.shape == (rows, spec.observation_size)
    assert (env.in_game is not None) == (spec.agents > 1)
    assert len(spec.action_names) == len(set(spec.action_names)) == spec.num_actions
    assert (env.mask is not None) == (spec.masked or spec.candidates)
    for mask in (env.mask, env.next_mask):
        assert mask is None or mask.shape == (rows, spec.num_actions)
    for features in (env.features, env.next_features):
        assert features is not None
        assert features.shape == (rows, spec.num_actions, spec.action_feature_size)
    if not spec.candidates:
        rows = np.array(spec.action_features)
        assert len(np.unique(rows, axis=0)) == spec.num_actions  # choices that look the same could not be told apart


@pytest.mark.parametrize("name", [name for name in known_environments() if name != "cartpole_v0"])  # another's limit
def test_header_says_what_it_is(name: str) -> None:
    header = re.findall(r"^// (\w+) ", find_environment(name).read_text(), re.MULTILINE)
    assert {"Source", "State", "Actions", "Reward", "Start", "Ends", "Limit"} <= set(header)


@every_environment
def test_random_episodes(name: str) -> None:
    num = 64
    env = environments(name, num, seed=3, parametric=True)
    changing = [env.features, env.next_features] if env.spec.candidates else []
    for _ in range(300):
        for tensor in (env.observation, env.next_observation, env.reward, *changing):
            assert tensor is not None
            assert torch.isfinite(tensor).all()
        env.act(None, epsilon=torch.ones(1))
        assert env.mask is None or env.mask[torch.arange(num), env.action.long()].all()
        env.step()
        assert ((env.ended >= 0) & (env.ended <= 2)).all()  # terminated or truncated, never both
        assert (env.last_length[env.truncated] == env.time_limit).all()
        going_on = (env.ended == 0).repeat_interleave(env.spec.agents)
        assert torch.equal(env.next_observation[going_on], env.observation[going_on])
    assert env.observation.abs().max() < 100
    env.check()


@pytest.mark.parametrize(
    ("name", "steps"),
    [*((name, 60) for name in known_environments()), pytest.param("cartpole_v1", 10_000, marks=pytest.mark.slow)],
)
def test_same_bits_from_every_optimization_division_and_number_of_threads(
    name: str, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    num = 100 if backend(name).spec.agents > 1 else 1100  # two blocks, the last one cut short
    expected = digest(backend(name), steps, num)
    assert digest(backend(name), steps, 1, 63, num - 64) == expected
    assert digest(backend(name, "-O0"), steps, num) == expected
    monkeypatch.setattr(cpu, "_WORDS_PER_SLICE", 8)
    for threads in (2, 16):
        assert digest(backend(name, threads=threads), steps, num) == expected


@pytest.mark.parametrize("optimization", ["-O0", "-O3"])
@pytest.mark.parametrize("name", ["cartpole_v1", "gridworld", "recommend"])
def test_same_bits_from_another_compiler(name: str, optimization: str) -> None:
    assert digest(backend(name, optimization, zig=True), 60, 1100) == digest(backend(name), 60, 1100)


def test_seed_and_stream_change_everything() -> None:
    usual, *others = (
        VectorEnv(backend(), num_envs=1000, seed=seed, stream=stream) for seed, stream in ((11, 3), (12, 3), (11, 4))
    )
    for env in (usual, *others):
        env.reset()
        env.act(None, epsilon=torch.ones(1))
    for other in others:
        assert (other.observation == usual.observation).float().mean() < 0.01
        assert (other.action == usual.action).float().mean() == pytest.approx(0.5, abs=0.06)

"""What every environment of the kernels folder keeps: shapes, finite numbers, counters, the same bits however run."""

from __future__ import annotations

import hashlib
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
    changing = (env.features, env.next_features) if env.spec.candidates else ()
    ends = torch.zeros(num, dtype=torch.int32)
    length, total = torch.zeros(num, dtype=torch.int32), torch.zeros(env.num_rows)
    for _ in range(steps):
        env.act(None, epsilon=torch.ones(1))
        if env.mask is not None:
            assert env.mask[torch.arange(num), env.action.long()].all()
        env.step()
        length, total = length + 1, total + env.reward
        for tensor in (env.observation, env.next_observation, env.reward, *changing):
            assert tensor is None or torch.isfinite(tensor).all()
        assert ((env.ended >= 0) & (env.ended <= 2)).all()  # terminated or truncated, never both
        over = env.ended != 0
        over_rows = over.repeat_interleave(env.spec.agents)
        assert torch.equal(env.last_length[over], length[over])
        assert torch.equal(env.last_return[over_rows], total[over_rows])  # both sum in float32, in the same order
        assert (length[env.truncated] == env.time_limit).all()
        assert torch.equal(env.next_observation[~over_rows], env.observation[~over_rows])
        ends += over
        length[over], total[over_rows] = 0, 0.0
        assert torch.equal(env.step_count, length)
        assert torch.equal(env.episode_return, total)
    assert torch.equal(env.episode, ends)
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

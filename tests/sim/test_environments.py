"""What every environment of the kernels folder keeps: shapes, finite numbers, counters, the same bits however run."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
from helpers.same_bits import play
from sim.conftest import environments, play_divided

from reagent_lite.sim import cpu
from reagent_lite.sim.compiler import find_compiler, zig_compiler
from reagent_lite.sim.cpu import CpuBackend
from reagent_lite.sim.env import VectorEnv
from reagent_lite.sim.kernel_sources import find_environment, known_environments

every_environment = pytest.mark.parametrize("name", known_environments())


SETTINGS = {"seed": 11, "stream": 3, "time_limit": 60, "parametric": True}


def opened(
    name: str, num: int, optimization: str = "-O3", threads: int = 1, compiler: Any = find_compiler
) -> VectorEnv:
    backend = CpuBackend(find_environment(name), {}, "exact", threads=threads, optimization=optimization,
                         compiler=compiler())  # fmt: skip
    return VectorEnv(backend, num_envs=num, first_env=100, **SETTINGS)


@every_environment
def test_shapes_and_random_episodes(name: str) -> None:
    num = 64
    env = environments(name, num, seed=3, parametric=True)
    spec = env.spec
    rows, choices = num * spec.agents, spec.num_actions
    expected = {"observation": (rows, spec.observation_size), "features": (rows, choices, spec.action_feature_size),
                "mask": (rows, choices) if spec.masked or spec.candidates else (),
                "in_game": (rows,) if spec.agents > 1 else ()}  # fmt: skip
    for prefix in ("", "next_"):
        assert {name: getattr(getattr(env, prefix + name), "shape", ()) for name in expected} == expected
    assert len(spec.action_names) == len(set(spec.action_names)) == spec.num_actions
    # choices that look the same could not be told apart
    assert spec.candidates or len(spec.action_features.unique(dim=0)) == spec.num_actions
    changing = [env.features, env.next_features] if env.spec.candidates else []
    for _ in range(300):
        assert all(torch.isfinite(x).all() for x in (env.observation, env.next_observation, env.reward, *changing))
        env.act(None, epsilon=torch.ones(1))
        assert env.mask is None or env.mask[torch.arange(num), env.action.long()].all()
        env.step()
        assert ((env.ended >= 0) & (env.ended <= 2)).all()  # terminated or truncated, never both
        assert (env.last_length[env.truncated] == env.time_limit).all()
        going_on = (env.ended == 0).repeat_interleave(env.spec.agents)
        assert torch.equal(env.next_observation[going_on], env.observation[going_on])
    assert env.observation.abs().max() < 100
    env.check()


@pytest.mark.parametrize("name", [name for name in known_environments() if name != "cartpole_v0"])  # another's limit
def test_header_says_what_it_is(name: str) -> None:
    assert {"Source", "State", "Actions", "Reward", "Start", "Ends", "Limit"} <= set(
        re.findall(r"^// (\w+) ", find_environment(name).read_text(), re.MULTILINE)
    )


@pytest.mark.parametrize(
    ("name", "steps"),
    [*((name, 60) for name in known_environments()), pytest.param("cartpole_v1", 10_000, marks=pytest.mark.slow)],
)
def test_same_bits_from_every_optimization_and_number_of_threads(
    name: str, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    num = 100 if name.startswith("tag") else 1100  # two blocks, the last one cut short
    monkeypatch.setattr(cpu, "_WORDS_PER_SLICE", 8)
    play([opened(name, num, *build) for build in (("-O3", 1), ("-O0", 1), ("-O3", 2), ("-O3", 16))], steps)


@every_environment
def test_same_bits_from_every_division(name: str) -> None:
    play_divided(partial(environments, name, **SETTINGS), 1100, 60)


@pytest.mark.parametrize("optimization", ["-O0", "-O3"])
@pytest.mark.parametrize("name", ["cartpole_v1", "gridworld", "recommend"])
def test_same_bits_from_another_compiler(name: str, optimization: str) -> None:
    play([opened(name, 1100), opened(name, 1100, optimization, compiler=zig_compiler)], 60)

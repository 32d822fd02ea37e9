"""The same bits from every compiler, optimization, number of threads, and division of the environments."""

import hashlib
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from reagent_lite.sim import cpu
from reagent_lite.sim.compiler import find_compiler, zig_compiler
from reagent_lite.sim.cpu import CpuBackend
from reagent_lite.sim.env import VectorEnv
from reagent_lite.sim.sources import find_environment

NAMES = ("observation", "next_observation", "reward", "ended", "action", "propensity", "last_return", "last_length")
Backend = Callable[[], CpuBackend]


def backend(
    compiler: str = "g++", optimization: str = "-O3", threads: int = 1, name: str = "cartpole_v1"
) -> CpuBackend:
    found = zig_compiler() if compiler == "zig" else find_compiler()
    path = find_environment(name)
    return CpuBackend(path, {}, "exact", threads=threads, optimization=optimization, compiler=found)


def digest(envs: Sequence[VectorEnv], steps: int, q: Tensor | None = None) -> str:
    """sha256 of everything that environments write, as if they were one, over steps of drawn actions."""
    everything = hashlib.sha256()
    epsilon = torch.tensor([0.2])
    for env in envs:
        env.reset()
    for step in range(steps):
        first = 0
        for env in envs:
            own = None if q is None else q[first : first + env.num_envs]
            env.act(own, epsilon=epsilon, temperature=0.5 * (step % 2))
            env.step()
            first += env.num_envs
        for name in NAMES:
            everything.update(torch.cat([getattr(env, name) for env in envs]).numpy().data)
        for field in envs[0].spec.fields:
            everything.update(torch.cat([env.field(field.name) for env in envs], -1).numpy().data)
    return everything.hexdigest()


def one(opened: CpuBackend, num_envs: int = 1000) -> list[VectorEnv]:
    return [VectorEnv(opened, num_envs=num_envs, seed=11, stream=3)]


def two(opened: CpuBackend, num_envs: int = 1000) -> list[VectorEnv]:
    half = num_envs // 2
    return [VectorEnv(opened, num_envs=half, first_env=first, seed=11, stream=3) for first in (0, half)]


@pytest.fixture(scope="module")
def short() -> str:
    return digest(one(backend()), 1000)


@pytest.mark.parametrize("optimization", ["-O0", "-O1", "-O3"])
@pytest.mark.parametrize("compiler", ["g++", "zig"])
def test_compilers_and_optimizations_agree(compiler: str, optimization: str, short: str) -> None:
    assert digest(one(backend(compiler, optimization)), 1000) == short


def test_slices_agree_with_one(short: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_WORDS_PER_SLICE", 8)
    for threads in (2, 3, 16):
        assert digest(one(backend(threads=threads)), 1000) == short


@pytest.mark.parametrize("name", ["cartpole_v1", "gridworld", "recommend"])
def test_policies_agree_across_compilers_blocks_and_slices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    num = 2600  # three blocks, the last one cut short
    monkeypatch.setattr(cpu, "_WORDS_PER_SLICE", 8)
    expected = backend(name=name)
    q = torch.randn(num, expected.spec.num_actions, generator=torch.Generator().manual_seed(0))
    first = digest(one(expected, num), 60, q)
    assert digest(two(backend(name=name), num), 60, q) == first
    assert digest(one(backend(name=name, threads=3), num), 60, q) == first
    assert digest(one(backend("zig", name=name), num), 60, q) == first
    assert digest(one(backend(optimization="-O0", name=name), num), 60, q) == first


@pytest.mark.parametrize("num_envs", [1, 7, 63, 64, 65, 1023, 1024, 1025])
def test_an_environment_does_not_depend_on_its_neighbours(num_envs: int) -> None:
    opened = backend()
    many, few = VectorEnv(opened, num_envs=2000, seed=4), VectorEnv(opened, num_envs=num_envs, seed=4)
    for env in (many, few):
        env.reset()
        for _ in range(80):
            env.act(None, epsilon=torch.ones(1))
            env.step()
    for name in NAMES:
        assert torch.equal(getattr(few, name), getattr(many, name)[:num_envs]), name


@pytest.mark.slow
def test_ten_thousand_steps_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = digest(one(backend()), 10_000)
    assert digest(one(backend(optimization="-O0")), 10_000) == expected
    assert digest(one(backend("zig")), 10_000) == expected
    assert digest(one(backend("zig", "-O0")), 10_000) == expected
    assert digest(two(backend()), 10_000) == expected
    monkeypatch.setattr(cpu, "_WORDS_PER_SLICE", 8)
    assert digest(one(backend(threads=2)), 10_000) == expected


@pytest.mark.parametrize(("seed", "stream"), [(12, 3), (11, 4)])
def test_seed_and_stream_change_everything(seed: int, stream: int) -> None:
    opened = backend()
    other = VectorEnv(opened, num_envs=1000, seed=seed, stream=stream)
    usual = one(opened)[0]
    for env in (other, usual):
        env.reset()
        env.act(None, epsilon=torch.ones(1))
    assert (other.observation == usual.observation).float().mean() < 0.01
    assert (other.action == usual.action).float().mean() == pytest.approx(0.5, abs=0.06)

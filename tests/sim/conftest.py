"""Compiled environments and small compiled units, made once for all tests of this folder."""

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from oracles.team import TEAM

from reagent_lite.sim.compiler import KERNELS, find_compiler
from reagent_lite.sim.cpu import CpuBackend
from reagent_lite.sim.env import VectorEnv
from reagent_lite.sim.kernel_sources import find_environment

# Counts up by 1 + action from 0 and ends at `goal`: everything it does can be worked out in one's head.
COUNTER = """
#define NUM_ACTIONS 3
#define OBSERVATION_SIZE 2
#define TIME_LIMIT 100
#define PARAMETERS(P) P(goal, 4.0f) P(worth, 1.0f)
#define STATE(FIELD, ARRAY) FIELD(int, count) ARRAY(float, past, 2) FIELD(unsigned, lot)
DECLARE_ENVIRONMENT
DEVICE void reset(State &s, Random &random) {
  s.count = 0;
  s.past[0] = s.past[1] = -1.0f;
  s.lot = draw(random);
}
DEVICE void observe(const State &s, float *observation) {
  observation[0] = float(s.count);
  observation[1] = s.past[1];
}
DEVICE float step(State &s, int action, Random &random, bool &terminated) {
  s.past[1] = s.past[0];
  s.past[0] = float(action);
  s.count += 1 + action;
  terminated = s.count >= int(goal);
  return worth * float(s.count);
}
"""
# Only actions above the count are allowed.
MASKED_COUNTER = (
    COUNTER + "#define MASKED\nDEVICE bool allowed(const State &s, int action) { return action > s.count; }\n"
)

CompileUnit = Callable[..., ctypes.CDLL]


@pytest.fixture(scope="session")
def compile_unit(tmp_path_factory: pytest.TempPathFactory) -> CompileUnit:
    """Compiles a unit that includes kernel files, and opens it."""

    def compile_it(source: str, *flags: str) -> ctypes.CDLL:
        file = written(tmp_path_factory.mktemp("unit"), source, "unit.cpp")
        exact = ("-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-fopenmp-simd", "-shared", "-fPIC", "-w")
        subprocess.run(
            (*find_compiler().command, *exact, f"-I{KERNELS}", *flags, "unit.cpp", "-o", "unit.so"),
            check=True,
            cwd=file.parent,
        )
        return ctypes.CDLL(str(file.with_suffix(".so")))

    return compile_it


def environments(
    name_or_path: str | Path,
    num_envs: int,
    *,
    parameters: dict[str, float] | None = None,
    math: Literal["exact", "fast"] = "exact",
    **settings: Any,
) -> VectorEnv:
    """Environments on the CPU, already reset."""
    env = VectorEnv(
        CpuBackend(find_environment(str(name_or_path)), parameters or {}, math), num_envs=num_envs, **settings
    )
    env.reset()
    return env


def require_buffers(env: VectorEnv, **expected: list[Any]) -> None:
    """Asserts the contents of buffers and of variables of the state, as lists."""
    state = {field.name: env.field(field.name) for field in env.spec.fields}
    assert {name: (state[name] if name in state else getattr(env, name)).tolist() for name in expected} == expected


def take(env: VectorEnv, *actions: int, stay: bool = False, **expected: list[Any]) -> None:
    """Takes an action in each row, and asserts what buffers have then."""
    env.action.copy_(torch.tensor(actions))
    env.step(stay=stay)
    require_buffers(env, **expected)


def play_at_random(env: VectorEnv, steps: int = 1) -> None:
    """Takes uniformly drawn actions."""
    for _ in range(steps):
        env.act(None, epsilon=torch.ones(1))
        env.step()


def play_divided(make: Callable[..., VectorEnv], num: int, steps: int) -> VectorEnv:
    """Plays make(number of environments, first_env=number of the first) whole and in parts, which must be the same."""
    envs = [make(count, first_env=first) for count, first in ((num, 0), (1, 0), (63, 1), (num - 64, 64))]
    for env in envs:
        play_at_random(env, steps)
    whole, *parts = (env.state_dict() for env in envs)
    for column in whole.keys() - {"identity", "fault"}:
        assert torch.equal(torch.cat([part[column] for part in parts], int(column == "state")), whole[column]), column
    return envs[0]


MakeEnv = Callable[..., VectorEnv]


def written(folder: Path, text: str, name: str = "mine.cuh") -> Path:
    """Writes a file with the folders that it needs."""
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="latin-1")
    return file


@pytest.fixture
def counter(tmp_path: Path) -> MakeEnv:
    """Makes reset environments of the counter above, or of another text."""
    return lambda source=COUNTER, **settings: environments(written(tmp_path, source, "counter.cuh"), **settings)


@pytest.fixture
def team(tmp_path: Path) -> Path:
    """File of an environment of several agents."""
    return written(tmp_path, TEAM, "team.cuh")


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of compiled environments of the test's own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("REAGENT_LITE_CACHE", str(folder))
    return folder
